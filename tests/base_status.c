#include "engine/base/status.h"

#include <pthread.h>
#include <string.h>

#include "tests/support/support.h"

static enum status cause(int level)
{
    return FAIL(CORRUPT, "level %d is damaged", level);
}

static enum status middle(int *went_on)
{
    TRY(cause(3));
    *went_on = 1;
    return ST_OK;
}

static enum status top(int *went_on, int *released)
{
    enum status st;
    TRY_GOTO(st, out, middle(went_on));
    *went_on = 1;
out:
    *released = 1;
    return st;
}

static void a_report_reads_from_cause_to_caller(void **state)
{
    (void)state;
    int went_on = 0, released = 0;
    assert_fails(top(&went_on, &released), ST_CORRUPT, "level 3 is damaged\n  from tests/");
    assert_int_equal(went_on, 0);
    assert_int_equal(released, 1);
    const char *first_at = strstr(status_message(), "\n  at tests/base_status.c:");
    assert_non_null(first_at);
    assert_non_null(strstr(first_at + 1, "\n  at tests/base_status.c:"));
}

static void every_status_has_its_name(void **state)
{
    (void)state;
    assert_string_equal(status_name(ST_OK), "OK");
    assert_string_equal(status_name(ST_UNSUPPORTED), "UNSUPPORTED");
    assert_string_equal(status_name((enum status)ST_COUNT), "UNKNOWN");
    assert_string_equal(status_name((enum status) - 1), "UNKNOWN");
}

static void messages_are_cleared_and_set(void **state)
{
    (void)state;
    status_set_message("from another thread");
    assert_string_equal(status_message(), "from another thread");
    status_clear();
    assert_string_equal(status_message(), "");
}

static void a_message_may_wrap_the_one_before(void **state)
{
    (void)state;
    (void)!cause(1);
    assert_fails(FAIL(IO, "while loading: %s", status_message()), ST_IO,
                 "while loading: level 1 is damaged");
}

static void long_messages_are_cut_not_overrun(void **state)
{
    (void)state;
    static char text[20000];
    memset(text, 'x', sizeof text - 1);
    enum status st = FAIL(IO, "%s", text);
    for (int i = 0; i < 2000; i++)
        st = status_trace(st, __FILE__, __LINE__);
    assert_int_equal(st, ST_IO);
    assert_in_range(strlen(status_message()), 3000, 4095);
    status_set_message(text);
    assert_int_equal(strlen(status_message()), 4095);
}

static void *fail_in_thread(void *argument)
{
    (void)argument;
    (void)!cause(9);
    return strstr(status_message(), "level 9") != NULL ? argument : NULL;
}

static void threads_do_not_share_messages(void **state)
{
    (void)state;
    int token;
    void *seen = NULL;
    pthread_t thread;
    status_set_message("mine");
    assert_int_equal(pthread_create(&thread, NULL, fail_in_thread, &token), 0);
    assert_int_equal(pthread_join(thread, &seen), 0);
    assert_ptr_equal(seen, &token);
    assert_string_equal(status_message(), "mine");
}

static void broken_assertion(void *argument)
{
    ASSERT(*(int *)argument == 1);
}

static void a_broken_assertion_aborts(void **state)
{
    (void)state;
    int value = 0;
    assert_aborts(broken_assertion, &value);
    value = 1;
    broken_assertion(&value);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_report_reads_from_cause_to_caller),
        cmocka_unit_test(every_status_has_its_name),
        cmocka_unit_test(messages_are_cleared_and_set),
        cmocka_unit_test(a_message_may_wrap_the_one_before),
        cmocka_unit_test(long_messages_are_cut_not_overrun),
        cmocka_unit_test(threads_do_not_share_messages),
        cmocka_unit_test(a_broken_assertion_aborts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
