/*
 * engine/ops/reduce.cu - CUDA backend of reduce.h: sums, casts, and the one report a step.
 *
 * accumulate, cast   four elements a thread; bytes: each element once in and out
 * squared_norm       squares in double; thread t of all takes quads t, t + threads, ...; the sums
 *                    of a block, then of the blocks, are added in order, these by the block that
 *                    ends last. The number of blocks depends on n alone, so equal gradients give
 *                    equal bits
 * step_begin         a pack of the batch a thread, over the bus; the first one does the rest
 * agree              one thread, behind one for each rate
 */
#include "engine/ops/reduce.h"

#include "engine/ops/cuda_common.cuh"

/* A thread of squared_norm has four quads or more where n is large, and fetches four at once. */
enum { REDUCE_THREADS = 256, REDUCE_WARPS = REDUCE_THREADS / 32, REDUCE_QUADS = 4 };

template <typename E, int W, bool ADD>
__global__ static void convert_kernel(E *out, const float *in, int64_t n)
{
    int64_t i = ((int64_t)blockIdx.x * REDUCE_THREADS + threadIdx.x) * 4;
    float x[4], y[4];
    kernel_begin();
    if (i >= n)
        return;
    if (W == 4 && i + 4 <= n) {
        load_pack<float, 4>(x, in + i);
        if constexpr (ADD) {
            load_pack<E, 4>(y, out + i);
            for (int k = 0; k < 4; k++)
                x[k] += y[k];
        }
        store_pack<E, 4>(out + i, x);
        return;
    }
    for (int k = 0; k < 4 && i + k < n; k++)
        out[i + k] = from_float<E>(in[i + k] + (ADD ? to_float(out[i + k]) : 0.0f));
}

template <typename E, bool ADD>
static enum status convert(struct stream *s, E *out, const float *in, int64_t n)
{
    unsigned blocks = (unsigned)div_up(n, REDUCE_THREADS * 4);
    if (n == 0)
        return ST_OK;
    return packs_fit(0, 1, out, in) ? launch_kernel(s, dim3(blocks), REDUCE_THREADS,
                                                    convert_kernel<E, 4, ADD>, out, in, n)
                                    : launch_kernel(s, dim3(blocks), REDUCE_THREADS,
                                                    convert_kernel<E, 1, ADD>, out, in, n);
}

/* ---- squared norm ---------------------------------------------------------------------------- */

/* Sum over the block in thread 0: a butterfly a warp, then the warps in order. */
__device__ static double norm_block(double x)
{
    __shared__ double part[REDUCE_THREADS / 32];
    for (int step = 16; step > 0; step /= 2)
        x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = x;
    __syncthreads();
    x = part[0];
    for (int i = 1; i < REDUCE_THREADS / 32; i++)
        x += part[i];
    __syncthreads(); /* part is written again by the next call */
    return x;
}

/* Squares of W packs of four, @step apart from @i on; all are fetched before the first is used. */
template <int W> __device__ inline double quad_squares(const float *g, int64_t i, int64_t step)
{
    float x[W][4];
    double sum = 0.0;
#pragma unroll
    for (int k = 0; k < W; k++)
        load_pack<float, 4>(x[k], g + i + k * step);
#pragma unroll
    for (int k = 0; k < W; k++)
        for (int j = 0; j < 4; j++)
            sum += (double)x[k][j] * (double)x[k][j];
    return sum;
}

/* This thread's part: quads thread, thread + threads, ... */
__device__ static double norm_part(const float *g, int64_t n, bool packs)
{
    int64_t step = (int64_t)gridDim.x * REDUCE_THREADS * 4;
    int64_t i = ((int64_t)blockIdx.x * REDUCE_THREADS + threadIdx.x) * 4;
    double sum = 0.0;
    for (; packs && i + (REDUCE_QUADS - 1) * step + 4 <= n; i += REDUCE_QUADS * step)
        sum += quad_squares<REDUCE_QUADS>(g, i, step);
    for (; packs && i + 4 <= n; i += step)
        sum += quad_squares<1>(g, i, step);
    for (; i < n; i += step)
        for (int k = 0; k < 4 && i + k < n; k++)
            sum += (double)g[i + k] * (double)g[i + k];
    return sum;
}

