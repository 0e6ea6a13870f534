/*
 * comm/comm.h - collectives among the ranks of a run.
 *
 *     local  ranks are threads of one process and read each other's buffers
 *     mpi    one process a rank, on CPUs (builds with MPI)
 *     nccl   one process a GPU (CUDA builds)
 *     fault  wraps another and breaks it, for tests
 *     skip   wraps another and moves nothing between ranks, for benches and a rehearsal
 *
 * A collective is enqueued on a stream and returns; @done is recorded behind it. All ranks issue
 * the same collectives in the same order, whatever the stream; counts are elements per rank. When
 * @done is complete the output is there and all peers have read the input: both buffers may be used
 * again. Completing an event completes all earlier collectives of that communicator too.
 *
 *     all_gather       out[r * numel + i] = in of rank r [i]; in may be out + rank * numel
 *     reduce_scatter   out[i] = sum over r = 0, 1, ... in that order of
 *                      (in of rank r)[rank * numel + i]; out may be in + rank * numel; bf16 is
 *                      summed in fp32 and rounded once
 *
 * Each has the deadline of the communicator: ST_TIMEOUT names the silent ranks and what they did
 * last. After a failure the communicator is dead: every call on every rank fails soon.
 */
#ifndef COMM_COMM_H
#define COMM_COMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"
#include "engine/base/tensor.h"
#include "engine/device/device.h"

C_BEGIN

enum { COMM_MAX_WORLD_SIZE = 4096 };

struct comm;

/* A library's own abort may take for ever; no rank waits longer for it. */
enum { COMM_ABORT_MS = 2000 };

struct comm_ops {
    const char *name;
    enum status (*all_gather)(struct comm *comm, struct stream *s, void *out, const void *in,
                              int64_t numel, enum dtype dtype, struct event *done);
    enum status (*reduce_scatter)(struct comm *comm, struct stream *s, void *out, const void *in,
                                  int64_t numel, enum dtype dtype, struct event *done);
    enum status (*broadcast)(struct comm *comm, struct stream *s, void *data, int64_t numel,
                             enum dtype dtype, int root, struct event *done);
    /* Blocking, host memory: recv[r * bytes ..] = send of rank r. For set-up and saves. */
    enum status (*exchange)(struct comm *comm, void *recv, const void *send, size_t bytes);
    enum status (*progress)(struct comm *comm);
    enum status (*ready)(struct comm *comm);
    void (*stage)(struct comm *comm, void *memory, size_t bytes);
    enum status (*memory_open)(struct comm *comm, struct device *device, void **out, size_t bytes);
    void (*memory_close)(struct comm *comm, struct device *device, void **memory);
    void (*abort)(struct comm *comm, const char *cause);
    void (*close)(struct comm *comm);
};

struct comm {
    const struct comm_ops *ops;
    int rank, world_size; /* at most COMM_MAX_WORLD_SIZE ranks */
    int64_t timeout_ms;
    int multiprocessors; /* of the device, that a collective holds; 0: none */
    bool opening;        /* a library still connects the ranks: collectives wait for comm_ready() */
    /* Made by comm_memory_open() and comm_ready(): device memory that registering the block took,
     * and a line about it for the log; empty: there is nothing to say. */
    size_t window_bytes;
    char memory_text[192];
};

/** comm_all_gather(), comm_reduce_scatter(), comm_broadcast() - see the top. fp32, bf16 or int32;
 * reduce_scatter: fp32 or bf16. ST_COMM, ST_TIMEOUT, ST_INVALID (ranks issued different ones). */
MUST_CHECK enum status comm_all_gather(struct comm *comm, struct stream *s, void *out,
                                       const void *in, int64_t numel, enum dtype dtype,
                                       struct event *done);
MUST_CHECK enum status comm_reduce_scatter(struct comm *comm, struct stream *s, void *out,
                                           const void *in, int64_t numel, enum dtype dtype,
                                           struct event *done);
MUST_CHECK enum status comm_broadcast(struct comm *comm, struct stream *s, void *data,
                                      int64_t numel, enum dtype dtype, int root,
                                      struct event *done);

