/*
 * engine/train/staging.h - host memory on the way to a card: two pinned buffers in turn.
 *
 *     host     fill 0 | fill 1    | fill 0    | fill 1 ...
 *     copies          | 0 to card | 1 to card | 0 to card ...
 *
 * On the CPU there are no buffers: device memory is the host's, and values go there at once.
 */
#ifndef ENGINE_TRAIN_STAGING_H
#define ENGINE_TRAIN_STAGING_H

#include "engine/device/device.h"

C_BEGIN

struct staging {           /* zero-initialise */
    struct device *device; /* borrowed */
    float *buffer[2];      /* owned, pinned */
    struct event copied[2];
    int64_t numel; /* of a buffer; 0: device memory is the host's */
    int next;
};

/** staging_open() - buffers of @numel; staging_release(), also after a failure.
 * Return: ST_OK; ST_MEMORY; ST_DEVICE. */
MUST_CHECK enum status staging_open(struct staging *s, struct device *device, int64_t numel);
void staging_release(struct staging *s);

/** staging_take() - the next buffer to fill, once the copy from it is done. ST_DEVICE. */
MUST_CHECK enum status staging_take(struct staging *s, float **buffer);

/** staging_given() - what reads that buffer has been issued on @stream. ST_DEVICE. */
MUST_CHECK enum status staging_given(struct staging *s, struct stream *stream);

C_END

#endif
