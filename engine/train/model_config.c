#include "engine/train/model_config.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/arena.h"
#include "engine/base/file.h"
#include "io/json_file.h"

/* A number of config.json and the field that holds it. */
struct key {
    const char *name; /* NULL: the family has no such key, and the field its standard value */
    const char *field;
    size_t offset;
    double standard; /* where config.json does not say */
    bool is_size;
};

enum { SIZE_MOST = 1 << 30, TEXT_KEYS = 2 };

/* What the files of a family look like. */
struct folder_kind {
    const char *model_type, *architecture, *tokenizer;
    struct {
        const char *name, *value;
    } fixed[TEXT_KEYS]; /* what has to be so where it is said at all */
    const struct key *keys;
    int key_count;
};

#define SIZE_KEY(json, member, standard)                                                           \
    {                                                                                              \
        json, "model." #member, offsetof(struct run_config, model.member), standard, true          \
    }
#define REAL_KEY(json, member, standard)                                                           \
    {                                                                                              \
        json, "model." #member, offsetof(struct run_config, model.member), standard, false         \
    }

static const struct key bert_keys[] = {
    SIZE_KEY("vocab_size", vocab_size, 30522),
    SIZE_KEY("hidden_size", hidden, 768),
    SIZE_KEY("num_hidden_layers", layers, 12),
    SIZE_KEY("num_attention_heads", heads, 12),
    SIZE_KEY("intermediate_size", ffn, 3072),
    SIZE_KEY("max_position_embeddings", max_positions, 512),
    SIZE_KEY("type_vocab_size", type_vocab, 2),
    REAL_KEY("hidden_dropout_prob", hidden_dropout, 0.1),
    REAL_KEY("attention_probs_dropout_prob", attention_dropout, 0.1),
    REAL_KEY("layer_norm_eps", norm_eps, 1e-12),
    REAL_KEY("initializer_range", init_range, 0.02),
    REAL_KEY(NULL, qa_dropout, 0.0),
};

/* sinusoidal_pos_embds only says how the position table was first made; it is in the files. */
static const struct key distilbert_keys[] = {
    SIZE_KEY("vocab_size", vocab_size, 30522),
    SIZE_KEY("dim", hidden, 768),
    SIZE_KEY("n_layers", layers, 6),
    SIZE_KEY("n_heads", heads, 12),
    SIZE_KEY("hidden_dim", ffn, 3072),
    SIZE_KEY("max_position_embeddings", max_positions, 512),
    SIZE_KEY(NULL, type_vocab, 2),
    REAL_KEY("dropout", hidden_dropout, 0.1),
    REAL_KEY("attention_dropout", attention_dropout, 0.1),
    REAL_KEY("qa_dropout", qa_dropout, 0.1),
    REAL_KEY(NULL, norm_eps, 1e-12),
    REAL_KEY("initializer_range", init_range, 0.02),
};

static const struct folder_kind kinds[] = {
    [FAMILY_BERT] = {.model_type = "bert",
                     .architecture = "BertForQuestionAnswering",
                     .tokenizer = "BertTokenizer",
                     .fixed = {{"hidden_act", "gelu"}, {"position_embedding_type", "absolute"}},
                     .keys = bert_keys,
                     .key_count = sizeof bert_keys / sizeof *bert_keys},
    [FAMILY_DISTILBERT] = {.model_type = "distilbert",
                           .architecture = "DistilBertForQuestionAnswering",
                           .tokenizer = "DistilBertTokenizer",
                           .fixed = {{"activation", "gelu"}},
                           .keys = distilbert_keys,
                           .key_count = sizeof distilbert_keys / sizeof *distilbert_keys},
};

static int64_t *size_at(struct run_config *config, const struct key *k)
{
    return (int64_t *)(void *)((char *)config + k->offset);
}

static double *real_at(struct run_config *config, const struct key *k)
{
    return (double *)(void *)((char *)config + k->offset);
}

/* ---- reading --------------------------------------------------------------------------------- */

/* A key's text, or its kind if it is none; NULL: it is not said. */
static const char *text_of(const json_t *root, const char *name)
{
    const json_t *value = json_object_get(root, name);
    if (value == NULL || json_is_null(value))
        return NULL;
    return json_is_string(value) ? json_string_value(value) : json_kind(value);
}

