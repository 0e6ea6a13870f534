#include "comm/local.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/clock.h"
#include "engine/base/rng.h"
#include "tests/support/ranks.h"
#include "tests/support/support.h"

enum { GUARD = 64, GUARD_BYTE = 0xA5, LONG = 10000, SHORT = 400 /* ms */ };

static uint64_t seed;
static struct stream streams[STREAM_COUNT] = {{.id = STREAM_COMPUTE},
                                              {.id = STREAM_GATHER},
                                              {.id = STREAM_REDUCE},
                                              {.id = STREAM_UPDATE},
                                              {.id = STREAM_COPY}};

/* ---- what the ranks send, and what must come out -------------------------------------------- */

/* Of all magnitudes, so that another order of additions gives other bits. */
static float value(int rank, int64_t i, uint64_t salt)
{
    struct philox r = philox4x32(seed, (uint32_t)i, (uint32_t)rank, (uint32_t)salt, 0);
    float x = (float)r.word[0] * 0x1p-32f - 0.5f;
    return x * (float)(1u << (r.word[1] & 15));
}

static unsigned char byte_value(int rank, int64_t i)
{
    return (unsigned char)(philox4x32(seed, (uint32_t)i, (uint32_t)rank, 7, 1).word[0] >> 8);
}

static float ordered_sum(int world_size, int64_t i, uint64_t salt)
{
    float sum = value(0, i, salt);
    for (int r = 1; r < world_size; r++)
        sum += value(r, i, salt);
    return sum;
}

static void fill(float *x, int rank, int64_t n, uint64_t salt)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = value(rank, i, salt);
}

static bool same_bits(float a, float b)
{
    return memcmp(&a, &b, sizeof a) == 0;
}

/* out[i] is the sum of element first + i of all ranks. */
static bool is_sum(const float *out, int64_t n, int64_t first, int world_size, uint64_t salt)
{
    for (int64_t i = 0; i < n; i++) {
        if (!same_bits(out[i], ordered_sum(world_size, first + i, salt)))
            return false;
    }
    return true;
}

/* A buffer whose end is watched. */
static enum status guarded(unsigned char **out, size_t bytes)
{
    TRY(mem_alloc(out, bytes + GUARD));
    memset(*out, 0xFF, bytes);
    memset(*out + bytes, GUARD_BYTE, GUARD);
    return ST_OK;
}

static bool guard_is_whole(const unsigned char *x, size_t bytes)
{
    for (size_t i = 0; i < GUARD; i++) {
        if (x[bytes + i] != GUARD_BYTE)
            return false;
    }
    return true;
}

static const int worlds[] = {1, 2, 3, 4, 8};
static const int64_t numels[] = {0, 1, 7, 127, 128, 2048, 2049, 5001};
enum { WORLDS = sizeof worlds / sizeof worlds[0], NUMELS = sizeof numels / sizeof numels[0] };

/* ---- the collectives ------------------------------------------------------------------------ */

static enum status gather_once(struct comm *comm, int64_t numel, enum dtype dtype, bool in_place)
{
    size_t bytes = (size_t)numel * dtype_bytes(dtype), all = bytes * (size_t)comm->world_size;
    unsigned char *out = NULL, *in = NULL;
    struct event done = {0};
    TRY(guarded(&out, all));
    TRY(guarded(&in, bytes));
    unsigned char *from = in_place ? out + (size_t)comm->rank * bytes : in;
    for (size_t i = 0; i < bytes; i++)
        from[i] = byte_value(comm->rank, (int64_t)i);
    TRY(comm_all_gather(comm, &streams[STREAM_GATHER], out, from, numel, dtype, &done));
    TRY(finish(&done));
    for (size_t i = 0; i < all; i++)
        RANK_CHECK(out[i] == byte_value((int)(i / bytes), (int64_t)(i % bytes)));
    RANK_CHECK(guard_is_whole(out, all) && guard_is_whole(in, bytes));
    mem_free(&out);
    mem_free(&in);
    return ST_OK;
}

static enum status gather_body(struct comm *comm, void *argument)
{
    (void)argument;
    static const enum dtype dtypes[] = {DTYPE_F32, DTYPE_BF16, DTYPE_I32};
    for (int n = 0; n < NUMELS; n++) {
        for (int d = 0; d < 3; d++) {
            TRY(gather_once(comm, numels[n], dtypes[d], false));
            TRY(gather_once(comm, numels[n], dtypes[d], true));
        }
    }
    return ST_OK;
}

static void all_gather_places_every_rank_for_all_dtypes_and_odd_sizes(void **state)
{
    (void)state;
    for (int w = 0; w < WORLDS; w++)
        ranks_run_ok(worlds[w], gather_body, NULL);
}

