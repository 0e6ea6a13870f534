/* engine/ops/reduce.h: sums, casts, the step report and what the ranks agree on. */
#include <math.h>
#include <string.h>

#include "tests/support/ops.h"

static void accumulate_sets_and_adds(void **state)
{
    struct op_test *t = *state;
    const int64_t sizes[] = {0, 1, 7, 1003};
    for (int k = 0; k < 4; k++) {
        int64_t n = sizes[k];
        double *x = op_random_f32(t, n, 1.0), *y = op_random_f32(t, n, 1.0);
        struct tensor dx = op_put_f32_1d(t, x, n), out = op_put_f32_1d(t, NULL, n);
        struct tensor sum = op_put_f32_1d(t, y, n);
        assert_ok(op_accumulate(t->s, out, dx, false));
        assert_ok(op_accumulate(t->s, sum, dx, true));
        for (int64_t i = 0; i < n; i++)
            y[i] = op_round(DTYPE_F32, y[i] + x[i]);
        op_same("set", op_get(t, out), x, n);
        op_same("add", op_get(t, sum), y, n);
    }
}

static void cast_rounds_to_nearest_even(void **state)
{
    struct op_test *t = *state;
    const double x[] = {0.0,    1.0,      1.00390625, 1.01171875, 1.0039064, -1.00390625,
                        3.4e38, INFINITY, 1e-40,      3.1415926,  -0.0,      256.5};
    const double want[] = {0.0,      1.0,      1.0,   1.015625, 1.0078125, -1.0,
                           INFINITY, INFINITY, 1e-40, 3.140625, 0.0,       256.0};
    enum { N = sizeof x / sizeof x[0] };
    struct tensor in = op_put_f32_1d(t, x, N), out = op_put_f32_1d(t, NULL, N);
    assert_ok(op_cast(t->s, out, in));
    op_close("fp32", op_get(t, out), op_get(t, in), 6, 0.0);
    out = tensor_1d(out.data, DTYPE_BF16, N);
    assert_ok(op_cast(t->s, out, in));
    double *got = op_get(t, out);
    for (int i = 0; i < N; i++)
        assert_true(got[i] == want[i] || fabs(got[i] - want[i]) < 5e-41);
    double nan[] = {NAN};
    out = tensor_1d(out.data, DTYPE_BF16, 1);
    assert_ok(op_cast(t->s, out, op_put_f32_1d(t, nan, 1)));
    assert_true(isnan(op_get(t, out)[0]));
}

static struct step_report norm_of(struct op_test *t, const double *x, int64_t n,
                                  struct step_report report)
{
    struct step_report *device = op_upload(t, &report, sizeof report);
    assert_ok(op_squared_norm(t->s, device, op_put_f32_1d(t, x, n)));
    op_download(t, &report, device, sizeof report);
    return report;
}

static void squared_norm_adds_to_the_report(void **state)
{
    struct op_test *t = *state;
    const int64_t sizes[] = {1, 7, 8, 33, 1003, 40000};
    for (int k = 0; k < 6; k++) {
        double *x = op_random_f32(t, sizes[k], 1.0), want = 2.5;
        for (int64_t i = 0; i < sizes[k]; i++)
            want += x[i] * x[i];
        struct step_report start = {.squared_norm = 2.5, .finite = 1};
        struct step_report a = norm_of(t, x, sizes[k], start), b = norm_of(t, x, sizes[k], start);
        assert_true(fabs(a.squared_norm - want) <= 1e-12 * want);
        assert_true(a.squared_norm == b.squared_norm);
        assert_int_equal(a.finite, 1);
    }
}

static void b25_squared_norm_of_nothing(void **state)
{
    struct op_test *t = *state;
    struct step_report r = norm_of(t, NULL, 0, (struct step_report){.finite = 1});
    assert_true(r.squared_norm == 0.0 && r.finite == 1);
    struct step_report *device = op_upload(t, &r, sizeof r);
    assert_ok(op_squared_norm(t->s, device, tensor_1d(NULL, DTYPE_F32, 0)));
}

