#include "engine/base/config.h"

#include <dirent.h>
#include <float.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/config_table.h"
#include "engine/base/file.h"
#include "tests/support/support.h"

/* Parse YAML that is written here, as if it were the file x.yaml. */
static enum status load(struct run_config *config, const char *yaml)
{
    config_defaults(config);
    return config_read_yaml(config, yaml, strlen(yaml), "x.yaml");
}

#define assert_refuses(yaml, message) assert_fails(load(&c, (yaml)), ST_INVALID, (message))

static void defaults_are_bert_base_and_pass_the_check(void **state)
{
    (void)state;
    struct run_config c;
    assert_ok(config_load(&c, NULL, NULL, 0));
    assert_ok(config_check(&c));
    assert_int_equal(c.model.vocab_size, 30522);
    assert_int_equal(c.model.hidden, 768);
    assert_int_equal(c.model.ffn, 3072);
    assert_true(c.model.norm_eps == 1e-12);
    assert_int_equal(c.data.max_length, 384);
    assert_int_equal(c.train.steps, -1);
    assert_true(c.train.overlap);
    assert_int_equal(c.train.reduce, REDUCE_AUTO);
    assert_true(c.optim.lr == 3e-5);
    assert_int_equal(c.optim.schedule, SCHEDULE_LINEAR);
    assert_string_equal(c.output.dir, "runs/run");
}

static void every_row_of_the_table_is_a_member_of_its_own(void **state)
{
    (void)state;
    static unsigned char owner[sizeof(struct run_config)];
    static const size_t sizes[] = {[FIELD_INT] = sizeof(int64_t),
                                   [FIELD_REAL] = sizeof(double),
                                   [FIELD_BOOL] = sizeof(bool),
                                   [FIELD_CHOICE] = sizeof(int),
                                   [FIELD_TEXT] = CONFIG_TEXT_BYTES};
    size_t covered = 0;
    for (int i = 0; i < config_field_count; i++) {
        const struct config_field *f = &config_fields[i];
        assert_true(f->offset + sizes[f->kind] <= sizeof owner);
        for (size_t j = 0; j < sizes[f->kind]; j++)
            assert_int_equal(owner[f->offset + j]++, 0);
        covered += sizes[f->kind];
        assert_ptr_equal(field_find(f->section, f->name), f);
        assert_int_equal(f->doc[strlen(f->doc) - 1], '.');
    }
    /* What is not covered is padding: a member without a row would be more than that. */
    assert_true(sizeof owner - covered < 64);
}

static void a_file_sets_what_it_names_and_sets_come_last(void **state)
{
    (void)state;
    struct run_config c;
    struct scratch scratch;
    char path[512];
    static const char yaml[] = "# a comment\n"
                               "train:\n"
                               "  zero_stage: 3 # another\n"
                               "  reduce: per_micro_batch\n"
                               "  overlap: no\n"
                               "optim: {lr: 3e-5, beta1: .5}\n"
                               "data:\n"
                               "  train: 'data/it''s.json'\n"
                               "  eval: \"a\\tb \\u20AC\"\n"
                               "  vocab: ~\n"
                               "  cache_dir:\n"
                               "eval:\n";
    static const char *const sets[] = {"train.zero_stage=2", "data.vocab=a=b # c",
                                       "train.zero_stage=1", "output.dir="};
    scratch_make(&scratch);
    scratch_put(&scratch, path, "x.yaml", yaml, sizeof yaml - 1);
    assert_ok(config_load(&c, path, sets, 4));
    scratch_remove(&scratch);
    assert_int_equal(c.train.zero_stage, 1);
    assert_int_equal(c.train.reduce, REDUCE_PER_MICRO_BATCH);
    assert_false(c.train.overlap);
    assert_true(c.optim.lr == 3e-5);
    assert_true(c.optim.beta1 == 0.5);
    assert_string_equal(c.data.train, "data/it's.json");
    assert_string_equal(c.data.eval, "a\tb \xE2\x82\xAC");
    assert_string_equal(c.data.vocab, "a=b # c");
    assert_string_equal(c.data.cache_dir, "");
    assert_string_equal(c.output.dir, "");
}

