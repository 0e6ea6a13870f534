#include "engine/ops/cuda_sizes.h"

#include "engine/ops/gemm_plan.h"

static size_t largest(size_t a, size_t b)
{
    return a > b ? a : b;
}

static size_t norm_bytes(const struct op_limits *limits)
{
    int64_t parts = limits->rows < NORM_MAX_PARTS ? limits->rows : NORM_MAX_PARTS;
    return (size_t)(parts * COLUMN_SETS * limits->channels) * sizeof(float);
}

/* Of a block's backward: two norms, the GELU's bias and that of query, key and value, which has as
 * many parts as blocks of rows or, where attention makes it, as sequences. A unit with more
 * finishes some of them earlier. */
static size_t sums_bytes(const struct op_limits *limits)
{
    int64_t parts = column_parts(limits->rows), sequences = limits->sequences;
    int64_t qkv = (parts > sequences ? parts : sequences) * 3 * limits->channels;
    return 2 * norm_bytes(limits) + (size_t)(qkv + parts * limits->ffn) * sizeof(float) + 4 * 256;
}

/*
 * The ops of a stream run one after the other, so the largest need is enough: cuBLASLt's fixed
 * workspace, attention's sums and keep bits of a row and head, and a double a block or a sequence.
 * Behind that are the sums over rows that are still to be finished.
 */
size_t cuda_workspace_bytes(const struct device *device, const struct op_limits *limits)
{
    (void)device;
    size_t attention = attention_workspace_bytes_cuda(limits->heads, limits->rows,
                                                      limits->sequences, limits->max_length);
    size_t sums = (size_t)(limits->sequences + NORM_BLOCKS) * 2 * sizeof(double);
    return largest(GEMM_WORKSPACE_BYTES, largest(attention, sums)) + sums_bytes(limits);
}

/* A weight's product. */
size_t cuda_side_workspace_bytes(const struct device *device, const struct op_limits *limits)
{
    (void)device;
    (void)limits;
    return GEMM_WORKSPACE_BYTES;
}
