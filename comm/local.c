#include "comm/local.h"

#include <stdio.h>
#include <string.h>

#include "comm/local_ring.h"
#include "engine/base/arena.h"

static enum status local_complete(void *context, uint64_t ticket)
{
    struct local_comm *c = context;
    ring_lock(c->world);
    enum status st = ring_wait(c, ticket);
    ring_unlock(c->world);
    return st;
}

/* Post, read what can be read at once, leave the rest to @done. */
static enum status issue(struct local_comm *c, struct stream *s, const struct post *p,
                         struct event *done)
{
    struct local_world *w = c->world;
    uint64_t n = 0;
    ring_lock(w);
    enum status st = ring_post(c, p, c->after[s->id], &n);
    if (st == ST_OK) {
        c->after[s->id] = n + 1;
        while (ring_read_next(c))
            ;
        done->complete = ring_all_read(w, n) ? NULL : local_complete;
        done->context = c;
        done->ticket = n;
    }
    ring_unlock(w);
    return st;
}

static struct local_comm *local_of(struct comm *comm)
{
    return (struct local_comm *)comm; /* base is its first member */
}

static enum status local_all_gather(struct comm *comm, struct stream *s, void *out, const void *in,
                                    int64_t numel, enum dtype dtype, struct event *done)
{
    struct post p = {ALL_GATHER, dtype, 0, numel, in, out};
    return issue(local_of(comm), s, &p, done);
}

static enum status local_reduce_scatter(struct comm *comm, struct stream *s, void *out,
                                        const void *in, int64_t numel, enum dtype dtype,
                                        struct event *done)
{
    struct post p = {REDUCE_SCATTER, dtype, 0, numel, in, out};
    return issue(local_of(comm), s, &p, done);
}

static enum status local_broadcast(struct comm *comm, struct stream *s, void *data, int64_t numel,
                                   enum dtype dtype, int root, struct event *done)
{
    struct post p = {BROADCAST, dtype, root, numel, data, data};
    return issue(local_of(comm), s, &p, done);
}

static enum status local_exchange(struct comm *comm, void *recv, const void *send, size_t bytes)
{
    struct local_comm *c = local_of(comm);
    struct post p = {EXCHANGE, DTYPE_I32, 0, (int64_t)bytes, c->stage, recv};
    uint64_t n = 0;
    ASSERT(bytes <= sizeof c->stage);
    /* The exchange before is complete, so no peer reads the stage. */
    if (bytes > 0)
        memcpy(c->stage, send, bytes);
    ring_lock(c->world);
    enum status st = ring_post(c, &p, 0, &n);
    if (st == ST_OK)
        st = ring_wait(c, n);
    ring_unlock(c->world);
    return st;
}

static void local_abort(struct comm *comm, const char *cause)
{
    struct local_world *w = local_of(comm)->world;
    char text[CAUSE_BYTES];
    snprintf(text, sizeof text, "rank %d: %s", comm->rank, cause);
    ring_lock(w);
    ring_fail(w, ST_COMM, text);
    ring_unlock(w);
}

/* The peers may need what this rank has issued, so it is completed first. A failure of that is the
 * peers' to report: the message of this thread may be the one that tells why it closes. */
static void local_close(struct comm *comm)
{
    struct local_comm *c = local_of(comm);
    struct local_world *w = c->world;
    struct rank_state *me = &w->rank[comm->rank];
    ring_lock(w);
    if (me->posted > 0)
        (void)ring_complete(c, me->posted - 1);
    me->closed = true;
    w->closed_count++;
    pthread_cond_broadcast(&w->monitor.changed);
    ring_unlock(w);
    mem_free(&c);
}

static const struct comm_ops local_ops = {
    .name = "local",
    .all_gather = local_all_gather,
    .reduce_scatter = local_reduce_scatter,
    .broadcast = local_broadcast,
    .exchange = local_exchange,
    .progress = comm_no_progress,
    .ready = comm_is_ready,
    .stage = comm_no_stage,
    .memory_open = comm_any_memory,
    .memory_close = comm_any_memory_close,
    .abort = local_abort,
    .close = local_close,
};

/* ---- opening -------------------------------------------------------------------------------- */

enum status local_world_open(struct local_world **out, int world_size, int64_t timeout_ms)
{
    struct local_world *w = NULL;
    enum status st = ST_OK;
    *out = NULL;
    if (world_size < 1 || world_size > LOCAL_MAX_WORLD_SIZE)
        return FAIL(INVALID, "%d ranks as threads; give 1 to %d", world_size, LOCAL_MAX_WORLD_SIZE);
    if (timeout_ms < 1)
        return FAIL(INVALID, "time-out of %lld ms; give 1 or more", (long long)timeout_ms);
    TRY(mem_alloc(&w, sizeof *w));
    w->world_size = world_size;
    w->timeout_ms = timeout_ms;
    TRY_GOTO(st, out, mem_alloc(&w->rank, (size_t)world_size * sizeof *w->rank));
    TRY_GOTO(st, out, monitor_init(&w->monitor));
    *out = w;
    return ST_OK;
out:
    mem_free(&w->rank);
    mem_free(&w);
    return st;
}

void local_world_close(struct local_world **world)
{
    struct local_world *w = *world;
    if (w == NULL)
        return;
    monitor_release(&w->monitor);
    mem_free(&w->rank);
    mem_free(world);
}

enum status local_comm_open(struct comm **out, struct local_world *world, int rank)
{
    *out = NULL;
    if (rank < 0 || rank >= world->world_size)
        return FAIL(INVALID, "rank %d is not in the world of %d ranks", rank, world->world_size);
    struct local_comm *c = NULL;
    TRY(mem_alloc(&c, sizeof *c));
    c->base.ops = &local_ops;
    c->base.rank = rank;
    c->base.world_size = world->world_size;
    c->base.timeout_ms = world->timeout_ms;
    c->world = world;
    ring_lock(world);
    bool twice = world->rank[rank].open;
    world->rank[rank].open = true;
    ring_unlock(world);
    if (twice) {
        mem_free(&c);
        return FAIL(INVALID, "rank %d of this world was opened before", rank);
    }
    *out = &c->base;
    return ST_OK;
}
