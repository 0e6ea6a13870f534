/* Checkpoints and what goes wrong beside them: failing calls, full disks, kills, old folders. */
#include "io/checkpoint.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/base/file.h"
#include "engine/base/log.h"
#include "tests/support/support.h"

struct fixture {
    struct scratch scratch;
    char dir[512]; /* of the checkpoints; not there at first */
    uint64_t seed;
    int64_t live_bytes;
};

static int set_up(void **state)
{
    static struct fixture f;
    scratch_make(&f.scratch);
    scratch_path(&f.scratch, f.dir, "checkpoints");
    f.live_bytes = mem_live_bytes();
    f.seed = test_seed();
    log_set_level(LOG_ERROR); /* damaged folders are the subject here */
    *state = &f;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *f = *state;
    file_fail_at(0);
    log_set_level(LOG_INFO);
    scratch_remove(&f->scratch);
    return mem_live_bytes() == f->live_bytes ? 0 : -1; /* no test leaks */
}

/* ---- saves whose values tell which save they are of ------------------------------------------ */

enum { NUMEL = 5000, WRITERS = 2, PART = NUMEL / WRITERS };

static const struct checkpoint_tensor table[] = {
    {.name = "w", .dims = 2, .shape = {50, 100}, .states = {"master", "adam_m"}, .state_count = 2}};

static const struct checkpoint_options small_chunks = {.level = 1, .chunk_bytes = 4096};

static void fill(float *out, int64_t first, int64_t numel, int mark)
{
    for (int64_t i = 0; i < numel; i++)
        out[i] = (float)mark + 0.25f * (float)((first + i) % 7);
}

static enum status write_file(struct checkpoint_file *file, const char *temp, int index, int mark)
{
    enum status st;
    struct checkpoint_writer w = {0};
    float x[PART];
    fill(x, index * PART, PART, mark);
    TRY_GOTO(st, out, checkpoint_writer_open(&w, temp, index, &small_chunks));
    TRY_GOTO(st, out, checkpoint_write_range(&w, "master", "w", index * PART, x, PART));
    TRY_GOTO(st, out, checkpoint_write_range(&w, "adam_m", "w", index * PART, x, PART));
    TRY_GOTO(st, out, checkpoint_writer_close(&w, file));
out:
    checkpoint_writer_abandon(&w);
    return st;
}

static enum status save(const char *dir, int64_t step, int mark)
{
    enum status st;
    char temp[CHECKPOINT_PATH_BYTES] = "";
    struct checkpoint_file files[WRITERS];
    TRY(checkpoint_begin(temp, dir, step));
    for (int i = 0; i < WRITERS; i++)
        TRY_GOTO(st, out, write_file(&files[i], temp, i, mark));
    struct checkpoint_manifest m = {step, table, 1, files, WRITERS, NULL};
    TRY_GOTO(st, out, checkpoint_publish(NULL, dir, temp, &m));
out:
    if (st != ST_OK)
        checkpoint_discard(temp);
    return st;
}

/* The mark of a whole checkpoint; everything in it is verified. */
static int mark_of(const char *path)
{
    struct checkpoint c = {0};
    struct checkpoint_reader r = {0};
    float got[NUMEL], want[NUMEL];
    assert_ok(checkpoint_open(&c, path));
    assert_ok(checkpoint_verify(&c, NULL, NULL));
    assert_ok(checkpoint_reader_open(&r, &c));
    assert_ok(checkpoint_read_range(&r, "master", "w", 0, NUMEL, got));
    fill(want, 0, NUMEL, (int)got[0]);
    assert_memory_equal(got, want, sizeof got);
    assert_ok(checkpoint_read_range(&r, "adam_m", "w", 0, NUMEL, got));
    assert_memory_equal(got, want, sizeof got);
    checkpoint_reader_close(&r);
    checkpoint_close(&c);
    return (int)want[0];
}

static struct checkpoint_found latest(const struct fixture *f)
{
    struct checkpoint_found found;
    assert_ok(checkpoint_find_latest(&found, f->dir, INT64_MAX));
    return found;
}

