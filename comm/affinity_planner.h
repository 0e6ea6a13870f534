/*
 * comm/affinity_planner.h - what the files of comm/affinity.h share while a plan is made.
 *
 * affinity.c finds the CPUs that may be used, gives each rank a home, and deals; affinity_explain.c
 * then adds node, NICs and reasons.
 */
#ifndef COMM_AFFINITY_PLANNER_H
#define COMM_AFFINITY_PLANNER_H

#include "comm/affinity.h"

C_BEGIN

enum { MACHINE = -1 }; /* a home: all of it */

/* What may be used of a core. */
struct usable {
    int node, kind;
    int cpu[TOPOLOGY_THREADS], cpu_count;
};

/* What is dealt: a whole core, or one of its CPUs. */
struct piece {
    int core;  /* index into usable */
    int first; /* CPU of that core */
    int count;
    int kind;
};

struct planner {
    struct affinity_plan *plan;
    const struct topology *t;
    const struct affinity_request *request;
    struct usable *usable; /* owned, as the others */
    int *home;             /* [ranks] node whose cores a rank gets a part of; MACHINE: all */
    bool *moved;           /* [ranks] that is not the node of its GPU */
    int *node_cores, *node_cpus, *node_ranks; /* [nodes] */
    struct piece *pieces;                     /* room for all CPUs */
    int *share;                               /* [ranks] */
    int usable_count;
    bool any_gpu;
};

/** affinity_explain() - when all CPUs are dealt: cores, node, NICs and reasons of each rank. */
void affinity_explain(struct planner *p);

C_END

#endif
