/* compare.json, and the page that has it in it. */
#include <jansson.h>
#include <math.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/train/comparison_row.h"
#include "engine/train/report_page.h"
#include "io/json_file.h"

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

static void put_measurements(json_t *o, const struct comparison_row *row)
{
    const struct run_result *r = row->r;
    json_t *bytes = json_object(), *split = json_object();
    put_real(bytes, "total", r->planned_bytes);
    put_real(bytes, "live_peak", r->live_peak_bytes);
    json_object_set_new(bytes, "at_peak", categories_json(r->at_peak));
    json_object_set_new(bytes, "own_max", categories_json(r->own_max));
    json_object_set_new(o, "planned_bytes", bytes);
    if (isfinite(r->counted_at_peak[0])) {
        json_t *counted = json_object();
        json_object_set_new(counted, "at_peak", categories_json(r->counted_at_peak));
        json_object_set_new(counted, "own_max", categories_json(r->counted_own_max));
        json_object_set_new(o, "counted_bytes", counted);
    } else {
        json_object_set_new(o, "counted_bytes", json_null());
    }
    put_real(o, "measured_bytes", r->measured_bytes);
    json_object_set_new(o, "measured_by", json_string(r->on_card ? "card" : "process"));
    if (r->card != NULL)
        json_object_set(o, "card_bytes", r->card);
    put_real(o, "ratio", row->ratio);
    put_real(o, "sequences_per_s", r->sequences_per_s);
    put_real(o, "tokens_per_s", r->tokens_per_s);
    put_real(o, "step_ms", r->step_ms);
    put_real(o, "speed_up", row->speed_up);
    put_real(split, "compute", comparison_part_ms(row, TIME_COMPUTE));
    put_real(split, "exposed_communication", comparison_part_ms(row, TIME_COMMUNICATION));
    put_real(split, "optimizer", comparison_part_ms(row, TIME_OPTIMIZER));
    put_real(split, "idle", comparison_part_ms(row, TIME_IDLE));
    put_real(split, "data", comparison_data_ms(row, 0));
    put_real(split, "hidden_communication", comparison_hidden_ms(row, 0));
    json_object_set_new(o, "split_ms", split);
    json_object_set_new(o, "losses",
                        json_string(row->first_difference == 0 ? "identical" : "differ"));
    json_object_set_new(o, "first_difference",
                        row->first_difference == 0 ? json_null()
                                                   : json_integer(row->first_difference));
    json_object_set_new(o, "base", text_json(row->base->name));
}

static json_t *run_json(const struct comparison_row *row)
{
    const struct run_result *r = row->r;
    json_t *o = json_object();
    json_object_set_new(o, "name", text_json(r->name));
    json_object_set_new(o, "ranks", json_integer(r->ranks));
    json_object_set_new(o, "zero_stage",
                        r->zero_stage >= 0 ? json_integer(r->zero_stage) : json_null());
    json_object_set_new(o, "micro_batch", json_integer(r->micro_batch));
    json_object_set_new(o, "grad_accum", json_integer(r->grad_accum));
    json_object_set_new(o, "status", json_string(comparison_ran(r) ? "ok" : "failed"));
    if (comparison_ran(r))
        put_measurements(o, row);
    else
        json_object_set_new(o, "reason", text_json(r->reason));
    return o;
}

json_t *comparison_json(const struct comparison *c)
{
    json_t *root = json_object(), *runs = json_array();
    if (c->config != NULL) {
        json_object_set_new(root, "config", text_json(c->config));
        json_object_set_new(root, "steps", json_integer(c->steps));
        json_object_set_new(root, "repeat", json_integer(c->repeat));
    }
    for (int i = 0; i < c->count; i++) {
        struct comparison_row row = comparison_row_of(c, &c->runs[i]);
        json_array_append_new(runs, run_json(&row));
    }
    json_object_set_new(root, "runs", runs);
    return root;
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
        if (!comparison_ran(&c->runs[i]))
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
