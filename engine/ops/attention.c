#include "engine/ops/attention.h"

#include <cblas.h>
#include <math.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/ops/columns.h"
#include "engine/ops/dropout.h"
#include "engine/ops/lanes.h"
#include "engine/ops/pieces.h"

/* Score matrices of one head, rows ld floats apart. */
struct scratch {
    float *probability; /* (n, m) */
    float *gradient;    /* (n, m) first the dropped probabilities, then dP and dS */
    float *factor;      /* (n, m) dropout factors */
};

/* One head of one sequence. */
struct head {
    int rows, keys, width; /* n, m, D */
    int ld;                /* of the score matrices */
    int channels;          /* C */
    float scale;
    const float *query, *key, *value; /* rows 3 C apart */
    int64_t first_row;                /* of the sequence */
    int64_t first_element;            /* of dropout: h P P */
    int64_t positions;                /* P */
    int32_t sample;
};

static void scratch_bind(struct arena *a, struct scratch *x, int64_t length)
{
    int64_t numel = length * round_up(length, LANES);
    ARENA_BIND(a, x->probability, numel);
    ARENA_BIND(a, x->gradient, numel);
    ARENA_BIND(a, x->factor, numel);
}

static size_t scratch_bytes(int64_t length)
{
    struct arena a = {0};
    struct scratch x;
    scratch_bind(&a, &x, length);
    return a.used;
}

size_t attention_workspace_bytes_cpu(const struct op_limits *limits, int threads)
{
    return scratch_bytes(limits->max_length) * (size_t)threads;
}

static struct scratch scratch_of(struct stream *s, int64_t length, int worker)
{
    size_t bytes = scratch_bytes(length), at = bytes * (size_t)worker;
    ASSERT(s->workspace != NULL && at + bytes <= s->workspace_bytes);
    struct arena a = arena_over((char *)s->workspace + at, bytes);
    struct scratch x;
    scratch_bind(&a, &x, length);
    return x;
}

static struct head head_of(struct tensor qkv, const struct sequences *q, int32_t b, int h,
                           int heads)
{
    struct head x;
    x.rows = q->cu_seqlens[b + 1] - q->cu_seqlens[b];
    x.keys = q->kv_len[b];
    ASSERT(x.rows >= 0 && x.rows <= q->max_length);
    ASSERT(x.keys >= 0 && x.keys <= x.rows);
    x.channels = (int)(qkv.shape[1] / 3);
    x.width = x.channels / heads;
    x.ld = (int)round_up(x.keys, LANES);
    x.scale = 1.0f / sqrtf((float)x.width);
    x.first_row = q->cu_seqlens[b];
    x.query = (const float *)qkv.data + x.first_row * qkv.shape[1] + (int64_t)h * x.width;
    x.key = x.query + x.channels;
    x.value = x.key + x.channels;
    x.positions = q->positions;
    x.first_element = h * x.positions * x.positions;
    x.sample = q->sample[b];
    return x;
}

/* ---- one row of scores ---------------------------------------------------------------------- */

LANES_INLINE float row_max(const float *x, int64_t n)
{
    f32x8 m = lanes_set(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        f32x8 v = lanes_load(x + i);
        m = lanes_select(v > m, v, m);
    }
    if (i < n) {
        f32x8 v = lanes_load_tail(x + i, n - i, -INFINITY);
        m = lanes_select(v > m, v, m);
    }
    float most = m[0];
    for (int l = 1; l < LANES; l++)
        most = m[l] > most ? m[l] : most;
    return most;
}

/* x = softmax(x); returns log sum exp. */
CPU_CLONES static float row_softmax(float *x, int64_t n)
{
    float most = row_max(x, n);
    f32x8 a[4] = {{0}, {0}, {0}, {0}};
    int64_t i = 0;
    for (; i + LANES_BLOCK <= n; i += LANES_BLOCK)
        for (int k = 0; k < 4; k++) {
            f32x8 e = exp8(lanes_load(x + i + k * LANES) - most);
            lanes_store(x + i + k * LANES, e);
            a[k] += e;
        }
    for (int k = 0; i < n; i += LANES, k++) {
        int64_t rest = n - i < LANES ? n - i : LANES;
        f32x8 e = exp8(lanes_load_tail(x + i, rest, -INFINITY) - most);
        lanes_store_tail(x + i, e, rest);
        a[k] += e;
    }
    float sum = lanes_fold4(a), inverse = 1.0f / sum;
    for (i = 0; i < n; i++)
        x[i] *= inverse;
    return most + logf(sum);
}

