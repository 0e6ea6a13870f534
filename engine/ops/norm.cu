/*
 * engine/ops/norm.cu - CUDA backend of norm.h: LayerNorm fused with what stands before it.
 *
 * THREADS threads hold one row in registers as floats, CHUNKS packs of W elements each: pack k of
 * thread t is columns (k * THREADS + t) * W and on. Up to 1024 channels a row is one warp's, wider
 * rows are one block's. Mean and variance are taken from z as it is stored, so that backward sees
 * the same numbers. The gradients of gamma and beta are column sums in two ordered stages; they are
 * taken before dx is written, because dx may be dout.
 *
 * Bytes: forward reads x, y and writes z, out once; backward reads dout and z twice (the second
 * time mostly from L2) and writes dx, dy once. Bound by memory.
 */
#include "engine/ops/cuda_common.cuh"

/* What all kernels here get; which fields are set depends on the op. */
struct norm_args {
    void *out, *z;               /* z is input of backward */
    float *stats;                /* (2, T) */
    const void *x, *y;           /* y: residual only */
    const void *position, *type; /* embedding only; type may be NULL */
    const void *gamma, *beta;
    const void *dout;
    void *dx, *dy;
    struct sequences q;
    int64_t channels;
    float eps;
    struct dropout drop;
};

template <int THREADS> __device__ inline int64_t norm_row()
{
    if constexpr (THREADS == 32)
        return (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    return blockIdx.x;
}

template <int W, int THREADS> __device__ inline int64_t norm_column(int k)
{
    return ((int64_t)k * THREADS + threadIdx.x % THREADS) * W;
}

/* Which dropout elements a row has: those of its position in its sequence. */
__device__ static inline uint64_t norm_first_element(const struct norm_args &a, int64_t row, int b)
{
    return (uint64_t)(row - a.q.cu_seqlens[b]) * (uint64_t)a.channels;
}

/* A row of no sequence: zeros in up to two tensors and in the statistics. */
template <typename E, int W, int CHUNKS, int THREADS>
__device__ inline void norm_zero_row(const struct norm_args &a, void *first, void *second,
                                     float *stats, int64_t row)
{
    float zero[W] = {0.0f};
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        int64_t c = norm_column<W, THREADS>(k);
        if (c >= a.channels)
            break;
        if (first)
            store_pack<E, W>((E *)first + row * a.channels + c, zero);
        if (second)
            store_pack<E, W>((E *)second + row * a.channels + c, zero);
    }
    if (stats && threadIdx.x % THREADS == 0) {
        stats[row] = 0.0f;
        stats[a.q.rows + row] = 0.0f;
    }
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

/*
 * With g = dout * gamma and n = (z - mean) / deviation:
 *     dx = (g - mean of g - n * mean of g n) / deviation
 * (derivative of n by z, rows are independent). The embedding's dropout stands behind the norm and
 * applies to dout; the residual's stands before it and applies to dy.
 */
template <typename E, int W, int CHUNKS, int THREADS, bool EMBEDDING>
__global__ static void __launch_bounds__(THREADS == 32 ? 128 : THREADS)
    norm_backward_kernel(struct norm_args a)
{
    int64_t row = norm_row<THREADS>(), C = a.channels;
    if (row >= a.q.rows)
        return;
    int b = a.q.row_sequence[row];
    if (b < 0) {
        norm_zero_row<E, W, CHUNKS, THREADS>(a, a.dx, a.dy, NULL, row);
        return;
    }
    struct dropout_key mask = dropout_key(a.drop);
    uint32_t sample = (uint32_t)a.q.sample[b];
    uint64_t first = norm_first_element(a, row, b);
    float mean = a.stats[row], inverse = a.stats[a.q.rows + row];
    float g[CHUNKS][W], n[CHUNKS][W], sum_g = 0.0f, sum_gn = 0.0f;
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        int64_t c = norm_column<W, THREADS>(k);
        if (c >= C)
            break;
        float gamma[W];
        load_pack<E, W>(g[k], (const E *)a.dout + row * C + c);
        load_pack<E, W>(n[k], (const E *)a.z + row * C + c);
        load_pack<E, W>(gamma, (const E *)a.gamma + c);
        if (EMBEDDING)
            dropout_apply<W>(g[k], mask, sample, first + (uint64_t)c);
#pragma unroll
        for (int i = 0; i < W; i++) {
            g[k][i] *= gamma[i];
            n[k][i] = (n[k][i] - mean) * inverse;
            sum_g += g[k][i];
            sum_gn += g[k][i] * n[k][i];
        }
    }
    float mean_g = row_sum<THREADS>(sum_g) / (float)C;
    float mean_gn = row_sum<THREADS>(sum_gn) / (float)C;
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        int64_t c = norm_column<W, THREADS>(k);
        if (c >= C)
            break;
#pragma unroll
        for (int i = 0; i < W; i++)
            g[k][i] = inverse * (g[k][i] - mean_g - n[k][i] * mean_gn);
        if (a.dx)
            store_pack<E, W>((E *)a.dx + row * C + c, g[k]);
        if (!EMBEDDING && a.dy) {
            dropout_apply<W>(g[k], mask, sample, first + (uint64_t)c);
            store_pack<E, W>((E *)a.dy + row * C + c, g[k]);
        }
    }
}

