/* Answers from logits: against a plain reference, at the edges, and through files to the score. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "engine/base/arena.h"
#include "engine/base/file.h"
#include "io/answers.h"
#include "io/json_file.h"
#include "io/score.h"
#include "io/squad.h"

static char scratch[] = "/tmp/tessera-answers-XXXXXX";
static char files[3][64]; /* predictions, nbest, null odds */

static int make_scratch(void **state)
{
    (void)state;
    if (mkdtemp(scratch) == NULL)
        return -1;
    snprintf(files[0], sizeof files[0], "%s/predictions.json", scratch);
    snprintf(files[1], sizeof files[1], "%s/nbest.json", scratch);
    snprintf(files[2], sizeof files[2], "%s/null_odds.json", scratch);
    return 0;
}

static int remove_scratch(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++)
        unlink(files[i]);
    return rmdir(scratch);
}

static void expect_message(const char *part)
{
    if (strstr(status_message(), part) == NULL)
        fail_msg("expected \"%s\" in the message:\n%s", part, status_message());
}

/* Two questions on "ab é cd": six code points and a blank, with a two-byte letter in the middle. */
static void load_small(struct squad_data *data)
{
    const char *text = "{\"data\": [{\"paragraphs\": [{\"context\": \"ab \\u00e9 cd\", \"qas\": ["
                       "{\"id\": \"q1\", \"question\": \"\", \"answers\": [{\"text\": \"ab\", "
                       "\"answer_start\": 0}]},"
                       "{\"id\": \"q2\", \"question\": \"\", \"is_impossible\": true}]}]}]}";
    *data = (struct squad_data){0};
    assert_int_equal(file_write(files[0], text, strlen(text)), ST_OK);
    assert_int_equal(squad_load(data, files[0]), ST_OK);
}

/* [CLS] [SEP] ab é cd [SEP] */
enum { SMALL_TOKENS = 6, SMALL_FIRST = 2, SMALL_COUNT = 3 };
static const int32_t small_start[] = {0, 3, 5}, small_end[] = {2, 4, 7};

static struct answer_window small_window(int64_t example)
{
    return (struct answer_window){.example = example,
                                  .token_count = SMALL_TOKENS,
                                  .context_first = SMALL_FIRST,
                                  .context_count = SMALL_COUNT,
                                  .offset_start = small_start,
                                  .offset_end = small_end};
}

static const struct answer_options PLAIN = {.n_best = 20, .max_answer_tokens = 30};
static const struct answer_options WITH_NULL = {
    .n_best = 20, .max_answer_tokens = 30, .null_answers = true};

/* The list of the first question after one window. */
static const struct answer_best *answer_one(struct answers *a, const struct squad_data *data,
                                            const struct answer_options *options,
                                            const float start[SMALL_TOKENS],
                                            const float end[SMALL_TOKENS], int32_t *count)
{
    struct answer_window window = small_window(0);
    *a = (struct answers){0};
    assert_int_equal(answers_init(a, data, 0, 1, options), ST_OK);
    assert_int_equal(answers_add_window(a, &window, start, end), ST_OK);
    assert_int_equal(answers_finish(a), ST_OK);
    return answers_list(a, 0, count);
}

/* ---- a plain reference ---------------------------------------------------------------------- */

/* The rule as the header tells it: all spans in a list, sorted by a stable sort, cut, and only then
 * looked at. It shares no code with io/answers.c. */
enum { MAX_TOKENS = 48, MAX_WINDOWS = 3, MAX_SPANS = MAX_WINDOWS * MAX_TOKENS * MAX_TOKENS + 2 };

struct plain_span {
    float score, start, end;
    int32_t from, to;
    bool stand_in;
};

struct plain {
    struct plain_span spans[MAX_SPANS];
    int32_t count;
    struct plain_span null;
    bool has_null;
};

