/*
 * engine/ops/attention_mma_backward.cu - attention backward on tensor cores.
 *
 * Two kernels, so that every sum has one owner and one order:
 *
 *   dQ       a warp owns 16 queries: P from lse, dP = dO V^T, dS, dQ = dS K
 *   dK, dV   a warp owns 16 keys: S^T = K Q^T, dV = mask(P)^T dO, dK = dS^T Q
 *
 * Both compute S and dP, seven products where one kernel would need five; but that one would have
 * to add its parts of dQ across blocks, through memory: n / 64 fp32 copies of it.
 *
 * The first also has what the second needs of a query: delta = dout . out (the rows of dout are in
 * its registers), with lse in powers of two beside it, and the keep bits. In S^T a lane holds two
 * keys of eight queries, so Philox would be called four times as often or its results be handed
 * about; a bit an element in the workspace is cheaper:
 *
 *     stats (H, T) float2     lse * log2(e), delta
 *     keep  (H, T, pitch)     bit j % 8 of byte j / 8: key j is kept; pitch = max_length in whole
 *                             tiles of 64, over 8; written where dropout is on
 *
 * Partners come in tiles of 64 in two stages, as in forward. Rows past the end of a sequence are
 * zeros in shared memory, with lse and delta 0: their P is 1 and all that it is multiplied with 0.
 *
 * Operations: 14 n m D a head. Bound by shared memory and the tensor cores: a left operand of 16
 * rows needs an ldmatrix for every two products.
 *
 * Source: Dao, FlashAttention-2, arXiv:2307.08691, algorithm 2.
 */
#include "engine/ops/attention_mma.cuh"

/* ---- dQ -------------------------------------------------------------------------------------- */

template <int D> struct dq_shape {
    enum { BLOCKS = D == 128 ? 2 : 3 };
    enum { BYTES = tile_bytes(TILE * (2 + 2 * STAGES), D) };
};

/* What a lane keeps of its rows g and g + 8. */
struct query_rows {
    float lse[2], delta[2]; /* lse in powers of two */
    uint8_t *keep[2];       /* byte of keys 8 t on; NULL: a row past the end */
};

/* delta of the warp's rows, from dout in registers and out in a tile; both go to the workspace. */
template <int D>
__device__ inline struct query_rows
query_rows(const struct attention_args &a, const struct attention_head &x, int h, int row,
           const uint32_t (&left_d)[D / 16][4], const bf16 *outs, const struct lane_places &places)
{
    struct query_rows q;
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp = threadIdx.x / 32;
    float delta[2] = {0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t left[4];
        load_matrices(left, place_at<D>(outs, places.tall, warp * 16, k * 16));
#pragma unroll
        for (int r = 0; r < 4; r++) {
            float2 y = unpair(left[r]), d = unpair(left_d[k][r]);
            delta[r % 2] += y.x * d.x + y.y * d.y;
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int i = row + g + 8 * half;
        int64_t at = h * a.q.rows + x.first + i;
        bool real = i < x.rows;
        q.lse[half] = real ? a.lse[at] * LOG2_E : 0.0f;
        q.delta[half] = quad_sum(delta[half]);
        q.keep[half] = real ? a.keep + at * a.keep_pitch + t : NULL;
        if (real && t == 0)
            a.stats[at] = make_float2(q.lse[half], q.delta[half]);
    }
    return q;
}

/* Scores and dP to dS, of row g (half 0) or g + 8 and its eight keys with these keep bits. */
__device__ static inline void query_row_step(float (&s)[STEP / 8][4],
                                             const float (&dp)[STEP / 8][4], int half,
                                             const struct query_rows &q, float scale, float kept,
                                             uint32_t bits)
{
#pragma unroll
    for (int k = 0; k < 8; k++) {
        float &x = s[k / 2][2 * half + k % 2], delta = q.delta[half];
        float p = exp2_fast(fmaf(x, scale, -q.lse[half]));
        float d = fmaf(dp[k / 2][2 * half + k % 2], kept, -delta);
        x = p * (bits >> k & 1 ? d : -delta);
    }
}

/* The same of both rows; @first is the step's first key, @group that of row g. */
__device__ static inline void query_step(float (&s)[STEP / 8][4], const float (&dp)[STEP / 8][4],
                                         const struct query_rows &q, const struct keep_start &keep,
                                         float scale, float kept, uint32_t group, uint32_t rows_8,
                                         int first)
{
    if (!keep.on) {
        query_row_step(s, dp, 0, q, scale, kept, 0xFF);
        query_row_step(s, dp, 1, q, scale, kept, 0xFF);
        return;
    }
    struct philox r[2] = {keep_words(keep, group), keep_words(keep, group + rows_8)};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t bits = 0;
#pragma unroll
        for (int k = 0; k < 8; k++)
            bits |= keep_lane(keep, r[half], k / 2, k % 2) ? 1u << k : 0u;
        if (q.keep[half])
            q.keep[half][first / 8] = (uint8_t)bits;
        query_row_step(s, dp, half, q, scale, kept, bits);
    }
}

