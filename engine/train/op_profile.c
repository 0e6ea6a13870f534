#include "engine/train/op_profile.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "engine/base/arena.h"
#include "engine/base/file.h"
#include "engine/base/log.h"
#include "engine/base/out.h"
#include "engine/train/metrics_log.h"

static const char *name_of(enum op_kind kind)
{
    static const char *const names[] = {
#define OP_KIND_NAME(name) #name,
        OP_KINDS(OP_KIND_NAME)
#undef OP_KIND_NAME
    };
    return names[kind];
}

/* ---- what the machine can do ----------------------------------------------------------------- */

enum { TRIES = 4 };

/* Sizes that a card and a few cores both do in some milliseconds. */
struct yardstick {
    int64_t rows, columns; /* of a square product (rows, columns) x (columns, columns) */
    int64_t summed;        /* floats of a vector */
};

static struct yardstick yardstick_of(const struct device *device)
{
    return device->library != NULL ? (struct yardstick){8192, 4096, INT64_C(1) << 27}
                                   : (struct yardstick){1024, 1024, INT64_C(1) << 24};
}

/* Of each the best of some tries; the first is a warm-up. */
static enum status time_ops(struct op_profile *p, struct yardstick y, char *memory)
{
    struct stream *s = &p->device->streams[STREAM_COMPUTE];
    enum dtype dtype = p->device->param_dtype;
    size_t x_bytes = (size_t)(y.rows * y.columns) * dtype_bytes(dtype);
    struct tensor x = tensor_2d(memory, dtype, y.rows, y.columns),
                  out = tensor_2d(memory + x_bytes, dtype, y.rows, y.columns),
                  w = tensor_2d(memory + 2 * x_bytes, dtype, y.columns, y.columns),
                  from = tensor_1d(memory, DTYPE_F32, y.summed),
                  to = tensor_1d(memory + sizeof(float) * (size_t)y.summed, DTYPE_F32, y.summed);
    double product_ms = (double)INFINITY, sum_ms = (double)INFINITY, ms;
    for (int i = 0; i <= 2 * TRIES; i++) {
        TRY(device_timer_record(&p->begin, s));
        if (i < TRIES)
            TRY(op_linear_forward(s, out, x, w, tensor_1d(NULL, dtype, y.columns)));
        else
            TRY(op_accumulate(s, to, from, true));
        TRY(device_timer_record(&p->end, s));
        TRY(device_timer_elapsed_ms(&p->begin, &p->end, &ms));
        if (i > 0 && i < TRIES && ms < product_ms)
            product_ms = ms;
        if (i > TRIES && ms < sum_ms)
            sum_ms = ms;
    }
    p->peak = 2.0 * (double)y.rows * (double)y.columns * (double)y.columns / product_ms * 1e3;
    p->bandwidth = 3.0 * (double)tensor_bytes(from) / sum_ms * 1e3; /* two reads, a write */
    return ST_OK;
}

static enum status measure(struct op_profile *p)
{
    enum status st;
    void *memory = NULL;
    struct yardstick y = yardstick_of(p->device);
    size_t products = (size_t)(2 * y.rows + y.columns) * (size_t)y.columns * sizeof(float),
           vectors = 2 * sizeof(float) * (size_t)y.summed,
           bytes = products > vectors ? products : vectors;
    struct stream *s = &p->device->streams[STREAM_COMPUTE];
    TRY_GOTO(st, out, device_alloc(p->device, &memory, bytes));
    TRY_GOTO(st, out, device_fill(s, memory, 0, bytes));
    TRY_GOTO(st, out, time_ops(p, y, memory));
out:
    device_free(p->device, &memory);
    return st;
}

/* ---- open and close -------------------------------------------------------------------------- */

static enum status open_all(struct op_profile *p)
{
    TRY(device_timer_open(p->device, &p->begin));
    TRY(device_timer_open(p->device, &p->end));
    TRY(mem_alloc(&p->calls, sizeof *p->calls * (size_t)p->call_limit));
    for (int i = 0; i < p->call_limit; i++) {
        TRY(device_timer_open(p->device, &p->calls[i].begin));
        TRY(device_timer_open(p->device, &p->calls[i].end));
    }
    return measure(p);
}

enum status op_profile_open(struct op_profile **out, struct device *device, int call_limit)
{
    struct op_profile *p = NULL;
    *out = NULL;
    TRY(mem_alloc(&p, sizeof *p));
    p->device = device;
    snprintf(p->device_name, sizeof p->device_name, "%s", device->name);
    p->call_limit = call_limit;
    p->real = device->compute;
    op_profile_bind(&p->table, p->real);
    enum status st = open_all(p);
    if (st != ST_OK)
        op_profile_close(&p);
    *out = p;
    return st;
}

void op_profile_close(struct op_profile **profile)
{
    struct op_profile *p = *profile;
    if (p == NULL)
        return;
    p->device->compute = p->real;
    for (int i = 0; p->calls != NULL && i < p->call_limit; i++) {
        device_timer_close(&p->calls[i].begin);
        device_timer_close(&p->calls[i].end);
    }
    device_timer_close(&p->begin);
    device_timer_close(&p->end);
    mem_free(&p->calls);
    mem_free(profile);
}

/* ---- a step ---------------------------------------------------------------------------------- */

