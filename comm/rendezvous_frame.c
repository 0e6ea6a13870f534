#include "comm/rendezvous_frame.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "comm/socket.h"
#include "engine/base/clock.h"

enum { TELL_MS = 500 }; /* to send a cause; its reader may be stuck */

void rendezvous_die(struct rendezvous *rv, enum status st, const char *cause)
{
    pthread_mutex_lock(&rv->lock);
    if (rv->failed == ST_OK) {
        rv->failed = st;
        snprintf(rv->cause, sizeof rv->cause, "%s", cause);
    }
    pthread_mutex_unlock(&rv->lock);
}

enum status rendezvous_failed(struct rendezvous *rv)
{
    pthread_mutex_lock(&rv->lock);
    enum status st = rv->failed;
    if (st != ST_OK)
        status_fail(st, __FILE__, __LINE__, "%s", rv->cause);
    pthread_mutex_unlock(&rv->lock);
    return st;
}

void rendezvous_tell(struct rendezvous *rv, int except)
{
    if (rv->told)
        return;
    rv->told = true;
    int64_t deadline = clock_ms() + TELL_MS;
    for (int r = 0; r < rv->world_size; r++)
        if (rv->peers[r].fd >= 0 && r != except)
            frame_send(rv->peers[r].fd, FRAME_ABORT, (uint32_t)rv->failed, rv->cause,
                       strlen(rv->cause), deadline);
}

/* Note, tell, and return a failure. @except: the rank it came from, or -1. */
static enum status fail_all(struct rendezvous *rv, enum status st, int except, const char *fmt, ...)
    PRINTF_LIKE(4, 5);
static enum status fail_all(struct rendezvous *rv, enum status st, int except, const char *fmt, ...)
{
    char text[CAUSE_BYTES];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    rendezvous_die(rv, st, text);
    rendezvous_tell(rv, except);
    return rendezvous_failed(rv);
}

int frame_send(int fd, enum frame_kind kind, uint32_t sequence, const void *data, size_t bytes,
               int64_t deadline)
{
    struct frame head = {FRAME_MAGIC, (uint32_t)kind, sequence, (uint32_t)bytes};
    size_t sent = 0, total = sizeof head + bytes;
    while (sent < total) {
        struct iovec parts[2];
        int count = 0;
        if (sent < sizeof head)
            parts[count++] = (struct iovec){(char *)&head + sent, sizeof head - sent};
        size_t done = sent < sizeof head ? 0 : sent - sizeof head;
        if (bytes > done)
            parts[count++] = (struct iovec){(char *)data + done, bytes - done};
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)count};
        ssize_t n = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n >= 0)
            sent += (size_t)n;
        else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            if (socket_wait(fd, POLLOUT, deadline) == 0)
                return ETIMEDOUT;
        } else if (errno != EINTR)
            return errno;
    }
    return 0;
}

/* A connection closed (@error 0) or broke. */
static enum status peer_lost(struct rendezvous *rv, int rank, int error)
{
    socket_close(&rv->peers[rank].fd);
    return fail_all(rv, ST_COMM, rank, "rank %d closed its connection: its process ended%s%s", rank,
                    error == 0 ? "" : ", ", error == 0 ? "" : strerror(error));
}

static enum status check_head(struct rendezvous *rv, int rank, enum frame_kind expect, size_t bytes)
{
    const struct frame *head = &rv->peers[rank].head;
    bool known = head->magic == FRAME_MAGIC;
    if (known && head->kind == FRAME_ABORT && head->bytes < CAUSE_BYTES)
        return ST_OK;
    if (known && head->kind == FRAME_LEAVE && head->bytes == 0)
        return ST_OK;
    if (!known || head->kind != (uint32_t)expect)
        return fail_all(rv, ST_COMM, -1,
                        "rank %d, or what answers in its place, does not speak as the ranks "
                        "of this run do",
                        rank);
    if (head->bytes != bytes || head->sequence != rv->sequence)
        return fail_all(rv, ST_INVALID, -1,
                        "rank %d sends %u bytes in exchange %u, rank %d expects %zu in "
                        "exchange %u: the ranks do not make the same calls",
                        rank, head->bytes, head->sequence, rv->rank, bytes, rv->sequence);
    return ST_OK;
}

static enum status finish(struct rendezvous *rv, int rank)
{
    struct peer *p = &rv->peers[rank];
    p->got = 0;
    if (p->head.kind == FRAME_ABORT) {
        p->text[p->head.bytes] = '\0';
        enum status st = p->head.sequence > ST_OK && p->head.sequence < ST_COUNT
                             ? (enum status)p->head.sequence
                             : ST_COMM;
        return fail_all(rv, st, rank, "%s", p->text);
    }
    if (p->head.kind == FRAME_LEAVE) {
        p->left = true;
        socket_close(&p->fd);
        return fail_all(rv, ST_COMM, -1, "rank %d has left the run; rank %d still needs it", rank,
                        rv->rank);
    }
    p->complete = true;
    return ST_OK;
}

/* Read what has come of a frame of kind @expect with @bytes of payload into @dest; peer->complete
 * is set when all is there. FRAME_ABORT and a closed connection fail. */
