/* The snapshot that a save writes: the state at its step, whatever training does meanwhile. */
#include <stdio.h>
#include <string.h>

#include "engine/base/file.h"
#include "engine/train/weights.h"
#include "io/checkpoint.h"
#include "tests/support/resume.h"

/* ---- what was copied, and what was written --------------------------------------------------- */

enum { COPY_RANKS = 2, COPY_STATES = 3, COPY_EVERY = 3, COPY_SAVES = 3, COPY_NUMEL = 40000 };

/* Each rank's shards as they were when a save began, how often training went on meanwhile, and how
 * often its next turn had begun when the copy was not made yet. */
static struct {
    float values[COPY_SAVES][COPY_RANKS][COPY_STATES][COPY_NUMEL];
    char problem[COPY_RANKS][1024];
    int overlapped, hidden;
} copied;

/* ---- a copy stream that makes its copies when somebody has to wait for them --- */

enum { LAZY_COPIES = 512 };

/* As late as a device may be. If an update does not wait for them, they find the state changed. */
static struct lazy {
    struct device_ops ops; /* first: device->ops points to it */
    const struct device_ops *real;
    struct {
        void *out;
        const void *in;
        size_t bytes;
    } copies[LAZY_COPIES];
    int count;
} lazies[COPY_RANKS];

static struct lazy *lazy_of(const struct device *device)
{
    return (struct lazy *)(void *)device->ops;
}

static enum status lazy_copy(struct stream *s, void *out, const void *in, size_t bytes)
{
    struct lazy *l = lazy_of(s->device);
    if (s->id != STREAM_COPY)
        return l->real->copy(s, out, in, bytes);
    assert_true(l->count < LAZY_COPIES);
    l->copies[l->count].out = out;
    l->copies[l->count].in = in;
    l->copies[l->count++].bytes = bytes;
    return ST_OK;
}

static void lazy_catch_up(struct lazy *l)
{
    for (int i = 0; i < l->count; i++)
        memcpy(l->copies[i].out, l->copies[i].in, l->copies[i].bytes);
    l->count = 0;
}

/* The handle, of no use on a CPU, marks an event of the copy stream. */
static enum status lazy_record(struct event *e, struct stream *s)
{
    TRY(lazy_of(s->device)->real->event_record(e, s));
    e->handle = s->id == STREAM_COPY ? lazies : NULL;
    return ST_OK;
}

static enum status lazy_stream_wait(struct stream *s, struct event *e)
{
    if (e->handle != NULL)
        lazy_catch_up(lazy_of(s->device));
    return ST_OK;
}

static enum status lazy_event_wait(struct event *e)
{
    if (e->handle != NULL)
        lazy_catch_up(lazy_of(e->device));
    return ST_OK;
}

static enum status lazy_query(const struct event *e, bool *done)
{
    *done = e->handle == NULL || lazy_of(e->device)->count == 0;
    return ST_OK;
}

static void be_lazy(void *context, struct trainer *t)
{
    struct lazy *l = &lazies[t->comm->rank];
    (void)context;
    *l = (struct lazy){.ops = *t->device->ops, .real = t->device->ops};
    l->ops.copy = lazy_copy;
    l->ops.event_record = lazy_record;
    l->ops.stream_wait = lazy_stream_wait;
    l->ops.event_wait = lazy_event_wait;
    l->ops.event_query = lazy_query;
    t->device->ops = &l->ops;
}

/* ---- seen from the first instruction of a turn ----------------------------------------------- */

static void copy_and_watch(void *context, const struct program *p, int index,
                           const size_t live[CATEGORY_COUNT])
{
    const struct trainer *t = context;
    const struct step_state *s = executor_shared(&t->executor, SHARED_STATE);
    int64_t step = s->host.step, save = step / COPY_EVERY - 1, used = 0;
    (void)live;
    if (p->kind != PROGRAM_STEP || index != 0 || save < 0 || save >= COPY_SAVES)
        return;
    if (step % COPY_EVERY == 1 && t->comm->rank == 0)
        copied.overlapped += !saved_is_there(t->config, step - 1);
    if (step % COPY_EVERY != 0)
        return;
    if (t->comm->rank == 0)
        copied.hidden += lazies[0].count > 0;
    for (int u = 0; u < t->setup.model.unit_count; u++) {
        struct shard_view view = executor_shard(&t->executor, u);
        const float *from[COPY_STATES] = {view.master, view.adam_m, view.adam_v};
        ASSERT(used + view.numel <= COPY_NUMEL);
        for (int k = 0; k < COPY_STATES; k++)
            memcpy(copied.values[save][t->comm->rank][k] + used, from[k],
                   sizeof(float) * (size_t)view.numel);
        used += view.numel;
    }
}

/* One unit of a save that is compared with its file. */
struct copy_check {
    const struct model *model;
    struct checkpoint_reader reader;
    const char *state;
    const float *want;
};

