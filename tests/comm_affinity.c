/*
 * Which cores, memory and NIC each rank gets, on real machines and on made-up ones to which tests
 * add GPUs and NICs.
 */
#include "comm/affinity.h"

#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "tests/support/support.h"

#define REAL(name) "tests/data/topology/" name ".xml"

enum { RANKS = 64 };

static struct topology t;
static struct affinity_plan plan;

static void read_real(const char *path)
{
    assert_ok(topology_read_xml(&t, path));
}

static void read_made(const char *text)
{
    assert_ok(topology_read_synthetic(&t, text));
}

/* GPUs and NICs near the nodes given, at the distances that the nodes give. */
static void add_devices(const int *gpu_nodes, int gpus, const int *nic_nodes, int nics)
{
    assert_ok(mem_alloc(&t.gpus, (size_t)(gpus + 1) * sizeof *t.gpus));
    assert_ok(mem_alloc(&t.nics, (size_t)(nics + 1) * sizeof *t.nics));
    mem_free(&t.distances);
    assert_ok(mem_alloc(&t.distances, (size_t)(gpus * nics + 1)));
    for (int g = 0; g < gpus; g++)
        t.gpus[g] = (struct topology_gpu){.cuda = true, .near = t.nodes[gpu_nodes[g]].cpus};
    for (int n = 0; n < nics; n++) {
        t.nics[n] = (struct topology_nic){.up = true, .near = t.nodes[nic_nodes[n]].cpus};
        snprintf(t.nics[n].fabric, sizeof t.nics[n].fabric, "mlx5_%d", n);
        snprintf(t.nics[n].interface, sizeof t.nics[n].interface, "ib%d", n);
    }
    for (int i = 0; i < gpus * nics; i++)
        t.distances[i] =
            gpu_nodes[i / nics] == nic_nodes[i % nics] ? TOPOLOGY_BRIDGE : TOPOLOGY_MACHINE;
    t.gpu_count = gpus;
    t.nic_count = nics;
}

static void make_plan(int ranks, bool gpus, const char *allowed)
{
    static int list[RANKS];
    struct cpuset set;
    for (int r = 0; r < ranks; r++)
        list[r] = r < t.gpu_count ? r : -1;
    if (allowed != NULL)
        assert_true(cpuset_parse(&set, allowed));
    struct affinity_request request = {ranks, gpus ? list : NULL, allowed != NULL ? &set : NULL};
    assert_ok(affinity_plan_build(&plan, &t, &request));
    for (int r = 0; r < ranks; r++)
        assert_true(cpuset_count(&plan.ranks[r].cpus) > 0 && plan.ranks[r].why[0] != '\0' &&
                    strlen(plan.ranks[r].why) < AFFINITY_WHY_BYTES - 1);
}

static void end(void)
{
    affinity_plan_release(&plan);
    topology_release(&t);
    assert_int_equal(mem_live_bytes(), 0);
}

/* No CPU is two ranks', and none is outside @allowed. */
static void expect_disjoint(const char *allowed)
{
    struct cpuset set;
    for (int r = 0; r < plan.rank_count; r++) {
        for (int other = 0; other < r; other++)
            assert_false(cpuset_meets(&plan.ranks[r].cpus, &plan.ranks[other].cpus));
        if (allowed != NULL && cpuset_parse(&set, allowed))
            assert_true(cpuset_contains(&set, &plan.ranks[r].cpus));
    }
}

/* The ranks from @first on have so many cores, give or take @spread. */
static void expect_balanced(int first, int count, int spread)
{
    int least = plan.ranks[first].cores, most = least;
    for (int r = first; r < first + count; r++) {
        least = plan.ranks[r].cores < least ? plan.ranks[r].cores : least;
        most = plan.ranks[r].cores > most ? plan.ranks[r].cores : most;
    }
    assert_true(most - least <= spread);
}

static void expect_cpus(int rank, const char *cpus)
{
    char text[CPUSET_TEXT_BYTES];
    cpuset_format(&plan.ranks[rank].cpus, text, sizeof text);
    assert_string_equal(text, cpus);
}

static void expect_why(int rank, const char *text)
{
    if (strstr(plan.ranks[rank].why, text) == NULL)
        fail_msg("\"%s\" has no \"%s\"", plan.ranks[rank].why, text);
}

/* ---- sets ------------------------------------------------------------------------------------ */

