#include "shard/program.h"

#include <string.h>

enum { BUFFER_NONE = -1 };

/* Everything a build needs beside the program: where the current buffer of each thing is. */
struct builder {
    struct program *p;
    const struct program_spec *spec;
    bool params_sharded, state_sharded, per_micro_batch;
    enum status st;    /* the first failure; later calls do nothing */
    struct instr sink; /* where operands go after a failure; never read */
    int batch, state, report, reports, workspace;
    struct pool pool;
    /* per unit */
    int *param; /* whole flat parameter, now */
    int *shard; /* stage 3: the persistent shard */
    int *master, *adam_m, *adam_v;
    int *grad;        /* whole flat gradient, now */
    int *grad_shard;  /* reduced gradient of this rank */
    int *last_writer; /* last BACKWARD item of a micro-batch that writes this gradient */
    bool *grad_begun; /* grad has a writer */
    /* per slot, of the current micro-batch */
    int *act, *dact;
    int *saved; /* per unit */
    /* stage 3: uses of gathered parameters */
    struct gather_group *groups;
    int group_count, carried_count;
    int next_gather; /* the group whose GATHER comes next */
};

/* Consecutive uses of one unit's parameters: gathered once, kept from the first to the last. */
struct gather_group {
    int unit, first_item, last_item;
    int buffer;
};

/* One FORWARD, RECOMPUTE or BACKWARD, in program order. */
struct item {
    enum program_op op;
    int unit, micro_batch;
};

