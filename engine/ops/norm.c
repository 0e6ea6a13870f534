#include "engine/ops/norm.h"

#include <math.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/ops/columns.h"
#include "engine/ops/dropout.h"
#include "engine/ops/lanes.h"
#include "engine/ops/pieces.h"

enum { BLOCK_ROWS = 32 }; /* of the sums over rows: their error is that of 32 + T / 32 terms */

struct scratch {
    float *factor; /* (C) dropout factors of a row; its own in each thread */
    float *dy;     /* (C) gradient of a row before dropout; likewise */
    float *sums;   /* (blocks, 2, C) dgamma and dbeta of each block of rows */
};

static int64_t block_count(int64_t rows)
{
    return (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
}

static void scratch_bind(struct arena *a, struct scratch *x, int64_t rows, int64_t channels,
                         int threads)
{
    ARENA_BIND(a, x->factor, threads * channels);
    ARENA_BIND(a, x->dy, threads * channels);
    ARENA_BIND(a, x->sums, block_count(rows) * 2 * channels);
}

size_t norm_workspace_bytes_cpu(const struct op_limits *limits, int threads)
{
    struct arena a = {0};
    struct scratch x;
    scratch_bind(&a, &x, limits->rows, limits->channels, threads);
    return a.used;
}

static struct scratch scratch_of(struct stream *s, int64_t rows, int64_t channels)
{
    ASSERT(s->workspace != NULL);
    struct arena a = arena_over(s->workspace, s->workspace_bytes);
    struct scratch x;
    scratch_bind(&a, &x, rows, channels, s->device->threads);
    return x;
}

static int64_t position_of(const struct sequences *q, int64_t t)
{
    return t - q->cu_seqlens[q->row_sequence[t]];
}

/* ---- one row -------------------------------------------------------------------------------- */

/* sum of (x - shift), or of its square */
LANES_INLINE float row_moment(const float *x, int64_t n, float shift, bool square)
{
    f32x8 a[4] = {{0}, {0}, {0}, {0}};
    int64_t i = 0;
    for (; i + LANES_BLOCK <= n; i += LANES_BLOCK)
        for (int k = 0; k < 4; k++) {
            f32x8 v = lanes_load(x + i + k * LANES) - shift;
            a[k] += square ? v * v : v;
        }
    for (int k = 0; i < n; i += LANES, k++) {
        f32x8 v = lanes_load_tail(x + i, n - i, shift) - shift;
        a[k] += square ? v * v : v;
    }
    return lanes_fold4(a);
}

CPU_CLONES static void row_norm(float *out, float *mean, float *r, const float *z,
                                const float *gamma, const float *beta, int64_t n, float eps)
{
    float m = row_moment(z, n, 0.0f, false) / (float)n;
    float variance = row_moment(z, n, m, true) / (float)n;
    float scale = 1.0f / sqrtf(variance + eps);
    for (int64_t c = 0; c < n; c++)
        out[c] = (z[c] - m) * scale * gamma[c] + beta[c];
    *mean = m;
    *r = scale;
}

/* Sums of g = gamma dy and of g xhat over the row. */
LANES_INLINE void row_gradient_sums(float *sum_g, float *sum_gx, const float *dy, const float *z,
                                    const float *gamma, float mean, float r, int64_t n)
{
    f32x8 a[4] = {{0}, {0}, {0}, {0}}, b[4] = {{0}, {0}, {0}, {0}};
    int64_t i = 0;
    for (; i + LANES_BLOCK <= n; i += LANES_BLOCK)
        for (int k = 0; k < 4; k++) {
            f32x8 g = lanes_load(dy + i + k * LANES) * lanes_load(gamma + i + k * LANES);
            a[k] += g;
            b[k] += g * ((lanes_load(z + i + k * LANES) - mean) * r);
        }
    for (int k = 0; i < n; i += LANES, k++) {
        f32x8 g = lanes_load_tail(dy + i, n - i, 0.0f) * lanes_load_tail(gamma + i, n - i, 0.0f);
        a[k] += g;
        b[k] += g * ((lanes_load_tail(z + i, n - i, mean) - mean) * r);
    }
    *sum_g = lanes_fold4(a);
    *sum_gx = lanes_fold4(b);
}

/* dx may be dy. */
CPU_CLONES static void row_norm_gradient(float *dx, float *dgamma, float *dbeta, const float *dy,
                                         const float *z, const float *gamma, float mean, float r,
                                         int64_t n)
{
    float sum_g, sum_gx;
    row_gradient_sums(&sum_g, &sum_gx, dy, z, gamma, mean, r, n);
    float mean_g = sum_g / (float)n, mean_gx = sum_gx / (float)n;
    for (int64_t c = 0; c < n; c++) {
        float xhat = (z[c] - mean) * r, g = dy[c];
        dgamma[c] += g * xhat;
        dbeta[c] += g;
        dx[c] = r * (g * gamma[c] - mean_g - xhat * mean_gx);
    }
}

CPU_CLONES static void row_add(float *out, const float *x, const float *y, int64_t n)
{
    for (int64_t c = 0; c < n; c++)
        out[c] = x[c] + y[c];
}

/* out = x + factor * y */
CPU_CLONES static void row_add_scaled(float *out, const float *x, const float *y,
                                      const float *factor, int64_t n)
{
    for (int64_t c = 0; c < n; c++)
        out[c] = x[c] + factor[c] * y[c];
}

static void row_zero(float *out, int64_t n)
{
    memset(out, 0, (size_t)n * sizeof *out);
}

/* Factors of row @t, element = position * C + c. */
static void row_factors(float *out, const struct dropout_key *key, const struct sequences *q,
                        int64_t t, int64_t channels)
{
    dropout_factors(out, key, q->sample[q->row_sequence[t]], position_of(q, t) * channels,
                    channels);
}

/* ---- all rows ------------------------------------------------------------------------------- */

/* What the four ops have; each uses what it needs. */
struct norm {
    const struct sequences *q;
    int64_t channels;
    struct dropout_key key;
    struct scratch scratch;
    float eps;
    float *out, *z, *mean, *r; /* forward */
    const float *x, *y, *gamma, *beta;
    struct tensor position, type;
    float *dx, *dy; /* backward */
    const float *dout;
};

static void norm_rows(struct stream *s,
                      void (*body)(void *context, int64_t first, int64_t end, int worker),
                      struct norm *k)
{
    pieces_run(s, body, k, k->q->rows, pieces_grain(k->channels));
}

/* A block of rows begins: its sums, which are behind each other in one row of the scratch. */
static float *block_sums(const struct norm *k, int64_t t)
{
    float *sums = k->scratch.sums + t / BLOCK_ROWS * 2 * k->channels;
    if (t % BLOCK_ROWS == 0)
        row_zero(sums, 2 * k->channels);
    return sums;
}

/* The blocks' sums in row order. */
static void add_blocks(struct tensor to, const struct norm *k, int64_t offset, bool add)
{
    if (to.data == NULL)
        return;
    if (!add)
        memset(to.data, 0, tensor_bytes(to));
    for (int64_t i = 0; i < block_count(k->q->rows); i++)
        row_add(to.data, to.data, k->scratch.sums + i * 2 * k->channels + offset, k->channels);
}

static void parameter_gradients(struct tensor dgamma, struct tensor dbeta, const struct norm *k,
                                bool add)
{
    add_blocks(dgamma, k, 0, add);
    add_blocks(dbeta, k, k->channels, add);
}

/* ---- embeddings ----------------------------------------------------------------------------- */

static void embedding_sum(float *z, const struct norm *k, int64_t t)
{
    const struct sequences *q = k->q;
    int64_t i = position_of(q, t), channels = k->channels;
    DASSERT(i < k->position.shape[0]);
    row_add(z, k->x + t * channels, (const float *)k->position.data + i * channels, channels);
    if (k->type.data) {
        DASSERT(q->token_type[t] >= 0 && q->token_type[t] < k->type.shape[0]);
        row_add(z, z, (const float *)k->type.data + q->token_type[t] * channels, channels);
    }
}

static void embedding_forward_rows(void *context, int64_t first, int64_t end, int worker)
{
    const struct norm *k = context;
    int64_t channels = k->channels;
    float *factor = k->scratch.factor + worker * channels;
    for (int64_t t = first; t < end; t++) {
        float *out = k->out + t * channels, *z = k->z + t * channels;
        if (k->q->row_sequence[t] < 0) {
            row_zero(out, channels);
            row_zero(z, channels);
            k->mean[t] = k->r[t] = 0.0f;
            continue;
        }
        embedding_sum(z, k, t);
        row_norm(out, &k->mean[t], &k->r[t], z, k->gamma, k->beta, channels, k->eps);
        if (k->key.on) {
            row_factors(factor, &k->key, k->q, t, channels);
            dropout_multiply(out, out, factor, channels);
        }
    }
}

enum status embedding_norm_forward_cpu(struct stream *s, struct tensor out, struct tensor z,
                                       struct tensor stats, struct tensor x, struct tensor position,
                                       struct tensor type, struct tensor gamma, struct tensor beta,
                                       const struct sequences *q, float eps, struct dropout drop)
{
    struct norm k = {.q = q,
                     .channels = x.shape[1],
                     .key = dropout_key(drop),
                     .scratch = scratch_of(s, q->rows, x.shape[1]),
                     .eps = eps,
                     .out = out.data,
                     .z = z.data,
                     .mean = stats.data,
                     .r = (float *)stats.data + q->rows,
                     .x = x.data,
                     .gamma = gamma.data,
                     .beta = beta.data,
                     .position = position,
                     .type = type};
    norm_rows(s, embedding_forward_rows, &k);
    return ST_OK;
}

/* Rows of one position, or of one type, in row order; cut by columns. */
struct table_gradients {
    const struct sequences *q;
    float *dposition, *dtype_table;
    const float *dx;
    int64_t channels;
};

static void table_columns(void *context, int64_t first, int64_t end, int worker)
{
    const struct table_gradients *g = context;
    (void)worker;
    for (int64_t t = 0; t < g->q->rows; t++) {
        const float *from = g->dx + t * g->channels + first;
        if (g->q->row_sequence[t] < 0)
            continue;
        if (g->dposition) {
            float *to = g->dposition + position_of(g->q, t) * g->channels + first;
            row_add(to, to, from, end - first);
        }
        if (g->dtype_table) {
            float *to = g->dtype_table + g->q->token_type[t] * g->channels + first;
            row_add(to, to, from, end - first);
        }
    }
}

static void table_gradients(struct stream *s, struct tensor dposition, struct tensor dtype_table,
                            struct tensor dx, const struct sequences *q, bool add)
{
    struct table_gradients g = {q, dposition.data, dtype_table.data, dx.data, dx.shape[1]};
    if (dposition.data && !add)
        memset(dposition.data, 0, tensor_bytes(dposition));
    if (dtype_table.data && !add)
        memset(dtype_table.data, 0, tensor_bytes(dtype_table));
    pieces_run(s, table_columns, &g, g.channels, 128);
}

static void embedding_backward_rows(void *context, int64_t first, int64_t end, int worker)
{
    const struct norm *k = context;
    int64_t channels = k->channels;
    float *factor = k->scratch.factor + worker * channels;
    float *undropped = k->scratch.dy + worker * channels;
    for (int64_t t = first; t < end; t++) {
        float *dx = k->dx + t * channels, *sums = block_sums(k, t);
        const float *dy = k->dout + t * channels;
        if (k->q->row_sequence[t] < 0) {
            row_zero(dx, channels);
            continue;
        }
        if (k->key.on) {
            row_factors(factor, &k->key, k->q, t, channels);
            dropout_multiply(undropped, dy, factor, channels);
            dy = undropped;
        }
        row_norm_gradient(dx, sums, sums + channels, dy, k->z + t * channels, k->gamma, k->mean[t],
                          k->r[t], channels);
    }
}

enum status embedding_norm_backward_cpu(struct stream *s, struct tensor dx, struct tensor dposition,
                                        struct tensor dtype_table, struct tensor dgamma,
                                        struct tensor dbeta, struct tensor dout, struct tensor z,
                                        struct tensor stats, struct tensor gamma,
                                        const struct sequences *q, struct dropout drop, bool add)
{
    struct norm k = {.q = q,
                     .channels = dx.shape[1],
                     .key = dropout_key(drop),
                     .scratch = scratch_of(s, q->rows, dx.shape[1]),
                     .z = z.data,
                     .mean = stats.data,
                     .r = (float *)stats.data + q->rows,
                     .gamma = gamma.data,
                     .dx = dx.data,
                     .dout = dout.data};
    norm_rows(s, embedding_backward_rows, &k);
    parameter_gradients(dgamma, dbeta, &k, add);
    table_gradients(s, dposition, dtype_table, dx, q, add);
    return ST_OK;
}

/* ---- residual ------------------------------------------------------------------------------- */

static void residual_forward_rows(void *context, int64_t first, int64_t end, int worker)
{
    const struct norm *k = context;
    int64_t channels = k->channels;
    float *factor = k->scratch.factor + worker * channels;
    for (int64_t t = first; t < end; t++) {
        float *out = k->out + t * channels, *z = k->z + t * channels;
        const float *x = k->x + t * channels, *y = k->y + t * channels;
        if (k->q->row_sequence[t] < 0) {
            row_zero(out, channels);
            row_zero(z, channels);
            k->mean[t] = k->r[t] = 0.0f;
            continue;
        }
        if (k->key.on) {
            row_factors(factor, &k->key, k->q, t, channels);
            row_add_scaled(z, x, y, factor, channels);
        } else {
            row_add(z, x, y, channels);
        }
        row_norm(out, &k->mean[t], &k->r[t], z, k->gamma, k->beta, channels, k->eps);
    }
}

enum status residual_norm_forward_cpu(struct stream *s, struct tensor out, struct tensor z,
                                      struct tensor stats, struct tensor x, struct tensor y,
                                      struct tensor gamma, struct tensor beta,
                                      const struct sequences *q, float eps, struct dropout drop)
{
    struct norm k = {.q = q,
                     .channels = x.shape[1],
                     .key = dropout_key(drop),
                     .scratch = scratch_of(s, q->rows, x.shape[1]),
                     .eps = eps,
                     .out = out.data,
                     .z = z.data,
                     .mean = stats.data,
                     .r = (float *)stats.data + q->rows,
                     .x = x.data,
                     .y = y.data,
                     .gamma = gamma.data,
                     .beta = beta.data};
    norm_rows(s, residual_forward_rows, &k);
    return ST_OK;
}

static void residual_backward_rows(void *context, int64_t first, int64_t end, int worker)
{
    const struct norm *k = context;
    int64_t channels = k->channels;
    float *factor = k->scratch.factor + worker * channels;
    for (int64_t t = first; t < end; t++) {
        float *dx = k->dx + t * channels, *dy = k->dy + t * channels, *sums = block_sums(k, t);
        if (k->q->row_sequence[t] < 0) {
            row_zero(dx, channels);
            row_zero(dy, channels);
            continue;
        }
        row_norm_gradient(dx, sums, sums + channels, k->dout + t * channels, k->z + t * channels,
                          k->gamma, k->mean[t], k->r[t], channels);
        if (k->key.on) {
            row_factors(factor, &k->key, k->q, t, channels);
            dropout_multiply(dy, dx, factor, channels);
        } else if (dy != dx) {
            memcpy(dy, dx, (size_t)channels * sizeof *dy);
        }
    }
}

enum status residual_norm_backward_cpu(struct stream *s, struct tensor dx, struct tensor dy,
                                       struct tensor dgamma, struct tensor dbeta,
                                       struct tensor dbias, struct tensor dout, struct tensor z,
                                       struct tensor stats, struct tensor gamma,
                                       const struct sequences *q, struct dropout drop, bool add)
{
    struct norm k = {.q = q,
                     .channels = dx.shape[1],
                     .key = dropout_key(drop),
                     .scratch = scratch_of(s, q->rows, dx.shape[1]),
                     .z = z.data,
                     .mean = stats.data,
                     .r = (float *)stats.data + q->rows,
                     .gamma = gamma.data,
                     .dx = dx.data,
                     .dy = dy.data,
                     .dout = dout.data};
    norm_rows(s, residual_backward_rows, &k);
    parameter_gradients(dgamma, dbeta, &k, add);
    if (dbias.data)
        columns_sum_cpu(s, dbias.data, dy.data, q->rows, dx.shape[1], add);
    return ST_OK;
}
