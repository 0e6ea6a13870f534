/*
 * The program as people use it: started as a process (TESSERA in the environment, or ./tessera),
 * its exit codes, what it prints and what it leaves in the output folder.
 */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/base/arena.h"
#include "engine/base/clock.h"
#include "tests/support/process.h"
#include "tests/support/ranks.h"
#include "tests/support/run.h"

static struct scratch scratch;

static const char *path_of(const char *name)
{
    return scratch_at(&scratch, name);
}

/* ---- starting it ---- */

static struct process ran;

/* @file_limit: bytes that a file may have, 0: any; @out: where standard output goes, NULL: kept. */
static void start(const char *const *args, long file_limit, const char *out)
{
    process_start(&ran, &scratch, args, file_limit, out);
}

static void wait_for_end(void)
{
    process_wait(&ran, &scratch);
}

#define RUN(...) process_run(&ran, &scratch, (const char *const[]){__VA_ARGS__, NULL})

static void expect(int code, const char *out, const char *err)
{
    process_expect(&ran, code, out, err);
}

/* ---- files ---- */

static const char *put_text(const char *name, const char *text)
{
    char path[512];
    scratch_put(&scratch, path, name, text, strlen(text));
    return path_of(name);
}

/* The output folder as after nothing. */
static void clear_output(void)
{
    struct scratch out;
    snprintf(out.dir, sizeof out.dir, "%.240s/out", scratch.dir);
    scratch_remove(&out);
}

static struct run_config tiny(int ranks, int stage, int64_t steps)
{
    struct tiny_run with = {ranks, stage, .steps = steps, .eval = true};
    clear_output();
    return run_tiny_with(&scratch, with);
}

static int make_data(void **state)
{
    struct made_questions train = {20, 5, 70, 4, .seed = 51}, eval = train;
    eval.count = 6;
    run_set_up(state, &scratch, &train, &eval);
    eval.impossible_every = 3;
    run_make_data(&scratch, "eval2.json", eval);
    return 0;
}

static bool is_there(const char *name)
{
    char path[512];
    return access(scratch_path(&scratch, path, name), F_OK) == 0;
}

static void read_output(struct file_text *text, const char *name)
{
    char path[512];
    assert_ok(file_read(text, scratch_path(&scratch, path, name)));
}

static double number_in(const char *text, const char *key)
{
    char quoted[64];
    snprintf(quoted, sizeof quoted, "\"%s\":", key);
    const char *at = strstr(text, quoted);
    if (at == NULL)
        fail_msg("no \"%s\" in %.500s", key, text);
    return strtod(at + strlen(quoted), NULL);
}

/* ---- the outside ---- */

static void without_arguments_it_says_what_there_is(void **state)
{
    (void)state;
    static const char *const none[] = {NULL};
    process_run(&ran, &scratch, none);
    expect(2, "Usage: tessera COMMAND", "no command");
    RUN("--help");
    expect(0, "--version", NULL);
    RUN("--version");
    expect(0, "tessera ", NULL);
    assert_non_null(strstr(ran.out, "cpu:"));
}

static void every_command_has_help(void **state)
{
    (void)state;
    static const char *const commands[] = {"train",      "eval",    "predict",  "score",
                                           "checkpoint", "plan",    "features", "tokenize",
                                           "config",     "compare", "report"};
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        char usage[64];
        RUN(commands[i], "--help");
        snprintf(usage, sizeof usage, "tessera %s", commands[i]);
        expect(0, usage, NULL);
        assert_string_equal(ran.err, "");
        RUN(commands[i], "--no-such-option");
        expect(2, NULL, "--no-such-option");
    }
}

static void unknown_commands_are_refused(void **state)
{
    (void)state;
    RUN("trian");
    expect(2, NULL, "trian");
}

