#include "shard/program.h"

#include <string.h>

#include "shard/account.h"
#include "tests/support/program_order.h"
#include "tests/support/program_spec.h"
#include "tests/support/support.h"

enum { MAX_BUFFERS = 2048, PROGRAMS = 300 };

/*
 * A program is run on values that say where they come from: which instruction wrote a buffer, which
 * gradients a sum holds, how many updates parameters have seen.
 */
struct value {
    int writer;         /* instruction; -1: unwritten, -2: from before the turn */
    unsigned sum;       /* bit 2 m: gradient of micro-batch m; bit 2 m + 1: the tied head's */
    bool reduced;       /* over ranks; else local */
    unsigned parts;     /* of all ranks' rows: bit u: what this rank has of unit u's are there */
    bool whole;         /* all of the flat parameter; else this rank's slice is ahead */
    int version, slice; /* updates that the parameters, and this rank's slice of them, have seen */
};

/* Has a rank its shard alone, and no whole parameters that live on? */
static bool is_partitioned(const struct program_spec *spec, int unit)
{
    return spec->zero_stage == 3 || (spec->zero_stage > 0 && spec->units[unit].by_rows);
}

struct run {
    const struct spec_case *c;
    const struct program *p;
    struct value v[MAX_BUFFERS];
    int index; /* of the instruction that runs */
    int reads[SPEC_MAX_UNITS], updates[SPEC_MAX_UNITS], norms[SPEC_MAX_UNITS];
    bool agreed, cleared;
};

static void check_at(bool good, const struct run *r, const char *text, int line)
{
    if (good)
        return;
    const struct instr *in = r->index < r->p->instr_count ? &r->p->instrs[r->index] : NULL;
    print_error("%s\n  at instruction %d (%s of unit %d, micro-batch %d) of program %d\n  %s\n",
                text, r->index, in == NULL ? "end" : program_op_name(in->op),
                in == NULL ? -1 : in->unit, in == NULL ? -1 : in->micro_batch, (int)r->p->kind,
                spec_text(r->c));
    _fail(__FILE__, line);
}

#define CHECK(r, cond) check_at((cond), (r), #cond, __LINE__)

static const struct buffer *buffer_of(const struct run *r, const struct operand *o)
{
    return &r->p->buffers[o->buffer];
}

static size_t rounded(size_t bytes)
{
    return (size_t)round_up((int64_t)bytes, ARENA_ALIGN);
}

static size_t unit_bytes_of(const struct spec_case *c, int unit, enum dtype dtype, bool whole)
{
    return rounded((size_t)c->spec.units[unit].shard_numel * dtype_bytes(dtype) *
                   (size_t)(whole ? c->spec.world_size : 1));
}

static size_t unit_bytes(const struct run *r, int unit, enum dtype dtype, bool whole)
{
    return unit_bytes_of(r->c, unit, dtype, whole);
}

/* ---- what each instruction must find ---- */

/* A flat buffer of @unit: whole, or a shard if @whole is false and @o is no slice. */
static struct value *flat(struct run *r, const struct operand *o, int unit, enum dtype dtype,
                          bool whole)
{
    CHECK(r, o != NULL);
    CHECK(r, buffer_of(r, o)->unit == unit);
    CHECK(r, buffer_of(r, o)->dtype == dtype);
    CHECK(r, buffer_of(r, o)->bytes == unit_bytes(r, unit, dtype, whole || o->slice));
    return &r->v[o->buffer];
}

static bool is_late(const struct run *r)
{
    return r->c->spec.update != UPDATE_EARLY;
}

/* Is a unit's gradient gathered in the turn after its REDUCE, ahead of its UPDATE? */
static bool gathers_late(const struct program_spec *spec, int unit)
{
    bool every = program_reduce_policy(spec->reduce, spec->zero_stage) == REDUCE_PER_MICRO_BATCH;
    return spec->update != UPDATE_EARLY && spec->zero_stage == 0 && spec->world_size > 1 &&
           !spec->units[unit].by_rows && !(every && spec->micro_batches > 1);
}

/* What it has at the end of a turn: all, or this rank's part. */
static bool carries_whole(const struct program_spec *spec, int unit)
{
    return spec->zero_stage == 0 && !gathers_late(spec, unit);
}

/* Late, a turn's FORWARD sees what the update at its head made. */
static void run_param_read(struct run *r, const struct operand *o, int unit)
{
    const struct value *v = flat(r, o, unit, r->c->spec.param_dtype, true);
    int want = r->p->kind == PROGRAM_STEP && is_late(r) && !r->c->spec.units[unit].frozen;
    CHECK(r, v->version == want && v->slice == want);
}

/* Is FORWARD for the rows of all ranks, from this rank's shard? */
static bool looks_up_rows(const struct run *r, int unit)
{
    return r->p->kind == PROGRAM_STEP && r->c->spec.zero_stage > 0 &&
           r->c->spec.units[unit].by_rows;
}

/* The unit whose BACKWARD writes the gradient of a slot, and the last one that writes the slot. */
static int reader_of_slot(const struct program_spec *spec, int slot)
{
    for (int u = spec->unit_count - 1; u >= 0; u--)
        if (spec->units[u].act_in == slot && spec->units[u].act_out != slot)
            return u;
    return -1;
}

static int writer_of_slot(const struct program_spec *spec, int slot)
{
    int last = -1;
    for (int u = 0; u < spec->unit_count; u++)
        if (spec->units[u].act_out == slot)
            last = u;
    return last;
}

static void run_written_by(struct run *r, const struct operand *o, enum program_op op, int unit)
{
    CHECK(r, o != NULL);
    CHECK(r, r->v[o->buffer].writer >= 0);
    const struct instr *writer = &r->p->instrs[r->v[o->buffer].writer];
    CHECK(r, writer->op == op && writer->unit == unit);
    CHECK(r, writer->micro_batch == r->p->instrs[r->index].micro_batch);
}

/* A slot, as the last of its units left it; for a table by rows, what the ranks have given. */
static void run_slot_read(struct run *r, const struct operand *o, int slot)
{
    int writer = writer_of_slot(&r->c->spec, slot);
    bool rows = looks_up_rows(r, writer);
    run_written_by(r, o, rows ? OP_REDUCE : OP_FORWARD, writer);
    CHECK(r, !rows || r->p->instrs[r->v[o->buffer].writer].flags == FLAG_ROWS);
}

