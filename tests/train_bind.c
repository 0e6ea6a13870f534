/*
 * Ranks that are bound: where their threads then are, that results do not notice, and what happens
 * where it cannot be done. Tests that need two CPUs are skipped on one.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/bind.h"
#include "comm/network.h"
#include "comm/topology.h"
#include "engine/base/arena.h"
#include "engine/base/file.h"
#include "engine/device/workers.h"
#include "engine/train/binding.h"
#include "tests/support/mpi.h"
#include "tests/support/process.h"
#include "tests/support/run.h"

enum { MAX_RANKS = 4, STEPS = 3 };

static struct scratch scratch;
static struct process ran;
static struct cpuset at_first; /* where this program may run */

static int make_data(void **state)
{
    struct made_questions train = {20, 5, 70, 4, .seed = 51}, eval = train;
    assert_ok(bind_get_cpus(&at_first));
    run_set_up(state, &scratch, &train, &eval);
    return unsetenv("HWLOC_COMPONENTS"); /* the devices of this machine are looked for, too */
}

/* Some tests bind this thread. */
static int set_free(void **state)
{
    (void)state;
    return bind_set_cpus(&at_first) == ST_OK ? 0 : -1;
}

static void need_cpus(int count)
{
    if (cpuset_count(&at_first) < count)
        skip();
}

static struct run_config tiny(int ranks)
{
    struct tiny_run with = {ranks, 2, .steps = STEPS};
    return run_tiny_with(&scratch, with);
}

/* ---- where threads are ----------------------------------------------------------------------- */

struct seen {
    struct cpuset rank[MAX_RANKS], worker[MAX_RANKS], helper[MAX_RANKS];
    void (*before)(void);
};

static void *look(void *set)
{
    return bind_get_cpus(set) == ST_OK ? set : NULL;
}

static void look_from_worker(void *context, int64_t part, int worker)
{
    (void)part;
    if (worker == 1)
        look(context);
    usleep(2000); /* so that both take parts */
}

static void look_around(void *context, struct trainer *t)
{
    struct seen *seen = context;
    int rank = t->comm->rank;
    pthread_t helper;
    look(&seen->rank[rank]);
    if (pthread_create(&helper, NULL, look, &seen->helper[rank]) == 0)
        pthread_join(helper, NULL);
    for (int i = 0; i < 50 && cpuset_count(&seen->worker[rank]) == 0; i++)
        workers_run(t->device->workers, look_from_worker, &seen->worker[rank], 4);
}

static void run_and_look(struct seen *seen, const struct run_config *c)
{
    struct run_trace trace = {0};
    memset(seen, 0, sizeof *seen);
    struct run_how how = {.at_start = look_around, .context = seen};
    run_go(&trace, c, &how);
    assert_int_equal(trace.st, ST_OK);
    run_release(&trace);
}

static void ranks_and_their_threads_have_cores_of_their_own(void **state)
{
    (void)state;
    need_cpus(2);
    struct run_config c = tiny(2);
    struct seen seen;
    c.train.threads = 2;
    run_and_look(&seen, &c);
    assert_false(cpuset_meets(&seen.rank[0], &seen.rank[1]));
    for (int r = 0; r < 2; r++) {
        assert_true(cpuset_contains(&at_first, &seen.rank[r]));
        assert_true(cpuset_equal(&seen.worker[r], &seen.rank[r]));
        assert_true(cpuset_equal(&seen.helper[r], &seen.rank[r]));
    }
    struct cpuset now;
    assert_ok(bind_get_cpus(&now));
    assert_true(cpuset_equal(&now, &at_first)); /* only ranks are bound */
    c.train.bind = BIND_NONE;
    run_and_look(&seen, &c);
    assert_true(cpuset_equal(&seen.rank[0], &at_first) && cpuset_equal(&seen.rank[1], &at_first));
}

