#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "comm/comm.h"
#include "engine/base/arena.h"
#include "engine/base/file.h"
#include "engine/base/log.h"
#include "engine/base/options.h"
#include "engine/base/out.h"
#include "engine/train/commands.h"
#include "engine/train/lr_sweep.h"
#include "engine/train/run.h"

struct lr_find_arguments {
    const char *config, *output_dir, *device;
    struct option_list sets;
    double min_lr, max_lr;
    int64_t steps, ranks;
};

static const char DETAILS[] =
    "Trains for a few steps whose learning rate grows from --min-lr to --max-lr, by equal\n"
    "factors, with the batches, the model and the optimizer of the configuration. Suggested is\n"
    "the rate at which the smoothed loss falls most steeply. The weights go nowhere: lr_find.csv\n"
    "in the output folder is all that is written.";

/* ---- on each rank ---------------------------------------------------------------------------- */

/* What rank 0 leaves to the command. */
struct lr_find_job {
    const struct lr_find_arguments *args;
    struct lr_sweep sweep; /* owned */
    bool done;
};

static void set_rate(void *context, struct trainer *t, int64_t step)
{
    const struct lr_sweep *sweep = context;
    t->executor.hyper.lr = (float)lr_sweep_at(sweep, step);
}

/* All ranks see the same reports, so all end at the same step. */
static void take_loss(void *context, struct trainer *t, const struct step_state *r)
{
    struct lr_sweep *sweep = context;
    int64_t every = sweep->steps / 10, before = sweep->count;
    if (!lr_sweep_add(sweep, (double)r->lr, r->loss))
        t->stop |= STOP_EARLY;
    if (t->comm->rank != 0 || sweep->count == before)
        return;
    if (sweep->count % every == 0 || sweep->diverged)
        log_info("lr-find", "step %" PRId64 "/%" PRId64 "  lr %.2e  loss %.4f  smoothed %.4f%s",
                 sweep->count, sweep->steps, (double)r->lr, r->loss,
                 sweep->points[sweep->count - 1].smoothed,
                 sweep->diverged ? "  diverged: the end" : "");
}

static enum status sweep_rates(void *context, struct trainer *t)
{
    struct lr_find_job *job = context;
    struct lr_sweep sweep = {0};
    TRY(lr_sweep_init(&sweep, job->args->min_lr, job->args->max_lr, job->args->steps));
    t->before_step = set_rate;
    t->after_step = take_loss;
    t->step_context = &sweep;
    enum status st = trainer_run(t, t->signal_flag);
    if (st == ST_OK && t->comm->rank == 0) {
        job->sweep = sweep;
        job->done = true;
    } else
        lr_sweep_release(&sweep);
    return st;
}

/* ---- the result ------------------------------------------------------------------------------ */

static enum status write_csv(const struct lr_sweep *s, const char *dir)
{
    enum { LINE_BYTES = 128 };
    char path[1200], *text = NULL;
    size_t used, bytes = LINE_BYTES * ((size_t)s->count + 1);
    enum status st;
    TRY(path_join(path, sizeof path, dir, "lr_find.csv"));
    TRY(file_make_dirs(dir));
    TRY(mem_alloc(&text, bytes));
    used = (size_t)snprintf(text, bytes, "step,lr,loss,smoothed_loss\n");
    for (int64_t i = 0; i < s->count; i++)
        used += (size_t)snprintf(text + used, bytes - used, "%" PRId64 ",%.9g,%.17g,%.17g\n", i + 1,
                                 s->points[i].lr, s->points[i].loss, s->points[i].smoothed);
    st = file_write(path, text, used);
    if (st == ST_OK)
        log_info("lr-find", "wrote %s", path);
    mem_free(&text);
    return st;
}

