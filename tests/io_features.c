/*
 * Windows and labels against expectations for every question of four SQuAD files, properties over
 * random options, bad input, and the cache.
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

#include "engine/base/arena.h"
#include "engine/base/clock.h"
#include "engine/base/file.h"
#include "engine/base/log.h"
#include "io/codepoints.h"
#include "io/features.h"
#include "io/features_cache.h"
#include "io/squad.h"

static struct vocab vocabs[2];
static struct wordpiece toks[2]; /* uncased, cased */
static struct token_list list;   /* to work in */

static int load_all(void **state)
{
    (void)state;
    if (vocab_load(&vocabs[0], "data/vocab/bert-base-uncased-vocab.txt") != ST_OK ||
        vocab_load(&vocabs[1], "tests/data/tokenizer/bert-base-cased-vocab.txt") != ST_OK)
        return -1;
    wordpiece_init(&toks[0], &vocabs[0], false);
    wordpiece_init(&toks[1], &vocabs[1], true);
    return 0;
}

static int release_all(void **state)
{
    (void)state;
    token_list_release(&list);
    vocab_release(&vocabs[0]);
    vocab_release(&vocabs[1]);
    return mem_live_bytes() == 0 ? 0 : -1;
}

static const struct feature_options usual = {.max_length = 384, .doc_stride = 128};

static void load_squad(struct squad_data *data, const char *name)
{
    char path[256];
    snprintf(path, sizeof path, "tests/data/qa/%s.json.gz", name);
    assert_int_equal(squad_load(data, path), ST_OK);
}

/* ---- expectations ---------------------------------------------------------------------------- */

static void expect_tsv(const char *name, const char *kind, int64_t feature_count)
{
    char path[256];
    struct squad_data data = {0};
    struct feature_set set = {0};
    struct file_text want, got;
    snprintf(path, sizeof path, "tests/data/features/%s.%s.384.128.tsv.gz", name, kind);
    load_squad(&data, name);
    assert_int_equal(file_read(&want, path), ST_OK);
    double begin = clock_s();
    assert_int_equal(features_build(&set, &data, &toks[strcmp(kind, "cased") == 0], &usual), ST_OK);
    print_message("%s %s: %.3f s\n", name, kind, clock_s() - begin);
    assert_int_equal(features_tsv(&got, &set, &data), ST_OK);
    assert_int_equal(set.feature_count, feature_count);
    assert_int_equal(got.bytes, want.bytes);
    for (size_t i = 0, line = 1; i < got.bytes; line += got.data[i++] == '\n')
        if (got.data[i] != want.data[i])
            fail_msg("%s: line %zu differs", path, line);
    mem_free(&got.data);
    mem_free(&want.data);
    features_release(&set);
    squad_release(&data);
}

static void every_line_of_dev_v1_uncased_agrees(void **state)
{
    (void)state;
    expect_tsv("squad-dev-v1.1", "uncased", 10784);
}

static void every_line_of_dev_v1_cased_agrees(void **state)
{
    (void)state;
    expect_tsv("squad-dev-v1.1", "cased", 10822);
}

static void every_line_of_dev_v2_uncased_agrees(void **state)
{
    (void)state;
    expect_tsv("squad-dev-v2.0", "uncased", 12134);
}

static void every_line_of_the_training_files_agrees(void **state)
{
    (void)state;
    expect_tsv("squad-train-v1.1-part", "uncased", 4457);
    expect_tsv("squad-train-v1.1-part", "cased", 4466);
    expect_tsv("squad-train-sample", "uncased", 3858);
    expect_tsv("squad-train-sample", "cased", 3873);
}

/* ---- data made here -------------------------------------------------------------------------- */

enum { MADE_MAX = 8 };

struct made { /* one file of up to MADE_MAX questions, each with its own context */
    struct squad_data data;
    struct squad_example examples[MADE_MAX];
    struct squad_answer answers[MADE_MAX];
};

