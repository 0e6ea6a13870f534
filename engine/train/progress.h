/*
 * engine/train/progress.h - where a rank stands, as a number that a GPU can write and as words.
 *
 * A stream writes a mark (engine/device/device.h, device_mark()) when it comes to an instruction:
 * each unit's FORWARD, RECOMPUTE and BACKWARD, and each collective. A watchdog reads the last mark
 * of every stream, and says with progress_name() what that stream is at.
 */
#ifndef ENGINE_TRAIN_PROGRESS_H
#define ENGINE_TRAIN_PROGRESS_H

#include "engine/model/model.h"
#include "shard/account.h"

C_BEGIN

enum { PROGRESS_NAME_BYTES = 96 };

/** progress_mark() - the mark of an instruction; 0 for those that get none. */
uint32_t progress_mark(const struct program *p, int instr);

/** progress_name() - "BACKWARD of block.3, micro-batch 0"; "nothing yet" for mark 0. */
void progress_name(const struct plan *plan, const struct model *model, uint32_t mark,
                   char out[PROGRESS_NAME_BYTES]);

C_END

#endif
