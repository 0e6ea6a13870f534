/* The folder of a finished run, for tables and charts: summary.json, metrics.jsonl, trace.json and
 * plan.json, with a zero byte between them. */
#include "engine/train/run_result.h"

#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fuzz/fuzz.h"

/* Cut the next part from the input; where there is none, its file is not there. */
static void put_part(const char *name, const uint8_t **data, size_t *bytes)
{
    char path[FUZZ_PATH_BYTES];
    if (*data == NULL) {
        unlink(fuzz_path(path, name));
        return;
    }
    const uint8_t *zero = *bytes > 0 ? memchr(*data, 0, *bytes) : NULL;
    size_t part = zero != NULL ? (size_t)(zero - *data) : *bytes;
    fuzz_put(path, name, *data, part);
    *bytes -= zero != NULL ? part + 1 : part;
    *data = zero != NULL ? zero + 1 : NULL;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static const char config[] = "train: {ranks: 2}\n";
    static struct run_result result;
    char path[FUZZ_PATH_BYTES];
    fuzz_begin();
    mkdir(fuzz_path(path, "run"), 0777);
    fuzz_put(path, "run/config.yaml", config, strlen(config));
    put_part("run/summary.json", &data, &bytes);
    put_part("run/metrics.jsonl", &data, &bytes);
    put_part("run/trace.json", &data, &bytes);
    put_part("run/plan.json", &data, &bytes);
    if (fuzz_result(run_result_read(&result, fuzz_path(path, "run"))) == ST_OK) {
        ASSERT(run_result_first_difference(&result, &result) == 0);
        run_result_median(&result, 1);
    }
    run_result_release(&result);
    return fuzz_end();
}
