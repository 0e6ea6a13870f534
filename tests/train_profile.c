/*
 * Profiles op by op (engine/train/op_profile.h): that they count what the program and the model
 * imply, and change nothing.
 */
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "engine/train/op_profile.h"
#include "tests/support/run.h"

enum { STEPS = 6, PROFILED = 3 };

static struct scratch scratch;
static struct run_trace plain, profiled;

/* What each rank's profile holds when training is over, and what its program has. */
static struct told {
    int64_t ask; /* profiled steps */
    struct op_profile profile[RUN_RANKS];
    int instrs[RUN_RANKS][PROGRAM_OPS];
    int layers, table_parts;
} told;

static int set_up(void **state)
{
    static const struct made_questions train = {
        .count = 40, .min_words = 5, .max_words = 90, .question_words = 4, .seed = 21};
    return run_set_up(state, &scratch, &train, NULL);
}

static int tear_down(void **state)
{
    run_release(&plain);
    run_release(&profiled);
    return run_tear_down(state);
}

static void ask(void *context, struct trainer *t)
{
    (void)context;
    const struct program *p = &t->plan.programs[PROGRAM_STEP];
    int *instrs = told.instrs[t->comm->rank];
    memset(instrs, 0, sizeof told.instrs[0]);
    for (int i = 0; i < p->instr_count; i++)
        instrs[p->instrs[i].op]++;
    if (t->comm->rank == 0) {
        told.layers = (int)t->setup.model.dims.layers;
        told.table_parts = t->setup.model.unit_count - told.layers - 2; /* norm, head */
    }
    if (trainer_profile(t, told.ask) != ST_OK)
        comm_abort(t->comm, status_message());
}

static void keep(void *context, struct trainer *t)
{
    (void)context;
    told.profile[t->comm->rank] = *t->profile;
}

static struct run_config tiny(int ranks, int stage, int64_t accum)
{
    struct run_config c = run_tiny_with(
        &scratch,
        (struct tiny_run){.ranks = ranks, .stage = stage, .accum = accum, .steps = STEPS});
    c.eval.every = -1;
    return c;
}

static void profile(const struct run_config *c, int64_t steps)
{
    told.ask = steps;
    run_release(&profiled);
    run_ok(&profiled, c, &(struct run_how){.at_start = ask, .at_end = keep});
}

static int64_t calls(int rank, enum op_kind kind)
{
    return told.profile[rank].sums[kind].calls;
}

static void calls_are_what_model_and_program_imply(void **state)
{
    (void)state;
    for (int stage = 0; stage <= 3; stage++)
        for (int accum = 1; accum <= 2; accum++) {
            struct run_config c = tiny(2, stage, accum);
            profile(&c, PROFILED);
            int64_t n = PROFILED, micro = n * accum, blocks = micro * told.layers;
            for (int r = 0; r < 2; r++) {
                const int *instrs = told.instrs[r];
                assert_int_equal(told.profile[r].steps, PROFILED);
                assert_int_equal(told.profile[r].first_step, 2);
                assert_int_equal(calls(r, KIND_embedding_forward), micro * told.table_parts);
                assert_int_equal(calls(r, KIND_embedding_backward), micro * told.table_parts);
                assert_int_equal(calls(r, KIND_embedding_norm_forward), micro);
                assert_int_equal(calls(r, KIND_embedding_norm_backward), micro);
                assert_int_equal(calls(r, KIND_linear_forward), 4 * blocks);
                assert_int_equal(calls(r, KIND_linear_backward_data), 4 * blocks);
                assert_int_equal(calls(r, KIND_linear_backward_weight), 4 * blocks);
                assert_int_equal(calls(r, KIND_attention_forward), blocks);
                assert_int_equal(calls(r, KIND_attention_backward), blocks);
                assert_int_equal(calls(r, KIND_gelu_forward), blocks);
                assert_int_equal(calls(r, KIND_gelu_backward), blocks);
                assert_int_equal(calls(r, KIND_residual_norm_forward), 2 * blocks);
                assert_int_equal(calls(r, KIND_residual_norm_backward), 2 * blocks);
                assert_int_equal(calls(r, KIND_span_logits_forward), micro);
                assert_int_equal(calls(r, KIND_span_logits_backward), micro);
                assert_int_equal(calls(r, KIND_span_loss), micro);
                assert_int_equal(calls(r, KIND_accumulate), n * instrs[OP_ACCUMULATE]);
                assert_int_equal(calls(r, KIND_squared_norm), n * instrs[OP_NORM]);
                assert_int_equal(calls(r, KIND_adamw), n * instrs[OP_UPDATE]);
                assert_int_equal(calls(r, KIND_agree), n * instrs[OP_AGREE]);
                assert_int_equal(calls(r, KIND_step_begin), n * instrs[OP_BEGIN]);
                assert_int_equal(calls(r, KIND_cast), 0);
            }
        }
}

/* What a recomputed block runs again shows as calls, and is no work of the model. */
static void recomputed_blocks_are_counted_as_often_as_they_run(void **state)
{
    (void)state;
    struct run_config c = tiny(1, 0, 1);
    c.train.recompute = RECOMPUTE_BLOCK;
    profile(&c, PROFILED);
    assert_int_equal(calls(0, KIND_attention_forward),
                     (int64_t)PROFILED * (told.layers + told.instrs[0][OP_RECOMPUTE]));
    assert_true(told.instrs[0][OP_RECOMPUTE] > 0);
}

