#include "shard/account.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/support/program_order.h"
#include "tests/support/program_spec.h"
#include "tests/support/support.h"

enum { PLANS = 200, MAX_BUFFERS = 4096 };

static void build(struct plan *plan, struct account *account, const struct spec_case *c)
{
    *plan = (struct plan){0};
    assert_ok(plan_build(plan, account, &c->spec));
}

static struct account quick_account(const struct spec_case *c)
{
    struct plan plan;
    struct account account;
    build(&plan, &account, c);
    plan_release(&plan);
    return account;
}

/* ---- placement ---- */

static int by_offset(const void *left, const void *right)
{
    const struct buffer *a = *(const struct buffer *const *)left;
    const struct buffer *b = *(const struct buffer *const *)right;
    return a->offset < b->offset ? -1 : a->offset > b->offset;
}

static void check_disjoint(const struct program *p, int instr, const struct account *account)
{
    static const struct buffer *live[MAX_BUFFERS];
    int count = 0;
    assert_true(p->buffer_count <= MAX_BUFFERS);
    for (int i = 0; i < p->buffer_count; i++)
        if (p->buffers[i].bytes > 0 && buffer_live_at(&p->buffers[i], instr))
            live[count++] = &p->buffers[i];
    qsort(live, (size_t)count, sizeof live[0], by_offset);
    for (int i = 0; i < count; i++) {
        size_t end = i + 1 < count ? live[i + 1]->offset : account->arena_bytes;
        assert_int_equal(live[i]->offset % ARENA_ALIGN, 0);
        assert_true(live[i]->offset + live[i]->bytes <= end);
    }
}

static void buffers_that_live_together_do_not_overlap(void **state)
{
    static struct spec_case c;
    uint64_t random = test_seed();
    (void)state;
    for (int i = 0; i < PLANS; i++) {
        struct plan plan;
        struct account account;
        spec_random(&c, &random);
        build(&plan, &account, &c);
        for (int k = 0; k < PROGRAM_KINDS; k++)
            for (int n = 0; n < plan.programs[k].instr_count; n++)
                check_disjoint(&plan.programs[k], n, &account);
        plan_release(&plan);
    }
}

static void shared_buffers_are_at_one_place_in_all_programs(void **state)
{
    static struct spec_case c;
    uint64_t random = test_seed();
    (void)state;
    for (int i = 0; i < PLANS; i++) {
        struct plan plan;
        struct account account;
        spec_random(&c, &random);
        build(&plan, &account, &c);
        const struct program *step = &plan.programs[PROGRAM_STEP];
        for (int k = 0; k < PROGRAM_KINDS; k++)
            for (int b = 0; b < step->shared_count; b++)
                assert_int_equal(plan.programs[k].buffers[b].offset, step->buffers[b].offset);
        plan_release(&plan);
    }
}

/* Carried buffers live across the turn's end: before their last use and after their refill. */
static void carried_lives_wrap_round_the_turn(void **state)
{
    struct buffer b = {.carried = true, .first = 8, .last = 3};
    (void)state;
    for (int i = 0; i < 10; i++)
        assert_int_equal(buffer_live_at(&b, i), i <= 3 || i >= 8);
    b.first = -1;
    assert_false(buffer_live_at(&b, 0));
    b = (struct buffer){.persistent = true, .first = 0, .last = -1};
    assert_true(buffer_live_at(&b, 5));
}

/* ---- sums ---- */

static int first_use(const struct program *p, int buffer)
{
    for (int i = 0; i < p->instr_count; i++)
        for (int k = 0; k < p->instrs[i].operand_count; k++)
            if (p->instrs[i].operands[k].buffer == buffer)
                return i;
    return INT_MAX;
}

/* Live bytes from the operands alone, the peak and each category's maximum from those. */
static void recount(const struct program *p, int unit_count, size_t own_max[CATEGORY_COUNT],
                    size_t *most)
{
    static int first[MAX_BUFFERS], last[MAX_BUFFERS];
    for (int i = 0; i < p->buffer_count; i++) {
        first[i] = p->buffers[i].carried ? program_refill(p, i) : first_use(p, i);
        last[i] = program_life_end(p, i, unit_count);
    }
    for (int n = 0; n < p->instr_count; n++) {
        size_t bytes[CATEGORY_COUNT] = {0}, sum = 0;
        for (int i = 0; i < p->buffer_count; i++) {
            const struct buffer *b = &p->buffers[i];
            bool now = b->carried ? n >= first[i] || n <= last[i] : n >= first[i] && n <= last[i];
            if (b->persistent || now) {
                bytes[b->category] += b->bytes;
                sum += b->bytes;
            }
        }
        for (int k = 0; k < CATEGORY_COUNT; k++)
            own_max[k] = bytes[k] > own_max[k] ? bytes[k] : own_max[k];
        *most = sum > *most ? sum : *most;
    }
}

