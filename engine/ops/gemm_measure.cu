#include "engine/ops/gemm_measure.h"

#include "engine/base/arena.h"
#include "engine/base/clock.h"
#include "engine/ops/gemm_lt.cuh"

enum { OFFERED = 8, CANDIDATES = 2 * OFFERED, FINALISTS = 3, ROUNDS = 3 };
enum { MOST_RUNS = 12, MOST_SETS = 64 };

/* More than the L2 cache of any card so far. */
static const size_t ROTATED_BYTES = (size_t)96 << 20;
static const double NOISE = 0.01;
static const double HEAT_US = 40.0, FINAL_US = 160.0; /* of one candidate in one round, about */

/* ---- which ----------------------------------------------------------------------------------- */

static enum status want(struct gemm_table *wanted, const struct gemm_key *key)
{
    struct gemm_entry entry = {};
    entry.key = *key;
    if (wanted->count == GEMM_TABLE_MAX || gemm_table_find(wanted, key))
        return ST_OK;
    return gemm_table_add(wanted, &entry);
}

enum status gemm_wanted(struct gemm_table *wanted, const struct device *device, const int64_t *T,
                        int T_count)
{
    const struct gemm_library *library = gemm_library_of(device);
    wanted->card = library->card;
    for (int i = 0; i < library->count; i++) {
        struct gemm_key key = library->plan[i].key;
        if (key.dtype != DTYPE_BF16)
            continue;
        TRY(want(wanted, &key));
        for (int k = 0; k < T_count; k++) {
            key.T = T[k];
            TRY(want(wanted, &key));
        }
    }
    return ST_OK;
}

/* ---- operands -------------------------------------------------------------------------------- */

struct operands {
    size_t a_bytes, b_bytes, out_bytes, bias_bytes; /* multiples of GEMM_ALIGN */
    int sets;                                       /* of b and out */
};

static size_t aligned(int64_t numel, size_t elem_bytes)
{
    return ((size_t)numel * elem_bytes + GEMM_ALIGN - 1) / GEMM_ALIGN * GEMM_ALIGN;
}

static struct operands operands_of(const struct gemm_key *key)
{
    int64_t T = key->T, N = key->N, K = key->K;
    struct operands o = {};
    switch ((enum gemm_kind)key->kind) {
    case GEMM_FORWARD:
        o = {aligned(T * K, 2), aligned(N * K, 2), aligned(T * N, 2), aligned(N, 2), 0};
        break;
    case GEMM_BACKWARD_DATA:
        o = {aligned(T * N, 2), aligned(N * K, 2), aligned(T * K, 2), 0, 0};
        break;
    default:
        o = {aligned(T * N, 2), aligned(T * K, 2), aligned(N * K, 4), 0, 0};
    }
    o.sets = (int)(ROTATED_BYTES / (o.b_bytes + o.out_bytes)) + 1;
    o.sets = o.sets < 2 ? 2 : o.sets > MOST_SETS ? MOST_SETS : o.sets;
    return o;
}

static size_t operands_bytes(const struct operands *o)
{
    return o->bias_bytes + o->a_bytes + (size_t)o->sets * (o->b_bytes + o->out_bytes);
}

/* Thread i: 8 bf16 numbers of about N(0, 1), sums of four uniform bytes. Writes the memory once. */
__global__ static void gemm_fill_kernel(uint4 *out, size_t packs)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < packs;
         i += (size_t)gridDim.x * blockDim.x) {
        bf16 value[8];
#pragma unroll
        for (int k = 0; k < 8; k++) {
            uint32_t x = ((uint32_t)i * 8u + (uint32_t)k) * 0x9E3779B9u;
            x = (x ^ x >> 16) * 0x85EBCA6Bu;
            x = (x ^ x >> 13) * 0xC2B2AE35u;
            x ^= x >> 16;
            uint32_t sum = (x & 255u) + (x >> 8 & 255u) + (x >> 16 & 255u) + (x >> 24);
            value[k] = __float2bfloat16_rn(((float)sum - 510.0f) * (1.0f / 148.0f));
        }
        uint4 raw;
        memcpy(&raw, value, sizeof raw);
        out[i] = raw;
    }
}

/* ---- what holds multiprocessors meanwhile ---------------------------------------------------- */

