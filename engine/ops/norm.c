#include "engine/ops/norm.h"

#include <math.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/ops/dropout.h"
#include "engine/ops/lanes.h"

enum { BLOCK_ROWS = 32 }; /* of the sums over rows: their error is that of 32 + T / 32 terms */

struct scratch {
    float *factor;         /* (C) dropout factors of a row */
    float *dy;             /* (C) gradient of a row before dropout */
    float *dgamma, *dbeta; /* (C) of the current block of rows */
};

static void scratch_bind(struct arena *a, struct scratch *x, int64_t channels)
{
    ARENA_BIND(a, x->factor, channels);
    ARENA_BIND(a, x->dy, channels);
    ARENA_BIND(a, x->dgamma, channels);
    ARENA_BIND(a, x->dbeta, channels);
}

size_t norm_workspace_bytes_cpu(const struct op_limits *limits)
{
    struct arena a = {0};
    struct scratch x;
    scratch_bind(&a, &x, limits->channels);
    return a.used;
}

static struct scratch scratch_of(struct stream *s, int64_t channels)
{
    ASSERT(s->workspace != NULL);
    struct arena a = arena_over(s->workspace, s->workspace_bytes);
    struct scratch x;
    scratch_bind(&a, &x, channels);
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

CPU_CLONES static void row_multiply(float *out, const float *x, const float *factor, int64_t n)
{
    for (int64_t c = 0; c < n; c++)
        out[c] = x[c] * factor[c];
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

/* ---- sums over rows ------------------------------------------------------------------------- */

static void gradient_begin(struct tensor dgamma, struct tensor dbeta, bool add)
{
    if (dgamma.data && !add)
        memset(dgamma.data, 0, tensor_bytes(dgamma));
    if (dbeta.data && !add)
        memset(dbeta.data, 0, tensor_bytes(dbeta));
}

/* At the end of each block of rows and of the tensor: add the block's sums, start a new block. */
static void gradient_row_done(struct tensor dgamma, struct tensor dbeta, struct scratch *x,
                              int64_t t, int64_t rows, int64_t channels)
{
    if ((t + 1) % BLOCK_ROWS != 0 && t + 1 != rows)
        return;
    if (dgamma.data)
        row_add(dgamma.data, dgamma.data, x->dgamma, channels);
    if (dbeta.data)
        row_add(dbeta.data, dbeta.data, x->dbeta, channels);
    row_zero(x->dgamma, channels);
    row_zero(x->dbeta, channels);
}

/* ---- embeddings ----------------------------------------------------------------------------- */

enum status embedding_norm_forward_cpu(struct stream *s, struct tensor out, struct tensor z,
                                       struct tensor stats, struct tensor x, struct tensor position,
                                       struct tensor type, struct tensor gamma, struct tensor beta,
                                       const struct sequences *q, float eps, struct dropout drop)
{
    int64_t rows = q->rows, channels = x.shape[1];
    struct scratch scratch = scratch_of(s, channels);
    struct dropout_key key = dropout_key(drop);
    float *mean = stats.data, *r = mean + rows;
    for (int64_t t = 0; t < rows; t++) {
        float *out_t = (float *)out.data + t * channels, *z_t = (float *)z.data + t * channels;
        if (q->row_sequence[t] < 0) {
            row_zero(out_t, channels);
            row_zero(z_t, channels);
            mean[t] = r[t] = 0.0f;
            continue;
        }
        int64_t i = position_of(q, t);
        DASSERT(i < position.shape[0]);
        row_add(z_t, (const float *)x.data + t * channels,
                (const float *)position.data + i * channels, channels);
        if (type.data) {
            DASSERT(q->token_type[t] >= 0 && q->token_type[t] < type.shape[0]);
            row_add(z_t, z_t, (const float *)type.data + q->token_type[t] * channels, channels);
        }
        row_norm(out_t, &mean[t], &r[t], z_t, gamma.data, beta.data, channels, eps);
        if (key.on) {
            row_factors(scratch.factor, &key, q, t, channels);
            row_multiply(out_t, out_t, scratch.factor, channels);
        }
    }
    return ST_OK;
}

/* Rows of one position, or of one type, in row order. */
static void table_gradients(struct tensor dposition, struct tensor dtype_table, struct tensor dx,
                            const struct sequences *q, bool add)
{
    int64_t channels = dx.shape[1];
    if (dposition.data && !add)
        memset(dposition.data, 0, tensor_bytes(dposition));
    if (dtype_table.data && !add)
        memset(dtype_table.data, 0, tensor_bytes(dtype_table));
    for (int64_t t = 0; t < q->rows; t++) {
        const float *from = (const float *)dx.data + t * channels;
        if (q->row_sequence[t] < 0)
            continue;
        if (dposition.data) {
            float *to = (float *)dposition.data + position_of(q, t) * channels;
            row_add(to, to, from, channels);
        }
        if (dtype_table.data) {
            float *to = (float *)dtype_table.data + q->token_type[t] * channels;
            row_add(to, to, from, channels);
        }
    }
}

enum status embedding_norm_backward_cpu(struct stream *s, struct tensor dx, struct tensor dposition,
                                        struct tensor dtype_table, struct tensor dgamma,
                                        struct tensor dbeta, struct tensor dout, struct tensor z,
                                        struct tensor stats, struct tensor gamma,
                                        const struct sequences *q, struct dropout drop, bool add)
{
    int64_t rows = q->rows, channels = dx.shape[1];
    struct scratch scratch = scratch_of(s, channels);
    struct dropout_key key = dropout_key(drop);
    const float *mean = stats.data, *r = mean + rows;
    gradient_begin(dgamma, dbeta, add);
    row_zero(scratch.dgamma, channels);
    row_zero(scratch.dbeta, channels);
    for (int64_t t = 0; t < rows; t++) {
        float *dx_t = (float *)dx.data + t * channels;
        const float *dy = (const float *)dout.data + t * channels;
        if (q->row_sequence[t] < 0) {
            row_zero(dx_t, channels);
        } else {
            if (key.on) {
                row_factors(scratch.factor, &key, q, t, channels);
                row_multiply(scratch.dy, dy, scratch.factor, channels);
                dy = scratch.dy;
            }
            row_norm_gradient(dx_t, scratch.dgamma, scratch.dbeta, dy,
                              (const float *)z.data + t * channels, gamma.data, mean[t], r[t],
                              channels);
        }
        gradient_row_done(dgamma, dbeta, &scratch, t, rows, channels);
    }
    table_gradients(dposition, dtype_table, dx, q, add);
    return ST_OK;
}

/* ---- residual ------------------------------------------------------------------------------- */

enum status residual_norm_forward_cpu(struct stream *s, struct tensor out, struct tensor z,
                                      struct tensor stats, struct tensor x, struct tensor y,
                                      struct tensor gamma, struct tensor beta,
                                      const struct sequences *q, float eps, struct dropout drop)
{
    int64_t rows = q->rows, channels = x.shape[1];
    struct scratch scratch = scratch_of(s, channels);
    struct dropout_key key = dropout_key(drop);
    float *mean = stats.data, *r = mean + rows;
    for (int64_t t = 0; t < rows; t++) {
        float *out_t = (float *)out.data + t * channels, *z_t = (float *)z.data + t * channels;
        const float *x_t = (const float *)x.data + t * channels;
        const float *y_t = (const float *)y.data + t * channels;
        if (q->row_sequence[t] < 0) {
            row_zero(out_t, channels);
            row_zero(z_t, channels);
            mean[t] = r[t] = 0.0f;
            continue;
        }
        if (key.on) {
            row_factors(scratch.factor, &key, q, t, channels);
            row_add_scaled(z_t, x_t, y_t, scratch.factor, channels);
        } else {
            row_add(z_t, x_t, y_t, channels);
        }
        row_norm(out_t, &mean[t], &r[t], z_t, gamma.data, beta.data, channels, eps);
    }
    return ST_OK;
}

enum status residual_norm_backward_cpu(struct stream *s, struct tensor dx, struct tensor dy,
                                       struct tensor dgamma, struct tensor dbeta,
                                       struct tensor dout, struct tensor z, struct tensor stats,
                                       struct tensor gamma, const struct sequences *q,
                                       struct dropout drop, bool add)
{
    int64_t rows = q->rows, channels = dx.shape[1];
    struct scratch scratch = scratch_of(s, channels);
    struct dropout_key key = dropout_key(drop);
    const float *mean = stats.data, *r = mean + rows;
    gradient_begin(dgamma, dbeta, add);
    row_zero(scratch.dgamma, channels);
    row_zero(scratch.dbeta, channels);
    for (int64_t t = 0; t < rows; t++) {
        float *dx_t = (float *)dx.data + t * channels, *dy_t = (float *)dy.data + t * channels;
        if (q->row_sequence[t] < 0) {
            row_zero(dx_t, channels);
            row_zero(dy_t, channels);
        } else {
            row_norm_gradient(
                dx_t, scratch.dgamma, scratch.dbeta, (const float *)dout.data + t * channels,
                (const float *)z.data + t * channels, gamma.data, mean[t], r[t], channels);
            if (key.on) {
                row_factors(scratch.factor, &key, q, t, channels);
                row_multiply(dy_t, dx_t, scratch.factor, channels);
            } else if (dy_t != dx_t) {
                memcpy(dy_t, dx_t, (size_t)channels * sizeof *dy_t);
            }
        }
        gradient_row_done(dgamma, dbeta, &scratch, t, rows, channels);
    }
    return ST_OK;
}
