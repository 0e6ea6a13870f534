/*
 * engine/ops/span.h - the question answering head: start and end logits and their loss.
 *
 *     logits (T, 2) = x (T, C) w (2, C)^T + bias (2), fp32
 *     dx = dlogits w,  dw = dlogits^T x,  dbias = column sums of dlogits
 *
 *     loss_b = (lse(S_b) - S_b[start] + lse(E_b) - E_b[end]) / 2 over the rows of sequence b
 *     dlogits = inv_count / 2 (softmax - one-hot)
 *
 * S_b, E_b are the columns of logits in the rows of b (all its rows, also those that are no keys,
 * as in the reference models). Rows of no sequence get 0. Sequences of no rows do not count. Labels
 * lie in [0, rows of b): asserted, the reader of the data guarantees it.
 *
 * Source: Devlin et al., BERT, arXiv:1810.04805, section 4.2.
 */
#ifndef ENGINE_OPS_SPAN_H
#define ENGINE_OPS_SPAN_H

#include "engine/ops/ops.h"

C_BEGIN

size_t span_workspace_bytes_cpu(const struct op_limits *limits);

enum status span_logits_forward_cpu(struct stream *s, struct tensor logits, struct tensor x,
                                    struct tensor w, struct tensor bias, const struct sequences *q);
enum status span_logits_backward_cpu(struct stream *s, struct tensor dx, struct tensor dw,
                                     struct tensor dbias, struct tensor dlogits, struct tensor x,
                                     struct tensor w, const struct sequences *q, bool add);
enum status span_loss_cpu(struct stream *s, struct tensor dlogits, struct step_report *report,
                          struct tensor logits, const struct sequences *q,
                          const struct step_state *state);

C_END

#endif
