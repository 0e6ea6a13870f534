/* Writers with threads that pack for them: the same bytes, bounded memory, no thread is left. */
#include <stdio.h>
#include <string.h>

#include "engine/base/file.h"
#include "tests/support/small_checkpoint.h"

enum { LARGE = 600 * 1000, CHUNK = 128 << 10, RANGES = 5, NAMES_BYTES = 96 << 10 };

/* Of one chunk, of many, of single elements. */
static const struct range {
    const char *state, *tensor;
    int64_t first, numel;
} ranges[RANGES] = {{"master", "w", 0, LARGE - RANGES},
                    {"adam_m", "b", 5, 1},
                    {"adam_m", "w", 0, CHUNK / 4},
                    {"master", "b", 0, 7},
                    {"adam_v", "w", 11, LARGE / 2}};

static enum status write_file(struct checkpoint_file *file, const char *temp, int index,
                              const float *x, int threads)
{
    enum status st;
    struct checkpoint_writer w = {0};
    struct checkpoint_options o = {.level = 1, .chunk_bytes = CHUNK, .threads = threads};
    TRY_GOTO(st, out, checkpoint_writer_open(&w, temp, index, &o));
    for (int i = 0; i < RANGES; i++)
        TRY_GOTO(st, out,
                 checkpoint_write_range(&w, ranges[i].state, ranges[i].tensor, ranges[i].first,
                                        x + i, ranges[i].numel));
    TRY_GOTO(st, out, checkpoint_writer_close(&w, file));
out:
    checkpoint_writer_abandon(&w);
    return st;
}

static void a_file_has_the_same_bytes_for_any_number_of_threads(void **state)
{
    static const int threads[] = {0, 1, 2, 3, 16};
    struct small_test *f = *state;
    char temp[CHECKPOINT_PATH_BYTES], path[CHECKPOINT_PATH_BYTES];
    struct file_text first = {0};
    float *x = NULL;
    assert_ok(mem_alloc(&x, LARGE * sizeof *x));
    small_fill_weights(f, x, LARGE / 2);
    small_fill_any(f, x + LARGE / 2, LARGE / 8); /* the rest are zeros */
    assert_ok(checkpoint_begin(temp, f->scratch.dir, 1));
    for (size_t i = 0; i < sizeof threads / sizeof *threads; i++) {
        struct checkpoint_file file;
        struct file_text text;
        assert_ok(write_file(&file, temp, (int)i, x, threads[i]));
        assert_ok(path_join(path, sizeof path, temp, file.name));
        assert_ok(file_read(&text, path));
        assert_int_equal(text.bytes, file.bytes);
        if (i == 0) {
            first = text;
            continue;
        }
        assert_int_equal(text.bytes, first.bytes);
        assert_memory_equal(text.data, first.data, first.bytes);
        mem_free(&text.data);
    }
    mem_free(&first.data);
    checkpoint_discard(temp);
    mem_free(&x);
}

static void b75_memory_of_a_writer_is_bounded_by_its_threads(void **state)
{
    struct small_test *f = *state;
    char temp[CHECKPOINT_PATH_BYTES];
    float *x = NULL;
    assert_ok(mem_alloc(&x, LARGE * sizeof *x));
    assert_ok(checkpoint_begin(temp, f->scratch.dir, 1));
    for (int threads = 1; threads <= 16; threads *= 4) {
        struct checkpoint_file file;
        int64_t before = mem_live_bytes();
        mem_peak_reset();
        assert_ok(write_file(&file, temp, threads, x, threads));
        int64_t peak = mem_peak_bytes() - before;
        assert_in_range(peak, (2 * threads + 3) * CHUNK, (2 * threads + 3) * CHUNK + NAMES_BYTES);
        assert_int_equal(mem_live_bytes(), before);
    }
    checkpoint_discard(temp);
    mem_free(&x);
}

/* The rest of what was put is packed, or is not, and nobody waits for it. */
static void b71_a_writer_that_fails_anywhere_ends_its_threads(void **state)
{
    struct small_test *f = *state;
    char temp[CHECKPOINT_PATH_BYTES];
    struct checkpoint_file file;
    float *x = NULL;
    int failed[2] = {0};
    assert_ok(mem_alloc(&x, LARGE * sizeof *x));
    for (int memory = 0; memory < 2; memory++) {
        enum status st = ST_IO;
        for (int64_t k = 1; st != ST_OK; k += 1 + k / 8) {
            int64_t before = mem_live_bytes();
            assert_ok(checkpoint_begin(temp, f->scratch.dir, 1));
            (memory ? mem_fail_at : file_fail_at)(k);
            st = write_file(&file, temp, 0, x, 3);
            (memory ? mem_fail_at : file_fail_at)(0);
            assert_true(st == ST_OK || st == (memory ? ST_MEMORY : ST_IO));
            assert_int_equal(mem_live_bytes(), before);
            failed[memory] += st != ST_OK;
            checkpoint_discard(temp);
        }
    }
    print_message("%d writes and %d allocations failed\n", failed[0], failed[1]);
    assert_true(failed[0] > 10 && failed[1] > 5);
    mem_free(&x);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, small_set_up, small_tear_down)
    const struct CMUnitTest tests[] = {
        TEST(a_file_has_the_same_bytes_for_any_number_of_threads),
        TEST(b75_memory_of_a_writer_is_bounded_by_its_threads),
        TEST(b71_a_writer_that_fails_anywhere_ends_its_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
