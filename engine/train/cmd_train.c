#include <inttypes.h>
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
    {"comm", "train.comm", "auto|local|mpi|nccl", "how they communicate"},
    {"device", "train.device", "auto|cpu|cuda", "where they compute"},
    {"steps", "train.steps", "N", "steps to train; 0 evaluates only"},
    {"epochs", "train.epochs", "N", "passes over the training data"},
    {"output-dir", "output.dir", "DIR", "folder for metrics, predictions, weights"},
    {"max-train-samples", "data.max_train_samples", "N", "train on the first N questions"},
    {"max-eval-samples", "data.max_eval_samples", "N", "evaluate the first N questions"},
    {"checkpoint-every", "checkpoint.every", "N", "save the state every N steps, and at the end"},
    {"keep", "checkpoint.keep", "N", "checkpoints that stay (2)"},
    {"keep-best", "checkpoint.keep_best", "f1|exact_match|loss", "the best one stays too"},
    {"resume", "checkpoint.resume", "latest|DIR", "go on from a checkpoint"},
};

enum { SHORTHANDS = sizeof shorthands / sizeof *shorthands, OWN_OPTIONS = 6 };

struct train_arguments {
    const char *config;
    struct option_list sets;
    bool padded, resume_or_start;
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
    if (args->resume_or_start)
        TRY(config_set(config, "checkpoint.resume_or_start=true", "--resume-or-start"));
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

static enum status train_in_threads(const struct run_config *config,
                                    const struct trace_request *trace)
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

/* This process is a rank of a world that somebody has started. */
static enum status train_as_rank(struct run_config *config, const struct launch *launch,
                                 const struct trace_request *trace)
{
    struct run_options options = {.quiet = false, .trace = *trace};
    config->train.ranks = launch->world_size;
    if (launch->rank == 0)
        TRY(print_resolved(config));
    TRY(interrupt_install());
    TRY(run_process(config, launch, &options, interrupt_flag()));
    if (launch->rank == 0)
        log_info("run", "output in %s", config->output.dir);
    return ST_OK;
}

/* One process a GPU: this one, or as many as there are ranks, each of which comes here again. */
static enum status train_on_gpus(struct run_config *config, const struct launch *launch,
                                 const struct trace_request *trace, char **argv)
{
    if (config->train.comm == COMM_LOCAL || config->train.comm == COMM_MPI)
        return FAIL(INVALID, "train.comm %s is for ranks on CPUs; train.device cuda needs nccl",
                    config->train.comm == COMM_MPI ? "mpi" : "local");
    if (launch->origin == LAUNCH_ALONE && config->train.ranks > 1) {
        int exit_code = 0;
        TRY(launch_spawn(&exit_code, (int)config->train.ranks, argv, 0));
        exit(exit_code); /* the ranks have said why */
    }
    TRY(launch_check_address(launch));
    return train_as_rank(config, launch, trace);
}

/* MPI's launchers start processes that can speak MPI with each other. */
static bool is_mpi_launch(const struct launch *launch)
{
    return launch->world_size > 1 &&
           (launch->origin == LAUNCH_OPENMPI || launch->origin == LAUNCH_SLURM);
}

static enum status train_on_cpus(struct run_config *config, const struct launch *launch,
                                 const struct trace_request *trace)
{
#ifdef TESSERA_MPI
    if (config->train.comm == COMM_AUTO && is_mpi_launch(launch))
        config->train.comm = COMM_MPI;
#else
    if (config->train.comm == COMM_MPI)
        return FAIL(UNSUPPORTED, "train.comm mpi is not built in; install Open MPI (make deps "
                                 "MPI=1) and build with MPI=1");
#endif
    if (config->train.comm == COMM_NCCL)
        return FAIL(UNSUPPORTED, "train.comm nccl needs GPUs: there is none here, or this program "
                                 "was built without CUDA");
    if (config->train.comm == COMM_MPI && launch->world_size == 1 && config->train.ranks > 1)
        return FAIL(INVALID,
                    "train.comm mpi: start the ranks with mpiexec -n %" PRId64
                    " tessera train ..., or leave --comm out for %" PRId64
                    " threads of this process",
                    config->train.ranks, config->train.ranks);
    if (config->train.comm == COMM_MPI && launch->world_size > 1 && !is_mpi_launch(launch))
        return FAIL(INVALID, "train.comm mpi: %s started the ranks; use mpiexec or srun",
                    launch_origin_name(launch->origin));
    if (config->train.comm == COMM_MPI)
        return train_as_rank(config, launch, trace);
    if (launch->world_size > 1)
        return FAIL(UNSUPPORTED,
                    "%s started %d processes, but here the ranks are threads of one (%s): start "
                    "one process and give --ranks %d",
                    launch_origin_name(launch->origin), launch->world_size,
                    config->train.comm == COMM_LOCAL ? "train.comm local"
                    : is_mpi_launch(launch)          ? "built without MPI"
                                                     : "CPU ranks without MPI",
                    launch->world_size);
    return train_in_threads(config, trace);
}

static enum status train(struct run_config *config, const struct trace_request *trace,
                         int ranks_asked, char **argv)
{
    struct launch launch;
    TRY(launch_discover(&launch, ranks_asked));
    if (run_device_kind(config) == DEVICE_CUDA)
        return train_on_gpus(config, &launch, trace, argv);
    return train_on_cpus(config, &launch, trace);
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
        {.name = "resume-or-start",
         .kind = OPTION_FLAG,
         .value = &args.resume_or_start,
         .help = "go on from the latest checkpoint if there is one, else start anew"},
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
        .details =
            "SIGINT, SIGTERM or SIGUSR1 ends the run after the step at hand; what there is is "
            "written, a checkpoint too if they are on. A second one ends it at once.",
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
