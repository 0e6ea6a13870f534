/*
 * The start of a run whose ranks are still being connected: what a rank does alone meanwhile leaves
 * nothing behind, and no collective comes before all are there. With NCCL: tests/cuda_nccl.c.
 */
#include <pthread.h>
#include <string.h>

#include "comm/imitate.h"
#include "comm/skip.h"
#include "engine/base/arena.h"
#include "engine/train/capture.h"
#include "tests/support/ranks.h"
#include "tests/support/run.h"

static struct scratch scratch;

static struct run_config tiny(int ranks, int stage)
{
    return run_tiny_with(
        &scratch,
        (struct tiny_run){.ranks = ranks, .stage = stage, .accum = 2, .steps = 4, .eval = true});
}

/* ---- alone ----------------------------------------------------------------------------------- */

static int left_behind; /* atomic: ranks whose weights or moments were no longer zero */

enum { VIEWS = 6 };

struct piece {
    void *at; /* NULL: there is none */
    size_t bytes;
};

/* What a rank has of a unit's weights, which are fp32 here, and moments; some lie in others. */
static void pieces_of(struct piece p[VIEWS], const struct trainer *t, int unit)
{
    struct shard_view v = executor_shard(&t->executor, unit);
    size_t shard = (size_t)v.numel * sizeof(float);
    size_t whole = (size_t)t->setup.layout.units[unit].padded_numel * sizeof(float);
    const struct piece all[VIEWS] = {{v.param_shard, shard}, {v.param_whole, whole},
                                     {v.adam_m, shard},      {v.adam_m_whole, whole},
                                     {v.adam_v, shard},      {v.adam_v_whole, whole}};
    memcpy(p, all, sizeof all);
}

static bool is_zero(const struct piece *p)
{
    for (size_t i = 0; p->at != NULL && i < p->bytes; i++)
        if (((const char *)p->at)[i] != 0)
            return false;
    return true;
}

/* The rehearsal's place is before the weights, so they are put aside for it. */
static void rehearse_alone(void *context, struct trainer *t)
{
    char *kept = NULL;
    size_t bytes = t->account.persistent_bytes;
    (void)context;
    enum status st = mem_alloc(&kept, bytes);
    if (st == ST_OK) {
        memcpy(kept, t->executor.arena, bytes);
        memset(t->executor.arena, 0, bytes);
        st = capture_rehearse_alone(t);
    }
    bool zero = st == ST_OK;
    struct piece p[VIEWS];
    for (int u = 0; st == ST_OK && u < t->setup.layout.unit_count; u++) {
        pieces_of(p, t, u);
        for (int i = 0; i < VIEWS; i++)
            zero &= is_zero(&p[i]);
    }
    /* These alone are put back, so that the run goes on with all else that the rehearsal left. */
    for (int u = 0; st == ST_OK && u < t->setup.layout.unit_count; u++) {
        pieces_of(p, t, u);
        for (int i = 0; i < VIEWS; i++)
            if (p[i].at != NULL)
                memcpy(p[i].at, kept + ((char *)p[i].at - t->executor.arena), p[i].bytes);
    }
    __atomic_add_fetch(&left_behind, zero ? 0 : 1, __ATOMIC_SEQ_CST);
    mem_free(&kept);
}

/* The recorder took the rehearsal for a step, so the runs are compared by what they end with. */
static void assert_same_end(const struct run_trace *a, const struct run_trace *b)
{
    assert_int_equal(a->steps + 1, b->steps);
    assert_memory_equal(&a->step[0][a->steps - 1].loss, &b->step[0][b->steps - 1].loss,
                        sizeof a->step[0][0].loss);
    for (int u = 0; u < a->unit_count; u++) {
        size_t bytes = (size_t)a->unit[u].numel * sizeof(float);
        assert_memory_equal(a->unit[u].master, b->unit[u].master, bytes);
        assert_memory_equal(a->unit[u].m, b->unit[u].m, bytes);
        assert_memory_equal(a->unit[u].v, b->unit[u].v, bytes);
    }
}

