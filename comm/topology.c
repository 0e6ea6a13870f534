#include "comm/topology.h"

#include <errno.h>
#include <hwloc.h>
#include <stdio.h>
#include <string.h>

#include "comm/topology_format.h"
#include "comm/topology_reader.h"
#include "engine/base/arena.h"
#include "engine/base/file.h"

enum { NVIDIA = 0x10de, CLASS_DISPLAY = 0x03 };

/* ---- hwloc's types --------------------------------------------------------------------------- */

enum device_use { USE_NETWORK, USE_FABRIC, USE_COMPUTE };

static bool device_is(hwloc_obj_t device, enum device_use use)
{
#if HWLOC_API_VERSION >= 0x00030000
    static const unsigned long bits[] = {HWLOC_OBJ_OSDEV_NETWORK, HWLOC_OBJ_OSDEV_OPENFABRICS,
                                         HWLOC_OBJ_OSDEV_COPROC};
    bool is = (device->attr->osdev.types & bits[use]) != 0;
    return use == USE_NETWORK ? is && (device->attr->osdev.types & bits[USE_FABRIC]) == 0 : is;
#else
    static const hwloc_obj_osdev_type_t types[] = {
        HWLOC_OBJ_OSDEV_NETWORK, HWLOC_OBJ_OSDEV_OPENFABRICS, HWLOC_OBJ_OSDEV_COPROC};
    return device->attr->osdev.type == types[use];
#endif
}

struct cpuset reader_cpuset(hwloc_const_bitmap_t bitmap)
{
    struct cpuset set = {{0}};
    int cpu = -1;
    while ((cpu = hwloc_bitmap_next(bitmap, cpu)) >= 0 && cpu < CPUSET_MAX)
        cpuset_add(&set, cpu);
    return set;
}

void reader_bus_id(char out[16], hwloc_obj_t pci)
{
    snprintf(out, 16, "%04x:%02x:%02x.%x", (unsigned)pci->attr->pcidev.domain & 0xffffu,
             (unsigned)pci->attr->pcidev.bus & 0xffu, (unsigned)pci->attr->pcidev.dev & 0x1fu,
             (unsigned)pci->attr->pcidev.func & 7u);
}

int reader_cores_in(const struct topology_reader *r, hwloc_obj_t obj)
{
    hwloc_obj_type_t type =
        hwloc_get_nbobjs_by_type(r->hwloc, HWLOC_OBJ_CORE) > 0 ? HWLOC_OBJ_CORE : HWLOC_OBJ_PU;
    return hwloc_get_nbobjs_inside_cpuset_by_type(r->hwloc, obj->cpuset, type);
}

bool reader_is_above(hwloc_obj_t obj, hwloc_obj_t below)
{
    while (below != NULL && below != obj)
        below = below->parent;
    return below == obj;
}

/* ---- memory and cores ------------------------------------------------------------------------ */

static int package_of(const struct topology_reader *r, hwloc_obj_t obj)
{
    hwloc_obj_t package = obj->type == HWLOC_OBJ_PACKAGE
                              ? obj
                              : hwloc_get_ancestor_obj_by_type(r->hwloc, HWLOC_OBJ_PACKAGE, obj);
    return package != NULL ? (int)package->logical_index : -1;
}

static enum status read_nodes(struct topology_reader *r)
{
    struct topology *t = r->t;
    hwloc_obj_t obj = NULL;
    while ((obj = hwloc_get_next_obj_by_type(r->hwloc, HWLOC_OBJ_NUMANODE, obj)) != NULL) {
        TRY(mem_grow(&t->nodes, &t->capacity[NODES], (size_t)t->node_count + 1, sizeof *t->nodes));
        t->nodes[t->node_count++] = (struct topology_node){
            .number = (int)obj->os_index,
            .package = package_of(r, obj),
            .memory_bytes = (int64_t)obj->attr->numanode.local_memory,
            .cpus = reader_cpuset(obj->cpuset),
        };
    }
    return ST_OK;
}

