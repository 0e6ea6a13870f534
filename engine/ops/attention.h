/*
 * engine/ops/attention.h - softmax attention of packed sequences, both directions of the mask open.
 *
 * Per sequence (n query rows, the first m of them keys) and head, with D = C / H:
 *
 *     S = q k^T / sqrt(D)   (n, m)        lse_i = log sum_j exp S_ij
 *     P = exp(S - lse)                    out = (mask P / (1 - p)) v
 *
 *     dv = (mask P / (1 - p))^T dout      dP = mask (dout v^T) / (1 - p)
 *     dS = P (dP - delta),  delta_i = sum_j P_ij dP_ij = dout_i . out_i
 *     dq = dS k / sqrt(D),  dk = dS^T q / sqrt(D)
 *     dbias = [dbias +] column sums of dqkv
 *
 * qkv, dqkv (T, 3C): query, key, value of a row side by side, heads side by side in each; out, dout
 * (T, C); lse (H, T) fp32. Dropout element (h * P + i) * P + j with P the positions of the model.
 * Rows of no sequence get 0 in out, lse and dqkv; rows beyond the keys get 0 in dk and dv; without
 * keys out and lse are 0. dbias (3C) is fp32 (data NULL: frozen): sums of dqkv as it is stored, on
 * Hopper before it is rounded.
 *
 * CPU: the scores of one head a thread at a time in the workspace, GEMMs on slices of qkv in place.
 *
 * Sources: Vaswani et al., arXiv:1706.03762, equation 1; delta as in Dao et al., FlashAttention,
 * arXiv:2205.14135, appendix B.2.
 */
#ifndef ENGINE_OPS_ATTENTION_H
#define ENGINE_OPS_ATTENTION_H

#include "engine/ops/ops.h"

C_BEGIN

size_t attention_workspace_bytes_cpu(const struct op_limits *limits, int threads);

enum status attention_forward_cpu(struct stream *s, struct tensor out, struct tensor lse,
                                  struct tensor qkv, const struct sequences *q, int heads,
                                  struct dropout drop);
enum status attention_backward_cpu(struct stream *s, struct tensor dqkv, struct tensor dbias,
                                   struct tensor dout, struct tensor out, struct tensor lse,
                                   struct tensor qkv, const struct sequences *q, int heads,
                                   struct dropout drop, bool add);

C_END

#endif
