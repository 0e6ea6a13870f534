#include "tests/support/model_run.h"

#include <stdio.h>
#include <string.h>

#include "tests/support/support.h"

/* ---- batches --------------------------------------------------------------------------------- */

struct batch_arrays {
    int32_t *cu_seqlens, *kv_len, *sample, *start, *end;
    int32_t *token, *token_type, *row_sequence, *token_order;
};

static void batch_bind(struct arena *a, struct batch_arrays *x, int64_t count, int64_t rows)
{
    ARENA_BIND(a, x->cu_seqlens, count + 1);
    ARENA_BIND(a, x->kv_len, count);
    ARENA_BIND(a, x->sample, count);
    ARENA_BIND(a, x->start, count);
    ARENA_BIND(a, x->end, count);
    ARENA_BIND(a, x->token, rows);
    ARENA_BIND(a, x->token_type, rows);
    ARENA_BIND(a, x->row_sequence, rows);
    ARENA_BIND(a, x->token_order, rows);
}

/* Insertion sort: stable, and test batches are small. */
static void sort_rows(int32_t *order, const int32_t *token, int64_t rows)
{
    for (int32_t row = 0; row < rows; row++) {
        int64_t k = row;
        for (; k > 0 && token[order[k - 1]] > token[row]; k--)
            order[k] = order[k - 1];
        order[k] = row;
    }
}

static int32_t fill_arrays(struct batch_arrays *x, const struct run_batch_source *s)
{
    int32_t row = 0, longest = 0;
    for (int32_t b = 0; b < s->count; b++) {
        x->cu_seqlens[b] = row;
        x->kv_len[b] = s->kv_len != NULL ? s->kv_len[b] : s->lengths[b];
        x->sample[b] = 100 + b;
        x->start[b] = s->start[b];
        x->end[b] = s->end[b];
        for (int32_t i = 0; i < s->lengths[b]; i++, row++) {
            x->token[row] = s->token[row];
            x->token_type[row] = s->type[row];
            x->row_sequence[row] = b;
        }
        longest = s->lengths[b] > longest ? s->lengths[b] : longest;
    }
    x->cu_seqlens[s->count] = row;
    assert_true(row <= s->rows);
    for (; row < s->rows; row++) {
        x->token[row] = x->row_sequence[row] = -1;
        x->token_type[row] = 0;
    }
    sort_rows(x->token_order, x->token, s->rows);
    return longest;
}

void run_batch_open(struct run_batch *b, struct device *device,
                    const struct run_batch_source *source)
{
    struct arena measure = {0};
    struct batch_arrays x;
    void *host = NULL;
    memset(b, 0, sizeof *b);
    batch_bind(&measure, &x, source->count, source->rows);
    assert_ok(mem_alloc(&host, measure.used));
    assert_ok(device_alloc(device, &b->memory, measure.used));
    struct arena a = arena_over(host, measure.used);
    batch_bind(&a, &x, source->count, source->rows);
    b->device = device;
    b->q.max_length = fill_arrays(&x, source);
    struct stream *s = &device->streams[STREAM_COMPUTE];
    assert_ok(device_copy(s, b->memory, host, measure.used));
    assert_ok(stream_sync(s));
    mem_free(&host);
    a = arena_over(b->memory, measure.used);
    batch_bind(&a, &x, source->count, source->rows);
    b->q.rows = source->rows;
    b->q.count = source->count;
    b->q.positions = source->positions;
    b->q.cu_seqlens = x.cu_seqlens;
    b->q.kv_len = x.kv_len;
    b->q.sample = x.sample;
    b->q.token = x.token;
    b->q.token_type = x.token_type;
    b->q.row_sequence = x.row_sequence;
    b->q.token_order = x.token_order;
    b->q.start = x.start;
    b->q.end = x.end;
}

void run_batch_release(struct run_batch *b)
{
    if (b->device != NULL)
        device_free(b->device, &b->memory);
    memset(b, 0, sizeof *b);
}

/* ---- buffers --------------------------------------------------------------------------------- */

/* NaN in fp32 and bf16. */
static void poison(struct model_run *r, void *memory, size_t bytes)
{
    if (bytes > 0)
        assert_ok(device_fill(r->stream, memory, 0xFF, bytes));
}

static void *take(struct model_run *r, size_t bytes)
{
    void *memory = NULL;
    assert_ok(device_alloc(r->device, &memory, bytes));
    if (bytes > 0)
        assert_ok(device_fill(r->stream, memory, 0, bytes));
    return memory;
}

static size_t unit_bytes(const struct model_run *r, int u)
{
    return sizeof(float) * (size_t)model_unit_numel(&r->model, u);
}

