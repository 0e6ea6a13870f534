#include "engine/train/bandwidth.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/bind.h"
#include "engine/base/arena.h"
#include "engine/base/clock.h"
#include "engine/device/device.h"

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
static void fill(unsigned char *data)
{
    uint32_t *words = (uint32_t *)(void *)data;
    for (size_t i = 0; i < BANDWIDTH_BYTES / sizeof *words; i++)
        words[i] = (uint32_t)i * 2654435761u;
}

/* ---- host ------------------------------------------------------------------------------------ */

static enum status run_host(struct measurement *m)
{
    enum status st = ST_OK;
    unsigned char *in = NULL, *copy = NULL;
    TRY_GOTO(st, out, mem_alloc(&in, BANDWIDTH_BYTES));
    TRY_GOTO(st, out, mem_alloc(&copy, BANDWIDTH_BYTES));
    fill(in);
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
static enum status time_copy(double *GBs, struct device *device, void *out, const void *in)
{
    enum status st = ST_OK;
    double ms = 0;
    struct stream *s = &device->streams[STREAM_COPY];
    struct device_timer begin = {0}, end = {0};
    TRY_GOTO(st, out, device_timer_open(device, &begin));
    TRY_GOTO(st, out, device_timer_open(device, &end));
    TRY_GOTO(st, out, device_timer_record(&begin, s));
    TRY_GOTO(st, out, device_copy(s, out, in, BANDWIDTH_BYTES));
    TRY_GOTO(st, out, device_timer_record(&end, s));
    TRY_GOTO(st, out, device_timer_elapsed_ms(&begin, &end, &ms));
    *GBs = BANDWIDTH_BYTES / ms * 1e-6;
out:
    device_timer_close(&begin);
    device_timer_close(&end);
    return st;
}

static enum status time_copies(struct bandwidth *b, struct device *device, void *memory, void *in,
                               void *back)
{
    double ignored;
    fill(in);
    TRY(time_copy(&ignored, device, memory, in)); /* the first one starts up what there is */
    for (int i = 0; i < BANDWIDTH_REPEATS; i++) {
        TRY(time_copy(&b->to_device[i], device, memory, in));
        TRY(time_copy(&b->from_device[i], device, back, memory));
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
