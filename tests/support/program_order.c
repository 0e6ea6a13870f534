#include "tests/support/program_order.h"

#include <limits.h>
#include <string.h>

#include "tests/support/support.h"

enum { MAX_INSTRS = 2048, WORDS = MAX_INSTRS / 64 };

struct range {
    size_t from, to;
    bool write;
};

struct touched {
    struct range ranges[INSTR_MAX_OPERANDS];
    int count;
};

static bool conflict(const struct touched *a, const struct touched *b)
{
    for (int i = 0; i < a->count; i++)
        for (int k = 0; k < b->count; k++)
            if ((a->ranges[i].write || b->ranges[k].write) && a->ranges[i].from < b->ranges[k].to &&
                b->ranges[k].from < a->ranges[i].to)
                return true;
    return false;
}

static void list_touched(struct touched *out, const struct program *p, bool placed)
{
    for (int i = 0; i < p->instr_count; i++) {
        out[i].count = p->instrs[i].operand_count;
        for (int k = 0; k < out[i].count; k++) {
            const struct operand *o = &p->instrs[i].operands[k];
            size_t from = placed ? p->buffers[o->buffer].offset : (size_t)o->buffer;
            out[i].ranges[k] =
                (struct range){from, from + (placed ? p->buffers[o->buffer].bytes : 1),
                               (o->access & ACCESS_WRITE) != 0};
        }
    }
}

static bool has(const uint64_t *set, int i)
{
    return set[i / 64] >> (i % 64) & 1;
}

static void add_behind(uint64_t *set, const uint64_t *other, int i)
{
    for (int w = 0; w < WORDS; w++)
        set[w] |= other[w];
    set[i / 64] |= (uint64_t)1 << (i % 64);
}

/* before[i]: all that has ended when instruction i begins. */
static void streams_before(uint64_t before[][WORDS], const struct program *p)
{
    int last[PROGRAM_STREAMS] = {-1, -1, -1, -1};
    for (int i = 0; i < p->instr_count; i++) {
        const struct instr *in = &p->instrs[i];
        if (last[in->stream] >= 0)
            add_behind(before[i], before[last[in->stream]], last[in->stream]);
        for (int s = 0; s < PROGRAM_STREAMS; s++)
            if (in->wait[s] >= 0)
                add_behind(before[i], before[in->wait[s]], in->wait[s]);
        last[in->stream] = i;
    }
}

static bool runs_on(enum program_op op)
{
    return op == OP_GATHER || op == OP_REDUCE;
}

static void thread_before(uint64_t before[][WORDS], const struct program *p)
{
    int completed = -1; /* collectives up to this instruction are */
    for (int i = 0; i < p->instr_count; i++) {
        const struct instr *in = &p->instrs[i];
        for (int s = 0; s < PROGRAM_STREAMS; s++)
            if (in->wait[s] > completed && runs_on(p->instrs[in->wait[s]].op))
                completed = in->wait[s];
        for (int k = 0; k < i; k++)
            if (k <= completed || !runs_on(p->instrs[k].op))
                before[i][k / 64] |= (uint64_t)1 << (k % 64);
        if (in->op == OP_AGREE || in->op == OP_COLLECT) /* they wait for themselves */
            completed = i;
    }
}

int program_first_race(const struct program *p, enum order_rule rule, bool placed, int *with)
{
    static struct touched touched[MAX_INSTRS];
    static uint64_t before[MAX_INSTRS][WORDS];
    assert_true(p->instr_count <= MAX_INSTRS);
    memset(before, 0, sizeof before[0] * (size_t)p->instr_count);
    list_touched(touched, p, placed);
    if (rule == ORDER_STREAMS)
        streams_before(before, p);
    else
        thread_before(before, p);
    for (int i = 0; i < p->instr_count; i++)
        for (int k = 0; k < i; k++)
            if (!has(before[i], k) && conflict(&touched[i], &touched[k])) {
                *with = k;
                return i;
            }
    return -1;
}

int program_refill(const struct program *p, int buffer)
{
    for (int i = 0; p->buffers[buffer].carried && i < p->instr_count; i++)
        for (int k = 0; k < p->instrs[i].operand_count; k++)
            if (p->instrs[i].operands[k].buffer == buffer &&
                p->instrs[i].operands[k].access == ACCESS_WRITE)
                return i;
    return INT_MAX;
}

int program_life_end(const struct program *p, int buffer, int unit_count)
{
    int last = -1, next = -1, after = -1, anew = program_refill(p, buffer);
    for (int i = 0; i < anew && i < p->instr_count; i++)
        for (int k = 0; k < p->instrs[i].operand_count; k++)
            if (p->instrs[i].operands[k].buffer == buffer)
                last = i;
    if (p->buffers[buffer].carried && p->kind == PROGRAM_FLUSH)
        return last < 0 ? last : p->instr_count - 1;
    if (last < 0 || p->instrs[last].op != OP_REDUCE || p->instrs[last].flags & FLAG_ROWS)
        return last;
    for (int i = p->instr_count - 1; i > last; i--) {
        const struct instr *in = &p->instrs[i];
        if (in->op == OP_FORWARD && in->unit == unit_count / 2)
            next = i, after = -1;
        if (in->op != OP_BACKWARD)
            continue;
        /* A table's, if it comes right behind, is as good as the end of this one. */
        bool table = after >= 0 && program_operand(&p->instrs[after], ROLE_PARAM) == NULL;
        next = table ? next : i;
        after = i;
    }
    return next > last ? next : last;
}
