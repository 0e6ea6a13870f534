/*
 * The data of a run (engine/train/run_data.h): what the cache of features saves, and that it hides
 * no wrong answer.
 */
#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "tests/support/run.h"

static struct scratch scratch;

static int set_up(void **state)
{
    static const struct made_questions train = {
        .count = 30, .min_words = 5, .max_words = 60, .question_words = 4, .seed = 77};
    return run_set_up(state, &scratch, &train, &train);
}

static struct run_config with_cache(const char *name)
{
    struct run_config c = run_tiny_with(&scratch, (struct tiny_run){.steps = 5, .eval = true});
    scratch_path(&scratch, c.data.cache_dir, name);
    return c;
}

static void load(struct run_data *data, const struct run_config *c)
{
    memset(data, 0, sizeof *data);
    assert_ok(run_data_load(data, c, true));
}

static void cached_data_is_the_same_and_is_not_parsed(void **state)
{
    (void)state;
    struct run_config c = with_cache("one");
    struct run_data built, kept;
    load(&built, &c);
    load(&kept, &c);
    assert_false(built.train.cached);
    assert_true(built.train.data.example_count > 0);
    assert_true(kept.train.cached && kept.eval.cached);
    assert_int_equal(kept.train.data.example_count, 0);
    assert_int_equal(kept.eval.data.example_count, 0);
    assert_true(kept.train.data.content_hash == built.train.data.content_hash);
    assert_int_equal(kept.train.count, built.train.count);
    assert_int_equal(kept.train.examples, built.train.examples);
    assert_memory_equal(kept.train.rows, built.train.rows,
                        sizeof *built.train.rows * (size_t)built.train.count);
    assert_memory_equal(kept.train.features.ids, built.train.features.ids,
                        sizeof *built.train.features.ids *
                            (size_t)built.train.features.token_count);
    run_data_release(&built);
    run_data_release(&kept);
}

static void texts_are_parsed_once_when_they_are_asked_for(void **state)
{
    (void)state;
    struct run_config c = with_cache("two");
    const struct squad_data *texts = NULL, *again = NULL;
    struct squad_data kept = {0};
    struct run_data data;
    load(&data, &c);
    assert_ok(split_texts(&texts, &kept, &data.eval)); /* they were parsed for the features */
    assert_ptr_equal(texts, &data.eval.data);
    assert_int_equal(kept.example_count, 0);
    run_data_release(&data);
    load(&data, &c);
    assert_ok(split_texts(&texts, &kept, &data.eval));
    assert_ptr_equal(texts, &kept);
    assert_int_equal(kept.example_count, data.eval.examples);
    const char *context = kept.examples[0].context;
    assert_ok(split_texts(&again, &kept, &data.eval));
    assert_ptr_equal(context, again->examples[0].context);
    squad_release(&kept);
    run_data_release(&data);
}

/* Answers out of other texts than those of the features would be nonsense. */
static void a_file_that_changed_since_the_start_is_an_error(void **state)
{
    (void)state;
    struct run_config c = with_cache("five");
    const struct squad_data *texts = NULL;
    struct squad_data kept = {0};
    struct run_data data;
    struct file_text text;
    assert_ok(file_read(&text, c.data.eval));
    scratch_put(&scratch, c.data.eval, "changes.json", text.data, text.bytes);
    load(&data, &c);
    run_data_release(&data);
    load(&data, &c);
    char *question = strstr(text.data, "\"question\":\"");
    assert_non_null(question);
    char *at = question + strlen("\"question\":\"");
    *at = *at == 'x' ? 'y' : 'x';
    scratch_put(&scratch, c.data.eval, "changes.json", text.data, text.bytes);
    mem_free(&text.data);
    assert_fails(split_texts(&texts, &kept, &data.eval), ST_INVALID, "has changed since");
    assert_int_equal(kept.example_count, 0);
    run_data_release(&data);
}

static void a_run_from_the_cache_has_the_bits_of_the_first(void **state)
{
    (void)state;
    struct run_config c = with_cache("three");
    static struct run_trace first, second;
    run_ok(&first, &c, &(struct run_how){0});
    run_ok(&second, &c, &(struct run_how){0});
    run_same(&first, &second, "features from the cache");
    run_release(&first);
    run_release(&second);
}

/* An evaluation caches the features of any file; training on it looks at its answers. */
static void wrong_answers_are_an_error_with_a_cache_too(void **state)
{
    (void)state;
    struct run_config c = with_cache("four");
    struct file_text text;
    struct run_data data;
    assert_ok(file_read(&text, c.data.train));
    char *at = strstr(text.data, "\"answer_start\"");
    assert_non_null(at);
    while (*at < '0' || *at > '9')
        at++;
    *at = *at == '9' ? '8' : (char)(*at + 1);
    scratch_put(&scratch, c.data.eval, "wrong.json", text.data, text.bytes);
    mem_free(&text.data);
    load(&data, &c); /* for evaluation offsets do not matter */
    run_data_release(&data);
    snprintf(c.data.train, sizeof c.data.train, "%s", c.data.eval);
    for (int i = 0; i < 2; i++) {
        memset(&data, 0, sizeof data);
        assert_int_equal(run_data_load(&data, &c, true), ST_CORRUPT);
        assert_non_null(strstr(status_message(), "answer"));
        run_data_release(&data);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cached_data_is_the_same_and_is_not_parsed),
        cmocka_unit_test(texts_are_parsed_once_when_they_are_asked_for),
        cmocka_unit_test(a_file_that_changed_since_the_start_is_an_error),
        cmocka_unit_test(a_run_from_the_cache_has_the_bits_of_the_first),
        cmocka_unit_test(wrong_answers_are_an_error_with_a_cache_too),
    };
    return cmocka_run_group_tests(tests, set_up, run_tear_down);
}
