/* A data file of a checkpoint whose hashes fit, as a hostile writer could make it. */
#include "io/checkpoint.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <xxhash.h>

#include "engine/base/file.h"
#include "fuzz/fuzz.h"

enum { MAX_BYTES = 1 << 16, FOOT_BYTES = 48, HEAD_BYTES = 16, NUMEL = 40 };

static const char head[HEAD_BYTES + 1] = "\x89TSR\r\n\x1a\n\1\0\0\0\0\0\0\0";

static const char table[] =
    "{\"format\":\"tessera checkpoint\",\"version\":1,\"step\":1,\"training\":{},\"tensors\":["
    "{\"name\":\"a\",\"dtype\":\"F32\",\"shape\":[2],\"states\":[\"master\"]},"
    "{\"name\":\"b\",\"dtype\":\"F32\",\"shape\":[4,10],\"states\":[\"master\",\"adam_m\"]}],"
    "\"files\":[{\"name\":\"data-00000.tsr\",\"bytes\":%zu,\"xxh3\":\"%016llx\","
    "\"index_xxh3\":\"%016llx\"}]";

static void put_manifest(size_t bytes, uint64_t hash, uint64_t index_hash)
{
    char path[FUZZ_PATH_BYTES], text[2048];
    int n = snprintf(text, sizeof text, table, bytes, (unsigned long long)hash,
                     (unsigned long long)index_hash);
    n += snprintf(text + n, sizeof text - (size_t)n, ",\n \"xxh3\": \"%016llx\"\n}\n",
                  (unsigned long long)XXH3_64bits(text, (size_t)n));
    fuzz_put(path, "step-00000001/manifest.json", text, (size_t)n);
}

/* The input: one byte, how many bytes of it are chunks; chunks, index and footer. */
static void put_checkpoint(const uint8_t *data, size_t bytes)
{
    static uint8_t file[HEAD_BYTES + MAX_BYTES + FOOT_BYTES];
    char path[FUZZ_PATH_BYTES];
    size_t chunks = (size_t)fuzz_take(&data, &bytes, 1);
    bytes = bytes < MAX_BYTES ? bytes : MAX_BYTES;
    chunks = chunks < bytes ? chunks : bytes;
    memcpy(file, head, HEAD_BYTES);
    if (bytes > 0)
        memcpy(file + HEAD_BYTES, data, bytes);
    size_t total = HEAD_BYTES + bytes, index = HEAD_BYTES + chunks;
    uint64_t hash = 0;
    if (total - index >= FOOT_BYTES) { /* the hash stands before the last eight bytes */
        hash = XXH3_64bits(file + index, total - index - 16);
        memcpy(file + total - 16, &hash, sizeof hash);
    }
    fuzz_put(path, "step-00000001/data-00000.tsr", file, total);
    put_manifest(total, XXH3_64bits(file, total), hash);
}

static void read_all(const struct checkpoint *c)
{
    struct checkpoint_reader r = {0};
    float out[NUMEL];
    ASSERT(checkpoint_reader_open(&r, c) == ST_OK);
    (void)fuzz_result(checkpoint_read_range(&r, "master", "a", 0, 2, out));
    (void)fuzz_result(checkpoint_read_range(&r, "master", "b", 3, 30, out));
    (void)fuzz_result(checkpoint_read_range(&r, "adam_m", "b", 0, NUMEL, out));
    checkpoint_reader_close(&r);
    (void)fuzz_result(checkpoint_verify(c, NULL, NULL));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    char path[FUZZ_PATH_BYTES];
    struct checkpoint c = {0};
    fuzz_begin();
    mkdir(fuzz_path(path, "step-00000001"), 0777);
    put_checkpoint(data, bytes);
    if (fuzz_result(checkpoint_open(&c, path)) == ST_OK)
        read_all(&c);
    checkpoint_close(&c);
    return fuzz_end();
}
