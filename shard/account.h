/*
 * shard/account.h - the memory of a run, to the byte, before it starts.
 *
 * All programs of a run share one arena: persistent buffers at the bottom, then the carried ones
 * and, above and between them, whatever lives at an instruction. Buffers whose lives do not meet
 * may share memory:
 *
 *     offset ^   [ saved 1 ][ gradient 1 ]
 *            |   [ saved 0    ][ grad 0 ]
 *            |   [ slot 1 ]         [ grad shard 0, 1        ]
 *            |   [ persistent: parameters, m, v              ]
 *            +---------------------------------------------> instruction
 *
 * Placement tries a few orders (by size, by size times life, by start), puts each buffer at the
 * lowest free offset, and keeps the best; of an order that loses it tries again with what came out
 * highest put first. The live peak is the lower bound; the rest is packing loss. The result is
 * world-uniform, so offsets are equal on all ranks.
 *
 * On one rank nothing is partitioned, and a higher stage needs more than a lower one: a gradient
 * shard beside the full gradient, reduce temporaries, at stage 3 gathered copies.
 */
#ifndef SHARD_ACCOUNT_H
#define SHARD_ACCOUNT_H

#include "shard/program.h"

C_BEGIN

/* The programs of one run, and what they need together. */
struct plan {
    struct program programs[PROGRAM_KINDS];
    bool late; /* an update is due after each step, until FLUSH */
};

struct account {
    size_t arena_bytes;      /* what to allocate */
    size_t persistent_bytes; /* of which: live in all programs */
    size_t live_peak_bytes;  /* most bytes live at one instruction */
    enum program_kind peak_program;
    int peak_instr;
    size_t at_peak[CATEGORY_COUNT]; /* adds up to live_peak_bytes */
    size_t own_max[CATEGORY_COUNT]; /* each category's own maximum, at whatever instruction */
};

/**
 * plan_build() - all programs of a run, placed and linked. With UPDATE_AUTO updates are late unless
 * the arena then is more than 1% larger. Errors as program_build().
 */
MUST_CHECK enum status plan_build(struct plan *plan, struct account *account,
                                  const struct program_spec *spec);
void plan_release(struct plan *plan);

/** plan_account() - what plan_build() says of the memory, faster: nothing is linked or kept. */
MUST_CHECK enum status plan_account(struct account *account, const struct program_spec *spec);

/** account_live() - bytes by category at one instruction; returns their sum. */
size_t account_live(const struct program *p, int instr, size_t bytes[CATEGORY_COUNT]);

/** buffer_live_at() - whether a buffer lives at an instruction. */
bool buffer_live_at(const struct buffer *buffer, int instr);

C_END

#endif
