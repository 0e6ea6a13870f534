/* The SQuAD reader: real files, every kind of broken file, and failing allocations. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <xxhash.h>

#include "engine/base/arena.h"
#include "engine/base/file.h"
#include "io/codepoints.h"
#include "io/squad.h"

static char scratch[] = "/tmp/tessera-squad-XXXXXX";
static char scratch_file[64];

static int make_scratch(void **state)
{
    (void)state;
    if (mkdtemp(scratch) == NULL)
        return -1;
    snprintf(scratch_file, sizeof scratch_file, "%s/data.json", scratch);
    return 0;
}

static int remove_scratch(void **state)
{
    (void)state;
    unlink(scratch_file);
    return rmdir(scratch);
}

static enum status load_bytes(struct squad_data *data, const char *text, size_t bytes)
{
    assert_int_equal(file_write(scratch_file, text, bytes), ST_OK);
    status_clear();
    return squad_load(data, scratch_file);
}

static enum status load_text(struct squad_data *data, const char *text)
{
    return load_bytes(data, text, strlen(text));
}

static void expect_message(const char *part)
{
    if (strstr(status_message(), part) == NULL)
        fail_msg("expected \"%s\" in the message:\n%s", part, status_message());
}

/* The text must be refused as damaged, with this in the message; nothing stays allocated. */
static void expect_refused(const char *text, const char *part)
{
    struct squad_data data = {0};
    int64_t before = mem_live_bytes();
    assert_int_equal(load_text(&data, text), ST_CORRUPT);
    expect_message(part);
    assert_null(data.examples);
    assert_int_equal(mem_live_bytes(), before);
}

/* ---- real files ----------------------------------------------------------------------------- */

static void load_counts(const char *path, int64_t questions, int64_t contexts, int64_t impossible,
                        int64_t answers, bool unanswerable)
{
    struct squad_data data = {0};
    int64_t found_impossible = 0, found_answers = 0;
    assert_int_equal(squad_load(&data, path), ST_OK);
    assert_int_equal(data.example_count, questions);
    assert_int_equal(data.context_count, contexts);
    assert_int_equal(data.unanswerable, unanswerable);
    for (int64_t i = 0; i < data.example_count; i++) {
        const struct squad_example *e = &data.examples[i];
        int32_t last = i > 0 ? e[-1].context_index : 0;
        assert_true(e->context_index == last || e->context_index == last + 1);
        if (i > 0)
            assert_int_equal(e->context == e[-1].context, e->context_index == last);
        found_impossible += e->impossible;
        found_answers += e->answer_count;
    }
    assert_int_equal(data.examples[0].context_index, 0);
    assert_int_equal(data.examples[questions - 1].context_index, contexts - 1);
    assert_int_equal(found_impossible, impossible);
    assert_int_equal(found_answers, answers);
    assert_int_equal(squad_check_answers(&data), ST_OK);
    squad_release(&data);
    squad_release(&data);
}

static void the_published_files_have_their_published_counts(void **state)
{
    (void)state;
    load_counts("data/squad/squad-train-v1.1-part.json.gz", 4370, 678, 0, 4370, false);
    load_counts("data/squad/xquad.en.json.gz", 1190, 240, 0, 1190, false);
    load_counts("data/squad/squad-v2-mini.json", 278, 24, 121, 546, true);
    load_counts("tests/data/qa/squad-dev-v1.1.json.gz", 10570, 2067, 0, 34726, false);
    load_counts("tests/data/qa/squad-dev-v2.0.json.gz", 11873, 1204, 5945, 20302, true);
}

static void the_hash_is_that_of_the_plain_bytes(void **state)
{
    (void)state;
    struct squad_data data = {0};
    struct file_text text = {0};
    assert_int_equal(file_read(&text, "data/squad/xquad.en.json.gz"), ST_OK);
    assert_int_equal(squad_load(&data, "data/squad/xquad.en.json.gz"), ST_OK);
    assert_true(data.content_hash == XXH3_64bits(text.data, text.bytes));
    mem_free(&text.data);
    squad_release(&data);
}

/* ---- what is accepted ----------------------------------------------------------------------- */

#define ONE(context, qa)                                                                           \
    "{\"data\": [{\"title\": \"T\", \"paragraphs\": [{\"context\": " context ", \"qas\": [" qa     \
    "]}]}]}"
#define QA(rest)            "{\"id\": \"q1\", \"question\": \"Who?\"" rest "}"
#define ANSWER(text, start) ", \"answers\": [{\"text\": " text ", \"answer_start\": " start "}]"

