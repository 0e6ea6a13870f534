#include "engine/train/evaluate.h"

#include <inttypes.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/train/interrupt.h"
#include "io/answers.h"

struct evaluator {
    char *block;                /* pinned; index arrays of one micro-batch */
    struct step_host *host;     /* pinned */
    struct collected collected; /* pinned */
    int32_t *picked;            /* features of one batch */
    int32_t *sort_scratch;
    float *start, *end;         /* logits of one window */
    struct squad_data texts[2]; /* rank 0; see split_texts(): of evaluation, of training data */
};

enum status evaluator_open(struct evaluator **out, struct trainer *t)
{
    enum status st = ST_OK;
    const struct batch_layout *l = &t->setup.eval_batch;
    size_t world = (size_t)t->comm->world_size, rows = (size_t)l->rows;
    TRY(mem_alloc(out, sizeof **out));
    struct evaluator *e = *out;
    TRY_GOTO(st, out, device_alloc_host(t->device, (void **)&e->block, l->micro_bytes));
    TRY_GOTO(st, out, device_alloc_host(t->device, (void **)&e->host, sizeof *e->host));
    TRY_GOTO(
        st, out,
        device_alloc_host(t->device, (void **)&e->collected.logits,
                          sizeof(float) * (size_t)executor_collect_numel(&t->executor) * world));
    TRY_GOTO(st, out,
             device_alloc_host(t->device, (void **)&e->collected.reports,
                               sizeof(struct step_report) * world));
    TRY_GOTO(st, out, mem_alloc(&e->picked, sizeof *e->picked * (size_t)l->sequences));
    TRY_GOTO(st, out, mem_alloc(&e->sort_scratch, sizeof *e->sort_scratch * rows));
    TRY_GOTO(st, out, mem_alloc(&e->start, sizeof *e->start * (size_t)l->max_length));
    TRY_GOTO(st, out, mem_alloc(&e->end, sizeof *e->end * (size_t)l->max_length));
out:
    if (st != ST_OK)
        evaluator_close(out, t);
    return st;
}

void evaluator_close(struct evaluator **evaluator, struct trainer *t)
{
    struct evaluator *e = *evaluator;
    if (e == NULL)
        return;
    device_free_host(t->device, (void **)&e->block);
    device_free_host(t->device, (void **)&e->host);
    device_free_host(t->device, (void **)&e->collected.logits);
    device_free_host(t->device, (void **)&e->collected.reports);
    mem_free(&e->picked);
    mem_free(&e->sort_scratch);
    mem_free(&e->start);
    mem_free(&e->end);
    squad_release(&e->texts[0]);
    squad_release(&e->texts[1]);
    mem_free(evaluator);
}

int64_t evaluator_max_rows(const struct split *split, int64_t micro_batch)
{
    int64_t most = 0;
    for (int64_t first = 0; first < split->count; first += micro_batch) {
        int64_t rows = 0;
        for (int64_t i = first; i < first + micro_batch && i < split->count; i++)
            rows += split->rows[i];
        most = rows > most ? rows : most;
    }
    return most;
}

static int64_t batch_length(const struct trainer *t, int64_t windows, int64_t batch)
{
    int64_t B = t->setup.eval_batch.sequences, first = batch * B;
    return first >= windows ? 0 : windows - first < B ? windows - first : B;
}

static enum status run_round(struct evaluator *e, struct trainer *t, const struct split *split,
                             int64_t windows, int64_t round)
{
    const struct batch_layout *l = &t->setup.eval_batch;
    struct stream *s = &t->device->streams[STREAM_COMPUTE];
    int64_t world = t->comm->world_size, B = l->sequences;
    int64_t batch = round * world + t->comm->rank, count = batch_length(t, windows, batch);
    for (int64_t i = 0; i < count; i++)
        e->picked[i] = (int32_t)(batch * B + i);
    int64_t rows = batch_fill(l, e->block, 0, &split->features, e->picked, count, e->sort_scratch);
    if (t->device->fixed_rows)
        rows = l->rows;
    int signal = interrupt_read(t->signal_flag);
    *e->host = (struct step_host){.seed = (uint64_t)t->config->train.seed,
                                  .inv_count = 1.0f,
                                  .stop = signal != 0 ? STOP_SIGNAL : 0,
                                  .signal = signal};
    char *block = executor_shared(&t->executor, SHARED_BATCH);
    TRY(device_copy(s, block, e->block, l->micro_bytes));
    TRY(device_copy(s, executor_shared(&t->executor, SHARED_STATE), e->host, sizeof *e->host));
    struct sequences micro = batch_view(l, block, 0, rows);
    TRY(executor_run(&t->executor, PROGRAM_EVALUATE, &micro, &e->collected));
    return stream_sync(s);
}

enum status evaluator_rehearse(struct evaluator *e, struct trainer *t)
{
    return run_round(e, t, &t->data->eval, 0, 0);
}

