#include "engine/train/fit_table.h"

#include <inttypes.h>
#include <stdio.h>

#include "engine/base/out.h"
#include "engine/base/text.h"
#include "engine/ops/plan_device.h"
#include "engine/train/run.h"

/* All stages on one number of ranks. */
struct rank_fits {
    int world_size;
    size_t beside_bytes;
    struct fit fits[FIT_STAGES];
    const struct fit *fastest; /* NULL: none fits */
};

static int next_ranks(const struct fit_table *t, int ranks)
{
    int power = 1;
    while (power <= ranks)
        power *= 2;
    return power < t->ranks_to ? power : t->ranks_to;
}

/* @r: of fewer ranks, or zero; its micro-batches are where the search begins. */
static enum status find_fits(struct rank_fits *r, const struct fit_table *t, int world_size)
{
    struct device device;
    TRY(plan_device_init(&device, t->device, t->config->train.precision,
                         run_threads(t->config, world_size)));
    struct fit_question q = {.config = t->config,
                             .device = &device,
                             .world_size = world_size,
                             .machine = t->machine,
                             .nodes = world_size < t->nodes ? world_size : t->nodes};
    r->world_size = world_size;
    r->beside_bytes = t->reserve_bytes;
    if (t->reserve_bytes == 0)
        TRY(fit_beside_bytes(&r->beside_bytes, &q));
    if (r->beside_bytes < t->memory_bytes)
        q.room_bytes = t->memory_bytes - r->beside_bytes;
    for (int stage = 0; stage < FIT_STAGES; stage++)
        TRY(fit_largest(&r->fits[stage], &q, stage, r->fits[stage].micro_batch));
    r->fastest = fit_fastest(r->fits, FIT_STAGES);
    return ST_OK;
}

/* ---- text ---- */

/* Small memories in MiB. */
static bool in_mib(const struct fit_table *t)
{
    return t->memory_bytes < (size_t)16 << 30;
}

static double scaled(const struct fit_table *t, size_t bytes)
{
    return (double)bytes / (in_mib(t) ? 0x1p20 : 0x1p30);
}

static enum status print_head(const struct fit_table *t)
{
    struct setup setup;
    struct device device;
    char memory[32], reserve[32];
    const struct run_config *c = t->config;
    TRY(plan_device_init(&device, t->device, c->train.precision, 1));
    TRY(setup_init(&setup, c, &device, t->ranks_from, 0, (struct setup_rows){0}));
    text_of_bytes(memory, t->memory_bytes);
    text_of_bytes(reserve, t->reserve_bytes);
    out("%s: %.1f M parameters in %d units, %s on %ss; grad_accum %" PRId64
        "; micro-batches of B * %" PRId64 " rows.\n",
        setup.model.family, (double)model_total_numel(&setup.model) * 1e-6, setup.model.unit_count,
        dtype_name(device.param_dtype), device.name, c->train.grad_accum, c->data.max_length);
    setup_release(&setup);
    out("A rank has %s, of which are beside the arena: ", memory);
    if (t->reserve_bytes > 0)
        out("%s (--reserve).\n", reserve);
    else if (t->device == DEVICE_CUDA)
        out("2 GiB for context, libraries, communicator\nand its connections, and graphs (1.5 to "
            "1.9 GiB measured on H100).\n");
    else
        out("128 MiB for program, libraries and data%s.\n",
            c->checkpoint.every > 0
                ? ",\nand the copy of its part of the state that checkpoints are written from"
                : "");
    out("B is the largest that fits. %s of a rank at the instant of its step's peak; sent: in a "
        "step.\n",
        in_mib(t) ? "MiB" : "GiB");
    if (t->machine != NULL)
        out("Times are predicted for %s (%s), %d node%s. * is the fastest.\n\n", t->machine->name,
            t->machine->date, t->nodes, t->nodes == 1 ? "" : "s");
    else
        out("* sends least for a sequence, so as a rule it is the fastest; --profile predicts "
            "times.\n\n");
    out("%7s %5s %7s %9s %9s %9s %9s %9s %9s %9s %9s %9s %9s", "ranks", "stage", "B", "beside",
        "arena", "params", "grads", "master", "m and v", "in flight", "activ.", "the rest", "sent");
    if (t->machine != NULL)
        out(" %9s %9s", "step ms", "seq/s");
    out("\n");
    return ST_OK;
}

