/* The program, killed at any time or warned by a scheduler, goes on where it stood. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/base/file.h"
#include "io/checkpoint.h"
#include "tests/support/ranks.h"
#include "tests/support/resume.h"

static pid_t start_program(const char *const *args)
{
    const char *path = getenv("TESSERA");
    fflush(NULL);
    pid_t pid = fork();
    if (pid != 0)
        return pid;
    int null = open("/dev/null", O_WRONLY);
    dup2(null, STDOUT_FILENO);
    dup2(null, STDERR_FILENO);
    execv(path != NULL ? path : "./tessera", (char *const *)args);
    _exit(97);
}

/* The newest step, once there is one beyond @before. */
static int64_t wait_for_save(const struct run_config *c, pid_t pid, int64_t before)
{
    char dir[600];
    struct checkpoint_found found;
    int64_t begun = clock_ms();
    int status = 0;
    snprintf(dir, sizeof dir, "%s/checkpoints", c->output.dir);
    do {
        sleep_ms(5);
        assert_ok(checkpoint_find_latest(&found, dir, INT64_MAX));
        assert_int_equal(found.damaged, 0);
        if (pid != 0 && waitpid(pid, &status, WNOHANG) != 0)
            fail_msg("the program ended with %d", status);
        assert_true(clock_ms() - begun < 60000);
    } while (found.step <= before);
    return found.step;
}

static void put_config(const struct run_config *c, char path[512])
{
    struct file_text text = {NULL, 0};
    assert_ok(config_write(c, &text.data, &text.bytes));
    scratch_put(&group.scratch, path, "program.yaml", text.data, text.bytes);
    mem_free(&text.data);
}

static void b69_killed_at_any_time_it_goes_on_with_other_ranks_and_stage(void **state)
{
    (void)state;
    char path[512], steps[32];
    uint64_t random = test_seed();
    struct file_text metrics;
    struct run_config c = resume_tiny("killed", 2, 3, 2000, 5);
    int64_t newest = -1, step = 0;
    int status = 0;
    pid_t pid;
    c.train.timeout_s = 20;
    put_config(&c, path);
    const char *begin[] = {"tessera", "train", "--config", path, "--resume-or-start", NULL};
    for (int kills = 0; kills < 4; kills++) {
        pid = start_program(begin);
        wait_for_save(&c, pid, newest);
        sleep_ms((int64_t)(test_random(&random) % 60));
        kill(pid, SIGKILL);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        newest = wait_for_save(&c, 0, newest);
    }
    snprintf(steps, sizeof steps, "--steps=%lld", (long long)newest + 6);
    const char *end[] = {"tessera",      "train",
                         "--config",     path,
                         "--resume",     "latest",
                         "--ranks",      "4",
                         "--zero-stage", "1",
                         "--set",        "train.grad_accum=1",
                         "--set",        "train.micro_batch=3",
                         steps,          NULL};
    pid = start_program(end);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_true(saved_is_there(&c, newest + 6));
    /* The record of the run has each step once. */
    run_read(&metrics, &c, "metrics.jsonl");
    for (const char *at = metrics.data; (at = strstr(at, "{\"step\":")) != NULL; at++)
        assert_int_equal(strtoll(at + 8, NULL, 10), ++step);
    assert_int_equal(step, newest + 6);
    mem_free(&metrics.data);
}

/* ---- killed again and again ------------------------------------------------------------------ */

/* The rest of a line of metrics.jsonl from @key to the next comma, or "". */
static void field(char out[64], const char *line, const char *key)
{
    const char *at = strstr(line, key), *end = strchr(line, '\n');
    out[0] = '\0';
    if (at != NULL && end != NULL && at < end)
        snprintf(out, 64, "%.*s", (int)strcspn(at, ",}"), at);
}

