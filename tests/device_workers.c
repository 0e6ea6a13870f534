/* engine/device/workers.h: every part once, by as many threads as there are. */
#include <stdatomic.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/device/workers.h"
#include "tests/support/support.h"

enum { THREADS = 5, PARTS = 200 };

struct seen {
    atomic_int times[PARTS];
    atomic_int inside[THREADS]; /* bodies at work with this index */
    atomic_int shared, strange; /* two at once with one index; an index that is none */
    int threads;
};

static void note(void *context, int64_t part, int worker)
{
    struct seen *s = context;
    if (worker < 0 || worker >= s->threads) {
        atomic_fetch_add(&s->strange, 1);
        return;
    }
    if (atomic_fetch_add(&s->inside[worker], 1) != 0)
        atomic_fetch_add(&s->shared, 1);
    atomic_fetch_add(&s->times[part], 1);
    atomic_fetch_sub(&s->inside[worker], 1);
}

static void every_part_runs_once_whatever_the_threads(void **state)
{
    (void)state;
    static struct seen seen;
    const int64_t parts[] = {0, 1, 2, 3, 17, PARTS};
    for (int threads = 1; threads <= THREADS; threads++) {
        struct workers *w;
        assert_ok(workers_open(&w, threads));
        assert_true((w == NULL) == (threads == 1));
        for (int round = 0; round < 300; round++) {
            int64_t n = parts[round % 6];
            memset(&seen, 0, sizeof seen);
            seen.threads = threads;
            workers_run(w, note, &seen, n);
            for (int64_t i = 0; i < PARTS; i++)
                assert_int_equal(atomic_load(&seen.times[i]), i < n);
            assert_int_equal(atomic_load(&seen.shared), 0);
            assert_int_equal(atomic_load(&seen.strange), 0);
        }
        workers_close(&w);
        assert_null(w);
        workers_close(&w);
    }
}

static void a_failed_start_leaves_nothing(void **state)
{
    (void)state;
    struct workers *w;
    int64_t before = mem_live_bytes();
    for (int k = 1; k <= 2; k++) {
        mem_fail_at(k);
        assert_status_is(workers_open(&w, 3), ST_MEMORY, "an allocation", __FILE__, __LINE__);
        mem_fail_at(0);
        assert_null(w);
        assert_int_equal(mem_live_bytes(), before);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_part_runs_once_whatever_the_threads),
        cmocka_unit_test(a_failed_start_leaves_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
