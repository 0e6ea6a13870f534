/*
 * engine/train/run.h - the ranks of a run.
 *
 *     CPU    all ranks are threads of this process, over comm/local
 *     MPI    a process a rank on CPUs, over comm/mpi: started by mpiexec or srun
 *     CUDA   a process a GPU, over comm/nccl: started by this program, torchrun, mpirun or SLURM
 */
#ifndef ENGINE_TRAIN_RUN_H
#define ENGINE_TRAIN_RUN_H

#include "comm/launch.h"
#include "engine/train/binding.h"
#include "engine/train/trainer.h"

C_BEGIN

struct run_options {
    struct executor_options executor; /* its on_instr gets `context` */
    bool quiet;                       /* no banner, no output folder */
    struct trace_request trace;       /* path NULL: none */
    int64_t profile_steps;            /* 0: none; rank 0 prints and writes what it found */
    struct start_times *start;        /* borrowed; rank 0 adds to it; NULL: nobody asks */
    /* Put something around a rank's communicator, as comm/fault.h does; for tests. */
    enum status (*wrap_comm)(void *context, struct comm **comm);
    /* Called on each rank's thread when its weights are there and no program has run. */
    void (*at_start)(void *context, struct trainer *t);
    /* What each rank does on its device and communicator instead of a run: no data is read, nothing
     * is set up or written. NULL: a run. */
    enum status (*alone)(void *context, struct device *device, struct comm *comm);
    /* What each rank does on its thread instead of training; NULL: it trains. */
    enum status (*body)(void *context, struct trainer *t);
    /* Called on each rank's thread when its training is over and its state still there. */
    void (*at_end)(void *context, struct trainer *t);
    void *context;
};

/**
 * run_local() - train with config->train.ranks ranks.
 * @signal_flag: number of a caught signal, 0 while there is none; may be NULL.
 *
 * Return: ST_OK; the first cause among the ranks, with its message.
 */
MUST_CHECK enum status run_local(const struct run_config *config, const struct run_data *data,
                                 const struct run_options *options, const int *signal_flag);

/**
 * run_process() - this process is one rank: with train.comm mpi on CPUs, else on a GPU.
 * @launch: who it is (comm/launch.h). The data is loaded here, once a process.
 *
 * Return: ST_OK; ST_UNSUPPORTED without CUDA or MPI; errors of the parts. With MPI a failure ends
 * the process here (comm/mpi.h).
 */
MUST_CHECK enum status run_process(const struct run_config *config, const struct launch *launch,
                                   const struct run_options *options, const int *signal_flag);

/**
 * run_launch() - run with the ranks that the configuration and the environment ask for: threads
 * here, processes that this one starts, or those of mpiexec, srun or torchrun, of which this is
 * one.
 * @ranks_asked: they must be as many; 0: as many as somebody else has started.
 * @argv: main's, for processes that are started; then this one ends here, with their exit code.
 *
 * Catches signals (engine/train/interrupt.h). Return: as run_local() and run_process().
 */
MUST_CHECK enum status run_launch(struct run_config *config, const struct run_options *options,
                                  int ranks_asked, char **argv);

/* One rank's run, whatever thread or process it is in. */
struct rank_run {
    const struct run_config *config;
    const struct run_data *data;
    const struct run_options *options;
    const int *signal_flag;
    struct metrics *metrics; /* rank 0's, or NULL */
    struct binding *binding; /* the thread's, applied */
};

/** run_rank() - set up, banner, training, summary. A failure aborts @comm. */
MUST_CHECK enum status run_rank(const struct rank_run *r, struct device *device, struct comm *comm);

/** run_device_kind() - what DEVICE_AUTO means here: CUDA if it is built in and there is a GPU, and
 * train.comm is not one for CPUs. @in_child: a child asks, so that this process makes no CUDA call
 * before it starts others; a rank saves the time to start CUDA twice. */
enum device_kind run_device_kind(const struct run_config *config, bool in_child);

/** run_threads() - CPU threads a rank gets: train.threads, or its share of the cores. */
int run_threads(const struct run_config *config, int local_ranks);

C_END

#endif
