/*
 * engine/ops/gelu.cu - CUDA backend of gelu.h. Arithmetic in fp32.
 *
 * One pack a thread, element i of the tensor once. Bytes: forward reads and writes each element
 * once, backward reads two and writes one; both are bound by memory.
 */
#include "engine/ops/cuda_common.cuh"

enum { GELU_THREADS = 256 };

/* Phi(x), the normal distribution function; erfc keeps the tail of negative x exact. */
__device__ static inline float normal_cdf(float x)
{
    return 0.5f * erfcf(-0.70710678118654752f * x);
}

template <typename E, int W>
__global__ static void gelu_forward_kernel(E *out, const E *pre, int64_t n)
{
    int64_t i = ((int64_t)blockIdx.x * GELU_THREADS + threadIdx.x) * W;
    if (i >= n)
        return;
    float x[W];
    load_pack<E, W>(x, pre + i);
#pragma unroll
    for (int k = 0; k < W; k++)
        x[k] = x[k] * normal_cdf(x[k]);
    store_pack<E, W>(out + i, x);
}

/* gelu'(x) = Phi(x) + x phi(x), phi the normal density. */
template <typename E, int W>
__global__ static void gelu_backward_kernel(E *dpre, const E *dout, const E *pre, int64_t n)
{
    int64_t i = ((int64_t)blockIdx.x * GELU_THREADS + threadIdx.x) * W;
    if (i >= n)
        return;
    float x[W], d[W];
    load_pack<E, W>(x, pre + i);
    load_pack<E, W>(d, dout + i);
#pragma unroll
    for (int k = 0; k < W; k++) {
        float density = 0.39894228040143268f * expf(-0.5f * x[k] * x[k]);
        d[k] *= normal_cdf(x[k]) + x[k] * density;
    }
    store_pack<E, W>(dpre + i, d);
}

static unsigned gelu_blocks(int64_t n, int pack)
{
    return (unsigned)div_up(n, (int64_t)GELU_THREADS * pack);
}

template <typename E>
static enum status gelu_forward_any(struct stream *s, E *out, const E *pre, int64_t n)
{
    constexpr int W = full_pack<E>();
    if (n == 0)
        return ST_OK;
    if (packs_fit(n, sizeof(E), out, pre))
        gelu_forward_kernel<E, W>
            <<<gelu_blocks(n, W), GELU_THREADS, 0, stream_cuda(s)>>>(out, pre, n);
    else
        gelu_forward_kernel<E, 1>
            <<<gelu_blocks(n, 1), GELU_THREADS, 0, stream_cuda(s)>>>(out, pre, n);
    return CUDA(cudaGetLastError());
}

template <typename E>
static enum status gelu_backward_any(struct stream *s, E *dpre, const E *dout, const E *pre,
                                     int64_t n)
{
    constexpr int W = full_pack<E>();
    if (n == 0)
        return ST_OK;
    if (packs_fit(n, sizeof(E), dpre, dout, pre))
        gelu_backward_kernel<E, W>
            <<<gelu_blocks(n, W), GELU_THREADS, 0, stream_cuda(s)>>>(dpre, dout, pre, n);
    else
        gelu_backward_kernel<E, 1>
            <<<gelu_blocks(n, 1), GELU_THREADS, 0, stream_cuda(s)>>>(dpre, dout, pre, n);
    return CUDA(cudaGetLastError());
}

enum status cuda_gelu_forward(struct stream *s, struct tensor out, struct tensor pre)
{
    int64_t n = tensor_numel(out);
    if (out.dtype == DTYPE_BF16)
        return gelu_forward_any(s, (bf16 *)out.data, (const bf16 *)pre.data, n);
    return gelu_forward_any(s, (float *)out.data, (const float *)pre.data, n);
}

enum status cuda_gelu_backward(struct stream *s, struct tensor dpre, struct tensor dout,
                               struct tensor pre)
{
    int64_t n = tensor_numel(dpre);
    if (dpre.dtype == DTYPE_BF16)
        return gelu_backward_any(s, (bf16 *)dpre.data, (const bf16 *)dout.data,
                                 (const bf16 *)pre.data, n);
    return gelu_backward_any(s, (float *)dpre.data, (const float *)dout.data,
                             (const float *)pre.data, n);
}
