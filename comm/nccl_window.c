#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>

#include "comm/nccl_private.h"
#include "engine/base/arena.h"
#include "engine/base/log.h"
#include "engine/device/cuda_check.h"

static void run_register(struct job *job)
{
    struct nccl_comm *n = job->comm;
    for (int i = 0; i < COMMS && job->st == ST_OK; i++)
        job->st = NCCL(ncclCommWindowRegister(n->comms[i], n->window, n->window_size + PEERS_BYTES,
                                              &n->registered[i], NCCL_WIN_COLL_SYMMETRIC));
}

static void run_deregister(struct job *job)
{
    struct nccl_comm *n = job->comm;
    for (int i = COMMS - 1; i >= 0; i--)
        if (n->registered[i] != NULL && job->st == ST_OK)
            job->st = NCCL(ncclCommWindowDeregister(n->comms[i], n->registered[i]));
}

enum status nccl_all_can(struct nccl_comm *n, enum status st, bool *all, char why[WHY_BYTES])
{
    struct answer {
        int32_t can;
        char why[WHY_BYTES];
    } mine = {.can = st == ST_OK}, *answers = NULL;
    if (st != ST_OK)
        nccl_first_line(mine.why, sizeof mine.why, status_message());
    TRY(mem_alloc(&answers, sizeof *answers * (size_t)n->base.world_size));
    st = nccl_exchange(&n->base, answers, &mine, sizeof mine);
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
    bytes = (size_t)round_up((int64_t)bytes, ARENA_ALIGN);
    TRY(NCCL(ncclMemAlloc(&n->window, bytes + PEERS_BYTES)));
    n->window_size = bytes;
    TRY(CUDA(cudaMemset(n->window, 0, bytes + PEERS_BYTES)));
    return CUDA(cudaDeviceSynchronize());
}

/* All ranks together. What ends the others' waits too is a failure; the rest means no window. */
static enum status window_register(struct nccl_comm *n)
{
    TRY(nccl_call_start(n, run_register));
    return nccl_job_wait(n, CALL, n->base.timeout_ms, true, "registering symmetric windows");
}

static void window_free(struct nccl_comm *n)
{
    if (n->window != NULL && ncclMemFree(n->window) != ncclSuccess)
        log_debug("nccl", "the block of the windows was not freed");
    n->window = NULL;
    n->peers.count = 0;
    memset(n->registered, 0, sizeof n->registered);
}

/* Where NCCL makes no symmetric windows (GPUs that do not reach each other), it registers the block
 * for itself alone, and the handle is none of the device, or NULL. Before 2.28 no handle is. */
static bool window_is_symmetric(ncclWindow_t window)
{
    int version = 0;
    struct cudaPointerAttributes at = {0};
    if (ncclGetVersion(&version) == ncclSuccess && version < NCCL_VERSION(2, 28, 0))
        return true;
    if (window == NULL || cudaPointerGetAttributes(&at, (const void *)window) != cudaSuccess) {
        (void)cudaGetLastError();
        return false;
    }
    return at.type == cudaMemoryTypeDevice;
}

static void say_without(struct nccl_comm *n, const char *why)
{
    snprintf(n->base.memory_text, sizeof n->base.memory_text,
             "collectives without symmetric windows: %s", why);
}

/* Those that could register the block take that back. It stays what it is, plain memory. */
static enum status window_take_back(struct nccl_comm *n, const char *why)
{
    say_without(n, why);
    TRY(nccl_call_start(n, run_deregister));
    TRY(nccl_job_wait(n, CALL, n->base.timeout_ms, true, "taking back symmetric windows"));
    memset(n->registered, 0, sizeof n->registered);
    return ST_OK;
}

enum status nccl_memory_ready(struct nccl_comm *n)
{
    size_t before = 0, after = 0;
    char why[WHY_BYTES];
    bool all = false;
    if (n->window == NULL)
        return ST_OK;
    TRY(device_memory_used(n->device, &before));
    enum status st = window_register(n);
    if (st == ST_TIMEOUT)
        return st;
    TRY(nccl_all_can(n, st, &all, why));
    if (!all)
        return window_take_back(n, why);
    TRY(device_memory_used(n->device, &after));
    n->base.window_bytes = after > before ? after - before : 0;
    n->symmetric = window_is_symmetric(n->registered[GATHER]);
    if (n->windows == WINDOWS_OWN)
        TRY(nccl_peers_open(n));
    snprintf(n->base.memory_text, sizeof n->base.memory_text,
             "collectives in %s of %.0f MiB, %.1f MiB of tables; %s",
             n->symmetric ? "symmetric windows" : "memory that NCCL has registered",
             (double)n->window_size / 1048576.0, (double)n->base.window_bytes / 1048576.0,
             n->peers.count > 0 ? "sums in rank order" : "sums in NCCL's order");
    return ST_OK;
}

enum status nccl_memory_open(struct comm *comm, struct device *device, void **out, size_t bytes)
{
    struct nccl_comm *n = (struct nccl_comm *)comm;
    char why[WHY_BYTES] = "turned off";
    bool all = false;
    ASSERT(n->window == NULL);
    if (comm->world_size == 1)
        return device_alloc(device, out, bytes);
    if (n->windows != WINDOWS_NONE)
        TRY(nccl_all_can(n, window_alloc(n, bytes), &all, why));
    if (!all) {
        say_without(n, why);
        window_free(n);
        return device_alloc(device, out, bytes);
    }
    *out = n->window;
    return comm->opening ? ST_OK : nccl_memory_ready(n);
}

/*
 * Peers' kernels have done with this block when this rank's own have: a collective ends on no rank
 * before all have read. After a failure that is not so, and the block stays until the process ends.
 */
void nccl_memory_close(struct comm *comm, struct device *device, void **memory)
{
    struct nccl_comm *n = (struct nccl_comm *)comm;
    if (*memory != n->window) {
        device_free(device, memory);
        return;
    }
    *memory = NULL;
    if (stream_sync(&device->streams[STREAM_COMPUTE]) != ST_OK || nccl_failure(n) != ST_OK)
        return;
    if (nccl_call_start(n, run_deregister) == ST_OK &&
        nccl_job_wait(n, CALL, CLOSE_WAIT_MS, false, "taking back symmetric windows") == ST_OK)
        window_free(n);
    else
        log_debug("nccl", "%s", status_message());
}
