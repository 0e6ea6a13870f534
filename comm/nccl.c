#include "comm/nccl.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* NCCL's header is written for fewer warnings than ours. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wundef"
#pragma GCC diagnostic ignored "-Wstrict-prototypes"
#include <nccl.h>
#pragma GCC diagnostic pop

#include "comm/socket.h"
#include "engine/base/arena.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/device/cuda_check.h"

enum {
    GATHER,
    REDUCE,
    COMMS,
    CALL = COMMS, /* among the jobs; those below are the communicators' aborts */
    JOBS,
    CAUSE_BYTES = 1024,
    WHY_BYTES = 120,
    CAUSE_WAIT_MS = 1000, /* a peer's cause may come a little later than what it leads to */
    CLOSE_WAIT_MS = 10000,
    POLL_US = 2000
};

/*
 * NCCL calls that may block for ever run in a thread of their own, so that this rank can give up on
 * them. They then stay behind, and so does what they use.
 *
 * The rank's own thread starts one CALL at a time: open, register, deregister, destroy. An abort
 * may be started beside it, by any thread, so each communicator's abort has a job of its own,
 * started at most once. It frees the communicator, and so first waits for the CALL that uses it,
 * even one that was given up on: a CALL runs while no collective is in flight, so no kernel waits
 * meanwhile for the abort. Once aborts have begun (`ended`), no CALL starts.
 */
struct job {
    struct nccl_comm *comm;
    void (*run)(struct job *job);
    int which;      /* GATHER or REDUCE: the communicator to abort; CALL */
    enum status st; /* with the message, which is a thread's own */
    char message[CAUSE_BYTES];
    atomic_bool running; /* its thread may still use this and the communicator */
};

struct nccl_comm {
    struct comm base;        /* first: a struct comm * is a struct nccl_comm * */
    struct device *device;   /* borrowed */
    struct rendezvous *rv;   /* borrowed; NULL with one rank */
    ncclComm_t comms[COMMS]; /* owned */
    ncclUniqueId id;
    struct job jobs[JOBS];
    bool wants_windows;
    void *window;                   /* owned, the block of comm_memory_open(); NULL: no window */
    size_t window_size;             /* its bytes */
    ncclWindow_t registered[COMMS]; /* owned */
    /* The last collective that was issued, for messages. */
    int64_t issued, last_numel;
    const char *last_name;
    enum dtype last_dtype;
    enum stream_id last_stream;
    pthread_mutex_t lock; /* of the three below */
    bool ended;           /* the communicators are being aborted or closed: hands off */
    enum status failed;
    char cause[CAUSE_BYTES];
};

static enum status nccl_check(ncclResult_t result, const char *call, const char *file, int line)
{
    if (result == ncclSuccess)
        return ST_OK;
    const char *detail = ncclGetLastError(NULL);
    return status_fail(ST_COMM, file, line, "%s: %s%s%s", call, ncclGetErrorString(result),
                       detail != NULL && detail[0] != '\0' ? ": " : "",
                       detail != NULL ? detail : "");
}

#define NCCL(call) nccl_check((call), #call, __FILE__, __LINE__)

/* Text of a message without its trace. */
static void first_line(char *out, size_t bytes, const char *message)
{
    snprintf(out, bytes, "%.*s", (int)strcspn(message, "\n"), message);
}

/* ---- calls that may not return -------------------------------------------------------------- */

static void *job_main(void *argument)
{
    struct job *job = argument;
    job->st = CUDA(cudaSetDevice(job->comm->device->index));
    if (job->st == ST_OK)
        job->run(job);
    snprintf(job->message, sizeof job->message, "%s", status_message());
    atomic_store(&job->running, false);
    return NULL;
}

static enum status job_start(struct nccl_comm *n, int which, void (*run)(struct job *job))
{
    struct job *job = &n->jobs[which];
    job->comm = n;
    job->run = run;
    job->which = which;
    pthread_t thread;
    atomic_store(&job->running, true);
    int error = pthread_create(&thread, NULL, job_main, job);
    if (error != 0) {
        atomic_store(&job->running, false);
        return FAIL(SYSTEM, "cannot start a thread: %s", strerror(error));
    }
    pthread_detach(thread);
    return ST_OK;
}

