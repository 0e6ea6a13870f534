/*
 * engine/base/file.h - whole files in, whole files out.
 *
 * Reading takes plain and gzip files alike. Writing is all or nothing: into a temporary file beside
 * the target, flushed to disk, then renamed over it; on failure the old file stays as it was.
 */
#ifndef ENGINE_BASE_FILE_H
#define ENGINE_BASE_FILE_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

C_BEGIN

struct file_text {
    char *data;   /* owned (mem_free); a zero byte follows the last one */
    size_t bytes; /* without that zero byte */
};

/**
 * file_read() - a whole file, gunzipped if it is gzip.
 *
 * Return: ST_OK; ST_IO (missing, a folder, unreadable: the system's own words); ST_CORRUPT (a gzip
 * file cut short or damaged); ST_MEMORY.
 */
MUST_CHECK enum status file_read(struct file_text *text, const char *path);

/**
 * file_write() - replace @path by @bytes of @data. A link is followed; a device or pipe is written
 * to as it is.
 *
 * Return: ST_OK; ST_IO, then @path is as before (only if the folder could not be flushed after the
 * rename it is the new file, and the message says so).
 */
MUST_CHECK enum status file_write(const char *path, const void *data, size_t bytes);

/* The same for what is made piece by piece. */
struct file_writer {
    const char *path; /* borrowed; for messages */
    int fd;
    char target[PATH_MAX], temporary[PATH_MAX]; /* "" for what is written as it is */
};

/** file_begin() - a new file that will replace @path. ST_IO; ST_INVALID: the path is too long. */
MUST_CHECK enum status file_begin(struct file_writer *w, const char *path);

/** file_put() - the next @bytes. ST_IO. */
MUST_CHECK enum status file_put(struct file_writer *w, const void *data, size_t bytes);

/** file_end() - put it in the place of the old one, or with @st a failure drop it. Once for each
 * file_begin() that returned ST_OK. Return: @st; as file_write(). */
MUST_CHECK enum status file_end(struct file_writer *w, enum status st);

/** file_read_at() - exactly @bytes of @fd from @offset on. @path: for messages.
 * Return: ST_OK; ST_IO; ST_CORRUPT (the file ends before). */
MUST_CHECK enum status file_read_at(int fd, const char *path, void *out, size_t bytes,
                                    int64_t offset);

/** file_write_at() - @bytes of @data to @fd from @offset on.
 * Return: ST_OK; ST_IO, with the byte. */
MUST_CHECK enum status file_write_at(int fd, const char *path, const void *data, size_t bytes,
                                     int64_t offset);

/** file_make_dirs() - mkdir -p; what is made is on the disk. Return: ST_OK, also if it is there;
 * ST_IO. */
MUST_CHECK enum status file_make_dirs(const char *path);

/** file_make_folder_of() - the same for the folder that file @path is in. Return: ST_OK; ST_IO,
 * also if nothing can be written there. */
MUST_CHECK enum status file_make_folder_of(const char *path);

/** file_flush_folder() - flush the names in folder @path, so that a rename in it lasts. A file
 * system that has nothing to flush is fine. Return: 0; the errno of what failed. */
MUST_CHECK int file_flush_folder(const char *path);

/* A file that grows by whole records (metrics.jsonl): a record is there or it is not. */
struct file_log {
    int fd; /* -1 when closed */
    char path[1024];
};

/** file_log_open() - a new log, in place of one that is there. ST_IO. */
MUST_CHECK enum status file_log_open(struct file_log *log, const char *path);

/** file_log_reopen() - go on with the log that is there, or with an empty one. ST_IO. */
MUST_CHECK enum status file_log_reopen(struct file_log *log, const char *path);

/** file_log_cut() - keep the first @bytes. ST_IO. */
MUST_CHECK enum status file_log_cut(struct file_log *log, size_t bytes);

/** file_log_append() - one write; if it comes out short, the tail is cut off again. ST_IO. */
MUST_CHECK enum status file_log_append(struct file_log *log, const char *record, size_t bytes);

/** file_log_close() - fsync and close; also for a log that never opened (fd -1). ST_IO. */
MUST_CHECK enum status file_log_close(struct file_log *log);

/** path_join() - "dir/name" into @out; ST_INVALID if it does not fit. */
MUST_CHECK enum status path_join(char *out, size_t out_bytes, const char *dir, const char *name);

/** file_fail_at() - fail the k-th system call of file_*() from now on (1 = next); 0 = never. */
void file_fail_at(int64_t k);

/** file_delay() - every system call of file_*() first waits @ms from now on; for tests. */
void file_delay(int64_t ms);

/** file_fault_due() - for other writers of files, before a system call: true if a test wants this
 * one to fail; errno is then EIO. */
bool file_fault_due(void);

C_END

#endif
