/*
 * What a run asks of the system, answered by this program: signals to several threads at once, a
 * machine of 2000 CPUs, a parent that dies in the wrong moment.
 */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/train/commands.h"
#include "engine/train/interrupt.h"
#include "engine/train/run.h"
#include "tests/support/run.h"

static struct scratch scratch;

/* ---- in place of the C library's ------------------------------------------------------------- */

static int cpus; /* that this machine has; 0: those that are there */

int sched_getaffinity(pid_t pid, size_t bytes, cpu_set_t *set)
{
    if (cpus == 0)
        return syscall(SYS_sched_getaffinity, pid, bytes, set) > 0 ? 0 : -1;
    if (bytes * 8 < (size_t)cpus) { /* the kernel's answer to a set that is too small */
        errno = EINVAL;
        return -1;
    }
    memset(set, 0, bytes);
    for (int i = 0; i < cpus; i++)
        ((unsigned char *)set)[i / 8] |= (unsigned char)(1 << i % 8);
    return 0;
}

static bool parent_dies; /* just before a child asks for a signal then */

int prctl(int option, ...)
{
    va_list args;
    va_start(args, option);
    unsigned long value = va_arg(args, unsigned long);
    va_end(args);
    pid_t parent = getppid();
    if (option == PR_SET_PDEATHSIG && parent_dies) {
        kill(parent, SIGKILL);
        while (getppid() == parent)
            sched_yield();
    }
    return (int)syscall(SYS_prctl, option, value, 0ul, 0ul, 0ul);
}

/* ---- signals --------------------------------------------------------------------------------- */

enum { THREADS = 8, ROUNDS = 20 };

static pthread_barrier_t together;

static void *raise_here(void *signal_number)
{
    pthread_barrier_wait(&together);
    pthread_kill(pthread_self(), *(int *)signal_number);
    return NULL;
}

/* Exit code of a process that catches @signal_number in @threads threads at the same time. */
static int catch_at_once(int signal_number, unsigned threads)
{
    pthread_t thread[THREADS];
    int state = 0;
    pid_t child = fork();
    if (child != 0) {
        assert_int_equal(waitpid(child, &state, 0), child);
        return WIFEXITED(state) ? WEXITSTATUS(state) : -1;
    }
    if (interrupt_install() != ST_OK)
        _exit(99);
    pthread_barrier_init(&together, NULL, threads);
    for (unsigned i = 0; i < threads; i++)
        if (pthread_create(&thread[i], NULL, raise_here, &signal_number) != 0)
            _exit(98);
    for (unsigned i = 0; i < threads; i++)
        pthread_join(thread[i], NULL);
    _exit(interrupt_read(interrupt_flag()));
}

static void the_second_of_two_signals_ends_at_once_in_any_thread(void **state)
{
    (void)state;
    for (int i = 0; i < ROUNDS; i++) {
        assert_int_equal(catch_at_once(SIGTERM, 1), SIGTERM);
        assert_int_equal(catch_at_once(SIGTERM, THREADS), 128 + SIGTERM);
        assert_int_equal(catch_at_once(SIGUSR1, THREADS), SIGUSR1);
    }
}

/* ---- cores ----------------------------------------------------------------------------------- */

static void ranks_share_the_cores_of_a_machine_that_has_2000(void **state)
{
    (void)state;
    struct run_config c = run_tiny_with(&scratch, (struct tiny_run){.steps = 1});
    c.train.threads = 0;
    cpus = 2000;
    assert_int_equal(run_threads(&c, 8), 250);
    cpus = 100000; /* more than anybody knows of */
    assert_int_equal(run_threads(&c, 1), 1);
    cpus = 0;
    assert_true(run_threads(&c, 1) >= 1);
}

/* ---- tessera compare ------------------------------------------------------------------------- */

static void a_run_of_compare_does_not_begin_alone(void **state)
{
    (void)state;
    struct run_config c = run_tiny_with(&scratch, (struct tiny_run){.steps = 2});
    const char *path = run_put_config(&scratch, &c);
    char dir[512], mark[512];
    int ended = 0, orphan = 0;
    scratch_path(&scratch, dir, "compare");
    scratch_path(&scratch, mark, "began");
    setenv("TEST_MARK", mark, 1);
    syscall(SYS_prctl, PR_SET_CHILD_SUBREAPER, 1ul, 0ul, 0ul, 0ul); /* the orphan comes to us */
    pid_t child = fork();
    if (child == 0) {
        char *argv[] = {"compare", "--config", (char *)path, "--ranks",  "1", "--stages",
                        "0",       "--steps",  "2",          "--repeat", "1", "--output-dir",
                        dir,       NULL};
        parent_dies = true;
        _exit(cmd_compare(sizeof argv / sizeof *argv - 1, argv) == ST_OK ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_true(WIFSIGNALED(ended) && WTERMSIG(ended) == SIGKILL);
    assert_true(waitpid(-1, &orphan, 0) > 0);
    assert_true(WIFEXITED(orphan));
    assert_int_equal(WEXITSTATUS(orphan), 127);
    assert_int_not_equal(access(mark, F_OK), 0);
}

static int set_up(void **state)
{
    static const struct made_questions train = {
        .count = 10, .min_words = 5, .max_words = 20, .question_words = 4, .seed = 5};
    return run_set_up(state, &scratch, &train, &train);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_second_of_two_signals_ends_at_once_in_any_thread),
        cmocka_unit_test(ranks_share_the_cores_of_a_machine_that_has_2000),
        cmocka_unit_test(a_run_of_compare_does_not_begin_alone),
    };
    if (argc > 1 && strcmp(argv[1], "train") == 0) { /* compare has started "itself" */
        FILE *f = fopen(getenv("TEST_MARK"), "w");
        return f != NULL && fclose(f) == 0 ? 0 : 1;
    }
    return cmocka_run_group_tests(tests, set_up, run_tear_down);
}
