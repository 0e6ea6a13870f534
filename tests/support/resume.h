/*
 * tests/support/resume.h - runs that save, and runs that go on from what was saved.
 *
 * The runs are those of run.h on 40 questions with a global batch of 12: five steps an epoch.
 */
#ifndef TESTS_SUPPORT_RESUME_H
#define TESTS_SUPPORT_RESUME_H

#include "tests/support/run.h"

C_BEGIN

enum { SAVED_PATH_BYTES = 1200 };

/* What the tests of a program share: the folder of its runs, and traces to compare. */
extern struct resume_group {
    struct scratch scratch;
    struct run_trace first, other, third;
} group;

/** resume_set_up() - for a group's set-up: train.json and eval.json in the group's folder; ended by
 * run_tear_down(). Return: 0. */
int resume_set_up(void **state);

/** resume_release() - after each test: no trace is held, and nothing fails or waits any longer.
 * Return: 0. */
int resume_release(void **state);

/** resume_tiny() - such a run, with a rate that does not depend on its length.
 * @out: its output folder, in the group's; @every: steps from save to save; 0: none. */
struct run_config resume_tiny(const char *out, int ranks, int stage, int64_t steps, int64_t every);

/** saved_folder() - where a run puts the checkpoint of @step. */
void saved_folder(const struct run_config *c, char path[SAVED_PATH_BYTES], int64_t step);
bool saved_is_there(const struct run_config *c, int64_t step);

/** resume_from() - let @c go on from a step of another run's folder. */
void resume_from(struct run_config *c, const struct run_config *saved, int64_t step);
void resume_latest(struct run_config *c);

/** resume_same_state() - the same weights and moments at the end, to the bit. */
void resume_same_state(struct run_trace *a, struct run_trace *b, const char *what);

/** resume_same_rest() - the steps of @rest are those of @whole from @from on.
 * @band: how far losses may differ; 0: losses and norms are the same to the bit. */
void resume_same_rest(const struct run_trace *whole, const struct run_trace *rest, int from,
                      double band, const char *what);

C_END

#endif
