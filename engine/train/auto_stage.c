#include "engine/train/auto_stage.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/text.h"
#include "engine/train/fit.h"

/* What a rank tells the others. */
struct place {
    char host[128];
    uint64_t free_bytes;
};

/* What all know then. */
struct shares {
    size_t rank_bytes; /* the least that a rank has */
    int nodes;
};

static int ranks_of_host(const struct place *all, int world, const char *host)
{
    int count = 0;
    for (int r = 0; r < world; r++)
        count += strcmp(all[r].host, host) == 0;
    return count;
}

static enum status share_memory(struct shares *shares, const struct trainer *t)
{
    enum status st = ST_OK;
    struct place mine = {.host = ""}, *all = NULL;
    int world = t->comm->world_size;
    size_t free_bytes = 0;
    st = device_memory_free(t->device, &free_bytes);
    TRY_GOTO(st, out, comm_agree(t->comm, st));
    mine.free_bytes = free_bytes;
    gethostname(mine.host, sizeof mine.host - 1);
    TRY_GOTO(st, out, mem_alloc(&all, sizeof *all * (size_t)world));
    TRY_GOTO(st, out, comm_exchange(t->comm, all, &mine, sizeof mine));
    *shares = (struct shares){.rank_bytes = SIZE_MAX};
    for (int r = 0; r < world; r++) {
        int here = ranks_of_host(all, world, all[r].host);
        bool first = true;
        for (int other = 0; other < r && first; other++)
            first = strcmp(all[other].host, all[r].host) != 0;
        shares->nodes += first;
        /* A card belongs to its rank. */
        size_t share = (size_t)all[r].free_bytes / (t->device->fixed_rows ? 1 : (size_t)here);
        if (share < shares->rank_bytes)
            shares->rank_bytes = share;
    }
out:
    mem_free(&all);
    return st;
}

/* The profile of this machine, if it says anything of these ranks. */
struct known {
    struct machine machine;
    enum machine_match match; /* MACHINE_NONE: nothing is predicted */
    char source[256];         /* whose rates, in brackets behind the reason */
};

static void say_source(struct known *k, const char *device, enum machine_match match)
{
    if (match == MACHINE_OWN)
        snprintf(k->source, sizeof k->source, "rates: your own of %.80s", device);
    else if (match == MACHINE_BUILTIN)
        snprintf(k->source, sizeof k->source, "rates: built in for %.80s", device);
    else if (match == MACHINE_OTHER)
        snprintf(k->source, sizeof k->source,
                 "rates: your own, but of %.80s; tessera calibrate measures this %.80s",
                 k->machine.name, device);
    else
        snprintf(k->source, sizeof k->source,
                 "no step times: no rates of %.80s are known, tessera calibrate measures them",
                 device);
}

static enum status find_machine(struct known *k, const struct trainer *t, int nodes)
{
    bool cuda = t->device->fixed_rows;
    TRY(machine_for(&k->machine, &k->match, cuda ? DEVICE_CUDA : DEVICE_CPU, t->device->name));
    say_source(k, t->device->name, k->match);
    if (k->match == MACHINE_NONE)
        return ST_OK;
    bool far = nodes > 1 && !(k->machine.far.gather_per_second > 0);
    if (!far && t->comm->world_size % nodes == 0)
        return ST_OK;
    k->match = MACHINE_NONE;
    snprintf(k->source, sizeof k->source,
             far ? "no step times: no network is in the rates of %.80s"
                 : "no step times: the nodes of %.80s are not alike",
             k->machine.name);
    return ST_OK;
}

static enum status no_stage_fits(const struct fit *fits, size_t room_bytes)
{
    char room[32], needs[32];
    const struct fit *least = NULL;
    for (int i = 0; i < FIT_STAGES; i++)
        if (fits[i].allowed &&
            (least == NULL || fits[i].account.arena_bytes < least->account.arena_bytes))
            least = &fits[i];
    ASSERT(least != NULL);
    text_of_bytes(room, room_bytes);
    text_of_bytes(needs, least->account.arena_bytes);
    return FAIL(
        INVALID,
        "train.zero_stage auto: no stage fits; a rank has %s for its arena, and stage %d, "
        "which needs least, needs %s: lower train.micro_batch (and raise train.grad_accum), "
        "set train.recompute to block, or take more ranks",
        room, least->stage, needs);
}

static void explain(char out[STAGE_REASON_BYTES], const struct fit *fits, const struct fit *best,
                    size_t room_bytes, const char *source)
{
    char room[32], stages[32] = "";
    for (int i = 0; i < FIT_STAGES; i++)
        if (fits[i].fits)
            snprintf(stages + strlen(stages), sizeof stages - strlen(stages), "%s%d",
                     stages[0] != '\0' ? ", " : "", i);
    text_of_bytes(room, room_bytes);
    if (strlen(stages) == 1)
        snprintf(out, STAGE_REASON_BYTES,
                 "zero stage auto: %d is the only one that fits in the %s that a rank has for its "
                 "arena",
                 best->stage, room);
    else if (best->step_seconds > 0)
        snprintf(out, STAGE_REASON_BYTES,
                 "zero stage auto: of %s, which fit in the %s that a rank has for its arena, %d is "
                 "predicted to be the fastest, with %.2f ms a step (%s)",
                 stages, room, best->stage, best->step_seconds * 1e3, source);
    else
        snprintf(out, STAGE_REASON_BYTES,
                 "zero stage auto: of %s, which fit in the %s that a rank has for its arena, %d "
                 "sends least, %.1f MiB a step (%s)",
                 stages, room, best->stage, (double)best->sent_bytes / 1048576.0, source);
}

/* What rank 0 says. */
struct answer {
    int stage;
    char reason[STAGE_REASON_BYTES];
};

static enum status choose(struct answer *a, const struct trainer *t, const struct shares *shares,
                          struct setup_rows rows)
{
    struct fit fits[FIT_STAGES];
    struct known known;
    size_t beside = 0;
    memset(&known, 0, sizeof known);
    TRY(find_machine(&known, t, shares->nodes));
    struct fit_question q = {.config = t->config,
                             .device = t->device,
                             .world_size = t->comm->world_size,
                             .rows = rows,
                             .machine = known.match != MACHINE_NONE ? &known.machine : NULL,
                             .nodes = shares->nodes};
    TRY(fit_copy_bytes(&beside, &q));
    beside += t->device->fixed_rows ? AUTO_STAGE_CARD : AUTO_STAGE_PROCESS;
    q.room_bytes = shares->rank_bytes > beside ? shares->rank_bytes - beside : 0;
    for (int i = 0; i < FIT_STAGES; i++)
        TRY(fit_given(&fits[i], &q, i));
    const struct fit *best = fit_fastest(fits, FIT_STAGES);
    if (best == NULL)
        return no_stage_fits(fits, q.room_bytes);
    a->stage = best->stage;
    explain(a->reason, fits, best, q.room_bytes, known.source);
    return ST_OK;
}

enum status auto_stage(int *stage, struct trainer *t, struct setup_rows rows)
{
    struct shares shares;
    struct answer answer = {.stage = 0};
    TRY(share_memory(&shares, t));
    enum status st = ST_OK;
    if (t->comm->rank == 0)
        st = choose(&answer, t, &shares, rows);
    TRY(comm_agree(t->comm, st));
    TRY(comm_share(t->comm, &answer, sizeof answer));
    *stage = answer.stage;
    snprintf(t->stage_reason, sizeof t->stage_reason, "%s", answer.reason);
    return ST_OK;
}