static void b41_large_and_tiny_gradients_keep_their_norm(void **state)
{
    struct op_test *t = *state;
    double large[100], tiny[100];
    for (int i = 0; i < 100; i++) {
        large[i] = op_round(DTYPE_F32, 1e38);
        tiny[i] = op_round(DTYPE_F32, 1e-30);
    }
    struct step_report start = {.finite = 1};
    struct step_report a = norm_of(t, large, 100, start), b = norm_of(t, tiny, 100, start);
    assert_true(a.finite == 1 && fabs(a.squared_norm / 1e78 - 1.0) < 1e-6);
    assert_true(b.finite == 1 && fabs(b.squared_norm / 1e-58 - 1.0) < 1e-6);
}

static void one_bad_value_anywhere_is_seen(void **state)
{
    struct op_test *t = *state;
    const double bad[] = {NAN, INFINITY, -INFINITY};
    for (int k = 0; k < 3; k++)
        for (int at = 0; at < 69; at += 17) {
            double *x = op_random_f32(t, 69, 1.0);
            x[at] = bad[k];
            assert_int_equal(norm_of(t, x, 69, (struct step_report){.finite = 1}).finite, 0);
        }
    double *x = op_random_f32(t, 69, 1.0);
    assert_int_equal(norm_of(t, x, 69, (struct step_report){.finite = 0}).finite, 0);
}

/* A step takes state and batch from a slot and leaves its state there; the next, the other one. */
static void steps_take_and_leave_their_mail_by_turns(void **state)
{
    enum { WORDS = 1200, STEPS = 5 };
    static const struct optim_hyper h = {.lr = 1e-3f, .beta1 = 0.9f, .beta2 = 0.999f};
    struct op_test *t = *state;
    struct step_state start = {.t = 7}, now;
    struct step_mail mail = {.batch_bytes = WORDS * sizeof(int32_t)};
    struct step_report none = {0}, report;
    struct step_host *host[STEP_SLOTS];
    int32_t *batch[STEP_SLOTS], words[WORDS];
    for (int i = 0; i < STEP_SLOTS; i++) {
        assert_ok(device_alloc_host(t->device, (void **)&host[i], sizeof *host[i]));
        assert_ok(device_alloc_host(t->device, (void **)&batch[i], mail.batch_bytes));
        assert_ok(device_alloc_host(t->device, (void **)&mail.slot[i].told, sizeof now));
        mail.slot[i].host = host[i];
        mail.slot[i].batch = batch[i];
    }
    assert_ok(device_alloc(t->device, &mail.batch, mail.batch_bytes));
    struct step_state *on_device = op_upload(t, &start, sizeof start);
    struct step_report *to = op_upload(t, &none, sizeof none);
    for (int step = 0; step < STEPS; step++) {
        int slot = step % STEP_SLOTS;
        *host[slot] = (struct step_host){.step = 40 + step, .tokens = 9 + step, .seed = 3};
        for (int i = 0; i < WORDS; i++)
            batch[slot][i] = step * WORDS + i;
        assert_ok(op_step_begin(t->s, to, on_device, &mail));
        assert_ok(op_agree(t->s, on_device, to, 1, &h, &mail));
        op_download(t, &now, on_device, sizeof now);
        op_download(t, &report, to, sizeof report);
        op_download(t, words, mail.batch, sizeof words);
        assert_memory_equal(&now.host, host[slot], sizeof now.host);
        assert_memory_equal(mail.slot[slot].told, &now, sizeof now);
        assert_memory_equal(words, batch[slot], sizeof words);
        assert_int_equal(report.tokens, 9 + step);
        assert_int_equal(now.t, 8 + step);
        assert_int_equal(now.turn, 1 + step);
    }
    for (int i = 0; i < STEP_SLOTS; i++) {
        device_free_host(t->device, (void **)&host[i]);
        device_free_host(t->device, (void **)&batch[i]);
        device_free_host(t->device, (void **)&mail.slot[i].told);
    }
    device_free(t->device, &mail.batch);
}

