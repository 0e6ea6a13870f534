/*
 * io/checkpoint_folder.h - names of checkpoint folders, and how they are made, renamed and removed.
 *
 * Only io/checkpoint_*.c include this. Every call that changes the disk may be made to fail by
 * file_fail_at(), but those that only clean up.
 */
#ifndef IO_CHECKPOINT_FOLDER_H
#define IO_CHECKPOINT_FOLDER_H

#include "io/checkpoint.h"

C_BEGIN

/* Hidden names: ".tmp-step-00000042-<process>-<number>". Only the first kind is written to; the
 * others are checkpoints on their way out. */
#define FOLDER_TEMP   ".tmp-"
#define FOLDER_ASIDE  ".old-"
#define FOLDER_DOOMED ".del-"

/** folder_step_of() - the step of the name that is @bytes long; -1 if it is anything else. */
int64_t folder_step_of(const char *name, size_t bytes);

/** folder_hidden_step_of() - the step of "<prefix>step-N-...", or -1. */
int64_t folder_hidden_step_of(const char *name, const char *prefix);

/** folder_last_part() - "c" of "a/b/c". */
const char *folder_last_part(const char *path);

MUST_CHECK enum status folder_move(const char *from, const char *to);

/**
 * folder_make_hidden() - a new, empty folder; a rename may go over it.
 * @path: CHECKPOINT_PATH_BYTES; its path.
 */
MUST_CHECK enum status folder_make_hidden(char *path, const char *dir, const char *prefix,
                                          int64_t step);

/** folder_for_each() - calls @visit for each entry but "." and ".."; ends at the first failure. */
MUST_CHECK enum status
folder_for_each(const char *path, enum status (*visit)(void *context, int folder, const char *name),
                void *context);

/** folder_check_removable() - ST_OK: only files of ours are in it; ST_INVALID names another. */
MUST_CHECK enum status folder_check_removable(const char *path);

/** folder_remove() - if it is removable; the manifest goes first. */
MUST_CHECK enum status folder_remove(const char *path);

/** folder_remove_quietly() - where no one waits for it: what stays is swept up later. */
void folder_remove_quietly(const char *path);

/** folder_check_whole() - what checkpoint_open() says. */
MUST_CHECK enum status folder_check_whole(const char *path);

C_END

#endif