static int compare_spans(const void *left, const void *right)
{
    const struct plain_span *const *a = left, *const *b = right;
    if ((*a)->score != (*b)->score)
        return (*a)->score > (*b)->score ? -1 : 1;
    return *a < *b ? -1 : 1;
}

static void stable_sort(struct plain *p)
{
    static struct plain_span copy[MAX_SPANS], *order[MAX_SPANS];
    for (int32_t i = 0; i < p->count; i++)
        order[i] = &p->spans[i];
    qsort(order, (size_t)p->count, sizeof order[0], compare_spans);
    for (int32_t i = 0; i < p->count; i++)
        copy[i] = *order[i];
    memcpy(p->spans, copy, (size_t)p->count * sizeof copy[0]);
}

/* How many tokens rank before token t: higher, or equal and later. */
static int32_t rank_of(const float *logits, int32_t count, int32_t t)
{
    int32_t before = 0;
    for (int32_t k = 0; k < count; k++)
        before += logits[k] > logits[t] || (logits[k] == logits[t] && k > t);
    return before;
}

static void plain_window(struct plain *p, const struct answer_window *w, const float *start,
                         const float *end, const struct answer_options *options)
{
    int32_t start_at[MAX_TOKENS], end_at[MAX_TOKENS];
    for (int32_t t = 0; t < w->token_count; t++) {
        start_at[rank_of(start, w->token_count, t)] = t;
        end_at[rank_of(end, w->token_count, t)] = t;
    }
    struct plain_span null = {.score = start[0] + end[0], .start = start[0], .end = end[0]};
    if (!p->has_null || p->null.score > null.score)
        p->null = null;
    p->has_null = true;
    for (int32_t s = 0; s < w->token_count && s < options->n_best; s++)
        for (int32_t e = 0; e < w->token_count && e < options->n_best; e++) {
            int32_t i = start_at[s], j = end_at[e], last = w->context_first + w->context_count;
            if (i < w->context_first || i >= last || j < w->context_first || j >= last || j < i ||
                j - i + 1 > options->max_answer_tokens)
                continue;
            p->spans[p->count++] = (struct plain_span){start[i] + end[j],
                                                       start[i],
                                                       end[j],
                                                       w->offset_start[i - w->context_first],
                                                       w->offset_end[j - w->context_first],
                                                       false};
        }
}

static void plain_finish(struct plain *p, const struct answer_options *options)
{
    bool null_in = false;
    if (options->null_answers)
        p->spans[p->count++] = p->null;
    stable_sort(p);
    if (p->count > options->n_best)
        p->count = options->n_best;
    for (int32_t i = 0; i < p->count; i++)
        null_in = null_in || p->spans[i].to == 0;
    if (options->null_answers && !null_in)
        p->spans[p->count++] = p->null;
    if (p->count == 0 || (p->count == 1 && p->spans[0].to == 0)) {
        memmove(p->spans + 1, p->spans, (size_t)p->count * sizeof p->spans[0]);
        p->spans[0] = (struct plain_span){.stand_in = true};
        p->count++;
    }
}

static void compare_with_plain(const struct answers *a, const struct plain *p,
                               const char *context_ascii)
{
    int32_t count, best = 0;
    const struct answer_best *list = answers_list(a, 0, &count);
    double sum = 0.0;
    assert_int_equal(count, p->count);
    for (int32_t i = 0; i < count; i++) {
        const struct plain_span *s = &p->spans[i];
        char text[256] = "empty";
        if (!s->stand_in)
            snprintf(text, sizeof text, "%.*s", (int)(s->to - s->from), context_ascii + s->from);
        assert_string_equal(list[i].text, text);
        assert_true(list[i].start_logit == s->start && list[i].end_logit == s->end);
        assert_true(list[i].score == s->score);
        double ratio = exp((double)s->score - (double)p->spans[0].score);
        assert_true(fabs(list[i].probability - list[0].probability * ratio) < 1e-12);
        sum += list[i].probability;
    }
    assert_true(fabs(sum - 1.0) < 1e-12);
    while (list[best].text[0] == '\0')
        best++;
    const char *answer = list[best].text;
    if (a->options.null_answers) {
        double odds = (double)(p->null.score - p->spans[best].start - p->spans[best].end);
        assert_true(answers_null_odds(a)[0] == odds);
        if (odds > a->options.null_threshold)
            answer = "";
    } else {
        assert_null(answers_null_odds(a));
    }
    assert_string_equal(answers_texts(a)[0], answer);
}

