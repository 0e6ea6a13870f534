#include "comm/fault.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/clock.h"
#include "engine/base/monitor.h"

struct fault_comm {
    struct comm base;
    struct comm *inner; /* owned */
    struct fault_plan plan;
    int64_t count;
    struct monitor monitor;
    bool aborted;
};

static struct fault_comm *fault_of(struct comm *comm)
{
    return (struct fault_comm *)comm; /* base is its first member */
}

/* Blocks for @ms, or until comm_abort() on this rank. */
static void sleep_or_abort(struct fault_comm *f, int64_t ms)
{
    int64_t until_ns = clock_ns() + ms * 1000000;
    pthread_mutex_lock(&f->monitor.mutex);
    while (!f->aborted && monitor_wait(&f->monitor, until_ns))
        continue;
    pthread_mutex_unlock(&f->monitor.mutex);
}

/* Count a collective and do what comes before it. @what: FAULT_DROP and FAULT_CORRUPT are left to
 * the caller. */
static enum status before(struct fault_comm *f, enum fault_kind *what)
{
    f->count++;
    *what = f->plan.at == 0 || f->plan.at == f->count ? f->plan.kind : FAULT_NONE;
    if (*what == FAULT_DELAY)
        sleep_or_abort(f, f->plan.delay_ms);
    if (*what == FAULT_SILENT)
        sleep_or_abort(f, 2 * f->base.timeout_ms);
    if (*what == FAULT_FAIL) {
        char cause[64];
        snprintf(cause, sizeof cause, "planned fault at collective %lld", (long long)f->count);
        comm_abort(f->inner, cause);
        return FAIL(COMM, "rank %d: %s", f->base.rank, cause);
    }
    return ST_OK;
}

/* FAULT_CORRUPT: the output must be there before it can be damaged. */
static enum status corrupt(struct event *done, void *out, size_t bytes)
{
    if (done->handle != NULL)
        return FAIL(UNSUPPORTED, "FAULT_CORRUPT needs output in host memory");
    if (done->complete != NULL)
        TRY(done->complete(done->context, done->ticket));
    done->complete = NULL;
    if (bytes > 0)
        ((unsigned char *)out)[bytes / 2] ^= 1;
    return ST_OK;
}

static enum status fault_all_gather(struct comm *comm, struct stream *s, void *out, const void *in,
                                    int64_t numel, enum dtype dtype, struct event *done)
{
    struct fault_comm *f = fault_of(comm);
    enum fault_kind what;
    TRY(before(f, &what));
    if (what == FAULT_DROP) {
        done->complete = NULL;
        return ST_OK;
    }
    TRY(comm_all_gather(f->inner, s, out, in, numel, dtype, done));
    if (what == FAULT_CORRUPT)
        TRY(corrupt(done, out, (size_t)numel * dtype_bytes(dtype) * (size_t)comm->world_size));
    return ST_OK;
}

static enum status fault_reduce_scatter(struct comm *comm, struct stream *s, void *out,
                                        const void *in, int64_t numel, enum dtype dtype,
                                        struct event *done)
{
    struct fault_comm *f = fault_of(comm);
    enum fault_kind what;
    TRY(before(f, &what));
    if (what == FAULT_DROP) {
        done->complete = NULL;
        return ST_OK;
    }
    TRY(comm_reduce_scatter(f->inner, s, out, in, numel, dtype, done));
    if (what == FAULT_CORRUPT)
        TRY(corrupt(done, out, (size_t)numel * dtype_bytes(dtype)));
    return ST_OK;
}

static enum status fault_broadcast(struct comm *comm, struct stream *s, void *data, int64_t numel,
                                   enum dtype dtype, int root, struct event *done)
{
    struct fault_comm *f = fault_of(comm);
    enum fault_kind what;
    TRY(before(f, &what));
    if (what == FAULT_DROP) {
        done->complete = NULL;
        return ST_OK;
    }
    TRY(comm_broadcast(f->inner, s, data, numel, dtype, root, done));
    if (what == FAULT_CORRUPT)
        TRY(corrupt(done, data, (size_t)numel * dtype_bytes(dtype)));
    return ST_OK;
}

