#include "engine/base/arena.h"

#include <stdio.h>
#include <string.h>

#include "tests/support/support.h"

struct acts {
    float *a;
    double *b;
    uint8_t *c;
};

static void acts_bind(struct arena *arena, struct acts *x, int n)
{
    ARENA_BIND(arena, x->a, n);
    ARENA_BIND(arena, x->b, n * 3);
    ARENA_BIND(arena, x->c, n % 5);
}

static void a_measuring_arena_gives_the_size_that_binding_uses(void **state)
{
    (void)state;
    for (int n = 0; n < 300; n += 7) {
        struct acts x;
        struct arena measure = {0};
        acts_bind(&measure, &x, n);
        char *block;
        assert_ok(mem_alloc(&block, measure.used + 1));
        struct arena a = arena_over(block, measure.used);
        acts_bind(&a, &x, n);
        assert_int_equal(a.used, measure.used);
        assert_int_equal((uintptr_t)x.a % ARENA_ALIGN, 0);
        assert_int_equal((uintptr_t)x.b % ARENA_ALIGN, 0);
        assert_int_equal((uintptr_t)x.c % ARENA_ALIGN, 0);
        assert_true((char *)(x.a + n) <= (char *)x.b);
        assert_true((char *)(x.b + n * 3) <= (char *)x.c);
        assert_true((char *)(x.c + n % 5) <= block + measure.used);
        mem_free(&block);
    }
}

static void overrun(void *argument)
{
    char block[512];
    struct arena a = arena_over(block, sizeof block);
    (void)arena_take(&a, *(size_t *)argument);
}

static void an_arena_that_is_too_small_asserts(void **state)
{
    (void)state;
    size_t fits = 512, too_much = 513;
    overrun(&fits);
    assert_aborts(overrun, &too_much);
}

static void memory_is_zeroed_aligned_and_counted(void **state)
{
    (void)state;
    int64_t before = mem_live_bytes();
    char *p, *none;
    assert_ok(mem_alloc(&none, 0));
    assert_null(none);
    assert_ok(mem_alloc(&p, 1000));
    assert_int_equal((uintptr_t)p % ARENA_ALIGN, 0);
    for (int i = 0; i < 1000; i++)
        assert_int_equal(p[i], 0);
    assert_int_equal(mem_live_bytes() - before, 1000);
    mem_free(&p);
    assert_null(p);
    mem_free(&p);
    assert_int_equal(mem_live_bytes(), before);
}

/* Whoever wants its pages at once says so (engine/device/host_memory.h). */
static void large_memory_is_zero_without_being_written(void **state)
{
    (void)state;
    const size_t bytes = (size_t)MEM_LARGE_BYTES + 1000;
    unsigned char *p;
    size_t before = test_resident_bytes();
    (void)before; /* sanitizers keep what is freed */
    assert_ok(mem_alloc(&p, bytes));
    assert_int_equal((uintptr_t)p % ARENA_ALIGN, 0);
    assert_int_equal(mem_live_bytes(), bytes);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    assert_true(test_resident_bytes() < before + (1 << 20));
#endif
    for (size_t i = 0; i < bytes; i += 997)
        assert_int_equal(p[i], 0);
    p[0] = p[bytes - 1] = 1;
    mem_free(&p);
    assert_null(p);
    assert_int_equal(mem_live_bytes(), 0);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    assert_true(test_resident_bytes() < before + (8 << 20));
#endif
}

static void the_peak_is_the_most_that_was_held_at_a_time(void **state)
{
    (void)state;
    char *a, *b;
    mem_peak_reset();
    int64_t before = mem_live_bytes();
    assert_int_equal(mem_peak_bytes(), before);
    assert_ok(mem_alloc(&a, 1000));
    assert_ok(mem_alloc(&b, 500));
    mem_free(&a);
    assert_ok(mem_alloc(&a, 700));
    mem_free(&a);
    mem_free(&b);
    assert_int_equal(mem_peak_bytes(), before + 1500);
    mem_peak_reset();
    assert_int_equal(mem_peak_bytes(), before);
}

static void sizes_that_overflow_are_refused(void **state)
{
    (void)state;
    char *p;
    size_t product;
    assert_fails(mem_alloc(&p, SIZE_MAX - 3), ST_MEMORY, "overflows");
    assert_null(p);
    assert_ok(checked_mul(&product, SIZE_MAX / 2, 2));
    assert_fails(checked_mul(&product, SIZE_MAX / 2 + 1, 2), ST_INVALID, "overflows");
    struct pool pool = {0};
    assert_fails(pool_take(&pool, &p, SIZE_MAX - 1), ST_MEMORY, "overflows");
    pool_release(&pool);
}

static void a_growing_array_keeps_its_contents(void **state)
{
    (void)state;
    int64_t before = mem_live_bytes();
    int *array = NULL;
    size_t capacity = 0;
    for (int i = 0; i < 1000; i++) {
        assert_ok(mem_grow(&array, &capacity, (size_t)i + 1, sizeof *array));
        assert_true(capacity > (size_t)i);
        assert_int_equal(array[i], 0);
        array[i] = i;
    }
    for (int i = 0; i < 1000; i++)
        assert_int_equal(array[i], i);
    mem_free(&array);
    assert_int_equal(mem_live_bytes(), before);
}

