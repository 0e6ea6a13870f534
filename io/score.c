#include "io/score.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>

#include "io/json_file.h"
#include "io/score_text.h"

/* Raw scores of one question, before any threshold. */
struct question {
    double exact, f1; /* in [0, 1] */
    bool counted, has_answer, answered;
};

struct texts { /* reused from question to question */
    struct score_text prediction, gold;
};

static void take_best(struct question *q, const struct texts *t, double both_empty)
{
    double f1 = score_text_f1(&t->gold, &t->prediction, both_empty);
    if (score_text_exact(&t->gold, &t->prediction))
        q->exact = 1.0;
    if (f1 > q->f1)
        q->f1 = f1;
}

static enum status score_question(struct question *q, struct texts *t,
                                  const struct squad_example *example, const char *prediction,
                                  bool unanswerable)
{
    const double both_empty = unanswerable ? 1.0 : 0.0;
    *q = (struct question){.has_answer = example->answer_count > 0};
    q->counted = prediction != NULL || !unanswerable;
    if (prediction == NULL)
        return ST_OK;
    q->answered = prediction[0] != '\0';
    TRY(score_text_build(&t->prediction, prediction));
    bool any = false;
    for (int32_t i = 0; i < example->answer_count; i++) {
        TRY(score_text_build(&t->gold, example->answers[i].text));
        if (unanswerable && t->gold.word_count == 0)
            continue;
        any = true;
        take_best(q, t, both_empty);
    }
    if (!any && unanswerable) {
        TRY(score_text_build(&t->gold, ""));
        take_best(q, t, both_empty);
    }
    return ST_OK;
}

/* The questions of one call, in parts for several threads. */
enum { PART_QUESTIONS = 256 };

struct scoring {
    const struct squad_data *data;
    const char *const *predictions; /* borrowed, as the data */
    int64_t first, count;
    struct question *questions; /* owned; count */
    enum status *st;            /* owned; one a part */
};

static enum status score_questions(struct scoring *s, struct texts *texts, int64_t part)
{
    int64_t end = (part + 1) * PART_QUESTIONS;
    for (int64_t i = part * PART_QUESTIONS; i < end && i < s->count; i++)
        TRY(score_question(&s->questions[i], texts, &s->data->examples[s->first + i],
                           s->predictions[s->first + i], s->data->unanswerable));
    return ST_OK;
}

static void score_some(void *context, int64_t part, int worker)
{
    struct scoring *s = context;
    struct texts texts = {0};
    (void)worker;
    s->st[part] = score_questions(s, &texts, part);
    score_text_release(&texts.gold);
    score_text_release(&texts.prediction);
}

static enum status score_all(struct scoring *s, const struct parts_runner *runner)
{
    int64_t parts = (s->count + PART_QUESTIONS - 1) / PART_QUESTIONS;
    TRY(mem_alloc(&s->questions, (size_t)s->count * sizeof *s->questions));
    TRY(mem_alloc(&s->st, (size_t)parts * sizeof *s->st));
    parts_run(runner, score_some, s, parts);
    for (int64_t i = 0; i < parts; i++)
        if (s->st[i] != ST_OK) /* the words may be another thread's */
            return FAIL(MEMORY, "out of memory while scoring answers");
    return ST_OK;
}

static void part_add(struct score_part *part, double exact, double f1)
{
    part->exact += exact;
    part->f1 += f1;
    part->total++;
}

static void part_finish(struct score_part *part)
{
    if (part->total == 0)
        return;
    part->exact = 100.0 * part->exact / (double)part->total;
    part->f1 = 100.0 * part->f1 / (double)part->total;
}

static void sum_up(struct score_result *result, const struct question *questions, int64_t first,
                   int64_t count, const struct score_options *options)
{
    for (int64_t i = 0; i < count; i++) {
        struct question q = questions[i];
        if (!q.counted)
            continue;
        if (options->null_odds != NULL && options->null_odds[first + i] > options->threshold)
            q.exact = q.f1 = q.has_answer ? 0.0 : 1.0;
        part_add(&result->all, q.exact, q.f1);
        part_add(q.has_answer ? &result->has_answer : &result->no_answer, q.exact, q.f1);
    }
    part_finish(&result->all);
    part_finish(&result->has_answer);
    part_finish(&result->no_answer);
}

struct odds_entry {
    double odds;
    int64_t ordinal, question; /* the ordinal makes the order of equal odds stable */
};

static int compare_odds(const void *left, const void *right)
{
    const struct odds_entry *a = left, *b = right;
    if (a->odds != b->odds)
        return a->odds < b->odds ? -1 : 1;
    return a->ordinal < b->ordinal ? -1 : 1;
}

/* Start from "no answer" everywhere; each step up the odds answers one more question. */
static void search_best(double *best, double *threshold, const struct question *questions,
                        const struct odds_entry *entries, int64_t entry_count, double no_answers,
                        bool use_f1)
{
    double score = no_answers;
    *best = score;
    *threshold = 0.0;
    for (int64_t i = 0; i < entry_count; i++) {
        const struct question *q = &questions[entries[i].question];
        if (q->has_answer)
            score += use_f1 ? q->f1 : q->exact;
        else if (q->answered)
            score -= 1.0;
        if (score > *best) {
            *best = score;
            *threshold = entries[i].odds;
        }
    }
}

