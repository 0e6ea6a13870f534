#include "engine/base/options.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/arena.h"
#include "engine/base/file.h"
#include "engine/base/text.h"
#include "tests/support/support.h"

/* The command under test, with every kind of option. */
struct values {
    bool padded;
    int64_t ranks, any, small;
    double lr, wild;
    const char *config;
    struct option_list sets;
};

static enum status parse(struct values *v, int argc, const char *const *args, bool *help_shown)
{
    *v = (struct values){.ranks = 2, .any = -7, .small = 1, .lr = 3e-5, .config = "default.yaml"};
    const struct option options[] = {
        {"config", OPTION_TEXT, &v->config, "FILE", "what to run", 0, 0, false},
        {"padded", OPTION_FLAG, &v->padded, NULL, "pad every sequence", 0, 0, false},
        {"ranks", OPTION_INT, &v->ranks, "N", "ranks that train together", 1, 4096, false},
        {"any-integer", OPTION_INT, &v->any, "N", "any integer at all", 0, 0, false},
        {"zero-stage", OPTION_INT, &v->small, "N", "a stage", 0, 3, false},
        {"lr", OPTION_REAL, &v->lr, "X", "the learning rate", 0, 1, false},
        {"wild", OPTION_REAL, &v->wild, "X", "any number", 0, 0, false},
        {"set", OPTION_LIST, &v->sets, "KEY=VALUE", "override a key", 0, 0, false},
    };
    const struct command command = {"train",
                                    "Train a model.",
                                    "Details stand here.",
                                    options,
                                    sizeof options / sizeof options[0],
                                    "DIR"};
    char *argv[80] = {(char *)"train"};
    for (int i = 0; i < argc; i++)
        argv[i + 1] = (char *)args[i];
    return options_parse(&command, argc + 1, argv, help_shown);
}

#define PARSE(v, ...)                                                                              \
    parse((v), (int)(sizeof((const char *[]){__VA_ARGS__}) / sizeof(char *)),                      \
          (const char *const[]){__VA_ARGS__}, &(bool){false})

static void both_spellings_and_repeats_are_understood(void **state)
{
    (void)state;
    struct values v;
    assert_ok(PARSE(&v, "--config", "a.yaml", "--ranks=4", "--lr", "1e-3", "--padded", "--set",
                    "a.b=1", "--set=c.d=x y", "--any-integer", "-9223372036854775808", "--"));
    assert_string_equal(v.config, "a.yaml");
    assert_int_equal(v.ranks, 4);
    assert_true(v.lr == 1e-3);
    assert_true(v.padded);
    assert_int_equal(v.sets.count, 2);
    assert_string_equal(v.sets.items[0], "a.b=1");
    assert_string_equal(v.sets.items[1], "c.d=x y");
    assert_true(v.any == INT64_MIN);
    assert_int_equal(v.small, 1);
}

static void values_not_given_keep_their_defaults(void **state)
{
    (void)state;
    struct values v;
    assert_ok(parse(&v, 0, NULL, &(bool){false}));
    assert_string_equal(v.config, "default.yaml");
    assert_int_equal(v.ranks, 2);
    assert_int_equal(v.any, -7);
    assert_true(v.lr == 3e-5);
    assert_false(v.padded);
}

static void an_empty_or_dashed_value_can_be_given(void **state)
{
    (void)state;
    struct values v;
    assert_ok(PARSE(&v, "--config="));
    assert_string_equal(v.config, "");
    assert_ok(PARSE(&v, "--config=--odd"));
    assert_string_equal(v.config, "--odd");
    assert_ok(PARSE(&v, "--config", "-"));
    assert_string_equal(v.config, "-");
}

