#include "io/json_file.h"

#include <jansson.h>
#include <string.h>
#include <xxhash.h>

#include "engine/base/arena.h"
#include "engine/base/file.h"

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

struct sink {
    char *data; /* owned */
    size_t bytes, capacity;
    enum status st;
};

static int sink_take(const char *piece, size_t bytes, void *context)
{
    struct sink *sink = context;
    sink->st = mem_grow(&sink->data, &sink->capacity, sink->bytes + bytes, 1);
    if (sink->st != ST_OK)
        return -1;
    memcpy(sink->data + sink->bytes, piece, bytes);
    sink->bytes += bytes;
    return 0;
}

enum status json_file_write(const char *path, const json_t *root)
{
    const size_t flags = JSON_INDENT(4) | JSON_REAL_PRECISION(17) | JSON_ENSURE_ASCII;
    struct sink sink = {0};
    enum status st = ST_OK;
    if (root == NULL || json_dump_callback(root, sink_take, &sink, flags) != 0 ||
        sink_take("\n", 1, &sink) != 0) {
        st = sink.st != ST_OK ? sink.st : FAIL(MEMORY, "out of memory while writing %s", path);
        goto out;
    }
    TRY_GOTO(st, out, file_write(path, sink.data, sink.bytes));
out:
    mem_free(&sink.data);
    return st;
}

enum status json_text(char **text, size_t *bytes, const json_t *root)
{
    const size_t flags = JSON_COMPACT | JSON_REAL_PRECISION(17) | JSON_ENSURE_ASCII;
    struct sink sink = {0};
    *text = NULL;
    *bytes = 0;
    if (root == NULL || json_dump_callback(root, sink_take, &sink, flags) != 0 ||
        sink_take("", 1, &sink) != 0) {
        mem_free(&sink.data);
        return FAIL(MEMORY, "out of memory while making JSON");
    }
    *text = sink.data;
    *bytes = sink.bytes - 1;
    return ST_OK;
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