/* Both runs recorded each step once, with the same numbers to the last digit. */
static void same_records(const struct run_config *a, const struct run_config *b, int64_t steps)
{
    static const char *const keys[] = {"\"step\":", "\"loss\":", "\"grad_norm\":", "\"lr\":"};
    struct file_text x, y;
    run_read(&x, a, "metrics.jsonl");
    run_read(&y, b, "metrics.jsonl");
    const char *p = strstr(x.data, "{\"step\":"), *q = strstr(y.data, "{\"step\":");
    int64_t step = 0;
    for (; p != NULL && q != NULL; step++) {
        for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
            char of_a[64], of_b[64];
            field(of_a, p, keys[i]);
            field(of_b, q, keys[i]);
            assert_true(of_a[0] != '\0');
            assert_string_equal(of_a, of_b);
        }
        p = strstr(p + 1, "{\"step\":");
        q = strstr(q + 1, "{\"step\":");
    }
    assert_true(p == NULL && q == NULL);
    assert_int_equal(step, steps);
    mem_free(&x.data);
    mem_free(&y.data);
}

static void run_program(const char *const *args)
{
    int status = 0;
    pid_t pid = start_program(args);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* Every other kill comes at any time, also while the program starts; the others after a save. Each
 * life has another stage. */
static void kill_again_and_again(const char *name, int ranks, int kills, uint64_t *random)
{
    char path[512], steps[32], what[64], *const stages[] = {"0", "1", "2", "3"};
    struct run_config c = resume_tiny(name, ranks, 0, 1000000, 3), plain;
    int64_t newest = -1;
    int status = 0;
    put_config(&c, path);
    for (int i = 0; i < kills; i++) {
        const char *stage = stages[test_random(random) % 4];
        const char *args[] = {"tessera",           "train",        "--config", path,
                              "--resume-or-start", "--zero-stage", stage,      NULL};
        pid_t pid = start_program(args);
        if (i % 2 == 0)
            wait_for_save(&c, pid, newest);
        sleep_ms((int64_t)(test_random(random) % (i % 2 == 0 ? 40 : 300)));
        assert_int_equal(waitpid(pid, &status, WNOHANG), 0);
        kill(pid, SIGKILL);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        newest = wait_for_save(&c, 0, newest - 1);
    }
    snprintf(steps, sizeof steps, "--steps=%lld", (long long)newest + 4);
    run_program(
        (const char *[]){"tessera", "train", "--config", path, "--resume", "latest", steps, NULL});
    snprintf(what, sizeof what, "%s-plain", name);
    plain = resume_tiny(what, ranks, 3, newest + 4, 0);
    put_config(&plain, path);
    run_program((const char *[]){"tessera", "train", "--config", path, NULL});
    same_records(&c, &plain, newest + 4);
    print_message("%d ranks: killed %d times in %lld steps\n", ranks, kills, (long long)newest + 4);
}

static void b69_killed_again_and_again_the_record_is_that_of_an_unbroken_run(void **state)
{
    (void)state;
    static const int worlds[] = {2, 3, 4};
    int kills = test_kills(6), count = (int)(sizeof worlds / sizeof *worlds);
    uint64_t random = test_seed();
    for (int i = 0; i < count; i++) {
        char name[32];
        snprintf(name, sizeof name, "again-%d", worlds[i]);
        kill_again_and_again(name, worlds[i], (kills + i) / count, &random);
    }
}

static void b92_a_warning_from_the_scheduler_saves_and_the_exit_code_says_so(void **state)
{
    (void)state;
    char path[512];
    struct run_config c = resume_tiny("warned", 3, 2, 2000, 5);
    int status = 0;
    put_config(&c, path);
    const char *args[] = {"tessera", "train", "--config", path, "--resume-or-start", NULL};
    pid_t pid = start_program(args);
    int64_t newest = wait_for_save(&c, pid, -1);
    kill(pid, SIGUSR1);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 128 + SIGUSR1);
    newest = wait_for_save(&c, 0, newest);
    struct file_text metrics;
    char last[64];
    run_read(&metrics, &c, "metrics.jsonl");
    snprintf(last, sizeof last, "{\"step\":%lld,", (long long)newest);
    const char *at = strstr(metrics.data, last);
    assert_true(at != NULL && strstr(at + 1, "{\"step\":") == NULL); /* its last step is saved */
    mem_free(&metrics.data);
}

#define TEST(name) cmocka_unit_test_teardown(name, resume_release)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(b69_killed_at_any_time_it_goes_on_with_other_ranks_and_stage),
        TEST(b69_killed_again_and_again_the_record_is_that_of_an_unbroken_run),
        TEST(b92_a_warning_from_the_scheduler_saves_and_the_exit_code_says_so),
    };
    return cmocka_run_group_tests(tests, resume_set_up, run_tear_down);
}
