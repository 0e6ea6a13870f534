/* How the ranks come together: rank 0 admits connections, the others knock until it answers. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "comm/rendezvous_frame.h"
#include "comm/socket.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"

enum {
    MAX_PENDING = 32, /* connections that have not said who they are */
    HELLO_MS = 5000   /* for them to say it */
};

static const char *const NOT_MET = "the ranks did not all meet";

/* A connection that rank 0 does not know yet. */
struct pending {
    int fd;
    int64_t deadline;
    size_t got;
    struct hello hello;
    char host[64];
};

/* ---- rank 0 meets the others ---------------------------------------------------------------- */

static void refuse(struct pending *p, const char *why)
{
    log_warn("rendezvous", "refused a connection from %s: %s", p->host, why);
    frame_send(p->fd, FRAME_ABORT, ST_COMM, why, strlen(why), clock_ms() + 100);
    socket_close(&p->fd);
}

/* All bytes are compared, so that the time does not tell how many were right. */
static bool same_token(const char *a, const char *b)
{
    unsigned char differ = 0;
    for (size_t i = 0; i < RENDEZVOUS_TOKEN_BYTES; i++)
        differ |= (unsigned char)(a[i] ^ b[i]);
    return differ == 0;
}

/* The whole hello is here: a rank, or a stranger. */
static bool admit(struct rendezvous *rv, struct pending *p, const char *token)
{
    char why[160] = "";
    if (!same_token(p->hello.token, token))
        snprintf(why, sizeof why, "its token is not that of this run (TESSERA_TOKEN)");
    else if (p->hello.world_size != rv->world_size)
        snprintf(why, sizeof why, "it says that there are %d ranks, rank 0 says %d",
                 p->hello.world_size, rv->world_size);
    else if (p->hello.rank < 1 || p->hello.rank >= rv->world_size)
        snprintf(why, sizeof why, "it says that it is rank %d of %d", p->hello.rank,
                 rv->world_size);
    else if (rv->peers[p->hello.rank].fd >= 0)
        snprintf(why, sizeof why, "rank %d is here already", p->hello.rank);
    if (why[0] != '\0') {
        refuse(p, why);
        return false;
    }
    rv->peers[p->hello.rank].fd = p->fd;
    rv->peers[p->hello.rank].left = false;
    rv->peers[p->hello.rank].complete = true;
    p->fd = -1;
    return true;
}

