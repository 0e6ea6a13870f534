/*
 * engine/train/checkpoint.h - when a run saves its state, and how it goes on from one.
 *
 * A checkpoint (io/checkpoint.h) has master weights, m and v of every tensor of the model under its
 * Hugging Face name, in fp32, and the training state (engine/train/checkpoint_state.h). Each rank
 * writes its shard of every unit, at stage 0 too, where all ranks hold the same: so what is
 * replicated is written once, and the ranks share the work. A reader asks by tensor and range, so
 * any number of ranks at any stage goes on from it.
 *
 *     step    | 98 | 99 |copy| 100 | 101 | 102 ...           all ranks, between two steps
 *     writer                 [compress, write, fsync ]       a thread a rank, which has helpers
 *     report                 .  .  .  .  .  .  .  .  S       step_report.saved: all are through
 *     rank 0                                         [publish, remove old ones]   a thread
 *
 * Training waits for the copy alone (engine/train/snapshot.h), on CUDA only for what of it is not
 * done when the state is to change next; there the writer starts with the step that finds the copy
 * taken. No collective spans file I/O: that all ranks have written
 * is a number in the step report, and where a rank has to wait for the files (the next save, the
 * end, checkpoint.async false) it asks the others in short exchanges.
 *
 * A save that fails on any rank is a warning; training goes on, and earlier checkpoints stay. What
 * is read on resume is checked; any mismatch is an error on all ranks.
 *
 * Threads: everything here belongs to the rank's thread, which starts and joins its writers.
 */
#ifndef ENGINE_TRAIN_CHECKPOINT_H
#define ENGINE_TRAIN_CHECKPOINT_H

#include "engine/train/metrics.h"
#include "engine/train/trainer.h"

C_BEGIN

struct checkpointer;

/**
 * checkpointer_open() - room for a copy of this rank's state. Collective.
 * @out: NULL if the configuration asks for no checkpoints; all functions accept that.
 *
 * Removes what killed saves left hidden. Return: ST_OK; ST_INVALID (the folder holds checkpoints
 * of an earlier run that this one does not go on from; ranks see different folders); ST_IO;
 * ST_MEMORY.
 */
MUST_CHECK enum status checkpointer_open(struct checkpointer **out, struct trainer *t);

/** checkpointer_close() - wait for own threads, drop a save that is not published. */
void checkpointer_close(struct checkpointer **c);

/**
 * checkpoint_packing_threads() - of this rank, that pack beside the one that writes; 0: one does
 * both.
 *
 * On a card half of the rank's threads, which have little to do while the card trains; on CPUs an
 * eighth, or all but one if training waits (checkpoint.async false). At most 8: more would wait for
 * the one that writes. Each takes two chunks of host memory (8 MiB) during a save.
 */
int checkpoint_packing_threads(const struct trainer *t);

/** checkpointer_due() - does the configuration ask for a checkpoint after @done steps? */
bool checkpointer_due(const struct checkpointer *c, int64_t done);

/**
 * checkpointer_written() - saves whose part of this rank is written; for the step report.
 *
 * Starts the writer of a save whose snapshot has been taken since. Return: ST_OK; ST_DEVICE.
 */
MUST_CHECK enum status checkpointer_written(struct checkpointer *c, int64_t *saves);

/**
 * checkpointer_watch() - act on a step report, at the same step on all ranks.
 * @written: step_state.saved. Return: ST_OK, also if the save failed; ST_COMM.
 */
MUST_CHECK enum status checkpointer_watch(struct checkpointer *c, struct trainer *t,
                                          int64_t written);

/**
 * checkpointer_evaluated() - an evaluation is done; is its checkpoint one to keep? Collective.
 * @better: by checkpoint.keep_best better than all before: save now. ST_COMM.
 */
MUST_CHECK enum status checkpointer_evaluated(struct checkpointer *c, struct trainer *t,
                                              const struct evaluation *e, bool *better);

/**
 * checkpointer_save() - save the state after the last step. Collective, between two steps, with no
 * report pending. Waits for a save that is under way; without checkpoint.async also for this one.
 *
 * Return: ST_OK, also if the save failed (a warning says so); ST_COMM; ST_DEVICE.
 */
MUST_CHECK enum status checkpointer_save(struct checkpointer *c, struct trainer *t);

/** checkpointer_finish() - the end of the run: save the last step, if that failed before once more,
 * and wait for all files. Return: as checkpointer_save(). */
MUST_CHECK enum status checkpointer_finish(struct checkpointer *c, struct trainer *t);

/**
 * checkpointer_best() - after checkpointer_finish(): where is the best checkpoint? Collective.
 * @path: CHECKPOINT_PATH_BYTES (io/checkpoint.h); "": none is known, it is the last step's, or it
 * is not in the folder of this run, with a warning.
 *
 * Return: ST_OK; ST_COMM; ST_INVALID (the path is too long).
 */
MUST_CHECK enum status checkpointer_best(const struct checkpointer *c, const struct trainer *t,
                                         char *path);

/**
 * checkpoint_resume() - weights, moments and training state as checkpoint.resume says. Collective,
 * before the first program.
 * @resumed: false: there is nothing to go on from, and that is fine (resume_or_start).
 *
 * A damaged latest checkpoint is passed over for the one before it, with a warning; there must be
 * one. A given folder is taken or it is an error.
 *
 * Return: ST_OK; ST_INVALID (none to go on from, or of another run: each key is named with both
 * values); ST_CORRUPT; ST_IO; ST_UNSUPPORTED; ST_MEMORY.
 */
MUST_CHECK enum status checkpoint_resume(struct trainer *t, bool *resumed);

/**
 * checkpoint_load_weights() - only the master weights of the checkpoint at @path. Collective.
 *
 * Moments and training state stay as they are. The model has to be the same, all else may differ.
 * Return: as checkpoint_resume().
 */
MUST_CHECK enum status checkpoint_load_weights(struct trainer *t, const char *path);

/** checkpoint_folder() - of all checkpoints of a run: OUTPUT/checkpoints. ST_INVALID: too long. */
MUST_CHECK enum status checkpoint_folder(char *out, size_t bytes, const struct run_config *config);

/**
 * checkpoint_claim_folder() - make it, tidy it, and see that this run may write there. Collective.
 * @obsolete: on rank 0 the newest step there if it is beyond where this run begins, else -1.
 *
 * Return: as checkpointer_open().
 */
MUST_CHECK enum status checkpoint_claim_folder(const char *dir, const struct trainer *t,
                                               int64_t *obsolete);

C_END

#endif
