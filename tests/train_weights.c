#include "engine/train/weights.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "engine/base/file.h"
#include "engine/base/log.h"
#include "engine/ops/master.h"
#include "engine/train/model_config.h"
#include "engine/train/snapshot.h"
#include "io/safetensors.h"
#include "tests/support/ranks.h"
#include "tests/support/support.h"

enum { VOCAB = 101, HIDDEN = 20, LAYERS = 2, FFN = 28 };

/* Small sizes that divide nothing evenly; the word table is split into four units. */
struct fixture {
    struct scratch scratch;
    struct run_config config;
    struct run_data data;
    int64_t live_bytes;
};

static void make_vocab(struct fixture *f)
{
    char text[4096] = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n", path[512];
    size_t used = strlen(text);
    for (int i = 4; i < VOCAB; i++)
        used += (size_t)snprintf(text + used, sizeof text - used, "word%d\n", i);
    scratch_put(&f->scratch, path, "words.txt", text, used);
    assert_ok(vocab_load(&f->data.vocab, path));
}

static int set_up(void **state)
{
    static struct fixture f;
    memset(&f, 0, sizeof f);
    scratch_make(&f.scratch);
    f.live_bytes = mem_live_bytes();
    log_set_level(LOG_WARN);
    config_defaults(&f.config);
    f.config.model.vocab_size = VOCAB;
    f.config.model.hidden = HIDDEN;
    f.config.model.layers = LAYERS;
    f.config.model.heads = 2;
    f.config.model.ffn = FFN;
    f.config.model.max_positions = 33;
    f.config.data.max_length = 33;
    f.config.data.doc_stride = 8;
    f.config.train.steps = 0;
    f.config.train.micro_batch = f.config.eval.micro_batch = 1;
    f.config.train.max_unit_numel = 26 * HIDDEN;
    make_vocab(&f);
    *state = &f;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *f = *state;
    file_fail_at(0);
    run_data_release(&f->data);
    scratch_remove(&f->scratch);
    return mem_live_bytes() == f->live_bytes ? 0 : -1; /* no test leaks */
}

/* ---- a trainer on every rank ----------------------------------------------------------------- */

struct job {
    struct fixture *f;
    const char *dir;
    enum status (*body)(struct trainer *t, const char *dir);
    int threads; /* of a rank; 0: one */
    bool bf16;   /* parameters, as on a card; the CPU keeps them, but cannot compute with them */
};

static enum status rank_body(struct comm *comm, void *argument)
{
    const struct job *job = argument;
    enum status st;
    struct device *device = NULL;
    struct trainer trainer = {0};
    struct executor_options options = {.overlap = true};
    TRY_GOTO(
        st, out,
        device_open(&device, DEVICE_CPU, PRECISION_FP32, 0, job->threads > 0 ? job->threads : 1));
    if (job->bf16)
        device->param_dtype = DTYPE_BF16;
    TRY_GOTO(st, out,
             trainer_open(&trainer, &job->f->config, &job->f->data, device, comm, NULL, &options));
    if (job->body != NULL)
        TRY_GOTO(st, out, job->body(&trainer, job->dir));
out:
    trainer_close(&trainer);
    device_close(&device);
    return st;
}

static void run_ranks(struct ranks *ranks, struct job *job, int world_size, int stage)
{
    job->f->config.train.zero_stage = stage;
    job->f->config.train.ranks = world_size;
    *ranks = (struct ranks){
        .world_size = world_size, .timeout_ms = 20000, .body = rank_body, .argument = job};
    ranks_run(ranks);
}

static void assert_all_ok(const struct ranks *ranks)
{
    for (int r = 0; r < ranks->world_size; r++)
        ranks_assert(ranks, r, ST_OK, "");
}

static void assert_all_fail(const struct ranks *ranks, enum status st, const char *text)
{
    for (int r = 0; r < ranks->world_size; r++)
        ranks_assert(ranks, r, st, text);
}

/* Save what trainer_open() made, to a folder of the scratch folder. */
static void save(struct fixture *f, const char *name, int world_size, int stage)
{
    char dir[512];
    struct ranks ranks;
    struct job job = {.f = f, .dir = scratch_path(&f->scratch, dir, name), .body = weights_save};
    run_ranks(&ranks, &job, world_size, stage);
    assert_all_ok(&ranks);
}

