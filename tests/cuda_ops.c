/*
 * The CUDA ops against the CPU backend: odd sizes, tails, padded and empty sequences, dropout, set
 * and add, frozen gradients, aliasing, guard bytes, two runs with the same bits. Attention is in
 * cuda_attention.c.
 *
 * Without a GPU every test is skipped. TESSERA_SMALL=1 keeps the small cases, for
 * compute-sanitizer. Tolerances are multiples of u, the unit round-off of the GPU's dtype (2^-8 or
 * 2^-24), and of f = 2^-24, for sums in fp32; see twins.h for what they are relative to.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/out.h"
#include "tests/support/halves.h"
#include "tests/support/twins.h"

static const struct op_limits limits = {
    .rows = 2048,
    .channels = 2056,
    .ffn = 4096,
    .heads = 16,
    .sequences = 64,
    .max_length = 512,
    .vocab_rows = 1024,
    .world_size = 8,
};

/* ---- batches -------------------------------------------------------------------------------- */

/* The last one is for tables alone: its five tokens have some 200 rows each. */
enum { MIXED, ALIGNED, NO_ROWS, ONLY_TAIL, LONG, FREQUENT, TABLE_BATCHES };
enum { BATCHES = FREQUENT, SMALL_BATCHES = LONG };

static const char *const batch_name[TABLE_BATCHES] = {"mixed",     "aligned", "no rows",
                                                      "only tail", "long",    "frequent"};
static const int mixed_lengths[] = {5, 0, 1, 33, 17, 0}, mixed_keys[] = {5, 0, 1, 33, 11, 0};
static const int aligned_keys[] = {5, 0, 1, 30, 0, 0}, none[] = {0};
static const int long_lengths[] = {175, 384, 1, 64, 65, 0, 128, 31};
static const int long_keys[] = {175, 384, 1, 64, 65, 0, 100, 31};

static const struct op_batch_spec batch_spec[TABLE_BATCHES] = {
    [MIXED] = {mixed_lengths, mixed_keys, 6, 61, 37, 23, 2, 1000},
    [ALIGNED] = {mixed_lengths, aligned_keys, 6, 56, 40, 7, 3, 0}, /* positions: whole groups */
    [NO_ROWS] = {none, none, 1, 0, 40, 23, 2, 0},
    [ONLY_TAIL] = {none, none, 1, 13, 40, 23, 2, 0},
    [LONG] = {long_lengths, long_keys, 8, 1000, 512, 300, 2, 70000},
    [FREQUENT] = {long_lengths, long_keys, 8, 1000, 512, 5, 2, 1},
};

/* Dropout of the cases: none, in training, and switched off by the step state. */
enum { DROP_NONE, DROP_TRAINING, DROP_EVALUATION, DROPS };
static const char *const drop_name[DROPS] = {"p=0", "p=0.1", "p=0.1 in evaluation"};

static struct twin_dropout drop_of(struct twins *w, int kind, enum dropout_site site)
{
    return twin_dropout(w, kind == DROP_NONE ? 0.0f : 0.1f, site, kind == DROP_TRAINING);
}

static int batch_count(const struct twin_group *g)
{
    return g->small ? SMALL_BATCHES : BATCHES;
}

/* ---- the group ------------------------------------------------------------------------------ */

static int group_open(void **state)
{
    static struct twin_group group;
    return twin_group_open(state, &group, &limits);
}

/* ---- gelu ----------------------------------------------------------------------------------- */

/* Alone, and as a block calls it: dpre is dout, act is pre, or not wanted. */
static void gelu_backward_case(struct twins *w, int64_t T, int64_t F, bool in_place, bool bias,
                               bool wanted)
{
    struct op_test *t = &w->side[SIDE_GPU];
    bool add = in_place;
    double tolerance = 1.05 * w->u + 32 * w->f, *start = NULL;
    twins_begin(w, "gelu_backward", "T=%d F=%d%s%s%s", (int)T, (int)F,
                in_place ? " in place, add" : " set", bias ? "" : ", dbias frozen",
                wanted ? "" : ", no act");
    if (in_place)
        start = op_random(t, T * F, 2.0);
    struct twin act = wanted ? twin_output(w, "act", T, F, start, tolerance) : twin_none();
    struct twin pre = in_place && wanted ? act : twin_random(w, T, F, 2.0);
    if (in_place)
        start = op_random(t, T * F, 1.0);
    struct twin dpre = twin_output(w, "dpre", T, F, start, tolerance);
    struct twin dout = in_place ? dpre : twin_random(w, T, F, 1.0), dbias = twin_none();
    if (bias)
        dbias = twin_1d(twin_output_f32(w, "dbias", 1, F, add ? op_random_f32(t, F, 1.0) : NULL,
                                        8 * (sqrt((double)T) + 4) * w->f));
    TWINS_RUN(w, op_gelu_backward(ON_STREAM(w), ON(w, dpre), ON(w, act), ON(w, dbias), ON(w, dout),
                                  ON(w, pre), add));
    twins_end(w);
}

enum { SUMS = 30 }; /* more than wait at once */

/* All but the last into places of their own, the last two into one. */
static enum status many_sums(struct stream *s, struct tensor dpre, struct tensor act,
                             struct tensor dbias, struct tensor dout, struct tensor pre)
{
    for (int i = 0; i < SUMS; i++) {
        int64_t place = i < SUMS - 1 ? i : i - 1;
        float *out = (float *)dbias.data + place * pre.shape[1];
        TRY(op_gelu_backward(s, dpre, act, tensor_1d(out, DTYPE_F32, pre.shape[1]), dout, pre,
                             i == SUMS - 1));
    }
    return ST_OK;
}