static void a_rehearsal_alone_leaves_the_state_and_the_run_as_they_are(void **state)
{
    (void)state;
    for (int stage = 0; stage <= 3; stage++)
        for (int ranks = 2; ranks <= 3; ranks++) {
            static struct run_trace plain, rehearsed;
            struct run_config c = tiny(ranks, stage);
            run_ok(&plain, &c, NULL);
            run_ok(&rehearsed, &c, &(struct run_how){.at_start = rehearse_alone});
            assert_int_equal(left_behind, 0);
            assert_same_end(&plain, &rehearsed);
            run_release(&plain);
            run_release(&rehearsed);
        }
}

/* ---- before the ranks are connected ---------------------------------------------------------- */

static const struct comm_ops *local_ops;
static struct comm_ops slow_ops;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int met, told; /* under the lock: ranks that were connected; comm_abort() */

static enum status meet(struct comm *comm)
{
    pthread_mutex_lock(&lock);
    met += comm->opening;
    pthread_mutex_unlock(&lock);
    comm->opening = false;
    return ST_OK;
}

static enum status early(const struct comm *comm)
{
    return comm->opening ? FAIL(CORRUPT, "a collective before comm_ready()") : ST_OK;
}

static enum status gather_late(struct comm *comm, struct stream *s, void *out, const void *in,
                               int64_t numel, enum dtype dtype, struct event *done)
{
    TRY(early(comm));
    return local_ops->all_gather(comm, s, out, in, numel, dtype, done);
}

static enum status reduce_late(struct comm *comm, struct stream *s, void *out, const void *in,
                               int64_t numel, enum dtype dtype, struct event *done)
{
    TRY(early(comm));
    return local_ops->reduce_scatter(comm, s, out, in, numel, dtype, done);
}

static enum status broadcast_late(struct comm *comm, struct stream *s, void *data, int64_t numel,
                                  enum dtype dtype, int root, struct event *done)
{
    TRY(early(comm));
    return local_ops->broadcast(comm, s, data, numel, dtype, root, done);
}

static void note_abort(struct comm *comm, const char *cause)
{
    pthread_mutex_lock(&lock);
    told++;
    pthread_mutex_unlock(&lock);
    local_ops->abort(comm, cause);
}

/* A communicator of threads whose ranks are connected only when all wait for it. */
static enum status make_slow(void *context, struct comm **comm)
{
    (void)context;
    pthread_mutex_lock(&lock);
    if (local_ops == NULL) {
        local_ops = (*comm)->ops;
        slow_ops = *local_ops;
        slow_ops.ready = meet;
        slow_ops.all_gather = gather_late;
        slow_ops.reduce_scatter = reduce_late;
        slow_ops.broadcast = broadcast_late;
        slow_ops.abort = note_abort;
    }
    pthread_mutex_unlock(&lock);
    (*comm)->ops = &slow_ops;
    (*comm)->opening = true;
    return ST_OK;
}

static void no_collective_of_a_run_comes_before_the_ranks_are_connected(void **state)
{
    (void)state;
    for (int stage = 0; stage <= 3; stage++) {
        struct run_config c = tiny(3, stage);
        struct run_data data = {0};
        struct run_options options = {.quiet = true, .wrap_comm = make_slow};
        met = 0;
        assert_ok(config_check(&c));
        assert_ok(run_data_load(&data, &c, true));
        assert_ok(run_local(&c, &data, &options, NULL));
        run_data_release(&data);
        assert_int_equal(met, 3);
    }
}

/* ---- a communicator beside another ----------------------------------------------------------- */

