/*
 * engine/base/text_buffer.h - text that grows while it is put together.
 *
 * The first failure is kept and later calls do nothing, so callers look once, at the end. For files
 * and replies that are made in one go; what is written inside a step has room of a fixed size.
 */
#ifndef ENGINE_BASE_TEXT_BUFFER_H
#define ENGINE_BASE_TEXT_BUFFER_H

#include <stddef.h>

#include "engine/base/status.h"

C_BEGIN

struct text_buffer {        /* zero-initialise */
    char *data;             /* owned (mem_free); a zero byte follows the last one */
    size_t bytes, capacity; /* bytes: without that zero byte */
    enum status st;         /* ST_MEMORY once there was no room */
};

/** text_put() - add what printf would print. */
void text_put(struct text_buffer *b, const char *fmt, ...) PRINTF_LIKE(2, 3);

/** text_put_bytes() - add @bytes of @part as they are. */
void text_put_bytes(struct text_buffer *b, const char *part, size_t bytes);

/**
 * text_take() - hand the text over and leave the buffer empty.
 * @text: mem_free(); NULL on failure, and @bytes is 0.
 * @st: of the caller; the text is handed over only if it is ST_OK.
 *
 * Return: @st, or else the buffer's first failure.
 */
MUST_CHECK enum status text_take(struct text_buffer *b, enum status st, char **text, size_t *bytes);

C_END

#endif
