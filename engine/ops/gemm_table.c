#include "engine/ops/gemm_table.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/file.h"
#include "engine/base/text.h"

enum { LINE_BYTES = 768 }; /* of an entry at most: 29 numbers with their names */

#define MAGIC   "tessera gemm plan "
#define VERSION "3"

static const char *const kind_names[GEMM_KINDS] = {"forward", "data", "weight"};
static const char *const attribute_names[GEMM_ATTRIBUTES] = {
    "id", "tile", "stages", "split", "reduction", "swizzle", "custom", "inner", "cluster", "sm"};

/* ---- the table ------------------------------------------------------------------------------- */

bool gemm_card_equal(const struct gemm_card *a, const struct gemm_card *b)
{
    return strcmp(a->name, b->name) == 0 && a->multiprocessors == b->multiprocessors &&
           a->library == b->library;
}

void gemm_card_text(char *out, size_t bytes, const struct gemm_card *card)
{
    snprintf(out, bytes, "%s, %lld multiprocessors, cuBLASLt %lld", card->name,
             (long long)card->multiprocessors, (long long)card->library);
}

void gemm_table_release(struct gemm_table *table)
{
    mem_free(&table->entries);
    memset(table, 0, sizeof *table);
}

struct gemm_key gemm_serving_key(const struct gemm_key *key)
{
    struct gemm_key serving = *key;
    serving.T = (key->T + GEMM_ROWS - 1) / GEMM_ROWS * GEMM_ROWS;
    return serving;
}

const struct gemm_entry *gemm_table_find(const struct gemm_table *table, const struct gemm_key *key)
{
    for (int i = 0; i < table->count; i++)
        if (memcmp(&table->entries[i].key, key, sizeof *key) == 0)
            return &table->entries[i];
    return NULL;
}

enum status gemm_table_add(struct gemm_table *table, const struct gemm_entry *entry)
{
    DASSERT(gemm_table_find(table, &entry->key) == NULL);
    if (table->count == GEMM_TABLE_MAX)
        return FAIL(INVALID, "a GEMM plan has at most %d products", GEMM_TABLE_MAX);
    TRY(mem_grow(&table->entries, &table->capacity, (size_t)table->count + 1,
                 sizeof *table->entries));
    table->entries[table->count++] = *entry;
    return ST_OK;
}

/* ---- writing --------------------------------------------------------------------------------- */

static int choice_text(char *out, size_t bytes, const struct gemm_choice *c)
{
    int used = 0;
    for (int i = 0; i < GEMM_ATTRIBUTES; i++)
        used += snprintf(out + used, bytes - (size_t)used, " %s=%u", attribute_names[i],
                         (unsigned)c->algo[i]);
    return used + snprintf(out + used, bytes - (size_t)used, " us=%.2f", c->us);
}

static int entry_text(char *out, size_t bytes, const struct gemm_entry *e)
{
    const struct gemm_key *k = &e->key;
    int used = snprintf(out, bytes, "%s %s T=%lld N=%lld K=%lld add=%d bias=%d align=%d beside=%d",
                        kind_names[k->kind], dtype_name((enum dtype)k->dtype), (long long)k->T,
                        (long long)k->N, (long long)k->K, k->add, k->bias, k->align, k->beside);
    used += choice_text(out + used, bytes - (size_t)used, &e->alone);
    if (k->beside > 0)
        used += choice_text(out + used, bytes - (size_t)used, &e->beside);
    return used + snprintf(out + used, bytes - (size_t)used, "\n");
}

enum status gemm_table_write(char **text, size_t *bytes, const struct gemm_table *table)
{
    size_t room = ((size_t)table->count + 1) * LINE_BYTES;
    TRY(mem_alloc(text, room));
    int used = snprintf(*text, room, "%s\ncard %s\nmultiprocessors %lld\nlibrary %lld\n",
                        MAGIC VERSION, table->card.name, (long long)table->card.multiprocessors,
                        (long long)table->card.library);
    for (int i = 0; i < table->count; i++)
        used += entry_text(*text + used, LINE_BYTES, &table->entries[i]);
    *bytes = (size_t)used;
    ASSERT(*bytes < room);
    return ST_OK;
}

