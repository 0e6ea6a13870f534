/*
 * The time line of a step (engine/train/trace.h): what is in it, and that it changes nothing. And
 * what a stream's marks mean in words (engine/train/progress.h).
 */
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/train/progress.h"
#include "tests/support/run.h"

static struct scratch scratch;
static struct run_trace plain, traced;

/* What the ranks' trainers say; each writes its own. */
static struct {
    struct trace_request request;
    int count[RUN_RANKS]; /* instructions of the step, without CUT */
    double begin_s[RUN_RANKS], wall_us[RUN_RANKS];
} told;

static int make_data(void **state)
{
    struct made_questions q = {
        .count = 30, .min_words = 5, .max_words = 90, .question_words = 4, .seed = 21};
    return run_set_up(state, &scratch, &q, NULL);
}

static int remove_data(void **state)
{
    run_release(&plain);
    run_release(&traced);
    return run_tear_down(state);
}

static void ask(void *context, struct trainer *t)
{
    (void)context;
    int rank = t->comm->rank;
    const struct program *p = &t->plan.programs[PROGRAM_STEP];
    told.count[rank] = 0;
    for (int i = 0; i < p->instr_count; i++)
        told.count[rank] += p->instrs[i].op != OP_CUT;
    if (trainer_trace(t, &told.request) != ST_OK)
        comm_abort(t->comm, status_message());
    told.begin_s[rank] = clock_s();
}

static void stop_clock(void *context, struct trainer *t)
{
    (void)context;
    told.wall_us[t->comm->rank] = (clock_s() - told.begin_s[t->comm->rank]) * 1e6;
}

static struct run_config tiny(int ranks, int stage, int64_t accum)
{
    struct run_config c;
    run_tiny(&c, &scratch, false);
    c.train.ranks = ranks;
    c.train.zero_stage = stage;
    c.train.grad_accum = accum;
    c.train.steps = 4;
    c.eval.every = -1;
    return c;
}

/* ---- reading the file ---- */

struct span {
    double begin, end;
};

static int by_begin(const void *a, const void *b)
{
    const struct span *x = a, *y = b;
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

enum { MAX_INSTRS = 1024 };

static double number(const json_t *object, const char *key)
{
    const json_t *v = json_object_get(object, key);
    assert_true(json_is_number(v));
    return json_number_value(v);
}

static const char *word(const json_t *object, const char *key)
{
    const json_t *v = json_object_get(object, key);
    assert_true(json_is_string(v));
    return json_string_value(v);
}

/* Check one rank's file; returns how many of its events are collectives. */
static int check_file(const char *path, int rank, int64_t step)
{
    static bool seen[MAX_INSTRS];
    static struct span compute[MAX_INSTRS];
    int count = 0, on_compute = 0, collectives = 0;
    double last = 0, busy = 0, sum = 0;
    json_error_t error;
    json_t *root = json_load_file(path, 0, &error);
    if (root == NULL)
        fail_msg("%s: %s", path, error.text);
    const json_t *events = json_object_get(root, "traceEvents"), *e = NULL;
    size_t i;
    memset(seen, 0, sizeof seen);
    json_array_foreach(events, i, e)
    {
        assert_int_equal((int)number(e, "pid"), rank);
        if (strcmp(word(e, "ph"), "M") == 0)
            continue;
        const json_t *args = json_object_get(e, "args");
        int instr = (int)number(args, "instr");
        double ts = number(e, "ts"), dur = number(e, "dur");
        assert_in_range(instr, 0, MAX_INSTRS - 1);
        assert_false(seen[instr]);
        seen[instr] = true;
        count++;
        assert_true(ts >= 0 && dur >= 0);
        double own = number(args, "busy");
        assert_true(own >= 0 && own <= dur + 0.002);
        sum += own;
        last = ts + dur > last ? ts + dur : last;
        if (number(e, "tid") == STREAM_COMPUTE)
            compute[on_compute++] = (struct span){ts, ts + dur};
        bool moves = number(args, "bytes") > 0;
        assert_int_equal(moves, strcmp(word(args, "op"), "GATHER") == 0 ||
                                    strcmp(word(args, "op"), "REDUCE") == 0);
        collectives += moves;
    }
    assert_int_equal(count, told.count[rank]);
    qsort(compute, (size_t)on_compute, sizeof *compute, by_begin);
    for (int k = 0; k < on_compute; k++) {
        busy += compute[k].end - compute[k].begin;
        if (k > 0)
            assert_true(compute[k].begin >= compute[k - 1].end - 0.002); /* three decimals */
    }
    assert_true(busy > 0);
    const json_t *other = json_object_get(root, "otherData");
    assert_int_equal((int64_t)number(other, "step"), step);
    assert_int_equal((int)number(other, "rank"), rank);
    assert_true(last <= number(other, "step_us") + 0.002);
    assert_true(sum <= number(other, "step_us") + 0.002 * count); /* one thread does it all */
    assert_true(last >= busy - 0.1);
    assert_true(number(other, "step_us") <= told.wall_us[rank]);
    json_decref(root);
    return collectives;
}

/* ---- tests ---- */

static void check_run(int stage, int64_t accum)
{
    struct run_config c = tiny(2, stage, accum);
    char path[512];
    told.request = (struct trace_request){scratch_path(&scratch, path, "line.json"), 3};
    run_ok(&plain, &c, NULL);
    run_ok(&traced, &c, &(struct run_how){.at_start = ask, .at_end = stop_clock});
    run_same(&plain, &traced, "with a trace");
    for (int rank = 0; rank < 2; rank++) {
        char name[64], file[512];
        snprintf(name, sizeof name, "line.rank%d.json", rank);
        assert_true(check_file(scratch_path(&scratch, file, name), rank, 3) > 0);
        assert_int_equal(remove(file), 0);
    }
    run_release(&plain);
    run_release(&traced);
}

static void every_instruction_is_there_once_and_results_are_the_same(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage++)
        for (int64_t accum = 1; accum <= 2; accum++)
            check_run(stage, accum);
}

