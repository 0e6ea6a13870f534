#include "engine/ops/span.h"

#include <math.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/ops/lanes.h"

enum { BLOCK_ROWS = 32 }; /* of the sums over rows */

size_t span_workspace_bytes_cpu(const struct op_limits *limits)
{
    return 2 * (size_t)limits->channels * sizeof(float);
}

/* Both dot products of a row. */
CPU_CLONES static void row_logits(float *out, const float *x, const float *w, const float *bias,
                                  int64_t n)
{
    const float *v = w + n;
    f32x8 a[4] = {{0}, {0}, {0}, {0}}, b[4] = {{0}, {0}, {0}, {0}};
    int64_t i = 0;
    for (; i + LANES_BLOCK <= n; i += LANES_BLOCK)
        for (int k = 0; k < 4; k++) {
            f32x8 at = lanes_load(x + i + k * LANES);
            a[k] += at * lanes_load(w + i + k * LANES);
            b[k] += at * lanes_load(v + i + k * LANES);
        }
    for (int k = 0; i < n; i += LANES, k++) {
        f32x8 at = lanes_load_tail(x + i, n - i, 0.0f);
        a[k] += at * lanes_load_tail(w + i, n - i, 0.0f);
        b[k] += at * lanes_load_tail(v + i, n - i, 0.0f);
    }
    out[0] = lanes_fold4(a) + bias[0];
    out[1] = lanes_fold4(b) + bias[1];
}

enum status span_logits_forward_cpu(struct stream *s, struct tensor logits, struct tensor x,
                                    struct tensor w, struct tensor bias, const struct sequences *q)
{
    (void)s;
    int64_t channels = x.shape[1];
    float *out = logits.data;
    for (int64_t t = 0; t < q->rows; t++)
        if (q->row_sequence[t] < 0)
            out[2 * t] = out[2 * t + 1] = 0.0f;
        else
            row_logits(out + 2 * t, (const float *)x.data + t * channels, w.data, bias.data,
                       channels);
    return ST_OK;
}

CPU_CLONES static void row_combine(float *dx, const float *d, const float *w, int64_t n)
{
    for (int64_t c = 0; c < n; c++)
        dx[c] = d[0] * w[c] + d[1] * w[n + c];
}

CPU_CLONES static void row_outer(float *dw, const float *d, const float *x, int64_t n)
{
    for (int64_t c = 0; c < n; c++) {
        dw[c] += d[0] * x[c];
        dw[n + c] += d[1] * x[c];
    }
}

/* Column sums over rows, in blocks of rows; rows of no sequence have d = 0. */
static void weight_gradient(float *dw, float *block, const float *d, struct tensor x)
{
    int64_t rows = x.shape[0], channels = x.shape[1];
    for (int64_t t = 0; t < rows; t += BLOCK_ROWS) {
        int64_t end = t + BLOCK_ROWS < rows ? t + BLOCK_ROWS : rows;
        memset(block, 0, 2 * (size_t)channels * sizeof *block);
        for (int64_t i = t; i < end; i++)
            row_outer(block, d + 2 * i, (const float *)x.data + i * channels, channels);
        for (int64_t c = 0; c < 2 * channels; c++)
            dw[c] += block[c];
    }
}

static void bias_gradient(float *dbias, const float *d, int64_t rows)
{
    double sum[2] = {0};
    for (int64_t t = 0; t < rows; t++) {
        sum[0] += (double)d[2 * t];
        sum[1] += (double)d[2 * t + 1];
    }
    dbias[0] += (float)sum[0];
    dbias[1] += (float)sum[1];
}

enum status span_logits_backward_cpu(struct stream *s, struct tensor dx, struct tensor dw,
                                     struct tensor dbias, struct tensor dlogits, struct tensor x,
                                     struct tensor w, const struct sequences *q, bool add)
{
    int64_t rows = q->rows, channels = x.shape[1];
    const float *d = dlogits.data;
    struct arena a = arena_over(s->workspace, s->workspace_bytes);
    float *block;
    ARENA_BIND(&a, block, 2 * channels);
    ASSERT(s->workspace != NULL);
    for (int64_t t = 0; t < rows; t++) {
        float *dx_t = (float *)dx.data + t * channels;
        if (q->row_sequence[t] < 0)
            memset(dx_t, 0, (size_t)channels * sizeof *dx_t);
        else
            row_combine(dx_t, d + 2 * t, w.data, channels);
    }
    if (dw.data && !add)
        memset(dw.data, 0, tensor_bytes(dw));
    if (dw.data)
        weight_gradient(dw.data, block, d, x);
    if (dbias.data && !add)
        memset(dbias.data, 0, tensor_bytes(dbias));
    if (dbias.data)
        bias_gradient(dbias.data, d, rows);
    return ST_OK;
}

/* Cross-entropy of one column (stride 2) against @label; @dlogits NULL: the loss alone. */
static double column_loss(float *dlogits, const float *logits, int32_t rows, int32_t label,
                          double weight)
{
    double most = (double)logits[0], sum = 0;
    for (int32_t i = 1; i < rows; i++)
        most = (double)logits[2 * i] > most ? (double)logits[2 * i] : most;
    for (int32_t i = 0; i < rows; i++)
        sum += exp((double)logits[2 * i] - most);
    if (dlogits)
        for (int32_t i = 0; i < rows; i++) {
            double p = exp((double)logits[2 * i] - most) / sum;
            dlogits[2 * i] = (float)(weight * (p - (i == label ? 1.0 : 0.0)));
        }
    return most + log(sum) - (double)logits[2 * label];
}

enum status span_loss_cpu(struct stream *s, struct tensor dlogits, struct step_report *report,
                          struct tensor logits, const struct sequences *q,
                          const struct step_state *state)
{
    (void)s;
    double sum = 0, weight = 0.5 * (double)state->host.inv_count;
    float *d = dlogits.data;
    if (d)
        memset(d, 0, tensor_bytes(dlogits));
    for (int32_t b = 0; b < q->count; b++) {
        int32_t first = q->cu_seqlens[b], rows = q->cu_seqlens[b + 1] - first;
        const float *x = (const float *)logits.data + 2 * (int64_t)first;
        float *dx = d ? d + 2 * (int64_t)first : NULL;
        if (rows == 0)
            continue;
        ASSERT(q->start[b] >= 0 && q->start[b] < rows);
        ASSERT(q->end[b] >= 0 && q->end[b] < rows);
        double start = column_loss(dx, x, rows, q->start[b], weight);
        double end = column_loss(dx ? dx + 1 : NULL, x + 1, rows, q->end[b], weight);
        sum += 0.5 * (start + end);
        report->sequences++;
    }
    report->loss_sum += sum;
    return ST_OK;
}
