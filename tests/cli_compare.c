/*
 * `tessera compare` and `tessera report` as people use them: the table, the JSON, the CSV and the
 * page, from processes of a tiny model.
 */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/file.h"
#include "engine/train/comparison.h"
#include "tests/support/process.h"
#include "tests/support/run.h"

static struct scratch scratch;
static struct process ran;

static const char *path_of(const char *name)
{
    return scratch_at(&scratch, name);
}

#define RUN(...) process_run(&ran, &scratch, (const char *const[]){__VA_ARGS__, NULL})

static json_t *load(const char *name)
{
    json_error_t error;
    json_t *root = json_load_file(path_of(name), 0, &error);
    if (root == NULL)
        fail_msg("%s: %s", name, error.text);
    return root;
}

static double number(const json_t *object, const char *key)
{
    const json_t *v = json_object_get(object, key);
    if (!json_is_number(v))
        fail_msg("no number \"%s\"", key);
    return json_number_value(v);
}

static const char *word(const json_t *object, const char *key)
{
    const json_t *v = json_object_get(object, key);
    return json_is_string(v) ? json_string_value(v) : "";
}

/* The page's data, and that nothing in it ends its script element. */
static json_t *load_page(const char *name)
{
    static const char begin[] = "id=\"data\">";
    struct file_text text = {NULL, 0};
    json_error_t error;
    assert_ok(file_read(&text, path_of(name)));
    assert_true(text.bytes < 1 << 20);
    char *at = strstr(text.data, begin);
    assert_non_null(at);
    at += sizeof begin - 1;
    size_t bytes = strcspn(at, "<");
    assert_memory_equal(at + bytes, "</script>", 9);
    json_t *root = json_loadb(at, bytes, 0, &error);
    if (root == NULL)
        fail_msg("%s: %s", name, error.text);
    /* It is one file: nothing is fetched. */
    assert_null(strstr(text.data, "src="));
    assert_null(strstr(text.data, "href=\"http"));
    assert_null(strstr(text.data, "@import"));
    assert_null(strstr(text.data, "@DATA@"));
    assert_null(strstr(text.data, "@D3"));
    /* The library of the charts comes with its licence. */
    assert_non_null(strstr(text.data, "d3.svg"));
    assert_non_null(strstr(text.data, "Michael Bostock"));
    assert_non_null(strstr(text.data, "Redistributions of source code must retain"));
    mem_free(&text.data);
    return root;
}

/* All ranks 1, 2 and stages once; the tests look at what that left. */
static int compare_once(void **state)
{
    struct made_questions train = {20, 5, 70, 4, .seed = 51};
    struct run_config c;
    char *text = NULL, path[512];
    size_t bytes = 0;
    run_set_up(state, &scratch, &train, NULL);
    run_tiny(&c, &scratch, false);
    assert_ok(config_write(&c, &text, &bytes));
    scratch_put(&scratch, path, "run.yaml", text, bytes);
    mem_free(&text);
    RUN("compare", "--config", path_of("run.yaml"), "--ranks", "1,2", "--steps", "3", "--repeat",
        "1", "--output-dir", path_of("cmp"));
    process_expect(&ran, 0, "Planned by category", NULL);
    return 0;
}

/* ---- compare ---- */

static void every_combination_is_a_row_with_identical_losses(void **state)
{
    (void)state;
    json_t *root = load("cmp/compare.json");
    const json_t *runs = json_object_get(root, "runs"), *r = NULL;
    size_t i;
    assert_int_equal(json_array_size(runs), 8);
    json_array_foreach(runs, i, r)
    {
        const json_t *split = json_object_get(r, "split_ms");
        assert_int_equal((int)number(r, "ranks"), i < 4 ? 1 : 2);
        assert_int_equal((int)number(r, "zero_stage"), (int)i % 4);
        assert_string_equal(word(r, "status"), "ok");
        assert_string_equal(word(r, "losses"), "identical");
        assert_true(number(r, "sequences_per_s") > 0);
        assert_true(number(r, "tokens_per_s") > number(r, "sequences_per_s"));
        assert_true(number(split, "compute") > 0 && number(split, "optimizer") > 0);
        assert_true(number(split, "exposed_communication") >= 0 && number(split, "data") >= 0);
        assert_true(number(r, "speed_up") > 0);
        if (i % 4 == 0)
            assert_true(number(r, "ratio") == 1.0);
    }
    assert_true(number(json_array_get(runs, 7), "ratio") < 1);
    assert_non_null(strstr(ran.out, "  (base)\n"));
    assert_non_null(strstr(ran.out, "  identical\n"));
    json_decref(root);
}