static void sums_case(struct twins *w, int64_t T, int64_t F)
{
    twins_begin(w, "gelu_backward", "T=%d F=%d, %d sums at once", (int)T, (int)F, SUMS);
    double tolerance = 1.05 * w->u + 32 * w->f;
    struct twin act = twin_output(w, "act", T, F, NULL, tolerance), pre = twin_random(w, T, F, 2.0);
    struct twin dpre = twin_output(w, "dpre", T, F, NULL, tolerance);
    struct twin dout = twin_random(w, T, F, 1.0);
    struct twin dbias =
        twin_output_f32(w, "dbias", SUMS - 1, F, NULL, 8 * (sqrt((double)T) + 4) * w->f);
    TWINS_RUN(
        w, many_sums(ON_STREAM(w), ON(w, dpre), ON(w, act), ON(w, dbias), ON(w, dout), ON(w, pre)));
    twins_end(w);
}

static void gelu_cases(const struct twin_group *g, struct twins *w)
{
    static const int sizes[] = {1, 7, 8, 263, 2049, 100000};
    for (int i = 0; i < (g->small ? 4 : 6); i++) {
        int n = sizes[i];
        twins_begin(w, "gelu_forward", "n=%d", n);
        struct twin x = twin_random(w, 1, n, 2.0);
        struct twin y = twin_output(w, "out", 1, n, NULL, 1.05 * w->u + 32 * w->f);
        TWINS_RUN(w, op_gelu_forward(ON_STREAM(w), ON(w, y), ON(w, x)));
        twins_end(w);
    }
    static const int rows[] = {0, 1, 5, 61, 64, 1000}, columns[] = {8, 1, 63, 264, 256, 1032};
    for (int i = 0; i < (g->small ? 5 : 6); i++) {
        gelu_backward_case(w, rows[i], columns[i], false, true, true);
        gelu_backward_case(w, rows[i], columns[i], true, true, true);
        gelu_backward_case(w, rows[i], columns[i], false, false, true);
        gelu_backward_case(w, rows[i], columns[i], true, true, false);
    }
    sums_case(w, 61, 256);
    sums_case(w, 5, 63);
}

static void gelu(void **state)
{
    twin_group_each(state, gelu_cases);
}

/* ---- linear --------------------------------------------------------------------------------- */

struct linear_size {
    int T, N, K;
};

static void linear_case(struct twins *w, struct linear_size z, bool add, bool bias)
{
    struct op_test *t = &w->side[SIDE_GPU];
    int64_t T = z.T, N = z.N, K = z.K;
    const char *how = add ? "add" : "set";
    double scale = 1.0 / sqrt((double)K);

    twins_begin(w, "linear_forward", "T=%d N=%d K=%d%s", z.T, z.N, z.K, bias ? " bias" : "");
    struct twin x = twin_random(w, T, K, 1.0), m = twin_random(w, N, K, scale);
    struct twin b = bias ? twin_1d(twin_random(w, 1, N, 1.0)) : twin_none();
    struct twin y = twin_output(w, "y", T, N, NULL, 1.05 * w->u + 8 * sqrt((double)K) * w->f);
    TWINS_RUN(w, op_linear_forward(ON_STREAM(w), ON(w, y), ON(w, x), ON(w, m), ON(w, b)));
    twins_end(w);

    twins_begin(w, "linear_backward_data", "T=%d N=%d K=%d %s", z.T, z.N, z.K, how);
    struct twin dy = twin_random(w, T, N, 1.0);
    m = twin_random(w, N, K, scale);
    /* Added to, it may be rounded twice: the product, then the sum. */
    struct twin dx = twin_output(w, "dx", T, K, add ? op_random(t, T * K, 1.0) : NULL,
                                 (add ? 2.1 : 1.05) * w->u + 8 * sqrt((double)N) * w->f);
    TWINS_RUN(w, op_linear_backward_data(ON_STREAM(w), ON(w, dx), ON(w, dy), ON(w, m), add));
    twins_end(w);

    twins_begin(w, "linear_backward_weight", "T=%d N=%d K=%d %s", z.T, z.N, z.K, how);
    dy = twin_random(w, T, N, 1.0);
    x = twin_random(w, T, K, 1.0);
    double tolerance = 8 * (sqrt((double)T) + 2) * w->f;
    struct twin dw =
        twin_output_f32(w, "dw", N, K, add ? op_random_f32(t, N * K, 1.0) : NULL, tolerance);
    TWINS_RUN(w, op_linear_backward_weight(ON_STREAM(w), ON(w, dw), ON(w, dy), ON(w, x), add));
    twins_end(w);
}

static void linear_cases(const struct twin_group *g, struct twins *w)
{
    static const struct linear_size sizes[] = {
        {0, 24, 16}, {1, 1, 1},        {61, 24, 40},     {13, 37, 5},      {64, 64, 64},
        {7, 2, 768}, {1000, 768, 768}, {393, 2304, 768}, {1024, 384, 1536}};
    for (int i = 0; i < (g->small ? 5 : 9); i++) {
        linear_case(w, sizes[i], false, true);
        linear_case(w, sizes[i], true, false);
    }
}

static void linear(void **state)
{
    twin_group_each(state, linear_cases);
}

static int report_values(double *values, const void *host)
{
    struct step_report r;
    memcpy(&r, host, sizeof r);
    const double v[] = {r.loss_sum,       r.squared_norm, (double)r.sequences, (double)r.tokens,
                        (double)r.finite, (double)r.stop, (double)r.signal,    (double)r.step};
    memcpy(values, v, sizeof v);
    return (int)(sizeof v / sizeof *v);
}

