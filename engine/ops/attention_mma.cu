/*
 * engine/ops/attention_mma.cu - attention on tensor cores: bf16 operands, fp32 sums and softmax.
 *
 * Tiles of 64 rows of one head lie in shared memory; the partner tiles come in two stages, so that
 * one is loaded while the other is used. A block has four warps, a warp owns 16 rows, so no two
 * warps add to the same place. Products are mma.sync m16n8k16; lane 4 g + t of an accumulator holds
 * rows g and g + 8, columns 2 t and 2 t + 1 of each 8.
 *
 *   forward  rows are queries, partners keys: S = Q K^T, running softmax, O = P V
 *   dQ       rows are queries, partners keys: P from lse, dS, dQ = dS K
 *   dK, dV   rows are keys, partners queries: S^T = K Q^T, dV = P^T dO, dK = dS^T Q
 *
 * The accumulators of the first product become the left operand of the second in registers: its
 * layout is that of two neighbouring 16 x 8 accumulators. Exponentials are powers of two with
 * log2(e) in the scale. Dropout: eight keys of one query are one Philox call (P is a multiple of
 * 8); its keep bits are computed by one lane and handed to the others that hold those elements.
 *
 * Operations: forward 4 n m D a head, backward 14 n m D (S and dP twice). Bytes are few: qkv and
 * out are read from L2 once a tile of partners. Bound by the tensor cores and the exponentials.
 *
 * Sources: Dao, FlashAttention-2, arXiv:2307.08691, algorithms 1 and 2; the layouts are those of
 * the PTX manual's mma.m16n8k16 and ldmatrix.
 */
#include "engine/ops/attention_cuda.cuh"

enum { TILE = 64, MMA_THREADS = 128 };

#define LOG2_E 1.4426950408889634f
#define LN_2   0.6931471805599453f

/* ---- tiles in shared memory ------------------------------------------------------------------ */

/*
 * Where 8 elements of a row lie: chunks of 16 bytes, permuted so that the eight rows which one
 * ldmatrix phase reads (or a store of one row) touch all 32 banks once.
 */
template <int D> __device__ inline int tile_at(int row, int chunk)
{
    int place = D == 32 ? chunk ^ (row >> 1 & 3) : chunk ^ (row & 7);
    return row * D + place * 8;
}

__device__ static inline uint32_t shared_address(const bf16 *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Start to copy rows 0 .. 63 of a head; rows from @rows on become zeros. @rows >= 1. */
template <int D>
__device__ inline void tile_load(bf16 *tile, const bf16 *from, int64_t stride, int rows)
{
    constexpr int CHUNKS = D / 8;
#pragma unroll
    for (int k = 0; k < TILE * CHUNKS / MMA_THREADS; k++) {
        int n = k * MMA_THREADS + threadIdx.x, row = n / CHUNKS, chunk = n % CHUNKS;
        const bf16 *source = from + (row < rows ? row : 0) * stride + chunk * 8;
        int bytes = row < rows ? 16 : 0;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                         shared_address(tile + tile_at<D>(row, chunk))),
                     "l"(source), "r"(bytes)
                     : "memory");
    }
}

__device__ static inline void copies_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Wait until at most @PENDING of the youngest groups of this thread are under way. */
template <int PENDING> __device__ inline void copies_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/*
 * 16 x 16 of a tile at (row, column): its 8 x 8 quarters in the order (top left, bottom left, top
 * right, bottom right). As it is: the left operand of a product. Transposed: the right operand
 * whose inner index runs down the tile; [0], [1] are columns 0-7 and [2], [3] columns 8-15.
 */
template <int D> __device__ inline const bf16 *tall_at(const bf16 *tile, int row, int column)
{
    int lane = threadIdx.x % 32;
    return tile + tile_at<D>(row + lane % 8 + (lane / 8 & 1) * 8, column / 8 + lane / 16);
}

template <int D>
__device__ inline void load_left(uint32_t (&r)[4], const bf16 *tile, int row, int column)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(tall_at<D>(tile, row, column)))
                 : "memory");
}

template <int D>
__device__ inline void load_right_down(uint32_t (&r)[4], const bf16 *tile, int row, int column)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(tall_at<D>(tile, row, column)))
                 : "memory");
}

