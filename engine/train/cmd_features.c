/* `tessera features`: how a SQuAD file is cut into windows, as TSV on standard output. */
#include "engine/train/commands.h"

#include "engine/base/arena.h"
#include "engine/base/options.h"
#include "engine/base/out.h"
#include "io/features.h"

static const char DETAILS[] =
    "One line a question, in file order, behind a comment line:\n"
    "  id, number of windows, CRC-32 of the ids of all its windows (32-bit little-endian numbers,\n"
    "  no padding), and for each window start:end, the tokens of the first answer; 0:0 is none.\n";

static enum status print_features(const char *data_path, const char *vocab_path, bool cased,
                                  const struct feature_options *options)
{
    enum status st;
    struct vocab vocab = {0};
    struct wordpiece tok;
    struct squad_data data = {0};
    struct feature_set set = {0};
    struct file_text tsv = {0};
    TRY_GOTO(st, out, vocab_load(&vocab, vocab_path));
    wordpiece_init(&tok, &vocab, cased);
    TRY_GOTO(st, out, squad_load(&data, data_path));
    TRY_GOTO(st, out, features_build(&set, &data, &tok, options));
    TRY_GOTO(st, out, features_tsv(&tsv, &set, &data));
    out("%s", tsv.data);
    TRY_GOTO(st, out, out_flush());
out:
    mem_free(&tsv.data);
    features_release(&set);
    squad_release(&data);
    vocab_release(&vocab);
    return st;
}

enum status cmd_features(int argc, char **argv)
{
    const char *data = NULL, *vocab = NULL;
    bool cased = false, help_shown = false;
    struct feature_options chosen = {.max_length = 384, .doc_stride = 128};
    const struct option options[] = {
        {.name = "data",
         .kind = OPTION_TEXT,
         .value = &data,
         .metavar = "FILE",
         .help = "questions, SQuAD 1.1 or 2.0 layout",
         .required = true},
        {.name = "vocab",
         .kind = OPTION_TEXT,
         .value = &vocab,
         .metavar = "FILE",
         .help = "BERT vocabulary, a token a line",
         .required = true},
        {.name = "cased",
         .kind = OPTION_FLAG,
         .value = &cased,
         .help = "keep case and accents, for a cased vocabulary"},
        {.name = "max-length",
         .kind = OPTION_INT,
         .value = &chosen.max_length,
         .metavar = "N",
         .help = "tokens a window, special ones included",
         .min = 4,
         .max = 1 << 24},
        {.name = "doc-stride",
         .kind = OPTION_INT,
         .value = &chosen.doc_stride,
         .metavar = "N",
         .help = "context tokens that neighbouring windows share",
         .min = 0,
         .max = 1 << 24},
        {.name = "max-query-length",
         .kind = OPTION_INT,
         .value = &chosen.max_query_length,
         .metavar = "N",
         .help = "tokens after which a question is cut, 0 = never",
         .min = 0,
         .max = 1 << 24},
    };
    const struct command command = {.name = "features",
                                    .summary = "Show how questions become windows of tokens.",
                                    .details = DETAILS,
                                    .options = options,
                                    .option_count = sizeof options / sizeof options[0]};
    TRY(options_parse(&command, argc, argv, &help_shown));
    if (help_shown)
        return ST_OK;
    return print_features(data, vocab, cased, &chosen);
}
