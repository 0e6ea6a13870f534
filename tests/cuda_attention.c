/*
 * Attention on a GPU against the CPU backend: lengths around every tile border, query rows beyond
 * the keys, rows of no sequence, dropout, guard bytes, two runs with the same bits.
 *
 * Without a GPU every test is skipped. TESSERA_SMALL=1 keeps the small cases, for
 * compute-sanitizer.
 *
 * What a value may differ by is derived for each value, from the same numbers in double. With u the
 * unit round-off of the GPU's dtype (2^-8 or 2^-24) and f = 2^-24:
 *
 *   - Every output is a sum over partners, sum_j w_j x_j, whose weights (P with its mask in out and
 *     dv, dS in dq and dk) the GPU may round to its dtype: w_j (1 + d_j), |d_j| <= u. The sum is
 *     off by at most u S1, S1 = sum |w_j x_j|. The d_j are rounding errors of unlike numbers,
 *     centred and as good as independent, so by Hoeffding's inequality the sum is off by more than
 *     t u S2, S2^2 = sum (w_j x_j)^2, with a chance of 2 exp(-t^2 / 2): 1.3e-9 for t = 6.5, a
 *     thousandth for the 10^6 values of a run. So u min(S1, 6.5 S2).
 *   - The result is rounded once: u |want|.
 *   - fp32 on both sides: sums of up to 512 terms, an exponential whose argument is a difference of
 *     numbers of the size of 10; 256 f of the sum of the absolute values of all that is added, E.
 *     In dS = P (mask dP - delta) that is not |dS|, for dP and delta may cancel, but
 *     P (mask sum_d |dout_d v_d| + sum_d |dout_d out_d|).
 *
 * dbias is held to the sums of what is allowed in dqkv, and more closely to the sums S of what the
 * GPU itself stored there. It may have added what it had before that was rounded, so by the above
 * within u min(S1, 6.5 S2) + 64 f S1.
 *
 * Backward starts from the CPU's out and lse, rounded as the GPU holds them, on both sides; so
 * delta adds no error of its own.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/out.h"
#include "engine/ops/ops_cuda.h"
#include "tests/support/twins.h"

static const struct op_limits limits = {
    .rows = 2048,
    .channels = 256,
    .ffn = 1024,
    .heads = 3,
    .sequences = 16,
    .max_length = 512,
    .vocab_rows = 64,
    .world_size = 1,
};

/* ---- batches -------------------------------------------------------------------------------- */

enum { ODD, WHOLE, EDGES, PADDED, NO_ROWS, ONLY_TAIL, LONG, PASSES, LATE, BATCHES };

static const char *const batch_name[BATCHES] = {
    "odd positions", "whole groups", "tile borders",       "padded", "no rows",
    "only tail",     "long",         "two passes of keys", "late"};
static const int odd_lengths[] = {5, 0, 1, 33, 17, 0}, odd_keys[] = {5, 0, 1, 33, 11, 0};
static const int edge_lengths[] = {1, 17, 63, 64, 65, 0, 2};
static const int padded_lengths[] = {65, 64, 130, 17, 33}, padded_keys[] = {40, 64, 65, 0, 1};
static const int long_lengths[] = {175, 384, 512, 129}, long_keys[] = {175, 384, 500, 128};
static const int pass_lengths[] = {40, 384, 193, 300, 257}, pass_keys[] = {40, 384, 193, 270, 250};
static const int late_lengths[] = {130, 5, 200}, late_keys[] = {130, 5, 129};
static const int none[] = {0};

static const struct op_batch_spec batch_spec[BATCHES] = {
    [ODD] = {odd_lengths, odd_keys, 6, 61, 37, 23, 2, 1000}, /* dropout: no whole groups of 8 */
    [WHOLE] = {odd_lengths, odd_keys, 6, 56, 40, 7, 3, 0},
    [EDGES] = {edge_lengths, NULL, 7, 219, 128, 23, 2, 5},
    [PADDED] = {padded_lengths, padded_keys, 5, 309, 192, 23, 2, 70000},
    [NO_ROWS] = {none, none, 1, 0, 40, 23, 2, 0},
    [ONLY_TAIL] = {none, none, 1, 13, 40, 23, 2, 0},
    [LONG] = {long_lengths, long_keys, 4, 1207, 512, 23, 2, 3},
    [PASSES] = {pass_lengths, pass_keys, 5, 1180, 384, 23, 2, 11},
    [LATE] = {late_lengths, late_keys, 3, 340, 200, 23, 2, 9},
};