static enum status reduce_once(struct comm *comm, int64_t numel, bool in_place)
{
    int64_t all = numel * comm->world_size;
    unsigned char *in = NULL, *out = NULL;
    struct event done = {0};
    TRY(guarded(&in, (size_t)all * 4));
    TRY(guarded(&out, (size_t)numel * 4));
    fill((float *)in, comm->rank, all, 1);
    float *to = in_place ? (float *)in + comm->rank * numel : (float *)out;
    TRY(comm_reduce_scatter(comm, &streams[STREAM_REDUCE], to, in, numel, DTYPE_F32, &done));
    TRY(finish(&done));
    RANK_CHECK(is_sum(to, numel, comm->rank * numel, comm->world_size, 1));
    for (int64_t i = 0; i < all; i++) {
        if (!in_place || i / numel != comm->rank)
            RANK_CHECK(same_bits(((float *)in)[i], value(comm->rank, i, 1)));
    }
    RANK_CHECK(guard_is_whole(in, (size_t)all * 4) && guard_is_whole(out, (size_t)numel * 4));
    mem_free(&in);
    mem_free(&out);
    return ST_OK;
}

/* Halves that are whole numbers, so that their sum is known; and where one rank alone has anything
 * but a zero, its bits, -0 among them: that is what all others have. */
static uint16_t half_of(int rank, int64_t i, int world_size, bool alone)
{
    float x = (float)((rank * 37 + i) % 100 - 50);
    if (alone)
        x = i % world_size != rank ? -0.0f : i % 3 == 0 ? -0.0f : x;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static uint16_t half_sum(int64_t i, int world_size, bool alone)
{
    float sum = 0;
    if (alone)
        return half_of((int)(i % world_size), i, world_size, true);
    for (int r = 0; r < world_size; r++)
        sum += (float)((r * 37 + i) % 100 - 50);
    uint32_t bits;
    memcpy(&bits, &sum, sizeof bits);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16); /* to nearest even */
}

static enum status reduce_halves_once(struct comm *comm, int64_t numel, bool alone)
{
    int64_t all = numel * comm->world_size;
    unsigned char *in = NULL, *out = NULL;
    struct event done = {0};
    TRY(guarded(&in, (size_t)all * 2));
    TRY(guarded(&out, (size_t)numel * 2));
    for (int64_t i = 0; i < all; i++)
        ((uint16_t *)in)[i] = half_of(comm->rank, i, comm->world_size, alone);
    TRY(comm_reduce_scatter(comm, &streams[STREAM_REDUCE], out, in, numel, DTYPE_BF16, &done));
    TRY(finish(&done));
    for (int64_t i = 0; i < numel; i++)
        RANK_CHECK(((uint16_t *)out)[i] ==
                   half_sum(comm->rank * numel + i, comm->world_size, alone));
    RANK_CHECK(guard_is_whole(in, (size_t)all * 2) && guard_is_whole(out, (size_t)numel * 2));
    mem_free(&in);
    mem_free(&out);
    return ST_OK;
}

static enum status reduce_body(struct comm *comm, void *argument)
{
    (void)argument;
    for (int n = 0; n < NUMELS; n++) {
        TRY(reduce_once(comm, numels[n], false));
        TRY(reduce_once(comm, numels[n], true));
        TRY(reduce_halves_once(comm, numels[n], false));
        TRY(reduce_halves_once(comm, numels[n], true));
    }
    return ST_OK;
}

static void reduce_scatter_is_the_sum_in_rank_order_to_the_bit(void **state)
{
    (void)state;
    /* The data can tell orders apart: summed backwards, many elements differ. */
    int differ = 0;
    for (int64_t i = 0; i < 1000; i++) {
        float back = value(3, i, 1);
        for (int r = 2; r >= 0; r--)
            back += value(r, i, 1);
        differ += !same_bits(back, ordered_sum(4, i, 1));
    }
    assert_in_range(differ, 200, 1000);
    for (int w = 0; w < WORLDS; w++)
        ranks_run_ok(worlds[w], reduce_body, NULL);
}

