/* Saving beside training: the same files whether it waits or not, bounded memory, old ones go. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/base/file.h"
#include "engine/train/weights.h"
#include "io/checkpoint.h"
#include "tests/support/ranks.h"
#include "tests/support/resume.h"

static void read_part(struct file_text *text, const struct run_config *c, int64_t step, int rank)
{
    char folder[1200], name[32], path[1400];
    saved_folder(c, folder, step);
    snprintf(name, sizeof name, "data-%05d.tsr", rank);
    assert_ok(path_join(path, sizeof path, folder, name));
    assert_ok(file_read(text, path));
}

static void waiting_or_not_gives_the_same_files(void **state)
{
    (void)state;
    struct run_config a = resume_tiny("async", 3, 3, 6, 2), b = resume_tiny("sync", 3, 3, 6, 2);
    a.checkpoint.keep = b.checkpoint.keep = 0;
    b.checkpoint.async = false;
    run_ok(&group.first, &a, NULL);
    run_ok(&group.other, &b, NULL);
    run_same(&group.first, &group.other, "async and sync");
    for (int64_t step = 2; step <= 6; step += 2)
        for (int rank = 0; rank < 3; rank++) {
            struct file_text x, y;
            read_part(&x, &a, step, rank);
            read_part(&y, &b, step, rank);
            assert_int_equal(x.bytes, y.bytes);
            assert_memory_equal(x.data, y.data, x.bytes);
            mem_free(&x.data);
            mem_free(&y.data);
        }
}

/* b81: what is replicated is written once. */
static void b81_stage_0_writes_what_the_other_stages_write(void **state)
{
    (void)state;
    int64_t plain[4];
    for (int stage = 0; stage < 4; stage++) {
        char out[32], folder[1200];
        struct checkpoint file = {0};
        snprintf(out, sizeof out, "size-%d", stage);
        struct run_config c = resume_tiny(out, 4, stage, 1, 1);
        run_ok(&group.first, &c, NULL);
        saved_folder(&c, folder, 1);
        assert_ok(checkpoint_open(&file, folder));
        assert_ok(checkpoint_verify(&file, NULL, NULL));
        assert_int_equal(file.file_count, 4);
        plain[stage] = file.plain_bytes;
        assert_int_equal(plain[stage], plain[0]);
        checkpoint_close(&file);
        run_release(&group.first);
    }
}

static void old_ones_go_and_the_best_stays(void **state)
{
    (void)state;
    struct run_config c = resume_tiny("keep", 2, 1, 8, 2);
    scratch_path(&group.scratch, c.data.eval, "eval.json");
    c.checkpoint.keep_best = STOP_LOSS;
    c.eval.every = 3;
    run_ok(&group.first, &c, NULL);
    assert_true(saved_is_there(&c, 8) &&
                saved_is_there(&c, 6)); /* the newest two: a loss falls here */
    assert_false(saved_is_there(&c, 2));
    char path[1200];
    snprintf(path, sizeof path, "%s/checkpoints/latest", c.output.dir);
    assert_int_equal(access(path, F_OK), 0);
    run_release(&group.first);
    /* Where nothing is learned no later one is better than the first. */
    scratch_path(&group.scratch, c.output.dir, "keep-first");
    c.optim.lr = 0;
    run_ok(&group.first, &c, NULL);
    assert_true(saved_is_there(&c, 3));
    assert_true(saved_is_there(&c, 8));
    assert_false(saved_is_there(&c, 4));
}

static void b68_a_save_may_take_longer_than_a_collective(void **state)
{
    (void)state;
    for (int waits = 0; waits < 2; waits++) {
        char out[32];
        snprintf(out, sizeof out, "slow-%d", waits);
        struct run_config c = resume_tiny(out, 2, 3, 3, 3);
        c.train.timeout_s = 1;
        c.checkpoint.async = waits == 0;
        file_delay(10); /* hundreds of writes */
        int64_t begun = clock_ms();
        run_go(&group.first, &c, NULL);
        file_delay(0);
        assert_int_equal(group.first.st, ST_OK);
        assert_true(clock_ms() - begun > 1200);
        assert_true(saved_is_there(&c, 3));
        resume_release(NULL);
    }
}

/* ---- memory ---------------------------------------------------------------------------------- */

#ifndef __SANITIZE_THREAD__ /* nothing in it that the tests above do not race with */
struct growth {
    int64_t bytes[2], rss[2];
};

static struct growth growth;

static void watch_memory(void *context, const struct program *p, int index,
                         const size_t live[CATEGORY_COUNT])
{
    const struct trainer *t = context;
    const struct step_state *s = executor_shared(&t->executor, SHARED_STATE);
    (void)live;
    if (p->kind != PROGRAM_STEP || index != 0 || t->comm->rank != 0)
        return;
    int at = s->host.step == 10 ? 0 : s->host.step == 100 ? 1 : -1;
    if (at < 0)
        return;
    growth.bytes[at] = mem_live_bytes();
    growth.rss[at] = (int64_t)test_resident_bytes();
}

static void b77_100_saves_leave_memory_flat(void **state)
{
    (void)state;
    struct run_config c = resume_tiny("flat", 2, 2, 101, 1);
    c.checkpoint.async = false; /* between saves nothing of one is left */
    run_ok(&group.first, &c, &(struct run_how){.executor = {.on_instr = watch_memory}});
    assert_int_equal(growth.bytes[0], growth.bytes[1]);
    print_message("after save 100: %lld bytes more resident than after save 10\n",
                  (long long)(growth.rss[1] - growth.rss[0]));
#ifndef __SANITIZE_ADDRESS__
    /* The allocator may keep the buffers of a writer a rank; a leak of a compressor is more. */
    if (growth.rss[1] - growth.rss[0] > 16 << 20)
        fail_msg("%lld bytes more resident after save 100 than after save 10",
                 (long long)(growth.rss[1] - growth.rss[0]));
#endif
}
#endif

#define TEST(name) cmocka_unit_test_teardown(name, resume_release)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(waiting_or_not_gives_the_same_files),
        TEST(b81_stage_0_writes_what_the_other_stages_write),
        TEST(old_ones_go_and_the_best_stays),
        TEST(b68_a_save_may_take_longer_than_a_collective),
#ifndef __SANITIZE_THREAD__
        TEST(b77_100_saves_leave_memory_flat),
#endif
    };
    return cmocka_run_group_tests(tests, resume_set_up, run_tear_down);
}
