/*
 * comm/nccl_peers.cu - see nccl_private.h, "collectives of our own".
 *
 * A block has its share of what a rank gets (reduce_scatter) or gives (all_gather), the same on all
 * ranks, and meets the blocks of its number on the other ranks before it begins and when it has
 * done. Between the two the copy engine of its multiprocessor (cp.async.bulk) moves the data by way
 * of shared memory, where enough of it is on its way to fill the link from few multiprocessors:
 *
 *     reduce_scatter   chunks of all ranks' buffers are loaded, summed in rank order, stored
 *     all_gather       chunks of this rank's shard are loaded, and stored in all ranks' buffers
 *
 * Bytes over the links: (ranks - 1) / ranks of the whole, in and out. A rank's writes before the
 * kernel are there for its peers because the kernel begins behind them and then says so (release,
 * acquire at system scope); a proxy fence orders the copy engine's accesses with that.
 */
#include <cuda_bf16.h>
#include <string.h>

#include "comm/nccl_private.h"
#include "engine/base/log.h"
#include "engine/device/cuda_check.h"

#if __has_include(<nccl_device.h>)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wundef"
#pragma GCC diagnostic ignored "-Wunused-parameter"
#include <nccl_device.h>
#pragma GCC diagnostic pop
#define HAVE_LSA 1
#else
#define HAVE_LSA 0
#endif

enum {
    SHARED_BYTES = 128 << 10, /* of a block, all stages */
    BARRIER_BYTES = 128,      /* in front of them */
    GATHER_STAGES = 8,
    REDUCE_STAGES = 4,
    GATHER_THREADS = 32,
    SUM_THREADS = 256,
    REDUCE_THREADS = 32 + SUM_THREADS,
    LEAST_BYTES = 16 << 10 /* of a block's share: fewer blocks serve a small collective */
};

/* ---- what lies behind the block of memory ---------------------------------------------------- */

/* At the same offset in every rank's window; zero at first. */
struct peers_memory {
    /* How far the blocks of this number have come on each rank, which writes its place itself; of
     * each stream, for collectives of two streams may run beside each other. */
    uint32_t come[STREAM_COUNT][COLLECTIVE_BLOCKS][PEERS_MAX];
    uint32_t epoch[STREAM_COUNT][COLLECTIVE_BLOCKS]; /* this rank's own */
    uint32_t token;                                  /* in opening: rank + 1 */
    uint32_t tokens[PEERS_MAX];                      /* as read from the peers */
    char *base[PEERS_MAX];                           /* where this rank finds their windows */
    char *own;
};
static_assert(sizeof(struct peers_memory) <= PEERS_BYTES, "there is room");

/* What a collective needs of them. */
struct peers_args {
    char *base[PEERS_MAX];
    size_t memory; /* offset of struct peers_memory */
    int ranks, rank, stream;
    size_t in, out; /* offsets */
    size_t bytes;   /* of a rank's share, a multiple of 16 */
};

/* ---- on the device --------------------------------------------------------------------------- */

#if __CUDA_ARCH__ >= 900
__device__ static uint32_t shared_at(const void *shared)
{
    return (uint32_t)__cvta_generic_to_shared(shared);
}

__device__ static void barrier_open(uint64_t *barrier, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_at(barrier)), "r"(arrivals)
                 : "memory");
}

__device__ static void barrier_arrive(uint64_t *barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_at(barrier)) : "memory");
}

__device__ static void barrier_expect(uint64_t *barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_at(barrier)),
                 "r"(bytes)
                 : "memory");
}

__device__ static void barrier_wait(uint64_t *barrier, uint32_t parity)
{
    uint32_t done = 0;
    while (done == 0)
        asm volatile("{\n"
                     ".reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n"
                     "}"
                     : "=r"(done)
                     : "r"(shared_at(barrier)), "r"(parity)
                     : "memory");
}

__device__ static void bulk_load(void *shared, const char *global, uint32_t bytes,
                                 uint64_t *barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], "
                 "%2, [%3];" ::"r"(shared_at(shared)),
                 "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_at(barrier))
                 : "memory");
}

