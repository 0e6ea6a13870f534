#include "engine/train/weights.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/file.h"
#include "engine/base/log.h"
#include "engine/train/model_config.h"
#include "io/safetensors.h"

static const char FILE_NAME[] = "model.safetensors";
static const char HEAD[] = "qa_outputs.";

/* ---- ranges of flat parameters --------------------------------------------------------------- */

enum status weights_each_part(const struct model *m, int unit, int64_t first, int64_t count,
                              enum status (*visit)(void *context, struct weights_part part),
                              void *context)
{
    const struct model_unit *u = &m->units[unit];
    for (int i = u->first_param; i < u->first_param + u->param_count; i++) {
        for (int k = 0; k < m->params[i].piece_count; k++) {
            const struct param_piece *piece = &m->params[i].piece[k];
            int64_t start = m->param_offset[i] + piece->first; /* element of the flat parameter */
            int64_t from = start > first ? start : first;
            int64_t end = start + piece->numel, stop = first + count;
            int64_t to = end < stop ? end : stop;
            if (from < to)
                TRY(visit(context,
                          (struct weights_part){.tensor = piece->tensor,
                                                .tensor_first = piece->tensor_first + from - start,
                                                .count = to - from,
                                                .range_first = from - first}));
        }
    }
    return ST_OK;
}

/* ---- filling in ------------------------------------------------------------------------------ */

enum { STAGING_NUMEL = 1 << 18 };

/* Elements [first, first + count) of a unit: to fp32 device memory, or through the workspace to
 * parameters of another dtype. */
static enum status fill_range(struct trainer *t, const struct weights_source *source, int unit,
                              int64_t first, int64_t count, float *master, void *param,
                              float *staging, int64_t staging_numel)
{
    struct stream *s = &t->device->streams[STREAM_COMPUTE];
    size_t param_bytes = dtype_bytes(t->device->param_dtype);
    for (int64_t done = 0; done < count; done += staging_numel) {
        int64_t n = count - done < staging_numel ? count - done : staging_numel;
        TRY(source->fill(source->context, unit, staging, first + done, n));
        float *fp32 = master != NULL ? master + done : s->workspace;
        TRY(device_copy(s, fp32, staging, sizeof *staging * (size_t)n));
        if (param != NULL)
            TRY(op_cast(
                s, tensor_1d((char *)param + (size_t)done * param_bytes, t->device->param_dtype, n),
                tensor_1d(fp32, DTYPE_F32, n)));
        TRY(stream_sync(s));
    }
    return ST_OK;
}

static enum status fill_unit(struct trainer *t, const struct weights_source *source, int unit,
                             float *staging, int64_t staging_numel)
{
    struct shard_view view = executor_shard(&t->executor, unit);
    const struct layout_unit *u = &t->setup.layout.units[unit];
    bool master_is_param = t->device->param_dtype == DTYPE_F32;
    if (view.param_whole != NULL && master_is_param)
        return fill_range(t, source, unit, 0, u->padded_numel, view.param_whole, NULL, staging,
                          staging_numel);
    TRY(fill_range(t, source, unit, t->comm->rank * u->shard_numel, view.numel, view.master,
                   master_is_param ? NULL : view.param_shard, staging, staging_numel));
    if (view.param_whole != NULL)
        TRY(fill_range(t, source, unit, 0, u->padded_numel, view.master_whole, view.param_whole,
                       staging, staging_numel));
    return ST_OK;
}

enum status weights_fill(struct trainer *t, const struct weights_source *source)
{
    enum status st = ST_OK;
    float *staging = NULL;
    const struct stream *s = &t->device->streams[STREAM_COMPUTE];
    int64_t room = (int64_t)(s->workspace_bytes / sizeof *staging);
    bool through_workspace = t->device->param_dtype != DTYPE_F32;
    int64_t numel = room < STAGING_NUMEL && through_workspace ? room : STAGING_NUMEL;
    TRY(mem_alloc(&staging, sizeof *staging * (size_t)numel));
    for (int u = 0; u < t->setup.model.unit_count; u++)
        TRY_GOTO(st, out, fill_unit(t, source, u, staging, numel));
out:
    mem_free(&staging);
    return st;
}

static enum status random_range(void *context, int unit, float *out, int64_t first, int64_t count)
{
    const struct trainer *t = context;
    model_init_range(&t->setup.model, unit, out, first, count, (uint64_t)t->config->train.seed);
    return ST_OK;
}

enum status weights_init(struct trainer *t)
{
    return weights_fill(t, &(struct weights_source){random_range, t});
}

/* ---- a list of names for a message ----------------------------------------------------------- */

struct name_list {
    char text[600];
    size_t used;
    int count, left_out;
};

static void name_list_add(struct name_list *list, const char *name)
{
    size_t bytes = strlen(name) + 2;
    list->count++;
    if (list->left_out > 0 || list->used + bytes >= sizeof list->text) {
        list->left_out++;
        return;
    }
    snprintf(list->text + list->used, sizeof list->text - list->used, "%s%s",
             list->used > 0 ? ", " : "", name);
    list->used = strlen(list->text);
}

