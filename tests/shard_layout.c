#include "shard/layout.h"

#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "tests/support/support.h"

enum { MAX_PARAMS = 40, MAX_WORLD = 129 };

struct random_params {
    struct layout_param params[MAX_PARAMS];
    char names[MAX_PARAMS][24];
    int count;
};

static int64_t below(uint64_t *random, int64_t n)
{
    return (int64_t)(test_random(random) % (uint64_t)n);
}

/* Units of one or more tensors with gaps; sizes from one element to some thousands. */
static void make_params(struct random_params *r, uint64_t *random)
{
    int unit = 0;
    int64_t end = 0;
    r->count = 1 + (int)below(random, MAX_PARAMS);
    for (int i = 0; i < r->count; i++) {
        if (i > 0 && below(random, 3) == 0) {
            unit++;
            end = 0;
        }
        int64_t numel = below(random, 3) == 0 ? 1 + below(random, 4) : 1 + below(random, 5000);
        int64_t first = below(random, 2) ? round_up(end, LAYOUT_ALIGN) : end + below(random, 3);
        snprintf(r->names[i], sizeof r->names[i], "tensor.%d", i);
        r->params[i] = (struct layout_param){
            r->names[i], unit, first, numel, below(random, 2) != 0, below(random, 4) == 0};
        end = first + numel;
    }
}

/* Each element of each parameter is in the shards exactly once, at the place it should be. */
static void check_segments(const struct layout *l, int unit)
{
    const struct layout_unit *u = &l->units[unit];
    int64_t next[MAX_PARAMS]; /* the element of each parameter that comes next */
    memset(next, 0, sizeof next);
    for (int rank = 0; rank < l->world_size; rank++) {
        struct layout_segment s[MAX_PARAMS];
        int count = layout_segments(l, unit, rank * u->shard_numel, u->shard_numel, s);
        int64_t end = 0;
        assert_true(count <= u->param_count);
        for (int i = 0; i < count; i++) {
            const struct layout_param *p = &l->params[s[i].param];
            assert_int_equal(p->unit, unit);
            assert_true(s[i].numel > 0);
            assert_true(s[i].shard_first >= end);
            end = s[i].shard_first + s[i].numel;
            assert_true(end <= u->shard_numel);
            assert_int_equal(s[i].param_first, next[s[i].param]);
            next[s[i].param] += s[i].numel;
            assert_int_equal(rank * u->shard_numel + s[i].shard_first, p->first + s[i].param_first);
        }
    }
    for (int i = u->first_param; i < u->first_param + u->param_count; i++)
        assert_int_equal(next[i], l->params[i].numel);
}

static void check_units(const struct layout *l, int64_t align)
{
    int64_t padded = 0;
    int params = 0;
    for (int i = 0; i < l->unit_count; i++) {
        const struct layout_unit *u = &l->units[i];
        bool frozen = true;
        assert_int_equal(u->first_param, params);
        params += u->param_count;
        assert_int_equal(u->shard_numel % align, 0);
        assert_int_equal(u->shard_numel * l->world_size, u->padded_numel);
        assert_true(u->padded_numel >= u->numel);
        assert_true(u->padded_numel - u->numel < align * l->world_size + l->world_size);
        for (int k = u->first_param; k < params; k++)
            frozen = frozen && l->params[k].frozen;
        assert_int_equal(u->frozen, frozen);
        padded += u->padded_numel;
        check_segments(l, i);
    }
    assert_int_equal(params, l->param_count);
}

static void shards_are_equal_aligned_disjoint_and_rebuild_every_parameter(void **state)
{
    static struct layout l;
    static struct random_params r;
    static const int64_t aligns[] = {1, 4, LAYOUT_ALIGN};
    uint64_t random = test_seed();
    (void)state;
    for (int world = 1; world <= MAX_WORLD; world++) {
        int64_t align = aligns[below(&random, 3)];
        make_params(&r, &random);
        assert_ok(layout_build(&l, r.params, r.count, world, align));
        check_units(&l, align);
    }
}

/* The flat shards of every rank, each element marked with its parameter and place in it. */
static void fill_shards(const struct layout *l, int unit, uint64_t *flat)
{
    const struct layout_unit *u = &l->units[unit];
    memset(flat, 0, sizeof *flat * (size_t)u->padded_numel);
    for (int i = u->first_param; i < u->first_param + u->param_count; i++)
        for (int64_t k = 0; k < l->params[i].numel; k++)
            flat[l->params[i].first + k] = (uint64_t)(i + 1) << 32 | (uint64_t)k;
}

