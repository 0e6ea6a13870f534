#include "engine/ops/gemm_measure.h"

#include <math.h>

#include "engine/base/arena.h"
#include "engine/base/clock.h"
#include "engine/ops/gemm_lt.cuh"

enum { OFFERED = 8, FINALISTS = 3, ROUNDS = 3, MOST_RUNS = 12, MOST_SETS = 64 };

/* Made for so many multiprocessors fewer than there are, a product has other tiles, which may be
 * the fastest ones on all of them, too. On H200 (132) of ten numbers these had what was fastest. */
static const int32_t FEWER[] = {4, 8, 12, 14, 24};
enum { AIMS = sizeof FEWER / sizeof *FEWER, CANDIDATES = (AIMS + 2) * OFFERED };

/* More than the L2 cache of any card so far. */
static const size_t ROTATED_BYTES = (size_t)96 << 20;
static const double NOISE = 0.01;
static const double HEAT_US = 40.0, FINAL_US = 160.0; /* of one candidate in one round, about */

/* ---- which ----------------------------------------------------------------------------------- */

static enum status want(struct gemm_table *wanted, const struct gemm_key *key)
{
    struct gemm_entry entry = {};
    entry.key = gemm_serving_key(key);
    if (wanted->count == GEMM_TABLE_MAX || gemm_table_find(wanted, &entry.key))
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

/* A block of one thread and all shared memory has a multiprocessor for itself. Launched as NCCL
 * launches its kernels, in clusters of four where their number allows: so the two multiprocessors
 * of a pair are held or free together, and products whose blocks come in pairs find room. */
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

/* On the device, behind the operands. */
struct aside {
    struct hold hold;
    unsigned long long digest[CANDIDATES]; /* of what each makes of the same operands */
};

struct measuring {
    struct gemm_library *library;
    struct stream *s, *beside;
    struct aside *aside;
    int hold_bytes; /* of a block's shared memory */
    bool clusters;  /* the card has them */
    char *memory;
    void *workspace;
    struct operands operands;
    int runs;                                  /* so far: run i takes set i % sets */
    cudaEvent_t mark[CANDIDATES * ROUNDS + 1]; /* owned */
};

static enum status hold_launch(struct measuring *m, int32_t blocks, uint64_t most_ns)
{
    cudaLaunchAttribute cluster = {};
    cudaLaunchConfig_t config = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {blocks % 4 == 0 ? 4u : blocks % 2 == 0 ? 2u : 1u, 1, 1};
    config.gridDim = dim3((unsigned)blocks);
    config.blockDim = dim3(1);
    config.dynamicSmemBytes = (size_t)m->hold_bytes;
    config.stream = stream_cuda(m->beside);
    config.attrs = &cluster;
    config.numAttrs = m->clusters;
    return CUDA(cudaLaunchKernelEx(&config, gemm_hold_kernel, &m->aside->hold, most_ns));
}

/* @us: what is measured meanwhile takes about that. */
static enum status hold_begin(struct measuring *m, int32_t blocks, double us)
{
    uint64_t most_ns = (uint64_t)(1e3 * (HOLD_US + 4.0 * us));
    struct hold *hold = &m->aside->hold;
    TRY(CUDA(cudaMemsetAsync(hold, 0, sizeof *hold, stream_cuda(m->s))));
    TRY(CUDA(cudaEventRecord(m->mark[0], stream_cuda(m->s))));
    TRY(CUDA(cudaStreamWaitEvent(stream_cuda(m->beside), m->mark[0], 0)));
    TRY(hold_launch(m, blocks, most_ns));
    gemm_held_kernel<<<1, 1, 0, stream_cuda(m->s)>>>(hold, (uint32_t)blocks, most_ns);
    return CUDA(cudaGetLastError());
}

static enum status hold_end(struct measuring *m)
{
    gemm_let_go_kernel<<<1, 1, 0, stream_cuda(m->s)>>>(&m->aside->hold);
    return CUDA(cudaGetLastError());
}

/* Its kernels are loaded here, for that may wait for what runs. */
static enum status hold_open(struct measuring *m)
{
    int card = m->s->device->index, major = 0;
    TRY(CUDA(
        cudaDeviceGetAttribute(&m->hold_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, card)));
    TRY(CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, card)));
    m->clusters = major >= 9;
    TRY(CUDA(cudaFuncSetAttribute(gemm_hold_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  m->hold_bytes)));
    TRY(hold_end(m));
    TRY(stream_sync(m->s));
    TRY(hold_begin(m, 1, 0.0));
    TRY(hold_end(m));
    return stream_sync(m->beside);
}

static enum status fill(struct measuring *m, void *to, size_t bytes)
{
    gemm_fill_kernel<<<2048, 256, 0, stream_cuda(m->s)>>>((uint4 *)to, bytes / sizeof(uint4));
    return CUDA(cudaGetLastError());
}

