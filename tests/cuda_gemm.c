/* GEMM plans on a GPU: what is measured computes the right numbers, the same bits each time, and
 * comes back from its text; what a plan file may say wrongly is refused. Skipped without a GPU. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/rng.h"
#include "engine/ops/gemm_measure.h"
#include "engine/ops/gemm_plan.h"
#include "engine/ops/ops.h"
#include "tests/support/support.h"

enum { SAMPLES = 96, MOST_T = 1408 };

static struct device *gpu;
static struct stream *s;
static void *workspace;

#define NEEDS_GPU()                                                                                \
    do {                                                                                           \
        if (gpu == NULL)                                                                           \
            skip();                                                                                \
    } while (0)

static int open_gpu(void **state)
{
    (void)state;
    if (device_cuda_count() == 0)
        return 0;
    assert_ok(device_open(&gpu, DEVICE_CUDA, PRECISION_BF16, 0, 1));
    s = &gpu->streams[STREAM_COMPUTE];
    s->workspace_bytes = (size_t)64 << 20;
    assert_ok(device_alloc(gpu, &workspace, s->workspace_bytes));
    s->workspace = workspace;
    return 0;
}

static int close_gpu(void **state)
{
    (void)state;
    if (gpu != NULL)
        device_free(gpu, &workspace);
    device_close(&gpu);
    return 0;
}

static int forget(void **state)
{
    (void)state;
    if (gpu != NULL) {
        gemm_plan_install(gpu, NULL);
        gemm_plan_beside(gpu, 0);
    }
    return 0;
}

/* ---- a product with its operands on both sides ----------------------------------------------- */

struct product {
    enum gemm_kind kind;
    bool bias, add;
    int64_t T, N, K;
    float *a, *b, *bias_values; /* owned; rounded to bf16 */
    uint16_t *half;             /* owned; scratch, of the largest */
    char *out;                  /* owned; what the device computed */
    size_t out_bytes;
    struct tensor da, db, dbias, dout;
    void *memory; /* owned, device */
};

static float rounded(float x, uint16_t *half)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x7FFFu + (bits >> 16 & 1)) & 0xFFFF0000u;
    *half = (uint16_t)(bits >> 16);
    memcpy(&x, &bits, sizeof x);
    return x;
}

static void put(struct product *p, struct tensor *to, float **values, struct arena *memory,
                int64_t rows, int64_t columns, uint32_t salt)
{
    int64_t n = rows * columns;
    *to = tensor_2d(arena_take(memory, (size_t)n * 2), DTYPE_BF16, rows, columns);
    if (columns == 1)
        *to = tensor_1d(to->data, DTYPE_BF16, rows);
    assert_ok(mem_alloc(values, sizeof **values * (size_t)n));
    rng_fill_normal(*values, 0, n, 5, salt, 1.0f);
    for (int64_t i = 0; i < n; i++)
        (*values)[i] = rounded((*values)[i], &p->half[i]);
    assert_ok(device_copy(s, to->data, p->half, (size_t)n * 2));
    assert_ok(stream_sync(s));
}

static void product_open(struct product *p)
{
    int64_t T = p->T, N = p->N, K = p->K;
    int64_t a_columns = p->kind == GEMM_FORWARD ? K : N;
    int64_t b_rows = p->kind == GEMM_BACKWARD_WEIGHT ? T : N;
    int64_t out_rows = p->kind == GEMM_BACKWARD_WEIGHT ? N : T;
    int64_t out_columns = p->kind == GEMM_FORWARD ? N : K;
    enum dtype out_dtype = p->kind == GEMM_BACKWARD_WEIGHT ? DTYPE_F32 : DTYPE_BF16;
    int64_t most = T * (N > K ? N : K) > N * K ? T * (N > K ? N : K) : N * K;
    size_t bytes = (size_t)most * 16;
    assert_ok(device_alloc(gpu, &p->memory, bytes));
    assert_ok(mem_alloc(&p->half, (size_t)most * 2));
    struct arena memory = arena_over(p->memory, bytes);
    put(p, &p->da, &p->a, &memory, T, a_columns, 1);
    put(p, &p->db, &p->b, &memory, b_rows, K, 2);
    put(p, &p->dbias, &p->bias_values, &memory, N, 1, 3);
    p->out_bytes = (size_t)(out_rows * out_columns) * dtype_bytes(out_dtype);
    p->dout = tensor_2d(arena_take(&memory, p->out_bytes), out_dtype, out_rows, out_columns);
    assert_ok(mem_alloc(&p->out, p->out_bytes));
}

