#include "engine/device/mark.h"

#include <string.h>

#include "engine/device/cuda_check.h"

/* A kernel and not a copy: a captured copy would need host memory for each value, and it would
 * queue behind the large copies of the copy engine. */
static __global__ void mark_kernel(volatile uint32_t *word, uint32_t value)
{
    *word = value;
    __threadfence_system();
}

/* In a capture: the node waits for what @stream has come to, and for the mark before it. */
static enum status mark_beside(cudaGraph_t graph, const cudaGraphNode_t *behind, size_t count,
                               void **last, uint32_t *word, uint32_t value)
{
    enum { MOST = 32 };
    cudaGraphNode_t all[MOST], node = NULL;
    cudaKernelNodeParams kernel = {};
    void *arguments[] = {&word, &value};
    if (count >= MOST)
        return FAIL(DEVICE, "a mark behind %zu nodes of a graph; %d are the most", count, MOST - 1);
    memcpy(all, behind, count * sizeof *all);
    if (*last != NULL)
        all[count++] = (cudaGraphNode_t)*last;
    kernel.func = (void *)mark_kernel;
    kernel.gridDim = kernel.blockDim = dim3(1);
    kernel.kernelParams = arguments;
    TRY(CUDA(cudaGraphAddKernelNode(&node, graph, all, count, &kernel)));
    *last = node;
    return ST_OK;
}

enum status mark_launch(void *stream, void **last, uint32_t *word, uint32_t value)
{
    cudaStream_t s = (cudaStream_t)stream;
    cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    cudaGraph_t graph = NULL;
    const cudaGraphNode_t *behind = NULL;
    size_t count = 0;
#if CUDART_VERSION >= 13000
    const cudaGraphEdgeData *edges = NULL;
    TRY(CUDA(cudaStreamGetCaptureInfo(s, &capturing, NULL, &graph, &behind, &edges, &count)));
#else
    TRY(CUDA(cudaStreamGetCaptureInfo_v2(s, &capturing, NULL, &graph, &behind, &count)));
#endif
    if (capturing == cudaStreamCaptureStatusActive)
        return mark_beside(graph, behind, count, last, word, value);
    mark_kernel<<<1, 1, 0, s>>>(word, value);
    return CUDA(cudaGetLastError());
}

enum { FILL_THREADS = 256 };

/* Thread t of all: bytes t, t + threads, ... */
static __global__ void fill_kernel(unsigned char *out, int byte, size_t bytes)
{
    for (size_t i = blockIdx.x * (size_t)FILL_THREADS + threadIdx.x; i < bytes;
         i += gridDim.x * (size_t)FILL_THREADS)
        out[i] = (unsigned char)byte;
}

enum status fill_launch(void *stream, void *out, int byte, size_t bytes)
{
    unsigned blocks = (unsigned)((bytes + 4 * FILL_THREADS - 1) / (4 * FILL_THREADS));
    fill_kernel<<<blocks, FILL_THREADS, 0, (cudaStream_t)stream>>>((unsigned char *)out, byte,
                                                                   bytes);
    return CUDA(cudaGetLastError());
}

/* Thread t of all: element t. */
template <typename E> static __global__ void copy_kernel(E *out, const E *in, size_t count)
{
    size_t i = blockIdx.x * (size_t)FILL_THREADS + threadIdx.x;
    if (i < count)
        out[i] = in[i];
}

enum status copy_launch(void *stream, void *out, const void *in, size_t bytes)
{
    cudaStream_t s = (cudaStream_t)stream;
    bool packs = ((uintptr_t)out | (uintptr_t)in | bytes) % sizeof(uint4) == 0;
    size_t count = packs ? bytes / sizeof(uint4) : bytes;
    unsigned blocks = (unsigned)((count + FILL_THREADS - 1) / FILL_THREADS);
    if (packs)
        copy_kernel<<<blocks, FILL_THREADS, 0, s>>>((uint4 *)out, (const uint4 *)in, count);
    else
        copy_kernel<<<blocks, FILL_THREADS, 0, s>>>((char *)out, (const char *)in, count);
    return CUDA(cudaGetLastError());
}
