/*
 * tests/support/twins.h - one op on two devices: the CPU backend and a GPU, side by side.
 *
 * A twin is a tensor on both sides with the same values, rounded to the GPU's dtype first, so that
 * both start from the same numbers; the CPU computes in fp32. An op runs twice on the GPU and once
 * on the CPU, each time from the same start (initial values, or NaN everywhere). Then every output
 * must have whole guards, equal bits in both GPU runs, and lie within its tolerance of the CPU:
 *
 *     |got - want| <= tolerance (|want| + root mean square of want)
 *
 * or within a bound of its own for every value, where the test can derive one.
 *
 * A difference is printed with op, case, first bad index, both values and the tolerance; the test
 * goes on, so that one run shows all that is wrong. twins_table() prints one line an op and dtype.
 *
 *     twins_begin(w, "gelu_forward", "n=%d", n);
 *     struct twin x = twin_random(w, 1, n, 2.0), y = twin_output(w, "out", 1, n, NULL, 1e-6);
 *     TWINS_RUN(w, op_gelu_forward(ON_STREAM(w), ON(w, y), ON(w, x)));
 *     twins_end(w);
 */
#ifndef TESTS_SUPPORT_TWINS_H
#define TESTS_SUPPORT_TWINS_H

#include "tests/support/ops.h"

C_BEGIN

enum twin_side { SIDE_CPU, SIDE_GPU, SIDES };
enum { TWIN_MAX_OUTPUTS = 16, TWIN_MAX_ROWS = 64, TWIN_MAX_VALUES = 32 };

struct twin {
    struct tensor side[SIDES];
};

struct twin_output {
    const char *name;
    struct twin twin;
    size_t bytes[SIDES];
    void *initial[SIDES];                         /* host; NULL: poison */
    void *result[3];                              /* host: GPU, GPU again, CPU */
    int (*decode)(double *out, const void *host); /* of structs; NULL: a tensor */
    double tolerance;
    const double *allowed; /* of each value; NULL: by the tolerance */
};

struct twins_row { /* of the table */
    char op[40];
    enum dtype dtype;
    int cases, outputs, failed;
    double worst; /* largest error over what is allowed */
};

struct twins {
    struct op_test side[SIDES];
    enum twin_side now; /* whose turn it is: ON() */
    double u, f;        /* unit round-off of the GPU's dtype, and of fp32 */
    char label[200];
    int failures; /* of the current test */
    int output_count;
    struct twin_output output[TWIN_MAX_OUTPUTS];
    int row, row_count; /* the current line of the table */
    struct twins_row rows[TWIN_MAX_ROWS];
};

#define ON(w, twin)    ((twin).side[(w)->now])
#define ON_STREAM(w)   ((w)->side[(w)->now].s)
#define ON_BATCH(w, b) (&(b)[(w)->now].q)

/* Evaluate @call, which uses ON(), on the GPU twice and on the CPU. */
#define TWINS_RUN(w, call)                                                                         \
    for (int twin_turn_ = 0; twin_turn_ < 3; twin_turn_++) {                                       \
        twins_turn_begin((w), twin_turn_);                                                         \
        assert_ok(call);                                                                           \
        twins_turn_end((w), twin_turn_);                                                           \
    }

/** twins_open() - both devices, with workspaces for @limits. */
void twins_open(struct twins *w, enum precision_kind precision, const struct op_limits *limits);
void twins_close(struct twins *w);

/** twins_begin(), twins_end() - one case of @op; the end compares, prints and frees. */
void twins_begin(struct twins *w, const char *op, const char *fmt, ...) PRINTF_LIKE(3, 4);
void twins_end(struct twins *w);
void twins_turn_begin(struct twins *w, int turn);
void twins_turn_end(struct twins *w, int turn);

/** twins_table() - the lines gathered so far. */
void twins_table(const struct twins *w);

/* Inputs: normal values, in the GPU's dtype (fp32 on the CPU) or fp32 on both. */
struct twin twin_random(struct twins *w, int64_t rows, int64_t columns, double stddev);
struct twin twin_random_f32(struct twins *w, int64_t rows, int64_t columns, double stddev);
/** twin_of() - given values, which the dtype must hold exactly (op_round). */
struct twin twin_of(struct twins *w, const double *x, int64_t rows, int64_t columns);
struct twin twin_of_f32(struct twins *w, const double *x, int64_t rows, int64_t columns);
struct twin twin_none(void);
/** twin_1d() - the same memory with one dimension. */
struct twin twin_1d(struct twin twin);

/* Outputs; @initial NULL: NaN. */
struct twin twin_output(struct twins *w, const char *name, int64_t rows, int64_t columns,
                        const double *initial, double tolerance);
struct twin twin_output_f32(struct twins *w, const char *name, int64_t rows, int64_t columns,
                            const double *initial, double tolerance);
/** twin_output_within() - |got - want| <= allowed[i]; @allowed lives until twins_end(). */
struct twin twin_output_within(struct twins *w, const char *name, int64_t rows, int64_t columns,
                               const double *allowed);
/** twin_struct() - @bytes at @initial on both sides. @decode writes a result's values to @out, at
 * most TWIN_MAX_VALUES, and returns their number; their tolerance is relative to each alone. */
struct twin twin_struct(struct twins *w, const char *name, const void *initial, size_t bytes,
                        int (*decode)(double *out, const void *host), double tolerance);

/** twin_batch() - the same random batch on both sides, b[SIDES]. */
void twin_batch(struct twins *w, struct op_batch *b, const struct op_batch_spec *spec);

/* Dropout with the state of op_state(), which lies in the memory of each side. */
struct twin_dropout {
    struct dropout side[SIDES];
};
struct twin_dropout twin_dropout(struct twins *w, float p, enum dropout_site site, bool training);

/* A program of such tests: every case in fp32 and in bf16. Zero-initialise; state of its group. */
struct twin_group {
    bool gpu;   /* there is one */
    bool small; /* TESSERA_SMALL=1: the small cases, for compute-sanitizer */
    struct twins fp32, bf16;
};

/** twin_group_open() - for a group's set-up; without a GPU nothing is opened. Return: 0. */
int twin_group_open(void **state, struct twin_group *group, const struct op_limits *limits);

/** twin_group_close() - the tables, the end. Return: 0; -1: they could not be printed. */
int twin_group_close(void **state);

/** twin_group_each() - run @cases in both precisions, then fail if any case failed; skip without a
 * GPU. */
void twin_group_each(void **state, void (*cases)(const struct twin_group *g, struct twins *w));

C_END

#endif
