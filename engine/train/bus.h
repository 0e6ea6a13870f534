/*
 * engine/train/bus.h - how ranks on GPUs reach each other, said at the start of a run.
 *
 * A setting that somebody left in the environment can make collectives many times slower, and
 * nothing but the step time tells. So rank 0 prints what a collective reaches, whether the GPUs of
 * this process's machine reach each other directly, and every setting of NCCL that there is:
 *
 *     bus: all_gather of 32 MiB over 4 ranks 0.11 ms, 231 GB/s; this GPU reaches 3 of 3 others
 *     directly; set for NCCL: NCCL_P2P_DISABLE=1
 *
 * Bus bandwidth, as nccl-tests define it for all_gather: (N - 1) / N of the bytes over the time,
 * what a rank sends in a ring.
 */
#ifndef ENGINE_TRAIN_BUS_H
#define ENGINE_TRAIN_BUS_H

#include <stddef.h>

#include "comm/comm.h"
#include "engine/device/device.h"

C_BEGIN

struct bus {
    double seconds;        /* of the fastest of a few all_gathers */
    double bytes_a_second; /* bus bandwidth */
    size_t bytes;          /* that were gathered, whole */
};

/**
 * bus_measure() - all ranks gather about @bytes in place. For a communicator that needs no staging.
 * @memory: @bytes of comm_memory_open()'s block, at the same place of it on all ranks; what is
 * there is lost.
 *
 * Return: ST_OK; as comm_all_gather().
 */
MUST_CHECK enum status bus_measure(struct bus *bus, struct device *device, struct comm *comm,
                                   void *memory, size_t bytes);

/** bus_settings() - "NCCL_A=1 NCCL_B=x" of the environment into @out, cut off where it is full;
 * "": there are none. */
void bus_settings(char *out, size_t bytes);

/** bus_report() - bus_measure() in up to 32 MiB of @memory, and the line above. All ranks call it.
 * Return: as bus_measure(). */
MUST_CHECK enum status bus_report(struct device *device, struct comm *comm, void *memory,
                                  size_t bytes);

C_END

#endif
