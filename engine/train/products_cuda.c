#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/clock.h"
#include "engine/base/file.h"
#include "engine/base/log.h"
#include "engine/ops/gemm_measure.h"
#include "engine/ops/gemm_plan.h"
#include "engine/train/capture.h"
#include "engine/train/evaluate.h"
#include "engine/train/forecast.h"
#include "engine/train/products.h"
#include "engine/train/trainer.h"

static const double BUDGET_S = 10.0; /* once a shape and card; most runs take less than half */
enum { ENOUGH_STEPS = 1000 /* for a mean */ };

/* Where rank 0's entries came from. */
struct sources {
    int resumed, cached;
    struct gemm_measured measured, looked_up;
    double s;
};

/* Those of @from that the run wants, lacks and can use. */
static enum status take(struct gemm_table *plan, int *taken, const struct gemm_table *from,
                        const struct gemm_table *wanted, const struct device *device)
{
    int refused = 0;
    for (int i = 0; i < from->count; i++) {
        const struct gemm_entry *e = &from->entries[i];
        if (wanted != NULL && gemm_table_find(wanted, &e->key) == NULL)
            continue;
        if (plan->count == GEMM_TABLE_MAX || gemm_table_find(plan, &e->key) != NULL)
            continue;
        if (!gemm_plan_accepts(device, e)) {
            refused++;
            continue;
        }
        TRY(gemm_table_add(plan, e));
        (*taken)++;
    }
    if (refused > 0)
        log_warn("train",
                 "cuBLASLt refuses %d algorithms of a stored GEMM plan; they are chosen anew",
                 refused);
    return ST_OK;
}

/* All of a checkpoint's plan stays: whoever goes on from this run may want what it does not. */
static enum status take_resumed(struct gemm_table *plan, int *taken, struct trainer *t)
{
    char then[256], now[256];
    if (t->gemm_plan.card.name[0] == '\0') {
        if (t->resumed)
            log_info("checkpoint", "it has no GEMM plan: results may differ in rounding");
        return ST_OK;
    }
    if (gemm_card_equal(&t->gemm_plan.card, &plan->card))
        return take(plan, taken, &t->gemm_plan, NULL, t->device);
    gemm_card_text(then, sizeof then, &t->gemm_plan.card);
    gemm_card_text(now, sizeof now, &plan->card);
    log_info("checkpoint",
             "its GEMM plan is for %s, here is %s: another plan, so results may differ in rounding",
             then, now);
    return ST_OK;
}

/* Rank 0. No memory for operands is no failure. */
static enum status measure(struct gemm_table *plan, struct gemm_measured *measured,
                           struct device *device, const struct gemm_table *wanted, double budget_s)
{
    int before = plan->count;
    enum status st = gemm_measure(device, plan, wanted, budget_s, measured);
    if (st != ST_MEMORY || plan->count != before)
        return st;
    log_warn("train", "matrix products are not measured: %s", status_message());
    status_clear();
    return ST_OK;
}

static enum status make_plan(struct gemm_table *plan, struct sources *from, struct trainer *t,
                             const struct gemm_table *wanted, const struct gemm_table *looked_up)
{
    char path[1200];
    struct gemm_table kept = {0};
    enum status st = ST_OK;
    double begun = clock_s();
    TRY_GOTO(st, out, take_resumed(plan, &from->resumed, t));
    TRY_GOTO(st, out, products_path(path, sizeof path, t->config->train.gemm_plan, &plan->card));
    TRY_GOTO(st, out, products_load(&kept, path, &plan->card));
    TRY_GOTO(st, out, take(plan, &from->cached, &kept, wanted, t->device));
    TRY_GOTO(st, out, take(plan, &from->cached, &kept, looked_up, t->device));
    int first = plan->count;
    TRY_GOTO(st, out, measure(plan, &from->measured, t->device, wanted, BUDGET_S));
    TRY_GOTO(st, out, measure(plan, &from->looked_up, t->device, looked_up, 0.0));
    TRY_GOTO(st, out, products_keep(path, plan, first));
    from->s = clock_s() - begun;
out:
    gemm_table_release(&kept);
    return st;
}

static void describe(const struct gemm_table *plan, const struct sources *from)
{
    log_info("train",
             "GEMM plan: %d products in %.0f ms: %d from the checkpoint, %d from the cache, %d "
             "measured (%d of them not with the library's first choice, %d with another beside "
             "collectives), %d of evaluations looked up",
             plan->count, from->s * 1e3, from->resumed, from->cached,
             from->measured.products - from->measured.skipped, from->measured.changed,
             from->measured.beside, from->looked_up.products);
    if (from->measured.skipped > 0)
        log_info("train", "%d more got the library's first choice, the time was up",
                 from->measured.skipped);
}

