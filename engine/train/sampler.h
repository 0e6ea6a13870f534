/*
 * engine/train/sampler.h - which samples each step, rank and micro-batch gets.
 *
 * Steps count from 0 over the whole run; epoch e holds steps [e * steps_per_epoch, ...), the last
 * of which may be short. Everything is a function of (seed, epoch, lengths), computed by every rank
 * alone: every sample of an epoch is in exactly one micro-batch of one rank.
 */
#ifndef ENGINE_TRAIN_SAMPLER_H
#define ENGINE_TRAIN_SAMPLER_H

#include "engine/base/arena.h"
#include "shard/deal.h"

C_BEGIN

struct sampler {
    const int32_t *lengths; /* borrowed; rows of each sample */
    int64_t count;          /* samples */
    int world_size, grad_accum;
    int64_t micro_batch;
    uint64_t seed;
    int64_t foresee; /* samples that are dealt ahead at most; see sampler_foreseen() */
    int64_t global_batch, steps_per_epoch;
    int64_t epoch;    /* of the order at hand; -1: none */
    int32_t *order;   /* owned; count */
    int32_t *bin_of;  /* owned; global_batch */
    int64_t *scratch; /* owned; the deal's: behind sample_count entries the tokens of each bin */
    /* the step at hand */
    const int32_t *samples;
    int64_t sample_count;
};

/** sampler_init() - ST_INVALID without samples; ST_MEMORY. */
MUST_CHECK enum status sampler_init(struct sampler *s, const int32_t *lengths, int64_t count,
                                    int world_size, int grad_accum, int64_t micro_batch,
                                    uint64_t seed);
void sampler_release(struct sampler *s);

/** sampler_enter() - deal the global batch of a step; its samples are in s->samples. */
void sampler_enter(struct sampler *s, int64_t step);

/** sampler_take() - the samples of one rank's micro-batch of that step, in @out (micro_batch). */
int64_t sampler_take(const struct sampler *s, int rank, int micro, int32_t *out);

/** sampler_work() - tokens of the global batch, and the sum of its squared lengths. */
void sampler_work(const struct sampler *s, int64_t *tokens, double *squared_lengths);

/** sampler_tokens() - rows of the fullest rank's micro-batch @micro. */
int64_t sampler_tokens(const struct sampler *s, int micro);

/** sampler_class() - the length class of micro-batch @micro: rows of its captured tensors. */
int64_t sampler_class(const struct sampler *s, int micro);

/**
 * sampler_foreseen() - how many of the first @steps steps are dealt at the start of a run, to see
 * what comes: all, but no more than it takes to deal SAMPLER_FORESEEN samples (a few seconds; 189
 * epochs of SQuAD 1.1), for a run of 10^9 steps should start too.
 */
enum { SAMPLER_FORESEEN = 1 << 24 };
int64_t sampler_foreseen(const struct sampler *s, int64_t steps);

/**
 * sampler_max_tokens() - the most rows of any micro-batch of steps [0, steps): exact where all are
 * foreseen, else a bound, the rows of the micro_batch longest samples. Forgets the step at hand.
 */
int64_t sampler_max_tokens(struct sampler *s, int64_t steps);

/** sampler_mean_length() - rows of a sample, over all of them. */
double sampler_mean_length(const struct sampler *s);

/* A micro-batch of one rank, on average. */
struct sampler_mean {
    double tokens, squared_lengths; /* of a rank */
    double fullest;                 /* tokens of the rank that has most */
    double rows;                    /* of the length class */
};

/** sampler_mean() - over all micro-batches of steps [0, steps), or those that are foreseen; zeros
 * without steps. Forgets the step at hand. */
struct sampler_mean sampler_mean(struct sampler *s, int64_t steps);

C_END

#endif
