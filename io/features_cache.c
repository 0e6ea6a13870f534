/*
 * The cache file. Numbers have the byte order of the machine that wrote it; the mark at 12 tells.
 *
 *     at   bytes
 *     0    8     "TESSFEAT"
 *     8    4     format version, 1
 *     12   4     byte order mark, 0x01020304
 *     16   16    key: XXH3-128, canonical (big-endian), of seven 8-byte little-endian numbers:
 *                content hash of the data, content hash of the vocabulary, cased (0 or 1),
 *                max_length, doc_stride, max_query_length, format version; of checked data the
 *                number 1 is an eighth
 *     32   8     E examples
 *     40   8     F features
 *     48   8     N tokens of all features
 *     56   8     M context tokens
 *     64   8     XXH3-64 of everything from byte 128 on
 *     72   8     XXH3-64 of bytes 0 to 71
 *     80   48    zero
 *     128  40 F  features, 40 bytes each: first_token (8), first_offset (8), example (4),
 *                token_count (4), context_first (4), context_count (4), start (4), end (4)
 *          4 N   ids
 *          4 M   offset_start
 *          4 M   offset_end
 */
#include "io/features_cache.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "engine/base/arena.h"
#include "engine/base/file.h"
#include "engine/base/log.h"

enum { FORMAT_VERSION = 1, BYTE_ORDER_MARK = 0x01020304 };

static const char MAGIC[8] = {'T', 'E', 'S', 'S', 'F', 'E', 'A', 'T'};

struct cache_header {
    char magic[8];
    uint32_t version, byte_order;
    XXH128_canonical_t key;
    int64_t example_count, feature_count, token_count, offset_count;
    uint64_t payload_hash, header_hash;
    char zero[48];
};
_Static_assert(sizeof(struct cache_header) == FEATURES_HEADER_BYTES, "as specified above");
_Static_assert(offsetof(struct cache_header, key) == 16, "as specified above");
_Static_assert(offsetof(struct cache_header, header_hash) == 72, "as specified above");
_Static_assert(sizeof(struct feature) == 40, "as specified above");
_Static_assert(offsetof(struct feature, end) == 36, "as specified above");

static XXH128_canonical_t make_key(uint64_t content_hash, const struct wordpiece *tok,
                                   const struct feature_options *options)
{
    const uint64_t parts[] = {content_hash,
                              tok->vocab->content_hash,
                              tok->cased,
                              (uint64_t)options->max_length,
                              (uint64_t)options->doc_stride,
                              (uint64_t)options->max_query_length,
                              FORMAT_VERSION,
                              1};
    enum { PARTS = sizeof parts / sizeof parts[0] };
    uint8_t bytes[8 * PARTS];
    XXH128_canonical_t key;
    for (int i = 0; i < 8 * PARTS; i++)
        bytes[i] = (uint8_t)(parts[i / 8] >> (8 * (i % 8)));
    XXH128_canonicalFromHash(&key, XXH3_128bits(bytes, 8 * (PARTS - !options->checked)));
    return key;
}

static uint64_t hash_header(const struct cache_header *header)
{
    return XXH3_64bits(header, offsetof(struct cache_header, header_hash));
}

static uint64_t hash_payload(const void *block, size_t bytes)
{
    return XXH3_64bits((const char *)block + FEATURES_HEADER_BYTES, bytes - FEATURES_HEADER_BYTES);
}

/* ---- reading --------------------------------------------------------------------------------- */

static enum status check_header(const struct cache_header *header, size_t file_bytes,
                                const XXH128_canonical_t *key, int64_t example_count)
{
    if (file_bytes < sizeof *header || memcmp(header->magic, MAGIC, sizeof MAGIC) != 0)
        return FAIL(CORRUPT, "not a features cache");
    if (header->version != FORMAT_VERSION || header->byte_order != BYTE_ORDER_MARK)
        return FAIL(CORRUPT, "of another version or byte order");
    if (header->header_hash != hash_header(header))
        return FAIL(CORRUPT, "the header is damaged");
    if (memcmp(&header->key, key, sizeof *key) != 0 ||
        (example_count >= 0 && header->example_count != example_count))
        return FAIL(CORRUPT, "made for other data");
    return ST_OK;
}

/* The hash has passed, so this finds no bad disk but a writer with other ideas of a feature. */
static enum status check_features(const struct feature_set *set, int32_t vocab_size)
{
    int64_t tokens = 0, examples = 0;
    for (int64_t i = 0; i < set->feature_count; i++) {
        const struct feature *f = &set->features[i];
        int64_t behind = (int64_t)f->token_count - 1; /* the last [SEP] */
        if (f->example == examples)
            examples++;
        if (f->example != examples - 1 || f->first_token != tokens || f->context_first < 2 ||
            f->context_count < 0 || f->context_count > behind ||
            f->context_first != behind - f->context_count || f->first_offset < 0 ||
            f->first_offset > set->offset_count - f->context_count || f->start > f->end ||
            f->end >= behind || (f->start < f->context_first && (f->start != 0 || f->end != 0)))
            return FAIL(CORRUPT, "feature %lld is not possible", (long long)i);
        tokens += f->token_count;
    }
    if (examples != set->example_count || tokens != set->token_count)
        return FAIL(CORRUPT, "the features do not add up");
    for (int64_t i = 0; i < set->token_count; i++)
        if (set->ids[i] < 0 || set->ids[i] >= vocab_size)
            return FAIL(CORRUPT, "token %lld is not in the vocabulary", (long long)i);
    for (int64_t i = 0; i < set->offset_count; i++)
        if (set->offset_start[i] < 0 || set->offset_end[i] < set->offset_start[i])
            return FAIL(CORRUPT, "offset %lld is not possible", (long long)i);
    return ST_OK;
}

