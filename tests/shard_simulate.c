#include "shard/simulate.h"

#include <math.h>
#include <string.h>

#include "shard/account.h"
#include "tests/support/program_spec.h"
#include "tests/support/support.h"

enum { MAX_INSTRS = 2048 };

/* A program drawn by hand. */
struct drawing {
    struct instr instrs[16];
    struct simulate_work work[16];
    struct simulate_span spans[16];
    struct program p;
    struct simulate_result result;
};

/* @wait and @also: instructions to wait for, or -1. Return: the number of this one. */
static int draw(struct drawing *d, enum program_op op, enum program_stream stream, double seconds,
                int wait, int also)
{
    int i = d->p.instr_count++;
    d->p.instrs = d->instrs;
    d->work[i] = (struct simulate_work){0, seconds, simulate_is_collective(op)};
    d->instrs[i] = (struct instr){.op = op, .stream = stream, .unit = -1, .micro_batch = -1};
    for (int s = 0; s < PROGRAM_STREAMS; s++)
        d->instrs[i].wait[s] = -1;
    if (wait >= 0)
        d->instrs[i].wait[d->instrs[wait].stream] = wait;
    if (also >= 0)
        d->instrs[i].wait[d->instrs[also].stream] = also;
    return i;
}

static void run(struct drawing *d, double slow_down)
{
    simulate_run(&d->result, d->spans, &d->p, d->work, slow_down);
}

static void check_close_at(double got, double want, int line)
{
    if (fabs(got - want) <= 1e-12 * (1 + fabs(want)))
        return;
    print_error("got %.17g, expected %.17g\n", got, want);
    _fail(__FILE__, line);
}

#define CLOSE(got, want) check_close_at((got), (want), __LINE__)

static void check_span_at(const struct drawing *d, int i, double begin, double end, int line)
{
    check_close_at(d->spans[i].begin, begin, line);
    check_close_at(d->spans[i].end, end, line);
}

#define SPAN(d, i, begin, end) check_span_at((d), (i), (begin), (end), __LINE__)

static void one_stream_takes_the_sum(void **state)
{
    struct drawing d = {0};
    (void)state;
    draw(&d, OP_FORWARD, ON_COMPUTE, 1, -1, -1);
    draw(&d, OP_BACKWARD, ON_COMPUTE, 2, -1, -1);
    draw(&d, OP_UPDATE, ON_COMPUTE, 0.5, -1, -1);
    run(&d, 0.7);
    SPAN(&d, 1, 1, 3);
    CLOSE(d.result.seconds, 3.5);
    CLOSE(d.result.busy[ON_COMPUTE], 3.5);
    CLOSE(d.result.compute_seconds, 3.5);
    CLOSE(d.result.exposed_seconds, 0);
}

static void streams_that_do_not_wait_take_the_longest(void **state)
{
    struct drawing d = {0};
    (void)state;
    draw(&d, OP_FORWARD, ON_COMPUTE, 3, -1, -1);
    draw(&d, OP_GATHER, ON_GATHER, 2, -1, -1);
    run(&d, 0);
    CLOSE(d.result.seconds, 3);
    CLOSE(d.result.collective_seconds, 2);
    CLOSE(d.result.exposed_seconds, 0);
}

static void collectives_that_are_waited_for_are_exposed(void **state)
{
    struct drawing d = {0};
    (void)state;
    int gather = draw(&d, OP_GATHER, ON_GATHER, 2, -1, -1);
    int forward = draw(&d, OP_FORWARD, ON_COMPUTE, 1, gather, -1);
    int reduce = draw(&d, OP_REDUCE, ON_REDUCE, 4, forward, -1);
    draw(&d, OP_UPDATE, ON_COMPUTE, 1, reduce, -1);
    run(&d, 0.5);
    SPAN(&d, 3, 7, 8);
    CLOSE(d.result.seconds, 8);
    CLOSE(d.result.exposed_seconds, 6);
    CLOSE(d.result.compute_seconds, 2);
}

