/*
 * engine/ops/norm_forward.cu - CUDA backend of norm.h, forward: LayerNorm fused with what stands
 * before it.
 *
 * Up to 1024 channels a row is one warp's, wider rows are one block's (see norm_cuda.cuh). Mean and
 * variance are taken from z as it is stored, so that backward sees the same numbers.
 *
 * Bytes: reads x, y (or the tables) and writes z, out once. Bound by memory.
 */
#include "engine/ops/norm_cuda.cuh"

template <int THREADS> __device__ inline int64_t norm_row()
{
    if constexpr (THREADS == 32)
        return (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    return blockIdx.x;
}

/* v holds z; writes the statistics and leaves gamma * (z - mean) / deviation + beta in v. */
template <typename E, int W, int CHUNKS, int THREADS>
__device__ inline void norm_rows(float (&v)[CHUNKS][W], const struct norm_args &a, int64_t row)
{
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int k = 0; k < CHUNKS; k++)
        if (norm_column<W, THREADS>(k) < a.channels)
#pragma unroll
            for (int i = 0; i < W; i++)
                sum += v[k][i];
    float mean = row_sum<THREADS>(sum) / (float)a.channels;
#pragma unroll
    for (int k = 0; k < CHUNKS; k++)
        if (norm_column<W, THREADS>(k) < a.channels)
#pragma unroll
            for (int i = 0; i < W; i++)
                squares += (v[k][i] - mean) * (v[k][i] - mean);
    float variance = row_sum<THREADS>(squares) / (float)a.channels;
    float inverse = 1.0f / sqrtf(variance + a.eps);
    if (threadIdx.x % THREADS == 0) {
        a.stats[row] = mean;
        a.stats[a.q.rows + row] = inverse;
    }
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        int64_t c = norm_column<W, THREADS>(k);
        if (c >= a.channels)
            break;
        float gamma[W], beta[W];
        load_pack<E, W>(gamma, (const E *)a.gamma + c);
        load_pack<E, W>(beta, (const E *)a.beta + c);
#pragma unroll
        for (int i = 0; i < W; i++)
            v[k][i] = (v[k][i] - mean) * inverse * gamma[i] + beta[i];
    }
}

/* z = x + position[row] + type[token_type]; out = dropout(norm(z)) */
template <typename E, int W, int CHUNKS, int THREADS>
__global__ static void __launch_bounds__(THREADS == 32 ? 128 : THREADS)
    embedding_norm_forward_kernel(struct norm_args a)
{
    int64_t row = norm_row<THREADS>(), C = a.channels;
    if (row >= a.q.rows)
        return;
    int b = a.q.row_sequence[row];
    if (b < 0) {
        norm_zero_row<E, W, CHUNKS, THREADS>(a, a.out, a.z, a.stats, row);
        return;
    }
    struct dropout_key mask = dropout_key(a.drop);
    uint32_t sample = (uint32_t)a.q.sample[b];
    uint64_t first = norm_first_element(a, row, b);
    const E *position = (const E *)a.position + (row - a.q.cu_seqlens[b]) * C;
    const E *type = a.type ? (const E *)a.type + a.q.token_type[row] * C : NULL;
    float v[CHUNKS][W];
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        int64_t c = norm_column<W, THREADS>(k);
        if (c >= C)
            break;
        float p[W], t[W] = {0.0f};
        load_pack<E, W>(v[k], (const E *)a.x + row * C + c);
        load_pack<E, W>(p, position + c);
        if (type)
            load_pack<E, W>(t, type + c);
#pragma unroll
        for (int i = 0; i < W; i++)
            v[k][i] = rounded<E>(v[k][i] + p[i] + t[i]);
        store_pack<E, W>((E *)a.z + row * C + c, v[k]);
    }
    norm_rows<E, W, CHUNKS, THREADS>(v, a, row);
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        int64_t c = norm_column<W, THREADS>(k);
        if (c >= C)
            break;
        dropout_apply<W>(v[k], mask, sample, first + (uint64_t)c);
        store_pack<E, W>((E *)a.out + row * C + c, v[k]);
    }
}

/* z = x + dropout(y); out = norm(z) */
template <typename E, int W, int CHUNKS, int THREADS>
__global__ static void __launch_bounds__(THREADS == 32 ? 128 : THREADS)
    residual_norm_forward_kernel(struct norm_args a)
{
    int64_t row = norm_row<THREADS>(), C = a.channels;
    if (row >= a.q.rows)
        return;
    int b = a.q.row_sequence[row];
    if (b < 0) {
        norm_zero_row<E, W, CHUNKS, THREADS>(a, a.out, a.z, a.stats, row);
        return;
    }
    struct dropout_key mask = dropout_key(a.drop);
    uint32_t sample = (uint32_t)a.q.sample[b];
    uint64_t first = norm_first_element(a, row, b);
    float v[CHUNKS][W];
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        int64_t c = norm_column<W, THREADS>(k);
        if (c >= C)
            break;
        float x[W];
        load_pack<E, W>(x, (const E *)a.x + row * C + c);
        load_pack<E, W>(v[k], (const E *)a.y + row * C + c);
        dropout_apply<W>(v[k], mask, sample, first + (uint64_t)c);
#pragma unroll
        for (int i = 0; i < W; i++)
            v[k][i] = rounded<E>(x[i] + v[k][i]);
        store_pack<E, W>((E *)a.z + row * C + c, v[k]);
    }
    norm_rows<E, W, CHUNKS, THREADS>(v, a, row);
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        int64_t c = norm_column<W, THREADS>(k);
        if (c >= C)
            break;
        store_pack<E, W>((E *)a.out + row * C + c, v[k]);
    }
}

