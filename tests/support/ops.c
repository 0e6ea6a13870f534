#include "tests/support/ops.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/rng.h"

enum { GUARD_BYTE = 0xA5, STATE_STEP = 7, STATE_LAYER = 3 };
static const uint64_t STATE_SEED = 0x123456789ABCDEF0u;

const struct op_limits op_test_limits = {
    .rows = 256,
    .channels = 256,
    .ffn = 512,
    .heads = 8,
    .sequences = 16,
    .max_length = 128,
    .vocab_rows = 128,
    .world_size = 8,
};

/* ---- the group ------------------------------------------------------------------------------ */

static enum device_kind group_kind = DEVICE_CPU;

static int group_setup(void **state)
{
    struct op_test *t;
    assert_ok(mem_alloc(&t, sizeof *t));
    assert_ok(mem_alloc(&t->records, OP_MAX_TENSORS * sizeof *t->records));
    assert_ok(device_open(&t->device, group_kind, PRECISION_AUTO, 0, 1));
    t->s = &t->device->streams[STREAM_COMPUTE];
    t->s->workspace_bytes = op_workspace_bytes(t->device, &op_test_limits);
    assert_ok(device_alloc(t->device, &t->workspace, t->s->workspace_bytes));
    t->s->workspace = t->workspace;
    t->dtype = t->device->param_dtype;
    t->eps = ldexp(1.0, t->dtype == DTYPE_BF16 ? -8 : -24);
    t->random = test_seed();
    *state = t;
    return 0;
}

static int group_teardown(void **state)
{
    struct op_test *t = *state;
    for (int i = 0; i < t->record_count; i++) {
        void *block = t->records[i].block;
        device_free(t->device, &block);
    }
    device_free(t->device, &t->workspace);
    device_close(&t->device);
    pool_release(&t->pool);
    mem_free(&t->records);
    mem_free(&t);
    return 0;
}

int op_tests_run(const char *name, const struct CMUnitTest *tests, size_t count)
{
    group_kind = DEVICE_CPU;
    int failed = _cmocka_run_group_tests(name, tests, count, group_setup, group_teardown);
    if (device_cuda_count() > 0) {
        group_kind = DEVICE_CUDA;
        failed += _cmocka_run_group_tests(name, tests, count, group_setup, group_teardown);
    }
    return failed;
}

/* ---- host values ---------------------------------------------------------------------------- */

double *op_zeros(struct op_test *t, int64_t n)
{
    double *x = NULL;
    assert_ok(pool_take(&t->pool, &x, (size_t)(n > 0 ? n : 1) * sizeof *x));
    return x;
}

static uint16_t bf16_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