static void empty_files_and_byte_order_marks_are_fine(void **state)
{
    (void)state;
    struct run_config c, defaults;
    static const char *const same[] = {"",   "# nothing\n", "---\n",       "---\n...\n",
                                       "{}", "~",           "\xEF\xBB\xBF"};
    config_defaults(&defaults);
    for (size_t i = 0; i < sizeof same / sizeof same[0]; i++) {
        assert_ok(load(&c, same[i]));
        assert_memory_equal(&c, &defaults, sizeof c);
    }
    assert_ok(load(&c, "\xEF\xBB\xBFtrain:\r\n  ranks: 3\r\n"));
    assert_int_equal(c.train.ranks, 3);
}

static void wrong_values_name_file_line_key_and_what_is_accepted(void **state)
{
    (void)state;
    struct run_config c;
    assert_refuses(
        "model:\n  hidden: 64\ntrain:\n\n  zero_stage: 4\n",
        "x.yaml:5: train.zero_stage: expected an integer from 0 to 3, or auto, found \"4\"");
    assert_refuses("train: {ranks: two}", "x.yaml:1: train.ranks: expected an integer from 1");
    assert_refuses("train: {ranks: 2.0}", "found \"2.0\"");
    assert_refuses("train: {ranks: }", "x.yaml:1: train.ranks: expected an integer from 1");
    assert_refuses("train: {steps: -2}", "expected an integer of at least -1, found \"-2\"");
    assert_refuses("train: {steps: 9223372036854775808}", "train.steps: expected an integer");
    assert_refuses("train: {overlap: 1}", "train.overlap: expected true or false, found \"1\"");
    assert_refuses("optim: {lr: fast}", "optim.lr: expected a number of at least 0");
    assert_refuses("optim: {lr: .nan}", "optim.lr: expected a number of at least 0");
    assert_refuses("optim: {lr: .inf}", "optim.lr: expected a number of at least 0");
    assert_refuses("optim: {lr: -1e-9}", "optim.lr: expected a number of at least 0");
    assert_refuses("optim: {eps: 0}", "optim.eps: expected a number above 0");
    assert_refuses("optim: {warmup_ratio: 1.01}", "expected a number from 0 to 1");
    assert_refuses("eval: {n_best: 101}", "expected an integer from 1 to 100");
    assert_refuses(
        "model: {hidden_dropout: 1}",
        "model.hidden_dropout: expected a number of at least 0 and below 1, found \"1\"");
    assert_refuses("train: {reduce: Per_step}",
                   "train.reduce: expected auto, per_step or per_micro_batch, found \"Per_step\"");
    assert_refuses("optim:\n  schedule:\n    - linear\n",
                   "x.yaml:3: optim.schedule: expected one value, found a list");
    assert_refuses("optim: {schedule: {a: b}}", "expected one value, found a mapping");
    assert_refuses("data: {train: \"a\\0b\"}", "data.train: the text holds a zero byte");
    assert_refuses("train: 3", "x.yaml:1: section train: expected \"key: value\" lines, found a "
                               "single value");
    assert_refuses("train: [a]", "section train: expected \"key: value\" lines, found a list");
    assert_refuses("- a\n", "x.yaml:1: expected sections (\"train:\") with keys, found a list");
    assert_refuses("words", "expected sections (\"train:\") with keys, found a single value");
}

static void wrong_values_leave_the_old_ones(void **state)
{
    (void)state;
    struct run_config c, defaults;
    config_defaults(&c);
    config_defaults(&defaults);
    assert_fails(
        config_set(&c, "train.zero_stage=9", "--zero-stage"), ST_INVALID,
        "--zero-stage: train.zero_stage: expected an integer from 0 to 3, or auto, found \"9\"");
    assert_memory_equal(&c, &defaults, sizeof c);
}