static const char *in_dir(const struct fixture *f, char out[1024], const char *name)
{
    snprintf(out, 1024, "%s/%s", f->dir, name);
    return out;
}

static bool is_there(const struct fixture *f, const char *name)
{
    char path[1024];
    struct stat info;
    return lstat(in_dir(f, path, name), &info) == 0;
}

static void put(const struct fixture *f, const char *name, const char *text)
{
    char path[1024];
    FILE *file = fopen(in_dir(f, path, name), "w");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, strlen(text), file), strlen(text));
    fclose(file);
}

/* Entries whose names begin with @prefix. */
static int count(const struct fixture *f, const char *prefix)
{
    int n = 0;
    DIR *dir = opendir(f->dir);
    assert_non_null(dir);
    for (struct dirent *e; (e = readdir(dir)) != NULL;)
        n += strncmp(e->d_name, prefix, strlen(prefix)) == 0;
    closedir(dir);
    return n;
}

/* ---- failing calls --------------------------------------------------------------------------- */

/* Calls that only help (the hint, cleaning up) may fail in a save that succeeds. */
enum { QUIET_FAILURES = 12 };

static void b69_b71_a_save_that_fails_anywhere_leaves_the_earlier_checkpoint(void **state)
{
    struct fixture *f = *state;
    int failures = 0, published = 0;
    assert_ok(save(f->dir, 1, 1));
    for (int64_t k = 1, fine = 0; fine < QUIET_FAILURES; k++) {
        char path[1024];
        file_fail_at(k);
        enum status st = save(f->dir, 2, 2);
        file_fail_at(0);
        fine = st == ST_OK ? fine + 1 : 0;
        struct checkpoint_found found = latest(f);
        bool is_new = st == ST_OK || strstr(status_message(), "published") == status_message();
        assert_true(st == ST_OK || st == ST_IO);
        assert_int_equal(found.step, is_new ? 2 : 1);
        assert_int_equal(found.damaged, 0);
        assert_int_equal(mark_of(found.path), is_new ? 2 : 1);
        failures += st != ST_OK;
        published += st != ST_OK && is_new;
        assert_ok(checkpoint_sweep(f->dir));
        assert_int_equal(count(f, ".old-") + count(f, ".tmp-") + count(f, ".del-"), 0);
        if (is_new) { /* the next round starts from step 1 again */
            char to[1024];
            snprintf(to, sizeof to, "%s/gone-%lld", f->scratch.dir, (long long)k);
            assert_int_equal(rename(in_dir(f, path, "step-00000002"), to), 0);
        }
    }
    print_message("%d calls failed, %d of them after the new name\n", failures, published);
    assert_true(failures > 20 && published >= 1 && published <= 2);
}

static void b72_overwriting_a_step_gives_the_old_or_the_new_one_whole(void **state)
{
    struct fixture *f = *state;
    int old = 1, failures = 0;
    assert_ok(save(f->dir, 7, old));
    for (int64_t k = 1, fine = 0; fine < QUIET_FAILURES; k++) {
        file_fail_at(k);
        enum status st = save(f->dir, 7, old + 1);
        file_fail_at(0);
        fine = st == ST_OK ? fine + 1 : 0;
        bool is_new = st == ST_OK || strstr(status_message(), "published") == status_message();
        struct checkpoint_found found = latest(f);
        assert_int_equal(found.step, 7);
        assert_int_equal(mark_of(found.path), is_new ? old + 1 : old);
        old += is_new;
        failures += st != ST_OK;
        assert_ok(checkpoint_sweep(f->dir));
        assert_int_equal(count(f, ".old-") + count(f, ".tmp-"), 0);
        assert_int_equal(count(f, "step-"), 1);
    }
    assert_true(failures > 20);
}

