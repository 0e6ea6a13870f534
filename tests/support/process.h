/*
 * tests/support/process.h - the program as people use it: a process, its exit code, what it prints.
 *
 * TESSERA in the environment names the program; ./tessera if it is not set.
 */
#ifndef TESTS_SUPPORT_PROCESS_H
#define TESTS_SUPPORT_PROCESS_H

#include <sys/types.h>

#include "tests/support/support.h"

C_BEGIN

enum { PROCESS_OUTPUT_BYTES = 1 << 16, PROCESS_DEADLINE_MS = 60000 };

struct process {
    pid_t pid;
    int code; /* exit code; 128 + signal if one ended it */
    char out[PROCESS_OUTPUT_BYTES], err[PROCESS_OUTPUT_BYTES]; /* the first bytes of both */
};

/**
 * process_start() - start the program.
 * @scratch: its output goes to "stdout" and "stderr" there.
 * @args: ends with NULL. @file_limit: bytes that a file may have; 0: any.
 * @out: where standard output goes instead; NULL: not.
 */
void process_start(struct process *p, const struct scratch *scratch, const char *const *args,
                   long file_limit, const char *out);

/** process_wait() - until it ends; fails the test after PROCESS_DEADLINE_MS. */
void process_wait(struct process *p, const struct scratch *scratch);

/** process_run() - start it and wait. */
void process_run(struct process *p, const struct scratch *scratch, const char *const *args);

/** process_expect() - fail unless it ended with @code and @out and @err are in its output; NULL:
 * any. */
void process_expect(const struct process *p, int code, const char *out, const char *err);

C_END

#endif
