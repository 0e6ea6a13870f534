/* engine/ops/dropout.h: dropout as an op of its own, against the factors straight from Philox. */
#include "tests/support/ops.h"

static const float P = 0.3f;

static double *reference(struct op_test *t, const struct op_batch *b, const double *x, int64_t C,
                         float p)
{
    double *out = op_zeros(t, b->host.rows * C);
    for (int64_t i = 0; i < b->host.rows * C; i++) {
        int32_t s = b->host.row_sequence[i / C];
        if (s < 0)
            continue;
        int64_t position = i / C - b->host.cu_seqlens[s];
        out[i] = x[i] * op_dropout_factor(p, SITE_HEAD, b->host.sample[s], position * C + i % C);
    }
    return out;
}

/* Widths around a vector, a group of eight and what the CPU does at once. */
static void dropout_scales_what_it_keeps_at_any_width(void **state)
{
    struct op_test *t = *state;
    const int64_t widths[] = {1, 7, 8, 19, 24, 64, 131};
    for (int k = 0; k < 14; k++) {
        int64_t C = widths[k / 2];
        float p = k % 2 == 0 ? 0.0f : P;
        struct op_batch b;
        op_mixed_batch(t, &b);
        int64_t T = b.host.rows;
        double *x = op_random(t, T * C, 1.0), *want = reference(t, &b, x, C, p);
        struct tensor in = op_put_2d(t, x, T, C), out = op_put_2d(t, NULL, T, C);
        assert_ok(op_dropout_apply(t->s, out, in, &b.q, op_dropout(t, p, SITE_HEAD)));
        op_close("out", op_get(t, out), want, T * C, 2 * t->eps * op_largest(want, T * C));
        assert_ok(op_dropout_apply(t->s, in, in, &b.q, op_dropout(t, p, SITE_HEAD)));
        op_same("in place", op_get(t, in), op_get(t, out), T * C);
    }
}

static void a_wide_row_is_done_in_pieces(void **state)
{
    struct op_test *t = *state;
    enum { C = 1553 };
    struct op_batch b;
    op_mixed_batch(t, &b);
    int64_t T = b.host.rows;
    double *x = op_random(t, T * C, 1.0), *want = reference(t, &b, x, C, P);
    struct tensor out = op_put_2d(t, NULL, T, C);
    assert_ok(
        op_dropout_apply(t->s, out, op_put_2d(t, x, T, C), &b.q, op_dropout(t, P, SITE_HEAD)));
    op_close("out", op_get(t, out), want, T * C, 2 * t->eps * op_largest(want, T * C));
}

static void no_rows_and_evaluation_are_fine(void **state)
{
    struct op_test *t = *state;
    enum { C = 19 };
    struct op_batch b;
    struct step_state evaluation = {.host = {.training = 0}};
    struct dropout drop = op_dropout(t, P, SITE_HEAD);
    op_empty_batch(t, &b);
    struct tensor none = op_put_2d(t, NULL, 0, C);
    assert_ok(op_dropout_apply(t->s, none, none, &b.q, drop));
    op_mixed_batch(t, &b);
    int64_t T = b.host.rows;
    double *x = op_random(t, T * C, 1.0);
    struct tensor out = op_put_2d(t, NULL, T, C);
    drop.state = op_upload(t, &evaluation, sizeof evaluation);
    assert_ok(op_dropout_apply(t->s, out, op_put_2d(t, x, T, C), &b.q, drop));
    op_same("evaluation", op_get(t, out), reference(t, &b, x, C, 0.0f), T * C);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dropout_scales_what_it_keeps_at_any_width),
        cmocka_unit_test(a_wide_row_is_done_in_pieces),
        cmocka_unit_test(no_rows_and_evaluation_are_fine),
    };
    return OP_TESTS_RUN(tests);
}
