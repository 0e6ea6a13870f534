/*
 * engine/ops/embedding.cu - CUDA backend of embedding.h: rows of a table by token.
 *
 * forward   one warp a row of the batch; bytes: the rows, read and written once
 * backward  sequences.token_order has equal tokens side by side, rows ascending. The block of a
 *           run's first place sums the run (eight row lanes, then in order) and writes one table
 *           row; the blocks of all other places end at once. Unless these are kept, more blocks
 *           clear or mark the rows of no token. Bytes: dout once, and one table row a run, or the
 *           whole table when it is cleared.
 */
#include "engine/ops/embedding.h"

#include "engine/ops/cuda_common.cuh"

/* Blocks that clear: four a multiprocessor of 132, which leaves room for as many others. */
enum { EMBED_THREADS = 256, EMBED_ROWS = 64, EMBED_CLEARING = 528 };

template <typename E, int W>
__global__ static void embedding_forward_kernel(E *out, const E *table, const int32_t *token,
                                                int64_t rows, int64_t columns, int64_t first_row,
                                                int64_t table_rows, bool set)
{
    int64_t row = (int64_t)blockIdx.x * (EMBED_THREADS / 32) + threadIdx.x / 32;
    kernel_begin();
    if (row >= rows)
        return;
    int64_t t = token[row], place = t - first_row;
    bool here = t >= 0 && place >= 0 && place < table_rows;
    if (!here && !(set && t < 0))
        return;
    for (int64_t c = (threadIdx.x % 32) * W; c < columns; c += 32 * W) {
        float v[W] = {0.0f};
        if (here)
            load_pack<E, W>(v, table + place * columns + c);
        store_pack<E, W>(out + row * columns + c, v);
    }
}

/* The first place of token_order whose token is @token or more; the same in all threads. A round
 * cuts the range in EMBED_THREADS parts: for any batch that fits, there are two or three. */
__device__ static int64_t embedding_place(const struct sequences &q, int64_t token)
{
    int64_t low = 0, high = q.rows;
    while (low < high) {
        int64_t part = (high - low + EMBED_THREADS - 1) / EMBED_THREADS;
        int64_t last = low + ((int64_t)threadIdx.x + 1) * part - 1; /* of this thread's part */
        bool less = last < high && q.token[q.token_order[last]] < token;
        int parts = __syncthreads_count(less);
        low += parts * part; /* all of these are less; the next part has its first that is not */
        high = min(low + part - 1, high);
    }
    return low;
}

/* Zeros, or marks, in rows of @dtable from @first on that have no token. */
__device__ static void embedding_clear(float *dtable, const struct sequences &q, int64_t first,
                                       int rows, int64_t columns, int64_t token, bool marks)
{
    __shared__ bool used[EMBED_ROWS];
    for (int r = threadIdx.x; r < rows; r += EMBED_THREADS)
        used[r] = false;
    int64_t begin = embedding_place(q, token), end = embedding_place(q, token + rows);
    __syncthreads();
    for (int64_t i = begin + threadIdx.x; i < end; i += EMBED_THREADS)
        if (q.token[q.token_order[i]] > 0)
            used[q.token[q.token_order[i]] - token] = true;
    __syncthreads();
    for (int r = threadIdx.x; marks && r < rows; r += EMBED_THREADS)
        if (!used[r])
            dtable[(first + r) * columns] = float_of_bits(ROW_MARK);
    float zeros[4] = {0.0f};
    bool packs = columns % 4 == 0 && (uintptr_t)dtable % 16 == 0;
    for (int r = 0; !marks && r < rows; r++) {
        float *row = dtable + (first + r) * columns;
        if (used[r])
            continue;
        for (int64_t c = threadIdx.x * 4; packs && c < columns; c += EMBED_THREADS * 4)
            store_pack<float, 4>(row + c, zeros);
        for (int64_t c = threadIdx.x; !packs && c < columns; c += EMBED_THREADS)
            row[c] = 0.0f;
    }
    __syncthreads(); /* used is written again by the next call */
}

/* The first blocks clear or mark the rows of the table, in @clearing equal parts. Behind them, each
 * place of token_order has a block for each 32 packs of columns. */
