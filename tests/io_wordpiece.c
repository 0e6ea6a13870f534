/*
 * WordPiece against the answers of the Hugging Face `tokenizers` library: hand-made and random
 * texts, every code point, all questions and contexts of the SQuAD 1.1 development set.
 */
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
#include <pthread.h>
#include <zlib.h>

#include "engine/base/arena.h"
#include "engine/base/file.h"
#include "engine/base/rng.h"
#include "io/squad.h"
#include "io/vocab.h"
#include "io/wordpiece.h"

#define UNCASED_VOCAB "data/vocab/bert-base-uncased-vocab.txt"
#define CASED_VOCAB   "tests/data/tokenizer/bert-base-cased-vocab.txt"

enum { UNCASED, CASED };

static struct vocab vocabs[2];
static struct wordpiece toks[2];
static struct token_list list;

static int load_all(void **state)
{
    (void)state;
    if (vocab_load(&vocabs[UNCASED], UNCASED_VOCAB) != ST_OK ||
        vocab_load(&vocabs[CASED], CASED_VOCAB) != ST_OK)
        return -1;
    wordpiece_init(&toks[UNCASED], &vocabs[UNCASED], false);
    wordpiece_init(&toks[CASED], &vocabs[CASED], true);
    return 0;
}

static int release_all(void **state)
{
    (void)state;
    token_list_release(&list);
    vocab_release(&vocabs[UNCASED]);
    vocab_release(&vocabs[CASED]);
    return mem_live_bytes() == 0 ? 0 : -1;
}

static struct token_list *tokenize(int cased, const char *text, size_t bytes)
{
    list.count = 0;
    assert_int_equal(wordpiece_tokenize(&toks[cased], &list, text, bytes), ST_OK);
    return &list;
}

/* "tok tok tok" into one buffer; the texts of these tests are short. */
static const char *spelled(int cased, const char *text)
{
    static char buffer[4096];
    size_t at = 0;
    const struct token_list *got = tokenize(cased, text, strlen(text));
    buffer[0] = '\0';
    for (size_t i = 0; i < got->count; i++)
        at += (size_t)snprintf(buffer + at, sizeof buffer - at, "%s%s", i > 0 ? " " : "",
                               vocab_token(&vocabs[cased], got->tokens[i].id));
    return buffer;
}

/* ---- expectation files ----------------------------------------------------------------------- */

/* Call check(line, bytes, number) for every line of a file. */
static int for_each_line(const char *path, void (*check)(char *line, int number))
{
    struct file_text file;
    int number = 0;
    assert_int_equal(file_read(&file, path), ST_OK);
    for (char *line = file.data, *end; line < file.data + file.bytes; line = end + 1) {
        end = strchr(line, '\n');
        assert_non_null(end);
        *end = '\0';
        check(line, ++number);
    }
    mem_free(&file.data);
    return number;
}

static void check_tokens(const json_t *expected, int cased, const json_t *text, int number)
{
    const json_t *tokens = json_object_get(expected, "tokens");
    const json_t *ids = json_object_get(expected, "ids");
    const json_t *offsets = json_object_get(expected, "offsets"); /* NULL in the questions file */
    const struct token_list *got =
        tokenize(cased, json_string_value(text), json_string_length(text));
    bool same = got->count == json_array_size(ids);
    for (size_t i = 0; same && i < got->count; i++) {
        const struct token *token = &got->tokens[i];
        const json_t *offset = json_array_get(offsets, i);
        same = token->id == json_integer_value(json_array_get(ids, i)) &&
               strcmp(vocab_token(&vocabs[cased], token->id),
                      json_string_value(json_array_get(tokens, i))) == 0 &&
               (offset == NULL || (token->start == json_integer_value(json_array_get(offset, 0)) &&
                                   token->end == json_integer_value(json_array_get(offset, 1))));
        if (!same)
            print_error("token %zu: id %d at %d..%d\n", i, token->id, token->start, token->end);
    }
    if (!same)
        fail_msg("line %d, cased %d: %s", number, cased, json_string_value(text));
}

static json_t *parse(const char *line)
{
    json_error_t error;
    json_t *object = json_loads(line, JSON_ALLOW_NUL, &error);
    assert_non_null(object);
    return object;
}