static void a_full_disk_is_an_error_with_the_file_and_leaves_nothing(void **state)
{
    struct fixture *f = *state;
    struct rlimit old, small;
    assert_ok(save(f->dir, 1, 1));
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    signal(SIGXFSZ, SIG_IGN);
    struct stat info;
    char path[1024];
    assert_int_equal(stat(in_dir(f, path, "step-00000001/data-00000.tsr"), &info), 0);
    rlim_t bytes = (rlim_t)info.st_size;
    for (rlim_t limit = 0; limit < bytes - 60; limit += bytes / 13) {
        small = old;
        small.rlim_cur = limit;
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
        enum status st = save(f->dir, 2, 2);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
        assert_fails(st, ST_IO, "data-00000.tsr: byte ");
        assert_message_has("too large", __FILE__, __LINE__);
        assert_int_equal(count(f, "."), 2); /* itself and its parent */
        assert_int_equal(mark_of(latest(f).path), 1);
    }
}

/* ---- kills ----------------------------------------------------------------------------------- */

enum { KILLS = 20, KEEP = 2 };

/* Saves step after step and tells each one that is done, until it is killed. */
static void save_for_ever(const struct fixture *f, int64_t step, int out)
{
    for (;; step++) {
        int32_t done = (int32_t)step;
        if (save(f->dir, step, (int)step) != ST_OK || save(f->dir, step, (int)step) != ST_OK ||
            write(out, &done, sizeof done) != sizeof done ||
            checkpoint_remove_old(f->dir, KEEP, NULL) != ST_OK)
            _exit(1);
    }
}

static void b69_after_a_kill_at_any_time_the_newest_one_is_found_and_whole(void **state)
{
    struct fixture *f = *state;
    int64_t newest = 0;
    int interrupted = 0, kills = test_kills(KILLS);
    assert_ok(save(f->dir, 0, 0));
    for (int i = 0; i < kills; i++) {
        int pipe_fd[2], status;
        int32_t done;
        assert_int_equal(pipe(pipe_fd), 0);
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0)
            save_for_ever(f, newest + 1, pipe_fd[1]);
        close(pipe_fd[1]);
        usleep((useconds_t)(test_random(&f->seed) % 60000));
        assert_int_equal(kill(child, SIGKILL), 0);
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFSIGNALED(status)); /* no save failed by itself */
        while (read(pipe_fd[0], &done, sizeof done) == sizeof done)
            newest = done;
        close(pipe_fd[0]);
        struct checkpoint_found found = latest(f);
        assert_true(found.step == newest || found.step == newest + 1);
        assert_int_equal(found.damaged, 0);
        assert_int_equal(mark_of(found.path), found.step);
        interrupted += count(f, ".tmp-") + count(f, ".old-") + count(f, ".del-") > 0;
        assert_ok(checkpoint_sweep(f->dir));
        assert_int_equal(count(f, ".tmp-") + count(f, ".old-") + count(f, ".del-"), 0);
        found = latest(f);
        assert_int_equal(mark_of(found.path), found.step);
        newest = found.step;
    }
    print_message("%d of %d kills left something hidden; step %d\n", interrupted, kills,
                  (int)newest);
    assert_true(interrupted > 0);
}

/* ---- what is found --------------------------------------------------------------------------- */

static int readable_entries = -1; /* of a folder, before its disk stops answering; -1: all */

/* The program's own, in place of the C library's. */
struct dirent *readdir(DIR *folder)
{
    static struct dirent *(*next)(DIR *);
    if (next == NULL) {
        void *symbol = dlsym(RTLD_NEXT, "readdir");
        memcpy(&next, &symbol, sizeof next);
    }
    if (readable_entries == 0) {
        errno = EIO;
        return NULL;
    }
    readable_entries -= readable_entries > 0;
    return next(folder);
}

/* That nothing was found there has to be known for sure: otherwise the run would start afresh. */
static void b74_what_cannot_be_read_is_not_taken_for_nothing(void **state)
{
    struct fixture *f = *state;
    char path[1024];
    struct checkpoint_found found;
    struct checkpoint_list list = {0};
    assert_ok(save(f->dir, 5, 5));
    for (readable_entries = 0; readable_entries < 3;) {
        int entries = readable_entries;
        enum status st = checkpoint_find_latest(&found, f->dir, INT64_MAX);
        readable_entries = entries;
        assert_fails(st, ST_IO, "cannot be read to its end");
        assert_int_equal(found.step, -1);
        assert_fails(checkpoint_list(&list, f->dir), ST_IO, "cannot be read to its end");
        checkpoint_list_release(&list);
        readable_entries = entries + 1;
    }
    readable_entries = -1;
    /* A manifest that is there and does not open. */
    assert_int_equal(mkdir(in_dir(f, path, "step-00000009"), 0777), 0);
    assert_int_equal(symlink("manifest.json", in_dir(f, path, "step-00000009/manifest.json")), 0);
    found = latest(f);
    assert_int_equal(found.step, 5);
    assert_int_equal(found.damaged, 1);
}

