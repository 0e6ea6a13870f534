#include "comm/socket.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "engine/base/arena.h"
#include "engine/base/clock.h"

void socket_close(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

int socket_wait(int fd, int events, int64_t deadline)
{
    for (;;) {
        int64_t left = deadline - clock_ms();
        struct pollfd p = {.fd = fd, .events = (short)events};
        int ready = poll(&p, 1, left < 0 ? 0 : left > 1000 ? 1000 : (int)left);
        if (ready > 0)
            return p.revents;
        if (left <= 0)
            return 0;
    }
}

/* "[::1]" as in URLs is "::1" for the resolver. */
static enum status resolve(struct addrinfo **out, const char *address, int port, int flags)
{
    char host[256], service[16];
    size_t n = strlen(address);
    if (n >= sizeof host)
        return FAIL(INVALID, "an address of %zu characters is too long", n);
    bool brackets = n > 2 && address[0] == '[' && address[n - 1] == ']';
    snprintf(host, sizeof host, "%.*s", (int)(brackets ? n - 2 : n), address + (brackets ? 1 : 0));
    snprintf(service, sizeof service, "%d", port);
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    hints.ai_flags = flags | AI_NUMERICSERV;
    int code = getaddrinfo(n == 0 ? NULL : host, service, &hints, out);
    if (code != 0)
        return FAIL(INVALID, "cannot resolve \"%s\": %s", address,
                    code == EAI_SYSTEM ? strerror(errno) : gai_strerror(code));
    return ST_OK;
}

static int port_of(int fd)
{
    struct sockaddr_storage bound;
    socklen_t bytes = sizeof bound;
    memset(&bound, 0, sizeof bound);
    if (getsockname(fd, (struct sockaddr *)&bound, &bytes) != 0)
        return 0;
    return bound.ss_family == AF_INET6 ? ntohs(((struct sockaddr_in6 *)&bound)->sin6_port)
                                       : ntohs(((struct sockaddr_in *)&bound)->sin_port);
}

/* -1 with errno. On all interfaces an IPv6 socket takes IPv4 as well. */
static int listen_on(const struct addrinfo *a, bool all)
{
    int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol);
    if (fd < 0)
        return -1;
    int one = 1, only = all ? 0 : 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (a->ai_family == AF_INET6)
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &only, sizeof only);
    if (bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, 1024) == 0)
        return fd;
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

enum status socket_listen(int *fd, const char *address, int *port)
{
    struct addrinfo *list = NULL;
    bool all = address[0] == '\0';
    *fd = -1;
    TRY(resolve(&list, address, *port, AI_PASSIVE));
    errno = EADDRNOTAVAIL;
    /* All interfaces: IPv6 first, which includes IPv4 where the machine has both. */
    for (int pass = 0; pass < 2 && *fd < 0; pass++)
        for (const struct addrinfo *a = list; a != NULL && *fd < 0; a = a->ai_next)
            if (!all || (a->ai_family == AF_INET6) == (pass == 0))
                *fd = listen_on(a, all);
    int error = errno;
    freeaddrinfo(list);
    if (*fd < 0)
        return FAIL(COMM, "cannot listen on %s port %d: %s%s", all ? "all interfaces," : address,
                    *port, strerror(error),
                    error == EADDRINUSE ? "; choose another port (TESSERA_PORT)" : "");
    *port = port_of(*fd);
    return ST_OK;
}

/* Small messages go at once, and a machine that vanishes is noticed. Failures only cost time. */
static void tune(int fd)
{
    int one = 1, idle_s = 15, interval_s = 5, probes = 3;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

enum status socket_accept(int *fd, int listen_fd, char *peer, size_t peer_bytes)
{
    struct sockaddr_storage from;
    socklen_t bytes = sizeof from;
    char host[64] = "?";
    *fd = accept4(listen_fd, (struct sockaddr *)&from, &bytes, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (*fd < 0) {
        /* All of these concern one connection that came and went, not the listener. */
        if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || errno == ECONNABORTED ||
            errno == EPROTO || errno == ENETDOWN || errno == EHOSTUNREACH || errno == ENETUNREACH)
            return ST_OK;
        return FAIL(COMM, "cannot accept a connection: %s", strerror(errno));
    }
    getnameinfo((struct sockaddr *)&from, bytes, host, sizeof host, NULL, 0, NI_NUMERICHOST);
    snprintf(peer, peer_bytes, "%s", host);
    tune(*fd);
    return ST_OK;
}

/* One address, one attempt. 0, or the errno of the failure. */
static int try_address(int *fd, const struct addrinfo *a, int64_t deadline)
{
    int error = 0;
    socklen_t bytes = sizeof error;
    *fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol);
    if (*fd < 0)
        return errno;
    if (connect(*fd, a->ai_addr, a->ai_addrlen) != 0) {
        error = errno;
        if (error == EINPROGRESS || error == EINTR) {
            error = ETIMEDOUT;
            if (socket_wait(*fd, POLLOUT, deadline) != 0)
                getsockopt(*fd, SOL_SOCKET, SO_ERROR, &error, &bytes);
        }
    }
    if (error != 0)
        socket_close(fd);
    else
        tune(*fd);
    return error;
}

enum status socket_connect(int *fd, const char *address, int port, int64_t deadline)
{
    enum { ATTEMPT_MS = 3000, PAUSE_MAX_MS = 500 };
    char last[256] = "no attempt was made";
    int64_t begin = clock_ms();
    *fd = -1;
    for (int pause_ms = 10;; pause_ms = pause_ms * 2 > PAUSE_MAX_MS ? PAUSE_MAX_MS : pause_ms * 2) {
        /* Names are looked up each time: that of a machine that is starting may appear late. */
        struct addrinfo *list = NULL;
        if (resolve(&list, address, port, 0) != ST_OK)
            snprintf(last, sizeof last, "%.*s", (int)strcspn(status_message(), "\n"),
                     status_message());
        for (const struct addrinfo *a = list; a != NULL; a = a->ai_next) {
            int64_t until = clock_ms() + ATTEMPT_MS;
            int error = try_address(fd, a, until < deadline ? until : deadline);
            if (error == 0)
                break;
            snprintf(last, sizeof last, "%s", strerror(error));
        }
        if (list != NULL)
            freeaddrinfo(list);
        if (*fd >= 0) {
            status_clear();
            return ST_OK;
        }
        int64_t now = clock_ms();
        if (now + pause_ms > deadline)
            return FAIL(TIMEOUT, "no connection to %s port %d in %.1f s: %s", address, port,
                        (double)(now - begin) / 1000.0, last);
        clock_pause_us(pause_ms * 1000);
    }
}
