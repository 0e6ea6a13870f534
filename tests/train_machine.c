/*
 * Machine profiles as files (engine/train/machine.h, engine/base/yaml_pairs.h).
 */
#include "engine/train/machine.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/file.h"
#include "tests/support/run.h"

static const char small[] =
    "name: a\n"
    "date: \"2026-11-28\"\n"
    "device: cpu\n"
    "products: {source: s, tflops: {384: {128: 0.06, 1024: 0.07}}}\n"
    "attention: {source: s, tflops: {64: {175: 0.03}}, call_us: 0}\n"
    "memory: {source: s, copy: 10, elementwise: {384: {128: 7}}, update: 16}\n"
    "launch: {source: s, kernel_us: 2, collective_us: 0}\n"
    "near: {source: s, hop_us: 5, gather: 5, reduce: 4}\n"
    "slow_down: {source: ~, near: 0}\n";

static void check_close(double got, double want)
{
    if (fabs(got - want) > 1e-5 * fabs(want))
        fail_msg("got %.9g, expected %.9g", got, want);
}

static void built_in_profiles_survive_a_file(void **state)
{
    static const char *const names[] = {"h100", "h200+ib50", "a100+ib400", "epyc-core"};
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        struct machine m, back;
        char *text = NULL, *again = NULL;
        size_t bytes = 0, again_bytes = 0;
        assert_ok(machine_builtin(&m, names[i]));
        assert_ok(machine_format(&m, &text, &bytes));
        assert_ok(machine_parse(&back, text, bytes, "x.yaml"));
        check_close(back.products.of[0].curve.points[0].per_second,
                    m.products.of[0].curve.points[0].per_second);
        check_close(back.near.gather_per_second, m.near.gather_per_second);
        check_close(back.far.hop_seconds + 1, m.far.hop_seconds + 1);
        check_close(back.launch_seconds, m.launch_seconds);
        assert_int_equal(back.device, m.device);
        assert_string_equal(back.source[MACHINE_NEAR], m.source[MACHINE_NEAR]);
        assert_ok(machine_format(&back, &again, &again_bytes));
        assert_string_equal(again, text);
        mem_free(&text);
        mem_free(&again);
    }
}

static void a_file_gives_its_numbers_in_their_units(void **state)
{
    struct machine m;
    (void)state;
    assert_ok(machine_parse(&m, small, sizeof small - 1, "small.yaml"));
    assert_int_equal(m.products.count, 1);
    assert_int_equal(m.products.of[0].width, 384);
    assert_int_equal(m.products.of[0].curve.count, 2);
    assert_int_equal(m.products.of[0].curve.points[1].at, 1024);
    check_close(m.products.of[0].curve.points[1].per_second, 70e9);
    check_close(m.update_per_second, 16e9);
    check_close(m.launch_seconds, 2e-6);
    check_close(m.near.hop_seconds, 5e-6);
    assert_true(m.call_seconds <= 0 && m.far.gather_per_second <= 0);
}

/* The small file with one line in place of the one that begins like it, or without that one. */
static enum status parse_with(const char *line, const char *begin)
{
    struct machine m;
    char text[2048];
    size_t used = 0;
    for (const char *at = small; *at != '\0'; at += strcspn(at, "\n") + 1) {
        bool replaced = strncmp(at, begin, strlen(begin)) == 0;
        int n = replaced ? snprintf(text + used, sizeof text - used, "%s", line)
                         : snprintf(text + used, sizeof text - used, "%.*s\n",
                                    (int)strcspn(at, "\n"), at);
        used += (size_t)n;
    }
    return machine_parse(&m, text, used, "m.yaml");
}

