/*
 * Saving and loading a checkpoint with the code that training uses, when asked; for
 * bench/checkpoint/measure.py, which asks PyTorch in turn.
 *
 * usage: build/release/bench/checkpoint_ranks CHECKPOINT FOLDER RANKS [cpu|cuda]
 *        build/release/bench/checkpoint_ranks dump CHECKPOINT FILE
 *
 * dump writes all values end to end into FILE, and a JSON line a tensor to stdout. Else lines of
 * stdin are obeyed:
 *
 *     save          as between two steps; then wait for the files. Prints the new checkpoint too.
 *                   call_s: until the call returns; blocked_s: until the state may change
 *     load PATH     master weights, m and v of all ranks
 *     floor BYTES   what a save and a load cannot avoid: a copy of the state to the host; on a card
 *                   the halves of master weights put together; planes and zstd alone; a file of
 *                   BYTES a rank, written and flushed, and read again from the disk and from memory
 *
 * RANKS threads at stage 3, as `tessera train` has them; with cuda one rank on the first GPU. All
 * ranks begin together; a time is that of the last to be ready. Answers are JSON lines.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zstd.h>

#include "engine/base/clock.h"
#include "engine/base/file.h"
#include "engine/base/log.h"
#include "engine/base/out.h"
#include "engine/ops/master.h"
#include "engine/train/checkpoint.h"
#include "engine/train/checkpoint_model.h"
#include "engine/train/checkpoint_ranges.h"
#include "engine/train/run.h"
#include "io/checkpoint_format.h"

enum { PIECE_BYTES = CHECKPOINT_CHUNK_BYTES, PIECE_NUMEL = PIECE_BYTES / 4 };

enum order_kind { ORDER_END, ORDER_SAVE, ORDER_LOAD, ORDER_FLOOR };

struct order {
    enum order_kind kind;
    int64_t bytes;
    char path[CHECKPOINT_PATH_BYTES];
};

static struct run_config config; /* of all ranks; they change it between barriers only */

/* ---- orders ---------------------------------------------------------------------------------- */

static void read_order(struct order *o)
{
    char line[sizeof o->path + 16];
    memset(o, 0, sizeof *o);
    if (fgets(line, sizeof line, stdin) == NULL)
        return;
    line[strcspn(line, "\n")] = '\0';
    if (strcmp(line, "save") == 0) {
        o->kind = ORDER_SAVE;
    } else if (strncmp(line, "load ", 5) == 0) {
        o->kind = ORDER_LOAD;
        snprintf(o->path, sizeof o->path, "%.*s", (int)sizeof o->path - 1, line + 5);
    } else if (strncmp(line, "floor ", 6) == 0) {
        o->kind = ORDER_FLOOR;
        o->bytes = strtoll(line + 6, NULL, 10);
    }
}

/* The latest of all ranks. */
static enum status latest(struct trainer *t, double *seconds)
{
    double *all = NULL;
    enum status st = ST_OK;
    TRY(mem_alloc(&all, sizeof *all * (size_t)t->comm->world_size));
    TRY_GOTO(st, out, comm_exchange(t->comm, all, seconds, sizeof *seconds));
    for (int r = 0; r < t->comm->world_size; r++)
        *seconds = all[r] > *seconds ? all[r] : *seconds;
out:
    mem_free(&all);
    return st;
}

/* ---- save and load --------------------------------------------------------------------------- */

static enum status save(struct trainer *t, int64_t step)
{
    t->steps_done = step;
    TRY(comm_barrier(t->comm));
    double begun = clock_s();
    TRY(checkpointer_save(t->checkpointer, t));
    double call = clock_s() - begun;
    if (t->executor.hold != NULL) /* until then the next update waits */
        TRY(event_wait(t->executor.hold));
    double blocked = clock_s() - begun;
    TRY(checkpointer_finish(t->checkpointer, t));
    double whole = clock_s() - begun;
    TRY(latest(t, &call));
    TRY(latest(t, &blocked));
    TRY(latest(t, &whole));
    if (t->comm->rank != 0)
        return ST_OK;
    out("{\"call_s\": %.6f, \"blocked_s\": %.6f, \"whole_s\": %.6f, "
        "\"path\": \"%s/checkpoints/step-%08" PRId64 "\"}\n",
        call, blocked, whole, config.output.dir, step);
    return out_flush();
}

