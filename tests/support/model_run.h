/*
 * tests/support/model_run.h - a whole model on one device, without shards and step program.
 *
 * Every buffer exists for itself and all the time: parameters, gradients and saved of each unit,
 * activations and their gradients of each slot. What a unit says it does not read is not given to
 * it, and what it must write is NaN before: a wrong declaration shows.
 */
#ifndef TESTS_SUPPORT_MODEL_RUN_H
#define TESTS_SUPPORT_MODEL_RUN_H

#include "engine/model/model.h"

C_BEGIN

/* A micro-batch on the device. */
struct run_batch {
    struct sequences q;
    struct device *device; /* borrowed */
    void *memory;          /* owned, device */
};

/* What a batch is made of; host memory. */
struct run_batch_source {
    int32_t count;
    const int32_t *lengths;      /* [count] rows of each sequence */
    const int32_t *kv_len;       /* [count], or NULL: all rows */
    const int32_t *token, *type; /* rows of all sequences, one after the other */
    const int32_t *start, *end;  /* [count] */
    int64_t rows;                /* T, at least the sum of lengths */
    int32_t positions;           /* P */
};

void run_batch_open(struct run_batch *b, struct device *device,
                    const struct run_batch_source *source);
void run_batch_release(struct run_batch *b);

struct model_run {
    struct device *device; /* owned */
    struct stream *stream; /* of device */
    void *workspace;       /* owned, device */
    struct model model;
    struct micro_dims dims; /* largest micro-batch */
    struct unit_buffers {
        float *master;        /* owned, device; fp32 */
        void *params;         /* param_dtype; master itself when that is fp32, else owned */
        float *grads, *m, *v; /* owned, device */
        void *saved;          /* owned, device */
        void *forward_scratch, *backward_scratch; /* owned, device; exactly as large as declared */
    } * units;                                    /* owned */
    struct slot_buffers {
        void *act, *dact;       /* owned, device */
    } * slots;                  /* owned */
    struct step_state *state;   /* owned, device */
    struct step_report *report; /* owned, device */
    struct step_host host;      /* what the next forward puts in state */
    bool recompute;             /* before BACKWARD, of the units that allow it */
};

/** model_run_open() - a model with zero parameters, on a device of one thread. */
void model_run_open(struct model_run *r, const struct run_config *config, struct micro_dims dims);
void model_run_release(struct model_run *r);

/** model_run_init() - random initial parameters. */
void model_run_init(struct model_run *r, uint64_t seed);

/** model_run_put_tensor() - give a tensor (Hugging Face's) its values, wherever its pieces lie. */
void model_run_put_tensor(struct model_run *r, const char *name, const float *values);

enum run_kind { RUN_MASTER, RUN_GRAD };

/** model_run_get_tensor() - collect a tensor, or its gradient, from its pieces. */
void model_run_get_tensor(struct model_run *r, enum run_kind kind, const char *name, float *values);

/** model_run_forward() - begins the report too. @training: dropout, and gradients can follow. */
void model_run_forward(struct model_run *r, const struct run_batch *b, bool training);

/** model_run_backward() - of the micro-batch that was forward last. */
void model_run_backward(struct model_run *r, const struct run_batch *b, bool add);

/** model_run_update() - norm, AGREE of one rank, AdamW of every unit; then host.step grows. */
void model_run_update(struct model_run *r, const struct optim_hyper *hyper);

struct step_state model_run_state(struct model_run *r);
struct step_report model_run_report(struct model_run *r);

/** model_run_read() - copy device memory, of param_dtype or fp32, to the host. */
void model_run_read(struct model_run *r, float *out, const void *memory, enum dtype dtype,
                    int64_t count);

C_END

#endif