static void product_release(struct product *p)
{
    device_free(gpu, &p->memory);
    mem_free(&p->a);
    mem_free(&p->b);
    mem_free(&p->bias_values);
    mem_free(&p->half);
    mem_free(&p->out);
}

/* On what is there; twice, if it adds. */
static void product_issue(struct product *p)
{
    for (int i = 0; i < 1 + p->add; i++)
        assert_ok(gemm_run(s, p->kind, p->dout, p->da, p->db, p->bias ? p->dbias.data : NULL, p->T,
                           p->N, p->K, p->add));
}

static void product_fetch(struct product *p)
{
    assert_ok(device_copy(s, p->out, p->dout.data, p->out_bytes));
    assert_ok(stream_sync(s));
}

/* Run it on an output of zeros and fetch that. */
static void product_run(struct product *p)
{
    assert_ok(device_fill(s, p->dout.data, 0, p->out_bytes));
    product_issue(p);
    product_fetch(p);
}

static double got_at(const struct product *p, int64_t i)
{
    float value;
    uint32_t bits = 0;
    if (p->kind == GEMM_BACKWARD_WEIGHT) {
        memcpy(&value, p->out + 4 * i, sizeof value);
        return (double)value;
    }
    memcpy((char *)&bits + 2, p->out + 2 * i, 2);
    memcpy(&value, &bits, sizeof value);
    return (double)value;
}

static double want_at(const struct product *p, int64_t row, int64_t column)
{
    int64_t N = p->N, K = p->K;
    double sum = 0;
    if (p->kind == GEMM_FORWARD)
        for (int64_t k = 0; k < K; k++)
            sum += (double)p->a[row * K + k] * (double)p->b[column * K + k];
    else if (p->kind == GEMM_BACKWARD_DATA)
        for (int64_t n = 0; n < N; n++)
            sum += (double)p->a[row * N + n] * (double)p->b[n * K + column];
    else
        for (int64_t t = 0; t < p->T; t++)
            sum += (double)p->a[t * N + row] * (double)p->b[t * K + column];
    if (p->bias)
        sum += (double)p->bias_values[column];
    return p->add ? 2 * sum : sum;
}

/* Random elements against double: rounding of the output; and each of length / 16 steps of a tensor
 * core cuts its sum, below 4 sqrt(length) with these numbers, to 24 bits. */
static void product_check(const struct product *p, uint64_t *random)
{
    int64_t rows = p->dout.shape[0], columns = p->dout.shape[1];
    bool fp32 = p->kind == GEMM_BACKWARD_WEIGHT;
    int64_t length = p->kind == GEMM_FORWARD ? p->K : p->kind == GEMM_BACKWARD_DATA ? p->N : p->T;
    for (int i = 0; i < SAMPLES; i++) {
        int64_t row = (int64_t)(test_random(random) % (uint64_t)rows);
        int64_t column = (int64_t)(test_random(random) % (uint64_t)columns);
        double got = got_at(p, row * columns + column), want = want_at(p, row, column);
        double band = sqrt((double)length) * (double)length / 16 * 0x1p-21 * (p->add ? 2 : 1);
        if (!fp32)
            band += (fabs(want) + 1) * (p->add ? 2 : 1) * 0x1p-8;
        if (!(fabs(got - want) <= band))
            fail_msg("kind %d, T %lld, N %lld, K %lld: element %lld, %lld is %g, not %g", p->kind,
                     (long long)p->T, (long long)p->N, (long long)p->K, (long long)row,
                     (long long)column, got, want);
    }
}

