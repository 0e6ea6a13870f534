#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/base/file.h"
#include "engine/train/checkpoint.h"
#include "io/checkpoint.h"

enum status checkpoint_folder(char *out, size_t bytes, const struct run_config *config)
{
    return path_join(out, bytes, config->output.dir, "checkpoints");
}

/* Newer checkpoints than where a run begins would be taken for its own: for the latest, and when
 * old ones are removed. Only those that a resume has found damaged may stand there. */
static enum status check_newest(const char *dir, const struct trainer *t, int64_t newest)
{
    bool latest = t->config->checkpoint.resume_or_start ||
                  strcmp(t->config->checkpoint.resume, "latest") == 0;
    if (newest < 0 || (t->resumed && (latest || newest <= t->first_step)))
        return ST_OK;
    return FAIL(INVALID,
                "%s: step %" PRId64 " of an earlier run is there, and this run would begin at step "
                "%" PRId64 ": go on from it (--resume latest), or give another output.dir",
                dir, newest, t->first_step);
}

static enum status inspect(const char *dir, const struct trainer *t, int64_t *obsolete)
{
    enum status st;
    struct checkpoint_list list = {0};
    int64_t newest = -1;
    TRY(file_make_dirs(dir));
    TRY(checkpoint_sweep(dir));
    TRY_GOTO(st, out, checkpoint_list(&list, dir));
    for (int i = 0; i < list.count; i++)
        if (list.entries[i].status == ST_OK)
            newest = list.entries[i].step;
    *obsolete = newest > t->first_step ? newest : -1;
    st = check_newest(dir, t, newest);
out:
    checkpoint_list_release(&list);
    return st;
}

/* ---- one folder for all ---------------------------------------------------------------------- */

static enum status make_nonce(char path[CHECKPOINT_PATH_BYTES], const char *dir)
{
    char name[64];
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    snprintf(name, sizeof name, ".seen-by-all-%d-%lld", (int)getpid(),
             (long long)now.tv_sec * 1000000000 + now.tv_nsec);
    TRY(path_join(path, CHECKPOINT_PATH_BYTES, dir, name));
    return file_write(path, "", 0);
}

static enum status find_nonce(const char *path, const char *dir, int rank)
{
    char host[256] = "?";
    if (access(path, F_OK) == 0)
        return ST_OK;
    gethostname(host, sizeof host - 1);
    return FAIL(INVALID,
                "%s: rank %d on host %s does not see what rank 0 wrote; output.dir must be one "
                "folder that all ranks share",
                dir, rank, host);
}

/* A file that rank 0 has made is there for every rank. @paths: one a rank. */
static enum status compare_folders(char *paths, const char *dir, const struct trainer *t,
                                   enum status st)
{
    char mine[CHECKPOINT_PATH_BYTES] = "";
    if (st == ST_OK && t->comm->rank == 0)
        st = make_nonce(mine, dir);
    TRY(comm_agree(t->comm, st));
    TRY(comm_exchange(t->comm, paths, mine, sizeof mine));
    st = comm_agree(t->comm, find_nonce(paths, dir, t->comm->rank));
    if (t->comm->rank == 0)
        unlink(mine);
    return st;
}

enum status checkpoint_claim_folder(const char *dir, const struct trainer *t, int64_t *obsolete)
{
    char *paths = NULL;
    enum status st = ST_OK;
    *obsolete = -1;
    if (t->comm->rank == 0)
        st = inspect(dir, t, obsolete);
    if (st == ST_OK)
        st = mem_alloc(&paths, CHECKPOINT_PATH_BYTES * (size_t)t->comm->world_size);
    st = compare_folders(paths, dir, t, st);
    mem_free(&paths);
    return st;
}