static enum status print_result(const struct lr_sweep *s)
{
    enum { ROWS = 25 };
    int64_t suggested = lr_sweep_suggest(s), every = (s->count + ROWS - 1) / ROWS;
    out("%6s  %9s  %12s  %12s\n", "step", "lr", "loss", "smoothed");
    for (int64_t i = 0; i < s->count; i++)
        if (i % every == 0 || i == suggested || i + 1 == s->count)
            out("%6" PRId64 "  %9.2e  %12.4f  %12.4f%s\n", i + 1, s->points[i].lr,
                s->points[i].loss, s->points[i].smoothed, i == suggested ? "  <- suggested" : "");
    if (s->diverged)
        out("\nThe sweep ended early: the loss went beyond four times its least, or was not "
            "finite.\n");
    if (suggested < 0)
        out("\nNo suggestion: the smoothed loss falls nowhere behind the first %d steps. Try other "
            "limits, or more steps.\n",
            LR_SWEEP_SKIP);
    else
        out("\nSuggested learning rate: %.2e (the smoothed loss falls most steeply there, the "
            "first "
            "%d steps and the last left out): --set optim.lr=%.2e\n",
            s->points[suggested].lr, LR_SWEEP_SKIP, s->points[suggested].lr);
    return out_flush();
}

/* ---- the command ----------------------------------------------------------------------------- */

/* The configuration's run, without all that schedules, evaluates, saves and goes on. */
static enum status configure(struct run_config *config, const struct lr_find_arguments *args)
{
    char text[512];
    TRY(config_load(config, args->config, args->sets.items, args->sets.count));
    if (args->output_dir != NULL) {
        snprintf(text, sizeof text, "output.dir=%s", args->output_dir);
        TRY(config_set(config, text, "--output-dir"));
    }
    if (args->device != NULL) {
        snprintf(text, sizeof text, "train.device=%s", args->device);
        TRY(config_set(config, text, "--device"));
    }
    if (args->ranks > 0)
        config->train.ranks = args->ranks;
    config->train.steps = args->steps;
    config->train.graphs = false; /* a captured step has its rate in it */
    config->optim.schedule = SCHEDULE_CONSTANT;
    config->optim.warmup_steps = 0;
    config->data.eval[0] = '\0';
    config->eval.train_samples = 0;
    config->eval.before = false;
    config->eval.stop_metric = STOP_NONE;
    config->checkpoint.every = 0;
    config->checkpoint.keep_best = STOP_NONE;
    config->checkpoint.resume[0] = '\0';
    config->checkpoint.resume_or_start = config->checkpoint.export_best = false;
    return config_check(config);
}

enum status cmd_lr_find(int argc, char **argv)
{
    struct lr_find_arguments args = {.min_lr = 1e-7, .max_lr = 1, .steps = 100};
    struct run_config config;
    bool help_shown = false;
    const struct option options[] = {
        {"config", OPTION_TEXT, &args.config, "FILE", "run configuration (YAML)", 0, 0, true},
        {"min-lr", OPTION_REAL, &args.min_lr, "LR", "the first rate", 1e-30, 1e30, false},
        {"max-lr", OPTION_REAL, &args.max_lr, "LR", "the last rate", 1e-30, 1e30, false},
        {"steps", OPTION_INT, &args.steps, "N", "how many rates", LR_SWEEP_MIN_STEPS, 1e6, false},
        {"output-dir", OPTION_TEXT, &args.output_dir, "DIR", "for lr_find.csv (output.dir)", 0, 0,
         false},
        {"ranks", OPTION_INT, &args.ranks, "N", "ranks that train together", 1, COMM_MAX_WORLD_SIZE,
         false},
        {"device", OPTION_TEXT, &args.device, "auto|cpu|cuda", "where to compute", 0, 0, false},
        {"set", OPTION_LIST, &args.sets, "KEY=VALUE", "a key of the configuration", 0, 0, false},
    };
    const struct command command = {.name = "lr-find",
                                    .summary = "Suggest a learning rate from a short run.",
                                    .details = DETAILS,
                                    .options = options,
                                    .option_count = sizeof options / sizeof *options};
    TRY(options_parse(&command, argc, argv, &help_shown));
    if (help_shown)
        return ST_OK;
    if (args.min_lr >= args.max_lr)
        return FAIL(INVALID, "--min-lr %g is not below --max-lr %g", args.min_lr, args.max_lr);
    TRY(configure(&config, &args));
    struct lr_find_job job = {.args = &args};
    struct run_options how = {.quiet = true, .body = sweep_rates, .context = &job};
    int ranks_asked = config.train.ranks > 1 ? (int)config.train.ranks : 0;
    enum status st = run_launch(&config, &how, ranks_asked, argv - 1 /* main's */);
    if (st == ST_OK && job.done)
        st = write_csv(&job.sweep, config.output.dir);
    if (st == ST_OK && job.done)
        st = print_result(&job.sweep);
    lr_sweep_release(&job.sweep);
    return st;
}
