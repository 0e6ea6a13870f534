/* Every op has an entry in every table. */
#include <string.h>

#include "tests/support/ops.h"

static void no_entry_of_the_table_is_missing(void **state)
{
    struct op_test *t = *state;
    void *entry[sizeof(struct ops) / sizeof(void *)];
    _Static_assert(sizeof(struct ops) % sizeof(void *) == 0, "a table of pointers");
    memcpy(entry, t->device->compute, sizeof entry);
    for (size_t i = 0; i < sizeof entry / sizeof entry[0]; i++)
        assert_non_null(entry[i]);
}

static void no_entry_of_the_device_is_missing(void **state)
{
    struct op_test *t = *state;
    void *entry[sizeof(struct device_ops) / sizeof(void *)];
    memcpy(entry, t->device->ops, sizeof entry);
    for (size_t i = 0; i < sizeof entry / sizeof entry[0]; i++)
        assert_non_null(entry[i]);
}

static void the_workspace_grows_with_the_limits(void **state)
{
    struct op_test *t = *state;
    struct op_limits small = op_test_limits;
    small.max_length = 1;
    small.channels = 1;
    assert_true(op_workspace_bytes(t->device, &small) <=
                op_workspace_bytes(t->device, &op_test_limits));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_entry_of_the_table_is_missing),
        cmocka_unit_test(no_entry_of_the_device_is_missing),
        cmocka_unit_test(the_workspace_grows_with_the_limits),
    };
    return OP_TESTS_RUN(tests);
}
