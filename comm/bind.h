/*
 * comm/bind.h - keep the calling thread on some CPUs, and its fresh memory on a node near them.
 *
 * Threads that it starts afterwards inherit both; threads that are there keep what they have.
 * Memory that was touched before stays where it is. The system's own calls, so that no library is
 * in the way; on a system without them (or in a container that forbids them) they are ST_SYSTEM.
 *
 * Source: Linux manual pages sched_setaffinity(2), set_mempolicy(2).
 */
#ifndef COMM_BIND_H
#define COMM_BIND_H

#include "comm/cpuset.h"
#include "engine/base/status.h"

C_BEGIN

enum { BIND_ANY_NODE = -1 };

/** bind_get_cpus() - where this thread may run now: what a launcher, taskset or cgroup left it.
 * ST_SYSTEM, as the others. */
MUST_CHECK enum status bind_get_cpus(struct cpuset *cpus);

/** bind_set_cpus() - from now on it runs on @cpus alone. */
MUST_CHECK enum status bind_set_cpus(const struct cpuset *cpus);

/** bind_set_memory() - what it touches first comes from the node that the system calls @node, as
 * long as that has room; BIND_ANY_NODE: from the node it runs on then, which is the rule. */
MUST_CHECK enum status bind_set_memory(int node);

/** bind_get_memory() - that node, or BIND_ANY_NODE. */
MUST_CHECK enum status bind_get_memory(int *node);

C_END

#endif
