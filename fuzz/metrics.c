/* metrics.jsonl and metrics.csv of a run that goes on, after whatever has become of them. */
#include "engine/train/metrics.h"

#include <sys/stat.h>

#include "fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    char path[FUZZ_PATH_BYTES];
    static struct metrics metrics;
    static const struct account account;
    struct run_config config;
    struct metrics_plan plan = {.steps_per_epoch = 2,
                                .world_size = 2,
                                .device = "cpu",
                                .dtype = DTYPE_F32,
                                .account = &account};
    fuzz_begin();
    config_defaults(&config);
    config.checkpoint.resume_or_start = true;
    config.output.tensorboard = false;
    mkdir(fuzz_path(config.output.dir, "out"), 0777);
    plan.first_step = (int64_t)fuzz_take(&data, &bytes, 2);
    plan.total_steps = plan.first_step + 3;
    fuzz_put(path, "out/metrics.jsonl", data, bytes);
    fuzz_put(path, "out/metrics.csv", data, bytes);
    if (fuzz_result(metrics_open(&metrics, &config)) == ST_OK)
        (void)fuzz_result(metrics_plan(&metrics, &plan));
    metrics_close(&metrics);
    return fuzz_end();
}
