#include "engine/train/sampler.h"

#include <stdlib.h>
#include <string.h>

enum status sampler_init(struct sampler *s, const int32_t *lengths, int64_t count, int world_size,
                         int grad_accum, int64_t micro_batch, uint64_t seed)
{
    if (count < 1)
        return FAIL(INVALID, "no samples to train on");
    *s = (struct sampler){
        .lengths = lengths,
        .count = count,
        .world_size = world_size,
        .grad_accum = grad_accum,
        .micro_batch = micro_batch,
        .seed = seed,
        .foresee = SAMPLER_FORESEEN,
        .global_batch = micro_batch * world_size * grad_accum,
        .epoch = -1,
    };
    s->steps_per_epoch = (count + s->global_batch - 1) / s->global_batch;
    enum status st = ST_OK;
    size_t batch = (size_t)s->global_batch, bins = (size_t)(world_size * grad_accum);
    TRY_GOTO(st, out, mem_alloc(&s->order, sizeof *s->order * (size_t)count));
    TRY_GOTO(st, out, mem_alloc(&s->bin_of, sizeof *s->bin_of * batch));
    TRY_GOTO(st, out, mem_alloc(&s->scratch, sizeof *s->scratch * (batch + 3 * bins)));
out:
    if (st != ST_OK)
        sampler_release(s);
    return st;
}

void sampler_release(struct sampler *s)
{
    mem_free(&s->order);
    mem_free(&s->bin_of);
    mem_free(&s->scratch);
    memset(s, 0, sizeof *s);
}

void sampler_enter(struct sampler *s, int64_t step)
{
    int64_t epoch = step / s->steps_per_epoch;
    if (epoch != s->epoch)
        deal_epoch_order(s->order, s->count, s->seed, epoch);
    s->epoch = epoch;
    int64_t first = step % s->steps_per_epoch * s->global_batch;
    int64_t left = s->count - first;
    s->samples = s->order + first;
    s->sample_count = left < s->global_batch ? left : s->global_batch;
    deal_batch(s->bin_of, s->scratch, s->samples, s->sample_count, s->lengths,
               s->world_size * s->grad_accum, s->micro_batch);
}

int64_t sampler_take(const struct sampler *s, int rank, int micro, int32_t *out)
{
    int bin = micro * s->world_size + rank;
    int64_t n = 0;
    for (int64_t i = 0; i < s->sample_count; i++)
        if (s->bin_of[i] == bin)
            out[n++] = s->samples[i];
    return n;
}

void sampler_work(const struct sampler *s, int64_t *tokens, double *squared_lengths)
{
    *tokens = 0;
    *squared_lengths = 0;
    for (int64_t i = 0; i < s->sample_count; i++) {
        int64_t length = s->lengths[s->samples[i]];
        *tokens += length;
        *squared_lengths += (double)length * (double)length;
    }
}

int64_t sampler_tokens(const struct sampler *s, int micro)
{
    const int64_t *tokens = s->scratch + s->sample_count + (int64_t)micro * s->world_size;
    int64_t most = 0;
    for (int rank = 0; rank < s->world_size; rank++)
        most = tokens[rank] > most ? tokens[rank] : most;
    return most;
}

int64_t sampler_class(const struct sampler *s, int micro)
{
    return deal_length_class(sampler_tokens(s, micro));
}

int64_t sampler_foreseen(const struct sampler *s, int64_t steps)
{
    if (steps == 0) /* then there may be no samples */
        return 0;
    int64_t most = s->foresee / s->global_batch + 1;
    return steps < most ? steps : most;
}

static int longest_first(const void *left, const void *right)
{
    int32_t a = *(const int32_t *)left, b = *(const int32_t *)right;
    return a > b ? -1 : a < b;
}

/* Rows of the longest samples that fit in a micro-batch: no deal makes a longer one. */
static int64_t longest_possible(struct sampler *s)
{
    int64_t rows = 0;
    memcpy(s->order, s->lengths, sizeof *s->order * (size_t)s->count);
    s->epoch = -1; /* its order is gone */
    qsort(s->order, (size_t)s->count, sizeof *s->order, longest_first);
    for (int64_t i = 0; i < s->micro_batch && i < s->count; i++)
        rows += s->order[i];
    return rows;
}

int64_t sampler_max_tokens(struct sampler *s, int64_t steps)
{
    int64_t most = 0;
    if (sampler_foreseen(s, steps) < steps)
        return longest_possible(s);
    for (int64_t step = 0; step < steps; step++) {
        sampler_enter(s, step);
        for (int m = 0; m < s->grad_accum; m++) {
            int64_t tokens = sampler_tokens(s, m);
            most = tokens > most ? tokens : most;
        }
    }
    return most;
}

double sampler_mean_length(const struct sampler *s)
{
    int64_t rows = 0;
    for (int64_t i = 0; i < s->count; i++)
        rows += s->lengths[i];
    return (double)rows / (double)s->count;
}

struct sampler_mean sampler_mean(struct sampler *s, int64_t steps)
{
    struct sampler_mean mean = {0};
    steps = sampler_foreseen(s, steps);
    double micros = (double)steps * s->grad_accum;
    for (int64_t step = 0; step < steps; step++) {
        int64_t tokens = 0;
        double squared = 0;
        sampler_enter(s, step);
        sampler_work(s, &tokens, &squared);
        mean.tokens += (double)tokens / s->world_size / micros;
        mean.squared_lengths += squared / s->world_size / micros;
        for (int m = 0; m < s->grad_accum; m++) {
            mean.fullest += (double)sampler_tokens(s, m) / micros;
            mean.rows += (double)sampler_class(s, m) / micros;
        }
    }
    return mean;
}
