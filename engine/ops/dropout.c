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

/* ---- the op --------------------------------------------------------------------------------- */

enum { CHUNK = 8 * BLOCK }; /* elements whose factors are made at once, on the stack */

CPU_CLONES static void multiply(float *out, const float *x, const float *factor, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        out[i] = x[i] * factor[i];
}

static void row_apply(float *out, const float *x, int64_t channels, const struct dropout_key *key,
                      int32_t sample, int64_t first)
{
    float factor[CHUNK];
    for (int64_t c = 0; c < channels; c += CHUNK) {
        int64_t n = channels - c < CHUNK ? channels - c : CHUNK;
        dropout_factors(factor, key, sample, first + c, n);
        multiply(out + c, x + c, factor, n);
    }
}

enum status dropout_apply_cpu(struct stream *s, struct tensor out, struct tensor x,
                              const struct sequences *q, struct dropout drop)
{
    struct dropout_key key = dropout_key(drop);
    int64_t channels = x.shape[1];
    (void)s;
    for (int64_t t = 0; t < q->rows; t++) {
        float *out_t = (float *)out.data + t * channels;
        const float *x_t = (const float *)x.data + t * channels;
        int32_t b = q->row_sequence[t];
        if (b < 0)
            memset(out_t, 0, (size_t)channels * sizeof *out_t);
        else if (key.on)
            row_apply(out_t, x_t, channels, &key, q->sample[b], (t - q->cu_seqlens[b]) * channels);
        else if (out_t != x_t)
            memcpy(out_t, x_t, (size_t)channels * sizeof *out_t);
    }
    return ST_OK;
}
