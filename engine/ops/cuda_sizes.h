/*
 * engine/ops/cuda_sizes.h - scratch memory of the CUDA kernels, as arithmetic.
 *
 * Builds without CUDA have it too: `tessera plan` speaks of GPUs on any machine.
 */
#ifndef ENGINE_OPS_CUDA_SIZES_H
#define ENGINE_OPS_CUDA_SIZES_H

#include "engine/ops/ops.h"

C_BEGIN

/* Rows that a block of a column sum takes, and vectors of sums that one kernel makes at once. */
enum { COLUMN_ROWS = 32, COLUMN_SETS = 3 };

/* Blocks, at most: of squared_norm's first stage, many and short ones, for a product that begins
 * beside it waits until they have left its multiprocessors; of a norm's backward, as many as run at
 * once on 132 multiprocessors. */
enum { NORM_BLOCKS = 4096, NORM_MAX_PARTS = 264 };

static inline int64_t column_parts(int64_t rows)
{
    return (rows + COLUMN_ROWS - 1) / COLUMN_ROWS;
}

/* Bytes of attention's keep bits of a row: whole tiles of 64 keys. */
static inline int64_t attention_keep_pitch(int64_t max_length)
{
    return (max_length + 63) / 64 * 8;
}

/* Rows of a sequence whose unfinished dQ Hopper's backward keeps on the multiprocessor. */
enum { ATTENTION_ROWS_HERE = 384 };

/* Tiles of 64 rows that lie in one sequence each, with gaps: of @count sequences of @rows rows. */
static inline int64_t attention_part_slots(int64_t rows, int64_t count)
{
    return rows / 64 + count + 1;
}

/**
 * attention_workspace_bytes_cuda() - of backward: two floats and the keep bits a row and head, or
 * dQ of heads of up to 64 in single precision, if there may be sequences of more than
 * ATTENTION_ROWS_HERE.
 */
static inline size_t attention_workspace_bytes_cuda(int64_t heads, int64_t rows, int64_t sequences,
                                                    int64_t max_length)
{
    int64_t keep = rows * (2 * (int64_t)sizeof(float) + attention_keep_pitch(max_length));
    int64_t parts = attention_part_slots(rows, sequences) * 64 * 64 * (int64_t)sizeof(float);
    return (size_t)heads *
           (size_t)(max_length > ATTENTION_ROWS_HERE && parts > keep ? parts : keep);
}

/** cuda_workspace_bytes() - the CUDA backend's entry workspace_bytes; @device is not used. */
size_t cuda_workspace_bytes(const struct device *device, const struct op_limits *limits);
/** cuda_side_workspace_bytes() - the entry side_workspace_bytes, likewise. */
size_t cuda_side_workspace_bytes(const struct device *device, const struct op_limits *limits);

C_END

#endif
