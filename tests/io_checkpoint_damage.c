/* Damaged and hostile checkpoints: a named error, never a crash, never a wrong value. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "engine/base/file.h"
#include "tests/support/small_checkpoint.h"

/* ---- damage ---------------------------------------------------------------------------------- */

/* Not truncated first: some file systems then flush at close, and this is called very often. */
static void put_bytes(const char *path, const void *data, size_t bytes)
{
    int fd = open(path, O_WRONLY | O_CREAT, 0666);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, data, bytes, 0), (ssize_t)bytes);
    assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
    close(fd);
}

/* Opens, reads all and verifies. What is read is right or an error. True if anything complained. */
static bool notices(struct small_test *f, const char *path, const struct small *s)
{
    struct checkpoint c = {0};
    enum status st = checkpoint_open(&c, path);
    bool noticed = st != ST_OK;
    assert_true(st == ST_OK || st == ST_CORRUPT || st == ST_IO);
    if (st == ST_OK) {
        noticed = !small_same_values(f, &c, s);
        st = checkpoint_verify(&c, NULL, NULL);
        assert_true(st == ST_OK || st == ST_CORRUPT);
        noticed = noticed || st != ST_OK;
    }
    if (noticed)
        assert_true(strstr(status_message(), "step-00000001") != NULL);
    checkpoint_close(&c);
    return noticed;
}

/* The smallest that has everything: two tensors, two files. */
static void make_tiny(struct small_test *f, struct small *s)
{
    static struct small_piece pieces[SMALL_PIECES];
    small_make(f, s);
    s->tensors[0].shape[0] = 2;
    s->tensors[0].numel = 60;
    for (int k = 0; k < SMALL_STATES; k++)
        memset(s->values[0][k], 0, 30 * sizeof(float)); /* some of it is compressed */
    int count = small_cut(f, s, pieces, SMALL_NUMEL);
    assert_ok(small_save(s, &(struct small_save){f->scratch.dir, 1, 2, NULL, pieces, count, NULL}));
}

static const char *const tiny_files[] = {"manifest.json", "data-00000.tsr", "data-00001.tsr"};

static void every_flipped_byte_is_noticed(void **state)
{
    struct small_test *f = *state;
    static struct small s;
    char dir[512], path[512];
    make_tiny(f, &s);
    small_step_path(f, dir, 1);
    for (int i = 0; i < 3; i++) {
        struct file_text text = {0};
        snprintf(path, sizeof path, "%.400s/%s", dir, tiny_files[i]);
        assert_ok(file_read(&text, path));
        int fd = open(path, O_WRONLY);
        assert_true(fd >= 0);
        for (size_t at = 0; at < text.bytes; at++) {
            static const int flips[] = {0x01, 0x80, 0xFF, 0x20};
            char byte = (char)(text.data[at] ^ flips[small_below(f, 4)]);
            assert_int_equal(pwrite(fd, &byte, 1, (off_t)at), 1);
            if (!notices(f, dir, &s))
                fail_msg("%s: byte %zu of %zu flipped, not noticed", path, at, text.bytes);
            assert_int_equal(pwrite(fd, text.data + at, 1, (off_t)at), 1);
        }
        close(fd);
        mem_free(&text.data);
    }
    assert_false(notices(f, dir, &s));
}

static void every_length_of_a_cut_file_is_noticed(void **state)
{
    struct small_test *f = *state;
    static struct small s;
    char dir[512], path[512];
    make_tiny(f, &s);
    small_step_path(f, dir, 1);
    for (int i = 0; i < 3; i++) {
        struct file_text text = {0};
        snprintf(path, sizeof path, "%.400s/%s", dir, tiny_files[i]);
        assert_ok(file_read(&text, path));
        for (size_t bytes = 0; bytes < text.bytes; bytes++) {
            struct checkpoint c = {0};
            put_bytes(path, text.data, bytes);
            assert_int_equal(checkpoint_open(&c, dir), ST_CORRUPT);
            checkpoint_close(&c);
        }
        put_bytes(path, text.data, text.bytes);
        mem_free(&text.data);
    }
    assert_false(notices(f, dir, &s));
}

