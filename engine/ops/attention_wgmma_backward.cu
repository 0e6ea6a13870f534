/*
 * engine/ops/attention_wgmma_backward.cu - attention backward on Hopper's tensor cores.
 *
 * The two kernels of attention_mma_backward.cu with a warpgroup's products (attention_wgmma.cuh):
 *
 *   dQ       64 queries a block: S = Q K^T, dP = dO V^T, dS, dQ += dS K
 *   dK, dV   64 keys a block: S^T = K Q^T, dP^T = V dO^T, dV += mask(P)^T dO, dK += dS^T Q
 *
 * The first leaves in the workspace what the second needs:
 *
 *     stats (H, T) float2           lse * log2(e), delta
 *     keep  (H, slots, keys) uint64 bit i: this key is kept by query i of the 64 of a slot, where
 *                                   dropout is on; see keep_slot(); keys = 8 keep_pitch
 *
 * dS is made without the factor 1 / (1 - p), which dQ and dK get at the end, so that one masked P
 * serves all:
 *
 *     dS (1 - p) = mask(P) dP - P (delta (1 - p))
 *
 * Rows past the end of a sequence are zeros in shared memory, with lse and delta 0: their P is 1
 * and all that it is multiplied with 0.
 *
 * Operations: 14 n m D a head.
 *
 * Source: Dao, FlashAttention-2, arXiv:2307.08691, algorithm 2.
 */
#include "engine/ops/attention_wgmma.cuh"

#ifdef WGMMA_CODE

/* dS of a masked and a whole probability; @delta times 1 - p. */
__device__ static inline float score_gradient(float masked, float p, float dp, float delta)
{
    return fmaf(masked, dp, -(p * delta));
}

#endif

/* ---- dQ -------------------------------------------------------------------------------------- */

template <int D> struct dq_shape {
    enum { BLOCKS = 3, STAGE = 2 * TILE * D /* elements */ };
    enum { TILES = tile_bytes(TILE * (2 + 2 * STAGES), D) };
    enum { BYTES = TILES + TILE * (int)sizeof(float2) };
};

#ifdef WGMMA_CODE

/*
 * lse in powers of two and delta = dout . out of the block's rows, to @stats in shared memory and
 * to the workspace. Two threads a row.
 */
template <int D>
__device__ inline void query_stats(float2 *stats, const struct attention_args &a,
                                   const struct attention_head &x, int h, int i0, const bf16 *douts,
                                   const bf16 *outs)
{
    constexpr int CHUNKS = D / 16;
    int row = threadIdx.x / 2, part = threadIdx.x % 2;
    int64_t at = h * a.q.rows + x.first + i0 + row;
    bool real = i0 + row < x.rows;
    float delta = 0.0f, lse = real ? a.lse[at] * LOG2_E : 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        int place = tile_at<D>(row, part * CHUNKS + c);
        uint4 y = *(const uint4 *)(outs + place), d = *(const uint4 *)(douts + place);
        const uint32_t left[4] = {y.x, y.y, y.z, y.w}, right[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float2 u = unpair(left[k]), v = unpair(right[k]);
            delta += u.x * v.x + u.y * v.y;
        }
    }
    delta += __shfl_xor_sync(0xFFFFFFFFu, delta, 1);
    if (part == 0) {
        stats[row] = make_float2(lse, delta);
        if (real)
            a.stats[at] = make_float2(lse, delta);
    }
}

/* What a lane keeps of its rows g and g + 8. */
struct query_rows {
    float lse[2], delta[2]; /* lse in powers of two, delta times 1 - p */
};

/*
 * Where the keep bits of 64 queries from @i0 on begin. Sequence b has ceil(rows / 64) slots from
 * first / 64 + b on, which is before those of the next one.
 */
__device__ static inline uint64_t *keep_slot(const struct attention_args &a,
                                             const struct attention_head &x, int h, int b, int i0)
{
    int64_t slot = h * a.keep_slots + x.first / TILE + i0 / TILE + b;
    return (uint64_t *)a.keep + slot * a.keep_pitch * 8;
}

/*
 * Bits of 8 x 8, a row in each of the lanes of one t, transposed; four such matrices in the bytes
 * of @x. In three exchanges a lane gets the half of its bits that the other one has.
 */
