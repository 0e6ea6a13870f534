#include <jansson.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/file.h"
#include "engine/base/log.h"
#include "engine/train/checkpoint_convert.h"
#include "engine/train/checkpoint_shards.h"
#include "engine/train/checkpoint_state.h"
#include "engine/train/model_config.h"

struct import {
    struct run_config config;
    struct model model;
    struct weights_folder folder;
    struct vocab vocab;
    bool *frozen; /* owned, as the others; none is */
    struct checkpoint_tensor *tensors;
    struct json_t *training;
};

/* Moments that have seen no step are zeros. */
static enum status read_range(void *context, const char *state, int unit, float *out, int64_t first,
                              int64_t count)
{
    const struct import *im = context;
    if (strcmp(state, checkpoint_state_names[CHECKPOINT_MASTER]) == 0)
        return weights_folder_fill(&im->folder, unit, out, first, count);
    memset(out, 0, sizeof *out * (size_t)count);
    return ST_OK;
}

static enum status read_vocab(struct import *im, const char *dir)
{
    char *path = im->config.data.vocab;
    TRY(model_vocab_path(path, sizeof im->config.data.vocab, dir));
    if (access(path, F_OK) != 0) {
        log_warn("checkpoint",
                 "%s: is not there: no run is checked against it, and an export has to "
                 "be given one",
                 path);
        path[0] = '\0';
        return ST_OK;
    }
    return vocab_load(&im->vocab, path);
}

enum status checkpoint_import(char *path, const char *from, const char *dir,
                              const struct checkpoint_import *options)
{
    enum status st;
    struct import im = {.folder.seed = options->seed};
    config_defaults(&im.config);
    TRY_GOTO(st, out, model_config_read(&im.config, from));
    TRY_GOTO(st, out, model_open(&im.model, &im.config, DTYPE_F32));
    TRY_GOTO(st, out,
             weights_folder_open(&im.folder, &im.model, &im.config, from, options->note,
                                 options->context));
    TRY_GOTO(st, out, read_vocab(&im, from));
    TRY_GOTO(
        st, out,
        training_state_imported(&im.training, &im.config, im.vocab.size > 0 ? &im.vocab : NULL));
    TRY_GOTO(st, out, checkpoint_frozen_tensors(&im.frozen, &im.model));
    TRY_GOTO(st, out, checkpoint_table(&im.tensors, &im.model, im.frozen));
    struct shard_save save = {.model = &im.model,
                              .world_size = options->world_size,
                              .step = 0,
                              .training = im.training,
                              .tensors = im.tensors,
                              .tensor_count = im.model.tensor_count,
                              .fill = read_range,
                              .context = &im};
    TRY_GOTO(st, out, checkpoint_write_shards(path, dir, &save));
out:
    json_decref(im.training);
    mem_free(&im.tensors);
    mem_free(&im.frozen);
    vocab_release(&im.vocab);
    weights_folder_close(&im.folder);
    model_release(&im.model);
    return st;
}
