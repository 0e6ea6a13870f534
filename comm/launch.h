/*
 * comm/launch.h - how the processes of a run are started, and who they are.
 *
 * Either `tessera` starts its own ranks (launch_spawn: fork and exec of itself, one process a GPU;
 * launch_mpiexec: by mpiexec, on CPUs), or something else has started them and says so in the
 * environment (launch_discover):
 *
 *     tessera     TESSERA_RANK, TESSERA_WORLD_SIZE, TESSERA_LOCAL_RANK, TESSERA_LOCAL_SIZE,
 *                 TESSERA_ADDRESS, TESSERA_PORT, TESSERA_TOKEN
 *     torchrun    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT (also by hand)
 *     Open MPI    OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
 *     SLURM       SLURM_PROCID, SLURM_LOCALID, SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST
 *
 * The first that is there counts (mpirun inside a SLURM job leaves both). A part of a set, or
 * numbers that contradict each other, are an error that names the variables: a run that trains on
 * fewer ranks than was meant, or waits for ranks that nobody starts, costs more than a message.
 *
 * With any of them TESSERA_ADDRESS, TESSERA_PORT, TESSERA_BIND and TESSERA_TOKEN, when set, say
 * where rank 0 listens; without TESSERA_TOKEN the token is the job's id, which is no secret.
 */
#ifndef COMM_LAUNCH_H
#define COMM_LAUNCH_H

#include <stdint.h>

#include "comm/comm.h"
#include "comm/rendezvous.h"
#include "engine/base/status.h"
#include "engine/device/device.h"

C_BEGIN

/* A rank that hears of a failure may wait for its library's abort when it gives up, for its device,
 * and for the abort again when it closes; the rest is for a slow machine. */
enum { LAUNCH_GRACE_MS = 2 * COMM_ABORT_MS + DEVICE_SETTLE_MS + 5000 };

enum launch_origin { LAUNCH_ALONE, LAUNCH_TESSERA, LAUNCH_TORCH, LAUNCH_OPENMPI, LAUNCH_SLURM };

struct launch {
    enum launch_origin origin;
    int rank, world_size;
    int local_rank;
    int local_size;    /* ranks of this machine; 0 if unknown */
    char address[256]; /* of rank 0; "" if unknown */
    int port;
    char bind[256]; /* "" if not said */
    char token[96];
    int listen_fd; /* rank 0 of launch_spawn(): listens already; else -1 */
};

/** launch_origin_name() - "torchrun", "SLURM", ... for messages. */
const char *launch_origin_name(enum launch_origin origin);

/**
 * launch_discover() - who is this process? LAUNCH_ALONE (rank 0 of 1) if nothing says otherwise.
 * @ranks: what the user asked for with --ranks; 0 if nothing. A world that others started must have
 * this size.
 *
 * Return: ST_OK; ST_INVALID, with what to change.
 */
MUST_CHECK enum status launch_discover(struct launch *l, int ranks);

/** launch_check_address() - ST_INVALID if nobody says where rank 0 is; MPI needs no address. */
MUST_CHECK enum status launch_check_address(const struct launch *l);

/**
 * launch_meet() - rendezvous_open() where @l says that the ranks meet.
 * @timeout_ms: of the meeting, and then of each exchange.
 */
MUST_CHECK enum status launch_meet(struct rendezvous **out, const struct launch *l,
                                   int64_t timeout_ms);

/**
 * launch_shares_gpus() - may several ranks have the same GPU?
 *
 * NCCL refuses it unless the user sets NCCL_MULTI_RANK_GPU_ENABLE=1, which NCCL has since 2.30. So
 * all stages can be tried, and watched, on a machine with one GPU; they gain no speed there.
 */
bool launch_shares_gpus(void);

/**
 * launch_device() - the GPU of this rank, as an index among the @visible ones.
 *
 * The local rank, but 0 where the launcher lets each task see only its own GPU; ranks beyond the
 * last GPU begin with the first again where launch_shares_gpus(). Return: ST_OK; ST_UNSUPPORTED:
 * more local ranks than GPUs.
 */
MUST_CHECK enum status launch_device(int *index, const struct launch *l, int visible);

/**
 * launch_spawn() - run this program @ranks times, with @argv, as ranks of one run on this machine.
 * @exit_code: 0 when all ranks ended with 0; else that of the rank that failed first (128 + signal
 *     if it was killed). The caller should exit with it.
 * @grace_ms: what the other ranks have, once one has failed, to end by themselves (they hear of it
 *     over their connections); then come SIGTERM and, half as long later, SIGKILL.
 *     0: LAUNCH_GRACE_MS.
 *
 * Call it before the first CUDA call and before starting threads. SIGINT, SIGTERM, SIGHUP and
 * SIGUSR1 are passed on; a second SIGINT kills. The ranks die with this process.
 *
 * Return: ST_OK when the ranks have ended, however; ST_SYSTEM, ST_COMM, ST_MEMORY: not started.
 */
MUST_CHECK enum status launch_spawn(int *exit_code, int ranks, char **argv, int64_t grace_ms);

/**
 * launch_mpiexec() - the same through Open MPI's mpiexec, for ranks that talk over comm/mpi.
 * @exit_code: mpiexec's: 0, or that of the rank that failed first; 127 if there is no mpiexec.
 *
 * The ranks share the cores of this machine, unbound. A signal reaches each of them at once, and
 * they have all the time they need to save; a second SIGINT ends them within seconds, as does the
 * failure of a rank.
 */
MUST_CHECK enum status launch_mpiexec(int *exit_code, int ranks, char **argv);

C_END

#endif
