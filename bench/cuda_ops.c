/*
 * The CUDA ops at the sizes of BERT-base and BERT-large, in bf16: time, bytes and operations a
 * second, and the share of what this card reaches in a large copy and a large matrix product.
 *
 * Each op is captured in a graph, once a set of tensors; the sets together are larger than the L2
 * cache, so that no op finds its inputs there. Times are the median of the repeats, with the
 * fastest-to-slowest spread. Bytes count every input and output once, operations those of the
 * matrix products. Results are checked by tests/cuda_ops.c, not here.
 *
 * Matrix products run by a measured plan, as in training (engine/ops/gemm_measure.h), or, with
 * --heuristic, by the library's first choice.
 *
 * usage: build/release/bench/cuda_ops [--heuristic] [T...]      default: 1408 5632 11136
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/random_memory.h"
#include "engine/base/arena.h"
#include "engine/base/out.h"
#include "engine/base/rng.h"
#include "engine/ops/gemm_table.h"
#include "engine/ops/ops.h"
#ifdef TESSERA_CUDA
#include "engine/ops/gemm_measure.h"
#include "engine/ops/gemm_plan.h"
#endif

enum { REPEATS = 9, MAX_SETS = 24, MAX_COUNT = 64, POSITIONS = 512, VOCAB = 30522, TYPES = 2 };
enum { RANKS = 4 }; /* whose rows a table is looked up for */
static const size_t MEMORY_BYTES = (size_t)3 << 30, TOUCHED_BYTES = (size_t)256 << 20;

struct model {
    const char *name;
    int64_t C, H, F;
};

static const struct model models[] = {{"base", 768, 12, 3072}, {"large", 1024, 16, 4096}};

struct bench {
    struct device *device;
    struct stream *s;
    void *memory; /* random numbers, N(0, 1) as bf16 and nearly so as fp32 */
    struct step_state *state;
    struct step_report *report;
    struct sequences q;
    struct optim_hyper hyper;
    double copy_rate, gemm_rate; /* bytes and operations a second */
    bool heuristic;              /* no plan */
    struct gemm_table plan;      /* owned */
};

struct work {
    struct bench *b;
    struct arena a; /* the set of tensors of this call */
    int64_t T, C, H, F, N, K;
};

struct cost {
    double bytes, operations;
};

/* ---- tensors -------------------------------------------------------------------------------- */

static struct tensor half2(struct work *w, int64_t rows, int64_t columns)
{
    return tensor_2d(arena_take(&w->a, (size_t)(rows * columns) * 2), DTYPE_BF16, rows, columns);
}

static struct tensor half1(struct work *w, int64_t n)
{
    return tensor_1d(arena_take(&w->a, (size_t)n * 2), DTYPE_BF16, n);
}

static struct tensor full2(struct work *w, int64_t rows, int64_t columns)
{
    return tensor_2d(arena_take(&w->a, (size_t)(rows * columns) * 4), DTYPE_F32, rows, columns);
}

static struct tensor full1(struct work *w, int64_t n)
{
    return tensor_1d(arena_take(&w->a, (size_t)n * 4), DTYPE_F32, n);
}

static struct dropout dropout_at(struct work *w, enum dropout_site site)
{
    return (struct dropout){.p = 0.1f, .layer_site = (uint32_t)site, .state = w->b->state};
}

/* ---- ops: each takes its tensors from the set and enqueues one call -------------------------- */

static enum status copy(struct work *w, struct cost *c)
{
    size_t bytes = TOUCHED_BYTES;
    void *to = arena_take(&w->a, bytes), *from = arena_take(&w->a, bytes);
    c->bytes = 2.0 * (double)bytes;
    return to ? device_copy(w->b->s, to, from, bytes) : ST_OK;
}

static double gemm_cost(const struct work *w)
{
    return 2.0 * (double)w->T * (double)w->N * (double)w->K;
}

static enum status linear_forward(struct work *w, struct cost *c)
{
    struct tensor y = half2(w, w->T, w->N), x = half2(w, w->T, w->K), m = half2(w, w->N, w->K);
    struct tensor bias = half1(w, w->N);
    c->operations = gemm_cost(w);
    c->bytes = 2.0 * (double)(w->T * w->N + w->T * w->K + w->N * w->K);
    return w->a.base ? op_linear_forward(w->b->s, y, x, m, bias) : ST_OK;
}

