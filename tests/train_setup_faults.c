/*
 * Runs whose set-up fails: threads that cannot be made, and a resume in which an allocation or a
 * call of the system fails. Each ends soon with the cause and leaves nothing behind; what was saved
 * stays. (tests/train_faults.c has fresh runs, tests/train_save_faults.c saves.)
 */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/clock.h"
#include "engine/base/file.h"
#include "io/checkpoint.h"
#include "tests/support/ranks.h"
#include "tests/support/resume.h"

static struct run_trace whole, trace;

/* ---- threads ---- */

static atomic_int threads_until_failure; /* 0: none fails */

/* A program's own function is called in place of the library's. */
int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*body)(void *),
                   void *argument)
{
    int (*create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) = NULL;
    if (atomic_load(&threads_until_failure) > 0 && atomic_fetch_sub(&threads_until_failure, 1) == 1)
        return EAGAIN;
    *(void **)&create = dlsym(RTLD_NEXT, "pthread_create");
    return create(thread, attributes, body, argument);
}

static int release(void **state)
{
    (void)state;
    atomic_store(&threads_until_failure, 0);
    mem_fail_at(0);
    file_fail_at(0);
    run_release(&whole);
    run_release(&trace);
    return 0;
}

/* Every checkpoint of the run reads back to the last byte, and nothing else of a save is left;
 * returns how many there are. */
static int count_valid(const struct run_config *c)
{
    char dir[SAVED_PATH_BYTES];
    struct checkpoint_list list = {0};
    snprintf(dir, sizeof dir, "%s/checkpoints", c->output.dir);
    assert_ok(checkpoint_list(&list, dir));
    int count = list.count;
    for (int i = 0; i < count; i++) {
        struct checkpoint file = {0};
        assert_string_equal(list.entries[i].problem, "");
        assert_ok(checkpoint_open(&file, list.entries[i].path));
        assert_ok(checkpoint_verify(&file, NULL, NULL));
        checkpoint_close(&file);
    }
    checkpoint_list_release(&list);
    DIR *folder = opendir(dir);
    for (struct dirent *e; folder != NULL && (e = readdir(folder)) != NULL;)
        if (strncmp(e->d_name, ".tmp-", 5) == 0)
            fail_msg("%s/%s is left", dir, e->d_name);
    if (folder != NULL)
        closedir(folder);
    return count;
}

/* Ranks, and in each save a writer on every rank and one that publishes. */
static void a_thread_that_cannot_be_made_ends_the_run_or_costs_one_checkpoint(void **state)
{
    (void)state;
    enum { RANKS = 3, STEPS = 2 };
    int ended = 0, not_saved = 0;
    int64_t before = mem_live_bytes();
    struct run_config plain = resume_tiny("plain", RANKS, 2, STEPS, 0);
    run_ok(&whole, &plain, NULL);
    int64_t live = mem_live_bytes();
    for (int k = 1;; k++) {
        char out[32];
        snprintf(out, sizeof out, "thread-%d", k);
        struct run_config c = resume_tiny(out, RANKS, 2, STEPS, 1);
        int64_t begun = clock_ms();
        c.train.timeout_s = 20;
        c.checkpoint.async = k % 2 == 0;
        atomic_store(&threads_until_failure, k);
        run_go(&trace, &c, NULL);
        bool fired = atomic_exchange(&threads_until_failure, 0) <= 0;
        assert_true(clock_ms() - begun < 15000);
        if (trace.st == ST_OK) {
            run_same(&whole, &trace, out);
            int valid = count_valid(&c);
            assert_true(valid == STEPS || (fired && valid == STEPS - 1));
            not_saved += valid < STEPS;
        } else {
            assert_non_null(strstr(trace.message, "thread"));
            ended++;
        }
        run_release(&trace);
        assert_int_equal(mem_live_bytes(), live);
        if (!fired)
            break;
    }
    print_message("%d threads ended the run, %d cost a checkpoint\n", ended, not_saved);
    assert_true(ended >= RANKS - 1 && not_saved >= RANKS);
    run_release(&whole);
    assert_int_equal(mem_live_bytes(), before);
}

/* ---- resuming ---- */

enum { SAVED = 3, TOTAL = 5 };

/* The k-th operation of a resumed run fails, for growing k until none does. */
static void fail_every(const char *name, void (*fail_at)(int64_t k), enum status cause)
{
    int failed = 0;
    struct run_config plain = resume_tiny("plain", 2, 1, TOTAL, 0), saving, rest;
    saving = resume_tiny(name, 2, 1, SAVED, SAVED);
    rest = resume_tiny("rest", 2, 3, TOTAL, 0);
    rest.train.timeout_s = 20;
    run_ok(&whole, &plain, NULL);
    run_ok(&trace, &saving, NULL);
    run_release(&trace);
    snprintf(rest.output.dir, sizeof rest.output.dir, "%s", saving.output.dir);
    resume_latest(&rest);
    int64_t live = mem_live_bytes();
    for (int64_t k = 1;; k += 1 + k / 40) {
        int64_t begun = clock_ms();
        fail_at(k);
        run_go(&trace, &rest, NULL);
        fail_at(0);
        assert_true(clock_ms() - begun < 15000);
        if (trace.st == ST_OK)
            resume_same_rest(&whole, &trace, SAVED, 0, name);
        else if (!trace.not_collected && trace.st != cause &&
                 (cause != ST_IO || trace.st != ST_CORRUPT))
            fail_msg("%s, operation %d: %s: %s", name, (int)k, status_name(trace.st),
                     trace.message);
        enum status st = trace.st;
        run_release(&trace);
        if (mem_live_bytes() != live)
            fail_msg("%s, operation %d: %d bytes are left", name, (int)k,
                     (int)(mem_live_bytes() - live));
        assert_int_equal(count_valid(&saving), 1);
        if (st == ST_OK)
            break;
        failed++;
    }
    print_message("%s: %d runs failed\n", name, failed);
    assert_true(failed > 5);
}

static void b74_a_resume_that_runs_out_of_memory_ends_and_never_starts_anew(void **state)
{
    (void)state;
    fail_every("memory", mem_fail_at, ST_MEMORY);
}

static void b74_a_resume_whose_files_cannot_be_read_ends_and_never_starts_anew(void **state)
{
    (void)state;
    fail_every("files", file_fail_at, ST_IO);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_teardown(name, release)
    const struct CMUnitTest tests[] = {
        TEST(a_thread_that_cannot_be_made_ends_the_run_or_costs_one_checkpoint),
        TEST(b74_a_resume_that_runs_out_of_memory_ends_and_never_starts_anew),
        TEST(b74_a_resume_whose_files_cannot_be_read_ends_and_never_starts_anew),
    };
    return cmocka_run_group_tests(tests, resume_set_up, run_tear_down);
}
