#include "shard/memory_map.h"

#include <stdlib.h>
#include <string.h>

static int compare_places(const void *left, const void *right)
{
    size_t a = *(const size_t *)left, b = *(const size_t *)right;
    return a < b ? -1 : a > b;
}

enum status memory_map_init(struct memory_map *map, const struct memory_range *ranges, int count)
{
    enum status st = ST_OK;
    int distinct = 0;
    TRY_GOTO(st, out, mem_alloc(&map->places, sizeof *map->places * (2 * (size_t)count + 1)));
    for (int i = 0; i < count; i++) {
        ASSERT(ranges[i].begin < ranges[i].end);
        map->places[2 * i] = ranges[i].begin;
        map->places[2 * i + 1] = ranges[i].end;
    }
    qsort(map->places, 2 * (size_t)count, sizeof *map->places, compare_places);
    for (int i = 0; i < 2 * count; i++)
        if (i == 0 || map->places[i] != map->places[distinct - 1])
            map->places[distinct++] = map->places[i];
    map->place_count = distinct;
    map->leaves = 1;
    while (map->leaves < distinct)
        map->leaves *= 2;
    size_t bytes = sizeof *map->nodes * 2 * (size_t)map->leaves;
    TRY_GOTO(st, out, mem_alloc(&map->nodes, bytes));
    memset(map->nodes, 0xFF, bytes); /* all -1 */
out:
    if (st != ST_OK)
        memory_map_release(map);
    return st;
}

void memory_map_release(struct memory_map *map)
{
    mem_free(&map->places);
    mem_free(&map->nodes);
}

/* The node of the leaf that begins at a place. */
static int leaf_of(const struct memory_map *map, size_t place)
{
    const size_t *found =
        bsearch(&place, map->places, (size_t)map->place_count, sizeof *map->places, compare_places);
    ASSERT(found != NULL);
    return (int)(found - map->places) + map->leaves;
}

static void cover(struct memory_map *map, int node, enum program_stream stream, int instr)
{
    map->nodes[node].all[stream] = map->nodes[node].some[stream] = instr;
    map->visited++;
}

static void touch_parents(struct memory_map *map, int node, enum program_stream stream, int instr)
{
    for (int n = node / 2; n > 0; n /= 2, map->visited++)
        map->nodes[n].some[stream] = instr;
}

void memory_map_use(struct memory_map *map, struct memory_range range, enum program_stream stream,
                    int instr)
{
    int first = leaf_of(map, range.begin), end = leaf_of(map, range.end);
    for (int l = first, r = end; l < r; l /= 2, r /= 2) {
        if (l % 2 == 1)
            cover(map, l++, stream, instr);
        if (r % 2 == 1)
            cover(map, --r, stream, instr);
    }
    touch_parents(map, first, stream, instr);
    touch_parents(map, end - 1, stream, instr);
}

static void raise(struct memory_map *map, int last[PROGRAM_STREAMS],
                  const int other[PROGRAM_STREAMS])
{
    for (int s = 0; s < PROGRAM_STREAMS; s++)
        last[s] = other[s] > last[s] ? other[s] : last[s];
    map->visited++;
}

void memory_map_last(struct memory_map *map, struct memory_range range, int last[PROGRAM_STREAMS])
{
    int first = leaf_of(map, range.begin), end = leaf_of(map, range.end);
    for (int s = 0; s < PROGRAM_STREAMS; s++)
        last[s] = -1;
    for (int l = first, r = end; l < r; l /= 2, r /= 2) {
        if (l % 2 == 1)
            raise(map, last, map->nodes[l++].some);
        if (r % 2 == 1)
            raise(map, last, map->nodes[--r].some);
    }
    for (int n = first / 2; n > 0; n /= 2)
        raise(map, last, map->nodes[n].all);
    for (int n = (end - 1) / 2; n > 0; n /= 2)
        raise(map, last, map->nodes[n].all);
}
