#include "engine/train/checkpoint.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/file.h"
#include "engine/base/log.h"
#include "engine/train/background.h"
#include "engine/train/checkpoint_model.h"
#include "engine/train/checkpoint_state.h"
#include "engine/train/snapshot.h"
#include "engine/train/weights.h"

enum { MASTER = CHECKPOINT_MASTER };

_Static_assert((int)SNAPSHOT_STATES == (int)CHECKPOINT_STATES, "all that is copied is written");

/* What every rank tells about its part of a save. */
struct part_result {
    int64_t st; /* enum status */
    struct checkpoint_file file;
    char message[BACKGROUND_MESSAGE_BYTES];
};

struct checkpointer {
    const struct run_config *config; /* borrowed, as model */
    const struct model *model;
    int rank, world_size;
    char dir[CHECKPOINT_PATH_BYTES];

    struct snapshot snapshot; /* of this rank's shards */
    bool *frozen;             /* owned; by model_tensor */
    int threads;              /* that pack beside the one that writes */

    struct checkpoint_tensor *tensors; /* owned; the table of the manifest */
    struct part_result *results;       /* owned; one a rank */
    char *temps;                       /* owned; one path a rank, rank 0's counts */

    int64_t number;   /* saves begun */
    bool writing;     /* the last of them is not collected yet */
    bool copying;     /* and its thread waits for the snapshot */
    int64_t step;     /* its step; -1: none was begun */
    int64_t saved;    /* newest step all of whose parts were written; -1: none, or it is lost */
    int64_t obsolete; /* up to this step the folder may hold checkpoints of an abandoned branch */
    char temp[CHECKPOINT_PATH_BYTES];
    double begun_s;  /* of the clock */
    double waited_s; /* what training lost until it went on */
    struct background write;
    atomic_bool abandoned; /* the run has failed: the writer ends early */

    /* Rank 0's. */
    struct background publish;
    struct json_t *training;       /* owned; of the save under way */
    struct checkpoint_file *files; /* owned; one a rank */
    bool is_best;                  /* the save under way */
    double value;                  /* of the last evaluation */
    int64_t value_step;
    int64_t best_step; /* published or under way; -1: none */
    double best_value;
    int64_t earlier_step; /* the best before that, if its save fails */
    double earlier_value;
};

/* ---- waiting --------------------------------------------------------------------------------- */

/* Until all ranks are idle. Their files may take longer than a collective may. Then all know too
 * whether rank 0 published what it last tried to. */
static enum status wait_for_all(struct checkpointer *c, struct trainer *t)
{
    enum { LONGEST_MS = 16, BUSY = 1, LOST = 2 };
    int64_t ms = 1;
    for (;;) {
        bool busy = !background_is_idle(&c->write) || !background_is_idle(&c->publish);
        struct part_result mine = {.st = busy ? BUSY : c->publish.st != ST_OK ? LOST : 0};
        TRY(comm_exchange(t->comm, c->results, &mine, sizeof mine.st));
        const int64_t *all = (const int64_t *)(const void *)c->results;
        bool any = false;
        for (int r = 0; r < c->world_size; r++)
            any |= all[r] == BUSY;
        if (!any && all[0] == LOST)
            c->saved = -1;
        if (!any)
            return ST_OK;
        clock_pause_us(1000 * ms);
        ms = ms < LONGEST_MS ? 2 * ms : ms;
    }
}

/* ---- opening --------------------------------------------------------------------------------- */

int checkpoint_packing_threads(const struct trainer *t)
{
    enum { MOST = 8, PART_OF_CARD = 2, PART_OF_CPU = 8 };
    int part = t->device->library != NULL ? PART_OF_CARD : PART_OF_CPU;
    int threads = t->device->host_threads / part;
    if (!t->config->checkpoint.async)
        threads = t->device->host_threads - 1;
    return threads < MOST ? threads : MOST;
}

static enum status make_room(struct checkpointer *c, struct trainer *t)
{
    size_t world = (size_t)c->world_size;
    TRY(snapshot_open(&c->snapshot, t));
    TRY(mem_alloc(&c->results, sizeof *c->results * world));
    TRY(mem_alloc(&c->files, sizeof *c->files * world));
    TRY(mem_alloc(&c->temps, CHECKPOINT_PATH_BYTES * world));
    TRY(checkpoint_frozen_tensors(&c->frozen, c->model));
    return checkpoint_table(&c->tensors, c->model, c->frozen);
}

