#include "tests/support/small_model.h"

#include <math.h>
#include <string.h>

#include "engine/base/arena.h"
#include "tests/support/support.h"

enum { ROUNDINGS = 8 };

enum model_family small_family;

/* By family. */
static const char *const golden_path[] = {"tests/data/golden/bert_small.safetensors.gz",
                                          "tests/data/golden/distilbert_small.safetensors.gz"};
static const char *const key_bias[] = {"attention.self.key.bias", "attention.k_lin.bias"};
static const char *const last_norm_bias[] = {
    "bert.encoder.layer.1.output.LayerNorm.bias",
    "distilbert.transformer.layer.1.output_layer_norm.bias"};

int small_tests_run(const struct CMUnitTest *tests, size_t count)
{
    static const enum model_family families[] = {FAMILY_BERT, FAMILY_DISTILBERT};
    int failed = 0;
    for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
        small_family = families[i];
        failed +=
            _cmocka_run_group_tests(model_family_name(small_family), tests, count, NULL, NULL);
    }
    return failed;
}

void small_config(struct run_config *c)
{
    config_defaults(c);
    c->model.family = small_family;
    c->model.vocab_size = VOCAB;
    c->model.hidden = HIDDEN;
    c->model.layers = LAYERS;
    c->model.heads = 3;
    c->model.ffn = 40;
    c->model.max_positions = 40;
    c->model.type_vocab = 2;
    c->model.hidden_dropout = c->model.attention_dropout = 0.0;
    c->train.device = DEVICE_CPU;
    c->train.precision = PRECISION_FP32;
}

void small_batch(struct small_model *f, bool padded, int64_t rows)
{
    int32_t lengths[SEQUENCES], kv_len[SEQUENCES], start[SEQUENCES], end[SEQUENCES];
    int32_t token[SEQUENCES * PADDED], type[SEQUENCES * PADDED];
    int32_t n = 0;
    for (int b = 0; b < SEQUENCES; b++) {
        kv_len[b] = (int32_t)golden_value(golden_tensor(&f->golden, "input.lengths"), b);
        lengths[b] = padded ? PADDED : kv_len[b];
        start[b] = (int32_t)golden_value(golden_tensor(&f->golden, "input.start"), b);
        end[b] = (int32_t)golden_value(golden_tensor(&f->golden, "input.end"), b);
        for (int i = 0; i < lengths[b]; i++, n++) {
            int64_t at = b * PADDED + i;
            token[n] = (int32_t)golden_value(golden_tensor(&f->golden, "input.tokens"), at);
            type[n] = (int32_t)golden_value(golden_tensor(&f->golden, "input.types"), at);
        }
    }
    const struct run_batch_source source = {.count = SEQUENCES,
                                            .lengths = lengths,
                                            .kv_len = padded ? kv_len : NULL,
                                            .token = token,
                                            .type = type,
                                            .start = start,
                                            .end = end,
                                            .rows = rows > 0 ? rows : n,
                                            .positions = 40};
    run_batch_open(&f->batch, f->run.device, &source);
    f->padded = padded;
    f->run.host.inv_count = 1.0f / SEQUENCES;
}

static void load_weights(struct small_model *f)
{
    for (int i = 0; i < f->run.model.tensor_count; i++) {
        const char *name = f->run.model.tensors[i].name;
        model_run_put_tensor(&f->run, name, golden_tensor(&f->golden, "weight.%s", name).data);
    }
}

static void open_model(struct small_model *f, const struct run_config *config)
{
    const struct micro_dims dims = {SEQUENCES * PADDED + 20, SEQUENCES, PADDED};
    memset(f, 0, sizeof *f);
    golden_open(&f->golden, golden_path[config->model.family]);
    model_run_open(&f->run, config, dims);
}

void small_open_with(struct small_model *f, const struct run_config *config, bool padded,
                     int64_t rows)
{
    open_model(f, config);
    load_weights(f);
    small_batch(f, padded, rows);
}

void small_open_random(struct small_model *f, const struct run_config *config, uint64_t seed)
{
    open_model(f, config);
    model_run_init(&f->run, seed);
    small_batch(f, false, 0);
}

void small_open(struct small_model *f, bool padded)
{
    struct run_config config;
    small_config(&config);
    small_open_with(f, &config, padded, 0);
}

void small_close(struct small_model *f)
{
    run_batch_release(&f->batch);
    model_run_release(&f->run);
    golden_release(&f->golden);
}

void small_step(struct small_model *f)
{
    model_run_forward(&f->run, &f->batch, true);
    model_run_backward(&f->run, &f->batch, false);
}

void small_tensor(struct small_model *f, enum run_kind kind, int tensor, float **values)
{
    const struct model_tensor *t = &f->run.model.tensors[tensor];
    assert_ok(mem_alloc(values, sizeof(float) * (size_t)(t->shape[0] * t->shape[1])));
    model_run_get_tensor(&f->run, kind, t->name, *values);
}

void small_slot(struct small_model *f, int slot, float **values)
{
    const struct model_slot *s = &f->run.model.slots[slot];
    int64_t n = f->batch.q.rows * s->columns;
    assert_ok(mem_alloc(values, sizeof(float) * (size_t)n));
    model_run_read(&f->run, *values, f->run.slots[slot].act, s->dtype, n);
}

bool small_no_gradient(const char *name)
{
    return strstr(name, key_bias[small_family]) != NULL || strcmp(name, "qa_outputs.bias") == 0 ||
           strcmp(name, last_norm_bias[small_family]) == 0;
}

const char *small_mode(const struct small_model *f)
{
    return f->padded ? "padded" : "packed";
}

double small_tolerance(const struct small_model *f, const char *what)
{
    double rounding =
        golden_value(golden_tensor(&f->golden, "rounding.%s.%s", small_mode(f), what), 0);
    return ROUNDINGS * (rounding > 1.2e-7 ? rounding : 1.2e-7);
}

void small_check(const char *what, double error, double allowed)
{
    if (!(error <= allowed))
        fail_msg("%s: error %.3g, allowed %.3g", what, error, allowed);
}

void small_check_gradients(struct small_model *f)
{
    double largest = 0.0; /* of all gradients: the scale of noise */
    for (int i = 0; i < f->run.model.tensor_count; i++) {
        struct tensor want =
            golden_tensor(&f->golden, "%s.grad.%s", small_mode(f), f->run.model.tensors[i].name);
        for (int64_t k = 0; k < tensor_numel(want); k++)
            largest = fmax(largest, fabs(golden_value(want, k)));
    }
    for (int i = 0; i < f->run.model.tensor_count; i++) {
        const char *name = f->run.model.tensors[i].name;
        struct tensor want = golden_tensor(&f->golden, "%s.grad.%s", small_mode(f), name);
        float *values = NULL;
        small_tensor(f, RUN_GRAD, i, &values);
        if (!small_no_gradient(name))
            small_check(name, golden_error(values, want), small_tolerance(f, "grad"));
        for (int64_t k = 0; small_no_gradient(name) && k < tensor_numel(want); k++)
            small_check(name, fabs((double)values[k]) / largest, small_tolerance(f, "grad"));
        mem_free(&values);
    }
}

void small_same_bits(const char *what, const float *a, const float *b, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (memcmp(&a[i], &b[i], sizeof *a) != 0)
            fail_msg("%s: element %lld is %.9g and %.9g", what, (long long)i, (double)a[i],
                     (double)b[i]);
}