static void a_report_begins_with_the_hosts_part(void **state)
{
    struct op_test *t = *state;
    struct step_state s = {.host = {.step = 41, .stop = STOP_SIGNAL, .signal = 15, .tokens = 99}};
    struct step_report r = {.loss_sum = 5.0, .squared_norm = 7.0, .sequences = 3};
    struct step_report *device = op_upload(t, &r, sizeof r);
    assert_ok(op_step_begin(t->s, device, op_upload(t, &s, sizeof s), NULL));
    op_download(t, &r, device, sizeof r);
    assert_true(r.loss_sum == 0.0 && r.squared_norm == 0.0);
    assert_int_equal(r.sequences, 0);
    assert_int_equal(r.tokens, 99);
    assert_int_equal(r.finite, 1);
    assert_int_equal(r.stop, STOP_SIGNAL);
    assert_int_equal(r.signal, 15);
    assert_int_equal(r.step, 41);
}

/* ---- agree ---------------------------------------------------------------------------------- */

static const struct optim_hyper hyper = {.lr = 1e-3f,
                                         .beta1 = 0.9f,
                                         .beta2 = 0.999f,
                                         .max_grad_norm = 1.0f,
                                         .warmup_steps = 4,
                                         .total_steps = 20,
                                         .schedule = SCHEDULE_LINEAR};

static struct step_state agree(struct op_test *t, struct step_state state,
                               const struct step_report *reports, int world,
                               const struct optim_hyper *h)
{
    struct step_state *device = op_upload(t, &state, sizeof state);
    struct step_report *r = op_upload(t, reports, (size_t)world * sizeof *reports);
    assert_ok(op_agree(t->s, device, r, world, h, NULL));
    op_download(t, &state, device, sizeof state);
    return state;
}

static void agree_sums_in_rank_order_and_clips(void **state)
{
    struct op_test *t = *state;
    const struct step_report r[] = {{.loss_sum = 3.0,
                                     .squared_norm = 9.0,
                                     .sequences = 2,
                                     .tokens = 10,
                                     .finite = 1,
                                     .step = 6},
                                    {.loss_sum = 1.5,
                                     .squared_norm = 7.0,
                                     .sequences = 1,
                                     .tokens = 5,
                                     .finite = 1,
                                     .step = 6,
                                     .stop = STOP_SIGNAL,
                                     .signal = 2},
                                    {.finite = 1, .step = 6, .stop = STOP_EARLY, .signal = 15}};
    struct step_state s = {.host = {.step = 6, .seed = 77}, .t = 9};
    struct step_state got = agree(t, s, r, 3, &hyper);
    assert_memory_equal(&got.host, &s.host, sizeof s.host);
    assert_true(got.loss == 1.5 && got.grad_norm == 4.0);
    assert_true(fabs((double)got.clip - 1.0 / (4.0 + 1e-6)) < 1e-7);
    assert_int_equal(got.sequences, 3);
    assert_int_equal(got.tokens, 15);
    assert_int_equal(got.stop, STOP_SIGNAL | STOP_EARLY);
    assert_int_equal(got.signal, 2);
    assert_int_equal(got.agreed, 1);
    assert_int_equal(got.skip, 0);
    assert_int_equal(got.t, 10);
    assert_true(fabs((double)got.correction1 - (1.0 - pow((double)hyper.beta1, 10))) < 1e-7);
    assert_true(fabs((double)got.correction2 - (1.0 - pow((double)hyper.beta2, 10))) < 1e-7);
}

static void no_clipping_below_the_limit_or_without_one(void **state)
{
    struct op_test *t = *state;
    struct step_report small = {.squared_norm = 0.25, .finite = 1}, large = small;
    struct optim_hyper off = hyper;
    off.max_grad_norm = 0.0f;
    large.squared_norm = 1e6;
    assert_true(agree(t, (struct step_state){0}, &small, 1, &hyper).clip == 1.0f);
    assert_true(agree(t, (struct step_state){0}, &large, 1, &off).clip == 1.0f);
    assert_true(agree(t, (struct step_state){0}, &small, 1, &hyper).loss == 0.0); /* none */
}

