/*
 * engine/ops/step.h - what changes from step to step, and what ranks tell each other once a step.
 *
 *     step_state    device memory, one a rank; read by ops through a pointer, so a captured step
 *                   can be replayed. BEGIN takes the first part from the host, AGREE writes the
 *                   second part after the backward pass and tells the host all of it.
 *     step_report   device memory; filled by the ops of one step, all-gathered by AGREE. Every
 *                   rank sums the reports in rank order, so all decide the same.
 */
#ifndef ENGINE_OPS_STEP_H
#define ENGINE_OPS_STEP_H

#include <stddef.h>
#include <stdint.h>

#include "engine/base/config.h"
#include "engine/base/status.h"

C_BEGIN

enum { STOP_SIGNAL = 1, STOP_EARLY = 2 }; /* bits of step_report.stop */

struct step_report {
    double loss_sum;     /* over this rank's sequences of the step */
    double squared_norm; /* of this rank's gradient shards */
    int64_t sequences;   /* that took part in loss_sum */
    int64_t tokens;
    int32_t finite; /* 1: no inf or nan in this rank's gradient shards */
    int32_t stop;   /* STOP_ bits this rank asks for */
    int32_t signal; /* the signal behind STOP_SIGNAL */
    int32_t step;   /* must be equal on all ranks */
    int64_t saved;  /* checkpoints whose part of this rank is written, failed ones included */
    int32_t blocks; /* CUDA: of squared_norm at hand, those that are done; 0 between ops */
    int32_t unused;
};

struct step_host { /* from the host, before each step */
    uint64_t seed;
    int64_t step;    /* counts steps, applied or not; dropout's counter */
    float inv_count; /* 1 / sequences of the global batch */
    int32_t stop, signal;
    int32_t training; /* 0 in evaluation: no dropout */
    int64_t tokens;   /* of this rank in this step */
    int64_t saved;    /* for the report */
};

struct step_state {
    struct step_host host;
    /* made by AGREE */
    int64_t t;                      /* applied optimizer steps, this one included */
    float lr;                       /* learning rate of this step */
    float clip;                     /* factor on gradients, <= 1 */
    float correction1, correction2; /* 1 - beta^t */
    int32_t skip;                   /* 1: a rank saw a non-finite gradient; UPDATE does nothing */
    int32_t stop, signal;           /* or of all ranks; the first signal in rank order */
    int32_t agreed;                 /* 0: the ranks' steps differ, a bug; the host gives up */
    double loss, grad_norm;         /* mean over the global batch; global norm before clipping */
    int64_t sequences, tokens;      /* of the global batch */
    int64_t saved;                  /* the least of all ranks */
    int64_t turn;                   /* times that AGREE has been here */
};

enum { STEP_SLOTS = 2 };

/*
 * Host memory that the device reaches, for the steps in flight, by turns: what BEGIN takes from the
 * host and AGREE tells it. A step that does both itself needs no copies before and behind it, and
 * nothing stands between one and the next. The host fills a slot before it issues the step, and
 * again when that step has ended.
 */
struct step_slot_mail {
    const struct step_host *host;
    const void *batch;
    struct step_state *told;
};

struct step_mail {
    struct step_slot_mail slot[STEP_SLOTS]; /* of steps that begin at an even state->turn; odd */
    void *batch;                            /* on the device */
    size_t batch_bytes;
};

struct optim_hyper {
    float lr, beta1, beta2, eps, weight_decay;
    float max_grad_norm; /* 0 = no clipping */
    int64_t warmup_steps, total_steps;
    enum schedule_kind schedule;
};

C_END

#endif
