/*
 * engine/ops/cuda_common.cuh - what all CUDA kernels of the ops share.
 *
 *   launches      kernels that may be placed while the one before them ends
 *   packs         W elements in one access; arithmetic is always on floats
 *   row groups    THREADS threads that hold one row in registers, and their ordered sum
 *   dropout       the masks of engine/base/rng.h, computed where they are used
 *   columns       sums over the rows of a matrix, in two stages with a fixed row -> block map
 *
 * Every reduction has one order that depends on the sizes alone. A butterfly over a warp gives each
 * lane the same bits, because addition commutes; partial sums of a block or a grid are added in
 * index order. There is no float atomic.
 */
#ifndef ENGINE_OPS_CUDA_COMMON_CUH
#define ENGINE_OPS_CUDA_COMMON_CUH

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <string.h>

#include "engine/base/status.h"
#include "engine/base/tensor.h"
#include "engine/device/cuda_check.h"
#include "engine/device/device.h"
#include "engine/ops/cuda_sizes.h"
#include "engine/ops/dropout.h"
#include "engine/ops/ops.h"
#include "engine/ops/ops_cuda.h"

typedef __nv_bfloat16 bf16;

static inline cudaStream_t stream_cuda(const struct stream *s)
{
    return (cudaStream_t)s->handle;
}

static inline int64_t div_up(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* ---- launches ------------------------------------------------------------------------------ */

/*
 * Programmatic dependent launch: the blocks of a kernel are placed as soon as all of the kernel
 * before it on the stream have begun, and wait in kernel_begin() until that one has ended and its
 * writes can be seen. So all of a kernel's accesses stand behind kernel_begin(), reads and writes
 * alike, and every block calls it: then "the one before has ended" holds for all before that one
 * too. What others launch (cuBLASLt, collectives, copies) waits in full, as without this.
 *
 * Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
 */
__device__ static inline void kernel_begin(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/** launch_kernel() - enqueue a kernel that begins with kernel_begin(). */
template <typename... P, typename... A>
static inline enum status launch_kernel(struct stream *s, dim3 grid, int threads,
                                        void (*kernel)(P...), A... args)
{
    cudaLaunchAttribute early = {};
    cudaLaunchConfig_t config = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = grid;
    config.blockDim = dim3((unsigned)threads);
    config.stream = stream_cuda(s);
    config.attrs = &early;
    config.numAttrs = s->device->early_launch ? 1 : 0;
    return CUDA(cudaLaunchKernelEx(&config, kernel, P(args)...));
}

/* Sixteen bytes on their way to shared memory, past the registers; cp.async of PTX. */
__device__ static inline void copy_16_bytes(void *shared, const void *global)
{
    uint32_t to = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}

__device__ static inline void copies_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Wait until at most @PENDING of the youngest groups of this thread are under way. */
template <int PENDING> __device__ inline void copies_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* ---- packs --------------------------------------------------------------------------------- */

__device__ static inline float to_float(float x)
{
    return x;
}

__device__ static inline float to_float(bf16 x)
{
    return __bfloat162float(x);
}

template <typename E> __device__ inline E from_float(float x);

template <> __device__ inline float from_float<float>(float x)
{
    return x;
}

template <> __device__ inline bf16 from_float<bf16>(float x)
{
    return __float2bfloat16_rn(x);
}

/* The value that a store of x as E would leave in memory. */
template <typename E> __device__ inline float rounded(float x)
{
    return to_float(from_float<E>(x));
}

/* Elements of a 16-byte access. */
template <typename E> constexpr int full_pack()
{
    return (int)(16 / sizeof(E));
}

/* A pack as it lies in memory. One of 16 bytes takes four registers, while it waits to be used. */
template <typename E, int W, bool WHOLE = W * sizeof(E) == 16> struct raw_pack {
    E e[W];
};

template <typename E, int W> struct raw_pack<E, W, true> {
    uint32_t word[4];
};

template <typename E, int W> __device__ inline void load_raw(struct raw_pack<E, W> &x, const E *p)
{
    if constexpr (W * sizeof(E) == 16) {
        uint4 raw = *(const uint4 *)p;
        x.word[0] = raw.x;
        x.word[1] = raw.y;
        x.word[2] = raw.z;
        x.word[3] = raw.w;
    } else {
#pragma unroll
        for (int i = 0; i < W; i++)
            x.e[i] = p[i];
    }
}

template <typename E, int W> __device__ inline void store_raw(E *p, const struct raw_pack<E, W> &x)
{
    if constexpr (W * sizeof(E) == 16) {
        *(uint4 *)p = make_uint4(x.word[0], x.word[1], x.word[2], x.word[3]);
    } else {
#pragma unroll
        for (int i = 0; i < W; i++)
            p[i] = x.e[i];
    }
}

/* The same number everywhere; bf16 has it exactly. */
template <typename E, int W> __device__ inline void fill_raw(struct raw_pack<E, W> &x, float value)
{
    uint32_t bits = __float_as_uint(value);
    if constexpr (W * sizeof(E) == 16) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            x.word[i] = sizeof(E) == 4 ? bits : (bits & 0xFFFF0000u) | bits >> 16;
    } else {
#pragma unroll
        for (int i = 0; i < W; i++)
            x.e[i] = from_float<E>(value);
    }
}

__device__ static inline float float_of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* A bf16 is the upper half of a float. */
template <typename E, int W>
__device__ inline void unpack(float (&x)[W], const struct raw_pack<E, W> &raw)
{
#pragma unroll
    for (int i = 0; i < W; i++) {
        if constexpr (W * sizeof(E) != 16)
            x[i] = to_float(raw.e[i]);
        else if constexpr (W == 4)
            x[i] = float_of_bits(raw.word[i]);
        else
            x[i] = float_of_bits(i % 2 ? raw.word[i / 2] & 0xFFFF0000u : raw.word[i / 2] << 16);
    }
}

/*
 * Registers that a kernel has too few of: the compiler may not keep what it derives from x (floats
 * of a pack, round keys) from one place to the next, and derives it again.
 */
__device__ static inline void forget(uint32_t &x)
{
    asm volatile("" : "+r"(x));
}

template <typename E, int W> __device__ inline void forget(struct raw_pack<E, W> &x)
{
    if constexpr (W * sizeof(E) == 16)
#pragma unroll
        for (int i = 0; i < 4; i++)
            forget(x.word[i]);
}

template <typename E, int W> __device__ inline void load_pack(float (&x)[W], const E *p)
{
    struct raw_pack<E, W> raw;
    load_raw(raw, p);
    unpack(x, raw);
}

template <typename E, int W> __device__ inline void store_pack(E *p, const float (&x)[W])
{
    if constexpr (W * sizeof(E) == 16) {
        uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if constexpr (W == 8) {
                __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
                memcpy(&word[i], &pair, sizeof pair);
            } else {
                memcpy(&word[i], &x[i], sizeof x[i]);
            }
        }
        *(uint4 *)p = make_uint4(word[0], word[1], word[2], word[3]);
    } else if constexpr (W == 4 && sizeof(E) == 2) {
        __nv_bfloat162 low = __floats2bfloat162_rn(x[0], x[1]);
        __nv_bfloat162 high = __floats2bfloat162_rn(x[2], x[3]);
        uint2 raw;
        memcpy(&raw.x, &low, sizeof low);
        memcpy(&raw.y, &high, sizeof high);
        *(uint2 *)p = raw;
    } else {
#pragma unroll
        for (int i = 0; i < W; i++)
            p[i] = from_float<E>(x[i]);
    }
}

