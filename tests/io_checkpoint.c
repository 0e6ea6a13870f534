/* Checkpoints: what is written is what is read, or a named error. */
#include "io/checkpoint.h"

#include <fcntl.h>
#include <jansson.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "engine/base/file.h"
#include "tests/support/support.h"

struct fixture {
    struct scratch scratch;
    uint64_t seed;
    int64_t live_bytes;
};

static int set_up(void **state)
{
    static struct fixture f;
    scratch_make(&f.scratch);
    f.live_bytes = mem_live_bytes();
    f.seed = test_seed();
    *state = &f;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *f = *state;
    file_fail_at(0);
    scratch_remove(&f->scratch);
    return mem_live_bytes() == f->live_bytes ? 0 : -1; /* no test leaks */
}

static int64_t below(struct fixture *f, int64_t n)
{
    return (int64_t)(test_random(&f->seed) % (uint64_t)n);
}

/* Any bits: NaNs of all kinds, infinities, denormals and zeros of both signs are among them. */
static void fill_any(struct fixture *f, float *out, int64_t n)
{
    static const uint32_t special[] = {0x7FC00000, 0xFFC12345, 0x7F800001, 0x7F800000, 0xFF800000,
                                       0x00000001, 0x80000001, 0x007FFFFF, 0x80000000, 0};
    for (int64_t i = 0; i < n; i++) {
        uint64_t r = test_random(&f->seed);
        uint32_t word = r % 8 == 0 ? special[(r >> 8) % 10] : (uint32_t)(r >> 32);
        memcpy(out + i, &word, 4);
    }
}

/* Bell-shaped values, as weights are. */
static void fill_weights(struct fixture *f, float *out, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        double sum = -6;
        for (int k = 0; k < 12; k++)
            sum += (double)(test_random(&f->seed) >> 40) / (1 << 24);
        out[i] = (float)(0.02 * sum);
    }
}

/* ---- a small model --------------------------------------------------------------------------- */

enum { TENSORS = 4, STATES = 3, MAX_NUMEL = 3000 };

static const char *const state_names[STATES] = {"master", "adam_m", "adam_v"};

struct small {
    struct checkpoint_tensor tensors[TENSORS];
    float values[TENSORS][STATES][MAX_NUMEL];
};

static void make_small(struct fixture *f, struct small *s)
{
    static const struct checkpoint_tensor table[TENSORS] = {
        {.name = "bert.embeddings.word_embeddings.weight", .dims = 2, .shape = {100, 30}},
        {.name = "b", .dims = 1, .shape = {1}},
        {.name = "a.\"odd\" \xC3\xA9", .dims = 3, .shape = {3, 5, 7}},
        {.name = "scalar", .dims = 0}};
    memcpy(s->tensors, table, sizeof table);
    for (int t = 0; t < TENSORS; t++) {
        s->tensors[t].state_count = t == 2 ? 1 : STATES; /* one is frozen */
        s->tensors[t].numel = 1;
        for (int i = 0; i < s->tensors[t].dims; i++)
            s->tensors[t].numel *= s->tensors[t].shape[i];
        for (int k = 0; k < STATES; k++) {
            s->tensors[t].states[k] = state_names[k];
            fill_any(f, s->values[t][k], s->tensors[t].numel);
        }
    }
}

struct piece {
    int tensor, state;
    int64_t first, numel;
};

/* Every state of every tensor cut into random pieces, in random order. */
static int cut_small(struct fixture *f, const struct small *s, struct piece *pieces, int max_numel)
{
    int count = 0;
    for (int t = 0; t < TENSORS; t++)
        for (int k = 0; k < s->tensors[t].state_count; k++)
            for (int64_t at = 0; at < s->tensors[t].numel;) {
                int64_t n = 1 + below(f, max_numel);
                n = n < s->tensors[t].numel - at ? n : s->tensors[t].numel - at;
                pieces[count++] = (struct piece){t, k, at, n};
                at += n;
            }
    for (int i = count - 1; i > 0; i--) {
        int k = (int)below(f, i + 1);
        struct piece swap = pieces[i];
        pieces[i] = pieces[k];
        pieces[k] = swap;
    }
    return count;
}

enum { MAX_PIECES = 2000, MAX_WRITERS = 7 };

struct save {
    const char *dir;
    int64_t step;
    int writers;
    const struct checkpoint_options *options;
    const struct piece *pieces;
    int piece_count;
    struct json_t *training;
};

/* Deals the pieces to the writers and publishes; everything that may fail is passed on. */
static enum status save(const struct small *s, const struct save *how)
{
    enum status st;
    char temp[CHECKPOINT_PATH_BYTES] = "";
    static struct checkpoint_writer w[MAX_WRITERS];
    struct checkpoint_file files[MAX_WRITERS];
    memset(w, 0, sizeof w);
    memset(files, 0, sizeof files);
    TRY(checkpoint_begin(temp, how->dir, how->step));
    for (int i = 0; i < how->writers; i++)
        TRY_GOTO(st, out, checkpoint_writer_open(&w[i], temp, i, how->options));
    for (int i = 0; i < how->piece_count; i++) {
        const struct piece *p = &how->pieces[i];
        TRY_GOTO(st, out,
                 checkpoint_write_range(&w[i % how->writers], state_names[p->state],
                                        s->tensors[p->tensor].name, p->first,
                                        s->values[p->tensor][p->state] + p->first, p->numel));
    }
    for (int i = 0; i < how->writers; i++)
        TRY_GOTO(st, out, checkpoint_writer_close(&w[i], &files[i]));
    struct checkpoint_manifest m = {how->step, s->tensors,   TENSORS,
                                    files,     how->writers, how->training};
    TRY_GOTO(st, out, checkpoint_publish(NULL, how->dir, temp, &m));
out:
    for (int i = 0; i < how->writers; i++)
        checkpoint_writer_abandon(&w[i]);
    if (st != ST_OK)
        checkpoint_discard(temp);
    return st;
}

/* A checkpoint of the whole in one go. */
static enum status save_plain(struct fixture *f, const struct small *s, int64_t step)
{
    static struct piece pieces[MAX_PIECES];
    int count = cut_small(f, s, pieces, MAX_NUMEL);
    return save(s, &(struct save){f->scratch.dir, step, 2, NULL, pieces, count, NULL});
}

