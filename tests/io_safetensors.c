#include "io/safetensors.h"

#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/base/file.h"
#include "tests/support/support.h"

/* ---- files made by hand ---------------------------------------------------------------------- */

/* A file with this header and @data_bytes of data (zeros if @data is NULL). */
static const char *put_file(struct file_test *f, const char *header, const void *data,
                            size_t data_bytes)
{
    char bytes[8192] = {0};
    uint64_t length = strlen(header);
    assert_true(8 + length + data_bytes <= sizeof bytes);
    memcpy(bytes, &length, 8);
    memcpy(bytes + 8, header, length);
    if (data != NULL)
        memcpy(bytes + 8 + length, data, data_bytes);
    return scratch_put(&f->scratch, f->path, "x.safetensors", bytes, 8 + length + data_bytes);
}

static void assert_refused(struct file_test *f, const char *header, size_t data_bytes,
                           enum status want, const char *message)
{
    struct safetensors st = {0};
    const char *path = put_file(f, header, NULL, data_bytes);
    assert_fails(safetensors_open(&st, path), want, message);
    assert_message_has("x.safetensors", __FILE__, __LINE__);
    safetensors_close(&st);
}

static void assert_accepted(struct file_test *f, const char *header, size_t data_bytes, int count)
{
    struct safetensors st = {0};
    assert_ok(safetensors_open(&st, put_file(f, header, NULL, data_bytes)));
    assert_int_equal(st.count, count);
    safetensors_close(&st);
}

#define A_F32 "\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}"

static void well_formed_headers_are_accepted(void **state)
{
    struct file_test *f = *state;
    assert_accepted(f, "{}", 0, 0);
    assert_accepted(f, "{}    ", 0, 0);
    assert_accepted(f, "{" A_F32 "}", 8, 1);
    assert_accepted(f, "{\"__metadata__\":{\"format\":\"pt\"}," A_F32 "}", 8, 1);
    /* Order in the header is free; scalars and empty tensors are tensors. */
    assert_accepted(f,
                    "{\"b\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[8,16]},"
                    "\"e\":{\"dtype\":\"F32\",\"shape\":[0,7],\"data_offsets\":[8,8]}," A_F32 "}",
                    16, 3);
    assert_accepted(f, "{\"q\":{\"dtype\":\"F4\",\"shape\":[3,2],\"data_offsets\":[0,3]}}", 3, 1);
}

static void broken_headers_are_refused_with_file_tensor_and_cause(void **state)
{
    static const struct {
        const char *header;
        size_t data_bytes;
        const char *message;
    } cases[] = {
        {"", 0, "header"},
        {"[]", 0, "expected '{' at byte 8"},
        {" {}", 0, "expected '{' at byte 8"},
        {"{" A_F32, 8, "header: byte"},
        {"{" A_F32 "}x", 8, "header: byte"},
        {"{" A_F32 "," A_F32 "}", 8, "duplicate object key"},
        {"{\"a\":3}", 0, "\"a\": expected an object, found an integer"},
        {"{\"a\":{\"shape\":[2],\"data_offsets\":[0,8]}}", 8,
         "\"a\": dtype: expected a string, found nothing"},
        {"{\"a\":{\"dtype\":\"F99\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8,
         "\"a\": dtype \"F99\" is not known"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":2,\"data_offsets\":[0,8]}}", 8,
         "\"a\": shape: expected an array"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]}}", 8,
         "\"a\": shape[0]: expected a size"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2.0],\"data_offsets\":[0,8]}}", 8,
         "\"a\": shape[0]: expected a size"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0,
         "\"a\": the size of its shape overflows"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904],\"data_offsets\":[0,0]}}", 0,
         "\"a\": data_offsets give it 0 bytes"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[99999999999999999999],\"data_offsets\":[0,8]}}", 8,
         "too big integer"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0]}}", 8,
         "\"a\": data_offsets: expected two integers"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[-8,0]}}", 8,
         "\"a\": data_offsets -8 to 0 are not in the 8 bytes of data"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,0]}}", 8,
         "\"a\": data_offsets 8 to 0 are not in"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,16]}}", 8,
         "\"a\": data_offsets 8 to 16 are not in"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,8]}}", 8,
         "\"a\": data_offsets give it 8 bytes, which is not the size of F32 (3)"},
        {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8,
         "which is not the size of BF16 (2)"},
        {"{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,1]}}", 1, "size of F4 (3)"},
        {"{" A_F32 ",\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}", 12,
         "\"a\" and \"b\" overlap"},
        {"{" A_F32 ",\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[12,16]}}", 16,
         "\"b\": the 4 bytes of data before it belong to no tensor"},
        {"{" A_F32 "}", 9, "the last 1 bytes belong to no tensor"},
        {"{\"__metadata__\":[]," A_F32 "}", 8, "__metadata__: expected an object of strings"},
        {"{\"__metadata__\":{\"n\":1}," A_F32 "}", 8, "__metadata__: expected an object of str"},
    };
    struct file_test *f = *state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_refused(f, cases[i].header, cases[i].data_bytes, ST_CORRUPT, cases[i].message);
    assert_refused(f,
                   "{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],"
                   "\"data_offsets\":[0,1]}}",
                   1, ST_UNSUPPORTED, "\"a\" has 9 dimensions, at most 8 are read");
}

