/*
 * engine/ops/gelu.h - the Gaussian error linear unit, by erf.
 *
 *     forward    out = pre Phi(pre),  Phi(x) = (1 + erf(x / sqrt 2)) / 2
 *     backward   dpre = dout (Phi(pre) + pre phi(pre)),  phi(x) = exp(-x^2 / 2) / sqrt(2 pi)
 *                act = gelu(pre),  dbias = [dbias +] column sums of dpre
 *
 * Forward takes tensors of any one shape, backward (T, F), dbias (F). A linear layer stands before
 * it, whose bias gradient is dbias, and one behind it, whose weight gradient takes act: backward
 * reads pre and dout once and makes all that the two need, and forward's output need not be kept:
 * act has its bits. Where it was kept, act.data is NULL. dpre may be dout, act may be pre.
 *
 * CPU: engine/ops/lanes.h; the forward error is below 6 ulp of the result for |pre| <= 13, the
 * backward one below 4 * 2^-24 * max(|gelu'|, 1).
 *
 * Source: Hendrycks and Gimpel, "Gaussian error linear units", arXiv:1606.08415, section 2.
 */
#ifndef ENGINE_OPS_GELU_H
#define ENGINE_OPS_GELU_H

#include "engine/ops/ops.h"

C_BEGIN

enum status gelu_forward_cpu(struct stream *s, struct tensor out, struct tensor pre);
enum status gelu_backward_cpu(struct stream *s, struct tensor dpre, struct tensor act,
                              struct tensor dbias, struct tensor dout, struct tensor pre, bool add);

C_END

#endif
