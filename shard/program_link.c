#include <string.h>

#include "shard/memory_map.h"
#include "shard/program.h"

/* The last instruction of each stream that touched a buffer; -1: none. */
struct touches {
    int writer;
    int reader[PROGRAM_STREAMS];
    int any[PROGRAM_STREAMS];
};

static void wait_for(struct program *p, struct instr *in, int other)
{
    if (other < 0)
        return;
    int *wait = &in->wait[p->instrs[other].stream];
    if (*wait < other)
        *wait = other;
}

static struct memory_range range_of(const struct buffer *b)
{
    return (struct memory_range){b->offset, b->offset + b->bytes};
}

/* Buffers that come and go, and have memory. */
static bool is_placed(const struct buffer *b)
{
    return !b->persistent && b->first >= 0 && b->bytes > 0;
}

static enum status map_init(struct memory_map *map, const struct program *p)
{
    struct memory_range *ranges = NULL;
    int count = 0;
    TRY(mem_alloc(&ranges, sizeof *ranges * ((size_t)p->buffer_count + 1)));
    for (int i = 0; i < p->buffer_count; i++)
        if (is_placed(&p->buffers[i]))
            ranges[count++] = range_of(&p->buffers[i]);
    enum status st = memory_map_init(map, ranges, count);
    mem_free(&ranges);
    return st;
}

static bool overlap(const struct buffer *a, const struct buffer *b)
{
    return a->offset < b->offset + b->bytes && b->offset < a->offset + a->bytes;
}

/* The same without the buffer's own uses: a carried one was there before, at the begin of the turn,
 * and may be used again without waiting for that. There are few of them. */
static void others_last_uses(const struct program *p, const struct touches *touches, int fresh,
                             int last[PROGRAM_STREAMS])
{
    memset(last, 0xFF, sizeof(int) * PROGRAM_STREAMS);
    for (int i = 0; i < p->buffer_count; i++)
        if (i != fresh && is_placed(&p->buffers[i]) && overlap(&p->buffers[fresh], &p->buffers[i]))
            for (int s = 0; s < PROGRAM_STREAMS; s++)
                last[s] = touches[i].any[s] > last[s] ? touches[i].any[s] : last[s];
}

/* Memory of @fresh was used by other buffers whose life is over: wait for their last uses. */
static void wait_for_memory(struct program *p, struct memory_map *map,
                            const struct touches *touches, int fresh, int index)
{
    int last[PROGRAM_STREAMS];
    if (p->buffers[fresh].carried)
        others_last_uses(p, touches, fresh, last);
    else
        memory_map_last(map, range_of(&p->buffers[fresh]), last);
    for (int s = 0; s < PROGRAM_STREAMS; s++)
        wait_for(p, &p->instrs[index], last[s]);
}

static void link_operands(struct program *p, struct touches *touches, int index)
{
    struct instr *in = &p->instrs[index];
    for (int k = 0; k < in->operand_count; k++) {
        struct touches *t = &touches[in->operands[k].buffer];
        wait_for(p, in, t->writer);
        if (in->operands[k].access & ACCESS_WRITE)
            for (int s = 0; s < PROGRAM_STREAMS; s++)
                wait_for(p, in, t->reader[s]);
    }
    for (int k = 0; k < in->operand_count; k++) {
        struct touches *t = &touches[in->operands[k].buffer];
        if (in->operands[k].access & ACCESS_WRITE)
            t->writer = index;
        if (in->operands[k].access & ACCESS_READ)
            t->reader[in->stream] = index;
        t->any[in->stream] = index;
    }
}

/* After its waits are known: what instruction @index has used. */
static void map_operands(struct memory_map *map, const struct program *p, int index)
{
    const struct instr *in = &p->instrs[index];
    for (int k = 0; k < in->operand_count; k++) {
        const struct buffer *b = &p->buffers[in->operands[k].buffer];
        if (is_placed(b))
            memory_map_use(map, range_of(b), in->stream, index);
    }
}

enum status program_link(struct program *p, bool placed)
{
    enum status st = ST_OK;
    struct touches *touches = NULL;
    struct memory_map map = {0};
    TRY(mem_alloc(&touches, sizeof *touches * (size_t)(p->buffer_count + 1)));
    memset(touches, 0xFF, sizeof *touches * (size_t)p->buffer_count); /* all -1 */
    if (placed)
        TRY_GOTO(st, out, map_init(&map, p));
    for (int i = 0; i < p->instr_count; i++) {
        for (int s = 0; s < PROGRAM_STREAMS; s++)
            p->instrs[i].wait[s] = -1;
        for (int k = 0; placed && k < p->instrs[i].operand_count; k++) {
            int fresh = p->instrs[i].operands[k].buffer;
            if (is_placed(&p->buffers[fresh]) && p->buffers[fresh].first == i)
                wait_for_memory(p, &map, touches, fresh, i);
        }
        link_operands(p, touches, i);
        if (placed)
            map_operands(&map, p, i);
    }
out:
    memory_map_release(&map);
    mem_free(&touches);
    return st;
}

const char *program_op_name(enum program_op op)
{
    static const char *const names[PROGRAM_OPS] = {
        "BEGIN", "GATHER", "FORWARD", "RECOMPUTE", "BACKWARD", "REDUCE", "ACCUMULATE",
        "NORM",  "AGREE",  "UPDATE",  "CLEAR",     "COLLECT",  "CUT"};
    return names[op];
}

const char *program_stream_name(enum program_stream stream)
{
    static const char *const names[PROGRAM_STREAMS] = {"compute", "gather", "reduce", "update"};
    return names[stream];
}

const char *category_name(enum category c)
{
    static const char *const names[CATEGORY_COUNT] = {"parameters",  "gradients", "master_weights",
                                                      "adam_m",      "adam_v",    "in_flight",
                                                      "activations", "workspace", "batch"};
    return names[c];
}

int64_t program_collective_bytes(const struct program *p, enum program_op op, int world_size)
{
    int64_t total = 0;
    for (int i = 0; i < p->instr_count; i++) {
        const struct instr *in = &p->instrs[i];
        const struct operand *o = in->op == op ? program_whole(in) : NULL;
        if (o != NULL)
            total += (int64_t)p->buffers[o->buffer].bytes / world_size * (world_size - 1);
    }
    return total;
}
