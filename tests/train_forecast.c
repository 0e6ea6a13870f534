/*
 * Predicted steps (engine/train/forecast.h) and the profiles that they come from.
 */
#include "engine/train/forecast.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "engine/device/device.h"
#include "tests/support/support.h"

static void close_to(double got, double want, double share)
{
    if (fabs(got - want) > share * fabs(want))
        fail_msg("got %.9g, expected %.9g", got, want);
}

static void rates_lie_between_the_points_and_keep_the_time_below(void **state)
{
    (void)state;
    struct machine_curve c = {{{100, 10}, {200, 30}, {400, 20}}, 3};
    close_to(machine_curve_at(&c, 100), 10, 1e-12);
    close_to(machine_curve_at(&c, 150), 20, 1e-12);
    close_to(machine_curve_at(&c, 300), 25, 1e-12);
    close_to(machine_curve_at(&c, 4000), 20, 1e-12);
    close_to(50 / machine_curve_at(&c, 50), 100 / machine_curve_at(&c, 100), 1e-12);
    assert_true(machine_curve_at(&c, 0) > 0);
}

static void rates_lie_between_the_widths_and_stay_outside(void **state)
{
    (void)state;
    struct machine_table t = {
        {{100, {{{10, 1}, {20, 2}}, 2}}, {300, {{{10, 3}, {20, 6}}, 2}}, {400, {{{10, 9}}, 1}}}, 3};
    close_to(machine_table_at(&t, 7, 10), 1, 1e-12);
    close_to(machine_table_at(&t, 100, 15), 1.5, 1e-12);
    close_to(machine_table_at(&t, 200, 10), 2, 1e-12);
    close_to(machine_table_at(&t, 300, 20), 6, 1e-12);
    close_to(machine_table_at(&t, 350, 20), 7.5, 1e-12);
    close_to(machine_table_at(&t, 4000, 20), 9, 1e-12);
}

static void profiles_are_found_by_card_and_network(void **state)
{
    struct machine m;
    (void)state;
    assert_ok(machine_builtin(&m, "h100"));
    assert_true(m.far.gather_per_second <= 0);
    assert_ok(machine_builtin(&m, "a100+ib400"));
    close_to(m.far.gather_per_second, 0.92 * 50e9, 1e-12);
    assert_non_null(strstr(m.name, "400 Gb/s"));
    for (int g = 0; g < MACHINE_GROUPS; g++)
        assert_true(m.source[g][0] != '\0');
    static const char *const wrong[] = {"",      "h100+", "h1", "h100+ib40", "h100+ib400+ib400",
                                        "+ib400"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_int_equal(machine_builtin(&m, wrong[i]), ST_INVALID);
        assert_non_null(strstr(status_message(), "h200"));
    }
    machine_like_card(&m, "NVIDIA H200");
    assert_string_equal(m.name, "NVIDIA H200");
    machine_like_card(&m, "a card of tomorrow");
    assert_non_null(strstr(m.name, "H100"));
    assert_true(m.near.gather_per_second > 0);
}

static const char large[] = "bench/gpu/bert-large.yaml";

/* One configuration's forecast. */
struct asked {
    const char *machine, *config;
    int64_t sequences;
    int ranks, stage, nodes, replicas;
};

/* Of all FORWARD and BACKWARD of the step that was asked for last. */
static struct {
    int first, last; /* how many have their first part, and the last one, beside collectives */
    int all;
} passes;

static void count_passes(const struct program *p, const uint16_t *parts)
{
    memset(&passes, 0, sizeof passes);
    for (int i = 0; i < p->instr_count; i++) {
        if (simulate_is_collective(p->instrs[i].op))
            assert_int_equal(parts[i], 0);
        if (p->instrs[i].op != OP_FORWARD && p->instrs[i].op != OP_BACKWARD)
            continue;
        passes.first += parts[i] & 1;
        passes.last += parts[i] >> (SIMULATE_PARTS - 1);
        passes.all++;
    }
}

static enum status ask(struct forecast *f, const struct asked *a, struct batch_size micro)
{
    struct run_config config;
    struct device *device = NULL;
    struct setup setup;
    struct plan plan = {0};
    struct account account;
    struct machine machine;
    assert_ok(config_load(&config, a->config, NULL, 0));
    config.train.micro_batch = a->sequences;
    config.train.comm = COMM_NCCL;
    assert_ok(machine_builtin(&machine, a->machine));
    assert_ok(device_open(&device, DEVICE_CPU, PRECISION_FP32, 0, 1));
    device->param_dtype = machine.device == DEVICE_CUDA ? DTYPE_BF16 : DTYPE_F32;
    assert_ok(setup_init(&setup, &config, device, a->ranks, a->stage,
                         (struct setup_rows){.train = (int64_t)micro.tokens}));
    assert_ok(plan_build(&plan, &account, &setup.spec));
    const struct program *step = &plan.programs[PROGRAM_STEP];
    struct simulate_world world = {a->ranks, a->nodes, a->replicas};
    uint16_t *parts = NULL;
    assert_ok(mem_alloc(&parts, sizeof *parts * (size_t)step->instr_count));
    enum status st = forecast_step(f, &setup, step, &machine, world, micro);
    assert_int_equal(forecast_beside(parts, &setup, step, &machine, world, micro), st);
    if (st == ST_OK)
        count_passes(step, parts);
    mem_free(&parts);
    plan_release(&plan);
    setup_release(&setup);
    device_close(&device);
    return st;
}

