/* The CUDA backend of engine/device/device.h: one process a GPU. */
#include "engine/device/device.h"

#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/clock.h"
#include "engine/device/cuda_check.h"
#include "engine/device/mark.h"

extern const struct ops ops_cuda; /* engine/ops; only its address is needed here */

struct graph {
    struct device *device; /* borrowed; first, graph_close() in device.c finds it here */
    cudaGraphExec_t exec;
};

static cudaStream_t stream_of(const struct stream *s)
{
    return (cudaStream_t)s->handle;
}

/* ---- memory --------------------------------------------------------------------------------- */

static enum status memory_used(struct device *device, size_t *bytes)
{
    (void)device;
    size_t unused = 0, total = 0;
    TRY(CUDA(cudaMemGetInfo(&unused, &total)));
    *bytes = total - unused;
    return ST_OK;
}

static enum status memory_free(struct device *device, size_t *bytes)
{
    (void)device;
    size_t total = 0;
    return CUDA(cudaMemGetInfo(bytes, &total));
}

/* Zero-filled, like memory of the CPU device. cudaMalloc() aligns to 256 bytes at least. */
static enum status alloc(struct device *device, void **out, size_t bytes)
{
    *out = NULL;
    if (bytes == 0)
        return ST_OK;
    void *memory = NULL;
    enum status st = ST_OK;
    cudaError_t error = cudaMalloc(&memory, bytes);
    if (error == cudaErrorMemoryAllocation) {
        size_t unused = 0, total = 0;
        (void)cudaGetLastError();
        TRY(CUDA(cudaMemGetInfo(&unused, &total)));
        return FAIL(MEMORY, "GPU %d (%s) cannot give %zu bytes: %zu of its %zu are free",
                    device->index, device->name, bytes, unused, total);
    }
    TRY(CUDA(error));
    ASSERT((uintptr_t)memory % ARENA_ALIGN == 0);
    TRY_GOTO(st, out, CUDA(cudaMemset(memory, 0, bytes)));
    /* Our streams do not wait for the default stream, on which the memset runs. */
    TRY_GOTO(st, out, CUDA(cudaDeviceSynchronize()));
    *out = memory;
    memory = NULL;
out:
    cudaFree(memory);
    return st;
}

/* Failures while closing cannot be acted on; after an earlier one CUDA repeats it here. */
static void free_memory(struct device *device, void *memory)
{
    (void)device;
    if (memory != NULL)
        cudaFree(memory);
}

static enum status alloc_host(struct device *device, void **out, size_t bytes)
{
    (void)device;
    *out = NULL;
    if (bytes == 0)
        return ST_OK;
    /* Mapped: with unified addressing the device uses the same pointer. */
    TRY(CUDA(cudaHostAlloc(out, bytes, cudaHostAllocMapped)));
    memset(*out, 0, bytes);
    return ST_OK;
}

static void free_host(struct device *device, void *memory)
{
    (void)device;
    if (memory != NULL)
        cudaFreeHost(memory);
}

/* ---- streams and events --------------------------------------------------------------------- */

/* Collectives come first: a gather or reduce that becomes ready while a large GEMM runs should get
 * the next free multiprocessors, or it would start a wave late and end exposed. Updates and copies
 * come last: they fill what compute leaves free, and who needs one waits for it by its event. */
static enum status stream_open(struct stream *s)
{
    int least = 0, greatest = 0;
    cudaStream_t handle = NULL;
    TRY(CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest)));
    int priority = least;
    if (s->id == STREAM_GATHER || s->id == STREAM_REDUCE)
        priority = greatest;
    else if ((s->id == STREAM_COMPUTE || s->id == STREAM_SIDE) && least - 1 > greatest)
        priority = least - 1;
    TRY(CUDA(cudaStreamCreateWithPriority(&handle, cudaStreamNonBlocking, priority)));
    s->handle = handle;
    return ST_OK;
}

static void stream_close(struct stream *s)
{
    if (s->handle != NULL)
        cudaStreamDestroy(stream_of(s));
    s->handle = NULL;
}

static enum status open_event(struct device *device, struct event *e)
{
    cudaEvent_t handle = NULL;
    memset(e, 0, sizeof *e);
    TRY(CUDA(cudaEventCreateWithFlags(&handle, cudaEventDisableTiming)));
    e->handle = handle;
    e->device = device;
    return ST_OK;
}

