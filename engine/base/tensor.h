/*
 * engine/base/tensor.h - dtypes, and a view of memory with a shape. Views never own.
 */
#ifndef ENGINE_BASE_TENSOR_H
#define ENGINE_BASE_TENSOR_H

#include <stdint.h>

#include "engine/base/status.h"

C_BEGIN

enum dtype { DTYPE_F32, DTYPE_BF16, DTYPE_I32, DTYPE_F64, DTYPE_U16, DTYPE_COUNT };

enum { TENSOR_MAX_DIMS = 3 };

struct tensor {
    void *data; /* borrowed; on the device of the op that gets it */
    enum dtype dtype;
    int dims;
    int64_t shape[TENSOR_MAX_DIMS]; /* elements, row-major, contiguous */
};

static inline size_t dtype_bytes(enum dtype dtype)
{
    return dtype == DTYPE_BF16 || dtype == DTYPE_U16 ? 2 : dtype == DTYPE_F64 ? 8 : 4;
}

static inline const char *dtype_name(enum dtype dtype)
{
    return dtype == DTYPE_F32    ? "fp32"
           : dtype == DTYPE_BF16 ? "bf16"
           : dtype == DTYPE_I32  ? "int32"
           : dtype == DTYPE_U16  ? "uint16"
                                 : "fp64";
}

static inline struct tensor tensor_1d(void *data, enum dtype dtype, int64_t n)
{
    struct tensor t = {data, dtype, 1, {n, 1, 1}};
    return t;
}

static inline struct tensor tensor_2d(void *data, enum dtype dtype, int64_t rows, int64_t columns)
{
    struct tensor t = {data, dtype, 2, {rows, columns, 1}};
    return t;
}

static inline int64_t tensor_numel(struct tensor t)
{
    return t.shape[0] * t.shape[1] * t.shape[2];
}

static inline size_t tensor_bytes(struct tensor t)
{
    return (size_t)tensor_numel(t) * dtype_bytes(t.dtype);
}

C_END

#endif
