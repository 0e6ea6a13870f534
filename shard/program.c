#include "shard/program.h"

#include <string.h>

#include "shard/program_builder.h"

/* ---- live intervals ---- */

/* BACKWARD of a look-up table: it takes a moment, and nothing hides behind it. */
static bool is_brief(const struct instr *in)
{
    return in->op == OP_BACKWARD && program_operand(in, ROLE_PARAM) == NULL;
}

/*
 * The last instruction of the life of a buffer that @last is the last to touch. Where that is a
 * REDUCE, the life goes on until the next BACKWARD has ended, and the brief ones behind it: else
 * that one would take the memory for its own gradient and wait for the REDUCE, which so would hide
 * behind nothing. In the next micro-batch it is half of FORWARD, which needs less memory than what
 * follows. For a REDUCE of rows all wait anyway.
 */
static int hold(const struct program *p, int last, int middle_unit)
{
    if (p->instrs[last].op != OP_REDUCE || p->instrs[last].flags & FLAG_ROWS)
        return last;
    int end = last;
    for (int i = last + 1; i < p->instr_count; i++) {
        const struct instr *in = &p->instrs[i];
        if (in->op == OP_FORWARD && in->unit == middle_unit)
            return end > last ? end : i;
        if (in->op != OP_BACKWARD)
            continue;
        if (end > last && !is_brief(in))
            break;
        end = i;
    }
    return end;
}

static void find_intervals(struct program *p, int unit_count)
{
    int last = p->instr_count - 1;
    for (int i = 0; i < p->instr_count; i++) {
        for (int k = 0; k < p->instrs[i].operand_count; k++) {
            struct buffer *buf = &p->buffers[p->instrs[i].operands[k].buffer];
            /* A carried buffer's life begins anew where it is overwritten for the next turn. */
            bool refilled = buf->carried && buf->first >= 0;
            bool refills = buf->carried && p->instrs[i].operands[k].access == ACCESS_WRITE;
            if (buf->first < 0 && (refills || !buf->carried))
                buf->first = i;
            if (!refills && !refilled)
                buf->last = i;
        }
    }
    for (int i = 0; i < p->buffer_count; i++) {
        struct buffer *buf = &p->buffers[i];
        if (buf->persistent) {
            buf->first = 0;
            buf->last = last;
        } else if (buf->carried && p->kind == PROGRAM_PROLOGUE) {
            buf->last = last;
        } else if (buf->carried && p->kind == PROGRAM_FLUSH && buf->last >= 0) {
            buf->first = 0; /* and they all end behind the program */
            buf->last = last;
        } else if (!buf->carried && buf->first >= 0) {
            buf->last = hold(p, buf->last, unit_count / 2);
        }
    }
}

/* ---- checks ---- */

/* What the chain of units must be for its buffers to be these. */
static enum status check_unit(const struct program_spec *spec, int unit)
{
    const struct program_unit *u = &spec->units[unit];
    bool last = unit == spec->unit_count - 1, in_place = u->act_in == u->act_out;
    if (u->shard_numel < 1 || u->shard_numel > INT64_MAX / 16 / spec->world_size)
        return FAIL(INVALID, "unit %d: shards of %lld elements on %d ranks", unit,
                    (long long)u->shard_numel, spec->world_size);
    if (u->act_in < -1 || u->act_in >= spec->slot_count || u->act_out < 0 ||
        u->act_out >= spec->slot_count || (last && u->act_out != spec->slot_count - 1))
        return FAIL(INVALID, "unit %d: slots %d to %d of %d", unit, u->act_in, u->act_out,
                    spec->slot_count);
    if (u->tied < -1 || u->tied >= spec->unit_count || u->tied == unit)
        return FAIL(INVALID, "unit %d is tied to unit %d", unit, u->tied);
    if ((u->backward_reads_input && u->act_in < 0) || (u->recompute && in_place))
        return FAIL(INVALID, "unit %d has no input to keep", unit);
    if (u->by_rows && ((u->act_in >= 0 && !in_place) || u->tied >= 0 || u->backward_reads_params ||
                       u->recompute || last))
        return FAIL(INVALID, "unit %d is moved by rows, and no look-up table", unit);
    if (u->tied >= 0 && spec->units[u->tied].by_rows)
        return FAIL(INVALID, "unit %d is tied to unit %d, which is moved by rows", unit, u->tied);
    for (int v = 0; v < unit; v++)
        if (spec->units[v].act_out == u->act_out && spec->units[v].by_rows != u->by_rows)
            return FAIL(INVALID, "units %d and %d write slot %d, one of them by rows", v, unit,
                        u->act_out);
    /* The gradient of a slot is written once, by the one unit that reads it. */
    for (int v = 0; v < unit && !in_place && u->act_in >= 0; v++)
        if (spec->units[v].act_in == u->act_in && spec->units[v].act_out != u->act_in)
            return FAIL(INVALID, "units %d and %d both read slot %d", v, unit, u->act_in);
    return ST_OK;
}

