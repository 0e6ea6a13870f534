#include "engine/train/run_result.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/arena.h"
#include "engine/base/config.h"
#include "engine/base/file.h"
#include "io/json_file.h"

enum { WARM_UP_STEPS = 3, MAX_REPEATS = 64 };

static double number(const json_t *object, const char *key)
{
    const json_t *v = json_object_get(object, key);
    return json_is_number(v) ? json_number_value(v) : (double)NAN;
}

/* The nearest integer; -1 if there is none: anybody may have written the file. */
static int64_t whole_number(const json_t *object, const char *key)
{
    double v = number(object, key);
    return v >= 0 && v < 0x1p53 ? (int64_t)(v + 0.5) : -1;
}

/* ---- summary.json ---- */

/* NAN for what is not there. */
static void take_counted(struct run_result *r, const json_t *summary)
{
    const json_t *counted = json_object_get(summary, "counted_bytes");
    for (int c = 0; c < CATEGORY_COUNT; c++) {
        const char *name = category_name((enum category)c);
        r->counted_at_peak[c] = number(json_object_get(counted, "at_peak"), name);
        r->counted_own_max[c] = number(json_object_get(counted, "own_max"), name);
    }
}

enum status run_result_count(struct run_result *r, const char *dir)
{
    char path[1200];
    json_t *root = NULL;
    TRY(path_join(path, sizeof path, dir, "summary.json"));
    TRY(json_file_read(&root, path, NULL));
    take_counted(r, root);
    json_decref(root);
    return ST_OK;
}

static enum status read_summary(struct run_result *r, const char *dir)
{
    char path[1200];
    json_t *root = NULL;
    TRY(path_join(path, sizeof path, dir, "summary.json"));
    TRY(json_file_read(&root, path, NULL));
    const json_t *bytes = json_object_get(root, "bytes_per_rank"),
                 *process = json_object_get(root, "process_bytes");
    json_t *card = json_object_get(root, "card_bytes");
    r->planned_bytes = number(bytes, "arena");
    r->live_peak_bytes = number(bytes, "live_peak");
    for (int c = 0; c < CATEGORY_COUNT; c++) {
        const char *name = category_name((enum category)c);
        r->at_peak[c] = number(json_object_get(bytes, "at_peak"), name);
        r->own_max[c] = number(json_object_get(bytes, "own_max"), name);
    }
    take_counted(r, root);
    r->ranks = whole_number(root, "world_size");
    r->zero_stage = whole_number(root, "zero_stage"); /* also of a run that found it itself */
    enum status st = ST_OK;
    if (!(r->planned_bytes > 0) || r->ranks < 1 || r->zero_stage < 0)
        st = FAIL(CORRUPT, "%s: expected bytes_per_rank.arena, world_size and zero_stage of a run",
                  path);
    r->on_card = card != NULL;
    if (card != NULL)
        r->card = json_incref(card);
    r->measured_bytes = card != NULL ? number(card, "all") - number(card, "context")
                                     : number(process, "grown") / number(process, "ranks");
    json_decref(root);
    return st;
}

/* ---- metrics.jsonl ---- */

struct steps {
    double *ms, *sequences, *tokens; /* owned; one a step */
    int64_t *step;
    size_t capacity[4], count;
};

static enum status add_step(struct steps *s, const json_t *line)
{
    TRY(mem_grow(&s->ms, &s->capacity[0], s->count + 1, sizeof *s->ms));
    TRY(mem_grow(&s->sequences, &s->capacity[1], s->count + 1, sizeof *s->sequences));
    TRY(mem_grow(&s->tokens, &s->capacity[2], s->count + 1, sizeof *s->tokens));
    TRY(mem_grow(&s->step, &s->capacity[3], s->count + 1, sizeof *s->step));
    s->ms[s->count] = number(line, "ms");
    s->sequences[s->count] = number(line, "sequences");
    s->tokens[s->count] = number(line, "tokens");
    s->step[s->count++] = whole_number(line, "step");
    return ST_OK;
}