static void more_ranks_than_cores_are_left_alone(void **state)
{
    (void)state;
    struct binding list[2];
    struct cpuset one = {{0}};
    struct run_config c = tiny(2);
    for (int cpu = 0; cpuset_count(&one) == 0; cpu++)
        if (cpuset_has(&at_first, cpu))
            cpuset_add(&one, cpu);
    assert_ok(bind_set_cpus(&one));
    assert_ok(binding_plan_threads(list, &c, 2));
    assert_false(list[0].on || list[1].on);
    assert_string_equal(list[1].where, "on 1 core, not bound: fewer cores than ranks");
    assert_string_equal(list[1].problem, "");
    assert_ok(binding_plan_threads(list, &c, 1)); /* one rank stays within what taskset left */
    assert_true(list[0].on && cpuset_equal(&list[0].cpus, &one));
}

static void what_a_launcher_left_is_divided_among_those_that_share_it(void **state)
{
    (void)state;
    struct binding_place all[4];
    struct binding b;
    struct run_config c = tiny(1);
    memset(all, 0, sizeof all);
    for (int r = 0; r < 4; r++)
        binding_place_here(&all[r], NULL);
    memset(&all[3].cpus, 0, sizeof all[3].cpus);
    cpuset_add(&all[3].cpus, CPUSET_MAX - 1); /* of its own */
    snprintf(all[2].host, sizeof all[2].host, "another");
    assert_int_equal(binding_sharing(all, 4, 0), 2);
    assert_int_equal(binding_sharing(all, 4, 2), 1);
    assert_int_equal(binding_sharing(all, 4, 3), 1);
    need_cpus(2);
    struct cpuset first;
    assert_ok(binding_plan_process(&b, &c, all, 4, 0, NULL));
    assert_true(b.on);
    first = b.cpus;
    assert_ok(binding_plan_process(&b, &c, all, 4, 1, NULL));
    assert_true(b.on && !cpuset_meets(&first, &b.cpus));
    assert_ok(binding_plan_process(&b, &c, all, 4, 2, NULL));
    assert_true(b.on && cpuset_equal(&b.cpus, &at_first));
    /* Whoever has no CPU of this machine has a problem, and no error. */
    assert_ok(binding_plan_process(&b, &c, all, 4, 3, NULL));
    assert_false(b.on);
    assert_non_null(strstr(b.problem, "no CPU of this machine may be used"));
}

/* ---- libraries that bind --------------------------------------------------------------------- */

/* As a library that restores the launcher's affinity when a communicator is made. */
static enum status free_thread(void *context, struct comm **comm)
{
    (void)context;
    (void)comm;
    return bind_set_cpus(&at_first);
}

static void look_at_rank(void *context, struct trainer *t)
{
    struct seen *seen = context;
    look(&seen->rank[t->comm->rank]);
}

static void b96_a_library_that_changes_the_binding_is_found_and_undone(void **state)
{
    (void)state;
    need_cpus(2);
    struct run_config c = tiny(2);
    struct run_data data = {0};
    static struct seen seen;
    struct run_options options = {
        .quiet = true, .wrap_comm = free_thread, .at_start = look_at_rank, .context = &seen};
    assert_ok(run_data_load(&data, &c, true));
    assert_ok(run_local(&c, &data, &options, NULL));
    run_data_release(&data);
    assert_true(cpuset_count(&seen.rank[0]) > 0 && cpuset_count(&seen.rank[1]) > 0);
    assert_false(cpuset_meets(&seen.rank[0], &seen.rank[1]));
    /* The binding tells behind which one. */
    struct binding b = {.on = true, .node = BIND_ANY_NODE, .cpus = seen.rank[0]};
    binding_apply(&b);
    assert_ok(bind_set_cpus(&at_first));
    binding_check(&b, "NCCL");
    binding_check(&b, "BLAS"); /* which did nothing */
    assert_string_equal(b.restored, "NCCL");
    struct cpuset now;
    assert_ok(bind_get_cpus(&now));
    assert_true(cpuset_equal(&now, &seen.rank[0]));
}

static void a_binding_that_fails_leaves_the_thread_as_it_was(void **state)
{
    (void)state;
    struct binding b = {.on = true, .node = BIND_ANY_NODE};
    cpuset_add(&b.cpus, CPUSET_MAX - 1);
    binding_apply(&b);
    assert_false(b.on);
    assert_non_null(strstr(b.problem, "sched_setaffinity to CPUs 4095: "));
    struct cpuset now;
    assert_ok(bind_get_cpus(&now));
    assert_true(cpuset_equal(&now, &at_first));
}

