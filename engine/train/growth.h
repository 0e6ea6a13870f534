/*
 * engine/train/growth.h - what a run takes of memory as the system or the card's driver sees it.
 *
 * Measured where it changes, to stand beside the account (struct card_memory, struct process_memory
 * of engine/train/metrics.h).
 */
#ifndef ENGINE_TRAIN_GROWTH_H
#define ENGINE_TRAIN_GROWTH_H

#include "engine/train/trainer.h"

C_BEGIN

/** card_grown() - add to @bytes what the card's memory in use has grown by since the last call; the
 * first counts from when the device was open. Without a card nothing. ST_DEVICE. */
MUST_CHECK enum status card_grown(struct trainer *t, size_t *bytes);

/**
 * process_grown() - what this process has grown by since all ranks of it were without memory, the
 * first call; rank 0 asks, on CPUs. Later growth is none (tests/train_memory.c), so the end of step
 * 2 and the last step will do. ST_SYSTEM.
 */
MUST_CHECK enum status process_grown(struct trainer *t);

/** card_log() - a line with its parts; without a card none. */
void card_log(const struct card_memory *m);

C_END

#endif
