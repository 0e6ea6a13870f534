/*
 * Checkpoints of a run: going on from one gives the bits of an unbroken run; another number of
 * ranks or another stage goes on from the same state; what fails, is damaged or is of another run
 * is said so and costs nothing that was there before.
 */
#include <dirent.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <jansson.h>

#include "engine/train/checkpoint_state.h"
#include "io/checkpoint.h"
#include "tests/support/ranks.h"
#include "tests/support/run.h"

static struct scratch scratch;
static struct run_trace first, other, third;

static int make_data(void **state)
{
    (void)state;
    struct made_questions q = {.count = 40,
                               .min_words = 5,
                               .max_words = 90,
                               .question_words = 4,
                               .impossible_every = 5,
                               .seed = 7};
    scratch_make(&scratch);
    run_make_data(&scratch, "train.json", q);
    q.count = 4;
    q.seed = 8;
    run_make_data(&scratch, "eval.json", q);
    return 0;
}

static int remove_data(void **state)
{
    (void)state;
    scratch_remove(&scratch);
    return 0;
}

static int release(void **state)
{
    (void)state;
    file_fail_at(0);
    file_delay(0);
    mem_fail_at(0);
    run_release(&first);
    run_release(&other);
    run_release(&third);
    return 0;
}

/* A global batch of 12: five steps an epoch. Rates do not depend on the length of the run. */
static struct run_config tiny(const char *out, int ranks, int stage, int64_t steps, int64_t every)
{
    struct run_config c;
    run_tiny(&c, &scratch, false);
    scratch_path(&scratch, c.output.dir, out);
    c.data.version_2 = true;
    c.train.ranks = ranks;
    c.train.zero_stage = stage;
    c.train.grad_accum = ranks > 3 ? 1 : 2;
    c.train.micro_batch = 12 / ranks / c.train.grad_accum;
    c.train.steps = steps;
    c.train.reduce = REDUCE_PER_MICRO_BATCH;
    c.optim.schedule = SCHEDULE_CONSTANT;
    c.optim.warmup_steps = 3;
    c.checkpoint.every = every;
    return c;
}

static void folder_of(const struct run_config *c, char path[1200], int64_t step)
{
    snprintf(path, 1200, "%s/checkpoints/step-%08lld", c->output.dir, (long long)step);
}

static bool is_there(const struct run_config *c, int64_t step)
{
    char path[1200];
    folder_of(c, path, step);
    return access(path, F_OK) == 0;
}

/* Go on from a step of another run's folder. */
static void resume_from(struct run_config *c, const struct run_config *saved, int64_t step)
{
    char name[64];
    snprintf(name, sizeof name, "checkpoints/step-%08lld", (long long)step);
    assert_ok(
        path_join(c->checkpoint.resume, sizeof c->checkpoint.resume, saved->output.dir, name));
}

static void resume_latest(struct run_config *c)
{
    snprintf(c->checkpoint.resume, sizeof c->checkpoint.resume, "latest");
}

static void same_state(struct run_trace *a, struct run_trace *b, const char *what)
{
    int steps_a = a->steps, steps_b = b->steps;
    a->steps = b->steps = 0;
    run_same(a, b, what);
    a->steps = steps_a;
    b->steps = steps_b;
}

/* The steps of @rest are those of @whole from @from on. @band 0: to the bit. */
static void same_rest(const struct run_trace *whole, const struct run_trace *rest, int from,
                      double band, const char *what)
{
    assert_int_equal(rest->steps, whole->steps - from);
    for (int i = 0; i < rest->steps; i++) {
        const struct step_state *x = &whole->step[0][from + i], *y = &rest->step[0][i];
        bool same = x->t == y->t && x->lr == y->lr && x->sequences == y->sequences &&
                    x->host.step == y->host.step;
        same &= band > 0 ? fabs(x->loss - y->loss) <= band
                         : x->loss == y->loss && x->grad_norm == y->grad_norm;
        if (same)
            continue;
        print_error("%s: step %d: loss %.17g and %.17g, norm %.17g and %.17g\n", what, from + i,
                    x->loss, y->loss, x->grad_norm, y->grad_norm);
        fail();
    }
}

/* ---- the same world -------------------------------------------------------------------------- */

enum { TOTAL = 12, HALF = 7 /* inside the second epoch */ };

