/* config.json of a model folder. */
#include "engine/train/model_config.h"

#include <sys/stat.h>

#include "fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    char path[FUZZ_PATH_BYTES], file[FUZZ_PATH_BYTES];
    struct run_config config;
    fuzz_begin();
    config_defaults(&config);
    mkdir(fuzz_path(path, "model"), 0777);
    fuzz_put(file, "model/config.json", data, bytes);
    (void)fuzz_result(model_config_check(&config, path));
    if (fuzz_result(model_config_read(&config, path)) == ST_OK)
        (void)fuzz_result(config_check(&config));
    return fuzz_end();
}
