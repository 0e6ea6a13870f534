/*
 * engine/device/workers.h - the CPU threads of one rank, for loops that are cut into parts.
 *
 *     workers_run(w, body, context, 5)    caller   part 0   part 2   part 4
 *                                         worker 1 part 1   part 3
 *
 * The rank's own thread is worker 0 and takes parts like the others, which sleep between loops.
 * Whoever is free takes the next part, so a thread that the system holds back delays one part and
 * not the loop. Hence no result may depend on who computes a part: parts write to disjoint places,
 * and sums are cut by the shape of the data, never by the number of threads.
 *
 * One loop at a time; bodies do not start loops and do not fail.
 */
#ifndef ENGINE_DEVICE_WORKERS_H
#define ENGINE_DEVICE_WORKERS_H

#include <stdint.h>

#include "engine/base/status.h"

C_BEGIN

struct workers;

/**
 * workers_open() - start @threads - 1 threads; they ignore signals.
 * @out: owned; NULL if @threads is 1: workers_run() then loops in the caller.
 *
 * Return: ST_OK; ST_MEMORY; ST_SYSTEM (a thread cannot be started).
 */
MUST_CHECK enum status workers_open(struct workers **out, int threads);

/** workers_close() - end the threads. NULL inside is fine. */
void workers_close(struct workers **w);

/**
 * workers_run() - call @body for all parts 0 .. @parts - 1, and return when all are done.
 * @body: @worker is below the number of threads; no two parts run at once with the same.
 *
 * Cost: two wake-ups, some 10 us; a loop of one part costs nothing.
 */
void workers_run(struct workers *w, void (*body)(void *context, int64_t part, int worker),
                 void *context, int64_t parts);

/** workers_run_parts() - workers_run() as others call it who know no workers (io/parts.h). */
void workers_run_parts(void *workers, void (*body)(void *of_body, int64_t part, int worker),
                       void *of_body, int64_t parts);

C_END

#endif
