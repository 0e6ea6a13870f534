/*
 * io/wordpiece_char.h - what a character is to the WordPiece tokenizer.
 *
 * Answers come from utf8proc, corrected to what the Hugging Face `tokenizers` library takes for
 * true: its tables are those of older versions of Unicode. So the same text gives the same tokens
 * whatever version of utf8proc is installed. Code points are valid ones (below 110000 hexadecimal,
 * no surrogates). Pure; safe from any thread.
 */
#ifndef IO_WORDPIECE_CHAR_H
#define IO_WORDPIECE_CHAR_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/status.h"

C_BEGIN

enum char_class {
    CHAR_WORD,        /* a part of a word */
    CHAR_SPACE,       /* ends a word */
    CHAR_DROP,        /* is taken out: control, format, private use, U+FFFD */
    CHAR_PUNCTUATION, /* is a word by itself; all ASCII symbols are */
    CHAR_MARK         /* non-spacing mark: a part of a word, or dropped with the accents */
};

enum char_class char_class_of(int32_t c);

/** char_combining_class() - 0 for a starter; else its rank in canonical order (Unicode 3.11). */
int32_t char_combining_class(int32_t c);

/** char_is_ideograph() - CJK ideographs, which stand alone (not Hangul, Hiragana, Katakana). */
bool char_is_ideograph(int32_t c);

C_END

#endif
