#include "engine/base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include "engine/base/arena.h"
#include "tests/support/support.h"

static void make_random(char *data, size_t bytes, uint64_t seed)
{
    for (size_t i = 0; i < bytes; i++)
        data[i] = (char)(test_random(&seed) >> 60); /* packs to about half */
}

static const char *put_gzip(struct file_test *f, const char *name, const char *data, size_t bytes,
                            const char *mode)
{
    scratch_path(&f->scratch, f->path, name);
    gzFile gz = gzopen(f->path, mode);
    assert_non_null(gz);
    assert_int_equal(gzwrite(gz, data, (unsigned)bytes), bytes);
    assert_int_equal(gzclose(gz), Z_OK);
    return f->path;
}

static void assert_file_is(const char *path, const char *want, size_t bytes)
{
    struct file_text text;
    assert_ok(file_read(&text, path));
    assert_int_equal(text.bytes, bytes);
    assert_int_equal(text.data[bytes], 0);
    assert_memory_equal(text.data, want, bytes);
    mem_free(&text.data);
}

enum { LARGE = 3 * 1024 * 1024 + 17 };
static char large[LARGE];

static void plain_and_gzip_files_read_alike(void **state)
{
    struct file_test *f = *state;
    static const size_t sizes[] = {0, 1, 2, 17, 4095, 4096, 4097, 1 << 20, LARGE};
    make_random(large, LARGE, test_seed());
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        assert_file_is(scratch_put(&f->scratch, f->path, "plain", large, sizes[i]), large,
                       sizes[i]);
        assert_file_is(put_gzip(f, "packed.gz", large, sizes[i], "wb6"), large, sizes[i]);
    }
}

static void gzip_members_are_joined(void **state)
{
    struct file_test *f = *state;
    put_gzip(f, "two.gz", "first ", 6, "wb");
    assert_file_is(put_gzip(f, "two.gz", "second", 6, "ab"), "first second", 12);
}

static void files_without_a_size_are_read(void **state)
{
    (void)state;
    struct file_text text;
    assert_ok(file_read(&text, "/proc/self/status"));
    assert_true(text.bytes > 100);
    mem_free(&text.data);
}

static void missing_files_and_folders_are_named(void **state)
{
    struct file_test *f = *state;
    struct file_text text;
    scratch_path(&f->scratch, f->path, "nothing.json");
    assert_fails(file_read(&text, f->path), ST_IO, "nothing.json: No such file or directory");
    assert_null(text.data);
    assert_fails(file_read(&text, f->scratch.dir), ST_IO, "is a folder, expected a file");
    scratch_put(&f->scratch, f->path, "plain", "x", 1);
    strncat(f->path, "/below", sizeof f->path - strlen(f->path) - 1);
    assert_fails(file_read(&text, f->path), ST_IO, "Not a directory");
}

static void unreadable_files_are_named(void **state)
{
    struct file_test *f = *state;
    struct file_text text;
    scratch_put(&f->scratch, f->path, "secret", "x", 1);
    assert_int_equal(chmod(f->path, 0), 0);
    if (geteuid() == 0) { /* root may read all: let the system call fail instead */
        file_fail_at(1);
        assert_fails(file_read(&text, f->path), ST_IO, "secret: Input/output error");
    } else {
        assert_fails(file_read(&text, f->path), ST_IO, "secret: Permission denied");
    }
}

static void gzip_files_cut_anywhere_are_corrupt(void **state)
{
    struct file_test *f = *state;
    enum { BYTES = 3000 };
    char packed[BYTES + 100];
    make_random(large, BYTES, 5);
    put_gzip(f, "whole.gz", large, BYTES, "wb");
    FILE *file = fopen(f->path, "rb");
    assert_non_null(file);
    size_t packed_bytes = fread(packed, 1, sizeof packed, file);
    fclose(file);
    struct file_text text;
    for (size_t cut = 2; cut < packed_bytes; cut += cut < 30 || cut + 12 > packed_bytes ? 1 : 37) {
        scratch_put(&f->scratch, f->path, "cut.gz", packed, cut);
        assert_fails(file_read(&text, f->path), ST_CORRUPT, "cut.gz: the gzip data is damaged");
        assert_null(text.data);
    }
}

