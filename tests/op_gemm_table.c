/* GEMM plans as tables and text: what is written reads back, what is wrong is named, hostile text
 * does no harm. */
#include "engine/ops/gemm_table.h"

#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "tests/support/support.h"

static const struct gemm_card h100 = {"NVIDIA H100 80GB HBM3", 132, 130100};

static const char HEAD[] = "tessera gemm plan 3\ncard NVIDIA H100 80GB HBM3\nmultiprocessors "
                           "132\nlibrary 130100\n";
static const char LINE[] =
    "forward bf16 T=2816 N=3072 K=1024 add=0 bias=1 align=256 beside=16 id=66 "
    "tile=1 stages=2 split=3 reduction=2 swizzle=4 custom=5 inner=6 cluster=7 sm=0 us=31.40 "
    "id=67 tile=8 stages=9 split=10 reduction=0 swizzle=11 custom=12 inner=13 cluster=14 sm=116 "
    "us=35.70\n";

static int release(void **state)
{
    (void)state;
    mem_fail_at(0);
    return mem_live_bytes() == 0 ? 0 : -1;
}

/* A draw a statement: two in one come in the order that the compiler likes. */
static struct gemm_choice choice_of(uint64_t *random)
{
    struct gemm_choice c;
    for (int i = 0; i < GEMM_ATTRIBUTES; i++) {
        c.algo[i] = (uint32_t)test_random(random);
        c.algo[i] >>= test_random(random) % 32;
    }
    c.us = (double)(test_random(random) % 100000) / 100.0;
    return c;
}

static struct gemm_entry entry_of(uint64_t *random, int64_t T)
{
    struct gemm_entry e;
    memset(&e, 0, sizeof e);
    e.key.T = T;
    e.key.N = 1 + (int64_t)(test_random(random) % 5000);
    e.key.K = 1 + (int64_t)(test_random(random) % 5000);
    e.key.kind = (int32_t)(test_random(random) % GEMM_KINDS);
    e.key.dtype = test_random(random) % 2 ? DTYPE_BF16 : DTYPE_F32;
    e.key.add = (int32_t)(test_random(random) % 2);
    e.key.bias = (int32_t)(test_random(random) % 2);
    e.key.align = 1 << test_random(random) % 9;
    e.key.beside = (int32_t)(test_random(random) % 133);
    e.key.beside *= (int32_t)(test_random(random) % 2);
    e.alone = choice_of(random);
    if (e.key.beside > 0)
        e.beside = choice_of(random);
    return e;
}

static struct gemm_table random_table(uint64_t *random, int count)
{
    struct gemm_table table = {.card = h100};
    for (int i = 0; i < count; i++) {
        struct gemm_entry e = entry_of(random, i + 1);
        assert_ok(gemm_table_add(&table, &e));
    }
    return table;
}

static void same_choices(const struct gemm_choice *a, const struct gemm_choice *b)
{
    assert_memory_equal(a->algo, b->algo, sizeof a->algo);
    assert_true(a->us == b->us);
}

static void same_tables(const struct gemm_table *a, const struct gemm_table *b)
{
    assert_true(gemm_card_equal(&a->card, &b->card));
    assert_int_equal(a->count, b->count);
    for (int i = 0; i < a->count; i++) {
        assert_memory_equal(&a->entries[i].key, &b->entries[i].key, sizeof(struct gemm_key));
        same_choices(&a->entries[i].alone, &b->entries[i].alone);
        same_choices(&a->entries[i].beside, &b->entries[i].beside);
    }
}

/* ---- round trips ----------------------------------------------------------------------------- */

static void a_plan_comes_back_from_its_text(void **state)
{
    (void)state;
    uint64_t random = test_seed();
    static const int counts[] = {0, 1, 2, 300, GEMM_TABLE_MAX};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        struct gemm_table table = random_table(&random, counts[i]), back = {0};
        char *text = NULL, *again = NULL;
        size_t bytes = 0, again_bytes = 0;
        assert_ok(gemm_table_write(&text, &bytes, &table));
        assert_int_equal(strlen(text), bytes);
        assert_ok(gemm_table_read(&back, text, bytes, "plan"));
        same_tables(&table, &back);
        assert_ok(gemm_table_write(&again, &again_bytes, &back));
        assert_string_equal(text, again);
        mem_free(&text);
        mem_free(&again);
        gemm_table_release(&table);
        gemm_table_release(&back);
    }
}