static enum status collect_alone(struct comm *comm, void *argument)
{
    enum { N = 5, WORLD = 3 };
    enum status st = ST_OK;
    float mine[N] = {1, 2, 3, 4, 5}, all[N * WORLD], sum[N];
    int32_t number = 7, numbers[WORLD] = {0}, texts[WORLD] = {0};
    struct comm *beside = NULL;
    struct device *device = NULL;
    struct event done = {0};
    (void)argument;
    TRY(make_slow(NULL, &comm));
    TRY(device_open(&device, DEVICE_CPU, PRECISION_AUTO, 0, 1));
    TRY_GOTO(st, out, event_open(device, &done));
    TRY_GOTO(st, out, skip_beside(&beside, comm));
    struct stream *s = &device->streams[STREAM_COMPUTE];
    TRY_GOTO(st, out, comm_ready(beside));
    TRY_GOTO(st, out, comm_all_gather(beside, s, all, mine, N, DTYPE_F32, &done));
    TRY_GOTO(st, out, comm_all_gather(beside, s, numbers, &number, 1, DTYPE_I32, &done));
    TRY_GOTO(st, out, comm_reduce_scatter(beside, s, sum, all, N, DTYPE_F32, &done));
    TRY_GOTO(st, out, comm_broadcast(beside, s, mine, N, DTYPE_F32, 1, &done));
    TRY_GOTO(st, out, event_wait(&done));
    TRY_GOTO(st, out, comm_exchange(beside, texts, &number, sizeof number));
    TRY_GOTO(st, out, comm_barrier(beside));
    TRY_GOTO(st, out, comm_progress(beside));
    for (int r = 0; r < WORLD; r++)
        if (memcmp(all + (size_t)r * N, mine, sizeof mine) != 0 || numbers[r] != number ||
            texts[r] != number)
            st = FAIL(CORRUPT, "rank %d: of rank %d it is not what this one sent", comm->rank, r);
    if (memcmp(sum, mine, sizeof sum) != 0 || !comm->opening)
        st = FAIL(CORRUPT, "rank %d: the sum, or the other communicator, changed", comm->rank);
out:
    comm_close(&beside);
    event_close(&done);
    device_close(&device);
    return st;
}

static enum status abort_beside(struct comm *comm, void *argument)
{
    struct comm *beside = NULL;
    (void)argument;
    TRY(make_slow(NULL, &comm));
    TRY(skip_beside(&beside, comm));
    comm_abort(beside, "the disk is full");
    comm_close(&beside);
    return comm_barrier(comm);
}

static void a_communicator_beside_another_reaches_nobody_but_to_abort(void **state)
{
    (void)state;
    met = told = 0;
    ranks_run_ok(3, collect_alone, NULL);
    assert_int_equal(met, 0);
    assert_int_equal(told, 0);
    struct ranks ranks = {.world_size = 2, .timeout_ms = 10000, .body = abort_beside};
    ranks_run(&ranks);
    ranks_assert(&ranks, 0, ST_COMM, "the disk is full");
    ranks_assert(&ranks, 1, ST_COMM, "the disk is full");
    assert_true(told >= 2);
}

static enum status skip_a_slow_one(struct comm *comm, void *argument)
{
    struct comm *skip = comm;
    (void)argument;
    TRY(make_slow(NULL, &comm));
    TRY(skip_open(&skip));
    bool before = skip->opening;
    enum status st = comm_ready(skip);
    if (st == ST_OK && (!before || skip->opening || comm->opening))
        st = FAIL(CORRUPT, "rank %d: opening before %d, after %d", comm->rank, before,
                  skip->opening);
    mem_free(&skip); /* closing it would close the other too */
    return st;
}

static void what_wraps_a_communicator_is_ready_when_that_is(void **state)
{
    (void)state;
    met = 0;
    ranks_run_ok(2, skip_a_slow_one, NULL);
    assert_int_equal(met, 2);
}

/* ---- a rank that plays one of several -------------------------------------------------------- */

static const struct imitate_links four = {
    .ranks = 4, .gather_per_second = 1e9, .reduce_per_second = 1e9};

