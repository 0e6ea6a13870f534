#include "tests/support/run.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/log.h"

/* ---- made-up data ---- */

enum { FIRST_WORD = 5 /* tokens before w0 */, TEXT_BYTES = 1 << 20 };

struct text {
    char *data; /* owned */
    size_t used;
};

static void put(struct text *t, const char *fmt, ...) PRINTF_LIKE(2, 3);
static void put(struct text *t, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(t->data + t->used, TEXT_BYTES - t->used, fmt, args);
    va_end(args);
    assert_true(n >= 0 && (size_t)n < TEXT_BYTES - t->used);
    t->used += (size_t)n;
}

static void put_vocabulary(const struct scratch *scratch, struct text *t)
{
    char path[512];
    t->used = 0;
    put(t, "[PAD]\n[UNK]\n[CLS]\n[SEP]\n?\n");
    for (int i = FIRST_WORD; i < RUN_VOCAB; i++)
        put(t, "w%d\n", i - FIRST_WORD);
    scratch_put(scratch, path, "vocab.txt", t->data, t->used);
}

static int draw(uint64_t *state, int count)
{
    return (int)(test_random(state) % (uint64_t)count);
}

static void put_question(struct text *t, const struct made_questions *q, uint64_t *state, int index)
{
    int words[256], starts[256], spread = q->max_words - q->min_words;
    int count = q->min_words + (spread > 0 ? draw(state, spread + 1) : 0);
    int first = draw(state, count), last = first + draw(state, count - first < 3 ? 1 : 3);
    bool impossible = q->impossible_every > 0 && index % q->impossible_every == 1;
    assert_in_range(count, 1, 256);
    put(t, "%s{\"title\":\"t\",\"paragraphs\":[{\"context\":\"", index > 0 ? "," : "");
    for (int i = 0, at = 0; i < count; i++) {
        size_t before = t->used;
        words[i] = draw(state, RUN_VOCAB - FIRST_WORD);
        put(t, "%sw%d", i > 0 ? " " : "", words[i]);
        starts[i] = at + (i > 0);
        at += (int)(t->used - before);
    }
    put(t, "\",\"qas\":[{\"id\":\"q%d\",\"question\":\"", index);
    for (int i = 0; i < q->question_words; i++)
        put(t, "%sw%d", i > 0 ? " " : "", draw(state, RUN_VOCAB - FIRST_WORD));
    put(t, "\",\"is_impossible\":%s,\"answers\":[", impossible ? "true" : "false");
    if (!impossible) {
        put(t, "{\"answer_start\":%d,\"text\":\"", starts[first]);
        for (int i = first; i <= last; i++)
            put(t, "%sw%d", i > first ? " " : "", words[i]);
        put(t, "\"}");
    }
    put(t, "]}]}]}\n");
}

void run_make_data(const struct scratch *scratch, const char *name, struct made_questions q)
{
    struct text t = {NULL, 0};
    char path[512];
    uint64_t state = q.seed;
    assert_ok(mem_alloc(&t.data, TEXT_BYTES));
    put_vocabulary(scratch, &t);
    t.used = 0;
    put(&t, "{\"version\":\"%s\",\"data\":[\n", q.impossible_every > 0 ? "v2.0" : "1.1");
    for (int i = 0; i < q.count; i++)
        put_question(&t, &q, &state, i);
    put(&t, "]}\n");
    scratch_put(scratch, path, name, t.data, t.used);
    mem_free(&t.data);
}

void run_tiny(struct run_config *c, const struct scratch *scratch, bool eval)
{
    config_defaults(c);
    c->model.vocab_size = RUN_VOCAB;
    c->model.hidden = 24;
    c->model.heads = 3;
    c->model.ffn = 40;
    c->model.layers = 3;
    c->model.max_positions = 67;
    c->data.max_length = 64;
    c->data.doc_stride = 16;
    c->train.micro_batch = 3;
    c->train.epochs = 1;
    c->train.threads = 1;
    c->train.max_unit_numel = 1000; /* the word table in three parts */
    c->train.timeout_s = 60;
    c->optim.lr = 1e-3;
    c->optim.warmup_ratio = 0.2;
    c->eval.micro_batch = 5;
    c->eval.every = -1;
    scratch_path(scratch, c->data.vocab, "vocab.txt");
    scratch_path(scratch, c->data.train, "train.json");
    if (eval)
        scratch_path(scratch, c->data.eval, "eval.json");
    scratch_path(scratch, c->output.dir, "out");
}

