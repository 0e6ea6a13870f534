/*
 * The tests start this program again, as ranks under mpiexec: `comm_mpi --rank BODY`. A rank that
 * ends with 0 has found everything right.
 */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/arena.h"
#include "engine/base/clock.h"
#include "engine/base/rng.h"
#include "tests/support/mpi.h"
#include "tests/support/ranks.h"

static struct scratch scratch;

#ifdef TESSERA_MPI

#include <mpi.h>

#include "comm/mpi.h"
#include "engine/base/log.h"

/* ---- what the ranks do ---------------------------------------------------------------------- */

enum { LIMIT = 37, MAX_NUMEL = 5001, MAX_WORLD = 8, SHORT_MS = 500, LONG_MS = 30000 };

static struct stream streams[STREAM_COUNT] = {{.id = STREAM_COMPUTE},
                                              {.id = STREAM_GATHER},
                                              {.id = STREAM_REDUCE},
                                              {.id = STREAM_UPDATE},
                                              {.id = STREAM_COPY}};

/* Of all magnitudes, so that another order of additions gives other bits. */
static float value(int rank, int64_t i, uint64_t salt)
{
    struct philox r = philox4x32(11, (uint32_t)i, (uint32_t)rank, (uint32_t)salt, 0);
    return ((float)r.word[0] * 0x1p-32f - 0.5f) * (float)(1u << (r.word[1] & 15));
}

static float sum_of(int world_size, int64_t i, uint64_t salt)
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

static bool is_sum(const float *x, const struct comm *comm, int64_t n, uint64_t salt)
{
    for (int64_t i = 0; i < n; i++) {
        float want = sum_of(comm->world_size, comm->rank * n + i, salt);
        if (memcmp(&x[i], &want, sizeof want) != 0)
            return false;
    }
    return true;
}

struct buffers {
    float in[MAX_NUMEL * MAX_WORLD], out[MAX_NUMEL * MAX_WORLD];
};

static enum status gather(struct comm *comm, struct buffers *b, int64_t n, enum dtype dtype,
                          bool in_place)
{
    struct event done = {0};
    size_t bytes = (size_t)n * dtype_bytes(dtype);
    char *out = (char *)b->out, *in = in_place ? out + (size_t)comm->rank * bytes : (char *)b->in;
    memset(b->out, 0xFF, sizeof b->out);
    for (size_t i = 0; i < bytes; i++)
        in[i] = (char)(comm->rank * 31 + (int)(i % 113));
    TRY(comm_all_gather(comm, &streams[STREAM_GATHER], out, in, n, dtype, &done));
    TRY(finish(&done));
    for (int r = 0; r < comm->world_size; r++)
        for (size_t i = 0; i < bytes; i++)
            RANK_CHECK(out[(size_t)r * bytes + i] == (char)(r * 31 + (int)(i % 113)));
    RANK_CHECK(out[bytes * (size_t)comm->world_size] == (char)0xFF || n == MAX_NUMEL);
    return ST_OK;
}

static enum status reduce(struct comm *comm, struct buffers *b, int64_t n, bool in_place)
{
    struct event done = {0};
    fill(b->in, comm->rank, n * comm->world_size, 1);
    float *out = in_place ? b->in + comm->rank * n : b->out;
    TRY(comm_reduce_scatter(comm, &streams[STREAM_REDUCE], out, b->in, n, DTYPE_F32, &done));
    TRY(finish(&done));
    RANK_CHECK(is_sum(out, comm, n, 1));
    for (int64_t i = 0; i < n * comm->world_size; i++)
        RANK_CHECK((in_place && i / n == comm->rank) || b->in[i] == value(comm->rank, i, 1));
    return ST_OK;
}

/* bf16, each element of one rank alone: beside the others' -0 it comes with its bits. */
static enum status reduce_halves(struct comm *comm, struct buffers *b, int64_t n)
{
    struct event done = {0};
    uint16_t *in = (uint16_t *)(void *)b->in, *out = (uint16_t *)(void *)b->out;
    int world = comm->world_size;
    for (int64_t i = 0; i < n * world; i++)
        in[i] = (uint16_t)(i % world == comm->rank ? 0x8000 + i % 999 : 0x8000);
    TRY(comm_reduce_scatter(comm, &streams[STREAM_REDUCE], out, in, n, DTYPE_BF16, &done));
    TRY(finish(&done));
    for (int64_t i = 0; i < n; i++)
        RANK_CHECK(out[i] == 0x8000 + (comm->rank * n + i) % 999);
    return ST_OK;
}