/* On the device. */
struct hold {
    uint32_t begun; /* blocks that have their multiprocessors */
    uint32_t end;   /* they may leave them */
};

/* At most, beside the time of what it is for; if the library waits for it (to load a kernel, say),
 * it is not for long. */
static const double HOLD_US = 100000.0;

__device__ static uint64_t now_ns()
{
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

/* Wait until @word is @value, or for @most_ns. */
__device__ static void hold_wait(const volatile uint32_t *word, uint32_t value, uint64_t most_ns)
{
    for (uint64_t begun = now_ns(); *word != value && now_ns() - begun < most_ns;)
        __nanosleep(200);
}

/* A block of one thread and all shared memory has a multiprocessor for itself. */
__global__ static void gemm_hold_kernel(struct hold *hold, uint64_t most_ns)
{
    atomicAdd(&hold->begun, 1);
    hold_wait(&hold->end, 1, most_ns);
}

/* In the stream of the products: behind this they find @blocks multiprocessors held. */
__global__ static void gemm_held_kernel(const struct hold *hold, uint32_t blocks, uint64_t most_ns)
{
    hold_wait(&hold->begun, blocks, most_ns);
}

__global__ static void gemm_let_go_kernel(struct hold *hold)
{
    hold->end = 1;
}

/* ---- one product ----------------------------------------------------------------------------- */

struct candidate {
    cublasLtMatmulAlgo_t algo;
    uint32_t sm;
};

struct measuring {
    struct gemm_library *library;
    struct stream *s, *beside;
    struct hold *hold;
    int hold_bytes; /* of a block's shared memory */
    char *memory;
    void *workspace;
    struct operands operands;
    int runs;                                  /* so far: run i takes set i % sets */
    cudaEvent_t mark[CANDIDATES * ROUNDS + 1]; /* owned */
};

/* @us: what is measured meanwhile takes about that. */
static enum status hold_begin(struct measuring *m, int32_t blocks, double us)
{
    uint64_t most_ns = (uint64_t)(1e3 * (HOLD_US + 4.0 * us));
    TRY(CUDA(cudaMemsetAsync(m->hold, 0, sizeof *m->hold, stream_cuda(m->s))));
    TRY(CUDA(cudaEventRecord(m->mark[0], stream_cuda(m->s))));
    TRY(CUDA(cudaStreamWaitEvent(stream_cuda(m->beside), m->mark[0], 0)));
    gemm_hold_kernel<<<blocks, 1, m->hold_bytes, stream_cuda(m->beside)>>>(m->hold, most_ns);
    TRY(CUDA(cudaGetLastError()));
    gemm_held_kernel<<<1, 1, 0, stream_cuda(m->s)>>>(m->hold, (uint32_t)blocks, most_ns);
    return CUDA(cudaGetLastError());
}

static enum status hold_end(struct measuring *m)
{
    gemm_let_go_kernel<<<1, 1, 0, stream_cuda(m->s)>>>(m->hold);
    return CUDA(cudaGetLastError());
}

/* Its kernels are loaded here, for that may wait for what runs. */
static enum status hold_open(struct measuring *m)
{
    TRY(CUDA(cudaDeviceGetAttribute(&m->hold_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                    m->s->device->index)));
    TRY(CUDA(cudaFuncSetAttribute(gemm_hold_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  m->hold_bytes)));
    TRY(hold_end(m));
    TRY(stream_sync(m->s));
    TRY(hold_begin(m, 1, 0.0));
    TRY(hold_end(m));
    return stream_sync(m->beside);
}

static enum status take_candidate(struct gemm_plan *p, const struct candidate *c)
{
    p->algo = c->algo;
    return gemm_plan_aim(p, c->sm);
}

static enum status run_once(struct measuring *m, struct gemm_plan *p)
{
    const struct operands *o = &m->operands;
    char *a = m->memory + o->bias_bytes, *sets = a + o->a_bytes;
    char *b = sets + (size_t)(m->runs++ % o->sets) * (o->b_bytes + o->out_bytes);
    return gemm_plan_issue(m->library, p, b + o->b_bytes, a, b, m->workspace, stream_cuda(m->s));
}

/* Microseconds of a run of each of the @count candidates, taking turns: the fastest round, because
 * what disturbs only slows down. @round_us: time for one in a round; at least @least runs. @held:
 * multiprocessors that are held meanwhile. */
static enum status time_held(struct measuring *m, struct gemm_plan *p,
                             const struct candidate *candidates, int count, double round_us,
                             int least, int32_t held, double *us)
{
    const struct gemm_key *key = &p->key;
    double guess_us = 2e-6 * (double)key->T * (double)key->N * (double)key->K / 600.0 + 3.0;
    int runs = (int)(round_us / guess_us);
    runs = runs < least ? least : runs > MOST_RUNS ? MOST_RUNS : runs;
    if (held > 0)
        TRY(hold_begin(m, held, guess_us * runs * ROUNDS * count));
    TRY(CUDA(cudaEventRecord(m->mark[0], stream_cuda(m->s))));
    for (int i = 0; i < ROUNDS * count; i++) {
        TRY(take_candidate(p, &candidates[i % count]));
        for (int k = 0; k < runs; k++)
            TRY(run_once(m, p));
        TRY(CUDA(cudaEventRecord(m->mark[i + 1], stream_cuda(m->s))));
    }
    if (held > 0)
        TRY(hold_end(m));
    TRY(stream_sync(m->s));
    if (held > 0)
        TRY(stream_sync(m->beside)); /* all have seen the end, before it is taken back */
    for (int i = 0; i < ROUNDS * count; i++) {
        float ms = 0.0f;
        TRY(CUDA(cudaEventElapsedTime(&ms, m->mark[i], m->mark[i + 1])));
        double now = 1e3 * (double)ms / runs;
        if (i < count || now < us[i % count])
            us[i % count] = now;
    }
    return ST_OK;
}

/* The same alone or, of a product that runs beside collectives, the mean of alone and beside. */
static enum status time_candidates(struct measuring *m, struct gemm_plan *p,
                                   const struct candidate *candidates, int count, double round_us,
                                   int least, double *us)
{
    double beside[CANDIDATES];
    TRY(time_held(m, p, candidates, count, round_us, least, 0, us));
    if (p->key.beside == 0)
        return ST_OK;
    TRY(time_held(m, p, candidates, count, round_us, least, p->key.beside, beside));
    for (int c = 0; c < count; c++)
        us[c] = (us[c] + beside[c]) / 2.0;
    return ST_OK;
}

/* The fastest of @count candidates and its time: short heats for all, then a longer final of the
 * heuristic's first choice and the best of the others. */
static enum status find_fastest(struct measuring *m, struct gemm_plan *p,
                                const struct candidate *candidates, int count, int *best,
                                double *best_us)
{
    struct candidate finalist[FINALISTS];
    int index[FINALISTS] = {0}, finalists = count < FINALISTS ? count : FINALISTS;
    double us[CANDIDATES];
    bool taken[CANDIDATES] = {true};  /* the first is in the final */
    for (int c = 0; c < count; c++) { /* the first run loads the kernel */
        TRY(take_candidate(p, &candidates[c]));
        TRY(run_once(m, p));
    }
    TRY(time_candidates(m, p, candidates, count, HEAT_US, 1, us));
    for (int f = 0; f < finalists; f++) {
        for (int c = 0; f > 0 && c < count; c++)
            if (!taken[c] && (taken[index[f]] || us[c] < us[index[f]]))
                index[f] = c;
        taken[index[f]] = true;
        finalist[f] = candidates[index[f]];
    }
    TRY(time_candidates(m, p, finalist, finalists, FINAL_US, 3, us));
    int fastest = 0;
    for (int f = 1; f < finalists; f++)
        if (us[f] < us[fastest] && us[f] < us[0] * (1.0 - NOISE))
            fastest = f;
    *best = index[fastest];
    *best_us = us[fastest];
    return ST_OK;
}

/* Add what is offered for @sm multiprocessors; only algorithms that a plan file can tell again. */
static enum status add_candidates(const struct measuring *m, struct gemm_plan *p, uint32_t sm,
                                  struct candidate *candidates, int *count)
{
    cublasLtMatmulAlgo_t algos[OFFERED];
    int offered = 0;
    TRY(gemm_plan_aim(p, sm));
    TRY(gemm_plan_ask(m->library, p, algos, OFFERED, &offered));
    for (int i = 0; i < offered; i++) {
        uint32_t values[GEMM_ATTRIBUTES];
        gemm_algo_read(values, &algos[i], sm);
        candidates[*count].sm = sm;
        if (gemm_algo_make(m->library, &candidates[*count].algo, p, values))
            ++*count;
    }
    return ST_OK;
}

static enum status candidates_of(const struct measuring *m, struct gemm_plan *p,
                                 struct candidate *candidates, int *count)
{
    *count = 0;
    TRY(add_candidates(m, p, 0, candidates, count));
    if (p->key.beside == 0)
        return ST_OK;
    return add_candidates(m, p, (uint32_t)(m->library->card.multiprocessors - p->key.beside),
                          candidates, count);
}

static enum status measure_one(struct measuring *m, struct gemm_table *table,
                               const struct gemm_key *key, bool in_time,
                               struct gemm_measured *result)
{
    struct gemm_plan p = {};
    struct gemm_entry entry = {};
    struct candidate candidates[CANDIDATES];
    int count = 0, best = 0;
    p.key = entry.key = *key;
    m->operands = operands_of(key);
    TRY(gemm_plan_describe(&p, key->bias ? m->memory : NULL, CUBLAS_COMPUTE_32F));
    TRY(candidates_of(m, &p, candidates, &count));
    if (count == 0) /* then the heuristic's choice serves, which no file can tell */
        return ST_OK;
    if (in_time)
        TRY(find_fastest(m, &p, candidates, count, &best, &entry.us));
    gemm_algo_read(entry.algo, &candidates[best].algo, candidates[best].sm);
    result->products++;
    result->changed += best > 0;
    result->skipped += !in_time;
    return gemm_table_add(table, &entry);
}

/* ---- all of them ----------------------------------------------------------------------------- */

/* Products of unaligned tensors are rare and slow: not worth a measurement. */
static bool is_to_measure(const struct gemm_table *table, const struct gemm_key *key)
{
    return key->align == GEMM_ALIGN && table->count < GEMM_TABLE_MAX &&
           !gemm_table_find(table, key);
}

static enum status measure_all(struct measuring *m, struct gemm_table *table,
                               const struct gemm_table *wanted, size_t bytes, double budget_s,
                               struct gemm_measured *result)
{
    double begun = clock_s();
    for (int i = 0; i <= CANDIDATES * ROUNDS; i++)
        TRY(CUDA(cudaEventCreate(&m->mark[i])));
    gemm_fill_kernel<<<2048, 256, 0, stream_cuda(m->s)>>>((uint4 *)m->memory, bytes / 16);
    TRY(CUDA(cudaGetLastError()));
    m->hold = (struct hold *)(m->memory + bytes);
    TRY(hold_open(m));
    for (int i = 0; i < wanted->count; i++)
        if (is_to_measure(table, &wanted->entries[i].key))
            TRY(measure_one(m, table, &wanted->entries[i].key, clock_s() - begun < budget_s,
                            result));
    return ST_OK;
}

enum status gemm_measure(struct device *device, struct gemm_table *table,
                         const struct gemm_table *wanted, double budget_s,
                         struct gemm_measured *result)
{
    struct measuring m = {};
    enum status st = ST_OK;
    size_t bytes = 0;
    *result = {};
    for (int i = 0; i < wanted->count; i++) {
        struct operands o = operands_of(&wanted->entries[i].key);
        size_t need = operands_bytes(&o);
        if (is_to_measure(table, &wanted->entries[i].key) && need > bytes)
            bytes = need;
    }
    if (bytes == 0)
        return ST_OK;
    m.library = gemm_library_of(device);
    m.s = &device->streams[STREAM_COMPUTE];
    m.beside = &device->streams[STREAM_GATHER];
    TRY_GOTO(st, out, stream_scratch(&m.workspace, m.s, GEMM_WORKSPACE_BYTES));
    TRY_GOTO(st, out, device_alloc(device, (void **)&m.memory, bytes + sizeof *m.hold));
    TRY_GOTO(st, out, measure_all(&m, table, wanted, bytes, budget_s, result));
out:
    if (m.memory)
        (void)!stream_sync(m.s);
    for (int i = 0; i <= CANDIDATES * ROUNDS; i++)
        if (m.mark[i])
            cudaEventDestroy(m.mark[i]);
    device_free(device, (void **)&m.memory);
    return st;
}
