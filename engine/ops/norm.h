/*
 * engine/ops/norm.h - layer normalisation with what stands before and after it in BERT.
 *
 *     embedding_norm   z = x + position[i] + type[token_type],  out = dropout(norm(z))
 *     residual_norm    z = x + dropout(y),                      out = norm(z)
 *
 *     norm(z) = gamma xhat + beta,  xhat = (z - mean) r,  r = 1 / sqrt(variance + eps)
 *
 * over the C channels of a row; the variance divides by C. Backward, with g = gamma dout and means
 * over the row:
 *
 *     dz = r (g - mean(g) - xhat mean(g xhat)),  dgamma = sum_t dout xhat,  dbeta = sum_t dout
 *     residual: dx = dz,  dy = dropout(dz),  dbias = sum_t dy (of the linear layer that made y)
 *
 * x, y, z, out (T, C); stats (2, T) fp32: mean, r; gamma, beta, dbias (C); position (P, C); type
 * (types, C), or data NULL: no token types, and no such term. Rows of no sequence: out, z, stats,
 * dx and dy are 0 and add nothing to the gradients. Weight gradients with data NULL are not
 * computed.
 *
 * CPU: two passes for mean and variance; dgamma, dbeta and dbias in blocks of 32 rows, in row
 * order; dposition in row order.
 *
 * Source: Ba, Kiros and Hinton, "Layer normalization", arXiv:1607.06450, equation 3; the gradient
 * is derived from it.
 */
#ifndef ENGINE_OPS_NORM_H
#define ENGINE_OPS_NORM_H

#include "engine/ops/ops.h"

C_BEGIN

size_t norm_workspace_bytes_cpu(const struct op_limits *limits, int threads);

enum status embedding_norm_forward_cpu(struct stream *s, struct tensor out, struct tensor z,
                                       struct tensor stats, struct tensor x, struct tensor position,
                                       struct tensor type, struct tensor gamma, struct tensor beta,
                                       const struct sequences *q, float eps, struct dropout drop);
enum status embedding_norm_backward_cpu(struct stream *s, struct tensor dx, struct tensor dposition,
                                        struct tensor dtype_table, struct tensor dgamma,
                                        struct tensor dbeta, struct tensor dout, struct tensor z,
                                        struct tensor stats, struct tensor gamma,
                                        const struct sequences *q, struct dropout drop, bool add);
enum status residual_norm_forward_cpu(struct stream *s, struct tensor out, struct tensor z,
                                      struct tensor stats, struct tensor x, struct tensor y,
                                      struct tensor gamma, struct tensor beta,
                                      const struct sequences *q, float eps, struct dropout drop);
enum status residual_norm_backward_cpu(struct stream *s, struct tensor dx, struct tensor dy,
                                       struct tensor dgamma, struct tensor dbeta,
                                       struct tensor dbias, struct tensor dout, struct tensor z,
                                       struct tensor stats, struct tensor gamma,
                                       const struct sequences *q, struct dropout drop, bool add);

C_END

#endif
