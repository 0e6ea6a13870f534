#include "shard/simulate.h"

bool simulate_is_collective(enum program_op op)
{
    return op == OP_GATHER || op == OP_REDUCE || op == OP_AGREE || op == OP_COLLECT;
}

/* ---- one instruction ---- */

/* Bytes of an operand that the instruction touches. */
static double operand_bytes(const struct program *p, const struct operand *o, int world_size)
{
    double bytes = (double)p->buffers[o->buffer].bytes;
    return o->slice ? bytes / world_size : bytes;
}

static bool gathers(const struct instr *in)
{
    return in->op != OP_REDUCE;
}

static double link_per_second(const struct simulate_link *link, bool gather)
{
    return gather ? link->gather_per_second : link->reduce_per_second;
}

/* What passes from neighbour to neighbour: as fast as the slowest link. */
static double ring_per_second(const struct simulate_rates *rates, struct simulate_world w,
                              bool gather)
{
    double near = link_per_second(&rates->near, gather);
    double far = w.ranks / w.nodes * link_per_second(&rates->far, gather);
    if (w.nodes == 1)
        return near;
    return w.ranks == w.nodes || far < near ? far : near;
}

static double share_bytes(const struct program *p, const struct instr *in, int ranks)
{
    return (double)p->buffers[program_whole(in)->buffer].bytes / ranks;
}

/* What a collective's seconds are made of. */
struct parts {
    double hops;          /* latency */
    double bytes, across; /* on their way, in the ring and between the groups of hybrid sharding */
};

/* The sum of shares over the groups goes to the owners of its parts and back. */
static void add_across(struct parts *x, const struct simulate_rates *rates, double share,
                       int replicas)
{
    int ring = replicas - 1, tree = 0;
    while (1 << tree < replicas)
        tree++;
    x->hops += 2 * (ring < tree ? ring : tree) * rates->far.hop_seconds;
    x->across = ring * share / replicas *
                (1 / rates->far.reduce_per_second + 1 / rates->far.gather_per_second);
}

static struct parts parts_of(const struct program *p, const struct instr *in,
                             const struct simulate_rates *rates, struct simulate_world w)
{
    struct parts x = {0};
    double share = share_bytes(p, in, w.ranks);
    if (w.ranks > 1) {
        x.hops =
            (w.ranks - w.nodes) * rates->near.hop_seconds + (w.nodes - 1) * rates->far.hop_seconds;
        x.bytes = (w.ranks - 1) * share / ring_per_second(rates, w, gathers(in));
    }
    if (w.replicas > 1 && in->op == OP_REDUCE)
        add_across(&x, rates, share, w.replicas);
    return x;
}

static double collective_seconds(const struct program *p, const struct instr *in,
                                 const struct simulate_rates *rates, struct simulate_world w)
{
    struct parts x = parts_of(p, in, rates, w);
    return rates->call_seconds + x.hops + x.bytes + x.across;
}

/* Of bytes at this speed. */
static double slow_down_at(const struct simulate_rates *rates, double per_second, bool gather)
{
    double near = link_per_second(&rates->near, gather);
    double slow_down = near > 0 ? rates->slow_down * per_second / near : 0;
    return slow_down > rates->slow_down_least ? slow_down : rates->slow_down_least;
}

double simulate_slow_down(const struct program *p, const struct simulate_rates *rates,
                          struct simulate_world w)
{
    double seconds = 0, slowed = 0;
    for (int i = 0; i < p->instr_count && w.ranks * w.replicas > 1; i++) {
        const struct instr *in = &p->instrs[i];
        if (!simulate_is_collective(in->op))
            continue;
        struct parts x = parts_of(p, in, rates, w);
        double ring = w.ranks > 1 ? ring_per_second(rates, w, gathers(in)) : 0;
        seconds += rates->call_seconds + x.hops + x.bytes + x.across;
        slowed += rates->call_seconds * rates->slow_down + x.hops * rates->slow_down_least +
                  x.bytes * slow_down_at(rates, ring, gathers(in)) +
                  x.across * slow_down_at(rates, rates->far.reduce_per_second, false);
    }
    return seconds > 0 ? slowed / seconds : 0;
}

static double pass_seconds(const struct pass_work *work, const struct simulate_rates *rates)
{
    return work->product_flops / rates->product_flops_per_second +
           work->attention_flops / rates->attention_flops_per_second +
           work->attention_calls * rates->attention_call_seconds +
           work->bytes / rates->elementwise_per_second;
}

