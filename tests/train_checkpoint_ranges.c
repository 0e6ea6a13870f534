/* Ranges of flat parameters out of a checkpoint: the same for any number of threads that read. */
#include <stdio.h>
#include <string.h>

#include "engine/base/file.h"
#include "engine/train/checkpoint_model.h"
#include "engine/train/checkpoint_ranges.h"
#include "engine/train/weights.h"
#include "tests/support/small_model.h"

enum { CHUNK = 400, READS = 40 }; /* bytes; some tensors are several chunks */

struct fixture {
    struct scratch scratch;
    uint64_t seed;
    struct model model;
    bool *frozen;
    char path[CHECKPOINT_PATH_BYTES];
    int64_t live_bytes;
};

/* Tells state, tensor and element. */
static float value(int state, int tensor, int64_t i)
{
    return (float)(1000000 * (state + 1) + 10000 * tensor) + (float)(i % 9973);
}

static int64_t numel_of(const struct checkpoint_tensor *t)
{
    int64_t numel = 1;
    for (int i = 0; i < t->dims; i++)
        numel *= t->shape[i];
    return numel;
}

static void write_checkpoint(struct fixture *f, const struct checkpoint_tensor *table)
{
    char temp[CHECKPOINT_PATH_BYTES];
    struct checkpoint_file files[2];
    const struct checkpoint_options o = {.level = 1, .chunk_bytes = CHUNK};
    float *x = NULL;
    assert_ok(checkpoint_begin(temp, f->scratch.dir, 1));
    for (int w = 0; w < 2; w++) { /* the second has the last third of each tensor */
        struct checkpoint_writer writer = {0};
        assert_ok(checkpoint_writer_open(&writer, temp, w, &o));
        for (int t = 0; t < f->model.tensor_count; t++) {
            int64_t numel = numel_of(&table[t]), cut = numel * 2 / 3;
            int64_t first = w == 0 ? 0 : cut, n = w == 0 ? cut : numel - cut;
            assert_ok(mem_alloc(&x, sizeof *x * (size_t)(n > 0 ? n : 1)));
            for (int s = 0; s < table[t].state_count && n > 0; s++) {
                for (int64_t i = 0; i < n; i++)
                    x[i] = value(s, t, first + i);
                assert_ok(checkpoint_write_range(&writer, table[t].states[s], table[t].name, first,
                                                 x, n));
            }
            mem_free(&x);
        }
        assert_ok(checkpoint_writer_close(&writer, &files[w]));
    }
    struct checkpoint_manifest m = {1, table, f->model.tensor_count, files, 2, NULL};
    assert_ok(checkpoint_publish(f->path, f->scratch.dir, temp, &m));
}

static int set_up(void **state)
{
    static struct fixture f;
    struct run_config config;
    struct checkpoint_tensor *table = NULL;
    memset(&f, 0, sizeof f);
    f.live_bytes = mem_live_bytes();
    f.seed = test_seed();
    scratch_make(&f.scratch);
    small_config(&config);
    snprintf(config.train.freeze, sizeof config.train.freeze, "bert.encoder.layer.0");
    assert_ok(model_open(&f.model, &config, DTYPE_F32));
    assert_ok(checkpoint_frozen_tensors(&f.frozen, &f.model));
    assert_ok(checkpoint_table(&table, &f.model, f.frozen));
    write_checkpoint(&f, table);
    mem_free(&table);
    *state = &f;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *f = *state;
    mem_free(&f->frozen);
    model_release(&f->model);
    scratch_remove(&f->scratch);
    return mem_live_bytes() == f->live_bytes ? 0 : -1;
}

/* ---- what is to be read ---------------------------------------------------------------------- */

struct expected {
    const struct fixture *f;
    int state;
    float *values;
};

static enum status expect_part(void *context, struct weights_part part)
{
    struct expected *e = context;
    for (int64_t i = 0; i < part.count; i++)
        e->values[part.range_first + i] = value(e->state, part.tensor, part.tensor_first + i);
    return ST_OK;
}

static enum status expect_trained_part(void *context, struct weights_part part)
{
    struct expected *e = context;
    return e->f->frozen[part.tensor] ? ST_OK : expect_part(context, part);
}

