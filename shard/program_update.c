#include "shard/program_builder.h"

/* Where this rank's reduced gradient of a unit lies. */
static void add_reduced(struct builder *b, struct instr *in, int unit)
{
    if (b->spec->zero_stage == 0)
        operand_add_slice(in, ROLE_GRAD_SHARD, ACCESS_READ, b->grad[unit], true);
    else
        operand_add(in, ROLE_GRAD_SHARD, ACCESS_READ, b->grad_shard[unit]);
}

void builder_norms(struct builder *b)
{
    for (; b->normed_count < b->reduced_count; b->normed_count++) {
        int unit = b->reduced[b->normed_count];
        struct instr *in = builder_emit(b, OP_NORM, ON_UPDATE, unit, -1, 0);
        add_reduced(b, in, unit);
        operand_add(in, ROLE_REPORT, ACCESS_READ_WRITE, b->report);
        operand_add(in, ROLE_WORKSPACE, ACCESS_READ_WRITE, b->update_workspace);
    }
}

/* @grad: the reduced gradient, whole at stage 0. */
static void emit_update(struct builder *b, int unit, int grad)
{
    struct instr *in = builder_emit(b, OP_UPDATE, ON_UPDATE, unit, -1, 0);
    operand_add(in, b->state_sharded ? ROLE_GRAD_SHARD : ROLE_GRAD, ACCESS_READ, grad);
    if (builder_is_partitioned(b, unit))
        operand_add(in, ROLE_SHARD, ACCESS_READ_WRITE, b->shard[unit]);
    else
        operand_add_slice(in, ROLE_SHARD, ACCESS_READ_WRITE, b->param[unit], b->state_sharded);
    operand_add(in, ROLE_MASTER, ACCESS_READ_WRITE, b->master[unit]);
    operand_add(in, ROLE_ADAM_M, ACCESS_READ_WRITE, b->adam_m[unit]);
    operand_add(in, ROLE_ADAM_V, ACCESS_READ_WRITE, b->adam_v[unit]);
    operand_add(in, ROLE_STATE, ACCESS_READ, b->state);
    if (b->state_sharded && !builder_is_partitioned(b, unit)) {
        in = builder_emit(b, OP_GATHER, ON_GATHER, unit, -1, 0);
        operand_add_slice(in, ROLE_SHARD, ACCESS_READ, b->param[unit], true);
        operand_add(in, ROLE_PARAM, ACCESS_READ_WRITE, b->param[unit]);
    }
}

void builder_gather_gradient(struct builder *b, int unit, enum program_stream stream, int grad,
                             int shard)
{
    bool in_place = shard == BUFFER_NONE;
    struct instr *in = builder_emit(b, OP_GATHER, stream, unit, -1, FLAG_GRADIENT);
    operand_add_slice(in, ROLE_GRAD_SHARD, ACCESS_READ, in_place ? grad : shard, in_place);
    operand_add(in, ROLE_GRAD, in_place ? ACCESS_READ_WRITE : ACCESS_WRITE, grad);
}

/* At stage 0: backward then has the reductions alone beside it, and forward, which has no other
 * collective, the gathers. One rank has nothing to hide. */
bool builder_gathers_late(const struct builder *b)
{
    return b->late && b->spec->zero_stage == 0 && b->spec->world_size > 1 &&
           !builder_accumulates_shards(b);
}

static void emit_late_update(struct builder *b, int unit)
{
    if (builder_gathers_late(b) && !b->spec->units[unit].by_rows)
        builder_gather_gradient(b, unit, ON_GATHER, b->carried[unit], BUFFER_NONE);
    emit_update(b, unit, b->carried[unit]);
}

void builder_update_through(struct builder *b, int unit)
{
    if (!b->late)
        return;
    for (; b->next_update <= unit && b->next_update < b->spec->unit_count; b->next_update++)
        if (!b->spec->units[b->next_update].frozen)
            emit_late_update(b, b->next_update);
}

/* Gather ahead for the next turn, if the unit is one of the first that it uses. */
static void gather_carried(struct builder *b, int unit)
{
    for (int g = 0; g < b->carried_count; g++)
        if (b->groups[g].unit == unit)
            builder_gather(b, unit, b->groups[g].buffer);
}

void builder_agree(struct builder *b)
{
    struct instr *in = builder_emit(b, OP_AGREE, ON_COMPUTE, -1, -1, 0);
    operand_add(in, ROLE_REPORT, ACCESS_READ, b->report);
    operand_add(in, ROLE_REPORTS, ACCESS_WRITE, b->reports);
    operand_add(in, ROLE_STATE, ACCESS_READ_WRITE, b->state);
    for (int u = 0; !b->late && u < b->spec->unit_count; u++) {
        if (!b->spec->units[u].frozen)
            emit_update(b, u, b->state_sharded ? b->grad_shard[u] : b->grad[u]);
        gather_carried(b, u);
    }
}

/* Late: the first turn begins with updates too, so that all turns are one program. */
void builder_prologue(struct builder *b)
{
    if (b->late)
        operand_add(builder_emit(b, OP_CLEAR, ON_COMPUTE, -1, -1, 0), ROLE_STATE, ACCESS_READ_WRITE,
                    b->state);
    for (int u = 0; u < b->spec->unit_count; u++) {
        if (b->carried[u] != BUFFER_NONE)
            operand_add(builder_emit(b, OP_CLEAR, ON_COMPUTE, u, -1, 0), ROLE_GRAD, ACCESS_WRITE,
                        b->carried[u]);
        gather_carried(b, u);
    }
}

void builder_flush(struct builder *b)
{
    builder_update_through(b, b->spec->unit_count - 1);
}
