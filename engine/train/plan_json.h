/*
 * engine/train/plan_json.h - plan.json of a run's output folder: what lives when, in its step.
 *
 *     {"zero_stage":3,"world_size":4,"arena_bytes":N,
 *      "categories":["parameters", ...],"streams":["compute", ...],"units":["embeddings.0", ...],
 *      "instrs":[[stream, "FORWARD", unit, micro_batch], ...],
 *      "buffers":[[category, unit, micro_batch, bytes, offset, first, last, flags], ...]}
 *
 * category, stream and unit are places in the lists, -1 is none. A buffer lives from instruction
 * first to last; flags 1: always, 2: it is carried over the end of the step and lives up to last
 * and from first on. Buffers that the step does not touch are left out.
 */
#ifndef ENGINE_TRAIN_PLAN_JSON_H
#define ENGINE_TRAIN_PLAN_JSON_H

#include "engine/train/trainer.h"

C_BEGIN

/** plan_json_write() - of a trainer that is open. Return: ST_OK; ST_IO; ST_MEMORY. */
MUST_CHECK enum status plan_json_write(const struct trainer *t);

C_END

#endif
