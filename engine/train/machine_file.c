#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/arena.h"
#include "engine/base/file.h"
#include "engine/base/text.h"
#include "engine/base/text_buffer.h"
#include "engine/base/yaml_pairs.h"
#include "engine/train/machine.h"

enum { LINE_BYTES = 1024, PATH_BYTES = 4096 };

static const double LEAST = 1e-9, MOST = 1e12; /* of the numbers of a file, but for 0 */

static const char *const group_names[MACHINE_GROUPS] = {
    "products", "attention", "memory", "launch", "near", "far", "slow_down"};

/* OPTIONAL: or 0, which it is where it is missing. */
enum number_range { ABOVE_ZERO, OR_ZERO, OPTIONAL };

/* The numbers of a file, in its order; a value of the file times @unit is one of the struct. */
static const struct number {
    enum machine_group group;
    const char *name;
    size_t offset;
    double unit;
    enum number_range range;
} numbers[] = {
    {MACHINE_ATTENTION, "call_us", offsetof(struct machine, attention_call_seconds), 1e-6, OR_ZERO},
    {MACHINE_MEMORY, "copy", offsetof(struct machine, memory_per_second), 1e9, ABOVE_ZERO},
    {MACHINE_MEMORY, "update", offsetof(struct machine, update_per_second), 1e9, ABOVE_ZERO},
    {MACHINE_LAUNCH, "kernel_us", offsetof(struct machine, launch_seconds), 1e-6, OR_ZERO},
    {MACHINE_LAUNCH, "least_us", offsetof(struct machine, floor_seconds), 1e-6, OPTIONAL},
    {MACHINE_LAUNCH, "edge_us", offsetof(struct machine, edge_seconds), 1e-6, OPTIONAL},
    {MACHINE_LAUNCH, "turn_us", offsetof(struct machine, turn_seconds), 1e-6, OPTIONAL},
    {MACHINE_LAUNCH, "collective_us", offsetof(struct machine, call_seconds), 1e-6, OR_ZERO},
    {MACHINE_NEAR, "hop_us", offsetof(struct machine, near.hop_seconds), 1e-6, OR_ZERO},
    {MACHINE_NEAR, "gather", offsetof(struct machine, near.gather_per_second), 1e9, ABOVE_ZERO},
    {MACHINE_NEAR, "reduce", offsetof(struct machine, near.reduce_per_second), 1e9, ABOVE_ZERO},
    {MACHINE_FAR, "hop_us", offsetof(struct machine, far.hop_seconds), 1e-6, OR_ZERO},
    {MACHINE_FAR, "gather", offsetof(struct machine, far.gather_per_second), 1e9, ABOVE_ZERO},
    {MACHINE_FAR, "reduce", offsetof(struct machine, far.reduce_per_second), 1e9, ABOVE_ZERO},
    {MACHINE_SLOW_DOWN, "near", offsetof(struct machine, slow_down_near), 1, OR_ZERO},
    {MACHINE_SLOW_DOWN, "far", offsetof(struct machine, slow_down_far), 1, OR_ZERO},
};

enum { NUMBERS = sizeof numbers / sizeof *numbers };

/* A curve for each width. */
static const struct table {
    enum machine_group group;
    const char *name;
    size_t offset;
    double unit;
} tables[] = {
    {MACHINE_PRODUCTS, "tflops", offsetof(struct machine, products), 1e12},
    {MACHINE_ATTENTION, "tflops", offsetof(struct machine, attention), 1e12},
    {MACHINE_MEMORY, "elementwise", offsetof(struct machine, elementwise), 1e9},
};

enum { TABLES = sizeof tables / sizeof *tables };

static double *number_at(struct machine *m, int i)
{
    return (double *)(void *)((char *)m + numbers[i].offset);
}

static struct machine_table *table_at(struct machine *m, int i)
{
    return (struct machine_table *)(void *)((char *)m + tables[i].offset);
}

/* ---- reading --------------------------------------------------------------------------------- */

struct reader {
    struct machine *machine;
    const char *file;
    bool has_name, has_date, has_device, has_number[NUMBERS], has_source[MACHINE_GROUPS];
};

static enum status once(bool *has, const struct reader *r, const struct yaml_pair *pair)
{
    if (*has)
        return FAIL(INVALID, "%s:%d: %s: already given above", r->file, pair->line, pair->path);
    *has = true;
    return ST_OK;
}

