/*
 * engine/ops/norm_backward.cu - CUDA backend of norm.h, backward: all gradients in one pass.
 *
 * WARPS warps hold one row, a pack or a few a thread (see norm_cuda.cuh); a block has GROUPS such
 * groups, and they take part_rows rows in turn, the next row on its way while one is at hand. What
 * each thread adds up over its rows are column sums: of dgamma, dbeta and, with the residual, of
 * the bias in front of it. The groups of a block are added in order and give one row of partial
 * sums; columns_finish() adds the blocks' rows in order. part_rows depends on the number of rows
 * alone, so equal inputs give equal bits.
 *
 *     dz = (g - mean of g - n mean of g n) / deviation, g = dout gamma,  n = (z - mean) / deviation
 *
 * The embedding's dropout stands behind the norm and applies to dout; the residual's stands before
 * it and applies to dy. A row is read before it is written, as dx may be dout.
 *
 * Bytes: dout and z read, dx and dy written once; partial sums of 2 or 3 vectors a block. Bound by
 * memory.
 */
#include "engine/ops/norm_cuda.cuh"

enum { NORM_WIDE_WARPS = 16 };

template <int WARPS> struct norm_block {
    static constexpr int GROUPS = WARPS < 8 ? 8 / WARPS : 1, THREADS = GROUPS * WARPS * 32;
};

/* Rows a block takes: the fewest, in whole turns of its groups. */
template <int WARPS> static int64_t norm_part_rows(int64_t rows)
{
    constexpr int GROUPS = norm_block<WARPS>::GROUPS;
    return div_up(div_up(rows, NORM_MAX_PARTS), GROUPS) * GROUPS;
}

/* A row that waits for its turn, or has it. */
template <typename E, int W, int CHUNKS> struct norm_held {
    int sequence;
    float mean, inverse;
    struct raw_pack<E, W> dout[CHUNKS], z[CHUNKS];
};

template <typename E, int W, int CHUNKS, int THREADS>
__device__ inline void norm_fetch(struct norm_held<E, W, CHUNKS> &p, const struct norm_args &a,
                                  int64_t row)
{
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        int64_t c = norm_column<W, THREADS>(k);
        if (c >= a.channels)
            break;
        load_raw(p.dout[k], (const E *)a.dout + row * a.channels + c);
        load_raw(p.z[k], (const E *)a.z + row * a.channels + c);
    }
    p.sequence = a.q.row_sequence[row];
    p.mean = a.stats[row];
    p.inverse = a.stats[a.q.rows + row];
}

/*
 * Pack @k of a row: dout (behind the embedding's dropout), n and gamma. Made from the held pack
 * each time it is needed, as its floats would not fit in the registers between.
 */
template <typename E, int W, int CHUNKS, bool EMBEDDING>
__device__ inline void norm_terms(float (&dout)[W], float (&n)[W], float (&gamma)[W],
                                  struct norm_held<E, W, CHUNKS> &row,
                                  struct raw_pack<E, W> &weight, int k, struct dropout_key mask,
                                  uint32_t sample, uint64_t element)
{
    forget(row.dout[k]);
    forget(row.z[k]);
    forget(weight);
    unpack(dout, row.dout[k]);
    unpack(n, row.z[k]);
    unpack(gamma, weight);
#pragma unroll
    for (int i = 0; i < W; i++)
        n[i] = (n[i] - row.mean) * row.inverse;
    if constexpr (EMBEDDING) {
        forget(mask);
        dropout_apply<W>(dout, mask, sample, element);
    }
}

/* Sums of x and y over a group, the same bits in all its threads. @turn: 0 and 1 by turns, so that
 * one barrier is enough. */
template <int WARPS, int GROUPS> __device__ inline void group_sums(float &x, float &y, int turn)
{
    x = warp_sum(x);
    y = warp_sum(y);
    if constexpr (WARPS > 1) {
        __shared__ float2 part[2][GROUPS][WARPS];
        int warp = threadIdx.x / 32 % WARPS, group = threadIdx.x / 32 / WARPS;
        if (threadIdx.x % 32 == 0)
            part[turn][group][warp] = make_float2(x, y);
        group_barrier<WARPS * 32>(1 + group);
        x = y = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            x += part[turn][group][i].x;
            y += part[turn][group][i].y;
        }
    }
}

