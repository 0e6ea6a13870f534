#include "engine/base/rng.h"

#include <math.h>
#include <string.h>

#include "tests/support/support.h"

static void philox_gives_the_published_known_answers(void **state)
{
    (void)state;
    /* The philox4x32-7 and -10 vectors of the Random123 distribution: counter, key, results. */
    static const struct {
        uint32_t c[4];
        uint64_t key;
        uint32_t seven[4], ten[4];
    } cases[] = {
        {{0, 0, 0, 0},
         0,
         {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48},
         {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         0xffffffffffffffff,
         {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         0x299f31d0a4093822,
         {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const uint32_t *c = cases[i].c;
        struct philox r = philox4x32(cases[i].key, c[0], c[1], c[2], c[3]);
        assert_memory_equal(r.word, cases[i].ten, sizeof r.word);
        r = philox4x32_rounds(7, cases[i].key, c[0], c[1], c[2], c[3]);
        assert_memory_equal(r.word, cases[i].seven, sizeof r.word);
    }
}

static void lanes_are_15_bits_of_low_and_high_halves_in_word_order(void **state)
{
    (void)state;
    struct philox r = {{0x11110000, 0x33332222, 0xd555c444, 0xffff6666}};
    static const uint32_t want[8] = {0x0000, 0x1111, 0x2222, 0x3333,
                                     0x4444, 0x5555, 0x6666, 0x7fff};
    for (int i = 0; i < 8; i++)
        assert_int_equal(dropout_lane(r, i), want[i]);
}

static void dropout_thresholds_round_to_the_nearest_lane(void **state)
{
    (void)state;
    assert_int_equal(dropout_threshold(0.0f), 0);
    assert_int_equal(dropout_threshold(0.1f), 3277); /* 3276.8 */
    assert_int_equal(dropout_threshold(0.5f), 16384);
    assert_int_equal(dropout_threshold(nextafterf(1.0f, 0.0f)), 32767);
}

/* The factors of all lanes add to their number: what is kept is scaled to the exact expectation. */
static void dropout_scales_to_the_exact_expectation(void **state)
{
    (void)state;
    for (int i = 0; i <= 1000; i++) {
        uint32_t threshold = dropout_threshold((float)i / 1001.0f);
        double sum = (32768.0 - threshold) * (double)dropout_scale(threshold);
        assert_true(fabs(sum - 32768.0) <= 32768.0 * 0x1p-24);
    }
}

/* Pearson's statistic of all 32768 lanes, and of neighbours' decisions, of counters in order. */
static void dropout_lanes_are_even_and_neighbours_independent(void **state)
{
    (void)state;
    enum { CALLS = 1 << 19, LANES = DROPOUT_LANE + 1 };
    static uint32_t count[LANES];
    uint32_t threshold = dropout_threshold(0.1f), last = 0;
    double both = 0, dropped = 0, n = 8.0 * CALLS;
    for (uint32_t call = 0; call < CALLS; call++) {
        struct philox r = philox4x32_rounds(7, 42, 7, 3 << 8, call >> 12, call & 0xFFF);
        for (int i = 0; i < 8; i++) {
            uint32_t lane = dropout_lane(r, i), drop = lane < threshold;
            count[lane]++;
            dropped += drop;
            both += drop & last;
            last = drop;
        }
    }
    double square = 0, expected = n / LANES, p = threshold / 32768.0;
    for (int i = 0; i < LANES; i++)
        square += (count[i] - expected) * (count[i] - expected) / expected;
    /* Five standard deviations: chi-square of k degrees has mean k and variance 2 k. */
    assert_true(fabs(square - (LANES - 1)) < 5 * sqrt(2.0 * LANES));
    assert_true(fabs(dropped - n * p) < 5 * sqrt(n * p * (1 - p)));
    assert_true(fabs(both - n * p * p) < 5 * sqrt(n * p * p * (1 - p * p) + 2 * n * p * p * p));
}

static void name_keys_are_fnv_1a(void **state)
{
    (void)state;
    /* From the FNV reference: the empty text, "a" and "foobar". */
    assert_true(rng_name_key("") == 0xcbf29ce484222325u);
    assert_true(rng_name_key("a") == 0xaf63dc4c8601ec8cu);
    assert_true(rng_name_key("foobar") == 0x85944171f73967e8u);
}

enum { WHOLE = 1003 };

static void any_range_of_a_tensor_equals_that_part_of_the_whole(void **state)
{
    (void)state;
    static float whole[WHOLE], part[WHOLE + 1];
    uint64_t random = test_seed(), key = rng_name_key("bert.encoder.layer.0.weight");
    rng_fill_normal(whole, 0, WHOLE, 7, key, 0.02f);
    for (int round = 0; round < 500; round++) {
        int64_t first = (int64_t)(test_random(&random) % WHOLE);
        int64_t count = (int64_t)(test_random(&random) % (uint64_t)(WHOLE - first + 1));
        part[count] = 123.0f;
        rng_fill_normal(part, first, count, 7, key, 0.02f);
        assert_memory_equal(part, whole + first, (size_t)count * sizeof(float));
        assert_true(part[count] == 123.0f);
    }
}

static void elements_beyond_32_bits_of_quads_differ(void **state)
{
    (void)state;
    float low[8], high[8];
    rng_fill_normal(low, 0, 8, 1, 2, 1.0f);
    rng_fill_normal(high, INT64_C(4) << 32, 8, 1, 2, 1.0f);
    assert_memory_not_equal(low, high, sizeof low);
}

static void another_seed_or_name_gives_other_values(void **state)
{
    (void)state;
    float a[16], b[16], c[16];
    rng_fill_normal(a, 0, 16, 1, rng_name_key("x"), 1.0f);
    rng_fill_normal(b, 0, 16, 2, rng_name_key("x"), 1.0f);
    rng_fill_normal(c, 0, 16, 1, rng_name_key("y"), 1.0f);
    assert_memory_not_equal(a, b, sizeof a);
    assert_memory_not_equal(a, c, sizeof a);
}

/* Box and Muller as they are written, with the C library. */
static void library_pair(float *x, float *y, uint32_t a, uint32_t b, float stddev)
{
    const double two_pi = 6.283185307179586;
    double u = (a + 1.0) / 4294967296.0, v = (b + 1.0) / 4294967296.0;
    double radius = sqrt(-2.0 * log(u));
    *x = (float)(radius * cos(two_pi * v) * (double)stddev);
    *y = (float)(radius * sin(two_pi * v) * (double)stddev);
}

static void assert_pairs_are_the_librarys(const uint32_t *a, const uint32_t *b, int count,
                                          float stddev)
{
    enum { MOST = 4096 };
    static float x[MOST + 1], y[MOST + 1];
    assert_in_range(count, 0, MOST);
    x[count] = y[count] = 123.0f;
    rng_normal_pairs(x, y, a, b, count, stddev);
    for (int i = 0; i < count; i++) {
        float want_x, want_y;
        library_pair(&want_x, &want_y, a[i], b[i], stddev);
        if (memcmp(&x[i], &want_x, sizeof want_x) != 0 || memcmp(&y[i], &want_y, sizeof want_y))
            fail_msg("words %08x %08x: %a and %a, the library gives %a and %a", a[i], b[i],
                     (double)x[i], (double)y[i], (double)want_x, (double)want_y);
    }
    assert_true(x[count] == 123.0f && y[count] == 123.0f);
}

static void normals_are_the_librarys_to_the_bit(void **state)
{
    (void)state;
    enum { N = 4096, ROUNDS = 256 };
    static uint32_t a[N], b[N];
    static const float deviations[] = {0.02f, 1.0f, 0.0441941738f, 3e-39f, 0.0f};
    uint64_t random = test_seed();
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < N; i++) {
            uint64_t r = test_random(&random);
            a[i] = (uint32_t)r;
            b[i] = (uint32_t)(r >> 32);
        }
        assert_pairs_are_the_librarys(a, b, round % 2 ? N : N - 1 - round, deviations[round % 5]);
    }
}

/* Where logarithms vanish and angles meet the axes and the borders of the octants. */
static void normals_of_borders_are_the_librarys_to_the_bit(void **state)
{
    (void)state;
    enum { NEAR = 16, BORDERS = 17 };
    static uint32_t a[BORDERS * 2 * NEAR], b[BORDERS * 2 * NEAR];
    uint64_t random = test_seed();
    for (int kind = 0; kind < 2; kind++) {
        int n = 0;
        for (int i = 0; i < BORDERS; i++)
            for (int k = -NEAR; k < NEAR; k++, n++) {
                uint32_t near = ((uint32_t)i << 28) + (uint32_t)k,
                         any = (uint32_t)test_random(&random);
                a[n] = kind == 0 ? near : any;
                b[n] = kind == 0 ? any : near;
            }
        assert_pairs_are_the_librarys(a, b, n, 1.0f);
        for (int i = 0; i < n; i++) /* both at a border */
            a[i] = b[n - 1 - i] = (uint32_t)-1 - (uint32_t)i / NEAR;
        assert_pairs_are_the_librarys(a, b, n, 0.02f);
    }
}

static void normals_have_the_moments_of_a_normal(void **state)
{
    (void)state;
    enum { N = 400000 };
    static float x[N];
    const double s = 0.5;
    double sum[5] = {0};
    double neighbours = 0.0;
    int beyond_two = 0;
    rng_fill_normal(x, 0, N, 42, rng_name_key("moments"), (float)s);
    for (int i = 0; i < N; i++) {
        double z = (double)x[i] / s, power = 1.0;
        assert_true(isfinite(x[i]));
        for (int k = 1; k < 5; k++)
            sum[k] += power *= z;
        neighbours += z * ((double)x[(i + 1) % N] / s);
        beyond_two += fabs(z) > 2.0;
    }
    /* Five standard errors of each estimate: variances of z, z^2, z^3, z^4 are 1, 2, 15, 96. */
    double five = 5.0 / sqrt((double)N);
    assert_true(fabs(sum[1] / N) < five);
    assert_true(fabs(sum[2] / N - 1.0) < five * sqrt(2.0));
    assert_true(fabs(sum[3] / N) < five * sqrt(15.0));
    assert_true(fabs(sum[4] / N - 3.0) < five * sqrt(96.0));
    assert_true(fabs(neighbours / N) < five);
    assert_true(fabs((double)beyond_two / N - 0.0455003) < five * sqrt(0.0455 * 0.9545));
}

static void rng_below_stays_below_and_is_even(void **state)
{
    (void)state;
    enum { N = 7, DRAWS = 70000 };
    int counts[N] = {0};
    for (uint64_t i = 0; i < DRAWS; i++) {
        uint64_t v = rng_below(3, 4, i, N);
        assert_true(v < N);
        counts[v]++;
    }
    for (int i = 0; i < N; i++) /* five standard deviations of a binomial(70000, 1/7) */
        assert_in_range(counts[i], 10000 - 463, 10000 + 463);
    assert_true(rng_below(3, 4, 5, 1) == 0);
    assert_true(rng_below(3, 4, 5, UINT64_MAX) < UINT64_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(philox_gives_the_published_known_answers),
        cmocka_unit_test(lanes_are_15_bits_of_low_and_high_halves_in_word_order),
        cmocka_unit_test(dropout_thresholds_round_to_the_nearest_lane),
        cmocka_unit_test(dropout_scales_to_the_exact_expectation),
        cmocka_unit_test(dropout_lanes_are_even_and_neighbours_independent),
        cmocka_unit_test(name_keys_are_fnv_1a),
        cmocka_unit_test(any_range_of_a_tensor_equals_that_part_of_the_whole),
        cmocka_unit_test(elements_beyond_32_bits_of_quads_differ),
        cmocka_unit_test(another_seed_or_name_gives_other_values),
        cmocka_unit_test(normals_are_the_librarys_to_the_bit),
        cmocka_unit_test(normals_of_borders_are_the_librarys_to_the_bit),
        cmocka_unit_test(normals_have_the_moments_of_a_normal),
        cmocka_unit_test(rng_below_stays_below_and_is_even),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
