/*
 * Every fuzz target on every input of its corpus, and on small changes of these: parsers take any
 * bytes (fuzz/fuzz.h).
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/file.h"
#include "tests/support/support.h"

#define TARGETS(TARGET)                                                                            \
    TARGET(checkpoint)                                                                             \
    TARGET(config)                                                                                 \
    TARGET(features_cache)                                                                         \
    TARGET(hello)                                                                                  \
    TARGET(machine)                                                                                \
    TARGET(manifest)                                                                               \
    TARGET(metrics)                                                                                \
    TARGET(model_config)                                                                           \
    TARGET(predictions)                                                                            \
    TARGET(rendezvous)                                                                             \
    TARGET(run_result)                                                                             \
    TARGET(safetensors)                                                                            \
    TARGET(squad)                                                                                  \
    TARGET(training_state)                                                                         \
    TARGET(vocab)

#define DECLARE(name) int fuzz_##name(const uint8_t *data, size_t bytes);
TARGETS(DECLARE)

enum { MAX_INPUTS = 500, MAX_BYTES = 1 << 17, CHANGES = 6 };

static int by_name(const void *a, const void *b)
{
    return strcmp(a, b);
}

/* The names in a folder, in order; on every machine the same changes are made then. */
static int list_inputs(char names[MAX_INPUTS][64], const char *folder)
{
    int count = 0;
    DIR *dir = opendir(folder);
    if (dir == NULL)
        fail_msg("%s: there is no corpus", folder);
    for (struct dirent *e; (e = readdir(dir)) != NULL;) {
        if (e->d_name[0] == '.')
            continue;
        assert_true(count < MAX_INPUTS);
        assert_true(strlen(e->d_name) < sizeof names[0]);
        memcpy(names[count++], e->d_name, strlen(e->d_name) + 1);
    }
    closedir(dir);
    qsort(names, (size_t)count, sizeof names[0], by_name);
    return count;
}

/* Up to three bytes differ, or it is cut short, or a part of it is there twice. */
static size_t change(uint8_t out[2 * MAX_BYTES], const uint8_t *data, size_t bytes,
                     uint64_t *random)
{
    memcpy(out, data, bytes);
    if (bytes == 0)
        return 0;
    uint64_t kind = test_random(random) % 8, at = test_random(random) % bytes;
    if (kind == 0)
        return at;
    if (kind == 1) {
        memcpy(out + at, data, bytes);
        return at + bytes;
    }
    for (uint64_t i = 0; i < 1 + kind % 3; i++) {
        uint8_t *changed = &out[test_random(random) % bytes];
        *changed ^= (uint8_t)(1u << (test_random(random) % 8));
    }
    return bytes;
}

static void replay(const char *name, int (*target)(const uint8_t *data, size_t bytes))
{
    static char names[MAX_INPUTS][64];
    static uint8_t data[MAX_BYTES], changed[2 * MAX_BYTES];
    char folder[128], path[512];
    uint64_t random = test_seed();
    snprintf(folder, sizeof folder, "tests/data/fuzz/%s", name);
    int count = list_inputs(names, folder);
    assert_true(count > 0);
    for (int i = 0; i < count; i++) {
        snprintf(path, sizeof path, "%s/%.63s", folder, names[i]);
        FILE *file = fopen(path, "rb");
        assert_non_null(file);
        size_t bytes = fread(data, 1, sizeof data, file);
        assert_true(feof(file) != 0);
        fclose(file);
        assert_int_equal(target(data, bytes), 0);
        for (int k = 0; k < CHANGES; k++) {
            size_t n = change(changed, data, bytes, &random);
            assert_int_equal(target(changed, n), 0);
        }
    }
}

#define TEST(name)                                                                                 \
    static void any_bytes_for_##name(void **state)                                                 \
    {                                                                                              \
        (void)state;                                                                               \
        replay(#name, fuzz_##name);                                                                \
    }
TARGETS(TEST)

int main(void)
{
#define ENTRY(name) cmocka_unit_test(any_bytes_for_##name),
    const struct CMUnitTest tests[] = {TARGETS(ENTRY)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
