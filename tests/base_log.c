#include "engine/base/log.h"

#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/file.h"
#include "tests/support/support.h"

static int count(const char *text, const char *word)
{
    int n = 0;
    for (const char *p = text; (p = strstr(p, word)) != NULL; p++)
        n++;
    return n;
}

/* A failing rank speaks before it waits for its device, and main speaks at the end. */
static void a_cause_is_said_once_and_without_its_trace(void **state)
{
    (void)state;
    struct file_text said;
    said_begin();
    log_cause("run", "the disk is full\n  from io/x.c:1\n  at io/y.c:2");
    log_cause("tessera", "the disk is full\n  from io/x.c:1\n  at engine/train/main.c:3");
    log_cause("tessera", "the disk is full");
    log_cause("tessera", "the disk is full of\ntwo lines");
    log_cause("tessera", "the disk is full");
    said_end(&said);
    assert_int_equal(count(said.data, "the disk is full"), 3);
    assert_int_equal(count(said.data, " error run: the disk is full\n"), 1);
    assert_int_equal(count(said.data, " error tessera: the disk is full of\ntwo lines\n"), 1);
    assert_int_equal(count(said.data, "from io"), 0);
    mem_free(&said.data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_cause_is_said_once_and_without_its_trace),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
