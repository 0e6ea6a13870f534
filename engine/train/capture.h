/*
 * engine/train/capture.h - on CUDA: the steps of a run as graphs, made once before the first step.
 *
 * Every length class that the run will meet is found from the cached lengths and captured, by all
 * ranks in ascending order. A rehearsal comes first: one uncaptured turn of each program on zero
 * weights and an empty batch, which makes NCCL connect, loads the kernels and shows which matrix
 * products there are (engine/train/products.h): after set-up no memory is taken on the card. While
 * NCCL still connects the ranks, each has one alone: most of the time of a rehearsal is the loading
 * of kernels, which needs no peer.
 */
#ifndef ENGINE_TRAIN_CAPTURE_H
#define ENGINE_TRAIN_CAPTURE_H

#include "engine/train/trainer.h"

C_BEGIN

/** capture_rehearse() - run each program once; before the weights are there, which stay zero. */
MUST_CHECK enum status capture_rehearse(struct trainer *t);

/** capture_rehearse_alone() - the same without the peers, before comm_ready(). ST_MEMORY too. */
MUST_CHECK enum status capture_rehearse_alone(struct trainer *t);

/** capture_classes() - rows of the length classes that the run's steps have, ascending; the same on
 * all ranks. Of the steps that are foreseen (sampler.h): another class is issued instruction by
 * instruction when it comes. mem_free(*rows). ST_MEMORY. */
MUST_CHECK enum status capture_classes(int64_t **rows, int *count, struct trainer *t);

/** capture_steps() - capture the step for every length class of the run. */
MUST_CHECK enum status capture_steps(struct trainer *t);

C_END

#endif
