#include "io/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/base/file.h"
#include "io/half.h"
#include "io/json_file.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "data is copied as it lies in the file");

enum { LENGTH_BYTES = 8 };

/* Of one element; a few take less than a byte. */
static const struct {
    const char *name;
    int bits;
} dtypes[] = {
    {"F32", 32},    {"F16", 16},    {"BF16", 16}, {"F64", 64},    {"I64", 64},
    {"I32", 32},    {"I16", 16},    {"I8", 8},    {"U8", 8},      {"BOOL", 8},
    {"U16", 16},    {"U32", 32},    {"U64", 64},  {"C64", 64},    {"F8_E4M3", 8},
    {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"F4", 4},    {"F6_E2M3", 6}, {"F6_E3M2", 6},
};

void safetensors_shape(char out[SAFETENSORS_SHAPE_BYTES], int dims, const int64_t *shape)
{
    size_t used = 0;
    out[used++] = '(';
    for (int i = 0; i < dims && used < SAFETENSORS_SHAPE_BYTES - 32; i++)
        used += (size_t)snprintf(out + used, SAFETENSORS_SHAPE_BYTES - used, "%s%" PRId64,
                                 i > 0 ? ", " : "", shape[i]);
    snprintf(out + used, SAFETENSORS_SHAPE_BYTES - used, ")");
}

/* ---- the header, read ------------------------------------------------------------------------ */

/* Where a message belongs: file and tensor. */
struct place {
    const char *path, *tensor;
};

static enum status parse_dtype(const char **name, int *bits, const json_t *entry, struct place at)
{
    const json_t *value = json_object_get(entry, "dtype");
    if (!json_is_string(value))
        return FAIL(CORRUPT, "%s: tensor \"%.200s\": dtype: expected a string, found %s", at.path,
                    at.tensor, json_kind(value));
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        if (strcmp(dtypes[i].name, json_string_value(value)) == 0) {
            *name = dtypes[i].name;
            *bits = dtypes[i].bits;
            return ST_OK;
        }
    return FAIL(CORRUPT, "%s: tensor \"%.200s\": dtype \"%.40s\" is not known", at.path, at.tensor,
                json_string_value(value));
}

static enum status parse_shape(struct safetensors_tensor *t, const json_t *entry, struct place at)
{
    const json_t *value = json_object_get(entry, "shape");
    if (!json_is_array(value))
        return FAIL(CORRUPT, "%s: tensor \"%.200s\": shape: expected an array, found %s", at.path,
                    at.tensor, json_kind(value));
    if (json_array_size(value) > SAFETENSORS_MAX_DIMS)
        return FAIL(UNSUPPORTED, "%s: tensor \"%.200s\" has %zu dimensions, at most %d are read",
                    at.path, at.tensor, json_array_size(value), SAFETENSORS_MAX_DIMS);
    t->dims = (int)json_array_size(value);
    t->numel = 1;
    for (int i = 0; i < t->dims; i++) {
        const json_t *size = json_array_get(value, (size_t)i);
        if (!json_is_integer(size) || json_integer_value(size) < 0)
            return FAIL(CORRUPT, "%s: tensor \"%.200s\": shape[%d]: expected a size", at.path,
                        at.tensor, i);
        t->shape[i] = json_integer_value(size);
        if (__builtin_mul_overflow(t->numel, t->shape[i], &t->numel))
            return FAIL(CORRUPT, "%s: tensor \"%.200s\": the size of its shape overflows", at.path,
                        at.tensor);
    }
    return ST_OK;
}

static enum status parse_offsets(struct safetensors_tensor *t, const json_t *entry,
                                 int64_t data_bytes, struct place at)
{
    const json_t *value = json_object_get(entry, "data_offsets");
    const json_t *first = json_array_get(value, 0), *end = json_array_get(value, 1);
    if (json_array_size(value) != 2 || !json_is_integer(first) || !json_is_integer(end))
        return FAIL(CORRUPT, "%s: tensor \"%.200s\": data_offsets: expected two integers", at.path,
                    at.tensor);
    int64_t from = json_integer_value(first), to = json_integer_value(end);
    if (from < 0 || to < from || to > data_bytes)
        return FAIL(CORRUPT,
                    "%s: tensor \"%.200s\": data_offsets %" PRId64 " to %" PRId64
                    " are not in the %" PRId64 " bytes of data",
                    at.path, at.tensor, from, to, data_bytes);
    t->first_byte = from; /* in the data, until all are checked */
    t->bytes = to - from;
    return ST_OK;
}

