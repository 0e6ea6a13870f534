/*
 * train.zero_stage auto: the fastest stage that fits the memory that the ranks have, the same on
 * all of them, with its reason; and runs that start, go on and are compared with it.
 */
#include "engine/train/auto_stage.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/device/host_memory.h"
#include "engine/ops/plan_device.h"
#include "engine/train/fit.h"
#include "tests/support/process.h"
#include "tests/support/ranks.h"
#include "tests/support/run.h"

enum { RANKS = 4, ROWS = 256 };

static struct scratch scratch;
static struct process ran;

#define RUN(...) process_run(&ran, &scratch, (const char *const[]){__VA_ARGS__, NULL})

/* No profile of a machine but those that a test puts there. */
static int make_data(void **state)
{
    struct made_questions train = {24, 5, 60, 4, .seed = 11}, eval = {5, 5, 60, 4, .seed = 12};
    run_set_up(state, &scratch, &train, &eval);
    return setenv("XDG_CACHE_HOME", scratch_at(&scratch, "cache"), 1);
}

/* ---- the choice ---- */

static struct run_config a_model(void)
{
    struct run_config c = run_planned();
    c.model.vocab_size = 3000;
    c.train.micro_batch = 4;
    c.train.grad_accum = 2;        /* every stage has another arena then */
    c.train.tables = TABLES_WHOLE; /* and they lie further apart than by rows */
    c.train.zero_stage = ZERO_STAGE_AUTO;
    return c;
}

struct question {
    struct run_config config;
    size_t free_bytes[RANKS]; /* as each rank sees it */
    int stage[RANKS];
    char reason[RANKS][STAGE_REASON_BYTES];
};

static _Thread_local size_t free_here;

static enum status free_as_asked(struct device *device, size_t *bytes)
{
    (void)device;
    *bytes = free_here;
    return ST_OK;
}

static enum status ask_rank(struct comm *comm, void *argument)
{
    struct question *q = argument;
    enum status st = ST_OK;
    struct trainer *t = NULL;
    struct device *device = NULL;
    free_here = q->free_bytes[comm->rank];
    TRY(mem_alloc(&t, sizeof *t));
    TRY_GOTO(st, out, device_open(&device, DEVICE_CPU, PRECISION_AUTO, 0, 1));
    const struct device_ops *real = device->ops;
    struct device_ops ops = *real;
    ops.memory_free = free_as_asked;
    device->ops = &ops;
    t->config = &q->config;
    t->device = device;
    t->comm = comm;
    st = auto_stage(&q->stage[comm->rank], t, (struct setup_rows){ROWS, ROWS, ROWS});
    snprintf(q->reason[comm->rank], STAGE_REASON_BYTES, "%s", t->stage_reason);
    device->ops = real;
out:
    device_close(&device);
    mem_free(&t);
    return st;
}

static void ask(struct question *q)
{
    ranks_run_ok(RANKS, ask_rank, q);
    for (int r = 1; r < RANKS; r++) {
        assert_int_equal(q->stage[r], q->stage[0]);
        assert_string_equal(q->reason[r], q->reason[0]);
    }
}

static void set_free(struct question *q, size_t rank_bytes)
{
    for (int r = 0; r < RANKS; r++)
        q->free_bytes[r] = RANKS * rank_bytes; /* they share a machine */
}

static size_t arena_of(const struct run_config *c, int stage)
{
    struct fit fit;
    struct device device;
    assert_ok(plan_device_init(&device, DEVICE_CPU, PRECISION_AUTO, 1));
    struct fit_question question = {.config = c,
                                    .device = &device,
                                    .world_size = RANKS,
                                    .rows = {ROWS, ROWS, ROWS},
                                    .room_bytes = SIZE_MAX};
    assert_ok(fit_given(&fit, &question, stage));
    return fit.account.arena_bytes;
}

static void the_stage_follows_from_the_memory_to_the_byte(void **state)
{
    (void)state;
    static struct question q;
    q.config = a_model();
    /* Without a profile the lowest that fits sends least: stages 0 and 1 the same in fp32. */
    for (int stage = 0; stage < FIT_STAGES; stage++) {
        set_free(&q, arena_of(&q.config, stage) + AUTO_STAGE_PROCESS);
        ask(&q);
        assert_int_equal(q.stage[0], stage);
        assert_non_null(strstr(q.reason[0], "zero stage auto: "));
        if (stage == 3)
            assert_non_null(strstr(q.reason[0], "3 is the only one that fits in the "));
        set_free(&q, arena_of(&q.config, stage) + AUTO_STAGE_PROCESS - 1);
        if (stage < 3) {
            ask(&q);
            assert_true(q.stage[0] > stage);
        }
    }
    set_free(&q, (size_t)1 << 40);
    ask(&q);
    assert_int_equal(q.stage[0], 0);
    assert_non_null(strstr(q.reason[0], "of 0, 1, 2, 3, which fit in the 1.000 TiB"));
    assert_non_null(strstr(q.reason[0], "0 sends least"));
    assert_non_null(strstr(q.reason[0], "tessera calibrate measures them"));
}

