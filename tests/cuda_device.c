/* The CUDA device layer. Skipped where no GPU is visible, but for what such a machine must say. */
#include <stdbool.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/device/device.h"
#include "tests/support/support.h"

static struct device *gpu;

#define NEEDS_GPU()                                                                                \
    do {                                                                                           \
        if (gpu == NULL)                                                                           \
            skip();                                                                                \
    } while (0)

static int open_gpu(void **state)
{
    (void)state;
    if (device_cuda_count() > 0)
        assert_ok(device_open(&gpu, DEVICE_CUDA, PRECISION_AUTO, 0, 1));
    return 0;
}

static int close_gpu(void **state)
{
    (void)state;
    device_close(&gpu);
    return 0;
}

static struct stream *stream(enum stream_id id)
{
    return &gpu->streams[id];
}

static void a_gpu_that_is_not_there_is_unsupported(void **state)
{
    (void)state;
    struct device *device = NULL;
    assert_fails(device_open(&device, DEVICE_CUDA, PRECISION_AUTO, device_cuda_count(), 1),
                 ST_UNSUPPORTED, "has no GPU");
    assert_null(device);
}

static void a_device_says_what_it_is(void **state)
{
    (void)state;
    NEEDS_GPU();
    assert_string_equal(gpu->ops->name, "cuda");
    assert_int_equal(gpu->param_dtype, DTYPE_BF16);
    assert_true(gpu->fixed_rows);
    assert_true(strlen(gpu->name) > 0);
    assert_true(gpu->context_bytes > 0);
    int direct = -1, others = -1;
    device_cuda_peers(0, &direct, &others);
    assert_int_equal(others, device_cuda_count() - 1);
    assert_in_range(direct, 0, others);
    struct device *fp32 = NULL;
    assert_ok(device_open(&fp32, DEVICE_AUTO, PRECISION_FP32, 0, 1));
    assert_int_equal(fp32->param_dtype, DTYPE_F32);
    device_close(&fp32);
}

static void memory_is_aligned_zeroed_and_accounted(void **state)
{
    (void)state;
    NEEDS_GPU();
    const size_t bytes = (size_t)256 << 20;
    size_t before = 0, during = 0, after = 0, free_before = 0, free_during = 0;
    void *memory = NULL, *nothing = &nothing;
    unsigned char host[64];
    memset(host, 1, sizeof host);
    assert_ok(device_memory_used(gpu, &before));
    assert_ok(device_memory_free(gpu, &free_before));
    assert_ok(device_alloc(gpu, &memory, bytes));
    assert_ok(device_memory_free(gpu, &free_during));
    assert_true(free_before - free_during >= bytes);
    assert_int_equal((uintptr_t)memory % ARENA_ALIGN, 0);
    assert_ok(device_memory_used(gpu, &during));
    assert_true(during - before >= bytes);
    assert_true(during - before <= bytes + ((size_t)64 << 20));
    assert_ok(device_copy(stream(STREAM_COPY), host, (char *)memory + bytes - 64, 64));
    assert_ok(stream_sync(stream(STREAM_COPY)));
    for (int i = 0; i < 64; i++)
        assert_int_equal(host[i], 0);
    device_free(gpu, &memory);
    assert_null(memory);
    assert_ok(device_memory_used(gpu, &after));
    assert_true(after < during);
    assert_ok(device_alloc(gpu, &nothing, 0));
    assert_null(nothing);
    assert_fails(device_alloc(gpu, &memory, (size_t)1 << 50), ST_MEMORY, "cannot give");
    assert_ok(device_alloc(gpu, &memory, 1)); /* and it goes on */
    device_free(gpu, &memory);
}