static const char *step_path(struct fixture *f, char out[512], int64_t step)
{
    char name[64];
    snprintf(name, sizeof name, "step-%08lld", (long long)step);
    return scratch_path(&f->scratch, out, name);
}

/* All values, by random ranges. False if a read failed (with a status that is allowed). */
static bool same_values(struct fixture *f, const struct checkpoint *c, const struct small *s)
{
    static float out[MAX_NUMEL];
    struct checkpoint_reader r = {0};
    bool ok = true;
    assert_ok(checkpoint_reader_open(&r, c));
    for (int t = 0; t < TENSORS && ok; t++)
        for (int k = 0; k < s->tensors[t].state_count && ok; k++)
            for (int64_t at = 0; at < s->tensors[t].numel && ok;) {
                int64_t left = s->tensors[t].numel - at, n = 1 + below(f, left);
                enum status st =
                    checkpoint_read_range(&r, state_names[k], s->tensors[t].name, at, n, out);
                if (st == ST_OK)
                    assert_memory_equal(out, s->values[t][k] + at, (size_t)n * 4);
                else
                    assert_int_equal(st, ST_CORRUPT);
                ok = st == ST_OK;
                at += n;
            }
    checkpoint_reader_close(&r);
    return ok;
}

static void assert_same(struct fixture *f, const char *path, const struct small *s)
{
    struct checkpoint c = {0};
    assert_ok(checkpoint_open(&c, path));
    assert_true(same_values(f, &c, s));
    assert_ok(checkpoint_verify(&c, NULL, NULL));
    checkpoint_close(&c);
}

/* ---- round trips ----------------------------------------------------------------------------- */

static void b17_any_ranges_of_any_writers_in_any_order_come_back_to_the_bit(void **state)
{
    struct fixture *f = *state;
    static struct small s;
    static struct piece pieces[MAX_PIECES];
    char path[512];
    make_small(f, &s);
    for (int round = 0; round < 12; round++) {
        int writers = 1 + (int)below(f, MAX_WRITERS);
        int count = cut_small(f, &s, pieces, round % 2 == 0 ? 40 : 2000);
        struct checkpoint_options options = {.level = round % 5 == 0 ? 0 : 1 + round % 4,
                                             .chunk_bytes = 4 * (1 + below(f, 500))};
        if (round % 6 == 5)
            writers = MAX_WRITERS, count = cut_small(f, &s, pieces, MAX_NUMEL);
        assert_ok(save(
            &s, &(struct save){f->scratch.dir, round, writers, &options, pieces, count, NULL}));
        assert_same(f, step_path(f, path, round), &s);
    }
}

static void a_writer_without_ranges_is_fine(void **state)
{
    struct fixture *f = *state;
    static struct small s;
    char path[512];
    make_small(f, &s);
    struct piece pieces[16];
    int count = 0;
    for (int t = 0; t < TENSORS; t++)
        for (int k = 0; k < s.tensors[t].state_count; k++)
            pieces[count++] = (struct piece){t, k, 0, s.tensors[t].numel};
    /* All is written by the first, nothing by the second. */
    struct checkpoint_writer w = {0};
    struct checkpoint_file files[2];
    char temp[CHECKPOINT_PATH_BYTES];
    assert_ok(checkpoint_begin(temp, f->scratch.dir, 3));
    for (int i = 0; i < 2; i++) {
        assert_ok(checkpoint_writer_open(&w, temp, i, NULL));
        for (int k = 0; k < count && i == 0; k++)
            assert_ok(checkpoint_write_range(
                &w, state_names[pieces[k].state], s.tensors[pieces[k].tensor].name, 0,
                s.values[pieces[k].tensor][pieces[k].state], pieces[k].numel));
        assert_ok(checkpoint_writer_close(&w, &files[i]));
    }
    assert_int_equal(files[1].bytes, 64); /* head and footer */
    struct checkpoint_manifest m = {3, s.tensors, TENSORS, files, 2, NULL};
    assert_ok(checkpoint_publish(NULL, f->scratch.dir, temp, &m));
    assert_same(f, step_path(f, path, 3), &s);
}

static void training_state_and_tables_come_back(void **state)
{
    struct fixture *f = *state;
    static struct small s;
    static struct piece pieces[MAX_PIECES];
    char path[512];
    struct checkpoint c = {0};
    make_small(f, &s);
    json_t *training =
        json_pack("{s:I, s:f, s:s, s:[i,i], s:n, s:b}", "position", (json_int_t)1 << 53, "lr",
                  0.1 + 0.2, "text", "\xC3\xA9\n\"", "list", 1, 2, "none", "flag", 1);
    int count = cut_small(f, &s, pieces, MAX_NUMEL);
    assert_ok(save(&s, &(struct save){f->scratch.dir, 42, 2, NULL, pieces, count, training}));
    assert_ok(checkpoint_open(&c, step_path(f, path, 42)));
    assert_int_equal(c.step, 42);
    assert_true(json_equal(c.training, training));
    assert_int_equal(c.tensor_count, TENSORS);
    for (int t = 0; t < TENSORS; t++) {
        const struct checkpoint_tensor *got = checkpoint_find(&c, s.tensors[t].name);
        assert_ptr_equal(got, &c.tensors[t]);
        assert_string_equal(got->name, s.tensors[t].name);
        assert_int_equal(got->dims, s.tensors[t].dims);
        assert_int_equal(got->numel, s.tensors[t].numel);
        for (int k = 0; k < STATES; k++)
            assert_int_equal(checkpoint_has_state(got, state_names[k]), k < got->state_count);
    }
    assert_null(checkpoint_find(&c, "bert"));
    struct checkpoint_reader r = {0};
    float out[2];
    assert_ok(checkpoint_reader_open(&r, &c));
    assert_fails(checkpoint_read_range(&r, "master", "nothing", 0, 1, out), ST_INVALID,
                 "no tensor \"nothing\"");
    assert_fails(checkpoint_read_range(&r, "adam_m", s.tensors[2].name, 0, 1, out), ST_INVALID,
                 "has no state adam_m");
    assert_fails(checkpoint_read_range(&r, "master", "b", 1, 1, out), ST_INVALID, "has 1 elements");
    assert_fails(checkpoint_read_range(&r, "master", "b", INT64_MAX, INT64_MAX, out), ST_INVALID,
                 "has 1 elements");
    assert_ok(checkpoint_read_range(&r, "master", "b", 1, 0, out));
    checkpoint_reader_close(&r);
    checkpoint_close(&c);
    json_decref(training);
}

