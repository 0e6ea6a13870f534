/*
 * engine/train/checkpoint_state.h - the training state in a checkpoint's manifest.
 *
 * What a run is at, beside its tensors, as the JSON object "training" of the manifest:
 *
 *     program                  who wrote it; information, as world_size, zero_stage, epoch and lr
 *     step, t                  steps done; applied ones (AdamW's t)
 *     seed, train_count, train_hash, vocab_hash, global_batch
 *                              which samples come next: a function of these and step
 *     skipped_in_row, best_metric, evaluations_without_gain
 *                              what may end the run early
 *     evaluation_pending       a signal came before the evaluation of this step was done
 *     best                     the best checkpoint so far: step and value of checkpoint.keep_best
 *     config                   every key of the configuration, as text; imported: the model's
 *     imported                 only in what `tessera checkpoint import` made: true
 *     gemm_plan                the lines of the GEMM plan (engine/ops/gemm_table.h), an array of
 *                              texts; null if the run has none. The one that may be missing: older
 *                              checkpoints do not have it
 *
 * Any other component that is missing is an error, never a default. A run goes on only with what it
 * was begun with: keys of the configuration are
 *
 *     fixed   the model but for init_from; train.seed and train.freeze; data.max_length,
 *             doc_stride, max_query_length, max_train_samples; the questions and the vocabulary
 *     world   train.ranks, zero_stage, micro_batch, grad_accum: with the same global batch
 *     free    all others: rates, lengths of the run, logging. Changes are logged
 *
 * An imported one is the start of any run of its model: family and sizes are fixed, and the
 * vocabulary if it came with one; dropout and the like, data and seed are free.
 */
#ifndef ENGINE_TRAIN_CHECKPOINT_STATE_H
#define ENGINE_TRAIN_CHECKPOINT_STATE_H

#include "engine/train/trainer.h"

C_BEGIN

struct json_t;

struct training_state {
    int64_t step, t;
    int64_t skipped_in_row, evaluations_without_gain;
    double best_metric; /* -INFINITY: none yet */
    bool evaluation_pending;
    int64_t best_step; /* of the best checkpoint; -1: none */
    double best_value;
};

/**
 * training_state_write() - @state and the identity of the run as JSON. json_decref(*out).
 *
 * Return: ST_OK; ST_MEMORY.
 */
MUST_CHECK enum status training_state_write(struct json_t **out, const struct training_state *state,
                                            const struct trainer *t);

/**
 * training_state_imported() - that of a run of @config's model which has not begun. json_decref().
 * @vocab: the model's, or NULL if it is not known.
 */
MUST_CHECK enum status training_state_imported(struct json_t **out, const struct run_config *config,
                                               const struct vocab *vocab);

/**
 * training_state_read() - check that this run is the one that was saved, and get its state.
 * @path: of the checkpoint, for messages. Rank 0 logs the keys that have changed.
 *
 * Return: ST_OK; ST_CORRUPT (a component is missing or of another kind); ST_INVALID (another run:
 * the message names each key with both values).
 */
MUST_CHECK enum status training_state_read(struct training_state *state, const struct json_t *root,
                                           const struct trainer *t, const char *path);

/**
 * training_state_plan() - the GEMM plan of the run that was saved.
 * @plan: zeroed; stays so if there is none, or one of another version, which is said.
 *
 * Return: ST_OK; ST_CORRUPT (the message says where); ST_MEMORY.
 */
MUST_CHECK enum status training_state_plan(struct gemm_table *plan, const struct json_t *root,
                                           const char *path);

C_END

#endif
