#include "tests/support/twins.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/out.h"

enum { GUARD = 0xA5 };

/* ---- devices -------------------------------------------------------------------------------- */

static void side_open(struct op_test *t, enum device_kind kind, enum precision_kind precision,
                      const struct op_limits *limits)
{
    memset(t, 0, sizeof *t);
    assert_ok(mem_alloc(&t->records, OP_MAX_TENSORS * sizeof *t->records));
    assert_ok(device_open(&t->device, kind, precision, 0, 1));
    t->s = &t->device->streams[STREAM_COMPUTE];
    t->s->workspace_bytes = op_workspace_bytes(t->device, limits);
    assert_ok(device_alloc(t->device, &t->workspace, t->s->workspace_bytes));
    t->s->workspace = t->workspace;
    t->dtype = t->device->param_dtype;
    t->eps = ldexp(1.0, t->dtype == DTYPE_BF16 ? -9 : -24);
    t->random = test_seed();
}

void twins_open(struct twins *w, enum precision_kind precision, const struct op_limits *limits)
{
    memset(w, 0, sizeof *w);
    side_open(&w->side[SIDE_CPU], DEVICE_CPU, PRECISION_FP32, limits);
    side_open(&w->side[SIDE_GPU], DEVICE_CUDA, precision, limits);
    w->u = ldexp(1.0, w->side[SIDE_GPU].dtype == DTYPE_BF16 ? -8 : -24);
    w->f = ldexp(1.0, -24);
}

static void side_clear(struct op_test *t)
{
    for (int i = 0; i < t->record_count; i++) {
        void *block = t->records[i].block;
        device_free(t->device, &block);
    }
    t->record_count = 0;
    pool_release(&t->pool);
}

void twins_close(struct twins *w)
{
    for (int side = 0; side < SIDES; side++) {
        struct op_test *t = &w->side[side];
        if (!t->device)
            continue;
        side_clear(t);
        device_free(t->device, &t->workspace);
        device_close(&t->device);
        mem_free(&t->records);
    }
}

/* ---- cases ---------------------------------------------------------------------------------- */

static int row_of(struct twins *w, const char *op, enum dtype dtype)
{
    for (int i = 0; i < w->row_count; i++)
        if (strcmp(w->rows[i].op, op) == 0 && w->rows[i].dtype == dtype)
            return i;
    assert_true(w->row_count < TWIN_MAX_ROWS);
    struct twins_row *row = &w->rows[w->row_count];
    memset(row, 0, sizeof *row);
    snprintf(row->op, sizeof row->op, "%s", op);
    row->dtype = dtype;
    return w->row_count++;
}

void twins_begin(struct twins *w, const char *op, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(w->label, sizeof w->label, fmt, args);
    va_end(args);
    for (int side = 0; side < SIDES; side++) /* what a failed test left behind */
        side_clear(&w->side[side]);
    w->output_count = 0;
    w->row = row_of(w, op, w->side[SIDE_GPU].dtype);
    w->rows[w->row].cases++;
}

void twins_turn_begin(struct twins *w, int turn)
{
    w->now = turn < 2 ? SIDE_GPU : SIDE_CPU;
    struct op_test *t = &w->side[w->now];
    for (int i = 0; i < w->output_count; i++) {
        struct twin_output *o = &w->output[i];
        void *data = o->twin.side[w->now].data;
        if (o->initial[w->now])
            assert_ok(device_copy(t->s, data, o->initial[w->now], o->bytes[w->now]));
        else
            assert_ok(device_fill(t->s, data, 0xFF, o->bytes[w->now]));
    }
    assert_ok(stream_sync(t->s));
}

void twins_turn_end(struct twins *w, int turn)
{
    struct op_test *t = &w->side[w->now];
    assert_ok(op_finish_sums(t->s));
    assert_ok(stream_sync(t->s));
    for (int i = 0; i < w->output_count; i++) {
        struct twin_output *o = &w->output[i];
        assert_ok(pool_take(&t->pool, &o->result[turn], o->bytes[w->now] + 1));
        op_download(t, o->result[turn], o->twin.side[w->now].data, o->bytes[w->now]);
    }
}