static enum status linear_data(struct work *w, struct cost *c)
{
    struct tensor dy = half2(w, w->T, w->N), dx = half2(w, w->T, w->K), m = half2(w, w->N, w->K);
    c->operations = gemm_cost(w);
    c->bytes = 2.0 * (double)(w->T * w->N + w->T * w->K + w->N * w->K);
    return w->a.base ? op_linear_backward_data(w->b->s, dx, dy, m, false) : ST_OK;
}

static enum status linear_weight(struct work *w, struct cost *c)
{
    struct tensor dy = half2(w, w->T, w->N), x = half2(w, w->T, w->K), dw = full2(w, w->N, w->K);
    c->operations = gemm_cost(w);
    c->bytes = 2.0 * (double)(w->T * w->N + w->T * w->K) + 4.0 * (double)(w->N * w->K);
    return w->a.base ? op_linear_backward_weight(w->b->s, dw, dy, x, false) : ST_OK;
}

static enum status gelu_forward(struct work *w, struct cost *c)
{
    struct tensor y = half2(w, w->T, w->F), x = half2(w, w->T, w->F);
    c->bytes = 4.0 * (double)(w->T * w->F);
    return w->a.base ? op_gelu_forward(w->b->s, y, x) : ST_OK;
}

static enum status gelu_backward(struct work *w, struct cost *c)
{
    struct tensor d = half2(w, w->T, w->F), x = half2(w, w->T, w->F), dbias = full1(w, w->F);
    c->bytes = 8.0 * (double)(w->T * w->F);
    return w->a.base ? op_gelu_backward(w->b->s, d, x, dbias, d, x, false) : ST_OK;
}

static enum status residual_forward(struct work *w, struct cost *c)
{
    struct tensor o = half2(w, w->T, w->C), z = half2(w, w->T, w->C), x = half2(w, w->T, w->C);
    struct tensor stats = full2(w, 2, w->T), gamma = half1(w, w->C), beta = half1(w, w->C);
    c->bytes = 8.0 * (double)(w->T * w->C);
    return w->a.base ? op_residual_norm_forward(w->b->s, o, z, stats, x, z, gamma, beta, &w->b->q,
                                                1e-12f, dropout_at(w, SITE_FFN_OUTPUT))
                     : ST_OK;
}

static enum status residual_backward(struct work *w, struct cost *c)
{
    struct tensor dx = half2(w, w->T, w->C), dy = half2(w, w->T, w->C), z = half2(w, w->T, w->C);
    struct tensor stats = full2(w, 2, w->T), gamma = half1(w, w->C);
    struct tensor dgamma = full1(w, w->C), dbeta = full1(w, w->C), dbias = full1(w, w->C);
    c->bytes = 8.0 * (double)(w->T * w->C);
    return w->a.base
               ? op_residual_norm_backward(w->b->s, dx, dy, dgamma, dbeta, dbias, dx, z, stats,
                                           gamma, &w->b->q, dropout_at(w, SITE_FFN_OUTPUT), false)
               : ST_OK;
}

static enum status embedding_forward(struct work *w, struct cost *c)
{
    struct tensor out_rows = half2(w, w->T, w->C), table = half1(w, VOCAB * w->C);
    c->bytes = 4.0 * (double)(w->T * w->C);
    return w->a.base
               ? op_embedding_forward(w->b->s, out_rows, table, sequences_rows(&w->b->q), 0, true)
               : ST_OK;
}

/* Of four ranks' rows what the second of four shards has: all are written, a fourth is read. */
static enum status embedding_forward_ranks(struct work *w, struct cost *c)
{
    struct token_rows q = w->b->q.all;
    int64_t numel = VOCAB * w->C / RANKS / 128 * 128;
    struct tensor out_rows = half2(w, q.rows, w->C), shard = half1(w, numel);
    c->bytes = 2.0 * (1 + 1.0 / RANKS) * (double)(q.rows * w->C);
    return w->a.base ? op_embedding_forward(w->b->s, out_rows, shard, q, numel, true) : ST_OK;
}

static enum status embedding_backward(struct work *w, struct cost *c)
{
    struct tensor d = half2(w, w->T, w->C), dtable = full1(w, VOCAB * w->C);
    c->bytes = 2.0 * (double)(w->T * w->C) + 4.0 * (double)(VOCAB * w->C);
    return w->a.base
               ? op_embedding_backward(w->b->s, dtable, d, sequences_rows(&w->b->q), 0, ROWS_ZERO)
               : ST_OK;
}

