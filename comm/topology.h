/*
 * comm/topology.h - what a machine is made of: packages, memory, cores, GPUs, NICs.
 *
 *     machine
 *       package 0                                 nodes   memory, and the CPUs that are near it
 *         node 0, 64 GiB                          cores   with their hardware threads (CPUs)
 *         L3 20 MiB: 8 cores, cpus 0-7,16-23
 *         host bridge                             gpus    and nics, with the CPUs near them and how
 *           GPU 0000:03:00.0                              near they are to each other
 *       package 1 ...
 *
 * Read from this machine, from a file that `lstopo FILE.xml` wrote, or from hwloc's short texts
 * ("package:2 core:4 pu:2"), then plain arrays: hwloc stays in topology*.c. CPUs that this process
 * may never use (cgroups, cpusets) are not there. Reading makes no CUDA context.
 *
 * Source: hwloc (open-mpi.org/projects/hwloc), its reference of objects, I/O devices and XML.
 */
#ifndef COMM_TOPOLOGY_H
#define COMM_TOPOLOGY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/cpuset.h"
#include "engine/base/status.h"

C_BEGIN

enum { TOPOLOGY_THREADS = 8, TOPOLOGY_TEXT_BYTES = 112, TOPOLOGY_NAME_BYTES = 48 };

struct topology_node {
    int number; /* the system's */
    int package;
    int64_t memory_bytes;
    struct cpuset cpus; /* may be empty: memory of a device, or all its CPUs are disallowed */
};

struct topology_core {
    int node;    /* index into nodes: the smallest one that holds it */
    int package; /* -1: unknown */
    int kind;    /* cores of one speed have one number; 0 is the slowest */
    int cpu[TOPOLOGY_THREADS];
    int cpu_count; /* hardware threads; a core with more than fit is several here */
};

struct topology_gpu {
    char bus_id[16]; /* "0000:3b:00.0" */
    char name[TOPOLOGY_NAME_BYTES];
    bool cuda;          /* NVIDIA's */
    struct cpuset near; /* the CPUs of the part of the machine that it hangs on */
    double link_GBs;    /* of its PCIe link; 0: unknown */
};

struct topology_nic {
    char bus_id[16];
    char fabric[32];    /* verbs device, "mlx5_0"; "": none */
    char interface[32]; /* "eth0", "ib0"; "": none */
    bool up;            /* as far as is known: an active port, an interface that is not down */
    struct cpuset near;
    double link_GBs;
};

/* What two devices have in common, nearest first. */
enum topology_distance {
    TOPOLOGY_SWITCH,  /* a PCIe switch (or they are one card) */
    TOPOLOGY_BRIDGE,  /* a host bridge */
    TOPOLOGY_NODE,    /* a NUMA node */
    TOPOLOGY_PACKAGE, /* a package */
    TOPOLOGY_MACHINE
};

/* A line of the picture. */
enum topology_kind {
    TOPOLOGY_IS_MACHINE,
    TOPOLOGY_IS_PACKAGE,
    TOPOLOGY_IS_GROUP,
    TOPOLOGY_IS_NODE,
    TOPOLOGY_IS_CACHE,
    TOPOLOGY_IS_BRIDGE,
    TOPOLOGY_IS_GPU,
    TOPOLOGY_IS_NIC
};

struct topology_object {
    enum topology_kind kind;
    int parent; /* index; -1: the machine */
    int depth;
    char text[TOPOLOGY_TEXT_BYTES];
};

struct topology { /* zero-initialise; all arrays are owned */
    struct topology_node *nodes;
    struct topology_core *cores; /* of one package, node and cache one after the other */
    struct topology_gpu *gpus;   /* by bus id */
    struct topology_nic *nics;
    struct topology_object *objects; /* the picture, from top to bottom */
    int node_count, core_count, gpu_count, nic_count, object_count;
    int package_count, kind_count;
    unsigned char *distances;            /* [gpu_count * nic_count], enum topology_distance */
    char core_text[TOPOLOGY_TEXT_BYTES]; /* what each core has: "2 hardware threads, L2 1 MiB" */
    size_t capacity[5];
};

/** topology_read() - this machine. ST_SYSTEM, with hwloc's reason; ST_MEMORY. */
MUST_CHECK enum status topology_read(struct topology *t);

/**
 * topology_read_xml() - another machine, from a file of hwloc's, plain or gzip.
 *
 * Formats 1 and 2 and, whatever the library, 3. Return: ST_OK; ST_IO; ST_CORRUPT: not such a file,
 * cut short, or newer than that; ST_MEMORY.
 */
MUST_CHECK enum status topology_read_xml(struct topology *t, const char *path);

/** topology_read_synthetic() - a made-up machine, in hwloc's short texts. ST_INVALID; ST_MEMORY. */
MUST_CHECK enum status topology_read_synthetic(struct topology *t, const char *text);

void topology_release(struct topology *t);

/** topology_distance() - between a GPU and a NIC, by their indices. */
enum topology_distance topology_distance(const struct topology *t, int gpu, int nic);

/** topology_find_gpu() - the index of the GPU at @bus_id, in any case, with or without a long
 * domain; -1: there is none. */
int topology_find_gpu(const struct topology *t, const char *bus_id);

/** topology_library() - "hwloc, API 2.8", of the library that is loaded. @out: 32 bytes. */
void topology_library(char out[32]);

C_END

#endif
