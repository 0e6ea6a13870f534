#include "io/answers.h"

#include <math.h>
#include <string.h>

#include "engine/base/file.h"
#include "io/codepoints.h"
#include "io/json_file.h"

struct answer_span {
    float score, start_logit, end_logit;
    int32_t from, to; /* code points of the context, end exclusive */
};

struct answer_slot { /* of one example */
    int32_t window_count, span_count;
    float null_score, null_start, null_end;
};

static const float LOGIT_MAX = 1e30F; /* sums of a few of these stay finite */
static const char NO_ANSWER_FOUND[] = "empty";

enum status answers_init(struct answers *a, const struct squad_data *data, int64_t first,
                         int64_t count, const struct answer_options *options)
{
    answers_release(a);
    if (first < 0 || first > data->example_count || count < 0 ||
        count > data->example_count - first)
        return FAIL(INVALID, "answers: examples %lld + %lld of %lld", (long long)first,
                    (long long)count, (long long)data->example_count);
    if (options->n_best < 1 || options->n_best > ANSWERS_MAX_BEST)
        return FAIL(INVALID, "answers: n_best %d, expected 1 to %d", options->n_best,
                    ANSWERS_MAX_BEST);
    if (options->max_answer_tokens < 1)
        return FAIL(INVALID, "answers: max_answer_tokens %d, expected at least 1",
                    options->max_answer_tokens);
    if (!isfinite(options->null_threshold))
        return FAIL(INVALID, "answers: null_threshold is not a finite number");
    enum status st;
    a->data = data;
    a->first = first;
    a->count = count > 0 ? count : data->example_count - first;
    a->options = *options;
    size_t examples = (size_t)data->example_count, range = (size_t)a->count;
    TRY_GOTO(st, out, mem_alloc(&a->slots, range * sizeof *a->slots));
    TRY_GOTO(st, out, mem_alloc(&a->spans, range * (size_t)options->n_best * sizeof *a->spans));
    TRY_GOTO(st, out, mem_alloc(&a->lists, range * sizeof *a->lists));
    TRY_GOTO(st, out, mem_alloc(&a->texts, examples * sizeof *a->texts));
    TRY_GOTO(st, out, mem_alloc(&a->null_odds, examples * sizeof *a->null_odds));
out:
    if (st != ST_OK)
        answers_release(a);
    return st;
}

static enum status check_logits(const struct answers *a, const struct answer_window *window,
                                const float *logits, const char *name)
{
    for (int32_t t = 0; t < window->token_count; t++)
        if (!(fabsf(logits[t]) <= LOGIT_MAX)) /* also false for NaN */
            return FAIL(INVALID, "question \"%s\": the %s logit of token %d is %g",
                        a->data->examples[window->example].id, name, t, (double)logits[t]);
    return ST_OK;
}

static enum status check_window(const struct answers *a, const struct answer_window *w)
{
    if (w->example < a->first || w->example >= a->first + a->count)
        return FAIL(INVALID, "answers: example %lld is outside %lld to %lld", (long long)w->example,
                    (long long)a->first, (long long)(a->first + a->count - 1));
    if (w->token_count < 1 || w->context_first < 0 || w->context_count < 0 ||
        w->context_first > w->token_count || w->context_count > w->token_count - w->context_first)
        return FAIL(INVALID, "answers: context %d + %d in a window of %d tokens", w->context_first,
                    w->context_count, w->token_count);
    return ST_OK;
}

/* The @limit tokens with the highest logits, best first; of equal ones the later first. */
static int32_t best_tokens(int32_t best[ANSWERS_MAX_BEST], const float *logits, int32_t token_count,
                           int32_t limit)
{
    int32_t count = 0;
    for (int32_t t = 0; t < token_count; t++) {
        if (count == limit && logits[t] < logits[best[count - 1]])
            continue;
        int32_t at = count < limit ? count++ : count - 1;
        for (; at > 0 && logits[best[at - 1]] <= logits[t]; at--)
            best[at] = best[at - 1];
        best[at] = t;
    }
    return count;
}