static void make_add(struct made *made, const char *question, const char *context,
                     const char *answer, int32_t start)
{
    static const char *const ids[MADE_MAX] = {"id0", "id1", "id2", "id3",
                                              "id4", "id5", "id6", "id7"};
    int64_t i = made->data.example_count++;
    assert_true(i < MADE_MAX);
    made->answers[i] = (struct squad_answer){answer, start};
    made->examples[i] = (struct squad_example){.id = ids[i],
                                               .question = question,
                                               .context = context,
                                               .title = "",
                                               .context_index = (int32_t)i,
                                               .answers = &made->answers[i],
                                               .answer_count = answer != NULL ? 1 : 0,
                                               .impossible = answer == NULL};
    made->data.examples = made->examples;
    made->data.context_count = i + 1;
    made->data.content_hash = (uint64_t)i + 1;
}

/* Everything that a window promises, but for the label. */
static void check_windows(const struct feature_set *set, const struct squad_data *data,
                          const struct wordpiece *tok, const struct feature_options *options)
{
    int64_t token = 0, w = 0;
    for (int64_t i = 0; i < data->example_count; i++) {
        const char *context = data->examples[i].context;
        int64_t covered = 0; /* context tokens in the windows so far, without a gap */
        int64_t first_offset = w < set->feature_count ? set->features[w].first_offset : 0;
        if (i == 0 || context != data->examples[i - 1].context) {
            list.count = 0;
            assert_int_equal(wordpiece_tokenize(tok, &list, context, strlen(context)), ST_OK);
        }
        for (; w < set->feature_count && set->features[w].example == i; w++) {
            const struct feature *f = &set->features[w];
            const int32_t *ids = set->ids + f->first_token;
            int64_t from = f->first_offset - first_offset;
            assert_int_equal(f->first_token, token);
            token += f->token_count;
            assert_true(f->token_count <= options->max_length);
            assert_int_equal(f->token_count, f->context_first + f->context_count + 1);
            assert_int_equal(ids[0], tok->vocab->cls_id);
            assert_int_equal(ids[f->context_first - 1], tok->vocab->sep_id);
            assert_int_equal(ids[f->token_count - 1], tok->vocab->sep_id);
            assert_true(from <= covered); /* no token is skipped */
            assert_true(from == 0 || from == covered - options->doc_stride);
            covered = from + f->context_count;
            for (int32_t t = 0; t < f->context_count; t++) {
                const struct token *source = &list.tokens[from + t];
                assert_int_equal(ids[f->context_first + t], source->id);
                assert_int_equal(set->offset_start[f->first_offset + t], source->start);
                assert_int_equal(set->offset_end[f->first_offset + t], source->end);
            }
        }
        assert_int_equal(covered, (int64_t)list.count);
    }
    assert_int_equal(w, set->feature_count);
    assert_int_equal(token, set->token_count);
    assert_int_equal(set->example_count, data->example_count);
}

/* The label of each window: in range; where it is not 0 it covers the answer, as tightly as tokens
 * allow, and where it is 0 the answer is not wholly inside. */
static void check_labels(const struct feature_set *set, const struct squad_data *data)
{
    for (int64_t w = 0; w < set->feature_count; w++) {
        const struct feature *f = &set->features[w];
        const struct squad_example *example = &data->examples[f->example];
        const int32_t *starts = set->offset_start + f->first_offset;
        const int32_t *ends = set->offset_end + f->first_offset;
        int32_t count = f->context_count;
        if (example->answer_count == 0 || example->impossible) {
            assert_true(f->start == 0 && f->end == 0);
            continue;
        }
        const struct squad_answer *answer = &example->answers[0];
        int32_t begin = answer->start;
        int32_t end = begin + codepoints_count(answer->text, strlen(answer->text));
        bool inside = count > 0 && starts[0] <= begin && ends[count - 1] >= end;
        assert_int_equal(inside, f->start != 0);
        if (!inside) {
            assert_int_equal(f->end, 0);
            continue;
        }
        int32_t first = f->start - f->context_first, last = f->end - f->context_first;
        assert_true(first >= 0 && first <= last && last < count);
        assert_true(starts[first] <= begin && ends[last] >= end);
        assert_true(first + 1 >= count || starts[first + 1] > begin || first == last ||
                    starts[first + 1] == starts[first]);
    }
}

static void build_and_check(struct feature_set *set, const struct squad_data *data,
                            const struct wordpiece *tok, const struct feature_options *options)
{
    assert_int_equal(features_build(set, data, tok, options), ST_OK);
    check_windows(set, data, tok, options);
    check_labels(set, data);
}

