/*
 * engine/ops/span.cu - CUDA backend of span.h.
 *
 * logits forward   one warp a row, both dot products; bytes: x once
 * logits backward  dx elementwise, one warp a row; dw and dbias as ordered column sums
 * loss             one block a sequence, softmax in double; then the losses are added in the order
 *                  of the sequences
 */
#include "engine/ops/cuda_common.cuh"

enum { SPAN_THREADS = 256, SPAN_WARPS = SPAN_THREADS / 32 };

template <typename E, int W>
__global__ static void span_forward_kernel(float *logits, const E *x, const E *w, const E *bias,
                                           const int32_t *row_sequence, int64_t rows,
                                           int64_t columns)
{
    int64_t row = (int64_t)blockIdx.x * SPAN_WARPS + threadIdx.x / 32;
    kernel_begin();
    if (row >= rows)
        return;
    bool used = row_sequence[row] >= 0;
    float start = 0.0f, end = 0.0f;
    for (int64_t c = (threadIdx.x % 32) * W; used && c < columns; c += 32 * W) {
        float v[W], ws[W], we[W];
        load_pack<E, W>(v, x + row * columns + c);
        load_pack<E, W>(ws, w + c);
        load_pack<E, W>(we, w + columns + c);
#pragma unroll
        for (int i = 0; i < W; i++) {
            start += v[i] * ws[i];
            end += v[i] * we[i];
        }
    }
    start = warp_sum(start);
    end = warp_sum(end);
    if (threadIdx.x % 32 == 0) {
        logits[2 * row] = used ? start + to_float(bias[0]) : 0.0f;
        logits[2 * row + 1] = used ? end + to_float(bias[1]) : 0.0f;
    }
}

template <typename E, int W>
__global__ static void span_backward_kernel(E *dx, const float *dlogits, const E *w,
                                            const int32_t *row_sequence, int64_t rows,
                                            int64_t columns)
{
    int64_t row = (int64_t)blockIdx.x * SPAN_WARPS + threadIdx.x / 32;
    kernel_begin();
    if (row >= rows)
        return;
    bool used = row_sequence[row] >= 0;
    float start = used ? dlogits[2 * row] : 0.0f, end = used ? dlogits[2 * row + 1] : 0.0f;
    for (int64_t c = (threadIdx.x % 32) * W; c < columns; c += 32 * W) {
        float d[W], ws[W], we[W];
        load_pack<E, W>(ws, w + c);
        load_pack<E, W>(we, w + columns + c);
#pragma unroll
        for (int i = 0; i < W; i++)
            d[i] = start * ws[i] + end * we[i];
        store_pack<E, W>(dx + row * columns + c, d);
    }
}

/* Partial sums of both rows of dw: (parts, 2, columns). */
template <typename E, int W>
__global__ static void span_columns_kernel(float *partial, const float *dlogits, const E *x,
                                           int64_t rows, int64_t columns)
{
    int64_t c0 = (int64_t)blockIdx.x * 32 * W, c = c0 + (threadIdx.x % 32) * W;
    int64_t row = (int64_t)blockIdx.y * COLUMN_ROWS + threadIdx.x / 32;
    int64_t end = min((int64_t)(blockIdx.y + 1) * COLUMN_ROWS, rows);
    float a[W] = {0.0f}, b[W] = {0.0f};
    kernel_begin();
    if (c < columns)
        for (; row < end; row += COLUMN_LANES) {
            float v[W], ds = dlogits[2 * row], de = dlogits[2 * row + 1];
            load_pack<E, W>(v, x + row * columns + c);
#pragma unroll
            for (int i = 0; i < W; i++) {
                a[i] += ds * v[i];
                b[i] += de * v[i];
            }
        }
    columns_block<W>(a, partial + 2 * blockIdx.y * columns, c0, columns, false);
    columns_block<W>(b, partial + (2 * blockIdx.y + 1) * columns, c0, columns, false);
}

