/*
 * Checkpoints for other ranks, to and from Hugging Face folders: nothing is lost, nothing that was
 * there is changed, and memory does not depend on the size of the model.
 */
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "engine/train/checkpoint_convert.h"
#include "engine/train/checkpoint_model.h"
#include "engine/train/cmd_checkpoint.h"
#include "engine/train/model_config.h"
#include "io/half.h"
#include "tests/support/run.h"

static struct scratch scratch;
static struct run_trace first, other;

static const char *at(const char *name)
{
    return scratch_at(&scratch, name);
}

static const struct made_questions questions = {
    .count = 40, .min_words = 5, .max_words = 60, .question_words = 4, .seed = 7};

static int make_data(void **state)
{
    struct made_questions few = questions;
    few.count = 4;
    few.seed = 8;
    return run_set_up(state, &scratch, &questions, &few);
}

static int64_t live_bytes;

static int begin(void **state)
{
    (void)state;
    live_bytes = mem_live_bytes();
    return 0;
}

static int release(void **state)
{
    (void)state;
    file_fail_at(0);
    run_release(&first);
    run_release(&other);
    return mem_live_bytes() == live_bytes ? 0 : -1;
}

/* ---- what tests start from ------------------------------------------------------------------- */

/* "base": a run of three ranks at stage 2, of three steps, with its checkpoint and its model. */
static struct run_config tiny(const char *out)
{
    struct run_config c =
        run_tiny_with(&scratch, (struct tiny_run){.ranks = 3, .stage = 2, .steps = 3});
    scratch_path(&scratch, c.output.dir, out);
    c.train.micro_batch = 4;
    c.train.tables = TABLES_ROWS;
    c.optim.schedule = SCHEDULE_CONSTANT;
    c.optim.warmup_steps = 1;
    return c;
}

static void train(struct run_trace *trace, const struct run_config *c)
{
    run_ok(trace, c, &(struct run_how){.loud = true});
}

static struct run_config base(void)
{
    struct run_config c = tiny("base");
    char path[600];
    c.checkpoint.every = 3;
    snprintf(path, sizeof path, "%.500s/checkpoints/step-00000003", c.output.dir);
    if (access(path, F_OK) != 0) {
        train(&first, &c);
        run_release(&first);
    }
    return c;
}

static const char base_step[] = "base/checkpoints/step-00000003";

static void start_at(char key[CONFIG_TEXT_BYTES], const char *path)
{
    assert_ok(path_join(key, CONFIG_TEXT_BYTES, "", path));
}

/* ---- the values of a checkpoint -------------------------------------------------------------- */

/* A sum over every bit of a whole tensor, whatever files it lies in. */
static uint64_t checksum(const struct checkpoint *c, const struct checkpoint_tensor *t,
                         const char *state)
{
    struct checkpoint_reader r = {0};
    float *x = NULL;
    uint64_t sum = 1469598103934665603u;
    assert_ok(mem_alloc(&x, sizeof *x * (size_t)t->numel));
    assert_ok(checkpoint_reader_open(&r, c));
    assert_ok(checkpoint_read_range(&r, state, t->name, 0, t->numel, x));
    for (int64_t i = 0; i < t->numel; i++) {
        uint32_t word;
        memcpy(&word, &x[i], sizeof word);
        sum = (sum ^ word) * 1099511628211u;
    }
    checkpoint_reader_close(&r);
    mem_free(&x);
    return sum;
}

/* Same tensors, states and training state. */
static void assert_same_state(const char *a, const char *b)
{
    struct checkpoint x = {0}, y = {0};
    assert_ok(checkpoint_open(&x, at(a)));
    assert_ok(checkpoint_open(&y, at(b)));
    assert_int_equal(x.step, y.step);
    assert_int_equal(x.tensor_count, y.tensor_count);
    for (int i = 0; i < x.tensor_count; i++) {
        const struct checkpoint_tensor *t = &x.tensors[i], *u = checkpoint_find(&y, t->name);
        assert_non_null(u);
        assert_int_equal(t->state_count, u->state_count);
        for (int k = 0; k < t->state_count; k++)
            assert_true(checksum(&x, t, t->states[k]) == checksum(&y, u, t->states[k]));
    }
    assert_true(json_equal(x.training, y.training));
    checkpoint_close(&x);
    checkpoint_close(&y);
}

/* ---- reshard --------------------------------------------------------------------------------- */