static void start_from(struct fixture *f, const char *name, int64_t seed)
{
    f->config.train.seed = seed;
    f->config.model.init_from[0] = '\0';
    if (name != NULL)
        scratch_path(&f->scratch, f->config.model.init_from, name);
}

static void read_model(const struct fixture *f, const char *name, struct file_text *text)
{
    char dir[512], path[1024];
    assert_ok(
        path_join(path, sizeof path, scratch_path(&f->scratch, dir, name), "model.safetensors"));
    assert_ok(file_read(text, path));
}

static bool is_same_model(const struct fixture *f, const char *a, const char *b)
{
    struct file_text x, y;
    read_model(f, a, &x);
    read_model(f, b, &y);
    bool same = x.bytes == y.bytes && memcmp(x.data, y.data, x.bytes) == 0;
    mem_free(&x.data);
    mem_free(&y.data);
    return same;
}

static void open_model(const struct fixture *f, const char *name, struct safetensors *st)
{
    char dir[512], path[1024];
    assert_ok(
        path_join(path, sizeof path, scratch_path(&f->scratch, dir, name), "model.safetensors"));
    assert_ok(safetensors_open(st, path));
}

/* ---- saving and loading ---------------------------------------------------------------------- */

static void b17_saved_bytes_depend_neither_on_stage_nor_on_world_size(void **state)
{
    struct fixture *f = *state;
    save(f, "one", 1, 0);
    for (int world_size = 1; world_size <= 5; world_size += 1 + (world_size == 3))
        for (int stage = 0; stage <= 3; stage++) {
            save(f, "many", world_size, stage);
            assert_true(is_same_model(f, "one", "many"));
        }
}

static void the_file_has_the_names_and_shapes_of_hugging_face(void **state)
{
    static const struct {
        const char *name;
        int dims;
        int64_t rows, columns;
    } want[] = {
        {"bert.embeddings.word_embeddings.weight", 2, VOCAB, HIDDEN},
        {"bert.embeddings.position_embeddings.weight", 2, 33, HIDDEN},
        {"bert.embeddings.token_type_embeddings.weight", 2, 2, HIDDEN},
        {"bert.embeddings.LayerNorm.weight", 1, HIDDEN, 0},
        {"bert.encoder.layer.1.attention.self.query.weight", 2, HIDDEN, HIDDEN},
        {"bert.encoder.layer.1.attention.self.key.bias", 1, HIDDEN, 0},
        {"bert.encoder.layer.1.attention.self.value.weight", 2, HIDDEN, HIDDEN},
        {"bert.encoder.layer.0.attention.output.dense.weight", 2, HIDDEN, HIDDEN},
        {"bert.encoder.layer.0.attention.output.LayerNorm.bias", 1, HIDDEN, 0},
        {"bert.encoder.layer.0.intermediate.dense.weight", 2, FFN, HIDDEN},
        {"bert.encoder.layer.0.output.dense.weight", 2, HIDDEN, FFN},
        {"bert.encoder.layer.0.output.LayerNorm.weight", 1, HIDDEN, 0},
        {"qa_outputs.weight", 2, 2, HIDDEN},
        {"qa_outputs.bias", 1, 2, 0},
    };
    struct fixture *f = *state;
    struct safetensors st = {0};
    save(f, "one", 2, 3);
    open_model(f, "one", &st);
    assert_int_equal(st.count, 5 + 16 * LAYERS + 2);
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        const struct safetensors_tensor *t = safetensors_find(&st, want[i].name);
        assert_non_null(t);
        assert_int_equal(t->dims, want[i].dims);
        assert_int_equal(t->shape[0], want[i].rows);
        assert_int_equal(t->shape[1], want[i].columns);
    }
    safetensors_close(&st);
}

static void a_loaded_model_is_the_saved_one_to_the_bit(void **state)
{
    struct fixture *f = *state;
    start_from(f, NULL, 1);
    save(f, "first", 1, 0);
    start_from(f, NULL, 2);
    save(f, "other", 1, 0);
    assert_false(is_same_model(f, "first", "other"));
    start_from(f, "first", 2);
    for (int world_size = 1; world_size <= 5; world_size += 1 + (world_size == 3))
        for (int stage = 0; stage <= 3; stage++) {
            save(f, "again", world_size, stage);
            assert_true(is_same_model(f, "first", "again"));
        }
}