static void lists_of_cpus_are_read_and_written(void **state)
{
    (void)state;
    static const char *const bad[] = {"", ",", "1,", "-1", "3-1", "1-", "a", "4096", "1 2", "0x3"};
    struct cpuset set;
    char text[CPUSET_TEXT_BYTES];
    assert_true(cpuset_parse(&set, "3,0-1,64,63"));
    cpuset_format(&set, text, sizeof text);
    assert_string_equal(text, "0-1,3,63-64");
    assert_int_equal(cpuset_count(&set), 5);
    cpuset_format(&set, text, 12);
    assert_string_equal(text, "0-1,3,...");
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        assert_false(cpuset_parse(&set, bad[i]));
    cpuset_add(&set, -1);
    cpuset_add(&set, CPUSET_MAX);
    assert_false(cpuset_has(&set, -1) || cpuset_has(&set, CPUSET_MAX));
}

/* ---- real machines --------------------------------------------------------------------------- */

static void gpus_on_both_sockets_divide_their_own_cores(void **state)
{
    (void)state;
    read_real(REAL("32em64t-2n8c2t-pci-normalio"));
    make_plan(3, true, NULL);
    expect_disjoint(NULL);
    expect_cpus(0, "0-7,16-23");
    expect_cpus(1, "8-11,24-27");
    expect_cpus(2, "12-15,28-31");
    assert_int_equal(plan.ranks[0].node, 0);
    assert_int_equal(plan.ranks[2].node, 1);
    assert_string_equal(t.nics[plan.ranks[2].nics[0]].fabric, "mlx5_0");
    expect_why(0, "no other rank needs");
    expect_why(2, "mlx5_0 is behind the same PCIe switch as its GPU.");
    end();
}

static void sixteen_gpus_on_four_cores_share_the_near_ones(void **state)
{
    (void)state;
    read_real(REAL("nvidiaDGX2"));
    make_plan(16, true, NULL);
    assert_int_equal(plan.kind, AFFINITY_SHARED);
    for (int r = 0; r < 16; r++) {
        assert_int_equal(plan.ranks[r].node, r / 8);
        expect_why(r, "hardware threads 8 ranks share");
        expect_why(r, "no NIC");
    }
    int users = 0;
    for (int r = 0; r < 16; r++)
        users += cpuset_equal(&plan.ranks[r].cpus, &plan.ranks[0].cpus);
    assert_int_equal(users, 4); /* evenly */
    end();
    read_real(REAL("nvidiaDGX2"));
    make_plan(4, true, NULL); /* all on package 0, which has two cores */
    assert_int_equal(plan.kind, AFFINITY_CORES);
    expect_disjoint(NULL);
    expect_why(0, "hangs on node 0");
    expect_why(3, "no core is left");
    assert_int_equal(plan.ranks[3].node, 1);
    end();
}

static void power8_with_two_threads_of_eight_keeps_cores_whole(void **state)
{
    (void)state;
    read_real(REAL("power8gpudistances"));
    make_plan(4, true, NULL);
    expect_disjoint(NULL);
    expect_balanced(0, 4, 0);
    expect_cpus(0, "0-1,8-9");
    expect_cpus(3, "96-97,104-105");
    end();
}

static void fast_and_slow_cores_are_divided_alike(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 20; ranks++) {
        int least = 20, most = 0, of_kind[RANKS][2] = {{0}};
        read_real(REAL("nvidia-dgx-gb10"));
        make_plan(ranks, false, NULL);
        expect_disjoint(NULL);
        expect_balanced(0, ranks, 1);
        for (int r = 0; r < ranks; r++)
            for (int c = 0; c < t.core_count; c++)
                of_kind[r][t.cores[c].kind] += cpuset_has(&plan.ranks[r].cpus, t.cores[c].cpu[0]);
        for (int r = 0; r < ranks; r++) {
            least = of_kind[r][1] < least ? of_kind[r][1] : least;
            most = of_kind[r][1] > most ? of_kind[r][1] : most;
        }
        assert_true(most - least <= 1);
        end();
    }
}

static void without_gpus_and_fabric_the_nearest_ethernet_counts(void **state)
{
    (void)state;
    read_real(REAL("16intel64-manyVFs"));
    make_plan(2, true, NULL);
    expect_cpus(0, "0-7");
    expect_cpus(1, "8-15");
    for (int r = 0; r < 2; r++) {
        assert_true(plan.ranks[r].nic_count > 0 && plan.ranks[r].interface >= 0);
        assert_int_equal(plan.ranks[r].node, r);
        assert_true(cpuset_equal(&t.nics[plan.ranks[r].nics[0]].near, &plan.ranks[r].cpus));
    }
    end();
}

