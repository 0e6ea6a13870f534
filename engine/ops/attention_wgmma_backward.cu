/*
 * engine/ops/attention_wgmma_backward.cu - attention backward on Hopper's tensor cores.
 *
 * One kernel makes dQ, dK and dV, so that scores, probabilities and masks (which forward may have
 * left) are made once. A block has a head of a sequence, whole, and three warpgroups. It goes over
 * the keys in passes of up to three tiles of 64, one a warpgroup, which keeps dK and dV of its tile
 * in registers; in each pass all queries come by, 64 a step:
 *
 *     each warpgroup    S^T = K Q^T    dP^T = V dO^T    dV += mask(P)^T dO    dK += dS^T Q
 *     one of them       dQ = (dQ of the passes before) + dS K, over the keys of all three
 *
 * mask(P)^T and dS^T are left operands as they lie in registers; dS^T besides goes through shared
 * memory to the warpgroup that has the turn: one without keys if there is one, else each in turn.
 * It makes dQ in the next step, so a step has one barrier. Unfinished dQ stay in shared memory as
 * the threads hold them, those of sequences of more than PARTS_HERE tiles in the workspace. The
 * order of all sums is fixed.
 *
 * dS is made without the factor 1 / (1 - p), which dQ and dK get at the end, so that one masked P
 * serves all; with stats = (lse log2(e), delta (1 - p)) of a query:
 *
 *     dS (1 - p) = mask(P) dP - P (delta (1 - p))
 *
 * Rows past the end of a sequence are zeros in shared memory, with stats 0: their P is 1 and all
 * that it is multiplied with 0. Keys past the end weigh nothing.
 *
 * The block also adds up all rows of dQ, dK and dV, before they are rounded: its part of the bias
 * gradient.
 *
 * Blocks are long, so the longest sequences come first.
 *
 * Operations: 10 n m D a head. Bytes: everything once, queries and dO once a pass.
 *
 * Source: Dao, FlashAttention-2, arXiv:2307.08691, algorithm 2.
 */
#include "engine/ops/attention_wgmma_block.cuh"

#ifdef WGMMA_CODE

/* Where the masks of dropout come from. */
enum masks { NOTHING_DROPPED, MASKS_MADE, MASKS_KEPT };

/* ---- steps ----------------------------------------------------------------------------------- */

/* Keys of this warp from @keys on weigh nothing. */
__device__ static inline void mask_rows(float (&s)[TILE_SETS][4], int keys)
{
    int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; half++)
        if (g + 8 * half >= keys)
#pragma unroll
            for (int n = 0; n < TILE_SETS; n++)
                s[n][2 * half] = s[n][2 * half + 1] = -INFINITY;
}

/* Stats of this lane's queries of accumulators 2 k and 2 k + 1, two queries each. */
struct query_pairs {
    float4 of[2];
};

__device__ static inline struct query_pairs query_pairs(const float2 *stats, int k)
{
    const float4 *at = (const float4 *)(stats + 16 * k + threadIdx.x % 4 * 2);
    struct query_pairs x = {{at[0], at[4]}};
    return x;
}

/* mask(P)^T and dS^T of 16 queries, accumulators 2 k and 2 k + 1, as left operands. */
template <bool DROP>
__device__ inline void key_step(uint32_t (&masked)[4], uint32_t (&gradient)[4],
                                const float (&s)[TILE_SETS][4], const float (&dp)[TILE_SETS][4],
                                int k, const struct query_pairs &stats, uint32_t bits, float scale)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int n = 2 * k + i;
        float4 x = stats.of[i];
        float lse[2] = {x.x, x.z}, delta[2] = {x.y, x.w}, p[4], m[4], d[4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            p[r] = exp2_fast(fmaf(s[n][r], scale, -lse[r % 2]));
            m[r] = DROP && !(bits & 1u << (r / 2 * 16 + r % 2 * 8 + n)) ? 0.0f : p[r];
            d[r] = fmaf(m[r], dp[n][r], -(p[r] * delta[r % 2]));
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            masked[2 * i + half] = pair(m[2 * half], m[2 * half + 1]);
            gradient[2 * i + half] = pair(d[2 * half], d[2 * half + 1]);
        }
    }
}

/*
 * A warpgroup's keys and a tile of queries: dK and dV, whose products are under way at the end,
 * and dS^T. S^T and dP^T are there, and the first of the stats.
 */