static void check_vector(char *line, int number)
{
    json_t *object = parse(line);
    const json_t *text = json_object_get(object, "text");
    check_tokens(json_object_get(object, "uncased"), UNCASED, text, number);
    check_tokens(json_object_get(object, "cased"), CASED, text, number);
    json_decref(object);
}

static void every_vector_agrees_in_tokens_ids_and_offsets(void **state)
{
    (void)state;
    assert_int_equal(for_each_line("tests/data/tokenizer/wordpiece-vectors.jsonl.gz", check_vector),
                     438);
}

static void marks_out_of_order_agree(void **state)
{
    (void)state;
    assert_int_equal(for_each_line("tests/data/tokenizer/marks.jsonl.gz", check_vector), 400);
}

static void check_question(char *line, int number)
{
    json_t *object = parse(line);
    check_tokens(object, UNCASED, json_object_get(object, "text"), number);
    json_decref(object);
}

static void every_dev_question_agrees(void **state)
{
    (void)state;
    assert_int_equal(for_each_line("tests/data/tokenizer/squad-dev-v1.1-questions-uncased.jsonl.gz",
                                   check_question),
                     10570);
}

/* ---- checksums ------------------------------------------------------------------------------- */

struct sums {
    uint32_t count, ids, offsets;
};

static void add_sums(struct sums *sums, const struct token_list *got)
{
    for (size_t i = 0; i < got->count; i++) {
        const struct token *token = &got->tokens[i];
        sums->ids = (uint32_t)crc32(sums->ids, (const Bytef *)&token->id, 4);
        sums->offsets = (uint32_t)crc32(sums->offsets, (const Bytef *)&token->start, 8);
    }
    sums->count += (uint32_t)got->count;
}

static struct squad_data dev;
static int64_t next_example;

/* article, paragraph, then count, ids, offsets for uncased and for cased */
static void check_context(char *line, int number)
{
    if (line[0] == '#')
        return;
    struct sums want[2], got[2] = {{0}, {0}};
    int article, paragraph;
    assert_int_equal(sscanf(line, "%d %d %u %x %x %u %x %x", &article, &paragraph, &want[0].count,
                            &want[0].ids, &want[0].offsets, &want[1].count, &want[1].ids,
                            &want[1].offsets),
                     8);
    while (dev.examples[next_example].context_index < number - 2)
        next_example++;
    const char *context = dev.examples[next_example].context;
    for (int cased = 0; cased < 2; cased++) {
        add_sums(&got[cased], tokenize(cased, context, strlen(context)));
        if (memcmp(&got[cased], &want[cased], sizeof got[cased]) != 0)
            fail_msg("line %d, cased %d: %s", number, cased, context);
    }
}

static void every_dev_context_agrees(void **state)
{
    (void)state;
    assert_int_equal(squad_load(&dev, "tests/data/qa/squad-dev-v1.1.json.gz"), ST_OK);
    next_example = 0;
    assert_int_equal(
        for_each_line("tests/data/tokenizer/squad-dev-v1.1-context-tokens.tsv.gz", check_context),
        2067 + 1);
    squad_release(&dev);
}

static size_t encode(char *to, uint32_t c)
{
    if (c < 0x80) {
        to[0] = (char)c;
        return 1;
    }
    int more = c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
    static const uint8_t lead[] = {0, 0xC0, 0xE0, 0xF0};
    to[0] = (char)(lead[more] | c >> (6 * more));
    for (int i = 1; i <= more; i++)
        to[i] = (char)(0x80 | (c >> (6 * (more - i)) & 0x3F));
    return (size_t)more + 1;
}

/* A line of 1,024 code points c, each as the text "a" c "b". */
static void check_code_points(char *line, int number)
{
    if (line[0] == '#')
        return;
    struct sums want[2], got[2] = {{0}, {0}};
    uint32_t first;
    assert_int_equal(sscanf(line, "%x %x %x %x %x", &first, &want[0].ids, &want[0].offsets,
                            &want[1].ids, &want[1].offsets),
                     5);
    for (uint32_t c = first; c < first + 1024; c++) {
        if (c >= 0xD800 && c < 0xE000)
            continue;
        char text[8] = "a";
        size_t bytes = 1 + encode(text + 1, c);
        text[bytes++] = 'b';
        add_sums(&got[UNCASED], tokenize(UNCASED, text, bytes));
        add_sums(&got[CASED], tokenize(CASED, text, bytes));
    }
    for (int cased = 0; cased < 2; cased++)
        if (got[cased].ids != want[cased].ids || got[cased].offsets != want[cased].offsets)
            fail_msg("line %d, cased %d: a code point in U+%04X..%04X", number, cased, first,
                     first + 1023);
}