/* @launches: seconds of these, where they are in no rate. */
static struct simulate_work of_kernels(int kernels, double seconds, double launches,
                                       const struct simulate_rates *rates)
{
    double least = kernels * rates->floor_seconds - seconds;
    return (struct simulate_work){.pause = launches > least ? launches : least, .seconds = seconds};
}

static double moved_bytes(const struct program *p, const struct instr *in, int world_size)
{
    double bytes = 0;
    for (int k = 0; k < in->operand_count; k++) {
        const struct operand *o = &in->operands[k];
        int passes = o->access == ACCESS_READ_WRITE ? 2 : 1;
        if (o->role != ROLE_WORKSPACE) /* of which it needs a part, small beside the rest */
            bytes += passes * operand_bytes(p, o, world_size);
    }
    return bytes;
}

static struct simulate_work of_pass(const struct pass_work *pass,
                                    const struct simulate_rates *rates)
{
    return of_kernels(pass->kernels, pass_seconds(pass, rates), 0, rates);
}

/* FORWARD of a table by rows: it reads and writes the rows whose tokens this rank owns; the first
 * part writes all others, too. */
static struct simulate_work of_look_up(const struct program *p, const struct instr *in,
                                       const struct simulate_rates *rates, int world_size)
{
    struct pass_work pass = rates->units[in->unit].forward;
    const struct operand *rows = program_operand(in, ROLE_ROWS);
    double all = operand_bytes(p, rows, world_size), own = all / world_size;
    pass.bytes = own + (rows->access == ACCESS_WRITE ? all : own);
    return of_pass(&pass, rates);
}

/* 0: a part that is not trained, beside others that are. */
static double table_grad_bytes(const struct program *p, const struct instr *in, int world_size)
{
    const struct operand *grad = program_operand(in, ROLE_GRAD);
    if (grad == NULL)
        grad = program_operand(in, ROLE_GRAD_SHARD);
    return grad != NULL ? operand_bytes(p, grad, world_size) : 0;
}

/* BACKWARD of a part of a table by rows: it reads the rows whose tokens lie in the part and, but at
 * stage 0, are this rank's, and writes its gradient. Tokens are taken to lie all over the table. */
static struct simulate_work of_rows(const struct program *p, const struct instr *in,
                                    const struct simulate_rates *rates, int world_size)
{
    struct pass_work pass = rates->units[in->unit].backward;
    const struct operand *gathered = program_operand(in, ROLE_ROWS);
    double grad = table_grad_bytes(p, in, world_size), table = 0;
    for (int i = 0; i < p->instr_count; i++) {
        const struct operand *o = program_operand(&p->instrs[i], ROLE_ROWS);
        if (p->instrs[i].op == OP_BACKWARD && o != NULL && o->buffer == gathered->buffer)
            table += table_grad_bytes(p, &p->instrs[i], world_size);
    }
    double rows = operand_bytes(p, gathered, world_size) * grad / table;
    bool whole = program_operand(in, ROLE_GRAD) != NULL;
    pass.bytes = (whole ? rows : rows / world_size) + grad;
    return of_pass(&pass, rates);
}

/* Of a rank alone, which copies, or finds all in its place. */
static struct simulate_work of_copy(const struct program *p, const struct instr *in,
                                    const struct simulate_rates *rates)
{
    bool agree = in->op == OP_AGREE || in->op == OP_COLLECT; /* a kernel behind the copy */
    int first = in->operands[0].buffer, kernels = agree;
    for (int k = 1; k < in->operand_count; k++)
        if (in->operands[k].buffer != first)
            kernels = agree + 1;
    double bytes = kernels > agree ? moved_bytes(p, in, 1) : 0;
    return of_kernels(kernels, bytes / rates->memory_per_second, kernels * rates->launch_seconds,
                      rates);
}

static bool waits_for_another(const struct instr *in)
{
    bool waits = false;
    for (int s = 0; s < PROGRAM_STREAMS; s++)
        waits = waits || (in->wait[s] >= 0 && s != (int)in->stream);
    return waits;
}

static struct simulate_work work_of(const struct program *p, const struct instr *in,
                                    const struct simulate_rates *rates, struct simulate_world world)
{
    if (in->op == OP_FORWARD && program_operand(in, ROLE_ROWS) != NULL)
        return of_look_up(p, in, rates, world.ranks);
    if (in->op == OP_FORWARD || in->op == OP_RECOMPUTE)
        return of_pass(&rates->units[in->unit].forward, rates);
    if (in->op == OP_BACKWARD && program_operand(in, ROLE_ROWS) != NULL)
        return of_rows(p, in, rates, world.ranks);
    if (in->op == OP_BACKWARD)
        return of_pass(&rates->units[in->unit].backward, rates);
    if (simulate_is_collective(in->op) && world.ranks * world.replicas == 1)
        return of_copy(p, in, rates);
    if (simulate_is_collective(in->op))
        return (struct simulate_work){
            0, rates->launch_seconds + collective_seconds(p, in, rates, world), true};
    double per_second = in->op == OP_UPDATE ? rates->update_per_second : rates->memory_per_second;
    return of_kernels(in->op != OP_CUT, moved_bytes(p, in, world.ranks) / per_second,
                      rates->launch_seconds, rates);
}

