/*
 * Evaluation gives the same answers, loss, EM and F1 whoever computes which batch, changes nothing
 * in training, and ends it where it has to.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/arena.h"
#include "tests/support/run.h"

enum { QUESTIONS = 23, MAX_LINES = 64 };

static struct scratch scratch;
static struct run_trace trained, first, other; /* trained: answers many of its questions */

static struct run_config tiny(int ranks, int stage, int64_t steps)
{
    struct run_config c;
    run_tiny(&c, &scratch, true);
    c.train.ranks = ranks;
    c.train.zero_stage = stage;
    c.train.steps = steps;
    c.train.tables = stage > 0 ? TABLES_ROWS : TABLES_WHOLE; /* gathered to evaluate */
    c.data.version_2 = true;
    scratch_path(&scratch, c.data.eval, "train.json");
    return c;
}

static int make_data(void **state)
{
    struct made_questions q = {.count = QUESTIONS,
                               .min_words = 4,
                               .max_words = 80,
                               .question_words = 4,
                               .impossible_every = 4,
                               .seed = 31};
    run_set_up(state, &scratch, &q, NULL);
    struct run_config c = tiny(1, 0, 150);
    c.train.micro_batch = 8;
    c.optim.lr = 5e-3;
    c.model.hidden_dropout = c.model.attention_dropout = 0;
    c.data.eval[0] = '\0';
    run_ok(&trained, &c, NULL);
    return 0;
}

static int remove_data(void **state)
{
    run_release(&trained);
    return run_tear_down(state);
}

static int release_traces(void **state)
{
    (void)state;
    run_release(&first);
    run_release(&other);
    return 0;
}

static void start_trained(void *context, struct trainer *t)
{
    (void)context;
    run_put_weights(t, &trained);
}

static const struct run_how loud = {.loud = true, .at_start = start_trained};

/* ---- what an evaluation says ---- */

struct lines {
    struct file_text text;
    char *line[MAX_LINES]; /* without their times, which differ */
    int count;
};

static void read_lines(struct lines *l, const struct run_config *c, bool evaluations)
{
    char *next = NULL;
    memset(l, 0, sizeof *l);
    run_read(&l->text, c, "metrics.jsonl");
    for (char *line = strtok_r(l->text.data, "\n", &next); line != NULL;
         line = strtok_r(NULL, "\n", &next)) {
        char *ms = strstr(line, ",\"ms\":");
        assert_non_null(ms);
        *ms = '\0';
        if ((strstr(line, "\"evaluation\"") != NULL) != evaluations)
            continue;
        assert_in_range(l->count, 0, MAX_LINES - 1);
        l->line[l->count++] = line;
    }
}

static void forget_lines(struct lines *l)
{
    mem_free(&l->text.data);
}

static double field(const char *line, const char *key)
{
    char quoted[64];
    snprintf(quoted, sizeof quoted, "\"%s\":", key);
    const char *at = strstr(line, quoted);
    if (at == NULL)
        fail_msg("no %s in %s", key, line);
    return strtod(at + strlen(quoted), NULL);
}

/* ---- any world size ---- */

static const char *const outputs[] = {"predictions.json", "nbest.json", "null_odds.json"};

