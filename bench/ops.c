/*
 * What one CPU rank's ops reach: GEMMs of BERT-base beside the best sgemm of this machine, and the
 * memory-bound ops as bytes read and written a second. Each line: median and fastest-to-slowest
 * spread of the repeats. Results are checked against a plain sum before anything is timed.
 *
 * usage: build/release/bench/ops [THREADS]
 */
#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/out.h"
#include "engine/base/rng.h"
#include "engine/ops/ops.h"

enum { T = 1024, C = 768, F = 3072, H = 12, L = 256, B = T / L, REPEATS = 7 };

struct bench {
    struct device *device;
    struct stream *s;
    struct sequences q;
    struct step_state state;
    struct tensor x, y, z, wide, wide2, qkv, dqkv, lse, stats, gamma, beta, w, dw, none;
    struct tensor adam[4];
    struct optim_hyper hyper;
};

static struct tensor take(struct bench *b, int64_t rows, int64_t columns, float scale)
{
    void *data = NULL;
    enum status st = device_alloc(b->device, &data, (size_t)(rows * columns) * sizeof(float));
    ASSERT(st == ST_OK);
    rng_fill_normal(data, 0, rows * columns, 1, (uint64_t)(rows * 31 + columns), scale);
    return columns == 1 ? tensor_1d(data, DTYPE_F32, rows)
                        : tensor_2d(data, DTYPE_F32, rows, columns);
}

static void batch(struct bench *b)
{
    int32_t *cu, *length, *sample, *row, *zero;
    enum status st = ST_OK;
    st = mem_alloc(&cu, (B + 1) * sizeof *cu) | mem_alloc(&length, B * sizeof *length) |
         mem_alloc(&sample, B * sizeof *sample) | mem_alloc(&row, T * sizeof *row) |
         mem_alloc(&zero, T * sizeof *zero);
    ASSERT(st == ST_OK);
    for (int i = 0; i < B; i++) {
        cu[i + 1] = cu[i] + L;
        length[i] = L;
        sample[i] = i;
    }
    for (int i = 0; i < T; i++)
        row[i] = i / L;
    b->q = (struct sequences){.rows = T,
                              .count = B,
                              .max_length = L,
                              .positions = 512,
                              .cu_seqlens = cu,
                              .kv_len = length,
                              .sample = sample,
                              .token = zero,
                              .token_type = zero,
                              .row_sequence = row,
                              .token_order = zero,
                              .start = zero,
                              .end = zero};
}

static void setup(struct bench *b, int threads)
{
    struct op_limits limits = {T, C, F, H, B, L, 512, 1};
    enum status st = device_open(&b->device, DEVICE_CPU, PRECISION_FP32, 0, threads);
    ASSERT(st == ST_OK);
    b->s = &b->device->streams[STREAM_COMPUTE];
    b->s->workspace_bytes = op_workspace_bytes(b->device, &limits);
    st = device_alloc(b->device, &b->s->workspace, b->s->workspace_bytes);
    ASSERT(st == ST_OK);
    batch(b);
    b->state = (struct step_state){.host = {.seed = 1, .training = 1, .inv_count = 1.0f},
                                   .lr = 1e-4f,
                                   .clip = 1.0f,
                                   .correction1 = 0.1f,
                                   .correction2 = 0.001f};
    b->hyper = (struct optim_hyper){.lr = 1e-4f, .beta1 = 0.9f, .beta2 = 0.999f, .eps = 1e-8f};
    b->x = take(b, T, C, 1.0f);
    b->y = take(b, T, C, 1.0f);
    b->z = take(b, T, C, 1.0f);
    b->wide = take(b, T, F, 1.0f);
    b->wide2 = take(b, T, F, 1.0f);
    b->qkv = take(b, T, 3 * C, 1.0f);
    b->dqkv = take(b, T, 3 * C, 1.0f);
    b->lse = take(b, H, T, 1.0f);
    b->stats = take(b, 2, T, 1.0f);
    b->gamma = take(b, C, 1, 1.0f);
    b->beta = take(b, C, 1, 1.0f);
    b->w = take(b, F, C, 0.02f);
    b->dw = take(b, F, C, 1.0f);
    for (int i = 0; i < 4; i++) {
        b->adam[i] = take(b, 4 << 20, 1, 1e-3f);
        for (int64_t k = 0; i == 2 && k < b->adam[i].shape[0]; k++) /* v >= 0 */
            ((float *)b->adam[i].data)[k] = fabsf(((float *)b->adam[i].data)[k]);
    }
}

/* ---- the cases ------------------------------------------------------------------------------ */

static struct dropout drop(struct bench *b, float p)
{
    return (struct dropout){p, 1, &b->state};
}

static enum status run_sgemm(struct bench *b)
{
    enum { N = 1536 };
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, 1024, N, N, 1.0f, b->wide.data, N,
                b->w.data, N, 0.0f, b->wide2.data, N);
    return ST_OK;
}

static enum status run_up(struct bench *b)
{
    return op_linear_forward(b->s, b->wide, b->x, b->w, b->none);
}

static enum status run_data(struct bench *b)
{
    return op_linear_backward_data(b->s, b->y, b->wide, b->w, false);
}

static enum status run_weight(struct bench *b)
{
    return op_linear_backward_weight(b->s, b->dw, b->none, b->wide, b->x, false);
}

static enum status run_attention(struct bench *b)
{
    return op_attention_forward(b->s, b->y, b->lse, b->qkv, &b->q, H, drop(b, 0.0f));
}

static enum status run_attention_dropout(struct bench *b)
{
    return op_attention_forward(b->s, b->y, b->lse, b->qkv, &b->q, H, drop(b, 0.1f));
}

