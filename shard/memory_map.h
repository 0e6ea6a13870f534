/*
 * shard/memory_map.h - who used which memory last, by stream.
 *
 * A segment tree over the places where buffers begin and end:
 *
 *     places   0          256        1024       1280     leaf i: bytes from place i to place i + 1
 *              |  leaf 0  |  leaf 1  |  leaf 2  |
 *
 * Instructions come in their order, so the latest use is the greatest number: a use raises the
 * nodes that make up its range, a question is the greatest of the nodes of its own range and of
 * those above them. Both cost the logarithm of the number of places, however many buffers had that
 * memory.
 *
 * Pure arithmetic; safe from any thread.
 */
#ifndef SHARD_MEMORY_MAP_H
#define SHARD_MEMORY_MAP_H

#include "shard/program.h"

C_BEGIN

struct memory_range { /* bytes of the arena; not empty */
    size_t begin, end;
};

struct memory_node {
    int all[PROGRAM_STREAMS];  /* the last use that covers all of this node; -1: none */
    int some[PROGRAM_STREAMS]; /* the last use of any part of it */
};

struct memory_map { /* zero-initialise */
    size_t *places; /* owned; sorted */
    int place_count;
    int leaves;                /* a power of two */
    struct memory_node *nodes; /* owned; 1 is the root, the children of n are 2 n and 2 n + 1 */
    int64_t visited;           /* nodes that uses and questions looked at; for tests */
};

/** memory_map_init() - @ranges: all that will be used or asked for. ST_OK; ST_MEMORY. */
MUST_CHECK enum status memory_map_init(struct memory_map *map, const struct memory_range *ranges,
                                       int count);
void memory_map_release(struct memory_map *map);

/** memory_map_use() - @instr uses a range; no earlier call had a greater number. */
void memory_map_use(struct memory_map *map, struct memory_range range, enum program_stream stream,
                    int instr);

/** memory_map_last() - the last use of any of these bytes, by stream; -1: none. */
void memory_map_last(struct memory_map *map, struct memory_range range, int last[PROGRAM_STREAMS]);

C_END

#endif