/* ---- properties ------------------------------------------------------------------------------ */

static void b98_every_context_token_is_in_a_window(void **state)
{
    (void)state;
    struct squad_data data = {0};
    struct feature_set set = {0};
    static const struct feature_options some[] = {
        {384, 128, 0, false}, {128, 64, 0, false}, {128, 0, 0, false}, {80, 30, 0, false},
        {47, 1, 0, false},    {64, 20, 16, false}, {64, 44, 8, false}};
    load_squad(&data, "squad-train-v1.1-part");
    for (size_t i = 0; i < sizeof some / sizeof some[0]; i++)
        build_and_check(&set, &data, &toks[i % 2], &some[i]);
    features_release(&set);
    squad_release(&data);
}

static void b98_a_stride_as_large_as_the_room_names_the_question(void **state)
{
    (void)state;
    struct made made = {0};
    struct feature_set set = {0};
    make_add(&made, "one", "a b", NULL, 0);
    make_add(&made, "one two three four", "a b c d e f g h i j k l m n", NULL, 0);
    /* 16 - 3 - 4 leaves room for 9 context tokens. */
    struct feature_options options = {.max_length = 16, .doc_stride = 9};
    assert_int_equal(features_build(&set, &made.data, &toks[0], &options), ST_INVALID);
    assert_non_null(strstr(status_message(), "question id1: doc_stride 9"));
    assert_null(set.memory);
    options.doc_stride = 8;
    build_and_check(&set, &made.data, &toks[0], &options);
    assert_int_equal(set.feature_count, 1 + 6);
    /* A context that fits needs no stride. */
    options = (struct feature_options){.max_length = 21, .doc_stride = 128};
    build_and_check(&set, &made.data, &toks[0], &options);
    assert_int_equal(set.feature_count, 2);
    options = (struct feature_options){.max_length = 7, .doc_stride = 0};
    assert_int_equal(features_build(&set, &made.data, &toks[0], &options), ST_INVALID);
    assert_non_null(strstr(status_message(), "question id1: its 4 tokens leave no room"));
    options.max_query_length = 2;
    build_and_check(&set, &made.data, &toks[0], &options);
    features_release(&set);
    status_clear();
}

static void b98_bad_options_are_invalid(void **state)
{
    (void)state;
    struct made made = {0};
    struct feature_set set = {0};
    static const struct feature_options bad[] = {{3, 0, 0, false},           {-1, 0, 0, false},
                                                 {INT64_MAX, 0, 0, false},   {384, -1, 0, false},
                                                 {384, INT64_MAX, 0, false}, {384, 128, -1, false}};
    make_add(&made, "one", "a b", NULL, 0);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        assert_int_equal(features_build(&set, &made.data, &toks[0], &bad[i]), ST_INVALID);
    status_clear();
}

static void b99_b101_b102_labels_of_all_answers_cover_them_and_are_in_range(void **state)
{
    (void)state;
    static const char *const names[] = {"squad-dev-v1.1", "squad-dev-v2.0"};
    for (int n = 0; n < 2; n++) {
        struct squad_data data = {0};
        struct feature_set set = {0};
        load_squad(&data, names[n]);
        /* Let each answer be the first once: label, then drop the first where there are more. */
        for (bool more = true; more;) {
            more = false;
            assert_int_equal(features_build(&set, &data, &toks[n], &usual), ST_OK);
            check_labels(&set, &data);
            for (int64_t i = 0; i < data.example_count; i++)
                if (data.examples[i].answer_count > 1) {
                    data.examples[i].answers++;
                    data.examples[i].answer_count--;
                    more = true;
                }
        }
        features_release(&set);
        squad_release(&data);
    }
}