template <int D>
__global__ static void __launch_bounds__(MMA_THREADS, dq_shape<D>::BLOCKS)
    mma_dq_kernel(struct attention_args a)
{
    constexpr int STAGE = 2 * TILE * D;
    extern __shared__ __align__(128) bf16 shared[];
    bf16 *queries = shared, *douts = queries + TILE * D, *stages = douts + TILE * D;
    bf16 *outs = stages + (STAGES - 1) * STAGE; /* in the last stage, until that is loaded */
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
    uint32_t group = keep_group(x, a.q.positions, row + lane / 4, 0) + lane % 4;
    float dq[D / 8][4] = {}, scale = a.scale * LOG2_E, kept = key.on ? key.scale : 1.0f;
    struct lane_places at = lane_places<D>();
    copies_wait<STAGES - 1>();
    __syncthreads();
    uint32_t left_q[D / 16][4], left_d[D / 16][4];
    load_lefts<D>(left_q, queries, warp * 16, at);
    load_lefts<D>(left_d, douts, warp * 16, at);
    struct query_rows rows = query_rows<D>(a, x, h, row, left_d, outs, at);
    for (int tile = 0, j0 = 0; j0 < x.keys; tile++, j0 += TILE) {
        const bf16 *keys = stages + tile % STAGES * STAGE, *values = keys + TILE * D;
        copies_wait<STAGES - 2>();
        __syncthreads(); /* this stage is here, and nobody reads the one that is loaded next */
        key_stage_load<D>(key_copy, stages + (tile + STAGES - 1) % STAGES * STAGE, k, v, stride,
                          j0 + (STAGES - 1) * TILE, x.keys);
        int steps = row < x.rows ? min(TILE, x.keys - j0) : 0; /* a warp without rows only loads */
#pragma unroll 1
        for (int part = 0; part < steps; part += STEP) {
            float s[STEP / 8][4] = {}, dp[STEP / 8][4] = {};
            multiply_along<D>(s, left_q, keys, part, at);
            multiply_along<D>(dp, left_d, values, part, at);
            if (part + STEP > steps)
                mask_tail<STEP / 8>(s, steps - part);
            query_step(s, dp, rows, keep, scale, kept, group + (uint32_t)(j0 + part) / 8,
                       a.q.positions, j0 + part);
            multiply_down<D>(dq, s, keys, part, at);
        }
    }
    store_rows<D>(dqkv + x.first * stride + attention_column(a, 0, h), stride, queries, warp * 16,
                  dq, row, x.rows, x.rows, a.scale, a.scale);
}

/* ---- dK, dV ---------------------------------------------------------------------------------- */

template <int D> struct dkv_shape {
    enum { BLOCKS = D == 128 ? 2 : 3 };
    enum { STAGE = tile_bytes(2 * TILE, D) + TILE * 16 };
    enum { BYTES = tile_bytes(2 * TILE, D) + STAGES * STAGE };
};

