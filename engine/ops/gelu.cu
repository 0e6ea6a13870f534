/*
 * engine/ops/gelu.cu - CUDA backend of gelu.h. Arithmetic in fp32.
 *
 * forward    two packs a thread, element i of the tensor once. Bytes: each element read and written
 *            once
 * backward   a block takes 32 packs of columns and COLUMN_ROWS rows (see cuda_common.cuh), so that
 *            it has its part of the bias gradient at hand. Bytes: two elements read, two written,
 *            and the partial sums
 *
 * Both are bound by memory: the normal distribution costs some 25 instructions an element, one of
 * them an exponential and one a reciprocal. erfcf() costs twice that and is what bounds then.
 */
#include "engine/ops/cuda_common.cuh"

enum { GELU_THREADS = 256, GELU_PACKS = 2, GELU_ROWS_AT_ONCE = 2 };

/*
 * Phi(x), the normal distribution, and phi(x), its density, as engine/ops/lanes.h has them:
 * Phi(-a) = exp(-a^2 / 2) t p(t) with t = 1 / (1 + a / 4). a^2 is not split here, so the relative
 * error of the tail grows as 2^-24 a^2 / 2.
 */
__device__ static inline void normal(float *distribution, float *density, float x)
{
    float a = fabsf(x), e = exp2f(a * a * -0.72134752f), t = __fdividef(1.0f, a * 0.25f + 1.0f);
    float p = t * 1.538360334e-2f - 5.63454643e-2f;
    p = p * t + 3.661525497e-2f;
    p = p * t + 4.831808338e-2f;
    p = p * t - 3.67795936e-3f;
    p = p * t + 9.537556828e-2f;
    p = p * t + 6.901163609e-2f;
    p = p * t + 9.615086467e-2f;
    p = p * t + 9.941662313e-2f;
    p = p * t + 9.975179219e-2f;
    float q = e * (p * t);
    *distribution = x < 0.0f ? q : 1.0f - q;
    *density = e * 0.398942280f;
}

template <typename E, int W>
__global__ static void gelu_forward_kernel(E *out, const E *pre, int64_t n)
{
    int64_t first = ((int64_t)blockIdx.x * GELU_PACKS * GELU_THREADS + threadIdx.x) * W;
    struct raw_pack<E, W> raw[GELU_PACKS];
#pragma unroll
    for (int k = 0; k < GELU_PACKS; k++)
        if (first + (int64_t)k * GELU_THREADS * W < n)
            load_raw(raw[k], pre + first + (int64_t)k * GELU_THREADS * W);
#pragma unroll
    for (int k = 0; k < GELU_PACKS; k++) {
        int64_t i = first + (int64_t)k * GELU_THREADS * W;
        float x[W], distribution, density;
        if (i >= n)
            return;
        unpack(x, raw[k]);
#pragma unroll
        for (int j = 0; j < W; j++) {
            normal(&distribution, &density, x[j]);
            x[j] *= distribution;
        }
        store_pack<E, W>(out + i, x);
    }
}

struct gelu_backward_args {
    void *dpre, *act;
    float *partial; /* (parts, columns); NULL: no bias gradient */
    const void *dout, *pre;
    int64_t rows, columns;
};

/* One pack: d becomes d gelu'(x), x becomes gelu(x), and the sum grows by d. */
template <int W>
__device__ inline void gelu_backward_pack(float (&d)[W], float (&x)[W], float (&sum)[W])
{
#pragma unroll
    for (int j = 0; j < W; j++) {
        float distribution, density;
        normal(&distribution, &density, x[j]);
        d[j] *= distribution + x[j] * density;
        x[j] *= distribution;
        sum[j] += d[j];
    }
}