static void be_distilbert(struct fixture *f)
{
    f->config.model.family = FAMILY_DISTILBERT;
    f->config.model.hidden_dropout = 0.25;
    f->config.model.attention_dropout = 0.125;
    f->config.model.qa_dropout = 0.375;
}

static void distilbert_is_saved_with_its_names_and_loaded_to_the_bit(void **state)
{
    static const char *const want[] = {
        "distilbert.embeddings.word_embeddings.weight",
        "distilbert.embeddings.position_embeddings.weight",
        "distilbert.embeddings.LayerNorm.bias",
        "distilbert.transformer.layer.1.attention.q_lin.weight",
        "distilbert.transformer.layer.1.attention.k_lin.bias",
        "distilbert.transformer.layer.1.attention.v_lin.weight",
        "distilbert.transformer.layer.0.attention.out_lin.bias",
        "distilbert.transformer.layer.0.sa_layer_norm.weight",
        "distilbert.transformer.layer.0.ffn.lin1.weight",
        "distilbert.transformer.layer.0.ffn.lin2.bias",
        "distilbert.transformer.layer.1.output_layer_norm.bias",
        "qa_outputs.weight",
    };
    struct fixture *f = *state;
    struct safetensors st = {0};
    be_distilbert(f);
    start_from(f, NULL, 1);
    save(f, "first", 2, 3);
    open_model(f, "first", &st);
    assert_int_equal(st.count, 4 + 16 * LAYERS + 2);
    for (size_t i = 0; i < sizeof want / sizeof *want; i++)
        assert_non_null(safetensors_find(&st, want[i]));
    safetensors_close(&st);
    start_from(f, "first", 2);
    save(f, "again", 3, 3);
    assert_true(is_same_model(f, "first", "again"));
}

static void config_json_says_the_family_and_its_constants(void **state)
{
    struct fixture *f = *state;
    char dir[512], path[512];
    struct run_config read;
    be_distilbert(f);
    save(f, "model", 1, 0);
    config_defaults(&read);
    read.model.norm_eps = 1e-5; /* not in the file: the family's */
    assert_ok(model_config_read(&read, scratch_path(&f->scratch, dir, "model")));
    assert_int_equal(read.model.family, FAMILY_DISTILBERT);
    assert_int_equal(read.model.hidden, HIDDEN);
    assert_int_equal(read.model.layers, LAYERS);
    assert_int_equal(read.model.heads, 2);
    assert_int_equal(read.model.ffn, FFN);
    assert_int_equal(read.model.max_positions, 33);
    assert_true(read.model.hidden_dropout == 0.25 && read.model.attention_dropout == 0.125);
    assert_true(read.model.qa_dropout == 0.375 && read.model.norm_eps == 1e-12);
    /* Hugging Face's standard values, and those of a family without such a key. */
    static const char bare[] = "{\"model_type\": \"distilbert\", \"sinusoidal_pos_embds\": true}";
    scratch_put(&f->scratch, path, "model/config.json", bare, sizeof bare - 1);
    assert_ok(model_config_read(&read, dir));
    assert_int_equal(read.model.layers, 6);
    assert_true(read.model.hidden_dropout == 0.1 && read.model.qa_dropout == 0.1);
    scratch_put(&f->scratch, path, "model/config.json", "{\"model_type\": \"bert\"}", 22);
    assert_ok(model_config_read(&read, dir));
    assert_int_equal(read.model.family, FAMILY_BERT);
    assert_int_equal(read.model.layers, 12);
    assert_true(read.model.qa_dropout == 0.0);
    static const char other[] = "{\"model_type\": \"distilbert\", \"activation\": \"relu\"}";
    scratch_put(&f->scratch, path, "model/config.json", other, sizeof other - 1);
    assert_fails(model_config_read(&read, dir), ST_UNSUPPORTED, "activation is \"relu\"");
}

static void shards_larger_than_the_staging_buffer_are_whole(void **state)
{
    struct fixture *f = *state;
    f->config.model.hidden = 66;
    f->config.model.ffn = 3001; /* a block of 410,000 elements */
    start_from(f, NULL, 1);
    save(f, "first", 1, 0);
    save(f, "many", 3, 3);
    assert_true(is_same_model(f, "first", "many"));
    start_from(f, "first", 2);
    save(f, "again", 1, 3);
    assert_true(is_same_model(f, "first", "again"));
}