static int32_t below(int32_t n)
{
    return (int32_t)(random() % n);
}

/* Coarse logits, so that ties are common. */
static void random_logits(float *logits, int32_t count, int32_t levels)
{
    for (int32_t i = 0; i < count; i++)
        logits[i] = (float)(below(levels) - levels / 2) * 0.37F;
}

static struct answer_window random_window(int32_t *offset_start, int32_t *offset_end)
{
    struct answer_window w = {.token_count = 1 + below(MAX_TOKENS)};
    w.context_first = 1 + below(w.token_count);
    w.context_count = below(w.token_count - w.context_first + 1);
    w.offset_start = offset_start;
    w.offset_end = offset_end;
    int32_t base = below(20);
    for (int32_t i = 0; i < w.context_count; i++) {
        offset_start[i] = base + 3 * i;
        offset_end[i] = base + 3 * i + 1 + below(3);
    }
    return w;
}

static void random_logits_give_what_the_plain_rule_gives(void **state)
{
    (void)state;
    static struct plain p;
    struct squad_data data = {0};
    char context[3 * MAX_TOKENS + 64];
    struct squad_example example = {.id = "q", .context = context};
    data.examples = &example;
    data.example_count = 1;
    for (size_t i = 0; i < sizeof context; i++)
        context[i] = (char)('a' + i % 26);
    context[sizeof context - 1] = '\0';
    const char *seed = getenv("TEST_SEED");
    unsigned first_seed = seed != NULL ? (unsigned)strtoul(seed, NULL, 10) : 1;
    print_message("seeds from %u on; TEST_SEED= replays\n", first_seed);
    for (unsigned s = first_seed; s < first_seed + 3000; s++) {
        srandom(s);
        struct answer_options options = {.n_best = 1 + below(24),
                                         .max_answer_tokens = 1 + below(12),
                                         .null_answers = below(2) == 0,
                                         .null_threshold = below(9) * 0.5 - 2.0};
        struct answers a = {0};
        int32_t windows = 1 + below(MAX_WINDOWS), levels = below(2) == 0 ? 4 : 1000;
        memset(&p, 0, offsetof(struct plain, null) + sizeof p.null + sizeof p.has_null);
        assert_int_equal(answers_init(&a, &data, 0, 0, &options), ST_OK);
        for (int32_t k = 0; k < windows; k++) {
            float start[MAX_TOKENS], end[MAX_TOKENS];
            int32_t offset_start[MAX_TOKENS], offset_end[MAX_TOKENS];
            struct answer_window w = random_window(offset_start, offset_end);
            random_logits(start, w.token_count, levels);
            random_logits(end, w.token_count, levels);
            plain_window(&p, &w, start, end, &options);
            assert_int_equal(answers_add_window(&a, &w, start, end), ST_OK);
        }
        plain_finish(&p, &options);
        assert_int_equal(answers_finish(&a), ST_OK);
        compare_with_plain(&a, &p, context);
        answers_release(&a);
    }
}

/* ---- single rules --------------------------------------------------------------------------- */