/*
 * The right operand whose inner index runs along the tile's rows (a product with the transposed
 * tile): [0], [1] are tile rows 0-7, [2], [3] rows 8-15.
 */
template <int D>
__device__ inline void load_right_along(uint32_t (&r)[4], const bf16 *tile, int row, int column)
{
    int lane = threadIdx.x % 32;
    const bf16 *at = tile + tile_at<D>(row + lane % 8 + lane / 16 * 8, column / 8 + (lane / 8 & 1));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(at))
                 : "memory");
}

__device__ static inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ static inline uint32_t pair(float low, float high)
{
    __nv_bfloat162 p = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &p, sizeof bits);
    return bits;
}

/* Two neighbouring accumulators as a left operand. */
__device__ static inline void left_of(uint32_t (&a)[4], const float (&x)[4], const float (&y)[4])
{
    a[0] = pair(x[0], x[1]);
    a[1] = pair(x[2], x[3]);
    a[2] = pair(y[0], y[1]);
    a[3] = pair(y[2], y[3]);
}

/* c (16, 8 N) += left (16, D) * rows row .. row + 8 N - 1 of the tile, transposed */
template <int D, int N>
__device__ inline void multiply_along(float (&c)[N][4], const uint32_t (&left)[D / 16][4],
                                      const bf16 *tile, int row)
{
#pragma unroll
    for (int k = 0; k < D / 16; k++)
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t r[4];
            load_right_along<D>(r, tile, row + n * 8, k * 16);
            mma(c[n], left[k], r[0], r[1]);
            mma(c[n + 1], left[k], r[2], r[3]);
        }
}

/* c (16, D) += x (16, 8 N) * rows row .. row + 8 N - 1 of the tile */
template <int D, int N>
__device__ inline void multiply_down(float (&c)[D / 8][4], const float (&x)[N][4], const bf16 *tile,
                                     int row)
{
#pragma unroll
    for (int k = 0; k < N; k += 2) {
        uint32_t left[4];
        left_of(left, x[k], x[k + 1]);
#pragma unroll
        for (int n = 0; n < D / 8; n += 2) {
            uint32_t r[4];
            load_right_down<D>(r, tile, row + k * 8, n * 8);
            mma(c[n], left, r[0], r[1]);
            mma(c[n + 1], left, r[2], r[3]);
        }
    }
}

/* Accumulators as bf16 rows @row (+ 8) of @out, those below @rows; zeros from @valid on. */
template <int D>
__device__ inline void store_rows(bf16 *out, int64_t stride, const float (&c)[D / 8][4], int row,
                                  int rows, int valid, float factor_low, float factor_high)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int i = row + lane / 4 + half * 8;
        float factor = half ? factor_high : factor_low;
        if (i >= rows)
            continue;
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            float x = c[n][2 * half] * factor, y = c[n][2 * half + 1] * factor;
            *(uint32_t *)(out + i * stride + n * 8 + lane % 4 * 2) = i < valid ? pair(x, y) : 0u;
        }
    }
}

/* ---- dropout --------------------------------------------------------------------------------- */

/*
 * Keep bits of the accumulators of 16 queries x 32 keys: bit 4 n + 2 half + e belongs to row i0 +
 * g + 8 half, column j0 + 8 n + 2 t + e. Lane t of a quad makes the calls n = t of both rows.
 */
__device__ static inline uint32_t keep_queries(const struct dropout_key &key,
                                               const struct attention_head &x, int64_t positions,
                                               int i0, int j0)
{
    int lane = threadIdx.x % 32, t = lane % 4, g = lane / 4;
    uint64_t element = x.element + (uint64_t)(i0 + g) * (uint64_t)positions + (uint64_t)j0;
    uint32_t group = (uint32_t)(element / 8) + t, bits = 0;
    uint32_t mine = dropout_bits(key, x.sample, group) |
                    dropout_bits(key, x.sample, group + (uint32_t)positions) << 8;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        uint32_t other = __shfl_sync(0xFFFFFFFFu, mine, (lane & ~3) | n) >> (2 * t);
        bits |= ((other & 3) | (other >> 8 & 3) << 2) << (4 * n);
    }
    return bits;
}

/*
 * The same for 16 keys x 32 queries: bit 4 n + 2 half + e belongs to key j0 + g + 8 half, query i0
 * + 8 n + 2 t + e. Lane (g, t) makes the two calls of query i0 + 8 (g / 2) + 2 t + g % 2.
 */