/* Read of the hello what is here. true: the rank was admitted. */
static bool pending_advance(struct rendezvous *rv, struct pending *p, const char *token)
{
    ssize_t n = recv(p->fd, (char *)&p->hello + p->got, sizeof p->hello - p->got, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return false;
    if (n <= 0) {
        log_debug("rendezvous", "a connection from %s closed before it said who it is", p->host);
        socket_close(&p->fd);
        return false;
    }
    p->got += (size_t)n;
    if (p->got >= sizeof p->hello.magic && p->hello.magic != FRAME_MAGIC) {
        refuse(p, "it does not speak as the ranks of a run do");
        return false;
    }
    if (p->got < sizeof p->hello)
        return false;
    return admit(rv, p, token);
}

static enum status take_connection(struct pending *pending, int listen_fd)
{
    for (int i = 0; i < MAX_PENDING; i++)
        if (pending[i].fd < 0) {
            memset(&pending[i], 0, sizeof pending[i]);
            enum status st =
                socket_accept(&pending[i].fd, listen_fd, pending[i].host, sizeof pending[i].host);
            pending[i].deadline = clock_ms() + HELLO_MS;
            return st;
        }
    return ST_OK; /* no room: it waits in the listener's queue */
}

/* One round of the meeting: wait a little, take who came. *here counts the admitted. */
static enum status meet_round(struct rendezvous *rv, int listen_fd, struct pending *pending,
                              const char *token, int64_t deadline, int *here)
{
    struct pollfd polls[MAX_PENDING + 1];
    bool room = false;
    for (int i = 0; i < MAX_PENDING; i++) {
        polls[i] = (struct pollfd){.fd = pending[i].fd, .events = POLLIN};
        room = room || pending[i].fd < 0;
    }
    polls[MAX_PENDING] = (struct pollfd){.fd = room ? listen_fd : -1, .events = POLLIN};
    int64_t now = clock_ms(), left = deadline - now;
    if (left <= 0)
        return rendezvous_missing(rv, 1, rv->world_size - 1, NOT_MET);
    if (poll(polls, MAX_PENDING + 1, left < POLL_SLICE_MS ? (int)left : POLL_SLICE_MS) > 0) {
        for (int i = 0; i < MAX_PENDING; i++)
            if (pending[i].fd >= 0 && polls[i].revents != 0)
                *here += pending_advance(rv, &pending[i], token);
        if (polls[MAX_PENDING].revents != 0)
            TRY(take_connection(pending, listen_fd));
    }
    for (int i = 0; i < MAX_PENDING; i++)
        if (pending[i].fd >= 0 && now > pending[i].deadline)
            refuse(&pending[i], "it did not say who it is");
    return rendezvous_check(rv); /* a rank that came may have died meanwhile */
}

static enum status meet_as_root(struct rendezvous *rv, const char *token, int listen_fd,
                                int64_t deadline)
{
    struct pending pending[MAX_PENDING];
    enum status st = ST_OK;
    int here = 1;
    for (int i = 0; i < MAX_PENDING; i++)
        pending[i].fd = -1;
    while (st == ST_OK && here < rv->world_size)
        st = meet_round(rv, listen_fd, pending, token, deadline, &here);
    for (int i = 0; i < MAX_PENDING; i++)
        socket_close(&pending[i].fd);
    if (st != ST_OK)
        return status_trace(st, __FILE__, __LINE__);
    for (int r = 1; r < rv->world_size; r++)
        TRY(peer_send(rv, r, FRAME_WELCOME, NULL, 0, deadline));
    return ST_OK;
}

/* ---- the others meet rank 0 ----------------------------------------------------------------- */

/* Say hello and wait for the first byte of the answer; *answered stays false if the other side hung
 * up, as the rank 0 of a run that is ending does. */
static enum status say_hello(struct rendezvous *rv, const char *token, int64_t deadline,
                             bool *answered)
{
    struct peer *root = &rv->peers[0];
    struct hello hello = {.magic = FRAME_MAGIC, .rank = rv->rank, .world_size = rv->world_size};
    memcpy(hello.token, token, sizeof hello.token);
    char first;
    /* A fresh connection has room for so few bytes. */
    if (send(root->fd, &hello, sizeof hello, MSG_NOSIGNAL) == (ssize_t)sizeof hello) {
        if (socket_wait(root->fd, POLLIN, deadline) == 0)
            return rendezvous_missing(rv, 0, 0, NOT_MET);
        *answered = recv(root->fd, &first, 1, MSG_PEEK | MSG_DONTWAIT) == 1;
    }
    if (!*answered)
        socket_close(&root->fd);
    return ST_OK;
}

static enum status meet_root(struct rendezvous *rv, const struct rendezvous_options *o,
                             const char *token, int64_t deadline)
{
    bool answered = false;
    for (int64_t pause_ms = 20; !answered; pause_ms = pause_ms < 500 ? pause_ms * 2 : 500) {
        enum status st = socket_connect(&rv->peers[0].fd, o->address, o->port, deadline);
        if (st != ST_OK)
            return FAIL(TIMEOUT, "rank %d cannot reach rank 0: %.*s", rv->rank,
                        (int)strcspn(status_message(), "\n"), status_message());
        TRY(say_hello(rv, token, deadline, &answered));
        if (!answered)
            clock_pause_us(pause_ms * 1000);
    }
    return frames_receive(rv, 0, 0, FRAME_WELCOME, NULL, 0, deadline, NOT_MET);
}

static bool is_loopback(const char *address)
{
    return strcmp(address, "localhost") == 0 || strncmp(address, "127.", 4) == 0 ||
           strcmp(address, "::1") == 0 || strcmp(address, "[::1]") == 0;
}

enum status rendezvous_meet(struct rendezvous *rv, const struct rendezvous_options *o,
                            int *listen_fd)
{
    char token[RENDEZVOUS_TOKEN_BYTES] = {0};
    snprintf(token, sizeof token, "%s", o->token);
    int64_t deadline = clock_ms() + rendezvous_patience_ms(rv);
    if (rv->rank != 0)
        return meet_root(rv, o, token, deadline);
    if (*listen_fd < 0) {
        int port = o->port;
        const char *bind = o->bind != NULL ? o->bind : is_loopback(o->address) ? o->address : "";
        TRY(socket_listen(listen_fd, bind, &port));
    }
    return meet_as_root(rv, token, *listen_fd, deadline);
}