static size_t slot_bytes(const struct model_run *r, int slot)
{
    const struct model_slot *s = &r->model.slots[slot];
    return (size_t)(r->dims.rows * s->columns) * dtype_bytes(s->dtype);
}

static void open_units(struct model_run *r)
{
    const struct model *m = &r->model;
    assert_ok(mem_alloc(&r->units, sizeof *r->units * (size_t)m->unit_count));
    for (int i = 0; i < m->unit_count; i++) {
        struct unit_buffers *b = &r->units[i];
        const struct model_unit *u = &m->units[i];
        b->master = take(r, unit_bytes(r, i));
        b->params = m->param_dtype == DTYPE_F32 ? b->master : take(r, unit_bytes(r, i));
        b->grads = take(r, unit_bytes(r, i));
        b->m = take(r, unit_bytes(r, i));
        b->v = take(r, unit_bytes(r, i));
        b->saved = take(r, u->saved_bytes(m, u, r->dims));
        b->forward_scratch = take(r, u->forward_scratch_bytes(m, u, r->dims));
        b->backward_scratch = take(r, u->backward_scratch_bytes(m, u, r->dims));
    }
}

static void open_workspace(struct model_run *r)
{
    const struct model *m = &r->model;
    const struct op_limits limits = {.rows = r->dims.rows,
                                     .channels = m->dims.hidden,
                                     .ffn = m->dims.ffn,
                                     .heads = m->dims.heads,
                                     .sequences = r->dims.sequences,
                                     .max_length = r->dims.max_length,
                                     .vocab_rows = m->dims.vocab,
                                     .world_size = 1};
    r->stream->workspace_bytes = op_workspace_bytes(r->device, &limits);
    r->workspace = take(r, r->stream->workspace_bytes);
    r->stream->workspace = r->workspace;
}

void model_run_open(struct model_run *r, const struct run_config *config, struct micro_dims dims)
{
    memset(r, 0, sizeof *r);
    r->dims = dims;
    assert_ok(device_open(&r->device, config->train.device, config->train.precision, 0, 1));
    r->stream = &r->device->streams[STREAM_COMPUTE];
    assert_ok(model_open(&r->model, config, r->device->param_dtype));
    open_workspace(r);
    open_units(r);
    assert_ok(mem_alloc(&r->slots, sizeof *r->slots * (size_t)r->model.slot_count));
    for (int i = 0; i < r->model.slot_count; i++) {
        r->slots[i].act = take(r, slot_bytes(r, i));
        r->slots[i].dact = take(r, slot_bytes(r, i));
    }
    r->state = take(r, sizeof *r->state);
    r->report = take(r, sizeof *r->report);
    r->host.seed = 7;
    r->host.inv_count = 1.0f;
}

static void give(struct model_run *r, void *memory)
{
    device_free(r->device, &memory);
}

void model_run_release(struct model_run *r)
{
    for (int i = 0; i < r->model.unit_count; i++) {
        struct unit_buffers *b = &r->units[i];
        if (b->params != b->master)
            give(r, b->params);
        give(r, b->master);
        give(r, b->grads);
        give(r, b->m);
        give(r, b->v);
        give(r, b->saved);
        give(r, b->forward_scratch);
        give(r, b->backward_scratch);
    }
    for (int i = 0; i < r->model.slot_count; i++) {
        give(r, r->slots[i].act);
        give(r, r->slots[i].dact);
    }
    give(r, r->workspace);
    give(r, r->state);
    give(r, r->report);
    mem_free(&r->units);
    mem_free(&r->slots);
    model_release(&r->model);
    device_close(&r->device);
    memset(r, 0, sizeof *r);
}

/* ---- parameters ------------------------------------------------------------------------------ */

static void refresh_params(struct model_run *r, int u)
{
    struct unit_buffers *b = &r->units[u];
    int64_t n = model_unit_numel(&r->model, u);
    if (b->params != b->master)
        assert_ok(op_master_split(r->stream, tensor_1d(b->params, r->model.param_dtype, n),
                                  (struct tensor){0}, tensor_1d(b->master, DTYPE_F32, n)));
    assert_ok(stream_sync(r->stream));
}

void model_run_init(struct model_run *r, uint64_t seed)
{
    for (int u = 0; u < r->model.unit_count; u++) {
        float *values = NULL;
        assert_ok(mem_alloc(&values, unit_bytes(r, u)));
        model_init_range(&r->model, u, values, 0, model_unit_numel(&r->model, u), seed);
        assert_ok(device_copy(r->stream, r->units[u].master, values, unit_bytes(r, u)));
        refresh_params(r, u);
        mem_free(&values);
    }
}