static void pauses_need_nothing_of_the_device(void **state)
{
    struct drawing d = {0};
    (void)state;
    int forward = draw(&d, OP_FORWARD, ON_COMPUTE, 4, -1, -1);
    int update = draw(&d, OP_UPDATE, ON_UPDATE, 1, -1, -1);
    int gather = draw(&d, OP_GATHER, ON_GATHER, 2, -1, -1);
    d.work[update].pause = 1;
    d.work[gather].pause = 5;
    run(&d, 1);
    SPAN(&d, update, 0, 1 + 2);
    SPAN(&d, forward, 0, 5); /* alone, by halves, alone: the gather begins then */
    SPAN(&d, gather, 0, 7);
    CLOSE(d.result.collective_seconds, 2);
    CLOSE(d.result.exposed_seconds, 2);
    CLOSE(d.result.compute_seconds, 5);
}

/* Gather 1 runs beside forward 0, and makes forward 1 wait for the rest of it. */
static void prefetch_hides_what_compute_is_long_enough_for(void **state)
{
    struct drawing d = {0};
    (void)state;
    int g0 = draw(&d, OP_GATHER, ON_GATHER, 2, -1, -1);
    int f0 = draw(&d, OP_FORWARD, ON_COMPUTE, 3, g0, -1);
    int g1 = draw(&d, OP_GATHER, ON_GATHER, 4, -1, -1);
    int f1 = draw(&d, OP_FORWARD, ON_COMPUTE, 3, g1, f0);
    int g2 = draw(&d, OP_GATHER, ON_GATHER, 4, f0, -1); /* takes the buffer of unit 0 */
    int f2 = draw(&d, OP_FORWARD, ON_COMPUTE, 3, g2, f1);
    run(&d, 0);
    SPAN(&d, g0, 0, 2);
    SPAN(&d, f0, 2, 5);
    SPAN(&d, g1, 2, 6);
    SPAN(&d, f1, 6, 9);
    SPAN(&d, g2, 6, 10);
    SPAN(&d, f2, 10, 13);
    CLOSE(d.result.exposed_seconds, 2 + 1 + 1);
    CLOSE(d.result.busy[ON_GATHER], 10);
}

static void compute_slows_down_while_a_collective_runs_beside_it(void **state)
{
    struct drawing d = {0};
    (void)state;
    draw(&d, OP_FORWARD, ON_COMPUTE, 4, -1, -1);
    draw(&d, OP_GATHER, ON_GATHER, 2, -1, -1);
    run(&d, 0.5);
    /* In 2 seconds 2 / 1.5 of the 4 are done. */
    CLOSE(d.result.seconds, 2 + (4 - 2 / 1.5));
    SPAN(&d, 1, 0, 2);
    int reduce = draw(&d, OP_REDUCE, ON_REDUCE, 1, -1, -1);
    run(&d, 0.5); /* a second one beside it: compute no slower, but for longer */
    SPAN(&d, 1, 0, 3);
    SPAN(&d, reduce, 0, 2);
    CLOSE(d.result.seconds, 3 + (4 - 3 / 1.5));
    CLOSE(d.result.busy[ON_COMPUTE], d.result.seconds);
}

static void collectives_beside_each_other_share_the_links(void **state)
{
    struct drawing d = {0};
    (void)state;
    int gather = draw(&d, OP_GATHER, ON_GATHER, 2, -1, -1);
    int reduce = draw(&d, OP_REDUCE, ON_REDUCE, 6, -1, -1);
    run(&d, 0.5);
    SPAN(&d, gather, 0, 4);
    SPAN(&d, reduce, 0, 8);
    CLOSE(d.result.collective_seconds, 8);
    CLOSE(d.result.exposed_seconds, 8);
}

static void updates_beside_compute_share_the_device(void **state)
{
    struct drawing d = {0};
    (void)state;
    int forward = draw(&d, OP_FORWARD, ON_COMPUTE, 3, -1, -1);
    int update = draw(&d, OP_UPDATE, ON_UPDATE, 1, -1, -1);
    run(&d, 0.5);
    SPAN(&d, update, 0, 2);
    SPAN(&d, forward, 0, 4);
    CLOSE(d.result.compute_seconds, 4);
    draw(&d, OP_GATHER, ON_GATHER, 3, -1, -1); /* both at a third: 1 / 2 / 1.5 */
    run(&d, 0.5);
    SPAN(&d, update, 0, 3);
    SPAN(&d, forward, 0, 5);
}

static void agree_is_a_collective_and_accumulate_is_not(void **state)
{
    struct drawing d = {0};
    (void)state;
    int agree = draw(&d, OP_AGREE, ON_COMPUTE, 2, -1, -1);
    int sum = draw(&d, OP_ACCUMULATE, ON_REDUCE, 2, -1, -1);
    run(&d, 1);
    SPAN(&d, agree, 0, 2);
    SPAN(&d, sum, 0, 3);
    CLOSE(d.result.exposed_seconds, 0);
    CLOSE(d.result.compute_seconds, 3);
}

