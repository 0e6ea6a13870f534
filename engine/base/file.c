#include "engine/base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include "engine/base/arena.h"
#include "engine/base/clock.h"

/* ---- faults for tests ------------------------------------------------------------------------ */

static atomic_llong fail_countdown, delay_ms;

void file_fail_at(int64_t k)
{
    atomic_store(&fail_countdown, k);
}

void file_delay(int64_t ms)
{
    atomic_store(&delay_ms, ms);
}

static void wait_as_asked(void)
{
    int64_t ms = atomic_load_explicit(&delay_ms, memory_order_relaxed);
    if (ms > 0)
        clock_pause_us(ms * 1000);
}

/* True when a test asked that this system call fails. */
static bool should_fail(void)
{
    wait_as_asked();
    if (atomic_load_explicit(&fail_countdown, memory_order_relaxed) == 0)
        return false;
    if (atomic_fetch_sub(&fail_countdown, 1) != 1)
        return false;
    errno = EIO;
    return true;
}

bool file_fault_due(void)
{
    return should_fail();
}

static int do_open(const char *path, int flags)
{
    return should_fail() ? -1 : open(path, flags | O_CLOEXEC, 0666);
}

static ssize_t do_write(int fd, const void *data, size_t bytes)
{
    ssize_t n;
    do {
        n = should_fail() ? -1 : write(fd, data, bytes);
    } while (n < 0 && errno == EINTR);
    return n;
}

/* Pipes, terminals and some file systems have nothing to flush and say EINVAL. */
static int do_fsync(int fd)
{
    if (should_fail())
        return -1;
    return fsync(fd) == 0 || errno == EINVAL || errno == EROFS ? 0 : -1;
}

static int do_rename(const char *from, const char *to)
{
    return should_fail() ? -1 : rename(from, to);
}

int file_flush_folder(const char *path)
{
    int fd = do_open(path, O_RDONLY | O_DIRECTORY);
    if (fd < 0)
        return errno;
    int cause = do_fsync(fd) == 0 ? 0 : errno;
    close(fd);
    return cause;
}

/* ---- reading --------------------------------------------------------------------------------- */

static enum status read_all(struct file_text *text, gzFile gz, const char *path, size_t expected)
{
    enum { CHUNK = 1 << 20 };
    size_t capacity = 0;
    TRY(mem_grow(&text->data, &capacity, expected + 4096, 1));
    for (;;) {
        size_t room = capacity - text->bytes - 1; /* one byte stays for the final zero */
        if (room == 0) {
            TRY(mem_grow(&text->data, &capacity, capacity + 4096, 1));
            continue;
        }
        errno = 0;
        int n = gzread(gz, text->data + text->bytes, (unsigned)(room < CHUNK ? room : CHUNK));
        int code;
        const char *words = gzerror(gz, &code);
        if (code == Z_ERRNO)
            return FAIL(IO, "%s: %s", path, errno != 0 ? strerror(errno) : words);
        if (code == Z_MEM_ERROR)
            return FAIL(MEMORY, "%s: out of memory while reading", path);
        if (n < 0 || code == Z_BUF_ERROR || code == Z_DATA_ERROR)
            return FAIL(CORRUPT, "%s: the gzip data is damaged or cut short after %zu bytes (%s)",
                        path, text->bytes, words);
        if (n == 0)
            break;
        text->bytes += (size_t)n;
    }
    text->data[text->bytes] = '\0';
    return ST_OK;
}

enum status file_read(struct file_text *text, const char *path)
{
    enum status st = ST_OK;
    gzFile gz = NULL;
    struct stat info;
    text->data = NULL;
    text->bytes = 0;
    int fd = do_open(path, O_RDONLY);
    if (fd < 0)
        return FAIL(IO, "%s: %s", path, strerror(errno));
    if (fstat(fd, &info) != 0) {
        st = FAIL(IO, "%s: %s", path, strerror(errno));
        goto out;
    }
    if (S_ISDIR(info.st_mode)) {
        st = FAIL(IO, "%s: is a folder, expected a file", path);
        goto out;
    }
    gz = gzdopen(fd, "rb");
    if (gz == NULL) {
        st = FAIL(MEMORY, "%s: out of memory while opening", path);
        goto out;
    }
    gzbuffer(gz, 1 << 17);
    /* A size is a hint only: 0 for pipes and /proc, the packed size for gzip. */
    TRY_GOTO(st, out, read_all(text, gz, path, info.st_size > 0 ? (size_t)info.st_size : 0));
out:
    if (gz != NULL)
        gzclose(gz); /* closes fd */
    else
        close(fd);
    if (st != ST_OK) {
        mem_free(&text->data);
        text->bytes = 0;
    }
    return st;
}

