#include "engine/train/weights.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/log.h"
#include "engine/base/text.h"
#include "engine/device/workers.h"
#include "engine/train/weights_folder.h"

/* ---- ranges of flat parameters --------------------------------------------------------------- */

enum status weights_each_part(const struct model *m, int unit, int64_t first, int64_t count,
                              enum status (*visit)(void *context, struct weights_part part),
                              void *context)
{
    const struct model_unit *u = &m->units[unit];
    for (int i = u->first_param; i < u->first_param + u->param_count; i++) {
        for (int k = 0; k < m->params[i].piece_count; k++) {
            const struct param_piece *piece = &m->params[i].piece[k];
            int64_t start = m->param_offset[i] + piece->first; /* element of the flat parameter */
            int64_t from = start > first ? start : first;
            int64_t end = start + piece->numel, stop = first + count;
            int64_t to = end < stop ? end : stop;
            if (from < to)
                TRY(visit(context,
                          (struct weights_part){.tensor = piece->tensor,
                                                .tensor_first = piece->tensor_first + from - start,
                                                .count = to - from,
                                                .range_first = from - first}));
        }
    }
    return ST_OK;
}

/* ---- filling in ------------------------------------------------------------------------------ */

enum { STAGING_NUMEL = 1 << 17 /* for each thread */, PART_NUMEL = 1 << 16, MOST_THREADS = 16 };

/* Where the numbers come from, and on their way into device memory. */
struct filler {
    const struct weights_source *source; /* borrowed, as the workers */
    struct workers *workers;             /* NULL: this thread alone */
    struct staging own;
    struct staging *staging; /* borrowed, or own */
    /* The range at hand; the first part that fails says why. */
    int unit;
    float *out;
    int64_t first, count;
    atomic_flag failed;
    enum status st;
    char message[2048];
};

static void fill_part(void *context, int64_t part, int worker)
{
    struct filler *f = context;
    int64_t at = part * PART_NUMEL, left = f->count - at;
    (void)worker;
    enum status st = f->source->fill(f->source->context, f->unit, f->out + at, f->first + at,
                                     left < PART_NUMEL ? left : PART_NUMEL);
    if (st == ST_OK || atomic_flag_test_and_set(&f->failed))
        return;
    f->st = st;
    snprintf(f->message, sizeof f->message, "%s", status_message());
}

/* Elements [first, first + count) of a unit, into host memory. */
static enum status fill_host(struct filler *f, int unit, float *out, int64_t first, int64_t count)
{
    if (f->workers == NULL)
        return f->source->fill(f->source->context, unit, out, first, count);
    f->unit = unit;
    f->out = out;
    f->first = first;
    f->count = count;
    workers_run(f->workers, fill_part, f, (count + PART_NUMEL - 1) / PART_NUMEL);
    if (f->st != ST_OK)
        status_set_message(f->message);
    return f->st;
}

/* Elements [first, first + count) of a unit: to parameters of fp32, or through the workspace to
 * those of bf16 and, where it is not NULL, to the lower halves @low. */
static enum status fill_range(struct trainer *t, struct filler *f, int unit, int64_t first,
                              int64_t count, void *param, uint16_t *low)
{
    struct stream *s = &t->device->streams[STREAM_COMPUTE];
    bool halves = t->device->param_dtype == DTYPE_BF16, staged = f->staging->numel > 0;
    float *whole = halves ? NULL : param, *from = NULL;
    uint16_t *high = halves ? param : NULL;
    int64_t most = f->staging->numel, room = (int64_t)(s->workspace_bytes / sizeof *from);
    if (!staged && !halves)
        return fill_host(f, unit, whole, first, count);
    if (!staged || (halves && most > room))
        most = room;
    ASSERT(most > 0);
    for (int64_t done = 0; done < count; done += most) {
        int64_t n = count - done < most ? count - done : most;
        float *to = from = halves ? s->workspace : whole + done;
        if (staged)
            TRY(staging_take(f->staging, &from));
        TRY(fill_host(f, unit, from, first + done, n));
        if (staged)
            TRY(device_copy(s, to, from, sizeof *from * (size_t)n));
        if (halves)
            TRY(op_master_split(s, tensor_1d(high + done, DTYPE_BF16, n),
                                tensor_1d(low != NULL ? low + done : NULL, DTYPE_U16, n),
                                tensor_1d(to, DTYPE_F32, n)));
        if (staged)
            TRY(staging_given(f->staging, s));
    }
    return ST_OK;
}

/* What others hold of replicated parameters is rounded as they do it, but its lower halves are
 * theirs alone where the optimizer's state is in shards. */
