/* A cache of windows whose hashes and key fit, as a writer with other ideas could make it. */
#include "io/features_cache.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <xxhash.h>

#include "fuzz/fuzz.h"

enum { MAX_BYTES = 1 << 14, COUNTS = 40, HASHES = 64 };

static const char vocabulary[] = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\n?\n";
static const char questions[] =
    "{\"data\":[{\"paragraphs\":[{\"context\":\"a b a b a b a b a b a b\",\"qas\":["
    "{\"id\":\"1\",\"question\":\"a?\",\"answers\":[{\"text\":\"b\",\"answer_start\":2}]},"
    "{\"id\":\"2\",\"question\":\"b?\",\"answers\":[{\"text\":\"a\",\"answer_start\":4}]}]}]}]}";
static const struct feature_options options = {.max_length = 12, .doc_stride = 2};

/* A header that fits the data, which a first build leaves. */
static void take_header(char header[FEATURES_HEADER_BYTES], const struct squad_data *data,
                        const struct wordpiece *tok, const char *cache)
{
    struct feature_set set = {0};
    ASSERT(features_load_or_build(&set, data, tok, &options, cache, NULL) == ST_OK);
    memcpy(header, set.memory, FEATURES_HEADER_BYTES);
    features_release(&set);
}

/* The input: the counts of features, tokens and offsets, then all that follows the header. */
static void put_cache(char header[FEATURES_HEADER_BYTES], const char *name, const uint8_t *data,
                      size_t bytes)
{
    static char file[FEATURES_HEADER_BYTES + MAX_BYTES];
    char path[FUZZ_PATH_BYTES], below[FUZZ_PATH_BYTES];
    for (int i = 0; i < 3; i++) {
        uint64_t count = fuzz_take(&data, &bytes, 8);
        memcpy(header + COUNTS + 8 * i, &count, 8);
    }
    bytes = bytes < MAX_BYTES ? bytes : MAX_BYTES;
    if (bytes > 0)
        memcpy(file + FEATURES_HEADER_BYTES, data, bytes);
    uint64_t payload = XXH3_64bits(file + FEATURES_HEADER_BYTES, bytes);
    memcpy(header + HASHES, &payload, 8);
    uint64_t hash = XXH3_64bits(header, HASHES + 8);
    memcpy(header + HASHES + 8, &hash, 8);
    memcpy(file, header, FEATURES_HEADER_BYTES);
    snprintf(below, sizeof below, "cache/%s", name);
    fuzz_put(path, below, file, FEATURES_HEADER_BYTES + bytes);
}

static void check_set(const struct feature_set *set, const struct vocab *vocab)
{
    for (int64_t i = 0; i < set->feature_count; i++) {
        const struct feature *f = &set->features[i];
        ASSERT(f->first_token >= 0 && f->first_token + f->token_count <= set->token_count);
        ASSERT(f->first_offset >= 0 && f->first_offset + f->context_count <= set->offset_count);
        ASSERT(f->start >= 0 && f->start <= f->end && f->end < f->token_count);
    }
    for (int64_t i = 0; i < set->token_count; i++)
        ASSERT(set->ids[i] >= 0 && set->ids[i] < vocab->size);
    for (int64_t i = 0; i < set->offset_count; i++)
        ASSERT(set->offset_start[i] >= 0 && set->offset_start[i] <= set->offset_end[i]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static char header[FEATURES_HEADER_BYTES];
    char path[FUZZ_PATH_BYTES], cache[FUZZ_PATH_BYTES], name[FEATURES_CACHE_NAME_BYTES];
    struct squad_data squad = {0};
    struct vocab vocab = {0};
    struct wordpiece tok;
    struct feature_set set = {0};
    bool cached = false;
    fuzz_begin();
    ASSERT(vocab_load(&vocab, fuzz_put(path, "vocab.txt", vocabulary, strlen(vocabulary))) ==
           ST_OK);
    ASSERT(squad_load(&squad, fuzz_put(path, "squad.json", questions, strlen(questions))) == ST_OK);
    wordpiece_init(&tok, &vocab, false);
    mkdir(fuzz_path(cache, "cache"), 0777);
    features_cache_name(name, &squad, &tok, &options);
    if (header[0] == '\0')
        take_header(header, &squad, &tok, cache);
    put_cache(header, name, data, bytes);
    if (fuzz_result(features_load_or_build(&set, &squad, &tok, &options, cache, &cached)) == ST_OK)
        check_set(&set, &vocab);
    features_release(&set);
    squad_release(&squad);
    vocab_release(&vocab);
    return fuzz_end();
}