static void close_event(struct event *e)
{
    if (e->handle != NULL)
        cudaEventDestroy((cudaEvent_t)e->handle);
    memset(e, 0, sizeof *e);
}

static enum status record(struct event *e, struct stream *s)
{
    return CUDA(cudaEventRecord((cudaEvent_t)e->handle, stream_of(s)));
}

static enum status wait_on_stream(struct stream *s, struct event *e)
{
    return CUDA(cudaStreamWaitEvent(stream_of(s), (cudaEvent_t)e->handle, 0));
}

/*
 * The host waits by asking, not in cudaEventSynchronize(): a collective whose peer has died never
 * completes, and only device->watch can tell. It asks fast at first, for the short waits of benches
 * and tests, and then every 50 us, which is nothing beside a step and leaves the core free.
 */
struct host_wait {
    int64_t begin_ns, watched_ns;
};

static enum status host_wait_pause(struct host_wait *w, struct device *device)
{
    enum { FAST_NS = 200 * 1000, WATCH_NS = 5 * 1000 * 1000 };
    int64_t now = clock_ns();
    if (w->begin_ns == 0)
        w->begin_ns = w->watched_ns = now;
    if (now - w->begin_ns < FAST_NS)
        return ST_OK;
    if (device->watch != NULL && now - w->watched_ns >= WATCH_NS) {
        w->watched_ns = now;
        TRY(device->watch(device->watch_context, (now - w->begin_ns) / 1000000));
    }
    clock_pause_us(50);
    return ST_OK;
}

/* NCCL ends the kernels of a communicator whose peer died, and the event behind them completes as
 * if all were well: only the watch knows better. And a kernel that touches the memory of a dead
 * peer fails with CUDA's words, which do not say so. */
static enum status host_wait_end(cudaError_t error, struct device *device)
{
    if (device->watch != NULL)
        TRY(device->watch(device->watch_context, error == cudaSuccess ? 0 : DEVICE_FAILED));
    return CUDA(error);
}

static enum status wait_on_host(struct event *e)
{
    struct host_wait w = {0};
    cudaError_t error;
    while ((error = cudaEventQuery((cudaEvent_t)e->handle)) == cudaErrorNotReady)
        TRY(host_wait_pause(&w, e->device));
    return host_wait_end(error, e->device);
}

static enum status query(const struct event *e, bool *done)
{
    cudaError_t error = cudaEventQuery((cudaEvent_t)e->handle);
    *done = error == cudaSuccess;
    if (error != cudaErrorNotReady)
        return CUDA(error);
    (void)cudaGetLastError(); /* no failure, and not to be found by who looks for one next */
    return ST_OK;
}

static enum status sync(struct stream *s)
{
    struct host_wait w = {0};
    cudaError_t error;
    while ((error = cudaStreamQuery(stream_of(s))) == cudaErrorNotReady)
        TRY(host_wait_pause(&w, s->device));
    return host_wait_end(error, s->device);
}

/* A failed stream is idle too: nothing of it goes on. */
static bool idle(struct device *device)
{
    for (int i = 0; i < STREAM_COUNT; i++)
        if (cudaStreamQuery(stream_of(&device->streams[i])) == cudaErrorNotReady)
            return false;
    return true;
}

/* Memory of the device, or of the host and pinned. */
static bool is_reached(const void *p)
{
    struct cudaPointerAttributes a;
    return cudaPointerGetAttributes(&a, p) == cudaSuccess && a.devicePointer == p;
}

static enum status copy(struct stream *s, void *out, const void *in, size_t bytes)
{
    if (bytes == 0)
        return ST_OK;
    if (bytes <= COPY_KERNEL_BYTES && is_reached(out) && is_reached(in))
        return copy_launch(s->handle, out, in, bytes);
    return CUDA(cudaMemcpyAsync(out, in, bytes, cudaMemcpyDefault, stream_of(s)));
}

static enum status fill(struct stream *s, void *out, int byte, size_t bytes)
{
    if (bytes == 0)
        return ST_OK;
    if (bytes <= FILL_KERNEL_BYTES)
        return fill_launch(s->handle, out, byte, bytes);
    return CUDA(cudaMemsetAsync(out, byte, bytes, stream_of(s)));
}

/* ---- graphs --------------------------------------------------------------------------------- */

