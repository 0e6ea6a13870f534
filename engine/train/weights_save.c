#include <stdio.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/file.h"
#include "engine/base/log.h"
#include "engine/ops/master.h"
#include "engine/train/background.h"
#include "engine/train/model_config.h"
#include "engine/train/weights.h"
#include "io/safetensors.h"

static const char FILE_NAME[] = "model.safetensors";

enum { STAGING_NUMEL = 1 << 18 };

struct weights_writing {
    struct trainer *t; /* borrowed */
    char dir[1200];
    struct background thread; /* write_shards() */
    struct safetensors_writer writer;
    struct safetensors_tensor *tensors; /* owned */
    float *staging;                     /* owned, pinned */
    uint16_t *room;                     /* owned; for master_join() */
    struct event copied;
    char *names; /* owned; every rank's HIDDEN_NAME_BYTES */
};

enum { HIDDEN_NAME_BYTES = 128 };

static enum status list_tensors(struct weights_writing *s)
{
    const struct model *m = &s->t->setup.model;
    TRY(mem_alloc(&s->tensors, sizeof *s->tensors * (size_t)m->tensor_count));
    for (int i = 0; i < m->tensor_count; i++)
        s->tensors[i] =
            (struct safetensors_tensor){.name = m->tensors[i].name,
                                        .dims = m->tensors[i].dims,
                                        .shape = {m->tensors[i].shape[0], m->tensors[i].shape[1]}};
    TRY(mem_alloc(&s->names, HIDDEN_NAME_BYTES * (size_t)s->t->comm->world_size));
    TRY(mem_alloc(&s->room, sizeof *s->room * STAGING_NUMEL));
    TRY(event_open(s->t->device, &s->copied));
    return device_alloc_host(s->t->device, (void **)&s->staging,
                             sizeof *s->staging * STAGING_NUMEL);
}

static enum status create_file(struct weights_writing *s)
{
    TRY(list_tensors(s));
    if (s->t->comm->rank != 0)
        return ST_OK;
    TRY(file_make_dirs(s->dir));
    return safetensors_create(&s->writer, s->dir, FILE_NAME, s->tensors,
                              s->t->setup.model.tensor_count);
}

/* Rank 0 says what it called the hidden file; the others open it. */
static enum status join_file(struct weights_writing *s)
{
    struct comm *comm = s->t->comm;
    char mine[HIDDEN_NAME_BYTES] = "";
    if (comm->rank == 0)
        snprintf(mine, sizeof mine, "%s", s->writer.temporary);
    TRY(comm_exchange(comm, s->names, mine, sizeof mine));
    if (comm->rank == 0)
        return comm_agree(comm, ST_OK);
    return comm_agree(comm, safetensors_join(&s->writer, s->dir, FILE_NAME, s->names, s->tensors,
                                             s->t->setup.model.tensor_count));
}

static enum status write_part(void *context, struct weights_part part)
{
    struct weights_writing *s = context;
    return safetensors_write_range(&s->writer, part.tensor, part.tensor_first, part.count,
                                   s->staging + part.range_first);
}

/* Not event_wait(), which looks after the communicator meanwhile: that is for the rank's thread. */
static enum status wait_for_copy(struct weights_writing *s)
{
    bool copied = false;
    while (!copied) {
        TRY(event_query(&s->copied, &copied));
        if (!copied)
            clock_pause_us(20);
    }
    return ST_OK;
}

/* This rank's shard of every unit, also where others hold the same. In a thread of its own. */
static enum status write_shards(void *context)
{
    struct weights_writing *s = context;
    struct trainer *t = s->t;
    struct stream *stream = &t->device->streams[STREAM_COPY];
#ifdef TESSERA_CUDA
    if (t->device->asynchronous)
        TRY(device_cuda_enter(t->device));
#endif
    for (int u = 0; u < t->setup.model.unit_count; u++) {
        struct shard_view view = executor_shard(&t->executor, u);
        int64_t own = t->comm->rank * view.numel;
        for (int64_t done = 0; done < view.numel; done += STAGING_NUMEL) {
            int64_t n = view.numel - done < STAGING_NUMEL ? view.numel - done : STAGING_NUMEL;
            TRY(executor_copy_master(stream, s->staging, &view, done, n));
            TRY(event_record(&s->copied, stream));
            TRY(wait_for_copy(s));
            if (view.low != NULL)
                master_join(s->staging, s->room, n);
            TRY(weights_each_part(&t->setup.model, u, own + done, n, write_part, s));
        }
    }
    return safetensors_sync(&s->writer);
}

static enum status publish(struct weights_writing *s)
{
    if (s->t->comm->rank != 0)
        return ST_OK;
    TRY(model_config_write(s->t->config, &s->t->data->vocab, "F32", s->dir));
    TRY(safetensors_publish(&s->writer));
    log_info("weights", "saved %s", s->writer.path);
    return ST_OK;
}

enum status weights_save_begin(struct weights_writing **out, struct trainer *t, const char *dir)
{
    enum status st = ST_OK;
    struct weights_writing *s = NULL;
    *out = NULL;
    st = mem_alloc(&s, sizeof *s);
    if (st == ST_OK) {
        s->t = t;
        st = path_join(s->dir, sizeof s->dir, "", dir);
    }
    if (st == ST_OK)
        st = create_file(s);
    TRY_GOTO(st, out, comm_agree(t->comm, st));
    TRY_GOTO(st, out, join_file(s));
    /* Behind the last update; the thread's stream has no other order. */
    TRY_GOTO(st, out, comm_agree(t->comm, stream_sync(&t->device->streams[STREAM_COMPUTE])));
    background_start(&s->thread, t->comm->rank, write_shards, s);
    *out = s;
    s = NULL;
out:
    weights_save_drop(&s);
    return st;
}

enum status weights_save_end(struct weights_writing **writing)
{
    enum status st = ST_OK;
    struct weights_writing *s = *writing;
    background_join(&s->thread);
    if (s->thread.st != ST_OK)
        status_set_message(s->thread.message);
    TRY_GOTO(st, out, comm_agree(s->t->comm, s->thread.st));
    TRY_GOTO(st, out, comm_agree(s->t->comm, publish(s)));
out:
    weights_save_drop(writing);
    return st;
}

void weights_save_drop(struct weights_writing **writing)
{
    struct weights_writing *s = *writing;
    if (s == NULL)
        return;
    background_join(&s->thread);
    safetensors_writer_close(&s->writer);
    event_close(&s->copied);
    mem_free(&s->tensors);
    mem_free(&s->names);
    mem_free(&s->room);
    device_free_host(s->t->device, (void **)&s->staging);
    mem_free(writing);
}

enum status weights_save(struct trainer *t, const char *dir)
{
    struct weights_writing *writing = NULL;
    TRY(weights_save_begin(&writing, t, dir));
    return weights_save_end(&writing);
}
