/* `tessera eval`: EM and F1 of a stored model on a file of questions. */
#include "engine/train/commands.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "comm/comm.h"
#include "engine/base/file.h"
#include "engine/base/log.h"
#include "engine/base/options.h"
#include "engine/base/out.h"
#include "engine/train/evaluate.h"
#include "engine/train/model_source.h"
#include "engine/train/run.h"
#include "engine/train/score_print.h"

static const char DETAILS[] =
    "The model is a checkpoint, or a Hugging Face folder such as tessera train leaves in\n"
    "OUTPUT/model. Ranks compute as in training: threads, or processes that mpiexec, srun or\n"
    "torchrun started, or a process a GPU. The answers go to the output folder as\n"
    "predictions.json and nbest.json; the result is printed as a JSON object:\n"
    "  loss, windows                    mean over the windows of the questions\n" SCORE_PRINT_HELP
    "  best_exact, best_exact_thresh    version 2.0 data: the best score and the threshold of the\n"
    "  best_f1, best_f1_thresh          null odds for it (eval.null_threshold)\n"
    "If a question of the file has no answer, \"no answer\" is one that the model may give, and\n"
    "null_odds.json says how near it was.\n"
    "--set takes any key of a configuration (tessera train --help), such as data.max_length,\n"
    "eval.micro_batch, eval.null_threshold or train.precision.\n";

struct eval_arguments {
    const char *checkpoint, *model, *data, *vocab, *output_dir, *device;
    int64_t ranks, zero_stage, max_samples;
    struct option_list sets;
};

struct eval_job {
    const char *output_dir;
    bool done; /* on the process that has rank 0 */
    struct evaluation result;
};

/* ---- the configuration ----------------------------------------------------------------------- */

/* "No answer" is an answer only where some question has none: the questions say so themselves. */
static enum status detect_version(struct run_config *config, const char *path)
{
    enum status st;
    struct squad_data data = {0};
    TRY_GOTO(st, out, squad_load(&data, path));
    for (int64_t i = 0; i < data.example_count; i++)
        config->data.version_2 |= data.examples[i].impossible;
out:
    squad_release(&data);
    return st;
}

static enum status configure(struct run_config *config, const struct eval_arguments *args)
{
    if ((args->checkpoint == NULL) == (args->model == NULL))
        return FAIL(INVALID, "one of --checkpoint PATH and --model DIR has to be given");
    TRY(model_source_configure(config, args->model != NULL ? args->model : args->checkpoint,
                               args->vocab));
    TRY(detect_version(config, args->data));
    TRY(path_join(config->data.eval, sizeof config->data.eval, "", args->data));
    TRY(path_join(config->output.dir, sizeof config->output.dir, "", args->output_dir));
    config->data.max_eval_samples = args->max_samples;
    config->train.ranks = args->ranks;
    config->train.zero_stage = args->zero_stage;
    for (int i = 0; i < args->sets.count; i++)
        TRY(config_set(config, args->sets.items[i], "--set"));
    if (args->device != NULL) {
        char assignment[64];
        snprintf(assignment, sizeof assignment, "train.device=%.40s", args->device);
        TRY(config_set(config, assignment, "--device"));
    }
    return config_check(config);
}

/* ---- on every rank --------------------------------------------------------------------------- */

static enum status evaluate(void *context, struct trainer *t)
{
    struct eval_job *job = context;
    const struct split *split = &t->data->eval;
    struct evaluation e = {.split = "eval"};
    bool speaks = t->comm->rank == 0;
    TRY(comm_agree(t->comm, speaks ? file_make_dirs(job->output_dir) : ST_OK));
    TRY(evaluator_run(t->evaluator, t, split, split->examples, speaks ? job->output_dir : NULL,
                      &e));
    if (speaks) {
        job->result = e;
        job->done = true;
    }
    return ST_OK;
}

static enum status print_result(const struct eval_job *job)
{
    if (!job->done)
        return ST_OK;
    out("{\n    \"loss\": %.17g,\n    \"windows\": %" PRId64 ",\n", job->result.loss,
        job->result.windows);
    score_print(&job->result.score, job->result.unanswerable);
    out("}\n");
    log_info("eval", "%" PRId64 " questions in %.1f s; answers in %s", job->result.score.all.total,
             job->result.ms * 1e-3, job->output_dir);
    return out_flush();
}

/* ---- the command ----------------------------------------------------------------------------- */

enum status cmd_eval(int argc, char **argv)
{
    struct eval_arguments args = {.output_dir = "runs/eval", .ranks = 1};
    struct run_config config;
    bool help_shown = false;
    const struct option options[] = {
        {"checkpoint", OPTION_TEXT, &args.checkpoint, "PATH",
         "a checkpoint, as run/checkpoints/step-00000100", 0, 0, false},
        {"model", OPTION_TEXT, &args.model, "DIR", "or a Hugging Face folder", 0, 0, false},
        {"data", OPTION_TEXT, &args.data, "FILE", "questions, SQuAD JSON, plain or gzip", 0, 0,
         true},
        {"vocab", OPTION_TEXT, &args.vocab, "FILE",
         "the vocabulary, if it is not in the folder or where the run had it", 0, 0, false},
        {"output-dir", OPTION_TEXT, &args.output_dir, "DIR", "for the answers", 0, 0, false},
        {"ranks", OPTION_INT, &args.ranks, "N", "ranks that share the work", 1, COMM_MAX_WORLD_SIZE,
         false},
        {"zero-stage", OPTION_INT, &args.zero_stage, "0..3",
         "3: each rank holds a part of the model", 0, 3, false},
        {"device", OPTION_TEXT, &args.device, "auto|cpu|cuda", "where to compute (auto)", 0, 0,
         false},
        {"max-samples", OPTION_INT, &args.max_samples, "N", "the first N questions only; 0: all", 0,
         1e15, false},
        {"set", OPTION_LIST, &args.sets, "KEY=VALUE", "a key of the configuration", 0, 0, false},
    };
    const struct command command = {.name = "eval",
                                    .summary = "EM and F1 of a model on a file of questions.",
                                    .details = DETAILS,
                                    .options = options,
                                    .option_count = sizeof options / sizeof *options};
    TRY(options_parse(&command, argc, argv, &help_shown));
    if (help_shown)
        return ST_OK;
    TRY(configure(&config, &args));
    struct eval_job job = {.output_dir = config.output.dir};
    struct run_options how = {.quiet = true, .body = evaluate, .context = &job};
    int ranks_asked = config.train.ranks > 1 ? (int)config.train.ranks : 0;
    TRY(run_launch(&config, &how, ranks_asked, argv - 1 /* main's */));
    return print_result(&job);
}