enum { DROP_NONE, DROP_TRAINING, DROP_EVALUATION, DROPS };
static const char *const drop_name[DROPS] = {"p=0", "p=0.1", "p=0.1 in evaluation"};
static const float DROP_P = 0.1f;

/* ---- what a value may differ by ------------------------------------------------------------- */

struct sums { /* of one output, a value each; see the top */
    double *value, *s1, *s2, *e;
};

static struct sums sums_make(struct op_test *t, int64_t n)
{
    return (struct sums){op_zeros(t, n), op_zeros(t, n), op_zeros(t, n), op_zeros(t, n)};
}

static void sums_add(struct sums *x, int64_t at, double term, double magnitude)
{
    x->value[at] += term;
    x->s1[at] += fabs(term);
    x->s2[at] += term * term;
    x->e[at] += magnitude;
}

/* 5% for terms of second order; the last addend for rows that are zeros. */
static double *sums_allowed(struct twins *w, struct sums *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x->value[i] = 1.05 * w->u * (fabs(x->value[i]) + fmin(x->s1[i], 6.5 * sqrt(x->s2[i]))) +
                      256 * w->f * x->e[i] + 1e-30;
    return x->value;
}

struct problem {
    const struct sequences *q;
    int heads, width;
    bool drop;
    const double *qkv, *out, *dout; /* out, dout: NULL in forward */
    struct sums sum;                /* of out or of dqkv */
};

static double dot(const double *x, const double *y, int n, bool absolute)
{
    double sum = 0;
    for (int d = 0; d < n; d++)
        sum += absolute ? fabs(x[d] * y[d]) : x[d] * y[d];
    return sum;
}

/* One query row of one head: probabilities into @p, dropout's factors into @factor. */
static void weights(const struct problem *x, int b, int h, int i, double *p, double *factor)
{
    int64_t C = (int64_t)x->heads * x->width, first = x->q->cu_seqlens[b];
    const double *base = x->qkv + first * 3 * C + h * x->width, *query = base + i * 3 * C;
    int64_t element = ((int64_t)h * x->q->positions + i) * x->q->positions;
    double most = -INFINITY, total = 0;
    for (int j = 0; j < x->q->kv_len[b]; j++) {
        p[j] = dot(query, base + j * 3 * C + C, x->width, false) / sqrt((double)x->width);
        most = fmax(most, p[j]);
    }
    for (int j = 0; j < x->q->kv_len[b]; j++)
        total += p[j] = exp(p[j] - most);
    for (int j = 0; j < x->q->kv_len[b]; j++) {
        p[j] /= total;
        factor[j] =
            x->drop ? op_dropout_factor(DROP_P, SITE_ATTENTION, x->q->sample[b], element + j) : 1.0;
    }
}

static void add_out(struct problem *x, int b, int h, int i, const double *p, const double *factor)
{
    int64_t C = (int64_t)x->heads * x->width, first = x->q->cu_seqlens[b];
    for (int j = 0; j < x->q->kv_len[b]; j++)
        for (int d = 0; d < x->width; d++) {
            double v = x->qkv[(first + j) * 3 * C + 2 * C + h * x->width + d];
            double term = p[j] * factor[j] * v;
            sums_add(&x->sum, (first + i) * C + h * x->width + d, term, fabs(term));
        }
}

