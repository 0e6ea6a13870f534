#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/base/file.h"
#include "engine/base/log.h"
#include "engine/train/checkpoint_convert.h"
#include "engine/train/checkpoint_model.h"
#include "engine/train/model_config.h"
#include "io/safetensors.h"

enum { PIECE_NUMEL = CHECKPOINT_CHUNK_BYTES / 4, PATH_BYTES = CHECKPOINT_PATH_BYTES };

/* All that an export writes, and so all that one may remove. */
static const char *const file_names[] = {"model.safetensors", "config.json",
                                         "tokenizer_config.json", "vocab.txt"};

enum { FILES = sizeof file_names / sizeof *file_names };

/* ---- folders --------------------------------------------------------------------------------- */

static bool is_ours(const char *name)
{
    for (int i = 0; i < FILES; i++)
        if (strcmp(name, file_names[i]) == 0)
            return true;
    return false;
}

/* May a new folder take the place of what stands there? */
static enum status check_target(const char *dir, bool overwrite)
{
    enum status st = ST_OK;
    struct stat info;
    if (lstat(dir, &info) != 0)
        return errno == ENOENT ? ST_OK : FAIL(IO, "%s: %s", dir, strerror(errno));
    if (!S_ISDIR(info.st_mode))
        return FAIL(INVALID, "%s: something else than a folder is there already", dir);
    DIR *folder = opendir(dir);
    if (folder == NULL)
        return FAIL(IO, "%s: %s", dir, strerror(errno));
    for (const struct dirent *e; st == ST_OK && (errno = 0, e = readdir(folder)) != NULL;) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
            continue;
        if (!overwrite)
            st = FAIL(INVALID, "%s: is there already; --overwrite replaces it", dir);
        else if (!is_ours(e->d_name))
            st = FAIL(INVALID,
                      "%s: holds %.200s, which an export does not write: it is not replaced", dir,
                      e->d_name);
    }
    if (st == ST_OK && errno != 0)
        st = FAIL(IO, "%s: the folder cannot be read to its end: %s", dir, strerror(errno));
    closedir(folder);
    return st;
}

static void remove_folder(const char *dir)
{
    for (int i = 0; i < FILES; i++) {
        char path[PATH_BYTES + 64];
        if (path_join(path, sizeof path, dir, file_names[i]) == ST_OK)
            unlink(path);
    }
    rmdir(dir);
}

/* "DIR/../.tessera-export-PID-K", a name that is free; @above: the folder it is in. */
static enum status make_hidden(char *hidden, char *above, const char *dir)
{
    size_t length = strlen(dir);
    while (length > 1 && dir[length - 1] == '/')
        length--;
    while (length > 0 && dir[length - 1] != '/')
        length--;
    snprintf(above, PATH_BYTES, "%.*s", length > 0 ? (int)length : 1, length > 0 ? dir : ".");
    TRY(file_make_dirs(above));
    for (int k = 0; k < 1000; k++) {
        char name[64];
        snprintf(name, sizeof name, ".tessera-export-%ld-%d", (long)getpid(), k);
        TRY(path_join(hidden, PATH_BYTES, above, name));
        if (!file_fault_due() && mkdir(hidden, 0777) == 0)
            return ST_OK;
        if (errno != EEXIST)
            return FAIL(IO, "%s: cannot be made: %s", hidden, strerror(errno));
    }
    return FAIL(IO, "%s: is full of hidden folders .tessera-export-*", above);
}

static enum status sync_folder(const char *path)
{
    int cause = file_flush_folder(path);
    return cause != 0 ? FAIL(IO, "%s: cannot be flushed: %s", path, strerror(cause)) : ST_OK;
}

static enum status move(const char *from, const char *to)
{
    if (file_fault_due() || rename(from, to) != 0)
        return FAIL(IO, "%s: cannot be renamed to %s: %s", from, to, strerror(errno));
    return ST_OK;
}

/* Two folders change places at once. @known: the file system has that (NFS does not). */
static enum status exchange(const char *a, const char *b, bool *known)
{
    *known = true;
    if (!file_fault_due()) {
        if (renameat2(AT_FDCWD, a, AT_FDCWD, b, RENAME_EXCHANGE) == 0)
            return ST_OK;
        *known = errno != EINVAL && errno != ENOSYS && errno != EOPNOTSUPP;
    }
    return FAIL(IO, "%s: cannot change places with %s: %s", a, b, strerror(errno));
}

