#include "comm/launch.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/comm.h"
#include "engine/base/log.h"
#include "engine/base/text.h"

enum { PORT_FIRST = 20000, PORT_COUNT = 10000 };

/* An empty variable is one that is not set: scripts write RANK= to unset it. */
static const char *get(const char *name)
{
    const char *value = getenv(name);
    return value != NULL && value[0] != '\0' ? value : NULL;
}

static enum status get_int(int *out, const char *name, int min, int max)
{
    int64_t value = 0;
    const char *text = get(name);
    if (text == NULL)
        return FAIL(INVALID, "%s is not set", name);
    if (!text_to_int(&value, text) || value < min || value > max)
        return FAIL(INVALID, "%s=%s: expected an integer from %d to %d", name, text, min, max);
    *out = (int)value;
    return ST_OK;
}

static void put(char *out, size_t bytes, const char *text)
{
    snprintf(out, bytes, "%s", text);
}

/* The variables of one launcher. */
struct names {
    const char *rank, *world_size, *local_rank;
    const char *local_size; /* optional; NULL if there is none */
};

static bool any_set(const struct names *n)
{
    return get(n->rank) != NULL || get(n->world_size) != NULL || get(n->local_rank) != NULL;
}

static enum status read_ranks(struct launch *l, const struct names *n)
{
    const char *const all[] = {n->rank, n->world_size, n->local_rank};
    for (int i = 0; i < 3; i++)
        if (get(all[i]) == NULL)
            return FAIL(INVALID,
                        "the environment says that %s started this process, but %s is not set: set "
                        "%s, %s and %s, or none of them",
                        launch_origin_name(l->origin), all[i], all[0], all[1], all[2]);
    TRY(get_int(&l->world_size, n->world_size, 1, COMM_MAX_WORLD_SIZE));
    TRY(get_int(&l->rank, n->rank, 0, COMM_MAX_WORLD_SIZE - 1));
    TRY(get_int(&l->local_rank, n->local_rank, 0, COMM_MAX_WORLD_SIZE - 1));
    if (n->local_size != NULL && get(n->local_size) != NULL)
        TRY(get_int(&l->local_size, n->local_size, 1, COMM_MAX_WORLD_SIZE));
    if (l->rank >= l->world_size)
        return FAIL(INVALID, "%s=%d and %s=%d: ranks count from 0 and are fewer than the size",
                    n->rank, l->rank, n->world_size, l->world_size);
    if (l->local_rank > l->rank)
        return FAIL(INVALID,
                    "%s=%d is above %s=%d: the local rank counts the ranks of this machine only",
                    n->local_rank, l->local_rank, n->rank, l->rank);
    if (l->local_size > l->world_size || (l->local_size > 0 && l->local_rank >= l->local_size))
        return FAIL(INVALID, "%s=%d does not agree with %s=%d and %s=%d", n->local_size,
                    l->local_size, n->local_rank, l->local_rank, n->world_size, l->world_size);
    return ST_OK;
}

/* ---- the launchers -------------------------------------------------------------------------- */

static enum status discover_tessera(struct launch *l, const struct names *n)
{
    TRY(read_ranks(l, n));
    if (l->rank == 0 && get("TESSERA_LISTEN_FD") != NULL)
        TRY(get_int(&l->listen_fd, "TESSERA_LISTEN_FD", 0, 1 << 20));
    return ST_OK;
}

