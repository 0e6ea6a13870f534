/*
 * engine/device/mark.h - small kernels of the device: a mark, a short fill or copy. For
 * device_cuda.c.
 */
#ifndef ENGINE_DEVICE_MARK_H
#define ENGINE_DEVICE_MARK_H

#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

C_BEGIN

/**
 * mark_launch() - *word = value when @stream (a cudaStream_t) comes to it.
 * @last: NULL: what follows on the stream waits for the mark. Else in a capture nothing waits for
 * it but the next mark, what follows begins as if there were none, and the graph ends when its
 * marks are written, too; *@last is the stream's last mark in that capture, NULL before the first.
 * @word: in pinned host memory that the device can write.
 */
MUST_CHECK enum status mark_launch(void *stream, void **last, uint32_t *word, uint32_t value);

enum { FILL_KERNEL_BYTES = 64 * 1024 };

/** fill_launch() - @bytes at @out, at most FILL_KERNEL_BYTES, become @byte. In a graph the kernel
 * behind a node of cudaMemset() begins 4 us after it, behind another kernel 1 us. */
MUST_CHECK enum status fill_launch(void *stream, void *out, int byte, size_t bytes);

/** fill_nodes() - the same for what libraries clear: cuBLASLt does so before a product that takes
 * its tiles by a counter. Of @graph (a cudaGraph_t), nodes that clear at most FILL_KERNEL_BYTES
 * become kernels with the same edges. */
MUST_CHECK enum status fill_nodes(void *graph);

enum { COPY_KERNEL_BYTES = 128 * 1024 };

/** copy_launch() - @bytes, at most COPY_KERNEL_BYTES, from @in to @out, which the device can both
 * read and write: its own memory, pinned memory of the host. The copy engine takes 5 us from the
 * kernel before it to the one behind it, of which the copy itself is one. */
MUST_CHECK enum status copy_launch(void *stream, void *out, const void *in, size_t bytes);

C_END

#endif
