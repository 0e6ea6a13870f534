#include "engine/train/trainer.h"

#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/text.h"
#include "engine/train/auto_stage.h"
#include "engine/train/capture.h"
#include "engine/train/checkpoint.h"
#include "engine/train/checkpoint_model.h"
#include "engine/train/evaluate.h"
#include "engine/train/interrupt.h"
#include "engine/train/products.h"
#include "engine/train/weights.h"

int64_t trainer_total_steps(const struct run_config *config, int64_t samples, int world_size)
{
    if (config->train.steps >= 0)
        return config->train.steps;
    int64_t batch = config->train.micro_batch * config->train.grad_accum * world_size;
    return (samples + batch - 1) / batch * config->train.epochs;
}

/* ---- opening ---- */

/* What all ranks must have in common. */
struct identity {
    uint64_t layout;
    int64_t samples, total_steps, arena_bytes;
};

static enum status compare_ranks(struct trainer *t)
{
    struct identity mine = {layout_fingerprint(&t->setup.layout), t->sampler.count, t->total_steps,
                            (int64_t)t->account.arena_bytes};
    struct identity *all = NULL;
    enum status st = ST_OK;
    TRY(mem_alloc(&all, sizeof *all * (size_t)t->comm->world_size));
    TRY_GOTO(st, out, comm_exchange(t->comm, all, &mine, sizeof mine));
    for (int r = 1; r < t->comm->world_size && st == ST_OK; r++)
        if (memcmp(&all[r], &all[0], sizeof mine) != 0)
            st = FAIL(INVALID,
                      "rank %d differs from rank 0 in its model, data or configuration "
                      "(samples %" PRId64 " and %" PRId64 ", steps %" PRId64 " and %" PRId64 ")",
                      r, all[r].samples, all[0].samples, all[r].total_steps, all[0].total_steps);
out:
    mem_free(&all);
    return st;
}

static enum status open_slots(struct trainer *t)
{
    size_t block_bytes = t->setup.spec.batch_bytes;
    for (int i = 0; i < STEP_SLOTS; i++) {
        struct step_slot *slot = &t->slots[i];
        slot->step = -1;
        TRY(device_alloc_host(t->device, (void **)&slot->host, sizeof *slot->host));
        TRY(device_alloc_host(t->device, (void **)&slot->block, block_bytes));
        TRY(device_alloc_host(t->device, (void **)&slot->result, sizeof *slot->result));
        TRY(event_open(t->device, &slot->done));
    }
    const struct batch_layout *l = &t->setup.train_batch;
    TRY(mem_alloc(&t->micro, sizeof *t->micro * (size_t)t->config->train.grad_accum));
    TRY(mem_alloc(&t->picked, sizeof *t->picked * (size_t)l->sequences));
    return mem_alloc(&t->sort_scratch, sizeof *t->sort_scratch * (size_t)l->rows);
}

static struct optim_hyper hyper_of(const struct run_config *config, int64_t total_steps)
{
    int64_t warmup = config->optim.warmup_steps;
    if (warmup < 0)
        warmup = (int64_t)ceil(config->optim.warmup_ratio * (double)total_steps);
    return (struct optim_hyper){
        .lr = (float)config->optim.lr,
        .beta1 = (float)config->optim.beta1,
        .beta2 = (float)config->optim.beta2,
        .eps = (float)config->optim.eps,
        .weight_decay = (float)config->optim.weight_decay,
        .max_grad_norm = (float)config->optim.max_grad_norm,
        .warmup_steps = warmup,
        .total_steps = total_steps,
        .schedule = config->optim.schedule,
    };
}

static enum status plan_run(struct trainer *t)
{
    const struct run_config *config = t->config;
    const struct split *train = &t->data->train;
    int world = t->comm->world_size;
    int64_t train_rows = 1, eval_rows;
    if (train->count > 0) {
        TRY(sampler_init(&t->sampler, train->rows, train->count, world,
                         (int)config->train.grad_accum, config->train.micro_batch,
                         (uint64_t)config->train.seed));
        t->total_steps = trainer_total_steps(config, train->count, world);
        train_rows = sampler_max_tokens(&t->sampler, t->total_steps);
    }
    eval_rows = evaluator_max_rows(&t->data->eval, config->eval.micro_batch);
    if (config->eval.train_samples > 0) {
        int64_t rows = evaluator_max_rows(train, config->eval.micro_batch);
        eval_rows = rows > eval_rows ? rows : eval_rows;
    }
    train_rows = train_rows > 0 ? train_rows : 1;
    eval_rows = eval_rows > 0 ? eval_rows : 1;
    int stage = (int)config->train.zero_stage;
    if (stage == ZERO_STAGE_AUTO)
        TRY(auto_stage(&stage, t, train_rows, eval_rows));
    TRY(setup_init(&t->setup, config, t->device, world, stage, train_rows, eval_rows));
    if (t->metrics != NULL)
        t->metrics->zero_stage = stage;
    t->setup.train_batch.pad_id = t->setup.eval_batch.pad_id = t->data->vocab.pad_id;
    return plan_build(&t->plan, &t->account, &t->setup.spec);
}

