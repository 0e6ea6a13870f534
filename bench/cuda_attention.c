/*
 * Attention on a GPU, in bf16: time and operations a second of both passes at lengths of SQuAD
 * windows, packed, and at full windows of 384, with dropout 0.1, with its masks kept from forward
 * to backward, and without dropout.
 *
 * Each pass is captured in a graph, once a set of tensors; the sets together are larger than the
 * L2 cache. Times are the median of the repeats. Operations are those of two products forward and
 * five backward, 4 and 10 n^2 D a head, without what is computed twice. Results are checked by
 * tests/cuda_attention.c, not here.
 *
 * usage: build/release/bench/cuda_attention [NAME]      only cases whose name begins so
 */
#include <stdlib.h>
#include <string.h>

#include "bench/random_memory.h"
#include "engine/base/arena.h"
#include "engine/base/out.h"
#include "engine/ops/ops.h"

enum {
    REPEATS = 9,
    MAX_SETS = 12,
    MOST = 64,
    POSITIONS = 512,
    WINDOW = 384,
    MAX_T = MOST * WINDOW
};
static const size_t MEMORY_BYTES = (size_t)2 << 30, TOUCHED_BYTES = (size_t)256 << 20;

/* Tokens of 64 windows drawn from data/squad/squad-train-v1.1-part.json.gz: at most 384, 128 of
 * them shared with the next one, uncased vocabulary. */
static const int window_tokens[MOST] = {
    72,  88,  160, 137, 98,  152, 161, 144, 311, 188, 262, 88,  156, 213, 336, 226,
    196, 261, 82,  45,  150, 157, 242, 159, 163, 143, 384, 91,  202, 149, 119, 82,
    228, 105, 209, 157, 176, 384, 240, 292, 95,  136, 157, 127, 127, 148, 152, 75,
    146, 227, 230, 127, 189, 246, 216, 113, 133, 305, 114, 240, 128, 95,  117, 314};

static const struct attention_case {
    const char *name;
    int sequences, heads, width;
    bool full;
} cases[] = {{"large 16", 16, 16, 64, false},    {"large 64", 64, 16, 64, false},
             {"base 8", 8, 12, 64, false},       {"base 32", 32, 12, 64, false},
             {"small 32", 32, 12, 32, false},    {"full large 16", 16, 16, 64, true},
             {"full large 64", 64, 16, 64, true}};

struct bench {
    struct device *device;
    struct stream *s;
    void *memory; /* random numbers, N(0, 1) as bf16 */
    void *batch;
    struct step_state *state;
    struct sequences q;
    const struct attention_case *now;
    float p;
    bool kept; /* masks */
};

struct set { /* of tensors, one call */
    struct tensor qkv, out, lse, dout, dqkv, dbias;
    uint8_t *masks;
};

static void set_bind(struct arena *a, struct set *x, const struct bench *b)
{
    int64_t T = b->q.rows, C = (int64_t)b->now->heads * b->now->width, H = b->now->heads;
    x->qkv = tensor_2d(arena_take(a, (size_t)(T * 3 * C) * 2), DTYPE_BF16, T, 3 * C);
    x->dout = tensor_2d(arena_take(a, (size_t)(T * C) * 2), DTYPE_BF16, T, C);
    x->out = tensor_2d(arena_take(a, (size_t)(T * C) * 2), DTYPE_BF16, T, C);
    x->lse = tensor_2d(arena_take(a, (size_t)(H * T) * 4), DTYPE_F32, H, T);
    x->dbias = tensor_1d(arena_take(a, (size_t)(3 * C) * 4), DTYPE_F32, 3 * C);
    x->dqkv = tensor_2d(arena_take(a, (size_t)(T * 3 * C) * 2), DTYPE_BF16, T, 3 * C);
    x->masks = arena_take(
        a, op_attention_mask_bytes(DTYPE_BF16, b->now->width, H, T, b->q.count, b->q.max_length));
}

static enum status pass(struct bench *b, const struct set *x, bool backward)
{
    struct dropout drop = {b->p, (uint32_t)SITE_ATTENTION, b->state, b->kept ? x->masks : NULL};
    int heads = b->now->heads;
    if (backward)
        return op_attention_backward(b->s, x->dqkv, x->dbias, x->dout, x->out, x->lse, x->qkv,
                                     &b->q, heads, drop, false);
    return op_attention_forward(b->s, x->out, x->lse, x->qkv, &b->q, heads, drop);
}