static void copies_and_fills_arrive(void **state)
{
    (void)state;
    NEEDS_GPU();
    enum { N = 100003 };
    void *pinned = NULL, *device_memory = NULL, *twin = NULL;
    uint64_t random = test_seed();
    assert_ok(device_alloc_host(gpu, &pinned, 2 * N));
    assert_ok(device_alloc(gpu, &device_memory, N));
    assert_ok(device_alloc(gpu, &twin, N));
    unsigned char *in = pinned, *back = in + N;
    for (int i = 0; i < N; i++)
        in[i] = (unsigned char)test_random(&random);
    struct stream *s = stream(STREAM_COMPUTE);
    assert_ok(device_copy(s, device_memory, in, N));
    assert_ok(device_copy(s, twin, device_memory, N));
    assert_ok(device_fill(s, (char *)twin + 5, 0xAB, 1000));
    assert_ok(device_copy(s, back, twin, N));
    assert_ok(stream_sync(s));
    memset(in + 5, 0xAB, 1000);
    assert_memory_equal(in, back, N);
    /* A kernel fills little; this much is the driver's. */
    assert_ok(device_fill(s, (char *)twin + 3, 0xCD, N - 10));
    assert_ok(device_copy(s, back, twin, N));
    assert_ok(stream_sync(s));
    memset(in + 3, 0xCD, N - 10);
    assert_memory_equal(in, back, N);
    device_free(gpu, &twin);
    device_free(gpu, &device_memory);
    device_free_host(gpu, &pinned);
}

/* A long chain of copies on one stream, and another stream that must see its end. */
static void events_order_streams_and_the_host(void **state)
{
    (void)state;
    NEEDS_GPU();
    const size_t bytes = (size_t)64 << 20;
    void *a = NULL, *b = NULL, *pinned = NULL;
    struct event filled = {0}, copied = {0};
    assert_ok(device_alloc(gpu, &a, bytes));
    assert_ok(device_alloc(gpu, &b, bytes));
    assert_ok(device_alloc_host(gpu, &pinned, 1));
    assert_ok(event_open(gpu, &filled));
    assert_ok(event_open(gpu, &copied));
    for (int round = 1; round <= 5; round++) {
        for (int i = 0; i < 20; i++)
            assert_ok(device_fill(stream(STREAM_COMPUTE), a, 100 + i, bytes));
        assert_ok(device_fill(stream(STREAM_COMPUTE), a, round, bytes));
        assert_ok(event_record(&filled, stream(STREAM_COMPUTE)));
        assert_ok(stream_wait(stream(STREAM_GATHER), &filled));
        assert_ok(device_copy(stream(STREAM_GATHER), b, a, bytes));
        assert_ok(device_copy(stream(STREAM_GATHER), pinned, (char *)b + bytes - 1, 1));
        assert_ok(event_record(&copied, stream(STREAM_GATHER)));
        assert_ok(stream_wait(stream(STREAM_COMPUTE), &copied));
        bool ready = round % 2 == 0;
        while (!ready) /* or wait for it */
            assert_ok(event_query(&copied, &ready));
        assert_ok(event_wait(&copied));
        assert_int_equal(*(unsigned char *)pinned, round);
    }
    event_close(&filled);
    event_close(&copied);
    event_close(&copied); /* twice is fine */
    device_free_host(gpu, &pinned);
    device_free(gpu, &b);
    device_free(gpu, &a);
}

