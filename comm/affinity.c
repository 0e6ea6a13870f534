#include "comm/affinity.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "comm/affinity_planner.h"
#include "engine/base/arena.h"

/* ---- what there is --------------------------------------------------------------------------- */

static enum status find_usable(struct planner *p)
{
    const struct topology *t = p->t;
    for (int c = 0; c < t->core_count; c++) {
        const struct topology_core *core = &t->cores[c];
        struct usable *u = &p->usable[p->usable_count];
        *u = (struct usable){.node = core->node, .kind = core->kind};
        for (int i = 0; i < core->cpu_count; i++)
            if (p->request->allowed == NULL || cpuset_has(p->request->allowed, core->cpu[i]))
                u->cpu[u->cpu_count++] = core->cpu[i];
        if (u->cpu_count == 0)
            continue;
        p->usable_count++;
        p->plan->cpus += u->cpu_count;
        p->node_cores[u->node]++;
        p->node_cpus[u->node] += u->cpu_count;
    }
    p->plan->cores = p->usable_count;
    return p->usable_count > 0 ? ST_OK : FAIL(INVALID, "no CPU of this machine may be used");
}

/* ---- homes ----------------------------------------------------------------------------------- */

/* What a node can give, in the pieces that go to ranks. */
static int room_of(const struct planner *p, int node)
{
    return p->plan->kind == AFFINITY_CORES ? p->node_cores[node] : p->node_cpus[node];
}

/* The node near @near (NULL: any) that has most for one rank more; -1: none has anything.
 * @with_room: it must have something that is not a rank's yet. */
static int emptiest(const struct planner *p, const struct cpuset *near, bool with_room)
{
    int best = -1;
    for (int n = 0; n < p->t->node_count; n++) {
        int room = room_of(p, n);
        if (room == 0 || (with_room && p->node_ranks[n] >= room) ||
            (near != NULL && !cpuset_meets(near, &p->t->nodes[n].cpus)))
            continue;
        /* room / (ranks + 1), compared without dividing */
        if (best < 0 || (int64_t)room * (p->node_ranks[best] + 1) >
                            (int64_t)room_of(p, best) * (p->node_ranks[n] + 1))
            best = n;
    }
    return best;
}

static void settle(struct planner *p, int rank, int node)
{
    p->home[rank] = node;
    p->node_ranks[node]++;
}

/* Ranks that a node has nothing for go where there is something. */
static void move_ranks(struct planner *p)
{
    for (int r = p->plan->rank_count - 1; r >= 0; r--) {
        int from = p->home[r], to;
        if (from == MACHINE || p->node_ranks[from] <= room_of(p, from))
            continue;
        to = emptiest(p, NULL, true);
        if (to < 0)
            return;
        p->node_ranks[from]--;
        settle(p, r, to);
        p->moved[r] = true;
    }
}

static void find_homes(struct planner *p)
{
    const struct affinity_request *q = p->request;
    for (int r = 0; r < q->ranks; r++) {
        p->plan->ranks[r].gpu = q->gpus != NULL ? q->gpus[r] : -1;
        p->any_gpu |= p->plan->ranks[r].gpu >= 0;
        p->home[r] = MACHINE;
    }
    if (!p->any_gpu)
        return;
    for (int r = 0; r < q->ranks; r++) {
        int gpu = p->plan->ranks[r].gpu;
        int node = gpu >= 0 ? emptiest(p, &p->t->gpus[gpu].near, false) : -1;
        p->moved[r] = gpu >= 0 && node < 0;
        if (node >= 0)
            settle(p, r, node);
    }
    for (int r = 0; r < q->ranks; r++)
        if (p->home[r] == MACHINE)
            settle(p, r, emptiest(p, NULL, false));
    if (p->plan->kind != AFFINITY_SHARED)
        move_ranks(p);
}

/* ---- dealing --------------------------------------------------------------------------------- */

static bool in_domain(const struct usable *u, int domain)
{
    return domain == MACHINE || u->node == domain;
}

static int cut(struct planner *p, int domain, bool whole)
{
    int count = 0;
    for (int i = 0; i < p->usable_count; i++) {
        const struct usable *u = &p->usable[i];
        if (!in_domain(u, domain))
            continue;
        for (int c = 0; c < u->cpu_count; c += whole ? u->cpu_count : 1)
            p->pieces[count++] = (struct piece){i, c, whole ? u->cpu_count : 1, u->kind};
    }
    return count;
}

static void give(struct planner *p, int rank, const struct piece *piece)
{
    for (int i = 0; i < piece->count; i++)
        cpuset_add(&p->plan->ranks[rank].cpus, p->usable[piece->core].cpu[piece->first + i]);
}

/* The next rank of @domain behind @rank; the first of all for -1. */
static int next_rank(const struct planner *p, int domain, int rank)
{
    do
        rank++;
    while (rank < p->plan->rank_count && p->home[rank] != domain);
    return rank;
}

/* Equal runs of neighbouring pieces of one kind. What is over goes to one rank after the other, on
 * from kind to kind: *turn is the next one. */
