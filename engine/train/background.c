#include "engine/train/background.h"

#include <stdio.h>
#include <string.h>

#include "engine/base/log.h"

static void end(struct background *b, enum status st)
{
    b->st = st;
    snprintf(b->message, sizeof b->message, "%s", st != ST_OK ? status_message() : "");
    __atomic_store_n(&b->ended, 1, __ATOMIC_RELEASE);
}

static void *run(void *argument)
{
    struct background *b = argument;
    log_set_rank(b->rank);
    end(b, b->body(b->context));
    return NULL;
}

void background_start(struct background *b, int rank, enum status (*body)(void *context),
                      void *context)
{
    ASSERT(!b->started);
    b->body = body;
    b->context = context;
    b->rank = rank;
    __atomic_store_n(&b->ended, 0, __ATOMIC_RELAXED);
    int error = pthread_create(&b->thread, NULL, run, b);
    b->started = error == 0;
    if (error != 0)
        end(b, FAIL(SYSTEM, "cannot start a thread: %s", strerror(error)));
}

bool background_is_idle(const struct background *b)
{
    return !b->started || __atomic_load_n(&b->ended, __ATOMIC_ACQUIRE) != 0;
}

void background_join(struct background *b)
{
    if (b->started)
        pthread_join(b->thread, NULL);
    b->started = false;
}