static struct step_report *report_of(struct twins *w, struct twin report)
{
    return ON(w, report).data;
}

/* ---- embedding ------------------------------------------------------------------------------ */

/* A table split in two parts; the second writes its rows only. */
static enum status embed_in_parts(struct stream *s, struct tensor out, struct tensor part,
                                  struct tensor low, struct tensor high, const struct sequences *q)
{
    struct token_rows rows = sequences_rows(q);
    TRY(op_embedding_forward(s, out, low, rows, 0, true));
    TRY(op_embedding_forward(s, out, high, rows, low.shape[0], false));
    return op_embedding_forward(s, part, high, rows, low.shape[0], false);
}

static enum status range_forward(struct stream *s, struct tensor set, struct tensor kept,
                                 struct tensor part, const struct sequences *q, int64_t first)
{
    TRY(op_embedding_forward(s, set, part, sequences_rows(q), first, true));
    return op_embedding_forward(s, kept, part, sequences_rows(q), first, false);
}

static bool is_negative(const void *values, enum dtype dtype, int64_t i)
{
    return dtype == DTYPE_BF16 ? ((const uint16_t *)values)[i] >> 15
                               : ((const uint32_t *)values)[i] >> 31;
}

/* What lies in a rank's shard, and beside it the zero that changes no sum: to the bit. */
static void embedding_shard_case(struct twins *w, int batch, int channels, int64_t first,
                                 int64_t numel)
{
    const struct op_batch_spec *spec = &batch_spec[batch];
    int64_t T = spec->rows, C = channels;
    struct op_test *t = &w->side[SIDE_GPU];
    struct op_batch b[SIDES];
    twins_begin(w, "embedding_forward", "%s C=%d, elements %d + %d", batch_name[batch], channels,
                (int)first, (int)numel);
    twin_batch(w, b, spec);
    struct twin part = twin_1d(twin_random(w, 1, numel, 1.0));
    int at = w->output_count;
    struct twin set = twin_output(w, "set", T, C, NULL, 0.0);
    struct twin kept = twin_output(w, "kept", T, C, op_random(t, T * C, 1.0), 0.0);
    TWINS_RUN(w, range_forward(ON_STREAM(w), ON(w, set), ON(w, kept), ON(w, part), ON_BATCH(w, b),
                               first));
    for (int64_t i = 0; i < T * C; i++)
        assert_true(is_negative(w->output[at].result[0], t->dtype, i) ==
                    is_negative(w->output[at].result[2], DTYPE_F32, i));
    twins_end(w);
}

/* Rows [first_row, ...) of a table's gradient, by the rows of one batch. */
static enum status rows_backward(struct stream *s, struct tensor dtable, struct tensor dout,
                                 const struct sequences *q, int64_t first_row,
                                 enum table_rows others)
{
    struct tensor part = tensor_1d(dtable.data, DTYPE_F32, dtable.shape[0] * dtable.shape[1]);
    return op_embedding_backward(s, part, dout, sequences_rows(q), first_row * dout.shape[1],
                                 others);
}

/* Of the elements from @first on, and of all. */
static enum status range_backward(struct stream *s, struct tensor part, struct tensor whole,
                                  struct tensor dout, const struct sequences *q, int64_t first,
                                  bool add)
{
    enum table_rows others = add ? ROWS_KEPT : ROWS_ZERO;
    TRY(op_embedding_backward(s, part, dout, sequences_rows(q), first, others));
    return op_embedding_backward(s, whole, dout, sequences_rows(q), 0, others);
}

/* A rank's shard begins and ends within a row. It has the bits of the whole table. */
static void embedding_range_case(struct twins *w, int batch, int channels, int64_t first,
                                 int64_t numel, bool add)
{
    const struct op_batch_spec *spec = &batch_spec[batch];
    int64_t T = spec->rows, C = channels, all = spec->vocab * C;
    struct op_test *t = &w->side[SIDE_GPU];
    struct op_batch b[SIDES];
    twins_begin(w, "embedding_backward", "%s C=%d, elements %d + %d %s", batch_name[batch],
                channels, (int)first, (int)numel, add ? "add" : "set");
    twin_batch(w, b, spec);
    struct twin dout = twin_random(w, T, C, 1.0);
    double *before = add ? op_random_f32(t, all, 1.0) : NULL;
    double *first_before = add ? before + first : NULL, tolerance = 64 * w->f;
    int at = w->output_count;
    struct twin part = twin_1d(twin_output_f32(w, "part", 1, numel, first_before, tolerance));
    struct twin whole = twin_1d(twin_output_f32(w, "whole", 1, all, before, tolerance));
    TWINS_RUN(w, range_backward(ON_STREAM(w), ON(w, part), ON(w, whole), ON(w, dout),
                                ON_BATCH(w, b), first, add));
    const float *bits = w->output[at].result[0];
    assert_memory_equal(bits, (const float *)w->output[at + 1].result[0] + first,
                        sizeof *bits * (size_t)numel);
    twins_end(w);
}