static void files_that_are_something_else_are_refused(void **state)
{
    struct file_test *f = *state;
    struct safetensors st = {0};
    char path[512];
    const char pointer[] = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n";
    assert_fails(safetensors_open(&st, scratch_path(&f->scratch, path, "no")), ST_IO, "No such");
    safetensors_close(&st);
    assert_fails(safetensors_open(&st, f->scratch.dir), ST_IO, "is not a regular file");
    safetensors_close(&st);
    assert_fails(safetensors_open(&st, scratch_put(&f->scratch, path, "s", "1234567", 7)),
                 ST_CORRUPT, "it has 7 bytes");
    safetensors_close(&st);
    scratch_put(&f->scratch, path, "p", pointer, sizeof pointer - 1);
    assert_fails(safetensors_open(&st, path), ST_CORRUPT, "Git LFS pointer");
    safetensors_close(&st);
    for (uint64_t length = 3; length != 0; length *= 3) { /* far beyond the file, in the end */
        scratch_put(&f->scratch, path, "l", &length, 8);
        assert_fails(safetensors_open(&st, path), ST_CORRUPT, "a header of");
        safetensors_close(&st);
        if (length > UINT64_MAX / 3)
            break;
    }
}

static void a_header_above_the_limit_is_refused_unread(void **state)
{
    struct file_test *f = *state;
    struct safetensors st = {0};
    uint64_t length = SAFETENSORS_MAX_HEADER + 1;
    scratch_put(&f->scratch, f->path, "big", &length, 8);
    assert_int_equal(truncate(f->path, (off_t)length + 100), 0); /* sparse */
    assert_fails(safetensors_open(&st, f->path), ST_CORRUPT, "a header of 100000001 bytes");
    safetensors_close(&st);
}

/* Whatever a byte of length or header becomes, opening says yes or no, and what it accepts can be
 * read to the last element. */
static void every_byte_of_a_header_may_be_anything(void **state)
{
    struct file_test *f = *state;
    static const char header[] =
        "{\"__metadata__\":{\"format\":\"pt\"}," A_F32
        ",\"b\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[8,20]}}   ";
    char bytes[sizeof header - 1 + 8 + 20] = {0};
    const size_t header_bytes = sizeof header - 1;
    uint64_t length = header_bytes;
    int accepted = 0, tried = 0;
    memcpy(bytes, &length, 8);
    memcpy(bytes + 8, header, header_bytes);
    scratch_put(&f->scratch, f->path, "fuzz", bytes, sizeof bytes);
    int fd = open(f->path, O_WRONLY);
    assert_true(fd >= 0);
    for (size_t at = 0; at < 8 + header_bytes; at++) {
        for (int value = 0; value < 256; value += at < 8 ? 1 : 3) {
            struct safetensors st = {0};
            char byte = (char)(value ^ bytes[at]);
            assert_int_equal(pwrite(fd, &byte, 1, (off_t)at), 1);
            enum status got = safetensors_open(&st, f->path);
            assert_true(got == ST_OK || got == ST_CORRUPT);
            tried++;
            for (int i = 0; got == ST_OK && i < st.count; i++) {
                float out[64];
                assert_true(st.tensors[i].numel <= 64);
                got = safetensors_read(&st, &st.tensors[i], 0, st.tensors[i].numel, out);
                assert_true(got == ST_OK || got == ST_UNSUPPORTED);
            }
            accepted += st.count > 0;
            safetensors_close(&st);
        }
        assert_int_equal(pwrite(fd, bytes + at, 1, (off_t)at), 1);
    }
    close(fd);
    assert_true(accepted > (int)(8 + header_bytes) && accepted < tried); /* names may change */
}