__device__ static inline uint32_t bits_transposed(uint32_t x)
{
    int g = threadIdx.x % 32 / 4;
    const uint32_t stay[3] = {0x55555555u, 0x33333333u, 0x0F0F0F0Fu};
#pragma unroll
    for (int k = 0; k < 3; k++) {
        int step = 1 << k;
        uint32_t mine = g & step ? ~stay[k] : stay[k];
        uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, x, 4 * step);
        uint32_t moved = __funnelshift_l(other, other, g & step ? 32 - step : step);
        x = (x & mine) | (moved & ~mine);
    }
    return x;
}

/* A tile's keep bits of this warp's queries, by key: @keep is those of its first key. */
__device__ static inline void
keep_store(uint64_t *keep, const struct philox (&words)[2][TILE_SETS / 4], uint32_t threshold)
{
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, key = lane % 4 * 8 + lane / 4;
    uint32_t bits[2] = {0,
                        0}; /* of rows g and g + 8: even keys in the lower half, odd ones above */
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int n = 0; n < TILE_SETS; n++)
            bits[half] |= keep_mask(words[half][n / 4].word[n % 4], threshold) & 0x20001u << 2 * n;
    uint32_t x = ((bits[0] | bits[0] >> 16) & 0xFFFFu) | ((bits[1] | bits[1] << 16) & 0xFFFF0000u);
    x = __byte_perm(bits_transposed(x), 0, 0x3120); /* keys 8 t + g, and 32 on */
    ((uint16_t *)(keep + key))[warp] = (uint16_t)x;
    ((uint16_t *)(keep + key + 32))[warp] = (uint16_t)(x >> 16);
}

/* Scores and dP to dS, as left operands. */
template <bool DROP>
__device__ inline void query_step(uint32_t (&left)[TILE / 16][4], const float (&s)[TILE_SETS][4],
                                  const float (&dp)[TILE_SETS][4], const struct query_rows &q,
                                  const struct philox (&words)[2][TILE_SETS / 4],
                                  uint32_t threshold, float scale)
{
#pragma unroll
    for (int n = 0; n < TILE_SETS; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float p0 = exp2_fast(fmaf(s[n][2 * half], scale, -q.lse[half]));
            float p1 = exp2_fast(fmaf(s[n][2 * half + 1], scale, -q.lse[half]));
            float m0 = p0, m1 = p1;
            if (DROP)
                keep_pair(m0, m1, words[half][n / 4].word[n % 4], threshold);
            left[n / 2][n % 2 * 2 + half] =
                pair(score_gradient(m0, p0, dp[n][2 * half], q.delta[half]),
                     score_gradient(m1, p1, dp[n][2 * half + 1], q.delta[half]));
        }
}

/* dQ of the block's queries, without its factor. The first key stages are on their way. */
template <int D, bool DROP>
__device__ inline void
dq_tiles(float (&dq)[D / 8][4], const struct query_rows &rows, const struct keep_start &keep,
         const struct tile_copy<D, ROWS_AS_KEYS> &key_copy, const bf16 *queries, const bf16 *douts,
         bf16 *stages, const struct attention_args &a, const struct attention_head &x, int h, int b,
         int i0, float scale)
{
    constexpr int STAGE = dq_shape<D>::STAGE;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64_t stride = 3 * a.channels;
    const bf16 *k = (const bf16 *)a.qkv + x.first * stride + attention_column(a, 1, h);
    const bf16 *v = k + a.channels;
    uint32_t group = keep_group(x, a.q.positions, i0 + warp * 16 + lane / 4, 0) + lane % 4;
    uint64_t *bits = keep_slot(a, x, h, b, i0);
    for (int tile = 0, j0 = 0; j0 < x.keys; tile++, j0 += TILE) {
        const bf16 *keys = stages + tile % STAGES * STAGE, *values = keys + TILE * D;
        copies_wait<STAGES - 2>();
        async_fence();
        __syncthreads(); /* this stage is here, and nobody reads the one that is loaded next */
        float s[TILE_SETS][4], dp[TILE_SETS][4];
        uint32_t left[TILE / 16][4];
        struct philox words[2][TILE_SETS / 4];
        products_begin();
        tiles_along<D>(s, queries, keys);
        tiles_along<D>(dp, douts, values);
        products_end();
        key_stage_load<D>(key_copy, stages + (tile + STAGES - 1) % STAGES * STAGE, k, v, stride,
                          j0 + (STAGES - 1) * TILE, x.keys);
        if (DROP) {
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int part = 0; part < TILE_SETS / 4; part++)
                    words[half][part] = keep_words(keep, group + (uint32_t)j0 / 8 + part * 4 +
                                                             half * (uint32_t)a.q.positions);
            keep_store(bits + j0, words, keep.threshold);
        }
        products_wait<0>();
        hold(s);
        hold(dp);
        if (j0 + TILE > x.keys)
            mask_tail<TILE_SETS>(s, x.keys - j0);
        query_step<DROP>(left, s, dp, rows, words, keep.threshold, scale);
        products_begin();
        tiles_down<D>(dq, left, keys);
        products_end();
        products_wait<0>();
        hold(dq);
    }
}

