/*
 * tests/support/halves.h - master weights in halves (engine/ops/master.h) beside whole ones.
 */
#ifndef TESTS_SUPPORT_HALVES_H
#define TESTS_SUPPORT_HALVES_H

#include "tests/support/ops.h"

C_BEGIN

/** halves_masters() - @n floats: normal values, ties, subnormals, infinities, both zeros. */
float *halves_masters(struct op_test *t, int64_t n);

/** halves_split() - op_master_split() of @n of them, with and without lower halves, against
 * master_put(). */
void halves_split(struct op_test *t, int64_t n);

/**
 * halves_step() - op_adamw() on @n masters in halves leaves the bits that it leaves on whole ones.
 * @row_numel: rows of a table, of which some are marked; 0: none is.
 * @shift: first element of the tensors that is used: 1 is no address of a pack.
 * @state: on the device. Some ranges decay, one is frozen; some m, v and gradients are zero.
 */
void halves_step(struct op_test *t, int64_t n, int64_t row_numel, int64_t shift,
                 const struct step_state *state, const struct optim_hyper *hyper);

C_END

#endif