static double sequences_per_second(const struct fit_table *t, const struct rank_fits *r,
                                   const struct fit *f)
{
    int64_t sequences = f->micro_batch * t->config->train.grad_accum * r->world_size;
    return (double)sequences / f->step_seconds;
}

static void print_fit(const struct fit_table *t, const struct rank_fits *r, const struct fit *f)
{
    const size_t *b = f->account.at_peak;
    size_t arena = f->account.arena_bytes;
    if (f->stage == 0)
        out("%7d ", r->world_size);
    else
        out("%7s ", "");
    if (!f->allowed) {
        out("%5d       - refused by the configuration\n", f->stage);
        return;
    }
    if (!f->fits) {
        out("%5d       - %9.3f %9.3f at B = 1\n", f->stage, scaled(t, r->beside_bytes),
            scaled(t, arena));
        return;
    }
    size_t optimizer = b[CATEGORY_ADAM_M] + b[CATEGORY_ADAM_V];
    size_t named = b[CATEGORY_PARAMETERS] + b[CATEGORY_GRADIENTS] + b[CATEGORY_MASTER] + optimizer +
                   b[CATEGORY_IN_FLIGHT] + b[CATEGORY_ACTIVATIONS];
    out("%4d%s %7" PRId64 "%s %8.3f %9.3f %9.3f %9.3f %9.3f %9.3f %9.3f %9.3f %9.3f %9.3f",
        f->stage, f == r->fastest ? "*" : " ", f->micro_batch, f->limited ? "+" : " ",
        scaled(t, r->beside_bytes), scaled(t, arena), scaled(t, b[CATEGORY_PARAMETERS]),
        scaled(t, b[CATEGORY_GRADIENTS]), scaled(t, b[CATEGORY_MASTER]), scaled(t, optimizer),
        scaled(t, b[CATEGORY_IN_FLIGHT]), scaled(t, b[CATEGORY_ACTIVATIONS]),
        scaled(t, arena - named), scaled(t, (size_t)f->sent_bytes));
    if (t->machine != NULL)
        out(" %9.2f %9.1f", f->step_seconds * 1e3, sequences_per_second(t, r, f));
    out("\n");
}

static enum status print_text(const struct fit_table *t)
{
    struct rank_fits r = {0};
    bool limited = false;
    TRY(print_head(t));
    for (int ranks = t->ranks_from;; ranks = next_ranks(t, ranks)) {
        TRY(find_fits(&r, t, ranks));
        for (int stage = 0; stage < FIT_STAGES; stage++) {
            print_fit(t, &r, &r.fits[stage]);
            limited |= r.fits[stage].limited;
        }
        if (ranks == t->ranks_to)
            break;
    }
    if (limited)
        out("\n+ the configuration allows no more sequences in a step.\n");
    return ST_OK;
}

/* ---- Markdown ---- */

static void markdown_fit(const struct fit_table *t, const struct rank_fits *r, const struct fit *f)
{
    const size_t *b = f->account.at_peak;
    size_t state = b[CATEGORY_PARAMETERS] + b[CATEGORY_GRADIENTS] + b[CATEGORY_MASTER] +
                   b[CATEGORY_ADAM_M] + b[CATEGORY_ADAM_V];
    out("| %d | %d%s | ", r->world_size, f->stage, f == r->fastest ? " (fastest)" : "");
    if (!f->fits) {
        out("%s |  |  |  |  | %s", f->allowed ? "none" : "refused", t->machine != NULL ? " |" : "");
    } else {
        out("%" PRId64 " | %.1f | %.2f | %.2f | %.1f |", f->micro_batch,
            scaled(t, f->account.arena_bytes), scaled(t, state), scaled(t, b[CATEGORY_IN_FLIGHT]),
            scaled(t, b[CATEGORY_ACTIVATIONS]));
        if (t->machine != NULL)
            out(" %.0f |", sequences_per_second(t, r, f));
    }
    out("\n");
}

