/*
 * tests/support/mpi.h - programs under mpiexec, on this machine, with more ranks than cores.
 */
#ifndef TESTS_SUPPORT_MPI_H
#define TESTS_SUPPORT_MPI_H

#include <stdbool.h>
#include <sys/types.h>

#include "tests/support/support.h"

C_BEGIN

enum { JOB_ARGS = 32, JOB_OUTPUT_BYTES = 1 << 16 };

struct job {
    pid_t pid;
    int64_t begun_ms;
    char path[512]; /* of the file with what it prints */
    int code;       /* exit code; 128 + signal if one ended it */
    int64_t ms;
    char output[JOB_OUTPUT_BYTES]; /* both streams, the first bytes */
};

/** mpi_there() - this program is built with MPI and mpiexec is in the path. */
bool mpi_there(void);

/** mpi_skip_without() - end the test as skipped unless mpi_there(). */
void mpi_skip_without(void);

/** job_start() - start @argv (ends with NULL); @ranks times under mpiexec, or as it is if 0. */
void job_start(struct job *job, const struct scratch *scratch, int ranks, const char *const *argv);

/** job_wait() - wait for its end; a job that takes a minute is killed and fails the test. */
void job_wait(struct job *job);

/** job_expect() - fails the test unless the exit code is 0, or is not, and it printed @text (may be
 * NULL). */
void job_expect(const struct job *job, bool success, const char *text);

C_END

#endif
