/*
 * engine/ops/pieces.h - the CPU backend's loops over rows or elements, cut for a rank's threads.
 *
 * Cuts follow from the shape alone, so results have the same bits for any number of threads
 * (engine/device/workers.h). Products of matrices are the exception: they are cut by the number of
 * threads too, because a BLAS packs its operands anew for every piece.
 */
#ifndef ENGINE_OPS_PIECES_H
#define ENGINE_OPS_PIECES_H

#include <stdint.h>

#include "engine/device/device.h"

C_BEGIN

enum { PIECE_NUMEL = 32768 }; /* elements: some 30 us of work, three times a wake-up */

/**
 * pieces_run() - call @body for [0, @grain), [@grain, 2 @grain) ... up to @n.
 * @body: gets [first, end) and the index of its thread, below s->device->threads.
 * @grain: >= 1.
 */
void pieces_run(struct stream *s,
                void (*body)(void *context, int64_t first, int64_t end, int worker), void *context,
                int64_t n, int64_t grain);

/** pieces_grain() - rows of @columns elements in a piece of about PIECE_NUMEL, a multiple of 32. */
static inline int64_t pieces_grain(int64_t columns)
{
    int64_t rows = PIECE_NUMEL / (columns > 0 ? columns : 1) / 32 * 32;
    return rows > 32 ? rows : 32;
}

C_END

#endif
