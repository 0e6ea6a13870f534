#include "engine/ops/gemm_plan.h"

#include <cublasLt.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/ops/attention_cuda.cuh"
#include "engine/ops/cuda_common.cuh"

enum { GEMM_MAX_PLANS = 4096, GEMM_ALIGN = 256 };

/* All that decides the algorithm. Compared as bytes: no padding. */
struct gemm_key {
    int64_t T, N, K;
    int32_t kind, dtype, add, bias;
    int32_t align_out, align_a, align_b, align_bias; /* bytes, at most GEMM_ALIGN */
};
static_assert(sizeof(struct gemm_key) == 3 * 8 + 8 * 4, "no padding");

struct gemm_plan {
    struct gemm_key key;
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t out, first, second; /* column-major, as cuBLAS sees them */
    cublasLtMatmulAlgo_t algo;
    size_t workspace_bytes;
};

struct gemm_library {
    cublasLtHandle_t handle; /* owned */
    int count;
    int32_t slot[2 * GEMM_MAX_PLANS]; /* open addressing: plan + 1, or 0 */
    struct gemm_plan plan[GEMM_MAX_PLANS];
};

static enum status cublas_status(cublasStatus_t result, const char *call, int line)
{
    if (result == CUBLAS_STATUS_SUCCESS)
        return ST_OK;
    return status_fail(result == CUBLAS_STATUS_NOT_SUPPORTED ? ST_UNSUPPORTED : ST_DEVICE, __FILE__,
                       line, "%s: %s", call, cublasLtGetStatusString(result));
}

#define CUBLAS(call) cublas_status((call), #call, __LINE__)

static struct gemm_library *library_of(const struct device *device)
{
    return (struct gemm_library *)device->library;
}

/* ---- one plan -------------------------------------------------------------------------------- */

/*
 * A row-major matrix is cuBLAS's column-major transposed one, so out^T is computed. With the
 * operands in cuBLAS's order (first, second) and m, n, k its sizes:
 *
 *     forward          y^T (N, T)  = op_T(w^T (K, N)) x^T (K, T)
 *     backward data    dx^T (K, T) = w^T (K, N)  dy^T (N, T)
 *     backward weight  dw^T (K, N) = x^T (K, T)  op_T(dy^T (N, T))
 */
struct gemm_form {
    int64_t m, n, k;
    int64_t first_rows, first_columns, second_rows, second_columns;
    cublasOperation_t op_first, op_second;
};

static struct gemm_form gemm_form(const struct gemm_key *key)
{
    int64_t T = key->T, N = key->N, K = key->K;
    switch ((enum gemm_kind)key->kind) {
    case GEMM_FORWARD:
        return {N, T, K, K, N, K, T, CUBLAS_OP_T, CUBLAS_OP_N};
    case GEMM_BACKWARD_DATA:
        return {K, T, N, K, N, N, T, CUBLAS_OP_N, CUBLAS_OP_N};
    default:
        return {K, N, T, K, T, N, T, CUBLAS_OP_N, CUBLAS_OP_T};
    }
}

static enum status gemm_plan_layouts(struct gemm_plan *p, const struct gemm_form *f)
{
    cudaDataType_t in = p->key.dtype == DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_32F;
    cudaDataType_t out = p->key.kind == GEMM_BACKWARD_WEIGHT ? CUDA_R_32F : in;
    TRY(CUBLAS(cublasLtMatrixLayoutInit(&p->first, in, (uint64_t)f->first_rows,
                                        (uint64_t)f->first_columns, f->first_rows)));
    TRY(CUBLAS(cublasLtMatrixLayoutInit(&p->second, in, (uint64_t)f->second_rows,
                                        (uint64_t)f->second_columns, f->second_rows)));
    return CUBLAS(cublasLtMatrixLayoutInit(&p->out, out, (uint64_t)f->m, (uint64_t)f->n, f->m));
}

static enum status gemm_plan_desc(struct gemm_plan *p, const struct gemm_form *f,
                                  cublasComputeType_t compute)
{
    TRY(CUBLAS(cublasLtMatmulDescInit(&p->desc, compute, CUDA_R_32F)));
    TRY(CUBLAS(cublasLtMatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &f->op_first,
                                              sizeof f->op_first)));
    TRY(CUBLAS(cublasLtMatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_TRANSB, &f->op_second,
                                              sizeof f->op_second)));
    if (p->key.bias) {
        cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
        cudaDataType_t type = p->key.dtype == DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_32F;
        TRY(CUBLAS(cublasLtMatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE,
                                                  &epilogue, sizeof epilogue)));
        TRY(CUBLAS(cublasLtMatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
                                                  &type, sizeof type)));
    }
    return ST_OK;
}

