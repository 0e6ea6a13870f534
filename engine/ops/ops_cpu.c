#include "engine/ops/adamw.h"
#include "engine/ops/attention.h"
#include "engine/ops/columns.h"
#include "engine/ops/dropout.h"
#include "engine/ops/embedding.h"
#include "engine/ops/gelu.h"
#include "engine/ops/linear.h"
#include "engine/ops/master.h"
#include "engine/ops/norm.h"
#include "engine/ops/ops.h"
#include "engine/ops/reduce.h"
#include "engine/ops/span.h"

static size_t workspace_bytes_cpu(const struct device *device, const struct op_limits *limits)
{
    size_t bytes = attention_workspace_bytes_cpu(limits, device->threads);
    size_t norm = norm_workspace_bytes_cpu(limits, device->threads),
           span = span_workspace_bytes_cpu(limits);
    bytes = norm > bytes ? norm : bytes;
    return span > bytes ? span : bytes;
}

static size_t no_side_workspace_bytes(const struct device *device, const struct op_limits *limits)
{
    (void)device, (void)limits;
    return 0;
}

/* A CPU's products have no neighbours: a rank does one thing after the other. */
static enum status pass_begin_cpu(struct stream *s, double product_flops, uint16_t beside)
{
    (void)s, (void)product_flops, (void)beside;
    return ST_OK;
}

static enum status side_begin_cpu(struct stream **side, struct stream *s)
{
    *side = s;
    return ST_OK;
}

static enum status side_end_cpu(struct stream *s)
{
    (void)s;
    return ST_OK;
}

const struct ops ops_cpu = {
    .name = "cpu",
    .workspace_bytes = workspace_bytes_cpu,
    .side_workspace_bytes = no_side_workspace_bytes,
    .embedding_forward = embedding_forward_cpu,
    .embedding_backward = embedding_backward_cpu,
    .embedding_norm_forward = embedding_norm_forward_cpu,
    .embedding_norm_backward = embedding_norm_backward_cpu,
    .residual_norm_forward = residual_norm_forward_cpu,
    .residual_norm_backward = residual_norm_backward_cpu,
    .linear_forward = linear_forward_cpu,
    .linear_backward_data = linear_backward_data_cpu,
    .linear_backward_weight = linear_backward_weight_cpu,
    .gelu_forward = gelu_forward_cpu,
    .gelu_backward = gelu_backward_cpu,
    .attention_forward = attention_forward_cpu,
    .attention_backward = attention_backward_cpu,
    .dropout_apply = dropout_apply_cpu,
    .span_logits_forward = span_logits_forward_cpu,
    .span_logits_backward = span_logits_backward_cpu,
    .span_loss = span_loss_cpu,
    .pass_begin = pass_begin_cpu,
    .finish_sums = finish_sums_cpu,
    .side_begin = side_begin_cpu,
    .side_end = side_end_cpu,
    .accumulate = accumulate_cpu,
    .cast = cast_cpu,
    .master_split = master_split_cpu,
    .squared_norm = squared_norm_cpu,
    .squared_norm_rows = squared_norm_rows_cpu,
    .step_begin = step_begin_cpu,
    .agree = agree_cpu,
    .adamw = adamw_cpu,
};
