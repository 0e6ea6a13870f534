#include "shard/program_builder.h"

/* ---- parameters ---- */

void builder_gather(struct builder *b, int unit, int buffer)
{
    struct instr *in = builder_emit(b, OP_GATHER, ON_GATHER, unit, -1, 0);
    operand_add(in, ROLE_SHARD, ACCESS_READ, b->shard[unit]);
    operand_add(in, ROLE_PARAM, ACCESS_WRITE, buffer);
}

/* GATHER the groups up to @through, which is `prefetch` ahead of the one in use. */
static void gather_through(struct builder *b, int through)
{
    for (; b->next_gather <= through && b->next_gather < b->group_count; b->next_gather++) {
        struct gather_group *g = &b->groups[b->next_gather];
        if (b->p->kind == PROGRAM_STEP)
            builder_update_through(b, g->unit);
        g->buffer = builder_buffer(b, CATEGORY_IN_FLIGHT, b->spec->param_dtype, g->unit, -1,
                                   builder_whole_bytes(b, g->unit, b->spec->param_dtype));
        builder_gather(b, g->unit, g->buffer);
    }
}

/* Before item @index: update and gather ahead, and point param[] at the buffers that it reads. */
static void enter_item(struct builder *b, int index, int unit)
{
    const struct gather_group *groups = b->groups; /* in the order of their first items */
    while (b->first_group < b->group_count && groups[b->first_group].last_item < index)
        b->first_group++;
    int begun = b->first_group;
    while (begun < b->group_count && groups[begun].first_item <= index)
        begun++;
    gather_through(b, begun - 1 + b->spec->prefetch);
    for (int g = b->first_group; g < begun; g++)
        if (index <= groups[g].last_item)
            b->param[groups[g].unit] = groups[g].buffer;
    if (b->p->kind == PROGRAM_STEP) { /* of what is not gathered where it is used */
        builder_update_through(b, unit + b->spec->prefetch);
        builder_update_through(b, b->spec->units[unit].tied);
    }
}

static const struct micro_bytes *bytes_of(const struct builder *b)
{
    return b->p->kind == PROGRAM_EVALUATE ? &b->spec->evaluate : &b->spec->train;
}

static void add_params(struct builder *b, struct instr *in, int unit)
{
    int tied = b->spec->units[unit].tied;
    operand_add(in, ROLE_PARAM, ACCESS_READ, b->param[unit]);
    if (tied >= 0)
        operand_add(in, ROLE_PARAM_TIED, ACCESS_READ, b->param[tied]);
}

static void add_scratch(struct builder *b, struct instr *in, int unit, int micro_batch,
                        size_t bytes)
{
    if (bytes > 0)
        operand_add(in, ROLE_SCRATCH, ACCESS_WRITE,
                    builder_buffer(b, CATEGORY_WORKSPACE, DTYPE_F32, unit, micro_batch, bytes));
    operand_add(in, ROLE_WORKSPACE, ACCESS_READ_WRITE, b->workspace);
    operand_add(in, ROLE_BATCH, ACCESS_READ, b->batch);
    operand_add(in, ROLE_STATE, ACCESS_READ, b->state);
}

/* FORWARD of a part of a table in this rank's shard, for all ranks' rows. */
static void add_rows(struct builder *b, struct instr *in, int slot)
{
    bool begun = b->rows[slot] != BUFFER_NONE;
    if (!begun)
        b->rows[slot] =
            builder_buffer(b, CATEGORY_IN_FLIGHT, b->spec->param_dtype, in->unit, in->micro_batch,
                           b->spec->train.slots[slot] * (size_t)b->spec->world_size);
    operand_add(in, ROLE_SHARD, ACCESS_READ, b->shard[in->unit]);
    operand_add(in, ROLE_ROWS, begun ? ACCESS_READ_WRITE : ACCESS_WRITE, b->rows[slot]);
}

/* Behind the last part: each rank's own rows. Not on the gather stream, where this would wait for
 * the GATHERs of parameters. */
