#include "engine/train/bandwidth.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/bind.h"
#include "comm/comm.h"
#include "engine/base/arena.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/device/device.h"
#include "engine/train/binding.h"

/* What a thread is to measure, and how it went. */
struct measurement {
    struct bandwidth *b;
    struct cpuset cpus;
    int node; /* the system's number; BIND_ANY_NODE where there is only one */
    int gpu;
    enum status (*run)(struct measurement *m);
    enum status st;
    char message[1024];
};

static int fastest_first(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x > y ? -1 : x < y;
}

/* A pattern in which no page is like another. */
static void fill(unsigned char *data, size_t bytes)
{
    uint32_t *words = (uint32_t *)(void *)data;
    for (size_t i = 0; i < bytes / sizeof *words; i++)
        words[i] = (uint32_t)i * 2654435761u;
}

/* ---- host ------------------------------------------------------------------------------------ */

static enum status run_host(struct measurement *m)
{
    enum status st = ST_OK;
    unsigned char *in = NULL, *copy = NULL;
    TRY_GOTO(st, out, mem_alloc(&in, BANDWIDTH_BYTES));
    TRY_GOTO(st, out, mem_alloc(&copy, BANDWIDTH_BYTES));
    fill(in, BANDWIDTH_BYTES);
    memcpy(copy, in, BANDWIDTH_BYTES); /* now all pages are there */
    for (int i = 0; i < BANDWIDTH_REPEATS; i++) {
        double begin = clock_s();
        memcpy(copy, in, BANDWIDTH_BYTES);
        m->b->host[i] = 2.0 * BANDWIDTH_BYTES / (clock_s() - begin) * 1e-9;
        if (memcmp(copy, in, BANDWIDTH_BYTES) != 0)
            st = FAIL(CORRUPT, "copied memory is not the original");
    }
    qsort(m->b->host, BANDWIDTH_REPEATS, sizeof(double), fastest_first);
out:
    mem_free(&copy);
    mem_free(&in);
    return st;
}

/* ---- device ---------------------------------------------------------------------------------- */

/* One copy on the device's stream for copies. */
static enum status time_copy(double *GBs, struct device *device, void *out, const void *in,
                             size_t bytes)
{
    enum status st = ST_OK;
    double ms = 0;
    struct stream *s = &device->streams[STREAM_COPY];
    struct device_timer begin = {0}, end = {0};
    TRY_GOTO(st, out, device_timer_open(device, &begin));
    TRY_GOTO(st, out, device_timer_open(device, &end));
    TRY_GOTO(st, out, device_timer_record(&begin, s));
    TRY_GOTO(st, out, device_copy(s, out, in, bytes));
    TRY_GOTO(st, out, device_timer_record(&end, s));
    TRY_GOTO(st, out, device_timer_elapsed_ms(&begin, &end, &ms));
    *GBs = (double)bytes / ms * 1e-6;
out:
    device_timer_close(&begin);
    device_timer_close(&end);
    return st;
}

static enum status time_copies(struct bandwidth *b, struct device *device, void *memory, void *in,
                               void *back)
{
    double ignored;
    fill(in, BANDWIDTH_BYTES);
    TRY(time_copy(&ignored, device, memory, in,
                  BANDWIDTH_BYTES)); /* the first one starts up what there is */
    for (int i = 0; i < BANDWIDTH_REPEATS; i++) {
        TRY(time_copy(&b->to_device[i], device, memory, in, BANDWIDTH_BYTES));
        TRY(time_copy(&b->from_device[i], device, back, memory, BANDWIDTH_BYTES));
    }
    if (memcmp(in, back, BANDWIDTH_BYTES) != 0)
        return FAIL(CORRUPT, "what came back from the GPU is not what went there");
    qsort(b->to_device, BANDWIDTH_REPEATS, sizeof(double), fastest_first);
    qsort(b->from_device, BANDWIDTH_REPEATS, sizeof(double), fastest_first);
    return ST_OK;
}

static enum status run_device(struct measurement *m)
{
    enum status st = ST_OK;
    struct device *device = NULL;
    void *memory = NULL, *in = NULL, *back = NULL;
    TRY(device_open(&device, DEVICE_CUDA, PRECISION_AUTO, m->gpu, 1));
    TRY_GOTO(st, out, device_alloc(device, &memory, BANDWIDTH_BYTES));
    TRY_GOTO(st, out, device_alloc_host(device, &in, BANDWIDTH_BYTES));
    TRY_GOTO(st, out, device_alloc_host(device, &back, BANDWIDTH_BYTES));
    TRY_GOTO(st, out, time_copies(m->b, device, memory, in, back));
out:
    device_free_host(device, &back);
    device_free_host(device, &in);
    device_free(device, &memory);
    device_close(&device);
    return st;
}

/* ---- in a thread ----------------------------------------------------------------------------- */

static enum status bind_and_run(struct measurement *m)
{
    TRY(bind_set_cpus(&m->cpus));
    if (m->node != BIND_ANY_NODE)
        TRY(bind_set_memory(m->node));
    return m->run(m);
}

