/*
 * io/score.h - exact match and F1 over a data set, to the digit of the official scripts.
 *
 * A question scores the best of its reference answers (io/score_text.h compares two texts). Which
 * script's rules hold is squad_data.unanswerable:
 *
 *                               version 1.1              version 2.0
 *   references that normalise   count as they are        are left out; with none left, or none
 *   to nothing                                           given, the one reference is ""
 *   question without prediction scores 0, counts         is left out of every total
 *   F1 of two texts w/o words   0                        1
 *
 * (The 2.0 script stops with a KeyError on a missing prediction once it splits the totals; here the
 * parts leave the question out as the whole does.) Predictions for unknown ids are ignored. Both
 * kinds are counted, in `missing` and `extra`.
 *
 * Null odds are a number a question: the higher, the more likely it has no answer. Where the odds
 * are above the threshold the prediction counts as "no answer". The best thresholds are searched
 * over the raw predictions: walk up the odds, and answer what lies at or below the value.
 *
 * Threads: no shared state.
 *
 * Source: evaluate-v1.1.py and evaluate-v2.0.py of the SQuAD site (behaviour, not text).
 */
#ifndef IO_SCORE_H
#define IO_SCORE_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/status.h"
#include "io/parts.h"
#include "io/squad.h"

C_BEGIN

struct score_part { /* exact and f1 in percent, 0 if total is 0 */
    double exact, f1;
    int64_t total; /* questions */
};

struct score_result {
    struct score_part all;                /* exact_match or exact, f1, total */
    struct score_part has_answer;         /* HasAns_*: questions with a reference answer */
    struct score_part no_answer;          /* NoAns_* */
    int64_t missing;                      /* questions without a prediction */
    int64_t extra;                        /* predictions of unknown ids */
    bool has_best;                        /* null odds were given: the four below are set */
    double best_exact, best_exact_thresh; /* percent; odds */
    double best_f1, best_f1_thresh;
};

struct score_options {
    int64_t first, count; /* score examples first .. first + count - 1; count 0: all from first */
    const double *null_odds;           /* one a data example, finite; or NULL */
    const int64_t *odds_order;         /* examples in the order in which equal odds are walked;
                                 NULL: data order */
    int64_t odds_count;                /* entries of odds_order */
    double threshold;                  /* of the null odds; the script's default is 1.0 */
    const struct parts_runner *runner; /* scores questions; NULL: this thread alone */
};

/**
 * score_predictions() - score answers that are in memory.
 * @predictions: one a data example, NULL where there is none; "" is "no answer".
 * @options: {0} scores everything, without null odds.
 *
 * Return: ST_OK; ST_INVALID if the range is outside the data; ST_MEMORY.
 */
MUST_CHECK enum status score_predictions(struct score_result *result, const struct squad_data *data,
                                         const char *const *predictions,
                                         const struct score_options *options);

/**
 * score_files() - score the files that the official scripts take.
 * @predictions_path: {"id": "text", ...}.
 * @null_odds_path: {"id": number, ...}, or NULL; equal odds are walked in file order.
 *
 * Return: ST_OK; ST_IO; ST_CORRUPT (broken JSON: line and column; a prediction that is no string, a
 * value that is no number, a prediction without odds: the id); ST_MEMORY.
 */
MUST_CHECK enum status score_files(struct score_result *result, const struct squad_data *data,
                                   const char *predictions_path, const char *null_odds_path,
                                   double threshold);

C_END

#endif
