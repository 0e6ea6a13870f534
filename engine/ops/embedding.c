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

enum status embedding_backward_cpu(struct stream *s, struct tensor dtable, struct tensor dout,
                                   const struct sequences *q, int64_t first_row, bool add)
{
    (void)s;
    int64_t channels = dout.shape[1];
    if (!dtable.data)
        return ST_OK;
    if (!add)
        memset(dtable.data, 0, tensor_bytes(dtable));
    for (int64_t i = 0; i < q->rows; i++) {
        int64_t t = q->token_order[i], row = q->token[t] - first_row;
        if (q->token[t] <= 0 || row < 0 || row >= dtable.shape[0])
            continue;
        float *to = (float *)dtable.data + row * channels;
        const float *from = (const float *)dout.data + t * channels;
        for (int64_t c = 0; c < channels; c++)
            to[c] += from[c];
    }
    return ST_OK;
}