static void reduce_rows(struct builder *b, struct item it)
{
    const struct program_spec *spec = b->spec;
    int slot = spec->units[it.unit].act_out;
    if (it.unit + 1 < spec->unit_count && spec->units[it.unit + 1].act_out == slot)
        return;
    b->act[slot] = builder_buffer(b, CATEGORY_ACTIVATIONS, DTYPE_F32, it.unit, it.micro_batch,
                                  spec->train.slots[slot]);
    struct instr *in = builder_emit(b, OP_REDUCE, ON_REDUCE, it.unit, it.micro_batch, FLAG_ROWS);
    operand_add(in, ROLE_ROWS, ACCESS_READ, b->rows[slot]);
    operand_add(in, ROLE_ACT_OUT, ACCESS_WRITE, b->act[slot]);
}

static void emit_forward(struct builder *b, struct item it)
{
    const struct program_spec *spec = b->spec;
    const struct program_unit *u = &spec->units[it.unit];
    const struct micro_bytes *bytes = bytes_of(b);
    bool head = it.unit == spec->unit_count - 1, again = it.op == OP_RECOMPUTE;
    bool rows = builder_looks_up_rows(b, it.unit);
    /* A recomputed block's first FORWARD keeps nothing; its saved buffer ends there. */
    if (bytes->units[it.unit].saved > 0)
        b->saved[it.unit] = builder_buffer(b, CATEGORY_ACTIVATIONS, DTYPE_F32, it.unit,
                                           it.micro_batch, bytes->units[it.unit].saved);
    /* The next unit has done with the output: RECOMPUTE leaves it out. */
    bool in_place = u->act_in == u->act_out && b->act[u->act_out] != BUFFER_NONE;
    if (!in_place && !again && !rows)
        b->act[u->act_out] = builder_buffer(b, CATEGORY_ACTIVATIONS, DTYPE_F32, it.unit,
                                            it.micro_batch, bytes->slots[u->act_out]);
    struct instr *in = builder_emit(b, it.op, ON_COMPUTE, it.unit, it.micro_batch,
                                    b->p->kind == PROGRAM_STEP ? FLAG_TRAINING : 0);
    if (rows)
        add_rows(b, in, u->act_out);
    else
        add_params(b, in, it.unit);
    if (u->act_in >= 0 && u->act_in != u->act_out)
        operand_add(in, ROLE_ACT_IN, ACCESS_READ, b->act[u->act_in]);
    if (!again && !rows)
        operand_add(in, ROLE_ACT_OUT, in_place ? ACCESS_READ_WRITE : ACCESS_WRITE,
                    b->act[u->act_out]);
    operand_add(in, ROLE_SAVED, ACCESS_WRITE, b->saved[it.unit]);
    add_scratch(b, in, it.unit, it.micro_batch, bytes->units[it.unit].forward_scratch);
    if (head)
        operand_add(in, ROLE_REPORT, ACCESS_READ_WRITE, b->report);
    if (rows)
        reduce_rows(b, it);
}

/* Where a unit by rows has its reduced gradient, and whether BACKWARD adds to it. */
static unsigned begin_reduced(struct builder *b, int unit)
{
    bool whole = b->spec->zero_stage == 0;
    int *grad = whole ? &b->grad[unit] : &b->grad_shard[unit];
    if (*grad != BUFFER_NONE)
        return FLAG_ADD;
    *grad = b->carried[unit];
    if (!b->late)
        *grad = builder_buffer(b, CATEGORY_GRADIENTS, DTYPE_F32, unit, -1,
                               whole ? builder_whole_bytes(b, unit, DTYPE_F32)
                                     : builder_shard_bytes(b, unit, DTYPE_F32));
    return 0;
}

