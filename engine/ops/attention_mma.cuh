/*
 * engine/ops/attention_mma.cuh - what the tensor-core kernels of attention are made of.
 *
 * Rows of a head lie in shared memory in tiles of 64; a block has four warps, and a warp owns rows
 * of its own, so no two warps add to the same place. Products are mma.sync m16n8k16: lane 4 g + t
 * holds rows g and g + 8, columns 2 t and 2 t + 1 of each 16 x 8 accumulator, and two neighbouring
 * accumulators are the left operand of the next product as they lie in registers.
 *
 * Dropout: eight neighbouring keys of one query are the eight lanes of one Philox call. Where keys
 * are columns, the rows of a tile of keys are put into shared memory in an order that gives each
 * lane eight neighbouring keys of its two queries (softmax and sums over keys do not mind the
 * order): column 2 t + e of accumulator n is key 8 t + 2 n + e of 32. So a lane makes one call for
 * eight elements that are all its own, and no lane needs another's.
 *
 * Sources: the layouts are those of the PTX manual's mma.m16n8k16 and ldmatrix; Philox as in
 * engine/base/rng.h.
 */
#ifndef ENGINE_OPS_ATTENTION_MMA_CUH
#define ENGINE_OPS_ATTENTION_MMA_CUH

#include "engine/ops/attention_cuda.cuh"

/* Rows of a tile, partners taken at once, stages of partners (three were no faster). */
enum { TILE = 64, STEP = 32, STAGES = 2, MMA_THREADS = 128 };

#define LOG2_E 1.4426950408889634f
#define LN_2   0.6931471805599453f

/* ---- tiles in shared memory ------------------------------------------------------------------ */

static constexpr int tile_bytes(int rows, int width)
{
    return rows * width * (int)sizeof(bf16);
}

/*
 * Where 8 elements of a row lie: chunks of 16 bytes, permuted so that the eight rows which one
 * ldmatrix phase reads (or a store of one row) touch all 32 banks once.
 */
template <int D> __device__ inline int tile_at(int row, int chunk)
{
    int place = D == 32 ? chunk ^ (row >> 1 & 3) : chunk ^ (row & 7);
    return row * D + place * 8;
}

/* The place of key 8 t + 2 n + e of 32: row 8 n + 2 t + e. */
__device__ static inline int key_place(int row)
{
    return (row & ~31) | (row & 6) << 2 | (row >> 2 & 6) | (row & 1);
}

__device__ static inline uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Start to copy 16 bytes. */
__device__ static inline void copy_16(uint32_t to, const void *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

/* The same, or write 16 zeros; @from must be readable in both cases. */
__device__ static inline void copy_16(uint32_t to, const void *from, bool real)
{
    int bytes = real ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}

__device__ static inline void copy_8(void *to, const void *from, bool real)
{
    int bytes = real ? 8 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes)
                 : "memory");
}

enum tile_order { ROWS_IN_ORDER, ROWS_AS_KEYS };

/*
 * How this thread copies tiles: 16 bytes of every ROWS-th row, whose places, in bytes, repeat after
 * PERIOD rows, farther on. They are made once, or each copy would make them anew.
 */
template <int D, int ORDER> struct tile_copy {
    enum { CHUNKS = D / 8, ROWS = MMA_THREADS / CHUNKS };
    enum { PERIOD = ORDER == ROWS_AS_KEYS && ROWS < 32 ? 32 / ROWS : 1 };
    int row, chunk;
    uint32_t place[PERIOD];

    __device__ inline uint32_t to(int k) const
    {
        return place[k % PERIOD] + (uint32_t)(k / PERIOD * PERIOD * ROWS * D) * sizeof(bf16);
    }
};

template <int D, int ORDER> __device__ inline struct tile_copy<D, ORDER> tile_copy_make(void) {
    struct tile_copy<D, ORDER> x;
    x.row = threadIdx.x % MMA_THREADS / x.CHUNKS;
    x.chunk = threadIdx.x % x.CHUNKS;
#pragma unroll
    for (int k = 0; k < x.PERIOD; k++) {
        int r = k * x.ROWS + x.row, place = ORDER == ROWS_AS_KEYS ? key_place(r) : r;
        x.place[k] = (uint32_t)tile_at<D>(place, x.chunk) * sizeof(bf16);
        asm volatile("" : "+r"(x.place[k]));
    }
    return x;
}

