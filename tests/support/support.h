/*
 * tests/support/support.h - what many test programs need: cmocka, statuses, seeds, scratch folders.
 *
 * Linked into every test. Include it instead of cmocka.h, which wants other headers before it.
 */
#ifndef TESTS_SUPPORT_SUPPORT_H
#define TESTS_SUPPORT_SUPPORT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine/base/status.h"

C_BEGIN

/* The call succeeds; if not, its message is shown. */
#define assert_ok(call) assert_status_is((call), ST_OK, #call, __FILE__, __LINE__)

/* The call fails with this status, and its message holds @text. */
#define assert_fails(call, status, text)                                                           \
    do {                                                                                           \
        assert_status_is((call), (status), #call, __FILE__, __LINE__);                             \
        assert_message_has((text), __FILE__, __LINE__);                                            \
    } while (0)

void assert_status_is(enum status got, enum status want, const char *call, const char *file,
                      int line);
void assert_message_has(const char *text, const char *file, int line);

/* @function(@argument) ends with an assertion (SIGABRT); it runs in a child process. */
#define assert_aborts(function, argument)                                                          \
    assert_aborts_at((function), (argument), __FILE__, __LINE__)
void assert_aborts_at(void (*function)(void *), void *argument, const char *file, int line);

/** test_seed() - TEST_SEED of the environment, else a fixed seed; printed, to replay a failure. */
uint64_t test_seed(void);

/** test_random() - the next number of a sequence that starts at *state = test_seed(). */
uint64_t test_random(uint64_t *state);

/** test_kills() - how often a test kills what it tests: TEST_KILLS of `make soak`,
 * else @otherwise. */
int test_kills(int otherwise);

/** test_resident_bytes() - of this process, as the system says; in any thread. */
size_t test_resident_bytes(void);

struct file_text;

/** said_begin() - what this process logs goes into a file from now on; said_end() gives its text
 * (mem_free(&said->data)) and lets the log go where it went before. */
void said_begin(void);
void said_end(struct file_text *said);

/* A folder of its own for a test. */
struct scratch {
    char dir[256]; /* "" before scratch_make() */
};

void scratch_make(struct scratch *scratch);

/** scratch_path() - "dir/name" into @out of 512 bytes; returns @out. */
const char *scratch_path(const struct scratch *scratch, char out[512], const char *name);

/** scratch_at() - the same without a buffer of the caller's: the last eight paths stay. */
const char *scratch_at(const struct scratch *scratch, const char *name);

/** scratch_same() - two files there have the same bytes. */
bool scratch_same(const struct scratch *scratch, const char *a, const char *b);

/** scratch_put() - write a file there; returns its path, in @out. */
const char *scratch_put(const struct scratch *scratch, char out[512], const char *name,
                        const void *data, size_t bytes);

/** scratch_count() - entries in the folder, hidden ones too. */
int scratch_count(const struct scratch *scratch);

/** scratch_remove() - delete the folder and all in it. */
void scratch_remove(struct scratch *scratch);

/* The state of a test of files: a folder, room for a path in it, and what was allocated before. */
struct file_test {
    struct scratch scratch;
    char path[512];
    int64_t live_bytes;
};

/** file_test_set_up() - *state is a struct file_test with a fresh folder. Return: 0. */
int file_test_set_up(void **state);

/** file_test_tear_down() - no call of file.h fails any longer, and the folder is gone.
 * Return: 0; -1: the test left memory allocated. */
int file_test_tear_down(void **state);

C_END

#endif
