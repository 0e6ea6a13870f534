/*
 * `tessera checkpoint reshard`, `export` and `import`, `tessera eval` and `--export-best` as people
 * use them: processes, their exit codes, what they print and what they leave.
 */
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/arena.h"
#include "engine/base/file.h"
#include "io/checkpoint.h"
#include "tests/support/process.h"
#include "tests/support/run.h"

static struct scratch scratch;
static struct process ran;

static const char *at(const char *name)
{
    return scratch_at(&scratch, name);
}

#define RUN(...) process_run(&ran, &scratch, (const char *const[]){__VA_ARGS__, NULL})

static void expect(int code, const char *out, const char *err)
{
    process_expect(&ran, code, out, err);
}

/* "base": six steps on two ranks at stage 3, evaluated after each, with every checkpoint. The rate
 * is so high that the last step has not the best F1. */
static struct run_config base_config(void)
{
    struct run_config c = run_tiny_with(
        &scratch, (struct tiny_run){.ranks = 2, .stage = 3, .steps = 6, .eval = true});
    scratch_path(&scratch, c.output.dir, "base");
    c.optim.lr = 0.05;
    c.eval.every = 1;
    c.checkpoint.every = 1;
    c.checkpoint.keep = 0;
    c.checkpoint.keep_best = STOP_F1;
    return c;
}

static int make_base(void **state)
{
    struct made_questions train = {20, 5, 70, 4, .seed = 51}, eval = train;
    eval.count = 12;
    run_set_up(state, &scratch, &train, &eval);
    eval.impossible_every = 3;
    run_make_data(&scratch, "eval2.json", eval);
    struct run_config c = base_config();
    RUN("train", "--config", run_put_config(&scratch, &c), "--export-best");
    expect(0, NULL, "weights: saved");
    return 0;
}

static const char last[] = "base/checkpoints/step-00000006";

/* ---- reshard --------------------------------------------------------------------------------- */

static void a_reshard_verifies_differs_in_nothing_and_goes_on(void **state)
{
    (void)state;
    RUN("checkpoint", "reshard", at(last), at("three"), "--ranks", "3");
    expect(0, "three/step-00000006: step 6, 55 tensors in 3 files", NULL);
    RUN("checkpoint", "verify", at("three/step-00000006"));
    expect(0, "all hashes are right", NULL);
    RUN("checkpoint", "diff", at(last), at("three/step-00000006"));
    expect(0,
           "165 states are equal to the bit, 0 differ, 0 cannot be compared; training state: "
           "equal",
           NULL);
    struct run_config c = base_config();
    c.train.steps = 8;
    c.checkpoint.every = 8;
    c.checkpoint.keep_best = STOP_NONE;
    const char *config = run_put_config(&scratch, &c);
    RUN("train", "--config", config, "--output-dir", at("on-a"), "--resume", at(last));
    expect(0, NULL, NULL);
    RUN("train", "--config", config, "--output-dir", at("on-b"), "--resume",
        at("three/step-00000006"));
    expect(0, NULL, NULL);
    assert_true(
        scratch_same(&scratch, "on-a/model/model.safetensors", "on-b/model/model.safetensors"));
    RUN("checkpoint", "diff", at("on-a/checkpoints/step-00000008"),
        at("on-b/checkpoints/step-00000008"));
    expect(0, "165 states are equal to the bit, 0 differ", NULL);
    RUN("checkpoint", "diff", at(last), at("on-a/checkpoints/step-00000008"));
    expect(1, "0 cannot be compared; training state: differs", "has other values than");
}

