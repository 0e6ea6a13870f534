/*
 * engine/ops/attention_wgmma.cuh - what the Hopper kernels of attention are made of.
 *
 * A block is one warpgroup of four warps with tiles of 64 rows in shared memory, laid out as in
 * attention_mma.cuh: for rows of 64 and 128 bytes that is the layout that wgmma.mma_async calls 64-
 * and 128-byte swizzled. A product of tiles is 64 x N x 16 a step: its left operand is a tile or
 * lies in registers, its right operand is a tile, read by the tensor core itself without ldmatrix.
 * Accumulators lie as those of mma.sync (warp w holds rows 16 w ..), and two neighbouring ones are
 * again the left operand of the next product.
 *
 * The tiles are written by the threads (cp.async) and read by another unit, the async proxy:
 * async_fence() stands between, in each thread, before the barrier.
 *
 * Only for sm_90a: elsewhere WGMMA_CODE is not defined, and the kernels are empty and not called.
 *
 * Sources: PTX manual, wgmma.mma_async and "matrix descriptor".
 */
#ifndef ENGINE_OPS_ATTENTION_WGMMA_CUH
#define ENGINE_OPS_ATTENTION_WGMMA_CUH

#include "engine/ops/attention_mma.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define WGMMA_CODE
#endif

enum { TILE_SETS = TILE / 8 }; /* accumulators along 64 columns */

/* ---- products -------------------------------------------------------------------------------- */

/*
 * Matrix descriptor of the tile that begins at row @row (a multiple of 8) and column @column (of
 * 16): address, strides between groups of eight rows, swizzle, all but the last in units of 16
 * bytes. The second stride is not used: a row is one swizzled line.
 */
template <int D> __device__ inline uint64_t tile_descriptor(const bf16 *tile, int row, int column)
{
    constexpr uint64_t EIGHT_ROWS = 8 * D * sizeof(bf16) / 16, SWIZZLE = D == 64 ? 1 : 2;
    static_assert(D == 32 || D == 64, "a row is 64 or 128 bytes");
    uint32_t at = shared_address(tile) + (uint32_t)(row * D + column) * (uint32_t)sizeof(bf16);
    return (at & 0x3FFFF) >> 4 | EIGHT_ROWS << 16 | EIGHT_ROWS << 32 | SWIZZLE << 62;
}

/* What threads wrote to shared memory is seen by the tensor cores from here on. */
__device__ static inline void async_fence(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Registers that the next products read or add to are as the program left them. */
__device__ static inline void products_begin(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ static inline void products_end(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Wait until at most @PENDING of the youngest groups of products are under way. */
template <int PENDING> __device__ inline void products_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/* Accumulators change while products are under way: reads stay behind, writes before this. */
template <int N> __device__ inline void hold(float (&c)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            asm volatile("" : "+f"(c[n][i])::"memory");
}

#ifdef WGMMA_CODE

#define C4(c, n)  "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define C16(c, n) C4(c, n), C4(c, n + 1), C4(c, n + 2), C4(c, n + 3)
#define FIRST_16  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NEXT_16   "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"

/* c (64, 64) = (add ? c : 0) + left (64, 16) * right (64, 16)^T, both tiles with rows along 16. */
__device__ static inline void product_along(float (&c)[8][4], uint64_t left, uint64_t right,
                                            int add)
{
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" FIRST_16 ", " NEXT_16
                 "}, %32, %33, add, 1, 1, 0, 0;\n}"
                 : C16(c, 0), C16(c, 4)
                 : "l"(left), "l"(right), "r"(add));
}

/* c (64, D) += left (64, 16), from registers, * right (16, D), a tile with rows along D. */
__device__ static inline void product_down(float (&c)[8][4], const uint32_t (&left)[4],
                                           uint64_t right)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" FIRST_16 ", " NEXT_16
                 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : C16(c, 0), C16(c, 4)
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right));
}

__device__ static inline void product_down(float (&c)[4][4], const uint32_t (&left)[4],
                                           uint64_t right)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" FIRST_16
                 "}, {%16, %17, %18, %19}, %20, 1, 1, 1, 1;"
                 : C16(c, 0)
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right));
}

/* c (64, D) += left (16, 64)^T * right (16, D), both tiles with rows along the wide side. */
__device__ static inline void product_across(float (&c)[8][4], uint64_t left, uint64_t right)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" FIRST_16 ", " NEXT_16
                 "}, %32, %33, 1, 1, 1, 1, 1;"
                 : C16(c, 0), C16(c, 4)
                 : "l"(left), "l"(right));
}

__device__ static inline void product_across(float (&c)[4][4], uint64_t left, uint64_t right)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" FIRST_16
                 "}, %16, %17, 1, 1, 1, 1, 1;"
                 : C16(c, 0)
                 : "l"(left), "l"(right));
}

/* c (64, 64) = left (64, D) * right (64, D)^T. */
template <int D>
__device__ inline void tiles_along(float (&c)[TILE_SETS][4], const bf16 *left, const bf16 *right)
{
    uint64_t a = tile_descriptor<D>(left, 0, 0), b = tile_descriptor<D>(right, 0, 0);
    constexpr uint64_t STEP_16 = 16 * sizeof(bf16) / 16;
#pragma unroll
    for (uint64_t k = 0; k < D / 16; k++)
        product_along(c, a + k * STEP_16, b + k * STEP_16, k > 0);
}

