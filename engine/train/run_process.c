#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/imitate.h"
#include "comm/rendezvous.h"
#include "comm/skip.h"
#include "engine/base/log.h"
#include "engine/base/text.h"
#include "engine/train/background.h"
#include "engine/train/machine.h"
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
    struct binding binding;
    /* The data of the run, read while the device is opened; what is not begun then, later. */
    const struct run_config *config;
    struct run_data data;
    struct background loader;
};

static enum status load_data(void *context)
{
    struct process *p = context;
    return run_data_load(&p->data, p->config, p->config->train.steps != 0);
}

static enum status take_data(struct process *p)
{
    if (p->loader.body == NULL)
        return load_data(p);
    background_join(&p->loader);
    status_set_message(p->loader.message);
    return p->loader.st;
}

#ifdef TESSERA_CUDA

/* Near the GPU, before CUDA and NCCL start threads and take memory. */
static enum status bind_to_gpu(struct process *p, const struct run_config *config,
                               const struct launch *launch, int index)
{
    enum status st = ST_OK;
    struct binding_place mine, *all = NULL;
    char bus_id[32];
    TRY(device_cuda_bus_id(bus_id, index));
    binding_place_here(&mine, bus_id);
    TRY(mem_alloc(&all, sizeof *all * (size_t)launch->world_size));
    all[launch->rank] = mine;
    if (p->rendezvous != NULL)
        TRY_GOTO(st, out, rendezvous_exchange(p->rendezvous, all, &mine, sizeof mine));
    TRY_GOTO(st, out,
             binding_plan_process(&p->binding, config, all, launch->world_size, launch->rank,
                                  p->rendezvous));
    binding_apply(&p->binding);
out:
    mem_free(&all);
    return st;
}

/* NCCL only begins to connect the ranks here (comm_ready()). */
static enum status open_gpu(struct process *p, const struct run_config *config,
                            const struct launch *launch, const struct run_options *options)
{
    int index = 0, local = launch->local_size > 0 ? launch->local_size : 1;
    struct nccl_id id;
    int visible = device_cuda_count(); /* starts up the driver */
    start_times_part(options->start, "driver");
    if (launch->world_size > 1)
        TRY(launch_meet(&p->rendezvous, launch, config->train.timeout_s * 1000));
    TRY(launch_device(&index, launch, visible));
    int threads = run_threads(config, local); /* of the CPUs that there are before binding */
    TRY(bind_to_gpu(p, config, launch, index));
    TRY(nccl_id_share(&id, launch->rank, launch->world_size, p->rendezvous));
    start_times_part(options->start, "meeting");
    if (options->alone == NULL)
        background_start(&p->loader, launch->rank, load_data, p);
    TRY(device_open(&p->device, DEVICE_CUDA, config->train.precision, index, threads));
    binding_check(&p->binding, "CUDA");
    start_times_part(options->start, "context");
    return nccl_comm_open(&p->comm, p->device, launch->rank, launch->world_size, &id, p->rendezvous,
                          config->train.timeout_s * 1000, config->train.windows);
}

/* The run's one rank plays rank 0 of @ranks, whose links have the built-in rates of the card. */
static enum status play(struct process *p, const char *ranks)
{
    struct machine m;
    int64_t count = 0;
    if (!p->device->fixed_rows)
        return FAIL(UNSUPPORTED, "TESSERA_IMITATE_RANKS is for a run on a GPU");
    if (!text_to_int(&count, ranks) || count < 2 || count > COMM_MAX_WORLD_SIZE)
        return FAIL(INVALID, "TESSERA_IMITATE_RANKS: expected a number from 2 to %d, found \"%s\"",
                    COMM_MAX_WORLD_SIZE, ranks);
    machine_like_card(&m, p->device->name);
    return imitate_open(&p->comm, &(struct imitate_links){
                                      .ranks = (int)count,
                                      .call_seconds = m.call_seconds,
                                      .hop_seconds = m.near.hop_seconds,
                                      .gather_per_second = m.near.gather_per_second,
                                      .reduce_per_second = m.near.reduce_per_second,
                                      .multiprocessors = COLLECTIVE_BLOCKS,
                                  });
}

