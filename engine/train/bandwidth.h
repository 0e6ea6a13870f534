/*
 * engine/train/bandwidth.h - how fast memory is from where a thread runs, near and far.
 *
 *     host     one thread copies between two buffers of a node's memory
 *     device   copies between pinned memory of a node and a GPU, both ways
 *
 * Between nodes each measures in a thread of its own, which is bound to the CPUs and the node and
 * ends; the caller stays as it is. What was copied is compared before a figure is given. A copy of
 * n bytes on the host reads n and writes n: the figure counts both. To or from a device it counts
 * n.
 */
#ifndef ENGINE_TRAIN_BANDWIDTH_H
#define ENGINE_TRAIN_BANDWIDTH_H

#include <stddef.h>

#include "comm/topology.h"
#include "engine/base/status.h"

C_BEGIN

enum { BANDWIDTH_REPEATS = 7, BANDWIDTH_BYTES = 64 << 20 };

/* GB/s of each repeat, fastest first. */
struct bandwidth {
    double host[BANDWIDTH_REPEATS];
    double to_device[BANDWIDTH_REPEATS], from_device[BANDWIDTH_REPEATS];
};

/**
 * bandwidth_host() - from the CPUs of node @from to the memory of node @to, by index.
 *
 * Return: ST_OK; ST_SYSTEM: binding is not allowed here, or a thread cannot be started; ST_MEMORY;
 * ST_CORRUPT: the copy is not the original. Takes twice BANDWIDTH_BYTES, and 0.1 to 0.5 s.
 */
MUST_CHECK enum status bandwidth_host(struct bandwidth *b, const struct topology *t, int from,
                                      int to);

/** bandwidth_device() - between the visible GPU @index and pinned memory of node @to.
 * Also ST_DEVICE; ST_UNSUPPORTED without CUDA. */
MUST_CHECK enum status bandwidth_device(struct bandwidth *b, const struct topology *t, int index,
                                        int to);

struct binding;
struct comm;
struct device;

/**
 * bandwidth_report() - a glance at the start of a run: each rank, where it is bound, copies a few
 * MiB in its memory and to and from its GPU, and rank 0 says what the slowest reached.
 *
 *     bandwidth: host memory 12.1, host to GPU 54.0, GPU to host 53.1 GB/s, the slowest of 8 ranks
 *
 * All ranks call it; some 20 ms. A rank that cannot measure is left out. Return: ST_OK; errors of
 * the exchange and ST_MEMORY.
 */
MUST_CHECK enum status bandwidth_report(const struct binding *binding, struct device *device,
                                        struct comm *comm);

C_END

#endif
