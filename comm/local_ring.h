/*
 * comm/local_ring.h - the collectives in flight of comm/local.h. For local.c only.
 *
 * Everything is under the one mutex of the world, but for the copies and sums themselves.
 *
 *     posted[r]  collectives that rank r has issued      both only grow; collective n is the
 *     read[r]    collectives whose input rank r has read  same one on all ranks
 *
 * Rank r may read for collective n when all have posted n, and is done with n when all have read
 * n. A rank that waits for either does its own outstanding reads meanwhile, so that it holds up its
 * peers no longer than its own program makes it. Every condition speaks of n or an earlier
 * collective and ranks read in order, so ranks that run one program cannot wait in a circle.
 *
 * A stream runs its operations in order: a collective's input may be the output of the one before
 * on the same stream. So it is read only after all ranks have read that one (slot.after).
 *
 * A rank that learns of a failure may free its buffers. So no read begins after a failure, and
 * nobody is told of it while a read is in progress (world.copying).
 */
#ifndef COMM_LOCAL_RING_H
#define COMM_LOCAL_RING_H

#include <stdbool.h>

#include "comm/local.h"
#include "engine/base/monitor.h"

C_BEGIN

enum {
    RING = 64, /* collectives in flight */
    CAUSE_BYTES = 1024,
    STAGE_BYTES = 64 * 1024, /* the largest exchange */
    LOCAL_MAX_WORLD_SIZE = 1024
};

enum kind { ALL_GATHER, REDUCE_SCATTER, BROADCAST, EXCHANGE };

struct post {
    enum kind kind;
    enum dtype dtype;
    int root;
    int64_t numel; /* bytes of an EXCHANGE */
    const void *send;
    void *recv; /* read by the rank itself only */
};

struct slot {
    uint64_t posts, reads; /* of all ranks, over all collectives that used this slot */
    uint64_t after;        /* first collective that may still be unread; 0: no condition */
    int first;             /* the rank that posted first */
};

struct rank_state {
    uint64_t posted, read;
    bool open, closed;
    bool waiting; /* for its peers; so it is not the one to blame */
    struct post post[RING];
};

struct local_world {
    int world_size;
    int64_t timeout_ms;
    struct monitor monitor;
    enum status failure; /* the first one; ST_OK while alive */
    char cause[CAUSE_BYTES];
    int copying;      /* ranks that read their peers' buffers now, outside the mutex */
    int closed_count; /* ranks that have left */
    struct slot slot[RING];
    struct rank_state *rank; /* owned, world_size */
};

struct local_comm {
    struct comm base;
    struct local_world *world;    /* borrowed */
    uint64_t after[STREAM_COUNT]; /* 1 + the last collective of each stream; 0: none */
    char stage[STAGE_BYTES];      /* what the peers read in an exchange */
};

/* All functions below but ring_lock() are called with the mutex of the world. */
void ring_lock(struct local_world *w);
void ring_unlock(struct local_world *w);

/**
 * ring_post() - issue the next collective of this rank; completes the one RING before it.
 * @after: the collective is read only after all ranks have read collective @after - 1; 0: at once.
 * @ticket: output, its number.
 *
 * Return: ST_OK; ST_INVALID (a peer issued another collective); the failure of the world.
 */
MUST_CHECK enum status ring_post(struct local_comm *c, const struct post *p, uint64_t after,
                                 uint64_t *ticket);

/** ring_read_next() - do this rank's next read, if the peers are ready; drops the mutex meanwhile.
 * Return: whether it was done. */
bool ring_read_next(struct local_comm *c);

/** ring_all_read() - collective @n is complete. */
bool ring_all_read(const struct local_world *w, uint64_t n);

/** ring_complete() - wait until collective @n is complete, reading meanwhile; progress renews the
 * deadline. Return: false when the world is dead; writes no message. */
bool ring_complete(struct local_comm *c, uint64_t n);

/** ring_wait() - the same. Return: ST_OK; ST_TIMEOUT; the failure of the world. */
MUST_CHECK enum status ring_wait(struct local_comm *c, uint64_t n);

/** ring_fail() - the world is dead; the first cause is kept and wakes everyone. On return no rank
 * reads its peers' buffers any more. */
void ring_fail(struct local_world *w, enum status st, const char *cause);

C_END

#endif