/* Copy each piece of a tensor from @values to the unit, or back. */
static void move_pieces(struct model_run *r, enum run_kind kind, const char *name, float *values,
                        bool put)
{
    const struct model *m = &r->model;
    int tensor = model_find_tensor(m, name);
    if (tensor < 0)
        fail_msg("the model has no tensor %s", name);
    for (int i = 0; i < m->param_count; i++)
        for (int k = 0; k < m->params[i].piece_count; k++) {
            const struct param_piece *piece = &m->params[i].piece[k];
            if (piece->tensor != tensor)
                continue;
            struct unit_buffers *b = &r->units[m->params[i].unit];
            float *at =
                (kind == RUN_GRAD ? b->grads : b->master) + m->param_offset[i] + piece->first;
            float *host = values + piece->tensor_first;
            assert_ok(device_copy(r->stream, put ? at : host, put ? host : at,
                                  sizeof *at * (size_t)piece->numel));
            if (put)
                refresh_params(r, m->params[i].unit);
        }
    assert_ok(stream_sync(r->stream));
}

void model_run_put_tensor(struct model_run *r, const char *name, const float *values)
{
    move_pieces(r, RUN_MASTER, name, (float *)(uintptr_t)values, true);
}

void model_run_get_tensor(struct model_run *r, enum run_kind kind, const char *name, float *values)
{
    move_pieces(r, kind, name, values, false);
}

/* ---- the step -------------------------------------------------------------------------------- */

static struct unit_call call_of(struct model_run *r, const struct run_batch *b,
                                const struct model_unit *u)
{
    struct unit_buffers *buffers = &r->units[u - r->model.units];
    struct unit_call call = {.stream = r->stream,
                             .sequences = &b->q,
                             .state = r->state,
                             .report = r->report,
                             .params = buffers->params,
                             .act_in = u->act_in < 0 ? NULL : r->slots[u->act_in].act,
                             .act_out = r->slots[u->act_out].act,
                             .saved = buffers->saved,
                             .scratch = buffers->forward_scratch,
                             .training = r->host.training != 0};
    return call;
}

void model_run_forward(struct model_run *r, const struct run_batch *b, bool training)
{
    const struct model *m = &r->model;
    assert_true(b->q.rows <= r->dims.rows);
    r->host.training = training;
    struct step_state state = model_run_state(r);
    state.host = r->host;
    assert_ok(device_copy(r->stream, r->state, &state, sizeof state));
    assert_ok(op_step_begin(r->stream, r->report, r->state, NULL));
    for (int i = 0; i < m->slot_count; i++)
        poison(r, r->slots[i].act, slot_bytes(r, i));
    for (int i = 0; i < m->unit_count; i++) {
        const struct model_unit *u = &m->units[i];
        struct unit_call call = call_of(r, b, u);
        poison(r, call.scratch, u->forward_scratch_bytes(m, u, r->dims));
        poison(r, call.saved, u->saved_bytes(m, u, r->dims));
        assert_ok(u->forward(m, u, &call));
    }
    assert_ok(stream_sync(r->stream));
}

static void recompute(struct model_run *r, const struct run_batch *b, const struct model_unit *u)
{
    struct unit_call call = call_of(r, b, u);
    call.act_out = NULL;
    call.report = NULL;
    poison(r, call.saved, u->saved_bytes(&r->model, u, r->dims));
    poison(r, call.scratch, u->forward_scratch_bytes(&r->model, u, r->dims));
    assert_ok(u->forward(&r->model, u, &call));
}

static bool unit_frozen(const struct model *m, const struct model_unit *u)
{
    for (int i = 0; i < u->param_count; i++)
        if (!m->params[u->first_param + i].frozen)
            return false;
    return true;
}

/* BACKWARD leaves the gradient that it reads as it was. */
static enum status backward_and_compare(struct model_run *r, const struct model_unit *u,
                                        const struct unit_call *call)
{
    size_t bytes = call->dact_out == NULL ? 0 : slot_bytes(r, u->act_out);
    void *before = NULL, *after = NULL;
    assert_ok(mem_alloc(&before, bytes));
    assert_ok(mem_alloc(&after, bytes));
    if (bytes > 0)
        assert_ok(device_copy(r->stream, before, call->dact_out, bytes));
    enum status st = u->backward(&r->model, u, call);
    if (bytes > 0)
        assert_ok(device_copy(r->stream, after, call->dact_out, bytes));
    assert_ok(stream_sync(r->stream));
    if (bytes > 0)
        assert_memory_equal(before, after, bytes);
    mem_free(&before);
    mem_free(&after);
    return st;
}

