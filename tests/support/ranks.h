/*
 * tests/support/ranks.h - run a function on all ranks of a local world, each in its thread.
 *
 * cmocka's assertions may only be used in the test's own thread. A rank returns a status instead;
 * RANK_CHECK() makes a false condition one.
 */
#ifndef TESTS_SUPPORT_RANKS_H
#define TESTS_SUPPORT_RANKS_H

#include "comm/comm.h"
#include "comm/fault.h"

C_BEGIN

enum { RANKS_MAX = 16 };

struct ranks {
    int world_size;
    int64_t timeout_ms;
    const struct fault_plan *plan; /* borrowed, one a rank; NULL: no faults */
    enum status (*body)(struct comm *comm, void *argument);
    void *argument;
    /* What came out. */
    enum status st[RANKS_MAX];
    char message[RANKS_MAX][1024];
    int64_t ms; /* from the first start to the last end */
};

/** ranks_run() - run the body on all ranks; a rank whose RANK_CHECK fails aborts the others. */
void ranks_run(struct ranks *ranks);

/** ranks_run_ok() - the same for a body without a fault; fails the test if a rank fails. */
void ranks_run_ok(int world_size, enum status (*body)(struct comm *comm, void *argument),
                  void *argument);

/** ranks_assert() - rank @rank ended with @st, and its message has @text. */
void ranks_assert(const struct ranks *ranks, int rank, enum status st, const char *text);

/** finish() - what waiting for an event does on the CPU. */
MUST_CHECK enum status finish(struct event *e);

/** sleep_ms() - clock_pause_us(), in milliseconds. */
void sleep_ms(int64_t ms);

C_END

#define RANK_CHECK(cond)                                                                           \
    do {                                                                                           \
        if (!(cond))                                                                               \
            return FAIL(CORRUPT, "check failed on rank %d: %s", comm->rank, #cond);                \
    } while (0)

#endif
