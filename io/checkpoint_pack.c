/*
 * Chunks on their way into a file: packed by threads, in any order, and appended by the writer in
 * the order in which they were put.
 *
 *     put ->  [ waiting | waiting | being packed | packed | packed ]  -> take
 *
 * The room for each is a chunk; so many are under way at once and no more. What comes out does not
 * depend on the number of threads.
 */
#include "io/checkpoint_format.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>
#include <zstd.h>

enum { AHEAD = 3 /* chunks that are packed while the writer writes */ };

struct pack_slot {
    const float *data; /* borrowed */
    struct packed_chunk out;
    uint8_t *room; /* owned; out.data */
    bool packed;
    enum status st;
    char message[200];
};

/* One who packs: a thread, or the caller if there is none. */
struct packer {
    struct packers *all;
    struct ZSTD_CCtx_s *zstd; /* owned */
    uint8_t *planes;          /* owned */
    pthread_t thread;
};

struct packers {
    pthread_mutex_t mutex;
    pthread_cond_t begin, end; /* for the threads; for the caller */
    struct pack_slot *slots;   /* owned; chunk n is in slot n % slot_count */
    int64_t slot_count;
    int64_t put, begun, taken; /* chunks so far */
    bool compress, stop;
    struct packer *packer; /* owned */
    int count;             /* of them; at least one */
    int threads;           /* of these that run; 0: the caller packs */
};

static void pack(struct packer *p, struct pack_slot *s)
{
    struct checkpoint_chunk *c = &s->out.chunk;
    c->hash = XXH3_64bits(s->data, sizeof *s->data * (size_t)c->numel);
    s->st = chunk_pack(s->room, &s->out.bytes, c->plane_bytes, p->planes, s->data, c->numel,
                       p->zstd, p->all->compress);
    if (s->st != ST_OK)
        snprintf(s->message, sizeof s->message, "%s", status_message());
}

static void *packer_main(void *argument)
{
    struct packer *me = argument;
    struct packers *all = me->all;
    pthread_mutex_lock(&all->mutex);
    while (!all->stop) {
        if (all->begun == all->put) {
            pthread_cond_wait(&all->begin, &all->mutex);
            continue;
        }
        struct pack_slot *s = &all->slots[all->begun++ % all->slot_count];
        pthread_mutex_unlock(&all->mutex);
        pack(me, s);
        pthread_mutex_lock(&all->mutex);
        s->packed = true;
        pthread_cond_signal(&all->end);
    }
    pthread_mutex_unlock(&all->mutex);
    return NULL;
}

/* ---- open and close -------------------------------------------------------------------------- */

static enum status init_sync(struct packers *all)
{
    int rc = pthread_mutex_init(&all->mutex, NULL);
    if (rc != 0)
        return FAIL(SYSTEM, "cannot make a mutex: %s", strerror(rc));
    rc = pthread_cond_init(&all->begin, NULL);
    if (rc == 0 && (rc = pthread_cond_init(&all->end, NULL)) != 0)
        pthread_cond_destroy(&all->begin);
    if (rc == 0)
        return ST_OK;
    pthread_mutex_destroy(&all->mutex);
    return FAIL(SYSTEM, "cannot make a condition variable: %s", strerror(rc));
}

static enum status make_room(struct packers *all, size_t chunk_bytes, int level)
{
    TRY(mem_alloc(&all->packer, sizeof *all->packer * (size_t)all->count));
    TRY(mem_alloc(&all->slots, sizeof *all->slots * (size_t)all->slot_count));
    for (int64_t i = 0; i < all->slot_count; i++) {
        TRY(mem_alloc_raw(&all->slots[i].room, chunk_bytes));
        all->slots[i].out.data = all->slots[i].room;
    }
    for (int i = 0; i < all->count; i++) {
        all->packer[i].all = all;
        TRY(mem_alloc_raw(&all->packer[i].planes, chunk_bytes));
        TRY(chunk_compressor(&all->packer[i].zstd, level));
    }
    return ST_OK;
}

/* Signals are for the threads that were there before. Fewer threads than asked for do as well. */
static void start(struct packers *all, int threads)
{
    sigset_t blocked, before;
    sigfillset(&blocked);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    while (all->threads < threads && pthread_create(&all->packer[all->threads].thread, NULL,
                                                    packer_main, &all->packer[all->threads]) == 0)
        all->threads++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

enum status packers_open(struct packers **out, int threads, size_t chunk_bytes, int level)
{
    struct packers *all = NULL;
    *out = NULL;
    TRY(mem_alloc(&all, sizeof *all));
    enum status st = init_sync(all);
    if (st != ST_OK) {
        mem_free(&all);
        return st;
    }
    *out = all;
    all->count = threads > 0 ? threads : 1;
    all->slot_count = threads > 0 ? threads + AHEAD : 1;
    all->compress = level > 0;
    TRY(make_room(all, chunk_bytes, level));
    start(all, threads);
    return ST_OK;
}

void packers_close(struct packers **pointer)
{
    struct packers *all = *pointer;
    if (all == NULL)
        return;
    pthread_mutex_lock(&all->mutex);
    all->stop = true;
    pthread_cond_broadcast(&all->begin);
    pthread_mutex_unlock(&all->mutex);
    for (int i = 0; i < all->threads; i++)
        pthread_join(all->packer[i].thread, NULL);
    for (int i = 0; i < all->count && all->packer != NULL; i++) {
        ZSTD_freeCCtx(all->packer[i].zstd);
        mem_free(&all->packer[i].planes);
    }
    for (int64_t i = 0; i < all->slot_count && all->slots != NULL; i++)
        mem_free(&all->slots[i].room);
    pthread_cond_destroy(&all->end);
    pthread_cond_destroy(&all->begin);
    pthread_mutex_destroy(&all->mutex);
    mem_free(&all->slots);
    mem_free(&all->packer);
    mem_free(pointer);
}

/* ---- chunks ---------------------------------------------------------------------------------- */

bool packers_wants(const struct packers *all)
{
    return all->put - all->taken < all->slot_count;
}

bool packers_empty(const struct packers *all)
{
    return all->put == all->taken;
}

void packers_put(struct packers *all, const struct checkpoint_chunk *chunk, const float *data)
{
    ASSERT(packers_wants(all));
    struct pack_slot *s = &all->slots[all->put % all->slot_count];
    s->out.chunk = *chunk;
    s->data = data;
    s->packed = all->threads == 0;
    if (all->threads == 0) {
        pack(&all->packer[0], s);
        all->put++;
        return;
    }
    pthread_mutex_lock(&all->mutex);
    all->put++;
    pthread_cond_signal(&all->begin);
    pthread_mutex_unlock(&all->mutex);
}

enum status packers_take(struct packers *all, const struct packed_chunk **out)
{
    ASSERT(!packers_empty(all));
    struct pack_slot *s = &all->slots[all->taken++ % all->slot_count];
    if (all->threads > 0) {
        pthread_mutex_lock(&all->mutex);
        while (!s->packed)
            pthread_cond_wait(&all->end, &all->mutex);
        pthread_mutex_unlock(&all->mutex);
    }
    *out = &s->out;
    if (s->st != ST_OK)
        status_set_message(s->message);
    return s->st;
}
