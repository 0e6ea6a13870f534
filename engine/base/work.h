/*
 * engine/base/work.h - what a unit's passes do, for predictions of time (shard/simulate.h) and MFU.
 *
 * A model's unit says it (engine/model/model.h); rates of a machine turn it into seconds. Multiply
 * and add count as two operations. The bytes are those of what is no matrix product: norms,
 * activation functions, look-ups, sums with the residual; each operand once.
 */
#ifndef ENGINE_BASE_WORK_H
#define ENGINE_BASE_WORK_H

#include "engine/base/status.h"

C_BEGIN

struct pass_work {
    double product_flops;   /* of linear layers */
    double attention_flops; /* of q k^T and of the sum over v, and their gradients */
    double bytes;
    int attention_calls; /* of a forward; a backward counts as two, or none beside other work */
    int kernels;         /* that a GPU starts; each takes some time, whatever it does */
};

/* Of one micro-batch on one rank. */
struct unit_work {
    struct pass_work forward, backward;
};

C_END

#endif
