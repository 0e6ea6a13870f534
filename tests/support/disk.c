#include "tests/support/disk.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tests/support/support.h"

enum {
    MAX_CALLS = 20000,
    MAX_NODES = 5000,
    MAX_ENTRIES = 64, /* of a folder */
    NAME_BYTES = 80,
    MAX_BYTES = 64 << 20 /* of all that is written */
};

enum kind { CREATE, RENAME, REMOVE, WRITE, TRUNCATE, SYNC };

static const char *const kind_names[] = {"create", "rename", "remove", "write", "truncate", "sync"};

struct call {
    enum kind kind;
    int node;                                /* the file, or the folder whose entries change */
    int child;                               /* CREATE: what is made */
    char name[NAME_BYTES], into[NAME_BYTES]; /* entries; @into: RENAME */
    int64_t offset, bytes;                   /* of the file; TRUNCATE: bytes is the new size */
    int64_t data;                            /* where in journal.data */
};

struct node {
    bool is_folder;
    ino_t number; /* the real one; 0: it was removed */
};

/* One for the process, as the calls are the process's. */
static struct {
    pthread_mutex_t mutex;
    bool watching;
    struct call calls[MAX_CALLS];
    int count, at_start; /* the first calls build what was there when the watch began */
    struct node nodes[MAX_NODES];
    int node_count;
    char data[MAX_BYTES];
    int64_t data_bytes;
} journal = {.mutex = PTHREAD_MUTEX_INITIALIZER};

/* ---- the journal ----------------------------------------------------------------------------- */

static struct call *append(enum kind kind, int node)
{
    ASSERT(journal.count < MAX_CALLS);
    struct call *c = &journal.calls[journal.count++];
    memset(c, 0, sizeof *c);
    c->kind = kind;
    c->node = node;
    return c;
}

static int add_node(ino_t number, bool is_folder)
{
    ASSERT(journal.node_count < MAX_NODES);
    journal.nodes[journal.node_count] = (struct node){is_folder, number};
    return journal.node_count++;
}

/* -1: not watched. The newest one has the number; an earlier one was removed. */
static int node_of(ino_t number)
{
    for (int i = journal.node_count; i-- > 0;)
        if (journal.nodes[i].number == number)
            return i;
    return -1;
}

static int node_at(int folder, const char *path)
{
    struct stat info;
    return journal.watching && fstatat(folder, path, &info, AT_SYMLINK_NOFOLLOW) == 0
               ? node_of(info.st_ino)
               : -1;
}

static int node_of_fd(int fd)
{
    struct stat info;
    return journal.watching && fstat(fd, &info) == 0 ? node_of(info.st_ino) : -1;
}

/* The folder that holds @path, and the name in it. */
static int parent_of(int folder, const char *path, char name[NAME_BYTES])
{
    char parent[PATH_MAX];
    const char *slash = strrchr(path, '/');
    const char *last = slash != NULL ? slash + 1 : path;
    size_t length = slash != NULL ? (size_t)(slash - path) : 0;
    ASSERT(length < sizeof parent);
    memcpy(parent, path, length);
    parent[length] = '\0';
    int node = node_at(folder, slash == path ? "/" : parent[0] != '\0' ? parent : ".");
    ASSERT(node < 0 || (strlen(last) > 0 && strlen(last) < NAME_BYTES));
    snprintf(name, NAME_BYTES, "%.*s", NAME_BYTES - 1, last);
    return node;
}

static void append_data(int node, int64_t offset, const void *data, size_t bytes)
{
    struct call *c = append(WRITE, node);
    ASSERT(journal.data_bytes + (int64_t)bytes <= MAX_BYTES);
    c->offset = offset;
    c->bytes = (int64_t)bytes;
    c->data = journal.data_bytes;
    memcpy(journal.data + c->data, data, bytes);
    journal.data_bytes += (int64_t)bytes;
}