static enum status discover_torch(struct launch *l, const struct names *n)
{
    TRY(read_ranks(l, n));
    if (l->world_size == 1)
        return ST_OK;
    if (get("MASTER_ADDR") == NULL || get("MASTER_PORT") == NULL)
        return FAIL(INVALID,
                    "%s=%d, but %s is not set: set MASTER_ADDR to the machine of rank 0 "
                    "and MASTER_PORT to a free port there",
                    n->world_size, l->world_size,
                    get("MASTER_ADDR") == NULL ? "MASTER_ADDR" : "MASTER_PORT");
    TRY(get_int(&l->port, "MASTER_PORT", 1, 65534));
    /* torchrun's agent keeps a store of its own at MASTER_PORT while the ranks run. */
    const char *agent = get("TORCHELASTIC_USE_AGENT_STORE");
    if (agent != NULL && strcmp(agent, "True") == 0)
        l->port++;
    const char *id = get("TORCHELASTIC_RUN_ID");
    snprintf(l->token, sizeof l->token, "torchrun-%.64s", id != NULL ? id : "");
    return ST_OK;
}

/* FNV-1a, to spread job names over ports. */
static int port_of_text(const char *text)
{
    uint32_t hash = 2166136261u;
    for (; *text != '\0'; text++)
        hash = (hash ^ (unsigned char)*text) * 16777619u;
    return PORT_FIRST + (int)(hash % PORT_COUNT);
}

static enum status discover_openmpi(struct launch *l, const struct names *n)
{
    TRY(read_ranks(l, n));
    const char *job = get("PMIX_NAMESPACE");
    if (job == NULL)
        job = get("OMPI_MCA_ess_base_jobid");
    if (l->world_size > 1 && l->world_size != l->local_size && get("MASTER_ADDR") == NULL &&
        get("TESSERA_ADDRESS") == NULL)
        l->address[0] = '\0';
    l->port = port_of_text(job != NULL ? job : "openmpi");
    snprintf(l->token, sizeof l->token, "openmpi-%.64s", job != NULL ? job : "");
    return ST_OK;
}

/* "rack[1-2,7]n[03-04],other" -> "rack1n03": each bracket's first number. */
static bool first_host(char *out, size_t bytes, const char *list)
{
    size_t used = 0;
    for (const char *p = list; *p != '\0' && *p != ','; p++) {
        if (*p == '[') {
            for (p++; *p != '\0' && *p != ']' && *p != '-' && *p != ','; p++)
                if (used + 1 < bytes)
                    out[used++] = *p;
            p += strcspn(p, "]");
            if (*p == '\0')
                return false;
        } else if (used + 1 < bytes)
            out[used++] = *p;
    }
    out[used] = '\0';
    return used > 0 && used + 1 < bytes;
}

/* "4(x2),3": 4 tasks on nodes 0 and 1, 3 on node 2. 0 if it does not say. */
static int tasks_of_node(const char *list, int node)
{
    while (list != NULL && *list != '\0') {
        char *end = NULL;
        long tasks = strtol(list, &end, 10), repeat = 1;
        if (end == list || tasks < 1 || tasks > COMM_MAX_WORLD_SIZE)
            return 0;
        if (strncmp(end, "(x", 2) == 0)
            repeat = strtol(end + 2, &end, 10);
        if (node < repeat)
            return (int)tasks;
        node -= (int)repeat;
        list = strchr(end, ',');
        list = list != NULL ? list + 1 : NULL;
    }
    return 0;
}

static enum status discover_slurm(struct launch *l, const struct names *n)
{
    TRY(read_ranks(l, n));
    const char *job = get("SLURM_JOB_ID"), *step = get("SLURM_STEP_ID");
    int node = 0;
    if (get("SLURM_NODEID") != NULL)
        TRY(get_int(&node, "SLURM_NODEID", 0, 1 << 20));
    l->local_size = tasks_of_node(get("SLURM_STEP_TASKS_PER_NODE"), node);
    if (l->local_size <= l->local_rank)
        l->local_size = 0;
    const char *hosts = get("SLURM_STEP_NODELIST");
    if (hosts == NULL)
        hosts = get("SLURM_JOB_NODELIST");
    if (hosts == NULL)
        hosts = get("SLURM_NODELIST");
    if (hosts != NULL && !first_host(l->address, sizeof l->address, hosts))
        return FAIL(INVALID,
                    "cannot read the first machine of SLURM_STEP_NODELIST=%s: set "
                    "TESSERA_ADDRESS to that of rank 0",
                    hosts);
    if (l->world_size > 1 && hosts == NULL && get("MASTER_ADDR") == NULL &&
        get("TESSERA_ADDRESS") == NULL)
        return FAIL(INVALID,
                    "SLURM started %d tasks, but SLURM_STEP_NODELIST is not set: set "
                    "TESSERA_ADDRESS to the machine of task 0",
                    l->world_size);
    snprintf(l->token, sizeof l->token, "slurm-%.32s.%.16s", job != NULL ? job : "", step);
    l->port = port_of_text(l->token);
    return ST_OK;
}

