#include "engine/train/checkpoint_state.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/config_table.h"
#include "engine/base/log.h"
#include "engine/train/model_config.h"
#include "io/json_file.h"

static const char PROGRAM[] = "tessera";

/* ---- what a key may do on resume ------------------------------------------------------------- */

static bool is_fixed(const struct config_field *f, bool imported)
{
    static const char *const keys[][2] = {
        {"train", "seed"},      {"train", "freeze"},          {"data", "max_length"},
        {"data", "doc_stride"}, {"data", "max_query_length"}, {"data", "max_train_samples"}};
    if (imported)
        return model_config_is_size(f->section, f->name);
    if (strcmp(f->section, "model") == 0)
        return strcmp(f->name, "init_from") != 0;
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (strcmp(f->section, keys[i][0]) == 0 && strcmp(f->name, keys[i][1]) == 0)
            return true;
    return false;
}

/* Whose values differ from run to run by their nature; nobody wants to hear of them. What was
 * imported has none but those of its model. */
static bool is_about_this_run(const struct config_field *f, bool imported)
{
    if (imported)
        return strcmp(f->section, "model") != 0 || strcmp(f->name, "init_from") == 0;
    return strcmp(f->section, "checkpoint") == 0 || strcmp(f->section, "output") == 0;
}

/* ---- writing --------------------------------------------------------------------------------- */

static json_t *hash_text(uint64_t hash)
{
    return json_sprintf("%016" PRIx64, hash);
}

