/*
 * Training gives the same bits however it is sharded and scheduled: stages, overlap, prefetch,
 * recompute, reduce policy, a slow rank; and what is not promised to the bit stays close.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tests/support/run.h"

#ifdef __SANITIZE_THREAD__
enum { REDUCED = 1 }; /* ten times slower: fewer combinations, each kind still there */
#else
enum { REDUCED = 0 };
#endif

static struct scratch scratch;
static struct run_trace first, other;

static int make_data(void **state)
{
    struct made_questions train = {40, 5, 90, 4, .impossible_every = 5, .seed = 7};
    return run_set_up(state, &scratch, &train, NULL);
}

static int release_traces(void **state)
{
    (void)state;
    run_release(&first);
    run_release(&other);
    return 0;
}

static struct run_config tiny(int ranks, int stage, int64_t accum, int64_t steps)
{
    struct tiny_run with = {ranks, stage, accum, steps, .reduce = REDUCE_PER_MICRO_BATCH};
    struct run_config c = run_tiny_with(&scratch, with);
    /* The batches have more rows than the table, so by itself it would be reduced whole. */
    c.train.tables = ranks % 2 == 0 ? TABLES_ROWS : TABLES_WHOLE;
    return c;
}

/* Run and compare with @first to the bit. */
static void run_and_compare(const struct run_config *c, const struct run_how *how, const char *what)
{
    run_ok(&other, c, how);
    run_same(&first, &other, what);
    run_release(&other);
}

/* ---- stages ---- */

static void compare_stages(int ranks, int64_t accum, const struct run_config *change)
{
    for (int stage = 0; stage < 4; stage++) {
        char what[64];
        struct run_config c = tiny(ranks, stage, accum, 3);
        snprintf(what, sizeof what, "%d ranks, accumulation %d, stages 0 and %d", ranks, (int)accum,
                 stage);
        if (change != NULL) {
            c = *change;
            c.train.zero_stage = stage;
        }
        if (stage == 0)
            run_ok(&first, &c, NULL);
        else
            run_and_compare(&c, NULL, what);
    }
    assert_int_equal(first.steps, 3);
    run_release(&first);
}

static void stages_are_bit_equal_on_1_to_4_ranks(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 4; ranks++)
        if (!REDUCED || ranks == 3)
            compare_stages(ranks, 1, NULL);
}

/* A third of a table begins and ends within a row. */
static void stages_are_bit_equal_with_tables_by_rows_on_3_ranks(void **state)
{
    (void)state;
    for (int64_t accum = 1; accum <= 2; accum++) {
        struct run_config c = tiny(3, 0, accum, 3);
        c.train.tables = TABLES_ROWS;
        compare_stages(3, accum, &c);
        c.train.max_unit_numel = 1 << 20; /* in one part */
        compare_stages(3, accum, &c);
    }
}

static void b49_stages_are_bit_equal_with_accumulation(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 4; ranks++) {
        if (REDUCED && ranks != 2)
            continue;
        compare_stages(ranks, 2, NULL);
        compare_stages(ranks, 5, NULL);
    }
}

static void b49_overlap_and_accumulation_change_no_bit(void **state)
{
    (void)state;
    for (int64_t accum = 1; accum <= 5; accum += accum == 1 ? 1 : 3)
        for (int stage = 0; stage < 4; stage++) {
            struct run_config c = tiny(2, stage, accum, 3);
            run_ok(&first, &c, NULL);
            c.train.overlap = false;
            run_and_compare(&c, NULL, "overlap off");
            run_release(&first);
        }
}

static void reducing_once_a_step_is_bit_equal_at_stages_0_and_1(void **state)
{
    (void)state;
    for (int ranks = 2; ranks <= 3; ranks++) {
        struct run_config c = tiny(ranks, 0, 3, 3);
        c.train.reduce = REDUCE_PER_STEP;
        run_ok(&first, &c, NULL);
        c.train.zero_stage = 1;
        run_and_compare(&c, NULL, "per step, stages 0 and 1");
        c.train.reduce = REDUCE_PER_MICRO_BATCH;
        run_ok(&other, &c, NULL);
        run_close(&first, &other, 1e-5, 1e-6, "per step and per micro-batch");
        run_release(&first);
        run_release(&other);
    }
}