/* Neither its record nor its configuration. */
static void a_run_that_is_refused_leaves_the_earlier_ones_folder_as_it_was(void **state)
{
    static const char *const files[] = {"base/config.yaml", "base/metrics.jsonl",
                                        "base/metrics.csv", "base/summary.json"};
    enum { FILES = sizeof files / sizeof *files };
    struct file_text before[FILES], after;
    (void)state;
    struct run_config c = base_config();
    const char *config = run_put_config(&scratch, &c);
    for (int i = 0; i < FILES; i++) {
        assert_ok(file_read(&before[i], at(files[i])));
        assert_true(before[i].bytes > 0);
    }
    RUN("train", "--config", config);
    expect(2, NULL, "step 6 of an earlier run is there, and this run would begin at step 0");
    RUN("train", "--config", config, "--resume", at("nowhere"));
    expect(1, NULL, "nowhere: there is no checkpoint");
    RUN("train", "--config", config, "--resume", "latest", "--set", "train.seed=9");
    expect(2, NULL, "train.seed is");
    for (int i = 0; i < FILES; i++) {
        assert_ok(file_read(&after, at(files[i])));
        assert_int_equal(after.bytes, before[i].bytes);
        assert_memory_equal(after.data, before[i].data, after.bytes);
        mem_free(&after.data);
        mem_free(&before[i].data);
    }
}

static void wrong_arguments_are_told_with_what_is_accepted(void **state)
{
    (void)state;
    RUN("checkpoint", "reshard", at(last), at("x"));
    expect(2, NULL, "--ranks N is required (tessera checkpoint reshard --help)");
    RUN("checkpoint", "reshard", "--ranks", "0", at(last), at("x"));
    expect(2, NULL, "--ranks: expected an integer from 1 to 4096, found \"0\"");
    RUN("checkpoint", "list", at("nowhere"));
    expect(1, NULL, "nowhere: No such file or directory");
    RUN("checkpoint", "export", at(last));
    expect(2, NULL, "checkpoint export takes 2 paths, found 1");
    RUN("checkpoint", "export", at(last), "--dtype", "int8", at("x"));
    expect(2, NULL, "--dtype: expected fp32, bf16 or fp16, found \"int8\"");
    RUN("checkpoint", "import", "--help");
    expect(0, "tessera checkpoint import FOLDER DIR", NULL);
    RUN("checkpoint", "import", at("nowhere"), at("x"));
    expect(1, NULL, "nowhere/config.json: No such file");
    RUN("checkpoint", "reshard", at("nowhere"), at("x"), "--ranks=2");
    expect(1, NULL, "nowhere: there is no checkpoint");
    assert_int_not_equal(access(at("x"), F_OK), 0);
}

/* ---- export and import ----------------------------------------------------------------------- */

static void an_export_is_a_folder_that_answers(void **state)
{
    (void)state;
    RUN("checkpoint", "export", at(last), at("hf"));
    expect(0, "in fp32", NULL);
    RUN("checkpoint", "export", "--dtype=bf16", at(last), at("hf-bf16"));
    expect(0, "in bf16", NULL);
    RUN("checkpoint", "export", at(last), at("hf"));
    expect(2, NULL, "hf: is there already; --overwrite replaces it");
    RUN("checkpoint", "export", at(last), at("hf"), "--overwrite");
    expect(0, NULL, NULL);
    char answers[3][512];
    const char *const models[] = {at("hf"), at("hf-bf16"), at(last)};
    for (int i = 0; i < 3; i++) {
        RUN("predict", "--model", models[i], "--question", "w1 w2 ?", "--context", "w3 w4 w5 w6");
        expect(0, "probability", NULL);
        snprintf(answers[i], sizeof answers[i], "%.500s", ran.out);
    }
    assert_string_equal(answers[0], answers[2]);
}

static void an_import_names_what_it_leaves_and_starts_a_run(void **state)
{
    (void)state;
    RUN("checkpoint", "export", at(last), at("source"));
    expect(0, NULL, NULL);
    RUN("checkpoint", "import", at("source"), at("fresh/checkpoints"), "--ranks", "2");
    expect(0, "fresh/checkpoints/step-00000000: step 0, 55 tensors in 2 files", NULL);
    struct run_config c = base_config();
    c.checkpoint.keep_best = STOP_NONE;
    c.train.steps = 2;
    c.train.seed = 3;
    const char *config = run_put_config(&scratch, &c);
    RUN("train", "--config", config, "--output-dir", at("fresh"), "--resume", "latest");
    expect(0, NULL, "step-00000000: step 0");
    RUN("train", "--config", config, "--output-dir", at("direct"), "--set",
        "model.init_from=", "--resume", at("fresh/checkpoints/step-00000000"));
    expect(0, NULL, NULL);
    char from[600];
    snprintf(from, sizeof from, "model.init_from=%s", at("source"));
    RUN("train", "--config", config, "--output-dir", at("folder"), "--set", from);
    expect(0, NULL, NULL);
    assert_true(
        scratch_same(&scratch, "fresh/model/model.safetensors", "folder/model/model.safetensors"));
    assert_true(
        scratch_same(&scratch, "direct/model/model.safetensors", "folder/model/model.safetensors"));
}

