/* metrics.jsonl of a run that goes on, after whatever has become of it. */
#include "engine/train/metrics.h"

#include <sys/stat.h>

#include "fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    char path[FUZZ_PATH_BYTES];
    static struct metrics metrics;
    struct run_config config;
    fuzz_begin();
    config_defaults(&config);
    config.checkpoint.resume_or_start = true;
    mkdir(fuzz_path(config.output.dir, "out"), 0777);
    int64_t first_step = (int64_t)fuzz_take(&data, &bytes, 2);
    fuzz_put(path, "out/metrics.jsonl", data, bytes);
    if (fuzz_result(metrics_open(&metrics, &config)) == ST_OK)
        (void)fuzz_result(metrics_plan(&metrics, first_step + 3, 2, first_step));
    metrics_close(&metrics);
    return fuzz_end();
}