static void b69_folders_without_a_valid_manifest_never_win(void **state)
{
    struct fixture *f = *state;
    char path[1024];
    struct checkpoint_found found = latest(f); /* no folder at all */
    assert_int_equal(found.step, -1);
    assert_string_equal(found.path, "");
    assert_ok(save(f->dir, 5, 5));
    assert_ok(save(f->dir, 100000000, 9)); /* nine digits */
    static const char *const strangers[] = {"step-00000200",   "step-999999999", "step-7",
                                            "step-0000000x",   "step-000000300", "step-",
                                            ".tmp-step-1-1-1", "stepmother"};
    for (size_t i = 0; i < sizeof strangers / sizeof *strangers; i++)
        assert_int_equal(mkdir(in_dir(f, path, strangers[i]), 0777), 0);
    put(f, "step-7/manifest.json", "{}");
    put(f, "step-000000300/manifest.json", "{}");
    put(f, "step-00000200/data-00000.tsr", "half");
    put(f, "latest", "step-00000005\n"); /* an old hint */
    found = latest(f);
    assert_int_equal(found.step, 100000000);
    assert_int_equal(found.damaged, 0);
    assert_int_equal(mark_of(found.path), 9);
    put(f, "step-00000200/manifest.json", "{}"); /* damaged, but older */
    put(f, "step-999999999/manifest.json", "{}");
    found = latest(f);
    assert_int_equal(found.step, 100000000);
    assert_int_equal(found.damaged, 1);
    /* A copy under the name of a later step. */
    assert_int_equal(unlink(in_dir(f, path, "step-999999999/manifest.json")), 0);
    char to[1024];
    assert_int_equal(rename(in_dir(f, path, "step-100000000"), in_dir(f, to, "step-100000001")), 0);
    found = latest(f);
    assert_int_equal(found.step, 5);
    assert_int_equal(found.damaged, 2);
    struct checkpoint_list list = {0};
    assert_ok(checkpoint_list(&list, f->dir));
    assert_int_equal(list.count, 3);
    assert_int_equal(list.entries[0].step, 5);
    assert_int_equal(list.entries[0].status, ST_OK);
    assert_int_equal(list.entries[0].plain_bytes, 2 * 4 * NUMEL);
    assert_true(list.entries[0].bytes > 0);
    assert_int_equal(list.entries[1].status, ST_CORRUPT);
    assert_non_null(strstr(list.entries[1].problem, "step-00000200"));
    assert_non_null(strstr(list.entries[2].problem, "of step 100000000 under another name"));
    checkpoint_list_release(&list);
}

static void only_damaged_ones_is_not_the_same_as_none(void **state)
{
    struct fixture *f = *state;
    char path[1024];
    assert_ok(save(f->dir, 5, 5));
    assert_int_equal(unlink(in_dir(f, path, "step-00000005/data-00001.tsr")), 0);
    struct checkpoint_found found = latest(f);
    assert_int_equal(found.step, -1);
    assert_int_equal(found.damaged, 1);
}

static void b74_a_step_that_is_asked_for_and_not_there_is_an_error(void **state)
{
    struct fixture *f = *state;
    struct checkpoint c = {0};
    char path[1024];
    assert_ok(save(f->dir, 5, 5));
    assert_fails(checkpoint_open(&c, in_dir(f, path, "step-00000006")), ST_IO,
                 "step-00000006: there is no checkpoint");
    checkpoint_close(&c);
    assert_fails(checkpoint_open(&c, f->dir), ST_IO, "not a complete checkpoint");
    checkpoint_close(&c);
    assert_fails(checkpoint_open(&c, in_dir(f, path, "latest")), ST_IO, "is not a folder");
    checkpoint_close(&c);
    assert_int_equal(mkdir(in_dir(f, path, "step-00000007"), 0777), 0);
    assert_fails(checkpoint_open(&c, path), ST_IO, "it has no manifest.json");
    checkpoint_close(&c);
}

