/*
 * engine/ops/gemm_wgmma.cu - see gemm_wgmma.cuh.
 *
 * A block has two warpgroups that multiply and a warp that loads. Slices of 64 of both operands
 * come by the copy engine (tensor maps, 128-byte swizzle) into a ring of stages:
 *
 *     full[s]    the copy engine has filled stage s
 *     empty[s]   both warpgroups have read it
 *     ready[t]   the number of the next tile stands in place t
 *     taken[t]   all warps have read that
 *
 *                  left operand                right operand               out
 *     forward      x (T, K), rows along k      w (N, K), rows along k      y (T, N) bf16
 *     data         dy (T, N), rows along k     w (N, K), rows across       dx (T, K) bf16
 *     weight       dy (T, N), rows across      x (T, K), rows across       dw (N, K) fp32
 *
 * where k is the index that is summed over. A slice with rows along k is one box of 64 columns; one
 * with rows across k is a box of 64 x 64 for each 64 of its width. Sizes need not be multiples of a
 * tile: what lies outside is loaded as zeros and not stored.
 *
 * A warp has 16 rows of a tile to store. bf16 results go through shared memory of its own, so that
 * 16 bytes of a row are stored at once; fp32 results, of long sums, are stored as they lie. Warps
 * need not wait for each other, and one that stores leaves the tensor cores to the others.
 *
 * Operations: 2 T N K. Bytes from the L2 cache: 128 (BM + BN) a slice of a tile.
 *
 * Sources: PTX manual, wgmma, cp.async.bulk.tensor, mbarrier.
 */
#include <cuda.h>

#include "engine/device/barrier.cuh"
#include "engine/ops/attention_wgmma.cuh"
#include "engine/ops/gemm_wgmma.cuh"

enum {
    SLICE = 64,
    PANEL = SLICE * TILE, /* elements of a box of 64 x 64 */
    PART = 16 * TILE,     /* of a warp's rows in it */
    MULTIPLIERS = 2,      /* warpgroups */
    WARPS = MULTIPLIERS * MMA_THREADS / 32,
    GEMM_THREADS = MULTIPLIERS * MMA_THREADS + 32,
    PLACES = 2, /* for tiles to come */
    SHARED_MOST = 227 << 10,
    BARRIERS_BYTES = 1024,
    TURNS = 1024 /* products that are under way at most, and far more */
};

/* ---- shapes ---------------------------------------------------------------------------------- */

/* Tiles of BM x BN: a warpgroup has 64 rows of it, or half the columns of 64. */
template <int KIND, int BM, int BN> struct gemm_shape {
    enum { LEFT_DOWN = KIND == GEMM_BACKWARD_WEIGHT, RIGHT_DOWN = KIND != GEMM_FORWARD };
    enum { WIDTH = BM == TILE ? BN / MULTIPLIERS : BN };
    enum { LEFT = BM * SLICE, RIGHT = BN * SLICE, STAGE = LEFT + RIGHT }; /* elements */
    enum { PARTS = KIND == GEMM_FORWARD ? 1 : KIND == GEMM_BACKWARD_DATA ? 2 : 0 };
    enum { STAGED = WARPS * PARTS * PART };
    enum { MOST = (SHARED_MOST - BARRIERS_BYTES - STAGED * 2) / (STAGE * 2) };
    enum { STAGES = MOST < 8 ? MOST : 8 };
    enum { BYTES = (STAGES * STAGE + STAGED) * 2 + BARRIERS_BYTES };
    static_assert(WIDTH % TILE == 0, "a warpgroup has whole panels");
    static_assert(STAGES >= 3, "loads have time");
};

struct gemm_args {
    CUtensorMap left, right;
    void *out;
    const bf16 *bias;          /* or NULL */
    int rows, columns, slices; /* of out; of the sum */
    int row_tiles, column_tiles;
    bool add;
    uint32_t turn;
};

/* Who has the next tile. Zero between products: the last block to end leaves it so. */
struct gemm_turn {
    uint32_t next, ended;
};

#ifdef WGMMA_CODE

__device__ static struct gemm_turn gemm_turns[TURNS];

/* ---- products -------------------------------------------------------------------------------- */

#define C32(c, n) C16(c, n), C16(c, n + 4)
#define C64(c, n) C32(c, n), C32(c, n + 8)
#define THIRD_16  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define FOURTH_16 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FIFTH_16  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define SIXTH_16  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define SEVENTH_16                                                                                 \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define EIGHTH_16                                                                                  \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, "   \
    "%127"
