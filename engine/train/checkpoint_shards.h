/*
 * engine/train/checkpoint_shards.h - a checkpoint for N ranks, written by one process without a
 * run.
 *
 * The files are those that N ranks would write: file r has rank r's shard of every unit, in the
 * same ranges and order, so that for equal values they are equal byte for byte. Memory is two
 * chunks of the writer, one for the piece at hand, and what @fill needs, however large the model
 * is.
 */
#ifndef ENGINE_TRAIN_CHECKPOINT_SHARDS_H
#define ENGINE_TRAIN_CHECKPOINT_SHARDS_H

#include "engine/train/checkpoint_model.h"

C_BEGIN

struct shard_save {
    const struct model *model; /* borrowed, as tensors and training */
    int world_size;            /* >= 1 */
    int64_t step;
    const struct json_t *training;
    const struct checkpoint_tensor *tensors; /* the table; exactly those of the model */
    int tensor_count;
    /* Elements [first, first + count) of a state of a unit's flat parameter. */
    enum status (*fill)(void *context, const char *state, int unit, float *out, int64_t first,
                        int64_t count);
    void *context;
};

/**
 * checkpoint_write_shards() - write and publish "step-N" in @dir, which is made if it is not there.
 * @path: CHECKPOINT_PATH_BYTES; the new checkpoint.
 *
 * Return: ST_OK; ST_INVALID (that step is there already: nothing is overwritten); ST_IO; ST_MEMORY;
 * errors of @fill. After a failure no part is left.
 */
MUST_CHECK enum status checkpoint_write_shards(char *path, const char *dir,
                                               const struct shard_save *save);

C_END

#endif
