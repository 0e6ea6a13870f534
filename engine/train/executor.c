#include "engine/train/executor.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "engine/train/progress.h"

_Static_assert((int)ON_COMPUTE == (int)STREAM_COMPUTE && (int)ON_GATHER == (int)STREAM_GATHER &&
                   (int)ON_REDUCE == (int)STREAM_REDUCE && (int)ON_UPDATE == (int)STREAM_UPDATE,
               "program streams are device streams");
_Static_assert(sizeof(struct step_report) % 4 == 0, "reports travel as 32-bit words");

enum { MAX_TENSORS = 64 /* of a unit */ };

struct unit_ranges {
    struct adam_range ranges[ADAM_MAX_RANGES];
    int count;
};

/* A piece of a program as a graph, for one number of rows. */
struct captured {
    enum program_kind kind;
    int first; /* instruction */
    int64_t rows;
    bool traced; /* with a trace's timers in it */
    struct graph *graph;
};

/* What one executor_run() is about. */
struct turn {
    struct executor *ex;
    const struct program *program;
    const struct sequences *micro;
    const struct collected *collected;
    struct event *events;
    int piece; /* first instruction of the piece at hand */
};

/* ---- addresses ---- */

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

static void *operand_address(const struct turn *t, const struct instr *in, enum role role)
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
            view.master = (float *)(void *)own;
            view.master_whole = whole ? (float *)(void *)address : NULL;
        } else if (b->category == CATEGORY_ADAM_M) {
            view.adam_m = (float *)(void *)own;
            view.adam_m_whole = whole ? (float *)(void *)address : NULL;
        } else if (b->category == CATEGORY_ADAM_V) {
            view.adam_v = (float *)(void *)own;
            view.adam_v_whole = whole ? (float *)(void *)address : NULL;
        }
    }
    if (view.master == NULL)
        view.master = view.param_shard;
    return view;
}

/* ---- heap and poison: where a buffer's life begins and ends ---- */

