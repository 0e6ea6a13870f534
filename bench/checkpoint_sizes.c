/*
 * How small checkpoints get, and how fast: each state of each checkpoint, in chunks as they are
 * written, at zstd levels 1, 3 and 9, with its bytes sorted into planes and as they lie.
 *
 * A row a state, and one for all three. "touched" leaves out the rows of the word table whose m and
 * v are zero: words that training never met. They are a row of their own. A cell: how many times
 * smaller, and GB/s of packing and of unpacking, of plain bytes; the fastest of three passes (one
 * at level 9) in CPU time of one thread, so that other work on the machine counts less. What is
 * unpacked is compared.
 *
 * usage: build/release/bench/checkpoint_sizes CHECKPOINT...
 */
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <zstd.h>

#include "engine/base/arena.h"
#include "engine/base/out.h"
#include "io/checkpoint_format.h"

enum { PASSES = 3, CHUNK = CHECKPOINT_CHUNK_BYTES / 4 };

static const char *const states[] = {"master", "adam_m", "adam_v"};
static const int levels[] = {1, 3, 9};

enum { STATES = 3, LEVELS = 3, PARTS = 3 };

enum part { ALL, TOUCHED, UNTOUCHED };

static const char *const part_names[PARTS] = {"all", "touched", "untouched rows"};

struct values {
    float *at; /* owned */
    size_t numel;
};

/* What packing and unpacking gave; sums over states add up. */
struct score {
    double plain_bytes, bytes, pack_s, unpack_s;
};

struct bench {
    struct checkpoint file;
    struct checkpoint_reader reader;
    struct values part[STATES][PARTS];
    bool *touched; /* owned; by row of the word table */
    int64_t rows, columns;
    uint8_t *packed, *planes; /* owned; packed: more than a chunk */
    float *back;              /* owned; a chunk */
    struct ZSTD_CCtx_s *zstd;
    struct ZSTD_DCtx_s *unzstd;
};

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- the values ------------------------------------------------------------------------------ */

static bool is_word_table(const struct checkpoint_tensor *t)
{
    return t->dims == 2 && strstr(t->name, "word_embeddings.weight") != NULL;
}

static enum status read_state(struct bench *b, int state)
{
    struct values *v = &b->part[state][ALL];
    size_t numel = 0;
    for (int i = 0; i < b->file.tensor_count; i++)
        numel += (size_t)b->file.tensors[i].numel;
    TRY(mem_alloc(&v->at, sizeof *v->at * numel));
    for (int i = 0; i < b->file.tensor_count; i++) {
        const struct checkpoint_tensor *t = &b->file.tensors[i];
        if (!checkpoint_has_state(t, states[state]))
            continue;
        TRY(checkpoint_read_range(&b->reader, states[state], t->name, 0, t->numel,
                                  v->at + v->numel));
        v->numel += (size_t)t->numel;
    }
    return ST_OK;
}

/* Where the word table begins among the values of a state. */
static size_t table_first(const struct bench *b)
{
    size_t first = 0;
    for (int i = 0; i < b->file.tensor_count && !is_word_table(&b->file.tensors[i]); i++)
        first += (size_t)b->file.tensors[i].numel;
    return first;
}

static enum status find_touched(struct bench *b)
{
    size_t first = table_first(b);
    for (int i = 0; i < b->file.tensor_count; i++)
        if (is_word_table(&b->file.tensors[i])) {
            b->rows = b->file.tensors[i].shape[0];
            b->columns = b->file.tensors[i].shape[1];
        }
    TRY(mem_alloc(&b->touched, (size_t)b->rows));
    for (int64_t row = 0; row < b->rows; row++)
        for (int s = 1; s < STATES; s++) {
            const float *at = b->part[s][ALL].at + first + (size_t)(row * b->columns);
            for (int64_t k = 0; k < b->columns; k++)
                b->touched[row] |= at[k] != 0;
        }
    return ST_OK;
}

static void add(struct values *v, const float *from, size_t numel)
{
    memcpy(v->at + v->numel, from, sizeof *from * numel);
    v->numel += numel;
}

