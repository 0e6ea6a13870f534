#include "engine/train/stage_plans.h"

#include <inttypes.h>

#include "engine/base/out.h"
#include "engine/ops/plan_device.h"
#include "engine/train/evaluate.h"
#include "engine/train/fit.h"
#include "engine/train/forecast.h"
#include "engine/train/run.h"

enum { STAGES = FIT_STAGES };

/* The plans of all stages for one configuration. */
struct stage_plans {
    struct plan plan[STAGES];
    struct account account[STAGES];
    int64_t rows, numel, units;
    bool from_data;
    int64_t steps;            /* that the data makes of this run */
    struct sampler_mean mean; /* its micro-batches; zeros without data */
    const struct plan_target *target;
    struct forecast forecast[STAGES]; /* with a machine */
};

/* Of the batches that the run will meet. */
static enum status rows_of_data(const struct run_config *config, int world_size,
                                struct setup_rows *rows, struct stage_plans *p)
{
    enum status st = ST_OK;
    struct run_data data = {0};
    struct sampler sampler = {0};
    TRY_GOTO(st, out, run_data_load(&data, config, true));
    TRY_GOTO(st, out,
             sampler_init(&sampler, data.train.rows, data.train.count, world_size,
                          (int)config->train.grad_accum, config->train.micro_batch,
                          (uint64_t)config->train.seed));
    p->steps = trainer_total_steps(config, data.train.count, world_size);
    trainer_rows(rows, config, &data, &sampler, p->steps);
    p->mean = sampler_mean(&sampler, p->steps);
out:
    sampler_release(&sampler);
    run_data_release(&data);
    return st;
}

/* What a step computes: the step waits for the fullest rank; captured tensors have their class's
 * rows. */
static struct batch_size mean_batch(const struct stage_plans *p, const struct device *device)
{
    return (struct batch_size){device->fixed_rows ? p->mean.rows : p->mean.fullest,
                               p->mean.squared_lengths};
}

static enum status plan_stages(struct stage_plans *p, const struct run_config *config,
                               const struct device *device, bool from_data)
{
    struct setup_rows rows = {0};
    int world_size = (int)config->train.ranks;
    if (from_data)
        TRY(rows_of_data(config, world_size, &rows, p));
    p->from_data = from_data;
    for (int stage = 0; stage < STAGES; stage++) {
        struct setup setup;
        struct run_config staged = *config;
        /* A stage that cannot reduce once a step is planned as it would run. */
        if (stage >= 2 && staged.train.reduce == REDUCE_PER_STEP)
            staged.train.reduce = REDUCE_AUTO;
        TRY(setup_init(&setup, &staged, device, world_size, stage, rows));
        p->rows = setup.train_batch.rows;
        p->numel = model_total_numel(&setup.model);
        p->units = setup.model.unit_count;
        enum status st = plan_build(&p->plan[stage], &p->account[stage], &setup.spec);
        if (st == ST_OK && p->target->timed)
            st = forecast_step(&p->forecast[stage], &setup, &p->plan[stage].programs[PROGRAM_STEP],
                               &p->target->machine,
                               (struct simulate_world){world_size, p->target->nodes, 1},
                               from_data ? mean_batch(p, device) : forecast_batch(&setup));
        setup_release(&setup);
        TRY(st);
    }
    return ST_OK;
}

static size_t packing_loss(const struct account *a)
{
    return a->arena_bytes - a->live_peak_bytes;
}

/* How the word table moves between ranks, as train.tables says it. */
static const char *tables_of(const struct stage_plans *p, int stage)
{
    const struct program *step = &p->plan[stage].programs[PROGRAM_STEP];
    for (int i = 0; i < step->instr_count; i++)
        if (step->instrs[i].flags & FLAG_ROWS)
            return "rows";
    return "whole";
}

