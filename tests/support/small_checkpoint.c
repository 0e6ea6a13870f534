#include "tests/support/small_checkpoint.h"

#include <stdio.h>
#include <string.h>

#include "engine/base/file.h"

int small_set_up(void **state)
{
    static struct small_test f;
    scratch_make(&f.scratch);
    f.live_bytes = mem_live_bytes();
    f.seed = test_seed();
    *state = &f;
    return 0;
}

int small_tear_down(void **state)
{
    struct small_test *f = *state;
    file_fail_at(0);
    scratch_remove(&f->scratch);
    return mem_live_bytes() == f->live_bytes ? 0 : -1; /* no test leaks */
}

int64_t small_below(struct small_test *f, int64_t n)
{
    return (int64_t)(test_random(&f->seed) % (uint64_t)n);
}

/* Any bits: NaNs of all kinds, infinities, denormals and zeros of both signs are among them. */
void small_fill_any(struct small_test *f, float *out, int64_t n)
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
void small_fill_weights(struct small_test *f, float *out, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        double sum = -6;
        for (int k = 0; k < 12; k++)
            sum += (double)(test_random(&f->seed) >> 40) / (1 << 24);
        out[i] = (float)(0.02 * sum);
    }
}

/* ---- a small model --------------------------------------------------------------------------- */

const char *const small_states[SMALL_STATES] = {"master", "adam_m", "adam_v"};

void small_make(struct small_test *f, struct small *s)
{
    static const struct checkpoint_tensor table[SMALL_TENSORS] = {
        {.name = "bert.embeddings.word_embeddings.weight", .dims = 2, .shape = {100, 30}},
        {.name = "b", .dims = 1, .shape = {1}},
        {.name = "a.\"odd\" \xC3\xA9", .dims = 3, .shape = {3, 5, 7}},
        {.name = "scalar", .dims = 0}};
    memcpy(s->tensors, table, sizeof table);
    for (int t = 0; t < SMALL_TENSORS; t++) {
        s->tensors[t].state_count = t == 2 ? 1 : SMALL_STATES; /* one is frozen */
        s->tensors[t].numel = 1;
        for (int i = 0; i < s->tensors[t].dims; i++)
            s->tensors[t].numel *= s->tensors[t].shape[i];
        for (int k = 0; k < SMALL_STATES; k++) {
            s->tensors[t].states[k] = small_states[k];
            small_fill_any(f, s->values[t][k], s->tensors[t].numel);
        }
    }
}

/* Every state of every tensor cut into random pieces, in random order. */
int small_cut(struct small_test *f, const struct small *s, struct small_piece *pieces,
              int max_numel)
{
    int count = 0;
    for (int t = 0; t < SMALL_TENSORS; t++)
        for (int k = 0; k < s->tensors[t].state_count; k++)
            for (int64_t at = 0; at < s->tensors[t].numel;) {
                int64_t n = 1 + small_below(f, max_numel);
                n = n < s->tensors[t].numel - at ? n : s->tensors[t].numel - at;
                pieces[count++] = (struct small_piece){t, k, at, n};
                at += n;
            }
    for (int i = count - 1; i > 0; i--) {
        int k = (int)small_below(f, i + 1);
        struct small_piece swap = pieces[i];
        pieces[i] = pieces[k];
        pieces[k] = swap;
    }
    return count;
}

/* Deals the pieces to the writers and publishes; everything that may fail is passed on. */
enum status small_save(const struct small *s, const struct small_save *how)
{
    enum status st;
    char temp[CHECKPOINT_PATH_BYTES] = "";
    static struct checkpoint_writer w[SMALL_WRITERS];
    struct checkpoint_file files[SMALL_WRITERS];
    memset(w, 0, sizeof w);
    memset(files, 0, sizeof files);
    TRY(checkpoint_begin(temp, how->dir, how->step));
    for (int i = 0; i < how->writers; i++)
        TRY_GOTO(st, out, checkpoint_writer_open(&w[i], temp, i, how->options));
    for (int i = 0; i < how->piece_count; i++) {
        const struct small_piece *p = &how->pieces[i];
        TRY_GOTO(st, out,
                 checkpoint_write_range(&w[i % how->writers], small_states[p->state],
                                        s->tensors[p->tensor].name, p->first,
                                        s->values[p->tensor][p->state] + p->first, p->numel));
    }
    for (int i = 0; i < how->writers; i++)
        TRY_GOTO(st, out, checkpoint_writer_close(&w[i], &files[i]));
    struct checkpoint_manifest m = {how->step, s->tensors,   SMALL_TENSORS,
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
enum status small_save_plain(struct small_test *f, const struct small *s, int64_t step)
{
    static struct small_piece pieces[SMALL_PIECES];
    int count = small_cut(f, s, pieces, SMALL_NUMEL);
    return small_save(s, &(struct small_save){f->scratch.dir, step, 2, NULL, pieces, count, NULL});
}

const char *small_step_path(struct small_test *f, char out[512], int64_t step)
{
    char name[64];
    snprintf(name, sizeof name, "step-%08lld", (long long)step);
    return scratch_path(&f->scratch, out, name);
}

/* All values, by random ranges. False if a read failed (with a status that is allowed). */
bool small_same_values(struct small_test *f, const struct checkpoint *c, const struct small *s)
{
    static float out[SMALL_NUMEL];
    struct checkpoint_reader r = {0};
    bool ok = true;
    assert_ok(checkpoint_reader_open(&r, c));
    for (int t = 0; t < SMALL_TENSORS && ok; t++)
        for (int k = 0; k < s->tensors[t].state_count && ok; k++)
            for (int64_t at = 0; at < s->tensors[t].numel && ok;) {
                int64_t left = s->tensors[t].numel - at, n = 1 + small_below(f, left);
                enum status st =
                    checkpoint_read_range(&r, small_states[k], s->tensors[t].name, at, n, out);
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

void small_assert_same(struct small_test *f, const char *path, const struct small *s)
{
    struct checkpoint c = {0};
    assert_ok(checkpoint_open(&c, path));
    assert_true(small_same_values(f, &c, s));
    assert_ok(checkpoint_verify(&c, NULL, NULL));
    checkpoint_close(&c);
}