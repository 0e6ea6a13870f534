/*
 * engine/train/fit_table.h - what `tessera plan --memory` prints: every stage on every number of
 * ranks, with the largest micro-batch that fits, its bytes by category, and the fastest stage.
 */
#ifndef ENGINE_TRAIN_FIT_TABLE_H
#define ENGINE_TRAIN_FIT_TABLE_H

#include "engine/train/fit.h"

C_BEGIN

struct fit_table {
    const struct run_config *config; /* borrowed */
    enum device_kind device;         /* not auto */
    size_t memory_bytes;             /* of a rank */
    size_t reserve_bytes;            /* of that, not for the arena; 0: fit_beside_bytes() */
    const struct machine *machine;   /* for step times; NULL: none */
    int nodes;                       /* that the ranks are spread over */
    int ranks_from, ranks_to;        /* both, and the powers of two between them */
};

enum fit_format {
    FIT_TEXT,
    FIT_MARKDOWN, /* the table alone, with fewer columns: for docs/memory.md, issues, notes */
    FIT_JSON
};

/**
 * fit_table_print() - compute and print it. As one JSON object it is
 *
 *     {"memory_bytes":M,"device":"cuda","dtype":"bf16","parameters":P,"grad_accum":A,
 *      "max_length":T,"ranks":[{"world_size":N,"beside_bytes":B,"fastest":S or null,"stages":[
 *        {"zero_stage":S,"fits":true,"micro_batch":M,"limited":false,"bytes":{category:bytes, ...,
 *         "packing_loss":bytes},"total":bytes,"sent_bytes":bytes,
 *         "predicted_ms":ms,"sequences_per_s":of all ranks}, ...]}, ...]}    with a machine
 *
 * The bytes are those at the instant of the peak and add up to total, the arena. Where nothing fits
 * they are of a micro-batch of 1. A stage that the configuration refuses is {"zero_stage":S,
 * "fits":false,"refused":true}. limited: the configuration allows no larger batch.
 *
 * Return: ST_OK; ST_INVALID and ST_MEMORY as setup_init().
 */
MUST_CHECK enum status fit_table_print(const struct fit_table *table, enum fit_format format);

C_END

#endif
