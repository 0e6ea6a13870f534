/*
 * engine/train/lr_sweep.h - a learning rate from one short run (tessera lr-find).
 *
 * Step k of n trains with lr = from (to / from)^(k / (n - 1)); its loss is that before the update.
 *
 *     loss  ----.__                          /      smoothed: the mean of all losses so far, each
 *                  `-._                     /       0.98 times lighter than the next (divided by
 *                      `-.        __.___.--'        1 - 0.98^(k + 1), the sum of these weights)
 *                         `-.__.-'
 *           from        ^ suggested        to       lr, logarithmic
 *
 * Suggested is the rate at which the smoothed loss falls most steeply: the least of the central
 * differences over steps, without the first ten and the last. The sweep ends early when the
 * smoothed loss is more than four times its least so far, or a loss is not finite.
 *
 * Sources: Smith, "Cyclical learning rates for training neural networks", arXiv:1506.01186, 3.3;
 * smoothing, limits and the rule of the steepest point are those of Lightning's lr_find.
 */
#ifndef ENGINE_TRAIN_LR_SWEEP_H
#define ENGINE_TRAIN_LR_SWEEP_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/status.h"

C_BEGIN

enum { LR_SWEEP_MIN_STEPS = 20, LR_SWEEP_SKIP = 10 };

struct lr_point {
    double lr, loss, smoothed;
};

struct lr_sweep { /* zero-initialise */
    double from, to;
    int64_t steps;
    struct lr_point *points; /* owned; steps */
    int64_t count;           /* points that there are */
    double mean, best;       /* without the division; the least smoothed loss */
    bool diverged;
};

/** lr_sweep_init() - @from < @to, @steps >= LR_SWEEP_MIN_STEPS. ST_OK; ST_MEMORY. */
MUST_CHECK enum status lr_sweep_init(struct lr_sweep *s, double from, double to, int64_t steps);
void lr_sweep_release(struct lr_sweep *s);

/** lr_sweep_at() - the rate of a step. */
double lr_sweep_at(const struct lr_sweep *s, int64_t step);

/** lr_sweep_add() - the next step's loss; false: the sweep is over, and later ones are ignored. */
bool lr_sweep_add(struct lr_sweep *s, double lr, double loss);

/** lr_sweep_suggest() - the point with the suggested rate; -1: too few, or the loss never falls. */
int64_t lr_sweep_suggest(const struct lr_sweep *s);

C_END

#endif
