/* `tessera predict`: the answer to one question, from a text and a stored model. */
#include "engine/train/commands.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "comm/local.h"
#include "engine/base/log.h"
#include "engine/base/options.h"
#include "engine/base/out.h"
#include "engine/base/text.h"
#include "engine/train/evaluate.h"
#include "engine/train/model_source.h"
#include "engine/train/run.h"
#include "io/answers.h"

static const char DETAILS[] =
    "The model is a folder with config.json, model.safetensors and vocab.txt (or tokenizer.json),\n"
    "as tessera train leaves it in OUTPUT/model, or as Hugging Face's save_pretrained() writes "
    "it;\n"
    "or a checkpoint.\n"
    "Longer texts are cut into windows that overlap. Prints a line an answer:\n"
    "  ANSWER (probability P, characters FROM-TO)\n"
    "Characters are code points of the context from 0, the end is not included.\n";

struct predict_arguments {
    const char *model, *vocab, *question, *context, *context_file;
    int64_t n_best;
    bool json, version_2;
};

enum { LIST_LENGTH = 20 /* over which probabilities are taken, as in an evaluation */ };

/* ---- what is asked ---- */

static bool is_blank(const char *text)
{
    return text[strspn(text, " \t\r\n\v\f")] == '\0';
}

static enum status read_context(struct file_text *text, const struct predict_arguments *args)
{
    if (args->model == NULL)
        return FAIL(INVALID, "--model: no folder with a model is given");
    if ((args->context == NULL) == (args->context_file == NULL))
        return FAIL(INVALID, "one of --context and --context-file has to be given");
    if (args->context_file != NULL) {
        TRY(file_read(text, args->context_file));
        if (strlen(text->data) != text->bytes)
            return FAIL(CORRUPT, "%s: there is a zero byte in the text", args->context_file);
    }
    const char *option = text->data != NULL ? "--context-file" : "--context";
    const char *context = text->data != NULL ? text->data : args->context;
    if (is_blank(args->question))
        return FAIL(INVALID, "--question: the question is empty");
    if (is_blank(context))
        return FAIL(INVALID, "%s: the context is empty", option);
    if (!text_is_utf8(args->question) || !text_is_utf8(context))
        return FAIL(CORRUPT, "%s: the text is not UTF-8",
                    text_is_utf8(context) ? "--question" : option);
    return ST_OK;
}

static enum status build_question(struct squad_data *data, const char *question,
                                  const char *context)
{
    char *kept_question, *kept_context;
    TRY(mem_alloc(&data->examples, sizeof *data->examples));
    TRY(pool_copy(&data->pool, &kept_question, question, strlen(question)));
    TRY(pool_copy(&data->pool, &kept_context, context, strlen(context)));
    data->examples[0] = (struct squad_example){
        .id = "question", .question = kept_question, .context = kept_context, .title = ""};
    data->example_count = data->context_count = 1;
    return ST_OK;
}

/* ---- the model ---- */

/* A question takes at most half of a window, so that a window always has room to go on. */
static enum status configure(struct run_config *config, const struct predict_arguments *args)
{
    TRY(model_source_configure(config, args->model, args->vocab));
    int64_t positions = config->model.max_positions;
    config->data.doc_stride = config->data.max_length / 3;
    config->data.max_query_length = config->data.max_length / 2 - 3;
    if (config->data.max_query_length < 1)
        return FAIL(INVALID, "%s: a model of %" PRId64 " positions has no room for a question",
                    args->model, positions);
    config->data.version_2 = args->version_2;
    config->eval.n_best = args->n_best > LIST_LENGTH ? args->n_best : LIST_LENGTH;
    return config_check(config);
}

static enum status load_data(struct run_data *data, const struct run_config *config,
                             const char *question, const char *context)
{
    struct split *split = &data->eval;
    struct feature_options options = {.max_length = config->data.max_length,
                                      .doc_stride = config->data.doc_stride,
                                      .max_query_length = config->data.max_query_length};
    TRY(vocab_load(&data->vocab, config->data.vocab));
    if (data->vocab.size > config->model.vocab_size)
        return FAIL(INVALID, "%s: %d tokens, but the model's table has %" PRId64,
                    config->data.vocab, data->vocab.size, config->model.vocab_size);
    wordpiece_init(&data->tokenizer, &data->vocab, config->model.cased);
    TRY(build_question(&split->data, question, context));
    TRY(features_build(&split->features, &split->data, &data->tokenizer, &options));
    split->examples = 1;
    split->count = split->features.feature_count;
    TRY(mem_alloc(&split->rows, sizeof *split->rows * (size_t)split->count));
    for (int64_t i = 0; i < split->count; i++)
        split->rows[i] = split->features.features[i].token_count;
    return ST_OK;
}

