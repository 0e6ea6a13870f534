#include "io/features.h"

#include <string.h>
#include <zlib.h>

#include "engine/base/arena.h"
#include "engine/base/text_buffer.h"
#include "io/codepoints.h"

enum { SPECIAL_TOKENS = 3 }; /* [CLS], and [SEP] twice */

/* ---- tokens of all texts --------------------------------------------------------------------- */

struct texts {
    struct token_list contexts, questions; /* tokens of all of them, end to end */
    int64_t *context_first;                /* owned; context_count + 1 places in contexts */
    int64_t *question_first;               /* owned; example_count + 1 places in questions */
};

static void texts_release(struct texts *texts)
{
    token_list_release(&texts->contexts);
    token_list_release(&texts->questions);
    mem_free(&texts->context_first);
    mem_free(&texts->question_first);
}

/*
 * White space in front of a question is no token, so it needs no stripping. Questions are cut here,
 * contexts are not.
 */
static enum status tokenize_texts(struct texts *texts, const struct squad_data *data,
                                  const struct wordpiece *tok, int64_t max_query_length)
{
    size_t contexts = (size_t)data->context_count + 1, questions = (size_t)data->example_count + 1;
    TRY(mem_alloc(&texts->context_first, contexts * sizeof *texts->context_first));
    TRY(mem_alloc(&texts->question_first, questions * sizeof *texts->question_first));
    int64_t context_count = 0;
    for (int64_t i = 0; i < data->example_count; i++) {
        const struct squad_example *example = &data->examples[i];
        if (example->context_index == context_count) {
            const char *context = example->context;
            ASSERT(context_count < data->context_count);
            TRY(wordpiece_tokenize(tok, &texts->contexts, context, strlen(context)));
            texts->context_first[++context_count] = (int64_t)texts->contexts.count;
        }
        ASSERT(example->context_index == context_count - 1);
        const char *question = example->question;
        TRY(wordpiece_tokenize(tok, &texts->questions, question, strlen(question)));
        size_t limit = (size_t)(texts->question_first[i] + max_query_length);
        if (max_query_length > 0 && texts->questions.count > limit)
            texts->questions.count = limit;
        texts->question_first[i + 1] = (int64_t)texts->questions.count;
    }
    return ST_OK;
}

/* ---- windows --------------------------------------------------------------------------------- */

struct cut { /* how one question's context is cut */
    int64_t question_count, context_count;
    int64_t room; /* context tokens a window */
    int64_t step; /* from window to window */
    int64_t window_count;
};

static enum status cut_context(struct cut *cut, const struct texts *texts,
                               const struct squad_data *data, int64_t i,
                               const struct feature_options *options)
{
    const struct squad_example *example = &data->examples[i];
    const int64_t *context_first = &texts->context_first[example->context_index];
    cut->question_count = texts->question_first[i + 1] - texts->question_first[i];
    cut->context_count = context_first[1] - context_first[0];
    cut->room = options->max_length - SPECIAL_TOKENS - cut->question_count;
    cut->step = cut->room - options->doc_stride;
    cut->window_count = 1;
    if (cut->room < 1)
        return FAIL(INVALID,
                    "question %s: its %lld tokens leave no room for the context in %lld; raise "
                    "max_length or lower max_query_length",
                    example->id, (long long)cut->question_count, (long long)options->max_length);
    if (cut->context_count <= cut->room)
        return ST_OK;
    if (cut->step < 1)
        return FAIL(INVALID,
                    "question %s: doc_stride %lld is too large: the question's %lld tokens leave "
                    "room for %lld context tokens in %lld, and doc_stride has to be smaller",
                    example->id, (long long)options->doc_stride, (long long)cut->question_count,
                    (long long)cut->room, (long long)options->max_length);
    cut->window_count += (cut->context_count - cut->room + cut->step - 1) / cut->step;
    return ST_OK;
}

/* The counts of @set, so that one block holds everything. */
static enum status count_windows(struct feature_set *set, const struct texts *texts,
                                 const struct squad_data *data,
                                 const struct feature_options *options)
{
    set->example_count = data->example_count;
    set->offset_count = (int64_t)texts->contexts.count;
    for (int64_t i = 0; i < data->example_count; i++) {
        struct cut cut;
        TRY(cut_context(&cut, texts, data, i, options));
        int64_t overlap = (cut.window_count - 1) * options->doc_stride;
        set->feature_count += cut.window_count;
        set->token_count +=
            cut.window_count * (SPECIAL_TOKENS + cut.question_count) + cut.context_count + overlap;
    }
    return ST_OK;
}

