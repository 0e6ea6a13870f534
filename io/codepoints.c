#include "io/codepoints.h"

#include <string.h>

#include "engine/base/arena.h"

static bool starts_code_point(char c)
{
    return ((unsigned char)c & 0xC0) != 0x80;
}

int32_t codepoints_count(const char *text, size_t bytes)
{
    int32_t count = 0;
    for (size_t i = 0; i < bytes; i++)
        count += starts_code_point(text[i]);
    return count;
}

enum status codepoints_build(struct codepoints *cp, const char *text)
{
    size_t bytes = strlen(text);
    if (bytes >= INT32_MAX)
        return FAIL(CORRUPT, "a text of %zu bytes is too long", bytes);
    cp->count = codepoints_count(text, bytes);
    cp->ascii = (size_t)cp->count == bytes;
    if (cp->ascii)
        return ST_OK;
    TRY(mem_grow(&cp->byte_of, &cp->capacity, (size_t)cp->count + 1, sizeof *cp->byte_of));
    int32_t k = 0;
    for (size_t i = 0; i < bytes; i++)
        if (starts_code_point(text[i]))
            cp->byte_of[k++] = (uint32_t)i;
    cp->byte_of[k] = (uint32_t)bytes;
    return ST_OK;
}

void codepoints_release(struct codepoints *cp)
{
    mem_free(&cp->byte_of);
    *cp = (struct codepoints){0};
}
