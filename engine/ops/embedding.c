#include "engine/ops/embedding.h"

#include <string.h>

enum status embedding_forward_cpu(struct stream *s, struct tensor out, struct tensor table,
                                  const struct sequences *q, int64_t first_row, bool set)
{
    (void)s;
    int64_t channels = out.shape[1];
    for (int64_t t = 0; t < q->rows; t++) {
        int64_t row = q->token[t] - first_row;
        float *to = (float *)out.data + t * channels;
        if (q->token[t] >= 0 && row >= 0 && row < table.shape[0])
            memcpy(to, (const float *)table.data + row * channels, (size_t)channels * sizeof *to);
        else if (q->token[t] < 0 && set)
            memset(to, 0, (size_t)channels * sizeof *to);
    }
    return ST_OK;
}

static void mark_row(float *row)
{
    const int32_t mark = ROW_MARK;
    memcpy(row, &mark, sizeof mark);
}

enum status embedding_backward_cpu(struct stream *s, struct tensor dtable, struct tensor dout,
                                   const struct sequences *q, int64_t first_row,
                                   enum table_rows others)
{
    (void)s;
    int64_t channels = dout.shape[1];
    float *table = dtable.data;
    if (!table)
        return ST_OK;
    if (others == ROWS_ZERO)
        memset(table, 0, tensor_bytes(dtable));
    for (int64_t row = 0; others == ROWS_MARKED && row < dtable.shape[0]; row++)
        mark_row(table + row * channels);
    for (int64_t i = 0; i < q->rows; i++) {
        int64_t t = q->token_order[i], row = q->token[t] - first_row;
        if (q->token[t] <= 0 || row < 0 || row >= dtable.shape[0])
            continue;
        float *to = table + row * channels;
        if (others == ROWS_MARKED && row_is_marked(to)) /* the first of its token */
            memset(to, 0, (size_t)channels * sizeof *to);
        const float *from = (const float *)dout.data + t * channels;
        for (int64_t c = 0; c < channels; c++)
            to[c] += from[c];
    }
    return ST_OK;
}
