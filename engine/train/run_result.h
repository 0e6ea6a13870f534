/*
 * engine/train/run_result.h - a finished run as its output folder tells it, for tables and charts.
 *
 *     config.yaml    what it was                summary.json   planned and measured bytes
 *     metrics.jsonl  steps: loss, time          trace*.json    the time line of a step, if there is
 *     plan.json      which buffer lives when    one (tessera train --trace FOLDER/trace.json)
 *     topology.json  the machine and its ranks
 *
 * Speeds are those of the steady part: the first three steps (of few, a third) and the traced one
 * do not count. The medians of several runs of the same configuration make one result.
 */
#ifndef ENGINE_TRAIN_RUN_RESULT_H
#define ENGINE_TRAIN_RUN_RESULT_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/train/time_split.h"
#include "shard/program.h"

C_BEGIN

struct json_t;

struct run_result {
    char name[256];    /* for people; may hold anything */
    char reason[1024]; /* why it failed; "": it did not, and only then the rest is there */
    int64_t ranks, zero_stage, micro_batch, grad_accum;
    double planned_bytes, live_peak_bytes;
    double at_peak[CATEGORY_COUNT], own_max[CATEGORY_COUNT];
    double counted_at_peak[CATEGORY_COUNT], counted_own_max[CATEGORY_COUNT]; /* NAN: not counted */
    double measured_bytes; /* of a rank; NAN: not known */
    bool on_card;          /* measured is what the driver says; else growth of the process */
    double sequences_per_s, tokens_per_s, step_ms; /* of all ranks together; NAN: no steps */
    bool has_split;
    struct time_split split;    /* of rank 0 */
    double data_ms;             /* of a step, outside the time line: batches and the host's work */
    struct json_t *losses;      /* owned, as the others; [[step, loss], ...] */
    struct json_t *evaluations; /* [[step, loss, F1], ...] */
    struct json_t *plan;        /* plan.json; NULL: none */
    struct json_t *topology;    /* topology.json; NULL: none */
    struct json_t *timeline;    /* {"step_ms", "events": [[stream, ts_ms, dur_ms, name], ...]} */
    struct json_t *card;        /* summary's card_bytes, or NULL */
};

/**
 * run_result_read() - read a run's output folder.
 * @r: run_result_release() it, also after a failure. Its name is the last part of @dir.
 *
 * Return: ST_OK; ST_IO (a file is missing: no run, or one that has not ended); ST_CORRUPT;
 * ST_INVALID (its configuration); ST_MEMORY.
 */
MUST_CHECK enum status run_result_read(struct run_result *r, const char *dir);
void run_result_release(struct run_result *r);

/** run_result_count() - take the counted bytes of the run in @dir, trained with --count-memory. */
MUST_CHECK enum status run_result_count(struct run_result *r, const char *dir);

/** run_result_median() - put the medians of @count runs into the first one's measured values. */
void run_result_median(struct run_result *runs, int count);

/** run_result_first_difference() - the first step (from 1) whose losses differ, or that only one
 * of them has; 0: identical to the bit. */
int64_t run_result_first_difference(const struct run_result *a, const struct run_result *b);

C_END

#endif
