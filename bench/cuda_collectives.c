/*
 * Collectives between GPUs, by themselves: kernels of comm/nccl_peers.cu beside NCCL's.
 *
 * usage: build/release/bench/cuda_collectives [RANKS]       (2 GPUs at least; all of them)
 *
 * Each row: a collective in symmetric windows, its bytes (of all ranks together), us a call of many
 * on one stream, by the slowest rank, and the bytes that a rank gets from others over that. The
 * sizes are those of a step: a report, a block of BERT-base and of BERT-large, the rows of a table.
 */
#include <stdio.h>
#include <string.h>

#include "comm/launch.h"
#include "comm/nccl.h"
#include "engine/base/arena.h"
#include "engine/base/log.h"
#include "engine/base/out.h"
#include "engine/base/text.h"
#include "engine/device/device.h"

enum {
    TIMEOUT_MS = 60000,
    WARM = 3,
    CALLS = 20,
    ROUNDS = 5,
    MOST_BYTES = 64 << 20,
    MOST_RANKS = 64
};

static const struct {
    const char *name;
    bool reduce;
    int64_t bytes; /* of all ranks */
    enum dtype dtype;
} rows[] = {
    {"all_gather, a report of 2 KB a rank", false, 0, DTYPE_F32},
    {"all_gather, BERT-base, a block in bf16", false, 14175744, DTYPE_BF16},
    {"all_gather, BERT-large, a block in bf16", false, 25192448, DTYPE_BF16},
    {"reduce_scatter, rows of BERT-large in bf16", true, 23068672, DTYPE_BF16},
    {"reduce_scatter, BERT-base, a block in fp32", true, 28351488, DTYPE_F32},
    {"reduce_scatter, BERT-large, a block in fp32", true, 50384896, DTYPE_F32},
};

struct bench {
    struct launch launch;
    struct device *device;
    struct comm *comm;
    struct rendezvous *rv;
    struct event done;
    struct device_timer begin, end;
    void *memory;
};

static enum status bench_open(struct bench *b, enum window_kind windows)
{
    int index = 0;
    struct nccl_id id;
    TRY(launch_discover(&b->launch, 0));
    const struct launch *l = &b->launch;
    TRY(launch_meet(&b->rv, l, TIMEOUT_MS));
    TRY(launch_device(&index, l, device_cuda_count()));
    TRY(nccl_id_share(&id, l->rank, l->world_size, b->rv));
    TRY(device_open(&b->device, DEVICE_CUDA, PRECISION_AUTO, index, 1));
    TRY(nccl_comm_open(&b->comm, b->device, l->rank, l->world_size, &id, b->rv, TIMEOUT_MS,
                       windows));
    TRY(comm_memory_open(b->comm, b->device, &b->memory, (size_t)2 * MOST_BYTES));
    TRY(device_fill(&b->device->streams[STREAM_COMPUTE], b->memory, 0, (size_t)2 * MOST_BYTES));
    TRY(stream_sync(&b->device->streams[STREAM_COMPUTE]));
    TRY(comm_ready(b->comm));
    TRY(event_open(b->device, &b->done));
    TRY(device_timer_open(b->device, &b->begin));
    return device_timer_open(b->device, &b->end);
}

static void bench_close(struct bench *b)
{
    if (b->device != NULL)
        device_settle(b->device);
    event_close(&b->done);
    device_timer_close(&b->begin);
    device_timer_close(&b->end);
    if (b->comm != NULL)
        comm_memory_close(b->comm, b->device, &b->memory);
    comm_close(&b->comm);
    rendezvous_close(&b->rv);
    device_close(&b->device);
}

static enum status call(struct bench *b, size_t row, int64_t numel)
{
    char *other = (char *)b->memory + MOST_BYTES;
    if (rows[row].reduce)
        return comm_reduce_scatter(b->comm, &b->device->streams[STREAM_REDUCE], other, b->memory,
                                   numel, rows[row].dtype, &b->done);
    return comm_all_gather(b->comm, &b->device->streams[STREAM_REDUCE], b->memory, other, numel,
                           rows[row].dtype, &b->done);
}

/* Of the slowest rank, in the fastest round. */
static enum status measure(struct bench *b, size_t row, int64_t numel, double *us)
{
    struct stream *s = &b->device->streams[STREAM_REDUCE];
    double mine, all[MOST_RANKS];
    *us = 1e30;
    for (int i = 0; i < WARM; i++)
        TRY(call(b, row, numel));
    for (int round = 0; round < ROUNDS; round++) {
        double slowest = 0.0;
        TRY(stream_sync(s));
        TRY(comm_barrier(b->comm));
        TRY(device_timer_record(&b->begin, s));
        for (int i = 0; i < CALLS; i++)
            TRY(call(b, row, numel));
        TRY(device_timer_record(&b->end, s));
        TRY(device_timer_elapsed_ms(&b->begin, &b->end, &mine));
        TRY(comm_exchange(b->comm, all, &mine, sizeof mine));
        for (int r = 0; r < b->comm->world_size; r++)
            slowest = all[r] > slowest ? all[r] : slowest;
        *us = slowest * 1e3 / CALLS < *us ? slowest * 1e3 / CALLS : *us;
    }
    return ST_OK;
}

static enum status be_rank(struct bench *b, enum window_kind windows)
{
    TRY(bench_open(b, windows));
    int ranks = b->comm->world_size;
    if (b->comm->rank == 0)
        out("%d x %s; %s\n", ranks, b->device->name, b->comm->memory_text);
    for (size_t row = 0; row < sizeof rows / sizeof rows[0]; row++) {
        double us;
        int64_t bytes = rows[row].bytes > 0 ? rows[row].bytes : (int64_t)2048 * ranks;
        int64_t numel = bytes / ranks / 256 * 256 / (int64_t)dtype_bytes(rows[row].dtype);
        TRY(measure(b, row, numel, &us));
        double got = (double)numel * (double)dtype_bytes(rows[row].dtype) * (ranks - 1);
        if (b->comm->rank == 0)
            out("%-44s %10lld %8.1f us %7.1f GB/s\n", rows[row].name, (long long)bytes, us,
                got / us * 1e-3);
    }
    return comm_barrier(b->comm);
}

int main(int argc, char **argv)
{
    struct bench b;
    int code = 0;
    memset(&b, 0, sizeof b);
    if (argc == 3 && strcmp(argv[1], "rank") == 0) {
        enum status st = be_rank(&b, argv[2][0] == 'o' ? WINDOWS_OWN : WINDOWS_NCCL);
        if (st != ST_OK)
            log_error("bench", "%s", status_message());
        bench_close(&b);
        return (int)st;
    }
    int64_t ranks = device_cuda_count();
    if (argc == 1 && ranks < 2) {
        out("cuda_collectives: fewer than two GPUs; skipped\n");
        return 0;
    }
    if ((argc > 1 && !text_to_int(&ranks, argv[1])) || ranks < 2 || ranks > MOST_RANKS) {
        out("cuda_collectives: expected 2 to %d GPUs\n", (int)MOST_RANKS);
        return 1;
    }
    static const char *const ways[] = {"own", "nccl"};
    for (int way = 0; way < 2 && code == 0; way++) {
        char *arguments[] = {(char *)"cuda_collectives", (char *)"rank", (char *)ways[way], NULL};
        if (launch_spawn(&code, (int)ranks, arguments, 0) != ST_OK) {
            log_error("bench", "%s", status_message());
            code = 1;
        }
    }
    return code;
}
