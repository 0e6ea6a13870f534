/* manifest.json: the tables of a checkpoint, and the hash that makes them believable. */
#include "io/checkpoint_format.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "engine/base/file.h"
#include "io/json_file.h"

static const char FORMAT[] = "tessera checkpoint", DTYPE[] = "F32";

/* The text ends in TAIL, 16 digits and TAIL_END, in every version of the format; the digits are the
 * XXH3-64 of all bytes before TAIL. */
static const char TAIL[] = ",\n \"xxh3\": \"", TAIL_END[] = "\"\n}\n";
enum {
    DIGITS = 16,
    TAIL_BYTES = sizeof TAIL - 1 + DIGITS + sizeof TAIL_END - 1,
    MAX_BYTES = 256 << 20
};

static void hash_text(char out[DIGITS + 1], uint64_t hash)
{
    snprintf(out, DIGITS + 1, "%016" PRIx64, hash);
}

/* ---- tables are checked ---------------------------------------------------------------------- */

/* The same for tables that are written and that are read; only the status differs. */
struct table_check {
    const char *path;
    bool reading;
};

#define REFUSE(check, ...)                                                                         \
    ((check)->reading ? FAIL(CORRUPT, __VA_ARGS__) : FAIL(INVALID, __VA_ARGS__))

static enum status check_tensor(const struct table_check *check, const struct checkpoint_tensor *t,
                                int64_t *plain_bytes)
{
    int64_t numel = 1, bytes;
    bool overflow = false;
    if (!checkpoint_tensor_allowed(t->name))
        return REFUSE(check, "%s: \"%.200s\" is no name of a tensor", check->path, t->name);
    if (t->state_count < 1 || t->state_count > CHECKPOINT_MAX_STATES)
        return REFUSE(check, "%s: tensor \"%.200s\" has %d states, expected 1 to %d", check->path,
                      t->name, t->state_count, CHECKPOINT_MAX_STATES);
    for (int i = 0; i < t->state_count; i++) {
        bool allowed = checkpoint_state_allowed(t->states[i]);
        for (int k = 0; k < i; k++)
            allowed = allowed && strcmp(t->states[i], t->states[k]) != 0;
        if (!allowed)
            return REFUSE(check,
                          "%s: tensor \"%.200s\": state \"%.60s\" is there twice, or is no name",
                          check->path, t->name, t->states[i]);
    }
    if (t->dims < 0 || t->dims > CHECKPOINT_MAX_DIMS)
        return REFUSE(check, "%s: tensor \"%.200s\" has %d dimensions, expected up to %d",
                      check->path, t->name, t->dims, CHECKPOINT_MAX_DIMS);
    for (int i = 0; i < t->dims; i++) {
        overflow |= t->shape[i] < 1;
        overflow |= __builtin_mul_overflow(numel, t->shape[i], &numel);
    }
    overflow |= __builtin_mul_overflow(numel, (int64_t)sizeof(float) * t->state_count, &bytes);
    overflow |= __builtin_add_overflow(*plain_bytes, bytes, plain_bytes);
    if (overflow)
        return REFUSE(check, "%s: tensor \"%.200s\": its shape is empty or too large", check->path,
                      t->name);
    return ST_OK;
}

static int compare_names(const void *a, const void *b, void *tensors)
{
    const struct checkpoint_tensor *t = tensors;
    return strcmp(t[*(const int *)a].name, t[*(const int *)b].name);
}

/* @by_name: mem_free(). */
static enum status check_tensors(const struct table_check *check, int **by_name,
                                 int64_t *plain_bytes, const struct checkpoint_tensor *tensors,
                                 int count)
{
    int *order;
    *plain_bytes = 0;
    if (count < 1)
        return REFUSE(check, "%s: there are no tensors", check->path);
    TRY(mem_alloc(by_name, sizeof **by_name * (size_t)count));
    order = *by_name;
    for (int i = 0; i < count; i++) {
        TRY(check_tensor(check, &tensors[i], plain_bytes));
        order[i] = i;
    }
    qsort_r(order, (size_t)count, sizeof *order, compare_names, (void *)tensors);
    for (int i = 1; i < count; i++)
        if (strcmp(tensors[order[i - 1]].name, tensors[order[i]].name) == 0)
            return REFUSE(check, "%s: tensor \"%.200s\" is there twice", check->path,
                          tensors[order[i]].name);
    return ST_OK;
}

