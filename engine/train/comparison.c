#include "engine/train/comparison.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/file.h"
#include "engine/base/out.h"
#include "engine/base/text_buffer.h"
#include "engine/train/report_page.h"
#include "io/json_file.h"

/* ---- one run beside the others ---- */

struct row {
    const struct run_result *r;
    const struct run_result *base; /* NULL: none that ran */
    int64_t first_difference;      /* from base; 0: identical */
    double ratio, speed_up;
};

static bool ran(const struct run_result *r)
{
    return r->reason[0] == '\0';
}

static bool is_alike(const struct run_result *a, const struct run_result *b)
{
    return a->micro_batch == b->micro_batch && a->grad_accum == b->grad_accum;
}

static struct row row_of(const struct comparison *c, const struct run_result *r)
{
    struct row row = {.r = r, .ratio = (double)NAN, .speed_up = (double)NAN};
    const struct run_result *fewest = NULL;
    for (int i = 0; i < c->count && ran(r); i++) {
        const struct run_result *o = &c->runs[i];
        if (!ran(o) || !is_alike(o, r))
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

/* ---- columns: for people, CSV and JSON ---- */

struct column {
    const char *key, *title; /* title NULL: not in the tables for people */
    double (*value)(const struct row *row, int index);
    int index, digits;
    double unit; /* people see the value divided by it */
};

static double planned(const struct row *row, int index)
{
    (void)index;
    return row->r->planned_bytes;
}

static double live_peak(const struct row *row, int index)
{
    (void)index;
    return row->r->live_peak_bytes;
}

static double packing(const struct row *row, int index)
{
    (void)index;
    return row->r->planned_bytes - row->r->live_peak_bytes;
}

static double measured(const struct row *row, int index)
{
    (void)index;
    return row->r->measured_bytes;
}

static double ratio(const struct row *row, int index)
{
    (void)index;
    return row->ratio;
}

static double at_peak(const struct row *row, int index)
{
    return row->r->at_peak[index];
}

static double own_max(const struct row *row, int index)
{
    return row->r->own_max[index];
}

static double sequences(const struct row *row, int index)
{
    (void)index;
    return row->r->sequences_per_s;
}

static double tokens(const struct row *row, int index)
{
    (void)index;
    return row->r->tokens_per_s;
}

static double step_ms(const struct row *row, int index)
{
    (void)index;
    return row->r->step_ms;
}

static double speed_up(const struct row *row, int index)
{
    (void)index;
    return row->speed_up;
}

static double part_ms(const struct row *row, int index)
{
    return row->r->has_split ? row->r->split.part_ms[index] : (double)NAN;
}

static double hidden_ms(const struct row *row, int index)
{
    (void)index;
    return row->r->has_split ? row->r->split.hidden_ms : (double)NAN;
}

static double data_ms(const struct row *row, int index)
{
    (void)index;
    return row->r->has_split ? row->r->data_ms : (double)NAN;
}

/* Of the traced step and the data that came before it; TIME_PARTS is the data. */
static double share(const struct row *row, int part)
{
    double ms = part == TIME_PARTS ? data_ms(row, 0) : part_ms(row, part);
    return ms / (row->r->split.step_ms + row->r->data_ms);
}

#define MIB 1048576.0
static const struct column memory_columns[] = {
    {"planned_bytes", "planned", planned, 0, 1, MIB},
    {"measured_bytes", "measured", measured, 0, 1, MIB},
    {"ratio", "% of base", ratio, 0, 1, 0.01},
    {"live_peak_bytes", NULL, live_peak, 0, 1, MIB},
    {"packing_loss_bytes", "packing", packing, 0, 1, MIB},
};
static const struct column speed_columns[] = {
    {"sequences_per_s", "sequ./s", sequences, 0, 1, 1},
    {"tokens_per_s", "tokens/s", tokens, 0, 0, 1},
    {"speed_up", "speed-up", speed_up, 0, 2, 1},
    {"step_ms", "step ms", step_ms, 0, 2, 1},
    {"compute_ms", NULL, part_ms, TIME_COMPUTE, 2, 1},
    {"exposed_communication_ms", NULL, part_ms, TIME_COMMUNICATION, 2, 1},
    {"optimizer_ms", NULL, part_ms, TIME_OPTIMIZER, 2, 1},
    {"idle_ms", NULL, part_ms, TIME_IDLE, 2, 1},
    {"data_ms", NULL, data_ms, 0, 2, 1},
    {"hidden_communication_ms", NULL, hidden_ms, 0, 2, 1},
    {"compute_share", "compute %", share, TIME_COMPUTE, 1, 0.01},
    {"exposed_communication_share", "exposed %", share, TIME_COMMUNICATION, 1, 0.01},
    {"optimizer_share", "optimizer %", share, TIME_OPTIMIZER, 1, 0.01},
    {"idle_share", "idle %", share, TIME_IDLE, 1, 0.01},
    {"data_share", "data %", share, TIME_PARTS, 1, 0.01},
};
#define COUNT(list) (int)(sizeof(list) / sizeof *(list))

/* ---- on the terminal ---- */

/* Names are folders': no control character reaches the terminal. */
static void plain_name(char out[29], const char *name)
{
    snprintf(out, 29, "%.28s", name);
    for (char *p = out; *p != '\0'; p++)
        if ((unsigned char)*p < ' ' || *p == 127)
            *p = '?';
}

static int width_of(const struct column *c)
{
    int width = (int)strlen(c->title) + 1;
    return width > 11 ? width : 11;
}

static void print_value(const struct column *c, const struct row *row)
{
    double value = c->value(row, c->index) / c->unit;
    if (isfinite(value))
        out("%*.*f", width_of(c), c->digits, value);
    else
        out("%*s", width_of(c), "-");
}

static void print_columns(const struct comparison *c, const struct column *columns, int count,
                          bool losses)
{
    out("%-28s", "");
    for (int i = 0; i < count; i++)
        if (columns[i].title != NULL)
            out("%*s", width_of(&columns[i]), columns[i].title);
    out("%s\n", losses ? "  losses" : "");
    for (int k = 0; k < c->count; k++) {
        char name[29];
        struct row row = row_of(c, &c->runs[k]);
        plain_name(name, row.r->name);
        out("%-28s", name);
        if (!ran(row.r)) {
            out(columns == memory_columns ? "  failed: %s\n" : "  failed\n", row.r->reason);
            continue;
        }
        for (int i = 0; i < count; i++)
            if (columns[i].title != NULL)
                print_value(&columns[i], &row);
        if (losses && row.base == row.r)
            out("  (base)");
        else if (losses && row.first_difference == 0)
            out("  identical");
        else if (losses)
            out("  differ from step %" PRId64, row.first_difference);
        out("\n");
    }
}

static void print_categories(const struct comparison *c,
                             double (*value)(const struct row *row, int index))
{
    struct column columns[CATEGORY_COUNT];
    for (int i = 0; i < CATEGORY_COUNT; i++) {
        columns[i] = (struct column){"", category_name((enum category)i), value, i, 1, MIB};
    }
    print_columns(c, columns, CATEGORY_COUNT, false);
}

void comparison_print(const struct comparison *c)
{
    out("Memory of a rank in MiB: planned, and measured as %s\n",
        c->count > 0 && c->runs[0].on_card ? "the card's driver says"
                                           : "growth of the process, shared out to its ranks");
    print_columns(c, memory_columns, COUNT(memory_columns), false);
    out("\nPlanned by category, at the instant of the peak (MiB)\n");
    print_categories(c, at_peak);
    out("\nEach category's own maximum (MiB)\n");
    print_categories(c, own_max);
    out("\nSpeed of all ranks together, and where the time of rank 0 goes (shares of the traced "
        "step)\n");
    print_columns(c, speed_columns, COUNT(speed_columns), true);
}

/* ---- JSON ---- */

static void put_real(json_t *object, const char *key, double value)
{
    bool whole = isfinite(value) && value == floor(value) && fabs(value) < 1e15;
    json_object_set_new(object, key,
                        whole             ? json_integer((json_int_t)value)
                        : isfinite(value) ? json_real(value)
                                          : json_null());
}

/* Folder names are bytes; what is not UTF-8 cannot be JSON. */
static json_t *text_json(const char *text)
{
    json_t *s = json_string(text);
    char copy[1024];
    if (s != NULL)
        return s;
    snprintf(copy, sizeof copy, "%s", text);
    for (char *p = copy; *p != '\0'; p++)
        if ((unsigned char)*p >= 0x80)
            *p = '?';
    return json_string(copy);
}

static json_t *categories_json(const double bytes[CATEGORY_COUNT])
{
    json_t *o = json_object();
    for (int i = 0; i < CATEGORY_COUNT; i++)
        put_real(o, category_name((enum category)i), bytes[i]);
    return o;
}

static void put_measurements(json_t *o, const struct row *row)
{
    const struct run_result *r = row->r;
    json_t *bytes = json_object(), *split = json_object();
    put_real(bytes, "total", r->planned_bytes);
    put_real(bytes, "live_peak", r->live_peak_bytes);
    json_object_set_new(bytes, "at_peak", categories_json(r->at_peak));
    json_object_set_new(bytes, "own_max", categories_json(r->own_max));
    json_object_set_new(o, "planned_bytes", bytes);
    put_real(o, "measured_bytes", r->measured_bytes);
    json_object_set_new(o, "measured_by", json_string(r->on_card ? "card" : "process"));
    if (r->card != NULL)
        json_object_set(o, "card_bytes", r->card);
    put_real(o, "ratio", row->ratio);
    put_real(o, "sequences_per_s", r->sequences_per_s);
    put_real(o, "tokens_per_s", r->tokens_per_s);
    put_real(o, "step_ms", r->step_ms);
    put_real(o, "speed_up", row->speed_up);
    put_real(split, "compute", part_ms(row, TIME_COMPUTE));
    put_real(split, "exposed_communication", part_ms(row, TIME_COMMUNICATION));
    put_real(split, "optimizer", part_ms(row, TIME_OPTIMIZER));
    put_real(split, "idle", part_ms(row, TIME_IDLE));
    put_real(split, "data", data_ms(row, 0));
    put_real(split, "hidden_communication", hidden_ms(row, 0));
    json_object_set_new(o, "split_ms", split);
    json_object_set_new(o, "losses",
                        json_string(row->first_difference == 0 ? "identical" : "differ"));
    json_object_set_new(o, "first_difference",
                        row->first_difference == 0 ? json_null()
                                                   : json_integer(row->first_difference));
    json_object_set_new(o, "base", text_json(row->base->name));
}

static json_t *run_json(const struct row *row)
{
    const struct run_result *r = row->r;
    json_t *o = json_object();
    json_object_set_new(o, "name", text_json(r->name));
    json_object_set_new(o, "ranks", json_integer(r->ranks));
    json_object_set_new(o, "zero_stage",
                        r->zero_stage >= 0 ? json_integer(r->zero_stage) : json_null());
    json_object_set_new(o, "micro_batch", json_integer(r->micro_batch));
    json_object_set_new(o, "grad_accum", json_integer(r->grad_accum));
    json_object_set_new(o, "status", json_string(ran(r) ? "ok" : "failed"));
    if (ran(r))
        put_measurements(o, row);
    else
        json_object_set_new(o, "reason", text_json(r->reason));
    return o;
}

static json_t *comparison_json(const struct comparison *c)
{
    json_t *root = json_object(), *runs = json_array();
    if (c->config != NULL) {
        json_object_set_new(root, "config", text_json(c->config));
        json_object_set_new(root, "steps", json_integer(c->steps));
        json_object_set_new(root, "repeat", json_integer(c->repeat));
    }
    for (int i = 0; i < c->count; i++) {
        struct row row = row_of(c, &c->runs[i]);
        json_array_append_new(runs, run_json(&row));
    }
    json_object_set_new(root, "runs", runs);
    return root;
}

/* ---- CSV ---- */

/* In quotes, with those inside doubled: RFC 4180. */
static void csv_text(struct text_buffer *t, const char *text)
{
    text_put(t, "\"");
    for (; *text != '\0'; text++)
        text_put_bytes(t, *text == '"' ? "\"\"" : text, *text == '"' ? 2 : 1);
    text_put(t, "\"");
}

static void csv_real(struct text_buffer *t, double value)
{
    if (isfinite(value))
        text_put(t, ",%.17g", value);
    else
        text_put(t, ",");
}

static void csv_columns(struct text_buffer *t, const struct row *row, const struct column *columns,
                        int count)
{
    for (int i = 0; i < count; i++) {
        if (row != NULL) {
            csv_real(t, ran(row->r) ? columns[i].value(row, columns[i].index) : (double)NAN);
            continue;
        }
        text_put(t, ",%s", columns[i].key);
    }
}

static void csv_categories(struct text_buffer *t, const struct row *row, const char *prefix,
                           double (*value)(const struct row *row, int index))
{
    for (int i = 0; i < CATEGORY_COUNT; i++) {
        char key[64];
        snprintf(key, sizeof key, "%s_%s", prefix, category_name((enum category)i));
        csv_columns(t, row, &(struct column){key, NULL, value, i, 0, 1}, 1);
    }
}

/* @row NULL: the first line. */
static void csv_line(struct text_buffer *t, const struct row *row)
{
    if (row == NULL) {
        text_put(t, "name,ranks,zero_stage,micro_batch,grad_accum,status,losses,first_difference");
    } else {
        const struct run_result *r = row->r;
        csv_text(t, r->name);
        text_put(t, ",%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 ",%s,", r->ranks, r->zero_stage,
                 r->micro_batch, r->grad_accum, ran(r) ? "ok" : "failed");
        if (ran(r))
            text_put(t, row->first_difference == 0 ? "identical" : "differ");
        csv_real(t, row->first_difference != 0 ? (double)row->first_difference : (double)NAN);
    }
    csv_columns(t, row, memory_columns, COUNT(memory_columns));
    csv_categories(t, row, "peak", at_peak);
    csv_categories(t, row, "max", own_max);
    csv_columns(t, row, speed_columns, COUNT(speed_columns));
    text_put(t, row == NULL ? ",reason\n" : ",");
    if (row == NULL)
        return;
    csv_text(t, row->r->reason);
    text_put(t, "\n");
}

static enum status write_csv(const struct comparison *c, const char *path)
{
    struct text_buffer t = {0};
    csv_line(&t, NULL);
    for (int i = 0; i < c->count; i++) {
        struct row row = row_of(c, &c->runs[i]);
        csv_line(&t, &row);
    }
    enum status st = t.st == ST_OK ? file_write(path, t.data, t.bytes) : t.st;
    mem_free(&t.data);
    return st;
}

enum status comparison_write(const struct comparison *c, const char *dir)
{
    char path[1200];
    json_t *root = comparison_json(c);
    enum status st = ST_OK;
    TRY_GOTO(st, out, path_join(path, sizeof path, dir, "compare.json"));
    TRY_GOTO(st, out, json_file_write(path, root));
    TRY_GOTO(st, out, path_join(path, sizeof path, dir, "compare.csv"));
    TRY_GOTO(st, out, write_csv(c, path));
out:
    json_decref(root);
    return st;
}

/* ---- the page ---- */

enum { CURVE_POINTS = 600, HEAVY_BYTES = 800 << 10 };

/* At most CURVE_POINTS of a curve; long ones as means of as many neighbours. */
static json_t *thinned(json_t *curve)
{
    size_t n = json_array_size(curve), width = (n + CURVE_POINTS - 1) / CURVE_POINTS;
    json_t *thin = json_array();
    if (width <= 1) {
        json_decref(thin);
        return json_incref(curve);
    }
    for (size_t i = 0; i < n; i += width) {
        double sum = 0;
        size_t end = i + width < n ? i + width : n, counted = 0;
        for (size_t k = i; k < end; k++) {
            const json_t *loss = json_array_get(json_array_get(curve, k), 1);
            sum += json_number_value(loss);
            counted += json_is_number(loss);
        }
        json_t *step = json_array_get(json_array_get(curve, (i + end) / 2), 0);
        if (counted > 0)
            json_array_append_new(thin, json_pack("[Of]", step, sum / (double)counted));
    }
    return thin;
}

/* What is large goes in as long as there is room; returns the bytes that it took. */
static size_t add_heavy(json_t *run, const char *key, json_t *value, size_t room)
{
    char *text = NULL;
    size_t bytes = 0;
    if (value == NULL || json_text(&text, &bytes, value) != ST_OK)
        return 0;
    mem_free(&text);
    if (bytes > room)
        return 0;
    json_object_set(run, key, value);
    return bytes;
}

enum status comparison_page(const struct comparison *c, const char *path)
{
    json_t *root = comparison_json(c), *runs = json_object_get(root, "runs");
    size_t room = HEAVY_BYTES;
    json_object_set_new(root, "title", text_json(c->title));
    for (int i = 0; i < c->count; i++) {
        json_t *run = json_array_get(runs, (size_t)i);
        if (!ran(&c->runs[i]))
            continue;
        json_object_set_new(run, "loss_curve", thinned(c->runs[i].losses));
        json_object_set(run, "evaluations", c->runs[i].evaluations);
        room -= add_heavy(run, "plan", c->runs[i].plan, room);
        room -= add_heavy(run, "topology", c->runs[i].topology, room);
        room -= add_heavy(run, "timeline", c->runs[i].timeline, room);
    }
    enum status st = report_page_write(path, root);
    json_decref(root);
    return st;
}
