/* Going on from a checkpoint gives the bits of an unbroken run. */
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "tests/support/resume.h"

enum { TOTAL = 12, HALF = 7 /* inside the second epoch */ };

static void b01_b05_b08_b10_b11_b13_n_and_n_steps_are_2n_steps_to_the_bit(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage++) {
        char what[64];
        struct run_config plain = resume_tiny("plain", 2, stage, TOTAL, 0), saving = plain,
                          rest = plain;
        snprintf(what, sizeof what, "stage %d", stage);
        saving.checkpoint.every = HALF;
        saving.checkpoint.async = stage % 2 == 0;
        snprintf(saving.output.dir, sizeof saving.output.dir, "%s/half-%d", group.scratch.dir,
                 stage);
        run_ok(&group.first, &plain, NULL);
        run_ok(&group.other, &saving, NULL);
        assert_int_equal(group.first.steps, TOTAL);
        run_same(&group.first, &group.other, "a run that saves");
        assert_true(saved_is_there(&saving, HALF) && saved_is_there(&saving, TOTAL));
        resume_from(&rest, &saving, HALF);
        run_ok(&group.third, &rest, NULL);
        resume_same_rest(&group.first, &group.third, HALF, 0, what);
        resume_same_state(&group.first, &group.third, what);
        resume_release(NULL);
    }
}

#ifndef __SANITIZE_THREAD__ /* the flag is a signal handler's, not a thread's */
static int signal_number;

static void raise_in_step_6(void *context, const struct program *p, int index,
                            const size_t live[CATEGORY_COUNT])
{
    const struct trainer *t = context;
    const struct step_state *s = executor_shared(&t->executor, SHARED_STATE);
    (void)live;
    if (p->kind == PROGRAM_STEP && index == 3 && t->comm->rank == 1 && s->host.step == 6)
        __atomic_store_n(&signal_number, SIGTERM, __ATOMIC_RELAXED);
}

static void b92_a_signal_saves_the_last_step_and_resume_goes_on_to_the_bit(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage += 3) {
        struct run_config plain = resume_tiny("plain", 3, stage, TOTAL, 0), stopped = plain;
        snprintf(stopped.output.dir, sizeof stopped.output.dir, "%s/stop-%d", group.scratch.dir,
                 stage);
        stopped.checkpoint.every = 1000;
        run_ok(&group.first, &plain, NULL);
        __atomic_store_n(&signal_number, 0, __ATOMIC_RELAXED);
        run_go(&group.other, &stopped,
               &(struct run_how){.signal_flag = &signal_number,
                                 .executor = {.on_instr = raise_in_step_6}});
        assert_int_equal(group.other.st, ST_INTERRUPTED);
        assert_true(group.other.steps > 6 && saved_is_there(&stopped, group.other.steps));
        int stop = group.other.steps;
        resume_latest(&stopped);
        run_ok(&group.third, &stopped, NULL);
        resume_same_rest(&group.first, &group.third, stop, 0, "after a signal");
        resume_same_state(&group.first, &group.third, "after a signal");
        assert_true(saved_is_there(&stopped, TOTAL));
        resume_release(NULL);
    }
}
#endif

/* Nothing is learned: the first evaluation is the best, and the third after it ends the run. */
static void early_stopping_goes_on_where_it_stood(void **state)
{
    (void)state;
    struct run_config c = resume_tiny("early", 2, 2, 40, 1), rest;
    scratch_path(&group.scratch, c.data.eval, "eval.json");
    c.optim.lr = 0;
    c.eval.every = 2;
    c.eval.stop_metric = STOP_LOSS;
    c.checkpoint.keep = 0;
    rest = c;
    rest.checkpoint.every = 0;
    run_ok(&group.first, &c, NULL);
    assert_int_equal(group.first.steps, 8);
    for (int64_t step = 5; step <= 8; step++) {
        resume_from(&rest, &c, step);
        run_ok(&group.third, &rest, NULL);
        resume_same_rest(&group.first, &group.third, (int)step, 0, "early stop");
        run_release(&group.third);
    }
}
static void frozen_tensors_go_on_and_a_changed_freeze_is_an_error(void **state)
{
    (void)state;
    struct run_config plain = resume_tiny("plain", 2, 3, TOTAL, 0), saving, rest;
    snprintf(plain.train.freeze, sizeof plain.train.freeze,
             "bert.embeddings,bert.encoder.layer.0,bert.encoder.layer.1.output.dense");
    saving = rest = plain;
    scratch_path(&group.scratch, saving.output.dir, "frozen");
    saving.checkpoint.every = HALF;
    run_ok(&group.first, &plain, NULL);
    run_ok(&group.other, &saving, NULL);
    resume_from(&rest, &saving, HALF);
    run_ok(&group.third, &rest, NULL);
    resume_same_rest(&group.first, &group.third, HALF, 0, "frozen");
    resume_same_state(&group.first, &group.third, "frozen");
    resume_release(NULL);
    rest.train.freeze[0] = '\0';
    run_go(&group.third, &rest, NULL);
    assert_int_equal(group.third.st, ST_INVALID);
    assert_non_null(strstr(group.third.message, "train.freeze"));
}

#define TEST(name) cmocka_unit_test_teardown(name, resume_release)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(b01_b05_b08_b10_b11_b13_n_and_n_steps_are_2n_steps_to_the_bit),
#ifndef __SANITIZE_THREAD__
        TEST(b92_a_signal_saves_the_last_step_and_resume_goes_on_to_the_bit),
#endif
        TEST(early_stopping_goes_on_where_it_stood),
        TEST(frozen_tensors_go_on_and_a_changed_freeze_is_an_error),
    };
    return cmocka_run_group_tests(tests, resume_set_up, run_tear_down);
}