static enum status load(struct trainer *t, const char *path)
{
    bool resumed = false;
    if (t->comm->rank == 0)
        TRY(path_join(config.checkpoint.resume, sizeof config.checkpoint.resume, "", path));
    TRY(comm_barrier(t->comm));
    double begun = clock_s();
    TRY(checkpoint_resume(t, &resumed));
    double whole = clock_s() - begun;
    TRY(latest(t, &whole));
    if (t->comm->rank != 0)
        return ST_OK;
    out("{\"whole_s\": %.6f}\n", whole);
    return out_flush();
}

/* ---- the floor ------------------------------------------------------------------------------- */

struct floor_run {
    const struct trainer *t; /* borrowed */
    char path[CHECKPOINT_PATH_BYTES];
    char *from; /* owned, pinned; a rank's master, m and v */
    char *to;   /* owned; a piece */
    size_t state_bytes;
    int64_t file_bytes;
    char *packed;                    /* owned; as large */
    uint32_t (*plane_bytes)[PLANES]; /* owned; by piece */
    uint8_t *planes;                 /* owned; a piece, as values */
    float *values;
    struct ZSTD_CCtx_s *zstd;
    struct ZSTD_DCtx_s *unzstd;
};

static size_t piece_numel(const struct floor_run *f, size_t first)
{
    size_t left = f->state_bytes / 4 - first;
    return left < PIECE_NUMEL ? left : PIECE_NUMEL;
}

/* Planes and zstd alone, in one thread a rank as in a save. */
static enum status pack_state(const struct floor_run *f)
{
    size_t used = 0, bytes = 0;
    for (size_t first = 0; first < f->state_bytes / 4; first += PIECE_NUMEL, used += bytes)
        TRY(chunk_pack((uint8_t *)f->packed + used, &bytes, f->plane_bytes[first / PIECE_NUMEL],
                       f->planes, (const float *)(const void *)f->from + first,
                       (int32_t)piece_numel(f, first), f->zstd, true));
    return ST_OK;
}

static enum status unpack_state(const struct floor_run *f)
{
    size_t used = 0;
    for (size_t first = 0; first < f->state_bytes / 4; first += PIECE_NUMEL) {
        const uint32_t *bytes = f->plane_bytes[first / PIECE_NUMEL];
        if (!chunk_unpack(f->values, f->planes, (const uint8_t *)f->packed + used, bytes,
                          (int32_t)piece_numel(f, first), f->unzstd))
            return FAIL(CORRUPT, "what was packed cannot be unpacked");
        for (int p = 0; p < PLANES; p++)
            used += bytes[p];
    }
    return ST_OK;
}

/* The values of this rank's shards, also for packing; of bf16 parameters halves of the masters. */
static enum status copy_state(const struct floor_run *f)
{
    char *at = f->from;
    struct stream *s = &f->t->device->streams[STREAM_COPY];
    for (int u = 0; u < f->t->setup.model.unit_count; u++) {
        struct shard_view view = executor_shard(&f->t->executor, u);
        const float *moment[] = {view.adam_m, view.adam_v};
        size_t bytes = sizeof(float) * (size_t)view.numel;
        TRY(executor_copy_master(s, (float *)(void *)at, &view, 0, view.numel));
        at += bytes;
        for (int k = 0; k < 2; k++, at += bytes)
            TRY(device_copy(s, at, moment[k], bytes));
    }
    return stream_sync(s);
}

/* Both halves put together, as in a save. */
static enum status join_state(const struct floor_run *f)
{
    char *at = f->from;
    for (int u = 0; u < f->t->setup.model.unit_count; u++) {
        struct shard_view view = executor_shard(&f->t->executor, u);
        if (view.low != NULL)
            master_join((float *)(void *)at, (uint16_t *)(void *)f->packed, view.numel);
        at += 3 * sizeof(float) * (size_t)view.numel;
    }
    return ST_OK;
}

