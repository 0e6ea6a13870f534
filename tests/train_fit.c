/*
 * engine/train/fit.h: the largest micro-batch is exact to the byte, for cards and CPUs, and what
 * `tessera plan --memory` prints is what a run then takes.
 */
#include "engine/train/fit.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "engine/base/arena.h"
#include "engine/ops/plan_device.h"
#include "tests/support/process.h"
#include "tests/support/run.h"

static struct scratch scratch;
static struct process ran;

#define RUN(...) process_run(&ran, &scratch, (const char *const[]){__VA_ARGS__, NULL})

/* Contexts that fill every window, so that a batch has the rows that a plan without data takes. */
static int make_data(void **state)
{
    struct made_questions train = {40, 60, 90, 4, .seed = 11};
    return run_set_up(state, &scratch, &train, NULL);
}

static size_t arena_of(const struct fit_question *q, int stage, int64_t micro_batch)
{
    struct plan plan = {0};
    struct account account;
    struct setup setup;
    struct run_config c = *q->config;
    c.train.ranks = q->world_size;
    c.train.micro_batch = micro_batch;
    assert_ok(setup_init(&setup, &c, q->device, q->world_size, stage, (struct setup_rows){0}));
    assert_ok(plan_build(&plan, &account, &setup.spec));
    plan_release(&plan);
    setup_release(&setup);
    return account.arena_bytes;
}

/* ---- exact ---- */

static void check_exact(const struct fit_question *q, int stage, int64_t hint)
{
    struct fit fit;
    assert_ok(fit_largest(&fit, q, stage, hint));
    assert_true(fit.allowed);
    assert_int_equal(fit.account.arena_bytes, arena_of(q, stage, fit.micro_batch));
    assert_int_equal(fit.fits, fit.account.arena_bytes <= q->room_bytes);
    if (!fit.fits)
        assert_int_equal(fit.micro_batch, 1);
    else if (!fit.limited)
        assert_true(arena_of(q, stage, fit.micro_batch + 1) > q->room_bytes);
}

static void the_largest_micro_batch_fits_and_one_more_does_not(void **state)
{
    (void)state;
    uint64_t random = test_seed();
    for (int i = 0; i < 24; i++) {
        struct device device;
        struct run_config c = run_planned();
        c.train.grad_accum = 1 + i % 7; /* beyond three: found with a shorter program */
        c.train.recompute = i % 4 == 3 ? RECOMPUTE_BLOCK : RECOMPUTE_NONE;
        c.data.max_length = 40 + 24 * (i % 2); /* also lengths that are no length class */
        assert_ok(plan_device_init(&device, i % 2 ? DEVICE_CUDA : DEVICE_CPU, PRECISION_AUTO, 2));
        struct fit_question q = {
            .config = &c, .device = &device, .world_size = 1 + (int)(test_random(&random) % (70))};
        q.room_bytes = ((size_t)1 << 20) + (size_t)(test_random(&random) % (80 << 20));
        if (i % 2) /* cuBLASLt's workspace alone is 32 MiB */
            q.room_bytes += (size_t)32 << 20;
        check_exact(&q, i % FIT_STAGES, (int64_t)(test_random(&random) % (200)));
    }
}

/* What a rank sends in a step, with the tables moved as @tables says; @by_rows: are they? */
static int64_t sent_with(bool *by_rows, const struct run_config *config, enum table_policy tables,
                         int world_size, int stage)
{
    struct run_config c = *config;
    struct device device;
    struct setup setup;
    struct program p = {0};
    c.train.tables = tables;
    assert_ok(plan_device_init(&device, DEVICE_CUDA, PRECISION_AUTO, 1));
    assert_ok(setup_init(&setup, &c, &device, world_size, stage, (struct setup_rows){0}));
    assert_ok(program_build(&p, PROGRAM_STEP, &setup.spec));
    *by_rows = setup.units[0].by_rows;
    for (int u = 0; u < setup.model.unit_count; u++) /* all parts or none */
        assert_int_equal(setup.units[u].by_rows, *by_rows && setup.model.units[u].look_up);
    assert_int_equal(setup.train_batch.ranks, *by_rows ? world_size : 0);
    int64_t sent = program_collective_bytes(&p, OP_GATHER, world_size) +
                   program_collective_bytes(&p, OP_REDUCE, world_size);
    program_release(&p);
    setup_release(&setup);
    return sent;
}