static void unknown_options_name_the_nearest(void **state)
{
    (void)state;
    struct values v;
    assert_fails(PARSE(&v, "--confg", "x"), ST_INVALID,
                 "unknown option \"--confg\"; did you mean \"--config\"?");
    assert_fails(PARSE(&v, "--zero_stage=3"), ST_INVALID, "did you mean \"--zero-stage\"?");
    assert_fails(PARSE(&v, "-ranks", "3"), ST_INVALID, "did you mean \"--ranks\"?");
    assert_fails(PARSE(&v, "--watermelon"), ST_INVALID, "tessera train --help lists them");
    assert_null(strstr(status_message(), "did you mean"));
}

static void stray_arguments_are_refused(void **state)
{
    (void)state;
    struct values v;
    assert_fails(PARSE(&v, "stray"), ST_INVALID, "unexpected argument \"stray\"");
    assert_fails(PARSE(&v, "--", "--padded"), ST_INVALID, "unexpected argument \"--padded\"");
    assert_fails(PARSE(&v, "-"), ST_INVALID, "unexpected argument \"-\"");
    assert_fails(PARSE(&v, ""), ST_INVALID, "unexpected argument \"\"");
}

static void missing_and_surplus_values_are_refused(void **state)
{
    (void)state;
    struct values v;
    assert_fails(PARSE(&v, "--config"), ST_INVALID, "--config: FILE is missing");
    assert_fails(PARSE(&v, "--config", "--padded"), ST_INVALID,
                 "--config: FILE is missing before \"--padded\"");
    assert_fails(PARSE(&v, "--padded=true"), ST_INVALID, "--padded takes no value");
}

static void integers_are_whole_decimal_and_in_range(void **state)
{
    (void)state;
    static const char *const bad[] = {"",
                                      "4097",
                                      "0",
                                      "-1",
                                      "2x",
                                      "x",
                                      "1.5",
                                      "1e3",
                                      "0x10",
                                      " 3",
                                      "3 ",
                                      "--3",
                                      "+",
                                      "-",
                                      "9223372036854775808",
                                      "99999999999999999999999"};
    struct values v;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char arg[64];
        snprintf(arg, sizeof arg, "--ranks=%s", bad[i]);
        assert_fails(PARSE(&v, arg), ST_INVALID, "--ranks: expected an integer from 1 to 4096");
        assert_int_equal(v.ranks, 2);
    }
    assert_ok(PARSE(&v, "--ranks=1"));
    assert_ok(PARSE(&v, "--ranks=+4096"));
    assert_int_equal(v.ranks, 4096);
    assert_ok(PARSE(&v, "--zero-stage=0"));
    assert_int_equal(v.small, 0);
    assert_fails(PARSE(&v, "--zero-stage=4"), ST_INVALID,
                 "--zero-stage: expected an integer from 0 to 3, found \"4\"");
    assert_ok(PARSE(&v, "--any-integer=9223372036854775807"));
    assert_true(v.any == INT64_MAX);
    assert_fails(PARSE(&v, "--any-integer=9223372036854775808"), ST_INVALID,
                 "--any-integer: expected an integer, found");
}

static void reals_are_finite_decimal_and_in_range(void **state)
{
    (void)state;
    static const char *const bad[] = {"",   "x",      "nan", "inf", "-0.1",  "1.01",
                                      "1e", "0x1p-3", "1 ",  " 1",  "1e999", "."};
    struct values v;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char arg[64];
        snprintf(arg, sizeof arg, "--lr=%s", bad[i]);
        assert_fails(PARSE(&v, arg), ST_INVALID, "--lr: expected a number from 0 to 1");
        assert_true(v.lr == 3e-5);
    }
    assert_ok(PARSE(&v, "--lr", ".5", "--wild", "-1.5e300"));
    assert_true(v.lr == 0.5);
    assert_true(v.wild == -1.5e300);
}

static void a_list_has_an_end(void **state)
{
    (void)state;
    struct values v;
    const char *args[OPTION_LIST_MAX + 1];
    for (int i = 0; i <= OPTION_LIST_MAX; i++)
        args[i] = "--set=a=b";
    assert_ok(parse(&v, OPTION_LIST_MAX, args, &(bool){false}));
    assert_int_equal(v.sets.count, OPTION_LIST_MAX);
    assert_fails(parse(&v, OPTION_LIST_MAX + 1, args, &(bool){false}), ST_INVALID,
                 "--set: given more than 64 times");
}

