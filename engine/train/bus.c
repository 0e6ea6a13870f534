#include "engine/train/bus.h"

#include <stdio.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"

enum { REPEATS = 3, REPORT_BYTES = 32 << 20, SETTINGS_BYTES = 512 };

extern char **environ;

/* One gather in place, from the moment at which all ranks are ready. */
static enum status gather(double *seconds, float *whole, int64_t numel, struct device *device,
                          struct comm *comm, struct event *done)
{
    TRY(stream_sync(&device->streams[STREAM_GATHER]));
    TRY(comm_barrier(comm));
    double begin = clock_s();
    TRY(comm_all_gather(comm, &device->streams[STREAM_GATHER], whole, whole + comm->rank * numel,
                        numel, DTYPE_F32, done));
    TRY(event_wait(done));
    *seconds = clock_s() - begin;
    return ST_OK;
}

enum status bus_measure(struct bus *bus, struct device *device, struct comm *comm, void *memory,
                        size_t bytes)
{
    enum status st = ST_OK;
    struct event done = {0};
    int64_t world = comm->world_size;
    int64_t numel = (int64_t)(bytes / sizeof(float)) / world / 128 * 128;
    *bus = (struct bus){.bytes = (size_t)(numel * world) * sizeof(float)};
    TRY(event_open(device, &done));
    for (int i = 0; i < 1 + REPEATS; i++) {
        double seconds = 0;
        TRY_GOTO(st, out, gather(&seconds, memory, numel, device, comm, &done));
        if (i == 1 || (i > 1 && seconds < bus->seconds)) /* the first makes connections */
            bus->seconds = seconds;
    }
    bus->bytes_a_second = (double)(numel * (world - 1)) * sizeof(float) / bus->seconds;
    TRY_GOTO(st, out, comm_barrier(comm)); /* nobody reads this memory any more */
out:
    event_close(&done);
    return st;
}

void bus_settings(char *out, size_t bytes)
{
    size_t used = 0;
    out[0] = '\0';
    for (char **entry = environ; *entry != NULL && used < bytes; entry++) {
        if (strncmp(*entry, "NCCL_", 5) != 0)
            continue;
        int n = snprintf(out + used, bytes - used, "%s%s", used > 0 ? " " : "", *entry);
        used += n > 0 ? (size_t)n : 0;
    }
}

enum status bus_report(struct device *device, struct comm *comm, void *memory, size_t bytes)
{
    char settings[SETTINGS_BYTES], peers[96] = "";
    struct bus bus;
    int direct = 0, others = 0;
    TRY(bus_measure(&bus, device, comm, memory, bytes < REPORT_BYTES ? bytes : REPORT_BYTES));
    device_cuda_peers(device->index, &direct, &others);
    if (others > 0)
        snprintf(peers, sizeof peers, "; this GPU reaches %d of %d others directly", direct,
                 others);
    bus_settings(settings, sizeof settings);
    if (comm->rank == 0)
        log_info("run", "bus: all_gather of %.3g MiB over %d ranks %.2f ms, %.1f GB/s%s%s%s",
                 (double)bus.bytes / 1048576.0, comm->world_size, bus.seconds * 1e3,
                 bus.bytes_a_second * 1e-9, peers, settings[0] != '\0' ? "; set for NCCL: " : "",
                 settings);
    return ST_OK;
}