static void a_word_beside_numbers_is_read_and_written(void **state)
{
    (void)state;
    struct run_config c;
    char *text = NULL;
    size_t bytes = 0;
    config_defaults(&c);
    assert_ok(config_set(&c, "train.zero_stage=auto", "--set"));
    assert_int_equal(c.train.zero_stage, ZERO_STAGE_AUTO);
    assert_ok(config_check(&c));
    assert_ok(config_write(&c, &text, &bytes));
    assert_non_null(strstr(text, "  zero_stage: auto\n"));
    mem_free(&text);
    assert_fails(config_set(&c, "train.zero_stage=-1", "--set"), ST_INVALID, "or auto");
    assert_fails(config_set(&c, "train.ranks=auto", "--set"), ST_INVALID,
                 "expected an integer from 1 to 4096, found");
}

static void unknown_and_repeated_names_are_refused_and_near_ones_suggested(void **state)
{
    (void)state;
    struct run_config c;
    assert_refuses("train:\n  zero_stag: 3\n", "x.yaml:2: unknown key \"train.zero_stag\"; did "
                                               "you mean \"train.zero_stage\"?");
    assert_refuses("trian: {}\n", "x.yaml:1: unknown section \"trian\"; did you mean \"train\"?");
    assert_refuses("watermelon: {}\n", "unknown section \"watermelon\" (docs/configuration.md");
    assert_refuses("train: {watermelon: 3}\n", "unknown key \"train.watermelon\" (docs/");
    assert_refuses("train: {ranks: 1, lr: 3}\n", "unknown key \"train.lr\"");
    assert_refuses("train:\n  ranks: 1\n  seed: 2\n  ranks: 1\n",
                   "x.yaml:4: train.ranks: already given on line 2");
    assert_refuses("train:\n  ranks: 1\ntrain:\n  seed: 2\n",
                   "x.yaml:3: section train: already given on line 1");
    assert_refuses("? [a]\n: b\n", "section: expected one value, found a list");
    assert_refuses("\"train\\0x\": {}\n", "holds a zero byte");
    config_defaults(&c);
    assert_fails(config_set(&c, "train.zero_stag=3", "--set"), ST_INVALID,
                 "--set: unknown key \"train.zero_stag\"; did you mean \"train.zero_stage\"?");
    assert_fails(config_set(&c, "zero_stage=3", "--set"), ST_INVALID,
                 "did you mean \"train.zero_stage\"?");
    assert_fails(config_set(&c, "train.=3", "--set"), ST_INVALID, "unknown key \"train.\"");
    assert_fails(config_set(&c, "=3", "--set"), ST_INVALID, "unknown key \"\"");
    assert_fails(config_set(&c, "train.ranks", "--set"), ST_INVALID,
                 "--set: expected section.key=value, found \"train.ranks\"");
}

static void yaml_beyond_sections_and_keys_is_refused(void **state)
{
    (void)state;
    struct run_config c;
    assert_refuses("train: &base\n  ranks: 2\n", "x.yaml:1: anchors (&base) are not supported");
    assert_refuses("train:\n  ranks: &n 2\n", "x.yaml:2: anchors (&n) are not supported");
    assert_refuses("train:\n  ranks: *n\n", "x.yaml:2: aliases (*n) are not supported");
    assert_refuses("train:\n  ranks: !!int 2\n", "x.yaml:2: tags (tag:yaml.org,2002:int)");
    assert_refuses("train: {}\n---\ntrain: {}\n", "x.yaml:2: a second document begins");
}

static void broken_yaml_names_line_and_column(void **state)
{
    (void)state;
    struct run_config c;
    assert_refuses("train:\n  ranks: 1\n seed: 2\n", "x.yaml:3:2: did not find expected key");
    assert_refuses("train: {ranks: 1\n", "x.yaml:2:1: did not find expected ',' or '}'");
    assert_refuses("train:\n\tranks: 1\n", "x.yaml:2:1: found character that cannot start");
    assert_refuses("data: {train: \"abc\n", "found unexpected end of stream");
    assert_refuses("train: \xFF\n", "x.yaml: byte 7: invalid leading UTF-8 octet");
    assert_refuses("train: \x01\n", "control characters are not allowed");
}