/* The products of a block of BERT-base and of a few odd sizes that still have aligned rows. */
static const struct product products[] = {
    {.kind = GEMM_FORWARD, .bias = true, .N = 2304, .K = 768},
    {.kind = GEMM_FORWARD, .bias = true, .N = 768, .K = 3072},
    {.kind = GEMM_FORWARD, .N = 384, .K = 192},
    {.kind = GEMM_BACKWARD_DATA, .add = true, .N = 2304, .K = 768},
    {.kind = GEMM_BACKWARD_DATA, .N = 768, .K = 3072},
    {.kind = GEMM_BACKWARD_WEIGHT, .N = 768, .K = 768},
    {.kind = GEMM_BACKWARD_WEIGHT, .add = true, .N = 768, .K = 768},
    {.kind = GEMM_BACKWARD_WEIGHT, .N = 3072, .K = 768},
};
enum { PRODUCTS = sizeof products / sizeof *products };

/* The second class is served by the plan of the third. */
static const int64_t class_rows[] = {128, 576, 640, MOST_T};
enum { CLASSES = sizeof class_rows / sizeof *class_rows, PLANNED = (CLASSES - 1) * PRODUCTS };

/* Each product once at each length, as a rehearsal does; @check: and is right, and beside
 * collectives the same. */
static void run_all(bool check)
{
    uint64_t random = test_seed();
    for (int i = 0; i < PRODUCTS; i++)
        for (int k = check ? 0 : CLASSES - 1; k < CLASSES; k++) {
            struct product p = products[i];
            p.T = class_rows[k];
            product_open(&p);
            product_run(&p);
            if (check) {
                char *before = p.out;
                product_check(&p, &random);
                assert_ok(mem_alloc(&p.out, p.out_bytes));
                assert_ok(op_pass_begin(s, 1e18, 1));
                product_run(&p);
                assert_ok(op_pass_begin(s, 0.0, 0));
                assert_memory_equal(p.out, before, p.out_bytes);
                mem_free(&before);
            }
            product_release(&p);
        }
}

