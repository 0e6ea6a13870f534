/*
 * io/vocab_json.h - the vocabulary in a tokenizer.json, as Hugging Face's tokenizers write it.
 *
 *     {"added_tokens": [{"id": 0, "content": "[PAD]", ...}, ...],
 *      "model": {"type": "WordPiece", "continuing_subword_prefix": "##",
 *                "max_input_chars_per_word": 100, "vocab": {"[PAD]": 0, "##s": 2015, ...}}, ...}
 *
 * Folders that transformers 5 writes have this file and no vocab.txt. All else in it (normalizer,
 * pre-tokenizer, ...) is not read: casing is a key of the configuration.
 */
#ifndef IO_VOCAB_JSON_H
#define IO_VOCAB_JSON_H

#include "engine/base/file.h"

C_BEGIN

/**
 * vocab_json_read() - the tokens as the text of a vocab.txt: one a line, by id.
 * @text: output; the caller frees text->data.
 *
 * Return: ST_OK; ST_IO; ST_CORRUPT (no such JSON, an id without a token or with two, a line end in
 * a token); ST_UNSUPPORTED (not WordPiece, or of other rules than BERT's); ST_MEMORY.
 */
MUST_CHECK enum status vocab_json_read(struct file_text *text, const char *path);

C_END

#endif