/** comm_exchange() - blocking all-gather of a small host struct (at most 64 KiB). Return: ST_OK;
 * ST_COMM, ST_TIMEOUT, ST_INVALID (larger, or ranks issued different collectives). */
MUST_CHECK enum status comm_exchange(struct comm *comm, void *recv, const void *send, size_t bytes);

/** comm_progress() - move collectives in flight forward; call it between operations. Does not wait.
 * Return: ST_OK; a failure of the communicator. */
MUST_CHECK enum status comm_progress(struct comm *comm);

/**
 * comm_ready() - wait until the ranks are connected, so that collectives can be issued, and the
 * block of comm_memory_open() is what they need. All ranks call it together, before their first
 * collective; that would do it too. Exchanges and comm_memory_open() work before.
 *
 * Return: ST_OK, at once where there is nothing to wait for; ST_COMM, ST_TIMEOUT.
 */
MUST_CHECK enum status comm_ready(struct comm *comm);

/**
 * comm_staging_bytes() - memory that a communicator needs beside the callers' buffers, so that it
 * can stand in the account of a run's memory.
 * @numel: elements a rank of the largest reduce_scatter, of whatever dtype.
 */
size_t comm_staging_bytes(enum comm_kind kind, int world_size, int64_t numel);

/** comm_stage() - lend that memory. It must stay until comm_close() or, when nothing is in flight,
 * comm_stage(comm, NULL, 0). A communicator that needs none does not look at it. */
void comm_stage(struct comm *comm, void *memory, size_t bytes);

/**
 * comm_memory_open() - zero-filled device memory in which a run's collectives have their buffers.
 * All ranks call it together, with the same @bytes; buffers of one collective must lie at the same
 * offset on all of them. NCCL makes it a symmetric window (comm/nccl.h); the others take it from
 * the device. One block at a time.
 *
 * Return: as device_alloc(); ST_COMM, ST_TIMEOUT.
 */
MUST_CHECK enum status comm_memory_open(struct comm *comm, struct device *device, void **out,
                                        size_t bytes);

/** comm_memory_close() - give it back; nothing is in flight. NULL is fine, also after a failure. */
void comm_memory_close(struct comm *comm, struct device *device, void **memory);

/** comm_barrier() - all ranks have come here. Return: as comm_exchange(). */
MUST_CHECK enum status comm_barrier(struct comm *comm);

/**
 * comm_agree() - share the worst status, so that all ranks take the same branch.
 *
 * Return: ST_OK if @st is ST_OK on every rank; else the first failure in rank order, with that
 * rank's message in this thread's buffer.
 */
MUST_CHECK enum status comm_agree(struct comm *comm, enum status st);

/** comm_share() - rank 0's @bytes of @data to all ranks; blocking, at most 64 KiB. ST_MEMORY. */
MUST_CHECK enum status comm_share(struct comm *comm, void *data, size_t bytes);

/** comm_abort() - end all ranks' waits with ST_COMM and @cause; safe from any thread. */
void comm_abort(struct comm *comm, const char *cause);

/** comm_close() - of NULL is fine. */
void comm_close(struct comm **comm);

/* Entries of the table for communicators that need no progress() or no stage(), that are ready from
 * the start, and whose buffers may lie anywhere. */
MUST_CHECK enum status comm_no_progress(struct comm *comm);
MUST_CHECK enum status comm_is_ready(struct comm *comm);
void comm_no_stage(struct comm *comm, void *memory, size_t bytes);
MUST_CHECK enum status comm_any_memory(struct comm *comm, struct device *device, void **out,
                                       size_t bytes);
void comm_any_memory_close(struct comm *comm, struct device *device, void **memory);

/* For communicators that sum in rank order, fp32 or bf16 by way of fp32; nothing overlaps. */

/** comm_load() - sum = in. */
void comm_load(float *sum, const void *in, int64_t numel, enum dtype dtype);
/** comm_add() - sum += in. */
void comm_add(float *sum, const void *in, int64_t numel, enum dtype dtype);
/** comm_store() - out = sum, rounded to nearest even. A NaN stays one. */
void comm_store(void *out, const float *sum, int64_t numel, enum dtype dtype);

C_END

#endif
