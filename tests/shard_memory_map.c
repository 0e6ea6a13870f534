/* shard/memory_map.h against a list of all uses, and how much it looks at. */
#include <string.h>

#include "shard/memory_map.h"
#include "tests/support/support.h"

enum { RANGES = 60, USES = 200, ROUNDS = 200 };

static int draw(uint64_t *random, int below)
{
    return (int)(test_random(random) % (uint64_t)below);
}

static void the_last_use_is_that_of_a_search_through_all(void **state)
{
    uint64_t random = test_seed();
    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        struct memory_map map = {0};
        struct memory_range ranges[RANGES];
        int used[USES], stream[USES], count = 1 + draw(&random, RANGES);
        for (int i = 0; i < count; i++) {
            ranges[i].begin = 256 * (size_t)draw(&random, 100);
            ranges[i].end = ranges[i].begin + 256 * (size_t)(1 + draw(&random, 30));
        }
        assert_ok(memory_map_init(&map, ranges, count));
        for (int n = 0; n < USES; n++) {
            int last[PROGRAM_STREAMS], want[PROGRAM_STREAMS] = {-1, -1, -1, -1};
            struct memory_range asked = ranges[draw(&random, count)];
            for (int i = 0; i < n; i++)
                if (ranges[used[i]].begin < asked.end && asked.begin < ranges[used[i]].end)
                    want[stream[i]] = i;
            memory_map_last(&map, asked, last);
            assert_memory_equal(last, want, sizeof want);
            used[n] = draw(&random, count);
            stream[n] = draw(&random, PROGRAM_STREAMS);
            memory_map_use(&map, ranges[used[n]], (enum program_stream)stream[n], n);
        }
        memory_map_release(&map);
        memory_map_release(&map);
    }
}

/* Buffers that all had the same memory are what made planning quadratic. */
static void the_work_of_a_use_does_not_grow_with_the_buffers_before_it(void **state)
{
    static struct memory_range ranges[1 << 14];
    (void)state;
    for (int count = 1 << 8; count <= 1 << 14; count *= 4) {
        struct memory_map map = {0};
        int last[PROGRAM_STREAMS], bits = 0;
        while (1 << bits < 2 * count)
            bits++;
        for (int i = 0; i < count; i++) {
            ranges[i].begin = 256 * (size_t)(i % 97);
            ranges[i].end = ranges[i].begin + 256 * (size_t)(1 + i);
        }
        assert_ok(memory_map_init(&map, ranges, count));
        for (int i = 0; i < count; i++) {
            memory_map_last(&map, ranges[i], last);
            memory_map_use(&map, ranges[i], ON_COMPUTE, i);
        }
        assert_true(map.visited <= (int64_t)count * 8 * bits);
        memory_map_release(&map);
    }
}

static void failed_allocations_leave_nothing(void **state)
{
    struct memory_map map = {0};
    struct memory_range one = {0, 256};
    int64_t before = mem_live_bytes();
    (void)state;
    for (int k = 1; k <= 2; k++) {
        mem_fail_at(k);
        enum status st = memory_map_init(&map, &one, 1);
        mem_fail_at(0);
        assert_int_equal(st, ST_MEMORY);
        assert_int_equal(mem_live_bytes(), before);
    }
    assert_ok(memory_map_init(&map, NULL, 0));
    memory_map_release(&map);
    assert_int_equal(mem_live_bytes(), before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_last_use_is_that_of_a_search_through_all),
        cmocka_unit_test(the_work_of_a_use_does_not_grow_with_the_buffers_before_it),
        cmocka_unit_test(failed_allocations_leave_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