/*
 * Every block leaves its sum; the last one to do so adds them all, in their order. Which block that
 * is does not matter: it reads what the others wrote before they were counted. Squares of finite
 * floats cannot overflow a double sum, so the sum tells the whole story.
 */
__device__ static void norm_add(struct step_report *report, double *partial, double sum)
{
    __shared__ bool last;
    sum = norm_block(sum);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = sum;
        __threadfence();
        last = atomicAdd(&report->blocks, 1) == (int)gridDim.x - 1;
    }
    __syncthreads();
    if (!last)
        return;
    __threadfence();
    sum = 0.0;
    for (int i = threadIdx.x; i < (int)gridDim.x; i += REDUCE_THREADS)
        sum += __ldcg(&partial[i]);
    sum = norm_block(sum);
    if (threadIdx.x == 0) {
        report->squared_norm += sum;
        report->finite &= isfinite(sum) ? 1 : 0;
        report->blocks = 0;
    }
}

__global__ static void squared_norm_kernel(struct step_report *report, double *partial,
                                           const float *g, int64_t n, bool packs)
{
    kernel_begin();
    norm_add(report, partial, norm_part(g, n, packs));
}

/* Warp w of all: places w, w + warps, ... of token_order, of which the first of a token counts. */
__device__ static double norm_rows_part(const float *g, int64_t columns, const struct sequences &q,
                                        int64_t first_row, int64_t table_rows, bool packs)
{
    int64_t warps = (int64_t)gridDim.x * REDUCE_WARPS;
    int64_t place = (int64_t)blockIdx.x * REDUCE_WARPS + threadIdx.x / 32;
    double sum = 0.0;
    for (; place < q.rows; place += warps) {
        int32_t token = q.token[q.token_order[place]];
        int64_t row = token - first_row;
        if (token <= 0 || row < 0 || row >= table_rows)
            continue;
        if (place > 0 && q.token[q.token_order[place - 1]] == token)
            continue;
        int lane = threadIdx.x % 32;
        for (int64_t c = lane * 4; packs && c < columns; c += 128)
            sum += quad_squares<1>(g + row * columns, c, 0);
        for (int64_t c = lane; !packs && c < columns; c += 32)
            sum += (double)g[row * columns + c] * (double)g[row * columns + c];
    }
    return sum;
}

__global__ static void squared_norm_rows_kernel(struct step_report *report, double *partial,
                                                const float *g, int64_t columns, struct sequences q,
                                                int64_t first_row, int64_t table_rows, bool packs)
{
    kernel_begin();
    norm_add(report, partial, norm_rows_part(g, columns, q, first_row, table_rows, packs));
}

/* ---- report and state ------------------------------------------------------------------------ */

/* Blocks read state->turn and the first thread of all writes state->host: no other of its words. */
__global__ static void step_begin_kernel(struct step_report *report, struct step_state *state,
                                         struct step_mail mail, bool takes)
{
    int64_t i = (int64_t)blockIdx.x * REDUCE_THREADS + threadIdx.x;
    kernel_begin();
    struct step_slot_mail from = step_slot(&mail, state);
    if (i < (int64_t)(mail.batch_bytes / sizeof(uint4)))
        ((uint4 *)mail.batch)[i] = ((const uint4 *)from.batch)[i];
    if (i != 0)
        return;
    struct step_host host = takes ? *from.host : state->host;
    struct step_report r = {};
    r.tokens = host.tokens;
    r.finite = 1;
    r.stop = host.stop;
    r.signal = host.signal;
    r.step = (int32_t)host.step;
    r.saved = host.saved;
    *report = r;
    if (takes)
        state->host = host;
}

