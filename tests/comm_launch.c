/* Starting ranks. The test program is its own rank: launch_spawn() executes it again, as "rank". */
#include "comm/launch.h"

#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/rendezvous.h"
#include "comm/socket.h"
#include "engine/base/arena.h"
#include "engine/base/clock.h"
#include "engine/base/file.h"
#include "tests/support/ranks.h"
#include "tests/support/support.h"

/* ---- what the ranks do ---------------------------------------------------------------------- */

static volatile sig_atomic_t caught;

static void note_signal(int signal_number)
{
    caught = signal_number;
}

static void say(const char *dir, const char *what, int rank, int value)
{
    char path[600], text[32];
    snprintf(path, sizeof path, "%s/%s-%d", dir, what, rank);
    int n = snprintf(text, sizeof text, "%d", value);
    if (file_write(path, text, (size_t)n) != ST_OK)
        _exit(99);
}

static int meet(const struct launch *l)
{
    struct rendezvous *rv = NULL;
    int32_t all[16] = {0}, mine = 100 + l->rank;
    if (launch_meet(&rv, l, 20000) != ST_OK)
        return 90;
    enum status st = rendezvous_exchange(rv, all, &mine, sizeof mine);
    for (int r = 0; r < l->world_size; r++)
        if (all[r] != 100 + r)
            st = ST_COMM;
    rendezvous_close(&rv);
    return st == ST_OK ? 0 : 91;
}

/* rank DIR ROLE [NUMBER...]: a number a rank, what it does depends on the role. */
static int be_rank(int argc, char **argv)
{
    struct launch l;
    const char *dir = argv[2], *role = argv[3];
    if (launch_discover(&l, 0) != ST_OK || l.origin != LAUNCH_TESSERA || l.local_rank != l.rank ||
        l.local_size != l.world_size)
        return 98;
    int number = argc > 4 + l.rank ? (int)strtol(argv[4 + l.rank], NULL, 10) : 0;
    if (strcmp(role, "exit") == 0)
        return number;
    if (strcmp(role, "meet") == 0)
        return meet(&l);
    if (strcmp(role, "crash") == 0 && number != 0)
        raise(number);
    if (strcmp(role, "late") == 0 && number != 0) {
        sleep_ms(number * 150);
        return number;
    }
    if (strcmp(role, "stubborn") == 0) {
        signal(SIGTERM, SIG_IGN);
        signal(SIGINT, SIG_IGN);
    }
    if (strcmp(role, "catch") == 0) {
        signal(SIGTERM, note_signal);
        signal(SIGUSR1, note_signal);
    }
    say(dir, "pid", l.rank, (int)getpid());
    if (strcmp(role, "stubborn") == 0 && number != 0)
        return number;
    for (int64_t end = clock_ms() + 30000; clock_ms() < end;) {
        sleep_ms(20);
        if (caught != 0) {
            say(dir, "caught", l.rank, caught);
            return 0;
        }
    }
    return 97;
}

/* ---- a run, in a process of its own --------------------------------------------------------- */

struct run {
    struct scratch scratch;
    pid_t parent;
    int64_t begin_ms;
};

