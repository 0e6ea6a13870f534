/*
 * engine/ops/ops_cuda.cu - the CUDA backend's table.
 */
#include "engine/ops/cuda_sizes.h"
#include "engine/ops/ops_cuda.h"

const struct ops ops_cuda = {
    .name = "cuda",
    .workspace_bytes = cuda_workspace_bytes,
    .side_workspace_bytes = cuda_side_workspace_bytes,
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
    .finish_sums = cuda_finish_sums,
    .pass_begin = cuda_pass_begin,
    .side_begin = cuda_side_begin,
    .side_end = cuda_side_end,
    .accumulate = cuda_accumulate,
    .cast = cuda_cast,
    .master_split = cuda_master_split,
    .squared_norm = cuda_squared_norm,
    .squared_norm_rows = cuda_squared_norm_rows,
    .step_begin = cuda_step_begin,
    .agree = cuda_agree,
    .adamw = cuda_adamw,
};