static enum status split_state(struct bench *b, int state)
{
    const struct values *all = &b->part[state][ALL];
    struct values *touched = &b->part[state][TOUCHED], *rest = &b->part[state][UNTOUCHED];
    size_t first = table_first(b), columns = (size_t)b->columns;
    size_t end = first + (size_t)b->rows * columns;
    TRY(mem_alloc(&touched->at, sizeof *all->at * all->numel));
    TRY(mem_alloc(&rest->at, sizeof *all->at * all->numel));
    add(touched, all->at, first);
    for (int64_t row = 0; row < b->rows; row++)
        add(b->touched[row] ? touched : rest, all->at + first + (size_t)row * columns, columns);
    add(touched, all->at + end, all->numel - end);
    return ST_OK;
}

/* ---- packing --------------------------------------------------------------------------------- */

static enum status pack(struct bench *b, size_t *bytes, uint32_t plane_bytes[PLANES],
                        const float *values, size_t numel, bool planes)
{
    if (planes)
        return chunk_pack(b->packed, bytes, plane_bytes, b->planes, values, (int32_t)numel, b->zstd,
                          true);
    *bytes = ZSTD_compress2(b->zstd, b->packed, ZSTD_compressBound(CHECKPOINT_CHUNK_BYTES), values,
                            sizeof *values * numel);
    return ZSTD_isError(*bytes) ? FAIL(MEMORY, "zstd: %s", ZSTD_getErrorName(*bytes)) : ST_OK;
}

static bool unpack(struct bench *b, size_t bytes, const uint32_t plane_bytes[PLANES], size_t numel,
                   bool planes)
{
    if (planes)
        return chunk_unpack(b->back, b->planes, b->packed, plane_bytes, (int32_t)numel, b->unzstd);
    return ZSTD_decompressDCtx(b->unzstd, b->back, sizeof *b->back * numel, b->packed, bytes) ==
           sizeof *b->back * numel;
}

static enum status one_pass(struct bench *b, struct score *score, const struct values *v,
                            bool planes)
{
    for (size_t done = 0; done < v->numel; done += CHUNK) {
        size_t n = v->numel - done < CHUNK ? v->numel - done : CHUNK, bytes = 0;
        uint32_t plane_bytes[PLANES];
        double begun = cpu_seconds();
        TRY(pack(b, &bytes, plane_bytes, v->at + done, n, planes));
        double packed = cpu_seconds();
        bool good = unpack(b, bytes, plane_bytes, n, planes);
        score->unpack_s += cpu_seconds() - packed;
        score->pack_s += packed - begun;
        score->plain_bytes += (double)(sizeof *v->at * n);
        score->bytes += (double)bytes;
        if (!good || memcmp(b->back, v->at + done, sizeof *v->at * n) != 0)
            return FAIL(CORRUPT, "what was unpacked is not what was packed");
    }
    return ST_OK;
}

static enum status measure(struct bench *b, struct score *best, const struct values *v, int level,
                           bool planes)
{
    ZSTD_freeCCtx(b->zstd);
    b->zstd = NULL;
    if (planes)
        TRY(chunk_compressor(&b->zstd, level));
    else if ((b->zstd = ZSTD_createCCtx()) == NULL ||
             ZSTD_isError(ZSTD_CCtx_setParameter(b->zstd, ZSTD_c_compressionLevel, level)))
        return FAIL(MEMORY, "no memory for zstd");
    for (int i = 0; i < (level > 3 ? 1 : PASSES); i++) {
        struct score now = {0};
        TRY(one_pass(b, &now, v, planes));
        if (i > 0 && best->pack_s < now.pack_s)
            now.pack_s = best->pack_s;
        if (i > 0 && best->unpack_s < now.unpack_s)
            now.unpack_s = best->unpack_s;
        *best = now;
    }
    return ST_OK;
}

/* ---- the table ------------------------------------------------------------------------------- */

