/* One data file of a checkpoint, written from its first byte to its last. */
#define XXH_STATIC_LINKING_ONLY /* the size of a hash's state, which then lies in our memory */
#include "io/checkpoint_format.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "engine/base/file.h"

enum { SEND_BYTES = 32 << 20, MOST_THREADS = 64 };

/* The disk works while the next chunks are packed, or all of it would wait for the fsync. */
static void begin_flush(struct checkpoint_writer *w)
{
    if (w->file.bytes - w->sent < SEND_BYTES)
        return;
    sync_file_range(w->fd, w->sent, w->file.bytes - w->sent, SYNC_FILE_RANGE_WRITE);
    w->sent = w->file.bytes;
}

static enum status append(struct checkpoint_writer *w, const void *data, size_t bytes)
{
    TRY(file_write_at(w->fd, w->path, data, bytes, w->file.bytes));
    w->writes++;
    XXH3_64bits_update(w->hash, data, bytes);
    w->file.bytes += (int64_t)bytes;
    begin_flush(w);
    return ST_OK;
}

static enum status check_options(struct checkpoint_options *o)
{
    if (o->chunk_bytes == 0)
        o->chunk_bytes = CHECKPOINT_CHUNK_BYTES;
    if (o->chunk_bytes < 4 || o->chunk_bytes > CHECKPOINT_CHUNK_BYTES || o->chunk_bytes % 4 != 0)
        return FAIL(INVALID, "a chunk of %" PRId64 " bytes: expected a multiple of 4 up to %d",
                    o->chunk_bytes, CHECKPOINT_CHUNK_BYTES);
    if (o->level < 0 || o->level > 19)
        return FAIL(INVALID, "compression level %d: expected 0 to 19", o->level);
    if (o->threads < 0 || o->threads > MOST_THREADS)
        return FAIL(INVALID, "%d threads of a writer: expected 0 to %d", o->threads, MOST_THREADS);
    return ST_OK;
}

