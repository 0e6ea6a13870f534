#include "io/squad.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#include "io/codepoints.h"
#include "io/json_file.h"

/* Where in the file we are; the indexes down to `depth` count. */
struct place {
    const char *path;
    int depth; /* 0: top, 1: data[], 2: paragraphs[], 3: qas[], 4: answers[] */
    size_t index[4];
};

enum { PLACE_BYTES = 160 };

static const char *place_text(const struct place *at, const char *key, char text[PLACE_BYTES])
{
    static const char *const names[] = {"data", "paragraphs", "qas", "answers"};
    int used = 0;
    text[0] = '\0';
    for (int i = 0; i < at->depth; i++)
        used += snprintf(text + used, (size_t)(PLACE_BYTES - used), "%s%s[%zu]", i > 0 ? "." : "",
                         names[i], at->index[i]);
    if (key != NULL)
        snprintf(text + used, (size_t)(PLACE_BYTES - used), "%s%s", used > 0 ? "." : "", key);
    return text[0] != '\0' ? text : "top of the file";
}

static enum status wrong_shape(const struct place *at, const char *key, const char *expected,
                               const json_t *found)
{
    char text[PLACE_BYTES];
    return FAIL(CORRUPT, "%s: %s: expected %s, found %s", at->path, place_text(at, key, text),
                expected, json_kind(found));
}

static enum status expect_object(const struct place *at, const json_t *value)
{
    return json_is_object(value) ? ST_OK : wrong_shape(at, NULL, "an object", value);
}

static enum status get_array(const struct place *at, const json_t *object, const char *key,
                             json_t **out)
{
    *out = json_object_get(object, key);
    return json_is_array(*out) ? ST_OK : wrong_shape(at, key, "an array", *out);
}

/* A string into the pool. A missing one is @fallback, unless that is NULL. */
static enum status get_text(struct pool *pool, const struct place *at, const json_t *object,
                            const char *key, const char *fallback, const char **out)
{
    const json_t *value = json_object_get(object, key);
    if (value == NULL && fallback != NULL) {
        *out = fallback;
        return ST_OK;
    }
    if (!json_is_string(value))
        return wrong_shape(at, key, "a string", value);
    char *copy;
    TRY(pool_copy(pool, &copy, json_string_value(value), json_string_length(value)));
    *out = copy;
    return ST_OK;
}

static enum status read_answers(struct squad_data *data, struct squad_example *example,
                                struct place *at, const json_t *list)
{
    size_t count = json_array_size(list);
    struct squad_answer *answers;
    if (count > INT32_MAX)
        return wrong_shape(at, "answers", "fewer answers", list);
    TRY(pool_take(&data->pool, &answers, count * sizeof *answers));
    at->depth = 4;
    for (size_t i = 0; i < count; i++) {
        const json_t *item = json_array_get(list, i);
        at->index[3] = i;
        TRY(expect_object(at, item));
        TRY(get_text(&data->pool, at, item, "text", NULL, &answers[i].text));
        const json_t *start = json_object_get(item, "answer_start");
        json_int_t value = json_integer_value(start);
        if (!json_is_integer(start) || value < INT32_MIN || value > INT32_MAX)
            return wrong_shape(at, "answer_start", "a 32-bit integer", start);
        answers[i].start = (int32_t)value;
    }
    at->depth = 3;
    example->answers = answers;
    example->answer_count = (int32_t)count;
    return ST_OK;
}

static enum status read_question(struct squad_data *data, struct squad_example *example,
                                 struct place *at, const json_t *qa)
{
    TRY(expect_object(at, qa));
    TRY(get_text(&data->pool, at, qa, "id", NULL, &example->id));
    TRY(get_text(&data->pool, at, qa, "question", NULL, &example->question));
    const json_t *impossible = json_object_get(qa, "is_impossible");
    if (impossible != NULL && !json_is_boolean(impossible))
        return wrong_shape(at, "is_impossible", "true or false", impossible);
    example->impossible = json_is_true(impossible);
    json_t *answers = json_object_get(qa, "answers");
    if (answers != NULL || !example->impossible) {
        TRY(get_array(at, qa, "answers", &answers));
        TRY(read_answers(data, example, at, answers));
    }
    if (impossible != NULL || example->answer_count == 0)
        data->unanswerable = true;
    return ST_OK;
}

static enum status read_paragraph(struct squad_data *data, struct place *at,
                                  const json_t *paragraph, const char *title, size_t *capacity)
{
    json_t *qas;
    const char *context;
    TRY(expect_object(at, paragraph));
    TRY(get_array(at, paragraph, "qas", &qas));
    TRY(get_text(&data->pool, at, paragraph, "context", NULL, &context));
    size_t count = json_array_size(qas);
    if (count == 0)
        return ST_OK;
    TRY(mem_grow(&data->examples, capacity, (size_t)data->example_count + count,
                 sizeof *data->examples));
    at->depth = 3;
    for (size_t i = 0; i < count; i++) {
        struct squad_example *example = &data->examples[data->example_count++];
        at->index[2] = i;
        example->context = context;
        example->title = title;
        example->context_index = (int32_t)data->context_count;
        TRY(read_question(data, example, at, json_array_get(qas, i)));
    }
    at->depth = 2;
    data->context_count++;
    return ST_OK;
}

