/*
 * tests/support/disk_calls.h - to be included by a test program: its calls that change files, and
 * those of all that is linked into it, are watched (tests/support/disk.h).
 *
 * A program's own function of a name that the C library has too is the one that is called.
 */
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/support/disk.h"

int open(const char *path, int flags, ...)
{
    va_list args;
    va_start(args, flags);
    mode_t mode = (flags & O_CREAT) != 0 ? va_arg(args, mode_t) : 0;
    va_end(args);
    return disk_open(path, flags, mode);
}

ssize_t write(int fd, const void *data, size_t bytes)
{
    return disk_write(fd, data, bytes);
}

ssize_t pwrite(int fd, const void *data, size_t bytes, off_t offset)
{
    return disk_pwrite(fd, data, bytes, offset);
}

int ftruncate(int fd, off_t bytes)
{
    return disk_ftruncate(fd, bytes);
}

int fsync(int fd)
{
    return disk_fsync(fd);
}

int mkdir(const char *path, mode_t mode)
{
    return disk_mkdir(path, mode);
}

int rename(const char *from, const char *to)
{
    return disk_rename(from, to);
}

int unlink(const char *path)
{
    return disk_unlinkat(AT_FDCWD, path, 0);
}

int unlinkat(int folder, const char *path, int flags)
{
    return disk_unlinkat(folder, path, flags);
}

int rmdir(const char *path)
{
    return disk_unlinkat(AT_FDCWD, path, AT_REMOVEDIR);
}