enum status checkpointer_open(struct checkpointer **out, struct trainer *t)
{
    enum status st;
    *out = NULL;
    if (t->config->checkpoint.every == 0 || t->total_steps == 0)
        return ST_OK;
    st = mem_alloc(out, sizeof **out);
    if (st == ST_OK) {
        struct checkpointer *c = *out;
        *c = (struct checkpointer){.config = t->config,
                                   .model = &t->setup.model,
                                   .rank = t->comm->rank,
                                   .world_size = t->comm->world_size,
                                   .threads = checkpoint_packing_threads(t),
                                   .step = -1,
                                   .saved = t->resumed ? t->first_step : -1,
                                   .obsolete = -1,
                                   .value_step = -1,
                                   .best_step = t->best_step,
                                   .best_value = t->best_value};
        st = checkpoint_folder(c->dir, sizeof c->dir, t->config);
        if (st == ST_OK)
            st = make_room(c, t);
    }
    TRY_GOTO(st, out, comm_agree(t->comm, st));
    TRY_GOTO(st, out, checkpoint_claim_folder((*out)->dir, t, &(*out)->obsolete));
    if ((*out)->rank == 0)
        log_info("checkpoint", "every %" PRId64 " steps to %s; %.1f MiB of host memory a rank%s",
                 t->config->checkpoint.every, (*out)->dir,
                 (double)(*out)->snapshot.bytes / 1048576.0,
                 (*out)->snapshot.card != NULL ? ", as much of its card" : "");
out:
    if (st != ST_OK)
        checkpointer_close(out);
    return st;
}

void checkpointer_close(struct checkpointer **checkpointer)
{
    struct checkpointer *c = *checkpointer;
    if (c == NULL)
        return;
    atomic_store(&c->abandoned, true);
    background_join(&c->write);
    background_join(&c->publish);
    if (c->writing && c->rank == 0)
        checkpoint_discard(c->temp);
    json_decref(c->training);
    snapshot_release(&c->snapshot);
    mem_free(&c->frozen);
    mem_free(&c->tensors);
    mem_free(&c->results);
    mem_free(&c->files);
    mem_free(&c->temps);
    mem_free(checkpointer);
}

/* ---- writing this rank's part, in its thread ------------------------------------------------- */

struct part_writer {
    struct checkpointer *c;
    struct checkpoint_writer writer;
    int state;
    const float *from; /* the shard's snapshot of that state */
};

static enum status write_part(void *context, struct weights_part part)
{
    struct part_writer *w = context;
    if (w->state != MASTER && w->c->frozen[part.tensor])
        return ST_OK;
    if (atomic_load(&w->c->abandoned))
        return FAIL(INTERRUPTED, "the run has ended");
    return checkpoint_write_range(&w->writer, checkpoint_state_names[w->state],
                                  w->c->model->tensors[part.tensor].name, part.tensor_first,
                                  w->from + part.range_first, part.count);
}

static enum status write_units(struct part_writer *w)
{
    struct checkpointer *c = w->c;
    float *at = c->snapshot.values;
    for (int u = 0; u < c->model->unit_count; u++) {
        int64_t numel = c->snapshot.shard_numel[u];
        snapshot_join(&c->snapshot, u, at);
        for (w->state = MASTER; w->state < snapshot_state_count(&c->snapshot, u); w->state++) {
            w->from = at;
            TRY(weights_each_part(c->model, u, c->rank * numel, numel, write_part, w));
            at += numel;
        }
    }
    return ST_OK;
}

static enum status write_file(void *context)
{
    enum status st;
    struct checkpointer *c = context;
    struct part_writer w = {.c = c};
    const struct checkpoint_options options = {.level = CHECKPOINT_LEVEL, .threads = c->threads};
    TRY_GOTO(st, out, checkpoint_writer_open(&w.writer, c->temp, c->rank, &options));
    TRY_GOTO(st, out, write_units(&w));
    TRY_GOTO(st, out, checkpoint_writer_close(&w.writer, &c->files[c->rank]));
out:
    checkpoint_writer_abandon(&w.writer);
    return st;
}

/* ---- publishing, in a thread of rank 0 ------------------------------------------------------- */

static enum status remove_old(const struct checkpointer *c)
{
    char best[CHECKPOINT_STEP_NAME_BYTES];
    /* Until this run has passed them, the newest ones are not its own. */
    if (c->config->checkpoint.keep == 0 || c->step < c->obsolete)
        return ST_OK;
    checkpoint_step_name(best, c->best_step);
    return checkpoint_remove_old(c->dir, (int)c->config->checkpoint.keep,
                                 c->best_step >= 0 ? best : NULL);
}

