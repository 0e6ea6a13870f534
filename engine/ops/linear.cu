/*
 * engine/ops/linear.cu - CUDA backend of linear.h: cuBLASLt products by plan (gemm_plan.h).
 *
 * The bias is added in the product's epilogue, before the one rounding of y. Without rows (T = 0)
 * no product runs; a set writes zeros.
 */
#include "engine/ops/cuda_common.cuh"
#include "engine/ops/gemm_plan.h"

enum status cuda_linear_forward(struct stream *s, struct tensor y, struct tensor x, struct tensor w,
                                struct tensor bias)
{
    int64_t T = x.shape[0], N = w.shape[0], K = w.shape[1];
    if (T == 0)
        return ST_OK;
    return gemm_run(s, GEMM_FORWARD, y, x, w, bias.data, T, N, K, false);
}

enum status cuda_linear_backward_data(struct stream *s, struct tensor dx, struct tensor dy,
                                      struct tensor w, bool add)
{
    int64_t T = dy.shape[0], N = w.shape[0], K = w.shape[1];
    if (T == 0 || !dx.data)
        return ST_OK;
    return gemm_run(s, GEMM_BACKWARD_DATA, dx, dy, w, NULL, T, N, K, add);
}

enum status cuda_linear_backward_weight(struct stream *s, struct tensor dw, struct tensor dy,
                                        struct tensor x, bool add)
{
    int64_t T = dy.shape[0], N = dy.shape[1], K = x.shape[1];
    if (dw.data && T > 0)
        return gemm_run(s, GEMM_BACKWARD_WEIGHT, dw, dy, x, NULL, T, N, K, add);
    if (dw.data && !add)
        return CUDA(cudaMemsetAsync(dw.data, 0, tensor_bytes(dw), stream_cuda(s)));
    return ST_OK;
}
