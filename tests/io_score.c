/* EM and F1 against the numbers of the official scripts, and what those numbers do not reach. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "engine/base/arena.h"
#include "engine/base/file.h"
#include "io/json_file.h"
#include "io/score.h"
#include "io/score_text.h"

static const char EXPECTED[] = "tests/data/eval/expected-scores.json";
static char scratch[] = "/tmp/tessera-score-XXXXXX";
static char data_file[64], predictions_file[64], odds_file[64];

static int make_scratch(void **state)
{
    (void)state;
    if (mkdtemp(scratch) == NULL)
        return -1;
    snprintf(data_file, sizeof data_file, "%s/data.json", scratch);
    snprintf(predictions_file, sizeof predictions_file, "%s/predictions.json", scratch);
    snprintf(odds_file, sizeof odds_file, "%s/odds.json", scratch);
    return 0;
}

static int remove_scratch(void **state)
{
    (void)state;
    unlink(data_file);
    unlink(predictions_file);
    unlink(odds_file);
    return rmdir(scratch);
}

static void put(const char *path, const char *text)
{
    assert_int_equal(file_write(path, text, strlen(text)), ST_OK);
}

static void expect_message(const char *part)
{
    if (strstr(status_message(), part) == NULL)
        fail_msg("expected \"%s\" in the message:\n%s", part, status_message());
}

/* The sums run in the order of the official scripts, so equal means equal to the last bit. */
static void expect_number(double found, const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    assert_true(json_is_number(value));
    if (found != json_number_value(value))
        fail_msg("%s: %.17g, expected %.17g", key, found, json_number_value(value));
}

static json_t *expected_scores(const char *section)
{
    json_t *root;
    assert_int_equal(json_file_read(&root, EXPECTED, NULL), ST_OK);
    json_t *part = json_incref(json_object_get(root, section));
    json_decref(root);
    assert_non_null(part);
    return part;
}

/* ---- published predictions ------------------------------------------------------------------ */

static void version_1_scores_are_the_published_ones(void **state)
{
    (void)state;
    json_t *models = expected_scores("squad-v1.1"), *expected;
    struct squad_data data = {0};
    const char *name;
    int compared = 0;
    assert_int_equal(squad_load(&data, "tests/data/qa/squad-dev-v1.1.json.gz"), ST_OK);
    json_object_foreach(models, name, expected)
    {
        const char *file = json_string_value(json_object_get(expected, "predictions"));
        struct score_result r;
        char path[256];
        if (file == NULL)
            continue;
        snprintf(path, sizeof path, "tests/data/eval/%s", file);
        assert_int_equal(score_files(&r, &data, path, NULL, 1.0), ST_OK);
        expect_number(r.all.exact, expected, "exact_match");
        expect_number(r.all.f1, expected, "f1");
        expect_number((double)r.all.total, expected, "total");
        expect_number((double)r.missing, expected, "missing_predictions");
        expect_number((double)r.extra, expected, "extra_predictions");
        assert_false(r.has_best);
        compared++;
    }
    assert_int_equal(compared, 2);
    squad_release(&data);
    json_decref(models);
}

static void compare_articles(const struct squad_data *data, const char *path,
                             const json_t *articles)
{
    json_t *predictions, *expected;
    const char **texts, *title;
    assert_int_equal(json_file_read(&predictions, path, NULL), ST_OK);
    assert_int_equal(mem_alloc(&texts, (size_t)data->example_count * sizeof *texts), ST_OK);
    for (int64_t i = 0; i < data->example_count; i++)
        texts[i] = json_string_value(json_object_get(predictions, data->examples[i].id));
    json_object_foreach((json_t *)articles, title, expected)
    {
        struct score_options options = {0};
        struct score_result r;
        while (strcmp(data->examples[options.first].title, title) != 0)
            options.first++;
        int64_t end = options.first;
        while (end < data->example_count && strcmp(data->examples[end].title, title) == 0)
            end++;
        options.count = end - options.first;
        assert_int_equal(score_predictions(&r, data, texts, &options), ST_OK);
        expect_number(r.all.exact, expected, "exact");
        expect_number(r.all.f1, expected, "f1");
        expect_number((double)r.all.total, expected, "total");
    }
    mem_free(&texts);
    json_decref(predictions);
}

