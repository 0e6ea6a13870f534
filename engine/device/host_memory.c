#include "engine/device/host_memory.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

enum { FOLDER_BYTES = 512, PATH_BYTES = 600 };

/* The names of one version's files. */
struct group_files {
    const char *mount, *limit, *usage, *idle; /* idle: the line of memory.stat */
};

static const struct group_files version_1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes",
                                             "memory.usage_in_bytes", "total_inactive_file"};
static const struct group_files version_2 = {"/sys/fs/cgroup", "memory.max", "memory.current",
                                             "inactive_file"};

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
    unsigned long long limit, usage, idle;
    snprintf(path, sizeof path, "%s/%s", folder, names->limit);
    if (!read_number(&limit, path, ""))
        return;
    snprintf(path, sizeof path, "%s/%s", folder, names->usage);
    if (!read_number(&usage, path, ""))
        return;
    snprintf(path, sizeof path, "%s/memory.stat", folder);
    if (read_number(&idle, path, names->idle))
        usage -= idle < usage ? idle : usage;
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
