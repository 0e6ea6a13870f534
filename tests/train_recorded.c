/*
 * Recorded steps: the instruction timings of real runs on two CPU ranks at stages 0 to 3
 * (tests/data/steps, made by scripts/record-steps.py on a machine that others used too), through
 * simulate. The program is built anew from the configuration and must be the one that was recorded;
 * the time line of the rank's own times must be the recorded step within 10%.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "engine/device/device.h"
#include "engine/train/setup.h"
#include "shard/simulate.h"
#include "tests/support/support.h"

enum { STEPS = 3, MAX_INSTRS = 256 };

struct recording {
    long rows;
    double step_us[STEPS];
    double us[STEPS][MAX_INSTRS];
    char op[MAX_INSTRS][16], unit[MAX_INSTRS][32];
    int count;
};

static void read_recording(struct recording *r, int stage)
{
    char path[64];
    snprintf(path, sizeof path, "tests/data/steps/stage%d.tsv", stage);
    memset(r, 0, sizeof *r);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    assert_int_equal(fscanf(f, "# rows %ld\n", &r->rows), 1);
    assert_int_equal(fscanf(f, "# tokens %*d %*d %*d\n"), 0);
    assert_int_equal(
        fscanf(f, "# step_us %lf %lf %lf\n", &r->step_us[0], &r->step_us[1], &r->step_us[2]), 3);
    int instr, micro;
    double us[STEPS];
    while (fscanf(f, "%d %15s %31s %d %lf %lf %lf\n", &instr, r->op[r->count], r->unit[r->count],
                  &micro, &us[0], &us[1], &us[2]) == 7) {
        assert_int_equal(instr, r->count);
        for (int k = 0; k < STEPS; k++)
            r->us[k][r->count] = us[k];
        assert_true(++r->count < MAX_INSTRS);
    }
    assert_true(feof(f));
    fclose(f);
}

static void check_same_program(const struct program *p, const struct model *m,
                               const struct recording *r)
{
    assert_int_equal(p->instr_count, r->count);
    for (int i = 0; i < r->count; i++) {
        const struct instr *in = &p->instrs[i];
        assert_string_equal(program_op_name(in->op), r->op[i]);
        assert_string_equal(in->unit >= 0 ? m->units[in->unit].name : "-", r->unit[i]);
    }
}

static void check_stage(int stage)
{
    static struct recording r;
    static struct simulate_span spans[MAX_INSTRS];
    struct run_config config;
    struct device *device = NULL;
    struct setup setup;
    struct plan plan = {0};
    struct account account;
    read_recording(&r, stage);
    assert_ok(config_load(&config, "configs/demo.yaml", NULL, 0));
    config.train.comm = COMM_LOCAL;
    assert_ok(device_open(&device, DEVICE_CPU, PRECISION_FP32, 0, 1));
    assert_ok(setup_init(&setup, &config, device, 2, stage, r.rows, r.rows));
    assert_ok(plan_build(&plan, &account, &setup.spec));
    const struct program *p = &plan.programs[PROGRAM_STEP];
    check_same_program(p, &setup.model, &r);
    for (int k = 0; k < STEPS; k++) {
        double seconds[MAX_INSTRS], own = 0;
        struct simulate_result result;
        for (int i = 0; i < r.count; i++) {
            seconds[i] = r.us[k][i] * 1e-6;
            own += simulate_is_collective(p->instrs[i].op) ? seconds[i] : 0;
        }
        simulate_in_order(&result, spans, p, seconds);
        print_message("stage %d: recorded %.2f ms, simulated %.2f ms\n", stage, r.step_us[k] * 1e-3,
                      result.seconds * 1e3);
        assert_true(fabs(result.seconds * 1e6 / r.step_us[k] - 1) < 0.1);
        assert_true(fabs(result.exposed_seconds - own) < 1e-9);
    }
    plan_release(&plan);
    setup_release(&setup);
    device_close(&device);
}

static void recorded_steps_come_out_within_a_tenth(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage++)
        check_stage(stage);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(recorded_steps_come_out_within_a_tenth)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
