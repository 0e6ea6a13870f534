#include "engine/train/gpu_log.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/clock.h"
#include "engine/base/file.h"
#include "engine/base/log.h"
#include "engine/base/monitor.h"
#include "engine/device/nvml.h"
#include "engine/train/metrics.h"

struct gpu_log {
    struct nvml *nvml; /* owned; the thread's */
    struct file_log file;
    double start_s, interval_s;
    int rank;
    pthread_t thread;
    struct monitor monitor;
    bool stop; /* under the lock */
};

static enum status append(struct gpu_log *g)
{
    char line[256];
    struct nvml_sample s;
    nvml_read(g->nvml, &s);
    const double values[] = {s.utilization_percent,
                             s.memory_utilization_percent,
                             s.memory_used_MiB,
                             s.power_W,
                             s.sm_MHz,
                             s.memory_MHz,
                             s.temperature_C};
    int used = snprintf(line, sizeof line, "%.2f", clock_s() - g->start_s);
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        used += snprintf(line + used, sizeof line - (size_t)used,
                         isfinite(values[i]) ? ",%.4g" : ",", values[i]);
    line[used] = '\n';
    return file_log_append(&g->file, line, (size_t)used + 1);
}

/* True once it is to stop. */
static bool sleep_or_stop(struct gpu_log *g)
{
    int64_t until_ns = clock_ns() + (int64_t)(g->interval_s * 1e9);
    pthread_mutex_lock(&g->monitor.mutex);
    while (!g->stop && monitor_wait(&g->monitor, until_ns))
        continue;
    bool stop = g->stop;
    pthread_mutex_unlock(&g->monitor.mutex);
    return stop;
}

static void *run(void *context)
{
    struct gpu_log *g = context;
    bool stop = false;
    log_set_rank(g->rank);
    do {
        if (append(g) != ST_OK) {
            log_warn("gpu", "%s; no more of it", status_message());
            break;
        }
        stop = sleep_or_stop(g);
    } while (!stop);
    if (stop && append(g) != ST_OK)
        log_warn("gpu", "%s", status_message());
    return NULL;
}

static enum status open_file(struct gpu_log *g, const struct run_config *config)
{
    static const char HEAD[] = "seconds,utilization_percent,memory_utilization_percent,"
                               "memory_used_MiB,power_W,sm_MHz,memory_MHz,temperature_C\n";
    char dir[1100], name[32], path[1200];
    TRY(path_join(dir, sizeof dir, config->output.dir, "gpu"));
    TRY(file_make_dirs(dir));
    snprintf(name, sizeof name, "rank-%d.csv", g->rank);
    TRY(path_join(path, sizeof path, dir, name));
    TRY(file_log_open(&g->file, path));
    return file_log_append(&g->file, HEAD, sizeof HEAD - 1);
}

static void release(struct gpu_log **log)
{
    struct gpu_log *g = *log;
    if (file_log_close(&g->file) != ST_OK)
        log_warn("gpu", "%s", status_message());
    nvml_close(&g->nvml);
    monitor_release(&g->monitor);
    mem_free(log);
}

static enum status start(struct gpu_log *g, const struct run_config *config)
{
    TRY(open_file(g, config));
    int error = pthread_create(&g->thread, NULL, run, g);
    return error ? FAIL(SYSTEM, "cannot start a thread: %s", strerror(error)) : ST_OK;
}

void gpu_log_start(struct gpu_log **out, const struct run_config *config,
                   const struct device *device, int rank)
{
    struct nvml *nvml = NULL;
    *out = NULL;
    if (device->bus_id[0] == '\0' || config->output.gpu_log_s <= 0)
        return;
    if (nvml_open(&nvml, device->bus_id) != ST_OK) {
        log_warn("gpu", "no log of the card: %s", status_message());
        return;
    }
    if (mem_alloc(out, sizeof **out) != ST_OK) {
        log_warn("gpu", "%s", status_message());
        nvml_close(&nvml);
        return;
    }
    **out = (struct gpu_log){.nvml = nvml,
                             .file.fd = -1,
                             .start_s = clock_s(),
                             .interval_s = config->output.gpu_log_s,
                             .rank = rank};
    if (monitor_init(&(*out)->monitor) != ST_OK) {
        log_warn("gpu", "no log of the card: %s", status_message());
        nvml_close(&nvml);
        mem_free(out);
        return;
    }
    if (start(*out, config) != ST_OK) {
        log_warn("gpu", "no log of the card: %s", status_message());
        release(out);
    }
}

void gpu_log_stop(struct gpu_log **log)
{
    if (*log == NULL)
        return;
    pthread_mutex_lock(&(*log)->monitor.mutex);
    (*log)->stop = true;
    pthread_cond_broadcast(&(*log)->monitor.changed);
    pthread_mutex_unlock(&(*log)->monitor.mutex);
    pthread_join((*log)->thread, NULL);
    release(log);
}
