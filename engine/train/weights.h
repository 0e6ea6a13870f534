/*
 * engine/train/weights.h - where the weights of a run come from, and where they go.
 *
 * Weights are filled in, loaded and saved by ranges of flat parameters: each rank touches only what
 * it owns (and whole units where parameters are replicated), through a staging buffer of a fixed
 * size. No rank ever holds the whole model at stage 3, and nothing is gathered.
 *
 *     flat parameter of a unit   [ query | key | value | ... ]   rank 1 owns [....)
 *     model.safetensors          query.weight, key.weight, ...   rank 1 reads or writes its part
 *                                                                of each
 *
 * All functions but weights_save() leave master weights and parameters equal up to rounding, and m
 * and v as they are.
 */
#ifndef ENGINE_TRAIN_WEIGHTS_H
#define ENGINE_TRAIN_WEIGHTS_H

#include "engine/train/staging.h"
#include "engine/train/trainer.h"

C_BEGIN

/* The part of a model_tensor inside a range of a unit's flat parameter. */
struct weights_part {
    int tensor;
    int64_t tensor_first, count; /* elements */
    int64_t range_first;         /* where it begins in the range */
};

/** weights_each_part() - @visit every part in elements [first, first + count) of a unit. */
MUST_CHECK enum status
weights_each_part(const struct model *m, int unit, int64_t first, int64_t count,
                  enum status (*visit)(void *context, struct weights_part part), void *context);

/* Gives elements [first, first + count) of a unit's flat parameter; gaps get zeros. */
struct weights_source {
    enum status (*fill)(void *context, int unit, float *out, int64_t first, int64_t count);
    void *context;
    bool from_any_thread; /* and several ranges at once */
    /* For ranges as long as its buffers, on the way to a card. NULL: short ones. Borrowed. */
    struct staging *staging;
};

/** weights_staging() - open buffers of @numel, or of the longest range that this rank has, if that
 * is less. Return: as staging_open(). */
MUST_CHECK enum status weights_staging(struct staging *s, struct trainer *t, int64_t numel);

/**
 * weights_fill() - set this rank's master weights and parameters from a source. Not collective.
 *
 * A source that may be asked from any thread is asked from all of this rank's host threads
 * (device.h); where the device has no workers, as a card, they live for this call.
 */
MUST_CHECK enum status weights_fill(struct trainer *t, const struct weights_source *source);

/** weights_init() - random initial weights (model_init_range()). Not collective. */
MUST_CHECK enum status weights_init(struct trainer *t);

/**
 * weights_load() - the weights of a Hugging Face folder, in one file or in several; F32, F16 or
 * BF16. Collective: all ranks end with the same status.
 *
 * Each rank reads only the ranges that it holds. Names may differ as engine/train/weights_folder.h
 * says. If qa_outputs is missing (an encoder that was only pretrained) its random initial values
 * stay, with a warning. Tensors that the model does not have are ignored and named in one line.
 *
 * Return: ST_OK; ST_INVALID (another tensor is missing: all of them are named; a shape or a size
 * in config.json differs from the configuration's); ST_IO; ST_CORRUPT; ST_UNSUPPORTED.
 */
MUST_CHECK enum status weights_load(struct trainer *t, const char *dir);

/**
 * weights_save() - the model as a Hugging Face folder: model.safetensors (fp32), config.json,
 * tokenizer_config.json, vocab.txt. Collective; between FLUSH and PROLOGUE, or after the run.
 * @dir: made if it is not there.
 *
 * The bytes do not depend on stage and world size. Every rank writes the part that it owns; a
 * failure on one fails on all, and then the folder's old model.safetensors, if any, is untouched
 * and no part of a new one is left.
 *
 * Return: ST_OK; ST_IO; ST_MEMORY; ST_COMM.
 */
MUST_CHECK enum status weights_save(struct trainer *t, const char *dir);

/*
 * The same in two halves. Between them a thread of each rank copies and writes, and the weights
 * must stay as they are: the last evaluation takes that time.
 */
struct weights_writing;

/** weights_save_begin() - collective. @out: owned; weights_save_end(), or weights_save_drop().
 * Return: as weights_save(), then *out is NULL. */
MUST_CHECK enum status weights_save_begin(struct weights_writing **out, struct trainer *t,
                                          const char *dir);

/** weights_save_end() - wait, and put it in its place; sets the pointer to NULL. Collective.
 * Return: as weights_save(). */
MUST_CHECK enum status weights_save_end(struct weights_writing **writing);

/** weights_save_drop() - wait, and leave nothing. Not collective. NULL inside is fine. */
void weights_save_drop(struct weights_writing **writing);

C_END

#endif
