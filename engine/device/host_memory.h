/*
 * engine/device/host_memory.h - how much memory this process may still take, and taking it.
 *
 * What is free is the least of what the system has (MemAvailable of /proc/meminfo) and what each
 * memory limit on the way up from the process's control group leaves: limit - usage, where pages
 * of files count as free, for they go before anybody is killed. Both versions of control groups.
 * Linux, proc(5), Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
 */
#ifndef ENGINE_DEVICE_HOST_MEMORY_H
#define ENGINE_DEVICE_HOST_MEMORY_H

#include <stddef.h>

#include "engine/base/status.h"

C_BEGIN

struct workers;

/**
 * host_memory_free() - bytes that are free for this process and its like.
 * @root: "" for this system; tests name a folder with proc/ and sys/ in it.
 *
 * Return: ST_OK; ST_SYSTEM if /proc/meminfo does not say. What is not there of control groups is no
 * limit.
 */
MUST_CHECK enum status host_memory_free(size_t *bytes, const char *root);

/**
 * host_memory_populate() - have the system give pages to all of this memory now, by all threads.
 * @memory: @bytes that can be written; what is in it stays.
 * @workers: may be NULL.
 *
 * Memory that was only asked for has no pages: each comes when it is first touched, at 0.3 us (and
 * twice that in a virtual machine) for 4 KiB, and where there is none left a process is killed in
 * the midst of its work. Huge pages are asked for, which come four times as fast and save the TLB;
 * but where they come slowly - under a hypervisor that takes back free memory, a huge page is of
 * memory that it has to find first, small ones are of scraps that it has left - small ones from
 * there on.
 *
 * Return: ST_OK, also on a system that cannot (before Linux 5.14): then the first touch pays;
 * ST_MEMORY.
 */
MUST_CHECK enum status host_memory_populate(struct workers *workers, void *memory, size_t bytes);

C_END

#endif