/* The gradient of a table's output, of this micro-batch. */
static void run_gather_rows(struct run *r, const struct instr *in)
{
    const struct program_spec *spec = &r->c->spec;
    int slot = spec->units[in->unit].act_out;
    const struct operand *rows = program_operand(in, ROLE_ROWS);
    CHECK(r, spec->units[in->unit].by_rows && in->stream == ON_GATHER);
    run_written_by(r, program_operand(in, ROLE_DACT_OUT), OP_BACKWARD, reader_of_slot(spec, slot));
    CHECK(r, buffer_of(r, rows)->dtype == spec->param_dtype);
    CHECK(r,
          buffer_of(r, rows)->bytes == rounded(spec->train.slots[slot] * (size_t)spec->world_size));
}

static void run_gather(struct run *r, const struct instr *in)
{
    if (in->flags & FLAG_ROWS) {
        run_gather_rows(r, in);
        return;
    }
    if (in->flags & FLAG_GRADIENT) {
        const struct operand *o = program_operand(in, ROLE_GRAD_SHARD);
        struct value shard = *flat(r, o, in->unit, DTYPE_F32, false);
        CHECK(r, r->c->spec.zero_stage == 0 && shard.reduced && !shard.whole);
        struct value *v = flat(r, program_operand(in, ROLE_GRAD), in->unit, DTYPE_F32, true);
        *v = (struct value){.sum = shard.sum, .reduced = true, .whole = true};
        return;
    }
    const struct operand *o = program_operand(in, ROLE_SHARD);
    int version = flat(r, o, in->unit, r->c->spec.param_dtype, false)->slice;
    struct value *v =
        flat(r, program_operand(in, ROLE_PARAM), in->unit, r->c->spec.param_dtype, true);
    v->version = v->slice = version;
}

static const struct micro_bytes *micro_bytes(const struct run *r)
{
    return r->p->kind == PROGRAM_EVALUATE ? &r->c->spec.evaluate : &r->c->spec.train;
}

static void check_bytes(struct run *r, const struct operand *o, size_t bytes)
{
    CHECK(r, (o != NULL) == (bytes > 0));
    if (o != NULL)
        CHECK(r, buffer_of(r, o)->bytes == rounded(bytes));
}

/* All ranks' rows, of this micro-batch: what the rank's shard of each part has, as it is now. The
 * first part writes all of the buffer, the others add theirs. */
static void run_look_up(struct run *r, const struct instr *in)
{
    const struct program_spec *spec = &r->c->spec;
    const struct operand *o = program_operand(in, ROLE_ROWS);
    const struct operand *shard = program_operand(in, ROLE_SHARD);
    int want = is_late(r) && !spec->units[in->unit].frozen;
    CHECK(r, program_operand(in, ROLE_PARAM) == NULL && program_operand(in, ROLE_ACT_OUT) == NULL);
    CHECK(r, in->op == OP_FORWARD && in->flags == FLAG_TRAINING && o != NULL && !shard->slice);
    CHECK(r, shard->access == ACCESS_READ);
    CHECK(r, flat(r, shard, in->unit, spec->param_dtype, false)->slice == want);
    CHECK(r, buffer_of(r, o)->category == CATEGORY_IN_FLIGHT);
    CHECK(r, buffer_of(r, o)->dtype == spec->param_dtype);
    CHECK(r, buffer_of(r, o)->bytes == rounded(spec->train.slots[spec->units[in->unit].act_out] *
                                               (size_t)spec->world_size));
    CHECK(r, o->access == (in->unit == 0 ? ACCESS_WRITE : ACCESS_READ_WRITE));
    CHECK(r, (r->v[o->buffer].writer == -1) == (in->unit == 0));
    if (in->unit > 0)
        run_written_by(r, o, OP_FORWARD, in->unit - 1);
    CHECK(r, r->v[o->buffer].parts == (1u << in->unit) - 1);
    r->v[o->buffer].parts |= 1u << in->unit;
}

static void run_reduce_rows(struct run *r, const struct instr *in)
{
    const struct program_spec *spec = &r->c->spec;
    const struct operand *rows = program_operand(in, ROLE_ROWS);
    const struct operand *out = program_operand(in, ROLE_ACT_OUT);
    CHECK(r, looks_up_rows(r, in->unit) && in->stream == ON_REDUCE && in->flags == FLAG_ROWS);
    run_written_by(r, rows, OP_FORWARD, writer_of_slot(spec, spec->units[in->unit].act_out));
    CHECK(r, r->v[rows->buffer].parts == (1u << r->c->parts) - 1 && rows->access == ACCESS_READ);
    CHECK(r, buffer_of(r, rows)->last == r->index && buffer_of(r, out)->first == r->index);
    check_bytes(r, out, spec->train.slots[spec->units[in->unit].act_out]);
}

static void run_forward(struct run *r, const struct instr *in)
{
    const struct program_spec *spec = &r->c->spec;
    const struct program_unit *u = &spec->units[in->unit];
    const struct operand *input = program_operand(in, ROLE_ACT_IN);
    const struct operand *out = program_operand(in, ROLE_ACT_OUT);
    r->reads[in->unit]++;
    if (looks_up_rows(r, in->unit)) {
        run_look_up(r, in);
        return;
    }
    CHECK(r, program_operand(in, ROLE_ROWS) == NULL && program_operand(in, ROLE_SHARD) == NULL);
    run_param_read(r, program_operand(in, ROLE_PARAM), in->unit);
    if (u->tied >= 0)
        run_param_read(r, program_operand(in, ROLE_PARAM_TIED), u->tied);
    check_bytes(r, program_operand(in, ROLE_SAVED), micro_bytes(r)->units[in->unit].saved);
    check_bytes(r, program_operand(in, ROLE_SCRATCH),
                micro_bytes(r)->units[in->unit].forward_scratch);
    if (u->act_in >= 0 && u->act_in != u->act_out)
        run_slot_read(r, input, u->act_in);
    if (in->op == OP_RECOMPUTE) {
        CHECK(r, spec->recompute && u->recompute && out == NULL);
        return;
    }
    check_bytes(r, out, micro_bytes(r)->slots[u->act_out]);
    if (u->act_in == u->act_out)
        run_written_by(r, out, OP_FORWARD, in->unit - 1);
    CHECK(r, (out->access == ACCESS_READ_WRITE) == (u->act_in == u->act_out));
    CHECK(r, ((in->flags & FLAG_TRAINING) != 0) == (r->p->kind == PROGRAM_STEP));
    CHECK(r, (program_operand(in, ROLE_REPORT) != NULL) == (in->unit == spec->unit_count - 1));
}

