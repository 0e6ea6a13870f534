/* engine/ops/master.h: both halves of a master weight give it back, whatever it is. */
#include "engine/ops/master.h"

#include <math.h>
#include <string.h>

#include "tests/support/halves.h"
#include "tests/support/ops.h"

enum { LOWS = 1 << 16 };

static float value_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Of every exponent and sign, with every lower half: two dense mantissas and a third. */
static void all_lower_halves_come_back_behind_many_upper_ones(void **state)
{
    struct op_test *t = *state;
    uint32_t *bits = NULL, *back = NULL;
    uint16_t *high = NULL, *low = NULL;
    assert_ok(pool_take(&t->pool, &bits, LOWS * sizeof *bits));
    assert_ok(pool_take(&t->pool, &back, LOWS * sizeof *back));
    assert_ok(pool_take(&t->pool, &high, LOWS * sizeof *high));
    assert_ok(pool_take(&t->pool, &low, LOWS * sizeof *low));
    for (uint32_t upper = 0; upper < 1 << 16; upper++) {
        if (upper % 128 > 1 && upper % 128 < 126 && upper % 131 != 0)
            continue; /* zeros, subnormals, infinities and NaNs are among the others */
        for (uint32_t i = 0; i < LOWS; i++)
            bits[i] = upper << 16 | i;
        master_put(high, low, (const float *)(const void *)bits, LOWS);
        master_take((float *)(void *)back, high, low, LOWS);
        assert_memory_equal(bits, back, LOWS * sizeof *bits);
        for (uint32_t i = 0; i < LOWS; i++) {
            assert_true(low[i] == i);
            assert_true(high[i] == (uint16_t)(upper + (i >= 0x8000)));
        }
    }
}

/* No bf16 is nearer, and of two that are as near it is the larger one. */
static void the_parameter_is_the_nearest_one_and_ties_go_away_from_zero(void **state)
{
    (void)state;
    for (uint32_t upper = 0; upper < 0x7F7F; upper += 13) { /* the largest finite one is behind */
        static const uint32_t lower[] = {0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF};
        for (int i = 0; i < 6; i++)
            for (int minus = 0; minus < 2; minus++) {
                uint32_t sign = minus ? 0x80000000u : 0, bits = sign | upper << 16 | lower[i];
                double x = fabs((double)value_of(bits)), below = (double)value_of(upper << 16),
                       above = (double)value_of((upper + 1) << 16),
                       got = (double)value_of((uint32_t)master_high(bits) << 16);
                assert_true(signbit(got) == (minus != 0));
                assert_true(fabs(got) == (x - below < above - x ? below : above));
            }
    }
}

static void what_has_no_number_is_as_the_header_says(void **state)
{
    (void)state;
    assert_int_equal(master_high(0x7F800000u), 0x7F80); /* infinity */
    assert_int_equal(master_high(0xFF800000u), 0xFF80);
    assert_int_equal(master_high(0x7F7FFFFFu), 0x7F80); /* beyond the largest bf16 */
    assert_int_equal(master_high(0x7F7F7FFFu), 0x7F7F);
    assert_int_equal(master_high(0x7FC00000u), 0x7FC0); /* the NaN of arithmetic stays one */
    assert_int_equal(master_high(0x7F800001u), 0x7F80);
    assert_int_equal(master_high(0x7FFF8000u), 0x8000);
    assert_int_equal(master_high(0xFFFFFFFFu), 0x0000);
    assert_int_equal(master_bits(0x0000, 0xFFFF), 0xFFFFFFFFu);
}

static void halves_are_joined_where_they_lie(void **state)
{
    static const int64_t sizes[] = {0, 1, 2, 3, 1023, 1024, 1025, 5000};
    struct op_test *t = *state;
    for (int i = 0; i < 8; i++) {
        int64_t n = sizes[i];
        float *x = halves_masters(t, n), *values = NULL;
        uint16_t *halves = NULL, *room = NULL;
        size_t bytes = sizeof *halves * (size_t)n;
        /* Of their own, so that a sanitizer sees every access beyond them. */
        assert_ok(mem_alloc(&values, 2 * bytes));
        assert_ok(mem_alloc(&halves, 2 * bytes));
        assert_ok(mem_alloc(&room, bytes));
        master_put(halves + n, halves, x, n);
        memcpy(values, halves, 2 * bytes);
        master_join(values, room, n);
        assert_memory_equal(values, x, 2 * bytes);
        mem_free(&values);
        mem_free(&halves);
        mem_free(&room);
    }
}

static void the_op_splits_as_the_host_does(void **state)
{
    for (int64_t n = 0; n < 3000; n = 3 * n + 1)
        halves_split(*state, n);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_lower_halves_come_back_behind_many_upper_ones),
        cmocka_unit_test(the_parameter_is_the_nearest_one_and_ties_go_away_from_zero),
        cmocka_unit_test(what_has_no_number_is_as_the_header_says),
        cmocka_unit_test(halves_are_joined_where_they_lie),
        cmocka_unit_test(the_op_splits_as_the_host_does),
    };
    return OP_TESTS_RUN(tests);
}
