/*
 * engine/base/clock.h - a clock that only grows, for durations and deadlines; and pauses.
 *
 * CLOCK_MONOTONIC: nobody sets it, and times of two machines mean nothing to each other. Safe from
 * any thread, and never fails.
 */
#ifndef ENGINE_BASE_CLOCK_H
#define ENGINE_BASE_CLOCK_H

#include <stdint.h>

#include "engine/base/status.h"

C_BEGIN

int64_t clock_ns(void);
int64_t clock_ms(void); /* whole ones */
double clock_s(void);

/** clock_pause_us() - let the core go for that many microseconds; a signal ends it early. */
void clock_pause_us(int64_t us);

C_END

#endif