static void what_cannot_be_a_range_is_refused_by_the_writer(void **state)
{
    struct fixture *f = *state;
    char temp[CHECKPOINT_PATH_BYTES], name[300];
    struct checkpoint_writer w = {0};
    float x[1] = {1};
    struct checkpoint_options bad[] = {
        {1, 6}, {1, -4}, {1, CHECKPOINT_CHUNK_BYTES + 4}, {20, 0}, {-1, 0}};
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    assert_ok(checkpoint_begin(temp, f->scratch.dir, 0));
    for (int i = 0; i < 5; i++) {
        assert_int_equal(checkpoint_writer_open(&w, temp, 0, &bad[i]), ST_INVALID);
        checkpoint_writer_abandon(&w);
    }
    assert_fails(checkpoint_writer_open(&w, temp, CHECKPOINT_MAX_FILES, NULL), ST_INVALID,
                 "data file");
    checkpoint_writer_abandon(&w);
    assert_ok(checkpoint_writer_open(&w, temp, 0, NULL));
    assert_fails(checkpoint_write_range(&w, "master", "a", 0, x, 0), ST_INVALID, "no range");
    assert_fails(checkpoint_write_range(&w, "master", "a", -1, x, 1), ST_INVALID, "no range");
    assert_fails(checkpoint_write_range(&w, "master", "a", INT64_MAX, x, 1), ST_INVALID,
                 "no range");
    assert_fails(checkpoint_write_range(&w, "Master", "a", 0, x, 1), ST_INVALID, "name of a state");
    assert_fails(checkpoint_write_range(&w, "", "a", 0, x, 1), ST_INVALID, "name of a state");
    assert_fails(checkpoint_write_range(&w, "master", "", 0, x, 1), ST_INVALID, "name of a tensor");
    assert_fails(checkpoint_write_range(&w, "master", "a\nb", 0, x, 1), ST_INVALID, "of a tensor");
    assert_fails(checkpoint_write_range(&w, "master", "\xFF", 0, x, 1), ST_INVALID, "of a tensor");
    assert_fails(checkpoint_write_range(&w, "master", name, 0, x, 1), ST_INVALID, "of a tensor");
    checkpoint_writer_abandon(&w);
    assert_fails(checkpoint_writer_open(&w, temp, 0, NULL), ST_IO, "data-00000.tsr");
    checkpoint_writer_abandon(&w);
    checkpoint_discard(temp);
    assert_int_equal(scratch_count(&f->scratch), 0);
}

/* ---- size, writes, memory -------------------------------------------------------------------- */

enum { LARGE = 3 << 20 };

static void b81_a_file_is_as_large_as_its_ranges_and_smaller_on_weights(void **state)
{
    struct fixture *f = *state;
    char temp[CHECKPOINT_PATH_BYTES];
    float *x = NULL;
    assert_ok(mem_alloc(&x, LARGE * sizeof *x));
    fill_weights(f, x, LARGE);
    assert_ok(checkpoint_begin(temp, f->scratch.dir, 1));
    for (int level = 0; level < 2; level++) {
        struct checkpoint_writer w = {0};
        struct checkpoint_file file;
        struct checkpoint_options o = {.level = level};
        assert_ok(checkpoint_writer_open(&w, temp, level, &o));
        assert_ok(checkpoint_write_range(&w, "master", "w", 7, x + 7, LARGE - 9));
        assert_ok(checkpoint_writer_close(&w, &file));
        assert_int_equal(file.plain_bytes, 4 * (LARGE - 9));
        double ratio = (double)file.plain_bytes / (double)file.bytes;
        if (level == 0)
            assert_int_equal(file.bytes, 4 * (LARGE - 9) + 16 + 4 + 7 + 3 * 40 + 48);
        else
            print_message("normal values: %.3f times smaller\n", ratio);
        assert_true(level == 0 || ratio > 1.15);
    }
    checkpoint_discard(temp);
    mem_free(&x);
}

static void b80_a_file_is_written_front_to_back_one_write_a_chunk(void **state)
{
    struct fixture *f = *state;
    char temp[CHECKPOINT_PATH_BYTES];
    struct checkpoint_writer w = {0};
    struct checkpoint_file file;
    float *x = NULL;
    assert_ok(mem_alloc(&x, LARGE * sizeof *x));
    assert_ok(checkpoint_begin(temp, f->scratch.dir, 1));
    assert_ok(checkpoint_writer_open(&w, temp, 0, NULL));
    for (int i = 0; i < 100; i++) /* as many parameters */
        assert_ok(checkpoint_write_range(&w, "master", "w", 100 * i, x, 100));
    assert_ok(checkpoint_write_range(&w, "adam_m", "w", 0, x, LARGE));
    assert_int_equal(w.writes, 1 + 100 + 3);
    assert_int_equal(lseek(w.fd, 0, SEEK_CUR), w.file.bytes);
    assert_ok(checkpoint_writer_close(&w, &file));
    checkpoint_discard(temp);
    mem_free(&x);
}