static void the_peak_is_the_sum_of_its_categories(void **state)
{
    static struct spec_case c;
    uint64_t random = test_seed();
    (void)state;
    for (int i = 0; i < PLANS; i++) {
        struct plan plan;
        struct account account;
        size_t sum = 0, most = 0, own_max[CATEGORY_COUNT] = {0}, bytes[CATEGORY_COUNT];
        spec_random(&c, &random);
        build(&plan, &account, &c);
        for (int k = 0; k < PROGRAM_KINDS && i < PLANS / 10; k++)
            recount(&plan.programs[k], c.spec.unit_count, own_max, &most);
        for (int k = 0; k < CATEGORY_COUNT; k++) {
            sum += account.at_peak[k];
            assert_true(account.own_max[k] >= account.at_peak[k]);
            if (i < PLANS / 10)
                assert_int_equal(account.own_max[k], own_max[k]);
        }
        if (i < PLANS / 10)
            assert_int_equal(account.live_peak_bytes, most);
        assert_int_equal(sum, account.live_peak_bytes);
        assert_true(account.arena_bytes >= account.live_peak_bytes);
        assert_true(account.live_peak_bytes >= account.persistent_bytes);
        assert_int_equal(
            account_live(&plan.programs[account.peak_program], account.peak_instr, bytes),
            account.live_peak_bytes);
        plan_release(&plan);
    }
}

static size_t numel_of(const struct spec_case *c, bool whole)
{
    size_t numel = 0;
    for (int u = 0; u < c->spec.unit_count; u++)
        numel += (size_t)c->units[u].shard_numel;
    return whole ? numel * (size_t)c->spec.world_size : numel;
}

static void state_bytes_are_those_of_the_stage(void **state)
{
    static struct spec_case c;
    (void)state;
    for (int bf16 = 0; bf16 < 2; bf16++)
        for (int stage = 0; stage < 4; stage++)
            for (int world = 1; world <= 8; world++) {
                spec_bert(&c, &spec_bert_base, bf16 ? DTYPE_BF16 : DTYPE_F32, stage, world);
                struct account a = quick_account(&c);
                size_t optimizer = 4 * numel_of(&c, stage == 0);
                assert_int_equal(a.own_max[CATEGORY_PARAMETERS],
                                 (bf16 ? 2 : 4) * numel_of(&c, stage < 3));
                assert_int_equal(a.own_max[CATEGORY_MASTER], bf16 ? optimizer / 2 : 0);
                assert_int_equal(a.own_max[CATEGORY_ADAM_M], optimizer);
                assert_int_equal(a.own_max[CATEGORY_ADAM_V], optimizer);
            }
}

static size_t largest_shard(const struct spec_case *c)
{
    size_t largest = 0;
    for (int u = 0; u < c->spec.unit_count; u++)
        if ((size_t)c->units[u].shard_numel > largest)
            largest = (size_t)c->units[u].shard_numel;
    return largest;
}

/* P parameters on N ranks, 2 bytes each: what they, gradients and optimizer state take. */
static size_t zero_bytes(int stage, size_t P, size_t N, size_t gradient, size_t optimizer)
{
    return 2 * (stage < 3 ? P : P / N) + gradient * (stage < 2 ? P : P / N) +
           optimizer * (stage < 1 ? P : P / N);
}

/*
 * ZeRO (arXiv:1910.02054, Fig. 1): 7.5 B parameters on 64 ranks, 2 bytes a parameter and gradient,
 * K = 12 of fp32 master weights, m and v: 120, 31.4, 16.6 and 1.9 GB (of 10^9 bytes).
 *
 * Our gradients are fp32, 2 bytes more for each that a rank holds, P of them at stages 0 and 1,
 * P / N at 2 and 3. Of a master weight 2 bytes are kept, for its parameter is the rest. So what a
 * run has is the same but at stage 1:
 *
 *     (2+4+10) P    (2+4) P + 10 P/N    2 P + (4+10) P/N    (2+4+10) P/N      120, 46.2, 16.6, 1.9
 */