static void the_last_line_need_not_end_and_deep_nesting_is_refused_at_once(void **state)
{
    (void)state;
    struct run_config c;
    static char deep[100001];
    memset(deep, '[', sizeof deep - 1);
    assert_refuses(deep, "found a list");
    memset(deep, '{', sizeof deep - 1);
    assert_refuses(deep, "expected one value, found a mapping");
    assert_ok(load(&c, "train:\n  ranks: 3"));
    assert_int_equal(c.train.ranks, 3);
}

static void texts_fit_or_are_refused(void **state)
{
    (void)state;
    struct run_config c;
    char set[700];
    config_defaults(&c);
    snprintf(set, sizeof set, "data.train=%0*d", CONFIG_TEXT_BYTES - 1, 0);
    assert_ok(config_set(&c, set, "--set"));
    assert_int_equal(strlen(c.data.train), CONFIG_TEXT_BYTES - 1);
    snprintf(set, sizeof set, "data.train=%0*d", CONFIG_TEXT_BYTES, 0);
    assert_fails(config_set(&c, set, "--set"), ST_INVALID,
                 "data.train: expected UTF-8 text of at most 511 bytes, found 512 bytes \"000");
    assert_fails(config_set(&c, "data.train=\xC3(", "--set"), ST_INVALID, "expected UTF-8 text");
}

static void files_that_cannot_be_read_are_named(void **state)
{
    (void)state;
    struct run_config c;
    assert_fails(config_load(&c, "no/such.yaml", NULL, 0), ST_IO, "no/such.yaml: No such file");
    assert_fails(config_load(&c, "tests", NULL, 0), ST_IO, "tests: is a folder");
}

static void checks_name_the_keys_and_values_that_disagree(void **state)
{
    (void)state;
    static const struct {
        const char *sets[4];
        const char *message;
    } cases[] = {
        {{"model.heads=7"}, "model.hidden 768 is not a multiple of model.heads 7"},
        {{"data.max_length=513"}, "data.max_length 513 is above model.max_positions 512"},
        {{"data.doc_stride=384"}, "data.doc_stride 384 must be below data.max_length 384"},
        {{"data.max_query_length=381"}, "data.max_query_length 381 leaves no room"},
        {{"train.zero_stage=2", "train.reduce=per_step"},
         "train.reduce per_step would hold full gradients for the whole step, which "
         "train.zero_stage 2 partitions"},
        {{"train.zero_stage=3", "train.reduce=per_step"}, "train.zero_stage 3"},
        {{"train.micro_batch=1048576", "train.ranks=4096"}, "more than 2147483647 sequences"},
        {{"train.device=cpu", "train.precision=bf16"}, "train.precision bf16"},
        {{"train.device=cpu", "train.comm=nccl"}, "train.comm nccl"},
        {{"eval.stop_metric=f1"}, "eval.stop_metric needs evaluation questions"},
    };
    struct run_config c;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int count = 0;
        while (count < 4 && cases[i].sets[count] != NULL)
            count++;
        assert_ok(config_load(&c, NULL, cases[i].sets, count));
        assert_fails(config_check(&c), ST_INVALID, cases[i].message);
    }
    assert_ok(config_load(&c, NULL,
                          (const char *const[]){"train.zero_stage=1", "train.reduce=per_step"}, 2));
    assert_ok(config_check(&c));
}

