/* engine/ops/attention.h: packed attention against double; dropout masks; padding. */
#include <math.h>
#include <string.h>

#include "tests/support/ops.h"

enum { H = 2, D = 6, C = H * D };
static const float P = 0.25f;

struct problem {
    const struct sequences *q;
    double *qkv;
    const double *dout;
    double *out, *lse;
    float p;
};

/* One head of one sequence, as the formula stands. */
static void reference_head(struct problem *w, int32_t b, int h)
{
    const struct sequences *q = w->q;
    int64_t first = q->cu_seqlens[b], n = q->cu_seqlens[b + 1] - first, m = q->kv_len[b];
    for (int64_t i = 0; i < n && m > 0; i++) {
        const double *query = w->qkv + (first + i) * 3 * C + h * D;
        double score[128], sum = 0, *out = w->out + (first + i) * C + h * D;
        for (int64_t j = 0; j < m; j++) {
            const double *key = w->qkv + (first + j) * 3 * C + C + h * D;
            score[j] = 0;
            for (int d = 0; d < D; d++)
                score[j] += query[d] * key[d] / sqrt((double)D);
            sum += exp(score[j]);
        }
        w->lse[h * q->rows + first + i] = log(sum);
        memset(out, 0, D * sizeof *out);
        for (int64_t j = 0; j < m; j++) {
            const double *value = w->qkv + (first + j) * 3 * C + 2 * C + h * D;
            double p = exp(score[j]) / sum *
                       op_dropout_factor(w->p, SITE_ATTENTION, q->sample[b],
                                         (h * q->positions + i) * q->positions + j);
            for (int d = 0; d < D; d++)
                out[d] += p * value[d];
        }
    }
}

static void reference(struct problem *w)
{
    for (int32_t b = 0; b < w->q->count; b++)
        for (int h = 0; h < H; h++)
            reference_head(w, b, h);
}

static double loss(void *context)
{
    struct problem *w = context;
    double sum = 0;
    reference(w);
    for (int64_t i = 0; i < w->q->rows * C; i++)
        sum += w->out[i] * w->dout[i];
    return sum;
}

static struct problem make(struct op_test *t, const struct op_batch *b, float p)
{
    int64_t T = b->host.rows;
    struct problem w = {.q = &b->host, .p = p};
    w.qkv = op_random(t, T * 3 * C, 1.0);
    w.dout = op_random(t, T * C, 1.0);
    w.out = op_zeros(t, T * C);
    w.lse = op_zeros(t, H * T);
    return w;
}

static void check_forward(struct op_test *t, float p)
{
    struct op_batch b;
    op_mixed_batch(t, &b);
    int64_t T = b.host.rows;
    struct problem w = make(t, &b, p);
    reference(&w);
    struct tensor qkv = op_put_2d(t, w.qkv, T, 3 * C), out = op_put_2d(t, NULL, T, C);
    struct tensor again = op_put_2d(t, NULL, T, C), lse = op_put_f32_2d(t, NULL, H, T);
    struct dropout drop = op_dropout(t, p, SITE_ATTENTION);
    assert_ok(op_attention_forward(t->s, out, lse, qkv, &b.q, H, drop));
    assert_ok(op_attention_forward(t->s, again, lse, qkv, &b.q, H, drop));
    op_close("out", op_get(t, out), w.out, T * C, 16 * t->eps * op_largest(w.out, T * C));
    op_close("lse", op_get(t, lse), w.lse, H * T, 16 * 6e-8 * op_largest(w.lse, H * T));
    op_same("bits", op_get(t, again), op_get(t, out), T * C);
}

static void forward_of_packed_padded_and_empty_sequences(void **state)
{
    check_forward(*state, 0.0f);
    check_forward(*state, P);
}

