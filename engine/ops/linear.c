#include "engine/ops/linear.h"

#include <cblas.h>
#include <string.h>

#include "engine/ops/lanes.h"

enum { SUM_COLUMNS = 64, SUM_ROWS = 32 };

CPU_CLONES static void bias_loop(float *y, const float *bias, int64_t rows, int64_t columns)
{
    for (int64_t t = 0; t < rows; t++)
        for (int64_t n = 0; n < columns; n++)
            y[t * columns + n] += bias[n];
}

/* Blocks of rows keep the sum's error near that of 32 terms plus rows / 32 terms. */
CPU_CLONES static void column_sums(float *out, const float *x, int64_t rows, int64_t columns,
                                   bool add)
{
    for (int64_t first = 0; first < columns; first += SUM_COLUMNS) {
        int64_t width = columns - first < SUM_COLUMNS ? columns - first : SUM_COLUMNS;
        float total[SUM_COLUMNS] = {0};
        for (int64_t t = 0; t < rows; t += SUM_ROWS) {
            int64_t end = t + SUM_ROWS < rows ? t + SUM_ROWS : rows;
            float block[SUM_COLUMNS] = {0};
            for (int64_t i = t; i < end; i++)
                for (int64_t n = 0; n < width; n++)
                    block[n] += x[i * columns + first + n];
            for (int64_t n = 0; n < width; n++)
                total[n] += block[n];
        }
        for (int64_t n = 0; n < width; n++)
            out[first + n] = add ? out[first + n] + total[n] : total[n];
    }
}

enum status linear_forward_cpu(struct stream *s, struct tensor y, struct tensor x, struct tensor w,
                               struct tensor bias)
{
    (void)s;
    int rows = (int)x.shape[0], in = (int)x.shape[1], out = (int)w.shape[0];
    if (rows == 0)
        return ST_OK;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, out, in, 1.0f, x.data, in, w.data,
                in, 0.0f, y.data, out);
    if (bias.data)
        bias_loop(y.data, bias.data, rows, out);
    return ST_OK;
}

enum status linear_backward_data_cpu(struct stream *s, struct tensor dx, struct tensor dy,
                                     struct tensor w, bool add)
{
    (void)s;
    int rows = (int)dy.shape[0], out = (int)dy.shape[1], in = (int)w.shape[1];
    if (rows == 0)
        return ST_OK;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, rows, in, out, 1.0f, dy.data, out,
                w.data, in, add ? 1.0f : 0.0f, dx.data, in);
    return ST_OK;
}

enum status linear_backward_weight_cpu(struct stream *s, struct tensor dw, struct tensor dbias,
                                       struct tensor dy, struct tensor x, bool add)
{
    (void)s;
    int rows = (int)dy.shape[0], out = (int)dy.shape[1], in = (int)x.shape[1];
    if (dw.data && rows > 0)
        cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, out, in, rows, 1.0f, dy.data, out,
                    x.data, in, add ? 1.0f : 0.0f, dw.data, in);
    else if (dw.data && !add)
        memset(dw.data, 0, tensor_bytes(dw));
    if (dbias.data)
        column_sums(dbias.data, dy.data, rows, out, add);
    return ST_OK;
}
