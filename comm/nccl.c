#include "comm/nccl.h"

#include <stdio.h>
#include <string.h>

#include "comm/nccl_private.h"
#include "comm/socket.h"
#include "engine/base/arena.h"
#include "engine/base/log.h"
#include "engine/device/cuda_check.h"

enum status nccl_check(ncclResult_t result, const char *call, const char *file, int line)
{
    if (result == ncclSuccess)
        return ST_OK;
    const char *detail = ncclGetLastError(NULL);
    return status_fail(ST_COMM, file, line, "%s: %s%s%s", call, ncclGetErrorString(result),
                       detail != NULL && detail[0] != '\0' ? ": " : "",
                       detail != NULL ? detail : "");
}

void nccl_first_line(char *out, size_t bytes, const char *message)
{
    snprintf(out, bytes, "%.*s", (int)strcspn(message, "\n"), message);
}

/* ---- collectives ----------------------------------------------------------------------------- */

static ncclDataType_t type_of(enum dtype dtype)
{
    return dtype == DTYPE_F32    ? ncclFloat32
           : dtype == DTYPE_BF16 ? ncclBfloat16
           : dtype == DTYPE_I32  ? ncclInt32
                                 : ncclFloat64;
}

/* NCCL failed at something: because of a peer? */
static enum status issued(struct nccl_comm *n, enum status st)
{
    char own[CAUSE_BYTES];
    if (st == ST_OK)
        return ST_OK;
    snprintf(own, sizeof own, "%s", status_message());
    TRY(nccl_peers_cause(n, CAUSE_WAIT_MS));
    status_set_message(own);
    return st;
}

/* Host waits for the device end with the peers, and at the deadline. */
static void watch(struct nccl_comm *n)
{
    n->device->watch = nccl_watch;
    n->device->watch_context = n;
}

/*
 * The opening began with the communicator; its end is here. Failing, it ends the others too: they
 * must not wait for this rank. What stands of the communicators is aborted once the opening ends.
 */
static enum status ready(struct comm *comm)
{
    struct nccl_comm *n = (struct nccl_comm *)comm;
    TRY(nccl_failure(n));
    if (!comm->opening)
        return ST_OK;
    enum status st = issued(
        n, nccl_job_wait(n, CALL, comm->timeout_ms, true, "setting up NCCL's communicators"));
    if (st != ST_OK) {
        char cause[CAUSE_BYTES];
        nccl_first_line(cause, sizeof cause, status_message());
        return nccl_give_up(n, st, cause);
    }
    comm->opening = false;
    watch(n);
    return nccl_memory_ready(n);
}

/* Before each collective: is the communicator alive, and which one? */
static enum status begin(struct nccl_comm *n, const struct stream *s, const char *name,
                         int64_t numel, enum dtype dtype, ncclComm_t *comm)
{
    TRY(ready(&n->base));
    *comm = n->comms[s->id == STREAM_REDUCE ? REDUCE : GATHER];
    n->issued++;
    n->last_name = name;
    n->last_numel = numel;
    n->last_dtype = dtype;
    n->last_stream = s->id;
    return ST_OK;
}

/* One rank has no communicators: they would take 1 GB of the card, and a graph with NCCL's calls in
 * it has edges that nobody needs. */
static enum status alone(struct stream *s, void *out, const void *in, int64_t numel,
                         enum dtype dtype, struct event *done)
{
    if (out != in)
        TRY(device_copy(s, out, in, (size_t)numel * dtype_bytes(dtype)));
    return event_record(done, s);
}

static enum status all_gather(struct comm *comm, struct stream *s, void *out, const void *in,
                              int64_t numel, enum dtype dtype, struct event *done)
{
    struct nccl_comm *n = (struct nccl_comm *)comm;
    size_t bytes = (size_t)numel * dtype_bytes(dtype);
    ncclComm_t nccl = NULL;
    if (comm->world_size == 1)
        return alone(s, out, in, numel, dtype, done);
    TRY(begin(n, s, "all_gather", numel, dtype, &nccl));
    if (nccl_peers_serve(n, in, out, bytes))
        TRY(nccl_peers_gather(n, s, out, in, bytes));
    else
        TRY(issued(n, NCCL(ncclAllGather(in, out, (size_t)numel, type_of(dtype), nccl,
                                         (cudaStream_t)s->handle))));
    return event_record(done, s);
}

