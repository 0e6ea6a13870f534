/*
 * engine/train/comparison.h - runs side by side: a table, JSON, CSV and a page.
 *
 * Each run is held against the first one that ran with as many ranks, the same micro-batch and
 * grad_accum, and the lowest stage of these: its memory is the ratio's denominator, its losses must
 * be identical to the bit. Speed-up is over the run of the fewest ranks with the same stage,
 * micro-batch and grad_accum; the global batch grows with the ranks.
 *
 *     compare.json   {"config":..,"steps":..,"repeat":..,"runs":[{"name":..,"ranks":..,
 *                      "zero_stage":..,"micro_batch":..,"grad_accum":..,"status":"ok",
 *                      "planned_bytes":{"total","live_peak","at_peak":{..},"own_max":{..}},
 *                      "counted_bytes":{"at_peak":{..},"own_max":{..}} or null,
 *                      "measured_bytes":..,"measured_by":"process","ratio":..,
 *                      "sequences_per_s","tokens_per_s","step_ms","speed_up":..,
 *                      "split_ms":{"compute","optimizer","exposed_communication","idle","data",
 *                      "hidden_communication"},"losses":"identical","first_difference":null}, ...]}
 *                    a run that failed: "status":"failed","reason":".."; what is not known is null
 *     compare.csv    a line a run, the same names; bytes by category as peak_NAME, max_NAME
 *                    and, as counted, counted_peak_NAME and counted_max_NAME
 *     report.html    all of it with charts; opens offline (engine/train/report.html)
 */
#ifndef ENGINE_TRAIN_COMPARISON_H
#define ENGINE_TRAIN_COMPARISON_H

#include "engine/train/run_result.h"

C_BEGIN

struct comparison {
    const char *title;     /* borrowed, as the next ones; of the page */
    const char *config;    /* the file that is compared; NULL: finished runs */
    int64_t steps, repeat; /* with config */
    struct run_result *runs;
    int count;
};

/** comparison_print() - the table, on standard output. */
void comparison_print(const struct comparison *c);

/** comparison_write() - compare.json and compare.csv in @dir. ST_IO, ST_MEMORY. */
MUST_CHECK enum status comparison_write(const struct comparison *c, const char *dir);

/**
 * comparison_page() - one HTML file that opens in any browser without a network.
 *
 * Below 1 MiB: of many or large runs some are shown without their time line and memory over a step.
 * Return: ST_OK; ST_IO; ST_MEMORY.
 */
MUST_CHECK enum status comparison_page(const struct comparison *c, const char *path);

C_END

#endif
