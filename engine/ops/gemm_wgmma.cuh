/*
 * engine/ops/gemm_wgmma.cuh - own bf16 products for Hopper, beside cuBLASLt's.
 *
 * A block takes tile after tile by a counter. So it does not matter how many multiprocessors a
 * collective holds, or when they come free: the others go on with the tiles; and when a product
 * ends, the next kernel, or one of another stream, has the multiprocessors one by one. Kernels of
 * this kind are placed early (cuda_common.cuh). Whichever block it is, a tile is the sum over
 * slices of 64 in their order: the same bits each time.
 *
 * The shapes differ in the tile; which is fastest for a product is measured (gemm_measure.h).
 */
#ifndef ENGINE_OPS_GEMM_WGMMA_CUH
#define ENGINE_OPS_GEMM_WGMMA_CUH

#include "engine/ops/cuda_common.cuh"
#include "engine/ops/gemm_table.h"

enum { GEMM_SHAPES = 4 };

/** gemm_wgmma_open() - once a process, on its device. @encode: gets what gemm_wgmma_issue() needs;
 * NULL where they cannot run. */
enum status gemm_wgmma_open(void **encode);

/** gemm_wgmma_can() - products of bf16 with aligned rows. */
bool gemm_wgmma_can(const struct gemm_key *key);

/**
 * gemm_wgmma_issue() - enqueue the product of @key, which it can, in tiles of shape @shape.
 * @encode: from gemm_wgmma_open(), not NULL. @turn: counts products of the device.
 */
enum status gemm_wgmma_issue(struct stream *s, void *encode, const struct gemm_key *key, int shape,
                             uint32_t turn, void *out, const void *a, const void *b,
                             const void *bias);

#endif
