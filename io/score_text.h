/*
 * io/score_text.h - how the official SQuAD scripts compare two answers.
 *
 *     "The U.S. Army's"  ->  lower case      "the u.s. army's"
 *                        ->  no punctuation  "the us armys"       (the 32 ASCII marks only)
 *                        ->  no articles     "  us armys"         (a, an, the as whole words)
 *                        ->  white space     "us armys"           (split and joined by one blank)
 *
 * Lower case, word borders and white space are those of Python's str and re on Unicode text:
 * U+0130 becomes two code points and a capital sigma at the end of a word becomes a final one;
 * letters and numbers (categories L and N) make words, every other mark ends one.
 *
 * Exact match compares normal forms. F1 is the harmonic mean of precision and recall over the
 * multisets of their words. The two scripts differ where a side has no words: version 2.0 gives 1
 * if both have none, version 1.1 always gives 0.
 *
 * Source: evaluate-v1.1.py and evaluate-v2.0.py of the SQuAD site (behaviour, not text).
 */
#ifndef IO_SCORE_TEXT_H
#define IO_SCORE_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

C_BEGIN

struct score_word { /* points into the normal form */
    const char *text;
    size_t bytes;
};

/* One answer, normalised. Zero-initialise; the buffers are reused by the next text. */
struct score_text {
    char *normal;             /* owned; zero-terminated */
    struct score_word *words; /* owned; sorted, so that multisets meet by merging */
    int64_t word_count;
    size_t normal_capacity, word_capacity;
    int32_t *points; /* owned; scratch: code points of the text */
    size_t point_capacity;
};

/** score_text_build() - normalise @text (UTF-8; a byte that is none counts as U+FFFD).
 * Return: ST_OK; ST_MEMORY. */
MUST_CHECK enum status score_text_build(struct score_text *st, const char *text);

/** score_text_exact() - are the normal forms equal? */
bool score_text_exact(const struct score_text *gold, const struct score_text *prediction);

/**
 * score_text_f1() - F1 over words, in [0, 1].
 * @both_empty: what two texts without words give: 1 by version 2.0, 0 by version 1.1.
 */
double score_text_f1(const struct score_text *gold, const struct score_text *prediction,
                     double both_empty);

void score_text_release(struct score_text *st);

C_END

#endif
