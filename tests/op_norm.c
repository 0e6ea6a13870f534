/* engine/ops/norm.h: both layer normalisations against double, gradients by central differences. */
#include <math.h>
#include <string.h>

#include "tests/support/ops.h"

enum { C = 19, TYPES = 2 };
static const float EPS = 1e-12f, P = 0.1f;

/* One problem; the reference computes out and z from x, y (or tables), gamma, beta. */
struct problem {
    const struct sequences *q;
    const double *x, *y, *position, *type; /* y NULL: embeddings; type NULL: no types */
    double *z, *gamma, *beta;
    float p;
    enum dropout_site site;
    const double *dout;
    double *out, *mean, *r;
};

static double factor(const struct problem *w, int64_t t, int64_t c)
{
    int32_t b = w->q->row_sequence[t];
    int64_t position = t - w->q->cu_seqlens[b];
    return op_dropout_factor(w->p, w->site, w->q->sample[b], position * C + c);
}

static void reference_sum(struct problem *w)
{
    for (int64_t t = 0; t < w->q->rows; t++)
        for (int64_t c = 0; c < C && w->q->row_sequence[t] >= 0; c++) {
            int64_t i = t - w->q->cu_seqlens[w->q->row_sequence[t]];
            w->z[t * C + c] = w->y ? w->x[t * C + c] + factor(w, t, c) * w->y[t * C + c]
                                   : w->x[t * C + c] + w->position[i * C + c];
            if (!w->y && w->type)
                w->z[t * C + c] += w->type[w->q->token_type[t] * C + c];
        }
}

static void reference_norm(struct problem *w)
{
    for (int64_t t = 0; t < w->q->rows; t++) {
        double mean = 0, variance = 0;
        if (w->q->row_sequence[t] < 0)
            continue;
        for (int c = 0; c < C; c++)
            mean += w->z[t * C + c] / C;
        for (int c = 0; c < C; c++)
            variance += (w->z[t * C + c] - mean) * (w->z[t * C + c] - mean) / C;
        w->mean[t] = mean;
        w->r[t] = 1.0 / sqrt(variance + (double)EPS);
        for (int c = 0; c < C; c++) {
            double out = (w->z[t * C + c] - mean) * w->r[t] * w->gamma[c] + w->beta[c];
            w->out[t * C + c] = w->y ? out : out * factor(w, t, c);
        }
    }
}

/* sum of dout out; rows of no sequence have no part in it. */
static double loss(void *context)
{
    struct problem *w = context;
    double sum = 0;
    reference_norm(w);
    for (int64_t i = 0; i < w->q->rows * C; i++)
        sum += w->q->row_sequence[i / C] < 0 ? 0.0 : w->dout[i] * w->out[i];
    return sum;
}

static struct problem make(struct op_test *t, const struct op_batch *b, bool residual, float p)
{
    int64_t T = b->host.rows;
    struct problem w = {.q = &b->host, .p = p};
    w.site = residual ? SITE_FFN_OUTPUT : SITE_EMBEDDING;
    w.x = op_random(t, T * C, 1.0);
    w.y = residual ? op_random(t, T * C, 1.0) : NULL;
    w.position = op_random(t, b->host.positions * C, 1.0);
    w.type = op_random(t, TYPES * C, 1.0);
    w.gamma = op_random(t, C, 1.0);
    w.beta = op_random(t, C, 1.0);
    w.dout = op_random(t, T * C, 1.0);
    w.z = op_zeros(t, T * C);
    w.out = op_zeros(t, T * C);
    w.mean = op_zeros(t, 2 * T);
    w.r = w.mean + T;
    return w;
}

struct outputs {
    struct tensor out, z, stats;
};

static struct outputs forward(struct op_test *t, const struct op_batch *b, const struct problem *w)
{
    int64_t T = b->host.rows;
    struct outputs o = {op_put_2d(t, NULL, T, C), op_put_2d(t, w->y, T, C),
                        op_put_f32_2d(t, NULL, 2, T)};
    struct tensor gamma = op_put_1d(t, w->gamma, C), beta = op_put_1d(t, w->beta, C);
    struct dropout drop = op_dropout(t, w->p, w->site);
    if (w->y) /* z lies over y */
        assert_ok(op_residual_norm_forward(t->s, o.out, o.z, o.stats, op_put_2d(t, w->x, T, C), o.z,
                                           gamma, beta, &b->q, EPS, drop));
    else
        assert_ok(op_embedding_norm_forward(t->s, o.out, o.z, o.stats, op_put_2d(t, w->x, T, C),
                                            op_put_2d(t, w->position, b->host.positions, C),
                                            w->type ? op_put_2d(t, w->type, TYPES, C) : op_none(),
                                            gamma, beta, &b->q, EPS, drop));
    return o;
}