enum status file_read_at(int fd, const char *path, void *out, size_t bytes, int64_t offset)
{
    for (size_t done = 0; done < bytes;) {
        int64_t at = offset + (int64_t)done;
        ssize_t n = should_fail() ? -1 : pread(fd, (char *)out + done, bytes - done, (off_t)at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return FAIL(IO, "%s: %s", path, strerror(errno));
        if (n == 0)
            return FAIL(CORRUPT, "%s: ends at byte %" PRId64 ", it has become shorter", path, at);
        done += (size_t)n;
    }
    return ST_OK;
}

/* ---- writing --------------------------------------------------------------------------------- */

enum status file_write_at(int fd, const char *path, const void *data, size_t bytes, int64_t offset)
{
    for (size_t done = 0; done < bytes;) {
        int64_t at = offset + (int64_t)done;
        const char *from = (const char *)data + done;
        ssize_t n = should_fail() ? -1 : pwrite(fd, from, bytes - done, (off_t)at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return FAIL(IO, "%s: byte %" PRId64 ": %s", path, at, strerror(errno));
        done += (size_t)n;
    }
    return ST_OK;
}

static enum status write_all(int fd, const char *data, size_t bytes, const char *path)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t n = do_write(fd, data + done, bytes - done);
        if (n < 0)
            return FAIL(IO, "%s: %s", path, strerror(errno));
        done += (size_t)n;
    }
    return ST_OK;
}

static enum status folder_of(char *folder, size_t folder_bytes, const char *path)
{
    const char *slash = strrchr(path, '/');
    if (slash == NULL)
        return path_join(folder, folder_bytes, ".", "");
    if ((size_t)(slash - path) + 2 > folder_bytes)
        return FAIL(INVALID, "%s: the path is too long", path);
    snprintf(folder, folder_bytes, "%.*s", slash == path ? 1 : (int)(slash - path), path);
    return ST_OK;
}

/* Open a new hidden file in @folder. A leftover of a killed process is stepped over. */
static enum status open_temporary(int *fd, char *temporary, size_t temporary_bytes,
                                  const char *folder, const char *path)
{
    static atomic_uint counter;
    for (int attempt = 0; attempt < 1000; attempt++) {
        char name[64];
        snprintf(name, sizeof name, ".tessera-%ld-%u.tmp", (long)getpid(),
                 atomic_fetch_add(&counter, 1));
        TRY(path_join(temporary, temporary_bytes, folder, name));
        *fd = do_open(temporary, O_WRONLY | O_CREAT | O_EXCL);
        if (*fd >= 0)
            return ST_OK;
        if (errno != EEXIST)
            return FAIL(IO, "%s: cannot write in its folder: %s", path, strerror(errno));
    }
    return FAIL(IO, "%s: its folder is full of temporary files .tessera-*.tmp", path);
}

/* Of the file that is there, or of a new one. */
static enum status open_replacement(struct file_writer *w, const char *folder,
                                    const struct stat *old)
{
    TRY(open_temporary(&w->fd, w->temporary, sizeof w->temporary, folder, w->path));
    if (old == NULL || fchmod(w->fd, old->st_mode & 07777) == 0)
        return ST_OK;
    return FAIL(IO, "%s: %s", w->path, strerror(errno));
}

enum status file_begin(struct file_writer *w, const char *path)
{
    char folder[PATH_MAX];
    struct stat old;
    bool exists = stat(path, &old) == 0;
    enum status st = ST_OK;
    *w = (struct file_writer){.path = path, .fd = -1};
    if (exists && S_ISDIR(old.st_mode))
        return FAIL(IO, "%s: is a folder, expected a file", path);
    if (exists && !S_ISREG(old.st_mode)) { /* a device or a pipe cannot be replaced */
        w->fd = do_open(path, O_WRONLY);
        return w->fd >= 0 ? ST_OK : FAIL(IO, "%s: %s", path, strerror(errno));
    }
    /* Through a link, so that the file is replaced and not the link. */
    if (realpath(path, w->target) == NULL)
        TRY(path_join(w->target, sizeof w->target, "", path));
    TRY(folder_of(folder, sizeof folder, w->target));
    st = open_replacement(w, folder, exists ? &old : NULL);
    return st == ST_OK ? ST_OK : file_end(w, st);
}

enum status file_put(struct file_writer *w, const void *data, size_t bytes)
{
    return write_all(w->fd, data, bytes, w->path);
}

/* Flush and rename; on failure the temporary file is gone and the target is as before. */
enum status file_end(struct file_writer *w, enum status st)
{
    char folder[PATH_MAX];
    bool replaces = w->temporary[0] != '\0';
    if (w->fd < 0)
        return st;
    if (st == ST_OK && replaces && do_fsync(w->fd) != 0)
        st = FAIL(IO, "%s: %s", w->path, strerror(errno));
    if (close(w->fd) != 0 && st == ST_OK)
        st = FAIL(IO, "%s: %s", w->path, strerror(errno));
    w->fd = -1;
    if (!replaces)
        return st;
    if (st == ST_OK && do_rename(w->temporary, w->target) != 0)
        st = FAIL(IO, "%s: %s", w->path, strerror(errno));
    if (st != ST_OK) {
        unlink(w->temporary);
        return st;
    }
    TRY(folder_of(folder, sizeof folder, w->target));
    int cause = file_flush_folder(folder);
    return cause != 0 ? FAIL(IO, "%s: written, but its folder cannot be flushed: %s", w->path,
                             strerror(cause))
                      : ST_OK;
}