/* A text of random code points: plain ones, and those that YAML folds, escapes or refuses. */
static void random_text(char *out, size_t out_bytes, uint64_t *random)
{
    static const char *const odd[] = {"\"",
                                      "\\",
                                      "\n",
                                      "\r",
                                      "\t",
                                      " ",
                                      "  ",
                                      "#",
                                      ": ",
                                      "\x01",
                                      "\x7F",
                                      "\xC2\x85",
                                      "\xC2\xA0",
                                      "\xE2\x80\xA8",
                                      "\xE2\x80\xA9",
                                      "\xEF\xBB\xBF",
                                      "\xEF\xBF\xBE",
                                      "\xF0\x9F\x98\x80",
                                      "'",
                                      "---",
                                      "\xC3\xA9",
                                      "\xE2\x82\xAC",
                                      "%",
                                      "{",
                                      "]",
                                      "&a",
                                      "*a",
                                      "!",
                                      "~"};
    size_t used = 0;
    uint64_t pieces = test_random(random) % 40;
    out[0] = '\0';
    for (uint64_t i = 0; i < pieces; i++) {
        char letter[2] = {(char)('a' + test_random(random) % 26), '\0'};
        const char *piece = test_random(random) % 2 == 0
                                ? letter
                                : odd[test_random(random) % (sizeof odd / sizeof odd[0])];
        if (used + strlen(piece) >= out_bytes)
            return;
        used += (size_t)snprintf(out + used, out_bytes - used, "%s", piece);
    }
}

static double random_real(const struct config_field *f, uint64_t *random)
{
    for (;;) {
        uint64_t bits = test_random(random);
        double value;
        memcpy(&value, &bits, sizeof value);
        if (f->real_max <= 1.0)
            value = (double)(bits >> 11) / 9007199254740992.0;
        if (value > f->real_min && value < f->real_max) /* false for a NaN */
            return value;
    }
}

static void randomize(struct run_config *config, uint64_t *random)
{
    config_defaults(config);
    for (int i = 0; i < config_field_count; i++) {
        const struct config_field *f = &config_fields[i];
        void *at = (char *)config + f->offset;
        uint64_t r = test_random(random);
        int choices = 0;
        switch (f->kind) {
        case FIELD_INT:
            *(int64_t *)at =
                f->int_min + (int64_t)(r % ((uint64_t)f->int_max - (uint64_t)f->int_min));
            break;
        case FIELD_REAL:
            *(double *)at = random_real(f, random);
            break;
        case FIELD_BOOL:
            *(bool *)at = r % 2 == 0;
            break;
        case FIELD_CHOICE:
            while (f->choices[choices] != NULL)
                choices++;
            *(int *)at = (int)(r % (uint64_t)choices);
            break;
        case FIELD_TEXT:
            random_text(at, CONFIG_TEXT_BYTES, random);
            break;
        }
    }
}

static void what_is_written_loads_back_to_the_same_struct(void **state)
{
    (void)state;
    static struct run_config c, back;
    uint64_t random = test_seed();
    for (int round = 0; round < 300; round++) {
        char *text;
        size_t bytes;
        randomize(&c, &random);
        /* Also the longest text possible, all escapes. */
        if (round == 0) {
            memset(c.data.train, '\x01', CONFIG_TEXT_BYTES - 1);
            c.data.train[CONFIG_TEXT_BYTES - 1] = '\0';
        }
        assert_ok(config_write(&c, &text, &bytes));
        assert_int_equal(strlen(text), bytes);
        config_defaults(&back);
        enum status st = config_read_yaml(&back, text, bytes, "written.yaml");
        if (st != ST_OK)
            print_error("%s\n", text);
        assert_ok(st);
        mem_free(&text);
        for (int i = 0; i < config_field_count; i++) {
            const struct config_field *f = &config_fields[i];
            char a[FIELD_TEXT_BYTES], b[FIELD_TEXT_BYTES];
            field_format(f, &c, a, sizeof a);
            field_format(f, &back, b, sizeof b);
            assert_string_equal(a, b);
            if (f->kind == FIELD_TEXT) /* beyond the end nothing is compared */
                memcpy((char *)&c + f->offset, (char *)&back + f->offset, CONFIG_TEXT_BYTES);
        }
        assert_memory_equal(&c, &back, sizeof c);
    }
}

