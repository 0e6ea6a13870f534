#include <stdio.h>
#include <string.h>

#include "engine/base/file.h"
#include "engine/base/log.h"
#include "engine/train/model_config.h"
#include "engine/train/weights.h"
#include "io/safetensors.h"

static const char FILE_NAME[] = "model.safetensors";

enum { STAGING_NUMEL = 1 << 18 };

struct saver {
    struct trainer *t;
    struct safetensors_writer writer;
    struct safetensors_tensor *tensors; /* owned */
    float *staging;                     /* owned, pinned */
    char *names;                        /* owned; every rank's HIDDEN_NAME_BYTES */
};

enum { HIDDEN_NAME_BYTES = 128 };

static enum status list_tensors(struct saver *s)
{
    const struct model *m = &s->t->setup.model;
    TRY(mem_alloc(&s->tensors, sizeof *s->tensors * (size_t)m->tensor_count));
    for (int i = 0; i < m->tensor_count; i++)
        s->tensors[i] =
            (struct safetensors_tensor){.name = m->tensors[i].name,
                                        .dims = m->tensors[i].dims,
                                        .shape = {m->tensors[i].shape[0], m->tensors[i].shape[1]}};
    TRY(mem_alloc(&s->names, HIDDEN_NAME_BYTES * (size_t)s->t->comm->world_size));
    return device_alloc_host(s->t->device, (void **)&s->staging,
                             sizeof *s->staging * STAGING_NUMEL);
}

static enum status begin_save(struct saver *s, const char *dir)
{
    TRY(list_tensors(s));
    if (s->t->comm->rank != 0)
        return ST_OK;
    TRY(file_make_dirs(dir));
    return safetensors_create(&s->writer, dir, FILE_NAME, s->tensors,
                              s->t->setup.model.tensor_count);
}

/* Rank 0 says what it called the hidden file; the others open it. */
static enum status join_save(struct saver *s, const char *dir)
{
    struct comm *comm = s->t->comm;
    char mine[HIDDEN_NAME_BYTES] = "";
    if (comm->rank == 0)
        snprintf(mine, sizeof mine, "%s", s->writer.temporary);
    TRY(comm_exchange(comm, s->names, mine, sizeof mine));
    if (comm->rank == 0)
        return comm_agree(comm, ST_OK);
    return comm_agree(comm, safetensors_join(&s->writer, dir, FILE_NAME, s->names, s->tensors,
                                             s->t->setup.model.tensor_count));
}

static enum status write_part(void *context, struct weights_part part)
{
    struct saver *s = context;
    return safetensors_write_range(&s->writer, part.tensor, part.tensor_first, part.count,
                                   s->staging + part.range_first);
}

/* This rank's shard of every unit, also where others hold the same. */
static enum status write_shards(struct saver *s)
{
    struct trainer *t = s->t;
    struct stream *stream = &t->device->streams[STREAM_COMPUTE];
    for (int u = 0; u < t->setup.model.unit_count; u++) {
        struct shard_view view = executor_shard(&t->executor, u);
        int64_t own = t->comm->rank * view.numel;
        for (int64_t done = 0; done < view.numel; done += STAGING_NUMEL) {
            int64_t n = view.numel - done < STAGING_NUMEL ? view.numel - done : STAGING_NUMEL;
            TRY(device_copy(stream, s->staging, view.master + done,
                            sizeof *s->staging * (size_t)n));
            TRY(stream_sync(stream));
            TRY(weights_each_part(&t->setup.model, u, own + done, n, write_part, s));
        }
    }
    return safetensors_sync(&s->writer);
}

static enum status end_save(struct saver *s, const char *dir)
{
    if (s->t->comm->rank != 0)
        return ST_OK;
    TRY(model_config_write(s->t->config, &s->t->data->vocab, "F32", dir));
    TRY(safetensors_publish(&s->writer));
    log_info("weights", "saved %s", s->writer.path);
    return ST_OK;
}

enum status weights_save(struct trainer *t, const char *dir)
{
    enum status st;
    struct saver s = {.t = t};
    TRY_GOTO(st, out, comm_agree(t->comm, begin_save(&s, dir)));
    TRY_GOTO(st, out, join_save(&s, dir));
    TRY_GOTO(st, out, comm_agree(t->comm, write_shards(&s)));
    TRY_GOTO(st, out, comm_agree(t->comm, end_save(&s, dir)));
out:
    safetensors_writer_close(&s.writer);
    mem_free(&s.tensors);
    mem_free(&s.names);
    device_free_host(t->device, (void **)&s.staging);
    return st;
}
