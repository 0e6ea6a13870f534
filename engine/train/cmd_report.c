#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/log.h"
#include "engine/base/options.h"
#include "engine/base/out.h"
#include "engine/train/commands.h"
#include "engine/train/comparison.h"

enum { MAX_RUNS = 64 };

/* Bytes of the folders that all of them begin with. */
static size_t common_start(char *const *dirs, int count)
{
    size_t common = 0;
    for (size_t k = 0; dirs[0][k] != '\0'; k++) {
        for (int i = 1; i < count; i++)
            if (dirs[i][k] != dirs[0][k])
                return common;
        if (dirs[0][k] == '/')
            common = k + 1;
    }
    return common;
}

/* Bytes of the last parts that all of them end with, "/repeat-1". */
static size_t common_end(char *const *dirs, int count)
{
    const char *last = strrchr(dirs[0], '/');
    for (int i = 1; i < count && last != NULL; i++) {
        const char *other = strrchr(dirs[i], '/');
        if (other == NULL || strcmp(other, last) != 0)
            last = NULL;
    }
    return last != NULL ? strlen(last) : 0;
}

/* Where the last parts of the folders' names are not enough, what differs tells runs apart. */
static void name_runs(struct run_result *runs, char *const *dirs, int count)
{
    bool unique = true;
    for (int i = 0; i < count; i++)
        for (int k = 0; k < i; k++)
            unique &= strcmp(runs[i].name, runs[k].name) != 0;
    if (unique)
        return;
    size_t start = common_start(dirs, count), end = common_end(dirs, count);
    for (int i = 0; i < count; i++) {
        size_t len = strlen(dirs[i]);
        if (len > start + end) /* else it is one folder given twice */
            snprintf(runs[i].name, sizeof runs[i].name, "%.*s", (int)(len - start - end),
                     dirs[i] + start);
    }
}

static enum status report(char *const *dirs, int count, const char *path)
{
    struct run_result *runs = NULL;
    enum status st = ST_OK;
    TRY(mem_alloc(&runs, sizeof *runs * (size_t)count));
    for (int i = 0; i < count; i++)
        TRY_GOTO(st, out, run_result_read(&runs[i], dirs[i]));
    name_runs(runs, dirs, count);
    struct comparison c = {
        .title = count == 1 ? runs[0].name : "Runs side by side", .runs = runs, .count = count};
    comparison_print(&c);
    TRY_GOTO(st, out, comparison_page(&c, path));
    TRY_GOTO(st, out, out_flush());
    log_info("report", "%s", path);
out:
    for (int i = 0; i < count; i++)
        run_result_release(&runs[i]);
    mem_free(&runs);
    return st;
}

/* Folders may stand among the options; behind "--" all are folders. */
static enum status sort_arguments(int argc, char **argv, char **dirs, int *dir_count,
                                  char **options, int *option_count)
{
    bool only_dirs = false;
    for (int i = 1; i < argc; i++) {
        if (*dir_count == MAX_RUNS || *option_count + 2 > MAX_RUNS)
            return FAIL(INVALID, "report: more than %d runs", MAX_RUNS);
        bool is_option = !only_dirs && argv[i][0] == '-';
        if (is_option && strcmp(argv[i], "--") == 0)
            only_dirs = true;
        else if (!is_option)
            dirs[(*dir_count)++] = argv[i];
        else
            options[(*option_count)++] = argv[i];
        if (is_option && strcmp(argv[i], "--output") == 0 && i + 1 < argc)
            options[(*option_count)++] = argv[++i];
    }
    return ST_OK;
}

enum status cmd_report(int argc, char **argv)
{
    const char *path = "report.html";
    char *dirs[MAX_RUNS], *rest[MAX_RUNS] = {argv[0]};
    int dir_count = 0, rest_count = 1;
    bool help_shown = false;
    const struct option options[] = {
        {.name = "output",
         .kind = OPTION_TEXT,
         .value = &path,
         .metavar = "FILE",
         .help = "the page"},
    };
    const struct command command = {
        .name = "report",
        .summary = "One HTML page of finished runs: memory, time, losses, speed.",
        .operands = "RUN [RUN]...",
        .details = "RUN is a run's output folder. Its time line is in the page if it was trained\n"
                   "with --trace RUN/trace.json. The page opens offline, in any browser.",
        .options = options,
        .option_count = sizeof options / sizeof *options,
    };
    TRY(sort_arguments(argc, argv, dirs, &dir_count, rest, &rest_count));
    TRY(options_parse(&command, rest_count, rest, &help_shown));
    if (help_shown)
        return ST_OK;
    if (dir_count == 0)
        return FAIL(INVALID, "report: which runs? Give their output folders "
                             "(tessera report --help)");
    return report(dirs, dir_count, path);
}
