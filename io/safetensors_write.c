#include "io/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/file.h"
#include "io/half.h"

enum { LENGTH_BYTES = 8, NARROW_NUMEL = 4096 };

/* ---- the header, written --------------------------------------------------------------------- */

static bool is_f32(const struct safetensors_tensor *t)
{
    return strcmp(t->dtype, "F32") == 0;
}

/* Sizes and places in the data; the header's length is not known yet. */
static enum status size_tensors(struct safetensors_tensor *tensors, int count)
{
    int64_t end = 0;
    for (int i = 0; i < count; i++) {
        struct safetensors_tensor *t = &tensors[i];
        ASSERT(t->dims >= 0 && t->dims <= SAFETENSORS_MAX_DIMS);
        if (t->dtype == NULL)
            t->dtype = "F32";
        ASSERT(is_f32(t) || strcmp(t->dtype, "F16") == 0 || strcmp(t->dtype, "BF16") == 0);
        t->numel = 1;
        t->first_byte = end;
        bool overflow = false;
        for (int k = 0; k < t->dims; k++)
            overflow |= __builtin_mul_overflow(t->numel, t->shape[k], &t->numel);
        overflow |=
            __builtin_mul_overflow(t->numel, is_f32(t) ? INT64_C(4) : INT64_C(2), &t->bytes);
        overflow |= __builtin_add_overflow(end, t->bytes, &end);
        if (overflow || t->numel < 0)
            return FAIL(INVALID, "tensor %s: its size overflows", t->name);
    }
    return ST_OK;
}

static json_t *describe(const struct safetensors_tensor *t)
{
    json_t *shape = json_array();
    for (int i = 0; i < t->dims; i++)
        json_array_append_new(shape, json_integer(t->shape[i]));
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", t->dtype, "shape", shape, "data_offsets",
                     (json_int_t)t->first_byte, (json_int_t)(t->first_byte + t->bytes));
}

/* Length, JSON and spaces. @text: mem_free(). Then first_byte counts from the start of the file. */
static enum status build_header(char **text, size_t *bytes, struct safetensors_tensor *tensors,
                                int count)
{
    enum status st = ST_OK;
    const size_t flags = JSON_COMPACT | JSON_ENSURE_ASCII;
    json_t *root = json_pack("{s:{s:s}}", "__metadata__", "format", "pt");
    TRY_GOTO(st, out, size_tensors(tensors, count));
    for (int i = 0; i < count; i++)
        if (json_object_set_new(root, tensors[i].name, describe(&tensors[i])) != 0) {
            st = FAIL(MEMORY, "out of memory while making a safetensors header");
            goto out;
        }
    size_t used = json_dumpb(root, NULL, 0, flags);
    uint64_t padded = (uint64_t)round_up((int64_t)used, LENGTH_BYTES);
    *bytes = LENGTH_BYTES + (size_t)padded;
    TRY_GOTO(st, out, mem_alloc(text, *bytes));
    memcpy(*text, &padded, LENGTH_BYTES);
    memset(*text + LENGTH_BYTES, ' ', (size_t)padded);
    if (used == 0 || json_dumpb(root, *text + LENGTH_BYTES, used, flags) != used)
        st = FAIL(MEMORY, "out of memory while making a safetensors header");
    for (int i = 0; i < count; i++)
        tensors[i].first_byte += (int64_t)*bytes;
out:
    json_decref(root);
    return st;
}

/* ---- writing --------------------------------------------------------------------------------- */

static enum status place_writer(struct safetensors_writer *w, const char *dir, const char *name,
                                const char *temporary, const struct safetensors_tensor *tensors,
                                int count)
{
    w->tensors = tensors;
    w->count = count;
    TRY(path_join(w->path, sizeof w->path, dir, name));
    TRY(path_join(w->hidden, sizeof w->hidden, dir, temporary));
    w->temporary = w->hidden + strlen(w->hidden) - strlen(temporary);
    return ST_OK;
}

