#include <stdio.h>
#include <string.h>

#include "engine/train/executor_turn.h"
#include "engine/train/progress.h"

enum { MAX_TENSORS = 64 /* of a unit */ };

/* Neighbouring tensors with one treatment become one range; padding goes with what is before it. */
static enum status build_ranges(struct unit_ranges *out, const struct executor *ex, int unit,
                                bool whole_state)
{
    const struct layout_unit *u = &ex->layout->units[unit];
    struct layout_segment segments[MAX_TENSORS];
    int64_t numel = whole_state ? u->padded_numel : u->shard_numel;
    int64_t first = whole_state ? 0 : ex->comm->rank * u->shard_numel;
    int count = layout_segments(ex->layout, unit, first, numel, segments);
    out->count = 0;
    for (int i = 0; i < count; i++) {
        const struct layout_param *p = &ex->layout->params[segments[i].param];
        struct adam_range *last = out->count > 0 ? &out->ranges[out->count - 1] : NULL;
        if (last != NULL && last->decay == p->decay && last->frozen == p->frozen)
            continue;
        if (out->count == ADAM_MAX_RANGES)
            return FAIL(INVALID, "unit %d: more than %d ranges of weight decay or frozen tensors",
                        unit, ADAM_MAX_RANGES);
        int64_t start = last == NULL ? 0 : segments[i].shard_first;
        out->ranges[out->count++] = (struct adam_range){start, 0, p->decay, p->frozen};
    }
    if (out->count == 0) /* a shard of nothing but padding */
        out->ranges[out->count++] = (struct adam_range){0, 0, false, false};
    for (int i = 0; i < out->count; i++)
        out->ranges[i].count =
            (i + 1 < out->count ? out->ranges[i + 1].first : numel) - out->ranges[i].first;
    return ST_OK;
}

static enum status open_ranges(struct executor *ex)
{
    const struct program *step = &ex->plan->programs[PROGRAM_STEP];
    TRY(mem_alloc(&ex->ranges, sizeof *ex->ranges * (size_t)ex->layout->unit_count));
    for (int u = 0; u < ex->layout->unit_count; u++)
        if (ex->layout->units[u].param_count > MAX_TENSORS)
            return FAIL(INVALID, "unit %d has %d tensors, at most %d are handled", u,
                        ex->layout->units[u].param_count, MAX_TENSORS);
    for (int i = 0; i < step->instr_count; i++) {
        const struct instr *in = &step->instrs[i];
        if (in->micro_batch >= ex->micro_batches)
            ex->micro_batches = in->micro_batch + 1;
        if (in->op == OP_UPDATE)
            TRY(build_ranges(&ex->ranges[in->unit], ex, in->unit,
                             program_operand(in, ROLE_GRAD) != NULL));
    }
    return ST_OK;
}

static enum status open_program(struct executor *ex, const struct program *p)
{
    size_t n = (size_t)p->buffer_count, own = n - (size_t)p->shared_count;
    TRY(mem_alloc(&ex->events[p->kind], sizeof(struct event) * (size_t)p->instr_count));
    TRY(mem_alloc(&ex->own[p->kind], sizeof(void *) * own));
    TRY(mem_alloc(&ex->last_use[p->kind], sizeof(int) * n * PROGRAM_STREAMS));
    for (int i = 0; i < p->instr_count; i++)
        TRY(event_open(ex->device, &ex->events[p->kind][i]));
    int *last_use = ex->last_use[p->kind];
    memset(last_use, 0xFF, sizeof(int) * n * PROGRAM_STREAMS);
    for (int i = 0; i < p->instr_count; i++) {
        const struct instr *in = &p->instrs[i];
        for (int k = 0; k < in->operand_count; k++) {
            int b = in->operands[k].buffer;
            bool next_life = p->buffers[b].carried && i > p->buffers[b].last;
            if (!next_life)
                last_use[b * PROGRAM_STREAMS + (int)in->stream] = i;
        }
    }
    return ST_OK;
}