static float bf16_value(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

double op_round(enum dtype dtype, double x)
{
    float f = (float)x;
    return (double)(dtype == DTYPE_BF16 ? bf16_value(bf16_bits(f)) : f);
}

static double normal(struct op_test *t)
{
    double u = ((double)(test_random(&t->random) >> 11) + 0.5) * ldexp(1.0, -53);
    double v = ((double)(test_random(&t->random) >> 11) + 0.5) * ldexp(1.0, -53);
    return sqrt(-2.0 * log(u)) * cos(2.0 * 3.14159265358979323846 * v);
}

static double *random_values(struct op_test *t, int64_t n, double stddev, enum dtype dtype)
{
    double *x = op_zeros(t, n);
    for (int64_t i = 0; i < n; i++)
        x[i] = op_round(dtype, stddev * normal(t));
    return x;
}

double *op_random(struct op_test *t, int64_t n, double stddev)
{
    return random_values(t, n, stddev, t->dtype);
}

double *op_random_f32(struct op_test *t, int64_t n, double stddev)
{
    return random_values(t, n, stddev, DTYPE_F32);
}

/* ---- device memory -------------------------------------------------------------------------- */

static void *guarded(struct op_test *t, size_t bytes)
{
    struct op_tensor_record *r = &t->records[t->record_count++];
    void *block = NULL;
    assert_true(t->record_count < OP_MAX_TENSORS);
    assert_ok(device_alloc(t->device, &block, bytes + 2 * OP_GUARD_BYTES));
    assert_ok(device_fill(t->s, block, GUARD_BYTE, bytes + 2 * OP_GUARD_BYTES));
    r->block = block;
    r->data = r->block + OP_GUARD_BYTES;
    r->bytes = bytes;
    assert_ok(device_fill(t->s, r->data, 0xFF, bytes));
    return r->data;
}

void *op_upload(struct op_test *t, const void *x, size_t bytes)
{
    void *data = guarded(t, bytes);
    assert_ok(device_copy(t->s, data, x, bytes));
    assert_ok(stream_sync(t->s));
    return data;
}

void op_download(struct op_test *t, void *out, const void *x, size_t bytes)
{
    assert_ok(device_copy(t->s, out, x, bytes));
    assert_ok(stream_sync(t->s));
}

static struct tensor put(struct op_test *t, const double *x, struct tensor shape)
{
    int64_t n = tensor_numel(shape);
    void *host = NULL;
    if (!x) {
        shape.data = guarded(t, tensor_bytes(shape));
        assert_ok(stream_sync(t->s));
        return shape;
    }
    assert_ok(pool_take(&t->pool, &host, tensor_bytes(shape) + 1));
    for (int64_t i = 0; i < n; i++) {
        if (shape.dtype == DTYPE_BF16)
            ((uint16_t *)host)[i] = bf16_bits((float)x[i]);
        else
            ((float *)host)[i] = (float)x[i];
    }
    shape.data = op_upload(t, host, tensor_bytes(shape));
    return shape;
}

struct tensor op_put_1d(struct op_test *t, const double *x, int64_t n)
{
    return put(t, x, tensor_1d(NULL, t->dtype, n));
}

struct tensor op_put_2d(struct op_test *t, const double *x, int64_t rows, int64_t columns)
{
    return put(t, x, tensor_2d(NULL, t->dtype, rows, columns));
}

struct tensor op_put_f32_1d(struct op_test *t, const double *x, int64_t n)
{
    return put(t, x, tensor_1d(NULL, DTYPE_F32, n));
}

struct tensor op_put_f32_2d(struct op_test *t, const double *x, int64_t rows, int64_t columns)
{
    return put(t, x, tensor_2d(NULL, DTYPE_F32, rows, columns));
}

struct tensor op_none(void)
{
    return (struct tensor){0};
}

static void check_guards(struct op_test *t, const void *data)
{
    unsigned char guard[OP_GUARD_BYTES];
    for (int i = 0; i < t->record_count; i++) {
        const struct op_tensor_record *r = &t->records[i];
        if (r->data != data)
            continue;
        op_download(t, guard, r->block, sizeof guard);
        for (int k = 0; k < OP_GUARD_BYTES; k++)
            assert_int_equal(guard[k], GUARD_BYTE);
        op_download(t, guard, r->block + OP_GUARD_BYTES + r->bytes, sizeof guard);
        for (int k = 0; k < OP_GUARD_BYTES; k++)
            assert_int_equal(guard[k], GUARD_BYTE);
        return;
    }
    fail_msg("a tensor that op_put_* did not make");
}

double *op_get(struct op_test *t, struct tensor x)
{
    int64_t n = tensor_numel(x);
    double *out = op_zeros(t, n);
    void *host = NULL;
    check_guards(t, x.data);
    assert_ok(pool_take(&t->pool, &host, tensor_bytes(x) + 1));
    op_download(t, host, x.data, tensor_bytes(x));
    for (int64_t i = 0; i < n; i++)
        out[i] = x.dtype == DTYPE_BF16 ? (double)bf16_value(((uint16_t *)host)[i])
                                       : (double)((float *)host)[i];
    return out;
}

/* ---- comparing ------------------------------------------------------------------------------ */

void op_close(const char *what, const double *got, const double *want, int64_t n, double tolerance)
{
    int64_t worst = -1;
    double most = tolerance;
    for (int64_t i = 0; i < n; i++) {
        double difference = fabs(got[i] - want[i]);
        if (!(difference <= most)) {
            worst = i;
            most = difference;
            if (isnan(difference))
                break;
        }
    }
    if (worst >= 0)
        fail_msg("%s[%lld of %lld]: got %.9g, want %.9g, off by %.3g, allowed %.3g", what,
                 (long long)worst, (long long)n, got[worst], want[worst], most, tolerance);
}

void op_same(const char *what, const double *got, const double *want, int64_t n)
{
    op_close(what, got, want, n, 0.0);
}

double op_largest(const double *x, int64_t n)
{
    double most = 1e-30;
    for (int64_t i = 0; i < n; i++)
        most = fabs(x[i]) > most ? fabs(x[i]) : most;
    return most;
}

void op_numeric_gradient(double *grad, double *x, int64_t n, double (*loss)(void *context),
                         void *context)
{
    for (int64_t i = 0; i < n; i++) {
        double kept = x[i], h = 1e-5 * (fabs(kept) > 1.0 ? fabs(kept) : 1.0);
        x[i] = kept + h;
        double above = loss(context);
        x[i] = kept - h;
        grad[i] = (above - loss(context)) / (2.0 * h);
        x[i] = kept;
    }
}

/* ---- batches -------------------------------------------------------------------------------- */

static int32_t below(struct op_test *t, int n)
{
    return (int32_t)(test_random(&t->random) % (uint64_t)n);
}

static int32_t *indices(struct op_test *t, int64_t n)
{
    int32_t *x = NULL;
    assert_ok(pool_take(&t->pool, &x, (size_t)(n + 1) * sizeof *x));
    return x;
}

/* Rows by (token, row): an insertion sort keeps equal tokens in row order. */
static void order_tokens(int32_t *order, const int32_t *token, int64_t rows)
{
    for (int64_t i = 0; i < rows; i++) {
        int64_t at = i;
        for (; at > 0 && token[order[at - 1]] > token[i]; at--)
            order[at] = order[at - 1];
        order[at] = (int32_t)i;
    }
}

/* Insertion sort: longest first, stable. */
static void order_sequences(int32_t *order, const struct op_batch_spec *spec)
{
    for (int i = 0; i < spec->count; i++) {
        int k = i;
        for (; k > 0 && spec->lengths[order[k - 1]] < spec->lengths[i]; k--)
            order[k] = order[k - 1];
        order[k] = i;
    }
}

void op_batch_make(struct op_test *t, struct op_batch *b, const struct op_batch_spec *spec)
{
    int64_t rows = spec->rows;
    int32_t *cu = indices(t, spec->count + 1), *keys = indices(t, spec->count);
    int32_t *sample = indices(t, spec->count), *start = indices(t, spec->count);
    int32_t *end = indices(t, spec->count), *token = indices(t, rows), *type = indices(t, rows);
    int32_t *owner = indices(t, rows), *order = indices(t, rows);
    int32_t *by_length = indices(t, spec->count);
    int32_t at = 0, longest = 0;
    for (int i = 0; i < spec->count; i++) {
        int length = spec->lengths[i];
        keys[i] = spec->keys ? spec->keys[i] : length;
        sample[i] = spec->first_sample + i;
        start[i] = length > 0 ? below(t, length) : 0;
        end[i] = length > 0 ? below(t, length) : 0;
        longest = length > longest ? length : longest;
        for (int k = 0; k < length; k++, at++) {
            token[at] = below(t, spec->vocab);
            type[at] = below(t, spec->types);
            owner[at] = i;
        }
        cu[i + 1] = at;
    }
    order_sequences(by_length, spec);
    assert_true(at <= rows);
    for (; at < rows; at++)
        token[at] = owner[at] = -1;
    order_tokens(order, token, rows);
    b->host = (struct sequences){.rows = rows,
                                 .count = spec->count,
                                 .max_length = longest,
                                 .positions = spec->positions,
                                 .cu_seqlens = cu,
                                 .kv_len = keys,
                                 .sample = sample,
                                 .by_length = by_length,
                                 .token = token,
                                 .token_type = type,
                                 .row_sequence = owner,
                                 .token_order = order,
                                 .start = start,
                                 .end = end};
    b->q = b->host;
    size_t per_row = (size_t)rows * sizeof *token, per_sequence = (size_t)spec->count * sizeof *cu;
    b->q.cu_seqlens = op_upload(t, cu, per_sequence + sizeof *cu);
    b->q.kv_len = op_upload(t, keys, per_sequence);
    b->q.sample = op_upload(t, sample, per_sequence);
    b->q.by_length = op_upload(t, by_length, per_sequence);
    b->q.start = op_upload(t, start, per_sequence);
    b->q.end = op_upload(t, end, per_sequence);
    b->q.token = op_upload(t, token, per_row);
    b->q.token_type = op_upload(t, type, per_row);
    b->q.row_sequence = op_upload(t, owner, per_row);
    b->q.token_order = op_upload(t, order, per_row);
}

void op_mixed_batch(struct op_test *t, struct op_batch *b)
{
    static const int lengths[] = {5, 0, 1, 33, 17, 0}, keys[] = {5, 0, 1, 33, 11, 0};
    struct op_batch_spec spec = {.lengths = lengths,
                                 .keys = keys,
                                 .count = 6,
                                 .rows = 61,
                                 .positions = 37,
                                 .vocab = 23,
                                 .types = 2,
                                 .first_sample = 1000};
    op_batch_make(t, b, &spec);
}

void op_empty_batch(struct op_test *t, struct op_batch *b)
{
    static const int lengths[] = {0};
    struct op_batch_spec spec = {
        .lengths = lengths, .count = 1, .rows = 0, .positions = 37, .vocab = 23, .types = 2};
    op_batch_make(t, b, &spec);
}

/* ---- dropout -------------------------------------------------------------------------------- */

const struct step_state *op_state(struct op_test *t, float inv_count)
{
    struct step_state state = {
        .host = {.seed = STATE_SEED, .step = STATE_STEP, .inv_count = inv_count, .training = 1}};
    return op_upload(t, &state, sizeof state);
}

struct dropout op_dropout(struct op_test *t, float p, enum dropout_site site)
{
    return (struct dropout){.p = p,
                            .layer_site = (uint32_t)STATE_LAYER << 8 | (uint32_t)site,
                            .state = op_state(t, 1.0f)};
}

double op_dropout_factor(float p, enum dropout_site site, int32_t sample, int64_t element)
{
    if (p <= 0.0f)
        return 1.0;
    struct philox r =
        philox4x32_rounds(7, STATE_SEED, STATE_STEP, (uint32_t)STATE_LAYER << 8 | (uint32_t)site,
                          (uint32_t)sample, (uint32_t)(element / 8));
    uint32_t threshold = dropout_threshold(p);
    bool keep = dropout_lane(r, (int)(element % 8)) >= threshold;
    return keep ? 32768.0 / (32768.0 - threshold) : 0.0;
}
