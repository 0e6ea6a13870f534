/*
 * engine/device/cuda_check.h - CUDA() turns a CUDA result into a status.
 *
 *     TRY(CUDA(cudaEventCreate(&event)));
 *     return CUDA(cudaGetLastError());      after a kernel launch
 *
 * ST_DEVICE, with the call's text and CUDA's own words. For the .c and .cu files that call CUDA;
 * empty in a CPU build.
 */
#ifndef ENGINE_DEVICE_CUDA_CHECK_H
#define ENGINE_DEVICE_CUDA_CHECK_H

#include "engine/base/status.h"

#ifdef TESSERA_CUDA

#include <cuda_runtime_api.h>

static inline enum status cuda_check(cudaError_t error, const char *call, const char *file,
                                     int line)
{
    if (error == cudaSuccess)
        return ST_OK;
    /* CUDA keeps the error for the next cudaGetLastError(), which would blame another call. */
    (void)cudaGetLastError();
    return status_fail(ST_DEVICE, file, line, "%s: %s (%s)", call, cudaGetErrorString(error),
                       cudaGetErrorName(error));
}

#define CUDA(call) cuda_check((call), #call, __FILE__, __LINE__)

#endif
#endif
