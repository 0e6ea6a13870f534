/*
 * The memory account is the truth (docs/architecture.md): with a heap, live bytes equal the account
 * at every instruction; freed memory that is filled with NaN changes nothing; the process grows by
 * the arena and by nothing after it.
 */
#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/train/evaluate.h"
#include "tests/support/run.h"

/* Sanitizers keep freed and shadow memory, and take ten times as long. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

static struct scratch scratch;
static struct run_trace first, other;

static int make_data(void **state)
{
    struct made_questions train = {30, 5, 90, 4, .impossible_every = 5, .seed = 11}, eval = train;
    eval.count = 7;
    eval.seed = 12;
    return run_set_up(state, &scratch, &train, &eval);
}

static int release_traces(void **state)
{
    (void)state;
    run_release(&first);
    run_release(&other);
    return 0;
}

static struct run_config tiny(int ranks, int stage, int64_t accum, int64_t steps)
{
    struct tiny_run with = {ranks, stage, accum, steps, .eval = true, .version_2 = true};
    struct run_config c = run_tiny_with(&scratch, with);
    c.eval.every = 2;
    /* The batches have more rows than the table, so by itself it would be reduced whole. */
    c.train.tables = ranks % 2 == 0 ? TABLES_ROWS : TABLES_WHOLE;
    return c;
}

/* ---- every instruction ---- */

/* Of one rank; ranks check their own. */
struct watch {
    int64_t turns[PROGRAM_KINDS], instrs, wrong;
    char first[256];
    int64_t base; /* bytes of the process beside the buffers, at the first instruction of a turn */
};

static struct watch watches[RUN_RANKS];

static void note(struct watch *w, const struct program *p, int index, const char *what, size_t got,
                 size_t want)
{
    if (w->wrong++ == 0)
        snprintf(w->first, sizeof w->first, "program %d, instruction %d: %s %zu, expected %zu",
                 (int)p->kind, index, what, got, want);
}

static void watch_heap(void *context, const struct program *p, int index,
                       const size_t live[CATEGORY_COUNT])
{
    const struct trainer *t = context;
    struct watch *w = &watches[t->comm->rank];
    size_t want[CATEGORY_COUNT], sum = account_live(p, index, want), got = 0;
    w->instrs++;
    w->turns[p->kind] += index == 0;
    for (int c = 0; c < CATEGORY_COUNT; c++) {
        got += live[c];
        if (live[c] != want[c])
            note(w, p, index, category_name((enum category)c), live[c], want[c]);
    }
    if (sum > t->account.live_peak_bytes)
        note(w, p, index, "more than the peak", sum, t->account.live_peak_bytes);
    /* What the allocator really holds, where no other rank allocates meanwhile. */
    int64_t beside = mem_live_bytes() - (int64_t)got;
    if (index == 0)
        w->base = beside;
    else if (t->comm->world_size == 1 && beside != w->base)
        note(w, p, index, "allocated", (size_t)beside, (size_t)w->base);
}

static void check_heap(const struct run_config *c)
{
    memset(watches, 0, sizeof watches);
    run_ok(&first, c, NULL);
    run_ok(&other, c, &(struct run_how){.executor = {.heap = true, .on_instr = watch_heap}});
    for (int r = 0; r < c->train.ranks; r++) {
        if (watches[r].wrong > 0)
            fail_msg("stage %d, %d ranks, accumulation %d, prefetch %d: rank %d: %s (and %d more)",
                     (int)c->train.zero_stage, (int)c->train.ranks, (int)c->train.grad_accum,
                     (int)c->train.prefetch, r, watches[r].first, (int)watches[r].wrong - 1);
        assert_int_equal(watches[r].turns[PROGRAM_STEP], c->train.steps);
        assert_true(watches[r].turns[PROGRAM_EVALUATE] >= 2);
        bool carries =
            c->train.update != UPDATE_EARLY || (c->train.zero_stage == 3 && c->train.prefetch > 0);
        assert_int_equal(watches[r].turns[PROGRAM_PROLOGUE] > 1, carries);
    }
    run_same(&first, &other, "heap and arena");
    run_release(&first);
    run_release(&other);
}

static void heap_bytes_equal_the_account_at_every_instruction(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage++)
        for (int ranks = 1; ranks <= 3; ranks += 1 + SANITIZED)
            for (int64_t accum = 1; accum <= 3; accum += 2) {
                struct run_config c = tiny(ranks, stage, accum, 3);
                check_heap(&c);
            }
}

static void heap_bytes_equal_the_account_with_recompute_and_any_prefetch(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage++)
        for (int prefetch = 0; prefetch <= 2; prefetch++) {
            struct run_config c = tiny(2, stage, 1 + prefetch, 2);
            if (stage < 3 && prefetch > 0)
                continue;
            c.train.prefetch = prefetch;
            c.train.recompute = RECOMPUTE_BLOCK;
            check_heap(&c);
        }
}

