/*
 * engine/ops/adamw.h - AdamW with decoupled weight decay on one shard.
 *
 *     g = clip grad
 *     p = p - lr wd p                             only in ranges that decay
 *     m = m + (1 - beta1) (g - m)
 *     v = beta2 v + (1 - beta2) g^2
 *     p = p - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
 *
 * in this order and in fp32, as PyTorch computes it (on CUDA with an approximate root and quotient,
 * adamw.cu); the scalars are made in double and rounded once. p are the master weights, fp32, so
 * small steps are not lost: the parameters where these are fp32, else what they and the lower
 * halves give together (master.h: the parameter is the master rounded to nearest, ties away from
 * zero). Frozen ranges are left alone, and everything is when state->skip is set. The gradient of a
 * marked row of a table is zero (ops.h).
 *
 * Source: Loshchilov and Hutter, arXiv:1711.05101, algorithm 2 (its schedule factor is in lr).
 */
#ifndef ENGINE_OPS_ADAMW_H
#define ENGINE_OPS_ADAMW_H

#include <math.h>

#include "engine/base/rng.h"
#include "engine/ops/ops.h"

C_BEGIN

struct adam_factors {
    float clip, keep, one_minus_beta1, beta2, one_minus_beta2, step_size, eps;
    float root_correction2, inverse_root; /* sqrt(1 - beta2^t), for CPUs; 1 over it, for CUDA */
};

/** adam_factors() - the scalars above; keep = 1 - lr wd. Call it where @state can be read. */
HOST_DEVICE static inline struct adam_factors adam_factors(const struct step_state *state,
                                                           const struct optim_hyper *hyper)
{
    struct adam_factors f;
    f.clip = state->clip;
    f.keep = (float)(1.0 - (double)state->lr * (double)hyper->weight_decay);
    f.one_minus_beta1 = (float)(1.0 - (double)hyper->beta1);
    f.beta2 = hyper->beta2;
    f.one_minus_beta2 = (float)(1.0 - (double)hyper->beta2);
    f.step_size = (float)((double)state->lr / (double)state->correction1);
    double root = sqrt((double)state->correction2);
    f.root_correction2 = (float)root;
    f.inverse_root = (float)(1.0 / root);
    f.eps = hyper->eps;
    return f;
}

enum status adamw_cpu(struct stream *s, struct tensor param, struct tensor low, struct tensor m,
                      struct tensor v, struct tensor grad, const struct adam_range *ranges,
                      int range_count, int64_t row_numel, const struct step_state *state,
                      const struct optim_hyper *hyper);

C_END

#endif