/* compute: a -> b, mark; reduce (joined by events): c -> d, mark; compute waits for it: b -> e. */
static void a_captured_piece_spans_streams_and_replays(void **state)
{
    (void)state;
    NEEDS_GPU();
    enum { N = 4096 };
    char *memory = NULL, *pinned = NULL;
    void *p = NULL;
    struct event fork = {0}, join = {0};
    struct device_timer begin = {0}, end = {0};
    struct graph *graph = NULL;
    double ms = -1;
    struct stream *c = stream(STREAM_COMPUTE), *r = stream(STREAM_REDUCE);
    assert_ok(device_alloc(gpu, &p, 4 * N));
    memory = p;
    assert_ok(device_alloc_host(gpu, &p, 2 * N));
    pinned = p;
    assert_ok(event_open(gpu, &fork));
    assert_ok(event_open(gpu, &join));
    assert_ok(device_timer_open(gpu, &begin));
    assert_ok(device_timer_open(gpu, &end));

    assert_ok(stream_capture_begin(c));
    assert_ok(device_timer_record(&begin, c));
    assert_ok(device_copy(c, memory, pinned, N));
    assert_ok(event_record(&fork, c));
    assert_ok(stream_wait(r, &fork));
    assert_ok(device_copy(r, memory + N, memory, N));
    assert_ok(device_mark(r, 7));
    assert_ok(event_record(&join, r));
    assert_ok(device_fill(c, memory + 2 * N, 9, N));
    assert_ok(stream_wait(c, &join));
    assert_ok(device_copy(c, pinned + N, memory + N, N));
    assert_ok(device_mark(c, 3));
    assert_ok(device_timer_record(&end, c));
    assert_ok(stream_capture_end(c, &graph));

    assert_int_equal(device_progress(gpu, STREAM_REDUCE), 0); /* recorded, not run */
    for (int round = 1; round <= 3; round++) {
        memset(pinned, round, N);
        assert_ok(graph_launch(c, graph));
        assert_ok(event_record(&fork, c));
        assert_ok(event_wait(&fork));
        for (int i = 0; i < N; i++)
            assert_int_equal(pinned[N + i], round);
        assert_int_equal(device_progress(gpu, STREAM_COMPUTE), 3);
        assert_int_equal(device_progress(gpu, STREAM_REDUCE), 7);
        assert_ok(device_timer_elapsed_ms(&begin, &end, &ms));
        assert_true(ms > 0 && ms < 1000);
    }
    assert_ok(device_mark(c, 4)); /* also outside of a graph */
    assert_ok(stream_sync(c));
    assert_int_equal(device_progress(gpu, STREAM_COMPUTE), 4);

    graph_close(&graph);
    assert_null(graph);
    device_timer_close(&begin);
    device_timer_close(&end);
    event_close(&fork);
    event_close(&join);
    p = pinned;
    device_free_host(gpu, &p);
    p = memory;
    device_free(gpu, &p);
}

static void replays_take_no_more_memory(void **state)
{
    (void)state;
    NEEDS_GPU();
    void *memory = NULL;
    struct graph *graph = NULL;
    size_t before = 0, after = 0;
    struct stream *c = stream(STREAM_COMPUTE);
    assert_ok(device_alloc(gpu, &memory, 1 << 20));
    assert_ok(stream_capture_begin(c));
    for (int i = 0; i < 500; i++)
        assert_ok(device_mark(c, (uint32_t)i));
    assert_ok(stream_capture_end(c, &graph));
    assert_ok(device_memory_used(gpu, &before));
    for (int i = 0; i < 50; i++)
        assert_ok(graph_launch(c, graph));
    assert_ok(stream_sync(c));
    assert_ok(device_memory_used(gpu, &after));
    assert_int_equal(before, after);
    assert_int_equal(device_progress(gpu, STREAM_COMPUTE), 499); /* marks keep their order */
    graph_close(&graph);
    device_free(gpu, &memory);
}

static void a_broken_capture_is_an_error_and_the_stream_goes_on(void **state)
{
    (void)state;
    NEEDS_GPU();
    void *memory = NULL;
    struct event fork = {0};
    struct graph *graph = NULL;
    struct stream *c = stream(STREAM_COMPUTE), *r = stream(STREAM_REDUCE);
    assert_ok(device_alloc(gpu, &memory, 256));
    assert_ok(event_open(gpu, &fork));
    assert_ok(stream_capture_begin(c));
    assert_ok(event_record(&fork, c));
    assert_ok(stream_wait(r, &fork));
    assert_ok(device_mark(r, 1));
    assert_ok(device_fill(r, memory, 0, 256)); /* never joined */
    assert_int_equal(stream_capture_end(c, &graph), ST_DEVICE);
    assert_null(graph);
    assert_ok(device_mark(c, 21));
    assert_ok(stream_sync(c));
    assert_int_equal(device_progress(gpu, STREAM_COMPUTE), 21);
    event_close(&fork);
    device_free(gpu, &memory);
}

