#include "engine/train/fit.h"

#include <limits.h>
#include <string.h>

enum { MICRO_BATCH_MAX = 1 << 20 /* of the configuration */, CHECKPOINT_STATES = 3 };
enum { START = 8, SHORT = 3 /* micro-batches of a step */ };

/* ---- one candidate ---- */

static struct run_config candidate(const struct fit_question *q, int stage, int64_t micro_batch)
{
    struct run_config c = *q->config;
    c.train.ranks = q->world_size;
    c.train.zero_stage = stage;
    c.train.micro_batch = micro_batch;
    return c;
}

static enum status set_up(struct setup *setup, const struct fit_question *q, int stage,
                          int64_t micro_batch)
{
    struct run_config c = candidate(q, stage, micro_batch);
    return setup_init(setup, &c, q->device, q->world_size, stage, q->rows);
}

/* @most_micro_batches: of a step; fewer make a shorter program. */
static enum status account_of(struct account *account, const struct fit_question *q, int stage,
                              int64_t micro_batch, int most_micro_batches)
{
    struct setup setup;
    TRY(set_up(&setup, q, stage, micro_batch));
    if (setup.spec.micro_batches > most_micro_batches)
        setup.spec.micro_batches = most_micro_batches;
    enum status st = plan_account(account, &setup.spec);
    setup_release(&setup);
    return st;
}

static enum status forecast_of(double *seconds, const struct fit_question *q,
                               const struct setup *setup, const struct program *step)
{
    struct forecast forecast = {0};
    struct simulate_world world = {q->world_size, q->nodes, 1};
    TRY(forecast_step(&forecast, setup, step, q->machine, world, forecast_batch(setup)));
    *seconds = forecast.seconds;
    return ST_OK;
}

/* What takes the whole plan: its bytes, those that are sent in a step, the time. */
static enum status add_step(struct fit *fit, const struct fit_question *q)
{
    struct setup setup;
    struct plan plan = {0};
    enum status st = ST_OK;
    TRY(set_up(&setup, q, fit->stage, fit->micro_batch));
    TRY_GOTO(st, out, plan_build(&plan, &fit->account, &setup.spec));
    const struct program *step = &plan.programs[PROGRAM_STEP];
    fit->sent_bytes = program_collective_bytes(step, OP_GATHER, q->world_size) +
                      program_collective_bytes(step, OP_REDUCE, q->world_size);
    if (q->machine != NULL)
        TRY_GOTO(st, out, forecast_of(&fit->step_seconds, q, &setup, step));
out:
    plan_release(&plan);
    setup_release(&setup);
    return st;
}

/* ---- the largest ---- */

/* No larger one is allowed, or can fit: a row has at least its hidden states. */
static int64_t largest_candidate(const struct fit_question *q, bool *limited)
{
    int64_t row = q->config->model.hidden * (int64_t)dtype_bytes(q->device->param_dtype);
    int64_t by_room = (int64_t)q->room_bytes / (row * q->config->data.max_length) + 1;
    int64_t allowed = INT32_MAX / (q->config->train.grad_accum * q->world_size);
    allowed = allowed < MICRO_BATCH_MAX ? allowed : MICRO_BATCH_MAX;
    *limited = allowed <= by_room;
    return *limited ? allowed : by_room;
}

struct point {
    int64_t at;
    size_t bytes;
};

/* Where a line through two points comes to @room, between @lo, which fits, and @hi, which does not:
 * the arena is nearly linear in the micro-batch. */
static int64_t next_candidate(struct point lo, struct point other, int64_t hi, size_t room)
{
    double slope = ((double)other.bytes - (double)lo.bytes) / (double)(other.at - lo.at);
    double guess = slope > 0 ? (double)lo.at + (double)(room - lo.bytes) / slope : (double)hi;
    if (guess >= (double)hi)
        return hi - 1;
    return guess > (double)lo.at + 1 ? (int64_t)guess : lo.at + 1;
}

/* Ends with @fit->micro_batch, which fits, and one more, which does not: also where the arena is
 * not monotone, for its placing is no exact art. @lo fits, @hi does not. */
static enum status search(struct fit *fit, const struct fit_question *q, struct point lo,
                          int64_t hi, int64_t next, int most_micro_batches)
{
    enum { HALVE_EVERY = 4 };
    struct point other;
    for (int turn = 1; hi - lo.at > 1; turn++) {
        struct account account;
        if (next >= hi)
            next = hi - 1;
        TRY(account_of(&account, q, fit->stage, next, most_micro_batches));
        if (account.arena_bytes <= q->room_bytes) {
            other = lo;
            lo = (struct point){next, account.arena_bytes};
            fit->account = account;
        } else {
            hi = next;
            other = (struct point){next, account.arena_bytes};
        }
        next = turn % HALVE_EVERY == 0 ? lo.at + (hi - lo.at) / 2
                                       : next_candidate(lo, other, hi, q->room_bytes);
    }
    fit->micro_batch = lo.at;
    return ST_OK;
}