/* As a load does it: each new rank reads the parts of its segments from the old ranks' shards. */
static void remap(const struct layout *to, uint64_t *out, const struct layout *from,
                  const uint64_t *in, int unit)
{
    const struct layout_unit *a = &from->units[unit], *b = &to->units[unit];
    memset(out, 0, sizeof *out * (size_t)b->padded_numel);
    for (int rank = 0; rank < to->world_size; rank++) {
        struct layout_segment want[MAX_PARAMS], have[MAX_PARAMS];
        int wanted = layout_segments(to, unit, rank * b->shard_numel, b->shard_numel, want);
        for (int old = 0; old < from->world_size; old++) {
            int held = layout_segments(from, unit, old * a->shard_numel, a->shard_numel, have);
            for (int i = 0; i < wanted; i++)
                for (int k = 0; k < held; k++) {
                    if (want[i].param != have[k].param)
                        continue;
                    int64_t begin = want[i].param_first, end = begin + want[i].numel;
                    int64_t other_end = have[k].param_first + have[k].numel;
                    begin = begin > have[k].param_first ? begin : have[k].param_first;
                    end = end < other_end ? end : other_end;
                    for (int64_t e = begin; e < end; e++)
                        out[rank * b->shard_numel + want[i].shard_first + e - want[i].param_first] =
                            in[old * a->shard_numel + have[k].shard_first + e -
                               have[k].param_first];
                }
        }
    }
}

static void check_remap(const struct random_params *r, int few, int many)
{
    static struct layout a, b;
    static uint64_t one[400000], two[400000], back[400000], want[400000];
    assert_ok(layout_build(&a, r->params, r->count, few, LAYOUT_ALIGN));
    assert_ok(layout_build(&b, r->params, r->count, many, LAYOUT_ALIGN));
    for (int unit = 0; unit < a.unit_count; unit++) {
        assert_true(a.units[unit].padded_numel <= 400000 && b.units[unit].padded_numel <= 400000);
        fill_shards(&a, unit, one);
        remap(&b, two, &a, one, unit);
        fill_shards(&b, unit, want);
        assert_memory_equal(two, want, sizeof *want * (size_t)b.units[unit].padded_numel);
        remap(&a, back, &b, two, unit);
        assert_memory_equal(back, one, sizeof *one * (size_t)a.units[unit].padded_numel);
    }
}

static void b16_b17_b19_remap_to_more_or_fewer_ranks_and_back_is_the_identity(void **state)
{
    static struct random_params r;
    static const int worlds[][2] = {{8, 16}, {16, 8}, {6, 24}, {8, 64}, {1, 129}, {3, 7}, {5, 5}};
    uint64_t random = test_seed();
    (void)state;
    for (size_t i = 0; i < sizeof worlds / sizeof worlds[0]; i++) {
        make_params(&r, &random);
        check_remap(&r, worlds[i][0], worlds[i][1]);
    }
}

static void b17_b28_ranks_without_elements_own_padding_of_the_same_size(void **state)
{
    static struct layout l;
    const struct layout_param params[] = {{"rows", 0, 0, 18, true, false},
                                          {"one", 1, 0, 1, false, false}};
    struct layout_segment s[2];
    (void)state;
    assert_ok(layout_build(&l, params, 2, 64, 1));
    assert_int_equal(l.units[0].shard_numel, 1);
    assert_int_equal(l.units[1].shard_numel, 1);
    for (int rank = 0; rank < 64; rank++) {
        assert_int_equal(layout_segments(&l, 0, rank, 1, s), rank < 18);
        assert_int_equal(layout_segments(&l, 1, rank, 1, s), rank < 1);
    }
    assert_ok(layout_build(&l, params, 2, 8, LAYOUT_ALIGN));
    assert_int_equal(l.units[0].shard_numel, LAYOUT_ALIGN);
    assert_int_equal(layout_segments(&l, 0, LAYOUT_ALIGN, LAYOUT_ALIGN, s), 0);
    check_units(&l, LAYOUT_ALIGN);
}

static void b26_vocabularies_that_no_world_divides_are_laid_out(void **state)
{
    static struct layout l;
    static const int64_t rows[] = {30522, 30523, 32001, 28996};
    static const int worlds[] = {3, 5, 7, 8};
    (void)state;
    for (int i = 0; i < 4; i++)
        for (int w = 0; w < 4; w++) {
            const struct layout_param params[] = {{"words", 0, 0, rows[i] * 768, true, false},
                                                  {"bias", 1, 0, rows[i], false, false}};
            assert_ok(layout_build(&l, params, 2, worlds[w], LAYOUT_ALIGN));
            check_units(&l, LAYOUT_ALIGN);
        }
}