/* Thread-local: NCCL's own threads may call CUDA while this one captures. */
static enum status capture_begin(struct stream *s)
{
    for (int i = 0; i < STREAM_COUNT; i++)
        s->device->streams[i].last_mark = NULL;
    return CUDA(cudaStreamBeginCapture(stream_of(s), cudaStreamCaptureModeThreadLocal));
}

static enum status capture_end(struct stream *s, struct graph **out)
{
    enum status st = ST_OK;
    cudaGraph_t graph = NULL;
    struct graph *g = NULL;
    *out = NULL;
    TRY(CUDA(cudaStreamEndCapture(stream_of(s), &graph)));
    TRY_GOTO(st, out, fill_nodes(graph));
    TRY_GOTO(st, out, mem_alloc(&g, sizeof *g));
    g->device = s->device;
    /* Without the flag all nodes would get the priority of the stream they are launched on. */
    TRY_GOTO(st, out,
             CUDA(cudaGraphInstantiateWithFlags(&g->exec, graph,
                                                cudaGraphInstantiateFlagUseNodePriority)));
    /* The first launch would upload it otherwise: memory and time that belong to the set-up. */
    TRY_GOTO(st, out, CUDA(cudaGraphUpload(g->exec, stream_of(s))));
    *out = g;
    g = NULL;
out:
    if (g != NULL && g->exec != NULL)
        cudaGraphExecDestroy(g->exec);
    mem_free(&g);
    cudaGraphDestroy(graph);
    return st;
}

static enum status launch(struct stream *s, struct graph *g)
{
    return CUDA(cudaGraphLaunch(g->exec, stream_of(s)));
}

static void close_graph(struct graph *g)
{
    if (g->exec != NULL)
        cudaGraphExecDestroy(g->exec);
    mem_free(&g);
}

/* ---- marks and timers ----------------------------------------------------------------------- */

/* Ahead of a collective it stands in line: NCCL's kernels may be placed early, as ours are, and
 * would hold multiprocessors all the time that they wait for their turn. */
static enum status mark(struct stream *s, uint32_t value)
{
    bool in_line = s->id == STREAM_GATHER || s->id == STREAM_REDUCE;
    return mark_launch(s->handle, in_line ? NULL : &s->last_mark, &s->device->progress->word[s->id],
                       value);
}

static enum status timer_open(struct device *device, struct device_timer *t)
{
    cudaEvent_t handle = NULL;
    memset(t, 0, sizeof *t);
    TRY(CUDA(cudaEventCreate(&handle)));
    t->handle = handle;
    t->device = device;
    return ST_OK;
}

static void timer_close(struct device_timer *t)
{
    if (t->handle != NULL)
        cudaEventDestroy((cudaEvent_t)t->handle);
    memset(t, 0, sizeof *t);
}

/* In a capture a plain record only orders the graph; an external one becomes a node that stamps the
 * event at every launch. */
static enum status timer_record(struct device_timer *t, struct stream *s)
{
    enum cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    TRY(CUDA(cudaStreamIsCapturing(stream_of(s), &capturing)));
    unsigned flags = capturing == cudaStreamCaptureStatusActive ? cudaEventRecordExternal
                                                                : cudaEventRecordDefault;
    return CUDA(cudaEventRecordWithFlags((cudaEvent_t)t->handle, stream_of(s), flags));
}

static enum status timer_elapsed_ms(const struct device_timer *begin,
                                    const struct device_timer *end, double *ms)
{
    struct event last = {.handle = end->handle, .device = end->device};
    float elapsed = 0;
    TRY(wait_on_host(&last));
    TRY(CUDA(cudaEventElapsedTime(&elapsed, (cudaEvent_t)begin->handle, (cudaEvent_t)end->handle)));
    *ms = (double)elapsed;
    return ST_OK;
}

/* ---- open and close ------------------------------------------------------------------------- */

static void close_device(struct device *device)
{
    if (device->library != NULL)
        ops_cuda_close(device);
    for (int i = 0; i < STREAM_COUNT; i++) {
        close_event(&device->streams[i].here);
        stream_close(&device->streams[i]);
    }
    free_host(device, device->progress);
    mem_free(&device);
}