static enum status broadcast(struct comm *comm, struct buffers *b, int64_t n, int root)
{
    struct event done = {0};
    fill(b->out, comm->rank, n, 2);
    TRY(comm_broadcast(comm, &streams[STREAM_COPY], b->out, n, DTYPE_F32, root, &done));
    TRY(finish(&done));
    for (int64_t i = 0; i < n; i++)
        RANK_CHECK(b->out[i] == value(root, i, 2));
    return ST_OK;
}

static enum status each_collective(struct comm *comm, struct buffers *b)
{
    static const int64_t numels[] = {0, 1, 7, 2 * LIMIT, 128, 2049, MAX_NUMEL};
    static const enum dtype dtypes[] = {DTYPE_F32, DTYPE_BF16, DTYPE_I32};
    for (size_t i = 0; i < sizeof numels / sizeof *numels; i++) {
        for (int k = 0; k < 6; k++)
            TRY(gather(comm, b, numels[i], dtypes[k / 2], k % 2));
        TRY(reduce(comm, b, numels[i], false));
        TRY(reduce(comm, b, numels[i], true));
        TRY(reduce_halves(comm, b, numels[i]));
        TRY(broadcast(comm, b, numels[i], (int)i % comm->world_size));
    }
    return ST_OK;
}

/* The bytes to send lie in the output, at the place of another rank. */
static enum status exchanges(struct comm *comm, struct buffers *b)
{
    char *x = (char *)b->in;
    size_t world = (size_t)comm->world_size, most = sizeof b->in / world;
    for (size_t bytes = 0; bytes <= most && bytes <= 65536; bytes = bytes * 16 + 1) {
        memset(x, comm->rank + 1, bytes);
        TRY(comm_exchange(comm, x, x, bytes));
        for (size_t i = 0; i < bytes * world; i++)
            RANK_CHECK(x[i] == (char)(i / bytes + 1));
    }
    return comm_barrier(comm);
}

/* More than the queue holds, on all streams, waited for in another order on each rank. */
static enum status in_flight(struct comm *comm, struct buffers *b)
{
    enum { COUNT = 150, N = 33 };
    struct event done[COUNT] = {{0}};
    float *in[COUNT], *out[COUNT];
    int64_t all = N * comm->world_size;
    for (int i = 0; i < COUNT; i++) {
        struct stream *s = &streams[i % STREAM_COUNT];
        in[i] = b->in + i * all;
        out[i] = b->out + i * all;
        fill(in[i], comm->rank, all, (uint64_t)i);
        if (i % 2 == 0)
            TRY(comm_reduce_scatter(comm, s, out[i], in[i], N, DTYPE_F32, &done[i]));
        else
            TRY(comm_all_gather(comm, s, out[i], in[i], N, DTYPE_F32, &done[i]));
        int some = (int)rng_below(5, (uint64_t)comm->rank, (uint64_t)i, (uint64_t)i + 1);
        if (some % 4 == 0)
            TRY(finish(&done[some]));
        /* The earlier ones are complete with it. */
        for (int k = 0; some % 4 == 0 && k <= some; k += 2)
            RANK_CHECK(is_sum(out[k], comm, N, (uint64_t)k));
    }
    for (int i = COUNT - 1; i >= 0; i--)
        TRY(finish(&done[i]));
    for (int i = 1; i < COUNT; i += 2)
        for (int64_t k = 0; k < all; k++)
            RANK_CHECK(out[i][k] == value((int)(k / N), k % N, (uint64_t)i));
    return ST_OK;
}

/* The staging of the sums goes round in issue order: the root has its broadcast and begins the
 * first sum, the others wait for the broadcast and could begin the second. */
static enum status sums_take_turns(struct comm *comm, struct buffers *b)
{
    enum { N = 33 };
    struct event done[3] = {{0}};
    float *first = b->out + N, *second = b->out + 2 * N;
    fill(b->in, comm->rank, N * comm->world_size, 5);
    TRY(comm_barrier(comm));
    if (comm->rank == 0)
        sleep_ms(50);
    TRY(comm_broadcast(comm, &streams[STREAM_GATHER], b->out, N, DTYPE_F32, 0, &done[0]));
    TRY(comm_reduce_scatter(comm, &streams[STREAM_GATHER], first, b->in, N, DTYPE_F32, &done[1]));
    TRY(comm_reduce_scatter(comm, &streams[STREAM_REDUCE], second, b->in, N, DTYPE_F32, &done[2]));
    for (int i = 2; i >= 0; i--)
        TRY(finish(&done[i]));
    RANK_CHECK(is_sum(first, comm, N, 5) && is_sum(second, comm, N, 5));
    return ST_OK;
}

