/*
 * engine/ops/columns.cu - column sums of a matrix in two ordered stages; see cuda_common.cuh.
 *
 * Partial sums that wait lie at the end of the workspace, the newest first; what ops use of it for
 * themselves begins at its start. Where the two would meet, the sums are finished.
 */
#include "engine/base/arena.h"
#include "engine/ops/cuda_common.cuh"

enum { FINISH_THREADS = 1024, FINISH_LANES = FINISH_THREADS / 32, FINISH_JOBS = 24 };

/* One vector of sums. */
struct finish_job {
    float *out;
    const float *partial;
    int64_t parts, columns, stride;
    int first_block; /* of the kernel's */
    bool add;
};

struct finish_jobs {
    struct finish_job job[FINISH_JOBS];
    int count;
};

struct pending_sums {
    struct finish_jobs jobs;
    size_t bytes; /* reserved, from the end of the workspace */
    bool forked;  /* between side_begin and side_end */
    bool lent;    /* the side stream finishes them; the room is in use until it has */
};

static struct pending_sums *pending_of(const struct stream *s)
{
    return (struct pending_sums *)s->pending;
}

/* Sums are aligned, wherever the workspace ends. */
static size_t whole_bytes(const struct stream *s)
{
    return s->workspace_bytes / 256 * 256;
}

/*
 * A block: 32 packs of columns of one job. Row lane r adds parts r, r + 32, ...; then the row lanes
 * of a column are added by a butterfly. Bytes: the partial sums once, mostly from the L2 cache;
 * packs of four keep enough of them on their way.
 */
template <int W>
__global__ static void __launch_bounds__(FINISH_THREADS)
    columns_finish_kernel(struct finish_jobs jobs)
{
    __shared__ float tile[W * 32][FINISH_LANES + 1];
    int lane = threadIdx.x % 32, row = threadIdx.x / 32, k = 0;
    kernel_begin();
    while (k + 1 < jobs.count && (int)blockIdx.x >= jobs.job[k + 1].first_block)
        k++;
    const struct finish_job &j = jobs.job[k];
    int64_t c0 = (int64_t)((int)blockIdx.x - j.first_block) * 32 * W, c = c0 + lane * W;
    float sum[W] = {0.0f};
    if (c < j.columns)
#pragma unroll 4
        for (int64_t p = row; p < j.parts; p += FINISH_LANES) {
            float x[W];
            load_pack<float, W>(x, j.partial + p * j.stride + c);
#pragma unroll
            for (int i = 0; i < W; i++)
                sum[i] += x[i];
        }
#pragma unroll
    for (int i = 0; i < W; i++)
        tile[lane * W + i][row] = sum[i];
    __syncthreads();
#pragma unroll
    for (int n = row; n < 32 * W; n += FINISH_LANES) {
        float total = warp_sum(tile[n][lane]);
        if (lane == 0 && c0 + n < j.columns)
            j.out[c0 + n] = (j.add ? j.out[c0 + n] : 0.0f) + total;
    }
}

/* Enqueue the kernel; the room stays reserved. */
static enum status finish_jobs(struct stream *s)
{
    struct pending_sums *p = pending_of(s);
    struct finish_jobs jobs = p->jobs;
    int blocks = 0, pack = 4;
    if (jobs.count == 0)
        return ST_OK;
    p->jobs.count = 0;
    for (int i = 0; i < jobs.count; i++)
        if (jobs.job[i].columns % 4 != 0)
            pack = 1;
    for (int i = 0; i < jobs.count; i++) {
        jobs.job[i].first_block = blocks;
        blocks += (int)div_up(jobs.job[i].columns, 32 * pack);
    }
    return launch_kernel(s, dim3((unsigned)blocks), FINISH_THREADS,
                         pack == 4 ? columns_finish_kernel<4> : columns_finish_kernel<1>, jobs);
}

/* All that the side stream was given is done, before what comes next on @s. */
static enum status join_side(struct stream *s)
{
    struct stream *beside = &s->device->streams[STREAM_SIDE];
    TRY(finish_jobs(beside));
    pending_of(beside)->bytes = 0;
    pending_of(s)->lent = false;
    return stream_follow(s, beside);
}

/* The side stream gets the sums of the stream that it runs beside. */
static enum status take_sums(struct stream *beside)
{
    struct stream *s = &beside->device->streams[STREAM_COMPUTE];
    struct pending_sums *p = pending_of(s), *ours = pending_of(beside);
    if (!p->forked || p->jobs.count == 0)
        return ST_OK;
    TRY(finish_jobs(beside)); /* what it had of its own */
    TRY(stream_follow(beside, s));
    ours->jobs = p->jobs;
    p->jobs.count = 0;
    p->lent = true;
    return ST_OK;
}

/* What is enqueued from now on may write where the sums were: it runs behind the kernel. */
enum status cuda_finish_sums(struct stream *s)
{
    if (s->id == STREAM_SIDE)
        TRY(take_sums(s));
    if (pending_of(s)->lent)
        TRY(join_side(s));
    pending_of(s)->bytes = 0;
    return finish_jobs(s);
}

enum status stream_scratch(void **out, struct stream *s, size_t bytes)
{
    *out = s->workspace;
    if (bytes + pending_of(s)->bytes > whole_bytes(s))
        TRY(cuda_finish_sums(s));
    if (s->workspace_bytes < bytes)
        return FAIL(INVALID, "the stream's workspace has %zu bytes, an op needs %zu",
                    s->workspace_bytes, bytes);
    return ST_OK;
}

