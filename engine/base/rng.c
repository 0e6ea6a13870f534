#include "engine/base/rng.h"

#include <math.h>

uint64_t rng_name_key(const char *name)
{
    uint64_t h = 0xCBF29CE484222325u;
    for (; *name != '\0'; name++)
        h = (h ^ (uint8_t)*name) * 0x100000001B3u;
    return h;
}

/* Two uniforms in (0, 1] give two normals. */
static void box_muller(double out[2], uint32_t a, uint32_t b)
{
    const double two_pi = 6.283185307179586;
    double u = (a + 1.0) / 4294967296.0, v = b / 4294967296.0;
    double radius = sqrt(-2.0 * log(u));
    out[0] = radius * cos(two_pi * v);
    out[1] = radius * sin(two_pi * v);
}

void rng_fill_normal(float *out, int64_t first, int64_t count, uint64_t seed, uint64_t name_key,
                     float stddev)
{
    for (int64_t i = 0; i < count;) {
        int64_t element = first + i;
        uint64_t quad = (uint64_t)element / 4;
        struct philox r = philox4x32(seed, (uint32_t)quad, (uint32_t)(quad >> 32),
                                     (uint32_t)name_key, (uint32_t)(name_key >> 32));
        double normal[4];
        box_muller(normal, r.word[0], r.word[1]);
        box_muller(normal + 2, r.word[2], r.word[3]);
        for (int lane = (int)(element % 4); lane < 4 && i < count; lane++, i++)
            out[i] = (float)(normal[lane] * (double)stddev);
    }
}

uint64_t rng_below(uint64_t seed, uint64_t stream, uint64_t index, uint64_t n)
{
    /* The high half of a 64 x 64 product: bias below n / 2^64. */
    struct philox r = philox4x32(seed, (uint32_t)index, (uint32_t)(index >> 32), (uint32_t)stream,
                                 (uint32_t)(stream >> 32));
    uint64_t word = (uint64_t)r.word[1] << 32 | r.word[0];
    return (uint64_t)(((unsigned __int128)word * n) >> 64);
}