/* What a parser does: a growing array and texts in a pool. All it holds is gone at the end. */
static enum status build_something(void)
{
    enum status st;
    struct pool pool = {0};
    char **texts = NULL, *block = NULL;
    size_t capacity = 0;
    TRY_GOTO(st, out, mem_alloc(&block, 100));
    for (size_t i = 0; i < 100; i++) {
        TRY_GOTO(st, out, mem_grow(&texts, &capacity, i + 1, sizeof *texts));
        TRY_GOTO(st, out, pool_copy(&pool, &texts[i], "a text", 6));
        char *large;
        TRY_GOTO(st, out, pool_take(&pool, &large, i % 10 == 0 ? 50000 : 10));
    }
out:
    mem_free(&block);
    mem_free(&texts);
    pool_release(&pool);
    pool_release(&pool);
    return st;
}

static void each_failing_allocation_is_reported_and_leaks_nothing(void **state)
{
    (void)state;
    int64_t before = mem_live_bytes();
    int failures = 0;
    for (int64_t k = 1;; k++) {
        mem_fail_at(k);
        enum status st = build_something();
        mem_fail_at(0);
        assert_int_equal(mem_live_bytes(), before);
        if (st == ST_OK)
            break;
        assert_status_is(st, ST_MEMORY, "build_something()", __FILE__, __LINE__);
        failures++;
    }
    assert_in_range(failures, 10, 100);
}

static void pool_objects_do_not_overlap(void **state)
{
    (void)state;
    enum { N = 2000 };
    static unsigned char *objects[N];
    static size_t sizes[N];
    struct pool pool = {0};
    uint64_t random = test_seed();
    for (int i = 0; i < N; i++) {
        sizes[i] = test_random(&random) % (i % 100 == 0 ? 100000 : 200);
        assert_ok(pool_take(&pool, &objects[i], sizes[i]));
        assert_int_equal((uintptr_t)objects[i] % 16, 0);
        for (size_t j = 0; j < sizes[i]; j++)
            assert_int_equal(objects[i][j], 0);
        memset(objects[i], i % 251 + 1, sizes[i]);
    }
    for (int i = 0; i < N; i++) {
        for (size_t j = 0; j < sizes[i]; j++)
            assert_int_equal(objects[i][j], i % 251 + 1);
    }
    pool_release(&pool);
    assert_null(pool.head);
}

static void pool_copies_end_with_a_zero(void **state)
{
    (void)state;
    struct pool pool = {0};
    char *text;
    assert_ok(pool_copy(&pool, &text, "abcdef", 3));
    assert_string_equal(text, "abc");
    pool_release(&pool);
}

static void allocate_sealed(void *argument)
{
    char *p;
    mem_seal();
    mem_seal();
    mem_unseal();
    (void)!mem_alloc(&p, *(size_t *)argument);
}

static void pool_sealed(void *argument)
{
    char *p;
    mem_seal();
    (void)!pool_take(argument, &p, 10);
}

static void unseal_twice(void *argument)
{
    (void)argument;
    mem_seal();
    mem_unseal();
    mem_unseal();
}

static void a_sealed_thread_that_allocates_asserts(void **state)
{
    (void)state;
    size_t bytes = 1;
    struct pool pool = {0};
    assert_aborts(allocate_sealed, &bytes);
    assert_aborts(pool_sealed, &pool);
    assert_aborts(unseal_twice, NULL);
    char *p;
    mem_seal();
    mem_unseal();
    assert_ok(mem_alloc(&p, 1));
    mem_free(&p);
}

static void rounding_and_exact_division(void **state)
{
    (void)state;
    assert_int_equal(round_up(0, 128), 0);
    assert_int_equal(round_up(1, 128), 128);
    assert_int_equal(round_up(128, 128), 128);
    assert_int_equal(round_up(129, 128), 256);
    assert_int_equal(div_exact(12, 4), 3);
}

static void divide_inexactly(void *argument)
{
    printf("%lld", (long long)div_exact(*(int *)argument, 4));
}

static void inexact_division_asserts(void **state)
{
    (void)state;
    int value = 13;
    assert_aborts(divide_inexactly, &value);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_measuring_arena_gives_the_size_that_binding_uses),
        cmocka_unit_test(an_arena_that_is_too_small_asserts),
        cmocka_unit_test(memory_is_zeroed_aligned_and_counted),
        cmocka_unit_test(large_memory_is_zero_without_being_written),
        cmocka_unit_test(the_peak_is_the_most_that_was_held_at_a_time),
        cmocka_unit_test(sizes_that_overflow_are_refused),
        cmocka_unit_test(a_growing_array_keeps_its_contents),
        cmocka_unit_test(each_failing_allocation_is_reported_and_leaks_nothing),
        cmocka_unit_test(pool_objects_do_not_overlap),
        cmocka_unit_test(pool_copies_end_with_a_zero),
        cmocka_unit_test(a_sealed_thread_that_allocates_asserts),
        cmocka_unit_test(rounding_and_exact_division),
        cmocka_unit_test(inexact_division_asserts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