/* Of tables. */
static int64_t count_collectives(const struct trainer *t, enum program_op op, unsigned flags)
{
    const struct program *p = &t->plan.programs[PROGRAM_STEP];
    int64_t n = 0;
    for (int i = 0; i < p->instr_count; i++)
        n += p->instrs[i].op == op && p->instrs[i].flags == flags &&
             t->setup.model.units[p->instrs[i].unit].look_up;
    return n;
}

/* Collectives of a step that are about tables: of rows of gradients, and of the table; and those of
 * whole gradients and tables. */
struct table_collectives {
    int64_t rows, looked_up, whole;
};

static void count_table_collectives(void *context, struct trainer *t)
{
    struct table_collectives *of = context;
    if (t->comm->rank == 0)
        *of = (struct table_collectives){
            count_collectives(t, OP_GATHER, FLAG_ROWS), count_collectives(t, OP_REDUCE, FLAG_ROWS),
            count_collectives(t, OP_REDUCE, 0) + count_collectives(t, OP_GATHER, 0) +
                count_collectives(t, OP_GATHER, FLAG_GRADIENT)};
}

/* The sum over ranks has another order than that of whole gradients, and no more. */
static void tables_by_rows_are_close_to_whole_ones(void **state)
{
    (void)state;
    for (int ranks = 2; ranks <= 4; ranks++)
        for (int accum = 1; accum <= 2; accum++) {
            int stage = (ranks + accum) % 4;
            struct run_config c = tiny(ranks, stage, accum, 6);
            c.optim.max_grad_norm = 0.5; /* clips */
            struct table_collectives whole, rows;
            c.train.tables = TABLES_AUTO; /* there are more rows than the table has */
            run_ok(&first, &c,
                   &(struct run_how){.at_start = count_table_collectives, .context = &whole});
            c.train.tables = TABLES_ROWS;
            run_ok(&other, &c,
                   &(struct run_how){.at_start = count_table_collectives, .context = &rows});
            assert_true(rows.rows == accum && rows.whole == 0);
            assert_true(rows.looked_up == (stage > 0 ? accum : 0));
            assert_true(whole.rows == 0 && whole.looked_up == 0 && whole.whole > 0);
            run_close(&first, &other, 1e-5, 1e-6, "tables by rows and whole");
            for (int i = 0; i < 6; i++) {
                double a = first.step[0][i].grad_norm, b = other.step[0][i].grad_norm;
                assert_true(fabs(a - b) <= 1e-5 * a);
            }
            assert_true(first.step[0][0].loss == other.step[0][0].loss);
            run_release(&first);
            run_release(&other);
        }
}

static void reducing_once_a_step_is_refused_at_stage_2(void **state)
{
    (void)state;
    struct run_config c = tiny(2, 2, 2, 1);
    c.train.reduce = REDUCE_PER_STEP;
    run_go(&first, &c, NULL);
    assert_int_equal(first.st, ST_INVALID);
    assert_non_null(strstr(first.message, "train.reduce"));
}

/* With dropout before the head: its mask is made again in BACKWARD. */
static void distilbert_is_bit_equal_at_all_stages_and_recomputed(void **state)
{
    (void)state;
    struct run_config c = tiny(3, 0, 2, 3);
    c.model.family = FAMILY_DISTILBERT;
    c.model.qa_dropout = 0.1;
    compare_stages(3, 2, &c);
    run_ok(&first, &c, NULL);
    c.train.zero_stage = 3;
    c.train.recompute = RECOMPUTE_BLOCK;
    run_and_compare(&c, &(struct run_how){.executor = {.poison = true}}, "DistilBERT, recomputed");
    c.model.qa_dropout = 0.0;
    run_ok(&other, &c, NULL);
    assert_true(first.step[0][0].loss != other.step[0][0].loss);
}

/* ---- schedules of the same arithmetic ---- */

static void prefetch_depth_changes_no_bit(void **state)
{
    (void)state;
    static const int depths[] = {0, 2, 5, 64};
    for (int way = 0; way < 4; way++) {
        struct run_config c = tiny(3, 3, 2, 3);
        c.train.prefetch = 1;
        c.train.tables = way % 2 ? TABLES_ROWS : TABLES_WHOLE;
        c.train.update = way / 2 ? UPDATE_EARLY : UPDATE_LATE;
        run_ok(&first, &c, NULL);
        for (size_t i = 0; i < sizeof depths / sizeof *depths; i++) {
            char what[64];
            c.train.prefetch = depths[i];
            snprintf(what, sizeof what, "prefetch %d, way %d", depths[i], way);
            run_and_compare(&c, NULL, what);
        }
        run_release(&first);
    }
}