static void check_forward(struct op_test *t, bool residual, bool types, float p)
{
    struct op_batch b;
    op_mixed_batch(t, &b);
    int64_t T = b.host.rows;
    struct problem w = make(t, &b, residual, p);
    if (!types)
        w.type = NULL;
    reference_sum(&w);
    reference_norm(&w);
    struct outputs o = forward(t, &b, &w), again = forward(t, &b, &w);
    double near = 16 * t->eps;
    op_close("z", op_get(t, o.z), w.z, T * C, near * op_largest(w.z, T * C));
    op_close("mean", op_get(t, o.stats), w.mean, T, near * op_largest(w.z, T * C));
    op_close("r", op_get(t, o.stats) + T, w.r, T, near * op_largest(w.r, T));
    op_close("out", op_get(t, o.out), w.out, T * C, near * op_largest(w.out, T * C));
    op_same("bits", op_get(t, again.out), op_get(t, o.out), T * C);
}

static void embedding_norm_forward_with_and_without_dropout(void **state)
{
    check_forward(*state, false, true, 0.0f);
    check_forward(*state, false, true, P);
}

static void embedding_norm_forward_without_token_types(void **state)
{
    check_forward(*state, false, false, 0.0f);
    check_forward(*state, false, false, P);
}

static void residual_norm_forward_with_and_without_dropout(void **state)
{
    check_forward(*state, true, true, 0.0f);
    check_forward(*state, true, true, P);
}

/* Gradients of the loss with respect to z, gamma and beta. */
struct gradients {
    double *z, *gamma, *beta;
};

static struct gradients numeric(struct op_test *t, struct problem *w)
{
    int64_t T = w->q->rows;
    struct gradients g = {op_zeros(t, T * C), op_zeros(t, C), op_zeros(t, C)};
    op_numeric_gradient(g.z, w->z, T * C, loss, w);
    op_numeric_gradient(g.gamma, w->gamma, C, loss, w);
    op_numeric_gradient(g.beta, w->beta, C, loss, w);
    reference_norm(w);
    return g;
}

static void round_all(struct op_test *t, double *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = op_round(t->dtype, x[i]);
}

static void plus(double *x, const double *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x[i] += y[i];
}

static void check_residual_backward(struct op_test *t, float p)
{
    struct op_batch b;
    op_mixed_batch(t, &b);
    int64_t T = b.host.rows;
    struct problem w = make(t, &b, true, p);
    reference_sum(&w);
    round_all(t, w.z, T * C);
    struct gradients g = numeric(t, &w);
    double *dy = op_zeros(t, T * C), *before = op_random_f32(t, C, 1.0), *bias = op_zeros(t, C);
    for (int64_t i = 0; i < T * C; i++) {
        dy[i] = b.host.row_sequence[i / C] < 0 ? 0.0 : g.z[i] * factor(&w, i / C, i % C);
        bias[i % C] += dy[i];
    }

    struct tensor dout = op_put_2d(t, w.dout, T, C), z = op_put_2d(t, w.z, T, C);
    struct tensor stats = op_put_f32_2d(t, w.mean, 2, T), gamma = op_put_1d(t, w.gamma, C);
    struct tensor dx = op_put_2d(t, NULL, T, C), ddy = op_put_2d(t, NULL, T, C);
    struct tensor dgamma = op_put_f32_1d(t, NULL, C), dbeta = op_put_f32_1d(t, before, C);
    struct dropout drop = op_dropout(t, p, w.site);
    struct tensor dbias = op_put_f32_1d(t, NULL, C), more = op_put_f32_1d(t, before, C);
    assert_ok(op_residual_norm_backward(t->s, dx, ddy, dgamma, op_none(), dbias, dout, z, stats,
                                        gamma, &b.q, drop, false));
    double near = 32 * t->eps * op_largest(g.z, T * C);
    op_close("dx", op_get(t, dx), g.z, T * C, near);
    op_close("dy", op_get(t, ddy), dy, T * C, 2 * near);
    op_close("dgamma", op_get(t, dgamma), g.gamma, C, 61 * 1.2e-7 * 8);
    op_close("dbias", op_get(t, dbias), bias, C, 61 * 2 * near);

    /* In place, adding, with the other gradient frozen. */
    plus(g.beta, before, C);
    plus(bias, before, C);
    struct tensor over = p > 0.0f ? op_put_2d(t, NULL, T, C) : dout;
    assert_ok(op_residual_norm_backward(t->s, dout, over, op_none(), dbeta, more, dout, z, stats,
                                        gamma, &b.q, drop, true));
    op_same("in place", op_get(t, dout), op_get(t, dx), T * C);
    op_same("dy again", op_get(t, over), op_get(t, ddy), T * C);
    op_close("dbeta", op_get(t, dbeta), g.beta, C, 61 * 1.2e-7 * 8);
    op_close("dbias, added", op_get(t, more), bias, C, 61 * 2 * near);
}

