/*
 * engine/model/distilbert.h - DistilBERT for question answering: names of its tensors; for
 * engine/model.
 *
 * Sanh et al., arXiv:1910.01108; as in the released models and Hugging Face's
 * DistilBertForQuestionAnswering. BERT (engine/model/encoder.h) with fewer blocks, without token
 * types, without dropout of the attention output, and with one (qa_dropout) before the head.
 */
#ifndef ENGINE_MODEL_DISTILBERT_H
#define ENGINE_MODEL_DISTILBERT_H

#include "engine/model/encoder.h"

C_BEGIN

extern const struct encoder_family distilbert_family;

C_END

#endif