static void b17_b20_a_reshard_is_what_its_ranks_would_have_written(void **state)
{
    (void)state;
    static const int worlds[] = {1, 2, 5, 8};
    char made[CHECKPOINT_PATH_BYTES], dir[64], back[64], a[128], b[128];
    base();
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++) {
        snprintf(dir, sizeof dir, "reshard-%d", worlds[i]);
        snprintf(back, sizeof back, "reshard-%d-back", worlds[i]);
        snprintf(a, sizeof a, "%s/step-00000003", dir);
        assert_ok(checkpoint_reshard(made, at(base_step), at(dir), worlds[i]));
        assert_string_equal(made, at(a));
        struct checkpoint c = {0};
        assert_ok(checkpoint_open(&c, made));
        assert_int_equal(c.file_count, worlds[i]);
        assert_ok(checkpoint_verify(&c, NULL, NULL));
        checkpoint_close(&c);
        assert_same_state(base_step, a);
        /* And back: the files of the run itself, byte for byte. */
        assert_ok(checkpoint_reshard(made, at(a), at(back), 3));
        static const char *const files[] = {"data-00000.tsr", "data-00001.tsr", "data-00002.tsr",
                                            "manifest.json"};
        for (int k = 0; k < 4; k++) {
            snprintf(a, sizeof a, "%s/%s", base_step, files[k]);
            snprintf(b, sizeof b, "%s/step-00000003/%s", back, files[k]);
            assert_true(scratch_same(&scratch, a, b));
        }
    }
}

static void a_reshard_resumes_to_the_same_bits(void **state)
{
    (void)state;
    char made[CHECKPOINT_PATH_BYTES];
    base();
    assert_ok(checkpoint_reshard(made, at(base_step), at("resumed"), 5));
    struct run_config c = tiny("from-base");
    c.train.steps = 6;
    start_at(c.checkpoint.resume, at(base_step));
    train(&first, &c);
    scratch_path(&scratch, c.output.dir, "from-reshard");
    start_at(c.checkpoint.resume, made);
    train(&other, &c);
    run_same(&first, &other, "the resharded checkpoint");
}

static void b34_frozen_tensors_are_resharded_and_exported_too(void **state)
{
    (void)state;
    char made[CHECKPOINT_PATH_BYTES];
    struct run_config c = tiny("frozen");
    struct checkpoint_export how = {.dtype = "F32"};
    c.checkpoint.every = 3;
    snprintf(c.train.freeze, sizeof c.train.freeze, "bert.embeddings,bert.encoder.layer.0");
    train(&first, &c);
    assert_ok(checkpoint_reshard(made, at("frozen/checkpoints/step-00000003"), at("frozen-2"), 2));
    assert_same_state("frozen/checkpoints/step-00000003", "frozen-2/step-00000003");
    assert_ok(checkpoint_export(made, at("frozen-hf"), &how));
    assert_true(
        scratch_same(&scratch, "frozen/model/model.safetensors", "frozen-hf/model.safetensors"));
}

static void what_is_there_is_not_overwritten(void **state)
{
    (void)state;
    char made[CHECKPOINT_PATH_BYTES];
    struct checkpoint_import import = {.world_size = 1};
    base();
    assert_fails(checkpoint_reshard(made, at(base_step), at("base/checkpoints"), 2), ST_INVALID,
                 "step-00000003: is there already");
    assert_ok(checkpoint_import(made, at("base/model"), at("import-once"), &import));
    assert_fails(checkpoint_import(made, at("base/model"), at("import-once"), &import), ST_INVALID,
                 "step-00000000: is there already");
}

/* A checkpoint of one tensor, with or without a configuration. */
static void put_checkpoint(const char *dir, const char *tensor, int64_t numel, json_t *training)
{
    char temp[CHECKPOINT_PATH_BYTES];
    static float x[64];
    struct checkpoint_writer w = {0};
    struct checkpoint_file file;
    struct checkpoint_tensor t = {
        .name = tensor, .dims = 1, .shape = {numel}, .states = {"master"}, .state_count = 1};
    assert_ok(checkpoint_begin(temp, at(dir), 1));
    assert_ok(checkpoint_writer_open(&w, temp, 0, NULL));
    assert_ok(checkpoint_write_range(&w, "master", tensor, 0, x, numel));
    assert_ok(checkpoint_writer_close(&w, &file));
    struct checkpoint_manifest m = {1, &t, 1, &file, 1, training};
    assert_ok(checkpoint_publish(NULL, at(dir), temp, &m));
    json_decref(training);
}

