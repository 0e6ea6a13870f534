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

/* ---- live bytes ---- */

/* What lives at each instruction of a program: account_live() of all of them in one sweep. */
struct profile {
    size_t (*live)[CATEGORY_COUNT]; /* owned; by instruction */
    size_t peak;                    /* most bytes at one: no placement has a lower top */
};

/* From @first to @last; sums wrap round, and the running sum is right again. */
static void profile_add(struct profile *f, int instr_count, const struct buffer *b, int first,
                        int last)
{
    f->live[first][b->category] += b->bytes;
    if (last + 1 < instr_count)
        f->live[last + 1][b->category] -= b->bytes;
}

static enum status profile_init(struct profile *f, const struct program *p)
{
    int end = p->instr_count - 1;
    f->peak = 0;
    TRY(mem_alloc(&f->live, sizeof *f->live * (size_t)(p->instr_count + 1)));
    for (int i = 0; i < p->buffer_count && end >= 0; i++) {
        const struct buffer *b = &p->buffers[i];
        if (b->persistent) {
            profile_add(f, p->instr_count, b, 0, end);
        } else if (b->first >= 0 && b->carried && b->last < b->first) { /* round the turn */
            if (b->last >= 0)
                profile_add(f, p->instr_count, b, 0, b->last);
            profile_add(f, p->instr_count, b, b->first, end);
        } else if (b->first >= 0) {
            profile_add(f, p->instr_count, b, b->first, b->last);
        }
    }
    for (int n = 0; n < p->instr_count; n++) {
        size_t sum = 0;
        for (int c = 0; c < CATEGORY_COUNT; c++) {
            if (n > 0)
                f->live[n][c] += f->live[n - 1][c];
            sum += f->live[n][c];
        }
        f->peak = sum > f->peak ? sum : f->peak;
    }
    return ST_OK;
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

/* Placed buffers by offset: all of them, and those that live in each part of the program. Most
 * buffers live in one part, that of their micro-batch, and only its list has to be searched. */
enum { PARTS = 32, PART_ALL = PARTS, LISTS };

struct placed {
    int *index[LISTS]; /* of buffers; owned */
    int count[LISTS];
    int parts;           /* 0: no CUT, all is one list */
    unsigned char *part; /* owned; of each instruction */
};

/* Parts are micro-batches, between CUTs; several of them if there are many. */
static enum status placed_init(struct placed *s, const struct program *p)
{
    int cuts = 0, seen = 0;
    size_t entries = (size_t)p->buffer_count + 1;
    TRY(mem_alloc(&s->part, (size_t)p->instr_count + 1));
    for (int i = 0; i < p->instr_count; i++)
        cuts += p->instrs[i].op == OP_CUT;
    s->parts = cuts == 0 ? 0 : cuts < PARTS ? cuts + 1 : PARTS;
    for (int i = 0; i < p->instr_count; i++) {
        s->part[i] = (unsigned char)((int64_t)seen * s->parts / (cuts + 1));
        seen += p->instrs[i].op == OP_CUT;
    }
    for (int k = 0; k < s->parts; k++)
        TRY(mem_alloc_raw(&s->index[k], sizeof *s->index[k] * entries));
    return mem_alloc_raw(&s->index[PART_ALL], sizeof *s->index[PART_ALL] * entries);
}

static void placed_release(struct placed *s)
{
    for (int k = 0; k < LISTS; k++)
        mem_free(&s->index[k]);
    mem_free(&s->part);
}

/* The one part in which @b lives, or PART_ALL. */
static int part_of(const struct placed *s, const struct buffer *b)
{
    bool one = s->parts > 0 && b->first <= b->last && s->part[b->first] == s->part[b->last];
    return one ? s->part[b->first] : PART_ALL;
}

static void list_add(struct placed *s, int list, const size_t *offsets, int buffer)
{
    int low = 0, high = s->count[list]++, end = high, *index = s->index[list];
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (offsets[index[middle]] > offsets[buffer])
            high = middle;
        else
            low = middle + 1;
    }
    memmove(index + low + 1, index + low, sizeof *index * (size_t)(end - low));
    index[low] = buffer;
}

static void placed_add(struct placed *s, const struct program *p, const size_t *offsets, int buffer)
{
    const struct buffer *b = &p->buffers[buffer];
    list_add(s, PART_ALL, offsets, buffer);
    bool wraps = b->last < b->first;
    int first = s->part[b->first], last = b->last >= 0 ? s->part[b->last] : -1;
    for (int k = 0; k < s->parts; k++)
        if (wraps ? k <= last || k >= first : k >= first && k <= last)
            list_add(s, k, offsets, buffer);
}

/* The lowest offset >= base that is free for the whole life of @b. */
static size_t lowest_gap(const struct program *p, const size_t *offsets, const struct placed *s,
                         const struct buffer *b, size_t base)
{
    size_t offset = base;
    int list = part_of(s, b);
    for (int i = 0; i < s->count[list]; i++) {
        const struct buffer *other = &p->buffers[s->index[list][i]];
        size_t from = offsets[s->index[list][i]];
        if (from >= offset + b->bytes)
            break;
        if (from + other->bytes > offset && lives_meet(b, other))
            offset = from + other->bytes;
    }
    return offset;
}

