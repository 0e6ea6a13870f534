/*
 * A model's tables: tensors, parameters and pieces, initial values, sizes, refusals.
 */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "io/json_file.h"
#include "tests/support/small_model.h"
#include "tests/support/support.h"

static const char tensors_path[] = "tests/data/golden/bert_tensors.json.gz";

/* By family. */
static const char *const block_name[] = {"bert.encoder.layer", "distilbert.transformer.layer"};
static const char *const query_name[] = {"attention.self.query", "attention.q_lin"};

/* ---- parameters ------------------------------------------------------------------------------ */

static void check_tensor_table(const char *model_name, const struct run_config *config,
                               int64_t count)
{
    json_t *root = NULL;
    struct model m;
    assert_ok(json_file_read(&root, tensors_path, NULL));
    json_t *table = json_object_get(root, model_name);
    assert_ok(model_open(&m, config, DTYPE_F32));
    json_t *tensors = json_object_get(table, "tensors");
    assert_int_equal(m.tensor_count, json_object_size(tensors));
    for (int i = 0; i < m.tensor_count; i++) {
        const struct model_tensor *t = &m.tensors[i];
        json_t *shape = json_object_get(tensors, t->name);
        if (shape == NULL)
            fail_msg("%s has no %s", model_name, t->name);
        assert_int_equal(t->dims, json_array_size(shape));
        for (int d = 0; d < t->dims; d++)
            assert_int_equal(t->shape[d], json_integer_value(json_array_get(shape, (size_t)d)));
    }
    assert_int_equal(model_total_numel(&m), count);
    assert_int_equal(json_integer_value(json_object_get(table, "count")), count);
    model_release(&m);
    json_decref(root);
}

static void tensors_are_hugging_faces_by_name_and_shape(void **state)
{
    (void)state;
    struct run_config config;
    config_defaults(&config);
    check_tensor_table("bert-base", &config, 108893186);
    config.train.max_unit_numel = 1000000;
    check_tensor_table("bert-base", &config, 108893186);
    config.model.hidden = 1024;
    config.model.layers = 24;
    config.model.heads = 16;
    config.model.ffn = 4096;
    check_tensor_table("bert-large", &config, 334094338);
    config_defaults(&config);
    config.model.family = FAMILY_DISTILBERT;
    config.model.layers = 6;
    check_tensor_table("distilbert-base", &config, 66364418);
}

/* Every element of every tensor lies in exactly one place. */
static void pieces_cover_each_tensor_once(void **state)
{
    (void)state;
    const int64_t limits[] = {1, 128, 1000, 1 << 20};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        struct run_config config;
        struct model m;
        small_config(&config);
        config.train.max_unit_numel = limits[i];
        assert_ok(model_open(&m, &config, DTYPE_F32));
        for (int t = 0; t < m.tensor_count; t++) {
            int64_t next = 0; /* pieces of a tensor come in its order */
            for (int p = 0; p < m.param_count; p++)
                for (int k = 0; k < m.params[p].piece_count; k++)
                    if (m.params[p].piece[k].tensor == t) {
                        assert_int_equal(m.params[p].piece[k].tensor_first, next);
                        next += m.params[p].piece[k].numel;
                    }
            assert_int_equal(next, m.tensors[t].shape[0] * m.tensors[t].shape[1]);
            assert_int_equal(model_find_tensor(&m, m.tensors[t].name), t);
        }
        for (int p = 0; p < m.param_count; p++)
            assert_int_equal(m.param_offset[p] % MODEL_PARAM_ALIGN, 0);
        assert_int_equal(model_find_tensor(&m, "nobody"), -1);
        model_release(&m);
    }
}

/* The groups that fine-tuning scripts make: no decay on names with "bias" or "LayerNorm". */
static void b37_decay_falls_on_matrices_and_tables_only(void **state)
{
    (void)state;
    struct run_config config;
    struct model m;
    small_config(&config);
    assert_ok(model_open(&m, &config, DTYPE_F32));
    for (int p = 0; p < m.param_count; p++) {
        bool plain = strstr(m.params[p].name, "bias") != NULL ||
                     strstr(m.params[p].name, "LayerNorm") != NULL ||
                     strstr(m.params[p].name, "layer_norm") != NULL;
        assert_int_equal(m.params[p].decay, !plain);
    }
    for (int u = 0; u < m.unit_count; u++)
        for (int k = 1; k < m.units[u].param_count; k++)
            assert_true(m.params[m.units[u].first_param + k - 1].decay ||
                        !m.params[m.units[u].first_param + k].decay);
    model_release(&m);
}

