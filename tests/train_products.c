/* The GEMM plan of a run without a GPU: shared by ranks, kept in a file, carried by checkpoints. */
#include "engine/train/products.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/arena.h"
#include "engine/base/file.h"
#include "engine/train/checkpoint_state.h"
#include "tests/support/ranks.h"
#include "tests/support/run.h"
#include "tests/support/support.h"

static const struct gemm_card h100 = {"NVIDIA H100 80GB HBM3", 132, 130100};
static const struct gemm_card a100 = {"NVIDIA A100-SXM4-40GB", 108, 130100};

static struct scratch scratch;
static struct run_trace first, second;

static int set_up(void **state)
{
    const struct made_questions q = {
        .count = 30, .min_words = 5, .max_words = 60, .question_words = 4, .seed = 7};
    return run_set_up(state, &scratch, &q, NULL);
}

static int release(void **state)
{
    (void)state;
    run_release(&first);
    run_release(&second);
    file_fail_at(0);
    status_clear();
    return mem_live_bytes() == 0 ? 0 : -1;
}

static struct gemm_entry entry_of(int64_t T, double us)
{
    struct gemm_entry e;
    memset(&e, 0, sizeof e);
    e.key = (struct gemm_key){.T = T, .N = 768, .K = 3072, .dtype = DTYPE_BF16, .align = 256};
    e.key.beside = T % 2 ? 12 : 0;
    e.alone.algo[GEMM_ID] = (uint32_t)T % 97;
    e.alone.us = us;
    e.beside.us = T % 2 ? us + 1.0 : 0.0;
    return e;
}

static struct gemm_table table_of(int64_t first_T, int count, double us)
{
    struct gemm_table table = {.card = h100};
    for (int i = 0; i < count; i++) {
        struct gemm_entry e = entry_of(first_T + i, us);
        assert_ok(gemm_table_add(&table, &e));
    }
    return table;
}

static bool equal(const struct gemm_table *a, const struct gemm_table *b)
{
    return gemm_card_equal(&a->card, &b->card) && a->count == b->count &&
           (a->count == 0 ||
            memcmp(a->entries, b->entries, sizeof *a->entries * (size_t)a->count) == 0);
}

static enum status copy(struct gemm_table *to, const struct gemm_table *from)
{
    to->card = from->card;
    for (int i = 0; i < from->count; i++)
        TRY(gemm_table_add(to, &from->entries[i]));
    return ST_OK;
}

/* ---- all ranks ------------------------------------------------------------------------------- */

static enum status share(struct comm *comm, void *argument)
{
    const struct gemm_table *want = argument;
    struct gemm_table mine = {.card = h100};
    enum status st = ST_OK;
    bool same = false;
    if (comm->rank == 0)
        st = copy(&mine, want);
    if (st == ST_OK)
        st = products_share(comm, &mine);
    same = st == ST_OK && equal(&mine, want);
    gemm_table_release(&mine);
    TRY(st);
    RANK_CHECK(same);
    return ST_OK;
}

static void all_ranks_get_the_plan_of_rank_0(void **state)
{
    (void)state;
    static const int counts[] = {0, 1, 3, 1000}; /* the last needs several messages */
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        struct gemm_table plan = table_of(128, counts[i], 7.25);
        ranks_run_ok(1, share, &plan);
        ranks_run_ok(3, share, &plan);
        gemm_table_release(&plan);
    }
}

static enum status compare(struct comm *comm, void *argument)
{
    const struct gemm_card *cards = argument;
    return products_compare(comm, &cards[comm->rank]);
}

static void a_rank_with_another_card_is_named_with_both(void **state)
{
    (void)state;
    struct gemm_card cards[3] = {h100, h100, h100};
    struct ranks ranks = {.world_size = 3, .timeout_ms = 10000, .body = compare, .argument = cards};
    ranks_run_ok(3, compare, cards);
    cards[2] = a100;
    ranks_run(&ranks);
    for (int r = 0; r < 3; r++) {
        ranks_assert(&ranks, r, ST_INVALID, "rank 2 has another kind of card");
        ranks_assert(&ranks, r, ST_INVALID, "NVIDIA A100-SXM4-40GB, 108 multiprocessors");
        ranks_assert(&ranks, r, ST_INVALID, "rank 0: NVIDIA H100 80GB HBM3, 132");
    }
    cards[2] = h100;
    cards[1].library = 120800;
    ranks_run(&ranks);
    ranks_assert(&ranks, 0, ST_INVALID, "rank 1 has another kind of card or library");
    ranks_assert(&ranks, 0, ST_INVALID, "cuBLASLt 120800; rank 0: ");
}

/* ---- the file -------------------------------------------------------------------------------- */