/* srun gives its tasks a step. A batch script and the shell of salloc also have SLURM_PROCID, but
 * are one process, and are no step of srun: no step id, or one of SLURM's reserved large ones. */
static bool is_srun_task(void)
{
    int64_t step = 0;
    const char *text = get("SLURM_STEP_ID");
    return text != NULL && text_to_int(&step, text) && step >= 0 && step < 0xfffffff0;
}

/* A job of several tasks whose only process is this one: the others were never started. */
static enum status check_forgotten_srun(int ranks)
{
    int64_t tasks = 0;
    const char *text = get("SLURM_NTASKS");
    if (ranks == 0 && get("SLURM_PROCID") != NULL && text != NULL && text_to_int(&tasks, text) &&
        tasks > 1)
        return FAIL(INVALID,
                    "this is one process of a SLURM job of %lld tasks: start it with srun, or say "
                    "with --ranks how many ranks it shall start on this machine",
                    (long long)tasks);
    return ST_OK;
}

/* ---- the whole ------------------------------------------------------------------------------ */

static const struct names tessera_names = {"TESSERA_RANK", "TESSERA_WORLD_SIZE",
                                           "TESSERA_LOCAL_RANK", "TESSERA_LOCAL_SIZE"};
static const struct names torch_names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
static const struct names openmpi_names = {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                                           "OMPI_COMM_WORLD_LOCAL_RANK",
                                           "OMPI_COMM_WORLD_LOCAL_SIZE"};
static const struct names slurm_names = {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
                                         NULL};