static void every_code_point_agrees(void **state)
{
    (void)state;
    assert_int_equal(for_each_line("tests/data/tokenizer/code-points.tsv.gz", check_code_points),
                     1087);
}

/* ---- single rules ---------------------------------------------------------------------------- */

static void special_tokens_in_a_text_are_text(void **state)
{
    (void)state;
    assert_string_equal(spelled(UNCASED, "[CLS] [SEP]"), "[ cl ##s ] [ sep ]");
}

static void uncased_drops_accents_and_cased_keeps_them(void **state)
{
    (void)state;
    assert_string_equal(spelled(UNCASED, "Z\u00fcrichs Caf\u00e9!"), "zurich ##s cafe !");
    assert_string_equal(spelled(CASED, "Caf\u00e9"), "Caf\u00e9");
    const struct token_list *got = tokenize(UNCASED, "Zurich\u0301s", strlen("Zurich\u0301s"));
    assert_int_equal(got->count, 2);
    assert_int_equal(got->tokens[0].end, 6);   /* without the mark */
    assert_int_equal(got->tokens[1].start, 7); /* behind it */
}

static void a_word_of_100_characters_is_split_and_one_of_101_is_unknown(void **state)
{
    (void)state;
    char word[2 * 101 + 1];
    for (int i = 0; i < 101; i++)
        memcpy(word + 2 * i, "\u00e9", 3);
    const struct token_list *got = tokenize(UNCASED, word, 2 * 100);
    assert_int_not_equal(got->tokens[0].id, vocabs[UNCASED].unk_id);
    assert_int_equal(got->tokens[got->count - 1].end, 100);
    got = tokenize(UNCASED, word, 2 * 101);
    assert_int_equal(got->count, 1);
    assert_int_equal(got->tokens[0].id, vocabs[UNCASED].unk_id);
    assert_int_equal(got->tokens[0].end, 101);
}

static void nothing_to_read_gives_no_tokens(void **state)
{
    (void)state;
    assert_int_equal(tokenize(UNCASED, "", 0)->count, 0);
    assert_int_equal(tokenize(UNCASED, " \t\r\n\u2028\u3000 ", 11)->count, 0);
    assert_int_equal(tokenize(UNCASED, "\u0301", 2)->count, 0);
    assert_int_equal(tokenize(UNCASED, "\0\0", 2)->count, 0);
}

static void tokens_are_appended(void **state)
{
    (void)state;
    tokenize(UNCASED, "one two", 7);
    assert_int_equal(wordpiece_tokenize(&toks[UNCASED], &list, "three", 5), ST_OK);
    assert_int_equal(list.count, 3);
    assert_int_equal(list.tokens[2].start, 0);
}

static void broken_utf8_is_corrupt_and_names_the_byte(void **state)
{
    (void)state;
    static const char *const broken[] = {
        "abc\x80",     "abc\xC3", "abc\xC0\x80", "abc\xED\xA0\x80", "abc\xF4\x90\x80\x80",
        "abc\xE2\x82", "abc\xFF"};
    for (size_t i = 0; i < sizeof broken / sizeof broken[0]; i++) {
        list.count = 0;
        assert_int_equal(wordpiece_tokenize(&toks[0], &list, broken[i], strlen(broken[i])),
                         ST_CORRUPT);
        assert_non_null(strstr(status_message(), "byte 3"));
        assert_int_equal(list.count, 0);
    }
    status_clear();
}

/* Offsets ascend, lie in the text, and cover every character that is not dropped: random bytes of
 * a small alphabet with marks, ideographs, Hangul and spaces in it. */