/* Of run @set. */
static enum status run_in(struct measuring *m, struct gemm_plan *p, const struct gemm_algo *algo,
                          int set)
{
    const struct operands *o = &m->operands;
    char *a = m->memory + o->bias_bytes, *sets = a + o->a_bytes;
    char *b = sets + (size_t)(set % o->sets) * (o->b_bytes + o->out_bytes);
    return gemm_plan_issue(m->library, p, algo, b + o->b_bytes, a, b, m->workspace,
                           stream_cuda(m->s));
}

/* Microseconds of a run of each of the @count candidates, taking turns: the fastest round, because
 * what disturbs only slows down. @round_us: time for one in a round; at least @least runs. @held:
 * multiprocessors that are held meanwhile. */
static enum status time_candidates(struct measuring *m, struct gemm_plan *p,
                                   const struct gemm_algo *candidates, int count, double round_us,
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
        for (int k = 0; k < runs; k++)
            TRY(run_in(m, p, &candidates[i % count], m->runs++));
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

/* Of all of @out's bits; whatever adds first, it is the same. */
__global__ static void gemm_digest_kernel(const uint32_t *out, size_t words,
                                          unsigned long long *digest)
{
    unsigned long long sum = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < words;
         i += (size_t)gridDim.x * blockDim.x)
        sum += (out[i] ^ 0x9E3779B9u) * (2ull * i + 0x9E3779B97F4A7C15ull);
    atomicAdd(digest, sum);
}

/* The first run of each, which loads its kernel: on equal operands, into an equal output. */
static enum status digest_candidates(struct measuring *m, struct gemm_plan *p,
                                     const struct gemm_algo *candidates, int count,
                                     unsigned long long *digest)
{
    const struct operands *o = &m->operands;
    char *out = m->memory + o->bias_bytes + o->a_bytes + o->b_bytes; /* of the first set */
    TRY(CUDA(cudaMemsetAsync(m->aside->digest, 0, sizeof m->aside->digest, stream_cuda(m->s))));
    for (int c = 0; c < count; c++) {
        TRY(fill(m, out, o->out_bytes));
        TRY(run_in(m, p, &candidates[c], 0));
        gemm_digest_kernel<<<512, 256, 0, stream_cuda(m->s)>>>(
            (const uint32_t *)out, o->out_bytes / sizeof(uint32_t), &m->aside->digest[c]);
        TRY(CUDA(cudaGetLastError()));
    }
    TRY(CUDA(cudaMemcpyAsync(digest, m->aside->digest, sizeof *digest * (size_t)count,
                             cudaMemcpyDeviceToHost, stream_cuda(m->s))));
    return stream_sync(m->s);
}

struct fastest {
    int candidate;
    double us;
};

/* A longer final of the first of the @count candidates and the best of the others by @us, those of
 * short heats. */
static enum status run_final(struct measuring *m, struct gemm_plan *p,
                             const struct gemm_algo *candidates, int count, const double *us,
                             int32_t held, struct fastest *fastest)
{
    struct gemm_algo finalist[FINALISTS];
    int index[FINALISTS] = {0}, finalists = count < FINALISTS ? count : FINALISTS, best = 0;
    bool taken[CANDIDATES] = {true};
    double final_us[FINALISTS];
    for (int f = 0; f < finalists; f++) {
        for (int c = 0; f > 0 && c < count; c++)
            if (!taken[c] && (taken[index[f]] || us[c] < us[index[f]]))
                index[f] = c;
        taken[index[f]] = true;
        finalist[f] = candidates[index[f]];
    }
    TRY(time_candidates(m, p, finalist, finalists, FINAL_US, 3, held, final_us));
    for (int f = 1; f < finalists; f++)
        if (final_us[f] < final_us[best] && final_us[f] < final_us[0] * (1.0 - NOISE))
            best = f;
    *fastest = {index[best], final_us[best]};
    return ST_OK;
}

static double least_of(const double *us, const unsigned long long *digest, int count,
                       unsigned long long group)
{
    double least = INFINITY;
    for (int c = 0; c < count; c++)
        if (digest[c] == group && us[c] < least)
            least = us[c];
    return least;
}

/* Put in front those that give the same bits and are fastest so, alone and beside, in their order.
 * Return: how many they are. */
static int keep_group(struct gemm_algo *candidates, double *alone, double *beside,
                      const unsigned long long *digest, int count)
{
    double best_us = INFINITY;
    unsigned long long best = digest[0];
    int kept = 0;
    for (int c = 0; c < count; c++) {
        double us =
            least_of(alone, digest, count, digest[c]) + least_of(beside, digest, count, digest[c]);
        if (us < best_us) {
            best_us = us;
            best = digest[c];
        }
    }
    for (int c = 0; c < count; c++)
        if (digest[c] == best) {
            candidates[kept] = candidates[c];
            alone[kept] = alone[c];
            beside[kept++] = beside[c];
        }
    return kept;
}