static void every_length_of_a_cut_file_is_refused(void **state)
{
    struct file_test *f = *state;
    put_file(f, "{" A_F32 "}", NULL, 8);
    struct stat info;
    assert_int_equal(stat(f->path, &info), 0);
    for (off_t length = info.st_size - 1; length >= 0; length--) {
        struct safetensors st = {0};
        assert_int_equal(truncate(f->path, length), 0);
        assert_int_equal(safetensors_open(&st, f->path), ST_CORRUPT);
        safetensors_close(&st);
    }
}

static void a_file_cut_after_opening_is_an_error(void **state)
{
    struct file_test *f = *state;
    struct safetensors st = {0};
    float out[2];
    assert_ok(safetensors_open(&st, put_file(f, "{" A_F32 "}", NULL, 8)));
    assert_int_equal(truncate(f->path, 40), 0);
    assert_fails(safetensors_read(&st, &st.tensors[0], 0, 2, out), ST_CORRUPT, "shorter");
    safetensors_close(&st);
}

/* ---- dtypes ---------------------------------------------------------------------------------- */

/* A binary16 by its definition, in double. */
static double half_value(uint16_t h)
{
    int exponent = (h >> 10) & 31, fraction = h & 1023;
    double sign = h >> 15 ? -1.0 : 1.0;
    if (exponent == 31)
        return fraction != 0 ? (double)NAN : sign * (double)INFINITY;
    return exponent == 0 ? sign * ldexp(fraction, -24)
                         : sign * ldexp(1024 + fraction, exponent - 25);
}

static void all_values_of_f16_and_bf16_widen_exactly(void **state)
{
    struct file_test *f = *state;
    enum { VALUES = 1 << 16, HEADER = 176 };
    static char bytes[8 + HEADER + 4 * VALUES];
    static float out[VALUES];
    uint64_t length = HEADER;
    memcpy(bytes, &length, 8);
    memset(bytes + 8, ' ', HEADER);
    int used = snprintf(bytes + 8, HEADER,
                        "{\"h\":{\"dtype\":\"F16\",\"shape\":[%d],\"data_offsets\":[0,%d]},"
                        "\"b\":{\"dtype\":\"BF16\",\"shape\":[256,256],\"data_offsets\":[%d,%d]}}",
                        VALUES, 2 * VALUES, 2 * VALUES, 4 * VALUES);
    assert_in_range(used, 1, HEADER - 1);
    bytes[8 + used] = ' ';
    for (int i = 0; i < 2 * VALUES; i++) {
        uint16_t h = (uint16_t)i;
        memcpy(bytes + 8 + HEADER + 2 * i, &h, 2);
    }
    struct safetensors st = {0};
    assert_ok(safetensors_open(&st, scratch_put(&f->scratch, f->path, "w", bytes, sizeof bytes)));
    assert_ok(safetensors_read(&st, safetensors_find(&st, "h"), 0, VALUES, out));
    for (int i = 0; i < VALUES; i++) {
        double want = half_value((uint16_t)i), got = (double)out[i];
        if (!(isnan(want) ? isnan(got) : got == want && !signbit(got) == !signbit(want)))
            fail_msg("F16 %#x: got %g, want %g", (unsigned)i, got, want);
    }
    assert_ok(safetensors_read(&st, safetensors_find(&st, "b"), 0, VALUES, out));
    for (uint32_t i = 0; i < VALUES; i++) {
        uint32_t word;
        memcpy(&word, &out[i], 4);
        assert_int_equal(word, i << 16);
    }
    /* Any range, also of odd length and of none. */
    assert_ok(safetensors_read(&st, safetensors_find(&st, "h"), 0x3C00, 1, out));
    assert_true(out[0] == 1.0f);
    assert_ok(safetensors_read(&st, safetensors_find(&st, "h"), 0x3BFF, 3, out));
    assert_true(out[1] == 1.0f && (double)out[2] == half_value(0x3C01));
    assert_ok(safetensors_read(&st, safetensors_find(&st, "h"), VALUES, 0, out));
    safetensors_close(&st);
}

