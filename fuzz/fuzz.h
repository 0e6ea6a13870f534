/*
 * fuzz/fuzz.h - what the fuzz targets share.
 *
 * Each other fuzz/NAME.c is a target: LLVMFuzzerTestOneInput() takes any bytes and gives them to
 * one parser. `make fuzz` links each with libFuzzer and looks for bytes that crash it;
 * tests/fuzz_corpus.c runs all of them on the inputs in tests/data/fuzz/NAME, and on small changes
 * of these, in every build.
 *
 * A target may find: a crash, an assertion, a hang, a leak, a failure without a message.
 */
#ifndef FUZZ_FUZZ_H
#define FUZZ_FUZZ_H

#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

C_BEGIN

enum { FUZZ_PATH_BYTES = 512 };

/* The target; for tests/fuzz_corpus.c it is called fuzz_NAME (the Makefile sees to that). */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

/** fuzz_begin() - a target's first call: quiet log, no message, memory is counted from here. */
void fuzz_begin(void);

/** fuzz_end() - the last one: all memory was given back. Return: 0, what a target returns. */
int fuzz_end(void);

/** fuzz_result() - look at a status: a failure has a name and a message. Return: @st. */
enum status fuzz_result(enum status st);

/** fuzz_path() - "folder of this process/name" into @out; returns @out. The folder goes at exit. */
const char *fuzz_path(char out[FUZZ_PATH_BYTES], const char *name);

/** fuzz_put() - the same, and the file holds these bytes then. */
const char *fuzz_put(char out[FUZZ_PATH_BYTES], const char *name, const void *data, size_t bytes);

/** fuzz_take() - cut a number from the front of the input; 0 when it is used up. */
uint64_t fuzz_take(const uint8_t **data, size_t *bytes, size_t width);

C_END

#endif