static void instructions_of_no_time_and_empty_programs_end(void **state)
{
    struct drawing d = {0};
    (void)state;
    run(&d, 0);
    CLOSE(d.result.seconds, 0);
    int a = draw(&d, OP_BEGIN, ON_COMPUTE, 0, -1, -1);
    int b = draw(&d, OP_GATHER, ON_GATHER, 0, a, -1);
    draw(&d, OP_FORWARD, ON_COMPUTE, 0, b, -1);
    run(&d, 0.3);
    CLOSE(d.result.seconds, 0);
}

/* ---- real programs ---- */

static struct unit_work work[SPEC_MAX_UNITS];
static struct simulate_work drawn[MAX_INSTRS];
static struct simulate_span spans[MAX_INSTRS];

static void random_seconds(const struct program *p, uint64_t *random)
{
    assert_true(p->instr_count <= MAX_INSTRS);
    for (int i = 0; i < p->instr_count; i++) {
        double pause = (double)(test_random(random) % 3) * 1e-3;
        double seconds = (double)(test_random(random) % 1000) * 1e-4;
        drawn[i] = (struct simulate_work){pause, seconds, simulate_is_collective(p->instrs[i].op)};
    }
}

/* The longest chain of waits and stream order: no line is shorter. */
static double longest_chain(const struct program *p)
{
    static double end[MAX_INSTRS];
    int last[PROGRAM_STREAMS] = {-1, -1, -1, -1};
    double longest = 0;
    for (int i = 0; i < p->instr_count; i++) {
        const struct instr *in = &p->instrs[i];
        double begin = last[in->stream] >= 0 ? end[last[in->stream]] : 0;
        for (int s = 0; s < PROGRAM_STREAMS; s++)
            if (in->wait[s] >= 0 && end[in->wait[s]] > begin)
                begin = end[in->wait[s]];
        end[i] = begin + drawn[i].pause + drawn[i].seconds;
        longest = end[i] > longest ? end[i] : longest;
        last[in->stream] = i;
    }
    return longest;
}

/* In a second the device does one second's work of compute, and the links one of collectives. */
static double sum_of(const struct program *p, bool collective)
{
    double sum = 0;
    for (int i = 0; i < p->instr_count; i++)
        sum += drawn[i].collective == collective ? drawn[i].seconds : 0;
    return sum;
}

static void check_line(const struct program *p, const struct simulate_result *r, double slow_down)
{
    double sums[PROGRAM_STREAMS] = {0};
    int last[PROGRAM_STREAMS] = {-1, -1, -1, -1};
    const double eps = 1e-9;
    for (int i = 0; i < p->instr_count; i++) {
        const struct instr *in = &p->instrs[i];
        double took = spans[i].end - spans[i].begin;
        double most = PROGRAM_STREAMS * (drawn[i].collective ? 1 : 1 + slow_down);
        assert_true(took >= drawn[i].pause + drawn[i].seconds - eps);
        assert_true(took <= drawn[i].pause + drawn[i].seconds * most + eps);
        if (last[in->stream] >= 0)
            assert_true(spans[i].begin >= spans[last[in->stream]].end - eps);
        for (int s = 0; s < PROGRAM_STREAMS; s++)
            if (in->wait[s] >= 0)
                assert_true(spans[i].begin >= spans[in->wait[s]].end - eps);
        assert_true(spans[i].end <= r->seconds + eps);
        sums[in->stream] += took;
        last[in->stream] = i;
    }
    for (int s = 0; s < PROGRAM_STREAMS; s++)
        assert_true(fabs(r->busy[s] - sums[s]) < 1e-6);
    assert_true(r->exposed_seconds <= r->collective_seconds + eps);
    assert_true(r->compute_seconds + r->exposed_seconds <= r->seconds + eps);
}

static bool gathers_rows(const struct program *p)
{
    bool rows = false;
    for (int i = 0; i < p->instr_count; i++)
        rows |= (p->instrs[i].flags & FLAG_ROWS) != 0;
    return rows;
}

