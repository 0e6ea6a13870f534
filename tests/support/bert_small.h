/*
 * tests/support/bert_small.h - the small BERT of tests/data/golden, its batch and its weights.
 */
#ifndef TESTS_SUPPORT_BERT_SMALL_H
#define TESTS_SUPPORT_BERT_SMALL_H

#include "tests/support/golden.h"
#include "tests/support/model_run.h"

C_BEGIN

enum { SEQUENCES = 3, PADDED = 36, HIDDEN = 24, LAYERS = 2, VOCAB = 97 };

struct bert_small {
    struct golden golden;
    struct model_run run;
    struct run_batch batch;
    bool padded;
};

/** small_config() - its sizes, no dropout, CPU, fp32. */
void small_config(struct run_config *c);

/**
 * small_open_with() - a model of the golden weights and the golden batch.
 * @padded: sequences of PADDED rows with a mask; else packed.
 * @rows: T, or 0 for as many as the sequences have.
 */
void small_open_with(struct bert_small *f, const struct run_config *config, bool padded,
                     int64_t rows);
void small_open(struct bert_small *f, bool padded); /* small_config(), no further rows */

/** small_open_random() - of other sizes: random weights, the golden batch. */
void small_open_random(struct bert_small *f, const struct run_config *config, uint64_t seed);

/** small_batch() - the golden batch for an open golden file and run. */
void small_batch(struct bert_small *f, bool padded, int64_t rows);
void small_close(struct bert_small *f);

/** small_step() - one forward and backward that begins the gradients. */
void small_step(struct bert_small *f);

/** small_tensor(), small_slot() - a tensor or gradient, an activation, on the host; mem_free(). */
void small_tensor(struct bert_small *f, enum run_kind kind, int tensor, float **values);
void small_slot(struct bert_small *f, int slot, float **values);

/** small_no_gradient() - gradients that are zero in exact arithmetic (engine/model/bert.h). */
bool small_no_gradient(const char *name);

/** small_mode() - "packed" or "padded", as the golden file's names begin. */
const char *small_mode(const struct bert_small *f);

/** small_tolerance() - what rounding may cost @what (hidden, logits, loss, grad, train, after):
 * 8 times what it costs the reference's own float32 run, and at least 8 epsilons. Ours rounds as
 * often, but adds in another order. */
double small_tolerance(const struct bert_small *f, const char *what);

/** small_check() - fail with names and numbers unless @error is at most @allowed; NaN fails. */
void small_check(const char *what, double error, double allowed);

/** small_check_gradients() - all gradients against the reference. */
void small_check_gradients(struct bert_small *f);

/** small_same_bits() - fail at the first of @n elements that differs. */
void small_same_bits(const char *what, const float *a, const float *b, int64_t n);

C_END

#endif
