/*
 * engine/train/trainer.h - one rank's training run.
 *
 * The host issues step k, then looks at the report of step k - 1. All ranks see the same reports
 * and so take the same branch at the same step: stop on a signal that one rank received, give up
 * on non-finite steps. An evaluation or a save drains the pending report first; that training stops
 * early is said right behind the evaluation that shows it.
 *
 *     issue 0 | issue 1, act on 0 | issue 2, act on 1 | act on 2, FLUSH, evaluate, PROLOGUE | ...
 */
#ifndef ENGINE_TRAIN_TRAINER_H
#define ENGINE_TRAIN_TRAINER_H

#include "engine/ops/gemm_table.h"
#include "engine/train/executor.h"
#include "engine/train/metrics.h"
#include "engine/train/op_profile.h"
#include "engine/train/run_data.h"
#include "engine/train/sampler.h"
#include "engine/train/setup.h"
#include "engine/train/start_times.h"

C_BEGIN

enum { STAGE_REASON_BYTES = 512 };
enum { NON_FINITE_LIMIT = 20 /* skipped steps in a row before giving up */ };

/* Host memory of a step in flight. */
struct step_slot {
    struct step_host *host;    /* pinned */
    char *block;               /* pinned; index arrays of all micro-batches */
    struct step_state *result; /* pinned */
    struct event done;
    int64_t step;    /* -1: nothing in flight */
    double flops;    /* of the model in this step, all ranks together */
    double issued_s; /* when all of it had been issued */
};

struct trainer {
    const struct run_config *config; /* borrowed, as data, device, comm and metrics */
    const struct run_data *data;
    struct device *device;
    struct comm *comm;
    struct metrics *metrics;   /* rank 0's; NULL on the others */
    struct start_times *start; /* borrowed, or NULL; set before trainer_open() */
    bool says_bus;             /* as bus_report() does; set before it too, the same on all ranks */
    struct setup setup;
    struct plan plan;
    struct account account;
    struct executor executor;
    struct sampler sampler;
    struct step_slot slots[STEP_SLOTS];    /* trainer_slot() */
    struct step_mail mail;                 /* the slots' memory */
    struct sequences *micro;               /* owned; grad_accum */
    int32_t *picked, *sort_scratch;        /* owned */
    struct evaluator *evaluator;           /* owned */
    char stage_reason[STAGE_REASON_BYTES]; /* train.zero_stage auto: why this one; else "" */
    int64_t total_steps;
    bool resumed;       /* from a checkpoint */
    int64_t first_step; /* that this run does: 0, or where the checkpoint stood */
    int64_t steps_done; /* whose report was seen, those before the checkpoint included */
    int64_t applied;    /* of these, not skipped: AdamW's t */
    struct card_memory card;
    uint16_t *beside;            /* owned; what runs beside a step's instructions, or NULL */
    struct gemm_table gemm_plan; /* owned; engine/train/products.h; no card: there is none */
    struct trace *trace;         /* owned; NULL: no step is traced */
    const char *trace_path;
    int64_t trace_step;         /* counted from 0 */
    struct op_profile *profile; /* owned; NULL: no step is profiled */
    int64_t profile_steps;      /* how many */
    double *squared;            /* owned; grad_accum; see op_profile_begin() */
    bool no_update;             /* the next step has late updates, and none is due */
    int skipped_in_row;
    /* What somebody does around each step, on every rank's thread; NULL: nothing. Before it is
     * issued, and when its report is there; that may set bits of `stop`, on all ranks the same. */
    void (*before_step)(void *context, struct trainer *t, int64_t step);
    void (*after_step)(void *context, struct trainer *t, const struct step_state *result);
    void *step_context;     /* borrowed */
    const int *signal_flag; /* borrowed, may be NULL: trainer_run()'s */
    int stop;               /* STOP_ bits that all ranks agreed on */
    int signal;
    double best_metric;
    int64_t evaluations_without_gain;
    char model_dir[1200];              /* save it from the last evaluation on; "": not then */
    struct weights_writing *writing;   /* owned; that save, under way */
    bool evaluation_pending;           /* due after the last step, and not done yet */
    struct checkpointer *checkpointer; /* owned; NULL: none is written */
    int64_t best_step;                 /* of the best checkpoint; -1: none */
    double best_value;
};

/**
 * trainer_open() - plan, allocate and initialise everything for this rank.
 * @t: zero-initialised; trainer_close() releases it, also after a failure.
 *
 * Ranks compare layouts and configurations; a difference is ST_INVALID on all.
 */
MUST_CHECK enum status trainer_open(struct trainer *t, const struct run_config *config,
                                    const struct run_data *data, struct device *device,
                                    struct comm *comm, struct metrics *metrics,
                                    const struct executor_options *options);
void trainer_close(struct trainer *t);

/**
 * trainer_run() - evaluations and steps as the configuration says, up to the end or a stop.
 * @signal_flag: number of a caught signal, 0 while there is none; may be NULL.
 *
 * Return: ST_OK (also after an early stop); ST_INTERRUPTED after a signal, state as of the last
 * step; ST_INVALID after NON_FINITE_LIMIT skipped steps in a row; errors of the parts.
 */
MUST_CHECK enum status trainer_run(struct trainer *t, const int *signal_flag);

/**
 * trainer_trace() - before trainer_run(): write a time line of one step (engine/train/trace.h).
 * That step begins on an idle device and the host waits for its end. Results stay as they are.
 *
 * Return: ST_OK, also when nothing is asked for; ST_INVALID without training steps; ST_IO if the
 * file's folder cannot be made or written in.
 */
MUST_CHECK enum status trainer_trace(struct trainer *t, const struct trace_request *request);

/**
 * trainer_profile() - before trainer_run(): profile @steps steps op by op
 * (engine/train/op_profile.h), from the third on, or as late as they fit. They begin on an idle
 * device and the host waits for their end. Results stay as they are. All ranks profile;
 * trainer->profile has what was found.
 *
 * Return: ST_OK, also with @steps 0; ST_INVALID without training steps; errors of measuring.
 */
MUST_CHECK enum status trainer_profile(struct trainer *t, int64_t steps);

/** trainer_slot() - of step @step, which this run does: by turns from its first one on. */
static inline struct step_slot *trainer_slot(struct trainer *t, int64_t step)
{
    return &t->slots[(step - t->first_step) % STEP_SLOTS];
}

/** trainer_watch_gain() - stop early if too many evaluations were without gain. */
void trainer_watch_gain(struct trainer *t);

/** trainer_total_steps() - optimizer steps that a configuration asks for, with @samples samples. */
int64_t trainer_total_steps(const struct run_config *config, int64_t samples, int world_size);

/**
 * trainer_rows() - of the batches of a run of @steps steps; at least 1 of each kind.
 * @sampler: of the training data; without any it is not looked at. Forgets the step at hand.
 */
void trainer_rows(struct setup_rows *rows, const struct run_config *config,
                  const struct run_data *data, struct sampler *sampler, int64_t steps);

C_END

#endif
