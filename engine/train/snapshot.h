/*
 * engine/train/snapshot.h - a copy of this rank's state in host memory, made beside training.
 *
 * Master weights, m and v of every unit's shard go, one after the other, into one pinned area that
 * is allocated at the start: 12 bytes for each trained element of a shard, 4 for a frozen one. On
 * CUDA the copy stream makes the copy, and two events are all that orders it:
 *
 *     compute  FLUSH | PROLOGUE | turn k: its updates skip | turn k+1: UPDATE ...
 *     copy           '---> master, m, v to the host -------'
 *                          behind the last UPDATE          the next that changes the state waits
 *
 * So where updates are late a whole step hides the copy; where they are early, what comes before
 * the piece of the step that has the updates (executor_hold()). One area and not two small ones in
 * turn: they would hold the UPDATE back for as long as compressing takes, not copying.
 *
 * A card that has more than twice the room left makes the copy in its own memory first, some
 * 25 times as fast as the way to the host, which the UPDATE then does not wait for. (Nor does a
 * step's report: it is so small that a kernel makes its copy, past the one of the copy engine.)
 *
 *     copy     master, m, v to a copy on the card | that one to the host ------------
 *                                                 '---> the UPDATE goes on
 *
 * On the CPU streams run each operation at once: it is a plain copy, and taken when begin returns.
 *
 * Of bf16 parameters the copy has both halves of the master weights (engine/ops/master.h), bytes
 * for bytes of these; snapshot_join() makes numbers of them where they are written from.
 *
 * Threads: the rank's; any may read the values once they are taken, until the next begin.
 */
#ifndef ENGINE_TRAIN_SNAPSHOT_H
#define ENGINE_TRAIN_SNAPSHOT_H

#include "engine/train/trainer.h"

C_BEGIN

enum { SNAPSHOT_STATES = 3 /* master, m, v */ };

struct snapshot {          /* zero-initialise */
    struct device *device; /* borrowed, as model */
    const struct model *model;
    float *values; /* owned, pinned */
    float *card;   /* owned, device memory; NULL: no room there, or a CPU */
    size_t bytes;
    int64_t *shard_numel; /* owned; by unit */
    bool *trained;        /* owned; by unit: it has m and v */
    uint16_t *room;       /* owned; as long as the longest shard; NULL: the masters are whole */
    struct event behind, copied;
    struct event free; /* the state may change; with a copy on the card, before @copied */
};

/** snapshot_open() - find the room; ended by snapshot_release(), also after a failure.
 * Return: ST_OK; ST_MEMORY; ST_DEVICE. */
MUST_CHECK enum status snapshot_open(struct snapshot *s, struct trainer *t);
void snapshot_release(struct snapshot *s);

/**
 * snapshot_begin() - copy the state as it is behind all programs that have been issued.
 *
 * Between two turns, with no update due. Does not wait; the next UPDATE does, on the device, if the
 * copy is still under way then. The values of the snapshot before are gone. ST_DEVICE.
 */
MUST_CHECK enum status snapshot_begin(struct snapshot *s, struct trainer *t);

/** snapshot_taken() - may the values be read? Does not wait. ST_DEVICE. */
MUST_CHECK enum status snapshot_taken(const struct snapshot *s, bool *taken);

/** snapshot_wait() - until they may be read. ST_DEVICE; a failure of the communicator. */
MUST_CHECK enum status snapshot_wait(struct snapshot *s);

/**
 * snapshot_join() - put the master weights of a unit together, which lie at @values.
 *
 * Once in each snapshot, when it is taken and before they are read; other units' may be read
 * meanwhile.
 */
void snapshot_join(struct snapshot *s, int unit, float *values);

/** snapshot_state_count() - how many states of a unit there are: 3, or 1 if it is frozen. */
int snapshot_state_count(const struct snapshot *s, int unit);

C_END

#endif