/* Bytes that all threads of this process have read so far; -1: this system does not say. */
static int64_t bytes_read(void)
{
    char line[128];
    long long bytes = -1;
    FILE *f = fopen("/proc/self/io", "r");
    while (f != NULL && bytes < 0 && fgets(line, sizeof line, f) != NULL)
        if (sscanf(line, "rchar: %lld", &bytes) != 1)
            bytes = -1;
    if (f != NULL)
        fclose(f);
    return bytes;
}

/* Units larger than what a thread fills at a time. */
static void any_number_of_threads_makes_and_loads_the_same_weights(void **state)
{
    struct fixture *f = *state;
    f->config.model.hidden = 200;
    f->config.model.ffn = 333;
    start_from(f, NULL, 11);
    save(f, "one", 1, 0);
    for (int threads = 2; threads <= 5; threads += 3) {
        char one[512], dir[512];
        struct ranks ranks;
        struct job job = {.f = f,
                          .dir = scratch_path(&f->scratch, dir, "many"),
                          .body = weights_save,
                          .threads = threads};
        run_ranks(&ranks, &job, threads == 2 ? 1 : 2, 3);
        assert_all_ok(&ranks);
        assert_true(is_same_model(f, "one", "many"));
        scratch_path(&f->scratch, one, "one");
        snprintf(f->config.model.init_from, sizeof f->config.model.init_from, "%s", one);
        f->config.train.seed++;
        run_ranks(&ranks, &job, 1, 0);
        assert_all_ok(&ranks);
        assert_true(is_same_model(f, "one", "many"));
        start_from(f, NULL, 11);
    }
}

/* The snapshot of a rank's shards has the numbers that model.safetensors got from them. */
static enum status check_snapshot(struct trainer *t)
{
    struct comm *comm = t->comm; /* for RANK_CHECK */
    struct snapshot s = {0};
    float *masters = NULL, *at = NULL;
    enum status st = snapshot_open(&s, t);
    if (st == ST_OK)
        st = mem_alloc(&masters, s.bytes);
    if (st == ST_OK)
        st = snapshot_begin(&s, t);
    if (st == ST_OK)
        st = snapshot_wait(&s);
    at = s.values;
    for (int u = 0; st == ST_OK && u < t->setup.model.unit_count; u++) {
        struct shard_view view = executor_shard(&t->executor, u);
        int64_t n = view.numel;
        const uint16_t *high = view.param_whole;
        master_take(masters, view.param_shard, view.low, n);
        snapshot_join(&s, u, at);
        RANK_CHECK(view.master == NULL);
        RANK_CHECK(memcmp(at, masters, sizeof *at * (size_t)n) == 0);
        /* The others' slices are rounded as they do it. */
        RANK_CHECK(comm_exchange(comm, masters, at, sizeof *at * (size_t)n) == ST_OK);
        for (int64_t i = 0; high != NULL && i < n * comm->world_size; i++) {
            uint32_t bits;
            memcpy(&bits, masters + i, sizeof bits);
            RANK_CHECK(high[i] == master_high(bits));
        }
        at += n * snapshot_state_count(&s, u);
    }
    mem_free(&masters);
    snapshot_release(&s);
    return st;
}

static enum status save_halves(struct trainer *t, const char *dir)
{
    TRY(weights_save(t, dir));
    return check_snapshot(t);
}

/* Through bf16 parameters and the lower halves, at every stage: no bit of fp32 is lost. */
static void masters_in_halves_are_loaded_and_saved_to_the_bit(void **state)
{
    struct fixture *f = *state;
    snprintf(f->config.train.freeze, sizeof f->config.train.freeze,
             "bert.embeddings,bert.encoder.layer.0");
    start_from(f, NULL, 1);
    save(f, "first", 1, 0);
    start_from(f, "first", 2);
    for (int stage = 0; stage <= 3; stage++)
        for (int world = 1; world <= 3; world++) {
            char dir[512];
            struct ranks ranks;
            struct job job = {.f = f, .body = save_halves, .threads = world, .bf16 = true};
            job.dir = scratch_path(&f->scratch, dir, "again");
            run_ranks(&ranks, &job, world, stage);
            assert_all_ok(&ranks);
            assert_true(is_same_model(f, "first", "again"));
        }
}