/* Real SQuAD windows: 175 tokens, standard deviation about 60. */
static struct batch_size squad(int64_t sequences)
{
    return (struct batch_size){175.0 * (double)sequences,
                               (175.0 * 175 + 60 * 60) * (double)sequences};
}

/* Steps of one H200 at all stages (bench/forecast.py --record): the mean batch of each run in rows
 * of its length classes, and the rates that are built in, measured on the same day. */
static void measured_steps_of_one_card_come_out(void **state)
{
    char config[64];
    long sequences, rows, squared;
    int stage, steps = 0;
    double ms;
    (void)state;
    FILE *f = fopen("tests/data/steps/h200-steps.tsv", "r");
    assert_non_null(f);
    while (fscanf(f, "%63s %ld %d %ld %ld %lf\n", config, &sequences, &stage, &rows, &squared,
                  &ms) == 6) {
        struct forecast forecast;
        struct asked a = {.machine = "h200",
                          .config = config,
                          .sequences = sequences,
                          .ranks = 1,
                          .stage = stage,
                          .nodes = 1,
                          .replicas = 1};
        assert_ok(ask(&forecast, &a, (struct batch_size){(double)rows, (double)squared}));
        print_message("%s, %ld sequences, stage %d: measured %.3f ms, predicted %.3f\n", config,
                      sequences, stage, ms, forecast.seconds * 1e3);
        close_to(forecast.seconds, ms * 1e-3, 0.1);
        steps++;
    }
    assert_true(feof(f) && steps >= 20);
    fclose(f);
}

/* With few sequences a block's reduction lasts beyond the next block's first half, with many it is
 * over soon; in no case do collectives cover all. One rank has none, nor has a rank of a CPU any
 * beside what it does. */
static void reductions_are_beside_the_first_products_of_a_block(void **state)
{
    struct forecast f;
    struct asked a = {"h200", large, 16, 4, 1, 1, 1};
    (void)state;
    assert_ok(ask(&f, &a, squad(16)));
    int few_last = passes.last;
    assert_true(passes.first >= 24 && passes.first < passes.all && few_last < passes.first);
    a.sequences = 64;
    assert_ok(ask(&f, &a, squad(64)));
    assert_true(passes.first >= 24 && passes.last < few_last);
    a.ranks = 1;
    assert_ok(ask(&f, &a, squad(64)));
    assert_int_equal(passes.first + passes.last, 0);
    a.ranks = 4;
    a.machine = "epyc-core";
    assert_ok(ask(&f, &a, squad(64)));
    assert_int_equal(passes.first + passes.last, 0);
}

static void slower_networks_make_no_step_shorter(void **state)
{
    static const char *const machines[] = {"h100+ib400", "h100+ib200", "h100+ib100", "h100+ib50"};
    (void)state;
    for (int stage = 0; stage < 4; stage++) {
        double flat = 0, hybrid = 0;
        for (int i = 0; i < 4; i++) {
            struct forecast f;
            assert_ok(ask(&f, &(struct asked){machines[i], large, 16, 64, stage, 8, 1}, squad(16)));
            assert_true(f.seconds >= flat);
            flat = f.seconds;
            assert_ok(ask(&f, &(struct asked){machines[i], large, 16, 8, stage, 1, 8}, squad(16)));
            assert_true(f.seconds >= hybrid);
            hybrid = f.seconds;
        }
    }
}

/* The bytes between nodes are the same: 2 + 2 + 4 a parameter flat, 2 x 4 of the eighth hybrid. */
static void hybrid_sharding_saves_the_hops_of_many_ranks(void **state)
{
    struct forecast flat, hybrid;
    (void)state;
    assert_ok(ask(&flat, &(struct asked){"h100+ib400", large, 16, 4096, 3, 512, 1}, squad(16)));
    assert_ok(ask(&hybrid, &(struct asked){"h100+ib400", large, 16, 8, 3, 1, 512}, squad(16)));
    assert_true(hybrid.seconds < 0.8 * flat.seconds);
}

static void worlds_that_a_machine_does_not_have_are_refused(void **state)
{
    struct forecast f;
    (void)state;
    assert_int_equal(ask(&f, &(struct asked){"h100", large, 16, 16, 3, 2, 1}, squad(16)),
                     ST_INVALID);
    assert_non_null(strstr(status_message(), "no network"));
    assert_int_equal(ask(&f, &(struct asked){"h100+ib50", large, 16, 16, 3, 3, 1}, squad(16)),
                     ST_INVALID);
    assert_non_null(strstr(status_message(), "16 ranks do not spread equally over 3 nodes"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rates_lie_between_the_points_and_keep_the_time_below),
        cmocka_unit_test(rates_lie_between_the_widths_and_stay_outside),
        cmocka_unit_test(profiles_are_found_by_card_and_network),
        cmocka_unit_test(measured_steps_of_one_card_come_out),
        cmocka_unit_test(reductions_are_beside_the_first_products_of_a_block),
        cmocka_unit_test(slower_networks_make_no_step_shorter),
        cmocka_unit_test(hybrid_sharding_saves_the_hops_of_many_ranks),
        cmocka_unit_test(worlds_that_a_machine_does_not_have_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