static void embedding_case(struct twins *w, int batch, int channels)
{
    const struct op_batch_spec *spec = &batch_spec[batch];
    int64_t T = spec->rows, C = channels, first = spec->vocab / 2, rest = spec->vocab - first;
    struct op_test *t = &w->side[SIDE_GPU];
    struct op_batch b[SIDES];

    twins_begin(w, "embedding_forward", "%s C=%d", batch_name[batch], channels);
    twin_batch(w, b, spec);
    struct twin low = twin_1d(twin_random(w, 1, first * C, 1.0));
    struct twin high = twin_1d(twin_random(w, 1, rest * C, 1.0));
    struct twin out = twin_output(w, "out", T, C, NULL, 0.0);
    struct twin part = twin_output(w, "out of part 2", T, C, op_random(t, T * C, 1.0), 0.0);
    TWINS_RUN(w, embed_in_parts(ON_STREAM(w), ON(w, out), ON(w, part), ON(w, low), ON(w, high),
                                ON_BATCH(w, b)));
    twins_end(w);

    static const char *const others[] = {"set", "add", "mark"};
    for (int i = 0; i < 6; i++) {
        bool second = i / 3;
        enum table_rows rest_is = (enum table_rows)(i % 3);
        int64_t from = second ? first : 0, rows = second ? rest : first;
        twins_begin(w, "embedding_backward", "%s C=%d part %d %s", batch_name[batch], channels,
                    second + 1, others[i % 3]);
        twin_batch(w, b, spec);
        struct twin dout = twin_random(w, T, C, 1.0);
        double *before = rest_is == ROWS_ZERO ? NULL : op_random_f32(t, rows * C, 1.0);
        struct twin d = twin_output_f32(w, "dtable", rows, C, before, 64 * w->f);
        TWINS_RUN(
            w, rows_backward(ON_STREAM(w), ON(w, d), ON(w, dout), ON_BATCH(w, b), from, rest_is));
        twins_end(w);

        static const struct step_report start = {.squared_norm = 0.25, .finite = 1};
        twins_begin(w, "squared_norm_rows", "%s C=%d part %d", batch_name[batch], channels,
                    second + 1);
        twin_batch(w, b, spec);
        struct twin g = twin_of_f32(w, op_random_f32(t, rows * C, 1.0), rows, C);
        struct twin report = twin_struct(w, "report", &start, sizeof start, report_values, 1e-13);
        TWINS_RUN(w, op_squared_norm_rows(ON_STREAM(w), report_of(w, report), ON(w, g),
                                          ON_BATCH(w, b), from));
        twins_end(w);
    }
}

static void embedding_cases(const struct twin_group *g, struct twins *w)
{
    static const int channels[] = {1, 63, 64, 264, 768};
    for (int batch = 0; batch < (g->small ? SMALL_BATCHES : TABLE_BATCHES); batch++)
        for (int i = 0; i < (g->small ? 3 : 5); i++) {
            int64_t all = (int64_t)batch_spec[batch].vocab * channels[i], third = all / 3;
            embedding_case(w, batch, channels[i]);
            embedding_shard_case(w, batch, channels[i], third, all / 2);
            embedding_shard_case(w, batch, channels[i], third / 128 * 128, all / 2 / 128 * 128);
            for (int add = 0; add < 2; add++) {
                embedding_range_case(w, batch, channels[i], third, all / 2, add);
                embedding_range_case(w, batch, channels[i], third / 128 * 128, all / 2 / 128 * 128,
                                     add);
            }
        }
}

static void embedding(void **state)
{
    twin_group_each(state, embedding_cases);
}

/* ---- norms ---------------------------------------------------------------------------------- */

static const float EPS = 1e-5f;

/* Statistics of rows as a forward pass leaves them: (2, T). */
static double *norm_stats(struct twins *w, const double *z, const struct op_batch *b, int64_t C)
{
    int64_t T = b->host.rows;
    double *stats = op_zeros(&w->side[SIDE_GPU], 2 * T);
    for (int64_t row = 0; row < T; row++) {
        double sum = 0, square = 0;
        if (b->host.row_sequence[row] < 0)
            continue;
        for (int64_t c = 0; c < C; c++)
            sum += z[row * C + c];
        for (int64_t c = 0; c < C; c++)
            square += pow(z[row * C + c] - sum / (double)C, 2);
        stats[row] = op_round(DTYPE_F32, sum / (double)C);
        stats[T + row] = op_round(DTYPE_F32, 1.0 / sqrt(square / (double)C + (double)EPS));
    }
    return stats;
}

static void embedding_norm_forward_case(struct twins *w, int batch, int64_t C, int kind, bool typed)
{
    const struct op_batch_spec *spec = &batch_spec[batch];
    int64_t T = spec->rows;
    struct op_batch b[SIDES];
    /* z is rounded before its norm is taken: about four of its deviations times u. */
    double z_tolerance = 1.05 * w->u + 4 * w->f, tolerance = 5 * w->u + 64 * w->f;

    twins_begin(w, "embedding_norm_forward", "%s C=%d %s%s", batch_name[batch], (int)C,
                drop_name[kind], typed ? "" : ", no types");
    twin_batch(w, b, spec);
    struct twin_dropout drop = drop_of(w, kind, SITE_EMBEDDING);
    struct twin x = twin_random(w, T, C, 1.0), position = twin_random(w, spec->positions, C, 1.0);
    struct twin type = typed ? twin_random(w, spec->types, C, 1.0) : twin_none();
    struct twin gamma = twin_1d(twin_random(w, 1, C, 1.0));
    struct twin beta = twin_1d(twin_random(w, 1, C, 1.0));
    struct twin out = twin_output(w, "out", T, C, NULL, tolerance);
    struct twin z = twin_output(w, "z", T, C, NULL, z_tolerance);
    struct twin stats = twin_output_f32(w, "stats", 2, T, NULL, tolerance);
    TWINS_RUN(w, op_embedding_norm_forward(ON_STREAM(w), ON(w, out), ON(w, z), ON(w, stats),
                                           ON(w, x), ON(w, position), ON(w, type), ON(w, gamma),
                                           ON(w, beta), ON_BATCH(w, b), EPS, drop.side[w->now]));
    twins_end(w);
}