#endif

template <int D>
__global__ static void __launch_bounds__(MMA_THREADS, dq_shape<D>::BLOCKS)
    wgmma_dq_kernel(struct attention_args a)
{
#ifdef WGMMA_CODE
    constexpr int STAGE = dq_shape<D>::STAGE;
    extern __shared__ __align__(1024) bf16 shared[];
    bf16 *queries = shared, *douts = queries + TILE * D, *stages = douts + TILE * D;
    bf16 *outs = stages + (STAGES - 1) * STAGE; /* in the last stage, until that is loaded */
    float2 *stats = (float2 *)(stages + STAGES * STAGE);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, h = blockIdx.y, b = blockIdx.z;
    int i0 = blockIdx.x * TILE, row = i0 + warp * 16;
    int64_t stride = 3 * a.channels;
    bf16 *dqkv = (bf16 *)a.dqkv;
    if (b == a.q.count) {
        attention_zero_rows(a, dqkv, attention_column(a, 0, h), stride, NULL, h);
        return;
    }
    struct attention_head x = attention_head(a, b, h);
    if (i0 >= x.rows)
        return;
    const bf16 *base = (const bf16 *)a.qkv + x.first * stride;
    const bf16 *k = base + attention_column(a, 1, h), *v = base + attention_column(a, 2, h);
    int64_t from = (x.first + i0) * a.channels + attention_column(a, 0, h);
    struct tile_copy<D, ROWS_AS_KEYS> key_copy = tile_copy_make<D, ROWS_AS_KEYS>();
    struct tile_copy<D, ROWS_IN_ORDER> row_copy = tile_copy_make<D, ROWS_IN_ORDER>();
    tile_load(row_copy, queries, base + i0 * stride + attention_column(a, 0, h), stride,
              x.rows - i0);
    tile_load(row_copy, douts, (const bf16 *)a.dout + from, a.channels, x.rows - i0);
    tile_load(row_copy, outs, (const bf16 *)a.out + from, a.channels, x.rows - i0);
    copies_commit();
    for (int n = 0; n < STAGES - 1; n++)
        key_stage_load<D>(key_copy, stages + n * STAGE, k, v, stride, n * TILE, x.keys);
    struct dropout_key key = dropout_key(a.drop);
    struct keep_start keep = keep_start(key, x.sample);
    float dq[D / 8][4] = {}, scale = a.scale * LOG2_E, kept = key.on ? key.scale : 1.0f;
    copies_wait<STAGES - 1>();
    __syncthreads();
    query_stats<D>(stats, a, x, h, i0, douts, outs);
    __syncthreads();
    struct query_rows rows;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int i = warp * 16 + lane / 4 + 8 * half;
        rows.lse[half] = stats[i].x;
        rows.delta[half] = stats[i].y / kept;
    }
    if (keep.on)
        dq_tiles<D, true>(dq, rows, keep, key_copy, queries, douts, stages, a, x, h, b, i0, scale);
    else
        dq_tiles<D, false>(dq, rows, keep, key_copy, queries, douts, stages, a, x, h, b, i0, scale);
    __syncthreads(); /* the last products have read the queries */
    float factor = a.scale * kept;
    store_rows<D>(dqkv + x.first * stride + attention_column(a, 0, h), stride, queries, warp * 16,
                  dq, row, x.rows, x.rows, factor, factor);
#endif
}

/* ---- dK, dV ---------------------------------------------------------------------------------- */

template <int D> struct dkv_shape {
    enum { BLOCKS = 3 };
    enum { TILES = tile_bytes(2 * TILE, D), STAGE = TILES + 1024 /* stats and bits */ };
    enum { BYTES = TILES + STAGES * STAGE };
};

#ifdef WGMMA_CODE

/* A stage: 64 queries, their dout, stats, and keep bits of this tile's 64 keys. */
struct query_stage {
    bf16 *queries, *douts;
    float2 *stats;
    uint64_t *keep;
};