template <typename E>
static enum status span_forward_any(struct stream *s, float *logits, const E *x, const E *w,
                                    const E *bias, const struct sequences *q, int64_t columns)
{
    constexpr int W = full_pack<E>();
    if (q->rows == 0)
        return ST_OK;
    unsigned blocks = (unsigned)div_up(q->rows, SPAN_WARPS);
    return launch_kernel(s, dim3(blocks), SPAN_THREADS,
                         packs_fit(columns, sizeof(E), x, w) ? span_forward_kernel<E, W>
                                                             : span_forward_kernel<E, 1>,
                         logits, x, w, bias, q->row_sequence, q->rows, columns);
}

template <typename E>
static enum status span_backward_any(struct stream *s, E *dx, const float *dlogits, const E *w,
                                     const struct sequences *q, int64_t columns)
{
    constexpr int W = full_pack<E>();
    if (q->rows == 0 || !dx)
        return ST_OK;
    unsigned blocks = (unsigned)div_up(q->rows, SPAN_WARPS);
    return launch_kernel(s, dim3(blocks), SPAN_THREADS,
                         packs_fit(columns, sizeof(E), dx, w) ? span_backward_kernel<E, W>
                                                              : span_backward_kernel<E, 1>,
                         dx, dlogits, w, q->row_sequence, q->rows, columns);
}

template <typename E>
static enum status span_weight(struct stream *s, float *dw, const float *dlogits, const E *x,
                               int64_t rows, int64_t columns, bool add)
{
    constexpr int W = full_pack<E>();
    int64_t parts = column_parts(rows);
    float *partial = NULL;
    TRY(columns_reserve(&partial, s, 2 * parts * columns));
    if (parts > 0) {
        bool packs = packs_fit(columns, sizeof(E), x);
        dim3 grid((unsigned)div_up(columns, 32 * (packs ? W : 1)), (unsigned)parts);
        TRY(launch_kernel(s, grid, COLUMN_THREADS,
                          packs ? span_columns_kernel<E, W> : span_columns_kernel<E, 1>, partial,
                          dlogits, x, rows, columns));
    }
    struct column_sets sets = {{dw, dw + columns}, 2};
    return columns_finish(s, sets, partial, parts, columns, add);
}

/* ---- loss ------------------------------------------------------------------------------------ */

/* Largest or sum over the block, the same bits in all threads. */
__device__ static double span_block(double x, bool largest)
{
    __shared__ double part[SPAN_WARPS];
    for (int step = 16; step > 0; step /= 2) {
        double other = __shfl_xor_sync(0xFFFFFFFFu, x, step);
        x = largest ? fmax(x, other) : x + other;
    }
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = x;
    __syncthreads();
    x = part[0];
    for (int i = 1; i < SPAN_WARPS; i++)
        x = largest ? fmax(x, part[i]) : x + part[i];
    __syncthreads();
    return x;
}

/* Cross-entropy of one column of logits (stride 2) against @label. */
__device__ static double span_column(float *dlogits, const float *logits, int rows, int label,
                                     double weight)
{
    double most = (double)logits[0], sum = 0.0;
    for (int i = threadIdx.x; i < rows; i += SPAN_THREADS)
        most = fmax(most, (double)logits[2 * i]);
    most = span_block(most, true);
    for (int i = threadIdx.x; i < rows; i += SPAN_THREADS)
        sum += exp((double)logits[2 * i] - most);
    sum = span_block(sum, false);
    for (int i = threadIdx.x; dlogits && i < rows; i += SPAN_THREADS) {
        double p = exp((double)logits[2 * i] - most) / sum;
        dlogits[2 * i] = (float)(weight * (p - (i == label ? 1.0 : 0.0)));
    }
    return most + log(sum) - (double)logits[2 * label];
}

