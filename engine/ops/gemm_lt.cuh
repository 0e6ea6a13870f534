/*
 * engine/ops/gemm_lt.cuh - cuBLASLt as gemm_plan.cu and gemm_measure.cu share it.
 */
#ifndef ENGINE_OPS_GEMM_LT_CUH
#define ENGINE_OPS_GEMM_LT_CUH

#include <cublasLt.h>

#include "engine/ops/cuda_common.cuh"
#include "engine/ops/gemm_plan.h"

enum { GEMM_ALIGN = 256 };

struct gemm_algo {
    cublasLtMatmulAlgo_t lt;
    uint32_t sm; /* multiprocessors that it is made for; 0: all */
};

/* A product as the library takes it. */
struct gemm_plan {
    struct gemm_key key;
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t out, first, second; /* column-major, as cuBLAS sees them */
    struct gemm_algo alone, beside;                  /* collectives; equal unless a plan has two */
};

/* What op_pass_begin() said. */
struct gemm_pass {
    double flops;    /* of all products of the pass; 0: none is beside collectives */
    uint16_t beside; /* bit k: the k-th of 16 parts of them is */
    double begun;    /* flops of the products so far */
};

struct gemm_library {
    cublasLtHandle_t handle; /* owned */
    struct gemm_card card;
    const struct gemm_table *table; /* borrowed; NULL: none is installed */
    int32_t beside;                 /* multiprocessors that collectives hold; 0: there are none */
    struct gemm_pass pass;
    int count, missing, issued_beside;
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

/** gemm_plan_ask() - up to @most algorithms that the heuristic offers for @sm multiprocessors (0:
 * all), its favourite first; none is no failure. All are reproducible and fit the workspace. */
enum status gemm_plan_ask(struct gemm_library *library, struct gemm_plan *p, uint32_t sm,
                          struct gemm_algo *algos, int most, int *count);

/** gemm_algo_read() - the attributes of an algorithm, as a plan file has them. */
void gemm_algo_read(uint32_t values[GEMM_ATTRIBUTES], const struct gemm_algo *algo);

/** gemm_algo_make() - the algorithm with these attributes for the described @p; false if the
 * library, or what gemm_plan.h promises, refuses it. */
bool gemm_algo_make(const struct gemm_library *library, struct gemm_algo *algo, struct gemm_plan *p,
                    const uint32_t values[GEMM_ATTRIBUTES]);

/** gemm_plan_issue() - enqueue the product of @p with @algo. */
enum status gemm_plan_issue(const struct gemm_library *library, struct gemm_plan *p,
                            const struct gemm_algo *algo, void *out, const void *a, const void *b,
                            void *workspace, cudaStream_t stream);

#endif
