#include "io/safetensors_folder.h"

#include <jansson.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/file.h"
#include "io/json_file.h"

static const char ONE_FILE[] = "model.safetensors";
static const char INDEX[] = "model.safetensors.index.json";
static const char PICKLE[] = "pytorch_model.bin", PICKLE_INDEX[] = "pytorch_model.bin.index.json";

static bool is_there(const char *dir, const char *name)
{
    char path[1024];
    return path_join(path, sizeof path, dir, name) == ST_OK && access(path, F_OK) == 0;
}

static enum status open_next(struct safetensors_folder *f, const char *dir, const char *name)
{
    char path[1024];
    TRY(path_join(path, sizeof path, dir, name));
    TRY(mem_grow(&f->files, &f->capacity, (size_t)f->file_count + 1, sizeof *f->files));
    return safetensors_open(&f->files[f->file_count++], path);
}

/* ---- several files --------------------------------------------------------------------------- */

/* The open file of this name, or NULL. */
static const struct safetensors *find_file(const struct safetensors_folder *f, const char *name)
{
    for (int i = 0; i < f->file_count; i++) {
        const char *last = strrchr(f->files[i].path, '/');
        if (strcmp(last != NULL ? last + 1 : f->files[i].path, name) == 0)
            return &f->files[i];
    }
    return NULL;
}

static enum status open_file_of(struct safetensors_folder *f, const char *dir, const char *tensor,
                                const json_t *value)
{
    const char *name = json_string_value(value);
    if (name == NULL)
        return FAIL(CORRUPT, "%s: weight_map: %.200s: expected the name of a file, found %s",
                    f->path, tensor, json_kind(value));
    if (strchr(name, '/') != NULL)
        return FAIL(CORRUPT, "%s: weight_map: %.200s: \"%.200s\" is not a file of this folder",
                    f->path, tensor, name);
    if (find_file(f, name) == NULL)
        TRY(open_next(f, dir, name));
    if (safetensors_find(find_file(f, name), tensor) == NULL)
        return FAIL(CORRUPT, "%s: weight_map: %.200s should be in %.200s and is not", f->path,
                    tensor, name);
    return ST_OK;
}

/* A tensor that the index gives to another file, or to none. */
static enum status check_named(const struct safetensors_folder *f, const json_t *map)
{
    for (int i = 0; i < f->file_count; i++)
        for (int k = 0; k < f->files[i].count; k++) {
            const char *tensor = f->files[i].tensors[k].name;
            const char *file = json_string_value(json_object_get(map, tensor));
            if (file == NULL || find_file(f, file) != &f->files[i])
                return FAIL(CORRUPT, "%s: tensor \"%.200s\": %s says that it is %s%.200s",
                            f->files[i].path, tensor, f->path, file == NULL ? "nowhere" : "in ",
                            file == NULL ? "" : file);
        }
    return ST_OK;
}

static enum status open_indexed(struct safetensors_folder *f, const char *dir)
{
    enum status st;
    json_t *root = NULL, *value;
    const char *tensor;
    TRY_GOTO(st, out, path_join(f->path, sizeof f->path, dir, INDEX));
    TRY_GOTO(st, out, json_file_read(&root, f->path, NULL));
    json_t *map = json_object_get(root, "weight_map");
    if (!json_is_object(map)) {
        st = FAIL(CORRUPT, "%s: weight_map: expected an object, found %s", f->path, json_kind(map));
        goto out;
    }
    json_object_foreach(map, tensor, value) TRY_GOTO(st, out, open_file_of(f, dir, tensor, value));
    TRY_GOTO(st, out, check_named(f, map));
out:
    json_decref(root);
    return st;
}

/* ---------------------------------------------------------------------------------------------- */

enum status safetensors_folder_open(struct safetensors_folder *f, const char *dir)
{
    if (!is_there(dir, ONE_FILE) && is_there(dir, INDEX))
        return open_indexed(f, dir);
    TRY(path_join(f->path, sizeof f->path, dir, ONE_FILE));
    if (!is_there(dir, ONE_FILE) && (is_there(dir, PICKLE) || is_there(dir, PICKLE_INDEX)))
        return FAIL(UNSUPPORTED,
                    "%s/%s: this format is not read, it can run any code; store the model as %s: "
                    "load it with transformers and call save_pretrained(FOLDER, "
                    "safe_serialization=True)",
                    dir, is_there(dir, PICKLE) ? PICKLE : PICKLE_INDEX, ONE_FILE);
    return open_next(f, dir, ONE_FILE);
}

void safetensors_folder_close(struct safetensors_folder *f)
{
    for (int i = 0; i < f->file_count; i++)
        safetensors_close(&f->files[i]);
    mem_free(&f->files);
    memset(f, 0, sizeof *f);
}

const struct safetensors_tensor *safetensors_folder_find(const struct safetensors_folder *f,
                                                         const char *name)
{
    const struct safetensors_tensor *found = NULL;
    for (int i = 0; i < f->file_count && found == NULL; i++)
        found = safetensors_find(&f->files[i], name);
    return found;
}

enum status safetensors_folder_read(const struct safetensors_folder *f,
                                    const struct safetensors_tensor *tensor, int64_t first,
                                    int64_t count, float *out)
{
    int i = 0;
    while (i < f->file_count &&
           (tensor < f->files[i].tensors || tensor >= f->files[i].tensors + f->files[i].count))
        i++;
    ASSERT(i < f->file_count);
    return safetensors_read(&f->files[i], tensor, first, count, out);
}
