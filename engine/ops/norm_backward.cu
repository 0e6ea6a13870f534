/*
 * engine/ops/norm_backward.cu - CUDA backend of norm.h, backward: all gradients in one pass.
 *
 * WARPS warps hold one row, a pack or a few a thread (see norm_cuda.cuh); a block has GROUPS such
 * groups. Group g of all takes rows g, g + groups, ... in turn, so that all of them walk through
 * the batch side by side. What each thread adds up over its rows are column sums: of dgamma, dbeta
 * and, with the residual, of the bias in front of it. The groups of a block are added in order and
 * give one row of partial sums; columns_finish() adds the blocks' rows in order. The number of
 * groups depends on the number of rows alone, so equal inputs give equal bits.
 *
 *     dz = (g - mean of g - n mean of g n) / deviation, g = dout gamma,  n = (z - mean) / deviation
 *
 * The embedding's dropout stands behind the norm and applies to dout; the residual's stands before
 * it and applies to dy. A row is read before it is written, as dx may be dout.
 *
 * Bytes: dout and z read, dx and dy written once; partial sums of 2 or 3 vectors a block. Bound by
 * memory, if enough of it is asked for at once: rows of whole packs wait in shared memory,
 * NORM_AHEAD of a group, where each thread puts and finds its own packs; and a warp looks up what
 * 32 rows have of their own (statistics, position, sample) with a lane for each.
 */
#include "engine/ops/norm_cuda.cuh"

enum { NORM_WIDE_WARPS = 16, NORM_AHEAD = 3 };

/* Twelve warps a block and two blocks a multiprocessor, if a row takes few warps. */
template <int WARPS> struct norm_block {
    static constexpr int GROUPS = WARPS < 12 ? 12 / WARPS : 1, THREADS = GROUPS * WARPS * 32;
};

/* Blocks, and so rows of partial sums. */
template <int WARPS> static int64_t norm_parts(int64_t rows)
{
    int64_t parts = div_up(rows, norm_block<WARPS>::GROUPS);
    return parts < NORM_MAX_PARTS ? parts : (int64_t)NORM_MAX_PARTS;
}

/* ---- what a row has of its own --------------------------------------------------------------- */

struct norm_row {
    int position; /* in its sequence; -1: of no sequence */
    uint32_t sample;
    float mean, inverse;
};

__device__ static inline struct norm_row norm_look_up(const struct norm_args &a, int64_t row)
{
    struct norm_row r = {-1, 0, 0.0f, 0.0f};
    if (row >= a.q.rows)
        return r;
    int b = a.q.row_sequence[row];
    r.mean = a.stats[row];
    r.inverse = a.stats[a.q.rows + row];
    if (b >= 0) {
        r.position = (int)(row - a.q.cu_seqlens[b]);
        r.sample = (uint32_t)a.q.sample[b];
    }
    return r;
}

/* That of lane @lane, in all lanes. */
__device__ static inline struct norm_row norm_row_of(const struct norm_row &all, int lane)
{
    struct norm_row r;
    r.position = __shfl_sync(0xFFFFFFFFu, all.position, lane);
    r.sample = __shfl_sync(0xFFFFFFFFu, all.sample, lane);
    r.mean = __shfl_sync(0xFFFFFFFFu, all.mean, lane);
    r.inverse = __shfl_sync(0xFFFFFFFFu, all.inverse, lane);
    return r;
}

/* ---- rows on their way ----------------------------------------------------------------------- */

/* Packs of dout and z of the rows that a group has asked for; also the place of a block's sums. */
template <typename E, int W, int CHUNKS, int WARPS, int SETS> struct norm_shared {
    static constexpr bool RING = W * sizeof(E) == 16 && CHUNKS == 1;
    static constexpr int THREADS = norm_block<WARPS>::THREADS, GROUPS = norm_block<WARPS>::GROUPS;
    union {
        uint4 ring[RING ? NORM_AHEAD : 1][2][RING ? THREADS : 1];
        float tile[GROUPS > 1 ? SETS : 1][GROUPS][W][GROUPS > 1 ? WARPS * 32 + 4 : 1];
    };
};

/* A row that a thread works on; without a ring also the one that waits for its turn. */
template <typename E, int W, int CHUNKS> struct norm_packs_of {
    struct raw_pack<E, W> dout[CHUNKS], z[CHUNKS];
};

