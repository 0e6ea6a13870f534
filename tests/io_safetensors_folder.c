#include "io/safetensors_folder.h"

#include <stdio.h>
#include <string.h>

#include "engine/base/file.h"
#include "tests/support/support.h"

static const float values[] = {1, 2, 3, 4, 5, 6};

/* A file of the scratch folder with tensors of 3 elements each. */
static void put_model(const struct file_test *f, const char *name, const char *a, const char *b)
{
    struct safetensors_writer w = {0};
    struct safetensors_tensor t[] = {{.name = a, .dims = 1, .shape = {3}},
                                     {.name = b, .dims = 1, .shape = {3}}};
    int count = b != NULL ? 2 : 1;
    assert_ok(safetensors_create(&w, f->scratch.dir, name, t, count));
    for (int i = 0; i < count; i++)
        assert_ok(safetensors_write_range(&w, i, 0, 3, values + (a[0] - 'a') + i));
    assert_ok(safetensors_publish(&w));
    safetensors_writer_close(&w);
}

static void put_index(struct file_test *f, const char *text)
{
    scratch_put(&f->scratch, f->path, "model.safetensors.index.json", text, strlen(text));
}

static void refuse(struct file_test *f, enum status st, const char *message)
{
    struct safetensors_folder folder = {0};
    assert_fails(safetensors_folder_open(&folder, f->scratch.dir), st, message);
    safetensors_folder_close(&folder);
}

static void read_all(struct file_test *f, const char *path, int files)
{
    struct safetensors_folder folder = {0};
    float x[2];
    assert_ok(safetensors_folder_open(&folder, f->scratch.dir));
    assert_int_equal(folder.file_count, files);
    assert_non_null(strstr(folder.path, path));
    for (int i = 0; i < 3; i++) {
        const char name[] = {(char)('a' + i), '\0'};
        const struct safetensors_tensor *t = safetensors_folder_find(&folder, name);
        assert_non_null(t);
        assert_ok(safetensors_folder_read(&folder, t, 1, 2, x));
        assert_memory_equal(x, values + i + 1, sizeof x);
    }
    assert_null(safetensors_folder_find(&folder, "d"));
    safetensors_folder_close(&folder);
    safetensors_folder_close(&folder);
}

static void several_files_are_read_as_one(void **state)
{
    struct file_test *f = *state;
    put_model(f, "model-00001-of-00002.safetensors", "a", "b");
    put_model(f, "model-00002-of-00002.safetensors", "c", NULL);
    put_index(f, "{\"metadata\": {\"total_size\": 36}, \"weight_map\": {"
                 "\"a\": \"model-00001-of-00002.safetensors\","
                 "\"c\": \"model-00002-of-00002.safetensors\","
                 "\"b\": \"model-00001-of-00002.safetensors\"}}");
    read_all(f, "model.safetensors.index.json", 2);
}

static void one_file_comes_before_an_index(void **state)
{
    struct file_test *f = *state;
    struct safetensors_folder folder = {0};
    put_index(f, "{}");
    put_model(f, "model.safetensors", "a", NULL);
    assert_ok(safetensors_folder_open(&folder, f->scratch.dir));
    assert_int_equal(folder.file_count, 1);
    safetensors_folder_close(&folder);
}

static void an_index_that_does_not_fit_its_files_is_refused(void **state)
{
    struct file_test *f = *state;
    put_index(f, "{\"weight_map\": ");
    refuse(f, ST_CORRUPT, "model.safetensors.index.json:1:");
    put_index(f, "{\"weight_map\": []}");
    refuse(f, ST_CORRUPT, "weight_map: expected an object, found an array");
    put_index(f, "{\"weight_map\": {\"a\": 1}}");
    refuse(f, ST_CORRUPT, "a: expected the name of a file, found");
    put_index(f, "{\"weight_map\": {\"a\": \"../other.safetensors\"}}");
    refuse(f, ST_CORRUPT, "is not a file of this folder");
    put_index(f, "{\"weight_map\": {\"a\": \"one.safetensors\"}}");
    refuse(f, ST_IO, "one.safetensors: No such file");
    put_model(f, "one.safetensors", "a", "b");
    refuse(f, ST_CORRUPT, "one.safetensors: tensor \"b\": ");
    put_index(f, "{\"weight_map\": {\"a\": \"one.safetensors\", \"c\": \"one.safetensors\"}}");
    refuse(f, ST_CORRUPT, "c should be in one.safetensors and is not");
    put_model(f, "two.safetensors", "b", "c");
    put_index(f, "{\"weight_map\": {\"a\": \"one.safetensors\", \"b\": \"two.safetensors\", "
                 "\"c\": \"two.safetensors\"}}");
    refuse(f, ST_CORRUPT, "index.json says that it is in two.safetensors");
}

static void a_pickled_model_is_refused_with_what_to_do(void **state)
{
    struct file_test *f = *state;
    refuse(f, ST_IO, "model.safetensors: No such file");
    scratch_put(&f->scratch, f->path, "pytorch_model.bin.index.json", "{}", 2);
    refuse(f, ST_UNSUPPORTED, "pytorch_model.bin.index.json: this format is not read");
    scratch_put(&f->scratch, f->path, "pytorch_model.bin", "x", 1);
    refuse(f, ST_UNSUPPORTED,
           "store the model as model.safetensors: load it with transformers and "
           "call save_pretrained");
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, file_test_set_up, file_test_tear_down)
    const struct CMUnitTest tests[] = {
        TEST(several_files_are_read_as_one),
        TEST(one_file_comes_before_an_index),
        TEST(an_index_that_does_not_fit_its_files_is_refused),
        TEST(a_pickled_model_is_refused_with_what_to_do),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