static void residual_norm_forward_case(struct twins *w, int batch, int64_t C, int kind)
{
    const struct op_batch_spec *spec = &batch_spec[batch];
    int64_t T = spec->rows;
    struct op_test *t = &w->side[SIDE_GPU];
    struct op_batch b[SIDES];
    double z_tolerance = 1.05 * w->u + 4 * w->f, tolerance = 5 * w->u + 64 * w->f; /* as above */

    twins_begin(w, "residual_norm_forward", "%s C=%d %s, z is y", batch_name[batch], (int)C,
                drop_name[kind]);
    twin_batch(w, b, spec);
    struct twin_dropout drop = drop_of(w, kind, SITE_FFN_OUTPUT);
    struct twin x = twin_random(w, T, C, 1.0);
    struct twin gamma = twin_1d(twin_random(w, 1, C, 1.0));
    struct twin beta = twin_1d(twin_random(w, 1, C, 1.0));
    struct twin out = twin_output(w, "out", T, C, NULL, tolerance);
    struct twin z = twin_output(w, "z", T, C, op_random(t, T * C, 1.0), z_tolerance);
    struct twin stats = twin_output_f32(w, "stats", 2, T, NULL, tolerance);
    TWINS_RUN(w, op_residual_norm_forward(ON_STREAM(w), ON(w, out), ON(w, z), ON(w, stats),
                                          ON(w, x), ON(w, z), ON(w, gamma), ON(w, beta),
                                          ON_BATCH(w, b), EPS, drop.side[w->now]));
    twins_end(w);
}

static void embedding_norm_backward_case(struct twins *w, int batch, int64_t C, int kind, bool add)
{
    const struct op_batch_spec *spec = &batch_spec[batch];
    int64_t T = spec->rows;
    struct op_test *t = &w->side[SIDE_GPU];
    struct op_batch b[SIDES];
    twins_begin(w, "embedding_norm_backward", "%s C=%d %s %s, dx is dout", batch_name[batch],
                (int)C, drop_name[kind], add ? "add" : "set");
    twin_batch(w, b, spec);
    struct twin_dropout drop = drop_of(w, kind, SITE_EMBEDDING);
    double *values = op_random(t, T * C, 1.0);
    struct twin z = twin_of(w, values, T, C);
    struct twin stats = twin_of_f32(w, norm_stats(w, values, &b[SIDE_GPU], C), 2, T);
    struct twin gamma = twin_1d(twin_random(w, 1, C, 1.0));
    struct twin dx = twin_output(w, "dx", T, C, op_random(t, T * C, 1.0), 1.05 * w->u + 64 * w->f);
    /* Sums of the dx that was stored, up to one a sequence: one that cancels keeps the roundings of
     * its terms. */
    double tables = 3 * (double)(batch_spec[batch].count + 4) * w->u + 64 * w->f;
    int64_t P = spec->positions, types = spec->types;
    struct twin position =
        twin_output_f32(w, "dposition", P, C, add ? op_random_f32(t, P * C, 1.0) : NULL, tables);
    struct twin type = twin_output_f32(w, "dtype", types, C,
                                       add ? op_random_f32(t, types * C, 1.0) : NULL, tables);
    struct twin dgamma = twin_1d(
        twin_output_f32(w, "dgamma", 1, C, add ? op_random_f32(t, C, 1.0) : NULL, 128 * w->f));
    struct twin dbeta = twin_1d(
        twin_output_f32(w, "dbeta", 1, C, add ? op_random_f32(t, C, 1.0) : NULL, 128 * w->f));
    TWINS_RUN(w, op_embedding_norm_backward(ON_STREAM(w), ON(w, dx), ON(w, position), ON(w, type),
                                            ON(w, dgamma), ON(w, dbeta), ON(w, dx), ON(w, z),
                                            ON(w, stats), ON(w, gamma), ON_BATCH(w, b),
                                            drop.side[w->now], add));
    twins_end(w);
}

static void residual_norm_backward_case(struct twins *w, int batch, int64_t C, int kind, bool add)
{
    const struct op_batch_spec *spec = &batch_spec[batch];
    int64_t T = spec->rows;
    struct op_test *t = &w->side[SIDE_GPU];
    struct op_batch b[SIDES];
    bool frozen = add; /* then dgamma is not wanted */
    twins_begin(w, "residual_norm_backward", "%s C=%d %s %s", batch_name[batch], (int)C,
                drop_name[kind], add ? "add, dgamma frozen" : "set");
    twin_batch(w, b, spec);
    struct twin_dropout drop = drop_of(w, kind, SITE_ATTENTION_OUTPUT);
    double *values = op_random(t, T * C, 1.0);
    struct twin z = twin_of(w, values, T, C), dout = twin_random(w, T, C, 1.0);
    struct twin stats = twin_of_f32(w, norm_stats(w, values, &b[SIDE_GPU], C), 2, T);
    struct twin gamma = twin_1d(twin_random(w, 1, C, 1.0));
    struct twin dx = twin_output(w, "dx", T, C, NULL, 1.05 * w->u + 64 * w->f);
    struct twin dy = twin_output(w, "dy", T, C, NULL, 1.05 * w->u + 64 * w->f);
    struct twin dgamma = twin_none(), dbias = twin_none();
    if (kind != DROP_EVALUATION)
        dbias = twin_1d(
            twin_output_f32(w, "dbias", 1, C, add ? op_random_f32(t, C, 1.0) : NULL, 256 * w->f));
    if (!frozen)
        dgamma = twin_1d(twin_output_f32(w, "dgamma", 1, C, NULL, 128 * w->f));
    struct twin dbeta = twin_1d(
        twin_output_f32(w, "dbeta", 1, C, add ? op_random_f32(t, C, 1.0) : NULL, 128 * w->f));
    TWINS_RUN(w, op_residual_norm_backward(ON_STREAM(w), ON(w, dx), ON(w, dy), ON(w, dgamma),
                                           ON(w, dbeta), ON(w, dbias), ON(w, dout), ON(w, z),
                                           ON(w, stats), ON(w, gamma), ON_BATCH(w, b),
                                           drop.side[w->now], add));
    twins_end(w);
}