/* ---- comparing ------------------------------------------------------------------------------ */

static const char *dtype_of(const struct twins *w)
{
    return dtype_name(w->side[SIDE_GPU].dtype);
}

static void failed(struct twins *w, const char *name, const char *what)
{
    out("FAIL %s %s [%s] %s: %s\n", w->rows[w->row].op, dtype_of(w), w->label, name, what);
    w->failures++;
    w->rows[w->row].failed++;
}

static double *tensor_values(struct op_test *t, struct tensor x, const void *host, int64_t *n)
{
    *n = tensor_numel(x);
    double *values = op_zeros(t, *n);
    for (int64_t i = 0; i < *n; i++) {
        uint32_t bits;
        float value;
        if (x.dtype == DTYPE_BF16)
            bits = (uint32_t)((const uint16_t *)host)[i] << 16;
        else
            bits = ((const uint32_t *)host)[i];
        memcpy(&value, &bits, sizeof value);
        values[i] = (double)value;
    }
    return values;
}

static void check_guards(struct twins *w, const struct twin_output *o)
{
    struct op_test *t = &w->side[SIDE_GPU];
    unsigned char guard[2][OP_GUARD_BYTES];
    char text[120];
    for (int i = 0; i < t->record_count; i++) {
        const struct op_tensor_record *r = &t->records[i];
        if (r->data != o->twin.side[SIDE_GPU].data)
            continue;
        op_download(t, guard[0], r->block, OP_GUARD_BYTES);
        op_download(t, guard[1], r->block + OP_GUARD_BYTES + r->bytes, OP_GUARD_BYTES);
        for (int k = 0; k < 2 * OP_GUARD_BYTES; k++)
            if (guard[k / OP_GUARD_BYTES][k % OP_GUARD_BYTES] != GUARD) {
                snprintf(text, sizeof text, "guard byte %d %s the tensor was written",
                         k % OP_GUARD_BYTES, k < OP_GUARD_BYTES ? "before" : "after");
                failed(w, o->name, text);
                return;
            }
    }
}

static void check_bits(struct twins *w, const struct twin_output *o)
{
    const unsigned char *a = o->result[0], *b = o->result[1];
    char text[120];
    for (size_t i = 0; i < o->bytes[SIDE_GPU]; i++)
        if (a[i] != b[i]) {
            snprintf(text, sizeof text, "two runs differ, first at byte %zu of %zu", i,
                     o->bytes[SIDE_GPU]);
            failed(w, o->name, text);
            return;
        }
}

static bool same_value(double got, double want)
{
    return got == want || (isnan(got) && isnan(want));
}

static void check_values(struct twins *w, const struct twin_output *o, const double *got,
                         const double *want, int64_t n)
{
    double square = 0, worst = 0, limit = 0;
    int64_t first = -1, bad = 0, finite = 0;
    for (int64_t i = 0; i < n; i++)
        if (isfinite(want[i])) {
            square += want[i] * want[i];
            finite++;
        }
    double rms = o->decode ? 0.0 : sqrt(square / (double)(finite > 0 ? finite : 1));
    for (int64_t i = 0; i < n; i++) {
        double allowed = o->allowed ? o->allowed[i] : o->tolerance * (fabs(want[i]) + rms);
        double error = fabs(got[i] - want[i]);
        double ratio = same_value(got[i], want[i]) ? 0.0 : error / allowed;
        if (ratio <= 1.0) {
            worst = ratio > worst ? ratio : worst;
            continue;
        }
        worst = isnan(ratio) || ratio > worst ? ratio : worst;
        limit = first < 0 ? allowed : limit;
        first = first < 0 ? i : first;
        bad++;
    }
    struct twins_row *row = &w->rows[w->row];
    row->worst = isnan(worst) || worst > row->worst ? worst : row->worst;
    if (first < 0)
        return;
    int64_t columns = o->decode ? n : o->twin.side[SIDE_GPU].shape[1];
    char text[240];
    snprintf(text, sizeof text,
             "%lld of %lld differ, first [%lld, %lld]: got %.9g, want %.9g, allowed %.3g, worst "
             "error/allowed %.3g",
             (long long)bad, (long long)n, (long long)(first / columns),
             (long long)(first % columns), got[first], want[first], limit, worst);
    failed(w, o->name, text);
}