/* An all-reduce in place: the second collective reads what the first writes, and nothing but the
 * stream orders them; an empty one between them changes nothing. */
static enum status one_feeds_the_next(struct comm *comm, struct buffers *b)
{
    enum { N = 257 };
    struct event done = {0};
    struct stream *s = &streams[STREAM_REDUCE];
    int64_t all = N * comm->world_size;
    float *own = b->in + comm->rank * N;
    fill(b->in, comm->rank, all, 3);
    for (int i = 0; i < 20; i++) {
        TRY(comm_reduce_scatter(comm, s, own, b->in, N, DTYPE_F32, &done));
        TRY(comm_reduce_scatter(comm, s, own, b->in, 0, DTYPE_F32, &done));
        TRY(comm_all_gather(comm, s, b->in, own, N, DTYPE_F32, &done));
    }
    TRY(finish(&done));
    for (int64_t k = 0; k < all; k++) {
        float want = sum_of(comm->world_size, k, 3);
        for (int i = 1; i < 20; i++) {
            float sum = want;
            for (int r = 1; r < comm->world_size; r++)
                sum += want;
            want = sum;
        }
        RANK_CHECK(memcmp(&want, &b->in[k], sizeof want) == 0);
    }
    return ST_OK;
}

/* A slow operation after the issue, and no wait: comm_progress() alone brings the sum. */
static enum status before_the_wait(struct comm *comm, struct buffers *b)
{
    struct event done = {0};
    int64_t begun = clock_ms();
    memset(b->out, 0xFF, sizeof b->out);
    fill(b->in, comm->rank, MAX_NUMEL * comm->world_size, 4);
    TRY(comm_reduce_scatter(comm, &streams[STREAM_REDUCE], b->out, b->in, MAX_NUMEL, DTYPE_F32,
                            &done));
    while (!is_sum(b->out, comm, MAX_NUMEL, 4)) {
        sleep_ms(2);
        TRY(comm_progress(comm));
        RANK_CHECK(clock_ms() - begun < LONG_MS);
    }
    return finish(&done);
}

enum { UNITS = 12, OPS = 4, OP_MS = 12 };

/* The executor's pattern with operations that sleep: a unit's collective is issued, operations run,
 * then it is waited for. @early: how many were complete when their wait came. */
static enum status slow_steps(struct comm *comm, struct buffers *b, bool progress, int *early)
{
    *early = 0;
    TRY(comm_barrier(comm));
    for (int u = 0; u < UNITS; u++) {
        struct event done = {0};
        uint64_t salt = 100 + (uint64_t)u;
        memset(b->out, 0xFF, sizeof(float) * MAX_NUMEL);
        fill(b->in, comm->rank, MAX_NUMEL * comm->world_size, salt);
        TRY(comm_reduce_scatter(comm, &streams[STREAM_REDUCE], b->out, b->in, MAX_NUMEL, DTYPE_F32,
                                &done));
        for (int op = 0; op < OPS; op++) {
            sleep_ms(OP_MS);
            if (progress)
                TRY(comm_progress(comm));
        }
        *early += is_sum(b->out, comm, MAX_NUMEL, salt);
        TRY(finish(&done));
        RANK_CHECK(is_sum(b->out, comm, MAX_NUMEL, salt));
    }
    return ST_OK;
}

/* Not all of them: a rank may be late by more than the operations take. And one that comes when all
 * others are there already may find its collective complete as soon as it is issued. */
static enum status slow(struct comm *comm, struct buffers *b)
{
    int with = 0, without = 0;
    TRY(slow_steps(comm, b, true, &with));
    TRY(slow_steps(comm, b, false, &without));
    log_info("test", "complete before their wait: %d of %d, without progress %d", with, UNITS,
             without);
    RANK_CHECK(with >= UNITS / 4 && without <= with / 2);
    return comm_barrier(comm);
}

static enum status too_little_staging(struct comm *comm, struct buffers *b)
{
    struct event done = {0};
    if (comm->world_size == 1)
        return ST_OK;
    enum status st = comm_reduce_scatter(comm, &streams[STREAM_REDUCE], b->out, b->in,
                                         MAX_NUMEL + 1, DTYPE_F32, &done);
    RANK_CHECK(st == ST_INVALID && strstr(status_message(), "staging") != NULL);
    return ST_OK;
}