static void other_dtypes_are_named_when_read(void **state)
{
    struct file_test *f = *state;
    struct safetensors st = {0};
    float out[1];
    const char *header = "{\"p\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[0,8]}}";
    assert_ok(safetensors_open(&st, put_file(f, header, NULL, 8)));
    assert_fails(safetensors_read(&st, &st.tensors[0], 0, 1, out), ST_UNSUPPORTED,
                 "tensor \"p\" is I64; F32, F16 and BF16 are read");
    safetensors_close(&st);
}

/* ---- writing --------------------------------------------------------------------------------- */

enum { TENSORS = 3, ROWS = 7, COLUMNS = 5 };

static void make_table(struct safetensors_tensor table[TENSORS])
{
    memset(table, 0, TENSORS * sizeof *table);
    table[0] = (struct safetensors_tensor){.name = "z.weight", .dims = 2, .shape = {ROWS, COLUMNS}};
    table[1] = (struct safetensors_tensor){.name = "a.\"odd\" \xC3\xA9", .dims = 1, .shape = {1}};
    table[2] = (struct safetensors_tensor){.name = "scalar", .dims = 0};
}

/* Two writers, ranges in any order; then the file holds what was written, wherever it lies. */
static void ranges_of_two_writers_in_any_order_make_the_file(void **state)
{
    struct file_test *f = *state;
    struct safetensors_tensor ours[TENSORS], theirs[TENSORS];
    struct safetensors_writer creator = {0}, other = {0};
    float values[ROWS * COLUMNS], out[ROWS * COLUMNS], one = -2.5f;
    uint64_t seed = test_seed();
    for (int i = 0; i < ROWS * COLUMNS; i++)
        values[i] = (float)(test_random(&seed) >> 40) * 0.25f;
    make_table(ours);
    make_table(theirs);
    assert_ok(safetensors_create(&creator, f->scratch.dir, "m.safetensors", ours, TENSORS));
    assert_ok(safetensors_join(&other, f->scratch.dir, "m.safetensors", creator.temporary, theirs,
                               TENSORS));
    assert_ok(safetensors_write_range(&other, 0, 20, 15, values + 20));
    assert_ok(safetensors_write_range(&creator, 2, 0, 1, &one));
    assert_ok(safetensors_write_range(&creator, 0, 3, 17, values + 3));
    assert_ok(safetensors_write_range(&other, 0, 0, 3, values));
    assert_ok(safetensors_write_range(&other, 1, 0, 1, &one));
    assert_ok(safetensors_sync(&other));
    safetensors_writer_close(&other);
    assert_true(access(scratch_path(&f->scratch, f->path, "m.safetensors"), F_OK) != 0);
    assert_ok(safetensors_sync(&creator));
    assert_ok(safetensors_publish(&creator));
    safetensors_writer_close(&creator);
    safetensors_writer_close(&creator);
    assert_int_equal(scratch_count(&f->scratch), 1);
    struct safetensors st = {0};
    assert_ok(safetensors_open(&st, f->path));
    assert_int_equal(st.count, TENSORS);
    for (int i = 0; i < TENSORS; i++) {
        const struct safetensors_tensor *t = safetensors_find(&st, ours[i].name);
        assert_non_null(t);
        assert_string_equal(t->dtype, "F32");
        assert_int_equal(t->dims, ours[i].dims);
        assert_memory_equal(t->shape, ours[i].shape, sizeof t->shape);
        assert_int_equal(t->first_byte % 4, 0);
        assert_ok(safetensors_read(&st, t, 0, t->numel, out));
        assert_memory_equal(out, i == 0 ? values : &one, (size_t)t->numel * 4);
    }
    assert_int_equal(st.tensors[0].first_byte % 8, 0);
    assert_null(safetensors_find(&st, "z.weigh"));
    safetensors_close(&st);
}

