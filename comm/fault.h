/*
 * comm/fault.h - a communicator that breaks another one, for tests.
 *
 * It counts the collectives of its rank (all_gather, reduce_scatter, broadcast and exchange, so
 * barriers and agreements too) from 1, and does one thing to the planned one or to all of them.
 */
#ifndef COMM_FAULT_H
#define COMM_FAULT_H

#include "comm/comm.h"

C_BEGIN

enum fault_kind {
    FAULT_NONE,
    FAULT_FAIL,   /* ST_COMM on this rank, and the others are told: comm_abort() */
    FAULT_DELAY,  /* issued @delay_ms later: a slow rank */
    FAULT_DROP,   /* not issued; this rank believes that it is done, its output is as it was */
    FAULT_SILENT, /* this rank does nothing for twice the time-out or until comm_abort() on it */
    FAULT_CORRUPT /* waited for at once, then one bit of its output is flipped; host memory only */
};

struct fault_plan {
    enum fault_kind kind;
    int64_t at; /* which collective, from 1; 0: each of them */
    int64_t delay_ms;
};

/**
 * fault_comm_open() - break @inner by @plan.
 * @inner: owned from now on: closed with the new communicator, or by the caller if this fails.
 *
 * Return: ST_OK; ST_INVALID (a negative number in @plan); ST_MEMORY; ST_SYSTEM.
 */
MUST_CHECK enum status fault_comm_open(struct comm **out, struct comm *inner,
                                       struct fault_plan plan);

/** fault_count() - collectives that were asked of @comm so far, the broken ones included. */
int64_t fault_count(const struct comm *comm);

C_END

#endif
