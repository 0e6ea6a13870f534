/*
 * comm/topology_reader.h - a machine while it is read: topology.c and topology_picture.c.
 *
 * Only these two include this. Objects are hwloc's, by their tag, so that its header stays out.
 */
#ifndef COMM_TOPOLOGY_READER_H
#define COMM_TOPOLOGY_READER_H

#include "comm/topology.h"

C_BEGIN

enum { NODES, CORES, GPUS, NICS, OBJECTS }; /* of topology.capacity */

struct hwloc_obj;
struct hwloc_topology;
struct hwloc_bitmap_s;

struct topology_reader {
    struct topology *t;           /* borrowed; what is read so far */
    struct hwloc_topology *hwloc; /* borrowed */
    bool this_system;             /* and not a file's or a made-up one */
    struct hwloc_obj **shown;     /* owned; hwloc's object of each entry of t->objects */
    struct hwloc_obj **gpu;       /* owned; of each entry of t->gpus */
    struct hwloc_obj **nic;       /* owned; of each entry of t->nics */
    size_t shown_capacity, gpu_capacity, nic_capacity;
};

/** reader_cores_in() - how many cores @obj holds; CPUs, where no cores are known. */
int reader_cores_in(const struct topology_reader *r, struct hwloc_obj *obj);

/** reader_is_above() - is @below in the tree of @obj, or @obj itself? */
bool reader_is_above(struct hwloc_obj *obj, struct hwloc_obj *below);

struct cpuset reader_cpuset(const struct hwloc_bitmap_s *bitmap);

/** reader_bus_id() - "0000:3b:00.0" of a PCI device. */
void reader_bus_id(char out[16], struct hwloc_obj *pci);

bool reader_is_gpu(struct hwloc_obj *pci);

/** reader_info() - what hwloc noted about @obj under @name, or "". */
const char *reader_info(struct hwloc_obj *obj, const char *name);

/** reader_size_text() - "64 GiB" of bytes. */
void reader_size_text(char *out, size_t bytes, uint64_t size);

/** reader_draw() - fill t->objects, when the rest has been read. ST_MEMORY. */
MUST_CHECK enum status reader_draw(struct topology_reader *r);

C_END

#endif