/* Of all ranks at once: where the reduced gradient lies, this rank's shard or (stage 0) all. */
static void run_gradient_by_rows(struct run *r, const struct instr *in, unsigned bit)
{
    const struct program_spec *spec = &r->c->spec;
    bool whole = spec->zero_stage == 0, adds = in->flags & FLAG_ADD;
    const struct operand *o = program_operand(in, whole ? ROLE_GRAD : ROLE_GRAD_SHARD);
    const struct operand *rows = program_operand(in, ROLE_ROWS);
    struct value *v = flat(r, o, in->unit, DTYPE_F32, whole);
    CHECK(r, rows != NULL && r->v[rows->buffer].writer >= 0 && !o->slice);
    const struct instr *gather = &r->p->instrs[r->v[rows->buffer].writer];
    CHECK(r, gather->flags == FLAG_ROWS && gather->micro_batch == in->micro_batch);
    CHECK(r, spec->units[gather->unit].act_out == spec->units[in->unit].act_out);
    CHECK(r, adds == (v->writer >= 0) && adds == (in->micro_batch > 0));
    CHECK(r, (o->access == ACCESS_READ_WRITE) == adds);
    CHECK(r, v->reduced == adds && !(v->sum & bit));
    v->sum |= bit;
    v->reduced = true;
    v->whole = whole;
}

/* The first writer of a gradient overwrites, later ones add; nothing is added twice. */
static void run_gradient(struct run *r, const struct operand *o, int unit, bool adds, unsigned bit)
{
    if (r->c->spec.units[unit].frozen) {
        CHECK(r, o == NULL);
        return;
    }
    struct value *v = flat(r, o, unit, DTYPE_F32, true);
    CHECK(r, adds == (v->writer >= 0));
    CHECK(r, (o->access == ACCESS_READ_WRITE) == adds);
    CHECK(r, !v->reduced && !(v->sum & bit));
    v->sum |= bit;
    v->whole = true;
}

static void run_backward(struct run *r, const struct instr *in)
{
    const struct program_spec *spec = &r->c->spec;
    const struct program_unit *u = &spec->units[in->unit];
    const struct operand *saved = program_operand(in, ROLE_SAVED);
    unsigned own = 1u << (2 * in->micro_batch);
    if (u->backward_reads_params) {
        run_param_read(r, program_operand(in, ROLE_PARAM), in->unit);
        if (u->tied >= 0)
            run_param_read(r, program_operand(in, ROLE_PARAM_TIED), u->tied);
    }
    if (saved != NULL)
        run_written_by(r, saved, spec->recompute && u->recompute ? OP_RECOMPUTE : OP_FORWARD,
                       in->unit);
    check_bytes(r, saved, spec->train.units[in->unit].saved);
    check_bytes(r, program_operand(in, ROLE_SCRATCH), spec->train.units[in->unit].backward_scratch);
    if (u->backward_reads_input)
        run_slot_read(r, program_operand(in, ROLE_ACT_IN), u->act_in);
    if (in->unit < spec->unit_count - 1 && !u->by_rows)
        run_written_by(r, program_operand(in, ROLE_DACT_OUT), OP_BACKWARD,
                       reader_of_slot(spec, u->act_out));
    check_bytes(r, program_operand(in, ROLE_DACT_IN),
                u->act_in >= 0 && u->act_in != u->act_out ? spec->train.slots[u->act_in] : 0);
    if (u->by_rows && !u->frozen)
        run_gradient_by_rows(r, in, own);
    else
        run_gradient(r, program_operand(in, ROLE_GRAD), in->unit, in->flags & FLAG_ADD, own);
    if (u->tied >= 0)
        run_gradient(r, program_operand(in, ROLE_GRAD_TIED), u->tied, in->flags & FLAG_ADD_TIED,
                     2 * own);
}

/* All gradients of a unit in micro-batches @first to @last. */
static unsigned full_sum(const struct program_spec *spec, int unit, int first, int last)
{
    unsigned sum = 0;
    for (int m = first; m <= last; m++)
        sum |= (spec->units[spec->unit_count - 1].tied == unit ? 3u : 1u) << (2 * m);
    return sum;
}

/* Has BACKWARD of a unit given rows to a table that is trained by them? */
static bool gives_rows(const struct spec_case *c, int unit)
{
    bool by_rows = false;
    for (int u = 0; u < c->parts; u++)
        by_rows |= c->spec.units[u].by_rows && !c->spec.units[u].frozen;
    return by_rows && unit == reader_of_slot(&c->spec, c->spec.units[0].act_out);
}

static void run_reduce(struct run *r, const struct instr *in)
{
    if (in->flags & FLAG_ROWS) {
        run_reduce_rows(r, in);
        return;
    }
    const struct program_spec *spec = &r->c->spec;
    CHECK(r, in->stream == (gives_rows(r->c, in->unit) ? ON_GATHER : ON_REDUCE));
    bool every = program_reduce_policy(spec->reduce, spec->zero_stage) == REDUCE_PER_MICRO_BATCH;
    struct value from = *flat(r, program_operand(in, ROLE_GRAD), in->unit, DTYPE_F32, true);
    struct value *to = flat(r, program_operand(in, ROLE_REDUCED), in->unit, DTYPE_F32, false);
    CHECK(r, !from.reduced && from.whole);
    CHECK(r, from.sum == full_sum(spec, in->unit, every ? in->micro_batch : 0, in->micro_batch));
    CHECK(r, every || in->micro_batch == spec->micro_batches - 1);
    *to = (struct value){.sum = from.sum, .reduced = true};
}

static void run_accumulate(struct run *r, const struct instr *in)
{
    struct value *from = flat(r, program_operand(in, ROLE_REDUCED), in->unit, DTYPE_F32, false);
    struct value *to = flat(r, program_operand(in, ROLE_GRAD_SHARD), in->unit, DTYPE_F32, false);
    CHECK(r, in->flags & FLAG_ADD);
    CHECK(r, from->reduced && to->reduced);
    CHECK(r, (from->sum & to->sum) == 0);
    to->sum |= from->sum;
}

static void check_final(struct run *r, const struct instr *in, const struct operand *o, bool whole)
{
    const struct program_spec *spec = &r->c->spec;
    const struct value *v = flat(r, o, in->unit, DTYPE_F32, whole);
    CHECK(r, !spec->units[in->unit].frozen);
    CHECK(r, v->reduced && (v->whole || !whole));
    CHECK(r, v->sum == full_sum(spec, in->unit, 0, spec->micro_batches - 1));
}