static void run_begin(struct run *run, int ranks, int64_t grace_ms, const char *role,
                      const char *const *numbers)
{
    char log_path[512];
    char *argv[16] = {(char *)"comm_launch", (char *)"rank", NULL, (char *)role};
    scratch_make(&run->scratch);
    scratch_path(&run->scratch, log_path, "log");
    argv[2] = run->scratch.dir;
    for (int i = 0; numbers != NULL && numbers[i] != NULL; i++)
        argv[4 + i] = (char *)numbers[i];
    run->begin_ms = clock_ms();
    run->parent = fork();
    assert_true(run->parent >= 0);
    if (run->parent == 0) {
        int exit_code = 96;
        int log = open(log_path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        dup2(log, 2);
        if (launch_spawn(&exit_code, ranks, argv, grace_ms) != ST_OK)
            exit_code = 95;
        _exit(exit_code);
    }
}

static int run_wait(const struct run *run)
{
    int how = 0;
    assert_int_equal(waitpid(run->parent, &how, 0), run->parent);
    return WIFEXITED(how) ? WEXITSTATUS(how) : 128 + WTERMSIG(how);
}

static void run_end(struct run *run)
{
    scratch_remove(&run->scratch);
}

static void assert_log_has(const struct run *run, const char *text)
{
    char path[512];
    struct file_text log;
    assert_ok(file_read(&log, scratch_path(&run->scratch, path, "log")));
    if (strstr(log.data, text) == NULL)
        fail_msg("\"%s\" is not in: %s", text, log.data);
    mem_free(&log.data);
}

/* What rank @rank said; waits for it. -1 if it says nothing in 10 s. */
static int said(const struct run *run, const char *what, int rank)
{
    char path[512], name[32];
    snprintf(name, sizeof name, "%s-%d", what, rank);
    scratch_path(&run->scratch, path, name);
    for (int i = 0; i < 500; i++, sleep_ms(20)) {
        if (access(path, R_OK) != 0)
            continue;
        struct file_text text;
        assert_ok(file_read(&text, path));
        int value = (int)strtol(text.data, NULL, 10);
        mem_free(&text.data);
        return value;
    }
    return -1;
}

static void all_ranks_end_well_and_know_who_they_are(void **state)
{
    (void)state;
    struct run run;
    run_begin(&run, 5, 0, "exit", NULL);
    assert_int_equal(run_wait(&run), 0);
    run_end(&run);
}

static void the_ranks_meet_at_the_port_they_were_given(void **state)
{
    (void)state;
    struct run run;
    run_begin(&run, 4, 0, "meet", NULL);
    assert_int_equal(run_wait(&run), 0);
    run_end(&run);
}

static void a_failing_rank_ends_the_others_and_is_named(void **state)
{
    (void)state;
    struct run run;
    const char *const numbers[] = {"0", "0", "7", "0", NULL};
    run_begin(&run, 4, 200, "late", numbers);
    assert_int_equal(run_wait(&run), 7);
    assert_true(clock_ms() - run.begin_ms < 10000);
    assert_log_has(&run, "rank 2 failed with exit code 7");
    assert_log_has(&run, "rank 3 is still running: terminated");
    run_end(&run);
}

static void the_exit_code_is_that_of_the_first_to_fail(void **state)
{
    (void)state;
    struct run run;
    const char *const numbers[] = {"6", "2", "4", NULL}; /* times 150 ms, and the exit code */
    run_begin(&run, 3, 5000, "late", numbers);
    assert_int_equal(run_wait(&run), 2);
    assert_log_has(&run, "rank 1 failed with exit code 2");
    run_end(&run);
}

static void a_rank_that_ignores_sigterm_is_killed(void **state)
{
    (void)state;
    struct run run;
    const char *const numbers[] = {"0", "3", NULL};
    run_begin(&run, 2, 300, "stubborn", numbers);
    int code = run_wait(&run);
    assert_int_equal(code, 3);
    assert_true(clock_ms() - run.begin_ms < 10000);
    assert_log_has(&run, "rank 0 is still running: killed");
    run_end(&run);
}

static void a_crash_is_told_by_its_signal(void **state)
{
    (void)state;
    struct run run;
    const char *const numbers[] = {"0", "9", NULL};
    run_begin(&run, 2, 200, "crash", numbers);
    assert_int_equal(run_wait(&run), 137);
    assert_log_has(&run, "rank 1 was killed by signal 9");
    run_end(&run);
}

static void b92_signals_reach_every_rank(void **state)
{
    (void)state;
    const int signals[] = {SIGTERM, SIGUSR1};
    for (int i = 0; i < 2; i++) {
        struct run run;
        run_begin(&run, 3, 0, "catch", NULL);
        for (int r = 0; r < 3; r++)
            assert_true(said(&run, "pid", r) > 0);
        assert_int_equal(kill(run.parent, signals[i]), 0);
        assert_int_equal(run_wait(&run), 0);
        for (int r = 0; r < 3; r++)
            assert_int_equal(said(&run, "caught", r), signals[i]);
        run_end(&run);
    }
}

static void a_second_interrupt_kills_at_once(void **state)
{
    (void)state;
    struct run run;
    run_begin(&run, 2, 60000, "stubborn", NULL);
    for (int r = 0; r < 2; r++)
        assert_true(said(&run, "pid", r) > 0);
    kill(run.parent, SIGINT);
    sleep_ms(100);
    assert_int_equal(waitpid(run.parent, NULL, WNOHANG), 0); /* the first one is only passed on */
    kill(run.parent, SIGINT);
    assert_int_equal(run_wait(&run), 137);
    run_end(&run);
}

/* The orphans become ours (we are their subreaper), so their end can be waited for. */
static void no_rank_outlives_its_parent(void **state)
{
    (void)state;
    struct run run;
    pid_t pids[3];
    assert_int_equal(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
    run_begin(&run, 3, 0, "stubborn", NULL);
    for (int r = 0; r < 3; r++)
        assert_true((pids[r] = said(&run, "pid", r)) > 0);
    kill(run.parent, SIGKILL);
    assert_int_equal(run_wait(&run), 137);
    for (int r = 0; r < 3; r++) {
        int how = 0, ended = 0;
        for (int i = 0; i < 250 && (ended = waitpid(pids[r], &how, WNOHANG)) == 0; i++)
            sleep_ms(20);
        assert_int_equal(ended, pids[r]);
        assert_true(WIFSIGNALED(how) && WTERMSIG(how) == SIGKILL);
    }
    prctl(PR_SET_CHILD_SUBREAPER, 0);
    run_end(&run);
}

/* ---- the environment ------------------------------------------------------------------------ */

static const char *const known[] = {"NCCL_MULTI_RANK_GPU_ENABLE",
                                    "TESSERA_RANK",
                                    "TESSERA_WORLD_SIZE",
                                    "TESSERA_LOCAL_RANK",
                                    "TESSERA_LOCAL_SIZE",
                                    "TESSERA_ADDRESS",
                                    "TESSERA_PORT",
                                    "TESSERA_TOKEN",
                                    "TESSERA_BIND",
                                    "TESSERA_LISTEN_FD",
                                    "RANK",
                                    "WORLD_SIZE",
                                    "LOCAL_RANK",
                                    "LOCAL_WORLD_SIZE",
                                    "MASTER_ADDR",
                                    "MASTER_PORT",
                                    "TORCHELASTIC_USE_AGENT_STORE",
                                    "TORCHELASTIC_RUN_ID",
                                    "OMPI_COMM_WORLD_RANK",
                                    "OMPI_COMM_WORLD_SIZE",
                                    "OMPI_COMM_WORLD_LOCAL_RANK",
                                    "OMPI_COMM_WORLD_LOCAL_SIZE",
                                    "PMIX_NAMESPACE",
                                    "SLURM_PROCID",
                                    "SLURM_NTASKS",
                                    "SLURM_LOCALID",
                                    "SLURM_NODEID",
                                    "SLURM_JOB_ID",
                                    "SLURM_STEP_ID",
                                    "SLURM_STEP_NUM_TASKS",
                                    "SLURM_STEP_NODELIST",
                                    "SLURM_JOB_NODELIST",
                                    "SLURM_NODELIST",
                                    "SLURM_STEP_TASKS_PER_NODE"};

/* Only these variables: "NAME=value NAME=value". */
static void set_environment(const char *text)
{
    char copy[1024], *rest = copy, *word;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        unsetenv(known[i]);
    snprintf(copy, sizeof copy, "%s", text);
    while ((word = strsep(&rest, " ")) != NULL) {
        char *value = strchr(word, '=');
        if (value == NULL)
            continue;
        *value = '\0';
        setenv(word, value + 1, 1);
    }
}

static int clear_environment(void **state)
{
    (void)state;
    set_environment("");
    return 0;
}

#define TORCH "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 MASTER_ADDR=host-a MASTER_PORT=29500"
#define SLURM                                                                                      \
    "SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=8 SLURM_NTASKS=8 SLURM_LOCALID=1 SLURM_NODEID=1 "         \
    "SLURM_JOB_ID=4711 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=gpu[03-04] "                            \
    "SLURM_STEP_TASKS_PER_NODE=4(x2)"

static void alone_without_a_launcher(void **state)
{
    (void)state;
    struct launch l;
    set_environment("MASTER_ADDR=left-over RANK=");
    assert_ok(launch_discover(&l, 0));
    assert_int_equal(l.origin, LAUNCH_ALONE);
    assert_int_equal(l.rank, 0);
    assert_int_equal(l.world_size, 1);
}

static void torchrun_is_recognised(void **state)
{
    (void)state;
    struct launch l;
    set_environment(TORCH " LOCAL_WORLD_SIZE=4");
    assert_ok(launch_discover(&l, 8));
    assert_int_equal(l.origin, LAUNCH_TORCH);
    assert_int_equal(l.rank, 5);
    assert_int_equal(l.world_size, 8);
    assert_int_equal(l.local_rank, 1);
    assert_int_equal(l.local_size, 4);
    assert_string_equal(l.address, "host-a");
    assert_int_equal(l.port, 29500);
    set_environment(TORCH " TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RUN_ID=r7");
    assert_ok(launch_discover(&l, 0));
    assert_int_equal(l.port, 29501);
    assert_string_equal(l.token, "torchrun-r7");
    set_environment(TORCH " TESSERA_PORT=4000 TESSERA_ADDRESS=host-b TESSERA_TOKEN=secret");
    assert_ok(launch_discover(&l, 0));
    assert_int_equal(l.port, 4000);
    assert_string_equal(l.address, "host-b");
    assert_string_equal(l.token, "secret");
}

static void slurm_is_recognised(void **state)
{
    (void)state;
    struct launch l, other;
    set_environment(SLURM);
    assert_ok(launch_discover(&l, 0));
    assert_int_equal(l.origin, LAUNCH_SLURM);
    assert_int_equal(l.rank, 5);
    assert_int_equal(l.world_size, 8);
    assert_int_equal(l.local_rank, 1);
    assert_int_equal(l.local_size, 4);
    assert_string_equal(l.address, "gpu03");
    assert_in_range(l.port, 20000, 29999);
    set_environment(SLURM " SLURM_JOB_ID=4712");
    assert_ok(launch_discover(&other, 0));
    assert_string_not_equal(l.token, other.token);
    set_environment(SLURM " SLURM_STEP_NODELIST=r[1,3-5]n[07,09]x,b SLURM_NODEID=0 "
                          "SLURM_STEP_TASKS_PER_NODE=2,3(x2)");
    assert_ok(launch_discover(&l, 0));
    assert_string_equal(l.address, "r1n07x");
    assert_int_equal(l.local_size, 2);
    set_environment(SLURM " SLURM_STEP_NODELIST=single MASTER_PORT=1234");
    assert_ok(launch_discover(&l, 0));
    assert_string_equal(l.address, "single");
    assert_int_equal(l.port, 1234);
}

static void openmpi_comes_before_slurm(void **state)
{
    (void)state;
    struct launch l;
    set_environment(SLURM " OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=3 "
                          "OMPI_COMM_WORLD_LOCAL_RANK=2 OMPI_COMM_WORLD_LOCAL_SIZE=3 "
                          "PMIX_NAMESPACE=j1");
    assert_ok(launch_discover(&l, 0));
    assert_int_equal(l.origin, LAUNCH_OPENMPI);
    assert_int_equal(l.rank, 2);
    assert_string_equal(l.address, "127.0.0.1");
    set_environment("OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_RANK=0 "
                    "OMPI_COMM_WORLD_LOCAL_SIZE=1");
    assert_ok(launch_discover(&l, 0));
    assert_fails(launch_check_address(&l), ST_INVALID, "TESSERA_ADDRESS");
}

static void b89_what_does_not_fit_is_an_error_with_the_fix(void **state)
{
    (void)state;
    static const struct {
        const char *environment;
        int ranks;
        const char *message;
    } cases[] = {
        {"RANK=0 WORLD_SIZE=2", 0, "LOCAL_RANK is not set"},
        {"WORLD_SIZE=2", 0, "RANK is not set"},
        {"RANK=0 WORLD_SIZE=2 LOCAL_RANK=0", 0, "MASTER_ADDR is not set"},
        {"RANK=2 WORLD_SIZE=2 LOCAL_RANK=0", 0, "RANK=2 and WORLD_SIZE=2"},
        {"RANK=0 WORLD_SIZE=2 LOCAL_RANK=1", 0, "LOCAL_RANK=1 is above RANK=0"},
        {"RANK=1 WORLD_SIZE=two LOCAL_RANK=1", 0, "WORLD_SIZE=two: expected an integer"},
        {TORCH " LOCAL_WORLD_SIZE=1", 0, "LOCAL_WORLD_SIZE=1 does not agree"},
        {TORCH, 4, "4 ranks are asked for, but torchrun started 8"},
        {SLURM, 2, "2 ranks are asked for, but SLURM started 8"},
        {"SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=4 SLURM_JOB_ID=1", 0, "start it with srun"},
        {"SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=4 SLURM_JOB_ID=1 SLURM_STEP_ID=4294967290", 0,
         "start it with srun"},
        {"SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_NTASKS=4", 0, "SLURM_LOCALID is not set"},
        {"TESSERA_RANK=0 TESSERA_WORLD_SIZE=2 TESSERA_LOCAL_RANK=0", 0, "set TESSERA_PORT"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct launch l;
        set_environment(cases[i].environment);
        assert_fails(launch_discover(&l, cases[i].ranks), ST_INVALID, cases[i].message);
    }
    /* A batch script may start its own ranks. */
    struct launch l;
    set_environment("SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=4 SLURM_JOB_ID=1");
    assert_ok(launch_discover(&l, 4));
    assert_int_equal(l.origin, LAUNCH_ALONE);
}

static void b90_one_visible_gpu_a_task_is_normal(void **state)
{
    (void)state;
    struct launch l = {.origin = LAUNCH_SLURM, .rank = 7, .local_rank = 3, .world_size = 8};
    int index = -1;
    assert_ok(launch_device(&index, &l, 1));
    assert_int_equal(index, 0);
    assert_ok(launch_device(&index, &l, 4));
    assert_int_equal(index, 3);
    assert_fails(launch_device(&index, &l, 3), ST_UNSUPPORTED, "local rank 3 has no GPU");
    assert_fails(launch_device(&index, &l, 0), ST_UNSUPPORTED, "sees no GPU");
    l.origin = LAUNCH_TESSERA; /* ours see all GPUs of the machine, so one GPU is too few */
    assert_fails(launch_device(&index, &l, 1), ST_UNSUPPORTED, "local rank 3 has no GPU");
}

static void ranks_share_gpus_only_where_nccl_was_told_so(void **state)
{
    (void)state;
    struct launch l = {.origin = LAUNCH_TESSERA, .rank = 3, .local_rank = 3, .world_size = 4};
    int index = -1;
    set_environment("NCCL_MULTI_RANK_GPU_ENABLE=0");
    assert_fails(launch_device(&index, &l, 2), ST_UNSUPPORTED, "NCCL_MULTI_RANK_GPU_ENABLE=1");
    set_environment("NCCL_MULTI_RANK_GPU_ENABLE=1");
    assert_ok(launch_device(&index, &l, 1));
    assert_int_equal(index, 0);
    assert_ok(launch_device(&index, &l, 2));
    assert_int_equal(index, 1);
    assert_ok(launch_device(&index, &l, 4));
    assert_int_equal(index, 3);
    assert_fails(launch_device(&index, &l, 0), ST_UNSUPPORTED, "sees no GPU");
}

/* The rank of the whole run is no device: on the second machine there is no GPU 4. */
static void b22_on_every_machine_the_local_rank_chooses_the_gpu(void **state)
{
    (void)state;
    static const char *const launchers[] = {
        "RANK=%d WORLD_SIZE=8 LOCAL_RANK=%d LOCAL_WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=29500",
        "SLURM_PROCID=%d SLURM_STEP_NUM_TASKS=8 SLURM_LOCALID=%d SLURM_NODEID=%d SLURM_JOB_ID=1 "
        "SLURM_STEP_ID=0 SLURM_STEP_NODELIST=a[1-2] SLURM_STEP_TASKS_PER_NODE=4(x2)",
        "OMPI_COMM_WORLD_RANK=%d OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=%d "
        "OMPI_COMM_WORLD_LOCAL_SIZE=4 TESSERA_ADDRESS=a"};
    for (size_t i = 0; i < sizeof launchers / sizeof *launchers; i++)
        for (int rank = 0; rank < 8; rank++) {
            char environment[512];
            struct launch l;
            int index = -1;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
            snprintf(environment, sizeof environment, launchers[i], rank, rank % 4, rank / 4);
#pragma GCC diagnostic pop
            set_environment(environment);
            assert_ok(launch_discover(&l, 8));
            assert_ok(launch_device(&index, &l, 4));
            assert_int_equal(l.rank, rank);
            assert_int_equal(index, rank % 4);
        }
}

int main(int argc, char **argv)
{
    if (argc > 3 && strcmp(argv[1], "rank") == 0)
        return be_rank(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_ranks_end_well_and_know_who_they_are),
        cmocka_unit_test(the_ranks_meet_at_the_port_they_were_given),
        cmocka_unit_test(a_failing_rank_ends_the_others_and_is_named),
        cmocka_unit_test(the_exit_code_is_that_of_the_first_to_fail),
        cmocka_unit_test(a_rank_that_ignores_sigterm_is_killed),
        cmocka_unit_test(a_crash_is_told_by_its_signal),
        cmocka_unit_test(b92_signals_reach_every_rank),
        cmocka_unit_test(a_second_interrupt_kills_at_once),
        cmocka_unit_test(no_rank_outlives_its_parent),
        cmocka_unit_test_teardown(alone_without_a_launcher, clear_environment),
        cmocka_unit_test_teardown(torchrun_is_recognised, clear_environment),
        cmocka_unit_test_teardown(slurm_is_recognised, clear_environment),
        cmocka_unit_test_teardown(openmpi_comes_before_slurm, clear_environment),
        cmocka_unit_test_teardown(b89_what_does_not_fit_is_an_error_with_the_fix,
                                  clear_environment),
        cmocka_unit_test_teardown(b22_on_every_machine_the_local_rank_chooses_the_gpu,
                                  clear_environment),
        cmocka_unit_test(b90_one_visible_gpu_a_task_is_normal),
        cmocka_unit_test_teardown(ranks_share_gpus_only_where_nccl_was_told_so, clear_environment),
    };
    set_environment("");
    return cmocka_run_group_tests(tests, NULL, NULL);
}
