#include "engine/train/metrics_log.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/text.h"

void record_put(struct record *r, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(r->text + r->used, sizeof r->text - r->used, fmt, args);
    va_end(args);
    ASSERT(n >= 0 && (size_t)n < sizeof r->text - r->used);
    r->used += (size_t)n;
}

void record_real(struct record *r, const char *key, double value)
{
    if (isfinite(value))
        record_put(r, ",\"%s\":%.17g", key, value);
    else
        record_put(r, ",\"%s\":null", key);
}

void record_text(struct record *r, const char *key, const char *value)
{
    enum { LONGEST = 6 /* \\u001f */ };
    char text[RECORD_TEXT_BYTES + 1];
    size_t used = 0;
    for (int bytes; *value != '\0' && used + LONGEST < sizeof text; value += bytes) {
        uint32_t code;
        bytes = text_utf8_next(&code, value);
        bool valid = bytes > 0;
        bytes = valid ? bytes : 1;
        if (valid && (code < ' ' || code == '"' || code == '\\'))
            used += (size_t)snprintf(text + used, sizeof text - used, "\\u%04x", (unsigned)code);
        else
            used += (size_t)snprintf(text + used, sizeof text - used, "%.*s", bytes,
                                     valid ? value : "?");
    }
    text[used] = '\0';
    record_put(r, "\"%s\":\"%s\"", key, text);
}

/* ---- open, go on, close ---------------------------------------------------------------------- */

static bool goes_on(const struct run_config *config)
{
    return config->checkpoint.resume[0] != '\0' || config->checkpoint.resume_or_start;
}

static enum status open_one(struct file_log *log, const struct run_config *config, const char *name)
{
    char path[1200];
    TRY(path_join(path, sizeof path, config->output.dir, name));
    return goes_on(config) ? file_log_reopen(log, path) : file_log_open(log, path);
}

enum status metrics_log_open(struct metrics_log *log, const struct run_config *config)
{
    memset(log, 0, sizeof *log);
    log->config = config;
    log->jsonl.fd = log->csv.fd = log->board.log.fd = -1;
    TRY(open_one(&log->jsonl, config, "metrics.jsonl"));
    return open_one(&log->csv, config, "metrics.csv");
}

/* The step that a line is of, or -1. */
static int64_t step_of_object(const char *line, const char *end)
{
    static const char KEY[] = "\"step\":";
    const char *found = strstr(line, KEY);
    return found == NULL || found > end ? -1 : strtoll(found + sizeof KEY - 1, NULL, 10);
}

static int64_t step_of_row(const char *line, const char *end)
{
    (void)end;
    return strncmp(line, "step,", 5) == 0 ? 0
           : *line >= '0' && *line <= '9' ? strtoll(line, NULL, 10)
                                          : -1;
}

/* Keep the whole lines up to @step, of a new run none. */
static enum status keep(struct file_log *log, int64_t step,
                        int64_t (*step_of)(const char *line, const char *end))
{
    struct file_text text = {NULL, 0};
    TRY(file_read(&text, log->path));
    const char *at = text.data, *end;
    while (step > 0 && (end = strchr(at, '\n')) != NULL) {
        int64_t found = step_of(at, end);
        if (found < 0 || found > step)
            break;
        at = end + 1;
    }
    size_t kept = (size_t)(at - text.data);
    enum status st = kept < text.bytes ? file_log_cut(log, kept) : ST_OK;
    mem_free(&text.data);
    return st;
}