static void lines_of_random_programs_keep_order_and_bounds(void **state)
{
    static struct spec_case c;
    uint64_t random = test_seed();
    (void)state;
    for (int i = 0; i < 200; i++) {
        struct plan plan = {0};
        struct account account;
        spec_random(&c, &random);
        assert_ok(plan_build(&plan, &account, &c.spec));
        for (int k = 0; k < PROGRAM_KINDS; k++) {
            const struct program *p = &plan.programs[k];
            struct simulate_result free, slow, again;
            random_seconds(p, &random);
            simulate_run(&free, spans, p, drawn, 0);
            check_line(p, &free, 0);
            assert_true(free.seconds >= longest_chain(p) - 1e-9);
            assert_true(free.compute_seconds >= sum_of(p, false) - 1e-9);
            assert_true(free.collective_seconds >= sum_of(p, true) - 1e-9);
            simulate_run(&slow, spans, p, drawn, 0.4);
            check_line(p, &slow, 0.4);
            /* But where rows are gathered: they share the links with a REDUCE for which nobody
             * waits, and slower compute may let it end before they begin. */
            assert_true(slow.seconds >= free.seconds - 1e-9 || gathers_rows(p));
            assert_true(slow.seconds >= longest_chain(p) - 1e-9);
            assert_true(slow.seconds <= 1.4 * free.seconds + 1e-9);
            simulate_run(&again, spans, p, drawn, 0.4);
            assert_memory_equal(&again, &slow, sizeof slow);
        }
        plan_release(&plan);
    }
}

/* forward, 16 s, is beside a gather that pauses from 1 to 3 and runs from 3 to 7, and a reduction
 * from 12 on, which lasts over backward's pause, 16 to 20, and its first quarter. */
static void parts_beside_collectives_are_those_of_the_time_line(void **state)
{
    struct drawing d = {0};
    uint16_t parts[16];
    (void)state;
    int before = draw(&d, OP_UPDATE, ON_UPDATE, 1, -1, -1);
    int gather = draw(&d, OP_GATHER, ON_GATHER, 4, before, -1);
    int forward = draw(&d, OP_FORWARD, ON_COMPUTE, 16, -1, -1);
    int middle = draw(&d, OP_NORM, ON_UPDATE, 0, gather, -1);
    int reduce = draw(&d, OP_REDUCE, ON_REDUCE, 12, middle, -1);
    int backward = draw(&d, OP_BACKWARD, ON_COMPUTE, 16, -1, -1);
    d.work[before] = (struct simulate_work){1, 0, false};
    d.work[gather].pause = 2;
    d.work[middle] = (struct simulate_work){5, 0, false};
    d.work[backward].pause = 4;
    run(&d, 0);
    SPAN(&d, gather, 1, 7);
    SPAN(&d, forward, 0, 16);
    SPAN(&d, reduce, 12, 24);
    SPAN(&d, backward, 16, 36);
    simulate_beside(parts, &d.p, d.spans, d.work);
    assert_int_equal(parts[forward], 0xF078); /* 3.5 .. 6.5, 12.5 .. 15.5 */
    assert_int_equal(parts[backward], 0x000F);
    assert_int_equal(parts[gather], 0);
    assert_int_equal(parts[reduce], 0);
    simulate_in_order(&d.result, d.spans, &d.p, d.work);
    simulate_beside(parts, &d.p, d.spans, d.work);
    for (int i = 0; i < d.p.instr_count; i++)
        assert_int_equal(parts[i], 0);
}

/* BERT-base, 2048 tokens, on a card of some 100 TFLOP/s and a link of @gigabytes a second. */
static struct simulate_rates bert_rates(const struct spec_case *c, double gigabytes)
{
    for (int u = 0; u < c->spec.unit_count; u++) {
        double numel = (double)c->units[u].shard_numel * c->spec.world_size;
        bool table = u < c->parts || u == c->parts;
        double flops = table ? 1e6 : 2 * numel * 2048;
        work[u] = (struct unit_work){{flops, 1e9, 1e6, 1, 8}, {2 * flops, 2e9, 2e6, 2, 18}};
    }
    return (struct simulate_rates){.units = work,
                                   .product_flops_per_second = 1e14,
                                   .attention_flops_per_second = 1e13,
                                   .attention_call_seconds = 3e-6,
                                   .elementwise_per_second = 1e12,
                                   .update_per_second = 2e12,
                                   .memory_per_second = 3e12,
                                   .launch_seconds = 1e-6,
                                   .call_seconds = 5e-6,
                                   .near = {2e-6, gigabytes * 1e9, gigabytes * 1e9}};
}

