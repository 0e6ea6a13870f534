/*
 * engine/train/weights_folder.h - a model's tensors in a Hugging Face folder.
 *
 * The folder's own names may differ: without the family ("bert.", "distilbert.") in front, with
 * gamma and beta for weight and bias of LayerNorm. The question answering head may be missing, in a
 * model that was only pretrained: then it starts at random. What the model has no place for (a
 * pooler, other heads and the tables tied to them, buffers such as position_ids) is left alone.
 * Nothing of that is silent: whoever opens the folder is told each name.
 *
 * Reading is by ranges, from the one file or the several of io/safetensors_folder.h; opening reads
 * no weights.
 */
#ifndef ENGINE_TRAIN_WEIGHTS_FOLDER_H
#define ENGINE_TRAIN_WEIGHTS_FOLDER_H

#include "engine/model/model.h"
#include "io/safetensors_folder.h"

C_BEGIN

enum weights_fate {
    WEIGHTS_MISSING, /* of the model, and not in the folder: an error */
    WEIGHTS_RANDOM,  /* of the head, and not in the folder */
    WEIGHTS_UNUSED,  /* of the folder, and not in the model */
    WEIGHTS_FATES
};

struct weights_folder {        /* zero-initialise */
    const struct model *model; /* borrowed */
    uint64_t seed;             /* of a missing head; the caller sets it */
    struct safetensors_folder files;
    const struct safetensors_tensor **found; /* owned; by model_tensor; NULL: random */
};

/**
 * weights_folder_open() - find each tensor of @m and check its shape.
 * @config: config.json, if it is there, has to have its family and sizes.
 * @note: called for each tensor that is not simply read, also before an error; NULL: not.
 *
 * Return: ST_OK; ST_INVALID (missing tensors, all named; another shape, naming both; another size
 * in config.json); ST_IO; ST_CORRUPT; ST_UNSUPPORTED; ST_MEMORY. weights_folder_close() in any
 * case.
 */
MUST_CHECK enum status weights_folder_open(struct weights_folder *f, const struct model *m,
                                           const struct run_config *config, const char *dir,
                                           void (*note)(void *context, enum weights_fate fate,
                                                        const char *name),
                                           void *context);
void weights_folder_close(struct weights_folder *f);

/**
 * weights_folder_fill() - elements [first, first + count) of a unit's flat parameter, as fp32; gaps
 * get zeros. Reads these elements of the files and no others.
 *
 * Return: ST_OK; ST_UNSUPPORTED (neither F32, F16 nor BF16); ST_IO; ST_CORRUPT.
 */
MUST_CHECK enum status weights_folder_fill(const struct weights_folder *f, int unit, float *out,
                                           int64_t first, int64_t count);

C_END

#endif