static void a_checkpoint_whose_model_is_unknown_or_another_is_refused(void **state)
{
    (void)state;
    char made[CHECKPOINT_PATH_BYTES];
    struct checkpoint_export how = {.dtype = "F32"};
    put_checkpoint("bare", "w", 3, NULL);
    assert_fails(checkpoint_reshard(made, at("bare/step-00000001"), at("bare-2"), 2), ST_INVALID,
                 "its training state has no configuration");
    assert_fails(checkpoint_export(at("bare/step-00000001"), at("bare-hf"), &how), ST_INVALID,
                 "its training state has no configuration");
    put_checkpoint("odd", "w", 3, json_pack("{s:{s:s}}", "config", "model.hidden", "many"));
    assert_fails(checkpoint_reshard(made, at("odd/step-00000001"), at("odd-2"), 2), ST_INVALID,
                 "model.hidden: expected an integer");
    put_checkpoint(
        "few", "bert.embeddings.LayerNorm.bias", 3,
        json_pack("{s:{s:s, s:s}}", "config", "model.layers", "1", "model.hidden", "12"));
    assert_fails(checkpoint_reshard(made, at("few/step-00000001"), at("few-2"), 2), ST_INVALID,
                 "tensor bert.embeddings.LayerNorm.bias has shape (3), in this model (12)");
    put_checkpoint("one", "w", 3, json_pack("{s:{s:s}}", "config", "model.layers", "1"));
    assert_fails(checkpoint_reshard(made, at("one/step-00000001"), at("one-2"), 2), ST_INVALID,
                 "23 tensors of this model are missing: bert.embeddings.word_embeddings.weight, ");
    assert_int_not_equal(access(at("one-2"), F_OK), 0);
    assert_fails(checkpoint_reshard(made, at("nowhere"), at("one-2"), 2), ST_IO, "nowhere");
}

/* ---- export ---------------------------------------------------------------------------------- */

static void an_export_is_what_training_leaves_and_halves_are_rounded_once(void **state)
{
    (void)state;
    static const char *const files[] = {"model.safetensors", "config.json", "tokenizer_config.json",
                                        "vocab.txt"};
    static const char *const dtypes[] = {"F16", "BF16"};
    struct checkpoint_export how = {.dtype = "F32"};
    char a[128], b[128];
    base();
    assert_ok(checkpoint_export(at(base_step), at("deep/hf"), &how)); /* folders are made */
    for (int i = 0; i < 4; i++) {
        snprintf(a, sizeof a, "base/model/%s", files[i]);
        snprintf(b, sizeof b, "deep/hf/%s", files[i]);
        assert_true(scratch_same(&scratch, a, b));
    }
    for (int kind = HALF_F16; kind <= HALF_BF16; kind++) {
        struct safetensors full = {0}, half = {0};
        static float x[8192], y[8192];
        static uint16_t narrow[8192];
        how.dtype = dtypes[kind];
        assert_ok(checkpoint_export(at(base_step), at(dtypes[kind]), &how));
        snprintf(a, sizeof a, "%s/model.safetensors", dtypes[kind]);
        assert_ok(safetensors_open(&full, at("deep/hf/model.safetensors")));
        assert_ok(safetensors_open(&half, at(a)));
        assert_int_equal(full.count, half.count);
        for (int i = 0; i < full.count; i++) {
            const struct safetensors_tensor *t = &full.tensors[i];
            const struct safetensors_tensor *u = safetensors_find(&half, t->name);
            assert_string_equal(u->dtype, dtypes[kind]);
            assert_ok(safetensors_read(&full, t, 0, t->numel, x));
            assert_ok(safetensors_read(&half, u, 0, t->numel, y));
            assert_int_equal(half_narrow(narrow, x, t->numel, kind), -1);
            half_widen(x, narrow, 0, kind);
            for (int64_t k = 0; k < t->numel; k++) {
                float want;
                half_widen(&want, &narrow[k], 1, kind);
                assert_true(want == y[k]);
            }
        }
        safetensors_close(&full);
        safetensors_close(&half);
        struct file_text config = {0};
        snprintf(a, sizeof a, "%s/config.json", dtypes[kind]);
        assert_ok(file_read(&config, at(a)));
        assert_non_null(strstr(config.data, kind == HALF_F16 ? "\"float16\"" : "\"bfloat16\""));
        mem_free(&config.data);
    }
}

static void b32_an_export_has_every_tensor_of_the_model_and_no_other(void **state)
{
    (void)state;
    struct run_config c = base();
    struct model m = {0};
    struct safetensors st = {0};
    struct checkpoint_export how = {.dtype = "F32"};
    assert_ok(checkpoint_export(at(base_step), at("whole"), &how));
    assert_ok(safetensors_open(&st, at("whole/model.safetensors")));
    assert_ok(model_open(&m, &c, DTYPE_F32));
    assert_int_equal(st.count, m.tensor_count);
    for (int i = 0; i < m.tensor_count; i++)
        assert_non_null(safetensors_find(&st, m.tensors[i].name));
    model_release(&m);
    safetensors_close(&st);
}

