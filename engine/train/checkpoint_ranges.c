#include "engine/train/checkpoint_ranges.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "engine/device/workers.h"
#include "engine/train/weights.h"

enum { MOST_THREADS = 16 };

struct range_piece {
    int tensor;
    int64_t first, count; /* of the tensor; none: only the gap */
    int64_t place, gap;   /* where it begins in the range; elements before it that are zeros */
};

struct range_failure {
    atomic_flag taken;
    enum status st;
    char message[2048];
};

/* ---- open and close -------------------------------------------------------------------------- */

int range_reader_threads(const struct device *device)
{
    return device->host_threads < MOST_THREADS ? device->host_threads : MOST_THREADS;
}

enum status range_reader_open(struct range_reader *r, const struct model *model,
                              const struct checkpoint *file, const bool *frozen,
                              struct device *device)
{
    *r = (struct range_reader){.model = model, .file = file, .frozen = frozen};
    r->threads = range_reader_threads(device);
    if (device->workers == NULL || device->threads != r->threads)
        TRY(workers_open(&r->own, r->threads));
    r->workers = r->own != NULL ? r->own : device->workers;
    TRY(mem_alloc(&r->failure, sizeof *r->failure));
    TRY(mem_alloc(&r->readers, sizeof *r->readers * (size_t)r->threads));
    for (int i = 0; i < r->threads; i++)
        TRY(checkpoint_reader_open(&r->readers[i], file));
    return ST_OK;
}

void range_reader_close(struct range_reader *r)
{
    for (int i = 0; i < r->threads && r->readers != NULL; i++)
        checkpoint_reader_close(&r->readers[i]);
    workers_close(&r->own);
    mem_free(&r->readers);
    mem_free(&r->pieces);
    mem_free(&r->failure);
    memset(r, 0, sizeof *r);
}

/* ---- a range --------------------------------------------------------------------------------- */

static enum status add_piece(struct range_reader *r, int tensor, int64_t first, int64_t count,
                             int64_t place)
{
    ASSERT(place >= r->end); /* tensors of a unit follow one another */
    TRY(mem_grow(&r->pieces, &r->capacity, r->count + 1, sizeof *r->pieces));
    r->pieces[r->count++] = (struct range_piece){tensor, first, count, place, place - r->end};
    r->end = place + count;
    return ST_OK;
}

static enum status cut_part(void *context, struct weights_part part)
{
    struct range_reader *r = context;
    const char *tensor = r->model->tensors[part.tensor].name;
    if (r->frozen != NULL && r->frozen[part.tensor] && strcmp(r->state, "master") != 0)
        return ST_OK;
    for (int64_t done = 0; done < part.count;) {
        int64_t first = part.tensor_first + done, left = part.count - done;
        int64_t n = checkpoint_chunk_end(r->file, r->state, tensor, first) - first;
        n = n < left ? n : left;
        TRY(add_piece(r, part.tensor, first, n, part.range_first + done));
        done += n;
    }
    return ST_OK;
}

static void read_piece(void *context, int64_t i, int worker)
{
    struct range_reader *r = context;
    const struct range_piece *p = &r->pieces[i];
    float *at = r->out + p->place;
    memset(at - p->gap, 0, sizeof *at * (size_t)p->gap);
    if (p->count == 0)
        return;
    enum status st = checkpoint_read_range(
        &r->readers[worker], r->state, r->model->tensors[p->tensor].name, p->first, p->count, at);
    if (st == ST_OK || atomic_flag_test_and_set(&r->failure->taken))
        return;
    r->failure->st = st;
    snprintf(r->failure->message, sizeof r->failure->message, "%s", status_message());
}

enum status range_reader_read(struct range_reader *r, const char *state, int unit, float *out,
                              int64_t first, int64_t count)
{
    r->state = state;
    r->out = out;
    r->count = 0;
    r->end = 0;
    TRY(weights_each_part(r->model, unit, first, count, cut_part, r));
    if (r->end < count)
        TRY(add_piece(r, -1, 0, 0, count));
    workers_run(r->workers, read_piece, r, (int64_t)r->count);
    if (r->failure->st != ST_OK)
        status_set_message(r->failure->message);
    return r->failure->st;
}
