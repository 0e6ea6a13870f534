/*
 * comm/skip.h - a communicator whose collectives move nothing between ranks, for benches.
 *
 * What a step would take if links cost nothing: all_gather() copies this rank's part to the place
 * of every rank, reduce_scatter() takes this rank's part of its own input, both on the stream that
 * they are given. int32, which step reports travel as, is still gathered, so ranks stay in step.
 * Numbers stay finite and mean nothing. TESSERA_SKIP_COLLECTIVES=1 wraps a run's communicator.
 */
#ifndef COMM_SKIP_H
#define COMM_SKIP_H

#include "comm/comm.h"

C_BEGIN

/**
 * skip_open() - put one around @comm, which is owned by it from then on.
 *
 * Return: ST_OK; ST_MEMORY, and @comm stays as it is.
 */
MUST_CHECK enum status skip_open(struct comm **comm);

C_END

#endif