/* The smallest node that holds the CPU; of several the first: Linux allocates from that one. */
static int node_of(const struct topology *t, int cpu)
{
    int best = -1, best_cpus = 0;
    for (int n = 0; n < t->node_count; n++) {
        int cpus = cpuset_count(&t->nodes[n].cpus);
        if (cpuset_has(&t->nodes[n].cpus, cpu) && (best < 0 || cpus < best_cpus)) {
            best = n;
            best_cpus = cpus;
        }
    }
    return best;
}

/* A cgroup may forbid a node's memory and leave its CPUs: they then count as the first node's. */
static int home_of(struct topology *t, int cpu)
{
    int node = node_of(t, cpu);
    if (node >= 0)
        return node;
    cpuset_add(&t->nodes[0].cpus, cpu);
    return 0;
}

static enum status read_cores(struct topology_reader *r)
{
    struct topology *t = r->t;
    hwloc_obj_t pu = NULL, last = NULL;
    if (t->node_count == 0)
        return FAIL(CORRUPT, "the machine has no memory");
    while ((pu = hwloc_get_next_obj_by_type(r->hwloc, HWLOC_OBJ_PU, pu)) != NULL) {
        hwloc_obj_t core = hwloc_get_ancestor_obj_by_type(r->hwloc, HWLOC_OBJ_CORE, pu);
        struct topology_core *c = t->core_count > 0 ? &t->cores[t->core_count - 1] : NULL;
        if ((int)pu->os_index >= CPUSET_MAX)
            continue;
        int node = home_of(t, (int)pu->os_index);
        if (c == NULL || core == NULL || core != last || c->cpu_count == TOPOLOGY_THREADS) {
            TRY(mem_grow(&t->cores, &t->capacity[CORES], (size_t)t->core_count + 1,
                         sizeof *t->cores));
            int kind = hwloc_cpukinds_get_by_cpuset(r->hwloc, pu->cpuset, 0);
            c = &t->cores[t->core_count++];
            *c = (struct topology_core){
                .node = node, .package = package_of(r, pu), .kind = kind > 0 ? kind : 0};
            t->kind_count = c->kind + 1 > t->kind_count ? c->kind + 1 : t->kind_count;
        }
        c->cpu[c->cpu_count++] = (int)pu->os_index;
        last = core;
    }
    return t->core_count > 0 ? ST_OK : FAIL(CORRUPT, "the machine has no CPU");
}

void reader_size_text(char *out, size_t bytes, uint64_t size)
{
    enum { KIB = 1024, MIB = 1024 * KIB };
    if (size >= (uint64_t)MIB * KIB)
        snprintf(out, bytes, "%.0f GiB", (double)size / MIB / KIB);
    else if (size >= MIB)
        snprintf(out, bytes, "%.3g MiB", (double)size / MIB);
    else
        snprintf(out, bytes, "%.3g KiB", (double)size / KIB);
}

/* What the first core has for itself. */
static void describe_core(struct topology_reader *r)
{
    hwloc_obj_t obj = hwloc_get_obj_by_type(r->hwloc, HWLOC_OBJ_PU, 0);
    int threads = r->t->cores[0].cpu_count;
    char *out = r->t->core_text, size[32];
    size_t room = sizeof r->t->core_text, used;
    used = (size_t)snprintf(out, room, threads == 1 ? "1 hardware thread" : "%d hardware threads",
                            threads);
    for (; obj != NULL && reader_cores_in(r, obj) <= 1; obj = obj->parent) {
        if (!hwloc_obj_type_is_dcache(obj->type) || used + 40 > room)
            continue;
        reader_size_text(size, sizeof size, obj->attr->cache.size);
        used += (size_t)snprintf(out + used, room - used, ", L%u %s", obj->attr->cache.depth, size);
    }
}

/* ---- devices --------------------------------------------------------------------------------- */