struct run_config run_tiny_with(const struct scratch *scratch, struct tiny_run with)
{
    struct run_config c;
    run_tiny(&c, scratch, with.eval);
    c.train.ranks = with.ranks > 0 ? with.ranks : 1;
    c.train.zero_stage = with.stage;
    c.train.grad_accum = with.accum > 0 ? with.accum : 1;
    c.train.steps = with.steps;
    c.train.reduce = with.reduce;
    c.data.version_2 = with.version_2;
    return c;
}

const char *run_put_config(const struct scratch *scratch, const struct run_config *config)
{
    char *text = NULL, path[512];
    size_t bytes = 0;
    assert_ok(config_write(config, &text, &bytes));
    scratch_put(scratch, path, "run.yaml", text, bytes);
    mem_free(&text);
    return scratch_at(scratch, "run.yaml");
}

struct run_config run_planned(void)
{
    struct run_config c;
    config_defaults(&c);
    c.model.hidden = 96;
    c.model.heads = 6;
    c.model.ffn = 384;
    c.model.layers = 3;
    c.model.vocab_size = 1000;
    c.model.max_positions = 64;
    c.data.max_length = 64;
    c.data.doc_stride = 16;
    c.train.max_unit_numel = 40000;
    c.eval.micro_batch = 1;
    return c;
}

int run_set_up(void **state, struct scratch *scratch, const struct made_questions *train,
               const struct made_questions *eval)
{
    *state = scratch;
    setenv("HWLOC_COMPONENTS", "-linux:pci", 0);
    scratch_make(scratch);
    run_make_data(scratch, "train.json", *train);
    if (eval != NULL)
        run_make_data(scratch, "eval.json", *eval);
    return 0;
}

int run_tear_down(void **state)
{
    scratch_remove(*state);
    return 0;
}

/* ---- running ---- */

struct recorder {
    struct run_trace *trace;
    const struct run_how *how;
};

/* The trainer of this thread's rank: hooks of the executor do not get it. */
static _Thread_local struct trainer *own_trainer;
static _Thread_local double own_norm;

static void add_norm(const struct program *p, const struct instr *in)
{
    const struct executor *ex = &own_trainer->executor;
    const struct operand *o = program_operand(in, ROLE_GRAD_SHARD);
    int64_t numel = ex->layout->units[in->unit].shard_numel;
    const float *g = (const float *)(const void *)(ex->arena + p->buffers[o->buffer].offset);
    if (o->slice)
        g += ex->comm->rank * numel;
    for (int64_t i = 0; i < numel; i++)
        own_norm += (double)g[i] * (double)g[i];
}

static void on_instr(void *context, const struct program *p, int index,
                     const size_t live[CATEGORY_COUNT])
{
    const struct recorder *r = context;
    const struct instr *in = &p->instrs[index];
    int rank = own_trainer->comm->rank;
    if (r->how->executor.on_instr != NULL)
        r->how->executor.on_instr(own_trainer, p, index, live);
    if (p->kind != PROGRAM_STEP)
        return;
    if (in->op == OP_NORM && r->how->gradient_norms)
        add_norm(p, in);
    if (in->op != OP_AGREE || r->trace->seen[rank] == RUN_STEPS)
        return;
    int step = r->trace->seen[rank]++;
    memcpy(&r->trace->step[rank][step], executor_shared(&own_trainer->executor, SHARED_STATE),
           sizeof(struct step_state));
    if (rank == 0)
        r->trace->squared_norm[step] = 0;
    /* One rank after the other: all have passed the AGREE of a step before the next one's. */
    if (r->how->gradient_norms) {
        double all[RUN_RANKS];
        if (comm_exchange(own_trainer->comm, all, &own_norm, sizeof own_norm) == ST_OK && rank == 0)
            for (int i = 0; i < own_trainer->comm->world_size; i++)
                r->trace->squared_norm[step] += all[i];
    }
    own_norm = 0;
}

static enum status wrap_comm(void *context, struct comm **comm)
{
    const struct recorder *r = context;
    struct comm *inner = *comm;
    if (r->how->faults == NULL || r->how->faults[inner->rank].kind == FAULT_NONE)
        return ST_OK;
    return fault_comm_open(comm, inner, r->how->faults[inner->rank]);
}

