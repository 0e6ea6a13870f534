/* A vocabulary, and its own text cut into its own pieces. */
#include "io/vocab.h"

#include "fuzz/fuzz.h"
#include "io/wordpiece.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    char path[FUZZ_PATH_BYTES];
    struct vocab vocab = {0};
    struct wordpiece tok;
    struct token_list list = {0};
    fuzz_begin();
    if (fuzz_result(vocab_load(&vocab, fuzz_put(path, "vocab.txt", data, bytes))) == ST_OK) {
        for (int cased = 0; cased < 2; cased++) {
            list.count = 0;
            wordpiece_init(&tok, &vocab, cased == 1);
            (void)fuzz_result(wordpiece_tokenize(&tok, &list, (const char *)data, bytes));
            for (int64_t i = 0; i < (int64_t)list.count; i++)
                ASSERT(vocab_token(&vocab, list.tokens[i].id) != NULL);
        }
    }
    token_list_release(&list);
    vocab_release(&vocab);
    return fuzz_end();
}
