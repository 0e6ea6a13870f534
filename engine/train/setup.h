/*
 * engine/train/setup.h - from a configuration to a model, its layout, and the plan of a run.
 *
 * The same code serves training and `tessera plan`: only where the rows come from differs (from the
 * data, or micro_batch * max_length).
 */
#ifndef ENGINE_TRAIN_SETUP_H
#define ENGINE_TRAIN_SETUP_H

#include "engine/model/model.h"
#include "engine/train/batch.h"
#include "shard/account.h"
#include "shard/deal.h"
#include "shard/layout.h"

C_BEGIN

/* Rows of a rank's micro-batches; 0: micro_batch * max_length. */
struct setup_rows {
    int64_t train, eval; /* of the fullest */
    double train_mean;   /* over all the data, however many steps there are; 0: as train */
};

struct setup {
    struct model model;
    struct layout layout;
    struct layout_param *params; /* owned */
    struct batch_layout train_batch, eval_batch;
    struct program_spec spec;
    struct program_unit *units;                  /* owned */
    struct unit_bytes *train_bytes, *eval_bytes; /* owned */
    size_t *train_slots, *eval_slots;            /* owned */
};

/**
 * setup_init() - build all of it for one world size.
 * @device: gives dtype and workspace; nothing is allocated on it.
 * @rows: the fullest give the memory, the mean decides how tables move.
 * @config: train.comm is what runs (not auto, where MPI does): its staging is in the plan.
 * @zero_stage: overrides the configuration's (plan asks for all four).
 *
 * Return: ST_OK; ST_INVALID; ST_MEMORY.
 */
MUST_CHECK enum status setup_init(struct setup *s, const struct run_config *config,
                                  const struct device *device, int world_size, int zero_stage,
                                  struct setup_rows rows);
void setup_release(struct setup *s);

/**
 * setup_layout() - where the shards of a model lie, for one world size.
 * @params: mem_free(*params), also after a failure; @layout borrows it. Return: as setup_init().
 */
MUST_CHECK enum status setup_layout(struct layout *layout, struct layout_param **params,
                                    const struct model *m, int world_size);

C_END

#endif
