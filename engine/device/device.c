#include "engine/device/device.h"

#include "engine/base/arena.h"
#include "engine/base/clock.h"

#ifndef TESSERA_CUDA
int device_cuda_count(void)
{
    return 0;
}

enum status device_cuda_bus_id(char out[32], int index)
{
    out[0] = '\0';
    return FAIL(UNSUPPORTED, "GPU %d: this build has no CUDA", index);
}

void device_cuda_peers(int index, int *direct, int *others)
{
    (void)index;
    *direct = *others = 0;
}

static enum status cuda_open(struct device **out, enum precision_kind precision, int local_rank)
{
    (void)out;
    (void)precision;
    (void)local_rank;
    return FAIL(UNSUPPORTED,
                "this build has no CUDA; build with CUDA=1 or set train.device to cpu");
}
#else
#define cuda_open device_cuda_open
#endif

static enum status cpu_open(struct device **out, enum precision_kind precision, int threads)
{
    if (precision == PRECISION_BF16)
        return FAIL(UNSUPPORTED, "the CPU computes in fp32; set train.precision to fp32 or auto");
    return device_cpu_open(out, threads);
}

enum status device_open(struct device **out, enum device_kind kind, enum precision_kind precision,
                        int local_rank, int threads)
{
    ASSERT(threads >= 1);
    ASSERT(local_rank >= 0);
    *out = NULL;
    if (kind == DEVICE_CUDA || (kind == DEVICE_AUTO && device_cuda_count() > 0))
        TRY(cuda_open(out, precision, local_rank));
    else
        TRY(cpu_open(out, precision, threads));
    (*out)->host_threads = threads;
    return ST_OK;
}

void device_close(struct device **device)
{
    struct device *d = *device;
    *device = NULL;
    if (d && !d->lost)
        d->ops->close(d);
}

void device_settle(struct device *device)
{
    enum { PAUSE_US = 2000 };
    int64_t begin = clock_ms();
    while (!device->lost && !device->ops->idle(device)) {
        clock_pause_us(PAUSE_US);
        device->lost = clock_ms() - begin > DEVICE_SETTLE_MS;
    }
}

enum status device_alloc(struct device *device, void **out, size_t bytes)
{
    return device->ops->alloc(device, out, bytes);
}

void device_free(struct device *device, void **memory)
{
    void *m = *memory;
    *memory = NULL;
    if (m && !device->lost)
        device->ops->free(device, m);
}

enum status device_alloc_host(struct device *device, void **out, size_t bytes)
{
    return device->ops->alloc_host(device, out, bytes);
}

void device_free_host(struct device *device, void **memory)
{
    void *m = *memory;
    *memory = NULL;
    if (m && !device->lost)
        device->ops->free_host(device, m);
}

enum status event_open(struct device *device, struct event *e)
{
    return device->ops->event_open(device, e);
}

void event_close(struct event *e)
{
    if (e->device && !e->device->lost)
        e->device->ops->event_close(e);
    *e = (struct event){0};
}

enum status event_record(struct event *e, struct stream *s)
{
    return s->device->ops->event_record(e, s);
}

/* A collective of host memory completes when its event is first waited for. */
static enum status event_complete(struct event *e)
{
    if (e->complete) {
        TRY(e->complete(e->context, e->ticket));
        e->complete = NULL;
    }
    return ST_OK;
}

enum status stream_wait(struct stream *s, struct event *e)
{
    TRY(event_complete(e));
    return s->device->ops->stream_wait(s, e);
}

enum status stream_follow(struct stream *s, struct stream *first)
{
    TRY(event_record(&first->here, first));
    return stream_wait(s, &first->here);
}

enum status event_wait(struct event *e)
{
    TRY(event_complete(e));
    return e->device ? e->device->ops->event_wait(e) : ST_OK;
}

enum status event_query(const struct event *e, bool *done)
{
    ASSERT(e->complete == NULL);
    return e->device->ops->event_query(e, done);
}

enum status stream_sync(struct stream *s)
{
    return s->device->ops->stream_sync(s);
}

enum status device_copy(struct stream *s, void *out, const void *in, size_t bytes)
{
    return bytes == 0 ? ST_OK : s->device->ops->copy(s, out, in, bytes);
}

enum status device_fill(struct stream *s, void *out, int byte, size_t bytes)
{
    return bytes == 0 ? ST_OK : s->device->ops->fill(s, out, byte, bytes);
}

enum status device_mark(struct stream *s, uint32_t value)
{
    return s->device->ops->mark(s, value);
}

uint32_t device_progress(const struct device *device, enum stream_id id)
{
    return __atomic_load_n(&device->progress->word[id], __ATOMIC_RELAXED);
}

enum status device_memory_free(struct device *device, size_t *bytes)
{
    return device->ops->memory_free(device, bytes);
}

enum status device_memory_used(struct device *device, size_t *bytes)
{
    return device->ops->memory_used(device, bytes);
}

enum status device_timer_open(struct device *device, struct device_timer *t)
{
    return device->ops->timer_open(device, t);
}

void device_timer_close(struct device_timer *t)
{
    if (t->device && !t->device->lost)
        t->device->ops->timer_close(t);
    *t = (struct device_timer){0};
}

enum status device_timer_record(struct device_timer *t, struct stream *s)
{
    return s->device->ops->timer_record(t, s);
}

enum status device_timer_elapsed_ms(const struct device_timer *begin,
                                    const struct device_timer *end, double *ms)
{
    ASSERT(begin->device != NULL);
    ASSERT(begin->device == end->device);
    return begin->device->ops->timer_elapsed_ms(begin, end, ms);
}

enum status stream_capture_begin(struct stream *s)
{
    return s->device->ops->capture_begin(s);
}

enum status stream_capture_end(struct stream *s, struct graph **out)
{
    return s->device->ops->capture_end(s, out);
}

enum status graph_launch(struct stream *s, struct graph *g)
{
    return s->device->ops->graph_launch(s, g);
}

void graph_close(struct graph **g)
{
    struct graph *graph = *g;
    *g = NULL;
    if (graph) { /* its first member is its device, whichever the backend */
        struct device *device = *(struct device **)(void *)graph;
        if (!device->lost)
            device->ops->graph_close(graph);
    }
}