static void random_texts_keep_the_invariants(void **state)
{
    (void)state;
    static const char *const alphabet[] = {"a",      "B",          " ",      "\u0301",
                                           "\u0323", "\u4e2d",     "\ud55c", ".",
                                           "\u302e", "\U0001F600", "\u00e9", "\u1e69"};
    uint64_t seed = getenv("TEST_SEED") != NULL ? strtoull(getenv("TEST_SEED"), NULL, 10) : 7;
    print_message("TEST_SEED=%llu\n", (unsigned long long)seed);
    for (int round = 0; round < 20000; round++) {
        char text[512] = "";
        size_t bytes = 0;
        int32_t chars = 0;
        for (; chars < round % 40; chars++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            const char *c = alphabet[(seed >> 33) % (sizeof alphabet / sizeof alphabet[0])];
            memcpy(text + bytes, c, strlen(c));
            bytes += strlen(c);
        }
        for (int cased = 0; cased < 2; cased++) {
            const struct token_list *got = tokenize(cased, text, bytes);
            for (size_t i = 0; i < got->count; i++) {
                const struct token *token = &got->tokens[i];
                assert_true(token->start >= 0 && token->start < token->end && token->end <= chars);
                assert_true(i == 0 ||
                            (token->start >= token[-1].start && token->end >= token[-1].end));
            }
        }
    }
}

/* A million marks on one letter, and a word of a million letters: linear, so a blink. */
static void endless_words_and_marks_are_read_in_linear_time(void **state)
{
    (void)state;
    enum { COUNT = 1000 * 1000 };
    char *text;
    assert_int_equal(mem_alloc(&text, 2 * COUNT + 1), ST_OK);
    text[0] = 'a';
    for (int i = 0; i < COUNT; i++)
        memcpy(text + 1 + 2 * i, i % 2 == 0 ? "\u0301" : "\u0323", 2);
    assert_int_equal(tokenize(UNCASED, text, 2 * COUNT + 1)->count, 1);
    assert_int_equal(tokenize(CASED, text, 2 * COUNT + 1)->count, 1);
    memset(text, 'x', 2 * COUNT);
    const struct token_list *got = tokenize(UNCASED, text, 2 * COUNT);
    assert_int_equal(got->count, 1);
    assert_int_equal(got->tokens[0].end, 2 * COUNT);
    mem_free(&text);
}

static void *tokenize_in_thread(void *argument)
{
    struct token_list mine = {0};
    bool *same = argument;
    *same = true;
    for (int i = 0; i < 2000; i++) {
        mine.count = 0;
        *same =
            *same &&
            wordpiece_tokenize(&toks[UNCASED], &mine, "s\u0323\u0307o unaffable", 16) == ST_OK &&
            mine.count == 4;
    }
    token_list_release(&mine);
    return NULL;
}

static void threads_share_one_tokenizer(void **state)
{
    (void)state;
    pthread_t threads[2];
    bool same[2];
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, tokenize_in_thread, &same[i]), 0);
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
        assert_true(same[i]);
    }
}

/* ---- vocabulary files ------------------------------------------------------------------------ */

static enum status load_text(struct vocab *vocab, const char *text, size_t bytes)
{
    char path[] = "/tmp/tessera-vocab-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, bytes), bytes);
    close(fd);
    enum status st = vocab_load(vocab, path);
    unlink(path);
    return st;
}

static void expect_bad_vocab(const char *text, const char *message)
{
    struct vocab vocab = {0};
    assert_int_equal(load_text(&vocab, text, strlen(text)), ST_CORRUPT);
    if (strstr(status_message(), message) == NULL)
        fail_msg("expected \"%s\" in: %s", message, status_message());
    assert_non_null(strstr(status_message(), "/tmp/tessera-vocab-"));
    assert_null(vocab.entries);
    status_clear();
}

static void a_bad_vocabulary_names_file_and_line(void **state)
{
    (void)state;
    struct vocab vocab = {0};
    expect_bad_vocab("", "empty");
    expect_bad_vocab("\xEF\xBB\xBF", "empty");
    expect_bad_vocab("[PAD]\n[UNK]\n\n[CLS]\n[SEP]\n", ":3: the line is empty");
    expect_bad_vocab("[PAD]\n[UNK]\n[CLS]\n[SEP]\nx\n[CLS]\n",
                     ":6: the token \"[CLS]\" is already on line 3");
    expect_bad_vocab("[PAD]\n[UNK]\n[SEP]\nx\n", "no token [CLS] in 4 lines");
    expect_bad_vocab("[PAD]\n[UNK]\nx\xFF\n", ":3: the token is not valid UTF-8");
    assert_int_equal(vocab_load(&vocab, "tests/data/tokenizer/missing.txt"), ST_IO);
    assert_non_null(strstr(status_message(), "missing.txt"));
    status_clear();
}

