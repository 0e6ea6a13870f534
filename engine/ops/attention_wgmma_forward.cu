/*
 * engine/ops/attention_wgmma_forward.cu - attention forward on Hopper's tensor cores.
 *
 * The algorithm of attention_mma_forward.cu: a block takes 64 query rows of one head of one
 * sequence, tiles of 64 keys and values come in two stages. What differs is that a whole 64 x 64
 * tile of scores is one product that runs by itself; four blocks an SM fill each other's waits.
 *
 * And that the references of the softmax are the maxima of the first tile only: floating point
 * allows probabilities of up to 2^100. A block that finds a larger sum at its end, or none at all,
 * begins again and looks at every tile.
 *
 *     S = Q K^T, 64 keys at a time      P = exp2(S scale log2(e) - reference)      O += mask(P) V
 *
 * P is rounded to bf16 pairs, and masks of pairs are laid over them, whose bits are left for
 * backward where there is room.
 *
 * Operations: 4 n m D a head. Bytes: qkv, out, lse and masks once; keys and values again from L2
 * for every 64 queries.
 */
#include "engine/ops/attention_wgmma.cuh"

#define FAR_TOTAL 0x1p100f /* of a sum of probabilities: its reference was too small */

template <int D> struct forward_shape {
    enum { BLOCKS = 4, BYTES = tile_bytes(TILE * (1 + 2 * STAGES), D) };
};

#ifdef WGMMA_CODE

/* This lane's first byte of the masks of its queries, which are tile @i. */
__device__ static inline uint8_t *mask_bytes(const struct attention_args &a,
                                             const struct attention_head &x, int h, int b, int i)
{
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    return mask_tiles(a, x, h, b, i) + t / 2 * 128 + warp * 32 + g / 2 * 4 + t % 2 * 2 + g % 2;
}

/* Zero what dropout drops; @group: of row g and the tile's first key, @rows_8 on: of row g + 8.
 * @masks: where the bits of it are left; NULL: they are not. */
__device__ static inline void drop_tile(uint32_t (&left)[TILE / 16][4], uint8_t *masks,
                                        const struct keep_start &keep, uint32_t group,
                                        uint32_t rows_8)
{
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int part = 0; part < TILE_SETS; part += 4) { /* 8 of 32 keys are this lane's */
            struct philox r = keep_words(keep, group + half * rows_8 + part);
            uint32_t bits = 0; /* even keys in the lower half, odd ones above */
#pragma unroll
            for (int n = 0; n < 4; n++) {
                uint32_t mask = keep_mask(r.word[n], keep.threshold);
                left[(part + n) / 2][n % 2 * 2 + half] &= mask;
                bits |= mask & 0x20001u << 2 * n;
            }
            if (masks != NULL)
                masks[half * 16 + part * 64] = (uint8_t)(bits | bits >> 16);
        }
}

/*
 * Sums and outputs of 64 queries, over all keys. CAREFUL: references are raised at any tile, not at
 * the first only. The queries may still be on their way.
 */
template <int D, bool CAREFUL>
__device__ inline void forward_tiles(float (&o)[D / 8][4], struct softmax &sum, const bf16 *queries,
                                     bf16 *stages, const bf16 *k, const bf16 *v, int64_t stride,
                                     int key_count, uint8_t *masks, const struct keep_start &keep,
                                     uint32_t group, uint32_t rows_8, float scale)
{
    constexpr int STAGE = 2 * TILE * D; /* keys, values */
    struct tile_copy<D, ROWS_AS_KEYS> key_copy = tile_copy_make<D, ROWS_AS_KEYS>();
    sum = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
#pragma unroll
    for (int n = 0; n < D / 8; n++)
        o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
    for (int n = 0; n < STAGES - 1; n++)
        key_stage_load<D>(key_copy, stages + n * STAGE, k, v, stride, n * TILE, key_count);
    for (int tile = 0, j0 = 0; j0 < key_count; tile++, j0 += TILE) {
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
                          j0 + (STAGES - 1) * TILE, key_count);
        products_wait<0>();
        hold(s);
        if (j0 + TILE > key_count)
            mask_tail<TILE_SETS>(s, key_count - j0);
        if (CAREFUL || tile == 0)
            softmax_raise<D, TILE_SETS>(sum, o, s, scale);
        softmax_step<TILE_SETS>(sum, s, scale);
#pragma unroll
        for (int n = 0; n < TILE / 16; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                left[n][i] = left_part(s, n, i);
        if (keep.on)
            drop_tile(left, masks != NULL ? masks + tile * MASK_BYTES : NULL, keep,
                      group + (uint32_t)j0 / 8, rows_8);
        products_begin();
        tiles_down<D>(o, left, values);
        products_end();
        products_wait<0>();
        hold(o);
    }
    copies_wait<0>(); /* of queries without keys */
}

#endif

template <int D>
__global__ static void __launch_bounds__(MMA_THREADS, forward_shape<D>::BLOCKS)
    wgmma_forward_kernel(struct attention_args a)
{
#ifdef WGMMA_CODE
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
    tile_load(tile_copy_make<D, ROWS_IN_ORDER>(), queries,
              base + i0 * stride + attention_column(a, 0, h), stride, x.rows - i0);
    struct dropout_key key = dropout_key(a.drop);
    struct keep_start keep = keep_start(key, x.sample);
    uint32_t group = keep_group(x, a.q.positions, row + lane / 4, 0) + lane % 4;
    uint8_t *masks = a.drop.masks != NULL ? mask_bytes(a, x, h, b, (int)blockIdx.x) : NULL;
    float o[D / 8][4], scale = a.scale * LOG2_E;
    struct softmax sum;
    forward_tiles<D, false>(o, sum, queries, stages, k, v, stride, x.keys, masks, keep, group,
                            (uint32_t)a.q.positions, scale);
    bool far = !(sum.total[0] < FAR_TOTAL && sum.total[1] < FAR_TOTAL);
    if (__syncthreads_or(far)) /* and the last products have read the queries */
        forward_tiles<D, true>(o, sum, queries, stages, k, v, stride, x.keys, masks, keep, group,
                               (uint32_t)a.q.positions, scale);
    __syncthreads();
    float factor[2];
    softmax_end(factor, sum, a, x, h, row, scale, key.on ? key.scale : 1.0f);
    rows_stage<D>(queries, o, row, x.rows, factor[0], factor[1]);
    rows_copy<D>(out + x.first * a.channels + attention_column(a, 0, h), a.channels, queries, row,
                 x.rows);
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