static enum status broadcast_body(struct comm *comm, void *argument)
{
    (void)argument;
    static const enum dtype dtypes[] = {DTYPE_F32, DTYPE_BF16, DTYPE_I32};
    for (int n = 0; n < NUMELS; n++) {
        int root = n % comm->world_size;
        size_t bytes = (size_t)numels[n] * dtype_bytes(dtypes[n % 3]);
        unsigned char *data = NULL;
        struct event done = {0};
        TRY(guarded(&data, bytes));
        for (size_t i = 0; i < bytes; i++)
            data[i] = byte_value(comm->rank, (int64_t)i);
        TRY(comm_broadcast(comm, &streams[STREAM_COPY], data, numels[n], dtypes[n % 3], root,
                           &done));
        TRY(finish(&done));
        for (size_t i = 0; i < bytes; i++)
            RANK_CHECK(data[i] == byte_value(root, (int64_t)i));
        RANK_CHECK(guard_is_whole(data, bytes));
        mem_free(&data);
    }
    return ST_OK;
}

static void broadcast_gives_all_ranks_the_data_of_any_root(void **state)
{
    (void)state;
    for (int w = 0; w < WORLDS; w++)
        ranks_run_ok(worlds[w], broadcast_body, NULL);
}

static enum status exchange_body(struct comm *comm, void *argument)
{
    (void)argument;
    unsigned char *recv = NULL;
    TRY(mem_alloc(&recv, (size_t)comm->world_size * 65536));
    for (size_t bytes = 0; bytes <= 65536; bytes = bytes * 16 + 1) {
        /* The bytes to send lie in the output, at the place of another rank. */
        for (size_t i = 0; i < bytes; i++)
            recv[i] = byte_value(comm->rank, (int64_t)i);
        TRY(comm_exchange(comm, recv, recv, bytes));
        for (size_t i = 0; i < bytes * (size_t)comm->world_size; i++)
            RANK_CHECK(recv[i] == byte_value((int)(i / bytes), (int64_t)(i % bytes)));
    }
    TRY(comm_exchange(comm, recv, recv, 65536));
    mem_free(&recv);
    return ST_OK;
}

static enum status share_body(struct comm *comm, void *argument)
{
    (void)argument;
    char data[] = "rank 0";
    data[5] = (char)('0' + comm->rank);
    TRY(comm_share(comm, data, sizeof data));
    RANK_CHECK(strcmp(data, "rank 0") == 0);
    return ST_OK;
}

static void share_gives_all_ranks_the_bytes_of_rank_0(void **state)
{
    (void)state;
    for (int w = 0; w < WORLDS; w++)
        ranks_run_ok(worlds[w], share_body, NULL);
}

static void exchange_is_a_blocking_all_gather_of_up_to_64_kib(void **state)
{
    (void)state;
    for (int w = 0; w < WORLDS; w++)
        ranks_run_ok(worlds[w], exchange_body, NULL);
}

/* ---- in flight ------------------------------------------------------------------------------ */

enum { FLIGHT = 150, FLIGHT_NUMEL = 33 }; /* more than the ring holds */

struct flight {
    float in[FLIGHT][FLIGHT_NUMEL * 8], out[FLIGHT][FLIGHT_NUMEL * 8];
    struct event done[FLIGHT];
};

static enum status flight_issue(struct comm *comm, struct flight *f, int i)
{
    struct stream *s = &streams[i % STREAM_COUNT];
    fill(f->in[i], comm->rank, FLIGHT_NUMEL * comm->world_size, (uint64_t)i);
    if (i % 2 == 0)
        return comm_reduce_scatter(comm, s, f->out[i], f->in[i], FLIGHT_NUMEL, DTYPE_F32,
                                   &f->done[i]);
    return comm_all_gather(comm, s, f->out[i], f->in[i], FLIGHT_NUMEL, DTYPE_F32, &f->done[i]);
}

static bool flight_is_right(const struct comm *comm, const struct flight *f, int i)
{
    if (i % 2 == 0)
        return is_sum(f->out[i], FLIGHT_NUMEL, comm->rank * FLIGHT_NUMEL, comm->world_size,
                      (uint64_t)i);
    for (int64_t k = 0; k < FLIGHT_NUMEL * comm->world_size; k++) {
        if (!same_bits(f->out[i][k], value((int)(k / FLIGHT_NUMEL), k % FLIGHT_NUMEL, (uint64_t)i)))
            return false;
    }
    return true;
}

/* Issue all; now and then wait for any of those in flight, another one on each rank. */
static enum status flight_body(struct comm *comm, void *argument)
{
    (void)argument;
    struct flight *f = NULL;
    TRY(mem_alloc(&f, sizeof *f));
    mem_seal();
    for (int i = 0; i < FLIGHT; i++) {
        TRY(flight_issue(comm, f, i));
        uint64_t dice = rng_below(seed, (uint64_t)comm->rank, (uint64_t)i, 10);
        if (dice > 2)
            continue;
        int some = (int)rng_below(seed, 100 + (uint64_t)comm->rank, (uint64_t)i, (uint64_t)i + 1);
        TRY(finish(&f->done[some]));
        /* The earlier ones are complete with it, and after that their inputs are free. */
        for (int k = 0; k <= some; k++) {
            RANK_CHECK(flight_is_right(comm, f, k));
            memset(f->in[k], 0xFF, sizeof f->in[k]);
        }
    }
    mem_unseal();
    for (int i = FLIGHT - 1; i >= 0; i--) {
        TRY(finish(&f->done[i]));
        RANK_CHECK(flight_is_right(comm, f, i));
    }
    mem_free(&f);
    return ST_OK;
}