static void texts_are_cut_at_code_points(void **state)
{
    (void)state;
    struct squad_data data;
    struct answers a;
    int32_t count;
    load_small(&data);
    const float start[] = {0, 0, 1, 5, 2, 0}, end[] = {0, 0, 0, 4, 3, 0};
    const struct answer_best *list = answer_one(&a, &data, &PLAIN, start, end, &count);
    assert_int_equal(count, 6); /* all i <= j of three tokens */
    assert_string_equal(list[0].text, "\xC3\xA9");
    assert_string_equal(list[1].text, "\xC3\xA9 cd");
    assert_string_equal(answers_texts(&a)[0], "\xC3\xA9");
    assert_null(answers_texts(&a)[1]); /* outside the range */
    answers_release(&a);
    squad_release(&data);
}

static void a_longer_span_than_allowed_is_left_out(void **state)
{
    (void)state;
    struct squad_data data;
    struct answers a;
    int32_t count;
    load_small(&data);
    struct answer_options options = {.n_best = 20, .max_answer_tokens = 1};
    const float start[] = {0, 0, 9, 0, 0, 0}, end[] = {0, 0, 0, 0, 9, 0};
    answer_one(&a, &data, &options, start, end, &count);
    assert_int_equal(count, 3);
    answers_release(&a);
    options.max_answer_tokens = 3;
    assert_string_equal(answer_one(&a, &data, &options, start, end, &count)[0].text,
                        "ab \xC3\xA9 cd");
    answers_release(&a);
    squad_release(&data);
}

static void equal_scores_keep_the_documented_order(void **state)
{
    (void)state;
    struct squad_data data;
    struct answers a;
    int32_t count;
    load_small(&data);
    const float zero[SMALL_TOKENS] = {0};
    const struct answer_best *list = answer_one(&a, &data, &WITH_NULL, zero, zero, &count);
    const char *order[] = {"cd",          "\xC3\xA9 cd", "\xC3\xA9", "ab \xC3\xA9 cd",
                           "ab \xC3\xA9", "ab",          ""};
    assert_int_equal(count, 7);
    for (int32_t i = 0; i < count; i++)
        assert_string_equal(list[i].text, order[i]);
    assert_string_equal(answers_texts(&a)[0], "cd"); /* odds 0 are not above threshold 0 */
    assert_true(answers_null_odds(&a)[0] == 0.0);
    answers_release(&a);
    squad_release(&data);
}

static void without_a_valid_span_the_answer_is_empty(void **state)
{
    (void)state;
    struct squad_data data;
    struct answers a;
    int32_t count;
    load_small(&data);
    struct answer_options options = PLAIN;
    options.n_best = 1; /* the best end lies before the best start */
    const float start[] = {1, 0, 0, 0, 9, 0}, end[] = {1, 0, 9, 0, 0, 0};
    const struct answer_best *list = answer_one(&a, &data, &options, start, end, &count);
    assert_int_equal(count, 1);
    assert_string_equal(list[0].text, "empty");
    assert_true(list[0].probability == 1.0 && list[0].score == 0.0F);
    answers_release(&a);
    options.null_answers = true;
    options.null_threshold = 2.5;
    list = answer_one(&a, &data, &options, start, end, &count);
    assert_int_equal(count, 2);
    assert_string_equal(list[0].text, "empty");
    assert_string_equal(list[1].text, "");
    assert_true(answers_null_odds(&a)[0] == 2.0);
    assert_string_equal(answers_texts(&a)[0], "empty");
    answers_release(&a);
    squad_release(&data);
}