static void required_options_are_asked_for(void **state)
{
    (void)state;
    const char *data = NULL;
    const struct option options[] = {{"data", OPTION_TEXT, &data, "FILE", "questions", 0, 0, true}};
    const struct command command = {"score", "Score.", NULL, options, 1, NULL};
    char *none[] = {(char *)"score"}, *given[] = {(char *)"score", (char *)"--data=x"};
    bool help_shown;
    assert_fails(options_parse(&command, 1, none, &help_shown), ST_INVALID,
                 "--data FILE is required (tessera score --help)");
    assert_ok(options_parse(&command, 2, given, &help_shown));
    assert_string_equal(data, "x");
}

/* Run with standard output in a file; give back what was printed. */
static void capture_help(struct file_text *printed, const char *const *args, int argc)
{
    struct scratch scratch;
    char path[512];
    struct values v;
    bool help_shown = false;
    scratch_make(&scratch);
    scratch_path(&scratch, path, "help.txt");
    fflush(stdout);
    int keep = dup(1);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    dup2(fileno(file), 1);
    enum status st = parse(&v, argc, args, &help_shown);
    fflush(stdout);
    dup2(keep, 1);
    close(keep);
    fclose(file);
    assert_ok(st);
    assert_true(help_shown);
    assert_ok(file_read(printed, path));
    scratch_remove(&scratch);
}

static void help_lists_every_option_with_its_default(void **state)
{
    (void)state;
    struct file_text text;
    /* Other arguments, also wrong ones, do not matter. */
    capture_help(&text, (const char *const[]){"--ranks", "9", "--nonsense", "--help"}, 4);
    assert_non_null(strstr(text.data, "Usage: tessera train DIR [OPTION]...\nTrain a model.\n"));
    assert_non_null(strstr(text.data, "\n      --ranks N             ranks that train together"
                                      " (default 2)\n"));
    assert_non_null(strstr(text.data, "what to run (default default.yaml)\n"));
    assert_non_null(strstr(text.data, "the learning rate (default 3e-5)\n"));
    assert_non_null(strstr(text.data, "\n      --padded              pad every sequence\n"));
    assert_non_null(strstr(text.data, "override a key (may be repeated)\n"));
    assert_non_null(strstr(text.data, "\n  -h, --help                show this help and exit\n"));
    assert_non_null(strstr(text.data, "\nDetails stand here.\n"));
    for (const char *line = text.data; *line != '\0';) {
        size_t len = strcspn(line, "\n");
        assert_true(len <= 80);
        line += len + (line[len] == '\n');
    }
    mem_free(&text.data);
}

static void help_after_the_end_of_options_is_an_argument(void **state)
{
    (void)state;
    struct values v;
    assert_fails(PARSE(&v, "--", "--help"), ST_INVALID, "unexpected argument");
}

static void nearest_names_need_to_be_near(void **state)
{
    (void)state;
    struct text_nearest n = {"train.lr", NULL, 0};
    assert_true(text_nearest_offer(&n, "optim.lr") == false);
    assert_true(text_nearest_offer(&n, "train.l"));
    assert_true(text_nearest_offer(&n, "train.rl") == false); /* one swap: as near, not nearer */
    assert_int_equal(n.distance, 1);
    assert_true(text_nearest_offer(&n, "train.lr"));
    assert_int_equal(n.distance, 0);
    n = (struct text_nearest){"ab", NULL, 0};
    assert_false(text_nearest_offer(&n, "cd")); /* nothing in common */
    assert_true(text_nearest_offer(&n, "ba"));
    assert_int_equal(n.distance, 1);
}