static void events_may_be_waited_for_in_any_order_and_complete_the_earlier_ones(void **state)
{
    (void)state;
    for (int w = 0; w < WORLDS; w++)
        ranks_run_ok(worlds[w], flight_body, NULL);
}

/* Nobody waits: closing completes what was issued, so no peer is left alone. */
static enum status late_body(struct comm *comm, void *argument)
{
    (void)argument;
    struct flight *f = NULL;
    TRY(mem_alloc(&f, sizeof *f));
    for (int i = 0; i < 40; i++)
        TRY(flight_issue(comm, f, i));
    if (comm->rank != 1)
        TRY(finish(&f->done[39]));
    /* The buffers must outlive the collectives; rank 1 waits here for what it never asked about. */
    TRY(comm_barrier(comm));
    for (int i = 0; i < 40; i++)
        RANK_CHECK(flight_is_right(comm, f, i));
    mem_free(&f);
    return ST_OK;
}

static void a_blocking_call_completes_what_is_in_flight(void **state)
{
    (void)state;
    ranks_run_ok(3, late_body, NULL);
}

static enum status close_body(struct comm *comm, void *argument)
{
    float *data = argument;
    struct event done = {0};
    for (int i = 0; i < 20; i++)
        TRY(comm_all_gather(comm, &streams[0], data + 4 * comm->rank, data + 5 * comm->rank, 1,
                            DTYPE_F32, &done));
    return ST_OK;
}

static void closing_completes_what_is_in_flight(void **state)
{
    (void)state;
    float data[16];
    for (int i = 0; i < 16; i++)
        data[i] = (float)i;
    ranks_run_ok(4, close_body, data);
    for (int i = 0; i < 16; i++)
        assert_true(same_bits(data[i], (float)(5 * (i % 4))));
}

/* An all-reduce in place: the second collective reads the output of the first, and nothing but
 * the stream orders them. Repeated, so that the next round writes what peers read in the last. */
static enum status all_reduce_body(struct comm *comm, void *argument)
{
    (void)argument;
    enum { NUMEL = 257, ROUNDS = 50 };
    float x[NUMEL * 8], want[NUMEL * 8];
    int64_t all = NUMEL * comm->world_size;
    struct event done = {0};
    struct stream *s = &streams[STREAM_REDUCE];
    fill(x, comm->rank, all, 3);
    for (int i = 0; i < ROUNDS; i++) {
        float *own = x + comm->rank * NUMEL;
        TRY(comm_reduce_scatter(comm, s, own, x, NUMEL, DTYPE_F32, &done));
        TRY(comm_all_gather(comm, s, x, own, NUMEL, DTYPE_F32, &done));
        if (i == 0 && comm->rank == 0)
            sleep_ms(2);
    }
    TRY(finish(&done));
    for (int64_t k = 0; k < all; k++) {
        want[k] = ordered_sum(comm->world_size, k, 3);
        for (int i = 1; i < ROUNDS; i++) {
            float sum = want[k];
            for (int r = 1; r < comm->world_size; r++)
                sum += want[k];
            want[k] = sum;
        }
    }
    RANK_CHECK(memcmp(x, want, (size_t)all * sizeof *x) == 0);
    return ST_OK;
}

static void a_stream_orders_collectives_that_feed_each_other(void **state)
{
    (void)state;
    for (int w = 0; w < WORLDS; w++)
        ranks_run_ok(worlds[w], all_reduce_body, NULL);
}

static void sixteen_ranks_outnumber_the_cores(void **state)
{
    (void)state;
    ranks_run_ok(16, exchange_body, NULL);
}