static void the_poorest_rank_decides_for_all(void **state)
{
    (void)state;
    static struct question q;
    q.config = a_model();
    set_free(&q, (size_t)1 << 40);
    q.free_bytes[2] = RANKS * (arena_of(&q.config, 2) + AUTO_STAGE_PROCESS);
    ask(&q);
    assert_int_equal(q.stage[0], 2);
}

static void a_copy_for_checkpoints_is_left_room_for(void **state)
{
    (void)state;
    static struct question q;
    q.config = a_model();
    set_free(&q, arena_of(&q.config, 1) + AUTO_STAGE_PROCESS);
    q.config.checkpoint.every = 5;
    ask(&q);
    assert_true(q.stage[0] > 1);
}

static void what_the_configuration_refuses_is_not_taken(void **state)
{
    (void)state;
    static struct question q;
    struct ranks ranks = {
        .world_size = RANKS, .timeout_ms = 20000, .body = ask_rank, .argument = &q};
    q.config = a_model();
    q.config.train.reduce = REDUCE_PER_STEP;
    set_free(&q, arena_of(&q.config, 1) + AUTO_STAGE_PROCESS);
    ask(&q);
    assert_int_equal(q.stage[0], 1);
    set_free(&q, arena_of(&q.config, 1) + AUTO_STAGE_PROCESS - 1);
    ranks_run(&ranks);
    for (int r = 0; r < RANKS; r++)
        ranks_assert(&ranks, r, ST_INVALID, "stage 1, which needs least, needs ");
    set_free(&q, 0);
    ranks_run(&ranks);
    ranks_assert(&ranks, 3, ST_INVALID, "train.zero_stage auto: no stage fits; a rank has 0 B");
}

/* With a profile of the machine its prediction decides, and the reason says so. */
static void a_measured_machine_predicts_the_fastest(void **state)
{
    (void)state;
    static struct question q;
    static struct machine m;
    struct device *device = NULL;
    char path[700];
    q.config = a_model();
    assert_ok(machine_builtin(&m, "h100"));
    m.device = DEVICE_CPU;
    assert_ok(machine_user_path(path, sizeof path, DEVICE_CPU));
    char *end = strrchr(path, '/');
    *end = '\0';
    assert_ok(file_make_dirs(path));
    *end = '/';
    assert_ok(machine_write(&m, path));
    set_free(&q, (size_t)1 << 40);
    ask(&q);
    assert_non_null(strstr(q.reason[0], "is predicted to be the fastest, with "));
    assert_non_null(strstr(q.reason[0], "(rates: your own, but of NVIDIA H100 80GB HBM3; "));
    assert_ok(device_open(&device, DEVICE_CPU, PRECISION_AUTO, 0, 1));
    snprintf(m.name, sizeof m.name, "%s", device->name);
    device_close(&device);
    assert_ok(machine_write(&m, path));
    ask(&q);
    assert_non_null(strstr(q.reason[0], "(rates: your own of "));
    assert_int_equal(remove(path), 0);
}

/* ---- runs ---- */

static const char *auto_config(int ranks, const char *out)
{
    struct run_config c = run_tiny_with(&scratch, (struct tiny_run){.ranks = ranks, .steps = 4});
    c.train.zero_stage = ZERO_STAGE_AUTO;
    c.checkpoint.every = 2;
    snprintf(c.output.dir, sizeof c.output.dir, "%s", scratch_at(&scratch, out));
    return run_put_config(&scratch, &c);
}

static double last_loss(const char *name)
{
    struct file_text text = {NULL, 0};
    assert_ok(file_read(&text, scratch_at(&scratch, name)));
    const char *at = strstr(text.data, "\"last_loss\":");
    assert_non_null(at);
    double loss = strtod(at + strlen("\"last_loss\":"), NULL);
    mem_free(&text.data);
    return loss;
}

static void a_run_says_which_stage_it_took_and_goes_on_at_another(void **state)
{
    (void)state;
    const char *path = auto_config(2, "whole");
    RUN("train", "--config", path);
    process_expect(&ran, 0, "zero_stage: auto", "zero stage auto: of 0, 1, 2, 3, which fit in");
    assert_non_null(strstr(ran.err, "run: zero stage 0 "));
    double whole = last_loss("whole/summary.json");

    RUN("train", "--config", path, "--zero-stage", "3", "--steps", "2", "--output-dir",
        scratch_at(&scratch, "part"), "--set", "optim.schedule=constant");
    process_expect(&ran, 0, NULL, NULL);
    RUN("train", "--config", path, "--output-dir", scratch_at(&scratch, "part"), "--resume",
        "latest", "--set", "optim.schedule=constant");
    process_expect(&ran, 0, NULL, "train.zero_stage is \"auto\", was \"3\"");
    assert_non_null(strstr(ran.err, "run: zero stage 0 "));
    double rest = last_loss("part/summary.json");

    RUN("train", "--config", path, "--zero-stage", "1", "--output-dir",
        scratch_at(&scratch, "plain"), "--set", "optim.schedule=constant");
    process_expect(&ran, 0, NULL, NULL);
    assert_true(rest == last_loss("plain/summary.json"));
    assert_true(whole > 0);
}

