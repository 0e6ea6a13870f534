/*
 * io/codepoints.h - from code-point offsets, which SQuAD counts in, to bytes of UTF-8.
 *
 * One table serves one text after another (the questions of a file come grouped by context), so
 * the cost is one pass a context. Pure ASCII needs no table.
 */
#ifndef IO_CODEPOINTS_H
#define IO_CODEPOINTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

C_BEGIN

struct codepoints {    /* zero-initialise */
    uint32_t *byte_of; /* owned; byte offset of each code point, and of the end */
    size_t capacity;
    int32_t count; /* code points of the text last built */
    bool ascii;    /* byte offset == code point; byte_of is not filled */
};

/** codepoints_build() - index @text (zero-terminated). Return: ST_OK; ST_CORRUPT (2 GiB or more);
 * ST_MEMORY. */
MUST_CHECK enum status codepoints_build(struct codepoints *cp, const char *text);

/** codepoints_byte() - byte offset of code point @i, 0 <= i <= count (asserted). */
static inline size_t codepoints_byte(const struct codepoints *cp, int32_t i)
{
    ASSERT(i >= 0 && i <= cp->count);
    return cp->ascii ? (size_t)i : cp->byte_of[i];
}

/** codepoints_count() - code points of @bytes of valid UTF-8. */
int32_t codepoints_count(const char *text, size_t bytes);

void codepoints_release(struct codepoints *cp);

C_END

#endif
