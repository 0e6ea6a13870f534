/*
 * tests/support/program_order.h - whether a program's waits order every pair of accesses that must
 * not meet. Derived from the bytes that instructions touch, not from how the program was linked.
 */
#ifndef TESTS_SUPPORT_PROGRAM_ORDER_H
#define TESTS_SUPPORT_PROGRAM_ORDER_H

#include "shard/program.h"

C_BEGIN

enum order_rule {
    /* Streams run side by side, each in its order; a wait is for one instruction. */
    ORDER_STREAMS,
    /* One thread runs all but the collectives at once; a collective runs from its instruction to
     * the first wait for it or for a later collective. */
    ORDER_THREAD
};

/**
 * program_first_race() - the first instruction that may meet an earlier one in memory.
 * @placed: conflicts are overlapping bytes of the arena; otherwise the same buffer.
 * @with: output, the earlier one.
 *
 * Return: -1 if there is none.
 */
int program_first_race(const struct program *p, enum order_rule rule, bool placed, int *with);

/** program_refill() - where a carried buffer is overwritten for the next turn; INT_MAX: nowhere. */
int program_refill(const struct program *p, int buffer);

/** program_life_end() - the last instruction in a buffer's life: its last use or, if that is a
 * REDUCE, the next BACKWARD (with those of look-up tables behind it) or FORWARD of the middle unit.
 * Of a carried buffer it is the last use before its refill, in a flush the end. -1: none. */
int program_life_end(const struct program *p, int buffer, int unit_count);

C_END

#endif
