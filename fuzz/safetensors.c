/* A safetensors file: its header, and the ends of its tensors. */
#include "io/safetensors.h"

#include "fuzz/fuzz.h"

enum { MAX_TENSORS = 64, ENDS = 16 };

static void read_ends(const struct safetensors *st, const struct safetensors_tensor *t)
{
    float out[ENDS];
    int64_t n = t->numel < ENDS ? t->numel : ENDS;
    ASSERT(safetensors_find(st, t->name) != NULL);
    (void)fuzz_result(safetensors_read(st, t, 0, n, out));
    (void)fuzz_result(safetensors_read(st, t, t->numel - n, n, out));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    char path[FUZZ_PATH_BYTES];
    struct safetensors st = {0};
    fuzz_begin();
    if (fuzz_result(safetensors_open(&st, fuzz_put(path, "model.safetensors", data, bytes))) ==
        ST_OK)
        for (int i = 0; i < st.count && i < MAX_TENSORS; i++)
            read_ends(&st, &st.tensors[i]);
    safetensors_close(&st);
    return fuzz_end();
}
