/*
 * engine/train/batch.h - features packed into the index arrays of a micro-batch.
 *
 * The arrays of all micro-batches of a step lie in one block with fixed places for the planned
 * sizes, filled in (pinned) host memory and copied to the device in one go:
 *
 *     block = [ micro-batch 0: cu_seqlens | kv_len | sample | start | end | token | ... ][ 1 ][ 2 ]
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
 * batch_view() - the micro-batch as ops see it.
 * @block: device (or host) address of the block.
 * @rows: T of the tensors: in use, or the length class.
 */
struct sequences batch_view(const struct batch_layout *l, void *block, int index, int64_t rows);

C_END

#endif