static void reals_print_shortest_and_read_back(void **state)
{
    (void)state;
    uint64_t random = test_seed();
    char text[32];
    text_of_real(text, 0.1);
    assert_string_equal(text, "0.1");
    text_of_real(text, 3e-5);
    assert_string_equal(text, "3e-5");
    text_of_real(text, 1e22);
    assert_string_equal(text, "1e22");
    for (int i = 0; i < 20000; i++) {
        uint64_t bits = test_random(&random);
        double value, back;
        memcpy(&value, &bits, sizeof value);
        if (value - value != 0.0) /* infinite or not a number */
            continue;
        text_of_real(text, value);
        assert_true(text_to_real(&back, text));
        assert_memory_equal(&back, &value, sizeof value);
    }
}

static void utf8_is_told_from_other_bytes(void **state)
{
    (void)state;
    assert_true(text_is_utf8("plain, \xC3\xA9, \xE2\x82\xAC, \xF0\x9F\x98\x80"));
    static const char *const bad[] = {"\x80",         "\xC3",         "\xC0\x80",
                                      "\xE0\x80\x80", "\xED\xA0\x80", "\xF4\x90\x80\x80",
                                      "\xFF",         "\xE2\x82"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        assert_false(text_is_utf8(bad[i]));
}

static void sizes_of_memory_are_read_to_the_byte(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        size_t bytes;
    } good[] = {
        {"1", 1},
        {"85899345920", 85899345920},
        {"9007199254740993", 9007199254740993}, /* more digits than a double has */
        {"17B", 17},
        {"3KiB", 3072},
        {"3kB", 3000},
        {"3KB", 3000},
        {"80GiB", (size_t)80 << 30},
        {"80 GiB", (size_t)80 << 30},
        {"80GB", 80000000000},
        {"1.5TiB", (size_t)3 << 39},
        {"0.5MB", 500000},
        {"1.0009765625KiB", 1025},
    };
    static const char *const bad[] = {"",           "0",
                                      "0GiB",       "-1",
                                      "GiB",        "80G",
                                      "80gb",       "1.2.3",
                                      "1e9",        "80GiBs",
                                      "0.5",        "8 0",
                                      "1048576TiB", "99999999999999999999999999999999999999999"};
    size_t bytes = 7;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        assert_true(text_to_bytes(&bytes, good[i].text));
        assert_int_equal(bytes, good[i].bytes);
    }
    bytes = 7;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_false(text_to_bytes(&bytes, bad[i]));
    assert_int_equal(bytes, 7);
    char text[32];
    static const struct {
        size_t bytes;
        const char *text;
    } shown[] = {{1, "1 B"},
                 {1023, "1023 B"},
                 {1024, "1.000 KiB"},
                 {(size_t)80 << 30, "80.00 GiB"},
                 {(size_t)1023 << 20, "1023 MiB"},
                 {((size_t)1 << 30) - 1, "1.000 GiB"},
                 {SIZE_MAX, "16.00 EiB"}};
    for (size_t i = 0; i < sizeof shown / sizeof *shown; i++) {
        text_of_bytes(text, shown[i].bytes);
        assert_string_equal(text, shown[i].text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(both_spellings_and_repeats_are_understood),
        cmocka_unit_test(values_not_given_keep_their_defaults),
        cmocka_unit_test(an_empty_or_dashed_value_can_be_given),
        cmocka_unit_test(unknown_options_name_the_nearest),
        cmocka_unit_test(stray_arguments_are_refused),
        cmocka_unit_test(missing_and_surplus_values_are_refused),
        cmocka_unit_test(integers_are_whole_decimal_and_in_range),
        cmocka_unit_test(reals_are_finite_decimal_and_in_range),
        cmocka_unit_test(a_list_has_an_end),
        cmocka_unit_test(required_options_are_asked_for),
        cmocka_unit_test(help_lists_every_option_with_its_default),
        cmocka_unit_test(help_after_the_end_of_options_is_an_argument),
        cmocka_unit_test(nearest_names_need_to_be_near),
        cmocka_unit_test(reals_print_shortest_and_read_back),
        cmocka_unit_test(utf8_is_told_from_other_bytes),
        cmocka_unit_test(sizes_of_memory_are_read_to_the_byte),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
