#include "engine/ops/dropout.h"

#include <string.h>
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAVE_AVX2_PATH
#endif

#include "engine/ops/lanes.h"
#include "engine/ops/pieces.h"

enum { GROUPS = 8, BLOCK = 8 * GROUPS }; /* Philox calls at once, elements of these */

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "lane i of a call is its i-th half word");

/* philox4x32_rounds() for eight counters that differ in c3 only, side by side in registers. */
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
    for (int round = 0; round < DROPOUT_ROUNDS; round++) {
        for (int g = 0; g < GROUPS; g++) {
            uint64_t p0 = (uint64_t)PHILOX_M0 * c0[g], p1 = (uint64_t)PHILOX_M1 * c2[g];
            c0[g] = (uint32_t)(p1 >> 32) ^ c1[g] ^ k0;
            c2[g] = (uint32_t)(p0 >> 32) ^ c3[g] ^ k1;
            c1[g] = (uint32_t)p1;
            c3[g] = (uint32_t)p0;
        }
        k0 += PHILOX_W0;
        k1 += PHILOX_W1;
    }
    for (int g = 0; g < GROUPS; g++) {
        word[g][0] = c0[g];
        word[g][1] = c1[g];
        word[g][2] = c2[g];
        word[g][3] = c3[g];
    }
}

static void block_factors_plain(float *out, const struct dropout_key *k, uint32_t sample,
                                uint32_t first_group)
{
    uint32_t word[GROUPS][4];
    uint16_t lane[BLOCK];
    const uint32_t threshold = k->threshold;
    const float scale = k->scale;
    philox_groups(word, k, sample, first_group);
    memcpy(lane, word, sizeof lane);
    for (int i = 0; i < BLOCK; i++)
        out[i] = (lane[i] & DROPOUT_LANE) >= threshold ? scale : 0.0f;
}

#ifdef HAVE_AVX2_PATH
/*
 * The same by hand, 8 times as fast: compilers do not see that a 32-bit product of 64-bit lanes is
 * one instruction. A register has one counter word of four groups in the low halves of its lanes;
 * the high halves are never read, so they need no masking.
 */
#define AVX2 __attribute__((target("avx2")))

struct philox4 {
    __m256i c0, c1, c2, c3;
};

AVX2 static inline void philox4_round(struct philox4 *c, __m256i k0, __m256i k1)
{
    __m256i p0 = _mm256_mul_epu32(c->c0, _mm256_set1_epi64x(PHILOX_M0));
    __m256i p1 = _mm256_mul_epu32(c->c2, _mm256_set1_epi64x(PHILOX_M1));
    c->c0 = _mm256_xor_si256(_mm256_srli_epi64(p1, 32), _mm256_xor_si256(c->c1, k0));
    c->c2 = _mm256_xor_si256(_mm256_srli_epi64(p0, 32), _mm256_xor_si256(c->c3, k1));
    c->c1 = p1;
    c->c3 = p0;
}

/* Low halves of @a and of @b side by side. */
AVX2 static inline __m256i low_halves(__m256i a, __m256i b)
{
    return _mm256_blend_epi32(a, _mm256_slli_epi64(b, 32), 0xAA);
}

/* Eight factors of the eight half words of one group. */
AVX2 static inline void group_factors(float *out, __m128i lane, __m256i threshold, __m256 scale)
{
    lane = _mm_and_si128(lane, _mm_set1_epi16(DROPOUT_LANE));
    __m256i drop = _mm256_cmpgt_epi32(threshold, _mm256_cvtepu16_epi32(lane));
    _mm256_storeu_ps(out, _mm256_andnot_ps(_mm256_castsi256_ps(drop), scale));
}

AVX2 static inline void four_groups(float *out, const struct philox4 *c, __m256i threshold,
                                    __m256 scale)
{
    __m256i word01 = low_halves(c->c0, c->c1), word23 = low_halves(c->c2, c->c3);
    __m256i even = _mm256_unpacklo_epi64(word01, word23); /* groups 0 and 2 */
    __m256i odd = _mm256_unpackhi_epi64(word01, word23);
    group_factors(out, _mm256_castsi256_si128(even), threshold, scale);
    group_factors(out + 8, _mm256_castsi256_si128(odd), threshold, scale);
    group_factors(out + 16, _mm256_extracti128_si256(even, 1), threshold, scale);
    group_factors(out + 24, _mm256_extracti128_si256(odd, 1), threshold, scale);
}

AVX2 static void block_factors_avx2(float *out, const struct dropout_key *k, uint32_t sample,
                                    uint32_t first_group)
{
    struct philox4 c[2];
    uint32_t k0 = (uint32_t)k->seed, k1 = (uint32_t)(k->seed >> 32), g = first_group;
    for (int i = 0; i < 2; i++, g += 4) {
        c[i].c0 = _mm256_set1_epi64x(k->step);
        c[i].c1 = _mm256_set1_epi64x(k->layer_site);
        c[i].c2 = _mm256_set1_epi64x(sample);
        c[i].c3 = _mm256_set_epi64x(g + 3, g + 2, g + 1, g);
    }
    for (int round = 0; round < DROPOUT_ROUNDS; round++) {
        __m256i key0 = _mm256_set1_epi64x(k0), key1 = _mm256_set1_epi64x(k1);
        philox4_round(&c[0], key0, key1);
        philox4_round(&c[1], key0, key1);
        k0 += PHILOX_W0;
        k1 += PHILOX_W1;
    }
    __m256i threshold = _mm256_set1_epi32((int)k->threshold);
    __m256 scale = _mm256_set1_ps(k->scale);
    four_groups(out, &c[0], threshold, scale);
    four_groups(out + BLOCK / 2, &c[1], threshold, scale);
}

static void block_factors(float *out, const struct dropout_key *k, uint32_t sample,
                          uint32_t first_group)
{
    if (__builtin_cpu_supports("avx2"))
        block_factors_avx2(out, k, sample, first_group);
    else
        block_factors_plain(out, k, sample, first_group);
}
#else
static void block_factors(float *out, const struct dropout_key *k, uint32_t sample,
                          uint32_t first_group)
{
    block_factors_plain(out, k, sample, first_group);
}
#endif

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

CPU_CLONES void dropout_multiply(float *out, const float *x, const float *factor, int64_t n)
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
        dropout_multiply(out + c, x + c, factor, n);
    }
}

struct apply {
    struct tensor out, x;
    const struct sequences *q;
    struct dropout_key key;
};

static void apply_rows(void *context, int64_t first, int64_t end, int worker)
{
    const struct apply *a = context;
    const struct sequences *q = a->q;
    int64_t channels = a->x.shape[1];
    (void)worker;
    for (int64_t t = first; t < end; t++) {
        float *out = (float *)a->out.data + t * channels;
        const float *x = (const float *)a->x.data + t * channels;
        int32_t b = q->row_sequence[t];
        if (b < 0)
            memset(out, 0, (size_t)channels * sizeof *out);
        else if (a->key.on)
            row_apply(out, x, channels, &a->key, q->sample[b], (t - q->cu_seqlens[b]) * channels);
        else if (out != x)
            memcpy(out, x, (size_t)channels * sizeof *out);
    }
}

enum status dropout_apply_cpu(struct stream *s, struct tensor out, struct tensor x,
                              const struct sequences *q, struct dropout drop)
{
    struct apply a = {out, x, q, dropout_key(drop)};
    pieces_run(s, apply_rows, &a, q->rows, pieces_grain(x.shape[1]));
    return ST_OK;
}