static void planned_bytes_are_those_of_plan(void **state)
{
    (void)state;
    json_t *root = load("cmp/compare.json");
    for (int ranks = 1; ranks <= 2; ranks++) {
        json_error_t error;
        RUN("plan", "--config", path_of("run.yaml"), "--ranks", ranks == 1 ? "1" : "2", "--data",
            "--json", "--set", "train.steps=3");
        json_t *plan = json_loads(ran.out, 0, &error);
        assert_non_null(plan);
        for (int stage = 0; stage < 4; stage++) {
            const json_t *p = json_array_get(json_object_get(plan, "stages"), (size_t)stage);
            const json_t *r =
                json_array_get(json_object_get(root, "runs"), (size_t)(4 * (ranks - 1) + stage));
            const json_t *bytes = json_object_get(r, "planned_bytes");
            assert_true(number(bytes, "total") == number(p, "total"));
            assert_true(
                json_equal(json_object_get(bytes, "own_max"), json_object_get(p, "own_max")));
        }
        json_decref(plan);
    }
    json_decref(root);
}

/* A run of its own, in which each buffer is allocated and freed, has the bytes of the plan. */
static void bytes_that_were_counted_by_category_are_those_of_the_plan(void **state)
{
    const json_t *r = NULL;
    size_t i;
    (void)state;
    json_t *root = load("cmp/compare.json");
    json_array_foreach(json_object_get(root, "runs"), i, r)
    {
        const json_t *planned = json_object_get(r, "planned_bytes"),
                     *counted = json_object_get(r, "counted_bytes");
        assert_true(json_is_object(json_object_get(counted, "at_peak")));
        assert_true(
            json_equal(json_object_get(counted, "at_peak"), json_object_get(planned, "at_peak")));
        assert_true(
            json_equal(json_object_get(counted, "own_max"), json_object_get(planned, "own_max")));
    }
    json_decref(root);
}

/* What comes with it are threads, BLAS and the C library: constant, and small. */
static void the_process_grows_by_what_was_planned(void **state)
{
    enum { BESIDE_BYTES = 32 << 20 };
    (void)state;
    json_t *root = load("cmp/compare.json");
    const json_t *r = NULL;
    size_t i;
    json_array_foreach(json_object_get(root, "runs"), i, r)
    {
        double planned = number(json_object_get(r, "planned_bytes"), "total"),
               measured = number(r, "measured_bytes");
        assert_string_equal(word(r, "measured_by"), "process");
        if (measured < 0.5 * planned || measured > planned + BESIDE_BYTES)
            fail_msg("%s: planned %.0f, measured %.0f", word(r, "name"), planned, measured);
    }
    json_decref(root);
}

static void csv_has_a_line_a_run_with_as_many_fields_as_names(void **state)
{
    (void)state;
    struct file_text text = {NULL, 0};
    int names = 0, lines = 0;
    assert_ok(file_read(&text, path_of("cmp/compare.csv")));
    for (char *at = text.data, *end; (end = strchr(at, '\n')) != NULL; at = end + 1) {
        int fields = 1;
        bool quoted = false;
        for (char *p = at; p < end; p++) {
            quoted ^= *p == '"';
            fields += *p == ',' && !quoted;
        }
        names = lines++ == 0 ? fields : names;
        assert_int_equal(fields, names);
    }
    assert_int_equal(lines, 9);
    mem_free(&text.data);
}