enum status op_profile_begin(struct op_profile *p, const struct sequences *micro,
                             const double *squared, bool updates)
{
    p->call_count = 0;
    p->micro = micro;
    p->squared = squared;
    p->updates = updates;
    p->device->compute = &p->table;
    return device_timer_record(&p->begin, &p->device->streams[STREAM_COMPUTE]);
}

enum status op_profile_call(struct op_profile *p, struct stream *s, enum op_kind kind, double flops,
                            double bytes)
{
    ASSERT(p->call_count < p->call_limit);
    struct op_call *c = &p->calls[p->call_count];
    c->kind = kind;
    c->flops = flops;
    c->bytes = bytes;
    return device_timer_record(&c->begin, s);
}

enum status op_profile_called(struct op_profile *p, struct stream *s)
{
    return device_timer_record(&p->calls[p->call_count++].end, s);
}

enum status op_profile_end(struct op_profile *p, double model_flops)
{
    double ms;
    p->device->compute = p->real;
    TRY(device_timer_record(&p->end, &p->device->streams[STREAM_COMPUTE]));
    TRY(device_timer_elapsed_ms(&p->begin, &p->end, &ms));
    p->steps++;
    p->step_ms += ms;
    p->model_flops += model_flops;
    for (int i = 0; i < p->call_count; i++) {
        const struct op_call *c = &p->calls[i];
        struct op_sum *sum = &p->sums[c->kind];
        TRY(device_timer_elapsed_ms(&c->begin, &c->end, &ms));
        sum->calls++;
        sum->ms += ms;
        sum->flops += c->flops;
        sum->bytes += c->bytes;
        sum->floor_ms += fmax(c->flops / p->peak, c->bytes / p->bandwidth) * 1e3;
    }
    return ST_OK;
}

/* ---- the report ------------------------------------------------------------------------------ */

static int by_time(enum op_kind order[OP_KIND_COUNT], const struct op_profile *p)
{
    int count = 0;
    for (int k = 0; k < OP_KIND_COUNT; k++) {
        int at = count;
        if (p->sums[k].calls == 0)
            continue;
        for (; at > 0 && p->sums[order[at - 1]].ms < p->sums[k].ms; at--)
            order[at] = order[at - 1];
        order[at] = (enum op_kind)k;
        count++;
    }
    return count;
}

static double rest_ms(const struct op_profile *p)
{
    double ms = p->step_ms;
    for (int k = 0; k < OP_KIND_COUNT; k++)
        ms -= p->sums[k].ms;
    return ms > 0 ? ms : 0;
}

void op_profile_print(const struct op_profile *p)
{
    enum op_kind order[OP_KIND_COUNT];
    int count = by_time(order, p);
    double n = (double)p->steps;
    if (p->steps == 0)
        return;
    out("\n%" PRId64 " steps from step %" PRId64 ", %.3f ms each; measured here: a product %.1f "
        "GFLOP/s, a sum of vectors %.1f GB/s\n",
        p->steps, p->first_step + 1, p->step_ms / n, p->peak * 1e-9, p->bandwidth * 1e-9);
    out("\n%-27s %10s %10s %7s %9s %8s %9s\n", "op", "calls/step", "ms/step", "share", "GFLOP/s",
        "GB/s", "of floor");
    for (int i = 0; i < count; i++) {
        const struct op_sum *sum = &p->sums[order[i]];
        char rate[32] = "";
        if (sum->flops > 0)
            snprintf(rate, sizeof rate, "%.1f", sum->flops / sum->ms * 1e-6);
        out("%-27s %10.1f %10.3f %6.1f%% %9s %8.1f %8.0f%%\n", name_of(order[i]),
            (double)sum->calls / n, sum->ms / n, 100 * sum->ms / p->step_ms, rate,
            sum->bytes / sum->ms * 1e-6, 100 * sum->floor_ms / sum->ms);
    }
    out("%-27s %10s %10.3f %6.1f%%\n", "(collectives, copies, gaps)", "", rest_ms(p) / n,
        100 * rest_ms(p) / p->step_ms);
}

enum status op_profile_write(const struct op_profile *p, const char *path)
{
    struct record rec = {.used = 0};
    enum op_kind order[OP_KIND_COUNT];
    int count = by_time(order, p);
    record_put(&rec, "{\"device\":\"%s\",\"steps\":%" PRId64 ",\"first_step\":%" PRId64,
               p->device_name, p->steps, p->first_step + 1);
    record_real(&rec, "step_ms", p->step_ms);
    record_real(&rec, "model_flops", p->model_flops);
    record_real(&rec, "peak_flops_per_s", p->peak);
    record_real(&rec, "vector_bytes_per_s", p->bandwidth);
    record_real(&rec, "rest_ms", rest_ms(p));
    record_put(&rec, ",\"ops\":[");
    for (int i = 0; i < count; i++) {
        const struct op_sum *sum = &p->sums[order[i]];
        record_put(&rec, "%s\n{\"op\":\"%s\",\"calls\":%" PRId64, i > 0 ? "," : "",
                   name_of(order[i]), sum->calls);
        record_real(&rec, "ms", sum->ms);
        record_real(&rec, "flops", sum->flops);
        record_real(&rec, "bytes", sum->bytes);
        record_real(&rec, "floor_ms", sum->floor_ms);
        record_put(&rec, "}");
    }
    record_put(&rec, "]}\n");
    TRY(file_write(path, rec.text, rec.used));
    log_info("run", "wrote %s", path);
    return ST_OK;
}