/* At stages 1 and 2 the way of less bytes is chosen, and all stages go it: where it is by rows, the
 * others send less so, too. But for what shards are padded with. */
static bool choice_of(const struct run_config *c, int ranks)
{
    bool chosen = false, every = c->train.reduce == REDUCE_PER_MICRO_BATCH;
    for (int i = 0; i < (every ? FIT_STAGES : 2); i++) {
        int stage = every ? (i + 1) % FIT_STAGES : 1 - i; /* beginning with 1 */
        bool rows, whole, by_itself;
        int64_t by_rows = sent_with(&rows, c, TABLES_ROWS, ranks, stage);
        int64_t at_once = sent_with(&whole, c, TABLES_WHOLE, ranks, stage);
        int64_t sent = sent_with(&by_itself, c, TABLES_AUTO, ranks, stage);
        assert_true(rows && !whole);
        assert_int_equal(sent, by_itself ? by_rows : at_once);
        assert_true(sent <= at_once + at_once / 50);
        if (stage == 1 || stage == 2)
            assert_true(sent <= by_rows + by_rows / 50);
        chosen = stage == 1 ? by_itself : chosen;
        assert_int_equal(by_itself, chosen);
    }
    return chosen;
}

static void tables_are_moved_by_rows_where_that_sends_less(void **state)
{
    (void)state;
    int chosen[2] = {0, 0};
    for (int ranks = 2; ranks <= 64; ranks *= 2)
        for (int micro = 1; micro <= 4; micro++)
            for (int accum = 1; accum <= 3; accum++)
                for (int reduce = REDUCE_PER_STEP; reduce <= REDUCE_PER_MICRO_BATCH; reduce++) {
                    struct run_config c = run_planned();
                    c.train.micro_batch = micro;
                    c.train.grad_accum = accum;
                    c.train.reduce = (enum reduce_policy)reduce;
                    chosen[choice_of(&c, ranks)]++;
                }
    assert_true(chosen[0] > 20 && chosen[1] > 20);
    struct run_config c = run_planned();
    bool rows;
    sent_with(&rows, &c, TABLES_ROWS, 1, 1);
    assert_false(rows);
    snprintf(c.train.freeze, sizeof c.train.freeze, "bert.embeddings.word_embeddings");
    sent_with(&rows, &c, TABLES_ROWS, 4, 1);
    assert_false(rows);
}

/* The table has three parts; 188 rows of it, 108,288 bytes of gradient and parameters, are in the
 * last one. All parts move alike. */
static bool last_part_is_by_rows(const struct run_config *c, int world_size)
{
    struct device device;
    struct setup setup;
    assert_ok(plan_device_init(&device, DEVICE_CUDA, PRECISION_AUTO, 1));
    assert_ok(setup_init(&setup, c, &device, world_size, 1, (struct setup_rows){0}));
    assert_true(setup.model.units[2].look_up && !setup.model.units[3].look_up);
    bool by_rows = setup.units[2].by_rows;
    assert_true(setup.units[0].by_rows == by_rows && setup.units[1].by_rows == by_rows);
    setup_release(&setup);
    return by_rows;
}

/* A run that goes on with more steps may meet a fuller batch; a table that moved otherwise for it
 * would have other sums than the run at one go. */
