/*
 * shard/program_builder.h - what the files that build a step program share; see shard/program.h.
 *
 *     program_builder.c   buffers, instructions, the items of a turn, what all programs share
 *     program_emit.c      FORWARD, BACKWARD, REDUCE and the GATHERs between them: a turn
 *     program_update.c    NORM, AGREE, UPDATE and the GATHERs behind them
 *     program.c           checks, lives of buffers, program_build()
 *     program_link.c      what instructions wait for
 *
 * A failure is kept in builder.st; calls behind it do nothing, so emission needs no checks.
 */
#ifndef SHARD_PROGRAM_BUILDER_H
#define SHARD_PROGRAM_BUILDER_H

#include "shard/program.h"

C_BEGIN

enum { BUFFER_NONE = -1 };

/* Consecutive uses of one unit's parameters: gathered once, kept from the first to the last. */
struct gather_group {
    int unit, first_item, last_item;
    int buffer;
};

/* One FORWARD, RECOMPUTE or BACKWARD, in program order. */
struct item {
    enum program_op op;
    int unit, micro_batch;
};

/* Everything a build needs beside the program: where the current buffer of each thing is. */
struct builder {
    struct program *p;
    const struct program_spec *spec;
    bool state_sharded, per_micro_batch, late;
    enum status st;    /* the first failure; later calls do nothing */
    struct instr sink; /* where operands go after a failure; never read */
    int batch, state, report, reports, workspace, update_workspace, side_workspace;
    struct pool pool;
    /* per unit */
    int *param; /* whole flat parameter, now */
    int *shard; /* of a partitioned unit: the persistent shard */
    int *master, *adam_m, *adam_v;
    int *grad;        /* whole flat gradient, now */
    int *grad_shard;  /* reduced gradient of this rank */
    int *carried;     /* late: where UPDATE of the next turn finds the gradient */
    int *last_writer; /* last BACKWARD item of a micro-batch that writes this gradient */
    bool *grad_begun; /* grad has a writer */
    /* per slot, of the current micro-batch */
    int *act, *dact;
    int *rows;  /* all ranks' act, then dact, for tables that are moved by rows */
    int *saved; /* per unit */
    /* of partitioned units: uses of gathered parameters */
    struct gather_group *groups;
    int group_count, carried_count;
    int next_gather; /* the group whose GATHER comes next */
    int first_group; /* those before it are over */
    int next_update; /* late: the unit whose UPDATE comes next */
    int *reduced; /* units in the order of their last REDUCE; the first normed_count have a NORM */
    int reduced_count, normed_count;
};

/* ---- program_builder.c ---- */

/** builder_init() - arrays for the units and slots of b->spec, in b->pool. ST_MEMORY. */
MUST_CHECK enum status builder_init(struct builder *b, int max_items);

/** builder_buffer() - a new buffer of at least @bytes; returns its index. */
int builder_buffer(struct builder *b, enum category category, enum dtype dtype, int unit,
                   int micro_batch, size_t bytes);
/** builder_whole_bytes(), builder_shard_bytes() - of a unit's flat parameter. */
size_t builder_whole_bytes(const struct builder *b, int unit, enum dtype dtype);
size_t builder_shard_bytes(const struct builder *b, int unit, enum dtype dtype);

/** builder_is_partitioned() - has a rank its shard alone of a unit's parameters, between uses? */
bool builder_is_partitioned(const struct builder *b, int unit);
/** builder_looks_up_rows() - does FORWARD of this program read the shard, for all ranks' rows? */
bool builder_looks_up_rows(const struct builder *b, int unit);

/** builder_accumulates_shards() - are micro-batches reduced one by one, and shards added up? */
bool builder_accumulates_shards(const struct builder *b);
/** builder_gathers_late() - is a reduced gradient gathered a turn later, ahead of its UPDATE? */
bool builder_gathers_late(const struct builder *b);

/** builder_emit() - append an instruction; valid until the next one. */
struct instr *builder_emit(struct builder *b, enum program_op op, enum program_stream stream,
                           int unit, int micro_batch, unsigned flags);
/** operand_add() - of BUFFER_NONE it does nothing. */
void operand_add(struct instr *in, enum role role, enum access access, int buffer);
void operand_add_slice(struct instr *in, enum role role, enum access access, int buffer,
                       bool slice);

/** builder_list_items() - the FORWARDs, RECOMPUTEs and BACKWARDs of a turn; returns how many. */
int builder_list_items(struct builder *b, struct item *out);
/** builder_list_groups() - append the uses of gathered parameters to b->groups. */
void builder_list_groups(struct builder *b, const struct item *items, int count);
/** builder_list_shared() - the persistent buffers, the same in all programs. */
void builder_list_shared(struct builder *b);
/** builder_count_carried() - b->carried_count: groups carried over the end of a turn. */
void builder_count_carried(struct builder *b, struct item *items);
/** builder_list_carried() - the buffers that live from turn to turn: reduced gradients (late), or
 * the first groups. */
void builder_list_carried(struct builder *b);

/* ---- program_emit.c, program_update.c ---- */

void builder_gather(struct builder *b, int unit, int buffer);
void builder_step(struct builder *b, const struct item *items, int count);
void builder_evaluate(struct builder *b, const struct item *items, int count);
/** builder_gather_gradient() - stage 0: GATHER of the reduced gradient. @shard: this rank's; NONE:
 * it lies in its place in @grad. */
void builder_gather_gradient(struct builder *b, int unit, enum program_stream stream, int grad,
                             int shard);
/** builder_norms() - NORM of all units that have been reduced and have none. */
void builder_norms(struct builder *b);
/** builder_agree() - AGREE and, early, the updates behind it. */
void builder_agree(struct builder *b);
/** builder_update_through() - late: UPDATE up to this unit, at stage 0 behind the GATHER of the
 * gradient, at stages 1 and 2 with a GATHER of the parameters behind it. */
void builder_update_through(struct builder *b, int unit);
void builder_prologue(struct builder *b);
void builder_flush(struct builder *b);

C_END

#endif
