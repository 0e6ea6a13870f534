/*
 * engine/ops/columns.cu - column sums of a matrix in two ordered stages; see cuda_common.cuh.
 */
#include "engine/ops/cuda_common.cuh"

enum status stream_scratch(void **out, const struct stream *s, size_t bytes)
{
    *out = s->workspace;
    if (s->workspace_bytes < bytes)
        return FAIL(INVALID, "the stream's workspace has %zu bytes, an op needs %zu",
                    s->workspace_bytes, bytes);
    return ST_OK;
}

enum { FINISH_THREADS = 1024, FINISH_LANES = FINISH_THREADS / 32 };

/*
 * Block (x, y): 32 columns of set y. Row lane r adds parts r, r + 32, ...; then warp w adds the row
 * lanes of column w by a butterfly. Bytes: the partial sums once.
 */
__global__ static void __launch_bounds__(FINISH_THREADS)
    columns_finish_kernel(struct column_sets sets, const float *partial, int64_t parts,
                          int64_t columns, bool add)
{
    __shared__ float tile[FINISH_LANES][33];
    float *out = sets.out[blockIdx.y];
    int lane = threadIdx.x % 32, row = threadIdx.x / 32;
    int64_t c0 = (int64_t)blockIdx.x * 32, stride = columns * sets.count;
    if (!out)
        return;
    float sum = 0.0f;
    if (c0 + lane < columns)
        for (int64_t p = row; p < parts; p += FINISH_LANES)
            sum += partial[p * stride + blockIdx.y * columns + c0 + lane];
    tile[row][lane] = sum;
    __syncthreads();
    sum = warp_sum(tile[lane][row]);
    if (lane == 0 && c0 + row < columns)
        out[c0 + row] = (add ? out[c0 + row] : 0.0f) + sum;
}

enum status columns_finish(struct stream *s, struct column_sets sets, const float *partial,
                           int64_t parts, int64_t columns, bool add)
{
    bool wanted = false;
    for (int i = 0; i < sets.count; i++)
        wanted |= sets.out[i] != NULL;
    if (columns == 0 || !wanted)
        return ST_OK;
    columns_finish_kernel<<<dim3((unsigned)div_up(columns, 32), (unsigned)sets.count),
                            FINISH_THREADS, 0, stream_cuda(s)>>>(sets, partial, parts, columns,
                                                                 add);
    return CUDA(cudaGetLastError());
}

/* Block (x, y): packs 32 x .. and rows COLUMN_ROWS y .. Bytes: the matrix once. */
template <typename E, int W>
__global__ static void columns_sum_kernel(float *partial, const E *x, const int32_t *label,
                                          int32_t value, int64_t rows, int64_t columns)
{
    int64_t c0 = (int64_t)blockIdx.x * 32 * W, c = c0 + (threadIdx.x % 32) * W;
    int64_t row = (int64_t)blockIdx.y * COLUMN_ROWS + threadIdx.x / 32;
    int64_t end = min((int64_t)(blockIdx.y + 1) * COLUMN_ROWS, rows);
    float sum[W] = {0.0f};
    if (c < columns)
#pragma unroll 4
        for (; row < end; row += COLUMN_LANES) {
            if (label && label[row] != value)
                continue;
            float v[W];
            load_pack<E, W>(v, x + row * columns + c);
#pragma unroll
            for (int i = 0; i < W; i++)
                sum[i] += v[i];
        }
    columns_block<W>(sum, partial + (int64_t)blockIdx.y * columns, c0, columns, false);
}

template <typename E, int W>
static void columns_sum_launch(struct stream *s, float *partial, struct tensor x,
                               const int32_t *label, int32_t value)
{
    int64_t rows = x.shape[0], columns = x.shape[1];
    dim3 grid((unsigned)div_up(columns, 32 * W), (unsigned)column_parts(rows));
    columns_sum_kernel<E, W><<<grid, COLUMN_THREADS, 0, stream_cuda(s)>>>(
        partial, (const E *)x.data, label, value, rows, columns);
}

template <typename E>
static void columns_sum_any(struct stream *s, float *partial, struct tensor x, const int32_t *label,
                            int32_t value)
{
    if (packs_fit(x.shape[1], sizeof(E), x.data))
        columns_sum_launch<E, full_pack<E>()>(s, partial, x, label, value);
    else
        columns_sum_launch<E, 1>(s, partial, x, label, value);
}

enum status columns_sum(struct stream *s, float *out, struct tensor x, const int32_t *label,
                        int32_t value, bool add)
{
    int64_t rows = x.shape[0], columns = x.shape[1], parts = column_parts(rows);
    void *partial;
    TRY(stream_scratch(&partial, s, (size_t)(parts * columns) * sizeof(float)));
    if (parts > 0 && columns > 0) {
        if (x.dtype == DTYPE_BF16)
            columns_sum_any<bf16>(s, (float *)partial, x, label, value);
        else
            columns_sum_any<float>(s, (float *)partial, x, label, value);
        TRY(CUDA(cudaGetLastError()));
    }
    struct column_sets sets = {{out}, 1};
    return columns_finish(s, sets, (const float *)partial, parts, columns, add);
}