template <typename E, int W>
__global__ static void embedding_backward_kernel(float *dtable, const E *dout, struct sequences q,
                                                 int64_t columns, int64_t first_row,
                                                 int64_t table_rows, int clearing,
                                                 enum table_rows others)
{
    int64_t chunks = (columns + 32 * W - 1) / (32 * W), block = (int64_t)blockIdx.x - clearing;
    int64_t place = block / chunks, c0 = (block - place * chunks) * 32 * W;
    kernel_begin();
    if (block < 0) {
        int64_t rows = (table_rows + clearing - 1) / clearing, first = blockIdx.x * rows;
        for (int64_t end = min(first + rows, table_rows); first < end; first += EMBED_ROWS)
            embedding_clear(dtable, q, first, (int)min(end - first, (int64_t)EMBED_ROWS), columns,
                            first_row + first, others == ROWS_MARKED);
        return;
    }
    int32_t t = q.token[q.token_order[place]];
    int64_t table_row = (int64_t)t - first_row;
    if (t <= 0 || table_row < 0 || table_row >= table_rows)
        return;
    if (place > 0 && q.token[q.token_order[place - 1]] == t)
        return;
    int64_t c = c0 + (threadIdx.x % 32) * W;
    float sum[W] = {0.0f}, v[W];
    for (int64_t i = place + threadIdx.x / 32; i < q.rows; i += COLUMN_LANES) {
        int64_t row = q.token_order[i];
        if (q.token[row] != t)
            break;
        if (c >= columns)
            continue;
        load_pack<E, W>(v, dout + row * columns + c);
#pragma unroll
        for (int k = 0; k < W; k++)
            sum[k] += v[k];
    }
    columns_block<W>(sum, dtable + table_row * columns, c0, columns, others == ROWS_KEPT);
}

template <typename E>
static enum status embedding_forward_any(struct stream *s, E *out, const E *table,
                                         const struct sequences *q, int64_t columns,
                                         int64_t first_row, int64_t table_rows, bool set)
{
    constexpr int W = full_pack<E>();
    if (q->rows == 0)
        return ST_OK;
    unsigned blocks = (unsigned)div_up(q->rows, EMBED_THREADS / 32);
    return launch_kernel(s, dim3(blocks), EMBED_THREADS,
                         packs_fit(columns, sizeof(E), out, table) ? embedding_forward_kernel<E, W>
                                                                   : embedding_forward_kernel<E, 1>,
                         out, table, q->token, q->rows, columns, first_row, table_rows, set);
}

template <typename E>
static enum status embedding_backward_any(struct stream *s, float *dtable, const E *dout,
                                          const struct sequences *q, int64_t columns,
                                          int64_t first_row, int64_t table_rows,
                                          enum table_rows others)
{
    constexpr int W = full_pack<E>();
    static_assert((int)COLUMN_THREADS == (int)EMBED_THREADS, "one kernel does both");
    bool packs = packs_fit(columns, sizeof(E), dout);
    int clearing = others == ROWS_KEPT || table_rows == 0 ? 0 : EMBED_CLEARING;
    int64_t blocks = clearing + q->rows * div_up(columns, 32 * (packs ? W : 1));
    if (blocks == 0)
        return ST_OK;
    return launch_kernel(s, dim3((unsigned)blocks), COLUMN_THREADS,
                         packs ? embedding_backward_kernel<E, W> : embedding_backward_kernel<E, 1>,
                         dtable, dout, *q, columns, first_row, table_rows, clearing, others);
}

enum status cuda_embedding_forward(struct stream *s, struct tensor out, struct tensor table,
                                   const struct sequences *q, int64_t first_row, bool set)
{
    int64_t columns = table.shape[1], rows = table.shape[0];
    if (out.dtype == DTYPE_BF16)
        return embedding_forward_any(s, (bf16 *)out.data, (const bf16 *)table.data, q, columns,
                                     first_row, rows, set);
    return embedding_forward_any(s, (float *)out.data, (const float *)table.data, q, columns,
                                 first_row, rows, set);
}

enum status cuda_embedding_backward(struct stream *s, struct tensor dtable, struct tensor dout,
                                    const struct sequences *q, int64_t first_row,
                                    enum table_rows others)
{
    int64_t columns = dtable.shape[1], rows = dtable.shape[0];
    if (!dtable.data)
        return ST_OK;
    if (dout.dtype == DTYPE_BF16)
        return embedding_backward_any(s, (float *)dtable.data, (const bf16 *)dout.data, q, columns,
                                      first_row, rows, others);
    return embedding_backward_any(s, (float *)dtable.data, (const float *)dout.data, q, columns,
                                  first_row, rows, others);
}
