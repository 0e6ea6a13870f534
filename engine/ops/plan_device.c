#include "engine/ops/plan_device.h"

#include <stdio.h>

#include "engine/ops/cuda_sizes.h"
#include "engine/ops/ops.h"

extern const struct ops ops_cpu;

/* All of the CUDA table that builds without CUDA can have. */
static const struct ops ops_cuda_sizes = {
    .name = "cuda",
    .workspace_bytes = cuda_workspace_bytes,
    .side_workspace_bytes = cuda_side_workspace_bytes,
};

enum status plan_device_init(struct device *device, enum device_kind kind,
                             enum precision_kind precision, int threads)
{
    bool cuda = kind == DEVICE_CUDA;
    ASSERT(kind != DEVICE_AUTO && threads >= 1);
    if (!cuda && precision == PRECISION_BF16)
        return FAIL(UNSUPPORTED, "the CPU computes in fp32; set train.precision to fp32 or auto, "
                                 "or plan for GPUs: train.device cuda");
    *device = (struct device){
        .compute = cuda ? &ops_cuda_sizes : &ops_cpu,
        .param_dtype = cuda && precision != PRECISION_FP32 ? DTYPE_BF16 : DTYPE_F32,
        .threads = threads,
        .fixed_rows = cuda,
    };
    snprintf(device->name, sizeof device->name, "%s", cuda ? "GPU" : "CPU");
    return ST_OK;
}
