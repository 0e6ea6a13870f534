/*
 * The small models against PyTorch's numbers, and their gradient against their own loss.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "tests/support/small_model.h"
#include "tests/support/support.h"

enum { STEPS = 5 };

/* ---- against the reference ------------------------------------------------------------------- */

static void check_activations(struct small_model *f)
{
    float *values = NULL;
    for (int k = 0; k <= LAYERS; k++) {
        char what[64];
        snprintf(what, sizeof what, "%s hidden %d", small_mode(f), k);
        small_slot(f, 1 + k, &values);
        small_check(
            what, golden_error(values, golden_tensor(&f->golden, "%s.hidden.%d", small_mode(f), k)),
            small_tolerance(f, "hidden"));
        mem_free(&values);
    }
    small_slot(f, f->run.model.slot_count - 1, &values);
    small_check("logits",
                golden_error(values, golden_tensor(&f->golden, "%s.logits", small_mode(f))),
                small_tolerance(f, "logits"));
    mem_free(&values);
}

static void check_reference(bool padded)
{
    struct small_model f;
    small_open(&f, padded);
    model_run_forward(&f.run, &f.batch, true);
    check_activations(&f);
    struct step_report report = model_run_report(&f.run);
    double want = golden_value(golden_tensor(&f.golden, "%s.loss", small_mode(&f)), 0);
    assert_int_equal(report.sequences, SEQUENCES);
    small_check("loss", fabs(report.loss_sum / SEQUENCES - want) / want,
                small_tolerance(&f, "loss"));
    model_run_backward(&f.run, &f.batch, false);
    small_check_gradients(&f);
    small_close(&f);
}

static void packed_batch_matches_sequences_run_alone_in_pytorch(void **state)
{
    (void)state;
    check_reference(false);
}

static void padded_batch_matches_transformers(void **state)
{
    (void)state;
    check_reference(true);
}

static struct optim_hyper golden_hyper(void)
{
    struct optim_hyper hyper = {.lr = 1e-3f,
                                .beta1 = 0.9f,
                                .beta2 = 0.999f,
                                .eps = 1e-8f,
                                .weight_decay = 0.01f,
                                .max_grad_norm = 1.0f,
                                .warmup_steps = 2,
                                .total_steps = STEPS,
                                .schedule = SCHEDULE_LINEAR};
    return hyper;
}

/* Losses, norms and rates of five AdamW steps. After them the weights differ by more than rounding:
 * an update is a ratio of two moments, so a small gradient's relative error passes undamped. */
static void check_training(bool padded)
{
    struct small_model f;
    struct optim_hyper hyper = golden_hyper();
    small_open(&f, padded);
    for (int step = 0; step < STEPS; step++) {
        model_run_forward(&f.run, &f.batch, true);
        model_run_backward(&f.run, &f.batch, false);
        model_run_update(&f.run, &hyper);
        struct step_state s = model_run_state(&f.run);
        const char *mode = small_mode(&f);
        double loss = golden_value(golden_tensor(&f.golden, "%s.train.loss", mode), step);
        double norm = golden_value(golden_tensor(&f.golden, "%s.train.norm", mode), step);
        double lr = golden_value(golden_tensor(&f.golden, "%s.train.lr", mode), step);
        small_check("loss", fabs(s.loss - loss) / loss, small_tolerance(&f, "train"));
        small_check("norm", fabs(s.grad_norm - norm) / norm, small_tolerance(&f, "train"));
        small_check("lr", fabs((double)s.lr - lr), 1e-9);
        assert_int_equal(s.skip, 0);
    }
    for (int i = 0; i < f.run.model.tensor_count && !padded; i++) {
        const char *name = f.run.model.tensors[i].name;
        float *values = NULL;
        if (small_no_gradient(name))
            continue;
        small_tensor(&f, RUN_MASTER, i, &values);
        small_check(name, golden_error(values, golden_tensor(&f.golden, "packed.after.%s", name)),
                    small_tolerance(&f, "after"));
        mem_free(&values);
    }
    small_close(&f);
}

static void five_adamw_steps_packed_match_pytorch(void **state)
{
    (void)state;
    check_training(false);
}

static void five_adamw_steps_padded_match_transformers(void **state)
{
    (void)state;
    check_training(true);
}

/* ---- the gradient is the loss's -------------------------------------------------------------- */

/* Move every parameter by @step times the direction of its index in @directions. */
static void move_weights(struct small_model *f, float **origins, float **directions, float step)
{
    for (int i = 0; i < f->run.model.tensor_count; i++) {
        const struct model_tensor *t = &f->run.model.tensors[i];
        int64_t n = t->shape[0] * t->shape[1];
        float *moved = NULL;
        assert_ok(mem_alloc(&moved, sizeof *moved * (size_t)n));
        for (int64_t k = 0; k < n; k++)
            moved[k] = origins[i][k] + step * directions[i][k];
        model_run_put_tensor(&f->run, t->name, moved);
        mem_free(&moved);
    }
}

static double loss_at(struct small_model *f, float **origins, float **directions, float step)
{
    move_weights(f, origins, directions, step);
    model_run_forward(&f->run, &f->batch, true);
    return model_run_report(&f->run).loss_sum / SEQUENCES;
}

/* With dropout: its mask depends on counters only, so it stays while the weights move. */
static void gradient_is_the_slope_of_the_loss_with_dropout(void **state)
{
    (void)state;
    enum { MAX_TENSORS = 64 };
    struct run_config config;
    struct small_model f;
    float *origins[MAX_TENSORS] = {0}, *directions[MAX_TENSORS] = {0};
    uint64_t random = test_seed();
    small_config(&config);
    config.model.hidden_dropout = config.model.attention_dropout = 0.2;
    config.model.qa_dropout = 0.3;
    small_open_with(&f, &config, false, 0);
    small_step(&f);
    int tensors = f.run.model.tensor_count;
    assert_true(tensors <= MAX_TENSORS);
    double slope = 0.0, squared = 0.0;
    for (int i = 0; i < tensors; i++) {
        const struct model_tensor *t = &f.run.model.tensors[i];
        small_tensor(&f, RUN_MASTER, i, &origins[i]);
        small_tensor(&f, RUN_GRAD, i, &directions[i]);
        for (int64_t k = 0; k < t->shape[0] * t->shape[1]; k++) {
            /* The gradient itself, each element weakened at random. */
            double g = (double)directions[i][k];
            double u = (double)(test_random(&random) >> 11) / 9007199254740992.0;
            directions[i][k] = (float)(g * u);
            slope += g * (double)directions[i][k];
            squared += (double)directions[i][k] * (double)directions[i][k];
        }
    }
    float h = (float)(2e-3 / sqrt(squared)); /* a step of length 2e-3 */
    double measured = (loss_at(&f, origins, directions, h) - loss_at(&f, origins, directions, -h)) /
                      (2.0 * (double)h);
    small_check("slope", fabs(measured - slope) / slope, 2e-3);
    for (int i = 0; i < tensors; i++) {
        mem_free(&origins[i]);
        mem_free(&directions[i]);
    }
    small_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(packed_batch_matches_sequences_run_alone_in_pytorch),
        cmocka_unit_test(padded_batch_matches_transformers),
        cmocka_unit_test(five_adamw_steps_packed_match_pytorch),
        cmocka_unit_test(five_adamw_steps_padded_match_transformers),
        cmocka_unit_test(gradient_is_the_slope_of_the_loss_with_dropout),
    };
    return SMALL_TESTS_RUN(tests);
}
