/*
 * comm/imitate.h - a rank alone that plays rank 0 of several.
 *
 * What a step of N ranks takes, seen on one card: the run has the program, the shards and the batch
 * of N ranks, and each collective takes as long as it is said to take between them. Nobody else is
 * there: all_gather() puts this rank's part in the place of every rank, reduce_scatter() takes this
 * rank's part of its own input, and whatever is exchanged all ranks have sent alike. Numbers stay
 * finite and mean nothing. On CUDA a kernel reads and writes what a collective reads and writes of
 * this rank's memory, and holds its multiprocessors meanwhile: that is what products beside it
 * notice. TESSERA_IMITATE_RANKS=N wraps the communicator of a run on one GPU so.
 */
#ifndef COMM_IMITATE_H
#define COMM_IMITATE_H

#include "comm/comm.h"

C_BEGIN

/* A ring over @ranks, as in shard/simulate.h: call + (ranks - 1) (hop + share / rate). */
struct imitate_links {
    int ranks;                                   /* 2 to COMM_MAX_WORLD_SIZE */
    double call_seconds, hop_seconds;            /* >= 0 */
    double gather_per_second, reduce_per_second; /* bytes that a rank sends; > 0 */
    int multiprocessors; /* that a collective holds; 0: copies alone, no time (the CPU) */
};

/**
 * imitate_open() - put one around @comm, of one rank, which is owned by it from then on.
 *
 * Return: ST_OK; ST_INVALID (more than one rank, or numbers out of range); ST_MEMORY. After a
 * failure @comm stays as it is.
 */
MUST_CHECK enum status imitate_open(struct comm **comm, const struct imitate_links *links);

/* What a collective does in one rank's memory: @copies of the share at @in to @out, one behind the
 * other, and @shares are read from @in on. For comm/imitate_hold.cu. */
struct imitate_copy {
    const void *in;
    void *out;
    size_t share; /* bytes, a multiple of 4 */
    int copies, shares, multiprocessors;
    int slot; /* a number that no other collective under way has, below IMITATE_SLOTS */
    double seconds;
};
enum { IMITATE_SLOTS = 8192 };

/** imitate_hold() - enqueue it on a CUDA stream. ST_DEVICE. */
MUST_CHECK enum status imitate_hold(struct stream *s, const struct imitate_copy *copy);

C_END

#endif
