/*
 * engine/ops/embedding.cu - CUDA backend of embedding.h: rows of a table by token.
 *
 * forward   one warp a row of the batch; bytes: the rows, read and written once
 * backward  sequences.token_order has equal tokens side by side, rows ascending. The block of a
 *           run's first place sums the run (eight row lanes, then in order) and writes one table
 *           row; the blocks of all other places end at once. Bytes: dout once, and one table row a
 *           run; a set first clears the table.
 */
#include "engine/ops/cuda_common.cuh"

enum { EMBED_THREADS = 256 };

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

/* Block (x, y): place x of token_order, packs 32 y and on. */
template <typename E, int W>
__global__ static void embedding_backward_kernel(float *dtable, const E *dout, struct sequences q,
                                                 int64_t columns, int64_t first_row,
                                                 int64_t table_rows, bool add)
{
    int64_t place = blockIdx.x;
    kernel_begin();
    int32_t t = q.token[q.token_order[place]];
    int64_t table_row = (int64_t)t - first_row;
    if (t < 0 || table_row < 0 || table_row >= table_rows)
        return;
    if (place > 0 && q.token[q.token_order[place - 1]] == t)
        return;
    int64_t c0 = (int64_t)blockIdx.y * 32 * W, c = c0 + (threadIdx.x % 32) * W;
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
    columns_block<W>(sum, dtable + table_row * columns, c0, columns, add);
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
                                          int64_t first_row, int64_t table_rows, bool add)
{
    constexpr int W = full_pack<E>();
    if (q->rows == 0)
        return ST_OK;
    bool packs = packs_fit(columns, sizeof(E), dout);
    return launch_kernel(
        s, dim3((unsigned)q->rows, (unsigned)div_up(columns, 32 * (packs ? W : 1))), COLUMN_THREADS,
        packs ? embedding_backward_kernel<E, W> : embedding_backward_kernel<E, 1>, dtable, dout, *q,
        columns, first_row, table_rows, add);
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
                                    const struct sequences *q, int64_t first_row, bool add)
{
    int64_t columns = dtable.shape[1], rows = dtable.shape[0];
    if (!dtable.data)
        return ST_OK;
    if (!add)
        TRY(CUDA(cudaMemsetAsync(dtable.data, 0, tensor_bytes(dtable), stream_cuda(s))));
    if (dout.dtype == DTYPE_BF16)
        return embedding_backward_any(s, (float *)dtable.data, (const bf16 *)dout.data, q, columns,
                                      first_row, rows, add);
    return embedding_backward_any(s, (float *)dtable.data, (const float *)dout.data, q, columns,
                                  first_row, rows, add);
}