static void bad_values_name_the_option_and_what_is_accepted(void **state)
{
    (void)state;
    struct run_config c = tiny(1, 0, 1);
    const char *config = run_put_config(&scratch, &c);
    RUN("train", "--config", config, "--zero-stage", "4");
    expect(2, NULL, "--zero-stage");
    assert_non_null(strstr(ran.err, "from 0 to 3"));
    assert_non_null(strstr(ran.err, "\"4\""));
    RUN("train", "--config", config, "--ranks", "0");
    expect(2, NULL, "--ranks");
    RUN("train", "--config", config, "--steps", "-2");
    expect(2, NULL, "--steps");
    RUN("train", "--config", config, "--set", "optim.lr=fast");
    expect(2, NULL, "optim.lr");
    RUN("train", "--config", config, "--set", "train.zero_staeg=1");
    expect(2, NULL, "train.zero_staeg");
    RUN("train", "--config", config, "--comm", "pigeon");
    expect(2, NULL, "--comm");
    assert_non_null(strstr(ran.err, "local"));
    RUN("train", "--config", config, "--steps");
    expect(2, NULL, "--steps");
    RUN("plan", "--config", config, "--ranks", "many");
    expect(2, NULL, "--ranks");
    assert_false(is_there("out"));
}

static void bad_configurations_name_file_and_line(void **state)
{
    (void)state;
    RUN("train");
    expect(2, NULL, "--config");
    RUN("train", "--config", path_of("nowhere.yaml"));
    expect(1, NULL, "nowhere.yaml");
    RUN("train", "--config", put_text("bad.yaml", "train:\n  epochs: 1\n  layers: 3\n"));
    expect(2, NULL, "bad.yaml:3:");
    assert_non_null(strstr(ran.err, "train.layers"));
    RUN("train", "--config", put_text("bad.yaml", "train:\n  zero_stage: 4\n"));
    expect(2, NULL, "bad.yaml:2:");
    assert_non_null(strstr(ran.err, "train.zero_stage"));
}

/* ---- bad data ---- */

static void train_on(const struct run_config *c, const char *train, int code, const char *message)
{
    struct run_config changed = *c;
    snprintf(changed.data.train, sizeof changed.data.train, "%s", train);
    RUN("train", "--config", run_put_config(&scratch, &changed));
    expect(code, NULL, message);
    assert_false(is_there("out/summary.json"));
}

static void bad_data_is_told_with_its_place(void **state)
{
    (void)state;
    struct run_config c = tiny(2, 1, 1);
    train_on(&c, path_of("missing.json"), 1, "missing.json");
    train_on(&c, put_text("bad.json", "{\"data\": [\n  {\"title\": \"x\",,}]}"), 1, "bad.json:2:");
    train_on(&c, put_text("bad.json", "{\"data\": [{\"paragraphs\": [{\"context\": \"w1"), 1,
             "bad.json:1:");
    train_on(&c, put_text("bad.json", "{\"version\":\"1.1\",\"data\":[]}"), 1, "bad.json");
    train_on(&c, put_text("bad.json", "{\"data\":[{\"title\":\"x\",\"paragraph\":[]}]}"), 1,
             "data[0]");
    train_on(&c,
             put_text("bad.json", "{\"data\":[{\"title\":\"x\",\"paragraphs\":[{\"context\":"
                                  "\"w1 w2 w3\",\"qas\":[{\"id\":\"q7\",\"question\":\"w1\","
                                  "\"answers\":[{\"text\":\"w3\",\"answer_start\":3}]}]}]}]}"),
             1, "q7");
    train_on(&c, put_text("bad.json", ""), 1, "bad.json");
}

static void a_vocabulary_of_another_size_is_refused(void **state)
{
    (void)state;
    struct run_config c = tiny(2, 1, 1);
    c.model.vocab_size = RUN_VOCAB + 1;
    RUN("train", "--config", run_put_config(&scratch, &c));
    expect(2, NULL, "vocab.txt: 101 tokens, but model.vocab_size is 102");
}

static void lengths_that_do_not_fit_are_refused(void **state)
{
    (void)state;
    struct run_config c = tiny(2, 1, 1);
    c.data.max_length = 68;
    RUN("train", "--config", run_put_config(&scratch, &c));
    expect(2, NULL, "data.max_length 68 is above model.max_positions 67");
    c.data.max_length = 64;
    c.data.doc_stride = 60; /* 64 - 3 - 4 words of question leave 57 */
    RUN("train", "--config", run_put_config(&scratch, &c));
    expect(2, NULL, "stride");
    c.data.doc_stride = 2;
    c.data.max_length = 7; /* no room for context beside the question */
    RUN("train", "--config", run_put_config(&scratch, &c));
    expect(2, NULL, "q0");
}

/* ---- what a run leaves ---- */