static enum status open_memory(struct executor *ex, const struct account *account)
{
    const struct program *p = &ex->plan->programs[PROGRAM_STEP];
    TRY(mem_alloc(&ex->shared, sizeof(void *) * (size_t)p->shared_count));
    struct stream *s = &ex->device->streams[STREAM_COMPUTE];
    if (!ex->options.heap) {
        ex->arena_bytes = account->arena_bytes;
        TRY(comm_memory_open(ex->comm, ex->device, (void **)&ex->arena, account->arena_bytes));
        /* The state is at the begin of the arena, and m and v start at zero, as it is; anything
         * else that is read unwritten must show. */
        size_t state = account->persistent_bytes;
        TRY(device_fill(s, ex->arena + state, 0xFF, account->arena_bytes - state));
    }
    for (int i = 0; i < p->shared_count; i++) {
        const struct buffer *b = &p->buffers[i];
        if (!b->persistent)
            continue;
        ex->live[b->category] += b->bytes;
        if (!ex->options.heap)
            continue;
        TRY(device_alloc(ex->device, &ex->shared[i], b->bytes));
    }
    for (int k = 0; k < STREAM_COUNT; k++) {
        ex->device->streams[k].workspace = NULL;
        ex->device->streams[k].workspace_bytes = 0;
    }
    s->workspace = executor_shared(ex, SHARED_WORKSPACE);
    s->workspace_bytes = p->buffers[SHARED_WORKSPACE].bytes;
    struct stream *update = &ex->device->streams[STREAM_UPDATE];
    update->workspace = executor_shared(ex, SHARED_UPDATE_WORKSPACE);
    update->workspace_bytes = p->buffers[SHARED_UPDATE_WORKSPACE].bytes;
    struct stream *side = &ex->device->streams[STREAM_SIDE];
    side->workspace = executor_shared(ex, SHARED_SIDE_WORKSPACE);
    side->workspace_bytes = p->buffers[SHARED_SIDE_WORKSPACE].bytes;
    if (p->staging >= 0)
        comm_stage(ex->comm, executor_shared(ex, p->staging), p->buffers[p->staging].bytes);
    return stream_sync(s);
}

static void name_mark(const void *context, uint32_t mark, char *out, size_t bytes)
{
    const struct executor *ex = context;
    char name[PROGRESS_NAME_BYTES];
    progress_name(ex->plan, ex->model, mark, name);
    snprintf(out, bytes, "%s", name);
}

enum status executor_open(struct executor *ex, struct device *device, struct comm *comm,
                          const struct model *model, const struct layout *layout,
                          const struct plan *plan, const struct account *account,
                          const struct optim_hyper *hyper, const struct executor_options *options)
{
    *ex = (struct executor){.device = device,
                            .comm = comm,
                            .model = model,
                            .layout = layout,
                            .plan = plan,
                            .hyper = *hyper,
                            .options = *options};
    device->name_mark = name_mark;
    device->name_context = ex;
    TRY(event_open(device, &ex->fork));
    TRY(open_memory(ex, account));
    for (int k = 0; k < PROGRAM_KINDS; k++)
        TRY(open_program(ex, &plan->programs[k]));
    return open_ranges(ex);
}

static void close_program(struct executor *ex, const struct program *p)
{
    for (int i = 0; ex->events[p->kind] != NULL && i < p->instr_count; i++)
        event_close(&ex->events[p->kind][i]);
    for (int i = 0; ex->own[p->kind] != NULL && i < p->buffer_count - p->shared_count; i++)
        device_free(ex->device, &ex->own[p->kind][i]);
    mem_free(&ex->events[p->kind]);
    mem_free(&ex->own[p->kind]);
    mem_free(&ex->last_use[p->kind]);
}

void executor_close(struct executor *ex)
{
    if (ex->device == NULL)
        return;
    ex->device->name_mark = NULL;
    comm_stage(ex->comm, NULL, 0);
    for (size_t i = 0; i < ex->captured_count; i++)
        graph_close(&ex->captured[i].graph);
    mem_free(&ex->captured);
    event_close(&ex->fork);
    for (int k = 0; k < PROGRAM_KINDS; k++)
        close_program(ex, &ex->plan->programs[k]);
    for (int i = 0; ex->shared != NULL && i < ex->plan->programs[PROGRAM_STEP].shared_count; i++)
        device_free(ex->device, &ex->shared[i]);
    mem_free(&ex->shared);
    mem_free(&ex->ranges);
    comm_memory_close(ex->comm, ex->device, (void **)&ex->arena);
    memset(ex, 0, sizeof *ex);
}
