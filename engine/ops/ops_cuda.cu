/*
 * engine/ops/ops_cuda.cu - the CUDA backend's table, and the scratch memory its ops need.
 */
#include "engine/ops/attention_cuda.cuh"
#include "engine/ops/gemm_plan.h"

static size_t largest(size_t a, size_t b)
{
    return a > b ? a : b;
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
    size_t attention =
        attention_workspace_bytes_cuda(limits->heads, limits->rows, limits->max_length);
    size_t sums = (size_t)(limits->sequences + NORM_BLOCKS) * 2 * sizeof(double);
    columns = largest(columns, cuda_norm_workspace_bytes(limits));
    return largest(largest(GEMM_WORKSPACE_BYTES, columns), largest(attention, sums));
}

const struct ops ops_cuda = {
    .name = "cuda",
    .workspace_bytes = cuda_workspace_bytes,
    .embedding_forward = cuda_embedding_forward,
    .embedding_backward = cuda_embedding_backward,
    .embedding_norm_forward = cuda_embedding_norm_forward,
    .embedding_norm_backward = cuda_embedding_norm_backward,
    .residual_norm_forward = cuda_residual_norm_forward,
    .residual_norm_backward = cuda_residual_norm_backward,
    .linear_forward = cuda_linear_forward,
    .linear_backward_data = cuda_linear_backward_data,
    .linear_backward_weight = cuda_linear_backward_weight,
    .gelu_forward = cuda_gelu_forward,
    .gelu_backward = cuda_gelu_backward,
    .attention_forward = cuda_attention_forward,
    .attention_backward = cuda_attention_backward,
    .dropout_apply = cuda_dropout_apply,
    .span_logits_forward = cuda_span_logits_forward,
    .span_logits_backward = cuda_span_logits_backward,
    .span_loss = cuda_span_loss,
    .accumulate = cuda_accumulate,
    .cast = cuda_cast,
    .squared_norm = cuda_squared_norm,
    .report_begin = cuda_report_begin,
    .agree = cuda_agree,
    .adamw = cuda_adamw,
};