template <int D> __device__ inline struct query_stage query_stage(bf16 *shared, int stage)
{
    char *at = (char *)(shared + 2 * TILE * D) + stage * dkv_shape<D>::STAGE;
    struct query_stage x;
    x.queries = (bf16 *)at;
    x.douts = x.queries + TILE * D;
    x.stats = (float2 *)(x.douts + TILE * D);
    x.keep = (uint64_t *)(x.stats + TILE);
    return x;
}

/* Start to load queries i0 .. i0 + 63, with the bits of keys from @j0 on; nothing past the end, but
 * a group. */
template <int D, bool DROP>
__device__ inline void
query_stage_load(const struct tile_copy<D, ROWS_IN_ORDER> &row_copy, const struct query_stage &to,
                 const struct attention_args &a, const struct attention_head &x, int h, int b,
                 int i0, int j0)
{
    if (i0 < x.rows) {
        int64_t stride = 3 * a.channels, first = x.first + i0, column = attention_column(a, 0, h);
        tile_load(row_copy, to.queries, (const bf16 *)a.qkv + first * stride + column, stride,
                  x.rows - i0);
        tile_load(row_copy, to.douts, (const bf16 *)a.dout + first * a.channels + column,
                  a.channels, x.rows - i0);
        int i = threadIdx.x % TILE;
        bool real = i0 + i < x.rows;
        if (threadIdx.x < TILE)
            copy_8(to.stats + i, a.stats + h * a.q.rows + first + (real ? i : 0), real);
        else if (DROP && i < TILE / 2)
            copy_16(shared_address(to.keep + 2 * i), keep_slot(a, x, h, b, i0) + j0 + 2 * i);
    }
    copies_commit();
}

/* S^T and dP^T to mask(P)^T and dS^T, as left operands; @unkept: 1 - p. */
template <bool DROP>
__device__ inline void key_step(uint32_t (&masked)[TILE / 16][4],
                                uint32_t (&gradient)[TILE / 16][4], const float (&s)[TILE_SETS][4],
                                const float (&dp)[TILE_SETS][4], const struct query_stage &q,
                                float scale, float unkept)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp = threadIdx.x / 32;
    uint32_t bits[2][2]; /* [key g or g + 8][query / 32] from query 2 t on */
#pragma unroll
    for (int half = 0; half < 2 && DROP; half++) {
        uint2 x = *(const uint2 *)(q.keep + warp * 16 + half * 8 + g);
        bits[half][0] = x.x >> 2 * t;
        bits[half][1] = x.y >> 2 * t;
    }
#pragma unroll
    for (int n = 0; n < TILE_SETS; n++) {
        float4 stats = *(const float4 *)(q.stats + 8 * n + 2 * t); /* of two queries */
        float lse[2] = {stats.x, stats.z}, delta[2] = {stats.y * unkept, stats.w * unkept};
        float m[4], d[4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            float p = exp2_fast(fmaf(s[n][r], scale, -lse[r % 2]));
            m[r] = DROP && !(bits[r / 2][n / 4] & 1u << (n % 4 * 8 + r % 2)) ? 0.0f : p;
            d[r] = score_gradient(m[r], p, dp[n][r], delta[r % 2]);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            masked[n / 2][n % 2 * 2 + half] = pair(m[2 * half], m[2 * half + 1]);
            gradient[n / 2][n % 2 * 2 + half] = pair(d[2 * half], d[2 * half + 1]);
        }
    }
}