static void fields_arrive_as_written(void **state)
{
    (void)state;
    struct squad_data data = {0};
    assert_int_equal(load_text(&data, ONE("\"caf\\u00e9 Zo\\u00eb \\ud83d\\ude00 end\"",
                                          QA(ANSWER("\"end\"", "11")))),
                     ST_OK);
    const struct squad_example *e = &data.examples[0];
    assert_string_equal(e->id, "q1");
    assert_string_equal(e->question, "Who?");
    assert_string_equal(e->title, "T");
    assert_string_equal(e->context, "caf\xC3\xA9 Zo\xC3\xAB \xF0\x9F\x98\x80 end");
    assert_int_equal(e->answer_count, 1);
    assert_string_equal(e->answers[0].text, "end");
    assert_int_equal(e->answers[0].start, 11);
    assert_false(e->impossible);
    assert_false(data.unanswerable);
    assert_int_equal(squad_check_answers(&data), ST_OK);
    squad_release(&data);
}

static void a_byte_order_mark_and_crlf_are_accepted(void **state)
{
    (void)state;
    struct squad_data data = {0};
    assert_int_equal(load_text(&data,
                               "\xEF\xBB\xBF{\r\n\"data\":\r\n[{\"paragraphs\": [{\"context\": "
                               "\"ab\", \"qas\": [" QA(ANSWER("\"b\"", "1")) "]}]}]}\r\n"),
                     ST_OK);
    assert_string_equal(data.examples[0].title, "");
    squad_release(&data);
}

static void an_empty_question_is_accepted(void **state)
{
    (void)state;
    struct squad_data data = {0};
    assert_int_equal(load_text(&data, ONE("\"ab\"", "{\"id\": \"\", \"question\": \"\"" ANSWER(
                                                        "\"b\"", "1") "}")),
                     ST_OK);
    assert_string_equal(data.examples[0].question, "");
    squad_release(&data);
}

static void an_impossible_question_needs_no_answers_key(void **state)
{
    (void)state;
    struct squad_data data = {0};
    assert_int_equal(load_text(&data, ONE("\"ab\"", QA(", \"is_impossible\": true"))), ST_OK);
    assert_true(data.examples[0].impossible);
    assert_int_equal(data.examples[0].answer_count, 0);
    assert_true(data.unanswerable);
    assert_int_equal(squad_check_answers(&data), ST_OK);
    squad_release(&data);
}

static void paragraphs_without_questions_do_not_count(void **state)
{
    (void)state;
    struct squad_data data = {0};
    assert_int_equal(load_text(&data, "{\"data\": [{\"paragraphs\": []}, {\"paragraphs\": ["
                                      "{\"context\": \"x\", \"qas\": []}, {\"context\": \"ab\", "
                                      "\"qas\": [" QA(ANSWER("\"b\"", "1")) "]}]}]}"),
                     ST_OK);
    assert_int_equal(data.context_count, 1);
    assert_int_equal(data.examples[0].context_index, 0);
    squad_release(&data);
}

static void loading_twice_replaces(void **state)
{
    (void)state;
    struct squad_data data = {0};
    int64_t before = mem_live_bytes();
    assert_int_equal(squad_load(&data, "data/squad/squad-v2-mini.json"), ST_OK);
    assert_int_equal(load_text(&data, ONE("\"ab\"", QA(ANSWER("\"b\"", "1")))), ST_OK);
    assert_int_equal(data.example_count, 1);
    squad_release(&data);
    assert_int_equal(mem_live_bytes(), before);
}

/* ---- what is refused ------------------------------------------------------------------------ */

static void a_missing_file_is_named(void **state)
{
    (void)state;
    struct squad_data data = {0};
    assert_int_equal(squad_load(&data, "/tmp/no-such-file.json"), ST_IO);
    expect_message("/tmp/no-such-file.json");
    assert_int_equal(squad_load(&data, "/tmp"), ST_IO);
}

static void broken_json_names_line_and_column(void **state)
{
    (void)state;
    expect_refused("", ":1:1: expected JSON, found an empty file");
    expect_refused("\xEF\xBB\xBF", ":1:1: expected JSON, found an empty file");
    expect_refused("{\"data\": [\n  {\"title\": }", "data.json:2:13:");
    expect_refused("{\"data\": [\n\n  {\"title\": \"a", "data.json:3:");
    expect_refused("{\"data\": []} x", "data.json:1:14:");
    expect_refused("<html>", "data.json:1:1:");
    expect_refused("{\"data\": [NaN]}", "data.json:1:13:");
    expect_refused("{\"data\": \"a\xFF\"}", "data.json:1:11: the text is not UTF-8");
    expect_refused("{\"data\": \"a\\u0000\"}", "data.json:1:");
}

