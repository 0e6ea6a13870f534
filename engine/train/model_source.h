/*
 * engine/train/model_source.h - a model that answers and is not trained: where it is, what it is.
 *
 * Two kinds of folders hold one: a Hugging Face folder, as tessera train leaves it in OUTPUT/model,
 * and a checkpoint. model.init_from takes both.
 */
#ifndef ENGINE_TRAIN_MODEL_SOURCE_H
#define ENGINE_TRAIN_MODEL_SOURCE_H

#include "engine/base/config.h"

C_BEGIN

/**
 * model_source_configure() - a configuration that loads a model and trains nothing.
 * @dir: either kind of folder. @vocab: the vocabulary's file; NULL: the folder's vocab.txt, or the
 * one that the checkpoint was written with.
 *
 * A checkpoint also says how its questions were cut into windows; otherwise a window has as many
 * tokens as the model has positions, at most 384. All parameters are frozen: there are no
 * gradients.
 *
 * Return: ST_OK; ST_INVALID (no question answering head; no vocabulary, or not the one that the
 * checkpoint was written with); ST_IO; ST_CORRUPT; ST_UNSUPPORTED.
 */
MUST_CHECK enum status model_source_configure(struct run_config *config, const char *dir,
                                              const char *vocab);

C_END

#endif
