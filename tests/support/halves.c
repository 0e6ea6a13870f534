#include "tests/support/halves.h"

#include <math.h>
#include <string.h>

#include "engine/ops/embedding.h"
#include "engine/ops/master.h"

static void *room(struct op_test *t, size_t bytes)
{
    void *memory = NULL;
    assert_ok(pool_take(&t->pool, &memory, bytes + 1));
    return memory;
}

float *halves_masters(struct op_test *t, int64_t n)
{
    float *x = room(t, sizeof *x * (size_t)n);
    double *normal = op_random_f32(t, n, 1.0);
    for (int64_t i = 0; i < n; i++) {
        uint32_t tie = 0x3F808000u + (uint32_t)(i % 7 << 16) + (i % 2 ? 0x80000000u : 0);
        x[i] = (float)normal[i];
        if (i % 5 == 1)
            memcpy(x + i, &tie, sizeof tie);
        else if (i % 11 == 2)
            x[i] = i % 3 == 0 ? INFINITY : i % 3 == 1 ? -1e-40f : -0.0f;
    }
    return x;
}

void halves_split(struct op_test *t, int64_t n)
{
    size_t bytes = sizeof(uint16_t) * (size_t)n;
    float *x = halves_masters(t, n);
    uint16_t *high = room(t, bytes), *low = room(t, bytes), *got = room(t, bytes);
    struct tensor master = tensor_1d(op_upload(t, x, sizeof *x * (size_t)n), DTYPE_F32, n);
    master_put(high, low, x, n);
    for (int with_low = 0; with_low < 2; with_low++) {
        struct tensor a = tensor_1d(op_upload(t, got, bytes), DTYPE_BF16, n);
        struct tensor b = tensor_1d(with_low ? op_upload(t, got, bytes) : NULL, DTYPE_U16, n);
        assert_ok(op_master_split(t->s, a, b, master));
        op_download(t, got, a.data, bytes);
        assert_memory_equal(got, high, bytes);
        if (with_low) {
            op_download(t, got, b.data, bytes);
            assert_memory_equal(got, low, bytes);
        }
        op_get(t, a); /* its guards */
    }
}

struct shard {
    struct tensor param, low, m, v, grad;
};

static struct tensor part(struct op_test *t, const void *host, enum dtype dtype, int64_t n,
                          int64_t shift)
{
    size_t element = dtype_bytes(dtype);
    char *data = op_upload(t, host, element * (size_t)(n + shift));
    return tensor_1d(data + element * (size_t)shift, dtype, n);
}

static void same_bits(struct op_test *t, struct tensor got, struct tensor want)
{
    size_t bytes = tensor_bytes(got);
    void *a = room(t, bytes), *b = room(t, bytes);
    op_download(t, a, got.data, bytes);
    op_download(t, b, want.data, bytes);
    assert_memory_equal(a, b, bytes);
}

static void same_masters(struct op_test *t, const struct shard *halves, struct tensor whole)
{
    int64_t n = tensor_numel(whole);
    size_t bytes = sizeof(uint16_t) * (size_t)n;
    uint16_t *high = room(t, bytes), *low = room(t, bytes), *want = room(t, bytes);
    float *got = room(t, 2 * bytes), *x = room(t, 2 * bytes);
    op_download(t, high, halves->param.data, bytes);
    op_download(t, low, halves->low.data, bytes);
    op_download(t, x, whole.data, 2 * bytes);
    master_take(got, high, low, n);
    master_put(want, NULL, x, n);
    assert_memory_equal(got, x, 2 * bytes);
    assert_memory_equal(high, want, bytes);
}

/* Gradients, of a marked row nothing but the mark; m and v of zero as in rows not met. */
static void fill(struct op_test *t, float *m, float *v, float *g, int64_t n, int64_t row_numel)
{
    const int32_t mark = ROW_MARK;
    double *x = op_random_f32(t, n, 0.1), *y = op_random_f32(t, n, 1.0);
    for (int64_t i = 0; i < n; i++) {
        bool met = i / 8 % 4 != 1;
        m[i] = met ? (float)x[i] : 0.0f;
        v[i] = m[i] * m[i];
        g[i] = i / 8 % 8 != 1 ? (float)y[i] : 0.0f;
        if (row_numel > 0 && i / row_numel % 3 != 1)
            g[i] = NAN;
        if (row_numel > 0 && i / row_numel % 3 != 1 && i % row_numel == 0)
            memcpy(g + i, &mark, sizeof mark);
    }
}

void halves_step(struct op_test *t, int64_t n, int64_t row_numel, int64_t shift,
                 const struct step_state *state, const struct optim_hyper *hyper)
{
    const struct tensor none = {0};
    const int64_t a = n / 3, b = n / 2; /* not multiples of four */
    const struct adam_range ranges[] = {{0, a, true, false},
                                        {a, 0, false, false},
                                        {a, b - a, false, true},
                                        {b, n - b, false, false}};
    size_t bytes = sizeof(float) * (size_t)(n + shift);
    float *x = halves_masters(t, n + shift);
    float *m = room(t, bytes), *v = room(t, bytes), *g = room(t, bytes);
    uint16_t *high = room(t, bytes / 2), *low = room(t, bytes / 2);
    struct shard side[2];
    master_put(high, low, x, n + shift);
    memset(m, 0, bytes);
    memset(v, 0, bytes);
    memset(g, 0, bytes);
    fill(t, m + shift, v + shift, g + shift, n, row_numel);
    for (int halves = 0; halves < 2; halves++) {
        struct shard *s = &side[halves];
        s->param = halves ? part(t, high, DTYPE_BF16, n, shift) : part(t, x, DTYPE_F32, n, shift);
        s->low = halves ? part(t, low, DTYPE_U16, n, shift) : none;
        s->m = part(t, m, DTYPE_F32, n, shift);
        s->v = part(t, v, DTYPE_F32, n, shift);
        s->grad = part(t, g, DTYPE_F32, n, shift);
        for (int k = 0; k < 2; k++)
            assert_ok(op_adamw(t->s, s->param, s->low, s->m, s->v, s->grad, ranges, 4, row_numel,
                               state, hyper));
    }
    same_masters(t, &side[1], side[0].param);
    same_bits(t, side[1].m, side[0].m);
    same_bits(t, side[1].v, side[0].v);
}
