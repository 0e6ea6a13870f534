/* engine/ops/adamw.h: the update against double, ranges, skipping. */
#include <math.h>
#include <string.h>

#include "tests/support/halves.h"
#include "tests/support/ops.h"

enum { N = 301 };
static const struct optim_hyper hyper = {
    .lr = 3e-4f, .beta1 = 0.9f, .beta2 = 0.999f, .eps = 1e-8f, .weight_decay = 0.01f};
static const struct adam_range ranges[] = {{0, 100, true, false},
                                           {100, 0, false, false},
                                           {100, 61, false, true},
                                           {161, 140, false, false}};
enum { RANGES = sizeof ranges / sizeof ranges[0] };

static const struct step_state *step_at(struct op_test *t, int64_t k, float lr, float clip,
                                        int32_t skip_step)
{
    struct step_state s = {.t = k, .lr = lr, .clip = clip, .skip = skip_step};
    s.correction1 = (float)(1.0 - pow((double)hyper.beta1, (double)k));
    s.correction2 = (float)(1.0 - pow((double)hyper.beta2, (double)k));
    return op_upload(t, &s, sizeof s);
}

static void reference(double *p, double *m, double *v, const double *g, int k, double lr,
                      double clip)
{
    double b1 = (double)hyper.beta1, b2 = (double)hyper.beta2;
    for (int r = 0; r < RANGES; r++)
        for (int64_t i = ranges[r].first; i < ranges[r].first + ranges[r].count; i++) {
            if (ranges[r].frozen)
                continue;
            double x = g[i] * clip;
            p[i] *= ranges[r].decay ? 1.0 - lr * (double)hyper.weight_decay : 1.0;
            m[i] = b1 * m[i] + (1.0 - b1) * x;
            v[i] = b2 * v[i] + (1.0 - b2) * x * x;
            double mhat = m[i] / (1.0 - pow(b1, k)), vhat = v[i] / (1.0 - pow(b2, k));
            p[i] -= lr * mhat / (sqrt(vhat) + (double)hyper.eps);
        }
}

static double *copy(struct op_test *t, const double *x)
{
    double *out = op_zeros(t, N);
    memcpy(out, x, N * sizeof *out);
    return out;
}

static void ten_steps_follow_the_formula_and_frozen_ranges_stay(void **state)
{
    struct op_test *t = *state;
    double *p = op_random_f32(t, N, 1.0), *m = op_zeros(t, N), *v = op_zeros(t, N);
    double *start = copy(t, p);
    struct tensor dp = op_put_f32_1d(t, p, N), dm = op_put_f32_1d(t, m, N);
    struct tensor dv = op_put_f32_1d(t, v, N);
    for (int k = 1; k <= 10; k++) {
        double *g = op_random_f32(t, N, 1.0);
        reference(p, m, v, g, k, (double)hyper.lr, 0.25);
        assert_ok(op_adamw(t->s, dp, op_none(), dm, dv, op_put_f32_1d(t, g, N), ranges, RANGES, 0,
                           step_at(t, k, hyper.lr, 0.25f, 0), &hyper));
    }
    double *got = op_get(t, dp), *got_m = op_get(t, dm);
    /* Each step rounds p once and moves it by lr times a factor known to a few ulp. */
    op_close("p", got, p, N, 10 * 6e-8 * op_largest(p, N) + 10 * 3e-4 * 1e-5);
    op_close("m", got_m, m, N, 10 * 6e-8);
    op_close("v", op_get(t, dv), v, N, 10 * 6e-8 * op_largest(v, N) * 4);
    op_same("frozen p", got + 100, start + 100, 61);
    op_same("frozen m", got_m + 100, op_zeros(t, 61), 61);
}

static void a_skipped_step_writes_nothing(void **state)
{
    struct op_test *t = *state;
    double *p = op_random_f32(t, N, 1.0), *v = op_zeros(t, N), *g = op_zeros(t, N);
    for (int i = 0; i < N; i++) {
        v[i] = p[i] * p[i];
        v[i] = op_round(DTYPE_F32, v[i]);
        g[i] = NAN;
    }
    struct tensor dp = op_put_f32_1d(t, p, N), dm = op_put_f32_1d(t, p, N);
    struct tensor dv = op_put_f32_1d(t, v, N);
    assert_ok(op_adamw(t->s, dp, op_none(), dm, dv, op_put_f32_1d(t, g, N), ranges, RANGES, 0,
                       step_at(t, 3, hyper.lr, 1.0f, 1), &hyper));
    op_same("p", op_get(t, dp), p, N);
    op_same("m", op_get(t, dm), p, N);
    op_same("v", op_get(t, dv), v, N);
}

/* Weights of 1.0 and a rate far below bf16's spacing: the fp32 master moves every step. */
static void b07_norm_weights_move_at_a_small_rate(void **state)
{
    struct op_test *t = *state;
    double *p = op_zeros(t, N), *g = op_zeros(t, N);
    const struct adam_range all = {0, N, false, false};
    for (int i = 0; i < N; i++)
        p[i] = g[i] = 1.0;
    struct tensor dp = op_put_f32_1d(t, p, N), dm = op_put_f32_1d(t, op_zeros(t, N), N);
    struct tensor dv = op_put_f32_1d(t, op_zeros(t, N), N), dg = op_put_f32_1d(t, g, N);
    for (int k = 1; k <= 100; k++)
        assert_ok(op_adamw(t->s, dp, op_none(), dm, dv, dg, &all, 1, 0,
                           step_at(t, k, 1e-6f, 1.0f, 0), &hyper));
    double *got = op_get(t, dp);
    for (int i = 0; i < N; i++)
        assert_true(fabs(got[i] - (1.0 - 100e-6)) < 1e-5);
}

