/*
 * What a run tells tools that people already use: CSV and TensorBoard's event files
 * (engine/train/metrics_log.h, io/tensorboard.h), and MFU.
 */
#include <dirent.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/arena.h"
#include "engine/train/gpu_log.h"
#include "engine/train/peak.h"
#include "io/tensorboard.pb-c.h"
#include "tests/support/run.h"

enum { MAX_EVENTS = 512, STEPS = 6, CUT = 3 };

static struct scratch scratch;

static int set_up(void **state)
{
    struct made_questions q = {
        .count = 30, .min_words = 5, .max_words = 20, .question_words = 4, .seed = 5};
    return run_set_up(state, &scratch, &q, &q);
}

/* ---- reading event files, by their definition ------------------------------------------------ */

/* Bit by bit, so that it shares nothing with the library that the writer uses. */
static uint32_t crc32c(const unsigned char *bytes, size_t count)
{
    uint32_t crc = 0xFFFFFFFFu;
    for (size_t i = 0; i < count; i++) {
        crc ^= bytes[i];
        for (int k = 0; k < 8; k++)
            crc = (crc >> 1) ^ (crc & 1 ? 0x82F63B78u : 0);
    }
    return ~crc;
}

static uint32_t masked(const unsigned char *bytes, size_t count)
{
    uint32_t crc = crc32c(bytes, count);
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

static uint64_t little(const unsigned char *p, int bytes)
{
    uint64_t value = 0;
    for (int i = bytes - 1; i >= 0; i--)
        value = value << 8 | p[i];
    return value;
}

struct events {
    Tensorboard__Event *event[MAX_EVENTS];
    int count;
};

/* Every record of the file, whose two checksums are right. */
static void read_events(struct events *e, const char *path)
{
    struct file_text text = {NULL, 0};
    assert_ok(file_read(&text, path));
    const unsigned char *p = (const unsigned char *)text.data, *end = p + text.bytes;
    while (p < end) {
        assert_true(end - p >= 16);
        size_t bytes = (size_t)little(p, 8);
        assert_int_equal(little(p + 8, 4), masked(p, 8));
        assert_true((size_t)(end - p) >= bytes + 16);
        assert_int_equal(little(p + 12 + bytes, 4), masked(p + 12, bytes));
        assert_true(e->count < MAX_EVENTS);
        e->event[e->count] = tensorboard__event__unpack(NULL, bytes, p + 12);
        assert_non_null(e->event[e->count]);
        e->count++;
        p += bytes + 16;
    }
    mem_free(&text.data);
}

static void free_events(struct events *e)
{
    for (int i = 0; i < e->count; i++)
        tensorboard__event__free_unpacked(e->event[i], NULL);
    e->count = 0;
}

/* The n-th event file of a folder, in the order of names. */
static void event_file(char *path, size_t bytes, const char *dir, int n, int want)
{
    struct dirent **names = NULL;
    int found = 0, count = scandir(dir, &names, NULL, alphasort);
    assert_true(count >= 0);
    for (int i = 0; i < count; i++) {
        if (strncmp(names[i]->d_name, "events.out.tfevents.", 20) == 0 && found++ == n)
            snprintf(path, bytes, "%s/%s", dir, names[i]->d_name);
        free(names[i]);
    }
    free(names);
    assert_int_equal(found, want);
}

/* Of @step, or NAN. */
static double scalar(const struct events *e, int64_t step, const char *tag)
{
    for (int i = 0; i < e->count; i++) {
        if (e->event[i]->what_case != TENSORBOARD__EVENT__WHAT_SUMMARY || e->event[i]->step != step)
            continue;
        const Tensorboard__Summary *s = e->event[i]->summary;
        for (size_t k = 0; k < s->n_value; k++)
            if (strcmp(s->value[k]->tag, tag) == 0)
                return (double)s->value[k]->simple_value;
    }
    return (double)NAN;
}

/* ---- what is written ------------------------------------------------------------------------- */

static struct run_config config(int ranks, int64_t steps)
{
    struct run_config c = run_tiny_with(
        &scratch, (struct tiny_run){.ranks = ranks, .stage = 2, .steps = steps, .eval = true});
    c.eval.every = 2;
    scratch_path(&scratch, c.output.dir, "out");
    return c;
}

static void train(struct run_config *c, struct run_trace *trace)
{
    run_ok(trace, c, &(struct run_how){.loud = true});
}

/* One file, not one a rank; global values; all tags that the documentation names. */
static void b110_b111_one_event_file_holds_every_value(void **state)
{
    (void)state;
    static const char *const every_step[] = {"train/loss",
                                             "train/lr",
                                             "train/grad_norm",
                                             "train/epoch",
                                             "speed/sequences_per_s",
                                             "speed/tokens_per_s",
                                             "speed/step_ms",
                                             "speed/tflops_per_rank"};
    struct run_trace trace = {0};
    struct events e = {.count = 0};
    char dir[1200], path[1500];
    struct run_config c = config(3, STEPS);
    train(&c, &trace);
    snprintf(dir, sizeof dir, "%s/tensorboard", c.output.dir);
    event_file(path, sizeof path, dir, 0, 1);
    read_events(&e, path);
    assert_int_equal(e.event[0]->what_case, TENSORBOARD__EVENT__WHAT_FILE_VERSION);
    assert_string_equal(e.event[0]->file_version, "brain.Event:2");
    for (int step = 1; step <= STEPS; step++) {
        const struct step_state *r = &trace.step[0][step - 1];
        for (size_t i = 0; i < sizeof every_step / sizeof *every_step; i++)
            assert_true(isfinite(scalar(&e, step, every_step[i])));
        assert_true((float)scalar(&e, step, "train/loss") == (float)r->loss);
        assert_true((float)scalar(&e, step, "train/grad_norm") == (float)r->grad_norm);
        /* Of all ranks together. */
        double seconds = scalar(&e, step, "speed/step_ms") * 1e-3;
        assert_true(fabs(scalar(&e, step, "speed/tokens_per_s") * seconds - (double)r->tokens) <
                    1e-5 * (double)r->tokens);
        assert_true(isnan(scalar(&e, step, "speed/mfu"))); /* a CPU's peak is not known */
        assert_true(isnan(scalar(&e, step, "validation/f1")) == (step % 2 != 0));
    }
    assert_true(scalar(&e, 0, "memory_MiB/arena") ==
                (double)(float)((double)trace.account.arena_bytes / 1048576.0));
    assert_true(isfinite(scalar(&e, 0, "memory_MiB/adam_m")));
    int texts = 0;
    for (int i = 0; i < e.count; i++) {
        Tensorboard__Summary *s = e.event[i]->summary;
        if (e.event[i]->what_case != TENSORBOARD__EVENT__WHAT_SUMMARY ||
            s->value[0]->data_case != TENSORBOARD__SUMMARY__VALUE__DATA_TENSOR)
            continue;
        assert_string_equal(s->value[0]->metadata->plugin_data->plugin_name, "text");
        assert_true(s->value[0]->tensor->string_val[0].len > 500);
        texts++;
    }
    assert_int_equal(texts, 1);
    free_events(&e);
    run_release(&trace);
}

static void the_csv_has_the_steps_of_the_jsonl(void **state)
{
    (void)state;
    struct file_text text = {NULL, 0};
    struct run_trace trace = {0};
    char path[1200];
    struct run_config c = config(2, STEPS);
    train(&c, &trace);
    snprintf(path, sizeof path, "%s/metrics.csv", c.output.dir);
    assert_ok(file_read(&text, path));
    const char *line = text.data;
    assert_true(strncmp(line,
                        "step,epoch,loss,lr,grad_norm,sequences,tokens,ms,tflops,mfu,skipped\n",
                        strlen("step,epoch,loss,lr,grad_norm,sequences,tokens,ms,tflops,mfu,"
                               "skipped\n")) == 0);
    for (int step = 1; step <= STEPS; step++) {
        long long number;
        double epoch, loss;
        line = strchr(line, '\n') + 1;
        assert_int_equal(sscanf(line, "%lld,%lf,%lf", &number, &epoch, &loss), 3);
        assert_int_equal(number, step);
        assert_true(loss == trace.step[0][step - 1].loss); /* 17 digits are the number itself */
        assert_non_null(strstr(line, ",,0\n"));            /* no MFU, not skipped */
    }
    line = strchr(line, '\n') + 1;
    assert_int_equal(*line, '\0');
    mem_free(&text.data);
    run_release(&trace);
}

/* A run that is continued has every step once in its CSV, and readers of the event files are told
 * to forget what comes again. */
static void a_continued_run_repeats_no_step(void **state)
{
    (void)state;
    struct file_text text = {NULL, 0};
    struct run_trace trace = {0};
    struct events e = {.count = 0};
    char path[1500], dir[1200];
    struct run_config c = config(2, STEPS);
    scratch_path(&scratch, c.output.dir, "continued");
    c.checkpoint.every = CUT;
    train(&c, &trace);
    run_release(&trace);
    snprintf(c.checkpoint.resume, sizeof c.checkpoint.resume, "%.400s/checkpoints/step-%08d",
             c.output.dir, CUT);
    c.checkpoint.every = 0;
    train(&c, &trace);
    snprintf(path, sizeof path, "%s/metrics.csv", c.output.dir);
    assert_ok(file_read(&text, path));
    int lines = 0;
    for (const char *at = text.data; (at = strchr(at, '\n')) != NULL; at++)
        assert_true(lines++ == 0 || strtol(at + 1, NULL, 10) == lines || at[1] == '\0');
    assert_int_equal(lines, STEPS + 1);
    mem_free(&text.data);
    snprintf(dir, sizeof dir, "%s/tensorboard", c.output.dir);
    event_file(path, sizeof path, dir, 1, 2);
    read_events(&e, path);
    assert_int_equal(e.event[1]->what_case, TENSORBOARD__EVENT__WHAT_SESSION_LOG);
    assert_int_equal(e.event[1]->session_log->status, TENSORBOARD__SESSION_LOG__STATUS__START);
    assert_int_equal(e.event[1]->step, CUT);
    assert_true(isnan(scalar(&e, CUT, "train/loss")));
    assert_true(isfinite(scalar(&e, CUT + 1, "train/loss")));
    free_events(&e);
    run_release(&trace);
}

/* A rank that leaves early, with the exit code of a signal, makes a launcher end the others. */
static void look_for_summary(void *context, struct trainer *t)
{
    char path[1500];
    bool *found = context;
    snprintf(path, sizeof path, "%s/summary.json", t->config->output.dir);
    found[t->comm->rank] = access(path, F_OK) == 0;
}

static void no_rank_leaves_before_the_summary_is_written(void **state)
{
    (void)state;
    struct run_trace trace = {0};
    bool found[3] = {false};
    struct run_config c = config(3, 1);
    scratch_path(&scratch, c.output.dir, "together");
    c.data.eval[0] = '\0';
    c.output.model = false;
    file_delay(20); /* rank 0 alone writes, and is late */
    run_ok(&trace, &c,
           &(struct run_how){.loud = true, .at_end = look_for_summary, .context = found});
    file_delay(0);
    assert_true(found[0] && found[1] && found[2]);
    run_release(&trace);
}

static void tensorboard_can_be_turned_off(void **state)
{
    (void)state;
    struct run_trace trace = {0};
    struct file_text text = {NULL, 0};
    char path[1500];
    struct run_config c = config(1, 2);
    scratch_path(&scratch, c.output.dir, "without");
    c.output.tensorboard = false;
    train(&c, &trace);
    snprintf(path, sizeof path, "%s/metrics.csv", c.output.dir);
    assert_ok(file_read(&text, path));
    mem_free(&text.data);
    snprintf(path, sizeof path, "%s/tensorboard", c.output.dir);
    assert_null(opendir(path));
    run_release(&trace);
}

static void values_that_are_not_finite_are_left_out(void **state)
{
    (void)state;
    struct tensorboard tb;
    struct events e = {.count = 0};
    char path[1500], dir[1024];
    scratch_path(&scratch, dir, "values");
    assert_ok(tensorboard_open(&tb, dir, 0));
    assert_ok(tensorboard_scalars(
        &tb, 7,
        (struct tensorboard_scalar[]){
            {"a", 1.5}, {"b", (double)NAN}, {"c", (double)INFINITY}, {"d", -2.25}},
        4));
    assert_ok(tensorboard_close(&tb));
    assert_ok(tensorboard_close(&tb));
    event_file(path, sizeof path, dir, 0, 1);
    read_events(&e, path);
    assert_int_equal(e.count, 2);
    assert_int_equal(e.event[1]->summary->n_value, 2);
    assert_true(scalar(&e, 7, "a") == 1.5 && scalar(&e, 7, "d") == -2.25);
    free_events(&e);
    assert_int_equal(crc32c((const unsigned char *)"123456789", 9), 0xE3069283); /* RFC 3720 */
}

/* A card that nobody knows: a warning, and the run goes on without its log. */
/* What the system calls its processor is not ours to choose. */
static void any_name_of_a_device_is_valid_json(void **state)
{
    static char longest[20000];
    static const struct account account;
    (void)state;
    memset(longest, 'y', sizeof longest - 1);
    const char *const names[] = {"ACME \"Fast\" 1\\2", "tab\tand\nline", "caf\xc3\xa9 \xff",
                                 longest};
    const char *const wants[] = {names[0], names[1], "caf\xc3\xa9 ?", NULL};
    for (int i = 0; i < 4; i++) {
        struct run_config c = run_tiny_with(&scratch, (struct tiny_run){.steps = 2});
        struct metrics m;
        json_error_t error;
        scratch_path(&scratch, c.output.dir, "names");
        assert_ok(metrics_open(&m, &c));
        assert_ok(metrics_finish(&m, &account, 1, names[i], "complete"));
        metrics_close(&m);
        json_t *root = json_load_file(scratch_at(&scratch, "names/summary.json"), 0, &error);
        if (root == NULL)
            fail_msg("%s: %s", names[i], error.text);
        const char *device = json_string_value(json_object_get(root, "device"));
        assert_non_null(device);
        if (wants[i] != NULL)
            assert_string_equal(device, wants[i]);
        json_decref(root);
    }
}

static void a_card_without_nvml_costs_only_its_log(void **state)
{
    (void)state;
    struct gpu_log *log = NULL;
    struct run_config c = config(1, 1);
    char path[1500];
    struct device device = {.bus_id = "ffff:ff:1f.7"};
    scratch_path(&scratch, c.output.dir, "cards");
    gpu_log_start(&log, &c, &device, 0);
    assert_null(log);
    gpu_log_stop(&log);
    snprintf(path, sizeof path, "%s/gpu", c.output.dir);
    assert_null(opendir(path));
}

/* 989, not the sheet's 1979 with sparsity; H100 is not A100; no guess for other cards. */
static void b113_the_peak_is_the_dense_one_of_the_named_card(void **state)
{
    (void)state;
    assert_true(peak_flops("NVIDIA H100 80GB HBM3", DTYPE_BF16) == 1e12 * 989.4);
    assert_true(peak_flops("NVIDIA H100 80GB HBM3", DTYPE_F32) == 1e12 * 66.9);
    assert_true(peak_flops("NVIDIA H100 PCIe", DTYPE_BF16) == 756e12);
    assert_true(peak_flops("NVIDIA A100-SXM4-80GB", DTYPE_BF16) == 312e12);
    assert_true(peak_flops("NVIDIA H100", DTYPE_BF16) == 0);
    assert_true(peak_flops("NVIDIA H100 80GB HBM3 MIG 1g.10gb", DTYPE_BF16) == 0);
    assert_true(peak_flops("AMD EPYC 7B13, OpenBLAS Zen", DTYPE_F32) == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(b110_b111_one_event_file_holds_every_value),
        cmocka_unit_test(the_csv_has_the_steps_of_the_jsonl),
        cmocka_unit_test(a_continued_run_repeats_no_step),
        cmocka_unit_test(no_rank_leaves_before_the_summary_is_written),
        cmocka_unit_test(tensorboard_can_be_turned_off),
        cmocka_unit_test(values_that_are_not_finite_are_left_out),
        cmocka_unit_test(a_card_without_nvml_costs_only_its_log),
        cmocka_unit_test(any_name_of_a_device_is_valid_json),
        cmocka_unit_test(b113_the_peak_is_the_dense_one_of_the_named_card),
    };
    return cmocka_run_group_tests(tests, set_up, run_tear_down);
}
