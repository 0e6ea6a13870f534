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
        slots[i] = (size_t)l->rows * (size_t)m->slots[i].columns * dtype_bytes(m->slots[i].dtype);
}

/* Is the table that writes a slot reduced by rows? In a step a rank then sends its rows of the
 * slot's gradient, else its part of the table's, to each of the others. Stage 0 sends its part of
 * the sum, too, but all stages choose alike: they have the same losses to the bit. */
static bool moves_by_rows(const struct setup *s, const struct run_config *config, int slot,
                          int zero_stage)
{
    const struct model *m = &s->model;
    double rows = (double)s->train_slots[slot] * s->layout.world_size, table = 0;
    for (int u = 0; u < m->unit_count; u++)
        if (m->units[u].look_up && m->units[u].act_out == slot && !s->units[u].frozen)
            table += (double)model_unit_numel(m, u) * sizeof(float);
    if (program_reduce_policy(config->train.reduce, zero_stage) == REDUCE_PER_STEP)
        rows *= (double)config->train.grad_accum; /* while the table's are summed up first */
    return config->train.tables == TABLES_ROWS ||
           (config->train.tables == TABLES_AUTO && rows < table);
}

/* And then a rank's batch has all ranks' tokens. */
static void choose_rows(struct setup *s, const struct run_config *config, int zero_stage)
{
    const struct model *m = &s->model;
    for (int u = 0; u < m->unit_count; u++) {
        s->units[u].by_rows = s->layout.world_size > 1 && !s->units[u].frozen &&
                              model_only_looked_up(m, u) &&
                              moves_by_rows(s, config, m->units[u].act_out, zero_stage);
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

/* For the largest reduce_scatter of a step. */
static size_t staging_bytes(const struct setup *s, const struct run_config *config, int world_size)
{
    int64_t largest = 0;
    for (int u = 0; u < s->layout.unit_count; u++)
        if (!s->layout.units[u].frozen && !s->units[u].by_rows &&
            s->layout.units[u].shard_numel > largest)
            largest = s->layout.units[u].shard_numel;
    return comm_staging_bytes(config->train.comm, world_size, largest);
}

enum status setup_init(struct setup *s, const struct run_config *config,
                       const struct device *device, int world_size, int zero_stage,
                       int64_t train_rows, int64_t eval_rows)
{
    memset(s, 0, sizeof *s);
    enum status st = ST_OK;
    TRY_GOTO(st, out, model_open(&s->model, config, device->param_dtype));
    TRY_GOTO(st, out, setup_layout(&s->layout, &s->params, &s->model, world_size));
    size_batch(&s->train_batch, &s->model, config, config->train.micro_batch, train_rows);
    size_batch(&s->eval_batch, &s->model, config, config->eval.micro_batch, eval_rows);
    struct op_limits limits = op_limits(s, config, world_size);
    TRY_GOTO(st, out, list_units(s));
    choose_rows(s, config, zero_stage);
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
        .staging_bytes = staging_bytes(s, config, world_size),
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
