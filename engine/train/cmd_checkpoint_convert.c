/* `tessera checkpoint reshard`, `export` and `import`. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "comm/comm.h"
#include "engine/base/log.h"
#include "engine/base/out.h"
#include "engine/train/checkpoint_convert.h"
#include "engine/train/cmd_checkpoint.h"

/* What stands in a new checkpoint, in a line. */
static enum status print_made(const char *path)
{
    enum status st;
    struct checkpoint c = {0};
    TRY_GOTO(st, out, checkpoint_open(&c, path));
    out("%s: step %" PRId64 ", %d tensors in %d files, %" PRId64 " bytes\n", path, c.step,
        c.tensor_count, c.file_count, c.bytes);
out:
    checkpoint_close(&c);
    return st;
}

/* ---- reshard --------------------------------------------------------------------------------- */

enum status cmd_checkpoint_reshard(int argc, char **argv)
{
    int64_t ranks = 0;
    bool help_shown = false;
    char *paths[2], made[CHECKPOINT_PATH_BYTES];
    const struct option options[] = {
        {"ranks", OPTION_INT, &ranks, "N", "ranks to write for", 1, COMM_MAX_WORLD_SIZE, true}};
    const struct command command = {
        .name = "checkpoint reshard",
        .operands = "PATH DIR",
        .summary = "Write a checkpoint again, in the files of another number of ranks.",
        .details =
            "Writes DIR/step-N with the step of PATH, the same tensors and the same training "
            "state, reads\nit back and compares. The files are those that N ranks would have "
            "written. --resume takes\neither: it reads any number of files on any number of "
            "ranks at any stage.\n",
        .options = options,
        .option_count = sizeof options / sizeof *options};
    TRY(checkpoint_arguments(&command, argc, argv, paths, 2, &help_shown));
    if (help_shown)
        return ST_OK;
    TRY(checkpoint_reshard(made, paths[0], paths[1], (int)ranks));
    return print_made(made);
}

/* ---- export ---------------------------------------------------------------------------------- */

/* As people name types, and as the file does. */
static const struct {
    const char *name, *dtype;
} dtypes[] = {{"fp32", "F32"}, {"bf16", "BF16"}, {"fp16", "F16"}};

static enum status find_dtype(const char **dtype, const char *name)
{
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        if (strcmp(dtypes[i].name, name) == 0) {
            *dtype = dtypes[i].dtype;
            return ST_OK;
        }
    return FAIL(INVALID, "--dtype: expected fp32, bf16 or fp16, found \"%s\"", name);
}

enum status cmd_checkpoint_export(int argc, char **argv)
{
    struct checkpoint_export how = {.vocab = NULL};
    const char *dtype = "fp32";
    bool help_shown = false;
    char *paths[2];
    const struct option options[] = {
        {"dtype", OPTION_TEXT, &dtype, "fp32|bf16|fp16", "of the weights", 0, 0, false},
        {"vocab", OPTION_TEXT, &how.vocab, "FILE",
         "the vocabulary, if it is no longer where the run had it", 0, 0, false},
        {"overwrite", OPTION_FLAG, &how.overwrite, NULL,
         "replace a folder that an earlier export wrote", 0, 0, false}};
    const struct command command = {
        .name = "checkpoint export",
        .operands = "PATH DIR",
        .summary = "The weights of a checkpoint as a Hugging Face folder.",
        .details = "Writes config.json, model.safetensors, tokenizer_config.json and vocab.txt to "
                   "DIR, which\ntransformers, tessera predict and model.init_from read. bf16 and "
                   "fp16 round to the nearest\nvalue; one that fp16 has no room for (beyond 65504) "
                   "is an error that names it.\n",
        .options = options,
        .option_count = sizeof options / sizeof *options};
    TRY(checkpoint_arguments(&command, argc, argv, paths, 2, &help_shown));
    if (help_shown)
        return ST_OK;
    TRY(find_dtype(&how.dtype, dtype));
    TRY(checkpoint_export(paths[0], paths[1], &how));
    out("%s: the weights of %s in %s\n", paths[1], paths[0], dtype);
    return ST_OK;
}

/* ---- import ---------------------------------------------------------------------------------- */

static void print_fate(void *context, enum weights_fate fate, const char *name)
{
    static const char *const words[WEIGHTS_FATES] = {
        [WEIGHTS_MISSING] = "missing", [WEIGHTS_RANDOM] = "random", [WEIGHTS_UNUSED] = "unused"};
    int *count = context;
    count[fate]++;
    out("%-8s  %s\n", words[fate], name);
}

enum status cmd_checkpoint_import(int argc, char **argv)
{
    int64_t ranks = 1, seed = 42;
    int count[WEIGHTS_FATES] = {0};
    bool help_shown = false;
    char *paths[2], made[CHECKPOINT_PATH_BYTES];
    const struct option options[] = {{"ranks", OPTION_INT, &ranks, "N",
                                      "write the files of so many ranks", 1, COMM_MAX_WORLD_SIZE,
                                      false},
                                     {"seed", OPTION_INT, &seed, "N",
                                      "of the initial values of a missing head", 0, 1e15, false}};
    const struct command command = {
        .name = "checkpoint import",
        .operands = "FOLDER DIR",
        .summary = "A Hugging Face folder as a checkpoint of step 0.",
        .details =
            "Writes DIR/step-00000000 with the weights of FOLDER (config.json, and "
            "model.safetensors or\nmodel.safetensors.index.json with the files it names) and "
            "moments of zero. --resume takes it\nwith any data and seed; so does "
            "model.init_from. Prints a line for each tensor that is\n"
            "  missing   the model has it, FOLDER does not: an error\n"
            "  random    the same of the question answering head: it has to be trained\n"
            "  unused    FOLDER has it, the model does not: a pooler, other heads, buffers\n",
        .options = options,
        .option_count = sizeof options / sizeof *options};
    TRY(checkpoint_arguments(&command, argc, argv, paths, 2, &help_shown));
    if (help_shown)
        return ST_OK;
    struct checkpoint_import how = {
        .world_size = (int)ranks, .seed = (uint64_t)seed, .note = print_fate, .context = count};
    TRY(checkpoint_import(made, paths[0], paths[1], &how));
    if (count[WEIGHTS_RANDOM] > 0)
        log_warn("checkpoint", "%s has no question answering head: random values, train them",
                 paths[0]);
    return print_made(made);
}
