/*
 * io/features.h - SQuAD questions as windows of token ids that fit a model.
 *
 * A context that is too long for the model is cut into windows that overlap by doc_stride tokens;
 * each becomes a feature. With max_length 12, a question of 2 tokens and doc_stride 3, a context of
 * 11 tokens gives two features (room for 12 - 3 - 2 = 7 context tokens, step 7 - 3 = 4):
 *
 *     [CLS] q0 q1 [SEP] c0 c1 c2 c3 c4 c5 c6  [SEP]
 *     [CLS] q0 q1 [SEP] c4 c5 c6 c7 c8 c9 c10 [SEP]
 *
 * Rules, which are those of Hugging Face's run_qa example:
 *   - only the context is cut; every context token is in at least one window
 *   - windows begin every (room - doc_stride) tokens until one reaches the end of the context
 *   - the label of a window is the token span of the first answer: from the last token that begins
 *     at or before the answer to the first that ends at or behind its end. It is 0, 0 ([CLS]) when
 *     the question has no answer or the answer is not wholly inside the window. A label is always a
 *     context token of its window or 0, and start <= end.
 *
 * Token types follow from context_first: 0 before it, 1 from there on. Nothing is padded.
 *
 * Threads: building is one thread's work; a built set is read-only and may be shared.
 */
#ifndef IO_FEATURES_H
#define IO_FEATURES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/file.h"
#include "engine/base/status.h"
#include "io/squad.h"
#include "io/wordpiece.h"

C_BEGIN

struct feature_options {
    int64_t max_length;       /* tokens a window, special ones included; >= 4 */
    int64_t doc_stride;       /* context tokens that neighbours share, >= 0 */
    int64_t max_query_length; /* longer questions are cut; 0 = no limit */
    bool checked; /* the answers have passed squad_check_answers(); for the cache, nothing else */
};

struct feature {
    int64_t first_token;   /* ids[first_token .. + token_count) are the window */
    int64_t first_offset;  /* offset_*[first_offset .. + context_count) are its context tokens' */
    int32_t example;       /* index in squad_data.examples */
    int32_t token_count;   /* all of them, special ones included */
    int32_t context_first; /* position in the window of the first context token */
    int32_t context_count; /* context tokens; 0 only if the context has none */
    int32_t start, end;    /* label: positions in the window, end included; 0, 0 = no answer */
};

struct feature_set {
    void *memory; /* owned; one block that holds all arrays, laid out as the cache file */
    struct feature *features; /* feature_count; by example, then by window */
    int32_t *ids;             /* token_count */
    int32_t *offset_start;    /* offset_count: code points in the context, by context; windows of */
    int32_t *offset_end;      /* the same context share them */
    int64_t feature_count, token_count, offset_count;
    int64_t example_count; /* every example has at least one feature */
};

/**
 * features_build() - tokenize and cut into windows.
 * @set: output; zero it before the first use. Empty after a failure.
 * @tok: cased or uncased tokenizer; its vocabulary gives the special tokens.
 *
 * Return: ST_OK; ST_INVALID: an option out of range, or - with the id of the question - a question
 * that leaves no room for a context token, or a context that needs more than one window while
 * doc_stride is not smaller than the room; ST_CORRUPT (text not UTF-8); ST_MEMORY. Cost: each
 * context is tokenized once; linear in the tokens of all windows.
 */
MUST_CHECK enum status features_build(struct feature_set *set, const struct squad_data *data,
                                      const struct wordpiece *tok,
                                      const struct feature_options *options);

/**
 * features_tsv() - one line a question: id, number of windows, CRC-32 of the ids of all its windows
 * (as little-endian 32-bit numbers), "start:end" per window; a comment line first.
 * @text: output, mem_free(&text->data).
 * @data: what @set was built from.
 *
 * Return: ST_OK; ST_MEMORY.
 */
MUST_CHECK enum status features_tsv(struct file_text *text, const struct feature_set *set,
                                    const struct squad_data *data);

void features_release(struct feature_set *set);

/* ---- for io/features_cache.c ----------------------------------------------------------------- */

enum { FEATURES_HEADER_BYTES = 128 }; /* of the block, in front of the arrays */

/** features_block_bytes() - bytes of the block for the counts in @set. ST_INVALID on overflow. */
MUST_CHECK enum status features_block_bytes(size_t *bytes, const struct feature_set *set);

/** features_bind() - point the arrays into @memory, for the counts in @set; @set then owns it. */
void features_bind(struct feature_set *set, void *memory);

C_END

#endif