/* Of four ranks' rows what the first shard of a table in two parts has, and all of a part. */
static enum status embedding_backward_shard(struct work *w, struct cost *c, int64_t numel)
{
    struct token_rows q = w->b->q.all;
    struct tensor d = half2(w, q.rows, w->C), dtable = full1(w, numel);
    c->bytes = 4.0 * (double)numel; /* and the rows */
    return w->a.base ? op_embedding_backward(w->b->s, dtable, d, q, 0, ROWS_ZERO) : ST_OK;
}

static enum status embedding_backward_ranks(struct work *w, struct cost *c)
{
    return embedding_backward_shard(w, c, VOCAB * w->C / 2 / RANKS / 128 * 128);
}

static enum status embedding_backward_part(struct work *w, struct cost *c)
{
    return embedding_backward_shard(w, c, VOCAB * w->C / 2);
}

static enum status embedding_norm_backward(struct work *w, struct cost *c)
{
    struct tensor dx = half2(w, w->T, w->C), z = half2(w, w->T, w->C), stats = full2(w, 2, w->T);
    struct tensor position = full2(w, POSITIONS, w->C), type = full2(w, TYPES, w->C);
    struct tensor gamma = half1(w, w->C), dgamma = full1(w, w->C), dbeta = full1(w, w->C);
    c->bytes = 8.0 * (double)(w->T * w->C); /* dx is read again for the tables */
    return w->a.base ? op_embedding_norm_backward(w->b->s, dx, position, type, dgamma, dbeta, dx, z,
                                                  stats, gamma, &w->b->q,
                                                  dropout_at(w, SITE_EMBEDDING), false)
                     : ST_OK;
}

/* n m D multiplications and additions a head and product, over the sequences. */
static double attention_cost(const struct work *w, int products)
{
    double pairs = 0;
    for (int b = 0; b < w->b->q.count; b++) {
        double n = (double)(w->T * (b + 1) / w->b->q.count - w->T * b / w->b->q.count);
        pairs += n * n;
    }
    return 2.0 * products * pairs * (double)w->C;
}

static enum status attention_forward(struct work *w, struct cost *c)
{
    struct tensor qkv = half2(w, w->T, 3 * w->C), o = half2(w, w->T, w->C);
    struct tensor lse = full2(w, w->H, w->T);
    c->bytes = 8.0 * (double)(w->T * w->C);
    c->operations = attention_cost(w, 2);
    return w->a.base ? op_attention_forward(w->b->s, o, lse, qkv, &w->b->q, (int)w->H,
                                            dropout_at(w, SITE_ATTENTION))
                     : ST_OK;
}

static enum status attention_backward(struct work *w, struct cost *c)
{
    struct tensor qkv = half2(w, w->T, 3 * w->C), dqkv = half2(w, w->T, 3 * w->C);
    struct tensor o = half2(w, w->T, w->C), d = half2(w, w->T, w->C);
    struct tensor lse = full2(w, w->H, w->T), dbias = full1(w, 3 * w->C);
    c->bytes = 16.0 * (double)(w->T * w->C);
    c->operations = attention_cost(w, 5);
    return w->a.base ? op_attention_backward(w->b->s, dqkv, dbias, d, o, lse, qkv, &w->b->q,
                                             (int)w->H, dropout_at(w, SITE_ATTENTION), false)
                     : ST_OK;
}

static enum status span_head(struct work *w, struct cost *c)
{
    struct tensor x = half2(w, w->T, w->C), dx = half2(w, w->T, w->C), m = half2(w, 2, w->C);
    struct tensor bias = half1(w, 2), logits = full2(w, w->T, 2), d = full2(w, w->T, 2);
    struct tensor dw = full2(w, 2, w->C), dbias = full1(w, 2);
    c->bytes = 6.0 * (double)(w->T * w->C);
    if (!w->a.base)
        return ST_OK;
    TRY(op_span_logits_forward(w->b->s, logits, x, m, bias, &w->b->q));
    TRY(op_span_loss(w->b->s, d, w->b->report, logits, &w->b->q, w->b->state));
    return op_span_logits_backward(w->b->s, dx, dw, dbias, d, x, m, &w->b->q, false);
}

static int64_t block_numel(const struct work *w)
{
    return 4 * w->C * w->C + 2 * w->C * w->F;
}

