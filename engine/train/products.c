#include "engine/train/products.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/arena.h"
#include "engine/base/file.h"
#include "engine/base/log.h"

enum { PATH_BYTES = 1200, CHUNK_BYTES = 32 << 10 /* below what comm_exchange() takes */ };

/* ---- all ranks ------------------------------------------------------------------------------- */

enum status products_compare(struct comm *comm, const struct gemm_card *card)
{
    struct gemm_card *all = NULL;
    enum status st = ST_OK;
    char mine[256], first[256];
    TRY(mem_alloc(&all, sizeof *all * (size_t)comm->world_size));
    TRY_GOTO(st, out, comm_exchange(comm, all, card, sizeof *card));
    for (int r = 1; r < comm->world_size && st == ST_OK; r++) {
        if (gemm_card_equal(&all[r], &all[0]))
            continue;
        gemm_card_text(mine, sizeof mine, &all[r]);
        gemm_card_text(first, sizeof first, &all[0]);
        st = FAIL(
            INVALID,
            "rank %d has another kind of card or library than rank 0: %s; rank 0: %s. One GEMM "
            "plan serves all ranks; with train.gemm_plan=off they may differ",
            r, mine, first);
    }
out:
    mem_free(&all);
    return st;
}

enum status products_share(struct comm *comm, struct gemm_table *table)
{
    enum status st = ST_OK;
    char *text = NULL;
    size_t bytes = 0;
    uint64_t total = 0;
    if (comm->rank == 0)
        st = gemm_table_write(&text, &bytes, table);
    TRY_GOTO(st, out, comm_agree(comm, st));
    total = bytes;
    TRY_GOTO(st, out, comm_share(comm, &total, sizeof total));
    bytes = (size_t)total;
    if (comm->rank != 0)
        st = mem_alloc(&text, bytes);
    TRY_GOTO(st, out, comm_agree(comm, st));
    for (size_t done = 0; done < bytes; done += CHUNK_BYTES)
        TRY_GOTO(
            st, out,
            comm_share(comm, text + done, bytes - done < CHUNK_BYTES ? bytes - done : CHUNK_BYTES));
    if (comm->rank != 0) {
        gemm_table_release(table);
        st = gemm_table_read(table, text, bytes, "rank 0's GEMM plan");
    }
    TRY_GOTO(st, out, comm_agree(comm, st));
out:
    mem_free(&text);
    return st;
}

/* ---- the file -------------------------------------------------------------------------------- */

enum status products_path(char *out, size_t bytes, const char *where, const struct gemm_card *card)
{
    char folder[PATH_BYTES];
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    out[0] = '\0';
    if (strcmp(where, "off") == 0)
        return ST_OK;
    if (strcmp(where, "auto") != 0)
        return gemm_table_path(out, bytes, where, card);
    if (cache != NULL && cache[0] == '/') /* a relative one is to be ignored, says its standard */
        TRY(path_join(folder, sizeof folder, cache, "tessera"));
    else if (home != NULL && home[0] == '/')
        TRY(path_join(folder, sizeof folder, home, ".cache/tessera"));
    else
        return ST_OK;
    return gemm_table_path(out, bytes, folder, card);
}

/* @why: what a file that is there is not used for, or "". */
static enum status read_plan(struct gemm_table *table, char *why, size_t why_bytes,
                             const char *path, const struct gemm_card *card)
{
    struct file_text text = {0};
    enum status st = ST_OK;
    char of[256];
    why[0] = '\0';
    if (path[0] == '\0' || access(path, F_OK) != 0)
        return ST_OK;
    st = file_read(&text, path);
    if (st == ST_OK)
        st = gemm_table_read(table, text.data, text.bytes, path);
    mem_free(&text.data);
    if (st == ST_MEMORY)
        return st;
    if (st != ST_OK) {
        snprintf(why, why_bytes, "%s", status_message());
        status_clear();
    } else if (!gemm_card_equal(&table->card, card)) {
        gemm_card_text(of, sizeof of, &table->card);
        snprintf(why, why_bytes, "%s is for %s", path, of);
        gemm_table_release(table);
    }
    return ST_OK;
}

enum status products_load(struct gemm_table *table, const char *path, const struct gemm_card *card)
{
    char why[4096];
    TRY(read_plan(table, why, sizeof why, path, card));
    if (why[0] != '\0')
        log_warn("train", "the GEMM plan there is of no use, it is made anew: %s", why);
    table->card = *card;
    return ST_OK;
}

static enum status write_plan(const char *path, const struct gemm_table *table)
{
    char *text = NULL;
    size_t bytes = 0;
    enum status st = ST_OK;
    TRY(file_make_folder_of(path));
    TRY(gemm_table_write(&text, &bytes, table));
    TRY_GOTO(st, out, file_write(path, text, bytes));
out:
    mem_free(&text);
    return st;
}

enum status products_keep(const char *path, const struct gemm_table *table, int first)
{
    struct gemm_table all = {0};
    enum status st = ST_OK;
    char why[256]; /* products_load() has said it */
    if (path[0] == '\0' || first == table->count)
        return ST_OK;
    /* Read again: another run may have added to it meanwhile. */
    TRY_GOTO(st, out, read_plan(&all, why, sizeof why, path, &table->card));
    all.card = table->card;
    for (int i = first; i < table->count && st == ST_OK; i++)
        if (gemm_table_find(&all, &table->entries[i].key) == NULL)
            st = gemm_table_add(&all, &table->entries[i]);
    if (st == ST_OK)
        st = write_plan(path, &all);
    if (st != ST_OK && st != ST_MEMORY) {
        log_warn("train", "the GEMM plan is not kept: %s", status_message());
        status_clear();
        st = ST_OK;
    }
out:
    gemm_table_release(&all);
    return st;
}
