#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "comm/comm.h"
#include "engine/base/options.h"
#include "engine/base/out.h"
#include "engine/base/text.h"
#include "engine/train/commands.h"
#include "engine/train/fit_table.h"
#include "engine/train/run.h"
#include "engine/train/scaling.h"
#include "engine/train/stage_plans.h"

struct arguments {
    const char *path, *ranks, *stage, *device, *profile;
    struct option_list sets;
    int64_t nodes;
    size_t memory_bytes, reserve_bytes;
    bool json, markdown, show_program, from_data, scaling;
};

/* "8", or "1..4096". */
static enum status parse_ranks(struct fit_table *table, const char *text)
{
    char first[16];
    int64_t from, to;
    const char *dots = strstr(text, "..");
    int len = dots != NULL ? (int)(dots - text) : (int)strlen(text);
    snprintf(first, sizeof first, "%.*s", len, text);
    if (!text_to_int(&from, first) || !text_to_int(&to, dots != NULL ? dots + 2 : first) ||
        from < 1 || to > COMM_MAX_WORLD_SIZE || from > to)
        return FAIL(INVALID,
                    "--ranks: expected an integer from 1 to %d, or two with the smaller first, as "
                    "in 1..%d; found \"%s\"",
                    COMM_MAX_WORLD_SIZE, COMM_MAX_WORLD_SIZE, text);
    table->ranks_from = (int)from;
    table->ranks_to = (int)to;
    return ST_OK;
}

static enum status set_from(struct run_config *config, const char *key, const char *value,
                            const char *option)
{
    char assignment[256];
    if (value == NULL)
        return ST_OK;
    snprintf(assignment, sizeof assignment, "%s=%s", key, value);
    return config_set(config, assignment, option);
}

/* The profile that is named, or the one that this user has measured. */
static enum status find_target(struct plan_target *target, const struct arguments *a,
                               const struct run_config *config)
{
    target->nodes = (int)a->nodes;
    if (a->profile == NULL) {
        target->device = run_device_kind(config, true);
        return machine_default(&target->machine, &target->timed, target->device);
    }
    TRY(machine_find(&target->machine, a->profile));
    target->timed = true;
    target->device = target->machine.device;
    if (config->train.device != DEVICE_AUTO && config->train.device != target->device)
        return FAIL(INVALID, "--profile %s is of %ss, but train.device is %s", a->profile,
                    target->device == DEVICE_CUDA ? "GPU" : "CPU",
                    target->device == DEVICE_CUDA ? "cpu" : "cuda");
    return ST_OK;
}

static enum status plan_memory(const struct arguments *a, const struct run_config *config,
                               const struct plan_target *target, struct fit_table *table)
{
    if (a->from_data)
        return FAIL(INVALID, "--data plans for the batches of one micro_batch; with --memory, "
                             "which looks for the largest, leave it out");
    if (a->show_program)
        return FAIL(INVALID, "--show-program prints one plan; leave --memory out");
    if (a->memory_bytes > FIT_MEMORY_MAX)
        return FAIL(INVALID, "--memory: expected at most 128TiB for a rank, found %zu bytes",
                    a->memory_bytes);
    if (a->reserve_bytes >= a->memory_bytes)
        return FAIL(INVALID, "--reserve: expected less than --memory, %zu bytes, found %zu",
                    a->memory_bytes, a->reserve_bytes);
    table->config = config;
    table->device = target->device;
    table->machine = target->timed ? &target->machine : NULL;
    table->nodes = target->nodes;
    table->memory_bytes = a->memory_bytes;
    table->reserve_bytes = a->reserve_bytes;
    if (a->json && a->markdown)
        return FAIL(INVALID, "--json or --markdown, not both");
    return fit_table_print(table, a->json ? FIT_JSON : a->markdown ? FIT_MARKDOWN : FIT_TEXT);
}

