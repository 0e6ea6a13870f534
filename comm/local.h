/*
 * comm/local.h - ranks as threads of one process. See comm.h.
 *
 * A world holds a ring of collectives in flight. A rank that issues one posts its buffers and goes
 * on; it copies or sums from its peers' buffers when it waits for the event, in issue order, and
 * then says that it has read them. Waiting blocks (no spinning): ranks may outnumber cores.
 */
#ifndef COMM_LOCAL_H
#define COMM_LOCAL_H

#include "comm/comm.h"

C_BEGIN

struct local_world;

/** local_world_open() - shared by @world_size (1 to 1024) threads; close it after they end.
 * Return: ST_OK; ST_INVALID (another size, @timeout_ms below 1); ST_MEMORY; ST_SYSTEM. */
MUST_CHECK enum status local_world_open(struct local_world **out, int world_size,
                                        int64_t timeout_ms);
void local_world_close(struct local_world **world);

/** local_comm_open() - the communicator of one rank; called in that rank's thread. Return: ST_OK;
 * ST_INVALID (no such rank, or opened before); ST_MEMORY. */
MUST_CHECK enum status local_comm_open(struct comm **out, struct local_world *world, int rank);

C_END

#endif