static enum status take_text(char *out, size_t bytes, const struct reader *r,
                             const struct yaml_pair *pair)
{
    if (strlen(pair->value) >= bytes || !text_is_utf8(pair->value))
        return FAIL(INVALID, "%s:%d: %s: expected text of at most %zu bytes", r->file, pair->line,
                    pair->path, bytes - 1);
    snprintf(out, bytes, "%s", pair->value);
    return ST_OK;
}

static enum status take_number(double *out, const struct reader *r, const struct yaml_pair *pair,
                               double unit, bool may_be_zero)
{
    double value = 0;
    bool zero = text_to_real(&value, pair->value) && value <= 0 && value >= 0;
    if (zero ? !may_be_zero : !(value >= LEAST && value <= MOST))
        return FAIL(INVALID, "%s:%d: %s: expected a number from %g to %g%s, found \"%.100s\"",
                    r->file, pair->line, pair->path, LEAST, MOST, may_be_zero ? ", or 0" : "",
                    pair->value);
    *out = value * unit;
    return ST_OK;
}

/* A key of a map of numbers, which ascends. @last: the one before, 0 at first. */
static enum status take_key(int64_t *key, const char *text, int64_t last, const struct reader *r,
                            const struct yaml_pair *pair)
{
    if (!text_to_int(key, text) || *key < 1)
        return FAIL(INVALID, "%s:%d: %s: expected a whole number above 0 as key", r->file,
                    pair->line, pair->path);
    if (*key <= last)
        return FAIL(INVALID, "%s:%d: %s: keys must ascend", r->file, pair->line, pair->path);
    return ST_OK;
}

/* @key: "WIDTH.AT". */
static enum status take_point(struct machine_table *t, const char *key, double unit,
                              const struct reader *r, const struct yaml_pair *pair)
{
    char text[32];
    int64_t width = 0, at = 0, last = t->count > 0 ? t->of[t->count - 1].width : 0;
    size_t length = strcspn(key, ".");
    if (key[length] != '.')
        return FAIL(INVALID, "%s:%d: %s: expected rates by width, then by size", r->file,
                    pair->line, pair->path);
    snprintf(text, sizeof text, "%.*s", (int)(length < 31 ? length : 31), key);
    TRY(take_key(&width, text, last > 0 ? last - 1 : 0, r, pair)); /* or the last one again */
    if (width != last) {
        if (t->count == MACHINE_WIDTHS)
            return FAIL(INVALID, "%s:%d: %s: at most %d widths", r->file, pair->line, pair->path,
                        MACHINE_WIDTHS);
        t->of[t->count++].width = width;
    }
    struct machine_curve *c = &t->of[t->count - 1].curve;
    TRY(take_key(&at, key + length + 1, c->count > 0 ? c->points[c->count - 1].at : 0, r, pair));
    if (c->count == MACHINE_POINTS)
        return FAIL(INVALID, "%s:%d: %s: at most %d points", r->file, pair->line, pair->path,
                    MACHINE_POINTS);
    c->points[c->count].at = at;
    return take_number(&c->points[c->count++].per_second, r, pair, unit, false);
}

static enum status take_device(struct reader *r, const struct yaml_pair *pair)
{
    bool cpu = strcmp(pair->value, "cpu") == 0;
    if (!cpu && strcmp(pair->value, "cuda") != 0)
        return FAIL(INVALID, "%s:%d: device: expected cpu or cuda, found \"%.100s\"", r->file,
                    pair->line, pair->value);
    r->machine->device = cpu ? DEVICE_CPU : DEVICE_CUDA;
    return once(&r->has_device, r, pair);
}

/* "group.rest" of the pair's path; NULL if it is another group. */
static const char *rest_of(const struct yaml_pair *pair, enum machine_group group)
{
    size_t length = strlen(group_names[group]);
    bool here = strncmp(pair->path, group_names[group], length) == 0 && pair->path[length] == '.';
    return here ? pair->path + length + 1 : NULL;
}

