/* The steps of a run, and the evaluations and saves between them; trainer.c opens and closes it. */
#include <inttypes.h>

#include "engine/base/arena.h"
#include "engine/base/clock.h"
#include "engine/base/file.h"
#include "engine/base/log.h"
#include "engine/train/checkpoint.h"
#include "engine/train/evaluate.h"
#include "engine/train/growth.h"
#include "engine/train/interrupt.h"
#include "engine/train/trainer.h"
#include "engine/train/weights.h"

/* ---- steps ---- */

/* Tokens of all ranks' rows, for tables that are moved by rows. */
static void fill_ranks(struct trainer *t, struct step_slot *slot, int m)
{
    const struct batch_layout *l = &t->setup.train_batch;
    int64_t rows = sampler_class(&t->sampler, m);
    for (int r = 0; r < l->ranks; r++) {
        int64_t count = sampler_take(&t->sampler, r, m, t->picked);
        batch_fill_rank(l, slot->block, m, r, rows, &t->data->train.features, t->picked, count);
    }
    batch_order_ranks(l, slot->block, m, rows, t->sort_scratch);
}

static int64_t fill_micro_batches(struct trainer *t, struct step_slot *slot)
{
    const struct batch_layout *l = &t->setup.train_batch;
    char *block = executor_shared(&t->executor, SHARED_BATCH);
    int64_t tokens = 0;
    for (int m = 0; m < t->config->train.grad_accum; m++) {
        int64_t count = sampler_take(&t->sampler, t->comm->rank, m, t->picked);
        int64_t rows = batch_fill(l, slot->block, m, &t->data->train.features, t->picked, count,
                                  t->sort_scratch);
        tokens += rows;
        if (l->ranks > 0)
            fill_ranks(t, slot, m);
        if (t->device->fixed_rows)
            rows = sampler_class(&t->sampler, m);
        t->micro[m] = batch_view(l, block, m, rows, sampler_class(&t->sampler, m));
    }
    return tokens;
}

enum status trainer_trace(struct trainer *t, const struct trace_request *request)
{
    if (request->path == NULL)
        return ST_OK;
    if (t->total_steps == 0)
        return FAIL(INVALID, "--trace: this run has no training steps");
    TRY(file_make_folder_of(request->path)); /* hours may pass before it is written */
    t->trace_path = request->path;
    t->trace_step = (request->step < t->total_steps ? request->step : t->total_steps) - 1;
    if (t->trace_step < t->first_step) /* done before the checkpoint */
        t->trace_step = t->first_step;
    return trace_open(&t->trace, t->device, &t->plan.programs[PROGRAM_STEP], &t->setup.model);
}

static enum status run_traced(struct trainer *t, int64_t step, int64_t tokens)
{
    struct trace_facts facts = {.rank = t->comm->rank,
                                .world_size = t->comm->world_size,
                                .step = step + 1,
                                .tokens = tokens,
                                .captured = t->executor.captured_count > 0};
    t->executor.trace = t->trace;
    enum status st = executor_run(&t->executor, PROGRAM_STEP, t->micro, NULL);
    t->executor.trace = NULL;
    TRY(st);
    TRY(trace_write(t->trace, t->trace_path, &facts));
    log_info("train", "wrote the time line of step %" PRId64 " to %s", step + 1, t->trace_path);
    return ST_OK;
}

enum status trainer_profile(struct trainer *t, int64_t steps)
{
    enum { WARM_UP = 2, OPS_OF_INSTR = 64 /* a block's backward has about 20 */ };
    int64_t left = t->total_steps - t->first_step;
    if (steps == 0)
        return ST_OK;
    if (left < 1)
        return FAIL(INVALID, "--profile: this run has no training steps");
    t->profile_steps = steps < left ? steps : left;
    TRY(mem_alloc(&t->squared, sizeof *t->squared * (size_t)t->config->train.grad_accum));
    TRY(op_profile_open(&t->profile, t->device,
                        t->plan.programs[PROGRAM_STEP].instr_count * OPS_OF_INSTR));
    int64_t warm_up = left - t->profile_steps < WARM_UP ? left - t->profile_steps : WARM_UP;
    t->profile->first_step = t->first_step + warm_up;
    return ST_OK;
}