/* Wait for a job that was started. @check: peers may fail meanwhile. */
static enum status job_wait(struct nccl_comm *n, int which, int64_t wait_ms, bool check,
                            const char *what)
{
    struct job *job = &n->jobs[which];
    int64_t deadline = clock_ms() + wait_ms;
    while (atomic_load(&job->running)) {
        if (clock_ms() > deadline)
            return FAIL(TIMEOUT, "rank %d: %s did not end in %.1f s", n->base.rank, what,
                        (double)wait_ms / 1000.0);
        if (check && n->rv != NULL)
            TRY(rendezvous_check(n->rv));
        clock_pause_us(POLL_US);
    }
    if (job->st != ST_OK)
        status_set_message(job->message);
    return job->st;
}

/* Start the next CALL. ST_COMM: the communicators are being aborted, or one that was given up on
 * still has them. */
static enum status call_start(struct nccl_comm *n, void (*run)(struct job *job))
{
    enum status st = ST_OK;
    pthread_mutex_lock(&n->lock);
    if (n->ended)
        st = FAIL(COMM, "%s", n->cause);
    else if (atomic_load(&n->jobs[CALL].running))
        st = FAIL(COMM, "rank %d: the NCCL call before this one has not ended", n->base.rank);
    else
        st = job_start(n, CALL, run);
    pthread_mutex_unlock(&n->lock);
    return st;
}

static void run_abort(struct job *job)
{
    struct nccl_comm *n = job->comm;
    while (atomic_load(&n->jobs[CALL].running))
        clock_pause_us(POLL_US);
    if (n->comms[job->which] != NULL) /* opening it may have failed */
        job->st = NCCL(ncclCommAbort(n->comms[job->which]));
}

static void run_destroy(struct job *job)
{
    struct nccl_comm *n = job->comm;
    for (int i = COMMS - 1; i >= 0 && job->st == ST_OK; i--)
        if (n->comms[i] != NULL)
            job->st = NCCL(ncclCommDestroy(n->comms[i]));
}

/* Blocking communicators: a non-blocking one may launch from a thread of NCCL's, which a capture
 * by this thread would not see. */
static void run_open(struct job *job)
{
    struct nccl_comm *n = job->comm;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;
    job->st = NCCL(ncclCommInitRankConfig(&n->comms[GATHER], n->base.world_size, n->id,
                                          n->base.rank, &config));
    if (job->st == ST_OK)
        job->st =
            NCCL(ncclCommSplit(n->comms[GATHER], 0, n->base.rank, &n->comms[REDUCE], &config));
}

static void run_register(struct job *job)
{
    struct nccl_comm *n = job->comm;
    for (int i = 0; i < COMMS && job->st == ST_OK; i++)
        job->st = NCCL(ncclCommWindowRegister(n->comms[i], n->window, n->window_size,
                                              &n->registered[i], NCCL_WIN_COLL_SYMMETRIC));
}

static void run_deregister(struct job *job)
{
    struct nccl_comm *n = job->comm;
    for (int i = COMMS - 1; i >= 0; i--)
        if (n->registered[i] != NULL && job->st == ST_OK)
            job->st = NCCL(ncclCommWindowDeregister(n->comms[i], n->registered[i]));
}

/* ---- failure -------------------------------------------------------------------------------- */

static enum status failure(struct nccl_comm *n)
{
    pthread_mutex_lock(&n->lock);
    enum status st = n->failed;
    if (st != ST_OK)
        status_fail(st, __FILE__, __LINE__, "%s", n->cause);
    pthread_mutex_unlock(&n->lock);
    return st;
}

/* Note a failure and take the communicators away. true: this call did, and has to abort them. */
static bool note_failure(struct nccl_comm *n, enum status st, const char *cause)
{
    pthread_mutex_lock(&n->lock);
    if (n->failed == ST_OK) {
        n->failed = st;
        snprintf(n->cause, sizeof n->cause, "%s", cause);
    }
    bool first = !n->ended;
    n->ended = true;
    pthread_mutex_unlock(&n->lock);
    return first;
}