/* Start to copy 64 rows of a head; rows from @rows on become zeros. @rows >= 1. */
template <int D, int ORDER>
__device__ inline void tile_load(const struct tile_copy<D, ORDER> &x, bf16 *tile, const bf16 *from,
                                 int64_t stride, int rows)
{
    uint32_t to = shared_address(tile);
    uint32_t step = (uint32_t)stride * (uint32_t)(x.ROWS * sizeof(bf16));
    const char *mine = (const char *)(from + (uint32_t)x.row * (uint32_t)stride + x.chunk * 8);
    if (rows >= TILE) {
#pragma unroll
        for (int k = 0; k < TILE / x.ROWS; k++)
            copy_16(to + x.to(k), mine + (uint64_t)step * k);
        return;
    }
#pragma unroll
    for (int k = 0; k < TILE / x.ROWS; k++) {
        bool real = k * x.ROWS + x.row < rows;
        copy_16(to + x.to(k), real ? mine + (uint64_t)step * k : (const char *)from, real);
    }
}

/*
 * Start to load a stage: keys @j .. @j + 63 and, behind them, their values. Nothing is loaded past
 * the end, but the group is committed, so that every turn of a loop waits for the same number.
 */
template <int D>
__device__ inline void key_stage_load(const struct tile_copy<D, ROWS_AS_KEYS> &x, bf16 *stage,
                                      const bf16 *k, const bf16 *v, int64_t stride, int j, int keys)
{
    if (j < keys) {
        uint32_t at =
            (uint32_t)j * (uint32_t)stride; /* of one sequence: fewer than 2^32 elements */
        tile_load(x, stage, k + at, stride, keys - j);
        tile_load(x, stage + TILE * D, v + at, stride, keys - j);
    }
    copies_commit();
}

/*
 * The row and column that ldmatrix wants of this lane, as bytes from the first row and column of a
 * tile. A column of a multiple of 16 elements is then an exclusive or, a row of a multiple of 8 a
 * sum: the lanes' bits of the row decide the permutation of the chunks.
 */
struct lane_places {
    uint32_t tall; /* quarters of 16 x 16 in the order (top left, bottom left, top right, ...) */
    uint32_t wide; /* (top left, top right, bottom left, ...) */
};

template <int D> __device__ inline struct lane_places lane_places(void)
{
    int lane = threadIdx.x % 32, quarter = lane / 8;
    struct lane_places at;
    at.tall = tile_at<D>(lane % 8 + quarter % 2 * 8, quarter / 2) * sizeof(bf16);
    at.wide = tile_at<D>(lane % 8 + quarter / 2 * 8, quarter % 2) * sizeof(bf16);
    return at;
}

template <int D>
__device__ inline uint32_t place_at(const bf16 *tile, uint32_t lane, int row, int column)
{
    return shared_address(tile) + (uint32_t)(row * D) * sizeof(bf16) +
           (lane ^ (uint32_t)column * sizeof(bf16));
}

/* Four 8 x 8 matrices, one address of a row from each lane; transposed or not. */
__device__ static inline void load_matrices(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ static inline void load_transposed(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ static inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ static inline uint32_t pair(float low, float high)
{
    __nv_bfloat162 p = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &p, sizeof bits);
    return bits;
}

__device__ static inline float2 unpair(uint32_t bits)
{
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u));
}

/* A warp's 16 rows of a tile as left operands. */
template <int D>
__device__ inline void load_lefts(uint32_t (&left)[D / 16][4], const bf16 *tile, int row,
                                  const struct lane_places &at)
{
#pragma unroll
    for (int k = 0; k < D / 16; k++)
        load_matrices(left[k], place_at<D>(tile, at.tall, row, k * 16));
}

/*
 * c (16, 8 N) += left (16, D) * rows row .. row + 8 N - 1 of the tile, transposed: the inner index
 * runs along the tile's rows.
 */
template <int D, int N>
__device__ inline void multiply_along(float (&c)[N][4], const uint32_t (&left)[D / 16][4],
                                      const bf16 *tile, int row, const struct lane_places &at)
{
#pragma unroll
    for (int k = 0; k < D / 16; k++)
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t r[4];
            load_matrices(r, place_at<D>(tile, at.wide, row + n * 8, k * 16));
            mma(c[n], left[k], r[0], r[1]);
            mma(c[n + 1], left[k], r[2], r[3]);
        }
}

/*
 * c (16, D) += x (16, 8 N), rounded, * rows row .. row + 8 N - 1 of the tile: the inner index runs
 * down the tile.
 */