static enum status fill_unit(struct trainer *t, struct filler *f, int unit)
{
    struct shard_view view = executor_shard(&t->executor, unit);
    const struct layout_unit *u = &t->setup.layout.units[unit];
    bool low_is_whole = (view.low != NULL) == (view.low_whole != NULL);
    if (view.param_whole == NULL || !low_is_whole)
        TRY(fill_range(t, f, unit, t->comm->rank * u->shard_numel, view.numel, view.param_shard,
                       view.low));
    if (view.param_whole != NULL)
        TRY(fill_range(t, f, unit, 0, u->padded_numel, view.param_whole, view.low_whole));
    return ST_OK;
}

static int fill_threads(const struct trainer *t, const struct weights_source *source)
{
    if (!source->from_any_thread)
        return 1;
    return t->device->host_threads < MOST_THREADS ? t->device->host_threads : MOST_THREADS;
}

enum status weights_staging(struct staging *s, struct trainer *t, int64_t numel)
{
    int64_t longest = 1;
    for (int u = 0; u < t->setup.model.unit_count; u++) {
        struct shard_view view = executor_shard(&t->executor, u);
        bool whole = view.param_whole != NULL || view.adam_m_whole != NULL;
        int64_t range = whole ? t->setup.layout.units[u].padded_numel : view.numel;
        longest = range > longest ? range : longest;
    }
    return staging_open(s, t->device, numel < longest ? numel : longest);
}

enum status weights_fill(struct trainer *t, const struct weights_source *source)
{
    enum status st = ST_OK;
    struct workers *own = NULL;
    struct filler *f = NULL;
    int threads = fill_threads(t, source);
    TRY(mem_alloc(&f, sizeof *f));
    f->source = source;
    f->staging = source->staging != NULL ? source->staging : &f->own;
    if (source->staging == NULL)
        TRY_GOTO(st, out, weights_staging(&f->own, t, (int64_t)threads * STAGING_NUMEL));
    if (t->device->workers == NULL)
        TRY_GOTO(st, out, workers_open(&own, threads));
    if (threads > 1)
        f->workers = own != NULL ? own : t->device->workers;
    for (int u = 0; u < t->setup.model.unit_count; u++)
        TRY_GOTO(st, out, fill_unit(t, f, u));
    st = stream_sync(&t->device->streams[STREAM_COMPUTE]);
out:
    workers_close(&own);
    staging_release(&f->own);
    mem_free(&f);
    return st;
}

static enum status random_range(void *context, int unit, float *out, int64_t first, int64_t count)
{
    const struct trainer *t = context;
    model_init_range(&t->setup.model, unit, out, first, count, (uint64_t)t->config->train.seed);
    return ST_OK;
}

enum status weights_init(struct trainer *t)
{
    return weights_fill(t, &(struct weights_source){random_range, t, true, NULL});
}

/* ---- from a model folder --------------------------------------------------------------------- */

struct fates {
    struct text_list names[WEIGHTS_FATES];
};

static void note_fate(void *context, enum weights_fate fate, const char *name)
{
    struct fates *f = context;
    text_list_add(&f->names[fate], name);
}

static void log_fates(const struct fates *f, const char *path)
{
    const struct text_list *random = &f->names[WEIGHTS_RANDOM], *unused = &f->names[WEIGHTS_UNUSED];
    if (random->count > 0)
        log_warn("weights", "%s has no %s: random initial values, train them", path, random->text);
    if (unused->count > 0)
        log_info("weights", "%s: %d tensors are not used: %s", path, unused->count, unused->text);
}

static enum status load_range(void *context, int unit, float *out, int64_t first, int64_t count)
{
    return weights_folder_fill(context, unit, out, first, count);
}

static enum status load(struct trainer *t, const char *dir, struct fates *fates)
{
    enum status st;
    struct weights_folder f = {.seed = (uint64_t)t->config->train.seed};
    TRY_GOTO(st, out, weights_folder_open(&f, &t->setup.model, t->config, dir, note_fate, fates));
    if (t->comm->rank == 0)
        log_fates(fates, f.files.path);
    TRY_GOTO(st, out, weights_fill(t, &(struct weights_source){load_range, &f, true, NULL}));
    if (t->comm->rank == 0)
        log_info("weights", "loaded %s", f.files.path);
out:
    weights_folder_close(&f);
    return st;
}

enum status weights_load(struct trainer *t, const char *dir)
{
    struct fates *fates = NULL;
    enum status st = mem_alloc(&fates, sizeof *fates);
    if (st == ST_OK)
        st = load(t, dir, fates);
    mem_free(&fates);
    return comm_agree(t->comm, st);
}
