/*
 * The CPU backend with several threads a rank (engine/ops/pieces.h): own loops give the bits of one
 * thread, and with it the results that the other op_ tests hold against references; products, which
 * are cut by the number of threads, give the same bits every time and stay within rounding.
 */
#include <math.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/rng.h"
#include "engine/ops/ops.h"
#include "tests/support/support.h"

/* Large enough for several pieces of every loop; no size is a multiple of a piece. */
enum { T = 531, C = 200, F = 328, H = 5, B = 4, P = 192, N = 300007, OUTPUTS = 48 };

struct batch {
    int32_t cu[B + 1], kv_len[B], sample[B], token[T], type[T], row[T], order[T];
};

struct run {
    struct device *device;
    struct stream *s;
    struct batch batch;
    struct sequences q;
    struct step_state state;
    struct pool pool;
    struct tensor out[OUTPUTS];
    int outputs;
};

static struct tensor fresh(struct run *r, int64_t rows, int64_t columns)
{
    float *data;
    assert_ok(pool_take(&r->pool, &data, (size_t)(rows * columns) * sizeof *data));
    return columns == 1 ? tensor_1d(data, DTYPE_F32, rows)
                        : tensor_2d(data, DTYPE_F32, rows, columns);
}

static struct tensor random_tensor(struct run *r, int64_t rows, int64_t columns, uint64_t name)
{
    struct tensor x = fresh(r, rows, columns);
    rng_fill_normal(x.data, 0, rows * columns, 7, name, 1.0f);
    return x;
}

static struct tensor output(struct run *r, int64_t rows, int64_t columns)
{
    assert_true(r->outputs < OUTPUTS);
    return r->out[r->outputs++] = fresh(r, rows, columns);
}

/* Four sequences, one of them short of keys, and rows of no sequence. */
static void make_batch(struct run *r)
{
    const int32_t cu[B + 1] = {0, 190, 191, 380, T - 20};
    struct batch *b = &r->batch;
    for (int i = 0; i < B; i++) {
        b->cu[i + 1] = cu[i + 1];
        b->kv_len[i] = cu[i + 1] - cu[i] - (i == 2 ? 31 : 0);
        b->sample[i] = 10 + i;
    }
    for (int t = 0, i = 0; t < T; t++) {
        while (i < B && t >= cu[i + 1])
            i++;
        b->row[t] = i < B ? i : -1;
        b->type[t] = t % 2;
    }
    r->q = (struct sequences){.rows = T,
                              .count = B,
                              .max_length = P,
                              .positions = P,
                              .cu_seqlens = b->cu,
                              .kv_len = b->kv_len,
                              .sample = b->sample,
                              .token = b->token,
                              .token_type = b->type,
                              .row_sequence = b->row,
                              .token_order = b->order};
}

static void run_open(struct run *r, int threads)
{
    struct op_limits limits = {T, C, F, H, B, P, P, 1};
    memset(r, 0, sizeof *r);
    assert_ok(device_open(&r->device, DEVICE_CPU, PRECISION_FP32, 0, threads));
    r->s = &r->device->streams[STREAM_COMPUTE];
    r->s->workspace_bytes = op_workspace_bytes(r->device, &limits);
    assert_ok(device_alloc(r->device, &r->s->workspace, r->s->workspace_bytes));
    r->state = (struct step_state){.host = {.seed = 3, .training = 1, .inv_count = 1.0f},
                                   .lr = 1e-3f,
                                   .clip = 0.5f,
                                   .correction1 = 0.1f,
                                   .correction2 = 0.001f};
    make_batch(r);
}

static void run_close(struct run *r)
{
    device_free(r->device, &r->s->workspace);
    device_close(&r->device);
    pool_release(&r->pool);
}

static struct dropout drop(struct run *r, enum dropout_site site)
{
    return (struct dropout){.p = 0.1f, .layer_site = site, .state = &r->state};
}

static void own_loops(struct run *r)
{
    struct tensor x = random_tensor(r, T, C, 1), y = random_tensor(r, T, C, 2);
    struct tensor gamma = random_tensor(r, C, 1, 3), beta = random_tensor(r, C, 1, 4);
    struct tensor position = random_tensor(r, P, C, 5), type = random_tensor(r, 2, C, 6);
    struct tensor z = output(r, T, C), stats = output(r, 2, T), norm = output(r, T, C);
    assert_ok(op_embedding_norm_forward(r->s, norm, z, stats, x, position, type, gamma, beta, &r->q,
                                        1e-12f, drop(r, SITE_EMBEDDING)));
    assert_ok(op_embedding_norm_backward(r->s, output(r, T, C), output(r, P, C), output(r, 2, C),
                                         output(r, C, 1), output(r, C, 1), y, z, stats, gamma,
                                         &r->q, drop(r, SITE_EMBEDDING), false));
    struct tensor wide = random_tensor(r, T, F, 7), adam_m = output(r, N, 1);
    assert_ok(op_gelu_forward(r->s, output(r, T, F), wide));
    assert_ok(op_gelu_backward(r->s, output(r, T, F), output(r, T, F), output(r, F, 1),
                               random_tensor(r, T, F, 11), wide, false));
    assert_ok(op_dropout_apply(r->s, output(r, T, C), x, &r->q, drop(r, SITE_HEAD)));
    struct adam_range ranges[] = {{0, 1000, true, false}, {1000, N - 1000, false, false}};
    struct optim_hyper hyper = {.lr = 1e-3f, .beta1 = 0.9f, .beta2 = 0.999f, .eps = 1e-8f};
    assert_ok(op_adamw(r->s, output(r, N, 1), (struct tensor){0}, adam_m, output(r, N, 1),
                       random_tensor(r, N, 1, 8), ranges, 2, 0, &r->state, &hyper));
}

