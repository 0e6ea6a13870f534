/*
 * io/half.h - the 16-bit floats of model files.
 *
 *     F16   IEEE 754 binary16: sign, 5 bits of exponent (bias 15), 10 of fraction; up to 65504
 *     BF16  the upper half of a binary32: its range with 7 bits of fraction
 *
 * Widening is exact. Narrowing rounds to nearest, ties to even; an infinity stays one, a NaN stays
 * a (quiet) NaN with its sign.
 */
#ifndef IO_HALF_H
#define IO_HALF_H

#include <stdint.h>

#include "engine/base/status.h"

C_BEGIN

enum half_kind { HALF_F16, HALF_BF16 };

/** half_widen() - @count values as fp32. @from may be the upper half of @out's own memory. */
void half_widen(float *out, const void *from, int64_t count, enum half_kind kind);

/**
 * half_narrow() - @count values as 16 bits each.
 *
 * Return: -1; or the first element that is finite and rounds beyond the largest value of @kind:
 * then what follows it in @out is unspecified.
 */
int64_t half_narrow(uint16_t *out, const float *from, int64_t count, enum half_kind kind);

C_END

#endif
