#include "engine/train/metrics.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/arena.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/out.h"
#include "engine/train/peak.h"

double metric_value(enum stop_metric metric, const struct evaluation *e)
{
    return metric == STOP_LOSS ? -e->loss
           : metric == STOP_F1 ? e->score.all.f1
                               : e->score.all.exact;
}

/* ---- open ---- */

enum status metrics_open(struct metrics *m, const struct run_config *config)
{
    memset(m, 0, sizeof *m);
    m->config = config;
    m->terminal = isatty(STDERR_FILENO);
    m->start_s = clock_s();
    TRY(mem_alloc(&m->epochs, sizeof *m->epochs * METRICS_MAX_EPOCHS));
    return file_make_dirs(config->output.dir);
}

static enum status write_config(const struct run_config *config)
{
    char path[1200];
    char *text = NULL;
    size_t bytes = 0;
    enum status st = ST_OK;
    TRY(path_join(path, sizeof path, config->output.dir, "config.yaml"));
    TRY(config_write(config, &text, &bytes));
    st = file_write(path, text, bytes);
    mem_free(&text);
    return st;
}

enum status metrics_plan(struct metrics *m, const struct metrics_plan *plan)
{
    m->total_steps = plan->total_steps;
    m->steps_per_epoch = plan->steps_per_epoch;
    m->world_size = plan->world_size;
    m->peak = peak_flops(plan->device, plan->dtype);
    TRY(write_config(m->config));
    TRY(metrics_log_open(&m->log, m->config));
    return metrics_log_begin(&m->log, plan->first_step, plan->account);
}

