/*
 * Which samples a step, rank and micro-batch gets, and the index arrays that ops see of them.
 */
#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/train/batch.h"
#include "engine/train/sampler.h"
#include "tests/support/run.h"

static struct scratch scratch;

static int make_data(void **state)
{
    (void)state;
    scratch_make(&scratch);
    run_make_data(&scratch, "train.json",
                  (struct made_questions){.count = 60,
                                          .min_words = 3,
                                          .max_words = 120,
                                          .question_words = 5,
                                          .impossible_every = 4,
                                          .seed = 21});
    return 0;
}

static int remove_data(void **state)
{
    (void)state;
    scratch_remove(&scratch);
    return 0;
}

/* ---- the sampler ---- */

enum { SAMPLES = 211 };

static void make_lengths(int32_t *lengths, uint64_t seed)
{
    for (int i = 0; i < SAMPLES; i++)
        lengths[i] = (int32_t)(5 + test_random(&seed) % 380);
}

/* Mark what a step deals out; returns how many samples that were. */
static int64_t take_step(const struct sampler *s, int *seen)
{
    int64_t count = 0;
    for (int rank = 0; rank < s->world_size; rank++)
        for (int m = 0; m < s->grad_accum; m++) {
            int32_t picked[16];
            int64_t n = sampler_take(s, rank, m, picked), tokens = 0;
            assert_in_range(n, 0, s->micro_batch);
            for (int64_t i = 0; i < n; i++) {
                seen[picked[i]]++;
                tokens += s->lengths[picked[i]];
            }
            assert_true(tokens <= sampler_tokens(s, m));
            count += n;
        }
    return count;
}

static void b10_b11_every_sample_is_dealt_once_an_epoch(void **state)
{
    (void)state;
    static const int worlds[] = {1, 2, 3, 8};
    int32_t lengths[SAMPLES];
    make_lengths(lengths, test_seed());
    for (int w = 0; w < 4; w++)
        for (int accum = 1; accum <= 3; accum++) {
            struct sampler s;
            assert_ok(sampler_init(&s, lengths, SAMPLES, worlds[w], accum, 5, 42));
            for (int64_t epoch = 0; epoch < 3; epoch++) {
                int seen[SAMPLES] = {0};
                int64_t count = 0;
                for (int64_t k = 0; k < s.steps_per_epoch; k++) {
                    sampler_enter(&s, epoch * s.steps_per_epoch + k);
                    assert_int_equal(take_step(&s, seen), s.sample_count);
                    assert_true(s.sample_count == s.global_batch || k == s.steps_per_epoch - 1);
                    count += s.sample_count;
                }
                assert_int_equal(count, SAMPLES);
                for (int i = 0; i < SAMPLES; i++)
                    assert_int_equal(seen[i], 1);
            }
            sampler_release(&s);
        }
}

/* The same samples make up a step for every world with the same global batch, in any order of
 * visits: a step is a function of its number alone. */
static void b11_a_step_is_a_function_of_its_number(void **state)
{
    (void)state;
    int32_t lengths[SAMPLES];
    struct sampler one, many;
    make_lengths(lengths, 5);
    assert_ok(sampler_init(&one, lengths, SAMPLES, 1, 2, 12, 42));
    assert_ok(sampler_init(&many, lengths, SAMPLES, 8, 1, 3, 42));
    for (int64_t step = 0; step < 3 * one.steps_per_epoch; step++) {
        int64_t other = 3 * one.steps_per_epoch - 1 - step;
        sampler_enter(&many, other); /* jump about */
        sampler_enter(&one, step);
        sampler_enter(&many, step);
        int a[SAMPLES] = {0}, b[SAMPLES] = {0};
        assert_int_equal(take_step(&one, a), take_step(&many, b));
        assert_memory_equal(a, b, sizeof a);
    }
    sampler_release(&one);
    sampler_release(&many);
}