static enum status passes(struct bench *b, size_t set_bytes, int sets, bool backward)
{
    for (int i = 0; i < sets; i++) {
        struct arena a = arena_over((char *)b->memory + (size_t)i * set_bytes, set_bytes);
        struct set x;
        set_bind(&a, &x, b);
        TRY(pass(b, &x, backward));
    }
    return op_finish_sums(b->s); /* once, as a unit does */
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Median of the microseconds of one pass. */
static enum status time_pass(struct bench *b, double *median, bool backward)
{
    struct device_timer begin = {0}, end = {0};
    struct graph *graph = NULL;
    struct arena measure = {0};
    struct set unused;
    double us[REPEATS];
    enum status st = ST_OK;
    set_bind(&measure, &unused, b);
    int sets = (int)(TOUCHED_BYTES / measure.used) + 2;
    sets = sets > MAX_SETS ? MAX_SETS : sets;
    TRY_GOTO(st, out, device_timer_open(b->device, &begin));
    TRY_GOTO(st, out, device_timer_open(b->device, &end));
    TRY_GOTO(st, out, passes(b, measure.used, sets, false));
    TRY_GOTO(st, out, stream_capture_begin(b->s));
    TRY_GOTO(st, out, passes(b, measure.used, sets, backward));
    TRY_GOTO(st, out, stream_capture_end(b->s, &graph));
    TRY_GOTO(st, out, graph_launch(b->s, graph));
    for (int i = 0; i < REPEATS; i++) {
        TRY_GOTO(st, out, device_timer_record(&begin, b->s));
        TRY_GOTO(st, out, graph_launch(b->s, graph));
        TRY_GOTO(st, out, device_timer_record(&end, b->s));
        TRY_GOTO(st, out, device_timer_elapsed_ms(&begin, &end, &us[i]));
        us[i] *= 1000.0 / sets;
    }
    qsort(us, REPEATS, sizeof *us, compare);
    *median = us[REPEATS / 2];
out:
    graph_close(&graph);
    device_timer_close(&end);
    device_timer_close(&begin);
    return st;
}

/* ---- batches -------------------------------------------------------------------------------- */

struct host_batch {
    int32_t first[MOST + 1], keys[MOST], sample[MOST], by_length[MOST];
    int32_t owner[MAX_T];
};

static enum status batch_upload(struct bench *b, const struct attention_case *c, double *pairs)
{
    struct host_batch *x = NULL, *there = b->batch;
    enum status st = ST_OK;
    TRY_GOTO(st, out, mem_alloc(&x, sizeof *x));
    *pairs = 0;
    x->first[0] = 0;
    for (int i = 0; i < c->sequences; i++) {
        int n = c->full ? WINDOW : window_tokens[i];
        x->first[i + 1] = x->first[i] + n;
        x->keys[i] = n;
        x->sample[i] = i;
        for (int32_t row = x->first[i]; row < x->first[i + 1]; row++)
            x->owner[row] = i;
        *pairs += (double)n * n;
    }
    for (int i = 0; i < c->sequences; i++) { /* longest first */
        int k = i;
        for (; k > 0 && x->keys[x->by_length[k - 1]] < x->keys[i]; k--)
            x->by_length[k] = x->by_length[k - 1];
        x->by_length[k] = i;
    }
    TRY_GOTO(st, out, device_copy(b->s, there, x, sizeof *x));
    TRY_GOTO(st, out, stream_sync(b->s));
    b->q = (struct sequences){.rows = x->first[c->sequences],
                              .count = c->sequences,
                              .max_length = WINDOW,
                              .positions = POSITIONS,
                              .cu_seqlens = there->first,
                              .kv_len = there->keys,
                              .sample = there->sample,
                              .by_length = there->by_length,
                              .row_sequence = there->owner};
out:
    mem_free(&x);
    return st;
}

static enum status lines(struct bench *b, const struct attention_case *c)
{
    double pairs, us[2];
    b->now = c;
    TRY(random_memory(b->s, b->memory, MEMORY_BYTES)); /* the last case left outputs in it */
    TRY(batch_upload(b, c, &pairs));
    double products = 2.0 * pairs * c->width * c->heads; /* operations of one */
    for (int i = 0; i < 3; i++) {
        b->p = i < 2 ? 0.1f : 0.0f;
        b->kept = i == 1;
        TRY(time_pass(b, &us[0], false));
        TRY(time_pass(b, &us[1], true));
        out("%-14s %3d  %6lld  %-7s  %8.2f %7.1f  %8.2f %7.1f\n", c->name, c->width,
            (long long)b->q.rows, i == 0 ? "0.1" : (i == 1 ? "kept" : "none"), us[0],
            2 * products / us[0] * 1e-6, us[1], 5 * products / us[1] * 1e-6);
        TRY(out_flush());
    }
    return ST_OK;
}

/* ---- the run -------------------------------------------------------------------------------- */

static enum status run(struct bench *b, const char *only)
{
    struct op_limits limits = {MAX_T, 1024, 4096, 16, MOST, POSITIONS, 512, 1};
    struct step_state state = {.host = {.seed = 1, .training = 1}};
    void *workspace = NULL;
    enum status st = ST_OK;
    b->s = &b->device->streams[STREAM_COMPUTE];
    b->s->workspace_bytes = op_workspace_bytes(b->device, &limits);
    TRY_GOTO(st, out, device_alloc(b->device, &workspace, b->s->workspace_bytes));
    TRY_GOTO(st, out, device_alloc(b->device, &b->batch, sizeof(struct host_batch)));
    TRY_GOTO(st, out, device_alloc(b->device, &b->memory, MEMORY_BYTES));
    TRY_GOTO(st, out, device_alloc(b->device, (void **)&b->state, sizeof *b->state));
    b->s->workspace = workspace;
    TRY_GOTO(st, out, device_copy(b->s, b->state, &state, sizeof state));
    TRY_GOTO(st, out, stream_sync(b->s));
    out("%s\n%-14s %3s  %6s  %7s  %8s %7s  %8s %7s\n", b->device->name, "case", "D", "tokens",
        "dropout", "forward", "TFLOP/s", "backward", "TFLOP/s");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (strncmp(cases[i].name, only, strlen(only)) == 0)
            TRY_GOTO(st, out, lines(b, &cases[i]));
out:
    device_free(b->device, (void **)&b->state);
    device_free(b->device, &b->memory);
    device_free(b->device, &b->batch);
    device_free(b->device, &workspace);
    return st;
}

int main(int argc, char **argv)
{
    struct bench b = {0};
    if (device_cuda_count() == 0) {
        out("cuda_attention: no GPU; skipped\n");
        return 0;
    }
    enum status st = device_open(&b.device, DEVICE_CUDA, PRECISION_BF16, 0, 1);
    if (st == ST_OK)
        st = run(&b, argc > 1 ? argv[1] : "");
    if (st != ST_OK)
        out("cuda_attention: %s\n", status_message());
    device_close(&b.device);
    return st == ST_OK ? 0 : 1;
}