static void b108_version_2_scores_with_and_without_answer_are_the_published_ones(void **state)
{
    (void)state;
    json_t *models = expected_scores("squad-v2.0"), *expected;
    struct squad_data data = {0};
    const char *name;
    int compared = 0;
    assert_int_equal(squad_load(&data, "tests/data/qa/squad-dev-v2.0.json.gz"), ST_OK);
    json_object_foreach(models, name, expected)
    {
        const char *file = json_string_value(json_object_get(expected, "predictions"));
        struct score_result r;
        char path[256];
        if (file == NULL)
            continue;
        snprintf(path, sizeof path, "tests/data/eval/%s", file);
        assert_int_equal(score_files(&r, &data, path, NULL, 1.0), ST_OK);
        expect_number(r.all.exact, expected, "exact");
        expect_number(r.all.f1, expected, "f1");
        expect_number((double)r.all.total, expected, "total");
        expect_number(r.has_answer.exact, expected, "HasAns_exact");
        expect_number(r.has_answer.f1, expected, "HasAns_f1");
        expect_number((double)r.has_answer.total, expected, "HasAns_total");
        expect_number(r.no_answer.exact, expected, "NoAns_exact");
        expect_number(r.no_answer.f1, expected, "NoAns_f1");
        expect_number((double)r.no_answer.total, expected, "NoAns_total");
        assert_int_equal(r.missing, 0);
        if (json_object_get(expected, "per_article") != NULL)
            compare_articles(&data, path, json_object_get(expected, "per_article"));
        compared++;
    }
    assert_int_equal(compared, 2);
    squad_release(&data);
    json_decref(models);
}

/* ---- two texts ------------------------------------------------------------------------------ */

static void every_string_pair_has_its_normal_forms_and_scores(void **state)
{
    (void)state;
    json_t *section = expected_scores("string_cases"), *item;
    struct score_text gold = {0}, prediction = {0};
    size_t i;
    json_array_foreach(json_object_get(section, "cases"), i, item)
    {
        const char *g = json_string_value(json_object_get(item, "gold"));
        const char *p = json_string_value(json_object_get(item, "prediction"));
        assert_int_equal(score_text_build(&gold, g), ST_OK);
        assert_int_equal(score_text_build(&prediction, p), ST_OK);
        assert_string_equal(gold.normal,
                            json_string_value(json_object_get(item, "gold_normalized")));
        assert_string_equal(prediction.normal,
                            json_string_value(json_object_get(item, "prediction_normalized")));
        expect_number(score_text_exact(&gold, &prediction), item, "exact");
        expect_number(score_text_f1(&gold, &prediction, 1.0), item, "f1");
    }
    assert_int_equal(i, 33);
    score_text_release(&gold);
    score_text_release(&prediction);
    score_text_release(&prediction);
    json_decref(section);
}

static void expect_normal(const char *text, const char *normal)
{
    struct score_text t = {0};
    assert_int_equal(score_text_build(&t, text), ST_OK);
    assert_string_equal(t.normal, normal);
    score_text_release(&t);
}

/* The right-hand sides are what Python 3.11 gives. */
static void normal_forms_follow_python_on_unicode(void **state)
{
    (void)state;
    expect_normal("\xCE\x9F\xCE\x94\xCE\x9F\xCE\xA3",
                  "\xCE\xBF\xCE\xB4\xCE\xBF\xCF\x82");          /* ODOS */
    expect_normal("\xCE\x91\xCE\xA3. B", "\xCE\xB1\xCF\x82 b"); /* final before ". " */
    expect_normal("\xCE\x91\xCE\xA3.B", "\xCE\xB1\xCF\x83"
                                        "b");  /* a full stop inside a word */
    expect_normal("\xCE\xA3", "\xCF\x83");     /* alone it is not final */
    expect_normal("\xC4\xB0", "i\xCC\x87");    /* capital I with dot: two points */
    expect_normal("\xC8\xBA", "\xE2\xB1\xA5"); /* grows from 2 to 3 bytes */
    expect_normal("x\xE2\x80\x94the\xE2\x80\x94y", "x\xE2\x80\x94 \xE2\x80\x94y"); /* dashes */
    expect_normal("a\xCC\x81", "\xCC\x81");                        /* a mark ends the word "a" */
    expect_normal("a\xC2\xB2 an\xD9\xA1", "a\xC2\xB2 an\xD9\xA1"); /* numbers are word letters */
    expect_normal("x\xE3\x80\x80y\xE2\x80\xA8z\x1Cw\xC2\x85v", "x y z w v"); /* odd white space */
    expect_normal("x\xE2\x80\x8By", "x\xE2\x80\x8By"); /* zero width space is none */
    expect_normal("\x01 the \x7F", "\x01 \x7F");
    expect_normal("  The\tA  an ", "");
    expect_normal("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~", "");
}