/* Partial sums of dout * n (gamma) and dout (beta), dout behind the embedding's dropout. */
template <typename E, int W, bool EMBEDDING>
__global__ static void norm_columns_kernel(struct norm_args a, float *partial_gamma,
                                           float *partial_beta)
{
    int64_t C = a.channels, c0 = (int64_t)blockIdx.x * 32 * W, c = c0 + (threadIdx.x % 32) * W;
    int64_t row = (int64_t)blockIdx.y * COLUMN_ROWS + threadIdx.x / 32;
    int64_t end = min((int64_t)(blockIdx.y + 1) * COLUMN_ROWS, a.q.rows);
    struct dropout_key mask = dropout_key(a.drop);
    float gamma[W] = {0.0f}, beta[W] = {0.0f};
    if (c < C)
        for (; row < end; row += COLUMN_LANES) {
            int b = a.q.row_sequence[row];
            if (b < 0)
                continue;
            float g[W], z[W], mean = a.stats[row], inverse = a.stats[a.q.rows + row];
            load_pack<E, W>(g, (const E *)a.dout + row * C + c);
            load_pack<E, W>(z, (const E *)a.z + row * C + c);
            if (EMBEDDING)
                dropout_apply<W>(g, mask, (uint32_t)a.q.sample[b],
                                 norm_first_element(a, row, b) + (uint64_t)c);
#pragma unroll
            for (int i = 0; i < W; i++) {
                gamma[i] += g[i] * ((z[i] - mean) * inverse);
                beta[i] += g[i];
            }
        }
    columns_block<W>(gamma, partial_gamma + blockIdx.y * C, c0, C, false);
    columns_block<W>(beta, partial_beta + blockIdx.y * C, c0, C, false);
}

/* Row p of the position table: the rows at position p of all sequences, in their order. */
template <typename E, int W>
__global__ static void position_backward_kernel(float *dposition, const E *dx, struct sequences q,
                                                int64_t channels, bool add)
{
    int64_t p = blockIdx.x;
    for (int64_t c = (int64_t)threadIdx.x * W; c < channels; c += (int64_t)blockDim.x * W) {
        float sum[W] = {0.0f}, v[W];
        for (int b = 0; b < q.count; b++) {
            int64_t row = q.cu_seqlens[b] + p;
            if (row >= q.cu_seqlens[b + 1])
                continue;
            load_pack<E, W>(v, dx + row * channels + c);
#pragma unroll
            for (int i = 0; i < W; i++)
                sum[i] += v[i];
        }
#pragma unroll
        for (int i = 0; i < W; i++) {
            float *d = dposition + p * channels + c + i;
            *d = (add ? *d : 0.0f) + sum[i];
        }
    }
}

/* ---- launchers ------------------------------------------------------------------------------- */