static void b108_the_null_is_the_least_of_the_windows_and_stays_in_the_list(void **state)
{
    (void)state;
    struct squad_data data;
    struct answers a = {0};
    int32_t count;
    load_small(&data);
    struct answer_options options = {.n_best = 2, .max_answer_tokens = 30, .null_answers = true};
    const float high[] = {8, 0, 3, 2, 1, 0}, low[] = {-8, 0, 2, 2, 2, 0};
    struct answer_window window = small_window(0);
    assert_int_equal(answers_init(&a, &data, 0, 1, &options), ST_OK);
    assert_int_equal(answers_add_window(&a, &window, high, high), ST_OK);
    assert_int_equal(answers_add_window(&a, &window, low, low), ST_OK);
    assert_int_equal(answers_finish(&a), ST_OK);
    const struct answer_best *list = answers_list(&a, 0, &count);
    assert_int_equal(count, 3);
    assert_string_equal(list[2].text, "");
    assert_true(list[2].score == -16.0F && list[2].start_logit == -8.0F);
    assert_true(answers_null_odds(&a)[0] == -16.0 - 6.0); /* "ab" of the first window: 3 + 3 */
    assert_string_equal(answers_texts(&a)[0], "ab");
    answers_release(&a);
    squad_release(&data);
}

static void b108_the_threshold_decides_and_equal_is_not_above(void **state)
{
    (void)state;
    struct squad_data data;
    struct answers a;
    int32_t count;
    load_small(&data);
    const float logits[] = {2, 0, 1, 0, 0, 0}; /* null 4, "ab" 2: odds 2 */
    struct answer_options options = WITH_NULL;
    const double thresholds[] = {1.75, 2.0, 2.25};
    const char *answers[] = {"", "ab", "ab"};
    for (int i = 0; i < 3; i++) {
        options.null_threshold = thresholds[i];
        answer_one(&a, &data, &options, logits, logits, &count);
        assert_true(answers_null_odds(&a)[0] == 2.0);
        assert_string_equal(answers_texts(&a)[0], answers[i]);
        answers_release(&a);
    }
    squad_release(&data);
}

/* ---- bad input ------------------------------------------------------------------------------ */

static void logits_that_are_not_finite_are_refused_by_name(void **state)
{
    (void)state;
    struct squad_data data;
    struct answers a = {0};
    const float good[SMALL_TOKENS] = {0}, bad[] = {NAN, INFINITY, -INFINITY, 2e30F};
    load_small(&data);
    assert_int_equal(answers_init(&a, &data, 0, 0, &PLAIN), ST_OK);
    struct answer_window window = small_window(1);
    for (int i = 0; i < 4; i++) {
        float logits[SMALL_TOKENS] = {0};
        logits[3] = bad[i];
        assert_int_equal(answers_add_window(&a, &window, logits, good), ST_INVALID);
        expect_message("question \"q2\": the start logit of token 3 is");
        assert_int_equal(answers_add_window(&a, &window, good, logits), ST_INVALID);
        expect_message("question \"q2\": the end logit of token 3 is");
    }
    answers_release(&a);
    squad_release(&data);
}

static void windows_and_options_that_do_not_fit_are_refused(void **state)
{
    (void)state;
    struct squad_data data;
    struct answers a = {0};
    const float zero[SMALL_TOKENS] = {0};
    load_small(&data);
    struct answer_options options = PLAIN;
    options.n_best = ANSWERS_MAX_BEST + 1;
    assert_int_equal(answers_init(&a, &data, 0, 0, &options), ST_INVALID);
    options = PLAIN;
    options.max_answer_tokens = 0;
    assert_int_equal(answers_init(&a, &data, 0, 0, &options), ST_INVALID);
    options = PLAIN;
    options.null_threshold = NAN;
    assert_int_equal(answers_init(&a, &data, 0, 0, &options), ST_INVALID);
    assert_int_equal(answers_init(&a, &data, 1, 2, &PLAIN), ST_INVALID);
    assert_int_equal(answers_init(&a, &data, 1, 1, &PLAIN), ST_OK);
    struct answer_window window = small_window(0);
    assert_int_equal(answers_add_window(&a, &window, zero, zero), ST_INVALID);
    expect_message("example 0 is outside 1 to 1");
    window = small_window(1);
    window.context_count = SMALL_TOKENS;
    assert_int_equal(answers_add_window(&a, &window, zero, zero), ST_INVALID);
    window = small_window(1);
    window.token_count = 0;
    assert_int_equal(answers_add_window(&a, &window, zero, zero), ST_INVALID);
    answers_release(&a);
    squad_release(&data);
}