static enum status run(const struct arguments *a)
{
    struct run_config config;
    struct fit_table table = {0};
    struct plan_target target = {0};
    if (a->scaling)
        return scaling_print();
    TRY(config_load(&config, a->path, a->sets.items, a->sets.count));
    TRY(set_from(&config, "train.zero_stage", a->stage, "--zero-stage"));
    TRY(set_from(&config, "train.device", a->device, "--device"));
    table.ranks_from = table.ranks_to = (int)config.train.ranks;
    if (a->ranks != NULL)
        TRY(parse_ranks(&table, a->ranks));
    config.train.ranks = table.ranks_from;
    TRY(config_check(&config));
    TRY(find_target(&target, a, &config));
    if (a->nodes > 1 && !target.timed)
        return FAIL(INVALID, "--nodes is for step times, which need --profile FILE|NAME");
    if (a->memory_bytes > 0)
        return plan_memory(a, &config, &target, &table);
    if (table.ranks_from < table.ranks_to)
        return FAIL(INVALID, "--ranks %s: several numbers need --memory SIZE", a->ranks);
    if (a->reserve_bytes > 0)
        return FAIL(INVALID, "--reserve is a part of --memory SIZE, which is missing");
    if (a->markdown)
        return FAIL(INVALID, "--markdown is for --memory SIZE, which is missing");
    if (a->show_program && config.train.zero_stage == ZERO_STAGE_AUTO)
        return FAIL(INVALID, "--show-program needs a stage: --zero-stage 0, 1, 2 or 3");
    return stage_plans_print(&config, &target,
                             (struct stage_plans_options){a->json, a->show_program, a->from_data});
}

enum status cmd_plan(int argc, char **argv)
{
    struct arguments a = {.nodes = 1};
    bool help_shown = false;
    const struct option options[] = {
        {.name = "config",
         .kind = OPTION_TEXT,
         .value = &a.path,
         .metavar = "FILE",
         .help = "run configuration (YAML); without it, the defaults: BERT-base"},
        {.name = "ranks",
         .kind = OPTION_TEXT,
         .value = &a.ranks,
         .metavar = "N[..M]",
         .help = "ranks that train together; with --memory also from N to M, by powers of two"},
        {.name = "memory",
         .kind = OPTION_BYTES,
         .value = &a.memory_bytes,
         .metavar = "SIZE",
         .help =
             "memory of a rank, as in 80GiB: print which stages fit, the largest micro-batch of "
             "each and the fastest"},
        {.name = "reserve",
         .kind = OPTION_BYTES,
         .value = &a.reserve_bytes,
         .metavar = "SIZE",
         .help = "how much of that is for what is not the arena (GPUs: 2GiB; CPUs: 128MiB, and a "
                 "copy of the state with checkpoints)"},
        {.name = "device",
         .kind = OPTION_TEXT,
         .value = &a.device,
         .metavar = "auto|cpu|cuda",
         .help = "plan for these, also where they are not (auto: what training would take here)"},
        {.name = "zero-stage",
         .kind = OPTION_TEXT,
         .value = &a.stage,
         .metavar = "0..3|auto",
         .help = "the stage whose program --show-program prints"},
        {.name = "data",
         .kind = OPTION_FLAG,
         .value = &a.from_data,
         .help = "read the data and plan for its longest batch, as training does"},
        {.name = "profile",
         .kind = OPTION_TEXT,
         .value = &a.profile,
         .metavar = "FILE|NAME",
         .help = "predict step times for a machine: what tessera calibrate has written, or a name "
                 "as in h100+ib400; without it, this user's own profile if there is one"},
        {.name = "scaling",
         .kind = OPTION_FLAG,
         .value = &a.scaling,
         .help = "print the tables of docs/scaling.md, and nothing else"},
        {.name = "nodes",
         .kind = OPTION_INT,
         .value = &a.nodes,
         .metavar = "N",
         .help = "nodes that the ranks are spread over, equally; for step times",
         .min = 1,
         .max = COMM_MAX_WORLD_SIZE},
        {.name = "json", .kind = OPTION_FLAG, .value = &a.json, .help = "print JSON"},
        {.name = "markdown",
         .kind = OPTION_FLAG,
         .value = &a.markdown,
         .help = "with --memory: print a Markdown table"},
        {.name = "show-program",
         .kind = OPTION_FLAG,
         .value = &a.show_program,
         .help = "print the instructions and live bytes of the programs too"},
        {.name = "set",
         .kind = OPTION_LIST,
         .value = &a.sets,
         .metavar = "KEY=VALUE",
         .help = "override a key of the configuration"},
    };
    const struct command command = {
        .name = "plan",
        .summary = "Predict memory, to the byte, and step times of a run at every zero stage.",
        .options = options,
        .option_count = sizeof options / sizeof *options,
    };
    TRY(options_parse(&command, argc, argv, &help_shown));
    return help_shown ? ST_OK : run(&a);
}
