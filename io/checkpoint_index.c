/* Opening a checkpoint: what lies where, from the indexes of all files, and that nothing is missing
 * or there twice. */
#include "io/checkpoint_format.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "engine/base/file.h"

/* ---- system calls ---------------------------------------------------------------------------- */

/* Not to wait for the other end of a pipe that stands there instead of a file. */
enum status checkpoint_open_file(int *fd, int64_t *bytes, const char *path)
{
    struct stat info;
    *fd = file_fault_due() ? -1 : open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (*fd < 0)
        return FAIL(IO, "%s: %s", path, strerror(errno));
    if (fstat(*fd, &info) != 0 || !S_ISREG(info.st_mode)) {
        close(*fd);
        *fd = -1;
        return FAIL(CORRUPT, "%s: is not a regular file", path);
    }
    if (bytes != NULL)
        *bytes = (int64_t)info.st_size;
    return ST_OK;
}

/* ---- one file -------------------------------------------------------------------------------- */

struct data_file {
    char path[CHECKPOINT_PATH_BYTES];
    int fd;
    struct format_foot foot;
    char *index;       /* owned; index and footer */
    uint32_t *streams; /* owned; of the file -> of the checkpoint */
};

/* The footer's numbers fit each other, the file and the tensor table; nothing is allocated yet. */
static enum status check_foot(const struct checkpoint *c, const struct data_file *d, int64_t bytes)
{
    const struct format_foot *f = &d->foot;
    const char head_magic[] = CHECKPOINT_HEAD_MAGIC, foot_magic[] = CHECKPOINT_FOOT_MAGIC;
    struct format_head head;
    TRY(file_read_at(d->fd, d->path, &head, sizeof head, 0));
    if (memcmp(head.magic, head_magic, sizeof head.magic) != 0 ||
        memcmp(f->magic, foot_magic, sizeof f->magic) != 0)
        return FAIL(CORRUPT, "%s: is not a data file of a checkpoint, or is damaged", d->path);
    if (head.version != CHECKPOINT_VERSION || f->version != CHECKPOINT_VERSION || head.zero != 0)
        return FAIL(CORRUPT, "%s: version %u in its head, %u in its footer; the manifest says %d",
                    d->path, head.version, f->version, CHECKPOINT_VERSION);
    uint64_t room = (uint64_t)bytes - sizeof head - sizeof *f;
    uint64_t elements = (uint64_t)c->plain_bytes / sizeof(float);
    uint64_t streams = (uint64_t)c->stream_of[c->tensor_count];
    if (f->index_bytes > room || f->index_first != sizeof head + room - f->index_bytes ||
        f->chunk_count > f->index_bytes / sizeof(struct format_chunk) ||
        f->chunk_count > elements || f->stream_count > streams)
        return FAIL(CORRUPT, "%s: its footer is damaged: the index it tells of cannot be", d->path);
    return ST_OK;
}

static enum status read_index(const struct checkpoint *c, struct data_file *d,
                              const struct checkpoint_file *line)
{
    int64_t bytes = 0;
    TRY(path_join(d->path, sizeof d->path, c->path, line->name));
    if (access(d->path, F_OK) != 0 && errno == ENOENT)
        return FAIL(CORRUPT, "%s: is missing; the manifest names it", d->path);
    TRY(checkpoint_open_file(&d->fd, &bytes, d->path));
    if (bytes != line->bytes)
        return FAIL(CORRUPT, "%s: has %" PRId64 " bytes, the manifest says %" PRId64, d->path,
                    bytes, line->bytes);
    if (bytes < (int64_t)(sizeof(struct format_head) + sizeof d->foot))
        return FAIL(CORRUPT, "%s: %" PRId64 " bytes are too few for a data file", d->path, bytes);
    TRY(file_read_at(d->fd, d->path, &d->foot, sizeof d->foot, bytes - (int64_t)sizeof d->foot));
    TRY(check_foot(c, d, bytes));
    size_t tail = (size_t)d->foot.index_bytes + sizeof d->foot;
    TRY(mem_alloc(&d->index, tail));
    TRY(file_read_at(d->fd, d->path, d->index, tail, (int64_t)d->foot.index_first));
    uint64_t hash = XXH3_64bits(d->index, tail - FOOT_UNHASHED_BYTES);
    if (hash != d->foot.hash)
        return FAIL(CORRUPT, "%s: its index is damaged: the hash differs", d->path);
    if (hash != line->index_hash)
        return FAIL(CORRUPT, "%s: is another file than the one that the manifest tells of",
                    d->path);
    return ST_OK;
}

/* The stream of the checkpoint, or -1. */
static int find_stream(const struct checkpoint *c, const char *state, const char *tensor)
{
    const struct checkpoint_tensor *t = checkpoint_find(c, tensor);
    for (int i = 0; t != NULL && i < t->state_count; i++)
        if (strcmp(t->states[i], state) == 0)
            return c->stream_of[t - c->tensors] + i;
    return -1;
}

