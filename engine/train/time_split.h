/*
 * engine/train/time_split.h - where the time of a traced step went (engine/train/trace.h).
 *
 * Every moment of the step counts once, for the first of these that holds:
 *
 *     compute        FORWARD, RECOMPUTE, BACKWARD, ACCUMULATE, BEGIN
 *     optimizer      NORM, UPDATE, CLEAR: and no compute beside them
 *     communication  GATHER, REDUCE, AGREE that nothing hides: exposed
 *     idle           nothing runs
 */
#ifndef ENGINE_TRAIN_TIME_SPLIT_H
#define ENGINE_TRAIN_TIME_SPLIT_H

#include <stdbool.h>

#include "engine/base/status.h"

C_BEGIN

struct json_t;

enum time_part { TIME_COMPUTE, TIME_OPTIMIZER, TIME_COMMUNICATION, TIME_IDLE, TIME_PARTS };

struct time_split {
    double step_ms;
    double part_ms[TIME_PARTS]; /* add up to step_ms */
    double hidden_ms;           /* communication beside which something else runs */
    long step;                  /* counted from 1 */
    bool captured;
};

/**
 * time_split_of() - of one rank's trace.
 * @trace: the file's tree (jansson). @path: for messages.
 *
 * Return: ST_OK; ST_CORRUPT if it is not a trace; ST_MEMORY. Cost: O(events log events).
 */
MUST_CHECK enum status time_split_of(struct time_split *split, const struct json_t *trace,
                                     const char *path);

C_END

#endif
