#include "shard/program_builder.h"

int builder_buffer(struct builder *b, enum category category, enum dtype dtype, int unit,
                   int micro_batch, size_t bytes)
{
    struct program *p = b->p;
    if (b->st == ST_OK)
        b->st = mem_grow(&p->buffers, &p->buffer_capacity, (size_t)p->buffer_count + 1,
                         sizeof *p->buffers);
    if (b->st != ST_OK)
        return 0;
    p->buffers[p->buffer_count] = (struct buffer){
        .category = category,
        .dtype = dtype,
        .unit = unit,
        .micro_batch = micro_batch,
        .bytes = (size_t)round_up((int64_t)bytes, ARENA_ALIGN),
        .first = -1,
        .last = -1,
    };
    return p->buffer_count++;
}

static int persistent(struct builder *b, enum category category, enum dtype dtype, int unit,
                      size_t bytes)
{
    int i = builder_buffer(b, category, dtype, unit, -1, bytes);
    if (b->st == ST_OK)
        b->p->buffers[i].persistent = true;
    return i;
}

bool builder_accumulates_shards(const struct builder *b)
{
    return b->per_micro_batch && b->spec->micro_batches > 1;
}

struct instr *builder_emit(struct builder *b, enum program_op op, enum program_stream stream,
                           int unit, int micro_batch, unsigned flags)
{
    struct program *p = b->p;
    if (b->st == ST_OK)
        b->st =
            mem_grow(&p->instrs, &p->instr_capacity, (size_t)p->instr_count + 1, sizeof *p->instrs);
    if (b->st != ST_OK) {
        b->sink.operand_count = 0;
        return &b->sink;
    }
    struct instr *in = &p->instrs[p->instr_count++];
    *in = (struct instr){
        .op = op, .stream = stream, .unit = unit, .micro_batch = micro_batch, .flags = flags};
    return in;
}

void operand_add_slice(struct instr *in, enum role role, enum access access, int buffer, bool slice)
{
    if (buffer == BUFFER_NONE)
        return;
    ASSERT(in->operand_count < INSTR_MAX_OPERANDS);
    in->operands[in->operand_count++] = (struct operand){
        .role = (uint8_t)role, .access = (uint8_t)access, .slice = slice, .buffer = buffer};
}

void operand_add(struct instr *in, enum role role, enum access access, int buffer)
{
    operand_add_slice(in, role, access, buffer, false);
}

size_t builder_whole_bytes(const struct builder *b, int unit, enum dtype dtype)
{
    return (size_t)b->spec->units[unit].shard_numel * (size_t)b->spec->world_size *
           dtype_bytes(dtype);
}

size_t builder_shard_bytes(const struct builder *b, int unit, enum dtype dtype)
{
    return (size_t)b->spec->units[unit].shard_numel * dtype_bytes(dtype);
}

bool builder_is_partitioned(const struct builder *b, int unit)
{
    return b->spec->zero_stage == 3 || (b->spec->zero_stage >= 1 && b->spec->units[unit].by_rows);
}

bool builder_looks_up_rows(const struct builder *b, int unit)
{
    return b->p->kind == PROGRAM_STEP && b->spec->zero_stage >= 1 && b->spec->units[unit].by_rows;
}

/* ---- the items of a turn ---- */

/* The lowest unit whose BACKWARD writes a gradient: nobody needs those of the units below. */
static int lowest_trained(const struct program_spec *spec)
{
    for (int u = 0; u < spec->unit_count; u++) {
        int tied = spec->units[u].tied;
        if (!spec->units[u].frozen || (tied >= 0 && !spec->units[tied].frozen))
            return u;
    }
    return spec->unit_count;
}