static void the_hint_names_the_newest_and_may_be_in_the_way(void **state)
{
    struct fixture *f = *state;
    struct file_text text;
    char path[1024];
    assert_ok(save(f->dir, 5, 5));
    assert_ok(file_read(&text, in_dir(f, path, "latest")));
    assert_string_equal(text.data, "step-00000005\n");
    mem_free(&text.data);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkdir(path, 0777), 0);
    assert_ok(save(f->dir, 6, 6));
    assert_int_equal(latest(f).step, 6);
}

/* ---- a save cut short between two renames ---------------------------------------------------- */

static void what_was_moved_aside_and_not_replaced_is_still_found(void **state)
{
    struct fixture *f = *state;
    char from[1024], to[1024];
    assert_ok(save(f->dir, 4, 4));
    assert_ok(save(f->dir, 5, 5));
    in_dir(f, from, "step-00000005");
    in_dir(f, to, ".old-step-00000005-77-0");
    assert_int_equal(rename(from, to), 0);
    struct checkpoint_found found = latest(f);
    assert_int_equal(found.step, 5);
    assert_int_equal(mark_of(found.path), 5);
    assert_ok(save(f->dir, 5, 6)); /* a new one beside it wins */
    assert_int_equal(mark_of(latest(f).path), 6);
    struct checkpoint_list list = {0};
    assert_ok(checkpoint_list(&list, f->dir));
    assert_int_equal(list.count, 2);
    checkpoint_list_release(&list);
    put(f, "step-00000005/manifest.json", "{}"); /* damaged: the other one is all there is */
    assert_ok(checkpoint_sweep(f->dir));
    assert_int_equal(mark_of(latest(f).path), 5);
    char path[1024];
    assert_int_equal(rename(from, in_dir(f, path, "damaged")), 0);
    assert_ok(checkpoint_sweep(f->dir)); /* back under its name */
    assert_false(is_there(f, ".old-step-00000005-77-0"));
    assert_int_equal(mark_of(from), 5);
}

/* ---- removing -------------------------------------------------------------------------------- */

static void b71_old_ones_go_the_newest_and_the_best_and_all_else_stay(void **state)
{
    struct fixture *f = *state;
    char path[1024], best[1024];
    for (int step = 1; step <= 6; step++)
        assert_ok(save(f->dir, step, step));
    put(f, "step-00000002/notes.txt", "mine");
    put(f, "notes.txt", "mine");
    assert_int_equal(mkdir(in_dir(f, path, "step-1"), 0777), 0);
    put(f, "step-1/manifest.json", "mine");
    assert_int_equal(unlink(in_dir(f, path, "step-00000006/data-00000.tsr")), 0); /* damaged */
    in_dir(f, best, "step-00000003/");
    assert_ok(checkpoint_remove_old(f->dir, 1, best));
    assert_false(is_there(f, "step-00000001"));
    assert_true(is_there(f, "step-00000002/notes.txt") &&
                is_there(f, "step-00000002/manifest.json")); /* holds a stranger */
    assert_true(is_there(f, "step-00000003"));
    assert_false(is_there(f, "step-00000004"));
    assert_true(is_there(f, "step-00000005")); /* the newest complete one */
    assert_true(is_there(f, "step-00000006"));
    assert_true(is_there(f, "notes.txt") && is_there(f, "step-1/manifest.json"));
    assert_int_equal(mark_of(latest(f).path), 5);
    assert_int_equal(mark_of(best), 3);
    assert_int_equal(count(f, ".del-"), 0);
}

