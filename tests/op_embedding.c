/* engine/ops/embedding.h: look-up in a table that is split in parts. */
#include <math.h>

#include "engine/ops/embedding.h"
#include "tests/support/ops.h"

enum { C = 19, V = 23, FIRST = 9 }; /* parts: rows 0..8 and 9..22 */

/* Whole rows of the table, for the rows of one batch. */
static enum status rows_forward(struct stream *s, struct tensor out, struct tensor table,
                                const struct sequences *q, int64_t first_row, bool set)
{
    struct tensor part = tensor_1d(table.data, table.dtype, table.shape[0] * table.shape[1]);
    return op_embedding_forward(s, out, part, sequences_rows(q), first_row * C, set);
}

static enum status rows_backward(struct stream *s, struct tensor dtable, struct tensor dout,
                                 const struct sequences *q, int64_t first_row,
                                 enum table_rows others)
{
    struct tensor part = tensor_1d(dtable.data, DTYPE_F32, dtable.shape[0] * dtable.shape[1]);
    return op_embedding_backward(s, part, dout, sequences_rows(q), first_row * C, others);
}

static void parts_of_a_split_table_fill_every_row(void **state)
{
    struct op_test *t = *state;
    struct op_batch b;
    op_mixed_batch(t, &b);
    int64_t T = b.host.rows;
    double *table = op_random(t, V * C, 1.0), *want = op_zeros(t, T * C);
    for (int64_t i = 0; i < T * C; i++) {
        int32_t token = b.host.token[i / C];
        want[i] = token < 0 ? 0.0 : table[token * C + i % C];
    }
    struct tensor out = op_put_2d(t, NULL, T, C), low = op_put_2d(t, table, FIRST, C);
    struct tensor high = op_put_2d(t, table + FIRST * C, V - FIRST, C);
    assert_ok(rows_forward(t->s, out, low, &b.q, 0, true));
    assert_ok(rows_forward(t->s, out, high, &b.q, FIRST, false));
    op_same("out", op_get(t, out), want, T * C);
}

static bool is_negative_zero(double x)
{
    return x == 0 && signbit(x);
}

/* A range that begins and ends anywhere gives what lies in it. The rest is kept, or what changes no
 * sum; rows of no sequence are zeros. */
static void any_range_of_a_table_gives_its_elements_of_the_rows(void **state)
{
    struct op_test *t = *state;
    struct op_batch b;
    op_mixed_batch(t, &b);
    int64_t T = b.host.rows, n = V * C;
    double *table = op_random(t, n, 1.0), *before = op_random(t, T * C, 1.0);
    static const int64_t cuts[] = {0, 1, C - 1, C, C + 1, 3 * C + 7, 9 * C, V * C - 1, V * C};
    enum { CUTS = sizeof cuts / sizeof *cuts };
    for (int i = 0; i < CUTS; i++)
        for (int k = i; k < CUTS; k++) {
            struct tensor part = op_put_1d(t, table + cuts[i], cuts[k] - cuts[i]);
            struct tensor set = op_put_2d(t, NULL, T, C), kept = op_put_2d(t, before, T, C);
            struct token_rows rows = sequences_rows(&b.q);
            assert_ok(op_embedding_forward(t->s, set, part, rows, cuts[i], true));
            assert_ok(op_embedding_forward(t->s, kept, part, rows, cuts[i], false));
            double *got = op_get(t, set), *added = op_get(t, kept);
            for (int64_t e = 0; e < T * C; e++) {
                int64_t at = b.host.token[e / C] * C + e % C;
                bool found = b.host.token[e / C] >= 0 && at >= cuts[i] && at < cuts[k];
                assert_true(added[e] == (found ? table[at] : before[e]));
                if (found)
                    assert_true(got[e] == table[at]);
                else
                    assert_true(got[e] == 0 && !signbit(got[e]) == (b.host.token[e / C] < 0));
            }
        }
}

/* What three ranks have of two parts: added up in any order it has the bits of the table, a zero's
 * sign too. */
