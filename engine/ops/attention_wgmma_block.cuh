/*
 * engine/ops/attention_wgmma_block.cuh - a block of attention's backward on Hopper: what it holds
 * and loads, which elements its lanes keep, the sums over its rows.
 *
 * For attention_wgmma_backward.cu, whose top says how they go together.
 */
#ifndef ENGINE_OPS_ATTENTION_WGMMA_BLOCK_CUH
#define ENGINE_OPS_ATTENTION_WGMMA_BLOCK_CUH

#include "engine/ops/attention_wgmma.cuh"

/* Warpgroups, tiles of unfinished dQ in shared memory. */
enum { GROUPS = 3, BACKWARD_THREADS = GROUPS * MMA_THREADS };
enum { PARTS_HERE = ATTENTION_ROWS_HERE / TILE };

template <int D> struct backward_shape {
    enum { ROWS = TILE * D, GRADIENTS = TILE * TILE, STAGE = 2 * ROWS }; /* elements */
    enum { PART = TILE * D / 4 };                                        /* float4 */
    enum { TILES = (2 * GROUPS * ROWS + STAGES * STAGE + 2 * GROUPS * GRADIENTS) * 2 };
    enum { BYTES = TILES + PARTS_HERE * (PART * 16 + TILE * (int)sizeof(float2)) };
};

#ifdef WGMMA_CODE

/* ---- shared memory --------------------------------------------------------------------------- */

/* Shared memory of a block. */
struct backward_memory {
    bf16 *keys, *values; /* a tile a warpgroup */
    bf16 *stages;        /* of queries and dO, a tile each */
    bf16 *gradients;     /* two sets of dS^T, a tile a warpgroup */
    float4 *parts;       /* of dQ; before that out */
    float2 *stats;       /* of the queries */
};

template <int D> __device__ inline struct backward_memory backward_memory(bf16 *shared)
{
    using shape = backward_shape<D>;
    struct backward_memory m;
    m.keys = shared;
    m.values = m.keys + GROUPS * shape::ROWS;
    m.stages = m.values + GROUPS * shape::ROWS;
    m.gradients = m.stages + STAGES * shape::STAGE;
    m.parts = (float4 *)(m.gradients + 2 * GROUPS * shape::GRADIENTS);
    m.stats = (float2 *)(m.parts + PARTS_HERE * shape::PART);
    return m;
}

/* A head of a sequence as a block sees it. */
struct backward_head {
    struct attention_head x;
    int group, tiles, key_tiles; /* group: this thread's warpgroup; tiles: of queries */
    int channels;
    bool here; /* unfinished dQ and all stats lie in shared memory */
    const bf16 *queries, *douts, *outs;
    bf16 *dqueries;
    const float *lse;
    float4 *parts;
    float scale, kept, unkept; /* to powers of two; 1 / (1 - p); 1 - p */
};

template <int D>
__device__ inline struct backward_head backward_head(const struct backward_memory &m,
                                                     const struct attention_args &a,
                                                     const struct attention_head &x, int h, int b)
{
    struct backward_head y;
    int64_t column = attention_column(a, 0, h), first = x.first * a.channels;
    y.x = x;
    y.group = (int)uniform(threadIdx.x / MMA_THREADS);
    y.tiles = (x.rows + TILE - 1) / TILE;
    y.key_tiles = (x.keys + TILE - 1) / TILE;
    y.channels = (int)a.channels;
    y.here = y.tiles <= PARTS_HERE;
    y.queries = (const bf16 *)a.qkv + 3 * first + column;
    y.douts = (const bf16 *)a.dout + first + column;
    y.outs = (const bf16 *)a.out + first + column;
    y.dqueries = (bf16 *)a.dqkv + 3 * first + column;
    y.lse = a.lse + h * a.q.rows + x.first;
    y.parts = y.here ? m.parts
                     : a.parts + (h * a.part_slots + x.first / TILE + b) * backward_shape<D>::PART;
    y.scale = a.scale * LOG2_E;
    return y;
}

/* ---- queries --------------------------------------------------------------------------------- */

/* Place of a tile's stats and out: all are kept, or those of the stages. */
__device__ static inline int query_slot(const struct backward_head &y, int i, int stage)
{
    return y.here ? i : stage;
}

/* What a warpgroup loads of a head: the first one the queries, the last one dO and out. */
struct query_stream {
    const char *first; /* this thread's chunk of the first row */
    uint32_t stride;   /* bytes from row to row */
    int64_t outs;      /* bytes from dO to out */
};

