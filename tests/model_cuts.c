/*
 * The small models cut in other ways: split tables, recomputed blocks, rows of no sequence, empty
 * and several micro-batches, frozen parameters. Equal to the bit where the arithmetic is the same.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "tests/support/small_model.h"
#include "tests/support/support.h"

/* Loss, logits of the first @rows rows and all gradients. */
static void assert_same_results(struct small_model *a, struct small_model *b, int64_t rows)
{
    float *x = NULL, *y = NULL;
    double loss_a = model_run_report(&a->run).loss_sum, loss_b = model_run_report(&b->run).loss_sum;
    assert_memory_equal(&loss_a, &loss_b, sizeof loss_a);
    small_slot(a, a->run.model.slot_count - 1, &x);
    small_slot(b, b->run.model.slot_count - 1, &y);
    small_same_bits("logits", x, y, 2 * rows);
    mem_free(&x);
    mem_free(&y);
    for (int i = 0; i < a->run.model.tensor_count; i++) {
        const struct model_tensor *t = &a->run.model.tensors[i];
        small_tensor(a, RUN_GRAD, i, &x);
        small_tensor(b, RUN_GRAD, i, &y);
        small_same_bits(t->name, x, y, t->shape[0] * t->shape[1]);
        mem_free(&x);
        mem_free(&y);
    }
}

static void splitting_the_word_table_changes_no_bit(void **state)
{
    (void)state;
    const int64_t limits[] = {128, 1000, 97 * HIDDEN - 1};
    struct run_config config;
    struct small_model whole, split;
    small_config(&config);
    config.model.hidden_dropout = config.model.attention_dropout = config.model.qa_dropout = 0.1;
    small_open_with(&whole, &config, false, 0);
    small_step(&whole);
    assert_int_equal(whole.run.model.unit_count, 1 + 1 + LAYERS + 1);
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        int64_t rows = limits[i] / HIDDEN;
        config.train.max_unit_numel = limits[i];
        small_open_with(&split, &config, false, 0);
        assert_int_equal(split.run.model.unit_count, (97 + rows - 1) / rows + 1 + LAYERS + 1);
        small_step(&split);
        assert_same_results(&whole, &split, whole.batch.q.rows);
        small_close(&split);
    }
    small_close(&whole);
}

static void recomputed_blocks_give_the_same_bits(void **state)
{
    (void)state;
    struct run_config config;
    struct small_model kept, again;
    small_config(&config);
    config.model.hidden_dropout = config.model.attention_dropout = config.model.qa_dropout = 0.1;
    small_open_with(&kept, &config, false, 0);
    small_open_with(&again, &config, false, 0);
    again.run.recompute = true;
    small_step(&kept);
    small_step(&again);
    assert_same_results(&kept, &again, kept.batch.q.rows);
    small_close(&kept);
    small_close(&again);
}

/* What each dropout of a step was keyed by. */
static struct {
    uint32_t site[32];
    float p[32];
    int count;
} dropouts;

static void record(struct dropout drop)
{
    assert_true(dropouts.count < 32);
    dropouts.p[dropouts.count] = drop.p;
    dropouts.site[dropouts.count++] = drop.layer_site;
}

static enum status record_embedding(struct stream *s, struct tensor out, struct tensor z,
                                    struct tensor stats, struct tensor x, struct tensor position,
                                    struct tensor type, struct tensor gamma, struct tensor beta,
                                    const struct sequences *q, float eps, struct dropout drop)
{
    record(drop);
    return ops_cpu.embedding_norm_forward(s, out, z, stats, x, position, type, gamma, beta, q, eps,
                                          drop);
}

static enum status record_attention(struct stream *s, struct tensor out, struct tensor lse,
                                    struct tensor qkv, const struct sequences *q, int heads,
                                    struct dropout drop)
{
    record(drop);
    return ops_cpu.attention_forward(s, out, lse, qkv, q, heads, drop);
}

static enum status record_residual(struct stream *s, struct tensor out, struct tensor z,
                                   struct tensor stats, struct tensor x, struct tensor y,
                                   struct tensor gamma, struct tensor beta,
                                   const struct sequences *q, float eps, struct dropout drop)
{
    record(drop);
    return ops_cpu.residual_norm_forward(s, out, z, stats, x, y, gamma, beta, q, eps, drop);
}