/* What the card's memory in use has grown by since the last call. */
static enum status card_grown(struct trainer *t, size_t *bytes)
{
    struct card_memory *m = &t->card;
    size_t used = 0;
    if (t->device->library == NULL) /* not a card */
        return ST_OK;
    if (m->all == 0) {
        m->context = t->device->context_bytes;
        m->library = t->device->library_bytes;
        m->all = m->context + m->library;
    }
    TRY(device_memory_used(t->device, &used));
    if (used > m->all)
        *bytes += used - m->all;
    m->all = used;
    return ST_OK;
}

/* What this process has grown by since all ranks of it were without memory; rank 0 asks. Later
 * growth is none (tests/train_memory.c), so the end of step 2 and the last step will do. */
static enum status process_grown(struct trainer *t)
{
    size_t used = 0;
    if (t->device->library != NULL || t->metrics == NULL)
        return ST_OK;
    struct process_memory *m = &t->metrics->process;
    TRY(device_memory_used(t->device, &used));
    if (m->before == 0) {
        m->before = used;
        m->ranks = strcmp(t->comm->ops->name, "local") == 0 ? t->comm->world_size : 1;
    }
    if (used > m->before + m->grown)
        m->grown = used - m->before;
    return ST_OK;
}

/* What does not fit ends here, and not with a process that the system kills. Rank 0 asks for all
 * ranks of its process, before any of them has memory. Cards say so themselves. */
static enum status check_room(const struct trainer *t)
{
    size_t room = 0, arena = t->account.arena_bytes;
    bool threads = strcmp(t->comm->ops->name, "local") == 0;
    size_t ranks = threads ? (size_t)t->comm->world_size : 1;
    char needs[32], has[32];
    if (t->device->library != NULL || (threads && t->comm->rank != 0))
        return ST_OK;
    TRY(device_memory_free(t->device, &room));
    if (arena <= room / ranks)
        return ST_OK;
    text_of_bytes(needs, arena);
    text_of_bytes(has, room);
    return FAIL(MEMORY,
                "out of memory: a rank needs %s, and %zu of them share the %s that are free "
                "(tessera plan shows what for)",
                needs, ranks, has);
}

static void log_card(const struct card_memory *m)
{
    const double mib = 1048576.0;
    if (m->all > 0)
        log_info("train",
                 "memory of the card in MiB: context %.0f, libraries %.0f, communicator %.0f, "
                 "arena %.0f, windows %.0f, rehearsal and weights %.0f, graphs %.0f, all %.0f",
                 (double)m->context / mib, (double)m->library / mib, (double)m->communicator / mib,
                 (double)m->arena / mib, (double)m->windows / mib, (double)m->set_up / mib,
                 (double)m->graphs / mib, (double)m->all / mib);
}

/* Of what came with the arena, the part that its registration took. */
static void name_windows(struct trainer *t)
{
    size_t windows = t->comm->window_bytes;
    if (windows > t->card.arena)
        windows = t->card.arena;
    t->card.arena -= windows;
    t->card.windows = windows;
    if (t->comm->memory_text[0] != '\0')
        log_info("train", "%s", t->comm->memory_text);
}

/* The state of a checkpoint, the weights of one or of a model's folder, or random ones. */
static enum status fill_weights(struct trainer *t)
{
    bool resumed = false;
    TRY(checkpoint_resume(t, &resumed));
    if (resumed)
        return ST_OK;
    const char *dir = t->config->model.init_from;
    if (dir[0] == '\0')
        return weights_init(t);
    return checkpoint_is_one(dir) ? checkpoint_load_weights(t, dir) : weights_load(t, dir);
}