/* Keep the list sorted; a span equal to one that is there goes behind it. */
static void offer_span(struct answer_slot *slot, struct answer_span *spans, int32_t limit,
                       struct answer_span span)
{
    int32_t at = slot->span_count;
    while (at > 0 && spans[at - 1].score < span.score)
        at--;
    if (at == limit)
        return;
    if (slot->span_count < limit)
        slot->span_count++;
    memmove(spans + at + 1, spans + at, (size_t)(slot->span_count - 1 - at) * sizeof *spans);
    spans[at] = span;
}

static void take_null(struct answer_slot *slot, float start, float end)
{
    float score = start + end;
    if (slot->window_count > 0 && slot->null_score <= score)
        return;
    slot->null_score = score;
    slot->null_start = start;
    slot->null_end = end;
}

enum status answers_add_window(struct answers *a, const struct answer_window *window,
                               const float *start, const float *end)
{
    ASSERT(!a->finished);
    TRY(check_window(a, window));
    TRY(check_logits(a, window, start, "start"));
    TRY(check_logits(a, window, end, "end"));
    int64_t index = window->example - a->first;
    struct answer_slot *slot = &a->slots[index];
    struct answer_span *spans = a->spans + index * a->options.n_best;
    int32_t starts[ANSWERS_MAX_BEST], ends[ANSWERS_MAX_BEST];
    int32_t start_count = best_tokens(starts, start, window->token_count, a->options.n_best);
    int32_t end_count = best_tokens(ends, end, window->token_count, a->options.n_best);
    take_null(slot, start[0], end[0]);
    slot->window_count++;
    for (int32_t s = 0; s < start_count; s++) {
        int32_t from = starts[s] - window->context_first;
        if (from < 0 || from >= window->context_count)
            continue;
        for (int32_t e = 0; e < end_count; e++) {
            int32_t to = ends[e] - window->context_first;
            if (to < from || to >= window->context_count ||
                to - from >= a->options.max_answer_tokens)
                continue;
            offer_span(slot, spans, a->options.n_best,
                       (struct answer_span){.score = start[starts[s]] + end[ends[e]],
                                            .start_logit = start[starts[s]],
                                            .end_logit = end[ends[e]],
                                            .from = window->offset_start[from],
                                            .to = window->offset_end[to]});
        }
    }
    return ST_OK;
}

static enum status cut_text(struct answers *a, const char **out,
                            const struct squad_example *example, const struct codepoints *cp,
                            const struct answer_span *span)
{
    if (span->from < 0 || span->to < span->from || span->to > cp->count)
        return FAIL(INVALID, "question \"%s\": a span from %d to %d in %d code points", example->id,
                    span->from, span->to, cp->count);
    size_t from = codepoints_byte(cp, span->from), to = codepoints_byte(cp, span->to);
    char *text;
    TRY(pool_copy(&a->pool, &text, example->context + from, to - from));
    *out = text;
    return ST_OK;
}

static void insert_best(struct answer_list *list, int32_t at, struct answer_best entry)
{
    memmove(list->best + at + 1, list->best + at, (size_t)(list->count - at) * sizeof *list->best);
    list->best[at] = entry;
    list->count++;
}

/* The null stands behind spans of equal score; beyond the n_best it is kept as one more. */
static void insert_null(struct answer_list *list, const struct answer_slot *slot, int32_t n_best)
{
    int32_t at = list->count;
    while (at > 0 && list->best[at - 1].score < slot->null_score)
        at--;
    insert_best(list, at,
                (struct answer_best){.text = "",
                                     .start_logit = slot->null_start,
                                     .end_logit = slot->null_end,
                                     .score = slot->null_score});
    if (list->count > n_best && at < n_best)
        list->count = n_best;
}