/* ---- made-up machines ------------------------------------------------------------------------ */

static void gpus_on_one_socket_leave_the_other_alone(void **state)
{
    (void)state;
    read_made("package:2 numa:1 core:8 pu:1");
    add_devices((int[]){0, 0, 0, 0}, 4, NULL, 0);
    make_plan(4, true, NULL);
    expect_disjoint(NULL);
    expect_balanced(0, 4, 0);
    expect_cpus(3, "6-7");
    end();
}

/* The socket of the GPUs is not allowed, or nearly so: far cores are better than none. */
static void disallowed_cores_are_nobodys(void **state)
{
    (void)state;
    read_made("package:2 numa:1 core:4 pu:2");
    add_devices((int[]){0, 0, 1, 1}, 4, NULL, 0);
    make_plan(4, true, "8-15");
    expect_disjoint("8-15");
    expect_balanced(0, 4, 0);
    expect_why(0, "no core is left or allowed");
    affinity_plan_release(&plan);
    make_plan(4, true, "0-1,8-15");
    expect_disjoint("0-1,8-15");
    expect_cpus(0, "0-1");
    affinity_plan_release(&plan);
    make_plan(2, false, "3-9");
    expect_disjoint("3-9");
    affinity_plan_release(&plan);
    struct cpuset none = {{0}};
    assert_fails(affinity_plan_build(&plan, &t, &(struct affinity_request){2, NULL, &none}),
                 ST_INVALID, "no CPU");
    end();
}

static void whole_cores_come_before_hyperthreads(void **state)
{
    (void)state;
    read_made("package:1 numa:1 core:4 pu:2");
    make_plan(4, false, NULL);
    for (int r = 0; r < 4; r++)
        assert_true(plan.ranks[r].cores == 1 && cpuset_count(&plan.ranks[r].cpus) == 2);
    affinity_plan_release(&plan);
    make_plan(7, false, NULL); /* fewer cores than ranks, and hardware threads enough */
    assert_int_equal(plan.kind, AFFINITY_THREADS);
    expect_disjoint(NULL);
    affinity_plan_release(&plan);
    make_plan(17, false, NULL);
    assert_int_equal(plan.kind, AFFINITY_SHARED);
    expect_why(16, "17 ranks without GPUs share all 8 hardware threads");
    end();
}

/* A rank on CPUs has its part of the CPUs in threads; its binding must not squeeze them. */
static void no_rank_has_fewer_cpus_than_threads(void **state)
{
    (void)state;
    static const char *const machines[] = {"core:3 pu:2", "core:5 pu:4",
                                           "package:2 numa:2 core:3 pu:2", "numa:3 core:5 pu:1"};
    for (size_t m = 0; m < sizeof machines / sizeof machines[0]; m++) {
        for (int ranks = 1; ranks <= 24; ranks++) {
            read_made(machines[m]);
            make_plan(ranks, false, NULL);
            if (plan.kind != AFFINITY_SHARED)
                expect_disjoint(NULL);
            for (int r = 0; r < ranks; r++)
                assert_true(cpuset_count(&plan.ranks[r].cpus) >= plan.cpus / ranks);
            end();
        }
    }
}

static void several_nics_are_dealt_to_the_ranks_they_are_near_to(void **state)
{
    (void)state;
    read_made("package:2 numa:1 core:8 pu:1");
    add_devices((int[]){0, 0, 1, 1}, 4, (int[]){0, 0, 0, 0, 1}, 5);
    make_plan(4, true, NULL);
    assert_int_equal(plan.ranks[0].nic_count, 2); /* four NICs, two GPUs */
    assert_int_equal(plan.ranks[1].nic_count, 2);
    assert_int_equal(plan.ranks[0].nics[0] + plan.ranks[0].nics[1], 0 + 2);
    assert_int_equal(plan.ranks[1].nics[0] + plan.ranks[1].nics[1], 1 + 3);
    assert_int_equal(plan.ranks[2].nics[0], 4); /* one NIC, two GPUs */
    assert_int_equal(plan.ranks[3].nics[0], 4);
    affinity_plan_release(&plan);
    t.nics[4].up = false; /* a far one is better than one that is down */
    make_plan(4, true, NULL);
    assert_true(plan.ranks[3].nics[0] < 4);
    expect_why(3, "far from its GPU");
    affinity_plan_release(&plan);
    for (int n = 0; n < 4; n++)
        t.nics[n].up = false;
    make_plan(4, true, NULL);
    assert_int_equal(plan.ranks[0].nic_count, 0);
    assert_int_equal(plan.ranks[0].interface, -1);
    expect_why(0, "No NIC is up");
    end();
}