static void line_ends_and_byte_order_mark_do_not_matter(void **state)
{
    (void)state;
    static const char plain[] = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n##x";
    static const char windows[] = "\xEF\xBB\xBF[PAD]\r\n[UNK]\r\n[CLS]\r\n[SEP]\r\n##x\r\n";
    static const char other[] = "[PAD]\n[UNK]\n[CLS]\n[SEP]#\n#x\n[SEP]\n";
    struct vocab a = {0}, b = {0}, c = {0};
    assert_int_equal(load_text(&a, plain, sizeof plain - 1), ST_OK);
    assert_int_equal(load_text(&b, windows, sizeof windows - 1), ST_OK);
    assert_int_equal(load_text(&c, other, sizeof other - 1), ST_OK);
    assert_int_equal(a.size, 5);
    assert_int_equal(b.size, 5);
    assert_int_equal(vocab_find(&b, "##x", 3), 4);
    assert_int_equal(b.sep_id, 3);
    assert_true(a.content_hash == b.content_hash);
    assert_true(a.content_hash != c.content_hash);
    vocab_release(&a);
    vocab_release(&b);
    vocab_release(&c);
}

static void every_token_is_found_under_its_id(void **state)
{
    (void)state;
    assert_int_equal(vocabs[UNCASED].size, 30522);
    assert_int_equal(vocabs[CASED].size, 28996);
    assert_int_equal(vocabs[UNCASED].pad_id, 0);
    assert_int_equal(vocabs[UNCASED].unk_id, 100);
    assert_int_equal(vocabs[UNCASED].cls_id, 101);
    assert_int_equal(vocabs[UNCASED].sep_id, 102);
    assert_false(vocab_has_capitals(&vocabs[UNCASED]));
    assert_true(vocab_has_capitals(&vocabs[CASED]));
    for (int cased = 0; cased < 2; cased++)
        for (int32_t id = 0; id < vocabs[cased].size; id++) {
            const char *token = vocab_token(&vocabs[cased], id);
            assert_int_equal(vocab_find(&vocabs[cased], token, strlen(token)), id);
        }
    assert_int_equal(vocab_find(&vocabs[UNCASED], "no such token", 13), -1);
}

/* Fail each allocation in turn until none fires: a status, and nothing left behind. */
static void every_failed_allocation_is_reported(void **state)
{
    (void)state;
    static const char text[] = "[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n##a";
    int64_t live = mem_live_bytes();
    for (int k = 1;; k++) {
        struct vocab vocab = {0};
        struct token_list mine = {0};
        struct wordpiece tok;
        mem_fail_at(k);
        enum status st = load_text(&vocab, text, sizeof text - 1);
        if (st == ST_OK) {
            wordpiece_init(&tok, &vocab, false);
            st = wordpiece_tokenize(&tok, &mine, "aa\u0301 aaaa a a a a", 17);
        }
        mem_fail_at(0);
        token_list_release(&mine);
        vocab_release(&vocab);
        assert_int_equal(mem_live_bytes(), live);
        if (st == ST_OK) {
            assert_true(k > 5);
            break;
        }
        assert_int_equal(st, ST_MEMORY);
    }
    status_clear();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_vector_agrees_in_tokens_ids_and_offsets),
        cmocka_unit_test(marks_out_of_order_agree),
        cmocka_unit_test(every_dev_question_agrees),
        cmocka_unit_test(every_dev_context_agrees),
        cmocka_unit_test(every_code_point_agrees),
        cmocka_unit_test(special_tokens_in_a_text_are_text),
        cmocka_unit_test(uncased_drops_accents_and_cased_keeps_them),
        cmocka_unit_test(a_word_of_100_characters_is_split_and_one_of_101_is_unknown),
        cmocka_unit_test(nothing_to_read_gives_no_tokens),
        cmocka_unit_test(tokens_are_appended),
        cmocka_unit_test(broken_utf8_is_corrupt_and_names_the_byte),
        cmocka_unit_test(random_texts_keep_the_invariants),
        cmocka_unit_test(endless_words_and_marks_are_read_in_linear_time),
        cmocka_unit_test(threads_share_one_tokenizer),
        cmocka_unit_test(a_bad_vocabulary_names_file_and_line),
        cmocka_unit_test(line_ends_and_byte_order_mark_do_not_matter),
        cmocka_unit_test(every_token_is_found_under_its_id),
        cmocka_unit_test(every_failed_allocation_is_reported),
    };
    return cmocka_run_group_tests(tests, load_all, release_all);
}