template <int D, bool DROP>
__device__ inline void keys_step(float (&dk)[D / 8][4], float (&dv)[D / 8][4], bf16 *gradients,
                                 const float (&s)[TILE_SETS][4], const float (&dp)[TILE_SETS][4],
                                 const bf16 *queries, const bf16 *douts, const float2 *stats,
                                 struct query_pairs ahead, uint32_t bits, float scale)
{
    constexpr uint64_t STEP_16 = 16 * D * sizeof(bf16) / 16;
    uint64_t q = tile_descriptor<D>(queries, 0, 0), o = tile_descriptor<D>(douts, 0, 0);
    uint32_t place = lane_places<TILE>().tall, row = threadIdx.x % MMA_THREADS / 32 * 16;
    uint32_t masked[TILE / 16][4], gradient[TILE / 16][4];
#pragma unroll
    for (int k = 0; k < TILE / 16; k++) {
        key_step<DROP>(masked[k], gradient[k], s, dp, k, ahead, bits, scale);
        if (k + 1 < TILE / 16)
            ahead = query_pairs(stats, k + 1);
        store_matrices(place_at<TILE>(gradients, place, (int)row, k * 16), gradient[k]);
        products_begin();
        product_down(dv, masked[k], o + k * STEP_16);
        product_down(dk, gradient[k], q + k * STEP_16);
    }
    products_end();
}

/* Begin S^T and dP^T. */
template <int D>
__device__ inline void scores_begin(float (&s)[TILE_SETS][4], float (&dp)[TILE_SETS][4],
                                    const bf16 *keys, const bf16 *values, const bf16 *queries,
                                    const bf16 *douts)
{
    products_begin();
    tiles_along<D>(s, keys, queries);
    tiles_along<D>(dp, values, douts);
    products_end();
}

/* Barrier of one warpgroup; all pass theirs equally often, see cuda_common.cuh. */
__device__ static inline void group_barrier(int group)
{
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"((int)MMA_THREADS) : "memory");
}

/* A warpgroup's turn: dQ of tile @i over the @count key tiles of a pass; @gradients: their dS^T. */
struct turn {
    bf16 *gradients;
    int i, count;
    bool first, last; /* pass */
};

/* Begin its products. */
template <int D>
__device__ inline void turn_begin(float (&dq)[D / 8][4], const struct backward_memory &m,
                                  const struct backward_head &y, const struct turn &t)
{
    using shape = backward_shape<D>;
    constexpr uint64_t STEP_16 = 16 * D * sizeof(bf16) / 16, GRADIENT_16 = 16 * TILE * 2 / 16;
    const float4 *part = y.parts + t.i * shape::PART + threadIdx.x % MMA_THREADS;
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        float4 x = t.first ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : part[n * MMA_THREADS];
        dq[n][0] = x.x, dq[n][1] = x.y, dq[n][2] = x.z, dq[n][3] = x.w;
    }
    products_begin();
#pragma unroll 1
    for (int g = 0; g < t.count; g++) {
        uint64_t left = tile_descriptor<TILE>(t.gradients + g * shape::GRADIENTS, 0, 0);
        uint64_t right = tile_descriptor<D>(m.keys + g * shape::ROWS, 0, 0);
#pragma unroll
        for (uint64_t k = 0; k < TILE / 16; k++)
            product_across(dq, left + k * GRADIENT_16, right + k * STEP_16);
    }
    products_end();
}

/* Wait for them; keep the sum, or lay the rows where turn_copy() finds them. */
template <int D>
__device__ inline void turn_end(float (&dq)[D / 8][4], const struct backward_head &y,
                                const struct turn &t, float factor)
{
    int row = t.i * TILE + threadIdx.x % MMA_THREADS / 32 * 16;
    float4 *part = y.parts + t.i * backward_shape<D>::PART + threadIdx.x % MMA_THREADS;
    products_wait<0>();
    hold(dq);
    if (t.last) {
        sums_leave<D>(part, MMA_THREADS, dq); /* in the places of the sum, which has been read */
        group_barrier(y.group);               /* all warps have read dS */
        rows_stage<D>(t.gradients, dq, row, y.x.rows, factor, factor);
        return;
    }
#pragma unroll
    for (int n = 0; n < D / 8; n++)
        part[n * MMA_THREADS] = make_float4(dq[n][0], dq[n][1], dq[n][2], dq[n][3]);
}

template <int D>
__device__ inline void turn_copy(const struct backward_head &y, const struct turn &t)
{
    if (t.last)
        rows_copy<D>(y.dqueries, 3 * y.channels, t.gradients,
                     t.i * TILE + threadIdx.x % MMA_THREADS / 32 * 16, y.x.rows);
}

