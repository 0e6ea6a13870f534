#include "engine/ops/linear.h"

#include <cblas.h>
#include <stdbool.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/ops/pieces.h"

enum {
    TILE = 512,        /* rows or columns of a piece, at least: the BLAS packs both operands anew */
    LEAST = 64 * 4096, /* multiply-adds below which one thread does it alone */
    ALIGN_TO = 16      /* rows or columns that a kernel does at once */
};

/* c (m, n) = a (m, k) b (k, n) + bias (n), or without a bias + beta c. All are row-major; a and b
 * may be transposed. */
struct product {
    CBLAS_TRANSPOSE trans_a, trans_b;
    int m, n, k;
    const float *a, *b, *bias;
    float *c, beta;
    int lda, ldb, ldc;
};

/* A bias goes into c first, and the product on top: a BLAS writes beta c in a pass of its own,
 * which this one takes the place of. */
static void multiply(const struct product *p)
{
    for (int i = 0; p->bias && i < p->m; i++)
        memcpy(p->c + (int64_t)i * p->ldc, p->bias, (size_t)p->n * sizeof *p->c);
    cblas_sgemm(CblasRowMajor, p->trans_a, p->trans_b, p->m, p->n, p->k, 1.0f, p->a, p->lda, p->b,
                p->ldb, p->bias ? 1.0f : p->beta, p->c, p->ldc);
}

static void multiply_rows(void *context, int64_t first, int64_t end, int worker)
{
    struct product p = *(const struct product *)context;
    (void)worker;
    p.a += p.trans_a == CblasNoTrans ? first * p.lda : first;
    p.c += first * p.ldc;
    p.m = (int)(end - first);
    multiply(&p);
}

static void multiply_columns(void *context, int64_t first, int64_t end, int worker)
{
    struct product p = *(const struct product *)context;
    (void)worker;
    p.b += p.trans_b == CblasNoTrans ? first : first * p.ldb;
    p.bias = p.bias ? p.bias + first : NULL;
    p.c += first;
    p.n = (int)(end - first);
    multiply(&p);
}

/* Cut along the longer side of c, into as many pieces for each thread. */
static void product_run(struct stream *s, struct product *p)
{
    bool by_rows = p->m >= p->n;
    int64_t side = by_rows ? p->m : p->n, threads = s->device->threads;
    int64_t rounds = side / (threads * TILE) > 1 ? side / (threads * TILE) : 1;
    int64_t pieces = threads > 1 && (int64_t)p->m * p->n * p->k >= LEAST ? threads * rounds : 1;
    int64_t grain = round_up((side + pieces - 1) / pieces, ALIGN_TO);
    pieces_run(s, by_rows ? multiply_rows : multiply_columns, p, side, grain);
}

enum status linear_forward_cpu(struct stream *s, struct tensor y, struct tensor x, struct tensor w,
                               struct tensor bias)
{
    int rows = (int)x.shape[0], in = (int)x.shape[1], out = (int)w.shape[0];
    struct product p = {.trans_a = CblasNoTrans,
                        .trans_b = CblasTrans,
                        .m = rows,
                        .n = out,
                        .k = in,
                        .a = x.data,
                        .lda = in,
                        .b = w.data,
                        .ldb = in,
                        .c = y.data,
                        .ldc = out,
                        .bias = bias.data};
    if (rows > 0)
        product_run(s, &p);
    return ST_OK;
}

enum status linear_backward_data_cpu(struct stream *s, struct tensor dx, struct tensor dy,
                                     struct tensor w, bool add)
{
    int rows = (int)dy.shape[0], out = (int)dy.shape[1], in = (int)w.shape[1];
    struct product p = {.trans_a = CblasNoTrans,
                        .trans_b = CblasNoTrans,
                        .m = rows,
                        .n = in,
                        .k = out,
                        .a = dy.data,
                        .lda = out,
                        .b = w.data,
                        .ldb = in,
                        .c = dx.data,
                        .ldc = in,
                        .beta = add ? 1.0f : 0.0f};
    if (rows > 0)
        product_run(s, &p);
    return ST_OK;
}

enum status linear_backward_weight_cpu(struct stream *s, struct tensor dw, struct tensor dy,
                                       struct tensor x, bool add)
{
    int rows = (int)dy.shape[0], out = (int)dy.shape[1], in = (int)x.shape[1];
    struct product p = {.trans_a = CblasTrans,
                        .trans_b = CblasNoTrans,
                        .m = out,
                        .n = in,
                        .k = rows,
                        .a = dy.data,
                        .lda = out,
                        .b = x.data,
                        .ldb = in,
                        .c = dw.data,
                        .ldc = in,
                        .beta = add ? 1.0f : 0.0f};
    if (dw.data && rows > 0)
        product_run(s, &p);
    else if (dw.data && !add)
        memset(dw.data, 0, tensor_bytes(dw));
    return ST_OK;
}