static void gzip_files_with_a_flipped_bit_are_never_read_as_other_text(void **state)
{
    struct file_test *f = *state;
    enum { BYTES = 150 };
    char packed[BYTES + 100];
    make_random(large, BYTES, 6);
    put_gzip(f, "whole.gz", large, BYTES, "wb");
    FILE *file = fopen(f->path, "rb");
    assert_non_null(file);
    size_t packed_bytes = fread(packed, 1, sizeof packed, file);
    fclose(file);
    for (size_t bit = 10 * 8; bit < packed_bytes * 8; bit++) { /* the header has no check sum */
        packed[bit / 8] ^= (char)(1 << bit % 8);
        scratch_put(&f->scratch, f->path, "flip.gz", packed, packed_bytes);
        packed[bit / 8] ^= (char)(1 << bit % 8);
        struct file_text text;
        if (file_read(&text, f->path) == ST_OK) {
            assert_int_equal(text.bytes, BYTES);
            assert_memory_equal(text.data, large, BYTES);
            mem_free(&text.data);
        }
    }
}

static void failing_allocations_leak_nothing(void **state)
{
    struct file_test *f = *state;
    struct file_text text;
    make_random(large, 100000, 7);
    put_gzip(f, "packed.gz", large, 100000, "wb");
    enum status st = ST_MEMORY;
    for (int64_t k = 1; st != ST_OK; k++) {
        mem_fail_at(k);
        st = file_read(&text, f->path);
        mem_fail_at(0);
        if (st != ST_OK)
            assert_fails(st, ST_MEMORY, "out of memory");
        assert_true(k < 20);
    }
    mem_free(&text.data);
}

static void writing_makes_and_replaces_whole_files(void **state)
{
    struct file_test *f = *state;
    scratch_path(&f->scratch, f->path, "out.json");
    make_random(large, LARGE, 8);
    assert_ok(file_write(f->path, "first", 5));
    assert_file_is(f->path, "first", 5);
    assert_ok(file_write(f->path, large, LARGE));
    assert_file_is(f->path, large, LARGE);
    assert_ok(file_write(f->path, NULL, 0));
    assert_file_is(f->path, "", 0);
    assert_int_equal(scratch_count(&f->scratch), 1);
}

static void a_replaced_file_keeps_its_mode_and_its_link(void **state)
{
    struct file_test *f = *state;
    char link_path[512];
    struct stat info;
    scratch_put(&f->scratch, f->path, "target", "old", 3);
    assert_int_equal(chmod(f->path, 0640), 0);
    assert_int_equal(symlink("target", scratch_path(&f->scratch, link_path, "link")), 0);
    assert_ok(file_write(link_path, "new", 3));
    assert_file_is(f->path, "new", 3);
    assert_int_equal(lstat(link_path, &info), 0);
    assert_true(S_ISLNK(info.st_mode));
    assert_int_equal(stat(f->path, &info), 0);
    assert_int_equal(info.st_mode & 07777, 0640);
}

static void a_name_without_a_folder_is_written_here(void **state)
{
    struct file_test *f = *state;
    char here[4096];
    assert_non_null(getcwd(here, sizeof here));
    assert_int_equal(chdir(f->scratch.dir), 0);
    enum status st = file_write("plain", "x", 1);
    assert_int_equal(chdir(here), 0);
    assert_ok(st);
    assert_file_is(scratch_path(&f->scratch, f->path, "plain"), "x", 1);
}

static void each_failing_system_call_leaves_the_old_file_and_no_litter(void **state)
{
    struct file_test *f = *state;
    scratch_put(&f->scratch, f->path, "out", "old", 3);
    int failures = 0;
    for (int64_t k = 1;; k++) {
        file_fail_at(k);
        enum status st = file_write(f->path, "new text", 8);
        file_fail_at(0);
        assert_int_equal(scratch_count(&f->scratch), 1);
        if (st == ST_OK)
            break;
        assert_fails(st, ST_IO, "Input/output error");
        assert_message_has("out: ", __FILE__, __LINE__);
        if (strstr(status_message(), "written, but its folder") == NULL)
            assert_file_is(f->path, "old", 3);
        failures++;
    }
    assert_file_is(f->path, "new text", 8);
    assert_int_equal(failures, 6); /* open, write, fsync, rename, open folder, fsync folder */
}

static void a_file_made_of_pieces_is_there_at_its_end(void **state)
{
    struct file_test *f = *state;
    struct file_writer w;
    scratch_path(&f->scratch, f->path, "pieces");
    for (int round = 0; round < 2; round++) {
        assert_ok(file_write(f->path, "old", 3));
        assert_ok(file_begin(&w, f->path));
        assert_ok(file_put(&w, "ne", 2));
        assert_ok(file_put(&w, "w!", 2));
        assert_file_is(f->path, "old", 3);
        if (round == 0) /* whoever makes the pieces fails */
            assert_int_equal(file_end(&w, ST_MEMORY), ST_MEMORY);
        else
            assert_ok(file_end(&w, ST_OK));
        assert_file_is(f->path, round == 0 ? "old" : "new!", round == 0 ? 3 : 4);
        assert_int_equal(scratch_count(&f->scratch), 1);
    }
}

