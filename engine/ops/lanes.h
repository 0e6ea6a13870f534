/*
 * engine/ops/lanes.h - the CPU backend's own loops: fixed lanes, exp and the normal distribution.
 *
 * A float sum depends on its order. Sums here always run over 4 accumulators of 8 lanes and fold
 * them by one fixed tree, so the bits are equal on AVX-512, AVX2 and plain builds, and independent
 * of how the compiler vectorises. Tails are padded with a neutral value.
 *
 * Functions that use them are marked CPU_CLONES (engine/base/clones.h).
 *
 *     exp8    max error 1 ulp for x in [-87.3, 88]; below that 0, above as for 88
 *     normal8 Phi(x), the normal distribution, and phi(x), its density, from one exponential:
 *             Q(a) = Phi(-a) = exp(-a^2 / 2) t p(t), t = 1 / (1 + a / 4), a = |x|, where p has
 *             degree 9 (Chebyshev fit of erfcx(a / sqrt 2) / 2t on a <= 14, 1.2e-8 relative).
 *             a^2 is split in two exact parts, so the tail keeps its relative precision. Max error
 *             5 ulp for |x| <= 13; Phi(-a) is 0 beyond 13.2.
 *
 * tests/op_lanes.c measures both errors.
 */
#ifndef ENGINE_OPS_LANES_H
#define ENGINE_OPS_LANES_H

#include <stdint.h>
#include <string.h>

#include "engine/base/clones.h"
#include "engine/base/status.h"

#define LANES_INLINE static inline __attribute__((always_inline, unused))

/* Vectors never cross a call that is not inlined, so the ABI that GCC notes does not matter. */
#pragma GCC diagnostic ignored "-Wpsabi"

C_BEGIN

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));

enum { LANES = 8, LANES_BLOCK = 32 }; /* 4 accumulators of 8 lanes */

LANES_INLINE f32x8 lanes_set(float x)
{
    f32x8 v = {x, x, x, x, x, x, x, x};
    return v;
}

LANES_INLINE f32x8 lanes_load(const float *p)
{
    f32x8 v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* The first @n < 8 lanes from @p, the others @fill. */
LANES_INLINE f32x8 lanes_load_tail(const float *p, int64_t n, float fill)
{
    float part[LANES];
    for (int i = 0; i < LANES; i++)
        part[i] = i < n ? p[i] : fill;
    return lanes_load(part);
}

LANES_INLINE void lanes_store(float *p, f32x8 v)
{
    memcpy(p, &v, sizeof v);
}

LANES_INLINE void lanes_store_tail(float *p, f32x8 v, int64_t n)
{
    float part[LANES];
    memcpy(part, &v, sizeof v);
    for (int64_t i = 0; i < n; i++)
        p[i] = part[i];
}

LANES_INLINE f32x8 lanes_select(i32x8 mask, f32x8 yes, f32x8 no)
{
    return (f32x8)((mask & (i32x8)yes) | (~mask & (i32x8)no));
}

LANES_INLINE float lanes_fold(f32x8 v)
{
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

LANES_INLINE float lanes_fold4(const f32x8 a[4])
{
    return lanes_fold((a[0] + a[1]) + (a[2] + a[3]));
}

/* exp(high + low): |low| < 0.1 corrects the rounding of high. */
LANES_INLINE f32x8 exp8_parts(f32x8 high, f32x8 low)
{
    const float least = -87.3365f, most = 88.0f;
    /* Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits. */
    const float magic = 12582912.0f;
    f32x8 x = lanes_select(high < lanes_set(least), lanes_set(least), high);
    x = lanes_select(x > lanes_set(most), lanes_set(most), x);
    f32x8 shifted = x * 1.44269504f + magic;
    f32x8 n = shifted - magic;
    /* ln 2 in two parts; n times the first is exact. */
    f32x8 r = (x - n * 0.693359375f) + n * 2.12194440e-4f + low;
    f32x8 p = r * 1.99214550e-4f + 1.39610873e-3f;
    p = p * r + 8.33327509e-3f;
    p = p * r + 4.16661421e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = (p * r) * r + r + 1.0f;
    i32x8 exponent = ((i32x8)shifted - (i32x8)lanes_set(magic) + 127) << 23;
    return lanes_select(high < lanes_set(least), lanes_set(0.0f), p * (f32x8)exponent);
}

LANES_INLINE f32x8 exp8(f32x8 x)
{
    return exp8_parts(x, lanes_set(0.0f));
}

/* Phi(x) and phi(x). */
LANES_INLINE void normal8(f32x8 *distribution, f32x8 *density, f32x8 x)
{
    f32x8 a = (f32x8)((i32x8)x & 0x7FFFFFFF);
    a = lanes_select(a > lanes_set(14.0f), lanes_set(14.0f), a);
    f32x8 top = (f32x8)((i32x8)a & (int32_t)0xFFFFF000); /* 12 bits: its square is exact */
    f32x8 e = exp8_parts(top * top * -0.5f, (a - top) * (a + top) * -0.5f);
    f32x8 t = 1.0f / (a * 0.25f + 1.0f);
    f32x8 p = t * 1.538360334e-2f - 5.63454643e-2f;
    p = p * t + 3.661525497e-2f;
    p = p * t + 4.831808338e-2f;
    p = p * t - 3.67795936e-3f;
    p = p * t + 9.537556828e-2f;
    p = p * t + 6.901163609e-2f;
    p = p * t + 9.615086467e-2f;
    p = p * t + 9.941662313e-2f;
    p = p * t + 9.975179219e-2f;
    f32x8 q = e * (p * t);
    *distribution = lanes_select(x < lanes_set(0.0f), q, 1.0f - q);
    *density = e * 0.398942280f;
}

C_END

#endif