template <int D, int N>
__device__ inline void multiply_down(float (&c)[D / 8][4], const float (&x)[N][4], const bf16 *tile,
                                     int row, const struct lane_places &at)
{
#pragma unroll
    for (int k = 0; k < N; k += 2) {
        uint32_t left[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            left[i] = pair(x[k + i / 2][i % 2 * 2], x[k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
        for (int n = 0; n < D / 8; n += 2) {
            uint32_t r[4];
            load_transposed(r, place_at<D>(tile, at.tall, row + k * 8, n * 8));
            mma(c[n], left, r[0], r[1]);
            mma(c[n + 1], left, r[2], r[3]);
        }
    }
}

/*
 * 16 rows of accumulators, times a factor for rows g and one for g + 8, as bf16 rows @i0 .. of
 * @out, those below @rows; zeros from @valid on. They pass through this warp's rows @row .. of a
 * tile, which it has read for the last time, so that memory is written 16 bytes a lane.
 */
template <int D>
__device__ inline void store_rows(bf16 *out, int64_t stride, bf16 *tile, int row,
                                  const float (&c)[D / 8][4], int i0, int rows, int valid,
                                  float factor_low, float factor_high)
{
    constexpr int CHUNKS = D / 8;
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < CHUNKS; n++) {
        uint32_t low = pair(c[n][0] * factor_low, c[n][1] * factor_low);
        uint32_t high = pair(c[n][2] * factor_high, c[n][3] * factor_high);
        *(uint32_t *)(tile + tile_at<D>(row + g, n) + t * 2) = i0 + g < valid ? low : 0u;
        *(uint32_t *)(tile + tile_at<D>(row + g + 8, n) + t * 2) = i0 + g + 8 < valid ? high : 0u;
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 16 * CHUNKS / 32; k++) {
        int r = (k * 32 + lane) / CHUNKS, chunk = lane % CHUNKS;
        if (i0 + r < rows)
            *(uint4 *)(out + (i0 + r) * stride + chunk * 8) =
                *(const uint4 *)(tile + tile_at<D>(row + r, chunk));
    }
}

/* ---- softmax --------------------------------------------------------------------------------- */

/* 2^x by the special function unit: within 2 units in the last place, denormal results are 0. */
__device__ static inline float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* A row's value over its four lanes. */

__device__ static inline float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}

__device__ static inline float quad_sum(float x)
{
    x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
    return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}

/*
 * Keys from @keys on weigh nothing. Columns of @N accumulators are keys 8 t + 2 n + e of 32, and 32
 * on for each four accumulators more.
 */
template <int N> __device__ inline void mask_tail(float (&s)[N][4], int keys)
{
    int t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 2; e++)
            if (n / 4 * 32 + 8 * t + n % 4 * 2 + e >= keys)
                s[n][e] = s[n][2 + e] = -INFINITY;
}

#define GROWTH 8.0f /* log2 of how far a row's probabilities may pass 1 */

/*
 * Running softmax of rows g and g + 8. The reference of a row is not its running maximum but one
 * that is at most 2^GROWTH too small: sums and outputs are rescaled only when a score passes that,
 * which is rare after the first keys, and the four lanes of a row need not talk before. P <= 256
 * costs no precision: bf16 and fp32 float, and a sum of 2^16 keys still fits.
 */
struct softmax {
    float most[2];  /* the reference, a score */
    float total[2]; /* this lane's part of the sum of exp2((score - most) * scale) */
};

/* Raise the references to these scores' maxima if any row needs it; scale sums and outputs down. */
template <int D, int N>
__device__ inline void softmax_raise(struct softmax &x, float (&o)[D / 8][4],
                                     const float (&s)[N][4], float scale)
{
    float most[2];
    bool grows = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        most[half] = fmaxf(s[0][2 * half], s[0][2 * half + 1]);
#pragma unroll
        for (int n = 1; n < N; n++)
            most[half] = fmaxf(most[half], fmaxf(s[n][2 * half], s[n][2 * half + 1]));
        grows |= (most[half] - x.most[half]) * scale > GROWTH;
    }
    if (!__any_sync(0xFFFFFFFFu, grows))
        return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float next = fmaxf(x.most[half], quad_max(most[half]));
        float shrink = exp2_fast((x.most[half] - next) * scale);
        x.most[half] = next;
        x.total[half] *= shrink;
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            o[n][2 * half] *= shrink;
            o[n][2 * half + 1] *= shrink;
        }
    }
}

/* Scores to exp2((score - most) * scale). */
template <int N>
__device__ inline void softmax_step(struct softmax &x, float (&s)[N][4], float scale)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float offset = x.most[half] * scale;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &p = s[n][2 * half + e];
                p = exp2_fast(fmaf(p, scale, -offset));
                x.total[half] += p;
            }
    }
}

