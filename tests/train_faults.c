/*
 * Runs in which something fails: memory, files, collectives. Each ends soon, with the cause, on all
 * ranks, and leaves nothing behind.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/arena.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "tests/support/ranks.h"
#include "tests/support/run.h"

static struct scratch scratch;
static struct run_trace trace;

static int make_data(void **state)
{
    struct made_questions train = {6, 5, 40, 4, .impossible_every = 3, .seed = 41}, eval = train;
    eval.count = 2;
    return run_set_up(state, &scratch, &train, &eval);
}

static int release_trace(void **state)
{
    (void)state;
    mem_fail_at(0);
    file_fail_at(0);
    run_release(&trace);
    return 0;
}

static struct run_config tiny(int ranks, int stage)
{
    struct tiny_run with = {ranks, stage, .steps = 2, .eval = true, .version_2 = true};
    struct run_config c = run_tiny_with(&scratch, with);
    c.model.layers = 1;
    c.train.timeout_s = 10;
    return c;
}

/* ---- memory ---- */

static void every_failed_allocation_ends_the_run_with_that_error(void **state)
{
    (void)state;
    const struct run_how loud = {.loud = true};
    int64_t before = mem_live_bytes();
    int failed = 0;
    for (int64_t k = 1;; k++) {
        struct run_config c = tiny(2, 3);
        int64_t begun = clock_ms();
        mem_fail_at(k);
        run_go(&trace, &c, &loud);
        mem_fail_at(0);
        enum status st = trace.st;
        if (st != ST_OK && st != ST_MEMORY)
            fail_msg("allocation %d: %s: %s", (int)k, status_name(st), trace.message);
        if (clock_ms() - begun > 8000)
            fail_msg("allocation %d: the run hung until its time-out", (int)k);
        run_release(&trace);
        if (mem_live_bytes() != before)
            fail_msg("allocation %d: %d bytes are left", (int)k, (int)(mem_live_bytes() - before));
        if (st == ST_OK)
            break;
        failed++;
    }
    assert_true(failed > 50);
}

/* ---- files ---- */

/* metrics.jsonl holds whole lines, whatever else failed. */
static void check_whole_lines(const struct run_config *c)
{
    char path[1200];
    struct file_text text = {NULL, 0};
    assert_ok(path_join(path, sizeof path, c->output.dir, "metrics.jsonl"));
    if (access(path, F_OK) != 0)
        return;
    assert_ok(file_read(&text, path));
    for (size_t i = 0; i < text.bytes; i++)
        if (i == 0 || text.data[i - 1] == '\n')
            assert_int_equal(text.data[i], '{');
    assert_true(text.bytes == 0 || text.data[text.bytes - 1] == '\n');
    mem_free(&text.data);
}

static void every_failed_file_operation_ends_the_run_with_whole_files(void **state)
{
    (void)state;
    const struct run_how loud = {.loud = true};
    int64_t before = mem_live_bytes();
    int failed = 0;
    for (int64_t k = 1; k < 1000; k++) {
        struct run_config c = tiny(2, 2);
        file_fail_at(k);
        run_go(&trace, &c, &loud);
        bool fired = trace.st != ST_OK;
        file_fail_at(0);
        /* Reading data that cannot be read is ST_IO, too. */
        if (fired && trace.st != ST_IO)
            fail_msg("operation %d: %s: %s", (int)k, status_name(trace.st), trace.message);
        check_whole_lines(&c);
        run_release(&trace);
        assert_int_equal(mem_live_bytes(), before);
        failed += fired;
        if (!fired && k > failed + 10) /* closing a folder may fail unseen */
            break;
    }
    assert_true(failed > 20);
}

static void an_output_folder_that_cannot_be_made_is_an_error(void **state)
{
    (void)state;
    struct run_config c = tiny(2, 1);
    scratch_path(&scratch, c.output.dir, "vocab.txt/out");
    run_go(&trace, &c, &(struct run_how){.loud = true});
    assert_int_equal(trace.st, ST_IO);
    assert_non_null(strstr(trace.message, "vocab.txt"));
    assert_int_equal(trace.seen[0], 0);
}

/* ---- collectives ---- */

static void run_with_fault(int rank, struct fault_plan plan, int64_t timeout_s)
{
    struct run_config c = tiny(3, 3);
    struct fault_plan faults[RUN_RANKS] = {{FAULT_NONE, 0, 0}};
    faults[rank] = plan;
    c.train.timeout_s = timeout_s;
    run_go(&trace, &c, &(struct run_how){.faults = faults});
}

static void a_failed_collective_ends_all_ranks_with_its_cause(void **state)
{
    (void)state;
    int64_t before = mem_live_bytes();
    for (int64_t at = 1;; at += 1 + at / 4) {
        int64_t begun = clock_ms();
        run_with_fault((int)(at % 3), (struct fault_plan){FAULT_FAIL, at, 0}, 30);
        enum status st = trace.st;
        assert_true(clock_ms() - begun < 10000);
        if (st != ST_OK) {
            assert_int_equal(st, ST_COMM);
            assert_non_null(strstr(trace.message, "planned fault"));
        }
        run_release(&trace);
        assert_int_equal(mem_live_bytes(), before);
        if (st == ST_OK) {
            assert_true(at > 40);
            break;
        }
    }
}

static struct comm_ops failing_at_the_end;

static void fail_to_close(struct comm *comm, struct device *device, void **memory)
{
    (void)FAIL(DEVICE, "rank %d: the memory does not close", comm->rank);
    comm_any_memory_close(comm, device, memory);
}