static void norm_cases(const struct twin_group *g, struct twins *w)
{
    static const int channels[] = {8, 63, 384, 64, 264, 768, 1024, 1100, 2056};
    for (int batch = 0; batch < batch_count(g); batch++)
        for (int i = 0; i < (g->small ? 3 : 9); i++)
            for (int kind = 0; kind < DROPS; kind++) {
                embedding_norm_forward_case(w, batch, channels[i], kind, true);
                embedding_norm_forward_case(w, batch, channels[i], kind, false);
                residual_norm_forward_case(w, batch, channels[i], kind);
                embedding_norm_backward_case(w, batch, channels[i], kind, kind % 2);
                residual_norm_backward_case(w, batch, channels[i], kind, kind % 2);
            }
}

static void norm(void **state)
{
    twin_group_each(state, norm_cases);
}

/* ---- dropout alone --------------------------------------------------------------------------- */

static void dropout_case(struct twins *w, int batch, int64_t C, int kind, bool in_place)
{
    int64_t T = batch_spec[batch].rows;
    struct op_batch b[SIDES];
    twins_begin(w, "dropout_apply", "%s C=%d %s%s", batch_name[batch], (int)C, drop_name[kind],
                in_place ? ", out is x" : "");
    twin_batch(w, b, &batch_spec[batch]);
    struct twin_dropout drop = drop_of(w, kind, SITE_HEAD);
    struct twin x = twin_random(w, T, C, 1.0);
    double *initial = in_place ? op_random(&w->side[SIDE_GPU], T * C, 1.0) : NULL;
    struct twin out = twin_output(w, "out", T, C, initial, 1.05 * w->u + 2 * w->f);
    if (in_place)
        x = out;
    TWINS_RUN(
        w, op_dropout_apply(ON_STREAM(w), ON(w, out), ON(w, x), ON_BATCH(w, b), drop.side[w->now]));
    twins_end(w);
}

static void dropout_cases(const struct twin_group *g, struct twins *w)
{
    static const int channels[] = {8, 63, 64, 264, 768, 1100};
    for (int batch = 0; batch < batch_count(g); batch++)
        for (int i = 0; i < (g->small ? 3 : 6); i++)
            for (int kind = 0; kind < DROPS; kind++) {
                dropout_case(w, batch, channels[i], kind, false);
                dropout_case(w, batch, channels[i], kind, true);
            }
}

static void dropout_alone(void **state)
{
    twin_group_each(state, dropout_cases);
}

/* ---- the head ------------------------------------------------------------------------------- */

static void span_case(struct twins *w, int batch, int64_t C, bool add)
{
    const struct op_batch_spec *spec = &batch_spec[batch];
    int64_t T = spec->rows;
    struct op_test *t = &w->side[SIDE_GPU];
    struct op_batch b[SIDES];
    const struct step_report start = {.loss_sum = 3.5, .sequences = 2, .finite = 1};

    twins_begin(w, "span_logits_forward", "%s C=%d", batch_name[batch], (int)C);
    twin_batch(w, b, spec);
    struct twin x = twin_random(w, T, C, 1.0), m = twin_random(w, 2, C, 1.0);
    struct twin bias = twin_1d(twin_random(w, 1, 2, 1.0));
    struct twin logits = twin_output_f32(w, "logits", T, 2, NULL, 64 * w->f);
    TWINS_RUN(w, op_span_logits_forward(ON_STREAM(w), ON(w, logits), ON(w, x), ON(w, m),
                                        ON(w, bias), ON_BATCH(w, b)));
    twins_end(w);

    twins_begin(w, "span_logits_backward", "%s C=%d %s", batch_name[batch], (int)C,
                add ? "add" : "set");
    twin_batch(w, b, spec);
    x = twin_random(w, T, C, 1.0);
    m = twin_random(w, 2, C, 1.0);
    double *d = op_random_f32(t, 2 * T, 1.0);
    for (int64_t row = b[SIDE_GPU].host.cu_seqlens[spec->count]; row < T; row++)
        d[2 * row] = d[2 * row + 1] = 0.0;
    struct twin dlogits = twin_of_f32(w, d, T, 2);
    struct twin dx = twin_output(w, "dx", T, C, NULL, 1.05 * w->u + 16 * w->f);
    struct twin dw =
        twin_output_f32(w, "dw", 2, C, add ? op_random_f32(t, 2 * C, 1.0) : NULL, 128 * w->f);
    struct twin db = twin_1d(
        twin_output_f32(w, "dbias", 1, 2, add ? op_random_f32(t, 2, 1.0) : NULL, 128 * w->f));
    TWINS_RUN(w, op_span_logits_backward(ON_STREAM(w), ON(w, dx), ON(w, dw), ON(w, db),
                                         ON(w, dlogits), ON(w, x), ON(w, m), ON_BATCH(w, b), add));
    twins_end(w);

    twins_begin(w, "span_loss", "%s%s", batch_name[batch], add ? ", evaluation" : "");
    twin_batch(w, b, spec);
    const struct step_state *state[SIDES];
    for (int side = 0; side < SIDES; side++)
        state[side] = op_state(&w->side[side], 0.125f);
    logits = twin_random_f32(w, T, 2, 3.0);
    dlogits = add ? twin_none() : twin_output_f32(w, "dlogits", T, 2, NULL, 8 * w->f);
    struct twin report = twin_struct(w, "report", &start, sizeof start, report_values, 1e-12);
    TWINS_RUN(w, op_span_loss(ON_STREAM(w), ON(w, dlogits), report_of(w, report), ON(w, logits),
                              ON_BATCH(w, b), state[w->now]));
    twins_end(w);
}