static void b99_b101_answers_at_the_edges_are_in_range(void **state)
{
    (void)state;
    struct made made = {0};
    struct feature_set set = {0};
    static const char text[] = "unaffable one two";
    make_add(&made, "q", text, "una", 0);               /* a part of the first token */
    make_add(&made, "q", text, "two", 14);              /* the last token */
    make_add(&made, "q", text, text, 0);                /* all of it */
    make_add(&made, "q", text, "o beyond the end", 16); /* wrong: ends outside */
    make_add(&made, "q", text, "far", 1000000);         /* wrong: begins outside */
    make_add(&made, "q", text, "before", -5);           /* wrong: begins before */
    make_add(&made, "q", text, "", 13);                 /* nothing, between two tokens */
    make_add(&made, "q", "x \ud55c y", "\ud55c", 2);    /* one character, three tokens */
    build_and_check(&set, &made.data, &toks[0], &usual);
    assert_int_equal(set.features[0].start, 3);
    assert_int_equal(set.features[1].end, set.features[1].token_count - 2);
    assert_int_equal(set.features[2].start, 3);
    assert_int_equal(set.features[2].end, set.features[2].token_count - 2);
    for (int i = 3; i < 6; i++)
        assert_int_equal(set.features[i].start, 0);
    for (int64_t length = 5; length < 12; length++) {
        struct feature_options options = {.max_length = length};
        build_and_check(&set, &made.data, &toks[0], &options);
        options.doc_stride = length - 5;
        build_and_check(&set, &made.data, &toks[0], &options);
    }
    features_release(&set);
}

static void an_empty_question_or_context_is_one_window(void **state)
{
    (void)state;
    struct made made = {0};
    struct feature_set set = {0};
    make_add(&made, "", "one two", "two", 4);
    make_add(&made, "what", " \t\n\u3000 ", "\u3000", 3);
    make_add(&made, " \n", "", "", 0);
    build_and_check(&set, &made.data, &toks[0], &usual);
    assert_int_equal(set.feature_count, 3);
    assert_int_equal(set.features[0].token_count, 3 + 2);
    assert_int_equal(set.features[0].start, 3);
    assert_int_equal(set.features[1].token_count, 3 + 1);
    assert_int_equal(set.features[1].context_count, 0);
    assert_int_equal(set.features[1].start, 0);
    assert_int_equal(set.features[2].token_count, 3);
    features_release(&set);
}

/* ---- size ------------------------------------------------------------------------------------ */

static void a_context_of_a_million_tokens_is_cut(void **state)
{
    (void)state;
    enum { WORDS = 1000 * 1000 };
    char *context;
    struct made made = {0};
    struct feature_set set = {0};
    assert_int_equal(mem_alloc(&context, 2 * WORDS + 1), ST_OK);
    for (int i = 0; i < WORDS; i++)
        memcpy(context + 2 * i, "a ", 2);
    make_add(&made, "why", context, "a", 2 * (WORDS - 1));
    build_and_check(&set, &made.data, &toks[0], &usual);
    /* room 380, step 252 */
    assert_int_equal(set.feature_count, 1 + (WORDS - 380 + 251) / 252);
    const struct feature *last = &set.features[set.feature_count - 1];
    assert_int_equal(last->start, last->token_count - 2);
    features_release(&set);
    mem_free(&context);
}

/* The context is tokenized once: ten thousand questions about 200 KB would be 2 GB of text. */
static void thousands_of_questions_about_one_context_take_linear_time(void **state)
{
    (void)state;
    enum { QUESTIONS = 10000, BYTES = 200000 };
    char *context;
    struct squad_data data = {.example_count = QUESTIONS, .context_count = 1};
    struct feature_set set = {0};
    assert_int_equal(mem_alloc(&context, BYTES + 1), ST_OK);
    assert_int_equal(mem_alloc(&data.examples, QUESTIONS * sizeof *data.examples), ST_OK);
    memset(context, ' ', BYTES);
    memcpy(context, "the answer", 10);
    for (int64_t i = 0; i < QUESTIONS; i++)
        data.examples[i] = (struct squad_example){
            .id = "x", .question = "what is it?", .context = context, .title = ""};
    double begin = clock_s();
    assert_int_equal(features_build(&set, &data, &toks[0], &usual), ST_OK);
    assert_true(clock_s() - begin < 2.0);
    assert_int_equal(set.feature_count, QUESTIONS);
    assert_int_equal(set.offset_count, 2);
    features_release(&set);
    mem_free(&data.examples);
    mem_free(&context);
}