static enum status gemm_preference(cublasLtMatmulPreferenceOpaque_t *preference,
                                   const struct gemm_key *key)
{
    size_t workspace = GEMM_WORKSPACE_BYTES;
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    /* cuBLAS's first operand is our second but for the weight gradient, where it is x, also b. */
    uint32_t first = (uint32_t)key->align_b, second = (uint32_t)key->align_a;
    uint32_t out = (uint32_t)key->align_out;
    TRY(CUBLAS(cublasLtMatmulPreferenceInit(preference)));
    TRY(CUBLAS(cublasLtMatmulPreferenceSetAttribute(
        preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace)));
    TRY(CUBLAS(cublasLtMatmulPreferenceSetAttribute(
        preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof schemes)));
    TRY(CUBLAS(cublasLtMatmulPreferenceSetAttribute(
        preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &first, sizeof first)));
    TRY(CUBLAS(cublasLtMatmulPreferenceSetAttribute(
        preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &second, sizeof second)));
    TRY(CUBLAS(cublasLtMatmulPreferenceSetAttribute(
        preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &out, sizeof out)));
    return CUBLAS(cublasLtMatmulPreferenceSetAttribute(
        preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &out, sizeof out));
}

/* Ask the heuristic for an algorithm with this arithmetic; @found tells whether there is one. */
static enum status gemm_plan_ask(struct gemm_library *library, struct gemm_plan *p,
                                 const void *bias, cublasComputeType_t compute, bool *found)
{
    cublasLtMatmulPreferenceOpaque_t preference;
    cublasLtMatmulHeuristicResult_t result;
    struct gemm_form form = gemm_form(&p->key);
    int count = 0;
    TRY(gemm_plan_layouts(p, &form));
    TRY(gemm_plan_desc(p, &form, compute));
    if (bias) /* the heuristic looks at it */
        TRY(CUBLAS(cublasLtMatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                                  &bias, sizeof bias)));
    TRY(gemm_preference(&preference, &p->key));
    cublasStatus_t st =
        cublasLtMatmulAlgoGetHeuristic(library->handle, &p->desc, &p->first, &p->second, &p->out,
                                       &p->out, &preference, 1, &result, &count);
    *found = st == CUBLAS_STATUS_SUCCESS && count > 0 && result.state == CUBLAS_STATUS_SUCCESS;
    if (*found) {
        p->algo = result.algo;
        p->workspace_bytes = result.workspaceSize;
    }
    return st == CUBLAS_STATUS_NOT_SUPPORTED
               ? ST_OK
               : cublas_status(st, "cublasLtMatmulAlgoGetHeuristic", __LINE__);
}

/* fp32: the pedantic kind first; where it has no algorithm, plain fp32, which is no TF32 either. */
static enum status gemm_plan_make(struct gemm_library *library, struct gemm_plan *p,
                                  const void *bias)
{
    bool found = false;
    if (p->key.dtype != DTYPE_BF16)
        TRY(gemm_plan_ask(library, p, bias, CUBLAS_COMPUTE_32F_PEDANTIC, &found));
    if (!found)
        TRY(gemm_plan_ask(library, p, bias, CUBLAS_COMPUTE_32F, &found));
    if (!found)
        return FAIL(UNSUPPORTED,
                    "cuBLASLt has no algorithm for product kind %d, %s, T %lld, N %lld, K %lld",
                    p->key.kind, dtype_name((enum dtype)p->key.dtype), (long long)p->key.T,
                    (long long)p->key.N, (long long)p->key.K);
    return ST_OK;
}

/* ---- the table ------------------------------------------------------------------------------- */

static uint64_t gemm_hash(const struct gemm_key *key)
{
    const unsigned char *byte = (const unsigned char *)key;
    uint64_t hash = 0xCBF29CE484222325u; /* FNV-1a */
    for (size_t i = 0; i < sizeof *key; i++)
        hash = (hash ^ byte[i]) * 0x100000001B3u;
    return hash;
}

static enum status gemm_plan_find(struct gemm_library *library, struct gemm_plan **out,
                                  const struct gemm_key *key, const void *bias)
{
    enum { SLOTS = 2 * GEMM_MAX_PLANS };
    uint64_t slot = gemm_hash(key) % SLOTS;
    for (; library->slot[slot] != 0; slot = (slot + 1) % SLOTS) {
        *out = &library->plan[library->slot[slot] - 1];
        if (memcmp(&(*out)->key, key, sizeof *key) == 0)
            return ST_OK;
    }
    if (library->count == GEMM_MAX_PLANS)
        return FAIL(UNSUPPORTED, "more than %d different matrix products", (int)GEMM_MAX_PLANS);
    *out = &library->plan[library->count];
    (*out)->key = *key;
    TRY(gemm_plan_make(library, *out, bias));
    library->slot[slot] = ++library->count;
    return ST_OK;
}