static enum status record_head(struct stream *s, struct tensor out, struct tensor x,
                               const struct sequences *q, struct dropout drop)
{
    record(drop);
    return ops_cpu.dropout_apply(s, out, x, q, drop);
}

static void check_dropout(int i, uint32_t layer, enum dropout_site site, double p)
{
    assert_int_equal(dropouts.site[i], layer << 8 | site);
    assert_true(dropouts.p[i] == (float)p);
}

/* Two dropouts with one key would drop the same elements. DistilBERT has none behind attention. */
static void every_dropout_has_its_own_layer_and_site(void **state)
{
    (void)state;
    struct small_model f;
    struct run_config config;
    struct ops recording = ops_cpu;
    double behind_attention = small_family == FAMILY_DISTILBERT ? 0.0 : 0.1;
    small_config(&config);
    config.model.hidden_dropout = 0.1;
    config.model.attention_dropout = 0.2;
    config.model.qa_dropout = 0.3;
    recording.embedding_norm_forward = record_embedding;
    recording.attention_forward = record_attention;
    recording.residual_norm_forward = record_residual;
    recording.dropout_apply = record_head;
    small_open_with(&f, &config, false, 0);
    const struct ops *compute = f.run.device->compute;
    f.run.device->compute = &recording;
    dropouts.count = 0;
    model_run_forward(&f.run, &f.batch, true);
    f.run.device->compute = compute;
    assert_int_equal(dropouts.count, 1 + 3 * LAYERS + 1);
    check_dropout(0, 0, SITE_EMBEDDING, 0.1);
    for (int i = 0; i < LAYERS; i++) {
        check_dropout(3 * i + 1, (uint32_t)i + 1, SITE_ATTENTION, 0.2);
        check_dropout(3 * i + 2, (uint32_t)i + 1, SITE_ATTENTION_OUTPUT, behind_attention);
        check_dropout(3 * i + 3, (uint32_t)i + 1, SITE_FFN_OUTPUT, 0.1);
    }
    check_dropout(3 * LAYERS + 1, LAYERS + 1, SITE_HEAD, 0.3);
    small_close(&f);
}

/* A feed-forward part narrower than the model: RECOMPUTE's unread output needs the larger place. */
static void recompute_works_when_ffn_is_narrower_than_hidden(void **state)
{
    (void)state;
    struct run_config config;
    struct small_model f;
    small_config(&config);
    config.model.ffn = 8;
    small_open_random(&f, &config, 5);
    f.run.recompute = true;
    small_step(&f);
    const struct model_unit *block = &f.run.model.units[2];
    assert_int_equal(block->forward_scratch_bytes(&f.run.model, block, f.run.dims),
                     (size_t)(f.run.dims.rows * HIDDEN) * sizeof(float));
    small_close(&f);
}

/* Rows of no sequence, as in a length class: zeros out, nothing into any gradient. Matrix products
 * over more rows may add in other blocks, hence a tolerance on gradients and none on zeros. */
static void rows_of_no_sequence_contribute_nothing(void **state)
{
    (void)state;
    struct run_config config;
    struct small_model exact, rounded_up;
    float *x = NULL, *y = NULL;
    small_config(&config);
    small_open_with(&exact, &config, false, 0);
    small_open_with(&rounded_up, &config, false, 128);
    small_step(&exact);
    small_step(&rounded_up);
    int64_t rows = exact.batch.q.rows;
    assert_true(rows < 128);
    assert_float_equal(model_run_report(&exact.run).loss_sum,
                       model_run_report(&rounded_up.run).loss_sum, 1e-5);
    small_slot(&exact, exact.run.model.slot_count - 1, &x);
    small_slot(&rounded_up, exact.run.model.slot_count - 1, &y);
    for (int64_t i = 0; i < 2 * rows; i++)
        assert_float_equal(x[i], y[i], 1e-5);
    for (int64_t i = 2 * rows; i < 2 * 128; i++)
        assert_true(y[i] == 0.0f);
    mem_free(&x);
    mem_free(&y);
    small_check_gradients(&rounded_up);
    small_close(&exact);
    small_close(&rounded_up);
}

