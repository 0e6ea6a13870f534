/*
 * engine/ops/adamw.cu - CUDA backend of adamw.h: one kernel over a flat shard.
 *
 * Four neighbouring elements a thread, in one access each where they lie in one range. Bytes an
 * element: 16 read (both halves of the master, or parameters of fp32; m, v, grad), 12 written:
 * memory-bound. Rows of a table that no token has met have m and v of zero, which are not written
 * again, and of a marked row the gradient is not read.
 * The scalars come from the step state on the device, so that a captured step can be replayed.
 */
#include "engine/ops/adamw.h"

#include "engine/ops/cuda_common.cuh"
#include "engine/ops/embedding.h"
#include "engine/ops/master.h"

enum { ADAM_THREADS = 256 };

struct adam_args {
    void *param;   /* floats, or upper halves */
    uint16_t *low; /* the lower ones */
    float *m, *v;
    const float *grad;
    int64_t n;
    const struct step_state *state;
    struct optim_hyper hyper;
    struct adam_range range[ADAM_MAX_RANGES];
    int range_count;
    int64_t row_numel;  /* 0: no row is marked */
    uint32_t row_packs; /* the same, of four */
    bool packs;
};

/* Rounded as written: how a compiler fuses the formula is no part of the state of a run. The root
 * and the quotient are the card's approximations, a unit in the last place each, with a step of
 * Newton's for the second: exact ones take more instructions than there is time while memory works.
 */
__device__ static inline void adam_element(float &p, float &m, float &v, float grad,
                                           const struct adam_factors &f, float keep)
{
    float g = __fmul_rn(grad, f.clip);
    m = __fmaf_rn(f.one_minus_beta1, __fadd_rn(g, -m), m);
    v = __fmaf_rn(v, f.beta2, __fmul_rn(__fmul_rn(f.one_minus_beta2, g), g));
    float root, inverse;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(v));
    float denominator = __fmaf_rn(root, f.inverse_root, f.eps);
    asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(denominator));
    inverse = __fmaf_rn(__fmaf_rn(-denominator, inverse, 1.0f), inverse, inverse);
    p = __fmaf_rn(p, keep, -__fmul_rn(__fmul_rn(f.step_size, m), inverse));
}

/* Are a pack's m, v and gradient zero? Then the first two stay so. */
__device__ static inline bool adam_unmet(const float (&m)[4], const float (&v)[4],
                                         const float (&g)[4])
{
    uint32_t bits = 0;
#pragma unroll
    for (int k = 0; k < 4; k++)
        bits |= __float_as_uint(m[k]) | __float_as_uint(v[k]) | __float_as_uint(g[k]) << 1;
    return bits == 0;
}

/* The range of element @i; -1 when none has it. */
__device__ static inline int adam_find(const struct adam_args &a, int64_t i)
{
    for (int r = 0; r < a.range_count; r++)
        if (i < a.range[r].first + a.range[r].count)
            return i >= a.range[r].first ? r : -1;
    return -1;
}

/* Is the row of element @i marked? Four elements of a row are in one pack. */
__device__ static inline bool adam_marked(const struct adam_args &a, int64_t i)
{
    if (a.row_packs == 0)
        return false;
    uint32_t row = (uint32_t)(i / 4) / a.row_packs;
    return row_is_marked(a.grad + (int64_t)row * a.row_packs * 4);
}

/* Four master weights as they lie in memory; @HALVES: two upper ones in a word, then the lower. */
template <bool HALVES> struct adam_pack {
    uint32_t word[4];
};

template <bool HALVES>
__device__ static inline void adam_load(struct adam_pack<HALVES> &x, const struct adam_args &a,
                                        int64_t i)
{
    if constexpr (HALVES) {
        uint2 high = *(const uint2 *)((const uint16_t *)a.param + i);
        uint2 low = *(const uint2 *)(a.low + i);
        x.word[0] = high.x;
        x.word[1] = high.y;
        x.word[2] = low.x;
        x.word[3] = low.y;
    } else {
        uint4 whole = *(const uint4 *)((const float *)a.param + i);
        x.word[0] = whole.x;
        x.word[1] = whole.y;
        x.word[2] = whole.z;
        x.word[3] = whole.w;
    }
}

template <bool HALVES>
__device__ static inline void adam_unpack(float (&p)[4], const struct adam_pack<HALVES> &x)
{
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t high = x.word[k / 2] >> 16 * (k % 2), low = x.word[2 + k / 2] >> 16 * (k % 2);
        p[k] = __uint_as_float(HALVES ? master_bits((uint16_t)high, (uint16_t)low) : x.word[k]);
    }
}

