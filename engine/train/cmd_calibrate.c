#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "engine/base/file.h"
#include "engine/base/log.h"
#include "engine/base/options.h"
#include "engine/base/out.h"
#include "engine/train/calibrate.h"
#include "engine/train/commands.h"
#include "engine/train/run.h"

struct asked {
    const char *device, *comm, *ranks, *threads, *output, *show;
    bool processor_time;
    struct run_config config;
};

static enum status print_profile(const struct machine *m)
{
    char *text = NULL;
    size_t bytes = 0;
    TRY(machine_format(m, &text, &bytes));
    out("%s", text);
    mem_free(&text);
    return ST_OK;
}

/* The user's own file unless another one is asked for; "-": only print. */
static enum status keep_profile(const struct machine *m, const char *output)
{
    char path[4096];
    snprintf(path, sizeof path, "%s", output != NULL ? output : "");
    if (output == NULL) {
        TRY(machine_user_path(path, sizeof path, m->device));
        char *slash = strrchr(path, '/');
        if (slash != NULL) {
            *slash = '\0';
            TRY(file_make_dirs(path));
            *slash = '/';
        }
    }
    if (path[0] == '\0' || strcmp(path, "-") == 0)
        return ST_OK;
    TRY(machine_write(m, path));
    log_info("calibrate", "written to %s", path);
    return ST_OK;
}

static enum status on_rank(void *context, struct device *device, struct comm *comm)
{
    const struct asked *asked = context;
    struct machine m;
    char day[32];
    time_t now = time(NULL);
    struct tm utc;
    enum status st = ST_OK;
    const struct calibrate_options options = {.comm = asked->config.train.comm,
                                              .processor_time = asked->processor_time};
    TRY(calibrate_rank(&m, device, comm, &options));
    if (gmtime_r(&now, &utc) != NULL && strftime(day, sizeof day, "%Y-%m-%d", &utc) > 0)
        snprintf(m.date, sizeof m.date, "%s", day);
    if (comm->rank == 0) {
        st = print_profile(&m);
        if (st == ST_OK)
            st = out_flush();
        if (st == ST_OK)
            st = keep_profile(&m, asked->output);
    }
    return comm_agree(comm, st);
}

static enum status show_profile(const char *name)
{
    struct machine m;
    TRY(machine_find(&m, name));
    return print_profile(&m);
}

static enum status set(struct run_config *config, const char *key, const char *value)
{
    char assignment[256], origin[64];
    if (value == NULL)
        return ST_OK;
    snprintf(assignment, sizeof assignment, "train.%s=%s", key, value);
    snprintf(origin, sizeof origin, "--%s", key);
    return config_set(config, assignment, origin);
}

enum status cmd_calibrate(int argc, char **argv)
{
    struct asked asked = {0};
    bool help_shown = false;
    const struct option options[] = {
        {.name = "device",
         .kind = OPTION_TEXT,
         .value = &asked.device,
         .metavar = "auto|cpu|cuda",
         .help = "what to measure"},
        {.name = "ranks",
         .kind = OPTION_TEXT,
         .value = &asked.ranks,
         .metavar = "N",
         .help = "ranks that measure together, as they will train"},
        {.name = "threads",
         .kind = OPTION_TEXT,
         .value = &asked.threads,
         .metavar = "N",
         .help = "threads of a CPU rank; 0: its share of the cores"},
        {.name = "processor-time",
         .kind = OPTION_FLAG,
         .value = &asked.processor_time,
         .help = "CPU ranks of one thread: measure processor time, where others use the cores too"},
        {.name = "comm",
         .kind = OPTION_TEXT,
         .value = &asked.comm,
         .metavar = "auto|local|mpi|nccl",
         .help = "how they communicate"},
        {.name = "output",
         .kind = OPTION_TEXT,
         .value = &asked.output,
         .metavar = "FILE",
         .help = "where to write the profile, - for nowhere; without it the user's own, which "
                 "tessera plan finds by itself"},
        {.name = "show",
         .kind = OPTION_TEXT,
         .value = &asked.show,
         .metavar = "FILE|NAME",
         .help = "measure nothing, print a profile; NAME as in h100+ib400"},
    };
    const struct command command = {
        .name = "calibrate",
        .summary = "Measure what this machine can do, for predictions of step times.",
        .details =
            "Takes some ten seconds; nothing else should run beside it. The profile goes to\n"
            "standard output too.",
        .options = options,
        .option_count = sizeof options / sizeof *options,
    };
    TRY(options_parse(&command, argc, argv, &help_shown));
    if (help_shown)
        return ST_OK;
    if (asked.show != NULL)
        return show_profile(asked.show);
    config_defaults(&asked.config);
    TRY(set(&asked.config, "device", asked.device));
    TRY(set(&asked.config, "comm", asked.comm));
    TRY(set(&asked.config, "ranks", asked.ranks));
    TRY(set(&asked.config, "threads", asked.threads));
    struct run_options how = {.quiet = true, .alone = on_rank, .context = &asked};
    return run_launch(&asked.config, &how, asked.ranks != NULL ? (int)asked.config.train.ranks : 0,
                      argv - 1 /* main's */);
}