__device__ static void bulk_store(char *global, const void *shared, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                     __cvta_generic_to_global(global)),
                 "r"(shared_at(shared)), "r"(bytes)
                 : "memory");
}

__device__ static struct peers_memory *memory_of(const struct peers_args &a, int rank)
{
    return (struct peers_memory *)(a.base[rank] + a.memory);
}

/* By one warp: all ranks' blocks of this number have come as far as @epoch. */
__device__ static void meet(const struct peers_args &a, uint32_t epoch)
{
    int peer = threadIdx.x;
    asm volatile("fence.proxy.async;" ::: "memory");
    __threadfence_system();
    __syncwarp();
    if (peer < a.ranks) {
        uint32_t *there = &memory_of(a, peer)->come[a.stream][blockIdx.x][a.rank], come;
        const uint32_t *here = &memory_of(a, a.rank)->come[a.stream][blockIdx.x][peer];
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(there)),
                     "r"(epoch)
                     : "memory");
        do
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
                         : "=r"(come)
                         : "l"(__cvta_generic_to_global(here))
                         : "memory");
        while ((int32_t)(come - epoch) < 0);
    }
    __syncwarp();
    asm volatile("fence.proxy.async;" ::: "memory");
}

/* The block's share: bytes [from, to) of a rank's. */
struct share {
    size_t from, to;
};

__device__ static struct share share_of(const struct peers_args &a)
{
    size_t packs = a.bytes / 16, part = (packs + gridDim.x - 1) / gridDim.x;
    size_t from = blockIdx.x * part, to = from + part;
    return {(from < packs ? from : packs) * 16, (to < packs ? to : packs) * 16};
}

__device__ static uint32_t chunk_bytes(size_t from, size_t to, uint32_t chunk)
{
    return to - from < chunk ? (uint32_t)(to - from) : chunk;
}
#endif

/* One warp, whose first lane does all but the meeting. */
__global__ static void __launch_bounds__(GATHER_THREADS)
    peers_gather_kernel(const __grid_constant__ struct peers_args a)
{
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char shared[];
    constexpr uint32_t CHUNK = SHARED_BYTES / GATHER_STAGES;
    constexpr int AHEAD = GATHER_STAGES / 2;
    uint64_t *full = (uint64_t *)shared;
    char *stages = shared + BARRIER_BYTES;
    struct share share = share_of(a);
    int chunks = (int)((share.to - share.from + CHUNK - 1) / CHUNK);
    uint32_t *epoch = &memory_of(a, a.rank)->epoch[a.stream][blockIdx.x], begun = *epoch;
    const char *in = a.base[a.rank] + a.in;
    size_t out = a.out + (size_t)a.rank * a.bytes;
    if (threadIdx.x == 0)
        for (int s = 0; s < GATHER_STAGES; s++)
            barrier_open(&full[s], 1);
    meet(a, begun + 1); /* their buffers may be written */
    if (threadIdx.x == 0) {
        for (int i = -AHEAD; i < chunks; i++) {
            int next = i + AHEAD, s = next % GATHER_STAGES;
            if (i >= 0) {
                size_t from = share.from + (size_t)i * CHUNK;
                uint32_t bytes = chunk_bytes(from, share.to, CHUNK);
                const char *stage = stages + (size_t)(i % GATHER_STAGES) * CHUNK;
                barrier_wait(&full[i % GATHER_STAGES], (uint32_t)(i / GATHER_STAGES) & 1);
                for (int r = 1; r <= a.ranks; r++) { /* not all to one peer at a time */
                    int peer = (a.rank + r) % a.ranks;
                    if (peer != a.rank || in != a.base[a.rank] + out)
                        bulk_store(a.base[peer] + out + from, stage, bytes);
                }
                asm volatile("cp.async.bulk.commit_group;" ::: "memory");
                asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(AHEAD) : "memory");
            }
            if (next < chunks) {
                size_t from = share.from + (size_t)next * CHUNK;
                uint32_t bytes = chunk_bytes(from, share.to, CHUNK);
                barrier_expect(&full[s], bytes);
                bulk_load(stages + (size_t)s * CHUNK, in + from, bytes, &full[s]);
            }
        }
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    __syncwarp();
    meet(a, begun + 2); /* all have written here */
    if (threadIdx.x == 0)
        *epoch = begun + 2;
#endif
}

