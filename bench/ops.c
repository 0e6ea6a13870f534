/*
 * What one CPU rank's ops reach: GEMMs of BERT-base beside the best sgemm of this machine, and the
 * memory-bound ops as bytes read and written a second. Each line: median and fastest-to-slowest
 * spread of the repeats, and the least processor time of one, over all threads: on a machine shared
 * with others it says what the clock on the wall does not. The peak is that of a loop of nothing
 * but fused multiply-adds. Results are checked in double before anything is timed.
 *
 * usage: build/release/bench/ops [THREADS]
 */
#include <cblas.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/base/arena.h"
#include "engine/base/out.h"
#include "engine/base/rng.h"
#include "engine/ops/ops.h"

enum { T = 1024, C = 768, F = 3072, H = 12, L = 256, B = T / L, REPEATS = 7 };

/* GFLOP/s of one core: twelve chains of fused multiply-adds, the best of some tries. */
#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) static float fma_chains(int rounds)
{
    __m256 a[12], x = _mm256_set1_ps(0.999f), y = _mm256_set1_ps(1e-6f);
    float sum = 0;
    for (int k = 0; k < 12; k++)
        a[k] = _mm256_set1_ps((float)k);
    for (int i = 0; i < rounds; i++) {
#pragma GCC unroll 12
        for (int k = 0; k < 12; k++)
            a[k] = _mm256_fmadd_ps(a[k], x, y);
    }
    for (int k = 0; k < 12; k++)
        sum += a[k][0];
    return sum;
}

static double fma_peak(void)
{
    enum { ROUNDS = 300000 };
    double best = INFINITY;
    volatile float sink = 0;
    if (!__builtin_cpu_supports("fma"))
        return NAN;
    for (int i = 0; i < 15; i++) {
        struct timespec begin, end;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin);
        sink = fma_chains(ROUNDS);
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
        double ns =
            (double)(end.tv_sec - begin.tv_sec) * 1e9 + (double)(end.tv_nsec - begin.tv_nsec);
        best = fmin(best, ns);
    }
    (void)sink;
    return 12.0 * 16.0 * ROUNDS / best;
}
#else
static double fma_peak(void)
{
    return NAN;
}
#endif

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
    return (struct dropout){.p = p, .layer_site = 1, .state = &b->state};
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
    return op_linear_backward_weight(b->s, b->dw, b->wide, b->x, false);
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
    return op_attention_backward(b->s, b->dqkv, b->none, b->x, b->y, b->lse, b->qkv, &b->q, H,
                                 drop(b, 0.1f), false);
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
    return op_gelu_backward(b->s, b->wide2, b->wide, (struct tensor){0}, b->wide2, b->wide, false);
}

