/*
 * engine/train/checkpoint_model.h - what a checkpoint and a model have to do with each other.
 *
 * A checkpoint holds tensors under their Hugging Face names, and in its training state every key of
 * the configuration it was written with: that is enough to build its model again.
 */
#ifndef ENGINE_TRAIN_CHECKPOINT_MODEL_H
#define ENGINE_TRAIN_CHECKPOINT_MODEL_H

#include "engine/model/model.h"
#include "io/checkpoint.h"
#include "io/vocab.h"

C_BEGIN

enum { CHECKPOINT_MASTER, CHECKPOINT_ADAM_M, CHECKPOINT_ADAM_V, CHECKPOINT_STATES };

/* "master", "adam_m", "adam_v" */
extern const char *const checkpoint_state_names[CHECKPOINT_STATES];

/** checkpoint_frozen_tensors() - for each model_tensor: has it no m and v? mem_free(*out). */
MUST_CHECK enum status checkpoint_frozen_tensors(bool **out, const struct model *m);

/**
 * checkpoint_table() - the manifest's tensors for a model; mem_free(*out), it borrows names of @m.
 * @frozen: by model_tensor: master only. ST_OK; ST_MEMORY.
 */
MUST_CHECK enum status checkpoint_table(struct checkpoint_tensor **out, const struct model *m,
                                        const bool *frozen);

/**
 * checkpoint_config() - the configuration that a checkpoint was written with.
 *
 * Keys that its program did not know have their default, keys that this one does not know are
 * passed over. Return: ST_OK; ST_INVALID (its training state has no configuration, or a value that
 * is not allowed).
 */
MUST_CHECK enum status checkpoint_config(struct run_config *config, const struct checkpoint *c);

/**
 * checkpoint_vocab() - the vocabulary of a checkpoint's model.
 * @vocab: zero-initialised; vocab_release(). @config: checkpoint_config()'s.
 * @given: its file; NULL: the one in @config.
 *
 * Return: ST_OK; ST_INVALID (not there: the message says --vocab; another size or content than what
 * the checkpoint was written with); ST_IO; ST_CORRUPT.
 */
MUST_CHECK enum status checkpoint_vocab(struct vocab *vocab, const struct checkpoint *c,
                                        const struct run_config *config, const char *given);

/** checkpoint_is_one() - does @path look like a checkpoint: a folder with a manifest? */
bool checkpoint_is_one(const char *path);

/**
 * checkpoint_check_sizes() - is a checkpoint's model of the family and the sizes of @config?
 *
 * Return: ST_OK; ST_INVALID (each key that differs is named, with both values); errors of
 * checkpoint_config().
 */
MUST_CHECK enum status checkpoint_check_sizes(const struct checkpoint *c,
                                              const struct run_config *config);

/**
 * checkpoint_check_tensors() - has it the tensors of @m, and no others?
 * @frozen: by model_tensor: its moments are not needed; NULL: nobody's are.
 *
 * Return: ST_OK; ST_INVALID (missing tensors, all named; a state that is missing; another shape,
 * naming both; a tensor that is not of the model).
 */
MUST_CHECK enum status checkpoint_check_tensors(const struct checkpoint *c, const struct model *m,
                                                const bool *frozen);

C_END

#endif
