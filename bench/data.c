/*
 * From a file to windows of tokens: SQuAD's development set, on one core. Each line: median and
 * fastest-to-slowest spread of the repeats, in seconds of this thread's CPU time, so that other
 * work on the machine does not count. The number of windows is checked before anything is timed.
 *
 * usage: build/release/bench/data      (from the root of the repository)
 */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/base/arena.h"
#include "engine/base/out.h"
#include "engine/base/rng.h"
#include "io/features.h"

#define DATA  "tests/data/qa/squad-dev-v1.1.json.gz"
#define VOCAB "data/vocab/bert-base-uncased-vocab.txt"

enum { REPEATS = 7, WINDOWS = 10784, DRAWN = 1 << 22 };

struct bench {
    struct vocab vocab;
    struct wordpiece tok;
    struct squad_data data;
    struct feature_set set;
    float *random;
};

static enum status read_questions(struct bench *b)
{
    squad_release(&b->data);
    return squad_load(&b->data, DATA);
}

static enum status make_windows(struct bench *b)
{
    const struct feature_options options = {.max_length = 384, .doc_stride = 128};
    features_release(&b->set);
    return features_build(&b->set, &b->data, &b->tok, &options);
}

static enum status draw_weights(struct bench *b)
{
    rng_fill_normal(b->random, 0, DRAWN, 1, 2, 0.02f);
    return ST_OK;
}

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static enum status measure(struct bench *b, const char *name, enum status (*run)(struct bench *),
                           double *median)
{
    double seconds[REPEATS];
    for (int i = 0; i < REPEATS; i++) {
        double begin = cpu_seconds();
        TRY(run(b));
        seconds[i] = cpu_seconds() - begin;
    }
    qsort(seconds, REPEATS, sizeof *seconds, compare);
    *median = seconds[REPEATS / 2];
    out("%-44s %6.3f s  spread %3.0f%%\n", name, *median,
        100 * (seconds[REPEATS - 1] / seconds[0] - 1));
    return ST_OK;
}

static enum status run_cases(struct bench *b)
{
    double read, windows, drawn;
    TRY(vocab_load(&b->vocab, VOCAB));
    wordpiece_init(&b->tok, &b->vocab, false);
    TRY(mem_alloc(&b->random, sizeof *b->random * DRAWN));
    TRY(read_questions(b));
    TRY(make_windows(b));
    if (b->set.feature_count != WINDOWS)
        return FAIL(INVALID, "%s: %lld windows, not %d", DATA, (long long)b->set.feature_count,
                    WINDOWS);
    TRY(measure(b, "read dev-v1.1, 10570 questions", read_questions, &read));
    TRY(measure(b, "tokenize, 10784 windows", make_windows, &windows));
    out("%-44s %6.3f s  %.1f M tokens/s\n", "both", read + windows,
        1e-6 * (double)b->set.token_count / (read + windows));
    TRY(measure(b, "draw 4.2 M random weights", draw_weights, &drawn));
    return ST_OK;
}

int main(void)
{
    static struct bench b;
    enum status st = run_cases(&b);
    if (st != ST_OK)
        out("%s\n", status_message());
    mem_free(&b.random);
    features_release(&b.set);
    squad_release(&b.data);
    vocab_release(&b.vocab);
    return out_flush() == ST_OK && st == ST_OK ? 0 : 1;
}
