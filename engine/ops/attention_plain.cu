/*
 * engine/ops/attention_plain.cu - attention with one warp a row, for fp32 and odd head widths.
 *
 * A warp takes 32 partners of its row at a time: each lane computes the score of one partner, then
 * the lanes share the columns of the head and add the 32 weighted rows in order. Arithmetic is fp32
 * throughout. Written to be right at any size, not to be fast.
 */
#include "engine/ops/attention_cuda.cuh"

enum { PLAIN_WARPS = 4, PLAIN_SLICES = ATTENTION_PLAIN_WIDTH / 32 };

/* A row of a head as floats in this warp's shared memory. */
template <typename E> __device__ inline void plain_load(float *to, const E *from, int width)
{
    for (int d = threadIdx.x % 32; d < width; d += 32)
        to[d] = to_float(from[d]);
    __syncwarp();
}

template <typename E> __device__ inline float plain_dot(const float *x, const E *y, int width)
{
    float sum = 0.0f;
    for (int d = 0; d < width; d++)
        sum += x[d] * to_float(y[d]);
    return sum;
}

/* sum[] += the @count rows at @rows, row n weighted by lane n's @weight; column 32 k + lane. */
template <typename E>
__device__ inline void plain_add(float (&sum)[PLAIN_SLICES], float weight, const E *rows,
                                 int64_t stride, int count, int width)
{
    int lane = threadIdx.x % 32;
    for (int n = 0; n < count; n++) {
        float w = __shfl_sync(0xFFFFFFFFu, weight, n);
#pragma unroll
        for (int k = 0; k < PLAIN_SLICES; k++)
            if (k * 32 + lane < width)
                sum[k] += w * to_float(rows[n * stride + k * 32 + lane]);
    }
}

template <typename E>
__device__ inline void plain_store(E *to, const float (&sum)[PLAIN_SLICES], float factor, int width)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < PLAIN_SLICES; k++)
        if (k * 32 + lane < width)
            to[k * 32 + lane] = from_float<E>(sum[k] * factor);
}

template <typename E> __global__ static void plain_forward_kernel(struct attention_args a)
{
    __shared__ float query[PLAIN_WARPS][ATTENTION_PLAIN_WIDTH];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, h = blockIdx.y, b = blockIdx.z;
    int i = blockIdx.x * PLAIN_WARPS + warp;
    E *out = (E *)a.out;
    if (b == a.q.count) {
        attention_zero_rows(a, out, attention_column(a, 0, h), a.channels, a.lse, h);
        return;
    }
    struct attention_head x = attention_head(a, b, h);
    if (i >= x.rows)
        return;
    struct dropout_key key = dropout_key(a.drop);
    int64_t stride = 3 * a.channels;
    const E *base = (const E *)a.qkv + x.first * stride;
    plain_load(query[warp], base + i * stride + attention_column(a, 0, h), a.width);
    float sum[PLAIN_SLICES] = {0.0f}, most = -INFINITY, total = 0.0f;
    for (int j0 = 0; j0 < x.keys; j0 += 32) {
        int j = j0 + lane, count = min(32, x.keys - j0);
        float s = -INFINITY;
        if (lane < count)
            s = a.scale *
                plain_dot(query[warp], base + j * stride + attention_column(a, 1, h), a.width);
        float next = fmaxf(most, warp_max(s)), shrink = expf(most - next);
        float p = lane < count ? expf(s - next) : 0.0f;
        total = total * shrink + warp_sum(p);
        most = next;
        if (key.on && !dropout_keeps(key, x.sample, x.element + (uint64_t)i * a.q.positions + j))
            p = 0.0f;
#pragma unroll
        for (int k = 0; k < PLAIN_SLICES; k++)
            sum[k] *= shrink;
        plain_add(sum, p, base + j0 * stride + attention_column(a, 2, h), stride, count, a.width);
    }
    float factor = x.keys > 0 ? (key.on ? key.scale : 1.0f) / total : 0.0f;
    plain_store(out + (x.first + i) * a.channels + attention_column(a, 0, h), sum, factor, a.width);
    if (lane == 0)
        a.lse[h * a.q.rows + x.first + i] = x.keys > 0 ? most + logf(total) : 0.0f;
}

/* delta of a row and head; one warp each. */
template <typename E> __global__ static void plain_delta_kernel(struct attention_args a)
{
    int64_t n = (int64_t)blockIdx.x * PLAIN_WARPS + threadIdx.x / 32;
    int64_t row = n / a.heads, h = n % a.heads;
    if (row >= a.q.rows)
        return;
    const E *dout = (const E *)a.dout + row * a.channels + h * a.width;
    const E *out = (const E *)a.out + row * a.channels + h * a.width;
    float sum = 0.0f;
    for (int d = threadIdx.x % 32; d < a.width; d += 32)
        sum += to_float(dout[d]) * to_float(out[d]);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0)
        a.delta[h * a.q.rows + row] = sum;
}