static json_t *real_or_null(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

static enum status read_line(struct run_result *r, struct steps *s, const char *line, size_t bytes,
                             const char *path, int64_t number_of_line)
{
    json_error_t error;
    json_t *o = json_loadb(line, bytes, 0, &error), *row = json_array();
    if (!json_is_object(o) || row == NULL) {
        enum status bad = FAIL(CORRUPT, "%s:%" PRId64 ": expected an object a line, found %s", path,
                               number_of_line, o != NULL ? json_kind(o) : error.text);
        json_decref(o);
        json_decref(row);
        return bad;
    }
    enum status st = ST_OK;
    bool evaluation = json_object_get(o, "evaluation") != NULL;
    json_array_append_new(row, json_integer(whole_number(o, "step")));
    json_array_append_new(row, real_or_null(number(o, "loss")));
    if (evaluation)
        json_array_append_new(row, real_or_null(number(o, "f1")));
    else
        st = add_step(s, o);
    json_array_append_new(evaluation ? r->evaluations : r->losses, row);
    json_decref(o);
    return st;
}

/* @traced: a step that does not count, or -1. */
static void take_speed(struct run_result *r, const struct steps *s, int64_t traced)
{
    double ms = 0, sequences = 0, tokens = 0, traced_ms = 0;
    size_t skip = s->count / 3 < WARM_UP_STEPS ? s->count / 3 : WARM_UP_STEPS, counted = 0;
    for (size_t i = 0; i < s->count; i++) {
        if (s->step[i] == traced && s->count > 1) {
            traced_ms = s->ms[i];
            continue;
        }
        if (i < skip)
            continue;
        ms += s->ms[i];
        sequences += s->sequences[i];
        tokens += s->tokens[i];
        counted++;
    }
    r->step_ms = ms / (double)counted;
    r->sequences_per_s = sequences / (ms * 1e-3);
    r->tokens_per_s = tokens / (ms * 1e-3);
    /* Capturing the traced step takes time of its own; then the other steps tell. */
    double whole = r->split.captured ? r->step_ms : traced_ms;
    r->data_ms = whole > r->split.step_ms ? whole - r->split.step_ms : 0;
}

static enum status read_metrics(struct run_result *r, const char *dir)
{
    char path[1200];
    enum status st = ST_OK;
    struct file_text text = {0};
    struct steps s = {.count = 0};
    TRY(path_join(path, sizeof path, dir, "metrics.jsonl"));
    TRY(file_read(&text, path));
    const char *at = text.data, *last = text.data + text.bytes, *end;
    for (int64_t line = 1; (end = memchr(at, '\n', (size_t)(last - at))) != NULL; line++) {
        TRY_GOTO(st, out, read_line(r, &s, at, (size_t)(end - at), path, line));
        at = end + 1;
    }
    take_speed(r, &s, r->has_split ? r->split.step : -1);
out:
    mem_free(&s.ms);
    mem_free(&s.sequences);
    mem_free(&s.tokens);
    mem_free(&s.step);
    mem_free(&text.data);
    return st;
}

/* ---- trace.json, plan.json ---- */

static json_t *timeline_of(const json_t *trace, double step_ms)
{
    json_t *list = json_array();
    const json_t *events = json_object_get(trace, "traceEvents"), *e;
    size_t i;
    json_array_foreach(events, i, e)
    {
        if (json_object_get(e, "dur") == NULL)
            continue;
        /* Whole microseconds are enough to look at, and short. */
        json_array_append_new(list, json_pack("[IIIO]", (json_int_t)whole_number(e, "tid"),
                                              (json_int_t)whole_number(e, "ts"),
                                              (json_int_t)whole_number(e, "dur"),
                                              json_object_get(e, "name")));
    }
    return json_pack("{s:f,s:o}", "step_ms", step_ms, "events", list);
}

static enum status read_trace(struct run_result *r, const char *dir)
{
    static const char *const names[] = {"trace.json", "trace.rank0.json"};
    char path[1200];
    for (int i = 0; i < 2; i++) {
        json_t *trace = NULL;
        TRY(path_join(path, sizeof path, dir, names[r->ranks > 1 ? 1 - i : i]));
        if (access(path, F_OK) != 0)
            continue;
        TRY(json_file_read(&trace, path, NULL));
        enum status st = time_split_of(&r->split, trace, path);
        if (st == ST_OK) {
            r->has_split = true;
            r->timeline = timeline_of(trace, r->split.step_ms);
        }
        json_decref(trace);
        return st;
    }
    return ST_OK;
}

/* Runs of earlier versions do not have all files. */
static enum status read_if_there(json_t **root, const char *dir, const char *name)
{
    char path[1200];
    TRY(path_join(path, sizeof path, dir, name));
    return access(path, F_OK) == 0 ? json_file_read(root, path, NULL) : ST_OK;
}

enum status run_result_read(struct run_result *r, const char *dir)
{
    char path[1200];
    struct run_config config;
    memset(r, 0, sizeof *r);
    size_t len = strlen(dir);
    while (len > 1 && dir[len - 1] == '/')
        len--;
    size_t from = len;
    while (from > 0 && dir[from - 1] != '/')
        from--;
    snprintf(r->name, sizeof r->name, "%.*s", (int)(len - from), dir + from);
    r->losses = json_array();
    r->evaluations = json_array();
    TRY(path_join(path, sizeof path, dir, "config.yaml"));
    TRY(config_load(&config, path, NULL, 0));
    r->micro_batch = config.train.micro_batch;
    r->grad_accum = config.train.grad_accum;
    TRY(read_summary(r, dir));
    TRY(read_trace(r, dir));
    TRY(read_if_there(&r->plan, dir, "plan.json"));
    TRY(read_if_there(&r->topology, dir, "topology.json"));
    return read_metrics(r, dir);
}

void run_result_release(struct run_result *r)
{
    json_decref(r->losses);
    json_decref(r->evaluations);
    json_decref(r->plan);
    json_decref(r->topology);
    json_decref(r->timeline);
    json_decref(r->card);
    memset(r, 0, sizeof *r);
}

/* ---- medians and differences ---- */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(const struct run_result *runs, int count, size_t offset)
{
    double values[MAX_REPEATS];
    int n = 0;
    for (int i = 0; i < count && n < MAX_REPEATS; i++) {
        memcpy(&values[n], (const char *)&runs[i] + offset, sizeof values[n]);
        n += isfinite(values[n]);
    }
    if (n == 0)
        return (double)NAN;
    qsort(values, (size_t)n, sizeof *values, by_value);
    return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

void run_result_median(struct run_result *runs, int count)
{
    static const size_t measured[] = {
        offsetof(struct run_result, measured_bytes),
        offsetof(struct run_result, sequences_per_s),
        offsetof(struct run_result, tokens_per_s),
        offsetof(struct run_result, step_ms),
        offsetof(struct run_result, data_ms),
        offsetof(struct run_result, split.step_ms),
        offsetof(struct run_result, split.part_ms[TIME_COMPUTE]),
        offsetof(struct run_result, split.part_ms[TIME_OPTIMIZER]),
        offsetof(struct run_result, split.part_ms[TIME_COMMUNICATION]),
        offsetof(struct run_result, split.part_ms[TIME_IDLE]),
        offsetof(struct run_result, split.hidden_ms),
    };
    struct run_result medians = runs[0];
    for (size_t i = 0; i < sizeof measured / sizeof *measured; i++) {
        double value = median(runs, count, measured[i]);
        memcpy((char *)&medians + measured[i], &value, sizeof value);
    }
    runs[0] = medians;
}

int64_t run_result_first_difference(const struct run_result *a, const struct run_result *b)
{
    size_t n = json_array_size(a->losses), m = json_array_size(b->losses);
    for (size_t i = 0; i < n || i < m; i++) {
        const json_t *x = json_array_get(a->losses, i), *y = json_array_get(b->losses, i);
        if (x == NULL || y == NULL || !json_equal(x, y))
            return (int64_t)json_integer_value(json_array_get(x != NULL ? x : y, 0));
    }
    return 0;
}