static int count_lines(const char *text, const char *with)
{
    int count = 0;
    for (const char *line = text; *line != '\0'; line = strchr(line, '\n') + 1) {
        const char *end = strchr(line, '\n'), *at = strstr(line, with);
        assert_non_null(end);
        assert_int_equal(*line, '{');
        assert_int_equal(end[-1], '}');
        count += at != NULL && at < end;
    }
    return count;
}

/* The parts of the start add up, and training is behind them. */
static void check_start(const char *summary)
{
    static const char *const parts[] = {"load", "config", "features", "ranks",
                                        "plan", "memory", "weights",  "log"};
    const char *start = strstr(summary, "\"start_s\":{");
    double sum = 0, all;
    assert_non_null(start);
    all = number_in(start, "all");
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        assert_true(number_in(start, parts[i]) >= 0);
        sum += number_in(start, parts[i]);
    }
    assert_true(all > 0 && fabs(all - sum) < 1e-3);
}

static void b110_b111_one_metrics_file_holds_every_step(void **state)
{
    (void)state;
    static const char *const keys[] = {"step",      "epoch",  "loss", "lr",     "grad_norm",
                                       "sequences", "tokens", "ms",   "skipped"};
    struct file_text text = {NULL, 0};
    struct scratch out;
    struct run_config c = tiny(3, 3, 4);
    c.eval.every = 2;
    RUN("train", "--config", run_put_config(&scratch, &c));
    expect(0, "mean loss", "rank 0 of 3");
    assert_non_null(strstr(ran.out, "zero_stage: 3"));
    snprintf(out.dir, sizeof out.dir, "%.240s/out", scratch.dir);
    assert_true(is_there("out/metrics.jsonl") && is_there("out/summary.json"));
    assert_true(is_there("out/config.yaml") && is_there("out/predictions.json"));
    assert_true(is_there("out/nbest.json"));
    assert_in_range(scratch_count(&out), 8, 10); /* null odds and weights may be there, too */
    read_output(&text, "out/metrics.jsonl");
    assert_int_equal(count_lines(text.data, "\"grad_norm\":"), 4);
    assert_int_equal(count_lines(text.data, "\"evaluation\":\"eval\""), 2);
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        char quoted[32];
        snprintf(quoted, sizeof quoted, "\"%s\":", keys[i]);
        assert_true(count_lines(text.data, quoted) >= 4);
    }
    /* Global values: nine sequences a step are those of three ranks. */
    assert_int_equal((int)number_in(text.data, "sequences"), 9);
    mem_free(&text.data);
    read_output(&text, "out/summary.json");
    assert_non_null(strstr(text.data, "\"ended\":\"complete\""));
    assert_int_equal((int)number_in(text.data, "steps"), 4);
    assert_int_equal((int)number_in(text.data, "world_size"), 3);
    assert_true(number_in(text.data, "wall_s") > 0);
    assert_true(number_in(text.data, "arena") > 0);
    check_start(text.data);
    mem_free(&text.data);
    /* The resolved configuration runs again. */
    RUN("train", "--config", path_of("out/config.yaml"), "--output-dir", path_of("again"));
    expect(0, NULL, "again");
    assert_true(is_there("again/metrics.jsonl"));
}

/* No unit's parameters are a multiple of three, and still each rank keeps a third of the state that
 * the stage divides: nothing falls back to another stage. What counts is said at the start. */
static void b29_b114_the_stage_that_is_asked_for_is_on_and_is_printed(void **state)
{
    (void)state;
    static const struct {
        const char *key;
        int from_stage;
    } divided[] = {{"adam_m", 1}, {"adam_v", 1}, {"gradients", 2}, {"parameters", 3}};
    double whole[4] = {0};
    for (int stage = 0; stage < 4; stage++) {
        struct file_text text = {NULL, 0};
        char expected[64];
        struct run_config c = tiny(3, stage, 1);
        c.data.eval[0] = '\0';
        c.train.timeout_s = 123;
        c.train.grad_accum = 2; /* stage 1 keeps whole gradients then */
        RUN("train", "--config", run_put_config(&scratch, &c));
        snprintf(expected, sizeof expected, "zero stage %d", stage);
        expect(0, NULL, expected);
        assert_non_null(strstr(ran.err, "silent for 123 s ends the run"));
        read_output(&text, "out/summary.json");
        for (int i = 0; i < 4; i++) {
            double bytes = number_in(text.data, divided[i].key);
            if (stage < divided[i].from_stage)
                whole[i] = bytes;
            else if (bytes < whole[i] * 0.3 || bytes > whole[i] * 0.6)
                fail_msg("stage %d: %s %.0f bytes, %.0f when whole", stage, divided[i].key, bytes,
                         whole[i]);
        }
        mem_free(&text.data);
    }
}