#define ALL_64  FIRST_16 ", " NEXT_16
#define ALL_128 ALL_64 ", " THIRD_16 ", " FOURTH_16
#define ALL_192 ALL_128 ", " FIFTH_16 ", " SIXTH_16
#define ALL_256 ALL_192 ", " SEVENTH_16 ", " EIGHTH_16

#define PRODUCT(N, LEFT, RIGHT, ADD, A, B, ...)                                                    \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\n"                              \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" ALL_##N              \
                 "}, " LEFT ", " RIGHT ", add, 1, 1, " A ", " B ";\n}"                             \
                 : __VA_ARGS__                                                                     \
                 : "l"(left), "l"(right), "r"(add), "n"(A_DOWN), "n"(B_DOWN))

/* c (64, N) = (add ? c : 0) + left (64, 16) * right (N, 16)^T; DOWN: a tile with rows across. */
template <int A_DOWN, int B_DOWN>
__device__ inline void product(float (&c)[8][4], uint64_t left, uint64_t right, int add)
{
    PRODUCT(64, "%32", "%33", "%34", "%35", "%36", C32(c, 0));
}

template <int A_DOWN, int B_DOWN>
__device__ inline void product(float (&c)[16][4], uint64_t left, uint64_t right, int add)
{
    PRODUCT(128, "%64", "%65", "%66", "%67", "%68", C64(c, 0));
}

template <int A_DOWN, int B_DOWN>
__device__ inline void product(float (&c)[24][4], uint64_t left, uint64_t right, int add)
{
    PRODUCT(192, "%96", "%97", "%98", "%99", "%100", C64(c, 0), C32(c, 16));
}

template <int A_DOWN, int B_DOWN>
__device__ inline void product(float (&c)[32][4], uint64_t left, uint64_t right, int add)
{
    PRODUCT(256, "%128", "%129", "%130", "%131", "%132", C64(c, 0), C64(c, 16));
}

/* Of a slice: eight lines of 128 bytes one behind the other; panels of rows across k one behind the
 * other, too. */
__device__ static inline uint64_t slice_descriptor(const bf16 *slice)
{
    constexpr uint64_t EIGHT_LINES = 1024 / 16, NEXT_PANEL = PANEL * 2 / 16, SWIZZLE_128 = 1;
    return (shared_address(slice) & 0x3FFFF) >> 4 | NEXT_PANEL << 16 | EIGHT_LINES << 32 |
           SWIZZLE_128 << 62;
}

/* ---- the copy engine ------------------------------------------------------------------------- */

__device__ static inline void map_load(bf16 *to, const CUtensorMap *map, int column, int row,
                                       uint64_t *barrier)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared_at(to)),
                 "l"(map), "r"(column), "r"(row), "r"(shared_at(barrier))
                 : "memory");
}

/* ---- what a block shares --------------------------------------------------------------------- */

template <int KIND, int BM, int BN> struct gemm_memory {
    using shape = gemm_shape<KIND, BM, BN>;
    bf16 *stages, *staged;
    uint64_t *full, *empty, *ready, *taken;
    volatile int *tiles;

    __device__ inline explicit gemm_memory(bf16 *shared)
    {
        stages = shared;
        staged = stages + shape::STAGES * shape::STAGE;
        full = (uint64_t *)(staged + shape::STAGED);
        empty = full + shape::STAGES;
        ready = empty + shape::STAGES;
        taken = ready + PLACES;
        tiles = (volatile int *)(taken + PLACES);
    }

    __device__ inline void open(void)
    {
        for (int s = 0; s < shape::STAGES; s++) {
            barrier_open(&full[s], 1);
            barrier_open(&empty[s], WARPS);
        }
        for (int t = 0; t < PLACES; t++) {
            barrier_open(&ready[t], 1);
            barrier_open(&taken[t], WARPS);
        }
        async_fence();
    }
};

/* The n-th place of a ring of COUNT, and how often it has gone round, as a parity. */
template <int COUNT> struct ring {
    int at = 0;
    uint32_t parity = 0;

    __device__ inline void next(void)
    {
        if (++at == COUNT) {
            at = 0;
            parity ^= 1;
        }
    }
};

struct tile_place {
    int row, column; /* of out */
};

/* Tiles that run at once lie close to each other: 16 rows of them, column by column. */
template <int BM, int BN>
__device__ inline struct tile_place tile_place(const struct gemm_args &a, int tile)
{
    constexpr int ROWS = 16;
    int band = tile / (ROWS * a.column_tiles), in = tile - band * ROWS * a.column_tiles;
    int rows = a.row_tiles - band * ROWS < ROWS ? a.row_tiles - band * ROWS : ROWS;
    return {(band * ROWS + in % rows) * BM, in / rows * BN};
}