/* A stage: 64 queries, their dout, stats, and keep bits of this tile's 64 keys. */
struct query_stage {
    bf16 *queries, *douts;
    float2 *stats;
    uint2 *keep;
};

template <int D> __device__ inline struct query_stage query_stage(bf16 *shared, int stage)
{
    char *at = (char *)(shared + 2 * TILE * D) + stage * dkv_shape<D>::STAGE;
    struct query_stage x;
    x.queries = (bf16 *)at;
    x.douts = x.queries + TILE * D;
    x.stats = (float2 *)(x.douts + TILE * D);
    x.keep = (uint2 *)(x.stats + TILE);
    return x;
}

/* Start to load queries i0 .. i0 + 63, with the bits of keys from @j0 on where dropout is @on;
 * nothing past the end, but a group. */
template <int D>
__device__ inline void
query_stage_load(const struct tile_copy<D, ROWS_IN_ORDER> &row_copy, const struct query_stage &to,
                 const struct attention_args &a, const struct attention_head &x, int h, int i0,
                 int j0, bool on)
{
    if (i0 < x.rows) {
        int64_t stride = 3 * a.channels, first = x.first + i0, column = attention_column(a, 0, h);
        tile_load(row_copy, to.queries, (const bf16 *)a.qkv + first * stride + column, stride,
                  x.rows - i0);
        tile_load(row_copy, to.douts, (const bf16 *)a.dout + first * a.channels + column,
                  a.channels, x.rows - i0);
        int i = threadIdx.x % TILE;
        bool real = i0 + i < x.rows;
        int64_t at = h * a.q.rows + first + (real ? i : 0);
        if (threadIdx.x < TILE)
            copy_8(to.stats + i, a.stats + at, real);
        else if (on)
            copy_8(to.keep + i, a.keep + at * a.keep_pitch + j0 / 8, real);
    }
    copies_commit();
}

/* multiply_along() with the left operand from a tile: the sums of dK, dV fill the registers. */
template <int D, int N>
__device__ inline void multiply_tiles(float (&c)[N][4], const bf16 *left_tile, int left_row,
                                      const bf16 *tile, int row, const struct lane_places &at)
{
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t left[4];
        load_matrices(left, place_at<D>(left_tile, at.tall, left_row, k * 16));
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t r[4];
            load_matrices(r, place_at<D>(tile, at.wide, row + n * 8, k * 16));
            mma(c[n], left, r[0], r[1]);
            mma(c[n + 1], left, r[2], r[3]);
        }
    }
}

/* S^T and dP^T of 16 keys and 32 queries to mask(P)^T, in @s, and dS^T, in @dp. */
__device__ static inline void key_step(float (&s)[STEP / 8][4], float (&dp)[STEP / 8][4],
                                       const struct query_stage &q, int part, bool on, float scale,
                                       float kept)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp = threadIdx.x / 32;
#pragma unroll
    for (int n = 0; n < STEP / 8; n++) {
        int i = part + 8 * n + 2 * t; /* and i + 1 */
        float4 stats = *(const float4 *)(q.stats + i);
        uint32_t bits[2] = {0xFFFF, 0xFFFF}; /* of keys g .. of this warp */
        if (on) {
            bits[0] = ((const uint16_t *)(q.keep + i))[warp] >> g;
            bits[1] = ((const uint16_t *)(q.keep + i + 1))[warp] >> g;
        }
#pragma unroll
        for (int r = 0; r < 4; r++) {
            float delta = r % 2 ? stats.w : stats.y;
            float p = exp2_fast(fmaf(s[n][r], scale, -(r % 2 ? stats.z : stats.x)));
            float d = fmaf(dp[n][r], kept, -delta);
            bool keep = bits[r % 2] & (r < 2 ? 1u : 1u << 8);
            s[n][r] = keep ? p : 0.0f;
            dp[n][r] = p * (keep ? d : -delta);
        }
    }
}