/* Place all but the fixed buffers of @p above @base in one order. Return: bytes of the arena. */
static size_t place(const struct program *p, size_t *offsets, const struct entry *entries,
                    int count, struct placed *placed, size_t base)
{
    size_t top = base;
    memset(placed->count, 0, sizeof placed->count);
    for (int i = 0; i < count; i++) {
        int index = entries[i].buffer;
        const struct buffer *b = &p->buffers[index];
        if (!entries[i].fixed)
            offsets[index] = lowest_gap(p, offsets, placed, b, base);
        placed_add(placed, p, offsets, index);
        size_t end = offsets[index] + b->bytes;
        top = end > top ? end : top;
    }
    return top;
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

/* Transient and (in the step program) carried buffers, placed above the persistent ones.
 * @live_peak: most bytes that live at one instruction. */
static enum status place_program(struct program *p, size_t base, size_t live_peak, size_t *top)
{
    enum status st = ST_OK;
    size_t enough = live_peak + live_peak / GOOD_ENOUGH;
    struct entry *entries = NULL;
    struct placed placed = {0};
    size_t *offsets = NULL, n = (size_t)p->buffer_count;
    TRY_GOTO(st, out, mem_alloc(&entries, sizeof *entries * (n + 1)));
    TRY_GOTO(st, out, placed_init(&placed, p));
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
            size_t bytes = place(p, offsets, entries, count, &placed, base);
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
    placed_release(&placed);
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

static void note_peaks(struct account *account, const struct program *p, const struct profile *f)
{
    for (int i = 0; i < p->instr_count; i++) {
        size_t live = 0;
        for (int c = 0; c < CATEGORY_COUNT; c++) {
            live += f->live[i][c];
            if (f->live[i][c] > account->own_max[c])
                account->own_max[c] = f->live[i][c];
        }
        if (live <= account->live_peak_bytes)
            continue;
        account->live_peak_bytes = live;
        account->peak_program = p->kind;
        account->peak_instr = i;
        memcpy(account->at_peak, f->live[i], sizeof account->at_peak);
    }
}

/* Place the buffers of one program, and note what lives when. */
static enum status settle(struct account *account, struct program *p)
{
    enum status st = ST_OK;
    struct profile profile = {0};
    size_t top = 0;
    TRY_GOTO(st, out, profile_init(&profile, p));
    TRY_GOTO(st, out, place_program(p, account->persistent_bytes, profile.peak, &top));
    if (top > account->arena_bytes)
        account->arena_bytes = top;
    note_peaks(account, p, &profile);
out:
    mem_free(&profile.live);
    return st;
}

/* All but program_link() of what was placed. */
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
        TRY_GOTO(st, out, settle(account, p));
    }
out:
    if (st != ST_OK)
        plan_release(plan);
    return st;
}

/* The most that lives at one instruction: no placing needs less. */
static enum status least_arena(size_t *bytes, const struct program_spec *spec)
{
    enum status st = ST_OK;
    struct program p = {.instrs = NULL};
    struct profile profile = {0};
    *bytes = 0;
    for (int k = 0; k < PROGRAM_KINDS && st == ST_OK; k++) {
        TRY_GOTO(st, out, program_build(&p, (enum program_kind)k, spec));
        TRY_GOTO(st, out, profile_init(&profile, &p));
        *bytes = profile.peak > *bytes ? profile.peak : *bytes;
        mem_free(&profile.live);
    }
out:
    mem_free(&profile.live);
    program_release(&p);
    return st;
}

static bool costs_little(size_t late_bytes, size_t early_bytes)
{
    return late_bytes <= early_bytes + early_bytes / LATE_MAY_COST;
}

/* With UPDATE_AUTO late, unless that costs memory. It seldom does, and what early updates need at
 * least mostly says so: placing takes most of the time. */
static enum status build_chosen(struct plan *plan, struct account *account,
                                const struct program_spec *spec)
{
    enum status st = ST_OK;
    struct program_spec late = *spec, early = *spec;
    struct account early_account;
    struct plan early_plan = {0};
    size_t least;
    if (spec->update != UPDATE_AUTO)
        return build(plan, account, spec);
    late.update = UPDATE_LATE;
    early.update = UPDATE_EARLY;
    TRY(build(plan, account, &late));
    TRY_GOTO(st, out, least_arena(&least, &early));
    if (costs_little(account->arena_bytes, least))
        return ST_OK;
    TRY_GOTO(st, out, build(&early_plan, &early_account, &early));
    if (!costs_little(account->arena_bytes, early_account.arena_bytes)) {
        plan_release(plan);
        *plan = early_plan;
        *account = early_account;
        early_plan = (struct plan){0};
    }
out:
    plan_release(&early_plan);
    if (st != ST_OK)
        plan_release(plan);
    return st;
}

enum status plan_build(struct plan *plan, struct account *account, const struct program_spec *spec)
{
    enum status st = ST_OK;
    TRY(build_chosen(plan, account, spec));
    for (int k = 0; k < PROGRAM_KINDS; k++)
        TRY_GOTO(st, out, program_link(&plan->programs[k], true));
out:
    if (st != ST_OK)
        plan_release(plan);
    return st;
}

enum status plan_account(struct account *account, const struct program_spec *spec)
{
    struct plan plan = {0};
    TRY(build_chosen(&plan, account, spec));
    plan_release(&plan);
    return ST_OK;
}

void plan_release(struct plan *plan)
{
    for (int k = 0; k < PROGRAM_KINDS; k++)
        program_release(&plan->programs[k]);
}