static enum status fail_behind_the_first_part(void *context, int unit, float *out, int64_t first,
                                              int64_t count)
{
    (void)context;
    memset(out, 0, sizeof *out * (size_t)count);
    return first == 0 ? ST_OK
                      : FAIL(CORRUPT, "unit %d has no element %lld", unit, (long long)first);
}

static enum status fill_badly(struct trainer *t, const char *dir)
{
    (void)dir;
    return weights_fill(t, &(struct weights_source){fail_behind_the_first_part, NULL, true, NULL});
}

static void a_source_that_fails_in_another_thread_is_an_error_with_its_cause(void **state)
{
    struct fixture *f = *state;
    struct ranks ranks;
    struct job job = {.f = f, .body = fill_badly, .threads = 4};
    f->config.model.hidden = 200;
    f->config.model.ffn = 333;
    run_ranks(&ranks, &job, 1, 0);
    ranks_assert(&ranks, 0, ST_CORRUPT, "has no element");
}

static void at_stage_3_all_ranks_together_read_the_file_once(void **state)
{
    struct fixture *f = *state;
    struct ranks ranks;
    struct job job = {.f = f};
    struct safetensors st = {0};
    f->config.model.hidden = 66;
    f->config.model.ffn = 3001;
    start_from(f, NULL, 1);
    save(f, "first", 1, 0);
    open_model(f, "first", &st);
    int64_t file = 0, before;
    for (int i = 0; i < st.count; i++)
        file += st.tensors[i].bytes;
    safetensors_close(&st);
    if (bytes_read() < 0)
        skip();
    start_from(f, "first", 2);
    before = bytes_read();
    run_ranks(&ranks, &job, 4, 3);
    assert_all_ok(&ranks);
    assert_in_range(bytes_read() - before, file, file + file / 10); /* headers, config.json */
}

static void b34_frozen_tensors_are_saved_and_loaded_too(void **state)
{
    struct fixture *f = *state;
    start_from(f, NULL, 1);
    save(f, "first", 1, 0);
    snprintf(f->config.train.freeze, sizeof f->config.train.freeze,
             "bert.embeddings,bert.encoder.layer.0");
    start_from(f, "first", 2);
    for (int stage = 0; stage <= 3; stage++) {
        save(f, "again", 2, stage);
        assert_true(is_same_model(f, "first", "again"));
    }
}

static enum status check_fresh_optimizer(struct trainer *t, const char *dir)
{
    (void)dir;
    struct comm *comm = t->comm; /* for RANK_CHECK */
    const struct step_state *s = executor_shared(&t->executor, SHARED_STATE);
    RANK_CHECK(s->t == 0);
    for (int u = 0; u < t->setup.model.unit_count; u++) {
        struct shard_view view = executor_shard(&t->executor, u);
        for (int64_t i = 0; i < view.numel; i++)
            RANK_CHECK(view.adam_m[i] == 0.0f && view.adam_v[i] == 0.0f);
    }
    return ST_OK;
}

static void b04_loading_weights_leaves_a_fresh_optimizer(void **state)
{
    struct fixture *f = *state;
    struct ranks ranks;
    struct job job = {.f = f, .body = check_fresh_optimizer};
    save(f, "first", 1, 0);
    start_from(f, "first", 2);
    for (int stage = 0; stage <= 3; stage++) {
        run_ranks(&ranks, &job, 2, stage);
        assert_all_ok(&ranks);
    }
}

/* ---- other people's files -------------------------------------------------------------------- */

enum { MAX_TENSORS = 64, MAX_NUMEL = 4096 };

/* Copy a model; @rename gives each tensor its new name, or NULL to leave it out. */
static void rewrite(struct fixture *f, const char *from, const char *to,
                    const char *(*rename)(char out[256], const char *name), bool with_extra)
{
    static char names[MAX_TENSORS][256];
    static float values[MAX_NUMEL];
    struct safetensors_tensor table[MAX_TENSORS] = {0};
    const struct safetensors_tensor *sources[MAX_TENSORS];
    struct safetensors st = {0};
    struct safetensors_writer w = {0};
    char dir[512];
    int count = 0;
    open_model(f, from, &st);
    for (int i = 0; i < st.count; i++) {
        const char *name = rename(names[count], st.tensors[i].name);
        if (name == NULL)
            continue;
        table[count] = st.tensors[i];
        table[count].name = name;
        sources[count++] = &st.tensors[i];
    }
    int copied = count;
    if (with_extra) {
        table[count++] = (struct safetensors_tensor){
            .name = "bert.pooler.dense.weight", .dims = 2, .shape = {HIDDEN, HIDDEN}};
        table[count++] =
            (struct safetensors_tensor){.name = "cls.predictions.bias", .dims = 1, .shape = {9}};
    }
    assert_ok(file_make_dirs(scratch_path(&f->scratch, dir, to)));
    assert_ok(safetensors_create(&w, dir, "model.safetensors", table, count));
    for (int i = 0; i < copied; i++) {
        assert_true(sources[i]->numel <= MAX_NUMEL);
        assert_ok(safetensors_read(&st, sources[i], 0, sources[i]->numel, values));
        assert_ok(safetensors_write_range(&w, i, 0, sources[i]->numel, values));
    }
    assert_ok(safetensors_publish(&w));
    safetensors_writer_close(&w);
    safetensors_close(&st);
}