/* Every prefix of a good file is refused, with a position; none crashes. */
static void every_truncated_file_is_refused(void **state)
{
    (void)state;
    const char *text =
        ONE("\"caf\xC3\xA9\"", QA(", \"is_impossible\": false" ANSWER("\"f\"", "2")));
    struct squad_data data = {0};
    for (size_t bytes = 0; bytes < strlen(text); bytes++) {
        assert_int_equal(load_bytes(&data, text, bytes), ST_CORRUPT);
        expect_message("data.json:1:");
    }
}

static void nesting_without_end_is_refused(void **state)
{
    (void)state;
    enum { DEPTH = 100000 };
    char *text;
    assert_int_equal(mem_alloc(&text, DEPTH + 1), ST_OK);
    memset(text, '[', DEPTH);
    expect_refused(text, "data.json:1:");
    mem_free(&text);
}

static void a_wrong_shape_names_the_path(void **state)
{
    (void)state;
    expect_refused("[]", "data.json: top of the file: expected an object, found an array");
    expect_refused("{}", "data: expected an array, found nothing");
    expect_refused("{\"data\": {}}", "data: expected an array, found an object");
    expect_refused("{\"data\": [1]}", "data[0]: expected an object, found an integer");
    expect_refused("{\"data\": [{}]}", "data[0].paragraphs: expected an array, found nothing");
    expect_refused("{\"data\": [{\"title\": 1.5, \"paragraphs\": []}]}",
                   "data[0].title: expected a string, found a real number");
    expect_refused("{\"data\": [{\"paragraphs\": [{\"qas\": []}]}]}",
                   "data[0].paragraphs[0].context: expected a string, found nothing");
    expect_refused("{\"data\": [{\"paragraphs\": [{\"context\": \"c\"}]}]}",
                   "data[0].paragraphs[0].qas: expected an array, found nothing");
    expect_refused(ONE("null", QA("")),
                   "data[0].paragraphs[0].context: expected a string, found null");
    expect_refused(ONE("\"c\"", "{\"question\": \"\"}"),
                   "qas[0].id: expected a string, found nothing");
    expect_refused(ONE("\"c\"", "{\"id\": 7}"), "qas[0].id: expected a string, found an integer");
    expect_refused(ONE("\"c\"", "{\"id\": \"7\"}"), "qas[0].question: expected a string");
    expect_refused(ONE("\"c\"", QA("")), "qas[0].answers: expected an array, found nothing");
    expect_refused(ONE("\"c\"", QA(", \"is_impossible\": 1")),
                   "qas[0].is_impossible: expected true or false, found an integer");
    expect_refused(ONE("\"c\"", QA(", \"is_impossible\": true, \"answers\": null")),
                   "qas[0].answers: expected an array, found null");
    expect_refused(ONE("\"c\"", QA(", \"answers\": [\"c\"]")),
                   "qas[0].answers[0]: expected an object, found a string");
    expect_refused(ONE("\"c\"", QA(", \"answers\": [{\"answer_start\": 0}]")),
                   "qas[0].answers[0].text: expected a string, found nothing");
    expect_refused(
        ONE("\"c\"", QA(ANSWER("\"c\"", "0.5"))),
        "qas[0].answers[0].answer_start: expected a 32-bit integer, found a real number");
    expect_refused(ONE("\"c\"", QA(ANSWER("\"c\"", "4294967296"))), "expected a 32-bit integer");
    expect_refused(
        "{\"data\": [{\"paragraphs\": []}, {\"paragraphs\": [{\"context\": \"c\", \"qas\": "
        "[]}, {\"context\": \"c\", \"qas\": [" QA(ANSWER("\"c\"", "0")) ", 0]}]}]}",
        "data[1].paragraphs[1].qas[1]: expected an object, found an integer");
}

static void a_file_without_questions_is_refused(void **state)
{
    (void)state;
    expect_refused("{\"data\": []}", "no question");
    expect_refused(ONE("\"c\"", ""), "no question");
}

static void an_id_that_is_there_twice_is_refused(void **state)
{
    (void)state;
    expect_refused(ONE("\"c\"", QA(ANSWER("\"c\"", "0")) "," QA(ANSWER("\"c\"", "0"))),
                   "questions 1 and 2 have the same id \"q1\"");
}

/* ---- what only training refuses ------------------------------------------------------------- */

static void expect_untrainable(const char *text, const char *part)
{
    struct squad_data data = {0};
    assert_int_equal(load_text(&data, text), ST_OK);
    assert_int_equal(squad_check_answers(&data), ST_CORRUPT);
    expect_message(part);
    squad_release(&data);
}

