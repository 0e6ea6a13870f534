#include <stdio.h>
#include <string.h>

#include "engine/base/options.h"
#include "engine/train/commands.h"
#include "engine/train/run.h"

/* Options that are short names of configuration keys. */
struct shorthand {
    const char *option, *key, *metavar, *help;
};

static const struct shorthand shorthands[] = {
    {"zero-stage", "train.zero_stage", "0..3|auto",
     "what is partitioned across ranks; auto: the fastest that fits"},
    {"ranks", "train.ranks", "N", "ranks that train together"},
    {"comm", "train.comm", "auto|local|mpi|nccl", "how they communicate"},
    {"bind", "train.bind", "auto|none", "keep each rank on its own cores and near memory"},
    {"device", "train.device", "auto|cpu|cuda", "where they compute"},
    {"steps", "train.steps", "N", "steps to train; 0 evaluates only"},
    {"epochs", "train.epochs", "N", "passes over the training data, where --steps is not given"},
    {"output-dir", "output.dir", "DIR", "folder for metrics, predictions, weights"},
    {"max-train-samples", "data.max_train_samples", "N", "train on the first N questions"},
    {"max-eval-samples", "data.max_eval_samples", "N", "evaluate the first N questions"},
    {"checkpoint-every", "checkpoint.every", "N", "save the state every N steps, and at the end"},
    {"keep", "checkpoint.keep", "N", "checkpoints that stay (2)"},
    {"keep-best", "checkpoint.keep_best", "f1|exact_match|loss", "the best one stays too"},
    {"resume", "checkpoint.resume", "latest|DIR", "go on from a checkpoint"},
};

enum { SHORTHANDS = sizeof shorthands / sizeof *shorthands, OWN_OPTIONS = 9 };

struct train_arguments {
    const char *config;
    struct option_list sets;
    bool padded, resume_or_start, export_best;
    struct trace_request trace;
    int64_t profile_steps;
    bool count_memory;
    const char *values[SHORTHANDS];
};

static bool is_given(const struct train_arguments *args, const char *key)
{
    for (int i = 0; i < SHORTHANDS; i++)
        if (args->values[i] != NULL && strcmp(shorthands[i].key, key) == 0)
            return true;
    return false;
}

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
    if (args->export_best)
        TRY(config_set(config, "checkpoint.export_best=true", "--export-best"));
    /* The one that is given decides: --epochs over steps of the file, but not over --steps. */
    if (is_given(args, "train.epochs") && !is_given(args, "train.steps") && config->train.steps > 0)
        TRY(config_set(config, "train.steps=-1", "--epochs"));
    return config_check(config);
}

enum status cmd_train(int argc, char **argv)
{
    struct train_arguments args = {.trace.step = 5};
    struct run_config config;
    struct start_times start;
    start_times_begin(&start);
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
         .help = "override a key of the configuration, as in optim.lr=5e-5"},
        {.name = "padded",
         .kind = OPTION_FLAG,
         .value = &args.padded,
         .help = "pad every sequence to max_length instead of packing"},
        {.name = "resume-or-start",
         .kind = OPTION_FLAG,
         .value = &args.resume_or_start,
         .help = "go on from the latest checkpoint if there is one, else start anew"},
        {.name = "export-best",
         .kind = OPTION_FLAG,
         .value = &args.export_best,
         .help = "leave the best checkpoint's weights in OUTPUT/model, not the last ones"},
        {.name = "trace",
         .kind = OPTION_TEXT,
         .value = &args.trace.path,
         .metavar = "FILE",
         .help = "write a time line of one step (Chrome trace; a file a rank)"},
        {.name = "trace-step",
         .kind = OPTION_INT,
         .value = &args.trace.step,
         .metavar = "N",
         .help = "which step; the last one if there are fewer",
         .min = 1,
         .max = 1e15},
        {.name = "profile",
         .kind = OPTION_INT,
         .value = &args.profile_steps,
         .metavar = "N",
         .help = "N steps after a warm-up op by op: a table, and OUTPUT/profile.json",
         .min = 1,
         .max = 1e15},
        {.name = "count-memory",
         .kind = OPTION_FLAG,
         .value = &args.count_memory,
         .help = "allocate each buffer when its life begins, free it when it ends, and count: "
                 "counted_bytes of OUTPUT/summary.json; slow"},
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
            "SIGINT, SIGTERM or SIGUSR1 ends the run after the step at hand; what there is is\n"
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
    start_times_part(&start, "config");
    config.train.graphs &= !args.count_memory; /* a captured step allocates nothing */
    struct run_options how = {.executor.heap = args.count_memory,
                              .trace = args.trace,
                              .profile_steps = args.profile_steps,
                              .start = &start};
    return run_launch(&config, &how, ranks_asked, argv - 1 /* main's */);
}
