#include "engine/train/capture.h"

#include <stddef.h>

#include "comm/skip.h"
#include "engine/base/log.h"
#include "engine/train/evaluate.h"

/* With no sequence, gradients are zero; on zero weights, m and v, UPDATE then changes nothing. */
static enum status rehearse_step(struct trainer *t)
{
    const struct batch_layout *l = &t->setup.train_batch;
    struct step_slot *slot = &t->slots[0];
    char *block = executor_shared(&t->executor, SHARED_BATCH);
    for (int m = 0; m < t->config->train.grad_accum; m++) {
        batch_fill(l, slot->block, m, &t->data->train.features, NULL, 0, t->sort_scratch);
        for (int r = 0; r < l->ranks; r++)
            batch_fill_rank(l, slot->block, m, r, l->rows, &t->data->train.features, NULL, 0);
        batch_order_ranks(l, slot->block, m, l->rows, t->sort_scratch);
        t->micro[m] = batch_view(l, block, m, l->rows, l->rows);
    }
    *slot->host = (struct step_host){.inv_count = 1.0f, .training = 1};
    return executor_run(&t->executor, PROGRAM_STEP, t->micro, NULL);
}

static enum status rehearse(struct trainer *t)
{
    struct stream *s = &t->device->streams[STREAM_COMPUTE];
    TRY(executor_run(&t->executor, PROGRAM_PROLOGUE, NULL, NULL));
    if (t->total_steps > 0)
        TRY(rehearse_step(t));
    TRY(executor_run(&t->executor, PROGRAM_FLUSH, NULL, NULL));
    TRY(evaluator_rehearse(t->evaluator, t));
    TRY(device_fill(s, executor_shared(&t->executor, SHARED_STATE), 0, sizeof(struct step_state)));
    return stream_sync(s);
}

enum status capture_rehearse_alone(struct trainer *t)
{
    struct comm *beside = NULL;
    TRY(skip_beside(&beside, t->comm));
    t->executor.comm = beside;
    enum status st = rehearse(t);
    t->executor.comm = t->comm;
    comm_close(&beside);
    return st;
}

enum status capture_rehearse(struct trainer *t)
{
    size_t before = 0, after = 0;
    TRY(device_memory_used(t->device, &before));
    TRY(rehearse(t));
    TRY(device_memory_used(t->device, &after));
    log_info("train", "rehearsal: %.1f MiB of kernels and connections",
             ((double)after - (double)before) / 1048576.0);
    return ST_OK;
}

enum status capture_classes(int64_t **rows, int *count, struct trainer *t)
{
    enum status st = ST_OK;
    bool *meets = NULL;
    int64_t classes = t->setup.train_batch.rows / LENGTH_CLASS;
    int micros = (int)t->config->train.grad_accum;
    *count = 0;
    TRY(mem_alloc(rows, sizeof **rows * (size_t)(classes + 1)));
    TRY_GOTO(st, out, mem_alloc(&meets, (size_t)(classes + 1)));
    for (int64_t step = 0; step < sampler_foreseen(&t->sampler, t->total_steps); step++) {
        sampler_enter(&t->sampler, step);
        for (int m = 0; m < micros; m++)
            meets[sampler_class(&t->sampler, m) / LENGTH_CLASS] = true;
    }
    for (int64_t i = 0; i <= classes; i++)
        if (meets[i])
            (*rows)[(*count)++] = i * LENGTH_CLASS;
out:
    mem_free(&meets);
    if (st != ST_OK)
        mem_free(rows);
    return st;
}

enum status capture_steps(struct trainer *t)
{
    const struct batch_layout *l = &t->setup.train_batch;
    enum status st = ST_OK;
    int64_t *rows = NULL;
    int classes = 0, micros = (int)t->config->train.grad_accum;
    size_t before = 0, after = 0;
    char *block = executor_shared(&t->executor, SHARED_BATCH);
    TRY(capture_classes(&rows, &classes, t));
    TRY_GOTO(st, out, device_memory_used(t->device, &before));
    for (int i = 0; i < classes; i++) {
        for (int m = 0; m < micros; m++)
            t->micro[m] = batch_view(l, block, m, rows[i], rows[i]);
        TRY_GOTO(st, out, executor_capture(&t->executor, PROGRAM_STEP, t->micro));
    }
    TRY_GOTO(st, out, device_memory_used(t->device, &after));
    log_info("train", "captured the step for %d length classes: %.1f MiB of graphs", classes,
             ((double)after - (double)before) / 1048576.0);
out:
    mem_free(&rows);
    return st;
}
