#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/base/arena.h"
#include "engine/base/config.h"
#include "engine/base/file.h"
#include "engine/base/log.h"
#include "engine/base/options.h"
#include "engine/base/out.h"
#include "engine/base/text.h"
#include "engine/train/commands.h"
#include "engine/train/comparison.h"

enum { MAX_VALUES = 16, MAX_RUNS = 256, MAX_REPEAT = 64, MAX_ARGS = 192 };

struct list {
    int64_t values[MAX_VALUES];
    int count;
};

struct request {
    const char *config, *dir;
    struct list ranks, stages, batches;
    struct option_list sets;
    int64_t steps, repeat;
};

/* ---- one run, a process of its own ---- */

struct arguments {
    char text[MAX_ARGS][600];
    char *argv[MAX_ARGS + 1];
    int count;
};

static void add(struct arguments *a, const char *fmt, ...) PRINTF_LIKE(2, 3);
static void add(struct arguments *a, const char *fmt, ...)
{
    va_list args;
    ASSERT(a->count < MAX_ARGS);
    va_start(args, fmt);
    vsnprintf(a->text[a->count], sizeof a->text[0], fmt, args);
    va_end(args);
    a->argv[a->count] = a->text[a->count];
    a->argv[++a->count] = NULL;
}

/* What a comparison does not want: evaluations, checkpoints, weights and files for TensorBoard. */
static const char *const settings[] = {
    "data.eval=",
    "eval.before=false",
    "eval.stop_metric=none",
    "eval.train_samples=0",
    "checkpoint.every=0",
    "checkpoint.keep_best=none",
    "checkpoint.resume=",
    "checkpoint.resume_or_start=false",
    "checkpoint.export_best=false",
    "output.tensorboard=false",
    "output.model=false",
};

/* @counting: memory, in a run of its own. */
static void add_all(struct arguments *a, const struct request *q, const struct run_result *r,
                    const char *dir, bool counting)
{
    add(a, "tessera");
    add(a, "train");
    add(a, "--config=%s", q->config);
    for (int i = 0; i < q->sets.count; i++)
        add(a, "--set=%s", q->sets.items[i]);
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        add(a, "--set=%s", settings[i]);
    add(a, "--set=train.micro_batch=%" PRId64, r->micro_batch);
    add(a, "--ranks=%" PRId64, r->ranks);
    if (r->zero_stage == ZERO_STAGE_AUTO)
        add(a, "--zero-stage=auto");
    else
        add(a, "--zero-stage=%" PRId64, r->zero_stage);
    add(a, "--steps=%" PRId64, q->steps); /* also to count: the plan is for the longest batch */
    add(a, "--output-dir=%s", dir);
    if (counting) {
        add(a, "--count-memory");
        return;
    }
    /* The last step is the traced one: it does not count for speed. */
    add(a, "--trace=%s/trace.json", dir);
    add(a, "--trace-step=%" PRId64, q->steps);
}

