#include "engine/train/plan_json.h"

#include <jansson.h>

#include "engine/base/file.h"
#include "io/json_file.h"

static json_t *names(int count, const char *(*name)(const struct trainer *t, int index),
                     const struct trainer *t)
{
    json_t *list = json_array();
    for (int i = 0; i < count; i++)
        json_array_append_new(list, json_string(name(t, i)));
    return list;
}

static const char *name_of_category(const struct trainer *t, int index)
{
    (void)t;
    return category_name((enum category)index);
}

static const char *name_of_stream(const struct trainer *t, int index)
{
    (void)t;
    return program_stream_name((enum program_stream)index);
}

static const char *name_of_unit(const struct trainer *t, int index)
{
    return t->setup.model.units[index].name;
}

static json_t *instrs_of(const struct program *p)
{
    json_t *list = json_array();
    for (int i = 0; i < p->instr_count; i++) {
        const struct instr *in = &p->instrs[i];
        json_array_append_new(list, json_pack("[isii]", (int)in->stream, program_op_name(in->op),
                                              in->unit, in->micro_batch));
    }
    return list;
}

static json_t *buffers_of(const struct program *p)
{
    json_t *list = json_array();
    for (int i = 0; i < p->buffer_count; i++) {
        const struct buffer *b = &p->buffers[i];
        if (b->bytes == 0 || (b->first < 0 && !b->persistent))
            continue;
        json_array_append_new(list,
                              json_pack("[iiiIIiii]", (int)b->category, b->unit, b->micro_batch,
                                        (json_int_t)b->bytes, (json_int_t)b->offset, b->first,
                                        b->last, b->persistent ? 1 : (b->carried ? 2 : 0)));
    }
    return list;
}

enum status plan_json_write(const struct trainer *t)
{
    char path[1200];
    const struct program *p = &t->plan.programs[PROGRAM_STEP];
    TRY(path_join(path, sizeof path, t->config->output.dir, "plan.json"));
    json_t *root = json_pack("{s:I,s:i,s:I,s:o,s:o,s:o,s:o,s:o}", "zero_stage",
                             (json_int_t)t->setup.spec.zero_stage, "world_size",
                             t->comm->world_size, "arena_bytes", (json_int_t)t->account.arena_bytes,
                             "categories", names(CATEGORY_COUNT, name_of_category, t), "streams",
                             names(PROGRAM_STREAMS, name_of_stream, t), "units",
                             names(t->setup.model.unit_count, name_of_unit, t), "instrs",
                             instrs_of(p), "buffers", buffers_of(p));
    enum status st = json_file_write_line(path, root);
    json_decref(root);
    return st;
}