static int compare_files(const void *a, const void *b)
{
    return *(const int *)a - *(const int *)b;
}

static enum status check_files(const struct table_check *check, const struct checkpoint_file *files,
                               int count)
{
    enum status st = ST_OK;
    int *numbers = NULL;
    if (count < 1)
        return REFUSE(check, "%s: there are no files", check->path);
    TRY(mem_alloc(&numbers, sizeof *numbers * (size_t)count));
    for (int i = 0; i < count && st == ST_OK; i++) {
        numbers[i] = checkpoint_file_number(files[i].name);
        if (numbers[i] < 0)
            st = REFUSE(check, "%s: \"%.31s\" is no name of a data file (data-00000.tsr)",
                        check->path, files[i].name);
        else if (files[i].bytes < 0)
            st = REFUSE(check, "%s: file %s has a negative size", check->path, files[i].name);
    }
    if (st == ST_OK)
        qsort(numbers, (size_t)count, sizeof *numbers, compare_files);
    for (int i = 1; i < count && st == ST_OK; i++)
        if (numbers[i - 1] == numbers[i])
            st = REFUSE(check, "%s: file data-%05d.tsr is there twice", check->path, numbers[i]);
    mem_free(&numbers);
    return st;
}

/* ---- writing --------------------------------------------------------------------------------- */

static json_t *describe_tensor(const struct checkpoint_tensor *t)
{
    json_t *shape = json_array(), *states = json_array();
    for (int i = 0; i < t->dims; i++)
        json_array_append_new(shape, json_integer(t->shape[i]));
    for (int i = 0; i < t->state_count; i++)
        json_array_append_new(states, json_string(t->states[i]));
    return json_pack("{s:s, s:s, s:o, s:o}", "name", t->name, "dtype", DTYPE, "shape", shape,
                     "states", states);
}

static json_t *describe_file(const struct checkpoint_file *f)
{
    char hash[DIGITS + 1], index_hash[DIGITS + 1];
    hash_text(hash, f->hash);
    hash_text(index_hash, f->index_hash);
    return json_pack("{s:s, s:I, s:s, s:s}", "name", f->name, "bytes", (json_int_t)f->bytes, "xxh3",
                     hash, "index_xxh3", index_hash);
}

/* All but the tail. NULL: out of memory, or what jansson does not take. */
static json_t *describe(const struct checkpoint_manifest *m)
{
    json_t *tensors = json_array(), *files = json_array();
    json_t *training =
        m->training != NULL ? json_deep_copy((const json_t *)m->training) : json_object();
    int failed = 0;
    for (int i = 0; i < m->tensor_count; i++)
        failed |= json_array_append_new(tensors, describe_tensor(&m->tensors[i]));
    for (int i = 0; i < m->file_count; i++)
        failed |= json_array_append_new(files, describe_file(&m->files[i]));
    json_t *root = json_pack("{s:s, s:i, s:I, s:o, s:o, s:o}", "format", FORMAT, "version",
                             CHECKPOINT_VERSION, "step", (json_int_t)m->step, "tensors", tensors,
                             "files", files, "training", training);
    if (failed == 0)
        return root;
    json_decref(root);
    return NULL;
}

/* The text of @root without its last brace, then the tail. @text: mem_free(). */
static enum status print_manifest(char **text, size_t *bytes, const json_t *root, const char *path)
{
    const size_t flags = JSON_INDENT(1) | JSON_REAL_PRECISION(17) | JSON_ENSURE_ASCII;
    char hash[DIGITS + 1];
    size_t used = json_dumpb(root, NULL, 0, flags);
    if (used < 3)
        return FAIL(MEMORY, "%s: out of memory while writing", path);
    if (used > MAX_BYTES - TAIL_BYTES)
        return FAIL(INVALID, "%s: %zu bytes of tables and training state are too many", path, used);
    TRY(mem_alloc(text, used + TAIL_BYTES + 1));
    if (json_dumpb(root, *text, used, flags) != used)
        return FAIL(MEMORY, "%s: out of memory while writing", path);
    used -= 2; /* "\n}" */
    hash_text(hash, XXH3_64bits(*text, used));
    snprintf(*text + used, TAIL_BYTES + 1, "%s%s%s", TAIL, hash, TAIL_END);
    *bytes = used + TAIL_BYTES;
    return ST_OK;
}