/* Containers often hide where a GPU is. */
static void a_gpu_of_unknown_place_gets_the_emptiest_node(void **state)
{
    (void)state;
    read_made("package:2 numa:1 core:4 pu:1");
    add_devices((int[]){0, 0, 0}, 3, NULL, 0);
    make_plan(4, true, NULL); /* rank 3's is not in the list */
    expect_disjoint(NULL);
    assert_int_equal(plan.ranks[3].node, 1);
    expect_why(3, "unknown");
    end();
}

/* Random machines, GPUs, NICs and CPUs that are allowed: what must hold for every plan. */
static void any_machine_gets_a_balanced_disjoint_plan(void **state)
{
    (void)state;
    uint64_t random = test_seed();
    for (int round = 0; round < 300; round++) {
        char text[128], allowed[CPUSET_TEXT_BYTES];
        int packages = 1 + (int)(test_random(&random) % 3),
            nodes = 1 + (int)(test_random(&random) % 2);
        int cores = 1 + (int)(test_random(&random) % 6), pus = 1 + (int)(test_random(&random) % 2);
        int gpu_nodes[16], nic_nodes[8], gpus = (int)(test_random(&random) % 17),
                                         nics = (int)(test_random(&random) % 9);
        int ranks = gpus > 0 ? gpus : 1 + (int)(test_random(&random) % 20);
        struct cpuset set = {{0}};
        snprintf(text, sizeof text, "package:%d numa:%d core:%d pu:%d", packages, nodes, cores,
                 pus);
        for (int cpu = 0; cpu < packages * nodes * cores * pus; cpu++)
            if (cpu == 0 || test_random(&random) % 4 > 0)
                cpuset_add(&set, cpu);
        for (int g = 0; g < gpus; g++)
            gpu_nodes[g] = (int)(test_random(&random) % (uint64_t)(packages * nodes));
        for (int n = 0; n < nics; n++)
            nic_nodes[n] = (int)(test_random(&random) % (uint64_t)(packages * nodes));
        read_made(text);
        add_devices(gpu_nodes, gpus, nic_nodes, nics);
        snprintf(allowed, sizeof allowed, "0");
        cpuset_format(&set, allowed, sizeof allowed);
        make_plan(ranks, gpus > 0, allowed);
        if (plan.kind != AFFINITY_SHARED)
            expect_disjoint(allowed);
        if (gpus == 0 && plan.kind == AFFINITY_CORES)
            expect_balanced(0, ranks, pus);
        for (int r = 0; r < ranks; r++)
            for (int other = 0; other < r && gpus > 0 && plan.kind == AFFINITY_CORES; other++)
                if (plan.ranks[r].node == plan.ranks[other].node) {
                    int d = plan.ranks[r].cores - plan.ranks[other].cores;
                    assert_true(d >= -1 && d <= 1);
                }
        for (int r = 0; r < ranks; r++)
            assert_true((plan.ranks[r].nic_count > 0) == (nics > 0));
        end();
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lists_of_cpus_are_read_and_written),
        cmocka_unit_test(gpus_on_both_sockets_divide_their_own_cores),
        cmocka_unit_test(sixteen_gpus_on_four_cores_share_the_near_ones),
        cmocka_unit_test(power8_with_two_threads_of_eight_keeps_cores_whole),
        cmocka_unit_test(fast_and_slow_cores_are_divided_alike),
        cmocka_unit_test(without_gpus_and_fabric_the_nearest_ethernet_counts),
        cmocka_unit_test(gpus_on_one_socket_leave_the_other_alone),
        cmocka_unit_test(disallowed_cores_are_nobodys),
        cmocka_unit_test(whole_cores_come_before_hyperthreads),
        cmocka_unit_test(no_rank_has_fewer_cpus_than_threads),
        cmocka_unit_test(several_nics_are_dealt_to_the_ranks_they_are_near_to),
        cmocka_unit_test(a_gpu_of_unknown_place_gets_the_emptiest_node),
        cmocka_unit_test(any_machine_gets_a_balanced_disjoint_plan),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