static void the_stage_changes_no_digit_of_the_metrics(void **state)
{
    (void)state;
    double loss[4][3], norm[4][3];
    for (int stage = 0; stage < 4; stage++) {
        struct file_text text = {NULL, 0};
        char stage_text[2] = {(char)('0' + stage), '\0'};
        struct run_config c = tiny(1, 0, 3);
        c.train.reduce = REDUCE_PER_MICRO_BATCH;
        c.data.eval[0] = '\0';
        RUN("train", "--config", run_put_config(&scratch, &c), "--zero-stage", stage_text,
            "--ranks", "2");
        expect(0, NULL, NULL);
        read_output(&text, "out/metrics.jsonl");
        const char *line = text.data;
        for (int i = 0; i < 3; i++, line = strchr(line, '\n') + 1) {
            loss[stage][i] = number_in(line, "loss");
            norm[stage][i] = number_in(line, "grad_norm");
            assert_true(loss[stage][i] == loss[0][i] && norm[stage][i] == norm[0][i]);
        }
        mem_free(&text.data);
    }
    assert_true(loss[0][0] != loss[0][1]);
}

static void steps_0_evaluates_only(void **state)
{
    (void)state;
    struct file_text text = {NULL, 0};
    struct run_config c = tiny(2, 3, 5);
    c.data.train[0] = '\0'; /* not needed */
    c.data.version_2 = true;
    snprintf(c.data.eval, sizeof c.data.eval, "%s", path_of("eval2.json"));
    RUN("train", "--config", run_put_config(&scratch, &c), "--steps", "0");
    expect(0, NULL, "eval questions at step 0");
    read_output(&text, "out/metrics.jsonl");
    assert_int_equal(count_lines(text.data, "\"evaluation\""), 1);
    assert_int_equal(count_lines(text.data, "\"NoAns_total\":2"), 1);
    assert_int_equal(count_lines(text.data, "\"grad_norm\""), 0);
    mem_free(&text.data);
    assert_true(is_there("out/null_odds.json"));
}

/* How long a run is: the option that is given, over the file; of both, --steps. */
static void epochs_count_where_no_steps_are_given(void **state)
{
    (void)state;
    struct run_config c = tiny(1, 0, 5);
    c.data.eval[0] = '\0';
    RUN("train", "--config", run_put_config(&scratch, &c), "--steps", "2", "--epochs", "40");
    expect(0, "steps: 2\n", NULL);
    RUN("train", "--config", run_put_config(&scratch, &c), "--epochs", "1");
    expect(0, "steps: -1\n", NULL);
}

static void score_agrees_with_the_evaluation(void **state)
{
    (void)state;
    struct file_text text = {NULL, 0};
    struct run_config c = tiny(2, 2, 30);
    c.train.epochs = 1;
    c.optim.lr = 5e-3;
    RUN("train", "--config", run_put_config(&scratch, &c));
    expect(0, NULL, NULL);
    RUN("score", "--data", path_of("eval.json"), "--predictions", path_of("out/predictions.json"));
    expect(0, "exact_match", NULL);
    read_output(&text, "out/summary.json");
    const char *evaluation = strstr(text.data, "\"evaluation\"");
    assert_non_null(evaluation);
    const char *at = strstr(ran.out, "exact_match");
    assert_true(strtod(strchr(at, ':') + 1, NULL) == number_in(evaluation, "exact_match"));
    at = strstr(ran.out, "\"f1\"");
    assert_non_null(at);
    assert_true(strtod(strchr(at, ':') + 1, NULL) == number_in(evaluation, "f1"));
    mem_free(&text.data);
}

/* ---- the plan ---- */

/* The sum of the numbers in the object that begins at or behind @at. */
static double object_sum(const char *at)
{
    double sum = 0;
    for (at = strchr(at, '{'); *at != '}'; at++)
        if (*at == ':')
            sum += strtod(at + 1, NULL);
    return sum;
}