/* ---- results --------------------------------------------------------------------------------- */

static void results_are_the_same_bits_bound_and_unbound(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 2; ranks++) {
        struct run_trace bound = {0}, unbound = {0};
        struct run_config c = tiny(ranks);
        run_go(&bound, &c, &(struct run_how){.loud = false});
        c.train.bind = BIND_NONE;
        run_go(&unbound, &c, &(struct run_how){.loud = false});
        assert_int_equal(bound.st, ST_OK);
        assert_int_equal(unbound.st, ST_OK);
        run_same(&bound, &unbound, "bound and unbound");
        run_release(&bound);
        run_release(&unbound);
    }
}

/* ---- what people see ------------------------------------------------------------------------- */

static void train(const char *bind, int ranks, const char *set)
{
    struct run_config c = tiny(ranks);
    const char *path = run_put_config(&scratch, &c);
    process_run(&ran, &scratch,
                (const char *const[]){"train", "--config", path, "--output-dir",
                                      scratch_at(&scratch, "out"), "--bind", bind, "--set", set,
                                      NULL});
}

static int count_of(const char *text)
{
    int count = 0;
    for (const char *at = ran.err; (at = strstr(at, text)) != NULL; at++)
        count++;
    return count;
}

static void b95_the_start_says_where_each_rank_is_and_how_fast_memory_is(void **state)
{
    (void)state;
    train("none", 1, "train.seed=1");
    process_expect(&ran, 0, NULL, "not bound");
    assert_int_equal(count_of(" warn "), 0);
    assert_int_equal(count_of("bandwidth"), 0);
    need_cpus(2);
    train("auto", 2, "train.seed=1");
    process_expect(&ran, 0, NULL, " of node ");
    assert_int_equal(count_of("run: bandwidth: host memory "), 1);
    assert_int_equal(count_of(" GB/s, the slowest of 2 ranks"), 1);
    struct topology t = {0};
    assert_ok(topology_read(&t));
    assert_int_equal(count_of("one memory node: binding memory gains nothing"), t.node_count == 1);
    topology_release(&t);
    assert_int_equal(count_of("not bound"), 0);
    struct file_text json = {0};
    assert_ok(file_read(&json, scratch_at(&scratch, "out/topology.json")));
    assert_non_null(strstr(json.data, "{\"objects\":[[0,\"machine\",\"machine"));
    assert_non_null(strstr(json.data, "\"ranks\":[\"core "));
    mem_free(&json.data);
    process_run(&ran, &scratch,
                (const char *const[]){"report", scratch_at(&scratch, "out"), "--output",
                                      scratch_at(&scratch, "page.html"), NULL});
    process_expect(&ran, 0, NULL, NULL);
    assert_ok(file_read(&json, scratch_at(&scratch, "page.html")));
    assert_non_null(strstr(json.data, "\"topology\":{\"objects\":"));
    mem_free(&json.data);
    train("maybe", 1, "train.seed=1");
    process_expect(&ran, 2, NULL, "train.bind: expected auto or none, found \"maybe\"");
}

/* hwloc is told of memory nodes that are not there. */
static void a_bind_that_fails_is_one_warning_and_no_error(void **state)
{
    (void)state;
    need_cpus(2);
    if (!cpuset_has(&at_first, 0) || !cpuset_has(&at_first, 1))
        skip();
    setenv("HWLOC_SYNTHETIC", "numa:2(indexes=0,1000) core:1 pu:1", 1);
    train("auto", 2, "train.seed=1");
    unsetenv("HWLOC_SYNTHETIC");
    process_expect(&ran, 0, NULL, "is not bound: set_mempolicy to node 1000: ");
    assert_int_equal(count_of(" warn "), 1);
}