static enum status take_in_group(struct reader *r, const struct yaml_pair *pair,
                                 enum machine_group group, const char *rest)
{
    struct machine *m = r->machine;
    if (strcmp(rest, "source") == 0) {
        TRY(once(&r->has_source[group], r, pair));
        return take_text(m->source[group], sizeof m->source[group], r, pair);
    }
    for (int i = 0; i < NUMBERS; i++) {
        if (numbers[i].group != group || strcmp(numbers[i].name, rest) != 0)
            continue;
        TRY(once(&r->has_number[i], r, pair));
        return take_number(number_at(m, i), r, pair, numbers[i].unit,
                           numbers[i].range != ABOVE_ZERO);
    }
    for (int i = 0; i < TABLES; i++) {
        size_t length = strlen(tables[i].name);
        if (tables[i].group == group && strncmp(rest, tables[i].name, length) == 0 &&
            rest[length] == '.')
            return take_point(table_at(m, i), rest + length + 1, tables[i].unit, r, pair);
    }
    return FAIL(INVALID, "%s:%d: unknown key \"%s\"; tessera calibrate writes a file anew", r->file,
                pair->line, pair->path);
}

static enum status take_pair(void *context, const struct yaml_pair *pair)
{
    struct reader *r = context;
    struct machine *m = r->machine;
    if (strcmp(pair->path, "name") == 0) {
        TRY(once(&r->has_name, r, pair));
        return take_text(m->name, sizeof m->name, r, pair);
    }
    if (strcmp(pair->path, "date") == 0) {
        TRY(once(&r->has_date, r, pair));
        return take_text(m->date, sizeof m->date, r, pair);
    }
    if (strcmp(pair->path, "device") == 0)
        return take_device(r, pair);
    for (int g = 0; g < MACHINE_GROUPS; g++) {
        const char *rest = rest_of(pair, (enum machine_group)g);
        if (rest != NULL)
            return take_in_group(r, pair, (enum machine_group)g, rest);
    }
    return FAIL(INVALID, "%s:%d: unknown key \"%s\"; tessera calibrate writes a file anew", r->file,
                pair->line, pair->path);
}

/* All of "far" may be missing, and what is slowed down by it. */
static enum status check_complete(const struct reader *r)
{
    bool far = r->has_source[MACHINE_FAR];
    for (int i = 0; i < NUMBERS; i++)
        if (numbers[i].group == MACHINE_FAR)
            far = far || r->has_number[i];
    if (!r->has_name || !r->has_date || !r->has_device)
        return FAIL(INVALID, "%s: name, date or device is missing", r->file);
    for (int i = 0; i < NUMBERS; i++) {
        bool of_far = numbers[i].group == MACHINE_FAR ||
                      numbers[i].offset == offsetof(struct machine, slow_down_far);
        if (!r->has_number[i] && (far || !of_far) && numbers[i].range != OPTIONAL)
            return FAIL(INVALID, "%s: %s.%s is missing", r->file, group_names[numbers[i].group],
                        numbers[i].name);
    }
    for (int g = 0; g < MACHINE_GROUPS; g++)
        if (!r->has_source[g] && (far || g != MACHINE_FAR))
            return FAIL(INVALID, "%s: %s.source is missing", r->file, group_names[g]);
    for (int i = 0; i < TABLES; i++)
        if (table_at(r->machine, i)->count == 0)
            return FAIL(INVALID, "%s: %s.%s is missing", r->file, group_names[tables[i].group],
                        tables[i].name);
    return ST_OK;
}

enum status machine_parse(struct machine *m, const char *text, size_t bytes, const char *file)
{
    struct reader r = {.machine = m, .file = file};
    memset(m, 0, sizeof *m);
    TRY(yaml_pairs_read(text, bytes, file, take_pair, &r));
    return check_complete(&r);
}

enum status machine_read(struct machine *m, const char *path)
{
    struct file_text text = {0};
    TRY(file_read(&text, path));
    enum status st = machine_parse(m, text.data, text.bytes, path);
    mem_free(&text.data);
    return st;
}

static bool is_file(const char *name)
{
    return strchr(name, '/') != NULL || strstr(name, ".yaml") != NULL || access(name, F_OK) == 0;
}

enum status machine_find(struct machine *m, const char *name)
{
    char path[PATH_BYTES];
    if (!is_file(name))
        return machine_builtin(m, name);
    const char *plus = strrchr(name, '+');
    if (plus == NULL || access(name, F_OK) == 0)
        return machine_read(m, name);
    snprintf(path, sizeof path, "%.*s", (int)(plus - name), name);
    TRY(machine_read(m, path));
    if (!machine_add_network(m, plus + 1))
        return FAIL(INVALID, "%s: no network \"%.100s\"; built in are %s", path, plus + 1,
                    machine_builtin_names());
    return ST_OK;
}