/* Where config.json does not say the family, it is the configuration's. */
static enum status read_family(enum model_family *family, const json_t *root, const char *path)
{
    const char *text = text_of(root, "model_type");
    if (text == NULL)
        return ST_OK;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (strcmp(text, kinds[i].model_type) == 0) {
            *family = (enum model_family)i;
            return ST_OK;
        }
    return FAIL(UNSUPPORTED, "%s: model_type is \"%.80s\"; only \"%s\" and \"%s\" are supported",
                path, text, kinds[FAMILY_BERT].model_type, kinds[FAMILY_DISTILBERT].model_type);
}

static enum status check_fixed(const struct folder_kind *kind, const json_t *root, const char *path)
{
    for (int i = 0; i < TEXT_KEYS && kind->fixed[i].name != NULL; i++) {
        const char *text = text_of(root, kind->fixed[i].name);
        if (text != NULL && strcmp(text, kind->fixed[i].value) != 0)
            return FAIL(UNSUPPORTED, "%s: %s is \"%.80s\"; only \"%s\" is supported", path,
                        kind->fixed[i].name, text, kind->fixed[i].value);
    }
    return ST_OK;
}

static enum status read_key(struct run_config *config, const struct key *k, const json_t *root,
                            const char *path)
{
    const json_t *value = k->name == NULL ? NULL : json_object_get(root, k->name);
    if (k->is_size) {
        json_int_t size = value == NULL ? (json_int_t)k->standard : json_integer_value(value);
        if ((value != NULL && !json_is_integer(value)) || size < 1 || size > SIZE_MOST)
            return FAIL(CORRUPT, "%s: %s: expected an integer from 1 to %d, found %s", path,
                        k->name, SIZE_MOST, json_is_integer(value) ? "another" : json_kind(value));
        *size_at(config, k) = size;
        return ST_OK;
    }
    if (value != NULL && (!json_is_number(value) || json_number_value(value) < 0))
        return FAIL(CORRUPT, "%s: %s: expected a number, at least 0", path, k->name);
    *real_at(config, k) = value == NULL ? k->standard : json_number_value(value);
    return ST_OK;
}

/* Uncased unless the tokenizer's file says otherwise. It may hold model_max_length 1e30 as an
 * integer, so integers are read as reals. */
static enum status read_casing(bool *cased, const char *dir)
{
    enum status st;
    char path[1200];
    struct file_text text = {0};
    json_error_t error;
    json_t *root = NULL;
    *cased = false;
    TRY(path_join(path, sizeof path, dir, "tokenizer_config.json"));
    if (access(path, F_OK) != 0)
        return ST_OK;
    TRY_GOTO(st, out, file_read(&text, path));
    root = json_loadb(text.data, text.bytes, JSON_DECODE_INT_AS_REAL, &error);
    if (root == NULL)
        st = FAIL(CORRUPT, "%s:%d:%d: %s", path, error.line, error.column, error.text);
    else
        *cased = json_is_false(json_object_get(root, "do_lower_case"));
out:
    json_decref(root);
    mem_free(&text.data);
    return st;
}

enum status model_config_read(struct run_config *config, const char *dir)
{
    enum status st = ST_OK;
    char path[1200];
    json_t *root = NULL;
    TRY(path_join(path, sizeof path, dir, "config.json"));
    TRY_GOTO(st, out, json_file_read(&root, path, NULL));
    TRY_GOTO(st, out, read_family(&config->model.family, root, path));
    const struct folder_kind *kind = &kinds[config->model.family];
    TRY_GOTO(st, out, check_fixed(kind, root, path));
    for (int i = 0; i < kind->key_count; i++)
        TRY_GOTO(st, out, read_key(config, &kind->keys[i], root, path));
    TRY_GOTO(st, out, read_casing(&config->model.cased, dir));
out:
    json_decref(root);
    return st;
}

enum status model_config_check(const struct run_config *config, const char *dir)
{
    char path[1200];
    struct run_config theirs = *config, ours = *config;
    TRY(path_join(path, sizeof path, dir, "config.json"));
    if (access(path, F_OK) != 0)
        return ST_OK;
    TRY(model_config_read(&theirs, dir));
    const struct folder_kind *kind = &kinds[ours.model.family];
    if (theirs.model.family != ours.model.family)
        return FAIL(INVALID, "%s: model_type is %s, but model.family is %s", path,
                    kinds[theirs.model.family].model_type, kind->model_type);
    for (int i = 0; i < kind->key_count; i++) {
        const struct key *k = &kind->keys[i];
        if (k->name == NULL || !k->is_size)
            continue;
        int64_t there = *size_at(&theirs, k), here = *size_at(&ours, k);
        if (there != here)
            return FAIL(INVALID, "%s: %s is %" PRId64 ", but %s is %" PRId64, path, k->name, there,
                        k->field, here);
    }
    return ST_OK;
}