static int32_t *put_ids(int32_t *to, const struct token *tokens, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        *to++ = tokens[i].id;
    return to;
}

/* Code points of the context, from the first answer; false if there is none to find. */
static bool answer_span(const struct squad_example *example, int64_t *begin, int64_t *end)
{
    if (example->impossible || example->answer_count == 0)
        return false;
    const struct squad_answer *answer = &example->answers[0];
    *begin = answer->start;
    *end = *begin + codepoints_count(answer->text, strlen(answer->text));
    return true;
}

/* The label rule at the top of the header. */
static void label_window(struct feature *f, const struct token *tokens, int64_t begin, int64_t end)
{
    int32_t count = f->context_count;
    if (count == 0 || tokens[0].start > begin || tokens[count - 1].end < end)
        return;
    int32_t first = 0, last = count - 1;
    while (first + 1 < count && tokens[first + 1].start <= begin)
        first++;
    while (last > 0 && tokens[last - 1].end >= end)
        last--;
    /* Pieces of one character share its place (a Hangul syllable comes apart): keep all of them. */
    bool crossed = last < first;
    f->start = f->context_first + (crossed ? last : first);
    f->end = f->context_first + (crossed ? first : last);
}

/* Where all texts are empty there is no array, and nothing is read. */
static const struct token *tokens_from(const struct token_list *list, int64_t first)
{
    static const struct token none;
    return list->tokens != NULL ? list->tokens + first : &none;
}

struct place { /* where the next feature goes */
    int64_t feature, token;
};

static void put_windows(struct feature_set *set, struct place *place, const struct texts *texts,
                        const struct cut *cut, const struct squad_data *data, int64_t i,
                        const struct vocab *vocab)
{
    const struct squad_example *example = &data->examples[i];
    const struct token *question = tokens_from(&texts->questions, texts->question_first[i]);
    int64_t context_first = texts->context_first[example->context_index];
    const struct token *context = tokens_from(&texts->contexts, context_first);
    int64_t begin = 0, end = 0;
    bool answered = answer_span(example, &begin, &end);
    for (int64_t w = 0; w < cut->window_count; w++) {
        struct feature *f = &set->features[place->feature++];
        int64_t from = w * cut->step;
        int64_t left = cut->context_count - from;
        f->first_token = place->token;
        f->first_offset = context_first + from;
        f->example = (int32_t)i;
        f->context_first = (int32_t)cut->question_count + 2;
        f->context_count = (int32_t)(left < cut->room ? left : cut->room);
        f->token_count = f->context_first + f->context_count + 1;
        if (answered)
            label_window(f, context + from, begin, end);
        int32_t *to = set->ids + f->first_token;
        *to++ = vocab->cls_id;
        to = put_ids(to, question, cut->question_count);
        *to++ = vocab->sep_id;
        to = put_ids(to, context + from, f->context_count);
        *to++ = vocab->sep_id;
        place->token += f->token_count;
    }
}

static enum status put_features(struct feature_set *set, const struct texts *texts,
                                const struct squad_data *data, const struct vocab *vocab,
                                const struct feature_options *options)
{
    struct place place = {0, 0};
    for (int64_t i = 0; i < set->offset_count; i++) {
        set->offset_start[i] = texts->contexts.tokens[i].start;
        set->offset_end[i] = texts->contexts.tokens[i].end;
    }
    for (int64_t i = 0; i < data->example_count; i++) {
        struct cut cut;
        TRY(cut_context(&cut, texts, data, i, options));
        put_windows(set, &place, texts, &cut, data, i, vocab);
    }
    ASSERT(place.feature == set->feature_count);
    ASSERT(place.token == set->token_count);
    return ST_OK;
}

/* ---- the interface --------------------------------------------------------------------------- */