static void heap_bytes_equal_the_account_with_other_policies(void **state)
{
    (void)state;
    for (int variant = 0; variant < 4; variant++) {
        struct run_config c = tiny(2, variant, 3, 2);
        c.train.overlap = variant % 2 == 0;
        c.train.update = UPDATE_EARLY;
        c.train.recompute = variant % 2 == 0 ? RECOMPUTE_NONE : RECOMPUTE_GELU;
        c.train.reduce = variant < 2 ? REDUCE_PER_MICRO_BATCH : REDUCE_AUTO;
        snprintf(c.train.freeze, sizeof c.train.freeze,
                 "bert.embeddings,bert.encoder.layer.2.attention");
        check_heap(&c);
    }
}

/* ---- freed memory ---- */

static void b55_b56_memory_whose_life_ended_is_not_read(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage++)
        for (int variant = 0; variant < 3; variant++) {
            struct run_config c = tiny(1 + variant, stage, 1 + variant, 3);
            c.train.recompute = variant == 1 ? RECOMPUTE_BLOCK : RECOMPUTE_NONE;
            c.train.prefetch = variant;
            run_ok(&first, &c, NULL);
            run_ok(&other, &c, &(struct run_how){.executor = {.poison = true}});
            run_same(&first, &other, "poison");
            run_release(&first);
            run_release(&other);
        }
}

/* ---- no growth ---- */

struct growth {
    int64_t allocated[RUN_STEPS];
    size_t resident[RUN_STEPS];
    int count;
};

static struct growth growth;

static void watch_growth(void *context, const struct program *p, int index,
                         const size_t live[CATEGORY_COUNT])
{
    const struct trainer *t = context;
    (void)live;
    if (p->kind != PROGRAM_STEP || index != 0 || t->comm->rank != 0 || growth.count == RUN_STEPS)
        return;
    growth.allocated[growth.count] = mem_live_bytes();
    growth.resident[growth.count++] = test_resident_bytes();
}

static void b60_b65_nothing_grows_from_step_2_to_200(void **state)
{
    (void)state;
    struct run_config c = tiny(1, 3, 2, 200);
    c.eval.every = -1;
    growth.count = 0;
    run_ok(&first, &c, &(struct run_how){.executor = {.on_instr = watch_growth}});
    assert_int_equal(growth.count, 200);
    for (int i = 3; i < 200; i++)
        assert_int_equal(growth.allocated[i], growth.allocated[2]);
    if (!SANITIZED)
        assert_true(growth.resident[199] <= growth.resident[2] + (256 << 10));
}

static void b65_evaluations_and_steps_of_three_ranks_leave_nothing_behind(void **state)
{
    (void)state;
    int64_t before = mem_live_bytes();
    struct run_config c = tiny(3, 2, 2, 30);
    growth.count = 0;
    run_ok(&first, &c, &(struct run_how){.executor = {.on_instr = watch_growth}});
    run_release(&first);
    assert_int_equal(mem_live_bytes(), before);
    /* Rank 0's answers of an evaluation come and go between steps. */
    for (int i = 3; i < growth.count; i++)
        assert_int_equal(growth.allocated[i], growth.allocated[2]);
}

/* ---- the process ---- */

static size_t resident_open, arena_open;

static void note_resident(void *context, struct trainer *t)
{
    (void)context;
    resident_open = test_resident_bytes();
    arena_open = t->account.arena_bytes;
}

/* A model whose arena is large beside all else: the process grew by the arena. executor_open()
 * touches every page of it. */
static void b60_the_process_grows_by_the_arena(void **state)
{
    (void)state;
    if (SANITIZED)
        skip();
    struct run_config c = tiny(1, 0, 1, 2);
    c.model.hidden = 384;
    c.model.ffn = 1536;
    c.model.layers = 4;
    c.train.max_unit_numel = 1 << 20;
    c.data.eval[0] = '\0';
    run_ok(&first, &c, NULL); /* libraries and threads are there afterwards */
    run_release(&first);
    size_t before = test_resident_bytes();
    run_ok(&first, &c, &(struct run_how){.at_start = note_resident});
    assert_true(arena_open > (size_t)100 << 20);
    double grown = (double)resident_open - (double)before, arena = (double)arena_open;
    if (grown < 0.97 * arena || grown > 1.03 * arena + (8 << 20))
        fail_msg("the process grew by %.0f bytes, the arena has %.0f", grown, arena);
}

/* Of 400 GB a layer and rank; the kernel would promise smaller ones and kill the process later. */
static void ranks_that_do_not_fit_together_end_before_they_take_memory(void **state)
{
    (void)state;
    struct run_config c = tiny(2, 0, 1, 2);
    c.model.heads = 256;
    c.model.hidden = 1 << 15;
    c.model.ffn = 1 << 17;
    c.train.max_unit_numel = (int64_t)1 << 36;
    run_go(&first, &c, NULL);
    if (first.st != ST_MEMORY)
        fail_msg("%s", first.message);
    if (strstr(first.message, "a rank needs") == NULL ||
        strstr(first.message, "and 2 of them share") == NULL)
        fail_msg("%s", first.message);
}

/* ---- what the account says about stages ---- */

enum { PLANNED_VOCAB = 1000 };