static void b01_b05_b10_b11_b13_n_and_n_steps_are_2n_steps_to_the_bit(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage++) {
        char what[64];
        struct run_config plain = tiny("plain", 2, stage, TOTAL, 0), saving = plain, rest = plain;
        snprintf(what, sizeof what, "stage %d", stage);
        saving.checkpoint.every = HALF;
        saving.checkpoint.async = stage % 2 == 0;
        snprintf(saving.output.dir, sizeof saving.output.dir, "%s/half-%d", scratch.dir, stage);
        run_ok(&first, &plain, NULL);
        run_ok(&other, &saving, NULL);
        assert_int_equal(first.steps, TOTAL);
        run_same(&first, &other, "a run that saves");
        assert_true(is_there(&saving, HALF) && is_there(&saving, TOTAL));
        resume_from(&rest, &saving, HALF);
        run_ok(&third, &rest, NULL);
        same_rest(&first, &third, HALF, 0, what);
        same_state(&first, &third, what);
        release(NULL);
    }
}

#ifndef __SANITIZE_THREAD__ /* the flag is a signal handler's, not a thread's */
static volatile int signal_number;

static void raise_in_step_6(void *context, const struct program *p, int index,
                            const size_t live[CATEGORY_COUNT])
{
    const struct trainer *t = context;
    const struct step_state *s = executor_shared(&t->executor, SHARED_STATE);
    (void)live;
    if (p->kind == PROGRAM_STEP && index == 3 && t->comm->rank == 1 && s->host.step == 6)
        signal_number = SIGTERM;
}

static void b92_a_signal_saves_the_last_step_and_resume_goes_on_to_the_bit(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage += 3) {
        struct run_config plain = tiny("plain", 3, stage, TOTAL, 0), stopped = plain;
        snprintf(stopped.output.dir, sizeof stopped.output.dir, "%s/stop-%d", scratch.dir, stage);
        stopped.checkpoint.every = 1000;
        run_ok(&first, &plain, NULL);
        signal_number = 0;
        run_go(&other, &stopped,
               &(struct run_how){.signal_flag = &signal_number,
                                 .executor = {.on_instr = raise_in_step_6}});
        assert_int_equal(other.st, ST_INTERRUPTED);
        assert_true(other.steps > 6 && is_there(&stopped, other.steps));
        int stop = other.steps;
        resume_latest(&stopped);
        run_ok(&third, &stopped, NULL);
        same_rest(&first, &third, stop, 0, "after a signal");
        same_state(&first, &third, "after a signal");
        assert_true(is_there(&stopped, TOTAL));
        release(NULL);
    }
}
#endif

/* Nothing is learned: the first evaluation is the best, and the third after it ends the run. */
static void early_stopping_goes_on_where_it_stood(void **state)
{
    (void)state;
    struct run_config c = tiny("early", 2, 2, 40, 1), rest;
    scratch_path(&scratch, c.data.eval, "eval.json");
    c.optim.lr = 0;
    c.eval.every = 2;
    c.eval.stop_metric = STOP_LOSS;
    c.checkpoint.keep = 0;
    rest = c;
    rest.checkpoint.every = 0;
    run_ok(&first, &c, NULL);
    assert_int_equal(first.steps, 8);
    for (int64_t step = 5; step <= 8; step++) {
        resume_from(&rest, &c, step);
        run_ok(&third, &rest, NULL);
        same_rest(&first, &third, (int)step, 0, "early stop");
        run_release(&third);
    }
}

/* ---- another world --------------------------------------------------------------------------- */

enum { MAX_SAMPLES = 256 };
static int times_seen[2][MAX_SAMPLES]; /* by epoch */

static void count_samples(void *context, const struct program *p, int index,
                          const size_t live[CATEGORY_COUNT])
{
    const struct trainer *t = context;
    const struct step_state *s = executor_shared(&t->executor, SHARED_STATE);
    (void)live;
    if (p->kind != PROGRAM_STEP || p->instrs[index].op != OP_AGREE || t->comm->rank != 0)
        return;
    int64_t epoch = s->host.step / t->sampler.steps_per_epoch;
    for (int r = 0; r < t->comm->world_size; r++)
        for (int m = 0; m < t->config->train.grad_accum; m++) {
            int32_t picked[16];
            int64_t n = sampler_take(&t->sampler, r, m, picked);
            for (int64_t i = 0; i < n && epoch < 2; i++)
                times_seen[epoch][picked[i]]++;
        }
}