enum status manifest_write(const char *folder, const struct checkpoint_manifest *m)
{
    enum status st;
    char path[CHECKPOINT_PATH_BYTES], *text = NULL;
    const struct table_check check = {path, false};
    size_t bytes = 0;
    int *by_name = NULL;
    int64_t plain_bytes;
    json_t *root = NULL;
    TRY(path_join(path, sizeof path, folder, CHECKPOINT_MANIFEST));
    if (m->training != NULL && !json_is_object((const json_t *)m->training))
        return FAIL(INVALID, "%s: the training state has to be an object", path);
    TRY_GOTO(st, out, check_tensors(&check, &by_name, &plain_bytes, m->tensors, m->tensor_count));
    TRY_GOTO(st, out, check_files(&check, m->files, m->file_count));
    root = describe(m);
    if (root == NULL) {
        st = FAIL(MEMORY, "%s: out of memory while writing", path);
        goto out;
    }
    TRY_GOTO(st, out, print_manifest(&text, &bytes, root, path));
    TRY_GOTO(st, out, file_write(path, text, bytes));
out:
    json_decref(root);
    mem_free(&text);
    mem_free(&by_name);
    return st;
}

/* ---- reading --------------------------------------------------------------------------------- */

static enum status expect(const char *path, const char *where, const char *key, const json_t *value,
                          json_type type, const char *wanted)
{
    if (value != NULL && json_typeof(value) == type)
        return ST_OK;
    return FAIL(CORRUPT, "%s: %.200s%s: expected %s, found %s", path, where, key, wanted,
                json_kind(value));
}

static enum status get_integer(int64_t *out, const char *path, const char *where,
                               const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    TRY(expect(path, where, key, value, JSON_INTEGER, "an integer"));
    *out = json_integer_value(value);
    return ST_OK;
}

static enum status get_string(const char **out, const char *path, const char *where,
                              const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    TRY(expect(path, where, key, value, JSON_STRING, "a string"));
    *out = json_string_value(value);
    return ST_OK;
}

static enum status get_hash(uint64_t *out, const char *path, const char *where,
                            const json_t *object, const char *key)
{
    const char *text;
    TRY(get_string(&text, path, where, object, key));
    if (strlen(text) != DIGITS || strspn(text, "0123456789abcdef") != DIGITS)
        return FAIL(CORRUPT, "%s: %.200s%s: expected %d hexadecimal digits", path, where, key,
                    DIGITS);
    *out = strtoull(text, NULL, 16);
    return ST_OK;
}

static enum status keep_name(struct checkpoint *c, const char **out, const char *text)
{
    char *kept = NULL;
    TRY(pool_copy(&c->pool, &kept, text, strlen(text)));
    *out = kept;
    return ST_OK;
}

static enum status parse_shape(struct checkpoint_tensor *t, const json_t *shape, const char *path)
{
    if (json_array_size(shape) > CHECKPOINT_MAX_DIMS)
        return FAIL(CORRUPT, "%s: tensor \"%.200s\" has %zu dimensions, expected up to %d", path,
                    t->name, json_array_size(shape), CHECKPOINT_MAX_DIMS);
    t->dims = (int)json_array_size(shape);
    t->numel = 1;
    for (int i = 0; i < t->dims; i++) {
        const json_t *size = json_array_get(shape, (size_t)i);
        if (!json_is_integer(size) || json_integer_value(size) < 1 ||
            __builtin_mul_overflow(t->numel, json_integer_value(size), &t->numel))
            return FAIL(CORRUPT, "%s: tensor \"%.200s\": shape[%d] is no size, or too large", path,
                        t->name, i);
        t->shape[i] = json_integer_value(size);
    }
    return ST_OK;
}