static struct account plan_of(int ranks, int stage, int64_t accum, int64_t hidden)
{
    static struct plan plan; /* large */
    struct setup setup;
    struct account account;
    struct device *device = NULL;
    struct run_config c = tiny(ranks, stage, accum, 1);
    c.model.vocab_size = PLANNED_VOCAB;
    c.model.hidden = hidden;
    c.model.ffn = 4 * hidden;
    c.model.layers = 6;
    c.train.max_unit_numel = 1 << 16;
    assert_ok(device_open(&device, DEVICE_CPU, PRECISION_FP32, 0, 1));
    assert_ok(setup_init(&setup, &c, device, ranks, stage, (struct setup_rows){200, 100, 0}));
    assert_ok(plan_build(&plan, &account, &setup.spec));
    plan_release(&plan);
    setup_release(&setup);
    device_close(&device);
    return account;
}

static void b46_b47_the_peak_does_not_depend_on_accumulation_at_stages_2_and_3(void **state)
{
    (void)state;
    for (int stage = 2; stage < 4; stage++) {
        struct account two = plan_of(4, stage, 2, 96), many = plan_of(4, stage, 16, 96);
        struct account one = plan_of(4, stage, 1, 96);
        /* The batch of index arrays grows with it, and a shard temporary comes with the second. */
        size_t batch = many.own_max[CATEGORY_BATCH] - two.own_max[CATEGORY_BATCH];
        if (many.live_peak_bytes - two.live_peak_bytes != batch)
            fail_msg("stage %d: %zu bytes with 2 micro-batches, %zu with 16, %zu of them batch",
                     stage, two.live_peak_bytes, many.live_peak_bytes, batch);
        assert_int_equal(many.own_max[CATEGORY_GRADIENTS], one.own_max[CATEGORY_GRADIENTS]);
        /* With one micro-batch, activations leave while gradient shards come. With more of them
         * the shards are all there in the second: that much, and no more. */
        assert_true(many.live_peak_bytes - batch <= one.live_peak_bytes +
                                                        many.own_max[CATEGORY_GRADIENTS] +
                                                        many.own_max[CATEGORY_GRADIENTS] / 4);
    }
}

/* Tables that are moved by rows are partitioned at stages 1 and 2, too. */
static void b62_state_falls_with_the_world_size(void **state)
{
    (void)state;
    static const enum category states[] = {CATEGORY_ADAM_M, CATEGORY_ADAM_V};
    double table = (double)PLANNED_VOCAB * 96 * sizeof(float);
    for (int stage = 1; stage < 4; stage++) {
        struct account one = plan_of(1, stage, 2, 96);
        for (int ranks = 2; ranks <= 8; ranks *= 2) {
            struct account many = plan_of(ranks, stage, 2, 96);
            for (int i = 0; i < 2; i++) {
                double part = (double)many.own_max[states[i]] / (double)one.own_max[states[i]];
                assert_true(part > 0.99 / ranks && part < 1.05 / ranks);
            }
            double all = (double)one.own_max[CATEGORY_PARAMETERS];
            double kept = stage == 3 ? 0 : all - table;
            double part = (double)many.own_max[CATEGORY_PARAMETERS];
            assert_true(part > 0.99 * (kept + (all - kept) / ranks));
            assert_true(part < kept * 1.01 + (all - kept) * 1.05 / ranks);
            assert_true(table > 0.05 * all);
        }
    }
}

static void b63_no_stage_needs_more_than_the_one_before(void **state)
{
    (void)state;
    for (int ranks = 2; ranks <= 8; ranks++)
        for (int64_t accum = 1; accum <= 4; accum += 3)
            for (int stage = 1; stage < 4; stage++) {
                struct account less = plan_of(ranks, stage, accum, 96);
                struct account more = plan_of(ranks, stage - 1, accum, 96);
                if (less.live_peak_bytes > more.live_peak_bytes)
                    fail_msg("%d ranks, accumulation %d: stage %d needs %zu bytes, stage %d %zu",
                             ranks, (int)accum, stage, less.live_peak_bytes, stage - 1,
                             more.live_peak_bytes);
                assert_true((double)less.arena_bytes < 1.03 * (double)less.live_peak_bytes);
            }
}

#define TEST(name) cmocka_unit_test_teardown(name, release_traces)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(b60_the_process_grows_by_the_arena),
        TEST(ranks_that_do_not_fit_together_end_before_they_take_memory),
        TEST(heap_bytes_equal_the_account_at_every_instruction),
        TEST(heap_bytes_equal_the_account_with_recompute_and_any_prefetch),
        TEST(heap_bytes_equal_the_account_with_other_policies),
        TEST(b55_b56_memory_whose_life_ended_is_not_read),
        TEST(b60_b65_nothing_grows_from_step_2_to_200),
        TEST(b65_evaluations_and_steps_of_three_ranks_leave_nothing_behind),
        TEST(b46_b47_the_peak_does_not_depend_on_accumulation_at_stages_2_and_3),
        TEST(b62_state_falls_with_the_world_size),
        TEST(b63_no_stage_needs_more_than_the_one_before),
    };
    return cmocka_run_group_tests(tests, make_data, run_tear_down);
}
