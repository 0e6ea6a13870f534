#include "engine/ops/dropout.h"

#include <string.h>

#include "engine/ops/lanes.h"

enum { GROUPS = 8, BLOCK = 8 * GROUPS }; /* Philox calls at once, elements of these */

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "lane i of a call is its i-th half word");

/* philox4x32() for eight counters that differ in c3 only, side by side in vector registers. */
LANES_INLINE void philox_groups(uint32_t word[GROUPS][4], const struct dropout_key *k,
                                uint32_t sample, uint32_t first_group)
{
    uint32_t c0[GROUPS], c1[GROUPS], c2[GROUPS], c3[GROUPS];
    uint32_t k0 = (uint32_t)k->seed, k1 = (uint32_t)(k->seed >> 32);
    for (uint32_t g = 0; g < GROUPS; g++) {
        c0[g] = k->step;
        c1[g] = k->layer_site;
        c2[g] = sample;
        c3[g] = first_group + g;
    }
    for (int round = 0; round < 10; round++) {
        for (int g = 0; g < GROUPS; g++) {
            uint64_t p0 = (uint64_t)0xD2511F53u * c0[g], p1 = (uint64_t)0xCD9E8D57u * c2[g];
            c0[g] = (uint32_t)(p1 >> 32) ^ c1[g] ^ k0;
            c2[g] = (uint32_t)(p0 >> 32) ^ c3[g] ^ k1;
            c1[g] = (uint32_t)p1;
            c3[g] = (uint32_t)p0;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    for (int g = 0; g < GROUPS; g++) {
        word[g][0] = c0[g];
        word[g][1] = c1[g];
        word[g][2] = c2[g];
        word[g][3] = c3[g];
    }
}

CPU_CLONES static void block_factors(float *out, const struct dropout_key *k, uint32_t sample,
                                     uint32_t first_group)
{
    uint32_t word[GROUPS][4];
    uint16_t lane[BLOCK];
    const uint32_t threshold = k->threshold;
    const float scale = k->scale;
    philox_groups(word, k, sample, first_group);
    memcpy(lane, word, sizeof lane);
    for (int i = 0; i < BLOCK; i++)
        out[i] = lane[i] >= threshold ? scale : 0.0f;
}

void dropout_factors(float *out, const struct dropout_key *k, int32_t sample, int64_t first,
                     int64_t n)
{
    float block[BLOCK];
    int64_t skip = first % 8; /* the first group may begin before @first */
    uint32_t group = (uint32_t)(first / 8);
    for (int64_t i = 0; i < n; group += GROUPS, skip = 0) {
        int64_t count = n - i < BLOCK - skip ? n - i : BLOCK - skip;
        if (count == BLOCK) {
            block_factors(out + i, k, (uint32_t)sample, group);
        } else {
            block_factors(block, k, (uint32_t)sample, group);
            memcpy(out + i, block + skip, (size_t)count * sizeof *out);
        }
        i += count;
    }
}