/* Rank 0: the logits of one batch, split up into windows. */
static enum status add_windows(struct evaluator *e, const struct trainer *t,
                               const struct split *split, struct answers *answers, int64_t windows,
                               int64_t batch, const float *logits)
{
    const struct batch_layout *l = &t->setup.eval_batch;
    int64_t count = batch_length(t, windows, batch), row = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t index = batch * l->sequences + i;
        const struct feature *f = &split->features.features[index];
        for (int64_t k = 0; k < f->token_count; k++) {
            e->start[k] = logits[2 * (row + k)];
            e->end[k] = logits[2 * (row + k) + 1];
        }
        row += split->rows[index];
        struct answer_window window = {
            .example = f->example,
            .token_count = f->token_count,
            .context_first = f->context_first,
            .context_count = f->context_count,
            .offset_start = split->features.offset_start + f->first_offset,
            .offset_end = split->features.offset_end + f->first_offset,
        };
        TRY(answers_add_window(answers, &window, e->start, e->end));
    }
    return ST_OK;
}

static enum status write_answers(const struct answers *answers, const char *dir)
{
    char predictions[1200], nbest[1200], odds[1200];
    TRY(path_join(predictions, sizeof predictions, dir, "predictions.json"));
    TRY(path_join(nbest, sizeof nbest, dir, "nbest.json"));
    TRY(path_join(odds, sizeof odds, dir, "null_odds.json"));
    return answers_write_json(answers, predictions, nbest, odds);
}

static enum status score(int64_t examples, const struct run_config *config, struct answers *answers,
                         const char *output_dir, struct evaluation *result)
{
    struct score_options options = {.count = examples, .threshold = config->eval.null_threshold};
    if (config->data.version_2)
        options.null_odds = answers_null_odds(answers);
    TRY(score_predictions(&result->score, answers->data, answers_texts(answers), &options));
    result->unanswerable = answers->data->unanswerable;
    return output_dir != NULL ? write_answers(answers, output_dir) : ST_OK;
}

/* All ranks see the same reports, so they stop in the same round. */
static enum status watch_signals(const struct evaluator *e, struct trainer *t)
{
    for (int r = 0; r < t->comm->world_size; r++) {
        const struct step_report *report = &e->collected.reports[r];
        if (!(report->stop & STOP_SIGNAL))
            continue;
        t->stop |= STOP_SIGNAL;
        t->signal = report->signal;
        return FAIL(INTERRUPTED, "stopped by signal %d in the evaluation after step %" PRId64,
                    t->signal, t->steps_done);
    }
    return ST_OK;
}

enum status evaluator_answers(struct evaluator *e, struct trainer *t, const struct split *split,
                              int64_t examples, struct answers *answers, struct evaluation *result)
{
    bool speaks = t->comm->rank == 0;
    const struct squad_data *texts = NULL;
    struct answer_options options = {
        .n_best = (int32_t)t->config->eval.n_best,
        .max_answer_tokens = (int32_t)t->config->eval.max_answer_length,
        .null_answers = t->config->data.version_2,
        .null_threshold = t->config->eval.null_threshold,
    };
    double loss = 0.0;
    int64_t windows = 0, sequences = 0, world = t->comm->world_size;
    while (windows < split->count && split->features.features[windows].example < examples)
        windows++;
    int64_t B = t->setup.eval_batch.sequences, batches = (windows + B - 1) / B;
    size_t logits_numel = (size_t)executor_collect_numel(&t->executor);
    if (speaks) {
        TRY(split_texts(&texts, &e->texts[split == &t->data->train], split));
        TRY(answers_init(answers, texts, 0, examples, &options));
    }
    for (int64_t round = 0; round * world < batches; round++) {
        TRY(run_round(e, t, split, windows, round));
        TRY(watch_signals(e, t));
        for (int64_t r = 0; r < world; r++) {
            /* In the order of batches, so that the sum does not depend on the world size. */
            loss += e->collected.reports[r].loss_sum;
            sequences += e->collected.reports[r].sequences;
            if (speaks)
                TRY(add_windows(e, t, split, answers, windows, round * world + r,
                                e->collected.logits + (size_t)r * logits_numel));
        }
    }
    result->loss = sequences > 0 ? loss / (double)sequences : 0.0;
    result->windows = windows;
    return speaks ? answers_finish(answers) : ST_OK;
}

enum status evaluator_run(struct evaluator *e, struct trainer *t, const struct split *split,
                          int64_t examples, const char *output_dir, struct evaluation *result)
{
    enum status st = ST_OK;
    struct answers answers = {0};
    double begun = clock_s();
    TRY_GOTO(st, out, evaluator_answers(e, t, split, examples, &answers, result));
    if (t->comm->rank == 0)
        TRY_GOTO(st, out, score(examples, t->config, &answers, output_dir, result));
    result->ms = (clock_s() - begun) * 1e3;
out:
    answers_release(&answers);
    return st;
}