static const char *name_list_rest(const struct name_list *list)
{
    return list->left_out > 0 ? ", ..." : "";
}

/* ---- loading --------------------------------------------------------------------------------- */

struct loader {
    const struct trainer *t;
    struct safetensors file;
    const struct safetensors_tensor **found; /* owned; by tensor of the model; NULL: random */
};

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
static const struct safetensors_tensor *find_tensor(const struct safetensors *file,
                                                    const char *name, const char *family)
{
    char old[PARAM_NAME_BYTES];
    const char *names[] = {name, old_norm_name(old, name) ? old : NULL};
    size_t prefix = strlen(family);
    for (int i = 0; i < 2 && names[i] != NULL; i++) {
        const struct safetensors_tensor *t = safetensors_find(file, names[i]);
        if (t == NULL && strncmp(names[i], family, prefix) == 0 && names[i][prefix] == '.')
            t = safetensors_find(file, names[i] + prefix + 1);
        if (t != NULL)
            return t;
    }
    return NULL;
}

static enum status check_shape(const struct loader *l, const struct model_tensor *want,
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
                l->file.path, got->name, there, here);
}

/* Tensors of the file that nothing uses: a pooler, other heads, position ids. */
static void log_unused(const struct loader *l)
{
    struct name_list unused = {0};
    int tensor_count = l->t->setup.model.tensor_count;
    for (int i = 0; i < l->file.count; i++) {
        bool used = false;
        for (int k = 0; k < tensor_count && !used; k++)
            used = l->found[k] == &l->file.tensors[i];
        if (!used)
            name_list_add(&unused, l->file.tensors[i].name);
    }
    if (unused.count > 0)
        log_info("weights", "%s: %d tensors are not used: %s%s", l->file.path, unused.count,
                 unused.text, name_list_rest(&unused));
}

static enum status match_tensors(struct loader *l)
{
    const struct model *m = &l->t->setup.model;
    struct name_list missing = {0}, random = {0};
    TRY(mem_alloc(&l->found, sizeof(void *) * (size_t)m->tensor_count));
    for (int i = 0; i < m->tensor_count; i++) {
        const struct model_tensor *want = &m->tensors[i];
        l->found[i] = find_tensor(&l->file, want->name, m->family);
        if (l->found[i] != NULL)
            TRY(check_shape(l, want, l->found[i]));
        else
            name_list_add(strncmp(want->name, HEAD, sizeof HEAD - 1) == 0 ? &random : &missing,
                          want->name);
    }
    if (missing.count > 0)
        return FAIL(INVALID, "%s: %d tensors of the model are missing: %s%s", l->file.path,
                    missing.count, missing.text, name_list_rest(&missing));
    if (l->t->comm->rank == 0) {
        if (random.count > 0)
            log_warn("weights", "%s has no %s: random initial values, train them", l->file.path,
                     random.text);
        log_unused(l);
    }
    return ST_OK;
}

/* A range of a unit under way to host memory. */
struct read_range {
    const struct loader *loader;
    float *out;
};

static enum status read_part(void *context, struct weights_part part)
{
    const struct read_range *r = context;
    const struct safetensors_tensor *from = r->loader->found[part.tensor];
    if (from == NULL)
        return ST_OK;
    return safetensors_read(&r->loader->file, from, part.tensor_first, part.count,
                            r->out + part.range_first);
}

static bool has_missing(const struct loader *l, int unit)
{
    const struct model *m = &l->t->setup.model;
    const struct model_unit *u = &m->units[unit];
    for (int i = u->first_param; i < u->first_param + u->param_count; i++)
        for (int k = 0; k < m->params[i].piece_count; k++)
            if (l->found[m->params[i].piece[k].tensor] == NULL)
                return true;
    return false;
}

static enum status load_range(void *context, int unit, float *out, int64_t first, int64_t count)
{
    const struct loader *l = context;
    const struct model *m = &l->t->setup.model;
    if (has_missing(l, unit))
        model_init_range(m, unit, out, first, count, (uint64_t)l->t->config->train.seed);
    else
        memset(out, 0, sizeof *out * (size_t)count);
    struct read_range r = {l, out};
    return weights_each_part(m, unit, first, count, read_part, &r);
}

static enum status open_file(struct safetensors *file, const char *dir)
{
    char path[1024], other[1024];
    TRY(path_join(path, sizeof path, dir, FILE_NAME));
    if (access(path, F_OK) != 0) {
        TRY(path_join(other, sizeof other, dir, "model.safetensors.index.json"));
        if (access(other, F_OK) == 0)
            return FAIL(UNSUPPORTED, "%s: a model in several files is not supported", other);
        TRY(path_join(other, sizeof other, dir, "pytorch_model.bin"));
        if (access(other, F_OK) == 0)
            return FAIL(UNSUPPORTED,
                        "%s: this format is not read; store the model as %s with "
                        "save_pretrained(folder, safe_serialization=True)",
                        other, FILE_NAME);
    }
    return safetensors_open(file, path);
}

