/*
 * What a near memory node is worth on this machine: one thread copies in the memory of its own node
 * and of each other one, and between a GPU (CUDA builds) and pinned memory of each node. A line a
 * pair: median and fastest-to-slowest spread of the repeats. With one node nothing can be gained,
 * and it says so.
 *
 * usage: build/release/bench/affinity
 */
#include "comm/cpuset.h"
#include "engine/base/out.h"
#include "engine/device/device.h"
#include "engine/train/bandwidth.h"

static void line(const char *what, int from, int to, const double GBs[BANDWIDTH_REPEATS])
{
    out("%-14s %2d  node %2d  %7.2f GB/s  spread %3.0f%%  %s\n", what, from, to,
        GBs[BANDWIDTH_REPEATS / 2], 100 * (GBs[0] / GBs[BANDWIDTH_REPEATS - 1] - 1),
        from == to ? "near" : "far");
}

static bool computes(const struct topology *t, int node)
{
    return cpuset_count(&t->nodes[node].cpus) > 0;
}

static enum status host(const struct topology *t)
{
    for (int from = 0; from < t->node_count; from++)
        for (int to = 0; to < t->node_count && computes(t, from); to++) {
            struct bandwidth b;
            TRY(bandwidth_host(&b, t, from, to));
            line("CPU of node", t->nodes[from].number, t->nodes[to].number, b.host);
        }
    return ST_OK;
}

static enum status devices(const struct topology *t)
{
    for (int g = 0; g < device_cuda_count(); g++)
        for (int to = 0; to < t->node_count; to++) {
            struct bandwidth b;
            char bus_id[32];
            TRY(device_cuda_bus_id(bus_id, g));
            int gpu = topology_find_gpu(t, bus_id);
            bool near = gpu < 0 || cpuset_meets(&t->gpus[gpu].near, &t->nodes[to].cpus);
            if (!computes(t, to))
                continue;
            TRY(bandwidth_device(&b, t, g, to));
            line("to GPU", near ? t->nodes[to].number : -1, t->nodes[to].number, b.to_device);
            line("from GPU", near ? t->nodes[to].number : -1, t->nodes[to].number, b.from_device);
        }
    return ST_OK;
}

int main(void)
{
    struct topology t = {0};
    enum status st = topology_read(&t);
    if (st == ST_OK && t.node_count == 1)
        out("one memory node: near and far are the same, nothing can be gained by binding "
            "memory\n");
    if (st == ST_OK)
        st = host(&t);
    if (st == ST_OK)
        st = devices(&t);
    topology_release(&t);
    if (st == ST_SYSTEM) {
        out("SKIP: %s\n", status_message());
        st = ST_OK;
    }
    if (st == ST_OK)
        st = out_flush();
    if (st != ST_OK)
        out("%s\n", status_message());
    return st == ST_OK ? 0 : 1;
}
