/*
 * engine/train/auto_stage.h - train.zero_stage auto: the fastest stage that fits.
 *
 * The memory that a rank has is what is free on its card; on CPUs what the system and control
 * groups leave, divided by the ranks of the machine. The least of all ranks counts. Less what comes
 * beside the arena (below), it is the room for the plans of fit.h; rank 0 chooses, with the rates
 * of this user's machine profile or those built in for its card (machine_for()), and all ranks take
 * its answer. Without rates the stage that sends least counts as the fastest.
 */
#ifndef ENGINE_TRAIN_AUTO_STAGE_H
#define ENGINE_TRAIN_AUTO_STAGE_H

#include "engine/train/trainer.h"

C_BEGIN

/* What a rank allocates later than here, beside its arena. Cards: connections of the communicator,
 * kernels that are loaded when first used, graphs (0.8 GiB measured on 4 H100); CPUs: batches,
 * threads. Copies for checkpoints come on top of it (fit_copy_bytes()). */
#define AUTO_STAGE_CARD    ((size_t)1 << 30)
#define AUTO_STAGE_PROCESS ((size_t)32 << 20)

/**
 * auto_stage() - choose, together; t->stage_reason says why, in a sentence.
 * @t: with configuration, data, device and communicator.
 * @rows: as for setup_init().
 *
 * Return: ST_OK; ST_INVALID if no stage fits (the message says what the smallest needs); ST_COMM;
 * errors of the plans and of the profile.
 */
MUST_CHECK enum status auto_stage(int *stage, struct trainer *t, struct setup_rows rows);

C_END

#endif