#if __CUDA_ARCH__ >= 900
__device__ static float to_float(float x)
{
    return x;
}

__device__ static float to_float(__nv_bfloat16 x)
{
    return __bfloat162float(x);
}

__device__ static void round_to(float *out, float x)
{
    *out = x;
}

__device__ static void round_to(__nv_bfloat16 *out, float x)
{
    *out = __float2bfloat16_rn(x);
}

/* A pack of 16 bytes of each rank, @stride bytes apart in shared memory, summed in rank order. */
template <typename E>
__device__ static void sum_packs(char *out, const char *shared, uint32_t stride, int ranks)
{
    constexpr int W = 16 / (int)sizeof(E);
    float sum[W];
    E pack[W];
    for (int r = 0; r < ranks; r++) {
        uint4 raw = *(const uint4 *)(shared + (size_t)r * stride);
        memcpy(pack, &raw, sizeof raw);
#pragma unroll
        for (int k = 0; k < W; k++)
            sum[k] = r == 0 ? to_float(pack[k]) : sum[k] + to_float(pack[k]);
    }
#pragma unroll
    for (int k = 0; k < W; k++)
        round_to(&pack[k], sum[k]);
    uint4 raw;
    memcpy(&raw, pack, sizeof raw);
    *(uint4 *)out = raw;
}
#endif

/* The first warp loads, the others sum. */
template <typename E>
__global__ static void __launch_bounds__(REDUCE_THREADS)
    peers_reduce_kernel(const __grid_constant__ struct peers_args a)
{
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char shared[];
    const uint32_t chunk = SHARED_BYTES / REDUCE_STAGES / (uint32_t)a.ranks & ~127u;
    uint64_t *full = (uint64_t *)shared, *empty = full + REDUCE_STAGES;
    char *stages = shared + BARRIER_BYTES;
    struct share share = share_of(a);
    int chunks = (int)((share.to - share.from + chunk - 1) / chunk), lane = threadIdx.x % 32;
    uint32_t *epoch = &memory_of(a, a.rank)->epoch[a.stream][blockIdx.x], begun = *epoch;
    size_t in = a.in + (size_t)a.rank * a.bytes;
    char *out = a.base[a.rank] + a.out;
    if (threadIdx.x == 0)
        for (int s = 0; s < REDUCE_STAGES; s++) {
            barrier_open(&full[s], 1);
            barrier_open(&empty[s], SUM_THREADS / 32);
        }
    if (threadIdx.x < 32)
        meet(a, begun + 1); /* their buffers are written */
    __syncthreads();
    for (int i = 0; threadIdx.x == 0 && i < chunks; i++) {
        int s = i % REDUCE_STAGES, round = i / REDUCE_STAGES;
        size_t from = share.from + (size_t)i * chunk;
        uint32_t bytes = chunk_bytes(from, share.to, chunk);
        if (round > 0)
            barrier_wait(&empty[s], (uint32_t)(round - 1) & 1);
        barrier_expect(&full[s], bytes * (uint32_t)a.ranks);
        for (int r = 1; r <= a.ranks; r++) { /* not all from one peer at a time */
            int peer = (a.rank + r) % a.ranks;
            bulk_load(stages + ((size_t)s * a.ranks + peer) * chunk, a.base[peer] + in + from,
                      bytes, &full[s]);
        }
    }
    for (int i = 0; threadIdx.x >= 32 && i < chunks; i++) {
        int s = i % REDUCE_STAGES, round = i / REDUCE_STAGES;
        size_t from = share.from + (size_t)i * chunk;
        uint32_t bytes = chunk_bytes(from, share.to, chunk);
        const char *stage = stages + (size_t)s * a.ranks * chunk;
        barrier_wait(&full[s], (uint32_t)round & 1);
        for (uint32_t at = (threadIdx.x - 32) * 16; at < bytes; at += SUM_THREADS * 16)
            sum_packs<E>(out + from + at, stage + at, chunk, a.ranks);
        __syncwarp();
        if (lane == 0)
            barrier_arrive(&empty[s]);
    }
    __syncthreads();
    if (threadIdx.x < 32)
        meet(a, begun + 2); /* all have read */
    if (threadIdx.x == 0)
        *epoch = begun + 2;
#endif
}

