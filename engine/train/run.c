#include "engine/train/run.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/bind.h"
#include "engine/base/log.h"
#include "engine/train/bandwidth.h"
#include "engine/train/checkpoint.h"
#include "engine/train/evaluate.h"
#include "engine/train/gpu_log.h"
#include "engine/train/interrupt.h"
#include "engine/train/plan_json.h"
#include "engine/train/progress.h"
#include "engine/train/weights.h"
#include "io/checkpoint.h"

static int core_count(void)
{
    struct cpuset set;
    if (bind_get_cpus(&set) == ST_OK)
        return cpuset_count(&set);
    status_clear();
    return 1;
}

int run_threads(const struct run_config *config, int local_ranks)
{
    if (config->train.threads > 0)
        return (int)config->train.threads;
    int share = core_count() / local_ranks;
    return share > 1 ? share : 1;
}

static void describe(const struct trainer *t)
{
    const struct run_config *c = t->config;
    const struct batch_layout *l = &t->setup.train_batch;
    enum reduce_policy reduce = program_reduce_policy(c->train.reduce, t->setup.spec.zero_stage);
    log_info("run", "%s  %.1f M parameters in %d units  dtype %s  comm %s", t->setup.model.family,
             (double)model_total_numel(&t->setup.model) * 1e-6, t->setup.model.unit_count,
             dtype_name(t->device->param_dtype), t->comm->ops->name);
    log_info("run",
             "zero stage %d  reduce %s  tables %s  prefetch %" PRId64
             "  overlap %s  update %s  recompute %s  %s",
             t->setup.spec.zero_stage, reduce == REDUCE_PER_STEP ? "per step" : "per micro-batch",
             l->ranks > 0 ? "by rows" : "whole", c->train.prefetch, c->train.overlap ? "on" : "off",
             t->plan.late ? "late" : "early",
             c->train.recompute == RECOMPUTE_BLOCK  ? "blocks"
             : c->train.recompute == RECOMPUTE_GELU ? "GELU"
                                                    : "off",
             c->data.padded ? "padded batches" : "packed batches");
    if (t->stage_reason[0] != '\0')
        log_info("run", "%s", t->stage_reason);
    if (t->total_steps > 0)
        log_info("run",
                 "batch: micro_batch %" PRId64 " x grad_accum %" PRId64
                 " x ranks %d = global_batch %" PRId64 "; %" PRId64 " windows of %" PRId64
                 " questions, %" PRId64 " steps an epoch, %" PRId64 " steps; %" PRId64
                 " rows a micro-batch",
                 c->train.micro_batch, c->train.grad_accum, t->comm->world_size,
                 t->sampler.global_batch, t->data->train.count, t->data->train.examples,
                 t->sampler.steps_per_epoch, t->total_steps, l->rows);
    if (t->comm->world_size > 1)
        log_info("run", "a rank that is silent for %" PRId64 " s ends the run (train.timeout_s)",
                 c->train.timeout_s);
    log_info("run", "memory: %.1f MiB a rank (%.1f MiB live at the peak)",
             (double)t->account.arena_bytes / 1048576.0,
             (double)t->account.live_peak_bytes / 1048576.0);
}

enum { WHERE_BYTES = 768, CAUSE_BYTES = 4096 };

/* Either way the model would read nearly every name as [UNK] or as pieces. */
static void warn_of_casing(const struct trainer *t)
{
    bool capitals = vocab_has_capitals(&t->data->vocab);
    if (capitals != t->config->model.cased)
        log_warn("run", "model.cased is %s, but the vocabulary %s has %stokens with capitals",
                 t->config->model.cased ? "true" : "false", t->config->data.vocab,
                 capitals ? "" : "no ");
}

/* What users print by hand today: who runs where, and what is really on. All ranks call it. */
static enum status banner(const struct trainer *t, const struct binding *b)
{
    enum status st = ST_OK;
    char mine[WHERE_BYTES], host[256] = "?", *all = NULL;
    int world = t->comm->world_size;
    gethostname(host, sizeof host - 1);
    snprintf(mine, sizeof mine, "host %s  pid %d  %s  %d thread%s  %s", host, (int)getpid(),
             t->device->name, t->device->threads, t->device->threads == 1 ? "" : "s", b->where);
    TRY(mem_alloc(&all, (size_t)world * WHERE_BYTES));
    TRY_GOTO(st, out, comm_exchange(t->comm, all, mine, WHERE_BYTES));
    for (int r = 0; r < world; r++)
        log_info("run", "rank %d of %d  %s", r, world, all + (size_t)r * WHERE_BYTES);
    TRY_GOTO(st, out,
             binding_report(b, t->comm, t->metrics != NULL ? t->config->output.dir : NULL));
    TRY_GOTO(st, out, bandwidth_report(b, t->device, t->comm));
    describe(t);
    if (t->comm->rank == 0)
        warn_of_casing(t);
out:
    mem_free(&all);
    return st;
}

