#include "engine/device/mark.h"

#include <string.h>

#include "engine/base/arena.h"
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
    if (last != NULL) {
#if CUDART_VERSION >= 13000
        const cudaGraphEdgeData *edges = NULL;
        TRY(CUDA(cudaStreamGetCaptureInfo(s, &capturing, NULL, &graph, &behind, &edges, &count)));
#else
        TRY(CUDA(cudaStreamGetCaptureInfo_v2(s, &capturing, NULL, &graph, &behind, &count)));
#endif
    }
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

static unsigned fill_blocks(size_t bytes)
{
    return (unsigned)((bytes + 4 * FILL_THREADS - 1) / (4 * FILL_THREADS));
}

enum status fill_launch(void *stream, void *out, int byte, size_t bytes)
{
    fill_kernel<<<fill_blocks(bytes), FILL_THREADS, 0, (cudaStream_t)stream>>>((unsigned char *)out,
                                                                               byte, bytes);
    return CUDA(cudaGetLastError());
}

#if CUDART_VERSION >= 13000
#define EDGES , NULL /* of no kind but the one that waits in full */
#else
#define EDGES
#endif

/* One that clears little: a kernel with the same neighbours in its place. */
static enum status replace_clear(cudaGraph_t graph, cudaGraphNode_t clear, int priority)
{
    enum { MOST = 64 };
    cudaGraphNode_t before[MOST], behind[MOST], from[MOST], node = NULL;
    size_t count = MOST, followers = MOST;
    struct cudaMemsetParams p = {};
    TRY(CUDA(cudaGraphMemsetNodeGetParams(clear, &p)));
    size_t bytes = p.width * p.elementSize;
    if (p.height != 1 || p.value != 0 || bytes > FILL_KERNEL_BYTES)
        return ST_OK;
    TRY(CUDA(cudaGraphNodeGetDependencies(clear, NULL EDGES, &count)));
    TRY(CUDA(cudaGraphNodeGetDependentNodes(clear, NULL EDGES, &followers)));
    if (count > MOST || followers > MOST)
        return ST_OK;
    if (count > 0) /* none to be named is an error */
        TRY(CUDA(cudaGraphNodeGetDependencies(clear, before EDGES, &count)));
    if (followers > 0)
        TRY(CUDA(cudaGraphNodeGetDependentNodes(clear, behind EDGES, &followers)));
    int byte = 0;
    void *arguments[] = {&p.dst, &byte, &bytes};
    cudaKernelNodeParams kernel = {};
    kernel.func = (void *)fill_kernel;
    kernel.gridDim = dim3(fill_blocks(bytes));
    kernel.blockDim = dim3(FILL_THREADS);
    kernel.kernelParams = arguments;
    TRY(CUDA(cudaGraphAddKernelNode(&node, graph, before, count, &kernel)));
    cudaKernelNodeAttrValue value = {};
    value.priority = priority;
    TRY(CUDA(cudaGraphKernelNodeSetAttribute(node, cudaKernelNodeAttributePriority, &value)));
    for (size_t i = 0; i < followers; i++)
        from[i] = node;
    if (followers > 0)
        TRY(CUDA(cudaGraphAddDependencies(graph, from, behind EDGES, followers)));
    return CUDA(cudaGraphDestroyNode(clear));
}

enum status fill_nodes(void *graph)
{
    enum status st = ST_OK;
    cudaGraph_t g = (cudaGraph_t)graph;
    cudaGraphNode_t *nodes = NULL;
    size_t count = 0;
    int least = 0, greatest = 0;
    TRY(CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest)));
    TRY(CUDA(cudaGraphGetNodes(g, NULL, &count)));
    TRY(mem_alloc(&nodes, (count + 1) * sizeof *nodes));
    TRY_GOTO(st, out, CUDA(cudaGraphGetNodes(g, nodes, &count)));
    for (size_t i = 0; i < count; i++) {
        enum cudaGraphNodeType type;
        if (cudaGraphNodeGetType(nodes[i], &type) != cudaSuccess)
            (void)cudaGetLastError(); /* a kind that CUDA's runtime has no name for */
        else if (type == cudaGraphNodeTypeMemset)
            TRY_GOTO(st, out, replace_clear(g, nodes[i], greatest));
    }
out:
    mem_free(&nodes);
    return st;
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
