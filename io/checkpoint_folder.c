/* Names of folders, and how they are made, renamed and removed. */
#include "io/checkpoint_folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/base/file.h"
#include "engine/base/log.h"
#include "io/checkpoint_format.h"

void checkpoint_step_name(char out[CHECKPOINT_STEP_NAME_BYTES], int64_t step)
{
    snprintf(out, CHECKPOINT_STEP_NAME_BYTES, "step-%08" PRId64, step);
}

/* The step of "step-N"; -1 if @name is anything else. @bytes: of the name; what follows is not
 * looked at, so that a hidden name is read from behind its prefix. */
int64_t folder_step_of(const char *name, size_t bytes)
{
    char digits[24], again[CHECKPOINT_STEP_NAME_BYTES];
    if (strncmp(name, "step-", 5) != 0 || bytes < 5 + 8 || bytes - 5 >= sizeof digits)
        return -1;
    memcpy(digits, name + 5, bytes - 5);
    digits[bytes - 5] = '\0';
    if (strspn(digits, "0123456789") != bytes - 5)
        return -1;
    errno = 0;
    long long step = strtoll(digits, NULL, 10);
    checkpoint_step_name(again, step);
    return errno == 0 && strlen(again) == bytes && strncmp(again, name, bytes) == 0 ? step : -1;
}

/* The step of "<prefix>step-N-...", or -1. */
int64_t folder_hidden_step_of(const char *name, const char *prefix)
{
    size_t length = strlen(prefix);
    if (strncmp(name, prefix, length) != 0 || strlen(name) < length + 5)
        return -1;
    const char *rest = name + length, *end = strchr(rest + 5, '-');
    return end != NULL ? folder_step_of(rest, (size_t)(end - rest)) : -1;
}

const char *folder_last_part(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash != NULL && slash[1] != '\0' ? slash + 1 : path;
}

/* ---- system calls ---------------------------------------------------------------------------- */

enum status folder_move(const char *from, const char *to)
{
    if (file_fault_due() || rename(from, to) != 0)
        return FAIL(IO, "%s: cannot be renamed to %s: %s", from, folder_last_part(to),
                    strerror(errno));
    return ST_OK;
}

/* A hidden path that is free. mkdir() decides who gets it; a rename goes over an empty folder. */
enum status folder_make_hidden(char *path, const char *dir, const char *prefix, int64_t step)
{
    static atomic_uint counter;
    char name[CHECKPOINT_STEP_NAME_BYTES], hidden[2 * CHECKPOINT_STEP_NAME_BYTES];
    checkpoint_step_name(name, step);
    for (int attempt = 0; attempt < 1000; attempt++) {
        snprintf(hidden, sizeof hidden, "%s%s-%ld-%u", prefix, name, (long)getpid(),
                 atomic_fetch_add(&counter, 1));
        TRY(path_join(path, CHECKPOINT_PATH_BYTES, dir, hidden));
        if (!file_fault_due() && mkdir(path, 0777) == 0)
            return ST_OK;
        if (errno != EEXIST)
            break;
    }
    return FAIL(IO, "%s: the folder cannot be made: %s", path, strerror(errno));
}

/* ---- what may be removed --------------------------------------------------------------------- */

/* A file that a save makes: the manifest, data, and what a killed file_write() leaves. */
static bool is_our_file(const char *name)
{
    size_t bytes = strlen(name);
    return strcmp(name, CHECKPOINT_MANIFEST) == 0 || checkpoint_file_number(name) >= 0 ||
           (strncmp(name, ".tessera-", 9) == 0 && bytes > 4 &&
            strcmp(name + bytes - 4, ".tmp") == 0);
}

/* Calls @visit for each entry but "." and "..". */
enum status folder_for_each(const char *path,
                            enum status (*visit)(void *context, int folder, const char *name),
                            void *context)
{
    enum status st = ST_OK;
    DIR *folder = opendir(path);
    if (folder == NULL)
        return FAIL(IO, "%s: %s", path, strerror(errno));
    /* An error is no end: a run would start afresh because a disk did not answer. */
    for (struct dirent *entry; errno = 0, (entry = readdir(folder)) != NULL;) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        TRY_GOTO(st, out, visit(context, dirfd(folder), entry->d_name));
    }
    if (errno != 0)
        st = FAIL(IO, "%s: the folder cannot be read to its end: %s", path, strerror(errno));
out:
    closedir(folder);
    return st;
}

static enum status check_ours(void *path, int folder, const char *name)
{
    struct stat info;
    if (is_our_file(name) && fstatat(folder, name, &info, AT_SYMLINK_NOFOLLOW) == 0 &&
        S_ISREG(info.st_mode))
        return ST_OK;
    return FAIL(INVALID, "%s: holds \"%.100s\", which is no part of a checkpoint; it is left alone",
                (const char *)path, name);
}

/* Is @path a folder of our own that holds only files of ours? */
enum status folder_check_removable(const char *path)
{
    struct stat info;
    if (lstat(path, &info) != 0)
        return FAIL(IO, "%s: %s", path, strerror(errno));
    if (!S_ISDIR(info.st_mode))
        return FAIL(INVALID, "%s: stands where a checkpoint belongs and is not a folder", path);
    return folder_for_each(path, check_ours, (void *)path);
}

static enum status remove_ours(void *path, int folder, const char *name)
{
    if (is_our_file(name) && unlinkat(folder, name, 0) != 0)
        return FAIL(IO, "%s/%s: %s", (const char *)path, name, strerror(errno));
    return ST_OK;
}

/* The manifest goes first: from then on the rest is no checkpoint. */
enum status folder_remove(const char *path)
{
    char manifest[CHECKPOINT_PATH_BYTES];
    TRY(folder_check_removable(path));
    TRY(path_join(manifest, sizeof manifest, path, CHECKPOINT_MANIFEST));
    if (unlink(manifest) != 0 && errno != ENOENT)
        return FAIL(IO, "%s: %s", manifest, strerror(errno));
    TRY(folder_for_each(path, remove_ours, (void *)path));
    if (rmdir(path) != 0)
        return FAIL(IO, "%s: %s", path, strerror(errno));
    return ST_OK;
}

/* Where no one waits for it: what stays is swept up later. */
void folder_remove_quietly(const char *path)
{
    if (folder_remove(path) != ST_OK)
        log_debug("checkpoint", "%s", status_message());
    status_clear();
}

/* All is there and fits: what a resume would find. */
enum status folder_check_whole(const char *temp)
{
    struct checkpoint c = {0};
    enum status st = checkpoint_open(&c, temp);
    checkpoint_close(&c);
    return st;
}
