#include "engine/train/executor.h"

#include <string.h>

#include "engine/train/executor_turn.h"
#include "engine/train/progress.h"

_Static_assert((int)ON_COMPUTE == (int)STREAM_COMPUTE && (int)ON_GATHER == (int)STREAM_GATHER &&
                   (int)ON_REDUCE == (int)STREAM_REDUCE && (int)ON_UPDATE == (int)STREAM_UPDATE,
               "program streams are device streams");

static bool is_collective(enum program_op op)
{
    return op == OP_GATHER || op == OP_REDUCE;
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
    TRY(turn_issue(t, in, s, done));
    if (ex->trace == NULL)
        return ST_OK;
    return trace_end(ex->trace, index, s, is_collective(in->op) && done->complete != NULL);
}

/* What lives now, with a heap. */
static void count_memory(struct executor *ex)
{
    struct counted_memory *c = &ex->counted;
    size_t all = 0;
    for (int k = 0; k < CATEGORY_COUNT; k++) {
        all += ex->live[k];
        c->own_max[k] = ex->live[k] > c->own_max[k] ? ex->live[k] : c->own_max[k];
    }
    if (all <= c->peak_bytes)
        return;
    c->peak_bytes = all;
    memcpy(c->at_peak, ex->live, sizeof c->at_peak);
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
    TRY(turn_begin_lives(t, index));
    TRY(comm_progress(ex->comm));
    TRY(issue_marked(t, index, s));
    if (!is_collective(in->op))
        TRY(event_record(&t->events[index], s));
    else if (!ex->options.overlap)
        TRY(wait_for(t, &ex->device->streams[STREAM_COMPUTE], index));
    if (ex->options.heap)
        count_memory(ex);
    if (ex->options.on_instr != NULL)
        ex->options.on_instr(ex->options.context, t->program, index, ex->live);
    if (ex->options.heap || ex->options.poison)
        TRY(turn_end_lives(t, index));
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
        turn_end_carried(t);
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
