/*
 * engine/train/evaluate.h - validation loss, EM and F1, over all ranks.
 *
 * Batches are formed from the order of the windows: batch j is windows [j * B, (j + 1) * B). Rank r
 * computes batches r, r + N, ... in rounds; in the last round some ranks have none and compute zero
 * rows. The logits of a round are collected on all ranks, so that the result does not depend on the
 * number of ranks; rank 0 turns them into answers while the next round is computed, and writes the
 * files while whatever follows goes on.
 */
#ifndef ENGINE_TRAIN_EVALUATE_H
#define ENGINE_TRAIN_EVALUATE_H

#include "engine/train/metrics.h"
#include "engine/train/trainer.h"

C_BEGIN

struct evaluator;
struct answers;

/** evaluator_open() - what a round of evaluation needs on the host; @t has its executor.
 * ST_MEMORY; ST_DEVICE. */
MUST_CHECK enum status evaluator_open(struct evaluator **out, struct trainer *t);
void evaluator_close(struct evaluator **e, struct trainer *t);

/** evaluator_rehearse() - one round without windows, for its side effects (capture.h). */
MUST_CHECK enum status evaluator_rehearse(struct evaluator *e, struct trainer *t);

/** evaluator_read_ahead() - on a device that computes by itself: the host reads the questions of
 * the evaluation meanwhile. Once, before the first evaluation. */
void evaluator_read_ahead(struct evaluator *e, struct trainer *t);

/**
 * evaluator_run() - evaluate the weights as they are; between FLUSH and PROLOGUE.
 * @split: which questions; the first @examples of them.
 * @output_dir: where rank 0 writes predictions.json, nbest.json and null_odds.json; NULL: nowhere.
 * They are there when evaluator_finish() or the next evaluation returns.
 * @result: loss is set on all ranks, the score on rank 0 only.
 *
 * Return: ST_OK; ST_INTERRUPTED on all ranks, in the same round, after a signal to one of them:
 * then nothing was written; errors of the parts, and of the files of the evaluation before.
 */
MUST_CHECK enum status evaluator_run(struct evaluator *e, struct trainer *t,
                                     const struct split *split, int64_t examples,
                                     const char *output_dir, struct evaluation *result);

/**
 * evaluator_answers() - the first half of evaluator_run(): run the model, collect the answers.
 * @answers: zero-initialised; filled in and finished on rank 0; the caller releases it.
 * @result: loss and windows, on all ranks. Return: as evaluator_run().
 */
MUST_CHECK enum status evaluator_answers(struct evaluator *e, struct trainer *t,
                                         const struct split *split, int64_t examples,
                                         struct answers *answers, struct evaluation *result);

/** evaluator_finish() - wait for the files of the last evaluation. ST_IO; ST_MEMORY. */
MUST_CHECK enum status evaluator_finish(struct evaluator *e);

/** evaluator_classes() - where kernels have fixed shapes: the numbers of rows that evaluations
 * have. @rows: mem_free(). ST_MEMORY. */
MUST_CHECK enum status evaluator_classes(int64_t **rows, int *count, const struct trainer *t);

/** evaluator_max_rows() - rows of the largest batch of a split, in batches of @micro_batch. */
int64_t evaluator_max_rows(const struct split *split, int64_t micro_batch);

C_END

#endif
