/* A save from its hidden folder to its name. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/base/file.h"
#include "engine/base/log.h"
#include "io/checkpoint_folder.h"
#include "io/checkpoint_format.h"

enum status checkpoint_begin(char *temp, const char *dir, int64_t step)
{
    if (step < 0)
        return FAIL(INVALID, "a checkpoint of step %" PRId64, step);
    TRY(file_make_dirs(dir));
    return folder_make_hidden(temp, dir, FOLDER_TEMP, step);
}

void checkpoint_discard(const char *temp)
{
    char message[4096];
    snprintf(message, sizeof message, "%s", status_message()); /* why it failed stays the news */
    folder_remove_quietly(temp);
    status_set_message(message);
}

/* @aside: where it went; "" if nothing stood there. */
static enum status move_aside(char *aside, const char *path, const char *dir, int64_t step)
{
    struct stat info;
    aside[0] = '\0';
    if (lstat(path, &info) != 0 && errno == ENOENT)
        return ST_OK;
    TRY(folder_check_removable(path));
    TRY(folder_make_hidden(aside, dir, FOLDER_ASIDE, step));
    enum status st = folder_move(path, aside);
    if (st != ST_OK)
        rmdir(aside);
    return st;
}

static enum status give_name(const char *path, const char *dir, const char *temp, int64_t step)
{
    char aside[CHECKPOINT_PATH_BYTES];
    TRY(move_aside(aside, path, dir, step));
    enum status st = folder_move(temp, path);
    if (st != ST_OK) {
        if (aside[0] != '\0' && rename(aside, path) != 0)
            log_warn("checkpoint", "%s: what stood there is now %s", path, folder_last_part(aside));
        return st;
    }
    int cause = file_flush_folder(dir);
    if (cause != 0)
        return FAIL(IO, "published %s, but its folder cannot be flushed: %s", path,
                    strerror(cause));
    if (aside[0] != '\0')
        folder_remove_quietly(aside);
    return ST_OK;
}

/* For people and scripts; nothing of ours trusts it, so it may fail. */
static void write_hint(const char *dir, int64_t step)
{
    char path[CHECKPOINT_PATH_BYTES], name[CHECKPOINT_STEP_NAME_BYTES],
        line[CHECKPOINT_STEP_NAME_BYTES + 1];
    checkpoint_step_name(name, step);
    snprintf(line, sizeof line, "%s\n", name);
    enum status st = path_join(path, sizeof path, dir, "latest");
    if (st == ST_OK)
        st = file_write(path, line, strlen(line));
    if (st != ST_OK)
        log_debug("checkpoint", "%s", status_message());
    status_clear();
}

enum status checkpoint_publish(char *path, const char *dir, const char *temp,
                               const struct checkpoint_manifest *manifest)
{
    char name[CHECKPOINT_STEP_NAME_BYTES], final[CHECKPOINT_PATH_BYTES];
    if (manifest->step < 0)
        return FAIL(INVALID, "a checkpoint of step %" PRId64, manifest->step);
    checkpoint_step_name(name, manifest->step);
    TRY(path_join(final, sizeof final, dir, name));
    TRY(manifest_write(temp, manifest));
    TRY(folder_check_whole(temp));
    TRY(give_name(final, dir, temp, manifest->step));
    write_hint(dir, manifest->step);
    if (path != NULL)
        memcpy(path, final, sizeof final);
    return ST_OK;
}
