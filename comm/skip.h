/*
 * comm/skip.h - a communicator whose collectives move nothing between ranks.
 *
 * What a step would take if links cost nothing: all_gather() copies this rank's part to the place
 * of every rank, reduce_scatter() takes this rank's part of its own input, both on the stream that
 * they are given. int32, which step reports travel as, is still gathered, so ranks stay in step.
 * Numbers stay finite and mean nothing. TESSERA_SKIP_COLLECTIVES=1 wraps a run's communicator.
 *
 * skip_beside() gives one that says nothing at all to the peers, which a rank can use before they
 * are connected.
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

/**
 * skip_beside() - one beside @comm, which is borrowed: int32, broadcasts and exchanges stay on this
 * rank too, as if all ranks had sent what it sends. Only comm_abort() reaches @comm.
 *
 * Return: ST_OK; ST_MEMORY.
 */
MUST_CHECK enum status skip_beside(struct comm **out, struct comm *comm);

C_END

#endif