static void print_json(const struct stage_plans *p, const struct run_config *config)
{
    out("{\"world_size\":%" PRId64 ",\"micro_batch\":%" PRId64 ",\"grad_accum\":%" PRId64
        ",\"rows\":%" PRId64 ",\"rows_from\":\"%s\",\"parameters\":%" PRId64,
        config->train.ranks, config->train.micro_batch, config->train.grad_accum, p->rows,
        p->from_data ? "data" : "micro_batch * max_length", p->numel);
    if (p->from_data)
        out(",\"steps\":%" PRId64 ",\"mean_micro_batch\":{\"tokens\":%.2f,"
            "\"tokens_of_fullest_rank\":%.2f,\"rows_of_length_class\":%.2f,"
            "\"squared_lengths\":%.2f}",
            p->steps, p->mean.tokens, p->mean.fullest, p->mean.rows, p->mean.squared_lengths);
    out(",\"stages\":[");
    for (int stage = 0; stage < STAGES; stage++) {
        const struct account *a = &p->account[stage];
        out("%s{\"zero_stage\":%d,\"bytes\":{", stage > 0 ? "," : "", stage);
        for (int c = 0; c < CATEGORY_COUNT; c++)
            out("\"%s\":%zu,", category_name((enum category)c), a->at_peak[c]);
        out("\"packing_loss\":%zu},\"own_max\":{", packing_loss(a));
        for (int c = 0; c < CATEGORY_COUNT; c++)
            out("%s\"%s\":%zu", c > 0 ? "," : "", category_name((enum category)c), a->own_max[c]);
        out("},\"live_peak\":%zu,\"total\":%zu,\"tables\":\"%s\"", a->live_peak_bytes,
            a->arena_bytes, tables_of(p, stage));
        if (p->target->timed)
            out(",\"predicted_ms\":%.4f,\"exposed_ms\":%.4f", p->forecast[stage].seconds * 1e3,
                p->forecast[stage].exposed_seconds * 1e3);
        out("}");
    }
    out("]}\n");
}

static void print_row(const char *name, const struct stage_plans *p,
                      size_t (*bytes)(const struct account *a, int category), int category)
{
    out("%-16s", name);
    for (int stage = 0; stage < STAGES; stage++)
        out("%16zu", bytes(&p->account[stage], category));
    out("\n");
}

static size_t bytes_at_peak(const struct account *a, int category)
{
    return a->at_peak[category];
}

static size_t bytes_of_packing(const struct account *a, int category)
{
    (void)category;
    return packing_loss(a);
}

static size_t bytes_in_all(const struct account *a, int category)
{
    (void)category;
    return a->arena_bytes;
}

static void print_times(const struct stage_plans *p)
{
    out("\n%-16s", "ms a step");
    for (int stage = 0; stage < STAGES; stage++)
        out("%16.2f", p->forecast[stage].seconds * 1e3);
    out("\n%-16s", "exposed comm. ms");
    for (int stage = 0; stage < STAGES; stage++)
        out("%16.2f", p->forecast[stage].exposed_seconds * 1e3);
    out("\npredicted for %s (%s), %d node%s\n", p->target->machine.name, p->target->machine.date,
        p->target->nodes, p->target->nodes == 1 ? "" : "s");
}

