/*
 * engine/base/config.h - the run configuration: one table of fields, read from YAML.
 *
 * The table in config_table.c gives each field its key ("section.name"), type, default, range or
 * choices and one line of documentation. It makes the parser, --set, `tessera train --help`, the
 * resolved config.yaml and docs/configuration.md. An unknown key, a wrong type or a bad value is
 * ST_INVALID and names file, line, key and what is accepted:
 *
 *     configs/x.yaml:7: train.zero_stage: expected an integer from 0 to 3, found "4"
 *
 * The YAML is a mapping of sections, each a mapping of keys to scalars. Lists, anchors, aliases,
 * tags and further documents are refused. UTF-8 (with or without a byte order mark) and UTF-16.
 */
#ifndef ENGINE_BASE_CONFIG_H
#define ENGINE_BASE_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

C_BEGIN

enum { CONFIG_TEXT_BYTES = 512 };
enum { ZERO_STAGE_AUTO = -1, GEMM_BESIDE_AUTO = -1 /* found when the run starts */ };

/* Choices; the names in YAML are the lower-case tails (linear, per_step, ...). */
enum model_family { FAMILY_BERT, FAMILY_DISTILBERT };
enum schedule_kind { SCHEDULE_LINEAR, SCHEDULE_COSINE, SCHEDULE_CONSTANT };
enum reduce_policy { REDUCE_AUTO, REDUCE_PER_STEP, REDUCE_PER_MICRO_BATCH };
enum table_policy { TABLES_AUTO, TABLES_ROWS, TABLES_WHOLE };
enum window_kind { WINDOWS_NONE, WINDOWS_NCCL, WINDOWS_OWN, WINDOW_KINDS }; /* comm/nccl.h */
enum update_policy { UPDATE_AUTO, UPDATE_LATE, UPDATE_EARLY };
enum recompute_policy { RECOMPUTE_NONE, RECOMPUTE_GELU, RECOMPUTE_BLOCK };
enum comm_kind { COMM_AUTO, COMM_LOCAL, COMM_MPI, COMM_NCCL };
enum device_kind { DEVICE_AUTO, DEVICE_CPU, DEVICE_CUDA };
enum precision_kind { PRECISION_AUTO, PRECISION_FP32, PRECISION_BF16 };
enum bind_kind { BIND_AUTO, BIND_NONE };
enum stop_metric { STOP_NONE, STOP_F1, STOP_EXACT_MATCH, STOP_LOSS };

/* Every field is a key "section.name" of the YAML file; model.vocab_size is run_config.model. */
struct run_config {
    struct {
        enum model_family family;
        int64_t vocab_size, hidden, layers, heads, ffn, max_positions, type_vocab;
        double hidden_dropout, attention_dropout, qa_dropout, norm_eps, init_range;
        bool cased;
        char init_from[CONFIG_TEXT_BYTES]; /* a Hugging Face folder or a checkpoint; "" = random */
    } model;
    struct {
        char train[CONFIG_TEXT_BYTES], eval[CONFIG_TEXT_BYTES], vocab[CONFIG_TEXT_BYTES];
        char cache_dir[CONFIG_TEXT_BYTES]; /* features keyed by content; "" = no cache */
        int64_t max_length, doc_stride, max_query_length;
        int64_t max_train_samples, max_eval_samples; /* 0 = all */
        bool version_2;                              /* questions may have no answer */
        bool padded;
    } data;
    struct {
        int64_t zero_stage, ranks;
        int64_t micro_batch, grad_accum;
        int64_t epochs, steps; /* steps -1: epochs decide; 0: evaluate only */
        int64_t seed;
        enum reduce_policy reduce;
        enum table_policy tables;  /* how they move between ranks */
        enum update_policy update; /* late: under the next step's forward pass */
        enum recompute_policy recompute;
        int64_t prefetch; /* units gathered ahead of use; 0 = none */
        bool overlap;     /* false: every collective completes where it is issued */
        bool graphs;      /* CUDA: capture steps once, replay them */
        char gemm_plan[CONFIG_TEXT_BYTES]; /* "auto", "off" or a folder: engine/train/products.h */
        enum window_kind windows; /* NCCL: collectives in symmetric windows, where all ranks can */
        int64_t gemm_beside;      /* or GEMM_BESIDE_AUTO */
        bool early_launch;        /* CUDA: kernels overlap with the end of those before */
        int64_t max_unit_numel;
        int64_t threads; /* BLAS and op threads a rank; 0 = cores / local ranks */
        enum bind_kind bind;
        enum comm_kind comm;
        enum device_kind device;
        enum precision_kind precision;
        char freeze[CONFIG_TEXT_BYTES]; /* comma-separated name prefixes that are not trained */
        int64_t timeout_s;              /* deadline of a collective */
    } train;
    struct {
        double lr, beta1, beta2, eps, weight_decay, max_grad_norm; /* max_grad_norm 0 = no clip */
        double warmup_ratio;
        int64_t warmup_steps; /* -1: warmup_ratio decides */
        enum schedule_kind schedule;
    } optim;
    struct {
        int64_t every; /* steps between evaluations; 0 = after each epoch; -1 = only at the end */
        int64_t micro_batch;
        int64_t n_best, max_answer_length;
        double null_threshold; /* version_2: answer "" if null score - best score exceeds it */
        enum stop_metric stop_metric;
        int64_t stop_patience;
        bool before;           /* evaluate before the first step */
        int64_t train_samples; /* evaluate on that many training questions too; 0 = none */
    } eval;
    struct {
        char dir[CONFIG_TEXT_BYTES];
        int64_t log_every;
        bool tensorboard;
        bool model; /* leave the last weights there */
        double gpu_log_s;
    } output;
    struct {
        int64_t every;                  /* steps between checkpoints; 0 = none */
        int64_t keep;                   /* newest ones that stay; 0 = all */
        enum stop_metric keep_best;     /* the best one by this stays too */
        bool async;                     /* write while training goes on */
        char resume[CONFIG_TEXT_BYTES]; /* "latest" or a folder; "" = start anew */
        bool resume_or_start;           /* latest, and no error if there is none */
        bool export_best;               /* OUTPUT/model has the best one's weights */
    } checkpoint;
};

/** config_defaults() - every field at the table's default. */
void config_defaults(struct run_config *config);

/**
 * config_load() - defaults, then the YAML file @path, then each of @sets ("key.sub=value").
 * @path: NULL for defaults and sets alone.
 *
 * Return: ST_OK; ST_INVALID (unknown or repeated key, wrong type, bad value: the message
 * is "path:line: key: ..."); ST_IO.
 */
MUST_CHECK enum status config_load(struct run_config *config, const char *path,
                                   const char *const *sets, int set_count);

/** config_set() - one "key.sub=value"; @origin ("--set", "--zero-stage") stands in the message.
 * ST_INVALID. */
MUST_CHECK enum status config_set(struct run_config *config, const char *assignment,
                                  const char *origin);

/** config_check() - rules between fields (heads divide hidden, stride fits, stage and reduce).
 * ST_INVALID. */
MUST_CHECK enum status config_check(const struct run_config *config);

/** config_write() - the resolved configuration as YAML, loadable again. mem_free(*text).
 * ST_MEMORY. */
MUST_CHECK enum status config_write(const struct run_config *config, char **text, size_t *bytes);

/** config_document() - docs/configuration.md from the table (Markdown). mem_free(*text).
 * ST_MEMORY. */
MUST_CHECK enum status config_document(char **text, size_t *bytes);

/** config_help() - print the fields for --help. */
void config_help(void);

C_END

#endif