static void initial_values_do_not_depend_on_splitting(void **state)
{
    (void)state;
    struct run_config config;
    struct small_model whole, split;
    small_config(&config);
    small_open_with(&whole, &config, false, 0);
    config.train.max_unit_numel = 200;
    small_open_with(&split, &config, false, 0);
    model_run_init(&whole.run, 11);
    model_run_init(&split.run, 11);
    for (int i = 0; i < whole.run.model.tensor_count; i++) {
        const struct model_tensor *t = &whole.run.model.tensors[i];
        int64_t n = t->shape[0] * t->shape[1];
        float *x = NULL, *y = NULL;
        small_tensor(&whole, RUN_MASTER, i, &x);
        small_tensor(&split, RUN_MASTER, i, &y);
        small_same_bits(t->name, x, y, n);
        for (int64_t k = 0; k < n && t->init != INIT_NORMAL; k++)
            assert_true(x[k] == (t->init == INIT_ONE ? 1.0f : 0.0f));
        for (int64_t k = 0; k < n && t->init == INIT_NORMAL; k++)
            assert_true((x[k] == 0.0f) == (k < t->init_zeros) && fabsf(x[k]) < 0.02f * 6.0f);
        mem_free(&x);
        mem_free(&y);
    }
    assert_int_equal(whole.run.model.tensors[0].init_zeros, HIDDEN); /* the row of [PAD] */
    small_close(&whole);
    small_close(&split);
}

static void initial_values_of_ranges_join_up(void **state)
{
    (void)state;
    struct run_config config;
    struct model m;
    float *whole = NULL, *part = NULL;
    uint64_t random = test_seed();
    small_config(&config);
    assert_ok(model_open(&m, &config, DTYPE_F32));
    for (int u = 0; u < m.unit_count; u++) {
        int64_t n = model_unit_numel(&m, u) + 100; /* with the padding behind it */
        assert_ok(mem_alloc(&whole, sizeof *whole * (size_t)n));
        assert_ok(mem_alloc(&part, sizeof *part * (size_t)n));
        model_init_range(&m, u, whole, 0, n, 3);
        for (int64_t at = 0; at < n;) {
            int64_t count = 1 + (int64_t)(test_random(&random) % 300);
            count = count < n - at ? count : n - at;
            model_init_range(&m, u, part + at, at, count, 3);
            at += count;
        }
        small_same_bits(m.units[u].name, whole, part, n);
        for (int64_t i = n - 100; i < n; i++)
            assert_true(whole[i] == 0.0f);
        mem_free(&whole);
        mem_free(&part);
    }
    model_release(&m);
}

/* Query and key must not start alike, nor two layers: each is keyed by its own name. */
static void tensors_start_with_different_values(void **state)
{
    (void)state;
    struct run_config config;
    struct model m;
    float values[64][8];
    small_config(&config);
    assert_ok(model_open(&m, &config, DTYPE_F32));
    assert_true(m.tensor_count <= 64);
    for (int p = 0; p < m.param_count; p++)
        for (int k = 0; k < m.params[p].piece_count; k++)
            model_init_range(&m, m.params[p].unit, values[m.params[p].piece[k].tensor],
                             m.param_offset[p] + m.params[p].piece[k].first +
                                 m.params[p].piece[k].numel - 8,
                             8, 3);
    for (int i = 0; i < m.tensor_count; i++)
        for (int k = 0; k < i; k++)
            if (m.tensors[i].init == INIT_NORMAL && m.tensors[k].init == INIT_NORMAL)
                assert_memory_not_equal(values[i], values[k], sizeof values[i]);
    model_release(&m);
}

/* ---- freezing, refusals, failures ------------------------------------------------------------ */

static void freeze_names_are_whole_components(void **state)
{
    (void)state;
    struct run_config config;
    struct model m;
    small_config(&config);
    config.model.layers = 12;
    snprintf(config.train.freeze, sizeof config.train.freeze, "%s.1", block_name[small_family]);
    assert_ok(model_open(&m, &config, DTYPE_F32));
    for (int p = 0; p < m.param_count; p++)
        assert_int_equal(m.params[p].frozen, strstr(m.params[p].name, "layer.1.") != NULL);
    model_release(&m);
}

