#include "tests/support/resume.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/file.h"

struct resume_group group;

int resume_set_up(void **state)
{
    struct made_questions q = {.count = 40,
                               .min_words = 5,
                               .max_words = 90,
                               .question_words = 4,
                               .impossible_every = 5,
                               .seed = 7};
    struct made_questions eval = q;
    eval.count = 4;
    eval.seed = 8;
    return run_set_up(state, &group.scratch, &q, &eval);
}

int resume_release(void **state)
{
    (void)state;
    file_fail_at(0);
    file_delay(0);
    mem_fail_at(0);
    run_release(&group.first);
    run_release(&group.other);
    run_release(&group.third);
    return 0;
}

struct run_config resume_tiny(const char *out, int ranks, int stage, int64_t steps, int64_t every)
{
    struct run_config c;
    run_tiny(&c, &group.scratch, false);
    scratch_path(&group.scratch, c.output.dir, out);
    c.data.version_2 = true;
    c.train.ranks = ranks;
    c.train.zero_stage = stage;
    c.train.grad_accum = ranks > 3 ? 1 : 2;
    c.train.micro_batch = 12 / ranks / c.train.grad_accum;
    c.train.steps = steps;
    c.train.reduce = REDUCE_PER_MICRO_BATCH;
    /* The batches have more rows than the table, so by itself it would be reduced whole. */
    c.train.tables = ranks % 2 == 0 ? TABLES_ROWS : TABLES_WHOLE;
    c.optim.schedule = SCHEDULE_CONSTANT;
    c.optim.warmup_steps = 3;
    c.checkpoint.every = every;
    return c;
}

void saved_folder(const struct run_config *c, char path[SAVED_PATH_BYTES], int64_t step)
{
    snprintf(path, SAVED_PATH_BYTES, "%s/checkpoints/step-%08lld", c->output.dir, (long long)step);
}

bool saved_is_there(const struct run_config *c, int64_t step)
{
    char path[SAVED_PATH_BYTES];
    saved_folder(c, path, step);
    return access(path, F_OK) == 0;
}

void resume_from(struct run_config *c, const struct run_config *saved, int64_t step)
{
    char name[64];
    snprintf(name, sizeof name, "checkpoints/step-%08lld", (long long)step);
    assert_ok(
        path_join(c->checkpoint.resume, sizeof c->checkpoint.resume, saved->output.dir, name));
}

void resume_latest(struct run_config *c)
{
    snprintf(c->checkpoint.resume, sizeof c->checkpoint.resume, "latest");
}

void resume_same_state(struct run_trace *a, struct run_trace *b, const char *what)
{
    int steps_a = a->steps, steps_b = b->steps;
    a->steps = b->steps = 0;
    run_same(a, b, what);
    a->steps = steps_a;
    b->steps = steps_b;
}

void resume_same_rest(const struct run_trace *whole, const struct run_trace *rest, int from,
                      double band, const char *what)
{
    assert_int_equal(rest->steps, whole->steps - from);
    for (int i = 0; i < rest->steps; i++) {
        const struct step_state *x = &whole->step[0][from + i], *y = &rest->step[0][i];
        bool same = x->t == y->t && x->lr == y->lr && x->sequences == y->sequences &&
                    x->host.step == y->host.step;
        same &= band > 0 ? fabs(x->loss - y->loss) <= band
                         : x->loss == y->loss && x->grad_norm == y->grad_norm;
        if (same)
            continue;
        print_error("%s: step %d: loss %.17g and %.17g, norm %.17g and %.17g\n", what, from + i,
                    x->loss, y->loss, x->grad_norm, y->grad_norm);
        fail();
    }
}
