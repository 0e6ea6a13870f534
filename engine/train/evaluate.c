#include "engine/train/evaluate.h"

#include <inttypes.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/device/workers.h"
#include "engine/train/answer_files.h"
#include "engine/train/background.h"
#include "engine/train/interrupt.h"
#include "io/answers.h"

/* What a round reads and writes on the host. One is computed while rank 0 reads the one before. */
struct round {
    char *block;                /* pinned; index arrays of one micro-batch */
    struct step_host *host;     /* pinned */
    struct collected collected; /* pinned */
    struct event done;
};

enum { ROUNDS = 2 };

struct evaluator {
    struct round rounds[ROUNDS];
    int32_t *picked;             /* features of one batch */
    float *start, *end;          /* logits of one window */
    struct squad_data texts[2];  /* rank 0; see split_texts(): of evaluation, of training data */
    struct background reader;    /* of texts[0], while training goes on */
    const struct split *reading; /* borrowed */
    struct answer_files files;   /* rank 0 */
    struct workers *workers;     /* owned; rank 0\'s, where the device has none; NULL: one thread */
};

static enum status open_round(struct round *r, struct trainer *t)
{
    const struct batch_layout *l = &t->setup.eval_batch;
    size_t world = (size_t)t->comm->world_size;
    size_t logits = (size_t)executor_collect_numel(&t->executor);
    TRY(device_alloc_host(t->device, (void **)&r->block, l->micro_bytes));
    TRY(device_alloc_host(t->device, (void **)&r->host, sizeof *r->host));
    TRY(device_alloc_host(t->device, (void **)&r->collected.logits,
                          sizeof(float) * logits * world));
    TRY(device_alloc_host(t->device, (void **)&r->collected.reports,
                          sizeof(struct step_report) * world));
    return event_open(t->device, &r->done);
}

static void close_round(struct round *r, struct trainer *t)
{
    if (r->done.device != NULL)
        event_close(&r->done);
    device_free_host(t->device, (void **)&r->block);
    device_free_host(t->device, (void **)&r->host);
    device_free_host(t->device, (void **)&r->collected.logits);
    device_free_host(t->device, (void **)&r->collected.reports);
}

static int score_threads(const struct device *device)
{
    enum { MOST = 8 };
    return device->host_threads < MOST ? device->host_threads : MOST;
}

