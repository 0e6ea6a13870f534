#include "engine/model/builder.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Room for one more element; its index, or 0 after a failure (then nothing is written). */
static int append(struct model_builder *b, void *array, size_t *capacity, int *count, size_t bytes)
{
    if (b->status == ST_OK)
        b->status = mem_grow(array, capacity, (size_t)*count + 1, bytes);
    return b->status == ST_OK ? (*count)++ : 0;
}

void builder_name(char out[PARAM_NAME_BYTES], const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int length = vsnprintf(out, PARAM_NAME_BYTES, format, args);
    va_end(args);
    ASSERT(length > 0 && length < PARAM_NAME_BYTES);
}

int builder_slot(struct model_builder *b, int64_t columns, enum dtype dtype)
{
    struct model *m = b->model;
    int i = append(b, &m->slots, &b->slot_capacity, &m->slot_count, sizeof *m->slots);
    if (b->status == ST_OK)
        m->slots[i] = (struct model_slot){columns, dtype};
    return i;
}

void builder_unit(struct model_builder *b, const char *kind, struct model_unit unit)
{
    struct model *m = b->model;
    if (b->status == ST_OK && m->unit_count == MODEL_MAX_UNITS)
        b->status = FAIL(INVALID,
                         "the model has more than %d units; a larger train.max_unit_numel makes "
                         "fewer",
                         MODEL_MAX_UNITS);
    char name[PARAM_NAME_BYTES], *kept = NULL;
    int length = snprintf(name, sizeof name, "%s.%d", kind, unit.index);
    if (b->status == ST_OK)
        b->status = pool_copy(&m->pool, &kept, name, (size_t)length);
    int i = append(b, &m->units, &b->unit_capacity, &m->unit_count, sizeof *m->units);
    if (b->status != ST_OK)
        return;
    m->units[i] = unit;
    m->units[i].name = kept;
    m->units[i].first_param = m->param_count;
    m->units[i].param_count = 0;
}

int builder_tensor(struct model_builder *b, const char *name, int64_t rows, int64_t columns,
                   enum param_init init)
{
    struct model *m = b->model;
    int i = append(b, &m->tensors, &b->tensor_capacity, &m->tensor_count, sizeof *m->tensors);
    if (b->status != ST_OK)
        return 0;
    struct model_tensor *t = &m->tensors[i];
    builder_name(t->name, "%s", name);
    t->dims = columns > 0 ? 2 : 1;
    t->shape[0] = rows;
    t->shape[1] = columns > 0 ? columns : 1;
    t->init = init;
    return i;
}

void builder_param(struct model_builder *b, const char *name, int64_t rows, int64_t columns,
                   bool decay)
{
    struct model *m = b->model;
    int i = append(b, &m->params, &b->param_capacity, &m->param_count, sizeof *m->params);
    if (b->status != ST_OK)
        return;
    struct model_unit *u = &m->units[m->unit_count - 1];
    ASSERT(u->param_count == 0 || m->params[i - 1].decay || !decay);
    struct model_param *p = &m->params[i];
    builder_name(p->name, "%s", name);
    p->dims = columns > 0 ? 2 : 1;
    p->shape[0] = rows;
    p->shape[1] = columns > 0 ? columns : 1;
    p->unit = m->unit_count - 1;
    p->decay = decay;
    u->param_count++;
}

void builder_piece(struct model_builder *b, int tensor, int64_t tensor_first, int64_t numel)
{
    if (b->status != ST_OK)
        return;
    struct model_param *p = &b->model->params[b->model->param_count - 1];
    ASSERT(p->piece_count < PARAM_MAX_PIECES);
    struct param_piece *piece = &p->piece[p->piece_count];
    piece->tensor = tensor;
    piece->first = p->piece_count > 0 ? piece[-1].first + piece[-1].numel : 0;
    piece->numel = numel;
    piece->tensor_first = tensor_first;
    p->piece_count++;
    ASSERT(piece->first + numel <= model_param_numel(p));
}

void builder_whole(struct model_builder *b, const char *name, int64_t rows, int64_t columns,
                   enum param_init init, bool decay)
{
    int tensor = builder_tensor(b, name, rows, columns, init);
    builder_param(b, name, rows, columns, decay);
    builder_piece(b, tensor, 0, rows * (columns > 0 ? columns : 1));
}

