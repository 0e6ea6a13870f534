#include <stddef.h>

#include "engine/train/executor_turn.h"

_Static_assert(sizeof(struct step_report) % 4 == 0, "reports travel as 32-bit words");

static int64_t shard_numel(const struct turn *t, const struct instr *in)
{
    return t->ex->layout->units[in->unit].shard_numel;
}

/* Of each rank: the rows of the slot, or of its gradient, as many as the fullest has. */
static enum status move_rows(struct turn *t, const struct instr *in, struct stream *s,
                             struct event *done)
{
    const struct model *m = t->ex->model;
    const struct model_slot *slot = &m->slots[m->units[in->unit].act_out];
    struct token_rows all = t->micro[in->micro_batch].all;
    int64_t numel = div_exact(all.rows, all.batches) * slot->columns;
    ASSERT(all.batches == t->ex->comm->world_size);
    if (in->op == OP_REDUCE)
        return comm_reduce_scatter(t->ex->comm, s, turn_operand(t, in, ROLE_ACT_OUT),
                                   turn_operand(t, in, ROLE_ROWS), numel, slot->dtype, done);
    return comm_all_gather(t->ex->comm, s, turn_operand(t, in, ROLE_ROWS),
                           turn_operand(t, in, ROLE_DACT_OUT), numel, slot->dtype, done);
}

static enum status run_gather(struct turn *t, const struct instr *in, struct stream *s,
                              struct event *done)
{
    bool gradient = in->flags & FLAG_GRADIENT;
    if (in->flags & FLAG_ROWS)
        return move_rows(t, in, s, done);
    return comm_all_gather(t->ex->comm, s, turn_operand(t, in, gradient ? ROLE_GRAD : ROLE_PARAM),
                           turn_operand(t, in, gradient ? ROLE_GRAD_SHARD : ROLE_SHARD),
                           shard_numel(t, in), gradient ? DTYPE_F32 : t->ex->device->param_dtype,
                           done);
}

static enum status run_reduce(struct turn *t, const struct instr *in, struct stream *s,
                              struct event *done)
{
    if (in->flags & FLAG_ROWS)
        return move_rows(t, in, s, done);
    return comm_reduce_scatter(t->ex->comm, s, turn_operand(t, in, ROLE_REDUCED),
                               turn_operand(t, in, ROLE_GRAD), shard_numel(t, in), DTYPE_F32, done);
}

/* What of a flat parameter or gradient a unit reads or writes: all, or this rank's shard. */
struct flat_range {
    void *data; /* NULL: nothing */
    int64_t first, numel;
};

static struct flat_range flat_range(const struct turn *t, const struct instr *in, int unit,
                                    enum role whole, enum role shard)
{
    const struct layout_unit *u = &t->ex->layout->units[unit];
    if (program_operand(in, whole) == NULL && program_operand(in, shard) != NULL)
        return (struct flat_range){turn_operand(t, in, shard), t->ex->comm->rank * u->shard_numel,
                                   u->shard_numel};
    return (struct flat_range){turn_operand(t, in, whole), 0, u->padded_numel};
}

/* BACKWARD writes a unit's gradient up to its last tensor; the padding of the shards behind it must
 * not carry old bytes into sums and norms. */
static enum status clear_padding(struct turn *t, int unit, const struct flat_range *r,
                                 struct stream *s)
{
    const struct layout_unit *u = &t->ex->layout->units[unit];
    int64_t from = u->numel > r->first ? u->numel : r->first, end = r->first + r->numel;
    float *grads = r->data;
    if (grads == NULL || from >= end)
        return ST_OK;
    return device_fill(s, grads + (from - r->first), 0, sizeof *grads * (size_t)(end - from));
}

/* One rank has made a table's gradient in one BACKWARD: it is known which rows are zeros. */
static bool rows_are_known(const struct executor *ex, int unit)
{
    return model_only_looked_up(ex->model, unit) && ex->comm->world_size == 1 &&
           ex->micro_batches == 1;
}

