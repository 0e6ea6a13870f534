/*
 * engine/model/encoder.h - BERT and its like for question answering, without pooler; for
 * engine/model.
 *
 * A family (bert.h, distilbert.h) is a table of tensor names and options. All have embeddings,
 * post-norm blocks and a head that gives each row a logit for start and end. Units, parameters and
 * what BACKWARD keeps:
 *
 *     word_table.k    word embeddings, rows [k R, (k + 1) R)                         nothing
 *     embedding_norm  position and, in some, type table; LayerNorm                   z, stats
 *     block.n         qkv (fused), attention output, LayerNorm, two of the           block_saved
 *                     feed-forward part, LayerNorm
 *     head            qa_outputs                                                     dlogits
 *
 *     block:  attn = attention(x Wqkv + b);   ln1 = norm(z1 = x + dropout(attn Wo + b))
 *             act = gelu(pre = ln1 W1 + b);   out = norm(z2 = ln1 + dropout(act W2 + b))
 *     head:   logits = dropout(x) W + b       its mask is made again in BACKWARD, not kept
 *
 * The word table's row 0 ([PAD]) gets no gradient, as padding_idx says in Hugging Face's models.
 * Three gradients are zero but for rounding, as a softmax ignores a shift of its row: the key bias,
 * the head's bias, the last block's second LayerNorm bias (this one without dropout in the head).
 * Padded batches: the same.
 */
#ifndef ENGINE_MODEL_ENCODER_H
#define ENGINE_MODEL_ENCODER_H

#include "engine/model/builder.h"

C_BEGIN

/* Tensor names without their ".weight" and ".bias". Those of a block stand behind
 * "@block.NUMBER."; "@qkv.weight" and "@qkv.bias" are the fused parameters, which no file has. */
struct encoder_family {
    const char *name; /* struct model's family */
    const char *word, *position, *norm;
    const char *type; /* NULL: no token types */
    const char *block;
    const char *qkv, *query, *key, *value, *projection, *norm1, *fc1, *fc2, *norm2;
    bool projection_dropout; /* of the attention output, before its residual sum */
    double norm_eps;         /* the only one that it can have; 0: what the configuration says */
};

/** encoder_build() - the units of the sizes in m->dims. @f: static. Failures stay in @b. */
void encoder_build(struct model_builder *b, const struct encoder_family *f, int64_t max_unit_numel);

/** encoder_block() - append block @index, which reads slot @act_in and writes slot @act_out. */
void encoder_block(struct model_builder *b, const struct encoder_family *f, int index, int act_in,
                   int act_out);

/** encoder_whole() - the parameter "@layer.weight" or "@layer.bias", all of its tensor. */
void encoder_whole(struct model_builder *b, const char *layer, const char *kind, int64_t rows,
                   int64_t columns, enum param_init init);

static inline uint32_t encoder_layer_site(int64_t layer, enum dropout_site site)
{
    /* layer 0: embeddings; 1 + n: block n; 1 + all blocks: head */
    return (uint32_t)layer << 8 | (uint32_t)site;
}

C_END

#endif