static void append_create(int parent, const char *name, bool is_folder, ino_t number)
{
    int child = add_node(number, is_folder);
    struct call *c = append(CREATE, parent);
    c->child = child;
    memcpy(c->name, name, NAME_BYTES);
}

/* What is there already, as calls, with an fsync each. */
static void take_folder(int node, const char *path)
{
    DIR *folder = opendir(path);
    ASSERT(folder != NULL);
    for (struct dirent *e; (e = readdir(folder)) != NULL;) {
        struct stat info;
        char below[PATH_MAX], name[NAME_BYTES] = "";
        static char data[1 << 20];
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
            continue;
        ASSERT(snprintf(below, sizeof below, "%s/%s", path, e->d_name) < (int)sizeof below);
        ASSERT(strlen(e->d_name) < NAME_BYTES && lstat(below, &info) == 0);
        memcpy(name, e->d_name, strlen(e->d_name));
        append_create(node, name, S_ISDIR(info.st_mode), info.st_ino);
        int child = journal.node_count - 1;
        if (S_ISDIR(info.st_mode)) {
            take_folder(child, below);
            continue;
        }
        int fd = (int)syscall(SYS_openat, AT_FDCWD, below, O_RDONLY, 0);
        ssize_t n = read(fd, data, sizeof data);
        ASSERT(n == info.st_size);
        close(fd);
        append_data(child, 0, data, (size_t)n);
        append(SYNC, child);
    }
    closedir(folder);
    append(SYNC, node);
}

void disk_watch(const char *root)
{
    struct stat info;
    ASSERT(stat(root, &info) == 0);
    journal.count = journal.node_count = 0;
    journal.data_bytes = 0;
    take_folder(add_node(info.st_ino, true), root);
    journal.at_start = journal.count;
    journal.watching = true;
}

void disk_unwatch(void)
{
    journal.watching = false;
}

int disk_calls(void)
{
    pthread_mutex_lock(&journal.mutex);
    int count = journal.count - journal.at_start;
    pthread_mutex_unlock(&journal.mutex);
    return count;
}

const char *disk_call_name(int call)
{
    static char text[3 * NAME_BYTES];
    const struct call *c = &journal.calls[journal.at_start + call];
    snprintf(text, sizeof text, "%s of %d %s %s", kind_names[c->kind], c->node, c->name, c->into);
    return text;
}

/* ---- the calls ------------------------------------------------------------------------------- */

/* Calls that are not watched run side by side. */
static bool begin_call(void)
{
    pthread_mutex_lock(&journal.mutex);
    if (journal.watching)
        return true;
    pthread_mutex_unlock(&journal.mutex);
    return false;
}

static void end_call(bool watched)
{
    int kept = errno;
    if (watched)
        pthread_mutex_unlock(&journal.mutex);
    errno = kept;
}

int disk_open(const char *path, int flags, mode_t mode)
{
    bool watched = begin_call();
    char name[NAME_BYTES];
    struct stat info;
    int parent = watched && (flags & O_CREAT) != 0 ? parent_of(AT_FDCWD, path, name) : -1;
    bool is_new = parent >= 0 && fstatat(AT_FDCWD, path, &info, AT_SYMLINK_NOFOLLOW) != 0;
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
    if (fd >= 0 && is_new && fstat(fd, &info) == 0)
        append_create(parent, name, false, info.st_ino);
    int node = watched && fd >= 0 && (flags & O_TRUNC) != 0 && !is_new ? node_of_fd(fd) : -1;
    if (node >= 0)
        append(TRUNCATE, node);
    end_call(watched);
    return fd;
}

ssize_t disk_write(int fd, const void *data, size_t bytes)
{
    bool watched = begin_call();
    int node = watched ? node_of_fd(fd) : -1;
    int64_t offset = 0;
    if (node >= 0)
        offset =
            (fcntl(fd, F_GETFL) & O_APPEND) != 0 ? lseek(fd, 0, SEEK_END) : lseek(fd, 0, SEEK_CUR);
    ssize_t n = syscall(SYS_write, fd, data, bytes);
    if (node >= 0 && n > 0)
        append_data(node, offset, data, (size_t)n);
    end_call(watched);
    return n;
}