/* Is one of them @values but for the number of multiprocessors? */
static bool is_listed(const struct gemm_algo *candidates, int count, const uint32_t *values)
{
    uint32_t listed[GEMM_ATTRIBUTES];
    for (int c = 0; c < count; c++) {
        gemm_algo_read(listed, &candidates[c]);
        if (memcmp(listed, values, GEMM_SM * sizeof *listed) == 0)
            return true;
    }
    return false;
}

/* Add what is offered for @sm multiprocessors; only algorithms that a plan file can tell again.
 * @other: and that no candidate has yet, for another number. */
static enum status add_candidates(const struct measuring *m, struct gemm_plan *p, uint32_t sm,
                                  bool other, struct gemm_algo *candidates, int *count)
{
    struct gemm_algo algos[OFFERED];
    int offered = 0;
    TRY(gemm_plan_ask(m->library, p, sm, algos, OFFERED, &offered));
    for (int i = 0; i < offered; i++) {
        uint32_t values[GEMM_ATTRIBUTES];
        gemm_algo_read(values, &algos[i]);
        if (!(other && is_listed(candidates, *count, values)) &&
            gemm_algo_make(m->library, &candidates[*count], p, values))
            ++*count;
    }
    return ST_OK;
}

static enum status candidates_of(const struct measuring *m, struct gemm_plan *p,
                                 struct gemm_algo *candidates, int *count)
{
    int32_t all = (int32_t)m->library->card.multiprocessors, beside = p->key.beside;
    *count = 0;
    TRY(add_candidates(m, p, 0, false, candidates, count));
    if (beside > 0)
        TRY(add_candidates(m, p, (uint32_t)(all - beside), false, candidates, count));
    for (int i = 0; i < AIMS && FEWER[i] < all; i++)
        if (FEWER[i] != beside)
            TRY(add_candidates(m, p, (uint32_t)(all - FEWER[i]), true, candidates, count));
    return ST_OK;
}

static void choose(struct gemm_choice *choice, const struct gemm_algo *candidates,
                   const struct fastest *fastest)
{
    gemm_algo_read(choice->algo, &candidates[fastest->candidate]);
    choice->us = fastest->us;
}

/* @candidates, in the order of the heuristic; changed. */
static enum status find_fastest(struct measuring *m, struct gemm_plan *p,
                                struct gemm_algo *candidates, int count, struct gemm_entry *entry,
                                struct gemm_measured *result)
{
    int32_t held = p->key.beside;
    double alone[CANDIDATES], beside[CANDIDATES];
    unsigned long long digest[CANDIDATES];
    uint32_t favourite[GEMM_ATTRIBUTES];
    struct fastest fastest;
    gemm_algo_read(favourite, &candidates[0]);
    TRY(fill(m, m->memory, operands_bytes(&m->operands))); /* what others left is not random */
    TRY(digest_candidates(m, p, candidates, count, digest));
    TRY(time_candidates(m, p, candidates, count, HEAT_US, 1, 0, alone));
    if (held > 0) {
        TRY(time_candidates(m, p, candidates, count, HEAT_US, 1, held, beside));
        count = keep_group(candidates, alone, beside, digest, count);
    }
    TRY(run_final(m, p, candidates, count, alone, 0, &fastest));
    choose(&entry->alone, candidates, &fastest);
    result->changed += memcmp(entry->alone.algo, favourite, sizeof favourite) != 0;
    if (held == 0)
        return ST_OK;
    TRY(run_final(m, p, candidates, count, beside, held, &fastest));
    choose(&entry->beside, candidates, &fastest);
    result->beside += memcmp(entry->alone.algo, entry->beside.algo, sizeof favourite) != 0;
    return ST_OK;
}

static enum status measure_one(struct measuring *m, struct gemm_table *table,
                               const struct gemm_key *key, bool in_time,
                               struct gemm_measured *result)
{
    struct gemm_plan p = {};
    struct gemm_entry entry = {};
    struct gemm_algo candidates[CANDIDATES];
    const struct fastest first = {};
    int count = 0;
    p.key = entry.key = *key;
    m->operands = operands_of(key);
    TRY(gemm_plan_describe(&p, key->bias ? m->memory : NULL, CUBLAS_COMPUTE_32F));
    TRY(candidates_of(m, &p, candidates, &count));
    if (count == 0) /* then the heuristic's choice serves, which no file can tell */
        return ST_OK;
    choose(&entry.alone, candidates, &first);
    if (key->beside > 0)
        choose(&entry.beside, candidates, &first);
    if (in_time)
        TRY(find_fastest(m, &p, candidates, count, &entry, result));
    result->products++;
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
    m->aside = (struct aside *)(m->memory + bytes);
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
    TRY_GOTO(st, out, device_alloc(device, (void **)&m.memory, bytes + sizeof *m.aside));
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