static void run_update(struct run *r, const struct instr *in)
{
    const struct program_spec *spec = &r->c->spec;
    bool whole = spec->zero_stage == 0;
    check_final(r, in, program_operand(in, whole ? ROLE_GRAD : ROLE_GRAD_SHARD), whole);
    CHECK(r, r->agreed == !is_late(r) && r->updates[in->unit]++ == 0);
    if (is_late(r)) /* the gradient of the turn before ends here */
        r->v[program_operand(in, whole ? ROLE_GRAD : ROLE_GRAD_SHARD)->buffer] =
            (struct value){.writer = -1};
    flat(r, program_operand(in, ROLE_ADAM_M), in->unit, DTYPE_F32, whole);
    flat(r, program_operand(in, ROLE_ADAM_V), in->unit, DTYPE_F32, whole);
    if (spec->param_dtype != DTYPE_F32)
        flat(r, program_operand(in, ROLE_MASTER), in->unit, DTYPE_U16, whole);
    else
        CHECK(r, program_operand(in, ROLE_MASTER) == NULL);
    const struct operand *shard = program_operand(in, ROLE_SHARD);
    struct value *v = flat(r, shard, in->unit, spec->param_dtype, whole);
    CHECK(r, shard->slice == (!whole && !is_partitioned(spec, in->unit)));
    v->slice++;
    if (whole || spec->world_size == 1)
        v->version = v->slice;
}

static void run_instr(struct run *r, const struct instr *in)
{
    switch (in->op) {
    case OP_GATHER:
        run_gather(r, in);
        break;
    case OP_FORWARD:
    case OP_RECOMPUTE:
        run_forward(r, in);
        break;
    case OP_BACKWARD:
        run_backward(r, in);
        break;
    case OP_REDUCE:
        run_reduce(r, in);
        break;
    case OP_ACCUMULATE:
        run_accumulate(r, in);
        break;
    case OP_NORM:
        check_final(r, in, program_operand(in, ROLE_GRAD_SHARD), false);
        CHECK(r, !r->agreed && r->norms[in->unit]++ == 0);
        break;
    case OP_AGREE:
        CHECK(r, !r->agreed);
        r->agreed = true;
        break;
    case OP_UPDATE:
        run_update(r, in);
        break;
    case OP_CLEAR:
        CHECK(r, is_late(r) && r->p->kind == PROGRAM_PROLOGUE);
        r->cleared |= in->unit < 0;
        break;
    default:
        break;
    }
}

static void run_operands(struct run *r, const struct instr *in, bool after)
{
    for (int k = 0; k < in->operand_count; k++) {
        const struct operand *o = &in->operands[k];
        CHECK(r, o->buffer >= 0 && o->buffer < r->p->buffer_count);
        CHECK(r, buffer_live_at(buffer_of(r, o), r->index));
        if (!after && (o->access & ACCESS_READ))
            CHECK(r, r->v[o->buffer].writer != -1);
        if (after && (o->access & ACCESS_WRITE))
            r->v[o->buffer].writer = r->index;
    }
}

/* Parameters are the same everywhere again, one step on: live_in == live_out. */
static void check_turn_end(struct run *r)
{
    const struct program_spec *spec = &r->c->spec;
    bool step = r->p->kind == PROGRAM_STEP;
    bool updated = step || (r->p->kind == PROGRAM_FLUSH && is_late(r));
    r->index = r->p->instr_count;
    CHECK(r, r->agreed == step);
    CHECK(r, r->cleared == (r->p->kind == PROGRAM_PROLOGUE && is_late(r)));
    for (int u = 0; u < spec->unit_count; u++) {
        bool trained = !spec->units[u].frozen;
        CHECK(r, r->updates[u] == (updated && trained) && r->norms[u] == (step && trained));
    }
    for (int i = 0; i < r->p->shared_count; i++) {
        const struct buffer *b = &r->p->buffers[i];
        if (b->carried && b->category == CATEGORY_GRADIENTS) {
            if (step)
                CHECK(r, r->v[i].sum == full_sum(spec, b->unit, 0, spec->micro_batches - 1) &&
                             r->v[i].reduced && r->v[i].whole == carries_whole(spec, b->unit));
            CHECK(r, (r->v[i].writer >= 0) == (step || r->p->kind == PROGRAM_PROLOGUE));
        } else if (b->category == CATEGORY_PARAMETERS || (b->carried && b->first >= 0)) {
            int want = updated && !spec->units[b->unit].frozen;
            CHECK(r, r->v[i].slice == want);
            /* A shard has no whole. */
            CHECK(r, (is_partitioned(spec, b->unit) && !b->carried) || r->v[i].version == want);
        }
    }
}

static void check_run(const struct spec_case *c, const struct program *p)
{
    static struct run r;
    memset(&r, 0, sizeof r);
    r.c = c;
    r.p = p;
    CHECK(&r, p->buffer_count <= MAX_BUFFERS);
    for (int i = 0; i < p->buffer_count; i++) {
        const struct buffer *b = &p->buffers[i];
        bool flush = p->kind == PROGRAM_FLUSH && is_late(&r);
        bool from_before = b->persistent || (b->carried && (p->kind == PROGRAM_STEP || flush));
        r.v[i].writer = from_before ? -2 : -1;
        if (from_before && b->carried && b->category == CATEGORY_GRADIENTS)
            r.v[i] = (struct value){
                .writer = -2,
                .sum = full_sum(&c->spec, b->unit, 0, c->spec.micro_batches - 1),
                .reduced = true,
                .whole = carries_whole(&c->spec, b->unit),
            };
    }
    for (r.index = 0; r.index < p->instr_count; r.index++) {
        run_operands(&r, &p->instrs[r.index], false);
        run_instr(&r, &p->instrs[r.index]);
        run_operands(&r, &p->instrs[r.index], true);
    }
    check_turn_end(&r);
}

/* ---- intervals and what is carried ---- */

static void check_intervals(const struct spec_case *c, const struct program *p)
{
    bool late = c->spec.update != UPDATE_EARLY;
    for (int i = 0; i < p->buffer_count; i++) {
        const struct buffer *b = &p->buffers[i];
        int first = -1, refill = program_refill(p, i);
        assert_true(b->bytes % ARENA_ALIGN == 0);
        for (int k = 0; k < p->instr_count; k++)
            for (int o = 0; o < p->instrs[k].operand_count; o++) {
                if (p->instrs[k].operands[o].buffer != i)
                    continue;
                first = first < 0 ? k : first;
            }
        if (b->persistent) {
            assert_true(i < p->shared_count);
        } else if (!b->carried) {
            assert_true(i >= p->shared_count);
            assert_true(first >= 0);
            assert_int_equal(b->first, first);
            assert_int_equal(b->last, program_life_end(p, i, c->spec.unit_count));
        } else if (p->kind == PROGRAM_STEP) { /* used, then refilled */
            assert_int_equal(b->first, refill);
            assert_int_equal(b->last, program_life_end(p, i, c->spec.unit_count));
            assert_true(b->last >= first && b->last < refill);
        } else if (p->kind == PROGRAM_PROLOGUE) {
            assert_int_equal(b->first, refill);
            assert_int_equal(b->last, p->instr_count - 1);
        } else if (p->kind == PROGRAM_FLUSH && late) {
            assert_true(b->first == 0 && b->last == p->instr_count - 1 && first >= 0);
        } else {
            assert_int_equal(first, -1);
            assert_int_equal(b->first, -1);
        }
    }
    assert_true(late || c->spec.zero_stage == 3 || p->kind != PROGRAM_PROLOGUE ||
                p->instr_count == 0);
    assert_true(late || p->kind != PROGRAM_FLUSH || p->instr_count == 0);
}