/* Block (x, y): packs 32 x .. and rows COLUMN_ROWS y .. */
template <typename E, int W>
__global__ static void __launch_bounds__(COLUMN_THREADS, 4)
    gelu_backward_kernel(struct gelu_backward_args a)
{
    int64_t c0 = (int64_t)blockIdx.x * 32 * W, c = c0 + (threadIdx.x % 32) * W;
    int64_t row = (int64_t)blockIdx.y * COLUMN_ROWS + threadIdx.x / 32;
    int64_t end = min((int64_t)(blockIdx.y + 1) * COLUMN_ROWS, a.rows);
    float sum[W] = {0.0f};
    for (; c < a.columns && row < end; row += COLUMN_LANES * GELU_ROWS_AT_ONCE) {
        struct raw_pack<E, W> dout[GELU_ROWS_AT_ONCE], pre[GELU_ROWS_AT_ONCE];
#pragma unroll
        for (int k = 0; k < GELU_ROWS_AT_ONCE; k++) {
            int64_t at = (row + k * COLUMN_LANES) * a.columns + c;
            if (row + k * COLUMN_LANES >= end)
                break;
            load_raw(dout[k], (const E *)a.dout + at);
            load_raw(pre[k], (const E *)a.pre + at);
        }
#pragma unroll
        for (int k = 0; k < GELU_ROWS_AT_ONCE; k++) {
            int64_t at = (row + k * COLUMN_LANES) * a.columns + c;
            float d[W], x[W];
            if (row + k * COLUMN_LANES >= end)
                break;
            unpack(d, dout[k]);
            unpack(x, pre[k]);
            gelu_backward_pack<W>(d, x, sum);
            store_pack<E, W>((E *)a.dpre + at, d);
            store_pack<E, W>((E *)a.act + at, x);
        }
    }
    if (a.partial)
        columns_block<W>(sum, a.partial + blockIdx.y * a.columns, c0, a.columns, false);
}

template <typename E>
static enum status gelu_forward_any(struct stream *s, E *out, const E *pre, int64_t n)
{
    constexpr int W = full_pack<E>(), THREADS = GELU_THREADS * GELU_PACKS;
    if (n == 0)
        return ST_OK;
    if (packs_fit(n, sizeof(E), out, pre))
        gelu_forward_kernel<E, W>
            <<<(unsigned)div_up(n, THREADS * W), GELU_THREADS, 0, stream_cuda(s)>>>(out, pre, n);
    else
        gelu_forward_kernel<E, 1>
            <<<(unsigned)div_up(n, THREADS), GELU_THREADS, 0, stream_cuda(s)>>>(out, pre, n);
    return CUDA(cudaGetLastError());
}

template <typename E>
static enum status gelu_backward_any(struct stream *s, const struct gelu_backward_args *a)
{
    constexpr int W = full_pack<E>();
    unsigned parts = (unsigned)column_parts(a->rows);
    if (packs_fit(a->columns, sizeof(E), a->dpre, a->act, a->dout, a->pre))
        gelu_backward_kernel<E, W><<<dim3((unsigned)div_up(a->columns, 32 * W), parts),
                                     COLUMN_THREADS, 0, stream_cuda(s)>>>(*a);
    else
        gelu_backward_kernel<E, 1>
            <<<dim3((unsigned)div_up(a->columns, 32), parts), COLUMN_THREADS, 0, stream_cuda(s)>>>(
                *a);
    return CUDA(cudaGetLastError());
}

enum status cuda_gelu_forward(struct stream *s, struct tensor out, struct tensor pre)
{
    int64_t n = tensor_numel(out);
    if (out.dtype == DTYPE_BF16)
        return gelu_forward_any(s, (bf16 *)out.data, (const bf16 *)pre.data, n);
    return gelu_forward_any(s, (float *)out.data, (const float *)pre.data, n);
}

enum status cuda_gelu_backward(struct stream *s, struct tensor dpre, struct tensor act,
                               struct tensor dbias, struct tensor dout, struct tensor pre, bool add)
{
    int64_t rows = pre.shape[0], columns = pre.shape[1], parts = column_parts(rows);
    struct gelu_backward_args a = {dpre.data, act.data, NULL, dout.data, pre.data, rows, columns};
    void *partial = NULL;
    if (dbias.data)
        TRY(stream_scratch(&partial, s, (size_t)(parts * columns) * sizeof(float)));
    a.partial = (float *)partial;
    if (rows > 0 && columns > 0)
        TRY(dpre.dtype == DTYPE_BF16 ? gelu_backward_any<bf16>(s, &a)
                                     : gelu_backward_any<float>(s, &a));
    struct column_sets sets = {{(float *)dbias.data}, 1};
    return columns_finish(s, sets, a.partial, parts, columns, add);
}