static struct simulate_world one_node(int ranks)
{
    return (struct simulate_world){ranks, 1, 1};
}

static struct simulate_result bert_step(int stage, int world, int prefetch, double gigabytes,
                                        double slow_down)
{
    static struct spec_case c;
    struct plan plan = {0};
    struct account account;
    struct simulate_result result;
    spec_bert(&c, &spec_bert_base, DTYPE_BF16, stage, world);
    c.spec.prefetch = prefetch;
    assert_ok(plan_build(&plan, &account, &c.spec));
    struct simulate_rates rates = bert_rates(&c, gigabytes);
    rates.slow_down = slow_down;
    assert_ok(
        simulate_program(&result, NULL, &plan.programs[PROGRAM_STEP], &rates, one_node(world)));
    plan_release(&plan);
    return result;
}

static double seconds_of(const struct program *p, const struct instr *in,
                         const struct simulate_rates *rates, struct simulate_world world)
{
    struct simulate_work w = simulate_instr(p, in, rates, world);
    return w.pause + w.seconds;
}

static void a_collective_is_a_ring_of_hops(void **state)
{
    static struct spec_case c;
    struct program p = {0};
    int reduces = 0;
    (void)state;
    for (int world = 4; world <= 64; world *= 4) {
        spec_bert(&c, &spec_bert_base, DTYPE_BF16, 3, world);
        assert_ok(program_build(&p, PROGRAM_STEP, &c.spec));
        struct simulate_rates rates = bert_rates(&c, 10);
        for (int i = 0; i < p.instr_count; i++) {
            const struct instr *in = &p.instrs[i];
            if (in->op != OP_REDUCE && in->op != OP_GATHER)
                continue;
            double share =
                (double)c.units[in->unit].shard_numel * (in->op == OP_REDUCE ? 4 : 2) / 10e9;
            CLOSE(seconds_of(&p, in, &rates, one_node(world)),
                  1e-6 + 5e-6 + (world - 1) * (2e-6 + share));
            reduces++;
        }
    }
    assert_true(reduces > 100);
    program_release(&p);
}

/* Two nodes of four, a network of 5 GB/s a rank: 20 GB/s a node is less than the near 100. */
static void between_nodes_all_links_of_a_node_carry_a_ring(void **state)
{
    static struct spec_case c;
    struct program p = {0};
    (void)state;
    spec_bert(&c, &spec_bert_base, DTYPE_BF16, 3, 8);
    assert_ok(program_build(&p, PROGRAM_STEP, &c.spec));
    struct simulate_rates rates = bert_rates(&c, 100);
    rates.far = (struct simulate_link){7e-6, 5e9, 4e9};
    int first = 0; /* a REDUCE */
    for (int i = 0; i < p.instr_count; i++) {
        const struct instr *in = &p.instrs[i];
        bool reduce = in->op == OP_REDUCE;
        first = reduce ? i : first;
        if (!reduce && in->op != OP_GATHER)
            continue;
        double share = (double)c.units[in->unit].shard_numel * (reduce ? 4 : 2);
        CLOSE(seconds_of(&p, in, &rates, (struct simulate_world){8, 2, 1}),
              1e-6 + 5e-6 + 6 * 2e-6 + 7e-6 + 7 * share / (reduce ? 16e9 : 20e9));
        /* A rank a node: no near link at all. */
        CLOSE(seconds_of(&p, in, &rates, (struct simulate_world){8, 8, 1}),
              1e-6 + 5e-6 + 7 * 7e-6 + 7 * share / (reduce ? 4e9 : 5e9));
        /* Hybrid: eight ranks a node, three nodes; gradients of a shard go round them. */
        double across = 2 * 2 * 7e-6 + 2 * share / 3 * (1 / 4e9 + 1 / 5e9);
        CLOSE(seconds_of(&p, in, &rates, (struct simulate_world){8, 1, 3}),
              1e-6 + 5e-6 + 7 * (2e-6 + share / 100e9) + (reduce ? across : 0));
    }
    /* 31 peers: a tree of five levels, and nearly all bytes twice. */
    double ring = seconds_of(&p, &p.instrs[first], &rates, (struct simulate_world){8, 1, 1});
    double share = (double)c.units[p.instrs[first].unit].shard_numel * 4;
    CLOSE(seconds_of(&p, &p.instrs[first], &rates, (struct simulate_world){8, 1, 32}),
          ring + 2 * 5 * 7e-6 + 31 * share / 32 * (1 / 4e9 + 1 / 5e9));
    program_release(&p);
}

