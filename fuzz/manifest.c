/* The text of a manifest, with the hash that makes it believable, beside an empty data file. */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <xxhash.h>

#include "fuzz/fuzz.h"
#include "io/checkpoint.h"

enum { MAX_BYTES = 1 << 16 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static char text[MAX_BYTES + 64];
    static const char empty[64] = "\x89TSR\r\n\x1a\n\1";
    char path[FUZZ_PATH_BYTES], file[FUZZ_PATH_BYTES];
    struct checkpoint c = {0};
    fuzz_begin();
    bytes = bytes < MAX_BYTES ? bytes : MAX_BYTES;
    if (bytes > 0)
        memcpy(text, data, bytes);
    int tail = snprintf(text + bytes, sizeof text - bytes, ",\n \"xxh3\": \"%016llx\"\n}\n",
                        (unsigned long long)XXH3_64bits(text, bytes));
    mkdir(fuzz_path(path, "step-00000001"), 0777);
    fuzz_put(file, "step-00000001/data-00000.tsr", empty, sizeof empty);
    fuzz_put(file, "step-00000001/manifest.json", text, bytes + (size_t)tail);
    (void)fuzz_result(checkpoint_open(&c, path));
    checkpoint_close(&c);
    return fuzz_end();
}