/* ---- enqueueing ------------------------------------------------------------------------------ */

static unsigned blocks_for(size_t bytes)
{
    size_t blocks = (bytes + LEAST_BYTES - 1) / LEAST_BYTES, most = COLLECTIVE_BLOCKS;
    return (unsigned)(blocks < most ? blocks : most);
}

static bool in_window(const struct nccl_comm *n, const void *at, size_t bytes)
{
    const char *first = (const char *)n->window, *p = (const char *)at;
    return p >= first && p + bytes <= first + n->window_size;
}

bool nccl_peers_serve(const struct nccl_comm *n, const void *share, const void *whole, size_t bytes)
{
    return n->peers.count > 0 && bytes % 16 == 0 && (uintptr_t)share % 16 == 0 &&
           (uintptr_t)whole % 16 == 0 && in_window(n, share, bytes) &&
           in_window(n, whole, bytes * (size_t)n->base.world_size);
}

static struct peers_args args_of(const struct nccl_comm *n, const struct stream *s, const void *in,
                                 void *out, size_t bytes)
{
    struct peers_args a = {};
    memcpy(a.base, n->peers.base, sizeof a.base);
    a.memory = n->window_size;
    a.ranks = n->base.world_size;
    a.rank = n->base.rank;
    a.stream = s->id;
    a.in = (size_t)((const char *)in - (const char *)n->window);
    a.out = (size_t)((char *)out - (char *)n->window);
    a.bytes = bytes;
    return a;
}

/* Blocks in pairs have pairs of multiprocessors, of which others so find whole ones: products have
 * blocks that come in pairs, too, and would not fit on what single ones leave. */
template <typename... A>
static enum status launch(void (*kernel)(A...), unsigned blocks, int threads, struct stream *s,
                          A... args)
{
    cudaLaunchAttribute pairs = {};
    cudaLaunchConfig_t config = {};
    pairs.id = cudaLaunchAttributeClusterDimension;
    pairs.val.clusterDim = {blocks % 2 == 0 ? 2u : 1u, 1, 1};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = BARRIER_BYTES + SHARED_BYTES;
    config.stream = (cudaStream_t)s->handle;
    config.attrs = &pairs;
    config.numAttrs = 1;
    return CUDA(cudaLaunchKernelEx(&config, kernel, args...));
}

enum status nccl_peers_gather(struct nccl_comm *n, struct stream *s, void *out, const void *in,
                              size_t bytes)
{
    if (bytes == 0)
        return ST_OK;
    return launch(peers_gather_kernel, blocks_for(bytes), GATHER_THREADS, s,
                  args_of(n, s, in, out, bytes));
}

enum status nccl_peers_reduce(struct nccl_comm *n, struct stream *s, void *out, const void *in,
                              size_t bytes, enum dtype dtype)
{
    auto kernel =
        dtype == DTYPE_BF16 ? peers_reduce_kernel<__nv_bfloat16> : peers_reduce_kernel<float>;
    if (bytes == 0)
        return ST_OK;
    return launch(kernel, blocks_for(bytes), REDUCE_THREADS, s, args_of(n, s, in, out, bytes));
}

/* ---- opening --------------------------------------------------------------------------------- */

#if HAVE_LSA
__global__ static void peers_find_kernel(struct peers_memory *m, ncclWindow_t window, int ranks,
                                         int rank)
{
    for (int r = 0; r < ranks; r++)
        m->base[r] = (char *)ncclGetLsaPointer(window, 0, r);
    m->own = (char *)ncclGetLocalPointer(window, 0);
    m->token = (uint32_t)rank + 1;
}

