#include "engine/train/comparison_row.h"

#include <math.h>

bool comparison_ran(const struct run_result *r)
{
    return r->reason[0] == '\0';
}

static bool is_alike(const struct run_result *a, const struct run_result *b)
{
    return a->micro_batch == b->micro_batch && a->grad_accum == b->grad_accum;
}

struct comparison_row comparison_row_of(const struct comparison *c, const struct run_result *r)
{
    struct comparison_row row = {.r = r, .ratio = (double)NAN, .speed_up = (double)NAN};
    const struct run_result *fewest = NULL;
    for (int i = 0; i < c->count && comparison_ran(r); i++) {
        const struct run_result *o = &c->runs[i];
        if (!comparison_ran(o) || !is_alike(o, r))
            continue;
        if (o->ranks == r->ranks && (row.base == NULL || o->zero_stage < row.base->zero_stage))
            row.base = o;
        if (o->zero_stage == r->zero_stage && (fewest == NULL || o->ranks < fewest->ranks))
            fewest = o;
    }
    if (row.base == NULL)
        return row;
    row.first_difference = run_result_first_difference(row.base, r);
    row.ratio = r->planned_bytes / row.base->planned_bytes;
    row.speed_up = r->sequences_per_s / fewest->sequences_per_s;
    return row;
}

/* ---- columns ---- */

static double planned(const struct comparison_row *row, int index)
{
    (void)index;
    return row->r->planned_bytes;
}

static double live_peak(const struct comparison_row *row, int index)
{
    (void)index;
    return row->r->live_peak_bytes;
}

static double packing(const struct comparison_row *row, int index)
{
    (void)index;
    return row->r->planned_bytes - row->r->live_peak_bytes;
}

static double measured(const struct comparison_row *row, int index)
{
    (void)index;
    return row->r->measured_bytes;
}

static double ratio(const struct comparison_row *row, int index)
{
    (void)index;
    return row->ratio;
}

double comparison_at_peak(const struct comparison_row *row, int index)
{
    return row->r->at_peak[index];
}

double comparison_counted_at_peak(const struct comparison_row *row, int index)
{
    return row->r->counted_at_peak[index];
}

double comparison_counted_own_max(const struct comparison_row *row, int index)
{
    return row->r->counted_own_max[index];
}

double comparison_own_max(const struct comparison_row *row, int index)
{
    return row->r->own_max[index];
}

static double sequences(const struct comparison_row *row, int index)
{
    (void)index;
    return row->r->sequences_per_s;
}

static double tokens(const struct comparison_row *row, int index)
{
    (void)index;
    return row->r->tokens_per_s;
}

static double step_ms(const struct comparison_row *row, int index)
{
    (void)index;
    return row->r->step_ms;
}

static double speed_up(const struct comparison_row *row, int index)
{
    (void)index;
    return row->speed_up;
}

double comparison_part_ms(const struct comparison_row *row, int index)
{
    return row->r->has_split ? row->r->split.part_ms[index] : (double)NAN;
}

double comparison_hidden_ms(const struct comparison_row *row, int index)
{
    (void)index;
    return row->r->has_split ? row->r->split.hidden_ms : (double)NAN;
}

double comparison_data_ms(const struct comparison_row *row, int index)
{
    (void)index;
    return row->r->has_split ? row->r->data_ms : (double)NAN;
}

/* Of the traced step and the data that came before it; TIME_PARTS is the data. */
static double share(const struct comparison_row *row, int part)
{
    double ms = part == TIME_PARTS ? comparison_data_ms(row, 0) : comparison_part_ms(row, part);
    return ms / (row->r->split.step_ms + row->r->data_ms);
}

const struct comparison_column comparison_memory[COMPARISON_MEMORY] = {
    {"planned_bytes", "planned", planned, 0, 1, COMPARISON_MIB},
    {"measured_bytes", "measured", measured, 0, 1, COMPARISON_MIB},
    {"ratio", "% of base", ratio, 0, 1, 0.01},
    {"live_peak_bytes", NULL, live_peak, 0, 1, COMPARISON_MIB},
    {"packing_loss_bytes", "packing", packing, 0, 1, COMPARISON_MIB},
};
const struct comparison_column comparison_speed[COMPARISON_SPEED] = {
    {"sequences_per_s", "sequ./s", sequences, 0, 1, 1},
    {"tokens_per_s", "tokens/s", tokens, 0, 0, 1},
    {"speed_up", "speed-up", speed_up, 0, 2, 1},
    {"step_ms", "step ms", step_ms, 0, 2, 1},
    {"compute_ms", NULL, comparison_part_ms, TIME_COMPUTE, 2, 1},
    {"exposed_communication_ms", NULL, comparison_part_ms, TIME_COMMUNICATION, 2, 1},
    {"optimizer_ms", NULL, comparison_part_ms, TIME_OPTIMIZER, 2, 1},
    {"idle_ms", NULL, comparison_part_ms, TIME_IDLE, 2, 1},
    {"data_ms", NULL, comparison_data_ms, 0, 2, 1},
    {"hidden_communication_ms", NULL, comparison_hidden_ms, 0, 2, 1},
    {"compute_share", "compute %", share, TIME_COMPUTE, 1, 0.01},
    {"exposed_communication_share", "exposed %", share, TIME_COMMUNICATION, 1, 0.01},
    {"optimizer_share", "optimizer %", share, TIME_OPTIMIZER, 1, 0.01},
    {"idle_share", "idle %", share, TIME_IDLE, 1, 0.01},
    {"data_share", "data %", share, TIME_PARTS, 1, 0.01},
};
