/*
 * engine/ops/embedding.cu - CUDA backend of embedding.h: rows of a table by token.
 *
 * forward   one warp a row of the batch: what lies of its table row in this part is copied, the
 *           rest set if asked for. Bytes: the rows, read and written once; of all ranks' rows those
 *           that a rank has are read, and the first part writes all
 * backward  token_rows.order has equal tokens side by side, rows ascending. A fixed number of
 *           blocks share the places whose tokens lie in the part, eight at once. Where a short run
 *           begins a warp sums it, then the block sums what long ones there are (eight row lanes,
 *           then in order); each writes one table row, or what lies of it in this part. Latency is
 *           what it takes: of many tokens with few rows, and of a few with very many. Unless the
 *           rows of no token are kept, as many blocks clear or mark them. Bytes: dout once, and
 *           one table row a run, or all of the part when it is cleared.
 */
#include "engine/ops/embedding.h"

#include "engine/ops/cuda_common.cuh"

/* Blocks that clear, and as many that sum: each four a multiprocessor of 132. */
enum { EMBED_THREADS = 256, EMBED_WARPS = EMBED_THREADS / 32, EMBED_ROWS = 64, EMBED_BLOCKS = 528 };

/* Packs that a lane of forward asks for at once; rows of which a lane of backward does. */
enum { EMBED_AHEAD = 4, EMBED_ROWS_AHEAD = 8 };

/* Elements [first, first + numel) of a table. */
struct table_range {
    int64_t first, numel, columns;
};

/* Columns of a table row that lie in the range: [from, to), none where to <= from. */
__device__ static int64_t part_from(const struct table_range &part, int64_t row)
{
    return max(part.first - row * part.columns, (int64_t)0);
}

__device__ static int64_t part_to(const struct table_range &part, int64_t row)
{
    return min(part.first + part.numel - row * part.columns, part.columns);
}

template <typename E, int W>
__global__ static void embedding_forward_kernel(E *out, const E *table, struct table_range part,
                                                const int32_t *token, int64_t rows, bool set)
{
    int64_t row = (int64_t)blockIdx.x * (EMBED_THREADS / 32) + threadIdx.x / 32;
    kernel_begin();
    if (row >= rows)
        return;
    int64_t t = token[row], from = t < 0 ? 0 : part_from(part, t),
            to = t < 0 ? 0 : part_to(part, t);
    if (!set && from >= to)
        return;
    const E *found = table + (t * part.columns - part.first); /* its column 0, here or not */
    for (int64_t c0 = (threadIdx.x % 32) * W; c0 < part.columns; c0 += EMBED_AHEAD * 32 * W) {
        struct raw_pack<E, W> x[EMBED_AHEAD];
#pragma unroll
        for (int k = 0; k < EMBED_AHEAD; k++) {
            int64_t c = c0 + k * 32 * W;
            if (c >= from && c < to)
                load_raw(x[k], found + c);
            else
                fill_raw(x[k], t < 0 ? 0.0f : -0.0f);
        }
#pragma unroll
        for (int k = 0; k < EMBED_AHEAD; k++) {
            int64_t c = c0 + k * 32 * W;
            if (c < part.columns && (set || (c >= from && c < to)))
                store_raw(out + row * part.columns + c, x[k]);
        }
    }
}

/* And of its gradient. */
struct table_part : table_range {
    float *grad;
};

/* Where the row's first column would lie; only what lies in the part is there. */
__device__ static float *part_row(const struct table_part &part, int64_t row)
{
    return part.grad + (row * part.columns - part.first);
}

/* Places [begin, end) of the order. */
struct places {
    int begin, end;
};

/* Those of tokens [from, to), the same in all threads. A round cuts a range in EMBED_THREADS parts:
 * for any batch that fits, there are two or three. */
__device__ static struct places embedding_places(const struct token_rows &q, int64_t from,
                                                 int64_t to)
{
    int64_t token[] = {from, to};
    int low[] = {0, 0}, high[] = {(int)q.rows, (int)q.rows};
    while (low[0] < high[0] || low[1] < high[1]) {
        bool less[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            int part = (high[k] - low[k] + EMBED_THREADS - 1) / EMBED_THREADS;
            int last = low[k] + ((int)threadIdx.x + 1) * part - 1; /* of a thread's part */
            less[k] = part > 0 && last < high[k] && q.token[q.order[last]] < token[k];
        }
#pragma unroll
        for (int k = 0; k < 2; k++) {
            int part = (high[k] - low[k] + EMBED_THREADS - 1) / EMBED_THREADS;
            int parts = __syncthreads_count(less[k]);
            low[k] += parts * part; /* these are less; the next part has its first that is not */
            high[k] = max(min(low[k] + part - 1, high[k]), low[k]);
        }
    }
    return {low[0], low[1]};
}