static enum status adamw(struct work *w, struct cost *c)
{
    int64_t n = block_numel(w);
    struct tensor param = half1(w, n), low = half1(w, n), m = full1(w, n), v = full1(w, n);
    struct tensor grad = full1(w, n);
    struct adam_range ranges[] = {{0, n - 1024, true, false}, {n - 1024, 1024, false, false}};
    low.dtype = DTYPE_U16;
    c->bytes = 28.0 * (double)n;
    return w->a.base
               ? op_adamw(w->b->s, param, low, m, v, grad, ranges, 2, 0, w->b->state, &w->b->hyper)
               : ST_OK;
}

static enum status squared_norm(struct work *w, struct cost *c)
{
    int64_t n = block_numel(w);
    struct tensor g = full1(w, n);
    c->bytes = 4.0 * (double)n;
    return w->a.base ? op_squared_norm(w->b->s, w->b->report, g) : ST_OK;
}

static enum status cast(struct work *w, struct cost *c)
{
    int64_t n = block_numel(w);
    struct tensor to = half1(w, n), from = full1(w, n);
    c->bytes = 6.0 * (double)n;
    return w->a.base ? op_cast(w->b->s, to, from) : ST_OK;
}

/* ---- timing --------------------------------------------------------------------------------- */

typedef enum status issue_fn(struct work *w, struct cost *c);

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Call @issue once a set, with plans made, while capturing or not. */
static enum status issue_sets(struct work *w, issue_fn *issue, size_t set_bytes, int sets)
{
    struct cost unused = {0, 0};
    for (int i = 0; i < sets; i++) {
        w->a = arena_over((char *)w->b->memory + (size_t)i * set_bytes, set_bytes);
        TRY(issue(w, &unused));
        TRY(op_finish_sums(w->b->s));
    }
    return ST_OK;
}

/* Median and spread of the microseconds of one call. */
static enum status time_op(double us[REPEATS], struct work *w, issue_fn *issue, struct cost *cost)
{
    struct device *device = w->b->device;
    struct device_timer begin = {0}, end = {0};
    struct graph *graph = NULL;
    enum status st = ST_OK;
    memset(&w->a, 0, sizeof w->a);
    *cost = (struct cost){0, 0};
    TRY(issue(w, cost)); /* measures */
    TRY(op_finish_sums(w->b->s));
    size_t set_bytes = w->a.used;
    int sets = (int)(MEMORY_BYTES / set_bytes), wanted = (int)(TOUCHED_BYTES / set_bytes) + 4;
    sets = sets > MAX_SETS ? MAX_SETS : sets;
    sets = sets > wanted ? wanted : sets;
    TRY_GOTO(st, out, device_timer_open(device, &begin));
    TRY_GOTO(st, out, device_timer_open(device, &end));
    TRY_GOTO(st, out, issue_sets(w, issue, set_bytes, 1));
    TRY_GOTO(st, out, stream_capture_begin(w->b->s));
    TRY_GOTO(st, out, issue_sets(w, issue, set_bytes, sets));
    TRY_GOTO(st, out, stream_capture_end(w->b->s, &graph));
    TRY_GOTO(st, out, graph_launch(w->b->s, graph));
    for (int i = 0; i < REPEATS; i++) {
        TRY_GOTO(st, out, device_timer_record(&begin, w->b->s));
        TRY_GOTO(st, out, graph_launch(w->b->s, graph));
        TRY_GOTO(st, out, device_timer_record(&end, w->b->s));
        TRY_GOTO(st, out, device_timer_elapsed_ms(&begin, &end, &us[i]));
        us[i] *= 1000.0 / sets;
    }
    qsort(us, REPEATS, sizeof *us, compare);
out:
    graph_close(&graph);
    device_timer_close(&end);
    device_timer_close(&begin);
    return st;
}

static enum status line(struct work *w, const char *model, const char *name, issue_fn *issue)
{
    double us[REPEATS];
    struct cost cost;
    TRY(time_op(us, w, issue, &cost));
    double middle = us[REPEATS / 2];
    out("%-6s %6lld  %-25s %9.2f %6.1f%% %9.0f %5.1f%%", model, (long long)w->T, name, middle,
        100.0 * (us[REPEATS - 1] - us[0]) / middle, cost.bytes / middle * 1e-3,
        100.0 * cost.bytes / middle * 1e6 / w->b->copy_rate);
    if (cost.operations > 0)
        out(" %9.1f %5.1f%%", cost.operations / middle * 1e-6,
            100.0 * cost.operations / middle * 1e6 / w->b->gemm_rate);
    out("\n");
    return out_flush();
}