static void check_shared_are_the_same(const struct plan *plan)
{
    const struct program *step = &plan->programs[PROGRAM_STEP];
    for (int k = 0; k < PROGRAM_KINDS; k++) {
        const struct program *p = &plan->programs[k];
        assert_int_equal(p->shared_count, step->shared_count);
        for (int i = 0; i < p->shared_count; i++) {
            const struct buffer *a = &p->buffers[i], *b = &step->buffers[i];
            assert_true(a->category == b->category && a->dtype == b->dtype && a->unit == b->unit &&
                        a->bytes == b->bytes && a->persistent == b->persistent &&
                        a->carried == b->carried && a->persistent != a->carried);
        }
    }
}

/* ---- collectives ---- */

static int uses_of_params(const struct spec_case *c, enum program_kind kind, int unit)
{
    const struct program_spec *spec = &c->spec;
    int item = 0, last = -2, groups = 0, U = spec->unit_count, lowest = U;
    int tied_user = spec->units[U - 1].tied == unit ? U - 1 : -1;
    for (int u = U - 1; u >= 0; u--)
        if (!spec->units[u].frozen ||
            (spec->units[u].tied >= 0 && !spec->units[spec->units[u].tied].frozen))
            lowest = u;
    for (int m = 0; m < (kind == PROGRAM_STEP ? spec->micro_batches : 1); m++)
        for (int turn = 0; turn < (kind == PROGRAM_STEP ? 2 : 1); turn++)
            for (int k = 0; k < U; k++) {
                int u = turn == 0 ? k : U - 1 - k;
                if (turn == 1 && u < lowest)
                    continue;
                bool again = turn == 1 && spec->recompute && spec->units[u].recompute;
                for (int pass = again ? 0 : 1; pass < 2; pass++, item++) {
                    if (u != unit && u != tied_user)
                        continue;
                    if (turn == 1 && pass == 1 && !spec->units[u].backward_reads_params)
                        continue;
                    groups += item - last > 1;
                    last = item;
                }
            }
    return groups;
}

static int count_ops(const struct program *p, enum program_op op, int unit, unsigned flags)
{
    int n = 0;
    for (int i = 0; i < p->instr_count; i++)
        n += p->instrs[i].op == op && (unit < 0 || p->instrs[i].unit == unit) &&
             (p->instrs[i].flags & (FLAG_GRADIENT | FLAG_ROWS)) == flags;
    return n;
}

static void check_collectives(const struct spec_case *c, const struct program *p)
{
    const struct program_spec *spec = &c->spec;
    bool step = p->kind == PROGRAM_STEP;
    bool every = program_reduce_policy(spec->reduce, spec->zero_stage) == REDUCE_PER_MICRO_BATCH;
    int64_t reduced = 0, gathered = 0;
    for (int u = 0; u < spec->unit_count; u++) {
        bool trained = step && !spec->units[u].frozen, by_rows = spec->units[u].by_rows;
        int reduces = trained && !by_rows ? (every ? spec->micro_batches : 1) : 0;
        int gradients = trained && !by_rows && spec->zero_stage == 0;
        if (p->kind == PROGRAM_FLUSH) /* does the next turn's */
            gradients = !spec->units[u].frozen && gathers_late(spec, u);
        int rows = trained && by_rows ? spec->micro_batches : 0;
        for (int v = u + 1; v < c->parts; v++) /* once, for the part that comes first */
            rows = spec->units[v].frozen ? rows : 0;
        int looked_up = step && by_rows && spec->zero_stage > 0 && u == c->parts - 1;
        looked_up *= spec->micro_batches;
        bool updated = step || (p->kind == PROGRAM_FLUSH && spec->update != UPDATE_EARLY);
        int params = updated && !spec->units[u].frozen && spec->zero_stage > 0;
        if (is_partitioned(spec, u))
            params = p->kind == PROGRAM_EVALUATE || (step && !by_rows)
                         ? uses_of_params(c, p->kind, u)
                         : 0;
        if (p->kind != PROGRAM_PROLOGUE)
            assert_int_equal(count_ops(p, OP_GATHER, u, 0), params);
        assert_int_equal(count_ops(p, OP_GATHER, u, FLAG_GRADIENT), gradients);
        assert_int_equal(count_ops(p, OP_REDUCE, u, 0), reduces);
        assert_int_equal(count_ops(p, OP_GATHER, u, FLAG_ROWS), rows);
        assert_int_equal(count_ops(p, OP_REDUCE, u, FLAG_ROWS), looked_up);
        int64_t sent = spec->units[u].shard_numel * (spec->world_size - 1);
        int64_t slot = (int64_t)spec->train.slots[0] * (spec->world_size - 1);
        reduced += reduces * sent * 4 + looked_up * slot;
        gathered += rows * slot;
        gathered += gradients * sent * 4 + params * sent * (int64_t)dtype_bytes(spec->param_dtype);
    }
    if (p->kind == PROGRAM_PROLOGUE)
        return;
    assert_int_equal(program_collective_bytes(p, OP_REDUCE, spec->world_size), reduced);
    assert_int_equal(program_collective_bytes(p, OP_GATHER, spec->world_size), gathered);
    assert_int_equal(count_ops(p, OP_AGREE, -1, 0), step);
    assert_int_equal(count_ops(p, OP_COLLECT, -1, 0), p->kind == PROGRAM_EVALUATE);
}

static void check_gathered_ahead(const struct spec_case *c, const struct program *p)
{
    const struct program_spec *spec = &c->spec;
    int tied = spec->units[spec->unit_count - 1].tied >= 0;
    for (int i = 0; i < p->instr_count; i++) {
        int live = 0;
        for (int b = 0; b < p->buffer_count; b++) {
            const struct buffer *buf = &p->buffers[b];
            bool gathered = buf->carried && buf->category == CATEGORY_IN_FLIGHT;
            for (int k = 0; k < p->instr_count && !gathered && !buf->persistent; k++) {
                const struct operand *o = program_operand(&p->instrs[k], ROLE_PARAM);
                gathered = p->instrs[k].op == OP_GATHER && o != NULL && o->buffer == b;
            }
            live += gathered && buffer_live_at(buf, i);
        }
        assert_true(live <= spec->prefetch + 2 + tied);
    }
}