/* All gradients of a head of a sequence with keys. */
template <int D, enum masks MASKS>
__device__ inline void head_backward(const struct backward_memory &m, const struct backward_head &y,
                                     const struct keep_start &keep, const uint32_t *masks,
                                     float factor, const struct attention_args &a)
{
    constexpr bool DROP = MASKS != NOTHING_DROPPED;
    using shape = backward_shape<D>;
    struct tile_copy<D, ROWS_IN_ORDER> copy = tile_copy_make<D, ROWS_IN_ORDER>();
    int lane = threadIdx.x % 32, warp = threadIdx.x % MMA_THREADS / 32;
    int passes = (y.key_tiles + GROUPS - 1) / GROUPS, share = (y.key_tiles + passes - 1) / passes;
    uint32_t row_groups = (uint32_t)a.q.positions / 8, bits = 0, later = 0;
    int row_words = TILE / 4 * (int)a.keep_pitch; /* of the masks of a tile of queries */
    int stage = 0;
    bool makes_stats = y.group == GROUPS - 1;
    bf16 *keys = m.keys + y.group * shape::ROWS, *values = m.values + y.group * shape::ROWS;
    struct query_stream stream = query_stream<D>(copy, y);
    float lse = queries_load<D>(stream, copy, m, y, 0, 0, true);
    for (int pass = 0, first = 0; pass < passes; pass++, first += share) {
        int count = y.key_tiles - first < share ? y.key_tiles - first : share;
        int j0 = (first + y.group) * TILE + warp * 16; /* of this warp */
        uint32_t group = keep_group(y.x, a.q.positions, lane / 4 * 8 + lane % 4 * 2, j0);
        bool mine = y.group < count, last = pass == passes - 1;
        float dk[D / 8][4] = {}, dv[D / 8][4] = {};
        if (mine)
            keys_load<D>(copy, keys, values, y, (first + y.group) * TILE);
        copies_commit();
        const uint32_t *words = masks + (first + y.group) * (MASK_BYTES / 4);
        if (MASKS == MASKS_MADE)
            bits = keep_bits(keep, group, row_groups);
        if (MASKS == MASKS_KEPT)
            bits = bits_transposed(mine ? *words : 0);
        copies_wait<0>();
        if (makes_stats && pass == 0)
            stats_make<D>(copy, m, y, 0, stage, lse);
        async_fence();
        __syncthreads(); /* keys, values and the first queries are here */
#pragma unroll 1
        for (int i = 0;; i++) {
            int next = i + 1 < y.tiles ? i + 1 : 0;
            bool more = i < y.tiles && (next > 0 || !last);
            bool makes = more && (!y.here || (pass == 0 && next > 0));
            bool turn = i > 0 && y.group == (count < GROUPS ? GROUPS - 1 : (i - 1) % GROUPS);
            struct turn t = {m.gradients + (i - 1) % 2 * GROUPS * shape::GRADIENTS, i - 1, count,
                             pass == 0, last};
            if (more)
                lse = queries_load<D>(stream, copy, m, y, next, stage ^ 1, makes);
            if (turn) {
                float dq[D / 8][4];
                turn_begin<D>(dq, m, y, t);
                turn_end<D>(dq, y, t, factor);
            } else if (last && i > 0) {
                group_barrier(y.group); /* as often as the one that has the turn */
            }
            if (i == y.tiles) {
                if (turn)
                    turn_copy<D>(y, t);
                break;
            }
            if (mine) {
                const bf16 *queries = m.stages + stage * shape::STAGE;
                const bf16 *douts = queries + shape::ROWS;
                const float2 *stats = m.stats + query_slot(y, i, stage) * TILE;
                bf16 *gradients = m.gradients + (i % 2 * GROUPS + y.group) * shape::GRADIENTS;
                float s[TILE_SETS][4], dp[TILE_SETS][4];
                if (MASKS == MASKS_KEPT && i + 1 < y.tiles)
                    later = words[(i + 1) * row_words];
                scores_begin<D>(s, dp, keys, values, queries, douts);
                if (turn)
                    turn_copy<D>(y, t);
                struct query_pairs ahead = query_pairs(stats, 0);
                products_wait<0>();
                hold(s);
                hold(dp);
                if (j0 + 16 > y.x.keys)
                    mask_rows(s, y.x.keys - j0);
                keys_step<D, DROP>(dk, dv, gradients, s, dp, queries, douts, stats, ahead, bits,
                                   y.scale);
                /* Under the products: registers are free now. */
                if (MASKS == MASKS_MADE && i + 1 < y.tiles)
                    bits =
                        keep_bits(keep, group + (uint32_t)(i + 1) * TILE * row_groups, row_groups);
                if (MASKS == MASKS_KEPT)
                    bits = bits_transposed(later);
                products_wait<0>();
                hold(dk);
                hold(dv);
            } else if (turn) {
                turn_copy<D>(y, t);
            }
            copies_wait<0>();
            if (makes_stats && makes)
                stats_make<D>(copy, m, y, next, stage ^ 1, lse);
            async_fence();
            __syncthreads(); /* dS and the next queries are here; these have been read */
            stage ^= 1;
        }
        bf16 *left = m.gradients + y.tiles % 2 * GROUPS * shape::GRADIENTS;
        if (mine) { /* through dS of the tile before, which has been read */
            bf16 *to = y.dqueries + y.channels;
            bf16 *tile = left + y.group * shape::GRADIENTS;
            rows_stage<D>(tile, dk, j0, y.x.keys, factor, factor);
            rows_copy<D>(to, 3 * y.channels, tile, j0, y.x.rows);
            __syncwarp();
            rows_stage<D>(tile, dv, j0, y.x.keys, y.kept, y.kept);
            rows_copy<D>(to + y.channels, 3 * y.channels, tile, j0, y.x.rows);
            __syncwarp();
            sums_leave<D>(sums_place<D>(tile), 32, dk);
            sums_leave<D>(sums_place<D>(values), 32, dv); /* which all have read */
        }
        __syncthreads(); /* keys have been read, sums are there */
        if (a.sums)
            sums_add<D>(a, y, left, m.values, count, pass == 0, last, factor);
        __syncthreads(); /* sums have been read; were it for some passes only, ptxas would wait for
                            each product (C7520) */
    }
}

