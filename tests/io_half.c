#include "io/half.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "io/safetensors.h"
#include "tests/support/support.h"

enum { ALL = 1 << 16, DRAWS = 200000 };

static float value_of(uint16_t h, enum half_kind kind)
{
    float x;
    half_widen(&x, &h, 1, kind);
    return x;
}

static uint16_t half_of(float x, enum half_kind kind)
{
    uint16_t h;
    half_narrow(&h, &x, 1, kind);
    return h;
}

static uint32_t bits_of(float x)
{
    uint32_t word;
    memcpy(&word, &x, sizeof word);
    return word;
}

static float float_of(uint32_t word)
{
    float x;
    memcpy(&x, &word, sizeof x);
    return x;
}

/* The value in double, from its three fields. */
static double by_definition(uint16_t h, enum half_kind kind)
{
    int fraction_bits = kind == HALF_F16 ? 10 : 7, bias = kind == HALF_F16 ? 15 : 127;
    int exponent = (h & 0x7FFF) >> fraction_bits, fraction = h & ((1 << fraction_bits) - 1);
    double sign = h & 0x8000 ? -1 : 1;
    if (exponent == 2 * bias + 1)
        return fraction == 0 ? sign * (double)INFINITY : (double)NAN;
    if (exponent == 0)
        return sign * ldexp(fraction, 1 - bias - fraction_bits);
    return sign * ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
}

static void every_value_widens_by_definition_and_narrows_to_itself(void **state)
{
    (void)state;
    for (int kind = HALF_F16; kind <= HALF_BF16; kind++)
        for (int i = 0; i < ALL; i++) {
            uint16_t h = (uint16_t)i;
            float x = value_of(h, kind);
            double want = by_definition(h, kind);
            if (isnan(want)) {
                assert_true(isnan(x) && isnan(value_of(half_of(x, kind), kind)));
                assert_int_equal(half_of(x, kind) & 0x8000, h & 0x8000);
                continue;
            }
            assert_true((double)x == want);
            assert_int_equal(half_of(x, kind), h);
        }
}

/* By definition: the nearest of all finite values, the even one of two that are as near. */
static uint16_t nearest(float x, enum half_kind kind)
{
    uint16_t infinity = kind == HALF_F16 ? 0x7C00 : 0x7F80, low = 0, high = infinity;
    double size = fabs((double)x);
    while (high - low > 1) { /* by_definition(low) <= size < by_definition(high) */
        uint16_t middle = (uint16_t)((low + high) / 2);
        *(by_definition(middle, kind) <= size ? &low : &high) = middle;
    }
    double below = by_definition(low, kind), above = by_definition(high, kind);
    if (high == infinity) /* where the next value would be if the range went on */
        above = below + (below - by_definition((uint16_t)(low - 1), kind));
    double a = size - below, b = above - size;
    uint16_t chosen = a < b || (a == b && low % 2 == 0) ? low : high;
    return (uint16_t)(chosen | (signbit(x) ? 0x8000 : 0));
}

static void narrowing_rounds_to_nearest_and_ties_to_even(void **state)
{
    (void)state;
    uint64_t seed = test_seed();
    for (int kind = HALF_F16; kind <= HALF_BF16; kind++) {
        for (int i = 0; i < DRAWS; i++) {
            float x = float_of((uint32_t)test_random(&seed));
            if (kind == HALF_F16 && i % 2 == 0) /* most of all floats are far outside */
                x = ldexpf((float)(int32_t)(uint32_t)test_random(&seed), i % 48 - 56);
            if (!isnan(x) && !isinf(x))
                assert_int_equal(half_of(x, kind), nearest(x, kind));
        }
        uint16_t infinity = kind == HALF_F16 ? 0x7C00 : 0x7F80;
        for (uint16_t h = 0; h < infinity - 1; h++) { /* every tie, and its neighbours */
            float tie =
                (float)((by_definition(h, kind) + by_definition((uint16_t)(h + 1), kind)) / 2);
            for (int by = -1; by <= 1; by++) {
                float x = float_of(bits_of(tie) + (uint32_t)by);
                if (bits_of(tie) > 0)
                    assert_int_equal(half_of(x, kind), nearest(x, kind));
            }
        }
    }
}

