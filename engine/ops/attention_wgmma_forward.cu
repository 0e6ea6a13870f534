/*
 * engine/ops/attention_wgmma_forward.cu - attention forward on Hopper's tensor cores.
 *
 * The algorithm of attention_mma_forward.cu: a block takes 64 query rows of one head of one
 * sequence, tiles of 64 keys and values come in two stages, references of the softmax are raised
 * when a score passes them far. What differs is that a whole 64 x 64 tile of scores is one product
 * that runs by itself: dropout's masks are made meanwhile. Four blocks an SM fill each other's
 * waits.
 *
 *     S = Q K^T, 64 keys at a time      P = exp2(S scale log2(e) - reference)      O += mask(P) V
 *
 * P is rounded to bf16 pairs, and masks of pairs are laid over them.
 *
 * Operations: 4 n m D a head. Bytes: qkv, out and lse once; keys and values again from L2 for every
 * 64 queries.
 */
#include "engine/ops/attention_wgmma.cuh"

template <int D> struct forward_shape {
    enum { BLOCKS = 4, BYTES = tile_bytes(TILE * (1 + 2 * STAGES), D) };
};

#ifdef WGMMA_CODE

/* Masks of a tile's pairs: words n of a call are accumulators n of four. */
struct keep_masks {
    uint32_t row[2][TILE_SETS];
};

/* @group: of row g and the first key of the tile; @rows_8 groups on is row g + 8. */
__device__ static inline struct keep_masks keep_masks(const struct keep_start &keep, uint32_t group,
                                                      uint32_t rows_8)
{
    struct keep_masks x;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int part = 0; part < TILE_SETS / 4; part++) {
            struct philox r = keep_words(keep, group + half * rows_8 + part * 4);
#pragma unroll
            for (int n = 0; n < 4; n++)
                x.row[half][part * 4 + n] = keep_mask(r.word[n], keep.threshold);
        }
    return x;
}

#endif

template <int D>
__global__ static void __launch_bounds__(MMA_THREADS, forward_shape<D>::BLOCKS)
    wgmma_forward_kernel(struct attention_args a)
{
#ifdef WGMMA_CODE
    constexpr int STAGE = 2 * TILE * D;
    extern __shared__ __align__(1024) bf16 shared[];
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
    const bf16 *base = (const bf16 *)a.qkv + x.first * stride;
    const bf16 *k = base + attention_column(a, 1, h), *v = base + attention_column(a, 2, h);
    struct tile_copy<D, ROWS_AS_KEYS> key_copy = tile_copy_make<D, ROWS_AS_KEYS>();
    tile_load(tile_copy_make<D, ROWS_IN_ORDER>(), queries,
              base + i0 * stride + attention_column(a, 0, h), stride, x.rows - i0);
    for (int n = 0; n < STAGES - 1; n++) /* the queries come with the first group */
        key_stage_load<D>(key_copy, stages + n * STAGE, k, v, stride, n * TILE, x.keys);
    struct dropout_key key = dropout_key(a.drop);
    struct keep_start keep = keep_start(key, x.sample);
    uint32_t group = keep_group(x, a.q.positions, row + lane / 4, 0) + lane % 4;
    float o[D / 8][4] = {}, scale = a.scale * LOG2_E;
    struct softmax sum = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
    for (int tile = 0, j0 = 0; j0 < x.keys; tile++, j0 += TILE) {
        const bf16 *keys = stages + tile % STAGES * STAGE, *values = keys + TILE * D;
        copies_wait<STAGES - 2>();
        async_fence();
        __syncthreads(); /* this stage is here, and nobody reads the one that is loaded next */
        float s[TILE_SETS][4];
        uint32_t left[TILE / 16][4];
        products_begin();
        tiles_along<D>(s, queries, keys);
        products_end();
        key_stage_load<D>(key_copy, stages + (tile + STAGES - 1) % STAGES * STAGE, k, v, stride,
                          j0 + (STAGES - 1) * TILE, x.keys);
        struct keep_masks masks;
        if (keep.on)
            masks = keep_masks(keep, group + (uint32_t)j0 / 8, a.q.positions);
        products_wait<0>();
        hold(s);
        if (j0 + TILE > x.keys)
            mask_tail<TILE_SETS>(s, x.keys - j0);
        softmax_raise<D, TILE_SETS>(sum, o, s, scale);
        softmax_step<TILE_SETS>(sum, s, scale);
#pragma unroll
        for (int n = 0; n < TILE / 16; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                left[n][i] = left_part(s, n, i);
        if (keep.on)
#pragma unroll
            for (int n = 0; n < TILE / 16; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    left[n][i] &= masks.row[i % 2][2 * n + i / 2];
        products_begin();
        tiles_down<D>(o, left, values);
        products_end();
        products_wait<0>();
        hold(o);
    }
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int i = row + lane / 4 + half * 8;
        float total = quad_sum(sum.total[half]);
        factor[half] = x.keys > 0 ? (key.on ? key.scale : 1.0f) / total : 0.0f;
        if (lane % 4 == 0 && i < x.rows)
            a.lse[h * a.q.rows + x.first + i] =
                x.keys > 0 ? (sum.most[half] * scale + log2f(total)) * LN_2 : 0.0f;
    }
    copies_wait<0>(); /* of queries without keys */
    __syncthreads();  /* the last products have read the queries */
    store_rows<D>(out + x.first * a.channels + attention_column(a, 0, h), a.channels, queries,
                  warp * 16, o, row, x.rows, x.rows, factor[0], factor[1]);
#endif
}

template <int D> static enum status forward_open(void)
{
    return CUDA(cudaFuncSetAttribute(wgmma_forward_kernel<D>,
                                     cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     forward_shape<D>::BYTES));
}

enum status attention_wgmma_forward_open(void)
{
    TRY(forward_open<32>());
    return forward_open<64>();
}

template <int D> static enum status forward(struct stream *s, const struct attention_args *a)
{
    wgmma_forward_kernel<D>
        <<<attention_grid(a, TILE), MMA_THREADS, forward_shape<D>::BYTES, stream_cuda(s)>>>(*a);
    return CUDA(cudaGetLastError());
}

enum status attention_wgmma_forward(struct stream *s, const struct attention_args *a)
{
    return a->width == 32 ? forward<32>(s, a) : forward<64>(s, a);
}