static void the_plan_file_lies_where_the_user_says(void **state)
{
    (void)state;
    char path[1200], home[512], cache[512];
    const char *was_home = getenv("HOME"), *was_cache = getenv("XDG_CACHE_HOME");
    snprintf(home, sizeof home, "%s", was_home != NULL ? was_home : "");
    snprintf(cache, sizeof cache, "%s", was_cache != NULL ? was_cache : "");
    setenv("HOME", "/h", 1);
    setenv("XDG_CACHE_HOME", "/c", 1);
    assert_ok(products_path(path, sizeof path, "off", &h100));
    assert_string_equal(path, "");
    assert_ok(products_path(path, sizeof path, "plans", &h100));
    assert_string_equal(path, "plans/gemm-NVIDIA-H100-80GB-HBM3-132-130100.txt");
    assert_ok(products_path(path, sizeof path, "auto", &h100));
    assert_string_equal(path, "/c/tessera/gemm-NVIDIA-H100-80GB-HBM3-132-130100.txt");
    setenv("XDG_CACHE_HOME", "relative", 1);
    assert_ok(products_path(path, sizeof path, "auto", &a100));
    assert_string_equal(path, "/h/.cache/tessera/gemm-NVIDIA-A100-SXM4-40GB-108-130100.txt");
    unsetenv("XDG_CACHE_HOME");
    unsetenv("HOME");
    assert_ok(products_path(path, sizeof path, "auto", &h100));
    assert_string_equal(path, "");
    setenv("HOME", home, 1);
    if (was_cache != NULL)
        setenv("XDG_CACHE_HOME", cache, 1);
}

static void what_is_measured_is_added_and_the_rest_stays(void **state)
{
    (void)state;
    char path[512];
    struct gemm_table a = table_of(100, 5, 1.0), b = table_of(102, 6, 2.0), kept = {0};
    scratch_path(&scratch, path, "new/deep/plan.txt");
    assert_ok(products_keep(path, &a, 0)); /* makes the folder */
    assert_ok(products_load(&kept, path, &h100));
    assert_true(equal(&kept, &a));
    gemm_table_release(&kept);
    assert_ok(products_keep(path, &b, 6)); /* nothing new */
    assert_ok(products_keep(path, &b, 1)); /* from 103 on; 103 and 104 are there */
    assert_ok(products_load(&kept, path, &h100));
    assert_int_equal(kept.count, 8);
    for (int i = 0; i < kept.count; i++) {
        assert_int_equal(kept.entries[i].key.T, 100 + i);
        assert_true(kept.entries[i].alone.us == (i < 5 ? 1.0 : 2.0));
    }
    gemm_table_release(&kept);
    gemm_table_release(&a);
    gemm_table_release(&b);
}

/* Warned of and replaced; the run goes on. */
static void damaged_and_foreign_files_are_made_anew(void **state)
{
    (void)state;
    static const char *const bad[] = {"", "garbage\n", "tessera gemm plan 99\n", "\x1f\x8b\x08"};
    char path[512];
    struct gemm_table a = table_of(100, 2, 1.0), kept = {0}, foreign = table_of(300, 3, 3.0);
    for (size_t i = 0; i <= sizeof bad / sizeof *bad; i++) {
        if (i < sizeof bad / sizeof *bad) {
            scratch_put(&scratch, path, "plan.txt", bad[i], strlen(bad[i]));
        } else {
            foreign.card = a100;
            scratch_path(&scratch, path, "plan.txt");
            unlink(path);
            assert_ok(products_keep(path, &foreign, 0));
        }
        assert_ok(products_load(&kept, path, &h100));
        assert_int_equal(kept.count, 0);
        assert_true(gemm_card_equal(&kept.card, &h100));
        gemm_table_release(&kept);
        assert_ok(products_keep(path, &a, 0));
        assert_ok(products_load(&kept, path, &h100));
        assert_true(equal(&kept, &a));
        gemm_table_release(&kept);
    }
    assert_ok(products_load(&kept, "no/such/file", &h100));
    assert_int_equal(kept.count, 0);
    gemm_table_release(&kept);
    gemm_table_release(&a);
    gemm_table_release(&foreign);
}

static void a_file_that_cannot_be_written_is_a_warning(void **state)
{
    (void)state;
    char path[512];
    struct gemm_table a = table_of(100, 2, 1.0), kept = {0};
    scratch_path(&scratch, path, "fails.txt");
    for (int64_t k = 1; k < 20; k++) {
        unlink(path);
        file_fail_at(k);
        assert_ok(products_keep(path, &a, 0));
        file_fail_at(0);
        assert_ok(products_load(&kept, path, &h100));
        assert_true(kept.count == 0 || equal(&kept, &a)); /* all or nothing */
        gemm_table_release(&kept);
    }
    assert_ok(products_keep("/dev/null/plan.txt", &a, 0));
    gemm_table_release(&a);
}

/* ---- checkpoints ----------------------------------------------------------------------------- */

