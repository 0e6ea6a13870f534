/*
 * engine/train/metrics.h - what a run tells people: console lines and the output folder.
 *
 *     metrics.jsonl, metrics.csv, tensorboard/    what happens step by step (metrics_log.h)
 *     summary.json                                the run as a whole, once, at its end
 *
 * Rank 0 alone has one of these. On a terminal the progress is one live line, otherwise plain lines
 * every output.log_every steps.
 */
#ifndef ENGINE_TRAIN_METRICS_H
#define ENGINE_TRAIN_METRICS_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/config.h"
#include "engine/ops/step.h"
#include "engine/train/executor.h"
#include "engine/train/metrics_log.h"
#include "engine/train/start_times.h"
#include "shard/account.h"

C_BEGIN

struct epoch_loss {
    double sum;
    int64_t steps;
};

/*
 * Memory of the card in bytes, as the driver says: each is what a part of the run added when it
 * came. The driver gives memory out in granules of 2 MiB; kernels are loaded when first used.
 */
struct card_memory {
    size_t context;      /* all that was taken when the device was opened, by others too */
    size_t library;      /* of engine/ops */
    size_t communicator; /* NCCL, and the kernels loaded while it connects the ranks */
    size_t arena;        /* the account's arena_bytes, in granules */
    size_t windows;      /* registering the arena with NCCL (comm/nccl.h) */
    size_t set_up;       /* rehearsal, weights: kernels that are loaded when first used */
    size_t graphs;       /* captured steps, and the kernels in them */
    size_t checkpoints;  /* a copy of the state for them, where there is room (snapshot.h) */
    size_t first_steps;  /* up to the end of step 2 */
    size_t later;        /* from there to the end of training */
    size_t all;
};

/* Without a card: what this process takes, as the system says (its resident set). */
struct process_memory {
    size_t before; /* bytes, when no rank had allocated anything yet */
    size_t grown;  /* from there to the end of training, by all ranks of this process */
    int ranks;     /* of this process */
};

enum { METRICS_MAX_EPOCHS = 4096 };

struct metrics {
    const struct run_config *config; /* borrowed */
    struct metrics_log log;
    bool terminal;
    int64_t total_steps, steps_per_epoch;
    double start_s, train_s; /* seconds: of the clock at the start; spent in training steps */
    int64_t steps, sequences, tokens, skipped;
    int world_size, zero_stage;
    double peak, flops; /* of one card a second, 0 if not known; of all ranks so far */
    double first_loss, last_loss;
    struct epoch_loss *epochs; /* owned; METRICS_MAX_EPOCHS */
    int64_t epoch_count;
    struct evaluation first_eval, last_eval, best_eval;
    bool has_eval;
    struct start_times start;      /* count is 0 where nobody asked */
    struct card_memory card;       /* all is 0 where there is no card */
    struct process_memory process; /* before is 0 where there is one */
    struct counted_memory counted; /* of rank 0 */
};

/** metrics_open() - create the output folder. What an earlier run left in it stays as it is until
 * metrics_plan(): a run that is refused at its start costs nothing. ST_IO; ST_MEMORY. */
MUST_CHECK enum status metrics_open(struct metrics *m, const struct run_config *config);

/* What a run will be. */
struct metrics_plan {
    int64_t total_steps, steps_per_epoch;
    int64_t first_step; /* steps done before; records of later ones, which will be done again, go */
    int world_size;
    const char *device;
    enum dtype dtype; /* of the matrix products */
    const struct account *account;
};

/** metrics_plan() - before the first step: write config.yaml, begin metrics.* anew; of a run that
 * goes on from a checkpoint they go on too. ST_IO; ST_MEMORY. */
MUST_CHECK enum status metrics_plan(struct metrics *m, const struct metrics_plan *plan);

/**
 * metrics_step() - one step's result.
 * @ms: since the one before. @flops: of the model, all ranks together.
 *
 * Return: ST_OK; ST_IO if it cannot be written.
 */
MUST_CHECK enum status metrics_step(struct metrics *m, const struct step_state *result, double ms,
                                    double flops);
/** metrics_evaluation() - one evaluation's result. ST_IO. */
MUST_CHECK enum status metrics_evaluation(struct metrics *m, const struct evaluation *e);

/** metrics_finish() - write summary.json, print the loss of the last epochs. ST_IO; ST_MEMORY. */
MUST_CHECK enum status metrics_finish(struct metrics *m, const struct account *account,
                                      int world_size, const char *device, const char *ended);
void metrics_close(struct metrics *m);

/** metric_value() - of an evaluation; larger is better, so a loss counts negative. */
double metric_value(enum stop_metric metric, const struct evaluation *e);

C_END

#endif