/*
 * The end of rows g and g + 8 of a warp's 16 from @row on: what its sums of values are multiplied
 * with, @kept over the sum of its probabilities, and lse to memory. Without keys both are 0.
 */
__device__ static inline void softmax_end(float (&factor)[2], const struct softmax &sum,
                                          const struct attention_args &a,
                                          const struct attention_head &x, int h, int row,
                                          float scale, float kept)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int i = row + lane / 4 + half * 8;
        float total = quad_sum(sum.total[half]);
        factor[half] = x.keys > 0 ? __fdividef(kept, total) : 0.0f;
        if (lane % 4 == 0 && i < x.rows)
            a.lse[h * a.q.rows + x.first + i] =
                x.keys > 0 ? (sum.most[half] * scale + __log2f(total)) * LN_2 : 0.0f;
    }
}

/* ---- dropout --------------------------------------------------------------------------------- */

/*
 * Philox for one sample, of which only the last counter word, the group of eight elements, changes:
 * four of the fourteen multiplications and most of three rounds are done once.
 */
struct keep_start {
    bool on;            /* false: everything is kept */
    uint32_t limit;     /* threshold << 17, less 1: kept is what is greater */
    uint32_t threshold; /* in both halves */
    uint32_t k0, k1;
    uint32_t c2, d0, e0, e1, e2; /* the parts of rounds 1, 2 and 3 that do not change */
};

/* The same value in all lanes, and the compiler knows: it lives in a uniform register. */
__device__ static inline uint32_t uniform(uint32_t x)
{
    return __shfl_sync(0xFFFFFFFFu, x, 0);
}

__device__ static inline struct keep_start keep_start(const struct dropout_key &key,
                                                      uint32_t sample)
{
    struct keep_start x;
    uint32_t step = uniform(key.step);
    sample = uniform(sample);
    x.on = key.on && key.threshold > 0;
    x.limit = (key.threshold << 17) - 1;
    x.threshold = key.threshold * 0x10001u;
    x.k0 = uniform((uint32_t)key.seed);
    x.k1 = uniform((uint32_t)(key.seed >> 32));
    uint32_t a0 = __umulhi(PHILOX_M1, sample) ^ key.layer_site ^ x.k0, a1 = PHILOX_M1 * sample;
    uint32_t a3 = PHILOX_M0 * step;
    x.c2 = __umulhi(PHILOX_M0, step) ^ x.k1; /* xor the group: word 2 after round 1 */
    x.d0 = a1 ^ (x.k0 + PHILOX_W0);
    uint32_t d2 = __umulhi(PHILOX_M0, a0) ^ a3 ^ (x.k1 + PHILOX_W1), d3 = PHILOX_M0 * a0;
    x.e0 = __umulhi(PHILOX_M1, d2) ^ (x.k0 + 2 * PHILOX_W0);
    x.e1 = PHILOX_M1 * d2;
    x.e2 = d3 ^ (x.k1 + 2 * PHILOX_W1);
    return x;
}

/* The eight lanes of one group. */
__device__ static inline struct philox keep_words(const struct keep_start &x, uint32_t group)
{
    uint64_t p0, p1 = (uint64_t)PHILOX_M1 * (x.c2 ^ group);
    uint32_t c0 = (uint32_t)(p1 >> 32) ^ x.d0, c1 = (uint32_t)p1;
    p0 = (uint64_t)PHILOX_M0 * c0;
    c0 = c1 ^ x.e0;
    c1 = x.e1;
    uint32_t c2 = (uint32_t)(p0 >> 32) ^ x.e2, c3 = (uint32_t)p0;
#pragma unroll
    for (uint32_t round = 3; round < DROPOUT_ROUNDS; round++) {
        p0 = (uint64_t)PHILOX_M0 * c0;
        p1 = (uint64_t)PHILOX_M1 * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ (x.k0 + round * PHILOX_W0);
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ (x.k1 + round * PHILOX_W1);
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
    }
    struct philox out = {{c0, c1, c2, c3}};
    return out;
}

/* Is element 2 n + e of a group kept? */
__device__ static inline bool keep_lane(const struct keep_start &x, const struct philox &r, int n,
                                        int e)
{
    return r.word[n] << (e ? 1 : 17) > x.limit;
}

/* The group of query @i and keys @j .. @j + 7 of this head; @j a multiple of 8. */
__device__ static inline uint32_t keep_group(const struct attention_head &x, int positions, int i,
                                             int j)
{
    return (uint32_t)((x.element + (uint64_t)i * (uint64_t)positions + (uint64_t)j) / 8);
}

#endif
