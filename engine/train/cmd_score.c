/* `tessera score`: EM and F1 of a predictions file, as JSON on standard output. */
#include "engine/train/commands.h"

#include "engine/base/log.h"
#include "engine/base/options.h"
#include "engine/base/out.h"
#include "engine/train/score_print.h"
#include "io/squad.h"

static const double DEFAULT_THRESHOLD = 1.0; /* as the official script */

static const char DETAILS[] =
    "Prints a JSON object with the names of the official SQuAD scripts:\n" SCORE_PRINT_HELP
    "  best_exact, best_exact_thresh    with --null-odds: the best score and the threshold for it\n"
    "  best_f1, best_f1_thresh          with --null-odds\n"
    "  missing_predictions              questions without a prediction\n"
    "  extra_predictions                predictions of unknown ids\n"
    "A missing prediction scores 0 in version 1.1 data and is left out of the totals in 2.0 "
    "data.\n";

static enum status score(const char *data_path, const char *predictions, const char *null_odds,
                         double threshold)
{
    struct squad_data data = {0};
    struct score_result result;
    enum status st;
    TRY_GOTO(st, out, squad_load(&data, data_path));
    TRY_GOTO(st, out, score_files(&result, &data, predictions, null_odds, threshold));
    if (result.missing > 0)
        log_warn("score", "%lld of %lld questions have no prediction in %s",
                 (long long)result.missing, (long long)data.example_count, predictions);
    if (result.extra > 0)
        log_warn("score", "%lld predictions in %s are of ids that are not in %s",
                 (long long)result.extra, predictions, data_path);
    out("{\n");
    score_print(&result, data.unanswerable);
    out("}\n");
    TRY_GOTO(st, out, out_flush());
out:
    squad_release(&data);
    return st;
}

enum status cmd_score(int argc, char **argv)
{
    const char *data = NULL, *predictions = NULL, *null_odds = NULL;
    double threshold = DEFAULT_THRESHOLD;
    bool help_shown = false;
    const struct option options[] = {
        {.name = "data",
         .kind = OPTION_TEXT,
         .value = &data,
         .metavar = "FILE",
         .help = "questions with reference answers, SQuAD 1.1 or 2.0 layout",
         .required = true},
        {.name = "predictions",
         .kind = OPTION_TEXT,
         .value = &predictions,
         .metavar = "FILE",
         .help = "JSON object from question id to answer text; \"\" is \"no answer\"",
         .required = true},
        {.name = "null-odds",
         .kind = OPTION_TEXT,
         .value = &null_odds,
         .metavar = "FILE",
         .help = "JSON object from question id to a number, higher for \"no answer\""},
        {.name = "threshold",
         .kind = OPTION_REAL,
         .value = &threshold,
         .metavar = "X",
         .help = "null odds above X count as \"no answer\""},
    };
    const struct command command = {.name = "score",
                                    .summary = "Exact match and F1 of a predictions file.",
                                    .details = DETAILS,
                                    .options = options,
                                    .option_count = sizeof options / sizeof options[0]};
    TRY(options_parse(&command, argc, argv, &help_shown));
    if (help_shown)
        return ST_OK;
    if (threshold != DEFAULT_THRESHOLD && null_odds == NULL)
        return FAIL(INVALID, "--threshold needs --null-odds");
    return score(data, predictions, null_odds, threshold);
}