enum status file_write(const char *path, const void *data, size_t bytes)
{
    struct file_writer w;
    TRY(file_begin(&w, path));
    return file_end(&w, file_put(&w, data, bytes));
}

/* A new folder lasts only when the one that holds it is flushed; one that may be written and not be
 * read cannot be. */
static enum status sync_parent(const char *made)
{
    char folder[PATH_MAX];
    TRY(folder_of(folder, sizeof folder, made));
    int cause = file_flush_folder(folder);
    return cause != 0 && cause != EACCES
               ? FAIL(IO, "%s: made, but its folder cannot be flushed: %s", made, strerror(cause))
               : ST_OK;
}

/* One folder of a path. */
static enum status make_dir(const char *path)
{
    struct stat info;
    bool spoiled = should_fail(), made = !spoiled && mkdir(path, 0777) == 0;
    int cause = errno;
    if (!made && (spoiled || (cause != EEXIST && stat(path, &info) != 0)))
        return FAIL(IO, "%s: cannot make the folder: %s", path, strerror(cause));
    if (stat(path, &info) != 0)
        return FAIL(IO, "%s: %s", path, strerror(errno));
    if (!S_ISDIR(info.st_mode))
        return FAIL(IO, "%s: is a file, expected a folder", path);
    return made ? sync_parent(path) : ST_OK;
}

enum status file_make_dirs(const char *path)
{
    char part[PATH_MAX];
    TRY(path_join(part, sizeof part, "", path));
    if (part[0] == '\0')
        return FAIL(IO, "the name of a folder is empty");
    for (char *end = part + 1;; end++) {
        if (*end != '/' && *end != '\0')
            continue;
        char kept = *end;
        *end = '\0';
        TRY(make_dir(part));
        if (kept == '\0')
            return ST_OK;
        *end = kept;
    }
}

enum status file_make_folder_of(const char *path)
{
    char folder[PATH_MAX] = ".";
    const char *end = strrchr(path, '/');
    if (end != NULL && end - path >= PATH_MAX)
        return FAIL(IO, "%.80s...: %s", path, strerror(ENAMETOOLONG));
    if (end != NULL)
        snprintf(folder, sizeof folder, "%.*s", end == path ? 1 : (int)(end - path), path);
    TRY(file_make_dirs(folder));
    if (access(folder, W_OK) != 0)
        return FAIL(IO, "%s: cannot write in its folder: %s", path, strerror(errno));
    return ST_OK;
}

/* ---- logs ------------------------------------------------------------------------------------ */

static enum status open_log(struct file_log *log, const char *path, int flags)
{
    log->fd = -1;
    TRY(path_join(log->path, sizeof log->path, "", path));
    log->fd = do_open(path, O_WRONLY | O_CREAT | O_APPEND | flags);
    if (log->fd < 0)
        return FAIL(IO, "%s: %s", path, strerror(errno));
    return ST_OK;
}

enum status file_log_open(struct file_log *log, const char *path)
{
    return open_log(log, path, O_TRUNC);
}

enum status file_log_reopen(struct file_log *log, const char *path)
{
    return open_log(log, path, 0);
}

enum status file_log_cut(struct file_log *log, size_t bytes)
{
    if (should_fail() || ftruncate(log->fd, (off_t)bytes) != 0)
        return FAIL(IO, "%s: %s", log->path, strerror(errno));
    return ST_OK;
}

enum status file_log_append(struct file_log *log, const char *record, size_t bytes)
{
    ASSERT(log->fd >= 0);
    off_t start = lseek(log->fd, 0, SEEK_END); /* -1 for a pipe, which cannot be cut */
    ssize_t n = do_write(log->fd, record, bytes);
    if (n == (ssize_t)bytes)
        return ST_OK;
    int cause = errno;
    const char *cut = "";
    if (n > 0 && (start < 0 || ftruncate(log->fd, start) != 0))
        cut = "; the last record is incomplete";
    if (n < 0)
        return FAIL(IO, "%s: %s", log->path, strerror(cause));
    return FAIL(IO, "%s: only %zd of %zu bytes could be written (disk full, or over a limit)%s",
                log->path, n, bytes, cut);
}

enum status file_log_close(struct file_log *log)
{
    enum status st = ST_OK;
    if (log->fd < 0 || log->path[0] == '\0') /* a zeroed log never opened either */
        return ST_OK;
    if (do_fsync(log->fd) != 0)
        st = FAIL(IO, "%s: %s", log->path, strerror(errno));
    if (close(log->fd) != 0 && st == ST_OK)
        st = FAIL(IO, "%s: %s", log->path, strerror(errno));
    log->fd = -1;
    return st;
}

enum status path_join(char *out, size_t out_bytes, const char *dir, const char *name)
{
    size_t len = strlen(dir);
    bool slash = len > 0 && dir[len - 1] != '/' && name[0] != '\0';
    int used = snprintf(out, out_bytes, "%s%s%s", dir, slash ? "/" : "", name);
    if (used < 0 || (size_t)used >= out_bytes)
        return FAIL(INVALID, "%s%s%s: the path is too long", dir, slash ? "/" : "", name);
    return ST_OK;
}
