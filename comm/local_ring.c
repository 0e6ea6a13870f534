#include "comm/local_ring.h"

#include <stdio.h>
#include <string.h>

#include "engine/base/clock.h"

enum {
    SUM_BLOCK = 2048, /* fp32 summed at a time: 8 KiB, stays in the first cache */
    SILENT_NAMED = 4  /* ranks that a time-out describes; the rest are counted */
};

static const char *const kind_names[] = {"all_gather", "reduce_scatter", "broadcast", "exchange"};

void ring_lock(struct local_world *w)
{
    int rc = pthread_mutex_lock(&w->monitor.mutex);
    ASSERT(rc == 0);
}

void ring_unlock(struct local_world *w)
{
    int rc = pthread_mutex_unlock(&w->monitor.mutex);
    ASSERT(rc == 0);
}

static bool all_posted(const struct local_world *w, uint64_t n)
{
    return w->slot[n % RING].posts >= (n / RING + 1) * (uint64_t)w->world_size;
}

bool ring_all_read(const struct local_world *w, uint64_t n)
{
    return w->slot[n % RING].reads >= (n / RING + 1) * (uint64_t)w->world_size;
}

/* ---- failures ------------------------------------------------------------------------------- */

/* "all_gather 17 (1024 bf16)"; @text has room for 96 bytes. */
static const char *describe(char text[96], const struct post *p, uint64_t n)
{
    char root[32] = "";
    if (p->kind == BROADCAST)
        snprintf(root, sizeof root, " from rank %d", p->root);
    snprintf(text, 96, "%s %llu (%lld %s%s)", kind_names[p->kind], (unsigned long long)n,
             (long long)p->numel, p->kind == EXCHANGE ? "bytes" : dtype_name(p->dtype), root);
    return text;
}

/* After this no rank reads a peer's buffer any more. */
static void wait_for_copies(struct local_world *w)
{
    ASSERT(w->failure != ST_OK); /* only then is the end of the last copy told */
    while (w->copying > 0)
        pthread_cond_wait(&w->monitor.changed, &w->monitor.mutex);
}

static void fail(struct local_world *w, enum status st, const char *cause)
{
    if (w->failure != ST_OK)
        return;
    w->failure = st;
    snprintf(w->cause, sizeof w->cause, "%s", cause);
    pthread_cond_broadcast(&w->monitor.changed);
}

void ring_fail(struct local_world *w, enum status st, const char *cause)
{
    fail(w, st, cause);
    wait_for_copies(w);
}

static enum status failed(struct local_world *w)
{
    wait_for_copies(w);
    return status_fail(w->failure, __FILE__, __LINE__, "%s", w->cause);
}

static bool is_behind(const struct local_world *w, int rank, uint64_t n)
{
    const struct rank_state *x = &w->rank[rank];
    return !x->waiting && (all_posted(w, n) ? x->read : x->posted) <= n;
}

/* Which ranks keep collective @n from being complete, and what each did last. */
static void fail_silent(struct local_comm *c, uint64_t n, bool left)
{
    struct local_world *w = c->world;
    char text[CAUSE_BYTES], what[96], waited[48] = "cannot finish";
    int silent = 0;
    if (!left)
        snprintf(waited, sizeof waited, "waited %lld ms for", (long long)c->base.timeout_ms);
    size_t used = (size_t)snprintf(text, sizeof text, "rank %d %s %s", c->base.rank, waited,
                                   describe(what, &w->rank[c->base.rank].post[n % RING], n));
    for (int r = 0; r < w->world_size; r++) {
        const struct rank_state *x = &w->rank[r];
        if (!is_behind(w, r, n) || silent++ >= SILENT_NAMED || used >= sizeof text)
            continue;
        const char *state = x->closed       ? "has left"
                            : !x->open      ? "has not joined"
                            : x->posted > n ? "has issued it but not waited for it"
                                            : "is silent";
        if (x->posted > 0)
            describe(what, &x->post[(x->posted - 1) % RING], x->posted - 1);
        else
            snprintf(what, sizeof what, "none");
        used += (size_t)snprintf(text + used, sizeof text - used, "; rank %d %s, its last: %s", r,
                                 state, what);
    }
    if (silent > SILENT_NAMED && used < sizeof text)
        snprintf(text + used, sizeof text - used, "; and %d ranks more", silent - SILENT_NAMED);
    fail(w, left ? ST_COMM : ST_TIMEOUT, text);
}

static void fail_mismatch(struct local_world *w, uint64_t n, int a, int b)
{
    int low = a < b ? a : b, high = a < b ? b : a;
    char text[CAUSE_BYTES], what[2][96];
    snprintf(text, sizeof text, "collectives differ: rank %d issued %s, rank %d issued %s", low,
             describe(what[0], &w->rank[low].post[n % RING], n), high,
             describe(what[1], &w->rank[high].post[n % RING], n));
    fail(w, ST_INVALID, text);
}

/* ---- reading -------------------------------------------------------------------------------- */