/* ---- loading --------------------------------------------------------------------------------- */

/* Rows along k: one box. Across: one for each 64 of the width. */
template <bool DOWN, int WIDE>
__device__ inline void slice_load(bf16 *to, const CUtensorMap *map, int at, int k,
                                  uint64_t *barrier)
{
    if constexpr (DOWN)
#pragma unroll
        for (int p = 0; p < WIDE / TILE; p++)
            map_load(to + p * PANEL, map, at + p * TILE, k, barrier);
    else
        map_load(to, map, k, at, barrier);
}

/* By one thread; @next: its first tile. */
template <int KIND, int BM, int BN>
__device__ inline void gemm_load(const struct gemm_args &a, gemm_memory<KIND, BM, BN> &m, int next)
{
    using shape = gemm_shape<KIND, BM, BN>;
    struct gemm_turn *turn = &gemm_turns[a.turn];
    int tiles = a.row_tiles * a.column_tiles;
    ring<shape::STAGES> stage;
    ring<PLACES> place;
    for (;;) {
        int tile = next;
        barrier_wait(&m.taken[place.at], place.parity ^ 1);
        m.tiles[place.at] = tile;
        barrier_arrive(&m.ready[place.at]);
        place.next();
        if (tile >= tiles)
            break;
        next = (int)atomicAdd(&turn->next, 1); /* while this one is loaded */
        struct tile_place to = tile_place<BM, BN>(a, tile);
        for (int k = 0; k < a.slices; k++) {
            bf16 *left = m.stages + stage.at * shape::STAGE, *right = left + shape::LEFT;
            barrier_wait(&m.empty[stage.at], stage.parity ^ 1);
            barrier_expect(&m.full[stage.at], shape::STAGE * sizeof(bf16));
            slice_load<shape::LEFT_DOWN, BM>(left, &a.left, to.row, k * SLICE, &m.full[stage.at]);
            slice_load<shape::RIGHT_DOWN, BN>(right, &a.right, to.column, k * SLICE,
                                              &m.full[stage.at]);
            stage.next();
        }
    }
    __threadfence();
    if (atomicAdd(&turn->ended, 1) == gridDim.x - 1) {
        turn->next = turn->ended = 0;
        __threadfence();
    }
}

/* ---- multiplying ----------------------------------------------------------------------------- */

/* A tile's sums of this warpgroup, over all slices; the last products are still under way, and then
 * that stage is free. */
template <int KIND, int BM, int BN>
__device__ inline uint64_t *gemm_multiply(float (&c)[gemm_shape<KIND, BM, BN>::WIDTH / 8][4],
                                          gemm_memory<KIND, BM, BN> &m,
                                          ring<gemm_shape<KIND, BM, BN>::STAGES> &stage, int slices)
{
    using shape = gemm_shape<KIND, BM, BN>;
    /* 16 of k: within the lines, or as many lines. */
    constexpr uint64_t ALONG = 16 * sizeof(bf16) / 16, ACROSS = 16 * 128 / 16;
    constexpr uint64_t LEFT_STEP = shape::LEFT_DOWN ? ACROSS : ALONG;
    constexpr uint64_t RIGHT_STEP = shape::RIGHT_DOWN ? ACROSS : ALONG;
    constexpr uint64_t STAGE_STEP = shape::STAGE * sizeof(bf16) / 16;
    int group = (int)uniform(threadIdx.x / MMA_THREADS), lane = threadIdx.x % 32;
    /* 64 rows are a panel, or 64 lines: as many bytes. */
    const bf16 *mine_left = m.stages + (BM == TILE ? 0 : group * PANEL);
    const bf16 *mine_right =
        m.stages + shape::LEFT + (BM == TILE ? group * shape::WIDTH * SLICE : 0);
    uint64_t left = slice_descriptor(mine_left), right = slice_descriptor(mine_right);
    uint64_t *before = NULL;
    for (int k = 0; k < slices; k++) {
        uint64_t l = left + (uint64_t)stage.at * STAGE_STEP;
        uint64_t r = right + (uint64_t)stage.at * STAGE_STEP;
        barrier_wait(&m.full[stage.at], stage.parity);
        products_begin();
#pragma unroll
        for (int q = 0; q < SLICE / 16; q++)
            product<shape::LEFT_DOWN, shape::RIGHT_DOWN>(c, l + q * LEFT_STEP, r + q * RIGHT_STEP,
                                                         k > 0 || q > 0);
        products_end();
        products_wait<1>();
        if (k > 0 && lane == 0)
            barrier_arrive(before);
        before = &m.empty[stage.at];
        stage.next();
    }
    return before;
}

