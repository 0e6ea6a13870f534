/* engine/device/device.h on the CPU. */
#include <string.h>
#include <sys/mman.h>

#include "engine/base/arena.h"
#include "engine/device/device.h"
#include "engine/device/host_memory.h"
#include "tests/support/support.h"

static void opens_with_a_name_and_streams(void **state)
{
    (void)state;
    struct device *device;
    size_t bytes;
    assert_ok(device_open(&device, DEVICE_CPU, PRECISION_AUTO, 3, 1));
    assert_string_equal(device->ops->name, "cpu");
    assert_true(strlen(device->name) > 0);
    assert_int_equal(device->param_dtype, DTYPE_F32);
    for (int i = 0; i < STREAM_COUNT; i++) {
        assert_ptr_equal(device->streams[i].device, device);
        assert_int_equal(device->streams[i].id, i);
    }
    assert_true(device->context_bytes > 0);
    assert_ok(device_memory_used(device, &bytes));
    assert_true(bytes > 0);
    device_close(&device);
    assert_null(device);
    device_close(&device);
}

static void what_it_cannot_do_is_said(void **state)
{
    (void)state;
    struct device *device;
    struct graph *graph;
    assert_fails(device_open(&device, DEVICE_CPU, PRECISION_BF16, 0, 1), ST_UNSUPPORTED, "fp32");
    assert_null(device);
    assert_ok(device_open(&device, DEVICE_CPU, PRECISION_FP32, 0, 1));
    struct stream *s = &device->streams[STREAM_COMPUTE];
    assert_fails(stream_capture_begin(s), ST_UNSUPPORTED, "capture");
    assert_fails(stream_capture_end(s, &graph), ST_UNSUPPORTED, "capture");
    assert_null(graph);
    graph_close(&graph);
    device_close(&device);
    mem_fail_at(1);
    assert_status_is(device_cpu_open(&device, 1), ST_MEMORY, "first allocation", __FILE__,
                     __LINE__);
    mem_fail_at(2);
    assert_status_is(device_cpu_open(&device, 1), ST_MEMORY, "second allocation", __FILE__,
                     __LINE__);
    mem_fail_at(0);
    assert_int_equal(mem_live_bytes(), 0);
}

static void memory_is_aligned_copied_and_filled(void **state)
{
    (void)state;
    struct device *device;
    void *a, *b, *none;
    assert_ok(device_open(&device, DEVICE_CPU, PRECISION_AUTO, 0, 1));
    struct stream *s = &device->streams[STREAM_COPY];
    assert_ok(device_alloc(device, &a, 1000));
    assert_ok(device_alloc_host(device, &b, 1000));
    assert_ok(device_alloc(device, &none, 0));
    assert_true((uintptr_t)a % ARENA_ALIGN == 0);
    assert_ok(device_fill(s, a, 0x5A, 1000));
    assert_ok(device_copy(s, b, a, 1000));
    assert_ok(device_copy(s, none, none, 0));
    assert_ok(stream_sync(s));
    assert_memory_equal(a, b, 1000);
    device_free(device, &a);
    device_free_host(device, &b);
    device_free(device, &none);
    assert_null(a);
    device_close(&device);
    assert_int_equal(mem_live_bytes(), 0);
}

struct collective {
    int completed;
    uint64_t ticket;
    enum status result;
};

static enum status complete(void *context, uint64_t ticket)
{
    struct collective *c = context;
    c->completed++;
    c->ticket = ticket;
    return c->result;
}

