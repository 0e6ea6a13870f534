/*
 * NCCL between processes of this machine, one a GPU (or four on one, with
 * NCCL_MULTI_RANK_GPU_ENABLE=1 and an NCCL of 2.30 or later). The program is its own rank, as in
 * tests/comm_launch.c: each test starts it again with the test's role.
 */
#include "comm/nccl.h"

#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/launch.h"
#include "comm/socket.h"
#include "engine/base/arena.h"
#include "engine/base/clock.h"
#include "engine/base/file.h"
#include "engine/base/log.h"
#include "engine/device/nvml.h"
#include "engine/train/bus.h"
#include "tests/support/support.h"

enum { MAX_TEST_RANKS = 4, NUMEL = 30001, TIMEOUT_MS = 60000, DIES = 9, CONTEXT_MiB = 400 };
enum { PACKED = 30000 /* whole packs: a collective of our own where there is a window */ };

/* Of a rank: no whole packs; packs of one block, of all, and many rounds of each block's stages. */
static const int64_t numels[] = {NUMEL, 4, 128, 30000, 1500012};
enum { SIZES = sizeof numels / sizeof *numels, MOST_NUMEL = 1500012 };

#define CHECK(cond)                                                                                \
    do {                                                                                           \
        if (!(cond))                                                                               \
            return FAIL(CORRUPT, "rank %d: check failed: %s", b->comm->rank, #cond);               \
    } while (0)

/* ---- a rank --------------------------------------------------------------------------------- */

struct bench {
    struct device *device;
    struct comm *comm;
    struct rendezvous *rv;
    struct event done, fork, join[2];
    void *memory;    /* device, for collectives: a, b and c lie in it */
    void *a, *b, *c; /* MOST_NUMEL * 4 * ranks bytes each */
    int32_t *host;   /* pinned, the same size */
    size_t bytes;
};

/* The last rank ends in the middle of its opening, with a cause. */
static enum status end_here(struct bench *b, const struct launch *l, bool here)
{
    if (!here || l->rank != l->world_size - 1)
        return ST_OK;
    if (b->comm != NULL)
        comm_abort(b->comm, "the disk is full");
    else
        rendezvous_abort(b->rv, "the disk is full");
    return FAIL(IO, "the disk is full");
}

/* Makes NCCL register blocks of memory without symmetric windows. */
static const char NO_WINDOWS[] = "NCCL_WIN_ENABLE";

/* @windows: the buffers are to lie in symmetric windows. */
static enum status bench_open(struct bench *b, const struct launch *l, const char *role,
                              enum window_kind windows)
{
    int index = 0;
    struct nccl_id id;
    void *host = NULL;
    TRY(launch_meet(&b->rv, l, TIMEOUT_MS));
    TRY(launch_device(&index, l, device_cuda_count()));
    TRY(nccl_id_share(&id, l->rank, l->world_size, b->rv));
    TRY(device_open(&b->device, DEVICE_CUDA, PRECISION_AUTO, index, 1));
    TRY(end_here(b, l, strcmp(role, "ends_before_joining") == 0));
    TRY(nccl_comm_open(&b->comm, b->device, l->rank, l->world_size, &id, b->rv, TIMEOUT_MS,
                       windows));
    b->bytes = (size_t)MOST_NUMEL * 4 * (size_t)l->world_size;
    size_t each = (size_t)round_up((int64_t)b->bytes, ARENA_ALIGN);
    TRY(comm_memory_open(b->comm, b->device, &b->memory, 3 * each));
    /* Until then the ranks are being connected, and what needs no peer goes on. */
    if (b->comm->opening != (l->world_size > 1))
        return FAIL(CORRUPT, "rank %d: opening is %d", l->rank, b->comm->opening);
    TRY(device_fill(&b->device->streams[STREAM_COMPUTE], b->memory, 0, b->bytes));
    TRY(stream_sync(&b->device->streams[STREAM_COMPUTE]));
    TRY(comm_barrier(b->comm));
    TRY(end_here(b, l, strcmp(role, "ends_before_ready") == 0));
    TRY(comm_ready(b->comm));
    if (b->comm->opening)
        return FAIL(CORRUPT, "rank %d: it is ready and still opens", l->rank);
    const char *text = b->comm->memory_text;
    bool made = windows != WINDOWS_NONE && getenv(NO_WINDOWS) == NULL;
    if ((strstr(text, "in symmetric windows") != NULL) != made ||
        (strstr(text, "that NCCL has registered") != NULL) != (windows != WINDOWS_NONE && !made) ||
        (strstr(text, "in rank order") != NULL) !=
            (made && windows == WINDOWS_OWN && b->device->early_launch /* H100 and newer */))
        return FAIL(CORRUPT, "rank %d: %s", l->rank, b->comm->memory_text);
    b->a = b->memory;
    b->b = (char *)b->memory + each;
    b->c = (char *)b->memory + 2 * each;
    TRY(device_alloc_host(b->device, &host, b->bytes));
    b->host = host;
    TRY(event_open(b->device, &b->done));
    TRY(event_open(b->device, &b->fork));
    TRY(event_open(b->device, &b->join[0]));
    return event_open(b->device, &b->join[1]);
}

static void bench_close(struct bench *b)
{
    void *host = b->host;
    event_close(&b->done);
    event_close(&b->fork);
    event_close(&b->join[0]);
    event_close(&b->join[1]);
    if (b->comm != NULL)
        comm_memory_close(b->comm, b->device, &b->memory);
    comm_close(&b->comm);
    rendezvous_close(&b->rv);
    if (b->device == NULL)
        return;
    device_free_host(b->device, &host);
    device_close(&b->device);
}

static struct stream *stream(struct bench *b, enum stream_id id)
{
    return &b->device->streams[id];
}

static enum status upload(struct bench *b, void *to, size_t bytes)
{
    TRY(device_copy(stream(b, STREAM_COMPUTE), to, b->host, bytes));
    return stream_sync(stream(b, STREAM_COMPUTE));
}

static enum status download(struct bench *b, const void *from, size_t bytes)
{
    TRY(device_copy(stream(b, STREAM_COMPUTE), b->host, from, bytes));
    return stream_sync(stream(b, STREAM_COMPUTE));
}

static enum status gathers_some(struct bench *b, int64_t numel)
{
    int64_t rank = b->comm->rank, ranks = b->comm->world_size;
    for (int64_t i = 0; i < numel; i++)
        b->host[i] = (int32_t)(rank * 10000000 + i);
    TRY(upload(b, b->a, (size_t)numel * 4));
    TRY(comm_all_gather(b->comm, stream(b, STREAM_GATHER), b->b, b->a, numel, DTYPE_I32, &b->done));
    TRY(event_wait(&b->done));
    TRY(download(b, b->b, (size_t)(ranks * numel * 4)));
    for (int64_t r = 0; r < ranks; r++)
        for (int64_t i = 0; i < numel; i++)
            CHECK(b->host[r * numel + i] == r * 10000000 + i);
    /* bf16 in place: the bits must arrive, whatever they are; two bytes an element. */
    int64_t half = numel - numel % 2;
    enum stream_id id = numel % 8 == 0 ? STREAM_GATHER : STREAM_COMPUTE;
    memset(b->host, (int)rank + 1, (size_t)half * 2);
    TRY(upload(b, (char *)b->c + rank * half * 2, (size_t)half * 2));
    TRY(comm_all_gather(b->comm, stream(b, id), b->c, (char *)b->c + rank * half * 2, half,
                        DTYPE_BF16, &b->done));
    TRY(event_wait(&b->done));
    TRY(download(b, b->c, (size_t)(ranks * half * 2)));
    for (int64_t i = 0; i < ranks * half * 2; i++)
        CHECK(((char *)b->host)[i] == i / (half * 2) + 1);
    return ST_OK;
}

static enum status gathers(struct bench *b)
{
    for (int i = 0; i < SIZES; i++)
        TRY(gathers_some(b, numels[i]));
    return ST_OK;
}

/* bf16, each element of one rank alone: beside the others' -0 it comes with its bits, those of a
 * zero of either sign too. */
static enum status reduces_rows(struct bench *b, int64_t numel)
{
    int64_t rank = b->comm->rank, ranks = b->comm->world_size;
    uint16_t *halves = (uint16_t *)(void *)b->host;
    for (int64_t i = 0; i < numel * ranks; i++)
        halves[i] = (uint16_t)(i % ranks == rank ? (i & 1) << 15 | i % 0x7F80 : 0x8000);
    TRY(upload(b, b->a, (size_t)(numel * ranks) * 2));
    TRY(comm_reduce_scatter(b->comm, stream(b, STREAM_REDUCE), b->c, b->a, numel, DTYPE_BF16,
                            &b->done));
    TRY(event_wait(&b->done));
    TRY(download(b, b->c, (size_t)numel * 2));
    for (int64_t k = 0; k < numel; k++) {
        int64_t i = rank * numel + k;
        CHECK(halves[k] == (uint16_t)((i & 1) << 15 | i % 0x7F80));
    }
    return ST_OK;
}

/* Whole numbers are summed without rounding, so any order gives the same. */
static enum status reduces_some(struct bench *b, int64_t numel)
{
    int64_t rank = b->comm->rank, ranks = b->comm->world_size;
    float *f = (float *)(void *)b->host;
    for (int64_t i = 0; i < numel * ranks; i++)
        f[i] = (float)(i % 1000 + rank);
    TRY(upload(b, b->a, (size_t)(numel * ranks) * 4));
    char *own = (char *)b->a + rank * numel * 4; /* in place */
    TRY(comm_reduce_scatter(b->comm, stream(b, STREAM_REDUCE), own, b->a, numel, DTYPE_F32,
                            &b->done));
    TRY(event_wait(&b->done));
    TRY(download(b, own, (size_t)numel * 4));
    for (int64_t i = 0; i < numel; i++)
        CHECK(f[i] == (float)(ranks * ((rank * numel + i) % 1000) + ranks * (ranks - 1) / 2));
    return ST_OK;
}

/* Of which the sum depends on the order. */
static float term(int64_t rank, int64_t i)
{
    return (float)(1 + (i * 7919 + rank * 104729) % 1000003) / 3.0f;
}

static enum status reduces_in_rank_order(struct bench *b)
{
    int64_t rank = b->comm->rank, ranks = b->comm->world_size, numel = MOST_NUMEL;
    float *f = (float *)(void *)b->host;
    for (int64_t i = 0; i < numel * ranks; i++)
        f[i] = term(rank, i);
    TRY(upload(b, b->a, (size_t)(numel * ranks) * 4));
    TRY(comm_reduce_scatter(b->comm, stream(b, STREAM_REDUCE), b->b, b->a, numel, DTYPE_F32,
                            &b->done));
    TRY(event_wait(&b->done));
    TRY(download(b, b->b, (size_t)numel * 4));
    for (int64_t i = 0; i < numel; i++) {
        float sum = term(0, rank * numel + i);
        for (int64_t r = 1; r < ranks; r++)
            sum += term(r, rank * numel + i);
        CHECK(f[i] == sum);
    }
    return ST_OK;
}

static enum status reduces(struct bench *b)
{
    for (int i = 0; i < SIZES; i++)
        TRY(reduces_some(b, numels[i]));
    for (int i = 0; i < SIZES; i++)
        TRY(reduces_rows(b, numels[i]));
    if (strstr(b->comm->memory_text, "in rank order") != NULL)
        TRY(reduces_in_rank_order(b));
    return ST_OK;
}

/* Of two streams at once, many behind each other, while the ranks are not in step. */
static enum status runs_beside(struct bench *b)
{
    enum { ROUNDS = 100, LATE_US = 300 };
    int64_t rank = b->comm->rank, ranks = b->comm->world_size;
    float *f = (float *)(void *)b->host;
    void *sum = (char *)b->a + PACKED * 4;
    for (int64_t i = 0; i < PACKED; i++)
        b->host[i] = (int32_t)(rank * 10000000 + i);
    TRY(upload(b, b->a, PACKED * 4));
    for (int64_t i = 0; i < PACKED * ranks; i++)
        f[i] = (float)(i % 1000 + rank);
    TRY(upload(b, b->c, (size_t)(PACKED * ranks) * 4));
    for (int round = 0; round < ROUNDS; round++) {
        if (round % ranks == rank)
            clock_pause_us(LATE_US);
        TRY(comm_all_gather(b->comm, stream(b, STREAM_GATHER), b->b, b->a, PACKED, DTYPE_I32,
                            &b->join[0]));
        TRY(comm_reduce_scatter(b->comm, stream(b, STREAM_REDUCE), sum, b->c, PACKED, DTYPE_F32,
                                &b->join[1]));
    }
    TRY(event_wait(&b->join[0]));
    TRY(event_wait(&b->join[1]));
    TRY(download(b, sum, PACKED * 4));
    for (int64_t i = 0; i < PACKED; i++)
        CHECK(f[i] == (float)(ranks * ((rank * PACKED + i) % 1000) + ranks * (ranks - 1) / 2));
    TRY(download(b, b->b, (size_t)(PACKED * ranks) * 4));
    for (int64_t i = 0; i < PACKED * ranks; i++)
        CHECK(b->host[i] == i / PACKED * 10000000 + i % PACKED);
    return ST_OK;
}

static enum status broadcasts_and_exchanges(struct bench *b)
{
    int64_t rank = b->comm->rank, ranks = b->comm->world_size;
    for (int64_t root = 0; root < ranks; root++) {
        for (int64_t i = 0; i < NUMEL; i++)
            b->host[i] = (int32_t)(rank == root ? 7 * i + root : -1);
        TRY(upload(b, b->a, NUMEL * 4));
        TRY(comm_broadcast(b->comm, stream(b, STREAM_GATHER), b->a, NUMEL, DTYPE_I32, (int)root,
                           &b->done));
        TRY(event_wait(&b->done));
        TRY(download(b, b->a, NUMEL * 4));
        for (int64_t i = 0; i < NUMEL; i++)
            CHECK(b->host[i] == 7 * i + root);
    }
    int64_t all[MAX_TEST_RANKS] = {0}, mine = rank * rank;
    TRY(comm_exchange(b->comm, all, &mine, sizeof mine));
    for (int64_t r = 0; r < ranks; r++)
        CHECK(all[r] == r * r);
    TRY(comm_barrier(b->comm));
    enum status st = comm_agree(b->comm, rank == ranks - 1 ? FAIL(IO, "no such file") : ST_OK);
    CHECK(st == ST_IO);
    return comm_agree(b->comm, ST_OK);
}

/* A gather on one stream and a reduction on another, both inside one captured piece. */
static enum status capture(struct bench *b, struct graph **graph)
{
    struct stream *c = stream(b, STREAM_COMPUTE), *g = stream(b, STREAM_GATHER),
                  *r = stream(b, STREAM_REDUCE);
    TRY(stream_capture_begin(c));
    TRY(device_copy(c, b->a, b->host, PACKED * 4));
    TRY(event_record(&b->fork, c));
    TRY(stream_wait(g, &b->fork));
    TRY(stream_wait(r, &b->fork));
    TRY(comm_all_gather(b->comm, g, b->b, b->a, PACKED, DTYPE_F32, &b->join[0]));
    TRY(device_mark(g, 11));
    TRY(event_record(&b->join[0], g));
    TRY(stream_wait(r, &b->join[0]));
    TRY(comm_reduce_scatter(b->comm, r, b->c, b->b, PACKED, DTYPE_F32, &b->join[1]));
    TRY(device_mark(r, 12));
    TRY(event_record(&b->join[1], r));
    TRY(stream_wait(c, &b->join[1]));
    TRY(device_copy(c, b->host, b->c, PACKED * 4));
    return stream_capture_end(c, graph);
}

static enum status replays(struct bench *b)
{
    int64_t rank = b->comm->rank, ranks = b->comm->world_size;
    float *f = (float *)(void *)b->host;
    struct graph *graph = NULL;
    size_t before = 0, after = 0;
    TRY(capture(b, &graph));
    enum status st = ST_OK;
    for (int round = 0; st == ST_OK && round < 20; round++) {
        for (int64_t i = 0; i < PACKED; i++)
            f[i] = (float)(rank + round + i % 100);
        TRY_GOTO(st, out, graph_launch(stream(b, STREAM_COMPUTE), graph));
        TRY_GOTO(st, out, stream_sync(stream(b, STREAM_COMPUTE)));
        /* All gathered the same, so the sum is ranks times what this rank's number sent. */
        for (int64_t i = 0; i < PACKED && st == ST_OK; i++)
            if (f[i] != (float)(ranks * (rank + round + i % 100)))
                st = FAIL(CORRUPT, "replay %d, element %lld", round, (long long)i);
        if (round == 1)
            TRY_GOTO(st, out, device_memory_used(b->device, &before));
    }
    TRY_GOTO(st, out, device_memory_used(b->device, &after));
    if (st == ST_OK && after != before)
        st = FAIL(CORRUPT, "memory grew from %zu to %zu bytes over the replays", before, after);
out:
    graph_close(&graph); /* before the communicator */
    return st;
}

/*
 * The failures come after a first collective, as in a run, where a rehearsal makes NCCL connect:
 * its first call waits for the peers on the host, inside NCCL, where nobody can end it.
 */

/* The last rank dies while the others wait for its part of a collective. */
static enum status one_dies(struct bench *b)
{
    TRY(gathers_some(b, PACKED));
    TRY(comm_barrier(b->comm));
    if (b->comm->rank == b->comm->world_size - 1)
        raise(SIGKILL);
    TRY(comm_all_gather(b->comm, stream(b, STREAM_GATHER), b->b, b->a, PACKED, DTYPE_I32,
                        &b->done));
    return event_wait(&b->done);
}

/* The last rank never issues it; there is no failure to see, only the deadline. */
static enum status one_is_silent(struct bench *b)
{
    TRY(gathers_some(b, PACKED));
    b->comm->timeout_ms = 4000; /* not of the set-up, which may take longer */
    TRY(comm_barrier(b->comm));
    if (b->comm->rank == b->comm->world_size - 1) {
        for (int i = 0; i < 1000; i++) {
            clock_pause_us(20000);
            TRY(rendezvous_check(b->rv));
        }
        return ST_OK;
    }
    TRY(device_mark(stream(b, STREAM_GATHER), 41));
    TRY(comm_all_gather(b->comm, stream(b, STREAM_GATHER), b->b, b->a, PACKED, DTYPE_I32,
                        &b->done));
    return event_wait(&b->done);
}

/* The last rank gives up with a cause, as after an error of its own. */
static enum status one_aborts(struct bench *b)
{
    TRY(gathers_some(b, PACKED));
    TRY(comm_barrier(b->comm));
    if (b->comm->rank == b->comm->world_size - 1) {
        comm_abort(b->comm, "the disk is full");
        return FAIL(IO, "the disk is full");
    }
    TRY(comm_all_gather(b->comm, stream(b, STREAM_GATHER), b->b, b->a, PACKED, DTYPE_I32,
                        &b->done));
    return event_wait(&b->done);
}

/* Memory that one rank does not have: no rank has windows, and that rank says why. */
static enum status one_is_full(struct bench *b)
{
    enum { MIB = 1 << 20, BLOCK = 512 * MIB, PIECE = 128 * MIB };
    bool full = b->comm->rank == b->comm->world_size - 1;
    void *block = NULL, *piece = NULL;
    comm_memory_close(b->comm, b->device, &b->memory);
    while (full && device_alloc(b->device, &piece, PIECE) == ST_OK)
        continue; /* they go with the process */
    enum status st = comm_memory_open(b->comm, b->device, &block, BLOCK);
    CHECK(strstr(b->comm->memory_text, "without symmetric windows: rank") != NULL);
    comm_memory_close(b->comm, b->device, &block);
    TRY(comm_barrier(b->comm));
    if (full)
        CHECK(st == ST_MEMORY);
    return full ? ST_OK : st;
}

/* Every rank has a context on its own card, and nobody one on another's: about 0.5 GiB each there.
 * NVML tells processes apart only where it sees them, so memory counts. */
static enum status contexts(struct bench *b)
{
    enum status st = ST_OK;
    char bus_id[32];
    double used[MAX_TEST_RANKS];
    struct nvml *nvml = NULL;
    struct nvml_sample now;
    TRY(device_cuda_bus_id(bus_id, b->device->index));
    TRY(nvml_open(&nvml, bus_id));
    TRY_GOTO(st, out, gathers_some(b, PACKED)); /* now kernels are loaded and connections made */
    TRY_GOTO(st, out, comm_barrier(b->comm));
    nvml_read(nvml, &now);
    TRY_GOTO(st, out, comm_exchange(b->comm, used, &now.memory_used_MiB, sizeof *used));
    for (int r = 0; r < b->comm->world_size; r++)
        if (!(used[0] < used[r] + CONTEXT_MiB / 2))
            st = FAIL(CORRUPT,
                      "the first card has %.0f MiB in use, that of rank %d %.0f: a "
                      "context of another rank?",
                      used[0], r, used[r]);
    int processes = nvml_processes(nvml);
    if (processes > 1)
        st = FAIL(CORRUPT, "%d processes have contexts on the card of rank %d", processes,
                  b->comm->rank);
    enum status ended = comm_barrier(b->comm); /* nobody ends while others look */
    st = st != ST_OK ? st : ended;
out:
    nvml_close(&nvml);
    return st;
}

static enum status measures_the_bus(struct bench *b)
{
    enum { BYTES = 32 << 20 };
    struct bus bus;
    comm_memory_close(b->comm, b->device, &b->memory); /* one block at a time */
    TRY(comm_memory_open(b->comm, b->device, &b->memory, BYTES));
    TRY(bus_measure(&bus, b->device, b->comm, b->memory, BYTES));
    printf("rank %d: %.1f GB/s\n", b->comm->rank, bus.bytes_a_second * 1e-9);
    CHECK(bus.bytes_a_second > 1e8 && bus.bytes_a_second < 1e13);
    CHECK(bus.bytes > BYTES - (1 << 20) && bus.bytes <= BYTES);
    return ST_OK;
}

static const struct role {
    const char *name;
    enum status (*run)(struct bench *b);
} roles[] = {
    {"gathers", gathers},      {"reduces", reduces},         {"others", broadcasts_and_exchanges},
    {"replays", replays},      {"one_dies", one_dies},       {"one_aborts", one_aborts},
    {"silent", one_is_silent}, {"one_is_full", one_is_full}, {"contexts", contexts},
    {"bus", measures_the_bus}, {"beside", runs_beside},
};

/* rank LOG ROLE WINDOWS: exit code 0, or the status. What is said goes to LOG-rank. */
static int be_rank(char **argv)
{
    struct launch l;
    struct bench b;
    char path[600];
    memset(&b, 0, sizeof b);
    enum status st = launch_discover(&l, 0);
    if (st == ST_OK) {
        log_set_rank(l.rank);
        st = bench_open(&b, &l, argv[3], (enum window_kind)(argv[4][0] - '0'));
    }
    for (size_t i = 0; st == ST_OK && i < sizeof roles / sizeof roles[0]; i++)
        if (strcmp(roles[i].name, argv[3]) == 0)
            st = roles[i].run(&b);
    snprintf(path, sizeof path, "%s-%d", argv[2], l.rank);
    char message[4096];
    snprintf(message, sizeof message, "%s", status_message());
    if (file_write(path, message, strlen(message)) != ST_OK)
        return 99;
    if (b.device != NULL)
        device_settle(b.device);
    if (b.device != NULL && b.device->lost)
        _exit((int)st);
    bench_close(&b);
    return (int)st;
}

/* ---- the tests ------------------------------------------------------------------------------ */

struct run {
    struct scratch scratch;
    int ranks, exit_code;
    int64_t ms;
};

/* As many as there are GPUs; all of them where ranks may share one. */
static int test_ranks(void)
{
    int count = device_cuda_count();
    return count < MAX_TEST_RANKS && (count == 0 || !launch_shares_gpus()) ? count : MAX_TEST_RANKS;
}

static void run_role(struct run *run, const char *role, int ranks, enum window_kind windows)
{
    char log_path[512], kind[2] = {(char)('0' + windows), 0};
    scratch_make(&run->scratch);
    scratch_path(&run->scratch, log_path, "log");
    char *argv[] = {(char *)"cuda_nccl", (char *)"rank", log_path, (char *)role, kind, NULL};
    int64_t begin = clock_ms();
    run->ranks = ranks;
    assert_ok(launch_spawn(&run->exit_code, ranks, argv, 0));
    run->ms = clock_ms() - begin;
}

static void assert_said(const struct run *run, int rank, const char *text)
{
    char path[512], name[32];
    struct file_text said;
    snprintf(name, sizeof name, "log-%d", rank);
    assert_ok(file_read(&said, scratch_path(&run->scratch, path, name)));
    if (strstr(said.data, text) == NULL)
        fail_msg("rank %d said \"%s\", not \"%s\"", rank, said.data, text);
    mem_free(&said.data);
}

static void run_well(const char *role, int ranks, enum window_kind windows)
{
    struct run run;
    run_role(&run, role, ranks, windows);
    for (int r = 0; run.exit_code != 0 && r < ranks; r++)
        assert_said(&run, r, "(this rank should have succeeded)");
    scratch_remove(&run.scratch);
}

#define NEEDS_GPUS(n)                                                                              \
    do {                                                                                           \
        if (test_ranks() < (n))                                                                    \
            skip();                                                                                \
    } while (0)

static void one_rank_needs_no_rendezvous(void **state)
{
    (void)state;
    NEEDS_GPUS(1);
    run_well("gathers", 1, WINDOWS_NONE);
    run_well("reduces", 1, WINDOWS_NONE);
    run_well("replays", 1, WINDOWS_NONE);
}

static void all_gather_brings_every_ranks_part(void **state)
{
    (void)state;
    NEEDS_GPUS(2);
    for (int windows = 0; windows < WINDOW_KINDS; windows++)
        run_well("gathers", test_ranks(), windows);
}

static void reduce_scatter_sums_into_the_owner(void **state)
{
    (void)state;
    NEEDS_GPUS(2);
    for (int windows = 0; windows < WINDOW_KINDS; windows++)
        run_well("reduces", test_ranks(), windows);
}

static void collectives_of_two_streams_run_beside_each_other(void **state)
{
    (void)state;
    NEEDS_GPUS(2);
    for (int windows = 0; windows < WINDOW_KINDS; windows++)
        run_well("beside", test_ranks(), windows);
}

static void broadcast_exchange_barrier_and_agree_work(void **state)
{
    (void)state;
    NEEDS_GPUS(2);
    run_well("others", test_ranks(), WINDOWS_NCCL);
}

static void captured_collectives_replay_without_new_memory(void **state)
{
    (void)state;
    NEEDS_GPUS(2);
    for (int windows = 0; windows < WINDOW_KINDS; windows++)
        run_well("replays", test_ranks(), windows);
}

static void where_one_rank_has_no_window_none_has(void **state)
{
    (void)state;
    NEEDS_GPUS(2);
    if (launch_shares_gpus())
        skip(); /* one rank fills its card, which would be the others' too */
    run_well("one_is_full", test_ranks(), WINDOWS_NCCL);
}

/* As between machines; NCCL's handle is then no address of the device. */
static void without_symmetric_windows_nccls_collectives_serve(void **state)
{
    (void)state;
    NEEDS_GPUS(2);
    setenv(NO_WINDOWS, "0", 1);
    run_well("gathers", test_ranks(), WINDOWS_OWN);
    run_well("reduces", test_ranks(), WINDOWS_OWN);
    unsetenv(NO_WINDOWS);
}

static void one_rank_dies(enum window_kind windows)
{
    struct run run;
    char expected[64];
    run_role(&run, "one_dies", test_ranks(), windows);
    assert_true(run.ms < TIMEOUT_MS / 2);
    assert_int_equal(run.exit_code, 128 + SIGKILL);
    snprintf(expected, sizeof expected, "rank %d closed its connection", run.ranks - 1);
    for (int r = 0; r < run.ranks - 1; r++)
        assert_said(&run, r, expected);
    scratch_remove(&run.scratch);
}

static void b86_a_dead_rank_ends_the_waits_of_the_others(void **state)
{
    (void)state;
    NEEDS_GPUS(2);
    for (int windows = 0; windows < WINDOW_KINDS; windows++)
        one_rank_dies(windows);
}

static void b86_a_cause_reaches_ranks_that_wait_for_the_gpu(void **state)
{
    (void)state;
    NEEDS_GPUS(2);
    struct run run;
    run_role(&run, "one_aborts", test_ranks(), WINDOWS_OWN);
    assert_int_not_equal(run.exit_code, 0);
    for (int r = 0; r < run.ranks; r++)
        assert_said(&run, r, "the disk is full");
    assert_true(run.ms < TIMEOUT_MS / 2);
    scratch_remove(&run.scratch);
}

/* Those that are connected behind the rest: NCCL itself would wait for the missing rank. */
static void b86_a_cause_reaches_ranks_that_are_being_connected(void **state)
{
    static const char *const roles_that_end[] = {"ends_before_joining", "ends_before_ready"};
    (void)state;
    NEEDS_GPUS(2);
    for (int i = 0; i < 2; i++) {
        struct run run;
        run_role(&run, roles_that_end[i], test_ranks(), WINDOWS_NCCL);
        assert_int_not_equal(run.exit_code, 0);
        for (int r = 0; r < run.ranks; r++)
            assert_said(&run, r, "the disk is full");
        assert_true(run.ms < TIMEOUT_MS / 2);
        scratch_remove(&run.scratch);
    }
}

static void a_silent_rank_is_a_time_out_that_says_what_was_waited_for(void **state)
{
    (void)state;
    NEEDS_GPUS(2);
    struct run run;
    run_role(&run, "silent", test_ranks(), WINDOWS_OWN);
    assert_int_not_equal(run.exit_code, 0);
    for (int r = 0; r < run.ranks; r++) {
        assert_said(&run, r, "gather 41");
        assert_said(&run, r, "last collective issued: all_gather 3 of 30000 int32 on the gather");
    }
    scratch_remove(&run.scratch);
}

/* Known to be without any process: what the ranks then have is theirs. */
static bool card_is_idle(int index)
{
    char bus_id[32];
    struct nvml *nvml = NULL;
    if (device_cuda_bus_id(bus_id, index) != ST_OK || nvml_open(&nvml, bus_id) != ST_OK)
        return false;
    bool idle = nvml_processes(nvml) == 0;
    nvml_close(&nvml);
    return idle;
}

static void b66_no_rank_has_a_context_on_anothers_card(void **state)
{
    int count = device_cuda_count();
    (void)state;
    if (count < 2)
        skip();
    for (int i = 0; i < count && i < MAX_TEST_RANKS; i++)
        if (!card_is_idle(i))
            skip();
    run_well("contexts", count < MAX_TEST_RANKS ? count : MAX_TEST_RANKS, WINDOWS_NCCL);
}

static void b93_the_bus_between_gpus_is_measured(void **state)
{
    (void)state;
    NEEDS_GPUS(2);
    for (int windows = 0; windows < WINDOW_KINDS; windows++)
        run_well("bus", test_ranks(), windows);
}

int main(int argc, char **argv)
{
    if (argc > 3 && strcmp(argv[1], "rank") == 0)
        return be_rank(argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_rank_needs_no_rendezvous),
        cmocka_unit_test(all_gather_brings_every_ranks_part),
        cmocka_unit_test(reduce_scatter_sums_into_the_owner),
        cmocka_unit_test(collectives_of_two_streams_run_beside_each_other),
        cmocka_unit_test(broadcast_exchange_barrier_and_agree_work),
        cmocka_unit_test(captured_collectives_replay_without_new_memory),
        cmocka_unit_test(where_one_rank_has_no_window_none_has),
        cmocka_unit_test(without_symmetric_windows_nccls_collectives_serve),
        cmocka_unit_test(b86_a_dead_rank_ends_the_waits_of_the_others),
        cmocka_unit_test(b86_a_cause_reaches_ranks_that_wait_for_the_gpu),
        cmocka_unit_test(a_silent_rank_is_a_time_out_that_says_what_was_waited_for),
        cmocka_unit_test(b66_no_rank_has_a_context_on_anothers_card),
        cmocka_unit_test(b93_the_bus_between_gpus_is_measured),
        cmocka_unit_test(b86_a_cause_reaches_ranks_that_are_being_connected),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