static void make(struct gemm_table *plan, struct gemm_measured *measured, double budget_s)
{
    struct gemm_table wanted = {0};
    gemm_card(gpu, &plan->card);
    assert_ok(gemm_wanted(&wanted, gpu, class_rows, CLASSES));
    assert_int_equal(wanted.count, PLANNED);
    assert_ok(gemm_measure(gpu, plan, &wanted, budget_s, measured));
    gemm_table_release(&wanted);
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void a_measured_plan_is_right_and_comes_back_from_its_text(void **state)
{
    (void)state;
    NEEDS_GPU();
    struct gemm_table plan = {0}, again = {0};
    struct gemm_measured measured;
    char *text = NULL;
    size_t bytes = 0;
    run_all(false);
    assert_int_equal(gemm_plan_missing(gpu), PRODUCTS);
    make(&plan, &measured, 3600.0);
    assert_int_equal(measured.products, PLANNED);
    assert_int_equal(measured.skipped, 0);
    assert_int_equal(plan.count, PLANNED);
    for (int i = 0; i < plan.count; i++) {
        assert_true(plan.entries[i].alone.us > 0.0 && isfinite(plan.entries[i].alone.us));
        assert_true(gemm_plan_accepts(gpu, &plan.entries[i]));
    }
    assert_ok(gemm_table_write(&text, &bytes, &plan));
    assert_ok(gemm_table_read(&again, text, bytes, "plan"));
    gemm_plan_install(gpu, &again);
    run_all(true);
    assert_int_equal(gemm_plan_missing(gpu), 0);
    printf("%d of %d products not with the first candidate\n", measured.changed, plan.count);
    make(&again, &measured, 3600.0); /* nothing is left to do */
    assert_int_equal(measured.products, 0);
    gemm_plan_install(gpu, NULL);
    mem_free(&text);
    gemm_table_release(&plan);
    gemm_table_release(&again);
}

static void without_time_a_plan_has_the_first_candidates(void **state)
{
    (void)state;
    NEEDS_GPU();
    struct gemm_table plan = {0};
    struct gemm_measured measured;
    run_all(false);
    make(&plan, &measured, 0.0);
    assert_int_equal(measured.products, PLANNED);
    assert_int_equal(measured.skipped, PLANNED);
    assert_int_equal(measured.changed, 0);
    gemm_plan_install(gpu, &plan);
    run_all(true);
    assert_int_equal(gemm_plan_missing(gpu), 0);
    gemm_plan_install(gpu, NULL);
    gemm_table_release(&plan);
}

static void products_that_a_plan_lacks_take_the_librarys_choice(void **state)
{
    (void)state;
    NEEDS_GPU();
    struct gemm_table plan = {0};
    gemm_card(gpu, &plan.card);
    gemm_plan_install(gpu, &plan);
    run_all(true);
    assert_int_equal(gemm_plan_missing(gpu), CLASSES * PRODUCTS);
    gemm_plan_install(gpu, NULL);
}

/* What runs beside is part of the product: a plan for products alone does not serve. */
static void beside_collectives_products_have_two_algorithms(void **state)
{
    (void)state;
    NEEDS_GPU();
    enum { BESIDE = 12 };
    struct gemm_table plan = {0};
    struct gemm_measured measured;
    gemm_card(gpu, &plan.card);
    gemm_plan_beside(gpu, BESIDE);
    run_all(false);
    make(&plan, &measured, 3600.0);
    for (int i = 0; i < plan.count; i++) {
        const struct gemm_entry *e = &plan.entries[i];
        assert_int_equal(e->key.beside, BESIDE);
        assert_true(e->beside.us > 0.0 && isfinite(e->beside.us));
    }
    printf("%d of %d products with another algorithm beside collectives\n", measured.beside,
           plan.count);
    assert_true(measured.beside > 0);
    gemm_plan_install(gpu, &plan);
    run_all(true);
    assert_int_equal(gemm_plan_missing(gpu), 0);
    assert_true(gemm_plan_issued_beside(gpu) > 0);
    gemm_plan_beside(gpu, 0);
    run_all(false);
    assert_int_equal(gemm_plan_missing(gpu), PRODUCTS);
    gemm_plan_install(gpu, NULL);
    gemm_table_release(&plan);
}

/* A product is beside collectives if one is there when it begins, or when half of it is done. */
static void the_part_of_a_pass_says_which_algorithm_a_product_takes(void **state)
{
    (void)state;
    NEEDS_GPU();
    enum { RUNS = 8 };
    struct product p = products[0];
    double flops = 2.0 * MOST_T * (double)p.N * (double)p.K;
    static const struct {
        uint16_t beside;
        int products;
    } cases[] = {{0, 0},         {0xFFFF, RUNS}, {1, 1},      {2, 1},      {6, 2},
                 {0xAAAA, RUNS}, {0x5555, RUNS}, {0x0FF0, 4}, {0xF000, 2}, {0x8000, 1}};
    p.T = MOST_T;
    product_open(&p);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        gemm_plan_beside(gpu, 12);
        gemm_plan_install(gpu, NULL);
        assert_ok(op_pass_begin(s, RUNS * flops, cases[i].beside));
        for (int k = 0; k < RUNS; k++) /* it begins with part 2 k, half of it is 2 k + 1 */
            product_issue(&p);
        assert_int_equal(gemm_plan_issued_beside(gpu), cases[i].products);
        product_issue(&p); /* more than was announced */
        assert_int_equal(gemm_plan_issued_beside(gpu), cases[i].products);
        gemm_plan_beside(gpu, 0); /* nobody holds any */
        assert_ok(op_pass_begin(s, RUNS * flops, 0xFFFF));
        product_issue(&p);
        assert_int_equal(gemm_plan_issued_beside(gpu), cases[i].products);
    }
    assert_ok(op_pass_begin(s, 0.0, 0));
    product_release(&p);
}