static void random_damage_to_large_files_is_noticed_where_it_is(void **state)
{
    struct small_test *f = *state;
    static struct small s;
    static struct small_piece pieces[SMALL_PIECES];
    char dir[512], path[512];
    small_make(f, &s);
    int count = small_cut(f, &s, pieces, 700);
    assert_ok(
        small_save(&s, &(struct small_save){f->scratch.dir, 1, 3, NULL, pieces, count, NULL}));
    small_step_path(f, dir, 1);
    for (int i = 0; i < 150; i++) {
        snprintf(path, sizeof path, "%.400s/data-%05d.tsr", dir, i % 3);
        struct stat info;
        int fd = open(path, O_RDWR);
        assert_true(fd >= 0 && fstat(fd, &info) == 0);
        off_t at = (off_t)small_below(f, info.st_size);
        unsigned char old[8], new[8];
        ssize_t n = pread(fd, old, 1 + (size_t)small_below(f, 8), at);
        for (ssize_t k = 0; k < n; k++)
            new[k] = (unsigned char)(old[k] ^ (1 + small_below(f, 255)));
        assert_int_equal(pwrite(fd, new, (size_t)n, at), n);
        assert_true(notices(f, dir, &s));
        assert_int_equal(pwrite(fd, old, (size_t)n, at), n);
        close(fd);
    }
    assert_false(notices(f, dir, &s));
}

static void swapped_missing_and_foreign_files_are_named(void **state)
{
    struct small_test *f = *state;
    static struct small s;
    struct checkpoint c = {0};
    char dir[512], a[512], b[512], other[512], kept[512];
    make_tiny(f, &s);
    assert_ok(small_save_plain(f, &s, 2));
    small_step_path(f, dir, 1);
    snprintf(a, sizeof a, "%.400s/data-00000.tsr", dir);
    snprintf(b, sizeof b, "%.400s/data-00001.tsr", dir);
    scratch_path(&f->scratch, kept, "kept");
    assert_int_equal(rename(a, kept), 0);
    assert_fails(checkpoint_open(&c, dir), ST_CORRUPT, "data-00000.tsr: is missing");
    checkpoint_close(&c);
    assert_int_equal(mkdir(a, 0777), 0);
    assert_fails(checkpoint_open(&c, dir), ST_CORRUPT, "data-00000.tsr: is not a regular file");
    checkpoint_close(&c);
    assert_int_equal(rmdir(a), 0);
    assert_int_equal(rename(b, a), 0);
    assert_int_equal(rename(kept, b), 0);
    assert_int_equal(checkpoint_open(&c, dir), ST_CORRUPT); /* sizes or indexes differ */
    assert_message_has("data-0000", __FILE__, __LINE__);
    checkpoint_close(&c);
    assert_int_equal(rename(a, kept), 0);
    assert_int_equal(rename(b, a), 0);
    assert_int_equal(rename(kept, b), 0);
    assert_false(notices(f, dir, &s));
    /* The same file of another save of the same tensors: as long, and whole in itself. */
    struct small *changed = &s;
    changed->values[1][0][0] = 3.0f;
    struct small_piece pieces[] = {{1, 0, 0, 1}};
    char temp[CHECKPOINT_PATH_BYTES];
    struct checkpoint_file file[2];
    for (int i = 0; i < 2; i++) {
        struct checkpoint_writer w = {0};
        float x = (float)i;
        struct checkpoint_tensor t = {
            .name = "x", .dims = 0, .states = {"master"}, .state_count = 1};
        assert_ok(checkpoint_begin(temp, f->scratch.dir, 10 + i));
        assert_ok(checkpoint_writer_open(&w, temp, 0, NULL));
        assert_ok(checkpoint_write_range(&w, "master", "x", pieces[0].first, &x, 1));
        assert_ok(checkpoint_writer_close(&w, &file[i]));
        struct checkpoint_manifest m = {10 + i, &t, 1, &file[i], 1, NULL};
        assert_ok(checkpoint_publish(NULL, f->scratch.dir, temp, &m));
    }
    assert_int_equal(file[0].bytes, file[1].bytes);
    snprintf(a, sizeof a, "%.400s/data-00000.tsr", small_step_path(f, dir, 10));
    snprintf(b, sizeof b, "%.400s/data-00000.tsr", small_step_path(f, other, 11));
    assert_int_equal(rename(a, b), 0);
    assert_fails(checkpoint_open(&c, other), ST_CORRUPT,
                 "is another file than the one that the manifest tells of");
    checkpoint_close(&c);
}

