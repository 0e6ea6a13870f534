#include "io/vocab.h"

#include <stdbool.h>
#include <string.h>
#include <utf8proc.h>
#include <xxhash.h>

#include "engine/base/arena.h"
#include "engine/base/file.h"
#include "io/vocab_json.h"

enum { VOCAB_MAX_TOKENS = 1 << 24 };

/* The slot that holds the text, or the empty slot where it belongs. */
static uint32_t find_slot(const struct vocab *vocab, const char *text, size_t bytes)
{
    uint32_t slot = (uint32_t)XXH3_64bits(text, bytes) & vocab->slot_mask;
    while (vocab->slots[slot] != 0) {
        const struct vocab_entry *entry = &vocab->entries[vocab->slots[slot] - 1];
        if (entry->bytes == bytes && memcmp(entry->text, text, bytes) == 0)
            break;
        slot = (slot + 1) & vocab->slot_mask;
    }
    return slot;
}

static enum status check_line(const char *path, int64_t line, const char *text, size_t bytes)
{
    if (bytes == 0)
        return FAIL(CORRUPT, "%s:%lld: the line is empty; expected a token", path, (long long)line);
    for (size_t at = 0; at < bytes;) {
        utf8proc_int32_t c;
        utf8proc_ssize_t n = utf8proc_iterate((const utf8proc_uint8_t *)text + at,
                                              (utf8proc_ssize_t)(bytes - at), &c);
        if (n <= 0 || c == 0)
            return FAIL(CORRUPT, "%s:%lld: the token is not valid UTF-8 text", path,
                        (long long)line);
        at += (size_t)n;
    }
    return ST_OK;
}

static size_t skip_byte_order_mark(const struct file_text *file)
{
    return file->bytes >= 3 && memcmp(file->data, "\xEF\xBB\xBF", 3) == 0 ? 3 : 0;
}

/* Cut the file into lines: sets entries, size and the longest token. */
static enum status split_lines(struct vocab *vocab, const struct file_text *file, const char *path)
{
    size_t capacity = 0;
    for (size_t at = skip_byte_order_mark(file); at < file->bytes; vocab->size++) {
        char *line = file->data + at;
        char *line_end = memchr(line, '\n', file->bytes - at);
        size_t bytes = line_end != NULL ? (size_t)(line_end - line) : file->bytes - at;
        at += bytes + 1;
        if (bytes > 0 && line[bytes - 1] == '\r')
            bytes--;
        TRY(check_line(path, vocab->size + 1, line, bytes));
        if (vocab->size == VOCAB_MAX_TOKENS)
            return FAIL(CORRUPT, "%s: more than %d lines; is it a vocabulary?", path,
                        VOCAB_MAX_TOKENS);
        line[bytes] = '\0'; /* file_read() leaves room for the one behind the last line */
        TRY(mem_grow(&vocab->entries, &capacity, (size_t)vocab->size + 1, sizeof *vocab->entries));
        vocab->entries[vocab->size] = (struct vocab_entry){line, bytes};
        if (bytes > vocab->max_token_bytes)
            vocab->max_token_bytes = bytes;
    }
    if (vocab->size == 0)
        return FAIL(CORRUPT, "%s: the vocabulary is empty", path);
    return ST_OK;
}

static enum status build_index(struct vocab *vocab, const char *path)
{
    uint32_t slot_count = 16;
    while (slot_count < 2 * (uint32_t)vocab->size)
        slot_count *= 2;
    vocab->slot_mask = slot_count - 1;
    TRY(mem_alloc(&vocab->slots, slot_count * sizeof *vocab->slots));
    for (int32_t id = 0; id < vocab->size; id++) {
        const struct vocab_entry *entry = &vocab->entries[id];
        uint32_t slot = find_slot(vocab, entry->text, entry->bytes);
        if (vocab->slots[slot] != 0)
            return FAIL(CORRUPT, "%s:%d: the token \"%s\" is already on line %u", path, id + 1,
                        entry->text, vocab->slots[slot]);
        vocab->slots[slot] = (uint32_t)id + 1;
    }
    return ST_OK;
}

static enum status find_special(const struct vocab *vocab, int32_t *id, const char *token,
                                const char *path)
{
    *id = vocab_find(vocab, token, strlen(token));
    if (*id < 0)
        return FAIL(CORRUPT, "%s: no token %s in %d lines; is it a BERT vocabulary?", path, token,
                    vocab->size);
    return ST_OK;
}

static enum status find_specials(struct vocab *vocab, const char *path)
{
    TRY(find_special(vocab, &vocab->pad_id, "[PAD]", path));
    TRY(find_special(vocab, &vocab->unk_id, "[UNK]", path));
    TRY(find_special(vocab, &vocab->cls_id, "[CLS]", path));
    TRY(find_special(vocab, &vocab->sep_id, "[SEP]", path));
    return ST_OK;
}

/* Hash the tokens and not the file, so that line ends do not matter. */
static uint64_t hash_tokens(const struct vocab *vocab)
{
    uint64_t hash = 0;
    for (int32_t id = 0; id < vocab->size; id++)
        hash = XXH3_64bits_withSeed(vocab->entries[id].text, vocab->entries[id].bytes, hash);
    return hash;
}

static bool is_json(const char *path)
{
    size_t bytes = strlen(path);
    return (bytes > 5 && strcmp(path + bytes - 5, ".json") == 0) ||
           (bytes > 8 && strcmp(path + bytes - 8, ".json.gz") == 0);
}

enum status vocab_load(struct vocab *vocab, const char *path)
{
    enum status st = ST_OK;
    vocab_release(vocab);
    struct file_text file = {0};
    st = is_json(path) ? vocab_json_read(&file, path) : file_read(&file, path);
    vocab->text = file.data;
    TRY_GOTO(st, out, st);
    TRY_GOTO(st, out, split_lines(vocab, &file, path));
    TRY_GOTO(st, out, build_index(vocab, path));
    TRY_GOTO(st, out, find_specials(vocab, path));
    vocab->content_hash = hash_tokens(vocab);
out:
    if (st != ST_OK)
        vocab_release(vocab);
    return st;
}

int32_t vocab_find(const struct vocab *vocab, const char *text, size_t bytes)
{
    if (bytes > vocab->max_token_bytes)
        return -1;
    return (int32_t)vocab->slots[find_slot(vocab, text, bytes)] - 1;
}

const char *vocab_token(const struct vocab *vocab, int32_t id)
{
    ASSERT(id >= 0 && id < vocab->size);
    return vocab->entries[id].text;
}

bool vocab_has_capitals(const struct vocab *vocab)
{
    for (int32_t id = 0; id < vocab->size; id++) {
        const char *text = vocab->entries[id].text;
        if (text[0] != '[' && strpbrk(text, "ABCDEFGHIJKLMNOPQRSTUVWXYZ") != NULL)
            return true;
    }
    return false;
}

void vocab_release(struct vocab *vocab)
{
    mem_free(&vocab->slots);
    mem_free(&vocab->entries);
    mem_free(&vocab->text);
    *vocab = (struct vocab){0};
}