static enum status publish(struct checkpointer *c)
{
    char path[CHECKPOINT_PATH_BYTES];
    int64_t bytes = 0, plain = 0;
    struct checkpoint_manifest manifest = {.step = c->step,
                                           .tensors = c->tensors,
                                           .tensor_count = c->model->tensor_count,
                                           .files = c->files,
                                           .file_count = c->world_size,
                                           .training = c->training};
    TRY(checkpoint_publish(path, c->dir, c->temp, &manifest));
    for (int r = 0; r < c->world_size; r++) {
        bytes += c->files[r].bytes;
        plain += c->files[r].plain_bytes;
    }
    log_info("checkpoint",
             "saved %s%s: %.1f MiB, %.2f times smaller, %.1f s after the step, of which training "
             "waited %.3f s",
             path, c->is_best ? " (best)" : "", (double)bytes / 1048576.0,
             (double)plain / (double)(bytes > 0 ? bytes : 1), clock_s() - c->begun_s, c->waited_s);
    return ST_OK;
}

static enum status publish_and_clean(void *context)
{
    struct checkpointer *c = context;
    enum status st = publish(c);
    if (st != ST_OK) {
        log_warn("checkpoint", "step %" PRId64 " is not saved: %s", c->step, status_message());
        checkpoint_discard(c->temp);
    } else if (remove_old(c) != ST_OK) {
        log_warn("checkpoint", "%s", status_message());
    }
    return st;
}

/* ---- a save, seen from training -------------------------------------------------------------- */

bool checkpointer_due(const struct checkpointer *c, int64_t done)
{
    return c != NULL && done % c->config->checkpoint.every == 0;
}

/* Once the snapshot is taken. This thread asks for that, as all that is about the device is its. */
static enum status start_writing(struct checkpointer *c, bool wait)
{
    bool taken = true;
    if (!c->copying)
        return ST_OK;
    if (wait)
        TRY(snapshot_wait(&c->snapshot));
    else
        TRY(snapshot_taken(&c->snapshot, &taken));
    if (!taken)
        return ST_OK;
    c->copying = false;
    background_start(&c->write, c->rank, write_file, c);
    return ST_OK;
}

enum status checkpointer_written(struct checkpointer *c, int64_t *saves)
{
    *saves = 0;
    if (c == NULL)
        return ST_OK;
    TRY(start_writing(c, false));
    bool busy = c->writing && (c->copying || !background_is_idle(&c->write));
    *saves = busy ? c->number - 1 : c->number;
    return ST_OK;
}

static void forget_best(struct checkpointer *c)
{
    if (!c->is_best)
        return;
    c->best_step = c->earlier_step;
    c->best_value = c->earlier_value;
    c->is_best = false;
}

/* Rank 0: all parts are there, or one failed. */
static void end_save(struct checkpointer *c)
{
    for (int r = 0; r < c->world_size; r++) {
        c->files[r] = c->results[r].file;
        if (c->results[r].st == ST_OK)
            continue;
        log_warn("checkpoint", "step %" PRId64 " is not saved: rank %d: %s", c->step, r,
                 c->results[r].message);
        checkpoint_discard(c->temp);
        forget_best(c);
        return;
    }
    background_start(&c->publish, c->rank, publish_and_clean, c);
    if (!c->publish.started) {
        log_warn("checkpoint", "step %" PRId64 " is not saved: %s", c->step, c->publish.message);
        checkpoint_discard(c->temp);
    }
}

/* All ranks have written their part, well or badly: exchange the lines of the manifest. */
static enum status collect(struct checkpointer *c, struct trainer *t)
{
    struct part_result mine = {0};
    background_join(&c->write);
    mine.st = c->write.st;
    mine.file = c->files[c->rank];
    snprintf(mine.message, sizeof mine.message, "%s", c->write.message);
    TRY(comm_exchange(t->comm, c->results, &mine, sizeof mine));
    c->writing = false;
    bool all = true;
    for (int r = 0; r < c->world_size; r++)
        all &= c->results[r].st == ST_OK;
    if (all)
        c->saved = c->step;
    if (c->rank == 0)
        end_save(c);
    return ST_OK;
}

enum status checkpointer_watch(struct checkpointer *c, struct trainer *t, int64_t written)
{
    if (c == NULL || !c->writing || written < c->number)
        return ST_OK;
    return collect(c, t);
}

/* Nothing of an earlier save is under way any more, on any rank. */
static enum status settle(struct checkpointer *c, struct trainer *t)
{
    if (c->writing) {
        TRY(start_writing(c, true));
        TRY(wait_for_all(c, t));
        TRY(collect(c, t));
    }
    TRY(wait_for_all(c, t));
    background_join(&c->publish);
    if (c->publish.st != ST_OK)
        forget_best(c);
    json_decref(c->training);
    c->training = NULL;
    return ST_OK;
}

