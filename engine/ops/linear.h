/*
 * engine/ops/linear.h - the affine map, three GEMMs.
 *
 *     forward          y (T, N) = x (T, K) w (N, K)^T + bias (N)
 *     backward_data    dx (T, K) = [dx +] dy (T, N) w (N, K)
 *     backward_weight  dw (N, K) = [dw +] dy^T x
 *
 * bias.data NULL: no bias; its gradient, the column sums of dy, is made by the op that makes dy
 * (norm.h, gelu.h, attention.h), while it has dy at hand. dw.data NULL: frozen. T = 0 zeroes (or
 * keeps) dw. CPU: cblas_sgemm.
 */
#ifndef ENGINE_OPS_LINEAR_H
#define ENGINE_OPS_LINEAR_H

#include "engine/ops/ops.h"

C_BEGIN

enum status linear_forward_cpu(struct stream *s, struct tensor y, struct tensor x, struct tensor w,
                               struct tensor bias);
enum status linear_backward_data_cpu(struct stream *s, struct tensor dx, struct tensor dy,
                                     struct tensor w, bool add);
enum status linear_backward_weight_cpu(struct stream *s, struct tensor dw, struct tensor dy,
                                       struct tensor x, bool add);

C_END

#endif