static enum status run_adamw(struct bench *b)
{
    struct adam_range all = {0, b->adam[0].shape[0], true, false};
    return op_adamw(b->s, b->adam[0], b->none, b->adam[1], b->adam[2], b->adam[3], &all, 1, 0,
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

static double cpu_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

/* The rate of the repeats' median in units of 1e9 a second; @cpu: the least processor time, ms. */
static double measure(struct bench *b, const struct bench_case *c, double *spread, double *cpu)
{
    struct device_timer begin, end;
    double ms[REPEATS];
    enum status st =
        device_timer_open(b->device, &begin) | device_timer_open(b->device, &end) | c->run(b);
    *cpu = INFINITY;
    for (int i = 0; i < REPEATS; i++) {
        double before = cpu_ms();
        st |= device_timer_record(&begin, b->s) | c->run(b) | stream_sync(b->s) |
              device_timer_record(&end, b->s) | device_timer_elapsed_ms(&begin, &end, &ms[i]);
        *cpu = fmin(*cpu, cpu_ms() - before);
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

/* ---- checks in double, a few elements of each ----------------------------------------------- */

static double at(struct tensor x, int64_t i)
{
    return (double)((const float *)x.data)[i];
}

static void close_to(const char *what, double got, double want, double tolerance)
{
    if (fabs(got - want) <= tolerance * (1.0 + fabs(want)))
        return;
    out("%s: %.9g, in double %.9g\n", what, got, want);
    if (out_flush() == ST_OK)
        ASSERT(!"the result is right");
}

static void check_products(struct bench *b)
{
    enum status st = run_up(b) | run_gelu(b);
    ASSERT(st == ST_OK);
    for (int k = 0; k < 5; k++) {
        int64_t t = k * 199, n = k * 601, c = k * 151;
        double sum = 0;
        for (int i = 0; i < C; i++)
            sum += at(b->x, t * C + i) * at(b->w, n * C + i);
        close_to("linear_forward", at(b->wide, t * F + n), sum, 1e-5);
        close_to("gelu", at(b->wide2, t * F + n), 0.5 * sum * erfc(-sum * 0.70710678118654752),
                 1e-5);
        double data = 0, weight = 0;
        st = run_data(b) | run_weight(b);
        ASSERT(st == ST_OK);
        for (int i = 0; i < F; i++)
            data += at(b->wide, t * F + i) * at(b->w, (int64_t)i * C + c);
        for (int64_t i = 0; i < T; i++)
            weight += at(b->wide, i * F + n) * at(b->x, i * C + c);
        close_to("linear_backward_data", at(b->y, t * C + c), data, 1e-4);
        close_to("linear_backward_weight", at(b->dw, n * C + c), weight, 1e-4);
    }
}

/* One row of one head. */
static void check_attention(struct bench *b)
{
    enum { D = C / H, SEQUENCE = 2, HEAD = 5, ROW = 77 };
    double p[L], sum = 0, value = 0;
    const int64_t first = SEQUENCE * L, query = (first + ROW) * 3 * C + HEAD * D;
    enum status st = run_attention(b);
    ASSERT(st == ST_OK);
    for (int j = 0; j < L; j++) {
        double score = 0;
        for (int d = 0; d < D; d++)
            score += at(b->qkv, query + d) * at(b->qkv, (first + j) * 3 * C + C + HEAD * D + d);
        p[j] = exp(score / sqrt((double)D));
        sum += p[j];
    }
    for (int j = 0; j < L; j++)
        value += p[j] / sum * at(b->qkv, (first + j) * 3 * C + (int64_t)2 * C + HEAD * D + 3);
    close_to("attention", at(b->y, (first + ROW) * C + HEAD * D + 3), value, 1e-5);
}

/* One row of the norm, one element of AdamW, the sum of squares. */
static void check_loops(struct bench *b)
{
    double z[C], mean = 0, variance = 0, squares = 0;
    int64_t t = 333, i = 12345;
    for (int c = 0; c < C; c++) {
        z[c] = at(b->x, t * C + c) + at(b->z, t * C + c);
        mean += z[c] / C;
    }
    for (int c = 0; c < C; c++)
        variance += (z[c] - mean) * (z[c] - mean) / C;
    double p = at(b->adam[0], i), m = at(b->adam[1], i), v = at(b->adam[2], i);
    double g = at(b->adam[3], i);
    enum status st = run_norm(b) | run_adamw(b);
    ASSERT(st == ST_OK);
    close_to("residual_norm", at(b->y, t * C + 5),
             (z[5] - mean) / sqrt(variance + 1e-12) * at(b->gamma, 5) + at(b->beta, 5), 1e-5);
    m += 0.1 * (g - m);
    v = 0.999 * v + 0.001 * g * g;
    p -= 1e-4 / 0.1 * m / (sqrt(v / 0.001) + 1e-8);
    close_to("adamw", at(b->adam[0], i), p, 1e-6);
    struct step_report report = {.finite = 1};
    st = op_squared_norm(b->s, &report, b->adam[3]);
    ASSERT(st == ST_OK);
    for (int64_t k = 0; k < b->adam[3].shape[0]; k++)
        squares += at(b->adam[3], k) * at(b->adam[3], k);
    close_to("squared_norm", report.squared_norm, squares, 1e-9);
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
        {"gelu_backward", run_gelu_backward, 4 * wide, false},
        {"adamw 4M", run_adamw, 7.0 * (4 << 20) * sizeof(float), false},
        {"squared_norm 4M", run_squared_norm, (4 << 20) * sizeof(float), false},
    };
    double best = 0, peak = fma_peak() * threads;
    setup(&b, threads);
    check_products(&b);
    check_attention(&b);
    check_loops(&b);
    out("%s, %d thread%s, T=%d C=%d F=%d; multiply-adds: %.0f GFLOP/s\n", b.device->name, threads,
        threads > 1 ? "s" : "", T, C, F, peak);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        double spread, cpu, rate = measure(&b, &cases[i], &spread, &cpu);
        best = cases[i].flops && rate > best ? rate : best;
        out("%-36s %8.2f %s  spread %3.0f%%  cpu %7.2f ms", cases[i].name, rate,
            cases[i].flops ? "GFLOP/s" : "GB/s   ", 100 * spread, cpu);
        if (cases[i].flops)
            out("  %3.0f%% of best sgemm, %3.0f%% of peak", 100 * rate / best, 100 * rate / peak);
        out("\n");
    }
    return out_flush() == ST_OK ? 0 : 1;
}
