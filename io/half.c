#include "io/half.h"

#include <string.h>

#include "engine/base/bf16.h"

enum {
    SIGN = 0x8000u,
    F16_INFINITY = 0x7C00u,
    F16_QUIET_NAN = 0x7E00u,
    BF16_INFINITY = 0x7F80u,
};

static const uint32_t F32_INFINITY = 0x7F800000u;

/* ---- to fp32 --------------------------------------------------------------------------------- */

static uint32_t widen_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & SIGN) << 16, exponent = (h >> 10) & 31u, fraction = h & 1023u;
    if (exponent == 31)
        return sign | F32_INFINITY | fraction << 13;
    if (exponent > 0)
        return sign | (exponent + 112u) << 23 | fraction << 13;
    if (fraction == 0)
        return sign;
    exponent = 113; /* subnormal: shift until the leading one is implicit */
    while ((fraction & 1024u) == 0) {
        fraction <<= 1;
        exponent--;
    }
    return sign | exponent << 23 | (fraction & 1023u) << 13;
}

/* Element i is read before its place, or one before it, is written. */
void half_widen(float *out, const void *from, int64_t count, enum half_kind kind)
{
    const char *narrow = from;
    for (int64_t i = 0; i < count; i++) {
        uint16_t h;
        memcpy(&h, narrow + 2 * i, sizeof h);
        uint32_t word = kind == HALF_F16 ? widen_f16(h) : (uint32_t)h << 16;
        memcpy(out + i, &word, sizeof word);
    }
}

/* ---- from fp32 ------------------------------------------------------------------------------- */

/* The smallest normal is 2^-14; below it the unit is 2^-24. */
static uint16_t narrow_f16(uint32_t word)
{
    uint16_t sign = (uint16_t)(word >> 16 & SIGN);
    uint32_t size = word & 0x7FFFFFFFu, exponent = size >> 23;
    if (size > F32_INFINITY)
        return (uint16_t)(sign | F16_QUIET_NAN | (size >> 13 & 0x3FFu));
    if (exponent >= 127 + 16)
        return (uint16_t)(sign | F16_INFINITY);
    if (exponent >= 127 - 14) { /* a carry out of the fraction belongs to the exponent */
        uint32_t rounded = size - (112u << 23) + 0xFFFu + (size >> 13 & 1u);
        return (uint16_t)(sign | rounded >> 13);
    }
    if (exponent < 127 - 25) /* less than half of the smallest subnormal */
        return sign;
    uint32_t fraction = (size & 0x7FFFFFu) | 0x800000u, shift = 126u - exponent;
    uint32_t kept = fraction >> shift, rest = fraction & ((1u << shift) - 1u);
    uint32_t tie = 1u << (shift - 1u);
    kept += rest > tie || (rest == tie && (kept & 1u) != 0);
    return (uint16_t)(sign | kept);
}

int64_t half_narrow(uint16_t *out, const float *from, int64_t count, enum half_kind kind)
{
    uint16_t infinity = kind == HALF_F16 ? F16_INFINITY : BF16_INFINITY;
    for (int64_t i = 0; i < count; i++) {
        uint32_t word;
        memcpy(&word, from + i, sizeof word);
        out[i] = kind == HALF_F16 ? narrow_f16(word) : bf16_round(from[i]);
        if ((out[i] & 0x7FFFu) == infinity && (word & 0x7FFFFFFFu) < F32_INFINITY)
            return i;
    }
    return -1;
}