static enum status check_spec(const struct program_spec *spec)
{
    if (spec->zero_stage < 0 || spec->zero_stage > 3)
        return FAIL(INVALID, "zero stage %d: expected 0 to 3", spec->zero_stage);
    if (spec->world_size < 1 || spec->micro_batches < 1 || spec->prefetch < 0 ||
        spec->unit_count < 1)
        return FAIL(INVALID, "world size %d, micro-batches %d, prefetch %d, units %d",
                    spec->world_size, spec->micro_batches, spec->prefetch, spec->unit_count);
    if (spec->zero_stage >= 2 && spec->reduce == REDUCE_PER_STEP)
        return FAIL(INVALID,
                    "reducing once a step at zero stage %d would hold full gradients; use "
                    "per_micro_batch",
                    spec->zero_stage);
    for (int u = 0; u < spec->unit_count; u++)
        TRY(check_unit(spec, u));
    return ST_OK;
}

enum reduce_policy program_reduce_policy(enum reduce_policy policy, int zero_stage)
{
    if (policy != REDUCE_AUTO)
        return policy;
    return zero_stage >= 2 ? REDUCE_PER_MICRO_BATCH : REDUCE_PER_STEP;
}

/* ---- building ---- */

enum status program_build(struct program *p, enum program_kind kind,
                          const struct program_spec *spec)
{
    TRY(check_spec(spec));
    program_release(p);
    p->kind = kind;
    struct builder b = {
        .p = p,
        .spec = spec,
        .state_sharded = spec->zero_stage >= 1,
        .late = spec->update != UPDATE_EARLY,
        .per_micro_batch =
            program_reduce_policy(spec->reduce, spec->zero_stage) == REDUCE_PER_MICRO_BATCH,
    };
    enum status st = ST_OK;
    int max_items = 3 * spec->unit_count * spec->micro_batches;
    struct item *items = NULL;
    TRY_GOTO(st, out, pool_take(&b.pool, &items, sizeof *items * (size_t)(max_items + 1)));
    TRY_GOTO(st, out, builder_init(&b, max_items));
    builder_list_shared(&b);
    builder_count_carried(&b, items);
    builder_list_carried(&b);
    p->shared_count = p->buffer_count;
    int count = builder_list_items(&b, items);
    if (kind == PROGRAM_EVALUATE) {
        b.group_count = b.carried_count = b.next_gather = 0;
        builder_list_groups(&b, items, count);
        builder_evaluate(&b, items, count);
    } else if (kind == PROGRAM_STEP) {
        if (b.group_count == 0)
            builder_list_groups(&b, items, count);
        builder_step(&b, items, count);
    } else if (kind == PROGRAM_PROLOGUE) {
        builder_prologue(&b);
    } else {
        builder_flush(&b);
    }
    TRY_GOTO(st, out, b.st);
    find_intervals(p, spec->unit_count);
    TRY_GOTO(st, out, program_link(p, false));
out:
    pool_release(&b.pool);
    if (st != ST_OK)
        program_release(p);
    return st;
}

void program_release(struct program *p)
{
    mem_free(&p->instrs);
    mem_free(&p->buffers);
    memset(p, 0, sizeof *p);
}

const struct operand *program_operand(const struct instr *in, enum role role)
{
    for (int k = 0; k < in->operand_count; k++)
        if (in->operands[k].role == role)
            return &in->operands[k];
    return NULL;
}

const struct operand *program_whole(const struct instr *in)
{
    enum role role = ROLE_PARAM;
    if (in->flags & FLAG_ROWS)
        role = ROLE_ROWS;
    else if (in->op == OP_REDUCE || in->flags & FLAG_GRADIENT)
        role = ROLE_GRAD;
    else if (in->op == OP_AGREE)
        role = ROLE_REPORTS;
    else if (in->op == OP_COLLECT)
        role = ROLE_COLLECTED;
    return program_operand(in, role);
}