static enum status stress_body(struct comm *comm, void *argument)
{
    int count = *(const int *)argument;
    float in[8], out[8][8];
    struct event done[8] = {{0}};
    fill(in, comm->rank, 8, 5);
    for (int i = 0; i < count; i++) {
        struct event *e = &done[i % 8];
        TRY(finish(e));
        if (i >= 8) {
            int64_t n = i % 2 == 0 ? 1 : comm->world_size;
            for (int64_t k = 0; k < n; k++)
                RANK_CHECK(same_bits(out[i % 8][k], i % 2 == 0 ? ordered_sum(4, comm->rank, 5)
                                                               : value((int)k, 0, 5)));
            memset(out[i % 8], 0, sizeof out[0]);
        }
        if (i % 2 == 0)
            TRY(comm_reduce_scatter(comm, &streams[2], out[i % 8], in, 1, DTYPE_F32, e));
        else
            TRY(comm_all_gather(comm, &streams[1], out[i % 8], in, 1, DTYPE_F32, e));
    }
    TRY(comm_barrier(comm));
    return ST_OK;
}

static void ten_thousand_collectives(void **state)
{
    (void)state;
    int count = 10000;
    int64_t start = clock_ms();
    ranks_run_ok(4, stress_body, &count);
    print_message("%d collectives on 4 ranks in %lld ms\n", count, (long long)(clock_ms() - start));
}

/* ---- agreement ------------------------------------------------------------------------------ */

static enum status agree_body(struct comm *comm, void *argument)
{
    const int *fails = argument; /* one a rank */
    enum status st = ST_OK;
    TRY(comm_agree(comm, ST_OK));
    if (fails[comm->rank] == 1)
        st = FAIL(IO, "disk %d is full", comm->rank);
    if (fails[comm->rank] == 2) {
        char text[3000];
        memset(text, 'x', sizeof text);
        text[sizeof text - 1] = '\0';
        st = FAIL(CORRUPT, "long %d %s the end", comm->rank, text);
    }
    enum status agreed = comm_agree(comm, st);
    /* The ranks still are in step: nobody skipped a collective. */
    TRY(comm_agree(comm, ST_OK));
    char kept[4096];
    snprintf(kept, sizeof kept, "%s", status_message());
    TRY(comm_barrier(comm));
    status_set_message(kept);
    if (agreed == ST_CORRUPT) /* not a failed check */
        return strstr(kept, "the end") != NULL ? ST_INVALID : ST_CORRUPT;
    return agreed;
}

static void b44_agree_gives_all_ranks_the_first_failing_ranks_message(void **state)
{
    (void)state;
    static const int fails[3][4] = {{0, 0, 0, 1}, {0, 1, 0, 1}, {0, 0, 2, 1}};
    static const char *const want[3] = {"disk 3 is full", "disk 1 is full", "long 2"};
    for (int i = 0; i < 3; i++) {
        struct ranks ranks = {.world_size = 4,
                              .timeout_ms = LONG,
                              .body = agree_body,
                              .argument = (void *)(uintptr_t)fails[i]};
        ranks_run(&ranks);
        for (int r = 0; r < 4; r++)
            ranks_assert(&ranks, r, i == 2 ? ST_INVALID : ST_IO, want[i]);
        assert_non_null(strstr(ranks.message[0], i == 0   ? "rank 3: "
                                                 : i == 1 ? "rank 1: "
                                                          : "rank 2: "));
    }
}

/* All ranks but one say nothing special. */
static enum status exchange_alone(struct comm *comm, void *recv, const void *send, size_t bytes)
{
    memset(recv, 0, bytes * (size_t)comm->world_size);
    memcpy((char *)recv + (size_t)comm->rank * bytes, send, bytes);
    return ST_OK;
}

static void the_largest_world_meets_and_agrees(void **state)
{
    (void)state;
    static const struct comm_ops ops = {.name = "alone", .exchange = exchange_alone};
    struct comm comm = {
        .ops = &ops, .rank = COMM_MAX_WORLD_SIZE - 1, .world_size = COMM_MAX_WORLD_SIZE};
    assert_int_equal(comm_barrier(&comm), ST_OK);
    assert_int_equal(comm_agree(&comm, ST_OK), ST_OK);
    assert_int_equal(comm_agree(&comm, FAIL(IO, "disk %d is full", 7)), ST_IO);
    assert_non_null(strstr(status_message(), "disk 7 is full"));
}

/* ---- failures ------------------------------------------------------------------------------- */

static enum status mismatch_body(struct comm *comm, void *argument)
{
    int which = *(const int *)argument;
    float in[64] = {0}, out[64];
    struct event done = {0};
    bool other = comm->rank == 1;
    struct stream *s = &streams[0];
    TRY(comm_barrier(comm));
    if (which == 0 && other)
        TRY(comm_reduce_scatter(comm, s, out, in, 5, DTYPE_F32, &done));
    else if (which == 3)
        TRY(comm_broadcast(comm, s, in, 5, DTYPE_F32, other ? 2 : 0, &done));
    else if (which == 4 && other)
        TRY(comm_barrier(comm));
    else
        TRY(comm_all_gather(comm, s, out, in, which == 1 && other ? 6 : 5,
                            which == 2 && other ? DTYPE_I32 : DTYPE_F32, &done));
    return finish(&done);
}