/* ---- tests ---- */

static void check_order(const struct spec_case *c, const struct program *p, bool placed)
{
    for (int rule = ORDER_STREAMS; rule <= ORDER_THREAD; rule++) {
        int with = -1, race = program_first_race(p, (enum order_rule)rule, placed, &with);
        if (race < 0)
            continue;
        print_error("rule %d, placed %d, program %d: %d (%s %d) may meet %d (%s %d)\n  %s\n", rule,
                    placed, (int)p->kind, race, program_op_name(p->instrs[race].op),
                    p->instrs[race].unit, with, program_op_name(p->instrs[with].op),
                    p->instrs[with].unit, spec_text(c));
        fail();
    }
}

static void b31_b49_every_value_that_is_read_is_the_right_one(void **state)
{
    static struct spec_case c;
    uint64_t random = test_seed();
    (void)state;
    for (int i = 0; i < PROGRAMS; i++) {
        struct plan plan = {0};
        struct account account;
        spec_random(&c, &random);
        assert_ok(plan_build(&plan, &account, &c.spec));
        check_shared_are_the_same(&plan);
        for (int k = 0; k < PROGRAM_KINDS; k++) {
            check_run(&c, &plan.programs[k]);
            check_intervals(&c, &plan.programs[k]);
        }
        plan_release(&plan);
    }
}

static void conflicting_accesses_are_ordered_on_streams_and_in_one_thread(void **state)
{
    static struct spec_case c;
    uint64_t random = test_seed();
    (void)state;
    for (int i = 0; i < PROGRAMS; i++) {
        struct plan plan = {0};
        struct account account;
        spec_random(&c, &random);
        for (int k = 0; k < PROGRAM_KINDS; k++) {
            assert_ok(program_build(&plan.programs[k], (enum program_kind)k, &c.spec));
            check_order(&c, &plan.programs[k], false);
        }
        assert_ok(plan_build(&plan, &account, &c.spec));
        for (int k = 0; k < PROGRAM_KINDS; k++)
            check_order(&c, &plan.programs[k], true);
        plan_release(&plan);
    }
}

/* The last use by @stream of memory that buffer @fresh gets, of other buffers that come and go,
 * before instruction @index; -1: none. By a look at all of them. */
static int last_use_of_memory(const struct program *p, int fresh, int index,
                              enum program_stream stream)
{
    const struct buffer *f = &p->buffers[fresh];
    for (int i = index - 1; i >= 0; i--)
        for (int k = 0; p->instrs[i].stream == stream && k < p->instrs[i].operand_count; k++) {
            int other = p->instrs[i].operands[k].buffer;
            const struct buffer *b = &p->buffers[other];
            if (other != fresh && !b->persistent && f->offset < b->offset + b->bytes &&
                b->offset < f->offset + f->bytes)
                return i;
        }
    return -1;
}

/* What placing adds to the waits is that, neither less nor more. */
static void a_first_use_waits_for_the_last_uses_of_its_memory(void **state)
{
    static struct spec_case c;
    uint64_t random = test_seed();
    (void)state;
    for (int round = 0; round < PROGRAMS; round++) {
        struct plan plan = {0};
        struct account account;
        spec_random(&c, &random);
        assert_ok(plan_build(&plan, &account, &c.spec));
        for (int n = 0; n < PROGRAM_KINDS; n++) {
            struct program *p = &plan.programs[n];
            int(*placed)[PROGRAM_STREAMS] = NULL;
            assert_ok(mem_alloc(&placed, sizeof *placed * (size_t)p->instr_count));
            for (int i = 0; i < p->instr_count; i++)
                memcpy(placed[i], p->instrs[i].wait, sizeof placed[i]);
            assert_ok(program_link(p, false));
            for (int i = 0; i < p->instr_count; i++)
                for (int s = 0; s < PROGRAM_STREAMS; s++) {
                    int want = p->instrs[i].wait[s];
                    for (int k = 0; k < p->instrs[i].operand_count; k++) {
                        int b = p->instrs[i].operands[k].buffer;
                        int last = -1;
                        if (!p->buffers[b].persistent && p->buffers[b].first == i)
                            last = last_use_of_memory(p, b, i, (enum program_stream)s);
                        want = last > want ? last : want;
                    }
                    assert_int_equal(placed[i][s], want);
                }
            mem_free(&placed);
        }
        plan_release(&plan);
    }
}

/* The first block's REDUCE is under way then, and the tables' own can only begin behind theirs. */
static void a_tables_backward_waits_for_no_reduction_of_the_last_blocks(void **state)
{
    static struct spec_case c;
    (void)state;
    for (int way = 0; way < 8; way++)
        for (int rows = 512; rows <= 4096; rows += 512) {
            int stage = way % 4, by_rows = way / 4;
            struct plan plan = {0};
            struct account account;
            struct spec_sizes sizes = spec_bert_large;
            int tables = 0, read[2] = {-1, -1}; /* the last BACKWARDs that read parameters */
            sizes.rows = rows;
            spec_bert(&c, &sizes, DTYPE_BF16, stage, 4);
            if (by_rows)
                spec_by_rows(&c);
            assert_ok(plan_build(&plan, &account, &c.spec));
            const struct program *p = &plan.programs[PROGRAM_STEP];
            for (int i = 0; i < p->instr_count; i++) {
                if (p->instrs[i].op == OP_GATHER && p->instrs[i].flags & FLAG_ROWS)
                    assert_true(p->instrs[i].wait[ON_REDUCE] < read[0]);
                if (p->instrs[i].op != OP_BACKWARD)
                    continue;
                if (program_operand(&p->instrs[i], ROLE_PARAM) == NULL) {
                    assert_true(p->instrs[i].wait[ON_REDUCE] < read[0]);
                    tables++;
                } else {
                    read[0] = read[1];
                    read[1] = i;
                }
            }
            assert_int_equal(tables, c.parts);
            plan_release(&plan);
        }
}

/* Nothing else is on its way for the look-up of a table: it waits for updates of the table, and its
 * REDUCE for it alone. */
