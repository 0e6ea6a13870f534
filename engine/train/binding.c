#include "engine/train/binding.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "comm/affinity.h"
#include "comm/bind.h"
#include "comm/comm.h"
#include "comm/network.h"
#include "comm/rendezvous.h"
#include "engine/base/arena.h"
#include "engine/base/log.h"
#include "engine/train/topology_json.h"

/* ---- planning -------------------------------------------------------------------------------- */

/* The first line of what went wrong: where in the code it did is not for the log of a run. */
static void note_problem(struct binding *b)
{
    const char *text = status_message();
    b->on = false;
    snprintf(b->problem, sizeof b->problem, "%.*s", (int)strcspn(text, "\n"), text);
}

/* Anything but that there is no memory is for the log only. */
static enum status give_up(enum status st)
{
    if (st == ST_MEMORY)
        return st;
    status_clear();
    return ST_OK;
}

static void leave_unbound(struct binding *b, int cpus, const char *why)
{
    *b = (struct binding){.node = BIND_ANY_NODE};
    snprintf(b->where, sizeof b->where, "on %d core%s, not bound%s", cpus, cpus == 1 ? "" : "s",
             why);
}

static void take_rank(struct binding *b, const struct topology *t, const struct affinity_rank *r)
{
    *b = (struct binding){
        .on = true, .cpus = r->cpus, .node = BIND_ANY_NODE, .nodes = t->node_count};
    if (r->node >= 0 && t->node_count > 1)
        b->node = t->nodes[r->node].number;
    affinity_format(t, r, b->where, sizeof b->where);
}

/* list[ranks] from a plan, within @allowed. */
static enum status plan_ranks(struct binding *list, struct affinity_plan *plan,
                              const struct topology *t, const struct affinity_request *request)
{
    TRY(affinity_plan_build(plan, t, request));
    for (int r = 0; r < plan->rank_count; r++) {
        if (plan->kind == AFFINITY_CORES)
            take_rank(&list[r], t, &plan->ranks[r]);
        else
            leave_unbound(&list[r], plan->cpus, ": fewer cores than ranks");
    }
    return ST_OK;
}

enum status binding_plan_threads(struct binding *list, const struct run_config *config, int ranks)
{
    struct topology t = {0};
    struct affinity_plan plan = {0};
    struct cpuset allowed;
    enum status st = bind_get_cpus(&allowed);
    for (int r = 0; r < ranks; r++)
        leave_unbound(&list[r], cpuset_count(&allowed), "");
    if (config->train.bind == BIND_NONE)
        return ST_OK;
    if (st == ST_OK)
        st = topology_read(&t);
    if (st == ST_OK)
        st = plan_ranks(list, &plan, &t,
                        &(struct affinity_request){.ranks = ranks, .allowed = &allowed});
    for (int r = 0; r < ranks && st != ST_OK; r++)
        note_problem(&list[r]);
    affinity_plan_release(&plan);
    topology_release(&t);
    return give_up(st);
}

/* ---- processes ------------------------------------------------------------------------------- */

void binding_place_here(struct binding_place *place, const char *bus_id)
{
    memset(place, 0, sizeof *place); /* it is compared as bytes */
    gethostname(place->host, sizeof place->host - 1);
    if (bind_get_cpus(&place->cpus) != ST_OK)
        status_clear();
    if (bus_id != NULL)
        snprintf(place->bus_id, sizeof place->bus_id, "%s", bus_id);
}

static bool same_cpus(const struct binding_place *a, const struct binding_place *b)
{
    return strcmp(a->host, b->host) == 0 && cpuset_equal(&a->cpus, &b->cpus);
}

int binding_sharing(const struct binding_place *all, int world_size, int rank)
{
    int count = 0;
    for (int r = 0; r < world_size; r++)
        count += same_cpus(&all[r], &all[rank]);
    return count;
}

/* What one process plans: itself among those that share its CPUs. */
struct process_plan {
    struct topology topology;
    struct affinity_plan plan;
    struct binding *list; /* owned, as gpus */
    int *gpus;
    int index; /* of this process among them */
};

static enum status plan_process(struct process_plan *p, const struct binding_place *all,
                                int world_size, int rank)
{
    int sharing = binding_sharing(all, world_size, rank), at = 0;
    bool any_gpu = all[rank].bus_id[0] != '\0';
    TRY(mem_alloc(&p->list, (size_t)sharing * sizeof *p->list));
    TRY(mem_alloc(&p->gpus, (size_t)sharing * sizeof *p->gpus));
    TRY(topology_read(&p->topology));
    for (int r = 0; r < world_size; r++) {
        if (!same_cpus(&all[r], &all[rank]))
            continue;
        p->index = r == rank ? at : p->index;
        p->gpus[at++] = topology_find_gpu(&p->topology, all[r].bus_id);
    }
    return plan_ranks(p->list, &p->plan, &p->topology,
                      &(struct affinity_request){.ranks = sharing,
                                                 .gpus = any_gpu ? p->gpus : NULL,
                                                 .allowed = &all[rank].cpus});
}