static void the_way_of_a_table_does_not_follow_from_the_steps(void **state)
{
    (void)state;
    enum { SAMPLES = 64, RANKS = 2 };
    int32_t lengths[SAMPLES];
    for (int i = 0; i < SAMPLES; i++)
        lengths[i] = i % 8 == 0 ? 22 : 50; /* 744 rows on average; 750 are as much as the table */
    struct run_config c = run_planned();
    c.train.micro_batch = 16;
    struct run_data data = {.train = {.rows = lengths, .count = SAMPLES}};
    struct device device;
    struct sampler sampler;
    bool chosen[2][2]; /* [all steps][by the fullest] */
    assert_ok(plan_device_init(&device, DEVICE_CUDA, PRECISION_AUTO, 1));
    assert_ok(sampler_init(&sampler, lengths, SAMPLES, RANKS, 1, c.train.micro_batch, 1));
    for (int all = 0; all < 2; all++)
        for (int fullest = 0; fullest < 2; fullest++) {
            struct setup setup;
            struct setup_rows rows;
            trainer_rows(&rows, &c, &data, &sampler, all ? sampler.steps_per_epoch : 1);
            if (fullest)
                rows.train_mean = (double)rows.train;
            assert_ok(setup_init(&setup, &c, &device, RANKS, 1, rows));
            chosen[all][fullest] = setup.units[0].by_rows;
            setup_release(&setup);
        }
    sampler_release(&sampler);
    assert_true(chosen[0][1] && !chosen[1][1]); /* else nothing is shown */
    assert_true(chosen[0][0] && chosen[1][0]);
}

static void frozen_parts_of_a_table_do_not_count(void **state)
{
    (void)state;
    struct run_config c = run_planned();
    c.train.max_unit_numel = 39000;
    c.train.micro_batch = 2; /* 128 rows of a rank are 24,576 bytes, there and back twice as much */
    assert_true(last_part_is_by_rows(&c, 2));
    assert_true(last_part_is_by_rows(&c, 4));
    snprintf(c.train.freeze, sizeof c.train.freeze,
             "bert.embeddings.word_embeddings.weight.0,bert.embeddings.word_embeddings.weight.1");
    assert_true(last_part_is_by_rows(&c, 2));
    assert_false(last_part_is_by_rows(&c, 4));
}

/* A room of exactly the arena of 5 is enough for 5; with one byte less, 4 is the most. */
static void one_byte_less_is_one_sequence_less(void **state)
{
    (void)state;
    for (int stage = 0; stage < FIT_STAGES; stage++) {
        struct fit fit;
        struct device device;
        struct run_config c = run_planned();
        c.model.max_positions = c.data.max_length = 128; /* a length class each */
        assert_ok(plan_device_init(&device, DEVICE_CPU, PRECISION_AUTO, 1));
        struct fit_question q = {.config = &c, .device = &device, .world_size = 4};
        q.room_bytes = arena_of(&q, stage, 5);
        assert_ok(fit_largest(&fit, &q, stage, 0));
        assert_int_equal(fit.micro_batch, 5);
        q.room_bytes--;
        assert_ok(fit_largest(&fit, &q, stage, 1000));
        assert_int_equal(fit.micro_batch, 4);
    }
}

static void the_ends_of_the_search(void **state)
{
    (void)state;
    struct fit fit;
    struct device device;
    struct run_config c = run_planned();
    assert_ok(plan_device_init(&device, DEVICE_CPU, PRECISION_AUTO, 1));
    struct fit_question q = {.config = &c, .device = &device, .world_size = 4};
    q.room_bytes = 0; /* nothing fits */
    assert_ok(fit_largest(&fit, &q, 3, 7));
    assert_false(fit.fits);
    assert_null(fit_fastest(&fit, 1));
    q.room_bytes = FIT_MEMORY_MAX; /* the configuration's limits */
    assert_ok(fit_largest(&fit, &q, 3, 0));
    assert_true(fit.fits && fit.limited);
    assert_int_equal(fit.micro_batch, 1 << 20);
    c.train.grad_accum = 8;
    q.world_size = 4096;
    assert_ok(fit_largest(&fit, &q, 0, 0));
    assert_true(fit.limited);
    assert_int_equal(fit.micro_batch, INT32_MAX / (8 * 4096));
    c.train.grad_accum = 1;
    q.world_size = 4;
    c.train.reduce = REDUCE_PER_STEP; /* which stages 2 and 3 refuse */
    q.room_bytes = (size_t)50 << 20;
    for (int stage = 0; stage < FIT_STAGES; stage++) {
        assert_ok(fit_largest(&fit, &q, stage, 0));
        assert_int_equal(fit.allowed, stage < 2);
        assert_int_equal(fit.fits, stage < 2);
    }
}