static enum status fault_exchange(struct comm *comm, void *recv, const void *send, size_t bytes)
{
    struct fault_comm *f = fault_of(comm);
    enum fault_kind what;
    TRY(before(f, &what));
    if (what == FAULT_DROP)
        return ST_OK;
    TRY(comm_exchange(f->inner, recv, send, bytes));
    if (what == FAULT_CORRUPT && bytes > 0)
        ((unsigned char *)recv)[bytes * (size_t)comm->world_size / 2] ^= 1;
    return ST_OK;
}

static enum status fault_progress(struct comm *comm)
{
    return comm_progress(fault_of(comm)->inner);
}

static enum status fault_ready(struct comm *comm)
{
    struct comm *inner = fault_of(comm)->inner;
    TRY(comm_ready(inner));
    comm->opening = inner->opening;
    comm->window_bytes = inner->window_bytes;
    memcpy(comm->memory_text, inner->memory_text, sizeof comm->memory_text);
    return ST_OK;
}

static void fault_stage(struct comm *comm, void *memory, size_t bytes)
{
    comm_stage(fault_of(comm)->inner, memory, bytes);
}

static enum status fault_memory_open(struct comm *comm, struct device *device, void **out,
                                     size_t bytes)
{
    TRY(comm_memory_open(fault_of(comm)->inner, device, out, bytes));
    comm->window_bytes = fault_of(comm)->inner->window_bytes;
    memcpy(comm->memory_text, fault_of(comm)->inner->memory_text, sizeof comm->memory_text);
    return ST_OK;
}

static void fault_memory_close(struct comm *comm, struct device *device, void **memory)
{
    comm_memory_close(fault_of(comm)->inner, device, memory);
}

static void fault_abort(struct comm *comm, const char *cause)
{
    struct fault_comm *f = fault_of(comm);
    pthread_mutex_lock(&f->monitor.mutex);
    f->aborted = true;
    pthread_cond_broadcast(&f->monitor.changed);
    pthread_mutex_unlock(&f->monitor.mutex);
    comm_abort(f->inner, cause);
}

static void fault_close(struct comm *comm)
{
    struct fault_comm *f = fault_of(comm);
    comm_close(&f->inner);
    monitor_release(&f->monitor);
    mem_free(&f);
}

static const struct comm_ops fault_ops = {
    .name = "fault",
    .all_gather = fault_all_gather,
    .reduce_scatter = fault_reduce_scatter,
    .broadcast = fault_broadcast,
    .exchange = fault_exchange,
    .progress = fault_progress,
    .ready = fault_ready,
    .stage = fault_stage,
    .memory_open = fault_memory_open,
    .memory_close = fault_memory_close,
    .abort = fault_abort,
    .close = fault_close,
};

enum status fault_comm_open(struct comm **out, struct comm *inner, struct fault_plan plan)
{
    *out = NULL;
    if (plan.at < 0 || plan.delay_ms < 0)
        return FAIL(INVALID, "fault plan: at is %lld, delay_ms is %lld; give 0 or more",
                    (long long)plan.at, (long long)plan.delay_ms);
    struct fault_comm *f = NULL;
    TRY(mem_alloc(&f, sizeof *f));
    f->base = *inner;
    f->base.ops = &fault_ops;
    f->inner = inner;
    f->plan = plan;
    enum status st = monitor_init(&f->monitor);
    if (st != ST_OK) {
        mem_free(&f);
        return st;
    }
    *out = &f->base;
    return ST_OK;
}

int64_t fault_count(const struct comm *comm)
{
    return ((const struct fault_comm *)comm)->count;
}