static void the_plan_adds_up(void **state)
{
    (void)state;
    struct run_config c = tiny(2, 0, 1);
    RUN("plan", "--config", run_put_config(&scratch, &c), "--ranks", "4", "--json");
    expect(0, "\"stages\":[", NULL);
    double last = 0;
    const char *at = ran.out;
    for (int stage = 0; stage < 4; stage++) {
        at = strstr(at, "\"zero_stage\":");
        assert_non_null(at);
        assert_int_equal((int)number_in(at, "zero_stage"), stage);
        double total = number_in(at, "total");
        assert_true(object_sum(strstr(at, "\"bytes\":")) == total);
        assert_true(number_in(at, "live_peak") <= total);
        assert_true(stage == 0 || total < 1.03 * last);
        last = total;
        at++;
    }
    RUN("plan", "--config", path_of("run.yaml"), "--ranks", "4", "--show-program");
    expect(0, "BACKWARD", NULL);
    assert_non_null(strstr(ran.out, "evaluate:"));
}

static void b63_the_plan_says_why_a_higher_stage_needs_more(void **state)
{
    (void)state;
    struct run_config c = tiny(2, 0, 1);
    const char *path = run_put_config(&scratch, &c);
    RUN("plan", "--config", path, "--ranks", "1");
    expect(0, "A higher stage needs more here: what it gathers", NULL);
    RUN("plan", "--ranks", "1");
    expect(0, "which is little on one rank, where nothing is.", NULL);
    RUN("plan", "--ranks", "8");
    expect(0, "of stage 0", NULL);
    assert_null(strstr(ran.out, "needs more here"));
}

static void the_plan_with_data_is_the_arena_of_the_run(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage++) {
        struct file_text text = {NULL, 0};
        struct run_config c = tiny(2, stage, 2);
        c.eval.train_samples = stage % 2 == 0 ? 9 : 0;
        c.eval.micro_batch = 8; /* the evaluation has the larger batches */
        if (stage == 3)
            c.data.eval[0] = '\0';
        RUN("train", "--config", run_put_config(&scratch, &c));
        expect(0, NULL, NULL);
        read_output(&text, "out/summary.json");
        RUN("plan", "--config", path_of("run.yaml"), "--json", "--data");
        expect(0, "\"stages\":[", NULL);
        const char *at = ran.out;
        for (int i = 0; i <= stage; i++)
            at = strstr(at + 1, "\"zero_stage\":");
        assert_int_equal((int)number_in(at, "total"), (int)number_in(text.data, "arena"));
        mem_free(&text.data);
        /* What it predicts a step for is what the steps had. */
        double tokens = 0;
        read_output(&text, "out/metrics.jsonl");
        for (at = text.data; (at = strstr(at, "\"tokens\":")) != NULL; at++)
            tokens += number_in(at, "tokens");
        at = strstr(ran.out, "\"mean_micro_batch\":");
        assert_non_null(at);
        double micros = number_in(ran.out, "steps") * 2 * (double)c.train.grad_accum;
        assert_true(fabs(number_in(at, "tokens") * micros - tokens) < 0.01 * micros);
        assert_true(number_in(at, "tokens_of_fullest_rank") >= number_in(at, "tokens"));
        mem_free(&text.data);
    }
}

/* ---- disks and signals ---- */

static void a_full_disk_ends_the_run_with_whole_lines(void **state)
{
    (void)state;
    struct file_text text = {NULL, 0};
    struct run_config c = tiny(2, 2, 500);
    c.data.eval[0] = '\0';
    c.output.log_every = 1000;
    c.output.tensorboard = false; /* metrics.jsonl is what grows fastest then */
    start((const char *const[]){"train", "--config", run_put_config(&scratch, &c), NULL}, 8000,
          NULL);
    wait_for_end();
    expect(1, NULL, "metrics.jsonl");
    read_output(&text, "out/metrics.jsonl");
    int lines = count_lines(text.data, "\"loss\":");
    assert_in_range(lines, 20, 80);
    assert_int_equal(count_lines(text.data, "\"step\":"), lines);
    mem_free(&text.data);
    assert_false(is_there("out/summary.json"));
}

static void output_that_does_not_arrive_is_an_error(void **state)
{
    (void)state;
    struct run_config c = tiny(2, 2, 1);
    start((const char *const[]){"plan", "--config", run_put_config(&scratch, &c), "--json", NULL},
          0, "/dev/full");
    wait_for_end();
    expect(1, NULL, "output");
    start((const char *const[]){"train", "--config", path_of("run.yaml"), NULL}, 0, "/dev/full");
    wait_for_end();
    expect(1, NULL, "output");
}

