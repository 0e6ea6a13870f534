/*
 * engine/ops/gemm_plan.h - which cuBLASLt algorithm runs which matrix product.
 *
 * The library object of a CUDA device (device->library) holds the cuBLASLt handle and a table of
 * plans: one a product, keyed by (kind, dtype, sizes, add, bias, alignment). A plan is made at the
 * product's first use by the library's heuristic, which is a function of the key, the card and the
 * library version, and is never timed or changed afterwards. So every stage, rank and run on the
 * same kind of machine runs the same algorithms.
 *
 * Reproducible: each product gets the same fixed workspace; only reductions through the workspace
 * in compute precision are allowed for split sums (not the in-place one). fp32 products use fp32
 * arithmetic, never TF32.
 *
 * The table has a fixed size; nothing allocates after ops_cuda_open(). Making a plan is host work
 * and allowed while a stream is captured. One thread, that of the device.
 */
#ifndef ENGINE_OPS_GEMM_PLAN_H
#define ENGINE_OPS_GEMM_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/tensor.h"
#include "engine/device/device.h"

C_BEGIN

/* The first bytes of a stream's workspace; what cuBLAS recommends for Hopper. */
#define GEMM_WORKSPACE_BYTES ((size_t)32 << 20)

enum gemm_kind {
    GEMM_FORWARD,         /* y (T, N) = x (T, K) w (N, K)^T + bias */
    GEMM_BACKWARD_DATA,   /* dx (T, K) = dy (T, N) w (N, K) */
    GEMM_BACKWARD_WEIGHT, /* dw (N, K) fp32 = dy (T, N)^T x (T, K) */
    GEMM_KINDS
};

/**
 * gemm_run() - enqueue one product of a linear layer; all matrices row-major and contiguous.
 * @out: y, dx or dw. @a, @b: x and w, dy and w, dy and x, as the kinds above name them.
 * @bias: (N) in @a's dtype, GEMM_FORWARD only; NULL for none.
 * @T, @N, @K: sizes as above, all > 0.
 * @add: add to @out instead of setting it.
 *
 * Return: ST_OK; ST_INVALID (workspace too small); ST_UNSUPPORTED (cuBLASLt has no algorithm);
 * ST_DEVICE.
 */
MUST_CHECK enum status gemm_run(struct stream *s, enum gemm_kind kind, struct tensor out,
                                struct tensor a, struct tensor b, const void *bias, int64_t T,
                                int64_t N, int64_t K, bool add);

/** gemm_plan_count() - plans made so far. */
int gemm_plan_count(const struct device *device);

/**
 * gemm_plan_describe() - the plans as text, a line each, in the order they were made: kind, dtype,
 * T, N, K, add, bias, algorithm id, tile, stages, split, reduction scheme, workspace bytes.
 * @text: at most @bytes with the final zero are written.
 *
 * Return: the length of the whole text, as snprintf does.
 */
size_t gemm_plan_describe(const struct device *device, char *text, size_t bytes);

C_END

#endif
