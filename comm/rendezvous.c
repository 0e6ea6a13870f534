#include "comm/rendezvous.h"

#include <poll.h>
#include <stdio.h>
#include <string.h>

#include "comm/comm.h"
#include "comm/rendezvous_frame.h"
#include "comm/socket.h"
#include "engine/base/arena.h"
#include "engine/base/clock.h"

enum status rendezvous_open(struct rendezvous **out, const struct rendezvous_options *o)
{
    enum status st = ST_OK;
    struct rendezvous *rv = NULL;
    int listen_fd = o->rank == 0 ? o->listen_fd : -1;
    *out = NULL;
    if (o->world_size < 1 || o->world_size > COMM_MAX_WORLD_SIZE || o->rank < 0 ||
        o->rank >= o->world_size)
        return FAIL(INVALID, "rank %d of %d ranks: at most %d ranks meet, counted from 0", o->rank,
                    o->world_size, COMM_MAX_WORLD_SIZE);
    if (strlen(o->token) >= RENDEZVOUS_TOKEN_BYTES)
        return FAIL(INVALID, "the token has more than %d characters", RENDEZVOUS_TOKEN_BYTES - 1);
    size_t n = (size_t)o->world_size;
    TRY_GOTO(st, out, mem_alloc(&rv, sizeof *rv));
    rv->rank = o->rank;
    rv->world_size = o->world_size;
    rv->timeout_ms = o->timeout_ms;
    pthread_mutex_init(&rv->io, NULL);
    pthread_mutex_init(&rv->lock, NULL);
    TRY_GOTO(st, out, mem_alloc(&rv->peers, n * sizeof *rv->peers));
    for (size_t r = 0; r < n; r++)
        rv->peers[r].fd = -1;
    TRY_GOTO(st, out, mem_alloc(&rv->polls, n * sizeof *rv->polls));
    TRY_GOTO(st, out, mem_alloc(&rv->poll_ranks, n * sizeof *rv->poll_ranks));
    if (n > 1)
        TRY_GOTO(st, out, rendezvous_meet(rv, o, &listen_fd));
    *out = rv;
    rv = NULL;
out:
    socket_close(&listen_fd);
    rendezvous_close(&rv);
    return st;
}

static enum status exchange(struct rendezvous *rv, char *recv, const void *send, size_t bytes)
{
    const char *what = "exchange not complete";
    size_t all = (size_t)rv->world_size * bytes;
    int64_t deadline = clock_ms() + rendezvous_patience_ms(rv);
    if (rv->rank != 0) {
        TRY(peer_send(rv, 0, FRAME_DATA, send, bytes, deadline));
        TRY(frames_receive(rv, 0, 0, FRAME_DATA, recv, all, deadline, what));
    } else {
        if (bytes > 0)
            memmove(recv, send, bytes);
        if (rv->world_size > 1)
            TRY(frames_receive(rv, 1, rv->world_size - 1, FRAME_DATA,
                               bytes > 0 ? recv + bytes : NULL, bytes, deadline, what));
        for (int r = 1; r < rv->world_size; r++)
            TRY(peer_send(rv, r, FRAME_DATA, recv, all, deadline));
    }
    rv->sequence++;
    return ST_OK;
}

/* The failure that was noted, if one was and nobody else holds the connections. */
static void tell_if_failed(struct rendezvous *rv)
{
    pthread_mutex_lock(&rv->lock);
    bool failed = rv->failed != ST_OK;
    pthread_mutex_unlock(&rv->lock);
    if (!failed || pthread_mutex_trylock(&rv->io) != 0)
        return;
    rendezvous_tell(rv, -1);
    pthread_mutex_unlock(&rv->io);
}

void rendezvous_let_go(struct rendezvous *rv)
{
    pthread_mutex_unlock(&rv->io);
    tell_if_failed(rv);
}

enum status rendezvous_exchange(struct rendezvous *rv, void *recv, const void *send, size_t bytes)
{
    TRY(rendezvous_failed(rv));
    size_t all = 0;
    TRY(checked_mul(&all, bytes, (size_t)rv->world_size));
    if (all > UINT32_MAX)
        return FAIL(INVALID, "an exchange of %zu bytes a rank is too large", bytes);
    pthread_mutex_lock(&rv->io);
    enum status st = exchange(rv, recv, send, bytes);
    rendezvous_let_go(rv);
    return st;
}

enum status rendezvous_check(struct rendezvous *rv)
{
    TRY(rendezvous_failed(rv));
    enum status st = ST_OK;
    int count = 0;
    pthread_mutex_lock(&rv->io);
    for (int r = 0; r < rv->world_size; r++)
        if (rv->peers[r].fd >= 0) {
            rv->poll_ranks[count] = r;
            rv->polls[count++] = (struct pollfd){.fd = rv->peers[r].fd, .events = POLLIN};
        }
    if (count > 0 && poll(rv->polls, (nfds_t)count, 0) > 0)
        for (int i = 0; st == ST_OK && i < count; i++)
            if (rv->polls[i].revents != 0)
                st = peer_check(rv, rv->poll_ranks[i], rv->polls[i].revents);
    rendezvous_let_go(rv);
    return st;
}

void rendezvous_abort(struct rendezvous *rv, const char *cause)
{
    char text[CAUSE_BYTES];
    snprintf(text, sizeof text, "rank %d: %s", rv->rank, cause);
    rendezvous_die(rv, ST_COMM, text);
    tell_if_failed(rv); /* or the thread that holds the connections does when it lets them go */
}

void rendezvous_close(struct rendezvous **rv_address)
{
    struct rendezvous *rv = *rv_address;
    if (rv == NULL)
        return;
    int64_t deadline = clock_ms() + 200;
    for (int r = 0; rv->peers != NULL && r < rv->world_size; r++) {
        struct peer *p = &rv->peers[r];
        if (p->fd >= 0 && rv->failed == ST_OK)
            frame_send(p->fd, FRAME_LEAVE, 0, NULL, 0, deadline);
        socket_close(&p->fd);
    }
    pthread_mutex_destroy(&rv->io);
    pthread_mutex_destroy(&rv->lock);
    mem_free(&rv->peers);
    mem_free(&rv->polls);
    mem_free(&rv->poll_ranks);
    mem_free(rv_address);
}