/* On one machine NCCL needs no NIC. */
static bool several_machines(const struct binding_place *all, int world_size)
{
    bool several = false;
    for (int r = 1; r < world_size; r++)
        several |= strcmp(all[r].host, all[0].host) != 0;
    return several;
}

static enum status tell_nccl(struct binding *b, const struct network_choice *mine, int world_size,
                             int rank, struct rendezvous *rv)
{
    struct network_choice *all = NULL;
    enum status st = ST_OK;
    TRY(mem_alloc(&all, (size_t)world_size * sizeof *all));
    TRY_GOTO(st, out, rendezvous_exchange(rv, all, mine, sizeof *mine));
    network_announce(all, world_size, rank, b->network, sizeof b->network);
out:
    mem_free(&all);
    return st;
}

enum status binding_plan_process(struct binding *b, const struct run_config *config,
                                 const struct binding_place *all, int world_size, int rank,
                                 struct rendezvous *rv)
{
    struct process_plan p = {.index = 0};
    struct network_choice choice;
    enum status st = ST_OK;
    memset(&choice, 0, sizeof choice);
    leave_unbound(b, cpuset_count(&all[rank].cpus), "");
    if (config->train.bind == BIND_NONE)
        return ST_OK;
    st = plan_process(&p, all, world_size, rank);
    if (st == ST_OK) {
        *b = p.list[p.index];
        network_choose(&choice, &p.topology, &p.plan.ranks[p.index]);
    } else {
        note_problem(b);
    }
    st = give_up(st);
    if (st == ST_OK && rv != NULL && several_machines(all, world_size))
        st = tell_nccl(b, &choice, world_size, rank, rv);
    affinity_plan_release(&p.plan);
    topology_release(&p.topology);
    mem_free(&p.list);
    mem_free(&p.gpus);
    return st;
}

/* ---- binding --------------------------------------------------------------------------------- */

static enum status bind_now(const struct binding *b)
{
    TRY(bind_set_cpus(&b->cpus));
    return b->node != BIND_ANY_NODE ? bind_set_memory(b->node) : ST_OK;
}

void binding_apply(struct binding *b)
{
    struct cpuset before;
    if (!b->on)
        return;
    enum status st = bind_get_cpus(&before);
    if (st == ST_OK)
        st = bind_now(b);
    if (st == ST_OK)
        return;
    /* As if nothing had been tried. */
    note_problem(b);
    snprintf(b->where, sizeof b->where, "on %d cores, not bound", cpuset_count(&before));
    if (cpuset_count(&before) > 0 && bind_set_cpus(&before) != ST_OK)
        snprintf(b->where, sizeof b->where, "not bound");
    status_clear();
}

static bool is_bound(const struct binding *b)
{
    struct cpuset now;
    int node = BIND_ANY_NODE;
    bool bound = bind_get_cpus(&now) == ST_OK && cpuset_equal(&now, &b->cpus) &&
                 (b->node == BIND_ANY_NODE || (bind_get_memory(&node) == ST_OK && node == b->node));
    status_clear();
    return bound;
}

void binding_check(struct binding *b, const char *library)
{
    if (b == NULL || !b->on || is_bound(b))
        return;
    size_t used = strlen(b->restored);
    snprintf(b->restored + used, sizeof b->restored - used, "%s%s", used > 0 ? ", " : "", library);
    binding_apply(b);
}

/* ---- telling --------------------------------------------------------------------------------- */

enum status binding_report(const struct binding *b, struct comm *comm, const char *dir)
{
    struct binding *all = NULL;
    enum status st = ST_OK;
    int failed = -1, restored = -1;
    TRY(mem_alloc(&all, (size_t)comm->world_size * sizeof *all));
    TRY_GOTO(st, out, comm_exchange(comm, all, b, sizeof *b));
    for (int r = comm->world_size - 1; r >= 0; r--) {
        failed = all[r].problem[0] != '\0' ? r : failed;
        restored = all[r].restored[0] != '\0' ? r : restored;
    }
    for (int r = 0; r < comm->world_size; r++)
        if (all[r].network[0] != '\0')
            log_info("run", "rank %d tells NCCL %s", r, all[r].network);
    if (restored >= 0)
        log_info("run", "rank %d was bound again after %s had changed it", restored,
                 all[restored].restored);
    if (failed >= 0 && comm->rank == 0)
        log_warn("run", "rank %d is not bound: %s; train.bind none leaves it alone", failed,
                 all[failed].problem);
    if (dir != NULL && comm->rank == 0)
        TRY_GOTO(st, out, topology_json_write(dir, all, comm->world_size));
out:
    mem_free(&all);
    return st;
}