template <int D>
__global__ static void __launch_bounds__(MMA_THREADS, dkv_shape<D>::BLOCKS)
    mma_dkv_kernel(struct attention_args a)
{
    extern __shared__ __align__(128) bf16 shared[];
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
    float scale = a.scale * LOG2_E, kept = key.on ? key.scale : 1.0f;
    struct lane_places at = lane_places<D>();
    struct tile_copy<D, ROWS_IN_ORDER> row_copy = tile_copy_make<D, ROWS_IN_ORDER>();
    if (queries > 0) { /* keys and values come with the first group */
        const bf16 *base = (const bf16 *)a.qkv + (x.first + j0) * stride;
        tile_load(row_copy, keys, base + attention_column(a, 1, h), stride, x.keys - j0);
        tile_load(row_copy, values, base + attention_column(a, 2, h), stride, x.keys - j0);
        for (int n = 0; n < STAGES - 1; n++)
            query_stage_load<D>(row_copy, query_stage<D>(shared, n), a, x, h, n * TILE, j0, on);
    }
    for (int tile = 0, i0 = 0; i0 < queries; tile++, i0 += TILE) {
        struct query_stage now = query_stage<D>(shared, tile % STAGES);
        copies_wait<STAGES - 2>();
        __syncthreads(); /* this stage is here, and nobody reads the one that is loaded next */
        query_stage_load<D>(row_copy, query_stage<D>(shared, (tile + STAGES - 1) % STAGES), a, x, h,
                            i0 + (STAGES - 1) * TILE, j0, on);
        int steps = row < x.keys ? min(TILE, queries - i0) : 0; /* a warp without keys only loads */
#pragma unroll 1
        for (int part = 0; part < steps; part += STEP) {
            float s[STEP / 8][4] = {}, dp[STEP / 8][4] = {};
            multiply_tiles<D>(s, keys, warp * 16, now.queries, part, at);
            multiply_tiles<D>(dp, values, warp * 16, now.douts, part, at);
            key_step(s, dp, now, part, on, scale, kept);
            multiply_down<D>(dv, s, now.douts, part, at);
            multiply_down<D>(dk, dp, now.queries, part, at);
        }
    }
    bf16 *to = dqkv + x.first * stride;
    store_rows<D>(to + attention_column(a, 1, h), stride, keys, warp * 16, dk, row, x.rows, x.keys,
                  a.scale, a.scale);
    store_rows<D>(to + attention_column(a, 2, h), stride, values, warp * 16, dv, row, x.rows,
                  x.keys, kept, kept);
}

/* ---- launchers ------------------------------------------------------------------------------- */

template <int D> static enum status backward_open(void)
{
    TRY(CUDA(cudaFuncSetAttribute(mma_dq_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  dq_shape<D>::BYTES)));
    return CUDA(cudaFuncSetAttribute(mma_dkv_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     dkv_shape<D>::BYTES));
}

enum status attention_mma_backward_open(void)
{
    TRY(backward_open<32>());
    TRY(backward_open<64>());
    return backward_open<128>();
}

template <int D> static enum status backward(struct stream *s, const struct attention_args *a)
{
    mma_dq_kernel<D>
        <<<attention_grid(a, TILE), MMA_THREADS, dq_shape<D>::BYTES, stream_cuda(s)>>>(*a);
    TRY(CUDA(cudaGetLastError()));
    mma_dkv_kernel<D>
        <<<attention_grid(a, TILE), MMA_THREADS, dkv_shape<D>::BYTES, stream_cuda(s)>>>(*a);
    return CUDA(cudaGetLastError());
}

enum status attention_mma_backward(struct stream *s, const struct attention_args *a)
{
    return a->width == 32   ? backward<32>(s, a)
           : a->width == 64 ? backward<64>(s, a)
                            : backward<128>(s, a);
}