static enum status run_attention_backward(struct bench *b)
{
    return op_attention_backward(b->s, b->dqkv, b->x, b->y, b->lse, b->qkv, &b->q, H,
                                 drop(b, 0.1f));
}

static enum status run_norm(struct bench *b)
{
    return op_residual_norm_forward(b->s, b->y, b->z, b->stats, b->x, b->z, b->gamma, b->beta,
                                    &b->q, 1e-12f, drop(b, 0.0f));
}

static enum status run_norm_dropout(struct bench *b)
{
    return op_residual_norm_forward(b->s, b->y, b->z, b->stats, b->x, b->z, b->gamma, b->beta,
                                    &b->q, 1e-12f, drop(b, 0.1f));
}

static enum status run_gelu(struct bench *b)
{
    return op_gelu_forward(b->s, b->wide2, b->wide);
}

static enum status run_gelu_backward(struct bench *b)
{
    return op_gelu_backward(b->s, b->wide2, b->wide2, b->wide);
}

static enum status run_adamw(struct bench *b)
{
    struct adam_range all = {0, b->adam[0].shape[0], true, false};
    return op_adamw(b->s, b->none, b->adam[0], b->adam[1], b->adam[2], b->adam[3], &all, 1,
                    &b->state, &b->hyper);
}

static enum status run_squared_norm(struct bench *b)
{
    struct step_report report = {.finite = 1};
    return op_squared_norm(b->s, &report, b->adam[3]);
}

static const double GEMM = 2.0 * T * C * F, SCORES = 2.0 * T * L * C;

struct bench_case {
    const char *name;
    enum status (*run)(struct bench *b);
    double work; /* floating-point operations, or bytes */
    bool flops;
};

/* Best of the repeats' median rate in units of 1e9 a second. */
static double measure(struct bench *b, const struct bench_case *c, double *spread)
{
    struct device_timer begin, end;
    double ms[REPEATS];
    enum status st =
        device_timer_open(b->device, &begin) | device_timer_open(b->device, &end) | c->run(b);
    for (int i = 0; i < REPEATS; i++) {
        st |= device_timer_record(&begin, b->s) | c->run(b) | stream_sync(b->s) |
              device_timer_record(&end, b->s) | device_timer_elapsed_ms(&begin, &end, &ms[i]);
        for (int k = i; k > 0 && ms[k] < ms[k - 1]; k--) {
            double t = ms[k];
            ms[k] = ms[k - 1];
            ms[k - 1] = t;
        }
    }
    ASSERT(st == ST_OK);
    device_timer_close(&begin);
    device_timer_close(&end);
    *spread = (ms[REPEATS - 1] - ms[0]) / ms[REPEATS / 2];
    return c->work / ms[REPEATS / 2] * 1e-6;
}

/* One element of each GEMM and of gelu against a plain sum. */
static void check(struct bench *b)
{
    const float *x = b->x.data, *w = b->w.data, *wide = b->wide.data, *wide2 = b->wide2.data;
    enum status st = run_up(b) | run_gelu(b);
    ASSERT(st == ST_OK);
    for (int at = 0; at < 5; at++) {
        int64_t t = at * 199, n = at * 601;
        double sum = 0;
        for (int c = 0; c < C; c++)
            sum += (double)x[t * C + c] * (double)w[n * C + c];
        ASSERT(fabs(sum - (double)wide[t * F + n]) < 1e-4);
        double gelu = 0.5 * sum * erfc(-sum * 0.70710678118654752);
        ASSERT(fabs(gelu - (double)wide2[t * F + n]) < 1e-4);
    }
}

int main(int argc, char **argv)
{
    int threads = argc > 1 ? (int)strtol(argv[1], NULL, 10) : 1;
    static struct bench b;
    const double rows = (double)T * C * sizeof(float), wide = (double)T * F * sizeof(float);
    const struct bench_case cases[] = {
        {"sgemm 1024x1536x1536", run_sgemm, 2.0 * 1024 * 1536 * 1536, true},
        {"linear_forward 1024x3072x768", run_up, GEMM, true},
        {"linear_backward_data", run_data, GEMM, true},
        {"linear_backward_weight", run_weight, GEMM, true},
        {"attention_forward 4x256, 12 heads", run_attention, 2 * SCORES, true},
        {"attention_forward, dropout", run_attention_dropout, 2 * SCORES, true},
        {"attention_backward, dropout", run_attention_backward, 5 * SCORES, true},
        {"residual_norm_forward", run_norm, 4 * rows, false},
        {"residual_norm_forward, dropout", run_norm_dropout, 4 * rows, false},
        {"gelu_forward", run_gelu, 2 * wide, false},
        {"gelu_backward", run_gelu_backward, 3 * wide, false},
        {"adamw 4M", run_adamw, 7.0 * (4 << 20) * sizeof(float), false},
        {"squared_norm 4M", run_squared_norm, (4 << 20) * sizeof(float), false},
    };
    double best = 0;
    setup(&b, threads);
    check(&b);
    out("%s, %d thread%s, T=%d C=%d F=%d\n", b.device->name, threads, threads > 1 ? "s" : "", T, C,
        F);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        double spread, rate = measure(&b, &cases[i], &spread);
        best = cases[i].flops && rate > best ? rate : best;
        out("%-36s %8.2f %s  spread %3.0f%%", cases[i].name, rate,
            cases[i].flops ? "GFLOP/s" : "GB/s   ", 100 * spread);
        if (cases[i].flops)
            out("  %3.0f%% of best sgemm", 100 * rate / best);
        out("\n");
    }
    return out_flush() == ST_OK ? 0 : 1;
}