/* One row of partial sums from those of the block's groups, in their order. */
template <int W, int CHUNKS, int WARPS, int GROUPS>
__device__ inline void norm_partial(float *out, const float (&sum)[CHUNKS][W], int64_t channels)
{
    constexpr int THREADS = WARPS * 32;
    if constexpr (GROUPS == 1) {
#pragma unroll
        for (int k = 0; k < CHUNKS; k++)
#pragma unroll
            for (int i = 0; i < W; i++)
                if (norm_column<W, THREADS>(k) + i < channels)
                    out[norm_column<W, THREADS>(k) + i] = sum[k][i];
    } else {
        static_assert(CHUNKS == 1, "a group of a shared block has one pack a thread");
        __shared__ float tile[GROUPS][W][THREADS + 4]; /* 4: a warp's reads lie in 32 banks */
#pragma unroll
        for (int i = 0; i < W; i++)
            tile[threadIdx.x / THREADS][i][threadIdx.x % THREADS] = sum[0][i];
        __syncthreads();
        for (int c = threadIdx.x; c < W * THREADS && c < channels; c += GROUPS * THREADS) {
            float total = 0.0f;
            for (int g = 0; g < GROUPS; g++)
                total += tile[g][c % W][c / W];
            out[c] = total;
        }
        __syncthreads(); /* the tile is written again by the next call */
    }
}

/* Block x: rows part_rows x .. Partial sums: (blocks, sets, channels). */
template <typename E, int W, int CHUNKS, int WARPS, bool EMBEDDING>
__global__ static void __launch_bounds__(norm_block<WARPS>::THREADS, WARPS > 8 ? 1 : 3)
    norm_backward_kernel(struct norm_args a, float *partial, int64_t part_rows)
{
    constexpr int THREADS = WARPS * 32, GROUPS = norm_block<WARPS>::GROUPS,
                  SETS = EMBEDDING ? 2 : 3;
    int64_t C = a.channels, row = blockIdx.x * part_rows + threadIdx.x / THREADS;
    int64_t end = min((blockIdx.x + 1) * part_rows, a.q.rows);
    struct raw_pack<E, W> gamma[CHUNKS];
    struct norm_held<E, W, CHUNKS> now, next = {
    };
    float sum[SETS][CHUNKS][W] = {};
    if (row < end)
        norm_fetch<E, W, CHUNKS, THREADS>(next, a, row);
#pragma unroll
    for (int k = 0; k < CHUNKS; k++)
        if (norm_column<W, THREADS>(k) < C)
            load_raw(gamma[k], (const E *)a.gamma + norm_column<W, THREADS>(k));
    struct dropout_key mask = dropout_key(a.drop);
    for (int turn = 0; row < end; row += GROUPS, turn ^= 1) {
        now = next;
        if (row + GROUPS < end)
            norm_fetch<E, W, CHUNKS, THREADS>(next, a, row + GROUPS);
        if (now.sequence < 0) {
            norm_zero_row<E, W, CHUNKS, THREADS>(a, a.dx, a.dy, NULL, row);
            continue;
        }
        uint32_t sample = (uint32_t)a.q.sample[now.sequence];
        uint64_t first = norm_first_element(a, row, now.sequence);
        float g[W], n[W], weight[W], mean_g = 0.0f, mean_gn = 0.0f;
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
            int64_t c = norm_column<W, THREADS>(k);
            if (c >= C)
                break;
            norm_terms<E, W, CHUNKS, EMBEDDING>(g, n, weight, now, gamma[k], k, mask, sample,
                                                first + (uint64_t)c);
#pragma unroll
            for (int i = 0; i < W; i++) {
                sum[0][k][i] += g[i] * n[i];
                sum[1][k][i] += g[i];
                mean_g += g[i] * weight[i];
                mean_gn += g[i] * weight[i] * n[i];
            }
        }
        group_sums<WARPS, GROUPS>(mean_g, mean_gn, turn);
        mean_g /= (float)C;
        mean_gn /= (float)C;
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
            int64_t c = norm_column<W, THREADS>(k);
            if (c >= C)
                break;
            norm_terms<E, W, CHUNKS, EMBEDDING>(g, n, weight, now, gamma[k], k, mask, sample,
                                                first + (uint64_t)c);
#pragma unroll
            for (int i = 0; i < W; i++)
                g[i] = now.inverse * (g[i] * weight[i] - mean_g - n[i] * mean_gn);
            store_pack<E, W>((E *)a.dx + row * C + c, g);
            if constexpr (!EMBEDDING) {
                struct dropout_key key = mask;
                forget(key);
                dropout_apply<W>(g, key, sample, first + (uint64_t)c);
                store_pack<E, W>((E *)a.dy + row * C + c, g);
#pragma unroll
                for (int i = 0; i < W; i++)
                    sum[2][k][i] += g[i];
            }
        }
    }