static void add_gradients(struct problem *x, int b, int h, int i, const double *p,
                          const double *factor)
{
    int64_t C = (int64_t)x->heads * x->width, first = x->q->cu_seqlens[b];
    int64_t column = h * x->width, mine = (first + i) * 3 * C + column;
    const double *dout = x->dout + (first + i) * C + column;
    const double *out = x->out + (first + i) * C + column;
    double scale = 1.0 / sqrt((double)x->width);
    double delta = dot(dout, out, x->width, false), delta_size = dot(dout, out, x->width, true);
    for (int j = 0; j < x->q->kv_len[b]; j++) {
        int64_t other = (first + j) * 3 * C + column;
        const double *query = x->qkv + mine, *key = x->qkv + other + C, *v = key + C;
        double weight = p[j] * factor[j];
        double ds = p[j] * (factor[j] * dot(dout, v, x->width, false) - delta) * scale;
        double size = p[j] * (factor[j] * dot(dout, v, x->width, true) + delta_size) * scale;
        for (int d = 0; d < x->width; d++) {
            sums_add(&x->sum, mine + d, ds * key[d], size * fabs(key[d]));
            sums_add(&x->sum, other + C + d, ds * query[d], size * fabs(query[d]));
            sums_add(&x->sum, other + 2 * C + d, weight * dout[d], weight * fabs(dout[d]));
        }
    }
}

static void add_all(struct op_test *t, struct problem *x)
{
    double *p = op_zeros(t, limits.max_length), *factor = op_zeros(t, limits.max_length);
    for (int b = 0; b < x->q->count; b++)
        for (int h = 0; h < x->heads; h++)
            for (int i = 0; i < x->q->cu_seqlens[b + 1] - x->q->cu_seqlens[b]; i++) {
                weights(x, b, h, i, p, factor);
                if (x->dout)
                    add_gradients(x, b, h, i, p, factor);
                else
                    add_out(x, b, h, i, p, factor);
            }
}

/* Of dbias (columns): the sums of those of dqkv, and what it is added to, NULL: nothing. */
static double *sums_of_allowed(struct twins *w, const double *allowed, int64_t rows,
                               int64_t columns, const double *initial)
{
    double *sum = op_zeros(&w->side[SIDE_GPU], columns);
    for (int64_t i = 0; i < rows * columns; i++)
        sum[i % columns] += allowed[i];
    for (int64_t i = 0; i < columns; i++)
        sum[i] += 4 * w->f * (initial ? fabs(initial[i]) : 0.0) + 1e-30;
    return sum;
}

static double stored_value(const struct twin_output *o, int64_t i)
{
    uint32_t bits = o->twin.side[SIDE_GPU].dtype == DTYPE_F32
                        ? ((const uint32_t *)o->result[0])[i]
                        : (uint32_t)((const uint16_t *)o->result[0])[i] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return (double)value;
}

/* @dbias of the GPU is the sum of its own @dqkv (rows, columns), and of @initial. */
static void check_own_sums(struct twins *w, const struct twin_output *dqkv,
                           const struct twin_output *dbias, const double *initial)
{
    int64_t rows = dqkv->twin.side[SIDE_GPU].shape[0], columns = dqkv->twin.side[SIDE_GPU].shape[1];
    for (int64_t c = 0; c < columns; c++) {
        double got = stored_value(dbias, c), sum = initial ? initial[c] : 0.0;
        double s1 = 0, s2 = 0;
        for (int64_t r = 0; r < rows; r++) {
            double x = stored_value(dqkv, r * columns + c);
            sum += x;
            s1 += fabs(x);
            s2 += x * x;
        }
        double allowed = w->u * fmin(s1, 6.5 * sqrt(s2)) + 64 * w->f * (s1 + fabs(sum));
        if (!(fabs(got - sum) <= allowed))
            fail_msg("%s: dbias[%lld] is %.9g, the sum of dqkv %.9g, allowed %.3g", w->label,
                     (long long)c, got, sum, allowed);
    }
}

/* ---- cases ---------------------------------------------------------------------------------- */

static int group_open(void **state)
{
    static struct twin_group group;
    return twin_group_open(state, &group, &limits);
}

struct attention_size {
    int heads, width;
};

/*
 * Keys behind the first tile of a sequence that are FAR times as large: some scores pass those
 * before by more than single-precision sums of powers of two can, if they keep their reference.
 */