static void b75_memory_is_bounded_by_chunks_not_by_tensors(void **state)
{
    struct fixture *f = *state;
    enum { CHUNK = 64 << 10, PART = 1000 };
    char temp[CHECKPOINT_PATH_BYTES], path[CHECKPOINT_PATH_BYTES];
    struct checkpoint_writer w = {0};
    struct checkpoint_file file;
    struct checkpoint_options o = {1, CHUNK};
    struct checkpoint_tensor t = {
        .name = "w", .dims = 1, .shape = {LARGE}, .states = {"master"}, .state_count = 1};
    float part[PART];
    fill_weights(f, part, PART);
    int64_t before = mem_live_bytes(), peak = 0;
    assert_ok(checkpoint_begin(temp, f->scratch.dir, 1));
    assert_ok(checkpoint_writer_open(&w, temp, 0, &o));
    for (int64_t at = 0; at < LARGE; at += PART) {
        assert_ok(checkpoint_write_range(&w, "master", "w", at, part,
                                         at + PART < LARGE ? PART : LARGE - at));
        peak = mem_live_bytes() - before > peak ? mem_live_bytes() - before : peak;
    }
    assert_ok(checkpoint_writer_close(&w, &file));
    int64_t chunks = (LARGE + PART - 1) / PART;
    assert_in_range(peak, 2 * CHUNK, 2 * CHUNK + 2 * 56 * chunks + 4096);
    struct checkpoint_manifest m = {1, &t, 1, &file, 1, NULL};
    assert_ok(checkpoint_publish(path, f->scratch.dir, temp, &m));
    assert_int_equal(mem_live_bytes(), before);
    struct checkpoint c = {0};
    struct checkpoint_reader r = {0};
    assert_ok(checkpoint_open(&c, path));
    assert_ok(checkpoint_reader_open(&r, &c));
    int64_t open_bytes = mem_live_bytes() - before;
    assert_in_range(open_bytes, 3 * 4 * PART, 3 * 4 * PART + 2 * 56 * chunks + 16384);
    mem_seal(); /* reading allocates nothing */
    for (int64_t at = 0; at < LARGE; at += 700) {
        float got[700];
        int64_t n = at + 700 < LARGE ? 700 : LARGE - at;
        assert_ok(checkpoint_read_range(&r, "master", "w", at, n, got));
        for (int64_t i = 0; i < n; i += 99)
            assert_true(got[i] == part[(at + i) % PART]);
    }
    mem_unseal();
    checkpoint_reader_close(&r);
    checkpoint_close(&c);
}

struct thread_read {
    const struct checkpoint *c;
    const struct small *s;
    int ok;
};

static void *read_all_states(void *argument)
{
    struct thread_read *t = argument;
    float out[MAX_NUMEL];
    struct checkpoint_reader r = {0};
    t->ok = checkpoint_reader_open(&r, t->c) == ST_OK;
    for (int i = 0; i < TENSORS && t->ok; i++)
        for (int k = 0; k < t->s->tensors[i].state_count && t->ok; k++) {
            t->ok = checkpoint_read_range(&r, state_names[k], t->s->tensors[i].name, 0,
                                          t->s->tensors[i].numel, out) == ST_OK &&
                    memcmp(out, t->s->values[i][k], (size_t)t->s->tensors[i].numel * 4) == 0;
        }
    checkpoint_reader_close(&r);
    return NULL;
}