static void the_text_is_what_the_header_says(void **state)
{
    (void)state;
    struct gemm_table table = {.card = h100};
    struct gemm_entry e = {.key = {.T = 2816,
                                   .N = 3072,
                                   .K = 1024,
                                   .kind = GEMM_FORWARD,
                                   .dtype = DTYPE_BF16,
                                   .bias = 1,
                                   .align = 256,
                                   .beside = 16},
                           .alone = {{66, 1, 2, 3, 2, 4, 5, 6, 7, 0}, 31.4},
                           .beside = {{67, 8, 9, 10, 0, 11, 12, 13, 14, 116}, 35.7}};
    char *text = NULL, want[1024];
    size_t bytes = 0;
    assert_ok(gemm_table_add(&table, &e));
    assert_ok(gemm_table_write(&text, &bytes, &table));
    snprintf(want, sizeof want, "%s%s", HEAD, LINE);
    assert_string_equal(text, want);
    mem_free(&text);
    table.entries[0].key.beside = 0; /* then there is one algorithm */
    assert_ok(gemm_table_write(&text, &bytes, &table));
    assert_non_null(strstr(text, " beside=0 id=66 "));
    assert_non_null(strstr(text, " sm=0 us=31.40\n"));
    mem_free(&text);
    gemm_table_release(&table);
}

static void entries_are_found_by_every_part_of_their_key(void **state)
{
    (void)state;
    uint64_t random = test_seed();
    struct gemm_table table = random_table(&random, 50);
    for (int i = 0; i < table.count; i++) {
        struct gemm_key key = table.entries[i].key;
        assert_ptr_equal(gemm_table_find(&table, &key), &table.entries[i]);
        key.beside += 1000;
        assert_null(gemm_table_find(&table, &key));
        key = table.entries[i].key;
        key.add = !key.add;
        assert_null(gemm_table_find(&table, &key));
        key = table.entries[i].key;
        key.T += 1000;
        assert_null(gemm_table_find(&table, &key));
    }
    gemm_table_release(&table);
}

static void an_entry_serves_the_rows_up_to_its_own(void **state)
{
    (void)state;
    static const int64_t rows[][2] = {{1, 128}, {128, 128}, {129, 256}, {2752, 2816}, {2816, 2816}};
    uint64_t random = test_seed();
    struct gemm_key key = entry_of(&random, 1).key;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct gemm_key want = key;
        key.T = rows[i][0];
        want.T = rows[i][1];
        key = gemm_serving_key(&key);
        assert_memory_equal(&key, &want, sizeof key);
    }
}

static void a_full_plan_says_so(void **state)
{
    (void)state;
    uint64_t random = test_seed();
    struct gemm_table table = random_table(&random, GEMM_TABLE_MAX);
    struct gemm_entry e = entry_of(&random, GEMM_TABLE_MAX + 1);
    assert_fails(gemm_table_add(&table, &e), ST_INVALID, "at most 4096 products");
    gemm_table_release(&table);
}

static void out_of_memory_leaves_nothing_behind(void **state)
{
    (void)state;
    uint64_t random = test_seed();
    struct gemm_table table = random_table(&random, 40), back = {0};
    char *text = NULL;
    size_t bytes = 0;
    assert_ok(gemm_table_write(&text, &bytes, &table));
    enum status st = ST_MEMORY;
    for (int64_t k = 1; st != ST_OK; k++) {
        mem_fail_at(k);
        st = gemm_table_read(&back, text, bytes, "plan");
        mem_fail_at(0);
        assert_true(st == ST_OK || (st == ST_MEMORY && back.entries == NULL && back.count == 0));
    }
    gemm_table_release(&back);
    gemm_table_release(&table);
    mem_free(&text);
}

/* ---- cards and files ------------------------------------------------------------------------- */

static void cards_differ_in_name_size_or_library(void **state)
{
    (void)state;
    struct gemm_card other = h100;
    char text[256];
    assert_true(gemm_card_equal(&h100, &other));
    other.library++;
    assert_false(gemm_card_equal(&h100, &other));
    other = h100;
    other.multiprocessors = 114;
    assert_false(gemm_card_equal(&h100, &other));
    other = h100;
    other.name[7] = 'A';
    assert_false(gemm_card_equal(&h100, &other));
    gemm_card_text(text, sizeof text, &h100);
    assert_string_equal(text, "NVIDIA H100 80GB HBM3, 132 multiprocessors, cuBLASLt 130100");
}