/* Weights and moments at the end too: the last update is due when training ends. */
static void late_and_early_updates_are_bit_equal(void **state)
{
    (void)state;
    static const int depths[] = {1, 0, 5};
    for (int stage = 0; stage < 4; stage++)
        for (int variant = 0; variant < 3; variant++) {
            struct run_config c = tiny(1 + variant, stage, 1 + (variant + stage) % 3, 4);
            c.train.prefetch = depths[variant];
            c.train.recompute = variant == 2 ? RECOMPUTE_BLOCK : RECOMPUTE_NONE;
            if (stage < 2)
                c.train.reduce = variant == 1 ? REDUCE_PER_STEP : REDUCE_PER_MICRO_BATCH;
            c.train.update = UPDATE_EARLY;
            run_ok(&first, &c, NULL);
            for (int overlap = 0; overlap < 2; overlap++) {
                c.train.update = UPDATE_LATE;
                c.train.overlap = overlap;
                run_and_compare(&c, &(struct run_how){.executor = {.poison = overlap}},
                                "late and early");
            }
            run_release(&first);
        }
}

static void recompute_changes_no_bit(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage++) {
        struct run_config c = tiny(2, stage, 2, 3);
        run_ok(&first, &c, NULL);
        assert_int_equal(c.train.recompute, RECOMPUTE_GELU);
        c.train.recompute = RECOMPUTE_BLOCK;
        run_and_compare(&c, NULL, "recompute");
        c.train.recompute = RECOMPUTE_NONE;
        run_and_compare(&c, &(struct run_how){.executor = {.poison = true}}, "all kept");
        run_release(&first);
    }
}

static void b53_two_runs_are_bit_identical(void **state)
{
    (void)state;
    struct run_config c = tiny(4, 2, 2, 4);
    run_ok(&first, &c, NULL);
    run_and_compare(&c, NULL, "the same run again");
}

static void b58_a_slow_rank_changes_no_bit(void **state)
{
    (void)state;
    for (int stage = 2; stage < 4; stage++)
        for (int slow = 0; slow < 3; slow++) {
            struct run_config c = tiny(3, stage, 2, 2);
            struct fault_plan faults[RUN_RANKS] = {{FAULT_NONE, 0, 0}};
            faults[slow] = (struct fault_plan){FAULT_DELAY, 0, 1};
            run_ok(&first, &c, NULL);
            run_and_compare(&c, &(struct run_how){.faults = faults}, "slow rank");
            run_release(&first);
        }
}

static void the_poisoned_arena_changes_no_bit_and_no_stage(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage++) {
        struct run_config c = tiny(2, stage, 2, 3);
        run_ok(&first, &c, NULL);
        run_and_compare(&c, &(struct run_how){.executor = {.poison = true}}, "poison");
        run_release(&first);
    }
}

/* ---- frozen parameters and split tables ---- */

static void frozen_parameters_stay_and_stages_are_bit_equal(void **state)
{
    (void)state;
    struct run_config c = tiny(3, 0, 2, 3), untrained = tiny(3, 0, 2, 0);
    snprintf(c.train.freeze, sizeof c.train.freeze,
             "bert.embeddings,bert.encoder.layer.0,bert.encoder.layer.1.output.dense");
    compare_stages(3, 2, &c);
    run_ok(&first, &untrained, NULL);
    run_ok(&other, &c, NULL);
    int frozen = 0, moved = 0;
    for (int u = 0; u < other.unit_count; u++) {
        bool same = memcmp(first.unit[u].master, other.unit[u].master,
                           sizeof(float) * (size_t)other.unit[u].numel) == 0;
        assert_int_equal(same, other.unit[u].m == NULL);
        frozen += same;
        moved += !same;
    }
    assert_int_equal(frozen, other.unit_count - 3); /* left: two blocks and the head */
    assert_int_equal(moved, 3);
}

