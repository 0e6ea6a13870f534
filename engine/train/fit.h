/*
 * engine/train/fit.h - which zero stages fit in the memory of a rank, and which is the fastest.
 *
 * A candidate is planned as a run would be (setup.h, shard/account.h), so "fits" is exact to the
 * byte: its arena is at most the room, and that of one more sequence a micro-batch is not. Nothing
 * is allocated for a model, however large it is.
 *
 * Room is what the memory of a rank leaves for its arena. Beside it stand what the libraries take
 * and, on the CPU, what else the rank allocates in host memory:
 *
 *     GPU    context, libraries, communicator with its connections, graphs: FIT_BESIDE_CARD
 *     CPU    program, libraries and data: FIT_BESIDE_PROCESS; copies of batches; with checkpoints
 *            the copy of the state that is written (12 bytes for each parameter of the shard)
 */
#ifndef ENGINE_TRAIN_FIT_H
#define ENGINE_TRAIN_FIT_H

#include "engine/train/forecast.h"

C_BEGIN

enum { FIT_STAGES = 4 };

/* Allowances for what cannot be planned. Cards: 1.5 to 1.9 GiB on H100 (bench/RESULTS.md, memory of
 * the card). */
#define FIT_BESIDE_CARD    ((size_t)2 << 30)
#define FIT_BESIDE_PROCESS ((size_t)128 << 20)
#define FIT_MEMORY_MAX     ((size_t)1 << 47) /* bytes; sizes above it are a mistake */

struct fit_question {
    const struct run_config *config; /* borrowed, as device; its ranks and stage do not count */
    const struct device *device;     /* also one of engine/ops/plan_device.h */
    int world_size;
    struct setup_rows rows; /* of the data, for its micro-batch; zeros: B * max_length */
    size_t room_bytes;
    const struct machine *machine; /* for step times; NULL: none */
    int nodes;                     /* that the ranks are spread over; only with a machine */
};

struct fit {
    int stage;
    bool allowed; /* by the configuration; else nothing below is set */
    bool fits;
    int64_t micro_batch;    /* that the rest is of; 1 if none fits */
    bool limited;           /* the configuration allows no larger one */
    struct account account; /* of the arena */
    int64_t sent_bytes;     /* by a rank in a step, through GATHER and REDUCE */
    double step_seconds;    /* predicted (forecast.h); 0: not predicted */
};

/**
 * fit_largest() - the largest micro-batch of one stage that fits.
 * @hint: where to look first, such as the answer for other ranks; 0: anywhere.
 *
 * Return: ST_OK, also if none fits; ST_INVALID, ST_MEMORY as setup_init() and plan_build().
 */
MUST_CHECK enum status fit_largest(struct fit *fit, const struct fit_question *q, int stage,
                                   int64_t hint);

/** fit_given() - whether the configuration's own micro-batch fits. Return: as fit_largest(). */
MUST_CHECK enum status fit_given(struct fit *fit, const struct fit_question *q, int stage);

/**
 * fit_fastest() - of those that fit, the one that trains most sequences a second.
 * @fits: by stage, lowest first.
 *
 * A higher stage must be faster by more than 0.1%. Without predictions it is the one whose rank
 * sends least for a sequence, then the one with the larger micro-batch. NULL: none fits.
 */
const struct fit *fit_fastest(const struct fit *fits, int count);

/** fit_copy_bytes() - of these, the copy for checkpoints; on GPUs it is the host's memory: 0. */
MUST_CHECK enum status fit_copy_bytes(size_t *bytes, const struct fit_question *q);

/** fit_beside_bytes() - what a rank needs beside its arena, as above. As setup_init(). */
MUST_CHECK enum status fit_beside_bytes(size_t *bytes, const struct fit_question *q);

C_END

#endif