enum { FAR = 24 };

static void keys_enlarge(double *qkv, const struct op_test *gpu, const struct op_batch_spec *spec,
                         int64_t channels)
{
    int64_t first = 0;
    for (int b = 0; b < spec->count; first += spec->lengths[b++])
        for (int64_t i = (first + 64) * 3 * channels; i < (first + spec->lengths[b]) * 3 * channels;
             i++)
            if (i % (3 * channels) / channels == 1)
                qkv[i] = op_round(gpu->dtype, FAR * qkv[i]);
}

static void attention_case(struct twins *w, int batch, struct attention_size z, int kind, bool far)
{
    const struct op_batch_spec *spec = &batch_spec[batch];
    int64_t T = spec->rows, C = (int64_t)z.heads * z.width;
    struct op_test *gpu = &w->side[SIDE_GPU], *cpu = &w->side[SIDE_CPU];
    struct op_batch b[SIDES];
    float p = kind == DROP_NONE ? 0.0f : DROP_P;

    twins_begin(w, "attention_forward", "%s H=%d D=%d %s", batch_name[batch], z.heads, z.width,
                drop_name[kind]);
    twin_batch(w, b, spec);
    struct twin_dropout drop = twin_dropout(w, p, SITE_ATTENTION, kind == DROP_TRAINING);
    double *values = op_random(gpu, T * 3 * C, 1.0);
    if (far)
        keys_enlarge(values, gpu, spec, C);
    struct problem x = {.q = &b[SIDE_CPU].host,
                        .heads = z.heads,
                        .width = z.width,
                        .drop = kind == DROP_TRAINING,
                        .qkv = values,
                        .sum = sums_make(gpu, T * C)};
    add_all(gpu, &x);
    struct twin qkv = twin_of(w, values, T, 3 * C);
    struct twin out = twin_output_within(w, "out", T, C, sums_allowed(w, &x.sum, T * C));
    struct twin lse = twin_output_f32(w, "lse", z.heads, T, NULL, 64 * w->f);
    TWINS_RUN(w, op_attention_forward(ON_STREAM(w), ON(w, out), ON(w, lse), ON(w, qkv),
                                      ON_BATCH(w, b), z.heads, drop.side[w->now]));
    /* The CPU's results, rounded, are what both backward passes start from. */
    double *forward = op_get(cpu, out.side[SIDE_CPU]), *sums = op_get(cpu, lse.side[SIDE_CPU]);
    double *keep[3] = {NULL, NULL, NULL};
    const double *from[3] = {values, forward, sums};
    const int64_t count[3] = {T * 3 * C, T * C, z.heads * T};
    for (int i = 0; i < 3; i++) { /* twins_end() frees what the twins hold */
        assert_ok(mem_alloc(&keep[i], (size_t)(count[i] + 1) * sizeof(double)));
        memcpy(keep[i], from[i], (size_t)count[i] * sizeof(double));
    }
    for (int64_t i = 0; i < count[1]; i++)
        keep[1][i] = op_round(gpu->dtype, keep[1][i]);
    twins_end(w);

    twins_begin(w, "attention_backward", "%s H=%d D=%d %s", batch_name[batch], z.heads, z.width,
                drop_name[kind]);
    twin_batch(w, b, spec);
    drop = twin_dropout(w, p, SITE_ATTENTION, kind == DROP_TRAINING);
    qkv = twin_of(w, keep[0], T, 3 * C);
    out = twin_of(w, keep[1], T, C);
    lse = twin_of_f32(w, keep[2], z.heads, T);
    values = op_random(gpu, T * C, 1.0);
    x = (struct problem){.q = &b[SIDE_CPU].host,
                         .heads = z.heads,
                         .width = z.width,
                         .drop = kind == DROP_TRAINING,
                         .qkv = keep[0],
                         .out = keep[1],
                         .dout = values,
                         .sum = sums_make(gpu, T * 3 * C)};
    add_all(gpu, &x);
    struct twin dout = twin_of(w, values, T, C);
    double *allowed = sums_allowed(w, &x.sum, T * 3 * C);
    struct twin d = twin_output_within(w, "dqkv", T, 3 * C, allowed), dbias = twin_none();
    double *before = kind == DROP_TRAINING ? op_random_f32(gpu, 3 * C, 1.0) : NULL;
    if (kind != DROP_EVALUATION) { /* else frozen */
        dbias = twin_1d(twin_output_f32(w, "dbias", 1, 3 * C, before, 0.0));
        w->output[1].allowed = sums_of_allowed(w, allowed, T, 3 * C, before);
    }
    TWINS_RUN(w, op_attention_backward(ON_STREAM(w), ON(w, d), ON(w, dbias), ON(w, dout),
                                       ON(w, out), ON(w, lse), ON(w, qkv), ON_BATCH(w, b), z.heads,
                                       drop.side[w->now], before != NULL));
    if (kind != DROP_EVALUATION)
        check_own_sums(w, &w->output[0], &w->output[1], before);
    twins_end(w);
    for (int i = 0; i < 3; i++)
        mem_free(&keep[i]);
}