static void the_page_holds_plan_time_line_and_losses_of_every_run(void **state)
{
    (void)state;
    json_t *root = load_page("cmp/report.html");
    const json_t *r = NULL;
    size_t i;
    assert_int_equal(json_array_size(json_object_get(root, "runs")), 8);
    json_array_foreach(json_object_get(root, "runs"), i, r)
    {
        const json_t *plan = json_object_get(r, "plan"), *line = json_object_get(r, "timeline");
        const json_t *instrs = json_object_get(plan, "instrs"), *b = NULL;
        size_t k;
        assert_int_equal(json_array_size(json_object_get(r, "loss_curve")), 3);
        assert_true(json_array_size(json_object_get(line, "events")) > 10);
        json_array_foreach(json_object_get(plan, "buffers"), k, b)
        {
            assert_int_equal(json_array_size(b), 8);
            double end =
                json_number_value(json_array_get(b, 3)) + json_number_value(json_array_get(b, 4));
            assert_true(end <= number(plan, "arena_bytes"));
            assert_true(json_integer_value(json_array_get(b, 6)) <
                        (json_int_t)json_array_size(instrs));
        }
    }
    json_decref(root);
}

static void an_impossible_combination_is_a_row(void **state)
{
    (void)state;
    /* Reduction once a step is not possible at stages 2 and 3. */
    RUN("compare", "--config", path_of("run.yaml"), "--stages", "0,3", "--steps", "2", "--repeat",
        "2", "--set", "train.reduce=per_step", "--output-dir", path_of("failing"));
    process_expect(&ran, 0, "failed: ", "2 of 2");
    json_t *root = load("failing/compare.json");
    const json_t *runs = json_object_get(root, "runs");
    assert_string_equal(word(json_array_get(runs, 0), "status"), "ok");
    assert_string_equal(word(json_array_get(runs, 1), "status"), "failed");
    assert_non_null(strstr(word(json_array_get(runs, 1), "reason"), "train.reduce"));
    json_decref(root);
    json_decref(load_page("failing/report.html"));
    RUN("compare", "--config", path_of("run.yaml"), "--stages", "3", "--steps", "2", "--repeat",
        "1", "--set", "train.reduce=per_step", "--output-dir", path_of("failing"));
    process_expect(&ran, 2, NULL, "none of the 1 combinations");
}

static void where_all_fail_the_rows_still_say_why(void **state)
{
    (void)state;
    RUN("compare", "--config", path_of("run.yaml"), "--ranks", "1,2", "--stages", "0,3", "--steps",
        "2", "--repeat", "1", "--set", "data.vocab=nowhere.txt", "--output-dir", path_of("none"));
    process_expect(&ran, 2, "nowhere.txt", "none of the 4 combinations");
    json_t *root = load("none/compare.json");
    const json_t *r = NULL;
    size_t i;
    assert_int_equal(json_array_size(json_object_get(root, "runs")), 4);
    json_array_foreach(json_object_get(root, "runs"), i, r)
    {
        assert_string_equal(word(r, "status"), "failed");
        assert_non_null(strstr(word(r, "reason"), "nowhere.txt"));
    }
    json_decref(root);
}

