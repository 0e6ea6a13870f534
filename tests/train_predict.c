#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "comm/local.h"
#include "engine/base/file.h"
#include "engine/base/log.h"
#include "engine/train/commands.h"
#include "engine/train/weights.h"
#include "tests/support/support.h"

static const char CONTEXT[] = "The cat sat on the m\xC3\xA4t in the house of the old man";
static const char QUESTION[] = "Where is the cat?";

struct fixture {
    struct scratch scratch;
    char model[512];
    int64_t live_bytes;
};

/* A random model with weights large enough that its answers differ. */
static enum status save_model(const struct run_config *config, const struct run_data *data,
                              const char *dir)
{
    enum status st;
    struct local_world *world = NULL;
    struct comm *comm = NULL;
    struct device *device = NULL;
    struct trainer trainer = {0};
    struct executor_options options = {.overlap = true};
    TRY_GOTO(st, out, local_world_open(&world, 1, 20000));
    TRY_GOTO(st, out, local_comm_open(&comm, world, 0));
    TRY_GOTO(st, out, device_open(&device, DEVICE_CPU, PRECISION_FP32, 0, 1));
    TRY_GOTO(st, out, trainer_open(&trainer, config, data, device, comm, NULL, &options));
    TRY_GOTO(st, out, weights_save(&trainer, dir));
out:
    trainer_close(&trainer);
    device_close(&device);
    comm_close(&comm);
    local_world_close(&world);
    return st;
}

static void make_model(struct fixture *f, enum model_family family)
{
    static const char words[] =
        "[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\ncat\nsat\non\nmat\nin\nhouse\nof\n"
        "old\nman\nwhere\nis\n?\n.\n";
    struct run_config config;
    struct run_data data = {0};
    char path[512];
    config_defaults(&config);
    scratch_put(&f->scratch, path, "words.txt", words, sizeof words - 1);
    assert_ok(vocab_load(&data.vocab, path));
    config.model.family = family;
    config.model.vocab_size = data.vocab.size;
    config.model.hidden = config.model.ffn = 24;
    config.model.layers = 2;
    config.model.heads = 2;
    config.model.max_positions = 16; /* the context takes several windows */
    config.model.init_range = 0.5;
    config.data.max_length = 16;
    config.train.steps = 0;
    config.train.micro_batch = 1;
    assert_ok(save_model(&config, &data, scratch_path(&f->scratch, f->model, "model")));
    run_data_release(&data);
}

static int set_up(void **state)
{
    static struct fixture f;
    log_set_level(LOG_WARN);
    scratch_make(&f.scratch);
    f.live_bytes = mem_live_bytes();
    make_model(&f, FAMILY_BERT);
    *state = &f;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *f = *state;
    scratch_remove(&f->scratch);
    return mem_live_bytes() == f->live_bytes ? 0 : -1; /* no test leaks */
}

/* ---- the command, with its standard output in a file ----------------------------------------- */

enum { MAX_ARGUMENTS = 16 };

static enum status predict(struct fixture *f, struct file_text *printed, const char *const *options)
{
    char path[512], *argv[MAX_ARGUMENTS] = {(char *)"predict"};
    int argc = 1;
    for (; options[argc - 1] != NULL; argc++)
        argv[argc] = (char *)options[argc - 1];
    int fd = open(scratch_path(&f->scratch, path, "out"), O_RDWR | O_CREAT | O_TRUNC, 0600);
    fflush(stdout);
    int old = dup(1);
    assert_true(fd >= 0 && old >= 0 && dup2(fd, 1) == 1);
    enum status st = cmd_predict(argc, argv);
    fflush(stdout);
    assert_int_equal(dup2(old, 1), 1);
    close(old);
    close(fd);
    if (st == ST_OK)
        assert_ok(file_read(printed, path));
    return st;
}

/* The bytes of code points [from, to) of the context, whose only wide one is the 21st. */
static void cut(char out[128], int from, int to)
{
    enum { WIDE = 21 };
    from += from >= WIDE;
    to += to >= WIDE;
    snprintf(out, 128, "%.*s", to - from, CONTEXT + from);
}

static json_t *predict_json(struct fixture *f, const char *const *options)
{
    struct file_text text = {0};
    assert_ok(predict(f, &text, options));
    json_t *root = json_loadb(text.data, text.bytes, 0, NULL);
    assert_non_null(root);
    mem_free(&text.data);
    return root;
}

static double check_entry(const json_t *entry)
{
    char want[128];
    int from = (int)json_integer_value(json_object_get(entry, "start"));
    int to = (int)json_integer_value(json_object_get(entry, "end"));
    double probability = json_real_value(json_object_get(entry, "probability"));
    assert_true(0 <= from && from <= to);
    assert_true(probability > 0.0 && probability <= 1.0);
    cut(want, from, to);
    assert_string_equal(json_string_value(json_object_get(entry, "text")), want);
    return probability;
}

static void json_answers_stand_in_the_context_at_their_span(void **state)
{
    struct fixture *f = *state;
    for (int family = 0; family < 2; family++) {
        make_model(f, (enum model_family)family);
        json_t *root = predict_json(f, (const char *[]){"--model", f->model, "--question", QUESTION,
                                                        "--context", CONTEXT, "--n-best", "5",
                                                        "--json", NULL});
        const json_t *list = json_object_get(root, "n_best");
        assert_string_equal(json_string_value(json_object_get(root, "question")), QUESTION);
        assert_int_equal(json_array_size(list), 5);
        double last = check_entry(root);
        assert_true(last == check_entry(json_array_get(list, 0)));
        for (size_t i = 1; i < 5; i++) {
            double next = check_entry(json_array_get(list, i));
            assert_true(next <= last);
            last = next;
        }
        json_decref(root);
    }
}