static void bad_configurations_are_refused(void **state)
{
    (void)state;
    struct run_config config;
    struct model m;
    small_config(&config);
    config.model.heads = 5;
    assert_fails(model_open(&m, &config, DTYPE_F32), ST_INVALID, "model.heads");
    small_config(&config);
    config.model.vocab_size = 600;
    config.train.max_unit_numel = 1;
    assert_fails(model_open(&m, &config, DTYPE_F32), ST_INVALID, "max_unit_numel");
    small_config(&config);
    snprintf(config.train.freeze, sizeof config.train.freeze, "qa_outputs,bert.pooler");
    assert_fails(model_open(&m, &config, DTYPE_F32), ST_INVALID, "bert.pooler");
    snprintf(config.train.freeze, sizeof config.train.freeze, "%s.0.%s", block_name[small_family],
             query_name[small_family]);
    assert_fails(model_open(&m, &config, DTYPE_F32), ST_INVALID, "only be frozen whole");
    model_release(&m); /* a failed model is empty */
}

static void every_failed_allocation_is_reported_and_leaks_nothing(void **state)
{
    (void)state;
    struct run_config config;
    int64_t live = mem_live_bytes();
    small_config(&config);
    config.train.max_unit_numel = 200;
    for (int64_t k = 1;; k++) {
        struct model m;
        mem_fail_at(k);
        enum status st = model_open(&m, &config, DTYPE_F32);
        mem_fail_at(0);
        if (st == ST_OK) {
            assert_true(k > 5);
            model_release(&m);
            break;
        }
        assert_int_equal(st, ST_MEMORY);
        assert_int_equal(mem_live_bytes(), live);
    }
    assert_int_equal(mem_live_bytes(), live);
}

/* ---- sizes ----------------------------------------------------------------------------------- */

/* What the header promises for bert-base with bf16: 11 C elements and H + 4 floats a row saved,
 * and 5 C of scratch. */
static void buffers_of_a_block_are_as_small_as_stated(void **state)
{
    (void)state;
    struct run_config config;
    struct model m;
    const struct micro_dims d = {1024, 8, 384};
    config_defaults(&config);
    assert_ok(model_open(&m, &config, DTYPE_BF16));
    const struct model_unit *block = &m.units[m.unit_count - 2];
    const size_t row = 768 * 2;
    assert_string_equal(block->name, "block.11");
    assert_int_equal(block->saved_bytes(&m, block, d), 1024 * (11 * row + 16 * 4));
    assert_int_equal(block->forward_scratch_bytes(&m, block, d), 1024 * 4 * row);
    assert_int_equal(block->backward_scratch_bytes(&m, block, d), 1024 * 5 * row);
    model_release(&m);
}

static void step_flops_are_six_a_weight_and_row_and_attention(void **state)
{
    (void)state;
    struct run_config config;
    struct model m;
    config_defaults(&config);
    assert_ok(model_open(&m, &config, DTYPE_F32));
    double weights = 12.0 * (4 * 768 * 768 + 2 * 768 * 3072) + 2 * 768;
    assert_true(fabs(model_step_flops(&m, 1000, 0.0) / (6.0 * weights * 1000) - 1.0) < 1e-12);
    /* 12 blocks, two products of 768 multiply-adds a pair, forward and twice backward. */
    double pairs = model_step_flops(&m, 0, 1e6);
    assert_true(fabs(pairs / (12.0 * 2 * 768 * 2 * 3 * 1e6) - 1.0) < 1e-12);
    model_release(&m);
}

/* Its gradient then has values in rows that no token of the batch looks up. */
static void a_table_that_another_unit_is_tied_to_is_not_only_looked_up(void **state)
{
    (void)state;
    struct run_config config;
    struct model m;
    small_config(&config);
    assert_ok(model_open(&m, &config, DTYPE_F32));
    assert_true(m.units[0].look_up);
    assert_true(model_only_looked_up(&m, 0));
    assert_false(model_only_looked_up(&m, m.unit_count - 1));
    m.units[m.unit_count - 1].tied = 0;
    assert_false(model_only_looked_up(&m, 0));
    model_release(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tensors_are_hugging_faces_by_name_and_shape),
        cmocka_unit_test(pieces_cover_each_tensor_once),
        cmocka_unit_test(b37_decay_falls_on_matrices_and_tables_only),
        cmocka_unit_test(initial_values_do_not_depend_on_splitting),
        cmocka_unit_test(initial_values_of_ranges_join_up),
        cmocka_unit_test(tensors_start_with_different_values),
        cmocka_unit_test(freeze_names_are_whole_components),
        cmocka_unit_test(bad_configurations_are_refused),
        cmocka_unit_test(every_failed_allocation_is_reported_and_leaks_nothing),
        cmocka_unit_test(buffers_of_a_block_are_as_small_as_stated),
        cmocka_unit_test(a_table_that_another_unit_is_tied_to_is_not_only_looked_up),
        cmocka_unit_test(step_flops_are_six_a_weight_and_row_and_attention),
    };
    return SMALL_TESTS_RUN(tests);
}
