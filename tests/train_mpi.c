/*
 * `tessera train` under mpiexec: the same bits as ranks that are threads, what is refused, and how
 * it ends. TESSERA names the program; ./tessera if it is not set.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/arena.h"
#include "engine/base/clock.h"
#include "engine/base/file.h"
#include "tests/support/mpi.h"
#include "tests/support/ranks.h"
#include "tests/support/run.h"

static struct scratch scratch;
static struct job job;

static const char *program(void)
{
    const char *path = getenv("TESSERA");
    return path != NULL ? path : "./tessera";
}

static int make_data(void **state)
{
    struct made_questions train = {20, 5, 70, 4, .seed = 51}, eval = train;
    eval.count = 6;
    return run_set_up(state, &scratch, &train, &eval);
}

/* run.yaml; its path in @out. */
static const char *put_config(char out[512], const struct run_config *c)
{
    char *text = NULL;
    size_t bytes = 0;
    assert_ok(config_write(c, &text, &bytes));
    scratch_put(&scratch, out, "run.yaml", text, bytes);
    mem_free(&text);
    return out;
}

static struct run_config tiny(int stage, int64_t steps)
{
    struct tiny_run with = {1, stage, 2, steps, REDUCE_PER_MICRO_BATCH, .eval = true};
    return run_tiny_with(&scratch, with);
}

static void start_train(struct job *j, int processes, const struct run_config *c,
                        const char *output, const char *option, const char *text)
{
    char config[512], folder[512];
    job_start(j, &scratch, processes,
              (const char *const[]){program(), "train", "--config", put_config(config, c),
                                    "--output-dir", scratch_path(&scratch, folder, output), option,
                                    text, NULL});
}

static void train(int processes, const struct run_config *c, const char *output, const char *option,
                  const char *text)
{
    start_train(&job, processes, c, output, option, text);
    job_wait(&job);
}

static void read_file(struct file_text *text, const char *name)
{
    char path[512];
    assert_ok(file_read(text, scratch_path(&scratch, path, name)));
}

static bool is_there(const char *name)
{
    char path[512];
    return access(scratch_path(&scratch, path, name), F_OK) == 0;
}

/* ---- the same bits ---- */

/* How many times "@key":number stands in both, with the same digits each time. */
static int same_numbers(const char *a, const char *b, const char *key)
{
    int count = 0;
    char quoted[32];
    snprintf(quoted, sizeof quoted, "\"%s\":", key);
    for (;; count++) {
        a = strstr(a, quoted);
        b = strstr(b, quoted);
        assert_true((a == NULL) == (b == NULL));
        if (a == NULL)
            return count;
        a += strlen(quoted);
        b += strlen(quoted);
        size_t length = strcspn(a, ",}");
        assert_int_equal(length, strcspn(b, ",}"));
        if (memcmp(a, b, length) != 0)
            fail_msg("%s: %.*s and %.*s", key, (int)length, a, (int)length, b);
    }
}

static void compare_runs(void)
{
    struct file_text local = {NULL, 0}, mpi = {NULL, 0};
    read_file(&local, "local/metrics.jsonl");
    read_file(&mpi, "mpi/metrics.jsonl");
    assert_int_equal(same_numbers(local.data, mpi.data, "grad_norm"), 4);
    assert_in_range(same_numbers(local.data, mpi.data, "loss"), 5, 20);
    assert_in_range(same_numbers(local.data, mpi.data, "f1"), 1, 20);
    mem_free(&local.data);
    mem_free(&mpi.data);
    read_file(&local, "local/model/model.safetensors");
    read_file(&mpi, "mpi/model/model.safetensors");
    assert_int_equal(local.bytes, mpi.bytes);
    assert_memory_equal(local.data, mpi.data, local.bytes);
    mem_free(&local.data);
    mem_free(&mpi.data);
}

static void all_stages_give_the_bits_of_local_on_2_and_3_ranks(void **state)
{
    (void)state;
    mpi_skip_without();
    for (int ranks = 2; ranks <= 3; ranks++)
        for (int stage = 0; stage < 4; stage++) {
            struct run_config c = tiny(stage, 4);
            char count[16];
            c.train.tables = ranks == 3 ? TABLES_ROWS : TABLES_WHOLE;
            snprintf(count, sizeof count, "%d", ranks);
            train(0, &c, "local", "--ranks", count);
            job_expect(&job, true, "comm local");
            train(ranks, &c, "mpi", NULL, NULL);
            job_expect(&job, true, "comm mpi");
            compare_runs();
        }
}