static enum status parse_tensor(struct checkpoint *c, struct checkpoint_tensor *t,
                                const json_t *entry, const char *path)
{
    const char *name, *dtype;
    char where[CHECKPOINT_NAME_BYTES + 32];
    TRY(expect(path, "", "tensors[]", entry, JSON_OBJECT, "an object"));
    TRY(get_string(&name, path, "tensors[].", entry, "name"));
    TRY(keep_name(c, &t->name, name));
    snprintf(where, sizeof where, "tensor \"%.200s\": ", name);
    TRY(get_string(&dtype, path, where, entry, "dtype"));
    if (strcmp(dtype, DTYPE) != 0)
        return FAIL(UNSUPPORTED, "%s: tensor \"%.200s\" is %.40s, only %s is read", path, name,
                    dtype, DTYPE);
    const json_t *shape = json_object_get(entry, "shape");
    const json_t *states = json_object_get(entry, "states");
    TRY(expect(path, where, "shape", shape, JSON_ARRAY, "an array"));
    TRY(expect(path, where, "states", states, JSON_ARRAY, "an array"));
    TRY(parse_shape(t, shape, path));
    if (json_array_size(states) > CHECKPOINT_MAX_STATES)
        return FAIL(CORRUPT, "%s: tensor \"%.200s\" has %zu states, expected 1 to %d", path, name,
                    json_array_size(states), CHECKPOINT_MAX_STATES);
    for (size_t i = 0; i < json_array_size(states); i++) {
        const json_t *state = json_array_get(states, i);
        TRY(expect(path, where, "states[]", state, JSON_STRING, "a string"));
        TRY(keep_name(c, &t->states[t->state_count++], json_string_value(state)));
    }
    return ST_OK;
}

static enum status parse_file(struct checkpoint_file *f, const json_t *entry, const char *path)
{
    const char *name;
    char where[64];
    TRY(expect(path, "", "files[]", entry, JSON_OBJECT, "an object"));
    TRY(get_string(&name, path, "files[].", entry, "name"));
    if (checkpoint_file_number(name) < 0)
        return FAIL(CORRUPT, "%s: \"%.100s\" is no name of a data file (data-00000.tsr)", path,
                    name);
    snprintf(f->name, sizeof f->name, "%s", name);
    snprintf(where, sizeof where, "file %s: ", f->name);
    TRY(get_integer(&f->bytes, path, where, entry, "bytes"));
    TRY(get_hash(&f->hash, path, where, entry, "xxh3"));
    return get_hash(&f->index_hash, path, where, entry, "index_xxh3");
}

static enum status parse_tables(struct checkpoint *c, const json_t *root, const char *path)
{
    const json_t *tensors = json_object_get(root, "tensors"),
                 *files = json_object_get(root, "files");
    TRY(expect(path, "", "tensors", tensors, JSON_ARRAY, "an array"));
    TRY(expect(path, "", "files", files, JSON_ARRAY, "an array"));
    c->tensor_count = (int)json_array_size(tensors);
    TRY(mem_alloc(&c->tensors, sizeof *c->tensors * (size_t)c->tensor_count));
    for (int i = 0; i < c->tensor_count; i++)
        TRY(parse_tensor(c, &c->tensors[i], json_array_get(tensors, (size_t)i), path));
    c->file_count = (int)json_array_size(files);
    TRY(mem_alloc(&c->files, sizeof *c->files * (size_t)c->file_count));
    for (int i = 0; i < c->file_count; i++)
        TRY(parse_file(&c->files[i], json_array_get(files, (size_t)i), path));
    return ST_OK;
}

/* Streams are numbered through: the states of tensor 0, of tensor 1, ... */
static enum status number_streams(struct checkpoint *c)
{
    TRY(mem_alloc(&c->stream_of, sizeof *c->stream_of * ((size_t)c->tensor_count + 1)));
    for (int i = 0; i < c->tensor_count; i++)
        c->stream_of[i + 1] = c->stream_of[i] + c->tensors[i].state_count;
    return ST_OK;
}

