/*
 * engine/train/model_config.h - the small files of a Hugging Face model folder.
 *
 *     config.json            sizes and constants, as BertForQuestionAnswering or, by model.family,
 *                            DistilBertForQuestionAnswering has them
 *     tokenizer_config.json  do_lower_case, model_max_length
 *     vocab.txt              the vocabulary; folders that transformers 5 wrote have it in
 *                            tokenizer.json
 *
 * The weights themselves are engine/train/weights.h.
 */
#ifndef ENGINE_TRAIN_MODEL_CONFIG_H
#define ENGINE_TRAIN_MODEL_CONFIG_H

#include "engine/base/config.h"
#include "io/vocab.h"

C_BEGIN

/**
 * model_config_read() - set config->model (all but init_from) from a model folder.
 * @config: its other fields stay; what config.json does not say has Hugging Face's default. Without
 * a model_type there, the family stays too.
 *
 * Return: ST_OK; ST_IO (no config.json); ST_CORRUPT (no JSON, a value of the wrong kind, a size
 * that is no size); ST_UNSUPPORTED (another family, activation or kind of positions).
 */
MUST_CHECK enum status model_config_read(struct run_config *config, const char *dir);

/**
 * model_config_check() - does the folder hold a model of the family and sizes in @config?
 *
 * Without a config.json there is nothing to compare, which is fine. Constants that may differ
 * (dropout, norm_eps, casing) are not compared.
 *
 * Return: as model_config_read(); ST_INVALID names the key, both values and the folder.
 */
MUST_CHECK enum status model_config_check(const struct run_config *config, const char *dir);

/** model_config_is_size() - is section.name a key that two equal models must agree in? */
bool model_config_is_size(const char *section, const char *name);

/** model_vocab_path() - DIR/vocab.txt, or DIR/tokenizer.json if only that is there. ST_INVALID: the
 * path is too long. */
MUST_CHECK enum status model_vocab_path(char *path, size_t bytes, const char *dir);

/**
 * model_config_write() - write the three files; each is replaced as a whole.
 * @dtype: of the weights beside them, as model.safetensors says it. ST_OK; ST_IO; ST_MEMORY.
 */
MUST_CHECK enum status model_config_write(const struct run_config *config,
                                          const struct vocab *vocab, const char *dtype,
                                          const char *dir);

C_END

#endif
