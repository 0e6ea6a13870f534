#include <stdio.h>

#include "engine/base/log.h"
#include "engine/train/run.h"
#ifdef TESSERA_CUDA
#include "comm/nccl.h"
#endif

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

static enum status open_device(struct device **out, const struct run_config *config,
                               const struct launch *launch)
{
    int index = 0;
    TRY(launch_device(&index, launch, device_cuda_count()));
    int local = launch->local_size > 0 ? launch->local_size : 1;
    return device_open(out, DEVICE_CUDA, config->train.precision, index,
                       run_threads(config, local));
}

enum status run_process(const struct run_config *config, const struct launch *launch,
                        const struct run_options *options, const volatile int *signal_flag)
{
    enum status st = ST_OK;
    struct run_data data = {0};
    struct metrics metrics = {0};
    struct device *device = NULL;
    struct rendezvous *rendezvous = NULL;
    struct comm *comm = NULL;
    bool speaks = launch->rank == 0 && !options->quiet;
    log_set_rank(launch->rank);
    TRY_GOTO(st, out, open_rendezvous(&rendezvous, config, launch));
    TRY_GOTO(st, out, open_device(&device, config, launch));
    TRY_GOTO(st, out,
             nccl_comm_open(&comm, device, launch->rank, launch->world_size, rendezvous,
                            config->train.timeout_s * 1000));
    TRY_GOTO(st, out, run_data_load(&data, config, config->train.steps != 0));
    if (speaks)
        TRY_GOTO(st, out, metrics_open(&metrics, config));
    struct rank_run run = {config, &data, options, signal_flag, speaks ? &metrics : NULL};
    TRY_GOTO(st, out, run_rank(&run, device, comm));
out:
    if (st != ST_OK && st != ST_INTERRUPTED && rendezvous != NULL)
        rendezvous_abort(rendezvous, status_message());
    metrics_close(&metrics);
    run_data_release(&data);
    comm_close(&comm);
    rendezvous_close(&rendezvous);
    device_close(&device);
    return st;
}

#else

enum status run_process(const struct run_config *config, const struct launch *launch,
                        const struct run_options *options, const volatile int *signal_flag)
{
    (void)config;
    (void)launch;
    (void)options;
    (void)signal_flag;
    return FAIL(UNSUPPORTED, "train.device: cuda is not built in; build with CUDA=1");
}

#endif
