/* The CPU backend of engine/device/device.h: everything happens at once, in the calling thread
 * and, inside an op, in the rank's other threads. */
#include "engine/device/device.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/arena.h"
#include "engine/base/clock.h"
#include "engine/device/host_memory.h"
#include "engine/device/workers.h"

extern const struct ops ops_cpu; /* engine/ops; only its address is needed here */

/* OpenBLAS has these; another CBLAS does not, and then its own settings count. */
extern void openblas_set_num_threads(int threads) __attribute__((weak));
extern int openblas_get_num_threads(void) __attribute__((weak));
extern char *openblas_get_corename(void) __attribute__((weak));

/* ---- memory --------------------------------------------------------------------------------- */

/* Large memory gets its pages here, from all threads, and not from the first steps. */
static enum status alloc(struct device *device, void **out, size_t bytes)
{
    TRY(mem_alloc(out, bytes));
    if (bytes < MEM_LARGE_BYTES)
        return ST_OK;
    enum status st = host_memory_populate(device->workers, *out, bytes);
    if (st != ST_OK)
        mem_free(out);
    return st;
}

static void free_memory(struct device *device, void *memory)
{
    (void)device;
    mem_free(&memory);
}

static enum status copy(struct stream *s, void *out, const void *in, size_t bytes)
{
    (void)s;
    memmove(out, in, bytes);
    return ST_OK;
}

struct fill {
    char *out;
    int byte;
    size_t bytes;
};

enum { FILL_BYTES = 1 << 20 /* of a part */ };

static void fill_part(void *context, int64_t part, int worker)
{
    const struct fill *f = context;
    size_t at = (size_t)part * FILL_BYTES, left = f->bytes - at;
    (void)worker;
    memset(f->out + at, f->byte, left < FILL_BYTES ? left : FILL_BYTES);
}

/* By all threads: one alone does not use all of the memory's bandwidth. */
static enum status fill(struct stream *s, void *out, int byte, size_t bytes)
{
    struct fill f = {out, byte, bytes};
    workers_run(s->device->workers, fill_part, &f,
                (int64_t)((bytes + FILL_BYTES - 1) / FILL_BYTES));
    return ST_OK;
}

/* The resident set: the second number of statm, in pages. */
static enum status memory_used(struct device *device, size_t *bytes)
{
    (void)device;
    unsigned long total = 0, resident = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (!f)
        return FAIL(SYSTEM, "cannot open /proc/self/statm");
    int found = fscanf(f, "%lu %lu", &total, &resident);
    fclose(f);
    if (found != 2)
        return FAIL(SYSTEM, "/proc/self/statm has another form than expected");
    *bytes = resident * (size_t)sysconf(_SC_PAGESIZE);
    return ST_OK;
}

static enum status memory_free(struct device *device, size_t *bytes)
{
    (void)device;
    return host_memory_free(bytes, "");
}

/* ---- streams and events: nothing is ever in flight ------------------------------------------ */

static enum status stream_nothing(struct stream *s)
{
    (void)s;
    return ST_OK;
}

static void close_stream(struct stream *s)
{
    (void)s;
}

static enum status open_event(struct device *device, struct event *e)
{
    *e = (struct event){.device = device};
    return ST_OK;
}

static void close_event(struct event *e)
{
    (void)e;
}

static enum status record(struct event *e, struct stream *s)
{
    *e = (struct event){.device = s->device};
    return ST_OK;
}

static enum status wait_on_stream(struct stream *s, struct event *e)
{
    (void)s;
    (void)e;
    return ST_OK;
}

static enum status wait_on_host(struct event *e)
{
    (void)e;
    return ST_OK;
}

static enum status query(const struct event *e, bool *done)
{
    (void)e;
    *done = true;
    return ST_OK;
}

static enum status mark(struct stream *s, uint32_t value)
{
    __atomic_store_n(&s->device->progress->word[s->id], value, __ATOMIC_RELAXED);
    return ST_OK;
}

/* ---- timers --------------------------------------------------------------------------------- */

static enum status open_timer(struct device *device, struct device_timer *t)
{
    *t = (struct device_timer){.device = device};
    return ST_OK;
}

static void close_timer(struct device_timer *t)
{
    (void)t;
}