template <int D>
__device__ inline struct query_stream query_stream(const struct tile_copy<D, ROWS_IN_ORDER> &copy,
                                                   const struct backward_head &y)
{
    struct query_stream x;
    x.first = (const char *)((y.group == 0 ? y.queries : y.douts) + copy.chunk * 8);
    x.stride = (uint32_t)(y.group == 0 ? 3 * y.channels : y.channels) * (uint32_t)sizeof(bf16);
    x.outs = (const char *)y.outs - (const char *)y.douts;
    return x;
}

/*
 * Start to load tile @i of the queries and of dO; @stats: and of out, by the threads that load dO
 * and make the stats of it. Return: lse of row (chunk, row) of the copy.
 */
template <int D>
__device__ inline float queries_load(const struct query_stream &x,
                                     const struct tile_copy<D, ROWS_IN_ORDER> &copy,
                                     const struct backward_memory &m, const struct backward_head &y,
                                     int i, int stage, bool stats)
{
    using shape = backward_shape<D>;
    constexpr int COPIES = TILE / copy.ROWS;
    int rows = y.x.rows - i * TILE, row = copy.chunk * copy.ROWS + copy.row;
    float lse = 0.0f;
    stats = stats && y.group == GROUPS - 1;
    if (y.group == 0 || y.group == GROUPS - 1) {
        uint32_t to = shared_address(m.stages + stage * shape::STAGE) +
                      (y.group == 0 ? 0 : shape::ROWS * (uint32_t)sizeof(bf16));
        uint32_t outs = shared_address(m.parts + query_slot(y, i, stage) * shape::PART);
#pragma unroll
        for (int k = 0; k < COPIES; k++) {
            bool real = k * copy.ROWS + copy.row < rows;
            uint32_t r = real ? i * TILE + k * copy.ROWS + copy.row : 0;
            const char *at = x.first + (uint64_t)r * x.stride;
            copy_16(to + copy.to(k), at, real);
            if (stats)
                copy_16(outs + copy.to(k), at + x.outs, real);
        }
    }
    if (stats && row < TILE && row < rows)
        lse = y.lse[i * TILE + row];
    copies_commit();
    return lse;
}

/* Stats of tile @i from what this thread loaded, which has arrived. */
template <int D>
__device__ inline void stats_make(const struct tile_copy<D, ROWS_IN_ORDER> &copy,
                                  const struct backward_memory &m, const struct backward_head &y,
                                  int i, int stage, float lse)
{
    using shape = backward_shape<D>;
    int slot = query_slot(y, i, stage);
    const char *outs = (const char *)(m.parts + slot * shape::PART);
    const char *douts = (const char *)(m.stages + stage * shape::STAGE + shape::ROWS);
#pragma unroll
    for (int k = 0; k < TILE / copy.ROWS; k++) {
        uint4 u = *(const uint4 *)(outs + copy.to(k)), v = *(const uint4 *)(douts + copy.to(k));
        const uint32_t left[4] = {u.x, u.y, u.z, u.w}, right[4] = {v.x, v.y, v.z, v.w};
        float delta = 0.0f;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float2 p = unpair(left[n]), q = unpair(right[n]);
            delta += p.x * q.x + p.y * q.y;
        }
#pragma unroll
        for (int lanes = 1; lanes < copy.CHUNKS; lanes *= 2)
            delta += __shfl_xor_sync(0xFFFFFFFFu, delta, lanes);
        if (copy.chunk == k)
            m.stats[slot * TILE + k * copy.ROWS + copy.row] =
                make_float2(lse * LOG2_E, delta * y.unkept);
    }
}

/* Load this warpgroup's keys and values, from row @j0 on. */
template <int D>
__device__ inline void keys_load(const struct tile_copy<D, ROWS_IN_ORDER> &copy, bf16 *keys,
                                 bf16 *values, const struct backward_head &y, int j0)
{
    const bf16 *from = y.queries + (uint64_t)(uint32_t)j0 * 3 * (uint32_t)y.channels + y.channels;
    tile_load(copy, keys, from, 3 * y.channels, y.x.keys - j0);
    tile_load(copy, values, from + y.channels, 3 * y.channels, y.x.keys - j0);
}

/* ---- sums over rows -------------------------------------------------------------------------- */