static void what_is_wrong_is_named_with_file_line_and_key(void **state)
{
    static const struct {
        const char *begin, *line, *message;
    } cases[] = {
        {"memory", "", "m.yaml: memory.copy is missing"},
        {"name", "", "name, date or device is missing"},
        {"near", "near: {source: s, hop_us: 5, gather: 0, reduce: 4}\n",
         "m.yaml:8: near.gather: expected a number from 1e-09 to 1e+12, found \"0\""},
        {"near", "near: {source: s, hop_us: -1, gather: 1, reduce: 4}\n",
         "near.hop_us: expected a number from 1e-09 to 1e+12, or 0, found \"-1\""},
        {"near", "near: {source: s, hop_us: nan, gather: 1, reduce: 4}\n", "found \"nan\""},
        {"near", "near: {hop_us: 1, gather: 1, reduce: 4}\n", "near.source is missing"},
        {"near", "near: {source: s, hop_us: 1, gather: 1, gather: 1, reduce: 4}\n",
         "near.gather: already given"},
        {"near", "near: {source: s, hops: 1, gather: 1, reduce: 4}\n", "unknown key \"near.hops\""},
        {"near", "nearer: 5\n", "unknown key \"nearer\""},
        {"near", "near: [1, 2]\n", "m.yaml:8: lists are not supported"},
        {"near", "near: &a 5\n", "anchors and tags"},
        {"near", "near: {source: \"x\n", "m.yaml:"},
        {"near", "near: {source: s, hop_us: 1, gather: 1e13, reduce: 4}\n", "found \"1e13\""},
        {"device", "device: tpu\n", "device: expected cpu or cuda, found \"tpu\""},
        {"products", "products: {source: s, tflops: {64: {128: 1, 128: 2}}}\n", "keys must ascend"},
        {"products", "products: {source: s, tflops: {64: {8: 1}, 32: {8: 1}}}\n",
         "keys must ascend"},
        {"products", "products: {source: s, tflops: {64: {many: 1}}}\n",
         "expected a whole number above 0 as key"},
        {"products", "products: {source: s, tflops: {wide: {8: 1}}}\n",
         "expected a whole number above 0 as key"},
        {"products", "products: {source: s, tflops: {8: 1}}\n",
         "m.yaml:4: products.tflops.8: expected rates by width, then by size"},
        {"products",
         "products: {source: s, tflops: {1: {8: 1}, 2: {8: 1}, 3: {8: 1}, 4: {8: 1}, 5: {8: 1}}}\n",
         "at most 4 widths"},
        {"products", "products: {source: s}\n", "products.tflops is missing"},
        {"slow_down", "slow_down: {source: s, near: 0}\nfar: {source: s, hop_us: 1, gather: 1}\n",
         "far.reduce is missing"},
        {"slow_down", "slow_down: {source: s, near: 0}\n--- {}\n", "a second document"},
        {"name", "just words\n", "m.yaml:"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(parse_with(cases[i].line, cases[i].begin), ST_INVALID);
        if (strstr(status_message(), cases[i].message) == NULL)
            fail_msg("case %zu: \"%s\" is not in \"%s\"", i, cases[i].message, status_message());
    }
    struct machine m;
    assert_int_equal(machine_parse(&m, "", 0, "m.yaml"), ST_INVALID);
    assert_int_equal(machine_parse(&m, "5\n", 2, "m.yaml"), ST_INVALID);
}

static void a_name_is_a_file_or_built_in(void **state)
{
    struct scratch scratch;
    struct machine m;
    bool found = true;
    char path[512];
    (void)state;
    scratch_make(&scratch);
    scratch_path(&scratch, path, "mine.yaml");
    assert_int_equal(machine_find(&m, path), ST_IO);
    assert_int_equal(machine_find(&m, "h1000"), ST_INVALID);
    assert_ok(machine_builtin(&m, "epyc-core"));
    assert_ok(machine_write(&m, path));
    assert_ok(machine_find(&m, path));
    char far[600];
    snprintf(far, sizeof far, "%s+ib200", path);
    assert_ok(machine_find(&m, far));
    check_close(m.far.gather_per_second, 23e9);
    snprintf(far, sizeof far, "%s+ib7", path);
    assert_int_equal(machine_find(&m, far), ST_INVALID);
    assert_int_equal(setenv("XDG_CACHE_HOME", path, 1), 0); /* nothing can lie there */
    assert_ok(machine_default(&m, &found, DEVICE_CPU));
    assert_false(found);
    scratch_remove(&scratch);
}

/* The names that the driver gives: those of other boards with the chip have no profile. */
static void a_card_finds_its_profile_by_the_drivers_name(void **state)
{
    static const struct {
        const char *card, *profile; /* NULL: there is none */
    } cases[] = {{"NVIDIA H100 80GB HBM3", "h100"},
                 {"NVIDIA H200", "h200"},
                 {"NVIDIA A100-SXM4-80GB", "a100"},
                 {"NVIDIA A100-SXM4-40GB", "a100"},
                 {"NVIDIA H100 PCIe", NULL},
                 {"NVIDIA H200 NVL", NULL},
                 {"NVIDIA H20", NULL},
                 {"one core of an AMD EPYC, OpenBLAS Zen", NULL},
                 {"", NULL}};
    struct scratch scratch;
    struct machine m, right;
    enum machine_match match;
    char path[600];
    (void)state;
    scratch_make(&scratch);
    assert_int_equal(setenv("XDG_CACHE_HOME", scratch_at(&scratch, "."), 1), 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        bool known = cases[i].profile != NULL;
        assert_int_equal(machine_builtin_card(&m, cases[i].card), known);
        assert_ok(machine_for(&m, &match, DEVICE_CUDA, cases[i].card));
        assert_int_equal(match, known ? MACHINE_BUILTIN : MACHINE_NONE);
        if (!known)
            continue;
        assert_ok(machine_builtin(&right, cases[i].profile));
        assert_string_equal(m.name, right.name);
        check_close(m.update_per_second, right.update_per_second);
        assert_true(m.source[MACHINE_NEAR][0] != '\0');
    }
    /* What the user has measured goes before it, but not what was measured on another card. */
    assert_ok(machine_user_path(path, sizeof path, DEVICE_CUDA));
    *strrchr(path, '/') = '\0';
    assert_ok(file_make_dirs(path));
    assert_ok(machine_user_path(path, sizeof path, DEVICE_CUDA));
    m = right;
    snprintf(m.name, sizeof m.name, "NVIDIA H200, 400 Gb/s InfiniBand");
    assert_ok(machine_write(&m, path));
    assert_ok(machine_for(&m, &match, DEVICE_CUDA, "NVIDIA H200"));
    assert_int_equal(match, MACHINE_OWN);
    assert_ok(machine_for(&m, &match, DEVICE_CUDA, "NVIDIA H100 80GB HBM3"));
    assert_int_equal(match, MACHINE_BUILTIN);
    assert_ok(machine_for(&m, &match, DEVICE_CUDA, "NVIDIA H200 NVL"));
    assert_int_equal(match, MACHINE_OTHER);
    assert_ok(machine_for(&m, &match, DEVICE_CUDA, "NVIDIA L4"));
    assert_int_equal(match, MACHINE_OTHER);
    scratch_remove(&scratch);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_card_finds_its_profile_by_the_drivers_name),
        cmocka_unit_test(built_in_profiles_survive_a_file),
        cmocka_unit_test(a_file_gives_its_numbers_in_their_units),
        cmocka_unit_test(what_is_wrong_is_named_with_file_line_and_key),
        cmocka_unit_test(a_name_is_a_file_or_built_in),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