/* May rows of @columns elements that start at these addresses be accessed 16 bytes at a time? */
static inline bool packs_fit(int64_t columns, size_t elem_bytes, const void *a,
                             const void *b = NULL, const void *c = NULL, const void *d = NULL,
                             const void *e = NULL, const void *f = NULL)
{
    uintptr_t bits = (uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)d | (uintptr_t)e |
                     (uintptr_t)f | (uintptr_t)((size_t)columns * elem_bytes);
    return bits % 16 == 0;
}

/* ---- row groups ------------------------------------------------------------------------------ */

__device__ static inline float warp_sum(float x)
{
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
    return x;
}

__device__ static inline float warp_max(float x)
{
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, step));
    return x;
}

/*
 * A barrier of THREADS threads, whole warps, of a block; @id: 1 .. 15, its own for each group.
 *
 * All groups of a block pass theirs equally often. The program does not need it, but where they do
 * not, compute-sanitizer's racecheck reports accesses that a __syncthreads() keeps apart and misses
 * some that nothing does: see bench/RESULTS.md.
 */
template <int THREADS> __device__ inline void group_barrier(int id)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

/* Sum over the THREADS threads of a row: a warp, or the whole block of more than one warp. */
template <int THREADS> __device__ inline float row_sum(float x)
{
    x = warp_sum(x);
    if constexpr (THREADS > 32) {
        __shared__ float part[THREADS / 32];
        if (threadIdx.x % 32 == 0)
            part[threadIdx.x / 32] = x;
        __syncthreads();
        x = 0.0f;
        for (int i = 0; i < THREADS / 32; i++)
            x += part[i];
        __syncthreads(); /* part is written again by the next call */
    }
    return x;
}

/* ---- dropout --------------------------------------------------------------------------------- */

__device__ static inline struct philox dropout_words(const struct dropout_key &m, uint32_t sample,
                                                     uint32_t group)
{
    return philox4x32_rounds(DROPOUT_ROUNDS, m.seed, m.step, m.layer_site, sample, group);
}

