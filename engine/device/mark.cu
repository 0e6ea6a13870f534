#include "engine/device/mark.h"

#include "engine/device/cuda_check.h"

/* A kernel and not a copy: a captured copy would need host memory for each value, and it would
 * queue behind the large copies of the copy engine. */
static __global__ void mark_kernel(volatile uint32_t *word, uint32_t value)
{
    *word = value;
    __threadfence_system();
}

enum status mark_launch(void *stream, uint32_t *word, uint32_t value)
{
    mark_kernel<<<1, 1, 0, (cudaStream_t)stream>>>(word, value);
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
