/*
 * engine/ops/attention_cuda.cuh - what the kinds of attention kernels share.
 *
 *   attention_wgmma_*.cu  Hopper's tensor cores: bf16, head widths 32 and 64
 *   attention_mma_*.cu    tensor cores: bf16, head widths 32, 64 and 128
 *   attention_plain.cu    one warp a row, fp32 arithmetic: fp32 tensors and all other widths
 *   attention.cu          the entries of the table, the choice between them
 *
 * The grid of all of them is (row tiles, heads, sequences + 1); the blocks past a sequence's rows
 * end at once, and the last slice writes the rows of no sequence. So the grid depends on the sizes
 * of the length class alone.
 */
#ifndef ENGINE_OPS_ATTENTION_CUDA_CUH
#define ENGINE_OPS_ATTENTION_CUDA_CUH

#include "engine/ops/cuda_common.cuh"

struct attention_args {
    const void *qkv; /* (T, 3C) */
    void *out;       /* (T, C), written by forward */
    float *lse;      /* (H, T), written by forward */
    const void *dout;
    void *dqkv;
    float *delta;       /* (H, T), rows of dout * out summed over a head; plain kernels */
    float2 *stats;      /* (H, T); this and keep: see attention_mma_backward.cu */
    uint8_t *keep;      /* (H, T, keep_pitch) */
    int64_t keep_pitch; /* bytes */
    float4 *parts;      /* (H, part_slots, 64 D / 4): see attention_wgmma_backward.cu */
    int64_t part_slots; /* and of drop.masks: (H, part_slots, 64, keep_pitch) */
    float *sums;        /* (sequences, 3C), parts of dqkv's sums over rows; NULL: none wanted */
    struct sequences q;
    int heads, width;
    int64_t channels;
    float scale; /* 1 / sqrt(D) */
    struct dropout drop;
};

/* One head of one sequence. */
struct attention_head {
    int64_t first; /* row of the batch */
    int rows, keys;
    uint32_t sample;
    uint64_t element; /* dropout element of (h, 0, 0) */
};

__device__ static inline struct attention_head attention_head(const struct attention_args &a, int b,
                                                              int h)
{
    struct attention_head x;
    x.first = a.q.cu_seqlens[b];
    x.rows = (int)(a.q.cu_seqlens[b + 1] - x.first);
    x.keys = a.q.kv_len[b];
    x.sample = (uint32_t)a.q.sample[b];
    x.element = (uint64_t)h * (uint64_t)a.q.positions * (uint64_t)a.q.positions;
    return x;
}

/* The sequence of a slice of the grid: blocks come in their order, so the longest go first. */
__device__ static inline int attention_sequence(const struct attention_args &a, int slice)
{
    return a.q.by_length ? a.q.by_length[slice] : slice;
}

/* Zeros in head h's columns of the rows of no sequence; @offset and @stride in elements of @out. */
template <typename E>
__device__ inline void attention_zero_rows(const struct attention_args &a, E *out, int64_t offset,
                                           int64_t stride, float *lse, int h)
{
    for (int64_t row = a.q.cu_seqlens[a.q.count] + blockIdx.x; row < a.q.rows; row += gridDim.x) {
        for (int d = threadIdx.x; d < a.width; d += blockDim.x)
            out[row * stride + offset + d] = from_float<E>(0.0f);
        if (lse && threadIdx.x == 0)
            lse[h * a.q.rows + row] = 0.0f;
    }
}

/* Heads side by side: where head h's query, key (1) or value (2) begins in a row of qkv. */
__device__ static inline int64_t attention_column(const struct attention_args &a, int part, int h)
{
    return part * a.channels + (int64_t)h * a.width;
}

/* Blocks of @rows rows of each head and sequence, and a slice for the rows of no sequence. */
static inline dim3 attention_grid(const struct attention_args *a, int rows)
{
    int64_t tiles = div_up(a->q.max_length, rows);
    return dim3((unsigned)(tiles > 0 ? tiles : 1), (unsigned)a->heads, (unsigned)a->q.count + 1);
}

enum status attention_wgmma_forward(struct stream *s, const struct attention_args *a);
enum status attention_wgmma_backward(struct stream *s, const struct attention_args *a);
enum status attention_mma_forward(struct stream *s, const struct attention_args *a);
enum status attention_mma_backward(struct stream *s, const struct attention_args *a);

enum { ATTENTION_PLAIN_WIDTH = 256 }; /* the widest head */
enum status attention_plain_forward(struct stream *s, const struct attention_args *a,
                                    enum dtype dtype);
enum status attention_plain_backward(struct stream *s, const struct attention_args *a,
                                     enum dtype dtype);

/* Allow the kernels their shared memory on the current GPU. */
enum status attention_wgmma_forward_open(void);
enum status attention_wgmma_backward_open(void);
enum status attention_mma_forward_open(void);
enum status attention_mma_backward_open(void);

/** attention_cuda_open() - all of these; at start. */
enum status attention_cuda_open(void);

#endif
