#include "shard/account.h"

#include <stdlib.h>
#include <string.h>

bool buffer_live_at(const struct buffer *buffer, int instr)
{
    if (buffer->persistent)
        return true;
    if (buffer->first < 0)
        return false;
    if (buffer->carried && buffer->last < buffer->first) /* wraps round the turn */
        return instr <= buffer->last || instr >= buffer->first;
    return buffer->first <= instr && instr <= buffer->last;
}

size_t account_live(const struct program *p, int instr, size_t bytes[CATEGORY_COUNT])
{
    size_t sum = 0;
    memset(bytes, 0, sizeof *bytes * CATEGORY_COUNT);
    for (int i = 0; i < p->buffer_count; i++) {
        const struct buffer *b = &p->buffers[i];
        if (!buffer_live_at(b, instr))
            continue;
        bytes[b->category] += b->bytes;
        sum += b->bytes;
    }
    return sum;
}

static bool lives_meet(const struct buffer *a, const struct buffer *b)
{
    bool a_wraps = a->last < a->first, b_wraps = b->last < b->first;
    if (a_wraps && b_wraps)
        return true;
    if (a_wraps)
        return b->first <= a->last || b->last >= a->first;
    if (b_wraps)
        return a->first <= b->last || a->last >= b->first;
    return a->first <= b->last && b->first <= a->last;
}

/* ---- placing ---- */

enum order { BY_BYTES, BY_AREA, BY_START, ORDERS };

enum {
    LATE_MAY_COST = 100, /* late updates may need 1 / 100 more memory */
    ATTEMPTS = 24,       /* an order is tried, each time with what was highest put first */
    GOOD_ENOUGH = 200    /* stop at a packing loss of 1 / 200 */
};

struct entry {
    int buffer;
    double key;
    bool fixed; /* carried: placed by the step program */
};

static double order_key(const struct buffer *b, enum order order, int instr_count)
{
    int length =
        b->last >= b->first ? b->last - b->first + 1 : instr_count - b->first + b->last + 1;
    if (order == BY_BYTES)
        return -(double)b->bytes;
    if (order == BY_AREA)
        return -(double)b->bytes * length;
    return b->first;
}

static int compare_entries(const void *left, const void *right)
{
    const struct entry *a = left, *b = right;
    if (a->fixed != b->fixed)
        return a->fixed ? -1 : 1;
    if (a->key != b->key)
        return a->key < b->key ? -1 : 1;
    return a->buffer - b->buffer;
}

struct span {
    size_t from, to;
};

static int compare_spans(const void *left, const void *right)
{
    const struct span *a = left, *b = right;
    return a->from < b->from ? -1 : a->from > b->from;
}

/* The lowest offset >= base with room for @bytes among sorted, possibly overlapping spans. */
static size_t lowest_gap(struct span *spans, int count, size_t base, size_t bytes)
{
    qsort(spans, (size_t)count, sizeof *spans, compare_spans);
    size_t offset = base;
    for (int i = 0; i < count; i++) {
        if (spans[i].from >= offset + bytes)
            break;
        if (spans[i].to > offset)
            offset = spans[i].to;
    }
    return offset;
}

/* Place all but the fixed buffers of @p above @base in one order. Return: bytes of the arena. */
static size_t place(struct program *p, size_t *offsets, struct entry *entries, int count,
                    struct span *spans, size_t base)
{
    size_t top = base;
    for (int i = 0; i < count; i++) {
        const struct buffer *b = &p->buffers[entries[i].buffer];
        if (!entries[i].fixed) {
            int busy = 0;
            for (int j = 0; j < i; j++) {
                const struct buffer *other = &p->buffers[entries[j].buffer];
                if (lives_meet(b, other)) {
                    size_t from = offsets[entries[j].buffer];
                    spans[busy++] = (struct span){from, from + other->bytes};
                }
            }
            offsets[entries[i].buffer] = lowest_gap(spans, busy, base, b->bytes);
        }
        size_t end = offsets[entries[i].buffer] + b->bytes;
        top = end > top ? end : top;
    }
    return top;
}

/* Most bytes that live at one instruction: no placement has a lower top. */
static size_t live_peak(const struct program *p)
{
    size_t most = 0, bytes[CATEGORY_COUNT];
    for (int i = 0; i < p->instr_count; i++) {
        size_t live = account_live(p, i, bytes);
        most = live > most ? live : most;
    }
    return most;
}

/* What makes the arena as high as it is comes first in the next attempt. */
static void promote_highest(const struct program *p, const size_t *offsets, struct entry *entries,
                            int count)
{
    int fixed = 0, highest = 0;
    size_t top = 0;
    for (int i = 0; i < count; i++) {
        size_t end = offsets[entries[i].buffer] + p->buffers[entries[i].buffer].bytes;
        fixed += entries[i].fixed;
        if (end >= top && !entries[i].fixed) {
            top = end;
            highest = i;
        }
    }
    struct entry moved = entries[highest];
    for (int i = highest; i > fixed; i--)
        entries[i] = entries[i - 1];
    if (!moved.fixed)
        entries[fixed] = moved;
}

