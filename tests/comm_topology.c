/* Machines as they are read: hwloc's files of real ones, its made-up ones, files that are none. */
#include "comm/topology.h"

#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/file.h"
#include "tests/support/support.h"

#define REAL(name) "tests/data/topology/" name ".xml"

static const char DGX2[] = REAL("nvidiaDGX2"), XEON[] = REAL("32em64t-2n8c2t-pci-normalio"),
                  POWER8[] = REAL("power8gpudistances"), GB10[] = REAL("nvidia-dgx-gb10"),
                  MANY_VFS[] = REAL("16intel64-manyVFs");

static void expect_counts(const struct topology *t, int packages, int nodes, int cores, int gpus,
                          int nics)
{
    assert_int_equal(t->package_count, packages);
    assert_int_equal(t->node_count, nodes);
    assert_int_equal(t->core_count, cores);
    assert_int_equal(t->gpu_count, gpus);
    assert_int_equal(t->nic_count, nics);
}

static void real_machines_are_read(void **state)
{
    (void)state;
    struct topology t = {0};
    assert_ok(topology_read_xml(&t, DGX2));
    expect_counts(&t, 2, 2, 4, 16, 0);
    assert_string_equal(t.gpus[0].bus_id, "0000:34:00.0");
    assert_string_equal(t.gpus[0].name, "Tesla V100-SXM3-32GB-H");
    topology_release(&t);

    assert_ok(topology_read_xml(&t, XEON));
    expect_counts(&t, 2, 2, 16, 4, 3);
    assert_int_equal(t.cores[0].cpu_count, 2);
    assert_int_equal(t.cores[0].cpu[0], 0);
    assert_int_equal(t.cores[0].cpu[1], 16);
    topology_release(&t);

    assert_ok(topology_read_xml(&t, POWER8));
    expect_counts(&t, 2, 2, 8, 4, 0);
    assert_int_equal(t.cores[7].cpu[1], 105);
    topology_release(&t);

    assert_ok(topology_read_xml(&t, GB10));
    expect_counts(&t, 1, 1, 20, 0, 0);
    assert_int_equal(t.kind_count, 2);
    assert_int_equal(t.cores[0].kind, 0); /* a slow one */
    assert_int_equal(t.cores[5].kind, 1);
    topology_release(&t);

    assert_ok(topology_read_xml(&t, MANY_VFS));
    assert_int_equal(t.core_count, 16);
    for (int n = 0; n < t.nic_count; n++)
        assert_string_equal(t.nics[n].fabric, ""); /* usNIC is not for verbs */
    topology_release(&t);
}

/* Which GPU is how far from which NIC, by the tree in the file. */
static void distances_are_those_of_the_tree(void **state)
{
    (void)state;
    struct topology t = {0};
    assert_ok(topology_read_xml(&t, XEON));
    int beside = topology_find_gpu(&t, "0000:84:00.0"),
        near = topology_find_gpu(&t, "0000:83:00.0"), far = topology_find_gpu(&t, "0000:03:00.0");
    assert_true(beside >= 0 && near >= 0 && far >= 0);
    for (int n = 0; n < t.nic_count; n++) {
        bool fabric = t.nics[n].fabric[0] != '\0';
        assert_int_equal(topology_distance(&t, beside, n),
                         fabric ? TOPOLOGY_SWITCH : TOPOLOGY_BRIDGE);
        assert_int_equal(topology_distance(&t, near, n), TOPOLOGY_BRIDGE);
        assert_int_equal(topology_distance(&t, far, n), TOPOLOGY_MACHINE);
    }
    topology_release(&t);
}

static void a_gpu_is_found_by_any_spelling_of_its_bus_id(void **state)
{
    (void)state;
    struct topology t = {0};
    assert_ok(topology_read_xml(&t, POWER8));
    assert_int_equal(topology_find_gpu(&t, "000a:01:00.0"), 2);
    assert_int_equal(topology_find_gpu(&t, "0000000A:01:00.0"), 2);
    assert_int_equal(topology_find_gpu(&t, "000c:01:00.0"), -1);
    assert_int_equal(topology_find_gpu(&t, ""), -1);
    topology_release(&t);
}

