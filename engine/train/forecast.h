/*
 * engine/train/forecast.h - how long a step will take, before it runs.
 *
 * A step program (shard/program.h), what the model's units do (engine/base/work.h) and the rates of
 * a machine (engine/train/machine.h) go through simulate (shard/simulate.h). Nothing is allocated
 * on a device; a forecast takes well below a millisecond for each hundred instructions.
 */
#ifndef ENGINE_TRAIN_FORECAST_H
#define ENGINE_TRAIN_FORECAST_H

#include "engine/train/machine.h"
#include "engine/train/setup.h"

C_BEGIN

struct forecast {
    double seconds;            /* of a step (an optimizer update) */
    double compute_seconds;    /* in which FORWARD, BACKWARD, UPDATE and the like run */
    double collective_seconds; /* in which a collective runs */
    double exposed_seconds;    /* of which nothing else runs beside it */
};

/** forecast_batch() - a micro-batch as @setup plans it: its rows, in sequences of full length. */
struct batch_size forecast_batch(const struct setup *setup);

/**
 * forecast_step() - predict one step of one configuration.
 * @setup, @step: of one stage and world size; plan->programs[PROGRAM_STEP] of plan_build().
 * @world: @ranks is the setup's world size, spread over @nodes; {N, 1, 1} for one node.
 * @micro: what a micro-batch holds; forecast_batch(), or the mean of the data.
 *
 * Return: ST_OK; ST_INVALID (nodes do not divide the ranks, several nodes on a machine without
 * network); ST_MEMORY.
 */
MUST_CHECK enum status forecast_step(struct forecast *out, const struct setup *setup,
                                     const struct program *step, const struct machine *machine,
                                     struct simulate_world world, struct batch_size micro);

/** forecast_beside() - where collectives run beside the instructions of a step, as
 * simulate_beside() says it; otherwise as forecast_step(). @parts: one an instruction.
 *
 * Of what they cost others only the multiprocessors count that they hold: the rest is what products
 * lose that were not made for it. On 4 H200 the first eight of BERT-large's layers at 16 sequences
 * had gathers beside them at stage 1, and half of each backward a reduction. */
MUST_CHECK enum status forecast_beside(uint16_t *parts, const struct setup *setup,
                                       const struct program *step, const struct machine *machine,
                                       struct simulate_world world, struct batch_size micro);

/** forecast_check() - ST_INVALID for a world that @machine does not have. */
MUST_CHECK enum status forecast_check(const struct machine *machine, struct simulate_world world);

/**
 * forecast_rates() - the machine's rates for units that do @units (one a unit of the program).
 * @width, @head: channels of the model and of a head; with @micro they choose from the tables.
 */
struct simulate_rates forecast_rates(const struct machine *machine, const struct unit_work *units,
                                     double width, double head, struct batch_size micro);

C_END

#endif