static enum status check_options(const struct feature_options *options)
{
    enum { MAX_LENGTH_LIMIT = 1 << 24 };
    if (options->max_length <= SPECIAL_TOKENS || options->max_length > MAX_LENGTH_LIMIT)
        return FAIL(INVALID, "max_length is %lld; expected %d to %d",
                    (long long)options->max_length, SPECIAL_TOKENS + 1, MAX_LENGTH_LIMIT);
    if (options->doc_stride < 0 || options->doc_stride > MAX_LENGTH_LIMIT)
        return FAIL(INVALID, "doc_stride is %lld; expected 0 to %d", (long long)options->doc_stride,
                    MAX_LENGTH_LIMIT);
    if (options->max_query_length < 0 || options->max_query_length > MAX_LENGTH_LIMIT)
        return FAIL(INVALID, "max_query_length is %lld; expected 0 (no limit) to %d",
                    (long long)options->max_query_length, MAX_LENGTH_LIMIT);
    return ST_OK;
}

enum status features_build(struct feature_set *set, const struct squad_data *data,
                           const struct wordpiece *tok, const struct feature_options *options)
{
    enum status st = ST_OK;
    struct texts texts = {0};
    size_t bytes;
    features_release(set);
    TRY(check_options(options));
    ASSERT(data->example_count <= INT32_MAX);
    TRY_GOTO(st, out, tokenize_texts(&texts, data, tok, options->max_query_length));
    TRY_GOTO(st, out, count_windows(set, &texts, data, options));
    TRY_GOTO(st, out, features_block_bytes(&bytes, set));
    TRY_GOTO(st, out, mem_alloc(&set->memory, bytes));
    features_bind(set, set->memory);
    TRY_GOTO(st, out, put_features(set, &texts, data, tok->vocab, options));
out:
    texts_release(&texts);
    if (st != ST_OK)
        features_release(set);
    return st;
}

/* One question: features [first, last). */
static void put_line(struct text_buffer *text, const struct feature_set *set, const char *id,
                     int64_t first, int64_t last)
{
    uLong crc = crc32(0, NULL, 0);
    for (int64_t w = first; w < last; w++) {
        const struct feature *f = &set->features[w];
        const Bytef *ids = (const Bytef *)(set->ids + f->first_token);
        crc = crc32(crc, ids, (uInt)f->token_count * sizeof *set->ids);
    }
    text_put(text, "%s\t%lld\t%08lx\t", id, (long long)(last - first), crc);
    for (int64_t w = first; w < last; w++) {
        const struct feature *f = &set->features[w];
        text_put(text, "%s%d:%d", w > first ? " " : "", f->start, f->end);
    }
    text_put(text, "\n");
}

enum status features_tsv(struct file_text *text, const struct feature_set *set,
                         const struct squad_data *data)
{
    struct text_buffer b = {0};
    text_put(&b,
             "#question_id\tn_features\tids_crc32 (all features one after the other, no "
             "padding, uint32 LE)\tlabels start:end per feature (token positions, 0:0 = CLS)\n");
    for (int64_t first = 0, last; first < set->feature_count; first = last) {
        int32_t example = set->features[first].example;
        for (last = first + 1; last < set->feature_count; last++)
            if (set->features[last].example != example)
                break;
        put_line(&b, set, data->examples[example].id, first, last);
    }
    return text_take(&b, ST_OK, &text->data, &text->bytes);
}

void features_release(struct feature_set *set)
{
    mem_free(&set->memory);
    *set = (struct feature_set){0};
}

/* ---- the block ------------------------------------------------------------------------------- */

enum status features_block_bytes(size_t *bytes, const struct feature_set *set)
{
    size_t features, ids, offsets;
    TRY(checked_mul(&features, (size_t)set->feature_count, sizeof *set->features));
    TRY(checked_mul(&ids, (size_t)set->token_count, sizeof *set->ids));
    TRY(checked_mul(&offsets, (size_t)set->offset_count, 2 * sizeof *set->offset_start));
    if (features > SIZE_MAX / 4 || ids > SIZE_MAX / 4 || offsets > SIZE_MAX / 4)
        return FAIL(INVALID, "%lld features of %lld tokens are too many",
                    (long long)set->feature_count, (long long)set->token_count);
    *bytes = FEATURES_HEADER_BYTES + features + ids + offsets;
    return ST_OK;
}

void features_bind(struct feature_set *set, void *memory)
{
    char *at = (char *)memory + FEATURES_HEADER_BYTES;
    set->memory = memory;
    set->features = (struct feature *)(void *)at;
    at += (size_t)set->feature_count * sizeof *set->features;
    set->ids = (int32_t *)(void *)at;
    set->offset_start = set->ids + set->token_count;
    set->offset_end = set->offset_start + set->offset_count;
}
