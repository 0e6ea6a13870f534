/*
 * io/vocab.h - a BERT vocabulary: token <-> id.
 *
 * The file holds one token a line; the line number, from 0, is the id. Line ends are LF or CRLF,
 * the last one may be missing, a byte order mark is skipped. Tokens that continue a word begin with
 * "##". A file whose name ends with .json is a tokenizer.json (io/vocab_json.h). The four tokens
 * that question answering needs have to be there: [PAD] [UNK] [CLS] [SEP].
 *
 * Threads: a loaded vocabulary is read-only and may be shared.
 */
#ifndef IO_VOCAB_H
#define IO_VOCAB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

C_BEGIN

struct vocab_entry {
    const char *text; /* borrowed from struct vocab; zero-terminated UTF-8 */
    size_t bytes;
};

struct vocab {
    char *text;                  /* owned: the file, line ends replaced by zero bytes */
    struct vocab_entry *entries; /* owned; size of them, by id */
    uint32_t *slots;             /* owned; open hash table of id + 1, 0 = empty */
    uint32_t slot_mask;
    int32_t size;
    int32_t pad_id, unk_id, cls_id, sep_id;
    size_t max_token_bytes; /* no look-up of a longer text can succeed */
    uint64_t content_hash;  /* XXH3-64 over the tokens, each seeded with the hash before it */
};

/**
 * vocab_load() - read a vocabulary file or a tokenizer.json (plain or gzip).
 * @vocab: output; zero it before the first use. Empty after a failure.
 *
 * Return: ST_OK; ST_IO (missing or unreadable); ST_CORRUPT (empty, not UTF-8, an empty line, a
 * token that is there twice - these name the line - or a special token missing); ST_UNSUPPORTED (a
 * tokenizer.json of other rules than BERT's); ST_MEMORY.
 */
MUST_CHECK enum status vocab_load(struct vocab *vocab, const char *path);

/** vocab_find() - the id of a token, -1 if there is none. */
int32_t vocab_find(const struct vocab *vocab, const char *text, size_t bytes);

/** vocab_token() - the text of a token; @id in [0, size) is asserted. */
const char *vocab_token(const struct vocab *vocab, int32_t id);

/** vocab_has_capitals() - is there a token with a letter A-Z, other than special ones as [CLS]? A
 * vocabulary for lower-cased text has none. */
bool vocab_has_capitals(const struct vocab *vocab);

void vocab_release(struct vocab *vocab);

C_END

#endif
