/*
 * engine/ops/gelu.cu - CUDA backend of gelu.h. Arithmetic in fp32.
 *
 * forward    two packs a thread, element i of the tensor once. Bytes: each element read and written
 *            once
 * backward   a block takes 32 packs of columns and COLUMN_ROWS rows (see cuda_common.cuh), so that
 *            it has its part of the bias gradient at hand. Bytes: two elements read, two written
 *            (one where act is not wanted), and the partial sums
 *
 * Both are bound by memory if the normal distribution is cheap enough: in the time that an H200
 * takes to read and write a bf16 element it issues 27 instructions for one. With ten terms and the
 * library's exponential, forward was measured at 29, and bound by them.
 */
#include "engine/ops/cuda_common.cuh"

enum { GELU_THREADS = 256, GELU_PACKS = 2, GELU_ROWS_AT_ONCE = 2 };

/*
 * The tail of the normal distribution as engine/ops/lanes.h has it:
 *
 *     Phi(-a) = exp(-a^2 / 2) t p(t),  t = 1 / (1 + k a),  a >= 0
 *
 * with as many terms as the result deserves: 10 for fp32 (relative error 2^-24), 7 for bf16 and its
 * sums in a bias gradient (2^-20.3). The shorter one is fitted to the smallest relative error over
 * 0 <= a <= 13.5, with the best k of a dozen. Forward and backward have the same terms, so that
 * gelu(pre) has the same bits in both. a^2 is not split here, so the relative error of the tail
 * grows as 2^-24 a^2 / 2.
 */
enum gelu_terms { GELU_BF16 = 7, GELU_F32 = 10 };

template <int TERMS> __device__ inline float tail_scale()
{
    return TERMS == GELU_BF16 ? 0.36f : 0.25f;
}

/* p(t) */
template <int TERMS> __device__ inline float tail_terms(float t)
{
    if constexpr (TERMS == GELU_BF16) {
        float p = t * 4.734455982e-2f - 1.807516278e-1f;
        p = p * t + 1.822975653e-1f;
        p = p * t + 2.562383261e-2f;
        p = p * t + 1.400574250e-1f;
        p = p * t + 1.417106705e-1f;
        return p * t + 1.437174352e-1f;
    } else {
        float p = t * 1.538360334e-2f - 5.63454643e-2f;
        p = p * t + 3.661525497e-2f;
        p = p * t + 4.831808338e-2f;
        p = p * t - 3.67795936e-3f;
        p = p * t + 9.537556828e-2f;
        p = p * t + 6.901163609e-2f;
        p = p * t + 9.615086467e-2f;
        p = p * t + 9.941662313e-2f;
        return p * t + 9.975179219e-2f;
    }
}

/* Phi(-|x|), and exp(-x^2 / 2). Exponential and reciprocal are the card's own, 2^-22. */
template <int TERMS> __device__ inline float normal_tail(float x, float *exponential)
{
    float e, t;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * x * -0.72134752f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(fabsf(x) * tail_scale<TERMS>() + 1.0f));
    *exponential = e;
    return e * (tail_terms<TERMS>(t) * t);
}

/* x Phi(x), from Phi(-|x|) */
__device__ static inline float gelu_of(float x, float tail)
{
    return fmaxf(x, 0.0f) - fabsf(x) * tail;
}

template <typename E, int W>
__global__ static void gelu_forward_kernel(E *out, const E *pre, int64_t n)
{
    constexpr int TERMS = sizeof(E) == sizeof(float) ? GELU_F32 : GELU_BF16;
    int64_t first = ((int64_t)blockIdx.x * GELU_PACKS * GELU_THREADS + threadIdx.x) * W;
    struct raw_pack<E, W> raw[GELU_PACKS];
    kernel_begin();
#pragma unroll
    for (int k = 0; k < GELU_PACKS; k++)
        if (first + (int64_t)k * GELU_THREADS * W < n)
            load_raw(raw[k], pre + first + (int64_t)k * GELU_THREADS * W);
#pragma unroll
    for (int k = 0; k < GELU_PACKS; k++) {
        int64_t i = first + (int64_t)k * GELU_THREADS * W;
        float x[W], exponential;
        if (i >= n)
            return;
        unpack(x, raw[k]);
#pragma unroll
        for (int j = 0; j < W; j++)
            x[j] = gelu_of(x[j], normal_tail<TERMS>(x[j], &exponential));
        store_pack<E, W>(out + i, x);
    }
}