static void collectives_slow_compute_by_their_speed(void **state)
{
    static struct spec_case c;
    struct program p = {0};
    (void)state;
    spec_bert(&c, &spec_bert_base, DTYPE_BF16, 1, 8);
    assert_ok(program_build(&p, PROGRAM_STEP, &c.spec));
    struct simulate_rates rates = bert_rates(&c, 100);
    rates.slow_down = 1;
    rates.slow_down_least = 0.1;
    rates.call_seconds = rates.near.hop_seconds = 0;
    CLOSE(simulate_slow_down(&p, &rates, one_node(8)), 1);
    CLOSE(simulate_slow_down(&p, &rates, one_node(1)), 0);
    rates.far = (struct simulate_link){0, 5e9, 5e9}; /* four of them a node: a fifth of near */
    CLOSE(simulate_slow_down(&p, &rates, (struct simulate_world){8, 2, 1}), 0.2);
    rates.far.gather_per_second = rates.far.reduce_per_second = 1e9;
    CLOSE(simulate_slow_down(&p, &rates, (struct simulate_world){8, 2, 1}), 0.1);
    rates.far.gather_per_second = rates.far.reduce_per_second = 200e9;
    CLOSE(simulate_slow_down(&p, &rates, (struct simulate_world){8, 2, 1}), 1);
    program_release(&p);
}

/* The rows of all ranks are reduced (from stage 1 on) and gathered once. FORWARD reads and writes
 * those of the tokens that a rank owns, and the first part writes the others too. BACKWARD of all
 * parts together reads those rows or (stage 0) all, each in proportion to its size, and writes as
 * much of the gradient. */
static void tables_by_rows_take_their_rows_and_the_gradient_that_a_rank_has(void **state)
{
    static struct spec_case c;
    struct program p = {0};
    (void)state;
    for (int which = 0; which < 4; which++) {
        int stage = which / 2, frozen = which % 2; /* one of the parts */
        int gathers = 0, reduces = 0, tables = 0, forwards = 0, part = stage == 0 ? 4 : 1;
        spec_bert(&c, &spec_bert_base, DTYPE_BF16, stage, 4);
        spec_by_rows(&c);
        c.units[1].frozen = frozen;
        assert_ok(program_build(&p, PROGRAM_STEP, &c.spec));
        struct simulate_rates rates = bert_rates(&c, 10);
        double rows = (double)c.train_slots[0], table = 0; /* of one rank; of all parts */
        for (int u = 0; u < c.parts; u++)
            table += c.units[u].frozen ? 0 : 4 * (double)c.units[u].shard_numel;
        for (int i = 0; i < p.instr_count; i++) {
            const struct instr *in = &p.instrs[i];
            double got = seconds_of(&p, in, &rates, one_node(4));
            if (in->flags & FLAG_ROWS) {
                CLOSE(got, 1e-6 + 5e-6 + 3 * (2e-6 + rows / 10e9));
                gathers += in->op == OP_GATHER;
                reduces += in->op == OP_REDUCE;
            } else if (in->op == OP_FORWARD && in->unit < c.parts) {
                double moved = in->unit == 0 ? 5 * rows : 2 * rows;
                if (stage == 0)
                    moved = work[in->unit].forward.bytes;
                CLOSE(got, work[in->unit].forward.product_flops / 1e14 + 1e9 / 1e13 + 3e-6 +
                               moved / 1e12);
                forwards++;
            } else if (in->op == OP_BACKWARD && in->unit < c.parts) {
                double grad =
                    c.units[in->unit].frozen ? 0 : 4 * (double)c.units[in->unit].shard_numel;
                CLOSE(got, work[in->unit].backward.product_flops / 1e14 + 2e9 / 1e13 + 2 * 3e-6 +
                               part * (rows * grad / table + grad) / 1e12);
                tables++;
            }
        }
        assert_true(gathers == 1 && reduces == stage && tables > 1);
        assert_true(tables == c.parts && forwards == c.parts);
    }
    program_release(&p);
}