static void a_bad_gradient_skips_the_step_and_the_schedule_waits(void **state)
{
    struct op_test *t = *state;
    struct step_report r[2] = {{.squared_norm = 4.0, .finite = 1}, {.finite = 0}};
    struct step_state s = {.t = 2};
    struct step_state got = agree(t, s, r, 2, &hyper);
    assert_int_equal(got.skip, 1);
    assert_int_equal(got.t, 2);
    r[1].finite = 1;
    struct step_state applied = agree(t, got, r, 2, &hyper);
    assert_int_equal(applied.skip, 0);
    assert_int_equal(applied.t, 3);
    assert_true(applied.lr == got.lr); /* what the skipped step would have used */
    r[0].squared_norm = INFINITY;
    assert_int_equal(agree(t, s, r, 2, &hyper).skip, 1);
    r[0].squared_norm = NAN;
    assert_int_equal(agree(t, s, r, 2, &hyper).skip, 1);
}

static void ranks_at_different_steps_do_not_agree(void **state)
{
    struct op_test *t = *state;
    struct step_report r[2] = {{.finite = 1, .step = 5}, {.finite = 1, .step = 6}};
    struct step_state s = {.host = {.step = 5}};
    assert_int_equal(agree(t, s, r, 2, &hyper).agreed, 0);
    r[1].step = 5;
    assert_int_equal(agree(t, s, r, 2, &hyper).agreed, 1);
    s.host.step = 4;
    assert_int_equal(agree(t, s, r, 2, &hyper).agreed, 0);
}

static double factor(enum schedule_kind kind, int k, int warmup, int total)
{
    if (k < warmup)
        return (double)k / fmax(1, warmup);
    double done = (double)(k - warmup) / fmax(1, total - warmup);
    if (kind == SCHEDULE_LINEAR)
        return fmax(0.0, 1.0 - done);
    return kind == SCHEDULE_CONSTANT ? 1.0 : fmax(0.0, 0.5 * (1.0 + cos(3.141592653589793 * done)));
}

static void b52_the_rate_depends_on_the_step_alone(void **state)
{
    struct op_test *t = *state;
    const enum schedule_kind kinds[] = {SCHEDULE_LINEAR, SCHEDULE_COSINE, SCHEDULE_CONSTANT};
    const int warmups[] = {0, 4}, worlds[] = {1, 2, 8};
    struct step_report r[8];
    for (int i = 0; i < 8; i++)
        r[i] = (struct step_report){.squared_norm = 1.0, .finite = 1, .sequences = 1};
    for (int kind = 0; kind < 3; kind++)
        for (int w = 0; w < 2; w++) {
            struct optim_hyper h = hyper;
            h.schedule = kinds[kind];
            h.warmup_steps = warmups[w];
            for (int k = 0; k < 21; k++)
                for (int n = 0; n < 3; n++) {
                    struct step_state s = agree(t, (struct step_state){.t = k}, r, worlds[n], &h);
                    double want = (double)h.lr * factor(kinds[kind], k, warmups[w], 20);
                    assert_true(fabs((double)s.lr - want) <= 1e-10);
                }
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(accumulate_sets_and_adds),
        cmocka_unit_test(cast_rounds_to_nearest_even),
        cmocka_unit_test(squared_norm_adds_to_the_report),
        cmocka_unit_test(b25_squared_norm_of_nothing),
        cmocka_unit_test(b41_large_and_tiny_gradients_keep_their_norm),
        cmocka_unit_test(one_bad_value_anywhere_is_seen),
        cmocka_unit_test(steps_take_and_leave_their_mail_by_turns),
        cmocka_unit_test(a_report_begins_with_the_hosts_part),
        cmocka_unit_test(agree_sums_in_rank_order_and_clips),
        cmocka_unit_test(no_clipping_below_the_limit_or_without_one),
        cmocka_unit_test(a_bad_gradient_skips_the_step_and_the_schedule_waits),
        cmocka_unit_test(ranks_at_different_steps_do_not_agree),
        cmocka_unit_test(b52_the_rate_depends_on_the_step_alone),
    };
    return OP_TESTS_RUN(tests);
}