const char *reader_info(hwloc_obj_t obj, const char *name)
{
    const char *text = hwloc_obj_get_info_by_name(obj, name);
    return text != NULL ? text : "";
}

static struct cpuset near_of(const struct topology_reader *r, hwloc_obj_t device)
{
    hwloc_obj_t place = hwloc_get_non_io_ancestor_obj(r->hwloc, device);
    return reader_cpuset(place->cpuset);
}

bool reader_is_gpu(hwloc_obj_t pci)
{
    if (pci->attr->pcidev.class_id >> 8 == CLASS_DISPLAY && pci->attr->pcidev.vendor_id == NVIDIA)
        return true;
    for (hwloc_obj_t d = pci->io_first_child; d != NULL; d = d->next_sibling)
        if (d->type == HWLOC_OBJ_OS_DEVICE && device_is(d, USE_COMPUTE))
            return true;
    return false;
}

/* What NVIDIA's driver calls the card. */
static void ask_driver(struct topology_gpu *g)
{
    char path[128], line[160];
    snprintf(path, sizeof path, "/proc/driver/nvidia/gpus/%s/information", g->bus_id);
    FILE *file = fopen(path, "re");
    while (file != NULL && g->name[0] == '\0' && fgets(line, sizeof line, file) != NULL) {
        const char *name = line + strcspn(line, ":");
        name += strspn(name, ": \t");
        if (strncmp(line, "Model:", 6) == 0)
            snprintf(g->name, sizeof g->name, "%.*s", (int)strcspn(name, "\n"), name);
    }
    if (file != NULL)
        fclose(file);
}

static enum status add_gpu(struct topology_reader *r, hwloc_obj_t pci)
{
    struct topology *t = r->t;
    TRY(mem_grow(&t->gpus, &t->capacity[GPUS], (size_t)t->gpu_count + 1, sizeof *t->gpus));
    TRY(mem_grow(&r->gpu, &r->gpu_capacity, (size_t)t->gpu_count + 1, sizeof(hwloc_obj_t)));
    struct topology_gpu *g = &t->gpus[t->gpu_count];
    *g = (struct topology_gpu){.cuda = pci->attr->pcidev.vendor_id == NVIDIA,
                               .near = near_of(r, pci),
                               .link_GBs = (double)pci->attr->pcidev.linkspeed};
    reader_bus_id(g->bus_id, pci);
    snprintf(g->name, sizeof g->name, "%s", reader_info(pci, "PCIDevice"));
    for (hwloc_obj_t d = pci->io_first_child; d != NULL; d = d->next_sibling)
        if (reader_info(d, "GPUModel")[0] != '\0')
            snprintf(g->name, sizeof g->name, "%s", reader_info(d, "GPUModel"));
    if (r->this_system)
        ask_driver(g);
    r->gpu[t->gpu_count++] = pci;
    return ST_OK;
}

static bool interface_is_down(const struct topology_reader *r, const char *name)
{
    char path[128], state[16] = "";
    snprintf(path, sizeof path, "/sys/class/net/%.64s/operstate", name);
    FILE *file = r->this_system ? fopen(path, "re") : NULL;
    if (file == NULL)
        return false;
    bool read = fgets(state, sizeof state, file) != NULL;
    fclose(file);
    return read && strncmp(state, "down", 4) == 0;
}

/* A card with several ports has a function each, and each is a NIC; virtual functions without a
 * device of the system are none. */
