/* The picture of a machine: what is shown of hwloc's objects, a line each. */
#include <hwloc.h>
#include <stdio.h>
#include <string.h>

#include "comm/topology_reader.h"
#include "engine/base/arena.h"

/* The object behind @obj, children first: memory, then what computes, then devices. Without
 * recursion: a file may nest as it likes. */
static hwloc_obj_t next_object(hwloc_obj_t obj)
{
    hwloc_obj_t child = obj->memory_first_child ? obj->memory_first_child
                        : obj->first_child      ? obj->first_child
                                                : obj->io_first_child;
    while (child == NULL) {
        hwloc_obj_t parent = obj->parent;
        if (obj->next_sibling != NULL)
            return obj->next_sibling;
        if (parent == NULL)
            return NULL;
        if (hwloc_obj_type_is_memory(obj->type) && parent->first_child != NULL)
            child = parent->first_child;
        else if (!hwloc_obj_type_is_io(obj->type))
            child = parent->io_first_child;
        obj = parent;
    }
    return child;
}

/* The part of a bridge's tree in which something is shown: a bridge with one such part is only a
 * piece of wire. */
static int parts_shown(const struct topology_reader *r, hwloc_obj_t bridge)
{
    int parts = 0;
    for (hwloc_obj_t child = bridge->io_first_child; child != NULL; child = child->next_sibling) {
        bool any = false;
        for (int i = 0; i < r->t->gpu_count && !any; i++)
            any = reader_is_above(child, r->gpu[i]);
        for (int i = 0; i < r->t->nic_count && !any; i++)
            any = reader_is_above(child, r->nic[i]);
        parts += any;
    }
    return parts;
}

static int index_in(hwloc_obj_t *list, int count, hwloc_obj_t obj)
{
    for (int i = 0; i < count; i++)
        if (list[i] == obj)
            return i;
    return -1;
}

static bool is_shown(const struct topology_reader *r, hwloc_obj_t obj, enum topology_kind *kind)
{
    switch (obj->type) {
    case HWLOC_OBJ_MACHINE:
        *kind = TOPOLOGY_IS_MACHINE;
        return true;
    case HWLOC_OBJ_PACKAGE:
        *kind = TOPOLOGY_IS_PACKAGE;
        return true;
    case HWLOC_OBJ_GROUP:
    case HWLOC_OBJ_DIE:
        *kind = TOPOLOGY_IS_GROUP;
        return reader_cores_in(r, obj) > 1;
    case HWLOC_OBJ_NUMANODE:
        *kind = TOPOLOGY_IS_NODE;
        return true;
    case HWLOC_OBJ_L3CACHE:
    case HWLOC_OBJ_L4CACHE:
    case HWLOC_OBJ_L5CACHE:
        *kind = TOPOLOGY_IS_CACHE;
        return reader_cores_in(r, obj) > 1;
    case HWLOC_OBJ_BRIDGE:
        *kind = TOPOLOGY_IS_BRIDGE;
        return parts_shown(r, obj) >
               (obj->attr->bridge.upstream_type == HWLOC_OBJ_BRIDGE_PCI ? 1 : 0);
    case HWLOC_OBJ_PCI_DEVICE:
        *kind = reader_is_gpu(obj) ? TOPOLOGY_IS_GPU : TOPOLOGY_IS_NIC;
        return index_in(r->gpu, r->t->gpu_count, obj) >= 0 ||
               index_in(r->nic, r->t->nic_count, obj) >= 0;
    default:
        return false;
    }
}

static void gpu_text(char *out, size_t bytes, const struct topology_gpu *g)
{
    char link[32] = "";
    if (g->link_GBs > 0)
        snprintf(link, sizeof link, ", %.1f GB/s", g->link_GBs);
    snprintf(out, bytes, "GPU %s%s%.40s%s", g->bus_id, g->name[0] != '\0' ? " " : "", g->name,
             link);
}

static void nic_text(char *out, size_t bytes, const struct topology_nic *n)
{
    bool both = n->fabric[0] != '\0' && n->interface[0] != '\0';
    char link[32] = "";
    if (n->link_GBs > 0)
        snprintf(link, sizeof link, ", %.1f GB/s", n->link_GBs);
    snprintf(out, bytes, "NIC %s %.20s%s%.20s%s%s%s", n->bus_id, n->fabric, both ? " (" : "",
             n->interface, both ? ")" : "", link, n->up ? "" : ", down");
}

