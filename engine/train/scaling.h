/*
 * engine/train/scaling.h - predicted steps from 8 to 4096 GPUs: the tables of docs/scaling.md.
 *
 * Two models on nodes of eight H100, the same micro-batch on every GPU however many there are:
 *
 *     BERT-large   16 sequences of SQuAD's lengths, its units as engine/model has them
 *     decoder      2 sequences of 2048 tokens; 6.74 B parameters in Llama's shapes, as a list of
 *                  units made here: the engine does not train decoders
 *
 * flat: shards over all ranks. hybrid: shards within a node, replicas across; the engine does not
 * build such programs yet, so the node's program is priced with the sum across nodes added to each
 * REDUCE (shard/simulate.h).
 */
#ifndef ENGINE_TRAIN_SCALING_H
#define ENGINE_TRAIN_SCALING_H

#include "engine/train/forecast.h"

C_BEGIN

enum scaling_model { SCALING_BERT_LARGE, SCALING_DECODER, SCALING_MODELS };

struct scaling_case {
    enum scaling_model model;
    int zero_stage, gpus;
    bool hybrid;
};

struct scaling_step {
    struct forecast forecast;
    double gather_bytes, reduce_bytes; /* that a rank sends in its ring, hybrid: in its node's */
    double numel;                      /* parameters, with padding */
    double model_flops;                /* of one rank */
};

/**
 * scaling_forecast() - one cell.
 * @machine: "h100+ib400" and the like; nodes have eight GPUs, or fewer if there are not as many.
 *
 * Return: ST_OK; ST_INVALID (a number of GPUs that does not fill nodes); ST_MEMORY.
 */
MUST_CHECK enum status scaling_forecast(struct scaling_step *out, const struct scaling_case *c,
                                        const char *machine);

/** scaling_print() - all tables as Markdown, to standard output. */
MUST_CHECK enum status scaling_print(void);

/** scaling_format() - the same as text. @text: mem_free(). */
MUST_CHECK enum status scaling_format(char **text);

C_END

#endif