static struct gemm_table given;    /* to every rank of a run */
static struct gemm_table found[2]; /* what the ranks had at the start */

static void give_plan(void *context, struct trainer *t)
{
    (void)context;
    if (copy(&t->gemm_plan, &given) != ST_OK)
        abort();
}

static void find_plan(void *context, struct trainer *t)
{
    (void)context;
    if (t->gemm_plan.card.name[0] != '\0' && copy(&found[t->comm->rank], &t->gemm_plan) != ST_OK)
        abort();
}

static struct run_config tiny(const char *out, int64_t steps)
{
    struct run_config c = run_tiny_with(&scratch, (struct tiny_run){.ranks = 2, .steps = steps});
    scratch_path(&scratch, c.output.dir, out);
    c.checkpoint.every = 2;
    c.checkpoint.keep = 0;
    return c;
}

static void a_plan_goes_through_checkpoints(void **state)
{
    (void)state;
    struct run_config c = tiny("carried", 2);
    given = table_of(128, 40, 12.5);
    run_ok(&first, &c, &(struct run_how){.at_start = give_plan});
    /* Twice: a run without a GPU hands on what it found. */
    for (int64_t steps = 4; steps <= 6; steps += 2) {
        c.train.steps = steps;
        snprintf(c.checkpoint.resume, sizeof c.checkpoint.resume, "latest");
        run_ok(&second, &c, &(struct run_how){.at_start = find_plan});
        for (int r = 0; r < 2; r++) {
            assert_true(equal(&found[r], &given));
            gemm_table_release(&found[r]);
        }
        run_release(&second);
    }
    gemm_table_release(&given);
}

static void a_run_without_a_plan_saves_none(void **state)
{
    (void)state;
    struct run_config c = tiny("without", 2);
    struct file_text text = {0};
    run_ok(&first, &c, NULL);
    run_read(&text, &c, "checkpoints/step-00000002/manifest.json");
    assert_non_null(strstr(text.data, "\"gemm_plan\": null"));
    mem_free(&text.data);
    c.train.steps = 4;
    snprintf(c.checkpoint.resume, sizeof c.checkpoint.resume, "latest");
    run_ok(&second, &c, &(struct run_how){.at_start = find_plan});
    assert_int_equal(found[0].card.name[0], 0);
}

static void refuse(const char *state_text, const char *message)
{
    struct gemm_table plan = {0};
    json_t *root = json_loads(state_text, JSON_ALLOW_NUL, NULL);
    assert_non_null(root);
    if (message == NULL)
        assert_ok(training_state_plan(&plan, root, "dir"));
    else
        assert_fails(training_state_plan(&plan, root, "dir"), ST_CORRUPT, message);
    assert_int_equal(plan.count, 0);
    assert_int_equal(plan.card.name[0], 0);
    json_decref(root);
}

static void a_wrong_plan_in_a_checkpoint_is_named_and_none_is_fine(void **state)
{
    (void)state;
    refuse("{}", NULL); /* older than the plan */
    refuse("{\"gemm_plan\": null}", NULL);
    refuse("{\"gemm_plan\": [\"tessera gemm plan 1\", \"card NVIDIA H100 80GB HBM3\"]}", NULL);
    refuse("{\"gemm_plan\": \"x\"}", "dir: the training state has a string as \"gemm_plan\"");
    refuse("{\"gemm_plan\": []}", "dir: gemm_plan:1: the text ends");
    refuse("{\"gemm_plan\": [1]}", "dir: gemm_plan[0] is ");
    refuse("{\"gemm_plan\": [\"tessera plan 3\"]}", "dir: gemm_plan:1: expected tessera");
    refuse("{\"gemm_plan\": [\"tessera gemm plan 3\\u0000\"]}", "no printable ASCII");
    refuse("{\"gemm_plan\": [\"tessera gemm plan 3\", \"card \\u00e9\"]}", "no printable ASCII");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(all_ranks_get_the_plan_of_rank_0, release),
        cmocka_unit_test_teardown(a_rank_with_another_card_is_named_with_both, release),
        cmocka_unit_test_teardown(the_plan_file_lies_where_the_user_says, release),
        cmocka_unit_test_teardown(what_is_measured_is_added_and_the_rest_stays, release),
        cmocka_unit_test_teardown(damaged_and_foreign_files_are_made_anew, release),
        cmocka_unit_test_teardown(a_file_that_cannot_be_written_is_a_warning, release),
        cmocka_unit_test_teardown(a_plan_goes_through_checkpoints, release),
        cmocka_unit_test_teardown(a_run_without_a_plan_saves_none, release),
        cmocka_unit_test_teardown(a_wrong_plan_in_a_checkpoint_is_named_and_none_is_fine, release),
    };
    return cmocka_run_group_tests(tests, set_up, run_tear_down);
}