/* The answer for a short program, for the whole one: micro-batches behind the third hardly ever
 * need other memory. Return with the whole plan of @fit->micro_batch. @hi: more is not allowed. */
static enum status confirm(struct fit *fit, const struct fit_question *q, int64_t hi)
{
    struct account account;
    int64_t at = fit->micro_batch;
    struct point one = {1, 0};
    TRY(add_step(fit, q));
    if (q->config->train.grad_accum <= SHORT)
        return ST_OK;
    if (at > 1 && fit->account.arena_bytes > q->room_bytes) {
        TRY(account_of(&account, q, fit->stage, 1, INT_MAX));
        one.bytes = account.arena_bytes;
        TRY(search(fit, q, one, at, at - 1, INT_MAX));
        return add_step(fit, q);
    }
    if (at + 1 == hi)
        return ST_OK;
    TRY(account_of(&account, q, fit->stage, at + 1, INT_MAX));
    if (account.arena_bytes > q->room_bytes)
        return ST_OK;
    TRY(search(fit, q, (struct point){at + 1, account.arena_bytes}, hi, at + 2, INT_MAX));
    return add_step(fit, q);
}

/* With one micro-batch: whether it is allowed, and fits. */
static enum status begin(struct fit *fit, const struct fit_question *q, int stage,
                         int64_t micro_batch, int most_micro_batches)
{
    struct run_config c = candidate(q, stage, micro_batch);
    *fit = (struct fit){.stage = stage, .micro_batch = micro_batch};
    if (config_check(&c) != ST_OK)
        return ST_OK;
    TRY(account_of(&fit->account, q, stage, micro_batch, most_micro_batches));
    fit->allowed = true;
    fit->fits = fit->account.arena_bytes <= q->room_bytes;
    return ST_OK;
}

enum status fit_largest(struct fit *fit, const struct fit_question *q, int stage, int64_t hint)
{
    bool limited = false;
    ASSERT(q->rows.train == 0); /* they are of one micro-batch */
    TRY(begin(fit, q, stage, 1, SHORT));
    if (!fit->allowed)
        return ST_OK;
    if (!fit->fits)
        return add_step(fit, q);
    int64_t most = largest_candidate(q, &limited);
    struct point one = {1, fit->account.arena_bytes};
    TRY(search(fit, q, one, most + 1, hint > 1 ? hint : START, SHORT));
    TRY(confirm(fit, q, most + 1));
    fit->fits = fit->account.arena_bytes <= q->room_bytes;
    fit->limited = limited && fit->micro_batch == most;
    return ST_OK;
}

enum status fit_given(struct fit *fit, const struct fit_question *q, int stage)
{
    TRY(begin(fit, q, stage, q->config->train.micro_batch, INT_MAX));
    return fit->allowed ? add_step(fit, q) : ST_OK;
}

static double per_sequence(double step, const struct fit *f)
{
    return step / (double)f->micro_batch;
}

/* Is @a, of a higher stage, to be preferred to @b? */
static bool is_faster(const struct fit *a, const struct fit *b)
{
    const double clearly = 0.999; /* no prediction is better than that */
    double time = per_sequence(a->step_seconds, a), other = per_sequence(b->step_seconds, b);
    if (time > 0)
        return time < clearly * other;
    time = per_sequence((double)a->sent_bytes, a);
    other = per_sequence((double)b->sent_bytes, b);
    return time < other || (!(other < time) && a->micro_batch > b->micro_batch);
}

const struct fit *fit_fastest(const struct fit *fits, int count)
{
    const struct fit *best = NULL;
    for (int i = 0; i < count; i++)
        if (fits[i].fits && (best == NULL || is_faster(&fits[i], best)))
            best = &fits[i];
    return best;
}

enum status fit_copy_bytes(size_t *bytes, const struct fit_question *q)
{
    struct setup setup;
    *bytes = 0;
    if (q->device->fixed_rows || q->config->checkpoint.every == 0)
        return ST_OK;
    TRY(set_up(&setup, q, 0, 1));
    for (int u = 0; u < setup.layout.unit_count; u++) {
        const struct layout_unit *unit = &setup.layout.units[u];
        *bytes +=
            sizeof(float) * (size_t)unit->shard_numel * (unit->frozen ? 1 : CHECKPOINT_STATES);
    }
    setup_release(&setup);
    return ST_OK;
}

enum status fit_beside_bytes(size_t *bytes, const struct fit_question *q)
{
    TRY(fit_copy_bytes(bytes, q));
    *bytes += q->device->fixed_rows ? FIT_BESIDE_CARD : FIT_BESIDE_PROCESS;
    return ST_OK;
}