static void compute_takes_flops_and_bytes_and_updates_take_bytes(void **state)
{
    static struct spec_case c;
    struct program p = {0};
    (void)state;
    spec_bert(&c, &spec_bert_base, DTYPE_BF16, 1, 4);
    assert_ok(program_build(&p, PROGRAM_STEP, &c.spec));
    struct simulate_rates rates = bert_rates(&c, 10);
    for (int i = 0; i < p.instr_count; i++) {
        const struct instr *in = &p.instrs[i];
        double got = seconds_of(&p, in, &rates, one_node(4));
        if (in->op == OP_BACKWARD)
            CLOSE(got, work[in->unit].backward.product_flops / 1e14 + 2e9 / 1e13 + 2 * 3e-6 +
                           2e6 / 1e12);
        if (in->op == OP_UPDATE) /* both halves, m and v there and back; gradient there */
            CLOSE(got, 1e-6 + ((double)c.units[in->unit].shard_numel * (2 * 4 + 2 * 8 + 4) +
                               (double)p.buffers[SHARED_STATE].bytes) /
                                  2e12);
    }
    program_release(&p);
}

static void in_order_a_step_is_the_sum_and_all_collectives_are_exposed(void **state)
{
    struct drawing d = {0};
    (void)state;
    draw(&d, OP_FORWARD, ON_COMPUTE, 1, -1, -1);
    draw(&d, OP_GATHER, ON_GATHER, 2, -1, -1);
    draw(&d, OP_UPDATE, ON_UPDATE, 4, -1, -1);
    simulate_in_order(&d.result, d.spans, &d.p, d.work);
    SPAN(&d, 1, 1, 3);
    SPAN(&d, 2, 3, 7);
    CLOSE(d.result.seconds, 7);
    CLOSE(d.result.exposed_seconds, 2);
    CLOSE(d.result.compute_seconds, 5);
    CLOSE(d.result.busy[ON_UPDATE], 4);
}

static void faster_links_and_prefetch_make_no_step_longer(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage++) {
        double before = INFINITY;
        for (double gigabytes = 1; gigabytes < 1000; gigabytes *= 2) {
            double now = bert_step(stage, 8, 1, gigabytes, 0).seconds;
            assert_true(now <= before + 1e-12);
            before = now;
        }
    }
    for (double gigabytes = 1; gigabytes < 1000; gigabytes *= 2) {
        double before = INFINITY;
        for (int prefetch = 0; prefetch < 3; prefetch++) {
            double now = bert_step(3, 8, prefetch, gigabytes, 0).seconds;
            assert_true(now <= before + 1e-12);
            assert_true(prefetch != 1 || now < before);
            before = now;
        }
    }
}

/* Memory that is used again must not make compute wait for collectives: the time line of the placed
 * program is nearly that of one where each buffer has its own memory. */
static void placement_costs_little_overlap(void **state)
{
    static struct spec_case c;
    (void)state;
    for (int stage = 0; stage < 4; stage++)
        for (int micro_batches = 1; micro_batches <= 4; micro_batches += 3) {
            struct plan plan = {0};
            struct program apart = {0};
            struct account account;
            struct simulate_result one, other;
            spec_bert(&c, &spec_bert_base, DTYPE_BF16, stage, 8);
            c.spec.micro_batches = micro_batches;
            assert_ok(plan_build(&plan, &account, &c.spec));
            assert_ok(program_build(&apart, PROGRAM_STEP, &c.spec));
            struct simulate_rates rates = bert_rates(&c, 100);
            assert_ok(
                simulate_program(&one, NULL, &plan.programs[PROGRAM_STEP], &rates, one_node(8)));
            assert_ok(simulate_program(&other, NULL, &apart, &rates, one_node(8)));
            print_message("stage %d, %d micro-batches: %.2f ms placed, %.2f ms apart\n", stage,
                          micro_batches, 1e3 * one.seconds, 1e3 * other.seconds);
            assert_true(one.seconds <= (micro_batches == 1 ? 1.01 : 1.15) * other.seconds);
            plan_release(&plan);
            program_release(&apart);
        }
}

/* At stage 3 it gathers into a buffer of its own and reduces into another; at stage 0 all is in its
 * place but the report. */
