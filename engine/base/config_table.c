#include "engine/base/config_table.h"

#include <float.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "engine/base/text.h"

/* ---- the table ------------------------------------------------------------------------------- */

/* Names by enum value. */
static const char *const family_names[] = {"bert", "distilbert", NULL};
static const char *const schedule_names[] = {"linear", "cosine", "constant", NULL};
static const char *const reduce_names[] = {"auto", "per_step", "per_micro_batch", NULL};
static const char *const windows_names[] = {"none", "nccl", "own", NULL};
static const char *const tables_names[] = {"auto", "rows", "whole", NULL};
static const char *const update_names[] = {"auto", "late", "early", NULL};
static const char *const recompute_names[] = {"none", "gelu", "block", NULL};
static const char *const comm_names[] = {"auto", "local", "mpi", "nccl", NULL};
static const char *const bind_names[] = {"auto", "none", NULL};
static const char *const device_names[] = {"auto", "cpu", "cuda", NULL};
static const char *const precision_names[] = {"auto", "fp32", "bf16", NULL};
static const char *const stop_names[] = {"none", "f1", "exact_match", "loss", NULL};

#define FIELD(s, n, k)                                                                             \
    .section = #s, .name = #n, .kind = (k), .offset = offsetof(struct run_config, s.n)
#define INT(s, n, standard, min, max, text)                                                        \
    {                                                                                              \
        FIELD(s, n, FIELD_INT), .int_default = (standard), .int_min = (min), .int_max = (max),     \
                                .doc = (text)                                                      \
    }
#define INT_OR(s, n, standard, min, max, name, value, text)                                        \
    {                                                                                              \
        FIELD(s, n, FIELD_INT), .int_default = (standard), .int_min = (min), .int_max = (max),     \
                                .word = (name), .word_value = (value), .doc = (text)               \
    }
/* A real number with its bounds included; ABOVE and BELOW leave out the lower or upper bound. */
#define REAL(s, n, standard, min, max, text)                                                       \
    {                                                                                              \
        FIELD(s, n, FIELD_REAL), .real_default = (standard), .real_min = (min), .real_max = (max), \
                                 .doc = (text)                                                     \
    }
#define REAL_ABOVE(s, n, standard, min, text)                                                      \
    {                                                                                              \
        FIELD(s, n, FIELD_REAL), .real_default = (standard), .real_min = (min),                    \
                                 .real_max = DBL_MAX, .above = true, .doc = (text)                 \
    }
#define REAL_BELOW(s, n, standard, min, max, text)                                                 \
    {                                                                                              \
        FIELD(s, n, FIELD_REAL), .real_default = (standard), .real_min = (min), .real_max = (max), \
                                 .below = true, .doc = (text)                                      \
    }
#define BOOL(s, n, standard, text)                                                                 \
    {                                                                                              \
        FIELD(s, n, FIELD_BOOL), .int_default = (standard), .doc = (text)                          \
    }
#define CHOICE(s, n, names, standard, text)                                                        \
    {                                                                                              \
        FIELD(s, n, FIELD_CHOICE), .int_default = (standard), .choices = (names), .doc = (text)    \
    }
#define TEXT(s, n, standard, text)                                                                 \
    {                                                                                              \
        FIELD(s, n, FIELD_TEXT), .text_default = (standard), .doc = (text)                         \
    }

enum { BIG = 1 << 30 };