static void break_the_end(void *context, struct trainer *t)
{
    (void)context;
    failing_at_the_end = *t->comm->ops;
    failing_at_the_end.memory_close = fail_to_close;
    t->comm->ops = &failing_at_the_end;
}

/* What fails while a failed run closes its parts is a consequence. */
static void the_cause_outlives_the_closing(void **state)
{
    (void)state;
    struct run_config c = tiny(1, 3);
    const struct fault_plan fault = {FAULT_FAIL, 25, 0};
    run_go(&trace, &c, &(struct run_how){.faults = &fault, .at_start = break_the_end});
    assert_int_equal(trace.st, ST_COMM);
    assert_non_null(strstr(trace.message, "planned fault"));
}

static void speak(void *context, struct trainer *t)
{
    (void)context;
    (void)t;
    log_set_level(LOG_WARN);
}

/* Who it was, the collective that the others wait for and its last one; and from each rank how many
 * steps it has behind it, and which unit it is at. */
static void b87_a_silent_rank_is_named_and_every_rank_says_where_it_stood(void **state)
{
    (void)state;
    struct file_text said;
    struct run_config c = tiny(3, 3);
    const struct fault_plan faults[RUN_RANKS] = {[1] = {FAULT_SILENT, 25, 0}};
    c.train.timeout_s = 1;
    said_begin();
    run_go(&trace, &c, &(struct run_how){.faults = faults, .at_start = speak});
    said_end(&said);
    assert_true(trace.st == ST_TIMEOUT || trace.st == ST_COMM);
    if (strstr(trace.message, " waited 1000 ms for ") == NULL ||
        strstr(trace.message, "; rank 1 ") == NULL || strstr(trace.message, ", its last: ") == NULL)
        fail_msg("who was it? %s", trace.message);
    for (int r = 0; r < 3; r++) {
        char begin[64];
        snprintf(begin, sizeof begin, " r%d warn  run: stood behind step ", r);
        const char *line = strstr(said.data, begin);
        if (line == NULL || strstr(line, "; compute: ") == NULL)
            fail_msg("rank %d does not say where it stood: %s", r, said.data);
    }
    /* How far the others get meanwhile is a matter of time. */
    if (strstr(said.data, " of block.") == NULL && strstr(said.data, " of head.0") == NULL)
        fail_msg("no rank names its unit: %s", said.data);
    mem_free(&said.data);
}

/* A rank in another state than the others would train on nonsense: it is found in its report. */
static void b84_ranks_that_issue_different_collectives_are_told(void **state)
{
    (void)state;
    run_with_fault(2, (struct fault_plan){FAULT_DROP, 25, 0}, 2);
    assert_true(trace.st == ST_INVALID || trace.st == ST_COMM || trace.st == ST_TIMEOUT);
}

/* ---- other ends ---- */

#ifndef __SANITIZE_THREAD__ /* the flag is a signal handler's, not a thread's */
static int signal_number;

static void raise_in_step_1(void *context, const struct program *p, int index,
                            const size_t live[CATEGORY_COUNT])
{
    const struct trainer *t = context;
    const struct step_state *s = executor_shared(&t->executor, SHARED_STATE);
    (void)live;
    if (p->kind == PROGRAM_STEP && index == 3 && t->comm->rank == 1 && s->host.step == 1)
        __atomic_store_n(&signal_number, 15, __ATOMIC_RELAXED);
}

static void a_signal_ends_all_ranks_at_the_same_step(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage++) {
        struct run_config c = tiny(3, stage);
        struct file_text summary = {NULL, 0};
        c.train.steps = 100;
        __atomic_store_n(&signal_number, 0, __ATOMIC_RELAXED);
        run_go(&trace, &c,
               &(struct run_how){.loud = true,
                                 .signal_flag = &signal_number,
                                 .executor = {.on_instr = raise_in_step_1}});
        assert_int_equal(trace.st, ST_INTERRUPTED);
        assert_non_null(strstr(trace.message, "signal 15"));
        for (int r = 0; r < 3; r++)
            assert_int_equal(trace.seen[r], trace.steps);
        assert_in_range(trace.steps, 2, 5);
        run_read(&summary, &c, "summary.json");
        assert_non_null(strstr(summary.data, "\"ended\":\"signal\""));
        mem_free(&summary.data);
        check_whole_lines(&c);
        run_release(&trace);
    }
}
#endif

static void more_ranks_than_samples_and_elements_work(void **state)
{
    (void)state;
    struct run_config c = tiny(8, 3);
    c.model.hidden = 3;
    c.model.heads = 1;
    c.model.ffn = 2;
    c.train.max_unit_numel = 128;
    run_ok(&trace, &c, NULL);
    assert_int_equal(trace.steps, 2);
    assert_true(trace.step[0][1].loss > 0);
}

#define TEST(name) cmocka_unit_test_teardown(name, release_trace)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(every_failed_allocation_ends_the_run_with_that_error),
        TEST(every_failed_file_operation_ends_the_run_with_whole_files),
        TEST(an_output_folder_that_cannot_be_made_is_an_error),
        TEST(a_failed_collective_ends_all_ranks_with_its_cause),
        TEST(the_cause_outlives_the_closing),
        TEST(b87_a_silent_rank_is_named_and_every_rank_says_where_it_stood),
        TEST(b84_ranks_that_issue_different_collectives_are_told),
#ifndef __SANITIZE_THREAD__
        TEST(a_signal_ends_all_ranks_at_the_same_step),
#endif
        TEST(more_ranks_than_samples_and_elements_work),
    };
    return cmocka_run_group_tests(tests, make_data, run_tear_down);
}
