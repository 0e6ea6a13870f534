/*
 * Normals by Box and Muller, as float64 gives them when log, cos and sin are the C library's, many
 * at a time. For a pair of words (a, b), u = (a + 1) / 2^32 and v = (b + 1) / 2^32 in (0, 1]:
 *
 *     x = sqrt(-2 log u) cos(2 pi v) stddev     y = sqrt(-2 log u) sin(2 pi v) stddev
 *
 * The loops below have their own log, cos and sin, a few units of the last place of a double from
 * the truth. Rounded to float that gives the very bits that the library would give, unless a
 * rounding border lies within the error of either: a value that MARGIN in either direction would
 * round elsewhere is computed again, with the library. That is one in some millions.
 */
#include <math.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/clones.h"
#include "engine/base/rng.h"

/* Vectors never cross a call that is not inlined, so the ABI that GCC notes does not matter. */
#pragma GCC diagnostic ignored "-Wpsabi"

typedef double f64x8 __attribute__((vector_size(64)));
typedef uint64_t u64x8 __attribute__((vector_size(64)));

enum { WIDTH = 8, BLOCK = 256 /* pairs at a time */ };

#define INLINE static inline __attribute__((always_inline))

static const double TWO_PI = 6.283185307179586;
/* Relative; 64 units of the last place. All roundings and series here, and those of a library that
 * is right to two units, add up to less than a quarter of it. */
static const double MARGIN = 0x1p-46;

INLINE f64x8 set(double x)
{
    f64x8 v = {x, x, x, x, x, x, x, x};
    return v;
}

/* Integers below 2^52: as the low bits of 2^52 + n. */
INLINE f64x8 to_double(u64x8 n)
{
    return (f64x8)(n | 0x4330000000000000u) - 0x1p52;
}

/* (word + 1) / 2^32 */
INLINE f64x8 uniform(const uint32_t *word)
{
    u64x8 n = {word[0], word[1], word[2], word[3], word[4], word[5], word[6], word[7]};
    return to_double(n + 1) * 0x1p-32;
}

/*
 * log of u in (0, 1]: u = 2^k m with m in [sqrt(1/2), sqrt(2)), and log m = 2 artanh(s) with
 * s = (m - 1) / (m + 1), |s| < 0.1716, by its power series up to s^21.
 */
INLINE f64x8 log8(f64x8 u)
{
    const uint64_t root = 0x3FE6A09E00000000u, one = 0x3FF0000000000000u; /* root: of 1/2 */
    u64x8 bits = (u64x8)u, steps = bits - root + one; /* its exponent field: k + 1023 */
    f64x8 k = to_double(steps >> 52) - 1023.0;
    f64x8 m = (f64x8)(bits - (steps & 0xFFF0000000000000u) + one);
    f64x8 s = (m - 1.0) / (m + 1.0), z = s * s;
    f64x8 p = z * (1.0 / 21) + 1.0 / 19;
    p = p * z + 1.0 / 17;
    p = p * z + 1.0 / 15;
    p = p * z + 1.0 / 13;
    p = p * z + 1.0 / 11;
    p = p * z + 1.0 / 9;
    p = p * z + 1.0 / 7;
    p = p * z + 1.0 / 5;
    p = p * z + 1.0 / 3;
    return k * 0.6931471805599453 + 2.0 * (s + s * z * p);
}

INLINE f64x8 select8(u64x8 mask, f64x8 yes, f64x8 no)
{
    return (f64x8)((mask & (u64x8)yes) | (~mask & (u64x8)no));
}

/*
 * cos and sin of t in (0, 2 pi]: t = q pi / 2 + r with |r| <= pi / 4, and the power series of r.
 * pi / 2 is a sum of two doubles, the first of 45 bits: q times it is exact, as is its difference
 * to t, so r keeps its relative precision where it is small.
 */
INLINE void cos_sin8(f64x8 *cosine, f64x8 *sine, f64x8 t)
{
    const double half_pi = 0x1.921fb54442dp+0, rest = 0x1.8469898cc5170p-48;
    const double magic = 0x1.8p52; /* adding it rounds to an integer, in the low bits */
    f64x8 shifted = t * 0.6366197723675814 + magic;
    f64x8 q = shifted - magic;
    f64x8 r = (t - q * half_pi) - q * rest, z = r * r;
    f64x8 s = z * (-1.0 / 1307674368000) + 1.0 / 6227020800;
    s = s * z - 1.0 / 39916800;
    s = s * z + 1.0 / 362880;
    s = s * z - 1.0 / 5040;
    s = s * z + 1.0 / 120;
    s = s * z - 1.0 / 6;
    s = r + r * z * s;
    f64x8 c = z * (1.0 / 20922789888000) - 1.0 / 87178291200;
    c = c * z + 1.0 / 479001600;
    c = c * z - 1.0 / 3628800;
    c = c * z + 1.0 / 40320;
    c = c * z - 1.0 / 720;
    c = c * z + 1.0 / 24;
    c = c * z - 0.5;
    c = set(1.0) + z * c;
    u64x8 n = (u64x8)shifted, odd = 0 - (n & 1);
    *cosine = (f64x8)((u64x8)select8(odd, s, c) ^ ((n + 1) & 2) << 62);
    *sine = (f64x8)((u64x8)select8(odd, c, s) ^ (n & 2) << 62);
}