static int buffer_new(struct builder *b, enum category category, enum dtype dtype, int unit,
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

static int persistent_new(struct builder *b, enum category category, enum dtype dtype, int unit,
                          size_t bytes)
{
    int i = buffer_new(b, category, dtype, unit, -1, bytes);
    if (b->st == ST_OK)
        b->p->buffers[i].persistent = true;
    return i;
}

static struct instr *emit(struct builder *b, enum program_op op, enum program_stream stream,
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

static void add_slice(struct instr *in, enum role role, enum access access, int buffer, bool slice)
{
    if (buffer == BUFFER_NONE)
        return;
    ASSERT(in->operand_count < INSTR_MAX_OPERANDS);
    in->operands[in->operand_count++] = (struct operand){
        .role = (uint8_t)role, .access = (uint8_t)access, .slice = slice, .buffer = buffer};
}

static void add(struct instr *in, enum role role, enum access access, int buffer)
{
    add_slice(in, role, access, buffer, false);
}

static size_t whole_bytes(const struct builder *b, int unit, enum dtype dtype)
{
    return (size_t)b->spec->units[unit].shard_numel * (size_t)b->spec->world_size *
           dtype_bytes(dtype);
}

static size_t shard_bytes(const struct builder *b, int unit, enum dtype dtype)
{
    return (size_t)b->spec->units[unit].shard_numel * dtype_bytes(dtype);
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

static int list_items(struct builder *b, struct item *out)
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

static void list_gather_groups(struct builder *b, const struct item *items, int count)
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

static void list_shared(struct builder *b)
{
    const struct program_spec *spec = b->spec;
    b->batch =
        persistent_new(b, CATEGORY_BATCH, DTYPE_I32, -1,
                       spec->batch_bytes > spec->evaluate_batch_bytes ? spec->batch_bytes
                                                                      : spec->evaluate_batch_bytes);
    b->state = persistent_new(b, CATEGORY_BATCH, DTYPE_F64, -1, spec->state_bytes);
    b->report = persistent_new(b, CATEGORY_BATCH, DTYPE_F64, -1, spec->report_bytes);
    b->reports = persistent_new(b, CATEGORY_BATCH, DTYPE_F64, -1,
                                spec->report_bytes * (size_t)spec->world_size);
    b->workspace = persistent_new(b, CATEGORY_WORKSPACE, DTYPE_F32, -1, spec->workspace_bytes);
    b->p->staging = BUFFER_NONE;
    if (spec->staging_bytes > 0)
        b->p->staging = persistent_new(b, CATEGORY_WORKSPACE, DTYPE_F32, -1, spec->staging_bytes);
    for (int u = 0; u < spec->unit_count; u++) {
        bool frozen = spec->units[u].frozen;
        if (b->params_sharded)
            b->shard[u] = persistent_new(b, CATEGORY_PARAMETERS, spec->param_dtype, u,
                                         shard_bytes(b, u, spec->param_dtype));
        else
            b->param[u] = persistent_new(b, CATEGORY_PARAMETERS, spec->param_dtype, u,
                                         whole_bytes(b, u, spec->param_dtype));
        size_t state_bytes =
            b->state_sharded ? shard_bytes(b, u, DTYPE_F32) : whole_bytes(b, u, DTYPE_F32);
        if (spec->param_dtype != DTYPE_F32)
            b->master[u] = persistent_new(b, CATEGORY_MASTER, DTYPE_F32, u, state_bytes);
        if (!frozen) {
            b->adam_m[u] = persistent_new(b, CATEGORY_ADAM_M, DTYPE_F32, u, state_bytes);
            b->adam_v[u] = persistent_new(b, CATEGORY_ADAM_V, DTYPE_F32, u, state_bytes);
        }
    }
}

/* The buffers that hold the first gathered units from turn to turn. The step program's groups
 * decide which; every program of the run lists them at the same place. */
static void list_carried(struct builder *b, const struct gather_group *step_groups, int count)
{
    for (int g = 0; g < count; g++) {
        int unit = step_groups[g].unit;
        int i = buffer_new(b, CATEGORY_IN_FLIGHT, b->spec->param_dtype, unit, -1,
                           whole_bytes(b, unit, b->spec->param_dtype));
        if (b->st == ST_OK)
            b->p->buffers[i].carried = true;
        b->groups[g].buffer = i;
    }
}

/* ---- emission ---- */

static void emit_gather(struct builder *b, int unit, int buffer)
{
    struct instr *in = emit(b, OP_GATHER, ON_GATHER, unit, -1, 0);
    add(in, ROLE_SHARD, ACCESS_READ, b->shard[unit]);
    add(in, ROLE_PARAM, ACCESS_WRITE, buffer);
}

/* GATHER the groups up to @through, which is `prefetch` ahead of the one in use. */
static void gather_through(struct builder *b, int through)
{
    for (; b->next_gather <= through && b->next_gather < b->group_count; b->next_gather++) {
        struct gather_group *g = &b->groups[b->next_gather];
        g->buffer = buffer_new(b, CATEGORY_IN_FLIGHT, b->spec->param_dtype, g->unit, -1,
                               whole_bytes(b, g->unit, b->spec->param_dtype));
        emit_gather(b, g->unit, g->buffer);
    }
}

/* Before item @index: gather ahead, and point param[] at the buffers that this item reads. */
static void enter_item(struct builder *b, int index)
{
    if (!b->params_sharded)
        return;
    for (int g = 0; g < b->group_count; g++)
        if (b->groups[g].first_item == index)
            gather_through(b, g + b->spec->prefetch);
    for (int g = 0; g < b->group_count; g++)
        if (b->groups[g].first_item <= index && index <= b->groups[g].last_item)
            b->param[b->groups[g].unit] = b->groups[g].buffer;
}

static const struct micro_bytes *bytes_of(const struct builder *b)
{
    return b->p->kind == PROGRAM_EVALUATE ? &b->spec->evaluate : &b->spec->train;
}

static void add_params(struct builder *b, struct instr *in, int unit)
{
    int tied = b->spec->units[unit].tied;
    add(in, ROLE_PARAM, ACCESS_READ, b->param[unit]);
    if (tied >= 0)
        add(in, ROLE_PARAM_TIED, ACCESS_READ, b->param[tied]);
}

static void add_scratch(struct builder *b, struct instr *in, int unit, int micro_batch,
                        size_t bytes)
{
    if (bytes > 0)
        add(in, ROLE_SCRATCH, ACCESS_WRITE,
            buffer_new(b, CATEGORY_WORKSPACE, DTYPE_F32, unit, micro_batch, bytes));
    add(in, ROLE_WORKSPACE, ACCESS_READ_WRITE, b->workspace);
    add(in, ROLE_BATCH, ACCESS_READ, b->batch);
    add(in, ROLE_STATE, ACCESS_READ, b->state);
}

static void emit_forward(struct builder *b, struct item it)
{
    const struct program_spec *spec = b->spec;
    const struct program_unit *u = &spec->units[it.unit];
    const struct micro_bytes *bytes = bytes_of(b);
    bool head = it.unit == spec->unit_count - 1, again = it.op == OP_RECOMPUTE;
    /* A recomputed block's first FORWARD keeps nothing; its saved buffer ends there. */
    if (bytes->units[it.unit].saved > 0)
        b->saved[it.unit] = buffer_new(b, CATEGORY_ACTIVATIONS, DTYPE_F32, it.unit, it.micro_batch,
                                       bytes->units[it.unit].saved);
    /* The next unit has done with the output: RECOMPUTE leaves it out. */
    bool in_place = u->act_in == u->act_out && b->act[u->act_out] != BUFFER_NONE;
    if (!in_place && !again)
        b->act[u->act_out] = buffer_new(b, CATEGORY_ACTIVATIONS, DTYPE_F32, it.unit, it.micro_batch,
                                        bytes->slots[u->act_out]);
    struct instr *in = emit(b, it.op, ON_COMPUTE, it.unit, it.micro_batch,
                            b->p->kind == PROGRAM_STEP ? FLAG_TRAINING : 0);
    add_params(b, in, it.unit);
    if (u->act_in >= 0 && u->act_in != u->act_out)
        add(in, ROLE_ACT_IN, ACCESS_READ, b->act[u->act_in]);
    if (!again)
        add(in, ROLE_ACT_OUT, in_place ? ACCESS_READ_WRITE : ACCESS_WRITE, b->act[u->act_out]);
    add(in, ROLE_SAVED, ACCESS_WRITE, b->saved[it.unit]);
    add_scratch(b, in, it.unit, it.micro_batch, bytes->units[it.unit].forward_scratch);
    if (head)
        add(in, ROLE_REPORT, ACCESS_READ_WRITE, b->report);
}

/* The gradient buffer that a BACKWARD of @unit writes, and whether it adds. */
static unsigned begin_grad(struct builder *b, int unit, int micro_batch, unsigned add_flag)
{
    if (b->spec->units[unit].frozen)
        return 0;
    if (b->grad_begun[unit])
        return add_flag;
    bool partitioned = b->spec->zero_stage >= 2;
    b->grad[unit] =
        buffer_new(b, partitioned ? CATEGORY_IN_FLIGHT : CATEGORY_GRADIENTS, DTYPE_F32, unit,
                   b->per_micro_batch ? micro_batch : -1, whole_bytes(b, unit, DTYPE_F32));
    b->grad_begun[unit] = true;
    return 0;
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
        b->dact[u->act_in] = buffer_new(b, CATEGORY_ACTIVATIONS, DTYPE_F32, it.unit, it.micro_batch,
                                        bytes->slots[u->act_in]);
    struct instr *in = emit(b, OP_BACKWARD, ON_COMPUTE, it.unit, it.micro_batch, flags);
    if (u->backward_reads_params)
        add_params(b, in, it.unit);
    if (!u->frozen)
        add(in, ROLE_GRAD, flags & FLAG_ADD ? ACCESS_READ_WRITE : ACCESS_WRITE, b->grad[it.unit]);
    if (u->tied >= 0 && !spec->units[u->tied].frozen)
        add(in, ROLE_GRAD_TIED, flags & FLAG_ADD_TIED ? ACCESS_READ_WRITE : ACCESS_WRITE,
            b->grad[u->tied]);
    if (u->backward_reads_input)
        add(in, ROLE_ACT_IN, ACCESS_READ, b->act[u->act_in]);
    if (!head)
        add(in, ROLE_DACT_OUT, ACCESS_READ, b->dact[u->act_out]);
    if (u->act_in >= 0 && !in_place)
        add(in, ROLE_DACT_IN, ACCESS_WRITE, b->dact[u->act_in]);
    add(in, ROLE_SAVED, ACCESS_READ, b->saved[it.unit]);
    add_scratch(b, in, it.unit, it.micro_batch, bytes->units[it.unit].backward_scratch);
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
        emit(b, OP_ACCUMULATE, ON_REDUCE, pending->unit, pending->micro_batch, FLAG_ADD);
    add(in, ROLE_REDUCED, ACCESS_READ, pending->temp);
    add(in, ROLE_GRAD_SHARD, ACCESS_READ_WRITE, b->grad_shard[pending->unit]);
    pending->unit = -1;
}

static void emit_reduce(struct builder *b, int unit, int micro_batch, struct pending_sum *pending)
{
    const struct program_spec *spec = b->spec;
    bool last = micro_batch == spec->micro_batches - 1;
    bool whole = spec->zero_stage == 0;
    bool accumulates = b->per_micro_batch && spec->micro_batches > 1;
    int temp = BUFFER_NONE;
    bool first = b->grad_shard[unit] == BUFFER_NONE;
    /* One REDUCE a step at stage 0: into this rank's slice of the gradient itself. */
    bool in_place = whole && !accumulates;
    if (first && !in_place)
        b->grad_shard[unit] =
            buffer_new(b, CATEGORY_GRADIENTS, DTYPE_F32, unit, -1, shard_bytes(b, unit, DTYPE_F32));
    if (!first)
        temp = buffer_new(b, CATEGORY_IN_FLIGHT, DTYPE_F32, unit, micro_batch,
                          shard_bytes(b, unit, DTYPE_F32));
    /* The sum of the REDUCE before is added only now, a BACKWARD later, so that nobody waits for it
     * early; and before the next REDUCE, so that who waits for an ACCUMULATE has all before it. */
    emit_accumulate(b, pending);
    struct instr *in = emit(b, OP_REDUCE, ON_REDUCE, unit, micro_batch, 0);
    add(in, ROLE_GRAD, in_place ? ACCESS_READ_WRITE : ACCESS_READ, b->grad[unit]);
    add_slice(in, ROLE_REDUCED, ACCESS_WRITE,
              in_place ? b->grad[unit] : (first ? b->grad_shard[unit] : temp), in_place);
    if (!first)
        *pending = (struct pending_sum){unit, temp, micro_batch};
    if (!whole || !last)
        return;
    if (accumulates) {
        emit_accumulate(b, pending);
        b->grad[unit] =
            buffer_new(b, CATEGORY_GRADIENTS, DTYPE_F32, unit, -1, whole_bytes(b, unit, DTYPE_F32));
    }
    in = emit(b, OP_GATHER, ON_REDUCE, unit, -1, FLAG_GRADIENT);
    add_slice(in, ROLE_GRAD_SHARD, ACCESS_READ, in_place ? b->grad[unit] : b->grad_shard[unit],
              in_place);
    add(in, ROLE_GRAD, in_place ? ACCESS_READ_WRITE : ACCESS_WRITE, b->grad[unit]);
}

/* Where this rank's reduced gradient of a unit lies. */
static void add_reduced(struct builder *b, struct instr *in, int unit)
{
    if (b->spec->zero_stage == 0)
        add_slice(in, ROLE_GRAD_SHARD, ACCESS_READ, b->grad[unit], true);
    else
        add(in, ROLE_GRAD_SHARD, ACCESS_READ, b->grad_shard[unit]);
}

static void emit_update(struct builder *b, int unit)
{
    const struct program_spec *spec = b->spec;
    bool replicated_state = !b->state_sharded;
    struct instr *in = emit(b, OP_UPDATE, ON_COMPUTE, unit, -1, 0);
    if (replicated_state)
        add(in, ROLE_GRAD, ACCESS_READ, b->grad[unit]);
    else
        add_reduced(b, in, unit);
    if (b->params_sharded)
        add(in, ROLE_SHARD, ACCESS_READ_WRITE, b->shard[unit]);
    else
        add_slice(in, ROLE_SHARD, ACCESS_READ_WRITE, b->param[unit], b->state_sharded);
    add(in, ROLE_MASTER, ACCESS_READ_WRITE, b->master[unit]);
    add(in, ROLE_ADAM_M, ACCESS_READ_WRITE, b->adam_m[unit]);
    add(in, ROLE_ADAM_V, ACCESS_READ_WRITE, b->adam_v[unit]);
    add(in, ROLE_STATE, ACCESS_READ, b->state);
    if (spec->zero_stage == 1 || spec->zero_stage == 2) {
        in = emit(b, OP_GATHER, ON_GATHER, unit, -1, 0);
        add_slice(in, ROLE_SHARD, ACCESS_READ, b->param[unit], true);
        add(in, ROLE_PARAM, ACCESS_READ_WRITE, b->param[unit]);
    }
}

/* Gather ahead for the next turn, if the unit is one of the first that it uses. */
static void emit_carried(struct builder *b, int unit)
{
    for (int g = 0; g < b->carried_count; g++)
        if (b->groups[g].unit == unit)
            emit_gather(b, unit, b->groups[g].buffer);
}

/* A trained unit has its turn in the optimizer step; a frozen one none. */
static void emit_optimizer(struct builder *b)
{
    const int U = b->spec->unit_count;
    for (int u = U - 1; u >= 0; u--) {
        if (b->spec->units[u].frozen)
            continue;
        struct instr *in = emit(b, OP_NORM, ON_COMPUTE, u, -1, 0);
        add_reduced(b, in, u);
        add(in, ROLE_REPORT, ACCESS_READ_WRITE, b->report);
        add(in, ROLE_WORKSPACE, ACCESS_READ_WRITE, b->workspace);
    }
    struct instr *in = emit(b, OP_AGREE, ON_COMPUTE, -1, -1, 0);
    add(in, ROLE_REPORT, ACCESS_READ, b->report);
    add(in, ROLE_REPORTS, ACCESS_WRITE, b->reports);
    add(in, ROLE_STATE, ACCESS_READ_WRITE, b->state);
    for (int u = 0; u < U; u++) {
        if (!b->spec->units[u].frozen)
            emit_update(b, u);
        emit_carried(b, u);
    }
}

/* With several micro-batches a step is captured in pieces: one a micro-batch, and the optimizer. */
static void emit_cut(struct builder *b)
{
    if (b->spec->micro_batches > 1)
        emit(b, OP_CUT, ON_COMPUTE, -1, -1, 0);
}

static void emit_step(struct builder *b, const struct item *items, int count)
{
    const struct program_spec *spec = b->spec;
    struct pending_sum pending = {.unit = -1};
    struct instr *in = emit(b, OP_BEGIN, ON_COMPUTE, -1, -1, 0);
    add(in, ROLE_REPORT, ACCESS_WRITE, b->report);
    add(in, ROLE_STATE, ACCESS_READ, b->state);
    b->next_gather = b->carried_count;
    for (int i = 0; i < count; i++) {
        struct item it = items[i];
        if (it.op == OP_FORWARD && it.unit == 0 && it.micro_batch > 0)
            emit_cut(b);
        if (it.op == OP_FORWARD && it.unit == 0)
            for (int s = 0; s < spec->slot_count; s++)
                b->act[s] = b->dact[s] = BUFFER_NONE;
        enter_item(b, i);
        if (it.op != OP_BACKWARD) {
            emit_forward(b, it);
            continue;
        }
        emit_backward(b, it);
        bool reduces = b->per_micro_batch || it.micro_batch == spec->micro_batches - 1;
        for (int u = spec->unit_count - 1; reduces && u >= 0; u--) {
            if (spec->units[u].frozen || b->last_writer[u] != it.unit)
                continue;
            emit_reduce(b, u, it.micro_batch, &pending);
            b->grad_begun[u] = false;
        }
    }
    emit_accumulate(b, &pending);
    emit_cut(b);
    emit_optimizer(b);
}

static void emit_evaluate(struct builder *b, const struct item *items, int count)
{
    const struct program_spec *spec = b->spec;
    struct instr *in = emit(b, OP_BEGIN, ON_COMPUTE, -1, -1, 0);
    add(in, ROLE_REPORT, ACCESS_WRITE, b->report);
    add(in, ROLE_STATE, ACCESS_READ, b->state);
    for (int s = 0; s < spec->slot_count; s++)
        b->act[s] = BUFFER_NONE;
    for (int i = 0; i < count; i++) {
        enter_item(b, i);
        emit_forward(b, items[i]);
    }
    size_t logits = spec->evaluate.slots[spec->slot_count - 1];
    int collected =
        buffer_new(b, CATEGORY_WORKSPACE, DTYPE_F32, -1, 0,
                   (size_t)round_up((int64_t)logits, ARENA_ALIGN) * (size_t)spec->world_size);
    in = emit(b, OP_COLLECT, ON_GATHER, -1, 0, 0);
    add(in, ROLE_ACT_OUT, ACCESS_READ, b->act[spec->slot_count - 1]);
    add(in, ROLE_COLLECTED, ACCESS_WRITE, collected);
    add(in, ROLE_REPORT, ACCESS_READ, b->report);
    add(in, ROLE_REPORTS, ACCESS_WRITE, b->reports);
}

/* ---- live intervals ---- */

/*
 * The last instruction of the life of a buffer that @last is the last to touch. Where that is a
 * REDUCE, the life goes on until the next BACKWARD has ended: else that one would take the memory
 * for its own gradient and wait for the REDUCE, which so would hide behind nothing. In the next
 * micro-batch it is half of FORWARD, which needs less memory than what follows.
 */
static int hold(const struct program *p, int last, int middle_unit)
{
    if (p->instrs[last].op != OP_REDUCE)
        return last;
    for (int i = last + 1; i < p->instr_count; i++) {
        const struct instr *in = &p->instrs[i];
        if (in->op == OP_BACKWARD || (in->op == OP_FORWARD && in->unit == middle_unit))
            return i;
    }
    return last;
}

static void find_intervals(struct program *p, int unit_count)
{
    int last = p->instr_count - 1;
    for (int i = 0; i < p->instr_count; i++) {
        for (int k = 0; k < p->instrs[i].operand_count; k++) {
            struct buffer *buf = &p->buffers[p->instrs[i].operands[k].buffer];
            bool refills = buf->carried && p->instrs[i].op == OP_GATHER;
            if (buf->first < 0 || refills)
                buf->first = i;
            if (!refills)
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
        } else if (!buf->carried && buf->first >= 0) {
            buf->last = hold(p, buf->last, unit_count / 2);
        }
    }
}

/* ---- building ---- */

static enum status take_ints(struct builder *b, int **out, int count)
{
    TRY(pool_take(&b->pool, out, sizeof **out * (size_t)count));
    for (int i = 0; i < count; i++)
        (*out)[i] = BUFFER_NONE;
    return ST_OK;
}

static enum status builder_init(struct builder *b, int max_items)
{
    const int U = b->spec->unit_count;
    int **per_unit[] = {&b->param, &b->shard,      &b->master,      &b->adam_m, &b->adam_v,
                        &b->grad,  &b->grad_shard, &b->last_writer, &b->saved};
    for (size_t i = 0; i < sizeof per_unit / sizeof *per_unit; i++)
        TRY(take_ints(b, per_unit[i], U));
    TRY(take_ints(b, &b->act, b->spec->slot_count));
    TRY(take_ints(b, &b->dact, b->spec->slot_count));
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
static enum status count_carried(struct builder *b, struct item *items)
{
    if (!b->params_sharded || b->spec->prefetch == 0)
        return ST_OK;
    enum program_kind kind = b->p->kind;
    b->p->kind = PROGRAM_STEP;
    int count = list_items(b, items);
    b->p->kind = kind;
    list_gather_groups(b, items, count);
    b->carried_count = b->spec->prefetch < b->group_count ? b->spec->prefetch : b->group_count;
    /* A unit that a later group gathers again within the carried ones would need two buffers. */
    for (int g = 1; g < b->carried_count; g++)
        for (int h = 0; h < g; h++)
            if (b->groups[h].unit == b->groups[g].unit) {
                b->carried_count = g;
                return ST_OK;
            }
    return ST_OK;
}

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

enum status program_build(struct program *p, enum program_kind kind,
                          const struct program_spec *spec)
{
    TRY(check_spec(spec));
    program_release(p);
    p->kind = kind;
    struct builder b = {
        .p = p,
        .spec = spec,
        .params_sharded = spec->zero_stage == 3,
        .state_sharded = spec->zero_stage >= 1,
        .per_micro_batch =
            program_reduce_policy(spec->reduce, spec->zero_stage) == REDUCE_PER_MICRO_BATCH,
    };
    enum status st = ST_OK;
    int max_items = 3 * spec->unit_count * spec->micro_batches;
    struct item *items = NULL;
    TRY_GOTO(st, out, pool_take(&b.pool, &items, sizeof *items * (size_t)(max_items + 1)));
    TRY_GOTO(st, out, builder_init(&b, max_items));
    list_shared(&b);
    TRY_GOTO(st, out, count_carried(&b, items));
    list_carried(&b, b.groups, b.carried_count);
    p->shared_count = p->buffer_count;
    int count = list_items(&b, items);
    if (kind == PROGRAM_EVALUATE) {
        b.group_count = b.carried_count = b.next_gather = 0;
        list_gather_groups(&b, items, count);
        emit_evaluate(&b, items, count);
    } else if (kind == PROGRAM_STEP) {
        if (b.params_sharded && b.group_count == 0)
            list_gather_groups(&b, items, count);
        emit_step(&b, items, count);
    } else if (kind == PROGRAM_PROLOGUE) {
        for (int u = 0; u < spec->unit_count; u++)
            emit_carried(&b, u);
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
