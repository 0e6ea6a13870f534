/*
 * engine/train/executor_turn.h - what the executor's files share: a turn, its memory, its
 * instructions.
 *
 *     executor.c           a turn of a program: waits, pieces, capture and replay
 *     executor_instr.c     what each instruction enqueues
 *     executor_memory.c    where buffers lie, and where their lives begin and end
 *     executor_open.c      allocates and releases what the programs of a plan need
 *
 * Only these files include it.
 */
#ifndef ENGINE_TRAIN_EXECUTOR_TURN_H
#define ENGINE_TRAIN_EXECUTOR_TURN_H

#include "engine/train/executor.h"

C_BEGIN

/* How UPDATE treats a unit's shard: ranges of one weight decay, frozen or not. */
struct unit_ranges {
    struct adam_range ranges[ADAM_MAX_RANGES];
    int count;
};

/* A piece of a program as a graph, for one number of rows. */
struct captured {
    enum program_kind kind;
    int first; /* instruction */
    int64_t rows;
    bool traced; /* with a trace's timers in it */
    struct graph *graph;
};

/* What one executor_run() is about. All borrowed. */
struct turn {
    struct executor *ex;
    const struct program *program;
    const struct sequences *micro;
    const struct collected *collected;
    struct event *events;
    int piece; /* first instruction of the piece at hand */
};

/** turn_operand() - device address of an operand, this rank's slice if it is one; NULL: none. */
void *turn_operand(const struct turn *t, const struct instr *in, enum role role);

/** turn_begin_lives() - in a heap: allocate the buffers whose first instruction is @index. */
MUST_CHECK enum status turn_begin_lives(struct turn *t, int index);

/** turn_end_lives() - poison or free the buffers whose last instruction is @index; waits for it. */
MUST_CHECK enum status turn_end_lives(struct turn *t, int index);

/** turn_end_carried() - behind a FLUSH: what was carried is not needed any more. */
void turn_end_carried(struct turn *t);

/**
 * turn_issue() - enqueue what @in does on @s.
 * @done: recorded by the communicator if @in is a collective.
 */
MUST_CHECK enum status turn_issue(struct turn *t, const struct instr *in, struct stream *s,
                                  struct event *done);

C_END

#endif