static enum status peer_advance(struct rendezvous *rv, int rank, enum frame_kind expect, void *dest,
                                size_t bytes)
{
    struct peer *p = &rv->peers[rank];
    for (;;) {
        char *at = (char *)&p->head + p->got;
        size_t want = sizeof p->head - p->got;
        if (p->got >= sizeof p->head) {
            size_t done = p->got - sizeof p->head;
            if (done == p->head.bytes)
                return finish(rv, rank);
            at = (p->head.kind == FRAME_ABORT ? p->text : (char *)dest) + done;
            want = p->head.bytes - done;
        }
        ssize_t n = recv(p->fd, at, want, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return ST_OK;
        if (n <= 0)
            return peer_lost(rv, rank, n == 0 ? 0 : errno);
        size_t before = p->got;
        p->got += (size_t)n;
        if (before < sizeof p->head && p->got >= sizeof p->head)
            TRY(check_head(rv, rank, expect, bytes));
    }
}

enum status peer_check(struct rendezvous *rv, int rank, int revents)
{
    struct peer *p = &rv->peers[rank];
    struct frame head;
    ssize_t n = recv(p->fd, &head, sizeof head, MSG_PEEK | MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return ST_OK;
    if (n <= 0)
        return peer_lost(rv, rank, n == 0 ? 0 : errno);
    if (n < (ssize_t)sizeof head)
        return revents & (POLLHUP | POLLERR) ? peer_lost(rv, rank, 0) : ST_OK;
    if (head.magic == FRAME_MAGIC && head.kind == FRAME_LEAVE) {
        p->left = true;
        socket_close(&p->fd);
        return ST_OK;
    }
    if (head.kind != FRAME_ABORT)
        return ST_OK;
    /* The text follows at once; peer_advance() fails when it is complete. */
    for (int64_t deadline = clock_ms() + 1000; socket_wait(p->fd, POLLIN, deadline) != 0;)
        TRY(peer_advance(rv, rank, FRAME_ABORT, NULL, 0));
    return peer_lost(rv, rank, 0);
}

/* Rank 0 gives up first, and names who is missing; the others wait a little longer for that. */
int64_t rendezvous_patience_ms(const struct rendezvous *rv)
{
    return rv->timeout_ms + (rv->rank == 0 ? 0 : 500 + rv->timeout_ms / 10);
}

/* "2, 5 and 7"; the first ten, then how many more. */
static void name_missing(const struct rendezvous *rv, int first, int last, char *out, size_t bytes)
{
    size_t used = 0;
    int missing = 0, named = 0;
    for (int r = first; r <= last; r++)
        missing += !rv->peers[r].complete;
    out[0] = '\0';
    for (int r = first; r <= last && named < 10 && used < bytes; r++) {
        if (rv->peers[r].complete)
            continue;
        const char *before = named == 0 ? "" : named + 1 == missing ? " and " : ", ";
        used += (size_t)snprintf(out + used, bytes - used, "%s%d", before, r);
        named++;
    }
    if (named < missing && used < bytes)
        snprintf(out + used, bytes - used, " and %d more", missing - named);
}

enum status rendezvous_missing(struct rendezvous *rv, int first, int last, const char *what)
{
    char names[128];
    name_missing(rv, first, last, names, sizeof names);
    return fail_all(rv, ST_TIMEOUT, -1, "%s in %.1f s: no word from rank %s%s", what,
                    (double)rv->timeout_ms / 1000.0, names,
                    rv->rank == 0 ? "" : " (or a rank that it waits for)");
}

enum status frames_receive(struct rendezvous *rv, int first, int last, enum frame_kind expect,
                           char *dest, size_t bytes, int64_t deadline, const char *what)
{
    for (int r = first; r <= last; r++)
        rv->peers[r].complete = false;
    for (;;) {
        int count = 0, incomplete = 0;
        for (int r = first; r <= last; r++) {
            if (rv->peers[r].left)
                return fail_all(rv, ST_COMM, -1, "rank %d has left the run; rank %d still needs it",
                                r, rv->rank);
            incomplete += !rv->peers[r].complete;
            rv->poll_ranks[count] = r;
            rv->polls[count++] = (struct pollfd){.fd = rv->peers[r].fd, .events = POLLIN};
        }
        if (incomplete == 0)
            return ST_OK;
        int64_t left = deadline - clock_ms();
        if (left <= 0)
            return rendezvous_missing(rv, first, last, what);
        int ready =
            poll(rv->polls, (nfds_t)count, left < POLL_SLICE_MS ? (int)left : POLL_SLICE_MS);
        if (rendezvous_failed(rv) != ST_OK) { /* rendezvous_abort() from another thread */
            rendezvous_tell(rv, -1);
            return rendezvous_failed(rv);
        }
        for (int i = 0; ready > 0 && i < count; i++) {
            int r = rv->poll_ranks[i], revents = rv->polls[i].revents;
            char *to = dest == NULL ? NULL : dest + (size_t)(r - first) * bytes;
            /* A rank that has sent its part may still fail while the others are awaited. */
            if (revents != 0 && rv->peers[r].complete)
                TRY(peer_check(rv, r, revents));
            else if (revents != 0)
                TRY(peer_advance(rv, r, expect, to, bytes));
        }
    }
}

/* A peer that gave up says why before it closes, so look for that when sending fails. */
enum status peer_send(struct rendezvous *rv, int rank, enum frame_kind kind, const void *data,
                      size_t bytes, int64_t deadline)
{
    struct peer *p = &rv->peers[rank];
    if (p->left || p->fd < 0)
        return fail_all(rv, ST_COMM, -1, "rank %d has left the run; rank %d still needs it", rank,
                        rv->rank);
    int error = frame_send(p->fd, kind, rv->sequence, data, bytes, deadline);
    if (error == 0)
        return ST_OK;
    if (error == ETIMEDOUT)
        return fail_all(rv, ST_TIMEOUT, -1, "rank %d does not take %zu bytes in %.1f s", rank,
                        bytes, (double)rv->timeout_ms / 1000.0);
    TRY(peer_advance(rv, rank, FRAME_WELCOME, NULL, 0));
    return peer_lost(rv, rank, error);
}
