#include "engine/train/time_split.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/arena.h"
#include "io/json_file.h"

struct border {
    double at;
    enum time_part part;
    int change; /* +1: an instruction begins, -1: it ends */
};

static enum time_part part_of(const char *op)
{
    static const struct {
        const char *op;
        enum time_part part;
    } parts[] = {
        {"NORM", TIME_OPTIMIZER},       {"UPDATE", TIME_OPTIMIZER},
        {"CLEAR", TIME_OPTIMIZER},      {"GATHER", TIME_COMMUNICATION},
        {"REDUCE", TIME_COMMUNICATION}, {"AGREE", TIME_COMMUNICATION},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (strcmp(op, parts[i].op) == 0)
            return parts[i].part;
    return TIME_COMPUTE;
}

static int by_time(const void *a, const void *b)
{
    const struct border *x = a, *y = b;
    return x->at < y->at ? -1 : x->at > y->at;
}

static double number(const json_t *object, const char *key)
{
    return json_number_value(json_object_get(object, key));
}

static void sweep(struct time_split *split, const struct border *borders, size_t count)
{
    int running[TIME_PARTS] = {0};
    double at = 0;
    for (size_t i = 0; i <= count; i++) {
        double next = i < count ? borders[i].at : split->step_ms;
        if (next > split->step_ms)
            next = split->step_ms;
        int part = 0;
        while (part < TIME_IDLE && running[part] == 0)
            part++;
        if (next > at) {
            split->part_ms[part] += next - at;
            if (part < TIME_COMMUNICATION && running[TIME_COMMUNICATION] > 0)
                split->hidden_ms += next - at;
            at = next;
        }
        if (i < count)
            running[borders[i].part] += borders[i].change;
    }
}

enum status time_split_of(struct time_split *split, const json_t *trace, const char *path)
{
    const json_t *events = json_object_get(trace, "traceEvents"), *e;
    const json_t *about = json_object_get(trace, "otherData");
    struct border *borders = NULL;
    size_t count = 0, i;
    memset(split, 0, sizeof *split);
    if (!json_is_array(events) || !json_is_number(json_object_get(about, "step_us")))
        return FAIL(CORRUPT, "%s: expected traceEvents and otherData.step_us of a trace, found %s",
                    path, json_kind(events));
    split->step_ms = number(about, "step_us") * 1e-3;
    double step = number(about, "step"); /* anybody may have written the file */
    split->step = step >= 0 && step < 0x1p31 ? (long)step : 0;
    split->captured = json_is_true(json_object_get(about, "captured"));
    TRY(mem_alloc(&borders, sizeof *borders * 2 * (json_array_size(events) + 1)));
    json_array_foreach(events, i, e)
    {
        const char *op = json_string_value(json_object_get(json_object_get(e, "args"), "op"));
        if (op == NULL)
            continue;
        double begin = number(e, "ts") * 1e-3, end = begin + number(e, "dur") * 1e-3;
        borders[count++] = (struct border){begin, part_of(op), 1};
        borders[count++] = (struct border){end, part_of(op), -1};
    }
    qsort(borders, count, sizeof *borders, by_time);
    sweep(split, borders, count);
    mem_free(&borders);
    return ST_OK;
}