static enum status parse_manifest(struct checkpoint *c, const json_t *root, const char *path)
{
    const struct table_check check = {path, true};
    const char *format;
    int64_t version = 0;
    TRY(expect(path, "", "the text", root, JSON_OBJECT, "an object"));
    TRY(get_string(&format, path, "", root, "format"));
    if (strcmp(format, FORMAT) != 0)
        return FAIL(CORRUPT, "%s: format: expected \"%s\", found \"%.60s\"", path, FORMAT, format);
    TRY(get_integer(&version, path, "", root, "version"));
    if (version > CHECKPOINT_VERSION)
        return FAIL(UNSUPPORTED,
                    "%s: was written by a later Tessera (format version %" PRId64
                    ", this one reads up to %d)",
                    path, version, CHECKPOINT_VERSION);
    if (version < 1)
        return FAIL(CORRUPT, "%s: format version %" PRId64 " does not exist", path, version);
    TRY(get_integer(&c->step, path, "", root, "step"));
    if (c->step < 0)
        return FAIL(CORRUPT, "%s: step: %" PRId64 " is negative", path, c->step);
    json_t *training = json_object_get(root, "training");
    TRY(expect(path, "", "training", training, JSON_OBJECT, "an object"));
    c->training = json_incref(training);
    TRY(parse_tables(c, root, path));
    TRY(check_tensors(&check, &c->by_name, &c->plain_bytes, c->tensors, c->tensor_count));
    TRY(check_files(&check, c->files, c->file_count));
    return number_streams(c);
}

static enum status check_tail(const char *text, size_t bytes, const char *path)
{
    char want[DIGITS + 1];
    size_t used = bytes - TAIL_BYTES;
    if (bytes <= TAIL_BYTES || memcmp(text + used, TAIL, sizeof TAIL - 1) != 0 ||
        memcmp(text + bytes - (sizeof TAIL_END - 1), TAIL_END, sizeof TAIL_END - 1) != 0)
        return FAIL(CORRUPT, "%s: is damaged or cut short: it does not end with its hash", path);
    hash_text(want, XXH3_64bits(text, used));
    if (memcmp(text + used + sizeof TAIL - 1, want, DIGITS) != 0)
        return FAIL(CORRUPT, "%s: is damaged: its hash is not that of its text", path);
    return ST_OK;
}

static enum status read_text(char **text, size_t *bytes, const char *path)
{
    enum status st;
    int fd = -1;
    int64_t size = 0;
    TRY(checkpoint_open_file(&fd, &size, path));
    if (size > MAX_BYTES) {
        st = FAIL(CORRUPT, "%s: %" PRId64 " bytes are too many for a manifest", path, size);
        goto out;
    }
    TRY_GOTO(st, out, mem_alloc(text, (size_t)size + 1));
    TRY_GOTO(st, out, file_read_at(fd, path, *text, (size_t)size, 0));
    *bytes = (size_t)size;
out:
    close(fd);
    return st;
}

enum status manifest_read(struct checkpoint *c)
{
    enum status st;
    char path[CHECKPOINT_PATH_BYTES], *text = NULL;
    size_t bytes = 0;
    json_t *root = NULL;
    json_error_t error;
    TRY(path_join(path, sizeof path, c->path, CHECKPOINT_MANIFEST));
    if (access(path, F_OK) != 0 && errno == ENOENT)
        return FAIL(IO, "%s: is not a complete checkpoint: it has no " CHECKPOINT_MANIFEST,
                    c->path);
    TRY_GOTO(st, out, read_text(&text, &bytes, path));
    TRY_GOTO(st, out, check_tail(text, bytes, path));
    root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    if (root == NULL) {
        st = json_error_code(&error) == json_error_out_of_memory
                 ? FAIL(MEMORY, "%s: out of memory while reading", path)
                 : FAIL(CORRUPT, "%s:%d:%d: %s", path, error.line, error.column, error.text);
        goto out;
    }
    TRY_GOTO(st, out, parse_manifest(c, root, path));
out:
    json_decref(root);
    mem_free(&text);
    return st;
}