template <typename E, int W, int CHUNKS, int THREADS>
__device__ inline void norm_fetch(struct norm_packs_of<E, W, CHUNKS> &p, const struct norm_args &a,
                                  int64_t row)
{
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        int64_t c = norm_column<W, THREADS>(k);
        if (row >= a.q.rows || c >= a.channels)
            break;
        load_raw(p.dout[k], (const E *)a.dout + row * a.channels + c);
        load_raw(p.z[k], (const E *)a.z + row * a.channels + c);
    }
}

/* Ask for a row; past the last one too, so that every turn has one group of copies to wait for. */
template <typename E, int W, int THREADS, typename S>
__device__ inline void norm_ask(S &shared, const struct norm_args &a, int64_t row, int slot)
{
    int64_t c = norm_column<W, THREADS>(0);
    if (row < a.q.rows && c < a.channels) {
        copy_16_bytes(&shared.ring[slot][0][threadIdx.x], (const E *)a.dout + row * a.channels + c);
        copy_16_bytes(&shared.ring[slot][1][threadIdx.x], (const E *)a.z + row * a.channels + c);
    }
    copies_commit();
}

template <typename E, int W, typename S>
__device__ inline void norm_take(struct norm_packs_of<E, W, 1> &p, const S &shared, int slot)
{
    copies_wait<NORM_AHEAD - 1>();
    load_raw(p.dout[0], (const E *)&shared.ring[slot][0][threadIdx.x]);
    load_raw(p.z[0], (const E *)&shared.ring[slot][1][threadIdx.x]);
}

/* ---- one row --------------------------------------------------------------------------------- */

/*
 * Pack @k of a row: dout (behind the embedding's dropout), n and gamma. With several packs a thread
 * it is made from the held pack each time it is needed, as the floats would not fit in the
 * registers between.
 */
template <typename E, int W, int CHUNKS, bool EMBEDDING>
__device__ inline void norm_terms(float (&dout)[W], float (&n)[W], float (&gamma)[W],
                                  struct norm_packs_of<E, W, CHUNKS> &held,
                                  struct raw_pack<E, W> &weight, int k, const struct norm_row &row,
                                  struct dropout_key mask, uint64_t element)
{
    if constexpr (CHUNKS > 1) {
        forget(held.dout[k]);
        forget(held.z[k]);
        forget(weight);
        forget(mask);
    }
    unpack(dout, held.dout[k]);
    unpack(n, held.z[k]);
    unpack(gamma, weight);
#pragma unroll
    for (int i = 0; i < W; i++)
        n[i] = (n[i] - row.mean) * row.inverse;
    if constexpr (EMBEDDING)
        dropout_apply<W>(dout, mask, row.sample, element);
}

/* Sums of x and y over a warp: in all lanes of its lower half x's, of its upper half y's. */
__device__ static inline float half_warp_sums(float x, float y)
{
    bool upper = threadIdx.x % 32 >= 16;
    float mine = upper ? y : x;
    mine += __shfl_xor_sync(0xFFFFFFFFu, upper ? x : y, 16);
#pragma unroll
    for (int step = 8; step > 0; step /= 2)
        mine += __shfl_xor_sync(0xFFFFFFFFu, mine, step);
    return mine;
}

/* What a group does in a turn without sums: it passes its barrier as often as the others. */
template <int WARPS, int GROUPS> __device__ inline void group_turn(void)
{
    if constexpr (WARPS > 1 && GROUPS > 1)
        group_barrier<WARPS * 32>(1 + threadIdx.x / 32 / WARPS);
}

/* Sums of x and y over a group, the same bits in all its threads. @parity: 0 and 1 by turns, so
 * that one barrier is enough. */
template <int WARPS, int GROUPS> __device__ inline void group_sums(float &x, float &y, int parity)
{
    float half = half_warp_sums(x, y);
    if constexpr (WARPS == 1) {
        x = __shfl_sync(0xFFFFFFFFu, half, 0);
        y = __shfl_sync(0xFFFFFFFFu, half, 16);
    } else {
        __shared__ float2 part[2][GROUPS][WARPS];
        int warp = threadIdx.x / 32 % WARPS, group = threadIdx.x / 32 / WARPS;
        if (threadIdx.x % 32 == 0)
            part[parity][group][warp].x = half;
        if (threadIdx.x % 32 == 16)
            part[parity][group][warp].y = half;
        group_barrier<WARPS * 32>(1 + group);
        x = y = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            x += part[parity][group][i].x;
            y += part[parity][group][i].y;
        }
    }
}

