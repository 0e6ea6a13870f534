#include "engine/ops/embedding.h"

#include <string.h>

enum status embedding_forward_cpu(struct stream *s, struct tensor out, struct tensor table,
                                  struct token_rows q, int64_t first, bool set)
{
    (void)s;
    int64_t channels = out.shape[1], end = first + table.shape[0];
    const float *part = table.data;
    for (int64_t t = 0; t < q.rows; t++) {
        float *to = (float *)out.data + t * channels, zero = q.token[t] < 0 ? 0.0f : -0.0f;
        int64_t at = q.token[t] * channels, from = at > first ? at : first;
        int64_t count = (at + channels < end ? at + channels : end) - from;
        bool found = q.token[t] >= 0 && count > 0;
        for (int64_t c = 0; set && c < channels && (!found || count < channels); c++)
            to[c] = zero;
        if (found)
            memcpy(to + (from - at), part + (from - first), (size_t)count * sizeof *to);
    }
    return ST_OK;
}

static void mark_row(float *row)
{
    const int32_t mark = ROW_MARK;
    memcpy(row, &mark, sizeof mark);
}

/* Part of the row of a token; elements count in the whole table. */
static void add_row(float *part, int64_t first, int64_t end, const float *dout, int64_t token,
                    int64_t channels, bool marked)
{
    int64_t at = token * channels, from = at > first ? at : first;
    int64_t to = at + channels < end ? at + channels : end;
    if (token <= 0 || from >= to)
        return;
    float *out = part + (from - first);
    if (marked && row_is_marked(out)) /* the first of its token */
        memset(out, 0, (size_t)channels * sizeof *out);
    for (int64_t i = from; i < to; i++)
        out[i - from] += dout[i - at];
}

enum status embedding_backward_cpu(struct stream *s, struct tensor dtable, struct tensor dout,
                                   struct token_rows q, int64_t first, enum table_rows others)
{
    (void)s;
    int64_t channels = dout.shape[1], numel = dtable.shape[0];
    float *part = dtable.data;
    if (!part)
        return ST_OK;
    if (others == ROWS_ZERO)
        memset(part, 0, tensor_bytes(dtable));
    for (int64_t i = 0; others == ROWS_MARKED && i < numel; i += channels)
        mark_row(part + i);
    for (int64_t i = 0; i < q.rows; i++) {
        int64_t t = q.order[i];
        add_row(part, first, first + numel, (const float *)dout.data + t * channels, q.token[t],
                channels, others == ROWS_MARKED);
    }
    return ST_OK;
}
