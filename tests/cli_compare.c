/*
 * `tessera compare` and `tessera report` as people use them: every stage side by side, what they
 * need, how fast they are, whether they learn the same; and the page that shows it.
 */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/process.h"
#include "tests/support/run.h"

static struct scratch scratch;
static struct process ran;

static int set_up(void **state)
{
    struct made_questions q = {30, 5, 20, 4, .seed = 61};
    return run_set_up(state, &scratch, &q, NULL);
}

static void run_args(const char *const *args)
{
    process_start(&ran, &scratch, args, 0, NULL);
    process_wait(&ran, &scratch);
}

#define RUN(...) run_args((const char *const[]){__VA_ARGS__, NULL})

/* A path in the scratch folder; the last eight stay. */
static const char *at(const char *name)
{
    static char paths[8][512];
    static int next;
    next = (next + 1) % 8;
    return scratch_path(&scratch, paths[next], name);
}

static const char *put_config(const struct run_config *c, const char *name)
{
    char *text = NULL, path[512];
    size_t bytes = 0;
    assert_ok(config_write(c, &text, &bytes));
    scratch_put(&scratch, path, name, text, bytes);
    mem_free(&text);
    return at(name);
}

static struct run_config tiny(void)
{
    struct run_config c = run_tiny_with(
        &scratch, (struct tiny_run){.ranks = 2, .stage = 0, .reduce = REDUCE_PER_MICRO_BATCH});
    scratch_path(&scratch, c.output.dir, "unused");
    return c;
}

static json_t *load(const char *name)
{
    json_error_t error;
    json_t *root = json_load_file(at(name), 0, &error);
    if (root == NULL)
        fail_msg("%s: %s", name, error.text);
    return root;
}

static int64_t integer(const json_t *row, const char *key)
{
    const json_t *value = json_object_get(row, key);
    if (!json_is_integer(value))
        fail_msg("%s is no integer", key);
    return (int64_t)json_integer_value(value);
}

/* What `tessera plan` says that a rank's arena takes at each stage. */
static void planned_by_plan(const char *config, int64_t arena[4])
{
    json_error_t error;
    RUN("plan", "--config", config, "--json", "--data", "--ranks", "2");
    process_expect(&ran, 0, NULL, NULL);
    json_t *root = json_loads(ran.out, 0, &error), *stages = json_object_get(root, "stages");
    assert_int_equal(json_array_size(stages), 4);
    for (size_t i = 0; i < 4; i++)
        arena[i] = integer(json_array_get(stages, i), "total");
    json_decref(root);
}

static void every_stage_has_its_row_and_learns_the_same(void **state)
{
    (void)state;
    struct run_config c = tiny();
    c.train.steps = 3;
    int64_t arena[4];
    const char *config = put_config(&c, "compare.yaml");
    planned_by_plan(config, arena);
    RUN("compare", "--config", at("compare.yaml"), "--ranks", "2", "--steps", "3", "--repeat", "1",
        "--output-dir", at("compared"));
    process_expect(&ran, 0, "identical", NULL);
    json_t *root = load("compared/compare.json"), *rows = json_object_get(root, "runs");
    assert_int_equal(json_array_size(rows), 4);
    for (size_t i = 0; i < 4; i++) {
        const json_t *row = json_array_get(rows, i);
        assert_int_equal(integer(row, "zero_stage"), i);
        assert_string_equal(json_string_value(json_object_get(row, "status")), "ok");
        assert_string_equal(json_string_value(json_object_get(row, "losses")), "identical");
        assert_int_equal(integer(json_object_get(row, "planned_bytes"), "total"), arena[i]);
    }
    json_decref(root);
}

static void a_run_that_fails_is_a_row_that_says_so(void **state)
{
    (void)state;
    struct run_config c = tiny();
    RUN("compare", "--config", put_config(&c, "fails.yaml"), "--ranks", "1,2", "--stages", "0,3",
        "--steps", "2", "--repeat", "1", "--set", "data.vocab=nowhere.txt", "--output-dir",
        at("failed"));
    assert_int_not_equal(ran.code, 0);
    json_t *root = load("failed/compare.json"), *rows = json_object_get(root, "runs");
    assert_int_equal(json_array_size(rows), 4);
    for (size_t i = 0; i < 4; i++) {
        const json_t *row = json_array_get(rows, i);
        assert_string_not_equal(json_string_value(json_object_get(row, "status")), "ok");
        assert_non_null(strstr(json_string_value(json_object_get(row, "reason")), "nowhere.txt"));
    }
    json_decref(root);
}

static void wrong_lists_are_refused(void **state)
{
    (void)state;
    struct run_config c = tiny();
    put_config(&c, "wrong.yaml");
    RUN("compare", "--config", at("wrong.yaml"), "--stages", "0,4", "--output-dir", at("wrong"));
    process_expect(&ran, 2, NULL, "stages");
    RUN("compare", "--config", at("wrong.yaml"), "--ranks", "two", "--output-dir", at("wrong"));
    process_expect(&ran, 2, NULL, "ranks");
}

/* The page holds the runs' data and nothing that is loaded from elsewhere; names are no markup. */
static void the_page_stands_alone_and_escapes_names(void **state)
{
    (void)state;
    struct file_text page = {NULL, 0};
    struct run_config c = tiny();
    c.train.steps = 2;
    snprintf(c.output.dir, sizeof c.output.dir, "%.300s", at("a<script>alert(1)<x>"));
    RUN("train", "--config", put_config(&c, "one.yaml"));
    process_expect(&ran, 0, NULL, NULL);
    RUN("report", c.output.dir, "--output", at("page.html"));
    process_expect(&ran, 0, NULL, NULL);
    assert_ok(file_read(&page, at("page.html")));
    assert_null(strstr(page.data, "<script>alert(1)"));
    assert_null(strstr(page.data, "<x>"));
    assert_null(strstr(page.data, "src=\"http"));
    assert_null(strstr(page.data, "href=\"http"));
    assert_null(strstr(page.data, "@import"));
    assert_non_null(strstr(page.data, "\"loss"));
    mem_free(&page.data);
    RUN("report", at("no-such-run"), "--output", at("none.html"));
    process_expect(&ran, 1, NULL, "no-such-run");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_stage_has_its_row_and_learns_the_same),
        cmocka_unit_test(a_run_that_fails_is_a_row_that_says_so),
        cmocka_unit_test(wrong_lists_are_refused),
        cmocka_unit_test(the_page_stands_alone_and_escapes_names),
    };
    return cmocka_run_group_tests(tests, set_up, run_tear_down);
}