static json_t *real_or_null(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

static json_t *config_object(const struct run_config *config)
{
    json_t *object = json_object();
    for (int i = 0; i < config_field_count; i++) {
        char key[128], value[FIELD_TEXT_BYTES];
        snprintf(key, sizeof key, "%s.%s", config_fields[i].section, config_fields[i].name);
        field_format(&config_fields[i], config, value, sizeof value);
        if (json_object_set_new(object, key, json_string(value)) != 0) {
            json_decref(object);
            return NULL;
        }
    }
    return object;
}

static json_t *best_object(const struct training_state *s)
{
    if (s->best_step < 0)
        return json_null();
    return json_pack("{s:I, s:f}", "step", (json_int_t)s->best_step, "value", s->best_value);
}

/* NULL if memory is short. */
static json_t *plan_lines(const struct gemm_table *plan)
{
    char *text = NULL;
    size_t bytes = 0;
    if (plan->card.name[0] == '\0')
        return json_null();
    if (gemm_table_write(&text, &bytes, plan) != ST_OK)
        return NULL;
    json_t *lines = json_array();
    bool good = lines != NULL;
    for (const char *at = text, *end; good && (end = strchr(at, '\n')) != NULL; at = end + 1)
        good = json_array_append_new(lines, json_stringn(at, (size_t)(end - at))) == 0;
    mem_free(&text);
    if (good)
        return lines;
    json_decref(lines);
    return NULL;
}

enum status training_state_write(struct json_t **out, const struct training_state *s,
                                 const struct trainer *t)
{
    const struct run_data *d = t->data;
    /* A part that could not be made is NULL, and then so is the whole. */
    *out = json_pack(
        "{s:s, s:i, s:I, s:f, s:I, s:I, s:I, s:I, s:o, s:o, s:I, s:I, s:o, s:I, s:b, s:o, s:o, "
        "s:o}",
        "program", PROGRAM, "world_size", t->comm->world_size, "zero_stage",
        (json_int_t)t->setup.spec.zero_stage, "epoch",
        (double)s->step / (double)t->sampler.steps_per_epoch, "step", (json_int_t)s->step, "t",
        (json_int_t)s->t, "seed", (json_int_t)t->config->train.seed, "train_count",
        (json_int_t)t->sampler.count, "train_hash", hash_text(d->train.data.content_hash),
        "vocab_hash", hash_text(d->vocab.content_hash), "global_batch",
        (json_int_t)t->sampler.global_batch, "skipped_in_row", (json_int_t)s->skipped_in_row,
        "best_metric", real_or_null(s->best_metric), "evaluations_without_gain",
        (json_int_t)s->evaluations_without_gain, "evaluation_pending", s->evaluation_pending,
        "best", best_object(s), "config", config_object(t->config), "gemm_plan",
        plan_lines(&t->gemm_plan));
    return *out != NULL ? ST_OK : FAIL(MEMORY, "out of memory for the training state");
}

/* What a folder with a model says; all else is for the run that goes on from it. */
static json_t *model_object(const struct run_config *config)
{
    json_t *object = config_object(config), *value;
    const char *key;
    void *next;
    json_object_foreach_safe(object, next, key, value) if (strncmp(key, "model.", 6) != 0 &&
                                                           strcmp(key, "data.vocab") != 0)
        json_object_del(object, key);
    return object;
}

enum status training_state_imported(struct json_t **out, const struct run_config *config,
                                    const struct vocab *vocab)
{
    *out = json_pack("{s:s, s:b, s:I, s:I, s:I, s:n, s:I, s:b, s:n, s:o, s:o}", "program", PROGRAM,
                     "imported", 1, "step", (json_int_t)0, "t", (json_int_t)0, "skipped_in_row",
                     (json_int_t)0, "best_metric", "evaluations_without_gain", (json_int_t)0,
                     "evaluation_pending", 0, "best", "vocab_hash",
                     vocab != NULL ? hash_text(vocab->content_hash) : json_null(), "config",
                     model_object(config));
    return *out != NULL ? ST_OK : FAIL(MEMORY, "out of memory for the training state");
}

/* ---- reading --------------------------------------------------------------------------------- */

struct reading {
    const json_t *root;
    const char *path;
    enum status st;
    bool imported;
    char differences[1500]; /* of what has to be equal */
    size_t used;
};

static const json_t *component(struct reading *r, const json_t *object, const char *key,
                               bool (*fits)(const json_t *value), const char *expected)
{
    const json_t *value = json_object_get(object, key);
    if (r->st == ST_OK && (value == NULL || !fits(value)))
        r->st = FAIL(CORRUPT, "%s: the training state has %s as \"%s\", expected %s", r->path,
                     json_kind(value), key, expected);
    return r->st == ST_OK ? value : NULL;
}

static bool is_count(const json_t *value)
{
    return json_is_integer(value) && json_integer_value(value) >= 0;
}

static bool is_text(const json_t *value)
{
    return json_is_string(value);
}

static bool is_object(const json_t *value)
{
    return json_is_object(value);
}

static bool is_bool(const json_t *value)
{
    return json_is_boolean(value);
}

static bool is_real(const json_t *value)
{
    return json_is_number(value);
}

static bool is_real_or_null(const json_t *value)
{
    return json_is_number(value) || json_is_null(value);
}

static bool is_object_or_null(const json_t *value)
{
    return json_is_object(value) || json_is_null(value);
}

static int64_t get_count(struct reading *r, const json_t *object, const char *key)
{
    return json_integer_value(component(r, object, key, is_count, "a count"));
}

static void differs(struct reading *r, const char *key, const char *then, const char *now)
{
    int n = snprintf(r->differences + r->used, sizeof r->differences - r->used,
                     "%s%s is \"%.100s\" there and \"%.100s\" here", r->used > 0 ? "; " : "", key,
                     then, now);
    if (n > 0 && (size_t)n < sizeof r->differences - r->used)
        r->used += (size_t)n;
}

static void compare_count(struct reading *r, const char *key, const char *words, int64_t now)
{
    char a[32], b[32];
    int64_t then = get_count(r, r->root, key);
    snprintf(a, sizeof a, "%" PRId64, then);
    snprintf(b, sizeof b, "%" PRId64, now);
    if (r->st == ST_OK && then != now)
        differs(r, words, a, b);
}

static void compare_hash(struct reading *r, const char *key, const char *words, uint64_t now)
{
    char text[32];
    const json_t *value = component(r, r->root, key, is_text, "a hash");
    snprintf(text, sizeof text, "%016" PRIx64, now);
    if (value != NULL && strcmp(json_string_value(value), text) != 0)
        differs(r, words, json_string_value(value), text);
}

static void compare_config(struct reading *r, const struct trainer *t)
{
    const json_t *config = component(r, r->root, "config", is_object, "an object");
    struct run_config standard;
    config_defaults(&standard);
    for (int i = 0; config != NULL && i < config_field_count; i++) {
        const struct config_field *f = &config_fields[i];
        char key[128], now[FIELD_TEXT_BYTES], then[FIELD_TEXT_BYTES];
        snprintf(key, sizeof key, "%s.%s", f->section, f->name);
        field_format(f, t->config, now, sizeof now);
        /* The writer may be older than the key: then it did what the default does. */
        field_format(f, &standard, then, sizeof then);
        const json_t *value = json_object_get(config, key);
        if (json_is_string(value))
            snprintf(then, sizeof then, "%s", json_string_value(value));
        if (strcmp(then, now) == 0)
            continue;
        if (is_fixed(f, r->imported))
            differs(r, key, then, now);
        else if (t->comm->rank == 0 && !is_about_this_run(f, r->imported))
            log_info("checkpoint", "%s is \"%s\", was \"%s\"", key, now, then);
    }
}

static void compare_data(struct reading *r, const struct trainer *t)
{
    compare_hash(r, "train_hash", "the content of data.train", t->data->train.data.content_hash);
    compare_count(r, "train_count", "the number of windows", t->sampler.count);
    compare_count(r, "global_batch",
                  "the global batch (train.micro_batch * train.grad_accum * train.ranks)",
                  t->sampler.global_batch);
}

static void read_best(struct reading *r, struct training_state *s)
{
    const json_t *best = component(r, r->root, "best", is_object_or_null, "an object or null");
    s->best_step = -1;
    s->best_value = (double)-INFINITY;
    if (!json_is_object(best))
        return;
    s->best_step = get_count(r, best, "step");
    s->best_value = json_number_value(component(r, best, "value", is_real, "a number"));
}

static void read_own(struct reading *r, struct training_state *s)
{
    s->step = get_count(r, r->root, "step");
    s->t = get_count(r, r->root, "t");
    s->skipped_in_row = get_count(r, r->root, "skipped_in_row");
    s->evaluations_without_gain = get_count(r, r->root, "evaluations_without_gain");
    const json_t *metric =
        component(r, r->root, "best_metric", is_real_or_null, "a number or null");
    s->best_metric = json_is_number(metric) ? json_number_value(metric) : (double)-INFINITY;
    s->evaluation_pending =
        json_is_true(component(r, r->root, "evaluation_pending", is_bool, "true or false"));
    read_best(r, s);
}

enum status training_state_read(struct training_state *s, const struct json_t *root,
                                const struct trainer *t, const char *path)
{
    struct reading r = {
        .root = root, .path = path, .imported = json_is_true(json_object_get(root, "imported"))};
    read_own(&r, s);
    compare_config(&r, t);
    if (!r.imported || !json_is_null(json_object_get(root, "vocab_hash")))
        compare_hash(&r, "vocab_hash", "the content of data.vocab", t->data->vocab.content_hash);
    if (!r.imported)
        compare_count(&r, "seed", "the seed", t->config->train.seed);
    if (!r.imported && t->data->train.count > 0) /* else it is for evaluation alone */
        compare_data(&r, t);
    TRY(r.st);
    if (s->t > s->step)
        return FAIL(CORRUPT, "%s: %" PRId64 " applied steps of %" PRId64, path, s->t, s->step);
    if (r.used > 0)
        return FAIL(INVALID, "%s is of another run: %s", path, r.differences);
    return ST_OK;
}

enum status training_state_plan(struct gemm_table *plan, const struct json_t *root,
                                const char *path)
{
    char where[1400], *text = NULL;
    size_t bytes = 0, used = 0;
    enum status st = ST_OK;
    const json_t *lines = json_object_get(root, "gemm_plan");
    if (lines == NULL || json_is_null(lines))
        return ST_OK;
    if (!json_is_array(lines))
        return FAIL(CORRUPT,
                    "%s: the training state has %s as \"gemm_plan\", expected an array or null",
                    path, json_kind(lines));
    for (size_t i = 0; i < json_array_size(lines); i++) {
        const json_t *line = json_array_get(lines, i);
        if (!json_is_string(line))
            return FAIL(CORRUPT, "%s: gemm_plan[%zu] is %s, expected a string", path, i,
                        json_kind(line));
        bytes += json_string_length(line) + 1;
    }
    TRY(mem_alloc(&text, bytes));
    for (size_t i = 0; i < json_array_size(lines); i++) {
        const json_t *line = json_array_get(lines, i);
        size_t length = json_string_length(line);
        memcpy(text + used, json_string_value(line), length);
        text[used + length] = '\n';
        used += length + 1;
    }
    snprintf(where, sizeof where, "%s: gemm_plan", path);
    st = gemm_table_read(plan, text, bytes, where);
    mem_free(&text);
    if (st != ST_UNSUPPORTED)
        return st;
    log_info("checkpoint", "%s: another is made, so results may differ in rounding",
             status_message());
    status_clear();
    return ST_OK;
}