static void one_rank_writes_the_file_itself_and_a_late_step_is_the_last(void **state)
{
    (void)state;
    struct run_config c = tiny(1, 0, 1);
    char path[512];
    told.request = (struct trace_request){scratch_path(&scratch, path, "alone.json"), 1000};
    run_ok(&traced, &c, &(struct run_how){.at_start = ask, .at_end = stop_clock});
    check_file(path, 0, 4);
    run_release(&traced);
}

/* Its folder is made, or the run ends before its first step. */
static void a_file_that_cannot_be_written_is_told_at_the_start(void **state)
{
    (void)state;
    struct run_config c = tiny(2, 1, 1);
    char path[512];
    told.request = (struct trace_request){scratch_path(&scratch, path, "new/one/line.json"), 2};
    run_ok(&traced, &c, &(struct run_how){.at_start = ask});
    run_release(&traced);
    assert_int_equal(access(scratch_at(&scratch, "new/one/line.rank1.json"), R_OK), 0);
    told.request = (struct trace_request){scratch_path(&scratch, path, "train.json/line.json"), 2};
    run_go(&traced, &c, &(struct run_how){.at_start = ask});
    assert_int_not_equal(traced.st, ST_OK);
    assert_int_equal(traced.steps, 0);
    assert_non_null(strstr(traced.message, "train.json: "));
    run_release(&traced);
}

static void without_steps(void *context, struct trainer *t)
{
    enum status *st = context;
    *st = ST_OK;
    t->total_steps = 0;
    *st = trainer_trace(t, &(struct trace_request){"x.json", 1});
    t->total_steps = 4;
}

static void a_run_without_steps_has_nothing_to_trace(void **state)
{
    (void)state;
    struct run_config c = tiny(1, 0, 1);
    static enum status got;
    struct run_data data = {0};
    assert_ok(run_data_load(&data, &c, true));
    assert_ok(run_local(
        &c, &data, &(struct run_options){.quiet = true, .at_start = without_steps, .context = &got},
        NULL));
    assert_int_equal(got, ST_INVALID);
    run_data_release(&data);
}

/* ---- marks ---- */

static bool found[4];

static void name_marks(void *context, struct trainer *t)
{
    (void)context;
    static const char *const expected[] = {"GATHER of block.1",
                                           "BACKWARD of block.2, micro-batch 1", "AGREE",
                                           "FORWARD of block.0, micro-batch 0 of an evaluation"};
    for (int k = 0; k < PROGRAM_KINDS; k++) {
        const struct program *p = &t->plan.programs[k];
        for (int i = 0; i < p->instr_count; i++) {
            char name[PROGRESS_NAME_BYTES];
            uint32_t mark = progress_mark(p, i);
            progress_name(&t->plan, &t->setup.model, mark, name);
            for (int e = 0; e < 4; e++)
                found[e] |= strcmp(name, expected[e]) == 0;
        }
    }
}

static void last_marks(void *context, struct trainer *t)
{
    (void)context;
    char name[128];
    const struct device *d = t->device;
    /* The last program was FLUSH, which has nothing to do: these are of the last step. */
    d->name_mark(d->name_context, device_progress(d, STREAM_COMPUTE), name, sizeof name);
    assert_string_equal(name, "AGREE");
    d->name_mark(d->name_context, device_progress(d, STREAM_REDUCE), name, sizeof name);
    assert_non_null(strstr(name, "REDUCE of "));
    d->name_mark(d->name_context, device_progress(d, STREAM_COPY), name, sizeof name);
    assert_string_equal(name, "nothing yet");
    d->name_mark(d->name_context, 0xFFFFFFFF, name, sizeof name);
    assert_string_equal(name, "an unknown mark");
}

static void marks_say_where_a_stream_stands(void **state)
{
    (void)state;
    struct run_config c = tiny(1, 3, 2);
    struct run_data data = {0};
    assert_ok(run_data_load(&data, &c, true));
    assert_ok(run_local(
        &c, &data,
        &(struct run_options){.quiet = true, .at_start = name_marks, .at_end = last_marks}, NULL));
    for (int e = 0; e < 4; e++)
        if (!found[e])
            fail_msg("name %d was not found", e);
    run_data_release(&data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_instruction_is_there_once_and_results_are_the_same),
        cmocka_unit_test(one_rank_writes_the_file_itself_and_a_late_step_is_the_last),
        cmocka_unit_test(a_file_that_cannot_be_written_is_told_at_the_start),
        cmocka_unit_test(a_run_without_steps_has_nothing_to_trace),
        cmocka_unit_test(marks_say_where_a_stream_stands),
    };
    return cmocka_run_group_tests(tests, make_data, remove_data);
}
