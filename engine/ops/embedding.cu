/*
 * engine/ops/embedding.cu - CUDA backend of embedding.h: rows of a table by token.
 *
 * forward   one warp a row of the batch: what lies of its table row in this part is copied, the
 *           rest set if asked for. Bytes: the rows, read and written once; of all ranks' rows those
 *           that a rank has are read, and the first part writes all
 * backward  token_rows.order has equal tokens side by side, rows ascending. Blocks of the first
 *           places of a run sum it (eight row lanes, then in order) and write one table row, or
 *           what lies of it in this part; where no run begins they end at once. With the rows of
 *           several ranks most places begin none or none of this part, and a block looks at eight
 *           of them at once. Unless these are kept, more blocks clear or mark the rows of no token.
 *           Bytes: dout once, and one table row a run, or all of the part when it is cleared.
 */
#include "engine/ops/embedding.h"

#include "engine/ops/cuda_common.cuh"

/* Blocks that clear: four a multiprocessor of 132, which leaves room for as many others. */
enum { EMBED_THREADS = 256, EMBED_ROWS = 64, EMBED_CLEARING = 528 };

/* Packs that a lane asks for at once. */
enum { EMBED_AHEAD = 4 };

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

/* The first place of the order whose token is @token or more; the same in all threads. A round cuts
 * the range in EMBED_THREADS parts: for any batch that fits, there are two or three. */
__device__ static int64_t embedding_place(const struct token_rows &q, int64_t token)
{
    int64_t low = 0, high = q.rows;
    while (low < high) {
        int64_t part = (high - low + EMBED_THREADS - 1) / EMBED_THREADS;
        int64_t last = low + ((int64_t)threadIdx.x + 1) * part - 1; /* of this thread's part */
        bool less = last < high && q.token[q.order[last]] < token;
        int parts = __syncthreads_count(less);
        low += parts * part; /* all of these are less; the next part has its first that is not */
        high = min(low + part - 1, high);
    }
    return low;
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
    int64_t begin = embedding_place(q, row), end = embedding_place(q, row + rows);
    __syncthreads();
    for (int64_t i = begin + threadIdx.x; i < end; i += EMBED_THREADS)
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

/* One of the first blocks: its share of the part's rows. */
__device__ static void embedding_clear_share(const struct table_part &part,
                                             const struct token_rows &q, int clearing, bool marks)
{
    int64_t row = part.first / part.columns;
    int64_t end = (part.first + part.numel + part.columns - 1) / part.columns;
    int64_t rows = (end - row + clearing - 1) / clearing;
    row += blockIdx.x * rows;
    for (end = min(row + rows, end); row < end; row += EMBED_ROWS)
        embedding_clear(part, q, row, (int)min(end - row, (int64_t)EMBED_ROWS), marks);
}

/* The token of which a run begins at @place, if columns [c0, c1) of its row lie in the part; else
 * 0, which has no gradient. */
__device__ static int32_t embedding_run(const struct table_part &part, const struct token_rows &q,
                                        int64_t place, int64_t c0, int64_t c1)
{
    int32_t t = place < q.rows ? q.token[q.order[place]] : 0;
    if (t <= 0 || max(part_from(part, t), c0) >= min(part_to(part, t), c1))
        return 0;
    return place > 0 && q.token[q.order[place - 1]] == t ? 0 : t;
}

/* Add the rows of a run that are this lane's, from place @i on; packs from column @c. @AHEAD are
 * asked for at once, but for the first, which most runs end with. */
template <typename E, int W, int AHEAD>
__device__ static void embedding_sum(float (&sum)[W], const E *dout, const struct token_rows &q,
                                     int64_t columns, int64_t i, int32_t t, int64_t c)
{
    struct raw_pack<E, W> raw[AHEAD];
    float v[W];
    bool in[AHEAD];
    for (int ahead = 1;; ahead = AHEAD) {
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            int64_t place = i + k * COLUMN_LANES;
            int64_t row = k < ahead && place < q.rows ? q.order[place] : -1;
            in[k] = row >= 0 && q.token[row] == t;
            if (in[k] && c < columns)
                load_raw(raw[k], dout + row * columns + c);
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (!in[k] || c >= columns)
                continue;
            unpack(v, raw[k]);
#pragma unroll
            for (int n = 0; n < W; n++)
                sum[n] += v[n];
        }
        if (!(ahead == 1 ? in[0] : in[AHEAD - 1]))
            return;
        i += ahead * COLUMN_LANES;
    }
}

/* The first blocks clear or mark the rows of the table, in @clearing equal parts. Behind them, each
 * @PLACES places of the order have a block for each 32 packs of columns. */
template <typename E, int W, int PLACES, int AHEAD>
__global__ static void __launch_bounds__(EMBED_THREADS, PLACES > 1 ? 4 : 6)
    embedding_backward_kernel(struct table_part part, const E *dout, struct token_rows q,
                              int clearing, enum table_rows others)
{
    __shared__ int32_t runs[PLACES];
    int64_t chunks = (part.columns + 32 * W - 1) / (32 * W), block = (int64_t)blockIdx.x - clearing;
    int64_t first = block / chunks * PLACES, c0 = (block - block / chunks * chunks) * 32 * W;
    kernel_begin();
    if (block < 0) {
        embedding_clear_share(part, q, clearing, others == ROWS_MARKED);
        return;
    }
    if (PLACES > 1 && threadIdx.x < PLACES)
        runs[threadIdx.x] = embedding_run(part, q, first + threadIdx.x, c0, c0 + 32 * W);
    if (PLACES > 1)
        __syncthreads();
    for (int n = 0; n < PLACES; n++) {
        int32_t t = PLACES > 1 ? runs[n] : embedding_run(part, q, first, c0, c0 + 32 * W);
        if (t == 0)
            continue;
        float sum[W] = {0.0f};
        embedding_sum<E, W, AHEAD>(sum, dout, q, part.columns, first + n + threadIdx.x / 32, t,
                                   c0 + (threadIdx.x % 32) * W);
        columns_between<W>(sum, part_row(part, t), c0, part_from(part, t), part_to(part, t),
                           others == ROWS_KEPT);
    }
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

template <typename E, int W, int PLACES, int AHEAD>
static enum status embedding_backward_in(struct stream *s, struct table_part part, const E *dout,
                                         struct token_rows q, enum table_rows others)
{
    static_assert((int)COLUMN_THREADS == (int)EMBED_THREADS, "one kernel does both");
    int clearing = others == ROWS_KEPT || part.numel == 0 ? 0 : EMBED_CLEARING;
    int64_t blocks = clearing + div_up(q.rows, PLACES) * div_up(part.columns, 32 * W);
    if (blocks == 0)
        return ST_OK;
    return launch_kernel(s, dim3((unsigned)blocks), COLUMN_THREADS,
                         embedding_backward_kernel<E, W, PLACES, AHEAD>, part, dout, q, clearing,
                         others);
}

template <typename E>
static enum status embedding_backward_any(struct stream *s, struct table_part part, const E *dout,
                                          struct token_rows q, enum table_rows others)
{
    constexpr int W = full_pack<E>();
    bool packs = packs_fit(part.columns, sizeof(E), dout);
    if (q.batches == 1)
        return packs ? embedding_backward_in<E, W, 1, 1>(s, part, dout, q, others)
                     : embedding_backward_in<E, 1, 1, 1>(s, part, dout, q, others);
    return packs ? embedding_backward_in<E, W, 8, 4>(s, part, dout, q, others)
                 : embedding_backward_in<E, 1, 8, 4>(s, part, dout, q, others);
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