static void b16_b17_b19_any_world_and_stage_goes_on_from_the_same_state(void **state)
{
    (void)state;
    static const int worlds[] = {1, 2, 4, 6};
    const struct run_how counting = {.executor = {.on_instr = count_samples}};
    struct run_config saving = tiny("world", 3, 2, HALF, HALF);
    struct run_config whole = tiny("world-whole", 3, 2, 10, 0);
    run_ok(&other, &whole, NULL);
    memset(times_seen, 0, sizeof times_seen);
    run_ok(&first, &saving, &counting);
    int seen_before[2][MAX_SAMPLES];
    memcpy(seen_before, times_seen, sizeof seen_before);
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++)
        for (int stage = 0; stage < 4; stage++) {
            char what[64];
            snprintf(what, sizeof what, "%d ranks at stage %d", worlds[i], stage);
            /* No step is left to do: the state is what was read. */
            struct run_config c = tiny("none", worlds[i], stage, HALF, 0);
            resume_from(&c, &saving, HALF);
            run_ok(&third, &c, NULL);
            assert_int_equal(third.steps, 0);
            same_state(&first, &third, what);
            run_release(&third);
            c.train.steps = 10;
            c.train.max_unit_numel = 1 << 20; /* tables in one part: another layout */
            memcpy(times_seen, seen_before, sizeof seen_before);
            run_ok(&third, &c, &counting);
            same_rest(&other, &third, HALF, 1e-4, what);
            int64_t samples = 0;
            for (int s = 0; s < MAX_SAMPLES; s++) {
                assert_int_equal(times_seen[0][s], times_seen[1][s]);
                assert_in_range(times_seen[0][s], 0, 1);
                samples += times_seen[0][s];
            }
            assert_true(samples >= 40);
            run_release(&third);
        }
}

static void frozen_tensors_go_on_and_a_changed_freeze_is_an_error(void **state)
{
    (void)state;
    struct run_config plain = tiny("plain", 2, 3, TOTAL, 0), saving, rest;
    snprintf(plain.train.freeze, sizeof plain.train.freeze,
             "bert.embeddings,bert.encoder.layer.0,bert.encoder.layer.1.output.dense");
    saving = rest = plain;
    scratch_path(&scratch, saving.output.dir, "frozen");
    saving.checkpoint.every = HALF;
    run_ok(&first, &plain, NULL);
    run_ok(&other, &saving, NULL);
    resume_from(&rest, &saving, HALF);
    run_ok(&third, &rest, NULL);
    same_rest(&first, &third, HALF, 0, "frozen");
    same_state(&first, &third, "frozen");
    release(NULL);
    rest.train.freeze[0] = '\0';
    run_go(&third, &rest, NULL);
    assert_int_equal(third.st, ST_INVALID);
    assert_non_null(strstr(third.message, "train.freeze"));
}

/* ---- what is refused ------------------------------------------------------------------------- */

static void expect(const struct run_config *c, enum status st, const char *text, const char *also)
{
    run_go(&third, c, NULL);
    if (third.st != st || strstr(third.message, text) == NULL ||
        strstr(third.message, also) == NULL)
        fail_msg("%s: %s; expected %s, \"%s\", \"%s\"", status_name(third.st), third.message,
                 status_name(st), text, also);
    run_release(&third);
}

static void b74_what_is_not_there_is_an_error_and_never_a_fresh_state(void **state)
{
    (void)state;
    struct run_config c = tiny("empty", 2, 1, 3, 0);
    resume_latest(&c);
    expect(&c, ST_INVALID, "empty/checkpoints", "no checkpoint to go on from");
    resume_from(&c, &c, 5);
    expect(&c, ST_IO, "step-00000005", "");
    c.checkpoint.resume[0] = '\0';
    c.checkpoint.resume_or_start = true;
    c.checkpoint.every = 2;
    run_ok(&first, &c, NULL);
    assert_int_equal(first.steps, 3);
    assert_true(is_there(&c, 3));
    c.train.steps = 5;
    run_ok(&other, &c, NULL);
    assert_int_equal(other.steps, 2);
    c.checkpoint.resume_or_start = false;
    expect(&c, ST_INVALID, "earlier run", "--resume latest");
    assert_true(is_there(&c, 5));
}