static void wrong_arguments_are_refused(void **state)
{
    static const struct {
        const char *option, *value, *message;
    } wrong[] = {
        {"--stages", "0,4", "--stages: expected integers from 0 to 3"},
        {"--stages", "1,1", "--stages: 1 stands there twice"},
        {"--ranks", "1,,2", "--ranks: expected integers"},
        {"--micro-batch", "8;32", "--micro-batch: expected integers"},
        {"--steps", "1", "--steps: expected an integer from 2"},
        {"--set", "train.nothing=1", "train.nothing"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        RUN("compare", "--config", path_of("run.yaml"), wrong[i].option, wrong[i].value);
        process_expect(&ran, 2, NULL, wrong[i].message);
    }
    RUN("report");
    process_expect(&ran, 2, NULL, "which runs?");
    RUN("report", path_of("nothing"));
    process_expect(&ran, 1, NULL, "config.yaml");
}

/* ---- report ---- */

static void hostile_names_stay_text(void **state)
{
    static const char hostile[] = "a\"b'<!--<script>alert(1)<&\x1b[31m,x";
    char from[600], to[600], page[600];
    (void)state;
    scratch_path(&scratch, from, "cmp/ranks-1-stage-0-batch-3/repeat-1");
    scratch_path(&scratch, to, hostile);
    scratch_path(&scratch, page, "hostile.html");
    assert_int_equal(rename(from, to), 0);
    RUN("report", to, path_of("cmp/ranks-2-stage-3-batch-3/repeat-1"), "--output", page);
    assert_int_equal(rename(to, from), 0);
    process_expect(&ran, 0, "a\"b'", NULL);
    assert_null(strchr(ran.out, '\x1b'));
    json_t *root = load_page("hostile.html");
    const json_t *runs = json_object_get(root, "runs");
    assert_int_equal(json_array_size(runs), 2);
    assert_string_equal(word(json_array_get(runs, 0), "name"), hostile);
    json_decref(root);
}

static void runs_of_one_name_are_told_apart(void **state)
{
    (void)state;
    RUN("report", path_of("cmp/ranks-1-stage-0-batch-3/repeat-1"),
        path_of("cmp/ranks-1-stage-3-batch-3/repeat-1"), "--output", path_of("two.html"));
    process_expect(&ran, 0, "ranks-1-stage-3-batch-3 ", NULL);
    json_decref(load_page("two.html"));
}

static void a_step_whose_loss_differs_is_named(void **state)
{
    (void)state;
    char a[600], b[600];
    struct run_result x, y;
    scratch_path(&scratch, a, "cmp/ranks-1-stage-0-batch-3/repeat-1");
    scratch_path(&scratch, b, "cmp/ranks-2-stage-0-batch-3/repeat-1");
    assert_ok(run_result_read(&x, a));
    assert_ok(run_result_read(&y, b));
    assert_int_equal(run_result_first_difference(&x, &x), 0);
    assert_int_equal(run_result_first_difference(&x, &y), 1); /* other batches */
    json_array_remove(x.losses, 2);
    json_decref(y.losses);
    y.losses = json_deep_copy(x.losses);
    json_array_set_new(json_array_get(y.losses, 1), 1, json_real(0.25));
    assert_int_equal(run_result_first_difference(&x, &y), 2);
    json_array_remove(y.losses, 1);
    assert_int_equal(run_result_first_difference(&x, &y), 2);
    run_result_release(&x);
    run_result_release(&y);
}

static void a_line_that_is_no_step_is_named(void **state)
{
    (void)state;
    char dir[600];
    struct run_result r;
    struct file_text text;
    const char *metrics = path_of("cmp/ranks-1-stage-0-batch-3/repeat-1/metrics.jsonl");
    scratch_path(&scratch, dir, "cmp/ranks-1-stage-0-batch-3/repeat-1");
    assert_ok(file_read(&text, metrics));
    char *second = strchr(text.data, '\n') + 1;
    memcpy(second, "[1]\n", 4);
    assert_ok(file_write(metrics, text.data, text.bytes));
    assert_fails(run_result_read(&r, dir), ST_CORRUPT,
                 "metrics.jsonl:2: expected an object a line, found an array");
    run_result_release(&r);
    mem_free(&text.data);
}

/* Last of those that read a run: it spoils one. */
static void steps_that_are_no_numbers_are_no_steps(void **state)
{
    static const char lines[] = "{\"step\":1e300,\"loss\":1}\n{\"step\":-2}\n{\"loss\":2}\n";
    (void)state;
    struct run_result x;
    struct file_log log;
    assert_ok(file_log_reopen(&log, path_of("cmp/ranks-2-stage-0-batch-3/repeat-1/metrics.jsonl")));
    assert_ok(file_log_append(&log, lines, sizeof lines - 1));
    assert_ok(file_log_close(&log));
    assert_ok(run_result_read(&x, path_of("cmp/ranks-2-stage-0-batch-3/repeat-1")));
    size_t n = json_array_size(x.losses);
    assert_true(n > 3);
    for (size_t i = n - 3; i < n; i++)
        assert_int_equal(json_integer_value(json_array_get(json_array_get(x.losses, i), 0)), -1);
    run_result_release(&x);
}

static void every_moment_of_a_step_counts_once(void **state)
{
    (void)state;
    /* compute 0-4, optimizer 3-6, gather 2-8, idle 8-10; in ms: 4, 2, 2 exposed, 2 idle. */
    static const char text[] = "{\"traceEvents\":[{\"ph\":\"M\"},"
                               "{\"ts\":0,\"dur\":4000,\"args\":{\"op\":\"FORWARD\"}},"
                               "{\"ts\":3000,\"dur\":3000,\"args\":{\"op\":\"UPDATE\"}},"
                               "{\"ts\":2000,\"dur\":6000,\"args\":{\"op\":\"GATHER\"}}],"
                               "\"otherData\":{\"step\":7,\"step_us\":10000,\"captured\":true}}";
    struct time_split split;
    json_t *trace = json_loads(text, 0, NULL);
    assert_ok(time_split_of(&split, trace, "trace.json"));
    assert_true(split.part_ms[TIME_COMPUTE] == 4 && split.part_ms[TIME_OPTIMIZER] == 2);
    assert_true(split.part_ms[TIME_COMMUNICATION] == 2 && split.part_ms[TIME_IDLE] == 2);
    assert_true(split.hidden_ms == 4 && split.step_ms == 10);
    assert_int_equal(split.step, 7);
    assert_true(split.captured);
    json_object_set_new(json_object_get(trace, "otherData"), "step", json_real(1e300));
    assert_ok(time_split_of(&split, trace, "trace.json"));
    assert_int_equal(split.step, 0);
    json_object_del(trace, "otherData");
    assert_int_equal(time_split_of(&split, trace, "trace.json"), ST_CORRUPT);
    json_decref(trace);
}

static void medians_are_taken_value_by_value(void **state)
{
    (void)state;
    struct run_result runs[3] = {
        {.step_ms = 3, .sequences_per_s = 5, .measured_bytes = (double)NAN},
        {.step_ms = 1, .sequences_per_s = 9, .measured_bytes = 4},
        {.step_ms = 2, .sequences_per_s = 7, .measured_bytes = 2}};
    run_result_median(runs, 3);
    assert_true(runs[0].step_ms == 2 && runs[0].sequences_per_s == 7);
    assert_true(runs[0].measured_bytes == 3); /* of the two that are known */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_combination_is_a_row_with_identical_losses),
        cmocka_unit_test(planned_bytes_are_those_of_plan),
        cmocka_unit_test(bytes_that_were_counted_by_category_are_those_of_the_plan),
        cmocka_unit_test(the_process_grows_by_what_was_planned),
        cmocka_unit_test(csv_has_a_line_a_run_with_as_many_fields_as_names),
        cmocka_unit_test(the_page_holds_plan_time_line_and_losses_of_every_run),
        cmocka_unit_test(an_impossible_combination_is_a_row),
        cmocka_unit_test(where_all_fail_the_rows_still_say_why),
        cmocka_unit_test(wrong_arguments_are_refused),
        cmocka_unit_test(hostile_names_stay_text),
        cmocka_unit_test(runs_of_one_name_are_told_apart),
        cmocka_unit_test(a_step_whose_loss_differs_is_named),
        cmocka_unit_test(a_line_that_is_no_step_is_named),
        cmocka_unit_test(steps_that_are_no_numbers_are_no_steps),
        cmocka_unit_test(every_moment_of_a_step_counts_once),
        cmocka_unit_test(medians_are_taken_value_by_value),
    };
    return cmocka_run_group_tests(tests, compare_once, run_tear_down);
}