static void b104_b105_b107_answers_are_the_same_on_1_to_8_ranks(void **state)
{
    (void)state;
    static const int worlds[] = {1, 2, 3, 8};
    struct file_text want[3] = {{NULL, 0}}, got = {NULL, 0};
    struct lines want_lines, got_lines;
    for (int w = 0; w < 4; w++)
        for (int stage = 0; stage < 4; stage += w == 0 ? 4 : 3) {
            struct run_config c = tiny(worlds[w], stage, 0);
            run_ok(&other, &c, &loud);
            if (w == 0) {
                for (int i = 0; i < 3; i++)
                    run_read(&want[i], &c, outputs[i]);
                read_lines(&want_lines, &c, true);
                assert_int_equal(want_lines.count, 1);
                run_release(&other);
                continue;
            }
            for (int i = 0; i < 3; i++) {
                run_read(&got, &c, outputs[i]);
                assert_int_equal(got.bytes, want[i].bytes);
                assert_memory_equal(got.data, want[i].data, got.bytes);
                mem_free(&got.data);
            }
            read_lines(&got_lines, &c, true);
            assert_int_equal(got_lines.count, 1);
            assert_string_equal(got_lines.line[0], want_lines.line[0]);
            forget_lines(&got_lines);
            run_release(&other);
        }
    assert_true(field(want_lines.line[0], "f1") > 40); /* else nothing was compared */
    assert_true(field(want_lines.line[0], "exact_match") > 30);
    assert_int_equal((int)field(want_lines.line[0], "total"), QUESTIONS);
    assert_true(field(want_lines.line[0], "windows") > QUESTIONS);
    forget_lines(&want_lines);
    for (int i = 0; i < 3; i++)
        mem_free(&want[i].data);
}

static void b107_every_question_has_an_answer(void **state)
{
    (void)state;
    struct run_config c = tiny(3, 3, 0);
    struct file_text text = {NULL, 0};
    run_ok(&first, &c, &loud);
    for (int i = 0; i < 3; i++) {
        run_read(&text, &c, outputs[i]);
        for (int q = 0; q < QUESTIONS; q++) {
            char key[16];
            snprintf(key, sizeof key, "\"q%d\":", q);
            assert_non_null(strstr(text.data, key));
        }
        mem_free(&text.data);
    }
}

static void b83_one_question_on_eight_ranks(void **state)
{
    (void)state;
    struct lines one, eight;
    for (int stage = 0; stage < 4; stage++) {
        struct run_config c = tiny(1, stage, 0);
        c.data.max_eval_samples = 1;
        run_ok(&first, &c, &loud);
        read_lines(&one, &c, true);
        c.train.ranks = 8;
        run_ok(&other, &c, &loud);
        read_lines(&eight, &c, true);
        assert_int_equal(one.count, 1);
        assert_int_equal(eight.count, 1);
        assert_int_equal((int)field(one.line[0], "total"), 1);
        assert_string_equal(one.line[0], eight.line[0]);
        forget_lines(&one);
        forget_lines(&eight);
        run_release(&first);
        run_release(&other);
    }
}

static void b108_questions_with_and_without_answer_are_told_apart(void **state)
{
    (void)state;
    struct lines l;
    struct run_config c = tiny(2, 1, 0);
    run_ok(&first, &c, &loud);
    read_lines(&l, &c, true);
    double has = field(l.line[0], "HasAns_total"), no = field(l.line[0], "NoAns_total");
    assert_int_equal((int)(has + no), QUESTIONS);
    assert_int_equal((int)no, 6); /* 1, 5, 9, ... 21 */
    double exact =
        (has * field(l.line[0], "HasAns_exact") + no * field(l.line[0], "NoAns_exact")) / QUESTIONS;
    assert_true(exact - field(l.line[0], "exact_match") < 1e-9);
    assert_true(field(l.line[0], "exact_match") - exact < 1e-9);
    assert_true(field(l.line[0], "best_f1") >= field(l.line[0], "f1") - 1e-9);
    assert_true(field(l.line[0], "best_exact") >= field(l.line[0], "exact_match") - 1e-9);
    (void)field(l.line[0], "best_exact_thresh");
    forget_lines(&l);
}

static void questions_trained_on_are_evaluated_apart(void **state)
{
    (void)state;
    struct lines l;
    struct run_config c = tiny(2, 2, 2);
    c.eval.train_samples = 5;
    c.data.max_eval_samples = 3;
    c.eval.before = true;
    run_ok(&first, &c, &loud);
    read_lines(&l, &c, true);
    assert_int_equal(l.count, 4);
    for (int i = 0; i < 4; i++) {
        assert_non_null(
            strstr(l.line[i], i % 2 == 0 ? "\"evaluation\":\"train\"" : "\"evaluation\":\"eval\""));
        assert_int_equal((int)field(l.line[i], "total"), i % 2 == 0 ? 5 : 3);
        assert_int_equal((int)field(l.line[i], "step"), i < 2 ? 0 : 2);
    }
    forget_lines(&l);
}