static void another_run_is_refused_with_keys_and_both_values(void **state)
{
    (void)state;
    struct run_config saving = tiny("refused", 2, 1, 2, 2), c = tiny("none", 2, 1, 4, 0);
    resume_from(&c, &saving, 2);
    run_ok(&first, &saving, NULL);
    struct run_config d = c;
    d.train.seed = 43;
    expect(&d, ST_INVALID, "train.seed is \"42\" there and \"43\" here", "another run");
    d = c;
    d.data.max_length = 60;
    expect(&d, ST_INVALID, "data.max_length is \"64\" there and \"60\" here", "");
    d = c;
    d.model.ffn = 48;
    expect(&d, ST_INVALID, "model.ffn is \"40\" there and \"48\" here", "");
    d = c;
    d.train.micro_batch = 4;
    expect(&d, ST_INVALID, "global batch", "is \"12\" there and \"16\" here");
    d = c;
    scratch_path(&scratch, d.data.train, "eval.json");
    expect(&d, ST_INVALID, "the content of data.train", "number of windows");
    d = c; /* rates, lengths and the like are free */
    d.optim.lr = 5e-4;
    d.train.epochs = 7;
    d.train.recompute = RECOMPUTE_BLOCK;
    run_ok(&third, &d, NULL);
    assert_int_equal(third.steps, 2);
}

/* What is wrong with the training state without one of its parts, or with one of another kind. */
static char accepted[64];

static void spoil_components(void *context, struct trainer *t)
{
    static const char *const keys[] = {"step",
                                       "t",
                                       "seed",
                                       "train_count",
                                       "train_hash",
                                       "vocab_hash",
                                       "best",
                                       "global_batch",
                                       "skipped_in_row",
                                       "best_metric",
                                       "config",
                                       "evaluations_without_gain",
                                       "evaluation_pending"};
    struct training_state state = {.step = 2, .t = 2, .best_step = 1}, back;
    json_t *whole = NULL;
    (void)context;
    if (t->comm->rank != 0)
        return;
    if (training_state_write(&whole, &state, t) != ST_OK ||
        training_state_read(&back, whole, t, "here") != ST_OK || back.best_step != 1)
        snprintf(accepted, sizeof accepted, "not even the whole");
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        for (int kind = 0; kind < 2; kind++) {
            json_t *part = json_copy(whole);
            if (kind == 0)
                json_object_del(part, keys[i]);
            else
                json_object_set_new(part, keys[i], json_array());
            if (training_state_read(&back, part, t, "here") != ST_CORRUPT ||
                strstr(status_message(), keys[i]) == NULL)
                snprintf(accepted, sizeof accepted, "%s", keys[i]);
            json_decref(part);
        }
    json_decref(whole);
}

static void b02_b14_every_component_of_the_training_state_is_needed(void **state)
{
    (void)state;
    struct run_config c = tiny("none", 2, 1, 1, 0);
    accepted[0] = '\0';
    run_ok(&first, &c, &(struct run_how){.at_end = spoil_components});
    assert_string_equal(accepted, "");
}

/* ---- damage ---------------------------------------------------------------------------------- */

static void flip_byte(const char *folder, const char *name, int64_t from_middle)
{
    char path[1400];
    struct stat info;
    uint8_t byte;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0 && fstat(fd, &info) == 0);
    off_t at = info.st_size / 2 + from_middle;
    assert_int_equal(pread(fd, &byte, 1, at), 1);
    byte ^= 0x10;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

static void b74_a_damaged_latest_is_passed_over_and_a_damaged_folder_refused(void **state)
{
    (void)state;
    static const char *const names[] = {"data-00001.tsr", "manifest.json"};
    for (int i = 0; i < 2; i++) {
        char folder[1200];
        struct run_config c = tiny(i == 0 ? "flip-data" : "flip-manifest", 2, 2, 6, 3), d;
        run_ok(&first, &c, NULL);
        folder_of(&c, folder, 6);
        flip_byte(folder, names[i], i == 0 ? -2000 : 0);
        d = c;
        d.checkpoint.every = 0;
        resume_from(&d, &c, 6);
        expect(&d, ST_CORRUPT, "step-00000006", "");
        resume_latest(&c);
        c.train.steps = 7;
        run_ok(&other, &c, NULL);
        assert_int_equal(other.steps, 4); /* from step 3 */
        for (int s = 0; s < 3; s++)
            assert_true(other.step[0][s].loss == first.step[0][3 + s].loss);
        assert_true(is_there(&c, 7));
        release(NULL);
    }
}

