/* Predictions and, behind a zero byte, null odds, scored against three questions. */
#include <string.h>

#include "fuzz/fuzz.h"
#include "io/score.h"

static const char questions[] =
    "{\"version\":\"v2.0\",\"data\":[{\"paragraphs\":[{\"context\":\"The Normans in France.\","
    "\"qas\":[{\"id\":\"a\",\"question\":\"Where?\",\"answers\":[{\"text\":\"France\","
    "\"answer_start\":15},{\"text\":\"in France\",\"answer_start\":12}]},"
    "{\"id\":\"b\",\"question\":\"When?\",\"is_impossible\":true,\"answers\":[]},"
    "{\"id\":\"c\",\"question\":\"Who?\",\"answers\":[{\"text\":\"The Normans\","
    "\"answer_start\":0}]}]}]}]}";

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    char path[FUZZ_PATH_BYTES], predictions[FUZZ_PATH_BYTES], odds[FUZZ_PATH_BYTES];
    const uint8_t *zero = bytes > 0 ? memchr(data, 0, bytes) : NULL;
    size_t first = zero != NULL ? (size_t)(zero - data) : bytes;
    struct squad_data squad = {0};
    struct score_result result;
    fuzz_begin();
    if (squad_load(&squad, fuzz_put(path, "squad.json", questions, strlen(questions))) != ST_OK)
        __builtin_trap();
    fuzz_put(predictions, "predictions.json", data, first);
    if (zero != NULL)
        fuzz_put(odds, "odds.json", zero + 1, bytes - first - 1);
    if (fuzz_result(score_files(&result, &squad, predictions, zero != NULL ? odds : NULL, 1.0)) ==
        ST_OK) {
        ASSERT(result.all.exact >= 0 && result.all.exact <= result.all.f1 && result.all.f1 <= 100);
        ASSERT(result.all.total <= squad.example_count);
    }
    squad_release(&squad);
    return fuzz_end();
}