/* Gaps between tensors and behind the last one are zeros, as are moments of what is frozen. */
static void expect(struct expected *e, int unit, int64_t numel)
{
    assert_ok(mem_alloc(&e->values, sizeof *e->values * (size_t)numel));
    assert_ok(weights_each_part(&e->f->model, unit, 0, numel,
                                e->state == CHECKPOINT_MASTER ? expect_part : expect_trained_part,
                                e));
}

static void read_unit(struct fixture *f, struct range_reader *r, int unit, int state)
{
    enum { PADDING = 50 };
    const int64_t numel = model_unit_numel(&f->model, unit) + PADDING;
    struct expected e = {.f = f, .state = state};
    float *got = NULL;
    expect(&e, unit, numel);
    assert_ok(mem_alloc(&got, sizeof *got * (size_t)numel));
    for (int i = 0; i < READS; i++) {
        int64_t first = i == 0 ? 0 : (int64_t)(test_random(&f->seed) % (uint64_t)numel);
        int64_t left = numel - first;
        int64_t n = i == 0 ? numel : 1 + (int64_t)(test_random(&f->seed) % (uint64_t)left);
        memset(got, 0xFF, sizeof *got * (size_t)numel);
        assert_ok(range_reader_read(r, checkpoint_state_names[state], unit, got, first, n));
        assert_memory_equal(got, e.values + first, sizeof *got * (size_t)n);
        for (int64_t k = n; k < numel && k < n + 8; k++) /* nothing behind it is written */
            assert_true(got[k] != got[k]);
    }
    mem_free(&got);
    mem_free(&e.values);
}

static void b17_any_range_is_the_same_for_any_number_of_threads(void **state)
{
    static const int threads[] = {1, 2, 5, 16, 20 /* more than read */};
    struct fixture *f = *state;
    struct checkpoint c = {0};
    assert_ok(checkpoint_open(&c, f->path));
    for (size_t i = 0; i < sizeof threads / sizeof *threads; i++) {
        struct device *device = NULL;
        struct range_reader r = {0};
        assert_ok(device_open(&device, DEVICE_CPU, PRECISION_AUTO, 0, threads[i]));
        assert_ok(range_reader_open(&r, &f->model, &c, f->frozen, device));
        assert_int_equal(r.threads, threads[i] < 16 ? threads[i] : 16);
        for (int u = 0; u < f->model.unit_count; u++)
            for (int s = 0; s < CHECKPOINT_STATES; s++)
                read_unit(f, &r, u, s);
        range_reader_close(&r);
        device_close(&device);
    }
    checkpoint_close(&c);
}

static void a_damaged_chunk_is_an_error_that_names_it_whoever_reads_it(void **state)
{
    struct fixture *f = *state;
    for (int threads = 1; threads <= 16; threads *= 4) {
        struct device *device = NULL;
        struct range_reader r = {0};
        struct checkpoint c = {0};
        char path[CHECKPOINT_PATH_BYTES], byte = '!';
        float *got = NULL;
        int64_t numel = model_unit_numel(&f->model, 1);
        assert_ok(checkpoint_open(&c, f->path));
        assert_ok(path_join(path, sizeof path, f->path, "data-00000.tsr"));
        FILE *file =
            fopen(path, "r+b"); /* the first of its tensors that unit 1 has, in the middle */
        assert_non_null(file);
        const char *name =
            f->model.tensors[f->model.params[f->model.units[1].first_param].piece[0].tensor].name;
        const struct checkpoint_tensor *t = checkpoint_find(&c, name);
        int64_t at = c.chunks[c.stream_start[c.stream_of[t - c.tensors]] + 1].offset + 20;
        assert_int_equal(fseek(file, at, SEEK_SET), 0);
        assert_int_equal(fwrite(&byte, 1, 1, file), 1);
        fclose(file);
        assert_ok(device_open(&device, DEVICE_CPU, PRECISION_AUTO, 0, threads));
        assert_ok(range_reader_open(&r, &f->model, &c, f->frozen, device));
        assert_ok(mem_alloc(&got, sizeof *got * (size_t)numel));
        assert_fails(range_reader_read(&r, "master", 1, got, 0, numel), ST_CORRUPT, name);
        assert_non_null(strstr(status_message(), "data-00000.tsr"));
        status_clear();
        mem_free(&got);
        range_reader_close(&r);
        device_close(&device);
        checkpoint_close(&c);
    }
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(b17_any_range_is_the_same_for_any_number_of_threads),
        TEST(a_damaged_chunk_is_an_error_that_names_it_whoever_reads_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
