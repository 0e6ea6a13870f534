/*
 * engine/ops/master.h - fp32 master weights beside bf16 parameters: only what these leave out.
 *
 * The upper half of a master weight is nearly its parameter, so 16 bits are kept beside it. With M
 * the bits of the master, h those of the parameter, l the ones kept:
 *
 *     h = (M + 0x8000) >> 16          the parameter is the master, rounded to nearest
 *     l = M & 0xFFFF
 *     M = (h << 16) + l - (l < 0x8000 ? 0 : 0x10000)        all modulo 2^32
 *
 * The way back is exact for every M: where l >= 0x8000, the first line has carried one into h.
 * It could not tell which way a tie went that rounds to even, so ties (l = 0x8000, one value in
 * 65536) go away from zero, not to even as in op_cast().
 *
 * Infinity stays what it is, and what rounds beyond the largest bf16 becomes it. A NaN comes back
 * with its bits, but its parameter may be another value: infinity where only lower bits make it a
 * NaN (0x7F800001), a zero of the other sign where the carry runs over (from 0x7FFF8000 on).
 * Updates that are not finite are skipped, so none comes from training.
 */
#ifndef ENGINE_OPS_MASTER_H
#define ENGINE_OPS_MASTER_H

#include <stdint.h>

#include "engine/base/rng.h"
#include "engine/ops/ops.h"

C_BEGIN

/** master_high() - h, the bits of the parameter. @bits: M. */
HOST_DEVICE static inline uint16_t master_high(uint32_t bits)
{
    return (uint16_t)((bits + 0x8000u) >> 16);
}

/** master_low() - l. */
HOST_DEVICE static inline uint16_t master_low(uint32_t bits)
{
    return (uint16_t)(bits & 0xFFFFu);
}

/** master_bits() - M; the exclusive or and the subtraction extend the sign of @low. */
HOST_DEVICE static inline uint32_t master_bits(uint16_t high, uint16_t low)
{
    return ((uint32_t)high << 16) + ((uint32_t)low ^ 0x8000u) - 0x8000u;
}

/** master_take() - out[i] = the master of high[i] and low[i], on the host. */
void master_take(float *out, const uint16_t *high, const uint16_t *low, int64_t n);

/** master_put() - the other way. @low: NULL: it is not kept here. */
void master_put(uint16_t *high, uint16_t *low, const float *master, int64_t n);

/**
 * master_join() - the masters where their halves are, on the host.
 * @values: (n); holds n times l, then n times h, and gets the masters.
 * @room: (n), to work in.
 */
void master_join(float *values, uint16_t *room, int64_t n);

enum status master_split_cpu(struct stream *s, struct tensor param, struct tensor low,
                             struct tensor master);

C_END

#endif