/* All products are done, and the last stage is read. */
template <int SETS> __device__ inline void multiplied(float (&c)[SETS][4], uint64_t *last)
{
    products_wait<0>();
    hold(c);
    if (threadIdx.x % 32 == 0)
        barrier_arrive(last);
}

/* ---- storing --------------------------------------------------------------------------------- */

/* What this lane adds to its columns of each set of eight, in 64 columns. */
__device__ static inline void bias_load(uint32_t (&bias)[TILE_SETS], const struct gemm_args &a,
                                        int column)
{
    column += threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < TILE_SETS; n++)
        bias[n] = a.bias != NULL && column + n * 8 < a.columns
                      ? *(const uint32_t *)(a.bias + column + n * 8)
                      : 0;
}

/* Sixteen bytes of every fourth of a warp's 16 rows: this lane's part of 64 columns. */
struct warp_rows {
    bf16 *out; /* of the first row */
    int row, chunk;
    int rows, columns; /* that are there, of 16 and of all to the right */
};

__device__ static inline bool rows_has(const struct warp_rows &x, int i, int panel)
{
    return x.row + 4 * i < x.rows && panel * TILE + x.chunk * 8 < x.columns;
}

/* Start to copy one panel of what was there before. */
__device__ static inline void panel_load(bf16 *part, const struct warp_rows &x, int64_t stride,
                                         int panel)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (rows_has(x, i, panel))
            copy_16_bytes(part + tile_at<TILE>(x.row + 4 * i, x.chunk),
                          x.out + 4 * i * stride + panel * TILE);
    copies_commit();
}

/* Sums of 64 columns, with bias and what was there, rounded once. */
__device__ static inline void panel_round(bf16 *part, const float (*c)[4],
                                          const uint32_t (&bias)[TILE_SETS], bool add)
{
    struct lane_places at = lane_places<TILE>();
#pragma unroll
    for (int n = 0; n < TILE_SETS; n += 2) {
        uint32_t r[4] = {0, 0, 0, 0}, place = place_at<TILE>(part, at.tall, 0, n * 8);
        if (add)
            load_matrices(r, place);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float2 b = unpair(bias[n + k / 2]), was = unpair(r[k]);
            const float *x = &c[n + k / 2][k % 2 * 2];
            r[k] = pair(x[0] + b.x + was.x, x[1] + b.y + was.y);
        }
        store_matrices(place, r);
    }
    __syncwarp();
}

__device__ static inline struct warp_rows warp_rows(const struct gemm_args &a, int row, int column)
{
    int lane = threadIdx.x % 32;
    struct warp_rows x;
    x.row = lane / 8;
    x.chunk = lane % 8;
    x.rows = a.rows - row;
    x.columns = a.columns - column;
    x.out = (bf16 *)a.out + (int64_t)(row + x.row) * a.columns + column + x.chunk * 8;
    return x;
}

/* @bias, and if it adds what was there: of the first panel, on their way. */
template <int PARTS, int SETS>
__device__ inline void store_rounded(const struct gemm_args &a, const struct warp_rows &x,
                                     bf16 *parts, const float (&c)[SETS][4],
                                     uint32_t (&bias)[TILE_SETS], int column)
{
    int64_t stride = a.columns;
#pragma unroll
    for (int p = 0; p < SETS / TILE_SETS; p++) {
        bf16 *part = parts + p % PARTS * PART, *next = parts + (p + 1) % PARTS * PART;
        bool add = PARTS == 2 && a.add;
        if (add) {
            if (p + 1 < SETS / TILE_SETS)
                panel_load(next, x, stride, p + 1);
            if (p + 1 < SETS / TILE_SETS)
                copies_wait<1>();
            else
                copies_wait<0>();
            __syncwarp();
        }
        panel_round(part, &c[p * TILE_SETS], bias, add);
        if (p + 1 < SETS / TILE_SETS)
            bias_load(bias, a, column + (p + 1) * TILE);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (rows_has(x, i, p))
                *(uint4 *)(x.out + 4 * i * stride + p * TILE) =
                    *(const uint4 *)(part + tile_at<TILE>(x.row + 4 * i, x.chunk));
        __syncwarp();
    }
}

