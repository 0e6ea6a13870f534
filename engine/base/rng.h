/*
 * engine/base/rng.h - counter-based random numbers, the same on CPU and GPU.
 *
 * Philox4x32 turns (key, counter) into four 32-bit words. Nothing is stored, so a value depends
 * only on what it is for, never on rank, world size, packing, stage, recompute or resume:
 *
 *   dropout   seven rounds, key = seed, counter = (step, layer << 8 | site, global sample,
 *             element / 8); eight lanes of 15 bits a call: lane i is the low (i even) or high
 *             (i odd) half of word i / 2 without its upper bit; an element is kept if its lane
 *             >= t = round(p * 32768), and what is kept is scaled by 32768 / (32768 - t), so that
 *             its expectation is exact
 *   weights   ten rounds, key = seed, counter = (element / 4, high word, FNV-1a 64 of the
 *             tensor's name)
 *   shuffles  ten rounds, see rng_below()
 *
 * Seven rounds are the fewest that pass the source's batteries of tests, ten are its margin of
 * safety; dropout decides on up to 10^10 elements a step, so it has what it needs and no more.
 * 15 bits have the order of half-precision numbers: a GPU compares two lanes with one instruction.
 *
 * Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11, table 2.
 */
#ifndef ENGINE_BASE_RNG_H
#define ENGINE_BASE_RNG_H

#include <stdint.h>

#include "engine/base/status.h"

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

C_BEGIN

struct philox {
    uint32_t word[4];
};

/* The multipliers of counter words 0 and 2, and what a round adds to the key's halves. */
#define PHILOX_M0 0xD2511F53u
#define PHILOX_M1 0xCD9E8D57u
#define PHILOX_W0 0x9E3779B9u
#define PHILOX_W1 0xBB67AE85u

enum { DROPOUT_ROUNDS = 7, DROPOUT_LANE = 0x7FFF /* its bits */ };

/** philox4x32_rounds() - @rounds rounds over counter (c0..c3) with a 64-bit key. */
HOST_DEVICE static inline struct philox philox4x32_rounds(int rounds, uint64_t key, uint32_t c0,
                                                          uint32_t c1, uint32_t c2, uint32_t c3)
{
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < rounds; round++) {
        uint64_t p0 = (uint64_t)PHILOX_M0 * c0, p1 = (uint64_t)PHILOX_M1 * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += PHILOX_W0;
        k1 += PHILOX_W1;
    }
    struct philox out;
    out.word[0] = c0;
    out.word[1] = c1;
    out.word[2] = c2;
    out.word[3] = c3;
    return out;
}

/** philox4x32() - the same with ten rounds. */
HOST_DEVICE static inline struct philox philox4x32(uint64_t key, uint32_t c0, uint32_t c1,
                                                   uint32_t c2, uint32_t c3)
{
    return philox4x32_rounds(10, key, c0, c1, c2, c3);
}

/** dropout_lane() - the i-th of the eight lanes of a call. */
HOST_DEVICE static inline uint32_t dropout_lane(struct philox r, int i)
{
    return (r.word[i >> 1] >> (16 * (i & 1))) & (uint32_t)DROPOUT_LANE;
}

/** dropout_threshold() - lanes below it are dropped; @p in [0, 1). One lane at least is kept. */
HOST_DEVICE static inline uint32_t dropout_threshold(float p)
{
    uint32_t threshold = (uint32_t)(p * 32768.0f + 0.5f);
    return threshold < (uint32_t)DROPOUT_LANE ? threshold : (uint32_t)DROPOUT_LANE;
}

/** dropout_scale() - the factor of kept elements: 1 over the share of lanes that are kept. */
HOST_DEVICE static inline float dropout_scale(uint32_t threshold)
{
    return 32768.0f / (float)(32768u - threshold);
}

/** rng_name_key() - FNV-1a 64 of a tensor name. */
uint64_t rng_name_key(const char *name);

/**
 * rng_fill_normal() - elements [first, first + count) of the named tensor's random values.
 * @out: @count values from N(0, stddev^2), Box-Muller over Philox words in float64: words 0 and 1
 * of a quad give its elements 0 and 1, words 2 and 3 the others.
 *
 * The bits are those of the C library's log, cos and sin. Cost: some 3 ns an element with AVX2.
 */
void rng_fill_normal(float *out, int64_t first, int64_t count, uint64_t seed, uint64_t name_key,
                     float stddev);

/** rng_normal_pairs() - @x and @y [count] of words @a and @b: the formula of rng_normal.c. */
void rng_normal_pairs(float *x, float *y, const uint32_t *a, const uint32_t *b, int64_t count,
                      float stddev);

/** rng_below() - uniform in [0, n), n >= 1, from counter (@index, @stream); for shuffles. */
uint64_t rng_below(uint64_t seed, uint64_t stream, uint64_t index, uint64_t n);

C_END

#endif