static void lines_say_the_same_as_json_and_a_file_the_same_as_text(void **state)
{
    struct fixture *f = *state;
    char path[512], want[256];
    struct file_text line = {0}, same = {0}, three = {0};
    json_t *root = predict_json(f, (const char *[]){"--model", f->model, "--question", QUESTION,
                                                    "--context", CONTEXT, "--json", NULL});
    assert_ok(predict(
        f, &line,
        (const char *[]){"--model", f->model, "--question", QUESTION, "--context", CONTEXT, NULL}));
    snprintf(want, sizeof want, "%s (probability %.4f, characters %d-%d)\n",
             json_string_value(json_object_get(root, "text")),
             json_real_value(json_object_get(root, "probability")),
             (int)json_integer_value(json_object_get(root, "start")),
             (int)json_integer_value(json_object_get(root, "end")));
    assert_string_equal(line.data, want);
    scratch_put(&f->scratch, path, "context.txt", CONTEXT, sizeof CONTEXT - 1);
    assert_ok(predict(f, &same,
                      (const char *[]){"--model", f->model, "--question", QUESTION,
                                       "--context-file", path, NULL}));
    assert_string_equal(same.data, line.data);
    assert_ok(predict(f, &three,
                      (const char *[]){"--model", f->model, "--question", QUESTION, "--context",
                                       CONTEXT, "--n-best", "3", NULL}));
    assert_true(strncmp(three.data, line.data, line.bytes) == 0);
    int lines = 0;
    for (size_t i = 0; i < three.bytes; i++)
        lines += three.data[i] == '\n';
    assert_int_equal(lines, 3);
    mem_free(&line.data);
    mem_free(&same.data);
    mem_free(&three.data);
    json_decref(root);
}

static void version_2_has_no_answer_in_its_list(void **state)
{
    struct fixture *f = *state;
    json_t *root = predict_json(f, (const char *[]){"--model", f->model, "--question", QUESTION,
                                                    "--context", CONTEXT, "--version-2", "--n-best",
                                                    "100", "--json", NULL});
    const json_t *list = json_object_get(root, "n_best");
    int none = 0;
    for (size_t i = 0; i < json_array_size(list); i++)
        none += json_string_value(json_object_get(json_array_get(list, i), "text"))[0] == '\0';
    assert_int_equal(none, 1);
    json_decref(root);
}

static void a_question_longer_than_a_window_is_cut(void **state)
{
    struct fixture *f = *state;
    struct file_text line = {0};
    const char *question =
        "where is the old man of the house of the man of the old cat in the mat?";
    assert_ok(predict(
        f, &line,
        (const char *[]){"--model", f->model, "--question", question, "--context", CONTEXT, NULL}));
    mem_free(&line.data);
}

static void bad_arguments_name_the_option(void **state)
{
    struct fixture *f = *state;
    struct file_text text = {0};
    char path[512], zero[512];
    scratch_put(&f->scratch, path, "empty.txt", "\n \n", 3);
    scratch_put(&f->scratch, zero, "zero.txt", "a\0b", 3);
    const struct {
        const char *options[9];
        enum status st;
        const char *message;
    } cases[] = {
        {{"--question", "q", "--context", "c"}, ST_INVALID, "--model: no folder"},
        {{"--model", f->model, "--context", "c"}, ST_INVALID, "--question"},
        {{"--model", f->model, "--question", "q"}, ST_INVALID, "one of --context and --context-"},
        {{"--model", f->model, "--question", "q", "--context", "c", "--context-file", path},
         ST_INVALID,
         "one of --context and --context-file"},
        {{"--model", f->model, "--question", " \t", "--context", "c"},
         ST_INVALID,
         "--question: the question is empty"},
        {{"--model", f->model, "--question", "q", "--context", ""},
         ST_INVALID,
         "--context: the context is empty"},
        {{"--model", f->model, "--question", "q", "--context-file", path},
         ST_INVALID,
         "--context-file: the context is empty"},
        {{"--model", f->model, "--question", "q", "--context-file", zero},
         ST_CORRUPT,
         "zero.txt: there is a zero byte"},
        {{"--model", f->model, "--question", "q\xFF", "--context", "c"},
         ST_CORRUPT,
         "--question: the text is not UTF-8"},
        {{"--model", f->model, "--question", "q", "--context", "c\xFF"},
         ST_CORRUPT,
         "--context: the text is not UTF-8"},
        {{"--model", f->scratch.dir, "--question", "q", "--context", "c"},
         ST_INVALID,
         "nor a Hugging Face folder"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_fails(predict(f, &text, cases[i].options), cases[i].st, cases[i].message);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(json_answers_stand_in_the_context_at_their_span),
        TEST(lines_say_the_same_as_json_and_a_file_the_same_as_text),
        TEST(version_2_has_no_answer_in_its_list),
        TEST(a_question_longer_than_a_window_is_cut),
        TEST(bad_arguments_name_the_option),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
