/* `tessera topo` as people use it, on this machine and on the files of others. */
#include <stdio.h>
#include <string.h>

#include "tests/support/process.h"

#define REAL(name) "tests/data/topology/" name ".xml"

static struct process ran;

static void run(struct file_test *f, const char *const *args)
{
    process_run(&ran, &f->scratch, args);
}

#define RUN(...) run(*state, (const char *const[]){"topo", __VA_ARGS__, NULL})

static void expect_lines_of(size_t columns)
{
    for (const char *line = ran.out; *line != '\0';) {
        size_t bytes = strcspn(line, "\n");
        if (bytes > columns)
            fail_msg("%zu columns: %.*s", bytes, (int)bytes, line);
        line += bytes + (line[bytes] == '\n');
    }
}

/* B-95: people want to see the map and who would be bound where. */
static void b95_the_map_and_the_plan_with_reasons_are_printed(void **state)
{
    RUN("--xml", REAL("32em64t-2n8c2t-pci-normalio"));
    process_expect(&ran, 0, "    L3 20 MiB: 8 cores, cpus 0-7,16-23\n", NULL);
    process_expect(&ran, 0, "        NIC 0000:04:00.0 mlx5_0 (ib0)\n", NULL);
    process_expect(&ran, 0, "16 cores, each with 2 hardware threads, L1 32 KiB, L2 256 KiB", NULL);
    process_expect(&ran, 0, "plan for 3 ranks on 16 cores, 32 hardware threads\n", NULL);
    process_expect(&ran, 0,
                   "   2  0000:84:00.0  12-15,28-31               node 1    mlx5_0\n"
                   "      Its GPU hangs on node 1, whose 8 cores 2 ranks divide.",
                   NULL);
    expect_lines_of(100);
}

static void every_machine_fits_on_a_page(void **state)
{
    static const char *const files[] = {REAL("nvidiaDGX2"), REAL("power8gpudistances"),
                                        REAL("nvidia-dgx-gb10"), REAL("16intel64-manyVFs")};
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        RUN("--xml", files[i]);
        process_expect(&ran, 0, "plan for ", NULL);
        expect_lines_of(100);
    }
}

static void ranks_and_cpus_can_be_given(void **state)
{
    RUN("--xml", REAL("32em64t-2n8c2t-pci-normalio"), "--ranks", "2", "--cpus", "8-11");
    process_expect(&ran, 0, "CPUs that count: 8-11\n", NULL);
    process_expect(&ran, 0, "plan for 2 ranks on 4 cores, 4 hardware threads\n", NULL);
    process_expect(&ran, 0, "Near its GPU no core is left or allowed", NULL);
    RUN("--xml", REAL("nvidia-dgx-gb10"), "--ranks", "21");
    process_expect(&ran, 0, "fewer cores than ranks, which run unbound", NULL);
    process_expect(&ran, 0, "21 ranks without GPUs share all 20 hardware threads.", NULL);
}

static void this_machine_is_shown(void **state)
{
    run(*state, (const char *const[]){"topo", NULL});
    process_expect(&ran, 0, "machine", NULL);
    process_expect(&ran, 0, "rank  GPU", NULL);
    RUN("--help");
    process_expect(&ran, 0, "--xml", NULL);
}

static void bandwidth_is_measured_and_says_what_can_be_gained(void **state)
{
    RUN("--bandwidth");
    process_expect(&ran, 0, "bandwidth, GB/s", NULL);
    process_expect(&ran, 0, "from CPUs of node ", NULL);
    if (strstr(ran.out, "node 1:") == NULL)
        process_expect(&ran, 0, "One memory node", NULL);
    RUN("--bandwidth", "--xml", REAL("nvidiaDGX2"));
    process_expect(&ran, 2, NULL, "--bandwidth measures this machine");
}

static void bad_input_is_named(void **state)
{
    RUN("--xml", "no-such-file.xml");
    process_expect(&ran, 1, NULL, "no-such-file.xml: ");
    RUN("--xml", "README.md");
    process_expect(&ran, 1, NULL, "README.md: no <topology>: expected what lstopo writes");
    RUN("--ranks", "0");
    process_expect(&ran, 2, NULL, "--ranks");
    RUN("--cpus", "7-3");
    process_expect(&ran, 2, NULL,
                   "--cpus: expected a list like 0-7,16-23 (up to 4095), found \"7-3\"");
    RUN("--xml", REAL("nvidiaDGX2"), "--cpus", "9");
    process_expect(&ran, 2, NULL, "no CPU of this machine may be used");
    assert_string_equal(ran.out, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(b95_the_map_and_the_plan_with_reasons_are_printed),
        cmocka_unit_test(every_machine_fits_on_a_page),
        cmocka_unit_test(ranks_and_cpus_can_be_given),
        cmocka_unit_test(this_machine_is_shown),
        cmocka_unit_test(bandwidth_is_measured_and_says_what_can_be_gained),
        cmocka_unit_test(bad_input_is_named),
    };
    return cmocka_run_group_tests(tests, file_test_set_up, file_test_tear_down);
}
