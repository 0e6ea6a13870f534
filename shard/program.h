/*
 * shard/program.h - the step program: a training step as data.
 *
 * program_build() turns (units, zero stage, world size, micro-batches, prefetch depth, recompute
 * policy, reduce policy) into a list of instructions and the list of buffers that they read and
 * write. Three interpreters read the same program: the executor (engine/train) issues it on
 * streams, the account (shard/account.h) places its buffers in one arena, simulate
 * (shard/simulate.h) gives its time line. The stages are a table, not four code paths:
 *
 *     stage   parameters    gradients     optimizer     after BACKWARD     after UPDATE
 *     0 DDP   replicated    replicated    replicated    REDUCE, GATHER     -
 *     1       replicated    replicated    partitioned   REDUCE             GATHER
 *     2       replicated    partitioned   partitioned   REDUCE             GATHER
 *     3 FSDP  partitioned   partitioned   partitioned   REDUCE             gathered when used
 *
 * The parameters of a look-up table that is moved by rows (below) are partitioned from stage 1 on.
 *
 * A buffer is one live interval: it begins at its first instruction and ends after its last. There
 * is no instruction that releases: the end of the interval says it. A full gradient so ends with
 * its REDUCE at every stage where nobody reads it later; without accumulation stages 1 and 2
 * therefore need the same memory. What a REDUCE reads last is held until the next BACKWARD has
 * ended and those of look-up tables behind it, or half of the next FORWARD (at most one more unit's
 * gradient while there are activations): taken at once, its memory would make that BACKWARD wait
 * for the REDUCE, and nothing would overlap.
 *
 * A program is one turn of a loop. live_in and live_out (buffers carried from turn to turn) are
 * equal; PROLOGUE makes them, FLUSH ends them, and these two surround evaluations and saves.
 * EVALUATE runs one micro-batch forward in the same arena. All streams join at the end of a turn.
 *
 * UPDATE is late or early. Late, a turn begins with the updates of the turn before, each just ahead
 * of its unit's FORWARD, on a stream of their own; the reduced gradients are carried, and the
 * GATHERs hide behind FORWARDs too: those of new parameters at stages 1 and 2, those of reduced
 * gradients ahead of their UPDATEs at stage 0 (behind each REDUCE if micro-batches are reduced one
 * by one, where another buffer than the shards is carried). PROLOGUE says that no update is
 * due, FLUSH does those that are. Early, updates stand at the end of the turn that made the
 * gradients; carried are the parameters that stage 3 gathers ahead for the first units.
 *
 *     late    UPDATE 0, 1 | FORWARD 0 | UPDATE 2 | FORWARD 1 | ...      ... | BACKWARD 0 | AGREE
 *     early   FORWARD 0 | FORWARD 1 | ...             ... | BACKWARD 0 | AGREE | UPDATE 0, 1, 2 ...
 *
 * NORM of a unit follows its REDUCE by one BACKWARD, on the update stream: at the end of the turn
 * only the last unit's is left before AGREE.
 *
 * A look-up table may be moved by rows (program_unit.by_rows): a step needs few of its rows, and
 * most of its gradient is zeros. So not the gradient is summed over ranks, but all ranks' rows of
 * its output's gradient are gathered, once for all parts of the table. BACKWARD of a part then sums
 * them up where this rank has its reduced gradient (its shard, at stage 0 all of it), and adds to
 * it in later micro-batches. And from stage 1 on a step does not gather the table: FORWARD of a
 * part looks the tokens of all ranks up in this rank's shard. It writes what that has of their
 * rows; the first part fills the rest with what changes no sum, and a REDUCE behind the last part
 * gives each rank its own rows:
 *
 *     FORWARD 0 (table) | FORWARD 1 (table) | REDUCE rows | FORWARD 2 (norm) | ...
 *     BACKWARD 2 (norm) | GATHER rows | BACKWARD 1 (table) | BACKWARD 0 (table) | ...
 *
 * The REDUCE of the unit that gave the rows is behind them on the gather stream, where it does not
 * wait for the last block's. EVALUATE gathers the table whole, as stage 3 does.
 *
 * The first `shared_count` buffers are the same in all programs of a run (same index): state that
 * lives on, and the carried ones.
 *
 * Everything here is world-uniform: sizes and order do not depend on the rank.
 */
#ifndef SHARD_PROGRAM_H
#define SHARD_PROGRAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/arena.h"
#include "engine/base/config.h"
#include "engine/base/tensor.h"

C_BEGIN