static void epochs_and_seeds_have_their_own_order(void **state)
{
    (void)state;
    int32_t lengths[SAMPLES], first[SAMPLES];
    struct sampler s;
    make_lengths(lengths, 5);
    for (uint64_t seed = 1; seed <= 2; seed++) {
        assert_ok(sampler_init(&s, lengths, SAMPLES, 2, 1, 5, seed));
        sampler_enter(&s, 0);
        if (seed == 2)
            assert_memory_not_equal(first, s.order, sizeof first);
        memcpy(first, s.order, sizeof first);
        sampler_enter(&s, s.steps_per_epoch);
        assert_memory_not_equal(first, s.order, sizeof first);
        sampler_release(&s);
    }
}

static void no_step_has_more_rows_than_planned(void **state)
{
    (void)state;
    int32_t lengths[SAMPLES];
    make_lengths(lengths, 9);
    for (int world = 1; world <= 8; world++) {
        struct sampler s;
        assert_ok(sampler_init(&s, lengths, SAMPLES, world, 2, 4, 3));
        int64_t most = 0, planned = sampler_max_tokens(&s, 2 * s.steps_per_epoch + 1);
        for (int64_t step = 0; step <= 2 * s.steps_per_epoch; step++) {
            sampler_enter(&s, step);
            for (int m = 0; m < 2; m++) {
                int64_t tokens = sampler_tokens(&s, m);
                assert_true(tokens <= planned);
                most = tokens > most ? tokens : most;
            }
        }
        assert_int_equal(most, planned);
        sampler_release(&s);
    }
}

/* It walked all of them; 10^9 take minutes, and nobody was told. */
static void a_run_without_an_end_is_planned_by_a_bound(void **state)
{
    (void)state;
    int32_t lengths[SAMPLES];
    make_lengths(lengths, 9);
    assert_int_equal(sampler_foreseen(&(struct sampler){0}, 0), 0); /* evaluation alone */
    for (int world = 1; world <= 8; world++) {
        struct sampler s;
        assert_ok(sampler_init(&s, lengths, SAMPLES, world, 2, 4, 3));
        int64_t exact = sampler_max_tokens(&s, 9 * s.steps_per_epoch);
        s.foresee = 3 * SAMPLES;
        assert_true(sampler_foreseen(&s, INT64_MAX) <= 3 * SAMPLES / s.global_batch + 1);
        assert_int_equal(sampler_foreseen(&s, 2), 2);
        int64_t longest[4] = {0}, sum = 0;
        for (int i = 0; i < SAMPLES; i++) {
            int64_t length = lengths[i];
            for (int k = 0; k < 4; k++)
                if (length > longest[k]) {
                    int64_t shorter = longest[k];
                    longest[k] = length;
                    length = shorter;
                }
        }
        for (int k = 0; k < 4; k++)
            sum += longest[k];
        assert_int_equal(sampler_max_tokens(&s, (int64_t)1000 * 1000 * 1000), sum);
        assert_true(exact <= sum);
        /* What is dealt afterwards is what it was. */
        struct sampler fresh;
        assert_ok(sampler_init(&fresh, lengths, SAMPLES, world, 2, 4, 3));
        sampler_enter(&s, 0);
        sampler_enter(&fresh, 0);
        assert_memory_equal(s.order, fresh.order, sizeof *s.order * SAMPLES);
        sampler_release(&fresh);
        sampler_release(&s);
    }
}

static void no_samples_are_refused(void **state)
{
    (void)state;
    struct sampler s = {0};
    assert_fails(sampler_init(&s, NULL, 0, 2, 1, 4, 1), ST_INVALID, "no samples");
}

/* ---- index arrays ---- */

struct loaded {
    struct run_config config;
    struct run_data data;
    struct batch_layout layout;
    char *block;
    int32_t *scratch;
};