static enum status record_timer(struct device_timer *t, struct stream *s)
{
    (void)s;
    t->ns = clock_ns();
    return ST_OK;
}

static enum status elapsed_ms(const struct device_timer *begin, const struct device_timer *end,
                              double *ms)
{
    if (begin->ns == 0 || end->ns == 0)
        return FAIL(DEVICE, "a timer was read that was never recorded");
    *ms = (double)(end->ns - begin->ns) * 1e-6;
    return ST_OK;
}

/* ---- graphs --------------------------------------------------------------------------------- */

static enum status capture_begin(struct stream *s)
{
    (void)s;
    return FAIL(UNSUPPORTED, "the CPU device cannot capture a step");
}

static enum status capture_end(struct stream *s, struct graph **out)
{
    (void)s;
    *out = NULL;
    return FAIL(UNSUPPORTED, "the CPU device cannot capture a step");
}

static enum status launch(struct stream *s, struct graph *g)
{
    (void)s;
    (void)g;
    return FAIL(UNSUPPORTED, "the CPU device cannot launch a captured step");
}

static void close_graph(struct graph *g)
{
    (void)g;
}

/* ---- open and close ------------------------------------------------------------------------- */

static void close_device(struct device *device)
{
    workers_close(&device->workers);
    mem_free(&device->progress);
    mem_free(&device);
}

static bool always_idle(struct device *device)
{
    (void)device;
    return true;
}

static const struct device_ops device_ops_cpu = {
    .name = "cpu",
    .close = close_device,
    .alloc = alloc,
    .free = free_memory,
    .alloc_host = alloc,
    .free_host = free_memory,
    .stream_open = stream_nothing,
    .stream_close = close_stream,
    .event_open = open_event,
    .event_close = close_event,
    .event_record = record,
    .stream_wait = wait_on_stream,
    .event_wait = wait_on_host,
    .event_query = query,
    .stream_sync = stream_nothing,
    .idle = always_idle,
    .copy = copy,
    .fill = fill,
    .capture_begin = capture_begin,
    .capture_end = capture_end,
    .graph_launch = launch,
    .graph_close = close_graph,
    .mark = mark,
    .memory_used = memory_used,
    .memory_free = memory_free,
    .timer_open = open_timer,
    .timer_close = close_timer,
    .timer_record = record_timer,
    .timer_elapsed_ms = elapsed_ms,
};

/* The first "model name" line of /proc/cpuinfo (x86); other machines are just "CPU". */
static void cpu_model(char *out, size_t bytes)
{
    char line[256], model[80] = "CPU";
    FILE *f = fopen("/proc/cpuinfo", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "model name : %79[^\n]", model) == 1)
            break;
    if (f)
        fclose(f);
    snprintf(out, bytes, "%s", model);
}

/* A product is cut into pieces by its op (engine/ops/linear.c), and each piece is one thread's. The
 * BLAS' own threads would stand beside ours, and wait for work by spinning. The setting belongs to
 * the process, and ranks are its threads: all ask for the same. */
static void blas_alone(void)
{
    if (openblas_set_num_threads && openblas_get_num_threads && openblas_get_num_threads() != 1)
        openblas_set_num_threads(1);
}

enum status device_cpu_open(struct device **out, int threads)
{
    enum status st = ST_OK;
    struct device *device = NULL;
    char model[80];
    *out = NULL;
    TRY(mem_alloc(&device, sizeof *device));
    TRY_GOTO(st, out, mem_alloc(&device->progress, sizeof *device->progress));
    device->ops = &device_ops_cpu;
    device->compute = &ops_cpu;
    device->param_dtype = DTYPE_F32;
    device->threads = threads;
    TRY_GOTO(st, out, workers_open(&device->workers, threads));
    blas_alone();
    cpu_model(model, sizeof model);
    snprintf(device->name, sizeof device->name, "%s, %s%s", model,
             openblas_get_corename ? "OpenBLAS " : "CBLAS",
             openblas_get_corename ? openblas_get_corename() : "");
    for (int i = 0; i < STREAM_COUNT; i++)
        device->streams[i] = (struct stream){.device = device, .id = (enum stream_id)i};
    TRY_GOTO(st, out, memory_used(device, &device->context_bytes));
    *out = device;
    device = NULL;
out:
    if (device)
        close_device(device);
    return st;
}
