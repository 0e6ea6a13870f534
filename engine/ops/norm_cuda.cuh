/*
 * engine/ops/norm_cuda.cuh - what norm_forward.cu and norm_backward.cu share.
 *
 * THREADS threads hold one row in registers, CHUNKS packs of W elements each: pack k of thread t is
 * columns (k * THREADS + t) * W and on.
 */
#ifndef ENGINE_OPS_NORM_CUDA_CUH
#define ENGINE_OPS_NORM_CUDA_CUH

#include "engine/ops/cuda_common.cuh"

enum { NORM_MAX_COLUMNS = 8192 };

/* What all kernels here get; which fields are set depends on the op. */
struct norm_args {
    void *out, *z;               /* z is input of backward */
    float *stats;                /* (2, T) */
    const void *x, *y;           /* y: residual only */
    const void *position, *type; /* embedding only; type may be NULL */
    const void *gamma, *beta;
    const void *dout;
    void *dx, *dy;
    struct sequences q;
    int64_t channels;
    float eps;
    struct dropout drop;
};

/* The columns of pack k of this thread, among the THREADS that hold a row. */
template <int W, int THREADS> __device__ inline int64_t norm_column(int k)
{
    return ((int64_t)k * THREADS + threadIdx.x % THREADS) * W;
}

/* Which dropout elements a row has: those of its position in its sequence. */
__device__ static inline uint64_t norm_first_element(const struct norm_args &a, int64_t row, int b)
{
    return (uint64_t)(row - a.q.cu_seqlens[b]) * (uint64_t)a.channels;
}

/* A row of no sequence: zeros in up to two tensors and in the statistics. */
template <typename E, int W, int CHUNKS, int THREADS>
__device__ inline void norm_zero_row(const struct norm_args &a, void *first, void *second,
                                     float *stats, int64_t row)
{
    float zero[W] = {0.0f};
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        int64_t c = norm_column<W, THREADS>(k);
        if (c >= a.channels)
            break;
        if (first)
            store_pack<E, W>((E *)first + row * a.channels + c, zero);
        if (second)
            store_pack<E, W>((E *)second + row * a.channels + c, zero);
    }
    if (stats && threadIdx.x % THREADS == 0) {
        stats[row] = 0.0f;
        stats[a.q.rows + row] = 0.0f;
    }
}

/* May all tensors of the op be accessed 16 bytes at a time? */
static inline bool norm_packs(const struct norm_args *a, size_t elem_bytes)
{
    return packs_fit(a->channels, elem_bytes, a->out, a->z, a->x, a->y, a->dout) &&
           packs_fit(a->channels, elem_bytes, a->gamma, a->beta, a->position, a->type, a->dx,
                     a->dy);
}

static inline enum status norm_check(const struct norm_args *a)
{
    if (a->channels > NORM_MAX_COLUMNS)
        return FAIL(UNSUPPORTED, "a norm over %lld channels; at most %d on this device",
                    (long long)a->channels, (int)NORM_MAX_COLUMNS);
    return ST_OK;
}

#endif
