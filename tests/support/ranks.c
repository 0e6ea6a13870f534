#include "tests/support/ranks.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "comm/local.h"
#include "engine/base/arena.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "tests/support/support.h"

struct thread {
    pthread_t id;
    struct ranks *ranks;
    struct local_world *world;
    int rank;
};

void sleep_ms(int64_t ms)
{
    clock_pause_us(ms * 1000);
}

enum status finish(struct event *e)
{
    if (e->complete != NULL)
        TRY(e->complete(e->context, e->ticket));
    e->complete = NULL;
    return ST_OK;
}

static enum status open_comm(struct comm **out, const struct thread *t)
{
    TRY(local_comm_open(out, t->world, t->rank));
    if (t->ranks->plan != NULL) {
        struct comm *inner = *out;
        TRY(fault_comm_open(out, inner, t->ranks->plan[t->rank]));
    }
    return ST_OK;
}

static void *rank_main(void *argument)
{
    struct thread *t = argument;
    struct ranks *ranks = t->ranks;
    struct comm *comm = NULL;
    log_set_rank(t->rank);
    enum status st = open_comm(&comm, t);
    if (st == ST_OK)
        st = ranks->body(comm, ranks->argument);
    if (st == ST_CORRUPT)
        comm_abort(comm, "a check of the test failed");
    comm_close(&comm);
    ranks->st[t->rank] = st;
    snprintf(ranks->message[t->rank], sizeof ranks->message[0], "%s",
             st == ST_OK ? "" : status_message());
    return NULL;
}

void ranks_run(struct ranks *ranks)
{
    struct thread thread[RANKS_MAX];
    struct local_world *world = NULL;
    assert_in_range(ranks->world_size, 1, RANKS_MAX);
    int64_t live = mem_live_bytes(), start = clock_ms();
    assert_int_equal(local_world_open(&world, ranks->world_size, ranks->timeout_ms), ST_OK);
    for (int r = 0; r < ranks->world_size; r++) {
        thread[r] = (struct thread){.ranks = ranks, .world = world, .rank = r};
        assert_int_equal(pthread_create(&thread[r].id, NULL, rank_main, &thread[r]), 0);
    }
    for (int r = 0; r < ranks->world_size; r++)
        pthread_join(thread[r].id, NULL);
    local_world_close(&world);
    ranks->ms = clock_ms() - start;
    for (int r = 0; mem_live_bytes() != live && r < ranks->world_size; r++)
        print_error("memory is left; rank %d: %s\n", r, ranks->message[r]);
    assert_int_equal(mem_live_bytes(), live);
}

void ranks_assert(const struct ranks *ranks, int rank, enum status st, const char *text)
{
    if (ranks->st[rank] == st && strstr(ranks->message[rank], text) != NULL)
        return;
    print_error("rank %d: expected %s with \"%s\", got %s: %s\n", rank, status_name(st), text,
                status_name(ranks->st[rank]), ranks->message[rank]);
    fail();
}

void ranks_run_ok(int world_size, enum status (*body)(struct comm *comm, void *argument),
                  void *argument)
{
    struct ranks ranks = {
        .world_size = world_size, .timeout_ms = 60000, .body = body, .argument = argument};
    ranks_run(&ranks);
    for (int r = 0; r < world_size; r++)
        ranks_assert(&ranks, r, ST_OK, "");
}