static void load(struct loaded *l, bool padded, int64_t micro_batch, int64_t rows)
{
    memset(l, 0, sizeof *l);
    run_tiny(&l->config, &scratch, false);
    l->config.data.padded = padded;
    assert_ok(run_data_load(&l->data, &l->config, true));
    l->layout = (struct batch_layout){.rows = rows,
                                      .sequences = micro_batch,
                                      .positions = 67,
                                      .max_length = 64,
                                      .padded_length = padded ? 64 : 0,
                                      .pad_id = l->data.vocab.pad_id,
                                      .sep_type = 1};
    batch_layout_init(&l->layout);
    assert_ok(mem_alloc(&l->block, 2 * l->layout.micro_bytes));
    assert_ok(mem_alloc(&l->scratch, sizeof *l->scratch * (size_t)rows));
    memset(l->block, 0x5A, 2 * l->layout.micro_bytes);
}

static void unload(struct loaded *l)
{
    mem_free(&l->block);
    mem_free(&l->scratch);
    run_data_release(&l->data);
}

enum { MANY = 32 }; /* sequences */

static void check_sequence(const struct loaded *l, const struct sequences *q, int b, int32_t sample)
{
    const struct feature_set *set = &l->data.train.features;
    const struct feature *f = &set->features[sample];
    int32_t first = q->cu_seqlens[b], rows = q->cu_seqlens[b + 1] - first;
    assert_int_equal(q->sample[b], sample);
    assert_int_equal(q->kv_len[b], f->token_count);
    assert_int_equal(rows, l->config.data.padded ? 64 : f->token_count);
    assert_int_equal(q->start[b], f->start);
    assert_int_equal(q->end[b], f->end);
    for (int32_t i = 0; i < rows; i++) {
        bool used = i < f->token_count;
        assert_int_equal(q->row_sequence[first + i], b);
        assert_int_equal(q->token[first + i],
                         used ? set->ids[f->first_token + i] : l->data.vocab.pad_id);
        assert_int_equal(q->token_type[first + i], used && i >= f->context_first);
    }
}

static void check_order(const struct sequences *q)
{
    char seen[4096] = {0};
    for (int64_t i = 0; i < q->rows; i++) {
        int32_t row = q->token_order[i];
        assert_in_range(row, 0, q->rows - 1);
        assert_int_equal(seen[row]++, 0);
        if (i == 0)
            continue;
        int32_t before = q->token_order[i - 1];
        assert_true(q->token[before] < q->token[row] || q->token[row] == -1 ||
                    (q->token[before] == q->token[row] && before < row));
        assert_true(q->token[before] <= q->token[row]);
    }
}

static void check_by_length(const struct sequences *q)
{
    char seen[MANY] = {0};
    for (int i = 0; i < q->count; i++) {
        int32_t b = q->by_length[i], a = i > 0 ? q->by_length[i - 1] : 0;
        assert_in_range(b, 0, q->count - 1);
        assert_int_equal(seen[b]++, 0);
        int32_t rows = q->cu_seqlens[b + 1] - q->cu_seqlens[b];
        int32_t before = q->cu_seqlens[a + 1] - q->cu_seqlens[a];
        assert_true(i == 0 || before > rows || (before == rows && a < b));
    }
}

static void check_batch(struct loaded *l, const int32_t *picked, int64_t count, int index,
                        int64_t view_rows)
{
    int64_t rows =
        batch_fill(&l->layout, l->block, index, &l->data.train.features, picked, count, l->scratch);
    int64_t tokens = 0;
    for (int64_t i = 0; i < count; i++)
        tokens += l->data.train.features.features[picked[i]].token_count;
    assert_int_equal(rows, l->layout.padded_length > 0 ? l->layout.padded_length * count : tokens);
    struct sequences q =
        batch_view(&l->layout, l->block, index, view_rows > rows ? view_rows : rows, 0);
    assert_int_equal(q.count, l->layout.sequences);
    assert_int_equal(q.cu_seqlens[0], 0);
    assert_int_equal(q.cu_seqlens[q.count], rows);
    for (int b = 0; b < q.count; b++) {
        if (b < count) {
            check_sequence(l, &q, b, picked[b]);
            continue;
        }
        assert_int_equal(q.cu_seqlens[b + 1], rows);
        assert_int_equal(q.kv_len[b], 0);
    }
    for (int64_t i = rows; i < q.rows; i++) {
        assert_int_equal(q.token[i], -1);
        assert_int_equal(q.row_sequence[i], -1);
    }
    check_order(&q);
    check_by_length(&q);
}