__device__ static inline uint32_t keep_keys(const struct dropout_key &key,
                                            const struct attention_head &x, int64_t positions,
                                            int i0, int j0)
{
    int lane = threadIdx.x % 32, t = lane % 4, g = lane / 4;
    int i = i0 + g / 2 * 8 + 2 * t + g % 2;
    uint64_t element = x.element + (uint64_t)i * (uint64_t)positions + (uint64_t)j0;
    uint32_t group = (uint32_t)(element / 8), bits = 0;
    uint32_t mine = dropout_bits(key, x.sample, group) | dropout_bits(key, x.sample, group + 1)
                                                             << 8;
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            uint32_t other = __shfl_sync(0xFFFFFFFFu, mine, (2 * n + e) * 4 + t) >> g;
            bits |= ((other & 1) | (other >> 8 & 1) << 2) << (4 * n + e);
        }
    return bits;
}

/* ---- forward --------------------------------------------------------------------------------- */

__device__ static inline float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}

__device__ static inline float quad_sum(float x)
{
    x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
    return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}

/*
 * Scores of a tile to exp2(score - most), with the running maximum and this lane's part of the sum
 * of both rows; returns in shrink what earlier sums and outputs must be multiplied by.
 */
__device__ static inline void running_softmax(float (&s)[8][4], float (&most)[2], float (&total)[2],
                                              float (&shrink)[2], float scale, int j0, int keys)
{
    int t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float next = most[half];
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &x = s[n][2 * half + e];
                x = j0 + n * 8 + 2 * t + e < keys ? x * scale : -INFINITY;
                next = fmaxf(next, x);
            }
        next = quad_max(next); /* finite: a tile has at least one key */
        shrink[half] = exp2f(most[half] - next);
        most[half] = next;
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &x = s[n][2 * half + e];
                x = exp2f(x - next);
                sum += x;
            }
        total[half] = total[half] * shrink[half] + sum;
    }
}

template <int D>
__global__ static void __launch_bounds__(MMA_THREADS) mma_forward_kernel(struct attention_args a)
{
    extern __shared__ __align__(128) bf16 shared[];
    bf16 *queries = shared, *stages = shared + TILE * D; /* a stage: keys, values */
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, h = blockIdx.y, b = blockIdx.z;
    int i0 = blockIdx.x * TILE, row = i0 + warp * 16;
    int64_t stride = 3 * a.channels;
    bf16 *out = (bf16 *)a.out;
    if (b == a.q.count) {
        attention_zero_rows(a, out, attention_column(a, 0, h), a.channels, a.lse, h);
        return;
    }
    struct attention_head x = attention_head(a, b, h);
    if (i0 >= x.rows)
        return;
    struct dropout_key key = dropout_key(a.drop);
    const bf16 *base = (const bf16 *)a.qkv + x.first * stride;
    const bf16 *k = base + attention_column(a, 1, h), *v = base + attention_column(a, 2, h);
    int tiles = (x.keys + TILE - 1) / TILE;
    tile_load<D>(queries, base + i0 * stride + attention_column(a, 0, h), stride, x.rows - i0);
    copies_commit();
    if (tiles > 0) {
        tile_load<D>(stages, k, stride, x.keys);
        tile_load<D>(stages + TILE * D, v, stride, x.keys);
    }
    copies_commit();
    copies_wait<1>();
    __syncthreads();
    uint32_t left[D / 16][4];
#pragma unroll
    for (int n = 0; n < D / 16; n++)
        load_left<D>(left[n], queries, warp * 16, n * 16);
    float o[D / 8][4] = {}, most[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};
    for (int tile = 0; tile < tiles; tile++) {
        bf16 *keys = stages + (tile & 1) * 2 * TILE * D, *values = keys + TILE * D;
        int j0 = tile * TILE;
        if (tile + 1 < tiles) {
            bf16 *next = stages + (~tile & 1) * 2 * TILE * D;
            int64_t ahead = j0 + TILE;
            tile_load<D>(next, k + ahead * stride, stride, (int)(x.keys - ahead));
            tile_load<D>(next + TILE * D, v + ahead * stride, stride, (int)(x.keys - ahead));
        }
        copies_commit();
        copies_wait<1>();
        __syncthreads();
        float s[8][4] = {}, shrink[2];
        multiply_along<D, 8>(s, left, keys, 0);
        running_softmax(s, most, total, shrink, a.scale * LOG2_E, j0, x.keys);
        if (key.on) {
            uint32_t low = keep_queries(key, x, a.q.positions, row, j0);
            uint32_t high = keep_queries(key, x, a.q.positions, row, j0 + 32);
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    s[n][e] = (n < 4 ? low : high) >> (4 * (n % 4) + e) & 1 ? s[n][e] : 0.0f;
        }
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                o[n][e] *= shrink[e / 2];
        multiply_down<D, 8>(o, s, values, 0);
        __syncthreads(); /* this stage is loaded again in the next turn */
    }
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int i = row + lane / 4 + half * 8;
        float sum = quad_sum(total[half]);
        factor[half] = tiles > 0 ? (key.on ? key.scale : 1.0f) / sum : 0.0f;
        if (lane % 4 == 0 && i < x.rows)
            a.lse[h * a.q.rows + x.first + i] = tiles > 0 ? (most[half] + log2f(sum)) * LN_2 : 0.0f;
    }
    store_rows<D>(out + x.first * a.channels + attention_column(a, 0, h), a.channels, o, row,
                  x.rows, x.rows, factor[0], factor[1]);
}

