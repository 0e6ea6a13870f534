/*
 * tests/support/run.h - whole training runs of a tiny model, and what they leave behind.
 *
 * The data is made up: questions and contexts of the words w0, w1, ... of a vocabulary that is
 * written into the test's scratch folder with them. The sizes divide nothing evenly: three heads of
 * eight channels, 101 tokens, a split word table, batches of 3.
 *
 * A trace holds every step's agreed result on every rank and, put together from the ranks' shards,
 * the weights and moments at the end of the run.
 */
#ifndef TESTS_SUPPORT_RUN_H
#define TESTS_SUPPORT_RUN_H

#include <stdbool.h>

#include "comm/fault.h"
#include "engine/train/run.h"
#include "tests/support/support.h"

C_BEGIN

enum { RUN_RANKS = 8, RUN_STEPS = 256, RUN_UNITS = 64, RUN_VOCAB = 101 };

/* How a made-up file of questions looks. Tests give the first four by place. */
struct made_questions {
    int count;
    int min_words, max_words; /* of a context */
    int question_words;       /* of every question */
    int impossible_every;     /* every so many questions have no answer; 0: none */
    uint64_t seed;
};

/** run_make_data() - write "vocab.txt" with RUN_VOCAB tokens, and questions under @name. */
void run_make_data(const struct scratch *scratch, const char *name, struct made_questions q);

/** run_tiny() - a configuration for them: train.json, eval.json (if @eval) and vocab.txt there. */
void run_tiny(struct run_config *config, const struct scratch *scratch, bool eval);

/* What tests vary of it most; they set the rest in the configuration. */
struct tiny_run {
    int ranks, stage; /* ranks 0: one */
    int64_t accum;    /* 0: one micro-batch a step */
    int64_t steps;
    enum reduce_policy reduce;
    bool eval, version_2;
};

/** run_tiny_with() - the configuration of run_tiny() with these. */
struct run_config run_tiny_with(const struct scratch *scratch, struct tiny_run with);

/** run_planned() - a configuration to plan and not to run: three blocks of 96 channels, windows of
 * 64 tokens, a vocabulary of 1000. */
struct run_config run_planned(void);

/** run_set_up() - for a group's set-up: make the folder and, in it, train.json and eval.json.
 * @state: takes @scratch, for run_tear_down(); @eval: NULL: no such file. Return: 0.
 *
 * From then on hwloc does not look for PCI devices (HWLOC_COMPONENTS): ranks on the CPU need none,
 * and where the machine is virtual that takes longer than a short run. */
int run_set_up(void **state, struct scratch *scratch, const struct made_questions *train,
               const struct made_questions *eval);

/** run_tear_down() - the group's tear-down: remove that folder. Return: 0. */
int run_tear_down(void **state);

/** run_put_config() - write it as run.yaml there; returns the path (scratch_at()). */
const char *run_put_config(const struct scratch *scratch, const struct run_config *config);

/* What came out of a run. */
struct run_trace {
    enum status st;
    char message[1024];
    int world_size, unit_count, steps; /* steps: that the slowest rank came to */
    struct step_state step[RUN_RANKS][RUN_STEPS];
    int seen[RUN_RANKS]; /* steps of each rank */
    struct {
        int64_t numel, shard_numel; /* of the flat parameter without padding; of a shard */
        float *master, *m, *v;      /* owned; world_size shards end to end; m, v NULL: frozen */
        bool replicas_differ;       /* a rank's whole parameters are not these */
    } unit[RUN_UNITS];
    struct account account;
    bool not_collected; /* the recorder itself failed, at the end of training, and ended the run */
    double squared_norm[RUN_STEPS]; /* float64, from all ranks' gradient shards, if asked for */
};

/* How to run; zero is fine. */
struct run_how {
    struct executor_options executor; /* on_instr is called with the rank's trainer as context */
    const struct fault_plan *faults;  /* one a rank; NULL: none */
    const int *signal_flag;
    bool loud;           /* with metrics and the output folder */
    bool gradient_norms; /* fill squared_norm */
    /* On the rank's thread, before the first program and when training is over. */
    void (*at_start)(void *context, struct trainer *t);
    void (*at_end)(void *context, struct trainer *t);
    void *context;
};

/** run_go() - load the data and train; the trace tells how it ended. Release it. */
void run_go(struct run_trace *trace, const struct run_config *config, const struct run_how *how);

/** run_ok() - the same; a failed run fails the test. */
void run_ok(struct run_trace *trace, const struct run_config *config, const struct run_how *how);
void run_release(struct run_trace *trace);

/** run_put_weights() - start a rank from the weights of a trace of the same model; in at_start. */
void run_put_weights(struct trainer *t, const struct run_trace *trace);

/** run_read() - a file of the run's output folder; mem_free(&text->data). Fails the test if it is
 * not there. */
void run_read(struct file_text *text, const struct run_config *config, const char *name);

/** run_same() - same steps and loss, norm, lr, weights, m and v to the bit; fails the test if not.
 * @what: stands in the message. */
void run_same(const struct run_trace *a, const struct run_trace *b, const char *what);

/** run_same_steps() - the same, for the results of steps only. */
void run_same_steps(const struct run_trace *a, const struct run_trace *b, const char *what);

/** run_close() - the largest difference of losses and the mean difference of weights are at most
 * these. Not the largest of weights: where a gradient is rounding noise (the key bias of attention)
 * AdamW makes full steps of it. */
void run_close(const struct run_trace *a, const struct run_trace *b, double loss_band,
               double weight_band, const char *what);

C_END

#endif
