#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/log.h"
#include "engine/base/options.h"
#include "engine/base/out.h"
#include "engine/train/commands.h"
#include "engine/train/interrupt.h"
#include "engine/train/run.h"

/* Options that are short names of configuration keys. */
struct shorthand {
    const char *option, *key, *metavar, *help;
};

static const struct shorthand shorthands[] = {
    {"zero-stage", "train.zero_stage", "0..3", "what is partitioned across ranks"},
    {"ranks", "train.ranks", "N", "ranks that train together"},
    {"comm", "train.comm", "auto|local", "how they communicate"},
    {"device", "train.device", "auto|cpu|cuda", "where they compute"},
    {"steps", "train.steps", "N", "steps to train; 0 evaluates only"},
    {"epochs", "train.epochs", "N", "passes over the training data"},
    {"output-dir", "output.dir", "DIR", "folder for metrics, predictions, weights"},
    {"max-train-samples", "data.max_train_samples", "N", "train on the first N questions"},
    {"max-eval-samples", "data.max_eval_samples", "N", "evaluate the first N questions"},
};

enum { SHORTHANDS = sizeof shorthands / sizeof *shorthands, OWN_OPTIONS = 5 };

struct train_arguments {
    const char *config;
    struct option_list sets;
    bool padded;
    struct trace_request trace;
    const char *values[SHORTHANDS];
};

static enum status resolve(struct run_config *config, const struct train_arguments *args)
{
    TRY(config_load(config, args->config, args->sets.items, args->sets.count));
    for (int i = 0; i < SHORTHANDS; i++) {
        char assignment[1024], origin[64];
        if (args->values[i] == NULL)
            continue;
        snprintf(assignment, sizeof assignment, "%s=%s", shorthands[i].key, args->values[i]);
        snprintf(origin, sizeof origin, "--%s", shorthands[i].option);
        TRY(config_set(config, assignment, origin));
    }
    if (args->padded)
        TRY(config_set(config, "data.padded=true", "--padded"));
    /* The one that is given decides: --epochs over steps of the file. */
    for (int i = 0; i < SHORTHANDS; i++)
        if (args->values[i] != NULL && strcmp(shorthands[i].key, "train.epochs") == 0 &&
            config->train.steps > 0)
            TRY(config_set(config, "train.steps=-1", "--epochs"));
    return config_check(config);
}

static enum status print_resolved(const struct run_config *config)
{
    char *text = NULL;
    size_t bytes = 0;
    TRY(config_write(config, &text, &bytes));
    out("%s", text);
    mem_free(&text);
    return out_flush();
}

static enum status train_on_cpu(const struct run_config *config, const struct trace_request *trace)
{
    enum status st = ST_OK;
    struct run_data data = {0};
    struct run_options options = {.quiet = false, .trace = *trace};
    TRY(print_resolved(config));
    TRY(interrupt_install());
    TRY_GOTO(st, out, run_data_load(&data, config, config->train.steps != 0));
    TRY_GOTO(st, out, run_local(config, &data, &options, interrupt_flag()));
    log_info("run", "output in %s", config->output.dir);
out:
    run_data_release(&data);
    return st;
}

/* One process a GPU: this one, or as many as there are ranks, each of which comes here again. */
static enum status train_on_gpus(struct run_config *config, const struct launch *launch,
                                 const struct trace_request *trace, char **argv)
{
    struct run_options options = {.quiet = false, .trace = *trace};
    if (launch->origin == LAUNCH_ALONE && config->train.ranks > 1) {
        int exit_code = 0;
        TRY(launch_spawn(&exit_code, (int)config->train.ranks, argv, 0));
        exit(exit_code); /* the ranks have said why */
    }
    config->train.ranks = launch->world_size;
    if (launch->rank == 0)
        TRY(print_resolved(config));
    TRY(interrupt_install());
    TRY(run_process(config, launch, &options, interrupt_flag()));
    if (launch->rank == 0)
        log_info("run", "output in %s", config->output.dir);
    return ST_OK;
}

static enum status train(struct run_config *config, const struct trace_request *trace,
                         int ranks_asked, char **argv)
{
    struct launch launch;
    TRY(launch_discover(&launch, ranks_asked));
    if (run_device_kind(config) == DEVICE_CUDA)
        return train_on_gpus(config, &launch, trace, argv);
    if (launch.world_size > 1)
        return FAIL(UNSUPPORTED,
                    "%s started %d processes, but on CPUs all ranks are threads of one: start one "
                    "process and give --ranks %d",
                    launch_origin_name(launch.origin), launch.world_size, launch.world_size);
    return train_on_cpu(config, trace);
}

enum status cmd_train(int argc, char **argv)
{
    struct train_arguments args = {.trace.step = 5};
    struct run_config config;
    struct option options[SHORTHANDS + OWN_OPTIONS] = {
        {.name = "config",
         .kind = OPTION_TEXT,
         .value = &args.config,
         .metavar = "FILE",
         .help = "run configuration (YAML)"},
        {.name = "set",
         .kind = OPTION_LIST,
         .value = &args.sets,
         .metavar = "KEY=VALUE",
         .help = "override a key of the configuration, as in optim.lr=5e-5; repeatable"},
        {.name = "padded",
         .kind = OPTION_FLAG,
         .value = &args.padded,
         .help = "pad every sequence to max_length instead of packing"},
        {.name = "trace",
         .kind = OPTION_TEXT,
         .value = &args.trace.path,
         .metavar = "FILE",
         .help = "write a time line of one step (Chrome trace; a file a rank)"},
        {.name = "trace-step",
         .kind = OPTION_INT,
         .value = &args.trace.step,
         .metavar = "N",
         .help = "which step (5; the last one if there are fewer)",
         .min = 1,
         .max = 1e15},
    };
    for (int i = 0; i < SHORTHANDS; i++)
        options[OWN_OPTIONS + i] = (struct option){.name = shorthands[i].option,
                                                   .kind = OPTION_TEXT,
                                                   .value = &args.values[i],
                                                   .metavar = shorthands[i].metavar,
                                                   .help = shorthands[i].help};
    const struct command command = {
        .name = "train",
        .summary = "Fine-tune a model for question answering, and evaluate it.",
        .details = "SIGINT or SIGTERM ends the run after the step at hand; what there is is "
                   "written. A second one ends it at once.",
        .options = options,
        .option_count = SHORTHANDS + OWN_OPTIONS,
    };
    bool help_shown = false;
    TRY(options_parse(&command, argc, argv, &help_shown));
    if (help_shown) {
        config_help();
        return ST_OK;
    }
    if (args.config == NULL)
        return FAIL(INVALID, "--config FILE is missing; configs/ has some to start from");
    TRY(resolve(&config, &args));
    /* Ranks that somebody else started must be as many as were asked for; 1 is the default. */
    int ranks_asked = config.train.ranks > 1 ? (int)config.train.ranks : 0;
    return train(&config, &args.trace, ranks_asked, argv - 1 /* main's, for launch_spawn() */);
}
