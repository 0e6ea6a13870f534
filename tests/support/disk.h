/*
 * tests/support/disk.h - what a disk may hold after the power was cut at any moment.
 *
 * Between disk_watch() and disk_unwatch() every call of this process that changes files under a
 * folder is written into a journal: open with O_CREAT, write, pwrite, ftruncate, fsync, mkdir,
 * rename, unlink, unlinkat, rmdir, from any thread. The test program defines these functions, by
 * the disk_*() below; fsync then does nothing but tell.
 *
 * disk_cut() builds in another folder one of the states that may be found after a cut behind the
 * first @calls calls, by what POSIX promises and journalling file systems keep:
 *
 *   a file     what was written before its last fsync is there; of what came later any write may
 *              be there, be missing, be cut in half or be zeros
 *   a folder   the changes of its entries before its own last fsync are there, later ones happen
 *              in order up to any point; each folder on its own, also before or after those of
 *              other folders and of files' contents
 *
 * Which one is decided by a struct disk_choices, so that all can be walked through or some drawn.
 */
#ifndef TESTS_SUPPORT_DISK_H
#define TESTS_SUPPORT_DISK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "engine/base/status.h"

C_BEGIN

/** disk_watch() - start a journal for all under @root, a folder with files and folders only. */
void disk_watch(const char *root);
void disk_unwatch(void);

/** disk_calls() - calls in the journal; disk_call_name() names one of them. */
int disk_calls(void);
const char *disk_call_name(int call);

enum { DISK_CHOICES = 512 };

/* Zero-initialise: the first state is the one with as little as possible on the disk. */
struct disk_choices {
    uint64_t *random; /* draw with test_random(); NULL: walk through all */
    int picked[DISK_CHOICES], options[DISK_CHOICES];
    int count; /* choices of the last state */
    int given; /* of these, how many the next state starts with */
};

/** disk_next() - go to the next state of the walk. False: that was the last one. */
bool disk_next(struct disk_choices *choices);

/** disk_cut() - make @to, a folder that is not there, the root after a cut. Fails the test if it
 * cannot. */
void disk_cut(const char *to, int calls, struct disk_choices *choices);

/* The calls that are watched; they do what their namesakes do. */
int disk_open(const char *path, int flags, mode_t mode);
ssize_t disk_write(int fd, const void *data, size_t bytes);
ssize_t disk_pwrite(int fd, const void *data, size_t bytes, off_t offset);
int disk_ftruncate(int fd, off_t bytes);
int disk_fsync(int fd);
int disk_mkdir(const char *path, mode_t mode);
int disk_rename(const char *from, const char *to);
int disk_unlinkat(int folder, const char *path, int flags);

C_END

#endif
