#include "engine/train/calibrate.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { REPEATS = 7, MIN_MS = 4, LONG_MS = 50, LONG_REPEATS = 3, MAX_CALLS = 4096 };
enum { GRAPH_CALLS = 16 };
enum { WARM_MAX = 1000 };

/* NCCL's own figure of a hop (src/graph/tuning.cc, ring, Simple over NVLink): ranks of one size
 * cannot tell a call's fixed part from that of its hops. */
static const double nvlink_hop_seconds = 3.4e-6;

struct bench_block {
    struct bench_block *next;
    void *memory; /* owned device memory */
};

enum status bench_take(struct bench *b, void **out, size_t bytes)
{
    struct bench_block *block = NULL;
    TRY(pool_take(&b->pool, &block, sizeof *block));
    block->next = b->blocks;
    b->blocks = block;
    TRY(device_alloc(b->device, &block->memory, bytes));
    *out = block->memory;
    return device_fill(b->s, *out, 0, bytes);
}

static double thread_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

/* What is timed: calls of @run, or a graph of them. */
struct repeated {
    enum status (*run)(struct bench *b);
    struct graph *graph; /* NULL: @run itself */
};

static enum status time_calls(struct bench *b, double *ms, int calls, const struct repeated *what)
{
    TRY(comm_barrier(b->comm));
    double before = thread_ms();
    TRY(device_timer_record(&b->begin, b->s));
    for (int i = 0; i < calls; i++)
        TRY(what->graph != NULL ? graph_launch(b->s, what->graph) : what->run(b));
    TRY(device_timer_record(&b->end, b->s));
    TRY(stream_sync(b->s));
    TRY(device_timer_elapsed_ms(&b->begin, &b->end, ms));
    if (b->processor_time)
        *ms = thread_ms() - before;
    return ST_OK;
}

enum status bench_same(struct bench *b, int *count)
{
    enum status st = ST_OK;
    int *all = NULL;
    TRY(mem_alloc(&all, sizeof *all * (size_t)b->comm->world_size));
    TRY_GOTO(st, out, comm_exchange(b->comm, all, count, sizeof *count));
    *count = all[0];
out:
    mem_free(&all);
    return st;
}

static enum status time_repeats(struct bench *b, double *seconds, const struct repeated *what)
{
    double ms[REPEATS];
    int calls = 1, repeats = REPEATS;
    TRY(time_calls(b, &ms[0], 1, what)); /* the first one also loads code and touches memory */
    TRY(time_calls(b, &ms[0], 1, what));
    if (ms[0] > LONG_MS)
        repeats = LONG_REPEATS;
    TRY(bench_same(b, &repeats));
    if (ms[0] < MIN_MS)
        calls = ms[0] * MAX_CALLS > MIN_MS ? (int)(MIN_MS / ms[0]) + 1 : MAX_CALLS;
    TRY(bench_same(b, &calls));
    int warm = ms[0] > 0 ? (int)fmin(b->warm_ms / (ms[0] * calls), WARM_MAX) : 0;
    TRY(bench_same(b, &warm));
    for (int i = 0; i < warm; i++)
        TRY(time_calls(b, &ms[0], calls, what));
    for (int i = 0; i < repeats; i++) {
        TRY(time_calls(b, &ms[i], calls, what));
        for (int k = i; k > 0 && ms[k] < ms[k - 1]; k--) {
            double t = ms[k];
            ms[k] = ms[k - 1];
            ms[k - 1] = t;
        }
    }
    *seconds = ms[repeats / 2] * 1e-3 / calls;
    return ST_OK;
}

enum status bench_time(struct bench *b, double *seconds, enum status (*run)(struct bench *b))
{
    return time_repeats(b, seconds, &(struct repeated){.run = run});
}

static enum status capture(struct bench *b, struct repeated *what)
{
    enum status st = ST_OK;
    TRY(what->run(b)); /* what the first call loads cannot be captured */
    TRY(stream_sync(b->s));
    TRY(stream_capture_begin(b->s));
    for (int i = 0; i < GRAPH_CALLS && st == ST_OK; i++)
        st = what->run(b);
    enum status ended = stream_capture_end(b->s, &what->graph);
    TRY(st);
    return ended;
}

enum status bench_time_compute(struct bench *b, double *seconds,
                               enum status (*run)(struct bench *b))
{
    struct repeated what = {.run = run};
    if (!b->device->asynchronous)
        return bench_time(b, seconds, run);
    enum status st = capture(b, &what);
    if (st == ST_OK)
        st = time_repeats(b, seconds, &what);
    *seconds /= GRAPH_CALLS;
    graph_close(&what.graph);
    return st;
}