/* ---- reading --------------------------------------------------------------------------------- */

struct reading {
    const char *path, *next, *end; /* borrowed */
    int line;
    char text[LINE_BYTES]; /* of the line, without its end */
    char *at;              /* in text */
};

static enum status bad_line(const struct reading *r, const char *expected, const char *found)
{
    return FAIL(CORRUPT, "%s:%d: expected %s, found \"%.60s\"", r->path, r->line, expected, found);
}

static enum status next_line(struct reading *r)
{
    size_t left = (size_t)(r->end - r->next);
    const char *stop = left > 0 ? memchr(r->next, '\n', left) : NULL;
    r->line++;
    if (stop == NULL)
        return FAIL(CORRUPT, "%s:%d: the text ends before the line does", r->path, r->line);
    size_t bytes = (size_t)(stop - r->next);
    if (bytes >= sizeof r->text)
        return FAIL(CORRUPT, "%s:%d: a line of %zu bytes", r->path, r->line, bytes);
    for (size_t i = 0; i < bytes; i++)
        if (r->next[i] < ' ' || r->next[i] > '~')
            return FAIL(CORRUPT, "%s:%d: byte %zu is no printable ASCII", r->path, r->line, i + 1);
    memcpy(r->text, r->next, bytes);
    r->text[bytes] = '\0';
    r->at = r->text;
    r->next = stop + 1;
    return ST_OK;
}

/* The next word of the line, ended with a zero byte; "" behind the last. */
static char *next_word(struct reading *r)
{
    char *word = r->at, *space = strchr(word, ' ');
    if (space != NULL)
        *space = '\0';
    r->at = space != NULL ? space + 1 : word + strlen(word);
    return word;
}

/* What follows "name=" in the next word. */
static enum status word_value(struct reading *r, const char **value, const char *name)
{
    char expected[32];
    char *word = next_word(r), *equals = strchr(word, '=');
    size_t length = strlen(name);
    snprintf(expected, sizeof expected, "%s=NUMBER", name);
    if (equals == NULL || (size_t)(equals - word) != length || strncmp(word, name, length) != 0)
        return bad_line(r, expected, word);
    *value = equals + 1;
    return ST_OK;
}

static enum status word_int(struct reading *r, int64_t *out, const char *name, int64_t min,
                            int64_t max)
{
    char expected[96];
    const char *value = NULL;
    TRY(word_value(r, &value, name));
    if (text_to_int(out, value) && *out >= min && *out <= max)
        return ST_OK;
    snprintf(expected, sizeof expected, "%s from %lld to %lld", name, (long long)min,
             (long long)max);
    return bad_line(r, expected, value);
}

static enum status word_int32(struct reading *r, int32_t *out, const char *name, int64_t max)
{
    int64_t value = 0;
    TRY(word_int(r, &value, name, 0, max));
    *out = (int32_t)value;
    return ST_OK;
}

static enum status read_key(struct reading *r, struct gemm_key *key)
{
    enum { LARGEST = 1 << 30 };
    const char *kind = next_word(r);
    for (key->kind = 0; key->kind < GEMM_KINDS; key->kind++)
        if (strcmp(kind, kind_names[key->kind]) == 0)
            break;
    if (key->kind == GEMM_KINDS)
        return bad_line(r, "forward, data or weight", kind);
    const char *dtype = next_word(r);
    key->dtype = strcmp(dtype, dtype_name(DTYPE_BF16)) == 0 ? DTYPE_BF16 : DTYPE_F32;
    if (strcmp(dtype, dtype_name((enum dtype)key->dtype)) != 0)
        return bad_line(r, "fp32 or bf16", dtype);
    TRY(word_int(r, &key->T, "T", 1, LARGEST));
    TRY(word_int(r, &key->N, "N", 1, LARGEST));
    TRY(word_int(r, &key->K, "K", 1, LARGEST));
    TRY(word_int32(r, &key->add, "add", 1));
    TRY(word_int32(r, &key->bias, "bias", 1));
    TRY(word_int32(r, &key->align, "align", 256));
    if (key->align == 0 || (key->align & (key->align - 1)) != 0)
        return bad_line(r, "align as a power of two", "another number");
    return word_int32(r, &key->beside, "beside", 1 << 16);
}

