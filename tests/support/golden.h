/*
 * tests/support/golden.h - tensors of a reference, from a (gzip) safetensors file.
 *
 * The file: 8 bytes, the header's length, little endian; the header, a JSON object with an entry
 * {"dtype", "shape", "data_offsets"} for each name; the data. Trusted: made by scripts/golden_*.py.
 */
#ifndef TESTS_SUPPORT_GOLDEN_H
#define TESTS_SUPPORT_GOLDEN_H

#include "engine/base/file.h"
#include "engine/base/tensor.h"

C_BEGIN

struct json_t;

struct golden {
    struct file_text text; /* owned */
    struct json_t *header; /* owned */
    size_t data_first;
};

void golden_open(struct golden *g, const char *path);
void golden_release(struct golden *g);

/** golden_tensor() - the tensor with a printf-like name; a missing one fails the test. */
struct tensor golden_tensor(const struct golden *g, const char *format, ...) PRINTF_LIKE(2, 3);

/** golden_value() - element @i of a tensor of any type. */
double golden_value(struct tensor t, int64_t i);

/** golden_error() - largest |got - want| over the largest |want|; NaN counts as infinite. */
double golden_error(const float *got, struct tensor want);

C_END

#endif
