/* A number as JSON is the text that printf's 17 digits make, whichever way it is computed. */
#include "io/json_number.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/rng.h"
#include "tests/support/support.h"

/* "%.17g" with a point, and an exponent without "+" and leading zeros. */
static size_t expected(char *out, size_t bytes, double value)
{
    char made[40];
    snprintf(made, sizeof made, "%.17g", value);
    char *e = strchr(made, 'e');
    if (e == NULL)
        return (size_t)snprintf(out, bytes, "%s%s", made, strchr(made, '.') != NULL ? "" : ".0");
    *e = '\0';
    return (size_t)snprintf(out, bytes, "%se%ld", made, strtol(e + 1, NULL, 10));
}

static void check(double value)
{
    char text[JSON_NUMBER_BYTES + 1], want[64];
    size_t bytes = json_number(text, value);
    assert_true(bytes <= JSON_NUMBER_BYTES);
    text[bytes] = '\0';
    assert_int_equal(bytes, expected(want, sizeof want, value));
    assert_string_equal(text, want);
    assert_true(strtod(text, NULL) == value);
}

static void check_both(double value)
{
    check(value);
    check(-value);
}

static uint64_t draw(uint64_t index)
{
    return (uint64_t)rng_below(11, 0, 2 * index, UINT32_MAX) << 32 |
           rng_below(11, 0, 2 * index + 1, UINT32_MAX);
}

static void any_bits(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < 200000; i++) {
        uint64_t bits = draw(i);
        double value;
        memcpy(&value, &bits, sizeof value);
        if (isfinite(value))
            check(value);
    }
}

/* Where logits and probabilities are: doubles and floats, and whole and half numbers, whose ties
 * are exact. */
static void everyday_numbers(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < 200000; i++) {
        double unit = (double)draw(i) / 18446744073709551616.0;
        check_both(unit);
        check_both(ldexp(unit, (int)(i % 160) - 80));
        check_both((double)(float)ldexp(unit, (int)(i % 40) - 30));
        check((double)(draw(i) >> (i % 60)) / 8.0);
    }
}

static void places_where_the_form_changes(void **state)
{
    (void)state;
    for (int power = -330; power <= 308; power++) {
        double value = pow(10.0, power);
        double below = value, above = value;
        for (int i = 0; i < 20; i++) {
            check_both(below);
            check_both(above);
            below = nextafter(below, 0.0);
            above = nextafter(above, INFINITY);
        }
    }
    check_both(0.0);
    check_both(DBL_MIN);
    check_both(DBL_TRUE_MIN);
    check_both(DBL_MAX);
    check_both(9007199254740993.0);
    check_both(99999999999999984.0);
    check_both(0.5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_bits),
        cmocka_unit_test(everyday_numbers),
        cmocka_unit_test(places_where_the_form_changes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
