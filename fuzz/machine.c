/* A machine profile. What is accepted is written, and what is written is the same again. */
#include "engine/train/machine.h"

#include <string.h>

#include "engine/base/arena.h"
#include "fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct machine m, back;
    fuzz_begin();
    if (fuzz_result(machine_parse(&m, (const char *)data, bytes, "machine.yaml")) == ST_OK) {
        char *text = NULL, *again = NULL;
        size_t text_bytes = 0, again_bytes = 0;
        ASSERT(machine_format(&m, &text, &text_bytes) == ST_OK);
        ASSERT(machine_parse(&back, text, text_bytes, "again.yaml") == ST_OK);
        ASSERT(machine_format(&back, &again, &again_bytes) == ST_OK);
        ASSERT(text_bytes == again_bytes && memcmp(text, again, text_bytes) == 0);
        mem_free(&text);
        mem_free(&again);
    }
    return fuzz_end();
}