/* Whole components only, so that "layer.1" does not take "layer.10" with it. */
static bool name_is_under(const char *name, const char *prefix, size_t bytes)
{
    return strncmp(name, prefix, bytes) == 0 &&
           (name[bytes] == '\0' || name[bytes] == '.' || prefix[bytes - 1] == '.');
}

static enum status freeze_one(struct model *m, const char *prefix, size_t bytes)
{
    bool found = false;
    for (int i = 0; i < m->param_count; i++) {
        struct model_param *p = &m->params[i];
        int under = 0;
        for (int k = 0; k < p->piece_count; k++)
            under += name_is_under(m->tensors[p->piece[k].tensor].name, prefix, bytes);
        bool own = name_is_under(p->name, prefix, bytes);
        if (under > 0 && under < p->piece_count && !own)
            return FAIL(INVALID,
                        "train.freeze: \"%.*s\" is a part of %s, which can only be frozen whole",
                        (int)bytes, prefix, p->name);
        if (own || under > 0)
            p->frozen = found = true;
    }
    if (!found)
        return FAIL(INVALID, "train.freeze: no parameter is named \"%.*s\"", (int)bytes, prefix);
    return ST_OK;
}

static enum status freeze_all(struct model *m, const char *list)
{
    while (*list != '\0') {
        list += strspn(list, ", ");
        size_t bytes = strcspn(list, ", ");
        if (bytes > 0)
            TRY(freeze_one(m, list, bytes));
        list += bytes;
    }
    return ST_OK;
}

static enum status place_params(struct model *m)
{
    TRY(mem_alloc(&m->param_offset, sizeof *m->param_offset * (size_t)m->param_count));
    for (int i = 0; i < m->unit_count; i++) {
        int64_t next = 0;
        for (int k = 0; k < m->units[i].param_count; k++) {
            int index = m->units[i].first_param + k;
            const struct model_param *p = &m->params[index];
            const struct param_piece *last = &p->piece[p->piece_count - 1];
            ASSERT(last->first + last->numel == model_param_numel(p));
            m->param_offset[index] = next;
            next = round_up(next + model_param_numel(p), MODEL_PARAM_ALIGN);
        }
    }
    return ST_OK;
}

enum status builder_finish(struct model_builder *b, const char *freeze)
{
    TRY(b->status);
    TRY(freeze_all(b->model, freeze));
    TRY(place_params(b->model));
    return ST_OK;
}

static struct tensor param_view(const struct model_param *p, void *data, enum dtype dtype)
{
    return p->dims == 2 ? tensor_2d(data, dtype, p->shape[0], p->shape[1])
                        : tensor_1d(data, dtype, p->shape[0]);
}

struct tensor unit_param(const struct model *m, const struct model_unit *u,
                         const struct unit_call *call, int i)
{
    int index = u->first_param + i;
    /* Ops take one kind of tensor; those that read do not write through it. */
    char *flat = (char *)(uintptr_t)call->params;
    size_t offset = (size_t)m->param_offset[index] * dtype_bytes(m->param_dtype);
    return param_view(&m->params[index], flat == NULL ? NULL : flat + offset, m->param_dtype);
}

struct tensor unit_grad(const struct model *m, const struct model_unit *u,
                        const struct unit_call *call, int i)
{
    int index = u->first_param + i;
    float *flat = (float *)call->grads;
    if (flat != NULL && !m->params[index].frozen)
        return param_view(&m->params[index], flat + m->param_offset[index], DTYPE_F32);
    return param_view(&m->params[index], NULL, DTYPE_F32);
}

enum status unit_grads_begin(const struct model *m, const struct model_unit *u,
                             const struct unit_call *call)
{
    float *flat = (float *)call->grads;
    if (flat == NULL || call->grads_add)
        return ST_OK;
    int64_t written = 0; /* elements before this are written by an op, or are zeros */
    for (int i = u->first_param; i < u->first_param + u->param_count; i++) {
        if (m->params[i].frozen)
            continue;
        int64_t gap = m->param_offset[i] - written;
        if (gap > 0)
            TRY(device_fill(call->stream, flat + written, 0, sizeof *flat * (size_t)gap));
        written = m->param_offset[i] + model_param_numel(&m->params[i]);
    }
    int64_t tail = model_unit_numel(m, (int)(u - m->units)) - written;
    if (tail > 0)
        TRY(device_fill(call->stream, flat + written, 0, sizeof *flat * (size_t)tail));
    return ST_OK;
}