static void span_cases(const struct twin_group *g, struct twins *w)
{
    static const int channels[] = {8, 63, 264, 768};
    for (int batch = 0; batch < batch_count(g); batch++)
        for (int i = 0; i < (g->small ? 2 : 4); i++)
            span_case(w, batch, channels[i], i % 2);
}

static void span(void **state)
{
    twin_group_each(state, span_cases);
}

/* ---- sums and casts ------------------------------------------------------------------------- */

static void reduce_case(struct twins *w, int64_t n)
{
    struct op_test *t = &w->side[SIDE_GPU];
    for (int add = 0; add < 2; add++) {
        twins_begin(w, "accumulate", "n=%d %s", (int)n, add ? "add" : "set");
        struct twin in = twin_random_f32(w, 1, n, 1.0);
        struct twin sum =
            twin_output_f32(w, "out", 1, n, add ? op_random_f32(t, n, 1.0) : NULL, 0.0);
        TWINS_RUN(w, op_accumulate(ON_STREAM(w), ON(w, sum), ON(w, in), add));
        twins_end(w);
    }

    twins_begin(w, "cast", "n=%d", (int)n);
    double *x = op_random_f32(t, n, 1.0);
    for (int64_t i = 0; i + 4 < n; i += 5) {
        x[i] = 1.0 + ldexp((double)(i % 7), -8) + ldexp(1.0, -9); /* half way: to even */
        x[i + 1] = i % 2 ? (double)INFINITY : 1e-40;
    }
    struct twin in = twin_of_f32(w, x, 1, n), to = twin_output(w, "out", 1, n, NULL, w->u);
    TWINS_RUN(w, op_cast(ON_STREAM(w), ON(w, to), ON(w, in)));
    twins_end(w);

    static const struct step_report start = {.squared_norm = 0.25, .finite = 1};
    for (int bad = 0; bad < 3; bad++) {
        twins_begin(w, "squared_norm", "n=%d%s", (int)n,
                    bad == 0   ? ""
                    : bad == 1 ? ", one inf"
                               : ", large");
        x = op_random_f32(t, n, 1.0);
        if (bad == 1 && n > 0)
            x[n - 1] = INFINITY;
        if (bad == 2 && n > 0)
            x[n / 2] = ldexp(1.0, 100);
        struct twin g = twin_1d(twin_of_f32(w, x, 1, n));
        struct twin report = twin_struct(w, "report", &start, sizeof start, report_values, 1e-13);
        TWINS_RUN(w, op_squared_norm(ON_STREAM(w), report_of(w, report), ON(w, g)));
        twins_end(w);
    }
}

static void reduce_cases(const struct twin_group *g, struct twins *w)
{
    static const int sizes[] = {0, 1, 3, 4, 1023, 5000, 3000001};
    for (int i = 0; i < (g->small ? 6 : 7); i++)
        reduce_case(w, sizes[i]);
}

static void reduce(void **state)
{
    twin_group_each(state, reduce_cases);
}

/* ---- the step ------------------------------------------------------------------------------- */

static int state_values(double *values, const void *host)
{
    struct step_state s;
    memcpy(&s, host, sizeof s);
    const double v[] = {
        (double)s.t,           (double)s.lr,   (double)s.clip, (double)s.correction1,
        (double)s.correction2, (double)s.skip, (double)s.stop, (double)s.signal,
        (double)s.agreed,      s.loss,         s.grad_norm,    (double)s.sequences,
        (double)s.tokens};
    memcpy(values, v, sizeof v);
    return (int)(sizeof v / sizeof *v);
}

static void agree_case(struct twins *w, enum schedule_kind schedule, int64_t t, bool finite)
{
    struct step_report reports[3] = {0};
    const struct step_state start = {.host = {.step = 11, .seed = 5}, .t = t};
    const struct optim_hyper hyper = {.lr = 3e-5f,
                                      .beta1 = 0.9f,
                                      .beta2 = 0.999f,
                                      .eps = 1e-8f,
                                      .weight_decay = 0.01f,
                                      .max_grad_norm = 1.0f,
                                      .warmup_steps = 10,
                                      .total_steps = 100,
                                      .schedule = schedule};
    for (int r = 0; r < 3; r++)
        reports[r] = (struct step_report){.loss_sum = 1.25 * r + 0.1,
                                          .squared_norm = 0.7 * r + 0.3,
                                          .sequences = r + 1,
                                          .tokens = 100 * r,
                                          .finite = finite || r != 1,
                                          .stop = r == 2 ? STOP_SIGNAL : 0,
                                          .signal = r == 2 ? 15 : 0,
                                          .step = 11};
    twins_begin(w, "agree", "schedule %d, t=%d%s", schedule, (int)t, finite ? "" : ", not finite");
    struct step_report *on_device[SIDES];
    for (int side = 0; side < SIDES; side++)
        on_device[side] = op_upload(&w->side[side], reports, sizeof reports);
    struct twin state = twin_struct(w, "state", &start, sizeof start, state_values, 4 * w->f);
    TWINS_RUN(w, op_agree(ON_STREAM(w), ON(w, state).data, on_device[w->now], 3, &hyper, NULL));
    twins_end(w);

    twins_begin(w, "step_begin", "schedule %d, t=%d", schedule, (int)t);
    const struct step_state now = {
        .host = {.step = 12, .tokens = 345, .stop = STOP_EARLY, .signal = 2, .training = 1}};
    struct step_state *state_on[SIDES];
    for (int side = 0; side < SIDES; side++)
        state_on[side] = op_upload(&w->side[side], &now, sizeof now);
    struct twin report = twin_struct(w, "report", reports, sizeof *reports, report_values, 0.0);
    TWINS_RUN(w, op_step_begin(ON_STREAM(w), report_of(w, report), state_on[w->now], NULL));
    twins_end(w);
}

