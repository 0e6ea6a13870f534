#include "tests/support/golden.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "tests/support/support.h"

void golden_open(struct golden *g, const char *path)
{
    json_error_t error;
    uint64_t bytes = 0;
    memset(g, 0, sizeof *g);
    assert_ok(file_read(&g->text, path));
    assert_true(g->text.bytes >= 8);
    memcpy(&bytes, g->text.data, sizeof bytes);
    assert_true(bytes <= g->text.bytes - 8);
    g->header = json_loadb(g->text.data + 8, bytes, 0, &error);
    if (g->header == NULL)
        fail_msg("%s: %s", path, error.text);
    g->data_first = 8 + bytes;
}

void golden_release(struct golden *g)
{
    json_decref(g->header);
    mem_free(&g->text.data);
    memset(g, 0, sizeof *g);
}

struct tensor golden_tensor(const struct golden *g, const char *format, ...)
{
    char name[256];
    va_list args;
    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    const json_t *entry = json_object_get(g->header, name);
    if (entry == NULL)
        fail_msg("the golden file has no %s", name);
    const char *kind = json_string_value(json_object_get(entry, "dtype"));
    const json_t *shape = json_object_get(entry, "shape");
    const json_t *offsets = json_object_get(entry, "data_offsets");
    struct tensor t = {.dims = (int)json_array_size(shape), .shape = {1, 1, 1}};
    assert_true(t.dims <= TENSOR_MAX_DIMS);
    for (int i = 0; i < t.dims; i++)
        t.shape[i] = json_integer_value(json_array_get(shape, (size_t)i));
    t.dtype = strcmp(kind, "F32") == 0   ? DTYPE_F32
              : strcmp(kind, "F64") == 0 ? DTYPE_F64
                                         : DTYPE_I32;
    size_t from = (size_t)json_integer_value(json_array_get(offsets, 0));
    size_t to = (size_t)json_integer_value(json_array_get(offsets, 1));
    assert_true(to - from == tensor_bytes(t) && to <= g->text.bytes - g->data_first);
    t.data = g->text.data + g->data_first + from;
    return t;
}

double golden_value(struct tensor t, int64_t i)
{
    assert_true(i >= 0 && i < tensor_numel(t));
    switch (t.dtype) {
    case DTYPE_F64:
        return ((const double *)t.data)[i];
    case DTYPE_I32:
        return (double)((const int32_t *)t.data)[i];
    default:
        return (double)((const float *)t.data)[i];
    }
}

double golden_error(const float *got, struct tensor want)
{
    double largest = 0.0, error = 0.0;
    for (int64_t i = 0; i < tensor_numel(want); i++) {
        double w = golden_value(want, i), e = fabs((double)got[i] - w);
        largest = fabs(w) > largest ? fabs(w) : largest;
        if (!(e <= error))
            error = isnan(e) ? (double)INFINITY : e;
    }
    return largest > 0.0 ? error / largest : error;
}