static void bytes_that_are_no_utf8_do_not_crash(void **state)
{
    (void)state;
    expect_normal("\xFF", "\xEF\xBF\xBD");
    expect_normal("a\xE2\x82", "\xEF\xBF\xBD\xEF\xBF\xBD");
}

static void two_texts_without_words_differ_by_version(void **state)
{
    (void)state;
    struct score_text gold = {0}, prediction = {0};
    assert_int_equal(score_text_build(&gold, "the"), ST_OK);
    assert_int_equal(score_text_build(&prediction, "..."), ST_OK);
    assert_true(score_text_exact(&gold, &prediction));
    assert_true(score_text_f1(&gold, &prediction, 1.0) == 1.0);
    assert_true(score_text_f1(&gold, &prediction, 0.0) == 0.0);
    score_text_release(&gold);
    score_text_release(&prediction);
}

/* ---- small files ---------------------------------------------------------------------------- */

#define DATA(version, qas)                                                                         \
    "{" version "\"data\": [{\"paragraphs\": [{\"context\": \"red green blue\", \"qas\": [" qas    \
    "]}]}]}"
#define HAS(id, text)                                                                              \
    "{\"id\": \"" id "\", \"question\": \"\", \"answers\": [{\"text\": \"" text                    \
    "\", \"answer_start\": 0}]}"
#define NONE(id) "{\"id\": \"" id "\", \"question\": \"\", \"is_impossible\": true}"

static void score_texts(struct score_result *r, const char *data_text, const char *predictions,
                        const char *odds, double threshold)
{
    struct squad_data data = {0};
    put(data_file, data_text);
    put(predictions_file, predictions);
    if (odds != NULL)
        put(odds_file, odds);
    assert_int_equal(squad_load(&data, data_file), ST_OK);
    assert_int_equal(
        score_files(r, &data, predictions_file, odds != NULL ? odds_file : NULL, threshold), ST_OK);
    squad_release(&data);
}

static void a_missing_prediction_scores_0_in_version_1_and_is_left_out_in_version_2(void **state)
{
    (void)state;
    struct score_result r;
    score_texts(&r, DATA("", HAS("1", "red") "," HAS("2", "green")),
                "{\"1\": \"Red!\", \"x\": \"\"}", NULL, 1.0);
    assert_true(r.all.exact == 50.0 && r.all.f1 == 50.0);
    assert_int_equal(r.all.total, 2);
    assert_int_equal(r.missing, 1);
    assert_int_equal(r.extra, 1);
    score_texts(&r, DATA("\"version\": \"v2.0\", ", HAS("1", "red") "," HAS("2", "green")),
                "{\"1\": \"Red!\", \"x\": \"\"}", NULL, 1.0);
    assert_true(r.all.exact == 100.0 && r.has_answer.exact == 100.0);
    assert_int_equal(r.all.total, 1);
    assert_int_equal(r.has_answer.total, 1);
    assert_int_equal(r.missing, 1);
}

static void b108_the_null_counts_as_an_answer_above_the_threshold(void **state)
{
    (void)state;
    struct score_result r;
    const char *data = DATA("", HAS("1", "red") "," NONE("2") "," NONE("3") "," HAS("4", "blue"));
    const char *predictions = "{\"1\": \"red\", \"2\": \"red\", \"3\": \"\", \"4\": \"blue\"}";
    const char *odds = "{\"1\": -2, \"2\": 0.5, \"3\": 3, \"4\": 0.25, \"x\": -9}";
    score_texts(&r, data, predictions, odds, 1.0);
    assert_true(r.has_answer.exact == 100.0 && r.no_answer.exact == 50.0 && r.all.exact == 75.0);
    score_texts(&r, data, predictions, odds, 0.25); /* "above" does not include the threshold */
    assert_true(r.has_answer.exact == 100.0 && r.no_answer.exact == 100.0);
    score_texts(&r, data, predictions, odds, 0.0);
    assert_true(r.has_answer.exact == 50.0 && r.no_answer.exact == 100.0);
    assert_true(r.has_best);
    assert_true(r.best_exact == 100.0 && r.best_exact_thresh == 0.25);
    assert_true(r.best_f1 == 100.0 && r.best_f1_thresh == 0.25);
    score_texts(&r, data, "{\"1\": \"x\", \"2\": \"x\", \"3\": \"x\", \"4\": \"x\"}", odds, 1.0);
    assert_true(r.best_exact == 50.0 && r.best_exact_thresh == 0.0); /* best to answer nothing */
}