/* dropout_lane() with selects in place of an indexed read, which would go through local memory. */
__device__ static inline uint32_t selected_lane(const struct philox &r, uint32_t i)
{
    uint32_t low = i & 2 ? r.word[1] : r.word[0], high = i & 2 ? r.word[3] : r.word[2];
    return ((i & 4 ? high : low) >> (16 * (i & 1))) & DROPOUT_LANE;
}

/* One element, for code that has no neighbours at hand. */
__device__ static inline bool dropout_keeps(const struct dropout_key &m, uint32_t sample,
                                            uint64_t element)
{
    struct philox r = dropout_words(m, sample, (uint32_t)(element / 8));
    return selected_lane(r, (uint32_t)(element % 8)) >= m.threshold;
}

/* Do not keep round keys in registers (see forget() above). */
__device__ static inline void forget(struct dropout_key &m)
{
    asm volatile("" : "+l"(m.seed));
    forget(m.step);
}

/* Elements first .. first + W - 1, W a divisor of 8 and of first. */
template <int W>
__device__ inline void dropout_apply(float (&x)[W], const struct dropout_key &m, uint32_t sample,
                                     uint64_t first)
{
    static_assert(8 % W == 0, "a pack lies in one group of eight");
    if (!m.on)
        return;
    struct philox r = dropout_words(m, sample, (uint32_t)(first / 8));
#pragma unroll
    for (uint32_t i = 0; i < W; i++) {
        bool keep = selected_lane(r, (uint32_t)(first % 8) + i) >= m.threshold;
        /* A whole group needs no lane cut out: both sides stand in the upper bits of a word. */
        if constexpr (W == 8)
            keep = r.word[i / 2] << (i % 2 ? 1 : 17) >= m.threshold << 17;
        x[i] = keep ? x[i] * m.scale : 0.0f;
    }
}

/* ---- columns --------------------------------------------------------------------------------- */

/*
 * Sums over rows. A block of 256 threads takes COLUMN_ROWS rows and 32 packs of columns: thread
 * (lane, row lane) adds rows row lane, row lane + 8, ... of pack lane; the eight row lanes are
 * added in order and give one row of partial sums; columns_finish() has those added in order.
 */
enum { COLUMN_THREADS = 256, COLUMN_LANES = 8 };

/* Add the eight row lanes and write columns c0 .. c0 + 32 W - 1 of @out, those in [from, to). */
template <int W>
__device__ inline void columns_between(const float (&sum)[W], float *out, int64_t c0, int64_t from,
                                       int64_t to, bool add)
{
    __shared__ float tile[COLUMN_LANES][32 * W];
    int lane = threadIdx.x % 32, row = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < W; i++)
        tile[row][i * 32 + lane] = sum[i];
    __syncthreads();
    for (int n = threadIdx.x; n < 32 * W; n += COLUMN_THREADS) {
        float total = 0.0f;
        for (int r = 0; r < COLUMN_LANES; r++)
            total += tile[r][n];
        int64_t c = c0 + (n % 32) * W + n / 32;
        if (c >= from && c < to)
            out[c] = (add ? out[c] : 0.0f) + total;
    }
    __syncthreads(); /* the tile is written again by the next call */
}

template <int W>
__device__ inline void columns_block(const float (&sum)[W], float *out, int64_t c0, int64_t columns,
                                     bool add)
{
    columns_between<W>(sum, out, c0, 0, columns, add);
}

/* Up to COLUMN_SETS vectors of sums that one kernel makes at once; NULL: not wanted. */
struct column_sets {
    float *out[COLUMN_SETS];
    int count;
};

/*
 * Few rows of partial sums are little work for a kernel, so those of several ops are added by one:
 * they wait at the end of the workspace until cuda_finish_sums(), or until somebody needs the room.
 */

/** columns_reserve() - room for @numel floats of partial sums until they are finished. */
enum status columns_reserve(float **out, struct stream *s, int64_t numel);

/**
 * columns_finish() - note: out[k] (columns) = (add ? out[k] : 0) + the sum of @parts rows, for each
 * set.
 * @partial: (parts, sets, columns), from columns_reserve(); @parts may be 0.
 */
enum status columns_finish(struct stream *s, struct column_sets sets, const float *partial,
                           int64_t parts, int64_t columns, bool add);

/**
 * columns_sum() - out (columns) fp32 = (add ? out : 0) + column sums of x.
 * @x: (rows, columns) fp32 or bf16.
 * @label: NULL, or (rows): only rows with label[row] == value count.
 *
 * Reserves column_parts(rows) * columns floats.
 */
enum status columns_sum(struct stream *s, float *out, struct tensor x, const int32_t *label,
                        int32_t value, bool add);

/** stream_scratch() - the stream's workspace, for one op; ST_INVALID when it holds fewer than
 * @bytes. Sums that wait in this part of it are finished first. */
enum status stream_scratch(void **out, struct stream *s, size_t bytes);

/** columns_open(), columns_close() - the list of pending sums of each stream of a device. */
enum status columns_open(struct device *device);
void columns_close(struct device *device);

#endif