static void a_step_that_holds_a_stranger_is_not_overwritten(void **state)
{
    struct fixture *f = *state;
    char path[1024];
    assert_ok(save(f->dir, 5, 5));
    put(f, "step-00000005/notes.txt", "mine");
    assert_fails(save(f->dir, 5, 6), ST_INVALID, "holds \"notes.txt\"");
    assert_int_equal(mark_of(in_dir(f, path, "step-00000005")), 5);
    put(f, "step-00000006", "a file");
    assert_fails(save(f->dir, 6, 6), ST_INVALID, "is not a folder");
    assert_int_equal(symlink("elsewhere", in_dir(f, path, "step-00000007")), 0);
    assert_fails(save(f->dir, 7, 7), ST_INVALID, "is not a folder");
    assert_int_equal(count(f, ".tmp-"), 0);
    assert_int_equal(mkdir(in_dir(f, path, "step-00000008"), 0777), 0); /* empty: ours */
    assert_ok(save(f->dir, 8, 8));
}

static void sweeping_takes_only_what_killed_saves_leave(void **state)
{
    struct fixture *f = *state;
    char path[1024];
    static const char *const ours[] = {".tmp-step-00000009-1-1", ".del-step-00000002-5-0"};
    static const char *const not_ours[] = {".tmp-step-9-1-1", ".tmp-other", ".tmp-step-00000009",
                                           ".tmp-step-00000010-1-1"};
    assert_ok(checkpoint_sweep(f->dir)); /* not there yet */
    assert_ok(save(f->dir, 1, 1));
    for (int i = 0; i < 2; i++)
        assert_int_equal(mkdir(in_dir(f, path, ours[i]), 0777), 0);
    put(f, ".tmp-step-00000009-1-1/data-00000.tsr", "half");
    put(f, ".tmp-step-00000009-1-1/.tessera-1-1.tmp", "half");
    for (int i = 0; i < 4; i++)
        assert_int_equal(mkdir(in_dir(f, path, not_ours[i]), 0777), 0);
    put(f, ".tmp-step-00000010-1-1/notes.txt", "mine");
    assert_ok(checkpoint_sweep(f->dir));
    for (int i = 0; i < 2; i++)
        assert_false(is_there(f, ours[i]));
    for (int i = 0; i < 4; i++)
        assert_true(is_there(f, not_ours[i]));
    assert_true(is_there(f, ".tmp-step-00000010-1-1/notes.txt"));
    assert_int_equal(mark_of(latest(f).path), 1);
}

static void b77_saves_leave_memory_and_files_as_they_were(void **state)
{
    struct fixture *f = *state;
    int64_t before = mem_live_bytes();
    for (int step = 0; step < 25; step++) {
        assert_ok(save(f->dir, step, step));
        assert_ok(checkpoint_remove_old(f->dir, KEEP, NULL));
        assert_int_equal(mem_live_bytes(), before);
    }
    int fd = open("/dev/null", O_RDONLY); /* the lowest free one: none was left open */
    assert_in_range(fd, 0, 15);
    close(fd);
    assert_int_equal(count(f, "step-"), KEEP);
    assert_int_equal(count(f, "."), 2);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(b69_b71_a_save_that_fails_anywhere_leaves_the_earlier_checkpoint),
        TEST(b72_overwriting_a_step_gives_the_old_or_the_new_one_whole),
        TEST(a_full_disk_is_an_error_with_the_file_and_leaves_nothing),
        TEST(b69_after_a_kill_at_any_time_the_newest_one_is_found_and_whole),
        TEST(b74_what_cannot_be_read_is_not_taken_for_nothing),
        TEST(b69_folders_without_a_valid_manifest_never_win),
        TEST(only_damaged_ones_is_not_the_same_as_none),
        TEST(b74_a_step_that_is_asked_for_and_not_there_is_an_error),
        TEST(the_hint_names_the_newest_and_may_be_in_the_way),
        TEST(what_was_moved_aside_and_not_replaced_is_still_found),
        TEST(b71_old_ones_go_the_newest_and_the_best_and_all_else_stay),
        TEST(a_step_that_holds_a_stranger_is_not_overwritten),
        TEST(sweeping_takes_only_what_killed_saves_leave),
        TEST(b77_saves_leave_memory_and_files_as_they_were),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
