#include "engine/train/checkpoint_shards.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/file.h"
#include "engine/train/setup.h"
#include "engine/train/weights.h"

enum { STAGING_NUMEL = CHECKPOINT_CHUNK_BYTES / 4 };

struct shard_writer {
    const struct shard_save *save;
    struct layout_param *params; /* owned, as the others */
    struct layout layout;
    const struct checkpoint_tensor **entry; /* model_tensor -> its line of the table */
    const char **states;                    /* every name of one, once */
    int state_count;
    float *staging;
    struct checkpoint_file *files; /* one a rank */
    char temp[CHECKPOINT_PATH_BYTES];

    struct checkpoint_writer file; /* under way, with the state and the range */
    const char *state;
    int unit;
    int64_t first; /* element of the unit */
};

/* ---- one rank's file ------------------------------------------------------------------------- */

/* In pieces of a chunk, which is where the writer of a run cuts it too. */
static enum status write_part(void *context, struct weights_part part)
{
    struct shard_writer *w = context;
    const struct shard_save *s = w->save;
    const struct checkpoint_tensor *t = w->entry[part.tensor];
    if (!checkpoint_has_state(t, w->state))
        return ST_OK;
    for (int64_t done = 0; done < part.count; done += STAGING_NUMEL) {
        int64_t n = part.count - done < STAGING_NUMEL ? part.count - done : STAGING_NUMEL;
        TRY(s->fill(s->context, w->state, w->unit, w->staging, w->first + part.range_first + done,
                    n));
        TRY(checkpoint_write_range(&w->file, w->state, t->name, part.tensor_first + done,
                                   w->staging, n));
    }
    return ST_OK;
}

static enum status write_units(struct shard_writer *w, int rank)
{
    const struct model *m = w->save->model;
    for (w->unit = 0; w->unit < m->unit_count; w->unit++) {
        int64_t numel = w->layout.units[w->unit].shard_numel;
        w->first = rank * numel;
        for (int k = 0; k < w->state_count; k++) {
            w->state = w->states[k];
            TRY(weights_each_part(m, w->unit, w->first, numel, write_part, w));
        }
    }
    return ST_OK;
}

static enum status write_file(struct shard_writer *w, int rank)
{
    enum status st;
    TRY_GOTO(st, out, checkpoint_writer_open(&w->file, w->temp, rank, NULL));
    TRY_GOTO(st, out, write_units(w, rank));
    TRY_GOTO(st, out, checkpoint_writer_close(&w->file, &w->files[rank]));
out:
    checkpoint_writer_abandon(&w->file);
    return st;
}

/* ---- the whole ------------------------------------------------------------------------------- */

static enum status list_states(struct shard_writer *w)
{
    const struct shard_save *s = w->save;
    TRY(mem_alloc(&w->states, sizeof *w->states * CHECKPOINT_MAX_STATES * (size_t)s->tensor_count));
    for (int i = 0; i < s->tensor_count; i++)
        for (int k = 0; k < s->tensors[i].state_count; k++) {
            int at = 0;
            while (at < w->state_count && strcmp(w->states[at], s->tensors[i].states[k]) != 0)
                at++;
            if (at == w->state_count)
                w->states[w->state_count++] = s->tensors[i].states[k];
        }
    return ST_OK;
}

static enum status prepare(struct shard_writer *w)
{
    const struct shard_save *s = w->save;
    const struct model *m = s->model;
    TRY(setup_layout(&w->layout, &w->params, m, s->world_size));
    TRY(mem_alloc(&w->entry, sizeof *w->entry * (size_t)m->tensor_count));
    for (int i = 0; i < s->tensor_count; i++) {
        int tensor = model_find_tensor(m, s->tensors[i].name);
        ASSERT(tensor >= 0);
        w->entry[tensor] = &s->tensors[i];
    }
    TRY(list_states(w));
    TRY(mem_alloc(&w->staging, sizeof *w->staging * STAGING_NUMEL));
    return mem_alloc(&w->files, sizeof *w->files * (size_t)s->world_size);
}

static enum status refuse_existing(const char *dir, int64_t step)
{
    char name[CHECKPOINT_STEP_NAME_BYTES], path[CHECKPOINT_PATH_BYTES];
    checkpoint_step_name(name, step);
    TRY(path_join(path, sizeof path, dir, name));
    if (access(path, F_OK) == 0)
        return FAIL(INVALID,
                    "%s: is there already and is not overwritten; give another folder, or remove "
                    "it first",
                    path);
    return ST_OK;
}

static enum status write_all(struct shard_writer *w, char *path, const char *dir)
{
    const struct shard_save *s = w->save;
    struct checkpoint_manifest manifest = {s->step,  s->tensors,    s->tensor_count,
                                           w->files, s->world_size, s->training};
    for (int r = 0; r < s->world_size; r++)
        TRY(write_file(w, r));
    return checkpoint_publish(path, dir, w->temp, &manifest);
}

enum status checkpoint_write_shards(char *path, const char *dir, const struct shard_save *save)
{
    enum status st;
    struct shard_writer w = {.save = save};
    TRY_GOTO(st, out, refuse_existing(dir, save->step));
    TRY_GOTO(st, out, prepare(&w));
    TRY_GOTO(st, out, checkpoint_begin(w.temp, dir, save->step));
    st = write_all(&w, path, dir);
    if (st != ST_OK)
        checkpoint_discard(w.temp);
out:
    mem_free(&w.files);
    mem_free(&w.staging);
    mem_free(&w.states);
    mem_free(&w.entry);
    mem_free(&w.params);
    return st;
}