static const char *without_prefix(char out[256], const char *name)
{
    static const char *const prefix[] = {"bert.", "distilbert."};
    for (int i = 0; i < 2; i++)
        if (strncmp(name, prefix[i], strlen(prefix[i])) == 0)
            name += strlen(prefix[i]);
    snprintf(out, 256, "%s", name);
    return out;
}

/* Prefix kept, LayerNorm as TensorFlow named it. */
static const char *gamma_and_beta(char out[256], const char *name)
{
    const char *norm = strstr(name, "LayerNorm.");
    int length = norm == NULL ? (int)strlen(name) : (int)(norm - name) + 10;
    const char *ending = norm == NULL ? "" : strcmp(norm + 10, "weight") == 0 ? "gamma" : "beta";
    snprintf(out, 256, "%.*s%s", length, name, ending);
    return out;
}

static const char *both(char out[256], const char *name)
{
    char old[256];
    return without_prefix(out, gamma_and_beta(old, name));
}

static const char *headless(char out[256], const char *name)
{
    return strncmp(name, "qa_outputs.", 11) == 0 ? NULL : without_prefix(out, name);
}

static const char *without_two(char out[256], const char *name)
{
    snprintf(out, 256, "%s", name);
    bool dropped = strcmp(name, "bert.embeddings.token_type_embeddings.weight") == 0 ||
                   strcmp(name, "bert.encoder.layer.1.attention.self.key.bias") == 0;
    return dropped ? NULL : out;
}

static void names_without_prefix_and_old_names_are_known(void **state)
{
    const char *(*const renames[])(char *, const char *) = {without_prefix, gamma_and_beta, both};
    struct fixture *f = *state;
    for (int family = 0; family < 2; family++) {
        f->config.model.family = (enum model_family)family;
        start_from(f, NULL, 1);
        save(f, "first", 1, 0);
        for (int i = 0; i < 3; i++) {
            start_from(f, NULL, 1);
            rewrite(f, "first", "renamed", renames[i], i > 0);
            start_from(f, "renamed", 2);
            save(f, "again", 2, 3);
            assert_true(is_same_model(f, "first", "again"));
        }
    }
}

/* What a call logs, up to the size of @text. */
struct capture {
    int old;
    char path[512];
};

