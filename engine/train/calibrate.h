/*
 * engine/train/calibrate.h - measure what this machine can do (tessera calibrate).
 *
 * All ranks of a run measure at the same time, on their devices and over their communicator, so
 * that they share memory and caches as they do in a step. A number of the profile is made from the
 * mean over ranks of the median of a few repeats:
 *
 *     products     the four linear layers of a block, of several widths and rows: forward,
 *                  gradient of data, gradient of weights
 *     attention    forward and backward, dropout 0.1, narrow and wide heads, sequences of half and
 *                  one and a half of two mean lengths; on GPUs few rows and many: what both take is
 *                  the call's (the longest sequence ends last), the rest the rate's
 *     memory       what a block does beside that (GELU, two residual norms), by width and rows;
 *                  AdamW; a sum
 *     launch       many tiny operations in a row; the products of a tiny block: what a kernel takes
 *                  at least; on GPUs tiny operations by turns on two streams: what it costs to
 *                  wait for another one; graphs of one with the copies of a step around them: what
 *                  lies between steps
 *     near         all_gather and reduce_scatter, of a few bytes and of many MiB
 *     slow_down    products with and without collectives beside them (GPUs)
 *
 * On a GPU operations are replayed from graphs, as steps are, and their launches are in the rates;
 * "launch" is for those that no rate is of. Before what has most rows is timed it runs for a while:
 * a card at its power limit is slower than in the first milliseconds.
 * It takes some ten seconds.
 */
#ifndef ENGINE_TRAIN_CALIBRATE_H
#define ENGINE_TRAIN_CALIBRATE_H

#include "comm/comm.h"
#include "engine/base/arena.h"
#include "engine/train/machine.h"

C_BEGIN

enum { CALIBRATE_WIDTHS = 4, CALIBRATE_ROWS = 4, CALIBRATE_HEADS = 2, CALIBRATE_LENGTHS = 2 };

/* How much is measured; each array ascends. */
struct calibrate_sizes {
    int64_t widths[CALIBRATE_WIDTHS],
        rows[CALIBRATE_ROWS]; /* of products and the rest of a block */
    /* Of attention: sequences of half and one and a half of each length, by turns, that fill few
     * rows, and many; few 0: a call has no seconds of its own here. */
    int64_t heads[CALIBRATE_HEADS], lengths[CALIBRATE_LENGTHS], few_rows, many_rows;
    int64_t channels; /* of attention, at most the last width; a multiple of all heads */
    int64_t update_numel, link_numel;
    int64_t tiny_width, tiny_rows; /* of a block whose products are nothing but their launches */
};

struct calibrate_options {
    enum comm_kind comm;                 /* for the communicator's staging */
    const struct calibrate_sizes *sizes; /* NULL: those for this kind of device */
    bool
        processor_time; /* of a CPU rank's thread, not the wall's: where others use the cores too */
};

/** calibrate_rank() - all ranks call it; each gets the same profile, without a date.
 *
 * Return: ST_OK; ST_INVALID (processor time of a GPU, or of several threads); ST_MEMORY; ST_DEVICE;
 * ST_COMM, ST_TIMEOUT. */
MUST_CHECK enum status calibrate_rank(struct machine *m, struct device *device, struct comm *comm,
                                      const struct calibrate_options *options);

/* ---- for engine/train/calibrate*.c only ---- */

/* Seconds, but for what is said. */
struct calibrate_times {
    double product[CALIBRATE_WIDTHS][CALIBRATE_ROWS];
    double elementwise[CALIBRATE_WIDTHS][CALIBRATE_ROWS];
    double few[CALIBRATE_HEADS][CALIBRATE_LENGTHS], many[CALIBRATE_HEADS][CALIBRATE_LENGTHS];
    double update, copy;
    double launch, floor, edges, turn; /* for each operation; the last one for each graph */
    double gather_small, gather_large, reduce_small, reduce_large;
    double alone, beside, collectives; /* products alone, with collectives beside; these alone */
};

struct stage;
struct links;
struct bench_block;

struct bench {
    struct device *device; /* borrowed, as the next two */
    struct comm *comm;
    struct stream *s;
    struct calibrate_sizes sizes;
    bool processor_time;
    double warm_ms; /* that operations run before they are timed */
    struct device_timer begin, end;
    struct pool pool;           /* of the list below */
    struct bench_block *blocks; /* device memory to give back */
    struct stage *stage;        /* of calibrate_compute.c, NULL before */
    struct links *links;        /* of calibrate_links.c */
};

/** bench_time() - the median of a few repeats of what @run issues on b->s. All ranks together.
 * bench_time_compute() - of operations alone, no collective: on a GPU replayed from a graph. */
MUST_CHECK enum status bench_time(struct bench *b, double *seconds,
                                  enum status (*run)(struct bench *b));
MUST_CHECK enum status bench_time_compute(struct bench *b, double *seconds,
                                          enum status (*run)(struct bench *b));

/** bench_same() - rank 0's count to all: they must make the same calls. */
MUST_CHECK enum status bench_same(struct bench *b, int *count);

/** bench_take() - device memory until the end; zeros. */
MUST_CHECK enum status bench_take(struct bench *b, void **out, size_t bytes);

/** calibrate_compute() - leaves b->stage for bench_products() until calibrate_compute_close(). */
MUST_CHECK enum status calibrate_compute(struct bench *b, struct calibrate_times *times);
void calibrate_compute_close(struct bench *b);

/** bench_products() - the products of the widest block with the most rows. */
MUST_CHECK enum status bench_products(struct bench *b);

MUST_CHECK enum status calibrate_links(struct bench *b, struct calibrate_times *times,
                                       enum comm_kind kind);

C_END

#endif