static void the_picture_is_a_tree_of_short_lines(void **state)
{
    (void)state;
    static const char *const files[] = {DGX2, XEON, POWER8, GB10, MANY_VFS};
    for (size_t f = 0; f < sizeof files / sizeof files[0]; f++) {
        struct topology t = {0};
        int gpus = 0, nics = 0;
        assert_ok(topology_read_xml(&t, files[f]));
        assert_int_equal(t.objects[0].kind, TOPOLOGY_IS_MACHINE);
        for (int i = 0; i < t.object_count; i++) {
            const struct topology_object *o = &t.objects[i];
            gpus += o->kind == TOPOLOGY_IS_GPU;
            nics += o->kind == TOPOLOGY_IS_NIC;
            assert_true(o->parent < i && (o->parent >= 0 || i == 0));
            assert_int_equal(o->depth, i == 0 ? 0 : t.objects[o->parent].depth + 1);
            assert_true(strlen(o->text) + 2 * (size_t)o->depth <= 100);
        }
        assert_int_equal(gpus, t.gpu_count);
        assert_int_equal(nics, t.nic_count);
        topology_release(&t);
    }
}

static void made_up_machines_are_read(void **state)
{
    (void)state;
    struct topology t = {0};
    assert_ok(topology_read_synthetic(&t, "package:2 numa:2 l3:2 core:4 pu:2"));
    expect_counts(&t, 2, 4, 32, 0, 0);
    assert_int_equal(t.nodes[3].package, 1);
    assert_int_equal(t.cores[31].node, 3);
    topology_release(&t);
    assert_ok(topology_read_synthetic(&t, "core:1 pu:11")); /* more threads than fit in a core */
    assert_int_equal(t.core_count, 2);
    topology_release(&t);
    assert_fails(topology_read_synthetic(&t, "package:none"), ST_INVALID, "package:none");
    assert_int_equal(mem_live_bytes(), 0);
}

static void this_machine_is_read(void **state)
{
    (void)state;
    struct topology t = {0};
    assert_ok(topology_read(&t));
    assert_true(t.core_count > 0 && t.node_count > 0 && t.object_count > 0);
    topology_release(&t);
    topology_release(&t);
}

/* A cgroup that forbids the memory of node 1, and leaves its CPUs. */
static void cpus_without_memory_count_as_the_first_nodes(void **state)
{
    struct file_test *f = *state;
    struct topology t = {0};
    struct file_text real = {0};
    assert_ok(file_read(&real, XEON));
    char *allowed = strstr(real.data, "allowed_nodeset=\"0x00000003\"");
    assert_non_null(allowed);
    allowed[strlen("allowed_nodeset=\"0x0000000")] = '1';
    assert_ok(
        topology_read_xml(&t, scratch_put(&f->scratch, f->path, "a.xml", real.data, real.bytes)));
    expect_counts(&t, 2, 1, 16, 4, 3);
    for (int c = 0; c < t.core_count; c++)
        assert_int_equal(t.cores[c].node, 0);
    assert_int_equal(cpuset_count(&t.nodes[0].cpus), 32);
    topology_release(&t);
    mem_free(&real.data);
}

static void files_that_are_no_topology_say_so(void **state)
{
    struct file_test *f = *state;
    struct topology t = {0};
    struct file_text real = {0};
    assert_fails(topology_read_xml(&t, "no/such.xml"), ST_IO, "no/such.xml");
    assert_fails(topology_read_xml(&t, scratch_put(&f->scratch, f->path, "a.xml", "hello", 5)),
                 ST_CORRUPT, "no <topology>");
    assert_fails(topology_read_xml(&t, scratch_put(&f->scratch, f->path, "a.xml", "", 0)),
                 ST_CORRUPT, "no <topology>");
    static const char newer[] = "<topology version=\"4.0\"></topology>";
    assert_fails(
        topology_read_xml(&t, scratch_put(&f->scratch, f->path, "a.xml", newer, strlen(newer))),
        ST_CORRUPT, "format 4");
    static const char empty[] = "<topology version=\"2.0\"></topology>";
    assert_fails(
        topology_read_xml(&t, scratch_put(&f->scratch, f->path, "a.xml", empty, strlen(empty))),
        ST_CORRUPT, "a.xml");
    assert_ok(file_read(&real, XEON));
    assert_fails(topology_read_xml(
                     &t, scratch_put(&f->scratch, f->path, "a.xml", real.data, real.bytes / 2)),
                 ST_CORRUPT, "cut short");
    mem_free(&real.data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(real_machines_are_read),
        cmocka_unit_test(distances_are_those_of_the_tree),
        cmocka_unit_test(a_gpu_is_found_by_any_spelling_of_its_bus_id),
        cmocka_unit_test(the_picture_is_a_tree_of_short_lines),
        cmocka_unit_test(made_up_machines_are_read),
        cmocka_unit_test(this_machine_is_read),
        cmocka_unit_test_setup_teardown(cpus_without_memory_count_as_the_first_nodes,
                                        file_test_set_up, file_test_tear_down),
        cmocka_unit_test_setup_teardown(files_that_are_no_topology_say_so, file_test_set_up,
                                        file_test_tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