/* Without that the old folder steps aside, and for a moment none stands there. */
static enum status replace_in_two(const char *hidden, const char *dir, const char *above)
{
    char aside[PATH_BYTES], ignored[PATH_BYTES];
    TRY(make_hidden(aside, ignored, dir));
    enum status st = move(dir, aside); /* over an empty folder */
    if (st != ST_OK) {
        rmdir(aside);
        return st;
    }
    st = move(hidden, dir);
    if (st != ST_OK) {
        if (rename(aside, dir) != 0)
            log_warn("checkpoint", "%s: what stood there is now %s", dir, aside);
        return st;
    }
    st = sync_folder(above); /* before the old one goes: one of the two outlives a power cut */
    remove_folder(aside);
    return st;
}

/* The old folder, if there is one with files, is removed last. */
static enum status give_name(const char *hidden, const char *dir, const char *above, bool overwrite)
{
    bool known;
    TRY(sync_folder(hidden));
    TRY(check_target(dir, overwrite));
    if (!overwrite || access(dir, F_OK) != 0) {
        TRY(move(hidden, dir));
        return sync_folder(above);
    }
    enum status st = exchange(hidden, dir, &known);
    if (!known)
        return replace_in_two(hidden, dir, above);
    TRY(st);
    TRY(sync_folder(above));
    remove_folder(hidden);
    return ST_OK;
}

/* ---- what is in them ------------------------------------------------------------------------- */

struct export
{
    struct checkpoint from;
    struct checkpoint_reader reader;
    struct run_config config;
    struct model model;
    struct vocab vocab;
    struct safetensors_tensor *tensors; /* owned, as the others */
    struct safetensors_writer writer;
    float *piece;
};

static enum status write_tensor(struct export *e, int tensor)
{
    const struct safetensors_tensor *t = &e->tensors[tensor];
    for (int64_t at = 0; at < t->numel; at += PIECE_NUMEL) {
        int64_t n = t->numel - at < PIECE_NUMEL ? t->numel - at : PIECE_NUMEL;
        TRY(checkpoint_read_range(&e->reader, checkpoint_state_names[CHECKPOINT_MASTER], t->name,
                                  at, n, e->piece));
        TRY(safetensors_write_range(&e->writer, tensor, at, n, e->piece));
    }
    return ST_OK;
}

static enum status write_weights(struct export *e, const char *dir, const char *dtype)
{
    const struct model *m = &e->model;
    TRY(mem_alloc(&e->piece, sizeof *e->piece * PIECE_NUMEL));
    TRY(mem_alloc(&e->tensors, sizeof *e->tensors * (size_t)m->tensor_count));
    for (int i = 0; i < m->tensor_count; i++)
        e->tensors[i] =
            (struct safetensors_tensor){.name = m->tensors[i].name,
                                        .dtype = dtype,
                                        .dims = m->tensors[i].dims,
                                        .shape = {m->tensors[i].shape[0], m->tensors[i].shape[1]}};
    TRY(safetensors_create(&e->writer, dir, file_names[0], e->tensors, m->tensor_count));
    for (int i = 0; i < m->tensor_count; i++)
        TRY(write_tensor(e, i));
    TRY(safetensors_sync(&e->writer));
    return safetensors_publish(&e->writer);
}

static enum status write_folder(struct export *e, const char *dir,
                                const struct checkpoint_export *options)
{
    enum status st;
    char hidden[PATH_BYTES], above[PATH_BYTES];
    TRY(make_hidden(hidden, above, dir));
    TRY_GOTO(st, out, write_weights(e, hidden, options->dtype));
    TRY_GOTO(st, out, model_config_write(&e->config, &e->vocab, options->dtype, hidden));
    TRY_GOTO(st, out, give_name(hidden, dir, above, options->overwrite));
out:
    safetensors_writer_close(&e->writer);
    if (st != ST_OK)
        remove_folder(hidden);
    return st;
}

enum status checkpoint_export(const char *from, const char *dir,
                              const struct checkpoint_export *options)
{
    enum status st;
    struct export e = {.piece = NULL};
    TRY_GOTO(st, out, check_target(dir, options->overwrite));
    TRY_GOTO(st, out, checkpoint_open(&e.from, from));
    TRY_GOTO(st, out, checkpoint_config(&e.config, &e.from));
    TRY_GOTO(st, out, model_open(&e.model, &e.config, DTYPE_F32));
    TRY_GOTO(st, out, checkpoint_check_tensors(&e.from, &e.model, NULL));
    TRY_GOTO(st, out, checkpoint_vocab(&e.vocab, &e.from, &e.config, options->vocab));
    TRY_GOTO(st, out, checkpoint_reader_open(&e.reader, &e.from));
    TRY_GOTO(st, out, write_folder(&e, dir, options));
out:
    mem_free(&e.piece);
    mem_free(&e.tensors);
    vocab_release(&e.vocab);
    checkpoint_reader_close(&e.reader);
    model_release(&e.model);
    checkpoint_close(&e.from);
    return st;
}