/* Four zeros. Stored as a pack of them, the compiler makes two halves of it. */
__device__ static void store_zeros(float *out)
{
    asm volatile("st.global.v4.f32 [%0], {%1, %1, %1, %1};" ::"l"(__cvta_generic_to_global(out)),
                 "f"(0.0f)
                 : "memory");
}

/* Zeros, or marks, in the table rows [row, row + rows) that have no token; at most EMBED_ROWS. */
__device__ static void embedding_clear(const struct table_part &part, const struct token_rows &q,
                                       int64_t row, int rows, bool marks)
{
    __shared__ bool used[EMBED_ROWS];
    for (int r = threadIdx.x; r < rows; r += EMBED_THREADS)
        used[r] = false;
    struct places here = embedding_places(q, row, row + rows);
    __syncthreads();
    for (int i = here.begin + (int)threadIdx.x; i < here.end; i += EMBED_THREADS)
        if (q.token[q.order[i]] > 0)
            used[q.token[q.order[i]] - row] = true;
    __syncthreads();
    for (int r = threadIdx.x; marks && r < rows; r += EMBED_THREADS)
        if (!used[r])
            *part_row(part, row + r) = float_of_bits(ROW_MARK);
    bool packs =
        (part.columns | part.first | part.numel) % 4 == 0 && (uintptr_t)part.grad % 16 == 0;
    for (int r = 0; !marks && r < rows; r++) {
        float *out = part_row(part, row + r);
        int64_t from = part_from(part, row + r), to = part_to(part, row + r);
        if (used[r])
            continue;
#pragma unroll 1
        for (int64_t c = from + threadIdx.x * 4; packs && c < to; c += EMBED_THREADS * 4)
            store_zeros(out + c);
        for (int64_t c = from + threadIdx.x; !packs && c < to; c += EMBED_THREADS)
            out[c] = 0.0f;
    }
    __syncthreads(); /* used is written again by the next call */
}

/* The part's rows, in equal shares. */
__device__ static void embedding_clear_share(const struct table_part &part,
                                             const struct token_rows &q, int share, int shares,
                                             bool marks)
{
    int64_t row = part.first / part.columns;
    int64_t end = (part.first + part.numel + part.columns - 1) / part.columns;
    int64_t rows = (end - row + shares - 1) / shares;
    row += share * rows;
    for (end = min(row + rows, end); row < end; row += EMBED_ROWS)
        embedding_clear(part, q, row, (int)min(end - row, (int64_t)EMBED_ROWS), marks);
}

/* Of the run of equal tokens that begins at a place. */
struct run {
    int32_t token; /* 0, which has no gradient: none begins, or none of the part */
    int rows;      /* at most EMBED_ROWS_AHEAD + 1, which are many */
};

/* All lanes of a warp look at one place each, from the one before @place on; @row: of the lane's.
 * A run counts if columns [c0, c1) of its table row lie in the part. */
__device__ static struct run embedding_run(const struct table_part &part,
                                           const struct token_rows &q, int place, int64_t c0,
                                           int64_t c1, int32_t *row)
{
    int lane = threadIdx.x % 32, at = place - 1 + lane;
    bool looks = lane < EMBED_ROWS_AHEAD + 2 && at >= 0 && at < q.rows;
    *row = looks ? q.order[at] : -1;
    int32_t token = looks ? q.token[*row] : -1;
    int32_t before = __shfl_sync(~0u, token, 0), t = __shfl_sync(~0u, token, 1);
    int rows = __popc(__ballot_sync(~0u, lane > 0 && token == t));
    if (t <= 0 || t == before || max(part_from(part, t), c0) >= min(part_to(part, t), c1))
        return {0, 0};
    return {t, rows};
}

/* Packs from one column on, by rows. A stride of 32 bits: an address is one multiplication. */
template <typename E> struct row_packs {
    const char *first; /* in row 0 */
    uint32_t stride;   /* bytes of a row */
};

template <typename E, int W>
__device__ static void embedding_load(struct raw_pack<E, W> &raw, struct row_packs<E> x,
                                      int32_t row)
{
    load_raw(raw, (const E *)(x.first + (uint64_t)(uint32_t)row * x.stride));
}