static void print_table(const struct stage_plans *p, const struct run_config *config)
{
    out("Bytes a rank on %" PRId64 " ranks, at the instant of the peak.\n"
        "%.1f M parameters in %" PRId64 " units; micro-batches of %" PRId64 " rows (%s).\n\n",
        config->train.ranks, (double)p->numel * 1e-6, p->units, p->rows,
        p->from_data ? "the largest of this run's data"
                     : "micro_batch * max_length; --data plans for the real ones");
    out("%-16s%16s%16s%16s%16s\n", "zero stage", "0", "1", "2", "3");
    for (int c = 0; c < CATEGORY_COUNT; c++)
        print_row(category_name((enum category)c), p, bytes_at_peak, c);
    print_row("packing_loss", p, bytes_of_packing, 0);
    print_row("total", p, bytes_in_all, 0);
    out("%-16s", "of stage 0");
    for (int stage = 0; stage < STAGES; stage++)
        out("%15.1f%%",
            100.0 * (double)p->account[stage].arena_bytes / (double)p->account[0].arena_bytes);
    out("\n");
    out("%-16s", "tables");
    for (int stage = 0; stage < STAGES; stage++)
        out("%16s", tables_of(p, stage));
    out("\n");
    if (p->target->timed)
        print_times(p);
    if (p->account[1].arena_bytes == p->account[2].arena_bytes)
        out("\nStages 1 and 2 need the same here: the whole gradient of a unit ends with its "
            "reduction\nat stage 1 too, unless gradients are accumulated over micro-batches.\n");
    bool more = false;
    for (int stage = 1; stage < STAGES; stage++)
        more |= p->account[stage].arena_bytes > p->account[stage - 1].arena_bytes;
    if (more)
        out("\nA higher stage needs more here: what it gathers and reduces stands beside what it "
            "partitions,\nwhich is little on %s.\n",
            config->train.ranks == 1 ? "one rank, where nothing is" : "a model as small as this");
}

static void print_operands(const struct instr *in, enum access access)
{
    for (int k = 0; k < in->operand_count; k++)
        if (in->operands[k].access & access)
            out(" b%d", in->operands[k].buffer);
}

static void print_ended(const struct program *p, int index)
{
    for (int i = 0; i < p->buffer_count; i++)
        if (!p->buffers[i].persistent && p->buffers[i].first >= 0 && p->buffers[i].last == index)
            out(" b%d", i);
}

static void print_program(const struct program *p)
{
    static const char *const kinds[PROGRAM_KINDS] = {"step", "prologue", "flush", "evaluate"};
    out("\n%s: %d instructions, %d buffers (b0 to b%d in all programs)\n", kinds[p->kind],
        p->instr_count, p->buffer_count, p->shared_count - 1);
    for (int i = 0; i < p->instr_count; i++) {
        const struct instr *in = &p->instrs[i];
        size_t bytes[CATEGORY_COUNT];
        out("%5d %-8s %-10s", i, program_stream_name(in->stream), program_op_name(in->op));
        if (in->unit >= 0)
            out(" unit %-3d", in->unit);
        if (in->micro_batch >= 0)
            out(" micro %-2d", in->micro_batch);
        out("%s%s%s  reads", in->flags & FLAG_ADD ? " add" : "",
            in->flags & FLAG_GRADIENT ? " gradient" : "", in->flags & FLAG_ROWS ? " rows" : "");
        print_operands(in, ACCESS_READ);
        out("  writes");
        print_operands(in, ACCESS_WRITE);
        out("  after");
        for (int s = 0; s < PROGRAM_STREAMS; s++)
            if (in->wait[s] >= 0)
                out(" %d", in->wait[s]);
        out("  ends");
        print_ended(p, i);
        out("  live %zu\n", account_live(p, i, bytes));
    }
}

enum status stage_plans_print(const struct run_config *config, const struct plan_target *target,
                              struct stage_plans_options options)
{
    enum status st = ST_OK;
    struct device device;
    struct stage_plans *plans = NULL;
    TRY(plan_device_init(&device, target->device, config->train.precision,
                         run_threads(config, (int)config->train.ranks)));
    TRY_GOTO(st, out, mem_alloc(&plans, sizeof *plans));
    plans->target = target;
    TRY_GOTO(st, out, plan_stages(plans, config, &device, options.from_data));
    if (options.json)
        print_json(plans, config);
    else
        print_table(plans, config);
    for (int k = 0; options.show_program && !options.json && k < PROGRAM_KINDS; k++)
        print_program(&plans->plan[config->train.zero_stage].programs[k]);
out:
    for (int stage = 0; plans != NULL && stage < STAGES; stage++)
        plan_release(&plans->plan[stage]);
    mem_free(&plans);
    return st;
}
