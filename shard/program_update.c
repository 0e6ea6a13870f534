#include "shard/program_builder.h"

/* Where this rank's reduced gradient of a unit lies. */
static void add_reduced(struct builder *b, struct instr *in, int unit)
{
    if (b->spec->zero_stage == 0)
        operand_add_slice(in, ROLE_GRAD_SHARD, ACCESS_READ, b->grad[unit], true);
    else
        operand_add(in, ROLE_GRAD_SHARD, ACCESS_READ, b->grad_shard[unit]);
}

static void emit_update(struct builder *b, int unit)
{
    const struct program_spec *spec = b->spec;
    bool replicated_state = !b->state_sharded;
    struct instr *in = builder_emit(b, OP_UPDATE, ON_COMPUTE, unit, -1, 0);
    if (replicated_state)
        operand_add(in, ROLE_GRAD, ACCESS_READ, b->grad[unit]);
    else
        add_reduced(b, in, unit);
    if (b->params_sharded)
        operand_add(in, ROLE_SHARD, ACCESS_READ_WRITE, b->shard[unit]);
    else
        operand_add_slice(in, ROLE_SHARD, ACCESS_READ_WRITE, b->param[unit], b->state_sharded);
    operand_add(in, ROLE_MASTER, ACCESS_READ_WRITE, b->master[unit]);
    operand_add(in, ROLE_ADAM_M, ACCESS_READ_WRITE, b->adam_m[unit]);
    operand_add(in, ROLE_ADAM_V, ACCESS_READ_WRITE, b->adam_v[unit]);
    operand_add(in, ROLE_STATE, ACCESS_READ, b->state);
    if (spec->zero_stage == 1 || spec->zero_stage == 2) {
        in = builder_emit(b, OP_GATHER, ON_GATHER, unit, -1, 0);
        operand_add_slice(in, ROLE_SHARD, ACCESS_READ, b->param[unit], true);
        operand_add(in, ROLE_PARAM, ACCESS_READ_WRITE, b->param[unit]);
    }
}

/* Gather ahead for the next turn, if the unit is one of the first that it uses. */
void builder_gather_carried(struct builder *b, int unit)
{
    for (int g = 0; g < b->carried_count; g++)
        if (b->groups[g].unit == unit)
            builder_gather(b, unit, b->groups[g].buffer);
}

/* A trained unit has its turn in the optimizer step; a frozen one none. */
void builder_optimizer(struct builder *b)
{
    const int U = b->spec->unit_count;
    for (int u = U - 1; u >= 0; u--) {
        if (b->spec->units[u].frozen)
            continue;
        struct instr *in = builder_emit(b, OP_NORM, ON_COMPUTE, u, -1, 0);
        add_reduced(b, in, u);
        operand_add(in, ROLE_REPORT, ACCESS_READ_WRITE, b->report);
        operand_add(in, ROLE_WORKSPACE, ACCESS_READ_WRITE, b->workspace);
    }
    struct instr *in = builder_emit(b, OP_AGREE, ON_COMPUTE, -1, -1, 0);
    operand_add(in, ROLE_REPORT, ACCESS_READ, b->report);
    operand_add(in, ROLE_REPORTS, ACCESS_WRITE, b->reports);
    operand_add(in, ROLE_STATE, ACCESS_READ_WRITE, b->state);
    for (int u = 0; u < U; u++) {
        if (!b->spec->units[u].frozen)
            emit_update(b, u);
        builder_gather_carried(b, u);
    }
}