/* Whatever a file says: refused, or run as it should be. */
static void algorithms_that_do_not_fit_are_refused(void **state)
{
    (void)state;
    NEEDS_GPU();
    struct gemm_table plan = {0};
    struct gemm_measured measured;
    uint64_t random = test_seed();
    run_all(false);
    make(&plan, &measured, 0.0);
    struct gemm_entry good = plan.entries[0], bad = good;
    assert_true(gemm_plan_accepts(gpu, &good));
    bad.key.dtype = DTYPE_F32;
    assert_false(gemm_plan_accepts(gpu, &bad));
    bad = good;
    bad.alone.algo[GEMM_ID] = 4000000000u;
    assert_false(gemm_plan_accepts(gpu, &bad));
    bad.alone.algo[GEMM_ID] = 99999;
    assert_false(gemm_plan_accepts(gpu, &bad));
    bad = good;
    bad.alone.algo[GEMM_REDUCTION] = 1; /* in place */
    assert_false(gemm_plan_accepts(gpu, &bad));
    bad = good;
    bad.alone.algo[GEMM_CLUSTER] = 70000;
    assert_false(gemm_plan_accepts(gpu, &bad));
    bad = good;
    bad.alone.algo[GEMM_SM] = (uint32_t)plan.card.multiprocessors + 1;
    assert_false(gemm_plan_accepts(gpu, &bad));
    int refused = 0;
    for (int i = 0; i < 400; i++) {
        bad = good;
        uint32_t *value = &bad.alone.algo[test_random(&random) % GEMM_ATTRIBUTES];
        *value = (uint32_t)(test_random(&random) % 80);
        refused += !gemm_plan_accepts(gpu, &bad);
    }
    printf("%d of 400 random changes refused\n", refused);
    assert_true(refused > 0);
    gemm_table_release(&plan);
}

/* Some take their tiles by a counter, which is cleared ahead of them: by the first node of a graph,
 * or behind a fill. */
static void a_captured_product_has_the_bits_of_an_issued_one(void **state)
{
    (void)state;
    NEEDS_GPU();
    for (int i = 0; i < 2 * PRODUCTS; i++) {
        struct product p = products[i / 2];
        struct graph *graph = NULL;
        bool fills = i % 2 == 1;
        p.T = MOST_T;
        product_open(&p);
        product_run(&p);
        char *issued = p.out;
        assert_ok(mem_alloc(&p.out, p.out_bytes));
        assert_ok(stream_capture_begin(s));
        if (fills)
            assert_ok(device_fill(s, p.dout.data, 0, p.out_bytes));
        product_issue(&p);
        assert_ok(stream_capture_end(s, &graph));
        for (int launch = 0; launch < 3; launch++) {
            assert_ok(device_fill(s, p.dout.data, 0, p.out_bytes));
            assert_ok(graph_launch(s, graph));
            product_fetch(&p);
            assert_memory_equal(p.out, issued, p.out_bytes);
        }
        graph_close(&graph);
        mem_free(&issued);
        product_release(&p);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(a_measured_plan_is_right_and_comes_back_from_its_text, forget),
        cmocka_unit_test_teardown(without_time_a_plan_has_the_first_candidates, forget),
        cmocka_unit_test_teardown(products_that_a_plan_lacks_take_the_librarys_choice, forget),
        cmocka_unit_test_teardown(beside_collectives_products_have_two_algorithms, forget),
        cmocka_unit_test_teardown(the_part_of_a_pass_says_which_algorithm_a_product_takes, forget),
        cmocka_unit_test_teardown(algorithms_that_do_not_fit_are_refused, forget),
        cmocka_unit_test_teardown(a_captured_product_has_the_bits_of_an_issued_one, forget),
    };
    return cmocka_run_group_tests(tests, open_gpu, close_gpu);
}