/* Rank by rank in a block that stays in cache; the last store allows out to be the own input. */
static void reduce_scatter_read(const struct local_world *w, int rank, uint64_t n)
{
    const struct post *mine = &w->rank[rank].post[n % RING];
    size_t element = dtype_bytes(mine->dtype), first = (size_t)rank * (size_t)mine->numel;
    float sum[SUM_BLOCK];
    for (int64_t at = 0; at < mine->numel; at += SUM_BLOCK) {
        int64_t count = mine->numel - at < SUM_BLOCK ? mine->numel - at : SUM_BLOCK;
        for (int r = 0; r < w->world_size; r++) {
            const char *in = w->rank[r].post[n % RING].send;
            in += (first + (size_t)at) * element;
            if (r == 0)
                comm_load(sum, in, count, mine->dtype);
            else
                comm_add(sum, in, count, mine->dtype);
        }
        comm_store((char *)mine->recv + (size_t)at * element, sum, count, mine->dtype);
    }
}

static void all_gather_read(const struct local_world *w, int rank, uint64_t n, size_t bytes)
{
    char *out = w->rank[rank].post[n % RING].recv;
    for (int r = 0; r < w->world_size; r++) {
        const void *in = w->rank[r].post[n % RING].send;
        /* In place: peers read that part of the output, so it is not written. */
        if (in != out + (size_t)r * bytes)
            memcpy(out + (size_t)r * bytes, in, bytes);
    }
}

/* Without the mutex. The posts do not change before all ranks have read. */
static void read_peers(const struct local_world *w, int rank, uint64_t n)
{
    const struct post *mine = &w->rank[rank].post[n % RING];
    size_t bytes = (size_t)mine->numel * (mine->kind == EXCHANGE ? 1 : dtype_bytes(mine->dtype));
    if (bytes == 0)
        return;
    switch (mine->kind) {
    case ALL_GATHER:
    case EXCHANGE:
        all_gather_read(w, rank, n, bytes);
        break;
    case REDUCE_SCATTER:
        reduce_scatter_read(w, rank, n);
        break;
    case BROADCAST:
        if (rank != mine->root)
            memcpy(mine->recv, w->rank[mine->root].post[n % RING].send, bytes);
        break;
    }
}

/* Do this rank's next read if it may be done now. With the mutex, which it drops meanwhile. */
bool ring_read_next(struct local_comm *c)
{
    struct local_world *w = c->world;
    struct rank_state *me = &w->rank[c->base.rank];
    uint64_t n = me->read;
    struct slot *slot = &w->slot[n % RING];
    if (w->failure != ST_OK || n == me->posted || !all_posted(w, n) ||
        (slot->after > 0 && !ring_all_read(w, slot->after - 1)))
        return false;

    w->copying++;
    ring_unlock(w);
    read_peers(w, c->base.rank, n);
    ring_lock(w);
    w->copying--;
    me->read++;
    slot->reads++;
    if (ring_all_read(w, n) || (w->failure != ST_OK && w->copying == 0))
        pthread_cond_broadcast(&w->monitor.changed);
    return true;
}

/* ---- waiting -------------------------------------------------------------------------------- */

/* A rank that has closed its communicator will never post @n. */
static bool peer_left(const struct local_world *w, uint64_t n)
{
    for (int r = 0; w->closed_count > 0 && r < w->world_size; r++) {
        if (w->rank[r].closed && w->rank[r].posted <= n)
            return true;
    }
    return false;
}

bool ring_complete(struct local_comm *c, uint64_t n)
{
    struct local_world *w = c->world;
    struct rank_state *me = &w->rank[c->base.rank];
    int64_t patience_ns = c->base.timeout_ms * 1000000, deadline_ns = clock_ns() + patience_ns;
    bool late = false;
    me->waiting = true;
    while (w->failure == ST_OK && !ring_all_read(w, n)) {
        if (ring_read_next(c)) {
            deadline_ns = clock_ns() + patience_ns;
            late = false;
        } else if (late || peer_left(w, n)) {
            fail_silent(c, n, !late);
        } else {
            late = !monitor_wait(&w->monitor, deadline_ns);
        }
    }
    me->waiting = false;
    if (w->failure != ST_OK)
        wait_for_copies(w);
    return w->failure == ST_OK;
}

enum status ring_wait(struct local_comm *c, uint64_t n)
{
    return ring_complete(c, n) ? ST_OK : failed(c->world);
}

/* ---- issuing ------------------------------------------------------------------------------- */

static bool posts_equal(const struct post *a, const struct post *b)
{
    return a->kind == b->kind && a->numel == b->numel && a->dtype == b->dtype && a->root == b->root;
}

/* With the mutex. @ticket is the number of the collective. */
enum status ring_post(struct local_comm *c, const struct post *p, uint64_t after, uint64_t *ticket)
{
    struct local_world *w = c->world;
    struct rank_state *me = &w->rank[c->base.rank];
    uint64_t n = me->posted;
    struct slot *slot = &w->slot[n % RING];
    if (w->failure != ST_OK)
        return failed(w);
    if (n >= RING)
        TRY(ring_wait(c, n - RING));

    me->post[n % RING] = *p;
    me->posted++;
    if (slot->posts++ % (uint64_t)w->world_size == 0) {
        slot->first = c->base.rank;
        slot->after = after;
    } else {
        slot->after = after > slot->after ? after : slot->after;
    }
    *ticket = n;
    if (!posts_equal(&w->rank[slot->first].post[n % RING], p)) {
        fail_mismatch(w, n, slot->first, c->base.rank);
        return failed(w);
    }
    if (all_posted(w, n))
        pthread_cond_broadcast(&w->monitor.changed);
    return ST_OK;
}