/* A frozen part is looked up by rows as the others are, and its BACKWARD makes nothing. */
static void a_frozen_part_of_a_table_by_rows_changes_no_bit_between_stages(void **state)
{
    (void)state;
    for (int part = 0; part < 3; part++) {
        struct run_config c = tiny(3, 0, 2, 3);
        c.train.tables = TABLES_ROWS;
        snprintf(c.train.freeze, sizeof c.train.freeze, "bert.embeddings.word_embeddings.weight.%d",
                 part);
        compare_stages(3, 2, &c);
        run_ok(&first, &c, NULL);
        assert_true(first.unit[part].m == NULL && first.unit[(part + 1) % 3].m != NULL);
        run_release(&first);
    }
}

/* Which unit a row belongs to changes no value; only the norm's sum has another order. */
static void split_tables_change_no_loss(void **state)
{
    (void)state;
    struct run_config c = tiny(2, 3, 1, 4);
    c.optim.max_grad_norm = 0;
    run_ok(&first, &c, NULL);
    c.train.max_unit_numel = 1 << 20;
    run_ok(&other, &c, NULL);
    assert_true(other.unit_count < first.unit_count);
    assert_int_equal(first.steps, 4);
    for (int i = 0; i < first.steps; i++) {
        double a = first.step[0][i].grad_norm, b = other.step[0][i].grad_norm;
        assert_true(first.step[0][i].loss == other.step[0][i].loss);
        assert_true(fabs(a - b) <= 1e-6 * a);
    }
}

/* ---- counts, rates, norms ---- */

/* Five samples in one step, dealt in five ways: one mean, not a mean of means. */
static void b50_an_uneven_batch_is_divided_by_its_own_count(void **state)
{
    (void)state;
    static const int ways[][3] = {{1, 5, 1}, {1, 3, 2}, {2, 3, 1}, {3, 2, 1}, {5, 1, 1}, {8, 1, 1}};
    run_make_data(
        &scratch, "five.json",
        (struct made_questions){
            .count = 5, .min_words = 10, .max_words = 50, .question_words = 4, .seed = 3});
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        struct run_config c = tiny(ways[i][0], 2, ways[i][2], -1);
        c.train.micro_batch = ways[i][1];
        scratch_path(&scratch, c.data.train, "five.json");
        run_ok(i == 0 ? &first : &other, &c, NULL);
        const struct run_trace *trace = i == 0 ? &first : &other;
        assert_int_equal(trace->steps, 1);
        assert_int_equal(trace->step[0][0].sequences, 5);
        double loss = first.step[0][0].loss, norm = first.step[0][0].grad_norm;
        assert_true(fabs(trace->step[0][0].loss - loss) < 1e-6 * loss);
        assert_true(fabs(trace->step[0][0].grad_norm - norm) < 1e-4 * norm);
        run_release(&other);
    }
}

static void an_epoch_ends_with_a_short_step(void **state)
{
    (void)state;
    struct run_config c = tiny(2, 1, 2, -1);
    run_ok(&first, &c, NULL);
    int64_t sum = 0;
    for (int i = 0; i < first.steps; i++)
        sum += first.step[0][i].sequences;
    int last = first.steps - 1;
    assert_int_equal(first.step[0][0].sequences, 12);
    assert_true(first.step[0][last].sequences < 12);
    assert_true(sum > 40); /* questions; some have two windows */
    assert_int_equal(sum, 12 * last + first.step[0][last].sequences);
}

static void b52_the_learning_rate_does_not_depend_on_the_world_size(void **state)
{
    (void)state;
    static const int worlds[] = {2, 8};
    static const enum schedule_kind schedules[] = {SCHEDULE_LINEAR, SCHEDULE_COSINE,
                                                   SCHEDULE_CONSTANT};
    for (int s = 0; s < 3; s++) {
        struct run_config c = tiny(1, 0, 1, 7);
        c.optim.schedule = schedules[s];
        run_ok(&first, &c, NULL);
        assert_true(first.step[0][0].lr == 0 && first.step[0][1].lr > 0); /* warm-up */
        for (int w = 0; w < 2; w++) {
            c.train.ranks = worlds[w];
            run_ok(&other, &c, NULL);
            assert_int_equal(other.steps, 7);
            for (int i = 0; i < 7; i++)
                assert_true(first.step[0][i].lr == other.step[0][i].lr);
            run_release(&other);
        }
        run_release(&first);
    }
}