static void the_file_is_named_after_the_card(void **state)
{
    (void)state;
    struct gemm_card odd = {"../A 100/\\$(x)", 108, 120800};
    char path[256];
    assert_ok(gemm_table_path(path, sizeof path, "dir", &h100));
    assert_string_equal(path, "dir/gemm-NVIDIA-H100-80GB-HBM3-132-130100.txt");
    assert_ok(gemm_table_path(path, sizeof path, "dir", &odd));
    assert_string_equal(path, "dir/gemm-..-A-100----x--108-120800.txt");
    assert_fails(gemm_table_path(path, 20, "dir", &h100), ST_INVALID, "");
}

/* ---- text that is wrong ---------------------------------------------------------------------- */

static void refuse(const char *text, size_t bytes, const char *message)
{
    struct gemm_table table = {0};
    assert_fails(gemm_table_read(&table, text, bytes, "file"), ST_CORRUPT, message);
    assert_null(table.entries);
    assert_int_equal(table.count, 0);
    assert_int_equal(table.card.name[0], 0);
}

/* HEAD and LINE with @from replaced by @to, once. */
static void refuse_change(const char *from, const char *to, const char *message)
{
    char good[1024], bad[2048];
    snprintf(good, sizeof good, "%s%s", HEAD, LINE);
    const char *at = strstr(good, from);
    assert_non_null(at);
    snprintf(bad, sizeof bad, "%.*s%s%s", (int)(at - good), good, to, at + strlen(from));
    refuse(bad, strlen(bad), message);
}

static void a_plan_of_another_version_is_no_damage(void **state)
{
    (void)state;
    struct gemm_table table = {0};
    static const char older[] = "tessera gemm plan 2\ncard NVIDIA H100 80GB HBM3\n";
    assert_fails(gemm_table_read(&table, older, sizeof older - 1, "file"), ST_UNSUPPORTED,
                 "file:1: a GEMM plan of version 2, not 3");
}

static void wrong_text_is_named_by_line(void **state)
{
    (void)state;
    char twice[2048], longest[1200];
    refuse("", 0, "file:1: the text ends");
    refuse("tessera gemm plan 3", 19, "file:1: the text ends");
    refuse_change("gemm plan", "plan", "file:1: expected tessera gemm plan 3, found");
    refuse_change("card NVIDIA", "curd NVIDIA", "file:2: expected card, found \"curd\"");
    refuse_change("card NVIDIA H100 80GB HBM3", "card ", "file:2: expected the card's name");
    refuse_change("multiprocessors 132", "multiprocessors 0", "file:3: expected a number of at");
    refuse_change("multiprocessors 132", "multiprocessors", "file:3: expected a number of at");
    refuse_change("library 130100", "library 13.1", "file:4: expected a number of at least 1");
    refuse_change("forward", "sideways", "file:5: expected forward, data or weight, found");
    refuse_change("bf16", "fp8", "file:5: expected fp32 or bf16, found \"fp8\"");
    refuse_change("bf16", "int32", "file:5: expected fp32 or bf16");
    refuse_change("T=2816", "T=0", "file:5: expected T from 1 to 1073741824, found \"0\"");
    refuse_change("T=2816", "T=99999999999999999999", "expected T from 1");
    refuse_change("T=2816 N=3072", "N=3072 T=2816", "expected T=NUMBER, found \"N=3072\"");
    refuse_change("add=0", "add=2", "expected add from 0 to 1");
    refuse_change("align=256", "align=96", "expected align as a power of two");
    refuse_change("align=256", "align=0", "expected align as a power of two");
    refuse_change("align=256", "align=512", "expected align from 0 to 256");
    refuse_change("id=66", "id=-1", "expected id from 0 to 4294967295, found \"-1\"");
    refuse_change("id=66", "id=4294967296", "expected id from 0");
    refuse_change("id=66", "id=66x", "expected id from 0");
    refuse_change(" cluster=7", "", "expected cluster=NUMBER, found \"sm=0\"");
    refuse_change(" cluster=14", "", "expected cluster=NUMBER, found \"sm=116\"");
    refuse_change("id=67", "id=67x", "expected id from 0");
    refuse_change("beside=16", "beside=0", "expected the end of the line, found \"id=67 ");
    refuse_change("us=31.40", "us=nan", "expected us from 0 to 1e9");
    refuse_change("us=31.40", "us=-1", "expected us from 0 to 1e9");
    refuse_change("us=31.40", "us=31.40 more", "expected id=NUMBER, found \"more\"");
    refuse_change("us=35.70", "us=35.70 more", "expected the end of the line, found \"more\"");
    refuse_change("us=35.70\n", "us=35.70", "file:5: the text ends before the line does");
    refuse_change("us=35.70\n", "us=35.70\n\n", "file:6: expected forward, data or weight");
    refuse_change("us=31.40", "us=31.40\r", "is no printable ASCII");
    refuse_change("NVIDIA", "NVID\xC3\x84", "file:2: byte 10 is no printable ASCII");
    snprintf(twice, sizeof twice, "%s%s%s", HEAD, LINE, LINE);
    refuse(twice, strlen(twice), "file:6: a product that was there before");
    snprintf(longest, sizeof longest, "card %0200d", 0);
    refuse_change("card NVIDIA H100 80GB HBM3", longest, "expected the card's name, 1 to 127");
    snprintf(longest, sizeof longest, "T=%0800d", 1);
    refuse_change("T=2816", longest, "file:5: a line of");
}

