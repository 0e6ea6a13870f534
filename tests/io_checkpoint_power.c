/*
 * Checkpoints and the power: after a cut at any call of a save, in any state that a disk may then
 * be found in, the newest published checkpoint is there and whole, and so is all that is not ours.
 */
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/base/file.h"
#include "engine/base/log.h"
#include "io/checkpoint.h"
#include "tests/support/disk.h"
#include "tests/support/resume.h"

/* ---- calls that change files ----------------------------------------------------------------- */

/* A program's own function of a name that the C library has too is the one that is called, also by
 * what is linked into it. */
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

static int set_up(void **state)
{
    log_set_level(LOG_ERROR);
    return resume_set_up(state);
}

/* ---- saves whose values tell which save they are of ------------------------------------------ */

enum { NUMEL = 600, WRITERS = 2, PART = NUMEL / WRITERS, SAVES = 8, CHECKPOINTS_BYTES = 600 };

static const struct checkpoint_tensor table[] = {
    {.name = "w", .dims = 1, .shape = {NUMEL}, .states = {"master"}, .state_count = 1}};

static float value(int mark, int64_t i)
{
    return (float)mark + 0.25f * (float)(i % 7);
}

static void save(const char *dir, int64_t step, int mark)
{
    char temp[CHECKPOINT_PATH_BYTES] = "";
    struct checkpoint_file files[WRITERS];
    assert_ok(checkpoint_begin(temp, dir, step));
    for (int w = 0; w < WRITERS; w++) {
        struct checkpoint_writer writer = {0};
        float x[PART];
        for (int64_t i = 0; i < PART; i++)
            x[i] = value(mark, w * PART + i);
        assert_ok(checkpoint_writer_open(&writer, temp, w, NULL));
        assert_ok(checkpoint_write_range(&writer, "master", "w", w * PART, x, PART));
        assert_ok(checkpoint_writer_close(&writer, &files[w]));
    }
    struct checkpoint_manifest m = {step, table, 1, files, WRITERS, NULL};
    assert_ok(checkpoint_publish(NULL, dir, temp, &m));
}

static int mark_of(const char *path)
{
    struct checkpoint c = {0};
    struct checkpoint_reader r = {0};
    float x[NUMEL];
    assert_ok(checkpoint_open(&c, path));
    assert_ok(checkpoint_verify(&c, NULL, NULL));
    assert_ok(checkpoint_reader_open(&r, &c));
    assert_ok(checkpoint_read_range(&r, "master", "w", 0, NUMEL, x));
    int mark = (int)x[0];
    for (int64_t i = 0; i < NUMEL; i++)
        assert_true(x[i] == value(mark, i));
    checkpoint_reader_close(&r);
    checkpoint_close(&c);
    return mark;
}

/* ---- what has to be found -------------------------------------------------------------------- */

/* A save of a scenario: begun before call @begun, published when call @done was made. */
struct saved {
    int64_t step;
    int mark, begun, done;
};

struct scenario {
    char root[512], dir[CHECKPOINTS_BYTES]; /* the latter of all checkpoints, in the former */
    const char *below;                      /* the same, relative to the root */
    struct saved saves[SAVES];
    int count;
    int states, cuts;
};

static void save_watched(struct scenario *s, int64_t step, int mark)
{
    struct saved *now = &s->saves[s->count++];
    *now = (struct saved){step, mark, disk_calls(), 0};
    save(s->dir, step, mark);
    now->done = disk_calls();
}

/* The newest step that was published before the cut has at least to be there. */
static int64_t promised_step(const struct scenario *s, int calls)
{
    int64_t step = -1;
    for (int i = 0; i < s->count; i++)
        if (s->saves[i].done <= calls && s->saves[i].step > step)
            step = s->saves[i].step;
    return step;
}

/* It is the last one of its step that was published, or the one that was on its way. */
static bool may_be(const struct scenario *s, int calls, int64_t step, int mark)
{
    bool allowed = false;
    for (int i = 0; i < s->count; i++) {
        const struct saved *it = &s->saves[i];
        if (it->step == step && it->done <= calls)
            allowed = it->mark == mark;
        else if (it->step == step && it->begun <= calls)
            allowed |= it->mark == mark;
    }
    return allowed;
}

static const char *const users_files[] = {"notes.txt", "mine/step-00000001/manifest.json",
                                          ".tmp-step-00000009-1-1/notes.txt"};