static void the_zero_papers_table_comes_out(void **state)
{
    static const struct spec_sizes sizes = {37, 4096, 16384, 32, 11000, 512, 384, 1 << 24};
    static const double paper[] = {120, 31.4, 16.6, 1.9}, ours[] = {120, 46.2, 16.6, 1.9};
    static struct spec_case c;
    (void)state;
    for (int stage = 0; stage < 4; stage++) {
        size_t sum = 0;
        spec_bert(&c, &sizes, DTYPE_BF16, stage, 64);
        c.spec.micro_batches = 2; /* else no whole gradient is kept at stage 1 */
        struct account a = quick_account(&c);
        for (int k = CATEGORY_PARAMETERS; k <= CATEGORY_ADAM_V; k++)
            sum += a.own_max[k];
        size_t P = numel_of(&c, true), half = zero_bytes(stage, P, 64, 2, 12);
        print_message("%.3f B parameters, stage %d: %.2f GB as in the paper, %.2f in a run\n",
                      (double)P * 1e-9, stage, (double)half * 1e-9, (double)sum * 1e-9);
        assert_in_range(P, 7490000000, 7510000000);
        assert_true(fabs((double)half * 1e-9 - paper[stage]) < 0.05 + 1e-3 * paper[stage]);
        assert_true(fabs((double)sum * 1e-9 - ours[stage]) < 0.05 + 1e-3 * ours[stage]);
        /* At stage 1 the shard of one reduced gradient stands beside whole ones. */
        size_t exact = zero_bytes(stage, P, 64, 4, 10);
        assert_in_range(sum, exact, exact + (stage == 1 ? 4 * largest_shard(&c) : 0));
    }
}

static void b62_memory_falls_with_the_world_size(void **state)
{
    static struct spec_case c;
    (void)state;
    for (int stage = 1; stage < 4; stage++) {
        struct account before = {.live_peak_bytes = SIZE_MAX, .persistent_bytes = SIZE_MAX};
        for (int world = 1; world <= 32; world *= 2) {
            spec_bert(&c, &spec_bert_large, DTYPE_BF16, stage, world);
            struct account now = quick_account(&c);
            assert_true(now.live_peak_bytes < before.live_peak_bytes);
            assert_true(now.persistent_bytes < before.persistent_bytes);
            before = now;
        }
    }
}

/*
 * A higher stage never needs more, from two ranks on. On one rank nothing is partitioned, and what
 * the stages hold apart is added: stage 1 a gradient shard beside the full gradient, stages 2 and 3
 * a reduce temporary, stage 3 gathered copies.
 */
static void b63_a_stage_needs_no_more_than_the_one_below(void **state)
{
    static struct spec_case c;
    (void)state;
    for (int variant = 0; variant < 16; variant++)
        for (int world = 2; world <= 8; world += world < 4 ? 1 : 4) {
            size_t below = SIZE_MAX;
            for (int stage = 0; stage < 4; stage++) {
                spec_bert(&c, variant & 1 ? &spec_bert_large : &spec_bert_base,
                          variant & 2 ? DTYPE_BF16 : DTYPE_F32, stage, world);
                c.spec.micro_batches = variant & 4 ? 4 : 1;
                c.spec.recompute = variant & 8;
                c.spec.prefetch = 2;
                struct account a = quick_account(&c);
                assert_true(a.live_peak_bytes <= below);
                below = a.live_peak_bytes;
            }
        }
}

/* Without accumulation a full gradient ends with its REDUCE at stages 1 and 2 alike. */
static void stages_1_and_2_are_equal_without_accumulation(void **state)
{
    static struct spec_case c;
    (void)state;
    spec_bert(&c, &spec_bert_base, DTYPE_BF16, 1, 4);
    size_t one = quick_account(&c).live_peak_bytes;
    c.spec.zero_stage = 2;
    assert_int_equal(quick_account(&c).live_peak_bytes, one);
    c.spec.micro_batches = 2;
    size_t two = quick_account(&c).live_peak_bytes;
    c.spec.zero_stage = 1;
    assert_true(two < quick_account(&c).live_peak_bytes);
}

static void recompute_saves_activations(void **state)
{
    static struct spec_case c;
    (void)state;
    spec_bert(&c, &spec_bert_base, DTYPE_BF16, 3, 4);
    size_t kept = quick_account(&c).own_max[CATEGORY_ACTIVATIONS];
    c.spec.recompute = true;
    size_t again = quick_account(&c).own_max[CATEGORY_ACTIVATIONS];
    print_message("activations: %zu bytes kept, %zu recomputed\n", kept, again);
    assert_true(again < kept / 4);
}

/* ---- packing ---- */

