#include "engine/base/config.h"

#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/config_table.h"
#include "engine/base/file.h"
#include "engine/base/out.h"
#include "engine/base/text.h"
#include "engine/base/text_buffer.h"

void config_defaults(struct run_config *config)
{
    memset(config, 0, sizeof *config);
    for (int i = 0; i < config_field_count; i++)
        field_set_default(&config_fields[i], config);
}

/* ---- set and load ---------------------------------------------------------------------------- */

/* Suggest by the whole key, else by its last part: "zero_stag" means train.zero_stage. */
static enum status unknown_key(const char *key, const char *origin)
{
    const char *dot = strchr(key, '.');
    struct text_nearest whole = {key, NULL, 0}, tail = {dot != NULL ? dot + 1 : key, NULL, 0};
    const struct config_field *by_whole = NULL, *by_tail = NULL;
    for (int i = 0; i < config_field_count; i++) {
        const struct config_field *f = &config_fields[i];
        char name[128];
        snprintf(name, sizeof name, "%s.%s", f->section, f->name);
        if (text_nearest_offer(&whole, name))
            by_whole = f;
        if (text_nearest_offer(&tail, f->name))
            by_tail = f;
    }
    const struct config_field *best = by_whole != NULL ? by_whole : by_tail;
    if (best == NULL)
        return FAIL(INVALID, "%s: unknown key \"%s\" (docs/configuration.md lists them)", origin,
                    key);
    return FAIL(INVALID, "%s: unknown key \"%s\"; did you mean \"%s.%s\"?", origin, key,
                best->section, best->name);
}

enum status config_set(struct run_config *config, const char *assignment, const char *origin)
{
    char key[128], section[128];
    size_t len = strcspn(assignment, "=");
    if (assignment[len] != '=')
        return FAIL(INVALID, "%s: expected section.key=value, found \"%.100s\"", origin,
                    assignment);
    if (len >= sizeof key)
        return FAIL(INVALID, "%s: unknown key \"%.100s...\"", origin, assignment);
    snprintf(key, sizeof key, "%.*s", (int)len, assignment);
    snprintf(section, sizeof section, "%.*s", (int)strcspn(key, "."), key);
    const char *dot = strchr(key, '.');
    const struct config_field *f = dot != NULL ? field_find(section, dot + 1) : NULL;
    if (f == NULL)
        return unknown_key(key, origin);
    return field_parse(f, config, assignment + len + 1, origin);
}

static enum status load_file(struct run_config *config, const char *path)
{
    enum status st;
    struct file_text text = {0};
    TRY_GOTO(st, out, file_read(&text, path));
    TRY_GOTO(st, out, config_read_yaml(config, text.data, text.bytes, path));
out:
    mem_free(&text.data);
    return st;
}

enum status config_load(struct run_config *config, const char *path, const char *const *sets,
                        int set_count)
{
    config_defaults(config);
    if (path != NULL)
        TRY(load_file(config, path));
    for (int i = 0; i < set_count; i++)
        TRY(config_set(config, sets[i], "--set"));
    return ST_OK;
}

/* ---- rules between fields -------------------------------------------------------------------- */

static enum status check_shapes(const struct run_config *c)
{
    if (c->model.hidden % c->model.heads != 0)
        return FAIL(INVALID, "model.hidden %lld is not a multiple of model.heads %lld",
                    (long long)c->model.hidden, (long long)c->model.heads);
    if (c->data.max_length > c->model.max_positions)
        return FAIL(INVALID, "data.max_length %lld is above model.max_positions %lld",
                    (long long)c->data.max_length, (long long)c->model.max_positions);
    if (c->data.max_query_length > c->data.max_length - 4)
        return FAIL(INVALID,
                    "data.max_query_length %lld leaves no room for context in data.max_length "
                    "%lld (three special tokens and one of context must fit)",
                    (long long)c->data.max_query_length, (long long)c->data.max_length);
    if (c->data.doc_stride >= c->data.max_length)
        return FAIL(INVALID, "data.doc_stride %lld must be below data.max_length %lld",
                    (long long)c->data.doc_stride, (long long)c->data.max_length);
    return ST_OK;
}