/* The largest power of two up to GEMM_ALIGN that divides the address. */
static int32_t gemm_alignment(const void *address)
{
    uintptr_t bits = (uintptr_t)address | GEMM_ALIGN;
    return (int32_t)(bits & (~bits + 1));
}

enum status gemm_run(struct stream *s, enum gemm_kind kind, struct tensor out, struct tensor a,
                     struct tensor b, const void *bias, int64_t T, int64_t N, int64_t K, bool add)
{
    struct gemm_library *library = library_of(s->device);
    struct gemm_key key = {};
    struct gemm_plan *p = NULL;
    void *workspace;
    key.T = T;
    key.N = N;
    key.K = K;
    key.kind = kind;
    key.dtype = a.dtype;
    key.add = add;
    key.bias = bias != NULL;
    key.align_out = gemm_alignment(out.data);
    key.align_a = gemm_alignment(a.data);
    key.align_b = gemm_alignment(b.data);
    key.align_bias = gemm_alignment(bias);
    TRY(stream_scratch(&workspace, s, GEMM_WORKSPACE_BYTES));
    TRY(gemm_plan_find(library, &p, &key, bias));
    if (bias)
        TRY(CUBLAS(cublasLtMatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                                  &bias, sizeof bias)));
    float one = 1.0f, beta = add ? 1.0f : 0.0f;
    return CUBLAS(cublasLtMatmul(library->handle, &p->desc, &one, b.data, &p->first, a.data,
                                 &p->second, &beta, out.data, &p->out, out.data, &p->out, &p->algo,
                                 workspace, GEMM_WORKSPACE_BYTES, stream_cuda(s)));
}

/* ---- what the plans say ---------------------------------------------------------------------- */

int gemm_plan_count(const struct device *device)
{
    return library_of(device)->count;
}

static uint32_t gemm_algo_value(const struct gemm_plan *p,
                                cublasLtMatmulAlgoConfigAttributes_t what)
{
    uint32_t value = 0;
    size_t written;
    if (cublasLtMatmulAlgoConfigGetAttribute(&p->algo, what, &value, sizeof value, &written) !=
        CUBLAS_STATUS_SUCCESS)
        return 0;
    return value;
}

size_t gemm_plan_describe(const struct device *device, char *text, size_t bytes)
{
    static const char *const kind_name[GEMM_KINDS] = {"forward", "data", "weight"};
    const struct gemm_library *library = library_of(device);
    size_t used = 0;
    if (bytes > 0)
        text[0] = '\0';
    for (int i = 0; i < library->count; i++) {
        const struct gemm_plan *p = &library->plan[i];
        size_t room = used < bytes ? bytes - used : 0;
        int n =
            snprintf(room ? text + used : NULL, room,
                     "%s %s T=%lld N=%lld K=%lld add=%d bias=%d algo=%u tile=%u stages=%u "
                     "split=%u reduction=%u workspace=%zu\n",
                     kind_name[p->key.kind], dtype_name((enum dtype)p->key.dtype),
                     (long long)p->key.T, (long long)p->key.N, (long long)p->key.K, p->key.add,
                     p->key.bias, gemm_algo_value(p, CUBLASLT_ALGO_CONFIG_ID),
                     gemm_algo_value(p, CUBLASLT_ALGO_CONFIG_TILE_ID),
                     gemm_algo_value(p, CUBLASLT_ALGO_CONFIG_STAGES_ID),
                     gemm_algo_value(p, CUBLASLT_ALGO_CONFIG_SPLITK_NUM),
                     gemm_algo_value(p, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME), p->workspace_bytes);
        used += (size_t)n;
    }
    return used;
}

/* ---- open and close -------------------------------------------------------------------------- */

enum status ops_cuda_open(struct device *device)
{
    struct gemm_library *library;
    TRY(mem_alloc(&library, sizeof *library));
    device->library = library;
    TRY(CUBLAS(cublasLtCreate(&library->handle)));
    return attention_cuda_open();
}

void ops_cuda_close(struct device *device)
{
    struct gemm_library *library = library_of(device);
    if (library && library->handle)
        cublasLtDestroy(library->handle);
    mem_free(&device->library);
}
