/*
 * engine/ops/gemm_lt.cuh - cuBLASLt as gemm_plan.cu and gemm_measure.cu share it.
 */
#ifndef ENGINE_OPS_GEMM_LT_CUH
#define ENGINE_OPS_GEMM_LT_CUH

#include <cublasLt.h>

#include "engine/ops/cuda_common.cuh"
#include "engine/ops/gemm_plan.h"

enum { GEMM_ALIGN = 256 };

/* A product as the library takes it. */
struct gemm_plan {
    struct gemm_key key;
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t out, first, second; /* column-major, as cuBLAS sees them */
    cublasLtMatmulAlgo_t algo;
};

struct gemm_library {
    cublasLtHandle_t handle; /* owned */
    struct gemm_card card;
    const struct gemm_table *table; /* borrowed; NULL: none is installed */
    int32_t beside;                 /* multiprocessors that collectives hold beside bf16 products */
    int count, missing;
    int32_t slot[2 * GEMM_TABLE_MAX]; /* open addressing: plan + 1, or 0 */
    struct gemm_plan plan[GEMM_TABLE_MAX];
};

static inline struct gemm_library *gemm_library_of(const struct device *device)
{
    return (struct gemm_library *)device->library;
}

static inline enum status cublas_status(cublasStatus_t result, const char *call, const char *file,
                                        int line)
{
    if (result == CUBLAS_STATUS_SUCCESS)
        return ST_OK;
    return status_fail(result == CUBLAS_STATUS_NOT_SUPPORTED ? ST_UNSUPPORTED : ST_DEVICE, file,
                       line, "%s: %s", call, cublasLtGetStatusString(result));
}

#define CUBLAS(call) cublas_status((call), #call, __FILE__, __LINE__)

/** gemm_plan_describe() - all of @p but the algorithm, from its key. @bias: an address aligned as
 * the key says, which the library looks at; NULL without bias. */
enum status gemm_plan_describe(struct gemm_plan *p, const void *bias, cublasComputeType_t compute);

/** gemm_plan_aim() - @p, described, is for @sm multiprocessors; 0: all. */
enum status gemm_plan_aim(struct gemm_plan *p, uint32_t sm);

/** gemm_plan_ask() - up to @most algorithms that the heuristic offers, its favourite first; none is
 * no failure. All are reproducible and fit the workspace. */
enum status gemm_plan_ask(struct gemm_library *library, struct gemm_plan *p,
                          cublasLtMatmulAlgo_t *algos, int most, int *count);

/** gemm_algo_read() - the attributes of an algorithm, as a plan file has them, for @sm
 * multiprocessors. */
void gemm_algo_read(uint32_t values[GEMM_ATTRIBUTES], const cublasLtMatmulAlgo_t *algo,
                    uint32_t sm);

/** gemm_algo_make() - the algorithm with these attributes, and @p's aim, for the described @p;
 * false if the library, or what gemm_plan.h promises, refuses it. */
bool gemm_algo_make(const struct gemm_library *library, cublasLtMatmulAlgo_t *algo,
                    struct gemm_plan *p, const uint32_t values[GEMM_ATTRIBUTES]);

/** gemm_plan_issue() - enqueue the product of @p with its algorithm. */
enum status gemm_plan_issue(const struct gemm_library *library, struct gemm_plan *p, void *out,
                            const void *a, const void *b, void *workspace, cudaStream_t stream);

#endif
