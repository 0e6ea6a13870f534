#include "tests/support/support.h"

#include <dirent.h>
#include <ftw.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/base/arena.h"
#include "engine/base/file.h"

void assert_status_is(enum status got, enum status want, const char *call, const char *file,
                      int line)
{
    if (got == want)
        return;
    print_error("%s: expected %s, got %s\n", call, status_name(want), status_name(got));
    if (got != ST_OK)
        print_error("message: %s\n", status_message());
    _fail(file, line);
}

void assert_message_has(const char *text, const char *file, int line)
{
    if (strstr(status_message(), text) != NULL)
        return;
    print_error("expected a message with: %s\nmessage: %s\n", text, status_message());
    _fail(file, line);
}

void assert_aborts_at(void (*function)(void *), void *argument, const char *file, int line)
{
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        const struct rlimit no_core = {0, 0};
        setrlimit(RLIMIT_CORE, &no_core);
        signal(SIGABRT, SIG_DFL);
        if (freopen("/dev/null", "w", stderr) == NULL)
            _exit(2);
        function(argument);
        _exit(0);
    }
    int state = 0;
    if (child < 0 || waitpid(child, &state, 0) != child)
        _fail(file, line);
    if (WIFSIGNALED(state) && WTERMSIG(state) == SIGABRT)
        return;
    print_error("expected an assertion failure, got wait status %#x\n", (unsigned)state);
    _fail(file, line);
}

static struct scratch said_folder;
static int said_before = -1;

void said_begin(void)
{
    assert_int_equal(said_before, -1);
    scratch_make(&said_folder);
    said_before = dup(STDERR_FILENO);
    assert_true(said_before >= 0);
    assert_non_null(freopen(scratch_at(&said_folder, "said"), "w", stderr));
}

void said_end(struct file_text *said)
{
    fflush(stderr);
    assert_true(dup2(said_before, STDERR_FILENO) >= 0);
    close(said_before);
    said_before = -1;
    assert_ok(file_read(said, scratch_at(&said_folder, "said")));
    scratch_remove(&said_folder);
}

uint64_t test_seed(void)
{
    const char *text = getenv("TEST_SEED");
    uint64_t seed = text != NULL ? strtoull(text, NULL, 0) : 20240607;
    print_message("TEST_SEED=%llu\n", (unsigned long long)seed);
    return seed;
}

/* SplitMix64: Steele et al., "Fast splittable pseudorandom number generators", 2014. */
uint64_t test_random(uint64_t *state)
{
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

int test_kills(int otherwise)
{
    const char *text = getenv("TEST_KILLS");
    long kills = text != NULL ? strtol(text, NULL, 10) : 0;
    return kills > 0 && kills < 100000 ? (int)kills : otherwise;
}

size_t test_resident_bytes(void)
{
    unsigned long total = 0, resident = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    ASSERT(f != NULL);
    int found = fscanf(f, "%lu %lu", &total, &resident);
    ASSERT(found == 2);
    fclose(f);
    return resident * (size_t)sysconf(_SC_PAGESIZE);
}

void scratch_make(struct scratch *scratch)
{
    const char *base = getenv("TMPDIR");
    int used = snprintf(scratch->dir, sizeof scratch->dir, "%s/tessera-test-XXXXXX",
                        base != NULL && base[0] != '\0' ? base : "/tmp");
    if (used < 0 || used >= (int)sizeof scratch->dir || mkdtemp(scratch->dir) == NULL)
        fail_msg("cannot make a scratch folder %s", scratch->dir);
}

const char *scratch_path(const struct scratch *scratch, char out[512], const char *name)
{
    int used = snprintf(out, 512, "%s/%s", scratch->dir, name);
    assert_in_range(used, 1, 511);
    return out;
}

const char *scratch_at(const struct scratch *scratch, const char *name)
{
    static char paths[8][512];
    static int next;
    next = (next + 1) % 8;
    return scratch_path(scratch, paths[next], name);
}

bool scratch_same(const struct scratch *scratch, const char *a, const char *b)
{
    struct file_text x = {0}, y = {0};
    assert_ok(file_read(&x, scratch_at(scratch, a)));
    assert_ok(file_read(&y, scratch_at(scratch, b)));
    bool same = x.bytes == y.bytes && memcmp(x.data, y.data, x.bytes) == 0;
    mem_free(&x.data);
    mem_free(&y.data);
    return same;
}

const char *scratch_put(const struct scratch *scratch, char out[512], const char *name,
                        const void *data, size_t bytes)
{
    scratch_path(scratch, out, name);
    FILE *f = fopen(out, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, bytes, f), bytes);
    assert_int_equal(fclose(f), 0);
    return out;
}

int scratch_count(const struct scratch *scratch)
{
    int count = 0;
    DIR *dir = opendir(scratch->dir);
    assert_non_null(dir);
    for (const struct dirent *e = readdir(dir); e != NULL; e = readdir(dir))
        count += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    closedir(dir);
    return count;
}

static int remove_entry(const char *path, const struct stat *info, int kind, struct FTW *where)
{
    (void)info, (void)kind, (void)where;
    return remove(path);
}

void scratch_remove(struct scratch *scratch)
{
    if (scratch->dir[0] != '\0')
        nftw(scratch->dir, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    scratch->dir[0] = '\0';
}

int file_test_set_up(void **state)
{
    static struct file_test t;
    scratch_make(&t.scratch);
    t.live_bytes = mem_live_bytes();
    *state = &t;
    return 0;
}

int file_test_tear_down(void **state)
{
    struct file_test *t = *state;
    file_fail_at(0);
    scratch_remove(&t->scratch);
    return mem_live_bytes() == t->live_bytes ? 0 : -1;
}