static enum status write_file(const struct floor_run *f)
{
    int fd = open(f->path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    bool good = fd >= 0;
    for (int64_t done = 0; good && done < f->file_bytes; done += PIECE_BYTES) {
        size_t n =
            f->file_bytes - done < PIECE_BYTES ? (size_t)(f->file_bytes - done) : PIECE_BYTES;
        good = write(fd, f->from + (size_t)done % (f->state_bytes - PIECE_BYTES), n) == (ssize_t)n;
    }
    good = good && fsync(fd) == 0;
    enum status st = good ? ST_OK : FAIL(IO, "%s: %s", f->path, strerror(errno));
    if (fd >= 0)
        close(fd);
    return st;
}

static enum status read_file(const struct floor_run *f, bool cold)
{
    int fd = open(f->path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0 && cold)
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    bool good = fd >= 0;
    for (int64_t done = 0; good && done < f->file_bytes; done += PIECE_BYTES)
        good = pread(fd, f->to, PIECE_BYTES, done) > 0;
    enum status st = good ? ST_OK : FAIL(IO, "%s: %s", f->path, strerror(errno));
    if (fd >= 0)
        close(fd);
    return st;
}

static enum status read_cold(const struct floor_run *f)
{
    return read_file(f, true);
}

static enum status read_warm(const struct floor_run *f)
{
    return read_file(f, false);
}

static enum status measure_floor(struct trainer *t, const struct floor_run *f)
{
    static const struct {
        const char *name;
        enum status (*body)(const struct floor_run *f);
    } cases[] = {{"copy_s", copy_state},     {"join_s", join_state},  {"pack_s", pack_state},
                 {"unpack_s", unpack_state}, {"write_s", write_file}, {"cold_s", read_cold},
                 {"warm_s", read_warm}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        TRY(comm_barrier(t->comm));
        double begun = clock_s();
        TRY(cases[i].body(f));
        double seconds = clock_s() - begun;
        TRY(latest(t, &seconds));
        if (t->comm->rank == 0)
            out("%s\"%s\": %.6f", i == 0 ? "{" : ", ", cases[i].name, seconds);
    }
    if (t->comm->rank == 0)
        out(", \"state_bytes\": %zu, \"file_bytes\": %" PRId64 "}\n", f->state_bytes,
            f->file_bytes);
    return t->comm->rank == 0 ? out_flush() : ST_OK;
}

static enum status find_floor(struct trainer *t, int64_t bytes)
{
    enum status st = ST_OK;
    struct floor_run f = {.t = t, .file_bytes = bytes};
    for (int u = 0; u < t->setup.model.unit_count; u++)
        f.state_bytes += 3 * sizeof(float) * (size_t)t->setup.layout.units[u].shard_numel;
    snprintf(f.path, sizeof f.path, "%.900s/floor-%d", config.output.dir, t->comm->rank);
    TRY_GOTO(st, out, device_alloc_host(t->device, (void **)&f.from, f.state_bytes));
    TRY_GOTO(st, out, mem_alloc(&f.to, PIECE_BYTES));
    TRY_GOTO(st, out, mem_alloc(&f.packed, f.state_bytes));
    TRY_GOTO(st, out, mem_alloc(&f.planes, PIECE_BYTES));
    TRY_GOTO(st, out, mem_alloc(&f.values, PIECE_BYTES));
    TRY_GOTO(st, out,
             mem_alloc(&f.plane_bytes, sizeof *f.plane_bytes * (f.state_bytes / PIECE_BYTES + 1)));
    TRY_GOTO(st, out, chunk_compressor(&f.zstd, CHECKPOINT_LEVEL));
    if ((f.unzstd = ZSTD_createDCtx()) == NULL)
        TRY_GOTO(st, out, FAIL(MEMORY, "no memory for zstd"));
    TRY_GOTO(st, out, copy_state(&f)); /* now all pages are there */
    TRY_GOTO(st, out, measure_floor(t, &f));
out:
    unlink(f.path);
    ZSTD_freeCCtx(f.zstd);
    ZSTD_freeDCtx(f.unzstd);
    device_free_host(t->device, (void **)&f.from);
    mem_free(&f.to);
    mem_free(&f.packed);
    mem_free(&f.planes);
    mem_free(&f.values);
    mem_free(&f.plane_bytes);
    return st;
}

/* ---- the ranks ------------------------------------------------------------------------------- */

static enum status obey(void *context, struct trainer *t)
{
    int64_t next = t->steps_done + 1;
    (void)context;
    if (t->comm->rank == 0) {
        out("{\"ranks\": %d, \"packing\": %d, \"loading\": %d}\n", t->comm->world_size,
            checkpoint_packing_threads(t), range_reader_threads(t->device));
        TRY(out_flush());
    }
    for (;;) {
        struct order o = {.kind = ORDER_END};
        if (t->comm->rank == 0)
            read_order(&o);
        TRY(comm_share(t->comm, &o, sizeof o)); /* here the others wait for rank 0 to read */
        if (o.kind == ORDER_END)
            return ST_OK;
        if (o.kind == ORDER_SAVE)
            TRY(save(t, next++));
        else if (o.kind == ORDER_LOAD)
            TRY(load(t, o.path));
        else
            TRY(find_floor(t, o.bytes));
    }
}

static enum status run(const char *checkpoint, const char *folder, int ranks, bool cuda,
                       char **argv)
{
    enum status st;
    struct checkpoint file = {0};
    const struct run_options options = {.quiet = true, .body = obey};
    TRY_GOTO(st, out, checkpoint_open(&file, checkpoint));
    TRY_GOTO(st, out, checkpoint_config(&config, &file));
    TRY_GOTO(st, out, path_join(config.output.dir, sizeof config.output.dir, "", folder));
    TRY_GOTO(st, out,
             path_join(config.checkpoint.resume, sizeof config.checkpoint.resume, "", checkpoint));
    int64_t batch = config.train.micro_batch * config.train.grad_accum * config.train.ranks;
    config.train.ranks = ranks;
    config.train.device = cuda ? DEVICE_CUDA : DEVICE_CPU;
    config.train.comm = COMM_AUTO;
    config.train.zero_stage = 3;
    config.train.grad_accum = 1;
    config.train.micro_batch = batch / ranks;
    config.train.timeout_s = 3600; /* between orders ranks wait for one that reads */
    config.train.steps = file.step + 1000;
    config.checkpoint.every = 1;
    config.checkpoint.keep = 0;
    config.checkpoint.async = true;
    TRY_GOTO(st, out, config_check(&config));
    TRY_GOTO(st, out, run_launch(&config, &options, ranks, argv));
out:
    checkpoint_close(&file);
    return st;
}

/* ---- the same values for others -------------------------------------------------------------- */

static enum status dump_tensor(FILE *f, struct checkpoint_reader *r,
                               const struct checkpoint_tensor *t, const char *state)
{
    enum status st = ST_OK;
    float *values = NULL;
    TRY(mem_alloc(&values, sizeof *values * (size_t)t->numel));
    TRY_GOTO(st, out, checkpoint_read_range(r, state, t->name, 0, t->numel, values));
    if (fwrite(values, sizeof *values, (size_t)t->numel, f) != (size_t)t->numel)
        st = FAIL(IO, "the dump cannot be written: %s", strerror(errno));
    out("{\"name\": \"%s\", \"state\": \"%s\", \"shape\": [", t->name, state);
    for (int i = 0; i < t->dims; i++)
        out("%s%" PRId64, i > 0 ? ", " : "", t->shape[i]);
    out("]}\n");
out:
    mem_free(&values);
    return st;
}

static enum status dump(const char *checkpoint, const char *path)
{
    enum status st;
    struct checkpoint file = {0};
    struct checkpoint_reader r = {0};
    FILE *f = fopen(path, "wb");
    if (f == NULL)
        return FAIL(IO, "%s: %s", path, strerror(errno));
    TRY_GOTO(st, out, checkpoint_open(&file, checkpoint));
    TRY_GOTO(st, out, checkpoint_reader_open(&r, &file));
    for (int i = 0; i < file.tensor_count; i++)
        for (int s = 0; s < file.tensors[i].state_count; s++)
            TRY_GOTO(st, out, dump_tensor(f, &r, &file.tensors[i], file.tensors[i].states[s]));
out:
    if (fclose(f) != 0 && st == ST_OK)
        st = FAIL(IO, "%s: %s", path, strerror(errno));
    checkpoint_reader_close(&r);
    checkpoint_close(&file);
    return st;
}

int main(int argc, char **argv)
{
    enum status st = ST_OK;
    log_set_level(LOG_WARN);
    if (argc == 4 && strcmp(argv[1], "dump") == 0)
        st = dump(argv[2], argv[3]);
    else if (argc == 4 || argc == 5)
        st = run(argv[1], argv[2], (int)strtol(argv[3], NULL, 10),
                 argc == 5 && strcmp(argv[4], "cuda") == 0, argv);
    else
        out("SKIP: bench/checkpoint/measure.py runs this\n");
    if (st != ST_OK)
        fprintf(stderr, "%s\n", status_message());
    return st == ST_OK && out_flush() == ST_OK ? 0 : 1;
}