/* @text: moved behind the names. */
static enum status parse_streams(const struct checkpoint *c, struct data_file *d, const char **text)
{
    const char *end = d->index + d->foot.index_bytes -
                      d->foot.chunk_count * sizeof(struct format_chunk); /* checked to be inside */
    TRY(mem_alloc(&d->streams, sizeof *d->streams * ((size_t)d->foot.stream_count + 1)));
    for (uint32_t i = 0; i < d->foot.stream_count; i++) {
        struct format_stream s;
        char state[CHECKPOINT_STATE_BYTES] = "", tensor[CHECKPOINT_NAME_BYTES] = "";
        if ((size_t)(end - *text) < sizeof s)
            return FAIL(CORRUPT, "%s: the names of its index are damaged", d->path);
        memcpy(&s, *text, sizeof s);
        *text += sizeof s;
        if (s.state_bytes >= sizeof state || s.tensor_bytes >= sizeof tensor ||
            (size_t)(end - *text) < (size_t)s.state_bytes + s.tensor_bytes)
            return FAIL(CORRUPT, "%s: the names of its index are damaged", d->path);
        memcpy(state, *text, s.state_bytes);
        memcpy(tensor, *text + s.state_bytes, s.tensor_bytes);
        *text += s.state_bytes + s.tensor_bytes;
        int stream = find_stream(c, state, tensor);
        if (stream < 0)
            return FAIL(CORRUPT, "%s: holds %.31s of tensor \"%.200s\", not known to the manifest",
                        d->path, state, tensor);
        d->streams[i] = (uint32_t)stream;
    }
    if (*text != end)
        return FAIL(CORRUPT, "%s: the names of its index are damaged", d->path);
    return ST_OK;
}

static const struct checkpoint_tensor *tensor_of(const struct checkpoint *c, int stream)
{
    int low = 0, high = c->tensor_count - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (c->stream_of[middle] <= stream)
            low = middle;
        else
            high = middle - 1;
    }
    return &c->tensors[low];
}

static const char *state_of(const struct checkpoint *c, int stream)
{
    const struct checkpoint_tensor *t = tensor_of(c, stream);
    return t->states[stream - c->stream_of[t - c->tensors]];
}

/* @offset: of the chunk; moved behind it. */
static enum status take_chunk(struct checkpoint *c, const struct data_file *d, uint32_t file,
                              const struct format_chunk *from, int64_t *offset)
{
    bool fits = from->stream < d->foot.stream_count && from->numel >= 1 &&
                from->numel <= CHECKPOINT_CHUNK_BYTES / sizeof(float);
    int64_t bytes = 0;
    for (int p = 0; p < PLANES; p++) {
        fits = fits && from->plane_bytes[p] >= 1 && from->plane_bytes[p] <= from->numel;
        bytes += from->plane_bytes[p];
    }
    if (!fits || bytes > (int64_t)d->foot.index_first - *offset)
        return FAIL(CORRUPT, "%s: its index is damaged: a chunk that cannot be", d->path);
    uint32_t stream = d->streams[from->stream];
    const struct checkpoint_tensor *t = tensor_of(c, (int)stream);
    if (from->first > (uint64_t)t->numel || from->numel > (uint64_t)t->numel - from->first)
        return FAIL(CORRUPT,
                    "%s: holds %u elements from %" PRIu64
                    " of tensor \"%.200s\", which has %" PRId64,
                    d->path, from->numel, from->first, t->name, t->numel);
    struct checkpoint_chunk *chunk = &c->chunks[c->chunk_count++];
    *chunk = (struct checkpoint_chunk){.first = (int64_t)from->first,
                                       .offset = *offset,
                                       .hash = from->hash,
                                       .numel = (int32_t)from->numel,
                                       .stream = stream,
                                       .file = file};
    memcpy(chunk->plane_bytes, from->plane_bytes, sizeof chunk->plane_bytes);
    if (chunk->numel > c->max_chunk_numel)
        c->max_chunk_numel = chunk->numel;
    c->files[file].plain_bytes += (int64_t)sizeof(float) * chunk->numel;
    *offset += bytes;
    return ST_OK;
}

static enum status take_file(struct checkpoint *c, uint32_t file, size_t *capacity)
{
    enum status st;
    struct data_file d = {.fd = -1};
    int64_t offset = sizeof(struct format_head);
    TRY_GOTO(st, out, read_index(c, &d, &c->files[file]));
    const char *text = d.index;
    TRY_GOTO(st, out, parse_streams(c, &d, &text));
    TRY_GOTO(st, out,
             mem_grow(&c->chunks, capacity, c->chunk_count + (size_t)d.foot.chunk_count,
                      sizeof *c->chunks));
    for (uint64_t i = 0; i < d.foot.chunk_count; i++, text += sizeof(struct format_chunk)) {
        struct format_chunk chunk;
        memcpy(&chunk, text, sizeof chunk);
        TRY_GOTO(st, out, take_chunk(c, &d, file, &chunk, &offset));
    }
    if (offset != (int64_t)d.foot.index_first)
        st = FAIL(CORRUPT, "%s: bytes %" PRId64 " to %" PRIu64 " belong to no chunk", d.path,
                  offset, d.foot.index_first);
    c->bytes += c->files[file].bytes;
out:
    if (d.fd >= 0)
        close(d.fd);
    mem_free(&d.index);
    mem_free(&d.streams);
    return st;
}

