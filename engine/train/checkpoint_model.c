#include "engine/train/checkpoint_model.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/config_table.h"
#include "engine/base/file.h"
#include "engine/base/text.h"
#include "engine/train/model_config.h"
#include "io/safetensors.h"

const char *const checkpoint_state_names[CHECKPOINT_STATES] = {"master", "adam_m", "adam_v"};

enum status checkpoint_frozen_tensors(bool **out, const struct model *m)
{
    TRY(mem_alloc(out, sizeof **out * (size_t)m->tensor_count));
    for (int i = 0; i < m->param_count; i++)
        for (int k = 0; k < m->params[i].piece_count; k++)
            (*out)[m->params[i].piece[k].tensor] = m->params[i].frozen;
    return ST_OK;
}

enum status checkpoint_table(struct checkpoint_tensor **out, const struct model *m,
                             const bool *frozen)
{
    struct checkpoint_tensor *table;
    TRY(mem_alloc(out, sizeof **out * (size_t)m->tensor_count));
    table = *out;
    for (int i = 0; i < m->tensor_count; i++) {
        const struct model_tensor *from = &m->tensors[i];
        table[i] = (struct checkpoint_tensor){.name = from->name,
                                              .dims = from->dims,
                                              .state_count = frozen[i] ? 1 : CHECKPOINT_STATES};
        for (int k = 0; k < from->dims; k++)
            table[i].shape[k] = from->shape[k];
        for (int k = 0; k < table[i].state_count; k++)
            table[i].states[k] = checkpoint_state_names[k];
    }
    return ST_OK;
}

/* ---- the configuration ----------------------------------------------------------------------- */

enum status checkpoint_config(struct run_config *config, const struct checkpoint *c)
{
    const json_t *stored = json_object_get(c->training, "config");
    config_defaults(config);
    if (!json_is_object(stored))
        return FAIL(INVALID,
                    "%s: its training state has no configuration, so of which model it is cannot "
                    "be told",
                    c->path);
    for (int i = 0; i < config_field_count; i++) {
        const struct config_field *f = &config_fields[i];
        char key[128];
        snprintf(key, sizeof key, "%s.%s", f->section, f->name);
        const char *text = json_string_value(json_object_get(stored, key));
        if (text != NULL)
            TRY(field_parse(f, config, text, c->path));
    }
    return ST_OK;
}

enum status checkpoint_vocab(struct vocab *vocab, const struct checkpoint *c,
                             const struct run_config *config, const char *given)
{
    const char *path = given != NULL ? given : config->data.vocab;
    const char *hash = json_string_value(json_object_get(c->training, "vocab_hash"));
    char found[32];
    if (path[0] == '\0')
        return FAIL(INVALID, "%s: does not say where its vocabulary is: give it with --vocab FILE",
                    c->path);
    if (given == NULL && access(path, R_OK) != 0)
        return FAIL(INVALID,
                    "%s: was written with the vocabulary %s, which cannot be read here (%s): give "
                    "it with --vocab FILE",
                    c->path, path, strerror(errno));
    TRY(vocab_load(vocab, path));
    if (vocab->size != config->model.vocab_size)
        return FAIL(INVALID, "%s: %d tokens, but the model of %s has %" PRId64, path, vocab->size,
                    c->path, config->model.vocab_size);
    snprintf(found, sizeof found, "%016" PRIx64, vocab->content_hash);
    if (hash != NULL && strcmp(hash, found) != 0)
        return FAIL(INVALID,
                    "%s: is not the vocabulary that %s was written with (hash %s, there %.32s): "
                    "give that one with --vocab FILE",
                    path, c->path, found, hash);
    return ST_OK;
}

bool checkpoint_is_one(const char *path)
{
    char manifest[CHECKPOINT_PATH_BYTES];
    return path_join(manifest, sizeof manifest, path, "manifest.json") == ST_OK &&
           access(manifest, F_OK) == 0;
}

enum status checkpoint_check_sizes(const struct checkpoint *c, const struct run_config *config)
{
    struct run_config theirs;
    struct text_list different = {0};
    TRY(checkpoint_config(&theirs, c));
    for (int i = 0; i < config_field_count; i++) {
        const struct config_field *f = &config_fields[i];
        char here[FIELD_TEXT_BYTES], there[FIELD_TEXT_BYTES], line[512];
        if (!model_config_is_size(f->section, f->name))
            continue;
        field_format(f, config, here, sizeof here);
        field_format(f, &theirs, there, sizeof there);
        snprintf(line, sizeof line, "%s.%s is %.100s there and %.100s here", f->section, f->name,
                 there, here);
        if (strcmp(here, there) != 0)
            text_list_add(&different, line);
    }
    return different.count == 0
               ? ST_OK
               : FAIL(INVALID, "%s: is of another model: %s", c->path, different.text);
}

/* ---- the tensors ----------------------------------------------------------------------------- */

static enum status check_tensor(const struct checkpoint *c, const struct model_tensor *want,
                                const struct checkpoint_tensor *got, bool master_only)
{
    char here[SAFETENSORS_SHAPE_BYTES], there[SAFETENSORS_SHAPE_BYTES];
    bool equal = want->dims == got->dims;
    for (int i = 0; i < want->dims && equal; i++)
        equal = want->shape[i] == got->shape[i];
    if (!equal) {
        safetensors_shape(here, want->dims, want->shape);
        safetensors_shape(there, got->dims, got->shape);
        return FAIL(INVALID, "%s: tensor %s has shape %s, in this model %s", c->path, want->name,
                    there, here);
    }
    for (int i = 0; i < (master_only ? 1 : CHECKPOINT_STATES); i++)
        if (!checkpoint_has_state(got, checkpoint_state_names[i]))
            return FAIL(INVALID, "%s: tensor %s has no %s", c->path, want->name,
                        checkpoint_state_names[i]);
    return ST_OK;
}

enum status checkpoint_check_tensors(const struct checkpoint *c, const struct model *m,
                                     const bool *frozen)
{
    struct text_list missing = {0}, unknown = {0};
    for (int i = 0; i < m->tensor_count; i++) {
        const struct checkpoint_tensor *got = checkpoint_find(c, m->tensors[i].name);
        if (got == NULL)
            text_list_add(&missing, m->tensors[i].name);
        else
            TRY(check_tensor(c, &m->tensors[i], got, frozen == NULL || frozen[i]));
    }
    if (missing.count > 0)
        return FAIL(INVALID, "%s: %d tensors of this model are missing: %s", c->path, missing.count,
                    missing.text);
    for (int i = 0; i < c->tensor_count; i++)
        if (model_find_tensor(m, c->tensors[i].name) < 0)
            text_list_add(&unknown, c->tensors[i].name);
    if (unknown.count > 0)
        return FAIL(INVALID, "%s: %d tensors, but this model has %d; it does not have %s", c->path,
                    c->tensor_count, m->tensor_count, unknown.text);
    return ST_OK;
}