/* ---- eval ------------------------------------------------------------------------------------ */

static double member(const char *text, const char *key)
{
    json_t *root = json_loads(text, 0, NULL);
    if (root == NULL)
        fail_msg("this is no JSON: %.500s", text);
    json_t *value = json_object_get(root, key);
    if (!json_is_number(value))
        fail_msg("no number \"%s\" in %.500s", key, text);
    double number = json_number_value(value);
    json_decref(root);
    return number;
}

static void eval_gives_what_training_measured_on_any_ranks_from_both_kinds_of_folders(void **state)
{
    (void)state;
    static const char *const ranks[] = {"1", "2", "3"};
    struct file_text metrics = {0};
    double loss = 0;
    RUN("checkpoint", "export", at(last), at("eval-hf"));
    expect(0, NULL, NULL);
    RUN("score", "--data", at("eval.json"), "--predictions", at("base/predictions.json"));
    expect(0, NULL, NULL);
    double f1 = member(ran.out, "f1"), exact = member(ran.out, "exact_match");
    for (int i = 0; i < 6; i++) {
        const char *kind = i % 2 == 0 ? "--checkpoint" : "--model";
        /* How windows are cut and batched is in a checkpoint, and not in such a folder. */
        RUN("eval", kind, i % 2 == 0 ? at(last) : at("eval-hf"), "--data", at("eval.json"),
            "--ranks", ranks[i / 2], "--zero-stage", i / 2 == 0 ? "0" : "3", "--output-dir",
            at("eval-out"), "--set", "data.max_length=64", "--set", "data.doc_stride=16", "--set",
            "train.threads=1", "--set", "eval.micro_batch=5");
        expect(0, "\"total\": 12", NULL);
        assert_true(member(ran.out, "f1") == f1 && member(ran.out, "exact_match") == exact);
        assert_true(scratch_same(&scratch, "eval-out/predictions.json", "base/predictions.json"));
        assert_true(i == 0 || member(ran.out, "loss") == loss);
        loss = member(ran.out, "loss");
    }
    /* The loss that the run itself found at its end. */
    char text[64];
    assert_ok(file_read(&metrics, at("base/metrics.jsonl")));
    snprintf(text, sizeof text, "\"loss\":%.17g", loss);
    assert_non_null(strstr(metrics.data, text));
    mem_free(&metrics.data);
}

static void eval_of_version_2_data_tells_both_kinds_of_questions_apart(void **state)
{
    (void)state;
    RUN("eval", "--checkpoint", at(last), "--data", at("eval2.json"), "--output-dir",
        at("eval2-out"));
    expect(0, "\"HasAns_total\": 8", NULL);
    expect(0, "\"NoAns_total\": 4", NULL);
    double best = member(ran.out, "best_f1"), threshold = member(ran.out, "best_f1_thresh");
    assert_true(best >= member(ran.out, "f1"));
    char set[64];
    snprintf(set, sizeof set, "eval.null_threshold=%.17g", threshold);
    RUN("eval", "--checkpoint", at(last), "--data", at("eval2.json"), "--output-dir",
        at("eval2-best"), "--set", set);
    expect(0, NULL, NULL);
    assert_true(member(ran.out, "f1") == best);
    RUN("score", "--data", at("eval2.json"), "--predictions", at("eval2-best/predictions.json"),
        "--null-odds", at("eval2-best/null_odds.json"), "--threshold", set + 20);
    expect(0, NULL, NULL);
    assert_true(member(ran.out, "best_f1") <= 100);
}