/* What runs beside the products of a pass, which may so take another way to the same bits. */
static enum status begin_pass(const struct turn *t, const struct instr *in, struct stream *s)
{
    double rows = (double)t->micro[in->micro_batch].rows;
    struct unit_work work = model_unit_work(t->ex->model, in->unit, (struct batch_size){rows, 0.0});
    const struct pass_work *pass = in->op == OP_BACKWARD ? &work.backward : &work.forward;
    bool known = t->ex->beside != NULL && t->program->kind == PROGRAM_STEP;
    return op_pass_begin(s, pass->product_flops,
                         known ? t->ex->beside[in - t->program->instrs] : 0);
}

static enum status run_unit(struct turn *t, const struct instr *in, struct stream *s)
{
    const struct model *model = t->ex->model;
    const struct model_unit *unit = &model->units[in->unit];
    struct flat_range params = flat_range(t, in, in->unit, ROLE_PARAM, ROLE_SHARD);
    struct flat_range own = flat_range(t, in, in->unit, ROLE_GRAD, ROLE_GRAD_SHARD);
    const struct flat_range *part = in->op == OP_BACKWARD ? &own : &params;
    struct unit_call call = {
        .stream = s,
        .sequences = &t->micro[in->micro_batch],
        .state = turn_operand(t, in, ROLE_STATE),
        .report = turn_operand(t, in, ROLE_REPORT),
        .params = params.data,
        .grads = own.data,
        .all_rows = turn_operand(t, in, ROLE_ROWS),
        .part_first = part->first,
        .part_numel = part->numel,
        .grads_add = in->flags & FLAG_ADD,
        .grads_mark = rows_are_known(t->ex, in->unit),
        .tied_params = turn_operand(t, in, ROLE_PARAM_TIED),
        .tied_grads = turn_operand(t, in, ROLE_GRAD_TIED),
        .tied_grads_add = in->flags & FLAG_ADD_TIED,
        .act_in = turn_operand(t, in, ROLE_ACT_IN),
        .act_out = turn_operand(t, in, ROLE_ACT_OUT),
        .dact_in = turn_operand(t, in, ROLE_DACT_IN),
        .dact_out = turn_operand(t, in, ROLE_DACT_OUT),
        .saved = turn_operand(t, in, ROLE_SAVED),
        .scratch = turn_operand(t, in, ROLE_SCRATCH),
        .training = in->flags & FLAG_TRAINING,
    };
    TRY(begin_pass(t, in, s));
    if (in->op != OP_BACKWARD)
        return unit->forward(model, unit, &call);
    if (!call.grads_add)
        TRY(clear_padding(t, in->unit, &own, s));
    if (!call.tied_grads_add && unit->tied >= 0) {
        struct flat_range tied = flat_range(t, in, unit->tied, ROLE_GRAD_TIED, ROLE_GRAD_TIED);
        TRY(clear_padding(t, unit->tied, &tied, s));
    }
    TRY(unit->backward(model, unit, &call));
    return op_finish_sums(s);
}

static enum status run_norm(struct turn *t, const struct instr *in, struct stream *s)
{
    struct executor *ex = t->ex;
    const struct model_param *table = &ex->model->params[ex->model->units[in->unit].first_param];
    void *shard = turn_operand(t, in, ROLE_GRAD_SHARD);
    struct step_report *report = turn_operand(t, in, ROLE_REPORT);
    if (!rows_are_known(ex, in->unit))
        return op_squared_norm(s, report, tensor_1d(shard, DTYPE_F32, shard_numel(t, in)));
    return op_squared_norm_rows(s, report,
                                tensor_2d(shard, DTYPE_F32, table->shape[0], table->shape[1]),
                                t->micro, model_first_row(ex->model, in->unit));
}

static enum status run_agree(struct turn *t, const struct instr *in, struct stream *s,
                             struct event *done)
{
    struct executor *ex = t->ex;
    struct step_report *reports = turn_operand(t, in, ROLE_REPORTS);
    if (ex->comm->world_size == 1)
        return op_agree(s, turn_operand(t, in, ROLE_STATE), turn_operand(t, in, ROLE_REPORT), 1,
                        &ex->hyper, ex->mail);
    TRY(comm_all_gather(ex->comm, s, reports, turn_operand(t, in, ROLE_REPORT), sizeof *reports / 4,
                        DTYPE_I32, done));
    TRY(stream_wait(s, done));
    return op_agree(s, turn_operand(t, in, ROLE_STATE), reports, ex->comm->world_size, &ex->hyper,
                    ex->mail);
}