static void an_export_replaces_nothing_but_an_export_and_only_if_told(void **state)
{
    (void)state;
    struct checkpoint_export how = {.dtype = "F32"}, over = {.dtype = "BF16", .overwrite = true};
    char path[512];
    base();
    assert_ok(file_make_dirs(at("target")));
    assert_ok(checkpoint_export(at(base_step), at("target"), &how)); /* empty: fine */
    assert_fails(checkpoint_export(at(base_step), at("target"), &how), ST_INVALID,
                 "target: is there already; --overwrite replaces it");
    assert_ok(checkpoint_export(at(base_step), at("target/"), &over));
    assert_false(
        scratch_same(&scratch, "target/model.safetensors", "base/model/model.safetensors"));
    scratch_put(&scratch, path, "target/notes.txt", "mine", 4);
    assert_fails(checkpoint_export(at(base_step), at("target"), &over), ST_INVALID,
                 "target: holds notes.txt, which an export does not write");
    assert_int_equal(access(path, F_OK), 0);
    scratch_put(&scratch, path, "a-file", "x", 1);
    assert_fails(checkpoint_export(at(base_step), at("a-file"), &over), ST_INVALID,
                 "something else than a folder");
}

static void an_export_wants_the_vocabulary_of_the_run(void **state)
{
    (void)state;
    struct checkpoint_export how = {.dtype = "F32"};
    struct file_text text = {0};
    char path[512];
    base();
    assert_ok(file_read(&text, at("vocab.txt")));
    assert_int_equal(rename(at("vocab.txt"), at("moved.txt")), 0);
    assert_fails(checkpoint_export(at(base_step), at("no-vocab"), &how), ST_INVALID,
                 "vocab.txt, which cannot be read here (No such file or directory): give it with "
                 "--vocab FILE");
    text.data[text.bytes - 2] = 'x'; /* for the last digit */
    how.vocab = scratch_put(&scratch, path, "altered.txt", text.data, text.bytes);
    assert_fails(checkpoint_export(at(base_step), at("no-vocab"), &how), ST_INVALID,
                 "altered.txt: is not the vocabulary that ");
    how.vocab = at("moved.txt");
    assert_ok(checkpoint_export(at(base_step), at("with-vocab"), &how));
    assert_int_equal(rename(at("moved.txt"), at("vocab.txt")), 0);
    assert_int_not_equal(access(at("no-vocab"), F_OK), 0);
    mem_free(&text.data);
}

/* The model of a folder, with one value of a tensor set. */
static void put_value(const char *name, const char *tensor, float value)
{
    struct safetensors st = {0};
    char path[512];
    assert_ok(safetensors_open(&st, scratch_path(&scratch, path, name)));
    const struct safetensors_tensor *t = safetensors_find(&st, tensor);
    assert_non_null(t);
    int fd = open(path, O_WRONLY);
    assert_int_equal(pwrite(fd, &value, 4, (off_t)t->first_byte + 4 * 5), 4);
    close(fd);
    safetensors_close(&st);
}

static void a_value_that_fp16_has_no_room_for_is_named_and_nothing_is_left(void **state)
{
    (void)state;
    char made[CHECKPOINT_PATH_BYTES];
    struct checkpoint_import import = {.world_size = 2};
    struct checkpoint_export how = {.dtype = "F32"};
    struct scratch folder;
    base();
    assert_ok(checkpoint_export(at(base_step), at("large"), &how));
    put_value("large/model.safetensors", "bert.encoder.layer.1.output.LayerNorm.weight", 1e5f);
    assert_ok(checkpoint_import(made, at("large"), at("large-checkpoint"), &import));
    how.dtype = "F16";
    snprintf(folder.dir, sizeof folder.dir, "%.250s", at("large-out"));
    assert_ok(file_make_dirs(folder.dir));
    assert_fails(checkpoint_export(made, at("large-out/hf"), &how), ST_INVALID,
                 "tensor bert.encoder.layer.1.output.LayerNorm.weight, element 5: 100000 is beyond "
                 "the largest F16");
    assert_int_equal(scratch_count(&folder), 0);
    how.dtype = "BF16";
    assert_ok(checkpoint_export(made, at("large-out/hf"), &how));
    assert_int_equal(scratch_count(&folder), 1);
}

/* The library's, which a file system without an exchange refuses. */
static bool no_exchange;

int renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned flags)
{
    if (no_exchange) {
        errno = EINVAL;
        return -1;
    }
    return (int)syscall(SYS_renameat2, from_folder, from, to_folder, to, flags);
}

static int fail_every_call(void)
{
    struct checkpoint_export over = {.dtype = "BF16", .overwrite = true};
    struct scratch folder;
    snprintf(folder.dir, sizeof folder.dir, "%.250s", at("faults"));
    for (int64_t k = 1;; k++) {
        file_fail_at(k);
        enum status st = checkpoint_export(at(base_step), at("faults/hf"), &over);
        file_fail_at(0);
        assert_int_equal(scratch_count(&folder), 2); /* nothing hidden is left */
        bool is_old =
            scratch_same(&scratch, "faults/old/model.safetensors", "faults/hf/model.safetensors");
        if (st == ST_OK) {
            assert_false(is_old);
            return (int)k - 1;
        }
        if (!is_old) /* only its name was not flushed */
            assert_ok(checkpoint_export(at(base_step), at("faults/hf"),
                                        &(struct checkpoint_export){"F32", NULL, true}));
    }
}