static enum status collect_as_four(struct comm *comm, void *argument)
{
    enum { N = 5, WORLD = 4 };
    enum status st = ST_OK;
    float mine[N] = {1, 2, 3, 4, 5}, all[N * WORLD], sum[N];
    int32_t number = 7, numbers[WORLD] = {0};
    struct comm *played = NULL;
    struct device *device = NULL;
    struct event done = {0};
    (void)argument;
    TRY(device_open(&device, DEVICE_CPU, PRECISION_AUTO, 0, 1));
    TRY_GOTO(st, out, event_open(device, &done));
    TRY_GOTO(st, out, skip_beside(&played, comm)); /* it may be closed */
    TRY_GOTO(st, out, imitate_open(&played, &four));
    struct stream *s = &device->streams[STREAM_COMPUTE];
    TRY_GOTO(st, out, comm_ready(played));
    TRY_GOTO(st, out, comm_all_gather(played, s, all, mine, N, DTYPE_F32, &done));
    all[0] = 9; /* of those that are summed only this rank's count */
    TRY_GOTO(st, out, comm_reduce_scatter(played, s, sum, all, N, DTYPE_F32, &done));
    TRY_GOTO(st, out, event_wait(&done));
    TRY_GOTO(st, out, comm_exchange(played, numbers, &number, sizeof number));
    TRY_GOTO(st, out, comm_barrier(played));
    TRY_GOTO(st, out, comm_progress(played));
    bool right = played->rank == 0 && played->world_size == WORLD && sum[0] == 9 && sum[4] == 5;
    for (int r = 0; r < WORLD; r++)
        right = right && numbers[r] == number && all[r * N + 4] == 5 && (r == 0 || all[r * N] == 1);
    if (!right)
        st = FAIL(CORRUPT, "a collective moved something else");
out:
    comm_close(&played);
    event_close(&done);
    device_close(&device);
    return st;
}

static enum status play_four(void *context, struct comm **comm)
{
    (void)context;
    return imitate_open(comm, &four);
}

static enum status play_among_two(struct comm *comm, void *argument)
{
    (void)argument;
    return imitate_open(&comm, &four);
}

static void a_rank_alone_collects_as_if_all_ranks_were_alike(void **state)
{
    (void)state;
    ranks_run_ok(1, collect_as_four, NULL);
}

static void a_rank_alone_has_the_run_of_one_of_several(void **state)
{
    (void)state;
    for (int stage = 0; stage <= 3; stage++) {
        struct run_config c = tiny(1, stage);
        struct run_data data = {0};
        struct run_options options = {.quiet = true, .wrap_comm = play_four};
        assert_ok(config_check(&c));
        assert_ok(run_data_load(&data, &c, true));
        assert_ok(run_local(&c, &data, &options, NULL));
        run_data_release(&data);
    }
}

static void links_and_ranks_that_cannot_be_played_are_refused(void **state)
{
    struct imitate_links wrong = four;
    struct comm alone = {.world_size = 1}, *comm = &alone;
    (void)state;
    struct ranks ranks = {.world_size = 2, .timeout_ms = 10000, .body = play_among_two};
    ranks_run(&ranks);
    ranks_assert(&ranks, 0, ST_INVALID, "but 2 are there");
    wrong.ranks = 1;
    assert_fails(imitate_open(&comm, &wrong), ST_INVALID, "one of 1 ranks cannot be played");
    wrong.ranks = COMM_MAX_WORLD_SIZE + 1;
    assert_fails(imitate_open(&comm, &wrong), ST_INVALID, "cannot be played");
    wrong = four;
    wrong.reduce_per_second = 0;
    assert_fails(imitate_open(&comm, &wrong), ST_INVALID, "without a rate");
    assert_ptr_equal(comm, &alone);
}

static int set_up(void **state)
{
    static const struct made_questions train = {
        .count = 24, .min_words = 5, .max_words = 30, .question_words = 4, .seed = 11};
    static const struct made_questions eval = {
        .count = 7, .min_words = 5, .max_words = 30, .question_words = 4, .seed = 12};
    return run_set_up(state, &scratch, &train, &eval);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_rehearsal_alone_leaves_the_state_and_the_run_as_they_are),
        cmocka_unit_test(no_collective_of_a_run_comes_before_the_ranks_are_connected),
        cmocka_unit_test(a_communicator_beside_another_reaches_nobody_but_to_abort),
        cmocka_unit_test(what_wraps_a_communicator_is_ready_when_that_is),
        cmocka_unit_test(a_rank_alone_collects_as_if_all_ranks_were_alike),
        cmocka_unit_test(a_rank_alone_has_the_run_of_one_of_several),
        cmocka_unit_test(links_and_ranks_that_cannot_be_played_are_refused),
    };
    return cmocka_run_group_tests(tests, set_up, run_tear_down);
}