/* c (64, D) += left (64, 64), in registers, * right (64, D). */
template <int D>
__device__ inline void tiles_down(float (&c)[D / 8][4], const uint32_t (&left)[TILE / 16][4],
                                  const bf16 *right)
{
    uint64_t b = tile_descriptor<D>(right, 0, 0);
    constexpr uint64_t STEP_16 = 16 * D * sizeof(bf16) / 16;
#pragma unroll
    for (uint64_t k = 0; k < TILE / 16; k++)
        product_down(c, left[k], b + k * STEP_16);
}

#endif

/* Accumulators 2 k + i / 2 of rows g (i even) and g + 8 are part i of the k-th left operand. */
__device__ static inline uint32_t left_part(const float (&c)[TILE_SETS][4], int k, int i)
{
    return pair(c[2 * k + i / 2][i % 2 * 2], c[2 * k + i / 2][i % 2 * 2 + 1]);
}

/* Four 8 x 8 matrices to shared memory, one address of a row from each lane. */
__device__ static inline void store_matrices(uint32_t address, const uint32_t (&r)[4])
{
#ifdef WGMMA_CODE
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
#endif
}

/*
 * This warp's 16 rows of accumulators, times a factor for rows g and one for g + 8, as bf16 rows
 * @i0 .. into its rows of a tile, which nobody reads any more; zeros from row @valid on.
 */
template <int D>
__device__ inline void rows_stage(bf16 *tile, const float (&c)[D / 8][4], int i0, int valid,
                                  float factor_low, float factor_high)
{
    int lane = threadIdx.x % 32, row = threadIdx.x % MMA_THREADS / 32 * 16;
    bool low = i0 + lane / 4 < valid, high = i0 + lane / 4 + 8 < valid;
    struct lane_places at = lane_places<D>();
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
        uint32_t r[4];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            r[2 * k] = pair(c[n + k][0] * factor_low, c[n + k][1] * factor_low);
            r[2 * k + 1] = pair(c[n + k][2] * factor_high, c[n + k][3] * factor_high);
        }
        if (i0 + 16 > valid)
#pragma unroll
            for (int k = 0; k < 4; k++)
                r[k] = (k % 2 ? high : low) ? r[k] : 0;
        store_matrices(place_at<D>(tile, at.tall, row, n * 8), r);
    }
    __syncwarp();
}

/* What rows_stage() left, 16 bytes a lane, to rows @i0 .. of @out, those below @rows. */
template <int D>
__device__ inline void rows_copy(bf16 *out, int64_t stride, const bf16 *tile, int i0, int rows)
{
    constexpr int CHUNKS = D / 8, ROWS = 32 / CHUNKS;
    int lane = threadIdx.x % 32, row = threadIdx.x % MMA_THREADS / 32 * 16;
    int chunk = lane % CHUNKS;
    bf16 *to = out + (i0 + lane / CHUNKS) * stride + chunk * 8;
#pragma unroll
    for (int r = lane / CHUNKS; r < lane / CHUNKS + 16; r += ROWS) {
        if (i0 + r < rows)
            *(uint4 *)to = *(const uint4 *)(tile + tile_at<D>(row + r, chunk));
        to += ROWS * stride;
    }
}

/* ---- dropout --------------------------------------------------------------------------------- */

/*
 * Masks that forward leaves for backward: 512 bytes for 64 queries and 64 keys of a head, the tiles
 * of keys one behind the other. A tile has 128 bytes for each 16 keys, and of these a word for two
 * queries: byte 2 half + e has keys 8 half .. of query 2 i + e.
 */
enum { MASK_BYTES = TILE * TILE / 8 };

/* Those of query tile @i and the first tile of keys. */
__device__ static inline uint8_t *mask_tiles(const struct attention_args &a,
                                             const struct attention_head &x, int h, int b, int i)
{
    int64_t slot = h * a.part_slots + x.first / TILE + b + i;
    return a.drop.masks + slot * TILE * a.keep_pitch;
}

/*
 * 0xFFFF in the halves of a word whose lane is kept; @threshold in both halves. As half-precision
 * numbers without their sign, lanes have the order of integers; those that are not numbers are
 * larger than any threshold up to infinity, 0x7C00, and "greater, equal or unordered" holds.
 */
__device__ static inline uint32_t keep_mask(uint32_t word, uint32_t threshold)
{
    uint32_t mask;
    asm("{\n.reg .b32 lanes;\nabs.f16x2 lanes, %1;\nset.geu.u32.f16x2 %0, lanes, %2;\n}"
        : "=r"(mask)
        : "r"(word), "r"(threshold));
    return mask;
}

/* Zero @low and @high where the lanes of a word are dropped. */
__device__ static inline void keep_pair(float &low, float &high, uint32_t word, uint32_t threshold)
{
    asm volatile("{\n.reg .pred low, high;\n.reg .b32 lanes;\nabs.f16x2 lanes, %2;\n"
                 "setp.geu.f16x2 low|high, lanes, %3;\n"
                 "selp.f32 %0, %0, 0f00000000, low;\nselp.f32 %1, %1, 0f00000000, high;\n}"
                 : "+f"(low), "+f"(high)
                 : "r"(word), "r"(threshold));
}

#endif