/* Write one value into all of a small file. */
static enum status write_small(const char *dir, float value)
{
    enum status st;
    struct safetensors_writer w = {0};
    struct safetensors_tensor table[] = {{.name = "x", .dims = 1, .shape = {1}}};
    TRY_GOTO(st, out, safetensors_create(&w, dir, "m.safetensors", table, 1));
    TRY_GOTO(st, out, safetensors_write_range(&w, 0, 0, 1, &value));
    TRY_GOTO(st, out, safetensors_sync(&w));
    TRY_GOTO(st, out, safetensors_publish(&w));
out:
    safetensors_writer_close(&w);
    return st;
}

static float small_value(const struct file_test *f)
{
    struct safetensors st = {0};
    char path[512];
    float value = 0;
    assert_ok(safetensors_open(&st, scratch_path(&f->scratch, path, "m.safetensors")));
    assert_ok(safetensors_read(&st, &st.tensors[0], 0, 1, &value));
    safetensors_close(&st);
    return value;
}

static void a_failed_call_leaves_the_old_file_or_the_whole_new_one(void **state)
{
    struct file_test *f = *state;
    assert_ok(write_small(f->scratch.dir, 1.0f));
    int failures = 0;
    for (int64_t k = 1;; k++) {
        file_fail_at(k);
        enum status st = write_small(f->scratch.dir, 2.0f);
        file_fail_at(0);
        if (st == ST_OK)
            break;
        failures++;
        assert_int_equal(st, ST_IO);
        assert_message_has("m.safetensors", __FILE__, __LINE__);
        assert_int_equal(scratch_count(&f->scratch), 1);
        bool is_new = strstr(status_message(), "written, but its folder") != NULL;
        assert_true(small_value(f) == (is_new ? 2.0f : 1.0f));
    }
    assert_true(failures >= 7); /* open, reserve, 2 writes, fsync, rename, folder */
    assert_true(small_value(f) == 2.0f);
}

static void no_room_or_no_folder_is_an_error_before_any_data(void **state)
{
    struct file_test *f = *state;
    struct safetensors_writer w = {0};
    struct safetensors_tensor table[] = {{.name = "x", .dims = 1, .shape = {100000}}};
    char path[512];
    struct rlimit old, small;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    small = old;
    small.rlim_cur = 4096;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    enum status st = safetensors_create(&w, f->scratch.dir, "m.safetensors", table, 1);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_fails(st, ST_IO, "no room for its 400104 bytes");
    assert_int_equal(scratch_count(&f->scratch), 0);
    scratch_path(&f->scratch, path, "missing");
    assert_fails(safetensors_create(&w, path, "m.safetensors", table, 1), ST_IO,
                 "cannot write in its folder");
    scratch_put(&f->scratch, path, "file", "x", 1);
    assert_fails(safetensors_create(&w, path, "m.safetensors", table, 1), ST_IO,
                 "cannot write in its folder");
    table[0].shape[0] = INT64_MAX / 2;
    assert_fails(safetensors_create(&w, f->scratch.dir, "m.safetensors", table, 1), ST_INVALID,
                 "tensor x: its size overflows");
}

static void a_writer_that_is_closed_early_leaves_nothing(void **state)
{
    struct file_test *f = *state;
    struct safetensors_writer w = {0};
    struct safetensors_tensor table[TENSORS];
    make_table(table);
    assert_ok(safetensors_create(&w, f->scratch.dir, "m.safetensors", table, TENSORS));
    assert_int_equal(scratch_count(&f->scratch), 1);
    safetensors_writer_close(&w);
    assert_int_equal(scratch_count(&f->scratch), 0);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, file_test_set_up, file_test_tear_down)
    const struct CMUnitTest tests[] = {
        TEST(well_formed_headers_are_accepted),
        TEST(broken_headers_are_refused_with_file_tensor_and_cause),
        TEST(files_that_are_something_else_are_refused),
        TEST(a_header_above_the_limit_is_refused_unread),
        TEST(every_byte_of_a_header_may_be_anything),
        TEST(every_length_of_a_cut_file_is_refused),
        TEST(a_file_cut_after_opening_is_an_error),
        TEST(all_values_of_f16_and_bf16_widen_exactly),
        TEST(other_dtypes_are_named_when_read),
        TEST(ranges_of_two_writers_in_any_order_make_the_file),
        TEST(a_failed_call_leaves_the_old_file_or_the_whole_new_one),
        TEST(no_room_or_no_folder_is_an_error_before_any_data),
        TEST(a_writer_that_is_closed_early_leaves_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