#else

static enum status open_gpu(struct process *p, const struct run_config *config,
                            const struct launch *launch, const struct run_options *options)
{
    (void)p;
    (void)options;
    (void)config;
    (void)launch;
    return FAIL(UNSUPPORTED, "train.device: cuda is not built in; build with CUDA=1");
}

static enum status play(struct process *p, const char *ranks)
{
    (void)p;
    (void)ranks;
    return FAIL(UNSUPPORTED, "TESSERA_IMITATE_RANKS is for a run on a GPU");
}

#endif

#ifdef TESSERA_MPI

static enum status open_cpu(struct process *p, const struct run_config *config,
                            const struct launch *launch)
{
    enum status st = ST_OK;
    struct binding_place mine, *all = NULL;
    struct mpi_options options = {.rank = launch->rank,
                                  .world_size = launch->world_size,
                                  .timeout_ms = config->train.timeout_s * 1000};
    TRY(mpi_comm_open(&p->comm, &options));
    binding_place_here(&mine, NULL);
    TRY(mem_alloc(&all, sizeof *all * (size_t)launch->world_size));
    TRY_GOTO(st, out, comm_exchange(p->comm, all, &mine, sizeof mine));
    /* All of the machine is divided, or the launcher has bound each rank to its own cores. */
    int sharing = binding_sharing(all, launch->world_size, launch->rank);
    int threads = run_threads(config, sharing);
    TRY_GOTO(
        st, out,
        binding_plan_process(&p->binding, config, all, launch->world_size, launch->rank, NULL));
    binding_apply(&p->binding);
    TRY_GOTO(st, out, device_open(&p->device, DEVICE_CPU, config->train.precision, 0, threads));
    binding_check(&p->binding, "BLAS");
out:
    mem_free(&all);
    return st;
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
    if (failed && p->device != NULL && p->device->lost)
        _Exit(EXIT_FAILURE); /* a thread of NCCL's is still connecting the ranks */
    rendezvous_close(&p->rendezvous);
    device_close(&p->device);
    status_set_message(cause);
}

enum status run_process(const struct run_config *config, const struct launch *launch,
                        const struct run_options *options, const int *signal_flag)
{
    enum status st = ST_OK;
    struct metrics metrics = {0};
    struct process p = {.config = config};
    bool speaks = launch->rank == 0 && !options->quiet;
    log_set_rank(launch->rank);
    TRY_GOTO(st, out,
             config->train.comm == COMM_MPI ? open_cpu(&p, config, launch)
                                            : open_gpu(&p, config, launch, options));
    if (getenv("TESSERA_IMITATE_RANKS") != NULL)
        TRY_GOTO(st, out, play(&p, getenv("TESSERA_IMITATE_RANKS")));
    if (getenv("TESSERA_SKIP_COLLECTIVES") != NULL) /* also those that are played */
        TRY_GOTO(st, out, skip_open(&p.comm));
    if (options->wrap_comm != NULL)
        TRY_GOTO(st, out, options->wrap_comm(options->context, &p.comm));
    start_times_part(options->start, "device");
    if (options->alone != NULL) {
        TRY_GOTO(st, out, comm_ready(p.comm));
        st = options->alone(options->context, p.device, p.comm);
        goto out;
    }
    TRY_GOTO(st, out, take_data(&p));
    start_times_part(options->start, "features");
    if (speaks)
        TRY_GOTO(st, out, metrics_open(&metrics, config));
    struct rank_run run = {config,    &p.data, options, signal_flag, speaks ? &metrics : NULL,
                           &p.binding};
    TRY_GOTO(st, out, run_rank(&run, p.device, p.comm));
out:
    metrics_close(&metrics);
    background_join(&p.loader);
    run_data_release(&p.data);
    end_process(&p, st);
    return st;
}