static void b84_different_collectives_are_an_error_on_all_ranks(void **state)
{
    (void)state;
    static const char *const want[] = {
        "rank 1 issued reduce_scatter 1 (5 fp32)", "rank 1 issued all_gather 1 (6 fp32)",
        "rank 1 issued all_gather 1 (5 int32)", "rank 1 issued broadcast 1 (5 fp32 from rank 2)",
        "rank 1 issued exchange 1 (1 bytes)"};
    for (int which = 0; which < 5; which++) {
        struct ranks ranks = {
            .world_size = 3, .timeout_ms = 60000, .body = mismatch_body, .argument = &which};
        ranks_run(&ranks);
        assert_in_range(ranks.ms, 0, LONG);
        for (int r = 0; r < 3; r++) {
            ranks_assert(&ranks, r, ST_INVALID, want[which]);
            ranks_assert(&ranks, r, ST_INVALID,
                         which == 3 ? "(5 fp32 from rank 0)" : "issued all_gather 1 (5 fp32)");
        }
    }
}

static enum status silent_body(struct comm *comm, void *argument)
{
    pthread_barrier_t *issued = argument; /* NULL: rank 2 issues too late; else it waits too late */
    float in[8] = {0}, out[8];
    struct event done = {0};
    TRY(comm_all_gather(comm, &streams[0], out, in, 2, DTYPE_BF16, &done));
    TRY(finish(&done));
    if (comm->rank == 2 && issued == NULL)
        sleep_ms(2 * SHORT);
    /* Rank 2 issues first, so that it cannot read its peers' inputs as it does so. */
    if (comm->rank != 2 && issued != NULL)
        pthread_barrier_wait(issued);
    TRY(comm_reduce_scatter(comm, &streams[0], out, in, 1, DTYPE_F32, &done));
    if (comm->rank == 2 && issued != NULL) {
        pthread_barrier_wait(issued);
        sleep_ms(2 * SHORT);
    }
    return finish(&done);
}

static void a_time_out_names_the_silent_rank_and_its_last_collective(void **state)
{
    (void)state;
    pthread_barrier_t issued;
    struct ranks ranks = {.world_size = 3, .timeout_ms = SHORT, .body = silent_body};
    ranks_run(&ranks);
    for (int r = 0; r < 3; r++) {
        ranks_assert(&ranks, r, ST_TIMEOUT, "waited 400 ms for reduce_scatter 1 (1 fp32); ");
        ranks_assert(&ranks, r, ST_TIMEOUT, "rank 2 is silent, its last: all_gather 0 (2 bf16)");
        assert_null(strstr(ranks.message[r], "; rank 0"));
        assert_null(strstr(ranks.message[r], "; rank 1"));
    }
    assert_in_range(ranks.ms, SHORT, LONG);
    pthread_barrier_init(&issued, NULL, 3);
    ranks.argument = &issued;
    ranks_run(&ranks);
    pthread_barrier_destroy(&issued);
    for (int r = 0; r < 3; r++)
        ranks_assert(&ranks, r, ST_TIMEOUT, "rank 2 has issued it but not waited for it");
}

static enum status left_body(struct comm *comm, void *argument)
{
    (void)argument;
    TRY(comm_barrier(comm));
    if (comm->rank == 1)
        return FAIL(IO, "cannot read the data");
    return comm_barrier(comm);
}

static void a_rank_that_leaves_ends_the_others_before_the_time_out(void **state)
{
    (void)state;
    struct ranks ranks = {.world_size = 3, .timeout_ms = 60000, .body = left_body};
    ranks_run(&ranks);
    assert_in_range(ranks.ms, 0, LONG);
    ranks_assert(&ranks, 0, ST_COMM, "rank 1 has left, its last: exchange 0 (1 bytes)");
    ranks_assert(&ranks, 1, ST_IO, "cannot read the data"); /* closing keeps the message */
    ranks_assert(&ranks, 2, ST_COMM, "rank 1 has left");
}

