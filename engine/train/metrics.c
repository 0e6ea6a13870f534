#include "engine/train/metrics.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/base/arena.h"
#include "engine/base/log.h"
#include "engine/base/out.h"

double clock_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

double metric_value(enum stop_metric metric, const struct evaluation *e)
{
    return metric == STOP_LOSS ? -e->loss
           : metric == STOP_F1 ? e->score.all.f1
                               : e->score.all.exact;
}

/* ---- JSON by hand: records of numbers, no allocation in a step ---- */

struct record {
    char text[4096];
    size_t used;
};

static void put(struct record *r, const char *fmt, ...) PRINTF_LIKE(2, 3);
static void put(struct record *r, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(r->text + r->used, sizeof r->text - r->used, fmt, args);
    va_end(args);
    ASSERT(n >= 0 && (size_t)n < sizeof r->text - r->used);
    r->used += (size_t)n;
}

static void put_real(struct record *r, const char *key, double value)
{
    if (isfinite(value))
        put(r, ",\"%s\":%.17g", key, value);
    else
        put(r, ",\"%s\":null", key);
}

/* ---- open ---- */

static bool goes_on(const struct run_config *config)
{
    return config->checkpoint.resume[0] != '\0' || config->checkpoint.resume_or_start;
}

enum status metrics_open(struct metrics *m, const struct run_config *config)
{
    char path[1200];
    char *text = NULL;
    size_t bytes = 0;
    enum status st = ST_OK;
    memset(m, 0, sizeof *m);
    m->config = config;
    m->log.fd = -1;
    m->terminal = isatty(STDERR_FILENO);
    m->start_s = clock_s();
    TRY(mem_alloc(&m->epochs, sizeof *m->epochs * METRICS_MAX_EPOCHS));
    TRY(file_make_dirs(config->output.dir));
    TRY(path_join(path, sizeof path, config->output.dir, "config.yaml"));
    TRY_GOTO(st, out, config_write(config, &text, &bytes));
    TRY_GOTO(st, out, file_write(path, text, bytes));
    TRY_GOTO(st, out, path_join(path, sizeof path, config->output.dir, "metrics.jsonl"));
    TRY_GOTO(st, out,
             goes_on(config) ? file_log_reopen(&m->log, path) : file_log_open(&m->log, path));
out:
    mem_free(&text);
    return st;
}

/* Where the records of steps up to @step end: whole lines only. */
static size_t records_up_to(const struct file_text *text, int64_t step)
{
    static const char KEY[] = "\"step\":";
    const char *at = text->data, *end;
    while ((end = strchr(at, '\n')) != NULL) {
        const char *found = strstr(at, KEY);
        if (found == NULL || found > end || strtoll(found + sizeof KEY - 1, NULL, 10) > step)
            break;
        at = end + 1;
    }
    return (size_t)(at - text->data);
}

enum status metrics_plan(struct metrics *m, int64_t total_steps, int64_t steps_per_epoch,
                         int64_t first_step)
{
    struct file_text text = {NULL, 0};
    m->total_steps = total_steps;
    m->steps_per_epoch = steps_per_epoch;
    if (!goes_on(m->config))
        return ST_OK;
    TRY(file_read(&text, m->log.path));
    size_t kept = first_step > 0 ? records_up_to(&text, first_step) : 0;
    enum status st = kept < text.bytes ? file_log_cut(&m->log, kept) : ST_OK;
    mem_free(&text.data);
    return st;
}

void metrics_close(struct metrics *m)
{
    if (m->config == NULL)
        return;
    mem_free(&m->epochs);
    if (m->log.fd >= 0 && file_log_close(&m->log) != ST_OK)
        log_warn("metrics", "%s", status_message());
    memset(m, 0, sizeof *m);
}

/* ---- steps ---- */

static void duration(char *out, size_t bytes, double seconds)
{
    int64_t s = (int64_t)(seconds + 0.5);
    if (s >= 3600)
        snprintf(out, bytes, "%" PRId64 ":%02" PRId64 ":%02" PRId64, s / 3600, s / 60 % 60, s % 60);
    else
        snprintf(out, bytes, "%" PRId64 ":%02" PRId64, s / 60, s % 60);
}