static void agree_cases(const struct twin_group *g, struct twins *w)
{
    static const int64_t applied[] = {0, 3, 10, 55, 100, 120};
    (void)g;
    for (int kind = SCHEDULE_LINEAR; kind <= SCHEDULE_CONSTANT; kind++)
        for (int i = 0; i < 6; i++)
            agree_case(w, (enum schedule_kind)kind, applied[i], i != 3);
}

static void report_and_agree(void **state)
{
    twin_group_each(state, agree_cases);
}

static double *squares(double *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = op_round(DTYPE_F32, x[i] * x[i]);
    return x;
}

/* One of @rows rows of eight is zero, as those of a table that no token has met. */
static double *unmet(double *x, int64_t n, int64_t rows)
{
    for (int64_t i = 0; i < n; i++)
        if (i / 8 % rows == 1)
            x[i] = 0.0;
    return x;
}

/* A marked row has no other numbers. */
static double *marked(double *x, int64_t n, int64_t row_numel)
{
    const int32_t mark = ROW_MARK;
    float first;
    memcpy(&first, &mark, sizeof first);
    for (int64_t i = 0; row_numel > 0 && i < n; i++)
        if (i / row_numel % 3 != 1)
            x[i] = i % row_numel == 0 ? (double)first : (double)NAN;
    return x;
}

/* Some m and v are zero, and half of their gradients; with @row_numel rows are marked. */
static void adamw_case(struct twins *w, int64_t n, int64_t row_numel, bool skip)
{
    struct op_test *t = &w->side[SIDE_GPU];
    const struct step_state now = {
        .lr = 1e-3f, .clip = 0.5f, .correction1 = 0.271f, .correction2 = 0.002997f, .skip = skip};
    const struct optim_hyper hyper = {
        .lr = 1e-3f, .beta1 = 0.9f, .beta2 = 0.999f, .eps = 1e-8f, .weight_decay = 0.01f};
    const int64_t a = n / 3, b = n / 2; /* not multiples of four */
    const struct adam_range ranges[] = {{0, a, true, false},
                                        {a, 0, false, false},
                                        {a, b - a, false, true},
                                        {b, n - b, false, false}};
    double tolerance = skip ? 0.0 : 16 * w->f;
    twins_begin(w, "adamw", "n=%d rows of %d%s", (int)n, (int)row_numel, skip ? " skip" : "");
    const struct step_state *state[SIDES];
    for (int side = 0; side < SIDES; side++)
        state[side] = op_upload(&w->side[side], &now, sizeof now);
    struct twin param =
        twin_1d(twin_output_f32(w, "param", 1, n, op_random_f32(t, n, 1.0), tolerance));
    double *old_m = unmet(op_random_f32(t, n, 0.1), n, 4);
    double *old_v = unmet(squares(op_random_f32(t, n, 0.1), n), n, 4);
    struct twin m = twin_1d(twin_output_f32(w, "m", 1, n, old_m, tolerance));
    struct twin v = twin_1d(twin_output_f32(w, "v", 1, n, old_v, tolerance));
    double *g = marked(unmet(op_random_f32(t, n, 1.0), n, 8), n, row_numel);
    struct twin grad = twin_1d(twin_of_f32(w, g, 1, n));
    TWINS_RUN(w, op_adamw(ON_STREAM(w), ON(w, param), (struct tensor){0}, ON(w, m), ON(w, v),
                          ON(w, grad), ranges, 4, row_numel, state[w->now], &hyper));
    for (int shift = 0; shift < 2; shift++) /* that they are the same to the bit */
        halves_step(t, n, row_numel, shift, state[SIDE_GPU], &hyper);
    twins_end(w);
}

static void adamw_cases(const struct twin_group *g, struct twins *w)
{
    static const int sizes[] = {0, 1, 5, 128, 1000, 100003};
    for (int i = 0; i < (g->small ? 5 : 6); i++) {
        adamw_case(w, sizes[i], 0, false);
        adamw_case(w, sizes[i], 0, true);
        adamw_case(w, sizes[i], 36, false);
        adamw_case(w, sizes[i], 19, false);
    }
}

static void adamw(void **state)
{
    twin_group_each(state, adamw_cases);
}

static void master_split_cases(const struct twin_group *g, struct twins *w)
{
    twins_begin(w, "master_split", "against the host's");
    for (int64_t n = 0; n <= (g->small ? 257 : 100003); n = n * 7 + 1)
        halves_split(&w->side[SIDE_GPU], n);
    twins_end(w);
}

static void master_split(void **state)
{
    twin_group_each(state, master_split_cases);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gelu),          cmocka_unit_test(linear),
        cmocka_unit_test(embedding),     cmocka_unit_test(adamw),
        cmocka_unit_test(master_split),  cmocka_unit_test(norm),
        cmocka_unit_test(dropout_alone), cmocka_unit_test(span),
        cmocka_unit_test(reduce),        cmocka_unit_test(report_and_agree),
    };
    return cmocka_run_group_tests(tests, group_open, twin_group_close);
}
