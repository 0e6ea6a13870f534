/*
 * comm/imitate_hold.cu - see imitate.h: what a collective is for the rest of the card.
 *
 * As many blocks as a collective has multiprocessors, each with all the shared memory of one, in
 * clusters as NCCL launches its own: of four where that divides them. They wait for each other, as
 * blocks wait for the peers', do the copies, and leave when the time is over.
 */
#include <cuda_runtime.h>

#include "comm/imitate.h"
#include "engine/device/cuda_check.h"

enum { HOLD_THREADS = 512, HOLD_PACKS = 8 };
static const uint64_t MOST_WAIT_NS = 10000000; /* for blocks that find no multiprocessor */

struct meeting {
    uint32_t here, left;
};

/* Zero between collectives: the last block to leave makes it so. */
__device__ static struct meeting meetings[IMITATE_SLOTS];

__device__ static uint64_t now_ns()
{
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

/* Read, for the traffic alone. */
__device__ static void read_packs(const uint4 *from, size_t packs, size_t first, size_t step)
{
    for (size_t i = first; i < packs; i += step)
        asm volatile("{\n"
                     ".reg .b32 a, b, c, d;\n"
                     "ld.global.v4.b32 {a, b, c, d}, [%0];\n"
                     "}" ::"l"(__cvta_generic_to_global(from + i))
                     : "memory");
}

template <typename T>
__device__ static void copy_words(T *to, const T *from, size_t words, size_t first, size_t step)
{
    size_t i = first;
    for (; i + (HOLD_PACKS - 1) * step < words; i += HOLD_PACKS * step) {
        T x[HOLD_PACKS];
#pragma unroll
        for (int k = 0; k < HOLD_PACKS; k++)
            x[k] = from[i + k * step];
#pragma unroll
        for (int k = 0; k < HOLD_PACKS; k++)
            to[i + k * step] = x[k];
    }
    for (; i < words; i += step)
        to[i] = from[i];
}

__global__ static void __launch_bounds__(HOLD_THREADS)
    imitate_kernel(const struct imitate_copy c, uint64_t ns)
{
    struct meeting *meeting = &meetings[c.slot];
    volatile uint32_t *here = &meeting->here;
    size_t step = (size_t)gridDim.x * HOLD_THREADS;
    size_t first = (size_t)blockIdx.x * HOLD_THREADS + threadIdx.x;
    uint64_t begun = now_ns();
    if (threadIdx.x == 0) {
        atomicAdd(&meeting->here, 1);
        while (*here < gridDim.x && now_ns() - begun < MOST_WAIT_NS)
            __nanosleep(100);
    }
    __syncthreads();
    begun = now_ns();
    bool packs = ((uintptr_t)c.in | (uintptr_t)c.out | c.share) % sizeof(uint4) == 0;
    size_t words = c.share / (packs ? sizeof(uint4) : sizeof(uint32_t));
    for (int k = 0; k < c.copies; k++) {
        char *to = (char *)c.out + (size_t)k * c.share;
        if (to != c.in && packs)
            copy_words((uint4 *)to, (const uint4 *)c.in, words, first, step);
        else if (to != c.in)
            copy_words((uint32_t *)to, (const uint32_t *)c.in, words, first, step);
    }
    if (packs)
        read_packs((const uint4 *)c.in + words, words * (size_t)(c.shares - 1), first, step);
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    while (now_ns() - begun < ns)
        __nanosleep(100);
    if (atomicAdd(&meeting->left, 1) == gridDim.x - 1) {
        meeting->here = meeting->left = 0;
        __threadfence();
    }
}

enum status imitate_hold(struct stream *s, const struct imitate_copy *copy)
{
    cudaLaunchAttribute cluster = {};
    cudaLaunchConfig_t config = {};
    int blocks = copy->multiprocessors, card = s->device->index, major = 0, shared = 0;
    TRY(CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, card)));
    TRY(CUDA(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, card)));
    TRY(CUDA(
        cudaFuncSetAttribute(imitate_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared)));
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {blocks % 4 == 0 ? 4u : 1u, 1, 1};
    config.gridDim = dim3((unsigned)blocks);
    config.blockDim = dim3(HOLD_THREADS);
    config.dynamicSmemBytes = (size_t)shared;
    config.stream = (cudaStream_t)s->handle;
    config.attrs = &cluster;
    config.numAttrs = major >= 9;
    uint64_t ns = (uint64_t)(copy->seconds * 1e9);
    return CUDA(cudaLaunchKernelEx(&config, imitate_kernel, *copy, ns));
}