/* The gradient buffer that a BACKWARD of @unit writes, and whether it adds. */
static unsigned begin_grad(struct builder *b, int unit, int micro_batch, unsigned add_flag)
{
    if (b->spec->units[unit].frozen)
        return 0;
    if (b->spec->units[unit].by_rows)
        return begin_reduced(b, unit);
    if (b->grad_begun[unit])
        return add_flag;
    b->grad_begun[unit] = true;
    if (b->late && b->spec->zero_stage == 0 && !builder_accumulates_shards(b)) {
        b->grad[unit] = b->carried[unit];
        return 0;
    }
    bool partitioned = b->spec->zero_stage >= 2;
    b->grad[unit] = builder_buffer(b, partitioned ? CATEGORY_IN_FLIGHT : CATEGORY_GRADIENTS,
                                   DTYPE_F32, unit, b->per_micro_batch ? micro_batch : -1,
                                   builder_whole_bytes(b, unit, DTYPE_F32));
    return 0;
}

/* What a BACKWARD writes: whole gradients of this rank's rows, or its part of the reduced one. */
static void add_grads(struct builder *b, struct instr *in, int unit)
{
    const struct program_unit *u = &b->spec->units[unit];
    bool reduced = u->by_rows && b->spec->zero_stage > 0;
    if (!u->frozen)
        operand_add(in, reduced ? ROLE_GRAD_SHARD : ROLE_GRAD,
                    in->flags & FLAG_ADD ? ACCESS_READ_WRITE : ACCESS_WRITE,
                    reduced ? b->grad_shard[unit] : b->grad[unit]);
    if (u->tied >= 0 && !b->spec->units[u->tied].frozen)
        operand_add(in, ROLE_GRAD_TIED,
                    in->flags & FLAG_ADD_TIED ? ACCESS_READ_WRITE : ACCESS_WRITE, b->grad[u->tied]);
}

static void emit_backward(struct builder *b, struct item it)
{
    const struct program_spec *spec = b->spec;
    const struct program_unit *u = &spec->units[it.unit];
    const struct micro_bytes *bytes = bytes_of(b);
    bool head = it.unit == spec->unit_count - 1;
    unsigned flags = begin_grad(b, it.unit, it.micro_batch, FLAG_ADD);
    if (u->tied >= 0)
        flags |= begin_grad(b, u->tied, it.micro_batch, FLAG_ADD_TIED);
    bool in_place = u->act_in == u->act_out;
    if (u->act_in >= 0 && !in_place)
        b->dact[u->act_in] = builder_buffer(b, CATEGORY_ACTIVATIONS, DTYPE_F32, it.unit,
                                            it.micro_batch, bytes->slots[u->act_in]);
    struct instr *in = builder_emit(b, OP_BACKWARD, ON_COMPUTE, it.unit, it.micro_batch, flags);
    if (u->backward_reads_params)
        add_params(b, in, it.unit);
    add_grads(b, in, it.unit);
    if (u->backward_reads_input)
        operand_add(in, ROLE_ACT_IN, ACCESS_READ, b->act[u->act_in]);
    if (u->by_rows)
        operand_add(in, ROLE_ROWS, ACCESS_READ, b->rows[u->act_out]);
    else if (!head)
        operand_add(in, ROLE_DACT_OUT, ACCESS_READ, b->dact[u->act_out]);
    if (u->act_in >= 0 && !in_place)
        operand_add(in, ROLE_DACT_IN, ACCESS_WRITE, b->dact[u->act_in]);
    operand_add(in, ROLE_SAVED, ACCESS_READ_WRITE, b->saved[it.unit]);
    add_scratch(b, in, it.unit, it.micro_batch, bytes->units[it.unit].backward_scratch);
}

/* Behind the BACKWARD that wrote the gradient of a slot: GATHER its rows, if tables are waiting for
 * them. Not on the reduce stream, where it would wait for the last block's REDUCE.
 * Return: has it. */