static int32_t first_text(const struct answer_list *list)
{
    int32_t i = 0;
    while (i < list->count && list->best[i].text[0] == '\0')
        i++;
    return i;
}

static void set_probabilities(struct answer_list *list)
{
    double max = -INFINITY, sum = 0.0;
    for (int32_t i = 0; i < list->count; i++)
        max = fmax(max, (double)list->best[i].score);
    for (int32_t i = 0; i < list->count; i++)
        sum += list->best[i].probability = exp((double)list->best[i].score - max);
    for (int32_t i = 0; i < list->count; i++)
        list->best[i].probability /= sum;
}

static enum status finish_example(struct answers *a, int64_t index, const struct codepoints *cp)
{
    const struct answer_slot *slot = &a->slots[index];
    const struct answer_span *spans = a->spans + index * a->options.n_best;
    const struct squad_example *example = &a->data->examples[a->first + index];
    struct answer_list *list = &a->lists[index];
    if (slot->window_count == 0)
        return FAIL(INVALID, "question \"%s\" was never evaluated: it has no window", example->id);
    /* Room for the null and for the stand-in. */
    TRY(pool_take(&a->pool, &list->best, (size_t)(slot->span_count + 2) * sizeof *list->best));
    for (int32_t i = 0; i < slot->span_count; i++) {
        struct answer_best *best = &list->best[list->count++];
        best->start = spans[i].from;
        best->end = spans[i].to;
        best->score = spans[i].score;
        best->start_logit = spans[i].start_logit;
        best->end_logit = spans[i].end_logit;
        TRY(cut_text(a, &best->text, example, cp, &spans[i]));
    }
    if (a->options.null_answers)
        insert_null(list, slot, a->options.n_best);
    if (first_text(list) == list->count)
        insert_best(list, 0, (struct answer_best){.text = NO_ANSWER_FOUND});
    set_probabilities(list);
    const struct answer_best *best = &list->best[first_text(list)];
    const char *text = best->text;
    if (a->options.null_answers) {
        float odds = slot->null_score - best->start_logit - best->end_logit;
        a->null_odds[a->first + index] = (double)odds;
        if ((double)odds > a->options.null_threshold)
            text = "";
    }
    a->texts[a->first + index] = text;
    return ST_OK;
}

enum status answers_finish(struct answers *a)
{
    ASSERT(!a->finished);
    struct codepoints cp = {0};
    enum status st = ST_OK;
    for (int64_t i = 0; i < a->count; i++) {
        const char *context = a->data->examples[a->first + i].context;
        if (i == 0 || context != a->data->examples[a->first + i - 1].context)
            TRY_GOTO(st, out, codepoints_build(&cp, context));
        TRY_GOTO(st, out, finish_example(a, i, &cp));
    }
    a->finished = true;
out:
    codepoints_release(&cp);
    return st;
}

const char *const *answers_texts(const struct answers *a)
{
    ASSERT(a->finished);
    return a->texts;
}

const double *answers_null_odds(const struct answers *a)
{
    ASSERT(a->finished);
    return a->options.null_answers ? a->null_odds : NULL;
}

const struct answer_best *answers_list(const struct answers *a, int64_t example, int32_t *count)
{
    ASSERT(a->finished);
    ASSERT(example >= a->first && example < a->first + a->count);
    *count = a->lists[example - a->first].count;
    return a->lists[example - a->first].best;
}

/* ---- files ---------------------------------------------------------------------------------- */

static void text_value(struct json_stream *s, const struct answers *a, int64_t example)
{
    json_stream_string(s, a->texts[example]);
}

static void odds_value(struct json_stream *s, const struct answers *a, int64_t example)
{
    json_stream_real(s, a->null_odds[example]);
}

