/*
 * engine/train/stage_plans.h - what `tessera plan` prints: one configuration's memory, and where a
 * machine's rates are known its times, at every stage.
 */
#ifndef ENGINE_TRAIN_STAGE_PLANS_H
#define ENGINE_TRAIN_STAGE_PLANS_H

#include "engine/train/machine.h"

C_BEGIN

/* What the plan is for. */
struct plan_target {
    enum device_kind device; /* not auto */
    bool timed;              /* there is a profile of a machine, and so a forecast of each stage */
    struct machine machine;
    int nodes;
};

/* How it is asked for. */
struct stage_plans_options {
    bool json;         /* one object in place of a table */
    bool show_program; /* the instructions of config.train.zero_stage, behind the table */
    bool from_data;    /* for the longest batch of the data, and the mean of this run's batches */
};

/**
 * stage_plans_print() - compute and print it.
 *
 * Return: ST_OK; ST_INVALID, ST_IO (the data), ST_MEMORY.
 */
MUST_CHECK enum status stage_plans_print(const struct run_config *config,
                                         const struct plan_target *target,
                                         struct stage_plans_options options);

C_END

#endif