static void the_sum_of_what_ranks_have_is_the_whole_look_up(void **state)
{
    struct op_test *t = *state;
    struct op_batch b;
    op_mixed_batch(t, &b);
    enum { RANKS = 3, PARTS = 2 };
    int64_t T = b.host.rows;
    double *table = op_random(t, V * C, 1.0), *rank[RANKS], *whole;
    for (int64_t i = 0; i < V * C; i += 3)
        table[i] = i % 2 ? -0.0 : 0.0;
    struct tensor out = op_put_2d(t, NULL, T, C);
    struct token_rows rows = sequences_rows(&b.q);
    assert_ok(op_embedding_forward(t->s, out, op_put_1d(t, table, V * C), rows, 0, true));
    whole = op_get(t, out);
    for (int r = 0; r < RANKS; r++) {
        struct tensor own = op_put_2d(t, NULL, T, C);
        for (int part = 0; part < PARTS; part++) {
            int64_t from = part * FIRST * C, numel = (part ? V - FIRST : FIRST) * C;
            int64_t shard = numel / RANKS + 1, first = r * shard;
            numel = first + shard < numel ? shard : numel - first;
            assert_ok(op_embedding_forward(t->s, own, op_put_1d(t, table + from + first, numel),
                                           rows, from + first, part == 0));
        }
        rank[r] = op_get(t, own);
    }
    int64_t negative = 0;
    for (int64_t i = 0; i < T * C; i++) {
        float up = (float)rank[0][i] + (float)rank[1][i] + (float)rank[2][i];
        float down = (float)rank[2][i] + (float)rank[1][i] + (float)rank[0][i];
        double want = b.host.token[i / C] < 0 ? 0.0 : table[b.host.token[i / C] * C + i % C];
        assert_true((double)up == want && !signbit(up) == !signbit(want));
        assert_true((double)down == want && !signbit(down) == !signbit(want));
        assert_true(whole[i] == want && !signbit(whole[i]) == !signbit(want));
        negative += is_negative_zero(want);
    }
    assert_true(negative > 0);
}

static void gradients_add_up_per_token(void **state)
{
    struct op_test *t = *state;
    struct op_batch b;
    op_mixed_batch(t, &b);
    int64_t T = b.host.rows, n = (V - FIRST) * C;
    double *dout = op_random(t, T * C, 1.0), *want = op_zeros(t, V * C);
    double *before = op_random_f32(t, n, 1.0);
    for (int64_t i = 0; i < T * C; i++)
        if (b.host.token[i / C] >= 0)
            want[b.host.token[i / C] * C + i % C] += dout[i];
    struct tensor dtable = op_put_f32_2d(t, NULL, V - FIRST, C), ddout = op_put_2d(t, dout, T, C);
    struct tensor again = op_put_f32_2d(t, NULL, V - FIRST, C);
    struct tensor sum = op_put_f32_2d(t, before, V - FIRST, C);
    assert_ok(rows_backward(t->s, dtable, ddout, &b.q, FIRST, ROWS_ZERO));
    assert_ok(rows_backward(t->s, again, ddout, &b.q, FIRST, ROWS_ZERO));
    assert_ok(rows_backward(t->s, sum, ddout, &b.q, FIRST, ROWS_KEPT));
    assert_ok(rows_backward(t->s, op_none(), ddout, &b.q, FIRST, ROWS_KEPT));
    op_close("dtable", op_get(t, dtable), want + FIRST * C, n, 61 * 1.2e-7 * 4);
    op_same("bits", op_get(t, again), op_get(t, dtable), n);
    for (int64_t i = 0; i < n; i++)
        before[i] += want[FIRST * C + i];
    op_close("added", op_get(t, sum), before, n, 61 * 1.2e-7 * 4);
}

