#include "fuzz/fuzz.h"

#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/base/arena.h"
#include "engine/base/log.h"

static char folder[256];
static int64_t live_bytes;

static int remove_entry(const char *path, const struct stat *info, int kind, struct FTW *where)
{
    (void)info, (void)kind, (void)where;
    return remove(path);
}

static void remove_folder(void)
{
    nftw(folder, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

/* In memory where there is such a place: inputs come by the thousand a second. */
static void make_folder(void)
{
    snprintf(folder, sizeof folder, "%s/tessera-fuzz-XXXXXX",
             access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    ASSERT(mkdtemp(folder) != NULL);
    atexit(remove_folder);
}

void fuzz_begin(void)
{
    log_set_level(LOG_ERROR);
    status_clear();
    live_bytes = mem_live_bytes();
}

int fuzz_end(void)
{
    ASSERT(mem_live_bytes() == live_bytes);
    status_clear();
    return 0;
}

enum status fuzz_result(enum status st)
{
    ASSERT(st >= ST_OK && st < ST_COUNT);
    ASSERT(st == ST_OK || status_message()[0] != '\0');
    return st;
}

const char *fuzz_path(char out[FUZZ_PATH_BYTES], const char *name)
{
    if (folder[0] == '\0')
        make_folder();
    int used = snprintf(out, FUZZ_PATH_BYTES, "%s/%s", folder, name);
    ASSERT(used > 0 && used < FUZZ_PATH_BYTES);
    return out;
}

const char *fuzz_put(char out[FUZZ_PATH_BYTES], const char *name, const void *data, size_t bytes)
{
    fuzz_path(out, name);
    int fd = open(out, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    ASSERT(fd >= 0);
    for (size_t done = 0; done < bytes;) {
        ssize_t n = write(fd, (const char *)data + done, bytes - done);
        ASSERT(n > 0);
        done += (size_t)n;
    }
    close(fd);
    return out;
}

uint64_t fuzz_take(const uint8_t **data, size_t *bytes, size_t width)
{
    uint64_t value = 0;
    size_t n = width < *bytes ? width : *bytes;
    memcpy(&value, *data, n < sizeof value ? n : sizeof value);
    *data += n;
    *bytes -= n;
    return value;
}