static enum status open_file(struct checkpoint_writer *w, const char *temp, int file_index)
{
    struct format_head head = {.magic = CHECKPOINT_HEAD_MAGIC, .version = CHECKPOINT_VERSION};
    if (file_index < 0 || file_index >= CHECKPOINT_MAX_FILES)
        return FAIL(INVALID, "data file %d of a checkpoint: expected 0 to %d", file_index,
                    CHECKPOINT_MAX_FILES - 1);
    snprintf(w->file.name, sizeof w->file.name, "data-%05d.tsr", file_index);
    TRY(path_join(w->path, sizeof w->path, temp, w->file.name));
    w->fd = file_fault_due() ? -1 : open(w->path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (w->fd < 0)
        return FAIL(IO, "%s: %s", w->path, strerror(errno));
    w->is_open = true;
    return append(w, &head, sizeof head);
}

enum status checkpoint_writer_open(struct checkpoint_writer *w, const char *temp, int file_index,
                                   const struct checkpoint_options *options)
{
    const struct checkpoint_options defaults = {.level = CHECKPOINT_LEVEL};
    memset(w, 0, sizeof *w);
    w->options = options != NULL ? *options : defaults;
    TRY(check_options(&w->options));
    TRY(mem_alloc(&w->hash, sizeof *w->hash));
    XXH3_64bits_reset(w->hash);
    TRY(packers_open(&w->packers, w->options.threads, (size_t)w->options.chunk_bytes,
                     w->options.level));
    return open_file(w, temp, file_index);
}

/* The number of a stream; a new one is named. Callers stay with one for many ranges. */
static enum status find_stream(struct checkpoint_writer *w, uint32_t *stream, const char *state,
                               const char *tensor)
{
    for (size_t i = w->stream_count; i-- > 0;)
        if (strcmp(w->streams[i].tensor, tensor) == 0 && strcmp(w->streams[i].state, state) == 0) {
            *stream = (uint32_t)i;
            return ST_OK;
        }
    if (!checkpoint_state_allowed(state))
        return FAIL(INVALID, "%s: tensor \"%.200s\": \"%.60s\" is no name of a state", w->path,
                    tensor, state);
    if (!checkpoint_tensor_allowed(tensor))
        return FAIL(INVALID, "%s: \"%.200s\" is no name of a tensor", w->path, tensor);
    struct checkpoint_stream s = {0};
    TRY(pool_copy(&w->pool, &s.state, state, strlen(state)));
    TRY(pool_copy(&w->pool, &s.tensor, tensor, strlen(tensor)));
    TRY(mem_grow(&w->streams, &w->stream_capacity, w->stream_count + 1, sizeof s));
    *stream = (uint32_t)w->stream_count;
    w->streams[w->stream_count++] = s;
    return ST_OK;
}

/* The oldest chunk that is under way. */
static enum status write_chunk(struct checkpoint_writer *w)
{
    const struct packed_chunk *p = NULL;
    TRY(packers_take(w->packers, &p));
    struct checkpoint_chunk c = p->chunk;
    c.offset = w->file.bytes;
    TRY(mem_grow(&w->chunks, &w->chunk_capacity, w->chunk_count + 1, sizeof c));
    TRY(append(w, p->data, p->bytes));
    w->chunks[w->chunk_count++] = c;
    w->file.plain_bytes += (int64_t)sizeof(float) * c.numel;
    return ST_OK;
}

static enum status put_chunk(struct checkpoint_writer *w, uint32_t stream, int64_t first,
                             const float *data, int32_t numel)
{
    const struct checkpoint_chunk c = {.first = first, .numel = numel, .stream = stream};
    if (!packers_wants(w->packers))
        TRY(write_chunk(w));
    packers_put(w->packers, &c, data);
    return w->options.threads == 0 ? write_chunk(w) : ST_OK;
}

static enum status write_all(struct checkpoint_writer *w)
{
    while (!packers_empty(w->packers))
        TRY(write_chunk(w));
    return ST_OK;
}

enum status checkpoint_write_range(struct checkpoint_writer *w, const char *state,
                                   const char *tensor, int64_t first, const float *data,
                                   int64_t numel)
{
    ASSERT(w->is_open);
    int64_t chunk_numel = w->options.chunk_bytes / (int64_t)sizeof *data;
    uint32_t stream = 0;
    if (first < 0 || numel < 1 || first > INT64_MAX - numel)
        return FAIL(INVALID,
                    "%s: tensor \"%.200s\", %.60s: %" PRId64 " elements from %" PRId64
                    " are no range",
                    w->path, tensor, state, numel, first);
    TRY(find_stream(w, &stream, state, tensor));
    for (int64_t done = 0; done < numel; done += chunk_numel) {
        int64_t n = numel - done < chunk_numel ? numel - done : chunk_numel;
        TRY(put_chunk(w, stream, first + done, data + done, (int32_t)n));
    }
    return ST_OK;
}

/* ---- the end of the file --------------------------------------------------------------------- */

static size_t index_bytes(const struct checkpoint_writer *w)
{
    size_t bytes = w->chunk_count * sizeof(struct format_chunk);
    for (size_t i = 0; i < w->stream_count; i++)
        bytes += sizeof(struct format_stream) + strlen(w->streams[i].state) +
                 strlen(w->streams[i].tensor);
    return bytes;
}

static char *put(char *at, const void *data, size_t bytes)
{
    memcpy(at, data, bytes);
    return at + bytes;
}

static char *put_index(const struct checkpoint_writer *w, char *at)
{
    for (size_t i = 0; i < w->stream_count; i++) {
        const struct checkpoint_stream *from = &w->streams[i];
        struct format_stream s = {(uint16_t)strlen(from->state), (uint16_t)strlen(from->tensor)};
        at = put(at, &s, sizeof s);
        at = put(at, from->state, s.state_bytes);
        at = put(at, from->tensor, s.tensor_bytes);
    }
    for (size_t i = 0; i < w->chunk_count; i++) {
        const struct checkpoint_chunk *from = &w->chunks[i];
        struct format_chunk c = {.first = (uint64_t)from->first,
                                 .hash = from->hash,
                                 .numel = (uint32_t)from->numel,
                                 .stream = from->stream};
        memcpy(c.plane_bytes, from->plane_bytes, sizeof c.plane_bytes);
        at = put(at, &c, sizeof c);
    }
    return at;
}

static enum status append_index(struct checkpoint_writer *w)
{
    enum status st = ST_OK;
    char *text = NULL;
    struct format_foot foot = {.index_first = (uint64_t)w->file.bytes,
                               .index_bytes = index_bytes(w),
                               .chunk_count = w->chunk_count,
                               .stream_count = (uint32_t)w->stream_count,
                               .version = CHECKPOINT_VERSION,
                               .magic = CHECKPOINT_FOOT_MAGIC};
    size_t bytes = (size_t)foot.index_bytes + sizeof foot;
    TRY(mem_alloc(&text, bytes));
    char *at = put_index(w, text);
    memcpy(at, &foot, sizeof foot);
    foot.hash = XXH3_64bits(text, bytes - FOOT_UNHASHED_BYTES);
    memcpy(at, &foot, sizeof foot);
    w->file.index_hash = foot.hash;
    TRY_GOTO(st, out, append(w, text, bytes));
out:
    mem_free(&text);
    return st;
}

enum status checkpoint_writer_close(struct checkpoint_writer *w, struct checkpoint_file *file)
{
    enum status st;
    ASSERT(w->is_open);
    TRY_GOTO(st, out, write_all(w));
    TRY_GOTO(st, out, append_index(w));
    if (file_fault_due() || fsync(w->fd) != 0) {
        st = FAIL(IO, "%s: cannot be flushed to the disk: %s", w->path, strerror(errno));
        goto out;
    }
    w->is_open = false;
    if (close(w->fd) != 0) { /* NFS tells here what it could not write */
        st = FAIL(IO, "%s: %s", w->path, strerror(errno));
        goto out;
    }
    w->file.hash = XXH3_64bits_digest(w->hash);
    *file = w->file;
out:
    checkpoint_writer_abandon(w);
    return st;
}

void checkpoint_writer_abandon(struct checkpoint_writer *w)
{
    if (w->is_open)
        close(w->fd);
    packers_close(&w->packers);
    mem_free(&w->hash);
    mem_free(&w->streams);
    mem_free(&w->chunks);
    pool_release(&w->pool);
    memset(w, 0, sizeof *w);
}