static void any_failing_call_leaves_what_was_there(void **state)
{
    (void)state;
    struct checkpoint_export how = {.dtype = "F32"}, again = {.dtype = "F32", .overwrite = true};
    base();
    assert_ok(checkpoint_export(at(base_step), at("faults/old"), &how));
    assert_ok(checkpoint_export(at(base_step), at("faults/hf"), &how));
    int at_once = fail_every_call();
    assert_ok(checkpoint_export(at(base_step), at("faults/hf"), &again));
    no_exchange = true;
    int in_two = fail_every_call();
    no_exchange = false;
    assert_true(at_once > 40 && in_two > at_once); /* the first file system has an exchange */
}

/* ---- import ---------------------------------------------------------------------------------- */

static struct {
    int count[WEIGHTS_FATES];
    char names[4096];
} noted;

static void note(void *context, enum weights_fate fate, const char *name)
{
    static const char *const words[] = {"missing", "random", "unused"};
    (void)context;
    size_t used = strlen(noted.names);
    noted.count[fate]++;
    snprintf(noted.names + used, sizeof noted.names - used, "%s %s\n", words[fate], name);
}

static const struct checkpoint_import import_noting = {.world_size = 2, .seed = 5, .note = note};

static void an_imported_checkpoint_starts_what_its_folder_starts(void **state)
{
    (void)state;
    char made[CHECKPOINT_PATH_BYTES];
    struct run_config c = tiny("from-folder");
    struct checkpoint_export how = {.dtype = "F32"};
    base();
    assert_ok(checkpoint_export(at(base_step), at("start"), &how));
    assert_ok(checkpoint_import(made, at("start"), at("start-checkpoint"), &import_noting));
    assert_string_equal(noted.names, "");
    start_at(c.model.init_from, at("start"));
    c.train.seed = 99; /* data, seed and dropout are the run's */
    c.model.hidden_dropout = 0.2;
    train(&first, &c);
    c.model.init_from[0] = '\0';
    start_at(c.checkpoint.resume, made);
    for (int ranks = 3; ranks > 0; ranks -= 2) { /* the same global batch */
        scratch_path(&scratch, c.output.dir, ranks == 3 ? "from-import" : "from-import-1");
        c.train.ranks = ranks;
        c.train.micro_batch = 12 / ranks;
        train(&other, &c);
        assert_int_equal(other.steps, 3);
        if (ranks == 3)
            run_same(&first, &other, "--resume of the import");
        run_release(&other);
    }
    c.checkpoint.resume[0] = '\0';
    c.train.ranks = 3;
    c.train.micro_batch = 4;
    scratch_path(&scratch, c.output.dir, "from-checkpoint");
    start_at(c.model.init_from, made);
    train(&other, &c);
    run_same(&first, &other, "init_from the import");
    run_release(&other);
    /* From the weights of a run's checkpoint: a fresh optimizer, at step 0. */
    scratch_path(&scratch, c.output.dir, "from-weights");
    start_at(c.model.init_from, at(base_step));
    train(&other, &c);
    run_same(&first, &other, "init_from a run's checkpoint");
}

static void an_import_of_another_model_is_refused_on_resume(void **state)
{
    (void)state;
    char made[CHECKPOINT_PATH_BYTES];
    struct run_config c = tiny("other-model");
    base();
    assert_ok(checkpoint_import(made, at("base/model"), at("import-other"), &import_noting));
    c.model.heads = 2; /* shows in no shape */
    start_at(c.checkpoint.resume, made);
    run_go(&first, &c, &(struct run_how){0});
    assert_int_equal(first.st, ST_INVALID);
    assert_non_null(strstr(first.message, "model.heads is \"3\" there and \"2\" here"));
    run_release(&first);
    c.checkpoint.resume[0] = '\0';
    start_at(c.model.init_from, made);
    run_go(&first, &c, &(struct run_how){0});
    assert_int_equal(first.st, ST_INVALID);
    assert_non_null(strstr(first.message, "model.heads is 3 there and 2 here"));
}

/* A Hugging Face folder made from "base/model", with other names, in @files files. */
struct rewriting {
    const char *dir;
    int files;
    const char *(*rename)(char out[256], const char *name); /* NULL: as they are */
    bool extras; /* a pooler, a head whose table is the word table, an integer buffer */
};

enum { MAX_TENSORS = 96, MAX_NUMEL = 4096 };

