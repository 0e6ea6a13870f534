#include "engine/device/host_memory.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "engine/device/workers.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14; younger than some C libraries */
#endif

/* ---- what is free ---------------------------------------------------------------------------- */

enum { FOLDER_BYTES = 512, PATH_BYTES = 600 };

/* The names of one version's files. */
struct group_files {
    const char *mount, *limit, *usage;
    const char *files[2]; /* lines of memory.stat: pages of files, not lately used and used */
};

static const struct group_files version_1 = {"/sys/fs/cgroup/memory",
                                             "memory.limit_in_bytes",
                                             "memory.usage_in_bytes",
                                             {"total_inactive_file ", "total_active_file "}};
static const struct group_files version_2 = {
    "/sys/fs/cgroup", "memory.max", "memory.current", {"inactive_file ", "active_file "}};

/* The number in the first line of @path that begins with @key; "" is any line. */
static bool read_number(unsigned long long *out, const char *path, const char *key)
{
    char line[256];
    bool found = false;
    FILE *f = fopen(path, "r");
    while (f != NULL && !found && fgets(line, sizeof line, f) != NULL)
        found =
            strncmp(line, key, strlen(key)) == 0 && sscanf(line + strlen(key), " %llu", out) == 1;
    if (f != NULL)
        fclose(f);
    return found;
}

/* What one group leaves; a limit of "max", or of none at all, is no number or a huge one. */
static void apply_group(unsigned long long *bytes, const char *folder,
                        const struct group_files *names)
{
    char path[PATH_BYTES];
    unsigned long long limit, usage, files;
    snprintf(path, sizeof path, "%s/%s", folder, names->limit);
    if (!read_number(&limit, path, ""))
        return;
    snprintf(path, sizeof path, "%s/%s", folder, names->usage);
    if (!read_number(&usage, path, ""))
        return;
    snprintf(path, sizeof path, "%s/memory.stat", folder);
    for (int i = 0; i < 2; i++)
        if (read_number(&files, path, names->files[i]))
            usage -= files < usage ? files : usage;
    unsigned long long left = limit > usage ? limit - usage : 0;
    *bytes = left < *bytes ? left : *bytes;
}

/* From @group up to the mount. In a container the path may be the host's: then most of it is not
 * there, and the mount itself has the container's limit. */
static void apply_groups(unsigned long long *bytes, const char *root, const char *group,
                         const struct group_files *names)
{
    char folder[FOLDER_BYTES];
    size_t mount = strlen(root) + strlen(names->mount);
    int n = snprintf(folder, sizeof folder, "%s%s%s", root, names->mount, group);
    if (n < 0 || n >= FOLDER_BYTES)
        return;
    for (;;) {
        apply_group(bytes, folder, names);
        char *slash = strrchr(folder, '/');
        if (strlen(folder) <= mount || slash == NULL)
            return;
        *slash = '\0';
    }
}

/* "4:memory:/a/b" is version 1, "0::/a/b" version 2. */
static void apply_line(unsigned long long *bytes, const char *root, char *line)
{
    line[strcspn(line, "\n")] = '\0';
    char *controllers = strchr(line, ':');
    char *group = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
    if (group == NULL || group[1] != '/')
        return;
    *group++ = '\0';
    if (controllers[1] == '\0')
        apply_groups(bytes, root, group, &version_2);
    else if (strstr(controllers, "memory") != NULL)
        apply_groups(bytes, root, group, &version_1);
}

enum status host_memory_free(size_t *bytes, const char *root)
{
    char path[PATH_BYTES], line[FOLDER_BYTES];
    unsigned long long available;
    snprintf(path, sizeof path, "%s/proc/meminfo", root);
    if (!read_number(&available, path, "MemAvailable:"))
        return FAIL(SYSTEM, "%s does not say MemAvailable", path);
    available *= 1024;
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *f = fopen(path, "r");
    while (f != NULL && fgets(line, sizeof line, f) != NULL)
        apply_line(&available, root, line);
    if (f != NULL)
        fclose(f);
    *bytes = (size_t)available;
    return ST_OK;
}

/* ---- taking it ------------------------------------------------------------------------------- */

enum {
    HUGE_BYTES = 2 << 20,
    PART_BYTES = 16 << 20,
    SLOW_NS = 8000000 /* for a part: 2 GB/s, and clearing memory is faster anywhere */
};

struct populating {
    char *first; /* where parts are counted from: a huge page begins there */
    char *begin, *end;
    atomic_flag small; /* no more huge pages */
    atomic_int error;
};

static int64_t thread_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now); /* a thread that has to wait is not slow */
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void populate_part(void *context, int64_t part, int worker)
{
    struct populating *p = context;
    char *from = p->first + part * PART_BYTES, *to = from + PART_BYTES;
    int64_t begun = thread_ns();
    (void)worker;
    from = from > p->begin ? from : p->begin;
    to = to < p->end ? to : p->end;
    if (atomic_load(&p->error) != 0)
        return;
    if (madvise(from, (size_t)(to - from), MADV_POPULATE_WRITE) != 0)
        atomic_store(&p->error, errno);
    if (thread_ns() - begun > SLOW_NS && !atomic_flag_test_and_set(&p->small) && to < p->end)
        (void)madvise(to, (size_t)(p->end - to), MADV_NOHUGEPAGE); /* it is advice */
}

enum status host_memory_populate(struct workers *workers, void *memory, size_t bytes)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), at = (uintptr_t)memory;
    char *begin = (char *)memory - at % page, *end = (char *)memory + bytes;
    struct populating p = {.first = (char *)memory - at % HUGE_BYTES, .begin = begin, .end = end};
    if (bytes == 0)
        return ST_OK;
    p.end += (page - (uintptr_t)end % page) % page;
    (void)madvise(begin, (size_t)(p.end - begin), MADV_HUGEPAGE); /* as above */
    workers_run(workers, populate_part, &p, (p.end - p.first + PART_BYTES - 1) / PART_BYTES);
    int error = atomic_load(&p.error);
    if (error == 0 || error == EINVAL) /* it is not known here */
        return ST_OK;
    return FAIL(MEMORY, "out of memory: the system has no pages for %zu bytes: %s", bytes,
                strerror(error));
}
