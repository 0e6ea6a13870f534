/* `tessera score`: EM and F1 of a predictions file, as JSON on standard output. */
#include "engine/train/commands.h"

#include "engine/base/log.h"
#include "engine/base/options.h"
#include "engine/base/out.h"
#include "io/score.h"
#include "io/squad.h"

static const double DEFAULT_THRESHOLD = 1.0; /* as the official script */

static const char DETAILS[] =
    "Prints a JSON object with the names of the official SQuAD scripts:\n"
    "  exact_match, f1, total           always; percent, percent, questions\n"
    "  exact                            = exact_match, for version 2.0 data\n"
    "  HasAns_exact, _f1, _total        version 2.0 data, if there is a question with an answer\n"
    "  NoAns_exact, _f1, _total         version 2.0 data, if there is a question without one\n"
    "  best_exact, best_exact_thresh    with --null-odds: the best score and the threshold for it\n"
    "  best_f1, best_f1_thresh          with --null-odds\n"
    "  missing_predictions              questions without a prediction\n"
    "  extra_predictions                predictions of unknown ids\n"
    "A missing prediction scores 0 in version 1.1 data and is left out of the totals in 2.0 "
    "data.\n";

static void print_part(const char *name, const struct score_part *part)
{
    if (part->total == 0)
        return;
    out("    \"%s_exact\": %.17g,\n    \"%s_f1\": %.17g,\n    \"%s_total\": %lld,\n", name,
        part->exact, name, part->f1, name, (long long)part->total);
}

static void print_result(const struct score_result *r, bool unanswerable)
{
    out("{\n    \"exact_match\": %.17g,\n", r->all.exact);
    if (unanswerable)
        out("    \"exact\": %.17g,\n", r->all.exact);
    out("    \"f1\": %.17g,\n    \"total\": %lld,\n", r->all.f1, (long long)r->all.total);
    if (unanswerable) {
        print_part("HasAns", &r->has_answer);
        print_part("NoAns", &r->no_answer);
    }
    if (r->has_best)
        out("    \"best_exact\": %.17g,\n    \"best_exact_thresh\": %.17g,\n"
            "    \"best_f1\": %.17g,\n    \"best_f1_thresh\": %.17g,\n",
            r->best_exact, r->best_exact_thresh, r->best_f1, r->best_f1_thresh);
    out("    \"missing_predictions\": %lld,\n    \"extra_predictions\": %lld\n}\n",
        (long long)r->missing, (long long)r->extra);
}

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
    print_result(&result, data.unanswerable);
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
                                    .summary = "exact match and F1 of a predictions file",
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
