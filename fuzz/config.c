/* A configuration file. What is accepted is written, and what is written is the same again. */
#include "engine/base/config.h"

#include <string.h>

#include "engine/base/arena.h"
#include "fuzz/fuzz.h"

static void write_and_read(const struct run_config *config)
{
    char path[FUZZ_PATH_BYTES], *text = NULL, *again = NULL;
    size_t bytes = 0, again_bytes = 0;
    struct run_config back;
    ASSERT(config_write(config, &text, &bytes) == ST_OK);
    ASSERT(config_load(&back, fuzz_put(path, "again.yaml", text, bytes), NULL, 0) == ST_OK);
    ASSERT(config_write(&back, &again, &again_bytes) == ST_OK);
    ASSERT(bytes == again_bytes && memcmp(text, again, bytes) == 0);
    mem_free(&text);
    mem_free(&again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    char path[FUZZ_PATH_BYTES];
    struct run_config config;
    fuzz_begin();
    if (fuzz_result(config_load(&config, fuzz_put(path, "config.yaml", data, bytes), NULL, 0)) ==
        ST_OK) {
        (void)fuzz_result(config_check(&config));
        write_and_read(&config);
    }
    return fuzz_end();
}