static void become(const struct arguments *a, const char *log, pid_t parent)
{
    int file = open(log, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    prctl(PR_SET_PDEATHSIG, SIGTERM); /* it does not go on alone */
    if (getppid() != parent)          /* which died before that */
        _exit(127);
    if (file < 0 || dup2(file, STDOUT_FILENO) < 0 || dup2(file, STDERR_FILENO) < 0)
        _exit(127);
    execv("/proc/self/exe", a->argv);
    _exit(127);
}

/* The last error line of a log, without time and rank. */
static void last_error(char out[1024], const char *log)
{
    struct file_text text = {0};
    out[0] = '\0';
    if (file_read(&text, log) != ST_OK)
        return;
    for (char *at = text.data, *end; *at != '\0'; at = end + (*end != '\0')) {
        end = at + strcspn(at, "\n");
        char *found = strstr(at, " error ");
        if (found != NULL && found < end)
            snprintf(out, 1024, "%.*s", (int)(end - found - 7), found + 7);
    }
    mem_free(&text.data);
}

static void say_failed(struct run_result *r, int state, const char *log)
{
    char error[1024];
    last_error(error, log);
    if (WIFSIGNALED(state) && WTERMSIG(state) == SIGKILL)
        snprintf(r->reason, sizeof r->reason, "killed, as a system out of memory does it (%.900s)",
                 log);
    else if (WIFSIGNALED(state))
        snprintf(r->reason, sizeof r->reason, "ended by signal %d (%.900s)", WTERMSIG(state), log);
    else if (error[0] != '\0')
        snprintf(r->reason, sizeof r->reason, "%.1000s", error);
    else
        snprintf(r->reason, sizeof r->reason, "exit code %d (%.900s)", WEXITSTATUS(state), log);
}

/* Run this program again and wait. @state: as waitpid() has it. */
static enum status run_process_again(int *state, const struct request *q,
                                     const struct run_result *r, const char *dir, const char *log,
                                     bool counting)
{
    struct arguments *a = NULL;
    TRY(file_make_dirs(dir));
    TRY(mem_alloc(&a, sizeof *a));
    add_all(a, q, r, dir, counting);
    pid_t parent = getpid(), child = fork();
    if (child == 0)
        become(a, log, parent);
    mem_free(&a);
    if (child < 0)
        return FAIL(SYSTEM, "cannot start a process: %s", strerror(errno));
    while (waitpid(child, state, 0) < 0)
        if (errno != EINTR)
            return FAIL(SYSTEM, "cannot wait for a process: %s", strerror(errno));
    if (WIFEXITED(*state) && WEXITSTATUS(*state) == 127)
        return FAIL(SYSTEM, "cannot start this program again, or write %s", log);
    return ST_OK;
}

static bool is_well(int state)
{
    return WIFEXITED(state) && WEXITSTATUS(state) == 0;
}

/* Run one combination once. A failure of it is no failure here. */
static enum status run_once(struct run_result *r, const struct request *q, const char *dir)
{
    char log[1200];
    int state = 0;
    TRY(path_join(log, sizeof log, dir, "log.txt"));
    TRY(run_process_again(&state, q, r, dir, log, false));
    if (!is_well(state)) {
        say_failed(r, state, log);
        return ST_OK;
    }
    struct run_result asked = *r;
    enum status st = run_result_read(r, dir);
    snprintf(r->name, sizeof r->name, "%s", asked.name);
    if (asked.zero_stage == ZERO_STAGE_AUTO)
        snprintf(r->name + strlen(r->name), sizeof r->name - strlen(r->name), " (%" PRId64 ")",
                 r->zero_stage);
    return st;
}

/* The bytes of each category, as the same steps allocate and free them. Where that fails (it needs
 * more memory than an arena) they are not known. */
static enum status count_once(struct run_result *r, const struct request *q, const char *dir)
{
    char log[1200];
    int state = 0;
    TRY(path_join(log, sizeof log, dir, "log.txt"));
    TRY(run_process_again(&state, q, r, dir, log, true));
    if (is_well(state))
        return run_result_count(r, dir);
    log_warn("compare", "%s: its memory was not counted, see %s", r->name, log);
    return ST_OK;
}

static void say_stage(char out[24], int64_t stage)
{
    if (stage == ZERO_STAGE_AUTO)
        snprintf(out, 24, "auto");
    else
        snprintf(out, 24, "%" PRId64, stage);
}

/* Where a combination's runs go. @part: "repeat-1". */
static enum status name_folder(char dir[900], const struct request *q, const struct run_result *r,
                               const char *part)
{
    char stage[24];
    say_stage(stage, r->zero_stage);
    int n = snprintf(dir, 900, "%s/ranks-%" PRId64 "-stage-%s-batch-%" PRId64 "/%s", q->dir,
                     r->ranks, stage, r->micro_batch, part);
    return n < 900 ? ST_OK : FAIL(INVALID, "--output-dir: the name is too long");
}

/* All repeats of a combination; the first that fails is what counts. */
static enum status run_repeats(struct run_result *r, const struct request *q)
{
    char dir[900], part[32];
    struct run_result *repeats = NULL;
    struct run_result asked = *r;
    enum status st = ST_OK;
    TRY(mem_alloc(&repeats, sizeof *repeats * (size_t)q->repeat));
    for (int i = 0; i < q->repeat; i++) {
        repeats[i] = *r;
        snprintf(part, sizeof part, "repeat-%d", i + 1);
        TRY_GOTO(st, out, name_folder(dir, q, r, part));
        TRY_GOTO(st, out, run_once(&repeats[i], q, dir));
        if (repeats[i].reason[0] != '\0') {
            snprintf(r->reason, sizeof r->reason, "%s", repeats[i].reason);
            goto out;
        }
    }
    run_result_median(repeats, (int)q->repeat);
    *r = repeats[0];
    memset(&repeats[0], 0, sizeof repeats[0]); /* moved */
    TRY_GOTO(st, out, name_folder(dir, q, &asked, "counted"));
    st = count_once(r, q, dir);
out:
    for (int i = 0; i < q->repeat; i++)
        run_result_release(&repeats[i]);
    mem_free(&repeats);
    return st;
}

/* ---- all combinations ---- */

static void say_progress(const struct run_result *r, int done, int count)
{
    if (r->reason[0] != '\0')
        log_warn("compare", "%d of %d  %s: %s", done, count, r->name, r->reason);
    else
        log_info("compare", "%d of %d  %s: %.1f sequences/s", done, count, r->name,
                 r->sequences_per_s);
}

static enum status run_all(struct comparison *c, const struct request *q)
{
    int total = q->ranks.count * q->stages.count * q->batches.count;
    for (int i = 0; i < total; i++) {
        struct run_result *r = &c->runs[c->count++];
        r->ranks = q->ranks.values[i / (q->batches.count * q->stages.count)];
        r->micro_batch = q->batches.values[i / q->stages.count % q->batches.count];
        r->zero_stage = q->stages.values[i % q->stages.count];
        char stage[24];
        say_stage(stage, r->zero_stage);
        snprintf(r->name, sizeof r->name, "%" PRId64 " rank%s, stage %s", r->ranks,
                 r->ranks == 1 ? "" : "s", stage);
        if (q->batches.count > 1)
            snprintf(r->name + strlen(r->name), sizeof r->name - strlen(r->name),
                     ", batch %" PRId64, r->micro_batch);
        TRY(run_repeats(r, q));
        say_progress(r, i + 1, total);
    }
    return ST_OK;
}

static enum status compare(const struct request *q)
{
    char page[1200], title[600];
    enum status st = ST_OK;
    snprintf(title, sizeof title, "Comparison: %s", q->config);
    struct comparison c = {
        .title = title, .config = q->config, .steps = q->steps, .repeat = q->repeat};
    TRY(mem_alloc(&c.runs, sizeof *c.runs * MAX_RUNS));
    TRY_GOTO(st, out, run_all(&c, q));
    comparison_print(&c);
    TRY_GOTO(st, out, comparison_write(&c, q->dir));
    TRY_GOTO(st, out, path_join(page, sizeof page, q->dir, "report.html"));
    TRY_GOTO(st, out, comparison_page(&c, page));
    TRY_GOTO(st, out, out_flush());
    log_info("compare", "%s, compare.json and compare.csv beside it", page);
    int failed = 0;
    for (int i = 0; i < c.count; i++)
        failed += c.runs[i].reason[0] != '\0';
    if (failed == c.count)
        st =
            FAIL(INVALID, "none of the %d combinations could be run: %s", failed, c.runs[0].reason);
out:
    for (int i = 0; i < c.count; i++)
        run_result_release(&c.runs[i]);
    mem_free(&c.runs);
    return st;
}

/* ---- the command line ---- */

/* "1,2,4"; @min - 1 may be given as @word, NULL: as nothing. */
static enum status parse_list(struct list *list, const char *option, const char *text, int64_t min,
                              int64_t max, const char *word)
{
    list->count = 0;
    for (const char *at = text;; at++) {
        char one[32];
        int64_t value;
        size_t len = strcspn(at, ",");
        snprintf(one, sizeof one, "%.*s", (int)len, at);
        if (word != NULL && strcmp(one, word) == 0)
            value = min - 1;
        else if (len >= sizeof one || !text_to_int(&value, one) || value < min || value > max)
            return FAIL(INVALID,
                        "--%s: expected integers from %" PRId64 " to %" PRId64
                        "%s%s with commas between them, found \"%s\"",
                        option, min, max, word != NULL ? " or " : "", word != NULL ? word : "",
                        text);
        for (int i = 0; i < list->count; i++)
            if (list->values[i] == value)
                return FAIL(INVALID, "--%s: %s stands there twice", option, one);
        if (list->count == MAX_VALUES)
            return FAIL(INVALID, "--%s: more than %d values", option, MAX_VALUES);
        list->values[list->count++] = value;
        at += len;
        if (*at == '\0')
            return ST_OK;
    }
}

/* What is not given is the configuration's. */
static enum status resolve(struct request *q, char dir[CONFIG_TEXT_BYTES], const char *ranks,
                           const char *stages, const char *batches)
{
    struct run_config config;
    TRY(config_load(&config, q->config, q->sets.items, q->sets.count));
    q->ranks = (struct list){{config.train.ranks}, 1};
    q->batches = (struct list){{config.train.micro_batch}, 1};
    if (ranks != NULL)
        TRY(parse_list(&q->ranks, "ranks", ranks, 1, 1 << 20, NULL));
    TRY(parse_list(&q->stages, "stages", stages, 0, 3, "auto"));
    if (batches != NULL)
        TRY(parse_list(&q->batches, "micro-batch", batches, 1, 1 << 20, NULL));
    if (q->ranks.count * q->stages.count * q->batches.count > MAX_RUNS)
        return FAIL(INVALID, "more than %d combinations", MAX_RUNS);
    if (q->dir == NULL) {
        TRY(path_join(dir, CONFIG_TEXT_BYTES, config.output.dir, "compare"));
        q->dir = dir;
    }
    for (int i = 0; i < q->sets.count; i++)
        if (strlen(q->sets.items[i]) > 500)
            return FAIL(INVALID, "--set: \"%.40s...\" is too long", q->sets.items[i]);
    return strlen(q->config) < 500 ? ST_OK : FAIL(INVALID, "--config: the name is too long");
}

enum status cmd_compare(int argc, char **argv)
{
    struct request q = {.steps = 30, .repeat = 5};
    const char *ranks = NULL, *stages = "0,1,2,3", *batches = NULL;
    char dir[CONFIG_TEXT_BYTES];
    bool help_shown = false;
    const struct option options[] = {
        {.name = "config",
         .kind = OPTION_TEXT,
         .value = &q.config,
         .metavar = "FILE",
         .help = "run configuration (YAML)",
         .required = true},
        {.name = "ranks",
         .kind = OPTION_TEXT,
         .value = &ranks,
         .metavar = "N[,N...]",
         .help = "numbers of ranks (the configuration's)"},
        {.name = "stages",
         .kind = OPTION_TEXT,
         .value = &stages,
         .metavar = "S[,S...]",
         .help = "zero stages; auto: what training would take itself"},
        {.name = "micro-batch",
         .kind = OPTION_TEXT,
         .value = &batches,
         .metavar = "B[,B...]",
         .help = "samples in one forward and backward on one rank (the configuration's)"},
        {.name = "steps",
         .kind = OPTION_INT,
         .value = &q.steps,
         .metavar = "N",
         .help = "steps of each run",
         .min = 2,
         .max = 1e6},
        {.name = "repeat",
         .kind = OPTION_INT,
         .value = &q.repeat,
         .metavar = "N",
         .help = "runs of each combination; medians are shown",
         .min = 1,
         .max = MAX_REPEAT},
        {.name = "output-dir",
         .kind = OPTION_TEXT,
         .value = &q.dir,
         .metavar = "DIR",
         .help = "where runs, tables and page go (compare/ in the configuration's output.dir)"},
        {.name = "set",
         .kind = OPTION_LIST,
         .value = &q.sets,
         .metavar = "KEY=VALUE",
         .help = "override a key of the configuration"},
    };
    const struct command command = {
        .name = "compare",
        .summary = "Run every combination of ranks, stages and micro-batches briefly from the same "
                   "seed,\nand compare memory, speed and losses.",
        .details = "Each run is a process with a folder of its own in DIR. One that fails is a row "
                   "that says\nso. Writes compare.json, compare.csv and report.html, which opens "
                   "offline.",
        .options = options,
        .option_count = sizeof options / sizeof *options,
    };
    TRY(options_parse(&command, argc, argv, &help_shown));
    if (help_shown)
        return ST_OK;
    TRY(resolve(&q, dir, ranks, stages, batches));
    return compare(&q);
}