static void put_extras(const struct safetensors_writer *w, struct safetensors_tensor *table,
                       int *count)
{
    (void)w;
    table[(*count)++] = (struct safetensors_tensor){
        .name = "bert.pooler.dense.weight", .dims = 2, .shape = {24, 24}};
    table[(*count)++] = (struct safetensors_tensor){
        .name = "cls.predictions.decoder.weight", .dims = 2, .shape = {RUN_VOCAB, 24}};
    table[(*count)++] = (struct safetensors_tensor){
        .name = "bert.embeddings.position_ids", .dtype = "BF16", .dims = 2, .shape = {1, 64}};
}

static void put_index_line(char *index, size_t bytes, const char *tensor, const char *file)
{
    size_t used = strlen(index);
    snprintf(index + used, bytes - used, "%s\"%s\": \"%s\"", used > 20 ? ", " : "", tensor, file);
}

static void rewrite(const struct rewriting *r)
{
    static char names[MAX_TENSORS][256], index[16384];
    static float values[MAX_NUMEL];
    struct safetensors from = {0};
    char dir[512], path[512];
    assert_ok(file_make_dirs(scratch_path(&scratch, dir, r->dir)));
    assert_ok(safetensors_open(&from, at("base/model/model.safetensors")));
    snprintf(index, sizeof index, "{\"weight_map\": {");
    for (int file = 0; file < r->files; file++) {
        struct safetensors_tensor table[MAX_TENSORS] = {0};
        const struct safetensors_tensor *sources[MAX_TENSORS];
        struct safetensors_writer w = {0};
        char name[64] = "model.safetensors";
        int count = 0;
        if (r->files > 1)
            snprintf(name, sizeof name, "model-%05d-of-%05d.safetensors", file + 1, r->files);
        for (int i = file; i < from.count; i += r->files) {
            const char *now = r->rename != NULL ? r->rename(names[i], from.tensors[i].name)
                                                : from.tensors[i].name;
            if (now == NULL)
                continue;
            table[count] = from.tensors[i];
            table[count].name = now;
            sources[count++] = &from.tensors[i];
        }
        int copied = count;
        if (r->extras && file == 0)
            put_extras(&w, table, &count);
        assert_ok(safetensors_create(&w, dir, name, table, count));
        for (int i = 0; i < copied; i++) {
            assert_ok(safetensors_read(&from, sources[i], 0, sources[i]->numel, values));
            assert_ok(safetensors_write_range(&w, i, 0, sources[i]->numel, values));
        }
        for (int i = 0; i < count; i++)
            put_index_line(index, sizeof index, table[i].name, name);
        assert_ok(safetensors_publish(&w));
        safetensors_writer_close(&w);
    }
    snprintf(index + strlen(index), sizeof index - strlen(index), "}}");
    snprintf(path, sizeof path, "%.300s/model.safetensors.index.json", r->dir);
    if (r->files > 1)
        scratch_put(&scratch, dir, path, index, strlen(index));
    for (int i = 0; i < 3; i++) {
        static const char *const small[] = {"config.json", "tokenizer_config.json", "vocab.txt"};
        struct file_text text = {0};
        snprintf(path, sizeof path, "base/model/%s", small[i]);
        assert_ok(file_read(&text, at(path)));
        snprintf(path, sizeof path, "%.300s/%s", r->dir, small[i]);
        scratch_put(&scratch, dir, path, text.data, text.bytes);
        mem_free(&text.data);
    }
    safetensors_close(&from);
}

/* Neither "bert." in front, nor the names of LayerNorm as they are now. */
static const char *old_names(char out[256], const char *name)
{
    if (strncmp(name, "bert.", 5) == 0)
        name += 5;
    const char *norm = strstr(name, "LayerNorm.");
    int length = norm == NULL ? (int)strlen(name) : (int)(norm - name) + 10;
    snprintf(out, 256, "%.*s%s", length, name,
             norm == NULL                       ? ""
             : strcmp(norm + 10, "weight") == 0 ? "gamma"
                                                : "beta");
    return out;
}

static const char *headless(char out[256], const char *name)
{
    return strncmp(name, "qa_outputs.", 11) == 0 ? NULL : old_names(out, name);
}

static const char *without_two(char out[256], const char *name)
{
    snprintf(out, 256, "%s", name);
    return strstr(name, "layer.1.attention.self.key") != NULL ? NULL : out;
}

static void import_ok(const char *from, const char *dir)
{
    char made[CHECKPOINT_PATH_BYTES];
    memset(&noted, 0, sizeof noted);
    assert_ok(checkpoint_import(made, at(from), at(dir), &import_noting));
}

