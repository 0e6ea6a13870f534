/*
 * engine/model/bert.h - BERT for question answering, without pooler; for engine/model.
 *
 * Devlin et al., arXiv:1810.04805; post-norm blocks as in the released models. Units, parameters
 * and what BACKWARD keeps:
 *
 *     word_table.k    word_embeddings rows [k R, (k + 1) R)                          nothing
 *     embedding_norm  position and type tables, LayerNorm                            z, stats
 *     block.n         qkv (fused), attention output, LayerNorm, two of the           block_saved
 *                     feed-forward part, LayerNorm
 *     head            qa_outputs                                                     dlogits
 *
 *     block:  attn = attention(x Wqkv + b);   ln1 = norm(z1 = x + dropout(attn Wo + b))
 *             act = gelu(pre = ln1 W1 + b);   out = norm(z2 = ln1 + dropout(act W2 + b))
 *
 * The word table's row 0 ([PAD]) gets no gradient, as padding_idx says in Hugging Face's model.
 * Three gradients are zero but for rounding, as a softmax ignores a shift of its row: the key bias,
 * the head's bias, the last block's second LayerNorm bias. (Padded batches: the same.)
 */
#ifndef ENGINE_MODEL_BERT_H
#define ENGINE_MODEL_BERT_H

#include "engine/model/builder.h"

C_BEGIN

/** bert_build() - the units of the sizes in m->dims. Failures stay in @b. */
void bert_build(struct model_builder *b, int64_t max_unit_numel);

/** bert_block() - append block @index, which reads slot @act_in and writes slot @act_out. */
void bert_block(struct model_builder *b, int index, int act_in, int act_out);

double bert_step_flops(const struct model *m, int64_t tokens, double squared_lengths);

static inline uint32_t bert_layer_site(int64_t layer, enum dropout_site site)
{
    return (uint32_t)layer << 8 | (uint32_t)site; /* layer 0: embeddings; 1 + n: block n */
}

C_END

#endif