bool model_config_is_size(const char *section, const char *name)
{
    char field[64];
    snprintf(field, sizeof field, "%s.%s", section, name);
    if (strcmp(field, "model.family") == 0)
        return true;
    for (size_t i = 0; i < sizeof bert_keys / sizeof *bert_keys; i++)
        if (bert_keys[i].is_size && strcmp(field, bert_keys[i].field) == 0)
            return true;
    return false;
}

/* ---- writing --------------------------------------------------------------------------------- */

static enum status write_tree(json_t *root, bool complete, const char *dir, const char *name)
{
    enum status st = ST_OK;
    char path[1200];
    if (!complete) {
        st = FAIL(MEMORY, "out of memory while writing %s", name);
        goto out;
    }
    TRY_GOTO(st, out, path_join(path, sizeof path, dir, name));
    TRY_GOTO(st, out, json_file_write(path, root));
out:
    json_decref(root);
    return st;
}

static const char *torch_dtype(const char *dtype)
{
    return strcmp(dtype, "F16") == 0    ? "float16"
           : strcmp(dtype, "BF16") == 0 ? "bfloat16"
                                        : "float32";
}

static enum status write_config(const struct run_config *config, int32_t pad_id, const char *dtype,
                                const char *dir)
{
    struct run_config copy = *config;
    const struct folder_kind *kind = &kinds[config->model.family];
    json_t *root = json_pack("{s:[s], s:s}", "architectures", kind->architecture, "model_type",
                             kind->model_type);
    bool complete = root != NULL;
    for (int i = 0; i < TEXT_KEYS && kind->fixed[i].name != NULL; i++)
        complete &=
            json_object_set_new(root, kind->fixed[i].name, json_string(kind->fixed[i].value)) == 0;
    for (int i = 0; i < kind->key_count; i++) {
        const struct key *k = &kind->keys[i];
        if (k->name == NULL)
            continue;
        json_t *value =
            k->is_size ? json_integer(*size_at(&copy, k)) : json_real(*real_at(&copy, k));
        complete &= json_object_set_new(root, k->name, value) == 0;
    }
    complete &= json_object_set_new(root, "pad_token_id", json_integer(pad_id)) == 0;
    complete &= json_object_set_new(root, "torch_dtype", json_string(torch_dtype(dtype))) == 0;
    return write_tree(root, complete, dir, "config.json");
}

static enum status write_tokenizer(const struct run_config *config, const char *dir)
{
    json_t *root =
        json_pack("{s:s, s:b, s:I}", "tokenizer_class", kinds[config->model.family].tokenizer,
                  "do_lower_case", (int)!config->model.cased, "model_max_length",
                  (json_int_t)config->model.max_positions);
    return write_tree(root, root != NULL, dir, "tokenizer_config.json");
}

static enum status write_vocab(const struct vocab *vocab, const char *dir)
{
    enum status st = ST_OK;
    char path[1200], *text = NULL;
    size_t bytes = 0;
    TRY(path_join(path, sizeof path, dir, "vocab.txt"));
    for (int32_t i = 0; i < vocab->size; i++)
        bytes += vocab->entries[i].bytes + 1;
    TRY(mem_alloc(&text, bytes));
    char *at = text;
    for (int32_t i = 0; i < vocab->size; i++) {
        memcpy(at, vocab->entries[i].text, vocab->entries[i].bytes);
        at += vocab->entries[i].bytes;
        *at++ = '\n';
    }
    TRY_GOTO(st, out, file_write(path, text, bytes));
out:
    mem_free(&text);
    return st;
}

enum status model_vocab_path(char *path, size_t bytes, const char *dir)
{
    TRY(path_join(path, bytes, dir, "vocab.txt"));
    if (access(path, F_OK) == 0)
        return ST_OK;
    TRY(path_join(path, bytes, dir, "tokenizer.json"));
    return access(path, F_OK) == 0 ? ST_OK : path_join(path, bytes, dir, "vocab.txt");
}

enum status model_config_write(const struct run_config *config, const struct vocab *vocab,
                               const char *dtype, const char *dir)
{
    TRY(write_config(config, vocab->pad_id, dtype, dir));
    TRY(write_tokenizer(config, dir));
    return write_vocab(vocab, dir);
}
