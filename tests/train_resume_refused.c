/* What is damaged, not there or of another run is said so, and nothing starts afresh in silence. */
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/train/checkpoint_state.h"
#include "tests/support/resume.h"

static void expect(const struct run_config *c, enum status st, const char *text, const char *also)
{
    run_go(&group.third, c, NULL);
    if (group.third.st != st || strstr(group.third.message, text) == NULL ||
        strstr(group.third.message, also) == NULL)
        fail_msg("%s: %s; expected %s, \"%s\", \"%s\"", status_name(group.third.st),
                 group.third.message, status_name(st), text, also);
    run_release(&group.third);
}

static void b74_what_is_not_there_is_an_error_and_never_a_fresh_state(void **state)
{
    (void)state;
    struct run_config c = resume_tiny("empty", 2, 1, 3, 0);
    resume_latest(&c);
    expect(&c, ST_INVALID, "empty/checkpoints", "no checkpoint to go on from");
    resume_from(&c, &c, 5);
    expect(&c, ST_IO, "step-00000005", "");
    c.checkpoint.resume[0] = '\0';
    c.checkpoint.resume_or_start = true;
    c.checkpoint.every = 2;
    run_ok(&group.first, &c, NULL);
    assert_int_equal(group.first.steps, 3);
    assert_true(saved_is_there(&c, 3));
    c.train.steps = 5;
    run_ok(&group.other, &c, NULL);
    assert_int_equal(group.other.steps, 2);
    c.checkpoint.resume_or_start = false;
    expect(&c, ST_INVALID, "earlier run", "--resume latest");
    assert_true(saved_is_there(&c, 5));
}

static void b23_another_run_is_refused_with_keys_and_both_values(void **state)
{
    (void)state;
    struct run_config saving = resume_tiny("refused", 2, 1, 2, 2),
                      c = resume_tiny("none", 2, 1, 4, 0);
    resume_from(&c, &saving, 2);
    run_ok(&group.first, &saving, NULL);
    struct run_config d = c;
    d.train.seed = 43;
    expect(&d, ST_INVALID, "train.seed is \"42\" there and \"43\" here", "another run");
    d = c;
    d.data.max_length = 60;
    expect(&d, ST_INVALID, "data.max_length is \"64\" there and \"60\" here", "");
    d = c;
    d.model.ffn = 48;
    expect(&d, ST_INVALID, "model.ffn is \"40\" there and \"48\" here", "");
    d = c;
    d.train.micro_batch = 4;
    expect(&d, ST_INVALID, "global batch", "is \"12\" there and \"16\" here");
    d = c;
    scratch_path(&group.scratch, d.data.train, "eval.json");
    expect(&d, ST_INVALID, "the content of data.train", "number of windows");
    d = c; /* rates, lengths and the like are free */
    d.optim.lr = 5e-4;
    d.train.epochs = 7;
    d.train.recompute = RECOMPUTE_BLOCK;
    run_ok(&group.third, &d, NULL);
    assert_int_equal(group.third.steps, 2);
}

/* What is wrong with the training state without one of its parts, or with one of another kind. */
static char accepted[64];

static void spoil_components(void *context, struct trainer *t)
{
    static const char *const keys[] = {"step",
                                       "t",
                                       "seed",
                                       "train_count",
                                       "train_hash",
                                       "vocab_hash",
                                       "best",
                                       "global_batch",
                                       "skipped_in_row",
                                       "best_metric",
                                       "config",
                                       "evaluations_without_gain",
                                       "evaluation_pending"};
    struct training_state state = {.step = 2, .t = 2, .best_step = 1}, back;
    json_t *whole = NULL;
    (void)context;
    if (t->comm->rank != 0)
        return;
    if (training_state_write(&whole, &state, t) != ST_OK ||
        training_state_read(&back, whole, t, "here") != ST_OK || back.best_step != 1)
        snprintf(accepted, sizeof accepted, "not even the whole");
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        for (int kind = 0; kind < 2; kind++) {
            json_t *part = json_copy(whole);
            if (kind == 0)
                json_object_del(part, keys[i]);
            else
                json_object_set_new(part, keys[i], json_array());
            if (training_state_read(&back, part, t, "here") != ST_CORRUPT ||
                strstr(status_message(), keys[i]) == NULL)
                snprintf(accepted, sizeof accepted, "%s", keys[i]);
            json_decref(part);
        }
    json_decref(whole);
}

static void b02_b14_every_component_of_the_training_state_is_needed(void **state)
{
    (void)state;
    struct run_config c = resume_tiny("none", 2, 1, 1, 0);
    accepted[0] = '\0';
    run_ok(&group.first, &c, &(struct run_how){.at_end = spoil_components});
    assert_string_equal(accepted, "");
}

/* ---- damage ---------------------------------------------------------------------------------- */

static void flip_byte(const char *folder, const char *name, int64_t from_middle)
{
    char path[1400];
    struct stat info;
    uint8_t byte;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0 && fstat(fd, &info) == 0);
    off_t at = info.st_size / 2 + from_middle;
    assert_int_equal(pread(fd, &byte, 1, at), 1);
    byte ^= 0x10;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

static void b74_a_damaged_latest_is_passed_over_and_a_damaged_folder_refused(void **state)
{
    (void)state;
    static const char *const names[] = {"data-00001.tsr", "manifest.json"};
    for (int i = 0; i < 2; i++) {
        char folder[1200];
        struct run_config c = resume_tiny(i == 0 ? "flip-data" : "flip-manifest", 2, 2, 6, 3), d;
        run_ok(&group.first, &c, NULL);
        saved_folder(&c, folder, 6);
        flip_byte(folder, names[i], i == 0 ? -2000 : 0);
        d = c;
        d.checkpoint.every = 0;
        resume_from(&d, &c, 6);
        expect(&d, ST_CORRUPT, "step-00000006", "");
        resume_latest(&c);
        c.train.steps = 7;
        run_ok(&group.other, &c, NULL);
        assert_int_equal(group.other.steps, 4); /* from step 3 */
        for (int s = 0; s < 3; s++)
            assert_true(group.other.step[0][s].loss == group.first.step[0][3 + s].loss);
        assert_true(saved_is_there(&c, 7));
        resume_release(NULL);
    }
}

static void with_all_checkpoints_damaged_there_is_no_fresh_start(void **state)
{
    (void)state;
    char folder[1200];
    struct run_config c = resume_tiny("flip-all", 2, 2, 2, 2);
    run_ok(&group.first, &c, NULL);
    saved_folder(&c, folder, 2);
    flip_byte(folder, "data-00000.tsr", 0);
    c.checkpoint.resume_or_start = true;
    expect(&c, ST_CORRUPT, "damaged", "flip-all");
    flip_byte(folder, "manifest.json", 0);
    expect(&c, ST_CORRUPT, "damaged", "flip-all");
}

#define TEST(name) cmocka_unit_test_teardown(name, resume_release)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(b74_what_is_not_there_is_an_error_and_never_a_fresh_state),
        TEST(b23_another_run_is_refused_with_keys_and_both_values),
        TEST(b02_b14_every_component_of_the_training_state_is_needed),
        TEST(b74_a_damaged_latest_is_passed_over_and_a_damaged_folder_refused),
        TEST(with_all_checkpoints_damaged_there_is_no_fresh_start),
    };
    return cmocka_run_group_tests(tests, resume_set_up, run_tear_down);
}