static enum status agreement(struct comm *comm, struct buffers *b)
{
    (void)b;
    enum status st = comm->rank == comm->world_size - 1 ? FAIL(IO, "disk is full") : ST_OK;
    RANK_CHECK(comm_agree(comm, st) == ST_IO);
    RANK_CHECK(strstr(status_message(), "disk is full") != NULL);
    return comm_agree(comm, ST_OK);
}

static enum status all_bodies(struct comm *comm, struct buffers *b)
{
    TRY(each_collective(comm, b));
    TRY(exchanges(comm, b));
    TRY(in_flight(comm, b));
    TRY(sums_take_turns(comm, b));
    TRY(one_feeds_the_next(comm, b));
    TRY(before_the_wait(comm, b));
    TRY(too_little_staging(comm, b));
    return agreement(comm, b);
}

static enum status silent(struct comm *comm, struct buffers *b)
{
    struct event done = {0};
    TRY(comm_barrier(comm));
    if (comm->rank == 2)
        sleep_ms(LONG_MS);
    TRY(comm_all_gather(comm, &streams[STREAM_GATHER], b->out, b->in, 5, DTYPE_BF16, &done));
    return finish(&done);
}

static enum status different(struct comm *comm, struct buffers *b)
{
    struct event done = {0};
    TRY(comm_barrier(comm));
    if (comm->rank == 1)
        TRY(comm_reduce_scatter(comm, &streams[STREAM_REDUCE], b->out, b->in, 6, DTYPE_F32, &done));
    else
        TRY(comm_all_gather(comm, &streams[STREAM_GATHER], b->out, b->in, 5, DTYPE_F32, &done));
    return finish(&done);
}

static enum status killed(struct comm *comm, struct buffers *b)
{
    (void)b;
    TRY(comm_barrier(comm));
    if (comm->rank == 1)
        raise(SIGKILL);
    return comm_barrier(comm);
}

static enum status gives_up(struct comm *comm, struct buffers *b)
{
    (void)b;
    TRY(comm_barrier(comm));
    return comm->rank == 1 ? FAIL(IO, "cannot read the data") : comm_barrier(comm);
}

static void *abort_from_thread(void *comm)
{
    sleep_ms(100);
    comm_abort(comm, "the watchdog has had enough");
    return NULL;
}

/* It never comes to the second barrier, and its own wait ends by the other thread's word. */
static enum status aborted(struct comm *comm, struct buffers *b)
{
    pthread_t thread;
    (void)b;
    TRY(comm_barrier(comm));
    if (comm->rank == 0)
        sleep_ms(LONG_MS);
    if (pthread_create(&thread, NULL, abort_from_thread, comm) != 0)
        return FAIL(SYSTEM, "no thread");
    enum status st = comm_barrier(comm);
    pthread_join(thread, NULL);
    return st;
}

static const struct body {
    const char *name;
    enum status (*run)(struct comm *comm, struct buffers *b);
    int64_t timeout_ms, count_limit;
} bodies[] = {
    {"all", all_bodies, LONG_MS, 0},
    {"pieces", all_bodies, LONG_MS, LIMIT},
    {"slow", slow, LONG_MS, 0},
    {"silent", silent, SHORT_MS, 0},
    {"different", different, SHORT_MS, 0},
    {"killed", killed, 2 * LONG_MS, 0},
    {"gives-up", gives_up, 2 * LONG_MS, 0},
    {"aborted", aborted, 2 * LONG_MS, 0},
};

static enum status run_body(const struct body *body, struct buffers *b, int rank, int world_size)
{
    enum status st = ST_OK;
    struct comm *comm = NULL;
    float *staging = NULL;
    size_t bytes = comm_staging_bytes(COMM_MPI, world_size, MAX_NUMEL);
    struct mpi_options options = {rank, world_size, body->timeout_ms, body->count_limit};
    TRY(mem_alloc(&staging, bytes));
    TRY_GOTO(st, out, mpi_comm_open(&comm, &options));
    comm_stage(comm, staging, bytes);
    TRY_GOTO(st, out, body->run(comm, b));
out:
    if (st != ST_OK && comm != NULL)
        comm_abort(comm, status_message());
    comm_close(&comm);
    mem_free(&staging);
    return st;
}

