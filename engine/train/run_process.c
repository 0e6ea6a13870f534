#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/rendezvous.h"
#include "comm/skip.h"
#include "engine/base/log.h"
#include "engine/train/run.h"
#ifdef TESSERA_CUDA
#include "comm/nccl.h"
#endif
#ifdef TESSERA_MPI
#include "comm/mpi.h"
#endif

/* What makes a process a rank. */
struct process {
    struct device *device;         /* owned, as the others */
    struct rendezvous *rendezvous; /* NULL with MPI, which has its own */
    struct comm *comm;
};

#ifdef TESSERA_CUDA

static enum status open_rendezvous(struct rendezvous **out, const struct run_config *config,
                                   const struct launch *launch)
{
    struct rendezvous_options options = {
        .rank = launch->rank,
        .world_size = launch->world_size,
        .address = launch->address,
        .port = launch->port,
        .bind = launch->bind[0] != '\0' ? launch->bind : NULL,
        .token = launch->token,
        .listen_fd = launch->listen_fd,
        .timeout_ms = config->train.timeout_s * 1000,
    };
    return launch->world_size > 1 ? rendezvous_open(out, &options) : ST_OK;
}

static enum status open_gpu(struct process *p, const struct run_config *config,
                            const struct launch *launch)
{
    int index = 0, local = launch->local_size > 0 ? launch->local_size : 1;
    TRY(open_rendezvous(&p->rendezvous, config, launch));
    TRY(launch_device(&index, launch, device_cuda_count()));
    TRY(device_open(&p->device, DEVICE_CUDA, config->train.precision, index,
                    run_threads(config, local)));
    return nccl_comm_open(&p->comm, p->device, launch->rank, launch->world_size, p->rendezvous,
                          config->train.timeout_s * 1000, config->train.windows);
}

#else

static enum status open_gpu(struct process *p, const struct run_config *config,
                            const struct launch *launch)
{
    (void)p;
    (void)config;
    (void)launch;
    return FAIL(UNSUPPORTED, "train.device: cuda is not built in; build with CUDA=1");
}

#endif

#ifdef TESSERA_MPI

/* Where a process may run. */
struct place {
    char host[128];
    cpu_set_t cores;
};

/* How many ranks share this one's cores: all of the machine, or one if the launcher has bound each
 * to its own. */
static enum status ranks_of_my_cores(struct comm *comm, int *count)
{
    enum status st = ST_OK;
    struct place mine, *all = NULL;
    memset(&mine, 0, sizeof mine);
    gethostname(mine.host, sizeof mine.host - 1);
    if (sched_getaffinity(0, sizeof mine.cores, &mine.cores) != 0)
        CPU_ZERO(&mine.cores);
    *count = 0;
    TRY(mem_alloc(&all, sizeof *all * (size_t)comm->world_size));
    TRY_GOTO(st, out, comm_exchange(comm, all, &mine, sizeof mine));
    for (int r = 0; r < comm->world_size; r++)
        *count += memcmp(&all[r], &mine, sizeof mine) == 0;
out:
    mem_free(&all);
    return st;
}

static enum status open_cpu(struct process *p, const struct run_config *config,
                            const struct launch *launch)
{
    int sharing = 1;
    struct mpi_options options = {.rank = launch->rank,
                                  .world_size = launch->world_size,
                                  .timeout_ms = config->train.timeout_s * 1000};
    TRY(mpi_comm_open(&p->comm, &options));
    TRY(ranks_of_my_cores(p->comm, &sharing));
    return device_open(&p->device, DEVICE_CPU, config->train.precision, 0,
                       run_threads(config, sharing));
}

#else

static enum status open_cpu(struct process *p, const struct run_config *config,
                            const struct launch *launch)
{
    (void)p;
    (void)config;
    (void)launch;
    return FAIL(UNSUPPORTED, "train.comm mpi is not built in; build with MPI=1");
}

#endif

/* The others must not wait for a rank that failed. With MPI that does not return. */
static void end_process(struct process *p, enum status st)
{
    bool failed = st != ST_OK && st != ST_INTERRUPTED;
    char cause[4096]; /* closing has failures of its own */
    snprintf(cause, sizeof cause, "%s", status_message());
    if (failed && p->comm != NULL)
        comm_abort(p->comm, cause);
    else if (failed && p->rendezvous != NULL)
        rendezvous_abort(p->rendezvous, cause);
    if (failed && p->device != NULL && p->device->asynchronous) {
        log_cause("run", cause);
        device_settle(p->device);
        if (p->device->lost)
            _Exit(EXIT_FAILURE); /* exit() would wait for the device */
    }
    comm_close(&p->comm);
    rendezvous_close(&p->rendezvous);
    device_close(&p->device);
    status_set_message(cause);
}

enum status run_process(const struct run_config *config, const struct launch *launch,
                        const struct run_options *options, const volatile int *signal_flag)
{
    enum status st = ST_OK;
    struct run_data data = {0};
    struct metrics metrics = {0};
    struct process p = {NULL, NULL, NULL};
    bool speaks = launch->rank == 0 && !options->quiet;
    log_set_rank(launch->rank);
    TRY_GOTO(st, out,
             config->train.comm == COMM_MPI ? open_cpu(&p, config, launch)
                                            : open_gpu(&p, config, launch));
    if (getenv("TESSERA_SKIP_COLLECTIVES") != NULL)
        TRY_GOTO(st, out, skip_open(&p.comm));
    if (options->wrap_comm != NULL)
        TRY_GOTO(st, out, options->wrap_comm(options->context, &p.comm));
    start_times_part(options->start, "device");
    if (options->alone != NULL) {
        st = options->alone(options->context, p.device, p.comm);
        goto out;
    }
    TRY_GOTO(st, out, run_data_load(&data, config, config->train.steps != 0));
    start_times_part(options->start, "features");
    if (speaks)
        TRY_GOTO(st, out, metrics_open(&metrics, config));
    struct rank_run run = {config, &data, options, signal_flag, speaks ? &metrics : NULL};
    TRY_GOTO(st, out, run_rank(&run, p.device, p.comm));
out:
    metrics_close(&metrics);
    run_data_release(&data);
    end_process(&p, st);
    return st;
}