static void a_pending_event_completes_once_when_waited_for(void **state)
{
    (void)state;
    struct device *device;
    struct collective c = {.result = ST_TIMEOUT};
    struct event plain, done = {.complete = complete, .context = &c, .ticket = 9};
    assert_ok(device_open(&device, DEVICE_CPU, PRECISION_AUTO, 0, 1));
    struct stream *s = &device->streams[STREAM_COMPUTE];
    assert_ok(event_open(device, &plain));
    assert_ok(event_record(&plain, s));
    assert_ok(stream_wait(s, &plain));
    assert_ok(event_wait(&plain));
    bool ready = false;
    assert_ok(event_query(&plain, &ready));
    assert_true(ready);
    assert_int_equal(stream_wait(s, &done), ST_TIMEOUT); /* a failure stays pending */
    c.result = ST_OK;
    assert_ok(stream_wait(s, &done));
    assert_ok(event_wait(&done));
    assert_int_equal(c.completed, 2);
    assert_int_equal(c.ticket, 9);
    event_close(&done);
    event_close(&plain);
    device_close(&device);
}

static void marks_and_timers(void **state)
{
    (void)state;
    struct device *device;
    struct device_timer begin, end;
    double ms;
    assert_ok(device_open(&device, DEVICE_CPU, PRECISION_AUTO, 0, 1));
    struct stream *s = &device->streams[STREAM_REDUCE];
    assert_int_equal(device_progress(device, STREAM_REDUCE), 0);
    assert_ok(device_mark(s, 17));
    assert_int_equal(device_progress(device, STREAM_REDUCE), 17);
    assert_int_equal(device_progress(device, STREAM_GATHER), 0);
    assert_ok(device_timer_open(device, &begin));
    assert_ok(device_timer_open(device, &end));
    assert_fails(device_timer_elapsed_ms(&begin, &end, &ms), ST_DEVICE, "never recorded");
    assert_ok(device_timer_record(&begin, s));
    assert_ok(device_timer_record(&end, s));
    assert_ok(device_timer_elapsed_ms(&begin, &end, &ms));
    assert_true(ms >= 0.0);
    device_timer_close(&begin);
    device_timer_close(&begin);
    device_timer_close(&end);
    device_close(&device);
}

/* A run that has its memory does not lose it in the midst of a step. */
static void large_memory_has_its_pages_at_once(void **state)
{
    (void)state;
    const size_t bytes = ((size_t)100 << 20) + 12345;
    for (int threads = 1; threads <= 3; threads += 2) {
        struct device *device;
        void *memory;
        size_t before, after;
        assert_ok(device_open(&device, DEVICE_CPU, PRECISION_AUTO, 0, threads));
        assert_ok(device_memory_used(device, &before));
        assert_ok(device_alloc(device, &memory, bytes));
        assert_ok(device_memory_used(device, &after));
        assert_true(after >= before + bytes - (1 << 20));
        assert_true(after <= before + bytes + (1 << 20));
        for (size_t i = 0; i < bytes; i += 997)
            assert_int_equal(((const char *)memory)[i], 0);
        device_free(device, &memory);
        device_close(&device);
    }
}

static void populating_keeps_what_is_there_and_fails_where_nothing_can_be(void **state)
{
    (void)state;
    const size_t bytes = (size_t)40 << 20, page = 4096;
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(memory, MAP_FAILED);
    memory[0] = memory[bytes - 1] = 7;
    assert_ok(host_memory_populate(NULL, memory + 1, bytes - 2));
    assert_ok(host_memory_populate(NULL, memory + 1, 0));
    assert_int_equal(memory[0], 7);
    assert_int_equal(memory[bytes - 1], 7);
    assert_int_equal(memory[bytes / 2], 0);
    assert_int_equal(munmap(memory + bytes / 2, page), 0);
    assert_fails(host_memory_populate(NULL, memory, bytes), ST_MEMORY,
                 "no pages for 41943040 bytes");
    munmap(memory, bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(opens_with_a_name_and_streams),
        cmocka_unit_test(what_it_cannot_do_is_said),
        cmocka_unit_test(memory_is_aligned_copied_and_filled),
        cmocka_unit_test(a_pending_event_completes_once_when_waited_for),
        cmocka_unit_test(marks_and_timers),
        cmocka_unit_test(large_memory_has_its_pages_at_once),
        cmocka_unit_test(populating_keeps_what_is_there_and_fails_where_nothing_can_be),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