static int rank_main(const char *name)
{
    int rank = 0, world_size = 0, level = 0;
    struct buffers *b = NULL;
    enum status st = ST_INVALID;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world_size);
    log_set_rank(rank);
    if (mem_alloc(&b, sizeof *b) != ST_OK)
        return 1;
    int64_t live = mem_live_bytes();
    for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++)
        if (strncmp(bodies[i].name, name, strlen(name)) == 0)
            st = run_body(&bodies[i], b, rank, world_size);
    if (st == ST_OK && mem_live_bytes() != live)
        st = FAIL(MEMORY, "memory is left");
    if (st != ST_OK)
        log_error("test", "%s", status_message());
    mem_free(&b);
    MPI_Finalize();
    return st != ST_OK;
}

#else

static int rank_main(const char *name)
{
    (void)name;
    return 1;
}

#endif

/* ---- the tests ------------------------------------------------------------------------------ */

static struct job job;

static void run_ranks(int ranks, const char *body)
{
    char self[512];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    assert_true(n > 0);
    self[n] = '\0';
    job_start(&job, &scratch, ranks, (const char *const[]){self, "--rank", body, NULL});
    job_wait(&job);
}

static void collectives_are_those_of_local_to_the_bit(void **state)
{
    (void)state;
    mpi_skip_without();
    static const int worlds[] = {1, 2, 3, 5};
    for (int i = 0; i < 4; i++) {
        run_ranks(worlds[i], "all");
        job_expect(&job, true, NULL);
    }
}

static void counts_above_mpis_are_one_collective_all_the_same(void **state)
{
    (void)state;
    mpi_skip_without();
    run_ranks(3, "pieces");
    job_expect(&job, true, NULL);
}

static void collectives_complete_beside_slow_operations_before_their_wait(void **state)
{
    (void)state;
    mpi_skip_without();
    for (int ranks = 2; ranks <= 3; ranks++) {
        run_ranks(ranks, "slow");
        job_expect(&job, true, "complete before their wait");
    }
}

static void b84_a_time_out_names_the_silent_rank(void **state)
{
    (void)state;
    mpi_skip_without();
    run_ranks(4, "silent");
    job_expect(&job, false, "waited 500 ms for all_gather 1 (5 bf16); rank 2 does not answer");
    assert_null(strstr(job.output, "rank 1 does not answer"));
    assert_in_range(job.ms, 500, 15000);
}

static void b84_different_collectives_end_with_what_each_rank_waits_for(void **state)
{
    (void)state;
    mpi_skip_without();
    run_ranks(2, "different");
    job_expect(&job, false, "all_gather 1 (5 fp32)");
    job_expect(&job, false, "reduce_scatter 1 (6 fp32)");
    assert_in_range(job.ms, 500, 15000);
}

static void a_killed_rank_ends_the_others_and_is_named(void **state)
{
    (void)state;
    mpi_skip_without();
    run_ranks(3, "killed");
    job_expect(&job, false, "process rank 1");
    assert_in_range(job.ms, 0, 15000);
}

static void a_rank_that_gives_up_ends_the_others_with_its_cause(void **state)
{
    (void)state;
    mpi_skip_without();
    run_ranks(3, "gives-up");
    job_expect(&job, false, "r1 error mpi: cannot read the data");
    assert_in_range(job.ms, 0, 15000);
}

static void abort_may_come_from_another_thread(void **state)
{
    (void)state;
    mpi_skip_without();
    run_ranks(2, "aborted");
    job_expect(&job, false, "the watchdog has had enough");
    assert_in_range(job.ms, 0, 15000);
}

static int make_scratch(void **state)
{
    (void)state;
    scratch_make(&scratch);
    return 0;
}

static int remove_scratch(void **state)
{
    (void)state;
    scratch_remove(&scratch);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--rank") == 0)
        return rank_main(argv[2]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(collectives_are_those_of_local_to_the_bit),
        cmocka_unit_test(counts_above_mpis_are_one_collective_all_the_same),
        cmocka_unit_test(collectives_complete_beside_slow_operations_before_their_wait),
        cmocka_unit_test(b84_a_time_out_names_the_silent_rank),
        cmocka_unit_test(b84_different_collectives_end_with_what_each_rank_waits_for),
        cmocka_unit_test(a_killed_rank_ends_the_others_and_is_named),
        cmocka_unit_test(a_rank_that_gives_up_ends_the_others_with_its_cause),
        cmocka_unit_test(abort_may_come_from_another_thread),
    };
    return cmocka_run_group_tests(tests, make_scratch, remove_scratch);
}
