#include "engine/model/distilbert.h"

const struct encoder_family distilbert_family = {
    .name = "distilbert",
    .word = "distilbert.embeddings.word_embeddings",
    .position = "distilbert.embeddings.position_embeddings",
    .norm = "distilbert.embeddings.LayerNorm",
    .block = "distilbert.transformer.layer",
    .qkv = "attention.qkv_lin",
    .query = "attention.q_lin",
    .key = "attention.k_lin",
    .value = "attention.v_lin",
    .projection = "attention.out_lin",
    .norm1 = "sa_layer_norm",
    .fc1 = "ffn.lin1",
    .fc2 = "ffn.lin2",
    .norm2 = "output_layer_norm",
    .norm_eps = 1e-12,
};
