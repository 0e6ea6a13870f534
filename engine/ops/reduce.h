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

/** step_slot() - the slot of @mail that a step uses which begins, or is under way, in @state. */
HOST_DEVICE static inline struct step_slot_mail step_slot(const struct step_mail *mail,
                                                          const struct step_state *state)
{
    return state->turn % STEP_SLOTS ? mail->slot[1] : mail->slot[0];
}

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

enum step_rate { RATE_LR, RATE_CORRECTION1, RATE_CORRECTION2, STEP_RATES };

/** step_rate() - of the step behind @k applied ones; on a GPU they are made side by side. */
HOST_DEVICE static inline float step_rate(const struct optim_hyper *hyper, int64_t k, int which)
{
    if (which == RATE_LR)
        return (float)(schedule_factor(hyper, k) * (double)hyper->lr);
    double beta = (double)(which == RATE_CORRECTION1 ? hyper->beta1 : hyper->beta2);
    return (float)(1.0 - pow(beta, (double)(k + 1)));
}

/** step_agree() - the rest of AGREE, for the CPU and for one GPU thread. @rates: of state->t. */
HOST_DEVICE static inline void step_agree(struct step_state *state,
                                          const struct step_report *reports, int world_size,
                                          const struct optim_hyper *hyper,
                                          const float rates[STEP_RATES])
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
    state->lr = rates[RATE_LR];
    state->correction1 = rates[RATE_CORRECTION1];
    state->correction2 = rates[RATE_CORRECTION2];
    state->t = state->skip ? k : k + 1;
    state->turn++;
}

enum status accumulate_cpu(struct stream *s, struct tensor out, struct tensor in, bool add);
enum status cast_cpu(struct stream *s, struct tensor out, struct tensor in);
enum status squared_norm_cpu(struct stream *s, struct step_report *report, struct tensor g);
enum status squared_norm_rows_cpu(struct stream *s, struct step_report *report, struct tensor g,
                                  const struct sequences *q, int64_t first_row);
enum status step_begin_cpu(struct stream *s, struct step_report *report, struct step_state *state,
                           const struct step_mail *mail);
enum status agree_cpu(struct stream *s, struct step_state *state, const struct step_report *reports,
                      int world_size, const struct optim_hyper *hyper,
                      const struct step_mail *mail);

C_END

#endif