static enum status reduce_scatter(struct comm *comm, struct stream *s, void *out, const void *in,
                                  int64_t numel, enum dtype dtype, struct event *done)
{
    struct nccl_comm *n = (struct nccl_comm *)comm;
    size_t bytes = (size_t)numel * dtype_bytes(dtype);
    ncclComm_t nccl = NULL;
    if (comm->world_size == 1)
        return alone(s, out, in, numel, dtype, done);
    TRY(begin(n, s, "reduce_scatter", numel, dtype, &nccl));
    if (nccl_peers_serve(n, out, in, bytes))
        TRY(nccl_peers_reduce(n, s, out, in, bytes, dtype));
    else
        TRY(issued(n, NCCL(ncclReduceScatter(in, out, (size_t)numel, type_of(dtype), ncclSum, nccl,
                                             (cudaStream_t)s->handle))));
    return event_record(done, s);
}

static enum status broadcast(struct comm *comm, struct stream *s, void *data, int64_t numel,
                             enum dtype dtype, int root, struct event *done)
{
    ncclComm_t nccl = NULL;
    if (comm->world_size == 1)
        return alone(s, data, data, numel, dtype, done);
    TRY(begin((struct nccl_comm *)comm, s, "broadcast", numel, dtype, &nccl));
    TRY(issued((struct nccl_comm *)comm,
               NCCL(ncclBroadcast(data, data, (size_t)numel, type_of(dtype), root, nccl,
                                  (cudaStream_t)s->handle))));
    return event_record(done, s);
}

enum status nccl_exchange(struct comm *comm, void *recv, const void *send, size_t bytes)
{
    struct nccl_comm *n = (struct nccl_comm *)comm;
    TRY(nccl_failure(n));
    if (n->rv == NULL) {
        if (bytes > 0)
            memmove(recv, send, bytes);
        return ST_OK;
    }
    enum status st = rendezvous_exchange(n->rv, recv, send, bytes);
    if (st == ST_OK)
        return ST_OK;
    char cause[CAUSE_BYTES];
    nccl_first_line(cause, sizeof cause, status_message());
    return nccl_give_up(n, st, cause);
}

/* ---- open and close ------------------------------------------------------------------------- */

static void run_destroy(struct job *job)
{
    struct nccl_comm *n = job->comm;
    for (int i = COMMS - 1; i >= 0 && job->st == ST_OK; i--)
        if (n->comms[i] != NULL)
            job->st = NCCL(ncclCommDestroy(n->comms[i]));
}

/* From any thread, so it does not wait for the aborts: the rank's own thread may be inside NCCL. */
static void abort_comm(struct comm *comm, const char *cause)
{
    struct nccl_comm *n = (struct nccl_comm *)comm;
    char text[CAUSE_BYTES];
    snprintf(text, sizeof text, "rank %d: %s", comm->rank, cause);
    bool first = nccl_note_failure(n, ST_COMM, text);
    if (n->rv != NULL)
        rendezvous_abort(n->rv, cause);
    if (first)
        nccl_start_aborts(n);
}

/* What a job still uses stays behind, and the device with it. */
static void release(struct nccl_comm *n)
{
    if (!nccl_jobs_end(n, COMM_ABORT_MS)) {
        n->device->lost = true;
        return;
    }
    pthread_mutex_destroy(&n->lock);
    mem_free(&n);
}

static void close_comm(struct comm *comm)
{
    struct nccl_comm *n = (struct nccl_comm *)comm;
    n->device->watch = NULL;
    n->device->watch_context = NULL;
    pthread_mutex_lock(&n->lock);
    bool healthy = !n->ended && !nccl_job_running(&n->jobs[CALL]);
    n->ended = true;
    pthread_mutex_unlock(&n->lock);
    /* A peer that ended early can make it wait, so this too has a limit. */
    if (healthy && nccl_job_start(n, CALL, run_destroy) == ST_OK &&
        nccl_job_wait(n, CALL, CLOSE_WAIT_MS, false, "closing NCCL's communicators") != ST_OK)
        log_warn("nccl", "%s (is a captured graph still open?)", status_message());
    release(n);
}