static enum status read_choice(struct reading *r, struct gemm_choice *c)
{
    const char *us = NULL;
    for (int i = 0; i < GEMM_ATTRIBUTES; i++) {
        int64_t value = 0;
        TRY(word_int(r, &value, attribute_names[i], 0, UINT32_MAX));
        c->algo[i] = (uint32_t)value;
    }
    TRY(word_value(r, &us, "us"));
    if (!text_to_real(&c->us, us) || !(c->us >= 0.0 && c->us < 1e9))
        return bad_line(r, "us from 0 to 1e9", us);
    return ST_OK;
}

static enum status read_entry(struct reading *r, struct gemm_entry *e)
{
    TRY(read_key(r, &e->key));
    TRY(read_choice(r, &e->alone));
    if (e->key.beside > 0)
        TRY(read_choice(r, &e->beside));
    return r->at[0] == '\0' ? ST_OK : bad_line(r, "the end of the line", r->at);
}

static enum status read_head_int(struct reading *r, int64_t *out, const char *name)
{
    TRY(next_line(r));
    const char *word = next_word(r);
    if (strcmp(word, name) != 0)
        return bad_line(r, name, word);
    if (!text_to_int(out, r->at) || *out < 1)
        return bad_line(r, "a number of at least 1", r->at);
    return ST_OK;
}

static enum status read_head(struct reading *r, struct gemm_card *card)
{
    TRY(next_line(r));
    if (strncmp(r->text, MAGIC, sizeof MAGIC - 1) != 0)
        return bad_line(r, MAGIC VERSION, r->text);
    if (strcmp(r->text + sizeof MAGIC - 1, VERSION) != 0)
        return FAIL(UNSUPPORTED, "%s:%d: a GEMM plan of version %.20s, not %s", r->path, r->line,
                    r->text + sizeof MAGIC - 1, VERSION);
    TRY(next_line(r));
    const char *word = next_word(r);
    size_t bytes = strlen(r->at);
    if (strcmp(word, "card") != 0)
        return bad_line(r, "card", word);
    if (bytes == 0 || bytes >= sizeof card->name)
        return bad_line(r, "the card's name, 1 to 127 bytes", r->at);
    memcpy(card->name, r->at, bytes + 1);
    TRY(read_head_int(r, &card->multiprocessors, "multiprocessors"));
    return read_head_int(r, &card->library, "library");
}

enum status gemm_table_read(struct gemm_table *table, const char *text, size_t bytes,
                            const char *path)
{
    struct reading r = {.path = path, .next = text, .end = text + bytes};
    enum status st = ST_OK;
    TRY_GOTO(st, out, read_head(&r, &table->card));
    while (r.next < r.end) {
        struct gemm_entry e;
        memset(&e, 0, sizeof e);
        TRY_GOTO(st, out, next_line(&r));
        TRY_GOTO(st, out, read_entry(&r, &e));
        if (gemm_table_find(table, &e.key) != NULL)
            TRY_GOTO(st, out,
                     FAIL(CORRUPT, "%s:%d: a product that was there before", path, r.line));
        if (table->count == GEMM_TABLE_MAX)
            TRY_GOTO(st, out,
                     FAIL(CORRUPT, "%s: more than %d products", path, (int)GEMM_TABLE_MAX));
        TRY_GOTO(st, out, gemm_table_add(table, &e));
    }
out:
    if (st != ST_OK)
        gemm_table_release(table);
    return st;
}

/* ---- where ----------------------------------------------------------------------------------- */

enum status gemm_table_path(char *out, size_t bytes, const char *folder,
                            const struct gemm_card *card)
{
    char name[GEMM_CARD_BYTES + 96];
    int used = snprintf(name, sizeof name, "gemm-%s-%lld-%lld.txt", card->name,
                        (long long)card->multiprocessors, (long long)card->library);
    for (int i = 0; i < used; i++) {
        bool fits = (name[i] >= '0' && name[i] <= '9') || (name[i] >= 'a' && name[i] <= 'z') ||
                    (name[i] >= 'A' && name[i] <= 'Z') || name[i] == '.';
        if (!fits)
            name[i] = '-';
    }
    return path_join(out, bytes, folder, name);
}
