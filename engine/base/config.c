#include "engine/base/config.h"

#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/config_table.h"
#include "engine/base/file.h"
#include "engine/base/out.h"
#include "engine/base/text.h"

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

struct buffer {
    char *data; /* owned; ends with a zero byte */
    size_t bytes, capacity;
};

static enum status buffer_add(struct buffer *b, const char *fmt, ...) PRINTF_LIKE(2, 3);

static enum status buffer_add(struct buffer *b, const char *fmt, ...)
{
    char piece[4096];
    va_list args;
    va_start(args, fmt);
    int len = vsnprintf(piece, sizeof piece, fmt, args);
    va_end(args);
    ASSERT(len >= 0 && (size_t)len < sizeof piece);
    TRY(mem_grow(&b->data, &b->capacity, b->bytes + (size_t)len + 1, 1));
    memcpy(b->data + b->bytes, piece, (size_t)len + 1);
    b->bytes += (size_t)len;
    return ST_OK;
}

/* Would YAML not keep this code point as it stands between double quotes? */
static bool needs_escape(uint32_t code)
{
    return code < 0x20 || code == '"' || code == '\\' || (code >= 0x7F && code <= 0x9F) ||
           code == 0x2028 || code == 0x2029 || code == 0xFEFF || code == 0xFFFE || code == 0xFFFF;
}

static enum status add_quoted(struct buffer *b, const char *text)
{
    TRY(buffer_add(b, "\""));
    while (*text != '\0') {
        uint32_t code;
        int len = text_utf8_next(&code, text);
        ASSERT(len > 0); /* field_parse() let UTF-8 in only */
        if (needs_escape(code))
            TRY(buffer_add(b, "\\u%04X", (unsigned)code));
        else
            TRY(buffer_add(b, "%.*s", len, text));
        text += len;
    }
    return buffer_add(b, "\"");
}

static bool starts_section(int i)
{
    return i == 0 || strcmp(config_fields[i].section, config_fields[i - 1].section) != 0;
}

static enum status write_fields(struct buffer *b, const struct run_config *config)
{
    for (int i = 0; i < config_field_count; i++) {
        const struct config_field *f = &config_fields[i];
        char value[FIELD_TEXT_BYTES];
        if (starts_section(i))
            TRY(buffer_add(b, "%s:\n", f->section));
        field_format(f, config, value, sizeof value);
        TRY(buffer_add(b, "  %s: ", f->name));
        if (f->kind == FIELD_TEXT)
            TRY(add_quoted(b, value));
        else
            TRY(buffer_add(b, "%s", value));
        TRY(buffer_add(b, "\n"));
    }
    return ST_OK;
}

static enum status document_fields(struct buffer *b)
{
    struct run_config config;
    config_defaults(&config);
    TRY(buffer_add(b,
                   "# Configuration\n\n"
                   "Written by `make docs` from the table in engine/base/config_table.c.\n\n"
                   "A run is configured by a YAML file (`--config FILE`) of sections with keys;\n"
                   "`--set section.key=value` overrides one key. Keys that are left out have "
                   "their default.\n"
                   "`tessera config --config FILE` prints every key as it will be used.\n"));
    for (int i = 0; i < config_field_count; i++) {
        const struct config_field *f = &config_fields[i];
        char value[FIELD_TEXT_BYTES], accepted[FIELD_TEXT_BYTES];
        if (starts_section(i))
            TRY(buffer_add(b,
                           "\n## %s\n\n| key | default | accepted | meaning |\n"
                           "| --- | --- | --- | --- |\n",
                           f->section));
        field_format(f, &config, value, sizeof value);
        field_accepts(f, accepted, sizeof accepted);
        const char *tick = value[0] != '\0' ? "`" : "";
        TRY(buffer_add(b, "| `%s` | %s%s%s | %s | %s |\n", f->name, tick,
                       value[0] != '\0' ? value : "empty", tick, accepted, f->doc));
    }
    return ST_OK;
}

/* Hand the text over, or nothing if @st is a failure. */
static enum status buffer_finish(struct buffer *b, enum status st, char **text, size_t *bytes)
{
    if (st != ST_OK)
        mem_free(&b->data);
    *text = b->data;
    *bytes = st == ST_OK ? b->bytes : 0;
    return st;
}

enum status config_write(const struct run_config *config, char **text, size_t *bytes)
{
    struct buffer b = {0};
    return buffer_finish(&b, write_fields(&b, config), text, bytes);
}

enum status config_document(char **text, size_t *bytes)
{
    struct buffer b = {0};
    return buffer_finish(&b, document_fields(&b), text, bytes);
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