static bool count_fits(int64_t count, size_t file_bytes)
{
    return count >= 0 && (uint64_t)count <= file_bytes;
}

/* Take over the file's bytes, if they are what @key stands for. */
static enum status adopt(struct feature_set *set, struct file_text *file,
                         const XXH128_canonical_t *key, int64_t example_count,
                         const struct vocab *vocab)
{
    const struct cache_header *header = (const struct cache_header *)(const void *)file->data;
    size_t bytes;
    TRY(check_header(header, file->bytes, key, example_count));
    if (!count_fits(header->feature_count, file->bytes) ||
        !count_fits(header->token_count, file->bytes) ||
        !count_fits(header->offset_count, file->bytes))
        return FAIL(CORRUPT, "the counts are damaged");
    struct feature_set found = {.feature_count = header->feature_count,
                                .token_count = header->token_count,
                                .offset_count = header->offset_count,
                                .example_count = header->example_count};
    TRY(features_block_bytes(&bytes, &found));
    if (bytes != file->bytes)
        return FAIL(CORRUPT, "%zu bytes, the header says %zu", file->bytes, bytes);
    if (header->payload_hash != hash_payload(file->data, bytes))
        return FAIL(CORRUPT, "the contents are damaged");
    features_bind(&found, file->data);
    TRY(check_features(&found, vocab->size));
    *set = found;
    file->data = NULL;
    return ST_OK;
}

static enum status load(struct feature_set *set, const char *path, const XXH128_canonical_t *key,
                        int64_t example_count, const struct vocab *vocab)
{
    enum status st;
    struct file_text file = {0};
    TRY_GOTO(st, out, file_read(&file, path));
    TRY_GOTO(st, out, adopt(set, &file, key, example_count, vocab));
out:
    mem_free(&file.data);
    return st;
}

/* ---- writing --------------------------------------------------------------------------------- */

static enum status save(const struct feature_set *set, const char *cache_dir, const char *path,
                        const XXH128_canonical_t *key)
{
    size_t bytes;
    TRY(features_block_bytes(&bytes, set));
    struct cache_header header = {.version = FORMAT_VERSION,
                                  .byte_order = BYTE_ORDER_MARK,
                                  .key = *key,
                                  .example_count = set->example_count,
                                  .feature_count = set->feature_count,
                                  .token_count = set->token_count,
                                  .offset_count = set->offset_count,
                                  .payload_hash = hash_payload(set->memory, bytes)};
    memcpy(header.magic, MAGIC, sizeof MAGIC);
    header.header_hash = hash_header(&header);
    memcpy(set->memory, &header, sizeof header);
    TRY(file_make_dirs(cache_dir));
    return file_write(path, set->memory, bytes);
}

/* ---- the interface --------------------------------------------------------------------------- */

/* One line, without the places that the message has passed. */
static void warn(const char *path, const char *what)
{
    const char *message = status_message();
    log_warn("features", "%s: %s: %.*s", path, what, (int)strcspn(message, "\n"), message);
    status_clear();
}

static void name_of(char out[FEATURES_CACHE_NAME_BYTES], const XXH128_canonical_t *key)
{
    size_t at = 0;
    for (size_t i = 0; i < sizeof key->digest; i++)
        at += (size_t)snprintf(out + at, FEATURES_CACHE_NAME_BYTES - at, "%02x", key->digest[i]);
    snprintf(out + at, FEATURES_CACHE_NAME_BYTES - at, ".features");
}

void features_cache_name(char out[FEATURES_CACHE_NAME_BYTES], const struct squad_data *data,
                         const struct wordpiece *tok, const struct feature_options *options)
{
    XXH128_canonical_t key = make_key(data->content_hash, tok, options);
    name_of(out, &key);
}

/* What is at @path, if anything is; @example_count as the data has them, -1: not known. */
static bool find(struct feature_set *set, const char *path, const XXH128_canonical_t *key,
                 int64_t example_count, const struct vocab *vocab)
{
    if (access(path, F_OK) != 0)
        return false;
    if (load(set, path, key, example_count, vocab) == ST_OK)
        return true;
    warn(path, "the cache file is of no use and is built again");
    return false;
}

enum status features_find(struct feature_set *set, uint64_t content_hash,
                          const struct wordpiece *tok, const struct feature_options *options,
                          const char *cache_dir, bool *found)
{
    char name[FEATURES_CACHE_NAME_BYTES], path[4096];
    XXH128_canonical_t key = make_key(content_hash, tok, options);
    features_release(set);
    name_of(name, &key);
    TRY(path_join(path, sizeof path, cache_dir, name));
    *found = find(set, path, &key, -1, tok->vocab);
    return ST_OK;
}

enum status features_load_or_build(struct feature_set *set, const struct squad_data *data,
                                   const struct wordpiece *tok,
                                   const struct feature_options *options, const char *cache_dir,
                                   bool *from_cache)
{
    char name[FEATURES_CACHE_NAME_BYTES], path[4096];
    bool found = false;
    features_release(set);
    if (from_cache != NULL)
        *from_cache = false;
    if (cache_dir[0] == '\0')
        return features_build(set, data, tok, options);
    features_cache_name(name, data, tok, options);
    TRY(path_join(path, sizeof path, cache_dir, name));
    XXH128_canonical_t key = make_key(data->content_hash, tok, options);
    found = find(set, path, &key, data->example_count, tok->vocab);
    if (from_cache != NULL)
        *from_cache = found;
    if (found)
        return ST_OK;
    TRY(features_build(set, data, tok, options));
    if (save(set, cache_dir, path, &key) != ST_OK)
        warn(path, "the cache file could not be written");
    return ST_OK;
}
