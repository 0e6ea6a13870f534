/*
 * io/squad.h - question answering data in the SQuAD layout, versions 1.1 and 2.0.
 *
 *     {"version": "v2.0",
 *      "data": [{"title": "Normans",
 *        "paragraphs": [{"context": "The Normans ...",
 *          "qas": [{"id": "56dd...", "question": "In what ...?", "is_impossible": false,
 *                   "answers": [{"text": "France", "answer_start": 159}]}]}]}]}
 *
 * A file becomes a flat array of questions in file order. Optional are "version", "title" (else
 * ""), "is_impossible" (else false) and, where is_impossible is true, "answers". Unknown keys are
 * ignored. Plain and gzip files, a byte order mark and CRLF line ends are accepted; the text has to
 * be valid UTF-8 without zero characters.
 *
 * Loading checks the shape only: EM and F1 need no offsets, so an evaluation file with wrong ones
 * loads. Training calls squad_check_answers(), which needs every answer at its offset.
 *
 * Threads: a loaded squad_data is read-only and may be shared.
 *
 * Sources: SQuAD, arXiv:1606.05250 (v1.1); arXiv:1806.03822 (v2.0).
 */
#ifndef IO_SQUAD_H
#define IO_SQUAD_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/arena.h"
#include "engine/base/status.h"

C_BEGIN

struct squad_answer {
    const char *text; /* may be "" */
    int32_t start; /* code points into the context; as in the file, not checked by squad_load() */
};

struct squad_example { /* strings are UTF-8, zero-terminated, owned by the pool, never NULL */
    const char *id;    /* unique in the file */
    const char *question, *context, *title; /* question and title may be "" */
    int32_t context_index;                  /* same context, same index, ascending from 0 */
    const struct squad_answer *answers;
    int32_t answer_count;
    bool impossible; /* is_impossible of the file */
};

struct squad_data {
    struct pool pool;
    struct squad_example *examples; /* file order */
    int64_t example_count;          /* > 0 after squad_load() */
    int64_t context_count;          /* paragraphs that have a question */
    uint64_t content_hash;          /* XXH3-64 of the file's bytes after gunzip */
    bool unanswerable; /* the v2.0 rules hold: "version" begins with v2, or is_impossible is there,
                          or a question has no answers */
};

/**
 * squad_load() - read a SQuAD file.
 * @data: output; zero it before the first use. Empty after a failure.
 *
 * Return: ST_OK; ST_IO (missing or unreadable file); ST_CORRUPT: broken JSON or text ("path:line:
 * column: ..."), wrong shape ("path: data[3].paragraphs[0].qas[2].answers: expected ..."), an id
 * that is there twice, or no question at all; ST_MEMORY. Cost: O(bytes); for a moment about five
 * times the file in memory.
 */
MUST_CHECK enum status squad_load(struct squad_data *data, const char *path);

/**
 * squad_check_answers() - what training needs beyond the shape.
 *
 * Every question is impossible without an answer, or possible with at least one; every answer has
 * text, and it stands in the context at its offset.
 *
 * Return: ST_OK; ST_CORRUPT with the id, and for an answer its offset and both texts; ST_MEMORY.
 */
MUST_CHECK enum status squad_check_answers(const struct squad_data *data);

void squad_release(struct squad_data *data);

C_END

#endif