static void bad_parameters_are_errors(void **state)
{
    static struct layout l;
    static struct layout_param many[LAYOUT_MAX_UNITS + 1];
    struct layout_param p[] = {{"a", 0, 0, 10, true, false}, {"b", 1, 0, 10, true, false}};
    (void)state;
    assert_fails(layout_build(&l, p, 0, 2, 128), ST_INVALID, "0 parameters");
    assert_fails(layout_build(&l, p, 2, 0, 128), ST_INVALID, "0 ranks");
    assert_fails(layout_build(&l, p, 2, 2, 0), ST_INVALID, "multiples of 0");
    p[0].unit = -1;
    assert_fails(layout_build(&l, p, 1, 2, 128), ST_INVALID, "parameter a: unit -1");
    p[0].unit = 1;
    assert_fails(layout_build(&l, p, 1, 2, 128), ST_INVALID, "parameter a: unit 1");
    p[0].unit = 0;
    p[1].unit = 2;
    assert_fails(layout_build(&l, p, 2, 2, 128), ST_INVALID, "parameter b: unit 2 after unit 0");
    p[1].unit = 0;
    p[1].first = 9;
    assert_fails(layout_build(&l, p, 2, 2, 128), ST_INVALID, "parameter b: 10 elements at 9");
    p[1].first = 10;
    p[1].numel = 0;
    assert_fails(layout_build(&l, p, 2, 2, 128), ST_INVALID, "parameter b: 0 elements");
    p[0].first = -1;
    assert_fails(layout_build(&l, p, 1, 2, 128), ST_INVALID, "parameter a");
    p[0].first = 0;
    for (int i = 0; i <= LAYOUT_MAX_UNITS; i++)
        many[i] = (struct layout_param){"p", i, 0, 1, false, false};
    assert_ok(layout_build(&l, many, LAYOUT_MAX_UNITS, 2, 128));
    assert_fails(layout_build(&l, many, LAYOUT_MAX_UNITS + 1, 2, 128), ST_INVALID, "more than 512");
}

static void sizes_that_overflow_are_errors(void **state)
{
    static struct layout l;
    struct layout_param p[] = {{"a", 0, 0, INT64_MAX, true, false}};
    (void)state;
    assert_fails(layout_build(&l, p, 1, 2, 128), ST_INVALID, "parameter a");
    p[0].numel = 2;
    p[0].first = INT64_MAX - 1;
    assert_fails(layout_build(&l, p, 1, 2, 128), ST_INVALID, "parameter a");
    p[0].first = 0;
    p[0].numel = INT64_MAX / 2;
    assert_fails(layout_build(&l, p, 1, 3, INT64_MAX / 2), ST_INVALID, "overflow");
    assert_fails(layout_build(&l, p, 1, 2, INT64_MAX), ST_INVALID, "overflow");
    assert_ok(layout_build(&l, p, 1, 1, 1));
}

static void fingerprints_differ_where_layouts_do(void **state)
{
    static struct layout l;
    struct layout_param p[] = {{"a", 0, 0, 300, true, false}, {"b", 1, 0, 10, true, false}};
    uint64_t seen[9];
    int n = 0;
    (void)state;
    for (int change = 0; change < 9; change++) {
        struct layout_param q[] = {p[0], p[1]};
        q[0].name = change == 1 ? "aa" : "a";
        q[0].numel += change == 2;
        q[1].first += change == 3;
        q[1].decay = change != 4;
        q[1].frozen = change == 5;
        q[1].unit = change == 6 ? 0 : 1;
        q[1].first += change == 6 ? 300 : 0;
        assert_ok(layout_build(&l, q, 2, change == 7 ? 3 : 2, change == 8 ? 64 : 128));
        seen[n++] = layout_fingerprint(&l);
    }
    for (int i = 0; i < n; i++)
        for (int k = 0; k < i; k++)
            assert_true(seen[i] != seen[k]);
    assert_ok(layout_build(&l, p, 2, 2, 128));
    assert_true(layout_fingerprint(&l) == seen[0]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shards_are_equal_aligned_disjoint_and_rebuild_every_parameter),
        cmocka_unit_test(b16_b17_b19_remap_to_more_or_fewer_ranks_and_back_is_the_identity),
        cmocka_unit_test(b17_b28_ranks_without_elements_own_padding_of_the_same_size),
        cmocka_unit_test(b26_vocabularies_that_no_world_divides_are_laid_out),
        cmocka_unit_test(bad_parameters_are_errors),
        cmocka_unit_test(sizes_that_overflow_are_errors),
        cmocka_unit_test(fingerprints_differ_where_layouts_do),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