template <typename E, int W>
__device__ static void embedding_add(float (&sum)[W], const struct raw_pack<E, W> &raw)
{
    float v[W];
    unpack(v, raw);
#pragma unroll
    for (int n = 0; n < W; n++)
        sum[n] += v[n];
}

/* A short run by one warp, in the order in which columns_between() adds the rows of lanes. */
template <typename E, int W>
__device__ static void embedding_short(const struct table_part &part, struct row_packs<E> x,
                                       struct run run, int32_t row, int64_t c, bool add)
{
    struct raw_pack<E, W> raw[EMBED_ROWS_AHEAD];
    float sum[W] = {0.0f};
#pragma unroll
    for (int k = 0; k < EMBED_ROWS_AHEAD; k++) {
        int32_t from = __shfl_sync(~0u, row, k + 1);
        if (k < run.rows && c < part.columns)
            embedding_load(raw[k], x, from);
        else
            fill_raw(raw[k], -0.0f); /* changes no sum */
    }
#pragma unroll
    for (int k = 0; k < EMBED_ROWS_AHEAD; k++)
        embedding_add<E, W>(sum, raw[k]);
    float *out = part_row(part, run.token) + c;
    int64_t from = part_from(part, run.token), to = part_to(part, run.token);
    if (!add && W % 4 == 0 && c >= from && c + W <= to && (uintptr_t)out % 16 == 0) {
#pragma unroll
        for (int n = 0; n < W; n += 4)
            *(float4 *)(out + n) = make_float4(sum[n], sum[n + 1], sum[n + 2], sum[n + 3]);
        return;
    }
#pragma unroll
    for (int n = 0; n < W; n++)
        if (c + n >= from && c + n < to)
            out[n] = (add ? out[n] : 0.0f) + sum[n];
}

/* Where the run of token @t that begins at @place ends; the same in all threads. */
__device__ static int embedding_end(const struct token_rows &q, int place, int32_t t)
{
    int at = place + (int)threadIdx.x;
    int rows = __syncthreads_count(at < q.rows && q.token[q.order[at]] == t);
    return rows < EMBED_THREADS ? place + rows : embedding_places(q, 0, t + 1).end;
}

/* Add the rows of places [@i, @end) that are this lane's. Nothing waits for the token of a place,
 * and the rows of the next ones are read meanwhile. */
template <typename E, int W>
__device__ static void embedding_sum(float (&sum)[W], struct row_packs<E> x,
                                     const struct token_rows &q, int i, int end)
{
    struct raw_pack<E, W> raw[EMBED_ROWS_AHEAD];
    int32_t row[EMBED_ROWS_AHEAD];
#pragma unroll
    for (int k = 0; k < EMBED_ROWS_AHEAD; k++)
        row[k] = i + k * COLUMN_LANES < end ? q.order[i + k * COLUMN_LANES] : -1;
    while (i < end) {
        i += EMBED_ROWS_AHEAD * COLUMN_LANES;
#pragma unroll
        for (int k = 0; k < EMBED_ROWS_AHEAD; k++)
            if (row[k] >= 0)
                embedding_load(raw[k], x, row[k]);
            else
                fill_raw(raw[k], -0.0f); /* changes no sum */
#pragma unroll
        for (int k = 0; k < EMBED_ROWS_AHEAD; k++)
            row[k] = i + k * COLUMN_LANES < end ? q.order[i + k * COLUMN_LANES] : -1;
#pragma unroll
        for (int k = 0; k < EMBED_ROWS_AHEAD; k++)
            embedding_add<E, W>(sum, raw[k]);
    }
}

/* The runs of a block's places: short ones by a warp each, then the others by all. */
template <typename E, int W>
__device__ static void embedding_runs(const struct table_part &part, const E *dout,
                                      const struct token_rows &q, int first, int end, int64_t c0,
                                      bool add)
{
    __shared__ int32_t many[EMBED_WARPS];
    int warp = threadIdx.x / 32, place = first + warp;
    int64_t c1 = c0 + 32 * W, c = c0 + (threadIdx.x % 32) * W;
    int32_t row = -1;
    struct run run = {0, 0};
    struct row_packs<E> x = {
        (const char *)(dout + c), (uint32_t)(part.columns * sizeof(E))
    };
    if (place < end)
        run = embedding_run(part, q, place, c0, c1, &row);
    bool is_short = run.rows <= EMBED_ROWS_AHEAD;
    if (run.token > 0 && is_short)
        embedding_short<E, W>(part, x, run, row, c, add);
    if (threadIdx.x % 32 == 0)
        many[warp] = is_short ? 0 : run.token;
    __syncthreads();
    for (int n = 0; n < EMBED_WARPS; n++) {
        int32_t t = many[n];
        float sum[W] = {0.0f};
        if (t == 0)
            continue;
        int run_end = embedding_end(q, first + n, t);
        if (c < part.columns)
            embedding_sum<E, W>(sum, x, q, first + n + warp, run_end);
        columns_between<W>(sum, part_row(part, t), c0, part_from(part, t), part_to(part, t), add);
    }
    __syncthreads(); /* before @many is written again */
}