/* ---- batches -------------------------------------------------------------------------------- */

struct host_batch {
    int32_t *cu, *kv, *sample, *start, *end, *token, *type, *owner, *order;
    int32_t *all_token, *all_order; /* of all ranks' rows; those of this one come first */
};

static void host_batch_bind(struct arena *a, struct host_batch *x, int64_t rows)
{
    ARENA_BIND(a, x->cu, MAX_COUNT + 1);
    ARENA_BIND(a, x->kv, MAX_COUNT);
    ARENA_BIND(a, x->sample, MAX_COUNT);
    ARENA_BIND(a, x->start, MAX_COUNT);
    ARENA_BIND(a, x->end, MAX_COUNT);
    ARENA_BIND(a, x->token, rows);
    ARENA_BIND(a, x->type, rows);
    ARENA_BIND(a, x->owner, rows);
    ARENA_BIND(a, x->order, rows);
    ARENA_BIND(a, x->all_token, RANKS * rows);
    ARENA_BIND(a, x->all_order, RANKS * rows);
}

/* As in text, the k-th most frequent token has 1/k of the first one's rows (which is a tenth). */
static int32_t draw_token(uint64_t row)
{
    enum { FIRST = 999, FRACTION = 1 << 24 };
    double u = (double)rng_below(1, 2, row, FRACTION) / FRACTION;
    return FIRST + (int32_t)exp(u * log(VOCAB - FIRST));
}

struct token_row {
    int32_t token, row;
};

static int by_token(const void *a, const void *b)
{
    const struct token_row *x = a, *y = b;
    return x->token != y->token ? (x->token > y->token) - (x->token < y->token)
                                : (x->row > y->row) - (x->row < y->row);
}

static enum status sort_rows(int32_t *order, const int32_t *token, int64_t rows)
{
    struct token_row *sorted;
    TRY(mem_alloc(&sorted, sizeof *sorted * (size_t)rows));
    for (int64_t row = 0; row < rows; row++)
        sorted[row] = (struct token_row){token[row], (int32_t)row};
    qsort(sorted, (size_t)rows, sizeof *sorted, by_token);
    for (int64_t row = 0; row < rows; row++)
        order[row] = sorted[row].row;
    mem_free(&sorted);
    return ST_OK;
}

/* Sequences of about 176 rows, as SQuAD has. */
static enum status host_batch_fill(struct host_batch *x, int64_t rows, int count)
{
    for (int64_t row = 0; row < RANKS * rows; row++)
        x->all_token[row] = draw_token((uint64_t)row);
    memcpy(x->token, x->all_token, sizeof *x->token * (size_t)rows);
    for (int b = 0; b < count; b++) {
        x->cu[b] = (int32_t)(rows * b / count);
        x->cu[b + 1] = (int32_t)(rows * (b + 1) / count);
        x->kv[b] = x->cu[b + 1] - x->cu[b];
        x->sample[b] = b;
        x->start[b] = 3;
        x->end[b] = 9;
        for (int32_t row = x->cu[b]; row < x->cu[b + 1]; row++) {
            x->type[row] = row - x->cu[b] > 14;
            x->owner[row] = b;
        }
    }
    TRY(sort_rows(x->order, x->token, rows));
    return sort_rows(x->all_order, x->all_token, RANKS * rows);
}

static enum status batch_upload(struct bench *b, int64_t rows, void *device_memory, size_t bytes)
{
    struct arena host = {0}, there = arena_over(device_memory, bytes);
    struct host_batch x, y;
    void *memory = NULL;
    enum status st = ST_OK;
    int count = (int)(rows / 176 < MAX_COUNT ? rows / 176 : MAX_COUNT);
    host_batch_bind(&host, &x, rows);
    size_t used = host.used;
    TRY_GOTO(st, out, mem_alloc(&memory, used));
    host = arena_over(memory, used);
    host_batch_bind(&host, &x, rows);
    host_batch_bind(&there, &y, rows);
    TRY_GOTO(st, out, host_batch_fill(&x, rows, count));
    TRY_GOTO(st, out, device_copy(b->s, device_memory, memory, used));
    TRY_GOTO(st, out, stream_sync(b->s));
    b->q = (struct sequences){.rows = rows,
                              .count = count,
                              .max_length = (int32_t)(rows / count + 1),
                              .positions = POSITIONS,
                              .cu_seqlens = y.cu,
                              .kv_len = y.kv,
                              .sample = y.sample,
                              .token = y.token,
                              .token_type = y.type,
                              .row_sequence = y.owner,
                              .token_order = y.order,
                              .start = y.start,
                              .end = y.end,
                              .all = {RANKS * rows, RANKS, y.all_token, y.all_order}};
out:
    mem_free(&memory);
    return st;
}