/* A block's row of partial sums, those of its groups in their order. */
template <typename E, int W, int CHUNKS, int WARPS, int SETS>
__device__ inline void norm_partial(float *out,
                                    struct norm_shared<E, W, CHUNKS, WARPS, SETS> &shared,
                                    const float (&sum)[SETS][CHUNKS][W], int64_t channels)
{
    constexpr int THREADS = WARPS * 32, GROUPS = norm_block<WARPS>::GROUPS;
    if constexpr (GROUPS == 1) {
#pragma unroll
        for (int k = 0; k < SETS * CHUNKS; k++) {
            int64_t c = norm_column<W, THREADS>(k % CHUNKS);
#pragma unroll
            for (int i = 0; i < W; i++)
                if (c + i < channels)
                    out[k / CHUNKS * channels + c + i] = sum[k / CHUNKS][k % CHUNKS][i];
        }
    } else {
        static_assert(CHUNKS == 1, "a group of a shared block has one pack a thread");
        int group = threadIdx.x / THREADS, thread = threadIdx.x % THREADS;
        __syncthreads(); /* the ring lies in the same place */
#pragma unroll
        for (int set = 0; set < SETS; set++)
#pragma unroll
            for (int i = 0; i < W; i++)
                shared.tile[set][group][i][thread] = sum[set][0][i];
        __syncthreads();
        for (int n = threadIdx.x; n < SETS * W * THREADS; n += GROUPS * THREADS) {
            int set = n / (W * THREADS), c = n % (W * THREADS);
            float total = 0.0f;
            for (int g = 0; g < GROUPS; g++)
                total += shared.tile[set][g][c % W][c / W];
            if (c < channels)
                out[set * channels + c] = total;
        }
    }
}

/* Partial sums: (blocks, sets, channels). */
template <typename E, int W, int CHUNKS, int WARPS, bool EMBEDDING>
__global__ static void __launch_bounds__(norm_block<WARPS>::THREADS, WARPS > 12 ? 1 : 2)
    norm_backward_kernel(struct norm_args a, float *partial)
{
    constexpr int THREADS = WARPS * 32, GROUPS = norm_block<WARPS>::GROUPS,
                  SETS = EMBEDDING ? 2 : 3;
    constexpr bool RING = norm_shared<E, W, CHUNKS, WARPS, SETS>::RING;
    __shared__ struct norm_shared<E, W, CHUNKS, WARPS, SETS> shared;
    int64_t C = a.channels, step = (int64_t)gridDim.x * GROUPS;
    int64_t row = (int64_t)blockIdx.x * GROUPS + threadIdx.x / THREADS;
    struct raw_pack<E, W> gamma[CHUNKS];
    struct norm_packs_of<E, W, CHUNKS> now, next = {
    };
    struct norm_row rows = {};
    int parity = 0;
    float share = 1.0f / (float)C;
    float sum[SETS][CHUNKS][W] = {};
    kernel_begin();
    if constexpr (RING)
        for (int i = 0; i < NORM_AHEAD; i++)
            norm_ask<E, W, THREADS>(shared, a, row + i * step, i);
    else
        norm_fetch<E, W, CHUNKS, THREADS>(next, a, row);
#pragma unroll
    for (int k = 0; k < CHUNKS; k++)
        if (norm_column<W, THREADS>(k) < C)
            load_raw(gamma[k], (const E *)a.gamma + norm_column<W, THREADS>(k));
    struct dropout_key mask = dropout_key(a.drop);
    for (int turn = 0; row < a.q.rows; row += step, turn++) {
        int slot = turn % NORM_AHEAD;
        if (turn % 32 == 0)
            rows = norm_look_up(a, row + threadIdx.x % 32 * step);
        struct norm_row of = norm_row_of(rows, turn % 32);
        if constexpr (RING) {
            norm_take<E, W>(now, shared, slot);
        } else {
            now = next;
            norm_fetch<E, W, CHUNKS, THREADS>(next, a, row + step);
        }
        if (of.position < 0) {
            norm_zero_row<E, W, CHUNKS, THREADS>(a, a.dx, a.dy, NULL, row);
            if constexpr (RING)
                norm_ask<E, W, THREADS>(shared, a, row + NORM_AHEAD * step, slot);
            group_turn<WARPS, GROUPS>();
            continue;
        }
        uint64_t first = (uint64_t)of.position * (uint64_t)C;
        float g[W], n[W], weight[W], mean_g = 0.0f, mean_gn = 0.0f;
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
            int64_t c = norm_column<W, THREADS>(k);
            if (c >= C)
                break;
            norm_terms<E, W, CHUNKS, EMBEDDING>(g, n, weight, now, gamma[k], k, of, mask,
                                                first + (uint64_t)c);
#pragma unroll
            for (int i = 0; i < W; i++) {
                float weighted = g[i] * weight[i];
                sum[0][k][i] += g[i] * n[i];
                sum[1][k][i] += g[i];
                mean_g += weighted;
                mean_gn += weighted * n[i];
            }
        }
        group_sums<WARPS, GROUPS>(mean_g, mean_gn, parity);
        parity ^= 1;
        /* The sums needed the packs, so they have been read and their slot is free. */
        if constexpr (RING)
            norm_ask<E, W, THREADS>(shared, a, row + NORM_AHEAD * step, slot);
        mean_g *= share * of.inverse;
        mean_gn *= share * of.inverse;
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
            int64_t c = norm_column<W, THREADS>(k);
            if (c >= C)
                break;
            norm_terms<E, W, CHUNKS, EMBEDDING>(g, n, weight, now, gamma[k], k, of, mask,
                                                first + (uint64_t)c);
#pragma unroll
            for (int i = 0; i < W; i++)
                g[i] = g[i] * weight[i] * of.inverse - (n[i] * mean_gn + mean_g);
            store_pack<E, W>((E *)a.dx + row * C + c, g);
            if constexpr (!EMBEDDING) {
                struct dropout_key key = mask;
                forget(key);
                dropout_apply<W>(g, key, of.sample, first + (uint64_t)c);
                store_pack<E, W>((E *)a.dy + row * C + c, g);
#pragma unroll
                for (int i = 0; i < W; i++)
                    sum[2][k][i] += g[i];
            }
        }
    }
    if (row - threadIdx.x / THREADS < a.q.rows) /* the first group had a row more */
        group_turn<WARPS, GROUPS>();
    norm_partial<E, W, CHUNKS, WARPS, SETS>(partial + blockIdx.x * SETS * C, shared, sum, C);
}