int builder_list_items(struct builder *b, struct item *out)
{
    const struct program_spec *spec = b->spec;
    const int U = spec->unit_count, lowest = lowest_trained(spec);
    int n = 0;
    if (b->p->kind == PROGRAM_EVALUATE) {
        for (int u = 0; u < U; u++)
            out[n++] = (struct item){OP_FORWARD, u, 0};
    } else if (b->p->kind == PROGRAM_STEP) {
        for (int m = 0; m < spec->micro_batches; m++) {
            for (int u = 0; u < U; u++)
                out[n++] = (struct item){OP_FORWARD, u, m};
            for (int u = U - 1; u >= lowest; u--) {
                if (spec->recompute && spec->units[u].recompute)
                    out[n++] = (struct item){OP_RECOMPUTE, u, m};
                out[n++] = (struct item){OP_BACKWARD, u, m};
            }
        }
    }
    return n;
}

static bool item_reads_params(const struct program_spec *spec, struct item it)
{
    return it.op != OP_BACKWARD || spec->units[it.unit].backward_reads_params;
}

/* A unit that is used by neighbouring items (last forward, first backward) stays gathered. */
static void note_use(struct builder *b, int unit, int item)
{
    if (!builder_is_partitioned(b, unit) || builder_looks_up_rows(b, unit))
        return;
    for (int g = b->group_count - 1; g >= 0; g--) {
        struct gather_group *group = &b->groups[g];
        if (group->unit != unit)
            continue;
        if (item - group->last_item <= 1) {
            group->last_item = item;
            return;
        }
        break;
    }
    b->groups[b->group_count++] = (struct gather_group){unit, item, item, BUFFER_NONE};
}

void builder_list_groups(struct builder *b, const struct item *items, int count)
{
    for (int i = 0; i < count; i++) {
        if (!item_reads_params(b->spec, items[i]))
            continue;
        note_use(b, items[i].unit, i);
        if (b->spec->units[items[i].unit].tied >= 0)
            note_use(b, b->spec->units[items[i].unit].tied, i);
    }
}

/* ---- state that all programs share ---- */

void builder_list_shared(struct builder *b)
{
    const struct program_spec *spec = b->spec;
    b->batch =
        persistent(b, CATEGORY_BATCH, DTYPE_I32, -1,
                   spec->batch_bytes > spec->evaluate_batch_bytes ? spec->batch_bytes
                                                                  : spec->evaluate_batch_bytes);
    b->state = persistent(b, CATEGORY_BATCH, DTYPE_F64, -1, spec->state_bytes);
    b->report = persistent(b, CATEGORY_BATCH, DTYPE_F64, -1, spec->report_bytes);
    b->reports =
        persistent(b, CATEGORY_BATCH, DTYPE_F64, -1, spec->report_bytes * (size_t)spec->world_size);
    b->workspace = persistent(b, CATEGORY_WORKSPACE, DTYPE_F32, -1, spec->workspace_bytes);
    b->update_workspace =
        persistent(b, CATEGORY_WORKSPACE, DTYPE_F32, -1, spec->update_workspace_bytes);
    b->side_workspace =
        persistent(b, CATEGORY_WORKSPACE, DTYPE_F32, -1, spec->side_workspace_bytes);
    b->p->staging = BUFFER_NONE;
    if (spec->staging_bytes > 0)
        b->p->staging = persistent(b, CATEGORY_WORKSPACE, DTYPE_F32, -1, spec->staging_bytes);
    for (int u = 0; u < spec->unit_count; u++) {
        bool frozen = spec->units[u].frozen;
        if (builder_is_partitioned(b, u))
            b->shard[u] = persistent(b, CATEGORY_PARAMETERS, spec->param_dtype, u,
                                     builder_shard_bytes(b, u, spec->param_dtype));
        else
            b->param[u] = persistent(b, CATEGORY_PARAMETERS, spec->param_dtype, u,
                                     builder_whole_bytes(b, u, spec->param_dtype));
        size_t state_bytes = b->state_sharded ? builder_shard_bytes(b, u, DTYPE_F32)
                                              : builder_whole_bytes(b, u, DTYPE_F32);
        if (spec->param_dtype != DTYPE_F32)
            b->master[u] = persistent(b, CATEGORY_MASTER, DTYPE_U16, u,
                                      b->state_sharded ? builder_shard_bytes(b, u, DTYPE_U16)
                                                       : builder_whole_bytes(b, u, DTYPE_U16));
        if (!frozen) {
            b->adam_m[u] = persistent(b, CATEGORY_ADAM_M, DTYPE_F32, u, state_bytes);
            b->adam_v[u] = persistent(b, CATEGORY_ADAM_V, DTYPE_F32, u, state_bytes);
        }
    }
}