static enum status load(struct trainer *t, const char *dir)
{
    enum status st;
    struct loader l = {.t = t};
    TRY_GOTO(st, out, model_config_check(t->config, dir));
    TRY_GOTO(st, out, open_file(&l.file, dir));
    TRY_GOTO(st, out, match_tensors(&l));
    TRY_GOTO(st, out, weights_fill(t, &(struct weights_source){load_range, &l}));
    if (t->comm->rank == 0)
        log_info("weights", "loaded %s", l.file.path);
out:
    mem_free(&l.found);
    safetensors_close(&l.file);
    return st;
}

enum status weights_load(struct trainer *t, const char *dir)
{
    return comm_agree(t->comm, load(t, dir));
}

/* ---- saving ---------------------------------------------------------------------------------- */

struct saver {
    struct trainer *t;
    struct safetensors_writer writer;
    struct safetensors_tensor *tensors; /* owned */
    float *staging;                     /* owned, pinned */
    char *names;                        /* owned; every rank's HIDDEN_NAME_BYTES */
};

enum { HIDDEN_NAME_BYTES = 128 };

static enum status list_tensors(struct saver *s)
{
    const struct model *m = &s->t->setup.model;
    TRY(mem_alloc(&s->tensors, sizeof *s->tensors * (size_t)m->tensor_count));
    for (int i = 0; i < m->tensor_count; i++)
        s->tensors[i] =
            (struct safetensors_tensor){.name = m->tensors[i].name,
                                        .dims = m->tensors[i].dims,
                                        .shape = {m->tensors[i].shape[0], m->tensors[i].shape[1]}};
    TRY(mem_alloc(&s->names, HIDDEN_NAME_BYTES * (size_t)s->t->comm->world_size));
    return device_alloc_host(s->t->device, (void **)&s->staging,
                             sizeof *s->staging * STAGING_NUMEL);
}

static enum status begin_save(struct saver *s, const char *dir)
{
    TRY(list_tensors(s));
    if (s->t->comm->rank != 0)
        return ST_OK;
    TRY(file_make_dirs(dir));
    return safetensors_create(&s->writer, dir, FILE_NAME, s->tensors,
                              s->t->setup.model.tensor_count);
}

/* Rank 0 says what it called the hidden file; the others open it. */
static enum status join_save(struct saver *s, const char *dir)
{
    struct comm *comm = s->t->comm;
    char mine[HIDDEN_NAME_BYTES] = "";
    if (comm->rank == 0)
        snprintf(mine, sizeof mine, "%s", s->writer.temporary);
    TRY(comm_exchange(comm, s->names, mine, sizeof mine));
    if (comm->rank == 0)
        return comm_agree(comm, ST_OK);
    return comm_agree(comm, safetensors_join(&s->writer, dir, FILE_NAME, s->names, s->tensors,
                                             s->t->setup.model.tensor_count));
}

static enum status write_part(void *context, struct weights_part part)
{
    struct saver *s = context;
    return safetensors_write_range(&s->writer, part.tensor, part.tensor_first, part.count,
                                   s->staging + part.range_first);
}

/* This rank's shard of every unit, also where others hold the same. */
static enum status write_shards(struct saver *s)
{
    struct trainer *t = s->t;
    struct stream *stream = &t->device->streams[STREAM_COMPUTE];
    for (int u = 0; u < t->setup.model.unit_count; u++) {
        struct shard_view view = executor_shard(&t->executor, u);
        int64_t own = t->comm->rank * view.numel;
        for (int64_t done = 0; done < view.numel; done += STAGING_NUMEL) {
            int64_t n = view.numel - done < STAGING_NUMEL ? view.numel - done : STAGING_NUMEL;
            TRY(device_copy(stream, s->staging, view.master + done,
                            sizeof *s->staging * (size_t)n));
            TRY(stream_sync(stream));
            TRY(weights_each_part(&t->setup.model, u, own + done, n, write_part, s));
        }
    }
    return safetensors_sync(&s->writer);
}

static enum status end_save(struct saver *s, const char *dir)
{
    if (s->t->comm->rank != 0)
        return ST_OK;
    TRY(model_config_write(s->t->config, &s->t->data->vocab, dir));
    TRY(safetensors_publish(&s->writer));
    log_info("weights", "saved %s", s->writer.path);
    return ST_OK;
}

enum status weights_save(struct trainer *t, const char *dir)
{
    enum status st;
    struct saver s = {.t = t};
    TRY_GOTO(st, out, comm_agree(t->comm, begin_save(&s, dir)));
    TRY_GOTO(st, out, join_save(&s, dir));
    TRY_GOTO(st, out, comm_agree(t->comm, write_shards(&s)));
    TRY_GOTO(st, out, comm_agree(t->comm, end_save(&s, dir)));
out:
    safetensors_writer_close(&s.writer);
    mem_free(&s.tensors);
    mem_free(&s.names);
    device_free_host(t->device, (void **)&s.staging);
    return st;
}
