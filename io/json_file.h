/*
 * io/json_file.h - JSON files in and out, with messages that say where.
 *
 * The tree is jansson's; callers include <jansson.h> themselves and end it with json_decref().
 * Errors of the text read "path:line:column: ...", counted from 1; the column is where the token
 * that does not fit ends. Non-finite numbers are not JSON: reading refuses them, and writing has
 * none (json_real() gives NULL for them).
 */
#ifndef IO_JSON_FILE_H
#define IO_JSON_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"
#include "engine/base/text_buffer.h"

C_BEGIN

struct json_t;

/**
 * json_file_read() - parse a whole file, plain or gzip, with or without a byte order mark.
 * @root: the tree, owned by the caller; NULL after a failure. Its top is an object or an array.
 * @content_hash: XXH3-64 of the bytes after gunzip, or NULL.
 *
 * Return: ST_OK; ST_IO; ST_CORRUPT with line and column; ST_MEMORY.
 */
MUST_CHECK enum status json_file_read(struct json_t **root, const char *path,
                                      uint64_t *content_hash);

/** json_file_hash() - that hash alone, without a look at the text. ST_OK; ST_IO; ST_CORRUPT. */
MUST_CHECK enum status json_file_hash(uint64_t *content_hash, const char *path);

/**
 * json_file_write() - write a tree: indented by 4, ASCII, keys in the order they were set, reals
 * with 17 significant digits, a line end last.
 *
 * Return: ST_OK; ST_IO, then the file is as before; ST_MEMORY.
 */
MUST_CHECK enum status json_file_write(const char *path, const struct json_t *root);

/*
 * Text without a tree: json_file_write() makes the same of the tree with these values, but for the
 * line end. For lists of answers that would be a million nodes. A failure is kept in the text, and
 * what follows does nothing, so that only the end is asked: text_take(&s->text, ...). ST_MEMORY;
 * ST_INVALID: what was to be text was not UTF-8. Initialise with {0}.
 */
enum { JSON_STREAM_DEPTH = 8 };
struct json_stream {
    struct text_buffer text; /* owned until the end */
    int depth;
    bool used[JSON_STREAM_DEPTH + 1]; /* this level has an element */
    bool after_key;                   /* a value is due */
};

/** json_stream_part() - instead: elements of an object or array that stands at the top and is
 * opened and closed elsewhere. @first: none come before them. */
void json_stream_part(struct json_stream *s, bool first);
/** json_stream_open() - begin an object ('{') or an array ('['). */
void json_stream_open(struct json_stream *s, char bracket);
/** json_stream_close() - end what was begun last, with its bracket. */
void json_stream_close(struct json_stream *s, char bracket);
/** json_stream_key() - a key; its value comes next. */
void json_stream_key(struct json_stream *s, const char *key);
/** json_stream_string() - UTF-8 text. */
void json_stream_string(struct json_stream *s, const char *text);
/** json_stream_real() - a finite number. */
void json_stream_real(struct json_stream *s, double value);

/**
 * json_text() - a tree in one line, ASCII, as short as it gets.
 * @text: mem_free(*text); a zero byte follows the last of *bytes. ST_MEMORY, also for @root NULL.
 */
MUST_CHECK enum status json_text(char **text, size_t *bytes, const struct json_t *root);

/** json_file_write_line() - json_text() as a file. Return: ST_OK; ST_IO, then the file is as
 * before; ST_MEMORY. */
MUST_CHECK enum status json_file_write_line(const char *path, const struct json_t *root);

/** json_kind() - "an object", "a string", ..., "nothing" for NULL: for messages. */
const char *json_kind(const struct json_t *value);

C_END

#endif
