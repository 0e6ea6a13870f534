/* JSON written without a tree is, byte for byte, the file of the tree. */
#include "io/json_file.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/file.h"
#include "engine/base/rng.h"
#include "tests/support/support.h"

static struct scratch scratch;
static char tree_path[512], stream_path[512];

static const char *const texts[] = {"",
                                    "plain",
                                    "a \"quote\" and a back\\slash",
                                    "line\nfeed, tab\t, bell \a, delete \x7f",
                                    "caf\xc3\xa9, \xe6\xb1\x89, \xf0\x9f\x98\x80",
                                    "</script>"};
static const double reals[] = {
    0.0, -0.0, 1.0, -3.0, 0.1, 1e300, 2.5e-5, 5e-324, 123456789012345678.0};
enum { TEXTS = sizeof texts / sizeof *texts, REALS = sizeof reals / sizeof *reals };

static int setup(void **state)
{
    (void)state;
    scratch_make(&scratch);
    scratch_path(&scratch, tree_path, "tree.json");
    scratch_path(&scratch, stream_path, "stream.json");
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    scratch_remove(&scratch);
    return 0;
}

static uint32_t draw(uint64_t *index, uint32_t limit)
{
    return (uint32_t)rng_below(7, 0, (*index)++, limit);
}

/* The same value on both sides: a text, a number, a list or an object of up to three. */
static json_t *value(uint64_t *index, struct json_stream *s, int depth)
{
    uint32_t kind = draw(index, depth < 5 ? 4 : 2), i;
    if (kind == 0) {
        i = draw(index, TEXTS);
        json_stream_string(s, texts[i]);
        return json_string(texts[i]);
    }
    if (kind == 1) {
        i = draw(index, REALS);
        json_stream_real(s, reals[i]);
        return json_real(reals[i]);
    }
    json_t *tree = kind == 2 ? json_array() : json_object();
    uint32_t count = draw(index, 4);
    json_stream_open(s, kind == 2 ? '[' : '{');
    for (i = 0; i < count; i++) {
        char key[64];
        if (kind == 2) {
            assert_int_equal(json_array_append_new(tree, value(index, s, depth + 1)), 0);
            continue;
        }
        snprintf(key, sizeof key, "%u %s", i, texts[draw(index, TEXTS)]);
        json_stream_key(s, key);
        assert_int_equal(json_object_set_new(tree, key, value(index, s, depth + 1)), 0);
    }
    json_stream_close(s, kind == 2 ? ']' : '}');
    return tree;
}

static void a_stream_makes_the_file_of_the_tree(void **state)
{
    (void)state;
    uint64_t index = 0;
    for (int round = 0; round < 200; round++) {
        struct json_stream s;
        struct file_text a, b;
        assert_ok(json_stream_begin(&s, stream_path));
        json_t *tree = json_object();
        json_stream_open(&s, '{');
        json_stream_key(&s, "value");
        assert_int_equal(json_object_set_new(tree, "value", value(&index, &s, 1)), 0);
        json_stream_close(&s, '}');
        assert_ok(json_stream_end(&s));
        assert_ok(json_file_write(tree_path, tree));
        json_decref(tree);
        assert_ok(file_read(&a, tree_path));
        assert_ok(file_read(&b, stream_path));
        assert_string_equal(b.data, a.data);
        mem_free(&a.data);
        mem_free(&b.data);
    }
}

/* Much more than is kept before it goes to the file; which stays the old one until the end. */
static void a_large_file_is_replaced_at_the_end(void **state)
{
    (void)state;
    enum { COUNT = 100000 };
    struct json_stream s;
    struct file_text text;
    json_t *back;
    assert_ok(file_write(stream_path, "old", 3));
    assert_ok(json_stream_begin(&s, stream_path));
    json_stream_open(&s, '[');
    for (int i = 0; i < COUNT; i++) {
        json_stream_open(&s, '[');
        json_stream_real(&s, (double)i / 8);
        json_stream_close(&s, ']');
    }
    json_stream_close(&s, ']');
    assert_ok(file_read(&text, stream_path));
    assert_string_equal(text.data, "old");
    mem_free(&text.data);
    assert_ok(json_stream_end(&s));
    assert_ok(json_file_read(&back, stream_path, NULL));
    assert_int_equal(json_array_size(back), COUNT);
    for (int i = 0; i < COUNT; i++) {
        const json_t *number = json_array_get(json_array_get(back, (size_t)i), 0);
        assert_true(json_real_value(number) == (double)i / 8);
    }
    json_decref(back);
}

static void long_text_and_bad_text(void **state)
{
    (void)state;
    static char text[4000];
    struct json_stream s;
    json_t *back;
    assert_ok(json_stream_begin(&s, stream_path));
    memset(text, '"', sizeof text - 1);
    json_stream_open(&s, '[');
    json_stream_string(&s, text);
    json_stream_close(&s, ']');
    assert_ok(json_stream_end(&s));
    assert_ok(json_file_read(&back, stream_path, NULL));
    assert_string_equal(json_string_value(json_array_get(back, 0)), text);
    json_decref(back);

    assert_ok(json_stream_begin(&s, tree_path));
    json_stream_open(&s, '[');
    json_stream_string(&s, "half a \xc3");
    json_stream_string(&s, "what follows a failure does nothing");
    json_stream_close(&s, ']');
    assert_fails(json_stream_end(&s), ST_INVALID, "not UTF-8");
    assert_null(s.text.data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stream_makes_the_file_of_the_tree),
        cmocka_unit_test(a_large_file_is_replaced_at_the_end),
        cmocka_unit_test(long_text_and_bad_text),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
