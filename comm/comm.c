#include "comm/comm.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/bf16.h"

enum {
    EXCHANGE_MAX_BYTES = 64 * 1024,
    MESSAGE_BYTES = 4096,    /* as much of a message as a rank tells its peers */
    AGREE_STACK_BYTES = 8192 /* the message travels in pieces, so that all ranks' fit here */
};

/* What every collective with a dtype has to be; @name is the caller's, for the message. */
static enum status check(const struct comm *comm, const char *name, int64_t numel, enum dtype dtype,
                         bool has_buffers)
{
    if (numel < 0)
        return FAIL(INVALID, "%s: numel is %lld; give 0 or more", name, (long long)numel);
    if (dtype != DTYPE_F32 && dtype != DTYPE_BF16 && dtype != DTYPE_I32)
        return FAIL(INVALID, "%s: dtype %s is not supported; use fp32, bf16 or int32", name,
                    dtype_name(dtype));
    if (numel > 0 && !has_buffers)
        return FAIL(INVALID, "%s: a buffer is NULL and numel is %lld", name, (long long)numel);
    size_t bytes = 0;
    TRY(checked_mul(&bytes, (size_t)numel, dtype_bytes(dtype) * (size_t)comm->world_size));
    return ST_OK;
}

enum status comm_all_gather(struct comm *comm, struct stream *s, void *out, const void *in,
                            int64_t numel, enum dtype dtype, struct event *done)
{
    ASSERT(s != NULL && done != NULL);
    TRY(check(comm, "all_gather", numel, dtype, out != NULL && in != NULL));
    return comm->ops->all_gather(comm, s, out, in, numel, dtype, done);
}

enum status comm_reduce_scatter(struct comm *comm, struct stream *s, void *out, const void *in,
                                int64_t numel, enum dtype dtype, struct event *done)
{
    ASSERT(s != NULL && done != NULL);
    TRY(check(comm, "reduce_scatter", numel, dtype, out != NULL && in != NULL));
    if (dtype == DTYPE_I32)
        return FAIL(INVALID, "reduce_scatter: dtype %s cannot be summed; use fp32 or bf16",
                    dtype_name(dtype));
    return comm->ops->reduce_scatter(comm, s, out, in, numel, dtype, done);
}

enum status comm_broadcast(struct comm *comm, struct stream *s, void *data, int64_t numel,
                           enum dtype dtype, int root, struct event *done)
{
    ASSERT(s != NULL && done != NULL);
    TRY(check(comm, "broadcast", numel, dtype, data != NULL));
    if (root < 0 || root >= comm->world_size)
        return FAIL(INVALID, "broadcast: root %d is not in the world of %d ranks", root,
                    comm->world_size);
    return comm->ops->broadcast(comm, s, data, numel, dtype, root, done);
}

enum status comm_exchange(struct comm *comm, void *recv, const void *send, size_t bytes)
{
    if (bytes > EXCHANGE_MAX_BYTES)
        return FAIL(INVALID, "exchange: %zu bytes a rank are more than %d", bytes,
                    EXCHANGE_MAX_BYTES);
    if (bytes > 0 && (recv == NULL || send == NULL))
        return FAIL(INVALID, "exchange: a buffer is NULL and there are %zu bytes", bytes);
    return comm->ops->exchange(comm, recv, send, bytes);
}

enum status comm_progress(struct comm *comm)
{
    return comm->ops->progress(comm);
}

enum status comm_ready(struct comm *comm)
{
    return comm->ops->ready(comm);
}

/* The others sum from where the peers' buffers are, or have NCCL's own. */
size_t comm_staging_bytes(enum comm_kind kind, int world_size, int64_t numel)
{
    if (kind != COMM_MPI || world_size == 1)
        return 0;
    return (size_t)numel * (size_t)world_size * sizeof(float);
}

void comm_stage(struct comm *comm, void *memory, size_t bytes)
{
    comm->ops->stage(comm, memory, bytes);
}

enum status comm_no_progress(struct comm *comm)
{
    (void)comm;
    return ST_OK;
}

enum status comm_is_ready(struct comm *comm)
{
    ASSERT(!comm->opening);
    return ST_OK;
}

void comm_no_stage(struct comm *comm, void *memory, size_t bytes)
{
    (void)comm;
    (void)memory;
    (void)bytes;
}

enum status comm_memory_open(struct comm *comm, struct device *device, void **out, size_t bytes)
{
    return comm->ops->memory_open(comm, device, out, bytes);
}

void comm_memory_close(struct comm *comm, struct device *device, void **memory)
{
    if (*memory != NULL)
        comm->ops->memory_close(comm, device, memory);
}

enum status comm_any_memory(struct comm *comm, struct device *device, void **out, size_t bytes)
{
    (void)comm;
    return device_alloc(device, out, bytes);
}

