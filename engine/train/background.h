/*
 * engine/train/background.h - work beside training: a thread that is started, asked and joined.
 *
 *     start -> ... -> idle? ... -> join -> st, message
 *
 * One piece of work at a time. Everything but the body belongs to the thread that starts it.
 */
#ifndef ENGINE_TRAIN_BACKGROUND_H
#define ENGINE_TRAIN_BACKGROUND_H

#include <pthread.h>
#include <stdbool.h>

#include "engine/base/status.h"

C_BEGIN

enum { BACKGROUND_MESSAGE_BYTES = 4096 };

struct background { /* zero-initialise */
    enum status (*body)(void *context);
    void *context; /* borrowed */
    int rank;      /* for the log */
    pthread_t thread;
    bool started; /* and not joined */
    int ended;    /* atomic */
    /* Of the last piece of work, once it is joined. */
    enum status st;
    char message[BACKGROUND_MESSAGE_BYTES];
};

/** background_start() - run @body in a thread; that none can be had is the work's failure. */
void background_start(struct background *b, int rank, enum status (*body)(void *context),
                      void *context);

/** background_is_idle() - it has ended, or nothing was started. */
bool background_is_idle(const struct background *b);

/** background_join() - wait for its end; fine if there is nothing to wait for. */
void background_join(struct background *b);

C_END

#endif