static void one_rank_needs_no_launcher(void **state)
{
    (void)state;
    mpi_skip_without();
    struct run_config c = tiny(3, 4);
    train(0, &c, "local", NULL, NULL);
    job_expect(&job, true, "comm local");
    train(0, &c, "mpi", "--comm", "mpi");
    job_expect(&job, true, "comm mpi");
    compare_runs();
}

static double number_in(const char *text, const char *key)
{
    const char *at = strstr(text, key);
    if (at == NULL)
        fail_msg("no %s in %.500s", key, text);
    return strtod(at + strlen(key), NULL);
}

/* tessera train --comm mpi --ranks 3, without a launcher. */
static void mpiexec_is_started_for_ranks_that_nobody_started(void **state)
{
    (void)state;
    mpi_skip_without();
    struct run_config c = tiny(3, 4);
    c.train.ranks = 3;
    train(0, &c, "local", NULL, NULL);
    job_expect(&job, true, "comm local");
    train(0, &c, "mpi", "--comm", "mpi");
    job_expect(&job, true, "rank 2 of 3");
    job_expect(&job, true, "comm mpi");
    compare_runs();
}

static void without_mpiexec_its_name_is_said(void **state)
{
    (void)state;
    mpi_skip_without();
    char path[4096];
    struct run_config c = tiny(1, 1);
    c.train.ranks = 2;
    snprintf(path, sizeof path, "%s", getenv("PATH"));
    setenv("PATH", "/nowhere", 1);
    train(0, &c, "none", "--comm", "mpi");
    setenv("PATH", path, 1);
    assert_int_equal(job.code, 127);
    job_expect(&job, false, "mpiexec of Open MPI is not in PATH");
    assert_false(is_there("none"));
}

/* The staging of the all-to-all is in it. */
static void the_plan_is_the_arena_of_the_run(void **state)
{
    (void)state;
    mpi_skip_without();
    struct file_text text = {NULL, 0};
    char config[512];
    struct run_config c = tiny(3, 4);
    train(2, &c, "mpi", NULL, NULL);
    job_expect(&job, true, "comm mpi");
    read_file(&text, "mpi/summary.json");
    double arena = number_in(text.data, "\"arena\":");
    mem_free(&text.data);
    scratch_path(&scratch, config, "mpi/config.yaml");
    job_start(
        &job, &scratch, 0,
        (const char *const[]){program(), "plan", "--config", config, "--json", "--data", NULL});
    job_wait(&job);
    job_expect(&job, true, "\"zero_stage\":3");
    assert_true(number_in(strstr(job.output, "\"zero_stage\":3"), "\"total\":") == arena);
}

/* ---- what is refused ---- */

static void mpi_that_is_not_built_in_is_said(void **state)
{
    (void)state;
#ifdef TESSERA_MPI
    skip();
#else
    struct run_config c = tiny(1, 1);
    c.train.ranks = 2;
    train(0, &c, "none", "--comm", "mpi");
    job_expect(&job, false, "train.comm mpi is not built in");
    assert_false(is_there("none"));
#endif
}

static void nccl_is_no_name_for_cpu_ranks(void **state)
{
    (void)state;
    struct run_config c = tiny(1, 1);
    c.train.device = DEVICE_CPU;
    train(0, &c, "none", "--comm", "nccl");
    job_expect(&job, false, "train.comm nccl needs");
    assert_false(is_there("none"));
}

static void a_world_that_is_not_the_launchers_is_refused(void **state)
{
    (void)state;
    mpi_skip_without();
    struct run_config c = tiny(1, 1);
    train(2, &c, "none", "--ranks", "3");
    job_expect(&job, false, "3 ranks are asked for, but Open MPI started 2");
    train(2, &c, "none", "--comm", "local");
    job_expect(&job, false, "train.comm local");
    assert_false(is_there("none"));
}