static enum status run_update(struct turn *t, const struct instr *in, struct stream *s)
{
    struct executor *ex = t->ex;
    const struct unit_ranges *r = &ex->ranges[in->unit];
    int64_t n = r->ranges[r->count - 1].first + r->ranges[r->count - 1].count;
    void *grad = turn_operand(t, in, ROLE_GRAD);
    if (grad == NULL)
        grad = turn_operand(t, in, ROLE_GRAD_SHARD);
    const struct model_param *first = &ex->model->params[ex->model->units[in->unit].first_param];
    return op_adamw(s, tensor_1d(turn_operand(t, in, ROLE_SHARD), ex->device->param_dtype, n),
                    tensor_1d(turn_operand(t, in, ROLE_MASTER), DTYPE_U16, n),
                    tensor_1d(turn_operand(t, in, ROLE_ADAM_M), DTYPE_F32, n),
                    tensor_1d(turn_operand(t, in, ROLE_ADAM_V), DTYPE_F32, n),
                    tensor_1d(grad, DTYPE_F32, n), r->ranges, r->count,
                    rows_are_known(ex, in->unit) ? first->shape[1] : 0,
                    turn_operand(t, in, ROLE_STATE), &ex->hyper);
}

/* In a prologue: the gradient of a unit is zero, or (no unit) UPDATE is to leave all as it is. */
static enum status run_clear(struct turn *t, const struct instr *in, struct stream *s)
{
    const struct operand *grad = program_operand(in, ROLE_GRAD);
    char *state = turn_operand(t, in, ROLE_STATE);
    if (grad != NULL)
        return device_fill(s, turn_operand(t, in, ROLE_GRAD), 0,
                           t->program->buffers[grad->buffer].bytes);
    return device_fill(s, state + offsetof(struct step_state, skip), 0xFF, sizeof(int32_t));
}

static enum status run_collect(struct turn *t, const struct instr *in, struct stream *s,
                               struct event *done)
{
    struct executor *ex = t->ex;
    int64_t numel = executor_collect_numel(ex);
    float *logits = turn_operand(t, in, ROLE_COLLECTED);
    struct step_report *reports = turn_operand(t, in, ROLE_REPORTS);
    TRY(comm_all_gather(ex->comm, s, logits, turn_operand(t, in, ROLE_ACT_OUT), numel, DTYPE_F32,
                        done));
    TRY(comm_all_gather(ex->comm, s, reports, turn_operand(t, in, ROLE_REPORT), sizeof *reports / 4,
                        DTYPE_I32, done));
    TRY(stream_wait(s, done));
    size_t world = (size_t)ex->comm->world_size;
    TRY(device_copy(s, t->collected->logits, logits, sizeof *logits * (size_t)numel * world));
    return device_copy(s, t->collected->reports, reports, sizeof *reports * world);
}

enum status turn_issue(struct turn *t, const struct instr *in, struct stream *s, struct event *done)
{
    struct executor *ex = t->ex;
    int64_t n = in->unit >= 0 ? shard_numel(t, in) : 0;
    switch (in->op) {
    case OP_BEGIN:
        return op_step_begin(s, turn_operand(t, in, ROLE_REPORT), turn_operand(t, in, ROLE_STATE),
                             t->program->kind == PROGRAM_STEP ? ex->mail : NULL);
    case OP_GATHER:
        return run_gather(t, in, s, done);
    case OP_FORWARD:
    case OP_RECOMPUTE:
    case OP_BACKWARD:
        return run_unit(t, in, s);
    case OP_REDUCE:
        return run_reduce(t, in, s, done);
    case OP_ACCUMULATE:
        return op_accumulate(s, tensor_1d(turn_operand(t, in, ROLE_GRAD_SHARD), DTYPE_F32, n),
                             tensor_1d(turn_operand(t, in, ROLE_REDUCED), DTYPE_F32, n), true);
    case OP_NORM:
        return run_norm(t, in, s);
    case OP_AGREE:
        return run_agree(t, in, s, done);
    case OP_UPDATE:
        return run_update(t, in, s);
    case OP_CLEAR:
        return run_clear(t, in, s);
    case OP_COLLECT:
        return run_collect(t, in, s, done);
    case OP_CUT:
    case PROGRAM_OPS:
        break;
    }
    ASSERT(!"known instruction");
    return ST_OK;
}