/* The shapes that a row can have: one warp with whole packs or with elements, or one block. */
enum norm_shape { NORM_WARP_PACKS, NORM_WARP, NORM_BLOCK };
enum { NORM_WARP_COLUMNS = 1024, NORM_BLOCK_THREADS = 512, NORM_BLOCK_COLUMNS = 512 * 16 };

static enum norm_shape norm_shape(const struct norm_args *a, size_t elem_bytes)
{
    bool whole =
        packs_fit(a->channels, elem_bytes, a->out, a->z, a->x, a->y, a->dout) &&
        packs_fit(a->channels, elem_bytes, a->gamma, a->beta, a->position, a->type, a->dx, a->dy);
    if (a->channels > NORM_WARP_COLUMNS)
        return NORM_BLOCK;
    return whole ? NORM_WARP_PACKS : NORM_WARP;
}

#define NORM_LAUNCH(kernel, W, CHUNKS, THREADS, ...)                                               \
    kernel<E, W, CHUNKS, THREADS __VA_ARGS__>                                                      \
        <<<(unsigned)(THREADS == 32 ? div_up(a->q.rows, 4) : a->q.rows),                           \
           THREADS == 32 ? 128 : THREADS, 0, stream_cuda(s)>>>(*a)

/* Launch @kernel in the shape of this row; further template arguments follow with their comma. */
#define NORM_ROWS(kernel, ...)                                                                     \
    do {                                                                                           \
        constexpr int W = full_pack<E>();                                                          \
        switch (norm_shape(a, sizeof(E))) {                                                        \
        case NORM_WARP_PACKS:                                                                      \
            NORM_LAUNCH(kernel, W, NORM_WARP_COLUMNS / (32 * W), 32, __VA_ARGS__);                 \
            break;                                                                                 \
        case NORM_WARP:                                                                            \
            NORM_LAUNCH(kernel, 1, NORM_WARP_COLUMNS / 32, 32, __VA_ARGS__);                       \
            break;                                                                                 \
        case NORM_BLOCK:                                                                           \
            NORM_LAUNCH(kernel, 1, NORM_BLOCK_COLUMNS / NORM_BLOCK_THREADS, NORM_BLOCK_THREADS,    \
                        __VA_ARGS__);                                                              \
            break;                                                                                 \
        }                                                                                          \
    } while (0)

static enum status norm_check(const struct norm_args *a)
{
    if (a->channels > NORM_BLOCK_COLUMNS)
        return FAIL(UNSUPPORTED, "a norm over %lld channels; at most %d on this device",
                    (long long)a->channels, (int)NORM_BLOCK_COLUMNS);
    return ST_OK;
}

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

#define COMMA ,

template <typename E, bool EMBEDDING>
static enum status norm_backward_rows(struct stream *s, struct norm_args *a)
{
    TRY(norm_check(a));
    if (a->q.rows == 0 || (!a->dx && !a->dy))
        return ST_OK;
    NORM_ROWS(norm_backward_kernel, COMMA EMBEDDING);
    return CUDA(cudaGetLastError());
}

/* dgamma and dbeta (C) fp32; either may be NULL. */
template <typename E, bool EMBEDDING>
static enum status norm_backward_columns(struct stream *s, const struct norm_args *a, float *dgamma,
                                         float *dbeta, bool add)
{
    int64_t C = a->channels, parts = column_parts(a->q.rows);
    if (!dgamma && !dbeta)
        return ST_OK;
    void *scratch;
    TRY(stream_scratch(&scratch, s, (size_t)(2 * parts * C) * sizeof(float)));
    float *gamma = (float *)scratch, *beta = gamma + parts * C;
    if (parts > 0) {
        constexpr int W = full_pack<E>();
        if (packs_fit(C, sizeof(E), a->dout, a->z))
            norm_columns_kernel<E, W, EMBEDDING>
                <<<dim3((unsigned)div_up(C, 32 * W), (unsigned)parts), COLUMN_THREADS, 0,
                   stream_cuda(s)>>>(*a, gamma, beta);
        else
            norm_columns_kernel<E, 1, EMBEDDING>
                <<<dim3((unsigned)div_up(C, 32), (unsigned)parts), COLUMN_THREADS, 0,
                   stream_cuda(s)>>>(*a, gamma, beta);
        TRY(CUDA(cudaGetLastError()));
    }
    if (dgamma)
        TRY(columns_finish(s, dgamma, gamma, parts, C, add));
    if (dbeta)
        TRY(columns_finish(s, dbeta, beta, parts, C, add));
    return ST_OK;
}