static void b32_b35_names_of_all_times_files_and_extras_give_the_same_checkpoint(void **state)
{
    (void)state;
    static const struct rewriting all[] = {{"plain", 1, NULL, false},
                                           {"sharded", 3, NULL, false},
                                           {"old", 1, old_names, false},
                                           {"old-sharded", 2, old_names, true}};
    char dir[64], a[128], b[128];
    base();
    import_ok("base/model", "import-base");
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        rewrite(&all[i]);
        snprintf(dir, sizeof dir, "import-%s", all[i].dir);
        import_ok(all[i].dir, dir);
        for (int k = 0; k < 2; k++) {
            snprintf(a, sizeof a, "import-base/step-00000000/data-0000%d.tsr", k);
            snprintf(b, sizeof b, "%s/step-00000000/data-0000%d.tsr", dir, k);
            assert_true(scratch_same(&scratch, a, b));
        }
        assert_int_equal(noted.count[WEIGHTS_UNUSED], all[i].extras ? 3 : 0);
        assert_int_equal(noted.count[WEIGHTS_RANDOM] + noted.count[WEIGHTS_MISSING], 0);
    }
    /* The tied table and the buffer are named; the model has one word table, read by its name. */
    assert_string_equal(noted.names, "unused bert.pooler.dense.weight\n"
                                     "unused cls.predictions.decoder.weight\n"
                                     "unused bert.embeddings.position_ids\n");
    /* Training reads the same folder: all ranks, from several files. */
    struct run_config c = tiny("from-sharded");
    c.train.zero_stage = 3;
    start_at(c.model.init_from, at("base/model"));
    train(&first, &c);
    start_at(c.model.init_from, at("old-sharded"));
    train(&other, &c);
    run_same(&first, &other, "a folder of two files");
}

static void a_missing_head_is_random_by_the_seed_and_other_tensors_have_to_be_there(void **state)
{
    (void)state;
    char made[CHECKPOINT_PATH_BYTES];
    struct checkpoint x = {0};
    struct checkpoint_reader r = {0};
    float *head, want[8192];
    base();
    rewrite(&(struct rewriting){"headless", 1, headless, false});
    import_ok("headless", "import-headless");
    assert_string_equal(noted.names, "random qa_outputs.weight\nrandom qa_outputs.bias\n");
    struct run_config c = tiny("x");
    struct model m = {0};
    assert_ok(model_open(&m, &c, DTYPE_F32));
    int unit = m.unit_count - 1;
    assert_true(model_unit_numel(&m, unit) <= 8192);
    model_init_range(&m, unit, want, 0, model_unit_numel(&m, unit), import_noting.seed);
    int param = 0;
    while (strcmp(m.params[param].name, "qa_outputs.weight") != 0)
        param++;
    assert_ok(mem_alloc(&head, sizeof *head * 48));
    assert_ok(checkpoint_open(&x, at("import-headless/step-00000000")));
    assert_ok(checkpoint_reader_open(&r, &x));
    assert_ok(checkpoint_read_range(&r, "master", "qa_outputs.weight", 0, 48, head));
    assert_memory_equal(head, want + m.param_offset[param], sizeof *head * 48);
    checkpoint_reader_close(&r);
    checkpoint_close(&x);
    mem_free(&head);
    model_release(&m);
    rewrite(&(struct rewriting){"less", 2, without_two, true});
    memset(&noted, 0, sizeof noted);
    assert_fails(checkpoint_import(made, at("less"), at("import-less"), &import_noting), ST_INVALID,
                 "2 tensors of the model are missing: "
                 "bert.encoder.layer.1.attention.self.key.weight, "
                 "bert.encoder.layer.1.attention.self.key.bias");
    assert_int_equal(noted.count[WEIGHTS_MISSING], 2);
    assert_int_equal(noted.count[WEIGHTS_UNUSED], 3);
    assert_int_not_equal(access(at("import-less"), F_OK), 0);
}