struct simulate_work simulate_instr(const struct program *p, const struct instr *in,
                                    const struct simulate_rates *rates, struct simulate_world world)
{
    struct simulate_work work = work_of(p, in, rates, world);
    if (waits_for_another(in))
        work.pause += rates->edge_seconds;
    return work;
}

/* ---- the time line ---- */

enum { IDLE = -1 };

/* What a stream does now: the instruction that runs, and the first one that did not begin. */
struct lane {
    int running, next;
    double pause, left; /* seconds of the running one */
};

struct line {
    const struct program *p;
    const struct simulate_work *work;
    struct simulate_span *spans;
    struct lane lanes[PROGRAM_STREAMS];
    double now;
};

static int next_on_stream(const struct program *p, enum program_stream stream, int from)
{
    while (from < p->instr_count && p->instrs[from].stream != stream)
        from++;
    return from;
}

/* Instructions end in their stream's order, so the one that runs tells what has ended. */
static bool has_ended(const struct line *l, int instr)
{
    const struct lane *lane = &l->lanes[l->p->instrs[instr].stream];
    return instr < lane->next && instr != lane->running;
}

static bool may_begin(const struct line *l, const struct lane *lane)
{
    if (lane->running != IDLE || lane->next >= l->p->instr_count)
        return false;
    for (int s = 0; s < PROGRAM_STREAMS; s++) {
        int other = l->p->instrs[lane->next].wait[s];
        if (other >= 0 && !has_ended(l, other))
            return false;
    }
    return true;
}

static bool begin_some(struct line *l)
{
    bool begun = false;
    for (int s = 0; s < PROGRAM_STREAMS; s++) {
        struct lane *lane = &l->lanes[s];
        if (!may_begin(l, lane))
            continue;
        lane->running = lane->next;
        lane->pause = l->work[lane->running].pause;
        lane->left = l->work[lane->running].seconds;
        l->spans[lane->running].begin = l->now;
        lane->next = next_on_stream(l->p, (enum program_stream)s, lane->running + 1);
        begun = true;
    }
    return begun;
}

/* In its pause, in a collective, or in work that shares the device. */
enum phase { PHASE_NONE, PHASE_PAUSE, PHASE_COLLECTIVE, PHASE_SHARED, PHASES };

static enum phase phase_of(const struct line *l, const struct lane *lane)
{
    if (lane->running == IDLE)
        return PHASE_NONE;
    if (lane->pause > 0)
        return PHASE_PAUSE;
    return l->work[lane->running].collective ? PHASE_COLLECTIVE : PHASE_SHARED;
}

/* Let a lane run for @step seconds, each of which does 1 / @stretch of its own. */
static void run_lane(struct line *l, struct lane *lane, double step, double stretch)
{
    double *left = lane->pause > 0 ? &lane->pause : &lane->left;
    if (*left * stretch > step) {
        *left -= step / stretch;
        *left = *left > 0 ? *left : 0; /* rounding */
        return;
    }
    *left = 0;
    if (left == &lane->pause && lane->left > 0)
        return;
    l->spans[lane->running].end = l->now;
    lane->running = IDLE;
}