static void any_cut_or_flipped_byte_of_a_file_is_read_or_refused(void **state)
{
    (void)state;
    struct run_config c;
    char *text;
    size_t bytes;
    uint64_t random = test_seed();
    config_defaults(&c);
    assert_ok(config_write(&c, &text, &bytes));
    for (int round = 0; round < 2000; round++) {
        size_t at = test_random(&random) % bytes;
        char old = text[at];
        text[at] = (char)test_random(&random);
        size_t cut = round % 2 == 0 ? bytes : test_random(&random) % bytes;
        config_defaults(&c);
        enum status st = config_read_yaml(&c, text, cut, "damaged.yaml");
        assert_true(st == ST_OK || st == ST_INVALID);
        text[at] = old;
    }
    mem_free(&text);
}

static void failing_allocations_are_reported_and_leak_nothing(void **state)
{
    (void)state;
    struct run_config c;
    char *text = NULL;
    size_t bytes;
    int64_t before = mem_live_bytes();
    config_defaults(&c);
    enum status st = ST_MEMORY;
    for (int64_t k = 1; st != ST_OK; k++) {
        mem_fail_at(k);
        st = config_write(&c, &text, &bytes);
        mem_fail_at(0);
        if (st != ST_OK) {
            assert_fails(st, ST_MEMORY, "out of memory");
            assert_null(text);
            assert_int_equal(mem_live_bytes(), before);
        }
        assert_true(k < 50);
    }
    mem_free(&text);
}

static void the_document_is_up_to_date_and_names_every_key(void **state)
{
    (void)state;
    struct file_text file;
    char *text;
    size_t bytes;
    assert_ok(config_document(&text, &bytes));
    for (int i = 0; i < config_field_count; i++) {
        char cell[100];
        snprintf(cell, sizeof cell, "| `%s` | ", config_fields[i].name);
        assert_non_null(strstr(text, cell));
        assert_non_null(strstr(text, config_fields[i].doc));
    }
    assert_ok(file_read(&file, "docs/configuration.md"));
    if (strcmp(file.data, text) != 0)
        fail_msg("docs/configuration.md is out of date: run `make docs`");
    mem_free(&file.data);
    mem_free(&text);
}

static void every_bundled_config_loads_and_passes_the_check(void **state)
{
    (void)state;
    int count = 0;
    DIR *dir = opendir("configs");
    assert_non_null(dir);
    for (const struct dirent *e = readdir(dir); e != NULL; e = readdir(dir)) {
        char path[512];
        struct run_config c;
        if (strstr(e->d_name, ".yaml") == NULL)
            continue;
        snprintf(path, sizeof path, "configs/%.200s", e->d_name);
        assert_ok(config_load(&c, path, NULL, 0));
        assert_ok(config_check(&c));
        count++;
    }
    closedir(dir);
    assert_in_range(count, 5, 1000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_are_bert_base_and_pass_the_check),
        cmocka_unit_test(every_row_of_the_table_is_a_member_of_its_own),
        cmocka_unit_test(a_file_sets_what_it_names_and_sets_come_last),
        cmocka_unit_test(empty_files_and_byte_order_marks_are_fine),
        cmocka_unit_test(wrong_values_name_file_line_key_and_what_is_accepted),
        cmocka_unit_test(wrong_values_leave_the_old_ones),
        cmocka_unit_test(a_word_beside_numbers_is_read_and_written),
        cmocka_unit_test(unknown_and_repeated_names_are_refused_and_near_ones_suggested),
        cmocka_unit_test(yaml_beyond_sections_and_keys_is_refused),
        cmocka_unit_test(broken_yaml_names_line_and_column),
        cmocka_unit_test(the_last_line_need_not_end_and_deep_nesting_is_refused_at_once),
        cmocka_unit_test(texts_fit_or_are_refused),
        cmocka_unit_test(files_that_cannot_be_read_are_named),
        cmocka_unit_test(checks_name_the_keys_and_values_that_disagree),
        cmocka_unit_test(what_is_written_loads_back_to_the_same_struct),
        cmocka_unit_test(any_cut_or_flipped_byte_of_a_file_is_read_or_refused),
        cmocka_unit_test(failing_allocations_are_reported_and_leak_nothing),
        cmocka_unit_test(the_document_is_up_to_date_and_names_every_key),
        cmocka_unit_test(every_bundled_config_loads_and_passes_the_check),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