/*
 * Kernels that wait for a peer end when their communicator is aborted. Each abort has its own
 * thread: one of them frees device memory, which waits for the kernels of the other. And nobody
 * waits for them for long: an abort only ends after the last graph that holds its collectives.
 */
static void start_aborts(struct nccl_comm *n)
{
    for (int i = 0; i < COMMS; i++)
        if (job_start(n, i, run_abort) != ST_OK)
            log_debug("nccl", "%s", status_message());
}

static bool jobs_end(struct nccl_comm *n, int64_t wait_ms)
{
    bool ended = true;
    int64_t end = clock_ms() + wait_ms;
    for (int i = 0; i < JOBS; i++) {
        int64_t left = end - clock_ms();
        if (job_wait(n, i, left > 0 ? left : 0, false, "an NCCL call") == ST_TIMEOUT)
            ended = false;
    }
    return ended;
}

/* Give up: for the host waits and exchanges of the rank's own thread. */
static enum status give_up(struct nccl_comm *n, enum status st, const char *cause)
{
    bool first = note_failure(n, st, cause);
    if (n->rv != NULL)
        rendezvous_abort(n->rv, cause);
    if (first) {
        start_aborts(n);
        jobs_end(n, COMM_ABORT_MS);
    }
    return failure(n);
}

/*
 * The end of a peer's process shows in several ways: a fault in its memory, or NCCL's word about a
 * closed connection, may be here before the rank that saw it die has told. Its message names the
 * dead, so it has a moment to come.
 */
static enum status peers_cause(struct nccl_comm *n, int64_t wait_ms)
{
    int64_t deadline = clock_ms() + wait_ms;
    while (n->rv != NULL) {
        enum status st = rendezvous_check(n->rv);
        if (st != ST_OK) {
            char cause[CAUSE_BYTES];
            first_line(cause, sizeof cause, status_message());
            return give_up(n, st, cause);
        }
        if (clock_ms() >= deadline)
            return ST_OK;
        clock_pause_us(5000);
    }
    return ST_OK;
}

static enum status async_error(struct nccl_comm *n, char *cause, size_t bytes)
{
    enum status st = ST_OK;
    pthread_mutex_lock(&n->lock);
    for (int i = 0; !n->ended && st == ST_OK && i < COMMS; i++) {
        ncclResult_t state = ncclSuccess;
        if (n->comms[i] == NULL)
            continue;
        ncclResult_t asked = ncclCommGetAsyncError(n->comms[i], &state);
        if (asked == ncclSuccess && (state == ncclSuccess || state == ncclInProgress))
            continue;
        snprintf(cause, bytes, "NCCL's %s communicator failed: %s: %s",
                 i == GATHER ? "gather" : "reduce",
                 ncclGetErrorString(asked != ncclSuccess ? asked : state),
                 ncclGetLastError(n->comms[i]));
        st = ST_COMM;
    }
    pthread_mutex_unlock(&n->lock);
    return st;
}

static void describe_wait(const struct nccl_comm *n, char *out, size_t bytes)
{
    static const char *const streams[] = {"compute", "gather", "reduce", "update", "copy"};
    const struct device *d = n->device;
    int used = snprintf(out, bytes,
                        "the GPU did not come to the end of what it has to do in %.1f s; marks "
                        "passed:",
                        (double)n->base.timeout_ms / 1000.0);
    for (int s = 0; s <= STREAM_REDUCE; s++) { /* nothing marks the others */
        char name[128];
        uint32_t mark = device_progress(d, (enum stream_id)s);
        if (d->name_mark != NULL)
            d->name_mark(d->name_context, mark, name, sizeof name);
        else
            snprintf(name, sizeof name, "%u", mark);
        used += snprintf(out + used, bytes - (size_t)used, "%s %s %s", s > 0 ? "," : "", streams[s],
                         name);
    }
    if (n->issued > 0)
        snprintf(out + used, bytes - (size_t)used,
                 "; last collective issued: %s %lld of %lld %s on the %s stream", n->last_name,
                 (long long)n->issued, (long long)n->last_numel, dtype_name(n->last_dtype),
                 streams[n->last_stream]);
}

