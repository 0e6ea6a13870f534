/*
 * engine/train/run_data.h - the data of a run, loaded once a process and read by all its ranks.
 */
#ifndef ENGINE_TRAIN_RUN_DATA_H
#define ENGINE_TRAIN_RUN_DATA_H

#include "engine/base/config.h"
#include "io/features.h"
#include "io/squad.h"
#include "io/vocab.h"
#include "io/wordpiece.h"

C_BEGIN

/* One SQuAD file as features; the first `count` of them, of the first `examples` questions. */
struct split {
    struct squad_data data; /* of a file whose features are cached the content hash alone */
    const char *path;       /* borrowed; of the file */
    struct feature_set features;
    int64_t examples, count;
    int32_t *rows; /* owned; rows that each feature takes in a batch */
    bool cached;   /* the features came from the cache */
};

struct run_data {
    struct vocab vocab;
    struct wordpiece tokenizer;
    struct split train, eval; /* eval.count 0: no evaluation data */
};

/**
 * run_data_load() - vocabulary, files, features.
 * @data: zero-initialised; run_data_release() also after a failure.
 * @with_train: false: only evaluation will be done.
 *
 * A file whose features are cached - of training data, from a run that checked its answers - is not
 * parsed: only evaluations need texts (split_texts()).
 *
 * Return: ST_OK; ST_INVALID (vocabulary of another size than the model, answers that are not at
 * their offsets, no questions); ST_IO; ST_CORRUPT; ST_MEMORY.
 */
MUST_CHECK enum status run_data_load(struct run_data *data, const struct run_config *config,
                                     bool with_train);
void run_data_release(struct run_data *data);

/**
 * split_texts() - the questions, contexts and answers of a split, parsed now if they were not.
 * @kept: where they are kept then; zero-initialised, squad_release() by the caller.
 *
 * Return: ST_OK; ST_INVALID if the file is not the one of the start any more; as squad_load().
 */
MUST_CHECK enum status split_texts(const struct squad_data **texts, struct squad_data *kept,
                                   const struct split *split);

C_END

#endif
