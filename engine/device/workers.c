#include "engine/device/workers.h"

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>

#include "engine/base/arena.h"

struct worker {
    struct workers *all;
    int index;
    pthread_t thread;
};

struct workers {
    pthread_mutex_t mutex;
    pthread_cond_t begin, end; /* for the workers; for the caller */
    void (*body)(void *context, int64_t part, int worker);
    void *context;
    int64_t next, parts, unfinished; /* parts; next == parts: nothing to take */
    bool stop;
    int count;             /* of worker: those that have started */
    struct worker *worker; /* owned */
};

/* Take parts until there are none. With the mutex, which it drops for each. */
static void work(struct workers *w, int index)
{
    while (w->next < w->parts) {
        int64_t part = w->next++;
        pthread_mutex_unlock(&w->mutex);
        w->body(w->context, part, index);
        pthread_mutex_lock(&w->mutex);
        if (--w->unfinished == 0)
            pthread_cond_signal(&w->end);
    }
}

static void *worker_main(void *argument)
{
    struct worker *me = argument;
    struct workers *w = me->all;
    pthread_mutex_lock(&w->mutex);
    while (!w->stop) {
        work(w, me->index);
        pthread_cond_wait(&w->begin, &w->mutex);
    }
    pthread_mutex_unlock(&w->mutex);
    return NULL;
}

void workers_run(struct workers *w, void (*body)(void *context, int64_t part, int worker),
                 void *context, int64_t parts)
{
    if (w == NULL || parts < 2) {
        for (int64_t part = 0; part < parts; part++)
            body(context, part, 0);
        return;
    }
    pthread_mutex_lock(&w->mutex);
    DASSERT(w->next == w->parts);
    w->body = body;
    w->context = context;
    w->next = 0;
    w->parts = w->unfinished = parts;
    pthread_cond_broadcast(&w->begin);
    work(w, 0);
    while (w->unfinished > 0)
        pthread_cond_wait(&w->end, &w->mutex);
    pthread_mutex_unlock(&w->mutex);
}

void workers_run_parts(void *workers, void (*body)(void *of_body, int64_t part, int worker),
                       void *of_body, int64_t parts)
{
    workers_run(workers, body, of_body, parts);
}

/* ---- open and close ------------------------------------------------------------------------- */

static enum status sync_init(struct workers *w)
{
    int rc = pthread_mutex_init(&w->mutex, NULL);
    if (rc != 0)
        return FAIL(SYSTEM, "cannot make a mutex: %s", strerror(rc));
    rc = pthread_cond_init(&w->begin, NULL);
    if (rc == 0 && (rc = pthread_cond_init(&w->end, NULL)) != 0)
        pthread_cond_destroy(&w->begin);
    if (rc == 0)
        return ST_OK;
    pthread_mutex_destroy(&w->mutex);
    return FAIL(SYSTEM, "cannot make a condition variable: %s", strerror(rc));
}

/* Signals are for the threads that were there before. */
static enum status start(struct workers *w, int count)
{
    sigset_t all, before;
    int rc = 0;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (w->count < count && rc == 0) {
        struct worker *next = &w->worker[w->count];
        *next = (struct worker){.all = w, .index = w->count + 1};
        rc = pthread_create(&next->thread, NULL, worker_main, next);
        w->count += rc == 0;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return rc == 0 ? ST_OK
                   : FAIL(SYSTEM, "cannot start thread %d of %d of a rank: %s", w->count + 2,
                          count + 1, strerror(rc));
}

enum status workers_open(struct workers **out, int threads)
{
    enum status st = ST_OK;
    struct workers *w = NULL;
    *out = NULL;
    if (threads < 2)
        return ST_OK;
    TRY(mem_alloc(&w, sizeof *w));
    TRY_GOTO(st, out, mem_alloc(&w->worker, sizeof *w->worker * (size_t)(threads - 1)));
    TRY_GOTO(st, out, sync_init(w));
    *out = w;
    w = NULL;
    st = start(*out, threads - 1);
    if (st != ST_OK)
        workers_close(out);
out:
    if (w != NULL)
        mem_free(&w->worker);
    mem_free(&w);
    return st;
}

void workers_close(struct workers **pointer)
{
    struct workers *w = *pointer;
    if (w == NULL)
        return;
    pthread_mutex_lock(&w->mutex);
    w->stop = true;
    pthread_cond_broadcast(&w->begin);
    pthread_mutex_unlock(&w->mutex);
    for (int i = 0; i < w->count; i++)
        pthread_join(w->worker[i].thread, NULL);
    pthread_cond_destroy(&w->end);
    pthread_cond_destroy(&w->begin);
    pthread_mutex_destroy(&w->mutex);
    mem_free(&w->worker);
    mem_free(pointer);
}
