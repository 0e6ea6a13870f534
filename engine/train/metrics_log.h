/*
 * engine/train/metrics_log.h - the files of the output folder that grow with a run.
 *
 *     metrics.jsonl    an object a step:
 *                        {"step":1,"epoch":0.01,"loss":..,"lr":..,"grad_norm":..,"sequences":..,
 *                         "tokens":..,"ms":..,"tflops":..,"mfu":..,"skipped":false}
 *                      an object an evaluation ("train" is the questions trained on):
 *                        {"evaluation":"eval","step":..,"epoch":..,"loss":..,"exact_match":..,
 *                         "f1":..,"total":..,"windows":..,"ms":..}
 *     metrics.csv      the steps alone, the same names in its first line
 *     tensorboard/     the same values as TensorBoard's event files, the planned memory by
 *                      category and the configuration as text; output.tensorboard turns it off
 *
 * Values are those of all ranks together and rank 0 alone writes, so no two ranks race for a file.
 * tflops is a rank's share of the model's operations (recomputed ones not counted) in 10^12 a
 * second, mfu its part of the card's peak (engine/train/peak.h). Reals have 17 significant digits;
 * what is not finite or not known is null, in the CSV an empty field.
 *
 * In a run that goes on from a checkpoint the files go on too; what they say of steps that will be
 * done again is taken out.
 */
#ifndef ENGINE_TRAIN_METRICS_LOG_H
#define ENGINE_TRAIN_METRICS_LOG_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/config.h"
#include "engine/base/file.h"
#include "io/score.h"
#include "io/tensorboard.h"
#include "shard/account.h"

C_BEGIN

struct step_metrics {
    int64_t step; /* counts from 1 */
    double epoch, loss, lr, grad_norm;
    int64_t sequences, tokens;
    double ms;
    double tflops, mfu; /* of a rank; mfu is NAN where the peak is not known */
    bool skipped;
};

struct evaluation {
    const char *split; /* "eval", "train" */
    int64_t step;
    double epoch, loss, ms;
    int64_t windows;
    struct score_result score;
    bool unanswerable; /* the score is by the rules of version 2.0 (io/squad.h) */
};

struct metrics_log {
    const struct run_config *config; /* borrowed */
    struct file_log jsonl, csv;
    struct tensorboard board;
};

/** metrics_log_open() - metrics.jsonl and metrics.csv of output.dir, new or gone on with. ST_IO. */
MUST_CHECK enum status metrics_log_open(struct metrics_log *log, const struct run_config *config);

/** metrics_log_begin() - the run will begin with step @first_step (from 0). ST_IO. */
MUST_CHECK enum status metrics_log_begin(struct metrics_log *log, int64_t first_step,
                                         const struct account *account);

/** metrics_log_step(), metrics_log_evaluation() - one record each, in every file. ST_IO. */
MUST_CHECK enum status metrics_log_step(struct metrics_log *log, const struct step_metrics *s);
MUST_CHECK enum status metrics_log_evaluation(struct metrics_log *log, const struct evaluation *e);

/** metrics_log_close() - also of one that was never opened. ST_IO. */
MUST_CHECK enum status metrics_log_close(struct metrics_log *log);

/* JSON by hand: records of numbers, nothing allocated in a step. */
struct record {
    char text[8192];
    size_t used;
};

void record_put(struct record *r, const char *fmt, ...) PRINTF_LIKE(2, 3);

/** record_real() - ,"KEY":VALUE */
void record_real(struct record *r, const char *key, double value);

/** record_text() - "KEY":"VALUE" with VALUE escaped, and cut after RECORD_TEXT_BYTES of that: it
 * may come from outside. Bytes that are not UTF-8 become '?'. */
enum { RECORD_TEXT_BYTES = 1024 };
void record_text(struct record *r, const char *key, const char *value);

/** record_score() - the fields of an evaluation, without braces. */
void record_score(struct record *r, const struct evaluation *e, bool version_2);

C_END

#endif