void twins_end(struct twins *w)
{
    for (int i = 0; i < w->output_count; i++) {
        struct twin_output *o = &w->output[i];
        int64_t n = 0, same = 0;
        double *got, *want;
        if (o->decode) {
            got = op_zeros(&w->side[SIDE_GPU], TWIN_MAX_VALUES);
            want = op_zeros(&w->side[SIDE_CPU], TWIN_MAX_VALUES);
            n = o->decode(got, o->result[0]);
            same = o->decode(want, o->result[2]);
        } else {
            got = tensor_values(&w->side[SIDE_GPU], o->twin.side[SIDE_GPU], o->result[0], &n);
            want = tensor_values(&w->side[SIDE_CPU], o->twin.side[SIDE_CPU], o->result[2], &same);
        }
        assert_int_equal(n, same);
        w->rows[w->row].outputs++;
        check_guards(w, o);
        check_bits(w, o);
        check_values(w, o, got, want, n);
    }
    for (int side = 0; side < SIDES; side++)
        side_clear(&w->side[side]);
    w->output_count = 0;
}

void twins_table(const struct twins *w)
{
    out("\n%-26s %-5s %6s %8s %8s  %s\n", "op", "dtype", "cases", "outputs", "failures",
        "worst error / allowed");
    for (int i = 0; i < w->row_count; i++) {
        const struct twins_row *r = &w->rows[i];
        out("%-26s %-5s %6d %8d %8d  %.3f\n", r->op, dtype_name(r->dtype), r->cases, r->outputs,
            r->failed, r->worst);
    }
}

/* ---- tensors -------------------------------------------------------------------------------- */

struct twin twin_of(struct twins *w, const double *x, int64_t rows, int64_t columns)
{
    struct twin twin;
    for (int side = 0; side < SIDES; side++)
        twin.side[side] = op_put_2d(&w->side[side], x, rows, columns);
    return twin;
}

struct twin twin_of_f32(struct twins *w, const double *x, int64_t rows, int64_t columns)
{
    struct twin twin;
    for (int side = 0; side < SIDES; side++)
        twin.side[side] = op_put_f32_2d(&w->side[side], x, rows, columns);
    return twin;
}

struct twin twin_random(struct twins *w, int64_t rows, int64_t columns, double stddev)
{
    return twin_of(w, op_random(&w->side[SIDE_GPU], rows * columns, stddev), rows, columns);
}

struct twin twin_random_f32(struct twins *w, int64_t rows, int64_t columns, double stddev)
{
    return twin_of_f32(w, op_random_f32(&w->side[SIDE_GPU], rows * columns, stddev), rows, columns);
}

struct twin twin_none(void)
{
    return (struct twin){0};
}

struct twin twin_1d(struct twin twin)
{
    for (int side = 0; side < SIDES; side++) {
        struct tensor x = twin.side[side];
        twin.side[side] = tensor_1d(x.data, x.dtype, tensor_numel(x));
    }
    return twin;
}

/* Remember the values that the tensors hold now, to start every turn from them. */
static struct twin output_of(struct twins *w, const char *name, struct twin twin, bool keep,
                             double tolerance)
{
    assert_true(w->output_count < TWIN_MAX_OUTPUTS);
    struct twin_output *o = &w->output[w->output_count++];
    memset(o, 0, sizeof *o);
    o->name = name;
    o->twin = twin;
    o->tolerance = tolerance;
    for (int side = 0; side < SIDES; side++) {
        struct op_test *t = &w->side[side];
        o->bytes[side] = tensor_bytes(twin.side[side]);
        if (!keep)
            continue;
        assert_ok(pool_take(&t->pool, &o->initial[side], o->bytes[side] + 1));
        op_download(t, o->initial[side], twin.side[side].data, o->bytes[side]);
    }
    return twin;
}