static void a_given_micro_batch_fits_or_does_not(void **state)
{
    (void)state;
    for (int stage = 0; stage < FIT_STAGES; stage++) {
        struct fit fit;
        struct device device;
        struct run_config c = run_planned();
        c.train.micro_batch = 9;
        assert_ok(plan_device_init(&device, DEVICE_CUDA, PRECISION_AUTO, 1));
        struct fit_question q = {.config = &c, .device = &device, .world_size = 2};
        q.room_bytes = arena_of(&q, stage, 9);
        assert_ok(fit_given(&fit, &q, stage));
        assert_true(fit.fits && fit.micro_batch == 9);
        q.room_bytes--;
        assert_ok(fit_given(&fit, &q, stage));
        assert_false(fit.fits);
    }
}

/* ---- large models ---- */

static struct run_config seven_billion(void)
{
    struct run_config c;
    config_defaults(&c);
    c.model.hidden = 4096;
    c.model.heads = 32;
    c.model.ffn = 16384;
    c.model.layers = 36;
    c.model.vocab_size = 32000;
    c.model.max_positions = 2048;
    c.data.max_length = 2048;
    c.train.recompute = RECOMPUTE_BLOCK;
    c.eval.micro_batch = 1;
    return c;
}

/* All stages on 1 to 4096 ranks; nothing of its size is allocated. */
static void seven_billion_parameters_are_planned_without_allocating_them(void **state)
{
    (void)state;
    struct device device;
    struct run_config c = seven_billion();
    struct fit fits[FIT_STAGES] = {{0}};
    struct timespec begin, end;
    int64_t before = mem_live_bytes();
    assert_ok(plan_device_init(&device, DEVICE_CUDA, PRECISION_AUTO, 1));
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &begin);
    for (int ranks = 1; ranks <= 4096; ranks *= 2) {
        struct fit_question q = {.config = &c, .device = &device, .world_size = ranks};
        q.room_bytes = ((size_t)80 << 30) - FIT_BESIDE_CARD;
        for (int stage = 0; stage < FIT_STAGES; stage++)
            assert_ok(fit_largest(&fits[stage], &q, stage, fits[stage].micro_batch));
        assert_false(fits[0].fits);                 /* 16 bytes a parameter */
        assert_int_equal(fits[1].fits, ranks >= 2); /* whole gradients end one by one */
        assert_int_equal(fits[3].fits, ranks >= 2);
    }
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
    double seconds =
        (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
    print_message("52 answers for 7 B parameters in %.2f s\n", seconds);
    assert_int_equal(mem_live_bytes(), before);
    assert_true(seconds < 10); /* far more than it takes, for instrumented builds */
}

/* ---- what is printed ---- */

static json_t *printed(void)
{
    json_error_t error;
    json_t *root = json_loads(ran.out, 0, &error);
    if (root == NULL)
        fail_msg("%s in %s", error.text, ran.out);
    return root;
}

static size_t bytes_of(const json_t *object, const char *key)
{
    const json_t *v = json_object_get(object, key);
    if (!json_is_integer(v))
        fail_msg("no integer \"%s\"", key);
    return (size_t)json_integer_value(v);
}

static struct run_config measured_model(void)
{
    struct run_config c;
    run_tiny(&c, &scratch, false);
    c.model.hidden = 192;
    c.model.heads = 3;
    c.model.ffn = 768;
    c.model.layers = 6;
    c.data.padded = true; /* B * max_length rows, as planned without data */
    c.data.max_length = 64;
    c.model.max_positions = 64;
    c.train.ranks = 2;
    c.train.max_unit_numel = 1 << 20;
    c.eval.micro_batch = 1;
    return c;
}