static void an_example_without_a_window_is_an_error(void **state)
{
    (void)state;
    struct squad_data data;
    struct answers a = {0};
    const float zero[SMALL_TOKENS] = {0};
    struct answer_window window = small_window(0);
    load_small(&data);
    assert_int_equal(answers_init(&a, &data, 0, 0, &PLAIN), ST_OK);
    assert_int_equal(answers_add_window(&a, &window, zero, zero), ST_OK);
    assert_int_equal(answers_finish(&a), ST_INVALID);
    expect_message("question \"q2\" was never evaluated");
    answers_release(&a);
    squad_release(&data);
}

static void an_offset_outside_the_context_is_an_error(void **state)
{
    (void)state;
    struct squad_data data;
    struct answers a = {0};
    const float zero[SMALL_TOKENS] = {0};
    const int32_t far[] = {2, 4, 8};
    struct answer_window window = small_window(0);
    window.offset_end = far;
    load_small(&data);
    assert_int_equal(answers_init(&a, &data, 0, 1, &PLAIN), ST_OK);
    assert_int_equal(answers_add_window(&a, &window, zero, zero), ST_OK);
    assert_int_equal(answers_finish(&a), ST_INVALID);
    expect_message("question \"q1\": a span from 5 to 8 in 7 code points");
    answers_release(&a);
    squad_release(&data);
}

/* ---- whole runs ----------------------------------------------------------------------------- */

enum { CONTEXT_TOKENS = 60, WINDOW_TOKENS = CONTEXT_TOKENS + 3 };

/* A "model" that knows: tokens are single code points of the first CONTEXT_TOKENS around the
 * answer, logits point at the answer or, with no answer, at [CLS]. */
static void add_perfect_window(struct answers *a, const struct squad_data *data, int64_t i)
{
    const struct squad_example *e = &data->examples[i];
    float start[WINDOW_TOKENS] = {0}, end[WINDOW_TOKENS] = {0};
    int32_t offset_start[CONTEXT_TOKENS], offset_end[CONTEXT_TOKENS];
    int32_t base = e->answer_count > 0 ? e->answers[0].start : 0, length = 0;
    if (e->answer_count > 0)
        for (const char *c = e->answers[0].text; *c != '\0'; c++)
            length += ((unsigned char)*c & 0xC0) != 0x80;
    int32_t tokens = length > 0 ? length : 1;
    tokens = tokens < CONTEXT_TOKENS ? tokens : CONTEXT_TOKENS;
    /* The last token takes what is left of a long answer. */
    for (int32_t t = 0; t < tokens; t++) {
        offset_start[t] = base + t;
        offset_end[t] = base + t + 1;
    }
    offset_end[tokens - 1] = base + (length > 0 ? length : 12); /* 12: more than an article */
    start[2] = end[2 + tokens - 1] = 6.5F;
    start[0] = end[0] = e->answer_count > 0 ? -3.25F : 9.125F;
    struct answer_window w = {.example = i,
                              .token_count = tokens + 3,
                              .context_first = 2,
                              .context_count = tokens,
                              .offset_start = offset_start,
                              .offset_end = offset_end};
    assert_int_equal(answers_add_window(a, &w, start, end), ST_OK);
}

static void run_perfect(struct answers *a, const struct squad_data *data, bool null_answers)
{
    struct answer_options options = {
        .n_best = 20, .max_answer_tokens = CONTEXT_TOKENS, .null_answers = null_answers};
    assert_int_equal(answers_init(a, data, 0, 0, &options), ST_OK);
    mem_seal(); /* a window allocates nothing */
    for (int64_t i = 0; i < data->example_count; i++)
        add_perfect_window(a, data, i);
    mem_unseal();
    assert_int_equal(answers_finish(a), ST_OK);
}

