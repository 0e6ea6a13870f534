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
#include "engine/train/comparison_row.h"
#include "io/json_file.h"

/* ---- on the terminal ---- */

/* Names are folders': no control character reaches the terminal. */
static void plain_name(char out[29], const char *name)
{
    snprintf(out, 29, "%.28s", name);
    for (char *p = out; *p != '\0'; p++)
        if ((unsigned char)*p < ' ' || *p == 127)
            *p = '?';
}

static int width_of(const struct comparison_column *c)
{
    int width = (int)strlen(c->title) + 1;
    return width > 11 ? width : 11;
}

static void print_value(const struct comparison_column *c, const struct comparison_row *row)
{
    double value = c->value(row, c->index) / c->unit;
    if (isfinite(value))
        out("%*.*f", width_of(c), c->digits, value);
    else
        out("%*s", width_of(c), "-");
}

static void print_columns(const struct comparison *c, const struct comparison_column *columns,
                          int count, bool losses)
{
    out("%-28s", "");
    for (int i = 0; i < count; i++)
        if (columns[i].title != NULL)
            out("%*s", width_of(&columns[i]), columns[i].title);
    out("%s\n", losses ? "  losses" : "");
    for (int k = 0; k < c->count; k++) {
        char name[29];
        struct comparison_row row = comparison_row_of(c, &c->runs[k]);
        plain_name(name, row.r->name);
        out("%-28s", name);
        if (!comparison_ran(row.r)) {
            out(columns == comparison_memory ? "  failed: %s\n" : "  failed\n", row.r->reason);
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
                             double (*value)(const struct comparison_row *row, int index))
{
    struct comparison_column columns[CATEGORY_COUNT];
    for (int i = 0; i < CATEGORY_COUNT; i++) {
        columns[i] = (struct comparison_column){
            "", category_name((enum category)i), value, i, 1, COMPARISON_MIB};
    }
    print_columns(c, columns, CATEGORY_COUNT, false);
}

static bool is_counted(const struct comparison *c)
{
    bool counted = false;
    for (int i = 0; i < c->count; i++)
        counted |= comparison_ran(&c->runs[i]) && isfinite(c->runs[i].counted_at_peak[0]);
    return counted;
}

void comparison_print(const struct comparison *c)
{
    out("Memory of a rank in MiB: planned, and measured as %s\n",
        c->count > 0 && c->runs[0].on_card ? "the card's driver says"
                                           : "growth of the process, shared out to its ranks");
    print_columns(c, comparison_memory, COMPARISON_MEMORY, false);
    out("\nPlanned by category, at the instant of the peak (MiB)\n");
    print_categories(c, comparison_at_peak);
    out("\nEach category's own maximum (MiB)\n");
    print_categories(c, comparison_own_max);
    if (is_counted(c)) {
        out("\nMeasured by category, at the instant of the peak (MiB): each buffer allocated where "
            "its "
            "life begins, and freed\n");
        print_categories(c, comparison_counted_at_peak);
        out("\nMeasured, each category's own maximum (MiB)\n");
        print_categories(c, comparison_counted_own_max);
    }
    out("\nSpeed of all ranks together, and where the time of rank 0 goes (shares of the traced "
        "step)\n");
    print_columns(c, comparison_speed, COMPARISON_SPEED, true);
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

static void csv_columns(struct text_buffer *t, const struct comparison_row *row,
                        const struct comparison_column *columns, int count)
{
    for (int i = 0; i < count; i++) {
        if (row != NULL) {
            csv_real(t, comparison_ran(row->r) ? columns[i].value(row, columns[i].index)
                                               : (double)NAN);
            continue;
        }
        text_put(t, ",%s", columns[i].key);
    }
}

static void csv_categories(struct text_buffer *t, const struct comparison_row *row,
                           const char *prefix,
                           double (*value)(const struct comparison_row *row, int index))
{
    for (int i = 0; i < CATEGORY_COUNT; i++) {
        char key[64];
        snprintf(key, sizeof key, "%s_%s", prefix, category_name((enum category)i));
        csv_columns(t, row, &(struct comparison_column){key, NULL, value, i, 0, 1}, 1);
    }
}

/* @row NULL: the first line. */
static void csv_line(struct text_buffer *t, const struct comparison_row *row)
{
    if (row == NULL) {
        text_put(t, "name,ranks,zero_stage,micro_batch,grad_accum,status,losses,first_difference");
    } else {
        const struct run_result *r = row->r;
        csv_text(t, r->name);
        text_put(t, ",%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 ",%s,", r->ranks, r->zero_stage,
                 r->micro_batch, r->grad_accum, comparison_ran(r) ? "ok" : "failed");
        if (comparison_ran(r))
            text_put(t, row->first_difference == 0 ? "identical" : "differ");
        csv_real(t, row->first_difference != 0 ? (double)row->first_difference : (double)NAN);
    }
    csv_columns(t, row, comparison_memory, COMPARISON_MEMORY);
    csv_categories(t, row, "peak", comparison_at_peak);
    csv_categories(t, row, "max", comparison_own_max);
    csv_categories(t, row, "counted_peak", comparison_counted_at_peak);
    csv_categories(t, row, "counted_max", comparison_counted_own_max);
    csv_columns(t, row, comparison_speed, COMPARISON_SPEED);
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
        struct comparison_row row = comparison_row_of(c, &c->runs[i]);
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
