/*
 * engine/ops/norm_forward.cu - CUDA backend of norm.h, forward: LayerNorm fused with what stands
 * before it.
 *
 * Up to 1024 channels a row is one warp's, wider rows are one block's (see norm_cuda.cuh). Mean and
 * variance are taken from z as it is stored, so that backward sees the same numbers. A thread asks
 * for all it reads of a row before it uses any: z may be y, so the compiler could not move a load
 * above a store. gamma and beta are on their way while the sums are made.
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

/* All packs of a row's thread, as they lie in memory. */
template <typename E, int W, int CHUNKS, int THREADS>
__device__ inline void norm_load(struct raw_pack<E, W> (&x)[CHUNKS], const E *row, int64_t channels)
{
#pragma unroll
    for (int k = 0; k < CHUNKS; k++)
        if (norm_column<W, THREADS>(k) < channels)
            load_raw(x[k], row + norm_column<W, THREADS>(k));
}

/* v holds z; writes the statistics and leaves gamma * (z - mean) / deviation + beta in v. */
template <typename E, int W, int CHUNKS, int THREADS>
__device__ inline void norm_rows(float (&v)[CHUNKS][W], const struct norm_args &a, int64_t row)
{
    struct raw_pack<E, W> gamma_raw[CHUNKS], beta_raw[CHUNKS];
    float sum = 0.0f, squares = 0.0f;
    norm_load<E, W, CHUNKS, THREADS>(gamma_raw, (const E *)a.gamma, a.channels);
    norm_load<E, W, CHUNKS, THREADS>(beta_raw, (const E *)a.beta, a.channels);
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
        float gamma[W], beta[W];
        if (norm_column<W, THREADS>(k) >= a.channels)
            break;
        unpack(gamma, gamma_raw[k]);
        unpack(beta, beta_raw[k]);
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
    kernel_begin();
    if (row >= a.q.rows)
        return;
    struct raw_pack<E, W> x_raw[CHUNKS], position_raw[CHUNKS], type_raw[CHUNKS];
    norm_load<E, W, CHUNKS, THREADS>(x_raw, (const E *)a.x + row * C, C);
    int b = a.q.row_sequence[row];
    if (b < 0) {
        norm_zero_row<E, W, CHUNKS, THREADS>(a, a.out, a.z, a.stats, row);
        return;
    }
    struct dropout_key mask = dropout_key(a.drop);
    uint32_t sample = (uint32_t)a.q.sample[b];
    uint64_t first = norm_first_element(a, row, b);
    norm_load<E, W, CHUNKS, THREADS>(position_raw,
                                     (const E *)a.position + (row - a.q.cu_seqlens[b]) * C, C);
    if (a.type)
        norm_load<E, W, CHUNKS, THREADS>(type_raw, (const E *)a.type + a.q.token_type[row] * C, C);
    float v[CHUNKS][W];
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        int64_t c = norm_column<W, THREADS>(k);
        if (c >= C)
            break;
        float p[W], t[W] = {0.0f};
        unpack(v[k], x_raw[k]);
        unpack(p, position_raw[k]);
        if (a.type)
            unpack(t, type_raw[k]);
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

/* z = x + dropout(y); out = norm(z). Six blocks a multiprocessor hold a batch of 3,168 rows. */
template <typename E, int W, int CHUNKS, int THREADS>
__global__ static void __launch_bounds__(THREADS == 32 ? 128 : THREADS, W == 8 ? 6 : 1)
    residual_norm_forward_kernel(struct norm_args a)
{
    int64_t row = norm_row<THREADS>(), C = a.channels;
    kernel_begin();
    if (row >= a.q.rows)
        return;
    struct raw_pack<E, W> x_raw[CHUNKS], y_raw[CHUNKS];
    norm_load<E, W, CHUNKS, THREADS>(y_raw, (const E *)a.y + row * C, C);
    norm_load<E, W, CHUNKS, THREADS>(x_raw, (const E *)a.x + row * C, C);
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
        unpack(x, x_raw[k]);
        unpack(v[k], y_raw[k]);
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
    launch_kernel(s, dim3((unsigned)(THREADS == 32 ? div_up(a->q.rows, 4) : a->q.rows)),           \
                  THREADS == 32 ? 128 : THREADS, kernel<E, W, CHUNKS, THREADS>, *a)

/* Launch @kernel in the shape of this row, unless there is none; its status is in st. */
#define NORM_ROWS(kernel)                                                                          \
    do {                                                                                           \
        constexpr int W = full_pack<E>(), WIDE = NORM_BLOCK_THREADS;                               \
        if (a->q.rows == 0)                                                                        \
            break;                                                                                 \
        switch (norm_shape(a, sizeof(E))) {                                                        \
        case NORM_WARP_PACKS:                                                                      \
            st = NORM_LAUNCH(kernel, W, NORM_WARP_COLUMNS / (32 * W), 32);                         \
            break;                                                                                 \
        case NORM_WARP:                                                                            \
            st = NORM_LAUNCH(kernel, 1, NORM_WARP_COLUMNS / 32, 32);                               \
            break;                                                                                 \
        case NORM_BLOCK:                                                                           \
            st = NORM_LAUNCH(kernel, 1, NORM_MAX_COLUMNS / WIDE, WIDE);                            \
            break;                                                                                 \
        }                                                                                          \
    } while (0)

template <typename E>
static enum status embedding_forward_rows(struct stream *s, struct norm_args *a)
{
    enum status st = norm_check(a);
    if (st == ST_OK)
        NORM_ROWS(embedding_norm_forward_kernel);
    return st;
}

template <typename E>
static enum status residual_forward_rows(struct stream *s, struct norm_args *a)
{
    enum status st = norm_check(a);
    if (st == ST_OK)
        NORM_ROWS(residual_norm_forward_kernel);
    return st;
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
