/* engine/ops/span.h: the head's logits and loss. */
#include <math.h>
#include <string.h>

#include "tests/support/ops.h"

enum { C = 21 };

static void logits_are_two_dot_products(void **state)
{
    struct op_test *t = *state;
    struct op_batch b;
    op_mixed_batch(t, &b);
    int64_t T = b.host.rows;
    double *x = op_random(t, T * C, 1.0), *w = op_random(t, 2 * C, 1.0);
    double *bias = op_random(t, 2, 1.0), *want = op_zeros(t, 2 * T);
    for (int64_t i = 0; i < 2 * T; i++) {
        if (b.host.row_sequence[i / 2] < 0)
            continue;
        want[i] = bias[i % 2];
        for (int c = 0; c < C; c++)
            want[i] += x[i / 2 * C + c] * w[i % 2 * C + c];
    }
    struct tensor logits = op_put_f32_2d(t, NULL, T, 2);
    assert_ok(op_span_logits_forward(t->s, logits, op_put_2d(t, x, T, C), op_put_2d(t, w, 2, C),
                                     op_put_1d(t, bias, 2), &b.q));
    op_close("logits", op_get(t, logits), want, 2 * T,
             (C + 2) * 6e-8 * 2 * op_largest(want, 2 * T));
}

static void check_logits_backward(struct op_test *t, const struct op_batch *b, bool add)
{
    int64_t T = b->host.rows;
    double *x = op_random(t, T * C, 1.0), *w = op_random(t, 2 * C, 1.0);
    double *d = op_random_f32(t, 2 * T, 1.0), *before = op_random_f32(t, 2 * C, 1.0);
    double *dx = op_zeros(t, T * C), *dw = op_zeros(t, 2 * C), *db = op_zeros(t, 2);
    for (int64_t i = 0; i < 2 * T; i++) {
        d[i] = b->host.row_sequence[i / 2] < 0 ? 0.0 : d[i]; /* as span_loss writes it */
        db[i % 2] += d[i];
        for (int c = 0; c < C; c++) {
            dx[i / 2 * C + c] += d[i] * w[i % 2 * C + c];
            dw[i % 2 * C + c] += d[i] * x[i / 2 * C + c];
        }
    }
    for (int i = 0; i < 2 * C && add; i++)
        dw[i] += before[i];
    for (int i = 0; i < 2 && add; i++)
        db[i] += before[i];
    struct tensor ddx = op_put_2d(t, NULL, T, C), logits = op_put_f32_2d(t, d, T, 2);
    struct tensor ddw = op_put_f32_2d(t, add ? before : NULL, 2, C);
    struct tensor ddb = op_put_f32_1d(t, add ? before : NULL, 2);
    struct tensor tx = op_put_2d(t, x, T, C), tw = op_put_2d(t, w, 2, C);
    assert_ok(op_span_logits_backward(t->s, ddx, ddw, ddb, logits, tx, tw, &b->q, add));
    double near = ((double)T + 4) * 6e-8 * 4;
    op_close("dx", op_get(t, ddx), dx, T * C, 4 * t->eps * op_largest(dx, T * C));
    op_close("dw", op_get(t, ddw), dw, 2 * C, near * op_largest(dw, 2 * C));
    op_close("dbias", op_get(t, ddb), db, 2, near * op_largest(d, 2 * T) + near);
    assert_ok(op_span_logits_backward(t->s, ddx, op_none(), op_none(), logits, tx, tw, &b->q, add));
}

static void b25_logits_backward_sets_and_adds_also_without_rows(void **state)
{
    struct op_test *t = *state;
    struct op_batch mixed, empty;
    op_mixed_batch(t, &mixed);
    op_empty_batch(t, &empty);
    check_logits_backward(t, &mixed, false);
    check_logits_backward(t, &mixed, true);
    check_logits_backward(t, &empty, false);
    check_logits_backward(t, &empty, true);
}

struct problem {
    const struct sequences *q;
    double *logits;
    double weight;
};