/* The same elements get the same bits wherever the shard is cut. */
static void the_cut_of_a_shard_does_not_change_a_bit(void **state)
{
    struct op_test *t = *state;
    double *p = op_random_f32(t, N, 1.0), *m = op_random_f32(t, N, 1.0), *v = op_zeros(t, N);
    double *g = op_random_f32(t, N, 1.0);
    for (int i = 0; i < N; i++)
        v[i] = op_round(DTYPE_F32, m[i] * m[i]);
    enum { CUT = 37 };
    const struct adam_range whole = {0, N, true, false}, low = {0, CUT, true, false};
    const struct adam_range high = {0, N - CUT, true, false};
    const struct step_state *step = step_at(t, 5, hyper.lr, 0.5f, 0);
    struct tensor a = op_put_f32_1d(t, p, N), x = op_put_f32_1d(t, p, CUT);
    struct tensor y = op_put_f32_1d(t, p + CUT, N - CUT);
    assert_ok(op_adamw(t->s, a, op_none(), op_put_f32_1d(t, m, N), op_put_f32_1d(t, v, N),
                       op_put_f32_1d(t, g, N), &whole, 1, 0, step, &hyper));
    assert_ok(op_adamw(t->s, x, op_none(), op_put_f32_1d(t, m, CUT), op_put_f32_1d(t, v, CUT),
                       op_put_f32_1d(t, g, CUT), &low, 1, 0, step, &hyper));
    assert_ok(op_adamw(t->s, y, op_none(), op_put_f32_1d(t, m + CUT, N - CUT),
                       op_put_f32_1d(t, v + CUT, N - CUT), op_put_f32_1d(t, g + CUT, N - CUT),
                       &high, 1, 0, step, &hyper));
    op_same("low", op_get(t, x), op_get(t, a), CUT);
    op_same("high", op_get(t, y), op_get(t, a) + CUT, N - CUT);
}

/* Of a marked row no other number is looked at, and the update is that with zeros. */
static void a_marked_row_is_one_of_zeros(void **state)
{
    struct op_test *t = *state;
    const int64_t columns[] = {1, 19, 36, N};
    const struct adam_range parts[] = {{0, 37, true, false}, {37, N - 37, false, false}};
    const int32_t mark = ROW_MARK;
    float first;
    memcpy(&first, &mark, sizeof first);
    for (int k = 0; k < 4; k++) {
        double *p = op_random_f32(t, N, 1.0), *m = op_random_f32(t, N, 1.0), *v = op_zeros(t, N);
        double *g = op_random_f32(t, N, 1.0), *g_marked = op_zeros(t, N);
        struct tensor x[2][3];
        for (int64_t i = 0; i < N; i++) {
            bool is_marked = i / columns[k] % 3 != 1;
            v[i] = op_round(DTYPE_F32, m[i] * m[i]);
            g[i] = is_marked ? 0.0 : g[i];
            g_marked[i] = !is_marked ? g[i] : i % columns[k] == 0 ? (double)first : (double)NAN;
        }
        for (int side = 0; side < 2; side++) {
            struct tensor *y = x[side];
            y[0] = op_put_f32_1d(t, p, N);
            y[1] = op_put_f32_1d(t, m, N);
            y[2] = op_put_f32_1d(t, v, N);
            assert_ok(op_adamw(t->s, y[0], op_none(), y[1], y[2],
                               op_put_f32_1d(t, side ? g_marked : g, N), parts, 2,
                               side ? columns[k] : 0, step_at(t, 5, hyper.lr, 0.5f, 0), &hyper));
        }
        for (int i = 0; i < 3; i++)
            op_same("marked", op_get(t, x[1][i]), op_get(t, x[0][i]), N);
    }
}

/* Parameters of bf16 and the lower halves of the masters are the masters, to the bit. */
static void halves_are_updated_as_whole_masters_are(void **state)
{
    static const int64_t sizes[] = {0, 1, 5, 128, 1000, 3000};
    struct op_test *t = *state;
    const struct step_state *go = step_at(t, 5, 1e-2f, 0.5f, 0), *skip = step_at(t, 5, 1e-2f, 1, 1);
    for (int i = 0; i < 6; i++) {
        int64_t n = sizes[i];
        halves_step(t, n, 0, 0, go, &hyper);
        halves_step(t, n, 0, 1, go, &hyper);
        halves_step(t, n, 0, 0, skip, &hyper);
        halves_step(t, n, 19, 0, go, &hyper);
        halves_step(t, n, 36, 0, go, &hyper);
    }
}

static void b25_an_empty_shard_is_fine(void **state)
{
    struct op_test *t = *state;
    struct tensor none = op_put_f32_1d(t, NULL, 0);
    struct tensor null = tensor_1d(NULL, DTYPE_F32, 0);
    assert_ok(op_adamw(t->s, none, op_none(), none, none, none, NULL, 0, 0,
                       step_at(t, 1, hyper.lr, 1.0f, 0), &hyper));
    assert_ok(op_adamw(t->s, null, op_none(), null, null, null, NULL, 0, 0,
                       step_at(t, 1, hyper.lr, 1.0f, 0), &hyper));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ten_steps_follow_the_formula_and_frozen_ranges_stay),
        cmocka_unit_test(a_skipped_step_writes_nothing),
        cmocka_unit_test(b07_norm_weights_move_at_a_small_rate),
        cmocka_unit_test(the_cut_of_a_shard_does_not_change_a_bit),
        cmocka_unit_test(a_marked_row_is_one_of_zeros),
        cmocka_unit_test(halves_are_updated_as_whole_masters_are),
        cmocka_unit_test(b25_an_empty_shard_is_fine),
    };
    return OP_TESTS_RUN(tests);
}
