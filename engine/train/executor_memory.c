#include "engine/train/executor_turn.h"

static void **address_slot(const struct executor *ex, const struct program *p, int buffer)
{
    return buffer < p->shared_count ? &ex->shared[buffer]
                                    : &ex->own[p->kind][buffer - p->shared_count];
}

static char *buffer_address(const struct executor *ex, const struct program *p, int buffer)
{
    if (ex->options.heap)
        return *address_slot(ex, p, buffer);
    return ex->arena + p->buffers[buffer].offset;
}

static size_t slice_offset(const struct executor *ex, const struct buffer *b)
{
    return (size_t)ex->comm->rank * (size_t)ex->layout->units[b->unit].shard_numel *
           dtype_bytes(b->dtype);
}

void *turn_operand(const struct turn *t, const struct instr *in, enum role role)
{
    const struct operand *o = program_operand(in, role);
    if (o == NULL)
        return NULL;
    char *address = buffer_address(t->ex, t->program, o->buffer);
    ASSERT(address != NULL);
    return o->slice ? address + slice_offset(t->ex, &t->program->buffers[o->buffer]) : address;
}

void *executor_shared(const struct executor *ex, int index)
{
    return buffer_address(ex, &ex->plan->programs[PROGRAM_STEP], index);
}

int64_t executor_collect_numel(const struct executor *ex)
{
    const struct program *p = &ex->plan->programs[PROGRAM_EVALUATE];
    const struct instr *in = &p->instrs[p->instr_count - 1];
    ASSERT(in->op == OP_COLLECT);
    return (int64_t)(p->buffers[program_operand(in, ROLE_ACT_OUT)->buffer].bytes / sizeof(float));
}

struct shard_view executor_shard(const struct executor *ex, int unit)
{
    const struct program *p = &ex->plan->programs[PROGRAM_STEP];
    int64_t numel = ex->layout->units[unit].shard_numel;
    struct shard_view view = {.numel = numel};
    for (int i = 0; i < p->shared_count; i++) {
        const struct buffer *b = &p->buffers[i];
        if (b->unit != unit || !b->persistent)
            continue;
        char *address = buffer_address(ex, p, i);
        bool whole =
            b->bytes > (size_t)round_up(numel * (int64_t)dtype_bytes(b->dtype), ARENA_ALIGN);
        char *own = whole ? address + slice_offset(ex, b) : address;
        if (b->category == CATEGORY_PARAMETERS) {
            view.param_shard = own;
            view.param_whole = whole || ex->comm->world_size == 1 ? address : NULL;
        } else if (b->category == CATEGORY_MASTER) {
            view.low = (uint16_t *)(void *)own;
            view.low_whole =
                whole || ex->comm->world_size == 1 ? (uint16_t *)(void *)address : NULL;
        } else if (b->category == CATEGORY_ADAM_M) {
            view.adam_m = (float *)(void *)own;
            view.adam_m_whole = whole ? (float *)(void *)address : NULL;
        } else if (b->category == CATEGORY_ADAM_V) {
            view.adam_v = (float *)(void *)own;
            view.adam_v_whole = whole ? (float *)(void *)address : NULL;
        }
    }
    if (view.low == NULL)
        view.master = view.param_shard;
    return view;
}

enum status executor_copy_master(struct stream *s, float *to, const struct shard_view *view,
                                 int64_t first, int64_t count)
{
    uint16_t *halves = (uint16_t *)(void *)to;
    const uint16_t *high = view->param_shard;
    size_t bytes = sizeof *halves * (size_t)count;
    if (view->low == NULL)
        return device_copy(s, to, view->master + first, sizeof *to * (size_t)count);
    TRY(device_copy(s, halves, view->low + first, bytes));
    return device_copy(s, halves + count, high + first, bytes);
}

/* ---- heap and poison: where a buffer's life begins and ends ---- */

static enum status heap_begin(struct turn *t, int buffer)
{
    struct executor *ex = t->ex;
    const struct buffer *b = &t->program->buffers[buffer];
    void **slot = address_slot(ex, t->program, buffer);
    struct stream *s = &ex->device->streams[STREAM_COMPUTE];
    ASSERT(*slot == NULL);
    mem_unseal(); /* the one place that allocates in a step, and only to prove and to count */
    enum status st = device_alloc(ex->device, slot, b->bytes);
    mem_seal();
    TRY(st);
    ex->live[b->category] += b->bytes;
    /* Unwritten memory must show: NaN in fp32 and bf16. Another stream may write first. */
    TRY(device_fill(s, *slot, 0xFF, b->bytes));
    return stream_sync(s);
}

/* All that read or wrote the buffer, peers included, have done so. */
static enum status wait_for_uses(struct turn *t, int buffer)
{
    const int *last_use = t->ex->last_use[t->program->kind] + (size_t)buffer * PROGRAM_STREAMS;
    for (int s = 0; s < PROGRAM_STREAMS; s++)
        if (last_use[s] >= 0)
            TRY(event_wait(&t->events[last_use[s]]));
    return ST_OK;
}

static enum status end_life(struct turn *t, int buffer)
{
    struct executor *ex = t->ex;
    const struct buffer *b = &t->program->buffers[buffer];
    TRY(wait_for_uses(t, buffer));
    if (ex->options.poison)
        TRY(device_fill(&ex->device->streams[STREAM_COMPUTE],
                        buffer_address(ex, t->program, buffer), 0xFF, b->bytes));
    if (ex->options.heap) {
        device_free(ex->device, address_slot(ex, t->program, buffer));
        ex->live[b->category] -= b->bytes;
    }
    return ST_OK;
}

enum status turn_begin_lives(struct turn *t, int index)
{
    for (int i = 0; i < t->program->buffer_count; i++) {
        const struct buffer *b = &t->program->buffers[i];
        bool is_there = b->persistent || (b->carried && t->program->kind == PROGRAM_FLUSH);
        if (t->ex->options.heap && !is_there && b->first == index)
            TRY(heap_begin(t, i));
    }
    return ST_OK;
}

enum status turn_end_lives(struct turn *t, int index)
{
    for (int i = 0; i < t->program->buffer_count; i++) {
        const struct buffer *b = &t->program->buffers[i];
        bool ends = b->last == index && !(b->carried && t->program->kind != PROGRAM_STEP);
        if (!b->persistent && b->first >= 0 && ends)
            TRY(end_life(t, i));
    }
    return ST_OK;
}

void turn_end_carried(struct turn *t)
{
    struct executor *ex = t->ex;
    for (int i = 0; i < t->program->shared_count; i++) {
        const struct buffer *b = &t->program->buffers[i];
        if (!b->carried || !ex->options.heap || ex->shared[i] == NULL)
            continue;
        device_free(ex->device, &ex->shared[i]);
        ex->live[b->category] -= b->bytes;
    }
}