/* What people look at; the run does not need it. */
static void write_copy(const struct trainer *t)
{
    char path[1200], *text = NULL;
    size_t bytes = 0;
    enum status st = path_join(path, sizeof path, t->config->output.dir, "gemm-plan.txt");
    if (st == ST_OK)
        st = gemm_table_write(&text, &bytes, &t->gemm_plan);
    if (st == ST_OK)
        st = file_write(path, text, bytes);
    if (st != ST_OK)
        log_warn("train", "gemm-plan.txt is not written: %s", status_message());
    mem_free(&text);
}

/* Evaluations run each of theirs but once or twice, which is not worth a measurement; but without
 * an entry cuBLASLt is asked in every run. */
static enum status list_evaluations(struct gemm_table *looked_up, struct trainer *t)
{
    enum status st = ST_OK;
    int64_t *rows = NULL;
    int count = 0;
    struct gemm_table all = {0};
    TRY_GOTO(st, out, evaluator_classes(&rows, &count, t));
    TRY_GOTO(st, out, gemm_wanted(&all, t->device, rows, count));
    for (int i = 0; i < all.count && st == ST_OK; i++)
        if (all.entries[i].key.kind == GEMM_FORWARD)
            st = gemm_table_add(looked_up, &all.entries[i]);
out:
    gemm_table_release(&all);
    mem_free(&rows);
    return st;
}

static enum status plan_together(struct trainer *t, struct gemm_table *plan)
{
    enum status st = ST_OK;
    int64_t *rows = NULL;
    int classes = 0;
    struct gemm_table wanted = {0}, looked_up = {0};
    struct sources from = {0};
    TRY_GOTO(st, out, products_compare(t->comm, &plan->card));
    st = capture_classes(&rows, &classes, t);
    if (st == ST_OK)
        st = gemm_wanted(&wanted, t->device, rows, classes);
    if (st == ST_OK)
        st = list_evaluations(&looked_up, t);
    if (st == ST_OK && t->comm->rank == 0)
        st = make_plan(plan, &from, t, &wanted, &looked_up);
    TRY_GOTO(st, out, comm_agree(t->comm, st));
    TRY_GOTO(st, out, products_share(t->comm, plan));
    describe(plan, &from);
out:
    gemm_table_release(&looked_up);
    gemm_table_release(&wanted);
    mem_free(&rows);
    return st;
}

/* By rates that are built in, on all ranks the same, and those of links within a machine, beside
 * whose collectives less is than beside those of slower ones. */
static enum status foresee(struct trainer *t)
{
    const struct program *step = &t->plan.programs[PROGRAM_STEP];
    struct simulate_world world = {t->comm->world_size, 1, 1};
    int64_t steps = t->total_steps < ENOUGH_STEPS ? t->total_steps : ENOUGH_STEPS;
    struct sampler_mean mean = sampler_mean(&t->sampler, steps);
    struct machine machine;
    machine_like_card(&machine, t->device->name);
    TRY(mem_alloc(&t->beside, sizeof *t->beside * (size_t)step->instr_count));
    TRY(forecast_beside(t->beside, &t->setup, step, &machine, world,
                        (struct batch_size){mean.rows, mean.squared_lengths}));
    t->executor.beside = t->beside;
    return ST_OK;
}

enum status products_open(struct trainer *t)
{
    int64_t set = t->config->train.gemm_beside;
    int64_t beside = set == GEMM_BESIDE_AUTO ? t->comm->multiprocessors : set;
    gemm_plan_beside(t->device, beside);
    return beside > 0 && t->total_steps > 0 ? foresee(t) : ST_OK;
}

enum status products_plan(struct trainer *t)
{
    enum status st = ST_OK;
    struct gemm_table plan = {0};
    gemm_card(t->device, &plan.card);
    if (strcmp(t->config->train.gemm_plan, "off") == 0) {
        gemm_table_release(&t->gemm_plan);
        return ST_OK;
    }
    st = plan_together(t, &plan);
    gemm_table_release(&t->gemm_plan);
    t->gemm_plan = plan;
    TRY(st);
    gemm_plan_install(t->device, &t->gemm_plan);
    if (t->metrics != NULL)
        write_copy(t);
    return ST_OK;
}

void products_close(struct trainer *t)
{
    int missing = gemm_plan_missing(t->device), beside = gemm_plan_issued_beside(t->device);
    if (beside > 0)
        log_info("train",
                 "%d matrix products were issued with their algorithm for beside collectives",
                 beside);
    if (missing > 0 && t->gemm_plan.card.name[0] != '\0')
        log_info("train", "%d matrix products were not in the GEMM plan: the library's choice",
                 missing);
    gemm_plan_install(t->device, NULL);
}
