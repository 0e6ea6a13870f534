/*
 * io/safetensors.h - tensors by name in one file, as Hugging Face stores models.
 *
 *     bytes 0..7     N, the length of the header, unsigned, little endian
 *     bytes 8..8+N   the header, a JSON object, then spaces up to a multiple of 8:
 *                    {"__metadata__": {"format": "pt"},
 *                     "NAME": {"dtype": "F32", "shape": [2, 64], "data_offsets": [0, 512]}, ...}
 *     the rest       data; offsets count from here, end exclusive; row-major, little endian
 *
 * The reader trusts nothing. It refuses a header longer than the file or SAFETENSORS_MAX_HEADER, a
 * name that is there twice, an unknown dtype, a shape whose size overflows or differs from its
 * range, ranges out of the file, ranges that overlap, and holes: every byte of data belongs to
 * one tensor, as the format asks. Messages name the file, the tensor and what is wrong.
 *
 * A file is written by several writers at once, each its own ranges, in any order. One creates it
 * under a hidden name, the others join; when all have synced, the creator publishes it:
 *
 *     create ----------> join (others) -> write_range.. -> sync -> publish (creator) -> close
 *
 * Until then nothing stands under the final name; closing without publishing removes the hidden
 * file.
 *
 * Threads: a reader is read-only after opening and may be shared; a writer belongs to one thread.
 *
 * Source: https://github.com/huggingface/safetensors (README, "Format").
 */
#ifndef IO_SAFETENSORS_H
#define IO_SAFETENSORS_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/arena.h"
#include "engine/base/status.h"

C_BEGIN

enum { SAFETENSORS_MAX_DIMS = 8, SAFETENSORS_MAX_HEADER = 100 * 1000 * 1000 };

struct safetensors_tensor {
    const char *name;
    const char *dtype; /* "F32", "BF16", "I64", ...; static */
    int dims;          /* 0 for a scalar */
    int64_t shape[SAFETENSORS_MAX_DIMS];
    int64_t numel;             /* elements; may be 0 */
    int64_t first_byte, bytes; /* in the file */
};

enum { SAFETENSORS_SHAPE_BYTES = 192 };

/** safetensors_shape() - "(2, 64)" for messages. */
void safetensors_shape(char out[SAFETENSORS_SHAPE_BYTES], int dims, const int64_t *shape);

/* ---- reading --------------------------------------------------------------------------------- */

struct safetensors { /* zero-initialise */
    char path[1024];
    int fd;
    bool is_open;
    struct safetensors_tensor *tensors; /* owned; in the order of their data */
    size_t capacity;
    int count;
    struct pool pool; /* names */
};

/**
 * safetensors_open() - read and check the header; data is read on demand.
 * @st: safetensors_close() releases it, also after a failure.
 *
 * Return: ST_OK; ST_IO (missing, unreadable, not a file); ST_CORRUPT (see the top);
 * ST_UNSUPPORTED (a tensor of more than SAFETENSORS_MAX_DIMS dimensions); ST_MEMORY.
 */
MUST_CHECK enum status safetensors_open(struct safetensors *st, const char *path);
void safetensors_close(struct safetensors *st);

/** safetensors_find() - the tensor of this name, or NULL. */
const struct safetensors_tensor *safetensors_find(const struct safetensors *st, const char *name);

/**
 * safetensors_read() - elements [first, first + count) of a tensor as fp32.
 * @out: @count floats; nothing else is allocated.
 *
 * F32 as it is, F16 and BF16 widened, which is exact. A range outside the tensor is an assertion.
 *
 * Return: ST_OK; ST_UNSUPPORTED (another dtype); ST_IO; ST_CORRUPT (the file has become shorter).
 */
MUST_CHECK enum status safetensors_read(const struct safetensors *st,
                                        const struct safetensors_tensor *tensor, int64_t first,
                                        int64_t count, float *out);

/* ---- writing --------------------------------------------------------------------------------- */

struct safetensors_writer { /* zero-initialise */
    char path[1024];        /* the final name */
    char hidden[1024];      /* where it is written */
    const char *temporary;  /* the last part of `hidden`, for safetensors_join() */
    int fd;
    bool is_open, is_creator;
    const struct safetensors_tensor *tensors; /* borrowed */
    int count;
};

/**
 * safetensors_create() - begin a file: hidden, with its header, and room for all data.
 * @dir, @name: where it will stand; the folder is there.
 * @tensors: name, dims, shape and dtype ("F32", "F16", "BF16"; NULL is "F32") are given; the rest
 * is filled in, data in this order. It has to live as long as @w.
 *
 * Return: ST_OK; ST_IO (no such folder, not writable, disk full: nothing is left behind);
 * ST_INVALID (a path that is too long, a size that overflows); ST_MEMORY.
 */
MUST_CHECK enum status safetensors_create(struct safetensors_writer *w, const char *dir,
                                          const char *name, struct safetensors_tensor *tensors,
                                          int count);

/**
 * safetensors_join() - write to a file that another writer has created.
 * @temporary: its writer's `temporary`. @tensors: the same table, filled in alike.
 */
MUST_CHECK enum status safetensors_join(struct safetensors_writer *w, const char *dir,
                                        const char *name, const char *temporary,
                                        struct safetensors_tensor *tensors, int count);

/**
 * safetensors_write_range() - elements [first, first + count) of tensor @index, rounded to its
 * dtype (io/half.h).
 *
 * Return: ST_OK; ST_INVALID (a finite value beyond the largest of the dtype: it and its place are
 * named); ST_IO.
 */
MUST_CHECK enum status safetensors_write_range(struct safetensors_writer *w, int index,
                                               int64_t first, int64_t count, const float *values);

/** safetensors_sync() - all that this writer wrote is on the disk. ST_OK; ST_IO. */
MUST_CHECK enum status safetensors_sync(struct safetensors_writer *w);

/** safetensors_publish() - the creator gives the file its name; all writers have synced. ST_IO. */
MUST_CHECK enum status safetensors_publish(struct safetensors_writer *w);

/** safetensors_writer_close() - the creator removes what was not published. Twice is fine. */
void safetensors_writer_close(struct safetensors_writer *w);

C_END

#endif