/* ---- hostile manifests ----------------------------------------------------------------------- */

/* Writes @text with a tail that fits it. */
static void put_manifest(const char *dir, const char *text)
{
    char path[600], whole[8192];
    snprintf(path, sizeof path, "%s/manifest.json", dir);
    int n = snprintf(whole, sizeof whole, "%s,\n \"xxh3\": \"%016llx\"\n}\n", text,
                     (unsigned long long)XXH3_64bits(text, strlen(text)));
    put_bytes(path, whole, (size_t)n);
}

#define TOP      "{\"format\":\"tessera checkpoint\",\"version\":1,\"step\":1,\"training\":{}"
#define NO_FILES ",\"files\":[]"
#define A_TENSOR "{\"name\":\"a\",\"dtype\":\"F32\",\"shape\":[2],\"states\":[\"master\"]}"
#define A_LINE(name, bytes)                                                                        \
    "{\"name\":\"" name "\",\"bytes\":" bytes                                                      \
    ",\"xxh3\":\"0000000000000000\",\"index_xxh3\":\"0000000000000000\"}"
#define TENSOR(fields) TOP ",\"tensors\":[{" fields "}]" NO_FILES
#define FILES(lines)   TOP ",\"tensors\":[" A_TENSOR "],\"files\":[" lines "]"

