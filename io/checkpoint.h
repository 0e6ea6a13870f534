/*
 * io/checkpoint.h - checkpoints: named fp32 tensors with their states, in several compressed files.
 *
 * A checkpoint is a folder. Any number of writers fill one data file each, with any ranges of any
 * tensors in any order; a reader asks for ranges by name and never learns who wrote them:
 *
 *     DIR/latest                      a hint for people: the name of the newest folder
 *     DIR/step-00000042/manifest.json tensors, training state, a line a file; written last
 *                       data-00000.tsr, data-00001.tsr, ...
 *     DIR/.tmp-step-00000042-...      a save under way, or what a killed one left
 *     DIR/.old-step-00000042-...      the folder that a newer one of the same step replaced
 *
 * docs/checkpoint-format.md gives every byte. A "state" is what is kept of a tensor: "master",
 * "adam_m", "adam_v", or any other name of a-z, 0-9 and '_'; each is as large as the tensor.
 *
 * Saving. One caller begins and publishes; writers may be other threads or other processes:
 *
 *     checkpoint_begin -> temp --+--> writer_open, write_range.., writer_close -> file line --+
 *                                +--> writer_open, write_range.., writer_close -> file line --+
 *                                                             checkpoint_publish(all lines) <-+
 *
 * A folder without a valid manifest does not exist. writer_close returns when its file is on the
 * disk; publish writes the manifest, checks that every element of every state is there exactly
 * once, and gives the folder its name. Whatever fails or is killed before that leaves the earlier
 * checkpoints as they were. Only files of our own names are ever removed.
 *
 * Trust. Nothing read is believed: the manifest carries its own hash and that of every file's
 * index, the index those of its chunks (XXH3-64 of the plain values). So what read_range returns is
 * what was written, or an error that names file, tensor and range.
 *
 * Memory: a writer holds two chunks, with N threads of its own 2 N + 3, and 56 bytes for each one
 * written (and what zstd takes, about a megabyte a thread), an open checkpoint 56 bytes a chunk, a
 * reader three chunks. A chunk is at most CHECKPOINT_CHUNK_BYTES.
 *
 * Threads: a writer and a reader each belong to one thread; a struct checkpoint is read-only once
 * open, and any number of readers, one a thread, may share it. A writer may be given threads that
 * pack for it; the bytes of its file do not depend on their number.
 *
 * Sources: zstd, RFC 8878; XXH3, https://github.com/Cyan4973/xxHash (doc/xxhash_spec.md).
 */
#ifndef IO_CHECKPOINT_H
#define IO_CHECKPOINT_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/arena.h"
#include "engine/base/status.h"

C_BEGIN

struct json_t;       /* jansson's; includers that look inside include <jansson.h> */
struct packers;      /* private to io/ */
struct ZSTD_DCtx_s;  /* zstd's */
struct XXH3_state_s; /* xxHash's */

enum {
    CHECKPOINT_VERSION = 1,
    CHECKPOINT_MAX_DIMS = 8,
    CHECKPOINT_MAX_STATES = 8,     /* of one tensor */
    CHECKPOINT_MAX_FILES = 100000, /* so many digits has a file's name */
    CHECKPOINT_NAME_BYTES = 256,   /* of a tensor, with the final zero */
    CHECKPOINT_STATE_BYTES = 32,   /* of a state, with the final zero */
    CHECKPOINT_PATH_BYTES = 1024,
    CHECKPOINT_CHUNK_BYTES = 4 << 20, /* plain, at most; also the default */
    CHECKPOINT_LEVEL = 1              /* of zstd; the default */
};

/* A line of the tensor table. Shapes are those of the model: padding is never stored. */
struct checkpoint_tensor {
    const char *name;                          /* borrowed; UTF-8, unique */
    int dims;                                  /* 0 for a scalar */
    int64_t shape[CHECKPOINT_MAX_DIMS];        /* each >= 1 */
    const char *states[CHECKPOINT_MAX_STATES]; /* borrowed; the first state_count */
    int state_count;                           /* >= 1; a frozen tensor has fewer than others */
    int64_t numel;                             /* filled in by open; publish ignores it */
};

