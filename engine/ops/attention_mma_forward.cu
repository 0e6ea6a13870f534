/*
 * engine/ops/attention_mma_forward.cu - attention forward on tensor cores.
 *
 * A block takes 64 query rows of one head of one sequence, each of its four warps 16 of them. Tiles
 * of 64 keys and values come through shared memory in two stages, so that one is loaded while the
 * other is used, and sequences of any length run. (All 384 or 512 keys and values of a head at once
 * fill 96 or 128 KiB and leave one or two blocks an SM; this leaves four. Warps of 32 rows, which
 * read half as much shared memory, were slower: fewer of them fit.)
 *
 *     S = Q K^T, 32 keys at a time      P = exp2(S scale log2(e) - reference)      O += mask(P) V
 *
 * S and P stay in registers.
 *
 * Operations: 4 n m D a head. Bytes: qkv, out and lse once; keys and values again from L2 for every
 * 64 queries. Bound by memory and its latency at 100 to 400 keys, then by issue slots: about 20 an
 * element of the scores with dropout, nearly half of them Philox.
 *
 * Source: Dao, FlashAttention-2, arXiv:2307.08691, algorithm 1.
 */
#include "engine/ops/attention_mma.cuh"

/* BLOCKS an SM that registers must allow. */
template <int D> struct forward_shape {
    enum { BLOCKS = D == 128 ? 2 : 4, BYTES = tile_bytes(TILE * (1 + 2 * STAGES), D) };
};

/* Zero what dropout drops; @group is that of row g, @rows_8 groups on is row g + 8. */
__device__ static inline void drop_step(float (&s)[STEP / 8][4], const struct keep_start &keep,
                                        uint32_t group, uint32_t rows_8)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        struct philox r = keep_words(keep, group + (uint32_t)half * rows_8);
#pragma unroll
        for (int k = 0; k < 8; k++)
            if (!keep_lane(keep, r, k / 2, k % 2))
                s[k / 2][2 * half + k % 2] = 0.0f;
    }
}

template <int D>
__global__ static void __launch_bounds__(MMA_THREADS, forward_shape<D>::BLOCKS)
    mma_forward_kernel(struct attention_args a)
{
    constexpr int STAGE = 2 * TILE * D;
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
    const bf16 *base = (const bf16 *)a.qkv + x.first * stride;
    const bf16 *k = base + attention_column(a, 1, h), *v = base + attention_column(a, 2, h);
    struct tile_copy<D, ROWS_AS_KEYS> key_copy = tile_copy_make<D, ROWS_AS_KEYS>();
    tile_load(tile_copy_make<D, ROWS_IN_ORDER>(), queries,
              base + i0 * stride + attention_column(a, 0, h), stride, x.rows - i0);
    copies_commit();
    for (int n = 0; n < STAGES - 1; n++)
        key_stage_load<D>(key_copy, stages + n * STAGE, k, v, stride, n * TILE, x.keys);
    struct dropout_key key = dropout_key(a.drop);
    struct keep_start keep = keep_start(key, x.sample);
    uint32_t group = keep_group(x, a.q.positions, row + lane / 4, 0) + lane % 4;
    struct lane_places at = lane_places<D>();
    copies_wait<STAGES - 1>();
    __syncthreads();
    uint32_t left[D / 16][4];
    load_lefts<D>(left, queries, warp * 16, at);
    float o[D / 8][4] = {}, scale = a.scale * LOG2_E;
    struct softmax sum = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
    for (int tile = 0, j0 = 0; j0 < x.keys; tile++, j0 += TILE) {
        const bf16 *keys = stages + tile % STAGES * STAGE, *values = keys + TILE * D;
        copies_wait<STAGES - 2>();
        __syncthreads(); /* this stage is here, and nobody reads the one that is loaded next */
        key_stage_load<D>(key_copy, stages + (tile + STAGES - 1) % STAGES * STAGE, k, v, stride,
                          j0 + (STAGES - 1) * TILE, x.keys);
        int steps = row < x.rows ? min(TILE, x.keys - j0) : 0; /* a warp without rows only loads */
#pragma unroll 1
        for (int part = 0; part < steps; part += STEP) {
            float s[STEP / 8][4] = {};
            multiply_along<D>(s, left, keys, part, at);
            if (part + STEP > steps)
                mask_tail<STEP / 8>(s, steps - part);
            softmax_raise<D, STEP / 8>(sum, o, s, scale);
            softmax_step<STEP / 8>(sum, s, scale);
            if (keep.on)
                drop_step(s, keep, group + (uint32_t)(j0 + part) / 8, a.q.positions);
            multiply_down<D>(o, s, values, part, at);
        }
    }
    float factor[2];
    softmax_end(factor, sum, a, x, h, row, scale, key.on ? key.scale : 1.0f);
    store_rows<D>(out + x.first * a.channels + attention_column(a, 0, h), a.channels, queries,
                  warp * 16, o, row, x.rows, x.rows, factor[0], factor[1]);
}

template <int D> static enum status forward_open(void)
{
    return CUDA(cudaFuncSetAttribute(mma_forward_kernel<D>,
                                     cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     forward_shape<D>::BYTES));
}

enum status attention_mma_forward_open(void)
{
    TRY(forward_open<32>());
    TRY(forward_open<64>());
    return forward_open<128>();
}

template <int D> static enum status forward(struct stream *s, const struct attention_args *a)
{
    mma_forward_kernel<D>
        <<<attention_grid(a, TILE), MMA_THREADS, forward_shape<D>::BYTES, stream_cuda(s)>>>(*a);
    return CUDA(cudaGetLastError());
}

enum status attention_mma_forward(struct stream *s, const struct attention_args *a)
{
    return a->width == 32   ? forward<32>(s, a)
           : a->width == 64 ? forward<64>(s, a)
                            : forward<128>(s, a);
}