static void put_users_files(const char *root)
{
    for (size_t i = 0; i < sizeof users_files / sizeof *users_files; i++) {
        char path[1200], folder[1200];
        snprintf(path, sizeof path, "%s/%s", root, users_files[i]);
        snprintf(folder, sizeof folder, "%.*s", (int)(strrchr(path, '/') - path), path);
        assert_ok(file_make_dirs(folder));
        assert_ok(file_write(path, users_files[i], strlen(users_files[i])));
    }
}

static void check_users_files(const char *root)
{
    for (size_t i = 0; i < sizeof users_files / sizeof *users_files; i++) {
        char path[1200];
        struct file_text text;
        snprintf(path, sizeof path, "%s/%s", root, users_files[i]);
        assert_ok(file_read(&text, path));
        assert_string_equal(text.data, users_files[i]);
        mem_free(&text.data);
    }
}

/* What is half removed is not there either. */
static void check_none_is_damaged(const char *dir)
{
    struct checkpoint_list list = {0};
    assert_ok(checkpoint_list(&list, dir));
    for (int i = 0; i < list.count; i++)
        assert_string_equal(list.entries[i].problem, "");
    checkpoint_list_release(&list);
}

static void find(struct checkpoint_found *found, int *mark, const struct scenario *s,
                 const char *dir, int calls)
{
    assert_ok(checkpoint_find_latest(found, dir, INT64_MAX));
    *mark = found->step >= 0 ? mark_of(found->path) : -1;
    if (found->damaged == 0 && found->step >= promised_step(s, calls) &&
        (found->step < 0 || may_be(s, calls, found->step, *mark)))
        return;
    fail_msg("cut after call %d (%s): found step %lld of save %d, %d damaged; step %lld was "
             "published",
             calls, calls > 0 ? disk_call_name(calls - 1) : "", (long long)found->step, *mark,
             found->damaged, (long long)promised_step(s, calls));
}

static void check_state(struct scenario *s, int calls, struct disk_choices *choices, bool users)
{
    char dir[CHECKPOINTS_BYTES];
    struct scratch cut;
    struct checkpoint_found found, again;
    int mark, mark_again;
    snprintf(cut.dir, sizeof cut.dir, "%.240s/cut", group.scratch.dir);
    snprintf(dir, sizeof dir, "%s/%s", cut.dir, s->below);
    disk_cut(cut.dir, calls, choices);
    s->states++;
    find(&found, &mark, s, dir, calls);
    check_none_is_damaged(dir);
    assert_ok(checkpoint_sweep(dir));
    find(&again, &mark_again, s, dir, calls);
    assert_int_equal(again.step, found.step);
    assert_int_equal(mark_again, mark);
    if (users)
        check_users_files(dir);
    if (s->states % 8 == 0) { /* and saving goes on */
        save(dir, found.step + 1, 77);
        assert_ok(checkpoint_find_latest(&again, dir, INT64_MAX));
        assert_int_equal(again.step, found.step + 1);
        assert_int_equal(mark_of(again.path), 77);
    }
    scratch_remove(&cut);
}

/* All states of a cut if they are few, else the first ones and some that are drawn. */
static void cut_everywhere(struct scenario *s, bool users)
{
    enum { WALKED = 12, DRAWN = 8 };
    uint64_t random = test_seed();
    static struct disk_choices choices;
    int end = disk_calls();
    disk_unwatch();
    for (int calls = 0; calls <= end; calls++) {
        bool more = true;
        memset(&choices, 0, sizeof choices);
        for (int i = 0; more && i < WALKED; i++) {
            check_state(s, calls, &choices, users);
            more = disk_next(&choices);
        }
        choices = (struct disk_choices){.random = &random};
        for (int i = 0; more && i < DRAWN; i++)
            check_state(s, calls, &choices, users);
        s->cuts++;
    }
    print_message("%d calls, %d states\n", s->cuts, s->states);
}

static void open_scenario(struct scenario *s, const char *name, const char *below)
{
    memset(s, 0, sizeof *s);
    s->below = below;
    scratch_path(&group.scratch, s->root, name);
    snprintf(s->dir, sizeof s->dir, "%s/%s", s->root, below);
    assert_ok(file_make_dirs(s->root));
}

