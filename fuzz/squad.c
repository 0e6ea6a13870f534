/* Questions: the file, its answers, and the windows that are cut from its texts. */
#include "fuzz/fuzz.h"

#include <string.h>

#include "engine/base/file.h"
#include "io/features.h"
#include "io/squad.h"

static const char vocabulary[] =
    "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\nnorm\n##an\n##s\n##n\n?\n"
    "in\nwhat\nc\n##o\n##u\n##t\n##r\n##y\n.\n1\n##0\n";

static void cut(const struct squad_data *data, bool cased)
{
    char path[FUZZ_PATH_BYTES];
    struct vocab vocab = {0};
    struct wordpiece tok;
    struct feature_set set = {0};
    struct file_text text = {NULL, 0};
    const struct feature_options options = {
        .max_length = 24, .doc_stride = 5, .max_query_length = 8};
    if (vocab_load(&vocab, fuzz_put(path, "vocab.txt", vocabulary, strlen(vocabulary))) != ST_OK)
        __builtin_trap();
    wordpiece_init(&tok, &vocab, cased);
    if (fuzz_result(features_build(&set, data, &tok, &options)) == ST_OK)
        (void)fuzz_result(features_tsv(&text, &set, data));
    mem_free(&text.data);
    features_release(&set);
    vocab_release(&vocab);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    char path[FUZZ_PATH_BYTES];
    struct squad_data squad = {0};
    fuzz_begin();
    if (fuzz_result(squad_load(&squad, fuzz_put(path, "squad.json", data, bytes))) == ST_OK) {
        (void)fuzz_result(squad_check_answers(&squad));
        cut(&squad, bytes % 2 == 0);
    }
    squad_release(&squad);
    return fuzz_end();
}