enum program_kind {
    PROGRAM_STEP,
    PROGRAM_PROLOGUE,
    PROGRAM_FLUSH,
    PROGRAM_EVALUATE,
    PROGRAM_KINDS
};

/* Streams an instruction is issued on; the same numbers as enum stream_id of the device. */
enum program_stream { ON_COMPUTE, ON_GATHER, ON_REDUCE, ON_UPDATE, PROGRAM_STREAMS };

enum program_op {
    OP_BEGIN,      /* take the step's state and batch from the host, empty the step report */
    OP_GATHER,     /* all-gather the shards of a flat parameter, or (stage 0) of its gradient; or
                      the ranks' rows of the gradient of a table's output */
    OP_FORWARD,    /* a unit on a micro-batch */
    OP_RECOMPUTE,  /* FORWARD again, to rebuild what BACKWARD needs */
    OP_BACKWARD,   /* a unit on a micro-batch */
    OP_REDUCE,     /* reduce-scatter a unit's gradient to the shard owners; or the rows of a table's
                      output to the ranks that they are of */
    OP_ACCUMULATE, /* add a reduced gradient to the shard of earlier micro-batches */
    OP_NORM,       /* squared norm of this rank's gradient shard of a unit, into the report */
    OP_AGREE,      /* all-gather the step report, decide */
    OP_UPDATE,     /* AdamW on this rank's part of a unit */
    OP_CLEAR,      /* no update is due: the state's skip is set (unit -1), gradients are zero */
    OP_COLLECT,    /* all-gather the logits of an evaluation micro-batch */
    OP_CUT,        /* border between captured pieces of a step: all streams join */
    PROGRAM_OPS
};

enum category {
    CATEGORY_PARAMETERS,
    CATEGORY_GRADIENTS,
    CATEGORY_MASTER, /* what the parameters leave of fp32 master weights: halves; of fp32 none */
    CATEGORY_ADAM_M,
    CATEGORY_ADAM_V,
    CATEGORY_IN_FLIGHT,   /* gathered parameters and rows, unreduced gradients, temporaries */
    CATEGORY_ACTIVATIONS, /* slots, their gradients, saved tensors */
    CATEGORY_WORKSPACE,   /* scratch of one instruction, and of the ops */
    CATEGORY_BATCH,       /* token ids and the like; step state and reports */
    CATEGORY_COUNT
};

enum role {
    ROLE_PARAM, /* what FORWARD and BACKWARD read: the whole flat parameter */
    ROLE_PARAM_TIED,
    ROLE_GRAD, /* the whole flat gradient */
    ROLE_GRAD_TIED,
    ROLE_SHARD, /* GATHER: what it gathers; UPDATE: the parameters it writes; FORWARD by rows */
    ROLE_GRAD_SHARD,
    ROLE_REDUCED, /* where REDUCE puts the sum */
    ROLE_MASTER,
    ROLE_ADAM_M,
    ROLE_ADAM_V,
    ROLE_ACT_IN,
    ROLE_ACT_OUT,
    ROLE_DACT_IN,
    ROLE_DACT_OUT,
    ROLE_ROWS, /* all ranks' ROLE_ACT_OUT or ROLE_DACT_OUT, end to end */
    ROLE_SAVED,
    ROLE_SCRATCH,
    ROLE_WORKSPACE,
    ROLE_BATCH,
    ROLE_STATE,
    ROLE_REPORT,
    ROLE_REPORTS,
    ROLE_COLLECTED,
    ROLE_COUNT
};

enum access { ACCESS_READ = 1, ACCESS_WRITE = 2, ACCESS_READ_WRITE = 3 };

struct operand {
    uint8_t role, access;
    bool slice; /* this rank's shard_numel elements of a whole flat buffer */
    int buffer;
};

enum { INSTR_MAX_OPERANDS = 16 };

/* The first shared buffers of every program. */
enum {
    SHARED_BATCH,
    SHARED_STATE,
    SHARED_REPORT,
    SHARED_REPORTS,
    SHARED_WORKSPACE,
    SHARED_UPDATE_WORKSPACE, /* of the update stream */
    SHARED_SIDE_WORKSPACE    /* of what BACKWARD runs beside itself */
};

enum instr_flag {
    FLAG_ADD = 1,      /* add to the gradient; otherwise overwrite (first writer of the step) */
    FLAG_ADD_TIED = 2, /* the same for the tied unit's gradient */
    FLAG_GRADIENT = 4, /* GATHER of a gradient (stage 0) */
    FLAG_TRAINING = 8, /* FORWARD keeps what BACKWARD needs */
    FLAG_ROWS = 16     /* REDUCE of the rows of a slot, GATHER of those of its gradient */
};

