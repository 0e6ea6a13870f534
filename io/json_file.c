#include "io/json_file.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "engine/base/arena.h"
#include "engine/base/file.h"
#include "engine/base/text.h"
#include "engine/base/text_buffer.h"
#include "io/json_number.h"

static const char BYTE_ORDER_MARK[] = "\xEF\xBB\xBF";
enum { BYTE_ORDER_MARK_BYTES = 3 };

static enum status parse(json_t **root, const struct file_text *text, const char *path)
{
    const char *start = text->data;
    size_t bytes = text->bytes;
    if (bytes >= BYTE_ORDER_MARK_BYTES &&
        memcmp(start, BYTE_ORDER_MARK, BYTE_ORDER_MARK_BYTES) == 0) {
        start += BYTE_ORDER_MARK_BYTES;
        bytes -= BYTE_ORDER_MARK_BYTES;
    }
    if (bytes == 0)
        return FAIL(CORRUPT, "%s:1:1: expected JSON, found an empty file", path);
    json_error_t error;
    *root = json_loadb(start, bytes, 0, &error);
    if (*root != NULL)
        return ST_OK;
    if (json_error_code(&error) == json_error_out_of_memory)
        return FAIL(MEMORY, "out of memory while reading %s", path);
    /* jansson counts columns from 0 where nothing was read yet. */
    int column = error.column > 0 ? error.column : 1;
    const char *hint =
        json_error_code(&error) == json_error_invalid_utf8 ? "the text is not UTF-8: " : "";
    return FAIL(CORRUPT, "%s:%d:%d: %s%s", path, error.line, column, hint, error.text);
}

enum status json_file_hash(uint64_t *content_hash, const char *path)
{
    struct file_text text = {0};
    TRY(file_read(&text, path));
    *content_hash = XXH3_64bits(text.data, text.bytes);
    mem_free(&text.data);
    return ST_OK;
}

enum status json_file_read(json_t **root, const char *path, uint64_t *content_hash)
{
    struct file_text text = {0};
    enum status st;
    *root = NULL;
    TRY_GOTO(st, out, file_read(&text, path));
    if (content_hash != NULL)
        *content_hash = XXH3_64bits(text.data, text.bytes);
    TRY_GOTO(st, out, parse(root, &text, path));
out:
    mem_free(&text.data);
    return st;
}

#define EXACT_ASCII (JSON_REAL_PRECISION(17) | JSON_ENSURE_ASCII)

static int take_piece(const char *piece, size_t bytes, void *context)
{
    struct text_buffer *text = context;
    text_put_bytes(text, piece, bytes);
    return text->st == ST_OK ? 0 : -1;
}

/* The failure of the text, or else of the library, which tells nothing. */
static enum status dump(struct text_buffer *text, const json_t *root, size_t flags)
{
    if (root != NULL && json_dump_callback(root, take_piece, text, flags) == 0)
        return ST_OK;
    return text->st != ST_OK ? text->st : FAIL(MEMORY, "out of memory while making JSON");
}

enum status json_file_write(const char *path, const json_t *root)
{
    enum status st = ST_OK;
    struct text_buffer text = {0};
    TRY_GOTO(st, out, dump(&text, root, EXACT_ASCII | JSON_INDENT(4)));
    text_put(&text, "\n");
    TRY_GOTO(st, out, text.st);
    TRY_GOTO(st, out, file_write(path, text.data, text.bytes));
out:
    mem_free(&text.data);
    return st;
}

/* ---- without a tree -------------------------------------------------------------------------- */

static void new_line(struct json_stream *s)
{
    static const char blanks[4 * JSON_STREAM_DEPTH + 1] = "                                ";
    text_put_bytes(&s->text, "\n", 1);
    text_put_bytes(&s->text, blanks, 4 * (size_t)s->depth);
}

/* Before an element of an array or a key: what separates it from the one before. */
static void separate(struct json_stream *s)
{
    if (s->used[s->depth])
        text_put_bytes(&s->text, ",", 1);
    s->used[s->depth] = true;
    if (s->depth > 0)
        new_line(s);
}

/* A value that does not follow a key is an element. */
static void before_value(struct json_stream *s)
{
    if (!s->after_key)
        separate(s);
    s->after_key = false;
}

void json_stream_part(struct json_stream *s, bool first)
{
    *s = (struct json_stream){.depth = 1, .used = {true, !first}};
}

void json_stream_open(struct json_stream *s, char bracket)
{
    ASSERT(s->depth < JSON_STREAM_DEPTH);
    before_value(s);
    text_put_bytes(&s->text, &bracket, 1);
    s->used[++s->depth] = false;
}

void json_stream_close(struct json_stream *s, char bracket)
{
    ASSERT(s->depth > 0);
    bool empty = !s->used[s->depth--];
    if (!empty)
        new_line(s);
    text_put_bytes(&s->text, &bracket, 1);
}

/* Most text needs no escape; jansson knows how to write what does. */
static void quoted(struct json_stream *s, const char *text)
{
    size_t plain = 0;
    while (text[plain] >= ' ' && text[plain] <= '~' && text[plain] != '"' && text[plain] != '\\')
        plain++;
    if (text[plain] == '\0') {
        text_put_bytes(&s->text, "\"", 1);
        text_put_bytes(&s->text, text, plain);
        text_put_bytes(&s->text, "\"", 1);
        return;
    }
    char small[512];
    const size_t flags = JSON_ENCODE_ANY | JSON_ENSURE_ASCII;
    json_t *string = json_string(text);
    size_t bytes = string != NULL ? json_dumpb(string, small, sizeof small, flags) : 0;
    char *large = NULL;
    if (bytes > sizeof small)
        large = json_dumps(string, flags);
    json_decref(string);
    if (s->text.st == ST_OK && (bytes == 0 || (bytes > sizeof small && large == NULL)))
        s->text.st = text_is_utf8(text) ? FAIL(MEMORY, "out of memory while making JSON")
                                        : FAIL(INVALID, "text that is not UTF-8 cannot be JSON");
    text_put_bytes(&s->text, large != NULL ? large : small, bytes);
    free(large);
}

void json_stream_key(struct json_stream *s, const char *key)
{
    separate(s);
    quoted(s, key);
    text_put_bytes(&s->text, ": ", 2);
    s->after_key = true;
}

void json_stream_string(struct json_stream *s, const char *text)
{
    before_value(s);
    quoted(s, text);
}

void json_stream_real(struct json_stream *s, double value)
{
    char text[JSON_NUMBER_BYTES];
    before_value(s);
    text_put_bytes(&s->text, text, json_number(text, value));
}

enum status json_text(char **text, size_t *bytes, const json_t *root)
{
    struct text_buffer b = {0};
    return text_take(&b, dump(&b, root, EXACT_ASCII | JSON_COMPACT), text, bytes);
}

enum status json_file_write_line(const char *path, const json_t *root)
{
    char *text = NULL;
    size_t bytes = 0;
    TRY(json_text(&text, &bytes, root));
    enum status st = file_write(path, text, bytes);
    mem_free(&text);
    return st;
}

const char *json_kind(const json_t *value)
{
    if (value == NULL)
        return "nothing";
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "an array";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
        return "an integer";
    case JSON_REAL:
        return "a real number";
    case JSON_TRUE:
    case JSON_FALSE:
        return "a boolean";
    case JSON_NULL:
        return "null";
    }
    return "something else";
}