const struct config_field config_fields[] = {
    CHOICE(model, family, family_names, FAMILY_BERT,
           "Kind of model; distilbert: no segment table, no dropout behind attention."),
    INT(model, vocab_size, 30522, 1, BIG,
        "Entries of the vocabulary; the vocabulary file must have as many."),
    INT(model, hidden, 768, 1, 1 << 20, "Channels of the hidden states."),
    INT(model, layers, 12, 1, 500, "Transformer blocks."),
    INT(model, heads, 12, 1, 4096, "Attention heads; they divide hidden."),
    INT(model, ffn, 3072, 1, 1 << 22, "Channels between the two layers of the feed-forward part."),
    INT(model, max_positions, 512, 1, 1 << 20,
        "Rows of the position table: the longest sequence possible."),
    INT(model, type_vocab, 2, 1, 1024,
        "Rows of the segment table (question, context); not used by distilbert."),
    REAL_BELOW(model, hidden_dropout, 0.1, 0.0, 1.0,
               "Dropout after the embeddings and both parts of a block."),
    REAL_BELOW(model, attention_dropout, 0.1, 0.0, 1.0, "Dropout of attention probabilities."),
    REAL_BELOW(model, qa_dropout, 0.0, 0.0, 1.0,
               "Dropout of the last hidden states, before the head; DistilBERT was made with 0.1."),
    REAL_ABOVE(model, norm_eps, 1e-12, 0.0, "Added to the variance in LayerNorm."),
    REAL(model, init_range, 0.02, 0.0, DBL_MAX, "Standard deviation of random initial weights."),
    BOOL(model, cased, false, "Keep case and accents of the text; must suit the vocabulary."),
    TEXT(model, init_from, "",
         "Folder of a Hugging Face model, or a checkpoint, whose weights to start from; empty: "
         "random weights."),

    TEXT(data, train, "", "Training questions, SQuAD JSON, plain or gzip."),
    TEXT(data, eval, "", "Evaluation questions, SQuAD JSON, plain or gzip; empty: no evaluation."),
    TEXT(data, vocab, "", "WordPiece vocabulary, one token a line."),
    TEXT(data, cache_dir, "", "Folder for tokenized data, keyed by content; empty: no cache."),
    INT(data, max_length, 384, 4, 1 << 20,
        "Longest window in tokens: question, context and three special tokens."),
    INT(data, doc_stride, 128, 0, 1 << 20, "Tokens of context that neighbouring windows share."),
    INT(data, max_query_length, 0, 0, 1 << 20, "Cut questions to this many tokens; 0: do not cut."),
    INT(data, max_train_samples, 0, 0, INT64_MAX, "Train on the first N questions only; 0: all."),
    INT(data, max_eval_samples, 0, 0, INT64_MAX, "Evaluate the first N questions only; 0: all."),
    BOOL(data, version_2, false, "SQuAD 2.0: questions may have no answer."),
    BOOL(data, padded, false,
         "Pad every sequence to max_length instead of packing; for comparisons."),

    INT_OR(train, zero_stage, 0, 0, 3, "auto", ZERO_STAGE_AUTO,
           "What is partitioned across ranks: 0 nothing, 1 optimizer states, 2 gradients too, 3 "
           "parameters too; auto: the fastest of these that fits the memory that is free."),
    INT(train, ranks, 1, 1, 4096, "Ranks that train together."),
    INT(train, micro_batch, 8, 1, 1 << 20, "Sequences in one forward and backward of a rank."),
    INT(train, grad_accum, 1, 1, 1 << 20,
        "Micro-batches a step; global batch = micro_batch * grad_accum * ranks."),
    INT(train, epochs, 2, 1, 1 << 20, "Passes over the training data."),
    INT(train, steps, -1, -1, INT64_MAX, "Steps to train; -1: epochs decide; 0: evaluate only."),
    INT(train, seed, 42, 0, INT64_MAX, "Seed of initial weights, data order and dropout."),
    CHOICE(train, reduce, reduce_names, REDUCE_AUTO,
           "When gradients are reduced; auto: per_step at stages 0 and 1, per_micro_batch at 2 and "
           "3."),
    CHOICE(train, tables, tables_names, TABLES_AUTO,
           "How the word table moves between ranks; rows: those of a step's tokens, in forward "
           "(stages 1 to 3) and their gradients in backward, which each rank sums where it owns "
           "them; whole: as all others; auto: what sends less at stages 1 and 2. Changes the order "
           "of sums."),
    CHOICE(train, update, update_names, UPDATE_AUTO,
           "When AdamW runs; late: under the next forward pass; early: at the end of its step; "
           "auto: late unless that needs 1% more memory."),
    CHOICE(train, recompute, recompute_names, RECOMPUTE_GELU,
           "Activations that backward computes again instead of keeping; gelu: the output of each "
           "GELU and attention's masks of dropout, which costs little; block: all of a block but "
           "its input."),
    INT(train, prefetch, 1, 0, 64, "Units gathered ahead of their use at stage 3."),
    BOOL(train, overlap, true,
         "Run collectives beside compute; false: each completes where it is issued."),
    BOOL(train, graphs, true, "On CUDA: capture each step shape as a graph once and replay it."),
    TEXT(
        train, gemm_plan, "auto",
        "On CUDA: folder with measured algorithms of matrix products, a file a kind of card; auto: "
        "in the user's cache folder; off: the library's choice, nothing is measured."),
    CHOICE(
        train, windows, windows_names, WINDOWS_NCCL,
        "Collectives between GPUs, where all ranks can: nccl: NCCL's, in symmetric windows; own: "
        "kernels that need fewer multiprocessors, in such windows on H100s or newer of one "
        "machine; none: NCCL's without windows. Each sums in an order of its own."),
    INT_OR(train, gemm_beside, GEMM_BESIDE_AUTO, 0, 1 << 16, "auto", GEMM_BESIDE_AUTO,
           "On CUDA: multiprocessors that collectives hold, for which matrix products beside them "
           "have algorithms of their own; auto: as many as they get; 0: none."),
    BOOL(train, early_launch, true,
         "On CUDA, H100 and newer: a kernel's blocks are placed while the kernel before it ends."),
    INT(train, max_unit_numel, 16777216, 128, INT64_C(1) << 40,
        "Tables with more elements than this are split into several units."),
    INT(train, threads, 0, 0, 4096,
        "CPU threads a rank; 0: cores divided by the ranks of the machine."),
    CHOICE(train, bind, bind_names, BIND_AUTO,
           "Bind ranks and their threads to cores, memory and NICs near their GPUs; auto: unless "
           "there are fewer cores than ranks."),
    CHOICE(train, comm, comm_names, COMM_AUTO,
           "How ranks talk; local: threads of one process; mpi: CPU processes of mpiexec or srun; "
           "nccl: GPUs."),
    CHOICE(train, device, device_names, DEVICE_AUTO,
           "Where to compute; auto: GPUs if there are any."),
    CHOICE(train, precision, precision_names, PRECISION_AUTO,
           "Type of parameters in compute; auto: bf16 on GPUs, fp32 on CPUs."),
    TEXT(train, freeze, "", "Parameters that are not trained: name prefixes, separated by commas."),
    INT(train, timeout_s, 600, 1, 1 << 20,
        "Seconds after which a collective that does not finish is an error."),

    REAL(optim, lr, 3e-5, 0.0, DBL_MAX, "Highest learning rate, reached at the end of warm-up."),
    REAL_BELOW(optim, beta1, 0.9, 0.0, 1.0, "Decay of AdamW's first moment."),
    REAL_BELOW(optim, beta2, 0.999, 0.0, 1.0, "Decay of AdamW's second moment."),
    REAL_ABOVE(optim, eps, 1e-8, 0.0, "Added to the root of the second moment."),
    REAL(optim, weight_decay, 0.01, 0.0, DBL_MAX,
         "Decoupled weight decay; biases and LayerNorm are not decayed."),
    REAL(optim, max_grad_norm, 1.0, 0.0, DBL_MAX,
         "Gradients are scaled down to this global norm; 0: never."),
    REAL(optim, warmup_ratio, 0.1, 0.0, 1.0,
         "Part of all steps in which the learning rate rises from 0."),
    INT(optim, warmup_steps, -1, -1, INT64_MAX, "The same in steps; -1: warmup_ratio decides."),
    CHOICE(optim, schedule, schedule_names, SCHEDULE_LINEAR,
           "Learning rate after warm-up: falls to 0 linearly or as a cosine, or stays."),

    INT(eval, every, 0, -1, INT64_MAX,
        "Steps between evaluations; 0: after each epoch; -1: only at the end."),
    INT(eval, micro_batch, 8, 1, 1 << 20, "Sequences that a rank evaluates together."),
    INT(eval, n_best, 20, 1, 100, "Answers kept for each question in nbest.json."),
    INT(eval, max_answer_length, 30, 1, 1 << 20, "Longest answer in tokens."),
    REAL(eval, null_threshold, 0.0, -DBL_MAX, DBL_MAX,
         "With version_2: no answer if its score exceeds the best answer's by more than this."),
    CHOICE(eval, stop_metric, stop_names, STOP_NONE,
           "Stop early when this no longer improves; none: never."),
    INT(eval, stop_patience, 3, 1, BIG, "Evaluations without improvement before stopping."),
    BOOL(eval, before, false, "Evaluate before the first step too."),
    INT(eval, train_samples, 0, 0, BIG,
        "Evaluate on the first so many training questions too; 0: none."),

    TEXT(output, dir, "runs/run",
         "Folder for metrics, predictions and the resolved configuration."),
    INT(output, log_every, 10, 1, INT64_MAX, "Steps between progress lines."),
    BOOL(output, tensorboard, true,
         "Write TensorBoard's event files to the folder's tensorboard/ too."),
    BOOL(output, model, true, "Leave the last weights in the folder's model/."),
    REAL(output, gpu_log_s, 1.0, 0.0, 3600.0,
         "Seconds between lines of the folder's gpu/rank-R.csv (utilisation, memory, power, clocks "
         "of each rank's card); 0: none."),

    INT(checkpoint, every, 0, 0, INT64_MAX,
        "Steps between checkpoints, in the output folder's checkpoints/; one more at the end of "
        "the run or on a signal. 0: none."),
    INT(checkpoint, keep, 2, 0, BIG, "How many of the newest checkpoints stay; 0: all."),
    CHOICE(checkpoint, keep_best, stop_names, STOP_NONE,
           "An evaluation that is better than all before is saved too, and that checkpoint stays."),
    BOOL(checkpoint, async, true,
         "Train on while a checkpoint is compressed and written; false: wait for it."),
    TEXT(checkpoint, resume, "",
         "Checkpoint to go on from: its folder, or latest for the newest whole one of this output "
         "folder; empty: start anew."),
    BOOL(checkpoint, resume_or_start, false,
         "Go on from the latest checkpoint if there is one; otherwise start anew."),
    BOOL(checkpoint, export_best, false,
         "At the end the output folder's model/ gets the weights of the best checkpoint, not the "
         "last ones; without keep_best, which says what is best, the last ones."),
};

