/*
 * engine/train/batch.h - features packed into the index arrays of a micro-batch.
 *
 * The arrays of all micro-batches of a step lie in one block with fixed places for the planned
 * sizes, filled in (pinned) host memory and copied to the device in one go:
 *
 *     block = [ micro-batch 0: cu_seqlens | kv_len | sample | start | end | token | ... ][ 1 ][ 2 ]
 *
 * Where tables are moved by rows, a rank has the tokens of all ranks' rows too. It knows all
 * samples and who gets which, so it fills them in itself, and nobody sends them.
 *
 * Packed: sequences lie end to end, rows behind the last one belong to none. Padded: every sequence
 * has padded_length rows, of which kv_len are keys, as in a padded PyTorch batch.
 */
#ifndef ENGINE_TRAIN_BATCH_H
#define ENGINE_TRAIN_BATCH_H

#include "engine/base/arena.h"
#include "engine/ops/ops.h"
#include "io/features.h"

C_BEGIN

struct batch_layout {
    int64_t rows, sequences;  /* that a micro-batch has room for */
    int64_t positions;        /* of the model */
    int32_t max_length;       /* of a sequence */
    int64_t padded_length;    /* 0: packed */
    int32_t pad_id, sep_type; /* token of padded rows; token type behind the first [SEP] */
    int ranks;                /* whose tokens a micro-batch has; 0: only this rank's */
    size_t micro_bytes;       /* of one micro-batch in the block */
};

/** batch_layout_init() - fill in micro_bytes for the sizes in @l. */
void batch_layout_init(struct batch_layout *l);

/**
 * batch_fill() - pack features into the arrays of one micro-batch.
 * @block: host memory of the whole block; micro-batch @index is written.
 * @features: which features, @count of them (0 is fine), at most l->sequences; their numbers are
 * the global samples (dropout's counter).
 * @scratch: l->rows entries; NULL: without token_order, which only a backward pass reads.
 *
 * Return: rows in use (T of this rank before the length class).
 */
int64_t batch_fill(const struct batch_layout *l, void *block, int index,
                   const struct feature_set *set, const int32_t *features, int64_t count,
                   int32_t *scratch);

/**
 * batch_fill_rank() - put the tokens of one rank's micro-batch beside those of the others, where
 * the layout has them.
 * @block, @index, @set, @features, @count: as in batch_fill().
 * @rows: of each rank, the length class.
 */
void batch_fill_rank(const struct batch_layout *l, void *block, int index, int rank, int64_t rows,
                     const struct feature_set *set, const int32_t *features, int64_t count);

/** batch_order_ranks() - behind the last of them: their order. @scratch: l->ranks * rows. */
void batch_order_ranks(const struct batch_layout *l, void *block, int index, int64_t rows,
                       int32_t *scratch);

/**
 * batch_view() - the micro-batch as ops see it.
 * @block: device (or host) address of the block.
 * @rows: T of the tensors: in use, or the length class.
 * @all_rows: of each rank, where the layout has all ranks' tokens: the length class.
 */
struct sequences batch_view(const struct batch_layout *l, void *block, int index, int64_t rows,
                            int64_t all_rows);

C_END

#endif
