/*
 * shard/layout.h - which rank owns which elements.
 *
 * A unit's parameters lie end to end in a flat parameter, padded so that every rank owns an equal,
 * contiguous shard. Example: wq (5), wk (5), b (1) on 4 ranks, align 1; '.' is padding:
 *
 *     element   wq wq wq wq wq wk wk wk wk wk b  .
 *     rank      0  0  0  1  1  1  2  2  2  3  3  3     rank 1: segments wq[3..4], wk[0]
 *
 * Pure arithmetic: no communication, no device memory; safe from any thread. All ranks build it
 * from the same inputs and compare layout_fingerprint() once, at start.
 *
 * Sources: ZeRO, arXiv:1910.02054; FSDP, arXiv:2304.11277 (units).
 */
#ifndef SHARD_LAYOUT_H
#define SHARD_LAYOUT_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/status.h"

C_BEGIN

enum { LAYOUT_MAX_UNITS = 512, LAYOUT_ALIGN = 128 /* elements, whatever the dtype */ };

struct layout_param {
    const char *name;     /* borrowed; unique; the checkpoint key */
    int unit;             /* starts at 0, grows by 0 or 1 along the array */
    int64_t first, numel; /* elements of the unit's flat parameter; ascending, gaps allowed */
    bool decay, frozen;
};

struct layout_unit { /* elements; invariant: shard_numel * world_size == padded_numel */
    int first_param, param_count;
    int64_t numel, padded_numel, shard_numel;
    bool frozen; /* all parameters are */
};

struct layout {
    const struct layout_param *params; /* borrowed */
    int param_count, unit_count, world_size;
    struct layout_unit units[LAYOUT_MAX_UNITS];
};

/* The part of one parameter inside one shard. */
struct layout_segment {
    int param;           /* index into layout.params */
    int64_t param_first; /* element of the parameter */
    int64_t shard_first; /* element of the shard */
    int64_t numel;
};

/**
 * layout_build() - lay out the units for one world size.
 * @layout: output in caller's storage; borrows @params for its lifetime.
 * @params: @param_count entries in model order, grouped by unit.
 * @world_size: ranks that share each flat parameter, >= 1.
 * @align_numel: every shard is a multiple of this, >= 1.
 *
 * Return: ST_OK; ST_INVALID if a size is not positive or overflows, parameters overlap, units are
 * not grouped, or there are more than LAYOUT_MAX_UNITS; then @layout is unspecified.
 */
MUST_CHECK enum status layout_build(struct layout *layout, const struct layout_param *params,
                                    int param_count, int world_size, int64_t align_numel);

/**
 * layout_segments() - the segments of elements [first, first + numel) of a unit's flat parameter.
 * @out: room for the unit's param_count entries; shard_first counts from @first.
 *
 * A shard is the range (rank * shard_numel, shard_numel). Return: how many were written.
 */
int layout_segments(const struct layout *layout, int unit, int64_t first, int64_t numel,
                    struct layout_segment *out);

/** layout_fingerprint() - a hash that is equal on two ranks if their layouts are. */
uint64_t layout_fingerprint(const struct layout *layout);

C_END

#endif
