/*
 * io/answers.h - from start and end logits to answer texts.
 *
 * A question's context may be cut into overlapping windows, each with its own logits:
 *
 *     tokens    [CLS] question [SEP] c0 c1 c2 c3 [SEP]      token_count = 4 + question
 *                     context_first ^           ^ context_first + context_count - 1
 *     null      start[0] + end[0], the score of "no answer": the least over all windows
 *     span      start[i] + end[j], i <= j, both in the context, j - i + 1 <= max_answer_tokens,
 *               i among the n_best highest start logits of the window, j among those of the ends
 *
 * Of all windows the n_best highest spans are kept; with `null_answers` the null competes, and is
 * kept below them if it drops out. A list without any text gets "empty" (logits 0) in front. The
 * answer is the first text of the list; with `null_answers` it is "" where
 * null odds = null score - start - end of that text are above null_threshold.
 *
 * Scores are float sums, as the logits are. Ties: of equal logits in a window the later token ranks
 * first; of equal scores the earlier window, then the better start, then the better end; the null
 * last. Probabilities are a softmax in double over the scores of the list.
 *
 * The n_best rank over all tokens of the window; a window holds no padding.
 *
 * Threads: after answers_init() calls for different examples may run at the same time; the windows
 * of one example come in order. answers_add_window() allocates nothing. The other functions are for
 * one thread.
 *
 * Source: the behaviour of postprocess_qa_predictions() in Hugging Face's question answering
 * example, after run_squad of arXiv:1810.04805.
 */
#ifndef IO_ANSWERS_H
#define IO_ANSWERS_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/arena.h"
#include "engine/base/status.h"
#include "io/parts.h"
#include "io/squad.h"

C_BEGIN

enum { ANSWERS_MAX_BEST = 100 };

struct answer_options {
    int32_t n_best;            /* 1..ANSWERS_MAX_BEST, usually 20 */
    int32_t max_answer_tokens; /* >= 1, usually 30 */
    bool null_answers;         /* "no answer" is allowed: version 2.0 data */
    double null_threshold;     /* finite; usually 0 */
};

struct answer_window {
    int64_t example;     /* index in the data */
    int32_t token_count; /* > 0, with [CLS] first */
    int32_t context_first, context_count;
    const int32_t *offset_start, *offset_end; /* code points into the context, end exclusive; one
                                                 each context token; borrowed for the call */
};

struct answer_best { /* an entry of the n-best list */
    const char *text;
    int32_t start, end; /* code points of the context, end exclusive; 0, 0 without a span */
    float start_logit, end_logit, score;
    double probability;
};

struct answer_list {
    struct answer_best *best; /* in the pool */
    int32_t count;
};

struct answer_slot;
struct answer_span;

struct answers {                   /* zero-initialise */
    const struct squad_data *data; /* borrowed */
    int64_t first, count;          /* examples first .. first + count - 1 */
    struct answer_options options;
    struct answer_slot *slots; /* owned; one an example: its best spans so far */
    struct answer_span *spans; /* owned; n_best a slot */
    bool finished;
    struct pool pool;          /* texts and lists */
    const char **texts;        /* owned; data->example_count entries, NULL outside the range */
    double *null_odds;         /* owned; data->example_count entries, 0 outside the range */
    struct answer_list *lists; /* owned; count entries */
};

/**
 * answers_init() - make room for the answers of a range of examples.
 * @data: borrowed until answers_release().
 * @first, @count: the examples that will be answered; @count 0 means all from @first.
 *
 * Return: ST_OK; ST_INVALID (range or option out of bounds); ST_MEMORY. Memory: about 20 bytes
 * times n_best an example.
 */
MUST_CHECK enum status answers_init(struct answers *a, const struct squad_data *data, int64_t first,
                                    int64_t count, const struct answer_options *options);

/**
 * answers_add_window() - take the spans of one window.
 * @start, @end: logits, window->token_count each.
 *
 * Return: ST_OK; ST_INVALID: a logit that is not finite (or beyond 1e30), named with its question,
 * an example outside the range, or a window whose parts do not fit. Cost: O(token_count) when most
 * tokens are far from the best, plus n_best^2 spans.
 */
MUST_CHECK enum status answers_add_window(struct answers *a, const struct answer_window *window,
                                          const float *start, const float *end);

/**
 * answers_finish() - cut the texts, choose the answers; once, after the last window.
 *
 * Return: ST_OK; ST_INVALID: an example of the range had no window, or an offset is outside its
 * context; ST_MEMORY.
 */
MUST_CHECK enum status answers_finish(struct answers *a);

/** answers_texts() - the answers, one a data example, for score_predictions(); NULL outside the
 * range. Valid until answers_release(). Asserts answers_finish(). */
const char *const *answers_texts(const struct answers *a);

/** answers_null_odds() - null score less the best text's score, one a data example (0 outside the
 * range); NULL without null_answers. */
const double *answers_null_odds(const struct answers *a);

/** answers_list() - the n-best list of a data example in the range; @count entries, >= 1. */
const struct answer_best *answers_list(const struct answers *a, int64_t example, int32_t *count);

/**
 * answers_write_json() - write what the official and Hugging Face scripts write.
 * @predictions_path: {"id": "text"}.
 * @nbest_path: {"id": [{"text", "probability", "start_logit", "end_logit"}, ...]}, or NULL.
 * @null_odds_path: {"id": number}, or NULL; not written without null_answers.
 * @runner: makes the text; NULL: this thread alone.
 *
 * Each file is replaced as a whole. Return: ST_OK; ST_IO; ST_MEMORY.
 */
MUST_CHECK enum status answers_write_json(const struct answers *a, const char *predictions_path,
                                          const char *nbest_path, const char *null_odds_path,
                                          const struct parts_runner *runner);

void answers_release(struct answers *a);

C_END

#endif
