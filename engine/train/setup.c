#include "engine/train/setup.h"

#include <string.h>

#include "comm/comm.h"

enum { UPDATE_WORKSPACE_BYTES = 64 * 1024 /* squared_norm's sums need less */ };

enum status setup_layout(struct layout *layout, struct layout_param **params, const struct model *m,
                         int world_size)
{
    struct layout_param *list = NULL;
    TRY(mem_alloc(&list, sizeof *list * (size_t)m->param_count));
    *params = list;
    for (int i = 0; i < m->param_count; i++) {
        const struct model_param *p = &m->params[i];
        list[i] = (struct layout_param){.name = p->name,
                                        .unit = p->unit,
                                        .first = m->param_offset[i],
                                        .numel = model_param_numel(p),
                                        .decay = p->decay,
                                        .frozen = p->frozen};
    }
    return layout_build(layout, list, m->param_count, world_size, LAYOUT_ALIGN);
}

static void size_batch(struct batch_layout *l, const struct model *m,
                       const struct run_config *config, int64_t sequences, int64_t rows)
{
    *l = (struct batch_layout){
        .rows = deal_length_class(rows > 0 ? rows : sequences * config->data.max_length),
        .sequences = sequences,
        .positions = config->model.max_positions,
        .max_length = (int32_t)config->data.max_length,
        .padded_length = config->data.padded ? config->data.max_length : 0,
        .sep_type = m->dims.types > 1 ? 1 : 0,
    };
    batch_layout_init(l);
}

static size_t row_bytes(const struct model_slot *slot)
{
    return (size_t)slot->columns * dtype_bytes(slot->dtype);
}

static void size_units(const struct setup *s, struct unit_bytes *units, size_t *slots,
                       const struct batch_layout *l)
{
    const struct model *m = &s->model;
    struct micro_dims d = {l->rows, l->sequences, l->max_length};
    for (int i = 0; i < m->unit_count; i++) {
        const struct model_unit *u = &m->units[i];
        units[i].saved = u->saved_bytes(m, u, d);
        units[i].forward_scratch = u->forward_scratch_bytes(m, u, d);
        units[i].backward_scratch = u->backward_scratch_bytes(m, u, d);
    }
    for (int i = 0; i < m->slot_count; i++)
        slots[i] = (size_t)l->rows * row_bytes(&m->slots[i]);
}

/* A look-up table: all units that write @slot. */
struct table {
    bool only_rows; /* they are look-up tables, and no unit is tied to one */
    double numel_trained;
};

static struct table table_of(const struct setup *s, int slot)
{
    const struct model *m = &s->model;
    struct table table = {.only_rows = true};
    for (int u = 0; u < m->unit_count; u++) {
        if (m->units[u].act_out != slot)
            continue;
        table.only_rows = table.only_rows && model_only_looked_up(m, u);
        if (!s->units[u].frozen)
            table.numel_trained += (double)model_unit_numel(m, u);
    }
    return table;
}

/*
 * Does a table move by rows? A rank then sends as much as its rows of the slot and of its gradient
 * to each of the others, for each micro-batch; else its part of the table's gradient and, once a
 * step at stages 1 and 2, of the parameters. Stage 3 sends these as often or more, and stage 0 sums
 * in fp32 in their place, and of rows those of the gradient alone. So where rows are less at stages
 * 1 and 2 they are less at all; and all choose alike, for they have the same losses to the bit. For
 * that, too, the rows are the data's mean: those of a run's own steps would be others when it goes
 * on with more of them.
 */
static bool moves_by_rows(const struct setup *s, const struct run_config *config, int slot,
                          int zero_stage, double mean_rows)
{
    struct table table = table_of(s, slot);
    double accum = (double)config->train.grad_accum, reductions = accum;
    if (program_reduce_policy(config->train.reduce, zero_stage) == REDUCE_PER_STEP)
        reductions = 1; /* the gradient is summed up first */
    double of_rank = mean_rows > 0 ? mean_rows : (double)s->train_batch.rows;
    double rows =
        2 * accum * of_rank * s->layout.world_size * (double)row_bytes(&s->model.slots[slot]);
    double whole = table.numel_trained *
                   (reductions * (double)sizeof(float) + (double)dtype_bytes(s->model.param_dtype));
    if (s->layout.world_size == 1 || !table.only_rows || table.numel_trained == 0)
        return false;
    return config->train.tables == TABLES_ROWS ||
           (config->train.tables == TABLES_AUTO && rows < whole);
}

/* And then a rank's batch has all ranks' tokens. */
static void choose_rows(struct setup *s, const struct run_config *config, int zero_stage,
                        double mean_rows)
{
    const struct model *m = &s->model;
    for (int u = 0; u < m->unit_count; u++) {
        s->units[u].by_rows = moves_by_rows(s, config, m->units[u].act_out, zero_stage, mean_rows);
        if (s->units[u].by_rows)
            s->train_batch.ranks = s->layout.world_size;
    }
    batch_layout_init(&s->train_batch);
}

