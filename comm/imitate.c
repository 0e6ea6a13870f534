#include "comm/imitate.h"

#include <stdio.h>

#include "comm/skip.h"
#include "engine/base/arena.h"

struct imitate_comm {
    struct comm base;   /* first: a struct comm * is a struct imitate_comm * */
    struct comm *inner; /* owned */
    struct comm *own;   /* owned; of as many ranks, all of which are this one */
    struct imitate_links links;
    int slot;
};

static struct imitate_comm *imitate_of(struct comm *comm)
{
    return (struct imitate_comm *)comm;
}

/* @copies of the share at @in to @out; @shares from there are read. What is small has one block, as
 * NCCL's kernels for that do. */
static enum status hold(struct imitate_comm *m, struct stream *s, void *out, const void *in,
                        size_t share, int copies, int shares, double per_second)
{
    enum { SMALL = 64 << 10 };
    const struct imitate_links *l = &m->links;
    struct imitate_copy copy = {
        .in = in,
        .out = out,
        .share = share,
        .copies = copies,
        .shares = shares,
        .multiprocessors = share < SMALL ? 1 : l->multiprocessors,
        .slot = m->slot,
        .seconds = l->call_seconds + (l->ranks - 1) * (l->hop_seconds + (double)share / per_second),
    };
    m->slot = (m->slot + 1) % IMITATE_SLOTS;
    return imitate_hold(s, &copy);
}

static enum status imitate_all_gather(struct comm *comm, struct stream *s, void *out,
                                      const void *in, int64_t numel, enum dtype dtype,
                                      struct event *done)
{
    struct imitate_comm *m = imitate_of(comm);
    const struct imitate_links *l = &m->links;
    if (l->multiprocessors == 0 || numel == 0)
        return comm_all_gather(m->own, s, out, in, numel, dtype, done);
    TRY(hold(m, s, out, in, (size_t)numel * dtype_bytes(dtype), l->ranks, 1, l->gather_per_second));
    return event_record(done, s);
}

/* Rank 0's share is the first. */
static enum status imitate_reduce_scatter(struct comm *comm, struct stream *s, void *out,
                                          const void *in, int64_t numel, enum dtype dtype,
                                          struct event *done)
{
    struct imitate_comm *m = imitate_of(comm);
    const struct imitate_links *l = &m->links;
    if (l->multiprocessors == 0 || numel == 0)
        return comm_reduce_scatter(m->own, s, out, in, numel, dtype, done);
    TRY(hold(m, s, out, in, (size_t)numel * dtype_bytes(dtype), 1, l->ranks, l->reduce_per_second));
    return event_record(done, s);
}

static enum status imitate_broadcast(struct comm *comm, struct stream *s, void *data, int64_t numel,
                                     enum dtype dtype, int root, struct event *done)
{
    return comm_broadcast(imitate_of(comm)->own, s, data, numel, dtype, root, done);
}

static enum status imitate_exchange(struct comm *comm, void *recv, const void *send, size_t bytes)
{
    return comm_exchange(imitate_of(comm)->own, recv, send, bytes);
}

static enum status imitate_progress(struct comm *comm)
{
    return comm_progress(imitate_of(comm)->inner);
}

static enum status imitate_ready(struct comm *comm)
{
    return comm_ready(imitate_of(comm)->inner);
}

static void imitate_stage(struct comm *comm, void *memory, size_t bytes)
{
    comm_stage(imitate_of(comm)->inner, memory, bytes);
}

static enum status imitate_memory_open(struct comm *comm, struct device *device, void **out,
                                       size_t bytes)
{
    return comm_memory_open(imitate_of(comm)->inner, device, out, bytes);
}

static void imitate_memory_close(struct comm *comm, struct device *device, void **memory)
{
    comm_memory_close(imitate_of(comm)->inner, device, memory);
}

static void imitate_abort(struct comm *comm, const char *cause)
{
    comm_abort(imitate_of(comm)->inner, cause);
}

static void imitate_close(struct comm *comm)
{
    struct imitate_comm *m = imitate_of(comm);
    comm_close(&m->own);
    comm_close(&m->inner);
    mem_free(&m);
}

static const struct comm_ops imitate_ops = {
    .name = "imitate",
    .all_gather = imitate_all_gather,
    .reduce_scatter = imitate_reduce_scatter,
    .broadcast = imitate_broadcast,
    .exchange = imitate_exchange,
    .progress = imitate_progress,
    .ready = imitate_ready,
    .stage = imitate_stage,
    .memory_open = imitate_memory_open,
    .memory_close = imitate_memory_close,
    .abort = imitate_abort,
    .close = imitate_close,
};

enum status imitate_open(struct comm **comm, const struct imitate_links *links)
{
    enum status st = ST_OK;
    struct comm *inner = *comm;
    struct imitate_comm *m = NULL;
    if (inner->world_size != 1)
        return FAIL(INVALID, "one rank plays one of several, but %d are there", inner->world_size);
    if (links->ranks < 2 || links->ranks > COMM_MAX_WORLD_SIZE)
        return FAIL(INVALID, "one of %d ranks cannot be played, only of 2 to %d", links->ranks,
                    COMM_MAX_WORLD_SIZE);
    if (!(links->gather_per_second > 0) || !(links->reduce_per_second > 0))
        return FAIL(INVALID, "links without a rate cannot be imitated");
    TRY(mem_alloc(&m, sizeof *m));
    TRY_GOTO(st, out, skip_beside(&m->own, inner));
    m->own->world_size = links->ranks;
    m->inner = inner;
    m->links = *links;
    m->base = (struct comm){.ops = &imitate_ops,
                            .rank = 0,
                            .world_size = links->ranks,
                            .timeout_ms = inner->timeout_ms,
                            .multiprocessors = links->multiprocessors};
    snprintf(m->base.memory_text, sizeof m->base.memory_text,
             "one rank plays rank 0 of %d: times mean something, results do not", links->ranks);
    *comm = &m->base;
    return ST_OK;
out:
    mem_free(&m);
    return st;
}

#ifndef TESSERA_CUDA
enum status imitate_hold(struct stream *s, const struct imitate_copy *copy)
{
    (void)s, (void)copy;
    return FAIL(UNSUPPORTED, "no GPU is built in");
}
#endif
