/*
 * engine/ops/gemm_plan.h - which cuBLASLt algorithm runs which matrix product.
 *
 * The library object of a CUDA device (device->library) holds the cuBLASLt handle and what is known
 * of each product (struct gemm_key) that was met so far. An algorithm comes from the plan that was
 * installed (gemm_table.h; gemm_measure.h makes one); a product that the plan lacks gets what the
 * library's heuristic says first, which is a function of the key, the card and the library version.
 * Nothing is timed here, and nothing changes once a product has run. So every stage, rank and run
 * with the same plan runs the same algorithms or, where collectives may be beside a product, one of
 * two that give the same bits.
 *
 * Reproducible: each product gets the same fixed workspace; only reductions through the workspace
 * in compute precision are allowed for split sums (not the in-place one). fp32 products use fp32
 * arithmetic, never TF32, and always the heuristic's choice.
 *
 * The table has a fixed size; nothing allocates after ops_cuda_open(). Looking a product up is host
 * work and allowed while a stream is captured. One thread, that of the device.
 */
#ifndef ENGINE_OPS_GEMM_PLAN_H
#define ENGINE_OPS_GEMM_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/tensor.h"
#include "engine/device/device.h"
#include "engine/ops/gemm_table.h"

C_BEGIN

/* The first bytes of a stream's workspace; what cuBLAS recommends for Hopper. */
#define GEMM_WORKSPACE_BYTES ((size_t)32 << 20)

/**
 * gemm_run() - enqueue one product of a linear layer; all matrices row-major and contiguous.
 * @out: y, dx or dw. @a, @b: x and w, dy and w, dy and x, as enum gemm_kind names them.
 * @bias: (N) in @a's dtype, GEMM_FORWARD only; NULL for none.
 * @T, @N, @K: sizes as there, all > 0.
 * @add: add to @out instead of setting it.
 *
 * Return: ST_OK; ST_INVALID (workspace too small); ST_UNSUPPORTED (cuBLASLt has no algorithm);
 * ST_DEVICE.
 */
MUST_CHECK enum status gemm_run(struct stream *s, enum gemm_kind kind, struct tensor out,
                                struct tensor a, struct tensor b, const void *bias, int64_t T,
                                int64_t N, int64_t K, bool add);

/** gemm_card() - what a plan for this device must say. */
void gemm_card(const struct device *device, struct gemm_card *card);

/** gemm_plan_accepts() - can this device run the product of @entry with its algorithm, and would it
 * give the same bits each time? What a plan file says is not believed before that. */
bool gemm_plan_accepts(const struct device *device, const struct gemm_entry *entry);

/**
 * gemm_plan_install() - from now on products take their algorithms from @table.
 * @table: of this card; borrowed until the device closes or another is installed; NULL: none.
 *
 * What was met before is forgotten, so that it takes its new algorithm too.
 */
void gemm_plan_install(struct device *device, const struct gemm_table *table);

/**
 * gemm_plan_beside() - some bf16 products from now on run beside collectives.
 * @multiprocessors: that these hold; 0: none.
 *
 * A product that fills the card waits a whole round of tiles for the few multiprocessors on which a
 * collective runs; one that leaves those alone is slower by itself and faster beside it. So a plan
 * has two algorithms for it (gemm_measure.h), and op_pass_begin() says which products want which.
 */
void gemm_plan_beside(struct device *device, int64_t multiprocessors);

/** gemm_plan_issued_beside() - bf16 products since then that took their algorithm for beside
 * collectives. */
int gemm_plan_issued_beside(const struct device *device);

/** gemm_plan_missing() - bf16 products met since then that the plan lacks. */
int gemm_plan_missing(const struct device *device);

C_END

#endif