static void with_all_checkpoints_damaged_there_is_no_fresh_start(void **state)
{
    (void)state;
    char folder[1200];
    struct run_config c = tiny("flip-all", 2, 2, 2, 2);
    run_ok(&first, &c, NULL);
    folder_of(&c, folder, 2);
    flip_byte(folder, "data-00000.tsr", 0);
    c.checkpoint.resume_or_start = true;
    expect(&c, ST_CORRUPT, "damaged", "flip-all");
    flip_byte(folder, "manifest.json", 0);
    expect(&c, ST_CORRUPT, "damaged", "flip-all");
}

/* ---- how it is written ----------------------------------------------------------------------- */

static void read_part(struct file_text *text, const struct run_config *c, int64_t step, int rank)
{
    char folder[1200], name[32], path[1400];
    folder_of(c, folder, step);
    snprintf(name, sizeof name, "data-%05d.tsr", rank);
    assert_ok(path_join(path, sizeof path, folder, name));
    assert_ok(file_read(text, path));
}

static void waiting_or_not_gives_the_same_files(void **state)
{
    (void)state;
    struct run_config a = tiny("async", 3, 3, 6, 2), b = tiny("sync", 3, 3, 6, 2);
    a.checkpoint.keep = b.checkpoint.keep = 0;
    b.checkpoint.async = false;
    run_ok(&first, &a, NULL);
    run_ok(&other, &b, NULL);
    run_same(&first, &other, "async and sync");
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
        struct run_config c = tiny(out, 4, stage, 1, 1);
        run_ok(&first, &c, NULL);
        folder_of(&c, folder, 1);
        assert_ok(checkpoint_open(&file, folder));
        assert_ok(checkpoint_verify(&file, NULL, NULL));
        assert_int_equal(file.file_count, 4);
        plain[stage] = file.plain_bytes;
        assert_int_equal(plain[stage], plain[0]);
        checkpoint_close(&file);
        run_release(&first);
    }
}

static void old_ones_go_and_the_best_stays(void **state)
{
    (void)state;
    struct run_config c = tiny("keep", 2, 1, 8, 2);
    scratch_path(&scratch, c.data.eval, "eval.json");
    c.checkpoint.keep_best = STOP_LOSS;
    c.eval.every = 3;
    run_ok(&first, &c, NULL);
    assert_true(is_there(&c, 8) && is_there(&c, 6)); /* the newest two: a loss falls here */
    assert_false(is_there(&c, 2));
    char path[1200];
    snprintf(path, sizeof path, "%s/checkpoints/latest", c.output.dir);
    assert_int_equal(access(path, F_OK), 0);
    run_release(&first);
    /* Where nothing is learned no later one is better than the first. */
    scratch_path(&scratch, c.output.dir, "keep-first");
    c.optim.lr = 0;
    run_ok(&first, &c, NULL);
    assert_true(is_there(&c, 3));
    assert_true(is_there(&c, 8));
    assert_false(is_there(&c, 4));
}

static void b68_a_save_may_take_longer_than_a_collective(void **state)
{
    (void)state;
    for (int waits = 0; waits < 2; waits++) {
        char out[32];
        snprintf(out, sizeof out, "slow-%d", waits);
        struct run_config c = tiny(out, 2, 3, 3, 3);
        c.train.timeout_s = 1;
        c.checkpoint.async = waits == 0;
        file_delay(10); /* hundreds of writes */
        int64_t begun = now_ms();
        run_go(&first, &c, NULL);
        file_delay(0);
        assert_int_equal(first.st, ST_OK);
        assert_true(now_ms() - begun > 1200);
        assert_true(is_there(&c, 3));
        release(NULL);
    }
}

/* ---- memory ---------------------------------------------------------------------------------- */

struct growth {
    int64_t bytes[2], rss[2];
};

static int64_t resident_bytes(void)
{
    long pages = 0, resident = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f == NULL || fscanf(f, "%ld %ld", &pages, &resident) != 2)
        resident = 0;
    if (f != NULL)
        fclose(f);
    return resident * sysconf(_SC_PAGESIZE);
}