static void flops_add_up_to_those_of_mfu_and_times_to_less_than_the_steps(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 3; ranks += 2)
        for (int accum = 1; accum <= 2; accum++) {
            struct run_config c = tiny(ranks, 3, accum);
            profile(&c, PROFILED);
            for (int r = 0; r < ranks; r++) {
                const struct op_profile *p = &told.profile[r];
                double flops = 0, ms = 0;
                for (int k = 0; k < OP_KIND_COUNT; k++) {
                    flops += p->sums[k].flops;
                    ms += p->sums[k].ms;
                    assert_true(p->sums[k].calls == 0 || p->sums[k].bytes > 0);
                    assert_true(p->sums[k].ms >= 0 && p->sums[k].floor_ms >= 0);
                }
                assert_true(p->model_flops > 0);
                assert_true(flops == p->model_flops); /* whole numbers below 2^53 */
                assert_true(ms > 0 && ms <= p->step_ms);
                assert_true(p->peak > 0 && p->bandwidth > 0);
            }
        }
}

/* A late update is done before an evaluation; the next step has it in vain. */
static void an_update_that_was_done_before_an_evaluation_moves_no_bytes(void **state)
{
    (void)state;
    for (int late = 0; late <= 1; late++) {
        double bytes[3] = {0}; /* of the step behind an evaluation, the one before, both */
        for (int i = 0; i < 3; i++) {
            struct run_config c = tiny(1, 0, 1);
            c.train.update = late ? UPDATE_LATE : UPDATE_EARLY;
            c.eval.train_samples = 2;
            c.eval.every = i == 1 ? 3 : 2;
            profile(&c, i == 2 ? 2 : 1);
            assert_int_equal(calls(0, KIND_adamw), (i == 2 ? 2 : 1) * told.instrs[0][OP_UPDATE]);
            bytes[i] = told.profile[0].sums[KIND_adamw].bytes;
        }
        assert_true(bytes[1] > 0);
        assert_true(bytes[0] == (late ? 0 : bytes[1]));
        assert_true(bytes[2] == bytes[0] + bytes[1]);
    }
}

static void a_profiled_run_has_the_bits_of_another(void **state)
{
    (void)state;
    struct run_config c = tiny(2, 3, 2);
    run_release(&plain);
    run_ok(&plain, &c, &(struct run_how){0});
    profile(&c, PROFILED);
    run_same(&plain, &profiled, "profiled");
}

static void more_steps_than_there_are_profile_all(void **state)
{
    (void)state;
    struct run_config c = tiny(1, 0, 1);
    profile(&c, 100);
    assert_int_equal(told.profile[0].steps, STEPS);
    assert_int_equal(told.profile[0].first_step, 0);
    profile(&c, STEPS - 1);
    assert_int_equal(told.profile[0].steps, STEPS - 1);
    assert_int_equal(told.profile[0].first_step, 1);
}

static void without_steps_there_is_nothing_to_profile(void **state)
{
    (void)state;
    struct run_config c = tiny(1, 0, 1);
    c.train.steps = 0;
    told.ask = 1;
    run_release(&profiled);
    run_go(&profiled, &c, &(struct run_how){.at_start = ask});
    assert_int_not_equal(profiled.st, ST_OK);
    assert_non_null(strstr(profiled.message, "--profile: this run has no training steps"));
}

static void the_file_holds_what_was_measured(void **state)
{
    (void)state;
    char path[512];
    json_error_t error;
    struct run_config c = tiny(1, 0, 1);
    profile(&c, PROFILED);
    /* The lists that it held are gone; its sums are here. */
    assert_ok(op_profile_write(&told.profile[0], scratch_path(&scratch, path, "profile.json")));
    json_t *root = json_load_file(path, 0, &error);
    if (root == NULL)
        fail_msg("%s: %s", path, error.text);
    assert_int_equal(json_integer_value(json_object_get(root, "steps")), PROFILED);
    assert_int_equal(json_integer_value(json_object_get(root, "first_step")), 3);
    const json_t *ops = json_object_get(root, "ops"), *op = NULL;
    size_t i;
    double last = 1e300;
    int64_t found = 0, want = 0;
    json_array_foreach(ops, i, op)
    {
        double ms = json_number_value(json_object_get(op, "ms"));
        assert_true(ms <= last); /* the longest first */
        last = ms;
        found += json_integer_value(json_object_get(op, "calls"));
    }
    for (int k = 0; k < OP_KIND_COUNT; k++)
        want += told.profile[0].sums[k].calls;
    assert_true(found == want && want > 0);
    json_decref(root);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(calls_are_what_model_and_program_imply),
        cmocka_unit_test(recomputed_blocks_are_counted_as_often_as_they_run),
        cmocka_unit_test(flops_add_up_to_those_of_mfu_and_times_to_less_than_the_steps),
        cmocka_unit_test(an_update_that_was_done_before_an_evaluation_moves_no_bytes),
        cmocka_unit_test(a_profiled_run_has_the_bits_of_another),
        cmocka_unit_test(more_steps_than_there_are_profile_all),
        cmocka_unit_test(without_steps_there_is_nothing_to_profile),
        cmocka_unit_test(the_file_holds_what_was_measured),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
