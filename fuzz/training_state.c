/* The training state in a manifest, read by a run that is not quite the one that wrote it. */
#include <jansson.h>

#include "engine/train/checkpoint_state.h"
#include "fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static struct trainer trainer;
    static struct run_data run_data;
    struct run_config config;
    struct comm comm = {.rank = 1, .world_size = 2};
    struct training_state state;
    json_error_t error;
    fuzz_begin();
    config_defaults(&config);
    run_data.train.count = 7;
    trainer.config = &config;
    trainer.data = &run_data;
    trainer.comm = &comm;
    trainer.sampler.count = 7;
    trainer.sampler.global_batch = 4;
    json_t *root = json_loadb((const char *)data, bytes, JSON_REJECT_DUPLICATES, &error);
    if (json_is_object(root))
        (void)fuzz_result(training_state_read(&state, root, &trainer, "here"));
    json_decref(root);
    return fuzz_end();
}
