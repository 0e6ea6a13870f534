/* engine/ops/lanes.h: the error of exp and the normal distribution, the order of sums. */
#include <math.h>

#include "engine/ops/lanes.h"
#include "tests/support/support.h"

static double ulps(double got, double want)
{
    int exponent;
    frexp(want, &exponent);
    return fabs(got - want) / ldexp(1.0, exponent - 24);
}

static void exp_is_within_2_ulp(void **state)
{
    (void)state;
    double worst = 0;
    for (int i = 0; i < 400000; i += LANES) {
        float x[LANES], y[LANES];
        for (int l = 0; l < LANES; l++)
            x[l] = -87.3f + (float)(i + l) * (175.3f / 400000.0f);
        lanes_store(y, exp8(lanes_load(x)));
        for (int l = 0; l < LANES; l++)
            worst = fmax(worst, ulps((double)y[l], exp((double)x[l])));
    }
    print_message("exp: %.2f ulp\n", worst);
    assert_true(worst < 2.0);
}

static void exp_at_the_ends_of_its_range(void **state)
{
    (void)state;
    const float x[LANES] = {-INFINITY, -1000.0f, -88.0f, 0.0f, -0.0f, 88.0f, NAN, 1.0f};
    float y[LANES];
    lanes_store(y, exp8(lanes_load(x)));
    assert_true(y[0] == 0.0f && y[1] == 0.0f && y[2] == 0.0f);
    assert_true(y[3] == 1.0f && y[4] == 1.0f);
    assert_true(isfinite(y[5]) && isnan(y[6]));
}

static void normal_distribution_is_within_5_ulp(void **state)
{
    (void)state;
    double worst = 0, density = 0;
    for (int i = 0; i < 260000; i += LANES) {
        float x[LANES], p[LANES], d[LANES];
        f32x8 distribution8, density8;
        for (int l = 0; l < LANES; l++)
            x[l] = -13.0f + (float)(i + l) * 1e-4f;
        normal8(&distribution8, &density8, lanes_load(x));
        lanes_store(p, distribution8);
        lanes_store(d, density8);
        for (int l = 0; l < LANES; l++) {
            double at = (double)x[l];
            worst = fmax(worst, ulps((double)p[l], 0.5 * erfc(-at * 0.70710678118654752440)));
            density =
                fmax(density, ulps((double)d[l], 0.39894228040143267794 * exp(-0.5 * at * at)));
        }
    }
    print_message("Phi: %.2f ulp, phi: %.2f ulp\n", worst, density);
    assert_true(worst < 5.0);
    assert_true(density < 4.0);
}

static void folding_has_one_order(void **state)
{
    (void)state;
    const float x[LANES] = {1e8f, 1.0f, -1e8f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
    float want = ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
    assert_true(lanes_fold(lanes_load(x)) == want);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exp_is_within_2_ulp),
        cmocka_unit_test(exp_at_the_ends_of_its_range),
        cmocka_unit_test(normal_distribution_is_within_5_ulp),
        cmocka_unit_test(folding_has_one_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
