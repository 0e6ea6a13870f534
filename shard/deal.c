#include "shard/deal.h"

#include "engine/base/arena.h"
#include "engine/base/rng.h"

void deal_epoch_order(int32_t *order, int64_t count, uint64_t seed, int64_t epoch)
{
    for (int64_t i = 0; i < count; i++)
        order[i] = (int32_t)i;
    for (int64_t i = count - 1; i > 0; i--) {
        int64_t j = (int64_t)rng_below(seed, (uint64_t)epoch, (uint64_t)i, (uint64_t)i + 1);
        int32_t kept = order[i];
        order[i] = order[j];
        order[j] = kept;
    }
}

void deal_batch(int32_t *bin_of, int64_t *scratch, const int32_t *samples, int64_t count,
                const int32_t *lengths, int bins, int64_t capacity)
{
    ASSERT(count <= bins * capacity);
    int64_t *by_length = scratch; /* positions in the batch, longest first */
    int64_t *load = scratch + count;
    /* Insertion sort: batches are small, and it is stable. */
    for (int64_t i = 0; i < count; i++) {
        int64_t j = i;
        for (; j > 0 && lengths[samples[by_length[j - 1]]] < lengths[samples[i]]; j--)
            by_length[j] = by_length[j - 1];
        by_length[j] = i;
    }
    /* load packs (tokens, samples) of a bin: tokens decide, the count tells whether it has room. */
    for (int b = 0; b < bins; b++)
        load[b] = 0;
    const int64_t one_token = (int64_t)1 << 24;
    ASSERT(capacity < one_token);
    for (int64_t i = 0; i < count; i++) {
        int best = -1;
        for (int b = 0; b < bins; b++)
            if (load[b] % one_token < capacity &&
                (best < 0 || load[b] / one_token < load[best] / one_token))
                best = b;
        bin_of[by_length[i]] = best;
        load[best] += lengths[samples[by_length[i]]] * one_token + 1;
    }
}

int64_t deal_length_class(int64_t tokens)
{
    return round_up(tokens, LENGTH_CLASS);
}