static void a_wrong_offset_loads_and_does_not_train(void **state)
{
    (void)state;
    expect_untrainable(ONE("\"caf\xC3\xA9 au lait\"", QA(ANSWER("\"au\"", "6"))),
                       "question \"q1\": offset 6: expected the answer \"au\", found \"u \"");
    expect_untrainable(ONE("\"caf\xC3\xA9\"", QA(ANSWER("\"caf\xC3\xA9!\"", "0"))),
                       "found \"caf\xC3\xA9\"");
    expect_untrainable(ONE("\"abc\"", QA(ANSWER("\"a\"", "-1"))), "offset -1");
    expect_untrainable(ONE("\"abc\"", QA(ANSWER("\"a\"", "4"))), "3 code points");
    expect_untrainable(ONE("\"abc\"", QA(ANSWER("\"a\"", "3"))), "offset 3");
}

static void answers_that_contradict_the_flag_do_not_train(void **state)
{
    (void)state;
    expect_untrainable(ONE("\"abc\"", QA(", \"answers\": []")), "no answers");
    expect_untrainable(ONE("\"abc\"", QA(", \"is_impossible\": true" ANSWER("\"a\"", "0"))),
                       "is_impossible is true");
    expect_untrainable(ONE("\"abc\"", QA(ANSWER("\"\"", "0"))), "an answer is empty");
}

static void a_message_does_not_cut_a_code_point(void **state)
{
    (void)state;
    char text[1024], answer[400] = "x";
    for (size_t i = 1; i + 2 < sizeof answer; i += 2)
        memcpy(answer + i, "\xC3\xA9", 3);
    snprintf(text, sizeof text, ONE("\"abc\"", QA(ANSWER("\"%s\"", "0"))), answer);
    expect_untrainable(text, "\xC3\xA9\", found \"abc\"");
}

/* ---- memory --------------------------------------------------------------------------------- */

static void every_failing_allocation_is_reported(void **state)
{
    (void)state;
    struct squad_data data = {0};
    int64_t before = mem_live_bytes(), k = 0;
    enum status st = ST_MEMORY;
    while (st != ST_OK) {
        mem_fail_at(++k);
        st = squad_load(&data, "data/squad/squad-v2-mini.json");
        mem_fail_at(0);
        if (st != ST_OK) {
            assert_int_equal(st, ST_MEMORY);
            assert_int_equal(mem_live_bytes(), before);
        }
    }
    assert_true(k > 5);
    squad_release(&data);
}

static void code_points_find_their_bytes(void **state)
{
    (void)state;
    struct codepoints cp = {0};
    const char *text = "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80z";
    const size_t bytes[] = {0, 1, 3, 6, 10, 11};
    assert_int_equal(codepoints_build(&cp, text), ST_OK);
    assert_int_equal(cp.count, 5);
    for (int32_t i = 0; i <= cp.count; i++)
        assert_int_equal(codepoints_byte(&cp, i), bytes[i]);
    assert_int_equal(codepoints_build(&cp, "abc"), ST_OK);
    assert_int_equal(cp.count, 3);
    assert_int_equal(codepoints_byte(&cp, 3), 3);
    assert_int_equal(codepoints_build(&cp, ""), ST_OK);
    assert_int_equal(codepoints_byte(&cp, 0), 0);
    codepoints_release(&cp);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_published_files_have_their_published_counts),
        cmocka_unit_test(the_hash_is_that_of_the_plain_bytes),
        cmocka_unit_test(fields_arrive_as_written),
        cmocka_unit_test(a_byte_order_mark_and_crlf_are_accepted),
        cmocka_unit_test(an_empty_question_is_accepted),
        cmocka_unit_test(an_impossible_question_needs_no_answers_key),
        cmocka_unit_test(paragraphs_without_questions_do_not_count),
        cmocka_unit_test(loading_twice_replaces),
        cmocka_unit_test(a_missing_file_is_named),
        cmocka_unit_test(broken_json_names_line_and_column),
        cmocka_unit_test(every_truncated_file_is_refused),
        cmocka_unit_test(nesting_without_end_is_refused),
        cmocka_unit_test(a_wrong_shape_names_the_path),
        cmocka_unit_test(a_file_without_questions_is_refused),
        cmocka_unit_test(an_id_that_is_there_twice_is_refused),
        cmocka_unit_test(a_wrong_offset_loads_and_does_not_train),
        cmocka_unit_test(answers_that_contradict_the_flag_do_not_train),
        cmocka_unit_test(a_message_does_not_cut_a_code_point),
        cmocka_unit_test(every_failing_allocation_is_reported),
        cmocka_unit_test(code_points_find_their_bytes),
    };
    return cmocka_run_group_tests(tests, make_scratch, remove_scratch);
}