static enum status add_nic(struct topology_reader *r, hwloc_obj_t pci)
{
    struct topology *t = r->t;
    struct topology_nic nic = {
        .near = near_of(r, pci), .up = true, .link_GBs = (double)pci->attr->pcidev.linkspeed};
    for (hwloc_obj_t d = pci->io_first_child; d != NULL; d = d->next_sibling) {
        if (d->type != HWLOC_OBJ_OS_DEVICE || d->name == NULL)
            continue;
        if (device_is(d, USE_NETWORK) && nic.interface[0] == '\0') {
            snprintf(nic.interface, sizeof nic.interface, "%s", d->name);
            nic.up &= !interface_is_down(r, d->name);
        }
        /* usNIC has no connections, only datagrams. */
        if (!device_is(d, USE_FABRIC) || strncmp(d->name, "usnic", 5) == 0 || nic.fabric[0] != '\0')
            continue;
        snprintf(nic.fabric, sizeof nic.fabric, "%s", d->name);
        const char *state = reader_info(d, "Port1State");
        nic.up &= state[0] == '\0' || state[0] == '4'; /* "active" of the InfiniBand standard */
    }
    if (nic.interface[0] == '\0' && nic.fabric[0] == '\0')
        return ST_OK;
    TRY(mem_grow(&t->nics, &t->capacity[NICS], (size_t)t->nic_count + 1, sizeof *t->nics));
    TRY(mem_grow(&r->nic, &r->nic_capacity, (size_t)t->nic_count + 1, sizeof(hwloc_obj_t)));
    reader_bus_id(nic.bus_id, pci);
    r->nic[t->nic_count] = pci;
    t->nics[t->nic_count++] = nic;
    return ST_OK;
}

static enum status read_devices(struct topology_reader *r)
{
    hwloc_obj_t pci = NULL;
    while ((pci = hwloc_get_next_pcidev(r->hwloc, pci)) != NULL) {
        if (reader_is_gpu(pci))
            TRY(add_gpu(r, pci));
        else
            TRY(add_nic(r, pci));
    }
    return ST_OK;
}

static enum topology_distance distance(const struct topology_reader *r, hwloc_obj_t a,
                                       hwloc_obj_t b)
{
    hwloc_obj_t common = a;
    while (!reader_is_above(common, b))
        common = common->parent;
    if (common->type == HWLOC_OBJ_BRIDGE)
        return common->attr->bridge.upstream_type == HWLOC_OBJ_BRIDGE_PCI ? TOPOLOGY_SWITCH
                                                                          : TOPOLOGY_BRIDGE;
    if (hwloc_obj_type_is_io(common->type))
        return TOPOLOGY_SWITCH;
    if (hwloc_bitmap_weight(common->nodeset) == 1)
        return TOPOLOGY_NODE;
    return package_of(r, common) >= 0 ? TOPOLOGY_PACKAGE : TOPOLOGY_MACHINE;
}

static enum status read_distances(struct topology_reader *r)
{
    struct topology *t = r->t;
    TRY(mem_alloc(&t->distances, (size_t)t->gpu_count * (size_t)t->nic_count));
    for (int g = 0; g < t->gpu_count; g++)
        for (int n = 0; n < t->nic_count; n++)
            t->distances[g * t->nic_count + n] = (unsigned char)distance(r, r->gpu[g], r->nic[n]);
    return ST_OK;
}

/* ---- reading --------------------------------------------------------------------------------- */

static enum status read_all(struct topology_reader *r)
{
    r->this_system = hwloc_topology_is_thissystem(r->hwloc) == 1;
    r->t->kind_count = 1;
    int packages = hwloc_get_nbobjs_by_type(r->hwloc, HWLOC_OBJ_PACKAGE);
    r->t->package_count = packages > 0 ? packages : 1;
    TRY(read_nodes(r));
    TRY(read_cores(r));
    describe_core(r);
    TRY(read_devices(r));
    TRY(read_distances(r));
    return reader_draw(r);
}

static enum status begin(hwloc_topology_t *hwloc)
{
    /* Parts of hwloc that would start the libraries of devices, and take memory on them; and
     * libpciaccess, which knows names but loses memory at each reading: hwloc also reads the
     * system's own files. */
    static const char *const heavy[] = {"cuda", "nvml", "opencl", "rsmi", "levelzero", "gl", "pci"};
    if (hwloc_topology_init(hwloc) != 0)
        return FAIL(MEMORY, "hwloc_topology_init: %s", strerror(errno));
    for (size_t i = 0; i < sizeof heavy / sizeof heavy[0]; i++)
        hwloc_topology_set_components(*hwloc, HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST, heavy[i]);
    hwloc_topology_set_io_types_filter(*hwloc, HWLOC_TYPE_FILTER_KEEP_IMPORTANT);
    return ST_OK;
}

