/* JSON made without a tree is, byte for byte, the file of the tree. */
#include "io/json_file.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/file.h"
#include "engine/base/rng.h"
#include "tests/support/support.h"

static struct scratch scratch;
static char tree_path[512];

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
        struct json_stream s = {0};
        struct file_text tree_text, text;
        json_t *tree = json_object();
        json_stream_open(&s, '{');
        json_stream_key(&s, "value");
        assert_int_equal(json_object_set_new(tree, "value", value(&index, &s, 1)), 0);
        json_stream_close(&s, '}');
        text_put(&s.text, "\n");
        assert_ok(text_take(&s.text, ST_OK, &text.data, &text.bytes));
        assert_ok(json_file_write(tree_path, tree));
        json_decref(tree);
        assert_ok(file_read(&tree_text, tree_path));
        assert_int_equal(text.bytes, tree_text.bytes);
        assert_string_equal(text.data, tree_text.data);
        mem_free(&tree_text.data);
        mem_free(&text.data);
    }
}

static void parts_join_to_the_whole(void **state)
{
    (void)state;
    struct json_stream whole = {0}, first, second;
    char joined[256];
    json_stream_open(&whole, '[');
    json_stream_part(&first, true);
    json_stream_part(&second, false);
    for (int i = 0; i < 4; i++) {
        struct json_stream *both[] = {&whole, i < 2 ? &first : &second};
        for (int k = 0; k < 2; k++) {
            json_stream_open(both[k], '[');
            json_stream_real(both[k], i);
            json_stream_close(both[k], ']');
        }
    }
    json_stream_close(&whole, ']');
    snprintf(joined, sizeof joined, "[%s%s\n]", first.text.data, second.text.data);
    assert_string_equal(whole.text.data, joined);
    mem_free(&whole.text.data);
    mem_free(&first.text.data);
    mem_free(&second.text.data);
}

static void long_text_and_bad_text(void **state)
{
    (void)state;
    static char text[4000];
    struct json_stream s = {0};
    struct file_text made;
    memset(text, '"', sizeof text - 1);
    json_stream_open(&s, '[');
    json_stream_string(&s, text);
    json_stream_close(&s, ']');
    json_t *back = json_loads(s.text.data, 0, NULL);
    assert_string_equal(json_string_value(json_array_get(back, 0)), text);
    json_decref(back);
    mem_free(&s.text.data);

    s = (struct json_stream){0};
    json_stream_open(&s, '[');
    json_stream_string(&s, "half a \xc3");
    json_stream_string(&s, "what follows a failure does nothing");
    json_stream_close(&s, ']');
    assert_fails(text_take(&s.text, ST_OK, &made.data, &made.bytes), ST_INVALID, "not UTF-8");
    assert_null(made.data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stream_makes_the_file_of_the_tree),
        cmocka_unit_test(parts_join_to_the_whole),
        cmocka_unit_test(long_text_and_bad_text),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
