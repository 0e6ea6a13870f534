/*
 * engine/base/monitor.h - a mutex, and the condition that threads wait for under it.
 *
 * Deadlines are times of clock_ns() (engine/base/clock.h), so setting the machine's clock does not
 * move them.
 */
#ifndef ENGINE_BASE_MONITOR_H
#define ENGINE_BASE_MONITOR_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "engine/base/status.h"

C_BEGIN

struct monitor {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
};

/** monitor_init() - Return: ST_OK; ST_SYSTEM, then there is nothing to release. */
MUST_CHECK enum status monitor_init(struct monitor *m);

/** monitor_release() - of one that was initialised; no thread is in it. */
void monitor_release(struct monitor *m);

/**
 * monitor_wait() - with the mutex: until another thread broadcasts `changed`, or perhaps without a
 * reason, so ask again what was waited for. @until_ns: a time of clock_ns().
 *
 * Return: true; false once @until_ns has passed.
 */
bool monitor_wait(struct monitor *m, int64_t until_ns);

C_END

#endif