/* A threshold at every odds value, tried one by one, finds nothing better than the search. */
static void the_best_threshold_is_the_best_of_all(void **state)
{
    (void)state;
    struct squad_data data = {0};
    const char **texts;
    double *odds;
    assert_int_equal(squad_load(&data, "data/squad/squad-v2-mini.json"), ST_OK);
    size_t n = (size_t)data.example_count;
    assert_int_equal(mem_alloc(&texts, n * sizeof *texts), ST_OK);
    assert_int_equal(mem_alloc(&odds, n * sizeof *odds), ST_OK);
    for (int seed = 1; seed <= 5; seed++) {
        srandom((unsigned)seed);
        for (size_t i = 0; i < n; i++) {
            const struct squad_example *e = &data.examples[i];
            texts[i] = random() % 4 == 0     ? ""
                       : random() % 3 == 0   ? "Norman France"
                       : e->answer_count > 0 ? e->answers[0].text
                                             : "Rome";
            odds[i] = (double)random() / 2147483648.0 * 6 - 3 + (e->impossible ? 1 : -1);
        }
        struct score_options options = {.null_odds = odds, .threshold = -1e9};
        struct score_result best, r;
        assert_int_equal(score_predictions(&best, &data, texts, &options), ST_OK);
        double exact = best.all.exact, f1 = best.all.f1; /* nothing answered */
        for (size_t i = 0; i < n; i++) {
            options.threshold = odds[i];
            assert_int_equal(score_predictions(&r, &data, texts, &options), ST_OK);
            exact = fmax(exact, r.all.exact);
            f1 = fmax(f1, r.all.f1);
        }
        assert_true(fabs(best.best_exact - exact) < 1e-9);
        assert_true(fabs(best.best_f1 - f1) < 1e-9);
        options.threshold = best.best_exact_thresh;
        assert_int_equal(score_predictions(&r, &data, texts, &options), ST_OK);
        assert_true(fabs(r.all.exact - exact) < 1e-9);
    }
    mem_free(&texts);
    mem_free(&odds);
    squad_release(&data);
}

static void equal_odds_are_walked_in_file_order(void **state)
{
    (void)state;
    struct score_result r;
    const char *data = DATA("", NONE("1") "," HAS("2", "red"));
    const char *predictions = "{\"1\": \"red\", \"2\": \"red\"}";
    score_texts(&r, data, predictions, "{\"2\": 0.5, \"1\": 0.5}", 1.0);
    assert_true(r.best_exact == 100.0 && r.best_exact_thresh == 0.5);
    score_texts(&r, data, predictions, "{\"1\": 0.5, \"2\": 0.5}", 1.0);
    assert_true(r.best_exact == 50.0 && r.best_exact_thresh == 0.0);
}

static void references_without_words_are_left_out_in_version_2_only(void **state)
{
    (void)state;
    struct score_result r;
    score_texts(&r, DATA("\"version\": \"v2.0\", ", HAS("1", "the")), "{\"1\": \"a\"}", NULL, 1.0);
    assert_true(r.all.exact == 100.0 && r.all.f1 == 100.0);
    assert_int_equal(r.has_answer.total, 1);
    score_texts(&r, DATA("", HAS("1", "the")), "{\"1\": \"a\"}", NULL, 1.0);
    assert_true(r.all.exact == 100.0 && r.all.f1 == 0.0);
}

static void a_range_outside_the_data_is_refused(void **state)
{
    (void)state;
    struct squad_data data = {0};
    struct score_result r;
    const char *texts[1] = {"red"};
    put(data_file, DATA("", HAS("1", "red")));
    assert_int_equal(squad_load(&data, data_file), ST_OK);
    assert_int_equal(score_predictions(&r, &data, texts, &(struct score_options){.count = 2}),
                     ST_INVALID);
    assert_int_equal(score_predictions(&r, &data, texts, &(struct score_options){.first = -1}),
                     ST_INVALID);
    assert_int_equal(score_predictions(&r, &data, texts, &(struct score_options){0}), ST_OK);
    assert_true(r.all.exact == 100.0);
    squad_release(&data);
}