/* Block b: the loss of sequence b; the last block: the rows of no sequence. */
__global__ static void span_loss_kernel(double *loss, float *dlogits, const float *logits,
                                        struct sequences q, const struct step_state *state)
{
    int b = blockIdx.x;
    kernel_begin();
    int64_t first = q.cu_seqlens[b];
    if (b == q.count) {
        for (int64_t i = 2 * first + threadIdx.x; dlogits && i < 2 * q.rows; i += SPAN_THREADS)
            dlogits[i] = 0.0f;
        return;
    }
    int rows = (int)(q.cu_seqlens[b + 1] - first);
    double weight = 0.5 * (double)state->host.inv_count, sum = 0.0;
    if (rows > 0) {
        float *d = dlogits ? dlogits + 2 * first : NULL;
        const float *x = logits + 2 * first;
        double start = span_column(d, x, rows, q.start[b], weight);
        double end = span_column(d ? d + 1 : NULL, x + 1, rows, q.end[b], weight);
        sum = 0.5 * (start + end);
    }
    if (threadIdx.x == 0)
        loss[b] = sum;
}

/* One block; its threads fetch, thread 0 adds in order. */
__global__ static void span_report_kernel(struct step_report *report, const double *loss,
                                          struct sequences q)
{
    __shared__ double part[SPAN_THREADS];
    __shared__ bool used[SPAN_THREADS];
    double sum = 0.0;
    int64_t sequences = 0;
    kernel_begin();
    for (int first = 0; first < q.count; first += SPAN_THREADS) {
        int b = first + threadIdx.x, count = min(q.count - first, (int)SPAN_THREADS);
        if (b < q.count) {
            part[threadIdx.x] = loss[b];
            used[threadIdx.x] = q.cu_seqlens[b + 1] > q.cu_seqlens[b];
        }
        __syncthreads();
        for (int i = 0; threadIdx.x == 0 && i < count; i++)
            if (used[i]) {
                sum += part[i];
                sequences++;
            }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        report->loss_sum += sum;
        report->sequences += sequences;
    }
}

/* ---- entries of the table -------------------------------------------------------------------- */

enum status cuda_span_logits_forward(struct stream *s, struct tensor logits, struct tensor x,
                                     struct tensor w, struct tensor bias, const struct sequences *q)
{
    if (x.dtype == DTYPE_BF16)
        return span_forward_any(s, (float *)logits.data, (const bf16 *)x.data, (const bf16 *)w.data,
                                (const bf16 *)bias.data, q, x.shape[1]);
    return span_forward_any(s, (float *)logits.data, (const float *)x.data, (const float *)w.data,
                            (const float *)bias.data, q, x.shape[1]);
}

enum status cuda_span_logits_backward(struct stream *s, struct tensor dx, struct tensor dw,
                                      struct tensor dbias, struct tensor dlogits, struct tensor x,
                                      struct tensor w, const struct sequences *q, bool add)
{
    int64_t C = x.shape[1], T = q->rows;
    const float *d = (const float *)dlogits.data;
    float *weight = (float *)dw.data;
    if (x.dtype == DTYPE_BF16) {
        TRY(span_backward_any(s, (bf16 *)dx.data, d, (const bf16 *)w.data, q, C));
        if (weight)
            TRY(span_weight(s, weight, d, (const bf16 *)x.data, T, C, add));
    } else {
        TRY(span_backward_any(s, (float *)dx.data, d, (const float *)w.data, q, C));
        if (weight)
            TRY(span_weight(s, weight, d, (const float *)x.data, T, C, add));
    }
    if (dbias.data)
        TRY(columns_sum(s, (float *)dbias.data, dlogits, NULL, 0, add));
    return ST_OK;
}

enum status cuda_span_loss(struct stream *s, struct tensor dlogits, struct step_report *report,
                           struct tensor logits, const struct sequences *q,
                           const struct step_state *state)
{
    void *loss;
    TRY(stream_scratch(&loss, s, (size_t)q->count * sizeof(double)));
    TRY(launch_kernel(s, dim3((unsigned)q->count + 1), SPAN_THREADS, span_loss_kernel,
                      (double *)loss, (float *)dlogits.data, (const float *)logits.data, *q,
                      state));
    return launch_kernel(s, dim3(1), SPAN_THREADS, span_report_kernel, report, (const double *)loss,
                         *q);
}