static const struct comm_ops nccl_ops = {
    .name = "nccl",
    .all_gather = all_gather,
    .reduce_scatter = reduce_scatter,
    .broadcast = broadcast,
    .exchange = nccl_exchange,
    .progress = comm_no_progress,
    .ready = ready,
    .stage = comm_no_stage,
    .memory_open = nccl_memory_open,
    .memory_close = nccl_memory_close,
    .abort = abort_comm,
    .close = close_comm,
};

/* Blocking communicators: a non-blocking one may launch from a thread of NCCL's, which a capture by
 * this thread would not see. */
static void run_open(struct job *job)
{
    struct nccl_comm *n = job->comm;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    int major = 0;
    config.blocking = 1;
    config.maxCTAs = COLLECTIVE_BLOCKS;
    job->st =
        CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, n->device->index));
    if (job->st != ST_OK)
        return;
    if (n->windows != WINDOWS_NONE && major >= 9)
        config.minCTAs = COLLECTIVE_BLOCKS;
    job->st = NCCL(ncclCommInitRankConfig(&n->comms[GATHER], n->base.world_size, n->id,
                                          n->base.rank, &config));
    if (job->st == ST_OK)
        job->st =
            NCCL(ncclCommSplit(n->comms[GATHER], 0, n->base.rank, &n->comms[REDUCE], &config));
}

/* Each rank sends an id, and only the first is used. */
enum status nccl_id_share(struct nccl_id *id, int rank, int world_size, struct rendezvous *rv)
{
    enum status st = ST_OK;
    ncclUniqueId mine;
    struct nccl_id *all = NULL;
    _Static_assert(sizeof mine == sizeof *id, "the library's id fits exactly");
    memset(&mine, 0, sizeof mine);
    memset(id, 0, sizeof *id);
    if (world_size == 1)
        return ST_OK;
    TRY_GOTO(st, out, mem_alloc(&all, (size_t)world_size * sizeof *all));
    if (rank == 0)
        TRY_GOTO(st, out, NCCL(ncclGetUniqueId(&mine)));
    TRY_GOTO(st, out, rendezvous_exchange(rv, all, &mine, sizeof mine));
    *id = all[0];
out:
    mem_free(&all);
    return st;
}

static enum status begin_opening(struct nccl_comm *n)
{
    if (n->base.world_size == 1)
        return ST_OK;
    TRY(nccl_call_start(n, run_open));
    n->base.opening = true;
    return ST_OK;
}

enum status nccl_comm_open(struct comm **out, struct device *device, int rank, int world_size,
                           const struct nccl_id *id, struct rendezvous *rv, int64_t timeout_ms,
                           enum window_kind windows)
{
    struct nccl_comm *n = NULL;
    *out = NULL;
    ASSERT(rv != NULL || world_size == 1);
    TRY(mem_alloc(&n, sizeof *n));
    n->base = (struct comm){
        .ops = &nccl_ops, .rank = rank, .world_size = world_size, .timeout_ms = timeout_ms};
    n->device = device;
    n->rv = world_size > 1 ? rv : NULL;
    memcpy(&n->id, id, sizeof n->id);
    n->base.multiprocessors = world_size > 1 ? COLLECTIVE_BLOCKS : 0;
    n->windows = windows;
    pthread_mutex_init(&n->lock, NULL);
    enum status st = begin_opening(n);
    if (st != ST_OK) {
        /* The others must not wait for this rank. */
        char cause[CAUSE_BYTES];
        snprintf(cause, sizeof cause, "%s", status_message());
        if (n->rv != NULL)
            rendezvous_abort(n->rv, cause);
        release(n);
        status_set_message(cause);
        return status_trace(st, __FILE__, __LINE__);
    }
    if (!n->base.opening)
        watch(n);
    *out = &n->base;
    return ST_OK;
}
