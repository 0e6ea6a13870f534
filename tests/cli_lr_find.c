/*
 * `tessera lr-find` as people use it, and its rules (engine/train/lr_sweep.h) on made-up curves.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/train/lr_sweep.h"
#include "tests/support/process.h"
#include "tests/support/run.h"

static struct scratch scratch;
static struct process ran;

static const char *path_of(const char *name)
{
    return scratch_at(&scratch, name);
}

#define RUN(...) process_run(&ran, &scratch, (const char *const[]){__VA_ARGS__, NULL})

static int set_up(void **state)
{
    static const struct made_questions train = {
        .count = 60, .min_words = 5, .max_words = 40, .question_words = 4, .seed = 5};
    struct run_config c;
    run_set_up(state, &scratch, &train, NULL);
    run_tiny(&c, &scratch, false);
    run_put_config(&scratch, &c);
    return 0;
}

static bool is_there(const char *name)
{
    struct file_text text = {NULL, 0};
    bool found = file_read(&text, path_of(name)) == ST_OK;
    mem_free(&text.data);
    return found;
}

/* ---- the rules ---- */

enum { STEPS = 100 };

/* A curve over the step: add it until the sweep says that it is over. */
static void sweep_curve(struct lr_sweep *s, double (*loss)(double step))
{
    assert_ok(lr_sweep_init(s, 1e-7, 1, STEPS));
    for (int64_t k = 0; k < STEPS; k++)
        if (!lr_sweep_add(s, lr_sweep_at(s, k), loss((double)k)))
            break;
}

static double falling(double step)
{
    return 5 - 4 / (1 + exp(-(step - 60) / 3)); /* steepest at step 60 */
}

static double rising(double step)
{
    return 1 + step;
}

static double exploding(double step)
{
    return step < 70 ? 4 - step * 0.01 : 4 * exp(step - 70);
}

static double breaking(double step)
{
    return step == 40 ? (double)NAN : 4 - step * 0.01;
}

static void rates_grow_by_equal_factors_between_the_limits(void **state)
{
    struct lr_sweep s;
    (void)state;
    assert_ok(lr_sweep_init(&s, 1e-7, 1, STEPS));
    assert_true(lr_sweep_at(&s, 0) == 1e-7);
    assert_true(fabs(lr_sweep_at(&s, STEPS - 1) - 1) < 1e-12);
    for (int64_t k = 1; k < STEPS; k++)
        assert_true(fabs(lr_sweep_at(&s, k) / lr_sweep_at(&s, k - 1) - pow(1e7, 1.0 / 99)) < 1e-12);
    lr_sweep_release(&s);
}

static void the_smoothed_loss_is_the_weighted_mean_of_those_before(void **state)
{
    struct lr_sweep s;
    (void)state;
    sweep_curve(&s, falling);
    assert_int_equal(s.count, STEPS);
    for (int64_t k = 0; k < STEPS; k++) {
        double sum = 0, weights = 0;
        for (int64_t i = 0; i <= k; i++) {
            sum += pow(0.98, (double)(k - i)) * falling((double)i);
            weights += pow(0.98, (double)(k - i));
        }
        assert_true(fabs(s.points[k].smoothed - sum / weights) < 1e-12);
    }
    lr_sweep_release(&s);
}

static void suggested_is_the_steepest_point_of_the_smoothed_loss(void **state)
{
    struct lr_sweep s;
    (void)state;
    sweep_curve(&s, falling);
    int64_t found = lr_sweep_suggest(&s), want = -1;
    double least = 0;
    for (int64_t i = LR_SWEEP_SKIP + 1; i < STEPS - 2; i++)
        if (s.points[i + 1].smoothed - s.points[i - 1].smoothed < least) {
            least = s.points[i + 1].smoothed - s.points[i - 1].smoothed;
            want = i;
        }
    assert_int_equal(found, want);
    assert_in_range(found, 60, 75); /* a mean of the past lags behind */
    lr_sweep_release(&s);
}

static void a_loss_that_never_falls_has_no_suggestion(void **state)
{
    struct lr_sweep s;
    (void)state;
    sweep_curve(&s, rising);
    assert_int_equal(lr_sweep_suggest(&s), -1);
    lr_sweep_release(&s);
    assert_ok(lr_sweep_init(&s, 1e-7, 1, STEPS)); /* nor have too few points */
    for (int64_t k = 0; k < LR_SWEEP_SKIP + 2; k++)
        assert_true(lr_sweep_add(&s, 1, falling((double)k * 10)));
    assert_int_equal(lr_sweep_suggest(&s), -1);
    lr_sweep_release(&s);
}

