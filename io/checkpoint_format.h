/*
 * io/checkpoint_format.h - the bytes of a data file, and what the files of io/checkpoint_*.c share.
 *
 * docs/checkpoint-format.md explains the format; only io/checkpoint_*.c and
 * bench/checkpoint_*.c include this.
 */
#ifndef IO_CHECKPOINT_FORMAT_H
#define IO_CHECKPOINT_FORMAT_H

#include "io/checkpoint.h"

C_BEGIN

struct ZSTD_CCtx_s; /* zstd's */

enum { PLANES = 4 };

/* Without a final zero. The first tells a file that was sent as text, as PNG's does. */
#define CHECKPOINT_HEAD_MAGIC                                                                      \
    {                                                                                              \
        '\x89', 'T', 'S', 'R', '\r', '\n', '\x1a', '\n'                                            \
    }
#define CHECKPOINT_FOOT_MAGIC                                                                      \
    {                                                                                              \
        'T', 'S', 'R', 'I', 'N', 'D', 'E', 'X'                                                     \
    }
#define CHECKPOINT_MANIFEST "manifest.json"

struct format_head { /* of a data file; the first chunk follows */
    char magic[8];
    uint32_t version, zero;
};

struct format_stream { /* of the index; state and tensor name follow, without a final zero */
    uint16_t state_bytes, tensor_bytes;
};

struct format_chunk { /* of the index, behind all streams */
    uint64_t first, hash;
    uint32_t numel, stream, plane_bytes[PLANES];
};

struct format_foot {
    uint64_t index_first, index_bytes, chunk_count;
    uint32_t stream_count, version;
    uint64_t hash; /* XXH3-64 of the index and of the fields above */
    char magic[8];
};

enum { FOOT_UNHASHED_BYTES = 16 };

/* ---- chunks (checkpoint_chunk.c) ------------------------------------------------------------- */

/** chunk_compressor() - zstd for chunk_pack(); ZSTD_freeCCtx(*out), also after a failure.
 * @level: 0..19. */
MUST_CHECK enum status chunk_compressor(struct ZSTD_CCtx_s **out, int level);

/**
 * chunk_pack() - values to what is stored.
 * @packed, @planes: 4 @numel bytes each.
 * @bytes: of @packed; the sum of @plane_bytes.
 */
MUST_CHECK enum status chunk_pack(uint8_t *packed, size_t *bytes, uint32_t plane_bytes[PLANES],
                                  uint8_t *planes, const float *values, int32_t numel,
                                  struct ZSTD_CCtx_s *zstd, bool compress);

/** chunk_unpack() - the reverse; false if a plane is not what zstd made of @numel bytes. */
bool chunk_unpack(float *values, uint8_t *planes, const uint8_t *packed,
                  const uint32_t plane_bytes[PLANES], int32_t numel, struct ZSTD_DCtx_s *zstd);

/* ---- chunks of a writer (checkpoint_pack.c) -------------------------------------------------- */

struct packers;

struct packed_chunk {
    struct checkpoint_chunk chunk; /* with its hash and the bytes of its planes */
    const uint8_t *data;           /* borrowed, until the next one is put */
    size_t bytes;
};

/**
 * packers_open() - @threads that pack; 0: packers_put() does. packers_close() also after a failure.
 *
 * Memory: 2 @threads + 3 chunks, or two. Threads that cannot be started are done without.
 * Return: ST_OK; ST_MEMORY; ST_SYSTEM; ST_INVALID (the level).
 */
MUST_CHECK enum status packers_open(struct packers **out, int threads, size_t chunk_bytes,
                                    int level);
void packers_close(struct packers **packers);

/** packers_wants() - is there room for one more? packers_empty() - is none under way? */
bool packers_wants(const struct packers *packers);
bool packers_empty(const struct packers *packers);

/** packers_put() - pack @chunk->numel values; with threads @data is read until it is taken. */
void packers_put(struct packers *packers, const struct checkpoint_chunk *chunk, const float *data);

/** packers_take() - the oldest one; waits until it is packed. ST_MEMORY. */
MUST_CHECK enum status packers_take(struct packers *packers, const struct packed_chunk **out);

/* ---- names ----------------------------------------------------------------------------------- */

/** checkpoint_state_allowed() - 1 to 31 of a-z, 0-9 and '_'. */
bool checkpoint_state_allowed(const char *state);

/** checkpoint_tensor_allowed() - 1 to 255 bytes of UTF-8 without control characters. */
bool checkpoint_tensor_allowed(const char *name);

/** checkpoint_file_number() - N of "data-N.tsr", five digits; -1 if @name is something else. */
int checkpoint_file_number(const char *name);

/* ---- the parts of checkpoint_open() ---------------------------------------------------------- */

/** manifest_write() - check the tables and write "manifest.json" in @folder, durably. */
MUST_CHECK enum status manifest_write(const char *folder, const struct checkpoint_manifest *m);

/** manifest_read() - the manifest of c->path: step, tensors, files, training, by_name, streams. */
MUST_CHECK enum status manifest_read(struct checkpoint *c);

/* ---- system calls ---------------------------------------------------------------------------- */

/** checkpoint_open_file() - open for reading; regular files only. @bytes: its size, or NULL. */
MUST_CHECK enum status checkpoint_open_file(int *fd, int64_t *bytes, const char *path);

C_END

#endif