/* One warp a query row. */
template <typename E> __global__ static void plain_dq_kernel(struct attention_args a)
{
    __shared__ float query[PLAIN_WARPS][ATTENTION_PLAIN_WIDTH];
    __shared__ float dout[PLAIN_WARPS][ATTENTION_PLAIN_WIDTH];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, h = blockIdx.y, b = blockIdx.z;
    int i = blockIdx.x * PLAIN_WARPS + warp;
    int64_t stride = 3 * a.channels;
    if (b == a.q.count) {
        attention_zero_rows(a, (E *)a.dqkv, attention_column(a, 0, h), stride, NULL, h);
        return;
    }
    struct attention_head x = attention_head(a, b, h);
    if (i >= x.rows)
        return;
    struct dropout_key key = dropout_key(a.drop);
    const E *base = (const E *)a.qkv + x.first * stride;
    plain_load(query[warp], base + i * stride + attention_column(a, 0, h), a.width);
    plain_load(dout[warp],
               (const E *)a.dout + (x.first + i) * a.channels + attention_column(a, 0, h), a.width);
    float lse = a.lse[h * a.q.rows + x.first + i], delta = a.delta[h * a.q.rows + x.first + i];
    float sum[PLAIN_SLICES] = {0.0f};
    for (int j0 = 0; j0 < x.keys; j0 += 32) {
        int j = j0 + lane, count = min(32, x.keys - j0);
        float ds = 0.0f;
        if (lane < count) {
            const E *row = base + j * stride;
            float s = a.scale * plain_dot(query[warp], row + attention_column(a, 1, h), a.width);
            float dp = plain_dot(dout[warp], row + attention_column(a, 2, h), a.width);
            if (key.on)
                dp = dropout_keeps(key, x.sample, x.element + (uint64_t)i * a.q.positions + j)
                         ? dp * key.scale
                         : 0.0f;
            ds = expf(s - lse) * (dp - delta);
        }
        plain_add(sum, ds, base + j0 * stride + attention_column(a, 1, h), stride, count, a.width);
    }
    plain_store((E *)a.dqkv + (x.first + i) * stride + attention_column(a, 0, h), sum, a.scale,
                a.width);
}

/* One warp a key row. */
template <typename E> __global__ static void plain_dkv_kernel(struct attention_args a)
{
    __shared__ float ks[PLAIN_WARPS][ATTENTION_PLAIN_WIDTH];
    __shared__ float vs[PLAIN_WARPS][ATTENTION_PLAIN_WIDTH];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, h = blockIdx.y, b = blockIdx.z;
    int j = blockIdx.x * PLAIN_WARPS + warp;
    int64_t stride = 3 * a.channels;
    if (b == a.q.count) {
        attention_zero_rows(a, (E *)a.dqkv, attention_column(a, 1, h), stride, NULL, h);
        attention_zero_rows(a, (E *)a.dqkv, attention_column(a, 2, h), stride, NULL, h);
        return;
    }
    struct attention_head x = attention_head(a, b, h);
    if (j >= x.rows)
        return;
    struct dropout_key key = dropout_key(a.drop);
    const E *base = (const E *)a.qkv + x.first * stride;
    const E *dout = (const E *)a.dout + x.first * a.channels + attention_column(a, 0, h);
    const float *lse = a.lse + h * a.q.rows + x.first, *delta = a.delta + h * a.q.rows + x.first;
    plain_load(ks[warp], base + j * stride + attention_column(a, 1, h), a.width);
    plain_load(vs[warp], base + j * stride + attention_column(a, 2, h), a.width);
    float dk[PLAIN_SLICES] = {0.0f}, dv[PLAIN_SLICES] = {0.0f};
    for (int i0 = 0; j < x.keys && i0 < x.rows; i0 += 32) {
        int i = i0 + lane, count = min(32, x.rows - i0);
        float ds = 0.0f, pd = 0.0f;
        if (lane < count) {
            const E *query = base + i * stride + attention_column(a, 0, h);
            float p = expf(a.scale * plain_dot(ks[warp], query, a.width) - lse[i]);
            float dp = plain_dot(vs[warp], dout + i * a.channels, a.width), factor = 1.0f;
            if (key.on)
                factor = dropout_keeps(key, x.sample, x.element + (uint64_t)i * a.q.positions + j)
                             ? key.scale
                             : 0.0f;
            pd = p * factor;
            ds = p * (dp * factor - delta[i]);
        }
        plain_add(dk, ds, base + i0 * stride + attention_column(a, 0, h), stride, count, a.width);
        plain_add(dv, pd, dout + i0 * a.channels, a.channels, count, a.width);
    }
    E *to = (E *)a.dqkv + (x.first + j) * stride;
    plain_store(to + attention_column(a, 1, h), dk, a.scale, a.width);
    plain_store(to + attention_column(a, 2, h), dv, 1.0f, a.width);
}

enum status attention_plain_forward(struct stream *s, const struct attention_args *a,
                                    enum dtype dtype)
{
    if (dtype == DTYPE_BF16)
        plain_forward_kernel<bf16>
            <<<attention_grid(a, PLAIN_WARPS), PLAIN_WARPS * 32, 0, stream_cuda(s)>>>(*a);
    else
        plain_forward_kernel<float>
            <<<attention_grid(a, PLAIN_WARPS), PLAIN_WARPS * 32, 0, stream_cuda(s)>>>(*a);
    return CUDA(cudaGetLastError());
}

template <typename E>
static enum status plain_backward(struct stream *s, const struct attention_args *a)
{
    unsigned blocks = (unsigned)div_up(a->q.rows * a->heads, PLAIN_WARPS);
    plain_delta_kernel<E><<<blocks, PLAIN_WARPS * 32, 0, stream_cuda(s)>>>(*a);
    TRY(CUDA(cudaGetLastError()));
    dim3 grid = attention_grid(a, PLAIN_WARPS);
    plain_dkv_kernel<E><<<grid, PLAIN_WARPS * 32, 0, stream_cuda(s)>>>(*a);
    TRY(CUDA(cudaGetLastError()));
    plain_dq_kernel<E><<<grid, PLAIN_WARPS * 32, 0, stream_cuda(s)>>>(*a);
    return CUDA(cudaGetLastError());
}

enum status attention_plain_backward(struct stream *s, const struct attention_args *a,
                                     enum dtype dtype)
{
    return dtype == DTYPE_BF16 ? plain_backward<bf16>(s, a) : plain_backward<float>(s, a);
}