static void at_start(void *context, struct trainer *t)
{
    const struct recorder *r = context;
    own_trainer = t;
    own_norm = 0;
    if (t->comm->rank == 0)
        r->trace->account = t->account;
    if (r->how->at_start != NULL)
        r->how->at_start(r->how->context, t);
}

/* Rank 0 makes the arrays while the others wait, then each rank puts its shards in. */
static enum status collect(struct run_trace *trace, struct trainer *t)
{
    const struct layout *l = &t->setup.layout;
    int world = t->comm->world_size, rank = t->comm->rank;
    if (rank == 0) {
        trace->unit_count = l->unit_count;
        for (int u = 0; u < l->unit_count; u++) {
            size_t bytes = sizeof(float) * (size_t)l->units[u].padded_numel;
            bool frozen = l->units[u].frozen;
            trace->unit[u].numel = l->units[u].numel;
            trace->unit[u].shard_numel = l->units[u].shard_numel;
            TRY(mem_alloc(&trace->unit[u].master, bytes));
            TRY(mem_alloc(&trace->unit[u].m, frozen ? 0 : bytes));
            TRY(mem_alloc(&trace->unit[u].v, frozen ? 0 : bytes));
        }
    }
    TRY(comm_barrier(t->comm));
    for (int u = 0; u < l->unit_count; u++) {
        struct shard_view view = executor_shard(&t->executor, u);
        size_t at = (size_t)rank * (size_t)view.numel, bytes = sizeof(float) * (size_t)view.numel;
        memcpy(trace->unit[u].master + at, view.master, bytes);
        if (view.adam_m != NULL) {
            memcpy(trace->unit[u].m + at, view.adam_m, bytes);
            memcpy(trace->unit[u].v + at, view.adam_v, bytes);
        }
    }
    TRY(comm_barrier(t->comm));
    for (int r = 0; r < world; r++) {
        for (int u = 0; r == rank && u < l->unit_count; u++) {
            struct shard_view view = executor_shard(&t->executor, u);
            if (view.param_whole != NULL &&
                memcmp(view.param_whole, trace->unit[u].master,
                       sizeof(float) * (size_t)l->units[u].padded_numel) != 0)
                trace->unit[u].replicas_differ = true;
        }
        TRY(comm_barrier(t->comm));
    }
    return ST_OK;
}

static void at_end(void *context, struct trainer *t)
{
    const struct recorder *r = context;
    if (r->how->at_end != NULL)
        r->how->at_end(r->how->context, t);
    if (collect(r->trace, t) != ST_OK) {
        if (t->comm->rank == 0)
            r->trace->not_collected = true;
        comm_abort(t->comm, status_message());
    }
    own_trainer = NULL;
}

void run_go(struct run_trace *trace, const struct run_config *config, const struct run_how *how)
{
    static const struct run_how plain;
    struct recorder recorder = {trace, how != NULL ? how : &plain};
    struct run_options options = {
        .executor = recorder.how->executor,
        .quiet = !recorder.how->loud,
        .wrap_comm = wrap_comm,
        .at_start = at_start,
        .at_end = at_end,
        .context = &recorder,
    };
    struct run_data data = {0};
    options.executor.on_instr = on_instr;
    options.executor.context = &recorder;
    memset(trace, 0, sizeof *trace);
    assert_in_range(config->train.ranks, 1, RUN_RANKS);
    log_set_level(LOG_ERROR);
    trace->world_size = (int)config->train.ranks;
    trace->st = config_check(config);
    if (trace->st == ST_OK)
        trace->st = run_data_load(&data, config, config->train.steps != 0);
    if (trace->st == ST_OK)
        trace->st = run_local(config, &data, &options, recorder.how->signal_flag);
    snprintf(trace->message, sizeof trace->message, "%s",
             trace->st == ST_OK ? "" : status_message());
    run_data_release(&data);
    trace->steps = trace->seen[0];
    for (int r = 1; r < trace->world_size; r++)
        if (trace->seen[r] < trace->steps)
            trace->steps = trace->seen[r];
}

void run_ok(struct run_trace *trace, const struct run_config *config, const struct run_how *how)
{
    run_go(trace, config, how);
    if (trace->st == ST_OK)
        return;
    print_error("the run ended with %s: %s\n", status_name(trace->st), trace->message);
    fail();
}

