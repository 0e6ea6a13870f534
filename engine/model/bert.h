/*
 * engine/model/bert.h - BERT for question answering: names of its tensors; for engine/model.
 *
 * Devlin et al., arXiv:1810.04805; as in the released models and Hugging Face's
 * BertForQuestionAnswering, without pooler. What it computes: engine/model/encoder.h.
 */
#ifndef ENGINE_MODEL_BERT_H
#define ENGINE_MODEL_BERT_H

#include "engine/model/encoder.h"

C_BEGIN

extern const struct encoder_family bert_family;

C_END

#endif
