/* `tessera topo`: what the machine is made of, and what each rank would get of it. */
#include "engine/train/commands.h"

#include <stdio.h>
#include <string.h>

#include "comm/affinity.h"
#include "comm/bind.h"
#include "comm/comm.h"
#include "engine/base/arena.h"
#include "engine/base/options.h"
#include "engine/base/out.h"
#include "engine/device/device.h"
#include "engine/train/bandwidth.h"

static const char DETAILS[] =
    "First the machine: packages, memory nodes, shared caches, cores, and the bridges that GPUs "
    "and\n"
    "NICs hang on. Then the plan by which tessera train binds its ranks (train.bind): GPU, CPUs,\n"
    "memory and NIC of each, and why. Here, only CPUs that this process may use count, and only "
    "GPUs\n"
    "that CUDA_VISIBLE_DEVICES leaves. A file is another machine's: lstopo FILE.xml writes it "
    "there.\n";

enum { MAX_RANKS = COMM_MAX_WORLD_SIZE, NIC_BYTES = 40 };

struct job {
    struct topology topology;
    struct affinity_plan plan;
    const char *xml;       /* NULL: this machine */
    struct cpuset allowed; /* those CPUs */
    bool limited;          /* allowed says something */
    bool bandwidth;
    int ranks;
    int *gpus; /* owned; [ranks]; NULL: ranks without GPUs */
};

/* ---- the machine ----------------------------------------------------------------------------- */

static void print_machine(const struct job *job)
{
    const struct topology *t = &job->topology;
    char cpus[CPUSET_TEXT_BYTES];
    for (int i = 0; i < t->object_count; i++)
        out("%*s%s\n", 2 * t->objects[i].depth, "", t->objects[i].text);
    out("%d core%s%s, each with %s\n", t->core_count, t->core_count == 1 ? "" : "s",
        t->kind_count > 1 ? " of several speeds" : "", t->core_text);
    if (t->gpu_count == 0)
        out("no GPU\n");
    if (t->nic_count == 0)
        out("no NIC\n");
    cpuset_format(&job->allowed, cpus, sizeof cpus);
    if (job->limited)
        out("CPUs that count: %s\n", cpus);
}

/* ---- the plan -------------------------------------------------------------------------------- */

static void nic_names(const struct job *job, const struct affinity_rank *r, char text[NIC_BYTES])
{
    size_t used = 0;
    snprintf(text, NIC_BYTES, "-");
    for (int i = 0; i < r->nic_count; i++) {
        const struct topology_nic *n = &job->topology.nics[r->nics[i]];
        int bytes = snprintf(text + used, NIC_BYTES - used, "%s%s", i > 0 ? "," : "",
                             n->fabric[0] != '\0' ? n->fabric : n->interface);
        used = used + (size_t)bytes < NIC_BYTES ? used + (size_t)bytes : NIC_BYTES - 1;
    }
}

static void print_rank(const struct job *job, int rank)
{
    const struct topology *t = &job->topology;
    const struct affinity_rank *r = &job->plan.ranks[rank];
    char cpus[CPUSET_TEXT_BYTES], nics[NIC_BYTES], memory[24];
    cpuset_format(&r->cpus, cpus, 40);
    nic_names(job, r, nics);
    snprintf(memory, sizeof memory, r->node >= 0 ? "node %d" : "any node",
             r->node >= 0 ? t->nodes[r->node].number : 0);
    out("%4d  %-12s  %-24s  %-8s  %s\n", rank, r->gpu >= 0 ? t->gpus[r->gpu].bus_id : "-", cpus,
        memory, nics);
}