static enum status heap_begin(struct turn *t, int buffer)
{
    struct executor *ex = t->ex;
    const struct buffer *b = &t->program->buffers[buffer];
    void **slot = address_slot(ex, t->program, buffer);
    ASSERT(*slot == NULL);
    mem_unseal(); /* the one place that allocates in a step, and only for proofs */
    enum status st = device_alloc(ex->device, slot, b->bytes);
    mem_seal();
    TRY(st);
    ex->live[b->category] += b->bytes;
    /* Unwritten memory must show: NaN in fp32 and bf16. */
    return device_fill(&ex->device->streams[STREAM_COMPUTE], *slot, 0xFF, b->bytes);
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

static enum status begin_lives(struct turn *t, int index)
{
    for (int i = 0; i < t->program->buffer_count; i++) {
        const struct buffer *b = &t->program->buffers[i];
        bool is_there = b->persistent || (b->carried && t->program->kind == PROGRAM_FLUSH);
        if (t->ex->options.heap && !is_there && b->first == index)
            TRY(heap_begin(t, i));
    }
    return ST_OK;
}

static enum status end_lives(struct turn *t, int index)
{
    for (int i = 0; i < t->program->buffer_count; i++) {
        const struct buffer *b = &t->program->buffers[i];
        bool ends = b->last == index && !(b->carried && t->program->kind != PROGRAM_STEP);
        if (!b->persistent && b->first >= 0 && ends)
            TRY(end_life(t, i));
    }
    return ST_OK;
}

/* FLUSH: what was carried is not needed any more. */
static void end_carried(struct turn *t)
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

/* ---- instructions ---- */

static bool is_collective(enum program_op op)
{
    return op == OP_GATHER || op == OP_REDUCE;
}

static int64_t shard_numel(const struct turn *t, const struct instr *in)
{
    return t->ex->layout->units[in->unit].shard_numel;
}

static enum status run_gather(struct turn *t, const struct instr *in, struct stream *s,
                              struct event *done)
{
    bool gradient = in->flags & FLAG_GRADIENT;
    return comm_all_gather(
        t->ex->comm, s, operand_address(t, in, gradient ? ROLE_GRAD : ROLE_PARAM),
        operand_address(t, in, gradient ? ROLE_GRAD_SHARD : ROLE_SHARD), shard_numel(t, in),
        gradient ? DTYPE_F32 : t->ex->device->param_dtype, done);
}

/* BACKWARD writes a unit's gradient up to its last tensor; the padding of the shards behind it must
 * not carry old bytes into sums and norms. */
static enum status clear_padding(struct turn *t, int unit, float *grads, struct stream *s)
{
    const struct layout_unit *u = &t->ex->layout->units[unit];
    if (grads == NULL || u->numel == u->padded_numel)
        return ST_OK;
    return device_fill(s, grads + u->numel, 0,
                       sizeof *grads * (size_t)(u->padded_numel - u->numel));
}

static enum status run_unit(struct turn *t, const struct instr *in, struct stream *s)
{
    const struct model *model = t->ex->model;
    const struct model_unit *unit = &model->units[in->unit];
    struct unit_call call = {
        .stream = s,
        .sequences = &t->micro[in->micro_batch],
        .state = operand_address(t, in, ROLE_STATE),
        .report = operand_address(t, in, ROLE_REPORT),
        .params = operand_address(t, in, ROLE_PARAM),
        .grads = operand_address(t, in, ROLE_GRAD),
        .grads_add = in->flags & FLAG_ADD,
        .tied_params = operand_address(t, in, ROLE_PARAM_TIED),
        .tied_grads = operand_address(t, in, ROLE_GRAD_TIED),
        .tied_grads_add = in->flags & FLAG_ADD_TIED,
        .act_in = operand_address(t, in, ROLE_ACT_IN),
        .act_out = operand_address(t, in, ROLE_ACT_OUT),
        .dact_in = operand_address(t, in, ROLE_DACT_IN),
        .dact_out = operand_address(t, in, ROLE_DACT_OUT),
        .saved = operand_address(t, in, ROLE_SAVED),
        .scratch = operand_address(t, in, ROLE_SCRATCH),
        .training = in->flags & FLAG_TRAINING,
    };
    if (in->op != OP_BACKWARD)
        return unit->forward(model, unit, &call);
    if (!call.grads_add)
        TRY(clear_padding(t, in->unit, call.grads, s));
    if (!call.tied_grads_add && unit->tied >= 0)
        TRY(clear_padding(t, unit->tied, call.tied_grads, s));
    TRY(unit->backward(model, unit, &call));
    return op_finish_sums(s);
}

static enum status run_agree(struct turn *t, const struct instr *in, struct stream *s,
                             struct event *done)
{
    struct executor *ex = t->ex;
    struct step_report *reports = operand_address(t, in, ROLE_REPORTS);
    TRY(comm_all_gather(ex->comm, s, reports, operand_address(t, in, ROLE_REPORT),
                        sizeof *reports / 4, DTYPE_I32, done));
    TRY(stream_wait(s, done));
    return op_agree(s, operand_address(t, in, ROLE_STATE), reports, ex->comm->world_size,
                    &ex->hyper);
}

static enum status run_update(struct turn *t, const struct instr *in, struct stream *s)
{
    struct executor *ex = t->ex;
    const struct unit_ranges *r = &ex->ranges[in->unit];
    int64_t n = r->ranges[r->count - 1].first + r->ranges[r->count - 1].count;
    void *shard = operand_address(t, in, ROLE_SHARD);
    void *master = operand_address(t, in, ROLE_MASTER);
    void *grad = operand_address(t, in, ROLE_GRAD);
    if (grad == NULL)
        grad = operand_address(t, in, ROLE_GRAD_SHARD);
    bool is_master = master == NULL;
    return op_adamw(s, tensor_1d(is_master ? NULL : shard, ex->device->param_dtype, n),
                    tensor_1d(is_master ? shard : master, DTYPE_F32, n),
                    tensor_1d(operand_address(t, in, ROLE_ADAM_M), DTYPE_F32, n),
                    tensor_1d(operand_address(t, in, ROLE_ADAM_V), DTYPE_F32, n),
                    tensor_1d(grad, DTYPE_F32, n), r->ranges, r->count,
                    operand_address(t, in, ROLE_STATE), &ex->hyper);
}

/* In a prologue: the gradient of a unit is zero, or (no unit) UPDATE is to leave all as it is. */
static enum status run_clear(struct turn *t, const struct instr *in, struct stream *s)
{
    const struct operand *grad = program_operand(in, ROLE_GRAD);
    char *state = operand_address(t, in, ROLE_STATE);
    if (grad != NULL)
        return device_fill(s, operand_address(t, in, ROLE_GRAD), 0,
                           t->program->buffers[grad->buffer].bytes);
    return device_fill(s, state + offsetof(struct step_state, skip), 0xFF, sizeof(int32_t));
}

static enum status run_collect(struct turn *t, const struct instr *in, struct stream *s,
                               struct event *done)
{
    struct executor *ex = t->ex;
    int64_t numel = executor_collect_numel(ex);
    float *logits = operand_address(t, in, ROLE_COLLECTED);
    struct step_report *reports = operand_address(t, in, ROLE_REPORTS);
    TRY(comm_all_gather(ex->comm, s, logits, operand_address(t, in, ROLE_ACT_OUT), numel, DTYPE_F32,
                        done));
    TRY(comm_all_gather(ex->comm, s, reports, operand_address(t, in, ROLE_REPORT),
                        sizeof *reports / 4, DTYPE_I32, done));
    TRY(stream_wait(s, done));
    size_t world = (size_t)ex->comm->world_size;
    TRY(device_copy(s, t->collected->logits, logits, sizeof *logits * (size_t)numel * world));
    return device_copy(s, t->collected->reports, reports, sizeof *reports * world);
}

static enum status issue(struct turn *t, const struct instr *in, struct stream *s,
                         struct event *done)
{
    struct executor *ex = t->ex;
    int64_t n = in->unit >= 0 ? shard_numel(t, in) : 0;
    switch (in->op) {
    case OP_BEGIN:
        return op_report_begin(s, operand_address(t, in, ROLE_REPORT),
                               operand_address(t, in, ROLE_STATE));
    case OP_GATHER:
        return run_gather(t, in, s, done);
    case OP_FORWARD:
    case OP_RECOMPUTE:
    case OP_BACKWARD:
        return run_unit(t, in, s);
    case OP_REDUCE:
        return comm_reduce_scatter(ex->comm, s, operand_address(t, in, ROLE_REDUCED),
                                   operand_address(t, in, ROLE_GRAD), n, DTYPE_F32, done);
    case OP_ACCUMULATE:
        return op_accumulate(s, tensor_1d(operand_address(t, in, ROLE_GRAD_SHARD), DTYPE_F32, n),
                             tensor_1d(operand_address(t, in, ROLE_REDUCED), DTYPE_F32, n), true);
    case OP_NORM:
        return op_squared_norm(s, operand_address(t, in, ROLE_REPORT),
                               tensor_1d(operand_address(t, in, ROLE_GRAD_SHARD), DTYPE_F32, n));
    case OP_AGREE:
        return run_agree(t, in, s, done);
    case OP_UPDATE:
        return run_update(t, in, s);
    case OP_CLEAR:
        return run_clear(t, in, s);
    case OP_COLLECT:
        return run_collect(t, in, s, done);
    case OP_CUT:
    case PROGRAM_OPS:
        break;
    }
    ASSERT(!"known instruction");
    return ST_OK;
}

/* Let a stream wait for an instruction. */
static enum status wait_for(struct turn *t, struct stream *s, int index)
{
    if (t->ex->trace != NULL)
        TRY(trace_waits(t->ex->trace, index, s));
    TRY(stream_wait(s, &t->events[index]));
    return t->ex->trace != NULL ? trace_completed(t->ex->trace, index, s) : ST_OK;
}

/* Issue it, with its mark before it, and a trace's timers around it. */
static enum status issue_marked(struct turn *t, int index, struct stream *s)
{
    struct executor *ex = t->ex;
    struct event *done = &t->events[index];
    const struct instr *in = &t->program->instrs[index];
    uint32_t mark = progress_mark(t->program, index);
    /* On CUDA a kernel each; and nobody asks where one rank alone stands: it waits for no other. */
    if (mark != 0 && (ex->comm->world_size > 1 || !ex->device->asynchronous))
        TRY(device_mark(s, mark));
    if (ex->trace != NULL)
        TRY(trace_begin(ex->trace, index, s));
    TRY(issue(t, in, s, done));
    if (ex->trace == NULL)
        return ST_OK;
    return trace_end(ex->trace, index, s, is_collective(in->op) && done->complete != NULL);
}

static enum status step_instr(struct turn *t, int index)
{
    struct executor *ex = t->ex;
    const struct instr *in = &t->program->instrs[index];
    struct stream *s = &ex->device->streams[in->stream];
    /* What lies before the piece has been joined, and must not be named inside a capture. */
    for (int w = 0; w < PROGRAM_STREAMS; w++)
        if (in->wait[w] >= t->piece)
            TRY(wait_for(t, s, in->wait[w]));
    TRY(begin_lives(t, index));
    TRY(comm_progress(ex->comm));
    TRY(issue_marked(t, index, s));
    if (!is_collective(in->op))
        TRY(event_record(&t->events[index], s));
    else if (!ex->options.overlap)
        TRY(wait_for(t, &ex->device->streams[STREAM_COMPUTE], index));
    if (ex->options.on_instr != NULL)
        ex->options.on_instr(ex->options.context, t->program, index, ex->live);
    if (ex->options.heap || ex->options.poison)
        TRY(end_lives(t, index));
    return ST_OK;
}

/* A piece begins with the other streams behind the compute stream. */
static enum status fork_streams(struct turn *t)
{
    struct stream *streams = t->ex->device->streams;
    TRY(event_record(&t->ex->fork, &streams[STREAM_COMPUTE]));
    for (int s = 0; s < PROGRAM_STREAMS; s++)
        if (s != ON_COMPUTE)
            TRY(stream_wait(&streams[s], &t->ex->fork));
    return ST_OK;
}

/* It ends with all streams joined in the compute stream. */
static enum status join_streams(struct turn *t, int first, int end)
{
    struct stream *streams = t->ex->device->streams;
    int last[PROGRAM_STREAMS] = {-1, -1, -1, -1};
    for (int i = first; i < end; i++)
        last[t->program->instrs[i].stream] = i;
    for (int s = 0; s < PROGRAM_STREAMS; s++) {
        if (last[s] >= 0)
            TRY(wait_for(t, &streams[STREAM_COMPUTE], last[s]));
        if (s == ON_COMPUTE)
            continue;
        /* Whatever came behind that event (a trace's timer), or nothing at all on a stream that was
         * forked: a capture must end with it joined all the same. */
        TRY(event_record(&t->ex->fork, &streams[s]));
        TRY(stream_wait(&streams[STREAM_COMPUTE], &t->ex->fork));
    }
    return ST_OK;
}

static int piece_end(const struct program *p, int first)
{
    int i = first;
    while (i < p->instr_count && p->instrs[i].op != OP_CUT)
        i++;
    return i;
}

/* Rows of the micro-batch that a piece is about; 0 where it is about none. */
static int64_t piece_rows(const struct turn *t, int first, int end)
{
    for (int i = first; i < end && t->micro != NULL; i++)
        if (t->program->instrs[i].op == OP_FORWARD)
            return t->micro[t->program->instrs[i].micro_batch].rows;
    return 0;
}

static struct captured *find_captured(const struct turn *t, int first, int end, bool traced)
{
    int64_t rows = piece_rows(t, first, end);
    for (size_t i = 0; i < t->ex->captured_count && !t->ex->issue_all; i++) {
        struct captured *c = &t->ex->captured[i];
        if (c->kind == t->program->kind && c->first == first && c->rows == rows &&
            c->traced == traced)
            return c;
    }
    return NULL;
}

static enum status issue_piece(struct turn *t, int first, int end)
{
    t->piece = first;
    TRY(fork_streams(t));
    for (int i = first; i < end; i++)
        TRY(step_instr(t, i));
    return join_streams(t, first, end);
}

/* Who reads the state is done before a piece changes it. */
static enum status wait_for_reader(struct turn *t, int first, int end)
{
    struct executor *ex = t->ex;
    bool updates = false;
    for (int i = first; i < end; i++)
        updates |= t->program->instrs[i].op == OP_UPDATE;
    if (ex->hold == NULL || !updates || !(ex->update_due || !ex->plan->late))
        return ST_OK;
    TRY(stream_wait(&ex->device->streams[STREAM_COMPUTE], ex->hold));
    ex->hold = NULL;
    return ST_OK;
}

static enum status run_turn(struct turn *t)
{
    for (int first = 0; first < t->program->instr_count;) {
        int end = piece_end(t->program, first);
        TRY(wait_for_reader(t, first, end));
        struct captured *c = find_captured(t, first, end, t->ex->trace != NULL);
        if (c != NULL)
            TRY(graph_launch(&t->ex->device->streams[STREAM_COMPUTE], c->graph));
        else
            TRY(issue_piece(t, first, end));
        first = end + 1;
    }
    if (t->program->kind != PROGRAM_EVALUATE)
        t->ex->update_due = t->program->kind == PROGRAM_STEP;
    if (t->ex->trace != NULL)
        TRY(trace_join(t->ex->trace, &t->ex->device->streams[STREAM_COMPUTE]));
    if (t->program->kind == PROGRAM_FLUSH)
        end_carried(t);
    return ST_OK;
}

static enum status capture_piece(struct turn *t, int first, int end)
{
    struct executor *ex = t->ex;
    struct stream *compute = &ex->device->streams[STREAM_COMPUTE];
    struct graph *graph = NULL;
    TRY(mem_grow(&ex->captured, &ex->captured_capacity, ex->captured_count + 1,
                 sizeof *ex->captured));
    TRY(stream_capture_begin(compute));
    enum status st = issue_piece(t, first, end);
    enum status ended = stream_capture_end(compute, &graph);
    TRY(st);
    TRY(ended);
    ex->captured[ex->captured_count++] = (struct captured){
        t->program->kind, first, piece_rows(t, first, end), ex->trace != NULL, graph};
    return ST_OK;
}

/* A traced turn begins on an idle device, and replays what an untraced one would. */
static enum status prepare_trace(struct turn *t)
{
    TRY(stream_sync(&t->ex->device->streams[STREAM_COMPUTE]));
    for (int first = 0; first < t->program->instr_count;) {
        int end = piece_end(t->program, first);
        if (find_captured(t, first, end, false) != NULL &&
            find_captured(t, first, end, true) == NULL)
            TRY(capture_piece(t, first, end));
        first = end + 1;
    }
    return ST_OK;
}

enum status executor_run(struct executor *ex, enum program_kind kind, const struct sequences *micro,
                         const struct collected *collected)
{
    struct turn t = {ex, &ex->plan->programs[kind], micro, collected, ex->events[kind], 0};
    enum status st = ex->trace != NULL ? prepare_trace(&t) : ST_OK;
    mem_seal();
    if (st == ST_OK)
        st = run_turn(&t);
    mem_unseal();
    if (st != ST_OK)
        comm_abort(ex->comm, status_message());
    return st;
}

void executor_hold(struct executor *ex, struct event *until)
{
    ex->hold = until;
}

enum status executor_capture(struct executor *ex, enum program_kind kind,
                             const struct sequences *micro)
{
    struct turn t = {ex, &ex->plan->programs[kind], micro, NULL, ex->events[kind], 0};
    for (int first = 0; first < t.program->instr_count;) {
        int end = piece_end(t.program, first);
        if (find_captured(&t, first, end, false) == NULL)
            TRY(capture_piece(&t, first, end));
        first = end + 1;
    }
    return ST_OK;
}

/* ---- opening ---- */

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