enum status trainer_open(struct trainer *t, const struct run_config *config,
                         const struct run_data *data, struct device *device, struct comm *comm,
                         struct metrics *metrics, const struct executor_options *options)
{
    t->config = config;
    t->data = data;
    t->device = device;
    t->comm = comm;
    t->metrics = metrics;
    t->best_metric = t->best_value = (double)-INFINITY;
    t->best_step = -1;
    TRY(plan_run(t));
    TRY(process_grown(t)); /* the others wait in compare_ranks() for rank 0 */
    TRY(check_room(t));
    TRY(compare_ranks(t));
    start_times_part(t->start, "plan");
    TRY(card_grown(t, &t->card.communicator));
    struct optim_hyper hyper = hyper_of(config, t->total_steps);
    TRY(executor_open(&t->executor, device, comm, &t->setup.model, &t->setup.layout, &t->plan,
                      &t->account, &hyper, options));
    TRY(card_grown(t, &t->card.arena));
    name_windows(t);
    TRY(open_slots(t));
    TRY(evaluator_open(&t->evaluator, t));
    start_times_part(t->start, "memory");
#ifdef TESSERA_CUDA
    if (device->fixed_rows)
        products_open(t);
#endif
    if (device->fixed_rows) {
        TRY(capture_rehearse(t));
        start_times_part(t->start, "kernels");
    }
    TRY(fill_weights(t));
    start_times_part(t->start, "weights");
#ifdef TESSERA_CUDA
    if (device->fixed_rows)
        TRY(products_plan(t));
#endif
    if (device->fixed_rows)
        start_times_part(t->start, "products");
    TRY(card_grown(t, &t->card.set_up));
    if (device->fixed_rows && config->train.graphs && t->total_steps > 0)
        TRY(capture_steps(t));
    if (device->fixed_rows)
        start_times_part(t->start, "graphs");
    TRY(card_grown(t, &t->card.graphs));
    TRY(checkpointer_open(&t->checkpointer, t));
    log_card(&t->card);
    return ST_OK;
}

void trainer_close(struct trainer *t)
{
    if (t->device == NULL)
        return;
    device_settle(t->device);
    for (int i = 0; i < STEP_SLOTS; i++) {
        struct step_slot *slot = &t->slots[i];
        if (slot->result != NULL)
            event_close(&slot->done);
        device_free_host(t->device, (void **)&slot->host);
        device_free_host(t->device, (void **)&slot->block);
        device_free_host(t->device, (void **)&slot->result);
    }
#ifdef TESSERA_CUDA
    if (t->device->fixed_rows)
        products_close(t);
#endif
    checkpointer_close(&t->checkpointer);
    trace_close(&t->trace);
    op_profile_close(&t->profile);
    mem_free(&t->squared);
    evaluator_close(&t->evaluator, t);
    mem_free(&t->micro);
    mem_free(&t->picked);
    mem_free(&t->sort_scratch);
    executor_close(&t->executor);
    gemm_table_release(&t->gemm_plan);
    plan_release(&t->plan);
    setup_release(&t->setup);
    sampler_release(&t->sampler);
    memset(t, 0, sizeof *t);
}

/* ---- steps ---- */

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
        if (t->device->fixed_rows)
            rows = sampler_class(&t->sampler, m);
        t->micro[m] = batch_view(l, block, m, rows);
    }
    return tokens;
}

enum status trainer_trace(struct trainer *t, const struct trace_request *request)
{
    if (request->path == NULL)
        return ST_OK;
    if (t->total_steps == 0)
        return FAIL(INVALID, "--trace: this run has no training steps");
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
    TRY(op_profile_begin(t->profile, t->micro, t->squared));
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
    struct step_slot *slot = &t->slots[step % STEP_SLOTS];
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
    char *state = executor_shared(&t->executor, SHARED_STATE);
    TRY(device_copy(s, state + offsetof(struct step_state, host), slot->host, sizeof *slot->host));
    TRY(device_copy(s, executor_shared(&t->executor, SHARED_BATCH), slot->block,
                    t->setup.spec.batch_bytes));
    if (t->trace != NULL && step == t->trace_step)
        TRY(run_traced(t, step, tokens));
    else if (is_profiled(t, step))
        TRY(run_profiled(t));
    else
        TRY(executor_run(&t->executor, PROGRAM_STEP, t->micro, NULL));
    TRY(device_copy(s, slot->result, state, sizeof *slot->result));
    TRY(event_record(&slot->done, s));
    slot->step = step;
    slot->flops = step_flops(t);
    slot->issued_s = clock_s();
    return ST_OK;
}

/* Act on the report of a step; the same on all ranks. */
static enum status finish_step(struct trainer *t, int64_t step, double *last_s)
{
    if (step < 0)
        return ST_OK;
    struct step_slot *slot = &t->slots[step % STEP_SLOTS];
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

/* What is due between two steps; none is under way. A save alone leaves what is carried in place,
 * but an update that is due comes first. */
static enum status between_steps(struct trainer *t, bool evaluates, bool saves)
{
    bool better = false, flushes = evaluates || t->plan.late;
    if (flushes)
        TRY(executor_run(&t->executor, PROGRAM_FLUSH, NULL, NULL));
    if (evaluates)
        TRY(evaluate(t, &better));
    if (saves || better)
        TRY(checkpointer_save(t->checkpointer, t));
    return flushes ? executor_run(&t->executor, PROGRAM_PROLOGUE, NULL, NULL) : ST_OK;
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
    TRY(executor_run(&t->executor, PROGRAM_PROLOGUE, NULL, NULL));
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