static void b38_the_norm_is_that_of_the_gathered_gradients(void **state)
{
    (void)state;
    double norms[3] = {0};
    for (int stage = 0; stage < 4; stage++) {
        struct run_config c = tiny(3, stage, 2, 3);
        c.optim.max_grad_norm = 0.5; /* clips */
        run_ok(&first, &c, &(struct run_how){.gradient_norms = true});
        for (int i = 0; i < 3; i++) {
            double got = first.step[0][i].grad_norm, want = sqrt(first.squared_norm[i]);
            assert_true(want > 0.5 && fabs(got - want) <= 1e-6 * want);
            if (stage > 0)
                assert_true(got == norms[i]);
            norms[i] = got;
        }
        run_release(&first);
    }
}

static void b40_all_ranks_have_the_same_result(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage++) {
        struct run_config c = tiny(4, stage, 2, 3);
        run_ok(&first, &c, NULL);
        for (int r = 1; r < 4; r++)
            for (int i = 0; i < 3; i++) {
                const struct step_state *a = &first.step[0][i], *b = &first.step[r][i];
                assert_true(a->loss == b->loss && a->grad_norm == b->grad_norm && a->lr == b->lr);
                assert_true(a->clip == b->clip && a->t == b->t && a->sequences == b->sequences);
                assert_true(a->tokens == b->tokens && a->tokens > a->host.tokens);
                assert_int_equal(b->agreed, 1);
            }
        run_release(&first);
    }
}

/* ---- not finite ---- */

/* Spoil a gradient of rank 1 in step 2, behind BACKWARD and before REDUCE. */
static void spoil_step_2(void *context, const struct program *p, int index,
                         const size_t live[CATEGORY_COUNT])
{
    const struct trainer *t = context;
    const struct instr *in = &p->instrs[index];
    const struct operand *o = program_operand(in, ROLE_GRAD);
    (void)live;
    const struct step_state *s = executor_shared(&t->executor, SHARED_STATE);
    if (p->kind != PROGRAM_STEP || in->op != OP_BACKWARD || o == NULL || in->unit != 5 ||
        t->comm->rank != 1 || s->host.step != 2)
        return;
    float *grad = (float *)(void *)(t->executor.arena + p->buffers[o->buffer].offset);
    grad[3] = INFINITY;
}

static void b43_one_rank_with_an_inf_makes_all_skip_that_step(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage++) {
        struct run_config c = tiny(3, stage, 2, 5);
        run_ok(stage == 0 ? &first : &other, &c,
               &(struct run_how){.executor = {.on_instr = spoil_step_2}});
        const struct run_trace *trace = stage == 0 ? &first : &other;
        for (int r = 0; r < 3; r++)
            for (int i = 0; i < 5; i++) {
                assert_int_equal(trace->step[r][i].skip, i == 2);
                assert_int_equal(trace->step[r][i].t, i < 2 ? i + 1 : i);
            }
        if (stage > 0)
            run_same(&first, &other, "with a skipped step");
        run_release(&other);
    }
    /* The step that was left out did nothing: its weights are those of step 1. */
    struct run_config c = tiny(3, 1, 2, 5);
    run_ok(&other, &c, NULL);
    assert_true(first.step[0][3].lr == other.step[0][2].lr);
}

static void spoil_weights(void *context, struct trainer *t)
{
    (void)context;
    struct shard_view view = executor_shard(&t->executor, 4);
    if (t->comm->rank == 1)
        view.master[7] = NAN;
}

static void b44_steps_that_are_never_finite_end_the_run_on_all_ranks(void **state)
{
    (void)state;
    for (int stage = 0; stage < 4; stage += 3) {
        struct run_config c = tiny(3, stage, 1, 60);
        run_go(&first, &c, &(struct run_how){.at_start = spoil_weights});
        assert_int_equal(first.st, ST_INVALID);
        assert_non_null(strstr(first.message, "not finite"));
        for (int r = 0; r < 3; r++) {
            assert_in_range(first.seen[r], NON_FINITE_LIMIT, NON_FINITE_LIMIT + 1);
            for (int i = 0; i < NON_FINITE_LIMIT; i++) {
                assert_int_equal(first.step[r][i].skip, 1);
                assert_int_equal(first.step[r][i].t, 0);
            }
        }
        run_release(&first);
    }
}

