/* Ranges of a checkpoint by name, and the check of all that it holds. */
#define XXH_STATIC_LINKING_ONLY /* the size of a hash's state, which then lies in our memory */
#include "io/checkpoint_format.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>
#include <zstd.h>

#include "engine/base/file.h"

enum status checkpoint_reader_open(struct checkpoint_reader *r, const struct checkpoint *c)
{
    size_t bytes = sizeof(float) * (size_t)c->max_chunk_numel;
    memset(r, 0, sizeof *r);
    r->checkpoint = c;
    r->fd = -1;
    r->open_file = r->cached = -1;
    TRY(mem_alloc_raw(&r->planes, bytes));
    TRY(mem_alloc_raw(&r->packed, bytes));
    TRY(mem_alloc_raw(&r->values, bytes));
    r->zstd = ZSTD_createDCtx();
    if (r->zstd == NULL)
        return FAIL(MEMORY, "%s: no memory for zstd", c->path);
    return ST_OK;
}

void checkpoint_reader_close(struct checkpoint_reader *r)
{
    if (r->checkpoint != NULL && r->fd >= 0)
        close(r->fd);
    ZSTD_freeDCtx(r->zstd);
    mem_free(&r->planes);
    mem_free(&r->packed);
    mem_free(&r->values);
    memset(r, 0, sizeof *r);
}

/* Writers follow one another in a tensor, so one file stays open. */
static enum status open_file(struct checkpoint_reader *r, const char *path, uint32_t file)
{
    if (r->open_file == (int64_t)file)
        return ST_OK;
    if (r->fd >= 0)
        close(r->fd);
    r->fd = -1;
    r->open_file = -1;
    TRY(checkpoint_open_file(&r->fd, NULL, path));
    r->open_file = file;
    return ST_OK;
}

/* Where a message about a chunk belongs. */
struct place {
    const char *state, *tensor;
};

/* A whole chunk to @out. */
static enum status load_chunk(struct checkpoint_reader *r, size_t number, float *out,
                              struct place at)
{
    const struct checkpoint *c = r->checkpoint;
    const struct checkpoint_chunk *k = &c->chunks[number];
    char path[CHECKPOINT_PATH_BYTES];
    size_t bytes = 0;
    TRY(path_join(path, sizeof path, c->path, c->files[k->file].name));
    TRY(open_file(r, path, k->file));
    for (int p = 0; p < PLANES; p++)
        bytes += k->plane_bytes[p];
    TRY(file_read_at(r->fd, path, r->packed, bytes, k->offset));
    if (!chunk_unpack(out, r->planes, r->packed, k->plane_bytes, k->numel, r->zstd) ||
        XXH3_64bits(out, sizeof *out * (size_t)k->numel) != k->hash)
        return FAIL(CORRUPT,
                    "%s: tensor \"%.200s\", %s: elements %" PRId64 " to %" PRId64
                    " are damaged: their hash differs",
                    path, at.tensor, at.state, k->first, k->first + k->numel - 1);
    return ST_OK;
}

/* Elements [first, first + numel) of a chunk, counted in the chunk. */
static enum status read_part(struct checkpoint_reader *r, size_t number, int64_t first,
                             int64_t numel, float *out, struct place at)
{
    if (r->cached != (int64_t)number) {
        if (numel == r->checkpoint->chunks[number].numel)
            return load_chunk(r, number, out, at);
        r->cached = -1;
        TRY(load_chunk(r, number, r->values, at));
        r->cached = (int64_t)number;
    }
    memcpy(out, r->values + first, sizeof *out * (size_t)numel);
    return ST_OK;
}

