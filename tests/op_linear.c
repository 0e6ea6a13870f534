/* engine/ops/linear.h: the three GEMMs and the bias. */
#include <math.h>

#include "tests/support/ops.h"

struct sizes {
    int64_t rows, in, out;
};

static const struct sizes cases[] = {{1, 1, 1}, {5, 3, 7}, {33, 17, 130}, {70, 64, 65}, {0, 5, 3}};
enum { CASES = sizeof cases / sizeof cases[0] };

/* c (m, n) = op(a) op(b) with inner size k; @ta: a is (k, m); @tb: b is (n, k). */
static double *product(struct op_test *t, const double *a, bool ta, const double *b, bool tb,
                       int64_t m, int64_t n, int64_t k)
{
    double *c = op_zeros(t, m * n);
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++)
            for (int64_t l = 0; l < k; l++)
                c[i * n + j] +=
                    (ta ? a[l * m + i] : a[i * k + l]) * (tb ? b[j * k + l] : b[l * n + j]);
    return c;
}

/* Any order of summation of k products of values near one stays within this. */
static double tolerance(const struct op_test *t, int64_t k, const double *want, int64_t n)
{
    return ((double)k * ldexp(1.0, -24) * 4.0 + 2.0 * t->eps) * fmax(op_largest(want, n), 1.0);
}

static void forward_is_x_wt_plus_bias(void **state)
{
    struct op_test *t = *state;
    for (int c = 0; c < CASES; c++) {
        int64_t T = cases[c].rows, K = cases[c].in, N = cases[c].out;
        double *x = op_random(t, T * K, 1.0), *w = op_random(t, N * K, 1.0);
        double *bias = op_random(t, N, 1.0), *want = product(t, x, false, w, true, T, N, K);
        struct tensor y = op_put_2d(t, NULL, T, N), dx = op_put_2d(t, x, T, K);
        struct tensor dw = op_put_2d(t, w, N, K);
        assert_ok(op_linear_forward(t->s, y, dx, dw, op_none()));
        op_close("y", op_get(t, y), want, T * N, tolerance(t, K, want, T * N));
        for (int64_t i = 0; i < T * N; i++)
            want[i] += bias[i % N];
        assert_ok(op_linear_forward(t->s, y, dx, dw, op_put_1d(t, bias, N)));
        op_close("y with bias", op_get(t, y), want, T * N, tolerance(t, K, want, T * N));
    }
}

static void backward_data_sets_and_adds(void **state)
{
    struct op_test *t = *state;
    for (int c = 0; c < CASES; c++) {
        int64_t T = cases[c].rows, K = cases[c].in, N = cases[c].out;
        double *dy = op_random(t, T * N, 1.0), *w = op_random(t, N * K, 1.0);
        double *before = op_random(t, T * K, 1.0);
        double *want = product(t, dy, false, w, false, T, K, N);
        struct tensor dx = op_put_2d(t, NULL, T, K), sum = op_put_2d(t, before, T, K);
        struct tensor ddy = op_put_2d(t, dy, T, N), dw = op_put_2d(t, w, N, K);
        assert_ok(op_linear_backward_data(t->s, dx, ddy, dw, false));
        op_close("dx", op_get(t, dx), want, T * K, tolerance(t, N, want, T * K));
        for (int64_t i = 0; i < T * K; i++)
            want[i] += before[i];
        assert_ok(op_linear_backward_data(t->s, sum, ddy, dw, true));
        op_close("dx added", op_get(t, sum), want, T * K, tolerance(t, N, want, T * K));
    }
}

