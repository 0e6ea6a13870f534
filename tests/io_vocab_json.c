/*
 * Vocabularies in tokenizer.json: the same as a vocab.txt, or an error that says what is wrong.
 */
#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "io/vocab.h"
#include "tests/support/support.h"

#define SPECIAL "\"[PAD]\": 0, \"[UNK]\": 1, \"[CLS]\": 2, \"[SEP]\": 3"

static const char good[] =
    "{\"version\": \"1.0\", \"added_tokens\": ["
    "{\"id\": 0, \"content\": \"[PAD]\", \"special\": true}, {\"id\": 6, \"content\": \"<new>\"}],"
    "\"normalizer\": {\"type\": \"BertNormalizer\", \"lowercase\": true},"
    "\"model\": {\"type\": \"WordPiece\", \"unk_token\": \"[UNK]\","
    "\"continuing_subword_prefix\": \"##\", \"max_input_chars_per_word\": 100,"
    "\"vocab\": {\"##x\": 5, \"\\u00fc\": 4, " SPECIAL "}}}";

static enum status load(struct file_test *t, struct vocab *vocab, const char *name,
                        const char *text)
{
    return vocab_load(vocab, scratch_put(&t->scratch, t->path, name, text, strlen(text)));
}

static void tokens_are_those_of_a_vocabulary_file_by_id(void **state)
{
    static const char lines[] = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n\xC3\xBC\n##x\n<new>\n";
    struct vocab json = {0}, text = {0};
    assert_ok(load(*state, &json, "tokenizer.json", good));
    assert_ok(load(*state, &text, "vocab.txt", lines));
    assert_int_equal(json.size, 7);
    assert_true(json.content_hash == text.content_hash);
    assert_int_equal(vocab_find(&json, "##x", 3), 5);
    assert_int_equal(vocab_find(&json, "<new>", 5), 6);
    assert_int_equal(json.sep_id, 3);
    vocab_release(&json);
    vocab_release(&text);
}

static void a_byte_order_mark_and_a_bare_model_are_accepted(void **state)
{
    struct vocab vocab = {0};
    assert_ok(load(*state, &vocab, "tokenizer.json",
                   "\xEF\xBB\xBF{\"model\": {\"vocab\": {" SPECIAL "}}}\r\n"));
    assert_int_equal(vocab.size, 4);
    vocab_release(&vocab);
}

static void expect(void **state, const char *text, enum status status, const char *message)
{
    struct vocab vocab = {0};
    assert_fails(load(*state, &vocab, "tokenizer.json", text), status, message);
    assert_message_has("tokenizer.json", __FILE__, __LINE__);
    assert_null(vocab.entries);
    status_clear();
}

static void other_tokenizers_are_named(void **state)
{
    expect(state, "{\"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 0}}}", ST_UNSUPPORTED,
           "model.type is BPE; only WordPiece is read");
    expect(state, "{\"model\": {\"continuing_subword_prefix\": \"_\", \"vocab\": {" SPECIAL "}}}",
           ST_UNSUPPORTED, "continuing_subword_prefix");
    expect(state, "{\"model\": {\"max_input_chars_per_word\": 50, \"vocab\": {" SPECIAL "}}}",
           ST_UNSUPPORTED, "max_input_chars_per_word");
}

static void broken_vocabularies_say_what_is_wrong(void **state)
{
    expect(state, "", ST_CORRUPT, "empty file");
    expect(state, "{\"model\": {\"vocab\": {", ST_CORRUPT, ":1:");
    expect(state, "[]", ST_CORRUPT, "model: expected an object, found nothing");
    expect(state, "{\"model\": {\"vocab\": [[\"a\", 0]]}}", ST_CORRUPT,
           "model.vocab: expected an object, found an array");
    expect(state, "{\"model\": {\"vocab\": {}}}", ST_CORRUPT, "0 tokens");
    expect(state, "{\"model\": {\"vocab\": {\"a\": 0, \"b\": 2}}}", ST_CORRUPT,
           "token \"b\": expected an id from 0 to 1");
    expect(state, "{\"model\": {\"vocab\": {\"a\": 0, \"b\": 1.5}}}", ST_CORRUPT,
           "token \"b\": expected an id");
    expect(state, "{\"model\": {\"vocab\": {\"a\": 0, \"b\": 0}}}", ST_CORRUPT,
           "id 0 has the tokens \"a\" and \"b\"");
    expect(state, "{\"model\": {\"vocab\": {\"a\\nb\": 0}}}", ST_CORRUPT, "line end");
    expect(state, "{\"added_tokens\": [{\"id\": 1}], \"model\": {\"vocab\": {\"a\": 0}}}",
           ST_CORRUPT, "added_tokens[0]: expected a content");
    expect(state,
           "{\"added_tokens\": [{\"id\": 9, \"content\": \"x\"}], \"model\": {\"vocab\": "
           "{" SPECIAL "}}}",
           ST_CORRUPT, "token \"x\": expected an id from 0 to 4");
    expect(state,
           "{\"added_tokens\": [{\"id\": 7, \"content\": \"x\"}, {\"id\": 7, \"content\": \"x\"}],"
           "\"model\": {\"vocab\": {" SPECIAL "}}}",
           ST_CORRUPT, "expected an id");
    expect(state, "{\"model\": {\"vocab\": {\"a\": 0}}}", ST_CORRUPT, "no token [PAD]");
}

static void every_failed_allocation_is_reported(void **state)
{
    struct vocab vocab = {0};
    int k = 1;
    for (;; k++) {
        mem_fail_at(k);
        enum status st = load(*state, &vocab, "tokenizer.json", good);
        mem_fail_at(0);
        if (st == ST_OK)
            break;
        assert_int_equal(st, ST_MEMORY);
        assert_null(vocab.entries);
    }
    assert_true(k > 3);
    status_clear();
    vocab_release(&vocab);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tokens_are_those_of_a_vocabulary_file_by_id),
        cmocka_unit_test(a_byte_order_mark_and_a_bare_model_are_accepted),
        cmocka_unit_test(other_tokenizers_are_named),
        cmocka_unit_test(broken_vocabularies_say_what_is_wrong),
        cmocka_unit_test(every_failed_allocation_is_reported),
    };
    return cmocka_run_group_tests(tests, file_test_set_up, file_test_tear_down);
}