/* ---- backward -------------------------------------------------------------------------------- */

template <int D>
__global__ static void __launch_bounds__(MMA_THREADS) mma_dq_kernel(struct attention_args a)
{
    extern __shared__ __align__(128) bf16 shared[];
    bf16 *queries = shared, *douts = shared + TILE * D, *stages = shared + 2 * TILE * D;
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
    struct dropout_key key = dropout_key(a.drop);
    const bf16 *base = (const bf16 *)a.qkv + x.first * stride;
    const bf16 *k = base + attention_column(a, 1, h), *v = base + attention_column(a, 2, h);
    const bf16 *dout = (const bf16 *)a.dout + x.first * a.channels + attention_column(a, 0, h);
    int tiles = (x.keys + TILE - 1) / TILE;
    tile_load<D>(queries, base + i0 * stride + attention_column(a, 0, h), stride, x.rows - i0);
    tile_load<D>(douts, dout + i0 * a.channels, a.channels, x.rows - i0);
    copies_commit();
    if (tiles > 0) {
        tile_load<D>(stages, k, stride, x.keys);
        tile_load<D>(stages + TILE * D, v, stride, x.keys);
    }
    copies_commit();
    float lse[2], delta[2]; /* rows past the end: probability 0 */
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int i = row + lane / 4 + half * 8;
        int64_t at = h * a.q.rows + x.first + i;
        lse[half] = i < x.rows ? a.lse[at] * LOG2_E : INFINITY;
        delta[half] = i < x.rows ? a.delta[at] : 0.0f;
    }
    copies_wait<1>();
    __syncthreads();
    uint32_t left_q[D / 16][4], left_d[D / 16][4];
#pragma unroll
    for (int n = 0; n < D / 16; n++) {
        load_left<D>(left_q[n], queries, warp * 16, n * 16);
        load_left<D>(left_d[n], douts, warp * 16, n * 16);
    }
    float dq[D / 8][4] = {}, scale = a.scale * LOG2_E, kept = key.on ? key.scale : 1.0f;
    for (int tile = 0; tile < tiles; tile++) {
        bf16 *keys = stages + (tile & 1) * 2 * TILE * D, *values = keys + TILE * D;
        if (tile + 1 < tiles) {
            bf16 *next = stages + (~tile & 1) * 2 * TILE * D;
            int64_t ahead = (int64_t)(tile + 1) * TILE;
            tile_load<D>(next, k + ahead * stride, stride, (int)(x.keys - ahead));
            tile_load<D>(next + TILE * D, v + ahead * stride, stride, (int)(x.keys - ahead));
        }
        copies_commit();
        copies_wait<1>();
        __syncthreads();
#pragma unroll 1
        for (int part = 0; part < TILE; part += 32) {
            int j0 = tile * TILE + part;
            float s[4][4] = {}, dp[4][4] = {};
            multiply_along<D, 4>(s, left_q, keys, part);
            multiply_along<D, 4>(dp, left_d, values, part);
            uint32_t keep = key.on ? keep_queries(key, x, a.q.positions, row, j0) : 0xFFFFu;
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    bool used = j0 + n * 8 + lane % 4 * 2 + e % 2 < x.keys;
                    float p = used ? exp2f(s[n][e] * scale - lse[e / 2]) : 0.0f;
                    float d = keep >> (4 * n + e) & 1 ? dp[n][e] * kept : 0.0f;
                    s[n][e] = p * (d - delta[e / 2]);
                }
            multiply_down<D, 4>(dq, s, keys, part);
        }
        __syncthreads(); /* this stage is loaded again in the next turn */
    }
    store_rows<D>(dqkv + x.first * stride + attention_column(a, 0, h), stride, dq, row, x.rows,
                  x.rows, a.scale, a.scale);
}