void comm_any_memory_close(struct comm *comm, struct device *device, void **memory)
{
    (void)comm;
    device_free(device, memory);
}

enum status comm_barrier(struct comm *comm)
{
    ASSERT(comm->world_size <= COMM_MAX_WORLD_SIZE);
    char here = 1, all[COMM_MAX_WORLD_SIZE];
    TRY(comm_exchange(comm, all, &here, sizeof here));
    return ST_OK;
}

/* The message of rank @first, the same on all ranks. Short ones end after a round. */
static enum status share_message(struct comm *comm, char theirs[MESSAGE_BYTES],
                                 const char mine[MESSAGE_BYTES], int first)
{
    char all[AGREE_STACK_BYTES];
    size_t piece = MESSAGE_BYTES;
    while (piece * (size_t)comm->world_size > sizeof all)
        piece /= 2;
    for (size_t at = 0; at < MESSAGE_BYTES; at += piece) {
        TRY(comm_exchange(comm, all, mine + at, piece));
        memcpy(theirs + at, all + (size_t)first * piece, piece);
        if (memchr(theirs + at, '\0', piece) != NULL)
            break;
    }
    theirs[MESSAGE_BYTES - 1] = '\0';
    return ST_OK;
}

enum status comm_agree(struct comm *comm, enum status st)
{
    ASSERT(comm->world_size <= COMM_MAX_WORLD_SIZE);
    char mine[MESSAGE_BYTES] = "", theirs[MESSAGE_BYTES];
    if (st != ST_OK)
        snprintf(mine, sizeof mine, "%s", status_message());

    int32_t own = (int32_t)st, all[COMM_MAX_WORLD_SIZE];
    int first = 0;
    enum status agreed = comm_exchange(comm, all, &own, sizeof own);
    if (agreed == ST_OK) {
        while (first < comm->world_size && all[first] == ST_OK)
            first++;
        if (first == comm->world_size)
            return ST_OK;
        agreed = share_message(comm, theirs, mine, first);
    }
    if (agreed != ST_OK) {
        /* The peers cannot be told. This rank's own failure is then closer to the cause. */
        if (st == ST_OK)
            return agreed;
        status_set_message(mine);
        return st;
    }
    if (first == comm->rank) {
        status_set_message(mine);
        return st;
    }
    char text[MESSAGE_BYTES + 32];
    snprintf(text, sizeof text, "rank %d: %s", first, theirs);
    status_set_message(text);
    return all[first] > ST_OK && all[first] < ST_COUNT ? (enum status)all[first] : ST_COMM;
}

enum status comm_share(struct comm *comm, void *data, size_t bytes)
{
    char *all = NULL;
    enum status st = mem_alloc(&all, bytes * (size_t)comm->world_size);
    TRY_GOTO(st, out, comm_agree(comm, st));
    TRY_GOTO(st, out, comm_exchange(comm, all, data, bytes));
    memcpy(data, all, bytes);
out:
    mem_free(&all);
    return st;
}

void comm_abort(struct comm *comm, const char *cause)
{
    comm->ops->abort(comm, cause);
}

void comm_close(struct comm **comm)
{
    if (*comm != NULL)
        (*comm)->ops->close(*comm);
    *comm = NULL;
}

void comm_load(float *restrict sum, const void *restrict in, int64_t numel, enum dtype dtype)
{
    const uint16_t *halves = in;
    if (dtype == DTYPE_F32)
        memcpy(sum, in, sizeof *sum * (size_t)numel);
    for (int64_t i = 0; dtype == DTYPE_BF16 && i < numel; i++)
        sum[i] = bf16_widen(halves[i]);
}

static void add_fp32(float *restrict sum, const float *restrict in, int64_t numel)
{
    enum { LANES = 16 }; /* a known count: the compiler makes vectors of it */
    int64_t i = 0;
    for (; i + LANES <= numel; i += LANES) {
        for (int k = 0; k < LANES; k++)
            sum[i + k] += in[i + k];
    }
    for (; i < numel; i++)
        sum[i] += in[i];
}

void comm_add(float *restrict sum, const void *restrict in, int64_t numel, enum dtype dtype)
{
    const uint16_t *halves = in;
    if (dtype == DTYPE_F32)
        add_fp32(sum, in, numel);
    for (int64_t i = 0; dtype == DTYPE_BF16 && i < numel; i++)
        sum[i] += bf16_widen(halves[i]);
}

void comm_store(void *restrict out, const float *restrict sum, int64_t numel, enum dtype dtype)
{
    uint16_t *halves = out;
    if (dtype == DTYPE_F32)
        memcpy(out, sum, sizeof *sum * (size_t)numel);
    for (int64_t i = 0; dtype == DTYPE_BF16 && i < numel; i++)
        halves[i] = bf16_round(sum[i]);
}