static void check_arrays(bool padded, int sequences)
{
    struct loaded l;
    load(&l, padded, sequences, 128 * sequences);
    uint64_t seed = test_seed();
    assert_true(l.data.train.count > 60);
    for (int round = 0; round < 50; round++) {
        int32_t picked[MANY];
        int64_t count = (int64_t)(test_random(&seed) % (uint64_t)(sequences + 1)); /* none, too */
        for (int i = 0; i < sequences; i++)
            picked[i] = (int32_t)(test_random(&seed) % (uint64_t)l.data.train.count);
        check_batch(&l, picked, count, round % 2, round % 6 * 128); /* length classes, too */
    }
    unload(&l);
}

static void packed_arrays_are_the_features(void **state)
{
    (void)state;
    check_arrays(false, 5);
    check_arrays(false, MANY);
}

static void padded_arrays_are_the_features(void **state)
{
    (void)state;
    check_arrays(true, 5);
}

/* The same rows as in each rank's own arrays, and the order of all of them. */
static void a_rank_has_the_tokens_of_all_ranks(void **state)
{
    (void)state;
    enum { RANKS = 3 };
    static const int64_t classes[] = {384, 256};
    static const int32_t picked[RANKS][5] = {{4, 2, 9, 1, 0}, {3, 7}, {0}};
    static const int64_t counts[RANKS] = {2, 2, 0};
    struct loaded l;
    for (int way = 0; way < 4; way++) {
        load(&l, way % 2, 5, 384);
        int64_t rows = classes[way / 2];
        struct sequences all = {.rows = RANKS * rows};
        struct feature_set *set = &l.data.train.features;
        mem_free(&l.block);
        l.layout.ranks = RANKS;
        batch_layout_init(&l.layout);
        assert_ok(mem_alloc(&l.block, 2 * l.layout.micro_bytes));
        mem_free(&l.scratch);
        assert_ok(mem_alloc(&l.scratch, sizeof *l.scratch * RANKS * 384));
        for (int r = 0; r < RANKS; r++)
            batch_fill_rank(&l.layout, l.block, 1, r, rows, set, picked[r], counts[r]);
        batch_order_ranks(&l.layout, l.block, 1, rows, l.scratch);
        for (int r = 0; r < RANKS; r++) {
            batch_fill(&l.layout, l.block, 1, set, picked[r], counts[r], l.scratch);
            struct sequences q = batch_view(&l.layout, l.block, 1, rows, rows);
            assert_int_equal(q.all.rows, RANKS * rows);
            assert_int_equal(q.all.batches, RANKS);
            assert_memory_equal(q.all.token + r * rows, q.token, sizeof *q.token * (size_t)rows);
            all.token = q.all.token;
            all.token_order = q.all.order;
        }
        check_order(&all);
        unload(&l);
    }
}

/* A micro-batch that is filled leaves its neighbour in the block alone. */
static void micro_batches_do_not_touch_each_other(void **state)
{
    (void)state;
    struct loaded l;
    static const int32_t picked[] = {4, 2, 9, 1, 0};
    load(&l, false, 5, 384);
    size_t bytes = l.layout.micro_bytes;
    char *copy = NULL;
    assert_ok(mem_alloc(&copy, bytes));
    batch_fill(&l.layout, l.block, 1, &l.data.train.features, picked, 5, l.scratch);
    memcpy(copy, l.block + bytes, bytes);
    batch_fill(&l.layout, l.block, 0, &l.data.train.features, picked, 2, l.scratch);
    assert_memory_equal(copy, l.block + bytes, bytes);
    for (size_t i = 0; i < bytes; i += 256)
        assert_int_equal(bytes % 256, 0);
    mem_free(&copy);
    unload(&l);
}

/* ---- whole runs ---- */

