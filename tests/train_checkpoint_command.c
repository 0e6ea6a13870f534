/* `tessera checkpoint`, called in this process: what it prints and what it returns. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/base/file.h"
#include "engine/base/out.h"
#include "engine/train/commands.h"
#include "io/checkpoint.h"
#include "tests/support/support.h"

static const char GOLDEN[] = "tests/data/checkpoint/version-1";

struct fixture {
    struct scratch scratch;
    struct file_text printed; /* by the last command */
};

static int set_up(void **state)
{
    static struct fixture f;
    memset(&f, 0, sizeof f);
    scratch_make(&f.scratch);
    *state = &f;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *f = *state;
    mem_free(&f->printed.data);
    scratch_remove(&f->scratch);
    return 0;
}

/* Runs the command with standard output in a file. */
static enum status run(struct fixture *f, const char *action, const char *a, const char *b)
{
    char path[512];
    char *argv[] = {"checkpoint", (char *)action, (char *)a, (char *)b, NULL};
    scratch_path(&f->scratch, path, "printed");
    fflush(stdout);
    int kept = dup(STDOUT_FILENO), file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    assert_true(kept >= 0 && file >= 0 && dup2(file, STDOUT_FILENO) >= 0);
    enum status st = cmd_checkpoint(action == NULL ? 1 : a == NULL ? 2 : b == NULL ? 3 : 4, argv);
    enum status flushed = out_flush();
    assert_true(dup2(kept, STDOUT_FILENO) >= 0);
    close(kept);
    close(file);
    assert_int_equal(flushed, ST_OK);
    mem_free(&f->printed.data);
    enum status read = file_read(&f->printed, path);
    assert_int_equal(read, ST_OK);
    return st;
}

static void assert_printed(const struct fixture *f, const char *text)
{
    if (strstr(f->printed.data, text) == NULL)
        fail_msg("\"%s\" is not in what was printed:\n%s", text, f->printed.data);
}

/* One tensor, one writer. */
static void save(const char *dir, int64_t step, const float *x, int64_t numel)
{
    char temp[CHECKPOINT_PATH_BYTES];
    struct checkpoint_writer w = {0};
    struct checkpoint_file file;
    struct checkpoint_tensor t = {
        .name = "w", .dims = 1, .shape = {numel}, .states = {"master"}, .state_count = 1};
    assert_ok(checkpoint_begin(temp, dir, step));
    assert_ok(checkpoint_writer_open(&w, temp, 0, NULL));
    assert_ok(checkpoint_write_range(&w, "master", "w", 0, x, numel));
    assert_ok(checkpoint_writer_close(&w, &file));
    struct checkpoint_manifest m = {step, &t, 1, &file, 1, NULL};
    assert_ok(checkpoint_publish(NULL, dir, temp, &m));
}

static void verify_says_in_its_status_whether_all_is_right(void **state)
{
    struct fixture *f = *state;
    char path[512], data[600];
    float x[100] = {1, 2, 3};
    assert_ok(run(f, "verify", GOLDEN, NULL));
    assert_printed(f, "all hashes are right");
    save(f->scratch.dir, 3, x, 100);
    scratch_path(&f->scratch, path, "step-00000003");
    assert_ok(run(f, "verify", path, NULL));
    snprintf(data, sizeof data, "%s/data-00000.tsr", path);
    int fd = open(data, O_WRONLY);
    assert_int_equal(pwrite(fd, "x", 1, 17), 1);
    close(fd);
    assert_fails(run(f, "verify", path, NULL), ST_CORRUPT, "2 problems");
    assert_printed(f, "data-00000.tsr: is damaged");
    assert_printed(f, "tensor \"w\", master: elements 0 to 99 are damaged");
    assert_fails(run(f, "verify", f->scratch.dir, NULL), ST_IO, "not a complete checkpoint");
}

static void list_and_show_tell_what_is_there(void **state)
{
    struct fixture *f = *state;
    char path[600];
    float x[100] = {0};
    save(f->scratch.dir, 3, x, 100);
    save(f->scratch.dir, 12, x, 100);
    snprintf(path, sizeof path, "%s/step-00000012/data-00000.tsr", f->scratch.dir);
    assert_int_equal(truncate(path, 70), 0);
    assert_ok(run(f, "list", f->scratch.dir, NULL));
    assert_printed(f, "complete  ");
    assert_printed(f, "damaged   ");
    assert_printed(f, "has 70 bytes");
    assert_ok(run(f, "show", GOLDEN, NULL));
    assert_printed(f, "step      1234");
    assert_printed(f, "embeddings.weight");
    assert_printed(f, "(40, 24)");
    assert_printed(f, "\"epoch\": 3");
}

static void diff_finds_the_largest_difference_of_large_states(void **state)
{
    struct fixture *f = *state;
    enum { NUMEL = 600000 }; /* more than two pieces */
    char a[512], b[512];
    float *x = NULL;
    assert_ok(mem_alloc(&x, NUMEL * sizeof *x));
    save(f->scratch.dir, 1, x, NUMEL);
    x[3] = -0.0f; /* equal in value, not in bits */
    x[555555] = -2.5f;
    save(f->scratch.dir, 2, x, NUMEL);
    mem_free(&x);
    scratch_path(&f->scratch, a, "step-00000001");
    scratch_path(&f->scratch, b, "step-00000002");
    int64_t before = mem_live_bytes();
    assert_fails(run(f, "diff", a, b), ST_CORRUPT, "step-00000002 has other values than");
    assert_true(mem_live_bytes() - before < 1 << 16);
    assert_printed(f, "2.5  2 of 600000 elements, largest at 555555");
    assert_printed(f, "0 states are equal to the bit, 1 differ, 0 cannot be compared");
    assert_ok(run(f, "diff", a, a));
    assert_printed(f, "1 states are equal to the bit, 0 differ");
    assert_fails(run(f, "diff", a, GOLDEN), ST_CORRUPT, "has other values than");
    assert_printed(f, "0 states are equal to the bit, 0 differ, 5 cannot be compared");
}

static void wrong_arguments_are_told(void **state)
{
    struct fixture *f = *state;
    assert_fails(run(f, NULL, NULL, NULL), ST_INVALID, "list, show, verify, diff, reshard");
    assert_fails(run(f, "lsit", "x", NULL), ST_INVALID, "unknown action \"lsit\"");
    assert_fails(run(f, "diff", "x", NULL), ST_INVALID, "takes 2 paths");
    assert_fails(run(f, "show", "--all", NULL), ST_INVALID, "--all");
    assert_ok(run(f, "--help", NULL, NULL));
    assert_printed(f, "checkpoint verify PATH");
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(verify_says_in_its_status_whether_all_is_right),
        TEST(list_and_show_tell_what_is_there),
        TEST(diff_finds_the_largest_difference_of_large_states),
        TEST(wrong_arguments_are_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
