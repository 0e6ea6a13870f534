/*
 * engine/train/executor.h - runs a step program on one rank's device and communicator.
 *
 * For each instruction: let its stream wait for the instructions it depends on, issue it, record an
 * event. Nothing here knows the zero stage; what happens, and in which memory, is in the program.
 *
 * Memory is one arena at the account's offsets. For the proofs of the account
 * (docs/architecture.md) it can instead be a heap, where every buffer is allocated at its first
 * instruction and freed after its last, or an arena in which ended buffers are filled with NaN.
 *
 * On CUDA a program can be captured: its pieces (between CUT instructions; the whole step when it
 * has one micro-batch) become graphs, one for each number of rows they meet, and executor_run()
 * replays what it has. A graph with collectives is itself a collective: all ranks capture and
 * replay the same pieces in the same order.
 *
 * One thread per rank. A failure inside a program aborts the communicator, so that no peer waits.
 */
#ifndef ENGINE_TRAIN_EXECUTOR_H
#define ENGINE_TRAIN_EXECUTOR_H

#include "comm/comm.h"
#include "engine/model/model.h"
#include "engine/train/trace.h"
#include "shard/account.h"
#include "shard/layout.h"

C_BEGIN

struct executor;

struct executor_options {
    bool overlap; /* false: every collective completes where it is issued */
    bool heap;    /* an allocation a buffer */
    bool poison;  /* fill a buffer with 0xFF when its life ends */
    /* Called when an instruction was issued, with the bytes that live then (heap: counted, not
     * planned). For tests; may be NULL. */
    void (*on_instr)(void *context, const struct program *p, int instr,
                     const size_t live[CATEGORY_COUNT]);
    void *context;
};

/* With a heap: the most bytes that lived at an instruction so far, what they were, and the most of
 * each category. */
struct counted_memory {
    size_t peak_bytes; /* 0: nothing was counted */
    size_t at_peak[CATEGORY_COUNT], own_max[CATEGORY_COUNT];
};

struct executor {
    struct device *device; /* all borrowed */
    struct comm *comm;
    const struct model *model;
    const struct layout *layout;
    const struct plan *plan;
    struct optim_hyper hyper;
    struct executor_options options;

    char *arena;                         /* owned device memory; NULL with a heap */
    size_t arena_bytes;                  /* allocated for it */
    void **shared;                       /* owned; addresses of the shared buffers */
    void **own[PROGRAM_KINDS];           /* owned; heap addresses of the others */
    struct event *events[PROGRAM_KINDS]; /* owned; one an instruction */
    int *last_use[PROGRAM_KINDS];        /* owned; per buffer and stream, -1: none */
    struct unit_ranges *ranges;          /* owned; per unit, for UPDATE */
    struct captured *captured;           /* owned; captured_count of them */
    size_t captured_count, captured_capacity;
    struct event fork;
    /* Borrowed; set around one executor_run() of the step, which it then times (and for which
     * captured pieces are captured again); else NULL. */
    struct trace *trace;
    /* Borrowed; set before a step is captured. NULL: who runs a step has put its state and batch on
     * the device, and takes the report from there. */
    const struct step_mail *mail;
    /* Borrowed; what is beside each instruction of the step (simulate_beside()); NULL: nothing. */
    const uint16_t *beside;
    struct event *hold; /* borrowed; executor_hold()'s; NULL: nobody reads the state */
    int micro_batches;  /* of a step */
    bool update_due;    /* late updates: the next turn's are not skipped */
    bool issue_all;     /* set around a run: what was captured is issued all the same */
    size_t live[CATEGORY_COUNT];
    struct counted_memory counted;
};

/**
 * executor_open() - allocate everything the programs of @plan need.
 * @ex: zero-initialised; executor_close() releases it, also after a failure.
 *
 * Return: ST_OK; ST_MEMORY or ST_DEVICE (does not fit); ST_INVALID (a unit with too many ranges of
 * weight decay).
 */
MUST_CHECK enum status executor_open(struct executor *ex, struct device *device, struct comm *comm,
                                     const struct model *model, const struct layout *layout,
                                     const struct plan *plan, const struct account *account,
                                     const struct optim_hyper *hyper,
                                     const struct executor_options *options);
void executor_close(struct executor *ex);

/**
 * executor_run() - issue one turn of a program.
 * @micro: one batch a micro-batch (device pointers); NULL for PROLOGUE and FLUSH.
 * @collected: EVALUATE: host memory for the logits of all ranks and their reports; else NULL.
 *
 * On return the compute stream is behind everything that was issued.
 */
struct collected {
    float *logits;               /* [world_size][collect_numel] */
    struct step_report *reports; /* [world_size] */
};
MUST_CHECK enum status executor_run(struct executor *ex, enum program_kind kind,
                                    const struct sequences *micro,
                                    const struct collected *collected);

/**
 * executor_capture() - capture the pieces of a program for the rows of @micro, if they are not yet.
 *
 * Nothing runs. All ranks call it with the same rows in the same order. Return: ST_OK;
 * ST_UNSUPPORTED on the CPU; ST_DEVICE, ST_COMM.
 */
MUST_CHECK enum status executor_capture(struct executor *ex, enum program_kind kind,
                                        const struct sequences *micro);

/**
 * executor_hold() - somebody reads master weights, m and v until @until, which is recorded: the
 * next updates that change them wait for it.
 *
 * Not those of the turn behind a PROLOGUE where updates are late, for they are skipped. What waits
 * is the piece that has them, on the device. @until: borrowed until then.
 */
void executor_hold(struct executor *ex, struct event *until);

/** executor_collect_numel() - floats that a rank contributes to collected.logits. */
int64_t executor_collect_numel(const struct executor *ex);

/** executor_shared() - device address of a shared buffer by its SHARED_ number. */
void *executor_shared(const struct executor *ex, int index);

/* This rank's shard of a unit's state, in device memory. */
struct shard_view {
    int64_t numel;
    float *adam_m, *adam_v;             /* fp32; NULL for a frozen unit */
    float *adam_m_whole, *adam_v_whole; /* replicated, or NULL */
    void *param_whole;   /* replicated parameters (param_dtype), or NULL: partitioned */
    void *param_shard;   /* this rank's slice of them, or the shard */
    float *master;       /* param_shard, if it is fp32; else NULL: it and these together */
    uint16_t *low;       /* the lower halves of master weights (engine/ops/master.h) */
    uint16_t *low_whole; /* replicated, or NULL */
};
struct shard_view executor_shard(const struct executor *ex, int unit);

/**
 * executor_copy_master() - copy master weights [first, first + count) of a shard.
 * @to: (count). Where view->low is there, it gets the halves as they lie, the lower ones first:
 *      master_join(), on the host, makes numbers of them (engine/ops/master.h).
 */
MUST_CHECK enum status executor_copy_master(struct stream *s, float *to,
                                            const struct shard_view *view, int64_t first,
                                            int64_t count);

C_END

#endif
