/*
 * engine/device/mark.h - a kernel of one thread that writes one word. For device_cuda.c.
 */
#ifndef ENGINE_DEVICE_MARK_H
#define ENGINE_DEVICE_MARK_H

#include <stdint.h>

#include "engine/base/status.h"

C_BEGIN

/** mark_launch() - *word = value when @stream (a cudaStream_t) comes to it; may be captured.
 * @word: in pinned host memory that the device can write. */
MUST_CHECK enum status mark_launch(void *stream, uint32_t *word, uint32_t value);

C_END

#endif