static void an_exploding_or_broken_loss_ends_the_sweep(void **state)
{
    struct lr_sweep s;
    (void)state;
    sweep_curve(&s, exploding);
    assert_true(s.diverged);
    assert_in_range(s.count, 72, 80);
    assert_true(s.points[s.count - 1].smoothed > 4 * s.best);
    assert_false(lr_sweep_add(&s, 1, 1)); /* later ones are ignored */
    lr_sweep_release(&s);
    sweep_curve(&s, breaking);
    assert_true(s.diverged);
    assert_int_equal(s.count, 40);
    assert_true(lr_sweep_suggest(&s) >= LR_SWEEP_SKIP);
    lr_sweep_release(&s);
}

/* ---- the command ---- */

static double suggestion(void)
{
    const char *at = strstr(ran.out, "Suggested learning rate: ");
    if (at == NULL)
        fail_msg("no suggestion in %s", ran.out);
    return strtod(at + strlen("Suggested learning rate: "), NULL);
}

static void a_tiny_model_gets_a_sane_rate_and_leaves_no_weights(void **state)
{
    struct file_text text;
    int lines = 0;
    (void)state;
    RUN("lr-find", "--config", path_of("run.yaml"), "--output-dir", path_of("lr"), "--set",
        "checkpoint.every=10", "--set", "output.model=true");
    process_expect(&ran, 0, "<- suggested", "lr-find: step 10/100");
    /* Where it learns at all, and below where AdamW leaves the weights behind. */
    assert_true(suggestion() > 1e-5 && suggestion() < 0.3);
    assert_ok(file_read(&text, path_of("lr/lr_find.csv")));
    assert_memory_equal(text.data, "step,lr,loss,smoothed_loss\n1,", 29);
    for (size_t i = 0; i < text.bytes; i++)
        lines += text.data[i] == '\n';
    assert_in_range(lines, LR_SWEEP_MIN_STEPS, STEPS + 1);
    mem_free(&text.data);
    assert_false(is_there("lr/model/model.safetensors"));
    assert_false(is_there("lr/checkpoints/latest"));
    assert_false(is_there("lr/summary.json"));
}

static void the_same_seed_gives_the_same_bytes_at_any_stage(void **state)
{
    static const char *const stages[] = {"train.zero_stage=0", "train.zero_stage=3"};
    struct file_text text[2];
    (void)state;
    for (int i = 0; i < 2; i++) {
        RUN("lr-find", "--config", path_of("run.yaml"), "--output-dir", path_of("bits"), "--steps",
            "30", "--ranks", "2", "--set", stages[i]);
        process_expect(&ran, 0, NULL, NULL);
        assert_ok(file_read(&text[i], path_of("bits/lr_find.csv")));
    }
    assert_int_equal(text[0].bytes, text[1].bytes);
    assert_memory_equal(text[0].data, text[1].data, text[0].bytes);
    mem_free(&text[0].data);
    mem_free(&text[1].data);
}

static void bad_limits_are_refused(void **state)
{
    (void)state;
    RUN("lr-find", "--config", path_of("run.yaml"), "--min-lr", "0.1", "--max-lr", "0.01");
    process_expect(&ran, 2, NULL, "--min-lr 0.1 is not below --max-lr 0.01");
    RUN("lr-find", "--config", path_of("run.yaml"), "--steps", "5");
    process_expect(&ran, 2, NULL, "--steps");
    RUN("lr-find", "--config", path_of("run.yaml"), "--min-lr", "0");
    process_expect(&ran, 2, NULL, "--min-lr");
    RUN("lr-find");
    process_expect(&ran, 2, NULL, "--config");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rates_grow_by_equal_factors_between_the_limits),
        cmocka_unit_test(the_smoothed_loss_is_the_weighted_mean_of_those_before),
        cmocka_unit_test(suggested_is_the_steepest_point_of_the_smoothed_loss),
        cmocka_unit_test(a_loss_that_never_falls_has_no_suggestion),
        cmocka_unit_test(an_exploding_or_broken_loss_ends_the_sweep),
        cmocka_unit_test(a_tiny_model_gets_a_sane_rate_and_leaves_no_weights),
        cmocka_unit_test(the_same_seed_gives_the_same_bytes_at_any_stage),
        cmocka_unit_test(bad_limits_are_refused),
    };
    return cmocka_run_group_tests(tests, set_up, run_tear_down);
}