/* Zeros in part @part (0: queries) of the rows from @row on. */
template <int D> __device__ inline void rows_zero(const struct backward_head &y, int part, int row)
{
    constexpr int CHUNKS = D / 8;
    bf16 *to = y.dqueries + part * y.channels + threadIdx.x % CHUNKS * 8;
#pragma unroll 1
    for (int i = row + threadIdx.x / CHUNKS; i < y.x.rows; i += BACKWARD_THREADS / CHUNKS)
        *(uint4 *)(to + (int64_t)i * 3 * y.channels) = make_uint4(0, 0, 0, 0);
}

#endif

template <int D>
__global__ static void __launch_bounds__(BACKWARD_THREADS, 1)
    wgmma_backward_kernel(struct attention_args a)
{
#ifdef WGMMA_CODE
    extern __shared__ __align__(1024) bf16 shared[];
    struct backward_memory m = backward_memory<D>(shared);
    int h = blockIdx.y, slice = blockIdx.z;
    if (slice == a.q.count) {
        for (int part = 0; part < 3; part++)
            attention_zero_rows(a, (bf16 *)a.dqkv, attention_column(a, part, h), 3 * a.channels,
                                NULL, h);
        return;
    }
    int b = attention_sequence(a, slice);
    struct dropout_key key = dropout_key(a.drop);
    struct attention_head x = attention_head(a, b, h);
    x.rows = (int)uniform((uint32_t)x.rows);
    x.keys = (int)uniform((uint32_t)x.keys);
    if (a.sums && (x.rows == 0 || x.keys == 0) && threadIdx.x < 3 * D)
        sums_row<D>(a)[threadIdx.x / D * a.channels + threadIdx.x % D] = 0.0f;
    if (x.rows == 0)
        return;
    struct backward_head y = backward_head<D>(m, a, x, h, b);
    struct keep_start keep = keep_start(key, x.sample);
    y.kept = key.on ? key.scale : 1.0f;
    y.unkept = 1.0f / y.kept;
    if (x.keys == 0)
        rows_zero<D>(y, 0, 0);
    for (int part = 1; part < 3; part++)
        rows_zero<D>(y, part, y.key_tiles * TILE);
    if (x.keys == 0)
        return;
    const uint32_t *masks = (const uint32_t *)mask_tiles(a, x, h, b, 0) + threadIdx.x % MMA_THREADS;
    if (!keep.on)
        head_backward<D, NOTHING_DROPPED>(m, y, keep, masks, a.scale * y.kept, a);
    else if (a.drop.masks == NULL)
        head_backward<D, MASKS_MADE>(m, y, keep, masks, a.scale * y.kept, a);
    else
        head_backward<D, MASKS_KEPT>(m, y, keep, masks, a.scale * y.kept, a);
#endif
}

/* ---- launchers ------------------------------------------------------------------------------- */

template <int D> static enum status backward_open(void)
{
    return CUDA(cudaFuncSetAttribute(wgmma_backward_kernel<D>,
                                     cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     backward_shape<D>::BYTES));
}

enum status attention_wgmma_backward_open(void)
{
    TRY(backward_open<32>());
    return backward_open<64>();
}

template <int D> static enum status backward(struct stream *s, const struct attention_args *a)
{
    dim3 grid(1, (unsigned)a->heads, (unsigned)a->q.count + 1);
    wgmma_backward_kernel<D>
        <<<grid, BACKWARD_THREADS, backward_shape<D>::BYTES, stream_cuda(s)>>>(*a);
    return CUDA(cudaGetLastError());
}

enum status attention_wgmma_backward(struct stream *s, const struct attention_args *a)
{
    return a->width == 32 ? backward<32>(s, a) : backward<64>(s, a);
}