/* As the top of this file says, with the C library. */
static void exact_pair(float *x, float *y, uint32_t a, uint32_t b, double stddev)
{
    double u = (a + 1.0) / 4294967296.0, v = b + 1.0;
    double radius = sqrt(-2.0 * log(u)), t = TWO_PI * (v / 4294967296.0);
    *x = (float)(radius * cos(t) * stddev);
    *y = (float)(radius * sin(t) * stddev);
}

/* @radius times @direction times @stddev as floats; returns whether any is near a border. */
INLINE int round_block(float *out, const double *radius, const double *direction, double stddev)
{
    int doubtful = 0;
    for (int i = 0; i < BLOCK; i++) {
        double value = radius[i] * direction[i] * stddev;
        float low = (float)(value - value * MARGIN), high = (float)(value + value * MARGIN);
        doubtful |= low != high;
        out[i] = high; /* and not low: -0 - -0 is 0 */
    }
    return doubtful;
}

static void correct_block(float *x, float *y, const uint32_t *a, const uint32_t *b,
                          const double *cosine, const double *sine, const double *radius,
                          double stddev)
{
    for (int i = 0; i < BLOCK; i++) {
        double p = radius[i] * cosine[i] * stddev, q = radius[i] * sine[i] * stddev;
        if ((float)(p - p * MARGIN) != (float)(p + p * MARGIN) ||
            (float)(q - q * MARGIN) != (float)(q + q * MARGIN))
            exact_pair(&x[i], &y[i], a[i], b[i], stddev);
    }
}

CPU_CLONES static void normal_block(float *x, float *y, const uint32_t *a, const uint32_t *b,
                                    double stddev)
{
    double radius[BLOCK], cosine[BLOCK], sine[BLOCK];
    for (int i = 0; i < BLOCK; i += WIDTH) {
        f64x8 c, s, squared = -2.0 * log8(uniform(a + i));
        cos_sin8(&c, &s, TWO_PI * uniform(b + i));
        memcpy(radius + i, &squared, sizeof squared);
        memcpy(cosine + i, &c, sizeof c);
        memcpy(sine + i, &s, sizeof s);
    }
    for (int i = 0; i < BLOCK; i++)
        radius[i] = sqrt(radius[i]);
    int doubtful = round_block(x, radius, cosine, stddev);
    doubtful |= round_block(y, radius, sine, stddev);
    if (doubtful)
        correct_block(x, y, a, b, cosine, sine, radius, stddev);
}

void rng_normal_pairs(float *x, float *y, const uint32_t *a, const uint32_t *b, int64_t count,
                      float stddev)
{
    int64_t done = 0;
    for (; done + BLOCK <= count; done += BLOCK)
        normal_block(x + done, y + done, a + done, b + done, (double)stddev);
    if (done == count)
        return;
    uint32_t words[2][BLOCK] = {{0}};
    float values[2][BLOCK];
    size_t rest = (size_t)(count - done);
    memcpy(words[0], a + done, rest * sizeof *a);
    memcpy(words[1], b + done, rest * sizeof *b);
    normal_block(values[0], values[1], words[0], words[1], (double)stddev);
    memcpy(x + done, values[0], rest * sizeof *x);
    memcpy(y + done, values[1], rest * sizeof *y);
}

/* The words of quads [first, first + BLOCK / 2): two pairs each. */
CPU_CLONES static void fill_words(uint32_t *a, uint32_t *b, uint64_t first, uint64_t seed,
                                  uint64_t name_key)
{
    for (int i = 0; i < BLOCK / 2; i++) {
        uint64_t quad = first + (uint64_t)i;
        struct philox r = philox4x32(seed, (uint32_t)quad, (uint32_t)(quad >> 32),
                                     (uint32_t)name_key, (uint32_t)(name_key >> 32));
        a[i] = r.word[0];
        b[i] = r.word[1];
        a[BLOCK / 2 + i] = r.word[2];
        b[BLOCK / 2 + i] = r.word[3];
    }
}

/* x and y of the first pair of each quad, then of its second. */
CPU_CLONES static void put_quads(float *out, const float *x, const float *y)
{
    for (int i = 0; i < BLOCK / 2; i++) {
        out[4 * i] = x[i];
        out[4 * i + 1] = y[i];
        out[4 * i + 2] = x[BLOCK / 2 + i];
        out[4 * i + 3] = y[BLOCK / 2 + i];
    }
}

/* The same of @count elements behind the first @skip. */
static void put_some(float *out, const float *x, const float *y, int64_t skip, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        int64_t at = (skip + i) / 4 + ((skip + i) & 2 ? BLOCK / 2 : 0);
        out[i] = (skip + i) & 1 ? y[at] : x[at];
    }
}

void rng_fill_normal(float *out, int64_t first, int64_t count, uint64_t seed, uint64_t name_key,
                     float stddev)
{
    enum { QUADS = BLOCK / 2 };
    uint32_t a[BLOCK], b[BLOCK];
    float x[BLOCK], y[BLOCK];
    ASSERT(first >= 0);
    for (int64_t done = 0; done < count;) {
        int64_t quad = (first + done) / 4, skip = (first + done) % 4;
        int64_t n = 4 * QUADS - skip < count - done ? 4 * QUADS - skip : count - done;
        fill_words(a, b, (uint64_t)quad, seed, name_key);
        normal_block(x, y, a, b, (double)stddev);
        if (n == 4 * QUADS)
            put_quads(out + done, x, y);
        else
            put_some(out + done, x, y, skip, n);
        done += n;
    }
}
