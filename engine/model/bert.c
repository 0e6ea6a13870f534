#include "engine/model/bert.h"

const struct encoder_family bert_family = {
    .name = "bert",
    .word = "bert.embeddings.word_embeddings",
    .position = "bert.embeddings.position_embeddings",
    .type = "bert.embeddings.token_type_embeddings",
    .norm = "bert.embeddings.LayerNorm",
    .block = "bert.encoder.layer",
    .qkv = "attention.self.qkv",
    .query = "attention.self.query",
    .key = "attention.self.key",
    .value = "attention.self.value",
    .projection = "attention.output.dense",
    .norm1 = "attention.output.LayerNorm",
    .fc1 = "intermediate.dense",
    .fc2 = "output.dense",
    .norm2 = "output.LayerNorm",
    .projection_dropout = true,
};