/* The chunk of a stream that holds this element; the chunks cover it without holes. */
static size_t chunk_at(const struct checkpoint *c, int stream, int64_t element)
{
    size_t low = c->stream_start[stream], high = c->stream_start[stream + 1] - 1;
    while (low < high) {
        size_t middle = low + (high - low + 1) / 2;
        if (c->chunks[middle].first <= element)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* The states of all tensors are numbered; -1: there is none of these names. */
static int find_stream(const struct checkpoint *c, const struct checkpoint_tensor *t,
                       const char *state)
{
    for (int k = 0; t != NULL && k < t->state_count; k++)
        if (strcmp(t->states[k], state) == 0)
            return c->stream_of[t - c->tensors] + k;
    return -1;
}

int64_t checkpoint_chunk_end(const struct checkpoint *c, const char *state, const char *tensor,
                             int64_t first)
{
    const struct checkpoint_tensor *t = checkpoint_find(c, tensor);
    int stream = find_stream(c, t, state);
    if (stream < 0 || first < 0 || first >= t->numel)
        return INT64_MAX;
    const struct checkpoint_chunk *k = &c->chunks[chunk_at(c, stream, first)];
    return k->first + k->numel;
}

static enum status find_range(int *stream, const struct checkpoint *c, struct place at,
                              int64_t first, int64_t numel)
{
    const struct checkpoint_tensor *t = checkpoint_find(c, at.tensor);
    if (t == NULL)
        return FAIL(INVALID, "%s: there is no tensor \"%.200s\"", c->path, at.tensor);
    *stream = find_stream(c, t, at.state);
    if (*stream < 0)
        return FAIL(INVALID, "%s: tensor \"%.200s\" has no state %.40s", c->path, at.tensor,
                    at.state);
    if (first < 0 || numel < 0 || first > t->numel || numel > t->numel - first)
        return FAIL(INVALID,
                    "%s: tensor \"%.200s\" has %" PRId64 " elements, asked for %" PRId64
                    " from %" PRId64,
                    c->path, at.tensor, t->numel, numel, first);
    return ST_OK;
}

enum status checkpoint_read_range(struct checkpoint_reader *r, const char *state,
                                  const char *tensor, int64_t first, int64_t numel, float *out)
{
    const struct checkpoint *c = r->checkpoint;
    const struct place at = {state, tensor};
    int stream = 0;
    TRY(find_range(&stream, c, at, first, numel));
    if (numel == 0)
        return ST_OK;
    for (size_t number = chunk_at(c, stream, first); numel > 0; number++) {
        const struct checkpoint_chunk *k = &c->chunks[number];
        int64_t inside = first - k->first, n = k->numel - inside;
        n = n < numel ? n : numel;
        TRY(read_part(r, number, inside, n, out, at));
        first += n;
        numel -= n;
        out += n;
    }
    return ST_OK;
}

/* ---- verify ---------------------------------------------------------------------------------- */

struct verify {
    void (*found)(void *context, const char *problem);
    void *context;
    enum status first; /* problem */
    char message[1024];
};

static void take_problem(struct verify *v, enum status st)
{
    if (st == ST_OK)
        return;
    char line[sizeof v->message];
    snprintf(line, sizeof line, "%.*s", (int)strcspn(status_message(), "\n"), status_message());
    if (v->found != NULL)
        v->found(v->context, line);
    if (v->first == ST_OK) {
        v->first = st;
        memcpy(v->message, line, sizeof line);
    }
}

static enum status hash_file(const struct checkpoint *c, const struct checkpoint_file *line,
                             char *buffer, size_t buffer_bytes, struct XXH3_state_s *hash)
{
    enum status st = ST_OK;
    char path[CHECKPOINT_PATH_BYTES];
    int fd = -1;
    int64_t bytes = 0;
    TRY(path_join(path, sizeof path, c->path, line->name));
    TRY(checkpoint_open_file(&fd, &bytes, path));
    XXH3_64bits_reset(hash);
    if (bytes != line->bytes) {
        st = FAIL(CORRUPT, "%s: has %" PRId64 " bytes, the manifest says %" PRId64, path, bytes,
                  line->bytes);
        goto out;
    }
    for (int64_t done = 0; done < bytes;) {
        size_t n = bytes - done < (int64_t)buffer_bytes ? (size_t)(bytes - done) : buffer_bytes;
        TRY_GOTO(st, out, file_read_at(fd, path, buffer, n, done));
        XXH3_64bits_update(hash, buffer, n);
        done += (int64_t)n;
    }
    if (XXH3_64bits_digest(hash) != line->hash)
        st = FAIL(CORRUPT, "%s: is damaged: its hash is not the one of the manifest", path);
out:
    close(fd);
    return st;
}

static enum status verify_files(const struct checkpoint *c, struct verify *v)
{
    enum { BUFFER_BYTES = 1 << 20 };
    enum status st;
    char *buffer = NULL;
    struct XXH3_state_s *hash = NULL;
    TRY_GOTO(st, out, mem_alloc(&buffer, BUFFER_BYTES));
    TRY_GOTO(st, out, mem_alloc(&hash, sizeof *hash));
    for (int i = 0; i < c->file_count; i++)
        take_problem(v, hash_file(c, &c->files[i], buffer, BUFFER_BYTES, hash));
out:
    mem_free(&buffer);
    mem_free(&hash);
    return st;
}

static enum status verify_chunks(const struct checkpoint *c, struct verify *v)
{
    enum status st;
    struct checkpoint_reader r = {0};
    TRY_GOTO(st, out, checkpoint_reader_open(&r, c));
    for (int t = 0; t < c->tensor_count; t++) {
        for (int s = 0; s < c->tensors[t].state_count; s++) {
            int stream = c->stream_of[t] + s;
            struct place at = {c->tensors[t].states[s], c->tensors[t].name};
            for (size_t i = c->stream_start[stream]; i < c->stream_start[stream + 1]; i++)
                take_problem(v, load_chunk(&r, i, r.values, at));
        }
    }
out:
    checkpoint_reader_close(&r);
    return st;
}

enum status checkpoint_verify(const struct checkpoint *c,
                              void (*found)(void *context, const char *problem), void *context)
{
    struct verify v = {.found = found, .context = context};
    TRY(verify_files(c, &v));
    TRY(verify_chunks(c, &v));
    if (v.first == ST_OK)
        return ST_OK;
    status_set_message(v.message);
    return v.first;
}