/* Rank r has @option with r behind it; named is @what. */
static void expect_differing(const struct run_config *c, const char *option, const char *what)
{
    char config[512], folder[512], command[1024];
    snprintf(command, sizeof command,
             "exec \"$0\" train --config \"$1\" --output-dir \"$2\" --set %s$OMPI_COMM_WORLD_RANK",
             option);
    job_start(&job, &scratch, 2,
              (const char *const[]){"/bin/sh", "-c", command, program(), put_config(config, c),
                                    scratch_path(&scratch, folder, "differ"), NULL});
    job_wait(&job);
    job_expect(&job, false, "rank 1 differs from rank 0 in ");
    job_expect(&job, false, what);
}

static void ranks_that_do_not_have_the_same_run_are_refused(void **state)
{
    (void)state;
    mpi_skip_without();
    struct run_config c = tiny(1, 1);
    struct file_text text;
    char path[512], option[600];
    c.train.comm = COMM_MPI;
    read_file(&text, "train.json");
    scratch_put(&scratch, path, "of-rank-0", text.data, text.bytes);
    text.data[text.bytes] = ' '; /* in place of the zero behind it */
    scratch_put(&scratch, path, "of-rank-1", text.data, text.bytes + 1);
    mem_free(&text.data);
    path[strlen(path) - 1] = '\0';
    snprintf(option, sizeof option, "data.train=%s", path);
    expect_differing(&c, option, "in the content of data.train: ");
    expect_differing(&c, "train.seed=1", "in train.seed: 11 and 10;");
    expect_differing(&c, "train.steps=1", "in the number of steps: 11 and 10;");
    expect_differing(&c, "train.micro_batch=1", "in the sequences of a step: 44 and 40;");
    expect_differing(&c, "model.ffn=1", "in the layout of the model: ");
}

/* ---- the end ---- */

/* Into folder @output; @launched: by a mpiexec of ours, else by that of `tessera train`. */
static void start_long(struct job *j, const char *output, bool launched)
{
    struct run_config c = tiny(3, 100000);
    c.train.ranks = 3;
    char old[512], metrics[64], summary[64];
    c.data.eval[0] = '\0';
    snprintf(metrics, sizeof metrics, "%s/metrics.jsonl", output);
    snprintf(summary, sizeof summary, "%s/summary.json", output);
    unlink(scratch_path(&scratch, old, metrics));
    unlink(scratch_path(&scratch, old, summary));
    start_train(j, launched ? 3 : 0, &c, output, "--comm", "mpi");
    for (int64_t begun = clock_ms();; sleep_ms(20)) {
        struct file_text text = {NULL, 0};
        bool begins = false;
        if (is_there(metrics)) {
            read_file(&text, metrics);
            begins = strstr(text.data, "\"step\":20,") != NULL;
            mem_free(&text.data);
        }
        if (begins)
            return;
        if (clock_ms() - begun > 30000)
            fail_msg("no step came");
    }
}

/* The process id of rank 1 stands in the banner. */
static pid_t pid_of_rank_1(void)
{
    struct file_text text = {NULL, 0};
    assert_ok(file_read(&text, job.path));
    pid_t pid = (pid_t)number_in(strstr(text.data, "rank 1 of 3"), "pid ");
    mem_free(&text.data);
    assert_true(pid > 1);
    return pid;
}

static void a_killed_rank_ends_the_run_in_seconds(void **state)
{
    (void)state;
    mpi_skip_without();
    start_long(&job, "long", true);
    int64_t begun = clock_ms();
    kill(pid_of_rank_1(), SIGKILL);
    job_wait(&job);
    job_expect(&job, false, "process rank 1");
    assert_in_range(clock_ms() - begun, 0, 15000);
    assert_false(is_there("long/summary.json"));
}

static void expect_ended_by_signal(const struct job *j, const char *output)
{
    struct file_text text = {NULL, 0};
    char summary[64];
    snprintf(summary, sizeof summary, "%s/summary.json", output);
    job_expect(j, false, "mean loss");
    read_file(&text, summary);
    assert_non_null(strstr(text.data, "\"ended\":\"signal\""));
    mem_free(&text.data);
}