static void what_is_too_large_is_found_and_infinities_are_not(void **state)
{
    (void)state;
    uint16_t out[4];
    const float fit[] = {65504.0f, -65519.996f, INFINITY, -INFINITY};
    assert_int_equal(half_narrow(out, fit, 4, HALF_F16), -1);
    assert_int_equal(out[0], 0x7BFF);
    assert_int_equal(out[1], 0xFBFF);
    assert_int_equal(out[2], 0x7C00);
    assert_int_equal(out[3], 0xFC00);
    const float large[] = {1.0f, 65504.0f, 65520.0f, 1e9f};
    assert_int_equal(half_narrow(out, large, 4, HALF_F16), 2);
    assert_int_equal(half_narrow(out, large, 4, HALF_BF16), -1);
    const float largest[] = {3.3895314e38f, -3.4028235e38f};
    assert_int_equal(half_narrow(out, largest, 2, HALF_BF16), 1);
}

static void model_files_are_written_rounded_and_name_what_does_not_fit(void **state)
{
    enum { NUMEL = 9001 }; /* more than two pieces */
    static float x[NUMEL], back[NUMEL];
    struct file_test *f = *state;
    uint64_t seed = test_seed();
    for (int i = 0; i < NUMEL; i++)
        x[i] = (float)(int32_t)(uint32_t)test_random(&seed) * 0x1p-31f;
    for (int kind = HALF_F16; kind <= HALF_BF16; kind++) {
        struct safetensors_writer w = {0};
        struct safetensors st = {0};
        struct safetensors_tensor t[] = {{.name = "plain", .dims = 1, .shape = {3}},
                                         {.name = "short",
                                          .dtype = kind == HALF_F16 ? "F16" : "BF16",
                                          .dims = 1,
                                          .shape = {NUMEL}}};
        assert_ok(safetensors_create(&w, f->scratch.dir, "m.safetensors", t, 2));
        assert_ok(safetensors_write_range(&w, 0, 0, 3, x));
        assert_ok(safetensors_write_range(&w, 1, 0, 17, x));
        assert_ok(safetensors_write_range(&w, 1, 17, NUMEL - 17, x + 17));
        assert_ok(safetensors_publish(&w));
        safetensors_writer_close(&w);
        assert_ok(safetensors_open(&st, scratch_path(&f->scratch, f->path, "m.safetensors")));
        assert_int_equal(st.tensors[0].bytes, 12);
        assert_int_equal(st.tensors[1].bytes, 2 * NUMEL);
        assert_ok(safetensors_read(&st, &st.tensors[0], 0, 3, back));
        assert_memory_equal(back, x, 12);
        assert_ok(safetensors_read(&st, &st.tensors[1], 0, NUMEL, back));
        for (int i = 0; i < NUMEL; i++)
            assert_true(back[i] == value_of(half_of(x[i], kind), kind));
        safetensors_close(&st);
    }
    struct safetensors_writer w = {0};
    struct safetensors_tensor t = {.name = "norm", .dtype = "F16", .dims = 1, .shape = {NUMEL}};
    x[8200] = -70000.0f;
    assert_ok(safetensors_create(&w, f->scratch.dir, "n.safetensors", &t, 1));
    assert_fails(safetensors_write_range(&w, 0, 0, NUMEL, x), ST_INVALID,
                 "tensor norm, element 8200: -70000 is beyond the largest F16, 65504");
    safetensors_writer_close(&w);
    assert_int_equal(scratch_count(&f->scratch), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_value_widens_by_definition_and_narrows_to_itself),
        cmocka_unit_test(narrowing_rounds_to_nearest_and_ties_to_even),
        cmocka_unit_test(what_is_too_large_is_found_and_infinities_are_not),
        cmocka_unit_test_setup_teardown(model_files_are_written_rounded_and_name_what_does_not_fit,
                                        file_test_set_up, file_test_tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