/* A line a file. Plain data: writers in other processes send it as it is. */
struct checkpoint_file {
    char name[32];       /* "data-00000.tsr" */
    int64_t bytes;       /* of the file */
    int64_t plain_bytes; /* of the values in it; the ratio is plain_bytes / bytes */
    uint64_t hash;       /* XXH3-64 of the file */
    uint64_t index_hash; /* of its index and footer */
};

/* ---- writing --------------------------------------------------------------------------------- */

struct checkpoint_options {
    int level;           /* zstd, 1..19; 0 stores the values uncompressed */
    int64_t chunk_bytes; /* plain, a multiple of 4, at most CHECKPOINT_CHUNK_BYTES; 0: that */
    int threads;         /* that pack beside the caller, who writes; 0: the caller does both */
};

struct checkpoint_stream { /* a state of a tensor, as a file names it */
    char *state, *tensor;
};

struct checkpoint_chunk { /* where a range lies; private to io/ */
    int64_t first;        /* element of the tensor */
    int64_t offset;       /* byte of the file */
    uint64_t hash;        /* of the plain values */
    int32_t numel;        /* elements */
    uint32_t stream;      /* writing: of the file; reading: of the checkpoint */
    uint32_t file;
    uint32_t plane_bytes[4]; /* stored; == numel: as they are, less: compressed */
};

struct checkpoint_writer { /* zero-initialise */
    char path[CHECKPOINT_PATH_BYTES];
    struct checkpoint_file file; /* of what is written so far */
    struct checkpoint_options options;
    int fd;
    bool is_open;
    struct packers *packers;   /* owned */
    struct XXH3_state_s *hash; /* owned; of the whole file */
    int64_t sent;              /* bytes that the disk was told to begin with */
    struct checkpoint_stream *streams;
    struct checkpoint_chunk *chunks;
    size_t stream_capacity, stream_count, chunk_capacity, chunk_count;
    struct pool pool; /* names */
    int64_t writes;   /* pieces written: one a chunk, and two for the ends */
};

/**
 * checkpoint_begin() - make the hidden folder of a save.
 * @temp: CHECKPOINT_PATH_BYTES; where writers write.
 * @dir: the folder of all checkpoints; made if it is not there.
 *
 * Return: ST_OK; ST_IO; ST_INVALID (a negative step, a path that is too long).
 */
MUST_CHECK enum status checkpoint_begin(char *temp, const char *dir, int64_t step);

/**
 * checkpoint_writer_open() - create "data-<file_index>.tsr" in @temp.
 * @w: ended by checkpoint_writer_close() or _abandon(), also after a failure.
 * @file_index: 0 .. CHECKPOINT_MAX_FILES - 1, another one for every writer.
 * @options: NULL for the defaults.
 *
 * All buffers are made here; later calls only grow the list of chunks.
 *
 * Return: ST_OK; ST_IO (it exists already, not writable); ST_INVALID (options); ST_MEMORY.
 */
MUST_CHECK enum status checkpoint_writer_open(struct checkpoint_writer *w, const char *temp,
                                              int file_index,
                                              const struct checkpoint_options *options);

/**
 * checkpoint_write_range() - elements [first, first + numel) of a state of a tensor.
 * @data: @numel values in host memory; every bit pattern is kept, NaN payloads too. With threads in
 * the options it is read until the writer is closed or abandoned.
 *
 * One sequential write a chunk. Ranges come in any order; that none is there twice or missing is
 * checked by publish. A writer with no range at all is fine (more ranks than elements).
 *
 * Return: ST_OK; ST_INVALID (numel < 1, first < 0, a name that is too long or not allowed); ST_IO
 * (disk full, ...); ST_MEMORY. After a failure the writer can only be abandoned.
 */
MUST_CHECK enum status checkpoint_write_range(struct checkpoint_writer *w, const char *state,
                                              const char *tensor, int64_t first, const float *data,
                                              int64_t numel);

/**
 * checkpoint_writer_close() - index, footer, fsync. @file: this writer's line for the manifest.
 *
 * Return: ST_OK: all is on the disk; ST_IO, ST_MEMORY: the file does not count.
 */
MUST_CHECK enum status checkpoint_writer_close(struct checkpoint_writer *w,
                                               struct checkpoint_file *file);

/** checkpoint_writer_abandon() - release without finishing; fine after close, and twice. */
void checkpoint_writer_abandon(struct checkpoint_writer *w);