static void plan_compare_and_config_know_it(void **state)
{
    (void)state;
    const char *path = auto_config(2, "out");
    RUN("config", "--config", path);
    process_expect(&ran, 0, "zero_stage: auto", NULL);
    RUN("plan", "--config", path);
    process_expect(&ran, 0, "of stage 0", NULL);
    RUN("plan", "--config", path, "--zero-stage", "auto", "--memory", "1GiB");
    process_expect(&ran, 0, "1* ", NULL);
    RUN("compare", "--config", path, "--stages", "auto,1", "--steps", "2", "--repeat", "1",
        "--output-dir", scratch_at(&scratch, "compare"));
    process_expect(&ran, 0, "2 ranks, stage auto (0)", NULL);
    assert_non_null(strstr(ran.out, "2 ranks, stage 1"));
}

/* ---- what is free ---- */

static void put(const char *name, const char *text)
{
    char path[600], folder[600];
    snprintf(path, sizeof path, "%s/%s", scratch_at(&scratch, "root"), name);
    snprintf(folder, sizeof folder, "%.*s", (int)(strrchr(path, '/') - path), path);
    assert_ok(file_make_dirs(folder));
    assert_ok(file_write(path, text, strlen(text)));
}

static size_t free_bytes(void)
{
    size_t bytes = 0;
    char root[512];
    snprintf(root, sizeof root, "%s", scratch_at(&scratch, "root"));
    assert_ok(host_memory_free(&bytes, root));
    return bytes;
}

static void the_tightest_control_group_says_what_is_free(void **state)
{
    (void)state;
    size_t bytes = 0;
    put("proc/meminfo", "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    4000 kB\n");
    assert_int_equal(free_bytes(), 4096000); /* no groups */
    /* Version 2: of the group and those above it. */
    put("proc/self/cgroup", "0::/a/b\n");
    put("sys/fs/cgroup/a/b/memory.max", "max\n");
    put("sys/fs/cgroup/a/b/memory.current", "1000\n");
    assert_int_equal(free_bytes(), 4096000);
    put("sys/fs/cgroup/a/memory.max", "3000000\n");
    put("sys/fs/cgroup/a/memory.current", "2500000\n");
    assert_int_equal(free_bytes(), 500000);
    put("sys/fs/cgroup/a/memory.stat", "anon 7\ninactive_file 300000\nactive_file 100000\n");
    assert_int_equal(free_bytes(), 900000);
    put("sys/fs/cgroup/a/b/memory.max", "1001\n");
    assert_int_equal(free_bytes(), 1);
    put("sys/fs/cgroup/a/b/memory.max", "999\n");
    assert_int_equal(free_bytes(), 0);
    /* Version 1, and a path that is the host's: the mount itself has the limit. */
    put("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n");
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "2000000\n");
    put("sys/fs/cgroup/memory/memory.usage_in_bytes", "700000\n");
    assert_int_equal(free_bytes(), 1300000);
    put("sys/fs/cgroup/memory/memory.stat",
        "inactive_file 5\ntotal_inactive_file 90000\ntotal_active_file 10000\n");
    assert_int_equal(free_bytes(), 1400000);
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    assert_int_equal(free_bytes(), 4096000);
    put("proc/self/cgroup", "nothing\n\n1:memory\n2:memory:rel\n");
    assert_int_equal(free_bytes(), 4096000);
    put("proc/meminfo", "MemTotal: 9000 kB\n");
    assert_fails(host_memory_free(&bytes, scratch_at(&scratch, "root")), ST_SYSTEM,
                 "does not say MemAvailable");
    assert_ok(host_memory_free(&bytes, ""));
    assert_true(bytes > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_stage_follows_from_the_memory_to_the_byte),
        cmocka_unit_test(the_poorest_rank_decides_for_all),
        cmocka_unit_test(a_copy_for_checkpoints_is_left_room_for),
        cmocka_unit_test(what_the_configuration_refuses_is_not_taken),
        cmocka_unit_test(a_measured_machine_predicts_the_fastest),
        cmocka_unit_test(a_run_says_which_stage_it_took_and_goes_on_at_another),
        cmocka_unit_test(plan_compare_and_config_know_it),
        cmocka_unit_test(the_tightest_control_group_says_what_is_free),
    };
    return cmocka_run_group_tests(tests, make_data, run_tear_down);
}