static void show_progress(const struct metrics *m, const struct step_state *r, double epoch)
{
    int64_t step = r->host.step + 1;
    bool last = step == m->total_steps;
    if (!m->terminal && step % m->config->output.log_every != 0 && step != 1 && !last)
        return;
    char eta[32], line[256];
    duration(eta, sizeof eta, m->train_s / (double)m->steps * (double)(m->total_steps - step));
    snprintf(line, sizeof line,
             "step %" PRId64 "/%" PRId64 "  epoch %.2f  loss %.4f  lr %.2e  %.1f sequences/s  "
             "ETA %s%s",
             step, m->total_steps, epoch, r->loss, (double)r->lr,
             m->train_s > 0 ? (double)m->sequences / m->train_s : 0.0, eta,
             r->skip ? "  (skipped: not finite)" : "");
    if (m->terminal)
        log_live(line, last);
    else
        log_info("train", "%s", line);
}

enum status metrics_step(struct metrics *m, const struct step_state *r, double ms)
{
    struct record rec = {.used = 0};
    double epoch = (double)(r->host.step + 1) / (double)m->steps_per_epoch;
    int64_t index = r->host.step / m->steps_per_epoch;
    if (m->steps == 0)
        m->first_loss = r->loss;
    m->last_loss = r->loss;
    m->steps++;
    m->sequences += r->sequences;
    m->tokens += r->tokens;
    m->skipped += r->skip;
    m->train_s += ms * 1e-3;
    if (index < METRICS_MAX_EPOCHS && isfinite(r->loss)) {
        m->epochs[index].sum += r->loss;
        m->epochs[index].steps++;
        m->epoch_count = index + 1;
    }
    put(&rec, "{\"step\":%" PRId64, r->host.step + 1);
    put_real(&rec, "epoch", epoch);
    put_real(&rec, "loss", r->loss);
    put_real(&rec, "lr", (double)r->lr);
    put_real(&rec, "grad_norm", r->grad_norm);
    put(&rec, ",\"sequences\":%" PRId64 ",\"tokens\":%" PRId64, r->sequences, r->tokens);
    put_real(&rec, "ms", ms);
    put(&rec, ",\"skipped\":%s}\n", r->skip ? "true" : "false");
    TRY(file_log_append(&m->log, rec.text, rec.used));
    show_progress(m, r, epoch);
    return ST_OK;
}

/* ---- evaluations ---- */

static void put_score(struct record *rec, const struct evaluation *e, bool version_2)
{
    const struct score_result *s = &e->score;
    put(rec, "\"step\":%" PRId64, e->step);
    put_real(rec, "epoch", e->epoch);
    put_real(rec, "loss", e->loss);
    put_real(rec, "exact_match", s->all.exact);
    put_real(rec, "f1", s->all.f1);
    put(rec, ",\"total\":%" PRId64, s->all.total);
    if (version_2) {
        put_real(rec, "HasAns_exact", s->has_answer.exact);
        put_real(rec, "HasAns_f1", s->has_answer.f1);
        put(rec, ",\"HasAns_total\":%" PRId64, s->has_answer.total);
        put_real(rec, "NoAns_exact", s->no_answer.exact);
        put_real(rec, "NoAns_f1", s->no_answer.f1);
        put(rec, ",\"NoAns_total\":%" PRId64, s->no_answer.total);
    }
    if (s->has_best) {
        put_real(rec, "best_exact", s->best_exact);
        put_real(rec, "best_exact_thresh", s->best_exact_thresh);
        put_real(rec, "best_f1", s->best_f1);
        put_real(rec, "best_f1_thresh", s->best_f1_thresh);
    }
    put(rec, ",\"windows\":%" PRId64, e->windows);
    put_real(rec, "ms", e->ms);
}

