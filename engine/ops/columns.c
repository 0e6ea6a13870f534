#include "engine/ops/columns.h"

#include "engine/base/arena.h"
#include "engine/ops/lanes.h"
#include "engine/ops/pieces.h"

enum { SUM_COLUMNS = 64, SUM_ROWS = 32 };

struct sums {
    float *out;
    const float *x;
    int64_t rows, columns;
    bool add;
};

/* @width <= SUM_COLUMNS columns of x, whose rows are @ld apart. */
CPU_CLONES static void sum_loop(float *out, const float *x, int64_t width, int64_t rows, int64_t ld,
                                bool add)
{
    float total[SUM_COLUMNS] = {0};
    for (int64_t t = 0; t < rows; t += SUM_ROWS) {
        int64_t end = t + SUM_ROWS < rows ? t + SUM_ROWS : rows;
        float block[SUM_COLUMNS] = {0};
        for (int64_t i = t; i < end; i++)
            for (int64_t n = 0; n < width; n++)
                block[n] += x[i * ld + n];
        for (int64_t n = 0; n < width; n++)
            total[n] += block[n];
    }
    for (int64_t n = 0; n < width; n++)
        out[n] = add ? out[n] + total[n] : total[n];
}

static void sum_piece(void *context, int64_t first, int64_t end, int worker)
{
    const struct sums *c = context;
    (void)worker;
    for (; first < end; first += SUM_COLUMNS) {
        int64_t width = end - first < SUM_COLUMNS ? end - first : SUM_COLUMNS;
        sum_loop(c->out + first, c->x + first, width, c->rows, c->columns, c->add);
    }
}

void columns_sum_cpu(struct stream *s, float *out, const float *x, int64_t rows, int64_t columns,
                     bool add)
{
    struct sums c = {out, x, rows, columns, add};
    int64_t grain = round_up(PIECE_NUMEL / (rows > 0 ? rows : 1) + 1, SUM_COLUMNS);
    pieces_run(s, sum_piece, &c, columns, grain);
}

enum status finish_sums_cpu(struct stream *s)
{
    (void)s;
    return ST_OK;
}
