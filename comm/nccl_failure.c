#include <stdio.h>

#include "comm/nccl_private.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"

static void run_abort(struct job *job)
{
    struct nccl_comm *n = job->comm;
    while (nccl_job_running(&n->jobs[CALL]))
        clock_pause_us(POLL_US);
    if (n->comms[job->which] != NULL) /* opening it may have failed */
        job->st = NCCL(ncclCommAbort(n->comms[job->which]));
}

enum status nccl_failure(struct nccl_comm *n)
{
    pthread_mutex_lock(&n->lock);
    enum status st = n->failed;
    if (st != ST_OK)
        status_fail(st, __FILE__, __LINE__, "%s", n->cause);
    pthread_mutex_unlock(&n->lock);
    return st;
}

bool nccl_note_failure(struct nccl_comm *n, enum status st, const char *cause)
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
void nccl_start_aborts(struct nccl_comm *n)
{
    for (int i = 0; i < COMMS; i++)
        if (nccl_job_start(n, i, run_abort) != ST_OK)
            log_debug("nccl", "%s", status_message());
}

enum status nccl_give_up(struct nccl_comm *n, enum status st, const char *cause)
{
    bool first = nccl_note_failure(n, st, cause);
    if (n->rv != NULL)
        rendezvous_abort(n->rv, cause);
    if (first) {
        nccl_start_aborts(n);
        nccl_jobs_end(n, COMM_ABORT_MS);
    }
    return nccl_failure(n);
}

/*
 * The end of a peer's process shows in several ways: a fault in its memory, or NCCL's word about a
 * closed connection, may be here before the rank that saw it die has told. Its message names the
 * dead, so it has a moment to come.
 */
enum status nccl_peers_cause(struct nccl_comm *n, int64_t wait_ms)
{
    int64_t deadline = clock_ms() + wait_ms;
    while (n->rv != NULL) {
        enum status st = rendezvous_check(n->rv);
        if (st != ST_OK) {
            char cause[CAUSE_BYTES];
            nccl_first_line(cause, sizeof cause, status_message());
            return nccl_give_up(n, st, cause);
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

enum status nccl_watch(void *context, int64_t waited_ms)
{
    struct nccl_comm *n = context;
    char cause[CAUSE_BYTES];
    TRY(nccl_failure(n));
    TRY(nccl_peers_cause(n, waited_ms == DEVICE_FAILED ? CAUSE_WAIT_MS : 0));
    if (waited_ms == DEVICE_FAILED)
        return ST_OK;
    if (async_error(n, cause, sizeof cause) != ST_OK) {
        TRY(nccl_peers_cause(n, CAUSE_WAIT_MS));
        return nccl_give_up(n, ST_COMM, cause);
    }
    if (waited_ms < n->base.timeout_ms)
        return ST_OK;
    describe_wait(n, cause, sizeof cause);
    return nccl_give_up(n, ST_TIMEOUT, cause);
}
