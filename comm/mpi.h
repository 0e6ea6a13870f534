/*
 * comm/mpi.h - one process a rank, collectives by MPI. See comm.h. Builds with MPI only.
 *
 * The processes are started by mpiexec or srun. One thread a rank makes all MPI calls
 * (MPI_THREAD_FUNNELED), all of them nonblocking:
 *
 *     issue          into the queue of its stream        each stream has a communicator of its own
 *     comm_progress  starts what is first in its queue,  MPI moves data only inside its calls, so
 *                    tests what was started              the executor comes by between operations
 *     wait           the same until the collective and all before it are complete
 *
 * A stream's next collective may read what the one before wrote, so it starts when that one is
 * complete; streams do not wait for each other. As every rank starts the collectives of a stream in
 * the same order, which is all that MPI asks for, ranks cannot wait in a circle.
 *
 * Sums: reduce_scatter is an all-to-all of the slices into the staging memory and then a sum in
 * rank order, which gives the bits of comm/local. There is one staging, lent with comm_stage(): the
 * next reduce_scatter starts when the one before has been summed. That one had all of a unit's
 * BACKWARD to arrive in; if it has not, the network is the slower part, and a second staging of the
 * largest unit's size would only move the wait.
 *
 * Failure: an error of MPI, a passed deadline and comm_abort() make the communicator dead. Closing
 * a dead one prints the cause and calls MPI_Abort(), on which mpiexec ends the other ranks; it does
 * not return. A process that dies is noticed by mpiexec itself. When a deadline passes, the ranks
 * are called by number: those that are not inside a wait do not answer and are named.
 */
#ifndef COMM_MPI_H
#define COMM_MPI_H

#include <stdint.h>

#include "comm/comm.h"

C_BEGIN

struct mpi_options {
    int rank, world_size; /* what the launcher says; MPI must agree */
    int64_t timeout_ms;
    int64_t count_limit; /* elements that one count of MPI's may say; 0: INT_MAX. For tests. */
};

/**
 * mpi_comm_open() - initialise MPI, if the process has not, and join all ranks. All ranks call it.
 *
 * MPI can be initialised once in a process: so this is called once, unless the caller has
 * initialised MPI himself and will finalise it.
 *
 * Return: ST_OK; ST_COMM (MPI's words, or it sees other ranks than the launcher started);
 * ST_UNSUPPORTED (an MPI without MPI_THREAD_FUNNELED); ST_MEMORY.
 */
MUST_CHECK enum status mpi_comm_open(struct comm **out, const struct mpi_options *options);

C_END

#endif