static void packing_loses_at_most_three_percent(void **state)
{
    static struct spec_case c;
    static const int worlds[] = {1, 2, 3, 4, 8};
    double worst = 0;
    (void)state;
    for (int large = 0; large < 2; large++)
        for (int stage = 0; stage < 4; stage++)
            for (int w = 0; w < 5; w++)
                for (int variant = 0; variant < 12; variant++) {
                    spec_bert(&c, large ? &spec_bert_large : &spec_bert_base,
                              variant & 1 ? DTYPE_F32 : DTYPE_BF16, stage, worlds[w]);
                    c.spec.recompute = variant & 1;
                    c.spec.micro_batches = variant & 2 ? 4 : 1;
                    c.spec.prefetch = variant / 4;
                    struct account a = quick_account(&c);
                    double loss = (double)a.arena_bytes / (double)a.live_peak_bytes - 1;
                    worst = loss > worst ? loss : worst;
                    assert_true(loss <= 0.03);
                }
    print_message("largest packing loss: %.2f%%\n", 100 * worst);
}

/* What a communicator asks for is there in all programs, as workspace; nothing else moves. */
static void staging_is_in_the_account(void **state)
{
    static struct spec_case c;
    (void)state;
    for (int stage = 0; stage < 4; stage++) {
        struct plan plan = {0};
        struct account with, without;
        spec_bert(&c, &spec_bert_base, DTYPE_F32, stage, 4);
        build(&plan, &without, &c);
        assert_int_equal(plan.programs[PROGRAM_STEP].staging, -1);
        plan_release(&plan);
        c.spec.staging_bytes = 100001;
        build(&plan, &with, &c);
        for (int k = 0; k < PROGRAM_KINDS; k++) {
            const struct program *p = &plan.programs[k];
            const struct buffer *b = &p->buffers[p->staging];
            assert_true(b->persistent && b->bytes >= 100001);
            assert_true(b->offset == plan.programs[0].buffers[p->staging].offset);
            assert_true(b->offset + b->bytes <= with.persistent_bytes);
        }
        assert_int_equal(with.persistent_bytes - without.persistent_bytes, 100096);
        assert_int_equal(with.live_peak_bytes - without.live_peak_bytes, 100096);
        assert_int_equal(with.at_peak[CATEGORY_WORKSPACE] - without.at_peak[CATEGORY_WORKSPACE],
                         100096);
        plan_release(&plan);
    }
}

static void a_large_plan_is_made_quickly(void **state)
{
    static struct spec_case c;
    struct timespec begin, end;
    (void)state;
    spec_bert(&c, &spec_bert_large, DTYPE_F32, 3, 8);
    c.spec.micro_batches = 8;
    c.spec.recompute = true;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &begin);
    quick_account(&c);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
    double seconds =
        (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
    print_message("BERT-large, 8 micro-batches: planned in %.3f s\n", seconds);
    assert_true(seconds < 3); /* ten times what it takes, for slow and instrumented builds */
}

/* 16,000 instructions; a search through all buffers for each took 20 s. */
static void many_micro_batches_are_planned_and_need_no_more_than_few(void **state)
{
    static struct spec_case c;
    (void)state;
    spec_bert(&c, &spec_bert_base, DTYPE_BF16, 2, 8);
    c.spec.micro_batches = 8;
    struct account few = quick_account(&c);
    c.spec.micro_batches = 256;
    struct account many = quick_account(&c);
    assert_int_equal(many.live_peak_bytes, few.live_peak_bytes);
    assert_true(many.arena_bytes <= few.arena_bytes + few.arena_bytes / 100);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(buffers_that_live_together_do_not_overlap),
        cmocka_unit_test(shared_buffers_are_at_one_place_in_all_programs),
        cmocka_unit_test(carried_lives_wrap_round_the_turn),
        cmocka_unit_test(the_peak_is_the_sum_of_its_categories),
        cmocka_unit_test(state_bytes_are_those_of_the_stage),
        cmocka_unit_test(the_zero_papers_table_comes_out),
        cmocka_unit_test(b62_memory_falls_with_the_world_size),
        cmocka_unit_test(b63_a_stage_needs_no_more_than_the_one_below),
        cmocka_unit_test(stages_1_and_2_are_equal_without_accumulation),
        cmocka_unit_test(recompute_saves_activations),
        cmocka_unit_test(packing_loses_at_most_three_percent),
        cmocka_unit_test(staging_is_in_the_account),
        cmocka_unit_test(a_large_plan_is_made_quickly),
        cmocka_unit_test(many_micro_batches_are_planned_and_need_no_more_than_few),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