/* The device asks this while the host waits for it. */
static enum status watch(void *context, int64_t waited_ms)
{
    struct nccl_comm *n = context;
    char cause[CAUSE_BYTES];
    TRY(failure(n));
    TRY(peers_cause(n, waited_ms == DEVICE_FAILED ? CAUSE_WAIT_MS : 0));
    if (waited_ms == DEVICE_FAILED)
        return ST_OK;
    if (async_error(n, cause, sizeof cause) != ST_OK) {
        TRY(peers_cause(n, CAUSE_WAIT_MS));
        return give_up(n, ST_COMM, cause);
    }
    if (waited_ms < n->base.timeout_ms)
        return ST_OK;
    describe_wait(n, cause, sizeof cause);
    return give_up(n, ST_TIMEOUT, cause);
}

/* ---- the table ------------------------------------------------------------------------------ */

static ncclDataType_t type_of(enum dtype dtype)
{
    return dtype == DTYPE_F32    ? ncclFloat32
           : dtype == DTYPE_BF16 ? ncclBfloat16
           : dtype == DTYPE_I32  ? ncclInt32
                                 : ncclFloat64;
}

/* Before each collective: is the communicator alive, and which one? */
static enum status begin(struct nccl_comm *n, const struct stream *s, const char *name,
                         int64_t numel, enum dtype dtype, ncclComm_t *comm)
{
    TRY(failure(n));
    *comm = n->comms[s->id == STREAM_REDUCE ? REDUCE : GATHER];
    n->issued++;
    n->last_name = name;
    n->last_numel = numel;
    n->last_dtype = dtype;
    n->last_stream = s->id;
    return ST_OK;
}

/* NCCL refused a collective: because of a peer? */
static enum status issued(struct nccl_comm *n, enum status st)
{
    char own[CAUSE_BYTES];
    if (st == ST_OK)
        return ST_OK;
    snprintf(own, sizeof own, "%s", status_message());
    TRY(peers_cause(n, CAUSE_WAIT_MS));
    status_set_message(own);
    return st;
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
    ncclComm_t nccl = NULL;
    if (comm->world_size == 1)
        return alone(s, out, in, numel, dtype, done);
    TRY(begin((struct nccl_comm *)comm, s, "all_gather", numel, dtype, &nccl));
    TRY(issued((struct nccl_comm *)comm, NCCL(ncclAllGather(in, out, (size_t)numel, type_of(dtype),
                                                            nccl, (cudaStream_t)s->handle))));
    return event_record(done, s);
}

