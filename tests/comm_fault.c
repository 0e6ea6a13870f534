#include "comm/fault.h"

#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/rng.h"
#include "tests/support/ranks.h"
#include "tests/support/support.h"

enum { WORLD = 3, NUMEL = 65, STEPS = 12, PER_STEP = 3, LONG = 10000 };

static uint64_t seed;
static struct stream gather_stream = {.id = STREAM_GATHER}, reduce_stream = {.id = STREAM_REDUCE};

struct result {
    float weights[WORLD][NUMEL * WORLD];
    int64_t count[WORLD];
};

/* A small training loop: gather the weights, make a gradient of them, reduce it, update, agree. */
static enum status loop_body(struct comm *comm, void *argument)
{
    struct result *result = argument;
    float *full = result->weights[comm->rank];
    float grad[NUMEL * WORLD], shard[NUMEL], dshard[NUMEL];
    for (int i = 0; i < NUMEL; i++)
        shard[i] = (float)rng_below(seed, (uint64_t)comm->rank, (uint64_t)i, 1000) * 1e-3f;
    for (int step = 0; step < STEPS; step++) {
        struct event gathered = {0}, reduced = {0};
        TRY(comm_all_gather(comm, &gather_stream, full, shard, NUMEL, DTYPE_F32, &gathered));
        TRY(finish(&gathered));
        for (int i = 0; i < NUMEL * WORLD; i++)
            grad[i] = full[i] * (0.1f + 0.37f * (float)comm->rank) + (float)i * 1e-3f;
        TRY(comm_reduce_scatter(comm, &reduce_stream, dshard, grad, NUMEL, DTYPE_F32, &reduced));
        TRY(finish(&reduced));
        for (int i = 0; i < NUMEL; i++)
            shard[i] -= 0.01f * dshard[i];
        TRY(comm_agree(comm, ST_OK));
    }
    result->count[comm->rank] = fault_count(comm);
    return ST_OK;
}

static void run(struct ranks *ranks, struct result *result, int rank, struct fault_plan plan,
                int64_t timeout_ms)
{
    struct fault_plan plans[WORLD] = {{FAULT_NONE, 0, 0}};
    if (rank >= 0)
        plans[rank] = plan;
    memset(ranks, 0, sizeof *ranks);
    memset(result, 0, sizeof *result);
    ranks->world_size = WORLD;
    ranks->timeout_ms = timeout_ms;
    ranks->plan = plans;
    ranks->body = loop_body;
    ranks->argument = result;
    ranks_run(ranks);
    ranks->plan = NULL;
}

static void run_unbroken(struct result *result)
{
    struct ranks ranks;
    run(&ranks, result, -1, (struct fault_plan){FAULT_NONE, 0, 0}, 60000);
    for (int r = 0; r < WORLD; r++) {
        ranks_assert(&ranks, r, ST_OK, "");
        assert_int_equal(result->count[r], STEPS * PER_STEP);
    }
}

static void b58_a_slow_rank_changes_no_bit(void **state)
{
    (void)state;
    struct result want, got;
    struct ranks ranks;
    run_unbroken(&want);
    for (int slow = 0; slow < WORLD; slow++) {
        run(&ranks, &got, slow, (struct fault_plan){FAULT_DELAY, 0, 2}, 60000);
        for (int r = 0; r < WORLD; r++)
            ranks_assert(&ranks, r, ST_OK, "");
        assert_memory_equal(got.weights, want.weights, sizeof want.weights);
        assert_in_range(ranks.ms, 2 * STEPS * PER_STEP, 10000);
    }
}

static void a_rank_that_fails_at_any_collective_ends_the_others_with_its_cause(void **state)
{
    (void)state;
    struct result result;
    struct ranks ranks;
    /* Until none fires. */
    int64_t k = 1;
    for (;; k++) {
        run(&ranks, &result, 1, (struct fault_plan){FAULT_FAIL, k, 0}, 60000);
        if (ranks.st[1] == ST_OK)
            break;
        for (int r = 0; r < WORLD; r++)
            ranks_assert(&ranks, r, ST_COMM, "rank 1: planned fault at collective ");
        assert_in_range(ranks.ms, 0, LONG);
    }
    assert_int_equal(k, STEPS * PER_STEP + 1);
}

static void b84_a_dropped_collective_is_found_and_not_waited_for(void **state)
{
    (void)state;
    struct result result;
    struct ranks ranks;
    for (int64_t k = 1; k <= STEPS * PER_STEP - 3; k += 5) {
        run(&ranks, &result, 2, (struct fault_plan){FAULT_DROP, k, 0}, 60000);
        for (int r = 0; r < WORLD; r++)
            ranks_assert(&ranks, r, ST_INVALID, "collectives differ: ");
        assert_in_range(ranks.ms, 0, LONG);
    }
    /* Without a later one to compare with, the others learn that the rank has left. */
    run(&ranks, &result, 2, (struct fault_plan){FAULT_DROP, STEPS * PER_STEP - 1, 0}, 60000);
    assert_int_not_equal(ranks.st[0], ST_OK);
    assert_int_not_equal(ranks.st[1], ST_OK);
}