struct gelu_backward_args {
    void *dpre, *act; /* act NULL: not wanted */
    float *partial;   /* (parts, columns); NULL: no bias gradient */
    const void *dout, *pre;
    int64_t rows, columns;
};

/* One pack: d becomes d gelu'(x), x becomes gelu(x), and the sum grows by d. */
template <int TERMS, int W>
__device__ inline void gelu_backward_pack(float (&d)[W], float (&x)[W], float (&sum)[W])
{
#pragma unroll
    for (int j = 0; j < W; j++) {
        float exponential, tail = normal_tail<TERMS>(x[j], &exponential);
        float distribution = x[j] < 0.0f ? tail : 1.0f - tail;
        d[j] *= distribution + x[j] * exponential * 0.398942280f;
        x[j] = gelu_of(x[j], tail);
        sum[j] += d[j];
    }
}

/* Block (x, y): packs 32 x .. and rows COLUMN_ROWS y .. */
template <typename E, int W>
__global__ static void __launch_bounds__(COLUMN_THREADS, 4)
    gelu_backward_kernel(struct gelu_backward_args a)
{
    constexpr int TERMS = sizeof(E) == sizeof(float) ? GELU_F32 : GELU_BF16;
    int64_t c0 = (int64_t)blockIdx.x * 32 * W, c = c0 + (threadIdx.x % 32) * W;
    int64_t row = (int64_t)blockIdx.y * COLUMN_ROWS + threadIdx.x / 32;
    int64_t end = min((int64_t)(blockIdx.y + 1) * COLUMN_ROWS, a.rows);
    float sum[W] = {0.0f};
    kernel_begin();
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
            gelu_backward_pack<TERMS, W>(d, x, sum);
            store_pack<E, W>((E *)a.dpre + at, d);
            if (a.act)
                store_pack<E, W>((E *)a.act + at, x);
        }
    }
    if (a.partial)
        columns_block<W>(sum, a.partial + blockIdx.y * a.columns, c0, a.columns, false);
}

template <typename E>
static enum status gelu_forward_any(struct stream *s, E *out, const E *pre, int64_t n)
{
    constexpr int W = full_pack<E>(), BLOCK = GELU_THREADS * GELU_PACKS;
    if (n == 0)
        return ST_OK;
    if (packs_fit(n, sizeof(E), out, pre))
        return launch_kernel(s, dim3((unsigned)div_up(n, BLOCK * W)), GELU_THREADS,
                             gelu_forward_kernel<E, W>, out, pre, n);
    return launch_kernel(s, dim3((unsigned)div_up(n, BLOCK)), GELU_THREADS,
                         gelu_forward_kernel<E, 1>, out, pre, n);
}

template <typename E>
static enum status gelu_backward_any(struct stream *s, const struct gelu_backward_args *a)
{
    constexpr int W = full_pack<E>();
    unsigned parts = (unsigned)column_parts(a->rows);
    if (packs_fit(a->columns, sizeof(E), a->dpre, a->act, a->dout, a->pre))
        return launch_kernel(s, dim3((unsigned)div_up(a->columns, 32 * W), parts), COLUMN_THREADS,
                             gelu_backward_kernel<E, W>, *a);
    return launch_kernel(s, dim3((unsigned)div_up(a->columns, 32), parts), COLUMN_THREADS,
                         gelu_backward_kernel<E, 1>, *a);
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
    if (dbias.data)
        TRY(columns_reserve(&a.partial, s, parts * columns));
    if (rows > 0 && columns > 0)
        TRY(dpre.dtype == DTYPE_BF16 ? gelu_backward_any<bf16>(s, &a)
                                     : gelu_backward_any<float>(s, &a));
    struct column_sets sets = {{(float *)dbias.data}, 1};
    return columns_finish(s, sets, a.partial, parts, columns, add);
}