static enum status read_article(struct squad_data *data, struct place *at, const json_t *article,
                                size_t *capacity)
{
    json_t *paragraphs;
    const char *title;
    TRY(expect_object(at, article));
    TRY(get_text(&data->pool, at, article, "title", "", &title));
    TRY(get_array(at, article, "paragraphs", &paragraphs));
    at->depth = 2;
    for (size_t i = 0; i < json_array_size(paragraphs); i++) {
        at->index[1] = i;
        TRY(read_paragraph(data, at, json_array_get(paragraphs, i), title, capacity));
    }
    at->depth = 1;
    return ST_OK;
}

static enum status read_file(struct squad_data *data, const char *path, const json_t *root)
{
    struct place at = {.path = path};
    json_t *articles;
    size_t capacity = 0;
    TRY(expect_object(&at, root));
    TRY(get_array(&at, root, "data", &articles));
    const char *version = json_string_value(json_object_get(root, "version"));
    data->unanswerable = version != NULL && strncmp(version, "v2", 2) == 0;
    at.depth = 1;
    for (size_t i = 0; i < json_array_size(articles); i++) {
        at.index[0] = i;
        TRY(read_article(data, &at, json_array_get(articles, i), &capacity));
    }
    if (data->example_count == 0)
        return FAIL(CORRUPT, "%s: there is no question in it", path);
    return ST_OK;
}

/* Open addressing; a slot holds an example's number plus one. */
static enum status check_ids(const struct squad_data *data, const char *path)
{
    size_t slots = 16;
    while (slots < 2 * (size_t)data->example_count)
        slots *= 2;
    int64_t *table;
    TRY(mem_alloc(&table, slots * sizeof *table));
    enum status st = ST_OK;
    for (int64_t i = 0; i < data->example_count && st == ST_OK; i++) {
        const char *id = data->examples[i].id;
        size_t slot = XXH3_64bits(id, strlen(id)) & (slots - 1);
        while (table[slot] != 0 && strcmp(data->examples[table[slot] - 1].id, id) != 0)
            slot = (slot + 1) & (slots - 1);
        if (table[slot] != 0)
            st = FAIL(CORRUPT, "%s: questions %lld and %lld have the same id \"%s\"", path,
                      (long long)table[slot], (long long)i + 1, id);
        table[slot] = i + 1;
    }
    mem_free(&table);
    return st;
}

enum status squad_load(struct squad_data *data, const char *path)
{
    json_t *root = NULL;
    enum status st;
    squad_release(data);
    TRY_GOTO(st, out, json_file_read(&root, path, &data->content_hash));
    TRY_GOTO(st, out, read_file(data, path, root));
    TRY_GOTO(st, out, check_ids(data, path));
out:
    json_decref(root);
    if (st != ST_OK)
        squad_release(data);
    return st;
}

enum { QUOTE_BYTES = 80 }; /* of a text in a message */

/* The longest prefix of @text that fits in a message and does not cut a code point. */
static int quote_bytes(const char *text, size_t bytes)
{
    if (bytes <= QUOTE_BYTES)
        return (int)bytes;
    size_t cut = QUOTE_BYTES;
    while (cut > 0 && ((unsigned char)text[cut] & 0xC0) == 0x80)
        cut--;
    return (int)cut;
}

static enum status check_answer(const struct squad_example *example,
                                const struct squad_answer *answer, const struct codepoints *cp)
{
    size_t bytes = strlen(answer->text);
    if (bytes == 0)
        return FAIL(CORRUPT, "question \"%s\": an answer is empty", example->id);
    if (answer->start < 0 || answer->start > cp->count)
        return FAIL(CORRUPT,
                    "question \"%s\": answer \"%.*s\" at offset %d, but its context has %d code "
                    "points",
                    example->id, quote_bytes(answer->text, bytes), answer->text, answer->start,
                    cp->count);
    const char *found = example->context + codepoints_byte(cp, answer->start);
    if (strncmp(found, answer->text, bytes) == 0)
        return ST_OK;
    /* As many code points as the answer has, or what is left of the context. */
    int32_t length = codepoints_count(answer->text, bytes);
    int32_t end = length < cp->count - answer->start ? answer->start + length : cp->count;
    size_t found_bytes = codepoints_byte(cp, end) - codepoints_byte(cp, answer->start);
    return FAIL(CORRUPT, "question \"%s\": offset %d: expected the answer \"%.*s\", found \"%.*s\"",
                example->id, answer->start, quote_bytes(answer->text, bytes), answer->text,
                quote_bytes(found, found_bytes), found);
}

static enum status check_example(const struct squad_example *example, const struct codepoints *cp)
{
    if (example->impossible && example->answer_count > 0)
        return FAIL(CORRUPT, "question \"%s\": is_impossible is true, but it has answers",
                    example->id);
    if (!example->impossible && example->answer_count == 0)
        return FAIL(CORRUPT, "question \"%s\": no answers, and is_impossible is not true",
                    example->id);
    for (int32_t i = 0; i < example->answer_count; i++)
        TRY(check_answer(example, &example->answers[i], cp));
    return ST_OK;
}

enum status squad_check_answers(const struct squad_data *data)
{
    struct codepoints cp = {0};
    enum status st = ST_OK;
    for (int64_t i = 0; i < data->example_count; i++) {
        const struct squad_example *example = &data->examples[i];
        if (i == 0 || example->context != data->examples[i - 1].context)
            TRY_GOTO(st, out, codepoints_build(&cp, example->context));
        TRY_GOTO(st, out, check_example(example, &cp));
    }
out:
    codepoints_release(&cp);
    return st;
}

void squad_release(struct squad_data *data)
{
    mem_free(&data->examples);
    pool_release(&data->pool);
    *data = (struct squad_data){0};
}
