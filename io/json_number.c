#include "io/json_number.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { DIGITS = 17, MOST_POWER = 27 /* 5^27 fits in 63 bits */ };

static const uint64_t FIVES[MOST_POWER + 1] = {1u,
                                               5u,
                                               25u,
                                               125u,
                                               625u,
                                               3125u,
                                               15625u,
                                               78125u,
                                               390625u,
                                               1953125u,
                                               9765625u,
                                               48828125u,
                                               244140625u,
                                               1220703125u,
                                               6103515625u,
                                               30517578125u,
                                               152587890625u,
                                               762939453125u,
                                               3814697265625u,
                                               19073486328125u,
                                               95367431640625u,
                                               476837158203125u,
                                               2384185791015625u,
                                               11920928955078125u,
                                               59604644775390625u,
                                               298023223876953125u,
                                               1490116119384765625u,
                                               7450580596923828125u};

static const uint64_t MOST_DIGITS = 100000000000000000; /* 10^17 */

/* The digits of @value >= 0 as an integer of DIGITS digits, and the power of ten of the first;
 * false if it is too large or too small for that. */
static bool find_digits(uint64_t *digits, int *power, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    int exponent = (int)(bits >> 52) - 1075; /* value = mantissa * 2^exponent */
    uint64_t mantissa = (bits & ((UINT64_C(1) << 52) - 1)) | UINT64_C(1) << 52;
    int first = (exponent + 52) * 1233 >> 12; /* log10, or one less or more */
    for (int attempt = 0; attempt < 3; attempt++) {
        int scale = DIGITS - 1 - first; /* digits = value * 10^scale */
        if (scale < 0 || scale > MOST_POWER)
            return false;
        unsigned __int128 product = (unsigned __int128)mantissa * FIVES[scale];
        int shift = -(exponent + scale);
        uint64_t whole;
        if (shift <= 0) {
            whole = (uint64_t)(product << -shift);
        } else {
            unsigned __int128 unit = (unsigned __int128)1 << shift;
            unsigned __int128 rest = product & (unit - 1), half = unit >> 1;
            whole = (uint64_t)(product >> shift);
            whole += rest > half || (rest == half && (whole & 1) != 0);
        }
        if (whole >= MOST_DIGITS) {
            first++;
        } else if (whole < MOST_DIGITS / 10) {
            first--;
        } else {
            *digits = whole;
            *power = first;
            return true;
        }
    }
    return false;
}

/* With a point behind @before digits, which may be none or fewer. */
static size_t put_fixed(char *text, const char *digits, int count, int before)
{
    char *at = text;
    if (before <= 0) {
        memcpy(at, "0.000000", (size_t)(2 - before));
        at += 2 - before;
        memcpy(at, digits, (size_t)count);
        return (size_t)(at + count - text);
    }
    for (int i = 0; i < before; i++)
        *at++ = (char)(i < count ? digits[i] : '0');
    *at++ = '.';
    if (count <= before)
        *at++ = '0';
    for (int i = before; i < count; i++)
        *at++ = digits[i];
    return (size_t)(at - text);
}

/* @power is from -5 to -99. */
static size_t put_scientific(char *text, const char *digits, int count, int power)
{
    char *at = text;
    *at++ = digits[0];
    if (count > 1)
        *at++ = '.';
    memcpy(at, digits + 1, (size_t)count - 1);
    at += count - 1;
    *at++ = 'e';
    *at++ = '-';
    if (power <= -10)
        *at++ = (char)('0' + -power / 10);
    *at++ = (char)('0' + -power % 10);
    return (size_t)(at - text);
}

/* What is left: zero, and what is very large or very small. */
static size_t put_as_printf(char text[JSON_NUMBER_BYTES], double value)
{
    char made[40];
    snprintf(made, sizeof made, "%.17g", value);
    size_t mantissa = strcspn(made, "e"), bytes = mantissa;
    memcpy(text, made, mantissa);
    if (made[mantissa] == '\0') {
        if (strchr(made, '.') != NULL)
            return bytes;
        memcpy(text + bytes, ".0", 2);
        return bytes + 2;
    }
    const char *exponent = made + mantissa + 1;
    text[bytes++] = 'e';
    if (*exponent == '-')
        text[bytes++] = '-';
    exponent += strspn(exponent, "+-0");
    memcpy(text + bytes, exponent, strlen(exponent));
    return bytes + strlen(exponent);
}

size_t json_number(char text[JSON_NUMBER_BYTES], double value)
{
    enum { LEAST_FIXED = -4 }; /* power of ten, as of "%g" */
    uint64_t whole;
    int power, count = DIGITS;
    char digits[DIGITS];
    ASSERT(isfinite(value));
    if (!find_digits(&whole, &power, fabs(value)))
        return put_as_printf(text, value);
    for (int i = DIGITS; i-- > 0; whole /= 10)
        digits[i] = (char)('0' + whole % 10);
    while (count > 1 && digits[count - 1] == '0')
        count--;
    text[0] = '-';
    size_t sign = value < 0;
    return sign + (power < LEAST_FIXED ? put_scientific(text + sign, digits, count, power)
                                       : put_fixed(text + sign, digits, count, power + 1));
}
