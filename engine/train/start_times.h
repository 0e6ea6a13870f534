/*
 * engine/train/start_times.h - where the time goes from the start of the process to its first step.
 *
 *     start: 0.64 s to the first step: load 0.01, config 0.00, features 0.10, ranks 0.00,
 *     plan 0.02, memory 0.22, weights 0.28, log 0.01
 *
 * Each part is what has passed since the one before, so they add up. "load" is the time from exec
 * to main(), in which libraries are loaded; the system gives it in hundredths of a second. Of a run
 * with several processes it is rank 0's.
 *
 * On GPUs "driver" is the start of CUDA's driver, which knows all GPUs of the machine; "meeting" is
 * until all processes are there and bound; "context" is the GPU's, "device" the beginning of NCCL,
 * which connects the ranks from then on in a thread. "kernels" loads what computes meanwhile, and
 * "connections" is what is left to wait for. "bus" is the measurement of that line, "rehearsal" the
 * one with collectives.
 */
#ifndef ENGINE_TRAIN_START_TIMES_H
#define ENGINE_TRAIN_START_TIMES_H

#include "engine/base/status.h"

C_BEGIN

enum { START_PARTS = 24 };

struct start_times { /* zero-initialise */
    double begin_s, last_s;
    struct {
        const char *name; /* static */
        double s;
    } parts[START_PARTS];
    int count;
};

/** start_times_begin() - call it first thing: the process began where the system says. */
void start_times_begin(struct start_times *t);

/** start_times_part() - what has passed since the last call was @name. @t NULL: nobody asks. */
void start_times_part(struct start_times *t, const char *name);

/** start_times_all() - seconds from the begin to the last part's end. */
double start_times_all(const struct start_times *t);

/** start_times_log() - the line above. @t NULL: none. */
void start_times_log(const struct start_times *t);

C_END

#endif
