/*
 * engine/train/checkpoint_ranges.h - ranges of flat parameters out of a checkpoint, read by all
 * threads of a rank.
 *
 *     range      [ query ........ | key ......... | gap | ffn ........................ ]
 *     pieces     [ chunk | chunk  | chunk | chunk |     | chunk | chunk | chunk | chunk ]
 *     threads      0       1        2       0             1       2       0       1
 *
 * A range is cut where the chunks of the checkpoint end, and each piece is read, unpacked, checked
 * and put into its place by whoever is free. Long ranges are read faster than short ones; what
 * comes out is the same for any number of threads.
 *
 * Memory: three chunks a thread, of which only what is used is ever touched.
 */
#ifndef ENGINE_TRAIN_CHECKPOINT_RANGES_H
#define ENGINE_TRAIN_CHECKPOINT_RANGES_H

#include "engine/device/device.h"
#include "engine/model/model.h"
#include "io/checkpoint.h"

C_BEGIN

struct range_piece;
struct range_failure;

struct range_reader {              /* zero-initialise */
    const struct model *model;     /* borrowed, as all of the next four */
    const struct checkpoint *file; /* with the tensors of the model */
    const bool *frozen;            /* by model_tensor: they have only the state "master" */
    struct workers *workers;       /* NULL: this thread alone */
    struct workers *own;           /* owned; if the device has none, or too many */
    int threads;
    struct checkpoint_reader *readers; /* owned; one a thread */
    struct range_piece *pieces;        /* owned; of the range at hand */
    size_t capacity, count;
    struct range_failure *failure; /* owned; of the first piece that could not be read */
    const char *state;
    float *out;
    int64_t end; /* behind the last piece so far, an element of the range */
};

/** range_reader_threads() - how many read: all that the rank may use, at most 16. */
int range_reader_threads(const struct device *device);

/**
 * range_reader_open() - threads and buffers; range_reader_close(), also after a failure.
 * @frozen: NULL: no tensor is.
 *
 * Return: ST_OK; ST_MEMORY; ST_SYSTEM (a thread cannot be started).
 */
MUST_CHECK enum status range_reader_open(struct range_reader *r, const struct model *model,
                                         const struct checkpoint *file, const bool *frozen,
                                         struct device *device);
void range_reader_close(struct range_reader *r);

/**
 * range_reader_read() - elements [first, first + count) of a state of a unit's flat parameter.
 * @out: host memory. Padding, and the moments of frozen tensors, are zeros.
 *
 * Return: as checkpoint_read_range(); of several failures that of one.
 */
MUST_CHECK enum status range_reader_read(struct range_reader *r, const char *state, int unit,
                                         float *out, int64_t first, int64_t count);

C_END

#endif