static void check_backward(struct op_test *t, float p)
{
    struct op_batch b;
    op_mixed_batch(t, &b);
    int64_t T = b.host.rows;
    struct problem w = make(t, &b, p);
    double *want = op_zeros(t, T * 3 * C);
    op_numeric_gradient(want, w.qkv, T * 3 * C, loss, &w);
    reference(&w);
    struct tensor qkv = op_put_2d(t, w.qkv, T, 3 * C), out = op_put_2d(t, w.out, T, C);
    struct tensor lse = op_put_f32_2d(t, w.lse, H, T), dout = op_put_2d(t, w.dout, T, C);
    struct tensor dqkv = op_put_2d(t, NULL, T, 3 * C), again = op_put_2d(t, NULL, T, 3 * C);
    struct dropout drop = op_dropout(t, p, SITE_ATTENTION);
    double *before = op_random_f32(t, 3 * C, 1.0), *total = op_zeros(t, 3 * C);
    struct tensor dbias = op_put_f32_1d(t, NULL, 3 * C), added = op_put_f32_1d(t, before, 3 * C);
    assert_ok(op_attention_backward(t->s, dqkv, dbias, dout, out, lse, qkv, &b.q, H, drop, false));
    assert_ok(op_attention_backward(t->s, again, added, dout, out, lse, qkv, &b.q, H, drop, true));
    double *got = op_get(t, dqkv);
    op_close("dqkv", got, want, T * 3 * C, 64 * t->eps * op_largest(want, T * 3 * C));
    op_same("bits", op_get(t, again), got, T * 3 * C);
    for (int64_t i = 0; i < T * 3 * C; i++)
        total[i % (3 * C)] += got[i];
    op_close("dbias", op_get(t, dbias), total, 3 * C, 16 * 6e-8 * op_largest(want, T * 3 * C));
    for (int c = 0; c < 3 * C; c++)
        total[c] = (double)(float)(before[c] + op_get(t, dbias)[c]);
    op_same("dbias added", op_get(t, added), total, 3 * C);
    for (int64_t i = 56 * 3 * C; i < T * 3 * C; i++)
        assert_true(got[i] == 0.0);              /* rows of no sequence */
    for (int64_t row = 39 + 11; row < 56; row++) /* rows of the padded sequence that are no keys */
        for (int c = C; c < 3 * C; c++)
            assert_true(got[row * 3 * C + c] == 0.0);
}

static void backward_is_the_gradient_of_forward(void **state)
{
    check_backward(*state, 0.0f);
    check_backward(*state, P);
}

/* With q = k = 0 and v the identity, out row i is the row i of the mask, times 1 / m. */
static double *mask_rows(struct op_test *t, const int *lengths, int count, int first_sample)
{
    struct op_batch b;
    struct op_batch_spec spec = {.lengths = lengths,
                                 .count = count,
                                 .positions = 48,
                                 .vocab = 5,
                                 .types = 1,
                                 .first_sample = first_sample};
    enum { WIDTH = 48 };
    for (int i = 0; i < count; i++)
        spec.rows += lengths[i];
    op_batch_make(t, &b, &spec);
    int64_t T = spec.rows;
    double *x = op_zeros(t, T * 3 * WIDTH);
    for (int64_t r = 0; r < T; r++)
        x[r * 3 * WIDTH + 2 * WIDTH + (r - b.host.cu_seqlens[b.host.row_sequence[r]])] = 1.0;
    struct tensor out = op_put_2d(t, NULL, T, WIDTH), lse = op_put_f32_2d(t, NULL, 1, T);
    assert_ok(op_attention_forward(t->s, out, lse, op_put_2d(t, x, T, 3 * WIDTH), &b.q, 1,
                                   op_dropout(t, P, SITE_ATTENTION)));
    return op_get(t, out);
}

static void masks_follow_the_sample_not_the_packing(void **state)
{
    struct op_test *t = *state;
    const int alone[] = {41}, packed[] = {7, 13, 41};
    double *a = mask_rows(t, alone, 1, 12), *b = mask_rows(t, packed, 3, 10);
    int64_t kept = 0, n = 41 * 41;
    op_same("mask", b + 20 * 48, a, 41 * 48);
    for (int64_t i = 0; i < 41; i++)
        for (int64_t j = 0; j < 41; j++) {
            double direct = op_dropout_factor(P, SITE_ATTENTION, 12, i * 48 + j);
            assert_int_equal(a[i * 48 + j] != 0.0, direct != 0.0);
            kept += direct != 0.0;
        }
    double sigma = sqrt((double)n * (double)P * (1.0 - (double)P));
    assert_true(fabs((double)kept - (double)n * (1.0 - (double)P)) < 5.0 * sigma);
}

static void large_scores_do_not_overflow(void **state)
{
    struct op_test *t = *state;
    struct op_batch b;
    op_mixed_batch(t, &b);
    int64_t T = b.host.rows;
    double *x = op_random(t, T * 3 * C, 1.0);
    for (int64_t i = 0; i < T * 3 * C; i++)
        x[i] = op_round(t->dtype, x[i] * (i % (3 * C) < 2 * C ? 100.0 : 1.0));
    struct tensor out = op_put_2d(t, NULL, T, C), lse = op_put_f32_2d(t, NULL, H, T);
    assert_ok(op_attention_forward(t->s, out, lse, op_put_2d(t, x, T, 3 * C), &b.q, H,
                                   op_dropout(t, 0.0f, SITE_ATTENTION)));
    double *got = op_get(t, out), most = op_largest(x, 0);
    for (int64_t i = 0; i < T * 3 * C; i++)
        if (i % (3 * C) >= 2 * C)
            most = fmax(most, fabs(x[i]));
    for (int64_t i = 0; i < T * C; i++)
        assert_true(fabs(got[i]) <= most * (1 + 4 * t->eps));
}