/*
 * Activations, workspace and buffers are in the estimate: a run with the micro-batch that the plan
 * says is the largest for 60 MiB has the arenas that it printed, and the process grew by them.
 */
static void b60_a_run_takes_what_plan_printed(void **state)
{
    (void)state;
    char batch[64];
    struct run_config c = measured_model();
    const char *path = run_put_config(&scratch, &c);
    for (int stage = 0; stage < FIT_STAGES; stage += 3) {
        char number[16];
        snprintf(number, sizeof number, "%d", stage);
        RUN("plan", "--config", path, "--device", "cpu", "--memory", "60MiB", "--reserve", "1MiB",
            "--json");
        process_expect(&ran, 0, "\"ranks\":[", NULL);
        json_t *root = printed();
        const json_t *ranks = json_array_get(json_object_get(root, "ranks"), 0);
        const json_t *row = json_array_get(json_object_get(ranks, "stages"), (size_t)stage);
        size_t planned = bytes_of(row, "total"), sum = 0;
        const json_t *value;
        const char *key;
        assert_true(planned <= (size_t)59 << 20 && planned > (size_t)50 << 20);
        json_object_foreach(json_object_get(row, "bytes"), key, value) sum +=
            (size_t)json_integer_value(value);
        assert_int_equal(sum, planned);
        snprintf(batch, sizeof batch, "train.micro_batch=%zu", bytes_of(row, "micro_batch"));
        json_decref(root);

        RUN("train", "--config", path, "--zero-stage", number, "--set", batch, "--steps", "2");
        process_expect(&ran, 0, NULL, NULL);
        json_error_t error;
        json_t *summary = json_load_file(scratch_at(&scratch, "out/summary.json"), 0, &error);
        assert_non_null(summary);
        assert_int_equal(bytes_of(json_object_get(summary, "bytes_per_rank"), "arena"), planned);
        const json_t *process = json_object_get(summary, "process_bytes");
        size_t grown = bytes_of(process, "grown"), count = bytes_of(process, "ranks");
        print_message("stage %d: %zu ranks planned %.1f MiB, the process grew by %.1f\n", stage,
                      count, (double)(planned * count) / 1048576, (double)grown / 1048576);
        assert_int_equal(count, 2);
#if !defined(__SANITIZE_ADDRESS__)
        /* What an arena has beside it: threads, batches, BLAS. */
        assert_true((double)grown > 0.97 * (double)(planned * count));
        assert_true((double)grown < 1.03 * (double)(planned * count) + 32 * 1048576.0);
#endif
        json_decref(summary);
    }
}

