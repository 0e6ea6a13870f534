/*
 * engine/train/binding.h - ranks bound to their part of the machine (train.bind).
 *
 * Who runs where is comm/affinity.h's plan, made from the CPUs that this process may use now: what
 * a launcher, a cgroup or taskset has left it. Processes of one machine that may use the same CPUs
 * divide them; those that a launcher has given CPUs of their own each plan within them.
 *
 * A rank binds its thread before it starts others, which inherit the binding: the workers of its
 * device, the writers of checkpoints and logs, NCCL's threads. (OpenBLAS makes threads of its own
 * when it is loaded; they sleep, for the engine asks it for one.) Libraries may change the binding
 * of the thread that starts them, so binding_check() looks behind each and binds again.
 *
 * Binding is advice. Whatever fails leaves the rank unbound, and is one warning of the run. With
 * fewer cores than ranks nobody is bound. The number of a rank's threads, and so every bit of its
 * results, is the same bound and unbound.
 */
#ifndef ENGINE_TRAIN_BINDING_H
#define ENGINE_TRAIN_BINDING_H

#include <stdbool.h>

#include "comm/cpuset.h"
#include "engine/base/config.h"
#include "engine/base/status.h"

C_BEGIN

struct comm;
struct rendezvous;

struct binding { /* of one rank; plain memory */
    bool on;
    struct cpuset cpus;
    int node;          /* where its memory comes from; BIND_ANY_NODE */
    int nodes;         /* of memory on its machine */
    char where[192];   /* "cores 0-7 of node 0", "on 2 cores, not bound"; for people */
    char network[192]; /* what NCCL was told; "": nothing */
    char problem[256]; /* why it is not bound although it should be; "": all is well */
    char restored[64]; /* the libraries behind which it was bound again; "": none */
};

/** binding_plan_threads() - for @ranks ranks that will be threads of this process: list[ranks].
 * Return: ST_OK; ST_MEMORY. */
MUST_CHECK enum status binding_plan_threads(struct binding *list, const struct run_config *config,
                                            int ranks);

/** binding_apply() - bind the calling thread; the binding says how it went. */
void binding_apply(struct binding *b);

/** binding_check() - behind the start of a library: is the binding still there? Bind again if not.
 * @library: its name, for people. NULL @b is fine. */
void binding_check(struct binding *b, const char *library);

/* Where a process stands, for ranks that are processes. */
struct binding_place {
    char host[128];
    struct cpuset cpus;
    char bus_id[32]; /* of its GPU; "": none */
};

/** binding_place_here() - this process now; NULL @bus_id: no GPU. */
void binding_place_here(struct binding_place *place, const char *bus_id);

/** binding_sharing() - ranks on @rank's machine that may use the same CPUs, itself too. */
int binding_sharing(const struct binding_place *all, int world_size, int rank);

/**
 * binding_plan_process() - for this process, one rank of a run with processes.
 * @all: the places of all ranks.
 * @rv: on GPUs; what NCCL is told about NICs is agreed on over it. NULL: nothing is told.
 *
 * Return: ST_OK; errors of the exchange and ST_MEMORY.
 */
MUST_CHECK enum status binding_plan_process(struct binding *b, const struct run_config *config,
                                            const struct binding_place *all, int world_size,
                                            int rank, struct rendezvous *rv);

/**
 * binding_report() - all ranks call it: rank 0 says what was restored, and warns once if a rank is
 * not bound that should be.
 * @dir: rank 0 leaves the machine and who is where there (topology_json.h); NULL: it does not.
 *
 * Return: ST_OK; errors of the exchange and of the file.
 */
MUST_CHECK enum status binding_report(const struct binding *b, struct comm *comm, const char *dir);

C_END

#endif