/* What hwloc has loaded becomes ours. */
static enum status take(struct topology *t, hwloc_topology_t hwloc)
{
    struct topology_reader r = {.t = t, .hwloc = hwloc};
    enum status st = read_all(&r);
    mem_free(&r.shown);
    mem_free(&r.gpu);
    mem_free(&r.nic);
    if (st != ST_OK)
        topology_release(t);
    return st;
}

enum status topology_read(struct topology *t)
{
    enum status st = ST_OK;
    hwloc_topology_t hwloc;
    TRY(begin(&hwloc));
    if (hwloc_topology_load(hwloc) != 0)
        st = FAIL(SYSTEM, "hwloc cannot read this machine: %s", strerror(errno));
    else
        st = take(t, hwloc);
    hwloc_topology_destroy(hwloc);
    return st;
}

enum status topology_read_synthetic(struct topology *t, const char *text)
{
    enum status st = ST_OK;
    hwloc_topology_t hwloc;
    TRY(begin(&hwloc));
    if (hwloc_topology_set_synthetic(hwloc, text) != 0 || hwloc_topology_load(hwloc) != 0)
        st = FAIL(INVALID, "hwloc does not understand \"%s\"", text);
    else
        st = take(t, hwloc);
    hwloc_topology_destroy(hwloc);
    return st;
}

/* ---- XML ------------------------------------------------------------------------------------- */

enum status topology_read_xml(struct topology *t, const char *path)
{
    enum status st = ST_OK;
    struct file_text file = {0};
    hwloc_topology_t hwloc = NULL;
    char library[32];
    topology_library(library);
    TRY_GOTO(st, out, file_read(&file, path));
    TRY_GOTO(st, out,
             topology_format_check(file.data, path, hwloc_get_api_version() >= 0x00030000));
    TRY_GOTO(st, out, begin(&hwloc));
    if (hwloc_topology_set_xmlbuffer(hwloc, file.data, (int)file.bytes + 1) != 0 ||
        hwloc_topology_load(hwloc) != 0) {
        st = FAIL(CORRUPT, "%s: %s cannot read it: it is damaged", path, library);
        goto out;
    }
    st = take(t, hwloc);
    if (st == ST_CORRUPT)
        st = FAIL(CORRUPT, "%s: %s", path, status_message());
out:
    if (hwloc != NULL)
        hwloc_topology_destroy(hwloc);
    mem_free(&file.data);
    return st;
}

/* ---- and afterwards -------------------------------------------------------------------------- */

void topology_release(struct topology *t)
{
    mem_free(&t->nodes);
    mem_free(&t->cores);
    mem_free(&t->gpus);
    mem_free(&t->nics);
    mem_free(&t->objects);
    mem_free(&t->distances);
    memset(t, 0, sizeof *t);
}

enum topology_distance topology_distance(const struct topology *t, int gpu, int nic)
{
    return (enum topology_distance)t->distances[gpu * t->nic_count + nic];
}

static bool bus_numbers(unsigned out[4], const char *bus_id)
{
    return sscanf(bus_id, "%x:%x:%x.%x", &out[0], &out[1], &out[2], &out[3]) == 4;
}

int topology_find_gpu(const struct topology *t, const char *bus_id)
{
    unsigned want[4], have[4];
    for (int i = 0; i < t->gpu_count && bus_numbers(want, bus_id); i++)
        if (bus_numbers(have, t->gpus[i].bus_id) && memcmp(want, have, sizeof want) == 0)
            return i;
    return -1;
}

void topology_library(char out[32])
{
    unsigned v = hwloc_get_api_version();
    snprintf(out, 32, "hwloc, API %u.%u", v >> 16 & 0xff, v >> 8 & 0xff);
}