static void list_value(struct json_stream *s, const struct answers *a, int64_t example)
{
    const struct answer_list *list = &a->lists[example - a->first];
    json_stream_open(s, '[');
    for (int32_t i = 0; i < list->count; i++) {
        const struct answer_best *best = &list->best[i];
        json_stream_open(s, '{');
        json_stream_key(s, "text");
        json_stream_string(s, best->text);
        json_stream_key(s, "probability");
        json_stream_real(s, best->probability);
        json_stream_key(s, "start_logit");
        json_stream_real(s, (double)best->start_logit);
        json_stream_key(s, "end_logit");
        json_stream_real(s, (double)best->end_logit);
        json_stream_close(s, '}');
    }
    json_stream_close(s, ']');
}

/* Parts of a file on their way: made by all threads, put into it one after the other. */
enum { PART_EXAMPLES = 128, PARTS = 32 };

struct making {
    const struct answers *a;
    void (*value)(struct json_stream *, const struct answers *, int64_t);
    int64_t first; /* example of part 0 */
    struct text_buffer texts[PARTS];
};

static void make_part(void *context, int64_t part, int worker)
{
    struct making *m = context;
    const struct answers *a = m->a;
    struct json_stream s;
    int64_t first = m->first + part * PART_EXAMPLES, end = a->first + a->count;
    (void)worker;
    json_stream_part(&s, first == a->first);
    s.text = m->texts[part]; /* its memory, from an earlier part */
    s.text.bytes = 0;
    s.text.st = ST_OK;
    for (int64_t i = first; i < end && i < first + PART_EXAMPLES; i++) {
        json_stream_key(&s, a->data->examples[i].id);
        m->value(&s, a, i);
    }
    m->texts[part] = s.text;
}

static void make_parts(struct making *m, int64_t parts, const struct parts_runner *runner)
{
    parts_run(runner, make_part, m, parts);
    for (int64_t i = 0; i < parts; i++)
        if (m->texts[i].st != ST_OK) /* again, for this thread's message */
            make_part(m, i, 0);
}

static enum status put_values(struct file_writer *w, struct making *m,
                              const struct parts_runner *runner)
{
    int64_t end = m->a->first + m->a->count;
    TRY(file_put(w, "{", 1));
    for (; m->first < end; m->first += PARTS * PART_EXAMPLES) {
        int64_t parts = (end - m->first + PART_EXAMPLES - 1) / PART_EXAMPLES;
        parts = parts < PARTS ? parts : PARTS;
        make_parts(m, parts, runner);
        for (int64_t i = 0; i < parts; i++) {
            TRY(m->texts[i].st);
            TRY(file_put(w, m->texts[i].data, m->texts[i].bytes));
        }
    }
    return file_put(w, "\n}\n", 3);
}

static enum status write_values(const struct answers *a, const char *path,
                                void (*value)(struct json_stream *, const struct answers *,
                                              int64_t),
                                const struct parts_runner *runner)
{
    struct file_writer w;
    struct making m = {.a = a, .value = value, .first = a->first};
    TRY(file_begin(&w, path));
    enum status st = file_end(&w, put_values(&w, &m, runner));
    for (int i = 0; i < PARTS; i++)
        mem_free(&m.texts[i].data);
    return st;
}

enum status answers_write_json(const struct answers *a, const char *predictions_path,
                               const char *nbest_path, const char *null_odds_path,
                               const struct parts_runner *runner)
{
    ASSERT(a->finished);
    TRY(write_values(a, predictions_path, text_value, runner));
    if (nbest_path != NULL)
        TRY(write_values(a, nbest_path, list_value, runner));
    if (null_odds_path != NULL && a->options.null_answers)
        TRY(write_values(a, null_odds_path, odds_value, runner));
    return ST_OK;
}

void answers_release(struct answers *a)
{
    mem_free(&a->slots);
    mem_free(&a->spans);
    mem_free(&a->lists);
    mem_free(&a->texts);
    mem_free(&a->null_odds);
    pool_release(&a->pool);
    *a = (struct answers){0};
}