/* All kinds of dropout, widths of both kinds of kernels. */
static void attention_cases(struct twins *w, int first, int end)
{
    static const struct attention_size sizes[] = {{2, 32}, {2, 64}, {1, 128},
                                                  {3, 8},  {2, 24}, {1, 200}};
    for (int batch = first; batch < end; batch++)
        for (int i = 0; i < (batch == LONG ? 3 : 6); i++)
            for (int kind = 0; kind < DROPS; kind++)
                attention_case(w, batch, sizes[i], kind, false);
}

/* In bf16 only: fp32 scores of this size differ by more than its bounds allow. */
static void far_cases(const struct twin_group *g, struct twins *w)
{
    static const struct attention_size sizes[] = {{2, 32}, {2, 64}, {1, 128}};
    (void)g;
    if (w->side[SIDE_GPU].dtype != DTYPE_BF16)
        return;
    for (int i = 0; i < 3; i++)
        for (int kind = 0; kind < DROPS; kind++)
            attention_case(w, LATE, sizes[i], kind, true);
}

static void scores_far_beyond_those_before_agree_with_the_cpu(void **state)
{
    twin_group_each(state, far_cases);
}

static void short_cases(const struct twin_group *g, struct twins *w)
{
    (void)g;
    attention_cases(w, ODD, NO_ROWS);
}

static void short_sequences_agree_with_the_cpu(void **state)
{
    twin_group_each(state, short_cases);
}

static void empty_cases(const struct twin_group *g, struct twins *w)
{
    (void)g;
    attention_cases(w, NO_ROWS, LONG);
}

static void b25_no_rows_and_rows_of_no_sequence(void **state)
{
    twin_group_each(state, empty_cases);
}

static void long_cases(const struct twin_group *g, struct twins *w)
{
    (void)g;
    attention_cases(w, LONG, PASSES);
    for (int kind = 0; kind < DROPS && w->side[SIDE_GPU].dtype == DTYPE_BF16; kind++)
        attention_case(w, PASSES, (struct attention_size){2, 64}, kind, false);
}

static void long_sequences_agree_with_the_cpu(void **state)
{
    const struct twin_group *g = *state;
    if (g->small)
        skip();
    twin_group_each(state, long_cases);
}

/* Both passes of one head's batch; @masks: what forward leaves for backward, or NULL. */
struct passes {
    double *out, *lse, *dqkv, *dbias;
};

static struct passes passes_run(struct op_test *t, const struct op_batch *b,
                                struct attention_size z, struct tensor qkv, struct tensor dout,
                                void *masks)
{
    int64_t T = b->q.rows, C = (int64_t)z.heads * z.width;
    struct dropout drop = op_dropout(t, DROP_P, SITE_ATTENTION);
    struct tensor out = op_put_2d(t, NULL, T, C), lse = op_put_f32_2d(t, NULL, z.heads, T);
    struct tensor dqkv = op_put_2d(t, NULL, T, 3 * C), dbias = op_put_f32_1d(t, NULL, 3 * C);
    drop.masks = masks;
    assert_ok(op_attention_forward(t->s, out, lse, qkv, &b->q, z.heads, drop));
    assert_ok(
        op_attention_backward(t->s, dqkv, dbias, dout, out, lse, qkv, &b->q, z.heads, drop, false));
    assert_ok(op_finish_sums(t->s));
    return (struct passes){op_get(t, out), op_get(t, lse), op_get(t, dqkv), op_get(t, dbias)};
}