static struct growth growth;

static void watch_memory(void *context, const struct program *p, int index,
                         const size_t live[CATEGORY_COUNT])
{
    const struct trainer *t = context;
    const struct step_state *s = executor_shared(&t->executor, SHARED_STATE);
    (void)live;
    if (p->kind != PROGRAM_STEP || index != 0 || t->comm->rank != 0)
        return;
    int at = s->host.step == 10 ? 0 : s->host.step == 40 ? 1 : -1;
    if (at < 0)
        return;
    growth.bytes[at] = mem_live_bytes();
    growth.rss[at] = resident_bytes();
}

static void b77_30_saves_leave_memory_flat(void **state)
{
    (void)state;
    struct run_config c = tiny("flat", 2, 2, 41, 1);
    c.checkpoint.async = false; /* between saves nothing of one is left */
    run_ok(&first, &c, &(struct run_how){.executor = {.on_instr = watch_memory}});
    assert_int_equal(growth.bytes[0], growth.bytes[1]);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    /* The allocator may keep the buffers of a writer a rank; a leak of a compressor is more. */
    if (growth.rss[1] - growth.rss[0] > 16 << 20)
        fail_msg("%lld bytes more resident after 30 saves",
                 (long long)(growth.rss[1] - growth.rss[0]));
#endif
}

/* ---- faults ---------------------------------------------------------------------------------- */

struct fault {
    int64_t at;
    void (*arm)(int64_t k);
    bool (*strikes)(void); /* uses one operation up */
    bool fired;
};

static bool allocation_fails(void)
{
    void *probe = NULL;
    bool failed = mem_alloc(&probe, 1) != ST_OK;
    mem_free(&probe);
    return failed;
}

/* Not before the run is set up, and not after its end. */
static void arm_fault(void *context, struct trainer *t)
{
    const struct fault *f = context;
    if (t->comm->rank == 0)
        f->arm(f->at);
    if (comm_barrier(t->comm) != ST_OK)
        comm_abort(t->comm, status_message());
}

/* If it is still to come, it comes within as many operations. */
static void disarm_fault(void *context, struct trainer *t)
{
    struct fault *f = context;
    if (comm_barrier(t->comm) != ST_OK)
        comm_abort(t->comm, status_message());
    if (t->comm->rank != 0)
        return;
    f->fired = true;
    for (int64_t i = 0; i < f->at && f->fired; i++)
        f->fired = !f->strikes();
    f->arm(0);
}

/* Every complete checkpoint there is can be read to the last byte; returns how many. */
static int count_valid(const struct run_config *c)
{
    char dir[1200];
    struct checkpoint_list list = {0};
    int valid = 0;
    snprintf(dir, sizeof dir, "%s/checkpoints", c->output.dir);
    assert_ok(checkpoint_list(&list, dir));
    for (int i = 0; i < list.count; i++) {
        struct checkpoint file = {0};
        assert_int_equal(list.entries[i].status, ST_OK);
        assert_ok(checkpoint_open(&file, list.entries[i].path));
        assert_ok(checkpoint_verify(&file, NULL, NULL));
        checkpoint_close(&file);
        valid++;
    }
    checkpoint_list_release(&list);
    return valid;
}

/* The k-th operation of two saves fails, for growing k until none does. */
static void fail_every(const char *name, struct fault f)
{
    int worst = 2, fired = 0;
    struct run_config plain = tiny("plain", 2, 1, 2, 0);
    run_ok(&first, &plain, NULL);
    for (f.at = 1;; f.at += 1 + f.at / 8) {
        char out[64];
        snprintf(out, sizeof out, "%s-%d", name, (int)f.at);
        struct run_config c = tiny(out, 2, 1, 2, 1);
        c.checkpoint.async = fired % 2 == 0;
        run_go(&other, &c,
               &(struct run_how){.at_start = arm_fault, .at_end = disarm_fault, .context = &f});
        if (other.st != ST_OK)
            fail_msg("%s ended the run: %s", out, other.message);
        run_same(&first, &other, "with a failed save");
        int valid = count_valid(&c);
        worst = valid < worst ? valid : worst;
        run_release(&other);
        if (!f.fired) {
            assert_int_equal(valid, 2);
            break;
        }
        fired++;
    }
    print_message("%s: up to operation %d, %d failed; at worst %d of 2 checkpoints are there\n",
                  name, (int)f.at, fired, worst);
    assert_true(worst == 1 && fired > 10);
}

