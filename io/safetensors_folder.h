/*
 * io/safetensors_folder.h - the tensors of a Hugging Face model folder, in one file or in several.
 *
 *     DIR/model.safetensors                     all of them, or
 *     DIR/model.safetensors.index.json          {"weight_map": {"NAME": "FILE", ...}, ...} and
 *     DIR/model-00001-of-00002.safetensors ...  the files that it names, in the same folder
 *
 * The index and the files have to agree: each name is in the file of its line, and each tensor of a
 * file is named with it. Opening reads headers only; data is read by ranges, from any thread.
 *
 * Source: https://huggingface.co/docs/transformers/big_models ("Sharded checkpoints").
 */
#ifndef IO_SAFETENSORS_FOLDER_H
#define IO_SAFETENSORS_FOLDER_H

#include "io/safetensors.h"

C_BEGIN

struct safetensors_folder {    /* zero-initialise */
    char path[1024];           /* the one file, or the index: for messages */
    struct safetensors *files; /* owned */
    size_t capacity;
    int file_count;
};

/**
 * safetensors_folder_open() - find and open the file or files of a model.
 * @f: safetensors_folder_close() releases it, also after a failure.
 *
 * Return: ST_OK; ST_UNSUPPORTED (only pytorch_model.bin is there: the message says what to do);
 * ST_CORRUPT (index and files do not agree, a file name that leaves the folder); errors of
 * safetensors_open().
 */
MUST_CHECK enum status safetensors_folder_open(struct safetensors_folder *f, const char *dir);
void safetensors_folder_close(struct safetensors_folder *f);

/** safetensors_folder_find() - the tensor of this name, or NULL. */
const struct safetensors_tensor *safetensors_folder_find(const struct safetensors_folder *f,
                                                         const char *name);

/** safetensors_folder_read() - safetensors_read() from the file that holds @tensor. */
MUST_CHECK enum status safetensors_folder_read(const struct safetensors_folder *f,
                                               const struct safetensors_tensor *tensor,
                                               int64_t first, int64_t count, float *out);

C_END

#endif
