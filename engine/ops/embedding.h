/*
 * engine/ops/embedding.h - looking up rows of a table that may be split by rows.
 *
 *     forward    out[t] = table[token[t] - first_row]   where the token lies in this part
 *     backward   dtable[token[t] - first_row] += dout[t]
 *
 * out, dout (T, C); table (rows, C); dtable fp32. The parts of a split table write one @out one
 * after the other; the first has @set and also zeroes the rows of no sequence. Backward adds the
 * rows of one token in row order (token_order), so the sum is the same however it is computed.
 * Token 0 is [PAD], whose row stays as it is: it gets no gradient, as padding_idx of PyTorch.
 */
#ifndef ENGINE_OPS_EMBEDDING_H
#define ENGINE_OPS_EMBEDDING_H

#include "engine/ops/ops.h"

C_BEGIN

enum status embedding_forward_cpu(struct stream *s, struct tensor out, struct tensor table,
                                  const struct sequences *q, int64_t first_row, bool set);
enum status embedding_backward_cpu(struct stream *s, struct tensor dtable, struct tensor dout,
                                   const struct sequences *q, int64_t first_row, bool add);

C_END

#endif