static void *thread_main(void *argument)
{
    struct measurement *m = argument;
    m->st = bind_and_run(m);
    snprintf(m->message, sizeof m->message, "%s", status_message());
    return NULL;
}

static enum status measure(struct measurement *m, const struct topology *t, int from, int to)
{
    pthread_t thread;
    m->cpus = t->nodes[from].cpus;
    m->node = t->node_count > 1 ? t->nodes[to].number : BIND_ANY_NODE;
    int error = pthread_create(&thread, NULL, thread_main, m);
    if (error != 0)
        return FAIL(SYSTEM, "cannot start a thread: %s", strerror(error));
    pthread_join(thread, NULL);
    if (m->st != ST_OK)
        status_set_message(m->message);
    return m->st;
}

enum status bandwidth_host(struct bandwidth *b, const struct topology *t, int from, int to)
{
    struct measurement m = {.b = b, .run = run_host};
    return measure(&m, t, from, to);
}

enum status bandwidth_device(struct bandwidth *b, const struct topology *t, int index, int to)
{
    struct measurement m = {.b = b, .gpu = index, .run = run_device};
    return measure(&m, t, to, to);
}

/* ---- at the start of a run ------------------------------------------------------------------- */

enum { GLANCE_BYTES = 8 << 20, GLANCE_REPEATS = 2 };

struct glance { /* GB/s; 0: not known */
    double host, to_device, from_device;
    int nodes; /* of memory on this machine */
};

static void keep_fastest(double *best, double GBs)
{
    *best = GBs > *best ? GBs : *best;
}

static enum status glance_at_device(struct glance *g, struct device *device, unsigned char *host)
{
    enum status st = ST_OK;
    void *memory = NULL;
    double GBs;
    TRY(device_alloc(device, &memory, GLANCE_BYTES));
    for (int i = 0; i < 1 + GLANCE_REPEATS; i++) { /* the first ones start up what there is */
        TRY_GOTO(st, out, time_copy(&GBs, device, memory, host, GLANCE_BYTES));
        keep_fastest(&g->to_device, GBs);
        TRY_GOTO(st, out, time_copy(&GBs, device, host, memory, GLANCE_BYTES));
        keep_fastest(&g->from_device, GBs);
    }
out:
    device_free(device, &memory);
    return st;
}

static enum status glance(struct glance *g, struct device *device)
{
    enum status st = ST_OK;
    void *memory = NULL;
    TRY(device_alloc_host(device, &memory, 2 * GLANCE_BYTES));
    unsigned char *in = memory, *copy = in + GLANCE_BYTES;
    fill(in, GLANCE_BYTES);
    memcpy(copy, in, GLANCE_BYTES); /* now all pages are there */
    for (int i = 0; i < GLANCE_REPEATS; i++) {
        double begin = clock_s();
        memcpy(copy, in, GLANCE_BYTES);
        keep_fastest(&g->host, 2.0 * GLANCE_BYTES / (clock_s() - begin) * 1e-9);
    }
    if (device->asynchronous)
        st = glance_at_device(g, device, in);
    device_free_host(device, &memory);
    return st;
}

static double slowest(double a, double b)
{
    return b > 0 && (b < a || a <= 0) ? b : a;
}

static void say_glance(const struct glance *all, int world_size)
{
    struct glance least = {.nodes = 1};
    char device[96] = "", many[48] = "";
    for (int r = 0; r < world_size; r++) {
        least.host = slowest(least.host, all[r].host);
        least.to_device = slowest(least.to_device, all[r].to_device);
        least.from_device = slowest(least.from_device, all[r].from_device);
        least.nodes = all[r].nodes > least.nodes ? all[r].nodes : least.nodes;
    }
    if (least.to_device > 0 && least.from_device > 0)
        snprintf(device, sizeof device, ", host to GPU %.1f, GPU to host %.1f", least.to_device,
                 least.from_device);
    if (world_size > 1)
        snprintf(many, sizeof many, ", the slowest of %d ranks", world_size);
    log_info("run", "bandwidth: host memory %.1f%s GB/s%s%s", least.host, device, many,
             least.nodes > 1 ? "" : "; one memory node: binding memory gains nothing");
}

enum status bandwidth_report(const struct binding *binding, struct device *device,
                             struct comm *comm)
{
    enum status st = ST_OK;
    struct glance mine = {0}, *all = NULL;
    TRY(mem_alloc(&all, (size_t)comm->world_size * sizeof *all));
    mine.nodes = binding->nodes;
    if (binding->on && glance(&mine, device) != ST_OK)
        status_clear(); /* it is for people only, and a card may be full */
    TRY_GOTO(st, out, comm_exchange(comm, all, &mine, sizeof mine));
    bool any = false;
    for (int r = 0; r < comm->world_size; r++)
        any |= all[r].host > 0;
    if (any && comm->rank == 0)
        say_glance(all, comm->world_size);
out:
    mem_free(&all);
    return st;
}