static enum status open_board(struct metrics_log *log, int64_t first_step,
                              const struct account *account)
{
    char dir[1200], tags[CATEGORY_COUNT][64];
    struct tensorboard_scalar memory[CATEGORY_COUNT + 1];
    char *text = NULL, *indented = NULL;
    size_t bytes = 0;
    enum status st = ST_OK;
    TRY(path_join(dir, sizeof dir, log->config->output.dir, "tensorboard"));
    TRY(tensorboard_open(&log->board, dir, first_step));
    for (int c = 0; c < CATEGORY_COUNT; c++) {
        snprintf(tags[c], sizeof tags[c], "memory_MiB/%s", category_name((enum category)c));
        memory[c] = (struct tensorboard_scalar){tags[c], (double)account->own_max[c] / 1048576.0};
    }
    memory[CATEGORY_COUNT] =
        (struct tensorboard_scalar){"memory_MiB/arena", (double)account->arena_bytes / 1048576.0};
    TRY(tensorboard_scalars(&log->board, first_step, memory, CATEGORY_COUNT + 1));
    /* Markdown shows indented lines as they are. */
    TRY(config_write(log->config, &text, &bytes));
    TRY_GOTO(st, out, mem_alloc(&indented, 5 * bytes + 5));
    size_t used = 0;
    for (size_t i = 0; i < bytes; i++) {
        if (i == 0 || text[i - 1] == '\n')
            for (int k = 0; k < 4; k++)
                indented[used++] = ' ';
        indented[used++] = text[i];
    }
    indented[used] = '\0';
    TRY_GOTO(st, out, tensorboard_text(&log->board, first_step, "configuration", indented));
out:
    mem_free(&indented);
    mem_free(&text);
    return st;
}

enum status metrics_log_begin(struct metrics_log *log, int64_t first_step,
                              const struct account *account)
{
    static const char HEAD[] =
        "step,epoch,loss,lr,grad_norm,sequences,tokens,ms,tflops,mfu,skipped\n";
    if (goes_on(log->config)) {
        TRY(keep(&log->jsonl, first_step, step_of_object));
        TRY(keep(&log->csv, first_step, step_of_row));
    }
    struct file_text text = {NULL, 0};
    TRY(file_read(&text, log->csv.path));
    bool empty = text.bytes == 0;
    mem_free(&text.data);
    if (empty)
        TRY(file_log_append(&log->csv, HEAD, sizeof HEAD - 1));
    return log->config->output.tensorboard ? open_board(log, first_step, account) : ST_OK;
}

enum status metrics_log_close(struct metrics_log *log)
{
    if (log->config == NULL)
        return ST_OK;
    enum status jsonl = file_log_close(&log->jsonl), csv = file_log_close(&log->csv);
    enum status board = tensorboard_close(&log->board);
    memset(log, 0, sizeof *log);
    return jsonl != ST_OK ? jsonl : csv != ST_OK ? csv : board;
}

/* ---- steps and evaluations ------------------------------------------------------------------- */

static void csv_real(struct record *r, double value)
{
    if (isfinite(value))
        record_put(r, ",%.17g", value);
    else
        record_put(r, ",");
}

static enum status csv_step(struct metrics_log *log, const struct step_metrics *s)
{
    struct record r = {.used = 0};
    record_put(&r, "%" PRId64, s->step);
    csv_real(&r, s->epoch);
    csv_real(&r, s->loss);
    csv_real(&r, s->lr);
    csv_real(&r, s->grad_norm);
    record_put(&r, ",%" PRId64 ",%" PRId64, s->sequences, s->tokens);
    csv_real(&r, s->ms);
    csv_real(&r, s->tflops);
    csv_real(&r, s->mfu);
    record_put(&r, ",%d\n", s->skipped);
    return file_log_append(&log->csv, r.text, r.used);
}

static enum status board_step(struct metrics_log *log, const struct step_metrics *s)
{
    double per_s = s->ms > 0 ? 1e3 / s->ms : (double)NAN;
    struct tensorboard_scalar scalars[] = {
        {"train/loss", s->loss},
        {"train/lr", s->lr},
        {"train/grad_norm", s->grad_norm},
        {"train/epoch", s->epoch},
        {"speed/sequences_per_s", (double)s->sequences * per_s},
        {"speed/tokens_per_s", (double)s->tokens * per_s},
        {"speed/step_ms", s->ms},
        {"speed/tflops_per_rank", s->tflops},
        {"speed/mfu", s->mfu},
    };
    return tensorboard_scalars(&log->board, s->step, scalars, sizeof scalars / sizeof scalars[0]);
}