/*
 * Column sums of accumulators. A thread adds its two rows and leaves what it has in D / 16 places
 * of shared memory that are its own, @step float4 apart: nobody waits. Place k has columns
 * 16 k + 2 t, the next, 16 k + 8 + 2 t and the next. Rows past the end are zeros.
 */
template <int D>
__device__ inline void sums_leave(float4 *place, int step, const float (&c)[D / 8][4])
{
#pragma unroll
    for (int n = 0; n < D / 8; n += 2)
        place[n / 2 * step] = make_float4(c[n][0] + c[n][2], c[n][1] + c[n][3],
                                          c[n + 1][0] + c[n + 1][2], c[n + 1][1] + c[n + 1][3]);
}

/* This thread's first place in its warp's 16 rows of a tile, which hold as much. */
template <int D> __device__ inline float4 *sums_place(bf16 *tile)
{
    return (float4 *)(tile + threadIdx.x % MMA_THREADS / 32 * 16 * D) + threadIdx.x % 32;
}

/* The block's columns of its row of the sums: that of the sequence's place by length. */
template <int D> __device__ inline float *sums_row(const struct attention_args &a)
{
    return a.sums + (int64_t)blockIdx.z * 3 * a.channels + blockIdx.y * D;
}

/*
 * Add what all threads have left, in order: of dK in @dks and of dV in @values, tiles of @count
 * warpgroups in this pass; in the last one of dQ, beside the unfinished ones. A warp has 16 columns
 * of query, key or value. Without their factors, which they get here.
 */
template <int D>
__device__ inline void sums_add(const struct attention_args &a, const struct backward_head &y,
                                const bf16 *dks, const bf16 *values, int count, bool first,
                                bool last, float factor)
{
    using shape = backward_shape<D>;
    int part = threadIdx.x / 32 / (D / 16), k = threadIdx.x / 32 % (D / 16),
        lane = threadIdx.x % 32;
    if (part > 2 || (part == 0 && !last))
        return;
    const float4 *from = (const float4 *)(part == 1 ? dks : values) + k * 32 + lane;
    int tiles = count, tile = (part == 1 ? (int)shape::GRADIENTS : (int)shape::ROWS) / 8;
    int warp = 16 * D / 8;
    if (part == 0) {
        from = y.parts + k * MMA_THREADS + lane;
        tiles = y.tiles, tile = shape::PART, warp = 32;
    }
    float total[4] = {};
#pragma unroll 1
    for (int i = 0; i < tiles; i++)
#pragma unroll
        for (int w = 0; w < 4; w++) {
            float4 x = from[i * tile + w * warp];
            total[0] += x.x, total[1] += x.y, total[2] += x.z, total[3] += x.w;
        }
#pragma unroll
    for (int n = 0; n < 4; n++) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
            total[n] += __shfl_xor_sync(0xFFFFFFFFu, total[n], step);
        total[n] *= part == 2 ? y.kept : factor;
    }
    float2 *to = (float2 *)(sums_row<D>(a) + part * a.channels + 16 * k) + lane;
    if (lane >= 4)
        return;
#pragma unroll
    for (int n = 0; n < 2; n++) {
        float2 x = part == 0 || first ? make_float2(0.0f, 0.0f) : to[4 * n];
        to[4 * n] = make_float2(x.x + total[2 * n], x.y + total[2 * n + 1]);
    }
}

/* ---- dropout --------------------------------------------------------------------------------- */

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

/*
 * Which of this lane's elements are kept: bit 16 half + 8 e + n is key g + 8 half of query
 * 8 n + 2 t + e. A call has eight keys of one query, so a lane makes those of queries 8 g + 2 t and
 * the next, and the lanes of one t exchange. @group: of the lane's first query and the warp's first
 * key; @row_groups on is the next query.
 */
__device__ static inline uint32_t keep_bits(const struct keep_start &keep, uint32_t group,
                                            uint32_t row_groups)
{
    uint32_t bits[2] = {0, 0}; /* even keys in the lower half, odd ones above */
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            struct philox r = keep_words(keep, group + half + e * row_groups);
#pragma unroll
            for (int n = 0; n < 4; n++)
                bits[half] |= keep_mask(r.word[n], keep.threshold) & 0x20001u << (2 * n + 8 * e);
        }
    return bits_transposed(((bits[0] | bits[0] >> 16) & 0xFFFFu) |
                           ((bits[1] | bits[1] << 16) & 0xFFFF0000u));
}

#endif

#endif
