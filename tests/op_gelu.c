/* engine/ops/gelu.h: exact GELU and its gradient. */
#include <math.h>

#include "tests/support/ops.h"

static double phi_distribution(double x)
{
    return 0.5 * erfc(-x * 0.70710678118654752440);
}

static double reference(double x)
{
    return x * phi_distribution(x);
}

static double reference_gradient(double x)
{
    return phi_distribution(x) + x * 0.39894228040143267794 * exp(-0.5 * x * x);
}

static void gelu_is_x_phi_of_x_at_any_size(void **state)
{
    struct op_test *t = *state;
    const int64_t sizes[] = {0, 1, 7, 8, 9, 1003};
    for (int k = 0; k < 6; k++) {
        int64_t n = sizes[k];
        double *x = op_random(t, n, 2.0), *dy = op_random(t, n, 1.0);
        double *want = op_zeros(t, n), *dwant = op_zeros(t, n);
        for (int64_t i = 0; i < n; i++) {
            want[i] = reference(x[i]);
            dwant[i] = dy[i] * reference_gradient(x[i]);
        }
        struct tensor pre = op_put_2d(t, x, 1, n), out = op_put_2d(t, NULL, 1, n);
        struct tensor dout = op_put_2d(t, dy, 1, n), dpre = op_put_2d(t, NULL, 1, n);
        struct tensor act = op_put_2d(t, NULL, 1, n);
        assert_ok(op_gelu_forward(t->s, out, pre));
        assert_ok(op_gelu_backward(t->s, dpre, act, op_none(), dout, pre, false));
        op_close("out", op_get(t, out), want, n, 4 * t->eps * op_largest(want, n));
        op_close("dpre", op_get(t, dpre), dwant, n, 8 * t->eps * op_largest(dwant, n));
        op_same("act", op_get(t, act), op_get(t, out), n);
        struct tensor alone = op_put_2d(t, NULL, 1, n);
        assert_ok(op_gelu_backward(t->s, alone, op_none(), op_none(), dout, pre, false));
        op_same("dpre without act", op_get(t, alone), op_get(t, dpre), n);
        assert_ok(op_gelu_backward(t->s, dout, pre, op_none(), dout, pre, false));
        op_same("in place", op_get(t, dout), op_get(t, dpre), n);
        op_same("act in place", op_get(t, pre), op_get(t, out), n);
    }
}

static void gelu_backward_sums_the_bias_gradient(void **state)
{
    struct op_test *t = *state;
    const int64_t sizes[][2] = {{0, 5}, {1, 1}, {61, 19}, {70, 72}};
    for (int k = 0; k < 4; k++) {
        int64_t T = sizes[k][0], F = sizes[k][1];
        double *x = op_random(t, T * F, 2.0), *dy = op_random(t, T * F, 1.0);
        double *want = op_zeros(t, F), *before = op_random_f32(t, F, 1.0);
        for (int64_t i = 0; i < T * F; i++)
            want[i % F] += dy[i] * reference_gradient(x[i]);
        struct tensor dbias = op_put_f32_1d(t, NULL, F), act = op_put_2d(t, NULL, T, F);
        struct tensor dpre = op_put_2d(t, NULL, T, F), dout = op_put_2d(t, dy, T, F);
        struct tensor pre = op_put_2d(t, x, T, F);
        double near = 8 * t->eps * (double)(T + 1);
        assert_ok(op_gelu_backward(t->s, dpre, act, dbias, dout, pre, false));
        op_close("dbias", op_get(t, dbias), want, F, near);
        for (int64_t c = 0; c < F; c++)
            want[c] += before[c];
        dbias = op_put_f32_1d(t, before, F);
        assert_ok(op_gelu_backward(t->s, dpre, act, dbias, dout, pre, true));
        op_close("dbias, added", op_get(t, dbias), want, F, near);
    }
}

/* Distance in units of the last place of the float nearest to @want. */
static double ulps(double got, double want)
{
    int exponent;
    frexp(want, &exponent);
    return fabs(got - want) / ldexp(1.0, exponent - 24);
}

static void gelu_error_is_below_6_ulp_to_13_standard_deviations(void **state)
{
    struct op_test *t = *state;
    enum { N = 200001 };
    if (t->dtype != DTYPE_F32)
        skip(); /* the bound is of the CPU's fp32 loops */
    double *x = op_zeros(t, N), worst = 0, dworst = 0;
    for (int i = 0; i < N; i++)
        x[i] = op_round(DTYPE_F32, -13.0 + 26.0 * i / (N - 1));
    double *one = op_zeros(t, N);
    for (int i = 0; i < N; i++)
        one[i] = 1.0;
    struct tensor pre = op_put_2d(t, x, 1, N), out = op_put_2d(t, NULL, 1, N);
    struct tensor dout = op_put_2d(t, one, 1, N);
    assert_ok(op_gelu_forward(t->s, out, pre));
    assert_ok(op_gelu_backward(t->s, dout, op_put_2d(t, NULL, 1, N), op_none(), dout, pre, false));
    double *got = op_get(t, out), *dgot = op_get(t, dout);
    for (int i = 0; i < N; i++) {
        worst = x[i] == 0 ? worst : fmax(worst, ulps(got[i], reference(x[i])));
        double want = reference_gradient(x[i]);
        dworst = fmax(dworst, fabs(dgot[i] - want) / fmax(1.0, fabs(want)) * ldexp(1.0, 24));
    }
    print_message("gelu: %.2f ulp, gradient: %.2f * 2^-24\n", worst, dworst);
    assert_true(worst < 6.0);
    assert_true(dworst < 4.0);
}

static void gelu_of_extremes(void **state)
{
    struct op_test *t = *state;
    const double values[] = {0.0, -0.0, 100.0, -100.0, 3e38, NAN, INFINITY, 20.0};
    double *x = op_zeros(t, 8);
    for (int i = 0; i < 8; i++)
        x[i] = values[i];
    struct tensor pre = op_put_1d(t, x, 8), out = op_put_1d(t, NULL, 8);
    assert_ok(op_gelu_forward(t->s, out, pre));
    double *got = op_get(t, out);
    assert_true(got[0] == 0.0 && got[1] == 0.0);
    assert_true(got[2] == 100.0 && fabs(got[3]) < 1e-30);
    assert_true(got[4] > 2.9e38);
    assert_true(isnan(got[5]));
    assert_true(isinf(got[6]));
    assert_true(got[7] == 20.0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gelu_is_x_phi_of_x_at_any_size),
        cmocka_unit_test(gelu_backward_sums_the_bias_gradient),
        cmocka_unit_test(gelu_error_is_below_6_ulp_to_13_standard_deviations),
        cmocka_unit_test(gelu_of_extremes),
    };
    return OP_TESTS_RUN(tests);
}