/* This rank's part of a step's work; its micro-batches' sums of squared lengths in t->squared. */
static double rank_flops(struct trainer *t)
{
    int64_t tokens = 0;
    double squared = 0;
    for (int m = 0; m < t->config->train.grad_accum; m++) {
        int64_t count = sampler_take(&t->sampler, t->comm->rank, m, t->picked);
        t->squared[m] = 0;
        for (int64_t i = 0; i < count; i++) {
            int64_t length = t->sampler.lengths[t->picked[i]];
            tokens += length;
            t->squared[m] += (double)length * (double)length;
        }
        squared += t->squared[m];
    }
    return model_step_flops(&t->setup.model, tokens, squared);
}

static enum status run_profiled(struct trainer *t)
{
    double flops = rank_flops(t);
    TRY(stream_sync(&t->device->streams[STREAM_COMPUTE]));
    TRY(op_profile_begin(t->profile, t->micro, t->squared, !t->no_update));
    t->executor.issue_all = true;
    enum status st = executor_run(&t->executor, PROGRAM_STEP, t->micro, NULL);
    t->executor.issue_all = false;
    enum status ended = op_profile_end(t->profile, flops);
    TRY(st);
    return ended;
}

static bool is_profiled(const struct trainer *t, int64_t step)
{
    const struct op_profile *p = t->profile;
    return p != NULL && step >= p->first_step && step < p->first_step + t->profile_steps;
}

static double step_flops(const struct trainer *t)
{
    int64_t tokens;
    double squared_lengths;
    sampler_work(&t->sampler, &tokens, &squared_lengths);
    return model_step_flops(&t->setup.model, tokens, squared_lengths);
}

static enum status issue_step(struct trainer *t, int64_t step, int signal)
{
    struct step_slot *slot = trainer_slot(t, step);
    struct stream *s = &t->device->streams[STREAM_COMPUTE];
    int64_t saved = 0;
    ASSERT(slot->step < 0);
    TRY(checkpointer_written(t->checkpointer, &saved));
    if (t->before_step != NULL)
        t->before_step(t->step_context, t, step);
    sampler_enter(&t->sampler, step);
    int64_t tokens = fill_micro_batches(t, slot);
    *slot->host = (struct step_host){
        .seed = (uint64_t)t->config->train.seed,
        .step = step,
        .inv_count = 1.0f / (float)t->sampler.sample_count,
        .stop = signal != 0 ? STOP_SIGNAL : 0,
        .signal = signal,
        .training = 1,
        .tokens = tokens,
        .saved = saved,
    };
    if (t->trace != NULL && step == t->trace_step)
        TRY(run_traced(t, step, tokens));
    else if (is_profiled(t, step))
        TRY(run_profiled(t));
    else
        TRY(executor_run(&t->executor, PROGRAM_STEP, t->micro, NULL));
    t->no_update = false;
    TRY(event_record(&slot->done, s));
    slot->step = step;
    slot->flops = step_flops(t);
    slot->issued_s = clock_s();
    return ST_OK;
}

