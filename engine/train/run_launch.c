#include <inttypes.h>
#include <stdlib.h>

#include "engine/base/log.h"
#include "engine/base/out.h"
#include "engine/train/interrupt.h"
#include "engine/train/run.h"

static enum status print_resolved(const struct run_config *config)
{
    char *text = NULL;
    size_t bytes = 0;
    TRY(config_write(config, &text, &bytes));
    out("%s", text);
    mem_free(&text);
    return out_flush();
}

static enum status run_in_threads(const struct run_config *config,
                                  const struct run_options *options)
{
    enum status st = ST_OK;
    struct run_data data = {0};
    if (!options->quiet)
        TRY(print_resolved(config));
    TRY(interrupt_install());
    if (options->alone == NULL)
        TRY_GOTO(st, out, run_data_load(&data, config, config->train.steps != 0));
    start_times_part(options->start, "features");
    TRY_GOTO(st, out, run_local(config, &data, options, interrupt_flag()));
    if (!options->quiet)
        log_info("run", "output in %s", config->output.dir);
out:
    run_data_release(&data);
    return st;
}

/* This process is a rank of a world that somebody has started. */
static enum status run_as_rank(struct run_config *config, const struct launch *launch,
                               const struct run_options *options)
{
    bool speaks = launch->rank == 0 && !options->quiet;
    config->train.ranks = launch->world_size;
    if (speaks)
        TRY(print_resolved(config));
    TRY(interrupt_install());
    TRY(run_process(config, launch, options, interrupt_flag()));
    if (speaks)
        log_info("run", "output in %s", config->output.dir);
    return ST_OK;
}

/* One process a GPU: this one, or as many as there are ranks, each of which comes here again. */
static enum status run_on_gpus(struct run_config *config, const struct launch *launch,
                               const struct run_options *options, char **argv)
{
    if (config->train.comm == COMM_LOCAL || config->train.comm == COMM_MPI)
        return FAIL(INVALID, "train.comm %s is for ranks on CPUs; train.device cuda needs nccl",
                    config->train.comm == COMM_MPI ? "mpi" : "local");
    if (launch->origin == LAUNCH_ALONE && config->train.ranks > 1) {
        int exit_code = 0;
        TRY(launch_spawn(&exit_code, (int)config->train.ranks, argv, 0));
        exit(exit_code); /* the ranks have said why */
    }
    TRY(launch_check_address(launch));
    return run_as_rank(config, launch, options);
}

/* MPI's launchers start processes that can speak MPI with each other. */
static bool is_mpi_launch(const struct launch *launch)
{
    return launch->world_size > 1 &&
           (launch->origin == LAUNCH_OPENMPI || launch->origin == LAUNCH_SLURM);
}

static enum status run_on_cpus(struct run_config *config, const struct launch *launch,
                               const struct run_options *options, char **argv)
{
#ifdef TESSERA_MPI
    if (config->train.comm == COMM_AUTO && is_mpi_launch(launch))
        config->train.comm = COMM_MPI;
#else
    if (config->train.comm == COMM_MPI)
        return FAIL(UNSUPPORTED, "train.comm mpi is not built in; install Open MPI (make deps "
                                 "MPI=1) and build with MPI=1");
#endif
    if (config->train.comm == COMM_NCCL)
        return FAIL(UNSUPPORTED, "train.comm nccl needs GPUs: there is none here, or this program "
                                 "was built without CUDA");
    if (config->train.comm == COMM_MPI && launch->origin == LAUNCH_ALONE &&
        config->train.ranks > 1) {
        int exit_code = 0;
        TRY(launch_mpiexec(&exit_code, (int)config->train.ranks, argv));
        exit(exit_code); /* the ranks have said why */
    }
    if (config->train.comm == COMM_MPI && launch->world_size == 1 && config->train.ranks > 1)
        return FAIL(INVALID, "train.ranks is %" PRId64 ", but %s started one process",
                    config->train.ranks, launch_origin_name(launch->origin));
    if (config->train.comm == COMM_MPI && launch->world_size > 1 && !is_mpi_launch(launch))
        return FAIL(INVALID, "train.comm mpi: %s started the ranks; use mpiexec or srun",
                    launch_origin_name(launch->origin));
    if (config->train.comm == COMM_MPI)
        return run_as_rank(config, launch, options);
    if (launch->world_size > 1)
        return FAIL(UNSUPPORTED,
                    "%s started %d processes, but here the ranks are threads of one (%s): start "
                    "one process and give --ranks %d",
                    launch_origin_name(launch->origin), launch->world_size,
                    config->train.comm == COMM_LOCAL ? "train.comm local"
                    : is_mpi_launch(launch)          ? "built without MPI"
                                                     : "CPU ranks without MPI",
                    launch->world_size);
    return run_in_threads(config, options);
}

enum status run_launch(struct run_config *config, const struct run_options *options,
                       int ranks_asked, char **argv)
{
    struct launch launch;
    TRY(launch_discover(&launch, ranks_asked));
    if (run_device_kind(config, launch.world_size == 1) == DEVICE_CUDA)
        return run_on_gpus(config, &launch, options, argv);
    return run_on_cpus(config, &launch, options, argv);
}