static bool gather_rows(struct builder *b, struct item it)
{
    const struct program_spec *spec = b->spec;
    int slot = spec->units[it.unit].act_in, table = it.unit - 1;
    if (slot < 0 || slot == spec->units[it.unit].act_out)
        return false;
    while (table >= 0 && (!spec->units[table].by_rows || spec->units[table].frozen ||
                          spec->units[table].act_out != slot))
        table--;
    if (table < 0)
        return false;
    b->rows[slot] = builder_buffer(b, CATEGORY_IN_FLIGHT, spec->param_dtype, table, it.micro_batch,
                                   spec->train.slots[slot] * (size_t)spec->world_size);
    struct instr *in = builder_emit(b, OP_GATHER, ON_GATHER, table, it.micro_batch, FLAG_ROWS);
    operand_add(in, ROLE_DACT_OUT, ACCESS_READ, b->dact[slot]);
    operand_add(in, ROLE_ROWS, ACCESS_WRITE, b->rows[slot]);
    return true;
}

/* A shard temporary that waits to be added to the shard of earlier micro-batches. */
struct pending_sum {
    int unit, temp, micro_batch;
};

static void emit_accumulate(struct builder *b, struct pending_sum *pending)
{
    if (pending->unit < 0)
        return;
    struct instr *in =
        builder_emit(b, OP_ACCUMULATE, ON_REDUCE, pending->unit, pending->micro_batch, FLAG_ADD);
    operand_add(in, ROLE_REDUCED, ACCESS_READ, pending->temp);
    operand_add(in, ROLE_GRAD_SHARD, ACCESS_READ_WRITE, b->grad_shard[pending->unit]);
    pending->unit = -1;
}

/* Of a unit by rows, behind its last BACKWARD: what emit_reduce() does beside the REDUCE. */
static void note_reduced(struct builder *b, int unit, struct pending_sum *pending)
{
    emit_accumulate(b, pending);
    builder_norms(b);
    b->reduced[b->reduced_count++] = unit;
}

/* @stream: ON_REDUCE; or another on which less is under way. */
static void emit_reduce(struct builder *b, int unit, int micro_batch, int stream,
                        struct pending_sum *pending)
{
    const struct program_spec *spec = b->spec;
    bool last = micro_batch == spec->micro_batches - 1;
    bool whole = spec->zero_stage == 0;
    int temp = BUFFER_NONE;
    bool first = b->grad_shard[unit] == BUFFER_NONE;
    /* One REDUCE a step at stage 0: into this rank's slice of the gradient itself. */
    bool in_place = whole && !builder_accumulates_shards(b);
    if (first && !whole && b->late)
        b->grad_shard[unit] = b->carried[unit];
    else if (first && !in_place)
        b->grad_shard[unit] = builder_buffer(b, CATEGORY_GRADIENTS, DTYPE_F32, unit, -1,
                                             builder_shard_bytes(b, unit, DTYPE_F32));
    if (!first)
        temp = builder_buffer(b, CATEGORY_IN_FLIGHT, DTYPE_F32, unit, micro_batch,
                              builder_shard_bytes(b, unit, DTYPE_F32));
    /* The sum of the REDUCE before is added only now, a BACKWARD later, so that nobody waits for it
     * early; and before the next REDUCE, so that who waits for an ACCUMULATE has all before it. */
    emit_accumulate(b, pending);
    builder_norms(b);
    struct instr *in = builder_emit(b, OP_REDUCE, stream, unit, micro_batch, 0);
    operand_add(in, ROLE_GRAD, in_place ? ACCESS_READ_WRITE : ACCESS_READ, b->grad[unit]);
    operand_add_slice(in, ROLE_REDUCED, ACCESS_WRITE,
                      in_place ? b->grad[unit] : (first ? b->grad_shard[unit] : temp), in_place);
    if (!first)
        *pending = (struct pending_sum){unit, temp, micro_batch};
    if (last)
        b->reduced[b->reduced_count++] = unit;
    if (!whole || !last || builder_gathers_late(b))
        return;
    if (!in_place) {
        emit_accumulate(b, pending);
        b->grad[unit] = b->late ? b->carried[unit]
                                : builder_buffer(b, CATEGORY_GRADIENTS, DTYPE_F32, unit, -1,
                                                 builder_whole_bytes(b, unit, DTYPE_F32));
    }
    builder_gather_gradient(b, unit, stream, b->grad[unit],
                            in_place ? BUFFER_NONE : b->grad_shard[unit]);
}