enum status metrics_evaluation(struct metrics *m, const struct evaluation *e)
{
    struct record rec = {.used = 0};
    put(&rec, "{\"evaluation\":\"%s\",", e->split);
    put_score(&rec, e, m->config->data.version_2);
    put(&rec, "}\n");
    TRY(file_log_append(&m->log, rec.text, rec.used));
    log_info("eval",
             "%s questions at step %" PRId64 ": loss %.4f  EM %.2f  F1 %.2f  (%" PRId64
             " questions, %.1f s)",
             e->split, e->step, e->loss, e->score.all.exact, e->score.all.f1, e->score.all.total,
             e->ms * 1e-3);
    if (strcmp(e->split, "eval") != 0)
        return ST_OK;
    if (!m->has_eval)
        m->first_eval = *e;
    if (!m->has_eval || e->score.all.f1 > m->best_eval.score.all.f1)
        m->best_eval = *e;
    m->last_eval = *e;
    m->has_eval = true;
    return ST_OK;
}

/* ---- the end ---- */

static void print_epochs(const struct metrics *m)
{
    if (m->epoch_count == 0)
        return;
    out("\n epoch   steps   mean loss\n");
    for (int64_t i = 0; i < m->epoch_count; i++)
        if (m->epochs[i].steps > 0)
            out("%6" PRId64 "  %6" PRId64 "  %10.4f\n", i + 1, m->epochs[i].steps,
                m->epochs[i].sum / (double)m->epochs[i].steps);
}

static void put_bytes(struct record *rec, const char *key, const size_t bytes[CATEGORY_COUNT])
{
    put(rec, ",\"%s\":{", key);
    for (int c = 0; c < CATEGORY_COUNT; c++)
        put(rec, "%s\"%s\":%zu", c > 0 ? "," : "", category_name((enum category)c), bytes[c]);
    put(rec, "}");
}

enum status metrics_finish(struct metrics *m, const struct account *account, int world_size,
                           const char *device, const char *ended)
{
    struct record rec = {.used = 0};
    char path[1200];
    double wall = clock_s() - m->start_s, train_s = m->train_s > 0 ? m->train_s : 1e-9;
    print_epochs(m);
    put(&rec, "{\"ended\":\"%s\",\"device\":\"%s\",\"world_size\":%d,\"zero_stage\":%" PRId64,
        ended, device, world_size, m->config->train.zero_stage);
    put(&rec, ",\"steps\":%" PRId64 ",\"skipped\":%" PRId64, m->steps, m->skipped);
    put(&rec, ",\"sequences\":%" PRId64 ",\"tokens\":%" PRId64, m->sequences, m->tokens);
    put_real(&rec, "wall_s", wall);
    put_real(&rec, "train_s", m->train_s);
    put_real(&rec, "sequences_per_s", (double)m->sequences / train_s);
    put_real(&rec, "tokens_per_s", (double)m->tokens / train_s);
    put_real(&rec, "first_loss", m->first_loss);
    put_real(&rec, "last_loss", m->last_loss);
    put(&rec, ",\"bytes_per_rank\":{\"arena\":%zu,\"live_peak\":%zu,\"persistent\":%zu",
        account->arena_bytes, account->live_peak_bytes, account->persistent_bytes);
    put_bytes(&rec, "at_peak", account->at_peak);
    put_bytes(&rec, "own_max", account->own_max);
    put(&rec, "}");
    if (m->card.all > 0)
        put(&rec,
            ",\"card_bytes\":{\"context\":%zu,\"library\":%zu,\"communicator\":%zu,\"arena\":%zu,"
            "\"set_up\":%zu,\"graphs\":%zu,\"first_steps\":%zu,\"later\":%zu,\"all\":%zu}",
            m->card.context, m->card.library, m->card.communicator, m->card.arena, m->card.set_up,
            m->card.graphs, m->card.first_steps, m->card.later, m->card.all);
    if (m->has_eval) {
        put(&rec, ",\"evaluation\":{");
        put_score(&rec, &m->last_eval, m->config->data.version_2);
        put(&rec, "}");
    }
    put(&rec, "}\n");
    TRY(path_join(path, sizeof path, m->config->output.dir, "summary.json"));
    return file_write(path, rec.text, rec.used);
}