/* ---- from seconds to rates ------------------------------------------------------------------- */

static enum status mean_over_ranks(struct bench *b, struct calibrate_times *times)
{
    enum { COUNT = sizeof *times / sizeof(double) };
    enum status st = ST_OK;
    size_t world = (size_t)b->comm->world_size;
    double *all = NULL, mean[COUNT] = {0};
    TRY(mem_alloc(&all, sizeof *times * world));
    TRY_GOTO(st, out, comm_exchange(b->comm, all, times, sizeof *times));
    for (size_t i = 0; i < COUNT * world; i++)
        mean[i % COUNT] += all[i] / (double)world;
    memcpy(times, mean, sizeof *times);
out:
    mem_free(&all);
    return st;
}

static void add_point(struct machine_table *t, int64_t width, int64_t at, double per_second)
{
    if (t->count == 0 || t->of[t->count - 1].width != width)
        t->of[t->count++].width = width;
    struct machine_curve *c = &t->of[t->count - 1].curve;
    c->points[c->count].at = at;
    c->points[c->count++].per_second = per_second;
}

static double positive(double value, double otherwise)
{
    return value > 0 ? value : otherwise;
}

/* Few rows and many: seconds = call + rows x slope. */
static void rates_of_attention(struct machine *m, const struct calibrate_sizes *z,
                               const struct calibrate_times *t)
{
    double C = (double)z->channels, few = (double)z->few_rows, many = (double)z->many_rows;
    for (int h = 0; h < CALIBRATE_HEADS; h++) {
        double calls = 0;
        for (int i = 0; i < CALIBRATE_LENGTHS; i++) {
            double slope =
                positive((t->many[h][i] - t->few[h][i]) / (many - few), t->many[h][i] / many);
            int64_t length = z->lengths[i] * 5 / 4; /* of half and one and a half: squares / sum */
            add_point(&m->attention, z->heads[h], length, 3 * 4 * C * (double)length / slope);
            calls += positive(t->few[h][i] - few * slope, 0) / 3 / CALIBRATE_LENGTHS;
        }
        m->attention_call_seconds = calls; /* the widest heads' in the end */
    }
}

static void rates_of_compute(struct machine *m, const struct calibrate_sizes *z,
                             const struct calibrate_times *t, double element)
{
    for (int w = 0; w < CALIBRATE_WIDTHS; w++)
        for (int i = 0; i < CALIBRATE_ROWS; i++) {
            double C = (double)z->widths[w], T = (double)z->rows[i];
            add_point(&m->products, z->widths[w], z->rows[i],
                      3 * 2 * T * 12 * C * C / t->product[w][i]);
            add_point(&m->elementwise, z->widths[w], z->rows[i],
                      (4 * 4 + 6 * 4) * C * T * element / t->elementwise[w][i]);
        }
    rates_of_attention(m, z, t);
    m->update_per_second = (double)z->update_numel * 28 / t->update;
    m->memory_per_second = (double)z->update_numel * 12 / t->copy;
    m->launch_seconds = t->launch;
    m->floor_seconds = t->floor;
    m->edge_seconds = positive(t->edges - t->launch, 0);
    m->turn_seconds = positive(t->turn - t->launch, 0);
}

static void rates_of_links(struct machine *m, const struct calibrate_sizes *z,
                           const struct calibrate_times *t, int world)
{
    bool cuda = m->device == DEVICE_CUDA;
    double sent = (double)(z->link_numel / world * (world - 1) * (int64_t)sizeof(float));
    m->near = (struct simulate_link){0, m->memory_per_second, m->memory_per_second};
    if (world == 1)
        return;
    m->near.hop_seconds = cuda ? nvlink_hop_seconds : 0;
    m->near.gather_per_second = sent / positive(t->gather_large - t->gather_small, t->gather_large);
    m->near.reduce_per_second = sent / positive(t->reduce_large - t->reduce_small, t->reduce_large);
    m->call_seconds =
        positive((t->gather_small + t->reduce_small) / 2 - (world - 1) * m->near.hop_seconds, 0);
    if (!cuda)
        return;
    /* While collectives ran, compute lost (beside - alone). */
    double lost = positive(t->beside - t->alone, 0);
    double left = positive(t->collectives - lost, t->collectives / 20);
    m->slow_down_near = m->slow_down_far = lost / left;
}