/* A rank's shard of a part begins and ends anywhere: its elements have the bits of the whole. */
static void any_range_of_elements_has_the_bits_of_the_whole_gradient(void **state)
{
    struct op_test *t = *state;
    struct op_batch b;
    op_mixed_batch(t, &b);
    int64_t T = b.host.rows, n = V * C;
    double *before = op_random_f32(t, n, 1.0);
    struct tensor dout = op_put_2d(t, op_random(t, T * C, 1.0), T, C);
    struct tensor set = op_put_f32_2d(t, NULL, V, C), sum = op_put_f32_2d(t, before, V, C);
    struct token_rows rows = sequences_rows(&b.q);
    rows.batches = 4;
    assert_ok(rows_backward(t->s, set, dout, &b.q, 0, ROWS_ZERO));
    assert_ok(rows_backward(t->s, sum, dout, &b.q, 0, ROWS_KEPT));
    double *whole = op_get(t, set), *added = op_get(t, sum);
    static const int64_t cuts[] = {0, 1, C - 1, C, C + 1, 3 * C + 7, 9 * C, V * C - 1, V * C};
    enum { CUTS = sizeof cuts / sizeof *cuts };
    for (int i = 0; i < CUTS; i++)
        for (int k = i; k < CUTS; k++) {
            int64_t first = cuts[i], numel = cuts[k] - first;
            struct tensor part = op_put_f32_1d(t, NULL, numel);
            struct tensor kept = op_put_f32_1d(t, before + first, numel);
            assert_ok(op_embedding_backward(t->s, part, dout, rows, first, ROWS_ZERO));
            assert_ok(op_embedding_backward(t->s, kept, dout, rows, first, ROWS_KEPT));
            op_same("part", op_get(t, part), whole + first, numel);
            op_same("added", op_get(t, kept), added + first, numel);
        }
}

/* Batches end to end, with rows of no sequence between them, are summed batch by batch. */
static void the_rows_of_several_ranks_add_up_in_rank_order(void **state)
{
    struct op_test *t = *state;
    enum { RANKS = 3, ROWS = 40, T = RANKS * ROWS };
    int32_t token[T], order[T];
    int64_t n = 0;
    for (int i = 0; i < T; i++) /* ranks use 40, 33 and 26 of their rows */
        token[i] = i % ROWS < ROWS - 7 * (i / ROWS) ? (i * i + 3 * i) % V : -1;
    for (int32_t value = -1; value < V; value++)
        for (int i = 0; i < T; i++)
            if (token[i] == value)
                order[n++] = i;
    assert_int_equal(n, T);
    double *dout = op_random(t, T * C, 1.0), *want = op_zeros(t, V * C);
    for (int64_t i = 0; i < T * C; i++)
        if (token[i / C] > 0) /* in fp32, in this order */
            want[token[i / C] * C + i % C] =
                (double)(float)((float)want[token[i / C] * C + i % C] + (float)dout[i]);
    struct tensor dtable = op_put_f32_1d(t, NULL, V * C);
    struct token_rows rows = {T, RANKS, op_upload(t, token, sizeof token),
                              op_upload(t, order, sizeof order)};
    assert_ok(op_embedding_backward(t->s, dtable, op_put_2d(t, dout, T, C), rows, 0, ROWS_ZERO));
    op_same("dtable", op_get(t, dtable), want, V * C);
}

/* As padding_idx of PyTorch's nn.Embedding: [PAD] is token 0. */
static void the_row_of_pad_gets_no_gradient(void **state)
{
    struct op_test *t = *state;
    struct op_batch b;
    op_mixed_batch(t, &b);
    int64_t T = b.host.rows, n = FIRST * C;
    bool met = false;
    for (int64_t i = 0; i < T; i++)
        met |= b.host.token[i] == 0;
    assert_true(met);
    double *before = op_random_f32(t, n, 1.0);
    struct tensor dout = op_put_2d(t, op_random(t, T * C, 1.0), T, C);
    struct tensor set = op_put_f32_2d(t, NULL, FIRST, C), sum = op_put_f32_2d(t, before, FIRST, C);
    assert_ok(rows_backward(t->s, set, dout, &b.q, 0, ROWS_ZERO));
    assert_ok(rows_backward(t->s, sum, dout, &b.q, 0, ROWS_KEPT));
    op_same("set", op_get(t, set), op_zeros(t, C), C);
    op_same("added", op_get(t, sum), before, C);
}