static void b108_a_perfect_model_scores_100_with_and_without_answer(void **state)
{
    (void)state;
    struct squad_data data = {0};
    struct answers a = {0};
    struct score_result r;
    assert_int_equal(squad_load(&data, "data/squad/squad-v2-mini.json"), ST_OK);
    run_perfect(&a, &data, true);
    struct score_options options = {.null_odds = answers_null_odds(&a), .threshold = 0.0};
    assert_int_equal(score_predictions(&r, &data, answers_texts(&a), &options), ST_OK);
    assert_true(r.has_answer.exact == 100.0 && r.no_answer.exact == 100.0);
    assert_int_equal(r.has_answer.total, 157);
    assert_int_equal(r.no_answer.total, 121);
    assert_true(r.best_exact == 100.0 && r.best_f1 == 100.0);
    answers_release(&a);
    run_perfect(&a, &data, false); /* the null may not win: every impossible question is wrong */
    assert_int_equal(score_predictions(&r, &data, answers_texts(&a), &(struct score_options){0}),
                     ST_OK);
    assert_true(r.has_answer.exact == 100.0 && r.no_answer.exact == 0.0);
    answers_release(&a);
    squad_release(&data);
}

static double number(const json_t *object, const char *key)
{
    assert_true(json_is_real(json_object_get(object, key)));
    return json_real_value(json_object_get(object, key));
}

static void compare_files(const struct answers *a, const struct squad_data *data)
{
    json_t *roots[3];
    for (int i = 0; i < 3; i++) {
        assert_int_equal(json_file_read(&roots[i], files[i], NULL), ST_OK);
        assert_int_equal(json_object_size(roots[i]), data->example_count);
    }
    int64_t i = 0;
    const char *id;
    json_t *value;
    json_object_foreach(roots[0], id, value)
    {
        assert_string_equal(id, data->examples[i].id); /* data order */
        assert_string_equal(json_string_value(value), answers_texts(a)[i]);
        assert_true(number(roots[2], id) == answers_null_odds(a)[i]);
        int32_t count;
        const struct answer_best *list = answers_list(a, i, &count);
        const json_t *entries = json_object_get(roots[1], id);
        assert_int_equal(json_array_size(entries), count);
        for (int32_t k = 0; k < count; k++) {
            const json_t *entry = json_array_get(entries, (size_t)k);
            assert_string_equal(json_string_value(json_object_get(entry, "text")), list[k].text);
            assert_true(number(entry, "probability") == list[k].probability);
            assert_true(number(entry, "start_logit") == (double)list[k].start_logit);
            assert_true(number(entry, "end_logit") == (double)list[k].end_logit);
            assert_int_equal(json_object_size(entry), 4);
        }
        i++;
    }
    for (int k = 0; k < 3; k++)
        json_decref(roots[k]);
}

static void the_files_hold_what_memory_holds_and_score_the_same(void **state)
{
    (void)state;
    struct squad_data data = {0};
    struct answers a = {0};
    struct score_result from_memory, from_files;
    assert_int_equal(squad_load(&data, "data/squad/squad-v2-mini.json"), ST_OK);
    run_perfect(&a, &data, true);
    assert_int_equal(answers_write_json(&a, files[0], files[1], files[2], NULL), ST_OK);
    compare_files(&a, &data);
    struct score_options options = {.null_odds = answers_null_odds(&a), .threshold = 1.0};
    assert_int_equal(score_predictions(&from_memory, &data, answers_texts(&a), &options), ST_OK);
    assert_int_equal(score_files(&from_files, &data, files[0], files[2], 1.0), ST_OK);
    assert_memory_equal(&from_memory.all, &from_files.all, sizeof from_files.all);
    assert_true(from_memory.best_f1_thresh == from_files.best_f1_thresh);
    assert_int_equal(answers_write_json(&a, "/no-such-folder/p.json", NULL, NULL, NULL), ST_IO);
    answers_release(&a);
    squad_release(&data);
}