void model_run_backward(struct model_run *r, const struct run_batch *b, bool add)
{
    const struct model *m = &r->model;
    for (int i = 0; i < m->slot_count; i++)
        poison(r, r->slots[i].dact, slot_bytes(r, i));
    for (int i = m->unit_count - 1; i >= 0; i--) {
        const struct model_unit *u = &m->units[i];
        struct unit_call call = call_of(r, b, u);
        if (r->recompute && u->recompute)
            recompute(r, b, u);
        call.grads = unit_frozen(m, u) ? NULL : r->units[i].grads;
        call.grads_add = add;
        call.dact_in = u->act_in < 0 ? NULL : r->slots[u->act_in].dact;
        call.dact_out = i == m->unit_count - 1 ? NULL : r->slots[u->act_out].dact;
        call.act_out = NULL;
        call.report = NULL;
        if (!u->backward_reads_params)
            call.params = NULL;
        if (!u->backward_reads_input)
            call.act_in = NULL;
        if (!add)
            poison(r, r->units[i].grads, unit_bytes(r, i));
        call.scratch = r->units[i].backward_scratch;
        poison(r, call.scratch, u->backward_scratch_bytes(m, u, r->dims));
        assert_ok(backward_and_compare(r, u, &call));
    }
    assert_ok(stream_sync(r->stream));
}

/* Ranges of one treatment that cover the unit; gaps belong to the parameter before them. */
static int unit_ranges(const struct model *m, const struct model_unit *u,
                       struct adam_range ranges[ADAM_MAX_RANGES])
{
    int count = 0;
    int64_t end = model_unit_numel(m, (int)(u - m->units));
    for (int i = u->first_param; i < u->first_param + u->param_count; i++) {
        const struct model_param *p = &m->params[i];
        bool last = i + 1 == u->first_param + u->param_count;
        int64_t stop = last ? end : m->param_offset[i + 1];
        struct adam_range *range = count > 0 ? &ranges[count - 1] : NULL;
        if (range == NULL || range->decay != p->decay || range->frozen != p->frozen) {
            assert_true(count < ADAM_MAX_RANGES);
            range = &ranges[count++];
            *range = (struct adam_range){m->param_offset[i], 0, p->decay, p->frozen};
        }
        range->count = stop - range->first;
    }
    return count;
}

void model_run_update(struct model_run *r, const struct optim_hyper *hyper)
{
    const struct model *m = &r->model;
    for (int i = 0; i < m->unit_count; i++)
        if (!unit_frozen(m, &m->units[i]))
            assert_ok(
                op_squared_norm(r->stream, r->report,
                                tensor_1d(r->units[i].grads, DTYPE_F32, model_unit_numel(m, i))));
    assert_ok(op_agree(r->stream, r->state, r->report, 1, hyper, NULL));
    for (int i = 0; i < m->unit_count; i++) {
        struct unit_buffers *b = &r->units[i];
        struct adam_range ranges[ADAM_MAX_RANGES];
        int64_t n = model_unit_numel(m, i);
        int count = unit_ranges(m, &m->units[i], ranges);
        if (unit_frozen(m, &m->units[i]))
            continue;
        assert_ok(op_adamw(r->stream, tensor_1d(b->master, DTYPE_F32, n), (struct tensor){0},
                           tensor_1d(b->m, DTYPE_F32, n), tensor_1d(b->v, DTYPE_F32, n),
                           tensor_1d(b->grads, DTYPE_F32, n), ranges, count, 0, r->state, hyper));
        refresh_params(r, i);
    }
    assert_ok(stream_sync(r->stream));
    r->host.step++;
}

/* ---- reading --------------------------------------------------------------------------------- */

struct step_state model_run_state(struct model_run *r)
{
    struct step_state state;
    assert_ok(device_copy(r->stream, &state, r->state, sizeof state));
    assert_ok(stream_sync(r->stream));
    return state;
}

struct step_report model_run_report(struct model_run *r)
{
    struct step_report report;
    assert_ok(device_copy(r->stream, &report, r->report, sizeof report));
    assert_ok(stream_sync(r->stream));
    return report;
}

void model_run_read(struct model_run *r, float *out, const void *memory, enum dtype dtype,
                    int64_t count)
{
    assert_ok(device_copy(r->stream, out, memory, (size_t)count * dtype_bytes(dtype)));
    assert_ok(stream_sync(r->stream));
    if (dtype != DTYPE_BF16)
        return;
    /* Widen in place, from the end. */
    for (int64_t i = count - 1; i >= 0; i--) {
        uint16_t half;
        memcpy(&half, (const char *)out + 2 * i, sizeof half);
        uint32_t word = (uint32_t)half << 16;
        memcpy(&out[i], &word, sizeof word);
    }
}