/* Act on the report of a step; the same on all ranks. */
static enum status finish_step(struct trainer *t, int64_t step, double *last_s)
{
    if (step < t->first_step)
        return ST_OK;
    struct step_slot *slot = trainer_slot(t, step);
    if (slot->step != step)
        return ST_OK;
    TRY(event_wait(&slot->done));
    slot->step = -1;
    t->steps_done = step + 1;
    if (step == 1)
        TRY(card_grown(t, &t->card.first_steps));
    if (step == 1 || t->steps_done == t->total_steps)
        TRY(process_grown(t));
    const struct step_state *r = slot->result;
    if (!r->agreed)
        return FAIL(COMM, "ranks report different steps; this one is at %" PRId64, step);
    /* On the CPU issuing is doing: the report was there before the next step was issued. */
    double now = t->device->asynchronous ? clock_s() : slot->issued_s;
    if (t->metrics != NULL)
        TRY(metrics_step(t->metrics, r, (now - *last_s) * 1e3, slot->flops));
    *last_s = now;
    t->stop |= r->stop;
    if (t->signal == 0)
        t->signal = r->signal;
    t->applied = r->t;
    if (t->after_step != NULL)
        t->after_step(t->step_context, t, r);
    t->skipped_in_row = r->skip ? t->skipped_in_row + 1 : 0;
    TRY(checkpointer_watch(t->checkpointer, t, r->saved));
    if (t->skipped_in_row == NON_FINITE_LIMIT)
        return FAIL(INVALID,
                    "%d steps in a row had a loss or gradient that is not finite, the last is step "
                    "%" PRId64 "; lower optim.lr or look at the data",
                    NON_FINITE_LIMIT, step);
    return ST_OK;
}

/* ---- evaluation and early stopping ---- */

void trainer_watch_gain(struct trainer *t)
{
    if (t->config->eval.stop_metric == STOP_NONE ||
        t->evaluations_without_gain < t->config->eval.stop_patience)
        return;
    t->stop |= STOP_EARLY;
    log_info("train", "no better for %" PRId64 " evaluations: stopping",
             t->evaluations_without_gain);
}

/* The score is on rank 0 alone; its decision is everybody's. */
static enum status watch_metric(struct trainer *t, const struct evaluation *e)
{
    if (t->config->eval.stop_metric == STOP_NONE)
        return ST_OK;
    struct {
        double best;
        int64_t without_gain;
    } now = {metric_value(t->config->eval.stop_metric, e), 0};
    if (!(now.best > t->best_metric)) {
        now.best = t->best_metric;
        now.without_gain = t->evaluations_without_gain + 1;
    }
    TRY(comm_share(t->comm, &now, sizeof now));
    t->best_metric = now.best;
    t->evaluations_without_gain = now.without_gain;
    trainer_watch_gain(t);
    return ST_OK;
}

static enum status evaluate_split(struct trainer *t, const struct split *split, const char *name,
                                  int64_t examples, bool write, bool *better)
{
    struct evaluation e = {.split = name, .step = t->steps_done};
    if (t->sampler.steps_per_epoch > 0)
        e.epoch = (double)t->steps_done / (double)t->sampler.steps_per_epoch;
    const char *dir = write && t->metrics != NULL ? t->config->output.dir : NULL;
    TRY(evaluator_run(t->evaluator, t, split, examples, dir, &e));
    if (t->metrics != NULL)
        TRY(metrics_evaluation(t->metrics, &e));
    if (split != &t->data->eval)
        return ST_OK;
    TRY(watch_metric(t, &e));
    return checkpointer_evaluated(t->checkpointer, t, &e, better);
}

/* Between FLUSH and PROLOGUE. @better: the checkpoint of this step is the best so far. */
static enum status evaluate(struct trainer *t, bool *better)
{
    t->evaluation_pending = true;
    const struct split *train = &t->data->train, *eval = &t->data->eval;
    int64_t trained_on = t->config->eval.train_samples;
    if (trained_on > 0 && train->count > 0)
        TRY(evaluate_split(t, train, "train",
                           trained_on < train->examples ? trained_on : train->examples, false,
                           better));
    if (eval->count > 0)
        TRY(evaluate_split(t, eval, "eval", eval->examples, true, better));
    t->evaluation_pending = false;
    return ST_OK;
}