static void eval_says_what_is_wrong(void **state)
{
    (void)state;
    RUN("eval", "--data", at("eval.json"));
    expect(2, NULL, "one of --checkpoint PATH and --model DIR");
    RUN("eval", "--model", at(last), "--checkpoint", at(last), "--data", at("eval.json"));
    expect(2, NULL, "one of --checkpoint PATH and --model DIR");
    RUN("eval", "--model", at(last));
    expect(2, NULL, "--data FILE is required");
    RUN("eval", "--model", at(last), "--data", at("nowhere.json"));
    expect(1, NULL, "nowhere.json: No such file");
    RUN("eval", "--model", at("nowhere"), "--data", at("eval.json"));
    expect(1, NULL, "nowhere/config.json: No such file");
    RUN("eval", "--checkpoint", at("base"), "--data", at("eval.json"));
    expect(2, NULL, "base: is neither a checkpoint, as RUN/checkpoints/step-00000100");
    RUN("eval", "--model", at(last), "--data", at("eval.json"), "--device", "tpu");
    expect(2, NULL, "train.device: expected auto, cpu or cuda, found \"tpu\"");
    RUN("eval", "--model", at(last), "--data", at("eval.json"), "--vocab", at("train.json"));
    assert_int_not_equal(ran.code, 0);
}

/* ---- --export-best --------------------------------------------------------------------------- */

static void export_best_leaves_the_best_checkpoints_weights(void **state)
{
    (void)state;
    struct checkpoint c = {0};
    char path[64];
    assert_ok(checkpoint_open(&c, at(last)));
    json_int_t best =
        json_integer_value(json_object_get(json_object_get(c.training, "best"), "step"));
    checkpoint_close(&c);
    assert_in_range(best, 1, 5); /* else this test shows nothing */
    snprintf(path, sizeof path, "base/checkpoints/step-%08d", (int)best);
    RUN("checkpoint", "export", at(path), at("best-hf"));
    expect(0, NULL, NULL);
    assert_true(
        scratch_same(&scratch, "best-hf/model.safetensors", "base/model/model.safetensors"));
    RUN("checkpoint", "export", at(last), at("last-hf"));
    expect(0, NULL, NULL);
    assert_false(
        scratch_same(&scratch, "last-hf/model.safetensors", "base/model/model.safetensors"));
}

static void without_a_measure_or_the_option_the_last_weights_are_left(void **state)
{
    (void)state;
    struct run_config c = base_config();
    c.checkpoint.keep_best = STOP_NONE;
    RUN("train", "--config", run_put_config(&scratch, &c), "--output-dir", at("no-measure"),
        "--export-best");
    expect(0, NULL, "without checkpoint.keep_best nothing says what is best");
    c.checkpoint.keep_best = STOP_F1;
    RUN("train", "--config", run_put_config(&scratch, &c), "--output-dir", at("no-option"));
    expect(0, NULL, NULL);
    RUN("checkpoint", "export", at(last), at("last-again"));
    expect(0, NULL, NULL);
    assert_true(scratch_same(&scratch, "last-again/model.safetensors",
                             "no-measure/model/model.safetensors"));
    assert_true(scratch_same(&scratch, "last-again/model.safetensors",
                             "no-option/model/model.safetensors"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_reshard_verifies_differs_in_nothing_and_goes_on),
        cmocka_unit_test(a_run_that_is_refused_leaves_the_earlier_ones_folder_as_it_was),
        cmocka_unit_test(wrong_arguments_are_told_with_what_is_accepted),
        cmocka_unit_test(an_export_is_a_folder_that_answers),
        cmocka_unit_test(an_import_names_what_it_leaves_and_starts_a_run),
        cmocka_unit_test(eval_gives_what_training_measured_on_any_ranks_from_both_kinds_of_folders),
        cmocka_unit_test(eval_of_version_2_data_tells_both_kinds_of_questions_apart),
        cmocka_unit_test(eval_says_what_is_wrong),
        cmocka_unit_test(export_best_leaves_the_best_checkpoints_weights),
        cmocka_unit_test(without_a_measure_or_the_option_the_last_weights_are_left),
    };
    return cmocka_run_group_tests(tests, make_base, run_tear_down);
}