static void b69_a_failed_file_operation_costs_one_checkpoint_and_no_bit_of_training(void **state)
{
    (void)state;
    fail_every("fail-file", (struct fault){.arm = file_fail_at, .strikes = file_fault_due});
}

static void a_failed_allocation_costs_one_checkpoint_and_no_bit_of_training(void **state)
{
    (void)state;
    fail_every("fail-memory", (struct fault){.arm = mem_fail_at, .strikes = allocation_fails});
}

/* ---- the program, killed --------------------------------------------------------------------- */

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
    int64_t begun = now_ms();
    int status = 0;
    snprintf(dir, sizeof dir, "%s/checkpoints", c->output.dir);
    do {
        sleep_ms(5);
        assert_ok(checkpoint_find_latest(&found, dir));
        assert_int_equal(found.damaged, 0);
        if (pid != 0 && waitpid(pid, &status, WNOHANG) != 0)
            fail_msg("the program ended with %d", status);
        assert_true(now_ms() - begun < 60000);
    } while (found.step <= before);
    return found.step;
}

static void put_config(const struct run_config *c, char path[512])
{
    struct file_text text = {NULL, 0};
    assert_ok(config_write(c, &text.data, &text.bytes));
    scratch_put(&scratch, path, "program.yaml", text.data, text.bytes);
    mem_free(&text.data);
}

static void b69_killed_at_any_time_it_goes_on_with_other_ranks_and_stage(void **state)
{
    (void)state;
    char path[512], steps[32];
    uint64_t random = test_seed();
    struct file_text metrics;
    struct run_config c = tiny("killed", 2, 3, 2000, 5);
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
    assert_true(is_there(&c, newest + 6));
    /* The record of the run has each step once. */
    run_read(&metrics, &c, "metrics.jsonl");
    for (const char *at = metrics.data; (at = strstr(at, "{\"step\":")) != NULL; at++)
        assert_int_equal(strtoll(at + 8, NULL, 10), ++step);
    assert_int_equal(step, newest + 6);
    mem_free(&metrics.data);
}

static void b92_a_warning_from_the_scheduler_saves_and_the_exit_code_says_so(void **state)
{
    (void)state;
    char path[512];
    struct run_config c = tiny("warned", 3, 2, 2000, 5);
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

#define TEST(name) cmocka_unit_test_teardown(name, release)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(b01_b05_b10_b11_b13_n_and_n_steps_are_2n_steps_to_the_bit),
#ifndef __SANITIZE_THREAD__
        TEST(b92_a_signal_saves_the_last_step_and_resume_goes_on_to_the_bit),
#endif
        TEST(early_stopping_goes_on_where_it_stood),
        TEST(b16_b17_b19_any_world_and_stage_goes_on_from_the_same_state),
        TEST(frozen_tensors_go_on_and_a_changed_freeze_is_an_error),
        TEST(b74_what_is_not_there_is_an_error_and_never_a_fresh_state),
        TEST(another_run_is_refused_with_keys_and_both_values),
        TEST(b02_b14_every_component_of_the_training_state_is_needed),
        TEST(b74_a_damaged_latest_is_passed_over_and_a_damaged_folder_refused),
        TEST(with_all_checkpoints_damaged_there_is_no_fresh_start),
        TEST(waiting_or_not_gives_the_same_files),
        TEST(b81_stage_0_writes_what_the_other_stages_write),
        TEST(old_ones_go_and_the_best_stays),
        TEST(b68_a_save_may_take_longer_than_a_collective),
        TEST(b77_30_saves_leave_memory_flat),
        TEST(b69_a_failed_file_operation_costs_one_checkpoint_and_no_bit_of_training),
        TEST(a_failed_allocation_costs_one_checkpoint_and_no_bit_of_training),
        TEST(b69_killed_at_any_time_it_goes_on_with_other_ranks_and_stage),
        TEST(b92_a_warning_from_the_scheduler_saves_and_the_exit_code_says_so),
    };
    return cmocka_run_group_tests(tests, make_data, remove_data);
}