/* Let all streams run until the first pause or instruction ends. Return: false if none runs. */
static bool advance(struct line *l, struct simulate_result *result, double slow_down)
{
    double stretch[PHASES] = {0, 1, 1, 1}, step = 0;
    int count[PHASES] = {0}, computing = 0;
    for (int s = 0; s < PROGRAM_STREAMS; s++) {
        const struct lane *lane = &l->lanes[s];
        count[phase_of(l, lane)]++;
        computing += lane->running != IDLE && !l->work[lane->running].collective;
    }
    if (count[PHASE_NONE] == PROGRAM_STREAMS)
        return false;
    stretch[PHASE_COLLECTIVE] = count[PHASE_COLLECTIVE];
    stretch[PHASE_SHARED] = count[PHASE_SHARED] * (count[PHASE_COLLECTIVE] > 0 ? 1 + slow_down : 1);
    bool first = true;
    for (int s = 0; s < PROGRAM_STREAMS; s++) {
        const struct lane *lane = &l->lanes[s];
        enum phase phase = phase_of(l, lane);
        double until = (phase == PHASE_PAUSE ? lane->pause : lane->left) * stretch[phase];
        if (phase != PHASE_NONE && (first || until < step)) {
            step = until;
            first = false;
        }
    }
    l->now += step;
    result->compute_seconds += computing > 0 ? step : 0;
    result->collective_seconds += count[PHASE_COLLECTIVE] > 0 ? step : 0;
    result->exposed_seconds += count[PHASE_COLLECTIVE] > 0 && computing == 0 ? step : 0;
    for (int s = 0; s < PROGRAM_STREAMS; s++) {
        struct lane *lane = &l->lanes[s];
        enum phase phase = phase_of(l, lane);
        if (phase == PHASE_NONE)
            continue;
        result->busy[s] += step;
        run_lane(l, lane, step, stretch[phase]);
    }
    return true;
}

void simulate_run(struct simulate_result *result, struct simulate_span *spans,
                  const struct program *p, const struct simulate_work *work, double slow_down)
{
    struct line l = {.p = p, .work = work, .spans = spans};
    ASSERT(slow_down >= 0);
    for (int s = 0; s < PROGRAM_STREAMS; s++) {
        l.lanes[s].running = IDLE;
        l.lanes[s].next = next_on_stream(p, (enum program_stream)s, 0);
    }
    *result = (struct simulate_result){0};
    do {
        while (begin_some(&l))
            continue;
    } while (advance(&l, result, slow_down));
    for (int s = 0; s < PROGRAM_STREAMS; s++)
        ASSERT(l.lanes[s].next == p->instr_count);
    result->seconds = l.now;
}

void simulate_in_order(struct simulate_result *result, struct simulate_span *spans,
                       const struct program *p, const struct simulate_work *work)
{
    *result = (struct simulate_result){0};
    for (int i = 0; i < p->instr_count; i++) {
        double seconds = work[i].pause + work[i].seconds;
        spans[i] = (struct simulate_span){result->seconds, result->seconds + seconds};
        result->seconds = spans[i].end;
        result->busy[p->instrs[i].stream] += seconds;
        *(work[i].collective ? &result->collective_seconds : &result->compute_seconds) += seconds;
    }
    result->exposed_seconds = result->collective_seconds;
}

static bool runs_at(const struct simulate_span *span, const struct simulate_work *work,
                    double seconds)
{
    return span->begin + work->pause <= seconds && seconds < span->end;
}

/* Bits of the parts of [@begin, @end) in whose middle it runs. */
static uint16_t parts_beside(const struct simulate_span *span, const struct simulate_work *work,
                             double begin, double end)
{
    uint16_t parts = 0;
    if (span->end <= begin || span->begin >= end)
        return 0;
    for (int k = 0; k < SIMULATE_PARTS; k++)
        if (runs_at(span, work, begin + (k + 0.5) / SIMULATE_PARTS * (end - begin)))
            parts |= (uint16_t)(1u << k);
    return parts;
}

void simulate_beside(uint16_t *parts, const struct program *p, const struct simulate_span *spans,
                     const struct simulate_work *work)
{
    for (int i = 0; i < p->instr_count; i++) {
        parts[i] = 0;
        for (int c = 0; c < p->instr_count && !work[i].collective; c++)
            if (work[c].collective)
                parts[i] |=
                    parts_beside(&spans[c], &work[c], spans[i].begin + work[i].pause, spans[i].end);
    }
}

enum status simulate_program(struct simulate_result *result, uint16_t *parts,
                             const struct program *p, const struct simulate_rates *rates,
                             struct simulate_world world)
{
    enum status st = ST_OK;
    struct simulate_work *work = NULL;
    struct simulate_span *spans = NULL;
    TRY_GOTO(st, out, mem_alloc(&work, sizeof *work * (size_t)p->instr_count));
    TRY_GOTO(st, out, mem_alloc(&spans, sizeof *spans * (size_t)p->instr_count));
    for (int i = 0; i < p->instr_count; i++)
        work[i] = simulate_instr(p, &p->instrs[i], rates, world);
    if (rates->in_order)
        simulate_in_order(result, spans, p, work);
    else
        simulate_run(result, spans, p, work, simulate_slow_down(p, rates, world));
    if (parts != NULL)
        simulate_beside(parts, p, spans, work);
out:
    mem_free(&spans);
    mem_free(&work);
    return st;
}
