#include <string.h>

#include "engine/train/checkpoint_convert.h"
#include "engine/train/checkpoint_shards.h"
#include "engine/train/weights.h"

enum { PIECE_NUMEL = CHECKPOINT_CHUNK_BYTES / 4 };

struct reshard {
    struct checkpoint from;
    struct checkpoint_reader reader;
    struct run_config config;
    struct model model;
    const char *state; /* the range being read */
    float *out;
};

/* ---- writing --------------------------------------------------------------------------------- */

static enum status read_part(void *context, struct weights_part part)
{
    struct reshard *r = context;
    const char *name = r->model.tensors[part.tensor].name;
    if (!checkpoint_has_state(checkpoint_find(&r->from, name), r->state))
        return ST_OK;
    return checkpoint_read_range(&r->reader, r->state, name, part.tensor_first, part.count,
                                 r->out + part.range_first);
}

static enum status read_range(void *context, const char *state, int unit, float *out, int64_t first,
                              int64_t count)
{
    struct reshard *r = context;
    r->state = state;
    r->out = out;
    return weights_each_part(&r->model, unit, first, count, read_part, r);
}

/* ---- reading back ---------------------------------------------------------------------------- */

struct pair {
    struct checkpoint_reader *old, *new;
    float *a, *b;
};

static enum status compare_state(const struct pair *p, const struct checkpoint_tensor *t,
                                 const char *state)
{
    for (int64_t at = 0; at < t->numel; at += PIECE_NUMEL) {
        int64_t n = t->numel - at < PIECE_NUMEL ? t->numel - at : PIECE_NUMEL;
        TRY(checkpoint_read_range(p->old, state, t->name, at, n, p->a));
        TRY(checkpoint_read_range(p->new, state, t->name, at, n, p->b));
        if (memcmp(p->a, p->b, sizeof *p->a * (size_t)n) != 0)
            return FAIL(CORRUPT, "%s: tensor %s, %s: is not what was read from %s",
                        p->new->checkpoint->path, t->name, state, p->old->checkpoint->path);
    }
    return ST_OK;
}

static enum status compare_all(struct reshard *r, const char *path)
{
    enum status st;
    struct checkpoint new = {0};
    struct checkpoint_reader reader = {0};
    struct pair p = {&r->reader, &reader, NULL, NULL};
    TRY_GOTO(st, out, checkpoint_open(&new, path));
    TRY_GOTO(st, out, checkpoint_reader_open(&reader, &new));
    TRY_GOTO(st, out, mem_alloc(&p.a, sizeof *p.a * PIECE_NUMEL));
    TRY_GOTO(st, out, mem_alloc(&p.b, sizeof *p.b * PIECE_NUMEL));
    for (int i = 0; i < r->from.tensor_count; i++)
        for (int k = 0; k < r->from.tensors[i].state_count; k++)
            TRY_GOTO(st, out, compare_state(&p, &r->from.tensors[i], r->from.tensors[i].states[k]));
out:
    mem_free(&p.b);
    mem_free(&p.a);
    checkpoint_reader_close(&reader);
    checkpoint_close(&new);
    return st;
}

/* ---------------------------------------------------------------------------------------------- */

static enum status reshard(struct reshard *r, char *path, const char *dir, int world_size)
{
    struct shard_save save = {.model = &r->model,
                              .world_size = world_size,
                              .step = r->from.step,
                              .training = r->from.training,
                              .tensors = r->from.tensors,
                              .tensor_count = r->from.tensor_count,
                              .fill = read_range,
                              .context = r};
    TRY(checkpoint_write_shards(path, dir, &save));
    enum status st = compare_all(r, path);
    if (st != ST_OK)
        checkpoint_discard(path);
    return st;
}

enum status checkpoint_reshard(char *path, const char *from, const char *dir, int world_size)
{
    enum status st;
    struct reshard r = {.state = NULL};
    TRY_GOTO(st, out, checkpoint_open(&r.from, from));
    TRY_GOTO(st, out, checkpoint_config(&r.config, &r.from));
    TRY_GOTO(st, out, model_open(&r.model, &r.config, DTYPE_F32));
    TRY_GOTO(st, out, checkpoint_check_tensors(&r.from, &r.model, NULL));
    TRY_GOTO(st, out, checkpoint_reader_open(&r.reader, &r.from));
    TRY_GOTO(st, out, reshard(&r, path, dir, world_size));
out:
    checkpoint_reader_close(&r.reader);
    model_release(&r.model);
    checkpoint_close(&r.from);
    return st;
}
