#include "engine/ops/gemm_plan.h"

#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/ops/attention_cuda.cuh"
#include "engine/ops/gemm_lt.cuh"

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

static enum status gemm_plan_desc(struct gemm_plan *p, const struct gemm_form *f, const void *bias,
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
        TRY(CUBLAS(cublasLtMatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                                  &bias, sizeof bias)));
    }
    return ST_OK;
}

enum status gemm_plan_describe(struct gemm_plan *p, const void *bias, cublasComputeType_t compute)
{
    struct gemm_form form = gemm_form(&p->key);
    TRY(gemm_plan_layouts(p, &form));
    return gemm_plan_desc(p, &form, bias, compute);
}

static enum status gemm_plan_aim(struct gemm_plan *p, uint32_t sm)
{
    int32_t target = (int32_t)sm;
    return CUBLAS(cublasLtMatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET,
                                                 &target, sizeof target));
}

static enum status gemm_preference(cublasLtMatmulPreferenceOpaque_t *preference,
                                   const struct gemm_key *key)
{
    static const cublasLtMatmulPreferenceAttributes_t alignments[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    size_t workspace = GEMM_WORKSPACE_BYTES;
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    uint32_t align = (uint32_t)key->align;
    TRY(CUBLAS(cublasLtMatmulPreferenceInit(preference)));
    TRY(CUBLAS(cublasLtMatmulPreferenceSetAttribute(
        preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace)));
    TRY(CUBLAS(cublasLtMatmulPreferenceSetAttribute(
        preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof schemes)));
    for (size_t i = 0; i < sizeof alignments / sizeof *alignments; i++)
        TRY(CUBLAS(
            cublasLtMatmulPreferenceSetAttribute(preference, alignments[i], &align, sizeof align)));
    return ST_OK;
}

enum status gemm_plan_ask(struct gemm_library *library, struct gemm_plan *p, uint32_t sm,
                          struct gemm_algo *algos, int most, int *count)
{
    enum { MOST = 16 };
    cublasLtMatmulPreferenceOpaque_t preference;
    cublasLtMatmulHeuristicResult_t result[MOST];
    int offered = 0;
    ASSERT(most <= MOST);
    *count = 0;
    TRY(gemm_plan_aim(p, sm));
    TRY(gemm_preference(&preference, &p->key));
    cublasStatus_t st =
        cublasLtMatmulAlgoGetHeuristic(library->handle, &p->desc, &p->first, &p->second, &p->out,
                                       &p->out, &preference, most, result, &offered);
    if (st == CUBLAS_STATUS_NOT_SUPPORTED)
        return ST_OK;
    TRY(CUBLAS(st));
    for (int i = 0; i < offered; i++)
        if (result[i].state == CUBLAS_STATUS_SUCCESS)
            algos[(*count)++] = {result[i].algo, sm};
    return ST_OK;
}

/* The library's first choice, beside collectives too. */
static enum status gemm_plan_favourite(struct gemm_library *library, struct gemm_plan *p,
                                       int *count)
{
    TRY(gemm_plan_ask(library, p, 0, &p->alone, 1, count));
    p->beside = p->alone;
    return ST_OK;
}

/* fp32: the pedantic kind first; where it has no algorithm, plain fp32, which is no TF32 either. */
static enum status gemm_plan_choose(struct gemm_library *library, struct gemm_plan *p,
                                    const void *bias)
{
    int count = 0;
    if (p->key.dtype != DTYPE_BF16) {
        TRY(gemm_plan_describe(p, bias, CUBLAS_COMPUTE_32F_PEDANTIC));
        TRY(gemm_plan_favourite(library, p, &count));
        if (count > 0)
            return ST_OK;
    }
    TRY(gemm_plan_describe(p, bias, CUBLAS_COMPUTE_32F));
    TRY(gemm_plan_favourite(library, p, &count));
    if (count == 0)
        return FAIL(UNSUPPORTED,
                    "cuBLASLt has no algorithm for product kind %d, %s, T %lld, N %lld, K %lld",
                    p->key.kind, dtype_name((enum dtype)p->key.dtype), (long long)p->key.T,
                    (long long)p->key.N, (long long)p->key.K);
    return ST_OK;
}

/* ---- algorithms as numbers ------------------------------------------------------------------- */

/* By enum gemm_attribute, with the size the library wants; GEMM_SM is one of the product. */
static const struct {
    cublasLtMatmulAlgoConfigAttributes_t name;
    size_t bytes;
} attributes[GEMM_SM] = {
    {CUBLASLT_ALGO_CONFIG_ID, 4},
    {CUBLASLT_ALGO_CONFIG_TILE_ID, 4},
    {CUBLASLT_ALGO_CONFIG_STAGES_ID, 4},
    {CUBLASLT_ALGO_CONFIG_SPLITK_NUM, 4},
    {CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, 4},
    {CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, 4},
    {CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, 4},
    {CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, 2},
    {CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, 2},
};
static_assert(sizeof attributes / sizeof *attributes == GEMM_ATTRIBUTES - 1, "GEMM_SM is the last");

void gemm_algo_read(uint32_t values[GEMM_ATTRIBUTES], const struct gemm_algo *algo)
{
    values[GEMM_SM] = algo->sm;
    for (int i = 0; i < GEMM_SM; i++) {
        size_t written = 0;
        values[i] = 0; /* little endian: the low bytes of a narrow one */
        if (cublasLtMatmulAlgoConfigGetAttribute(&algo->lt, attributes[i].name, &values[i],
                                                 attributes[i].bytes,
                                                 &written) != CUBLAS_STATUS_SUCCESS)
            values[i] = 0;
    }
}

bool gemm_algo_make(const struct gemm_library *library, struct gemm_algo *algo, struct gemm_plan *p,
                    const uint32_t values[GEMM_ATTRIBUTES])
{
    const uint32_t reproducible =
        CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    cudaDataType_t in = p->key.dtype == DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_32F;
    cudaDataType_t out = p->key.kind == GEMM_BACKWARD_WEIGHT ? CUDA_R_32F : in;
    cublasLtMatmulHeuristicResult_t result;
    memset(algo, 0, sizeof *algo); /* the library leaves gaps as they are */
    algo->sm = values[GEMM_SM];
    if (values[GEMM_REDUCTION] & ~reproducible || values[GEMM_ID] > INT32_MAX ||
        values[GEMM_SM] > (uint64_t)library->card.multiprocessors ||
        gemm_plan_aim(p, values[GEMM_SM]) != ST_OK)
        return false;
    if (cublasLtMatmulAlgoInit(library->handle, CUBLAS_COMPUTE_32F, CUDA_R_32F, in, in, out, out,
                               (int)values[GEMM_ID], &algo->lt) != CUBLAS_STATUS_SUCCESS)
        return false;
    for (int i = GEMM_ID + 1; i < GEMM_SM; i++) {
        if (attributes[i].bytes == 2 && values[i] > UINT16_MAX)
            return false;
        if (cublasLtMatmulAlgoConfigSetAttribute(&algo->lt, attributes[i].name, &values[i],
                                                 attributes[i].bytes) != CUBLAS_STATUS_SUCCESS)
            return false;
    }
    return cublasLtMatmulAlgoCheck(library->handle, &p->desc, &p->first, &p->second, &p->out,
                                   &p->out, &algo->lt, &result) == CUBLAS_STATUS_SUCCESS &&
           result.state == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= GEMM_WORKSPACE_BYTES;
}

void gemm_card(const struct device *device, struct gemm_card *card)
{
    *card = gemm_library_of(device)->card;
}

/* Both algorithms of an entry. */
static bool gemm_plan_take(const struct gemm_library *library, struct gemm_plan *p,
                           const struct gemm_entry *entry)
{
    if (!gemm_algo_make(library, &p->alone, p, entry->alone.algo))
        return false;
    p->beside = p->alone;
    return p->key.beside == 0 || gemm_algo_make(library, &p->beside, p, entry->beside.algo);
}

bool gemm_plan_accepts(const struct device *device, const struct gemm_entry *entry)
{
    struct gemm_plan p = {};
    p.key = entry->key;
    /* No product runs here: any address with the right alignment will do. */
    const void *bias = (const void *)(uintptr_t)p.key.align;
    if (p.key.dtype != DTYPE_BF16 || (p.key.bias && p.key.kind != GEMM_FORWARD))
        return false;
    return gemm_plan_describe(&p, p.key.bias ? bias : NULL, CUBLAS_COMPUTE_32F) == ST_OK &&
           gemm_plan_take(gemm_library_of(device), &p, entry);
}

/* ---- the products met so far ----------------------------------------------------------------- */

static uint64_t gemm_hash(const struct gemm_key *key)
{
    const unsigned char *byte = (const unsigned char *)key;
    uint64_t hash = 0xCBF29CE484222325u; /* FNV-1a */
    for (size_t i = 0; i < sizeof *key; i++)
        hash = (hash ^ byte[i]) * 0x100000001B3u;
    return hash;
}

/* From the plan, else by the heuristic. */
static enum status gemm_plan_make(struct gemm_library *library, struct gemm_plan *p,
                                  const void *bias)
{
    const struct gemm_entry *entry = NULL;
    struct gemm_key serving = gemm_serving_key(&p->key);
    if (p->key.dtype != DTYPE_BF16)
        return gemm_plan_choose(library, p, bias);
    if (library->table)
        entry = gemm_table_find(library->table, &serving);
    if (entry) {
        TRY(gemm_plan_describe(p, bias, CUBLAS_COMPUTE_32F));
        if (gemm_plan_take(library, p, entry))
            return ST_OK;
    }
    library->missing++;
    return gemm_plan_choose(library, p, bias);
}

static enum status gemm_plan_find(struct gemm_library *library, struct gemm_plan **out,
                                  const struct gemm_key *key, const void *bias)
{
    enum { SLOTS = 2 * GEMM_TABLE_MAX };
    uint64_t slot = gemm_hash(key) % SLOTS;
    for (; library->slot[slot] != 0; slot = (slot + 1) % SLOTS) {
        *out = &library->plan[library->slot[slot] - 1];
        if (memcmp(&(*out)->key, key, sizeof *key) == 0)
            return ST_OK;
    }
    if (library->count == GEMM_TABLE_MAX)
        return FAIL(UNSUPPORTED, "more than %d different matrix products", (int)GEMM_TABLE_MAX);
    *out = &library->plan[library->count];
    (*out)->key = *key;
    TRY(gemm_plan_make(library, *out, bias));
    library->slot[slot] = ++library->count;
    return ST_OK;
}

void gemm_plan_install(struct device *device, const struct gemm_table *table)
{
    struct gemm_library *library = gemm_library_of(device);
    ASSERT(table == NULL || gemm_card_equal(&table->card, &library->card));
    library->table = table;
    library->count = library->missing = library->issued_beside = 0;
    memset(library->slot, 0, sizeof library->slot);
}

void gemm_plan_beside(struct device *device, int64_t multiprocessors)
{
    struct gemm_library *library = gemm_library_of(device);
    int64_t most = library->card.multiprocessors - 1;
    library->beside = (int32_t)(multiprocessors < most ? multiprocessors : most);
}

enum status cuda_pass_begin(struct stream *s, double product_flops, uint16_t beside)
{
    gemm_library_of(s->device)->pass = {product_flops, beside, 0.0};
    return ST_OK;
}

int gemm_plan_issued_beside(const struct device *device)
{
    return gemm_library_of(device)->issued_beside;
}

int gemm_plan_missing(const struct device *device)
{
    return gemm_library_of(device)->missing;
}

/* ---- running --------------------------------------------------------------------------------- */

/* The largest power of two up to GEMM_ALIGN that divides all addresses. */
static int32_t gemm_alignment(const void *a, const void *b, const void *c, const void *d)
{
    uintptr_t bits = (uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)d | GEMM_ALIGN;
    return (int32_t)(bits & (~bits + 1));
}

/* The next product of a pass: is a collective there when it begins, or when half of it is done? So
 * in doubt: what is made for the rest of the card loses less alone than the other does beside. */
static bool is_beside(struct gemm_pass *pass, const struct gemm_key *key)
{
    double flops = 2.0 * (double)key->T * (double)key->N * (double)key->K;
    double begin = pass->begun, middle = begin + flops / 2.0;
    pass->begun += flops;
    if (key->beside == 0 || !(middle < pass->flops))
        return false;
    int first = (int)(begin / pass->flops * PASS_PARTS);
    int second = (int)(middle / pass->flops * PASS_PARTS);
    return (pass->beside >> first | pass->beside >> second) & 1;
}

enum status gemm_plan_issue(const struct gemm_library *library, struct gemm_plan *p,
                            const struct gemm_algo *algo, void *out, const void *a, const void *b,
                            void *workspace, cudaStream_t stream)
{
    float one = 1.0f, beta = p->key.add ? 1.0f : 0.0f;
    TRY(gemm_plan_aim(p, algo->sm));
    return CUBLAS(cublasLtMatmul(library->handle, &p->desc, &one, b, &p->first, a, &p->second,
                                 &beta, out, &p->out, out, &p->out, &algo->lt, workspace,
                                 GEMM_WORKSPACE_BYTES, stream));
}

enum status gemm_run(struct stream *s, enum gemm_kind kind, struct tensor out, struct tensor a,
                     struct tensor b, const void *bias, int64_t T, int64_t N, int64_t K, bool add)
{
    struct gemm_library *library = gemm_library_of(s->device);
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
    key.align = gemm_alignment(out.data, a.data, b.data, bias);
    key.beside = a.dtype == DTYPE_BF16 ? library->beside : 0;
    TRY(stream_scratch(&workspace, s, GEMM_WORKSPACE_BYTES));
    TRY(gemm_plan_find(library, &p, &key, bias));
    if (bias)
        TRY(CUBLAS(cublasLtMatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                                  &bias, sizeof bias)));
    bool beside = is_beside(&library->pass, &key);
    library->issued_beside += beside;
    return gemm_plan_issue(library, p, beside ? &p->beside : &p->alone, out.data, a.data, b.data,
                           workspace, stream_cuda(s));
}

/* ---- open and close -------------------------------------------------------------------------- */

/* The name in a plan file is printable ASCII. */
static enum status card_of(struct gemm_card *card, const struct device *device)
{
    int multiprocessors = 0;
    snprintf(card->name, sizeof card->name, "%s", device->name[0] ? device->name : "unnamed");
    for (char *c = card->name; *c; c++)
        if (*c < ' ' || *c > '~')
            *c = '?';
    TRY(CUDA(
        cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device->index)));
    card->multiprocessors = multiprocessors;
    card->library = (int64_t)cublasLtGetVersion();
    return ST_OK;
}

enum status ops_cuda_open(struct device *device)
{
    struct gemm_library *library;
    TRY(mem_alloc(&library, sizeof *library));
    device->library = library;
    TRY(card_of(&library->card, device));
    TRY(columns_open(device));
    TRY(CUBLAS(cublasLtCreate(&library->handle)));
    return attention_cuda_open();
}

void ops_cuda_close(struct device *device)
{
    struct gemm_library *library = gemm_library_of(device);
    if (library && library->handle)
        cublasLtDestroy(library->handle);
    columns_close(device);
    mem_free(&device->library);
}
