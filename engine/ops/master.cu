/*
 * engine/ops/master.cu - CUDA backend of master.h: the split, where parameters are filled in.
 *
 * An element a thread: it is as fast as the host's values come.
 */
#include "engine/ops/master.h"

#include "engine/ops/cuda_common.cuh"

enum { SPLIT_THREADS = 256 };

__global__ static void master_split_kernel(uint16_t *param, uint16_t *low, const float *master,
                                           int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * SPLIT_THREADS + threadIdx.x;
    kernel_begin();
    if (i >= n)
        return;
    uint32_t bits = __float_as_uint(master[i]);
    param[i] = master_high(bits);
    if (low)
        low[i] = master_low(bits);
}

enum status cuda_master_split(struct stream *s, struct tensor param, struct tensor low,
                              struct tensor master)
{
    int64_t n = tensor_numel(master);
    if (n == 0)
        return ST_OK;
    return launch_kernel(s, dim3((unsigned)div_up(n, SPLIT_THREADS)), SPLIT_THREADS,
                         master_split_kernel, (uint16_t *)param.data, (uint16_t *)low.data,
                         (const float *)master.data, n);
}