void metrics_close(struct metrics *m)
{
    if (m->config == NULL)
        return;
    mem_free(&m->epochs);
    if (metrics_log_close(&m->log) != ST_OK)
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

/* A rank's operations in 10^12 a second. */
static double tflops(const struct metrics *m, double flops, double seconds)
{
    return seconds > 0 ? flops * 1e-12 / (seconds * m->world_size) : (double)NAN;
}

static double mfu(const struct metrics *m, double rank_tflops)
{
    return m->peak > 0 ? rank_tflops * 1e12 / m->peak : (double)NAN;
}

enum status metrics_step(struct metrics *m, const struct step_state *r, double ms, double flops)
{
    int64_t index = r->host.step / m->steps_per_epoch;
    if (m->steps == 0)
        m->first_loss = r->loss;
    m->last_loss = r->loss;
    m->steps++;
    m->sequences += r->sequences;
    m->tokens += r->tokens;
    m->flops += flops;
    m->skipped += r->skip;
    m->train_s += ms * 1e-3;
    if (index < METRICS_MAX_EPOCHS && isfinite(r->loss)) {
        m->epochs[index].sum += r->loss;
        m->epochs[index].steps++;
        m->epoch_count = index + 1;
    }
    struct step_metrics s = {.step = r->host.step + 1,
                             .epoch = (double)(r->host.step + 1) / (double)m->steps_per_epoch,
                             .loss = r->loss,
                             .lr = (double)r->lr,
                             .grad_norm = r->grad_norm,
                             .sequences = r->sequences,
                             .tokens = r->tokens,
                             .ms = ms,
                             .tflops = tflops(m, flops, ms * 1e-3),
                             .skipped = r->skip};
    s.mfu = mfu(m, s.tflops);
    TRY(metrics_log_step(&m->log, &s));
    show_progress(m, r, s.epoch);
    return ST_OK;
}

/* ---- evaluations ---- */

enum status metrics_evaluation(struct metrics *m, const struct evaluation *e)
{
    TRY(metrics_log_evaluation(&m->log, e));
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
    enum { SHOWN = 20 }; /* metrics.jsonl has all */
    int64_t first = m->epoch_count > SHOWN ? m->epoch_count - SHOWN : 0;
    out("\n epoch   steps   mean loss\n");
    for (int64_t i = first; i < m->epoch_count; i++)
        if (m->epochs[i].steps > 0)
            out("%6" PRId64 "  %6" PRId64 "  %10.4f\n", i + 1, m->epochs[i].steps,
                m->epochs[i].sum / (double)m->epochs[i].steps);
}

static void put_bytes(struct record *rec, const char *key, const size_t bytes[CATEGORY_COUNT])
{
    record_put(rec, ",\"%s\":{", key);
    for (int c = 0; c < CATEGORY_COUNT; c++)
        record_put(rec, "%s\"%s\":%zu", c > 0 ? "," : "", category_name((enum category)c),
                   bytes[c]);
    record_put(rec, "}");
}

static void put_start(struct record *rec, const struct start_times *t)
{
    record_put(rec, ",\"start_s\":{\"all\":%.4f", start_times_all(t));
    for (int i = 0; i < t->count; i++)
        record_put(rec, ",\"%s\":%.4f", t->parts[i].name, t->parts[i].s);
    record_put(rec, "}");
}

enum status metrics_finish(struct metrics *m, const struct account *account, int world_size,
                           const char *device, const char *ended)
{
    struct record rec = {.used = 0};
    char path[1200];
    double wall = clock_s() - m->start_s, train_s = m->train_s > 0 ? m->train_s : 1e-9;
    record_put(&rec, "{\"ended\":\"%s\",", ended);
    record_text(&rec, "device", device);
    record_put(&rec, ",\"world_size\":%d,\"zero_stage\":%d", world_size, m->zero_stage);
    record_put(&rec, ",\"steps\":%" PRId64 ",\"skipped\":%" PRId64, m->steps, m->skipped);
    record_put(&rec, ",\"sequences\":%" PRId64 ",\"tokens\":%" PRId64, m->sequences, m->tokens);
    record_real(&rec, "wall_s", wall);
    if (m->start.count > 0)
        put_start(&rec, &m->start);
    record_real(&rec, "train_s", m->train_s);
    record_real(&rec, "sequences_per_s", (double)m->sequences / train_s);
    record_real(&rec, "tokens_per_s", (double)m->tokens / train_s);
    record_real(&rec, "tflops_per_rank", tflops(m, m->flops, m->train_s));
    record_real(&rec, "mfu", mfu(m, tflops(m, m->flops, m->train_s)));
    record_real(&rec, "first_loss", m->first_loss);
    record_real(&rec, "last_loss", m->last_loss);
    record_put(&rec, ",\"bytes_per_rank\":{\"arena\":%zu,\"live_peak\":%zu,\"persistent\":%zu",
               account->arena_bytes, account->live_peak_bytes, account->persistent_bytes);
    put_bytes(&rec, "at_peak", account->at_peak);
    put_bytes(&rec, "own_max", account->own_max);
    record_put(&rec, "}");
    if (m->counted.peak_bytes > 0) {
        record_put(&rec, ",\"counted_bytes\":{\"peak\":%zu", m->counted.peak_bytes);
        put_bytes(&rec, "at_peak", m->counted.at_peak);
        put_bytes(&rec, "own_max", m->counted.own_max);
        record_put(&rec, "}");
    }
    if (m->card.all > 0)
        record_put(
            &rec,
            ",\"card_bytes\":{\"context\":%zu,\"library\":%zu,\"communicator\":%zu,\"arena\":%zu,"
            "\"windows\":%zu,\"set_up\":%zu,\"graphs\":%zu,\"checkpoints\":%zu,"
            "\"first_steps\":%zu,\"later\":%zu,\"all\":%zu}",
            m->card.context, m->card.library, m->card.communicator, m->card.arena, m->card.windows,
            m->card.set_up, m->card.graphs, m->card.checkpoints, m->card.first_steps, m->card.later,
            m->card.all);
    if (m->process.before > 0)
        record_put(&rec, ",\"process_bytes\":{\"before\":%zu,\"grown\":%zu,\"ranks\":%d}",
                   m->process.before, m->process.grown, m->process.ranks);
    if (m->has_eval) {
        record_put(&rec, ",\"evaluation\":{");
        record_score(&rec, &m->last_eval, m->config->data.version_2);
        record_put(&rec, "}");
    }
    record_put(&rec, "}\n");
    TRY(path_join(path, sizeof path, m->config->output.dir, "summary.json"));
    TRY(file_write(path, rec.text, rec.used));
    /* Last: a launcher that is about to end this process may not read any more. */
    print_epochs(m);
    return ST_OK;
}