static void a_wrong_shape_names_both_and_other_formats_what_to_do(void **state)
{
    (void)state;
    char made[CHECKPOINT_PATH_BYTES], path[512];
    struct file_text text = {0};
    base();
    rewrite(&(struct rewriting){"wrong", 1, NULL, false});
    assert_ok(file_read(&text, at("wrong/config.json")));
    char *size = strstr(text.data, "\"intermediate_size\": 40");
    assert_non_null(size);
    memcpy(size, "\"intermediate_size\": 44", 23);
    scratch_put(&scratch, path, "wrong/config.json", text.data, text.bytes);
    mem_free(&text.data);
    assert_fails(checkpoint_import(made, at("wrong"), at("import-wrong"), &import_noting),
                 ST_INVALID,
                 "tensor bert.encoder.layer.0.intermediate.dense.weight has shape (40, 24), the "
                 "model of this configuration has (44, 24)");
    assert_int_equal(unlink(at("wrong/model.safetensors")), 0);
    scratch_put(&scratch, path, "wrong/pytorch_model.bin", "x", 1);
    assert_fails(checkpoint_import(made, at("wrong"), at("import-wrong"), &import_noting),
                 ST_UNSUPPORTED, "pytorch_model.bin: this format is not read");
    assert_int_equal(unlink(at("wrong/config.json")), 0);
    assert_fails(checkpoint_import(made, at("wrong"), at("import-wrong"), &import_noting), ST_IO,
                 "config.json");
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* A folder whose weights were never written: 38 MB of zeros. */
static int64_t put_large_model(void)
{
    struct run_config c = tiny("x");
    struct safetensors_tensor *table = NULL;
    struct safetensors_writer w = {0};
    struct model m = {0};
    char path[512];
    c.model.hidden = 512;
    c.model.heads = 8;
    c.model.ffn = 4 * 512;
    c.model.vocab_size = 5;
    assert_ok(file_make_dirs(at("large-model")));
    assert_ok(model_open(&m, &c, DTYPE_F32));
    assert_ok(mem_alloc(&table, sizeof *table * (size_t)m.tensor_count));
    for (int i = 0; i < m.tensor_count; i++)
        table[i] =
            (struct safetensors_tensor){.name = m.tensors[i].name,
                                        .dims = m.tensors[i].dims,
                                        .shape = {m.tensors[i].shape[0], m.tensors[i].shape[1]}};
    assert_ok(
        safetensors_create(&w, at("large-model"), "model.safetensors", table, m.tensor_count));
    assert_ok(safetensors_publish(&w));
    safetensors_writer_close(&w);
    int64_t numel = model_total_numel(&m);
    mem_free(&table);
    model_release(&m);
    struct vocab vocab = {0};
    assert_ok(vocab_load(
        &vocab, scratch_put(&scratch, path, "few.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n", 26)));
    assert_ok(model_config_write(&c, &vocab, "F32", at("large-model")));
    vocab_release(&vocab);
    return numel;
}

/* The most that was allocated beyond what is allocated now. */
static int64_t peak(void)
{
    int64_t most = mem_peak_bytes() - mem_live_bytes();
    mem_peak_reset();
    return most;
}

static void b75_memory_does_not_grow_with_the_model(void **state)
{
    (void)state;
    char made[CHECKPOINT_PATH_BYTES], again[CHECKPOINT_PATH_BYTES];
    struct checkpoint_export how = {.dtype = "BF16"};
    struct checkpoint c = {0};
    const int64_t tables = 1 << 20, bound = CHECKPOINT_CONVERT_BYTES + tables;
    int64_t values = 3 * 4 * put_large_model(); /* master, m and v */
    assert_true(values > 2 * bound);
    mem_peak_reset();
    assert_ok(checkpoint_import(made, at("large-model"), at("large-import"), &import_noting));
    assert_in_range(peak(), 1, bound);
    assert_ok(checkpoint_reshard(again, made, at("large-reshard"), 3));
    assert_in_range(peak(), 1, bound);
    assert_ok(checkpoint_export(again, at("large-export"), &how));
    assert_in_range(peak(), 1, bound);
    assert_ok(checkpoint_open(&c, again));
    assert_ok(checkpoint_verify(&c, NULL, NULL));
    assert_in_range(peak(), 1, bound);
    checkpoint_close(&c);
    assert_ok(checkpoint_diff((char *[]){made, again}));
    assert_in_range(peak(), 1, bound);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, begin, release)
    const struct CMUnitTest tests[] = {
        TEST(b17_b20_a_reshard_is_what_its_ranks_would_have_written),
        TEST(a_reshard_resumes_to_the_same_bits),
        TEST(b34_frozen_tensors_are_resharded_and_exported_too),
        TEST(what_is_there_is_not_overwritten),
        TEST(a_checkpoint_whose_model_is_unknown_or_another_is_refused),
        TEST(an_export_is_what_training_leaves_and_halves_are_rounded_once),
        TEST(b32_an_export_has_every_tensor_of_the_model_and_no_other),
        TEST(an_export_replaces_nothing_but_an_export_and_only_if_told),
        TEST(an_export_wants_the_vocabulary_of_the_run),
        TEST(a_value_that_fp16_has_no_room_for_is_named_and_nothing_is_left),
        TEST(any_failing_call_leaves_what_was_there),
        TEST(an_imported_checkpoint_starts_what_its_folder_starts),
        TEST(an_import_of_another_model_is_refused_on_resume),
        TEST(b32_b35_names_of_all_times_files_and_extras_give_the_same_checkpoint),
        TEST(a_missing_head_is_random_by_the_seed_and_other_tensors_have_to_be_there),
        TEST(a_wrong_shape_names_both_and_other_formats_what_to_do),
        TEST(b75_memory_does_not_grow_with_the_model),
    };
    return cmocka_run_group_tests(tests, make_data, run_tear_down);
}