enum status evaluator_open(struct evaluator **out, struct trainer *t)
{
    enum status st = ST_OK;
    const struct batch_layout *l = &t->setup.eval_batch;
    TRY(mem_alloc(out, sizeof **out));
    struct evaluator *e = *out;
    for (int i = 0; i < ROUNDS; i++)
        TRY_GOTO(st, out, open_round(&e->rounds[i], t));
    if (t->device->workers == NULL && t->comm->rank == 0)
        TRY_GOTO(st, out, workers_open(&e->workers, score_threads(t->device)));
    TRY_GOTO(st, out, mem_alloc(&e->picked, sizeof *e->picked * (size_t)l->sequences));
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
    background_join(&e->reader);
    if (answer_files_end(&e->files) != ST_OK)
        log_warn("eval", "%s", status_message());
    for (int i = 0; i < ROUNDS; i++)
        close_round(&e->rounds[i], t);
    workers_close(&e->workers);
    mem_free(&e->picked);
    mem_free(&e->start);
    mem_free(&e->end);
    squad_release(&e->texts[0]);
    squad_release(&e->texts[1]);
    mem_free(evaluator);
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* Windows [@first, @first + @count) of a split, or as many as there are. */
static int64_t rows_of(const struct split *split, int64_t first, int64_t count)
{
    int64_t rows = 0;
    for (int64_t i = first; i < first + count && i < split->count; i++)
        rows += split->rows[i];
    return rows;
}

int64_t evaluator_max_rows(const struct split *split, int64_t micro_batch)
{
    int64_t most = 0;
    for (int64_t first = 0; first < split->count; first += micro_batch) {
        int64_t rows = rows_of(split, first, micro_batch);
        most = rows > most ? rows : most;
    }
    return most;
}

enum { ROWS_STEP = 1024 };

/* Rows of the tensors: where a kernel's shape is fixed, one of a few sizes. More sizes would leave
 * fewer rows empty (5% of SQuAD's), but each has products whose algorithm is looked up. */
static int64_t tensor_rows(const struct trainer *t, int64_t rows)
{
    int64_t most = t->setup.eval_batch.rows, wanted = round_up(rows > 0 ? rows : 1, ROWS_STEP);
    if (!t->device->fixed_rows)
        return rows;
    return wanted < most ? wanted : most;
}

enum status evaluator_classes(int64_t **rows, int *count, const struct trainer *t)
{
    const struct split *splits[] = {&t->data->eval, &t->data->train};
    const struct batch_layout *l = &t->setup.eval_batch;
    ASSERT(t->device->fixed_rows);
    *count = 0;
    TRY(mem_alloc(rows, sizeof **rows * (size_t)(l->rows / ROWS_STEP + 1)));
    for (int k = 0; k < (t->config->eval.train_samples > 0 ? 2 : 1); k++)
        for (int64_t first = 0; first < splits[k]->count; first += l->sequences) {
            int64_t mine = tensor_rows(t, rows_of(splits[k], first, l->sequences));
            int i = 0;
            while (i < *count && (*rows)[i] != mine)
                i++;
            if (i == *count)
                (*rows)[(*count)++] = mine;
        }
    return ST_OK;
}

/* ---- rounds ---------------------------------------------------------------------------------- */

static int64_t batch_length(const struct trainer *t, int64_t windows, int64_t batch)
{
    int64_t B = t->setup.eval_batch.sequences, first = batch * B;
    return first >= windows ? 0 : windows - first < B ? windows - first : B;
}

static enum status issue_round(struct evaluator *e, struct trainer *t, const struct split *split,
                               int64_t windows, int64_t round)
{
    const struct batch_layout *l = &t->setup.eval_batch;
    struct round *r = &e->rounds[round % ROUNDS];
    struct stream *s = &t->device->streams[STREAM_COMPUTE];
    int64_t world = t->comm->world_size, B = l->sequences;
    int64_t batch = round * world + t->comm->rank, count = batch_length(t, windows, batch);
    for (int64_t i = 0; i < count; i++)
        e->picked[i] = (int32_t)(batch * B + i);
    int64_t rows = batch_fill(l, r->block, 0, &split->features, e->picked, count, NULL);
    int signal = interrupt_read(t->signal_flag);
    *r->host = (struct step_host){.seed = (uint64_t)t->config->train.seed,
                                  .inv_count = 1.0f,
                                  .stop = signal != 0 ? STOP_SIGNAL : 0,
                                  .signal = signal};
    char *block = executor_shared(&t->executor, SHARED_BATCH);
    TRY(device_copy(s, block, r->block, l->micro_bytes));
    TRY(device_copy(s, executor_shared(&t->executor, SHARED_STATE), r->host, sizeof *r->host));
    struct sequences micro = batch_view(l, block, 0, tensor_rows(t, rows), 0);
    TRY(executor_run(&t->executor, PROGRAM_EVALUATE, &micro, &r->collected));
    return event_record(&r->done, s);
}

enum status evaluator_rehearse(struct evaluator *e, struct trainer *t)
{
    TRY(issue_round(e, t, &t->data->eval, 0, 0));
    return stream_sync(&t->device->streams[STREAM_COMPUTE]);
}

/* ---- texts ----------------------------------------------------------------------------------- */

static enum status read_texts(void *context)
{
    struct evaluator *e = context;
    const struct squad_data *texts;
    return split_texts(&texts, &e->texts[0], e->reading);
}

void evaluator_read_ahead(struct evaluator *e, struct trainer *t)
{
    e->reading = &t->data->eval;
    if (t->comm->rank == 0 && t->device->asynchronous && e->reading->count > 0)
        background_start(&e->reader, t->comm->rank, read_texts, e);
}

/* What went wrong ahead goes wrong again here. */
static enum status take_texts(struct evaluator *e, const struct squad_data **texts,
                              const struct trainer *t, const struct split *split)
{
    background_join(&e->reader);
    return split_texts(texts, &e->texts[split == &t->data->train], split);
}

/* ---- answers --------------------------------------------------------------------------------- */

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

static enum status score(const struct evaluator *e, const struct trainer *t, int64_t examples,
                         struct answers *answers, struct evaluation *result)
{
    struct workers *workers = e->workers != NULL ? e->workers : t->device->workers;
    const struct parts_runner runner = {workers_run_parts, workers};
    struct score_options options = {
        .count = examples, .threshold = t->config->eval.null_threshold, .runner = &runner};
    if (t->config->data.version_2)
        options.null_odds = answers_null_odds(answers);
    TRY(score_predictions(&result->score, answers->data, answers_texts(answers), &options));
    result->unanswerable = answers->data->unanswerable;
    return ST_OK;
}

/* All ranks see the same reports, so they stop in the same round. */
static enum status watch_signals(const struct round *round, struct trainer *t)
{
    for (int r = 0; r < t->comm->world_size; r++) {
        const struct step_report *report = &round->collected.reports[r];
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
        TRY(take_texts(e, &texts, t, split));
        TRY(answers_init(answers, texts, 0, examples, &options));
    }
    if (batches > 0)
        TRY(issue_round(e, t, split, windows, 0));
    for (int64_t round = 0; round * world < batches; round++) {
        const struct round *now = &e->rounds[round % ROUNDS];
        if ((round + 1) * world < batches)
            TRY(issue_round(e, t, split, windows, round + 1));
        TRY(event_wait(&e->rounds[round % ROUNDS].done));
        TRY(watch_signals(now, t));
        for (int64_t r = 0; r < world; r++) {
            /* In the order of batches, so that the sum does not depend on the world size. */
            loss += now->collected.reports[r].loss_sum;
            sequences += now->collected.reports[r].sequences;
            if (speaks)
                TRY(add_windows(e, t, split, answers, windows, round * world + r,
                                now->collected.logits + (size_t)r * logits_numel));
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
    TRY_GOTO(st, out, answer_files_end(&e->files));
    TRY_GOTO(st, out, evaluator_answers(e, t, split, examples, &answers, result));
    if (t->comm->rank == 0)
        TRY_GOTO(st, out, score(e, t, examples, &answers, result));
    result->ms = (clock_s() - begun) * 1e3;
    if (t->comm->rank == 0 && output_dir != NULL)
        TRY_GOTO(st, out,
                 answer_files_begin(&e->files, &answers, output_dir, t->device->host_threads));
out:
    answers_release(&answers);
    return st;
}

enum status evaluator_finish(struct evaluator *e)
{
    return answer_files_end(&e->files);
}