static enum status parse_tensor(struct safetensors *st, const char *name, const json_t *entry,
                                int64_t data_bytes)
{
    struct safetensors_tensor t = {0};
    struct place at = {st->path, name};
    int bits = 0;
    int64_t total_bits;
    char *kept = NULL;
    if (!json_is_object(entry))
        return FAIL(CORRUPT, "%s: tensor \"%.200s\": expected an object, found %s", st->path, name,
                    json_kind(entry));
    TRY(parse_dtype(&t.dtype, &bits, entry, at));
    TRY(parse_shape(&t, entry, at));
    TRY(parse_offsets(&t, entry, data_bytes, at));
    if (__builtin_mul_overflow(t.numel, (int64_t)bits, &total_bits) || total_bits % 8 != 0 ||
        total_bits / 8 != t.bytes) {
        char shape[SAFETENSORS_SHAPE_BYTES];
        safetensors_shape(shape, t.dims, t.shape);
        return FAIL(CORRUPT,
                    "%s: tensor \"%.200s\": data_offsets give it %" PRId64
                    " bytes, which is not the size of %s %s",
                    st->path, name, t.bytes, t.dtype, shape);
    }
    TRY(pool_copy(&st->pool, &kept, name, strlen(name)));
    t.name = kept;
    TRY(mem_grow(&st->tensors, &st->capacity, (size_t)st->count + 1, sizeof t));
    st->tensors[st->count++] = t;
    return ST_OK;
}