/* softmax over two keys with scores 0 and x: measures exp over its range. */
static void softmax_error_is_a_few_ulp(void **state)
{
    struct op_test *t = *state;
    struct op_batch b;
    static const int lengths[] = {2};
    struct op_batch_spec spec = {
        .lengths = lengths, .count = 1, .rows = 2, .positions = 2, .vocab = 2, .types = 1};
    if (t->dtype != DTYPE_F32)
        skip();
    op_batch_make(t, &b, &spec);
    double worst = 0;
    for (double x = 0.0; x < 80.0; x += 0.37) {
        float score = (float)-x;
        double qkv[2][3] = {{1.0, 0.0, 0.0}, {1.0, (double)score, 1.0}}; /* D = 1 */
        struct tensor out = op_put_2d(t, NULL, 2, 1), lse = op_put_f32_2d(t, NULL, 1, 2);
        assert_ok(op_attention_forward(t->s, out, lse, op_put_2d(t, qkv[0], 2, 3), &b.q, 1,
                                       op_dropout(t, 0.0f, SITE_ATTENTION)));
        double want = exp((double)score) / (1.0 + exp((double)score));
        worst = fmax(worst, fabs(op_get(t, out)[0] - want) / want * ldexp(1.0, 24));
    }
    print_message("softmax: %.2f * 2^-24 relative\n", worst);
    assert_true(worst < 5.0);
}

static void b25_no_rows(void **state)
{
    struct op_test *t = *state;
    struct op_batch b;
    op_empty_batch(t, &b);
    struct tensor qkv = op_put_2d(t, NULL, 0, 3 * C), out = op_put_2d(t, NULL, 0, C);
    struct tensor lse = op_put_f32_2d(t, NULL, H, 0);
    struct dropout drop = op_dropout(t, P, SITE_ATTENTION);
    assert_ok(op_attention_forward(t->s, out, lse, qkv, &b.q, H, drop));
    double *before = op_random_f32(t, 3 * C, 1.0);
    struct tensor dbias = op_put_f32_1d(t, NULL, 3 * C), added = op_put_f32_1d(t, before, 3 * C);
    assert_ok(op_attention_backward(t->s, qkv, dbias, out, out, lse, qkv, &b.q, H, drop, false));
    assert_ok(op_attention_backward(t->s, qkv, added, out, out, lse, qkv, &b.q, H, drop, true));
    op_same("dbias", op_get(t, dbias), op_zeros(t, 3 * C), 3 * C);
    op_same("dbias added", op_get(t, added), before, 3 * C);
    struct tensor none = {0};
    assert_ok(op_attention_backward(t->s, qkv, none, out, out, lse, qkv, &b.q, H, drop, false));
}

/* Of 130 rows in two sequences five tiles of queries, of 100 keys two tiles: 512 bytes each. */
static void masks_have_room_where_a_backend_keeps_them(void **state)
{
    (void)state;
    assert_int_equal(op_attention_mask_bytes(DTYPE_BF16, 64, 3, 130, 2, 100), 3 * 5 * 2 * 512);
    assert_int_equal(op_attention_mask_bytes(DTYPE_BF16, 32, 3, 0, 0, 64), 3 * 512);
    assert_int_equal(op_attention_mask_bytes(DTYPE_BF16, 128, 3, 130, 2, 100), 0);
    assert_int_equal(op_attention_mask_bytes(DTYPE_F32, 64, 3, 130, 2, 100), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forward_of_packed_padded_and_empty_sequences),
        cmocka_unit_test(backward_is_the_gradient_of_forward),
        cmocka_unit_test(masks_follow_the_sample_not_the_packing),
        cmocka_unit_test(masks_have_room_where_a_backend_keeps_them),
        cmocka_unit_test(large_scores_do_not_overflow),
        cmocka_unit_test(softmax_error_is_a_few_ulp),
        cmocka_unit_test(b25_no_rows),
    };
    return OP_TESTS_RUN(tests);
}