static void targets_that_cannot_be_written_are_named(void **state)
{
    struct file_test *f = *state;
    assert_fails(file_write(f->scratch.dir, "x", 1), ST_IO, "is a folder");
    scratch_path(&f->scratch, f->path, "no/such/folder/out");
    assert_fails(file_write(f->path, "x", 1), ST_IO, "No such file or directory");
    assert_fails(file_write("/proc/tessera", "x", 1), ST_IO, "/proc/tessera: ");
}

static void devices_are_written_in_place(void **state)
{
    (void)state;
    struct stat info;
    assert_ok(file_write("/dev/null", "x", 1));
    assert_int_equal(stat("/dev/null", &info), 0);
    assert_true(S_ISCHR(info.st_mode));
    assert_fails(file_write("/dev/full", "x", 1), ST_IO, "/dev/full: No space left on device");
}

/* Files of this process may have @bytes at most; a larger write comes out short. */
static struct rlimit limit_files(size_t bytes)
{
    struct rlimit old, tight;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    tight = old;
    tight.rlim_cur = bytes;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &tight), 0);
    return old;
}

static void a_full_disk_leaves_the_old_file(void **state)
{
    struct file_test *f = *state;
    scratch_put(&f->scratch, f->path, "out", "old", 3);
    struct rlimit old = limit_files(4096);
    enum status st = file_write(f->path, large, LARGE);
    setrlimit(RLIMIT_FSIZE, &old);
    assert_fails(st, ST_IO, "out: File too large");
    assert_file_is(f->path, "old", 3);
    assert_int_equal(scratch_count(&f->scratch), 1);
}

static void a_log_on_a_full_disk_keeps_whole_records(void **state)
{
    struct file_test *f = *state;
    struct file_log log;
    char record[101], want[4096] = "";
    scratch_path(&f->scratch, f->path, "metrics.jsonl");
    assert_ok(file_log_open(&log, f->path));
    memset(record, 'a', 99);
    record[99] = '\n';
    record[100] = '\0';
    struct rlimit old = limit_files(1050);
    int written = 0;
    enum status st = ST_OK;
    for (; written < 20; written++) {
        st = file_log_append(&log, record, 100);
        if (st != ST_OK)
            break;
        memcpy(want + (size_t)written * 100, record, 100);
    }
    enum status again = file_log_append(&log, record, 100);
    assert_fails(again, ST_IO, "metrics.jsonl: only 50 of 100 bytes");
    setrlimit(RLIMIT_FSIZE, &old);
    assert_status_is(st, ST_IO, "append over the limit", __FILE__, __LINE__);
    assert_int_equal(written, 10);
    assert_file_is(f->path, want, 1000);
    /* With room again the log goes on. */
    assert_ok(file_log_append(&log, "more\n", 5));
    assert_ok(file_log_close(&log));
    memcpy(want + 1000, "more\n", 5);
    assert_file_is(f->path, want, 1005);
}

static void a_log_names_a_full_device(void **state)
{
    (void)state;
    struct file_log log;
    assert_ok(file_log_open(&log, "/dev/full"));
    assert_fails(file_log_append(&log, "x\n", 2), ST_IO, "/dev/full: No space left on device");
    assert_ok(file_log_close(&log));
}

static void a_log_truncates_appends_and_closes_twice(void **state)
{
    struct file_test *f = *state;
    struct file_log log, never = {.fd = -1}, zeroed = {0};
    scratch_put(&f->scratch, f->path, "log", "old content", 11);
    assert_ok(file_log_open(&log, f->path));
    assert_ok(file_log_append(&log, "a\n", 2));
    assert_ok(file_log_append(&log, "b\n", 2));
    assert_ok(file_log_close(&log));
    assert_ok(file_log_close(&log));
    assert_ok(file_log_close(&never));
    assert_ok(file_log_close(&zeroed));
    assert_file_is(f->path, "a\nb\n", 4);
    assert_fails(file_log_open(&log, f->scratch.dir), ST_IO, "Is a directory");
    assert_int_equal(log.fd, -1);
}

static void *append_records(void *argument)
{
    struct file_log *log = argument;
    for (int i = 0; i < 200; i++) {
        if (file_log_append(log, "0123456789abcdef\n", 17) != ST_OK)
            return NULL;
    }
    return argument;
}