/* ---- writing --------------------------------------------------------------------------------- */

/* In double quotes; what YAML reads as an escape, and what is not ASCII, becomes '_'. */
static void put_text(struct text_buffer *w, const char *indent, const char *key, const char *value)
{
    text_put(w, "%s%s: \"", indent, key);
    for (; *value != '\0'; value++)
        text_put(w, "%c",
                 *value < ' ' || *value > '~' || *value == '"' || *value == '\\' ? '_' : *value);
    text_put(w, "\"\n");
}

static void put_number(struct text_buffer *w, const char *indent, const char *key, double value)
{
    text_put(w, "%s%s: %.6g\n", indent, key, value);
}

static void put_table(struct text_buffer *w, const struct machine_table *t, const struct table *how)
{
    text_put(w, "  %s:\n", how->name);
    for (int i = 0; i < t->count; i++) {
        const struct machine_curve *c = &t->of[i].curve;
        text_put(w, "    %" PRId64 ":\n", t->of[i].width);
        for (int k = 0; k < c->count; k++)
            text_put(w, "      %" PRId64 ": %.6g\n", c->points[k].at,
                     c->points[k].per_second / how->unit);
    }
}

static void put_group(struct text_buffer *w, struct machine *m, enum machine_group group)
{
    text_put(w, "%s:\n", group_names[group]);
    put_text(w, "  ", "source", m->source[group]);
    for (int i = 0; i < TABLES; i++)
        if (tables[i].group == group)
            put_table(w, table_at(m, i), &tables[i]);
    for (int i = 0; i < NUMBERS; i++)
        if (numbers[i].group == group)
            put_number(w, "  ", numbers[i].name, *number_at(m, i) / numbers[i].unit);
}

enum status machine_format(const struct machine *m, char **text, size_t *bytes)
{
    struct text_buffer w = {0};
    struct machine copy = *m; /* its numbers are found through pointers that may write */
    text_put(&w,
             "# What a machine can do, for tessera plan --profile FILE; the keys are described in\n"
             "# engine/train/machine.h. TFLOP/s, GB/s, microseconds.\n");
    put_text(&w, "", "name", m->name);
    put_text(&w, "", "date", m->date);
    text_put(&w, "device: %s\n", m->device == DEVICE_CPU ? "cpu" : "cuda");
    for (int g = 0; g < MACHINE_GROUPS; g++)
        if (g != MACHINE_FAR || m->far.gather_per_second > 0)
            put_group(&w, &copy, (enum machine_group)g);
    return text_take(&w, ST_OK, text, bytes);
}

enum status machine_write(const struct machine *m, const char *path)
{
    char *text = NULL;
    size_t bytes = 0;
    TRY(machine_format(m, &text, &bytes));
    enum status st = file_write(path, text, bytes);
    mem_free(&text);
    return st;
}

enum status machine_user_path(char *out, size_t bytes, enum device_kind device)
{
    char folder[PATH_BYTES];
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    out[0] = '\0';
    if (cache != NULL && cache[0] == '/')
        TRY(path_join(folder, sizeof folder, cache, "tessera"));
    else if (home != NULL && home[0] == '/')
        TRY(path_join(folder, sizeof folder, home, ".cache/tessera"));
    else
        return ST_OK;
    return path_join(out, bytes, folder,
                     device == DEVICE_CPU ? "machine-cpu.yaml" : "machine-cuda.yaml");
}

enum status machine_default(struct machine *m, bool *found, enum device_kind device)
{
    char path[PATH_BYTES];
    *found = false;
    TRY(machine_user_path(path, sizeof path, device));
    if (path[0] == '\0' || access(path, F_OK) != 0)
        return ST_OK;
    TRY(machine_read(m, path));
    *found = true;
    return ST_OK;
}

enum status machine_for(struct machine *m, enum machine_match *match, enum device_kind device,
                        const char *name)
{
    struct machine card;
    bool found = false;
    TRY(machine_default(m, &found, device));
    *match = found ? MACHINE_OTHER : MACHINE_NONE;
    size_t length = strcspn(m->name, ","); /* behind it may stand a library or a network */
    if (found && length == strcspn(name, ",") && strncmp(m->name, name, length) == 0) {
        *match = MACHINE_OWN;
    } else if (device == DEVICE_CUDA && machine_builtin_card(&card, name)) {
        *m = card;
        *match = MACHINE_BUILTIN;
    }
    return ST_OK;
}
