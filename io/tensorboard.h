/*
 * io/tensorboard.h - event files that TensorBoard shows.
 *
 * An event file is a row of records, each of them one Event of io/tensorboard.proto:
 *
 *     bytes 0..7    length N of the message, little endian
 *     bytes 8..11   masked CRC-32C of these eight bytes
 *     N bytes       the message
 *     4 bytes       masked CRC-32C of the message
 *
 * where masked is the CRC rotated right by 15 bits, plus 0xa282ead8. The first record names the
 * format. A scalar's tag may have a group before a slash ("train/loss"): one folded box each.
 *
 * Every record is one write, so a reader never meets half of one that stays. Nothing is allocated
 * after opening. One thread.
 *
 * Source: https://github.com/tensorflow/tensorboard (compat/proto), TFRecord's framing.
 */
#ifndef IO_TENSORBOARD_H
#define IO_TENSORBOARD_H

#include <stddef.h>
#include <stdint.h>

#include "engine/base/file.h"

C_BEGIN

enum { TENSORBOARD_MAX_SCALARS = 64, TENSORBOARD_MAX_TEXT = 1 << 16 };

struct tensorboard {
    struct file_log log;
    unsigned char *record; /* owned */
};

struct tensorboard_scalar {
    const char *tag;
    double value; /* stored as float; not finite: left out */
};

/**
 * tensorboard_open() - a new event file in @dir, which is made if it is not there.
 * @first_step: of a run that goes on from a checkpoint, its first one: what earlier files say about
 * it and later steps is not shown any more. Otherwise 0.
 *
 * Return: ST_OK; ST_IO; ST_MEMORY. Nothing is left open on failure.
 */
MUST_CHECK enum status tensorboard_open(struct tensorboard *tb, const char *dir,
                                        int64_t first_step);

/** tensorboard_scalars() - @count (at most TENSORBOARD_MAX_SCALARS) values of one step. ST_IO. */
MUST_CHECK enum status tensorboard_scalars(struct tensorboard *tb, int64_t step,
                                           const struct tensorboard_scalar *scalars, int count);

/** tensorboard_text() - Markdown under @tag, at most TENSORBOARD_MAX_TEXT / 2 bytes. ST_IO. */
MUST_CHECK enum status tensorboard_text(struct tensorboard *tb, int64_t step, const char *tag,
                                        const char *text);

/** tensorboard_close() - also one that is zero or never opened. ST_IO. */
MUST_CHECK enum status tensorboard_close(struct tensorboard *tb);

C_END

#endif