/* Broken at spaces where a line would be longer than a page is wide. */
static void print_reason(const char *text)
{
    enum { INDENT = 6, COLUMNS = 100 };
    for (int column = COLUMNS + 1; *text != '\0';) {
        int bytes = (int)strcspn(text, " ");
        bool fits = column + 1 + bytes <= COLUMNS;
        if (!fits)
            out("%s%*s", column > COLUMNS ? "" : "\n", INDENT, "");
        out("%s%.*s", fits ? " " : "", bytes, text);
        column = (fits ? column + 1 : INDENT) + bytes;
        text += bytes + (text[bytes] == ' ');
    }
    out("\n");
}

/* The reason of several ranks in a row is told once. */
static void print_plan(const struct job *job)
{
    const struct affinity_plan *plan = &job->plan;
    out("\nplan for %d rank%s on %d core%s, %d hardware thread%s%s\n\n", plan->rank_count,
        plan->rank_count == 1 ? "" : "s", plan->cores, plan->cores == 1 ? "" : "s", plan->cpus,
        plan->cpus == 1 ? "" : "s",
        plan->cores < plan->rank_count ? ": fewer cores than ranks, which run unbound" : "");
    out("%4s  %-12s  %-24s  %-8s  %s\n", "rank", "GPU", "CPUs", "memory", "NIC");
    for (int r = 0; r < plan->rank_count; r++) {
        print_rank(job, r);
        if (r + 1 == plan->rank_count || strcmp(plan->ranks[r].why, plan->ranks[r + 1].why) != 0)
            print_reason(plan->ranks[r].why);
    }
}

/* ---- what to plan for ------------------------------------------------------------------------ */

/* The GPUs that ranks would get, in their order: CUDA's, where it is built in and this is the
 * machine; else those that CUDA could use. */
static int find_gpus(const struct job *job, int *gpus, int room)
{
    int count = 0, visible = job->xml == NULL ? device_cuda_count() : 0;
    char bus_id[32];
    for (int i = 0; i < visible && count < room; i++)
        gpus[count++] =
            device_cuda_bus_id(bus_id, i) == ST_OK ? topology_find_gpu(&job->topology, bus_id) : -1;
    for (int g = 0; g < job->topology.gpu_count && visible == 0 && count < room; g++)
        if (job->topology.gpus[g].cuda)
            gpus[count++] = g;
    return count;
}

/* Ranks that nobody asked for: one a GPU; without GPUs one a node. More ranks than GPUs are ranks
 * on CPUs. */
static enum status choose_ranks(struct job *job)
{
    int limit = job->ranks > 0 ? job->ranks : MAX_RANKS;
    TRY(mem_alloc(&job->gpus, (size_t)MAX_RANKS * sizeof *job->gpus));
    int gpus = find_gpus(job, job->gpus, limit);
    if (job->ranks == 0)
        job->ranks = gpus > 0 ? gpus : job->topology.node_count;
    if (gpus < job->ranks)
        mem_free(&job->gpus);
    return ST_OK;
}

/* The CPUs of this process, where they are fewer than the machine's. */
static enum status find_allowed(struct job *job, const char *cpus)
{
    if (cpus != NULL && !cpuset_parse(&job->allowed, cpus))
        return FAIL(INVALID, "--cpus: expected a list like 0-7,16-23 (up to %d), found \"%s\"",
                    CPUSET_MAX - 1, cpus);
    job->limited = cpus != NULL;
    if (cpus != NULL || job->xml != NULL)
        return ST_OK;
    TRY(bind_get_cpus(&job->allowed));
    for (int c = 0; c < job->topology.core_count; c++)
        for (int i = 0; i < job->topology.cores[c].cpu_count; i++)
            job->limited |= !cpuset_has(&job->allowed, job->topology.cores[c].cpu[i]);
    return ST_OK;
}

/* ---- bandwidth ------------------------------------------------------------------------------- */

/* A row: from one node's CPUs to each node's memory. */
static enum status print_row(const struct topology *t, int from)
{
    out("from CPUs of node %d:", t->nodes[from].number);
    for (int to = 0; to < t->node_count; to++) {
        struct bandwidth b;
        TRY(bandwidth_host(&b, t, from, to));
        out("  node %d %.1f", t->nodes[to].number, b.host[BANDWIDTH_REPEATS / 2]);
    }
    out("\n");
    return ST_OK;
}