static enum status find_best(struct score_result *result, const struct question *questions,
                             int64_t first, int64_t count, const struct score_options *options)
{
    int64_t order_count = options->odds_order != NULL ? options->odds_count : count;
    struct odds_entry *entries;
    TRY(mem_alloc(&entries, (size_t)order_count * sizeof *entries));
    int64_t n = 0;
    for (int64_t k = 0; k < order_count; k++) {
        int64_t i = options->odds_order != NULL ? options->odds_order[k] - first : k;
        if (i >= 0 && i < count && questions[i].counted)
            entries[n++] = (struct odds_entry){options->null_odds[first + i], k, i};
    }
    if (n > 1)
        qsort(entries, (size_t)n, sizeof *entries, compare_odds);
    double no_answers = 0.0, counted = (double)result->all.total;
    for (int64_t i = 0; i < count; i++)
        no_answers += !questions[i].has_answer;
    search_best(&result->best_exact, &result->best_exact_thresh, questions, entries, n, no_answers,
                false);
    search_best(&result->best_f1, &result->best_f1_thresh, questions, entries, n, no_answers, true);
    result->best_exact = counted > 0 ? 100.0 * result->best_exact / counted : 0.0;
    result->best_f1 = counted > 0 ? 100.0 * result->best_f1 / counted : 0.0;
    result->has_best = true;
    mem_free(&entries);
    return ST_OK;
}

enum status score_predictions(struct score_result *result, const struct squad_data *data,
                              const char *const *predictions, const struct score_options *options)
{
    int64_t first = options->first;
    *result = (struct score_result){0};
    if (first < 0 || first > data->example_count || options->count < 0 ||
        options->count > data->example_count - first)
        return FAIL(INVALID, "score: examples %lld + %lld of %lld", (long long)first,
                    (long long)options->count, (long long)data->example_count);
    int64_t count = options->count > 0 ? options->count : data->example_count - first;
    struct scoring s = {.data = data, .predictions = predictions, .first = first, .count = count};
    enum status st;
    TRY_GOTO(st, out, score_all(&s, options->runner));
    for (int64_t i = 0; i < count; i++)
        result->missing += predictions[first + i] == NULL;
    sum_up(result, s.questions, first, count, options);
    if (options->null_odds != NULL)
        TRY_GOTO(st, out, find_best(result, s.questions, first, count, options));
out:
    mem_free(&s.st);
    mem_free(&s.questions);
    return st;
}

/* ---- files ---------------------------------------------------------------------------------- */

struct score_input {
    json_t *predictions, *null_odds, *index; /* owned; index: id -> example */
    const char **texts;                      /* borrowed from predictions */
    double *odds;
    int64_t *order;
    int64_t order_count, extra;
};

static enum status index_ids(struct score_input *in, const struct squad_data *data)
{
    in->index = json_object();
    for (int64_t i = 0; i < data->example_count; i++)
        if (json_object_set_new(in->index, data->examples[i].id, json_integer(i)) != 0)
            return FAIL(MEMORY, "out of memory: index of %lld ids", (long long)data->example_count);
    return ST_OK;
}

static enum status read_object(json_t **root, const char *path)
{
    TRY(json_file_read(root, path, NULL));
    if (!json_is_object(*root))
        return FAIL(CORRUPT, "%s: expected an object from id to value, found %s", path,
                    json_kind(*root));
    return ST_OK;
}

static enum status take_predictions(struct score_input *in, const struct squad_data *data,
                                    const char *path)
{
    const char *id;
    json_t *value;
    TRY(read_object(&in->predictions, path));
    TRY(mem_alloc(&in->texts, (size_t)data->example_count * sizeof *in->texts));
    json_object_foreach(in->predictions, id, value)
    {
        if (!json_is_string(value))
            return FAIL(CORRUPT, "%s: prediction \"%s\": expected a string, found %s", path, id,
                        json_kind(value));
        const json_t *example = json_object_get(in->index, id);
        if (example != NULL)
            in->texts[json_integer_value(example)] = json_string_value(value);
        else
            in->extra++;
    }
    return ST_OK;
}

static enum status take_odds(struct score_input *in, const struct squad_data *data,
                             const char *path)
{
    const char *id;
    json_t *value;
    TRY(read_object(&in->null_odds, path));
    TRY(mem_alloc(&in->odds, (size_t)data->example_count * sizeof *in->odds));
    TRY(mem_alloc(&in->order, (size_t)data->example_count * sizeof *in->order));
    json_object_foreach(in->null_odds, id, value)
    {
        double odds = json_number_value(value);
        if (!json_is_number(value) || !isfinite(odds))
            return FAIL(CORRUPT, "%s: null odds of \"%s\": expected a number, found %s", path, id,
                        json_kind(value));
        const json_t *example = json_object_get(in->index, id);
        if (example == NULL)
            continue;
        in->odds[json_integer_value(example)] = odds;
        in->order[in->order_count++] = json_integer_value(example);
    }
    for (int64_t i = 0; i < data->example_count; i++)
        if (in->texts[i] != NULL && json_object_get(in->null_odds, data->examples[i].id) == NULL)
            return FAIL(CORRUPT, "%s: \"%s\" has a prediction, but no null odds here", path,
                        data->examples[i].id);
    return ST_OK;
}

enum status score_files(struct score_result *result, const struct squad_data *data,
                        const char *predictions_path, const char *null_odds_path, double threshold)
{
    struct score_input in = {0};
    enum status st;
    TRY_GOTO(st, out, index_ids(&in, data));
    TRY_GOTO(st, out, take_predictions(&in, data, predictions_path));
    if (null_odds_path != NULL)
        TRY_GOTO(st, out, take_odds(&in, data, null_odds_path));
    struct score_options options = {.null_odds = in.odds,
                                    .odds_order = in.order,
                                    .odds_count = in.order_count,
                                    .threshold = threshold};
    TRY_GOTO(st, out, score_predictions(result, data, in.texts, &options));
    result->extra = in.extra;
out:
    mem_free(&in.order);
    mem_free(&in.odds);
    mem_free(&in.texts);
    json_decref(in.index);
    json_decref(in.null_odds);
    json_decref(in.predictions);
    return st;
}