const int config_field_count = sizeof config_fields / sizeof config_fields[0];

_Static_assert(sizeof(enum schedule_kind) == sizeof(int), "choices are stored as int");

/* ---- look-up --------------------------------------------------------------------------------- */

const struct config_field *field_find(const char *section, const char *name)
{
    for (int i = 0; i < config_field_count; i++) {
        const struct config_field *f = &config_fields[i];
        if (strcmp(f->section, section) == 0 && strcmp(f->name, name) == 0)
            return f;
    }
    return NULL;
}

/* ---- values ---------------------------------------------------------------------------------- */

static void *field_at(const struct config_field *f, struct run_config *config)
{
    return (char *)config + f->offset;
}

void field_set_default(const struct config_field *f, struct run_config *config)
{
    void *at = field_at(f, config);
    switch (f->kind) {
    case FIELD_INT:
        *(int64_t *)at = f->int_default;
        break;
    case FIELD_REAL:
        *(double *)at = f->real_default;
        break;
    case FIELD_BOOL:
        *(bool *)at = f->int_default != 0;
        break;
    case FIELD_CHOICE:
        *(int *)at = (int)f->int_default;
        break;
    case FIELD_TEXT:
        memset(at, 0, CONFIG_TEXT_BYTES);
        snprintf(at, CONFIG_TEXT_BYTES, "%s", f->text_default);
        break;
    }
}