static bool evaluation_due(const struct trainer *t, int64_t done)
{
    int64_t every = t->config->eval.every;
    if (t->data->eval.count == 0 && t->config->eval.train_samples == 0)
        return false;
    if (done == t->total_steps)
        return true;
    return every > 0 ? done % every == 0 : every == 0 && done % t->sampler.steps_per_epoch == 0;
}

/* Before the first step, and behind a FLUSH. */
static enum status run_prologue(struct trainer *t)
{
    t->no_update = t->plan.late;
    return executor_run(&t->executor, PROGRAM_PROLOGUE, NULL, NULL);
}

/* What is due between two steps; none is under way. A save alone leaves what is carried in place,
 * but an update that is due comes first. */
static enum status between_steps(struct trainer *t, bool evaluates, bool saves)
{
    bool better = false, flushes = evaluates || t->plan.late;
    if (flushes)
        TRY(executor_run(&t->executor, PROGRAM_FLUSH, NULL, NULL));
    if (t->model_dir[0] != '\0' && t->steps_done == t->total_steps && t->writing == NULL)
        TRY(weights_save_begin(&t->writing, t, t->model_dir));
    if (evaluates)
        TRY(evaluate(t, &better));
    if (saves || better)
        TRY(checkpointer_save(t->checkpointer, t));
    return flushes ? run_prologue(t) : ST_OK;
}

static enum status steps(struct trainer *t)
{
    double last_s = clock_s();
    int64_t issued = t->steps_done;
    while (issued < t->total_steps && t->stop == 0) {
        TRY(issue_step(t, issued, interrupt_read(t->signal_flag)));
        TRY(finish_step(t, issued - 1, &last_s));
        issued++;
        bool evaluates = evaluation_due(t, issued),
             saves = checkpointer_due(t->checkpointer, issued);
        t->evaluation_pending |= evaluates; /* also if a stop comes first */
        if (t->stop != 0 || !(evaluates || saves))
            continue;
        TRY(finish_step(t, issued - 1, &last_s));
        TRY(between_steps(t, evaluates, saves));
        last_s = clock_s();
    }
    return finish_step(t, issued - 1, &last_s);
}

/* Before the first step: one that was asked for, or that a signal kept the last run from. */
static bool evaluation_first(const struct trainer *t)
{
    return t->steps_done >= t->total_steps || t->evaluation_pending ||
           (t->config->eval.before && t->steps_done == 0);
}

static enum status run_all(struct trainer *t)
{
    TRY(run_prologue(t));
    if (evaluation_first(t))
        TRY(between_steps(t, true, false));
    TRY(steps(t));
    TRY(card_grown(t, t->steps_done < 2 ? &t->card.first_steps : &t->card.later));
    return executor_run(&t->executor, PROGRAM_FLUSH, NULL, NULL);
}

enum status trainer_run(struct trainer *t, const int *signal_flag)
{
    t->signal_flag = signal_flag;
    if (t->metrics != NULL)
        TRY(metrics_plan(t->metrics, &(struct metrics_plan){
                                         .total_steps = t->total_steps,
                                         .steps_per_epoch = t->sampler.steps_per_epoch,
                                         .first_step = t->first_step,
                                         .world_size = t->comm->world_size,
                                         .device = t->device->name,
                                         .dtype = t->device->param_dtype,
                                         .account = &t->account,
                                     }));
    start_times_part(t->start, "log");
    start_times_log(t->start);
    if (t->metrics != NULL && t->start != NULL)
        t->metrics->start = *t->start;
    evaluator_read_ahead(t->evaluator, t);
    enum status st = run_all(t);
    if (t->metrics != NULL)
        t->metrics->card = t->card;
    /* A signal in an evaluation left it between two steps. */
    if (st != ST_OK && st != ST_INTERRUPTED)
        return st;
    TRY(checkpointer_finish(t->checkpointer, t));
    if (t->stop & STOP_SIGNAL)
        return FAIL(INTERRUPTED, "stopped by signal %d after step %" PRId64, t->signal,
                    t->steps_done);
    return ST_OK;
}