/* ---- matrix products ------------------------------------------------------------------------- */

static const struct {
    const char *name;
    issue_fn *issue;
} gemms[] = {{"forward", linear_forward}, {"data", linear_data}, {"weight", linear_weight}};

#ifdef TESSERA_CUDA

/* Each product once, as a rehearsal does; then those that are new are measured. */
static enum status plan_products(struct work *w, const int64_t N[4], const int64_t K[4])
{
    struct bench *b = w->b;
    struct gemm_table wanted = {0};
    struct gemm_measured measured = {0};
    struct cost cost;
    enum status st = ST_OK;
    if (b->heuristic)
        return ST_OK;
    for (int i = 0; i < 12; i++) {
        w->N = N[i / 3];
        w->K = K[i / 3];
        w->a = arena_over(b->memory, MEMORY_BYTES);
        TRY(gemms[i % 3].issue(w, &cost));
    }
    TRY(stream_sync(b->s));
    gemm_card(b->device, &b->plan.card);
    TRY_GOTO(st, out, gemm_wanted(&wanted, b->device, NULL, 0));
    TRY_GOTO(st, out, gemm_measure(b->device, &b->plan, &wanted, 10.0, &measured));
    gemm_plan_install(b->device, &b->plan);
    out("planned %d products, %d not with the library's first choice\n", measured.products,
        measured.changed);
out:
    gemm_table_release(&wanted);
    return st;
}

#else

static enum status plan_products(struct work *w, const int64_t N[4], const int64_t K[4])
{
    (void)w;
    (void)N;
    (void)K;
    return ST_OK;
}

#endif

/* ---- the run -------------------------------------------------------------------------------- */

static enum status lines(struct bench *b, const struct model *m, int64_t T)
{
    static const struct {
        const char *name;
        issue_fn *issue;
    } others[] = {{"gelu forward", gelu_forward},
                  {"gelu backward", gelu_backward},
                  {"residual norm forward", residual_forward},
                  {"residual norm backward", residual_backward},
                  {"attention forward", attention_forward},
                  {"attention backward", attention_backward},
                  {"embedding forward", embedding_forward},
                  {"embedding forward, ranks", embedding_forward_ranks},
                  {"embedding backward, ranks", embedding_backward_ranks},
                  {"embedding backward, part", embedding_backward_part},
                  {"embedding backward", embedding_backward},
                  {"embedding norm backward", embedding_norm_backward},
                  {"span head, all", span_head},
                  {"adamw, a block", adamw},
                  {"squared norm, a block", squared_norm},
                  {"cast, a block", cast}};
    struct work w = {.b = b, .T = T, .C = m->C, .H = m->H, .F = m->F};
    const int64_t N[] = {3 * m->C, m->C, m->F, m->C}, K[] = {m->C, m->C, m->C, m->F};
    static const char *const layer[] = {"qkv", "projection", "ffn in", "ffn out"};
    char name[40];
    TRY(plan_products(&w, N, K));
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 3; k++) {
            w.N = N[i];
            w.K = K[i];
            snprintf(name, sizeof name, "linear %s %s", layer[i], gemms[k].name);
            TRY(line(&w, m->name, name, gemms[k].issue));
        }
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        TRY(line(&w, m->name, others[i].name, others[i].issue));
    return ST_OK;
}

