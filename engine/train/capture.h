/*
 * engine/train/capture.h - on CUDA: the steps of a run as graphs, made once before the first step.
 *
 * Every length class that the run will meet is found from the cached lengths and captured, by all
 * ranks in ascending order. A rehearsal comes first: one uncaptured turn of each program on zero
 * weights and an empty batch, which makes NCCL connect, loads the kernels and chooses the GEMM
 * algorithms, so that no memory is taken on the card after set-up.
 */
#ifndef ENGINE_TRAIN_CAPTURE_H
#define ENGINE_TRAIN_CAPTURE_H

#include "engine/train/trainer.h"

C_BEGIN

/** capture_rehearse() - run each program once; before the weights are there, which stay zero. */
MUST_CHECK enum status capture_rehearse(struct trainer *t);

/** capture_steps() - capture the step for every length class of the run. */
MUST_CHECK enum status capture_steps(struct trainer *t);

C_END

#endif