enum status metrics_log_step(struct metrics_log *log, const struct step_metrics *s)
{
    struct record r = {.used = 0};
    record_put(&r, "{\"step\":%" PRId64, s->step);
    record_real(&r, "epoch", s->epoch);
    record_real(&r, "loss", s->loss);
    record_real(&r, "lr", s->lr);
    record_real(&r, "grad_norm", s->grad_norm);
    record_put(&r, ",\"sequences\":%" PRId64 ",\"tokens\":%" PRId64, s->sequences, s->tokens);
    record_real(&r, "ms", s->ms);
    record_real(&r, "tflops", s->tflops);
    record_real(&r, "mfu", s->mfu);
    record_put(&r, ",\"skipped\":%s}\n", s->skipped ? "true" : "false");
    TRY(file_log_append(&log->jsonl, r.text, r.used));
    TRY(csv_step(log, s));
    return log->config->output.tensorboard ? board_step(log, s) : ST_OK;
}

void record_score(struct record *rec, const struct evaluation *e, bool version_2)
{
    const struct score_result *s = &e->score;
    record_put(rec, "\"step\":%" PRId64, e->step);
    record_real(rec, "epoch", e->epoch);
    record_real(rec, "loss", e->loss);
    record_real(rec, "exact_match", s->all.exact);
    record_real(rec, "f1", s->all.f1);
    record_put(rec, ",\"total\":%" PRId64, s->all.total);
    if (version_2) {
        record_real(rec, "HasAns_exact", s->has_answer.exact);
        record_real(rec, "HasAns_f1", s->has_answer.f1);
        record_put(rec, ",\"HasAns_total\":%" PRId64, s->has_answer.total);
        record_real(rec, "NoAns_exact", s->no_answer.exact);
        record_real(rec, "NoAns_f1", s->no_answer.f1);
        record_put(rec, ",\"NoAns_total\":%" PRId64, s->no_answer.total);
    }
    if (s->has_best) {
        record_real(rec, "best_exact", s->best_exact);
        record_real(rec, "best_exact_thresh", s->best_exact_thresh);
        record_real(rec, "best_f1", s->best_f1);
        record_real(rec, "best_f1_thresh", s->best_f1_thresh);
    }
    record_put(rec, ",\"windows\":%" PRId64, e->windows);
    record_real(rec, "ms", e->ms);
}

static enum status board_evaluation(struct metrics_log *log, const struct evaluation *e)
{
    static const char *const NAMES[] = {"loss",      "exact_match", "f1",      "HasAns_exact",
                                        "HasAns_f1", "NoAns_exact", "NoAns_f1"};
    enum { COUNT = sizeof NAMES / sizeof NAMES[0], ALWAYS = 3 };
    const struct score_result *s = &e->score;
    double values[COUNT] = {
        e->loss,          s->all.exact,       s->all.f1,      s->has_answer.exact,
        s->has_answer.f1, s->no_answer.exact, s->no_answer.f1};
    char tags[COUNT][64];
    struct tensorboard_scalar scalars[COUNT];
    for (int i = 0; i < COUNT; i++) {
        /* "train" is the loss of training steps already. */
        snprintf(tags[i], sizeof tags[i], "%s/%s",
                 strcmp(e->split, "eval") == 0 ? "validation" : "trained_questions", NAMES[i]);
        scalars[i] = (struct tensorboard_scalar){tags[i], values[i]};
    }
    return tensorboard_scalars(&log->board, e->step, scalars,
                               log->config->data.version_2 ? COUNT : ALWAYS);
}

enum status metrics_log_evaluation(struct metrics_log *log, const struct evaluation *e)
{
    struct record rec = {.used = 0};
    record_put(&rec, "{\"evaluation\":\"%s\",", e->split);
    record_score(&rec, e, log->config->data.version_2);
    record_put(&rec, "}\n");
    TRY(file_log_append(&log->jsonl, rec.text, rec.used));
    return log->config->output.tensorboard ? board_evaluation(log, e) : ST_OK;
}