static void object_text(const struct topology_reader *r, char *out, size_t bytes, hwloc_obj_t obj,
                        enum topology_kind kind)
{
    char size[32], bus_id[16];
    const char *name;
    switch (kind) {
    case TOPOLOGY_IS_MACHINE:
        name = reader_info(obj, "DMIProductName");
        name = name[0] != '\0' ? name : reader_info(obj, "PlatformModel");
        snprintf(out, bytes, "machine%s%.64s", name[0] != '\0' ? ": " : "", name);
        break;
    case TOPOLOGY_IS_PACKAGE:
        snprintf(out, bytes, "package %u%s%.64s", obj->logical_index,
                 reader_info(obj, "CPUModel")[0] != '\0' ? ": " : "", reader_info(obj, "CPUModel"));
        break;
    case TOPOLOGY_IS_GROUP:
        snprintf(out, bytes, "%s %u", obj->type == HWLOC_OBJ_DIE ? "die" : "group",
                 obj->logical_index);
        break;
    case TOPOLOGY_IS_NODE:
        reader_size_text(size, sizeof size, obj->attr->numanode.local_memory);
        snprintf(out, bytes, "node %u: %s of memory", obj->os_index, size);
        break;
    case TOPOLOGY_IS_CACHE:
        reader_size_text(size, sizeof size, obj->attr->cache.size);
        snprintf(out, bytes, "L%u %s", obj->attr->cache.depth, size);
        break;
    case TOPOLOGY_IS_BRIDGE:
        snprintf(bus_id, sizeof bus_id, " ");
        if (obj->attr->bridge.upstream_type == HWLOC_OBJ_BRIDGE_PCI)
            reader_bus_id(bus_id, obj);
        snprintf(out, bytes, bus_id[0] == ' ' ? "host bridge" : "PCIe switch %s", bus_id);
        break;
    case TOPOLOGY_IS_GPU:
        gpu_text(out, bytes, &r->t->gpus[index_in(r->gpu, r->t->gpu_count, obj)]);
        break;
    case TOPOLOGY_IS_NIC:
        nic_text(out, bytes, &r->t->nics[index_in(r->nic, r->t->nic_count, obj)]);
        break;
    }
}

static enum status show(struct topology_reader *r, hwloc_obj_t obj, enum topology_kind kind)
{
    struct topology *t = r->t;
    TRY(mem_grow(&t->objects, &t->capacity[OBJECTS], (size_t)t->object_count + 1,
                 sizeof *t->objects));
    TRY(mem_grow(&r->shown, &r->shown_capacity, (size_t)t->object_count + 1, sizeof(hwloc_obj_t)));
    struct topology_object *o = &t->objects[t->object_count];
    *o = (struct topology_object){.kind = kind, .parent = -1};
    for (hwloc_obj_t p = obj->parent; p != NULL && o->parent < 0; p = p->parent)
        o->parent = index_in(r->shown, t->object_count, p);
    o->depth = o->parent >= 0 ? t->objects[o->parent].depth + 1 : 0;
    object_text(r, o->text, sizeof o->text, obj, kind);
    r->shown[t->object_count++] = obj;
    return ST_OK;
}

static bool computes(enum topology_kind kind)
{
    return kind == TOPOLOGY_IS_MACHINE || kind == TOPOLOGY_IS_PACKAGE ||
           kind == TOPOLOGY_IS_GROUP || kind == TOPOLOGY_IS_CACHE;
}

/* Cores stand in the line of the smallest thing shown that holds them. */
static void name_cores(struct topology_reader *r)
{
    struct topology *t = r->t;
    for (int i = 0; i < t->object_count; i++) {
        struct topology_object *o = &t->objects[i];
        bool leaf = computes(o->kind);
        for (int k = i + 1; k < t->object_count && leaf; k++)
            leaf = t->objects[k].parent != i || !computes(t->objects[k].kind);
        if (!leaf)
            continue;
        char cpus[CPUSET_TEXT_BYTES];
        size_t used = strlen(o->text);
        struct cpuset set = reader_cpuset(r->shown[i]->cpuset);
        int cores = reader_cores_in(r, r->shown[i]);
        cpuset_format(&set, cpus, 48);
        snprintf(o->text + used, sizeof o->text - used, "%s%d core%s, cpus %s",
                 strchr(o->text, ':') != NULL ? ", " : ": ", cores, cores == 1 ? "" : "s", cpus);
    }
}

enum status reader_draw(struct topology_reader *r)
{
    enum topology_kind kind;
    for (hwloc_obj_t obj = hwloc_get_root_obj(r->hwloc); obj != NULL; obj = next_object(obj))
        if (is_shown(r, obj, &kind))
            TRY(show(r, obj, kind));
    name_cores(r);
    return ST_OK;
}