static bool parse_bool(bool *out, const char *text)
{
    static const char *const words[] = {"false", "true", "no", "yes", "off", "on"};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        if (strcasecmp(text, words[i]) == 0) {
            *out = i % 2 == 1;
            return true;
        }
    }
    return false;
}

static bool parse_choice(int *out, const char *const *choices, const char *text)
{
    for (int i = 0; choices[i] != NULL; i++) {
        if (strcmp(text, choices[i]) == 0) {
            *out = i;
            return true;
        }
    }
    return false;
}

static bool real_fits(const struct config_field *f, double value)
{
    return (f->above ? value > f->real_min : value >= f->real_min) &&
           (f->below ? value < f->real_max : value <= f->real_max);
}

enum status field_parse(const struct config_field *f, struct run_config *config, const char *text,
                        const char *origin)
{
    void *at = field_at(f, config);
    bool fits = false;
    int64_t whole;
    double real;
    size_t len = strlen(text);
    switch (f->kind) {
    case FIELD_INT:
        fits = text_to_int(&whole, text) && whole >= f->int_min && whole <= f->int_max;
        if (!fits && f->word != NULL && strcmp(text, f->word) == 0) {
            whole = f->word_value;
            fits = true;
        }
        if (fits)
            *(int64_t *)at = whole;
        break;
    case FIELD_REAL:
        fits = text_to_real(&real, text) && real_fits(f, real);
        if (fits)
            *(double *)at = real;
        break;
    case FIELD_BOOL:
        fits = parse_bool(at, text);
        break;
    case FIELD_CHOICE:
        fits = parse_choice(at, f->choices, text);
        break;
    case FIELD_TEXT:
        fits = len < CONFIG_TEXT_BYTES && text_is_utf8(text);
        if (fits) {
            memset(at, 0, CONFIG_TEXT_BYTES);
            memcpy(at, text, len);
        }
        break;
    }
    if (fits)
        return ST_OK;
    char accepted[FIELD_TEXT_BYTES];
    field_accepts(f, accepted, sizeof accepted);
    if (len > 100)
        return FAIL(INVALID, "%s: %s.%s: expected %s, found %zu bytes \"%.40s...\"", origin,
                    f->section, f->name, accepted, len, text);
    return FAIL(INVALID, "%s: %s.%s: expected %s, found \"%s\"", origin, f->section, f->name,
                accepted, text);
}

