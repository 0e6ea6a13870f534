#include "engine/base/text_buffer.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"

/* Is there room for @bytes more and the zero byte? */
static bool make_room(struct text_buffer *b, size_t bytes)
{
    if (b->st == ST_OK)
        b->st = mem_grow(&b->data, &b->capacity, b->bytes + bytes + 1, 1);
    return b->st == ST_OK;
}

void text_put(struct text_buffer *b, const char *fmt, ...)
{
    enum { GUESS_BYTES = 256 };
    size_t room = GUESS_BYTES;
    while (make_room(b, room)) {
        va_list args;
        va_start(args, fmt);
        int n = vsnprintf(b->data + b->bytes, room + 1, fmt, args);
        va_end(args);
        ASSERT(n >= 0);
        if ((size_t)n <= room) {
            b->bytes += (size_t)n;
            return;
        }
        room = (size_t)n;
    }
}

void text_put_bytes(struct text_buffer *b, const char *part, size_t bytes)
{
    if (!make_room(b, bytes))
        return;
    memcpy(b->data + b->bytes, part, bytes);
    b->bytes += bytes;
    b->data[b->bytes] = '\0';
}

enum status text_take(struct text_buffer *b, enum status st, char **text, size_t *bytes)
{
    st = st != ST_OK ? st : b->st;
    if (st != ST_OK)
        mem_free(&b->data);
    *text = b->data;
    *bytes = st == ST_OK ? b->bytes : 0;
    *b = (struct text_buffer){0};
    return st;
}
