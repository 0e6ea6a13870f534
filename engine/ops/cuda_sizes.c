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

/*
 * The ops of a stream run one after the other, so the largest need is enough: cuBLASLt's fixed
 * workspace, a pair of column sums over the widest matrix, the norms' sums, attention's sums and
 * keep bits of a row and head, and a double a block or a sequence.
 */
size_t cuda_workspace_bytes(const struct device *device, const struct op_limits *limits)
{
    (void)device;
    int64_t widest = limits->channels * 3 > limits->ffn ? limits->channels * 3 : limits->ffn;
    size_t columns = (size_t)(2 * column_parts(limits->rows) * widest) * sizeof(float);
    size_t attention = attention_workspace_bytes_cuda(limits->heads, limits->rows,
                                                      limits->sequences, limits->max_length);
    size_t sums = (size_t)(limits->sequences + NORM_BLOCKS) * 2 * sizeof(double);
    columns = largest(columns, norm_bytes(limits));
    return largest(largest(GEMM_WORKSPACE_BYTES, columns), largest(attention, sums));
}
