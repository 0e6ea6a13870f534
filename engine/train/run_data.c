#include "engine/train/run_data.h"

#include <inttypes.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/train/background.h"
#include "io/features_cache.h"
#include "io/json_file.h"

/* The features of a file of training questions (checked) or of others, and its texts unless the
 * features are cached. */
static enum status load_features(struct split *split, const struct run_data *data,
                                 const struct run_config *config, const char *path, bool train)
{
    const struct feature_options options = {.max_length = config->data.max_length,
                                            .doc_stride = config->data.doc_stride,
                                            .max_query_length = config->data.max_query_length,
                                            .checked = train};
    const char *cache_dir = config->data.cache_dir;
    split->path = path;
    if (cache_dir[0] != '\0') {
        TRY(json_file_hash(&split->data.content_hash, path));
        TRY(features_find(&split->features, split->data.content_hash, &data->tokenizer, &options,
                          cache_dir, &split->cached));
        if (split->cached)
            return ST_OK;
    }
    TRY(squad_load(&split->data, path));
    if (train)
        TRY(squad_check_answers(&split->data));
    return features_load_or_build(&split->features, &split->data, &data->tokenizer, &options,
                                  cache_dir, &split->cached);
}

static enum status load_split(struct split *split, const struct run_data *data,
                              const struct run_config *config, const char *path,
                              int64_t max_examples, bool train)
{
    TRY(load_features(split, data, config, path, train));
    const struct feature_set *f = &split->features;
    split->examples = f->example_count;
    if (max_examples > 0 && max_examples < split->examples)
        split->examples = max_examples;
    while (split->count < f->feature_count && f->features[split->count].example < split->examples)
        split->count++;
    TRY(mem_alloc(&split->rows, sizeof *split->rows * (size_t)split->count));
    for (int64_t i = 0; i < split->count; i++)
        split->rows[i] =
            config->data.padded ? (int32_t)config->data.max_length : f->features[i].token_count;
    return ST_OK;
}

/* The questions of the evaluation, in a thread beside those of training. */
struct loading {
    struct background thread;
    struct run_data *data;
    const struct run_config *config;
};

static enum status load_eval(void *context)
{
    const struct loading *l = context;
    if (l->config->data.eval[0] == '\0')
        return ST_OK;
    return load_split(&l->data->eval, l->data, l->config, l->config->data.eval,
                      l->config->data.max_eval_samples, false);
}

static enum status load_train(struct run_data *data, const struct run_config *config)
{
    if (config->data.train[0] == '\0')
        return FAIL(INVALID, "data.train: no training file is given");
    return load_split(&data->train, data, config, config->data.train,
                      config->data.max_train_samples, true);
}

static enum status load_both(struct run_data *data, const struct run_config *config)
{
    struct loading eval = {.data = data, .config = config};
    background_start(&eval.thread, -1, load_eval, &eval);
    enum status st = load_train(data, config);
    background_join(&eval.thread);
    if (st != ST_OK || eval.thread.st == ST_OK)
        return st;
    status_set_message(eval.thread.message);
    return eval.thread.st;
}

static void release_split(struct split *split)
{
    mem_free(&split->rows);
    features_release(&split->features);
    squad_release(&split->data);
}

enum status run_data_load(struct run_data *data, const struct run_config *config, bool with_train)
{
    if (config->data.vocab[0] == '\0')
        return FAIL(INVALID, "data.vocab: no vocabulary file is given");
    TRY(vocab_load(&data->vocab, config->data.vocab));
    if (data->vocab.size != config->model.vocab_size)
        return FAIL(INVALID, "%s: %d tokens, but model.vocab_size is %" PRId64, config->data.vocab,
                    data->vocab.size, config->model.vocab_size);
    wordpiece_init(&data->tokenizer, &data->vocab, config->model.cased);
    if (with_train)
        return load_both(data, config);
    struct loading eval = {.data = data, .config = config};
    return load_eval(&eval);
}

void run_data_release(struct run_data *data)
{
    release_split(&data->train);
    release_split(&data->eval);
    vocab_release(&data->vocab);
    memset(data, 0, sizeof *data);
}

enum status split_texts(const struct squad_data **texts, struct squad_data *kept,
                        const struct split *split)
{
    *texts = split->data.example_count > 0 ? &split->data : kept;
    if ((*texts)->example_count > 0)
        return ST_OK;
    TRY(squad_load(kept, split->path));
    if (kept->content_hash == split->data.content_hash)
        return ST_OK;
    squad_release(kept);
    return FAIL(INVALID, "%s: the file has changed since the start of the run", split->path);
}