static enum status abort_body(struct comm *comm, void *argument)
{
    (void)argument;
    struct event done = {0};
    float x[4] = {0};
    if (comm->rank == 2) {
        sleep_ms(20);
        comm_abort(comm, "the disk burns");
        comm_abort(comm, "and the house too");
    } else if (comm->rank == 0) {
        TRY(comm_barrier(comm)); /* hangs: the others issue no exchange */
    }
    enum status st = comm_all_gather(comm, &streams[0], x, x, 1, DTYPE_F32, &done);
    RANK_CHECK(st == ST_COMM);
    RANK_CHECK(comm_barrier(comm) == ST_COMM);
    RANK_CHECK(comm_agree(comm, ST_OK) == ST_COMM);
    RANK_CHECK(comm_agree(comm, FAIL(IO, "mine")) == ST_IO);
    RANK_CHECK(strstr(status_message(), "mine") != NULL);
    return comm_barrier(comm);
}

static enum status abort_wait_body(struct comm *comm, void *argument)
{
    if (comm->rank == 1) {
        TRY(comm_barrier(comm));
        return ST_OK;
    }
    return abort_body(comm, argument);
}

static void abort_wakes_the_waiting_and_the_first_cause_is_kept(void **state)
{
    (void)state;
    struct ranks ranks = {.world_size = 3, .timeout_ms = 60000, .body = abort_wait_body};
    ranks_run(&ranks);
    assert_in_range(ranks.ms, 20, LONG);
    for (int r = 0; r < 3; r++)
        ranks_assert(&ranks, r, ST_COMM, "rank 2: the disk burns");
}

static void *abort_from_thread(void *argument)
{
    sleep_ms(20);
    comm_abort(argument, "watchdog");
    return NULL;
}

static enum status watchdog_body(struct comm *comm, void *argument)
{
    (void)argument;
    pthread_t id;
    if (comm->rank == 1) {
        sleep_ms(40);
        return comm_barrier(comm);
    }
    RANK_CHECK(pthread_create(&id, NULL, abort_from_thread, comm) == 0);
    enum status st = comm_barrier(comm);
    pthread_join(id, NULL);
    return st;
}

static void abort_may_come_from_a_thread_that_is_no_rank(void **state)
{
    (void)state;
    struct ranks ranks = {.world_size = 2, .timeout_ms = 60000, .body = watchdog_body};
    ranks_run(&ranks);
    assert_in_range(ranks.ms, 20, LONG);
    ranks_assert(&ranks, 0, ST_COMM, "rank 0: watchdog");
    ranks_assert(&ranks, 1, ST_COMM, "rank 0: watchdog");
}

struct freed {
    pthread_barrier_t issued;
    int round;
};

/* A rank frees its buffers as soon as it knows of the failure, in the midst of the others' copies;
 * the address sanitizer sees it if one of them still reads. */
static enum status free_body(struct comm *comm, void *argument)
{
    enum { NUMEL = 100000, PAUSE_US = 60 };
    struct freed *freed = argument;
    unsigned char *in = NULL, *out = NULL;
    struct event done = {0};
    bool aborts = comm->rank == freed->round % 4;
    TRY(mem_alloc(&in, NUMEL * 4 * 4));
    TRY(mem_alloc(&out, NUMEL * 4));
    if (!aborts)
        pthread_barrier_wait(&freed->issued);
    enum status st = comm_reduce_scatter(comm, &streams[0], out, in, NUMEL, DTYPE_F32, &done);
    if (aborts) {
        pthread_barrier_wait(&freed->issued);
        clock_pause_us(PAUSE_US * freed->round);
        comm_abort(comm, "stop");
    }
    if (st == ST_OK)
        st = finish(&done);
    mem_free(&in);
    mem_free(&out);
    return st;
}

static void after_a_failure_nobody_reads_a_peers_buffers(void **state)
{
    (void)state;
    struct freed freed;
    pthread_barrier_init(&freed.issued, NULL, 4);
    for (freed.round = 0; freed.round < 16; freed.round++) {
        struct ranks ranks = {
            .world_size = 4, .timeout_ms = 60000, .body = free_body, .argument = &freed};
        ranks_run(&ranks);
        for (int r = 0; r < 4; r++) {
            if (ranks.st[r] != ST_OK)
                ranks_assert(&ranks, r, ST_COMM, "stop");
        }
    }
    pthread_barrier_destroy(&freed.issued);
}

/* ---- arguments ------------------------------------------------------------------------------ */