/* Start to load a stage of the dK, dV kernel: 64 queries, their dout, lse (times log2 e), delta. */
template <int D>
__device__ inline void query_stage_load(const struct attention_args &a,
                                        const struct attention_head &x, int h, int i0,
                                        bf16 *queries, float *lse, float *delta)
{
    int64_t stride = 3 * a.channels, first = x.first + i0, at = h * a.q.rows + first;
    tile_load<D>(queries, (const bf16 *)a.qkv + first * stride + attention_column(a, 0, h), stride,
                 x.rows - i0);
    tile_load<D>(queries + TILE * D,
                 (const bf16 *)a.dout + first * a.channels + attention_column(a, 0, h), a.channels,
                 x.rows - i0);
    int i = threadIdx.x;
    if (i < TILE) { /* rows past the end: probability 0 */
        lse[i] = i0 + i < x.rows ? a.lse[at + i] * LOG2_E : INFINITY;
        delta[i] = i0 + i < x.rows ? a.delta[at + i] : 0.0f;
    }
}

template <int D>
__global__ static void __launch_bounds__(MMA_THREADS) mma_dkv_kernel(struct attention_args a)
{
    extern __shared__ __align__(128) bf16 shared[];
    __shared__ float lse[2][TILE], delta[2][TILE];
    bf16 *keys = shared, *values = shared + TILE * D, *stages = shared + 2 * TILE * D;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, h = blockIdx.y, b = blockIdx.z;
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
    const bf16 *base = (const bf16 *)a.qkv + (x.first + j0) * stride;
    /* A tile without keys has no partners and writes zeros. */
    int tiles = j0 < x.keys ? (x.rows + TILE - 1) / TILE : 0;
    if (tiles > 0) {
        tile_load<D>(keys, base + attention_column(a, 1, h), stride, x.keys - j0);
        tile_load<D>(values, base + attention_column(a, 2, h), stride, x.keys - j0);
        query_stage_load<D>(a, x, h, 0, stages, lse[0], delta[0]);
    }
    copies_commit();
    float dk[D / 8][4] = {}, dv[D / 8][4] = {};
    float scale = a.scale * LOG2_E, kept = key.on ? key.scale : 1.0f;
    for (int tile = 0; tile < tiles; tile++) {
        int now = tile & 1;
        bf16 *queries = stages + now * 2 * TILE * D, *douts = queries + TILE * D;
        if (tile + 1 < tiles)
            query_stage_load<D>(a, x, h, (tile + 1) * TILE, stages + (1 - now) * 2 * TILE * D,
                                lse[1 - now], delta[1 - now]);
        copies_commit();
        copies_wait<1>();
        __syncthreads();
#pragma unroll 1
        for (int part = 0; part < TILE; part += 32) {
            float s[4][4] = {}, dp[4][4] = {};
#pragma unroll
            for (int k = 0; k < D / 16; k++) {
                uint32_t left[4], r[4];
                load_left<D>(left, keys, warp * 16, k * 16);
#pragma unroll
                for (int n = 0; n < 4; n += 2) {
                    load_right_along<D>(r, queries, part + n * 8, k * 16);
                    mma(s[n], left, r[0], r[1]);
                    mma(s[n + 1], left, r[2], r[3]);
                }
                load_left<D>(left, values, warp * 16, k * 16);
#pragma unroll
                for (int n = 0; n < 4; n += 2) {
                    load_right_along<D>(r, douts, part + n * 8, k * 16);
                    mma(dp[n], left, r[0], r[1]);
                    mma(dp[n + 1], left, r[2], r[3]);
                }
            }
            uint32_t keep =
                key.on ? keep_keys(key, x, a.q.positions, tile * TILE + part, row) : 0xFFFFu;
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    int i = part + n * 8 + lane % 4 * 2 + e % 2; /* query within the tile */
                    bool used = row + lane / 4 + e / 2 * 8 < x.keys;
                    float p = used ? exp2f(s[n][e] * scale - lse[now][i]) : 0.0f;
                    float factor = keep >> (4 * n + e) & 1 ? kept : 0.0f;
                    s[n][e] = p * factor;
                    dp[n][e] = p * (dp[n][e] * factor - delta[now][i]);
                }
            multiply_down<D, 4>(dv, s, douts, part);
            multiply_down<D, 4>(dk, dp, queries, part);
        }
        __syncthreads(); /* this stage is loaded again in the next turn */
    }
    bf16 *to = dqkv + x.first * stride;
    store_rows<D>(to + attention_column(a, 1, h), stride, dk, row, x.rows, x.keys, a.scale,
                  a.scale);
    store_rows<D>(to + attention_column(a, 2, h), stride, dv, row, x.rows, x.keys, 1.0f, 1.0f);
}