static void a_signal_finishes_the_step_and_writes_what_there_is(void **state)
{
    (void)state;
    mpi_skip_without();
    setenv("OMPI_MCA_odls_base_sigkill_timeout", "6", 1);
    start_long(&job, "long", true);
    unsetenv("OMPI_MCA_odls_base_sigkill_timeout");
    kill(job.pid, SIGTERM);
    job_wait(&job);
    expect_ended_by_signal(&job, "long");
}

/* The ranks hear of it at once and have their time: mpiexec is not told to end them. It waits for
 * seconds when they are gone, so the next run is started meanwhile. */
static void a_signal_to_the_parent_of_mpiexec_is_the_exit_code(void **state)
{
    static const int signals[] = {SIGTERM, SIGINT, SIGUSR1, SIGHUP};
    static const char *const outputs[] = {"long-0", "long-1", "long-2", "long-3"};
    static struct job jobs[4];
    (void)state;
    mpi_skip_without();
    for (int i = 0; i < 4; i++) {
        start_long(&jobs[i], outputs[i], false);
        kill(jobs[i].pid, signals[i]);
    }
    int64_t begun = clock_ms();
    for (int i = 0; i < 4; i++) {
        job_wait(&jobs[i]);
        assert_in_range(clock_ms() - begun, 0, 15000);
        expect_ended_by_signal(&jobs[i], outputs[i]);
        assert_int_equal(jobs[i].code, 128 + (signals[i] == SIGHUP ? SIGTERM : signals[i]));
    }
}

static void a_rank_that_is_killed_ends_the_mpiexec_of_tessera(void **state)
{
    (void)state;
    mpi_skip_without();
    start_long(&job, "long", false);
    int64_t begun = clock_ms();
    kill(pid_of_rank_1(), SIGKILL);
    job_wait(&job);
    job_expect(&job, false, "process rank 1");
    assert_int_equal(job.code, 128 + SIGKILL);
    assert_in_range(clock_ms() - begun, 0, 15000);
}

/* On rank 1 only: the others are in a collective by then. */
static void a_signal_to_one_rank_ends_all(void **state)
{
    (void)state;
    mpi_skip_without();
    start_long(&job, "long", true);
    kill(pid_of_rank_1(), SIGTERM);
    job_wait(&job);
    expect_ended_by_signal(&job, "long");
}

static void bad_data_ends_all_ranks_with_its_place(void **state)
{
    (void)state;
    mpi_skip_without();
    char path[512];
    struct run_config c = tiny(1, 1);
    scratch_put(&scratch, path, "bad.json", "{\"data\": [\n  {\"title\": \"x\",,}]}", 31);
    snprintf(c.data.train, sizeof c.data.train, "%s", path);
    train(2, &c, "none", NULL, NULL);
    job_expect(&job, false, "bad.json:2:");
    assert_in_range(job.ms, 0, 15000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_stages_give_the_bits_of_local_on_2_and_3_ranks),
        cmocka_unit_test(one_rank_needs_no_launcher),
        cmocka_unit_test(mpiexec_is_started_for_ranks_that_nobody_started),
        cmocka_unit_test(without_mpiexec_its_name_is_said),
        cmocka_unit_test(the_plan_is_the_arena_of_the_run),
        cmocka_unit_test(mpi_that_is_not_built_in_is_said),
        cmocka_unit_test(nccl_is_no_name_for_cpu_ranks),
        cmocka_unit_test(a_world_that_is_not_the_launchers_is_refused),
        cmocka_unit_test(ranks_that_do_not_have_the_same_run_are_refused),
        cmocka_unit_test(a_killed_rank_ends_the_run_in_seconds),
        cmocka_unit_test(a_signal_finishes_the_step_and_writes_what_there_is),
        cmocka_unit_test(a_signal_to_the_parent_of_mpiexec_is_the_exit_code),
        cmocka_unit_test(a_rank_that_is_killed_ends_the_mpiexec_of_tessera),
        cmocka_unit_test(a_signal_to_one_rank_ends_all),
        cmocka_unit_test(bad_data_ends_all_ranks_with_its_place),
    };
    return cmocka_run_group_tests(tests, make_data, run_tear_down);
}