static void an_output_folder_below_a_file_is_an_error(void **state)
{
    (void)state;
    struct run_config c = tiny(2, 2, 1);
    RUN("train", "--config", run_put_config(&scratch, &c), "--output-dir",
        path_of("vocab.txt/out"));
    expect(1, NULL, "vocab.txt");
}

/* Start a long run and wait for its first step. */
static void start_long(const struct run_config *c)
{
    int64_t begun = clock_ms();
    char path[512];
    scratch_path(&scratch, path, "out/metrics.jsonl");
    start((const char *const[]){"train", "--config", run_put_config(&scratch, c), NULL}, 0, NULL);
    for (;;) {
        struct file_text text = {NULL, 0};
        bool begins = access(path, F_OK) == 0 && file_read(&text, path) == ST_OK && text.bytes > 0;
        mem_free(&text.data);
        if (begins)
            return;
        if (clock_ms() - begun > PROCESS_DEADLINE_MS || waitpid(ran.pid, NULL, WNOHANG) != 0)
            fail_msg("no step came");
        sleep_ms(3);
    }
}

static void a_signal_finishes_the_step_and_writes_what_there_is(void **state)
{
    (void)state;
    static const int signals[] = {SIGINT, SIGTERM};
    for (int i = 0; i < 2; i++) {
        struct file_text text = {NULL, 0};
        struct run_config c = tiny(2, 3, 50000);
        start_long(&c);
        kill(ran.pid, signals[i]);
        wait_for_end();
        expect(128 + signals[i], "mean loss", "signal");
        read_output(&text, "out/metrics.jsonl");
        int steps = count_lines(text.data, "\"grad_norm\":");
        mem_free(&text.data);
        read_output(&text, "out/summary.json");
        assert_non_null(strstr(text.data, "\"ended\":\"signal\""));
        assert_int_equal((int)number_in(text.data, "steps"), steps);
        mem_free(&text.data);
    }
}

/* Long steps; two signals that do not merge. */
static void a_second_signal_ends_it_at_once(void **state)
{
    (void)state;
    struct run_config c = tiny(1, 0, 1000);
    c.model.hidden = 384;
    c.model.ffn = 1536;
    c.model.layers = 6;
    c.train.micro_batch = 20;
    start_long(&c);
    kill(ran.pid, SIGINT);
    sleep_ms(2);
    kill(ran.pid, SIGTERM);
    int64_t begun = clock_ms();
    wait_for_end();
    assert_true(ran.code == 128 + SIGINT || ran.code == 128 + SIGTERM);
    assert_true(clock_ms() - begun < 5000);
    assert_false(is_there("out/summary.json"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_arguments_it_says_what_there_is),
        cmocka_unit_test(every_command_has_help),
        cmocka_unit_test(unknown_commands_are_refused),
        cmocka_unit_test(bad_values_name_the_option_and_what_is_accepted),
        cmocka_unit_test(bad_configurations_name_file_and_line),
        cmocka_unit_test(bad_data_is_told_with_its_place),
        cmocka_unit_test(a_vocabulary_of_another_size_is_refused),
        cmocka_unit_test(lengths_that_do_not_fit_are_refused),
        cmocka_unit_test(b110_b111_one_metrics_file_holds_every_step),
        cmocka_unit_test(b29_b114_the_stage_that_is_asked_for_is_on_and_is_printed),
        cmocka_unit_test(the_stage_changes_no_digit_of_the_metrics),
        cmocka_unit_test(steps_0_evaluates_only),
        cmocka_unit_test(epochs_count_where_no_steps_are_given),
        cmocka_unit_test(score_agrees_with_the_evaluation),
        cmocka_unit_test(the_plan_adds_up),
        cmocka_unit_test(b63_the_plan_says_why_a_higher_stage_needs_more),
        cmocka_unit_test(the_plan_with_data_is_the_arena_of_the_run),
        cmocka_unit_test(a_full_disk_ends_the_run_with_whole_lines),
        cmocka_unit_test(output_that_does_not_arrive_is_an_error),
        cmocka_unit_test(an_output_folder_below_a_file_is_an_error),
        cmocka_unit_test(a_signal_finishes_the_step_and_writes_what_there_is),
        cmocka_unit_test(a_second_signal_ends_it_at_once),
    };
    return cmocka_run_group_tests(tests, make_data, run_tear_down);
}
