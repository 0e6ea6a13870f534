/*
 * engine/ops/attention.cu - CUDA backend of attention.h: checks, choice of kernels, delta.
 */
#include "engine/ops/attention_cuda.cuh"

enum { DELTA_WARPS = 8 };

/* delta (H, T) = dout . out per row and head; one warp each. Bytes: both tensors once. */
template <typename E> __global__ static void attention_delta_kernel(struct attention_args a)
{
    int64_t n = (int64_t)blockIdx.x * DELTA_WARPS + threadIdx.x / 32;
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

static struct attention_args attention_args(struct tensor qkv, struct tensor out, struct tensor lse,
                                            const struct sequences *q, int heads,
                                            struct dropout drop)
{
    struct attention_args a = {};
    a.qkv = qkv.data;
    a.out = out.data;
    a.lse = (float *)lse.data;
    a.q = *q;
    a.heads = heads;
    a.channels = out.shape[1];
    a.width = (int)(a.channels / heads);
    a.scale = 1.0f / sqrtf((float)a.width);
    a.drop = drop;
    return a;
}

static enum status attention_check(const struct attention_args *a)
{
    if (a->width > ATTENTION_PLAIN_WIDTH)
        return FAIL(UNSUPPORTED, "attention heads of width %d; at most %d on this device", a->width,
                    (int)ATTENTION_PLAIN_WIDTH);
    return ST_OK;
}

enum status cuda_attention_forward(struct stream *s, struct tensor out, struct tensor lse,
                                   struct tensor qkv, const struct sequences *q, int heads,
                                   struct dropout drop)
{
    struct attention_args a = attention_args(qkv, out, lse, q, heads, drop);
    TRY(attention_check(&a));
    if (q->rows == 0)
        return ST_OK;
    if (attention_mma_fits(&a, qkv.dtype))
        return attention_mma_forward(s, &a);
    return attention_plain_forward(s, &a, qkv.dtype);
}

enum status cuda_attention_backward(struct stream *s, struct tensor dqkv, struct tensor dout,
                                    struct tensor out, struct tensor lse, struct tensor qkv,
                                    const struct sequences *q, int heads, struct dropout drop)
{
    struct attention_args a = attention_args(qkv, out, lse, q, heads, drop);
    void *delta;
    a.dout = dout.data;
    a.dqkv = dqkv.data;
    TRY(attention_check(&a));
    if (q->rows == 0)
        return ST_OK;
    TRY(stream_scratch(&delta, s, (size_t)(q->rows * heads) * sizeof(float)));
    a.delta = (float *)delta;
    unsigned blocks = (unsigned)div_up(q->rows * heads, DELTA_WARPS);
    if (qkv.dtype == DTYPE_BF16)
        attention_delta_kernel<bf16><<<blocks, DELTA_WARPS * 32, 0, stream_cuda(s)>>>(a);
    else
        attention_delta_kernel<float><<<blocks, DELTA_WARPS * 32, 0, stream_cuda(s)>>>(a);
    TRY(CUDA(cudaGetLastError()));
    if (attention_mma_fits(&a, qkv.dtype))
        return attention_mma_backward(s, &a);
    return attention_plain_backward(s, &a, qkv.dtype);
}