/* Every other block clears or marks rows of the table, unless they are kept. The rest, for each 32
 * packs of columns, shares the places of the part's tokens. */
template <typename E, int W>
__global__ static void __launch_bounds__(EMBED_THREADS, 4)
    embedding_backward_kernel(struct table_part part, const E *dout, struct token_rows q,
                              enum table_rows others)
{
    int kinds = others == ROWS_KEPT ? 1 : 2, blocks = (int)gridDim.x / kinds;
    int block = (int)blockIdx.x / kinds;
    kernel_begin();
    if ((int)blockIdx.x % kinds == 1) {
        embedding_clear_share(part, q, block, blocks, others == ROWS_MARKED);
        return;
    }
    int chunks = (int)((part.columns + 32 * W - 1) / (32 * W));
    int64_t c0 = (int64_t)(block % chunks) * 32 * W;
    struct places here =
        embedding_places(q, max(part.first / part.columns, (int64_t)1),
                         (part.first + part.numel + part.columns - 1) / part.columns);
    for (int first = here.begin + block / chunks * EMBED_WARPS; first < here.end;
         first += blocks / chunks * EMBED_WARPS)
        embedding_runs<E, W>(part, dout, q, first, here.end, c0, others == ROWS_KEPT);
}

template <typename E>
static enum status embedding_forward_any(struct stream *s, E *out, const E *table,
                                         struct table_range part, struct token_rows q, bool set)
{
    constexpr int W = full_pack<E>();
    if (q.rows == 0)
        return ST_OK;
    unsigned blocks = (unsigned)div_up(q.rows, EMBED_THREADS / 32);
    bool packs = packs_fit(part.columns | part.first | part.numel, sizeof(E), out, table);
    return launch_kernel(s, dim3(blocks), EMBED_THREADS,
                         packs ? embedding_forward_kernel<E, W> : embedding_forward_kernel<E, 1>,
                         out, table, part, q.token, q.rows, set);
}

template <typename E, int W>
static enum status embedding_backward_in(struct stream *s, struct table_part part, const E *dout,
                                         struct token_rows q, enum table_rows others)
{
    static_assert((int)COLUMN_THREADS == (int)EMBED_THREADS, "one kernel does both");
    int64_t chunks = div_up(part.columns, 32 * W), blocks = div_up(EMBED_BLOCKS, chunks) * chunks;
    if (part.numel == 0)
        return ST_OK;
    return launch_kernel(s, dim3((unsigned)(others == ROWS_KEPT ? blocks : 2 * blocks)),
                         EMBED_THREADS, embedding_backward_kernel<E, W>, part, dout, q, others);
}

template <typename E>
static enum status embedding_backward_any(struct stream *s, struct table_part part, const E *dout,
                                          struct token_rows q, enum table_rows others)
{
    constexpr int W = full_pack<E>();
    if (packs_fit(part.columns, sizeof(E), dout))
        return embedding_backward_in<E, W>(s, part, dout, q, others);
    return embedding_backward_in<E, 1>(s, part, dout, q, others);
}

enum status cuda_embedding_forward(struct stream *s, struct tensor out, struct tensor table,
                                   struct token_rows q, int64_t first, bool set)
{
    struct table_range part = {first, table.shape[0], out.shape[1]};
    if (out.dtype == DTYPE_BF16)
        return embedding_forward_any(s, (bf16 *)out.data, (const bf16 *)table.data, part, q, set);
    return embedding_forward_any(s, (float *)out.data, (const float *)table.data, part, q, set);
}

enum status cuda_embedding_backward(struct stream *s, struct tensor dtable, struct tensor dout,
                                    struct token_rows q, int64_t first, enum table_rows others)
{
    struct table_part part = {{first, dtable.shape[0], dout.shape[1]}, (float *)dtable.data};
    if (!dtable.data)
        return ST_OK;
    if (dout.dtype == DTYPE_BF16)
        return embedding_backward_any(s, part, (const bf16 *)dout.data, q, others);
    return embedding_backward_any(s, part, (const float *)dout.data, q, others);
}