static void ranks_of_mpiexec_are_bound_too(void **state)
{
    (void)state;
    mpi_skip_without();
    need_cpus(2);
    static struct job job;
    struct run_config c = tiny(1);
    const char *program = getenv("TESSERA") != NULL ? getenv("TESSERA") : "./tessera";
    job_start(&job, &scratch, 2,
              (const char *const[]){program, "train", "--config", run_put_config(&scratch, &c),
                                    "--output-dir", scratch_at(&scratch, "mpi"), NULL});
    job_wait(&job);
    job_expect(&job, true, " of node ");
}

/* ---- NICs ------------------------------------------------------------------------------------ */

static void nccl_is_told_of_near_nics_unless_somebody_has(void **state)
{
    (void)state;
    struct network_choice all[2];
    char text[192];
    struct topology t = {0};
    struct affinity_rank rank = {.gpu = 3, .nics = {2}, .nic_count = 1, .interface = 2};
    memset(all, 0, sizeof all);
    setenv("HOME", scratch.dir, 1);
    unsetenv("NCCL_IB_HCA");
    unsetenv("NCCL_SOCKET_IFNAME");
    assert_ok(topology_read_xml(&t, "tests/data/topology/32em64t-2n8c2t-pci-normalio.xml"));
    rank.gpu = topology_find_gpu(&t, "0000:84:00.0");
    network_choose(&all[0], &t, &rank);
    assert_string_equal(all[0].fabrics, "mlx5_0");
    rank.gpu = topology_find_gpu(&t, "0000:03:00.0");
    network_choose(&all[1], &t, &rank);
    assert_string_equal(all[1].fabrics, ""); /* not near: NCCL may know better */
    topology_release(&t);

    network_announce(all, 2, 1, text, sizeof text);
    assert_string_equal(text, "");
    network_announce(all, 2, 0, text, sizeof text);
    assert_string_equal(text, "NCCL_IB_HCA==mlx5_0");
    assert_string_equal(getenv("NCCL_IB_HCA"), "=mlx5_0");
    assert_null(getenv("NCCL_SOCKET_IFNAME"));
    setenv("NCCL_IB_HCA", "mlx4", 1);
    network_announce(all, 2, 0, text, sizeof text);
    assert_string_equal(text, "");
    assert_string_equal(getenv("NCCL_IB_HCA"), "mlx4");

    /* Without verbs, sockets: if all ranks' interfaces are in one network. */
    for (int r = 0; r < 2; r++) {
        all[r] = (struct network_choice){.address_net = 10, .address_mask = 255};
        snprintf(all[r].interface, sizeof all[r].interface, "eth%d", r);
    }
    all[1].address_net = 11;
    network_announce(all, 2, 1, text, sizeof text);
    assert_string_equal(text, "");
    all[1].address_net = 10;
    char path[512];
    scratch_put(&scratch, path, ".nccl.conf", "NCCL_SOCKET_IFNAME = ib0\n", 25);
    network_announce(all, 2, 1, text, sizeof text);
    assert_string_equal(text, "");
    unlink(path);
    network_announce(all, 2, 1, text, sizeof text);
    assert_string_equal(text, "NCCL_SOCKET_IFNAME==eth1");
    unsetenv("NCCL_SOCKET_IFNAME");
    unsetenv("NCCL_IB_HCA");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_and_their_threads_have_cores_of_their_own),
        cmocka_unit_test_teardown(more_ranks_than_cores_are_left_alone, set_free),
        cmocka_unit_test(what_a_launcher_left_is_divided_among_those_that_share_it),
        cmocka_unit_test_teardown(b96_a_library_that_changes_the_binding_is_found_and_undone,
                                  set_free),
        cmocka_unit_test(a_binding_that_fails_leaves_the_thread_as_it_was),
        cmocka_unit_test(results_are_the_same_bits_bound_and_unbound),
        cmocka_unit_test(b95_the_start_says_where_each_rank_is_and_how_fast_memory_is),
        cmocka_unit_test(a_bind_that_fails_is_one_warning_and_no_error),
        cmocka_unit_test(ranks_of_mpiexec_are_bound_too),
        cmocka_unit_test(nccl_is_told_of_near_nics_unless_somebody_has),
    };
    return cmocka_run_group_tests(tests, make_data, run_tear_down);
}