static void readers_of_several_threads_share_one_open_checkpoint(void **state)
{
    struct fixture *f = *state;
    enum { THREADS = 4 };
    static struct small s;
    char path[512];
    struct checkpoint c = {0};
    pthread_t thread[THREADS];
    struct thread_read work[THREADS];
    make_small(f, &s);
    assert_ok(save_plain(f, &s, 1));
    assert_ok(checkpoint_open(&c, step_path(f, path, 1)));
    for (int i = 0; i < THREADS; i++) {
        work[i] = (struct thread_read){&c, &s, 0};
        assert_int_equal(pthread_create(&thread[i], NULL, read_all_states, &work[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(thread[i], NULL);
        assert_true(work[i].ok);
    }
    checkpoint_close(&c);
}

/* ---- what publish refuses -------------------------------------------------------------------- */

static void holes_overlaps_and_strangers_are_named_and_not_published(void **state)
{
    struct fixture *f = *state;
    static struct small s;
    struct piece p[16];
    char path[512];
    make_small(f, &s);
    int count = 0;
    for (int t = 0; t < TENSORS; t++)
        for (int k = 0; k < s.tensors[t].state_count; k++)
            p[count++] = (struct piece){t, k, 0, s.tensors[t].numel};
    assert_int_equal(count, 10);
    struct save how = {f->scratch.dir, 5, 2, NULL, p, count, NULL};
    p[1].first = 2;
    p[1].numel -= 2;
    assert_fails(save(&s, &how), ST_CORRUPT,
                 "word_embeddings.weight\", adam_m: elements 0 to 1 are missing");
    p[1].first = 0;
    assert_fails(save(&s, &how), ST_CORRUPT, "adam_m: elements 2998 to 2999 are missing");
    p[1].numel += 2;
    p[count++] = (struct piece){0, 2, 17, 3};
    how.piece_count = count;
    assert_fails(save(&s, &how), ST_CORRUPT, "adam_v: elements 17 to 19 are there twice");
    p[count - 1] = (struct piece){2, 1, 0, 1}; /* frozen: no such state */
    assert_fails(save(&s, &how), ST_CORRUPT, "holds adam_m of tensor \"a.\"odd\"");
    how.piece_count = --count;
    s.tensors[1].shape[0] = 2;
    assert_fails(save(&s, &how), ST_CORRUPT, "tensor \"b\", master: elements 1 to 1 are missing");
    s.tensors[1].shape[0] = 0;
    assert_fails(save(&s, &how), ST_INVALID, "tensor \"b\": its shape is empty");
    s.tensors[1].shape[0] = INT64_MAX / 4;
    assert_fails(save(&s, &how), ST_INVALID, "too large");
    s.tensors[1].shape[0] = 1;
    s.tensors[1].name = "scalar";
    assert_fails(save(&s, &how), ST_INVALID, "tensor \"scalar\" is there twice");
    s.tensors[1].name = "b";
    s.tensors[1].states[1] = "master";
    assert_fails(save(&s, &how), ST_INVALID, "state \"master\" is there twice");
    s.tensors[1].states[1] = "adam_m";
    how.training = json_array();
    assert_fails(save(&s, &how), ST_INVALID, "has to be an object");
    json_decref(how.training);
    assert_int_equal(scratch_count(&f->scratch), 0);
    how.training = NULL;
    assert_ok(save(&s, &how));
    assert_same(f, step_path(f, path, 5), &s);
}

/* ---- damage ---------------------------------------------------------------------------------- */

/* Not truncated first: some file systems then flush at close, and this is called very often. */
static void put_bytes(const char *path, const void *data, size_t bytes)
{
    int fd = open(path, O_WRONLY | O_CREAT, 0666);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, data, bytes, 0), (ssize_t)bytes);
    assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
    close(fd);
}

/* Opens, reads all and verifies. What is read is right or an error. True if anything complained. */
static bool notices(struct fixture *f, const char *path, const struct small *s)
{
    struct checkpoint c = {0};
    enum status st = checkpoint_open(&c, path);
    bool noticed = st != ST_OK;
    assert_true(st == ST_OK || st == ST_CORRUPT || st == ST_IO);
    if (st == ST_OK) {
        noticed = !same_values(f, &c, s);
        st = checkpoint_verify(&c, NULL, NULL);
        assert_true(st == ST_OK || st == ST_CORRUPT);
        noticed = noticed || st != ST_OK;
    }
    if (noticed)
        assert_true(strstr(status_message(), "step-00000001") != NULL);
    checkpoint_close(&c);
    return noticed;
}

/* The smallest that has everything: two tensors, two files. */
static void make_tiny(struct fixture *f, struct small *s)
{
    static struct piece pieces[MAX_PIECES];
    make_small(f, s);
    s->tensors[0].shape[0] = 2;
    s->tensors[0].numel = 60;
    for (int k = 0; k < STATES; k++)
        memset(s->values[0][k], 0, 30 * sizeof(float)); /* some of it is compressed */
    int count = cut_small(f, s, pieces, MAX_NUMEL);
    assert_ok(save(s, &(struct save){f->scratch.dir, 1, 2, NULL, pieces, count, NULL}));
}

static const char *const tiny_files[] = {"manifest.json", "data-00000.tsr", "data-00001.tsr"};

static void every_flipped_byte_is_noticed(void **state)
{
    struct fixture *f = *state;
    static struct small s;
    char dir[512], path[512];
    make_tiny(f, &s);
    step_path(f, dir, 1);
    for (int i = 0; i < 3; i++) {
        struct file_text text = {0};
        snprintf(path, sizeof path, "%.400s/%s", dir, tiny_files[i]);
        assert_ok(file_read(&text, path));
        int fd = open(path, O_WRONLY);
        assert_true(fd >= 0);
        for (size_t at = 0; at < text.bytes; at++) {
            static const int flips[] = {0x01, 0x80, 0xFF, 0x20};
            char byte = (char)(text.data[at] ^ flips[below(f, 4)]);
            assert_int_equal(pwrite(fd, &byte, 1, (off_t)at), 1);
            if (!notices(f, dir, &s))
                fail_msg("%s: byte %zu of %zu flipped, not noticed", path, at, text.bytes);
            assert_int_equal(pwrite(fd, text.data + at, 1, (off_t)at), 1);
        }
        close(fd);
        mem_free(&text.data);
    }
    assert_false(notices(f, dir, &s));
}

static void every_length_of_a_cut_file_is_noticed(void **state)
{
    struct fixture *f = *state;
    static struct small s;
    char dir[512], path[512];
    make_tiny(f, &s);
    step_path(f, dir, 1);
    for (int i = 0; i < 3; i++) {
        struct file_text text = {0};
        snprintf(path, sizeof path, "%.400s/%s", dir, tiny_files[i]);
        assert_ok(file_read(&text, path));
        for (size_t bytes = 0; bytes < text.bytes; bytes++) {
            struct checkpoint c = {0};
            put_bytes(path, text.data, bytes);
            assert_int_equal(checkpoint_open(&c, dir), ST_CORRUPT);
            checkpoint_close(&c);
        }
        put_bytes(path, text.data, text.bytes);
        mem_free(&text.data);
    }
    assert_false(notices(f, dir, &s));
}

static void random_damage_to_large_files_is_noticed_where_it_is(void **state)
{
    struct fixture *f = *state;
    static struct small s;
    static struct piece pieces[MAX_PIECES];
    char dir[512], path[512];
    make_small(f, &s);
    int count = cut_small(f, &s, pieces, 700);
    assert_ok(save(&s, &(struct save){f->scratch.dir, 1, 3, NULL, pieces, count, NULL}));
    step_path(f, dir, 1);
    for (int i = 0; i < 150; i++) {
        snprintf(path, sizeof path, "%.400s/data-%05d.tsr", dir, i % 3);
        struct stat info;
        int fd = open(path, O_RDWR);
        assert_true(fd >= 0 && fstat(fd, &info) == 0);
        off_t at = (off_t)below(f, info.st_size);
        unsigned char old[8], new[8];
        ssize_t n = pread(fd, old, 1 + (size_t)below(f, 8), at);
        for (ssize_t k = 0; k < n; k++)
            new[k] = (unsigned char)(old[k] ^ (1 + below(f, 255)));
        assert_int_equal(pwrite(fd, new, (size_t)n, at), n);
        assert_true(notices(f, dir, &s));
        assert_int_equal(pwrite(fd, old, (size_t)n, at), n);
        close(fd);
    }
    assert_false(notices(f, dir, &s));
}

static void swapped_missing_and_foreign_files_are_named(void **state)
{
    struct fixture *f = *state;
    static struct small s;
    struct checkpoint c = {0};
    char dir[512], a[512], b[512], other[512], kept[512];
    make_tiny(f, &s);
    assert_ok(save_plain(f, &s, 2));
    step_path(f, dir, 1);
    snprintf(a, sizeof a, "%.400s/data-00000.tsr", dir);
    snprintf(b, sizeof b, "%.400s/data-00001.tsr", dir);
    scratch_path(&f->scratch, kept, "kept");
    assert_int_equal(rename(a, kept), 0);
    assert_fails(checkpoint_open(&c, dir), ST_CORRUPT, "data-00000.tsr: is missing");
    checkpoint_close(&c);
    assert_int_equal(mkdir(a, 0777), 0);
    assert_fails(checkpoint_open(&c, dir), ST_CORRUPT, "data-00000.tsr: is not a regular file");
    checkpoint_close(&c);
    assert_int_equal(rmdir(a), 0);
    assert_int_equal(rename(b, a), 0);
    assert_int_equal(rename(kept, b), 0);
    assert_int_equal(checkpoint_open(&c, dir), ST_CORRUPT); /* sizes or indexes differ */
    assert_message_has("data-0000", __FILE__, __LINE__);
    checkpoint_close(&c);
    assert_int_equal(rename(a, kept), 0);
    assert_int_equal(rename(b, a), 0);
    assert_int_equal(rename(kept, b), 0);
    assert_false(notices(f, dir, &s));
    /* The same file of another save of the same tensors: as long, and whole in itself. */
    struct small *changed = &s;
    changed->values[1][0][0] = 3.0f;
    struct piece pieces[] = {{1, 0, 0, 1}};
    char temp[CHECKPOINT_PATH_BYTES];
    struct checkpoint_file file[2];
    for (int i = 0; i < 2; i++) {
        struct checkpoint_writer w = {0};
        float x = (float)i;
        struct checkpoint_tensor t = {
            .name = "x", .dims = 0, .states = {"master"}, .state_count = 1};
        assert_ok(checkpoint_begin(temp, f->scratch.dir, 10 + i));
        assert_ok(checkpoint_writer_open(&w, temp, 0, NULL));
        assert_ok(checkpoint_write_range(&w, "master", "x", pieces[0].first, &x, 1));
        assert_ok(checkpoint_writer_close(&w, &file[i]));
        struct checkpoint_manifest m = {10 + i, &t, 1, &file[i], 1, NULL};
        assert_ok(checkpoint_publish(NULL, f->scratch.dir, temp, &m));
    }
    assert_int_equal(file[0].bytes, file[1].bytes);
    snprintf(a, sizeof a, "%.400s/data-00000.tsr", step_path(f, dir, 10));
    snprintf(b, sizeof b, "%.400s/data-00000.tsr", step_path(f, other, 11));
    assert_int_equal(rename(a, b), 0);
    assert_fails(checkpoint_open(&c, other), ST_CORRUPT,
                 "is another file than the one that the manifest tells of");
    checkpoint_close(&c);
}

/* ---- hostile manifests ----------------------------------------------------------------------- */

/* Writes @text with a tail that fits it. */
static void put_manifest(const char *dir, const char *text)
{
    char path[600], whole[8192];
    snprintf(path, sizeof path, "%s/manifest.json", dir);
    int n = snprintf(whole, sizeof whole, "%s,\n \"xxh3\": \"%016llx\"\n}\n", text,
                     (unsigned long long)XXH3_64bits(text, strlen(text)));
    put_bytes(path, whole, (size_t)n);
}

#define TOP      "{\"format\":\"tessera checkpoint\",\"version\":1,\"step\":1,\"training\":{}"
#define NO_FILES ",\"files\":[]"
#define A_TENSOR "{\"name\":\"a\",\"dtype\":\"F32\",\"shape\":[2],\"states\":[\"master\"]}"
#define A_LINE(name, bytes)                                                                        \
    "{\"name\":\"" name "\",\"bytes\":" bytes                                                      \
    ",\"xxh3\":\"0000000000000000\",\"index_xxh3\":\"0000000000000000\"}"
#define TENSOR(fields) TOP ",\"tensors\":[{" fields "}]" NO_FILES
#define FILES(lines)   TOP ",\"tensors\":[" A_TENSOR "],\"files\":[" lines "]"

static void hostile_manifests_are_refused_by_name(void **state)
{
    struct fixture *f = *state;
    static const struct {
        const char *text, *message;
        enum status want;
    } cases[] = {
        {"{\"format\":\"x\"", "format: expected \"tessera checkpoint\"", ST_CORRUPT},
        {"{\"format\":3", "format: expected a string, found an integer", ST_CORRUPT},
        {"{\"format\":\"tessera checkpoint\",\"version\":2", "later Tessera", ST_UNSUPPORTED},
        {"{\"format\":\"tessera checkpoint\",\"version\":0", "does not exist", ST_CORRUPT},
        {"{\"format\":\"tessera checkpoint\",\"version\":1,\"step\":-1", "negative", ST_CORRUPT},
        {"{\"format\":\"tessera checkpoint\",\"version\":1,\"step\":1",
         "training: expected an object", ST_CORRUPT},
        {"{\"a\":1,\"a\":2", "duplicate", ST_CORRUPT},
        {"{\"a\":", "manifest.json:", ST_CORRUPT},
        {TOP, "tensors: expected an array, found nothing", ST_CORRUPT},
        {TOP ",\"tensors\":[]", "files: expected an array", ST_CORRUPT},
        {TOP ",\"tensors\":[]" NO_FILES, "there are no tensors", ST_CORRUPT},
        {TOP ",\"tensors\":[7]" NO_FILES, "tensors[]: expected an object", ST_CORRUPT},
        {TOP ",\"tensors\":[" A_TENSOR "]" NO_FILES, "there are no files", ST_CORRUPT},
        {TOP ",\"tensors\":[" A_TENSOR "," A_TENSOR "]" NO_FILES, "\"a\" is there twice",
         ST_CORRUPT},
        {TENSOR("\"name\":\"\""), "dtype: expected a string", ST_CORRUPT},
        {TENSOR("\"name\":\"a\",\"dtype\":\"BF16\""), "is BF16, only F32 is read", ST_UNSUPPORTED},
        {TENSOR("\"name\":\"a\",\"dtype\":\"F32\",\"shape\":[2]"), "states: expected an array",
         ST_CORRUPT},
        {TENSOR("\"name\":\"a\",\"dtype\":\"F32\",\"shape\":[2],\"states\":[]"), "0 states",
         ST_CORRUPT},
        {TENSOR("\"name\":\"a\",\"dtype\":\"F32\",\"shape\":[2],\"states\":[\"../x\"]"), "\"../x\"",
         ST_CORRUPT},
        {TENSOR("\"name\":\"a\",\"dtype\":\"F32\",\"shape\":[2],\"states\":[\"m\",\"m\"]"), "twice",
         ST_CORRUPT},
        {TENSOR("\"name\":\"a\",\"dtype\":\"F32\",\"shape\":[2],\"states\":[\"a\",\"b\",\"c\","
                "\"d\",\"e\",\"f\",\"g\",\"h\",\"i\"]"),
         "9 states", ST_CORRUPT},
        {TENSOR("\"name\":\"\",\"dtype\":\"F32\",\"shape\":[2],\"states\":[\"m\"]"),
         "no name of a tensor", ST_CORRUPT},
        {TENSOR("\"name\":\"a\\u0000b\",\"dtype\":\"F32\",\"shape\":[2],\"states\":[\"m\"]"),
         "manifest.json:", ST_CORRUPT},
        {TENSOR("\"name\":\"a\",\"dtype\":\"F32\",\"shape\":[0],\"states\":[\"m\"]"), "shape[0]",
         ST_CORRUPT},
        {TENSOR("\"name\":\"a\",\"dtype\":\"F32\",\"shape\":[-3],\"states\":[\"m\"]"), "shape[0]",
         ST_CORRUPT},
        {TENSOR(
             "\"name\":\"a\",\"dtype\":\"F32\",\"shape\":[1,2,3,4,5,6,7,8,9],\"states\":[\"m\"]"),
         "9 dimensions", ST_CORRUPT},
        {TENSOR("\"name\":\"a\",\"dtype\":\"F32\",\"shape\":[9223372036854775807,2],\"states\":["
                "\"m\"]"),
         "shape[1]", ST_CORRUPT},
        {TENSOR(
             "\"name\":\"a\",\"dtype\":\"F32\",\"shape\":[4611686018427387904],\"states\":[\"m\"]"),
         "too large", ST_CORRUPT},
        {FILES("{}"), "files[].name: expected a string", ST_CORRUPT},
        {FILES(A_LINE("../data-00000.tsr", "64")), "no name of a data file", ST_CORRUPT},
        {FILES(A_LINE("/etc/passwd", "64")), "\"/etc/passwd\" is no name of a data file",
         ST_CORRUPT},
        {FILES(A_LINE("data-0000/.tsr", "64")), "no name of a data file", ST_CORRUPT},
        {FILES(A_LINE("manifest.json", "64")), "no name of a data file", ST_CORRUPT},
        {FILES(A_LINE("data-00000.tsr", "-1")), "negative size", ST_CORRUPT},
        {FILES(A_LINE("data-00000.tsr", "1e3")), "bytes: expected an integer", ST_CORRUPT},
        {FILES(A_LINE("data-00000.tsr", "64") "," A_LINE("data-00000.tsr", "64")), "is there twice",
         ST_CORRUPT},
        {FILES(A_LINE("data-00000.tsr", "64")), "data-00000.tsr: is missing", ST_CORRUPT},
        {FILES("{\"name\":\"data-00000.tsr\",\"bytes\":1,\"xxh3\":\"0x\"}"),
         "16 hexadecimal digits", ST_CORRUPT},
    };
    char dir[512];
    scratch_path(&f->scratch, dir, "step-00000001");
    assert_int_equal(mkdir(dir, 0777), 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct checkpoint c = {0};
        put_manifest(dir, cases[i].text);
        assert_fails(checkpoint_open(&c, dir), cases[i].want, cases[i].message);
        assert_message_has("step-00000001", __FILE__, __LINE__);
        checkpoint_close(&c);
    }
}

/* A tensor table of any size: nothing is allocated for it that no file backs. */
static void a_table_of_exabytes_allocates_nothing(void **state)
{
    struct fixture *f = *state;
    struct checkpoint c = {0};
    char dir[512], path[600];
    char empty[64] = "";
    scratch_path(&f->scratch, dir, "step-00000001");
    assert_int_equal(mkdir(dir, 0777), 0);
    put_manifest(
        dir,
        TOP ",\"tensors\":[{\"name\":\"a\",\"dtype\":\"F32\",\"shape\":[1000000,1000000,1000000],"
            "\"states\":[\"m\"]}],\"files\":[" A_LINE("data-00000.tsr", "64") "]");
    snprintf(path, sizeof path, "%s/data-00000.tsr", dir);
    put_bytes(path, empty, sizeof empty);
    int64_t before = mem_live_bytes();
    assert_fails(checkpoint_open(&c, dir), ST_CORRUPT, "is not a data file");
    assert_true(mem_live_bytes() - before < 1 << 20); /* a block of names */
    checkpoint_close(&c);
}

/* Data files whose hashes fit and whose contents do not: footer, index and manifest agree. */
static void hostile_indexes_never_crash(void **state)
{
    struct fixture *f = *state;
    char dir[512], path[600], text[4096];
    int opened = 0;
    scratch_path(&f->scratch, dir, "step-00000001");
    assert_int_equal(mkdir(dir, 0777), 0);
    snprintf(path, sizeof path, "%s/data-00000.tsr", dir);
    for (int round = 0; round < 4000; round++) {
        /* 8 bytes of data (two elements, stored), a stream "master" of "a", one chunk. */
        unsigned char b[16 + 8 + 4 + 7 + 40 + 48] = "\x89TSR\r\n\x1a\n\1";
        float values[2] = {1, 2};
        uint64_t hash = XXH3_64bits(values, 8), numbers[3] = {24, 51, 1};
        uint32_t chunk[6] = {2, 0, 2, 2, 2, 2}, counts[2] = {1, 1};
        uint16_t lengths[2] = {6, 1};
        unsigned char planes[8] = {0, 0, 0, 0, 0x80, 0, 0x3F, 0x40};
        memcpy(b + 16, planes, 8);
        memcpy(b + 24, lengths, 4);
        memcpy(b + 28, "mastera", 7);
        memcpy(b + 43, &hash, 8); /* after first = 0 */
        memcpy(b + 51, chunk, 24);
        memcpy(b + 75, numbers, 24);
        memcpy(b + 99, counts, 8);
        memcpy(b + 115, "TSRINDEX", 8);
        for (int64_t k = round == 0 ? 0 : 1 + below(f, 3); k > 0; k--) {
            size_t at = 24 + (size_t)below(f, 83);
            b[at] = below(f, 3) == 0 ? 0xFF : (unsigned char)(b[at] ^ (1 << below(f, 8)));
        }
        uint64_t index_first;
        memcpy(&index_first, b + 75, 8);
        hash = XXH3_64bits(b + 24, sizeof b - 24 - 16);
        memcpy(b + 107, &hash, 8);
        put_bytes(path, b, sizeof b);
        snprintf(text, sizeof text,
                 TOP ",\"tensors\":[" A_TENSOR "],\"files\":[{\"name\":\"data-00000.tsr\","
                     "\"bytes\":%zu,\"xxh3\":\"%016llx\",\"index_xxh3\":\"%016llx\"}]",
                 sizeof b, (unsigned long long)XXH3_64bits(b, sizeof b), (unsigned long long)hash);
        put_manifest(dir, text);
        struct checkpoint c = {0};
        enum status st = checkpoint_open(&c, dir);
        if (round == 0)
            assert_ok(st);
        assert_true(st == ST_OK || st == ST_CORRUPT);
        if (st == ST_OK) {
            struct checkpoint_reader r = {0};
            float out[2] = {0};
            opened++;
            assert_ok(checkpoint_reader_open(&r, &c));
            st = checkpoint_read_range(&r, "master", "a", 0, 2, out);
            assert_true(st == ST_CORRUPT || (st == ST_OK && out[0] == 1 && out[1] == 2));
            if (round == 0)
                assert_ok(st);
            checkpoint_reader_close(&r);
        }
        checkpoint_close(&c);
    }
    assert_true(opened > 10 && opened < 4000);
}

/* ---- one of every version -------------------------------------------------------------------- */

/* tests/data/checkpoint/version-1 was made by make_golden(); with GOLDEN=1 the test makes it again
 * (never for a version that was released). Its values are a formula. */
static float golden_value(int tensor, int state, int64_t i)
{
    uint32_t word = 0x3C000000u + (uint32_t)(i % 97) * 0x10001u + (uint32_t)tensor * 0x800000u;
    float value;
    if (state == 2 && i < 600)
        return 0;
    if (state == 1 && i == 3)
        word = 0xFFC12345; /* a NaN and its payload */
    memcpy(&value, &word, sizeof value);
    return value;
}

static const struct checkpoint_tensor golden_table[] = {
    {.name = "embeddings.weight",
     .dims = 2,
     .shape = {40, 24},
     .states = {"master", "adam_m", "adam_v"},
     .state_count = 3},
    {.name = "norm.bias", .dims = 1, .shape = {7}, .states = {"master"}, .state_count = 1}};

static void make_golden(const char *dir)
{
    char temp[CHECKPOINT_PATH_BYTES];
    struct checkpoint_options o = {1, 2048};
    struct checkpoint_writer w[2] = {{.fd = 0}};
    struct checkpoint_file files[2];
    float x[960];
    assert_ok(checkpoint_begin(temp, dir, 1234));
    for (int i = 0; i < 2; i++)
        assert_ok(checkpoint_writer_open(&w[i], temp, i, &o));
    for (int t = 0; t < 2; t++)
        for (int k = 0; k < golden_table[t].state_count; k++) {
            int64_t numel = t == 0 ? 960 : 7, half = numel / 2;
            for (int64_t i = 0; i < numel; i++)
                x[i] = golden_value(t, k, i);
            assert_ok(checkpoint_write_range(&w[1], golden_table[t].states[k], golden_table[t].name,
                                             half, x + half, numel - half));
            assert_ok(checkpoint_write_range(&w[0], golden_table[t].states[k], golden_table[t].name,
                                             0, x, half));
        }
    for (int i = 0; i < 2; i++)
        assert_ok(checkpoint_writer_close(&w[i], &files[i]));
    json_t *training = json_pack("{s:i, s:f}", "epoch", 3, "lr", 3e-5);
    struct checkpoint_manifest m = {1234, golden_table, 2, files, 2, training};
    assert_ok(checkpoint_publish(NULL, dir, temp, &m));
    json_decref(training);
}

static void assert_golden(const char *path)
{
    struct checkpoint c = {0};
    struct checkpoint_reader r = {0};
    float x[960];
    assert_ok(checkpoint_open(&c, path));
    assert_ok(checkpoint_verify(&c, NULL, NULL));
    assert_int_equal(c.step, 1234);
    assert_int_equal(json_integer_value(json_object_get(c.training, "epoch")), 3);
    assert_true(json_real_value(json_object_get(c.training, "lr")) == 3e-5);
    assert_ok(checkpoint_reader_open(&r, &c));
    for (int t = 0; t < 2; t++)
        for (int k = 0; k < golden_table[t].state_count; k++) {
            int64_t numel = t == 0 ? 960 : 7;
            assert_ok(checkpoint_read_range(&r, golden_table[t].states[k], golden_table[t].name, 0,
                                            numel, x));
            for (int64_t i = 0; i < numel; i++) {
                float want = golden_value(t, k, i);
                assert_memory_equal(&x[i], &want, sizeof want);
            }
        }
    checkpoint_reader_close(&r);
    checkpoint_close(&c);
}

static void a_checkpoint_of_version_1_is_read(void **state)
{
    struct fixture *f = *state;
    static const char path[] = "tests/data/checkpoint/version-1";
    char made[512];
    if (getenv("GOLDEN") != NULL) {
        make_golden("tests/data/checkpoint");
        assert_int_equal(unlink("tests/data/checkpoint/latest"), 0);
        assert_int_equal(rename("tests/data/checkpoint/step-00001234", path), 0);
    }
    make_golden(f->scratch.dir);
    assert_golden(step_path(f, made, 1234));
    assert_golden(path);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(b17_any_ranges_of_any_writers_in_any_order_come_back_to_the_bit),
        TEST(a_writer_without_ranges_is_fine),
        TEST(training_state_and_tables_come_back),
        TEST(what_cannot_be_a_range_is_refused_by_the_writer),
        TEST(b81_a_file_is_as_large_as_its_ranges_and_smaller_on_weights),
        TEST(b80_a_file_is_written_front_to_back_one_write_a_chunk),
        TEST(b75_memory_is_bounded_by_chunks_not_by_tensors),
        TEST(readers_of_several_threads_share_one_open_checkpoint),
        TEST(holes_overlaps_and_strangers_are_named_and_not_published),
        TEST(every_flipped_byte_is_noticed),
        TEST(every_length_of_a_cut_file_is_noticed),
        TEST(random_damage_to_large_files_is_noticed_where_it_is),
        TEST(swapped_missing_and_foreign_files_are_named),
        TEST(hostile_manifests_are_refused_by_name),
        TEST(a_table_of_exabytes_allocates_nothing),
        TEST(hostile_indexes_never_crash),
        TEST(a_checkpoint_of_version_1_is_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
