#include "engine/base/monitor.h"

#include <errno.h>
#include <string.h>
#include <time.h>

enum status monitor_init(struct monitor *m)
{
    pthread_condattr_t attr;
    if (pthread_condattr_init(&attr) != 0)
        return FAIL(SYSTEM, "pthread_condattr_init failed");
    int rc = pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    if (rc == 0)
        rc = pthread_cond_init(&m->changed, &attr);
    pthread_condattr_destroy(&attr);
    if (rc != 0)
        return FAIL(SYSTEM, "cannot make a condition variable: %s", strerror(rc));
    rc = pthread_mutex_init(&m->mutex, NULL);
    if (rc != 0) {
        pthread_cond_destroy(&m->changed);
        return FAIL(SYSTEM, "cannot make a mutex: %s", strerror(rc));
    }
    return ST_OK;
}

void monitor_release(struct monitor *m)
{
    pthread_cond_destroy(&m->changed);
    pthread_mutex_destroy(&m->mutex);
}

bool monitor_wait(struct monitor *m, int64_t until_ns)
{
    struct timespec until = {(time_t)(until_ns / 1000000000), (long)(until_ns % 1000000000)};
    return pthread_cond_timedwait(&m->changed, &m->mutex, &until) != ETIMEDOUT;
}
