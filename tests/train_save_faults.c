/* A save in which something fails costs one checkpoint and no bit of training. */
#include <stdio.h>
#include <string.h>

#include "engine/base/file.h"
#include "io/checkpoint.h"
#include "tests/support/resume.h"

struct fault {
    int64_t at;
    void (*arm)(int64_t k);
    bool (*strikes)(void); /* uses one operation up */
    bool fired;
};

static bool allocation_fails(void)
{
    void *probe = NULL;
    bool failed = mem_alloc(&probe, 1) != ST_OK;
    mem_free(&probe);
    return failed;
}

/* Not before the run is set up, and not after its end. */
static void arm_fault(void *context, struct trainer *t)
{
    const struct fault *f = context;
    if (t->comm->rank == 0)
        f->arm(f->at);
    if (comm_barrier(t->comm) != ST_OK)
        comm_abort(t->comm, status_message());
}

/* If it is still to come, it comes within as many operations. */
static void disarm_fault(void *context, struct trainer *t)
{
    struct fault *f = context;
    if (comm_barrier(t->comm) != ST_OK)
        comm_abort(t->comm, status_message());
    if (t->comm->rank != 0)
        return;
    f->fired = true;
    for (int64_t i = 0; i < f->at && f->fired; i++)
        f->fired = !f->strikes();
    f->arm(0);
}

/* Every complete checkpoint there is can be read to the last byte; returns how many. */
static int count_valid(const struct run_config *c)
{
    char dir[1200];
    struct checkpoint_list list = {0};
    int valid = 0;
    snprintf(dir, sizeof dir, "%s/checkpoints", c->output.dir);
    assert_ok(checkpoint_list(&list, dir));
    for (int i = 0; i < list.count; i++) {
        struct checkpoint file = {0};
        assert_int_equal(list.entries[i].status, ST_OK);
        assert_ok(checkpoint_open(&file, list.entries[i].path));
        assert_ok(checkpoint_verify(&file, NULL, NULL));
        checkpoint_close(&file);
        valid++;
    }
    checkpoint_list_release(&list);
    return valid;
}

/* The k-th operation of two saves fails, for growing k until none does. */
static void fail_every(const char *name, struct fault f)
{
    int worst = 2, fired = 0;
    struct run_config plain = resume_tiny("plain", 2, 1, 2, 0);
    run_ok(&group.first, &plain, NULL);
    for (f.at = 1;; f.at += 1 + f.at / 8) {
        char out[64];
        snprintf(out, sizeof out, "%s-%d", name, (int)f.at);
        struct run_config c = resume_tiny(out, 2, 1, 2, 1);
        c.checkpoint.async = fired % 2 == 0;
        run_go(&group.other, &c,
               &(struct run_how){.at_start = arm_fault, .at_end = disarm_fault, .context = &f});
        if (group.other.st != ST_OK)
            fail_msg("%s ended the run: %s", out, group.other.message);
        run_same(&group.first, &group.other, "with a failed save");
        assert_true(saved_is_there(&c, 2)); /* at the end of a run it is tried again */
        int valid = count_valid(&c);
        worst = valid < worst ? valid : worst;
        run_release(&group.other);
        if (!f.fired) {
            assert_int_equal(valid, 2);
            break;
        }
        fired++;
    }
    print_message("%s: up to operation %d, %d failed; at worst %d of 2 checkpoints are there\n",
                  name, (int)f.at, fired, worst);
    assert_true(worst == 1 && fired > 10);
}

static void b69_a_failed_file_operation_costs_one_checkpoint_and_no_bit_of_training(void **state)
{
    (void)state;
    fail_every("fail-file", (struct fault){.arm = file_fail_at, .strikes = file_fault_due});
}

static void a_failed_allocation_costs_one_checkpoint_and_no_bit_of_training(void **state)
{
    (void)state;
    fail_every("fail-memory", (struct fault){.arm = mem_fail_at, .strikes = allocation_fails});
}

#define TEST(name) cmocka_unit_test_teardown(name, resume_release)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(b69_a_failed_file_operation_costs_one_checkpoint_and_no_bit_of_training),
        TEST(a_failed_allocation_costs_one_checkpoint_and_no_bit_of_training),
    };
    return cmocka_run_group_tests(tests, resume_set_up, run_tear_down);
}
