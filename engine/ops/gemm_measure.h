/*
 * engine/ops/gemm_measure.h - make a GEMM plan: time what cuBLASLt's heuristic offers.
 *
 * Candidates are timed in the pattern of a training step: the activation (or gradient) that the
 * operation before has just written is the same in every run and so lies in the L2 cache; the other
 * operand and the output change from run to run among sets that are larger than that cache. Values
 * are random, because zeros draw less power and run faster. Candidates take turns, and the fastest
 * of a few rounds counts: first short ones of all, then longer ones of the heuristic's own choice
 * and the best two of the others. That choice stays unless another beats it by more than 1%.
 *
 * A product that runs beside collectives (gemm_key.beside) gets two algorithms, the fastest alone
 * and the fastest while a kernel holds as many multiprocessors, of those that give the same bits:
 * candidates are grouped by what they make of the same numbers, and the group whose two best times
 * have the least sum counts. (Most give the same: they add along K in the same order.)
 *
 * Candidates are what the heuristic offers for all multiprocessors, for those that are not held,
 * and for a few smaller numbers: each has other tiles.
 *
 * Only in set-up: it takes device memory, waits, and is not reproducible. Its result is.
 */
#ifndef ENGINE_OPS_GEMM_MEASURE_H
#define ENGINE_OPS_GEMM_MEASURE_H

#include "engine/device/device.h"
#include "engine/ops/gemm_table.h"

C_BEGIN

struct gemm_measured {
    int products; /* that were added */
    int changed;  /* of these, with another algorithm than the heuristic's first, alone */
    int beside;   /* of these, with another one beside collectives than alone */
    int skipped;  /* of these, not timed: the time was up */
};

/**
 * gemm_wanted() - the products that a run will have: every bf16 one that the device has met so far,
 * and the same with each of @T rows; no more than a plan holds.
 * @wanted: zeroed; gets entries with keys alone. ST_MEMORY.
 */
MUST_CHECK enum status gemm_wanted(struct gemm_table *wanted, const struct device *device,
                                   const int64_t *T, int T_count);

/**
 * gemm_measure() - give @table an entry for each product of @wanted that it lacks, but for those of
 * tensors that are not aligned to 256 bytes.
 * @table: of this card.
 * @budget_s: when so much time is gone, the rest gets the heuristic's choice.
 *
 * Device memory for the operands of the largest product is taken from the card meanwhile.
 *
 * Return: ST_OK; ST_DEVICE (also when there is no memory: @table is as before); ST_MEMORY.
 */
MUST_CHECK enum status gemm_measure(struct device *device, struct gemm_table *table,
                                    const struct gemm_table *wanted, double budget_s,
                                    struct gemm_measured *result);

C_END

#endif
