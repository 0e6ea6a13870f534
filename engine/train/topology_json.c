#include "engine/train/topology_json.h"

#include <jansson.h>

#include "comm/topology.h"
#include "engine/base/arena.h"
#include "engine/base/file.h"
#include "engine/base/log.h"
#include "io/json_file.h"

static const char *const kind_names[] = {
    [TOPOLOGY_IS_MACHINE] = "machine", [TOPOLOGY_IS_PACKAGE] = "package",
    [TOPOLOGY_IS_GROUP] = "group",     [TOPOLOGY_IS_NODE] = "node",
    [TOPOLOGY_IS_CACHE] = "cache",     [TOPOLOGY_IS_BRIDGE] = "bridge",
    [TOPOLOGY_IS_GPU] = "gpu",         [TOPOLOGY_IS_NIC] = "nic",
};

static enum status write_json(const char *dir, const struct topology *t,
                              const struct binding *ranks, int count)
{
    char path[1200];
    TRY(path_join(path, sizeof path, dir, "topology.json"));
    json_t *objects = json_array(), *list = json_array();
    for (int i = 0; i < t->object_count; i++)
        json_array_append_new(objects,
                              json_pack("[iss]", t->objects[i].depth,
                                        kind_names[t->objects[i].kind], t->objects[i].text));
    for (int r = 0; r < count; r++)
        json_array_append_new(list, json_string(ranks[r].where));
    json_t *root = json_pack("{s:o,s:o}", "objects", objects, "ranks", list);
    enum status st = json_file_write_line(path, root);
    json_decref(root);
    return st;
}

enum status topology_json_write(const char *dir, const struct binding *ranks, int count)
{
    struct topology t = {0};
    enum status st = topology_read(&t);
    if (st == ST_OK)
        st = write_json(dir, &t, ranks, count);
    else if (st != ST_MEMORY) {
        log_debug("run", "no topology.json: %s", status_message());
        status_clear();
        st = ST_OK;
    }
    topology_release(&t);
    return st;
}
