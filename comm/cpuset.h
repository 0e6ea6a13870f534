/*
 * comm/cpuset.h - a set of the system's CPUs (hardware threads), by the numbers it gives them.
 *
 * Written as people and taskset write it: "0-7,16-23". Plain memory: sets may be copied, compared
 * with memcmp() and sent to other ranks. No allocation; safe from any thread.
 */
#ifndef COMM_CPUSET_H
#define COMM_CPUSET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

C_BEGIN

enum { CPUSET_MAX = 4096, CPUSET_WORDS = CPUSET_MAX / 64, CPUSET_TEXT_BYTES = 160 };

/* CPU c is bit c % 64 of word c / 64, as the kernel wants it on little-endian machines. */
struct cpuset {
    uint64_t word[CPUSET_WORDS];
};

void cpuset_add(struct cpuset *set, int cpu); /* a number that does not fit is left out */
bool cpuset_has(const struct cpuset *set, int cpu);
int cpuset_count(const struct cpuset *set);
bool cpuset_equal(const struct cpuset *a, const struct cpuset *b);
bool cpuset_meets(const struct cpuset *a, const struct cpuset *b);    /* a CPU is in both */
bool cpuset_contains(const struct cpuset *a, const struct cpuset *b); /* all of b is in a */

/** cpuset_format() - "0-7,16-23"; "none"; what does not fit ends in "...". */
void cpuset_format(const struct cpuset *set, char *out, size_t bytes);

/** cpuset_parse() - false if @text is no list like that, or names no CPU. */
bool cpuset_parse(struct cpuset *set, const char *text);

C_END

#endif
