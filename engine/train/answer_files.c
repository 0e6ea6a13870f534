#include "engine/train/answer_files.h"

#include "engine/base/file.h"
#include "engine/device/workers.h"

enum { MOST_THREADS = 16 };

static enum status write_files(void *context)
{
    struct answer_files *f = context;
    struct workers *workers = NULL;
    TRY(workers_open(&workers, f->threads));
    const struct parts_runner runner = {workers_run_parts, workers};
    enum status st = answers_write_json(&f->answers, f->predictions, f->nbest, f->null_odds,
                                        workers != NULL ? &runner : NULL);
    workers_close(&workers);
    return st;
}

enum status answer_files_begin(struct answer_files *f, struct answers *answers, const char *dir,
                               int threads)
{
    ASSERT(!f->writer.started);
    TRY(path_join(f->predictions, sizeof f->predictions, dir, "predictions.json"));
    TRY(path_join(f->nbest, sizeof f->nbest, dir, "nbest.json"));
    TRY(path_join(f->null_odds, sizeof f->null_odds, dir, "null_odds.json"));
    f->threads = threads < MOST_THREADS ? threads : MOST_THREADS;
    f->answers = *answers;
    *answers = (struct answers){0};
    background_start(&f->writer, 0, write_files, f);
    return ST_OK;
}

enum status answer_files_end(struct answer_files *f)
{
    background_join(&f->writer);
    enum status st = f->writer.st;
    if (st != ST_OK)
        status_set_message(f->writer.message);
    f->writer.st = ST_OK;
    answers_release(&f->answers);
    return st;
}