static const struct device_ops cuda_ops = {
    .name = "cuda",
    .close = close_device,
    .alloc = alloc,
    .free = free_memory,
    .alloc_host = alloc_host,
    .free_host = free_host,
    .stream_open = stream_open,
    .stream_close = stream_close,
    .event_open = open_event,
    .event_close = close_event,
    .event_record = record,
    .stream_wait = wait_on_stream,
    .event_wait = wait_on_host,
    .event_query = query,
    .stream_sync = sync,
    .idle = idle,
    .copy = copy,
    .fill = fill,
    .capture_begin = capture_begin,
    .capture_end = capture_end,
    .graph_launch = launch,
    .graph_close = close_graph,
    .mark = mark,
    .memory_used = memory_used,
    .memory_free = memory_free,
    .timer_open = timer_open,
    .timer_close = timer_close,
    .timer_record = timer_record,
    .timer_elapsed_ms = timer_elapsed_ms,
};

int device_cuda_count(void)
{
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess)
        return count;
    (void)cudaGetLastError(); /* no driver, or no GPU */
    return 0;
}

enum status device_cuda_bus_id(char out[32], int index)
{
    return CUDA(cudaDeviceGetPCIBusId(out, 32, index));
}

enum status device_cuda_enter(const struct device *device)
{
    return CUDA(cudaSetDevice(device->index));
}

void device_cuda_peers(int index, int *direct, int *others)
{
    *direct = *others = 0;
    for (int i = 0; i < device_cuda_count(); i++) {
        int can = 0;
        if (i == index)
            continue;
        ++*others;
        if (cudaDeviceCanAccessPeer(&can, index, i) == cudaSuccess)
            *direct += can != 0;
    }
}

/* The name, and what the kernels need. */
static enum status describe(struct device *device)
{
    struct cudaDeviceProp properties;
    TRY(CUDA(cudaGetDeviceProperties(&properties, device->index)));
    snprintf(device->name, sizeof device->name, "%.127s", properties.name);
    if (properties.major < 8)
        return FAIL(UNSUPPORTED,
                    "GPU %d, %s, has compute capability %d.%d; 8.0 or newer is needed (bf16 "
                    "tensor cores)",
                    device->index, properties.name, properties.major, properties.minor);
    ASSERT(properties.unifiedAddressing);
    device->early_launch = properties.major >= 9;
    return ST_OK;
}

static enum status set_up(struct device *device)
{
    TRY(describe(device));
    for (int i = 0; i < STREAM_COUNT; i++) {
        device->streams[i].device = device;
        device->streams[i].id = (enum stream_id)i;
        TRY(stream_open(&device->streams[i]));
        TRY(open_event(device, &device->streams[i].here));
    }
    void *words = NULL;
    TRY(CUDA(cudaDeviceGetPCIBusId(device->bus_id, sizeof device->bus_id, device->index)));
    TRY(alloc_host(device, &words, sizeof *device->progress));
    device->progress = words;
    size_t used = 0;
    TRY(memory_used(device, &device->context_bytes));
    TRY(ops_cuda_open(device));
    TRY(memory_used(device, &used));
    device->library_bytes = used > device->context_bytes ? used - device->context_bytes : 0;
    return ST_OK;
}

enum status device_cuda_open(struct device **out, enum precision_kind precision, int local_rank)
{
    *out = NULL;
    int count = device_cuda_count();
    if (local_rank < 0 || local_rank >= count)
        return FAIL(UNSUPPORTED, "local rank %d has no GPU: %d visible%s", local_rank, count,
                    count == 0 ? " (is the driver there, and CUDA_VISIBLE_DEVICES not empty?)"
                               : "; start fewer ranks here");
    /* First of all: the first call that needs a context makes one on the current device, which is
     * GPU 0 until this. */
    TRY(CUDA(cudaSetDevice(local_rank)));

    struct device *device = NULL;
    TRY(mem_alloc(&device, sizeof *device));
    device->ops = &cuda_ops;
    device->compute = &ops_cuda;
    device->index = local_rank;
    device->threads = 1;
    device->fixed_rows = true;
    device->asynchronous = true;
    device->param_dtype = precision == PRECISION_FP32 ? DTYPE_F32 : DTYPE_BF16;
    enum status st = ST_OK;
    TRY_GOTO(st, out, set_up(device));
    *out = device;
    device = NULL;
out:
    if (device != NULL)
        close_device(device);
    return st;
}