static void a_rank_alone_copies_what_is_not_in_its_place(void **state)
{
    static struct spec_case c;
    struct program p = {0};
    (void)state;
    for (int stage = 0; stage < 4; stage += 3) {
        spec_bert(&c, &spec_bert_base, DTYPE_BF16, stage, 1);
        assert_ok(program_build(&p, PROGRAM_STEP, &c.spec));
        struct simulate_rates rates = bert_rates(&c, 10);
        for (int i = 0; i < p.instr_count; i++) {
            const struct instr *in = &p.instrs[i];
            struct simulate_work w = simulate_instr(&p, in, &rates, one_node(1));
            if (!simulate_is_collective(in->op))
                continue;
            assert_false(w.collective);
            if (in->op == OP_AGREE) {
                CLOSE(w.pause, 2e-6);
                continue;
            }
            double element = in->op == OP_REDUCE ? 4 : 2, copied = stage == 3;
            CLOSE(w.pause, copied * 1e-6);
            CLOSE(w.seconds, copied * 2 * element * (double)c.units[in->unit].shard_numel / 3e12);
        }
    }
    program_release(&p);
    struct simulate_result slow = bert_step(3, 1, 1, 0.001, 0), fast = bert_step(3, 1, 1, 1000, 0);
    CLOSE(slow.seconds, fast.seconds);
    CLOSE(slow.exposed_seconds, 0);
    CLOSE(slow.collective_seconds, 0);
}

static void small_work_takes_what_its_kernels_take_at_least(void **state)
{
    static struct spec_case c;
    struct program p = {0};
    (void)state;
    spec_bert(&c, &spec_bert_base, DTYPE_BF16, 1, 4);
    assert_ok(program_build(&p, PROGRAM_STEP, &c.spec));
    struct simulate_rates rates = bert_rates(&c, 10), bare = rates;
    int forwards = 0, waits = 0;
    rates.floor_seconds = 1e-3;
    rates.edge_seconds = 7e-3;
    for (int i = 0; i < p.instr_count; i++) {
        const struct instr *in = &p.instrs[i];
        struct simulate_work w = simulate_instr(&p, in, &rates, one_node(4));
        struct simulate_work without = simulate_instr(&p, in, &bare, one_node(4));
        double edge = 0;
        for (int s = 0; s < PROGRAM_STREAMS; s++)
            if (s != (int)in->stream && in->wait[s] >= 0)
                edge = 7e-3;
        waits += edge > 0;
        CLOSE(w.seconds, without.seconds);
        if (in->op == OP_FORWARD) {
            CLOSE(w.pause, edge + (8e-3 > w.seconds ? 8e-3 - w.seconds : 0));
            forwards++;
        }
        if (in->op == OP_UPDATE)
            CLOSE(w.pause + w.seconds, edge + 1e-3);
        if (in->op == OP_REDUCE)
            CLOSE(w.pause, edge);
    }
    assert_true(forwards > 10 && waits > 10 && waits < p.instr_count);
    program_release(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_stream_takes_the_sum),
        cmocka_unit_test(streams_that_do_not_wait_take_the_longest),
        cmocka_unit_test(collectives_that_are_waited_for_are_exposed),
        cmocka_unit_test(pauses_need_nothing_of_the_device),
        cmocka_unit_test(prefetch_hides_what_compute_is_long_enough_for),
        cmocka_unit_test(compute_slows_down_while_a_collective_runs_beside_it),
        cmocka_unit_test(collectives_beside_each_other_share_the_links),
        cmocka_unit_test(updates_beside_compute_share_the_device),
        cmocka_unit_test(agree_is_a_collective_and_accumulate_is_not),
        cmocka_unit_test(instructions_of_no_time_and_empty_programs_end),
        cmocka_unit_test(lines_of_random_programs_keep_order_and_bounds),
        cmocka_unit_test(a_collective_is_a_ring_of_hops),
        cmocka_unit_test(between_nodes_all_links_of_a_node_carry_a_ring),
        cmocka_unit_test(collectives_slow_compute_by_their_speed),
        cmocka_unit_test(tables_by_rows_take_their_rows_and_the_gradient_that_a_rank_has),
        cmocka_unit_test(compute_takes_flops_and_bytes_and_updates_take_bytes),
        cmocka_unit_test(in_order_a_step_is_the_sum_and_all_collectives_are_exposed),
        cmocka_unit_test(faster_links_and_prefetch_make_no_step_longer),
        cmocka_unit_test(placement_costs_little_overlap),
        cmocka_unit_test(a_rank_alone_copies_what_is_not_in_its_place),
        cmocka_unit_test(small_work_takes_what_its_kernels_take_at_least),
        cmocka_unit_test(parts_beside_collectives_are_those_of_the_time_line),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
