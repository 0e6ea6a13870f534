#include "io/vocab_json.h"

#include <jansson.h>
#include <string.h>

#include "engine/base/arena.h"
#include "io/json_file.h"

enum { MAX_TOKENS = 1 << 24 };

static const char PREFIX[] = "##";
static const json_int_t MAX_WORD = 100; /* characters of a word; longer ones are [UNK] */

/* Tokens by id, borrowed from the tree. */
struct json_tokens {
    const char *path;
    const char **tokens; /* owned */
    size_t count;
};

static enum status check_model(const char *path, const json_t *model)
{
    const char *type = json_string_value(json_object_get(model, "type"));
    const json_t *prefix = json_object_get(model, "continuing_subword_prefix");
    const json_t *max_word = json_object_get(model, "max_input_chars_per_word");
    const json_t *vocab = json_object_get(model, "vocab");
    if (!json_is_object(model))
        return FAIL(CORRUPT, "%s: model: expected an object, found %s", path, json_kind(model));
    if (type != NULL && strcmp(type, "WordPiece") != 0)
        return FAIL(UNSUPPORTED, "%s: model.type is %s; only WordPiece is read", path, type);
    if (prefix != NULL && (!json_is_string(prefix) || strcmp(json_string_value(prefix), PREFIX)))
        return FAIL(UNSUPPORTED, "%s: model.continuing_subword_prefix is not \"%s\"", path, PREFIX);
    if (max_word != NULL && json_integer_value(max_word) != MAX_WORD)
        return FAIL(UNSUPPORTED, "%s: model.max_input_chars_per_word is not %lld", path,
                    (long long)MAX_WORD);
    if (!json_is_object(vocab))
        return FAIL(CORRUPT, "%s: model.vocab: expected an object, found %s", path,
                    json_kind(vocab));
    return ST_OK;
}

static enum status add_token(struct json_tokens *list, const char *token, const json_t *id)
{
    json_int_t i = json_is_integer(id) ? json_integer_value(id) : -1;
    if (i < 0 || (size_t)i >= list->count)
        return FAIL(CORRUPT, "%s: token \"%s\": expected an id from 0 to %zu", list->path, token,
                    list->count - 1);
    if (strchr(token, '\n') != NULL || token[0] == '\0')
        return FAIL(CORRUPT, "%s: id %lld: the token is empty or holds a line end", list->path,
                    (long long)i);
    if (list->tokens[i] != NULL && strcmp(list->tokens[i], token) != 0)
        return FAIL(CORRUPT, "%s: id %lld has the tokens \"%s\" and \"%s\"", list->path,
                    (long long)i, list->tokens[i], token);
    list->tokens[i] = token;
    return ST_OK;
}

/* Tokens that were added behind the vocabulary; the special ones stand in both. */
static size_t added_beyond(const json_t *added, size_t count)
{
    size_t i, beyond = 0;
    json_t *entry;
    json_array_foreach(added, i, entry)
    {
        json_int_t id = json_integer_value(json_object_get(entry, "id"));
        beyond += id >= 0 && (size_t)id >= count;
    }
    return beyond;
}

static enum status collect(struct json_tokens *list, json_t *root)
{
    json_t *vocab = json_object_get(json_object_get(root, "model"), "vocab"), *id, *entry;
    const json_t *added = json_object_get(root, "added_tokens");
    const char *token;
    size_t i;
    list->count = json_object_size(vocab) + added_beyond(added, json_object_size(vocab));
    if (list->count == 0 || list->count > MAX_TOKENS)
        return FAIL(CORRUPT, "%s: %zu tokens; is it a vocabulary?", list->path, list->count);
    TRY(mem_alloc(&list->tokens, sizeof *list->tokens * list->count));
    json_object_foreach(vocab, token, id) TRY(add_token(list, token, id));
    json_array_foreach(added, i, entry)
    {
        token = json_string_value(json_object_get(entry, "content"));
        if (token == NULL)
            return FAIL(CORRUPT, "%s: added_tokens[%zu]: expected a content", list->path, i);
        TRY(add_token(list, token, json_object_get(entry, "id")));
    }
    for (i = 0; i < list->count; i++)
        if (list->tokens[i] == NULL)
            return FAIL(CORRUPT, "%s: no token has id %zu", list->path, i);
    return ST_OK;
}

static enum status join(struct file_text *text, const struct json_tokens *list)
{
    size_t bytes = 0;
    for (size_t i = 0; i < list->count; i++)
        bytes += strlen(list->tokens[i]) + 1;
    TRY(mem_alloc(&text->data, bytes + 1));
    text->bytes = bytes;
    char *at = text->data;
    for (size_t i = 0; i < list->count; i++) {
        size_t length = strlen(list->tokens[i]);
        memcpy(at, list->tokens[i], length);
        at[length] = '\n';
        at += length + 1;
    }
    *at = '\0';
    return ST_OK;
}

enum status vocab_json_read(struct file_text *text, const char *path)
{
    enum status st;
    struct json_tokens list = {.path = path};
    json_t *root = NULL;
    TRY_GOTO(st, out, json_file_read(&root, path, NULL));
    TRY_GOTO(st, out, check_model(path, json_object_get(root, "model")));
    TRY_GOTO(st, out, collect(&list, root));
    TRY_GOTO(st, out, join(text, &list));
out:
    mem_free(&list.tokens);
    json_decref(root);
    return st;
}