static void every_failed_allocation_is_reported(void **state)
{
    (void)state;
    struct made made = {0};
    int64_t live = mem_live_bytes();
    make_add(&made, "one", "a b c", "c", 4);
    for (int k = 1;; k++) {
        struct feature_set set = {0};
        struct file_text text = {0};
        mem_fail_at(k);
        enum status st = features_build(&set, &made.data, &toks[0], &usual);
        if (st == ST_OK)
            st = features_tsv(&text, &set, &made.data);
        mem_fail_at(0);
        mem_free(&text.data);
        features_release(&set);
        assert_int_equal(mem_live_bytes(), live);
        if (st == ST_OK) {
            assert_true(k > 5);
            break;
        }
        assert_int_equal(st, ST_MEMORY);
    }
    status_clear();
}

/* ---- the cache ------------------------------------------------------------------------------- */

struct cache_fixture {
    char dir[64], path[256];
    struct made made;
    struct feature_set built;
};

static void cache_begin(struct cache_fixture *c)
{
    char root[] = "/tmp/tessera-cache-XXXXXX", name[FEATURES_CACHE_NAME_BYTES];
    *c = (struct cache_fixture){0};
    assert_non_null(mkdtemp(root));
    snprintf(c->dir, sizeof c->dir, "%s/deep", root);
    make_add(&c->made, "who", "one two three four five six", "two", 4);
    make_add(&c->made, "what", "seven eight", NULL, 0);
    features_cache_name(name, &c->made.data, &toks[0], &usual);
    snprintf(c->path, sizeof c->path, "%s/%s", c->dir, name);
    assert_int_equal(features_build(&c->built, &c->made.data, &toks[0], &usual), ST_OK);
    log_set_level(LOG_ERROR); /* the warnings are expected */
}

static void cache_end(struct cache_fixture *c)
{
    log_set_level(LOG_INFO);
    features_release(&c->built);
    unlink(c->path);
    rmdir(c->dir);
    *strrchr(c->dir, '/') = '\0';
    assert_int_equal(rmdir(c->dir), 0); /* nothing else was left there */
}

/* Load or build, and compare with what was built without a cache. */
static bool get(struct cache_fixture *c)
{
    struct feature_set set = {0};
    bool from_cache;
    assert_int_equal(
        features_load_or_build(&set, &c->made.data, &toks[0], &usual, c->dir, &from_cache), ST_OK);
    size_t bytes;
    assert_int_equal(features_block_bytes(&bytes, &c->built), ST_OK);
    assert_int_equal(set.feature_count, c->built.feature_count);
    assert_int_equal(set.token_count, c->built.token_count);
    assert_int_equal(set.offset_count, c->built.offset_count);
    assert_int_equal(set.example_count, c->built.example_count);
    assert_memory_equal(set.features, c->built.features, bytes - FEATURES_HEADER_BYTES);
    features_release(&set);
    assert_string_equal(status_message(), "");
    return from_cache;
}

static void the_cache_gives_what_was_built(void **state)
{
    (void)state;
    struct cache_fixture c;
    cache_begin(&c);
    assert_false(get(&c));
    assert_true(get(&c));
    assert_true(get(&c));
    cache_end(&c);
}

static void the_cache_is_found_without_the_data(void **state)
{
    (void)state;
    struct cache_fixture c;
    struct feature_set set = {0};
    bool found = true;
    cache_begin(&c);
    uint64_t hash = c.made.data.content_hash;
    assert_int_equal(features_find(&set, hash, &toks[0], &usual, c.dir, &found), ST_OK);
    assert_false(found);
    assert_null(set.memory);
    assert_false(get(&c));
    assert_int_equal(features_find(&set, hash + 1, &toks[0], &usual, c.dir, &found), ST_OK);
    assert_false(found);
    assert_int_equal(features_find(&set, hash, &toks[0], &usual, c.dir, &found), ST_OK);
    assert_true(found);
    assert_int_equal(set.example_count, c.built.example_count);
    assert_int_equal(set.token_count, c.built.token_count);
    features_release(&set);
    cache_end(&c);
}