static enum status finish(struct trainer *t, enum status st)
{
    char ended[64];
    char cause[CAUSE_BYTES];
    if (t->metrics == NULL || (st != ST_OK && st != ST_INTERRUPTED))
        return st;
    snprintf(cause, sizeof cause, "%s", status_message());
    snprintf(ended, sizeof ended, "%s",
             st == ST_INTERRUPTED   ? "signal"
             : t->stop & STOP_EARLY ? "early stop"
                                    : "complete");
    t->metrics->counted = t->executor.counted;
    enum status written =
        metrics_finish(t->metrics, &t->account, t->comm->world_size, t->device->name, ended);
    if (written != ST_OK)
        return written;
    status_set_message(cause);
    return st;
}

/* With checkpoint.export_best: what is saved are the best checkpoint's weights, if one is known to
 * be better than the last. */
static enum status take_best(struct trainer *t)
{
    char path[CHECKPOINT_PATH_BYTES];
    if (t->config->checkpoint.keep_best == STOP_NONE && t->comm->rank == 0)
        log_warn("run", "without checkpoint.keep_best nothing says what is best: the last weights "
                        "count");
    TRY(checkpointer_best(t->checkpointer, t, path));
    return path[0] != '\0' ? checkpoint_load_weights(t, path) : ST_OK;
}

/* The last weights are written beside the last evaluation, unless it says which are the best. */
static enum status plan_save(struct trainer *t)
{
    const struct run_config *c = t->config;
    if (!c->output.model || c->checkpoint.export_best || t->total_steps == 0)
        return ST_OK;
    return path_join(t->model_dir, sizeof t->model_dir, c->output.dir, "model");
}

static enum status write_model(struct trainer *t)
{
    char dir[1200];
    if (t->writing != NULL)
        return weights_save_end(&t->writing);
    TRY(path_join(dir, sizeof dir, t->config->output.dir, "model"));
    if (t->config->checkpoint.export_best)
        TRY(take_best(t));
    return weights_save(t, dir);
}

/* What was trained, also when a signal ended it: OUTPUT/model, on all ranks. */
static enum status save_model(struct trainer *t, enum status st)
{
    char cause[CAUSE_BYTES];
    if ((st != ST_OK && st != ST_INTERRUPTED) || t->steps_done == 0 || !t->config->output.model)
        return st;
    snprintf(cause, sizeof cause, "%s", status_message());
    TRY(write_model(t));
    status_set_message(cause);
    return st;
}

/* The last evaluation's files, which were written beside all that. */
static enum status finish_answers(struct trainer *t, enum status st)
{
    char cause[CAUSE_BYTES];
    if (st != ST_OK && st != ST_INTERRUPTED)
        return st;
    snprintf(cause, sizeof cause, "%s", status_message());
    TRY(evaluator_finish(t->evaluator));
    status_set_message(cause);
    return st;
}

/* Of what there is, also when a signal ended it. */
static enum status report_profile(const struct trainer *t, enum status st)
{
    char path[1200];
    if (t->metrics == NULL || t->profile == NULL || (st != ST_OK && st != ST_INTERRUPTED))
        return st;
    TRY(path_join(path, sizeof path, t->config->output.dir, "profile.json"));
    TRY(op_profile_write(t->profile, path));
    op_profile_print(t->profile);
    return st;
}

/* Launchers end all processes once one has ended with a signal's exit code, so none leaves before
 * rank 0 has written what there is. */
static enum status leave_together(struct comm *comm, enum status st)
{
    char cause[CAUSE_BYTES];
    if (st != ST_OK && st != ST_INTERRUPTED)
        return st;
    snprintf(cause, sizeof cause, "%s", status_message());
    TRY(comm_barrier(comm));
    status_set_message(cause);
    return st;
}