/* On a copy in registers: what is written is not read again. */
__global__ static void agree_kernel(struct step_state *state, const struct step_report *reports,
                                    int world_size, struct optim_hyper hyper, struct step_mail mail)
{
    __shared__ float rates[STEP_RATES];
    kernel_begin();
    struct step_state s = *state;
    if (threadIdx.x < STEP_RATES)
        rates[threadIdx.x] = step_rate(&hyper, s.t, (int)threadIdx.x);
    __syncthreads();
    if (threadIdx.x > 0)
        return;
    struct step_state *told = step_slot(&mail, &s).told;
    step_agree(&s, reports, world_size, &hyper, rates);
    *state = s;
    if (told != NULL)
        *told = s;
}

/* ---- entries of the table -------------------------------------------------------------------- */

enum status cuda_accumulate(struct stream *s, struct tensor out, struct tensor in, bool add)
{
    int64_t n = tensor_numel(out);
    return add ? convert<float, true>(s, (float *)out.data, (const float *)in.data, n)
               : convert<float, false>(s, (float *)out.data, (const float *)in.data, n);
}

enum status cuda_cast(struct stream *s, struct tensor out, struct tensor in)
{
    int64_t n = tensor_numel(in);
    return out.dtype == DTYPE_BF16
               ? convert<bf16, false>(s, (bf16 *)out.data, (const float *)in.data, n)
               : convert<float, false>(s, (float *)out.data, (const float *)in.data, n);
}

enum status cuda_squared_norm(struct stream *s, struct step_report *report, struct tensor g)
{
    int64_t n = tensor_numel(g), blocks = div_up(n, REDUCE_THREADS * 4 * REDUCE_QUADS);
    void *partial;
    if (n == 0)
        return ST_OK;
    if (blocks > NORM_BLOCKS)
        blocks = NORM_BLOCKS;
    TRY(stream_scratch(&partial, s, (size_t)blocks * sizeof(double)));
    return launch_kernel(s, dim3((unsigned)blocks), REDUCE_THREADS, squared_norm_kernel, report,
                         (double *)partial, (const float *)g.data, n, packs_fit(0, 1, g.data));
}

enum status cuda_squared_norm_rows(struct stream *s, struct step_report *report, struct tensor g,
                                   const struct sequences *q, int64_t first_row)
{
    int64_t blocks = div_up(q->rows, REDUCE_WARPS), columns = g.shape[1];
    void *partial;
    if (q->rows == 0)
        return ST_OK;
    if (blocks > NORM_BLOCKS)
        blocks = NORM_BLOCKS;
    TRY(stream_scratch(&partial, s, (size_t)blocks * sizeof(double)));
    return launch_kernel(s, dim3((unsigned)blocks), REDUCE_THREADS, squared_norm_rows_kernel,
                         report, (double *)partial, (const float *)g.data, columns, *q, first_row,
                         g.shape[0], packs_fit(columns, sizeof(float), g.data));
}

enum status cuda_step_begin(struct stream *s, struct step_report *report, struct step_state *state,
                            const struct step_mail *mail)
{
    struct step_mail none = {};
    int64_t blocks = mail == NULL ? 1 : div_up(mail->batch_bytes, REDUCE_THREADS * sizeof(uint4));
    return launch_kernel(s, dim3((unsigned)(blocks > 0 ? blocks : 1)), REDUCE_THREADS,
                         step_begin_kernel, report, state, mail == NULL ? none : *mail,
                         mail != NULL);
}

enum status cuda_agree(struct stream *s, struct step_state *state,
                       const struct step_report *reports, int world_size,
                       const struct optim_hyper *hyper, const struct step_mail *mail)
{
    struct step_mail none = {};
    return launch_kernel(s, dim3(1), 32, agree_kernel, state, reports, world_size, *hyper,
                         mail == NULL ? none : *mail);
}