/* Transient and (in the step program) carried buffers, placed above the persistent ones. */
static enum status place_program(struct program *p, size_t base, size_t *top)
{
    enum status st = ST_OK;
    size_t enough = live_peak(p);
    enough += enough / GOOD_ENOUGH;
    struct entry *entries = NULL;
    struct span *spans = NULL;
    size_t *offsets = NULL, n = (size_t)p->buffer_count;
    TRY_GOTO(st, out, mem_alloc(&entries, sizeof *entries * (n + 1)));
    TRY_GOTO(st, out, mem_alloc(&spans, sizeof *spans * (n + 1)));
    TRY_GOTO(st, out, mem_alloc(&offsets, sizeof *offsets * (n + 1)));
    *top = SIZE_MAX;
    for (int order = 0; order<ORDERS && * top> enough; order++) {
        int count = 0;
        for (int i = 0; i < p->buffer_count; i++) {
            const struct buffer *b = &p->buffers[i];
            offsets[i] = b->offset;
            if (!b->persistent && b->first >= 0)
                entries[count++] = (struct entry){i, order_key(b, order, p->instr_count),
                                                  b->carried && p->kind != PROGRAM_STEP};
        }
        qsort(entries, (size_t)count, sizeof *entries, compare_entries);
        for (int attempt = 0; attempt<ATTEMPTS && * top> enough; attempt++) {
            size_t bytes = place(p, offsets, entries, count, spans, base);
            promote_highest(p, offsets, entries, count);
            if (bytes >= *top)
                continue;
            *top = bytes;
            for (int i = 0; i < count; i++)
                p->buffers[entries[i].buffer].offset = offsets[entries[i].buffer];
        }
    }
out:
    mem_free(&offsets);
    mem_free(&spans);
    mem_free(&entries);
    return st;
}

/* Buffers below shared_count are the same in all programs: one place for each. */
static size_t place_persistent(struct plan *plan)
{
    struct program *step = &plan->programs[PROGRAM_STEP];
    size_t offset = 0;
    for (int i = 0; i < step->shared_count; i++) {
        if (!step->buffers[i].persistent)
            continue;
        for (int k = 0; k < PROGRAM_KINDS; k++)
            plan->programs[k].buffers[i].offset = offset;
        offset += step->buffers[i].bytes;
    }
    return offset;
}

static void note_peaks(struct account *account, const struct program *p)
{
    for (int i = 0; i < p->instr_count; i++) {
        size_t bytes[CATEGORY_COUNT];
        size_t live = account_live(p, i, bytes);
        for (int c = 0; c < CATEGORY_COUNT; c++)
            if (bytes[c] > account->own_max[c])
                account->own_max[c] = bytes[c];
        if (live <= account->live_peak_bytes)
            continue;
        account->live_peak_bytes = live;
        account->peak_program = p->kind;
        account->peak_instr = i;
        memcpy(account->at_peak, bytes, sizeof bytes);
    }
}

static enum status build(struct plan *plan, struct account *account,
                         const struct program_spec *spec)
{
    static const enum program_kind order[PROGRAM_KINDS] = {PROGRAM_STEP, PROGRAM_PROLOGUE,
                                                           PROGRAM_FLUSH, PROGRAM_EVALUATE};
    enum status st = ST_OK;
    memset(account, 0, sizeof *account);
    plan->late = spec->update != UPDATE_EARLY;
    for (int k = 0; k < PROGRAM_KINDS; k++)
        TRY_GOTO(st, out, program_build(&plan->programs[k], (enum program_kind)k, spec));
    account->persistent_bytes = place_persistent(plan);
    account->arena_bytes = account->persistent_bytes;
    const struct program *step = &plan->programs[PROGRAM_STEP];
    for (int k = 0; k < PROGRAM_KINDS; k++) {
        struct program *p = &plan->programs[order[k]];
        ASSERT(p->shared_count == step->shared_count);
        for (int i = 0; i < p->shared_count; i++)
            if (p->buffers[i].carried)
                p->buffers[i].offset = step->buffers[i].offset;
        size_t top = 0;
        TRY_GOTO(st, out, place_program(p, account->persistent_bytes, &top));
        if (top > account->arena_bytes)
            account->arena_bytes = top;
        TRY_GOTO(st, out, program_link(p, true));
        note_peaks(account, p);
    }
out:
    if (st != ST_OK)
        plan_release(plan);
    return st;
}

enum status plan_build(struct plan *plan, struct account *account, const struct program_spec *spec)
{
    struct program_spec chosen = *spec;
    struct account early;
    if (spec->update != UPDATE_AUTO)
        return build(plan, account, spec);
    chosen.update = UPDATE_EARLY;
    TRY(build(plan, &early, &chosen));
    chosen.update = UPDATE_LATE;
    TRY(build(plan, account, &chosen));
    if (account->arena_bytes <= early.arena_bytes + early.arena_bytes / LATE_MAY_COST)
        return ST_OK;
    chosen.update = UPDATE_EARLY;
    return build(plan, account, &chosen);
}

void plan_release(struct plan *plan)
{
    for (int k = 0; k < PROGRAM_KINDS; k++)
        program_release(&plan->programs[k]);
}
