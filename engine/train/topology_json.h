/*
 * engine/train/topology_json.h - topology.json of a run's output folder: rank 0's machine, for the
 * picture in a report.
 *
 *     {"objects":[[depth, kind, "node 0: 64 GiB of memory"], ...],     as tessera topo prints them
 *      "ranks":["cores 0-7 of node 0", ...]}                           of all machines
 *
 * kind is machine, package, group, node, cache, bridge, gpu or nic.
 */
#ifndef ENGINE_TRAIN_TOPOLOGY_JSON_H
#define ENGINE_TRAIN_TOPOLOGY_JSON_H

#include "engine/train/binding.h"

C_BEGIN

/**
 * topology_json_write() - into the folder @dir.
 * @ranks: bindings of all @count ranks.
 *
 * A machine that cannot be read is left out of the folder. Return: ST_OK; ST_IO; ST_MEMORY.
 */
MUST_CHECK enum status topology_json_write(const char *dir, const struct binding *ranks, int count);

C_END

#endif