static void more_train_samples_than_questions_are_all_of_them(void **state)
{
    (void)state;
    struct lines l;
    struct run_config c = tiny(2, 3, 1);
    c.eval.train_samples = 1000;
    c.data.eval[0] = '\0';
    run_ok(&first, &c, &loud);
    read_lines(&l, &c, true);
    assert_int_equal(l.count, 1);
    assert_int_equal((int)field(l.line[0], "total"), QUESTIONS);
    forget_lines(&l);
}

/* ---- training goes on as if nothing had been ---- */

static void evaluating_changes_no_bit_of_training(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage++) {
        struct run_config c = tiny(2, stage, 5);
        c.train.grad_accum = 2;
        c.train.prefetch = 2;
        run_ok(&first, &c, NULL);
        c.eval.every = 1;
        c.eval.before = true;
        c.eval.train_samples = 4;
        run_ok(&other, &c, NULL);
        run_same(&first, &other, "evaluation after each step and none");
        run_release(&other);
        c.data.eval[0] = '\0';
        c.eval.train_samples = 0;
        run_ok(&other, &c, NULL);
        run_same(&first, &other, "without evaluation data");
        run_release(&first);
        run_release(&other);
    }
}

static void evaluations_come_when_they_are_due(void **state)
{
    (void)state;
    static const int64_t every[] = {2, 0, -1};
    struct lines l;
    struct run_config c = tiny(2, 1, -1);
    c.train.epochs = 2;
    run_ok(&first, &c, NULL);
    int steps = first.steps, epoch = steps / 2;
    for (int i = 0; i < 3; i++) {
        c.eval.every = every[i];
        run_ok(&other, &c, &loud);
        read_lines(&l, &c, true);
        int want = i == 0 ? (steps + 1) / 2 : i == 1 ? 2 : 1;
        assert_int_equal(l.count, want);
        assert_int_equal((int)field(l.line[0], "step"), i == 0 ? 2 : i == 1 ? epoch : steps);
        assert_int_equal((int)field(l.line[want - 1], "step"), steps);
        forget_lines(&l);
        run_release(&other);
    }
}

/* ---- files ---- */

/* Begun before the last evaluation, or behind all steps where there is none. */
static void a_model_saved_beside_an_evaluation_is_that_of_the_end(void **state)
{
    (void)state;
    struct file_text beside = {NULL, 0}, alone = {NULL, 0};
    for (int stage = 0; stage < 4; stage += 3) {
        struct run_config c = tiny(3, stage, 5);
        run_ok(&first, &c, &loud);
        run_read(&beside, &c, "model/model.safetensors");
        c.data.eval[0] = '\0';
        run_ok(&other, &c, &loud);
        run_read(&alone, &c, "model/model.safetensors");
        assert_int_equal(beside.bytes, alone.bytes);
        assert_memory_equal(beside.data, alone.data, alone.bytes);
        mem_free(&beside.data);
        mem_free(&alone.data);
        run_release(&first);
        run_release(&other);
    }
}

/* The thread that writes them has no one to tell; the end of the run does. */
static void answers_that_cannot_be_written_end_the_run(void **state)
{
    (void)state;
    struct run_config c = tiny(2, 0, 0);
    char folder[512];
    snprintf(c.output.dir, sizeof c.output.dir, "%s", scratch_path(&scratch, folder, "in-the-way"));
    assert_ok(file_make_dirs(scratch_at(&scratch, "in-the-way/nbest.json")));
    run_go(&first, &c, &loud);
    assert_int_equal(first.st, ST_IO);
    assert_non_null(strstr(first.message, "nbest.json: is a folder"));
}