static enum status arguments_body(struct comm *comm, void *argument)
{
    (void)argument;
    float x[8] = {0};
    struct event done = {0};
    struct stream *s = &streams[0];
    RANK_CHECK(comm_all_gather(comm, s, x, x, -1, DTYPE_F32, &done) == ST_INVALID);
    RANK_CHECK(comm_all_gather(comm, s, x, x, 1, DTYPE_F64, &done) == ST_INVALID);
    RANK_CHECK(comm_all_gather(comm, s, NULL, x, 1, DTYPE_F32, &done) == ST_INVALID);
    RANK_CHECK(comm_all_gather(comm, s, x, x, INT64_MAX, DTYPE_F32, &done) == ST_INVALID);
    RANK_CHECK(comm_reduce_scatter(comm, s, x, x, 1, DTYPE_I32, &done) == ST_INVALID);
    RANK_CHECK(comm_reduce_scatter(comm, s, x, NULL, 1, DTYPE_F32, &done) == ST_INVALID);
    RANK_CHECK(comm_broadcast(comm, s, x, 1, DTYPE_F32, 2, &done) == ST_INVALID);
    RANK_CHECK(comm_broadcast(comm, s, x, 1, DTYPE_F32, -1, &done) == ST_INVALID);
    RANK_CHECK(comm_exchange(comm, x, x, 65537) == ST_INVALID);
    RANK_CHECK(comm_exchange(comm, NULL, x, 1) == ST_INVALID);
    /* Nothing of this was issued: the ranks are still in step. */
    TRY(comm_all_gather(comm, s, NULL, NULL, 0, DTYPE_F32, &done));
    TRY(finish(&done));
    return comm_barrier(comm);
}

static void bad_arguments_are_refused_before_anything_is_issued(void **state)
{
    (void)state;
    ranks_run_ok(2, arguments_body, NULL);
    struct local_world *world = NULL;
    assert_int_equal(local_world_open(&world, 0, 1), ST_INVALID);
    assert_int_equal(local_world_open(&world, 1025, 1), ST_INVALID);
    assert_int_equal(local_world_open(&world, 2, 0), ST_INVALID);
    assert_null(world);
    struct comm *comm = NULL, *again = NULL;
    assert_int_equal(local_world_open(&world, 1, LONG), ST_OK);
    assert_int_equal(local_comm_open(&comm, world, 1), ST_INVALID);
    assert_int_equal(local_comm_open(&comm, world, 0), ST_OK);
    assert_int_equal(local_comm_open(&again, world, 0), ST_INVALID);
    comm_close(&again);
    comm_close(&comm);
    assert_null(comm);
    local_world_close(&world);
    local_world_close(&world);
}

static void opening_survives_every_failed_allocation(void **state)
{
    (void)state;
    int64_t live = mem_live_bytes();
    for (int k = 1; k <= 4; k++) {
        struct local_world *world = NULL;
        struct comm *comm = NULL;
        mem_fail_at(k);
        enum status st = local_world_open(&world, 2, LONG);
        if (st == ST_OK)
            st = local_comm_open(&comm, world, 0);
        mem_fail_at(0);
        assert_int_equal(st, k <= 3 ? ST_MEMORY : ST_OK);
        comm_close(&comm);
        local_world_close(&world);
        assert_int_equal(mem_live_bytes(), live);
    }
}

int main(void)
{
    seed = test_seed();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_gather_places_every_rank_for_all_dtypes_and_odd_sizes),
        cmocka_unit_test(reduce_scatter_is_the_sum_in_rank_order_to_the_bit),
        cmocka_unit_test(broadcast_gives_all_ranks_the_data_of_any_root),
        cmocka_unit_test(share_gives_all_ranks_the_bytes_of_rank_0),
        cmocka_unit_test(exchange_is_a_blocking_all_gather_of_up_to_64_kib),
        cmocka_unit_test(events_may_be_waited_for_in_any_order_and_complete_the_earlier_ones),
        cmocka_unit_test(a_blocking_call_completes_what_is_in_flight),
        cmocka_unit_test(closing_completes_what_is_in_flight),
        cmocka_unit_test(a_stream_orders_collectives_that_feed_each_other),
        cmocka_unit_test(sixteen_ranks_outnumber_the_cores),
        cmocka_unit_test(ten_thousand_collectives),
        cmocka_unit_test(b44_agree_gives_all_ranks_the_first_failing_ranks_message),
        cmocka_unit_test(the_largest_world_meets_and_agrees),
        cmocka_unit_test(b84_different_collectives_are_an_error_on_all_ranks),
        cmocka_unit_test(a_time_out_names_the_silent_rank_and_its_last_collective),
        cmocka_unit_test(a_rank_that_leaves_ends_the_others_before_the_time_out),
        cmocka_unit_test(abort_wakes_the_waiting_and_the_first_cause_is_kept),
        cmocka_unit_test(abort_may_come_from_a_thread_that_is_no_rank),
        cmocka_unit_test(after_a_failure_nobody_reads_a_peers_buffers),
        cmocka_unit_test(bad_arguments_are_refused_before_anything_is_issued),
        cmocka_unit_test(opening_survives_every_failed_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
