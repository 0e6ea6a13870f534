/* What a checkpoint costs: bytes of files, calls, memory; and readers of several threads. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/file.h"
#include "tests/support/small_checkpoint.h"

enum { LARGE = 3 << 20 };

static void b81_a_file_is_as_large_as_its_ranges_and_smaller_on_weights(void **state)
{
    struct small_test *f = *state;
    char temp[CHECKPOINT_PATH_BYTES];
    float *x = NULL;
    assert_ok(mem_alloc(&x, LARGE * sizeof *x));
    small_fill_weights(f, x, LARGE);
    assert_ok(checkpoint_begin(temp, f->scratch.dir, 1));
    for (int level = 0; level < 2; level++) {
        struct checkpoint_writer w = {0};
        struct checkpoint_file file;
        struct checkpoint_options o = {.level = level};
        assert_ok(checkpoint_writer_open(&w, temp, level, &o));
        assert_ok(checkpoint_write_range(&w, "master", "w", 7, x + 7, LARGE - 9));
        assert_ok(checkpoint_writer_close(&w, &file));
        assert_int_equal(file.plain_bytes, 4 * (LARGE - 9));
        double ratio = (double)file.plain_bytes / (double)file.bytes;
        if (level == 0)
            assert_int_equal(file.bytes, 4 * (LARGE - 9) + 16 + 4 + 7 + 3 * 40 + 48);
        else
            print_message("normal values: %.3f times smaller\n", ratio);
        assert_true(level == 0 || ratio > 1.15);
    }
    checkpoint_discard(temp);
    mem_free(&x);
}

static void b80_a_file_is_written_front_to_back_one_write_a_chunk(void **state)
{
    struct small_test *f = *state;
    char temp[CHECKPOINT_PATH_BYTES];
    struct checkpoint_writer w = {0};
    struct checkpoint_file file;
    float *x = NULL;
    assert_ok(mem_alloc(&x, LARGE * sizeof *x));
    assert_ok(checkpoint_begin(temp, f->scratch.dir, 1));
    assert_ok(checkpoint_writer_open(&w, temp, 0, NULL));
    for (int i = 0; i < 100; i++) /* as many parameters */
        assert_ok(checkpoint_write_range(&w, "master", "w", 100 * i, x, 100));
    assert_ok(checkpoint_write_range(&w, "adam_m", "w", 0, x, LARGE));
    assert_int_equal(w.writes, 1 + 100 + 3);
    assert_int_equal(lseek(w.fd, 0, SEEK_END), w.file.bytes);
    assert_ok(checkpoint_writer_close(&w, &file));
    checkpoint_discard(temp);
    mem_free(&x);
}

static void b75_memory_is_bounded_by_chunks_not_by_tensors(void **state)
{
    struct small_test *f = *state;
    enum { CHUNK = 64 << 10, PART = 1000 };
    char temp[CHECKPOINT_PATH_BYTES], path[CHECKPOINT_PATH_BYTES];
    struct checkpoint_writer w = {0};
    struct checkpoint_file file;
    struct checkpoint_options o = {.level = 1, .chunk_bytes = CHUNK};
    struct checkpoint_tensor t = {
        .name = "w", .dims = 1, .shape = {LARGE}, .states = {"master"}, .state_count = 1};
    float part[PART];
    small_fill_weights(f, part, PART);
    int64_t before = mem_live_bytes(), peak = 0;
    assert_ok(checkpoint_begin(temp, f->scratch.dir, 1));
    assert_ok(checkpoint_writer_open(&w, temp, 0, &o));
    for (int64_t at = 0; at < LARGE; at += PART) {
        assert_ok(checkpoint_write_range(&w, "master", "w", at, part,
                                         at + PART < LARGE ? PART : LARGE - at));
        peak = mem_live_bytes() - before > peak ? mem_live_bytes() - before : peak;
    }
    assert_ok(checkpoint_writer_close(&w, &file));
    int64_t chunks = (LARGE + PART - 1) / PART;
    assert_in_range(peak, 2 * CHUNK, 2 * CHUNK + 2 * 56 * chunks + 4096);
    struct checkpoint_manifest m = {1, &t, 1, &file, 1, NULL};
    assert_ok(checkpoint_publish(path, f->scratch.dir, temp, &m));
    assert_int_equal(mem_live_bytes(), before);
    struct checkpoint c = {0};
    struct checkpoint_reader r = {0};
    assert_ok(checkpoint_open(&c, path));
    assert_ok(checkpoint_reader_open(&r, &c));
    int64_t open_bytes = mem_live_bytes() - before;
    assert_in_range(open_bytes, 3 * 4 * PART, 3 * 4 * PART + 2 * 56 * chunks + 16384);
    mem_seal(); /* reading allocates nothing */
    for (int64_t at = 0; at < LARGE; at += 700) {
        float got[700];
        int64_t n = at + 700 < LARGE ? 700 : LARGE - at;
        assert_ok(checkpoint_read_range(&r, "master", "w", at, n, got));
        for (int64_t i = 0; i < n; i += 99)
            assert_true(got[i] == part[(at + i) % PART]);
    }
    mem_unseal();
    checkpoint_reader_close(&r);
    checkpoint_close(&c);
}

struct thread_read {
    const struct checkpoint *c;
    const struct small *s;
    int ok;
};

static void *read_all_states(void *argument)
{
    struct thread_read *t = argument;
    float out[SMALL_NUMEL];
    struct checkpoint_reader r = {0};
    t->ok = checkpoint_reader_open(&r, t->c) == ST_OK;
    for (int i = 0; i < SMALL_TENSORS && t->ok; i++)
        for (int k = 0; k < t->s->tensors[i].state_count && t->ok; k++) {
            t->ok = checkpoint_read_range(&r, small_states[k], t->s->tensors[i].name, 0,
                                          t->s->tensors[i].numel, out) == ST_OK &&
                    memcmp(out, t->s->values[i][k], (size_t)t->s->tensors[i].numel * 4) == 0;
        }
    checkpoint_reader_close(&r);
    return NULL;
}

static void readers_of_several_threads_share_one_open_checkpoint(void **state)
{
    struct small_test *f = *state;
    enum { THREADS = 4 };
    static struct small s;
    char path[512];
    struct checkpoint c = {0};
    pthread_t thread[THREADS];
    struct thread_read work[THREADS];
    small_make(f, &s);
    assert_ok(small_save_plain(f, &s, 1));
    assert_ok(checkpoint_open(&c, small_step_path(f, path, 1)));
    for (int i = 0; i < THREADS; i++) {
        work[i] = (struct thread_read){&c, &s, 0};
        assert_int_equal(pthread_create(&thread[i], NULL, read_all_states, &work[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(thread[i], NULL);
        assert_true(work[i].ok);
    }
    checkpoint_close(&c);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, small_set_up, small_tear_down)
    const struct CMUnitTest tests[] = {
        TEST(b81_a_file_is_as_large_as_its_ranges_and_smaller_on_weights),
        TEST(b80_a_file_is_written_front_to_back_one_write_a_chunk),
        TEST(b75_memory_is_bounded_by_chunks_not_by_tensors),
        TEST(readers_of_several_threads_share_one_open_checkpoint),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
