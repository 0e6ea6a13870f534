/*
 * Measuring a machine (engine/train/calibrate.h), on sizes that take no time: that every number is
 * there and makes sense, not what it is.
 */
#include "engine/train/calibrate.h"

#include <stdio.h>
#include <string.h>

#include "comm/fault.h"
#include "engine/train/run.h"
#include "tests/support/run.h"

static const struct calibrate_sizes tiny = {.widths = {32, 64, 96, 128},
                                            .rows = {8, 16, 32, 64},
                                            .heads = {32, 64},
                                            .lengths = {8, 16},
                                            .channels = 64,
                                            .few_rows = 32,
                                            .many_rows = 64,
                                            .update_numel = 4096,
                                            .link_numel = 8192,
                                            .tiny_width = 32,
                                            .tiny_rows = 8};

enum { RANKS = 3 };

static struct {
    struct machine machine[RANKS];
    enum status st[RANKS];
    bool processor_time;
    int threads;
} told;

static enum status measure(void *context, struct device *device, struct comm *comm)
{
    (void)context;
    struct calibrate_options options = {
        .comm = COMM_LOCAL, .sizes = &tiny, .processor_time = told.processor_time};
    told.st[comm->rank] = calibrate_rank(&told.machine[comm->rank], device, comm, &options);
    return told.st[comm->rank];
}

static enum status run(int ranks, enum status (*wrap)(void *context, struct comm **comm))
{
    struct run_config config;
    config_defaults(&config);
    config.train.ranks = ranks;
    config.train.threads = told.threads;
    memset(told.machine, 0, sizeof told.machine);
    memset(told.st, 0, sizeof told.st);
    return run_local(&config, NULL,
                     &(struct run_options){.quiet = true, .alone = measure, .wrap_comm = wrap},
                     NULL);
}

static void check_table(const struct machine_table *t, int widths, int count)
{
    assert_int_equal(t->count, widths);
    for (int w = 0; w < widths; w++) {
        const struct machine_curve *c = &t->of[w].curve;
        assert_true(w == 0 || t->of[w].width > t->of[w - 1].width);
        assert_int_equal(c->count, count);
        for (int i = 0; i < count; i++) {
            assert_true(c->points[i].per_second > 1e3 && c->points[i].per_second < 1e15);
            assert_true(i == 0 || c->points[i].at > c->points[i - 1].at);
        }
    }
}

static void check_profile(const struct machine *m, int ranks)
{
    struct machine back;
    char *text = NULL;
    size_t bytes = 0;
    check_table(&m->products, CALIBRATE_WIDTHS, CALIBRATE_ROWS);
    check_table(&m->attention, CALIBRATE_HEADS, CALIBRATE_LENGTHS);
    check_table(&m->elementwise, CALIBRATE_WIDTHS, CALIBRATE_ROWS);
    assert_true(m->attention_call_seconds >= 0 && m->attention_call_seconds < 1);
    assert_true(m->memory_per_second > 1e3);
    assert_true(m->update_per_second > 1e3);
    assert_true(m->launch_seconds > 0 && m->launch_seconds < 1);
    assert_true(m->near.gather_per_second > 1e3 && m->near.reduce_per_second > 1e3);
    assert_true(ranks == 1 ? m->call_seconds <= 0 : m->call_seconds > 0);
    assert_true(m->slow_down_near <= 0);
    assert_true(m->far.gather_per_second <= 0);
    assert_ok(machine_format(m, &text, &bytes));
    assert_ok(machine_parse(&back, text, bytes, "measured")); /* all that a file needs is there */
    mem_free(&text);
}

static void all_ranks_get_one_whole_profile(void **state)
{
    (void)state;
    told.threads = 1;
    for (int ranks = 1; ranks <= RANKS; ranks++) {
        told.processor_time = ranks == 2;
        assert_ok(run(ranks, NULL));
        check_profile(&told.machine[0], ranks);
        for (int r = 1; r < ranks; r++)
            assert_memory_equal(&told.machine[r].products, &told.machine[0].products,
                                sizeof told.machine[0].products);
    }
}

static int64_t break_at;

static enum status break_one(void *context, struct comm **comm)
{
    (void)context;
    if ((*comm)->rank != 1)
        return ST_OK;
    return fault_comm_open(comm, *comm, (struct fault_plan){.kind = FAULT_FAIL, .at = break_at});
}

static void a_rank_that_fails_ends_all_with_its_cause(void **state)
{
    (void)state;
    told.threads = 1;
    told.processor_time = false;
    for (break_at = 3; break_at < 200; break_at *= 3) {
        assert_int_not_equal(run(2, break_one), ST_OK);
        assert_int_not_equal(told.st[0], ST_OK);
        assert_int_not_equal(told.st[1], ST_OK);
    }
}

static void processor_time_is_for_ranks_of_one_thread(void **state)
{
    (void)state;
    told.threads = 2;
    told.processor_time = true;
    assert_int_equal(run(1, NULL), ST_INVALID);
    assert_non_null(strstr(status_message(), "one thread"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_ranks_get_one_whole_profile),
        cmocka_unit_test(processor_time_is_for_ranks_of_one_thread),
        cmocka_unit_test(a_rank_that_fails_ends_all_with_its_cause),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