enum status config_check(const struct run_config *config)
{
    const struct run_config *c = config;
    TRY(check_shapes(c));
    if (c->train.zero_stage >= 2 && c->train.reduce == REDUCE_PER_STEP)
        return FAIL(INVALID,
                    "train.reduce per_step would hold full gradients for the whole step, which "
                    "train.zero_stage %lld partitions: use per_micro_batch (or auto), or stage 0 "
                    "or 1",
                    (long long)c->train.zero_stage);
    size_t batch;
    TRY(checked_mul(&batch, (size_t)c->train.micro_batch, (size_t)c->train.grad_accum));
    TRY(checked_mul(&batch, batch, (size_t)c->train.ranks));
    if (batch > INT32_MAX)
        return FAIL(INVALID,
                    "train.micro_batch %lld * train.grad_accum %lld * train.ranks %lld is a global "
                    "batch of more than %d sequences",
                    (long long)c->train.micro_batch, (long long)c->train.grad_accum,
                    (long long)c->train.ranks, INT32_MAX);
    if (c->train.device == DEVICE_CPU && c->train.precision == PRECISION_BF16)
        return FAIL(INVALID, "train.precision bf16 needs train.device cuda; the CPU computes fp32");
    if (c->train.device == DEVICE_CPU && c->train.comm == COMM_NCCL)
        return FAIL(INVALID, "train.comm nccl needs train.device cuda, found cpu");
    if (c->eval.stop_metric != STOP_NONE && c->data.eval[0] == '\0')
        return FAIL(INVALID, "eval.stop_metric needs evaluation questions: set data.eval");
    if (c->checkpoint.keep_best != STOP_NONE && c->data.eval[0] == '\0')
        return FAIL(INVALID, "checkpoint.keep_best needs evaluation questions: set data.eval");
    if (c->checkpoint.keep_best != STOP_NONE && c->checkpoint.every == 0)
        return FAIL(INVALID, "checkpoint.keep_best needs checkpoints: set checkpoint.every");
    if (c->checkpoint.resume_or_start && c->checkpoint.resume[0] != '\0' &&
        strcmp(c->checkpoint.resume, "latest") != 0)
        return FAIL(INVALID,
                    "checkpoint.resume_or_start takes the latest checkpoint, but "
                    "checkpoint.resume names %s: give one of them",
                    c->checkpoint.resume);
    return ST_OK;
}

/* ---- text out -------------------------------------------------------------------------------- */

/* Would YAML not keep this code point as it stands between double quotes? */
static bool needs_escape(uint32_t code)
{
    return code < 0x20 || code == '"' || code == '\\' || (code >= 0x7F && code <= 0x9F) ||
           code == 0x2028 || code == 0x2029 || code == 0xFEFF || code == 0xFFFE || code == 0xFFFF;
}

static void put_quoted(struct text_buffer *b, const char *text)
{
    text_put(b, "\"");
    while (*text != '\0') {
        uint32_t code;
        int len = text_utf8_next(&code, text);
        ASSERT(len > 0); /* field_parse() let UTF-8 in only */
        if (needs_escape(code))
            text_put(b, "\\u%04X", (unsigned)code);
        else
            text_put(b, "%.*s", len, text);
        text += len;
    }
    text_put(b, "\"");
}

static bool starts_section(int i)
{
    return i == 0 || strcmp(config_fields[i].section, config_fields[i - 1].section) != 0;
}

static void put_fields(struct text_buffer *b, const struct run_config *config)
{
    for (int i = 0; i < config_field_count; i++) {
        const struct config_field *f = &config_fields[i];
        char value[FIELD_TEXT_BYTES];
        if (starts_section(i))
            text_put(b, "%s:\n", f->section);
        field_format(f, config, value, sizeof value);
        text_put(b, "  %s: ", f->name);
        if (f->kind == FIELD_TEXT)
            put_quoted(b, value);
        else
            text_put(b, "%s", value);
        text_put(b, "\n");
    }
}

static void put_document(struct text_buffer *b)
{
    struct run_config config;
    config_defaults(&config);
    text_put(b, "# Configuration\n\n"
                "Written by `make docs` from the table in engine/base/config_table.c.\n\n"
                "A run is configured by a YAML file (`--config FILE`) of sections with keys;\n"
                "`--set section.key=value` overrides one key. Keys that are left out have "
                "their default.\n"
                "`tessera config --config FILE` prints every key as it will be used.\n");
    for (int i = 0; i < config_field_count; i++) {
        const struct config_field *f = &config_fields[i];
        char value[FIELD_TEXT_BYTES], accepted[FIELD_TEXT_BYTES];
        if (starts_section(i))
            text_put(b,
                     "\n## %s\n\n| key | default | accepted | meaning |\n"
                     "| --- | --- | --- | --- |\n",
                     f->section);
        field_format(f, &config, value, sizeof value);
        field_accepts(f, accepted, sizeof accepted);
        const char *tick = value[0] != '\0' ? "`" : "";
        text_put(b, "| `%s` | %s%s%s | %s | %s |\n", f->name, tick,
                 value[0] != '\0' ? value : "empty", tick, accepted, f->doc);
    }
}

enum status config_write(const struct run_config *config, char **text, size_t *bytes)
{
    struct text_buffer b = {0};
    put_fields(&b, config);
    return text_take(&b, ST_OK, text, bytes);
}

enum status config_document(char **text, size_t *bytes)
{
    struct text_buffer b = {0};
    put_document(&b);
    return text_take(&b, ST_OK, text, bytes);
}

void config_help(void)
{
    struct run_config config;
    config_defaults(&config);
    out("Configuration keys (in the YAML file, or --set section.key=value):\n");
    for (int i = 0; i < config_field_count; i++) {
        const struct config_field *f = &config_fields[i];
        char value[FIELD_TEXT_BYTES], accepted[FIELD_TEXT_BYTES], key[128];
        field_format(f, &config, value, sizeof value);
        field_accepts(f, accepted, sizeof accepted);
        snprintf(key, sizeof key, "%s.%s", f->section, f->name);
        out("  %-24s  %s\n", key, f->doc);
        if (f->kind == FIELD_TEXT)
            out("%28s%s%s%s\n", "", value[0] != '\0' ? "(default " : "", value,
                value[0] != '\0' ? ")" : "(empty by default)");
        else
            out("%28s(%s; default %s)\n", "", accepted, value);
    }
}