template <int SETS>
__device__ inline void store_sums(const struct gemm_args &a, const float (&c)[SETS][4], int row,
                                  int column)
{
    int lane = threadIdx.x % 32;
    row += lane / 4;
    column += lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float *to = (float *)a.out + (int64_t)(row + 8 * half) * a.columns + column;
        if (row + 8 * half >= a.rows)
            continue;
#pragma unroll
        for (int n = 0; n < SETS; n++) {
            float2 x = {c[n][2 * half], c[n][2 * half + 1]};
            if (column + n * 8 >= a.columns)
                break;
            if (a.add) {
                float2 was = *(const float2 *)(to + n * 8);
                x = {was.x + x.x, was.y + x.y};
            }
            *(float2 *)(to + n * 8) = x;
        }
    }
}

#endif

template <int KIND, int BM, int BN>
__global__ static void __launch_bounds__(GEMM_THREADS, 1)
    gemm_wgmma_kernel(const __grid_constant__ struct gemm_args a)
{
#ifdef WGMMA_CODE
    using shape = gemm_shape<KIND, BM, BN>;
    extern __shared__ __align__(1024) bf16 shared[];
    gemm_memory<KIND, BM, BN> m(shared);
    int warp = (int)uniform(threadIdx.x / 32), lane = threadIdx.x % 32, group = warp / 4, first = 0;
    if (threadIdx.x == 0)
        m.open();
    if (threadIdx.x == GEMM_THREADS - 32) /* nobody else looks at it */
        first = (int)atomicAdd(&gemm_turns[a.turn].next, 1);
    __syncthreads();
    kernel_begin();
    if (group == MULTIPLIERS) {
        if (lane == 0)
            gemm_load<KIND, BM, BN>(a, m, first);
        return;
    }
    float c[shape::WIDTH / 8][4];
    ring<shape::STAGES> stage;
    ring<PLACES> place;
    for (;;) {
        barrier_wait(&m.ready[place.at], place.parity);
        int tile = m.tiles[place.at];
        __syncwarp();
        if (lane == 0)
            barrier_arrive(&m.taken[place.at]);
        place.next();
        if (tile >= a.row_tiles * a.column_tiles)
            break;
        struct tile_place at = tile_place<BM, BN>(a, tile);
        int row = at.row + warp * 16 - (BM == TILE ? group * TILE : 0);
        int column = at.column + (BM == TILE ? group * (int)shape::WIDTH : 0);
        uint64_t *last = gemm_multiply<KIND, BM, BN>(c, m, stage, a.slices);
        if constexpr (KIND == GEMM_BACKWARD_WEIGHT) {
            multiplied(c, last);
            store_sums(a, c, row, column);
        } else {
            uint32_t bias[TILE_SETS];
            bf16 *parts = m.staged + warp * shape::PARTS * PART;
            struct warp_rows x = warp_rows(a, row, column);
            bias_load(bias, a, column);
            if (KIND == GEMM_BACKWARD_DATA && a.add)
                panel_load(parts, x, a.columns, 0);
            multiplied(c, last);
            store_rounded<shape::PARTS>(a, x, parts, c, bias, column);
        }
    }
#endif
}

/* ---- on the host ----------------------------------------------------------------------------- */

