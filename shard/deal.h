/*
 * shard/deal.h - which sample goes where: the order of an epoch, and the balanced deal of a batch.
 *
 * The order is a function of (seed, epoch) alone. A global batch of
 * world_size * grad_accum * micro_batch samples is dealt to world_size * grad_accum bins so that
 * their token counts are nearly equal: longest first, each to the bin with the fewest tokens that
 * still has room. Every rank computes the whole deal and takes its own bins:
 *
 *     lengths 9 8 7 3 2 1, two bins of three:   bin 0: 9 3 2 (14)    bin 1: 8 7 1 (16)
 *
 * Pure arithmetic; the caller gives the memory.
 */
#ifndef SHARD_DEAL_H
#define SHARD_DEAL_H

#include <stdint.h>

#include "engine/base/status.h"

C_BEGIN

/** deal_epoch_order() - a permutation of 0 .. count-1 in @order (Fisher-Yates over Philox). */
void deal_epoch_order(int32_t *order, int64_t count, uint64_t seed, int64_t epoch);

/**
 * deal_batch() - deal @count samples to @bins bins of at most @capacity.
 * @bin_of: output, the bin of each of the @count entries of @samples.
 * @scratch: @count + 3 @bins entries of int64_t; on return the first @bins behind @count are the
 * tokens of the bins.
 * @samples: sample numbers; @lengths is indexed by them (tokens).
 *
 * Requires count <= bins * capacity. Ties go to the lower sample position and the lower bin. A bin
 * may stay empty when count < bins. Bin b is rank b % world_size, micro-batch b / world_size. Cost:
 * O(count log(count bins)) and little more.
 */
void deal_batch(int32_t *bin_of, int64_t *scratch, const int32_t *samples, int64_t count,
                const int32_t *lengths, int bins, int64_t capacity);

/** deal_length_class() - the smallest multiple of LENGTH_CLASS that holds @tokens (0 for 0); above
 * LONG_ROWS, of LONG_CLASS. The shorter a class is, the fewer rows of no sequence a captured step
 * has, and the more graphs a run; of many rows a few more are no matter. */
enum { LENGTH_CLASS = 64, LONG_CLASS = 2 * LENGTH_CLASS, LONG_ROWS = 8192 };
int64_t deal_length_class(int64_t tokens);

C_END

#endif