/* In an order that no thread would take. */
static void run_backwards(void *context, void (*body)(void *of_body, int64_t part, int worker),
                          void *of_body, int64_t parts)
{
    int64_t *count = context;
    for (int64_t part = parts; part-- > 0; ++*count)
        body(of_body, part, 0);
}

static void threads_make_the_same_files(void **state)
{
    (void)state;
    struct squad_data data = {0};
    struct answers a = {0};
    struct file_text alone, shared;
    int64_t count = 0;
    const struct parts_runner threads = {run_backwards, &count};
    assert_int_equal(squad_load(&data, "data/squad/squad-v2-mini.json"), ST_OK);
    run_perfect(&a, &data, true);
    for (int k = 0; k < 3; k++) {
        const char *nbest = k == 1 ? files[1] : NULL, *odds = k == 2 ? files[2] : NULL;
        assert_int_equal(answers_write_json(&a, files[0], nbest, odds, NULL), ST_OK);
        assert_int_equal(file_read(&alone, files[k]), ST_OK);
        assert_int_equal(answers_write_json(&a, files[0], nbest, odds, &threads), ST_OK);
        assert_int_equal(file_read(&shared, files[k]), ST_OK);
        assert_int_equal(alone.bytes, shared.bytes);
        assert_memory_equal(alone.data, shared.data, alone.bytes);
        mem_free(&alone.data);
        mem_free(&shared.data);
    }
    assert_true(count > 10); /* several parts a file */
    answers_release(&a);
    squad_release(&data);
}

static void every_failing_allocation_is_reported(void **state)
{
    (void)state;
    struct squad_data data;
    const float zero[SMALL_TOKENS] = {0};
    load_small(&data);
    int64_t before = mem_live_bytes(), k = 0;
    enum status st = ST_MEMORY;
    while (st != ST_OK) {
        struct answers a = {0};
        mem_fail_at(++k);
        st = answers_init(&a, &data, 0, 0, &WITH_NULL);
        for (int64_t i = 0; i < 2 && st == ST_OK; i++) {
            struct answer_window window = small_window(i);
            st = answers_add_window(&a, &window, zero, zero);
        }
        if (st == ST_OK)
            st = answers_finish(&a);
        if (st == ST_OK)
            st = answers_write_json(&a, files[0], files[1], files[2], NULL);
        mem_fail_at(0);
        assert_true(st == ST_OK || st == ST_MEMORY);
        answers_release(&a);
        answers_release(&a);
        assert_int_equal(mem_live_bytes(), before);
    }
    assert_true(k > 7);
    squad_release(&data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_logits_give_what_the_plain_rule_gives),
        cmocka_unit_test(texts_are_cut_at_code_points),
        cmocka_unit_test(a_longer_span_than_allowed_is_left_out),
        cmocka_unit_test(equal_scores_keep_the_documented_order),
        cmocka_unit_test(without_a_valid_span_the_answer_is_empty),
        cmocka_unit_test(b108_the_null_is_the_least_of_the_windows_and_stays_in_the_list),
        cmocka_unit_test(b108_the_threshold_decides_and_equal_is_not_above),
        cmocka_unit_test(logits_that_are_not_finite_are_refused_by_name),
        cmocka_unit_test(windows_and_options_that_do_not_fit_are_refused),
        cmocka_unit_test(an_example_without_a_window_is_an_error),
        cmocka_unit_test(an_offset_outside_the_context_is_an_error),
        cmocka_unit_test(b108_a_perfect_model_scores_100_with_and_without_answer),
        cmocka_unit_test(the_files_hold_what_memory_holds_and_score_the_same),
        cmocka_unit_test(threads_make_the_same_files),
        cmocka_unit_test(every_failing_allocation_is_reported),
    };
    return cmocka_run_group_tests(tests, make_scratch, remove_scratch);
}