typedef CUresult (*encode_tiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                 const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                 const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* A matrix (rows, columns) of bf16, in boxes of 64 columns and @box_rows. */
static enum status map_of(CUtensorMap *map, void *encode, const void *matrix, int64_t rows,
                          int64_t columns, int box_rows)
{
    const cuuint64_t sizes[2] = {(cuuint64_t)columns, (cuuint64_t)rows};
    const cuuint64_t strides[1] = {(cuuint64_t)columns * sizeof(bf16)};
    const cuuint32_t box[2] = {SLICE, (cuuint32_t)box_rows}, steps[2] = {1, 1};
    CUresult result = ((encode_tiled)encode)(
        map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void *)matrix, sizes, strides, box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        return FAIL(DEVICE, "no tensor map of a matrix (%lld, %lld): error %d", (long long)rows,
                    (long long)columns, (int)result);
    return ST_OK;
}

template <int KIND, int BM, int BN> static enum status shape_open(void)
{
    return CUDA(cudaFuncSetAttribute(gemm_wgmma_kernel<KIND, BM, BN>,
                                     cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     gemm_shape<KIND, BM, BN>::BYTES));
}

struct gemm_sizes {
    int64_t left_rows, left_columns, right_rows, right_columns, out_rows, out_columns, sum;
};

static struct gemm_sizes sizes_of(const struct gemm_key *key)
{
    int64_t T = key->T, N = key->N, K = key->K;
    switch ((enum gemm_kind)key->kind) {
    case GEMM_FORWARD:
        return {T, K, N, K, T, N, K};
    case GEMM_BACKWARD_DATA:
        return {T, N, N, K, T, K, N};
    default:
        return {T, N, T, K, N, K, T};
    }
}

struct gemm_issue {
    struct stream *s;
    void *encode;
    const struct gemm_key *key;
    uint32_t turn;
    void *out;
    const void *a, *b, *bias;
};

template <int KIND, int BM, int BN> static enum status shape_issue(const struct gemm_issue *i)
{
    using shape = gemm_shape<KIND, BM, BN>;
    struct gemm_args a = {};
    struct gemm_sizes x = sizes_of(i->key);
    int multiprocessors = 0;
    TRY(map_of(&a.left, i->encode, i->a, x.left_rows, x.left_columns,
               shape::LEFT_DOWN ? SLICE : BM));
    TRY(map_of(&a.right, i->encode, i->b, x.right_rows, x.right_columns,
               shape::RIGHT_DOWN ? SLICE : BN));
    TRY(CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount,
                                    i->s->device->index)));
    a.bias = (const bf16 *)i->bias;
    a.out = i->out;
    a.rows = (int)x.out_rows;
    a.columns = (int)x.out_columns;
    a.slices = (int)div_up(x.sum, SLICE);
    a.row_tiles = (int)div_up(x.out_rows, BM);
    a.column_tiles = (int)div_up(x.out_columns, BN);
    a.add = i->key->add;
    a.turn = i->turn % TURNS;
    int tiles = a.row_tiles * a.column_tiles;
    dim3 grid((unsigned)(tiles < multiprocessors ? tiles : multiprocessors));
    return launch_kernel_shared(i->s, grid, GEMM_THREADS, shape::BYTES,
                                gemm_wgmma_kernel<KIND, BM, BN>, a);
}

template <int BM, int BN> struct gemm_tiles {
    static enum status open(void)
    {
        TRY((shape_open<GEMM_FORWARD, BM, BN>()));
        TRY((shape_open<GEMM_BACKWARD_DATA, BM, BN>()));
        return shape_open<GEMM_BACKWARD_WEIGHT, BM, BN>();
    }

    static enum status issue(const struct gemm_issue *i)
    {
        switch ((enum gemm_kind)i->key->kind) {
        case GEMM_FORWARD:
            return shape_issue<GEMM_FORWARD, BM, BN>(i);
        case GEMM_BACKWARD_DATA:
            return shape_issue<GEMM_BACKWARD_DATA, BM, BN>(i);
        default:
            return shape_issue<GEMM_BACKWARD_WEIGHT, BM, BN>(i);
        }
    }
};

static const struct {
    enum status (*open)(void);
    enum status (*issue)(const struct gemm_issue *i);
} shapes[GEMM_SHAPES] = {
    {gemm_tiles<128, 256>::open, gemm_tiles<128, 256>::issue},
    {gemm_tiles<128, 192>::open, gemm_tiles<128, 192>::issue},
    {gemm_tiles<128, 128>::open, gemm_tiles<128, 128>::issue},
    {gemm_tiles<64, 128>::open, gemm_tiles<64, 128>::issue},
};

enum status gemm_wgmma_open(void **encode)
{
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    bool hopper = false;
    *encode = NULL;
    TRY(cuda_attention_for_hopper(&hopper));
    if (!hopper)
        return ST_OK;
    for (int i = 0; i < GEMM_SHAPES; i++)
        TRY(shapes[i].open());
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", encode, 12000, cudaEnableDefault,
                                         &found) != cudaSuccess ||
        found != cudaDriverEntryPointSuccess) {
        (void)cudaGetLastError();
        *encode = NULL;
    }
    return ST_OK;
}

bool gemm_wgmma_can(const struct gemm_key *key)
{
    return key->dtype == DTYPE_BF16 && key->align % 16 == 0 && key->N % 8 == 0 && key->K % 8 == 0;
}

enum status gemm_wgmma_issue(struct stream *s, void *encode, const struct gemm_key *key, int shape,
                             uint32_t turn, void *out, const void *a, const void *b,
                             const void *bias)
{
    const struct gemm_issue i = {s, encode, key, turn, out, a, b, bias};
    return shapes[shape].issue(&i);
}
