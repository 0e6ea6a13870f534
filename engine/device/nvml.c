#include "engine/device/nvml.h"

#include <dlfcn.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "engine/base/arena.h"

/* The library's types and numbers, by its reference. */
typedef int nvml_return;             /* 0: success */
typedef struct nvml_card *nvml_card; /* nvmlDevice_t */
enum { CLOCK_SM = 1, CLOCK_MEMORY = 2, TEMPERATURE_GPU = 0, INSUFFICIENT_SIZE = 7 };

struct nvml_utilization {
    unsigned gpu, memory; /* percent */
};

struct nvml_memory {
    unsigned long long total, free, used;
};

struct nvml {
    void *library;
    nvml_card card;
    nvml_return (*shutdown)(void);
    nvml_return (*utilization)(nvml_card, struct nvml_utilization *);
    nvml_return (*memory)(nvml_card, struct nvml_memory *);
    nvml_return (*power)(nvml_card, unsigned *milliwatts);
    nvml_return (*clock)(nvml_card, int kind, unsigned *mhz);
    nvml_return (*temperature)(nvml_card, int sensor, unsigned *celsius);
    nvml_return (*processes)(nvml_card, unsigned *count, void *list); /* NULL in old drivers */
};

/* ISO C has no cast from void * to a function pointer; POSIX promises that the bytes serve. */
static bool find(void *library, const char *name, void *function)
{
    void *symbol = dlsym(library, name);
    memcpy(function, &symbol, sizeof symbol);
    return symbol != NULL;
}

static enum status bind(struct nvml *n, const char *bus_id)
{
    nvml_return (*init)(void);
    nvml_return (*by_bus_id)(const char *, nvml_card *);
    n->library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (n->library == NULL)
        return FAIL(UNSUPPORTED, "NVML: %s", dlerror());
    if (!find(n->library, "nvmlInit_v2", &init) ||
        !find(n->library, "nvmlShutdown", &n->shutdown) ||
        !find(n->library, "nvmlDeviceGetHandleByPciBusId_v2", &by_bus_id) ||
        !find(n->library, "nvmlDeviceGetUtilizationRates", &n->utilization) ||
        !find(n->library, "nvmlDeviceGetMemoryInfo", &n->memory) ||
        !find(n->library, "nvmlDeviceGetPowerUsage", &n->power) ||
        !find(n->library, "nvmlDeviceGetClockInfo", &n->clock) ||
        !find(n->library, "nvmlDeviceGetTemperature", &n->temperature))
        return FAIL(UNSUPPORTED, "NVML: the driver's library lacks a function");
    find(n->library, "nvmlDeviceGetComputeRunningProcesses_v3", &n->processes);
    nvml_return failed = init();
    if (failed) {
        n->shutdown = NULL;
        return FAIL(UNSUPPORTED, "NVML does not start: error %d", failed);
    }
    failed = by_bus_id(bus_id, &n->card);
    return failed ? FAIL(UNSUPPORTED, "NVML: no card at %s: error %d", bus_id, failed) : ST_OK;
}

enum status nvml_open(struct nvml **out, const char *bus_id)
{
    enum status st = ST_OK;
    struct nvml *n = NULL;
    *out = NULL;
    TRY(mem_alloc(&n, sizeof *n));
    TRY_GOTO(st, out, bind(n, bus_id));
    *out = n;
    return ST_OK;
out:
    nvml_close(&n);
    return st;
}

void nvml_close(struct nvml **n)
{
    if (*n == NULL)
        return;
    if ((*n)->shutdown != NULL)
        (*n)->shutdown();
    if ((*n)->library != NULL)
        dlclose((*n)->library);
    mem_free(n);
}

static double known(nvml_return failed, double value)
{
    return failed ? (double)NAN : value;
}

int nvml_processes(const struct nvml *n)
{
    unsigned count = 0; /* no room: it says how much it takes */
    nvml_return failed = n->processes != NULL ? n->processes(n->card, &count, NULL) : 1;
    return failed == 0 || failed == INSUFFICIENT_SIZE ? (int)count : -1;
}

void nvml_read(const struct nvml *n, struct nvml_sample *s)
{
    struct nvml_utilization use = {0};
    struct nvml_memory memory = {0};
    unsigned value = 0;
    nvml_return failed = n->utilization(n->card, &use);
    s->utilization_percent = known(failed, use.gpu);
    s->memory_utilization_percent = known(failed, use.memory);
    failed = n->memory(n->card, &memory);
    s->memory_used_MiB = known(failed, (double)memory.used / 1048576.0);
    failed = n->power(n->card, &value);
    s->power_W = known(failed, value * 1e-3);
    failed = n->clock(n->card, CLOCK_SM, &value);
    s->sm_MHz = known(failed, value);
    failed = n->clock(n->card, CLOCK_MEMORY, &value);
    s->memory_MHz = known(failed, value);
    failed = n->temperature(n->card, TEMPERATURE_GPU, &value);
    s->temperature_C = known(failed, value);
}
