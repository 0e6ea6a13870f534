#include "engine/train/forecast.h"

#include "engine/ops/ops.h"

_Static_assert((int)SIMULATE_PARTS == (int)PASS_PARTS, "what simulate says is what a pass hears");

struct batch_size forecast_batch(const struct setup *setup)
{
    const struct batch_layout *l = &setup->train_batch;
    double rows = (double)l->rows;
    return (struct batch_size){rows, rows * (double)l->max_length};
}

struct simulate_rates forecast_rates(const struct machine *m, const struct unit_work *units,
                                     double width, double head, struct batch_size micro)
{
    double length = micro.tokens > 0 ? micro.squared_lengths / micro.tokens : 0;
    return (struct simulate_rates){
        .units = units,
        .product_flops_per_second = machine_table_at(&m->products, width, micro.tokens),
        .attention_flops_per_second = machine_table_at(&m->attention, head, length),
        .attention_call_seconds = m->attention_call_seconds,
        .elementwise_per_second = machine_table_at(&m->elementwise, width, micro.tokens),
        .update_per_second = m->update_per_second,
        .memory_per_second = m->memory_per_second,
        .launch_seconds = m->launch_seconds,
        .floor_seconds = m->floor_seconds,
        .edge_seconds = m->edge_seconds,
        .call_seconds = m->call_seconds,
        .near = m->near,
        .far = m->far,
        .slow_down = m->slow_down_near,
        .slow_down_least = m->slow_down_far,
        .in_order = m->device == DEVICE_CPU,
    };
}

enum status forecast_check(const struct machine *m, struct simulate_world w)
{
    if (w.ranks < 1 || w.nodes < 1 || w.replicas < 1 || w.ranks % w.nodes != 0)
        return FAIL(INVALID, "%d ranks do not spread equally over %d nodes", w.ranks, w.nodes);
    if ((w.nodes > 1 || w.replicas > 1) && m->far.gather_per_second <= 0)
        return FAIL(INVALID,
                    "machine profile \"%s\" has no network (\"far\") for several nodes; built in "
                    "are %s",
                    m->name, machine_builtin_names());
    return ST_OK;
}

/* @parts: NULL, or of simulate_beside(). */
static enum status simulate_setup(struct simulate_result *r, uint16_t *parts,
                                  const struct setup *setup, const struct program *step,
                                  const struct machine *machine, struct simulate_world world,
                                  struct batch_size micro)
{
    enum status st = ST_OK;
    struct unit_work *units = NULL;
    TRY(forecast_check(machine, world));
    TRY(mem_alloc(&units, sizeof *units * (size_t)setup->model.unit_count));
    for (int u = 0; u < setup->model.unit_count; u++)
        units[u] = model_unit_work(&setup->model, u, micro);
    double width = (double)setup->model.dims.hidden;
    struct simulate_rates rates =
        forecast_rates(machine, units, width, width / (double)setup->model.dims.heads, micro);
    st = simulate_program(r, parts, step, &rates, world);
    mem_free(&units);
    return st;
}

enum status forecast_step(struct forecast *out, const struct setup *setup,
                          const struct program *step, const struct machine *machine,
                          struct simulate_world world, struct batch_size micro)
{
    struct simulate_result r;
    TRY(simulate_setup(&r, NULL, setup, step, machine, world, micro));
    *out = (struct forecast){r.seconds + machine->turn_seconds, r.compute_seconds,
                             r.collective_seconds, r.exposed_seconds};
    return ST_OK;
}

enum status forecast_beside(uint16_t *parts, const struct setup *setup, const struct program *step,
                            const struct machine *machine, struct simulate_world world,
                            struct batch_size micro)
{
    struct simulate_result r;
    struct machine least = *machine;
    least.slow_down_near = least.slow_down_far;
    return simulate_setup(&r, parts, setup, step, &least, world, micro);
}