static void timers_measure_the_stream(void **state)
{
    (void)state;
    NEEDS_GPU();
    const size_t bytes = (size_t)256 << 20;
    void *memory = NULL;
    struct device_timer t[3] = {{0}};
    double few = 0, many = 0;
    struct stream *c = stream(STREAM_COMPUTE);
    assert_ok(device_alloc(gpu, &memory, bytes));
    for (int i = 0; i < 3; i++)
        assert_ok(device_timer_open(gpu, &t[i]));
    assert_int_equal(device_timer_elapsed_ms(&t[0], &t[1], &few), ST_DEVICE);
    assert_ok(device_fill(c, memory, 0, bytes));
    assert_ok(device_timer_record(&t[0], c));
    for (int i = 0; i < 2; i++)
        assert_ok(device_fill(c, memory, 1, bytes));
    assert_ok(device_timer_record(&t[1], c));
    for (int i = 0; i < 20; i++)
        assert_ok(device_fill(c, memory, 2, bytes));
    assert_ok(device_timer_record(&t[2], c));
    assert_ok(device_timer_elapsed_ms(&t[1], &t[2], &many));
    assert_ok(device_timer_elapsed_ms(&t[0], &t[1], &few));
    assert_true(many > 3 * few);
    for (int i = 0; i < 3; i++)
        device_timer_close(&t[i]);
    device_free(gpu, &memory);
}

struct watch_log {
    int calls;
    int64_t waited_ms;
    bool fail;
};

static enum status note_watch(void *context, int64_t waited_ms)
{
    struct watch_log *log = context;
    log->calls++;
    if (waited_ms > log->waited_ms) /* the last call of a wait that ended says 0 */
        log->waited_ms = waited_ms;
    return log->fail ? FAIL(COMM, "a peer is gone") : ST_OK;
}

static void host_waits_are_watched_and_may_be_ended(void **state)
{
    (void)state;
    NEEDS_GPU();
    const size_t bytes = (size_t)1 << 30;
    void *memory = NULL;
    struct watch_log log = {0};
    struct stream *c = stream(STREAM_COMPUTE);
    assert_ok(device_alloc(gpu, &memory, bytes));
    gpu->watch = note_watch;
    gpu->watch_context = &log;
    for (int i = 0; i < 200; i++) /* some 100 ms */
        assert_ok(device_fill(c, memory, i, bytes));
    assert_ok(stream_sync(c));
    assert_true(log.calls > 0);
    assert_true(log.waited_ms > 0);
    log.fail = true;
    for (int i = 0; i < 200; i++)
        assert_ok(device_fill(c, memory, i, bytes));
    assert_fails(stream_sync(c), ST_COMM, "a peer is gone");
    gpu->watch = NULL;
    assert_ok(stream_sync(c));
    device_free(gpu, &memory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_gpu_that_is_not_there_is_unsupported),
        cmocka_unit_test(a_device_says_what_it_is),
        cmocka_unit_test(memory_is_aligned_zeroed_and_accounted),
        cmocka_unit_test(copies_and_fills_arrive),
        cmocka_unit_test(events_order_streams_and_the_host),
        cmocka_unit_test(a_captured_piece_spans_streams_and_replays),
        cmocka_unit_test(replays_take_no_more_memory),
        cmocka_unit_test(a_broken_capture_is_an_error_and_the_stream_goes_on),
        cmocka_unit_test(timers_measure_the_stream),
        cmocka_unit_test(host_waits_are_watched_and_may_be_ended),
    };
    return cmocka_run_group_tests(tests, open_gpu, close_gpu);
}