/* By first byte; an empty tensor comes before one that begins at the same byte. */
static int compare_ranges(const void *a, const void *b)
{
    const struct safetensors_tensor *x = a, *y = b;
    if (x->first_byte != y->first_byte)
        return x->first_byte < y->first_byte ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

/* Every byte belongs to one tensor. */
static enum status check_cover(const struct safetensors *st, int64_t data_bytes)
{
    int64_t end = 0;
    for (int i = 0; i < st->count; i++) {
        const struct safetensors_tensor *t = &st->tensors[i];
        if (t->first_byte < end)
            return FAIL(CORRUPT, "%s: tensors \"%.200s\" and \"%.200s\" overlap", st->path,
                        st->tensors[i - 1].name, t->name);
        if (t->first_byte > end)
            return FAIL(CORRUPT,
                        "%s: tensor \"%.200s\": the %" PRId64
                        " bytes of data before it belong to no tensor",
                        st->path, t->name, t->first_byte - end);
        end += t->bytes;
    }
    if (end != data_bytes)
        return FAIL(CORRUPT, "%s: the last %" PRId64 " bytes belong to no tensor", st->path,
                    data_bytes - end);
    return ST_OK;
}

static enum status check_metadata(const json_t *entry, const char *path)
{
    const char *key;
    json_t *value;
    bool fits = json_is_object(entry);
    json_object_foreach((json_t *)entry, key, value) fits = fits && json_is_string(value);
    return fits ? ST_OK : FAIL(CORRUPT, "%s: __metadata__: expected an object of strings", path);
}

static enum status parse_header(struct safetensors *st, const char *text, size_t bytes,
                                int64_t data_bytes)
{
    enum status status = ST_OK;
    json_error_t error;
    const char *name;
    json_t *entry;
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    if (root == NULL && json_error_code(&error) == json_error_out_of_memory)
        return FAIL(MEMORY, "%s: out of memory while reading the header", st->path);
    if (root == NULL)
        return FAIL(CORRUPT, "%s: header: byte %d: %s", st->path, LENGTH_BYTES + error.position,
                    error.text);
    if (text[0] != '{') {
        status = FAIL(CORRUPT, "%s: header: expected '{' at byte %d", st->path, LENGTH_BYTES);
        goto out;
    }
    json_object_foreach(root, name, entry)
    {
        if (strcmp(name, "__metadata__") == 0)
            TRY_GOTO(status, out, check_metadata(entry, st->path));
        else
            TRY_GOTO(status, out, parse_tensor(st, name, entry, data_bytes));
    }
    if (st->count > 0)
        qsort(st->tensors, (size_t)st->count, sizeof *st->tensors, compare_ranges);
    TRY_GOTO(status, out, check_cover(st, data_bytes));
    for (int i = 0; i < st->count; i++)
        st->tensors[i].first_byte += (int64_t)(LENGTH_BYTES + bytes);
out:
    json_decref(root);
    return status;
}

static enum status read_length(struct safetensors *st, int64_t *header_bytes, int64_t *file_bytes)
{
    struct stat info;
    uint64_t length = 0;
    char start[LENGTH_BYTES];
    if (fstat(st->fd, &info) != 0)
        return FAIL(IO, "%s: %s", st->path, strerror(errno));
    if (!S_ISREG(info.st_mode))
        return FAIL(IO, "%s: is not a regular file", st->path);
    if (info.st_size < LENGTH_BYTES)
        return FAIL(CORRUPT, "%s: not a safetensors file: it has %lld bytes", st->path,
                    (long long)info.st_size);
    TRY(file_read_at(st->fd, st->path, start, sizeof start, 0));
    if (memcmp(start, "version ", sizeof start) == 0)
        return FAIL(CORRUPT,
                    "%s: a Git LFS pointer stands here, fetch the file itself (git lfs "
                    "pull)",
                    st->path);
    memcpy(&length, start, sizeof start);
    if (length > SAFETENSORS_MAX_HEADER || (int64_t)length > info.st_size - LENGTH_BYTES)
        return FAIL(CORRUPT,
                    "%s: not a safetensors file, or cut short: a header of %" PRIu64
                    " bytes in a file of %lld",
                    st->path, length, (long long)info.st_size);
    *header_bytes = (int64_t)length;
    *file_bytes = (int64_t)info.st_size;
    return ST_OK;
}

enum status safetensors_open(struct safetensors *st, const char *path)
{
    enum status status;
    char *header = NULL;
    int64_t header_bytes = 0, file_bytes = 0;
    TRY(path_join(st->path, sizeof st->path, "", path));
    st->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (st->fd < 0)
        return FAIL(IO, "%s: %s", path, strerror(errno));
    st->is_open = true;
    TRY_GOTO(status, out, read_length(st, &header_bytes, &file_bytes));
    TRY_GOTO(status, out, mem_alloc(&header, (size_t)header_bytes + 1));
    TRY_GOTO(status, out,
             file_read_at(st->fd, st->path, header, (size_t)header_bytes, LENGTH_BYTES));
    TRY_GOTO(
        status, out,
        parse_header(st, header, (size_t)header_bytes, file_bytes - LENGTH_BYTES - header_bytes));
out:
    mem_free(&header);
    return status;
}

void safetensors_close(struct safetensors *st)
{
    if (st->is_open)
        close(st->fd);
    mem_free(&st->tensors);
    pool_release(&st->pool);
    memset(st, 0, sizeof *st);
}

const struct safetensors_tensor *safetensors_find(const struct safetensors *st, const char *name)
{
    for (int i = 0; i < st->count; i++)
        if (strcmp(st->tensors[i].name, name) == 0)
            return &st->tensors[i];
    return NULL;
}

/* ---- data, read ------------------------------------------------------------------------------ */

enum status safetensors_read(const struct safetensors *st, const struct safetensors_tensor *tensor,
                             int64_t first, int64_t count, float *out)
{
    ASSERT(first >= 0 && count >= 0 && first <= tensor->numel && count <= tensor->numel - first);
    bool is_f16 = strcmp(tensor->dtype, "F16") == 0;
    if (strcmp(tensor->dtype, "F32") == 0)
        return file_read_at(st->fd, st->path, out, (size_t)count * sizeof *out,
                            tensor->first_byte + first * 4);
    if (!is_f16 && strcmp(tensor->dtype, "BF16") != 0)
        return FAIL(UNSUPPORTED, "%s: tensor \"%.200s\" is %s; F32, F16 and BF16 are read",
                    st->path, tensor->name, tensor->dtype);
    char *narrow = (char *)out + 2 * count; /* the upper half: widening reads ahead of its writes */
    TRY(file_read_at(st->fd, st->path, narrow, (size_t)count * 2, tensor->first_byte + first * 2));
    half_widen(out, narrow, count, is_f16 ? HALF_F16 : HALF_BF16);
    return ST_OK;
}
