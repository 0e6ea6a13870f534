/*
 * engine/base/bf16.h - bf16 numbers on the CPU: the upper half of a float, in memory uint16_t.
 *
 * Widening is exact. Rounding is to nearest, ties to even; what rounds beyond the largest bf16
 * becomes infinity, and a NaN stays a (quiet) NaN with its sign. No branches: loops make vectors.
 */
#ifndef ENGINE_BASE_BF16_H
#define ENGINE_BASE_BF16_H

#include <stdint.h>
#include <string.h>

static inline float bf16_widen(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint16_t bf16_round(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16, nan = bits >> 16 | 0x40u;
    return (uint16_t)((bits & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded);
}

#endif