static void more_products_than_a_plan_holds_are_refused(void **state)
{
    (void)state;
    uint64_t random = test_seed();
    struct gemm_table table = random_table(&random, GEMM_TABLE_MAX);
    char *text = NULL, *more = NULL;
    size_t bytes = 0;
    assert_ok(gemm_table_write(&text, &bytes, &table));
    assert_ok(mem_alloc(&more, bytes + sizeof LINE));
    memcpy(more, text, bytes);
    memcpy(more + bytes, LINE, sizeof LINE);
    refuse(more, bytes + sizeof LINE - 1, "more than 4096 products");
    mem_free(&more);
    mem_free(&text);
    gemm_table_release(&table);
}

/* Any cut and any changed byte: read or refused, nothing else. */
static void damaged_text_does_no_harm(void **state)
{
    (void)state;
    uint64_t random = test_seed();
    struct gemm_table table = random_table(&random, 6), back = {0};
    char *text = NULL, *exact = NULL;
    size_t bytes = 0;
    assert_ok(gemm_table_write(&text, &bytes, &table));
    size_t first_line = (size_t)(strchr(text, '\n') - text);
    for (size_t cut = 0; cut < bytes; cut++) { /* in memory that ends where the text does */
        assert_ok(mem_alloc(&exact, cut));
        if (cut > 0)
            memcpy(exact, text, cut);
        enum status st = gemm_table_read(&back, exact, cut, "cut");
        assert_true(st == ST_CORRUPT || (st == ST_OK && cut > 0 && text[cut - 1] == '\n'));
        gemm_table_release(&back);
        mem_free(&exact);
    }
    for (int i = 0; i < 4000; i++) {
        size_t at = test_random(&random) % bytes;
        char was = text[at];
        text[at] = (char)test_random(&random);
        enum status st = gemm_table_read(&back, text, bytes, "changed");
        bool version = st == ST_UNSUPPORTED && at <= first_line; /* or two lines are one */
        assert_true(st == ST_OK || st == ST_CORRUPT || version);
        assert_true(back.count <= 6);
        gemm_table_release(&back);
        text[at] = was;
    }
    mem_free(&text);
    gemm_table_release(&table);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(a_plan_comes_back_from_its_text, release),
        cmocka_unit_test_teardown(the_text_is_what_the_header_says, release),
        cmocka_unit_test_teardown(entries_are_found_by_every_part_of_their_key, release),
        cmocka_unit_test(an_entry_serves_the_rows_up_to_its_own),
        cmocka_unit_test_teardown(a_full_plan_says_so, release),
        cmocka_unit_test_teardown(out_of_memory_leaves_nothing_behind, release),
        cmocka_unit_test_teardown(cards_differ_in_name_size_or_library, release),
        cmocka_unit_test_teardown(the_file_is_named_after_the_card, release),
        cmocka_unit_test(a_plan_of_another_version_is_no_damage),
        cmocka_unit_test_teardown(wrong_text_is_named_by_line, release),
        cmocka_unit_test_teardown(more_products_than_a_plan_holds_are_refused, release),
        cmocka_unit_test_teardown(damaged_text_does_no_harm, release),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
