/*
 * engine/train/score_print.h - a score as the official SQuAD scripts name its parts.
 */
#ifndef ENGINE_TRAIN_SCORE_PRINT_H
#define ENGINE_TRAIN_SCORE_PRINT_H

#include "io/score.h"

C_BEGIN

/* What score_print() prints, for --help. */
#define SCORE_PRINT_HELP                                                                           \
    "  exact_match, f1, total           always; percent, percent, questions\n"                     \
    "  exact                            = exact_match, for version 2.0 data\n"                     \
    "  HasAns_exact, _f1, _total        version 2.0 data, if there is a question with an answer\n" \
    "  NoAns_exact, _f1, _total         version 2.0 data, if there is a question without one\n"

/** score_print() - the members of a JSON object, without its braces, a line each. */
void score_print(const struct score_result *r, bool unanswerable);

C_END

#endif
