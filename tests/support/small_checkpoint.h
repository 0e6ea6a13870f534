/*
 * tests/support/small_checkpoint.h - checkpoints of a few odd tensors, in a folder of their own.
 *
 * Four tensors, one of them frozen and one a scalar, with values of any bits, cut into random
 * pieces and dealt to several writers.
 */
#ifndef TESTS_SUPPORT_SMALL_CHECKPOINT_H
#define TESTS_SUPPORT_SMALL_CHECKPOINT_H

#include "io/checkpoint.h"
#include "tests/support/support.h"

C_BEGIN

enum {
    SMALL_TENSORS = 4,
    SMALL_STATES = 3,
    SMALL_NUMEL = 3000, /* at most, of a tensor */
    SMALL_PIECES = 2000,
    SMALL_WRITERS = 7
};

extern const char *const small_states[SMALL_STATES];

struct small_test {
    struct scratch scratch;
    uint64_t seed;
    int64_t live_bytes;
};

/** small_set_up() - *state is a struct small_test with a fresh folder. Return: 0. */
int small_set_up(void **state);

/** small_tear_down() - Return: 0; -1: the test left memory allocated. */
int small_tear_down(void **state);

/** small_below() - a random number in [0, n). */
int64_t small_below(struct small_test *f, int64_t n);

/** small_fill_any() - any bits: NaNs of all kinds, infinities, denormals, zeros of both signs. */
void small_fill_any(struct small_test *f, float *out, int64_t n);

/** small_fill_weights() - bell-shaped values, as weights are. */
void small_fill_weights(struct small_test *f, float *out, int64_t n);

struct small {
    struct checkpoint_tensor tensors[SMALL_TENSORS];
    float values[SMALL_TENSORS][SMALL_STATES][SMALL_NUMEL];
};

void small_make(struct small_test *f, struct small *s);

struct small_piece {
    int tensor, state;
    int64_t first, numel;
};

/** small_cut() - all states of all tensors in random pieces, in random order. Return: how many. */
int small_cut(struct small_test *f, const struct small *s, struct small_piece *pieces,
              int max_numel);

struct small_save {
    const char *dir;
    int64_t step;
    int writers;
    const struct checkpoint_options *options;
    const struct small_piece *pieces;
    int piece_count;
    struct json_t *training;
};

/** small_save() - deal the pieces to the writers and publish; all that may fail is passed on. */
enum status small_save(const struct small *s, const struct small_save *how);

/** small_save_plain() - a checkpoint of the whole in one go. */
enum status small_save_plain(struct small_test *f, const struct small *s, int64_t step);

/** small_step_path() - the folder of a step; returns @out. */
const char *small_step_path(struct small_test *f, char out[512], int64_t step);

/** small_same_values() - all values, by random ranges; what is read has to be right. False if a
 * read failed with ST_CORRUPT. */
bool small_same_values(struct small_test *f, const struct checkpoint *c, const struct small *s);

/** small_assert_same() - a checkpoint that opens, has these values and verifies. */
void small_assert_same(struct small_test *f, const char *path, const struct small *s);

C_END

#endif
