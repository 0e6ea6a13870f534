#include "engine/train/answer_files.h"

#include "engine/base/file.h"

static enum status write_files(void *context)
{
    struct answer_files *f = context;
    return answers_write_json(&f->answers, f->predictions, f->nbest, f->null_odds);
}

enum status answer_files_begin(struct answer_files *f, struct answers *answers, const char *dir)
{
    ASSERT(!f->writer.started);
    TRY(path_join(f->predictions, sizeof f->predictions, dir, "predictions.json"));
    TRY(path_join(f->nbest, sizeof f->nbest, dir, "nbest.json"));
    TRY(path_join(f->null_odds, sizeof f->null_odds, dir, "null_odds.json"));
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