/* x = exp(x - lse) */
CPU_CLONES static void row_probabilities(float *x, int64_t n, float lse)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        lanes_store(x + i, exp8(lanes_load(x + i) - lse));
    if (i < n)
        lanes_store_tail(x + i, exp8(lanes_load_tail(x + i, n - i, lse) - lse), n - i);
}

/* dx = p * (dx * factor - delta); factor NULL: 1. */
CPU_CLONES static void row_score_gradient(float *dx, const float *p, const float *factor, int64_t n,
                                          float delta)
{
    if (factor)
        for (int64_t i = 0; i < n; i++)
            dx[i] = p[i] * (dx[i] * factor[i] - delta);
    else
        for (int64_t i = 0; i < n; i++)
            dx[i] = p[i] * (dx[i] - delta);
}

CPU_CLONES static float row_dot(const float *x, const float *y, int64_t n)
{
    f32x8 a[4] = {{0}, {0}, {0}, {0}};
    int64_t i = 0;
    for (; i + LANES_BLOCK <= n; i += LANES_BLOCK)
        for (int k = 0; k < 4; k++)
            a[k] += lanes_load(x + i + k * LANES) * lanes_load(y + i + k * LANES);
    for (int k = 0; i < n; i += LANES, k++)
        a[k] += lanes_load_tail(x + i, n - i, 0.0f) * lanes_load_tail(y + i, n - i, 0.0f);
    return lanes_fold4(a);
}

/* Factors of query row @i. */
static void row_factors(float *out, const struct dropout_key *key, const struct head *x, int i)
{
    dropout_factors(out, key, x->sample, x->first_element + i * x->positions, x->keys);
}

/* ---- forward -------------------------------------------------------------------------------- */

static void scores(float *out, const struct head *x)
{
    int ld = 3 * x->channels;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, x->rows, x->keys, x->width, x->scale,
                x->query, ld, x->key, ld, 0.0f, out, x->ld);
}

static void head_forward(float *out, float *lse, const struct head *x,
                         const struct dropout_key *key, struct scratch *scratch)
{
    scores(scratch->probability, x);
    for (int i = 0; i < x->rows; i++) {
        float *p = scratch->probability + (int64_t)i * x->ld;
        lse[i] = row_softmax(p, x->keys);
        if (key->on) {
            row_factors(scratch->factor, key, x, i);
            dropout_multiply(p, p, scratch->factor, x->keys);
        }
    }
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, x->rows, x->width, x->keys, 1.0f,
                scratch->probability, x->ld, x->value, 3 * x->channels, 0.0f, out, x->channels);
}

static void rows_zero(struct tensor x, int64_t first, int64_t end)
{
    int64_t columns = x.shape[1];
    memset((float *)x.data + first * columns, 0, (size_t)((end - first) * columns) * sizeof(float));
}

/* Zero the rows that no head writes: those of no sequence, and of sequences without keys. */
static void unwritten_zero(struct tensor x, const struct sequences *q)
{
    for (int32_t b = 0; b < q->count; b++)
        if (q->kv_len[b] == 0)
            rows_zero(x, q->cu_seqlens[b], q->cu_seqlens[b + 1]);
    rows_zero(x, q->cu_seqlens[q->count], q->rows);
}

/* An op on all heads of all sequences: those of a sequence without keys are left out. */
struct heads {
    struct stream *s;
    const struct sequences *q;
    int heads;
    struct dropout_key key;
    struct tensor qkv, out, lse, dout, dqkv; /* backward has all */
};

static struct head nth_head(const struct heads *a, int64_t n)
{
    return head_of(a->qkv, a->q, (int32_t)(n / a->heads), (int)(n % a->heads), a->heads);
}

/* A head is a piece; small batches are one piece. */
static void heads_run(struct heads *a,
                      void (*body)(void *context, int64_t first, int64_t end, int worker))
{
    int64_t n = (int64_t)a->q->count * a->heads, pairs = a->q->rows * a->q->max_length;
    pieces_run(a->s, body, a, n, n > 0 && pairs * a->heads < PIECE_NUMEL ? n : 1);
}

static void heads_forward(void *context, int64_t first, int64_t end, int worker)
{
    const struct heads *a = context;
    struct scratch scratch = scratch_of(a->s, a->q->max_length, worker);
    for (int64_t n = first; n < end; n++) {
        struct head x = nth_head(a, n);
        int h = (int)(n % a->heads);
        if (x.keys > 0)
            head_forward((float *)a->out.data + x.first_row * x.channels + (int64_t)h * x.width,
                         (float *)a->lse.data + h * a->q->rows + x.first_row, &x, &a->key,
                         &scratch);
    }
}

