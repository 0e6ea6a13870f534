/* What follows for a rank from the CPUs that it has: node, NICs, reasons. */
#include <stdio.h>
#include <string.h>

#include "comm/affinity_planner.h"

enum { MAX_NICS = 64 }; /* that are looked at */

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

void affinity_explain(struct planner *p)
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