static void b25_backward_weight_sets_and_adds_also_without_rows(void **state)
{
    struct op_test *t = *state;
    for (int c = 0; c < CASES; c++) {
        int64_t T = cases[c].rows, K = cases[c].in, N = cases[c].out;
        double *dy = op_random(t, T * N, 1.0), *x = op_random(t, T * K, 1.0);
        double *before = op_random_f32(t, N * K, 1.0);
        double *want = product(t, dy, true, x, false, N, K, T);
        double near = tolerance(t, T, want, N * K);
        struct tensor dw = op_put_f32_2d(t, NULL, N, K), sum = op_put_f32_2d(t, before, N, K);
        struct tensor ddy = op_put_2d(t, dy, T, N), dx = op_put_2d(t, x, T, K);
        assert_ok(op_linear_backward_weight(t->s, dw, ddy, dx, false));
        op_close("dw", op_get(t, dw), want, N * K, near);
        for (int64_t i = 0; i < N * K; i++)
            want[i] += before[i];
        assert_ok(op_linear_backward_weight(t->s, sum, ddy, dx, true));
        op_close("dw added", op_get(t, sum), want, N * K, near + 1e-6);
    }
}

static void a_frozen_weight_is_left_out(void **state)
{
    struct op_test *t = *state;
    double *dy = op_random(t, 6, 1.0), *x = op_random(t, 10, 1.0);
    struct tensor ddy = op_put_2d(t, dy, 2, 3), dx = op_put_2d(t, x, 2, 5);
    assert_ok(op_linear_backward_weight(t->s, op_none(), ddy, dx, false));
    assert_ok(op_linear_backward_weight(t->s, op_none(), ddy, dx, true));
}

static void equal_inputs_give_equal_bits(void **state)
{
    struct op_test *t = *state;
    enum { T = 70, K = 64, N = 65 };
    struct tensor x = op_put_2d(t, op_random(t, T * K, 1.0), T, K);
    struct tensor dy = op_put_2d(t, op_random(t, T * N, 1.0), T, N);
    struct tensor w = op_put_2d(t, op_random(t, N * K, 1.0), N, K);
    struct tensor a[3], b[3], *pass[] = {a, b};
    for (int i = 0; i < 2; i++) {
        struct tensor *out = pass[i];
        out[0] = op_put_2d(t, NULL, T, N);
        out[1] = op_put_2d(t, NULL, T, K);
        out[2] = op_put_f32_2d(t, NULL, N, K);
        assert_ok(op_linear_forward(t->s, out[0], x, w, op_none()));
        assert_ok(op_linear_backward_data(t->s, out[1], dy, w, false));
        assert_ok(op_linear_backward_weight(t->s, out[2], dy, x, false));
    }
    for (int i = 0; i < 3; i++)
        op_same("bits", op_get(t, a[i]), op_get(t, b[i]), tensor_numel(a[i]));
}

static void overlapping_tensors(void *argument)
{
    struct op_test *t = argument;
    struct tensor x = op_put_2d(t, NULL, 4, 4), w = op_put_2d(t, NULL, 4, 4);
    (void)!op_linear_forward(t->s, x, x, w, op_none());
}

static void wrong_shape(void *argument)
{
    struct op_test *t = argument;
    struct tensor x = op_put_2d(t, NULL, 4, 4), w = op_put_2d(t, NULL, 4, 4);
    (void)!op_linear_forward(t->s, op_put_2d(t, NULL, 4, 5), x, w, op_none());
}

static void the_front_refuses_aliases_and_wrong_shapes(void **state)
{
    struct op_test *t = *state;
    if (t->device->compute != &ops_cpu)
        skip(); /* a forked child cannot use the GPU; the front is the same */
    assert_aborts(overlapping_tensors, t);
    assert_aborts(wrong_shape, t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forward_is_x_wt_plus_bias),
        cmocka_unit_test(backward_data_sets_and_adds),
        cmocka_unit_test(b25_backward_weight_sets_and_adds_also_without_rows),
        cmocka_unit_test(a_frozen_weight_is_left_out),
        cmocka_unit_test(equal_inputs_give_equal_bits),
        cmocka_unit_test(the_front_refuses_aliases_and_wrong_shapes),
    };
    return OP_TESTS_RUN(tests);
}
