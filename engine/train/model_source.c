#include "engine/train/model_source.h"

#include <stdio.h>
#include <unistd.h>

#include "engine/base/file.h"
#include "engine/model/model.h"
#include "engine/train/checkpoint_model.h"
#include "engine/train/model_config.h"
#include "io/safetensors_folder.h"

enum { WINDOW = 384 };

/* Without a head the answers would be random. */
static enum status check_head(const char *dir)
{
    enum status st;
    struct safetensors_folder files = {0};
    TRY_GOTO(st, out, safetensors_folder_open(&files, dir));
    if (safetensors_folder_find(&files, "qa_outputs.weight") == NULL)
        st = FAIL(INVALID, "%s: has no qa_outputs.weight: it is not fine-tuned to answer questions",
                  files.path);
out:
    safetensors_folder_close(&files);
    return st;
}

static enum status find_vocab(char path[CONFIG_TEXT_BYTES], const char *dir, const char *given)
{
    if (given != NULL)
        return path_join(path, CONFIG_TEXT_BYTES, "", given);
    TRY(model_vocab_path(path, CONFIG_TEXT_BYTES, dir));
    if (access(path, F_OK) != 0)
        return FAIL(
            INVALID,
            "%s: is not there, and no tokenizer.json: give the vocabulary with --vocab FILE", path);
    return ST_OK;
}

/* A folder that is there, and neither kind: that of a run, for example. */
static enum status check_kind(const char *dir)
{
    char path[CONFIG_TEXT_BYTES];
    TRY(path_join(path, sizeof path, dir, "config.json"));
    if (access(dir, F_OK) != 0 || access(path, F_OK) == 0)
        return ST_OK;
    return FAIL(INVALID,
                "%s: is neither a checkpoint, as RUN/checkpoints/step-00000100 (no manifest.json), "
                "nor a Hugging Face folder, as RUN/model (no config.json)",
                dir);
}

static enum status from_folder(struct run_config *config, const char *dir, const char *vocab)
{
    TRY(check_kind(dir));
    TRY(model_config_read(config, dir));
    TRY(check_head(dir));
    config->data.max_length =
        config->model.max_positions < WINDOW ? config->model.max_positions : WINDOW;
    config->data.doc_stride = config->data.max_length / 3;
    return find_vocab(config->data.vocab, dir, vocab);
}

static enum status from_checkpoint(struct run_config *config, const char *dir, const char *given)
{
    enum status st;
    struct checkpoint c = {0};
    struct run_config then;
    struct vocab vocab = {0};
    TRY_GOTO(st, out, checkpoint_open(&c, dir));
    TRY_GOTO(st, out, checkpoint_config(&then, &c));
    TRY_GOTO(st, out, checkpoint_vocab(&vocab, &c, &then, given));
    config->model = then.model;
    config->eval = then.eval;
    config->data.max_length = then.data.max_length;
    config->data.doc_stride = then.data.doc_stride;
    config->data.max_query_length = then.data.max_query_length;
    TRY_GOTO(st, out,
             path_join(config->data.vocab, sizeof config->data.vocab, "",
                       given != NULL ? given : then.data.vocab));
out:
    vocab_release(&vocab);
    checkpoint_close(&c);
    return st;
}

enum status model_source_configure(struct run_config *config, const char *dir, const char *vocab)
{
    config_defaults(config);
    if (checkpoint_is_one(dir))
        TRY(from_checkpoint(config, dir, vocab));
    else
        TRY(from_folder(config, dir, vocab));
    TRY(path_join(config->model.init_from, sizeof config->model.init_from, "", dir));
    config->train.steps = 0;
    config->train.micro_batch = 1;
    config->eval.train_samples = 0;
    config->eval.stop_metric = STOP_NONE;
    snprintf(config->train.freeze, sizeof config->train.freeze, "%s,qa_outputs",
             model_family_name(config->model.family));
    return ST_OK;
}
