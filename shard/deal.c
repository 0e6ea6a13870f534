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

/* Longest first, ties in the order of the batch: ascending keys, whose low half is the position. */
static void sort_by_length(int64_t *keys, const int32_t *samples, int64_t count,
                           const int32_t *lengths)
{
    static const int64_t gaps[] = {88573, 29524, 9841, 3280, 1093, 364, 121, 40, 13, 4, 1};
    for (int64_t i = 0; i < count; i++)
        keys[i] = (int64_t)(INT32_MAX - lengths[samples[i]]) << 32 | i;
    for (size_t g = 0; g < sizeof gaps / sizeof *gaps; g++) /* Shell's sort */
        for (int64_t i = gaps[g]; i < count; i++) {
            int64_t key = keys[i], j = i;
            for (; j >= gaps[g] && keys[j - gaps[g]] > key; j -= gaps[g])
                keys[j] = keys[j - gaps[g]];
            keys[j] = key;
        }
}

/* Bins with room are a heap: the one with the fewest tokens, of equals the lowest, is heap[0]. */
static void sink(int64_t *heap, int64_t size, const int64_t *load)
{
    int64_t bin = heap[0], at = 0;
    for (int64_t child = 1; child < size; child = 2 * at + 1) {
        if (child + 1 < size &&
            (load[heap[child + 1]] < load[heap[child]] ||
             (load[heap[child + 1]] == load[heap[child]] && heap[child + 1] < heap[child])))
            child++;
        if (load[bin] < load[heap[child]] || (load[bin] == load[heap[child]] && bin < heap[child]))
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = bin;
}

void deal_batch(int32_t *bin_of, int64_t *scratch, const int32_t *samples, int64_t count,
                const int32_t *lengths, int bins, int64_t capacity)
{
    ASSERT(count <= bins * capacity);
    ASSERT(count <= INT32_MAX);
    int64_t *by_length = scratch, *load = scratch + count, *heap = load + bins, *held = heap + bins;
    int64_t size = bins;
    sort_by_length(by_length, samples, count, lengths);
    for (int b = 0; b < bins; b++) {
        load[b] = held[b] = 0;
        heap[b] = b;
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t position = by_length[i] & INT32_MAX, bin = heap[0];
        bin_of[position] = (int32_t)bin;
        load[bin] += lengths[samples[position]];
        if (++held[bin] == capacity)
            heap[0] = heap[--size];
        sink(heap, size, load);
    }
}

int64_t deal_length_class(int64_t tokens)
{
    return round_up(tokens, tokens < LONG_ROWS ? LENGTH_CLASS : LONG_CLASS);
}
