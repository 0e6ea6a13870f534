#include "shard/deal.h"

#include <stdbool.h>
#include <string.h>

#include "tests/support/support.h"

enum { MAX_SAMPLES = 5000, MAX_BINS = 64 };

static int64_t below(uint64_t *random, int64_t n)
{
    return (int64_t)(test_random(random) % (uint64_t)n);
}

/* Lengths as windows of SQuAD have them: few short, many about 160, a group at the full 384. */
static int32_t squad_length(uint64_t *random)
{
    if (below(random, 10) == 0)
        return 384;
    return (int32_t)(40 + (below(random, 115) + below(random, 115) + below(random, 115)));
}

static void check_permutation(const int32_t *order, int64_t count)
{
    static uint8_t seen[MAX_SAMPLES];
    memset(seen, 0, sizeof seen);
    for (int64_t i = 0; i < count; i++) {
        assert_true(order[i] >= 0 && order[i] < count);
        assert_int_equal(seen[order[i]]++, 0);
    }
}

static void b10_the_order_is_a_permutation_of_seed_and_epoch(void **state)
{
    static int32_t a[MAX_SAMPLES], b[MAX_SAMPLES];
    (void)state;
    for (int64_t epoch = 0; epoch < 5; epoch++) {
        deal_epoch_order(a, MAX_SAMPLES, 7, epoch);
        check_permutation(a, MAX_SAMPLES);
        deal_epoch_order(b, MAX_SAMPLES, 7, epoch);
        assert_memory_equal(a, b, sizeof a);
        deal_epoch_order(b, MAX_SAMPLES, 7, epoch + 1);
        assert_memory_not_equal(a, b, sizeof a);
        deal_epoch_order(b, MAX_SAMPLES, 8, epoch);
        assert_memory_not_equal(a, b, sizeof a);
    }
    deal_epoch_order(a, 1, 7, 0);
    assert_int_equal(a[0], 0);
}

/* Each place gets each sample about equally often: 24 orders of 4, chi-square with 23 degrees. */
static void all_orders_are_equally_likely(void **state)
{
    int seen[256] = {0};
    double chi = 0, expected = 24000 / 24.0;
    int distinct = 0;
    (void)state;
    for (int64_t epoch = 0; epoch < 24000; epoch++) {
        int32_t o[4];
        deal_epoch_order(o, 4, 99, epoch);
        seen[o[0] * 64 + o[1] * 16 + o[2] * 4 + o[3]]++;
    }
    for (int i = 0; i < 256; i++) {
        distinct += seen[i] > 0;
        if (seen[i] > 0)
            chi += (seen[i] - expected) * (seen[i] - expected) / expected;
    }
    assert_int_equal(distinct, 24);
    assert_true(chi < 49.7); /* one in a thousand */
}

struct deal {
    int32_t samples[512], lengths[MAX_SAMPLES], bin_of[512];
    int64_t scratch[512 + 3 * MAX_BINS], tokens[MAX_BINS], held[MAX_BINS];
    int64_t count;
};

/* The rule as it is written: the longest left goes to the emptiest bin with room. */
static void check_rule(const struct deal *d, int bins, int64_t capacity)
{
    static bool dealt[512];
    static int64_t tokens[MAX_BINS], held[MAX_BINS];
    memset(dealt, 0, sizeof dealt);
    memset(tokens, 0, sizeof tokens);
    memset(held, 0, sizeof held);
    for (int64_t done = 0; done < d->count; done++) {
        int64_t longest = -1;
        int best = -1;
        for (int64_t i = 0; i < d->count; i++)
            if (!dealt[i] &&
                (longest < 0 || d->lengths[d->samples[i]] > d->lengths[d->samples[longest]]))
                longest = i;
        for (int b = 0; b < bins; b++)
            if (held[b] < capacity && (best < 0 || tokens[b] < tokens[best]))
                best = b;
        assert_int_equal(d->bin_of[longest], best);
        dealt[longest] = true;
        tokens[best] += d->lengths[d->samples[longest]];
        held[best]++;
    }
    for (int b = 0; b < bins; b++)
        assert_true(d->scratch[d->count + b] == tokens[b]);
}

static void deal_and_check(struct deal *d, int bins, int64_t capacity)
{
    memset(d->bin_of, 0xFF, sizeof d->bin_of);
    memset(d->tokens, 0, sizeof d->tokens);
    memset(d->held, 0, sizeof d->held);
    deal_batch(d->bin_of, d->scratch, d->samples, d->count, d->lengths, bins, capacity);
    for (int64_t i = 0; i < d->count; i++) {
        assert_true(d->bin_of[i] >= 0 && d->bin_of[i] < bins);
        d->tokens[d->bin_of[i]] += d->lengths[d->samples[i]];
        d->held[d->bin_of[i]]++;
    }
    for (int b = 0; b < bins; b++)
        assert_true(d->held[b] <= capacity);
}

static void fill(struct deal *d, int64_t count, uint64_t *random)
{
    d->count = count;
    for (int64_t i = 0; i < MAX_SAMPLES; i++)
        d->lengths[i] = squad_length(random);
    for (int64_t i = 0; i < count; i++)
        d->samples[i] = (int32_t)below(random, MAX_SAMPLES);
}

static void any_batch_is_dealt_by_the_rule_and_its_tokens_counted(void **state)
{
    static struct deal d;
    uint64_t random = test_seed();
    (void)state;
    for (int i = 0; i < 200; i++) {
        int bins = 1 + (int)below(&random, i % 2 ? MAX_BINS : 4);
        int64_t capacity = 1 + below(&random, 512 / bins);
        fill(&d, below(&random, bins * capacity + 1), &random);
        for (int k = 0; i % 4 == 0 && k < MAX_SAMPLES; k++)
            d.lengths[k] = 1 + (int32_t)below(&random, 3); /* ties */
        deal_and_check(&d, bins, capacity);
        check_rule(&d, bins, capacity);
    }
}