static enum status list_units(struct setup *s)
{
    const struct model *m = &s->model;
    size_t units = (size_t)m->unit_count, slots = (size_t)m->slot_count;
    TRY(mem_alloc(&s->units, sizeof *s->units * units));
    TRY(mem_alloc(&s->train_bytes, sizeof *s->train_bytes * units));
    TRY(mem_alloc(&s->eval_bytes, sizeof *s->eval_bytes * units));
    TRY(mem_alloc(&s->train_slots, sizeof *s->train_slots * slots));
    TRY(mem_alloc(&s->eval_slots, sizeof *s->eval_slots * slots));
    for (int i = 0; i < m->unit_count; i++) {
        const struct model_unit *u = &m->units[i];
        s->units[i] = (struct program_unit){
            .shard_numel = s->layout.units[i].shard_numel,
            .frozen = s->layout.units[i].frozen,
            .act_in = u->act_in,
            .act_out = u->act_out,
            .tied = u->tied,
            .backward_reads_params = u->backward_reads_params,
            .backward_reads_input = u->backward_reads_input,
            .recompute = u->recompute,
        };
    }
    size_units(s, s->train_bytes, s->train_slots, &s->train_batch);
    size_units(s, s->eval_bytes, s->eval_slots, &s->eval_batch);
    return ST_OK;
}

static struct op_limits op_limits(const struct setup *s, const struct run_config *config,
                                  int world_size)
{
    const struct batch_layout *t = &s->train_batch, *e = &s->eval_batch;
    int64_t vocab_rows = 0; /* of the largest table part */
    for (int i = 0; i < s->model.param_count; i++)
        if (s->model.params[i].dims == 2 && s->model.params[i].shape[0] > vocab_rows)
            vocab_rows = s->model.params[i].shape[0];
    return (struct op_limits){
        .rows = t->rows > e->rows ? t->rows : e->rows,
        .channels = config->model.hidden,
        .ffn = config->model.ffn,
        .heads = config->model.heads,
        .sequences = t->sequences > e->sequences ? t->sequences : e->sequences,
        .max_length = config->data.max_length,
        .vocab_rows = vocab_rows,
        .world_size = world_size,
    };
}

/* What a rank gets of a unit's reduce_scatter: its shard of the gradient, or its rows. */
static int64_t reduced_numel(const struct setup *s, int unit, int zero_stage)
{
    const struct model_slot *slot = &s->model.slots[s->units[unit].act_out];
    if (s->units[unit].by_rows)
        return zero_stage > 0 ? s->train_batch.rows * slot->columns : 0;
    return s->layout.units[unit].frozen ? 0 : s->layout.units[unit].shard_numel;
}

/* For the largest reduce_scatter of a step. */
static size_t staging_bytes(const struct setup *s, const struct run_config *config, int world_size,
                            int zero_stage)
{
    int64_t largest = 0;
    for (int u = 0; u < s->layout.unit_count; u++) {
        int64_t numel = reduced_numel(s, u, zero_stage);
        largest = numel > largest ? numel : largest;
    }
    return comm_staging_bytes(config->train.comm, world_size, largest);
}

enum status setup_init(struct setup *s, const struct run_config *config,
                       const struct device *device, int world_size, int zero_stage,
                       struct setup_rows rows)
{
    memset(s, 0, sizeof *s);
    enum status st = ST_OK;
    TRY_GOTO(st, out, model_open(&s->model, config, device->param_dtype));
    TRY_GOTO(st, out, setup_layout(&s->layout, &s->params, &s->model, world_size));
    size_batch(&s->train_batch, &s->model, config, config->train.micro_batch, rows.train);
    size_batch(&s->eval_batch, &s->model, config, config->eval.micro_batch, rows.eval);
    struct op_limits limits = op_limits(s, config, world_size);
    TRY_GOTO(st, out, list_units(s));
    choose_rows(s, config, zero_stage, rows.train_mean);
    s->spec = (struct program_spec){
        .units = s->units,
        .unit_count = s->model.unit_count,
        .slot_count = s->model.slot_count,
        .zero_stage = zero_stage,
        .world_size = world_size,
        .micro_batches = (int)config->train.grad_accum,
        .prefetch = (int)config->train.prefetch,
        .recompute = config->train.recompute == RECOMPUTE_BLOCK,
        .reduce = config->train.reduce,
        .update = config->train.update,
        .param_dtype = device->param_dtype,
        .train = {s->train_bytes, s->train_slots},
        .evaluate = {s->eval_bytes, s->eval_slots},
        .batch_bytes = s->train_batch.micro_bytes * (size_t)config->train.grad_accum,
        .evaluate_batch_bytes = s->eval_batch.micro_bytes,
        .state_bytes = sizeof(struct step_state),
        .report_bytes = sizeof(struct step_report),
        .workspace_bytes = op_workspace_bytes(device, &limits),
        .update_workspace_bytes = UPDATE_WORKSPACE_BYTES,
        .side_workspace_bytes = op_side_workspace_bytes(device, &limits),
        .staging_bytes = staging_bytes(s, config, world_size, zero_stage),
    };
out:
    if (st != ST_OK)
        setup_release(s);
    return st;
}

void setup_release(struct setup *s)
{
    model_release(&s->model);
    mem_free(&s->params);
    mem_free(&s->units);
    mem_free(&s->train_bytes);
    mem_free(&s->eval_bytes);
    mem_free(&s->train_slots);
    mem_free(&s->eval_slots);
    memset(s, 0, sizeof *s);
}