static void a_tables_forward_waits_for_no_other_collective(void **state)
{
    static struct spec_case c;
    (void)state;
    for (int stage = 1; stage < 4; stage++)
        for (int late = 0; late < 2; late++) {
            struct plan plan = {0};
            struct account account;
            int tables = 0, reduces = 0;
            spec_bert(&c, &spec_bert_large, DTYPE_BF16, stage, 4);
            spec_by_rows(&c);
            c.spec.update = late ? UPDATE_LATE : UPDATE_EARLY;
            assert_ok(plan_build(&plan, &account, &c.spec));
            const struct program *p = &plan.programs[PROGRAM_STEP];
            for (int i = 0; i < p->instr_count && p->instrs[i].op != OP_BACKWARD; i++) {
                const struct instr *in = &p->instrs[i];
                if (in->op == OP_FORWARD && in->unit < c.parts) {
                    assert_true(in->wait[ON_GATHER] == -1 && in->wait[ON_REDUCE] == -1);
                    int update = in->wait[ON_UPDATE];
                    assert_true((update >= 0) == late);
                    if (late)
                        assert_int_equal(p->instrs[update].unit, in->unit);
                    tables++;
                } else if (in->op == OP_REDUCE) {
                    assert_true(in->wait[ON_GATHER] == -1 && in->wait[ON_REDUCE] == -1);
                    assert_int_equal(p->instrs[in->wait[ON_COMPUTE]].unit, c.parts - 1);
                    reduces++;
                }
            }
            assert_true(tables == c.parts && reduces == 1);
            plan_release(&plan);
        }
}

/* The checker sees a missing wait: of those of collectives nearly all are needed, and all of a
 * look-up for other ranks and of what brings them its rows. */
static void a_wait_that_is_taken_away_is_found(void **state)
{
    static struct spec_case c;
    struct program p = {0};
    int with;
    (void)state;
    for (int by_rows = 0; by_rows < 2; by_rows++) {
        int found = 0, dropped = 0, of_rows = 0;
        spec_bert(&c, &(struct spec_sizes){4, 128, 256, 2, 300, 64, 16, 20000}, DTYPE_F32, 3, 4);
        c.spec.micro_batches = 2;
        if (by_rows)
            spec_by_rows(&c);
        assert_ok(program_build(&p, PROGRAM_STEP, &c.spec));
        for (int i = 0; i < p.instr_count; i++)
            for (int s = 0; s < PROGRAM_STREAMS; s++) {
                struct instr *in = &p.instrs[i];
                int kept = in->wait[s];
                if (kept < 0 || s == (int)in->stream)
                    continue;
                /* The second micro-batch is behind the first. */
                bool needed = program_operand(in, ROLE_ROWS) != NULL && in->op != OP_BACKWARD &&
                              (in->op != OP_FORWARD || in->micro_batch == 0);
                dropped++;
                in->wait[s] = -1;
                bool race = program_first_race(&p, ORDER_STREAMS, false, &with) >= 0;
                in->wait[s] = kept;
                found += race;
                of_rows += needed;
                assert_true(race || !needed);
            }
        print_message("%d of %d missing waits are races\n", found, dropped);
        assert_true(dropped > 40 && found > dropped / 2);
        assert_true(by_rows ? of_rows >= c.parts + 2 : of_rows == 0);
    }
    program_release(&p);
}

static void collectives_are_those_of_the_stage(void **state)
{
    static struct spec_case c;
    uint64_t random = test_seed();
    (void)state;
    for (int i = 0; i < PROGRAMS; i++) {
        struct program p = {0};
        spec_random(&c, &random);
        for (int k = 0; k < PROGRAM_KINDS; k++) {
            assert_ok(program_build(&p, (enum program_kind)k, &c.spec));
            check_collectives(&c, &p);
        }
        program_release(&p);
    }
}

static void at_most_prefetch_and_two_units_are_gathered_at_once(void **state)
{
    static struct spec_case c;
    uint64_t random = test_seed();
    (void)state;
    for (int i = 0; i < PROGRAMS; i++) {
        struct program p = {0};
        spec_random(&c, &random);
        if (c.spec.zero_stage != 3)
            continue;
        assert_ok(program_build(&p, PROGRAM_STEP, &c.spec));
        check_gathered_ahead(&c, &p);
        assert_ok(program_build(&p, PROGRAM_EVALUATE, &c.spec));
        check_gathered_ahead(&c, &p);
        program_release(&p);
    }
}

/* No gradient of a whole table but at stage 0, where it is the reduced one, nor from stage 1 on the
 * table whole; and the rows, once a direction. */
static void tables_by_rows_are_nowhere_whole_in_a_step(void **state)
{
    static struct spec_case c;
    (void)state;
    for (int stage = 0; stage < 4; stage++)
        for (int micro_batches = 1; micro_batches <= 2; micro_batches++) {
            struct plan plan = {0};
            struct account account;
            size_t rows = 0;
            spec_bert(&c, &spec_bert_large, DTYPE_BF16, stage, 4);
            spec_by_rows(&c);
            c.spec.micro_batches = micro_batches;
            assert_ok(plan_build(&plan, &account, &c.spec));
            const struct program *p = &plan.programs[PROGRAM_STEP];
            for (int i = 0; i < p->buffer_count; i++) {
                const struct buffer *b = &p->buffers[i];
                size_t shard = rounded((size_t)c.units[0].shard_numel * sizeof(float));
                if (b->unit >= c.parts || b->unit < 0 || b->category == CATEGORY_ACTIVATIONS)
                    continue;
                if (b->category == CATEGORY_PARAMETERS)
                    assert_int_equal(b->bytes, unit_bytes_of(&c, b->unit, DTYPE_BF16, stage == 0));
                if (b->persistent)
                    continue;
                if (b->dtype == DTYPE_F32) {
                    assert_int_equal(b->category, CATEGORY_GRADIENTS);
                    assert_true(stage == 0 ? b->bytes > shard : b->bytes <= shard);
                } else {
                    assert_true(b->category == CATEGORY_IN_FLIGHT && b->micro_batch >= 0);
                    rows += b->bytes;
                }
            }
            assert_int_equal(rows, micro_batches * (stage == 0 ? 1 : 2) * 4 * c.train_slots[0]);
            plan_release(&plan);
        }
}

static size_t peak(struct spec_case *c, int micro_batches, enum category category)
{
    struct plan plan = {0};
    struct account account;
    c->spec.micro_batches = micro_batches;
    assert_ok(plan_build(&plan, &account, &c->spec));
    plan_release(&plan);
    return category == CATEGORY_COUNT ? account.live_peak_bytes : account.own_max[category];
}

