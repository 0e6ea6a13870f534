/* Another number of ranks or another stage goes on from the same state. */
#include <stdio.h>
#include <string.h>

#include "tests/support/resume.h"

enum { MAX_SAMPLES = 256, HALF = 7 /* inside the second epoch */ };
static int times_seen[2][MAX_SAMPLES]; /* by epoch */

static void count_samples(void *context, const struct program *p, int index,
                          const size_t live[CATEGORY_COUNT])
{
    const struct trainer *t = context;
    const struct step_state *s = executor_shared(&t->executor, SHARED_STATE);
    (void)live;
    if (p->kind != PROGRAM_STEP || p->instrs[index].op != OP_AGREE || t->comm->rank != 0)
        return;
    int64_t epoch = s->host.step / t->sampler.steps_per_epoch;
    for (int r = 0; r < t->comm->world_size; r++)
        for (int m = 0; m < t->config->train.grad_accum; m++) {
            int32_t picked[16];
            int64_t n = sampler_take(&t->sampler, r, m, picked);
            for (int64_t i = 0; i < n && epoch < 2; i++)
                times_seen[epoch][picked[i]]++;
        }
}

static void b16_b17_b19_b23_any_world_and_stage_goes_on_from_the_same_state(void **state)
{
    (void)state;
    static const int worlds[] = {1, 2, 3, 4, 6};
    const struct run_how counting = {.executor = {.on_instr = count_samples}};
    struct run_config saving = resume_tiny("world", 3, 2, HALF, HALF);
    struct run_config whole = resume_tiny("world-whole", 3, 2, 10, 0);
    saving.train.tables = whole.train.tables = TABLES_ROWS;
    run_ok(&group.other, &whole, NULL);
    memset(times_seen, 0, sizeof times_seen);
    run_ok(&group.first, &saving, &counting);
    int seen_before[2][MAX_SAMPLES];
    memcpy(seen_before, times_seen, sizeof seen_before);
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++)
        for (int stage = 0; stage < 4; stage++) {
            char what[64];
            snprintf(what, sizeof what, "%d ranks at stage %d", worlds[i], stage);
            /* No step is left to do: the state is what was read. */
            struct run_config c = resume_tiny("none", worlds[i], stage, HALF, 0);
            if (worlds[i] == 3)
                c.train.tables = TABLES_ROWS;
            resume_from(&c, &saving, HALF);
            c.train.threads = 1 + stage; /* read by so many, which changes nothing */
            run_ok(&group.third, &c, NULL);
            assert_int_equal(group.third.steps, 0);
            resume_same_state(&group.first, &group.third, what);
            run_release(&group.third);
            c.train.steps = 10;
            c.train.max_unit_numel = 1 << 20; /* tables in one part: another layout */
            memcpy(times_seen, seen_before, sizeof seen_before);
            run_ok(&group.third, &c, &counting);
            resume_same_rest(&group.other, &group.third, HALF, 1e-4, what);
            int64_t samples = 0;
            for (int s = 0; s < MAX_SAMPLES; s++) {
                assert_int_equal(times_seen[0][s], times_seen[1][s]);
                assert_in_range(times_seen[0][s], 0, 1);
                samples += times_seen[0][s];
            }
            assert_true(samples >= 40);
            run_release(&group.third);
        }
}

#define TEST(name) cmocka_unit_test_teardown(name, resume_release)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(b16_b17_b19_b23_any_world_and_stage_goes_on_from_the_same_state),
    };
    return cmocka_run_group_tests(tests, resume_set_up, run_tear_down);
}