static void records_of_threads_do_not_mix(void **state)
{
    struct file_test *f = *state;
    struct file_log log;
    pthread_t threads[4];
    scratch_path(&f->scratch, f->path, "log");
    assert_ok(file_log_open(&log, f->path));
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, append_records, &log), 0);
    for (int i = 0; i < 4; i++) {
        void *result;
        assert_int_equal(pthread_join(threads[i], &result), 0);
        assert_ptr_equal(result, &log);
    }
    assert_ok(file_log_close(&log));
    struct file_text text;
    assert_ok(file_read(&text, f->path));
    assert_int_equal(text.bytes, 4 * 200 * 17);
    for (size_t i = 0; i < text.bytes; i += 17)
        assert_memory_equal(text.data + i, "0123456789abcdef\n", 17);
    mem_free(&text.data);
}

static void folders_are_made_with_their_parents(void **state)
{
    struct file_test *f = *state;
    struct stat info;
    scratch_path(&f->scratch, f->path, "a//b/c/");
    assert_ok(file_make_dirs(f->path));
    assert_ok(file_make_dirs(f->path));
    assert_int_equal(stat(f->path, &info), 0);
    assert_true(S_ISDIR(info.st_mode));
    assert_ok(file_make_dirs("/"));
    assert_ok(file_make_dirs("."));
    assert_fails(file_make_dirs(""), ST_IO, "empty");
    scratch_put(&f->scratch, f->path, "plain", "x", 1);
    assert_fails(file_make_dirs(f->path), ST_IO, "plain: is a file, expected a folder");
    strncat(f->path, "/below", sizeof f->path - strlen(f->path) - 1);
    assert_fails(file_make_dirs(f->path), ST_IO, "plain");
    assert_fails(file_make_dirs("/proc/tessera/x"), ST_IO, "/proc/tessera: cannot make");
}

static void the_folder_of_a_file_is_made(void **state)
{
    struct file_test *f = *state;
    char longest[5000];
    assert_ok(file_make_folder_of(scratch_path(&f->scratch, f->path, "x/y/file")));
    assert_int_equal(access(scratch_path(&f->scratch, f->path, "x/y"), W_OK), 0);
    assert_int_not_equal(access(scratch_path(&f->scratch, f->path, "x/y/file"), F_OK), 0);
    assert_ok(file_make_folder_of("file"));
    assert_ok(file_make_folder_of("/file"));
    if (access("/proc", W_OK) != 0) /* root may write anywhere but there */
        assert_fails(file_make_folder_of("/proc/file"), ST_IO, "/proc/file: cannot write in its");
    memset(longest, 'x', sizeof longest);
    longest[sizeof longest - 2] = '/';
    longest[sizeof longest - 1] = '\0';
    assert_fails(file_make_folder_of(longest), ST_IO, "File name too long");
}

static void paths_join_or_do_not_fit(void **state)
{
    (void)state;
    char out[8];
    assert_ok(path_join(out, sizeof out, "ab", "cd"));
    assert_string_equal(out, "ab/cd");
    assert_ok(path_join(out, sizeof out, "ab/", "cd"));
    assert_string_equal(out, "ab/cd");
    assert_ok(path_join(out, sizeof out, "", "cd"));
    assert_string_equal(out, "cd");
    assert_ok(path_join(out, sizeof out, "/", "cd"));
    assert_string_equal(out, "/cd");
    assert_ok(path_join(out, sizeof out, "abcd", "ef"));
    assert_fails(path_join(out, sizeof out, "abcd", "efg"), ST_INVALID, "too long");
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, file_test_set_up, file_test_tear_down)
    const struct CMUnitTest tests[] = {
        TEST(plain_and_gzip_files_read_alike),
        TEST(gzip_members_are_joined),
        TEST(files_without_a_size_are_read),
        TEST(missing_files_and_folders_are_named),
        TEST(unreadable_files_are_named),
        TEST(gzip_files_cut_anywhere_are_corrupt),
        TEST(gzip_files_with_a_flipped_bit_are_never_read_as_other_text),
        TEST(failing_allocations_leak_nothing),
        TEST(writing_makes_and_replaces_whole_files),
        TEST(a_replaced_file_keeps_its_mode_and_its_link),
        TEST(a_name_without_a_folder_is_written_here),
        TEST(each_failing_system_call_leaves_the_old_file_and_no_litter),
        TEST(a_file_made_of_pieces_is_there_at_its_end),
        TEST(targets_that_cannot_be_written_are_named),
        TEST(devices_are_written_in_place),
        TEST(a_full_disk_leaves_the_old_file),
        TEST(a_log_on_a_full_disk_keeps_whole_records),
        TEST(a_log_names_a_full_device),
        TEST(a_log_truncates_appends_and_closes_twice),
        TEST(records_of_threads_do_not_mix),
        TEST(folders_are_made_with_their_parents),
        TEST(the_folder_of_a_file_is_made),
        TEST(paths_join_or_do_not_fit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
