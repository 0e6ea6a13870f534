/*
 * engine/device/mark.h - small kernels of the device: a mark, a short fill. For device_cuda.c.
 */
#ifndef ENGINE_DEVICE_MARK_H
#define ENGINE_DEVICE_MARK_H

#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

C_BEGIN

/** mark_launch() - *word = value when @stream (a cudaStream_t) comes to it; may be captured.
 * @word: in pinned host memory that the device can write. */
MUST_CHECK enum status mark_launch(void *stream, uint32_t *word, uint32_t value);

enum { FILL_KERNEL_BYTES = 64 * 1024 };

/** fill_launch() - @bytes at @out, at most FILL_KERNEL_BYTES, become @byte. In a graph the kernel
 * behind a node of cudaMemset() begins 4 us after it, behind another kernel 1 us. */
MUST_CHECK enum status fill_launch(void *stream, void *out, int byte, size_t bytes);

C_END

#endif
