#include "engine/train/weights_folder.h"

#include <stdio.h>
#include <string.h>

#include "engine/base/text.h"
#include "engine/train/model_config.h"
#include "engine/train/weights.h"

static const char HEAD[] = "qa_outputs.";

/* ---- names ----------------------------------------------------------------------------------- */

/* "LayerNorm.weight" was "LayerNorm.gamma" once. False if @name is none of these. */
static bool old_norm_name(char out[PARAM_NAME_BYTES], const char *name)
{
    static const struct {
        const char *now, *then;
    } endings[] = {{"LayerNorm.weight", "LayerNorm.gamma"}, {"LayerNorm.bias", "LayerNorm.beta"}};
    size_t length = strlen(name);
    for (int i = 0; i < 2; i++) {
        size_t ending = strlen(endings[i].now);
        if (length < ending || strcmp(name + length - ending, endings[i].now) != 0)
            continue;
        int used = snprintf(out, PARAM_NAME_BYTES, "%.*s%s", (int)(length - ending), name,
                            endings[i].then);
        return used > 0 && used < PARAM_NAME_BYTES;
    }
    return false;
}

/* "FAMILY.NAME" may also stand there as "NAME". */
static const struct safetensors_tensor *find_tensor(const struct safetensors_folder *files,
                                                    const char *name, const char *family)
{
    char old[PARAM_NAME_BYTES];
    const char *names[] = {name, old_norm_name(old, name) ? old : NULL};
    size_t prefix = strlen(family);
    for (int i = 0; i < 2 && names[i] != NULL; i++) {
        const struct safetensors_tensor *t = safetensors_folder_find(files, names[i]);
        if (t == NULL && strncmp(names[i], family, prefix) == 0 && names[i][prefix] == '.')
            t = safetensors_folder_find(files, names[i] + prefix + 1);
        if (t != NULL)
            return t;
    }
    return NULL;
}

/* ---- opening --------------------------------------------------------------------------------- */

static enum status check_shape(const struct weights_folder *f, const struct model_tensor *want,
                               const struct safetensors_tensor *got)
{
    char here[SAFETENSORS_SHAPE_BYTES], there[SAFETENSORS_SHAPE_BYTES];
    bool equal = want->dims == got->dims;
    for (int i = 0; i < want->dims && equal; i++)
        equal = want->shape[i] == got->shape[i];
    if (equal)
        return ST_OK;
    safetensors_shape(here, want->dims, want->shape);
    safetensors_shape(there, got->dims, got->shape);
    return FAIL(INVALID, "%s: tensor %.200s has shape %s, the model of this configuration has %s",
                f->files.path, got->name, there, here);
}

struct notes {
    void (*note)(void *context, enum weights_fate fate, const char *name);
    void *context;
};

static void tell(const struct notes *n, enum weights_fate fate, const char *name)
{
    if (n->note != NULL)
        n->note(n->context, fate, name);
}

static void tell_unused(const struct weights_folder *f, const struct notes *n)
{
    for (int i = 0; i < f->files.file_count; i++)
        for (int k = 0; k < f->files.files[i].count; k++) {
            const struct safetensors_tensor *t = &f->files.files[i].tensors[k];
            bool used = false;
            for (int j = 0; j < f->model->tensor_count && !used; j++)
                used = f->found[j] == t;
            if (!used)
                tell(n, WEIGHTS_UNUSED, t->name);
        }
}

static enum status match_tensors(struct weights_folder *f, const struct notes *n)
{
    const struct model *m = f->model;
    struct text_list missing = {0};
    TRY(mem_alloc(&f->found, sizeof *f->found * (size_t)m->tensor_count));
    for (int i = 0; i < m->tensor_count; i++) {
        const struct model_tensor *want = &m->tensors[i];
        bool of_head = strncmp(want->name, HEAD, sizeof HEAD - 1) == 0;
        f->found[i] = find_tensor(&f->files, want->name, m->family);
        if (f->found[i] != NULL) {
            TRY(check_shape(f, want, f->found[i]));
            continue;
        }
        tell(n, of_head ? WEIGHTS_RANDOM : WEIGHTS_MISSING, want->name);
        if (!of_head)
            text_list_add(&missing, want->name);
    }
    tell_unused(f, n);
    if (missing.count > 0)
        return FAIL(INVALID, "%s: %d tensors of the model are missing: %s", f->files.path,
                    missing.count, missing.text);
    return ST_OK;
}

enum status weights_folder_open(struct weights_folder *f, const struct model *m,
                                const struct run_config *config, const char *dir,
                                void (*note)(void *context, enum weights_fate fate,
                                             const char *name),
                                void *context)
{
    struct notes notes = {note, context};
    f->model = m;
    TRY(model_config_check(config, dir));
    TRY(safetensors_folder_open(&f->files, dir));
    return match_tensors(f, &notes);
}

void weights_folder_close(struct weights_folder *f)
{
    mem_free(&f->found);
    safetensors_folder_close(&f->files);
}

/* ---- reading --------------------------------------------------------------------------------- */

struct read_range {
    const struct weights_folder *folder;
    float *out;
};

static enum status read_part(void *context, struct weights_part part)
{
    const struct read_range *r = context;
    const struct safetensors_tensor *from = r->folder->found[part.tensor];
    if (from == NULL)
        return ST_OK;
    return safetensors_folder_read(&r->folder->files, from, part.tensor_first, part.count,
                                   r->out + part.range_first);
}

static bool has_random(const struct weights_folder *f, int unit)
{
    const struct model *m = f->model;
    const struct model_unit *u = &m->units[unit];
    for (int i = u->first_param; i < u->first_param + u->param_count; i++)
        for (int k = 0; k < m->params[i].piece_count; k++)
            if (f->found[m->params[i].piece[k].tensor] == NULL)
                return true;
    return false;
}

enum status weights_folder_fill(const struct weights_folder *f, int unit, float *out, int64_t first,
                                int64_t count)
{
    if (has_random(f, unit))
        model_init_range(f->model, unit, out, first, count, f->seed);
    else
        memset(out, 0, sizeof *out * (size_t)count);
    struct read_range r = {f, out};
    return weights_each_part(f->model, unit, first, count, read_part, &r);
}