static void hostile_manifests_are_refused_by_name(void **state)
{
    struct small_test *f = *state;
    static const struct {
        const char *text, *message;
        enum status want;
    } cases[] = {
        {"{\"format\":\"x\"", "format: expected \"tessera checkpoint\"", ST_CORRUPT},
        {"{\"format\":3", "format: expected a string, found an integer", ST_CORRUPT},
        {"{\"format\":\"tessera checkpoint\",\"version\":2", "later Tessera", ST_UNSUPPORTED},
        {"{\"format\":\"tessera checkpoint\",\"version\":0", "does not exist", ST_CORRUPT},
        {"{\"format\":\"tessera checkpoint\",\"version\":1,\"step\":-1", "negative", ST_CORRUPT},
        {"{\"format\":\"tessera checkpoint\",\"version\":1,\"step\":1",
         "training: expected an object", ST_CORRUPT},
        {"{\"a\":1,\"a\":2", "duplicate", ST_CORRUPT},
        {"{\"a\":", "manifest.json:", ST_CORRUPT},
        {TOP, "tensors: expected an array, found nothing", ST_CORRUPT},
        {TOP ",\"tensors\":[]", "files: expected an array", ST_CORRUPT},
        {TOP ",\"tensors\":[]" NO_FILES, "there are no tensors", ST_CORRUPT},
        {TOP ",\"tensors\":[7]" NO_FILES, "tensors[]: expected an object", ST_CORRUPT},
        {TOP ",\"tensors\":[" A_TENSOR "]" NO_FILES, "there are no files", ST_CORRUPT},
        {TOP ",\"tensors\":[" A_TENSOR "," A_TENSOR "]" NO_FILES, "\"a\" is there twice",
         ST_CORRUPT},
        {TENSOR("\"name\":\"\""), "dtype: expected a string", ST_CORRUPT},
        {TENSOR("\"name\":\"a\",\"dtype\":\"BF16\""), "is BF16, only F32 is read", ST_UNSUPPORTED},
        {TENSOR("\"name\":\"a\",\"dtype\":\"F32\",\"shape\":[2]"), "states: expected an array",
         ST_CORRUPT},
        {TENSOR("\"name\":\"a\",\"dtype\":\"F32\",\"shape\":[2],\"states\":[]"), "0 states",
         ST_CORRUPT},
        {TENSOR("\"name\":\"a\",\"dtype\":\"F32\",\"shape\":[2],\"states\":[\"../x\"]"), "\"../x\"",
         ST_CORRUPT},
        {TENSOR("\"name\":\"a\",\"dtype\":\"F32\",\"shape\":[2],\"states\":[\"m\",\"m\"]"), "twice",
         ST_CORRUPT},
        {TENSOR("\"name\":\"a\",\"dtype\":\"F32\",\"shape\":[2],\"states\":[\"a\",\"b\",\"c\","
                "\"d\",\"e\",\"f\",\"g\",\"h\",\"i\"]"),
         "9 states", ST_CORRUPT},
        {TENSOR("\"name\":\"\",\"dtype\":\"F32\",\"shape\":[2],\"states\":[\"m\"]"),
         "no name of a tensor", ST_CORRUPT},
        {TENSOR("\"name\":\"a\\u0000b\",\"dtype\":\"F32\",\"shape\":[2],\"states\":[\"m\"]"),
         "manifest.json:", ST_CORRUPT},
        {TENSOR("\"name\":\"a\",\"dtype\":\"F32\",\"shape\":[0],\"states\":[\"m\"]"), "shape[0]",
         ST_CORRUPT},
        {TENSOR("\"name\":\"a\",\"dtype\":\"F32\",\"shape\":[-3],\"states\":[\"m\"]"), "shape[0]",
         ST_CORRUPT},
        {TENSOR(
             "\"name\":\"a\",\"dtype\":\"F32\",\"shape\":[1,2,3,4,5,6,7,8,9],\"states\":[\"m\"]"),
         "9 dimensions", ST_CORRUPT},
        {TENSOR("\"name\":\"a\",\"dtype\":\"F32\",\"shape\":[9223372036854775807,2],\"states\":["
                "\"m\"]"),
         "shape[1]", ST_CORRUPT},
        {TENSOR(
             "\"name\":\"a\",\"dtype\":\"F32\",\"shape\":[4611686018427387904],\"states\":[\"m\"]"),
         "too large", ST_CORRUPT},
        {FILES("{}"), "files[].name: expected a string", ST_CORRUPT},
        {FILES(A_LINE("../data-00000.tsr", "64")), "no name of a data file", ST_CORRUPT},
        {FILES(A_LINE("/etc/passwd", "64")), "\"/etc/passwd\" is no name of a data file",
         ST_CORRUPT},
        {FILES(A_LINE("data-0000/.tsr", "64")), "no name of a data file", ST_CORRUPT},
        {FILES(A_LINE("manifest.json", "64")), "no name of a data file", ST_CORRUPT},
        {FILES(A_LINE("data-00000.tsr", "-1")), "negative size", ST_CORRUPT},
        {FILES(A_LINE("data-00000.tsr", "1e3")), "bytes: expected an integer", ST_CORRUPT},
        {FILES(A_LINE("data-00000.tsr", "64") "," A_LINE("data-00000.tsr", "64")), "is there twice",
         ST_CORRUPT},
        {FILES(A_LINE("data-00000.tsr", "64")), "data-00000.tsr: is missing", ST_CORRUPT},
        {FILES("{\"name\":\"data-00000.tsr\",\"bytes\":1,\"xxh3\":\"0x\"}"),
         "16 hexadecimal digits", ST_CORRUPT},
    };
    char dir[512];
    scratch_path(&f->scratch, dir, "step-00000001");
    assert_int_equal(mkdir(dir, 0777), 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct checkpoint c = {0};
        put_manifest(dir, cases[i].text);
        assert_fails(checkpoint_open(&c, dir), cases[i].want, cases[i].message);
        assert_message_has("step-00000001", __FILE__, __LINE__);
        checkpoint_close(&c);
    }
}

/* A tensor table of any size: nothing is allocated for it that no file backs. */
static void a_table_of_exabytes_allocates_nothing(void **state)
{
    struct small_test *f = *state;
    struct checkpoint c = {0};
    char dir[512], path[600];
    char empty[64] = "";
    scratch_path(&f->scratch, dir, "step-00000001");
    assert_int_equal(mkdir(dir, 0777), 0);
    put_manifest(
        dir,
        TOP ",\"tensors\":[{\"name\":\"a\",\"dtype\":\"F32\",\"shape\":[1000000,1000000,1000000],"
            "\"states\":[\"m\"]}],\"files\":[" A_LINE("data-00000.tsr", "64") "]");
    snprintf(path, sizeof path, "%s/data-00000.tsr", dir);
    put_bytes(path, empty, sizeof empty);
    int64_t before = mem_live_bytes();
    assert_fails(checkpoint_open(&c, dir), ST_CORRUPT, "is not a data file");
    assert_true(mem_live_bytes() - before < 1 << 20); /* a block of names */
    checkpoint_close(&c);
}