/* Older SLURM has no SLURM_STEP_NUM_TASKS. */
static const struct names slurm_old_names = {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", NULL};

const char *launch_origin_name(enum launch_origin origin)
{
    static const char *const names[] = {"nobody", "tessera", "torchrun", "Open MPI", "SLURM"};
    return names[origin];
}

static enum status discover(struct launch *l, int ranks)
{
    if (any_set(&tessera_names)) {
        l->origin = LAUNCH_TESSERA;
        return discover_tessera(l, &tessera_names);
    }
    if (any_set(&torch_names)) {
        l->origin = LAUNCH_TORCH;
        return discover_torch(l, &torch_names);
    }
    if (any_set(&openmpi_names)) {
        l->origin = LAUNCH_OPENMPI;
        return discover_openmpi(l, &openmpi_names);
    }
    if (is_srun_task()) {
        l->origin = LAUNCH_SLURM;
        return discover_slurm(l, get("SLURM_STEP_NUM_TASKS") ? &slurm_names : &slurm_old_names);
    }
    return check_forgotten_srun(ranks);
}

/* Where the user says more than the launcher, or otherwise. */
static enum status apply_overrides(struct launch *l)
{
    const char *address = get("TESSERA_ADDRESS");
    /* torchrun's MASTER_PORT has been read; job scripts for SLURM and MPI set it for the ranks. */
    if (address == NULL)
        address = get("MASTER_ADDR");
    if (l->origin != LAUNCH_TORCH && l->origin != LAUNCH_TESSERA && get("MASTER_PORT") != NULL)
        TRY(get_int(&l->port, "MASTER_PORT", 1, 65535));
    if (get("TESSERA_PORT") != NULL)
        TRY(get_int(&l->port, "TESSERA_PORT", 1, 65535));
    if (address != NULL) {
        if (strlen(address) >= sizeof l->address)
            return FAIL(INVALID, "the address of rank 0 has more than %zu characters",
                        sizeof l->address - 1);
        put(l->address, sizeof l->address, address);
    }
    const char *token = get("TESSERA_TOKEN"), *bind = get("TESSERA_BIND");
    if (token != NULL) {
        if (strlen(token) >= sizeof l->token)
            return FAIL(INVALID, "TESSERA_TOKEN has more than %zu characters", sizeof l->token - 1);
        put(l->token, sizeof l->token, token);
    }
    put(l->bind, sizeof l->bind, bind != NULL ? bind : "");
    return ST_OK;
}

enum status launch_discover(struct launch *l, int ranks)
{
    *l = (struct launch){.world_size = 1, .local_size = 0, .listen_fd = -1};
    put(l->address, sizeof l->address, "127.0.0.1");
    TRY(discover(l, ranks));
    if (l->origin == LAUNCH_ALONE) {
        l->local_size = 1;
        return ST_OK;
    }
    TRY(apply_overrides(l));
    if (l->world_size > 1 && l->port == 0)
        return FAIL(INVALID, "%d ranks, but no port to meet at: set TESSERA_PORT", l->world_size);
    if (ranks > 0 && ranks != l->world_size)
        return FAIL(INVALID,
                    "%d ranks are asked for, but %s started %d: give the same number to both, or "
                    "leave --ranks out",
                    ranks, launch_origin_name(l->origin), l->world_size);
    return ST_OK;
}

enum status launch_check_address(const struct launch *l)
{
    if (l->address[0] == '\0')
        return FAIL(INVALID,
                    "%s started ranks on several machines: say where rank 0 is, with mpirun -x "
                    "TESSERA_ADDRESS=NAME",
                    launch_origin_name(l->origin));
    return ST_OK;
}

enum status launch_meet(struct rendezvous **out, const struct launch *l, int64_t timeout_ms)
{
    struct rendezvous_options options = {
        .rank = l->rank,
        .world_size = l->world_size,
        .address = l->address,
        .port = l->port,
        .bind = l->bind[0] != '\0' ? l->bind : NULL,
        .token = l->token,
        .listen_fd = l->listen_fd,
        .timeout_ms = timeout_ms,
    };
    return rendezvous_open(out, &options);
}

bool launch_shares_gpus(void)
{
    const char *value = get("NCCL_MULTI_RANK_GPU_ENABLE");
    return value != NULL && strcmp(value, "1") == 0;
}

enum status launch_device(int *index, const struct launch *l, int visible)
{
    *index = l->local_rank;
    if (visible < 1)
        return FAIL(UNSUPPORTED,
                    "rank %d sees no GPU (CUDA_VISIBLE_DEVICES, or the --gpus of the "
                    "job)",
                    l->rank);
    /* Our own ranks all see the same GPUs; a batch system may bind one to each task. */
    if (visible == 1 && l->origin != LAUNCH_TESSERA) {
        *index = 0;
        return ST_OK;
    }
    if (l->local_rank >= visible && !launch_shares_gpus())
        return FAIL(UNSUPPORTED,
                    "local rank %d has no GPU: %d visible to it; start at most one rank a GPU, or "
                    "let ranks share them with NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or later)",
                    l->local_rank, visible);
    *index = l->local_rank % visible;
    if (l->local_size > 0 && l->local_size < visible && l->local_rank == 0 &&
        l->origin != LAUNCH_TESSERA)
        log_warn("launch", "%s started %d ranks on this machine, which has %d GPUs: %d stay idle",
                 launch_origin_name(l->origin), l->local_size, visible, visible - l->local_size);
    return ST_OK;
}