/* Row p of the position table: the rows at position p of all sequences, in their order. */
template <typename E, int W>
__global__ static void position_backward_kernel(float *dposition, const E *dx, struct sequences q,
                                                int64_t channels, bool add)
{
    constexpr int AT_ONCE = 8; /* sequences */
    int64_t p = blockIdx.x;
    kernel_begin();
    for (int64_t c = (int64_t)threadIdx.x * W; c < channels; c += (int64_t)blockDim.x * W) {
        float sum[W] = {0.0f};
        for (int first = 0; first < q.count; first += AT_ONCE) {
            struct raw_pack<E, W> raw[AT_ONCE];
            bool there[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                int b = min(first + k, q.count - 1);
                int64_t row = q.cu_seqlens[b] + p;
                there[k] = first + k < q.count && row < q.cu_seqlens[b + 1];
                if (there[k])
                    load_raw(raw[k], dx + row * channels + c);
            }
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                float v[W];
                if (!there[k])
                    continue;
                unpack(v, raw[k]);
#pragma unroll
                for (int i = 0; i < W; i++)
                    sum[i] += v[i];
            }
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
    int64_t parts = norm_parts<WARPS>(a->q.rows);
    float *partial = NULL;
    if (parts > 0) {
        TRY(columns_reserve(&partial, s, parts * sets.count * a->channels));
        TRY(launch_kernel(s, dim3((unsigned)parts), norm_block<WARPS>::THREADS,
                          norm_backward_kernel<E, W, CHUNKS, WARPS, EMBEDDING>, *a, partial));
    }
    return columns_finish(s, sets, partial, parts, a->channels, add);
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
        return launch_kernel(s, dim3(blocks), 128, position_backward_kernel<E, W>,
                             (float *)dposition.data, dx, *q, C, add);
    return launch_kernel(s, dim3(blocks), 128, position_backward_kernel<E, 1>,
                         (float *)dposition.data, dx, *q, C, add);
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