template <bool HALVES>
__device__ static inline void adam_store(const struct adam_args &a, int64_t i, const float (&p)[4])
{
    uint32_t bits[4];
#pragma unroll
    for (int k = 0; k < 4; k++)
        bits[k] = __float_as_uint(p[k]);
    if constexpr (HALVES) {
        uint32_t high[2], low[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            high[k] = master_high(bits[2 * k]) | (uint32_t)master_high(bits[2 * k + 1]) << 16;
            low[k] = master_low(bits[2 * k]) | (uint32_t)master_low(bits[2 * k + 1]) << 16;
        }
        *(uint2 *)((uint16_t *)a.param + i) = make_uint2(high[0], high[1]);
        *(uint2 *)(a.low + i) = make_uint2(low[0], low[1]);
    } else {
        *(uint4 *)((float *)a.param + i) = make_uint4(bits[0], bits[1], bits[2], bits[3]);
    }
}

/* One element, its master weight and all. */
template <bool HALVES>
__device__ static inline void adam_alone(const struct adam_args &a, int64_t i, float grad,
                                         const struct adam_factors &f, float keep)
{
    if constexpr (HALVES) {
        uint16_t *high = (uint16_t *)a.param;
        float p = __uint_as_float(master_bits(high[i], a.low[i]));
        adam_element(p, a.m[i], a.v[i], grad, f, keep);
        high[i] = master_high(__float_as_uint(p));
        a.low[i] = master_low(__float_as_uint(p));
    } else {
        adam_element(((float *)a.param)[i], a.m[i], a.v[i], grad, f, keep);
    }
}

template <bool HALVES> __global__ static void adamw_kernel(struct adam_args a)
{
    int64_t i = ((int64_t)blockIdx.x * ADAM_THREADS + threadIdx.x) * 4;
    __shared__ struct adam_factors f; /* made once a block: it takes divisions in double */
    kernel_begin();
    int32_t skip = a.state->skip;
    int r = i < a.n ? adam_find(a, i) : -1;
    bool pack = a.packs && r >= 0 && i + 4 <= a.range[r].first + a.range[r].count;
    struct adam_pack<HALVES> master;
    float p[4], m[4], v[4], g[4] = {0.0f};
    if (pack) { /* on their way while the factors are made */
        adam_load(master, a, i);
        load_pack<float, 4>(m, a.m + i);
        load_pack<float, 4>(v, a.v + i);
        if (!adam_marked(a, i)) /* behind these, for the answer takes as long as they do */
            load_pack<float, 4>(g, a.grad + i);
    }
    if (skip)
        return;
    if (threadIdx.x == 0)
        f = adam_factors(a.state, &a.hyper);
    __syncthreads();
    if (i >= a.n)
        return;
    if (pack) {
        float keep = a.range[r].decay ? f.keep : 1.0f;
        if (a.range[r].frozen)
            return;
        bool unmet = adam_unmet(m, v, g);
        adam_unpack(p, master);
#pragma unroll
        for (int k = 0; k < 4; k++)
            adam_element(p[k], m[k], v[k], g[k], f, keep);
        adam_store<HALVES>(a, i, p);
        if (!unmet) {
            store_pack<float, 4>(a.m + i, m);
            store_pack<float, 4>(a.v + i, v);
        }
        return;
    }
    for (int64_t end = min(i + 4, a.n); i < end; i++) {
        r = adam_find(a, i);
        if (r < 0 || a.range[r].frozen)
            continue;
        bool marked = a.row_numel > 0 && row_is_marked(a.grad + i / a.row_numel * a.row_numel);
        float grad = marked ? 0.0f : a.grad[i];
        adam_alone<HALVES>(a, i, grad, f, a.range[r].decay ? f.keep : 1.0f);
    }
}

enum status cuda_adamw(struct stream *s, struct tensor param, struct tensor low, struct tensor m,
                       struct tensor v, struct tensor grad, const struct adam_range *ranges,
                       int range_count, int64_t row_numel, const struct step_state *state,
                       const struct optim_hyper *hyper)
{
    struct adam_args a = {};
    a.param = param.data;
    a.low = (uint16_t *)low.data;
    a.m = (float *)m.data;
    a.v = (float *)v.data;
    a.grad = (const float *)grad.data;
    a.n = tensor_numel(param);
    a.state = state;
    a.hyper = *hyper;
    a.range_count = range_count;
    a.row_numel = row_numel;
    a.row_packs = (uint32_t)(row_numel / 4);
    a.packs = packs_fit(0, 1, param.data, m.data, v.data, grad.data, low.data) &&
              row_numel % 4 == 0 && a.n / 4 <= UINT32_MAX && row_numel <= UINT32_MAX;
    for (int r = 0; r < range_count; r++)
        a.range[r] = ranges[r];
    if (a.n == 0)
        return ST_OK;
    unsigned blocks = (unsigned)div_up(a.n, ADAM_THREADS * 4);
    return launch_kernel(s, dim3(blocks), ADAM_THREADS,
                         param.dtype == DTYPE_BF16 ? adamw_kernel<true> : adamw_kernel<false>, a);
}
