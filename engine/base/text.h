/*
 * engine/base/text.h - numbers and names that people type.
 *
 * Used for command lines and for the configuration, so that both accept the same spellings. The
 * functions say no and leave the message to the caller, who knows where the text came from.
 * No allocation; safe from any thread.
 */
#ifndef ENGINE_BASE_TEXT_H
#define ENGINE_BASE_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

C_BEGIN

/** text_to_int() - a whole decimal int64_t; false for anything else, also out of range. */
bool text_to_int(int64_t *out, const char *text);

/** text_to_real() - a finite decimal number ("3e-5"); false for anything else. */
bool text_to_real(double *out, const char *text);

/**
 * text_to_bytes() - "80GiB", "80 GB", "1.5TiB", "85899345920": at least one byte, less than 2^60.
 * KiB, MiB, GiB and TiB are powers of 1024, kB (or KB), MB, GB and TB of 1000; a fraction of a byte
 * is cut off. False for anything else: TEXT_BYTES_ACCEPTED says what was expected.
 */
bool text_to_bytes(size_t *out, const char *text);
#define TEXT_BYTES_ACCEPTED                                                                        \
    "bytes, or a number with KiB, MiB, GiB or TiB (of 1024) or kB, MB, GB or TB (of 1000), as in " \
    "80GiB"

/** text_of_bytes() - for people, with four digits: "512 B", "1.500 GiB". @out: 32 bytes. */
void text_of_bytes(char out[32], size_t bytes);

/** text_of_real() - the shortest decimal text that reads back to @value. @out: 32 bytes. */
void text_of_real(char out[32], double value);

/** text_utf8_next() - the code point at @text; Return: its bytes, 0 if it is not valid UTF-8. */
int text_utf8_next(uint32_t *code, const char *text);

/** text_is_utf8() - is the whole of @text valid UTF-8? */
bool text_is_utf8(const char *text);

/* Which of the names offered is nearest to what was given? Initialise with {given, NULL, 0}. */
struct text_nearest {
    const char *given; /* borrowed */
    const char *name;  /* borrowed; NULL if none is near enough to be meant */
    int distance;      /* letters to insert, delete, replace or swap to get from given to name */
};

/** text_nearest_offer() - consider @name; true if it is now the nearest. Up to 63 bytes. */
bool text_nearest_offer(struct text_nearest *nearest, const char *name);

/* Names for one line of a message: "a, b, c", and ", ..." when there are too many. */
struct text_list { /* zero-initialise */
    char text[3000];
    int count, left_out;
};

void text_list_add(struct text_list *list, const char *name);

C_END

#endif
