/*
 * engine/device/host_memory.h - how much memory this process may still take.
 *
 * The least of what the system has (MemAvailable of /proc/meminfo) and what each memory limit on
 * the way up from the process's control group leaves: limit - usage, where pages of files that
 * nobody has touched lately count as free. Both versions of control groups. Linux, proc(5),
 * Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
 */
#ifndef ENGINE_DEVICE_HOST_MEMORY_H
#define ENGINE_DEVICE_HOST_MEMORY_H

#include <stddef.h>

#include "engine/base/status.h"

C_BEGIN

/**
 * host_memory_free() - bytes that are free for this process and its like.
 * @root: "" for this system; tests name a folder with proc/ and sys/ in it.
 *
 * Return: ST_OK; ST_SYSTEM if /proc/meminfo does not say. What is not there of control groups is no
 * limit.
 */
MUST_CHECK enum status host_memory_free(size_t *bytes, const char *root);

C_END

#endif
