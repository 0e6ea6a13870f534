/*
 * engine/train/checkpoint_convert.h - checkpoints for other ranks, to and from Hugging Face
 * folders.
 *
 *     checkpoint ---- reshard --> the same state in N files; a run needs this never, it reads any
 *                ---- export  --> config.json, model.safetensors, tokenizer_config.json, vocab.txt
 *     folder -------- import  --> a checkpoint of step 0: these weights, moments of zero
 *
 * All of them stream: their memory is a few chunks (CHECKPOINT_CONVERT_BYTES) and the tables of
 * names and chunks, however large tensors, files and model are. All make a new folder, under a
 * hidden name until it is whole and on the disk; the source is only read.
 */
#ifndef ENGINE_TRAIN_CHECKPOINT_CONVERT_H
#define ENGINE_TRAIN_CHECKPOINT_CONVERT_H

#include "engine/train/weights_folder.h"
#include "io/checkpoint.h"

C_BEGIN

/* Buffers in use at the same time: of values alone, without tables of names and chunks. */
enum { CHECKPOINT_CONVERT_BYTES = 8 * CHECKPOINT_CHUNK_BYTES };

/**
 * checkpoint_reshard() - write a checkpoint again as @world_size ranks would.
 * @path: CHECKPOINT_PATH_BYTES; the new one, "DIR/step-N" with the step of the old.
 *
 * Every value is read back and compared with the old one's. Return: ST_OK; ST_INVALID (there
 * already; its model is not known or does not fit); ST_CORRUPT; ST_IO; ST_MEMORY.
 */
MUST_CHECK enum status checkpoint_reshard(char *path, const char *from, const char *dir,
                                          int world_size);

struct checkpoint_export {
    const char *dtype; /* of model.safetensors: "F32", "BF16" or "F16" */
    const char *vocab; /* the vocabulary's file; NULL: the one that the run was trained with */
    bool overwrite;    /* replace a folder that holds nothing but what an export writes */
};

/**
 * checkpoint_export() - the master weights as a Hugging Face folder.
 * @dir: made; a folder that is there has to be empty, but for @overwrite.
 *
 * Return: ST_OK; ST_INVALID (something stands there; a value that the dtype has no room for: tensor
 * and element are named; a vocabulary that is not the model's); ST_IO; ST_CORRUPT; ST_MEMORY.
 */
MUST_CHECK enum status checkpoint_export(const char *from, const char *dir,
                                         const struct checkpoint_export *options);

struct checkpoint_import {
    int world_size;
    uint64_t seed;                                                         /* of a missing head */
    void (*note)(void *context, enum weights_fate fate, const char *name); /* or NULL */
    void *context;
};

/**
 * checkpoint_import() - "DIR/step-00000000" from a Hugging Face folder.
 * @path: CHECKPOINT_PATH_BYTES; the new one.
 *
 * A vocab.txt in the folder becomes part of what a run that goes on from it is checked against.
 * Return: ST_OK; as weights_folder_open(); ST_INVALID (there already; no config.json).
 */
MUST_CHECK enum status checkpoint_import(char *path, const char *from, const char *dir,
                                         const struct checkpoint_import *options);

C_END

#endif
