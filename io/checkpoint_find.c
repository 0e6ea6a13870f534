/* The folder of all checkpoints: what is there, the newest, and which ones go. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/base/file.h"
#include "engine/base/log.h"
#include "io/checkpoint_folder.h"
#include "io/checkpoint_format.h"

/* ---- looking around -------------------------------------------------------------------------- */

struct candidate {
    char name[2 * CHECKPOINT_STEP_NAME_BYTES];
    int64_t step;
    bool is_aside;
};

struct scan {
    const char *dir;
    struct candidate *items; /* owned; oldest first; of a step, the one under its name is last */
    size_t capacity;
    int count;
};

static enum status take_candidate(void *context, int folder, const char *name)
{
    struct scan *s = context;
    char manifest[NAME_MAX + 32];
    struct stat info;
    struct candidate c = {.step = folder_step_of(name, strlen(name))};
    if (c.step < 0) {
        c.step = folder_hidden_step_of(name, FOLDER_ASIDE);
        c.is_aside = true;
    }
    if (c.step < 0 || strlen(name) >= sizeof c.name)
        return ST_OK;
    snprintf(c.name, sizeof c.name, "%s", name);
    snprintf(manifest, sizeof manifest, "%s/" CHECKPOINT_MANIFEST, name);
    if (fstatat(folder, manifest, &info, 0) != 0 && (errno == ENOENT || errno == ENOTDIR))
        return ST_OK; /* it does not exist as a checkpoint; one that cannot be read does */
    TRY(mem_grow(&s->items, &s->capacity, (size_t)s->count + 1, sizeof c));
    s->items[s->count++] = c;
    return ST_OK;
}

static int compare_candidates(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;
    if (x->step != y->step)
        return x->step < y->step ? -1 : 1;
    if (x->is_aside != y->is_aside)
        return x->is_aside ? -1 : 1;
    return strcmp(x->name, y->name);
}

static enum status scan_dir(struct scan *s, const char *dir)
{
    s->dir = dir;
    if (access(dir, F_OK) != 0 && errno == ENOENT)
        return ST_OK;
    TRY(folder_for_each(dir, take_candidate, s));
    if (s->count > 0)
        qsort(s->items, (size_t)s->count, sizeof *s->items, compare_candidates);
    return ST_OK;
}

/* What checkpoint_open() finds there. Only running out of memory is an error of the scan. */
static enum status look_at(struct checkpoint_entry *entry, const struct scan *s, int i)
{
    struct checkpoint c = {0};
    const struct candidate *it = &s->items[i];
    memset(entry, 0, sizeof *entry);
    entry->step = it->step;
    TRY(path_join(entry->path, sizeof entry->path, s->dir, it->name));
    entry->status = checkpoint_open(&c, entry->path);
    if (entry->status == ST_OK && c.step != it->step)
        entry->status = FAIL(CORRUPT, "%s: is a checkpoint of step %" PRId64 " under another name",
                             entry->path, c.step);
    if (entry->status == ST_OK) {
        entry->bytes = c.bytes;
        entry->plain_bytes = c.plain_bytes;
    } else if (entry->status != ST_MEMORY) {
        snprintf(entry->problem, sizeof entry->problem, "%.*s",
                 (int)strcspn(status_message(), "\n"), status_message());
        status_clear();
    }
    checkpoint_close(&c);
    return entry->status == ST_MEMORY ? ST_MEMORY : ST_OK;
}

enum status checkpoint_list(struct checkpoint_list *list, const char *dir)
{
    enum status st;
    struct scan s = {0};
    TRY_GOTO(st, out, scan_dir(&s, dir));
    for (int i = s.count; i-- > 0;) { /* newest first, the one under its name before one aside */
        struct checkpoint_entry entry;
        TRY_GOTO(st, out, look_at(&entry, &s, i));
        const struct checkpoint_entry *last =
            list->count > 0 ? &list->entries[list->count - 1] : NULL;
        if (s.items[i].is_aside && last != NULL && last->step == entry.step &&
            last->status == ST_OK)
            continue;
        TRY_GOTO(st, out,
                 mem_grow(&list->entries, &list->capacity, (size_t)list->count + 1, sizeof entry));
        list->entries[list->count++] = entry;
    }
    for (int i = 0, k = list->count - 1; i < k; i++, k--) {
        struct checkpoint_entry swap = list->entries[i];
        list->entries[i] = list->entries[k];
        list->entries[k] = swap;
    }
out:
    mem_free(&s.items);
    return st;
}

void checkpoint_list_release(struct checkpoint_list *list)
{
    mem_free(&list->entries);
    memset(list, 0, sizeof *list);
}

