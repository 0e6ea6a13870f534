/*
 * engine/ops/embedding.h - looking up rows of a table, of which only a part may be here.
 *
 *     forward    out[t][c] = table[token[t] C + c - first]      where the element lies in this part
 *     backward   dtable[token[t] C + c - first] += dout[t][c]   where the element lies in this part
 *
 * out, dout (T, C), of the rows of one batch or of all ranks' batches; table and dtable (fp32) a
 * range of elements, as a rank's shard of a part is one.
 *
 * The parts of a split table write one @out one after the other. The first has @set and writes what
 * no part here has, too: zeros in the rows of no sequence, elsewhere -0. That is the one number
 * which changes no other that it is added to, not even a zero's sign. So the sum of all ranks' rows
 * is, to the bit and in any order, what a whole table would have given.
 *
 * Backward adds the rows of one token in the order of rows (with the rows of all ranks: rank by
 * rank), whatever part of the table it makes: an element has the same bits in all of them. Token 0
 * is [PAD], whose row stays as it is: it gets no gradient, as padding_idx of PyTorch.
 *
 * Most rows of a large table have no token of a batch. Their zeros would be most of what BACKWARD
 * writes and of what UPDATE reads, so a gradient that one BACKWARD alone makes may have marks in
 * their place (ops.h), which row_is_marked() finds.
 */
#ifndef ENGINE_OPS_EMBEDDING_H
#define ENGINE_OPS_EMBEDDING_H

#include <string.h>

#include "engine/base/rng.h"
#include "engine/ops/ops.h"

C_BEGIN

/** row_is_marked() - @row: the first element of a gradient's row. */
HOST_DEVICE static inline bool row_is_marked(const float *row)
{
    float first = *row; /* loaded as one, and not byte by byte */
    int32_t bits;
    memcpy(&bits, &first, sizeof bits);
    return bits == ROW_MARK;
}

enum status embedding_forward_cpu(struct stream *s, struct tensor out, struct tensor table,
                                  struct token_rows q, int64_t first, bool set);
enum status embedding_backward_cpu(struct stream *s, struct tensor dtable, struct tensor dout,
                                   struct token_rows q, int64_t first, enum table_rows others);

C_END

#endif