/* Loss of the batch, weighted: sum over sequences of the mean of both cross-entropies. */
static double loss(void *context)
{
    const struct problem *w = context;
    double total = 0;
    for (int32_t b = 0; b < w->q->count; b++)
        for (int k = 0; k < 2; k++) {
            int64_t first = w->q->cu_seqlens[b], end = w->q->cu_seqlens[b + 1];
            int64_t label = first + (k ? w->q->end[b] : w->q->start[b]);
            double sum = 0;
            for (int64_t i = first; i < end; i++)
                sum += exp(w->logits[2 * i + k]);
            if (end > first)
                total += 0.5 * (log(sum) - w->logits[2 * label + k]);
        }
    return w->weight * total;
}

static void loss_and_its_gradient_over_the_global_count(void **state)
{
    struct op_test *t = *state;
    struct op_batch b;
    op_mixed_batch(t, &b);
    int64_t T = b.host.rows;
    struct problem w = {.q = &b.host, .logits = op_random_f32(t, 2 * T, 3.0), .weight = 0.125};
    double *want = op_zeros(t, 2 * T);
    op_numeric_gradient(want, w.logits, 2 * T, loss, &w);
    struct step_report report = {.loss_sum = 100.0, .sequences = 7};
    struct step_report *device = op_upload(t, &report, sizeof report);
    struct tensor d = op_put_f32_2d(t, NULL, T, 2), logits = op_put_f32_2d(t, w.logits, T, 2);
    const struct step_state *step = op_state(t, 0.125f);
    assert_ok(op_span_loss(t->s, d, device, logits, &b.q, step));
    op_download(t, &report, device, sizeof report);
    w.weight = 1.0;
    assert_true(fabs(report.loss_sum - 100.0 - loss(&w)) < 1e-5);
    assert_int_equal(report.sequences, 7 + 4); /* the empty ones do not count */
    op_close("dlogits", op_get(t, d), want, 2 * T, 1e-7);

    /* Evaluation adds the same loss and writes no gradient. */
    struct step_report first = report;
    struct tensor nothing = op_none();
    assert_ok(op_span_loss(t->s, nothing, device, logits, &b.q, step));
    op_download(t, &report, device, sizeof report);
    assert_true(fabs(report.loss_sum - first.loss_sum - loss(&w)) < 1e-5);
}

static void loss_of_one_row_and_of_large_logits(void **state)
{
    struct op_test *t = *state;
    struct op_batch b;
    static const int lengths[] = {1, 2};
    struct op_batch_spec spec = {
        .lengths = lengths, .count = 2, .rows = 3, .positions = 4, .vocab = 3, .types = 1};
    op_batch_make(t, &b, &spec);
    double x[] = {5.0, -5.0, 3e38, -3e38, 1.0, 1.0};
    struct step_report report = {0};
    struct step_report *device = op_upload(t, &report, sizeof report);
    struct tensor d = op_put_f32_2d(t, NULL, 3, 2);
    assert_ok(op_span_loss(t->s, d, device, op_put_f32_2d(t, x, 3, 2), &b.q, op_state(t, 1.0f)));
    double *got = op_get(t, d);
    assert_true(got[0] == 0.0 && got[1] == 0.0); /* one row: probability 1 */
    for (int i = 0; i < 6; i++)
        assert_true(isfinite(got[i]));
    op_download(t, &report, device, sizeof report);
    assert_true(isfinite(report.loss_sum));
}

static void label_outside(void *argument)
{
    struct op_test *t = argument;
    struct op_batch b;
    op_mixed_batch(t, &b);
    int32_t end[] = {5, 0, 0, 0, 0, 0}; /* sequence 0 has rows 0..4 */
    struct step_report report = {0};
    b.q.end = end;
    (void)!op_span_loss(t->s, op_none(), &report,
                        op_put_f32_2d(t, op_zeros(t, 2 * b.host.rows), b.host.rows, 2), &b.q,
                        op_state(t, 1.0f));
}

static void a_label_outside_its_sequence_is_asserted(void **state)
{
    struct op_test *t = *state;
    if (t->device->compute != &ops_cpu)
        skip(); /* indices in device memory are not checked */
    assert_aborts(label_outside, t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_are_two_dot_products),
        cmocka_unit_test(b25_logits_backward_sets_and_adds_also_without_rows),
        cmocka_unit_test(loss_and_its_gradient_over_the_global_count),
        cmocka_unit_test(loss_of_one_row_and_of_large_logits),
        cmocka_unit_test(a_label_outside_its_sequence_is_asserted),
    };
    return OP_TESTS_RUN(tests);
}