static struct run_trace first, other;

static int release_traces(void **state)
{
    (void)state;
    run_release(&first);
    run_release(&other);
    return 0;
}

/* Three questions on eight ranks: five of them compute zero rows and join every collective. Where
 * tables are moved by rows, there is a second micro-batch with no rows at all. */
static void ranks_without_samples_train_along(void **state)
{
    (void)state;
    run_make_data(
        &scratch, "few.json",
        (struct made_questions){
            .count = 3, .min_words = 20, .max_words = 40, .question_words = 4, .seed = 2});
    for (int way = 0; way < 8; way++) {
        int stage = (7 - way) % 4;
        bool by_rows = way < 4;
        struct run_config c;
        run_tiny(&c, &scratch, false);
        scratch_path(&scratch, c.data.train, "few.json");
        c.train.ranks = 8;
        c.train.zero_stage = stage;
        c.train.micro_batch = 1;
        c.train.grad_accum = by_rows ? 2 : 1;
        c.train.tables = by_rows ? TABLES_ROWS : TABLES_WHOLE;
        c.train.epochs = 3;
        c.train.reduce = REDUCE_PER_MICRO_BATCH;
        if (stage == 3)
            run_release(&first);
        run_ok(stage == 3 ? &first : &other, &c, NULL);
        int empty = 0;
        for (int r = 0; r < 8; r++)
            empty += (stage == 3 ? &first : &other)->step[r][0].host.tokens == 0;
        assert_int_equal(empty, 5);
        if (stage < 3)
            run_same(&first, &other, "ranks without samples");
        run_release(&other);
    }
    struct run_config c;
    run_tiny(&c, &scratch, false);
    scratch_path(&scratch, c.data.train, "few.json");
    c.train.micro_batch = 3;
    c.train.epochs = 3;
    run_ok(&other, &c, NULL);
    run_close(&first, &other, 1e-5, 1e-6, "one rank and eight");
}

static void an_epoch_of_a_run_has_all_tokens(void **state)
{
    (void)state;
    static const int worlds[] = {1, 2, 3, 8};
    struct loaded l;
    load(&l, false, 5, 384);
    int64_t all = 0, windows = l.data.train.count;
    for (int64_t i = 0; i < windows; i++)
        all += l.data.train.rows[i];
    unload(&l);
    for (int w = 0; w < 4; w++) {
        struct run_config c;
        run_tiny(&c, &scratch, false);
        c.train.ranks = worlds[w];
        c.train.zero_stage = w;
        c.train.grad_accum = 2;
        run_ok(&first, &c, NULL);
        int64_t tokens = 0, sequences = 0, host = 0;
        for (int i = 0; i < first.steps; i++) {
            tokens += first.step[0][i].tokens;
            sequences += first.step[0][i].sequences;
            for (int r = 0; r < worlds[w]; r++)
                host += first.step[r][i].host.tokens;
        }
        assert_int_equal(sequences, windows);
        assert_int_equal(tokens, all);
        assert_int_equal(host, all);
        run_release(&first);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(b10_b11_every_sample_is_dealt_once_an_epoch),
        cmocka_unit_test(b11_a_step_is_a_function_of_its_number),
        cmocka_unit_test(epochs_and_seeds_have_their_own_order),
        cmocka_unit_test(no_step_has_more_rows_than_planned),
        cmocka_unit_test(a_run_without_an_end_is_planned_by_a_bound),
        cmocka_unit_test(no_samples_are_refused),
        cmocka_unit_test(packed_arrays_are_the_features),
        cmocka_unit_test(padded_arrays_are_the_features),
        cmocka_unit_test(a_rank_has_the_tokens_of_all_ranks),
        cmocka_unit_test(micro_batches_do_not_touch_each_other),
        cmocka_unit_test_teardown(ranks_without_samples_train_along, release_traces),
        cmocka_unit_test_teardown(an_epoch_of_a_run_has_all_tokens, release_traces),
    };
    return cmocka_run_group_tests(tests, make_data, remove_data);
}