/* Words of masks that forward leaves of a head: of whole tiles of 64 queries and 64 keys, where
 * attention.cu chooses the kernels that keep them. */
static int64_t kept_words(const struct op_batch_spec *spec)
{
    bool hopper;
    int64_t tiles = 0;
    assert_ok(cuda_attention_for_hopper(&hopper));
    for (int i = 0; hopper && spec->positions % 8 == 0 && i < spec->count; i++)
        tiles += (spec->lengths[i] + 63) / 64 * ((spec->keys[i] + 63) / 64);
    return tiles * 64 * 64 / 32;
}

/* Forward leaves the masks that backward would make, and where it does not, nothing. A word of
 * which nothing is kept does not come up. */
static void kept_case(struct op_test *t, int batch, struct attention_size z)
{
    const struct op_batch_spec *spec = &batch_spec[batch];
    int64_t T = spec->rows, C = (int64_t)z.heads * z.width;
    struct op_batch b;
    op_batch_make(t, &b, spec);
    size_t bytes = op_attention_mask_bytes(t->s->device->param_dtype, z.width, z.heads, T,
                                           spec->count, b.q.max_length);
    struct tensor qkv = op_put_2d(t, op_random(t, T * 3 * C, 1.0), T, 3 * C);
    struct tensor dout = op_put_2d(t, op_random(t, T * C, 1.0), T, C);
    struct tensor masks = op_put_f32_1d(t, op_zeros(t, (int64_t)bytes / 4), (int64_t)bytes / 4);
    struct passes made = passes_run(t, &b, z, qkv, dout, NULL);
    struct passes kept = passes_run(t, &b, z, qkv, dout, masks.data);
    op_same("out", kept.out, made.out, T * C);
    op_same("lse", kept.lse, made.lse, z.heads * T);
    op_same("dqkv", kept.dqkv, made.dqkv, T * 3 * C);
    op_same("dbias", kept.dbias, made.dbias, 3 * C);
    int64_t left = 0;
    const double *words = op_get(t, masks); /* and its guards are whole */
    for (int64_t i = 0; i < (int64_t)bytes / 4; i++)
        left += words[i] < 0 || words[i] > 0 || isnan(words[i]);
    int64_t expected = bytes > 0 ? z.heads * kept_words(spec) : 0;
    if (left != expected)
        fail_msg("%s, H=%d D=%d: %lld words of masks left by forward, expected %lld",
                 batch_name[batch], z.heads, z.width, (long long)left, (long long)expected);
}

static void masks_cases(const struct twin_group *g, struct twins *w)
{
    static const struct attention_size sizes[] = {{2, 32}, {3, 64}, {1, 128}, {3, 8}};
    static const int batches[] = {ODD, WHOLE, PADDED, ONLY_TAIL, LONG, PASSES};
    for (int i = 0; i < (g->small ? 4 : 6); i++)
        for (int k = 0; k < 4; k++)
            kept_case(&w->side[SIDE_GPU], batches[i], sizes[k]);
}

static void kept_masks_change_no_bit(void **state)
{
    twin_group_each(state, masks_cases);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kept_masks_change_no_bit),
        cmocka_unit_test(short_sequences_agree_with_the_cpu),
        cmocka_unit_test(b25_no_rows_and_rows_of_no_sequence),
        cmocka_unit_test(long_sequences_agree_with_the_cpu),
        cmocka_unit_test(scores_far_beyond_those_before_agree_with_the_cpu),
    };
    return cmocka_run_group_tests(tests, group_open, twin_group_close);
}