/* ---- close, not equal ---- */

static void world_sizes_stay_close_for_one_global_batch(void **state)
{
    (void)state;
    static const int ways[][3] = {{1, 12, 1}, {1, 4, 3}, {2, 6, 1},
                                  {3, 4, 1},  {4, 3, 1}, {2, 3, 2}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        struct run_config c = tiny(ways[i][0], (int)(i % 4), ways[i][2], 4);
        c.train.micro_batch = ways[i][1];
        run_ok(i == 0 ? &first : &other, &c, NULL);
        if (i > 0)
            run_close(&first, &other, 1e-4, 1e-5, "another world size");
        run_release(&other);
    }
}

static void run_padded(int words)
{
    run_make_data(
        &scratch, "lengths.json",
        (struct made_questions){
            .count = 40, .min_words = words, .max_words = 57, .question_words = 4, .seed = 1});
    struct run_config c = tiny(2, 3, 2, 4);
    scratch_path(&scratch, c.data.train, "lengths.json");
    run_ok(&first, &c, NULL);
    c.data.padded = true;
    run_ok(&other, &c, NULL);
}

/* 57 + 4 + 3 = max_length: no row is padding, and the batches are the same. */
static void packed_and_padded_are_close_where_nothing_is_padding(void **state)
{
    (void)state;
    run_padded(57);
    run_close(&first, &other, 1e-6, 1e-7, "packed and padded");
}

/* The reference models count padding among the places where an answer may be (engine/ops/span.h);
 * with nearly uniform logits the loss is the logarithm of the places. */
static void padding_counts_as_places_for_an_answer(void **state)
{
    (void)state;
    run_padded(9);
    double more = other.step[0][0].loss - first.step[0][0].loss;
    assert_true(more > 0.1 && more < log(64.0 / 16.0));
}

#define TEST(name) cmocka_unit_test_teardown(name, release_traces)

int main(void)
{
    /* First those with the most to find for a thread sanitizer, which runs no others. */
    const struct CMUnitTest tests[] = {
        TEST(stages_are_bit_equal_on_1_to_4_ranks),
        TEST(stages_are_bit_equal_with_tables_by_rows_on_3_ranks),
        TEST(b49_stages_are_bit_equal_with_accumulation),
        TEST(b58_a_slow_rank_changes_no_bit),
        TEST(b43_one_rank_with_an_inf_makes_all_skip_that_step),
    };
    const struct CMUnitTest more[] = {
        TEST(b49_overlap_and_accumulation_change_no_bit),
        TEST(reducing_once_a_step_is_bit_equal_at_stages_0_and_1),
        TEST(tables_by_rows_are_close_to_whole_ones),
        TEST(reducing_once_a_step_is_refused_at_stage_2),
        TEST(distilbert_is_bit_equal_at_all_stages_and_recomputed),
        TEST(prefetch_depth_changes_no_bit),
        TEST(late_and_early_updates_are_bit_equal),
        TEST(recompute_changes_no_bit),
        TEST(b53_two_runs_are_bit_identical),
        TEST(the_poisoned_arena_changes_no_bit_and_no_stage),
        TEST(frozen_parameters_stay_and_stages_are_bit_equal),
        TEST(a_frozen_part_of_a_table_by_rows_changes_no_bit_between_stages),
        TEST(split_tables_change_no_loss),
        TEST(b50_an_uneven_batch_is_divided_by_its_own_count),
        TEST(an_epoch_ends_with_a_short_step),
        TEST(b52_the_learning_rate_does_not_depend_on_the_world_size),
        TEST(b38_the_norm_is_that_of_the_gathered_gradients),
        TEST(b40_all_ranks_have_the_same_result),
        TEST(b44_steps_that_are_never_finite_end_the_run_on_all_ranks),
        TEST(world_sizes_stay_close_for_one_global_batch),
        TEST(packed_and_padded_are_close_where_nothing_is_padding),
        TEST(padding_counts_as_places_for_an_answer),
    };
    int failed = cmocka_run_group_tests(tests, make_data, run_tear_down);
    if (!REDUCED)
        failed += cmocka_run_group_tests(more, make_data, run_tear_down);
    return failed;
}