void run_release(struct run_trace *trace)
{
    for (int u = 0; u < RUN_UNITS; u++) {
        mem_free(&trace->unit[u].master);
        mem_free(&trace->unit[u].m);
        mem_free(&trace->unit[u].v);
    }
    memset(trace, 0, sizeof *trace);
}

void run_put_weights(struct trainer *t, const struct run_trace *trace)
{
    for (int u = 0; u < t->setup.layout.unit_count; u++) {
        struct shard_view view = executor_shard(&t->executor, u);
        int64_t numel = trace->unit[u].numel, first = t->comm->rank * view.numel;
        ASSERT(numel == t->setup.layout.units[u].numel);
        for (int64_t i = 0; view.param_whole != NULL && i < numel; i++)
            ((float *)view.param_whole)[i] = trace->unit[u].master[i];
        for (int64_t i = first; i < first + view.numel && i < numel; i++)
            view.master[i - first] = trace->unit[u].master[i];
    }
}

void run_read(struct file_text *text, const struct run_config *config, const char *name)
{
    char path[1200];
    assert_ok(path_join(path, sizeof path, config->output.dir, name));
    assert_ok(file_read(text, path));
}

/* ---- comparing ---- */

static bool same_bits(const void *a, const void *b, size_t bytes)
{
    return memcmp(a, b, bytes) == 0;
}

void run_same_steps(const struct run_trace *a, const struct run_trace *b, const char *what)
{
    assert_int_equal(a->steps, b->steps);
    for (int i = 0; i < a->steps; i++) {
        const struct step_state *x = &a->step[0][i], *y = &b->step[0][i];
        if (same_bits(&x->loss, &y->loss, sizeof x->loss) &&
            same_bits(&x->grad_norm, &y->grad_norm, sizeof x->grad_norm) &&
            same_bits(&x->lr, &y->lr, sizeof x->lr) && x->t == y->t && x->skip == y->skip)
            continue;
        print_error("%s: step %d: loss %.17g and %.17g, norm %.17g and %.17g, lr %.9g and %.9g\n",
                    what, i, x->loss, y->loss, x->grad_norm, y->grad_norm, (double)x->lr,
                    (double)y->lr);
        fail();
    }
}

static void same_array(const float *a, const float *b, int64_t numel, int unit, const char *name,
                       const char *what)
{
    for (int64_t i = 0; a != NULL && i < numel; i++) {
        if (same_bits(&a[i], &b[i], sizeof a[i]))
            continue;
        print_error("%s: unit %d, %s[%lld]: %.9g and %.9g\n", what, unit, name, (long long)i,
                    (double)a[i], (double)b[i]);
        fail();
    }
}

void run_same(const struct run_trace *a, const struct run_trace *b, const char *what)
{
    run_same_steps(a, b, what);
    assert_int_equal(a->unit_count, b->unit_count);
    assert_true(a->unit_count > 0);
    for (int u = 0; u < a->unit_count; u++) {
        int64_t numel = a->unit[u].numel;
        assert_int_equal(numel, b->unit[u].numel);
        assert_int_equal(a->unit[u].m != NULL, b->unit[u].m != NULL);
        same_array(a->unit[u].master, b->unit[u].master, numel, u, "weight", what);
        same_array(a->unit[u].m, b->unit[u].m, numel, u, "m", what);
        same_array(a->unit[u].v, b->unit[u].v, numel, u, "v", what);
        assert_false(a->unit[u].replicas_differ);
        assert_false(b->unit[u].replicas_differ);
    }
}

void run_close(const struct run_trace *a, const struct run_trace *b, double loss_band,
               double weight_band, const char *what)
{
    double loss = 0, sum = 0;
    int64_t count = 0;
    assert_int_equal(a->steps, b->steps);
    for (int i = 0; i < a->steps; i++)
        loss = fmax(loss, fabs(a->step[0][i].loss - b->step[0][i].loss));
    for (int u = 0; u < a->unit_count; u++) {
        for (int64_t i = 0; i < a->unit[u].numel; i++)
            sum += fabs((double)a->unit[u].master[i] - (double)b->unit[u].master[i]);
        count += a->unit[u].numel;
    }
    if (loss <= loss_band && sum <= weight_band * (double)count)
        return;
    print_error("%s: losses differ by up to %.3g (band %.3g), weights by %.3g in the mean "
                "(band %.3g)\n",
                what, loss, loss_band, sum / (double)count, weight_band);
    fail();
}