/* ---- all files ------------------------------------------------------------------------------- */

static int compare_chunks(const void *a, const void *b)
{
    const struct checkpoint_chunk *x = a, *y = b;
    if (x->stream != y->stream)
        return x->stream < y->stream ? -1 : 1;
    return (x->first > y->first) - (x->first < y->first);
}

static enum status check_stream(const struct checkpoint *c, int stream)
{
    const struct checkpoint_tensor *t = tensor_of(c, stream);
    int64_t end = 0;
    for (size_t i = c->stream_start[stream]; i < c->stream_start[stream + 1]; i++) {
        const struct checkpoint_chunk *k = &c->chunks[i];
        int64_t last = k->first + k->numel < end ? k->first + k->numel - 1 : end - 1;
        if (k->first < end)
            return FAIL(CORRUPT,
                        "%s: tensor \"%.200s\", %s: elements %" PRId64 " to %" PRId64
                        " are there twice (in %s)",
                        c->path, t->name, state_of(c, stream), k->first, last,
                        c->files[k->file].name);
        if (k->first > end)
            return FAIL(CORRUPT,
                        "%s: tensor \"%.200s\", %s: elements %" PRId64 " to %" PRId64
                        " are missing",
                        c->path, t->name, state_of(c, stream), end, k->first - 1);
        end += k->numel;
    }
    if (end != t->numel)
        return FAIL(CORRUPT,
                    "%s: tensor \"%.200s\", %s: elements %" PRId64 " to %" PRId64 " are missing",
                    c->path, t->name, state_of(c, stream), end, t->numel - 1);
    return ST_OK;
}

static enum status read_indexes(struct checkpoint *c)
{
    size_t capacity = 0, streams = (size_t)c->stream_of[c->tensor_count];
    for (int i = 0; i < c->file_count; i++)
        TRY(take_file(c, (uint32_t)i, &capacity));
    if (c->chunk_count > 0)
        qsort(c->chunks, c->chunk_count, sizeof *c->chunks, compare_chunks);
    TRY(mem_alloc(&c->stream_start, sizeof *c->stream_start * (streams + 1)));
    size_t at = 0;
    for (size_t s = 0; s < streams; s++) {
        c->stream_start[s] = at;
        while (at < c->chunk_count && c->chunks[at].stream == s)
            at++;
    }
    c->stream_start[streams] = at;
    for (size_t s = 0; s < streams; s++)
        TRY(check_stream(c, (int)s));
    return ST_OK;
}

enum status checkpoint_open(struct checkpoint *c, const char *path)
{
    struct stat info;
    memset(c, 0, sizeof *c);
    TRY(path_join(c->path, sizeof c->path, "", path));
    if (stat(path, &info) != 0)
        return FAIL(IO, "%s: there is no checkpoint: %s", path, strerror(errno));
    if (!S_ISDIR(info.st_mode))
        return FAIL(IO, "%s: is not a folder; a checkpoint is one", path);
    TRY(manifest_read(c));
    return read_indexes(c);
}

void checkpoint_close(struct checkpoint *c)
{
    json_decref(c->training);
    mem_free(&c->tensors);
    mem_free(&c->files);
    mem_free(&c->chunks);
    mem_free(&c->stream_start);
    mem_free(&c->stream_of);
    mem_free(&c->by_name);
    pool_release(&c->pool);
    memset(c, 0, sizeof *c);
}

const struct checkpoint_tensor *checkpoint_find(const struct checkpoint *c, const char *name)
{
    for (int low = 0, high = c->tensor_count - 1; low <= high;) {
        int middle = (low + high) / 2;
        const struct checkpoint_tensor *t = &c->tensors[c->by_name[middle]];
        int order = strcmp(name, t->name);
        if (order == 0)
            return t;
        if (order < 0)
            high = middle - 1;
        else
            low = middle + 1;
    }
    return NULL;
}

bool checkpoint_has_state(const struct checkpoint_tensor *tensor, const char *state)
{
    for (int i = 0; i < tensor->state_count; i++)
        if (strcmp(tensor->states[i], state) == 0)
            return true;
    return false;
}

int64_t checkpoint_stored_bytes(const struct checkpoint *c, const char *state, const char *tensor)
{
    int stream = find_stream(c, state, tensor);
    int64_t bytes = 0;
    if (stream < 0)
        return 0;
    for (size_t i = c->stream_start[stream]; i < c->stream_start[stream + 1]; i++)
        for (int p = 0; p < PLANES; p++)
            bytes += c->chunks[i].plane_bytes[p];
    return bytes;
}