static void a_cache_of_other_content_or_options_has_another_name(void **state)
{
    (void)state;
    struct squad_data data = {.content_hash = 1}, other = {.content_hash = 2};
    static const struct feature_options options[] = {
        {384, 128, 0, false}, {383, 128, 0, false}, {384, 127, 0, false}, {384, 128, 64, false}};
    struct wordpiece cased_flag = toks[0];
    cased_flag.cased = true;
    const struct feature_options checked = {384, 128, 0, true};
    char names[8][FEATURES_CACHE_NAME_BYTES];
    for (int i = 0; i < 4; i++)
        features_cache_name(names[i], &data, &toks[0], &options[i]);
    features_cache_name(names[4], &other, &toks[0], &usual);
    features_cache_name(names[5], &data, &toks[1], &usual);
    features_cache_name(names[6], &data, &cased_flag, &usual);
    features_cache_name(names[7], &data, &toks[0], &checked);
    for (int i = 0; i < 8; i++) {
        assert_int_equal(strlen(names[i]), 32 + strlen(".features"));
        for (int j = 0; j < i; j++)
            assert_string_not_equal(names[i], names[j]);
    }
}

static void put_file(const char *path, const char *data, size_t bytes)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}

/* A bit in every byte of the header that means something, and in every fifth byte behind it. */
static void a_damaged_or_cut_cache_file_is_built_again(void **state)
{
    (void)state;
    struct cache_fixture c;
    struct file_text good;
    cache_begin(&c);
    assert_false(get(&c));
    assert_int_equal(file_read(&good, c.path), ST_OK);
    for (size_t i = 0; i < good.bytes; i += i < 79 ? 1 : i == 79 ? 49 : 5) {
        char bit = (char)(1 << (i % 8));
        good.data[i] ^= bit;
        put_file(c.path, good.data, good.bytes);
        good.data[i] ^= bit;
        assert_false(get(&c));
    }
    for (size_t bytes = 0; bytes < good.bytes; bytes += 31) {
        put_file(c.path, good.data, bytes);
        assert_false(get(&c));
    }
    put_file(c.path, good.data, good.bytes);
    assert_true(get(&c));
    mem_free(&good.data);
    cache_end(&c);
}

static void a_cache_that_cannot_be_written_is_no_failure(void **state)
{
    (void)state;
    struct cache_fixture c;
    cache_begin(&c);
    for (int k = 1; k < 20; k++) { /* k-th system call; the first ones fail the write */
        file_fail_at(k);
        get(&c);
        file_fail_at(0);
        unlink(c.path);
    }
    assert_false(get(&c));
    assert_true(get(&c));
    cache_end(&c);

    struct feature_set set = {0};
    struct made made = {0};
    bool from_cache = true;
    make_add(&made, "who", "one two", "two", 4);
    log_set_level(LOG_ERROR);
    assert_int_equal(features_load_or_build(&set, &made.data, &toks[0], &usual,
                                            "/dev/null/not-a-folder", &from_cache),
                     ST_OK);
    assert_false(from_cache);
    assert_int_equal(features_load_or_build(&set, &made.data, &toks[0], &usual, "", NULL), ST_OK);
    assert_int_equal(set.feature_count, 1);
    log_set_level(LOG_INFO);
    features_release(&set);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_line_of_dev_v1_uncased_agrees),
        cmocka_unit_test(every_line_of_dev_v1_cased_agrees),
        cmocka_unit_test(every_line_of_dev_v2_uncased_agrees),
        cmocka_unit_test(every_line_of_the_training_files_agrees),
        cmocka_unit_test(b98_every_context_token_is_in_a_window),
        cmocka_unit_test(b98_a_stride_as_large_as_the_room_names_the_question),
        cmocka_unit_test(b98_bad_options_are_invalid),
        cmocka_unit_test(b99_b101_b102_labels_of_all_answers_cover_them_and_are_in_range),
        cmocka_unit_test(b99_b101_answers_at_the_edges_are_in_range),
        cmocka_unit_test(an_empty_question_or_context_is_one_window),
        cmocka_unit_test(a_context_of_a_million_tokens_is_cut),
        cmocka_unit_test(thousands_of_questions_about_one_context_take_linear_time),
        cmocka_unit_test(every_failed_allocation_is_reported),
        cmocka_unit_test(the_cache_gives_what_was_built),
        cmocka_unit_test(the_cache_is_found_without_the_data),
        cmocka_unit_test(a_cache_of_other_content_or_options_has_another_name),
        cmocka_unit_test(a_damaged_or_cut_cache_file_is_built_again),
        cmocka_unit_test(a_cache_that_cannot_be_written_is_no_failure),
    };
    return cmocka_run_group_tests(tests, load_all, release_all);
}
