/*
 * engine/device/nvml.h - what the driver's management library (NVML) says of one card.
 *
 * The library comes with the driver and is looked for when it is asked for, so programs neither
 * link to it nor need it. It makes no CUDA context. A reading that a card does not offer is NAN.
 *
 * One handle belongs to one thread; several may be open.
 *
 * Source: NVIDIA's NVML API reference, "Device Queries".
 */
#ifndef ENGINE_DEVICE_NVML_H
#define ENGINE_DEVICE_NVML_H

#include "engine/base/status.h"

C_BEGIN

struct nvml; /* opaque */

struct nvml_sample {
    double utilization_percent;        /* of the time: a kernel ran */
    double memory_utilization_percent; /* of the time: memory was read or written */
    double memory_used_MiB;            /* by all processes */
    double power_W;
    double sm_MHz, memory_MHz;
    double temperature_C;
};

/**
 * nvml_open() - the card at @bus_id ("0000:3b:00.0").
 *
 * Return: ST_OK; ST_UNSUPPORTED (no library, no such card); ST_MEMORY.
 */
MUST_CHECK enum status nvml_open(struct nvml **out, const char *bus_id);

/** nvml_read() - how the card is now. */
void nvml_read(const struct nvml *n, struct nvml_sample *sample);

/** nvml_processes() - how many processes compute on the card; -1: not known. In a container it may
 * see fewer. */
int nvml_processes(const struct nvml *n);

void nvml_close(struct nvml **n);

C_END

#endif