ssize_t disk_pwrite(int fd, const void *data, size_t bytes, off_t offset)
{
    bool watched = begin_call();
    int node = watched ? node_of_fd(fd) : -1;
    ssize_t n = syscall(SYS_pwrite64, fd, data, bytes, offset);
    if (node >= 0 && n > 0)
        append_data(node, offset, data, (size_t)n);
    end_call(watched);
    return n;
}

int disk_ftruncate(int fd, off_t bytes)
{
    bool watched = begin_call();
    int node = watched ? node_of_fd(fd) : -1;
    int failed = (int)syscall(SYS_ftruncate, fd, bytes);
    if (node >= 0 && failed == 0)
        append(TRUNCATE, node)->bytes = bytes;
    end_call(watched);
    return failed;
}

int disk_fsync(int fd)
{
    bool watched = begin_call();
    int node = watched ? node_of_fd(fd) : -1;
    int failed = fcntl(fd, F_GETFD) < 0 ? -1 : 0;
    if (node >= 0)
        append(SYNC, node);
    end_call(watched);
    return failed;
}

int disk_mkdir(const char *path, mode_t mode)
{
    bool watched = begin_call();
    char name[NAME_BYTES];
    struct stat info;
    int parent = watched ? parent_of(AT_FDCWD, path, name) : -1;
    int failed = (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);
    if (parent >= 0 && failed == 0 && lstat(path, &info) == 0)
        append_create(parent, name, true, info.st_ino);
    end_call(watched);
    return failed;
}

int disk_rename(const char *from, const char *to)
{
    bool watched = begin_call();
    char old_name[NAME_BYTES], new_name[NAME_BYTES];
    int parent = watched ? parent_of(AT_FDCWD, from, old_name) : -1;
    int into = watched ? parent_of(AT_FDCWD, to, new_name) : -1;
    int replaced = into >= 0 ? node_at(AT_FDCWD, to) : -1;
    ASSERT(parent == into); /* a move between folders is not modelled */
    int failed = (int)syscall(SYS_renameat, AT_FDCWD, from, AT_FDCWD, to);
    if (parent >= 0 && failed == 0) {
        struct call *c = append(RENAME, parent);
        memcpy(c->name, old_name, NAME_BYTES);
        memcpy(c->into, new_name, NAME_BYTES);
        if (replaced >= 0)
            journal.nodes[replaced].number = 0;
    }
    end_call(watched);
    return failed;
}

int disk_unlinkat(int folder, const char *path, int flags)
{
    bool watched = begin_call();
    char name[NAME_BYTES];
    int parent = watched ? parent_of(folder, path, name) : -1;
    int removed = parent >= 0 ? node_at(folder, path) : -1;
    int failed = (int)syscall(SYS_unlinkat, folder, path, flags);
    if (removed >= 0 && failed == 0) {
        memcpy(append(REMOVE, parent)->name, name, NAME_BYTES);
        journal.nodes[removed].number = 0;
    }
    end_call(watched);
    return failed;
}

/* ---- after the cut --------------------------------------------------------------------------- */

static int choose(struct disk_choices *c, int options)
{
    ASSERT(c->count < DISK_CHOICES);
    int i = c->count++;
    c->options[i] = options;
    if (c->random != NULL)
        c->picked[i] = (int)(test_random(c->random) % (uint64_t)options);
    else if (i >= c->given)
        c->picked[i] = 0;
    return c->picked[i];
}

bool disk_next(struct disk_choices *c)
{
    while (c->count > 0 && c->picked[c->count - 1] + 1 >= c->options[c->count - 1])
        c->count--;
    c->given = c->count;
    if (c->count == 0)
        return false;
    c->picked[c->count - 1]++;
    return true;
}