static void plans_for_memory_refuse_what_makes_no_sense(void **state)
{
    (void)state;
    struct run_config c = measured_model();
    const char *path = run_put_config(&scratch, &c);
    static const struct {
        const char *args[6];
        const char *message;
    } cases[] = {
        {{"--memory", "80 gigs"},
         "--memory: expected bytes, or a number with KiB, MiB, GiB or TiB"},
        {{"--memory", "0"}, "--memory: expected bytes"},
        {{"--memory", "200TiB"}, "--memory: expected at most 128TiB"},
        {{"--memory", "1GiB", "--reserve", "1GiB"}, "--reserve: expected less than --memory"},
        {{"--memory", "1GiB", "--data"}, "--data plans for the batches of one micro_batch"},
        {{"--memory", "1GiB", "--show-program"}, "leave --memory out"},
        {{"--memory", "1GiB", "--ranks", "8..4"}, "--ranks: expected an integer from 1 to 4096"},
        {{"--memory", "1GiB", "--ranks", "1..5000"}, "found \"1..5000\""},
        {{"--memory", "1GiB", "--ranks", "1.."}, "found \"1..\""},
        {{"--memory", "1GiB", "--device", "tpu"}, "train.device: expected auto, cpu or cuda"},
        {{"--ranks", "1..8"}, "several numbers need --memory"},
        {{"--reserve", "1GiB"}, "--memory SIZE, which is missing"},
        {{"--markdown"}, "--memory SIZE, which is missing"},
        {{"--memory", "1GiB", "--json", "--markdown"}, "not both"},
        {{"--zero-stage", "auto", "--show-program"}, "--show-program needs a stage"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *args[10] = {"plan", "--config", path};
        for (int k = 0; k < 6 && cases[i].args[k] != NULL; k++)
            args[3 + k] = cases[i].args[k];
        process_run(&ran, &scratch, args);
        process_expect(&ran, 2, NULL, cases[i].message);
        assert_string_equal(ran.out, "");
    }
}

static void the_table_names_the_fastest_and_what_does_not_fit(void **state)
{
    (void)state;
    struct run_config c = seven_billion();
    const char *path = run_put_config(&scratch, &c);
    RUN("plan", "--config", path, "--device", "cuda", "--memory", "80GiB", "--ranks", "1..12");
    process_expect(&ran, 0, "bert: 7389.2 M parameters", NULL);
    assert_non_null(strstr(ran.out, "bf16 on GPUs"));
    assert_non_null(strstr(ran.out, "2 GiB for context"));
    assert_non_null(strstr(ran.out, "at B = 1"));
    assert_non_null(strstr(ran.out, "\n     12 ")); /* 1, 2, 4, 8 and the end */
    assert_non_null(strstr(ran.out, "1* "));
    RUN("plan", "--config", path, "--device", "cuda", "--memory", "80GB", "--ranks", "8", "--json");
    process_expect(&ran, 0, NULL, NULL);
    json_t *root = printed();
    assert_int_equal(bytes_of(root, "memory_bytes"), 80000000000u);
    const json_t *row = json_array_get(json_object_get(root, "ranks"), 0);
    assert_int_equal(bytes_of(row, "beside_bytes"), FIT_BESIDE_CARD);
    assert_true(json_is_integer(json_object_get(row, "fastest")));
    json_decref(root);
}

static void the_table_of_the_page_is_what_plan_prints(void **state)
{
    static const char begin[] = "\n<!-- plan --markdown -->\n", end[] = "<!-- end -->";
    struct file_text page = {0};
    (void)state;
    assert_ok(file_read(&page, "docs/memory.md"));
    RUN("plan", "--config", "configs/bert-large-squad1.yaml", "--memory", "80GiB", "--ranks", "8",
        "--profile", "h100+ib400", "--set", "train.grad_accum=1", "--markdown");
    process_expect(&ran, 0, "(fastest)", NULL);
    const char *table = strstr(page.data, begin);
    assert_non_null(table);
    table += sizeof begin - 1;
    size_t bytes = strlen(ran.out);
    if (strncmp(table, ran.out, bytes) != 0 || strncmp(table + bytes, end, sizeof end - 1) != 0)
        fail_msg("docs/memory.md is out of date: run `make docs`");
    mem_free(&page.data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_largest_micro_batch_fits_and_one_more_does_not),
        cmocka_unit_test(tables_are_moved_by_rows_where_that_sends_less),
        cmocka_unit_test(the_way_of_a_table_does_not_follow_from_the_steps),
        cmocka_unit_test(frozen_parts_of_a_table_do_not_count),
        cmocka_unit_test(one_byte_less_is_one_sequence_less),
        cmocka_unit_test(the_ends_of_the_search),
        cmocka_unit_test(a_given_micro_batch_fits_or_does_not),
        cmocka_unit_test(seven_billion_parameters_are_planned_without_allocating_them),
        cmocka_unit_test(b60_a_run_takes_what_plan_printed),
        cmocka_unit_test(plans_for_memory_refuse_what_makes_no_sense),
        cmocka_unit_test(the_table_names_the_fastest_and_what_does_not_fit),
        cmocka_unit_test(the_table_of_the_page_is_what_plan_prints),
    };
    return cmocka_run_group_tests(tests, make_data, run_tear_down);
}