static int carried_new(struct builder *b, enum category category, enum dtype dtype, int unit,
                       size_t bytes)
{
    int i = builder_buffer(b, category, dtype, unit, -1, bytes);
    if (b->st == ST_OK)
        b->p->buffers[i].carried = true;
    return i;
}

/* Every program of the run lists them at the same place. */
void builder_list_carried(struct builder *b)
{
    const struct program_spec *spec = b->spec;
    for (int u = 0; b->late && u < spec->unit_count; u++)
        if (!spec->units[u].frozen)
            b->carried[u] = carried_new(b, CATEGORY_GRADIENTS, DTYPE_F32, u,
                                        b->state_sharded ? builder_shard_bytes(b, u, DTYPE_F32)
                                                         : builder_whole_bytes(b, u, DTYPE_F32));
    for (int g = 0; g < b->carried_count; g++) {
        int unit = b->groups[g].unit;
        b->groups[g].buffer = carried_new(b, CATEGORY_IN_FLIGHT, spec->param_dtype, unit,
                                          builder_whole_bytes(b, unit, spec->param_dtype));
    }
}

/* ---- arrays ---- */

static enum status take_ints(struct builder *b, int **out, int count)
{
    TRY(pool_take(&b->pool, out, sizeof **out * (size_t)count));
    for (int i = 0; i < count; i++)
        (*out)[i] = BUFFER_NONE;
    return ST_OK;
}

enum status builder_init(struct builder *b, int max_items)
{
    const int U = b->spec->unit_count;
    int **per_unit[] = {&b->param,       &b->shard, &b->master,     &b->adam_m,
                        &b->adam_v,      &b->grad,  &b->grad_shard, &b->carried,
                        &b->last_writer, &b->saved, &b->reduced};
    for (size_t i = 0; i < sizeof per_unit / sizeof *per_unit; i++)
        TRY(take_ints(b, per_unit[i], U));
    TRY(take_ints(b, &b->act, b->spec->slot_count));
    TRY(take_ints(b, &b->dact, b->spec->slot_count));
    TRY(take_ints(b, &b->rows, b->spec->slot_count));
    TRY(pool_take(&b->pool, &b->grad_begun, sizeof *b->grad_begun * (size_t)U));
    TRY(pool_take(&b->pool, &b->groups, sizeof *b->groups * 2 * (size_t)(max_items + 1)));
    /* BACKWARD runs from the last unit to the first, so the lowest writer is the last one. */
    for (int u = 0; u < U; u++)
        b->last_writer[u] = u;
    for (int u = U - 1; u >= 0; u--) {
        int tied = b->spec->units[u].tied;
        if (tied >= 0 && u < b->last_writer[tied])
            b->last_writer[tied] = u;
    }
    return ST_OK;
}

/* Groups of the step program decide what is carried, in whatever program is built. */
void builder_count_carried(struct builder *b, struct item *items)
{
    if (b->late || b->spec->prefetch == 0)
        return;
    enum program_kind kind = b->p->kind;
    b->p->kind = PROGRAM_STEP;
    builder_list_groups(b, items, builder_list_items(b, items));
    b->p->kind = kind;
    b->carried_count = b->spec->prefetch < b->group_count ? b->spec->prefetch : b->group_count;
    /* A unit that a later group gathers again within the carried ones would need two buffers. */
    for (int g = 1; g < b->carried_count; g++)
        for (int h = 0; h < g; h++)
            if (b->groups[h].unit == b->groups[g].unit) {
                b->carried_count = g;
                return;
            }
}
