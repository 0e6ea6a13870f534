/*
 * What a run on several GPUs says of the way between them (engine/train/bus.h), here over the
 * communicator of threads; between GPUs: tests/cuda_nccl.c.
 */
#include "engine/train/bus.h"

#include <stdlib.h>
#include <string.h>

#include "tests/support/ranks.h"
#include "tests/support/support.h"

enum { BYTES = 100000 };

static enum status measure(struct comm *comm, void *argument)
{
    struct bus *bus = argument;
    struct device *device = NULL;
    void *memory = NULL;
    enum status st = device_open(&device, DEVICE_CPU, PRECISION_AUTO, 0, 1);
    if (st == ST_OK)
        st = comm_memory_open(comm, device, &memory, BYTES);
    if (st == ST_OK)
        st = bus_measure(&bus[comm->rank], device, comm, memory, BYTES);
    comm_memory_close(comm, device, &memory);
    device_close(&device);
    return st;
}

static void b93_what_a_gather_reaches_is_measured_together(void **state)
{
    (void)state;
    for (int ranks = 2; ranks <= 3; ranks++) {
        struct bus bus[3];
        memset(bus, 0, sizeof bus);
        ranks_run_ok(ranks, measure, bus);
        for (int r = 0; r < ranks; r++) {
            double sent = (double)bus[r].bytes * (ranks - 1) / ranks;
            assert_true(bus[r].bytes > BYTES - 2000 && bus[r].bytes <= BYTES);
            assert_true(bus[r].seconds > 0 && bus[r].seconds < 10);
            assert_true(bus[r].bytes_a_second * bus[r].seconds > 0.999 * sent);
            assert_true(bus[r].bytes_a_second * bus[r].seconds < 1.001 * sent);
        }
    }
}

static void b93_settings_of_nccl_are_told(void **state)
{
    char text[200], little[12];
    (void)state;
    bus_settings(text, sizeof text);
    bool none = text[0] == '\0';
    assert_int_equal(setenv("NCCL_P2P_DISABLE", "1", 1), 0);
    bus_settings(text, sizeof text);
    assert_non_null(strstr(text, "NCCL_P2P_DISABLE=1"));
    assert_null(strstr(text, "PATH="));
    bus_settings(little, sizeof little);
    assert_int_equal(strlen(little), sizeof little - 1);
    assert_int_equal(unsetenv("NCCL_P2P_DISABLE"), 0);
    bus_settings(text, sizeof text);
    assert_true(!none || text[0] == '\0');
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(b93_what_a_gather_reaches_is_measured_together),
        cmocka_unit_test(b93_settings_of_nccl_are_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
