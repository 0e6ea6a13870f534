/*
 * tests/support/small_model.h - the small models of tests/data/golden, a batch and their weights.
 *
 * There is one of each family. SMALL_TESTS_RUN(tests) runs a group once for each; small_family says
 * which it is now.
 */
#ifndef TESTS_SUPPORT_SMALL_MODEL_H
#define TESTS_SUPPORT_SMALL_MODEL_H

#include "tests/support/golden.h"
#include "tests/support/model_run.h"
#include "tests/support/support.h"

C_BEGIN

enum { SEQUENCES = 3, PADDED = 36, HIDDEN = 24, LAYERS = 2, VOCAB = 97 };

struct small_model {
    struct golden golden;
    struct model_run run;
    struct run_batch batch;
    bool padded;
};

extern enum model_family small_family; /* FAMILY_BERT where no group was begun */

#define SMALL_TESTS_RUN(tests) small_tests_run((tests), sizeof(tests) / sizeof((tests)[0]))
int small_tests_run(const struct CMUnitTest *tests, size_t count);

/** small_config() - family and sizes, no dropout, CPU, fp32. */
void small_config(struct run_config *c);

/**
 * small_open_with() - a model of the golden weights and the golden batch.
 * @padded: sequences of PADDED rows with a mask; else packed.
 * @rows: T, or 0 for as many as the sequences have.
 */
void small_open_with(struct small_model *f, const struct run_config *config, bool padded,
                     int64_t rows);
void small_open(struct small_model *f, bool padded); /* small_config(), no further rows */

/** small_open_random() - of other sizes: random weights, the golden batch. */
void small_open_random(struct small_model *f, const struct run_config *config, uint64_t seed);

/** small_batch() - the golden batch for an open golden file and run. */
void small_batch(struct small_model *f, bool padded, int64_t rows);
void small_close(struct small_model *f);

/** small_step() - one forward and backward that begins the gradients. */
void small_step(struct small_model *f);

/** small_tensor(), small_slot() - a tensor or gradient, an activation, on the host; mem_free(). */
void small_tensor(struct small_model *f, enum run_kind kind, int tensor, float **values);
void small_slot(struct small_model *f, int slot, float **values);

/** small_no_gradient() - gradients that are zero in exact arithmetic (engine/model/encoder.h). */
bool small_no_gradient(const char *name);

/** small_mode() - "packed" or "padded", as the golden file's names begin. */
const char *small_mode(const struct small_model *f);

/** small_tolerance() - what rounding may cost @what (hidden, logits, loss, grad, train, after):
 * 8 times what it costs the reference's own float32 run, and at least 8 epsilons. Ours rounds as
 * often, but adds in another order. */
double small_tolerance(const struct small_model *f, const char *what);

/** small_check() - fail with names and numbers unless @error is at most @allowed; NaN fails. */
void small_check(const char *what, double error, double allowed);

/** small_check_gradients() - all gradients against the reference. */
void small_check_gradients(struct small_model *f);

/** small_same_bits() - fail at the first of @n elements that differs. */
void small_same_bits(const char *what, const float *a, const float *b, int64_t n);

C_END

#endif