/* Data files whose hashes fit and whose contents do not: footer, index and manifest agree. */
static void hostile_indexes_never_crash(void **state)
{
    struct small_test *f = *state;
    char dir[512], path[600], text[4096];
    int opened = 0;
    scratch_path(&f->scratch, dir, "step-00000001");
    assert_int_equal(mkdir(dir, 0777), 0);
    snprintf(path, sizeof path, "%s/data-00000.tsr", dir);
    for (int round = 0; round < 4000; round++) {
        /* 8 bytes of data (two elements, stored), a stream "master" of "a", one chunk. */
        unsigned char b[16 + 8 + 4 + 7 + 40 + 48] = "\x89TSR\r\n\x1a\n\1";
        float values[2] = {1, 2};
        uint64_t hash = XXH3_64bits(values, 8), numbers[3] = {24, 51, 1};
        uint32_t chunk[6] = {2, 0, 2, 2, 2, 2}, counts[2] = {1, 1};
        uint16_t lengths[2] = {6, 1};
        unsigned char planes[8] = {0, 0, 0, 0, 0x80, 0, 0x3F, 0x40};
        memcpy(b + 16, planes, 8);
        memcpy(b + 24, lengths, 4);
        memcpy(b + 28, "mastera", 7);
        memcpy(b + 43, &hash, 8); /* after first = 0 */
        memcpy(b + 51, chunk, 24);
        memcpy(b + 75, numbers, 24);
        memcpy(b + 99, counts, 8);
        memcpy(b + 115, "TSRINDEX", 8);
        for (int64_t k = round == 0 ? 0 : 1 + small_below(f, 3); k > 0; k--) {
            size_t at = 24 + (size_t)small_below(f, 83);
            b[at] =
                small_below(f, 3) == 0 ? 0xFF : (unsigned char)(b[at] ^ (1 << small_below(f, 8)));
        }
        uint64_t index_first;
        memcpy(&index_first, b + 75, 8);
        hash = XXH3_64bits(b + 24, sizeof b - 24 - 16);
        memcpy(b + 107, &hash, 8);
        put_bytes(path, b, sizeof b);
        snprintf(text, sizeof text,
                 TOP ",\"tensors\":[" A_TENSOR "],\"files\":[{\"name\":\"data-00000.tsr\","
                     "\"bytes\":%zu,\"xxh3\":\"%016llx\",\"index_xxh3\":\"%016llx\"}]",
                 sizeof b, (unsigned long long)XXH3_64bits(b, sizeof b), (unsigned long long)hash);
        put_manifest(dir, text);
        struct checkpoint c = {0};
        enum status st = checkpoint_open(&c, dir);
        if (round == 0)
            assert_ok(st);
        assert_true(st == ST_OK || st == ST_CORRUPT);
        if (st == ST_OK) {
            struct checkpoint_reader r = {0};
            float out[2] = {0};
            opened++;
            assert_ok(checkpoint_reader_open(&r, &c));
            st = checkpoint_read_range(&r, "master", "a", 0, 2, out);
            assert_true(st == ST_CORRUPT || (st == ST_OK && out[0] == 1 && out[1] == 2));
            if (round == 0)
                assert_ok(st);
            checkpoint_reader_close(&r);
        }
        checkpoint_close(&c);
    }
    assert_true(opened > 10 && opened < 4000);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, small_set_up, small_tear_down)
    const struct CMUnitTest tests[] = {
        TEST(every_flipped_byte_is_noticed),
        TEST(every_length_of_a_cut_file_is_noticed),
        TEST(random_damage_to_large_files_is_noticed_where_it_is),
        TEST(swapped_missing_and_foreign_files_are_named),
        TEST(hostile_manifests_are_refused_by_name),
        TEST(a_table_of_exabytes_allocates_nothing),
        TEST(hostile_indexes_never_crash),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