static enum status print_device(const struct topology *t, int gpu)
{
    char bus_id[32];
    TRY(device_cuda_bus_id(bus_id, gpu));
    out("GPU %s, to / from it:", bus_id);
    for (int node = 0; node < t->node_count; node++) {
        struct bandwidth b;
        if (cpuset_count(&t->nodes[node].cpus) == 0)
            continue;
        TRY(bandwidth_device(&b, t, gpu, node));
        out("  node %d %.1f / %.1f", t->nodes[node].number, b.to_device[BANDWIDTH_REPEATS / 2],
            b.from_device[BANDWIDTH_REPEATS / 2]);
    }
    out("\n");
    return ST_OK;
}

static enum status print_bandwidth(const struct topology *t)
{
    out("\nbandwidth, GB/s: one thread that copies in a node's memory%s\n",
        device_cuda_count() > 0 ? "; pinned memory and GPUs" : "");
    for (int from = 0; from < t->node_count; from++)
        if (cpuset_count(&t->nodes[from].cpus) > 0)
            TRY(print_row(t, from));
    for (int gpu = 0; gpu < device_cuda_count(); gpu++)
        TRY(print_device(t, gpu));
    if (t->node_count == 1)
        out("One memory node: all memory is near, and binding it can gain nothing.\n");
    return ST_OK;
}

/* ---- the command ----------------------------------------------------------------------------- */

static enum status topo(struct job *job, const char *cpus)
{
    if (job->xml != NULL && job->bandwidth)
        return FAIL(INVALID, "--bandwidth measures this machine; it does not go with --xml");
    TRY(job->xml != NULL ? topology_read_xml(&job->topology, job->xml)
                         : topology_read(&job->topology));
    TRY(find_allowed(job, cpus));
    TRY(choose_ranks(job));
    struct affinity_request request = {
        .ranks = job->ranks, .gpus = job->gpus, .allowed = job->limited ? &job->allowed : NULL};
    TRY(affinity_plan_build(&job->plan, &job->topology, &request));
    print_machine(job);
    print_plan(job);
    if (job->bandwidth)
        TRY(print_bandwidth(&job->topology));
    return out_flush();
}

enum status cmd_topo(int argc, char **argv)
{
    struct job job = {.xml = NULL};
    const char *cpus = NULL;
    int64_t ranks = 0;
    bool help_shown = false;
    const struct option options[] = {
        {.name = "xml",
         .kind = OPTION_TEXT,
         .value = &job.xml,
         .metavar = "FILE",
         .help = "another machine's topology, as lstopo of hwloc writes it"},
        {.name = "ranks",
         .kind = OPTION_INT,
         .value = &ranks,
         .metavar = "N",
         .help = "ranks on this machine; without it one a GPU, or one a memory node",
         .min = 1,
         .max = MAX_RANKS},
        {.name = "cpus",
         .kind = OPTION_TEXT,
         .value = &cpus,
         .metavar = "LIST",
         .help = "plan as if only these CPUs may be used: 0-7,16-23"},
        {.name = "bandwidth",
         .kind = OPTION_FLAG,
         .value = &job.bandwidth,
         .help = "measure memory, and host to GPU, from near and far nodes; a second a pair"},
    };
    const struct command command = {.name = "topo",
                                    .summary = "The machine, and which part of it each rank gets.",
                                    .details = DETAILS,
                                    .options = options,
                                    .option_count = sizeof options / sizeof *options};
    TRY(options_parse(&command, argc, argv, &help_shown));
    if (help_shown)
        return ST_OK;
    job.ranks = (int)ranks;
    enum status st = topo(&job, cpus);
    affinity_plan_release(&job.plan);
    topology_release(&job.topology);
    mem_free(&job.gpus);
    return st;
}