static void b69_the_first_saves_survive_a_power_cut_once_they_are_published(void **state)
{
    (void)state;
    struct scenario s;
    open_scenario(&s, "first", "runs/one/checkpoints");
    disk_watch(s.root);
    save_watched(&s, 1, 1);
    save_watched(&s, 2, 2);
    cut_everywhere(&s, false);
}

static void b69_b72_replacing_and_removing_survive_a_power_cut(void **state)
{
    (void)state;
    struct scenario s;
    open_scenario(&s, "later", "checkpoints");
    save(s.dir, 1, 1);
    save(s.dir, 2, 2);
    put_users_files(s.dir);
    disk_watch(s.root);
    s.saves[s.count++] = (struct saved){1, 1, -1, 0};
    s.saves[s.count++] = (struct saved){2, 2, -1, 0};
    save_watched(&s, 3, 3);
    save_watched(&s, 3, 4);
    assert_ok(checkpoint_remove_old(s.dir, 1, NULL));
    save_watched(&s, 5, 5);
    assert_ok(checkpoint_sweep(s.dir));
    cut_everywhere(&s, true);
}

/* ---- a whole run ----------------------------------------------------------------------------- */

enum { TOTAL = 4, RANKS = 2, STATES_RESUMED = 12 };

static struct run_trace whole, broken, resumed;
static int calls_at[TOTAL + 1]; /* calls made when the save of a step was over */

static void note_calls(void *context, const struct program *p, int index,
                       const size_t live[CATEGORY_COUNT])
{
    const struct trainer *t = context;
    const struct step_state *s = executor_shared(&t->executor, SHARED_STATE);
    (void)live;
    if (p->kind == PROGRAM_STEP && index == 0 && t->comm->rank == 0 && s->host.step <= TOTAL)
        calls_at[s->host.step] = disk_calls();
}

static int release(void **state)
{
    (void)state;
    disk_unwatch();
    run_release(&whole);
    run_release(&broken);
    run_release(&resumed);
    return 0;
}

static void b69_a_run_goes_on_to_the_bit_after_a_power_cut(void **state)
{
    (void)state;
    char root[512], below[600];
    uint64_t random = test_seed();
    static struct disk_choices choices;
    struct run_config plain = resume_tiny("plain", RANKS, 2, TOTAL, 0), saving;
    saving = resume_tiny("power/run", RANKS, 3, TOTAL, 1);
    saving.checkpoint.async = false;
    saving.checkpoint.keep = 1;
    scratch_path(&group.scratch, root, "power");
    assert_ok(file_make_dirs(root));
    run_ok(&whole, &plain, NULL);
    disk_watch(root);
    run_ok(&broken, &saving, &(struct run_how){.loud = true, .executor = {.on_instr = note_calls}});
    int end = disk_calls();
    disk_unwatch();
    for (int i = 0; i < STATES_RESUMED; i++) {
        struct scratch cut;
        int calls = i == 0
                        ? end
                        : calls_at[1] + (int)(test_random(&random) % (uint64_t)(end - calls_at[1]));
        int64_t promised = 1;
        while (promised < TOTAL - 1 && calls_at[promised + 1] <= calls)
            promised++;
        choices = (struct disk_choices){.random = &random};
        snprintf(cut.dir, sizeof cut.dir, "%.240s/cut", group.scratch.dir);
        disk_cut(cut.dir, calls, &choices);
        struct run_config c = resume_tiny("cut/run", RANKS, i % 4, TOTAL, 1);
        resume_latest(&c);
        run_ok(&resumed, &c, &(struct run_how){.loud = true});
        assert_in_range(TOTAL - resumed.steps, promised, TOTAL);
        resume_same_rest(&whole, &resumed, TOTAL - resumed.steps, 0, "after a power cut");
        resume_same_state(&whole, &resumed, "after a power cut");
        snprintf(below, sizeof below, "%s/run/metrics.jsonl", cut.dir);
        assert_int_equal(access(below, F_OK), 0);
        run_release(&resumed);
        scratch_remove(&cut);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(b69_the_first_saves_survive_a_power_cut_once_they_are_published),
        cmocka_unit_test(b69_b72_replacing_and_removing_survive_a_power_cut),
        cmocka_unit_test_teardown(b69_a_run_goes_on_to_the_bit_after_a_power_cut, release),
    };
    return cmocka_run_group_tests(tests, set_up, run_tear_down);
}