/* A leftover of a killed process is stepped over. */
static enum status open_hidden(struct safetensors_writer *w, const char *dir, const char *name,
                               const struct safetensors_tensor *tensors, int count)
{
    for (int attempt = 0; attempt < 1000; attempt++) {
        char temporary[64];
        snprintf(temporary, sizeof temporary, ".tessera-%ld-%d.safetensors.tmp", (long)getpid(),
                 attempt);
        TRY(place_writer(w, dir, name, temporary, tensors, count));
        w->fd =
            file_fault_due() ? -1 : open(w->hidden, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (w->fd >= 0) {
            w->is_open = w->is_creator = true;
            return ST_OK;
        }
        if (errno != EEXIST)
            return FAIL(IO, "%s: cannot write in its folder: %s", w->path, strerror(errno));
    }
    return FAIL(IO, "%s: its folder is full of temporary files .tessera-*.tmp", w->path);
}

/* A full disk shows now, not when half of the weights are written. */
static enum status reserve(struct safetensors_writer *w, int64_t bytes)
{
    int error = file_fault_due() ? EIO : posix_fallocate(w->fd, 0, (off_t)bytes);
    if (error == EOPNOTSUPP || error == EINVAL) /* this file system cannot; set the length only */
        error = ftruncate(w->fd, (off_t)bytes) == 0 ? 0 : errno;
    if (error != 0)
        return FAIL(IO, "%s: no room for its %" PRId64 " bytes: %s", w->path, bytes,
                    strerror(error));
    return ST_OK;
}

enum status safetensors_create(struct safetensors_writer *w, const char *dir, const char *name,
                               struct safetensors_tensor *tensors, int count)
{
    enum status st;
    char *header = NULL;
    size_t bytes = 0;
    TRY_GOTO(st, out, build_header(&header, &bytes, tensors, count));
    TRY_GOTO(st, out, open_hidden(w, dir, name, tensors, count));
    int64_t end = (int64_t)bytes;
    if (count > 0)
        end = tensors[count - 1].first_byte + tensors[count - 1].bytes;
    TRY_GOTO(st, out, reserve(w, end));
    TRY_GOTO(st, out, file_write_at(w->fd, w->path, header, bytes, 0));
out:
    mem_free(&header);
    if (st != ST_OK)
        safetensors_writer_close(w);
    return st;
}

enum status safetensors_join(struct safetensors_writer *w, const char *dir, const char *name,
                             const char *temporary, struct safetensors_tensor *tensors, int count)
{
    enum status st;
    char *header = NULL;
    size_t bytes = 0;
    TRY_GOTO(st, out, build_header(&header, &bytes, tensors, count));
    TRY_GOTO(st, out, place_writer(w, dir, name, temporary, tensors, count));
    w->fd = file_fault_due() ? -1 : open(w->hidden, O_WRONLY | O_CLOEXEC);
    if (w->fd < 0)
        st = FAIL(IO, "%s: cannot open what the first rank created there: %s", w->hidden,
                  strerror(errno));
    else
        w->is_open = true;
out:
    mem_free(&header);
    return st;
}

/* In pieces: a value that does not fit ends it, and names itself. */
static enum status write_narrow(struct safetensors_writer *w, const struct safetensors_tensor *t,
                                int64_t first, int64_t count, const float *values)
{
    uint16_t narrow[NARROW_NUMEL];
    bool is_f16 = strcmp(t->dtype, "F16") == 0;
    for (int64_t done = 0; done < count; done += NARROW_NUMEL) {
        int64_t n = count - done < NARROW_NUMEL ? count - done : NARROW_NUMEL;
        int64_t misfit = half_narrow(narrow, values + done, n, is_f16 ? HALF_F16 : HALF_BF16);
        if (misfit >= 0)
            return FAIL(INVALID,
                        "%s: tensor %.200s, element %" PRId64 ": %.9g is beyond the largest %s, %s",
                        w->path, t->name, first + done + misfit, (double)values[done + misfit],
                        t->dtype, is_f16 ? "65504; bf16 and fp32 have room for it" : "3.39e38");
        TRY(file_write_at(w->fd, w->path, narrow, (size_t)n * sizeof *narrow,
                          t->first_byte + (first + done) * (int64_t)sizeof *narrow));
    }
    return ST_OK;
}

enum status safetensors_write_range(struct safetensors_writer *w, int index, int64_t first,
                                    int64_t count, const float *values)
{
    ASSERT(w->is_open && index >= 0 && index < w->count);
    const struct safetensors_tensor *t = &w->tensors[index];
    ASSERT(first >= 0 && count >= 0 && first <= t->numel && count <= t->numel - first);
    if (!is_f32(t))
        return write_narrow(w, t, first, count, values);
    return file_write_at(w->fd, w->path, values, (size_t)count * sizeof *values,
                         t->first_byte + first * (int64_t)sizeof *values);
}

enum status safetensors_sync(struct safetensors_writer *w)
{
    ASSERT(w->is_open);
    if (file_fault_due() || fsync(w->fd) != 0)
        return FAIL(IO, "%s: %s", w->path, strerror(errno));
    return ST_OK;
}

static enum status sync_folder(const struct safetensors_writer *w)
{
    char folder[sizeof w->hidden];
    size_t length = (size_t)(w->temporary - w->hidden);
    snprintf(folder, sizeof folder, "%.*s", length > 0 ? (int)length : 1,
             length > 0 ? w->hidden : ".");
    int cause = file_flush_folder(folder);
    return cause != 0 ? FAIL(IO, "%s: written, but its folder cannot be flushed: %s", w->path,
                             strerror(cause))
                      : ST_OK;
}

enum status safetensors_publish(struct safetensors_writer *w)
{
    ASSERT(w->is_open && w->is_creator);
    if (file_fault_due() || rename(w->hidden, w->path) != 0)
        return FAIL(IO, "%s: %s", w->path, strerror(errno));
    w->is_creator = false; /* nothing hidden is left to remove */
    return sync_folder(w);
}

void safetensors_writer_close(struct safetensors_writer *w)
{
    if (!w->is_open)
        return;
    close(w->fd);
    if (w->is_creator)
        unlink(w->hidden);
    memset(w, 0, sizeof *w);
}