static void capture_begin(struct capture *c, struct fixture *f)
{
    scratch_path(&f->scratch, c->path, "log");
    int fd = open(c->path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    c->old = dup(2);
    assert_true(fd >= 0 && c->old >= 0 && dup2(fd, 2) == 2);
    close(fd);
}

static void capture_end(struct capture *c, struct file_text *text)
{
    assert_int_equal(dup2(c->old, 2), 2);
    close(c->old);
    assert_ok(file_read(text, c->path));
}

static int count_of(const char *text, const char *piece)
{
    int count = 0;
    for (const char *at = strstr(text, piece); at != NULL; at = strstr(at + 1, piece))
        count++;
    return count;
}

static void a_missing_head_stays_random_with_one_warning(void **state)
{
    struct fixture *f = *state;
    struct capture c;
    struct file_text log;
    start_from(f, NULL, 1);
    save(f, "first", 1, 0);
    start_from(f, NULL, 2);
    save(f, "other", 1, 0);
    rewrite(f, "first", "encoder", headless, true);
    start_from(f, "encoder", 2);
    log_set_level(LOG_INFO);
    capture_begin(&c, f);
    save(f, "again", 3, 3);
    capture_end(&c, &log);
    assert_int_equal(count_of(log.data, "has no qa_outputs.weight, qa_outputs.bias: random"), 1);
    assert_int_equal(count_of(log.data, " warn "), 1);
    assert_int_equal(count_of(log.data, "2 tensors are not used: bert.pooler.dense.weight, "
                                        "cls.predictions.bias"),
                     1);
    mem_free(&log.data);
    /* The head of seed 2, the rest of the file. */
    struct safetensors first = {0}, other = {0}, again = {0};
    open_model(f, "first", &first);
    open_model(f, "other", &other);
    open_model(f, "again", &again);
    for (int i = 0; i < again.count; i++) {
        static float got[MAX_NUMEL], want[MAX_NUMEL];
        const struct safetensors_tensor *t = &again.tensors[i];
        const struct safetensors *from = strncmp(t->name, "qa_", 3) == 0 ? &other : &first;
        assert_ok(safetensors_read(&again, t, 0, t->numel, got));
        assert_ok(safetensors_read(from, safetensors_find(from, t->name), 0, t->numel, want));
        assert_memory_equal(got, want, (size_t)t->numel * 4);
    }
    safetensors_close(&first);
    safetensors_close(&other);
    safetensors_close(&again);
}

static void assert_load_fails(struct fixture *f, const char *name, enum status st,
                              const char *message)
{
    struct ranks ranks;
    struct job job = {.f = f};
    start_from(f, name, 2);
    run_ranks(&ranks, &job, 2, 3);
    assert_all_fail(&ranks, st, message);
    start_from(f, NULL, 1);
}

static void other_missing_tensors_are_an_error_that_names_them(void **state)
{
    struct fixture *f = *state;
    save(f, "first", 1, 0);
    rewrite(f, "first", "less", without_two, false);
    assert_load_fails(f, "less", ST_INVALID,
                      "2 tensors of the model are missing: "
                      "bert.embeddings.token_type_embeddings.weight, "
                      "bert.encoder.layer.1.attention.self.key.bias");
}

static const char *same_name(char out[256], const char *name)
{
    snprintf(out, 256, "%s", name);
    return out;
}

static void another_size_is_an_error_that_names_both(void **state)
{
    struct fixture *f = *state;
    save(f, "first", 1, 0);
    rewrite(f, "first", "bare", same_name, false); /* no config.json */
    f->config.model.ffn = FFN + 1;
    assert_load_fails(f, "bare", ST_INVALID,
                      "tensor bert.encoder.layer.0.intermediate.dense.weight has shape (28, 20), "
                      "the model of this configuration has (29, 20)");
    assert_load_fails(f, "first", ST_INVALID,
                      "config.json: intermediate_size is 28, but model.ffn is 29");
    f->config.model.ffn = FFN;
    f->config.model.hidden = HIDDEN + 2;
    assert_load_fails(f, "bare", ST_INVALID,
                      "tensor bert.embeddings.word_embeddings.weight has shape (101, 20), the "
                      "model of this configuration has (101, 22)");
    f->config.model.hidden = HIDDEN;
    f->config.model.heads = 4; /* shows in no shape */
    assert_load_fails(f, "first", ST_INVALID,
                      "config.json: num_attention_heads is 2, but model.heads is 4");
    f->config.model.heads = 2;
    f->config.model.layers = 1;
    assert_load_fails(f, "first", ST_INVALID,
                      "config.json: num_hidden_layers is 2, but model.layers is 1");
    be_distilbert(f);
    assert_load_fails(f, "first", ST_INVALID,
                      "config.json: model_type is bert, but model.family is distilbert");
}

static void folders_without_a_usable_model_say_what_is_wrong(void **state)
{
    struct fixture *f = *state;
    char path[512];
    assert_load_fails(f, "nothing", ST_IO, "nothing/model.safetensors: No such file");
    assert_ok(file_make_dirs(scratch_path(&f->scratch, path, "torch")));
    scratch_put(&f->scratch, path, "torch/pytorch_model.bin", "x", 1);
    assert_load_fails(f, "torch", ST_UNSUPPORTED, "pytorch_model.bin: this format is not read");
    scratch_put(&f->scratch, path, "torch/config.json", "{\"model_type\": \"roberta\"}", 25);
    assert_load_fails(f, "torch", ST_UNSUPPORTED, "model_type is \"roberta\"");
    scratch_put(&f->scratch, path, "torch/config.json", "{\"hidden_size\": \"x\"}", 20);
    assert_load_fails(f, "torch", ST_CORRUPT, "hidden_size: expected an integer from 1 to");
    scratch_put(&f->scratch, path, "torch/config.json", "{\"hidden_size\": 1", 17);
    assert_load_fails(f, "torch", ST_CORRUPT, "config.json:1:");
}

/* ---- saves that fail ------------------------------------------------------------------------- */

static void try_save(struct fixture *f, const char *name, struct ranks *ranks, int world_size)
{
    char dir[512];
    struct job job = {.f = f, .dir = scratch_path(&f->scratch, dir, name), .body = weights_save};
    run_ranks(ranks, &job, world_size, 3);
}

static void a_folder_that_cannot_be_made_fails_on_all_ranks(void **state)
{
    struct fixture *f = *state;
    struct ranks ranks;
    char path[512];
    scratch_put(&f->scratch, path, "file", "x", 1);
    try_save(f, "file/model", &ranks, 3);
    assert_all_fail(&ranks, ST_IO, "file");
}

static void a_full_disk_fails_on_all_ranks_and_leaves_the_old_model(void **state)
{
    struct fixture *f = *state;
    struct ranks ranks;
    struct rlimit old, small;
    struct scratch model;
    save(f, "kept", 1, 0);
    save(f, "model", 1, 0);
    start_from(f, NULL, 7);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    small = old;
    small.rlim_cur = 8192;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    try_save(f, "model", &ranks, 3);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_all_fail(&ranks, ST_IO, "no room for its");
    assert_true(is_same_model(f, "kept", "model"));
    snprintf(model.dir, sizeof model.dir, "%.200s/model", f->scratch.dir);
    assert_int_equal(scratch_count(&model), 4);
}

static void any_failing_call_fails_on_all_ranks_and_leaves_a_whole_model(void **state)
{
    struct fixture *f = *state;
    struct ranks ranks;
    struct scratch model;
    int failures = 0;
    save(f, "old", 1, 0);
    save(f, "model", 1, 0);
    start_from(f, NULL, 7);
    save(f, "new", 1, 0);
    snprintf(model.dir, sizeof model.dir, "%.200s/model", f->scratch.dir);
    for (int64_t k = 1;; k += 1 + k / 8) { /* every early call, then samples; their number varies */
        file_fail_at(k);
        try_save(f, "model", &ranks, 2);
        file_fail_at(0);
        assert_int_equal(scratch_count(&model), 4); /* nothing hidden is left */
        if (ranks.st[0] == ST_OK)
            break;
        failures++;
        assert_all_fail(&ranks, ST_IO, "");
        assert_true(is_same_model(f, "model", "old") || is_same_model(f, "model", "new"));
    }
    assert_true(failures > 10);
    assert_true(is_same_model(f, "model", "new"));
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(b17_saved_bytes_depend_neither_on_stage_nor_on_world_size),
        TEST(the_file_has_the_names_and_shapes_of_hugging_face),
        TEST(a_loaded_model_is_the_saved_one_to_the_bit),
        TEST(distilbert_is_saved_with_its_names_and_loaded_to_the_bit),
        TEST(config_json_says_the_family_and_its_constants),
        TEST(shards_larger_than_the_staging_buffer_are_whole),
        TEST(any_number_of_threads_makes_and_loads_the_same_weights),
        TEST(masters_in_halves_are_loaded_and_saved_to_the_bit),
        TEST(a_source_that_fails_in_another_thread_is_an_error_with_its_cause),
        TEST(at_stage_3_all_ranks_together_read_the_file_once),
        TEST(b34_frozen_tensors_are_saved_and_loaded_too),
        TEST(b04_loading_weights_leaves_a_fresh_optimizer),
        TEST(names_without_prefix_and_old_names_are_known),
        TEST(a_missing_head_stays_random_with_one_warning),
        TEST(other_missing_tensors_are_an_error_that_names_them),
        TEST(another_size_is_an_error_that_names_both),
        TEST(folders_without_a_usable_model_say_what_is_wrong),
        TEST(a_folder_that_cannot_be_made_fails_on_all_ranks),
        TEST(a_full_disk_fails_on_all_ranks_and_leaves_the_old_model),
        TEST(any_failing_call_fails_on_all_ranks_and_leaves_a_whole_model),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
