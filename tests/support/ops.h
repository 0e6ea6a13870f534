/*
 * tests/support/ops.h - running ops on any device against references in double.
 *
 * Host values are arrays of double, already rounded to the dtype they are uploaded in, so device
 * and reference start from the same numbers. Every tensor has guard bytes before and after it;
 * op_get() checks them. Memory lives until the program ends its group.
 *
 *     static void name(void **state)
 *     {
 *         struct op_test *t = *state;
 *         double *x = op_random(t, n, 1.0);
 *         struct tensor dx = op_put_1d(t, x, n), dy = op_put_1d(t, NULL, n);
 *         assert_ok(op_gelu_forward(t->s, dy, dx));
 *         op_close("gelu", op_get(t, dy), want, n, 4 * t->eps);
 *     }
 *     int main(void) { const struct CMUnitTest tests[] = {...}; return OP_TESTS_RUN(tests); }
 *
 * OP_TESTS_RUN runs the group on the CPU and, in a CUDA build with a GPU, again there.
 */
#ifndef TESTS_SUPPORT_OPS_H
#define TESTS_SUPPORT_OPS_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/arena.h"
#include "engine/ops/ops.h"
#include "tests/support/support.h"

C_BEGIN

enum { OP_MAX_TENSORS = 4096, OP_GUARD_BYTES = 256 };

struct op_tensor_record {
    char *block; /* device memory: guard, data, guard */
    void *data;
    size_t bytes;
};

struct op_test {
    struct device *device;
    struct stream *s; /* the compute stream, with a workspace for op_limits below */
    enum dtype dtype; /* of weights and activations */
    double eps;       /* unit round-off of dtype */
    uint64_t random;  /* state of test_random() */
    struct pool pool; /* host arrays */
    void *workspace;
    struct op_tensor_record *records;
    int record_count;
};

/* The largest sizes that the tests use; the workspace is for these. */
extern const struct op_limits op_test_limits;

#define OP_TESTS_RUN(tests) op_tests_run(#tests, (tests), sizeof(tests) / sizeof((tests)[0]))
int op_tests_run(const char *name, const struct CMUnitTest *tests, size_t count);

/* ---- host values ---- */

/** op_zeros() - @n doubles. */
double *op_zeros(struct op_test *t, int64_t n);
/** op_random() - normal values with this deviation, rounded to t->dtype. */
double *op_random(struct op_test *t, int64_t n, double stddev);
/** op_random_f32() - the same, rounded to fp32: gradients, statistics, logits. */
double *op_random_f32(struct op_test *t, int64_t n, double stddev);
/** op_round() - to @dtype, nearest even. */
double op_round(enum dtype dtype, double x);

/* ---- device tensors; @x NULL: filled with NaN ---- */

struct tensor op_put_1d(struct op_test *t, const double *x, int64_t n); /* t->dtype */
struct tensor op_put_2d(struct op_test *t, const double *x, int64_t rows, int64_t columns);
struct tensor op_put_f32_1d(struct op_test *t, const double *x, int64_t n);
struct tensor op_put_f32_2d(struct op_test *t, const double *x, int64_t rows, int64_t columns);
/** op_none() - a tensor without data: a frozen gradient, no bias. */
struct tensor op_none(void);

/** op_get() - back to the host; the guards must be whole. */
double *op_get(struct op_test *t, struct tensor x);

/** op_upload(), op_download() - plain bytes, for step states, reports and indices. */
void *op_upload(struct op_test *t, const void *x, size_t bytes);
void op_download(struct op_test *t, void *out, const void *x, size_t bytes);

/* ---- comparing ---- */

/** op_close() - every |got - want| <= tolerance (absolute), and no NaN. */
void op_close(const char *what, const double *got, const double *want, int64_t n, double tolerance);
/** op_same() - equal values. */
void op_same(const char *what, const double *got, const double *want, int64_t n);
/** op_largest() - max |x|, for scaling tolerances; at least 1e-30. */
double op_largest(const double *x, int64_t n);

/**
 * op_numeric_gradient() - d loss / d x by central differences in double.
 * @loss: reads @x, which is changed and put back element by element.
 */
void op_numeric_gradient(double *grad, double *x, int64_t n, double (*loss)(void *context),
                         void *context);

/* ---- batches ---- */

struct op_batch {
    struct sequences q;    /* device memory */
    struct sequences host; /* the same on the host */
};

struct op_batch_spec {
    const int *lengths; /* [count] query rows; 0 is fine */
    const int *keys;    /* [count], or NULL: all rows are keys */
    int count;
    int64_t rows; /* T >= sum of lengths; the rest belongs to no sequence */
    int positions, vocab, types;
    int first_sample; /* samples are numbered from here */
};

/** op_batch_make() - random tokens, types and labels; all index arrays. */
void op_batch_make(struct op_test *t, struct op_batch *b, const struct op_batch_spec *spec);

/** op_mixed_batch() - 61 rows: 6 sequences of odd lengths, two empty, one padded; 5 of none. */
void op_mixed_batch(struct op_test *t, struct op_batch *b);
/** op_empty_batch() - no rows, one empty sequence. */
void op_empty_batch(struct op_test *t, struct op_batch *b);

/* ---- dropout ---- */

/** op_state() - a step state on the device: training, seed, step 7, inv_count. */
const struct step_state *op_state(struct op_test *t, float inv_count);
/** op_dropout() - site and layer 3 with the state of op_state(); p = 0: none. */
struct dropout op_dropout(struct op_test *t, float p, enum dropout_site site);
/** op_dropout_factor() - 0 or 1 / (1 - p), p as rounded, for one element, straight from Philox. */
double op_dropout_factor(float p, enum dropout_site site, int32_t sample, int64_t element);

C_END

#endif