static void b46_b47_memory_does_not_grow_with_accumulation_at_stages_2_and_3(void **state)
{
    static struct spec_case c;
    (void)state;
    for (int stage = 2; stage <= 3; stage++) {
        spec_bert(&c, &spec_bert_base, DTYPE_BF16, stage, 8);
        size_t two = peak(&c, 2, CATEGORY_COUNT);
        size_t three = peak(&c, 3, CATEGORY_COUNT);
        assert_int_equal(peak(&c, 8, CATEGORY_COUNT), three);
        size_t one = peak(&c, 1, CATEGORY_COUNT), shards = peak(&c, 1, CATEGORY_GRADIENTS);
        print_message("stage %d: %zu bytes without accumulation, %zu and %zu with 2 and 3 "
                      "micro-batches; gradients %zu\n",
                      stage, one, two, three, shards);
        /* All gradient shards live from the second micro-batch on, and a temporary; no more. */
        assert_true(three == two && two <= one + shards + shards / 8);
    }
    spec_bert(&c, &spec_bert_base, DTYPE_BF16, 1, 8);
    assert_true(peak(&c, 2, CATEGORY_GRADIENTS) > 4 * (size_t)100000000);
}

static void more_prefetch_than_uses_gathers_all_once_and_ahead(void **state)
{
    static struct spec_case c;
    struct program p = {0};
    (void)state;
    spec_bert(&c, &(struct spec_sizes){2, 8, 8, 1, 20, 8, 8, 1000}, DTYPE_F32, 3, 2);
    c.spec.prefetch = 1000;
    c.spec.update = UPDATE_EARLY;
    assert_ok(program_build(&p, PROGRAM_PROLOGUE, &c.spec));
    assert_int_equal(p.instr_count, c.spec.unit_count); /* the next use of one needs a new gather */
    assert_ok(program_build(&p, PROGRAM_STEP, &c.spec));
    check_run(&c, &p);
    check_intervals(&c, &p);
    program_release(&p);
}

static void operands_are_found_by_role(void **state)
{
    struct instr in = {
        .operand_count = 2,
        .operands = {{ROLE_PARAM, ACCESS_READ, false, 7}, {ROLE_GRAD, ACCESS_WRITE, false, 9}}};
    (void)state;
    assert_int_equal(program_operand(&in, ROLE_GRAD)->buffer, 9);
    assert_null(program_operand(&in, ROLE_SHARD));
}

static void bad_specs_are_errors(void **state)
{
    static struct spec_case c;
    static const struct spec_sizes sizes = {1, 8, 8, 1, 20, 8, 8, 1000};
    struct program p = {0};
    (void)state;
#define REFUSED(field, value, text)                                                                \
    do {                                                                                           \
        spec_bert(&c, &sizes, DTYPE_F32, 3, 2);                                                    \
        c.field = value;                                                                           \
        assert_fails(program_build(&p, PROGRAM_STEP, &c.spec), ST_INVALID, text);                  \
        assert_null(p.instrs);                                                                     \
    } while (0)
    REFUSED(spec.zero_stage, 4, "zero stage 4: expected 0 to 3");
    REFUSED(spec.zero_stage, -1, "zero stage -1");
    REFUSED(spec.world_size, 0, "world size 0");
    REFUSED(spec.micro_batches, 0, "micro-batches 0");
    REFUSED(spec.prefetch, -1, "prefetch -1");
    REFUSED(spec.unit_count, 0, "units 0");
    REFUSED(spec.reduce, REDUCE_PER_STEP, "would hold full gradients; use per_micro_batch");
    REFUSED(spec.slot_count, 1, "unit 1: slots 0 to 1 of 1");
    REFUSED(units[2].shard_numel, 0, "unit 2: shards of 0 elements");
    REFUSED(units[2].shard_numel, INT64_MAX / 4, "unit 2: shards of");
    REFUSED(units[3].tied, 3, "unit 3 is tied to unit 3");
    REFUSED(units[3].tied, 4, "unit 3 is tied to unit 4");
    REFUSED(units[0].backward_reads_input, true, "unit 0 has no input to keep");
    REFUSED(units[2].act_in, 0, "units 1 and 2 both read slot 0");
    REFUSED(units[1].by_rows, true, "unit 1 is moved by rows, and no look-up table");
    spec_bert(&c, &sizes, DTYPE_F32, 3, 2);
    spec_by_rows(&c);
    c.units[2].tied = 0;
    assert_fails(program_build(&p, PROGRAM_STEP, &c.spec), ST_INVALID,
                 "unit 2 is tied to unit 0, which is moved by rows");
    spec_bert(&c, &(struct spec_sizes){1, 8, 8, 1, 20, 8, 8, 80}, DTYPE_F32, 1, 2);
    spec_by_rows(&c);
    c.units[0].by_rows = false;
    assert_fails(program_build(&p, PROGRAM_STEP, &c.spec), ST_INVALID,
                 "units 0 and 1 write slot 0, one of them by rows");
#undef REFUSED
    spec_bert(&c, &sizes, DTYPE_F32, 2, 2);
    c.spec.reduce = REDUCE_PER_STEP;
    assert_fails(program_build(&p, PROGRAM_STEP, &c.spec), ST_INVALID, "zero stage 2");
}

static void a_failed_allocation_leaves_nothing_behind(void **state)
{
    static struct spec_case c;
    int64_t before = mem_live_bytes();
    (void)state;
    spec_bert(&c, &(struct spec_sizes){2, 8, 8, 1, 20, 8, 8, 1000}, DTYPE_BF16, 3, 2);
    for (int64_t k = 1;; k++) {
        struct plan plan = {0};
        struct account account;
        mem_fail_at(k);
        enum status st = plan_build(&plan, &account, &c.spec);
        mem_fail_at(0);
        plan_release(&plan);
        assert_int_equal(mem_live_bytes(), before);
        if (st == ST_OK)
            break;
        assert_int_equal(st, ST_MEMORY);
        assert_true(k < 1000);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(b31_b49_every_value_that_is_read_is_the_right_one),
        cmocka_unit_test(conflicting_accesses_are_ordered_on_streams_and_in_one_thread),
        cmocka_unit_test(a_first_use_waits_for_the_last_uses_of_its_memory),
        cmocka_unit_test(a_tables_backward_waits_for_no_reduction_of_the_last_blocks),
        cmocka_unit_test(a_tables_forward_waits_for_no_other_collective),
        cmocka_unit_test(a_wait_that_is_taken_away_is_found),
        cmocka_unit_test(collectives_are_those_of_the_stage),
        cmocka_unit_test(at_most_prefetch_and_two_units_are_gathered_at_once),
        cmocka_unit_test(tables_by_rows_are_nowhere_whole_in_a_step),
        cmocka_unit_test(b46_b47_memory_does_not_grow_with_accumulation_at_stages_2_and_3),
        cmocka_unit_test(more_prefetch_than_uses_gathers_all_once_and_ahead),
        cmocka_unit_test(operands_are_found_by_role),
        cmocka_unit_test(bad_specs_are_errors),
        cmocka_unit_test(a_failed_allocation_leaves_nothing_behind),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