static void every_sample_is_in_one_bin_with_room(void **state)
{
    static struct deal d;
    uint64_t random = test_seed();
    (void)state;
    for (int i = 0; i < 400; i++) {
        int bins = 1 + (int)below(&random, MAX_BINS);
        int64_t capacity = 1 + below(&random, 512 / bins);
        fill(&d, below(&random, bins * capacity + 1), &random);
        deal_and_check(&d, bins, capacity);
        if (d.count == bins * capacity)
            for (int b = 0; b < bins; b++)
                assert_int_equal(d.held[b], capacity);
    }
}

/* The most loaded bin sets the pace; its excess over the mean, averaged over batches. */
static double mean_excess(int bins, int64_t capacity, bool sliced, uint64_t *random)
{
    static struct deal d;
    double sum = 0;
    for (int i = 0; i < 300; i++) {
        int64_t most = 0, total = 0;
        fill(&d, bins * capacity, random);
        deal_and_check(&d, bins, capacity);
        for (int b = 0; sliced && b < bins; b++) {
            d.tokens[b] = 0;
            for (int64_t k = b * capacity; k < (b + 1) * capacity; k++)
                d.tokens[b] += d.lengths[d.samples[k]];
        }
        for (int b = 0; b < bins; b++) {
            total += d.tokens[b];
            most = d.tokens[b] > most ? d.tokens[b] : most;
        }
        sum += (double)most * bins / (double)total - 1;
    }
    return sum / 300;
}

static void bins_are_balanced_to_two_percent_where_slices_are_not(void **state)
{
    uint64_t random = test_seed();
    (void)state;
    double four = mean_excess(4, 8, false, &random), eight = mean_excess(8, 8, false, &random);
    double sliced = mean_excess(4, 8, true, &random);
    print_message("excess of the largest bin: 4 bins %.2f%%, 8 bins %.2f%%, sliced %.1f%%\n",
                  100 * four, 100 * eight, 100 * sliced);
    assert_true(four < 0.02);
    assert_true(eight < 0.02);
    assert_true(sliced > 0.08);
}

static void the_example_of_the_header_is_dealt_as_drawn(void **state)
{
    const int32_t lengths[] = {9, 8, 7, 3, 2, 1}, samples[] = {0, 1, 2, 3, 4, 5};
    int32_t bin_of[6];
    int64_t scratch[12];
    const int32_t want[] = {0, 1, 1, 0, 0, 1};
    (void)state;
    deal_batch(bin_of, scratch, samples, 6, lengths, 2, 3);
    assert_memory_equal(bin_of, want, sizeof want);
}

static void ties_go_to_the_lower_position_and_bin(void **state)
{
    const int32_t lengths[] = {5, 5, 5, 5, 5, 5}, samples[] = {3, 1, 2, 0, 5, 4};
    const int32_t want[] = {0, 1, 2, 0, 1, 2};
    int32_t bin_of[6];
    int64_t scratch[15];
    (void)state;
    deal_batch(bin_of, scratch, samples, 6, lengths, 3, 2);
    assert_memory_equal(bin_of, want, sizeof want);
}

static void short_batches_leave_bins_empty_but_deal_all(void **state)
{
    static struct deal d;
    uint64_t random = test_seed();
    (void)state;
    fill(&d, 3, &random);
    deal_and_check(&d, 8, 4);
    for (int b = 0; b < 8; b++)
        assert_int_equal(d.held[b], b < 3);
    fill(&d, 0, &random);
    deal_and_check(&d, 8, 4);
    fill(&d, 29, &random); /* the last batch of an epoch: 29 of 32 */
    deal_and_check(&d, 4, 8);
}

static void deal_too_many(void *argument)
{
    static struct deal d;
    (void)argument;
    deal_batch(d.bin_of, d.scratch, d.samples, 9, d.lengths, 2, 4);
}

static void more_samples_than_room_is_an_assertion(void **state)
{
    (void)state;
    assert_aborts(deal_too_many, NULL);
}

static void length_classes_are_multiples_of_64_and_128(void **state)
{
    (void)state;
    assert_int_equal(deal_length_class(0), 0);
    assert_int_equal(deal_length_class(1), 64);
    assert_int_equal(deal_length_class(64), 64);
    assert_int_equal(deal_length_class(65), 128);
    assert_int_equal(deal_length_class(LONG_ROWS - 65), LONG_ROWS - 64);
    assert_int_equal(deal_length_class(LONG_ROWS - 63), LONG_ROWS);
    assert_int_equal(deal_length_class(LONG_ROWS), LONG_ROWS);
    assert_int_equal(deal_length_class(LONG_ROWS + 1), LONG_ROWS + 128);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(b10_the_order_is_a_permutation_of_seed_and_epoch),
        cmocka_unit_test(all_orders_are_equally_likely),
        cmocka_unit_test(every_sample_is_in_one_bin_with_room),
        cmocka_unit_test(any_batch_is_dealt_by_the_rule_and_its_tokens_counted),
        cmocka_unit_test(bins_are_balanced_to_two_percent_where_slices_are_not),
        cmocka_unit_test(the_example_of_the_header_is_dealt_as_drawn),
        cmocka_unit_test(ties_go_to_the_lower_position_and_bin),
        cmocka_unit_test(short_batches_leave_bins_empty_but_deal_all),
        cmocka_unit_test(more_samples_than_room_is_an_assertion),
        cmocka_unit_test(length_classes_are_multiples_of_64_and_128),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