/* With several micro-batches a step is captured in pieces: one a micro-batch, and the optimizer
 * where updates are early. */
static void emit_cut(struct builder *b)
{
    if (b->spec->micro_batches > 1)
        builder_emit(b, OP_CUT, ON_COMPUTE, -1, -1, 0);
}

void builder_step(struct builder *b, const struct item *items, int count)
{
    const struct program_spec *spec = b->spec;
    struct pending_sum pending = {.unit = -1};
    struct instr *in = builder_emit(b, OP_BEGIN, ON_COMPUTE, -1, -1, 0);
    operand_add(in, ROLE_REPORT, ACCESS_WRITE, b->report);
    /* The part of the state that it writes is not the one that UPDATE reads, which waits for AGREE
     * alone; all others that read it follow on the same stream. */
    operand_add(in, ROLE_STATE, ACCESS_READ, b->state);
    operand_add(in, ROLE_BATCH, ACCESS_WRITE, b->batch);
    b->next_gather = b->carried_count;
    for (int i = 0; i < count; i++) {
        struct item it = items[i];
        if (it.op == OP_FORWARD && it.unit == 0 && it.micro_batch > 0)
            emit_cut(b);
        if (it.op == OP_FORWARD && it.unit == 0)
            for (int s = 0; s < spec->slot_count; s++)
                b->act[s] = b->dact[s] = b->rows[s] = BUFFER_NONE;
        enter_item(b, i, it.unit);
        if (it.op != OP_BACKWARD) {
            emit_forward(b, it);
            continue;
        }
        emit_backward(b, it);
        /* Behind its rows, too, a unit is reduced sooner than behind the last block. */
        int stream = gather_rows(b, it) ? ON_GATHER : ON_REDUCE;
        if (spec->units[it.unit].by_rows && !spec->units[it.unit].frozen &&
            it.micro_batch == spec->micro_batches - 1)
            note_reduced(b, it.unit, &pending);
        bool reduces = b->per_micro_batch || it.micro_batch == spec->micro_batches - 1;
        for (int u = spec->unit_count - 1; reduces && u >= 0; u--) {
            if (spec->units[u].frozen || spec->units[u].by_rows || b->last_writer[u] != it.unit)
                continue;
            emit_reduce(b, u, it.micro_batch, stream, &pending);
            b->grad_begun[u] = false;
        }
    }
    emit_accumulate(b, &pending);
    builder_norms(b);
    if (!b->late)
        emit_cut(b);
    builder_agree(b);
}

void builder_evaluate(struct builder *b, const struct item *items, int count)
{
    const struct program_spec *spec = b->spec;
    struct instr *in = builder_emit(b, OP_BEGIN, ON_COMPUTE, -1, -1, 0);
    operand_add(in, ROLE_REPORT, ACCESS_WRITE, b->report);
    operand_add(in, ROLE_STATE, ACCESS_READ, b->state);
    for (int s = 0; s < spec->slot_count; s++)
        b->act[s] = BUFFER_NONE;
    for (int i = 0; i < count; i++) {
        enter_item(b, i, items[i].unit);
        emit_forward(b, items[i]);
    }
    size_t logits = spec->evaluate.slots[spec->slot_count - 1];
    int collected =
        builder_buffer(b, CATEGORY_WORKSPACE, DTYPE_F32, -1, 0,
                       (size_t)round_up((int64_t)logits, ARENA_ALIGN) * (size_t)spec->world_size);
    in = builder_emit(b, OP_COLLECT, ON_GATHER, -1, 0, 0);
    operand_add(in, ROLE_ACT_OUT, ACCESS_READ, b->act[spec->slot_count - 1]);
    operand_add(in, ROLE_COLLECTED, ACCESS_WRITE, collected);
    operand_add(in, ROLE_REPORT, ACCESS_READ, b->report);
    operand_add(in, ROLE_REPORTS, ACCESS_WRITE, b->reports);
}
