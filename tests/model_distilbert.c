/*
 * What only DistilBERT has or lacks: no token types, one value of norm_eps, dropout before the head
 * in training alone. What it shares with BERT is in model_reference.c, model_cuts.c and
 * model_params.c.
 */
#include <string.h>

#include "engine/base/arena.h"
#include "tests/support/small_model.h"

static int use_distilbert(void **state)
{
    (void)state;
    small_family = FAMILY_DISTILBERT;
    return 0;
}

static void token_types_have_no_table_and_change_no_bit(void **state)
{
    (void)state;
    struct run_config config;
    struct small_model plain, typed;
    float *x = NULL, *y = NULL;
    small_config(&config);
    small_open_with(&plain, &config, false, 0);
    small_open_with(&typed, &config, false, 0);
    assert_int_equal(plain.run.model.dims.types, 0);
    for (int i = 0; i < plain.run.model.tensor_count; i++)
        assert_null(strstr(plain.run.model.tensors[i].name, "type"));
    int32_t *types = (int32_t *)(uintptr_t)typed.batch.q.token_type; /* the CPU's memory */
    for (int64_t t = 0; t < typed.batch.q.rows; t++)
        types[t] = 1000; /* far outside of any table */
    small_step(&plain);
    small_step(&typed);
    small_slot(&plain, plain.run.model.slot_count - 1, &x);
    small_slot(&typed, typed.run.model.slot_count - 1, &y);
    small_same_bits("logits", x, y, 2 * plain.batch.q.rows);
    mem_free(&x);
    mem_free(&y);
    for (int i = 0; i < plain.run.model.tensor_count; i++) {
        const struct model_tensor *t = &plain.run.model.tensors[i];
        small_tensor(&plain, RUN_GRAD, i, &x);
        small_tensor(&typed, RUN_GRAD, i, &y);
        small_same_bits(t->name, x, y, t->shape[0] * t->shape[1]);
        mem_free(&x);
        mem_free(&y);
    }
    small_close(&plain);
    small_close(&typed);
}

static void another_norm_eps_is_refused(void **state)
{
    (void)state;
    struct run_config config;
    struct model m;
    small_config(&config);
    config.model.norm_eps = 1e-5;
    assert_fails(model_open(&m, &config, DTYPE_F32), ST_INVALID,
                 "model.norm_eps is 1e-05; for distilbert it is 1e-12");
    config.model.family = FAMILY_BERT;
    assert_ok(model_open(&m, &config, DTYPE_F32));
    model_release(&m);
}

/* The loss of a step with these dropouts of the head, in training or not. */
static double loss_with(double qa_dropout, bool training)
{
    struct run_config config;
    struct small_model f;
    small_config(&config);
    config.model.qa_dropout = qa_dropout;
    small_open_with(&f, &config, false, 0);
    model_run_forward(&f.run, &f.batch, training);
    double loss = model_run_report(&f.run).loss_sum;
    small_close(&f);
    return loss;
}

static void the_heads_dropout_acts_in_training_only(void **state)
{
    (void)state;
    assert_true(loss_with(0.1, true) != loss_with(0.0, true));
    assert_true(loss_with(0.1, false) == loss_with(0.0, false));
}

static void the_head_has_scratch_only_for_dropout(void **state)
{
    (void)state;
    const struct micro_dims d = {1024, 8, 384};
    for (int i = 0; i < 2; i++) {
        struct run_config config;
        struct model m;
        config_defaults(&config);
        config.model.family = FAMILY_DISTILBERT;
        config.model.qa_dropout = 0.1 * i;
        assert_ok(model_open(&m, &config, DTYPE_BF16));
        const struct model_unit *head = &m.units[m.unit_count - 1];
        const size_t want = (size_t)i * 1024 * 768 * 2;
        assert_int_equal(head->forward_scratch_bytes(&m, head, d), want);
        assert_int_equal(head->backward_scratch_bytes(&m, head, d), want);
        assert_int_equal(head->saved_bytes(&m, head, d), 1024 * 2 * sizeof(float));
        model_release(&m);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(token_types_have_no_table_and_change_no_bit),
        cmocka_unit_test(another_norm_eps_is_refused),
        cmocka_unit_test(the_heads_dropout_acts_in_training_only),
        cmocka_unit_test(the_head_has_scratch_only_for_dropout),
    };
    return cmocka_run_group_tests(tests, use_distilbert, NULL);
}