void field_format(const struct config_field *f, const struct run_config *config, char *text,
                  size_t text_bytes)
{
    const void *at = (const char *)config + f->offset;
    char number[32];
    switch (f->kind) {
    case FIELD_INT:
        if (f->word != NULL && *(const int64_t *)at == f->word_value)
            snprintf(text, text_bytes, "%s", f->word);
        else
            snprintf(text, text_bytes, "%lld", (long long)*(const int64_t *)at);
        break;
    case FIELD_REAL:
        text_of_real(number, *(const double *)at);
        snprintf(text, text_bytes, "%s", number);
        break;
    case FIELD_BOOL:
        snprintf(text, text_bytes, "%s", *(const bool *)at ? "true" : "false");
        break;
    case FIELD_CHOICE:
        snprintf(text, text_bytes, "%s", f->choices[*(const int *)at]);
        break;
    case FIELD_TEXT:
        snprintf(text, text_bytes, "%s", (const char *)at);
        break;
    }
}

static void accepts_real(const struct config_field *f, char *text, size_t bytes)
{
    char min[32], max[32];
    bool floor = f->real_min > -DBL_MAX, ceiling = f->real_max < DBL_MAX;
    text_of_real(min, f->real_min);
    text_of_real(max, f->real_max);
    if (!floor && !ceiling)
        snprintf(text, bytes, "a number");
    else if (!ceiling)
        snprintf(text, bytes, "a number %s %s", f->above ? "above" : "of at least", min);
    else if (f->below)
        snprintf(text, bytes, "a number of at least %s and below %s", min, max);
    else
        snprintf(text, bytes, "a number from %s to %s", min, max);
}

void field_accepts(const struct config_field *f, char *text, size_t text_bytes)
{
    size_t used = 0;
    switch (f->kind) {
    case FIELD_INT:
        if (f->int_max == INT64_MAX)
            snprintf(text, text_bytes, "an integer of at least %lld", (long long)f->int_min);
        else
            snprintf(text, text_bytes, "an integer from %lld to %lld%s%s", (long long)f->int_min,
                     (long long)f->int_max, f->word != NULL ? ", or " : "",
                     f->word != NULL ? f->word : "");
        break;
    case FIELD_REAL:
        accepts_real(f, text, text_bytes);
        break;
    case FIELD_BOOL:
        snprintf(text, text_bytes, "true or false");
        break;
    case FIELD_CHOICE:
        for (int i = 0; f->choices[i] != NULL; i++) {
            const char *comma = i == 0 ? "" : f->choices[i + 1] == NULL ? " or " : ", ";
            used += (size_t)snprintf(text + used, text_bytes - used, "%s%s", comma, f->choices[i]);
            ASSERT(used < text_bytes);
        }
        break;
    case FIELD_TEXT:
        snprintf(text, text_bytes, "UTF-8 text of at most %d bytes", CONFIG_TEXT_BYTES - 1);
        break;
    }
}