static void residual(struct run *r)
{
    struct tensor x = random_tensor(r, T, C, 1), y = random_tensor(r, T, C, 2);
    struct tensor gamma = random_tensor(r, C, 1, 3), beta = random_tensor(r, C, 1, 4);
    struct tensor z = output(r, T, C), stats = output(r, 2, T), norm = output(r, T, C);
    assert_ok(op_residual_norm_forward(r->s, norm, z, stats, x, y, gamma, beta, &r->q, 1e-12f,
                                       drop(r, SITE_FFN_OUTPUT)));
    struct tensor dx = output(r, T, C), dy = output(r, T, C);
    struct tensor dgamma = output(r, C, 1), dbeta = output(r, C, 1), dbias = output(r, C, 1);
    for (int add = 0; add < 2; add++)
        assert_ok(op_residual_norm_backward(r->s, dx, dy, dgamma, dbeta, dbias, x, z, stats, gamma,
                                            &r->q, drop(r, SITE_FFN_OUTPUT), add));
    struct step_report *report = NULL;
    struct tensor sum = output(r, (int64_t)sizeof *report / 4, 1), many = random_tensor(r, N, 1, 9);
    report = sum.data;
    report->finite = 1;
    assert_ok(op_squared_norm(r->s, report, many));
    double want = 0;
    for (int i = 0; i < N; i++)
        want += (double)((float *)many.data)[i] * (double)((float *)many.data)[i];
    assert_true(fabs(report->squared_norm - want) < 1e-12 * want);
    assert_ok(op_accumulate(r->s, many, random_tensor(r, N, 1, 10), true));
    struct tensor out = output(r, N, 1);
    memcpy(out.data, many.data, tensor_bytes(many));
}

static void attention(struct run *r)
{
    struct tensor qkv = random_tensor(r, T, 3 * C, 1), dout = random_tensor(r, T, C, 2);
    struct tensor out = output(r, T, C), lse = output(r, H, T);
    assert_ok(op_attention_forward(r->s, out, lse, qkv, &r->q, H, drop(r, SITE_ATTENTION)));
    struct tensor dqkv = output(r, T, 3 * C), dbias = output(r, 3 * C, 1);
    for (int add = 0; add < 2; add++)
        assert_ok(op_attention_backward(r->s, dqkv, dbias, dout, out, lse, qkv, &r->q, H,
                                        drop(r, SITE_ATTENTION), add));
}

static void products(struct run *r)
{
    struct tensor x = random_tensor(r, T, C, 1), w = random_tensor(r, F, C, 2);
    struct tensor bias = random_tensor(r, F, 1, 3), dy = random_tensor(r, T, F, 4);
    assert_ok(op_linear_forward(r->s, output(r, T, F), x, w, bias));
    assert_ok(op_linear_backward_data(r->s, output(r, T, C), dy, w, false));
    struct tensor dw = output(r, F, C);
    for (int add = 0; add < 2; add++)
        assert_ok(op_linear_backward_weight(r->s, dw, dy, x, add));
}

/* The largest difference, relative to the largest value; NaN counts as one. */
static double distance(struct tensor a, struct tensor b)
{
    const float *x = a.data, *y = b.data;
    double apart = 0, largest = 0;
    for (int64_t i = 0; i < tensor_numel(a); i++) {
        double d = fabs((double)x[i] - (double)y[i]);
        apart = d > apart || isnan(d) ? d : apart;
        largest = fabs((double)y[i]) > largest ? fabs((double)y[i]) : largest;
    }
    return largest > 0 ? apart / largest : apart;
}

static void compare(void (*ops)(struct run *r), bool same)
{
    static struct run one, many, again;
    run_open(&one, 1);
    ops(&one);
    for (int threads = 2; threads <= 5; threads++) {
        run_open(&many, threads);
        run_open(&again, threads);
        ops(&many);
        ops(&again);
        for (int i = 0; i < one.outputs; i++) {
            struct tensor a = one.out[i], b = many.out[i], c = again.out[i];
            assert_memory_equal(b.data, c.data, tensor_bytes(b));
            if (same)
                assert_memory_equal(a.data, b.data, tensor_bytes(a));
            assert_true(distance(a, b) < 1e-5);
        }
        run_close(&many);
        run_close(&again);
    }
    run_close(&one);
}

static void own_loops_have_the_bits_of_one_thread(void **state)
{
    (void)state;
    compare(own_loops, true);
    compare(residual, true);
    compare(attention, true);
}

static void products_have_the_same_bits_every_time(void **state)
{
    (void)state;
    compare(products, false);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(own_loops_have_the_bits_of_one_thread),
        cmocka_unit_test(products_have_the_same_bits_every_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
