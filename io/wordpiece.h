/*
 * io/wordpiece.h - text to WordPiece tokens, as BERT was trained on them.
 *
 *     text     Zürichs Café!
 *     words    zurichs cafe !
 *     tokens   zurich  ##s   cafe  !
 *     ids      10204   2015  7668  999
 *     offsets  0-6     6-7   8-12  12-13     code points of the text, end excluded
 *
 * The steps, which agree with the Hugging Face `tokenizers` library (BertNormalizer,
 * BertPreTokenizer, WordPiece) token by token and offset by offset:
 *
 *   1. control, format and private-use characters and U+FFFD are dropped; white space is a space
 *   2. CJK ideographs stand alone
 *   3. uncased: canonical decomposition, non-spacing marks dropped, then lower case, each character
 *      by itself (a Greek capital sigma never becomes a final sigma)
 *   4. words end at spaces; every punctuation character is a word of its own
 *   5. a word is the longest token that begins it, then the longest "##" token that goes on, ...; a
 *      word that cannot be covered, or has more than WORDPIECE_MAX_WORD_CHARS characters, is [UNK]
 *
 * Special tokens in the text are text: "[CLS]" gives "[", "cl", "##s", "]".
 *
 * Threads: the tokenizer is read-only and may be shared; each thread has its own token_list.
 *
 * Sources: BERT, arXiv:1810.04805; Unicode Standard Annex 15 (normalisation).
 */
#ifndef IO_WORDPIECE_H
#define IO_WORDPIECE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"
#include "io/vocab.h"

C_BEGIN

enum { WORDPIECE_MAX_WORD_CHARS = 100 };

struct wordpiece {
    const struct vocab *vocab; /* borrowed */
    bool cased;                /* false: with step 3 */
    uint8_t ascii[128];        /* what steps 1-4 do with an ASCII character: its class ... */
    char ascii_lower[128];     /* ... and what it becomes */
};

struct token {
    int32_t id;
    int32_t start, end; /* code points of the text */
};

struct token_mark; /* a character that waits for its place in canonical order */

/* Tokens, and room to work in; zero-initialise, use again and again. */
struct token_list {
    struct token *tokens; /* owned; count of them */
    size_t count, capacity;
    struct token_mark *marks; /* owned */
    size_t mark_capacity;
};

/** wordpiece_init() - @vocab has to live as long as @tok. Nothing to release. */
void wordpiece_init(struct wordpiece *tok, const struct vocab *vocab, bool cased);

/**
 * wordpiece_tokenize() - append the tokens of a text to @list.
 * @text: @bytes of UTF-8; zero bytes are control characters.
 *
 * No special tokens are added. The caller sets list->count to 0 to begin anew.
 *
 * Return: ST_OK; ST_CORRUPT (not UTF-8: names the byte); ST_INVALID (2 GiB or more); ST_MEMORY.
 * After a failure list->count is what it was. Cost: linear in @bytes, 30 ns a byte of English.
 */
MUST_CHECK enum status wordpiece_tokenize(const struct wordpiece *tok, struct token_list *list,
                                          const char *text, size_t bytes);

void token_list_release(struct token_list *list);

C_END

#endif