/* dK and dV of the block's keys, without their factors, over @queries of the sequence. */
template <int D, bool DROP>
__device__ inline void dkv_tiles(float (&dk)[D / 8][4], float (&dv)[D / 8][4], bf16 *shared,
                                 const struct attention_args &a, const struct attention_head &x,
                                 int h, int b, int j0, int queries, float scale, float unkept)
{
    bf16 *keys = shared, *values = shared + TILE * D;
    int64_t stride = 3 * a.channels;
    struct tile_copy<D, ROWS_IN_ORDER> row_copy = tile_copy_make<D, ROWS_IN_ORDER>();
    if (queries > 0) { /* keys and values come with the first group */
        const bf16 *base = (const bf16 *)a.qkv + (x.first + j0) * stride;
        tile_load(row_copy, keys, base + attention_column(a, 1, h), stride, x.keys - j0);
        tile_load(row_copy, values, base + attention_column(a, 2, h), stride, x.keys - j0);
        for (int n = 0; n < STAGES - 1; n++)
            query_stage_load<D, DROP>(row_copy, query_stage<D>(shared, n), a, x, h, b, n * TILE,
                                      j0);
    }
    for (int tile = 0, i0 = 0; i0 < queries; tile++, i0 += TILE) {
        struct query_stage now = query_stage<D>(shared, tile % STAGES);
        copies_wait<STAGES - 2>();
        async_fence();
        __syncthreads(); /* this stage is here, and nobody reads the one that is loaded next */
        float s[TILE_SETS][4], dp[TILE_SETS][4];
        uint32_t masked[TILE / 16][4], gradient[TILE / 16][4];
        products_begin();
        tiles_along<D>(s, keys, now.queries);
        tiles_along<D>(dp, values, now.douts);
        products_end();
        query_stage_load<D, DROP>(row_copy, query_stage<D>(shared, (tile + STAGES - 1) % STAGES), a,
                                  x, h, b, i0 + (STAGES - 1) * TILE, j0);
        products_wait<0>();
        hold(s);
        hold(dp);
        key_step<DROP>(masked, gradient, s, dp, now, scale, unkept);
        products_begin();
        tiles_down<D>(dv, masked, now.douts);
        tiles_down<D>(dk, gradient, now.queries);
        products_end();
        products_wait<0>();
        hold(dv);
        hold(dk);
    }
}

#endif

template <int D>
__global__ static void __launch_bounds__(MMA_THREADS, dkv_shape<D>::BLOCKS)
    wgmma_dkv_kernel(struct attention_args a)
{
#ifdef WGMMA_CODE
    extern __shared__ __align__(1024) bf16 shared[];
    bf16 *keys = shared, *values = shared + TILE * D;
    int warp = threadIdx.x / 32, h = blockIdx.y, b = blockIdx.z;
    int j0 = blockIdx.x * TILE, row = j0 + warp * 16;
    int64_t stride = 3 * a.channels;
    bf16 *dqkv = (bf16 *)a.dqkv;
    if (b == a.q.count) {
        attention_zero_rows(a, dqkv, attention_column(a, 1, h), stride, NULL, h);
        attention_zero_rows(a, dqkv, attention_column(a, 2, h), stride, NULL, h);
        return;
    }
    struct attention_head x = attention_head(a, b, h);
    if (j0 >= x.rows)
        return;
    struct dropout_key key = dropout_key(a.drop);
    bool on = key.on && key.threshold > 0;
    int queries = j0 < x.keys ? x.rows : 0; /* a tile without keys has no partners: zeros */
    float dk[D / 8][4] = {}, dv[D / 8][4] = {};
    float scale = a.scale * LOG2_E, kept = key.on ? key.scale : 1.0f, unkept = 1.0f / kept;
    if (on)
        dkv_tiles<D, true>(dk, dv, shared, a, x, h, b, j0, queries, scale, unkept);
    else
        dkv_tiles<D, false>(dk, dv, shared, a, x, h, b, j0, queries, scale, unkept);
    __syncthreads(); /* the last products have read keys and values */
    bf16 *to = dqkv + x.first * stride;
    store_rows<D>(to + attention_column(a, 1, h), stride, keys, warp * 16, dk, row, x.rows, x.keys,
                  a.scale * kept, a.scale * kept);
    store_rows<D>(to + attention_column(a, 2, h), stride, values, warp * 16, dv, row, x.rows,
                  x.keys, kept, kept);
#endif
}

/* ---- launchers ------------------------------------------------------------------------------- */

template <int D> static enum status backward_open(void)
{
    TRY(CUDA(cudaFuncSetAttribute(wgmma_dq_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  dq_shape<D>::BYTES)));
    return CUDA(cudaFuncSetAttribute(
        wgmma_dkv_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, dkv_shape<D>::BYTES));
}

enum status attention_wgmma_backward_open(void)
{
    TRY(backward_open<32>());
    return backward_open<64>();
}

template <int D> static enum status backward(struct stream *s, const struct attention_args *a)
{
    wgmma_dq_kernel<D>
        <<<attention_grid(a, TILE), MMA_THREADS, dq_shape<D>::BYTES, stream_cuda(s)>>>(*a);
    TRY(CUDA(cudaGetLastError()));
    wgmma_dkv_kernel<D>
        <<<attention_grid(a, TILE), MMA_THREADS, dkv_shape<D>::BYTES, stream_cuda(s)>>>(*a);
    return CUDA(cudaGetLastError());
}

enum status attention_wgmma_backward(struct stream *s, const struct attention_args *a)
{
    return a->width == 32 ? backward<32>(s, a) : backward<64>(s, a);
}