/* Calls on a node from its last SYNC on, among the first @end. */
static int synced(int node, int end)
{
    for (int i = end; i-- > 0;)
        if (journal.calls[i].kind == SYNC && journal.calls[i].node == node)
            return i;
    return -1;
}

enum { LOST, WHOLE, HALF, ZEROS, FATES };

static void write_file(const char *path, int node, int end, struct disk_choices *choices)
{
    static const char zeros[1 << 16];
    int safe = synced(node, end);
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_EXCL, 0666);
    assert_true(fd >= 0);
    for (int i = 0; i < end; i++) {
        const struct call *c = &journal.calls[i];
        if (c->node != node || (c->kind != WRITE && c->kind != TRUNCATE))
            continue;
        int fate = i < safe ? WHOLE : choose(choices, c->kind == WRITE ? FATES : 2);
        if (fate == LOST)
            continue;
        if (c->kind == TRUNCATE) {
            assert_int_equal(syscall(SYS_ftruncate, fd, c->bytes), 0);
            continue;
        }
        int64_t bytes = fate == HALF ? c->bytes / 2 : c->bytes;
        for (int64_t done = 0, n; done < bytes; done += n) {
            n = bytes - done < (int64_t)sizeof zeros ? bytes - done : (int64_t)sizeof zeros;
            assert_int_equal(syscall(SYS_pwrite64, fd,
                                     fate == ZEROS ? zeros : journal.data + c->data + done, n,
                                     c->offset + done),
                             n);
        }
    }
    close(fd);
}

struct entry {
    char name[NAME_BYTES];
    int node;
};

static int find_entry(const struct entry *entries, int count, const char *name)
{
    int i = 0;
    while (i < count && strcmp(entries[i].name, name) != 0)
        i++;
    return i;
}

/* The entries after the first @changes changes. */
static int list_entries(struct entry *entries, int folder, int changes)
{
    int count = 0;
    for (int i = 0; changes > 0; i++) {
        const struct call *c = &journal.calls[i];
        if (c->node != folder || c->kind > REMOVE)
            continue;
        changes--;
        int at = find_entry(entries, count, c->name);
        int node = c->kind == CREATE ? c->child : at < count ? entries[at].node : -1;
        const char *name = c->kind == RENAME ? c->into : c->name;
        if (c->kind != CREATE) { /* the entry goes */
            ASSERT(at < count);
            entries[at] = entries[--count];
        }
        if (c->kind == REMOVE)
            continue;
        at = find_entry(entries, count, name);
        ASSERT(at < MAX_ENTRIES);
        count += at == count;
        memcpy(entries[at].name, name, NAME_BYTES);
        entries[at].node = node;
    }
    return count;
}

static void write_folder(const char *path, int node, int end, struct disk_choices *choices)
{
    struct entry entries[MAX_ENTRIES];
    char below[PATH_MAX];
    int safe = synced(node, end), kept = 0, pending = 0;
    assert_int_equal(syscall(SYS_mkdirat, AT_FDCWD, path, 0777), 0);
    for (int i = 0; i < end; i++)
        if (journal.calls[i].node == node && journal.calls[i].kind <= REMOVE)
            *(i < safe ? &kept : &pending) += 1;
    int count = list_entries(entries, node, kept + choose(choices, pending + 1));
    for (int i = 0; i < count; i++) {
        assert_true(snprintf(below, sizeof below, "%s/%s", path, entries[i].name) <
                    (int)sizeof below);
        if (journal.nodes[entries[i].node].is_folder)
            write_folder(below, entries[i].node, end, choices);
        else
            write_file(below, entries[i].node, end, choices);
    }
}

void disk_cut(const char *to, int calls, struct disk_choices *choices)
{
    choices->count = 0;
    write_folder(to, 0, journal.at_start + calls, choices);
}