static void expect_refused(const char *predictions, const char *odds, const char *part)
{
    struct squad_data data = {0};
    struct score_result r;
    put(data_file, DATA("", HAS("1", "red")));
    put(predictions_file, predictions);
    if (odds != NULL)
        put(odds_file, odds);
    assert_int_equal(squad_load(&data, data_file), ST_OK);
    int64_t before = mem_live_bytes();
    status_clear();
    assert_int_equal(score_files(&r, &data, predictions_file, odds != NULL ? odds_file : NULL, 1.0),
                     ST_CORRUPT);
    expect_message(part);
    assert_int_equal(mem_live_bytes(), before);
    squad_release(&data);
}

static void broken_files_are_named_with_the_place(void **state)
{
    (void)state;
    struct squad_data data = {0};
    struct score_result r;
    expect_refused("{\"1\": \"a\",\n \"2\" \"b\"}", NULL, "predictions.json:2:8:");
    expect_refused("{\"1\": \"a\"", NULL, "predictions.json:1:");
    expect_refused("[\"a\"]", NULL, "predictions.json: expected an object from id to value, found");
    expect_refused("{\"1\": null}", NULL, "prediction \"1\": expected a string, found null");
    expect_refused("{\"9\": 3}", NULL, "prediction \"9\": expected a string, found an integer");
    expect_refused("{\"1\": \"a\"}", "{\"1\": \"0\"}", "null odds of \"1\": expected a number");
    expect_refused("{\"1\": \"a\"}", "{\"1\": NaN}", "odds.json:1:");
    expect_refused("{\"1\": \"a\"}", "{}", "\"1\" has a prediction, but no null odds here");
    put(data_file, DATA("", HAS("1", "red")));
    assert_int_equal(squad_load(&data, data_file), ST_OK);
    assert_int_equal(score_files(&r, &data, "/tmp/no-such-predictions.json", NULL, 1.0), ST_IO);
    expect_message("/tmp/no-such-predictions.json");
    squad_release(&data);
}

static void every_failing_allocation_is_reported(void **state)
{
    (void)state;
    struct squad_data data = {0};
    struct score_result r;
    put(data_file, DATA("", HAS("1", "red") "," NONE("2")));
    put(predictions_file, "{\"1\": \"the red\", \"2\": \"\"}");
    put(odds_file, "{\"1\": 1, \"2\": 2}");
    assert_int_equal(squad_load(&data, data_file), ST_OK);
    int64_t before = mem_live_bytes(), k = 0;
    enum status st = ST_MEMORY;
    while (st != ST_OK) {
        mem_fail_at(++k);
        st = score_files(&r, &data, predictions_file, odds_file, 1.0);
        mem_fail_at(0);
        assert_true(st == ST_OK || st == ST_MEMORY);
        assert_int_equal(mem_live_bytes(), before);
    }
    assert_true(k > 8);
    squad_release(&data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(version_1_scores_are_the_published_ones),
        cmocka_unit_test(b108_version_2_scores_with_and_without_answer_are_the_published_ones),
        cmocka_unit_test(every_string_pair_has_its_normal_forms_and_scores),
        cmocka_unit_test(normal_forms_follow_python_on_unicode),
        cmocka_unit_test(bytes_that_are_no_utf8_do_not_crash),
        cmocka_unit_test(two_texts_without_words_differ_by_version),
        cmocka_unit_test(a_missing_prediction_scores_0_in_version_1_and_is_left_out_in_version_2),
        cmocka_unit_test(b108_the_null_counts_as_an_answer_above_the_threshold),
        cmocka_unit_test(the_best_threshold_is_the_best_of_all),
        cmocka_unit_test(equal_odds_are_walked_in_file_order),
        cmocka_unit_test(references_without_words_are_left_out_in_version_2_only),
        cmocka_unit_test(a_range_outside_the_data_is_refused),
        cmocka_unit_test(broken_files_are_named_with_the_place),
        cmocka_unit_test(every_failing_allocation_is_reported),
    };
    return cmocka_run_group_tests(tests, make_scratch, remove_scratch);
}