struct twin twin_output(struct twins *w, const char *name, int64_t rows, int64_t columns,
                        const double *initial, double tolerance)
{
    return output_of(w, name, twin_of(w, initial, rows, columns), initial != NULL, tolerance);
}

struct twin twin_output_within(struct twins *w, const char *name, int64_t rows, int64_t columns,
                               const double *allowed)
{
    struct twin twin = twin_output(w, name, rows, columns, NULL, 0.0);
    w->output[w->output_count - 1].allowed = allowed;
    return twin;
}

struct twin twin_output_f32(struct twins *w, const char *name, int64_t rows, int64_t columns,
                            const double *initial, double tolerance)
{
    return output_of(w, name, twin_of_f32(w, initial, rows, columns), initial != NULL, tolerance);
}

struct twin twin_struct(struct twins *w, const char *name, const void *initial, size_t bytes,
                        int (*decode)(double *out, const void *host), double tolerance)
{
    struct twin twin;
    int64_t words = (int64_t)(bytes / sizeof(float));
    for (int side = 0; side < SIDES; side++)
        twin.side[side] = tensor_2d(op_upload(&w->side[side], initial, bytes), DTYPE_F32, 1, words);
    output_of(w, name, twin, true, tolerance);
    w->output[w->output_count - 1].decode = decode;
    return twin;
}

void twin_batch(struct twins *w, struct op_batch *b, const struct op_batch_spec *spec)
{
    w->side[SIDE_CPU].random = w->side[SIDE_GPU].random;
    for (int side = 0; side < SIDES; side++)
        op_batch_make(&w->side[side], &b[side], spec);
}

static struct dropout dropout_of(struct op_test *t, float p, enum dropout_site site, bool training)
{
    struct dropout drop = op_dropout(t, p, site);
    struct step_state state;
    op_download(t, &state, drop.state, sizeof state);
    state.host.training = training;
    drop.state = op_upload(t, &state, sizeof state);
    return drop;
}

struct twin_dropout twin_dropout(struct twins *w, float p, enum dropout_site site, bool training)
{
    struct twin_dropout drop;
    for (int side = 0; side < SIDES; side++)
        drop.side[side] = dropout_of(&w->side[side], p, site, training);
    return drop;
}

/* ---- a group of tests ------------------------------------------------------------------------ */

int twin_group_open(void **state, struct twin_group *group, const struct op_limits *limits)
{
    const char *small = getenv("TESSERA_SMALL");
    group->gpu = device_cuda_count() > 0;
    group->small = small && strcmp(small, "1") == 0;
    *state = group;
    if (!group->gpu)
        return 0;
    twins_open(&group->fp32, PRECISION_FP32, limits);
    twins_open(&group->bf16, PRECISION_BF16, limits);
    out("GPU: %s\n", group->fp32.side[SIDE_GPU].device->name);
    return 0;
}

int twin_group_close(void **state)
{
    struct twin_group *g = *state;
    if (!g->gpu)
        return 0;
    twins_table(&g->fp32);
    twins_table(&g->bf16);
    twins_close(&g->fp32);
    twins_close(&g->bf16);
    return out_flush() == ST_OK ? 0 : -1;
}

void twin_group_each(void **state, void (*cases)(const struct twin_group *g, struct twins *w))
{
    struct twin_group *g = *state;
    if (!g->gpu)
        skip();
    g->fp32.failures = g->bf16.failures = 0;
    cases(g, &g->fp32);
    cases(g, &g->bf16);
    assert_int_equal(g->fp32.failures + g->bf16.failures, 0);
}