static enum status reduce_scatter(struct comm *comm, struct stream *s, void *out, const void *in,
                                  int64_t numel, enum dtype dtype, struct event *done)
{
    ncclComm_t nccl = NULL;
    if (comm->world_size == 1)
        return alone(s, out, in, numel, dtype, done);
    TRY(begin((struct nccl_comm *)comm, s, "reduce_scatter", numel, dtype, &nccl));
    TRY(issued((struct nccl_comm *)comm,
               NCCL(ncclReduceScatter(in, out, (size_t)numel, type_of(dtype), ncclSum, nccl,
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

static enum status exchange(struct comm *comm, void *recv, const void *send, size_t bytes)
{
    struct nccl_comm *n = (struct nccl_comm *)comm;
    TRY(failure(n));
    if (n->rv == NULL) {
        if (bytes > 0)
            memmove(recv, send, bytes);
        return ST_OK;
    }
    enum status st = rendezvous_exchange(n->rv, recv, send, bytes);
    if (st == ST_OK)
        return ST_OK;
    char cause[CAUSE_BYTES];
    first_line(cause, sizeof cause, status_message());
    return give_up(n, st, cause);
}

/* ---- the window ----------------------------------------------------------------------------- */

/* Have all ranks come this far? Where one has not, @why says which and what it said. */
static enum status all_can(struct nccl_comm *n, enum status st, bool *all, char why[WHY_BYTES])
{
    struct answer {
        int32_t can;
        char why[WHY_BYTES];
    } mine = {.can = st == ST_OK}, *answers = NULL;
    if (st != ST_OK)
        first_line(mine.why, sizeof mine.why, status_message());
    TRY(mem_alloc(&answers, sizeof *answers * (size_t)n->base.world_size));
    st = exchange(&n->base, answers, &mine, sizeof mine);
    *all = true;
    for (int r = n->base.world_size - 1; st == ST_OK && r >= 0; r--) {
        if (answers[r].can)
            continue;
        *all = false;
        snprintf(why, WHY_BYTES, "rank %d: %.100s", r, answers[r].why);
    }
    mem_free(&answers);
    return st;
}

static enum status window_alloc(struct nccl_comm *n, size_t bytes)
{
    int version = 0;
    TRY(NCCL(ncclGetVersion(&version)));
    if (version < NCCL_VERSION(2, 27, 3))
        return FAIL(UNSUPPORTED, "NCCL %d has none", version);
    TRY(NCCL(ncclMemAlloc(&n->window, bytes)));
    n->window_size = bytes;
    TRY(CUDA(cudaMemset(n->window, 0, bytes)));
    return CUDA(cudaDeviceSynchronize());
}

/* All ranks together. What ends the others' waits too is a failure; the rest means no window. */
static enum status window_register(struct nccl_comm *n)
{
    TRY(call_start(n, run_register));
    return job_wait(n, CALL, n->base.timeout_ms, true, "registering symmetric windows");
}

static void window_free(struct nccl_comm *n)
{
    if (n->window != NULL && ncclMemFree(n->window) != ncclSuccess)
        log_debug("nccl", "the block of the windows was not freed");
    n->window = NULL;
    memset(n->registered, 0, sizeof n->registered);
}

static enum status window_open(struct nccl_comm *n, size_t bytes, bool *all, char why[WHY_BYTES])
{
    size_t before = 0, after = 0;
    TRY(all_can(n, window_alloc(n, bytes), all, why));
    if (!*all)
        return ST_OK;
    TRY(device_memory_used(n->device, &before));
    enum status st = window_register(n);
    if (st == ST_TIMEOUT)
        return st;
    TRY(all_can(n, st, all, why));
    if (!*all) { /* those that could take it back */
        TRY(call_start(n, run_deregister));
        return job_wait(n, CALL, n->base.timeout_ms, true, "taking back symmetric windows");
    }
    TRY(device_memory_used(n->device, &after));
    n->base.window_bytes = after > before ? after - before : 0;
    return ST_OK;
}

static enum status memory_open(struct comm *comm, struct device *device, void **out, size_t bytes)
{
    struct nccl_comm *n = (struct nccl_comm *)comm;
    char why[WHY_BYTES] = "turned off";
    bool all = false;
    ASSERT(n->window == NULL);
    if (comm->world_size == 1)
        return device_alloc(device, out, bytes);
    if (n->wants_windows)
        TRY(window_open(n, bytes, &all, why));
    if (all) {
        snprintf(comm->memory_text, sizeof comm->memory_text,
                 "collectives in symmetric windows of %.0f MiB, %.1f MiB of tables",
                 (double)bytes / 1048576.0, (double)comm->window_bytes / 1048576.0);
        *out = n->window;
        return ST_OK;
    }
    snprintf(comm->memory_text, sizeof comm->memory_text,
             "collectives without symmetric windows: %s", why);
    window_free(n);
    return device_alloc(device, out, bytes);
}

/*
 * Peers' kernels have done with this block when this rank's own have: a collective ends on no rank
 * before all have read. After a failure that is not so, and the block stays until the process ends.
 */
static void memory_close(struct comm *comm, struct device *device, void **memory)
{
    struct nccl_comm *n = (struct nccl_comm *)comm;
    if (*memory != n->window) {
        device_free(device, memory);
        return;
    }
    *memory = NULL;
    if (stream_sync(&device->streams[STREAM_COMPUTE]) != ST_OK || failure(n) != ST_OK)
        return;
    if (call_start(n, run_deregister) == ST_OK &&
        job_wait(n, CALL, CLOSE_WAIT_MS, false, "taking back symmetric windows") == ST_OK)
        window_free(n);
    else
        log_debug("nccl", "%s", status_message());
}

/* From any thread, so it does not wait for the aborts: the rank's own thread may be inside NCCL. */
static void abort_comm(struct comm *comm, const char *cause)
{
    struct nccl_comm *n = (struct nccl_comm *)comm;
    char text[CAUSE_BYTES];
    snprintf(text, sizeof text, "rank %d: %s", comm->rank, cause);
    bool first = note_failure(n, ST_COMM, text);
    if (n->rv != NULL)
        rendezvous_abort(n->rv, cause);
    if (first)
        start_aborts(n);
}

/* What a job still uses stays behind. */
static void release(struct nccl_comm *n)
{
    if (!jobs_end(n, COMM_ABORT_MS))
        return;
    pthread_mutex_destroy(&n->lock);
    mem_free(&n);
}

static void close_comm(struct comm *comm)
{
    struct nccl_comm *n = (struct nccl_comm *)comm;
    n->device->watch = NULL;
    n->device->watch_context = NULL;
    pthread_mutex_lock(&n->lock);
    bool healthy = !n->ended && !atomic_load(&n->jobs[CALL].running);
    n->ended = true;
    pthread_mutex_unlock(&n->lock);
    /* A peer that ended early can make it wait, so this too has a limit. */
    if (healthy && job_start(n, CALL, run_destroy) == ST_OK &&
        job_wait(n, CALL, CLOSE_WAIT_MS, false, "closing NCCL's communicators") != ST_OK)
        log_warn("nccl", "%s (is a captured graph still open?)", status_message());
    release(n);
}

static const struct comm_ops nccl_ops = {
    .name = "nccl",
    .all_gather = all_gather,
    .reduce_scatter = reduce_scatter,
    .broadcast = broadcast,
    .exchange = exchange,
    .progress = comm_no_progress,
    .stage = comm_no_stage,
    .memory_open = memory_open,
    .memory_close = memory_close,
    .abort = abort_comm,
    .close = close_comm,
};

/* ---- open ----------------------------------------------------------------------------------- */

/* Rank 0's id for all. Each rank sends its own, and only the first is used. */
static enum status share_id(struct nccl_comm *n)
{
    enum status st = ST_OK;
    ncclUniqueId *all = NULL;
    TRY_GOTO(st, out, mem_alloc(&all, (size_t)n->base.world_size * sizeof *all));
    if (n->base.rank == 0)
        TRY_GOTO(st, out, NCCL(ncclGetUniqueId(&n->id)));
    if (n->rv != NULL) {
        TRY_GOTO(st, out, rendezvous_exchange(n->rv, all, &n->id, sizeof n->id));
        n->id = all[0];
    }
out:
    mem_free(&all);
    return st;
}

static enum status connect_all(struct nccl_comm *n)
{
    if (n->base.world_size == 1)
        return ST_OK;
    TRY(share_id(n));
    TRY(call_start(n, run_open));
    return job_wait(n, CALL, n->base.timeout_ms, true, "setting up NCCL's communicators");
}

enum status nccl_comm_open(struct comm **out, struct device *device, int rank, int world_size,
                           struct rendezvous *rv, int64_t timeout_ms, bool windows)
{
    struct nccl_comm *n = NULL;
    *out = NULL;
    ASSERT(rv != NULL || world_size == 1);
    TRY(mem_alloc(&n, sizeof *n));
    n->base = (struct comm){
        .ops = &nccl_ops, .rank = rank, .world_size = world_size, .timeout_ms = timeout_ms};
    n->device = device;
    n->rv = world_size > 1 ? rv : NULL;
    n->wants_windows = windows;
    pthread_mutex_init(&n->lock, NULL);
    enum status st = connect_all(n);
    if (st != ST_OK) {
        /* The others must not wait for this rank. */
        char cause[CAUSE_BYTES];
        snprintf(cause, sizeof cause, "%s", status_message());
        if (n->rv != NULL)
            rendezvous_abort(n->rv, cause);
        start_aborts(n); /* of those that stand, once the opening has ended */
        release(n);
        status_set_message(cause);
        return status_trace(st, __FILE__, __LINE__);
    }
    device->watch = watch;
    device->watch_context = n;
    *out = &n->base;
    return ST_OK;
}
