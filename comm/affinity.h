/*
 * comm/affinity.h - which cores, memory and NIC each rank of a machine should have.
 *
 * The ranks of a GPU's node divide its cores, ranks without GPUs divide all that there are:
 *
 *     2 nodes of 8 cores            rank 0   GPU on node 0   cores 0-7     memory of node 0
 *     GPUs on nodes 0, 1, 1         rank 1   GPU on node 1   cores 8-11    memory of node 1
 *                                   rank 2   GPU on node 1   cores 12-15   memory of node 1
 *
 * Shares are disjoint and differ by at most one core on a node; of cores of several speeds every
 * rank gets its part of each. Whole cores go first: only where there are fewer cores than ranks (or
 * a rank's threads would outnumber its CPUs) are a core's hardware threads divided. A node without
 * enough cores passes ranks on to the one that has most to give. With fewer hardware threads than
 * ranks several ranks share one, evenly. Each rank has the nearest NICs: those that are equally
 * near to several ranks are dealt to them in turn.
 *
 * Pure: the same inputs give the same plan on every rank.
 */
#ifndef COMM_AFFINITY_H
#define COMM_AFFINITY_H

#include <stdbool.h>

#include "comm/cpuset.h"
#include "comm/topology.h"
#include "engine/base/status.h"

C_BEGIN

enum { AFFINITY_NICS = 8, AFFINITY_WHY_BYTES = 320 };

struct affinity_request {
    int ranks;                    /* of this machine, >= 1 */
    const int *gpus;              /* [ranks] indices into topology->gpus, -1: unknown; NULL: none */
    const struct cpuset *allowed; /* CPUs that may be used; NULL: all */
};

struct affinity_rank {
    int gpu;            /* index; -1: none, or unknown */
    struct cpuset cpus; /* never empty */
    int cores;          /* that these CPUs belong to */
    int node;           /* index of the node that holds them all; -1: several */
    int nics[AFFINITY_NICS];
    int nic_count;
    int interface; /* index of the nearest NIC with a network interface that is up; -1: none */
    char why[AFFINITY_WHY_BYTES]; /* sentences */
};

enum affinity_kind {
    AFFINITY_CORES,   /* there are cores enough for all ranks */
    AFFINITY_THREADS, /* only hardware threads */
    AFFINITY_SHARED   /* not even these: CPUs are shared */
};

struct affinity_plan {
    enum affinity_kind kind;
    int rank_count, cores, cpus; /* of the machine, that may be used */
    struct affinity_rank *ranks; /* owned */
};

/**
 * affinity_plan_build() - @plan becomes owned; affinity_plan_release() it.
 *
 * Return: ST_OK; ST_INVALID: none of the machine's CPUs is allowed; ST_MEMORY.
 */
MUST_CHECK enum status affinity_plan_build(struct affinity_plan *plan, const struct topology *t,
                                           const struct affinity_request *request);
void affinity_plan_release(struct affinity_plan *plan);

/**
 * affinity_format() - "cores 0-3 of node 0", "core 2 of node 0", "cpus 0,2 of 2 nodes".
 * "cores", where the CPUs are whole cores without hardware threads beside them, "cpus" otherwise.
 */
void affinity_format(const struct topology *t, const struct affinity_rank *r, char *out,
                     size_t bytes);

C_END

#endif
