#include "engine/train/checkpoint.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/file.h"
#include "engine/base/log.h"
#include "engine/train/checkpoint_model.h"
#include "engine/train/checkpoint_ranges.h"
#include "engine/train/checkpoint_state.h"
#include "engine/train/weights.h"

/* ---- one checkpoint -------------------------------------------------------------------------- */

struct loader {
    struct trainer *t;
    struct checkpoint file;
    struct range_reader reader;
    struct staging staging; /* a chunk for each thread that reads */
    bool *frozen;           /* owned; by model_tensor */
};

static enum status open_reader(struct loader *l)
{
    TRY(range_reader_open(&l->reader, &l->t->setup.model, &l->file, l->frozen, l->t->device));
    return weights_staging(&l->staging, l->t, (int64_t)l->reader.threads * l->file.max_chunk_numel);
}

static void close_loader(struct loader *l)
{
    staging_release(&l->staging);
    range_reader_close(&l->reader);
    mem_free(&l->frozen);
    checkpoint_close(&l->file);
}

static enum status read_master(void *context, int unit, float *out, int64_t first, int64_t count)
{
    return range_reader_read(context, "master", unit, out, first, count);
}

static enum status fill_weights(struct loader *l)
{
    return weights_fill(l->t, &(struct weights_source){.fill = read_master,
                                                       .context = &l->reader,
                                                       .staging = &l->staging});
}

static enum status load_moment(struct loader *l, const char *state, int unit, float *whole,
                               float *own)
{
    const struct layout_unit *u = &l->t->setup.layout.units[unit];
    struct stream *s = &l->t->device->streams[STREAM_COMPUTE];
    int64_t first = whole != NULL ? 0 : l->t->comm->rank * u->shard_numel;
    int64_t numel = whole != NULL ? u->padded_numel : u->shard_numel, most = l->staging.numel;
    float *to = whole != NULL ? whole : own, *from = NULL;
    if (most == 0)
        return range_reader_read(&l->reader, state, unit, to, first, numel);
    for (int64_t done = 0; done < numel; done += most) {
        int64_t n = numel - done < most ? numel - done : most;
        TRY(staging_take(&l->staging, &from));
        TRY(range_reader_read(&l->reader, state, unit, from, first + done, n));
        TRY(device_copy(s, to + done, from, sizeof *to * (size_t)n));
        TRY(staging_given(&l->staging, s));
    }
    return ST_OK;
}

static enum status load_tensors(struct loader *l)
{
    TRY(fill_weights(l));
    for (int u = 0; u < l->t->setup.model.unit_count; u++) {
        struct shard_view view = executor_shard(&l->t->executor, u);
        if (view.adam_m == NULL)
            continue;
        TRY(load_moment(l, "adam_m", u, view.adam_m_whole, view.adam_m));
        TRY(load_moment(l, "adam_v", u, view.adam_v_whole, view.adam_v));
    }
    return stream_sync(&l->t->device->streams[STREAM_COMPUTE]);
}

/* The trainer stands where the saved one stood; AGREE goes on from t. */
static enum status take_state(struct trainer *t, const struct training_state *state)
{
    struct stream *s = &t->device->streams[STREAM_COMPUTE];
    char *on_device = executor_shared(&t->executor, SHARED_STATE);
    int64_t *host = &t->slots[0].result->t; /* pinned */
    *host = state->t;
    TRY(device_copy(s, on_device + offsetof(struct step_state, t), host, sizeof *host));
    TRY(stream_sync(s));
    t->resumed = true;
    t->steps_done = t->first_step = state->step;
    t->applied = state->t;
    t->skipped_in_row = (int)state->skipped_in_row;
    t->best_metric = state->best_metric;
    t->evaluations_without_gain = state->evaluations_without_gain;
    t->evaluation_pending = state->evaluation_pending;
    t->best_step = state->best_step;
    t->best_value = state->best_value;
    trainer_watch_gain(t);
    return ST_OK;
}