/* One stream has side work at a time: what a unit issues on the compute stream. */
enum status cuda_side_begin(struct stream **side, struct stream *s)
{
    struct stream *beside = &s->device->streams[STREAM_SIDE];
    *side = s;
    if (s->id != STREAM_COMPUTE || beside->workspace_bytes == 0)
        return ST_OK;
    ASSERT(!pending_of(s)->forked && pending_of(beside)->jobs.count == 0);
    TRY(stream_follow(beside, s));
    pending_of(s)->forked = true;
    *side = beside;
    return ST_OK;
}

enum status cuda_side_end(struct stream *s)
{
    struct pending_sums *p = pending_of(s);
    if (!p->forked)
        return ST_OK;
    p->forked = false;
    TRY(join_side(s));
    if (p->jobs.count == 0) /* none since */
        p->bytes = 0;
    return ST_OK;
}

enum status columns_reserve(float **out, struct stream *s, int64_t numel)
{
    struct pending_sums *p = pending_of(s);
    size_t bytes = ((size_t)numel * sizeof(float) + 255) / 256 * 256;
    if (p->bytes + bytes > whole_bytes(s) || p->jobs.count + COLUMN_SETS > FINISH_JOBS)
        TRY(cuda_finish_sums(s));
    if (bytes > whole_bytes(s))
        return FAIL(INVALID, "the stream's workspace has %zu bytes, partial sums need %zu",
                    s->workspace_bytes, bytes);
    p->bytes += bytes;
    *out = (float *)((char *)s->workspace + whole_bytes(s) - p->bytes);
    return ST_OK;
}

enum status columns_finish(struct stream *s, struct column_sets sets, const float *partial,
                           int64_t parts, int64_t columns, bool add)
{
    struct pending_sums *p = pending_of(s);
    for (int i = 0; i < p->jobs.count; i++) /* two sums into one place have an order */
        for (int k = 0; k < sets.count; k++)
            if (p->jobs.job[i].out == sets.out[k])
                TRY(finish_jobs(s));
    for (int k = 0; k < sets.count && columns > 0; k++) {
        if (!sets.out[k])
            continue;
        p->jobs.job[p->jobs.count++] = {
            sets.out[k], partial + k * columns, parts, columns, columns * sets.count, 0, add};
    }
    return ST_OK;
}

enum status columns_open(struct device *device)
{
    for (int i = 0; i < STREAM_COUNT; i++) {
        struct pending_sums *p = NULL;
        TRY(mem_alloc(&p, sizeof *p));
        device->streams[i].pending = p;
    }
    return ST_OK;
}

void columns_close(struct device *device)
{
    for (int i = 0; i < STREAM_COUNT; i++)
        mem_free(&device->streams[i].pending);
}

/* Block (x, y): packs 32 x .. and rows COLUMN_ROWS y .. Bytes: the matrix once. */
template <typename E, int W>
__global__ static void columns_sum_kernel(float *partial, const E *x, const int32_t *label,
                                          int32_t value, int64_t rows, int64_t columns)
{
    constexpr int ROWS = COLUMN_ROWS / COLUMN_LANES;
    int64_t c0 = (int64_t)blockIdx.x * 32 * W, c = c0 + (threadIdx.x % 32) * W;
    int64_t row = (int64_t)blockIdx.y * COLUMN_ROWS + threadIdx.x / 32;
    int64_t end = min((int64_t)(blockIdx.y + 1) * COLUMN_ROWS, rows);
    float sum[W] = {0.0f};
    kernel_begin();
    struct raw_pack<E, W> raw[ROWS];
    bool counts[ROWS];
#pragma unroll
    for (int k = 0; k < ROWS; k++) { /* all rows of the thread at once */
        int64_t r = row + k * COLUMN_LANES;
        counts[k] = c < columns && r < end;
        if (counts[k])
            load_raw(raw[k], x + r * columns + c);
        if (counts[k] && label)
            counts[k] = label[r] == value;
    }
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        float v[W];
        if (!counts[k])
            continue;
        unpack(v, raw[k]);
#pragma unroll
        for (int i = 0; i < W; i++)
            sum[i] += v[i];
    }
    columns_block<W>(sum, partial + (int64_t)blockIdx.y * columns, c0, columns, false);
}

template <typename E, int W>
static enum status columns_sum_launch(struct stream *s, float *partial, struct tensor x,
                                      const int32_t *label, int32_t value)
{
    int64_t rows = x.shape[0], columns = x.shape[1];
    dim3 grid((unsigned)div_up(columns, 32 * W), (unsigned)column_parts(rows));
    return launch_kernel(s, grid, COLUMN_THREADS, columns_sum_kernel<E, W>, partial,
                         (const E *)x.data, label, value, rows, columns);
}

template <typename E>
static enum status columns_sum_any(struct stream *s, float *partial, struct tensor x,
                                   const int32_t *label, int32_t value)
{
    return packs_fit(x.shape[1], sizeof(E), x.data)
               ? columns_sum_launch<E, full_pack<E>()>(s, partial, x, label, value)
               : columns_sum_launch<E, 1>(s, partial, x, label, value);
}

enum status columns_sum(struct stream *s, float *out, struct tensor x, const int32_t *label,
                        int32_t value, bool add)
{
    int64_t rows = x.shape[0], columns = x.shape[1], parts = column_parts(rows);
    float *partial = NULL;
    TRY(columns_reserve(&partial, s, parts * columns));
    if (parts > 0 && columns > 0)
        TRY(x.dtype == DTYPE_BF16 ? columns_sum_any<bf16>(s, partial, x, label, value)
                                  : columns_sum_any<float>(s, partial, x, label, value));
    struct column_sets sets = {{out}, 1};
    return columns_finish(s, sets, partial, parts, columns, add);
}