static enum status check_part(void *context, struct weights_part part)
{
    static _Thread_local float got[COPY_NUMEL];
    struct copy_check *check = context;
    const char *name = check->model->tensors[part.tensor].name;
    TRY(checkpoint_read_range(&check->reader, check->state, name, part.tensor_first, part.count,
                              got));
    for (int64_t i = 0; i < part.count; i++)
        if (memcmp(&got[i], &check->want[part.range_first + i], sizeof *got) != 0)
            return FAIL(CORRUPT, "%s of %s, element %lld: copied %.9g, in the file %.9g",
                        check->state, name, (long long)(part.tensor_first + i),
                        (double)check->want[part.range_first + i], (double)got[i]);
    return ST_OK;
}

static enum status check_save(const struct trainer *t, int save)
{
    static const char *const states[COPY_STATES] = {"master", "adam_m", "adam_v"};
    enum status st;
    char path[SAVED_PATH_BYTES];
    struct checkpoint file = {0};
    struct copy_check check = {.model = &t->setup.model};
    int64_t used = 0;
    saved_folder(t->config, path, (save + 1) * COPY_EVERY);
    TRY_GOTO(st, out, checkpoint_open(&file, path));
    TRY_GOTO(st, out, checkpoint_reader_open(&check.reader, &file));
    for (int u = 0; u < t->setup.model.unit_count; u++) {
        int64_t numel = t->setup.layout.units[u].shard_numel;
        for (int k = 0; k < COPY_STATES; k++) {
            check.state = states[k];
            check.want = copied.values[save][t->comm->rank][k] + used;
            TRY_GOTO(st, out,
                     weights_each_part(check.model, u, t->comm->rank * numel, numel, check_part,
                                       &check));
        }
        used += numel;
    }
out:
    checkpoint_reader_close(&check.reader);
    checkpoint_close(&file);
    return st;
}

static void check_saves(void *context, struct trainer *t)
{
    (void)context;
    for (int save = 0; save < COPY_SAVES; save++)
        if (check_save(t, save) != ST_OK)
            snprintf(copied.problem[t->comm->rank], sizeof copied.problem[0], "%s",
                     status_message());
}

static void run_and_check(const struct run_config *c, void (*at_start)(void *, struct trainer *))
{
    memset(&copied, 0, sizeof copied);
    run_go(&group.first, c,
           &(struct run_how){.executor = {.on_instr = copy_and_watch},
                             .at_start = at_start,
                             .at_end = check_saves});
    assert_int_equal(group.first.st, ST_OK);
    for (int r = 0; r < COPY_RANKS; r++)
        assert_string_equal(copied.problem[r], "");
    resume_release(NULL);
}

static struct run_config saving_run(const char *name, int stage)
{
    char out[64];
    snprintf(out, sizeof out, "%s-%d", name, stage);
    struct run_config c =
        resume_tiny(out, COPY_RANKS, stage, COPY_EVERY * (COPY_SAVES + 1), COPY_EVERY);
    c.checkpoint.keep = 0;
    return c;
}

/* The writer reads the copy for longer than a step takes, and then the next save takes it again. */
static void b78_a_slow_writer_writes_what_was_copied(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage++) {
        struct run_config c = saving_run("copy", stage);
        file_delay(2);
        run_and_check(&c, NULL);
        assert_int_equal(copied.overlapped, COPY_SAVES);
    }
}

/* The copy itself is as late as it may be: the next update waits for it, and nothing else does. */
static void b78_an_update_waits_for_the_copy_of_what_it_changes(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage++) {
        struct run_config c = saving_run("late", stage);
        c.train.update = UPDATE_LATE;
        run_and_check(&c, be_lazy);
        assert_int_equal(copied.hidden, COPY_SAVES);
        c = saving_run("early", stage);
        c.train.update = UPDATE_EARLY;
        run_and_check(&c, be_lazy);
        assert_int_equal(copied.hidden, COPY_SAVES); /* updates are the second of two pieces */
    }
}

/* Where the whole step is one piece with early updates, all of it waits. */
static void b78_so_does_a_step_of_one_piece(void **state)
{
    (void)state;
    struct run_config c = saving_run("one", 3);
    c.train.update = UPDATE_EARLY;
    c.train.micro_batch *= c.train.grad_accum;
    c.train.grad_accum = 1;
    run_and_check(&c, be_lazy);
    assert_int_equal(copied.hidden, 0);
}

/* A save after every step: the FLUSH before the next one changes the state too. */
static void b78_a_flush_waits_as_well(void **state)
{
    (void)state;
    struct run_config c = saving_run("each", 2);
    c.train.update = UPDATE_LATE;
    c.checkpoint.every = 1;
    run_and_check(&c, be_lazy);
}

#define TEST(name) cmocka_unit_test_teardown(name, resume_release)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(b78_a_slow_writer_writes_what_was_copied),
        TEST(b78_an_update_waits_for_the_copy_of_what_it_changes),
        TEST(b78_so_does_a_step_of_one_piece),
        TEST(b78_a_flush_waits_as_well),
    };
    return cmocka_run_group_tests(tests, resume_set_up, run_tear_down);
}