enum status checkpoint_find_latest(struct checkpoint_found *found, const char *dir, int64_t below)
{
    enum status st;
    struct scan s = {0};
    memset(found, 0, sizeof *found);
    found->step = -1;
    TRY_GOTO(st, out, scan_dir(&s, dir));
    for (int i = s.count; i-- > 0;) {
        struct checkpoint_entry entry;
        if (s.items[i].step >= below)
            continue;
        TRY_GOTO(st, out, look_at(&entry, &s, i));
        if (entry.status == ST_OK) {
            memcpy(found->path, entry.path, sizeof found->path);
            found->step = entry.step;
            break;
        }
        log_warn("checkpoint", "passing over %s: %s", entry.path, entry.problem);
        found->damaged++;
    }
out:
    mem_free(&s.items);
    return st;
}

/* ---- removing -------------------------------------------------------------------------------- */

/* Under a hidden name first, so that a half removed one is never taken for a damaged one. */
static enum status remove_checkpoint(const char *path, const char *dir, int64_t step)
{
    char doomed[CHECKPOINT_PATH_BYTES];
    enum status st = folder_check_removable(path);
    if (st == ST_INVALID) {
        log_debug("checkpoint", "%s", status_message());
        status_clear();
        return ST_OK;
    }
    TRY(st);
    TRY(folder_make_hidden(doomed, dir, FOLDER_DOOMED, step));
    st = folder_move(path, doomed);
    if (st != ST_OK) {
        rmdir(doomed);
        return st;
    }
    return folder_remove(doomed);
}

/* "a/step-1/" and "step-1" both end in step-1. */
static bool same_last_part(const char *path, const char *name)
{
    size_t bytes = strlen(path), length = strlen(name);
    while (bytes > 0 && path[bytes - 1] == '/')
        bytes--;
    return bytes >= length && strncmp(path + bytes - length, name, length) == 0 &&
           (bytes == length || path[bytes - length - 1] == '/');
}

enum status checkpoint_remove_old(const char *dir, int keep, const char *keep_path)
{
    enum status st, first = ST_OK;
    struct scan s = {0};
    ASSERT(keep >= 1);
    TRY_GOTO(st, out, scan_dir(&s, dir));
    int complete = 0;
    for (int i = s.count; i-- > 0;) {
        struct checkpoint_entry entry;
        if (s.items[i].is_aside)
            continue;
        TRY_GOTO(st, out, look_at(&entry, &s, i));
        if (entry.status != ST_OK || ++complete <= keep ||
            (keep_path != NULL && same_last_part(keep_path, s.items[i].name)))
            continue;
        enum status got = remove_checkpoint(entry.path, dir, entry.step);
        first = first == ST_OK ? got : first;
    }
    st = first;
out:
    mem_free(&s.items);
    return st;
}

/* Names first: a folder must not change while it is read. */
struct leftovers {
    struct candidate *items; /* owned */
    size_t capacity;
    int count;
};

static enum status take_leftover(void *context, int folder, const char *name)
{
    struct leftovers *l = context;
    struct candidate c = {.step = -1};
    (void)folder;
    c.step = folder_hidden_step_of(name, FOLDER_ASIDE);
    c.is_aside = c.step >= 0;
    if (c.step < 0)
        c.step = folder_hidden_step_of(name, FOLDER_TEMP);
    if (c.step < 0)
        c.step = folder_hidden_step_of(name, FOLDER_DOOMED);
    if (c.step < 0 || strlen(name) >= sizeof c.name)
        return ST_OK;
    snprintf(c.name, sizeof c.name, "%s", name);
    TRY(mem_grow(&l->items, &l->capacity, (size_t)l->count + 1, sizeof c));
    l->items[l->count++] = c;
    return ST_OK;
}

static bool is_complete(const char *path)
{
    bool complete = folder_check_whole(path) == ST_OK;
    status_clear();
    return complete;
}

static enum status sweep_one(const char *dir, const struct candidate *it)
{
    char path[CHECKPOINT_PATH_BYTES], named[CHECKPOINT_PATH_BYTES],
        name[CHECKPOINT_STEP_NAME_BYTES];
    TRY(path_join(path, sizeof path, dir, it->name));
    if (it->is_aside) {
        struct stat info;
        checkpoint_step_name(name, it->step);
        TRY(path_join(named, sizeof named, dir, name));
        if (lstat(named, &info) != 0 && is_complete(path))
            return folder_move(path, named);
        if (!is_complete(named) && is_complete(path))
            return ST_OK; /* the better one of two: people decide */
    }
    if (folder_check_removable(path) != ST_OK) {
        log_debug("checkpoint", "%s", status_message());
        status_clear();
        return ST_OK;
    }
    return folder_remove(path);
}

enum status checkpoint_sweep(const char *dir)
{
    enum status st = ST_OK;
    struct leftovers l = {0};
    if (access(dir, F_OK) != 0 && errno == ENOENT)
        return ST_OK;
    TRY_GOTO(st, out, folder_for_each(dir, take_leftover, &l));
    for (int i = 0; i < l.count; i++) {
        enum status got = sweep_one(dir, &l.items[i]);
        st = st == ST_OK ? got : st;
    }
out:
    mem_free(&l.items);
    return st;
}