static void empty_micro_batch_gives_zero_gradients(void **state)
{
    (void)state;
    const int32_t none[1] = {0};
    struct small_model f;
    small_open(&f, false);
    run_batch_release(&f.batch);
    for (int rows = 0; rows <= 128; rows += 128) {
        for (int32_t count = 0; count <= 1; count++) {
            const struct run_batch_source source = {count, none, NULL, none, none,
                                                    none,  none, rows, 40};
            run_batch_open(&f.batch, f.run.device, &source);
            small_step(&f);
            assert_true(model_run_report(&f.run).loss_sum == 0.0);
            assert_int_equal(model_run_report(&f.run).sequences, 0);
            for (int u = 0; u < f.run.model.unit_count; u++)
                for (int64_t i = 0; i < model_unit_numel(&f.run.model, u); i++)
                    assert_true(f.run.units[u].grads[i] == 0.0f);
            run_batch_release(&f.batch);
        }
    }
    small_close(&f);
}

static void second_micro_batch_adds_its_gradients(void **state)
{
    (void)state;
    struct small_model once, twice;
    small_open(&once, false);
    small_open(&twice, false);
    small_step(&once);
    small_step(&twice);
    model_run_forward(&twice.run, &twice.batch, true);
    model_run_backward(&twice.run, &twice.batch, true);
    for (int i = 0; i < once.run.model.tensor_count; i++) {
        const struct model_tensor *t = &once.run.model.tensors[i];
        float *x = NULL, *y = NULL;
        double largest = 0.0;
        small_tensor(&once, RUN_GRAD, i, &x);
        small_tensor(&twice, RUN_GRAD, i, &y);
        for (int64_t k = 0; k < t->shape[0] * t->shape[1]; k++)
            largest = fmax(largest, fabs((double)x[k]));
        for (int64_t k = 0; k < t->shape[0] * t->shape[1] && !small_no_gradient(t->name); k++)
            small_check(t->name, fabs((double)y[k] - 2.0 * (double)x[k]) / largest, 1e-5);
        mem_free(&x);
        mem_free(&y);
    }
    small_close(&once);
    small_close(&twice);
}

static void frozen_parameters_get_zeros_and_the_rest_the_same_bits(void **state)
{
    (void)state;
    static const struct {
        const char *freeze, *first, *second; /* the latter two: parts of names */
    } cases[] = {
        [FAMILY_BERT] = {"bert.embeddings, bert.encoder.layer.0.output,"
                         "bert.encoder.layer.1.attention.self,qa_outputs.weight",
                         "layer.0.output", "layer.1.attention.self"},
        [FAMILY_DISTILBERT] = {"distilbert.embeddings, distilbert.transformer.layer.0.ffn,"
                               "distilbert.transformer.layer.1.attention,qa_outputs.weight",
                               "layer.0.ffn", "layer.1.attention"},
    };
    struct run_config config;
    struct small_model all, some;
    small_config(&config);
    small_open_with(&all, &config, false, 0);
    snprintf(config.train.freeze, sizeof config.train.freeze, "%s", cases[small_family].freeze);
    small_open_with(&some, &config, false, 0);
    small_step(&all);
    small_step(&some);
    for (int p = 0; p < all.run.model.param_count; p++) {
        const struct model_param *param = &some.run.model.params[p];
        bool frozen = strstr(param->name, "embeddings") != NULL ||
                      strstr(param->name, cases[small_family].first) != NULL ||
                      strstr(param->name, cases[small_family].second) != NULL ||
                      strcmp(param->name, "qa_outputs.weight") == 0;
        assert_int_equal(param->frozen, frozen);
        if (param->unit < 2) /* wholly frozen: nothing is written */
            continue;
        const float *got = some.run.units[param->unit].grads + some.run.model.param_offset[p];
        const float *want = all.run.units[param->unit].grads + all.run.model.param_offset[p];
        for (int64_t i = 0; i < model_param_numel(param); i++)
            assert_true(frozen ? got[i] == 0.0f : memcmp(&got[i], &want[i], sizeof *got) == 0);
    }
    small_close(&all);
    small_close(&some);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(splitting_the_word_table_changes_no_bit),
        cmocka_unit_test(recomputed_blocks_give_the_same_bits),
        cmocka_unit_test(every_dropout_has_its_own_layer_and_site),
        cmocka_unit_test(recompute_works_when_ffn_is_narrower_than_hidden),
        cmocka_unit_test(rows_of_no_sequence_contribute_nothing),
        cmocka_unit_test(empty_micro_batch_gives_zero_gradients),
        cmocka_unit_test(second_micro_batch_adds_its_gradients),
        cmocka_unit_test(frozen_parameters_get_zeros_and_the_rest_the_same_bits),
    };
    return SMALL_TESTS_RUN(tests);
}