#pragma unroll
    for (int k = 0; k < SETS; k++)
        norm_partial<W, CHUNKS, WARPS, GROUPS>(partial + (blockIdx.x * SETS + k) * C, sum[k], C);
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

template <typename E, int W, int CHUNKS, int WARPS, bool EMBEDDING>
static enum status norm_backward_any(struct stream *s, const struct norm_args *a,
                                     struct column_sets sets, bool add)
{
    int64_t rows = a->q.rows, part_rows = norm_part_rows<WARPS>(rows), parts = 0;
    void *partial = NULL;
    if (rows > 0) {
        parts = div_up(rows, part_rows);
        TRY(stream_scratch(&partial, s,
                           (size_t)(parts * sets.count * a->channels) * sizeof(float)));
        norm_backward_kernel<E, W, CHUNKS, WARPS, EMBEDDING>
            <<<(unsigned)parts, norm_block<WARPS>::THREADS, 0, stream_cuda(s)>>>(
                *a, (float *)partial, part_rows);
        TRY(CUDA(cudaGetLastError()));
    }
    return columns_finish(s, sets, (const float *)partial, parts, a->channels, add);
}

/* The fewest warps that hold a row with a pack a thread; other rows are a wide block's. */
template <typename E, bool EMBEDDING>
static enum status norm_backward(struct stream *s, const struct norm_args *a,
                                 struct column_sets sets, bool add)
{
    constexpr int W = full_pack<E>(), WIDE = NORM_WIDE_WARPS;
    constexpr int WIDE_COLUMNS = NORM_MAX_COLUMNS / (32 * WIDE); /* a thread */
    int64_t warps = div_up(a->channels, 32 * W);
    TRY(norm_check(a));
    if (!norm_packs(a, sizeof(E)))
        return norm_backward_any<E, 1, WIDE_COLUMNS, WIDE, EMBEDDING>(s, a, sets, add);
    if (warps > 8)
        return norm_backward_any<E, W, WIDE_COLUMNS / W, WIDE, EMBEDDING>(s, a, sets, add);
    if (warps > 4)
        return norm_backward_any<E, W, 1, 8, EMBEDDING>(s, a, sets, add);
    if (warps > 3)
        return norm_backward_any<E, W, 1, 4, EMBEDDING>(s, a, sets, add);
    if (warps > 2)
        return norm_backward_any<E, W, 1, 3, EMBEDDING>(s, a, sets, add);
    if (warps > 1)
        return norm_backward_any<E, W, 1, 2, EMBEDDING>(s, a, sets, add);
    return norm_backward_any<E, W, 1, 1, EMBEDDING>(s, a, sets, add);
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
    struct column_sets sets = {{(float *)dgamma.data, (float *)dbeta.data}, 2};
    if (dout.dtype == DTYPE_BF16)
        TRY((norm_backward<bf16, true>(s, &a, sets, add)));
    else
        TRY((norm_backward<float, true>(s, &a, sets, add)));
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
                                        struct tensor dbias, struct tensor dout, struct tensor z,
                                        struct tensor stats, struct tensor gamma,
                                        const struct sequences *q, struct dropout drop, bool add)
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
    struct column_sets sets = {{(float *)dgamma.data, (float *)dbeta.data, (float *)dbias.data}, 3};
    return dout.dtype == DTYPE_BF16 ? norm_backward<bf16, false>(s, &a, sets, add)
                                    : norm_backward<float, false>(s, &a, sets, add);
}