static void the_norm_of_rows_is_that_of_the_gradient(void **state)
{
    struct op_test *t = *state;
    struct op_batch b;
    op_mixed_batch(t, &b);
    int64_t T = b.host.rows;
    struct tensor dout = op_put_2d(t, op_random(t, T * C, 1.0), T, C);
    for (int part = 0; part < 2; part++) {
        int64_t first = part * FIRST, rows = part ? V - FIRST : FIRST;
        struct tensor d = op_put_f32_2d(t, NULL, rows, C);
        struct step_report r = {.squared_norm = 0.5, .finite = 1}, all, touched;
        struct step_report *on_device = op_upload(t, &r, sizeof r);
        assert_ok(rows_backward(t->s, d, dout, &b.q, first, ROWS_ZERO));
        assert_ok(op_squared_norm_rows(t->s, on_device, d, &b.q, first));
        op_download(t, &touched, on_device, sizeof r);
        on_device = op_upload(t, &r, sizeof r);
        assert_ok(op_squared_norm(t->s, on_device, tensor_1d(d.data, DTYPE_F32, rows * C)));
        op_download(t, &all, on_device, sizeof r);
        assert_true(all.squared_norm > 1.0);
        assert_true(fabs(all.squared_norm - touched.squared_norm) < 1e-12 * all.squared_norm);
        assert_int_equal(touched.finite, 1);
        float *bad = (float *)d.data + (b.host.token[0] - first) * C;
        if (b.host.token[0] <= 0 || b.host.token[0] < first || b.host.token[0] >= first + rows)
            continue;
        const float nan = NAN;
        assert_ok(device_copy(t->s, bad, &nan, sizeof nan));
        assert_ok(op_squared_norm_rows(t->s, on_device, d, &b.q, first));
        op_download(t, &touched, on_device, sizeof r);
        assert_int_equal(touched.finite, 0);
    }
}

/* The others have a mark and are else as they were; those of tokens are what they always are. */
static void rows_of_no_token_are_marked(void **state)
{
    struct op_test *t = *state;
    struct op_batch b;
    op_mixed_batch(t, &b);
    int64_t T = b.host.rows, marks = 0;
    double *before = op_random_f32(t, V * C, 1.0);
    struct tensor dout = op_put_2d(t, op_random(t, T * C, 1.0), T, C);
    struct tensor set = op_put_f32_2d(t, NULL, V, C), marked = op_put_f32_2d(t, before, V, C);
    assert_ok(rows_backward(t->s, set, dout, &b.q, 0, ROWS_ZERO));
    assert_ok(rows_backward(t->s, marked, dout, &b.q, 0, ROWS_MARKED));
    double *want = op_get(t, set), *got = op_get(t, marked);
    for (int64_t row = 0; row < V; row++) {
        bool met = false;
        for (int64_t i = 0; i < T; i++)
            met |= row > 0 && b.host.token[i] == row;
        float first = (float)got[row * C];
        assert_int_equal(row_is_marked(&first), !met);
        if (met)
            op_same("row of a token", got + row * C, want + row * C, C);
        else
            op_same("the others", got + row * C + 1, before + row * C + 1, C - 1);
        marks += !met;
    }
    assert_true(marks > 0 && marks < V); /* [PAD] at least */
}

static void b25_without_rows_the_gradient_is_zero(void **state)
{
    struct op_test *t = *state;
    struct op_batch b;
    op_empty_batch(t, &b);
    struct tensor out = op_put_2d(t, NULL, 0, C), table = op_put_2d(t, NULL, V, C);
    struct tensor dtable = op_put_f32_2d(t, NULL, V, C);
    assert_ok(rows_forward(t->s, out, table, &b.q, 0, true));
    assert_ok(rows_backward(t->s, dtable, out, &b.q, 0, ROWS_ZERO));
    op_same("dtable", op_get(t, dtable), op_zeros(t, V * C), V * C);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parts_of_a_split_table_fill_every_row),
        cmocka_unit_test(any_range_of_a_table_gives_its_elements_of_the_rows),
        cmocka_unit_test(the_sum_of_what_ranks_have_is_the_whole_look_up),
        cmocka_unit_test(gradients_add_up_per_token),
        cmocka_unit_test(any_range_of_elements_has_the_bits_of_the_whole_gradient),
        cmocka_unit_test(the_rows_of_several_ranks_add_up_in_rank_order),
        cmocka_unit_test(the_row_of_pad_gets_no_gradient),
        cmocka_unit_test(the_norm_of_rows_is_that_of_the_gradient),
        cmocka_unit_test(rows_of_no_token_are_marked),
        cmocka_unit_test(b25_without_rows_the_gradient_is_zero),
    };
    return OP_TESTS_RUN(tests);
}