static enum status print_markdown(const struct fit_table *t)
{
    struct rank_fits r = {0};
    out("| ranks | stage | largest micro-batch | arena %s | state | in flight | activations |%s\n"
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: |%s\n",
        in_mib(t) ? "MiB" : "GiB", t->machine != NULL ? " predicted sequences/s |" : "",
        t->machine != NULL ? " ---: |" : "");
    for (int ranks = t->ranks_from;; ranks = next_ranks(t, ranks)) {
        TRY(find_fits(&r, t, ranks));
        for (int stage = 0; stage < FIT_STAGES; stage++)
            markdown_fit(t, &r, &r.fits[stage]);
        if (ranks == t->ranks_to)
            break;
    }
    return ST_OK;
}

/* ---- JSON ---- */

static void json_fit(const struct fit_table *t, const struct rank_fits *r, const struct fit *f)
{
    const struct account *a = &f->account;
    out("%s{\"zero_stage\":%d,\"fits\":%s", f->stage > 0 ? "," : "", f->stage,
        f->fits ? "true" : "false");
    if (!f->allowed) {
        out(",\"refused\":true}");
        return;
    }
    out(",\"micro_batch\":%" PRId64 ",\"limited\":%s,\"bytes\":{", f->micro_batch,
        f->limited ? "true" : "false");
    for (int c = 0; c < CATEGORY_COUNT; c++)
        out("\"%s\":%zu,", category_name((enum category)c), a->at_peak[c]);
    out("\"packing_loss\":%zu},\"total\":%zu,\"sent_bytes\":%" PRId64,
        a->arena_bytes - a->live_peak_bytes, a->arena_bytes, f->sent_bytes);
    if (t->machine != NULL)
        out(",\"predicted_ms\":%.4f,\"sequences_per_s\":%.2f", f->step_seconds * 1e3,
            sequences_per_second(t, r, f));
    out("}");
}

static enum status print_json(const struct fit_table *t)
{
    struct rank_fits r = {0};
    struct device device;
    struct setup setup;
    const struct run_config *c = t->config;
    TRY(plan_device_init(&device, t->device, c->train.precision, 1));
    TRY(setup_init(&setup, c, &device, t->ranks_from, 0, (struct setup_rows){0}));
    out("{\"memory_bytes\":%zu,\"device\":\"%s\",\"dtype\":\"%s\",\"parameters\":%" PRId64
        ",\"grad_accum\":%" PRId64 ",\"max_length\":%" PRId64 ",\"ranks\":[",
        t->memory_bytes, t->device == DEVICE_CUDA ? "cuda" : "cpu", dtype_name(device.param_dtype),
        model_total_numel(&setup.model), c->train.grad_accum, c->data.max_length);
    setup_release(&setup);
    for (int ranks = t->ranks_from;; ranks = next_ranks(t, ranks)) {
        TRY(find_fits(&r, t, ranks));
        out("%s{\"world_size\":%d,\"beside_bytes\":%zu,\"fastest\":",
            ranks > t->ranks_from ? "," : "", ranks, r.beside_bytes);
        if (r.fastest != NULL)
            out("%d,\"stages\":[", r.fastest->stage);
        else
            out("null,\"stages\":[");
        for (int stage = 0; stage < FIT_STAGES; stage++)
            json_fit(t, &r, &r.fits[stage]);
        out("]}");
        if (ranks == t->ranks_to)
            break;
    }
    out("]}\n");
    return ST_OK;
}

enum status fit_table_print(const struct fit_table *table, enum fit_format format)
{
    if (format == FIT_JSON)
        return print_json(table);
    return format == FIT_MARKDOWN ? print_markdown(table) : print_text(table);
}
