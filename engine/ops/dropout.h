/*
 * engine/ops/dropout.h - which elements dropout keeps, and dropout as an op of its own.
 *
 * engine/base/rng.h gives the counters. The factor of an element is 0 or 1 / (1 - p), with p in
 * steps of 2^-15; it is computed where it is needed, forward and backward, and never stored
 * between them. Where a norm or attention stands beside dropout it is a part of that op; where
 * nothing does:
 *
 *     out[t, c] = factor x[t, c],  element = position * C + c
 *
 * which is its own gradient: backward applies it to dout. x, out (T, C). Rows of no sequence: 0. In
 * evaluation and with p = 0 all factors are 1.
 */
#ifndef ENGINE_OPS_DROPOUT_H
#define ENGINE_OPS_DROPOUT_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/rng.h"
#include "engine/ops/ops.h"

C_BEGIN

struct dropout_key {
    bool on;
    uint64_t seed;
    uint32_t step, layer_site, threshold;
    float scale;
};

/** dropout_key() - read the step state; call it where the state's memory can be read. */
HOST_DEVICE static inline struct dropout_key dropout_key(struct dropout d)
{
    struct dropout_key k;
    k.on = d.p > 0.0f && d.state->host.training != 0;
    k.seed = k.on ? d.state->host.seed : 0;
    k.step = k.on ? (uint32_t)d.state->host.step : 0;
    k.layer_site = d.layer_site;
    k.threshold = dropout_threshold(d.p);
    k.scale = dropout_scale(k.threshold);
    return k;
}

/** dropout_factors() - factors of @n elements of @sample from element @first on; CPU. */
void dropout_factors(float *out, const struct dropout_key *k, int32_t sample, int64_t first,
                     int64_t n);

/** dropout_multiply() - out[i] = x[i] * factor[i], i < @n; CPU. @out may be @x. */
void dropout_multiply(float *out, const float *x, const float *factor, int64_t n);

enum status dropout_apply_cpu(struct stream *s, struct tensor out, struct tensor x,
                              const struct sequences *q, struct dropout drop);

C_END

#endif