/* For a run that hangs or loses a rank: what each of them was doing. */
static void say_where(const struct trainer *t, const struct device *device)
{
    char at[STREAM_REDUCE + 1][PROGRESS_NAME_BYTES];
    if (device->name_mark == NULL || device_progress(device, STREAM_COMPUTE) == 0)
        return; /* it has begun nothing */
    for (int s = 0; s <= STREAM_REDUCE; s++)
        device->name_mark(device->name_context, device_progress(device, (enum stream_id)s), at[s],
                          sizeof at[s]);
    log_warn("run", "stood behind step %" PRId64 "; compute: %s; gather: %s; reduce: %s",
             t->steps_done, at[STREAM_COMPUTE], at[STREAM_GATHER], at[STREAM_REDUCE]);
}

/* Tell the peers and people before anything waits for the device: it may never be done, and this
 * process be killed for that. Closing has failures of its own, so the @cause is kept. */
static void give_up(enum status st, const struct trainer *t, const struct device *device,
                    struct comm *comm, char cause[CAUSE_BYTES])
{
    snprintf(cause, CAUSE_BYTES, "%s", status_message());
    if (st == ST_OK || st == ST_INTERRUPTED)
        return;
    if (st == ST_COMM || st == ST_TIMEOUT || st == ST_DEVICE)
        say_where(t, device); /* before MPI's abort, which does not return */
    comm_abort(comm, cause);
    if (device->asynchronous)
        log_cause("run", cause);
}

enum status run_rank(const struct rank_run *r, struct device *device, struct comm *comm)
{
    enum status st = ST_OK;
    struct trainer trainer = {0};
    struct gpu_log *gpu_log = NULL;
    char cause[CAUSE_BYTES];
    struct executor_options executor = r->options->executor;
    executor.overlap = r->config->train.overlap;
    device->early_launch &= r->config->train.early_launch;
    if (comm->rank == 0)
        trainer.start = r->options->start;
    trainer.says_bus = !r->options->quiet && device->asynchronous && comm->world_size > 1;
    start_times_part(trainer.start, "ranks");
    TRY_GOTO(st, out,
             trainer_open(&trainer, r->config, r->data, device, comm, r->metrics, &executor));
    binding_check(r->binding, "the start of the run");
    if (!r->options->quiet) {
        TRY_GOTO(st, out, banner(&trainer, r->binding));
        TRY_GOTO(st, out, plan_save(&trainer));
        gpu_log_start(&gpu_log, r->config, device, comm->rank);
    }
    if (r->metrics != NULL)
        TRY_GOTO(st, out, plan_json_write(&trainer));
    TRY_GOTO(st, out, trainer_trace(&trainer, &r->options->trace));
    TRY_GOTO(st, out, trainer_profile(&trainer, r->options->profile_steps));
    if (r->options->at_start != NULL)
        r->options->at_start(r->options->context, &trainer);
    trainer.signal_flag = r->signal_flag;
    st = r->options->body != NULL ? r->options->body(r->options->context, &trainer)
                                  : trainer_run(&trainer, r->signal_flag);
    if (st == ST_INTERRUPTED && r->signal_flag == interrupt_flag())
        interrupt_adopt(trainer.signal); /* the exit code says so, whichever rank it was */
    if (!r->options->quiet)
        st = save_model(&trainer, st);
    st = finish_answers(&trainer, st);
    st = leave_together(comm, report_profile(&trainer, finish(&trainer, st)));
    if (st == ST_OK && r->options->at_end != NULL)
        r->options->at_end(r->options->context, &trainer);
out:
    give_up(st, &trainer, device, comm, cause);
    gpu_log_stop(&gpu_log);
    trainer_close(&trainer);
    status_set_message(cause);
    return st;
}

#ifdef TESSERA_CUDA
static bool gpu_is_there(bool in_child)
{
    if (!in_child)
        return device_cuda_count() > 0;
    pid_t child = fork();
    if (child == 0)
        _exit(device_cuda_count() > 0 ? 0 : 1);
    int status = 0;
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) &&
           WEXITSTATUS(status) == 0;
}
#endif

enum device_kind run_device_kind(const struct run_config *config, bool in_child)
{
    if (config->train.device != DEVICE_AUTO)
        return config->train.device;
#ifdef TESSERA_CUDA
    bool for_cpus = config->train.comm == COMM_LOCAL || config->train.comm == COMM_MPI;
    if (!for_cpus && gpu_is_there(in_child))
        return DEVICE_CUDA;
#else
    (void)in_child;
#endif
    return DEVICE_CPU;
}