static enum status run_model(struct answers *answers, const struct run_config *config,
                             const struct run_data *data)
{
    enum status st;
    struct local_world *world = NULL;
    struct comm *comm = NULL;
    struct device *device = NULL;
    struct trainer trainer = {0};
    struct executor_options options = {.overlap = true};
    struct evaluation result = {.split = "question"};
    TRY_GOTO(st, out, local_world_open(&world, 1, config->train.timeout_s * 1000));
    TRY_GOTO(st, out, local_comm_open(&comm, world, 0));
    TRY_GOTO(st, out, device_open(&device, DEVICE_CPU, PRECISION_FP32, 0, run_threads(config, 1)));
    TRY_GOTO(st, out, trainer_open(&trainer, config, data, device, comm, NULL, &options));
    TRY_GOTO(st, out,
             evaluator_answers(trainer.evaluator, &trainer, &data->eval, 1, answers, &result));
out:
    trainer_close(&trainer);
    device_close(&device);
    comm_close(&comm);
    local_world_close(&world);
    return st;
}

/* ---- what is printed ---- */

static void print_line(const struct answer_best *best)
{
    bool is_span = best->end > best->start;
    out("%s (probability %.4f", is_span ? best->text : "no answer", best->probability);
    if (is_span)
        out(", characters %d-%d", best->start, best->end);
    out(")\n");
}

static json_t *describe(const struct answer_best *best)
{
    bool is_span = best->end > best->start;
    return json_pack("{s:s, s:f, s:i, s:i, s:f, s:f}", "text", is_span ? best->text : "",
                     "probability", best->probability, "start", best->start, "end", best->end,
                     "start_logit", (double)best->start_logit, "end_logit",
                     (double)best->end_logit);
}

static enum status print_json(const struct answer_best *chosen, const struct answer_best *list,
                              int64_t count, const char *question)
{
    const size_t flags = JSON_INDENT(4) | JSON_REAL_PRECISION(17) | JSON_ENSURE_ASCII;
    enum status st = ST_OK;
    char *text = NULL;
    json_t *root = describe(chosen), *entries = json_array();
    bool complete = json_object_set_new(root, "question", json_string(question)) == 0;
    for (int64_t i = 0; i < count; i++)
        complete &= json_array_append_new(entries, describe(&list[i])) == 0;
    complete &= json_object_set_new(root, "n_best", entries) == 0;
    size_t bytes = json_dumpb(root, NULL, 0, flags);
    if (!complete || bytes == 0) {
        st = FAIL(MEMORY, "out of memory while writing the answer");
        goto out;
    }
    TRY_GOTO(st, out, mem_alloc(&text, bytes + 1));
    json_dumpb(root, text, bytes, flags);
    out("%s\n", text);
out:
    mem_free(&text);
    json_decref(root);
    return st;
}

static enum status print_answers(const struct answers *answers,
                                 const struct predict_arguments *args)
{
    int32_t count;
    const struct answer_best *list = answers_list(answers, 0, &count), *chosen = list;
    while (strcmp(chosen->text, answers_texts(answers)[0]) != 0)
        chosen++; /* the answer is one of the list */
    int64_t shown = args->n_best < count ? args->n_best : count;
    if (args->json)
        TRY(print_json(chosen, list, shown, args->question));
    else if (args->n_best == 1)
        print_line(chosen);
    else
        for (int64_t i = 0; i < shown; i++)
            print_line(&list[i]);
    return out_flush();
}

/* ---- the command ---- */

static enum status predict(const struct predict_arguments *args)
{
    enum status st;
    struct file_text text = {0};
    struct run_config config;
    struct run_data data = {0};
    struct answers answers = {0};
    log_set_level(LOG_WARN);
    TRY_GOTO(st, out, read_context(&text, args));
    TRY_GOTO(st, out, configure(&config, args));
    TRY_GOTO(
        st, out,
        load_data(&data, &config, args->question, text.data != NULL ? text.data : args->context));
    TRY_GOTO(st, out, run_model(&answers, &config, &data));
    TRY_GOTO(st, out, print_answers(&answers, args));
out:
    answers_release(&answers);
    run_data_release(&data);
    mem_free(&text.data);
    return st;
}

enum status cmd_predict(int argc, char **argv)
{
    struct predict_arguments args = {.n_best = 1};
    bool help_shown = false;
    const struct option options[] = {
        {"model", OPTION_TEXT, &args.model, "DIR", "folder of the model", 0, 0, false},
        {"vocab", OPTION_TEXT, &args.vocab, "FILE", "its vocabulary, if it is not in the folder", 0,
         0, false},
        {"question", OPTION_TEXT, &args.question, "TEXT", "what to ask", 0, 0, true},
        {"context", OPTION_TEXT, &args.context, "TEXT", "where to look for the answer", 0, 0,
         false},
        {"context-file", OPTION_TEXT, &args.context_file, "FILE", "the same, from a file", 0, 0,
         false},
        {"n-best", OPTION_INT, &args.n_best, "N", "answers to show, the best first", 1,
         ANSWERS_MAX_BEST, false},
        {"json", OPTION_FLAG, &args.json, NULL, "print a JSON object", 0, 0, false},
        {"version-2", OPTION_FLAG, &args.version_2, NULL,
         "the text may hold no answer (a model trained on SQuAD 2.0)", 0, 0, false},
    };
    const struct command command = {.name = "predict",
                                    .summary = "Answer a question from a text.",
                                    .details = DETAILS,
                                    .options = options,
                                    .option_count = sizeof options / sizeof *options};
    TRY(options_parse(&command, argc, argv, &help_shown));
    return help_shown ? ST_OK : predict(&args);
}