struct checkpoint_manifest {
    int64_t step;                            /* >= 0 */
    const struct checkpoint_tensor *tensors; /* borrowed */
    int tensor_count;
    const struct checkpoint_file *files; /* borrowed; every writer's line, in any order */
    int file_count;
    const struct json_t *training; /* borrowed; an object, opaque here; NULL: {} */
};

/**
 * checkpoint_publish() - write the manifest, check the whole, name the folder "step-<step>".
 * @path: CHECKPOINT_PATH_BYTES; the final folder, or NULL.
 * @dir, @temp: as in checkpoint_begin(); all writers have closed.
 *
 * A checkpoint of the same step is moved aside first and removed last. Then the hint is written.
 *
 * Return: ST_OK: on the disk under its final name; ST_CORRUPT (a range is missing or there twice, a
 * file is missing or not the one of its line); ST_INVALID (a table or step that is not allowed, or
 * what stands under the final name holds files that are not a checkpoint's); ST_IO; ST_MEMORY.
 * After a failure all earlier checkpoints are as before; discard @temp. Only if the message begins
 * with "published" the new one is there and valid, but may not survive a power cut.
 */
MUST_CHECK enum status checkpoint_publish(char *path, const char *dir, const char *temp,
                                          const struct checkpoint_manifest *manifest);

/** checkpoint_discard() - remove the folder of a failed save; best effort, quiet. */
void checkpoint_discard(const char *temp);

/* ---- reading --------------------------------------------------------------------------------- */

struct checkpoint { /* zero-initialise */
    char path[CHECKPOINT_PATH_BYTES];
    int64_t step;
    struct checkpoint_tensor *tensors; /* owned; in the order of the manifest */
    int tensor_count;
    struct checkpoint_file *files; /* owned; plain_bytes too */
    int file_count;
    struct json_t *training;    /* owned; an object */
    int64_t bytes, plain_bytes; /* of all data files, of all values */

    struct checkpoint_chunk *chunks; /* owned; by tensor, state, first element */
    size_t chunk_count;
    size_t
        *stream_start; /* owned; of every state of every tensor, the first chunk; one more ends */
    int *stream_of;    /* owned; tensor -> its first stream */
    int *by_name;      /* owned; tensors in the order of their names */
    int32_t max_chunk_numel;
    struct pool pool; /* names */
};

/**
 * checkpoint_open() - read and check the manifest and every file's index.
 * @c: checkpoint_close() releases it, also after a failure.
 * @path: the folder, under whatever name.
 *
 * Checked: the manifest's hash, names, sizes; that each file is there, has its size, its index and
 * that index's hash; that the ranges cover each state of each tensor once. Not the values:
 * those are checked as they are read, or by checkpoint_verify(). Cost: the indexes are read.
 *
 * Return: ST_OK; ST_IO (no folder, no manifest: "is not a checkpoint", or unreadable); ST_CORRUPT;
 * ST_UNSUPPORTED (a later format version, another dtype); ST_MEMORY.
 */
MUST_CHECK enum status checkpoint_open(struct checkpoint *c, const char *path);
void checkpoint_close(struct checkpoint *c);

/** checkpoint_find() - the tensor of this name, or NULL. O(log tensors). */
const struct checkpoint_tensor *checkpoint_find(const struct checkpoint *c, const char *name);

/** checkpoint_has_state() - is there a state of this name? */
bool checkpoint_has_state(const struct checkpoint_tensor *tensor, const char *state);

/** checkpoint_chunk_end() - the element behind the chunk that holds element @first of a state:
 * reads that end there unpack each chunk once. INT64_MAX: there is no such element. */
int64_t checkpoint_chunk_end(const struct checkpoint *c, const char *state, const char *tensor,
                             int64_t first);

/** checkpoint_stored_bytes() - bytes in the files of a state of a tensor, no index; 0: none. */
int64_t checkpoint_stored_bytes(const struct checkpoint *c, const char *state, const char *tensor);

struct checkpoint_reader {               /* zero-initialise */
    const struct checkpoint *checkpoint; /* borrowed */
    struct ZSTD_DCtx_s *zstd;            /* owned */
    uint8_t *planes, *packed;            /* owned; a chunk each */
    float *values;                       /* owned; the last chunk that was not wanted whole */
    int64_t cached;                      /* its number; -1: none */
    int fd;
    int64_t open_file; /* the file that fd reads; -1: none */
};