/* What this card reaches: a large copy and a large product. */
static enum status ceilings(struct bench *b)
{
    struct work w = {.b = b, .T = 8192, .N = 8192, .K = 8192};
    double us[REPEATS];
    struct cost cost;
    TRY(time_op(us, &w, copy, &cost));
    b->copy_rate = cost.bytes / us[REPEATS / 2] * 1e6;
    TRY(time_op(us, &w, linear_forward, &cost));
    b->gemm_rate = cost.operations / us[REPEATS / 2] * 1e6;
    out("%s: copy %.0f GB/s, product 8192^3 %.0f TFLOP/s\n", b->device->name, b->copy_rate * 1e-9,
        b->gemm_rate * 1e-12);
    out("%-6s %6s  %-25s %9s %7s %9s %6s %9s %6s\n", "model", "T", "op", "us", "spread", "GB/s",
        "copy", "TFLOP/s", "8192^3");
    return ST_OK;
}

static enum status state_upload(struct bench *b)
{
    struct step_state state = {.host = {.seed = 1, .training = 1, .inv_count = 0.01f},
                               .lr = 1e-4f,
                               .clip = 1.0f,
                               .correction1 = 0.1f,
                               .correction2 = 0.001f};
    struct step_report report = {.finite = 1};
    TRY(device_copy(b->s, b->state, &state, sizeof state));
    TRY(device_copy(b->s, b->report, &report, sizeof report));
    return stream_sync(b->s);
}

static enum status run(struct bench *b, const int64_t *rows, int row_count)
{
    struct op_limits limits = {32768, 1024, 4096, 16, MAX_COUNT, POSITIONS, VOCAB, 1};
    size_t batch_bytes = (size_t)1 << 20;
    void *workspace = NULL, *batch = NULL;
    enum status st = ST_OK;
    b->s = &b->device->streams[STREAM_COMPUTE];
    b->s->workspace_bytes = op_workspace_bytes(b->device, &limits);
    b->hyper =
        (struct optim_hyper){1e-4f, 0.9f, 0.999f, 1e-8f, 0.01f, 1.0f, 10, 100, SCHEDULE_LINEAR};
    TRY_GOTO(st, out, device_alloc(b->device, &workspace, b->s->workspace_bytes));
    TRY_GOTO(st, out, device_alloc(b->device, &batch, batch_bytes));
    TRY_GOTO(st, out, device_alloc(b->device, &b->memory, MEMORY_BYTES));
    TRY_GOTO(st, out, device_alloc(b->device, (void **)&b->state, sizeof *b->state));
    TRY_GOTO(st, out, device_alloc(b->device, (void **)&b->report, sizeof *b->report));
    b->s->workspace = workspace;
    TRY_GOTO(st, out, random_memory(b->s, b->memory, MEMORY_BYTES));
    TRY_GOTO(st, out, state_upload(b));
    TRY_GOTO(st, out, ceilings(b));
    for (size_t m = 0; m < sizeof models / sizeof *models; m++)
        for (int i = 0; i < row_count; i++) {
            TRY_GOTO(st, out,
                     random_memory(b->s, b->memory,
                                   MEMORY_BYTES)); /* after many adds nothing is as it was */
            TRY_GOTO(st, out, batch_upload(b, rows[i], batch, batch_bytes));
            TRY_GOTO(st, out, lines(b, &models[m], rows[i]));
        }
out:
    device_free(b->device, (void **)&b->report);
    device_free(b->device, (void **)&b->state);
    device_free(b->device, &b->memory);
    device_free(b->device, &batch);
    device_free(b->device, &workspace);
    return st;
}

int main(int argc, char **argv)
{
    int64_t rows[8] = {1408, 5632, 11136};
    int row_count = 3;
    struct bench b = {0};
    int first = 1;
    if (argc > 1 && strcmp(argv[1], "--heuristic") == 0) {
        b.heuristic = true;
        first = 2;
    }
    if (argc > first)
        row_count = 0;
    for (int i = first; i < argc && row_count < 8; i++) {
        rows[row_count] = strtoll(argv[i], NULL, 10);
        if (rows[row_count] < 176 || rows[row_count] > 16384) {
            out("usage: cuda_ops [--heuristic] [T...], T from 176 to 16384\n");
            return 2;
        }
        row_count++;
    }
    if (device_cuda_count() == 0) {
        out("cuda_ops: no GPU; skipped\n");
        return 0;
    }
    enum status st = device_open(&b.device, DEVICE_CUDA, PRECISION_BF16, 0, 1);
    if (st == ST_OK)
        st = run(&b, rows, row_count);
    if (st != ST_OK)
        out("cuda_ops: %s\n", status_message());
    device_close(&b.device);
    gemm_table_release(&b.plan);
    return st == ST_OK ? 0 : 1;
}
