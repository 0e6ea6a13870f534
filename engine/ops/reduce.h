/*
 * engine/ops/reduce.h - sums, casts, and the one report a step.
 *
 * squared_norm sums squares in double (at most 64 parts of 8 lanes, one fixed tree), so neither
 * large nor many values overflow it; n = 0 adds nothing. squared_norm_rows adds the rows of a
 * table's gradient that tokens have touched, each once.
 *
 * AGREE sums the ranks' reports in rank order. With k the number of steps applied before this one:
 *
 *     factor(k) = k / max(1, warmup)                                          for k < warmup, then
 *       linear    max(0, (total - k) / max(1, total - warmup))
 *       cosine    max(0, (1 + cos(pi (k - warmup) / max(1, total - warmup))) / 2)
 *       constant  1
 *     lr = factor(k) lr;  t = k + 1 if the step is applied, else k
 *     clip = min(1, max_grad_norm / (grad_norm + 1e-6)), or 1 if max_grad_norm is 0
 *     correction = 1 - beta^(k + 1)
 *
 * computed in double and rounded once. The factors are those of the Hugging Face schedules (with
 * warm-up the first step has lr 0), clip is that of torch.nn.utils.clip_grad_norm_. lr depends on
 * k alone, never on the world size. skip: a rank's gradient, or the norm, is not finite; then clip
 * is 1 and lr is what the step would have used.
 */
#ifndef ENGINE_OPS_REDUCE_H
#define ENGINE_OPS_REDUCE_H

#include <math.h>

#include "engine/base/rng.h"
#include "engine/ops/ops.h"

C_BEGIN

/** schedule_factor() - factor(k) above. */
HOST_DEVICE static inline double schedule_factor(const struct optim_hyper *hyper, int64_t k)
{
    int64_t warmup = hyper->warmup_steps, total = hyper->total_steps;
    double rest = (double)(total - warmup > 1 ? total - warmup : 1), factor = 1.0;
    if (k < warmup)
        return (double)k / (double)(warmup > 1 ? warmup : 1);
    if (hyper->schedule == SCHEDULE_LINEAR)
        factor = (double)(total - k) / rest;
    else if (hyper->schedule == SCHEDULE_COSINE)
        factor = 0.5 * (1.0 + cos(3.14159265358979323846 * ((double)(k - warmup) / rest)));
    return factor > 0.0 ? factor : 0.0;
}

/** step_agree() - the whole of AGREE, for the CPU and for one GPU thread. */
HOST_DEVICE static inline void step_agree(struct step_state *state,
                                          const struct step_report *reports, int world_size,
                                          const struct optim_hyper *hyper)
{
    double loss = 0, squared = 0;
    int finite = 1;
    state->sequences = state->tokens = 0;
    state->stop = state->signal = 0;
    state->agreed = 1;
    state->saved = reports[0].saved;
    for (int r = 0; r < world_size; r++) {
        const struct step_report *x = &reports[r];
        loss += x->loss_sum;
        squared += x->squared_norm;
        state->sequences += x->sequences;
        state->tokens += x->tokens;
        finite &= x->finite;
        state->stop |= x->stop;
        state->signal = state->signal ? state->signal : x->signal;
        state->agreed &= x->step == (int32_t)state->host.step;
        state->saved = x->saved < state->saved ? x->saved : state->saved;
    }
    double norm = sqrt(squared), clip = 1.0;
    int64_t k = state->t; /* applied before this step */
    state->skip = !finite || !(norm <= 1.7976931348623157e308);
    if (!state->skip && hyper->max_grad_norm > 0.0f)
        clip = (double)hyper->max_grad_norm / (norm + 1e-6);
    state->loss = state->sequences > 0 ? loss / (double)state->sequences : 0.0;
    state->grad_norm = norm;
    state->clip = clip < 1.0 ? (float)clip : 1.0f;
    state->lr = (float)(schedule_factor(hyper, k) * (double)hyper->lr);
    state->correction1 = (float)(1.0 - pow((double)hyper->beta1, (double)(k + 1)));
    state->correction2 = (float)(1.0 - pow((double)hyper->beta2, (double)(k + 1)));
    state->t = state->skip ? k : k + 1;
}

enum status accumulate_cpu(struct stream *s, struct tensor out, struct tensor in, bool add);
enum status cast_cpu(struct stream *s, struct tensor out, struct tensor in);
enum status squared_norm_cpu(struct stream *s, struct step_report *report, struct tensor g);
enum status squared_norm_rows_cpu(struct stream *s, struct step_report *report, struct tensor g,
                                  const struct sequences *q, int64_t first_row);
enum status report_begin_cpu(struct stream *s, struct step_report *report,
                             const struct step_state *state);
enum status agree_cpu(struct stream *s, struct step_state *state, const struct step_report *reports,
                      int world_size, const struct optim_hyper *hyper);

C_END

#endif