/**
 * checkpoint_reader_open() - buffers to read with; made here, later calls allocate nothing.
 * @r: checkpoint_reader_close() releases it, also after a failure.
 */
MUST_CHECK enum status checkpoint_reader_open(struct checkpoint_reader *r,
                                              const struct checkpoint *c);
void checkpoint_reader_close(struct checkpoint_reader *r);

/**
 * checkpoint_read_range() - elements [first, first + numel) of a state of a tensor.
 * @out: @numel floats in host memory.
 *
 * Only the chunks that hold the range are read, each is unpacked and its hash checked; the last one
 * is kept, so small neighbouring ranges cost one. numel 0 reads nothing.
 *
 * Return: ST_OK; ST_INVALID (no such tensor, state or range: the message names it); ST_CORRUPT
 * (names file, tensor, range; @out is then unspecified); ST_IO.
 */
MUST_CHECK enum status checkpoint_read_range(struct checkpoint_reader *r, const char *state,
                                             const char *tensor, int64_t first, int64_t numel,
                                             float *out);

/**
 * checkpoint_verify() - the hash of every file and of every chunk.
 * @found: called with a line about each problem, or NULL.
 *
 * Return: ST_OK; else the first problem's status, after all were looked for.
 */
MUST_CHECK enum status checkpoint_verify(const struct checkpoint *c,
                                         void (*found)(void *context, const char *problem),
                                         void *context);

/* ---- the folder of all checkpoints ----------------------------------------------------------- */

enum { CHECKPOINT_STEP_NAME_BYTES = 64 };

/** checkpoint_step_name() - "step-00000042". */
void checkpoint_step_name(char out[CHECKPOINT_STEP_NAME_BYTES], int64_t step);

struct checkpoint_entry {
    char path[CHECKPOINT_PATH_BYTES];
    int64_t step;
    int64_t bytes, plain_bytes; /* 0 if it is not complete */
    enum status status;         /* ST_OK: complete; else what checkpoint_open() said, */
    char problem[512];          /* and its words */
};

struct checkpoint_list {              /* zero-initialise */
    struct checkpoint_entry *entries; /* owned; oldest step first */
    size_t capacity;
    int count;
};

/**
 * checkpoint_list() - every "step-N" in @dir, complete or not, as checkpoint_open() finds it.
 * @list: checkpoint_list_release().
 *
 * A folder without a manifest is not listed. One that was moved aside by a save that was then
 * killed is, unless there is a newer complete one of its step.
 *
 * Return: ST_OK, also for none and for a @dir that is not there; ST_IO; ST_MEMORY.
 */
MUST_CHECK enum status checkpoint_list(struct checkpoint_list *list, const char *dir);
void checkpoint_list_release(struct checkpoint_list *list);

struct checkpoint_found {
    char path[CHECKPOINT_PATH_BYTES]; /* "" if there is none */
    int64_t step;                     /* -1 if there is none */
    int damaged; /* newer ones that were passed over. With no path and some damaged, starting
                  * afresh would drop a run in silence: make it an error. */
};

/**
 * checkpoint_find_latest() - the newest complete checkpoint of a step below @below; each damaged
 * one on the way is logged as a warning. Nothing is changed; "latest" is not consulted.
 * @below: INT64_MAX, or the step of one whose values turned out to be damaged.
 *
 * Return: ST_OK, also for none; ST_IO (@dir is unreadable); ST_MEMORY.
 */
MUST_CHECK enum status checkpoint_find_latest(struct checkpoint_found *found, const char *dir,
                                              int64_t below);

/**
 * checkpoint_remove_old() - keep the newest @keep complete checkpoints (>= 1) and @keep_path.
 * @keep_path: a folder to keep besides (the best one), compared by its last part; NULL: none.
 *
 * Removes only complete "step-N" folders that hold nothing but a checkpoint's files. A damaged one
 * is left for people to look at.
 *
 * Return: ST_OK; ST_IO (the first that could not be removed).
 */
MUST_CHECK enum status checkpoint_remove_old(const char *dir, int keep, const char *keep_path);

/**
 * checkpoint_sweep() - remove what killed saves left hidden in @dir; put back a folder that was
 * moved aside and never replaced. Call when a run starts: no save may be under way there.
 *
 * Return: ST_OK; ST_IO.
 */
MUST_CHECK enum status checkpoint_sweep(const char *dir);

C_END

#endif