static enum status load(struct trainer *t, const char *path)
{
    enum status st;
    struct loader l = {.t = t};
    struct training_state state;
    struct gemm_table plan = {0};
    TRY_GOTO(st, out, checkpoint_open(&l.file, path));
    TRY_GOTO(st, out, training_state_read(&state, l.file.training, t, path));
    TRY_GOTO(st, out, training_state_plan(&plan, l.file.training, path));
    if (state.step != l.file.step)
        TRY_GOTO(st, out,
                 FAIL(CORRUPT, "%s: step %" PRId64 ", but its training state is of step %" PRId64,
                      path, l.file.step, state.step));
    TRY_GOTO(st, out, checkpoint_frozen_tensors(&l.frozen, &t->setup.model));
    TRY_GOTO(st, out, checkpoint_check_tensors(&l.file, &t->setup.model, l.frozen));
    TRY_GOTO(st, out, open_reader(&l));
    TRY_GOTO(st, out, load_tensors(&l));
    TRY_GOTO(st, out, take_state(t, &state));
    gemm_table_release(&t->gemm_plan); /* of one that was damaged elsewhere */
    t->gemm_plan = plan;
    memset(&plan, 0, sizeof plan);
out:
    gemm_table_release(&plan);
    close_loader(&l);
    return st;
}

static enum status load_weights(struct trainer *t, const char *path)
{
    enum status st;
    struct loader l = {.t = t};
    TRY_GOTO(st, out, checkpoint_open(&l.file, path));
    TRY_GOTO(st, out, checkpoint_check_sizes(&l.file, t->config));
    TRY_GOTO(st, out, checkpoint_check_tensors(&l.file, &t->setup.model, NULL));
    TRY_GOTO(st, out, checkpoint_frozen_tensors(&l.frozen, &t->setup.model));
    TRY_GOTO(st, out, open_reader(&l));
    TRY_GOTO(st, out, fill_weights(&l));
    if (t->comm->rank == 0)
        log_info("checkpoint", "weights of %s, step %" PRId64, path, l.file.step);
out:
    close_loader(&l);
    return st;
}

enum status checkpoint_load_weights(struct trainer *t, const char *path)
{
    return comm_agree(t->comm, load_weights(t, path));
}

static enum status load_agreed(struct trainer *t, const char *path)
{
    double begun = clock_s();
    TRY(comm_agree(t->comm, load(t, path)));
    if (t->comm->rank == 0)
        log_info("checkpoint", "going on from %s: step %" PRId64 ", read in %.1f s", path,
                 t->steps_done, clock_s() - begun);
    return ST_OK;
}

/* ---- the latest ------------------------------------------------------------------------------ */

/* Damage shows only when the values are read; what is of another run is not passed over. */
static bool is_damage(enum status st)
{
    return st == ST_CORRUPT || st == ST_IO;
}

static enum status none_left(const struct trainer *t, int damaged, const char *dir)
{
    if (damaged > 0)
        return FAIL(CORRUPT,
                    "%s: all %d checkpoints are damaged; `tessera checkpoint verify` says how. To "
                    "start anew, give another output.dir",
                    dir, damaged);
    if (t->config->checkpoint.resume_or_start)
        return ST_OK;
    return FAIL(INVALID,
                "%s: there is no checkpoint to go on from (--resume-or-start starts anew then)",
                dir);
}

/* Rank 0 looks for candidates, and the others get one path after the other. */
static enum status resume_latest(struct trainer *t, bool *resumed)
{
    char dir[CHECKPOINT_PATH_BYTES];
    struct checkpoint_found found = {.step = INT64_MAX};
    int damaged = 0;
    TRY(checkpoint_folder(dir, sizeof dir, t->config));
    for (;;) {
        enum status st = ST_OK;
        if (t->comm->rank == 0)
            st = checkpoint_find_latest(&found, dir, found.step);
        TRY(comm_agree(t->comm, st));
        TRY(comm_share(t->comm, found.path, sizeof found.path));
        damaged += found.damaged;
        if (found.path[0] == '\0')
            return comm_agree(t->comm, t->comm->rank == 0 ? none_left(t, damaged, dir) : ST_OK);
        st = load_agreed(t, found.path);
        *resumed = st == ST_OK;
        if (!is_damage(st))
            return st;
        damaged++;
        if (t->comm->rank == 0)
            log_warn("checkpoint", "passing over %s: %s", found.path, status_message());
    }
}

enum status checkpoint_resume(struct trainer *t, bool *resumed)
{
    const char *resume = t->config->checkpoint.resume;
    *resumed = false;
    if (t->config->checkpoint.resume_or_start || strcmp(resume, "latest") == 0)
        return resume_latest(t, resumed);
    if (resume[0] == '\0')
        return ST_OK;
    TRY(load_agreed(t, resume));
    *resumed = true;
    return ST_OK;
}