static void residual_norm_backward_is_the_gradient_of_forward(void **state)
{
    check_residual_backward(*state, 0.0f);
    check_residual_backward(*state, P);
}

static void check_embedding_backward(struct op_test *t, float p, bool add)
{
    struct op_batch b;
    op_mixed_batch(t, &b);
    int64_t T = b.host.rows, positions = b.host.positions;
    struct problem w = make(t, &b, false, p);
    reference_sum(&w);
    round_all(t, w.z, T * C);
    struct gradients g = numeric(t, &w);
    double *before = op_random_f32(t, positions * C, 1.0);
    double *dposition = op_zeros(t, positions * C), *dtype = op_zeros(t, TYPES * C);
    for (int64_t i = 0; i < T * C; i++) {
        int32_t s = b.host.row_sequence[i / C];
        if (s < 0)
            continue;
        dposition[(i / C - b.host.cu_seqlens[s]) * C + i % C] += g.z[i];
        dtype[b.host.token_type[i / C] * C + i % C] += g.z[i];
    }
    if (add) {
        plus(dposition, before, positions * C);
        plus(dtype, before, TYPES * C);
        plus(g.gamma, before, C);
        plus(g.beta, before, C);
    }
    const double *start = add ? before : NULL;
    struct tensor dout = op_put_2d(t, w.dout, T, C), z = op_put_2d(t, w.z, T, C);
    struct tensor stats = op_put_f32_2d(t, w.mean, 2, T), gamma = op_put_1d(t, w.gamma, C);
    struct tensor dpos = op_put_f32_2d(t, start, positions, C);
    struct tensor dtyp = op_put_f32_2d(t, start, TYPES, C);
    struct tensor dgamma = op_put_f32_1d(t, start, C), dbeta = op_put_f32_1d(t, start, C);
    assert_ok(op_embedding_norm_backward(t->s, dout, dpos, dtyp, dgamma, dbeta, dout, z, stats,
                                         gamma, &b.q, op_dropout(t, p, w.site), add));
    double near = 32 * t->eps * op_largest(g.z, T * C);
    op_close("dx", op_get(t, dout), g.z, T * C, near);
    op_close("dposition", op_get(t, dpos), dposition, positions * C, 6 * near);
    op_close("dtype", op_get(t, dtyp), dtype, TYPES * C, 61 * near);
    op_close("dgamma", op_get(t, dgamma), g.gamma, C, 61 * 1.2e-7 * 8);
    op_close("dbeta", op_get(t, dbeta), g.beta, C, 61 * 1.2e-7 * 8);
    struct tensor frozen = op_put_2d(t, w.dout, T, C);
    assert_ok(op_embedding_norm_backward(t->s, frozen, op_none(), op_none(), op_none(), op_none(),
                                         frozen, z, stats, gamma, &b.q, op_dropout(t, p, w.site),
                                         add));
    op_same("frozen", op_get(t, frozen), op_get(t, dout), T * C);
}

