#include "engine/base/rng.h"

uint64_t rng_name_key(const char *name)
{
    uint64_t h = 0xCBF29CE484222325u;
    for (; *name != '\0'; name++)
        h = (h ^ (uint8_t)*name) * 0x100000001B3u;
    return h;
}

uint64_t rng_below(uint64_t seed, uint64_t stream, uint64_t index, uint64_t n)
{
    /* The high half of a 64 x 64 product: bias below n / 2^64. */
    struct philox r = philox4x32(seed, (uint32_t)index, (uint32_t)(index >> 32), (uint32_t)stream,
                                 (uint32_t)(stream >> 32));
    uint64_t word = (uint64_t)r.word[1] << 32 | r.word[0];
    return (uint64_t)(((unsigned __int128)word * n) >> 64);
}
