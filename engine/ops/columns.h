/*
 * engine/ops/columns.h - column sums of a matrix on the CPU: bias gradients.
 *
 *     out (columns) = [out +] sum over the rows of x (rows, columns)
 *
 * In blocks of 32 rows, in row order: the error is that of 32 + rows / 32 terms. CUDA's are in
 * cuda_common.cuh.
 */
#ifndef ENGINE_OPS_COLUMNS_H
#define ENGINE_OPS_COLUMNS_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/device/device.h"

C_BEGIN

void columns_sum_cpu(struct stream *s, float *out, const float *x, int64_t rows, int64_t columns,
                     bool add);

/** finish_sums_cpu() - nothing: sums on the CPU are never left unfinished. */
enum status finish_sums_cpu(struct stream *s);

C_END

#endif