/* Is the last evaluation's value the best of all? */
static bool is_better(const struct checkpointer *c)
{
    return isfinite(c->value) && (c->best_step < 0 || c->value > c->best_value);
}

/* Rank 0 makes the folder; @temp is "" if it cannot. */
static void begin_save(struct checkpointer *c, const struct trainer *t,
                       char temp[CHECKPOINT_PATH_BYTES])
{
    bool is_best = c->value_step == t->steps_done && is_better(c);
    struct training_state state = {.step = t->steps_done,
                                   .t = t->applied,
                                   .skipped_in_row = t->skipped_in_row,
                                   .evaluations_without_gain = t->evaluations_without_gain,
                                   .best_metric = t->best_metric,
                                   .evaluation_pending = t->evaluation_pending,
                                   .best_step = is_best ? t->steps_done : c->best_step,
                                   .best_value = is_best ? c->value : c->best_value};
    enum status st = training_state_write(&c->training, &state, t);
    if (st == ST_OK)
        st = checkpoint_begin(temp, c->dir, t->steps_done);
    if (st == ST_OK) {
        c->is_best = is_best;
        c->earlier_step = c->best_step;
        c->earlier_value = c->best_value;
        c->best_step = state.best_step;
        c->best_value = state.best_value;
        return;
    }
    log_warn("checkpoint", "step %" PRId64 " is not saved: %s", t->steps_done, status_message());
    temp[0] = '\0';
}

enum status checkpointer_save(struct checkpointer *c, struct trainer *t)
{
    if (c == NULL)
        return ST_OK;
    char mine[CHECKPOINT_PATH_BYTES] = "";
    if (c->rank == 0 && c->writing)
        log_info("checkpoint", "step %" PRId64 " waits for the save of step %" PRId64,
                 t->steps_done, c->step);
    double begun_s = clock_s();
    TRY(settle(c, t));
    c->begun_s = begun_s;
    if (c->rank == 0)
        begin_save(c, t, mine);
    TRY(comm_exchange(t->comm, c->temps, mine, sizeof mine));
    if (c->temps[0] == '\0')
        return ST_OK;
    memcpy(c->temp, c->temps, sizeof c->temp);
    c->step = t->steps_done;
    c->number++;
    c->writing = true;
    TRY(snapshot_begin(&c->snapshot, t));
    c->copying = true;
    TRY(start_writing(c, false));
    c->waited_s = clock_s() - c->begun_s;
    return c->config->checkpoint.async ? ST_OK : settle(c, t);
}

enum status checkpointer_finish(struct checkpointer *c, struct trainer *t)
{
    if (c == NULL)
        return ST_OK;
    TRY(settle(c, t));
    if (c->saved == t->steps_done || t->steps_done == t->first_step)
        return ST_OK;
    TRY(checkpointer_save(c, t));
    return settle(c, t);
}

/* ---- the best -------------------------------------------------------------------------------- */

enum status checkpointer_evaluated(struct checkpointer *c, struct trainer *t,
                                   const struct evaluation *e, bool *better)
{
    *better = false;
    if (c == NULL || c->config->checkpoint.keep_best == STOP_NONE)
        return ST_OK;
    if (c->rank == 0) {
        c->value = metric_value(c->config->checkpoint.keep_best, e);
        c->value_step = t->steps_done;
        *better = is_better(c);
    }
    return comm_share(t->comm, better, sizeof *better);
}

static enum status find_best(const struct checkpointer *c, char *path)
{
    char name[CHECKPOINT_STEP_NAME_BYTES];
    checkpoint_step_name(name, c->best_step);
    TRY(path_join(path, CHECKPOINT_PATH_BYTES, c->dir, name));
    if (checkpoint_is_one(path))
        return ST_OK;
    log_warn("checkpoint", "%s, the best one, is not there: the last weights count", path);
    path[0] = '\0';
    return ST_OK;
}

enum status checkpointer_best(const struct checkpointer *c, const struct trainer *t, char *path)
{
    enum status st = ST_OK;
    path[0] = '\0';
    if (c == NULL)
        return ST_OK;
    if (c->rank == 0 && c->best_step >= 0 && c->best_step != t->steps_done)
        st = find_best(c, path);
    TRY(comm_agree(t->comm, st));
    return comm_share(t->comm, path, CHECKPOINT_PATH_BYTES);
}