static void deal_kind(struct planner *p, int domain, int ranks, const int *count, int kind,
                      int *turn)
{
    int total = 0, at = 0, place = 0;
    for (int i = 0; i < *count; i++)
        total += p->pieces[i].kind == kind;
    for (int i = 0; i < ranks; i++)
        p->share[i] = total / ranks;
    for (int i = 0; i < total % ranks; i++, *turn = (*turn + 1) % ranks)
        p->share[*turn]++;
    for (int r = next_rank(p, domain, -1); r < p->plan->rank_count;
         r = next_rank(p, domain, r), place++) {
        for (int left = p->share[place]; left > 0; at++) {
            if (p->pieces[at].kind != kind)
                continue;
            give(p, r, &p->pieces[at]);
            left--;
        }
    }
}

/* Would whole cores leave a rank with fewer CPUs than its even part, which is how many threads a
 * rank on CPUs has? */
static bool cores_are_too_coarse(const struct planner *p, int domain, int ranks)
{
    int cores = 0, cpus = 0, least = TOPOLOGY_THREADS;
    for (int i = 0; i < p->usable_count; i++) {
        if (!in_domain(&p->usable[i], domain))
            continue;
        cores++;
        cpus += p->usable[i].cpu_count;
        least = p->usable[i].cpu_count < least ? p->usable[i].cpu_count : least;
    }
    return cores < ranks || (!p->any_gpu && cores / ranks * least < cpus / ranks);
}

static void deal(struct planner *p, int domain)
{
    int ranks = 0, turn = 0, place = 0;
    for (int r = 0; r < p->plan->rank_count; r++)
        ranks += p->home[r] == domain;
    if (ranks == 0)
        return;
    int count = cut(p, domain, !cores_are_too_coarse(p, domain, ranks));
    if (count >= ranks) {
        for (int kind = 0; kind < p->t->kind_count; kind++)
            deal_kind(p, domain, ranks, &count, kind, &turn);
        return;
    }
    for (int r = next_rank(p, domain, -1); r < p->plan->rank_count;
         r = next_rank(p, domain, r), place++)
        give(p, r, &p->pieces[(int64_t)place * count / ranks]);
}

/* ---- all of it ------------------------------------------------------------------------------- */

static enum status allocate(struct planner *p)
{
    size_t ranks = (size_t)p->request->ranks, nodes = (size_t)p->t->node_count;
    size_t cores = (size_t)p->t->core_count;
    TRY(mem_alloc(&p->plan->ranks, ranks * sizeof *p->plan->ranks));
    TRY(mem_alloc(&p->usable, (cores + 1) * sizeof *p->usable));
    TRY(mem_alloc(&p->pieces, cores * TOPOLOGY_THREADS * sizeof *p->pieces));
    TRY(mem_alloc(&p->home, ranks * sizeof *p->home));
    TRY(mem_alloc(&p->share, ranks * sizeof *p->share));
    TRY(mem_alloc(&p->moved, ranks * sizeof *p->moved));
    TRY(mem_alloc(&p->node_cores, nodes * sizeof *p->node_cores));
    TRY(mem_alloc(&p->node_cpus, nodes * sizeof *p->node_cpus));
    return mem_alloc(&p->node_ranks, nodes * sizeof *p->node_ranks);
}

static enum status build(struct planner *p)
{
    struct affinity_plan *plan = p->plan;
    TRY(allocate(p));
    TRY(find_usable(p));
    plan->kind = plan->cores >= plan->rank_count  ? AFFINITY_CORES
                 : plan->cpus >= plan->rank_count ? AFFINITY_THREADS
                                                  : AFFINITY_SHARED;
    find_homes(p);
    deal(p, MACHINE);
    for (int n = 0; n < p->t->node_count; n++)
        deal(p, n);
    affinity_explain(p);
    return ST_OK;
}

enum status affinity_plan_build(struct affinity_plan *plan, const struct topology *t,
                                const struct affinity_request *request)
{
    struct planner p = {.plan = plan, .t = t, .request = request};
    ASSERT(request->ranks >= 1);
    *plan = (struct affinity_plan){.rank_count = request->ranks};
    enum status st = build(&p);
    mem_free(&p.usable);
    mem_free(&p.pieces);
    mem_free(&p.home);
    mem_free(&p.share);
    mem_free(&p.moved);
    mem_free(&p.node_cores);
    mem_free(&p.node_cpus);
    mem_free(&p.node_ranks);
    if (st != ST_OK)
        affinity_plan_release(plan);
    return st;
}

void affinity_plan_release(struct affinity_plan *plan)
{
    mem_free(&plan->ranks);
    memset(plan, 0, sizeof *plan);
}

void affinity_format(const struct topology *t, const struct affinity_rank *r, char *out,
                     size_t bytes)
{
    char cpus[CPUSET_TEXT_BYTES];
    int nodes = 0;
    bool one_each = true;
    for (int c = 0; c < t->core_count; c++)
        one_each &= t->cores[c].cpu_count == 1 || !cpuset_has(&r->cpus, t->cores[c].cpu[0]);
    for (int n = 0; n < t->node_count; n++)
        nodes += cpuset_meets(&r->cpus, &t->nodes[n].cpus);
    cpuset_format(&r->cpus, cpus, sizeof cpus);
    bool one = cpuset_count(&r->cpus) == 1;
    const char *what = one_each ? (one ? "core" : "cores") : (one ? "cpu" : "cpus");
    if (r->node >= 0)
        snprintf(out, bytes, "%s %s of node %d", what, cpus, t->nodes[r->node].number);
    else
        snprintf(out, bytes, "%s %s of %d nodes", what, cpus, nodes);
}