/* ---- launchers ------------------------------------------------------------------------------- */

enum { FORWARD_TILES = 5, BACKWARD_TILES = 6 }; /* in shared memory */

static constexpr int tiles_bytes(int tiles, int width)
{
    return tiles * TILE * width * (int)sizeof(bf16);
}

template <int D> static enum status mma_allow(void)
{
    TRY(CUDA(cudaFuncSetAttribute(mma_forward_kernel<D>,
                                  cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  tiles_bytes(FORWARD_TILES, D))));
    TRY(CUDA(cudaFuncSetAttribute(mma_dq_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  tiles_bytes(BACKWARD_TILES, D))));
    return CUDA(cudaFuncSetAttribute(mma_dkv_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     tiles_bytes(BACKWARD_TILES, D)));
}

enum status attention_cuda_open(void)
{
    TRY(mma_allow<32>());
    TRY(mma_allow<64>());
    return mma_allow<128>();
}

bool attention_mma_fits(const struct attention_args *a, enum dtype dtype)
{
    bool width = a->width == 32 || a->width == 64 || a->width == 128;
    bool groups = a->drop.p == 0.0f || a->q.positions % 8 == 0;
    return dtype == DTYPE_BF16 && width && groups &&
           packs_fit(0, 1, a->qkv, a->out, a->dout, a->dqkv);
}

static dim3 mma_grid(const struct attention_args *a)
{
    int64_t tiles = div_up(a->q.max_length, TILE);
    return dim3((unsigned)(tiles > 0 ? tiles : 1), (unsigned)a->heads, (unsigned)a->q.count + 1);
}

template <int D> static enum status mma_forward(struct stream *s, const struct attention_args *a)
{
    mma_forward_kernel<D>
        <<<mma_grid(a), MMA_THREADS, tiles_bytes(FORWARD_TILES, D), stream_cuda(s)>>>(*a);
    return CUDA(cudaGetLastError());
}

template <int D> static enum status mma_backward(struct stream *s, const struct attention_args *a)
{
    mma_dkv_kernel<D>
        <<<mma_grid(a), MMA_THREADS, tiles_bytes(BACKWARD_TILES, D), stream_cuda(s)>>>(*a);
    TRY(CUDA(cudaGetLastError()));
    mma_dq_kernel<D>
        <<<mma_grid(a), MMA_THREADS, tiles_bytes(BACKWARD_TILES, D), stream_cuda(s)>>>(*a);
    return CUDA(cudaGetLastError());
}

enum status attention_mma_forward(struct stream *s, const struct attention_args *a)
{
    return a->width == 32   ? mma_forward<32>(s, a)
           : a->width == 64 ? mma_forward<64>(s, a)
                            : mma_forward<128>(s, a);
}

enum status attention_mma_backward(struct stream *s, const struct attention_args *a)
{
    return a->width == 32   ? mma_backward<32>(s, a)
           : a->width == 64 ? mma_backward<64>(s, a)
                            : mma_backward<128>(s, a);
}