static void a_silent_rank_is_named_by_the_time_out(void **state)
{
    (void)state;
    struct result result;
    struct ranks ranks;
    run(&ranks, &result, 0, (struct fault_plan){FAULT_SILENT, 2 * PER_STEP + 2, 0}, 300);
    for (int r = 0; r < WORLD; r++) {
        ranks_assert(&ranks, r, ST_TIMEOUT, "waited 300 ms for reduce_scatter 7 (65 fp32)");
        ranks_assert(&ranks, r, ST_TIMEOUT, "; rank 0 is silent, its last: all_gather 6 (65 fp32)");
    }
    assert_in_range(ranks.ms, 300, LONG);
}

static enum status abort_self_body(struct comm *comm, void *argument)
{
    (void)argument;
    comm_abort(comm, "given up");
    return comm_barrier(comm);
}

static void abort_ends_a_planned_sleep(void **state)
{
    (void)state;
    struct fault_plan plan = {FAULT_SILENT, 1, 0};
    struct ranks ranks = {
        .world_size = 1, .timeout_ms = 60000, .plan = &plan, .body = abort_self_body};
    ranks_run(&ranks);
    ranks_assert(&ranks, 0, ST_COMM, "rank 0: given up");
    assert_in_range(ranks.ms, 0, LONG);
}

static enum status corrupt_body(struct comm *comm, void *argument)
{
    (void)argument;
    float in[NUMEL * WORLD], out[NUMEL * WORLD], copy[NUMEL * WORLD];
    struct event done = {0};
    int differ = 0;
    for (int i = 0; i < NUMEL * WORLD; i++)
        in[i] = (float)(i + 1);
    memcpy(copy, in, sizeof in);
    TRY(comm_reduce_scatter(comm, &reduce_stream, out, in, NUMEL, DTYPE_F32, &done));
    TRY(finish(&done));
    for (int i = 0; i < NUMEL; i++) {
        float want = 3.0f * (float)(comm->rank * NUMEL + i + 1);
        differ += memcmp(&out[i], &want, sizeof want) != 0;
    }
    RANK_CHECK(differ == (comm->rank == 1));
    RANK_CHECK(memcmp(in, copy, sizeof in) == 0);
    unsigned char all[WORLD], own = (unsigned char)(2 * comm->rank);
    TRY(comm_exchange(comm, all, &own, 1));
    for (int r = 0; r < WORLD; r++)
        RANK_CHECK(all[r] == 2 * r);
    return ST_OK;
}

static void corrupt_flips_one_bit_of_one_output(void **state)
{
    (void)state;
    struct fault_plan plans[WORLD] = {{FAULT_NONE, 0, 0}, {FAULT_CORRUPT, 1, 0}};
    struct ranks ranks = {
        .world_size = WORLD, .timeout_ms = LONG, .plan = plans, .body = corrupt_body};
    ranks_run(&ranks);
    for (int r = 0; r < WORLD; r++)
        ranks_assert(&ranks, r, ST_OK, "");
    /* And the loop above does notice: its weights change. */
    struct result want, got;
    run_unbroken(&want);
    run(&ranks, &got, 1, (struct fault_plan){FAULT_CORRUPT, PER_STEP + 2, 0}, 60000);
    assert_memory_not_equal(got.weights[0], want.weights[0], sizeof want.weights[0]);
    assert_memory_equal(got.weights[0], got.weights[2], sizeof want.weights[0]);
}

static void a_bad_plan_is_refused(void **state)
{
    (void)state;
    struct comm inner = {.rank = 0, .world_size = 1, .timeout_ms = 1}, *comm = NULL;
    assert_int_equal(fault_comm_open(&comm, &inner, (struct fault_plan){FAULT_FAIL, -1, 0}),
                     ST_INVALID);
    assert_int_equal(fault_comm_open(&comm, &inner, (struct fault_plan){FAULT_DELAY, 1, -1}),
                     ST_INVALID);
    mem_fail_at(1);
    assert_int_equal(fault_comm_open(&comm, &inner, (struct fault_plan){FAULT_NONE, 0, 0}),
                     ST_MEMORY);
    mem_fail_at(0);
    assert_null(comm);
}

int main(void)
{
    seed = test_seed();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(b58_a_slow_rank_changes_no_bit),
        cmocka_unit_test(a_rank_that_fails_at_any_collective_ends_the_others_with_its_cause),
        cmocka_unit_test(b84_a_dropped_collective_is_found_and_not_waited_for),
        cmocka_unit_test(a_silent_rank_is_named_by_the_time_out),
        cmocka_unit_test(abort_ends_a_planned_sleep),
        cmocka_unit_test(corrupt_flips_one_bit_of_one_output),
        cmocka_unit_test(a_bad_plan_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
