#include "comm/skip.h"

#include <stdio.h>

#include "engine/base/arena.h"

struct skip_comm {
    struct comm base;   /* first: a struct comm * is a struct skip_comm * */
    struct comm *inner; /* owned */
};

static struct comm *inner_of(struct comm *comm)
{
    return ((struct skip_comm *)comm)->inner;
}

static enum status skip_all_gather(struct comm *comm, struct stream *s, void *out, const void *in,
                                   int64_t numel, enum dtype dtype, struct event *done)
{
    size_t bytes = (size_t)numel * dtype_bytes(dtype);
    if (dtype == DTYPE_I32)
        return comm_all_gather(inner_of(comm), s, out, in, numel, dtype, done);
    for (int r = 0; r < comm->world_size; r++)
        if ((char *)out + (size_t)r * bytes != (const char *)in)
            TRY(device_copy(s, (char *)out + (size_t)r * bytes, in, bytes));
    return event_record(done, s);
}

static enum status skip_reduce_scatter(struct comm *comm, struct stream *s, void *out,
                                       const void *in, int64_t numel, enum dtype dtype,
                                       struct event *done)
{
    size_t bytes = (size_t)numel * dtype_bytes(dtype);
    const char *own = (const char *)in + (size_t)comm->rank * bytes;
    if (out != own)
        TRY(device_copy(s, out, own, bytes));
    return event_record(done, s);
}

static enum status skip_broadcast(struct comm *comm, struct stream *s, void *data, int64_t numel,
                                  enum dtype dtype, int root, struct event *done)
{
    return comm_broadcast(inner_of(comm), s, data, numel, dtype, root, done);
}

static enum status skip_exchange(struct comm *comm, void *recv, const void *send, size_t bytes)
{
    return comm_exchange(inner_of(comm), recv, send, bytes);
}

static enum status skip_progress(struct comm *comm)
{
    return comm_progress(inner_of(comm));
}

static void skip_stage(struct comm *comm, void *memory, size_t bytes)
{
    comm_stage(inner_of(comm), memory, bytes);
}

static enum status skip_memory_open(struct comm *comm, struct device *device, void **out,
                                    size_t bytes)
{
    return comm_memory_open(inner_of(comm), device, out, bytes);
}

static void skip_memory_close(struct comm *comm, struct device *device, void **memory)
{
    comm_memory_close(inner_of(comm), device, memory);
}

static void skip_abort(struct comm *comm, const char *cause)
{
    comm_abort(inner_of(comm), cause);
}

static void skip_close(struct comm *comm)
{
    struct skip_comm *s = (struct skip_comm *)comm;
    comm_close(&s->inner);
    mem_free(&s);
}

static const struct comm_ops skip_ops = {
    .name = "skip",
    .all_gather = skip_all_gather,
    .reduce_scatter = skip_reduce_scatter,
    .broadcast = skip_broadcast,
    .exchange = skip_exchange,
    .progress = skip_progress,
    .stage = skip_stage,
    .memory_open = skip_memory_open,
    .memory_close = skip_memory_close,
    .abort = skip_abort,
    .close = skip_close,
};

enum status skip_open(struct comm **comm)
{
    struct skip_comm *s = NULL;
    TRY(mem_alloc(&s, sizeof *s));
    s->base = (struct comm){.ops = &skip_ops,
                            .rank = (*comm)->rank,
                            .world_size = (*comm)->world_size,
                            .timeout_ms = (*comm)->timeout_ms};
    snprintf(s->base.memory_text, sizeof s->base.memory_text,
             "collectives are left out: times mean something, results do not");
    s->inner = *comm;
    *comm = &s->base;
    return ST_OK;
}