__global__ static void peers_read_kernel(struct peers_memory *m, size_t offset, int ranks)
{
    for (int r = 0; r < ranks; r++)
        m->tokens[r] = *(volatile uint32_t *)&((struct peers_memory *)(m->base[r] + offset))->token;
}

static enum status peers_read(struct peers_memory *out, const struct peers_memory *m)
{
    TRY(CUDA(cudaGetLastError()));
    TRY(CUDA(cudaStreamSynchronize(0)));
    return CUDA(cudaMemcpy(out, m, sizeof *out, cudaMemcpyDeviceToHost));
}

/* Code for earlier GPUs, translated when it is loaded, is of kernels that do nothing. */
static enum status kernels_of_hopper(void)
{
    struct cudaFuncAttributes kernel = {};
    TRY(CUDA(cudaFuncGetAttributes(&kernel, (const void *)peers_gather_kernel)));
    if (kernel.ptxVersion < 90)
        return FAIL(UNSUPPORTED, "made for GPUs of architecture %d", kernel.ptxVersion);
    return ST_OK;
}
#endif

/* The windows of ranks that are not all in one team lie elsewhere. */
static enum status peers_find(struct nccl_comm *n)
{
#if HAVE_LSA
    struct peers_memory here, *m = (struct peers_memory *)((char *)n->window + n->window_size);
    int version = 0, major = 0;
    TRY(NCCL(ncclGetVersion(&version)));
    TRY(CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, n->device->index)));
    if (version < NCCL_VERSION(2, 28, 0) || version >= NCCL_VERSION(2, 31, 0))
        return FAIL(UNSUPPORTED, "windows of NCCL %d are not known", version);
    if (major < 9)
        return FAIL(UNSUPPORTED, "GPUs before H100 cannot");
    if (n->base.world_size > PEERS_MAX)
        return FAIL(UNSUPPORTED, "more than %d ranks", (int)PEERS_MAX);
    TRY(kernels_of_hopper());
    if (!n->symmetric)
        return FAIL(UNSUPPORTED, "NCCL has made no symmetric window");
    peers_find_kernel<<<1, 1>>>(m, n->registered[GATHER], n->base.world_size, n->base.rank);
    TRY(peers_read(&here, m));
    if (here.base[n->base.rank] != here.own)
        return FAIL(UNSUPPORTED, "the ranks are on several machines");
    memcpy(n->peers.base, here.base, sizeof here.base);
    return ST_OK;
#else
    (void)n;
    return FAIL(UNSUPPORTED, "made with NCCL %d", NCCL_VERSION_CODE);
#endif
}

/* All have found all: each reads what every other one wrote. */
static enum status peers_check(struct nccl_comm *n)
{
#if HAVE_LSA
    struct peers_memory here, *m = (struct peers_memory *)((char *)n->window + n->window_size);
    peers_read_kernel<<<1, 1>>>(m, n->window_size, n->base.world_size);
    TRY(peers_read(&here, m));
    for (int r = 0; r < n->base.world_size; r++)
        if (here.tokens[r] != (uint32_t)r + 1)
            return FAIL(UNSUPPORTED, "rank %d is not where its window should be", r);
    const void *kernels[] = {(const void *)peers_gather_kernel,
                             (const void *)peers_reduce_kernel<float>,
                             (const void *)peers_reduce_kernel<__nv_bfloat16>};
    for (size_t k = 0; k < sizeof kernels / sizeof *kernels; k++)
        TRY(CUDA(cudaFuncSetAttribute(kernels[k], cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      BARRIER_BYTES + SHARED_BYTES)));
    return ST_OK;
#else
    (void)n;
    return ST_OK;
#endif
}

enum status nccl_peers_open(struct nccl_comm *n)
{
    char why[WHY_BYTES];
    bool all = false;
    TRY(nccl_all_can(n, peers_find(n), &all, why));
    if (all)
        TRY(nccl_all_can(n, peers_check(n), &all, why));
    if (all)
        n->peers.count = n->base.world_size;
    else
        log_info("nccl", "collectives by NCCL's kernels: %s", why);
    status_clear();
    return ST_OK;
}
