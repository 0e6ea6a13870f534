/*
 * io/json_number.h - a double as JSON text, as jansson writes it with 17 significant digits.
 *
 *     1.0      a whole number keeps its ".0"
 *     -0.25    the fewest digits that are exactly the 17, without zeros behind
 *     2.5e-5   below 1e-4 and from 1e17 on: no "+", no leading zero in the exponent
 *
 * The 17 digits are those of printf's "%.17g": the value times a power of ten, rounded to the
 * nearest integer, ties to even. Where that product fits in 128 bits it is computed exactly, some
 * ten times faster than printf, which does the rest (below 1e-11 and from 1e17 on).
 */
#ifndef IO_JSON_NUMBER_H
#define IO_JSON_NUMBER_H

#include <stddef.h>

#include "engine/base/status.h"

C_BEGIN

enum { JSON_NUMBER_BYTES = 32 };

/** json_number() - write @value, which is finite, without a zero byte; returns the bytes. */
size_t json_number(char text[JSON_NUMBER_BYTES], double value);

C_END

#endif
