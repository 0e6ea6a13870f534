/*
 * engine/train/answer_files.h - the files of an evaluation's answers, written beside what follows.
 *
 *     begin -> a thread makes predictions.json, nbest.json, null_odds.json -> end
 *
 * SQuAD's 10,570 questions with 20 answers each are 50 MB of JSON: longer to write than to compute
 * on a GPU. Each file is replaced as a whole, so there is always a good one.
 */
#ifndef ENGINE_TRAIN_ANSWER_FILES_H
#define ENGINE_TRAIN_ANSWER_FILES_H

#include "engine/train/background.h"
#include "io/answers.h"

C_BEGIN

struct answer_files { /* zero-initialise */
    struct background writer;
    struct answers answers; /* owned until the end; their data are borrowed */
    int threads;            /* that may work on them */
    char predictions[1200], nbest[1200], null_odds[1200];
};

/** answer_files_begin() - write @answers, which are taken over, into @dir, with @threads threads.
 * ST_INVALID: its path is too long. */
MUST_CHECK enum status answer_files_begin(struct answer_files *f, struct answers *answers,
                                          const char *dir, int threads);

/** answer_files_end() - wait for the files; fine if there are none. ST_IO; ST_MEMORY. */
MUST_CHECK enum status answer_files_end(struct answer_files *f);

C_END

#endif
