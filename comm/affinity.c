#include "comm/affinity.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"

enum { MACHINE = -1, MAX_NICS = 64 }; /* a home; NICs that are looked at */

/* What may be used of a core. */
struct usable {
    int node, kind, core; /* index into topology->cores */
    int cpu[TOPOLOGY_THREADS], cpu_count;
};

/* What is dealt: a whole core, or one of its CPUs. */
struct piece {
    int core;  /* index into usable */
    int first; /* CPU of that core */
    int count;
    int kind;
};

struct planner {
    struct affinity_plan *plan;
    const struct topology *t;
    const struct affinity_request *request;
    struct usable *usable; /* owned, as the others */
    int *home;             /* [ranks] node whose cores a rank gets a part of; MACHINE: all */
    bool *moved;           /* [ranks] that is not the node of its GPU */
    int *node_cores, *node_cpus, *node_ranks; /* [nodes] */
    struct piece *pieces;                     /* room for all CPUs */
    int *share;                               /* [ranks] */
    int usable_count;
    bool any_gpu;
};

/* ---- what there is --------------------------------------------------------------------------- */

static enum status find_usable(struct planner *p)
{
    const struct topology *t = p->t;
    for (int c = 0; c < t->core_count; c++) {
        const struct topology_core *core = &t->cores[c];
        struct usable *u = &p->usable[p->usable_count];
        *u = (struct usable){.node = core->node, .kind = core->kind, .core = c};
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

/* ---- NICs ------------------------------------------------------------------------------------ */

/* What the cores of a rank have in common with a NIC. */
static enum topology_distance from_cores(const struct topology *t, const struct affinity_rank *r,
                                         const struct topology_nic *nic)
{
    bool everywhere = true;
    if (r->node >= 0 && cpuset_contains(&t->nodes[r->node].cpus, &nic->near))
        return TOPOLOGY_NODE;
    for (int n = 0; n < t->node_count; n++)
        everywhere &= cpuset_contains(&nic->near, &t->nodes[n].cpus);
    return !everywhere && cpuset_meets(&nic->near, &r->cpus) ? TOPOLOGY_PACKAGE : TOPOLOGY_MACHINE;
}

static enum topology_distance nic_distance(const struct planner *p, const struct affinity_rank *r,
                                           int nic)
{
    return r->gpu >= 0 ? topology_distance(p->t, r->gpu, nic)
                       : from_cores(p->t, r, &p->t->nics[nic]);
}

/* The NICs that are nearest, as bits: those for verbs, or where there are none, all.
 * @sockets: those with an interface. */
static uint64_t nearest_nics(const struct planner *p, const struct affinity_rank *r, bool sockets,
                             enum topology_distance *distance)
{
    const struct topology *t = p->t;
    bool any_fabric = false;
    uint64_t best = 0;
    int count = t->nic_count < MAX_NICS ? t->nic_count : MAX_NICS;
    for (int n = 0; n < count; n++)
        any_fabric |= t->nics[n].up && t->nics[n].fabric[0] != '\0';
    *distance = TOPOLOGY_MACHINE;
    for (int n = 0; n < count; n++) {
        const struct topology_nic *nic = &t->nics[n];
        if (!nic->up || (sockets ? nic->interface[0] : any_fabric ? nic->fabric[0] : 'x') == '\0')
            continue;
        enum topology_distance d = nic_distance(p, r, n);
        if (d < *distance)
            best = 0;
        if (d <= *distance) {
            *distance = d;
            best |= UINT64_C(1) << n;
        }
    }
    return best;
}

/* Of the NICs that are equally near to several ranks, each gets its part, or one in turn. */
static void deal_nics(struct planner *p)
{
    enum topology_distance distance;
    for (int r = 0; r < p->plan->rank_count; r++) {
        struct affinity_rank *rank = &p->plan->ranks[r];
        uint64_t mine = nearest_nics(p, rank, false, &distance);
        int before = 0, all = 0, at = 0, nics = __builtin_popcountll(mine);
        for (int other = 0; other < p->plan->rank_count; other++) {
            enum topology_distance d;
            bool same = nearest_nics(p, &p->plan->ranks[other], false, &d) == mine;
            all += same;
            before += same && other < r;
        }
        for (int n = 0; n < MAX_NICS && nics > 0; n++) {
            if ((mine >> n & 1) == 0)
                continue;
            bool take = nics >= all ? at % all == before : at == before % nics;
            if (take && rank->nic_count < AFFINITY_NICS)
                rank->nics[rank->nic_count++] = n;
            at++;
        }
        mine = nearest_nics(p, rank, true, &distance);
        rank->interface = mine != 0 ? __builtin_ctzll(mine) : -1;
    }
}

/* ---- why ------------------------------------------------------------------------------------- */

/* How many cores, and do they lie on one node? */
static void count_cores(const struct planner *p, struct affinity_rank *r)
{
    bool one = true;
    r->node = -1;
    for (int i = 0; i < p->usable_count; i++) {
        const struct usable *u = &p->usable[i];
        bool mine = false;
        for (int c = 0; c < u->cpu_count; c++)
            mine |= cpuset_has(&r->cpus, u->cpu[c]);
        if (!mine)
            continue;
        one &= r->cores == 0 || r->node == u->node;
        r->node = u->node;
        r->cores++;
    }
    r->node = one ? r->node : -1;
}

static const char *const near_words[] = {
    [TOPOLOGY_SWITCH] = "behind the same PCIe switch as",
    [TOPOLOGY_BRIDGE] = "behind the same host bridge as",
    [TOPOLOGY_NODE] = "on the node of",
    [TOPOLOGY_PACKAGE] = "on the package of",
    [TOPOLOGY_MACHINE] = "far from",
};

static void why_cores(struct planner *p, int rank, char *out, size_t bytes)
{
    const struct affinity_plan *plan = p->plan;
    const struct affinity_rank *r = &plan->ranks[rank];
    const struct topology_node *nodes = p->t->nodes;
    int home = p->home[rank];
    bool shared = plan->kind == AFFINITY_SHARED;
    if (home == MACHINE && plan->rank_count == 1)
        snprintf(out, bytes, "The only rank has all cores.");
    else if (home == MACHINE)
        snprintf(out, bytes, "%d ranks without GPUs %s all %d %s.", plan->rank_count,
                 shared ? "share" : "divide", shared ? plan->cpus : plan->cores,
                 shared ? "hardware threads" : "cores");
    else if (p->moved[rank])
        snprintf(out, bytes, "Near its GPU no core is left or allowed, on node %d there is.",
                 nodes[home].number);
    else if (r->gpu < 0)
        snprintf(out, bytes, "Where its GPU hangs is unknown; node %d has most cores a rank.",
                 nodes[home].number);
    else if (p->node_ranks[home] == 1)
        snprintf(out, bytes, "Its GPU hangs on node %d, whose cores no other rank needs.",
                 nodes[home].number);
    else
        snprintf(out, bytes, "Its GPU hangs on node %d, whose %d %s %d ranks %s.",
                 nodes[home].number, shared ? p->node_cpus[home] : p->node_cores[home],
                 shared ? "hardware threads" : "cores", p->node_ranks[home],
                 shared ? "share" : "divide");
}

static void why_nics(struct planner *p, const struct affinity_rank *r, char *out, size_t bytes)
{
    const struct topology *t = p->t;
    if (t->nic_count == 0) {
        snprintf(out, bytes, " There is no NIC.");
        return;
    }
    if (r->nic_count == 0) {
        snprintf(out, bytes, " No NIC is up.");
        return;
    }
    const struct topology_nic *n = &t->nics[r->nics[0]];
    enum topology_distance d = nic_distance(p, r, r->nics[0]);
    snprintf(out, bytes, " %s%s %s %s its %s.", n->fabric[0] != '\0' ? n->fabric : n->interface,
             r->nic_count > 1 ? " and others" : "", r->nic_count > 1 ? "are" : "is", near_words[d],
             r->gpu >= 0 ? "GPU" : "cores");
}

static void explain(struct planner *p)
{
    for (int r = 0; r < p->plan->rank_count; r++)
        count_cores(p, &p->plan->ranks[r]);
    deal_nics(p);
    for (int r = 0; r < p->plan->rank_count; r++) {
        char *why = p->plan->ranks[r].why;
        why_cores(p, r, why, AFFINITY_WHY_BYTES);
        size_t used = strlen(why);
        why_nics(p, &p->plan->ranks[r], why + used, AFFINITY_WHY_BYTES - used);
    }
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
    explain(p);
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
    const char *what = one_each ? "cores" : "cpus";
    if (r->node >= 0)
        snprintf(out, bytes, "%s %s of node %d", what, cpus, t->nodes[r->node].number);
    else
        snprintf(out, bytes, "%s %s of %d nodes", what, cpus, nodes);
}