static void say_sources(struct machine *m, const struct bench *b, int threads)
{
    char ranks[96];
    int world = b->comm->world_size;
    if (m->device == DEVICE_CPU)
        snprintf(ranks, sizeof ranks, "%d ranks of %d threads%s", world, threads,
                 b->processor_time ? ", processor time" : "");
    else
        snprintf(ranks, sizeof ranks, "%d GPUs", world);
    const char *const what[MACHINE_GROUPS] = {
        [MACHINE_PRODUCTS] = "four layers of a block, three products each",
        [MACHINE_ATTENTION] =
            "forward and backward, dropout 0.1, short and long sequences, few rows and many",
        [MACHINE_MEMORY] = "copy: a sum of two arrays; elementwise: GELU and residual norms; "
                           "update: AdamW",
        [MACHINE_LAUNCH] = "many tiny operations; least: products of a tiny block; edge: tiny "
                           "operations by turns on two streams; turn: graphs of one; "
                           "collective: of a few bytes, less its hops",
        [MACHINE_NEAR] = m->device == DEVICE_CPU
                             ? "all_gather, reduce_scatter; hops are in collective_us"
                             : "all_gather, reduce_scatter; hop: NCCL's own model of a ring",
        [MACHINE_SLOW_DOWN] = m->device == DEVICE_CPU
                                  ? "none: a rank does one instruction after the other"
                                  : "products beside collectives; far: as near",
    };
    for (int g = 0; g < MACHINE_GROUPS; g++)
        if (what[g] != NULL)
            snprintf(m->source[g], sizeof m->source[g], "measured by tessera calibrate, %s: %s",
                     ranks, what[g]);
    if (world == 1)
        snprintf(m->source[MACHINE_NEAR], sizeof m->source[MACHINE_NEAR],
                 "one rank: nothing was measured, this is memory's copy");
}

static struct calibrate_sizes sizes_for(const struct device *device)
{
    if (device->asynchronous)
        return (struct calibrate_sizes){.widths = {256, 768, 1024, 4096},
                                        .rows = {512, 1408, 2816, 11264},
                                        .heads = {32, 64},
                                        .lengths = {128, 320},
                                        .few_rows = 1280,
                                        .many_rows = 8960,
                                        .channels = 1024,
                                        .update_numel = 32 << 20,
                                        .link_numel = 64 << 20,
                                        .tiny_width = 64,
                                        .tiny_rows = 128};
    return (struct calibrate_sizes){.widths = {128, 256, 384, 768},
                                    .rows = {64, 256, 512, 1024},
                                    .heads = {32, 64},
                                    .lengths = {64, 192},
                                    .many_rows = 768,
                                    .channels = 512,
                                    .update_numel = 4 << 20,
                                    .link_numel = 8 << 20,
                                    .tiny_width = 32,
                                    .tiny_rows = 8};
}

enum status calibrate_rank(struct machine *m, struct device *device, struct comm *comm,
                           const struct calibrate_options *options)
{
    enum status st = ST_OK;
    struct calibrate_times times = {0};
    struct bench b = {.device = device,
                      .comm = comm,
                      .s = &device->streams[STREAM_COMPUTE],
                      .processor_time = options->processor_time,
                      .sizes = options->sizes != NULL ? *options->sizes : sizes_for(device)};
    memset(m, 0, sizeof *m);
    if (options->processor_time && (device->asynchronous || device->threads > 1))
        return FAIL(INVALID, "processor time is for CPU ranks of one thread; this one has %s",
                    device->asynchronous ? "a GPU" : "more (--threads 1)");
    m->device = device->asynchronous ? DEVICE_CUDA : DEVICE_CPU;
    snprintf(m->name, sizeof m->name, "%s", device->name);
    TRY_GOTO(st, out, device_timer_open(device, &b.begin));
    TRY_GOTO(st, out, device_timer_open(device, &b.end));
    TRY_GOTO(st, out, calibrate_compute(&b, &times));
    if (comm->world_size > 1)
        TRY_GOTO(st, out, calibrate_links(&b, &times, options->comm));
    TRY_GOTO(st, out, mean_over_ranks(&b, &times));
    rates_of_compute(m, &b.sizes, &times, (double)dtype_bytes(device->param_dtype));
    rates_of_links(m, &b.sizes, &times, comm->world_size);
    say_sources(m, &b, device->threads);
out:
    device_settle(device);
    calibrate_compute_close(&b);
    for (struct bench_block *k = b.blocks; k != NULL; k = k->next)
        device_free(device, &k->memory);
    pool_release(&b.pool);
    device_timer_close(&b.begin);
    device_timer_close(&b.end);
    return st;
}