static void print_row(const struct bench *b, const char *state, enum part part,
                      struct score score[2][LEVELS])
{
    out("| %lld | %s | %s | %.1f |", (long long)b->file.step, state, part_names[part],
        score[0][0].plain_bytes / 1048576.0);
    for (int p = 0; p < 2; p++)
        for (int l = 0; l < LEVELS; l++) {
            const struct score *s = &score[p][l];
            double ratio = s->plain_bytes / s->bytes;
            out(" %.*f (%.2f, %.2f) |", ratio < 100 ? 2 : 0, ratio,
                s->plain_bytes / s->pack_s * 1e-9, s->plain_bytes / s->unpack_s * 1e-9);
        }
    out("\n");
}

static enum status print_part(struct bench *b, enum part part)
{
    struct score sum[2][LEVELS] = {0};
    for (int s = 0; s < STATES; s++) {
        struct score score[2][LEVELS] = {0};
        if (b->part[s][part].numel == 0)
            return ST_OK;
        for (int p = 0; p < 2; p++)
            for (int l = 0; l < LEVELS; l++) {
                TRY(measure(b, &score[p][l], &b->part[s][part], levels[l], p == 0));
                sum[p][l].plain_bytes += score[p][l].plain_bytes;
                sum[p][l].bytes += score[p][l].bytes;
                sum[p][l].pack_s += score[p][l].pack_s;
                sum[p][l].unpack_s += score[p][l].unpack_s;
            }
        print_row(b, states[s], part, score);
        TRY(out_flush());
    }
    print_row(b, "all three", part, sum);
    return out_flush();
}

static enum status print_checkpoint(const char *path)
{
    enum status st;
    struct bench b = {.zstd = NULL};
    TRY_GOTO(st, out, checkpoint_open(&b.file, path));
    TRY_GOTO(st, out, checkpoint_reader_open(&b.reader, &b.file));
    TRY_GOTO(st, out, mem_alloc(&b.packed, ZSTD_compressBound(CHECKPOINT_CHUNK_BYTES)));
    TRY_GOTO(st, out, mem_alloc(&b.planes, CHECKPOINT_CHUNK_BYTES));
    TRY_GOTO(st, out, mem_alloc(&b.back, CHECKPOINT_CHUNK_BYTES));
    if ((b.unzstd = ZSTD_createDCtx()) == NULL)
        TRY_GOTO(st, out, FAIL(MEMORY, "no memory for zstd"));
    for (int s = 0; s < STATES; s++)
        TRY_GOTO(st, out, read_state(&b, s));
    TRY_GOTO(st, out, find_touched(&b));
    for (int s = 0; s < STATES; s++)
        TRY_GOTO(st, out, split_state(&b, s));
    for (int part = 0; part < PARTS; part++)
        TRY_GOTO(st, out, print_part(&b, (enum part)part));
out:
    ZSTD_freeCCtx(b.zstd);
    ZSTD_freeDCtx(b.unzstd);
    for (int s = 0; s < STATES; s++)
        for (int part = 0; part < PARTS; part++)
            mem_free(&b.part[s][part].at);
    mem_free(&b.touched);
    mem_free(&b.packed);
    mem_free(&b.planes);
    mem_free(&b.back);
    checkpoint_reader_close(&b.reader);
    checkpoint_close(&b.file);
    return st;
}

int main(int argc, char **argv)
{
    enum status st = ST_OK;
    if (argc < 2) {
        out("SKIP: no checkpoint is given; bench/checkpoint/measure.py makes some\n");
        return out_flush() == ST_OK ? 0 : 1;
    }
    out("| step | state | part | MiB | planes, 1 | planes, 3 | planes, 9 | as it lies, 1 | 3 | 9 "
        "|\n"
        "|---|---|---|---|---|---|---|---|---|---|\n");
    for (int i = 1; i < argc && st == ST_OK; i++)
        st = print_checkpoint(argv[i]);
    if (st != ST_OK)
        out("%s\n", status_message());
    return st == ST_OK && out_flush() == ST_OK ? 0 : 1;
}