static void embedding_norm_backward_is_the_gradient_of_forward(void **state)
{
    check_embedding_backward(*state, 0.0f, false);
    check_embedding_backward(*state, P, true);
}

static void large_offsets_do_not_spoil_the_variance(void **state)
{
    struct op_test *t = *state;
    struct op_batch b;
    static const int length[] = {1};
    struct op_batch_spec spec = {
        .lengths = length, .count = 1, .rows = 1, .positions = 1, .vocab = 2, .types = 1};
    if (t->dtype != DTYPE_F32)
        skip(); /* bf16 cannot hold the differences */
    op_batch_make(t, &b, &spec);
    double *x = op_zeros(t, C), *zero = op_zeros(t, C), *one = op_zeros(t, C);
    for (int c = 0; c < C; c++) {
        x[c] = 4096.0 + c;
        one[c] = 1.0;
    }
    struct tensor out = op_put_2d(t, NULL, 1, C), z = op_put_2d(t, zero, 1, C);
    assert_ok(op_residual_norm_forward(t->s, out, z, op_put_f32_2d(t, NULL, 2, 1),
                                       op_put_2d(t, x, 1, C), z, op_put_1d(t, one, C),
                                       op_put_1d(t, zero, C), &b.q, EPS, op_dropout(t, 0, 0)));
    double *got = op_get(t, out), sigma = sqrt((C * C - 1) / 12.0);
    for (int c = 0; c < C; c++)
        assert_true(fabs(got[c] - (c - C / 2) / sigma) < 1e-4);
}

static void b25_no_rows_and_evaluation_are_fine(void **state)
{
    struct op_test *t = *state;
    struct op_batch b;
    op_empty_batch(t, &b);
    struct tensor none = op_put_2d(t, NULL, 0, C), stats = op_put_f32_2d(t, NULL, 2, 0);
    struct tensor gamma = op_put_1d(t, NULL, C), dgamma = op_put_f32_1d(t, NULL, C);
    struct tensor dtable = op_put_f32_2d(t, NULL, 37, C), dbeta = op_put_f32_1d(t, NULL, C);
    struct dropout drop = op_dropout(t, P, SITE_EMBEDDING);
    assert_ok(op_residual_norm_forward(t->s, none, none, stats, none, none, gamma, gamma, &b.q, EPS,
                                       drop));
    assert_ok(op_embedding_norm_backward(t->s, none, dtable, op_none(), dgamma, dbeta, none, none,
                                         stats, gamma, &b.q, drop, false));
    op_same("dposition", op_get(t, dtable), op_zeros(t, 37 * C), 37 * C);
    op_same("dgamma", op_get(t, dgamma), op_zeros(t, C), C);
    op_same("dbeta", op_get(t, dbeta), op_zeros(t, C), C);

    /* training == 0: as without dropout, whatever p is. */
    struct step_state evaluation = {.host = {.training = 0}};
    op_mixed_batch(t, &b);
    int64_t T = b.host.rows;
    struct problem w = make(t, &b, true, 0.0f);
    struct outputs o = forward(t, &b, &w);
    struct tensor out = op_put_2d(t, NULL, T, C), z = op_put_2d(t, NULL, T, C);
    drop.state = op_upload(t, &evaluation, sizeof evaluation);
    assert_ok(op_residual_norm_forward(t->s, out, z, op_put_f32_2d(t, NULL, 2, T),
                                       op_put_2d(t, w.x, T, C), op_put_2d(t, w.y, T, C),
                                       op_put_1d(t, w.gamma, C), op_put_1d(t, w.beta, C), &b.q, EPS,
                                       drop));
    op_same("evaluation", op_get(t, out), op_get(t, o.out), T * C);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(embedding_norm_forward_with_and_without_dropout),
        cmocka_unit_test(embedding_norm_forward_without_token_types),
        cmocka_unit_test(residual_norm_forward_with_and_without_dropout),
        cmocka_unit_test(residual_norm_backward_is_the_gradient_of_forward),
        cmocka_unit_test(embedding_norm_backward_is_the_gradient_of_forward),
        cmocka_unit_test(large_offsets_do_not_spoil_the_variance),
        cmocka_unit_test(b25_no_rows_and_evaluation_are_fine),
    };
    return OP_TESTS_RUN(tests);
}