/* ---- launchers ------------------------------------------------------------------------------- */

/* The shapes that a row can have: one warp with whole packs or with elements, or one block. */
enum norm_shape { NORM_WARP_PACKS, NORM_WARP, NORM_BLOCK };
enum { NORM_WARP_COLUMNS = 1024, NORM_BLOCK_THREADS = 512 };

static enum norm_shape norm_shape(const struct norm_args *a, size_t elem_bytes)
{
    if (a->channels > NORM_WARP_COLUMNS)
        return NORM_BLOCK;
    return norm_packs(a, elem_bytes) ? NORM_WARP_PACKS : NORM_WARP;
}

#define NORM_LAUNCH(kernel, W, CHUNKS, THREADS)                                                    \
    kernel<E, W, CHUNKS, THREADS><<<(unsigned)(THREADS == 32 ? div_up(a->q.rows, 4) : a->q.rows),  \
                                    THREADS == 32 ? 128 : THREADS, 0, stream_cuda(s)>>>(*a)

/* Launch @kernel in the shape of this row. */
#define NORM_ROWS(kernel)                                                                          \
    do {                                                                                           \
        constexpr int W = full_pack<E>();                                                          \
        switch (norm_shape(a, sizeof(E))) {                                                        \
        case NORM_WARP_PACKS:                                                                      \
            NORM_LAUNCH(kernel, W, NORM_WARP_COLUMNS / (32 * W), 32);                              \
            break;                                                                                 \
        case NORM_WARP:                                                                            \
            NORM_LAUNCH(kernel, 1, NORM_WARP_COLUMNS / 32, 32);                                    \
            break;                                                                                 \
        case NORM_BLOCK:                                                                           \
            NORM_LAUNCH(kernel, 1, NORM_MAX_COLUMNS / NORM_BLOCK_THREADS, NORM_BLOCK_THREADS);     \
            break;                                                                                 \
        }                                                                                          \
    } while (0)

template <typename E>
static enum status embedding_forward_rows(struct stream *s, struct norm_args *a)
{
    TRY(norm_check(a));
    if (a->q.rows == 0)
        return ST_OK;
    NORM_ROWS(embedding_norm_forward_kernel);
    return CUDA(cudaGetLastError());
}

template <typename E>
static enum status residual_forward_rows(struct stream *s, struct norm_args *a)
{
    TRY(norm_check(a));
    if (a->q.rows == 0)
        return ST_OK;
    NORM_ROWS(residual_norm_forward_kernel);
    return CUDA(cudaGetLastError());
}

/* ---- entries of the table -------------------------------------------------------------------- */

enum status cuda_embedding_norm_forward(struct stream *s, struct tensor out, struct tensor z,
                                        struct tensor stats, struct tensor x,
                                        struct tensor position, struct tensor type,
                                        struct tensor gamma, struct tensor beta,
                                        const struct sequences *q, float eps, struct dropout drop)
{
    struct norm_args a = {};
    a.out = out.data;
    a.z = z.data;
    a.stats = (float *)stats.data;
    a.x = x.data;
    a.position = position.data;
    a.type = type.data;
    a.gamma = gamma.data;
    a.beta = beta.data;
    a.q = *q;
    a.channels = out.shape[1];
    a.eps = eps;
    a.drop = drop;
    return out.dtype == DTYPE_BF16 ? embedding_forward_rows<bf16>(s, &a)
                                   : embedding_forward_rows<float>(s, &a);
}

enum status cuda_residual_norm_forward(struct stream *s, struct tensor out, struct tensor z,
                                       struct tensor stats, struct tensor x, struct tensor y,
                                       struct tensor gamma, struct tensor beta,
                                       const struct sequences *q, float eps, struct dropout drop)
{
    struct norm_args a = {};
    a.out = out.data;
    a.z = z.data;
    a.stats = (float *)stats.data;
    a.x = x.data;
    a.y = y.data;
    a.gamma = gamma.data;
    a.beta = beta.data;
    a.q = *q;
    a.channels = out.shape[1];
    a.eps = eps;
    a.drop = drop;
    return out.dtype == DTYPE_BF16 ? residual_forward_rows<bf16>(s, &a)
                                   : residual_forward_rows<float>(s, &a);
}