template <typename E>
static enum status position_backward(struct stream *s, struct tensor dposition, const E *dx,
                                     const struct sequences *q, bool add)
{
    int64_t C = dposition.shape[1];
    constexpr int W = full_pack<E>();
    if (dposition.shape[0] == 0)
        return ST_OK;
    unsigned blocks = (unsigned)dposition.shape[0];
    if (packs_fit(C, sizeof(E), dx))
        position_backward_kernel<E, W>
            <<<blocks, 128, 0, stream_cuda(s)>>>((float *)dposition.data, dx, *q, C, add);
    else
        position_backward_kernel<E, 1>
            <<<blocks, 128, 0, stream_cuda(s)>>>((float *)dposition.data, dx, *q, C, add);
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

/* Columns first: dx may overwrite dout. */
template <typename E, bool EMBEDDING>
static enum status norm_backward(struct stream *s, struct norm_args *a, float *dgamma, float *dbeta,
                                 bool add)
{
    TRY((norm_backward_columns<E, EMBEDDING>(s, a, dgamma, dbeta, add)));
    return norm_backward_rows<E, EMBEDDING>(s, a);
}

enum status cuda_embedding_norm_backward(struct stream *s, struct tensor dx,
                                         struct tensor dposition, struct tensor dtype_table,
                                         struct tensor dgamma, struct tensor dbeta,
                                         struct tensor dout, struct tensor z, struct tensor stats,
                                         struct tensor gamma, const struct sequences *q,
                                         struct dropout drop, bool add)
{
    struct norm_args a = {};
    a.dx = dx.data;
    a.dout = dout.data;
    a.z = z.data;
    a.stats = (float *)stats.data;
    a.gamma = gamma.data;
    a.q = *q;
    a.channels = dout.shape[1];
    a.drop = drop;
    float *dg = (float *)dgamma.data, *db = (float *)dbeta.data;
    if (dout.dtype == DTYPE_BF16)
        TRY((norm_backward<bf16, true>(s, &a, dg, db, add)));
    else
        TRY((norm_backward<float, true>(s, &a, dg, db, add)));
    if (dposition.data && dout.dtype == DTYPE_BF16)
        TRY(position_backward(s, dposition, (const bf16 *)dx.data, q, add));
    else if (dposition.data)
        TRY(position_backward(s, dposition, (const float *)dx.data, q, add));
    /* Rows of no sequence have zeros in dx, whatever their token_type. */
    for (int64_t t = 0; dtype_table.data && t < dtype_table.shape[0]; t++)
        TRY(columns_sum(s, (float *)dtype_table.data + t * a.channels, dx, q->token_type,
                        (int32_t)t, add));
    return ST_OK;
}

enum status cuda_residual_norm_backward(struct stream *s, struct tensor dx, struct tensor dy,
                                        struct tensor dgamma, struct tensor dbeta,
                                        struct tensor dout, struct tensor z, struct tensor stats,
                                        struct tensor gamma, const struct sequences *q,
                                        struct dropout drop, bool add)
{
    struct norm_args a = {};
    a.dx = dx.data;
    a.dy = dy.data;
    a.dout = dout.data;
    a.z = z.data;
    a.stats = (float *)stats.data;
    a.gamma = gamma.data;
    a.q = *q;
    a.channels = dout.shape[1];
    a.drop = drop;
    float *dg = (float *)dgamma.data, *db = (float *)dbeta.data;
    return dout.dtype == DTYPE_BF16 ? norm_backward<bf16, false>(s, &a, dg, db, add)
                                    : norm_backward<float, false>(s, &a, dg, db, add);
}