enum status attention_forward_cpu(struct stream *s, struct tensor out, struct tensor lse,
                                  struct tensor qkv, const struct sequences *q, int heads,
                                  struct dropout drop)
{
    if (q->rows == 0)
        return ST_OK;
    struct heads a = {.s = s,
                      .q = q,
                      .heads = heads,
                      .key = dropout_key(drop),
                      .qkv = qkv,
                      .out = out,
                      .lse = lse};
    memset(lse.data, 0, tensor_bytes(lse));
    unwritten_zero(out, q);
    heads_run(&a, heads_forward);
    return ST_OK;
}

/* ---- backward ------------------------------------------------------------------------------- */

/* Fill scratch: probability P, gradient mask P / (1 - p) (or nothing without dropout). */
static void probabilities(const float *lse, const struct head *x, const struct dropout_key *key,
                          struct scratch *scratch)
{
    scores(scratch->probability, x);
    for (int i = 0; i < x->rows; i++) {
        int64_t at = (int64_t)i * x->ld;
        row_probabilities(scratch->probability + at, x->keys, lse[i]);
        if (key->on) {
            row_factors(scratch->factor + at, key, x, i);
            dropout_multiply(scratch->gradient + at, scratch->probability + at,
                             scratch->factor + at, x->keys);
        }
    }
}

static void head_backward(float *dquery, const float *dout, const float *out, const float *lse,
                          const struct head *x, const struct dropout_key *key,
                          struct scratch *scratch)
{
    int ld = 3 * x->channels;
    float *dkey = dquery + x->channels, *dvalue = dkey + x->channels;
    probabilities(lse, x, key, scratch);
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, x->keys, x->width, x->rows, 1.0f,
                key->on ? scratch->gradient : scratch->probability, x->ld, dout, x->channels, 0.0f,
                dvalue, ld);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, x->rows, x->keys, x->width, 1.0f, dout,
                x->channels, x->value, ld, 0.0f, scratch->gradient, x->ld);
    for (int i = 0; i < x->rows; i++) {
        int64_t at = (int64_t)i * x->ld, row = (int64_t)i * x->channels;
        row_score_gradient(scratch->gradient + at, scratch->probability + at,
                           key->on ? scratch->factor + at : NULL, x->keys,
                           row_dot(dout + row, out + row, x->width));
    }
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, x->rows, x->width, x->keys, x->scale,
                scratch->gradient, x->ld, x->key, ld, 0.0f, dquery, ld);
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, x->keys, x->width, x->rows, x->scale,
                scratch->gradient, x->ld, x->query, ld, 0.0f, dkey, ld);
    for (int i = x->keys; i < x->rows; i++) { /* rows that are no keys */
        memset(dkey + (int64_t)i * ld, 0, (size_t)x->width * sizeof *dkey);
        memset(dvalue + (int64_t)i * ld, 0, (size_t)x->width * sizeof *dvalue);
    }
}

static void heads_backward(void *context, int64_t first, int64_t end, int worker)
{
    const struct heads *a = context;
    struct scratch scratch = scratch_of(a->s, a->q->max_length, worker);
    for (int64_t n = first; n < end; n++) {
        struct head x = nth_head(a, n);
        int64_t h = n % a->heads, at = x.first_row * x.channels + h * x.width;
        if (x.keys > 0)
            head_backward((float *)a->dqkv.data + 3 * x.first_row * x.channels + h * x.width,
                          (const float *)a->dout.data + at, (const float *)a->out.data + at,
                          (const float *)a->lse.data + h * a->q->rows + x.first_row, &x, &a->key,
                          &scratch);
    }
}

enum status attention_backward_cpu(struct stream *s, struct tensor dqkv, struct tensor dbias,
                                   struct tensor dout, struct tensor out, struct tensor lse,
                                   struct tensor qkv, const struct sequences *q, int heads,
                                   struct dropout drop, bool add)
{
    struct heads a = {.s = s,
                      .q = q,
                      .heads = heads,
                      .key = dropout_key(drop),
                      .qkv = qkv,
                      .out = out,
                      .lse = lse,
                      .dout = dout,
                      .dqkv = dqkv};
    if (q->rows > 0) {
        unwritten_zero(dqkv, q);
        heads_run(&a, heads_backward);
    }
    if (dbias.data)
        columns_sum_cpu(s, dbias.data, dqkv.data, q->rows, dqkv.shape[1], add);
    return ST_OK;
}