/* ---- early stopping ---- */

static void early_stopping_ends_all_ranks_at_the_same_step(void **state)
{
    (void)state;
    static const enum stop_metric metrics[] = {STOP_LOSS, STOP_F1, STOP_EXACT_MATCH};
    for (int i = 0; i < 3; i++)
        for (int quiet = 0; quiet < 2; quiet++) {
            struct run_config c = tiny(3, i + 1, 60);
            struct file_text summary = {NULL, 0};
            c.optim.lr = 0; /* never any better */
            c.eval.every = 2;
            c.eval.stop_metric = metrics[i];
            c.eval.stop_patience = 2;
            run_ok(&first, &c, quiet ? NULL : &loud);
            for (int r = 0; r < 3; r++)
                assert_int_equal(first.seen[r], first.steps);
            /* The third evaluation asks for it; the host is a step ahead of the reports. */
            assert_in_range(first.steps, 6, 8);
            if (!quiet) {
                run_read(&summary, &c, "summary.json");
                assert_non_null(strstr(summary.data, "\"ended\":\"early stop\""));
                mem_free(&summary.data);
            }
            run_release(&first);
        }
}

static void training_that_improves_is_not_stopped(void **state)
{
    (void)state;
    struct run_config c = tiny(2, 3, 24);
    c.optim.lr = 2e-3;
    c.model.hidden_dropout = c.model.attention_dropout = 0;
    c.eval.every = 8;
    c.eval.stop_metric = STOP_LOSS;
    c.eval.stop_patience = 1;
    run_ok(&first, &c, NULL);
    assert_int_equal(first.steps, 24);
}

/* ---- signals ---- */

static int signal_number;

static void raise_in_evaluation(void *context, const struct program *p, int index,
                                const size_t live[CATEGORY_COUNT])
{
    const struct trainer *t = context;
    (void)live;
    if (p->kind == PROGRAM_EVALUATE && index == 1 && t->comm->rank == 0)
        __atomic_store_n(&signal_number, 2, __ATOMIC_RELAXED);
}

static void a_signal_ends_an_evaluation_on_all_ranks(void **state)
{
    (void)state;
    struct run_config c = tiny(2, 3, 0);
    struct file_text summary = {NULL, 0};
    c.eval.micro_batch = 1;
    __atomic_store_n(&signal_number, 0, __ATOMIC_RELAXED);
    run_go(&first, &c,
           &(struct run_how){.loud = true,
                             .signal_flag = &signal_number,
                             .executor = {.on_instr = raise_in_evaluation}});
    assert_int_equal(first.st, ST_INTERRUPTED);
    assert_non_null(strstr(first.message, "signal 2"));
    run_read(&summary, &c, "summary.json");
    assert_non_null(strstr(summary.data, "\"ended\":\"signal\""));
    mem_free(&summary.data);
}

#define TEST(name) cmocka_unit_test_teardown(name, release_traces)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(b104_b105_b107_answers_are_the_same_on_1_to_8_ranks),
        TEST(b107_every_question_has_an_answer),
        TEST(b83_one_question_on_eight_ranks),
        TEST(b108_questions_with_and_without_answer_are_told_apart),
        TEST(questions_trained_on_are_evaluated_apart),
        TEST(more_train_samples_than_questions_are_all_of_them),
        TEST(evaluating_changes_no_bit_of_training),
        TEST(evaluations_come_when_they_are_due),
        TEST(a_model_saved_beside_an_evaluation_is_that_of_the_end),
        TEST(answers_that_cannot_be_written_end_the_run),
        TEST(early_stopping_ends_all_ranks_at_the_same_step),
        TEST(training_that_improves_is_not_stopped),
        TEST(a_signal_ends_an_evaluation_on_all_ranks),
    };
    return cmocka_run_group_tests(tests, make_data, remove_data);
}