struct instr {
    enum program_op op;
    enum program_stream stream;
    int unit, micro_batch; /* -1: none */
    unsigned flags;
    int operand_count;
    struct operand operands[INSTR_MAX_OPERANDS];
    int wait[PROGRAM_STREAMS]; /* the latest instruction of each stream to wait for; -1: none */
};

struct buffer {
    enum category category;
    enum dtype dtype;
    int unit, micro_batch; /* -1: none */
    size_t bytes;          /* planned, a multiple of ARENA_ALIGN */
    int first, last;       /* instructions; a carried buffer lives [0, last] and [first, end] */
    bool persistent;       /* lives in all programs */
    bool carried;          /* in live_in and live_out */
    size_t offset;         /* in the arena, set by the account */
};

struct program {
    enum program_kind kind;
    struct instr *instrs; /* owned */
    size_t instr_capacity;
    int instr_count;
    struct buffer *buffers; /* owned */
    size_t buffer_capacity;
    int buffer_count, shared_count;
    int staging; /* the communicator's buffer (program_spec.staging_bytes); -1: none */
};

/* Bytes that a micro-batch of the planned length class needs. */
struct unit_bytes {
    size_t saved, forward_scratch, backward_scratch;
};

struct micro_bytes {
    const struct unit_bytes *units;
    const size_t *slots; /* activations; the last one is the logits */
};

struct program_unit {
    int64_t shard_numel;
    bool frozen;
    int act_in, act_out; /* slots; act_in -1: none; one unit reads a slot, but for in-place ones */
    int tied;            /* -1: none */
    bool backward_reads_params, backward_reads_input, recompute;
    bool by_rows; /* a part of a look-up table, no unit tied to it, that is moved by rows; all units
                     that write the slot are */
};

struct program_spec {
    const struct program_unit *units;
    int unit_count, slot_count;
    int zero_stage, world_size;
    int micro_batches; /* grad_accum */
    int prefetch;      /* units gathered ahead of use at stage 3, >= 0 */
    bool recompute;    /* blocks keep their input only */
    enum reduce_policy reduce;
    enum update_policy update; /* auto: plan_build() decides; late in a program on its own */
    enum dtype param_dtype;    /* fp32: the parameters are the master weights */
    struct micro_bytes train, evaluate;
    size_t batch_bytes, evaluate_batch_bytes, state_bytes, report_bytes, workspace_bytes;
    size_t update_workspace_bytes, side_workspace_bytes;
    size_t staging_bytes; /* memory of the communicator's own (comm/comm.h); 0: none */
};

/**
 * program_build() - the program of one kind.
 * @p: zero-initialised or released; owned by the caller.
 *
 * Return: ST_OK; ST_INVALID (stage, prefetch, micro-batches out of range; units whose slots or ties
 * are not a chain; a unit by rows that is no such table, or a part of one; per_step reduction at
 * stage 2 or 3, which would hold full gradients); ST_MEMORY.
 */
MUST_CHECK enum status program_build(struct program *p, enum program_kind kind,
                                     const struct program_spec *spec);
void program_release(struct program *p);

/** program_reduce_policy() - REDUCE_AUTO is per_step at stages 0-1, else per_micro_batch. */
enum reduce_policy program_reduce_policy(enum reduce_policy policy, int zero_stage);

/**
 * program_link() - fill in what each instruction waits for, from what it reads and writes.
 * @placed: buffers have offsets; the first use of a buffer then also waits for the last uses of
 * the buffers that had its memory before.
 *
 * Return: ST_OK; ST_MEMORY.
 */
MUST_CHECK enum status program_link(struct program *p, bool placed);

/** program_operand() - the operand of a role, or NULL. */
const struct operand *program_operand(const struct instr *in, enum role role);

/** program_whole() - of a collective: the buffer of all ranks' shares that it fills or sums up. */
const struct operand *program_whole(const struct instr *in);

const char *program_op_name(enum program_op op);
const char *program_stream_name(enum program_stream stream);
const char *category_name(enum category c); /* "parameters", "gradients", ... */

/** program_collective_bytes() - bytes a rank sends in a turn through GATHER or REDUCE (ring). */
int64_t program_collective_bytes(const struct program *p, enum program_op op, int world_size);

C_END

#endif
